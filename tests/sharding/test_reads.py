"""Ranged reads against slices of whole tensors."""

import os
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from meshwright.axes import Axes
from meshwright.sharding import Block, Box, Param, Piece, pieces, plain
from meshwright.weights import reader as load
from meshwright.weights.reader import Reader, contiguous
from meshwright.weights.source import open_source
from tests.sharding.reference import examples, stored_ids
from tests.sharding.tables import TINY, choices_of, layout_of, source_of, spec_of, table_of

shapes = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)


@st.composite
def parts_of(draw, shape, step=False, empty=False):
    """Slices of a shape: plain ranges, or every second or third."""
    out = []
    for size in shape:
        start = draw(st.integers(0, size - (not empty)))
        stop = draw(st.integers(start + (not empty), size))
        out.append(slice(start, stop, draw(st.integers(1, 3)) if step else 1))
    return tuple(out)


def flat_runs(view):
    strides = tuple(s // view.itemsize for s in view.strides)
    start = (view.__array_interface__["data"][0] - base_address(view)) // view.itemsize
    return list(contiguous(view.shape, strides, start))


def base_address(view):
    while view.base is not None:
        view = view.base
    return view.__array_interface__["data"][0]


@examples(300)
@given(st.data())
def test_runs_of_strided_views(data):
    shape = data.draw(shapes)
    base = np.arange(prod(shape))
    order = data.draw(st.permutations(range(len(shape))))
    view = base.reshape(shape)[data.draw(parts_of(shape, step=True, empty=True))].transpose(order)
    result = flat_runs(view)
    assert [i for at, num in result for i in range(at, at + num)] == view.flatten().tolist()
    assert all(num > 0 for _, num in result)


@examples(200)
@given(st.data())
def test_runs_of_boxes_are_as_long_as_can_be(data):
    shape = data.draw(shapes)
    view = np.arange(prod(shape)).reshape(shape)[data.draw(parts_of(shape))]
    num_breaks = int((np.diff(view.flatten()) != 1).sum())
    assert len(flat_runs(view)) == num_breaks + 1


def test_runs_of_broadcasts_and_scalars():
    assert list(contiguous((3,), (0,), 7)) == [(7, 1)] * 3
    assert list(contiguous((2, 2), (0, 1), 1)) == [(1, 2)] * 2
    assert list(contiguous((), (), 5)) == [(5, 1)]
    assert list(contiguous((2, 1, 3), (3, 99, 1), 0)) == [(0, 6)]
    assert list(contiguous((4, 0), (7, 1), 3)) == list(contiguous((0, 4), (4, 1), 3)) == []


@pytest.fixture(scope="module")
def files():
    """Tensors of several dtypes and shapes in two files."""
    made = {}
    for number, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16, torch.float64)):
        for shape in ((5,), (4, 6), (3, 4, 5), (2, 1, 6)):
            at = torch.arange(prod(shape)) + 7 * number
            made[f"{number}.{len(shape)}.{shape[0]}"] = at.view(shape).to(dtype)
    with TemporaryDirectory() as directory:
        names = sorted(made)
        for number, part in enumerate((names[::2], names[1::2])):
            save_file({n: made[n] for n in part}, Path(directory) / f"model-{number}.safetensors")
        yield Path(directory), made


@st.composite
def reads(draw, made):
    """A block of a source tensor under some shape of ours, and a part of it."""
    key = draw(st.sampled_from(sorted(made)))
    shape = tuple(made[key].shape)
    reference = draw(parts_of(shape))
    result = made[key][reference]
    first = draw(st.integers(0, 3))
    ours_shape = draw(st.sampled_from(same_elements(tuple(result.shape), result)))
    ours = Box((first, *(0 for _ in ours_shape[1:])), (first + ours_shape[0], *ours_shape[1:]))
    block = Block(ours, key, shape, Box(tuple(s.start for s in reference), tuple(s.stop for s in reference)))
    part = draw(parts_of(ours_shape))
    inside = Box(tuple(s.start for s in part), tuple(s.stop for s in part))
    moved = Box((first + inside.start[0], *inside.start[1:]), (first + inside.stop[0], *inside.stop[1:]))
    return block, moved, result.reshape(ours_shape)[part]


def same_elements(shape, tensor):
    """Other shapes in which the elements can be seen without a copy."""
    candidates = {shape, (1, *shape), (*shape, 1), (prod(shape),), *(split(shape, n) for n in (2, 3))}
    return sorted(s for s in candidates if prod(s) == prod(shape) and can_view(tensor, s))


