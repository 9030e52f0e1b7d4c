"""The way of tokens to rows sorted by expert, and back to a sum for each token."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from meshwright.ops.lookup import reordered

Back = Callable[[Tensor], Tensor]
Came = tuple[Tensor, Tensor, list[int] | None, Back]


def by_expert(x_TD: Tensor, weight_Tk: Tensor, expert_Tk: Tensor, num_experts: int) -> Came:
    """A copy of each token for each of its experts, sorted by expert; how many each expert has; and what makes of the
    rows that experts return the weighted sum of each token."""
    expert_N = expert_Tk.flatten()
    order_N = expert_N.argsort(stable=True)  # by expert; within one, by token
    counts_E = counted(expert_N, num_experts)
    back_N = order_N.argsort()

    def back(y_ND: Tensor) -> Tensor:
        y_TkD = reordered(y_ND, back_N, order_N).unflatten(0, expert_Tk.shape)
        return (y_TkD * weight_Tk[..., None].to(y_TkD.dtype)).sum(1)

    return reordered(x_TD, order_N, back_N), counts_E, None, back


def counted(number_N: Tensor, size: int) -> Tensor:
    """How often each number from 0 to `size - 1` is there."""
    return number_N.new_zeros(size).scatter_add_(0, number_N, torch.ones_like(number_N))
