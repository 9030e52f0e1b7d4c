"""AdamW and the gradient norm over local shards: each element is counted once, and updated where it is stored."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from .errors import ConfigError

_PART = 1 << 24  # elements that are updated together: narrow moments are widened a part at a time
_TINY = torch.finfo(torch.float32).tiny  # a smaller eps would be 0
_MOST_BETA = 0.98  # with a larger beta a moment in bfloat16 stands still while the true one moves by 20% and more

Slice = tuple[str, slice]  # of a parameter, flat


def within(value: object, low: float, high: float = math.inf) -> bool:
    """Whether it is a number of at least `low` and below `high`; NaN is not."""
    return isinstance(value, int | float) and low <= value < high


@dataclass(frozen=True)
class Settings:
    """`state`: the dtype in which both moments are stored. None: that of the parameters."""

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    state: torch.dtype | None = None

    def __post_init__(self) -> None:
        betas: object = self.betas
        if not isinstance(betas, tuple | list) or [within(beta, 0, 1) for beta in betas] != [True, True]:
            raise ConfigError(f"betas={self.betas!r} must be two numbers from 0 to below 1")
        if not within(self.eps, _TINY):
            raise ConfigError(f"eps={self.eps!r} must be a number of {_TINY:.2g} or more")
        if not within(self.weight_decay, 0):
            raise ConfigError(f"weight_decay={self.weight_decay!r} must be a number of 0 or more")
        if self.state not in (None, torch.bfloat16, torch.float32):
            raise ConfigError(f"state_dtype={self.state} is not offered; choose torch.bfloat16 or torch.float32")
        if self.state == torch.bfloat16 and max(self.betas) > _MOST_BETA:
            raise ConfigError(
                f"state_dtype=torch.bfloat16 with betas={self.betas}: the change of a moment in a step would be "
                f"rounded away; choose betas of at most {_MOST_BETA}, or torch.float32"
            )


def squares(grads: Mapping[str, Tensor], owned: Container[str], device: torch.device) -> Tensor:
    """Sum of squares of the gradient elements that this rank owns, in float64."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for name, grad in grads.items():
        if name in owned:
            parts = [part.double().square().sum() for part in grad.reshape(-1).split(_PART)]
            total += torch.stack(parts).sum().to(device)
    return total


class AdamW:
    """Keeps the moments of the parameters that are trained. The parameters themselves are given to every step: so an
    update is written where the next forward reads."""

    def __init__(self, decayed: Container[str], settings: Settings) -> None:
        self.settings, self.decayed, self.steps = settings, decayed, 0
        self.moments: dict[str, tuple[Tensor, Tensor]] = {}  # made by the first step: until then none takes memory

    def make_moments(self, stored: Mapping[str, Tensor]) -> None:
        """Those that are not there yet. An empty piece has none."""
        kind = self.settings.state
        for name, tensor in stored.items():
            if tensor.numel() and name not in self.moments:
                self.moments[name] = (torch.zeros_like(tensor, dtype=kind), torch.zeros_like(tensor, dtype=kind))

    @torch.no_grad()
    def step(self, stored: Mapping[str, Tensor], grads: Mapping[str, Tensor], lr: float) -> None:
        """Update what is stored of the parameters that have gradients."""
        stored = {name: t for name, t in stored.items() if name in grads and t.numel()}
        self.make_moments(stored)
        for decays, decay in ((True, self.settings.weight_decay), (False, 0.0)):
            for part in _parts({name: t for name, t in stored.items() if (name in self.decayed) == decays}):
                self._update(part, stored, grads, lr, decay)
        self.steps += 1

    def _update(
        self, part: list[Slice], stored: Mapping[str, Tensor], grads: Mapping[str, Tensor], lr: float, decay: float
    ) -> None:
        views = [stored[name].view(-1)[at] for name, at in part]
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


def _parts(stored: Mapping[str, Tensor]) -> Iterator[list[Slice]]:
    """Slices of flat parameters: of one device, and at most `_PART` elements together."""
    part: list[Slice] = []
    left, device = 0, None
    for name, view in stored.items():
        for start in range(0, view.numel(), _PART):
            stop = min(start + _PART, view.numel())
            if part and (stop - start > left or view.device != device):
                yield part
                part = []
            left, device = (left if part else _PART) - (stop - start), view.device
            part.append((name, slice(start, stop)))
    if part:
        yield part
