"""AdamW and the gradient norm over local shards: each element is counted once, updated where it is stored."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from .errors import ConfigError

_PART = 1 << 24  # elements that are updated together: moments of a narrow dtype are widened a part at a time
_MOST = (
    0.98  # of a beta: with a longer memory a moment in bfloat16 stands still while the true one moves by 20% and more
)

Slice = tuple[str, slice]  # of a parameter, flat


@dataclass(frozen=True)
class Settings:
    """`state`: the dtype in which both moments are stored; of the parameters if None."""

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    state: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.state not in (None, torch.bfloat16, torch.float32):
            raise ConfigError(f"state_dtype={self.state} is not offered; choose torch.bfloat16 or torch.float32")
        if self.state == torch.bfloat16 and max(self.betas) > _MOST:
            raise ConfigError(
                f"state_dtype=torch.bfloat16 with betas={self.betas}: what a step changes of a moment would be rounded "
                f"away; choose betas of at most {_MOST}, or torch.float32"
            )


def squares(grads: Mapping[str, Tensor], owned: set[str], device: torch.device) -> Tensor:
    """Sum of squares of the gradient elements that this rank owns, in float64."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for name, grad in grads.items():
        if name in owned:
            parts = [part.double().square().sum() for part in grad.reshape(-1).split(_PART)]
            total += torch.stack(parts).sum().to(device)
    return total


class AdamW:
    """Over views that share storage with the parameters, so that the next forward sees every update."""

    def __init__(self, stored: Mapping[str, Tensor], decayed: set[str], settings: Settings) -> None:
        self.settings, self.decayed, self.trained, self.steps = settings, decayed, set(stored), 0
        self.views = {name: t.detach() for name, t in stored.items() if t.numel()}

    @functools.cached_property
    def moments(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Where the parameters lie. Made when first asked for: who never updates holds none."""
        narrow = self.settings.state
        return {
            name: (torch.zeros_like(t, dtype=narrow), torch.zeros_like(t, dtype=narrow))
            for name, t in self.views.items()
        }

    @torch.no_grad()
    def step(self, grads: Mapping[str, Tensor], lr: float) -> None:
        for decays, decay in ((True, self.settings.weight_decay), (False, 0.0)):
            for part in self._parts([name for name in self.views if (name in self.decayed) == decays]):
                self._update(part, grads, lr, decay)
        self.steps += 1

    def _parts(self, names: list[str]) -> Iterator[list[Slice]]:
        """Slices of flat parameters, of one device and at most `_PART` elements together."""
        part: list[Slice] = []
        room, device = 0, None
        for name in names:
            view = self.views[name]
            for start in range(0, view.numel(), _PART):
                stop = min(start + _PART, view.numel())
                if part and (stop - start > room or view.device != device):
                    yield part
                    part = []
                room, device = (room if part else _PART) - (stop - start), view.device
                part.append((name, slice(start, stop)))
        if part:
            yield part

    def _update(self, part: list[Slice], grads: Mapping[str, Tensor], lr: float, decay: float) -> None:
        views = [self.views[name].view(-1)[at] for name, at in part]
        kept = [[m.view(-1)[at] for m in self.moments[name]] for name, at in part]
        moments = [[m.to(view.dtype) for m in both] for view, both in zip(views, kept, strict=True)]
        beta1, beta2 = self.settings.betas
        steps = [torch.full((), self.steps, dtype=torch.float32, device=view.device) for view in views]
        adamw(
            views, [grads[name].reshape(-1)[at] for name, at in part], [m for m, _ in moments], [v for _, v in moments],
            [], steps, beta1=beta1, beta2=beta2, lr=lr, weight_decay=decay, eps=self.settings.eps,
            fused=True, amsgrad=False, maximize=False,
        )  # fmt: skip
        for narrow, wide in zip(kept, moments, strict=True):
            for at, moment in zip(narrow, wide, strict=True):
                if at is not moment:
                    at.copy_(moment)
