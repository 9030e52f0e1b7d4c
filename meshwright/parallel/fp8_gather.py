"""FSDP gathers matrices whose products are in 8 bits as 8-bit numbers: each rank sends a byte for an element.

A product rounds a whole matrix in blocks of 128 x 128, and FSDP cuts its rows anywhere. So a rank cannot know the scale
of a block from its own rows. Before a pass the ranks that share matrices find the largest value of each block together,
in one flat all-reduce for dense matrices and one for those of experts. Then each rounds its own rows, and what all of
them have sent is to the bit what a product would have made of the gathered values.

Parameters may be written into between two calls. So scales are of one pass alone, and made anew for each.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..errors import StateError
from ..mesh import Mesh
from ..ops import Quantised
from ..ops.fp8_matmul import BLOCK, block_amax, codes_of, scales_of
from ..ops.part_sizes import part_size
from ..sharding import SCALES, ShardingSpec, Stage, pieces

_PART = part_size(__name__, "_PART", 1 << 24, small=1001)  # elements that are rounded together
_HOOKS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")  # FSDP looks for them on what a rank stores of a parameter


@dataclass(frozen=True)
class _Place:
    """Where a module of this rank holds a matrix, of which the rank stores rows from `first` on."""

    name: str
    holder: nn.Module
    last: str  # the name within the holder
    first: int

    @property
    def parameter(self) -> nn.Parameter:
        return self.holder.get_parameter(self.last)

    @property
    def rows(self) -> Tensor:
        """The stored rows themselves, no view of them: hooks hang on this very tensor."""
        parameter = self.parameter
        if not isinstance(parameter, DTensor):
            raise StateError(f"{self.name} is gathered, and its own rows were asked for")
        return parameter._local_tensor


@dataclass(frozen=True, eq=False)
class _Matrix:
    place: _Place
    compute: torch.dtype
    scales: Tensor  # of all blocks; filled before each pass

    def find_largest(self) -> None:
        """Of each block, as far as its rows are here, in the place of its scale."""
        for part, first in self._parts():
            begin, end = first // BLOCK, -(-(first + len(part)) // BLOCK)
            self.scales[begin:end] = block_amax(part, first)

    def _parts(self) -> Iterator[tuple[Tensor, int]]:
        """The stored rows as they are gathered, in whole blocks a few at a time: what is made of them is wide. Each
        part comes with the number of its first row."""
        rows, first = self.place.rows, self.place.first
        at_a_time = max(1, _PART // (BLOCK * rows.shape[1])) * BLOCK
        for begin in range(first // BLOCK * BLOCK, first + len(rows), at_a_time):
            some = slice(max(0, begin - first), begin + at_a_time - first)
            yield rows[some].to(self.compute), max(first, begin)

    def send(self, mesh: Any, size: torch.Size, _stride: Any, _module: Any, _policy: Any) -> tuple[Any, None]:
        """The numbers of this rank's rows. All ranks send equally many rows, or FSDP raises on some and hangs."""
        num_sent = -(-size[0] // mesh.size())
        codes = torch.zeros((num_sent, size[1]), dtype=torch.uint8, device=self.scales.device)
        for part, first in self._parts():
            at = first - self.place.first
            codes[at : at + len(part)] = codes_of(part, first, self.scales)
        return (codes,), None

    def receive(
        self, gathered: tuple[Tensor, ...], _told: None, _dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Quantised, tuple[()]] | None:
        """The matrix as products take it. The next time FSDP fills the same memory, of which `out` is made already."""
        if out is not None:
            return None
        (codes,) = gathered
        return Quantised(codes[: len(self.scales) * BLOCK], self.scales, self.compute), ()


@dataclass(frozen=True, eq=False)
class _Kind:
    """The matrices that are stored over the same axes. All of their scales lie in one tensor, for one all-reduce."""

    axes: tuple[str, ...]
    scales: Tensor
    matrices: list[_Matrix]

    def find_scales(self, mesh: Mesh) -> None:
        self.scales.zero_()
        for matrix in self.matrices:
            matrix.find_largest()
        mesh.all_reduce_max_(self.scales, SCALES, self.axes)
        self.scales.copy_(scales_of(self.scales))


class LowGathers:
    """The matrices of this rank that come as 8-bit numbers. `names`: those of all ranks, where there are shards."""

    def __init__(
        self, stages: Sequence[Stage], spec: ShardingSpec, mesh: Mesh, compute: torch.dtype, low: frozenset[str]
    ) -> None:
        self._mesh, self.names = mesh, low
        places = dict[tuple[str, ...], list[_Place]]()
        for axes, place in _places(stages, spec, mesh, low):
            places.setdefault(axes, []).append(place)
        self._kinds = [_kind(axes, of_kind, mesh, compute) for axes, of_kind in places.items()]
        for matrix in self._matrices():
            _hang_hooks(matrix)

    def _matrices(self) -> Iterator[_Matrix]:
        for kind in self._kinds:
            yield from kind.matrices

    def check(self) -> None:
        """That FSDP would gather numbers. Call it where an error is told to all ranks: those without would wait."""
        for matrix in self._matrices():
            parameter = matrix.place.parameter
            held = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
            if not isinstance(held, Quantised) and not vars(held).keys() >= {*_HOOKS}:
                raise StateError(
                    f"{matrix.place.name} was replaced after loading, so it would no longer be gathered in 8 bits; "
                    "write into the tensors of model.stored() instead, and load the model again"
                )

    @torch.no_grad()
    def begin(self) -> None:
        """Before each pass: find the scales of what is stored now."""
        for kind in self._kinds:
            kind.find_scales(self._mesh)


def _places(
    stages: Sequence[Stage], spec: ShardingSpec, mesh: Mesh, low: Collection[str]
) -> Iterator[tuple[tuple[str, ...], _Place]]:
    """With the axes over which each is stored in shards: none is gathered where there is but one."""
    held = pieces(spec, mesh.axes, mesh.rank)
    for stage in stages:
        for unit in stage.units:
            for name in unit.params if prod(mesh.axes.sizes(unit.shard)) > 1 else ():
                if name in low:
                    owner, _, last = name.rpartition(".")
                    yield unit.shard, _Place(name, stage.module.get_submodule(owner), last, held[name].lo)


def _kind(axes: tuple[str, ...], places: Sequence[_Place], mesh: Mesh, compute: torch.dtype) -> _Kind:
    """Each matrix with its part of all scales."""
    grids = [(rows // BLOCK, cols // BLOCK) for rows, cols in (place.parameter.shape for place in places)]
    wide = torch.promote_types(compute, torch.float32)
    scales = torch.ones(sum(map(prod, grids)), dtype=wide, device=mesh.device)
    parts = zip(places, scales.split([prod(grid) for grid in grids]), grids, strict=True)
    return _Kind(axes, scales, [_Matrix(place, compute, part.view(grid)) for place, part, grid in parts])


def _hang_hooks(matrix: _Matrix) -> None:
    """As attributes: a class of its own for what is stored would be seen by optimizers, exports and checkpoints."""
    vars(matrix.place.rows).update(zip(_HOOKS, (matrix.send, matrix.receive), strict=True))
