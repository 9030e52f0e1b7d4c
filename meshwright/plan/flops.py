"""Floating-point operations that a model needs for the tokens that are really there, whatever is recomputed.

Attention is causal and within documents: over packed short chats, `length**2` would be mostly invented.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass

from ..blueprint import Blueprint
from ..layout import TOWER, Param, Table


@dataclass(frozen=True)
class Flops:
    """Of a forward and a backward: for each token, and for each square of a document's length."""

    per_token: float
    per_square: float

    def of(self, tokens: float, squares: float) -> float:
        return self.per_token * tokens + self.per_square * squares


def flops_of(blueprint: Blueprint, trained: Set[str]) -> Flops:
    """A product costs 2 operations an element forward, 2 for what it reads and, where it is trained, 2 for itself."""
    table, balance = blueprint.table, blueprint.balance
    share = balance.top_k / balance.num_experts if balance.num_experts else 1.0
    vocabulary = blueprint.module.vocabulary
    per_token = sum(_of_matrix(param, share, trained) for param in table if _is_matrix(param, vocabulary))
    per_token += sum(_of_delta_rule(param.rows, values) for param, values in _delta_nets(table))
    squares = [param.cols for param in table if "heads" in param.cols]
    return Flops(per_token, sum(6.0 * cols["heads"] * cols["head"] for cols in squares))


def _is_matrix(param: Param, vocabulary: str) -> bool:
    """Looking a word up is no product, and neither is a convolution of a channel with itself. A tower is not counted:
    its work is by patches."""
    return (
        bool(param.cols)
        and not param.name.startswith(TOWER)
        and "tap" not in param.cols
        and (param.name != "embed.weight" or vocabulary == param.name)
    )


def _of_matrix(param: Param, share: float, trained: Set[str]) -> float:
    used = share if "expert" in param.dims else 1.0
    return (6.0 if param.name in trained else 4.0) * used * param.numel


def _delta_nets(table: Table) -> Iterator[tuple[Param, int]]:
    """What makes queries, keys and values of a delta net, and the width of the values of a key head."""
    for param in table:
        if "chan" in param.rows and "embed" in param.cols:
            out = param.name.replace("qkv.weight", "out.weight")
            yield param, table[out].cols["value"]


def _of_delta_rule(rows: Mapping[str, int], values: int) -> float:
    """The recurrence: for each key head a state of key x values is read, corrected and read again, and thrice that in
    the backward."""
    key = (rows["chan"] - values) // 2
    return 18.0 * rows["key"] * key * values
