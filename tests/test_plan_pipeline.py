"""`meshwright plan` of a pipeline: its stages, how long ranks wait, what they keep and send; what is refused."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from meshwright.axes import Axes
from meshwright.blueprint import Blueprint
from meshwright.cli import main
from meshwright.engine.step_bill import engine_bill
from meshwright.memory.simulate import most_held
from meshwright.plan import Figures, objections, plan_page, work_of
from meshwright.plan.pipeline_timing import pipeline_notes, place_lines, timetable
from meshwright.plan.step_time import flops_of
from meshwright.recipe import MemoryOptions, Pipeline, Recipe
from meshwright.sharding import GRADIENTS
from meshwright.sharding.stages import costs_of
from tests import tiny
from tests.pages import Read
from tests.test_plan import planned
from tests.words import words

QWEN3_8B: dict[str, Any] = dict(
    model_type="qwen3", vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36,
    num_attention_heads=32, num_key_value_heads=8, head_dim=128, tie_word_embeddings=False,
)  # fmt: skip
LAYER, VOCAB, NORM = 192_946_432, 151_936 * 4096, 4096  # parameters of Qwen3-8B: a layer, embedding or head, last norm
ORIGIN = {"command": "", "meshwright": "", "torch": "", "date": ""}
EVEN = tiny.of("qwen3", num_hidden_layers=8, vocab_size=4, intermediate_size=4096)  # the head costs next to nothing
Capture = pytest.CaptureFixture[str]


def figures_of(
    config: dict[str, Any], pipeline: Pipeline = Pipeline(), num: int = 8, device: int | None = None, **mesh: int
) -> Figures:
    axes = Axes(**mesh)
    blueprint = Blueprint.of(config).with_options(pipeline=pipeline)
    return Figures("a model", blueprint, axes, work_of(axes, None, num), device)


def test_figures_of_a_published_model() -> None:
    """Weights and two moments are float32; 8 micro-batches of bfloat16 go each way between stages."""
    figures = figures_of(QWEN3_8B, pp=4)
    lines = place_lines(figures)
    assert [(s.first, s.last) for line in lines for s in line.stages] == [(0, 9), (10, 19), (20, 29), (30, 35)]
    held = [10 * LAYER + VOCAB, 10 * LAYER, 10 * LAYER, 6 * LAYER + VOCAB + NORM]
    result = [most_held(figures.blueprint.spec, figures.axes, line.rank, figures.passing) for line in lines]
    passing = [sum(each.values()) for each in result]
    assert [each[GRADIENTS] for each in result] == [4 * num for num in held], "8 micro-batches: all are there in most"
    assert passing == sorted(passing, reverse=True), "early stages keep the most micro-batches"
    assert [line.num_bytes for line in lines] == [12 * num + more for num, more in zip(held, passing, strict=True)]
    assert [m.num_bytes for m in figures.memories] == [lines[0].num_bytes, lines[3].num_bytes]
    assert [line.most_kept for line in lines] == [4, 3, 2, 1]
    shares = [s.share for line in lines for s in line.stages]
    multiplied = [10 * LAYER, 10 * LAYER, 10 * LAYER, 6 * LAYER + VOCAB]  # but for a norm
    assert shares == pytest.approx([num / sum(multiplied) for num in multiplied], rel=1e-4)
    sent = {row.op: row for row in figures.traffic if row.over == "pp=4" and row.op in ("send", "recv")}
    assert {op: (row.count, row.num_bytes) for op, row in sent.items()} == dict.fromkeys(
        ("send", "recv"), (16, 16 * 8192 * 4096 * 2)
    ), "counted where most is sent: a stage in the middle has two neighbours"


def test_bytes_of_a_coordinate_are_those_of_its_own_ranks() -> None:
    """With tp, coordinate 1 on pp begins at rank 2. Rank 1 belongs to coordinate 0, whose stage is larger."""
    figures = figures_of(tiny.of("qwen3", num_hidden_layers=3), pp=2, tp=2)
    stored = [sum(each.num_bytes for each in figures.need.stored(rank)) for rank in range(4)]
    lines = place_lines(figures)
    assert [(line.place, line.rank, line.num_bytes) for line in lines] == [(0, 0, stored[0]), (1, 2, stored[2])]
    assert stored[1] != stored[2]


@pytest.mark.parametrize(
    ("pipeline", "bubble", "kept"),  # of pp=4 and 8 micro-batches, in the units of an even stage
    [(Pipeline(), 3 / 11, [4, 3, 2, 1]), (Pipeline(stages=2), 3 / 19, [11, 9, 7, 5]),
     (Pipeline("zero-bubble"), 3 / 27, [4, 4, 4, 4]), (Pipeline("v"), 1.5 / 25.5, [8, 8, 8, 8])],
    ids=["1f1b", "interleaved", "zero-bubble", "v"],
)  # fmt: skip
def test_bubbles_are_those_of_the_formulas(pipeline: Pipeline, bubble: float, kept: list[int]) -> None:
    figures = figures_of(EVEN, pipeline, pp=4)
    assert timetable(figures).bubble == pytest.approx(bubble, abs=2e-3)
    assert [line.most_kept for line in place_lines(figures)] == kept


def test_bytes_are_of_the_rank_that_sends_most() -> None:
    """The stage with the head has other doors than the others, so it may be any place."""
    senders = set[int]()
    for mesh in (dict(pp=2, tp=2), dict(pp=3, fsdp=2, ep=2), dict(pp=3, fsdp=2, tp=2), dict(pp=2, cp=2, replicate=2)):
        for name in ("qwen3_moe", "qwen3_tied"):
            figures = figures_of(tiny.of(name, num_hidden_layers=3), num=3, **mesh)
            bills = [
                engine_bill(figures.blueprint, figures.axes, rank, figures.work, "previous")
                for rank in range(figures.axes.world)
            ]
            sums = [sum(c.count * c.num_bytes for c in charges) for charges in bills]
            assert sum(row.num_bytes for row in figures.traffic) == sums[figures.sender] == max(sums), mesh
            senders.add(figures.axes.coords(figures.sender)["pp"])
    assert len(senders) > 1


def test_hold_is_decided_as_a_run_decides_it() -> None:
    def held(pipeline: Pipeline, device: int | None) -> bool | None:
        return figures_of(EVEN, pipeline, device=device, pp=2, fsdp=2).blueprint.recipe.pipeline.hold

    assert [held(Pipeline(), size) for size in (None, 10_000, 10**9)] == [False, False, True]
    assert [held(Pipeline(hold=hold), 10**9) for hold in (True, False)] == [True, False]
    assert held(Pipeline("v"), None), "it needs it"
    alone = Blueprint.of(EVEN, None, Recipe(pipeline=Pipeline("v"), memory=MemoryOptions(reshard=False)))
    recipe = Figures("it", alone, Axes(fsdp=2), work_of(Axes(), None, 1)).blueprint.recipe
    assert (recipe.pipeline, recipe.memory.reshard) == (Pipeline(), False), "with one place it says nothing"


def test_notes() -> None:
    assert re.search(
        words("2 micro-batches for pp=4", r"waits 60\.\d%"), pipeline_notes(figures_of(EVEN, num=2, pp=4))[0]
    )
    assert pipeline_notes(figures_of(EVEN, num=4, pp=4)) == []
    (message,) = pipeline_notes(figures_of(EVEN, pp=2, fsdp=2))
    assert re.search(words("in every micro-batch", "--hold", "less than a third"), message)
    mixture = tiny.of("qwen3_moe", output_router_logits=True)
    assert 'router_aux="previous"' in " ".join(pipeline_notes(figures_of(mixture, pp=2)))
    assert not any("pooled" in charge.what for charge in figures_of(mixture, pp=2).charges)


REFUSED: list[tuple[str, str, str]] = [
    ("qwen3", "--mesh pp=3", r"2 layers\b.*\b3 pipeline stages\b.*\bfrom 1 to 2$"),
    ("qwen3", "--mesh pp=2 --schedule v", r"2 layers\b.*\b4 pipeline stages\b.*\bfrom 1 to 2$"),
    ("even", "--mesh pp=4,tp=3,fsdp=2", r"(?s)tp=3\b.*\btp from 1, 2, 4$"),
    ("even", "--mesh pp=3,tp=3 --stages 3", r"(?s)3 reasons.*tp from 1, 2, 4\n.*\bfrom 1 to 8$"),
    ("even", "--mesh pp=2 --ends 3,7", r"ends=\(3, 7\): pp=2 with 1 stage\b.*\ball 8 layers; ends=\(4, 8\) would"),
    ("even", "--mesh pp=2 --ends 8", r"ends=\(8,\): pp=2\b.*\bhas 2 stages.*ends=\(4, 8\) would"),
    ("even", "--mesh pp=4 --ends 4,4,6,8", r"ends=\(4, 4, 6, 8\) leaves a stage without a layer"),
    ("even", "--mesh pp=4 --stages 2 --micro-batches 6", r"groups of pp=4, and 6\b.*\bgive 8 micro-batches\b"),
    ("even", "--mesh pp=2 --schedule v --stages 3", r"6 stages on pp=2\b.*\bchoose 2 stages a rank"),
    ("even", "--mesh pp=2 --schedule v --no-hold", r"schedule='v' with hold=False\b.*\bleave hold out"),
    ("tied", "--mesh pp=2 --schedule v", r"embedding twice.*tied.*; choose 1f1b or zero-bubble$"),
    ("even", "--mesh fsdp=2 --schedule v", r"--schedule is a pipeline option\b.*\bpp=2 or more$"),
    ("even", "--no-hold", r"--hold is a pipeline option"),
]


@pytest.mark.parametrize("command", ["plan", "verify"])
def test_what_cannot_be_is_refused_with_what_can(
    command: str, tmp_path: Any, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.fork", lambda: pytest.fail("a process"))
    configs = {"qwen3": tiny.of("qwen3"), "even": EVEN, "tied": tiny.of("qwen3_tied", num_hidden_layers=4)}
    for name, config in configs.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(config))
    for name, options, message in REFUSED:
        if command == "plan" or "--micro-batches" not in options:
            assert main([command, str(tmp_path / f"{name}.json"), *options.split()]) == 2, options
            err = capsys.readouterr().err.strip()
            assert re.search(message, err), (options, err)


def test_a_step_that_is_too_small_for_its_stages() -> None:
    blueprint = Blueprint.of(EVEN).with_options(pipeline=Pipeline(stages=2))
    assert objections(blueprint, dict(pp=2)) == [], "of a mesh alone"
    assert len(objections(blueprint, dict(pp=2), 3)) == 1
    assert objections(blueprint, dict(pp=2), 4) == []


def test_json(capsys: Capture) -> None:
    code, out, _ = planned(
        capsys, "tiny-qwen3-moe", "--mesh", "pp=3", "--micro-batches", "4", "--schedule", "zero-bubble", "--json"
    )
    result = json.loads(out)
    assert code == 0
    pipeline = result["pipeline"]
    assert (pipeline["schedule"], pipeline["ends"], pipeline["hold"]) == ("zero-bubble", [1, 2, 3], True)
    assert [len(row) for row in pipeline["timetable"]] == [12, 12, 12]  # F, I and W of 4 micro-batches
    assert [place["num_bytes"] for place in pipeline["places"]] != 3 * [result["memory"][0]["total_bytes"]]
    assert max(place["num_bytes"] for place in pipeline["places"]) == result["memory"][0]["total_bytes"]
    assert sum(stage["share"] for place in pipeline["places"] for stage in place["stages"]) == pytest.approx(1)
    assert json.loads(planned(capsys, "tiny-qwen3", "--json")[1])["pipeline"] is None


@pytest.mark.parametrize(("columns", "num", "drawn"), [(80, 4, True), (120, 16, True), (80, 64, False)])
def test_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: Capture, columns: int, num: int, drawn: bool) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, _ = planned(
        capsys, "tiny-qwen3-moe", "--mesh", "pp=3,fsdp=2,ep=2", "--micro-batches", str(num), "--device", "80GB"
    )
    assert code == 0
    assert max(map(len, out.splitlines())) <= columns
    message = words(r"stage 1: layer 1\b", rf"\b{num}\s+micro-batches through 3 stages", r"the\s+bubble")
    assert re.search(message, out), out
    assert bool(re.search(r"^  0 F", out, re.MULTILINE)) == drawn
    assert ("too long to be drawn" in out) != drawn


def test_a_page() -> None:
    figures = figures_of(tiny.of("qwen3", num_hidden_layers=8), Pipeline("v"), pp=2, fsdp=2, cp=2)
    text = plan_page(figures, ORIGIN)
    result = Read(text)
    places = result.table("place")
    assert [row["place"] for row in places] == ["pp 0", "pp 1"]
    assert re.fullmatch(r"stage 0: layers? [\d-]+\nstage 3: layers? [\d-]+", places[0]["stages"]), places
    assert len(re.findall(r'<i class="[FIW]( later)?" style="left:', text)) == 2 * 2 * 3 * 8
    assert "backward: gradients of the weights" in result.text
    drawn = [title for title in result.titles if title.startswith("rank ")]
    assert drawn[5].startswith("rank 5: data rank 0, pp 1, cp 1")
    assert re.search(words("pp 1", r"pp = 2[^=]*4 groups of 2\s*one is 0, 4", "cp = 2"), result.text)
    embed = result.table("parameter")[0]["parameter"]
    assert re.fullmatch(r"embed\.weight\n.*\nat pp 0", embed), embed
    ends = [float(n) for n in re.findall(r"left:([\d.]+)%;width:[\d.]+%", text)]
    assert max(ends) < 100


def test_a_page_of_much() -> None:
    figures = figures_of(tiny.of("qwen3", num_hidden_layers=8), num=512, pp=8, replicate=2, fsdp=64)
    text = plan_page(figures, ORIGIN)
    assert len(text) < 100_000
    result = Read(text)
    assert re.search(
        words("8,192 actions are too many", "one of 8 places on pp", "one of 2 such replicas"), result.text
    )
    assert len([title for title in result.titles if title.startswith("rank ")]) == 64


@pytest.mark.parametrize(("mode", "operations"), [("head", 4), ("all", 6)])
@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_5 tied"])
def test_the_last_stage_has_the_second_vocabulary_product_of_mtp(family: str, mode: str, operations: int) -> None:
    config = tiny.of(family.removesuffix(" tied"), **({"tie_word_embeddings": True} if "tied" in family else {}))
    one, two = (Blueprint.of(config, recipe=Recipe(mtp=each)) for each in ("carried", mode))
    head = [param for param in two.table if param.name.startswith("head.mtp.") and param.cols]
    active = {p.name: p.numel * (3 / 8 if "expert" in p.dims else 1) for p in head}
    product, norms = 131 * 36, sum(p.numel for p in two.table if p.name.startswith("head.mtp.") and not p.cols)
    (_, last), (layers, more) = costs_of(one.table, one.module), costs_of(two.table, two.module)
    assert more - last == pytest.approx(sum(active.values()) + norms + product)
    assert layers == costs_of(one.table, one.module)[0]
    without, flops = (flops_of(each, each.table.params.keys()) for each in (one, two))
    assert flops.per_token - without.per_token == pytest.approx(6 * sum(active.values()) + operations * product)
    [attention] = [param.cols for param in head if "heads" in param.cols]
    assert flops.per_square - without.per_square == 6 * attention["heads"] * attention["head"]
