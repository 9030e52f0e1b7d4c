"""Context parallelism: Ulysses all-to-all within groups of ranks, all-gather of keys and values between the groups.

Each cp rank holds a slice of the token stream, but a mixer also needs the tokens before that slice. So `parts`
neighbouring ranks exchange tokens for heads by all-to-all, as DeepSpeed-Ulysses does (arXiv:2309.14509). Before it, a
rank holds its own tokens with all heads, `[T, n, C]`. After it, the rank holds the tokens of all `parts` neighbours
with its share of the heads, `[parts*T, n/parts, C]`. With `parts == cp`, attention and the delta rule then see whole
documents. The load is even, and a document that crosses a boundary needs no special case.

Ring attention balances its load by a zigzag order of tokens, which a recurrence (gated delta rule) cannot follow.
Wrapping attention alone would restart the state of linear attention at each shard. Then only the forward of the first
shard is right, and gradients are wrong (accelerate#4177).

Ulysses needs at least as many heads on a tp rank as neighbours. With more cp ranks, several groups of `parts`
neighbours remain. Between the groups, keys and values are all-gathered (as in Llama 3's context parallelism,
arXiv:2407.21783), and the delta net passes on its state.

Shapes for cp=4 with parts=2 (two groups of two neighbours), T tokens per rank, n heads:

  own tokens, all heads    [T, n, C]      --all-to-all-->   [2T, n/2, C]    tokens of both neighbours, half of the heads
  keys and values          [2T, n/2, C]   --all-gather-->   [4T, n/2, C]    tokens of both groups
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..mesh import Mesh
from ..mesh.collectives import AllGather, AllToAll
from ..sharding import SHARE, Door, Join, ShardingSpec, Swap, find_doors, head_splits, is_run
from ..sharding.doors import Tensors


def arm(spec: ShardingSpec, model: nn.Module, mesh: Mesh) -> None:
    """Give every `Share`, `Swap` and `Join` door of the model its collective over cp."""
    size, at = mesh.axes.cp, mesh.coords["cp"]
    if size == 1:
        return
    for _, door in find_doors(model, Door):
        if door.kind == SHARE:
            door.armed = functools.partial(own_tokens, size=size, part=at)
    splits = head_splits(spec, mesh.axes, mesh.coords)
    for name, swap in find_doors(model, Swap):
        swap.parts = splits[swap].parts
        swap.groups, (swap.group, swap.part) = size // swap.parts, divmod(at, swap.parts)
        if swap.parts > 1:
            group = mesh.name_of(mesh.axes.halves(swap.parts)[1:])
            swap.armed = (
                functools.partial(tokens_to_heads, swap, group, name),
                functools.partial(heads_to_tokens, swap, group, name),
            )
    for name, join in find_doors(model, Join):
        if join.parts > 1:
            group = mesh.name_of(mesh.axes.halves(join.swap.parts)[:1])
            join.armed = functools.partial(gather_parts, size=join.parts, group=group, name=name)


def gather_parts(x: Tensor, size: int, group: str, name: str) -> Tensor:
    """All-gather a tensor over the parts of the stream. Backward reduce-scatters (sums) its gradient.

    Every part uses all of the gathered keys, so each part computes a share of their gradient, and the shares must be
    summed. A gather whose backward only slices keeps 1/parts of the gradient (NeMo-Automodel#1260).
    """
    return AllGather.apply(x, size, group, _at(name))


def own_tokens(x_T: Tensor, size: int, part: int) -> Tensor:
    """Return the tokens of this cp rank. Each rank of a data rank has the whole stream, so nothing is sent."""
    return x_T.chunk(size)[part]


def tokens_to_heads(swap: Swap, group: str, name: str, xs_TnC: Tensors) -> Tensors:
    """Exchange own tokens of all heads for all tokens of own heads. `xs_TnC`: queries, keys, values, gates, ...

    All tensors go in one all-to-all: for each rank the heads that it needs, concatenated along the last dim. Tensors
    may have fewer heads than queries do (GQA): a kv head goes to every rank whose queries it serves.
    """
    picked = [swap.deal.serving(serves) for _, serves in swap.inputs]
    first = [swap.heads.start // serves for _, serves in swap.inputs]  # number of each tensor's first local head
    for_rank = [
        torch.cat([_heads(x, p[rank], at).flatten(1) for x, p, at in zip(xs_TnC, picked, first, strict=True)], 1)
        for rank in range(swap.parts)
    ]
    rows_TC = _all_to_all(torch.cat(for_rank), swap, group, name)
    nums = [len(p[swap.part]) for p in picked]
    widths = [num * width for num, (width, _) in zip(nums, swap.inputs, strict=True)]
    got = zip(rows_TC.split(widths, 1), nums, strict=True)
    return tuple(x_TC.unflatten(1, (num, -1)) for x_TC, num in got)


def _heads(x_TnC: Tensor, picked: Sequence[int], first: int) -> Tensor:
    """Select some heads; `first` numbers the first local head. A contiguous range is a view, not a copy."""
    if is_run(picked):
        return x_TnC[:, picked[0] - first : picked[-1] - first + 1]
    return torch.cat([x_TnC[:, head - first : head - first + 1] for head in picked], 1)


def heads_to_tokens(swap: Swap, group: str, name: str, y_TnC: Tensor) -> Tensor:
    """Exchange all tokens of own heads for own tokens of all heads, in head order: the inverse all-to-all."""
    rows_TC = _all_to_all(y_TnC.flatten(1), swap, group, f"{name}, the way back")
    of_rank = rows_TC.unflatten(0, (swap.parts, -1)).unflatten(2, y_TnC.shape[1:])
    return of_rank.movedim(0, 1).flatten(1, 2)


def _all_to_all(rows_TC: Tensor, swap: Swap, group: str, name: str) -> Tensor:
    """Send an equal part of the rows to each rank."""
    even = [len(rows_TC) // swap.parts] * swap.parts
    return AllToAll.apply(rows_TC, even, even, group, _at(name))


def _at(name: str) -> str:
    """Return the name of the door for heartbeats.

    While compiling, return one name for all doors. A door's own name would be a constant of the graph, and every layer
    would compile a graph of its own.
    """
    return "a context parallel exchange" if torch.compiler.is_compiling() else name
