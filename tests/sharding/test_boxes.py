"""Boxes against sets of indexes."""

from itertools import product
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import LayoutError
from meshwright.sharding import Box, check_tiling, chunk, interval
from tests.sharding.reference import examples

shapes = st.lists(st.integers(0, 4), min_size=0, max_size=4).map(tuple)


def elements(box):
    return list(product(*(range(a, b) for a, b in zip(box.start, box.stop, strict=True))))


@st.composite
def boxes(draw, ndim, low=-3, high=6):
    start = [draw(st.integers(low, high)) for _ in range(ndim)]
    return Box(tuple(start), tuple(draw(st.integers(a, high + 1)) for a in start))


@st.composite
def pairs(draw):
    ndim = draw(st.integers(0, 3))
    return draw(boxes(ndim)), draw(boxes(ndim))


@examples(300)
@given(pairs())
def test_meet_holds_the_common_elements(pair):
    a, b = pair
    common, both = a.meet(b), set(elements(a)) & set(elements(b))
    assert (set() if common is None else set(elements(common))) == both
    assert (common is None) == (not both), "an empty meeting is None"
    assert b.meet(a) == common


@examples(100)
@given(pairs())
def test_within_counts_from_the_corner(pair):
    box, outer = pair
    moved = [tuple(x - o for x, o in zip(at, outer.start, strict=True)) for at in elements(box)]
    assert elements(box.within(outer)) == moved


@examples(100)
@given(shapes, st.data())
def test_shape_size_and_slices_are_numpys(shape, data):
    whole = np.arange(prod(shape)).reshape(shape)
    start = tuple(data.draw(st.integers(0, n)) for n in shape)
    box = Box(start, tuple(data.draw(st.integers(a, n)) for a, n in zip(start, shape, strict=True)))
    part = whole[box.slices]
    assert (box.shape, box.size) == (part.shape, part.size)
    assert [whole[at] for at in elements(box)] == part.flatten().tolist()
    assert elements(Box.whole(shape)) == list(np.ndindex(shape))


@examples(300)
@given(st.integers(1, 4).flatmap(lambda ndim: boxes(ndim, 0, 3)), st.data())
def test_interval_is_the_row_major_range(box, data):
    every = elements(box)
    lo = data.draw(st.integers(0, len(every)))
    hi = data.draw(st.integers(lo, len(every)))
    check_interval(box, every, lo, hi)


def check_interval(box, every, lo, hi):
    result = list(interval(box, lo, hi))
    assert [x for part in result for x in elements(part)] == every[lo:hi], f"{box} {lo}:{hi}"
    assert all(part.size for part in result), "no empty boxes"
    assert len(result) <= 2 * len(box.start) - 1, f"{box} {lo}:{hi} in {len(result)} boxes"


@pytest.mark.parametrize("shape", [(7,), (3, 4), (1, 5), (5, 1), (2, 3, 2), (3, 1, 3), (2, 2, 2, 2)])
def test_interval_everywhere(shape):
    box = Box(tuple(range(2, 2 + len(shape))), tuple(n + at for at, n in enumerate(shape, 2)))
    every = elements(box)
    for lo, hi in product(range(len(every) + 1), repeat=2):
        if lo <= hi:
            check_interval(box, every, lo, hi)


def test_interval_of_whole_rows_is_one_box():
    assert list(interval(Box((5, 0, 2), (9, 3, 4)), 6, 18)) == [Box((6, 0, 2), (8, 3, 4))]


def test_chunk_is_torchs():
    for size, parts in product(range(40), range(1, 20)):
        want = [part.tolist() for part in torch.arange(size).chunk(parts)] if size else []
        result = [list(range(*chunk(size, parts, index))) for index in range(parts)]
        assert result == want + [[]] * (parts - len(want)), f"{size} in {parts}"


