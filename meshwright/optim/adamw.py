"""AdamW (arXiv 1711.05101), with both moments in any dtype."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from ..errors import ConfigError
from ..ops.kernels import SLOW
from ..ops.kernels.launch import dense, is_dense
from ..ops.kernels.trials import agrees
from .base import Clip, Optimizer, Slices, within
from .int8_state import CODES, Code

_TINY = torch.finfo(torch.float32).tiny  # a smaller eps would be 0
# The error of ops/kernels/adamw.py that is allowed, relative to the norm, by the dtype of state, which both sides
# round.
_OFF = {torch.float32: 1e-6, torch.bfloat16: 4e-3}
MOST_BETA = 0.98  # with a larger beta a moment in bfloat16 stands still while the true one moves by 20% and more


@dataclass(frozen=True, kw_only=True)
class AdamW(Optimizer):
    """AdamW, as `optimizer=` of `mw.Engine`. Norms and biases do not decay.

    `state_dtype`: the storage dtype of both moments. torch.bfloat16 takes 4 bytes per parameter instead of 8,
    torch.uint8 about 2.
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
        if self.state_dtype == torch.bfloat16 and max(self.betas) > MOST_BETA:
            raise ConfigError(
                f"state_dtype=torch.bfloat16 with betas={self.betas}: the change of a moment in a step would be "
                f"rounded away; choose betas of at most {MOST_BETA}, or torch.float32 or torch.uint8"
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

    def fuses(self, param: Tensor, grad: Tensor) -> bool:
        """Return whether ops/kernels/adamw.py updates float32 pieces like these: on an accelerator where it agrees with
        `plain_update`."""
        state, kind = self.wide_dtype(param.dtype), type(self)
        if (kind.update, kind.plain_update) != (AdamW.update, AdamW.plain_update):
            return False  # a subclass with a formula of its own
        if param.device.type in SLOW or param.dtype != torch.float32 or grad.dtype not in _OFF or state not in _OFF:
            return False
        trial = partial(_compare, param.device, grad.dtype, state)
        return is_dense(param) and agrees("adamw", (grad.dtype, state), param.device, trial, _OFF[state])

    def fused_update(self, slices: Slices, clip: Clip, *, lr: float, step: int, decays: bool) -> None:
        from ..ops.kernels import adamw

        numbers = adamw.Update(lr, step, self.betas, self.eps, self.weight_decay * decays, clip.max_norm)
        means, squares = slices.state
        for name, *tensors in zip(slices.names, slices.params, slices.grads, means, squares, strict=True):
            weight, grad, mean, square = tensors
            adamw.update(adamw.Slice(weight, dense(grad), mean, square), clip.norm_of(name), numbers)
        # Autograd does not see what a kernel writes. The version lets it refuse a saved tensor that was overwritten.
        torch.autograd.graph.increment_version([*slices.params, *means, *squares])

    def plain_update(
        self, weight: Tensor, grad: Tensor, state: Sequence[Tensor], *, lr: float, step: int, decays: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        (mean, square), (beta1, beta2) = state, self.betas
        mean = beta1 * mean + (1 - beta1) * grad
        square = beta2 * square + (1 - beta2) * grad.square()
        change = (mean / (1 - beta1**step)) / ((square / (1 - beta2**step)).sqrt() + self.eps)
        return weight * (1 - lr * self.weight_decay * decays) - lr * change, (mean, square)


def _compare(device: torch.device, grads: torch.dtype, state: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Return weights and moments after four steps by the kernel and by the formula, for two sizes that Triton
    specialises.

    The first step is clipped. The last two have a norm that is not finite, and must change nothing.
    """
    options = AdamW(state_dtype=state)
    results: tuple[list[Tensor], list[Tensor]] = ([], [])
    for size in (4096, 1031):
        noise = 2 * torch.arange(4 * size, device=device).square().sin().view(4, size)  # squares differ in their sines
        weight, grad, kept = noise[0].clone(), noise[1].to(grads), (noise[2].to(state), noise[3].square().to(state))
        by_kernel, by_formula = [x.clone() for x in (weight, *kept)], [x.double() for x in (weight, *kept)]
        for step, norm in enumerate((2.0, 0.5, math.nan, math.inf), 1):
            clip = Clip(torch.tensor(norm, dtype=torch.float64, device=device), 1.0, lambda: 0.0)
            slices = Slices(["w"], [by_kernel[0]], [grad], ([by_kernel[1]], [by_kernel[2]]))
            options.fused_update(slices, clip, lr=0.1, step=step, decays=step == 1)
            if math.isfinite(norm):
                new, moments = options.plain_update(
                    by_formula[0], grad.double() / max(norm, 1.0), by_formula[1:], lr=0.1, step=step, decays=step == 1
                )
                by_formula = [new, *(each.to(state).double() for each in moments)]
        results[0].extend(by_kernel)
        results[1].extend(x.to(like.dtype) for x, like in zip(by_formula, by_kernel, strict=True))
    return results
