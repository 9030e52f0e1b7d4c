"""8-bit optimizer state: block-wise logarithmic quantisation with stochastic rounding.

Each block of 256 columns of a row has a float32 scale, its largest magnitude, and each element a code: one of 127 or
255 levels whose ratios are equal, and zero. Block-wise dynamic quantisation of Adam's moments is due to Dettmers et al.
(arXiv 2110.02861). Equal ratios make the relative error the same for large and small elements; a linear code would
round the small ones to zero, and Adam divides by the root of the second moment.

Rounding is stochastic, with the probability that makes the expected value exact. With rounding to nearest, an
exponential moving average would never change again once a step moves it by less than half a level. The random numbers
are a hash of the position in the whole matrix and of the step, not drawn from a generator: the same bits on every mesh,
and after a restart.

Sharding by rows never splits a block; a split by columns must fall between two blocks. Scales are declared like a
parameter of their own, with a column for each block, and are sharded as the matrix is. So the code that places, writes
or reads pieces handles scales without special cases.

Shapes: R rows, C columns, B blocks of a row, K elements of a block.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from ..axes import Axes
from ..errors import LayoutError
from ..sharding import Param, ShardingSpec, Table, local_sizes, plain, tp_sizes

BLOCK = 256
SCALES = ".scales"  # suffix of a matrix's name, for its scales
_LARGEST = torch.finfo(torch.float32).max
_ONE = 0x3F80  # the upper 16 bits of 1.0


@dataclass(frozen=True)
class Code:
    """`num` levels, log-spaced over `decades` below the largest element of a block, and zero.

    `signed`: bit 7 is the sign.
    """

    num: int
    decades: int
    signed: bool


# The first moment is signed; the second is not, and spans twice the decades because it is a square.
FIRST, SECOND = CODES = Code(127, 6, signed=True), Code(255, 10, signed=False)


@functools.cache
def levels(code: Code, device: torch.device) -> Tensor:
    """Return zero and the magnitudes in units of the scale, ascending."""
    powers = [10 ** (-code.decades * (code.num - at) / (code.num - 1)) for at in range(1, code.num + 1)]
    return torch.tensor([0.0, *powers], dtype=torch.float64).float().to(device)


def num_blocks(num_cols: int) -> int:
    """Count the blocks of a row; the last one may be shorter."""
    return -(-num_cols // BLOCK)


def decode(codes_RC: Tensor, scales_RB: Tensor, code: Code) -> Tensor:
    """Dequantise to float32."""
    magnitudes = levels(code, codes_RC.device)
    values = torch.cat([magnitudes, -magnitudes]) if code.signed else magnitudes
    return (_in_blocks(_at(values, codes_RC.int())) * scales_RB[..., None]).flatten(1)[:, : codes_RC.shape[1]]


def encode(wide_RC: Tensor, code: Code, dice_RC: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise to codes and scales. `dice_RC`: uniform numbers in [0, 1), for whole blocks. -> codes_RC (uint8),
    scales_RB (float32)"""
    wide_RBK, magnitudes = _in_blocks(wide_RC.float()), levels(code, wide_RC.device)
    magnitudes_RBK = wide_RBK.abs()
    scales_RB = magnitudes_RBK.amax(-1).clamp(max=_LARGEST)
    shares_RBK = (magnitudes_RBK / scales_RB.where(scales_RB > 0, 1.0)[..., None]).clamp(max=1)
    below = _level_below(shares_RBK, code)
    lower, upper = _at(magnitudes, below), _at(magnitudes, below + 1)
    below += dice_RC.view(below.shape) < shares_RBK.sub_(lower).div_(upper.sub_(lower))
    if code.signed:
        below += (wide_RBK < 0).logical_and_(below > 0).int().mul_(code.num + 1)
    else:  # a second moment must not become 0: Adam divides by its root
        below = torch.maximum(below, (magnitudes_RBK > 0).int())
    return below.flatten(1)[:, : wide_RC.shape[1]].to(torch.uint8), scales_RB


def _level_below(shares: Tensor, code: Code) -> Tensor:
    """Return the index of the highest level that is not above each share (in [0, 1]), at most the second highest.

    It is looked up, not computed: a vectorised logarithm may differ in its last bit with the length of the vector, and
    so with the mesh. A binary search takes five times as long.
    """
    device = shares.device
    below = _at(_level_by_high_bits(code, device), (shares.view(torch.int32) >> 16).clamp_(max=_ONE))  # NaN is above
    below += shares >= _at(levels(code, device), below + 1)
    return below.clamp_(max=code.num - 1)


@functools.cache
def _level_by_high_bits(code: Code, device: torch.device) -> Tensor:
    """Tabulate, for each value of the upper 16 bits, the level below the smallest float32 with these bits.

    No float with those bits is two levels higher.
    """
    smallest = (torch.arange(_ONE + 1, dtype=torch.int32) << 16).view(torch.float32)
    indices = torch.bucketize(smallest, levels(code, smallest.device), right=True, out_int32=True) - 1
    return indices.clamp_(0, code.num - 1).to(device)


def _at(table: Tensor, indices: Tensor) -> Tensor:
    return table.index_select(0, indices.reshape(-1)).view(indices.shape)


