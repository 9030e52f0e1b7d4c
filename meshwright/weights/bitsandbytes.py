"""Read NF4 files that transformers writes with bitsandbytes (QLoRA, arXiv:2305.14314).

    X.weight             U8 [rows * columns / 2, 1]: two codes per byte, the first in the high four bits
    X.weight.absmax      a scale for each 64 elements of the flattened matrix: F32, or with double quantisation U8
    X.weight.quant_map   the 16 values of the codes
    X.weight.nested_absmax, X.weight.nested_quant_map
                         of double quantisation: scale = quant_map[code] * absmax[block of 256 scales] + offset
    X.weight.quant_state.bitsandbytes__nf4
                         JSON as bytes: shape, sizes of blocks, offset

Only that JSON holds the shape of a matrix, so it is read before anything else about the matrix is known.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..errors import LoadError, MismatchedKey
from ..ops.codings import NF4
from .safetensors_header import Entry

FORM = "NF4"
ABSMAX, NESTED = ".absmax", (".nested_absmax", ".nested_quant_map")
NESTED_BLOCK = 256  # scales with one nested scale
_STATE, _MAP = ".quant_state.bitsandbytes__nf4", ".quant_map"
_WAY_OUT = "fetch the unquantised model, and load it with frozen='nf4'"


@dataclass(frozen=True)
class State:
    """The quantisation state of a matrix in the files. `offset` belongs to double quantisation."""

    shape: tuple[int, ...]
    nested: bool = False
    offset: float = 0.0


def check_config(quantization: Mapping[str, Any]) -> None:
    """Refuse formats of bitsandbytes other than NF4 in uint8."""
    kind, stored = quantization.get("bnb_4bit_quant_type", "fp4"), quantization.get("bnb_4bit_quant_storage", "uint8")
    if not quantization.get("load_in_4bit") or kind != "nf4" or stored != "uint8":
        raise LoadError(
            f"config.json: bitsandbytes with load_in_4bit={quantization.get('load_in_4bit')!r:.20}, "
            f"bnb_4bit_quant_type={kind!r:.20}, bnb_4bit_quant_storage={stored!r:.20} is not supported, only nf4 in "
            f"uint8; {_WAY_OUT}"
        )


def states_of(entries: Mapping[str, Entry], read: Callable[[Entry], bytes]) -> dict[str, State]:
    """Return the quantisation state of each matrix in NF4, by its key."""
    keys = [key.removesuffix(_STATE) for key in entries if key.endswith(_STATE)]
    return {key: _state(key, entries, read) for key in keys}


def companions(key: str, state: State, entries: Mapping[str, Entry]) -> tuple[str, ...]:
    """Return the keys that belong to a matrix and are read once, besides its scales."""
    return tuple(key + end for end in (_MAP, _STATE, *(NESTED if state.nested else ())) if key + end in entries)


def unnested(codes: Tensor, first: int, absmax: Tensor, values: Tensor) -> Tensor:
    """Dequantise scales that are themselves quantised, before the offset is added. `first`: the place of the first
    one."""
    blocks = torch.arange(first, first + codes.numel(), device=codes.device).view(codes.shape) // NESTED_BLOCK
    return values[codes.int()] * absmax[blocks]


def _state(key: str, entries: Mapping[str, Entry], read: Callable[[Entry], bytes]) -> State:
    """Read and check the state of one matrix."""
    file = entries[key + _STATE].file
    nested = [key + end for end in NESTED]
    needed = [key, key + ABSMAX, key + _MAP, *(nested if any(each in entries for each in nested) else ())]
    missing = [each for each in needed if each not in entries]
    if missing:
        raise MismatchedKey(f"{file} has {key}{_STATE}, but {missing[0]} is missing; fetch the file that holds it")
    try:
        fields = json.loads(read(entries[key + _STATE]))
        shape, offset = tuple(map(int, fields["shape"])), float(fields.get("nested_offset", 0.0))
        state = State(shape, key + NESTED[0] in entries, offset)
        usual = (fields["quant_type"], fields["blocksize"], fields.get("nested_blocksize", NESTED_BLOCK))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LoadError(f"{file}: {key}{_STATE} is not the state that bitsandbytes writes; fetch it again") from error
    if usual != ("nf4", NF4.block, NESTED_BLOCK) or read(entries[key + _MAP]) != struct.pack("<16f", *NF4.table):
        raise LoadError(
            f"{file}: {key} has quant_type, blocksize and nested_blocksize {usual}, or values of its codes, other than "
            f"those of NF4 with blocks of {NF4.block} and {NESTED_BLOCK}; {_WAY_OUT}"
        )
    if len(shape) != 2 or shape[1] % NF4.block or entries[key].shape != packed_shape(shape):
        raise LoadError(
            f"{file}: {key} {entries[key].shape} is {shape} in NF4; only matrices whose columns are a multiple of "
            f"{NF4.block} are read, so that no block crosses rows; {_WAY_OUT}"
        )
    return state


def packed_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the codes in the file."""
    return (prod(shape) // 2, 1)
