"""Values that a caller gives, as one tensor of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import DataError


def refuse_grad(values: object, what: str) -> None:
    if isinstance(values, Tensor) and values.requires_grad:
        raise DataError(f"{what} requires grad, and a batch is data: gradients end here; give {what}.detach()")


def joined(values: Sequence[Any], what: str, device: torch.device | str = "cpu") -> Tensor:
    """Tensors and arrays keep their dtype, except that no values are narrower than float32."""
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
    """In bfloat16 or float16: given so, or by torch.set_default_dtype."""
    return flat.is_floating_point() and flat.dtype.itemsize < torch.float32.itemsize
