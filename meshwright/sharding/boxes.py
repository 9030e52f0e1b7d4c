"""Boxes: half-open index ranges in every dim. Loading, placing, exporting and resharding are intersections of boxes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

from ..errors import LayoutError


class Box(NamedTuple):  # a large model has 100,000 of them, and a dataclass takes four times as long to construct
    """The elements `x` with `start <= x < stop` in every dim."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @staticmethod
    def whole(shape: Sequence[int]) -> Box:
        """Return the box of a whole tensor."""
        return Box((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))

    def meet(self, other: Box) -> Box | None:
        """Return the intersection, or None where it is empty, as most are: an expert's box meets few others."""
        # Comparing dim 0 first makes the common case cheap.
        if self.start and (self.start[0] >= other.stop[0] or other.start[0] >= self.stop[0]):
            return None
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(start, stop) if all(a < b for a, b in zip(start, stop, strict=True)) else None

    def within(self, outer: Box) -> Box:
        """Return the same elements, counted from the corner of `outer`."""
        start = tuple(a - o for a, o in zip(self.start, outer.start, strict=True))
        stop = tuple(b - o for b, o in zip(self.stop, outer.start, strict=True))
        return Box(start, stop)

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.start, self.stop, strict=True)) + "]"


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """Return the range of part `index`, cut as `torch.chunk` and FSDP2 cut: ceil-sized, the last ones short or
    empty.
    """
    step = -(-size // parts)
    return min(index * step, size), min((index + 1) * step, size)


def interval(box: Box, lo: int, hi: int) -> Iterator[Box]:
    """Return elements `lo..hi` of the row-major order of `box`, as the few boxes that they make up, in order.

    FSDP cuts a matrix by rows, but a row of the matrix is a product of several dims. So a shard is a partial slice at
    each end and a whole box between, in each dim.
    """
    if lo >= hi:
        return
    (first, last), inner = (box.start[0], box.stop[0]), Box(box.start[1:], box.stop[1:])
    if not inner.start:
        yield Box((first + lo,), (first + hi,))
        return
    step = inner.size
    head, tail = -(-lo // step), hi // step
    if head > tail:  # all within one index of the outermost dim
        yield from _prefixed(first + tail, interval(inner, lo - tail * step, hi - tail * step))
        return
    if lo < head * step:
        yield from _prefixed(first + head - 1, interval(inner, lo - (head - 1) * step, step))
    if head < tail:
        yield Box((first + head, *inner.start), (first + tail, *inner.stop))
    if tail * step < hi and first + tail < last:
        yield from _prefixed(first + tail, interval(inner, 0, hi - tail * step))


def _prefixed(index: int, boxes: Iterator[Box]) -> Iterator[Box]:
    """Prepend an index of the outermost dim to boxes of the inner dims."""
    for box in boxes:
        yield Box((index, *box.start), (index + 1, *box.stop))


def check_tiling(boxes: Sequence[Box], shape: Sequence[int], what: str) -> None:
    """Raise unless the boxes cover `shape` exactly once.

    They do if none overlaps another and their sizes add up. Sorted by dim 0, a box can only overlap one that is still
    open.
    """
    whole = Box.whole(shape)
    boxes = [b for b in boxes if b.size or len(b.start) != len(shape)]
    for box in boxes:
        if len(box.start) != len(shape) or whole.meet(box) != box:
            raise LayoutError(f"{what}: the block {box} is not inside the shape {tuple(shape)}; correct its bounds")
    ordered = sorted(boxes, key=lambda b: b.start)
    open_boxes: list[Box] = []
    for box in ordered:  # sweep along dim 0
        open_boxes = [b for b in open_boxes if not b.start or b.stop[0] > box.start[0]]
        for other in open_boxes:
            if other.meet(box):
                raise LayoutError(f"{what}: the blocks {other} and {box} overlap; each element belongs to one block")
        open_boxes.append(box)
    covered = sum(b.size for b in boxes)
    if covered != whole.size:
        raise LayoutError(f"{what}: the blocks cover {covered} of {whole.size} elements; add the missing ones")
