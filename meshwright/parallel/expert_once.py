"""Expert parallelism where a token goes once to each rank that has some of its experts, and comes back once, summed.

What is sent beside the rows says which of that rank's experts want them, and with which weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import ops
from ..layout import ROWS, Coming, likely_rows
from ..mesh.collectives import exchange
from ..ops import Rows
from ..watch import waiting_at
from .expert_group import Group


def dispatch_once(x_TD: Tensor, weight_Tk: Tensor, expert_Tk: Tensor, group: Group) -> Coming:
    """S rows go out, of which N copies are wanted elsewhere. R come in, of which P are wanted here."""
    order_N, code_N, out, sizes = _outgoing(expert_Tk, group)
    rows_SD = ops.copied(x_TD, out)
    with waiting_at(group.at, "the experts of rows"):
        code_P = exchange(code_N, sizes.copies_in, sizes.copies_out, group.name)
    weights = group.begin(weight_Tk.flatten().index_select(0, order_N), sizes.copies_in, sizes.copies_out)
    rows = group.begin(rows_SD, sizes.rows_in, sizes.rows_out, ROWS)
    order_P, here = _incoming(code_P, sizes, group)

    def back(y_PD: Tensor) -> Tensor:
        sum_RD = ops.summed(y_PD, here)
        return ops.summed(group.exchange(sum_RD, sizes.rows_out, sizes.rows_in, ROWS), out)

    def come() -> Rows:
        weight_P, rows_PD = weights().index_select(0, order_P), ops.copied(rows(), here)
        return Rows(rows_PD, weight_P, sizes.here_E, sizes.here, back)

    return come


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


def _outgoing(expert_Tk: Tensor, group: Group) -> tuple[Tensor, Tensor, ops.Copies, _Sizes]:
    """The order in which copies go, by rank and token; of each the number of its row among those for that rank, with
    that of its expert there; the rows as copies of tokens; all sizes."""
    (num_tokens, top_k), num_here = expert_Tk.shape, group.num_here
    token_T1 = torch.arange(num_tokens, device=expert_Tk.device)[:, None]
    # Sorted, it is by rank, then by token, then by expert. No two are equal, so there is one order.
    key_Tk = (expert_Tk // num_here * num_tokens + token_T1) * num_here + expert_Tk % num_here
    key_N, order_N = key_Tk.flatten().sort()
    place_N, expert_N = key_N // num_here, key_N % num_here
    rank_N, token_N = place_N // num_tokens, place_N % num_tokens
    row_N, turn_N = ops.runs(place_N)

    most = min(top_k, num_here)  # copies of a row
    experts_RE = ops.counted(rank_N * num_here + expert_N, group.size * num_here).view(group.size, -1)
    turns_RC = ops.counted(rank_N * most + turn_N, group.size * most).view(group.size, -1)
    got_RE, got_RC = group.counts(torch.cat([experts_RE, turns_RC], 1)).split([num_here, most], 1)
    rows_T = torch.zeros_like(token_T1[:, 0]).scatter_add_(0, token_N, (turn_N == 0).long())
    of_turn = torch.arange(1, min(top_k, group.size), device=rows_T.device)
    later = (rows_T[:, None] > of_turn).sum(0)  # tokens that go to a second rank, a third one, ...

    likely = likely_rows(num_tokens, top_k, group.num_experts, group.size)
    # The host must know the sizes of the pieces, so here it waits for the device. It asks for all it will want to know.
    here_E, copies = got_RE.sum(0), len(key_N)
    rows_out, rows_in, copies_out, copies_in, here, turns_here, turns_out = ops.on_host(
        [turns_RC[:, 0], got_RC[:, 0], experts_RE.sum(1), got_RE.sum(1), here_E, got_RC[:, 1:].sum(0), later],
        [likely, likely, copies, copies, copies, copies - likely, likely - num_tokens],
    )
    begins_P = _before(got_RC[:, 0]).repeat_interleave(got_RE.sum(1), output_size=sum(copies_in))
    sizes = _Sizes(rows_out, rows_in, copies_out, copies_in, [sum(rows_in), *turns_here], here, here_E, begins_P)

    token_S = token_N.new_empty(sum(rows_out)).scatter_(0, row_N, token_N)
    code_N = (row_N - _before(turns_RC[:, 0])[rank_N]) * num_here + expert_N
    return order_N, code_N, ops.copies_of(token_S, ops.turns(token_S), [num_tokens, *turns_out]), sizes


def _before(num_R: Tensor) -> Tensor:
    return num_R.cumsum(0) - num_R


def _incoming(code_P: Tensor, sizes: _Sizes, group: Group) -> tuple[Tensor, ops.Copies]:
    """The order of copies by expert, and of which row each is then. They come by rank, then by row."""
    of_P = code_P // group.num_here + sizes.begins_P
    order_P = (code_P % group.num_here).argsort(stable=True)
    _, turn_P = ops.runs(of_P)
    return order_P, ops.copies_of(of_P[order_P], turn_P[order_P], sizes.turns_here)
