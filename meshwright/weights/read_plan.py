"""Who reads which piece of a source, and sends it to whom: each rank reads its own, or one rank reads for its node.

The second is for file systems that many readers slow down: a node then reads what it stores once (strips of columns
with what lies between them, once for each rank of tp). All ranks open the files, but only for their headers.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..axes import Axes
from ..errors import LoadError
from ..log import progress
from ..mesh import Mesh
from ..sharding import Charge, Layout, Piece, ShardingSpec, pieces
from ..watch import names_lost_ranks
from .keymap import KeyMap
from .quant_formats import BYTES
from .reader import Reader, chosen
from .source import Source


@dataclass(frozen=True)
class Read:
    """A piece that is read once, for all `ranks` that store it, in the narrowest dtype that holds all its values."""

    piece: Piece
    layout: Layout
    dtype: torch.dtype
    ranks: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return self.piece.numel * self.dtype.itemsize


def plan_reads(
    spec: ShardingSpec, axes: Axes, node: range, keymap: KeyMap, names: Container[str] | None = None,
    numbers: Container[str] = (),
) -> Iterator[Read]:  # fmt: skip
    """Every piece that the ranks of a node store, once, with the ranks that store it. `names`: of these alone.
    `numbers`: those that are kept as numbers in 8 bits."""
    assert keymap.source is not None, "there are files to read"
    held = {rank: pieces(spec, axes, rank) for rank in node}
    for param in spec.table:
        if param.name in keymap.fresh or (names is not None and param.name not in names):
            continue
        layout, takers = chosen(param, keymap.choice), dict[object, list[int]]()
        for rank in node:
            piece = held[rank].get(param.name)
            if piece is not None and piece.numel:
                takers.setdefault((piece.box, piece.lo, piece.hi), []).append(rank)
        dtype = BYTES if param.name in numbers else keymap.file_dtype(param)
        for ranks in takers.values():
            yield Read(held[ranks[0]][param.name], layout, dtype, tuple(ranks))


def load_bill(plan: Iterable[Read], rank: int, node: range) -> list[Charge]:
    """What this rank sends as the reader of its node, or receives from it."""
    charges = []
    for d in plan:
        others = [r for r in d.ranks if r != node[0]]
        count = len(others) if rank == node[0] else int(rank in others)
        charges.append(Charge(d.piece.param.name, "send" if rank == node[0] else "recv", ("node",), d.num_bytes, count))
    return [c for c in charges if c.count]


@names_lost_ranks()
def fill(stored: Mapping[str, Tensor], mesh: Mesh, plan: Sequence[Read], node: range, source: Source) -> int:
    """Fill what is stored with what the first rank of `node` reads. If that is this rank alone, nothing is sent.

    Returns how many bytes this rank read.
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
                failure = _read_for_all(read, stored, mesh, reader, failure)
            elif mesh.rank in read.ranks:
                buffer = torch.empty(read.piece.shape, dtype=read.dtype, device=mesh.device)
                stored[name].copy_(mesh.receive(buffer, node[0], f"the loading of {name}"))
            advance(read.piece.numel)
    if mesh.rank == node[0]:
        failure = failure or _changed(source)
    if len(node) > 1:
        mesh.all_or_none(failure, "the reading of the weights", LoadError)
    elif failure is not None:
        raise failure
    return reader.num_bytes


def _changed(source: Source) -> LoadError | None:
    """Whether any file, config.json and index too, was replaced or written into since it was first read."""
    try:
        source.check_unchanged(source.stamps)
    except LoadError as error:
        return error
    return None


def _read_for_all(
    d: Read, stored: Mapping[str, Tensor], mesh: Mesh, reader: Reader, failure: LoadError | None
) -> LoadError | None:
    """After a failure nothing more is read. The others still get what they wait for, so that all raise together. What
    other stages have, the reader does not store."""
    alone, name = d.ranks == (mesh.rank,), d.piece.param.name
    whole = stored[name] if alone else torch.empty(d.piece.shape, dtype=d.dtype, device="cpu")
    try:
        if failure is None:
            reader.fill(d.layout, d.piece, whole)
            reader.check_copies(d.layout, d.piece, whole)
    except LoadError as error:
        failure = error
    if not alone:
        whole = whole.to(mesh.device)
        for rank in d.ranks:
            if rank == mesh.rank:
                stored[name].copy_(whole)
            else:
                mesh.send(whole, rank, f"the loading of {name}")
    return failure
