"""Balance the frames of images and videos over the ranks of a data rank, each frame whole.

Vision work varies from batch to batch, so the ranks that share a stream (cp x tp) divide its frames by cost. All of
them see the same stream and compute the same assignment. So each knows how many rows it will get from each other rank,
no counts are exchanged, and nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

Cost = Callable[[int], float]  # number of patches of a frame -> cost


class Placed(Protocol):
    """A frame, and the tokens of the stream that it replaces."""

    @property
    def tokens(self) -> range: ...

    @property
    def num_patches(self) -> int: ...


def balance_frames(sizes: Sequence[int], parts: int, cost: Cost) -> tuple[int, ...]:
    """Assign frames to parts: the most expensive first, each to the part with the least load (LPT scheduling)."""
    owners, load = [0] * len(sizes), [0.0] * parts
    for number in sorted(range(len(sizes)), key=lambda number: (-cost(sizes[number]), number)):
        owners[number] = min(range(parts), key=load.__getitem__)
        load[owners[number]] += cost(sizes[number])
    return tuple(owners)


@dataclass(frozen=True)
class Route:
    """Frames and rows that a part exchanges: `own_frames`, those that it runs; rows `sent` to and `got` from each part.

    `places`: the indices of its own tokens for which rows arrive, in order of arrival.
    """

    own_frames: tuple[int, ...]
    sent: list[int]
    got: list[int]
    places: list[int]


def route(frames: Sequence[Placed], num_tokens: int, parts: int, at: int, cost: Cost) -> Route:
    """Return what part `at` has to do for the frames of a stream of `num_tokens` tokens, divided evenly among parts.

    Frames are in the order of their tokens, and so are parts. So the rows of a part are already in the order in which
    they go to the others.
    """
    owners, tokens_a_part = balance_frames([frame.num_patches for frame in frames], parts, cost), num_tokens // parts
    ranges = [range(part * tokens_a_part, (part + 1) * tokens_a_part) for part in range(parts)]
    frames_of_part = [[n for n, owner in enumerate(owners) if owner == part] for part in range(parts)]
    sent = [sum(len(_common(frames[n].tokens, part)) for n in frames_of_part[at]) for part in ranges]
    from_each = [[t for n in own for t in _common(frames[n].tokens, ranges[at])] for own in frames_of_part]
    places = [token - ranges[at].start for tokens in from_each for token in tokens]
    return Route(tuple(frames_of_part[at]), sent, [len(tokens) for tokens in from_each], places)


def _common(a: range, b: range) -> range:
    """Return the intersection of two ranges."""
    return range(max(a.start, b.start), max(a.start, b.start, min(a.stop, b.stop)))
