"""The router's balance over a step: the slope of its aux loss for each micro-batch, and the load of every expert.

"pooled" is transformers' formula over the micro-batch of all data ranks and all layers. Its value depends on how a step
is cut into micro-batches. "previous" takes each expert's share from the step before. It does not depend on the cut, and
needs no collective within a step.
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


def pooled_counts(balance: Balance) -> Sum:
    """Made once a micro-batch, where the aux loss is trained with "pooled"."""
    return Sum("the router's pooled counts", TOKENS, 8 * balance.num_experts)


def step_load(balance: Balance) -> Sum:
    """Made once a step, where there are experts."""
    return Sum("the load of the experts", DENSE, 8 * balance.num_experts * balance.num_layers)


def refuse_pooled(router: Router, pp: int) -> None:
    """Its counts are of all layers of one micro-batch, which are never at work together in a pipeline."""
    if pp > 1 and router.mode == "pooled" and router.balance.coefficient and router.balance.num_layers:
        raise ConfigError(
            f'router_aux="pooled" pools all layers of a micro-batch, which pp={pp} works on at different times; choose '
            'router_aux="previous"'
        )


class Router:
    """`set_slope` between forward and backward of a micro-batch, `sum_load` after the step, `forget` if it failed."""

    def __init__(self, balance: Balance, mesh: Mesh, mode: str) -> None:
        if mode not in MODES:
            raise ConfigError(f"router_aux={mode!r} is unknown; choose from {', '.join(MODES)}")
        self.balance, self.mesh, self.mode = balance, mesh, mode
        shape = (balance.num_layers, balance.num_experts)
        self.load_LE = torch.zeros(shape, dtype=torch.float64, device=mesh.device)  # of the last step, all ranks
        self._trained_LE = torch.zeros_like(self.load_LE)  # of the last one that was applied
        self._here_LE = torch.zeros_like(self.load_LE)

    def set_slope(self, step_tokens: int, num_batches: int) -> Tensor:
        """Now that counts are known: how backward pushes each expert. Returns this rank's share of the aux loss."""
        balance = self.balance
        for layer, counts_E in balance.counts.items():  # those of the stage that has just run
            self._here_LE[layer] += counts_E.double()
        if not balance.coefficient or not balance.counts:
            return torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        pooled_E = torch.stack([counts_E.double() for counts_E in balance.counts.values()]).sum(0)
        if self.mode == "pooled":
            share_E, num = self._pooled(pooled_E)
            weight_E = share_E / num / num_batches
        else:
            weight_E = self._previous() / (step_tokens * balance.num_layers)
        balance.slope_E = balance.coefficient * balance.num_experts * weight_E
        return (balance.slope_E * torch.stack([p.double() for p in balance.probs.values()]).sum(0)).sum()

    def _pooled(self, counts_E: Tensor) -> tuple[Tensor, Tensor]:
        """Each expert's share of the routed tokens of this micro-batch, over layers and ranks; how many those are."""
        self.mesh.all_reduce_(counts_E, pooled_counts(self.balance))
        num = (counts_E.sum() / self.balance.top_k).clamp_min(1)
        return counts_E / num, num

    def _previous(self) -> Tensor:
        """The same share, in the step before. In the first step all experts have the same, which pushes no token."""
        total = self._trained_LE.sum()
        even = torch.full_like(self._trained_LE[0], self.balance.top_k / self.balance.num_experts)
        return torch.where(total > 0, self._trained_LE.sum(0) * self.balance.top_k / total.clamp_min(1), even)

    def sum_load(self) -> None:
        """The load of every expert over the step and all ranks, by layer."""
        if self.balance.num_layers:
            self.load_LE = self.mesh.all_reduce_(self._here_LE, step_load(self.balance))
            self.forget()

    def trained(self) -> None:
        """The step was applied: now it is the step before."""
        self._trained_LE = self.load_LE

    @property
    def trained_load(self) -> Tensor:
        """What "previous" takes the shares from: all that the router remembers between two steps."""
        return self._trained_LE

    def resume(self, load: Sequence[Sequence[float]]) -> None:
        """Go on after a step of this load."""
        self.forget()
        self._trained_LE = torch.tensor(load, dtype=torch.float64, device=self.mesh.device).view_as(self._here_LE)
        self.load_LE = self._trained_LE.clone()

    def forget(self) -> None:
        """Forget what was counted since the last `sum_load`."""
        self._here_LE = torch.zeros_like(self.load_LE)
