"""Expert parallelism where a token goes once to each rank that has some of its experts, and comes back once, summed.

Or it goes once to each node that has some: to the rank that stands there where its own stands in its node, which sends
it on. What goes beside the rows says which of the experts there want them, and with which weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import ops
from ..ops import Rows
from ..sharding import CODES, ROWS, WEIGHTS, PendingRows, expected_rows
from .expert_exchange import Group


@dataclass(frozen=True)
class _Wanted:
    """Copies of rows that experts want: of which row each is, and which of the experts of a hop wants it. `tokens`: of
    this rank, of each of which `top_k` copies are wanted in all."""

    of_N: Tensor
    expert_N: Tensor
    num_rows: int
    tokens: int
    top_k: int


@dataclass(frozen=True)
class _Sizes:
    """For each rank, how many rows go to it and come from it, and how many copies are wanted of these. `turns_here`:
    of how many rows a first copy is wanted here, a second one, and so on. `here`: the rows of each expert. `begins_P`:
    for each copy that comes, how many rows come from ranks before its own."""

    rows_out: list[int]
    rows_in: list[int]
    copies_out: list[int]
    copies_in: list[int]
    turns_here: list[int]
    here: list[int]
    here_E: Tensor
    begins_P: Tensor


@dataclass(frozen=True)
class _Sent:
    """Rows on their way, which come by rank; so do their weights. Of each copy that is wanted of them: of which row it
    is, and which expert here wants it. `back`: sums of these rows -> sums of the rows that were sent."""

    rows: Callable[[], Tensor]
    weights: Callable[[], Tensor]
    of_P: Tensor
    expert_P: Tensor
    sizes: _Sizes
    back: Callable[[Tensor], Tensor]


def dispatch_once(x_TD: Tensor, weight_Tk: Tensor, expert_Tk: Tensor, groups: Sequence[Group]) -> PendingRows:
    tokens, top_k = expert_Tk.shape
    token_N, weight_N = torch.arange(tokens, device=expert_Tk.device).repeat_interleave(top_k), weight_Tk.flatten()
    wanted = _Wanted(token_N, expert_Tk.flatten(), tokens, tokens, top_k)
    last = _send(lambda: x_TD, lambda: weight_N, wanted, groups[0])
    ways_back = [last.back]
    for group in groups[1:]:
        wanted = _Wanted(last.of_P, last.expert_P, sum(last.sizes.rows_in), tokens, top_k)
        last = _send(last.rows, last.weights, wanted, group)
        ways_back.append(last.back)
    order_P, here = _by_expert(last)

    def come() -> Rows:
        weight_P, rows_PD = last.weights().index_select(0, order_P), ops.gather_copies(last.rows(), here)
        return Rows(rows_PD, weight_P, last.sizes.here_E, last.sizes.here, back)

    def back(y_PD: Tensor) -> Tensor:
        """It holds nothing of `last`, whose rows nobody wants by then."""
        sum_RD = ops.sum_copies(y_PD, here)
        for way_back in reversed(ways_back):
            sum_RD = way_back(sum_RD)
        return sum_RD

    return come


def _send(coming: Callable[[], Tensor], weights_N: Callable[[], Tensor], wanted: _Wanted, group: Group) -> _Sent:
    """S rows go out, of which N copies are wanted elsewhere. R come in, of which P are wanted here. What is sent may be
    on its way to this rank, until all is known of how it goes on."""
    order_N, code_N, out, sizes = _outgoing(wanted, group)
    copies_in, copies_out = sizes.copies_in, sizes.copies_out
    code_P = group.numbers(code_N, copies_in, copies_out, CODES)
    weights = group.begin(weights_N().index_select(0, order_N), copies_in, copies_out, WEIGHTS)
    rows = group.begin(ops.gather_copies(coming(), out), sizes.rows_in, sizes.rows_out, ROWS)
    of_P, expert_P = code_P // group.hop.num_here + sizes.begins_P, code_P % group.hop.num_here

    def back(sum_RD: Tensor) -> Tensor:
        return ops.sum_copies(group.exchange(sum_RD, sizes.rows_out, sizes.rows_in, ROWS), out)

    return _Sent(rows, weights, of_P, expert_P, sizes, back)


def _outgoing(wanted: _Wanted, group: Group) -> tuple[Tensor, Tensor, ops.Copies, _Sizes]:
    """The order in which copies go, by rank and row; of each the number of its row among those for that rank, with that
    of its expert there; the rows that go as copies of rows; all sizes."""
    hop, num_rows, num_here = group.hop, wanted.num_rows, group.hop.num_here
    # Sorted, it is by rank, then by row, then by expert. No two are equal, so there is one order.
    key_N = (wanted.expert_N // num_here * num_rows + wanted.of_N) * num_here + wanted.expert_N % num_here
    key_N, order_N = key_N.sort()
    place_N, expert_N = key_N // num_here, key_N % num_here
    rank_N, of_N = place_N // max(1, num_rows), place_N % max(1, num_rows)
    row_N, turn_N = ops.runs(place_N)

    most = min(wanted.top_k, num_here)  # copies of a row
    experts_RE = ops.count_values(rank_N * num_here + expert_N, hop.size * num_here).view(hop.size, -1)
    turns_RC = ops.count_values(rank_N * most + turn_N, hop.size * most).view(hop.size, -1)
    got_RE, got_RC = group.counts(torch.cat([experts_RE, turns_RC], 1)).split([num_here, most], 1)
    ranks_T = of_N.new_zeros(num_rows).scatter_add_(0, of_N, (turn_N == 0).long())
    of_turn = torch.arange(1, min(wanted.top_k, hop.size), device=of_N.device)
    later = (ranks_T[:, None] > of_turn).sum(0)  # rows that go to a second rank, a third one, ...

    likely = expected_rows(wanted.tokens, wanted.top_k, num_here * hop.places, hop.places)
    # The host must know the sizes of the pieces, so here it waits for the device. It asks for all it will want to know.
    here_E, copies = got_RE.sum(0), len(key_N)
    rows_out, rows_in, copies_out, copies_in, here, turns_here, turns_out = ops.to_host(
        [turns_RC[:, 0], got_RC[:, 0], experts_RE.sum(1), got_RE.sum(1), here_E, got_RC[:, 1:].sum(0), later],
        [likely, likely, copies, copies, copies, copies - likely, likely - num_rows],
    )
    begins_P = _before(got_RC[:, 0]).repeat_interleave(got_RE.sum(1), output_size=sum(copies_in))
    sizes = _Sizes(rows_out, rows_in, copies_out, copies_in, [sum(rows_in), *turns_here], here, here_E, begins_P)

    of_S = of_N.new_empty(sum(rows_out)).scatter_(0, row_N, of_N)
    code_N = (row_N - _before(turns_RC[:, 0])[rank_N]) * num_here + expert_N
    return order_N, code_N, ops.copies_of(of_S, ops.turns(of_S), [num_rows, *turns_out]), sizes


def _before(num_R: Tensor) -> Tensor:
    return num_R.cumsum(0) - num_R


def _by_expert(sent: _Sent) -> tuple[Tensor, ops.Copies]:
    """The order of copies by expert, and of which row each is then. They come by rank, then by row."""
    order_P = sent.expert_P.argsort(stable=True)
    _, turn_P = ops.runs(sent.of_P)
    return order_P, ops.copies_of(sent.of_P[order_P], turn_P[order_P], sent.sizes.turns_here)
