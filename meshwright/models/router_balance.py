"""The balance of a router: how many tokens each expert got, and the auxiliary loss that evens them out.

A block reports here and stays a map from x to x: the loss is linear in the router's probabilities once the share of
each expert is known, so its gradient is a slope that is attached to the routing weights and looked up in backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


class Balance:
    """One for a model. `slope_E`: d(loss) / d(sum over tokens of each expert's probability), set before backward."""

    def __init__(self, num_experts: int = 0, top_k: int = 1, coefficient: float = 0.0) -> None:
        self.num_experts, self.top_k, self.coefficient = num_experts, top_k, coefficient
        self.num_layers = 0
        self.counts: dict[int, Tensor] = {}  # by layer: tokens that each expert got in this micro-batch
        self.probs: dict[int, Tensor] = {}  # by layer: sum over tokens of the probabilities
        self.slope_E: Tensor | None = None
        self._counted_T = torch.ones(0, dtype=torch.bool)

    def join(self) -> int:
        """A block asks for its number."""
        self.num_layers += 1
        return self.num_layers - 1

    def begin(self, counted_T: Tensor) -> None:
        """A micro-batch begins; `counted_T` is False for filler. A recomputed layer reports the same again."""
        self._counted_T = counted_T
        self.counts, self.probs = {}, {}

    def watch(self, layer: int, weight_Tk: Tensor, logits_TE: Tensor, expert_Tk: Tensor) -> Tensor:
        """Report one layer; the weights come back with the gradient of the loss attached."""
        counted_T = self._counted_T.to(weight_Tk.dtype)
        with torch.no_grad():
            tokens_N = counted_T[:, None].expand_as(weight_Tk).flatten()
            self.counts[layer] = tokens_N.new_zeros(self.num_experts).index_add(0, expert_Tk.flatten(), tokens_N)
        if not self.coefficient:
            return weight_Tk
        probs_E = (counted_T[None] @ logits_TE.to(weight_Tk.dtype).softmax(-1))[0]
        self.probs[layer] = probs_E.detach()
        return _Attach.apply(weight_Tk, probs_E, self)


class _Attach(Function):
    @staticmethod
    def forward(ctx: Any, weight_Tk: Tensor, probs_E: Tensor, balance: Balance) -> Tensor:
        ctx.balance = balance
        return weight_Tk.clone()

    @staticmethod
    def backward(ctx: Any, d_Tk: Tensor) -> tuple[Tensor, Tensor, None]:
        assert ctx.balance.slope_E is not None, "the slope is set between forward and backward"
        return d_Tk, ctx.balance.slope_E.to(d_Tk.dtype), None
