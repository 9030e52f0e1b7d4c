"""Who reads which piece of a source, and to whom it is sent: each rank its own, or one rank a node for its neighbours.

The second is for file systems that many readers slow down: every byte that a node stores is then read once on it.
Files are opened by all ranks, but only for their headers.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import LoadError
from ..layout import Charge, Layout, Piece, Rules, Table, pieces
from ..log import progress
from ..mesh import DENSE, Axes, Mesh, standing, watched
from .header import DTYPES
from .load import Choice, Reader, chosen
from .source import Source
from .streaming import Holding


@dataclass(frozen=True)
class Delivery:
    """A piece that `ranks` store, in the narrowest dtype that holds all that it is made of."""

    piece: Piece
    layout: Layout
    dtype: torch.dtype
    ranks: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return self.piece.numel * self.dtype.itemsize


def deliveries(
    table: Table, rules: Rules, axes: Axes, node: range, source: Source, choice: Choice, fresh: Container[str]
) -> Iterator[Delivery]:
    """Every piece that the ranks of a node store, once, with all of them that store it."""
    held = {rank: pieces(table, rules, axes, axes.coords(rank)) for rank in node}
    for param in table:
        if param.name in fresh:
            continue
        layout, takers = chosen(param, choice), dict[object, list[int]]()
        for rank in node:
            piece = held[rank].get(param.name)
            if piece is not None and piece.numel:
                takers.setdefault((piece.box, piece.lo, piece.hi), []).append(rank)
        for ranks in takers.values():
            yield Delivery(held[ranks[0]][param.name], layout, _dtype(layout, source), tuple(ranks))


def _dtype(layout: Layout, source: Source) -> torch.dtype:
    found = [DTYPES[source.entries[key].dtype] for key in layout.keys]
    widest = found[0]
    for dtype in found[1:]:
        widest = torch.promote_types(widest, dtype)
    return widest


def load_bill(plan: Iterable[Delivery], rank: int, node: range) -> list[Charge]:
    """What this rank sends as the reader of its node, or gets from it."""
    charges = []
    for d in plan:
        others = [r for r in d.ranks if r != node[0]]
        count = len(others) if rank == node[0] else int(rank in others)
        charges.append(Charge(d.piece.param.name, "send" if rank == node[0] else "recv", ("node",), d.num_bytes, count))
    return [c for c in charges if c.count]


@watched()
def fill(holding: Holding, plan: Sequence[Delivery], node: range, source: Source) -> int:
    """Fill what is stored with what the first rank of `node` reads: of this rank alone, no one sends. Bytes read."""
    mesh, stored = holding.mesh, holding.stored
    total = sum(d.piece.numel for d in plan)
    failure: LoadError | None = None
    with (
        Reader(source) as reader,
        progress(f"load {source.directory}", total, "elements", enabled=mesh.rank == 0) as advance,
    ):
        for delivery in plan:
            mine = stored[delivery.piece.param.name]
            if mesh.rank == node[0]:
                failure = _hand_out(delivery, mine, mesh, reader, failure)
            elif mesh.rank in delivery.ranks:
                buffer = torch.empty(delivery.piece.shape, dtype=delivery.dtype, device=mesh.device)
                with standing(f"the loading of {delivery.piece.param.name}"):
                    dist.recv(buffer, node[0])
                mine.copy_(buffer)
            advance(delivery.piece.numel)
    _agree(mesh, node, failure)
    return reader.num_bytes


def _hand_out(d: Delivery, mine: Tensor, mesh: Mesh, reader: Reader, failure: LoadError | None) -> LoadError | None:
    """After a failure nothing more is read, but the others still get what they wait for: all then raise together."""
    alone = d.ranks == (mesh.rank,)
    whole = mine if alone else torch.empty(d.piece.shape, dtype=d.dtype, device="cpu")
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
                mine.copy_(whole)
            else:
                with standing(f"the loading of {d.piece.param.name}"):
                    dist.send(whole, rank)
                    mesh.settle()
    return failure


def _agree(mesh: Mesh, node: range, failure: LoadError | None) -> None:
    if len(node) > 1:
        failed = torch.tensor(0 if failure is None else 1, device=mesh.device)
        mesh.sum_(failed, DENSE, "the end of loading")
        if failed.item() and failure is None:
            raise LoadError("the weights could not be read by a rank that reads for others; see its message")
    if failure is not None:
        raise failure
