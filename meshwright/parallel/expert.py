"""Expert parallelism: rows travel to the rank that holds their expert, and back. Experts are whole."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from .. import ops
from ..layout import ROWS, WEIGHTS, Coming, Dispatch, Traffic, find, hops, portions
from ..mesh import Mesh
from ..ops import Rows
from .expert_group import Group, Part, sent_back
from .expert_once import dispatch_once


def arm(model: nn.Module, mesh: Mesh, traffic: Traffic) -> None:
    if mesh.axes.ep == 1:
        return
    for name, door in find(model, Dispatch):
        way = hops(name, door.num_experts, mesh.axes, traffic.token_once)
        groups = [Group(mesh.name_of(hop.axes), hop) for hop in way]
        send = dispatch_once if traffic.token_once else dispatch
        door.armed = functools.partial(_in_halves if traffic.expert_halves else _at_once, send, groups)


Send = Callable[[Sequence[Part]], list[Coming]]


def _at_once(send: Send, groups: Sequence[Group], x_TD: Tensor, weight_Tk: Tensor, expert_Tk: Tensor) -> list[Coming]:
    return send([Part(x_TD, weight_Tk, expert_Tk, groups)])


def _in_halves(send: Send, groups: Sequence[Group], x_TD: Tensor, weight_Tk: Tensor, expert_Tk: Tensor) -> list[Coming]:
    """One half is computed while the other travels, there or back."""
    (first, num), (second, others) = portions(len(x_TD), halves=True)
    x, weight, expert = (each.split([num, others]) for each in (x_TD, weight_Tk, expert_Tk))
    return send([
        Part(x[0], weight[0], expert[0], [replace(group, part=first, ahead=True) for group in groups]),
        Part(x[1], weight[1], expert[1], [replace(group, part=second) for group in groups]),
    ])  # fmt: skip


def dispatch(parts: Sequence[Part]) -> list[Coming]:
    """A row for each expert of a token."""
    ways = _ways(parts)
    weights = [way.begin(way.out.weight_N, WEIGHTS) for way in ways]
    rows = [way.begin(way.out.x_ND, ROWS) for way in ways]
    return [_coming(*each) for each in zip(ways, weights, rows, strict=True)]


@dataclass(frozen=True)
class _Way:
    """Of a part: its rows by expert; how many of them go to each rank, how many come from each, and how many are of
    each expert here."""

    out: Rows
    group: Group
    sent: list[int]
    received: list[int]
    here: list[int]
    here_E: Tensor
    from_rank_RE: Tensor

    def begin(self, x: Tensor, what: str) -> Callable[[], Tensor]:
        return self.group.begin(x, self.received, self.sent, what)


def _ways(parts: Sequence[Part]) -> list[_Way]:
    """Ranks tell each other the numbers of all parts at once."""
    groups = [part.groups[0] for part in parts]
    hop = groups[0].hop
    outs = [ops.by_expert(part.x_TD, part.weight_Tk, part.expert_Tk, hop.num_experts) for part in parts]
    to_rank = [out.counts_E.view(hop.size, -1) for out in outs]
    from_rank = groups[0].counts(ops.joined(to_rank, 1)).split(hop.num_here, 1)
    # The host must know the sizes of the pieces, so here it waits for the device. It asks for all it will want to know.
    asked = [(to_RE.sum(1), of_RE.sum(1), of_RE.sum(0)) for to_RE, of_RE in zip(to_rank, from_rank, strict=True)]
    told = ops.on_host(asked, [[len(out.x_ND)] * 3 for out in outs])
    return [
        _Way(out, group, sent, received, here, here_E, of_RE)
        for out, group, (sent, received, here), (_, _, here_E), of_RE in zip(
            outs, groups, told, asked, from_rank, strict=True
        )
    ]


def _coming(way: _Way, weights: Callable[[], Tensor], rows: Callable[[], Tensor]) -> Coming:
    size, num_here = way.from_rank_RE.shape
    expert_N = (
        torch.arange(num_here, device=way.here_E.device)
        .repeat(size)
        .repeat_interleave(way.from_rank_RE.flatten(), output_size=sum(way.received))
    )
    order_N = expert_N.argsort(stable=True)  # rows come by rank, then by expert; experts want them by expert
    back_N = order_N.argsort()
    group, sums, sent, received = way.group, way.out.back, way.sent, way.received  # not `way`: it holds rows

    def back(y_ND: Tensor) -> Callable[[], Tensor]:
        y_ND = ops.reordered(y_ND, back_N, order_N)

        def send() -> Callable[[], Tensor]:
            begun = group.begin(y_ND, sent, received, ROWS)
            return lambda: sums(begun())()  # noqa: PLW0108 - it waits when it is called

        return sent_back(send, ahead=group.ahead)

    def come() -> Rows:
        weight_N, x_ND = weights().index_select(0, order_N), ops.reordered(rows(), order_N, back_N)
        return Rows(x_ND, weight_N, way.here_E, way.here, back)

    return come
