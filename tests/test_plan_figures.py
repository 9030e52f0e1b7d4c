"""The figures of a plan, what its tables and pages make of them, and the parts of a mesh that they draw."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import pytest
import torch

from meshwright.axes import Axes
from meshwright.blueprint import Blueprint
from meshwright.engine.gradient_start import begun_backward
from meshwright.errors import ConfigError
from meshwright.ops.codings import FP8, NF4
from meshwright.optim import AdamW
from meshwright.plan import html, page, step_time, svg, terminal
from meshwright.plan.figures import Figures, RankMemory, work_of
from meshwright.plan.pipeline_timing import pipeline_json, pipeline_notes, place_lines, timetable
from meshwright.plan.resolve_model import TINY
from meshwright.plan.tables import parameter_lines
from meshwright.recipe import MemoryOptions, Pipeline, Recipe
from meshwright.sharding import Stored, Work
from tests.plan_figures import H100, fake, figures_of


@pytest.mark.parametrize(
    ("mesh", "tokens", "expected"),
    [({}, None, 8192), (dict(cp=3), None, 8193), (dict(cp=2, tp=3), None, 8196), (dict(tp=3, fsdp=5), 9, 9)],
)
def test_tokens_are_rounded_up_to_what_a_mesh_divides(mesh: dict[str, int], tokens: int | None, expected: int) -> None:
    assert work_of(Axes(**mesh), tokens, 4) == Work(expected, 4, 2, 4)
    with pytest.raises(ConfigError, match=r"--tokens 7 does not divide into .*=3; choose 9"):
        work_of(Axes(tp=3), 7, 1)


@pytest.fixture
def _no_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Figures, "need", fake(stored=lambda rank: [Stored("parameters", 2000)]))


@pytest.mark.usefixtures("_no_simulation")
def test_each_place_of_a_pipeline_waits_for_its_own_time() -> None:
    """Layers 0-2 are on the first place, 3-7 on the second."""
    figures = figures_of("even", num=4, pipeline=Pipeline(ends=(3, 8)), pp=2)
    lines, table = place_lines(figures), timetable(figures)
    shares = [line.stages[0].share for line in lines]
    idle = [1 - 4 * (1 + 2) * 2 * share / table.makespan for share in shares]
    assert [line.idle for line in lines] == pytest.approx(idle)
    assert idle[0] > idle[1] + 0.1


def test_figures_of_frozen_parameters() -> None:
    """They send no update. The simulation knows in which form each of them is stored."""
    params, asked = [fake(name=name) for name in "abc"], list[Any]()
    spec = fake(params=lambda axes, rank: params if rank == 6 else [], rules="rules")
    operations = lambda *given: asked.append(given) or 5  # noqa: E731 - short
    figures = fake(
        blueprint=fake(spec=spec), axes="axes", sender=6, trained={"a", "c"}, optimizer=fake(operations=operations),
        codings={"x": NF4}, frozen_dtypes={"x": torch.uint8, "y": torch.float16},
    )  # fmt: skip
    assert cast(Any, Figures.update_operations).fget(figures) == 5
    assert asked == [([params[0], params[2]], "rules", "axes", 6)]
    forms = [Figures.stored_form(figures, name) for name in ("x", "y", "a")]
    assert forms == [NF4, torch.float16, torch.float32]
    parameter = torch.empty(1, device="meta")
    figures.blueprint = fake(module=fake(parameters=lambda: iter([parameter])))
    figures.work, figures.memory = Work(24, 3, 2), MemoryOptions("full")
    work = cast(Any, Figures.passing).fget(figures)
    assert (work.tokens, work.num_batches, work.memory) == (24, 3, MemoryOptions("full"))
    assert work.frozen == {"x": NF4, "y": torch.float16}


def test_a_plan_knows_what_is_frozen_and_in_which_form() -> None:
    """Layer 1 is trained. Matrices of the others are in 4 bits, and the rest in the dtype of its files."""
    axes, recipe = Axes(fsdp=2, tp=2), Recipe(train=["layers.1.*"], frozen="nf4")
    blueprint = Blueprint.of(TINY["tiny-qwen3-moe-fp8"], None, recipe)
    figures = Figures("m", blueprint, axes, work_of(axes, 64, 1), cluster=H100)
    trained = {name for name in blueprint.table.params if name.startswith("layers.1.")}
    frozen, codings = {*blueprint.table.params} - trained, blueprint.codings(trained, axes)
    assert {*codings.values()} == {NF4}
    assert codings.keys() < frozen
    work, held = figures.work, figures.need.held
    assert (work.frozen, work.numbers) == (frozen, codings)
    assert work.begins == begun_backward(blueprint.spec, axes, 0, torch.bfloat16, trained)
    assert [*work.begins] == ["layers.1"]
    assert (held.trained, held.numbers, held.narrow) == (trained, codings, dict.fromkeys(frozen, 4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figures, "passing", None)
        assert terminal.plan_json(replace(figures), {})["step"]["frozen"] == sorted(frozen)
    in_fp8 = Figures(
        "m", Blueprint.of(TINY["tiny-qwen3-moe-fp8"], None, Recipe(fp8="block")), axes, work_of(axes, 64, 1)
    )
    names = in_fp8.blueprint.spec.fp8
    assert names
    assert (in_fp8.need.held.low, in_fp8.work.numbers) == (names, dict.fromkeys(names, FP8))


def test_an_estimate_is_that_of_the_rank_that_sends_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own units of FSDP overlap with matmuls. A step waits for the matmuls of the optimizer."""
    figures = fake(
        blueprint=fake(table=fake(params={})), axes=Axes(pp=3), sender=2, charges="charges", work="work",
        memory="memory", cluster=H100, update_operations=7,
    )  # fmt: skip
    monkeypatch.setattr(step_time, "flops_of", lambda *_: "flops")
    monkeypatch.setattr(step_time, "timetable", lambda _: fake(bubble=0.25))
    monkeypatch.setattr(step_time, "fsdp_units", lambda blueprint, axes, rank: f"units of {rank}")
    monkeypatch.setattr(step_time.StepCost, "estimate", lambda self, *given: (self.update, self.flops, *given))
    assert cast(Any, step_time.estimate(figures)) == (7, "flops", "charges", "units of 2", 0.25)
    figures.axes = Axes(fsdp=3)
    assert cast(Any, step_time.estimate(figures))[-1] == 0


