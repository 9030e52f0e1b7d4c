"""Expert parallelism: rows travel to the rank that holds their expert, and back. Experts are whole."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .. import ops
from ..mesh import Mesh
from ..ops import Rows
from ..sharding import ROWS, WEIGHTS, Dispatch, PendingRows, find_doors, hops
from .expert_dedup import dispatch_once
from .expert_exchange import Group


def arm(model: nn.Module, mesh: Mesh, *, token_once: bool | int = False) -> None:
    if mesh.axes.ep == 1:
        return
    for name, door in find_doors(model, Dispatch):
        way = hops(name, door.num_experts, mesh.axes, token_once)
        groups = [Group(mesh.name_of(hop.axes), hop) for hop in way]
        door.armed = functools.partial(dispatch_once if token_once else dispatch, groups=groups)


def dispatch(x_TD: Tensor, weight_Tk: Tensor, expert_Tk: Tensor, groups: Sequence[Group]) -> PendingRows:
    """A row for each expert of a token."""
    (group,) = groups
    out, size = ops.by_expert(x_TD, weight_Tk, expert_Tk, group.hop.num_experts), group.hop.size
    x_ND, counts_E = out.x_ND, out.counts_E
    from_rank_RE = group.counts(counts_E.view(size, -1))
    # The host must know the sizes of the pieces, so here it waits for the device. It asks for all it will want to know.
    here_E, num_here = from_rank_RE.sum(0), from_rank_RE.shape[1]
    asked = [counts_E.view(size, -1).sum(1), from_rank_RE.sum(1), here_E]
    sent, received, here = ops.to_host(asked, [len(x_ND)] * 3)
    weights = group.begin(out.weight_N, received, sent, WEIGHTS)
    rows = group.begin(x_ND, received, sent, ROWS)
    expert_N = (
        torch.arange(num_here, device=x_ND.device)
        .repeat(size)
        .repeat_interleave(from_rank_RE.flatten(), output_size=sum(received))
    )
    order_N = expert_N.argsort(stable=True)  # rows come by rank, then by expert; experts want them by expert
    back_N = order_N.argsort()
    sums = out.back  # `out` itself would keep the rows that were sent

    def back(y_ND: Tensor) -> Tensor:
        return sums(group.exchange(ops.reordered(y_ND, back_N, order_N), sent, received, ROWS))

    def come() -> Rows:
        weight_N, x_ND = weights().index_select(0, order_N), ops.reordered(rows(), order_N, back_N)
        return Rows(x_ND, weight_N, here_E, here, back)

    return come
