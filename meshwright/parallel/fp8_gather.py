"""Quantise FP8 weights once a step, and all-gather them as one byte per element instead of two (FSDP2).

A matmul quantises a weight in blocks of 128 x 128 (DeepSeek-V3, arXiv:2412.19437, section 3.3), with `scale = amax /
448` for each block. FSDP cuts rows anywhere, so the amax of a block may need rows of two ranks. Hence two phases:

1. Before a pass, each rank writes the amax of its own rows, and one all-reduce (MAX) a group of weights makes the
  scales. It is flat: one for dense weights, one for experts.
2. In the all-gather, each rank quantises its own rows with those scales and sends the codes.

All ranks then hold bit for bit the codes that the matmul would have made from the gathered bfloat16 weight. With scales
of own rows alone they would not, and the loss would depend on the number of shards.

A weight whose rows are all on one rank has no all-gather: its module takes the codes in place of the values.

Codes are made once a pass, that is once a step for all its micro-batches. Blocks are square, so the same codes serve
forward, recomputation and backward. Weights may be written between two calls (`optimizer.step`, streaming, a resume),
so neither codes nor scales are kept from one pass to the next.

Example: a matrix of 256 rows on 3 ranks is cut at rows 86 and 172. Block row 0 (rows 0 to 127) lies on ranks 0 and 1,
so its amax is the maximum of what both have. Each rank writes its partial amax into the same grid of 2 x (columns /
128) numbers before the all-reduce.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..errors import StateError
from ..mesh import Mesh
from ..models.linear import Quantisable
from ..ops import Blocks, Quantised
from ..ops.fp8_matmul import BLOCK, block_amax, codes_of, join, quantise, scales_of
from ..ops.part_sizes import part_size
from ..sharding import SCALES, ShardingSpec, Stage, pieces, quantised_once

_PART = part_size(__name__, "_PART", 1 << 24, small=1001)  # elements that are rounded together
# FSDP2's extension point (torchao's float8 all-gather uses it too): it looks these up on the local shard.
_HOOKS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")


@dataclass(frozen=True)
class _LocalShard:
    """A weight of a module of this rank, which stores its rows from `first` on."""

    name: str
    holder: nn.Module
    last: str  # the name within the holder
    first: int
    wrapped: bool = True  # by FSDP

    @property
    def parameter(self) -> nn.Parameter:
        return self.holder.get_parameter(self.last)

    @property
    def rows(self) -> Tensor:
        """Return the stored tensor itself, not a view: FSDP looks for the hooks on this very object."""
        parameter = self.parameter
        if not self.wrapped:
            return parameter
        if not isinstance(parameter, DTensor):
            raise StateError(f"{self.name} is all-gathered right now; its local shard cannot be read until it is freed")
        return parameter._local_tensor


@dataclass(frozen=True)
class _WholeMatrix:
    """A weight whose rows are all on this rank. Its module takes the blocks during a pass."""

    shard: _LocalShard
    compute: torch.dtype

    def quantise(self) -> None:
        parts = [quantise(part) for part, _ in _parts(self.shard.rows, 0, self.compute)]
        self._kept[self.shard.last] = parts[0] if len(parts) == 1 else join(parts)

    def drop(self) -> None:
        self._kept.pop(self.shard.last, None)

    @property
    def _kept(self) -> dict[str, Blocks]:
        assert isinstance(self.shard.holder, Quantisable), "only such a module has FP8 matmuls"
        return self.shard.holder.blocks


def _parts(rows: Tensor, first: int, compute: torch.dtype) -> Iterator[tuple[Tensor, int]]:
    """Yield stored rows in the compute dtype, in whole blocks a few at a time, each with the number of its first row.

    Rows are cast first, as FSDP's own all-gather casts: amax of the float32 masters gives other scales. Parts bound the
    float32 temporaries of quantisation. `first`: the number of the first row in the matrix.
    """
    at_a_time = max(1, _PART // (BLOCK * rows.shape[1])) * BLOCK
    for begin in range(first // BLOCK * BLOCK, first + len(rows), at_a_time):
        some = slice(max(0, begin - first), begin + at_a_time - first)
        yield rows[some].to(compute), max(first, begin)


@dataclass(frozen=True, eq=False)
class _Matrix:
    """One weight that is gathered in FP8: quantises own rows before the all-gather, wraps the codes after it."""

    shard: _LocalShard
    compute: torch.dtype
    scales: Tensor  # one per block, `[rows / 128, cols / 128]`, of the whole matrix; refilled before each pass
    made: list[Tensor] = field(
        default_factory=list, init=False
    )  # the codes of own rows, made at the first gather of a pass

    def find_amax(self) -> None:
        """Write the amax of each block's local rows to where its scale will be."""
        for part, first in self._parts():
            begin, end = first // BLOCK, -(-(first + len(part)) // BLOCK)
            self.scales[begin:end] = block_amax(part, first)

    def _parts(self) -> Iterator[tuple[Tensor, int]]:
        return _parts(self.shard.rows, self.shard.first, self.compute)

    def send(self, mesh: Any, size: torch.Size, _stride: Any, _module: Any, _policy: Any) -> tuple[Any, None]:
        """Return the codes of this rank's rows: FSDP's `fsdp_pre_all_gather`.

        Later gathers of the pass, in backward and in other micro-batches, send the same codes.
        """
        if not self.made:
            self.made.append(self._codes(-(-size[0] // mesh.size()), size[1]))
        return (self.made[0],), None

    def _codes(self, num_sent: int, width: int) -> Tensor:
        """Quantise the rows of this rank.

        An uneven last shard is padded with zeros. All ranks must send equal sizes, or FSDP raises on some ranks and
        hangs on the others.
        """
        codes = torch.zeros((num_sent, width), dtype=torch.uint8, device=self.scales.device)
        for part, first in self._parts():
            at = first - self.shard.first
            codes[at : at + len(part)] = codes_of(part, first, self.scales)
        return codes

    def receive(
        self, gathered: tuple[Tensor, ...], _metadata: None, _dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Quantised, tuple[()]] | None:
        """Wrap the gathered codes with their scales: FSDP's `fsdp_post_all_gather`.

        On later calls FSDP fills the same memory, which the tensor `out` already refers to.
        """
        if out is not None:
            return None
        (codes,) = gathered
        return Quantised(codes[: len(self.scales) * BLOCK], self.scales, self.compute), ()


@dataclass(frozen=True, eq=False)
class _WeightGroup:
    """The weights that are sharded over the same axes. Their scales are views of one tensor, for one all-reduce."""

    axes: tuple[str, ...]
    scales: Tensor
    matrices: list[_Matrix]

    def find_scales(self, mesh: Mesh) -> None:
        """Compute the scales of all blocks from all ranks' rows: local amax, all-reduce MAX, amax to scale."""
        self.scales.zero_()
        for matrix in self.matrices:
            matrix.find_amax()
        mesh.all_reduce_max_(self.scales, SCALES, self.axes)
        self.scales.copy_(scales_of(self.scales))


class Fp8Gather:
    """The trained weights of this rank with FP8 matmuls, which a pass quantises once.

    `names`: the weights of all stages that FSDP all-gathers as codes wherever they have several shards.
    """

    def __init__(
        self, stages: Sequence[Stage], spec: ShardingSpec, mesh: Mesh, compute: torch.dtype, low: frozenset[str]
    ) -> None:
        self._mesh, self.names = mesh, low
        shards = dict[tuple[str, ...], list[_LocalShard]]()
        for axes, shard in _local_shards(stages, spec, mesh, low):
            shards.setdefault(axes, []).append(shard)
        self._groups = [_weight_group(axes, of_axes, mesh, compute) for axes, of_axes in shards.items()]
        for matrix in self._matrices():
            _attach_hooks(matrix)
        self._whole = [*_whole_matrices(stages, spec, mesh, compute)]

    def _matrices(self) -> Iterator[_Matrix]:
        for group in self._groups:
            yield from group.matrices

    def check(self) -> None:
        """Check that the hooks are still attached to what FSDP would gather.

        A replaced parameter loses them, and this rank alone would then send bfloat16: the sizes of the all-gather would
        differ and the others hang. So call it where an error reaches all ranks.
        """
        for matrix in self._matrices():
            parameter = matrix.shard.parameter
            stored = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
            if not isinstance(stored, Quantised) and not vars(stored).keys() >= {*_HOOKS}:
                raise StateError(
                    f"{matrix.shard.name} was replaced after loading, so FSDP would no longer all-gather it in 8 bits; "
                    "load the model again, and write into the tensors of model.stored() in place"
                )

    @contextmanager
    def quantised(self) -> Iterator[None]:
        """Return a context for a pass: its FP8 matmuls use the weights as they are stored now, quantised once."""
        try:
            self.begin()
            yield
        finally:
            self.end()

    @torch.no_grad()
    def begin(self) -> None:
        """Compute the scales of the weights as stored now, and the codes of those that are not gathered."""
        for group in self._groups:
            group.find_scales(self._mesh)
        for whole in self._whole:
            whole.quantise()

    def end(self) -> None:
        """Drop all codes: the next write to a weight makes them stale."""
        for matrix in self._matrices():
            matrix.made.clear()
        for whole in self._whole:
            whole.drop()


def _local_shards(
    stages: Sequence[Stage], spec: ShardingSpec, mesh: Mesh, low: Collection[str]
) -> Iterator[tuple[tuple[str, ...], _LocalShard]]:
    """Yield the weights in FP8 with the axes over which each is sharded. A weight on one rank is not gathered."""
    expected = pieces(spec, mesh.axes, mesh.rank)
    for stage in stages:
        for unit in stage.units:
            for name in unit.params if prod(mesh.axes.sizes(unit.shard)) > 1 else ():
                if name in low:
                    owner, _, last = name.rpartition(".")
                    yield unit.shard, _LocalShard(name, stage.module.get_submodule(owner), last, expected[name].lo)


def _whole_matrices(
    stages: Sequence[Stage], spec: ShardingSpec, mesh: Mesh, compute: torch.dtype
) -> Iterator[_WholeMatrix]:
    """Yield the weights whose rows are all on this rank, where the host does not hold them."""
    for stage in stages:
        trained = {name for name, parameter in stage.module.named_parameters() if parameter.requires_grad}
        for unit in stage.units:
            for name in (
                quantised_once(spec, mesh.axes, unit, trained) if prod(mesh.axes.sizes(unit.shard)) == 1 else ()
            ):
                owner, _, last = name.rpartition(".")
                wrapped = mesh.axes.replicate > 1
                yield _WholeMatrix(_LocalShard(name, stage.module.get_submodule(owner), last, 0, wrapped), compute)


def _weight_group(
    axes: tuple[str, ...], shards: Sequence[_LocalShard], mesh: Mesh, compute: torch.dtype
) -> _WeightGroup:
    """Give each weight its view of one flat tensor of scales."""
    block_grids = [(rows // BLOCK, cols // BLOCK) for rows, cols in (shard.parameter.shape for shard in shards)]
    scale_dtype = torch.promote_types(compute, torch.float32)
    scales = torch.ones(sum(map(prod, block_grids)), dtype=scale_dtype, device=mesh.device)
    parts = zip(shards, scales.split([prod(grid) for grid in block_grids]), block_grids, strict=True)
    return _WeightGroup(axes, scales, [_Matrix(shard, compute, part.view(grid)) for shard, part, grid in parts])


def _attach_hooks(matrix: _Matrix) -> None:
    """Attach FSDP's hooks as instance attributes. A tensor subclass would be seen by optimizers, exports and
    checkpoints."""
    vars(matrix.shard.rows).update(zip(_HOOKS, (matrix.send, matrix.receive), strict=True))
