"""Context parallelism: each cp rank has tokens of the stream that no other has, and mixers must see those before them.

Neighbours swap tokens for heads: each then has all their tokens and a part of the heads, so that documents across a
boundary need no special case, and the load is even. What goes beyond the neighbours are keys and values, or the state
of the delta net.
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
    size, at = mesh.axes.cp, mesh.coords["cp"]
    if size == 1:
        return
    for _, door in find_doors(model, Door):
        if door.kind == SHARE:
            door.armed = functools.partial(own, size=size, part=at)
    dealt = head_splits(spec, mesh.axes, mesh.coords)
    for name, swap in find_doors(model, Swap):
        swap.parts = dealt[swap].parts
        swap.groups, (swap.group, swap.part) = size // swap.parts, divmod(at, swap.parts)
        if swap.parts > 1:
            group = mesh.name_of(mesh.axes.halves(swap.parts)[1:])
            swap.armed = (functools.partial(there, swap, group, name), functools.partial(back, swap, group, name))
    for name, join in find_doors(model, Join):
        if join.parts > 1:
            group = mesh.name_of(mesh.axes.halves(join.swap.parts)[:1])
            join.armed = functools.partial(joined, size=join.parts, group=group, name=name)


def joined(x: Tensor, size: int, group: str, name: str) -> Tensor:
    """Backward sums over all parts what each has found of the gradient."""
    return AllGather.apply(x, size, group, _at(name))


def own(x_T: Tensor, size: int, part: int) -> Tensor:
    """The tokens of this cp rank."""
    return x_T.chunk(size)[part]


def there(swap: Swap, group: str, name: str, xs_TnC: Tensors) -> Tensors:
    """All tensors go in one exchange: for each rank the heads that it needs, side by side."""
    picked = [swap.deal.serving(serves) for _, serves in swap.inputs]
    first = [swap.heads.start // serves for _, serves in swap.inputs]  # the head of a tensor that comes first here
    for_rank = [
        torch.cat([_heads(x, p[rank], at).flatten(1) for x, p, at in zip(xs_TnC, picked, first, strict=True)], 1)
        for rank in range(swap.parts)
    ]
    rows_TC = _exchanged(torch.cat(for_rank), swap, group, name)
    nums = [len(p[swap.part]) for p in picked]
    widths = [num * width for num, (width, _) in zip(nums, swap.inputs, strict=True)]
    got = zip(rows_TC.split(widths, 1), nums, strict=True)
    return tuple(x_TC.unflatten(1, (num, -1)) for x_TC, num in got)


def _heads(x_TnC: Tensor, picked: Sequence[int], first: int) -> Tensor:
    """Some heads; the first that is here is number `first`. A slice where they are a run, which copies nothing."""
    if is_run(picked):
        return x_TnC[:, picked[0] - first : picked[-1] - first + 1]
    return torch.cat([x_TnC[:, head - first : head - first + 1] for head in picked], 1)


def back(swap: Swap, group: str, name: str, y_TnC: Tensor) -> Tensor:
    """Every rank's heads of this rank's tokens, in the order of the heads."""
    rows_TC = _exchanged(y_TnC.flatten(1), swap, group, f"{name}, the way back")
    of_rank = rows_TC.unflatten(0, (swap.parts, -1)).unflatten(2, y_TnC.shape[1:])
    return of_rank.movedim(0, 1).flatten(1, 2)


def _exchanged(rows_TC: Tensor, swap: Swap, group: str, name: str) -> Tensor:
    """An equal part of the rows to each rank."""
    even = [len(rows_TC) // swap.parts] * swap.parts
    return AllToAll.apply(rows_TC, even, even, group, _at(name))


def _at(name: str) -> str:
    """A compiler must not see the name: it would make a graph for every layer."""
    return "a swap" if torch.compiler.is_compiling() else name
