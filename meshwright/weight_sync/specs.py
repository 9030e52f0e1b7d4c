"""The metadata of a stream: name, shape and dtype of each tensor, as JSON without pickles."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu,
    )
}  # fmt: skip


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape and dtype of one tensor of a stream."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the tensor."""
        return prod(self.shape) * self.dtype.itemsize

    def check(self, name: str, tensor: Tensor) -> None:
        """Refuse a tensor of a stream that is not the one that was announced."""
        actual = TensorSpec(name, tuple(tensor.shape), tensor.dtype)
        if actual != self:
            raise ConfigError(
                f"the stream yields {actual}, but its specs announced {self}; take both from one model with the same "
                "arguments: mw.tensor_specs and mw.stream"
            )

    def __str__(self) -> str:
        return f"{self.name} {list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


def to_json(specs: Sequence[TensorSpec]) -> list[list[Any]]:
    """Return specs as lists that JSON can hold."""
    return [[spec.name, list(spec.shape), str(spec.dtype).removeprefix("torch.")] for spec in specs]


def of_json(rows: list[list[Any]]) -> list[TensorSpec]:
    """Return the specs from the lists of `to_json`."""
    return [TensorSpec(name, tuple(shape), _DTYPES[dtype]) for name, shape, dtype in rows]


def encoded(message: dict[str, Any]) -> bytes:
    """Return a message as bytes."""
    return json.dumps(message, separators=(",", ":")).encode()
