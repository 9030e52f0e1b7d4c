"""AdamW and the gradient norm over local shards: each element is counted once, updated where it is stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from .errors import ConfigError

_PART = 1 << 26  # elements that are updated together: moments of a narrow dtype are widened a part at a time


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
        if self.state == torch.bfloat16 and 1 - max(self.betas) <= torch.finfo(torch.bfloat16).eps / 2:
            raise ConfigError(
                f"state_dtype=torch.bfloat16 with betas={self.betas}: a moment that shrinks by less than 1/256 a step "
                "would be rounded back to what it was; choose betas of at most 0.996, or torch.float32"
            )


def squares(grads: Mapping[str, Tensor], owned: set[str], device: torch.device) -> Tensor:
    """Sum of squares of the gradient elements that this rank owns, in float64."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for name, grad in grads.items():
        if name in owned:
            total += grad.double().square().sum().to(device)
    return total


class AdamW:
    """Over views that share storage with the parameters, so that the next forward sees every update. The moments lie
    where the parameters lie; computed is always in the dtype of the parameters."""

    def __init__(self, stored: Mapping[str, Tensor], decayed: set[str], settings: Settings) -> None:
        self.settings, self.decayed, self.steps = settings, decayed, 0
        self.views = {name: t.detach() for name, t in stored.items() if t.numel()}
        self.moments = {
            name: (torch.zeros_like(t, dtype=settings.state), torch.zeros_like(t, dtype=settings.state))
            for name, t in self.views.items()
        }

    @torch.no_grad()
    def step(self, grads: Mapping[str, Tensor], lr: float) -> None:
        for decays, decay in ((True, self.settings.weight_decay), (False, 0.0)):
            for part in self._parts([name for name in self.views if (name in self.decayed) == decays]):
                self._update(part, grads, lr, decay)
        self.steps += 1

    def _parts(self, names: list[str]) -> Iterator[list[str]]:
        """Of one device each, and not too large."""
        part: list[str] = []
        for name in names:
            view, num = self.views[name], sum(self.views[n].numel() for n in part)
            if part and (num + view.numel() > _PART or view.device != self.views[part[0]].device):
                yield part
                part = []
            part.append(name)
        if part:
            yield part

    def _update(self, names: list[str], grads: Mapping[str, Tensor], lr: float, decay: float) -> None:
        views = [self.views[name] for name in names]
        moments = [[m.to(v.dtype) for m in self.moments[name]] for v, name in zip(views, names, strict=True)]
        beta1, beta2 = self.settings.betas
        adamw(
            views, [grads[name] for name in names], [m for m, _ in moments], [v for _, v in moments], [],
            [torch.full((), float(self.steps), device=v.device) for v in views], fused=True, amsgrad=False,
            beta1=beta1, beta2=beta2, lr=lr, weight_decay=decay, eps=self.settings.eps, maximize=False,
        )  # fmt: skip
        for name, wide in zip(names, moments, strict=True):
            for kept, moment in zip(self.moments[name], wide, strict=True):
                if kept is not moment:
                    kept.copy_(moment)
