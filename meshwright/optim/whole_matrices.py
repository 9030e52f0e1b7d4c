"""Gather whole matrices for optimizers that need more than a rank's rows, such as Muon (decisions 0002 and 0010)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod

from torch import Tensor

from ..axes import Axes, Sum
from ..mesh import Mesh
from ..sharding import SEPARATE, Param, Piece, Rules, ShardingSpec, place


class WholeMatrices:
    """Gathers whole matrices from the pieces of all ranks, and cuts this rank's piece out of a whole one.

    Within a group of ranks that shard or cut a parameter, exactly one rank holds each element. Each rank puts its piece
    into zeros, and an all-reduce adds them up. The sum is the whole parameter, exact to the bit.
    """

    def __init__(self, spec: ShardingSpec, mesh: Mesh, pieces: Mapping[str, Piece]) -> None:
        self.spec, self.mesh, self.pieces = spec, mesh, pieces
        for param in spec.table:  # also those of other stages: all ranks make a process group together
            over = gathering(param, spec.rules, mesh.axes, 0)
            if over.axes:
                mesh.process_group(over.axes)

    def gather(self, name: str, local: Tensor) -> Tensor:
        """All-reduce the pieces of a parameter, or tensors of their shapes. Return `[matrices, rows, columns]`.

        The matrices are those of the files: one for each expert, and for the gate and the up projection. All ranks that
        hold a piece must gather the same parameters in the same order.
        """
        piece = self.pieces[name]
        whole, param = local.new_zeros(piece.param.shape), piece.param
        for box, view in piece.views(local):
            whole[box.slices] = view
        over = gathering(param, self.spec.rules, self.mesh.axes, local.itemsize)
        if over.axes:
            self.mesh.all_reduce_(whole, over)
        return whole.view(_num_matrices(param), -1, param.matrix[1])

    def own(self, name: str, whole: Tensor) -> Tensor:
        """Cut this rank's piece out of `whole`, a tensor in the shape that `gather` returns."""
        piece = self.pieces[name]
        local = whole.new_empty(piece.shape)
        for box, view in piece.views(local):
            view.copy_(whole.reshape(piece.param.shape)[box.slices])
        return local


def gathering(param: Param, rules: Rules, axes: Axes, itemsize: int) -> Sum:
    """Return the all-reduce that gathers a parameter. Its axes are empty if each rank holds the whole parameter."""
    placement = place(param, rules, axes)
    over = tuple(axis for axis in (*placement.shard, *placement.split.values()) if axes.size_of(axis) > 1)
    return Sum(f"whole {param.name}", over, param.numel * itemsize)


def gatherings(params: Iterable[Param], rules: Rules, axes: Axes, itemsize: int) -> list[Sum]:
    """Return the all-reduces of an update that gathers each matrix once."""
    sums = [gathering(param, rules, axes, itemsize) for param in params if param.cols]
    return [each for each in sums if each.axes]


def _num_matrices(param: Param) -> int:
    """Count the matrices that the files store for a parameter: one for each expert, and for gate and up projections."""
    return prod(size for dim, size in param.rows.items() if dim in SEPARATE)
