"""The router's balance over a step: the slope of its aux loss for each micro-batch, and the load of every expert.

`pooled` is transformers' formula over the micro-batch of all data ranks and all layers; its value depends on how a step
is cut into micro-batches. `previous` takes each expert's share from the step before: it does not depend on the cut, and
needs no exchange within a step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..data import Batch
from ..errors import ConfigError
from ..mesh import Mesh
from ..models import Balance

MODES = ("pooled", "previous")
_AXES = ("replicate", "fsdp", "cp", "tp")


class Router:
    """`begin` before a micro-batch's forward, `end` after it, `close` after the step; `forget` one that failed."""

    def __init__(self, balance: Balance, mesh: Mesh, mode: str) -> None:
        if mode not in MODES:
            raise ConfigError(f"router_aux={mode!r} is unknown; choose from {', '.join(MODES)}")
        self.balance, self.mesh, self.mode = balance, mesh, mode
        shape = (balance.num_layers, balance.num_experts)
        self.load_LE = torch.zeros(shape, dtype=torch.float64, device=mesh.device)  # of the last step, all ranks
        self._trained_LE = torch.zeros_like(self.load_LE)  # of the last one that was applied
        self._here_LE = torch.zeros_like(self.load_LE)

    def begin(self, batch: Batch) -> None:
        lo, hi = self.mesh.token_range(len(batch))
        self.balance.begin(torch.arange(lo, hi, device=self.mesh.device) < len(batch) - batch.num_filler)

    def end(self, step_tokens: int, num_batches: int) -> Tensor:
        """Set the slope, now that the counts are known. Returns this rank's share of the aux loss."""
        balance = self.balance
        counts_LE = [balance.counts[layer].double() for layer in range(balance.num_layers)]
        if counts_LE:
            self._here_LE += torch.stack(counts_LE)
        if not balance.coefficient or not counts_LE:
            return torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        pooled_E = torch.stack(counts_LE).sum(0)
        if self.mode == "pooled":
            share_E, num = self._pooled(pooled_E)
            weight_E = share_E / num / num_batches
        else:
            weight_E = self._previous() / (step_tokens * balance.num_layers)
        balance.slope_E = balance.coefficient * balance.num_experts * weight_E
        return (balance.slope_E * torch.stack([p.double() for p in balance.probs.values()]).sum(0)).sum()

    def _pooled(self, counts_E: Tensor) -> tuple[Tensor, Tensor]:
        """Of this micro-batch, all ranks: how often each expert is chosen a token and layer; the number of those."""
        self.mesh.sum_(counts_E, _AXES, "the router's pooled counts")
        num = (counts_E.sum() / self.balance.top_k).clamp_min(1)
        return counts_E / num, num

    def _previous(self) -> Tensor:
        """The same of the step before; in the first step all experts are alike, which pushes nobody."""
        total = self._trained_LE.sum()
        even = torch.full_like(self._trained_LE[0], self.balance.top_k / self.balance.num_experts)
        return torch.where(total > 0, self._trained_LE.sum(0) * self.balance.top_k / total.clamp_min(1), even)

    def close(self) -> Tensor | None:
        """The load of every expert over the step and all ranks, by layer."""
        if not self.balance.num_layers:
            return None
        self.load_LE = self.mesh.sum_(self._here_LE, _AXES, "the load of the experts")
        self.forget()
        return self.load_LE

    def trained(self) -> None:
        """The step was applied, and is now the one before."""
        self._trained_LE = self.load_LE

    def forget(self) -> None:
        """What has been counted since the last `close`."""
        self._here_LE = torch.zeros_like(self.load_LE)
