"""Look up rows of an n-gram table that is sharded over the ranks of a pipeline stage, and exchange halos.

An n-gram table has as many elements as the rest of the model (51 billion in Qwen3.8-Flash-Next), and a token reads 16
rows of 160. FSDP would gather all of it. So rows stay where they are: each rank asks the owners for the rows of its own
tokens by all-to-all, and their gradients go back the same way. An owner's gradient is then complete within a replica,
and only the sum over replicas (HSDP) is left. Each replica has a whole table, so a call on one replica needs no other.

Shapes: N rows that own tokens look up, in the order of the tokens; M rows that all ranks ask of this one; W width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import Tensor, nn

from .. import ops
from ..axes import DATA_RANK, STAGE
from ..mesh import Mesh
from ..mesh.collectives import AllToAll, all_to_all
from ..sharding import Halo, Lookup, ShardingSpec, chunk, find_doors, look_up, piece
from ..watch import waiting_at
from .context import gather_parts


def arm(spec: ShardingSpec, model: nn.Module, mesh: Mesh) -> None:
    """Give every `Lookup` door its all-to-alls over the ranks of a stage, and every `Halo` door its all-gather."""
    axes, num_ranks = mesh.axes, prod(mesh.axes.sizes(STAGE))
    for name, door in find_doors(model, Lookup) if num_ranks > 1 else ():
        own = piece(spec.table[door.parameter(name)], spec.rules, axes, mesh.coords)
        step = chunk(own.param.matrix[0], num_ranks, 0)[1]
        door.armed = partial(_from_owners, owners=_Owners(num_ranks, step, own.lo), group=mesh.name_of(STAGE), at=name)
    for name, halo in find_doors(model, Halo) if axes.cp * axes.tp > 1 else ():
        halo.parts, halo.part = axes.cp * axes.tp, mesh.coords["cp"] * axes.tp + mesh.coords["tp"]
        halo.armed = partial(gather_parts, size=halo.parts, group=mesh.name_of(DATA_RANK), name=name)


@dataclass(frozen=True)
class _Owners:
    """The owners of a table's rows: `num` ranks with `step` rows each, this one from row `first` on."""

    num: int
    step: int
    first: int


def _from_owners(
    table_RW: Tensor, row_N: Tensor, dtype: torch.dtype, *, owners: _Owners, group: str, at: str
) -> Tensor:
    """Ask the owners for rows, and answer what the others ask. A row is asked for as often as tokens need it, so that
    the bytes of a step do not depend on the data. -> x_NW in `dtype`
    """
    order_N = row_N.argsort(stable=True)  # by row, and so by owner; an owner then reads its table in order
    asked_N, each = row_N[order_N], [1] * owners.num
    counts_R = ops.count_values(asked_N // owners.step, owners.num)
    with waiting_at(f"{at}, counts", "forward"):
        received_R = all_to_all(counts_R, each, each, group)
    # The one wait for the device: an all-to-all takes sizes as host integers.
    sent, received = ops.to_host([counts_R, received_R], [len(row_N)] * 2)
    with waiting_at(f"{at}, row numbers", "forward"):
        row_M = all_to_all(asked_N, received, sent, group)
    answers_MW = look_up(table_RW, row_M - owners.first, dtype)
    rows_NW: Tensor = AllToAll.apply(answers_MW, sent, received, group, at)  # torch leaves apply untyped
    return ops.reordered(rows_NW, order_N.argsort(), order_N)
