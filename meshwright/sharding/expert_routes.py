"""The way of rows to the ranks of their experts: straight there, or over a rank of each node that has some."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import comb

from ..axes import Axes
from ..errors import ConfigError

ROWS = ", rows"  # the place, in a door, where rows of tokens are sent whose number the router decides
WEIGHTS = ", weights"  # and where the weights of the experts of tokens are sent
COUNTS = ", the counts"  # how many rows will come
CODES = ", the experts of rows"


@dataclass(frozen=True)
class Hop:
    """`size` places over `axes`, each with its share of `num_experts`. `at`: the door, for errors and the bill.
    `places`: into how many shares all experts of the layer are divided once rows are behind it."""

    at: str
    axes: tuple[str, ...]
    size: int
    num_experts: int
    places: int

    @property
    def num_here(self) -> int:
        return self.num_experts // self.size


def divides(token_once: bool | int, ep: int) -> bool:
    """Whether ranks of `ep` are whole nodes, or all in one."""
    per_node = max(1, token_once)
    return ep % per_node == 0 or per_node % ep == 0


def hops(at: str, num_experts: int, axes: Axes, token_once: bool | int) -> tuple[Hop, ...]:
    """`token_once`: how many neighbours on ep are a node, to which a token goes once. True: a rank is one."""
    per_node = int(token_once)
    if per_node <= 1 or per_node % axes.ep == 0:
        return (Hop(at, ("ep",), axes.ep, num_experts, axes.ep),)
    if not divides(token_once, axes.ep):
        choices = ", ".join(str(n) for n in range(2, axes.ep + 1) if axes.ep % n == 0)
        raise ConfigError(f"token_once: nodes of {per_node} ranks do not divide ep={axes.ep}; choose from {choices}")
    (outer, inner), num_nodes = axes.halves(per_node, "ep"), axes.ep // per_node
    return (
        Hop(f"{at}, to nodes", (outer,), num_nodes, num_experts, num_nodes),
        Hop(f"{at}, within nodes", (inner,), per_node, num_experts // num_nodes, axes.ep),
    )


@cache
def likely_rows(num_tokens: int, top_k: int, num_experts: int, num_places: int) -> int:
    """How many rows go out where a token goes once to each place that has some of its experts, if all are as likely."""
    others = num_experts - num_experts // num_places
    return round(num_tokens * num_places * (1 - comb(others, top_k) / comb(num_experts, top_k)))
