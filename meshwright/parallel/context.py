"""Context parallelism: each cp rank has a part of the stream. A mixer sees the whole of it, with a part of the heads.

So documents across a boundary of ranks need no special case, and the load is even.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from math import gcd

import torch
from torch import Tensor, nn

from ..axes import Axes
from ..errors import LayoutError
from ..layout import SHARE, Door, ShardingSpec, Swap, find, is_run
from ..layout.doors import Tensors
from ..mesh import Mesh
from ..mesh.collectives import Exchange


def arm(model: nn.Module, mesh: Mesh) -> None:
    size, part = mesh.axes.cp, mesh.coords["cp"]
    if size == 1:
        return
    group = mesh.name_of(("cp",))
    for _, door in find(model, Door):
        if door.kind == SHARE:
            door.armed = functools.partial(own, size=size, part=part)
    for name, swap in find(model, Swap):
        swap.parts, swap.part = size, part
        swap.armed = (functools.partial(there, swap, group, name), functools.partial(back, swap, group, name))


def check_swaps(spec: ShardingSpec, axes: Axes) -> None:
    """Refuse a cp that cannot deal out the heads of a rank of tp, in any mixer."""
    heads: dict[int, str] = {}
    for name, swap in find(spec.module, Swap):
        start, stop = spec.rules.span(swap.heads.dim, swap.heads.size, axes, axes.coords(0), name)
        heads.setdefault(stop - start, name)
    common = gcd(*heads)
    if common % axes.cp:
        named = " and ".join(f"{num} heads of {name}" for num, name in heads.items() if num % axes.cp)
        of_tp = f" that tp={axes.tp} leaves to a rank" if axes.tp > 1 else ""
        choices = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
        raise LayoutError(f"cp={axes.cp} does not divide the {named}{of_tp}; choose cp from {choices}")


def own(x_T: Tensor, size: int, part: int) -> Tensor:
    """The tokens of this cp rank."""
    return x_T.chunk(size)[part]


def there(swap: Swap, group: str, name: str, xs_TnC: Tensors) -> Tensors:
    """All tensors go in one exchange: for each rank the heads that it needs, side by side."""
    picked = [swap.deal.serving(serves) for _, serves in swap.there]
    first = [swap.heads.start // serves for _, serves in swap.there]  # the head of a tensor that comes first here
    for_rank = [
        torch.cat([_heads(x, p[rank], at).flatten(1) for x, p, at in zip(xs_TnC, picked, first, strict=True)], 1)
        for rank in range(swap.parts)
    ]
    rows_TC = _exchanged(torch.cat(for_rank), swap, group, name)
    nums = [len(p[swap.part]) for p in picked]
    widths = [num * width for num, (width, _) in zip(nums, swap.there, strict=True)]
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
    at = "a swap" if torch.compiler.is_compiling() else name  # or the compiler would make a graph for every layer
    return Exchange.apply(rows_TC, even, even, group, at)
