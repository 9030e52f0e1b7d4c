"""Router load and the load-balancing auxiliary loss of a mixture of experts (Switch, arXiv 2101.03961).

For E experts the loss is coefficient * E * sum_e f_e P_e, with f_e the fraction of tokens that expert e gets and P_e
its mean routing probability, over the tokens of all layers, as in transformers. f_e has no gradient, so the loss is
linear in the probabilities once all loads are known. That makes it cheap to be exact over a whole mesh: forward only
counts; loads are summed over ranks before backward; and backward looks the slope up. A layer stays a map from x to x,
with no loss to carry along.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


class Balance:
    """The loads of all routers of a model. `slope_E`: d(loss) / d(sum over tokens of each expert's probability).

    The engine sets the slope between forward and backward (engine/router.py).
    """

    def __init__(self, num_experts: int = 0, top_k: int = 1, coefficient: float = 0.0) -> None:
        self.num_experts, self.top_k, self.coefficient = num_experts, top_k, coefficient
        self.num_layers = 0
        self.counts: dict[int, Tensor] = {}  # by layer: tokens that each expert got in this micro-batch
        self.probs: dict[int, Tensor] = {}  # by layer: sum over tokens of routing probabilities
        self.slope_E: Tensor | None = None
        self._counted_T = torch.ones(0, dtype=torch.bool)
        self._given_TLk: Tensor | None = None
        self.chosen: dict[int, Tensor] | None = None  # by layer, while choices are recorded: `[T, k]`

    def join(self) -> int:
        """Register a layer; return its number."""
        self.num_layers += 1
        return self.num_layers - 1

    def begin(self, counted_T: Tensor, given_TLk: Tensor | None = None) -> None:
        """Start a micro-batch.

        `counted_T` is False for padding tokens. A recomputed layer overwrites its counts with the same. `given_TLk`:
        the experts that own tokens are to use in each layer, -1 where the router chooses.
        """
        self._counted_T, self._given_TLk = counted_T, given_TLk
        self.counts, self.probs = {}, {}

    def given(self, layer: int) -> Tensor | None:
        """Return the experts `[T, k]` that tokens are to use in a layer; None if the router chooses all."""
        return None if self._given_TLk is None else self._given_TLk[:, layer]

    def watch(self, layer: int, weight_Tk: Tensor, logits_TE: Tensor, expert_Tk: Tensor) -> Tensor:
        """Record one layer; return its routing weights with the gradient of the loss attached."""
        if self.chosen is not None:
            self.chosen[layer] = expert_Tk.detach()
        counted_T = self._counted_T.to(weight_Tk.dtype)
        with torch.no_grad():
            tokens_N = counted_T[:, None].expand_as(weight_Tk).flatten()
            self.counts[layer] = tokens_N.new_zeros(self.num_experts).index_add(0, expert_Tk.flatten(), tokens_N)
        if not self.coefficient:
            return weight_Tk
        # A matmul with a row of ones and zeros sums over tokens, leaving padding out.
        probs_E = (counted_T[None] @ logits_TE.to(weight_Tk.dtype).softmax(-1))[0]
        self.probs[layer] = probs_E.detach()
        # The graph does not hold the loss: backward of `_Attach` supplies its gradient, the engine adds its value.
        return _Attach.apply(weight_Tk, probs_E, self)


class _Attach(Function):
    """The identity on routing weights, whose backward also sends the slope to the probabilities."""

    @staticmethod
    def forward(ctx: Any, weight_Tk: Tensor, probs_E: Tensor, balance: Balance) -> Tensor:
        ctx.balance = balance
        return weight_Tk.clone()

    @staticmethod
    def backward(ctx: Any, d_Tk: Tensor) -> tuple[Tensor, Tensor, None]:
        assert ctx.balance.slope_E is not None, "the slope is set between forward and backward"
        return d_Tk, ctx.balance.slope_E.to(d_Tk.dtype), None
