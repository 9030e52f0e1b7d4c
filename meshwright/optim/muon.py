"""The Muon optimizer (Keller Jordan, 2024; at scale: arXiv 2502.16982): orthogonalised momentum for each matrix."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..axes import Axes
from ..errors import ConfigError
from ..recipe import matching
from ..sharding import MatrixPlan, Param, Rules, Table
from .adamw import MOST_BETA, AdamW
from .base import Slices, within
from .int8_state import Code

# The quintic polynomial, its number of iterations and the smallest norm are those of torch.optim.Muon.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_STEPS, _EPS = 5, 1e-7
_PER_CALL = 4  # matrices of one call, where each has at most `_SMALL` elements
_SMALL = 1 << 21
_TOWER = ("tower.*",)  # AdamW trains a vision tower, as at Kimi; a model without one matches nothing
MATCHED, ORIGINAL = "match_rms_adamw", "original"
# Not float16: gradients are cast before they are normalised, and most are below what it can hold.
_DTYPES = (torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, kw_only=True)
class Muon(AdamW):
    """Muon for matrices, and AdamW for all else: embeddings, the head, norms, biases, convolutions, tables.

    A matrix is as in the files, such as an expert's gate projection, q without its gate, or q of a delta net. `by_head`
    splits q, k and v into heads. `exclude`: patterns of more parameters for AdamW, as in `train=`. `scale`:
    "match_rms_adamw" gives updates of AdamW's size, so that one lr serves both; "original" is Keller Jordan's, for lr
    near 0.02. `matrix_dtype`: the dtype of the iteration and of what is sent for it; None: that of the parameters.
    `betas` and `eps` are AdamW's, `weight_decay` is for both.
    """

    codes: ClassVar[tuple[Code, ...]] = ()  # blocks of 8-bit state would be cut by what a rank stores of a matrix
    needs_whole_matrix: ClassVar[bool] = True

    momentum: float = 0.95
    nesterov: bool = True
    scale: str = MATCHED
    by_head: bool = False
    exclude: tuple[str, ...] = _TOWER
    matrix_dtype: torch.dtype | None = torch.bfloat16

    def __post_init__(self) -> None:
        super().__post_init__()
        if not within(self.momentum, 0, 1):
            raise ConfigError(f"momentum={self.momentum!r} must be a number from 0 to below 1")
        if self.state_dtype == torch.bfloat16 and self.momentum > MOST_BETA:
            raise ConfigError(
                f"state_dtype=torch.bfloat16 with momentum={self.momentum}: a step's change would be rounded away; "
                f"choose a momentum of at most {MOST_BETA}, or torch.float32"
            )
        if self.scale not in (MATCHED, ORIGINAL):
            raise ConfigError(f"scale={self.scale!r} is not offered; choose {MATCHED!r} or {ORIGINAL!r}")
        if self.matrix_dtype not in (None, *_DTYPES):
            raise ConfigError(f"matrix_dtype={self.matrix_dtype!r} must be one of {', '.join(map(str, _DTYPES))}")
        exclude: object = self.exclude
        if not isinstance(exclude, tuple) or not all(isinstance(each, str) for each in exclude):
            raise ConfigError(f"exclude={exclude!r} must be a tuple of patterns of names, such as ('layers.*.router',)")

    def check(self, table: Table, trained: Sequence[str]) -> None:
        """Refuse also a pattern of `exclude` that matches no parameter, since it must be a typo."""
        super().check(table, trained)
        matching([each for each in self.exclude if each not in _TOWER], [param.name for param in table], "exclude")

    @property
    def label(self) -> str:
        return "momentum of Muon, moments of AdamW"

    def updates_whole(self, param: Param) -> bool:
        return super().updates_whole(param) and not any(fnmatchcase(param.name, each) for each in self.exclude)

    def state_names_of(self, param: Param) -> tuple[str, ...]:
        """Return "exp_avg" for a matrix: momentum is an average with weight 1 - momentum, as AdamW's first moment is,
        so a checkpoint of AdamW begins Muon's. Keller Jordan's own sums gradients instead."""
        return self.state_names[:1] if self.updates_whole(param) else self.state_names

    def operations(self, trained: Iterable[Param], rules: Rules, axes: Axes, rank: int) -> int:
        whole = [param for param in trained if self.updates_whole(param)]
        return 2 * _STEPS * MatrixPlan(whole, rules, axes, rank, by_head=self.by_head).critical_cost

    def settings(self) -> dict[str, Any]:
        """Return the options as a checkpoint records them. `momentum_is` tells which of two conventions holds."""
        options = {**super().settings(), "matrix_dtype": str(self.matrix_dtype)}
        return {"kind": "muon", **options, "momentum_is": "momentum * M + (1 - momentum) * gradient"}

    def update(self, slices: Slices, *, lr: float, step: int, decays: bool) -> None:
        if slices.whole:
            torch._foreach_lerp_(slices.state[0], slices.grads, 1 - self.momentum)
        else:
            super().update(slices, lr=lr, step=step, decays=decays)

    def matrix_input(self, grad: Tensor, state: Sequence[Tensor]) -> Tensor:
        momentum = state[0].to(grad.dtype)
        return grad.lerp(momentum, self.momentum) if self.nesterov else momentum

    def matrices_per_call(self, like: Tensor) -> int:
        """Return 4 for small matrices on an accelerator: a model may have thousands of experts of 768 x 2048, and one
        does not fill the device. A CPU gains nothing, and keeps the bits of torch.optim.Muon."""
        return 1 if like.is_cpu or like.numel() > _SMALL else _PER_CALL

    def matrix_direction(self, matrix: Tensor) -> Tensor:
        """Return U S' V^T of a matrix U S V^T, with S' of about 0.7 to 1.2, by products alone (Newton-Schulz).

        The operations and their order are those of torch.optim.Muon; for a single matrix the result is bitwise equal.
        """
        add_product = torch.addmm if matrix.ndim == 2 else torch.baddbmm
        is_tall = matrix.shape[-2] > matrix.shape[-1]
        x = matrix.mT if is_tall else matrix
        x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=_EPS)
        for _ in range(_STEPS):
            gram = x @ x.mT
            x = add_product(x, add_product(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
        return x.mT if is_tall else x

    def matrix_step(self, param: Tensor, direction: Tensor, shape: tuple[int, int], *, lr: float, decays: bool) -> None:
        param.mul_(1 - lr * self.weight_decay * decays)
        param.add_(direction, alpha=-lr * self._scale(*shape))

    def _scale(self, rows: int, cols: int) -> float:
        return 0.2 * math.sqrt(max(rows, cols)) if self.scale == MATCHED else math.sqrt(max(1, rows / cols))

    def plain_matrix_update(
        self, weight: Tensor, grad: Tensor, state: Sequence[Tensor], *, lr: float, step: int, decays: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        momentum = self.momentum * state[0] + (1 - self.momentum) * grad
        used = self.momentum * momentum + (1 - self.momentum) * grad if self.nesterov else momentum
        # The polynomial acts on singular values alone, so that it needs no products of matrices.
        left, values, right = torch.linalg.svd(used, full_matrices=False)
        values = values / max(float(values.square().sum().sqrt()), _EPS)
        for _ in range(_STEPS):
            values = _A * values + _B * values**3 + _C * values**5
        rows, cols = weight.shape
        factor = 0.2 * max(rows, cols) ** 0.5 if self.scale == MATCHED else max(1, rows / cols) ** 0.5
        return weight * (1 - lr * self.weight_decay * decays) - lr * factor * (left * values) @ right, (momentum,)
