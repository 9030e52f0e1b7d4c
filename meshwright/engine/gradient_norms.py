"""Global gradient norms for clipping: one of the model, and another of an MTP head that is clipped separately."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, stack

from ..optim import Clip, squares
from .model import Model
from .step_results import norm_sum


class GradientNorms:
    """Computes global norms from the pieces that each rank stores. `apart`: the parameters with a norm of their own.

    Every element of the model counts once: its owner adds it, and other holders of the same element do not. torch's
    clip_grad_norm_ would count replicated elements several times.
    """

    def __init__(self, model: Model, apart: frozenset[str]) -> None:
        self.model, self.apart = model, apart

    def groups(self, grads: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """Return gradients in the groups that have a norm."""
        trunk = {name: grad for name, grad in grads.items() if name not in self.apart}
        return [trunk, {name: grads[name] for name in grads if name in self.apart}] if self.apart else [trunk]

    def reduced(self, grads: Mapping[str, Tensor]) -> Tensor:
        """All-reduce the norm of each group; it stays on the device."""
        mesh = self.model.mesh
        sums = stack([squares(group, self.model.owned, mesh.device) for group in self.groups(grads)])
        return mesh.all_reduce_(sums, norm_sum(self.model.recipe)).sqrt()

    def on_host(self, grads: Mapping[str, Tensor]) -> list[float]:
        """All-reduce the norm of each group, and wait for it."""
        numbers: list[float] = self.model.mesh.to_host([self.reduced(grads)])[0].tolist()
        return numbers

    def clip(self, norms: Tensor, max_norm: float, finite: Callable[[], object]) -> Clip:
        """Return the clipping of a fused update."""
        return Clip(norms[0], max_norm, finite, dict.fromkeys(self.apart, norms[-1]))