def _in_blocks(rows_RC: Tensor) -> Tensor:
    """View rows as [R, B, 256], with zeros to fill the last block."""
    short = -rows_RC.shape[1] % BLOCK
    return (F.pad(rows_RC, (0, short)) if short else rows_RC).unflatten(1, (-1, BLOCK))


def dice(seed: int, rows_R: Tensor, first_col: int, num_cols: int) -> Tensor:
    """Return a hash of each position as a uniform number in [0, 1).

    `rows_R`: the indices of the rows in the whole matrix (int64), as columns are counted from `first_col`. Rows and
    columns are hashed once each and combined by a 32-bit finaliser, since a 64-bit hash an element would cost more than
    the update.
    """
    device = rows_R.device
    key = _splitmix64(torch.full((), _signed(seed), dtype=torch.int64, device=device))
    cols_C = torch.arange(first_col, first_col + num_cols, device=device)
    of_rows_R, of_cols_C = ((_splitmix64(each) >> 32).int() for each in (key + rows_R, ~key + cols_C))
    mixed = of_rows_R[:, None] ^ of_cols_C
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - (1 << 32))):  # multiplication wraps around at 32 bits
        mixed ^= (mixed >> shift) & ((1 << 32 - shift) - 1)
        mixed *= factor
    return ((mixed >> 8) & 0xFFFFFF).float().mul_(2.0**-24)


def _splitmix64(x: Tensor) -> Tensor:
    """Apply the finaliser of splitmix64, a bijection that spreads each input bit over all output bits."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ ((x >> shift) & ((1 << 64 - shift) - 1))) * _signed(factor)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _signed(bits: int) -> int:
    """Reinterpret 64 bits as the int64 that torch has."""
    return ((bits & ((1 << 64) - 1)) ^ (1 << 63)) - (1 << 63)


@dataclass(frozen=True)
class Place:
    """The position of stored rows in the whole matrix: `rows` gives their numbers on a device."""

    rows: Callable[[torch.device], Tensor]
    first_col: int


def zero_codes(name: str, stored: Tensor, num_states: int) -> dict[str, tuple[Tensor, ...]]:
    """Return zero state for a stored matrix, and its scales under `NAME.scales`."""
    grid = (len(stored), num_blocks(stored.shape[1]))
    return {
        name: tuple(torch.zeros_like(stored, dtype=torch.uint8) for _ in range(num_states)),
        name + SCALES: tuple(stored.new_zeros(grid, dtype=torch.float32) for _ in range(num_states)),
    }


def seed_of(name: str, which: int, step: int) -> int:
    """Return the seed of the dice for state number `which` of a parameter in a step."""
    return zlib.crc32(name.encode()) | which << 32 | step << 33


def is_quantised(param: Param) -> bool:
    """Return whether 8-bit state would quantise a parameter: a matrix with a whole block in each row. The answer is the
    same on every mesh. Narrower matrices, vectors and adapters would save little, and one adapter whose blocks tp cuts
    would make the whole run fail. Tables stay wide, since a step updates only some of their rows."""
    return bool(param.cols) and param.matrix[1] >= BLOCK and not (param.adapter or param.by_rows)


def names_of_scales(quantised: Iterable[str]) -> list[str]:
    return [name + SCALES for name in quantised]


def with_scales(table: Table, quantised: Iterable[str]) -> Table:
    """Return a table that declares the scales of these parameters too."""
    scales = [_scales_of(table[name]) for name in quantised]
    return replace(table, params={**table.params, **{param.name: param for param in scales}})


def _scales_of(param: Param) -> Param:
    """Declare the scales of a matrix. The first column dim, which a mesh may cut, becomes the dim of the blocks."""
    name, cols = param.name + SCALES, param.matrix[1]
    blocks = {next(iter(param.cols)): num_blocks(cols)}
    shape = (*param.rows.values(), num_blocks(cols))
    return replace(param, name=name, cols=blocks, layouts=(plain(name, shape, len(param.rows)),), group="")


def check_blocks(spec: ShardingSpec, axes: Axes, quantised: Sequence[str], instead: str) -> None:
    """Refuse a mesh that cuts a block. `instead`: another fix, for the message."""
    misfit = _misfit(spec, axes.tp, quantised)
    if misfit:
        choices = ", ".join(str(n) for n in tp_sizes(spec) if not _misfit(spec, n, quantised))
        raise LayoutError(
            f"8-bit optimizer state has blocks of {BLOCK} columns, but with tp={axes.tp} a rank has {misfit}; "
            f"choose tp from {choices}, or {instead}"
        )


def _misfit(spec: ShardingSpec, tp: int, quantised: Iterable[str]) -> str:
    """Describe what a rank has instead of whole blocks; empty if it has whole ones."""
    for param in map(spec.table.__getitem__, quantised):
        local = local_sizes(param, spec.rules, Axes(tp=tp))
        cut_dims = [dim for dim in param.cols if local[dim] != param.cols[dim]]
        num_cols = prod(local[dim] for dim in param.cols)
        if cut_dims and (num_cols % BLOCK or cut_dims != [next(iter(param.cols))]):
            return f"{num_cols} of the {param.matrix[1]} columns of {param.name}"
    return ""
