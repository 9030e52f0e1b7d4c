"""Apply what `mw.WeightDeltas` yields, on the receiving side."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ConfigError


def apply_delta(tensor: Tensor, indices: Tensor, values: Tensor) -> None:
    """Write `values` into the flattened `tensor` at `indices`, in place. It must have the dtype that was sent."""
    if tensor.dtype != values.dtype or not tensor.is_contiguous() or indices.shape != values.shape:
        raise ConfigError(
            f"{len(values)} values of {values.dtype} and {len(indices)} indices do not fit a tensor of {tensor.dtype}"
            f"{'' if tensor.is_contiguous() else ' that is not contiguous'}; keep whole contiguous tensors in the "
            "dtype= of WeightDeltas, and pass indices and values of one item"
        )
    if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < tensor.numel():
        raise ConfigError(
            f"indices from {int(indices.min())} to {int(indices.max())} exceed a tensor of {tensor.numel()} elements; "
            "apply a delta to the tensor of its own name"
        )
    with torch.no_grad():
        tensor.view(-1)[indices.to(tensor.device, torch.int64)] = values.to(tensor.device)
