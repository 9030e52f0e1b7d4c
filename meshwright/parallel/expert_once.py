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
from ..layout import CODES, ROWS, WEIGHTS, Coming, likely_rows
from ..ops import Rows
from .expert_group import Group, Part, sent_back


@dataclass(frozen=True)
class _Wanted:
    """Copies of rows that experts want: of which row each is, and which of the experts of a hop wants it. `tokens`: of
    this rank, of each of which `top_k` copies are wanted in all. `rows`, and the weights of copies, may be on their way
    to this rank until they are asked for."""

    of_N: Tensor
    expert_N: Tensor
    num_rows: int
    tokens: int
    top_k: int
    rows: Callable[[], Tensor]
    weights: Callable[[], Tensor]
    group: Group


@dataclass(frozen=True)
class _Leaving:
    """Copies in the order in which they go: by rank, then by row, then by expert. Of each: which of the wanted ones it
    is, its rank, its expert there, of which row it is, and which of the rows that go. What each rank gets: copies of
    each expert; rows with a first copy, a second one, and so on. `later`: rows that go to a second rank, a third one,
    and so on."""

    wanted: _Wanted
    order_N: Tensor
    rank_N: Tensor
    expert_N: Tensor
    of_N: Tensor
    row_N: Tensor
    experts_RE: Tensor
    turns_RC: Tensor
    later: Tensor


@dataclass(frozen=True)
class _Sizes:
    """For each rank, how many rows go to it and come from it, and how many copies are wanted of these. `turns_here`:
    of how many rows a first copy is wanted here, a second one, and so on; `turns_out`: to how many ranks rows go.
    `here`: the rows of each expert. `begins_P`: for each copy that comes, how many rows come from ranks before its
    own."""

    rows_out: list[int]
    rows_in: list[int]
    copies_out: list[int]
    copies_in: list[int]
    turns_here: list[int]
    turns_out: list[int]
    here: list[int]
    here_E: Tensor
    begins_P: Tensor


@dataclass(frozen=True)
class _Sent:
    """Rows on their way, which come by rank; so do their weights. Of each copy that is wanted of them: of which row it
    is, and which expert here wants it. `back`: sums of these rows -> sums of the rows that were sent, on their way."""

    rows: Callable[[], Tensor]
    weights: Callable[[], Tensor]
    of_P: Tensor
    expert_P: Tensor
    sizes: _Sizes
    back: Callable[[Tensor], Callable[[], Tensor]]


def dispatch_once(parts: Sequence[Part]) -> list[Coming]:
    wanted = [_of_tokens(part) for part in parts]
    sent = _send(wanted, here=True)
    ways_back = [[each.back] for each in sent]
    for hop in range(1, len(parts[0].groups)):
        on = [_sent_on(*each, hop) for each in zip(parts, sent, strict=True)]
        sent = _send(on, here=False)
        ways_back = [[each.back, *ways] for each, ways in zip(sent, ways_back, strict=True)]
    return [
        _coming(each, ways, ahead=part.groups[0].ahead) for part, each, ways in zip(parts, sent, ways_back, strict=True)
    ]


def _of_tokens(part: Part) -> _Wanted:
    tokens, top_k = part.expert_Tk.shape
    token_N = torch.arange(tokens, device=part.expert_Tk.device).repeat_interleave(top_k)
    weight_N, expert_N = part.weight_Tk.flatten(), part.expert_Tk.flatten()
    return _Wanted(
        token_N, expert_N, tokens, tokens, top_k, lambda: part.x_TD, lambda: weight_N, part.groups[0]
    )  # fmt: skip


def _sent_on(part: Part, sent: _Sent, hop: int) -> _Wanted:
    tokens, top_k = part.expert_Tk.shape
    return _Wanted(
        sent.of_P, sent.expert_P, sum(sent.sizes.rows_in), tokens, top_k, sent.rows, sent.weights, part.groups[hop]
    )  # fmt: skip


def _coming(sent: _Sent, ways_back: Sequence[Callable[[Tensor], Callable[[], Tensor]]], *, ahead: bool) -> Coming:
    """Only the last of the ways back goes beside other work: it is the longest."""
    order_P, here = _by_expert(sent)
    *inner, outer = ways_back

    def come() -> Rows:
        weight_P, rows_PD = sent.weights().index_select(0, order_P), ops.copied(sent.rows(), here)
        return Rows(rows_PD, weight_P, sent.sizes.here_E, sent.sizes.here, back)

    def back(y_PD: Tensor) -> Callable[[], Tensor]:
        """It holds nothing of `sent`, whose rows nobody wants by then."""
        sum_RD = ops.summed(y_PD, here)

        def send() -> Callable[[], Tensor]:
            sum_SD = sum_RD
            for way_back in inner:
                sum_SD = way_back(sum_SD)()
            return outer(sum_SD)

        return sent_back(send, ahead=ahead)

    return come


def _send(wanted: Sequence[_Wanted], *, here: bool) -> list[_Sent]:
    """S rows of each part go out, of which N copies are wanted elsewhere. R come in, of which P are wanted here.

    `here`: rows are here already. Else those of the first part go on as soon as they are, and others when they are
    asked for: what is computed before would wait for them too.
    """
    leaving = [_leaving(each) for each in wanted]
    sizes = _sizes(leaving)
    both = [*zip(leaving, sizes, strict=True)]
    codes = [_exchange_codes(*each) for each in both]
    weights = [_begin_weights(*each) for each in both]
    return [
        _sent(*each, code_P, come, at_once=here or number == 0)
        for number, (each, code_P, come) in enumerate(zip(both, codes, weights, strict=True))
    ]


