"""Who runs which frames of a picture: the ranks of a data rank share them out, each whole.

All of them have the same stream, so each knows what the others will do, and how many rows each will send to each: no
counts are exchanged, and nobody waits for a device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


def share(sizes: Sequence[int], parts: int, cost: Callable[[int], float]) -> tuple[int, ...]:
    """The part that runs each frame of so many patches: the dearest first, each to the part that has the least."""
    owners, load = [0] * len(sizes), [0.0] * parts
    for number in sorted(range(len(sizes)), key=lambda number: (-cost(sizes[number]), number)):
        owners[number] = min(range(parts), key=load.__getitem__)
        load[owners[number]] += cost(sizes[number])
    return tuple(owners)


@dataclass(frozen=True)
class Route:
    """The frames that a part runs, how many of their rows go to each part, how many come from each, and which of its
    own tokens those are for."""

    mine: tuple[int, ...]
    sent: list[int]
    got: list[int]
    places: list[int]


def route(runs: Sequence[range], owners: Sequence[int], at: int, parts: Sequence[range]) -> Route:
    """`runs`: the tokens of each frame, in their order. `parts`: the tokens of each part. Of part `at`.

    Both rise, so the rows of a part are in the order of the parts that they go to.
    """
    mine = tuple(number for number, owner in enumerate(owners) if owner == at)
    sent = [sum(len(_common(runs[number], part)) for number in mine) for part in parts]
    from_each = [
        [token - parts[at].start for number, owner in enumerate(owners) if owner == part
         for token in _common(runs[number], parts[at])]
        for part in range(len(parts))
    ]  # fmt: skip
    places = [token for tokens in from_each for token in tokens]
    return Route(mine, sent, [len(tokens) for tokens in from_each], places)


def _common(a: range, b: range) -> range:
    return range(max(a.start, b.start), max(a.start, b.start, min(a.stop, b.stop)))
