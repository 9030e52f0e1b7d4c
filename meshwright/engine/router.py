"""Load balancing of experts over a step: the gradient of the router's aux loss, and the load of every expert.

The aux loss of Switch (arXiv 2101.03961) is coefficient * E * sum over experts of f_e * P_e. f_e is the share of tokens
routed to expert e, which has no gradient; P_e is its mean router probability, which has one. So each probability of
expert e gets the same gradient, the slope, as soon as the counts are known.

"pooled" takes f_e from the micro-batch of all data ranks and all layers, as transformers does. Its value depends on how
a step is split into micro-batches. "previous" takes f_e from the step before. It does not depend on the split, and
needs no collective within a step.

Shapes: L layers with experts, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..axes import DENSE, TOKENS, Sum
from ..errors import ConfigError
from ..mesh import Mesh
from ..models import Balance

MODES = ("pooled", "previous")


def pooled_counts(balance: Balance, label: str = "") -> Sum:
    """Return the all-reduce of routed token counts, once per micro-batch, if the "pooled" aux loss is trained."""
    return Sum(f"{label}the router's pooled counts", TOKENS, 8 * balance.num_experts)


def step_load(balance: Balance, label: str = "") -> Sum:
    """Return the all-reduce of the expert load, once per step, if the model has experts."""
    return Sum(f"{label}the load of the experts", DENSE, 8 * balance.num_experts * balance.num_layers)


def refuse_pooled(router: Router, pp: int) -> None:
    """Refuse "pooled" with pipeline parallelism: it needs the counts of all layers of a micro-batch at once, and stages
    run them at different times."""
    if pp > 1 and router.mode == "pooled" and router.balance.coefficient and router.balance.num_layers:
        raise ConfigError(
            f'router_aux="pooled" needs all layers of a micro-batch at once, and pp={pp} runs them at different times; '
            'choose router_aux="previous"'
        )


class Router:
    """Counts the tokens of each expert and sets the gradient of the aux loss.

    The engine calls `set_slope` between forward and backward of each micro-batch, `sum_load` after the last one, then
    `trained` when the update is applied, or `forget` if the step failed.
    """

    def __init__(self, balance: Balance, mesh: Mesh, mode: str, label: str = "") -> None:
        """`label`: stands before the names of the collectives, where a model has two routers."""
        if mode not in MODES:
            raise ConfigError(f"router_aux={mode!r} is unknown; choose from {', '.join(MODES)}")
        self.balance, self.mesh, self.mode, self.label = balance, mesh, mode, label
        shape = (balance.num_layers, balance.num_experts)
        # Load over all ranks: of the last step that ran, and of the last one whose update was applied. They differ if a
        # step was discarded, and "previous" must not use its counts.
        self.load_LE = torch.zeros(shape, dtype=torch.float64, device=mesh.device)
        self._trained_LE = torch.zeros_like(self.load_LE)
        self._local_LE = torch.zeros_like(self.load_LE)

    def set_slope(self, step_tokens: int, num_batches: int) -> Tensor:
        """Set the gradient of each expert's probability for the coming backward, from the counts of the forward that
        has just run. Return this rank's share of the aux loss."""
        balance = self.balance
        for layer, counts_E in balance.counts.items():  # only the layers of the stage that has just run
            self._local_LE[layer] += counts_E.double()
        if not balance.coefficient or not balance.counts:
            return torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        pooled_E = torch.stack([counts_E.double() for counts_E in balance.counts.values()]).sum(0)
        if self.mode == "pooled":
            share_E, num = self._pooled(pooled_E)
            weight_E = share_E / num / num_batches
        else:
            weight_E = self._previous() / (max(step_tokens, 1) * balance.num_layers)
        balance.slope_E = balance.coefficient * balance.num_experts * weight_E
        return (balance.slope_E * torch.stack([p.double() for p in balance.probs.values()]).sum(0)).sum()

    def _pooled(self, counts_E: Tensor) -> tuple[Tensor, Tensor]:
        """Return each expert's share of the tokens of this micro-batch, and how many tokens those are, over all layers
        and ranks."""
        self.mesh.all_reduce_(counts_E, pooled_counts(self.balance, self.label))
        num = (counts_E.sum() / self.balance.top_k).clamp_min(1)
        return counts_E / num, num

    def _previous(self) -> Tensor:
        """Return each expert's share in the step before. In the first step all shares are equal: then the slopes are
        equal too, and since probabilities add up to 1, the router gets no gradient."""
        total = self._trained_LE.sum()
        even = torch.full_like(self._trained_LE[0], self.balance.top_k / self.balance.num_experts)
        return torch.where(total > 0, self._trained_LE.sum(0) * self.balance.top_k / total.clamp_min(1), even)

    def sum_load(self) -> None:
        """All-reduce the load of every expert over the step."""
        if self.balance.num_layers:
            self.load_LE = self.mesh.all_reduce_(self._local_LE, step_load(self.balance, self.label))
            self.forget()

    def trained(self) -> None:
        """Note that the update was applied: "previous" then uses the counts of this step."""
        self._trained_LE = self.load_LE

    @property
    def trained_load(self) -> Tensor:
        """Return the load that "previous" takes shares from: all state that the router has between two steps."""
        return self._trained_LE

    def resume(self, load: Sequence[Sequence[float]] | None = None) -> None:
        """Continue after a step with this load, from a checkpoint; without one, as before the first step."""
        self.forget()
        load = torch.zeros_like(self._local_LE).tolist() if load is None else load
        self._trained_LE = torch.tensor(load, dtype=torch.float64, device=self.mesh.device).view_as(self._local_LE)
        self.load_LE = self._trained_LE.clone()

    def forget(self) -> None:
        """Drop the counts since the last `sum_load`."""
        self._local_LE = torch.zeros_like(self.load_LE)