@pytest.mark.parametrize(
    ("name", "mesh", "noted"),
    [("even", dict(pp=2), False), ("even", dict(pp=2, cp=2), True), ("even", dict(pp=2, tp=2), False),
     ("even", dict(pp=2, fsdp=2), True), ("qwen3_moe", dict(pp=2, tp=2), True)],
)  # fmt: skip
def test_parameters_that_a_pipeline_gathers_anew_are_noted(name: str, mesh: dict[str, int], noted: bool) -> None:
    """Ranks of cp are shards too, and ranks of tp those of experts."""
    said = pipeline_notes(figures_of(name, num=4, pipeline=Pipeline(hold=False), **mesh))
    assert any("in every micro-batch" in each for each in said) == noted


@pytest.mark.usefixtures("_no_simulation")
def test_a_timetable_says_when_actions_start_and_end() -> None:
    figures = figures_of("even", num=4, pp=2)
    rows = pipeline_json(figures)["timetable"]
    assert max(action[-1] for row in rows for action in row) == timetable(figures).makespan
    assert all(a[-1] <= b[-2] for row in rows for a, b in pairwise(row))


@pytest.mark.parametrize(
    ("name", "placed"),
    [
        ("embed.weight", ("vocab by tp=2", "fsdp=2", "replicate=2", "replicate=2 fsdp=2", "-", 131 * 36)),
        ("layers.{i}.norm.weight", ("-", "fsdp=2", "replicate=2 tp=2", "replicate=2 fsdp=2", "tp=2", 3 * 36)),
        (
            "layers.{i}.mixer.gates.A_log",
            ("key by tp=2", "-", "replicate=2 fsdp=2", "-", "replicate=2 fsdp=2", 2 * 8),
        ),
        (
            "layers.{i}.mixer.norm.weight",
            ("-", "-", "replicate=2 fsdp=2 tp=2", "-", "replicate=2 fsdp=2 tp=2", 2 * 10),
        ),
        (
            "layers.{i}.mlp.experts.down",
            ("expert by ep=2", "efsdp=2", "replicate=2", "replicate=2 efsdp=2", "-", 3 * 5760),
        ),
    ],
)
def test_axes_of_gradients_and_copies(name: str, placed: tuple[Any, ...]) -> None:
    """FSDP reduces over its shards and replicas. Other copies are summed in the last all-reduce."""
    figures = figures_of("qwen3_5_moe", replicate=2, fsdp=2, tp=2, ep=2)
    [line] = [each for each in parameter_lines(figures) if each.name == name]
    assert (line.cut, line.shards, line.copies, line.by_fsdp, line.late, line.num_parameters) == placed


