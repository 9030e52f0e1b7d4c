"""Expert parallelism (ep): rows travel to the rank that holds their expert, and back. Experts are not split.

The two all-to-alls of GShard (arXiv:2006.16668), without its expert capacity: no token is dropped. Gradients need no
special rule. Each expert's rows from all data ranks come to its one owner, so the gradient is complete. A factor of ep
that is applied, or forgotten, elsewhere makes expert gradients ep times too large (pytorch#160285, Megatron-LM#5956).

Shapes, for T own tokens, k experts per token, R ranks, E experts, E/R of them local:

  x_TD  --sort by expert-->  x_ND (N = T k)  --all-to-all-->  received rows, by source rank
        --sort by local expert-->  grouped matmul  --inverse sort, all-to-all-->  y_ND  --weighted sum-->  y_TD
"""

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
    """Give every `Dispatch` door its all-to-alls over ep."""
    if mesh.axes.ep == 1:
        return
    for name, door in find_doors(model, Dispatch):
        route = hops(name, door.num_experts, mesh.axes, token_once)
        groups = [Group(mesh.name_of(hop.axes), hop) for hop in route]
        door.armed = functools.partial(dispatch_once if token_once else dispatch, groups=groups)


def dispatch(x_TD: Tensor, weight_Tk: Tensor, expert_Tk: Tensor, groups: Sequence[Group]) -> PendingRows:
    """Send one row per (token, expert) pair to the owner of the expert, and return a handle that waits for the rows.

    `x_TD` holds own tokens, `weight_Tk` and `expert_Tk` their top-k routing. Rows are in flight when it returns, so
    that a shared expert can compute meanwhile.

    Routing weights travel with the rows and are multiplied at the expert. Their gradient then comes back by the same
    all-to-all; masking scores per rank instead loses it (transformers#48205).
    """
    (group,) = groups
    out, size = ops.by_expert(x_TD, weight_Tk, expert_Tk, group.hop.num_experts), group.hop.size
    x_ND, counts_E = out.x_ND, out.counts_E
    received_RE = group.counts(counts_E.view(size, -1))
    # all-to-all takes split sizes as host integers, so this is the one device-to-host sync of the layer. It copies all
    # that the host will need, grouped matmul's counts too. Padding each expert to a capacity would avoid the sync and
    # drop tokens (GShard, arXiv:2006.16668); dropless routing (MegaBlocks, arXiv:2211.15841) needs true counts.
    local_E, num_local = received_RE.sum(0), received_RE.shape[1]
    sizes = [counts_E.view(size, -1).sum(1), received_RE.sum(1), local_E]
    sent, received, local_counts = ops.to_host(sizes, [len(x_ND)] * 3)
    weights = group.begin(out.weight_N, received, sent, WEIGHTS)
    rows = group.begin(x_ND, received, sent, ROWS)
    expert_N = (
        torch.arange(num_local, device=x_ND.device)
        .repeat(size)
        .repeat_interleave(received_RE.flatten(), output_size=sum(received))
    )
    # Rows arrive sorted by source rank, then by expert; grouped matmul wants them sorted by expert.
    order_N = expert_N.argsort(stable=True)
    back_N = order_N.argsort()
    combine = out.back  # a reference to `out` would keep the sent rows alive until the experts are done

    def back(y_ND: Tensor) -> Tensor:
        return combine(group.exchange(ops.reordered(y_ND, back_N, order_N), sent, received, ROWS))

    def come() -> Rows:
        weight_N, x_ND = weights().index_select(0, order_N), ops.reordered(rows(), order_N, back_N)
        return Rows(x_ND, weight_N, local_E, local_counts, back)

    return come