@st.composite
def tilings(draw, min_ndim=0):
    """A shape and boxes that tile it: cut again and again anywhere, then shuffled."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=min_ndim, max_size=3)))
    made = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 8)) if shape else 0):
        old = made.pop(draw(st.integers(0, len(made) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        if old.shape[dim] < 2:
            made.append(old)
            continue
        cut = draw(st.integers(old.start[dim] + 1, old.stop[dim] - 1))
        made.append(Box(old.start, (*old.stop[:dim], cut, *old.stop[dim + 1 :])))
        made.append(Box((*old.start[:dim], cut, *old.start[dim + 1 :]), old.stop))
    return shape, draw(st.permutations(made))


def covered(shape, made):
    """Count the boxes that hold each element. Return None where one sticks out."""
    counts = dict.fromkeys(np.ndindex(shape), 0)
    for box in made:
        for at in elements(box):
            if at not in counts:
                return None
            counts[at] += 1
    return list(counts.values())


@examples(200)
@given(tilings())
def test_tilings_are_accepted(tiling):
    shape, made = tiling
    assert set(covered(shape, made)) == {1}
    check_tiling(made, shape, "w")


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 2)])
def test_no_boxes_tile_a_shape_without_elements(shape):
    check_tiling([], shape, "w")


@pytest.mark.parametrize(
    ("shape", "made"),
    [
        ((0, 3), [Box((0, 0), (0, 3))]),
        ((4,), [Box((0,), (4,)), Box((2,), (2,))]),
        ((4,), [Box((0,), (0,)), Box((0,), (4,))]),
    ],
)
def test_empty_boxes_do_no_harm(shape, made):
    check_tiling(made, shape, "w")


@st.composite
def spoilt(draw):
    """A tiling with one box taken away, doubled, grown, shrunk or shifted."""
    shape, made = draw(tilings(min_ndim=1))
    at, dim = draw(st.integers(0, len(made) - 1)), draw(st.integers(0, len(shape) - 1))
    by_start, by_stop = draw(st.sampled_from([(0, 1), (-1, 0), (1, 1), (-1, -1), (1, 0), (0, -1), (0, 9)]))
    start = tuple(a + by_start * (d == dim) for d, a in enumerate(made[at].start))
    stop = tuple(b + by_stop * (d == dim) for d, b in enumerate(made[at].stop))
    others = [*made[:at], *made[at + 1 :]]
    kind = draw(st.sampled_from(["gone", "twice", "moved", "moved", "moved"]))
    changed = {"gone": [], "twice": [made[at]] * 2, "moved": [Box(start, stop)]}[kind]
    return shape, draw(st.permutations(others + changed))


@examples(400)
@given(spoilt())
def test_what_does_not_tile_is_refused(case):
    shape, made = case
    counts = covered(shape, made)
    assert counts is None or set(counts) != {1}
    with pytest.raises(LayoutError, match="the parameter w"):
        check_tiling(made, shape, "the parameter w")


def test_an_overlap_and_a_gap_of_equal_size_do_not_cancel():
    with pytest.raises(LayoutError, match="overlap"):
        check_tiling([Box((0, 0), (2, 2)), Box((1, 0), (3, 2))], (4, 2), "w")
    with pytest.raises(LayoutError, match="overlap"):  # apart in the order of the sweep
        check_tiling([Box((0, 0), (4, 1)), Box((1, 1), (2, 2)), Box((3, 0), (4, 2)), Box((0, 1), (1, 2))], (4, 2), "w")


@pytest.mark.parametrize("made", [Box((0,), (4,)), Box((0, 0, 0), (4, 2, 1)), Box((), ())])
def test_other_numbers_of_dims_are_refused(made):
    with pytest.raises(LayoutError, match=r"\bw\b.*\(4, 2\)"):
        check_tiling([made], (4, 2), "w")


@pytest.mark.parametrize(
    ("made", "text"),
    [
        ([Box((0,), (2,)), Box((1,), (4,))], r"\bw\b.*\[0:2\].*\[1:4\].*\boverlap"),
        ([Box((0,), (2,)), Box((3,), (4,))], r"\bw\b.*\b3 of 4\b"),
        ([Box((0,), (5,))], r"\bw\b.*\[0:5\].*\(4,\)"),
        ([Box((-1,), (4,))], r"\bw\b.*\[-1:4\]"),
        ([Box((3,), (1,)), Box((0,), (4,))], r"\bw\b.*\[3:1\]"),
    ],
)
def test_the_refusal_names_the_numbers(made, text):
    with pytest.raises(LayoutError, match=text):
        check_tiling(made, (4,), "w")
