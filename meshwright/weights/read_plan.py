"""Plan which rank reads which part of a checkpoint: each rank its own, or one rank for its node.

By default every rank reads exactly the bytes that it stores, and nothing is sent: `distribute_tensor` would read on
every rank and broadcast from rank 0 as well (VeOmni#637). On file systems that many readers slow down, one rank per
node reads everything that its node stores once, and sends it on. With tp over columns it reads the strips of each tp
rank and the bytes between them.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType

import torch
from torch import Tensor

from ..axes import Axes
from ..errors import LoadError
from ..log import progress
from ..mesh import Mesh
from ..ops.codings import Coding, in_memory
from ..sharding import Charge, Layout, Piece, ShardingSpec, pieces
from ..watch import names_lost_ranks
from .four_bits import fill_rows
from .keymap import KeyMap
from .reader import Reader, chosen
from .source import Source


@dataclass(frozen=True)
class Read:
    """A piece that is read once for all `ranks` that store it, in the narrowest dtype that holds its values, or as
    codes."""

    piece: Piece
    layout: Layout
    form: torch.dtype | Coding
    ranks: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Return the number of bytes that are sent to each of the other ranks."""
        shape, dtype = in_memory(self.piece.shape, self.form)
        return prod(shape) * dtype.itemsize

    def buffer(self, device: torch.device | str) -> Tensor:
        """Allocate a tensor for the piece."""
        shape, dtype = in_memory(self.piece.shape, self.form)
        return torch.empty(shape, dtype=dtype, device=device)

    def fill(self, reader: Reader, stored: Tensor) -> None:
        """Read the piece."""
        if isinstance(self.form, Coding) and self.form.scale is not None:
            fill_rows(reader, self.layout, self.piece, self.form, stored)
        else:
            reader.fill(self.layout, self.piece, stored)
            reader.check_copies(self.layout, self.piece, stored)


def plan_reads(
    spec: ShardingSpec, axes: Axes, node: range, keymap: KeyMap, names: Container[str] | None = None,
    numbers: Mapping[str, Coding] = MappingProxyType({}),
) -> Iterator[Read]:  # fmt: skip
    """Yield each piece that the ranks of a node store, once, with the ranks that store it.

    `names`: the parameters to read. `numbers`: those that are stored as codes.

    A piece is a box of a parameter, cut by tp and ep, and the range of its rows that FSDP stores.
    """
    assert keymap.source is not None, "there are files to read"
    pieces_of = {rank: pieces(spec, axes, rank) for rank in node}
    for param in spec.table:
        if param.name in keymap.fresh or (names is not None and param.name not in names):
            continue
        layout, ranks_by_piece = chosen(param, keymap.choice), dict[object, list[int]]()
        for rank in node:
            piece = pieces_of[rank].get(param.name)
            if piece is not None and piece.numel:
                # Ranks with equal boxes (replicas, tp ranks of a norm) share one read.
                ranks_by_piece.setdefault((piece.box, piece.lo, piece.hi), []).append(rank)
        # Send in the file's dtype: half the bytes of float32 for a bfloat16 checkpoint. The receiver converts.
        form = numbers[param.name] if param.name in numbers else keymap.file_dtype(param)
        for ranks in ranks_by_piece.values():
            yield Read(pieces_of[ranks[0]][param.name], layout, form, tuple(ranks))


def load_bill(plan: Iterable[Read], rank: int, node: range) -> list[Charge]:
    """Return the charges for what this rank sends as the reader of its node, or receives from the reader.

    This is the bill of loading: empty unless one rank reads for its node. `verify` compares it with the collectives
    that ran.
    """
    charges = []
    for read in plan:
        others = [r for r in read.ranks if r != node[0]]
        count = len(others) if rank == node[0] else int(rank in others)
        charges.append(
            Charge(read.piece.param.name, "send" if rank == node[0] else "recv", ("node",), read.num_bytes, count)
        )
    return [c for c in charges if c.count]


@names_lost_ranks()
def fill(stored: Mapping[str, Tensor], mesh: Mesh, plan: Sequence[Read], node: range, source: Source) -> int:
    """Fill stored tensors from the reads of the first rank of `node`; with one rank in `node` nothing is sent.

    Return how many bytes this rank read.

    Raises on all ranks if one failed, and if any file changed while it was read: tensors of two versions may have been
    mixed.
    """
    total = sum(d.piece.numel for d in plan)
    failure: LoadError | None = None
    with (
        Reader(source) as reader,
        progress(f"load {source.directory} on rank {mesh.rank}", total, "elements", enabled=mesh.rank == 0) as advance,
    ):
        for read in plan:
            name = read.piece.param.name
            if mesh.rank == node[0]:
                failure = _read_and_send(read, stored, mesh, reader, failure)
            elif mesh.rank in read.ranks:
                buffer = read.buffer(mesh.device)
                stored[name].copy_(mesh.receive(buffer, node[0], f"the loading of {name}"))
            advance(read.piece.numel)
    if mesh.rank == node[0]:
        failure = failure or _change_of_source(source)
    if len(node) > 1:
        mesh.all_or_none(failure, "the reading of the weights", LoadError)
    elif failure is not None:
        raise failure
    return reader.num_bytes


def _change_of_source(source: Source) -> LoadError | None:
    """Return a LoadError if any file, config and index included, has changed since it was first read."""
    try:
        source.check_unchanged(source.stamps)
    except LoadError as error:
        return error
    return None


def _read_and_send(
    read: Read, stored: Mapping[str, Tensor], mesh: Mesh, reader: Reader, failure: LoadError | None
) -> LoadError | None:
    """Read a piece and send it to its ranks. Return the first failure.

    After a failure nothing more is read, but the other ranks still receive the buffers that they wait for, so that all
    raise together instead of hanging. The reader does not store pieces of other pipeline stages.
    """
    is_own, name = read.ranks == (mesh.rank,), read.piece.param.name
    buffer = stored[name] if is_own else read.buffer("cpu")
    try:
        if failure is None:
            read.fill(reader, buffer)
    except LoadError as error:
        failure = error
    if not is_own:
        buffer = buffer.to(mesh.device)
        for rank in read.ranks:
            if rank == mesh.rank:
                stored[name].copy_(buffer)
            else:
                mesh.send(buffer, rank, f"the loading of {name}")
    return failure
