"""Convert per-token field values (weights, advantages) to tensors, and shift values over tokens to loss terms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import DataError


@dataclass(frozen=True)
class OverTokens:
    """Values that are stored at the tokens they are about. `over_tokens` makes it; `pack` and `with_fields` read it."""

    values: Any


def over_tokens(values: Any) -> OverTokens:
    """Mark values that are stored at the tokens they are about, as in chat templates and most libraries.

    A causal model predicts token t+1 at token t, so the loss has its term of token t+1 at t. Plain `fields` and
    `labels` are stored at the terms. Marked values move from t+1 to t, within their document: the value of a first
    token, which nothing predicts, is dropped, and a last token gets 0 (-100 as a label).

    >>> advantages = over_tokens([[0.0, 0.0, 0.5, 0.75]])
    >>> pack([[5, 6, 7, 8]], fields={"advantage": advantages}).fields["advantage"].tolist()
    [0.0, 0.5, 0.75, 0.0]
    """
    return OverTokens(values)


def to_terms(values_T: Tensor, bounds: Sequence[int], fill: float = 0) -> Tensor:
    """Move the value of each token to the term that predicts it. The last token of a document gets `fill`."""
    moved_T = values_T.roll(-1, 0)
    moved_T[torch.tensor(bounds[1:], device=values_T.device) - 1] = fill
    return moved_T


def refuse_grad(values: object, what: str) -> None:
    if isinstance(values, Tensor) and values.requires_grad:
        raise DataError(f"{what} requires grad, and a batch is data, which passes no gradient on; give {what}.detach()")


def joined(values: Sequence[Any], what: str, device: torch.device | str = "cpu") -> Tensor:
    """Concatenate values of documents. Tensors and arrays keep their dtype, except that float values become at least
    float32."""
    try:
        return _joined(values, device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{what} must be numbers: {error}") from None


def _joined(values: Sequence[Any], device: torch.device | str) -> Tensor:
    if values and all(hasattr(v, "__array__") for v in values):
        flat = torch.cat([torch.as_tensor(v if isinstance(v, Tensor) else v.copy(), device=device) for v in values])
        return flat.float() if _is_narrow(flat) else flat
    numbers = [x for v in values for x in v]
    flat = torch.tensor(numbers, device=device)
    return torch.tensor(numbers, dtype=torch.float32, device=device) if _is_narrow(flat) else flat


def _is_narrow(flat: Tensor) -> bool:
    """Return whether values are bfloat16 or float16, by their dtype or by torch.set_default_dtype."""
    return flat.is_floating_point() and flat.dtype.itemsize < torch.float32.itemsize
