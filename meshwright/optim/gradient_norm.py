"""The norm of gradients over local pieces: each element is counted once, by its owner."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Mapping, Sequence

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from ..ops.part_sizes import part_size

# elements of a large gradient that are widened together on the host
_PART = part_size(__name__, "_PART", 1 << 24, small=1001)
# elements of a gradient that is joined with others: a few MB for thousands of them
_SMALL = part_size(__name__, "_SMALL", 1 << 12, small=101)


def squares(grads: Mapping[str, Tensor], owned: Container[str], device: torch.device) -> Tensor:
    """Return the sum of squares of the gradient elements that this rank owns, in float64."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    by_kind = defaultdict[tuple[torch.device, torch.dtype], list[Tensor]](list)
    for name, grad in grads.items():
        if name in owned:
            by_kind[grad.device, grad.dtype].append(grad)
    for some in by_kind.values():
        norms = torch._foreach_norm(_joined(some), 2.0, torch.float64)
        total += torch.stack(norms).square().sum().to(device)
    return total


def _joined(grads: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors with the same elements. Small gradients are joined: a call for each takes the host longer than the
    copy. Large ones are split: on the host torch widens a whole tensor to float64 at once."""
    small: list[Tensor] = []
    large: list[Tensor] = []
    for grad in grads:
        if grad.numel() <= _SMALL:
            small.append(grad)
        else:
            large += grad.reshape(-1).split(_PART) if grad.is_cpu and grad.numel() > _PART else [grad]
    return [*large, _flatten_dense_tensors(small)] if small else large
