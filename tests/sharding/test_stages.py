"""Stages of a pipeline: where they end, what they cost, which of them hold a parameter; and the FSDP units of each."""

from types import SimpleNamespace

import pytest
from torch import nn

from meshwright.axes import Axes
from meshwright.errors import MeshError
from meshwright.recipe import MemoryOptions, Pipeline, Recipe
from meshwright.sharding import (
    Dispatch,
    Line,
    Param,
    Rules,
    ShardingSpec,
    Table,
    Unit,
    costs_of_stages,
    forward_program,
    program_of,
    stages_of_param,
    trained_from,
    units_of,
    weight,
)
from meshwright.sharding.stages import costs_of, line_of, stages_of


def table_of(*params, num_first_layers=1):
    return Table({each.name: each for each in params}, num_first_layers=num_first_layers)


def param(name, size=1, **more):
    layer = int(name.split(".")[1]) if name.startswith("layers.") else None
    return Param({"a": size}, {}, (), name=name, layer=layer, **more)


LAYERS = [param(f"layers.{n}.w") for n in range(6)]
EMBED = param("embed.weight", 100, first=True)


TIED = param("embed.weight", 100, first=True, both_ends=True)


@pytest.mark.parametrize(
    ("rest", "last"),
    [
        ([EMBED, param("head.weight", 20)], 20 + 4),
        ([TIED], 100 + 4),
        ([TIED, param("head.weight", 20), param("head.mtp.w", 9)], 2 * 20 + 9 + 4),
        ([EMBED, param("head.weight", 20), param("table", 50, by_rows=True)], 20 + 4),
    ],
    ids=["own head", "tied", "mtp", "table"],
)
def test_a_token_costs_the_elements_that_it_is_multiplied_with(rest, last):
    """Layer 1 has 8 experts of 3 x 5; a token uses 2 of them."""
    model = nn.Module()
    model.dispatch, model.wider = Dispatch(8, 5, 2, lambda *_: None), Dispatch(16, 5, 4, lambda *_: None)
    experts = Param({"expert": 8, "f": 3}, {"embed": 5}, (), name="layers.1.e", layer=1)
    table = table_of(param("layers.0.w", 7), experts, param("head.norm", 4), *rest)
    assert costs_of(table, model) == ([7, 2 * 3 * 5], last)
    assert costs_of_stages(table, model, Line(2, (1, 2))) == [7, 30 + last]
    assert costs_of_stages(table, model, Line(1, (2,))) == [37 + last]


@pytest.mark.parametrize(
    ("given", "pipeline", "num_first", "ends"),
    [
        (1, Pipeline(), 1, (6,)),
        (2, Pipeline(), 1, (3, 6)),
        (2, Pipeline(), 4, (4, 6)),  # deepstack: the first 4 layers stay together
        (2, Pipeline(stages=2), 3, (3, 4, 5, 6)),
        (3, Pipeline(ends=(1, 5, 6)), 1, (1, 5, 6)),
        (2, Pipeline("v", ends=(1, 2, 5, 6)), 1, (1, 2, 5, 6)),
    ],
)
def test_ends_of_stages(given, pipeline, num_first, ends):
    line = line_of(table_of(*LAYERS, num_first_layers=num_first), nn.Module(), given, pipeline)
    assert (line.pp, line.ends, line.turn) == (given, ends, pipeline.schedule == "v")


@pytest.mark.parametrize(
    ("pipeline", "num_first", "both_ends", "message"),
    [
        (Pipeline(ends=(2, 5)), 1, False, "ends after all 6 layers"),
        (Pipeline(ends=(2, 4, 6)), 1, False, "has 2 stages"),
        (Pipeline(ends=(2, 6)), 3, False, r"the first 3 layers.*ends=\(3, 6\)"),
        (Pipeline("v"), 1, True, "hold the embedding twice"),
    ],
)
def test_ends_that_no_run_can_have_are_refused(pipeline, num_first, both_ends, message):
    table = table_of(*LAYERS, param("embed.weight", first=True, both_ends=both_ends), num_first_layers=num_first)
    with pytest.raises(MeshError, match=message):
        line_of(table, nn.Module(), 2, pipeline)
    if num_first == 3:
        assert line_of(table, nn.Module(), 2, Pipeline(ends=(3, 6))).ends == (3, 6)
    if both_ends:
        assert line_of(table, nn.Module(), 2, Pipeline(stages=2)).num_stages == 4


def test_which_stages_hold_a_parameter_and_which_is_the_first_that_is_trained():
    line, tied = Line(3, (1, 4, 6)), param("embed.weight", first=True, both_ends=True)
    norm = param("head.norm")
    assert [stages_of_param(each, line) for each in LAYERS] == [(0,), (1,), (1,), (1,), (2,), (2,)]
    assert stages_of_param(tied, line) == (0, 2)
    assert stages_of_param(tied, Line(1, (6,))) == (0,)
    assert stages_of_param(EMBED, line) == (0,)
    assert stages_of_param(norm, line) == (2,)
    table = table_of(*LAYERS, tied, norm)
    assert trained_from(table, line, ["layers.4.w", "layers.2.w", "head.norm"]) == 1
    assert trained_from(table, line, ["head.norm"]) == 2
    assert trained_from(table, line, ["head.norm", "embed.weight"]) == 0
    assert trained_from(table, line, []) == 0


def test_programs_are_those_of_the_schedule():
    line = Line(2, (1, 2))
    kinds = ["".join(step.kind for step in rank if len(step) == 3) for rank in program_of(line, "1f1b", 3, 0)]
    assert kinds == ["FFBFBB", "FBFBFB"]
    assert {step.kind for step in program_of(line, "zero-bubble", 3, 0)[0] if len(step) == 3} == {*"FIW"}
    assert [len([s for s in rank if len(s) == 3]) for rank in program_of(line, "1f1b", 3, 1)] == [3, 6]
    assert ["".join(s.kind for s in rank if len(s) == 3) for rank in forward_program(line, 3)] == ["FFF", "FFF"]