def _leaving(wanted: _Wanted) -> _Leaving:
    hop, num_rows, num_here = wanted.group.hop, wanted.num_rows, wanted.group.hop.num_here
    # Sorted, it is by rank, then by row, then by expert. No two are equal, so there is one order.
    key_N = (wanted.expert_N // num_here * num_rows + wanted.of_N) * num_here + wanted.expert_N % num_here
    key_N, order_N = key_N.sort()
    place_N, expert_N = key_N // num_here, key_N % num_here
    rank_N, of_N = place_N // max(1, num_rows), place_N % max(1, num_rows)
    row_N, turn_N = ops.runs(place_N)

    most = min(wanted.top_k, num_here)  # copies of a row
    experts_RE = ops.counted(rank_N * num_here + expert_N, hop.size * num_here).view(hop.size, -1)
    turns_RC = ops.counted(rank_N * most + turn_N, hop.size * most).view(hop.size, -1)
    ranks_T = of_N.new_zeros(num_rows).scatter_add_(0, of_N, (turn_N == 0).long())
    of_turn = torch.arange(1, min(wanted.top_k, hop.size), device=of_N.device)
    later = (ranks_T[:, None] > of_turn).sum(0)
    return _Leaving(wanted, order_N, rank_N, expert_N, of_N, row_N, experts_RE, turns_RC, later)


def _sizes(leaving: Sequence[_Leaving]) -> list[_Sizes]:
    """Ranks tell each other those of all parts at once."""
    group, num_here = leaving[0].wanted.group, leaving[0].wanted.group.hop.num_here
    mine = [torch.cat([each.experts_RE, each.turns_RC], 1) for each in leaving]
    got = group.counts(ops.joined(mine, 1)).split(mine[0].shape[1], 1)
    shares = [each.tensor_split([num_here], 1) for each in got]
    # The host must know the sizes of the pieces, so here it waits for the device. It asks for all it will want to know.
    asked = [_asked(each, *share) for each, share in zip(leaving, shares, strict=True)]
    told = ops.on_host(asked, [_likely(each.wanted) for each in leaving])
    return [_told(each, *share, of=numbers) for each, share, numbers in zip(leaving, shares, told, strict=True)]


def _asked(leaving: _Leaving, got_RE: Tensor, got_RC: Tensor) -> list[Tensor]:
    rows, copies = (leaving.turns_RC[:, 0], got_RC[:, 0]), (leaving.experts_RE.sum(1), got_RE.sum(1))
    return [*rows, *copies, got_RE.sum(0), got_RC[:, 1:].sum(0), leaving.later]


def _likely(wanted: _Wanted) -> list[int]:
    hop, copies = wanted.group.hop, len(wanted.of_N)
    likely = likely_rows(wanted.tokens, wanted.top_k, hop.num_here * hop.places, hop.places)
    return [likely, likely, copies, copies, copies, copies - likely, likely - wanted.num_rows]


def _told(leaving: _Leaving, got_RE: Tensor, got_RC: Tensor, *, of: list[list[int]]) -> _Sizes:
    rows_out, rows_in, copies_out, copies_in, here, turns_here, turns_out = of
    begins_P = _before(got_RC[:, 0]).repeat_interleave(got_RE.sum(1), output_size=sum(copies_in))
    turns_out, turns_here = [leaving.wanted.num_rows, *turns_out], [sum(rows_in), *turns_here]
    return _Sizes(rows_out, rows_in, copies_out, copies_in, turns_here, turns_out, here, got_RE.sum(0), begins_P)


def _exchange_codes(leaving: _Leaving, sizes: _Sizes) -> Tensor:
    """Of each copy the number of its row among those for its rank, with that of its expert there."""
    group = leaving.wanted.group
    row_N = leaving.row_N - _before(leaving.turns_RC[:, 0])[leaving.rank_N]
    code_N = row_N * group.hop.num_here + leaving.expert_N
    return group.numbers(code_N, sizes.copies_in, sizes.copies_out, CODES)


def _begin_weights(leaving: _Leaving, sizes: _Sizes) -> Callable[[], Tensor]:
    weight_N = leaving.wanted.weights().index_select(0, leaving.order_N)
    return leaving.wanted.group.begin(weight_N, sizes.copies_in, sizes.copies_out, WEIGHTS)


def _sent(
    leaving: _Leaving, sizes: _Sizes, code_P: Tensor, weights: Callable[[], Tensor], *, at_once: bool
) -> _Sent:  # fmt: skip
    group, num_here, coming = leaving.wanted.group, leaving.wanted.group.hop.num_here, leaving.wanted.rows
    of_S = leaving.of_N.new_empty(sum(sizes.rows_out)).scatter_(0, leaving.row_N, leaving.of_N)
    out = ops.copies_of(of_S, ops.turns(of_S), sizes.turns_out)

    def begin() -> Callable[[], Tensor]:
        return group.begin(ops.copied(coming(), out), sizes.rows_in, sizes.rows_out, ROWS)

    def back(sum_RD: Tensor) -> Callable[[], Tensor]:
        begun = group.begin(sum_RD, sizes.rows_out, sizes.rows_in, ROWS)
        return lambda: ops.summed(begun(), out)

    def when_asked() -> Tensor:
        return begin()()

    rows = begin() if at_once else when_asked
    return _Sent(rows, weights, code_P // num_here + sizes.begins_P, code_P % num_here, sizes, back)


def _before(num_R: Tensor) -> Tensor:
    return num_R.cumsum(0) - num_R


def _by_expert(sent: _Sent) -> tuple[Tensor, ops.Copies]:
    """The order of copies by expert, and of which row each is then. They come by rank, then by row."""
    order_P = sent.expert_P.argsort(stable=True)
    _, turn_P = ops.runs(sent.of_P)
    return order_P, ops.copies_of(sent.of_P[order_P], turn_P[order_P], sent.sizes.turns_here)
