"""Numbers in 8 bits for what is read and rewritten in every step: the moments of an optimizer.

A block of 256 columns of a row has a scale, its largest magnitude, and each of its elements a code: a magnitude on a
ladder whose steps are equal ratios. So the relative error is the same for large and small ones, which a linear code
would round to zero.

Rounding goes up or down by dice, with the probability that makes the expected value right. To the nearest, a moving
average would stand still for ever where a step changes it by less than half a rung. The dice are a hash of a place in
the whole matrix and of the step: the same bits on every mesh, and no generator is drawn from.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 256
SCALES = ".scales"  # behind the name of a matrix
_LARGEST = torch.finfo(torch.float32).max
_ONE = 0x3F80  # the upper 16 bits of 1.0


@dataclass(frozen=True)
class Code:
    """`num` magnitudes over so many decades below the largest of a block, and zero. `signed`: bit 7 is the sign."""

    num: int
    decades: int
    signed: bool


FIRST, SECOND = CODES = Code(127, 6, signed=True), Code(255, 10, signed=False)


@functools.cache
def ladder(code: Code, device: torch.device) -> Tensor:
    """Zero and the magnitudes in units of the scale, ascending."""
    powers = [10 ** (-code.decades * (code.num - at) / (code.num - 1)) for at in range(1, code.num + 1)]
    return torch.tensor([0.0, *powers], dtype=torch.float64).float().to(device)


def num_blocks(num_cols: int) -> int:
    """Of a row; its last block may be shorter."""
    return -(-num_cols // BLOCK)


def decode(codes_RC: Tensor, scales_RB: Tensor, code: Code) -> Tensor:
    """In float32."""
    rungs = ladder(code, codes_RC.device)
    values = torch.cat([rungs, -rungs]) if code.signed else rungs
    return (_in_blocks(_at(values, codes_RC.int())) * scales_RB[..., None]).flatten(1)[:, : codes_RC.shape[1]]


def encode(wide_RC: Tensor, code: Code, dice_RC: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales. `dice_RC`: from 0 to below 1, of whole blocks."""
    wide_RBK, rungs = _in_blocks(wide_RC.float()), ladder(code, wide_RC.device)
    sizes_RBK = wide_RBK.abs()
    scales_RB = sizes_RBK.amax(-1).clamp(max=_LARGEST)
    parts_RBK = (sizes_RBK / scales_RB.where(scales_RB > 0, 1.0)[..., None]).clamp(max=1)
    low = _rungs_below(parts_RBK, code)
    under, over = _at(rungs, low), _at(rungs, low + 1)
    low += dice_RC.view(low.shape) < parts_RBK.sub_(under).div_(over.sub_(under))
    if code.signed:
        low += (wide_RBK < 0).logical_and_(low > 0).int().mul_(code.num + 1)
    else:  # what is divided by must not become 0
        low = torch.maximum(low, (sizes_RBK > 0).int())
    return low.flatten(1)[:, : wide_RC.shape[1]].to(torch.uint8), scales_RB


def _rungs_below(parts: Tensor, code: Code) -> Tensor:
    """The highest rung that is not above each of `parts`, from 0 to 1, but never the highest of all. Looked up, and not
    reckoned: a logarithm may differ in its last bit with the length of a vector. A search takes five times as long."""
    device = parts.device
    low = _at(_rungs_by_bits(code, device), (parts.view(torch.int32) >> 16).clamp_(max=_ONE))  # NaN is above
    low += parts >= _at(ladder(code, device), low + 1)
    return low.clamp_(max=code.num - 1)


@functools.cache
def _rungs_by_bits(code: Code, device: torch.device) -> Tensor:
    """By the upper 16 bits of a number, for the least number that has them: no other is two rungs higher."""
    least = (torch.arange(_ONE + 1, dtype=torch.int32) << 16).view(torch.float32)
    found = torch.bucketize(least, ladder(code, torch.device("cpu")), right=True, out_int32=True) - 1
    return found.clamp_(0, code.num - 1).to(device)


def _at(table: Tensor, places: Tensor) -> Tensor:
    return table.index_select(0, places.reshape(-1)).view(places.shape)


def _in_blocks(rows_RC: Tensor) -> Tensor:
    """[R, B, 256]: zeros fill the last block."""
    short = -rows_RC.shape[1] % BLOCK
    return (F.pad(rows_RC, (0, short)) if short else rows_RC).unflatten(1, (-1, BLOCK))


def dice(seed: int, rows_R: Tensor, first_col: int, num_cols: int) -> Tensor:
    """A hash of each place as a number from 0 to below 1. `rows_R`: the numbers of the rows in the whole matrix, int64,
    as are those of the columns."""
    device = rows_R.device
    key = _mixed(torch.full((), _signed(seed), dtype=torch.int64, device=device))
    cols_C = torch.arange(first_col, first_col + num_cols, device=device)
    of_rows_R, of_cols_C = ((_mixed(each) >> 32).int() for each in (key + rows_R, ~key + cols_C))
    mixed = of_rows_R[:, None] ^ of_cols_C
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - (1 << 32))):  # products wrap around at 32 bits
        mixed ^= (mixed >> shift) & ((1 << 32 - shift) - 1)
        mixed *= factor
    return ((mixed >> 8) & 0xFFFFFF).float().mul_(2.0**-24)


def _mixed(x: Tensor) -> Tensor:
    """The finish of splitmix64."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ ((x >> shift) & ((1 << 64 - shift) - 1))) * _signed(factor)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _signed(bits: int) -> int:
    """64 bits as torch has them."""
    return ((bits & ((1 << 64) - 1)) ^ (1 << 63)) - (1 << 63)