class Part(nn.Module):
    """Record how stages are asked for."""

    def __init__(self, log, name="whole"):
        super().__init__()
        self.log, self.name = log, name
        self.w = weight({"a": 1}, key="w")
        self.inner = nn.Module()
        self.inner.v = weight({"a": 1}, key="v")

    def units(self):
        return [self.inner]

    def kept_units(self):
        return [self.inner]

    def part(self, layers, *, first, last):
        self.log.append((list(layers), first, last))
        return Part(self.log, "part")


def test_a_single_stage_keeps_its_last_unit_and_parts_free_all():
    asked = []
    (whole,) = stages_of(Part(asked), Line(1, (5,)), reshard=True)
    assert (whole.number, whole.module.name, asked) == (0, "whole", [])
    assert [(unit.name, unit.again) for unit in whole.units] == [("inner", False), ("", True)]
    stages = stages_of(Part(asked), Line(3, (1, 3, 5)), reshard=True)
    assert asked == [([0], True, False), ([1, 2], False, False), ([3, 4], False, True)]
    assert [(stage.number, stage.module.name) for stage in stages] == [(n, "part") for n in range(3)]
    assert all(unit.again for stage in stages for unit in stage.units)
    assert not any(
        unit.again for stage in stages_of(Part(asked), Line(2, (1, 5)), reshard=False) for unit in stage.units
    )


def test_units_are_of_the_innermost_module_and_experts_are_apart():
    model, layer = nn.Module(), nn.Module()
    model.w, layer.w = weight({"a": 1}, key="w"), weight({"a": 1}, key="l")
    layer.experts, layer.norm = nn.Module(), nn.Module()
    layer.experts.up, layer.norm.w = weight({"a": 1}, key="u"), weight({"a": 1}, key="n")
    layer.experts.dispatch = Dispatch(8, 5, 2, lambda *_: None)
    layer.experts.lora = nn.Module()
    layer.experts.lora.b = weight({"a": 1}, key="b")
    model.layer = layer
    units = units_of(model, [layer], stays=[layer.experts, model])
    assert units == (
        Unit("layer.experts", ("layer.experts.up", "layer.experts.lora.b"), expert=True, again=False),
        Unit("layer", ("layer.w", "layer.norm.w"), expert=False, again=True),
        Unit("", ("w",), expert=False, again=False),
    )
    assert [unit.shard for unit in units] == [("efsdp",), ("fsdp", "cp"), ("fsdp", "cp")]
    assert not any(unit.again for unit in units_of(model, [layer], reshard=False))


@pytest.mark.parametrize(
    ("memory", "hold", "pp", "result"),
    [
        ({}, None, 2, (False, False, False, True)),
        ({}, True, 2, (True, True, False, False)),
        ({}, True, 1, (False, False, False, True)),
        (dict(gather_once=True), None, 1, (True, False, False, False)),
        (dict(sum_once=True), None, 1, (False, True, False, True)),
        (dict(narrow_grads=True), None, 1, (False, False, True, True)),
        (dict(narrow_grads=True), True, 2, (True, True, False, False)),
        (dict(reshard=False), None, 2, (False, False, False, False)),
    ],
)
def test_what_is_sent_once_a_step(memory, hold, pp, result):
    """The last: whether units are gathered again for backward."""
    recipe = Recipe(memory=MemoryOptions(**memory), pipeline=Pipeline(hold=hold, ends=(1, 5) if pp > 1 else None))
    module, axes = Part([]), Axes(pp=pp)
    spec = ShardingSpec(table_of(*LAYERS[:5]), Rules(), module, recipe)
    again = any(unit.again for unit in spec.stages(axes, pp - 1)[0].units)
    assert (spec.gathers_once(pp), spec.sums_once(pp), spec.sends_narrow(pp), again) == result
    assert [stage.number for stage in spec.stages(axes, pp - 1)] == [pp - 1]


def test_a_spec_with_another_table_keeps_its_stages():
    module = SimpleNamespace(named_modules=list)
    spec = ShardingSpec(table_of(*LAYERS), Rules(), module, Recipe(pipeline=Pipeline(ends=(1, 6))))
    more = spec.with_table(table_of(*LAYERS, param("head.extra", 9)), 2)
    assert more.line(2) is spec.line(2)
    assert [each.name for each in more.params(Axes(pp=2), 1)] == [*(f"layers.{n}.w" for n in range(1, 6)), "head.extra"]
    assert [each.name for each in spec.params(Axes(pp=2), 0)] == ["layers.0.w"]


def test_what_has_no_fp8_matmul_in_a_run_with_some():
    table = table_of(param("a", low=True), param("b", low=True), param("c"))
    assert ShardingSpec(table, Rules(), fp8=frozenset({"b"})).fp8_left_out == ["a"]
    assert ShardingSpec(table, Rules()).fp8_left_out == []


@pytest.mark.parametrize(
    ("pipeline", "ends"), [(Pipeline("v"), (1, 4, 7, 8)), (Pipeline(stages=2), (3, 4, 7, 8)), (Pipeline(), (7, 8))]
)
def test_a_dear_head_makes_the_other_stages_of_its_rank_small(pipeline, ends):
    """8 layers cost 15 each, and the head 82."""
    layers = [param(f"layers.{n}.w", 15) for n in range(8)]
    line = line_of(table_of(*layers, param("head.weight", 82)), nn.Module(), 2, pipeline)
    assert line.ends == ends
