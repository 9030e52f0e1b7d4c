"""T1: the pieces of all ranks tile every parameter, on any mesh of six axes up to 64 ranks."""

import re
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from meshwright.axes import Axes
from meshwright.errors import LayoutError, MeshError
from meshwright.models import describe
from meshwright.recipe import Pipeline, Recipe
from meshwright.sharding import (
    Param,
    Rules,
    ShardingSpec,
    Table,
    check_rows_to_write,
    chunk,
    holders,
    pieces,
    place,
    rows_to_write,
    rules,
)
from tests.parts import ALL, every
from tests.sharding import reference
from tests.sharding.reference import coordinates, examples, meshes, numbered, params
from tests.sharding.tables import TINY, spec_of, table_of
from tests.tiny import ODD


def some(number):
    """Half of the examples are left to `make matrix`."""
    return examples(number if ALL else number // 2)


def pieces_of(table, axes, rank=0):
    held = pieces(spec_of(table, axes.pp), axes, rank)
    return {name: piece for name, piece in held.items() if name in table.params}


def check_rank(table, axes, rank, at):
    """A rank holds what the reference says, in that order; gives its element numbers by parameter."""
    held = pieces_of(table, axes, rank)
    expected = {
        p.name for p in table if at["pp"] in reference.stages_of(p.name, spec_of(table, axes.pp).table, axes.pp)
    }
    assert set(held) == expected, f"{axes} {at}"
    for name, piece in held.items():
        want = stored(table, name, axes, at)
        assert piece.shape == want.shape, f"{name} on {axes} at {at}"
        assert piece.numel == want.numel()
        check_views(piece, numbered(table[name]), want)
    return held


def stored(table, name, axes, at):
    return reference.stored_ids(table[name], axes, at)


def check_views(piece, ids, want):
    """The views share the memory of the stored tensor, cover it once, and lie where their boxes say."""
    tensor = torch.full(piece.shape, -1)
    num_viewed = 0
    for box, view in piece.views(tensor):
        assert view.shape == box.shape
        assert (view == -1).all(), "no element is viewed twice"
        view.copy_(ids[box.slices])
        num_viewed += view.numel()
    assert num_viewed == tensor.numel() == sum(box.size for box in piece.boxes)
    assert torch.equal(tensor, want), f"{piece}"


def check_tiled(table, axes):
    """Every element is held by as many ranks as the design says, owned by exactly one, and written by one."""
    held = {p.name: torch.zeros(p.numel, dtype=torch.long) for p in table}
    owned = {p.name: torch.zeros(p.numel, dtype=torch.long) for p in table}
    writing = {p.name: torch.zeros(p.numel, dtype=torch.long) for p in table}
    holding = {p.name: {} for p in table}  # by piece: the ranks that hold it
    for rank, at in enumerate(coordinates(axes)):
        for name, piece in check_rank(table, axes, rank, at).items():
            ids = numbered(table[name])
            result = holders(table[name], Rules(), axes, rank)
            own = result[0] == rank
            if piece.numel:
                holding[name].setdefault((piece.box, piece.lo, piece.hi), {})[rank] = result
            rows = rows_to_write(table[name], Rules(), axes, rank)
            assert rows.box.shape[len(table[name].rows) :] == tuple(table[name].cols.values()), "whole rows"
            for box in rows.boxes:
                writing[name][ids[box.slices].flatten()] += 1
            for box in piece.boxes:
                held[name][ids[box.slices].flatten()] += 1
                owned[name][ids[box.slices].flatten()] += own
    for param in table:
        check_rows_to_write(param, spec_of(table, axes.pp), axes)
        num = reference.num_holders(param, axes) * len(
            reference.stages_of(param.name, spec_of(table, axes.pp).table, axes.pp)
        )
        assert (held[param.name] == num).all(), f"{param.name} on {axes}: {held[param.name].unique()} and not {num}"
        assert (owned[param.name] == 1).all(), f"{param.name} on {axes}: {owned[param.name].unique()} owners"
        assert (writing[param.name] == 1).all(), f"{param.name} on {axes}: {writing[param.name].unique()} writers"
        for by_rank in holding[param.name].values():  # each holder knows all of them, the owner first
            assert set(by_rank.values()) == {tuple(sorted(by_rank))}, f"{param.name} on {axes}"


@pytest.mark.parametrize("name", every(2, TINY))
@some(4)
@given(meshes(tp=[1, 2, 4], ep=[1, 2, 4, 8]))
def test_tiny_models_tile(name, axes):
    check_tiled(table_of(name), axes)


@pytest.mark.parametrize("wrong", ["two writers of a seam", "a seam without a writer"])
def test_rows_that_are_not_written_once_are_reported(monkeypatch, wrong):
    """A save proves this before it writes."""
    off = 1 if wrong.startswith("two") else -1

    def shifted(size, parts, index):
        lo, hi = chunk(size, parts, index)
        return lo, min(max(hi + off, lo), size) if parts > 1 and index == 0 else hi

    axes, table = Axes(replicate=2, fsdp=3, tp=2), table_of("qwen3")
    monkeypatch.setattr(rules, "chunk", shifted)
    for param in table:
        with pytest.raises(LayoutError, match=re.escape(param.name)):
            check_rows_to_write(param, spec_of(table, 1), axes)


@pytest.mark.parametrize(("name", "head"), every(5, product(TINY, ["value", "none"])))
def test_other_heads_tile(name, head):
    check_tiled(table_of(name, head), Axes(pp=2, replicate=2, fsdp=2, tp=2, ep=2))


@pytest.mark.parametrize(
    "axes",
    [
        Axes(),
        Axes(pp=2, replicate=2, fsdp=2, cp=2, tp=4, ep=8),
        Axes(fsdp=40, ep=8),
        Axes(fsdp=3, cp=5, tp=2, ep=2),
        Axes(pp=3, fsdp=7, tp=2),
        Axes(pp=5, cp=3, tp=4, ep=2),
    ],
    ids=str,
)
def test_tiny_models_tile_on_chosen_meshes(axes):
    for name in every(8, TINY, axes.world):
        check_tiled(table_of(name), axes)


@st.composite
def placed(draw, kinds=("dense", "expert"), max_world=64):
    axes = draw(meshes(max_world))
    return axes, draw(params(axes, kinds=kinds))


@some(100)
@given(placed())
def test_any_parameter_tiles(case):
    axes, param = case
    check_tiled(Table({param.name: param}), axes)


@some(40)
@given(placed(kinds=("dense",)), st.integers(1, 4))
def test_a_tied_parameter_is_on_the_first_and_the_last_stage(case, num_layers):
    axes, param = case
    param = replace(param, first=True, both_ends=True)
    layers = {f"layers.{i}.w": Param({"embed": 3}, {}, (), name=f"layers.{i}.w", layer=i) for i in range(num_layers)}
    table = Table({param.name: param, **layers})
    assert spec_of(table, axes.pp).places(param, axes) == {0, axes.pp - 1}
    check_tiled(table, axes)


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize(
    "pipeline", [Pipeline(), Pipeline(stages=2), Pipeline("v")], ids=lambda p: f"{p.schedule}{p.stages}"
)
def test_a_layer_is_on_one_rank(name, pipeline):
    """Every cut into stages gives all ranks some layers."""
    table = describe({**ODD[name], "num_hidden_layers": 8, "layer_types": None}, "model.")[1]
    for pp in (1, 2, 3, 4):
        spec, axes = ShardingSpec(table, Rules(), recipe=Recipe(pipeline=pipeline)), Axes(pp=pp)
        if pipeline.schedule == "v" and pp > 1 and ODD[name]["tie_word_embeddings"]:
            with pytest.raises(MeshError, match="tied"):
                spec.line(pp)
            continue
        of_layer = [set().union(*(spec.places(p, axes) for p in table if p.layer == i)) for i in range(8)]
        assert all(len(result) == 1 for result in of_layer)
        assert set().union(*of_layer) == {*range(pp)}
        if pipeline.stages == 1:
            assert [min(result) for result in of_layer] == sorted(min(result) for result in of_layer)


def test_layers_are_whole():
    """The numbers of the table are those of the model: a later number in a name is no layer."""
    table = table_of("qwen3_moe")
    assert {p.layer for p in table if p.name.startswith("layers.")} == {0, 1, 2}
    assert {p.name for p in table if p.layer is None} == {"embed.weight", "head.norm.weight", "head.weight"}


def numbers_stored(param, axes):
    return [len(reference.stored_ids(param, axes, at)) for at in coordinates(axes)]


def test_pieces_are_uneven_and_empty_where_they_must():
    """The tests above see such pieces: 131 rows of vocabulary, 7 ranks that share 10 rows."""
    table, axes = table_of("qwen3"), Axes(fsdp=7, cp=2, tp=4)
    held = [pieces_of(table, axes, rank) for rank in range(axes.world)]
    embed = [of_rank["embed.weight"].shape[0] for of_rank in held]
    assert sum(embed) == 131
    assert len(set(embed)) > 2
    norm = [of_rank["layers.0.mixer.q_norm.weight"] for of_rank in held]
    assert [p.shape for p in norm[::4]] == [(1,)] * 10 + [(0,)] * 4
    assert [p.boxes for p in norm[40:]] == [()] * 16


def test_a_vocabulary_smaller_than_tp():
    param, axes = Param({"vocab": 3}, {"embed": 2}, (), name="w"), Axes(fsdp=2, tp=5)
    check_tiled(Table({"w": param}), axes)
    assert numbers_stored(param, axes) == [1, 1, 1, 0, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(("tp", "num_rows"), [(1, 20), (2, 10), (4, 20)])
def test_kv_heads_are_whole_beyond_their_number(tp, num_rows):
    table, axes = table_of("qwen3"), Axes(fsdp=2, tp=tp)
    for rank in range(axes.world):
        held = pieces_of(table, axes, rank)
        assert held["layers.0.mixer.k.weight"].shape == (num_rows // 2, 36)
        assert held["layers.0.mixer.q.weight"].shape == (40 // tp // 2, 36)
    assert ("tp" in place(table["layers.0.mixer.v.weight"], Rules(), axes).copies) == (tp in (1, 4))


@some(60)
@given(meshes(), st.sampled_from(["heads", "key", "ffn", "expert"]), st.integers(1, 40), st.booleans())
def test_what_does_not_divide_is_refused(axes, dim, size, in_cols):
    axis, parts = ("ep", axes.ep) if dim == "expert" else ("tp", axes.tp)
    assume(size % parts)
    sizes = [{"embed": 3}, {dim: size}]
    param = Param(*(sizes if in_cols else sizes[::-1]), (), name="layers.3.mixer.q", first=True)
    choices = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
    text = rf"{axis}={parts}\b.*\b{dim}={size}\b.*layers\.3\.mixer\.q\b.*\b{axis} from {choices}(?![\d,])"
    with pytest.raises(LayoutError, match=text):
        pieces_of(Table({param.name: param}), axes)


def test_tp_beyond_the_key_heads_of_the_delta_net_is_refused():
    with pytest.raises(
        LayoutError, match=r"tp=8\b.*\bkey=4\b.*layers\.0\.mixer\.qkv\.weight\b.*\btp from 1, 2, 4(?![\d,])"
    ):
        place(table_of("qwen3_5")["layers.0.mixer.qkv.weight"], Rules(), Axes(tp=8))


@some(60)
@given(placed())
def test_spans_are_what_pieces_are_cut_to(case):
    """Model code gets a range of heads; its parameters hold just those."""
    axes, param = case
    cuts = [(at, reference.cut_ids(param, axes, at)) for at in coordinates(axes)]
    assume(all(ids.numel() for _, ids in cuts))  # a rank without any is refused
    for at, ids in cuts:
        spans = [Rules().span(dim, size, axes, at, "w") for dim, size in param.dims.items()]
        assert torch.equal(ids, numbered(param)[tuple(slice(a, b) for a, b in spans)])


@some(60)
@given(placed())
def test_every_axis_does_one_thing(case):
    """split, shard and copies share the axes of a stage: none is used twice, none is forgotten."""
    axes, param = case
    placement = place(param, Rules(), axes)
    used = [*placement.split.values(), *placement.shard, *placement.copies]
    assert len(set(used)) == len(used)
    view = {"replicate", "efsdp", "ep"} if reference.is_expert(param) else {"replicate", "fsdp", "cp", "tp"}
    assert set(used) <= view
    assert all(axes.size_of(a) == 1 for a in view - set(used)), "an axis left out has one rank"


@pytest.mark.parametrize(
    ("rows", "cols", "axis"),
    [
        ({"expert": 4}, {"ffn": 8}, {"expert": "ep", "ffn": "tp"}),  # rank 0 is tp 0 and ep 0, never tp 1 and ep 0
        ({"heads": 4}, {"ffn": 8}, {"heads": "tp", "ffn": "tp"}),
        ({"embed": 4}, {"chan": 8}, {"embed": "fsdp"}),
        ({"expert": 4}, {"heads": 8}, {"expert": "ep", "heads": "ep"}),
    ],
)
def test_an_axis_that_would_cut_twice_is_refused(rows, cols, axis):
    table, axes = Table({"w": Param(rows, cols, (), name="w")}), Axes(fsdp=2, tp=2, ep=2)
    with pytest.raises(LayoutError, match="w"):
        place(table["w"], Rules(axis=axis), axes)


def test_fsdp_cuts_like_chunk():
    """A shard is a range of rows of the local matrix, `fsdp` outside of `cp`, the last ones short."""
    param, axes = Param({"embed": 11}, {"head": 2}, (), name="w"), Axes(fsdp=2, cp=2)
    held = [pieces_of(Table({"w": param}), axes, rank)["w"] for rank in range(axes.world)]
    assert [(p.lo, p.hi) for p in held] == [(0, 3), (3, 6), (6, 9), (9, 11)] == [chunk(11, 4, i) for i in range(4)]
