"""Routes of rows to the ranks of their experts: directly, or hierarchically over one rank of each node (two hops)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import comb

from ..axes import Axes
from ..errors import ConfigError

# Suffixes of a door's name, one for each of its all-to-alls: rows of tokens (their number depends on routing), routing
# weights, how many rows will come, and which experts each row is for.
ROWS = ", rows"
WEIGHTS = ", weights"
COUNTS = ", the counts"
CODES = ", the experts of rows"


@dataclass(frozen=True)
class Hop:
    """One exchange among `size` ranks over `axes`, each responsible for its share of `num_experts`.

    `at`: its name, for errors and the bill. `places`: the number of shares into which the hop divides the experts of
    the layer.
    """

    at: str
    axes: tuple[str, ...]
    size: int
    num_experts: int
    places: int

    @property
    def num_here(self) -> int:
        return self.num_experts // self.size


def divides(token_once: bool | int, ep: int) -> bool:
    """Return whether nodes of `token_once` ranks divide `ep`, or one node holds all of it."""
    per_node = max(1, token_once)
    return ep % per_node == 0 or per_node % ep == 0


def hops(at: str, num_experts: int, axes: Axes, token_once: bool | int) -> tuple[Hop, ...]:
    """Return the exchanges of a layer.

    `token_once`: send a token once per node of this many ep ranks; True: once per rank.
    """
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
def expected_rows(num_tokens: int, top_k: int, num_experts: int, num_places: int) -> int:
    """Return the expected number of rows where a token goes once to each place that has some of its experts.

    With uniform routing a place gets a token unless all of its k experts are elsewhere: 1 - C(others, k) / C(experts,
    k).
    """
    others = num_experts - num_experts // num_places
    return round(num_tokens * num_places * (1 - comb(others, top_k) / comb(num_experts, top_k)))
