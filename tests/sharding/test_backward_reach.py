"""Which parts of a stage a gradient passes, where it begins, and how the bill counts the micro-batches of both."""

from collections import Counter
from types import SimpleNamespace

import pytest

from meshwright.axes import Axes
from meshwright.sharding import Line, Param, Rules, ShardingSpec, Stage, Table, Unit, Work, begins_in, in_order, part_of
from meshwright.sharding import passed as passed_parts
from meshwright.sharding.bill import _passes

TOWER = ("tower.patches.w", "tower.blocks.0.w", "tower.blocks.1.w", "tower.blocks.2.w", "tower.deep.0.w",
         "tower.deep.1.w", "tower.merger.w")  # fmt: skip
TEXT = ("embed.weight", "layers.0.w", "layers.1.w", "layers.2.w", "layers.3.w", "head.norm.weight")
AXES = Axes(pp=2)


def param_of(name):
    layer = int(name.split(".")[1]) if name.startswith("layers.") else None
    return Param({"a": 1}, {}, (), name=name, layer=layer, first=name.startswith(("tower.", "embed.")))


def stage_of(number, *, taps=(0, 1), detached=None, tied=False):
    """One of two stages, with layers 0 and 1, or 2 and 3. The tower has 3 blocks, and a merger after each tap."""
    mtp = None if detached is None or number == 0 else SimpleNamespace(detached=detached)
    tower = None if number else SimpleNamespace(blocks=range(3), shape=SimpleNamespace(taps=taps))
    module = SimpleNamespace(layers=[str(2 * number), str(2 * number + 1)], mtp=mtp, tower=tower, tied=tied)
    both = {0: (*TOWER, *TEXT[:3]), 1: (*TEXT[3:], *(["embed.weight"] if mtp else []))}
    return Stage(number, module, (Unit("", both[number], expert=False, again=True),))


SPEC = ShardingSpec(Table({name: param_of(name) for name in (*TOWER, *TEXT)}), Rules())
SPEC._lines[2] = Line(2, (2, 4))


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("embed.weight", "embed"), ("head.mtp.layer.mixer.q.weight", "head"), ("", ""),
        ("layers.11.mixer.q.weight", "layers.11"), ("tower.patches.grid", "tower.patches"),
        ("tower.merger.fc1.weight", "tower.merger"), ("tower.insert", "tower.insert"),
        ("tower.blocks.10.qkv.weight", "tower.blocks.10"), ("tower.deep.2.fc1.bias", "tower.deep.2"),
    ],
)  # fmt: skip
def test_part_of(name, part):
    assert part_of(name) == part


ALL_TOWER = {"tower.patches", *(f"tower.blocks.{n}" for n in range(3)), "tower.deep.0", "tower.deep.1",
             "tower.merger", "tower.insert"}  # fmt: skip
LAYERS = {"layers.0", "layers.1"}
CASES = [
    # what is trained, the stage, images, the parts that a gradient passes, the part in which it begins
    ([], 0, True, set(), ""),
    (["head.norm.weight"], 1, False, {"head", ""}, "head"),
    (["head.norm.weight"], 0, False, set(), ""),
    (["layers.3.w"], 1, False, {"layers.3", "head", ""}, "layers.3"),
    (["layers.2.w", "head.norm.weight"], 1, False, {"layers.2", "layers.3", "head", ""}, "layers.2"),
    (["layers.1.w"], 0, False, {"layers.1", "head", ""}, "layers.1"),
    (["layers.1.w"], 1, False, {"layers.2", "layers.3", "head", ""}, ""),  # it goes on to stage 0
    (["embed.weight"], 0, False, {"embed", *LAYERS, "head", ""}, ""),
    (["embed.weight"], 1, False, {"layers.2", "layers.3", "head", ""}, ""),
    (["tower.patches.w"], 0, True, {*ALL_TOWER, *LAYERS, "head", ""}, ""),
    (["tower.patches.w"], 0, False, set(), ""),
    (["tower.patches.w", "layers.1.w"], 0, False, {"layers.1", "head", ""}, "layers.1"),
    (
        ["tower.blocks.1.w"], 0, True,
        {"tower.blocks.1", "tower.blocks.2", "tower.deep.1", "tower.merger", "tower.insert", *LAYERS, "head", ""}, "",
    ),
    (["tower.blocks.2.w"], 0, True, {"tower.blocks.2", "tower.merger", "tower.insert", *LAYERS, "head", ""}, ""),
    (["tower.deep.0.w"], 0, True, {"tower.deep.0", "tower.insert", *LAYERS, "head", ""}, ""),
]  # fmt: skip


@pytest.mark.parametrize(("trained", "number", "images", "parts", "begins"), CASES)
def test_a_gradient_passes_what_comes_after_the_first_trained_part(trained, number, images, parts, begins):
    stage = stage_of(number)
    assert passed_parts(stage, SPEC, AXES, trained, with_images=images) == parts
    assert begins_in(stage, SPEC, AXES, trained, with_images=images) == begins


@pytest.mark.parametrize(
    ("number", "detached", "tied", "passes"),
    [(1, True, False, False), (1, False, False, True), (1, True, True, True), (0, True, False, True)],
)
def test_an_embedding_that_only_looks_up_for_a_detached_head_gets_no_gradient(number, detached, tied, passes):
    stage = stage_of(number, detached=detached, tied=tied)
    if number == 0:
        stage.module.mtp = SimpleNamespace(detached=detached)
    assert ("embed" in passed_parts(stage, SPEC, AXES, ["embed.weight"], with_images=False)) == passes


def test_mergers_pass_what_comes_from_the_block_of_their_tap():
    parts = passed_parts(stage_of(0, taps=(1, 2)), SPEC, AXES, ["tower.blocks.1.w"], with_images=True)
    assert {"tower.deep.0", "tower.deep.1"} <= parts
    parts = passed_parts(stage_of(0, taps=(0, 2)), SPEC, AXES, ["tower.blocks.1.w"], with_images=True)
    assert {part for part in parts if "deep" in part} == {"tower.deep.1"}


def test_micro_batches_with_images_are_counted_apart():
    """3 of 5 micro-batches have images, in which alone the tower has a gradient."""
    frozen = SPEC.table.params.keys() - {"tower.blocks.2.w", "layers.1.w"}
    work = Work(tokens=8, num_batches=5, images=((), None, (), (), None), frozen=frozenset(frozen))
    passes = _passes(stage_of(0), SPEC, AXES, work)
    seeing = ("tower.blocks.2", "tower.merger", "tower.insert", "layers.0")
    assert passes.comes == Counter({**dict.fromkeys(seeing, 3), "layers.1": 5, "head": 5, "": 5})
    assert passes.begins == Counter({"": 3, "layers.1": 2})


def test_units_are_in_the_order_in_which_forward_finishes():
    def unit(name, expert=False):
        return Unit(name, (), expert, again=True)

    names = ["layers.1.mlp.experts", "layers.10.mlp.experts", "head.mtp.layer.mlp.experts", "embed", "layers.1",
             "layers.10", "head.mtp", "head", ""]  # fmt: skip
    ordered = in_order(unit(name, "experts" in name) for name in names)
    assert [each.name for each in ordered] == [
        "embed", "layers.1.mlp.experts", "layers.1", "layers.10.mlp.experts", "layers.10",
        "head.mtp.layer.mlp.experts", "head.mtp", "head", "",
    ]  # fmt: skip
