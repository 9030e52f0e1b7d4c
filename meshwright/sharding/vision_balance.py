"""Who runs which frames of a picture: the ranks of a data rank share them out, each whole.

All of them have the same stream, so each knows what the others will do, and how many rows each will send to each: no
counts are exchanged, and nobody waits for a device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

Cost = Callable[[int], float]  # of a frame of so many patches


class Placed(Protocol):
    """A frame, and the tokens of the stream whose places it takes."""

    @property
    def tokens(self) -> range: ...

    @property
    def num_patches(self) -> int: ...


def share(sizes: Sequence[int], parts: int, cost: Cost) -> tuple[int, ...]:
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


def route(frames: Sequence[Placed], num_tokens: int, parts: int, at: int, cost: Cost) -> Route:
    """What part `at` has to do with the frames of a stream of so many tokens, of which each part has as many.

    Frames are in the order of their tokens, and so are parts. So the rows of a part are in the order in which they go
    to the others.
    """
    owners, num = share([frame.num_patches for frame in frames], parts, cost), num_tokens // parts
    ranges = [range(part * num, (part + 1) * num) for part in range(parts)]
    of_part = [[n for n, owner in enumerate(owners) if owner == part] for part in range(parts)]
    sent = [sum(len(_common(frames[n].tokens, part)) for n in of_part[at]) for part in ranges]
    from_each = [[t for n in mine for t in _common(frames[n].tokens, ranges[at])] for mine in of_part]
    places = [token - ranges[at].start for tokens in from_each for token in tokens]
    return Route(tuple(of_part[at]), sent, [len(tokens) for tokens in from_each], places)


def _common(a: range, b: range) -> range:
    return range(max(a.start, b.start), max(a.start, b.start, min(a.stop, b.stop)))
