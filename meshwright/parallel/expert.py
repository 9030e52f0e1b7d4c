"""Expert parallelism: rows travel to the rank that holds their expert, and back. Experts are whole."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from .. import ops
from ..layout import Dispatch, find
from ..layout.doors import Came
from ..mesh import Mesh
from ..mesh.collectives import Exchange, exchange
from ..watch import waiting_at


def arm(model: nn.Module, mesh: Mesh) -> None:
    size = mesh.axes.ep
    if size == 1:
        return
    group = mesh.name_of(("ep",))
    for name, door in find(model, Dispatch):
        door.armed = functools.partial(dispatch, size=size, group=group, at=name)


def dispatch(x_ND: Tensor, counts_E: Tensor, size: int, group: str, at: str) -> Came:
    """`x_ND` sorted by expert, `counts_E` rows each -> rows of my experts by expert, their counts, the way back."""
    even = [len(counts_E) // size] * size
    with waiting_at(at, "the counts"):
        from_rank_RE = exchange(counts_E, even, even, group).view(size, -1)
    # The host must know the sizes of the pieces, so here it waits for the device. It asks for all it will want to know.
    here_E, num_here = from_rank_RE.sum(0), from_rank_RE.shape[1]
    asked = [counts_E.view(size, -1).sum(1), from_rank_RE.sum(1), here_E]
    sent, received, here = ops.on_host(asked, total=len(x_ND))
    rows_ND = Exchange.apply(x_ND, received, sent, group, at)
    expert_N = (
        torch.arange(num_here, device=x_ND.device)
        .repeat(size)
        .repeat_interleave(from_rank_RE.flatten(), output_size=sum(received))
    )
    order_N = expert_N.argsort(stable=True)  # rows come by rank, then by expert; experts want them by expert
    back_N = order_N.argsort()

    def back(y_ND: Tensor) -> Tensor:
        return Exchange.apply(ops.reordered(y_ND, back_N, order_N), sent, received, group, f"{at}, the way back")

    return ops.reordered(rows_ND, order_N, back_N), here_E, here, back
