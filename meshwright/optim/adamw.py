"""AdamW (arXiv 1711.05101), with both moments in any dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..errors import ConfigError
from .base import Optimizer, Slices, within
from .int8_state import CODES, Code

_TINY = torch.finfo(torch.float32).tiny  # a smaller eps would be 0
_MOST_BETA = 0.98  # with a larger beta a moment in bfloat16 stands still while the true one moves by 20% and more


@dataclass(frozen=True, kw_only=True)
class AdamW(Optimizer):
    """AdamW, as `optimizer=` of `mw.Engine`. Norms and biases do not decay.

    `state_dtype`: of both moments, as stored. torch.bfloat16 takes 4 bytes a parameter instead of 8, torch.uint8
    about 2.
    """

    state_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    codes: ClassVar[tuple[Code, ...]] = CODES

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        betas: object = self.betas
        if not isinstance(betas, tuple | list) or [within(beta, 0, 1) for beta in betas] != [True, True]:
            raise ConfigError(f"betas={self.betas!r} must be two numbers from 0 to below 1")
        if not within(self.eps, _TINY):
            raise ConfigError(f"eps={self.eps!r} must be a number of {_TINY:.2g} or more")
        if not within(self.weight_decay, 0):
            raise ConfigError(f"weight_decay={self.weight_decay!r} must be a number of 0 or more")
        super().__post_init__()
        if self.state_dtype == torch.bfloat16 and max(self.betas) > _MOST_BETA:
            raise ConfigError(
                f"state_dtype=torch.bfloat16 with betas={self.betas}: the change of a moment in a step would be "
                f"rounded away; choose betas of at most {_MOST_BETA}, or torch.float32 or torch.uint8"
            )

    @property
    def label(self) -> str:
        return "moments of AdamW"

    def update(self, slices: Slices, *, lr: float, step: int, decays: bool) -> None:
        means, squares = slices.state
        beta1, beta2 = self.betas
        count = torch.full((), step, dtype=torch.float32, device=slices.params[0].device)
        torch._fused_adamw_(  # as torch.optim.AdamW calls it, after it has grouped tensors by dtype and device
            slices.params, slices.grads, means, squares, [], [count] * len(slices.params),
            lr=lr, beta1=beta1, beta2=beta2, weight_decay=self.weight_decay if decays else 0.0, eps=self.eps,
            amsgrad=False, maximize=False,
        )  # fmt: skip

    def plain_update(
        self, weight: Tensor, grad: Tensor, state: Sequence[Tensor], *, lr: float, step: int, decays: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        (mean, square), (beta1, beta2) = state, self.betas
        mean = beta1 * mean + (1 - beta1) * grad
        square = beta2 * square + (1 - beta2) * grad.square()
        change = (mean / (1 - beta1**step)) / ((square / (1 - beta2**step)).sqrt() + self.eps)
        return weight * (1 - lr * self.weight_decay * decays) - lr * change, (mean, square)