def test_a_step_has_the_tokens_of_all_data_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of tp and pp read the same ones."""
    of_step = fake(step_lines=lambda _: [fake(seconds=2.0)], tokens_a_second=lambda _: 7, mfu=lambda _: 0.25)
    monkeypatch.setattr(page, "times", of_step)
    figures = fake(
        traffic=[], most=fake(num_bytes=1), num_parameters=5, cluster=H100, work=fake(tokens=64, num_batches=4),
        axes=Axes(pp=2, replicate=2, fsdp=2, tp=2),
    )  # fmt: skip
    assert "<dt>tokens in a step</dt><dd>1,024</dd>" in page._tiles(figures)


@pytest.mark.parametrize(("device", "longest"), [(None, 100), (2000, 50), (500, 100)])
def test_bars_of_memory_fit_the_page(device: int | None, longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that is too small is a mark within the bar."""
    monkeypatch.setattr(page, "communicators", lambda _: fake(count=0))
    monkeypatch.setattr(page, "peak_note", lambda _: None)
    most = RankMemory(0, (Stored("parameters", 600), Stored("moments", 400)))
    shown = page._memory(fake(memories=[most], by_kind=[most.parts], most=most, device=device, optimizer=AdamW()))
    bar = shown[: shown.index("</div>", shown.index('class="bar"'))]
    widths = [float(each) for each in re.findall(r"width:([\d.]+)%", bar)]
    assert sum(widths) == pytest.approx(longest)
    assert re.findall(r"left:([\d.]+)%", bar) == (["50.000"] if device == 500 else [])


@pytest.mark.parametrize(("name", "shown"), [("qwen3", "pp 0"), ("qwen3_moe", "efsdp 0, ep 1")])
def test_a_mesh_shows_experts_only_where_there_are_some(name: str, shown: str) -> None:
    drawn = "".join(svg.mesh_diagram(figures_of(name, fsdp=4, ep=2)))
    titles = re.findall(r'title="(rank 1: [^"]*)"', drawn)
    assert titles == [f"rank 1: data rank 1{', ' + shown if 'ep' in shown else ''}"]
    assert ("place on ep" in drawn) == ("ep " in shown)


def test_a_small_map_fills_the_group_of_its_axis() -> None:
    axes = Axes(fsdp=2, cp=2, tp=2)
    blocks = svg.blocks_of(axes)
    met = {
        axis: re.findall(r'class="met" d="([^"]*)"', svg._map(axes, blocks, axis))[0] for axis in ("fsdp", "cp", "tp")
    }
    # Blocks of tp stand in two columns, 16 apart, and rows 10 apart; a cell is 6 wide.
    assert met == {"fsdp": "M0 0h5v5h-5zM0 10h5v5h-5z", "cp": "M0 0h5v5h-5zM16 0h5v5h-5z",
                   "tp": "M0 0h5v5h-5zM6 0h5v5h-5z"}  # fmt: skip


def test_later_stages_of_a_place_are_underlined() -> None:
    """The first stage of each place is not, whatever its number."""
    figures = figures_of("even", num=4, pipeline=Pipeline(stages=2), pp=2)
    table = timetable(figures)
    for place, row in enumerate(table.rows):
        kinds = re.findall(r'<i class="(\w)( later)?"', svg._row(place, row, table.makespan, numbered=True))
        assert [bool(later) for _, later in kinds] == [slot.action.stage >= 2 for slot in row]


def test_a_page_needs_a_folder_that_can_be_written(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(html.os, "access", lambda path, mode: mode == html.os.W_OK)
    assert html.check_page(str(tmp_path / "a.html")) == tmp_path / "a.html"
    monkeypatch.setattr(html.os, "access", lambda path, mode: mode != html.os.W_OK)
    with pytest.raises(ConfigError, match="cannot be written"):
        html.check_page(str(tmp_path / "a.html"))
