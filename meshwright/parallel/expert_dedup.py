"""Deduplicated expert dispatch: send each token once per rank, and sum partial results before they return.

With top-k = 8 and 8 ranks, plain dispatch sends up to 8 copies of a token, several of them to the same rank. Here each
rank that owns any of its experts gets one copy, makes further copies locally, and returns one weighted sum. DeepSeek's
DeepEP does the same on NVLink and RDMA, and DeepSeek-V3 limits a token to 4 nodes for that reason (arXiv:2412.19437,
section 3.2.2).

With nodes, a token goes once to each node that owns some of its experts: to the rank of that node with the sender's own
local index, which fans it out inside of the node. Along with the rows, ranks send an integer code per copy (which row,
which expert) and its routing weight.

Partial sums are rounded to the compute dtype once more on their way back, so results differ from plain dispatch by
rounding.
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
class _Requests:
    """The copies of rows that experts request: `of_N` is the row of each copy, `expert_N` its expert among those of the
    hop. `tokens` and `top_k` (of the layer) bound how many rows can arrive."""

    of_N: Tensor
    expert_N: Tensor
    num_rows: int
    tokens: int
    top_k: int


@dataclass(frozen=True)
class _Sizes:
    """Row and copy counts of one hop, as the host and the kernels need them.

    `rows_out`, `rows_in`, `copies_out`, `copies_in`: one entry per rank. `local_turns`: how many received rows have a
    first local copy, a second one, and so on. `local` and `local_E`: rows of each local expert, on the host and on the
    device. `begins_P`: for each received copy, how many rows come from the ranks before its sender.
    """

    rows_out: list[int]
    rows_in: list[int]
    copies_out: list[int]
    copies_in: list[int]
    local_turns: list[int]
    local: list[int]
    local_E: Tensor
    begins_P: Tensor


@dataclass(frozen=True)
class _Sent:
    """Rows and weights in flight. `of_P` and `expert_P`: the received row and the local expert of each copy. `back`
    returns sums of received rows to the rows that were sent."""

    rows: Callable[[], Tensor]
    weights: Callable[[], Tensor]
    of_P: Tensor
    expert_P: Tensor
    sizes: _Sizes
    back: Callable[[Tensor], Tensor]


def dispatch_once(x_TD: Tensor, weight_Tk: Tensor, expert_Tk: Tensor, groups: Sequence[Group]) -> PendingRows:
    """Send each token once per rank (or node, then rank) of its experts; return a handle that waits for the rows."""
    tokens, top_k = expert_Tk.shape
    token_N, weight_N = torch.arange(tokens, device=expert_Tk.device).repeat_interleave(top_k), weight_Tk.flatten()
    requests = _Requests(token_N, expert_Tk.flatten(), tokens, tokens, top_k)
    last = _send(lambda: x_TD, lambda: weight_N, requests, groups[0])
    returns = [last.back]
    for group in groups[1:]:
        requests = _Requests(last.of_P, last.expert_P, sum(last.sizes.rows_in), tokens, top_k)
        last = _send(last.rows, last.weights, requests, group)
        returns.append(last.back)
    order_P, copies = _by_expert(last)

    def come() -> Rows:
        # Called when the experts are about to run: waits for the rows, then makes the local copies.
        weight_P, rows_PD = last.weights().index_select(0, order_P), ops.gather_copies(last.rows(), copies)
        return Rows(rows_PD, weight_P, last.sizes.local_E, last.sizes.local, back)

    def back(y_PD: Tensor) -> Tensor:
        # It must not refer to `last`: that would keep the received rows alive through the experts.
        sum_RD = ops.sum_copies(y_PD, copies)
        for return_sums in reversed(returns):
            sum_RD = return_sums(sum_RD)
        return sum_RD

    return come


def _send(coming: Callable[[], Tensor], weights_N: Callable[[], Tensor], requests: _Requests, group: Group) -> _Sent:
    """Send S distinct rows for N requested copies, and receive R rows that P local copies are made of.

    `coming` and `weights_N` are called late: they may be the waits of the hop before, and the sizes of this hop are
    computed while those rows travel.
    """
    order_N, code_N, out, sizes = _outgoing(requests, group)
    copies_in, copies_out = sizes.copies_in, sizes.copies_out
    code_P = group.exchange_ints(code_N, copies_in, copies_out, CODES)
    weights = group.begin(weights_N().index_select(0, order_N), copies_in, copies_out, WEIGHTS)
    rows = group.begin(ops.gather_copies(coming(), out), sizes.rows_in, sizes.rows_out, ROWS)
    of_P, expert_P = code_P // group.hop.num_here + sizes.begins_P, code_P % group.hop.num_here

    def back(sum_RD: Tensor) -> Tensor:
        return ops.sum_copies(group.exchange(sum_RD, sizes.rows_out, sizes.rows_in, ROWS), out)

    return _Sent(rows, weights, of_P, expert_P, sizes, back)


def _outgoing(requests: _Requests, group: Group) -> tuple[Tensor, Tensor, ops.Copies, _Sizes]:
    """Return the order of copies (by rank, then row), their integer codes (row index at the receiver times its
    number of experts, plus expert), the copies that are sent as rows, and all sizes."""
    hop, num_rows, num_local = group.hop, requests.num_rows, group.hop.num_here
    # One integer key sorts by rank, then row, then expert. Keys are unique, so the order needs no stable sort.
    key_N = (requests.expert_N // num_local * num_rows + requests.of_N) * num_local + requests.expert_N % num_local
    key_N, order_N = key_N.sort()
    place_N, expert_N = key_N // num_local, key_N % num_local
    rank_N, of_N = place_N // max(1, num_rows), place_N % max(1, num_rows)
    row_N, turn_N = ops.runs(place_N)

    most = min(requests.top_k, num_local)  # upper bound on the copies of one row at one rank
    experts_RE = ops.count_values(rank_N * num_local + expert_N, hop.size * num_local).view(hop.size, -1)
    turns_RC = ops.count_values(rank_N * most + turn_N, hop.size * most).view(hop.size, -1)
    got_RE, got_RC = group.counts(torch.cat([experts_RE, turns_RC], 1)).split([num_local, most], 1)
    ranks_T = of_N.new_zeros(num_rows).scatter_add_(0, of_N, (turn_N == 0).long())
    of_turn = torch.arange(1, min(requests.top_k, hop.size), device=of_N.device)
    later = (ranks_T[:, None] > of_turn).sum(0)  # rows that go to a second rank, a third one, ...

    likely_rows_in = expected_rows(requests.tokens, requests.top_k, num_local * hop.places, hop.places)
    # The one device-to-host sync of the hop: all-to-all takes split sizes as host integers. See `expert.dispatch`.
    local_E, copies = got_RE.sum(0), len(key_N)
    rows_out, rows_in, copies_out, copies_in, local, local_turns, turns_out = ops.to_host(
        [turns_RC[:, 0], got_RC[:, 0], experts_RE.sum(1), got_RE.sum(1), local_E, got_RC[:, 1:].sum(0), later],
        [likely_rows_in, likely_rows_in, copies, copies, copies, copies - likely_rows_in, likely_rows_in - num_rows],
    )
    begins_P = _before(got_RC[:, 0]).repeat_interleave(got_RE.sum(1), output_size=sum(copies_in))
    sizes = _Sizes(rows_out, rows_in, copies_out, copies_in, [sum(rows_in), *local_turns], local, local_E, begins_P)

    of_S = of_N.new_empty(sum(rows_out)).scatter_(0, row_N, of_N)
    code_N = (row_N - _before(turns_RC[:, 0])[rank_N]) * num_local + expert_N
    return order_N, code_N, ops.copies_of(of_S, ops.turns(of_S), [num_rows, *turns_out]), sizes


def _before(num_R: Tensor) -> Tensor:
    """Return the exclusive prefix sum."""
    return num_R.cumsum(0) - num_R


def _by_expert(sent: _Sent) -> tuple[Tensor, ops.Copies]:
    """Return the order of copies by expert, and the received row of each copy in that order. They arrive by rank, then
    row."""
    order_P = sent.expert_P.argsort(stable=True)
    _, turn_P = ops.runs(sent.of_P)
    return order_P, ops.copies_of(sent.of_P[order_P], turn_P[order_P], sent.sizes.local_turns)