def split(shape, by):
    return (by, shape[0] // by, *shape[1:])


def can_view(tensor, shape):
    try:
        tensor.view(shape)
    except RuntimeError:
        return False
    return True


@examples(200)
@given(st.data())
def test_a_read_is_a_slice(files, data):
    directory, made = files
    block, part, want = data.draw(reads(made))
    source = open_source(directory)
    with Reader(source) as reader:
        result = reader.read(source.entries[block.key], block, part)
        assert result.dtype == want.dtype
        assert result.shape == part.shape
        assert torch.equal(result, want)
        whole = made[block.key].numel() * want.itemsize
        assert want.numel() * want.itemsize <= reader.num_bytes <= whole, "what lies between short strips, no more"


def test_nothing_is_read_of_an_empty_part(files):
    source = open_source(files[0])
    block = Block(Box.whole((4, 6)), "0.2.4", (4, 6), Box.whole((4, 6)))
    with Reader(source) as reader:
        assert reader.read(source.entries["0.2.4"], block, Box((2, 3), (2, 5))).shape == (0, 2)
        assert reader.num_bytes == 0


def test_short_strips_are_read_together(tmp_path, monkeypatch):
    """A quarter of the columns: a strip of every row, and not one read for each."""
    made = torch.arange(1000 * 64, dtype=torch.float32).view(1000, 64)
    save_file({"w": made}, tmp_path / "model.safetensors")
    source, preadv, offsets = open_source(tmp_path), os.preadv, []
    monkeypatch.setattr(os, "preadv", lambda fd, into, at: offsets.append(at) or preadv(fd, into, at))
    monkeypatch.setattr(load, "_SPAN_BYTES", 64 * 4 * 300)
    layout = layout_of(Param({"out": 1000}, {"in": 64}, (plain("w", (1000, 64), 1),), name="w"), {})
    piece = Piece(Param({"out": 1000}, {"in": 64}, ()), Box((0, 16), (1000, 32)), 0, 1000)
    with Reader(source) as reader:
        reader.fill(layout, piece, stored := torch.full(piece.shape, -1.0))
    assert torch.equal(stored, made[:, 16:32])
    assert len(offsets) == 4, "300 rows at a time"
    with Reader(source) as reader:
        monkeypatch.setattr(load, "_SHORT_BYTES", 16 * 4)
        reader.fill(layout, piece, stored.zero_())
        assert reader.num_bytes == stored.nbytes, "long strips are read alone"
    assert torch.equal(stored, made[:, 16:32])


EVERY = [(name, choice) for name in TINY for choice in choices_of(table_of(name))]


@pytest.mark.parametrize("staged", [4 << 20, 97], ids=["at once", "in parts"])
@pytest.mark.parametrize("case", EVERY, ids=lambda case: "-".join([case[0], *case[1].values()]))
def test_every_rank_reads_its_pieces(case, staged, tmp_path, monkeypatch):
    """Ranks of a mesh with uneven and empty pieces read each owned byte once, and the bytes between short strips."""
    monkeypatch.setattr(load, "_STAGED_ELEMENTS", staged)
    table, choice, axes = table_of(case[0]), case[1], Axes(fsdp=3, cp=2, tp=2, ep=2)
    numbers = source_of(table, choice)
    whole = {p.name: ours_of(p, layout_of(p, choice), numbers) for p in table}
    save_file({k: v.double() for k, v in numbers.items()}, tmp_path / "model.safetensors")
    source = open_source(tmp_path)
    for rank in range(0, axes.world, 1 if staged > 97 else 5):
        with Reader(source) as reader:
            check_fill(reader, table, choice, axes, rank, whole)


def ours_of(param: Param, layout, numbers):
    ours = torch.full(param.shape, -1)
    for block in layout.blocks:
        ours[block.ours.slices] = block.view(numbers[block.key])
    return ours


def check_fill(reader, table, choice, axes, rank, whole):
    num_read, at = 0, axes.coords(rank)
    for name, piece in pieces(spec_of(table, axes.pp), axes, rank).items():
        if name not in table.params:
            continue
        stored = torch.full(piece.shape, -1.0, dtype=torch.float64)
        reader.fill(layout_of(table[name], choice), piece, stored)
        assert torch.equal(stored.long(), whole[name].flatten()[stored_ids(table[name], axes, at)]), f"{name} at {at}"
        num_read += stored.numel()
    rows_of_tp = axes.tp  # strips of a row are 1/tp of it
    assert num_read * 8 <= reader.num_bytes <= num_read * 8 * rows_of_tp
