"""`meshwright plan` estimates how long a step takes: by hand from bytes, links and products."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from meshwright.axes import ENDS, Axes
from meshwright.blueprint import Blueprint
from meshwright.cli import main
from meshwright.errors import ConfigError
from meshwright.plan import Cluster, Figures, plan_page, work_of
from meshwright.plan.step_time import BETWEEN, INSIDE, estimate, ranks_in_node, time_on_links
from meshwright.plan.wording import duration
from meshwright.recipe import MemoryOptions, Pipeline, Recipe
from tests import tiny
from tests.pages import Read
from tests.test_plan import QWEN3_235B_A22B
from tests.test_plan_pipeline import QWEN3_8B
from tests.test_verify import directory
from tests.words import words

PLAIN = Cluster(inside=400, between=40, flops=1000)  # 300 and 30 GB/s are reached, and 450 TFLOP/s
Capture = pytest.CaptureFixture[str]


def figures_of(config: dict[str, Any], num: int = 1, memory: MemoryOptions = MemoryOptions(), **mesh: int) -> Figures:
    axes = Axes(**mesh)
    return Figures(
        "a model", Blueprint.of(config, None, Recipe(memory=memory)), axes, work_of(axes, None, num), cluster=PLAIN
    )


@pytest.mark.parametrize(
    ("mesh", "over", "place"),
    [
        (dict(fsdp=8, tp=8), ("tp",), 8),
        (dict(fsdp=8, tp=8), ("fsdp", "cp"), 1),
        (dict(fsdp=16, tp=2), ("fsdp", "cp"), 4),
        (dict(fsdp=16, cp=2, tp=2), ("fsdp", "cp"), 4),
        (dict(fsdp=64, ep=16), ("ep",), 8),
        (dict(fsdp=64, ep=4), ("ep",), 4),
        (dict(fsdp=64, ep=4), ("efsdp",), 2),
        (dict(fsdp=8), ("fsdp", "cp"), 8),
        (dict(fsdp=3), ("fsdp", "cp"), 3),  # one node has them all
        (dict(fsdp=4, tp=6), ("tp",), 2),  # groups of 6 begin at 0, 6, 12: pairs of them share a node for certain
        (dict(fsdp=8, tp=3), ("tp",), 1),
        (dict(pp=2, fsdp=8), ("pp",), 1),
        (dict(pp=4, tp=4), ("pp",), 2),
        (dict(pp=4, tp=4), (ENDS, "tp"), 4),
        (dict(pp=2, cp=8, tp=2), ("cp//4",), 1),
        (dict(pp=2, cp=8, tp=2), ("cp%4",), 4),
    ],
)
def test_how_much_of_a_group_is_in_a_node(mesh: dict[str, int], over: tuple[str, ...], place: int) -> None:
    axes = Axes(**mesh)
    assert ranks_in_node(axes, over, 8) == place
    for group in axes.groups(over):
        assert min(sum(r // 8 == rank // 8 for r in group) for rank in group) >= place, group


@pytest.mark.parametrize(
    ("op", "mesh", "over", "link", "seconds"),  # of 1.2 GB
    [
        ("all_gather", dict(fsdp=8), ("fsdp",), INSIDE, 1.2 * 7 / 8 / 300),
        ("all_reduce", dict(fsdp=8), ("fsdp",), INSIDE, 2 * 1.2 * 7 / 8 / 300),
        ("reduce_scatter", dict(fsdp=4, tp=8), ("fsdp",), BETWEEN, 1.2 * 3 / 4 / 30),
        (
            "all_gather",
            dict(fsdp=32),
            ("fsdp",),
            BETWEEN,
            1.2 * 31 / 32 / 300,
        ),  # 8 links of a node share what goes between
        ("all_gather", dict(fsdp=16, tp=2), ("fsdp",), BETWEEN, 1.2 * 3 / 4 / 4 / 30),
        ("all_reduce", dict(fsdp=16, tp=2), ("fsdp",), BETWEEN, 2 * 1.2 * 3 / 4 / 4 / 30),
        ("all_to_all", dict(fsdp=8), ("ep",), "", 0),
        ("all_to_all", dict(fsdp=8, ep=4), ("ep",), INSIDE, 1.2 * 3 / 4 / 300),
        ("all_to_all", dict(fsdp=32, ep=32), ("ep",), BETWEEN, 1.2 * 24 / 32 / 30),  # what stays in the node is quicker
        ("send", dict(pp=2, tp=4), ("pp",), INSIDE, 1.2 / 300),
        ("send", dict(pp=2, tp=8), ("pp",), BETWEEN, 1.2 / 30),
    ],
)
def test_a_collective(op: str, mesh: dict[str, int], over: tuple[str, ...], link: str, seconds: float) -> None:
    result = time_on_links(op, 1_200_000_000, over, Axes(**mesh), PLAIN)
    assert result.seconds == pytest.approx(seconds)
    assert result.link == (link or INSIDE)


LAYER, HEAD = 192_946_432 - 2 * 4096 - 2 * 128, 151_936 * 4096  # Qwen3-8B: products of a layer, and of the head
OPS = 6 * (36 * LAYER + HEAD) * 8192 + 36 * 6 * 32 * 128 * 8192**2  # of 8192 tokens, attention being causal


def test_a_step_of_a_dense_model() -> None:
    """FSDP hides behind products, tp does not: 4 collectives a layer forward, 4 backward, of all tokens in bfloat16."""
    result = estimate(figures_of(QWEN3_8B, num=2, fsdp=4, tp=2))
    assert result.products == pytest.approx(2 * OPS / 2 / 450e12)
    [of_tp, *_] = result.waits
    doors = 8192 * 4096 * 2
    per_batch = 8 * 36 * doors / 2 + 4 * doors / 2  # of the embedding and of the head two each
    assert (of_tp.what, of_tp.link) == ("collectives of tp", INSIDE)
    assert of_tp.seconds == pytest.approx(2 * per_batch / 300e9, rel=1e-4)
    layer, vocabulary = (LAYER + 2 * 4096 + 256) / 2, HEAD / 2
    gathered = 2 * 2 * 36 * layer * 2 + 2 * vocabulary * (2 + 1) * 2  # a unit twice a batch, but the head once
    summed = 2 * (36 * layer + 2 * vocabulary) * 4
    assert result.gathers == pytest.approx((gathered + summed) * 3 / 4 / 300e9, rel=1e-3)
    assert (result.not_hidden, result.bubble) == (0, 0)
    assert result.seconds == pytest.approx(result.products + result.waited)


def test_layers_that_run_again_take_a_forward_more() -> None:
    usual, full = (estimate(figures_of(QWEN3_8B, memory=MemoryOptions(kind), fsdp=8)) for kind in ("none", "full"))
    assert full.products == pytest.approx(usual.products * 4 / 3)
    assert (usual.host, full.host) == pytest.approx((36 * 2.0e-3, 36 * 3.2e-3))
    assert full.products == pytest.approx(8 / 6 * OPS / 450e12)


def test_what_nothing_hides_and_what_a_pipeline_adds() -> None:
    """A small step cannot hide its gathers; stages wait for as long as the schedule says, and for collectives too."""
    few = Figures("it", Blueprint.of(QWEN3_8B), Axes(fsdp=64), work_of(Axes(), 64, 1), cluster=PLAIN)
    result = estimate(few)
    assert result.host == pytest.approx(36 * 2e-3)
    assert result.launching == pytest.approx(result.host - result.products), "so few tokens that the host is slower"
    assert result.not_hidden == pytest.approx(result.gathers - result.host)
    assert result.not_hidden > 9 * result.products
    even = tiny.of("qwen3", num_hidden_layers=8, vocab_size=4, intermediate_size=4096)
    axes = Axes(pp=4, tp=2)
    blueprint = Blueprint.of(even).with_options(pipeline=Pipeline(ends=(2, 4, 6, 8)))
    figures = Figures("it", blueprint, axes, work_of(axes, None, 8), cluster=PLAIN)
    piped = estimate(figures)
    assert piped.host == pytest.approx(8 * 8 * 2e-3 / 4)
    assert piped.bubble == pytest.approx((piped.products + piped.waited + piped.launching) * 3 / 8, rel=1e-2)
    seconds = {wait.what: wait.seconds for wait in piped.waits}
    assert seconds["collectives of tp"] > 0
    sent = sum(charge.count * charge.num_bytes for charge in figures.charges if charge.op == "send")
    assert seconds["transfers between stages"] == pytest.approx(sent / 300e9), "a link sends and receives at once"


def test_experts_between_nodes() -> None:
    """56 of 64 ranks are in other nodes: 4 exchanges a layer, 8 experts a token, the tokens of a rank."""
    result = estimate(figures_of(QWEN3_235B_A22B, num=1, fsdp=128, tp=8, ep=64))
    [experts] = [wait for wait in result.waits if wait.what == "all-to-all of experts"]
    rows = 8192 / 8 * 8 * 4096 * 2
    assert experts.link == BETWEEN
    assert experts.seconds == pytest.approx(94 * 4 * rows * 56 / 64 / 30e9, rel=1e-3)


def test_without_a_cluster_nothing_is_timed() -> None:
    with pytest.raises(ConfigError, match="no cluster"):
        estimate(Figures("it", Blueprint.of(tiny.of("qwen3")), Axes(), work_of(Axes(), None, 1)))


def test_a_terminal_a_program_and_a_page(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    at = directory(tmp_path / "m", QWEN3_235B_A22B)
    command = ["plan", at, "--mesh", "fsdp=128,tp=8,ep=64", "--device", "H100", "--between", "25"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines()[1:])) <= 80  # the first names the directory
    message = " ".join(out.split())
    wanted = [
        "all_to_all .* between nodes", "waits: all-to-all of experts, between nodes",
        "tokens per second per rank, MFU",
        r"450 GB/s per rank and direction inside a node and 25 between nodes, 989 TFLOP/s",
        r"\(as specified for H100, except for options\)",
        "A document fills a micro-batch", "links reach 75% of this and matmuls 45%",
    ]  # fmt: skip
    assert re.search(words(*wanted), message), message
    assert main([*command, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    times = result["estimate"]
    parts = times["products"] + sum(w["seconds"] for w in times["waits"]) + times["not_hidden"] + times["bubble"]
    parts += times["launching"]
    assert times["seconds"] == pytest.approx(parts)
    assert times["tokens_a_second"] == pytest.approx(8192 / 8 / times["seconds"])
    assert times["mfu"] == pytest.approx(0.45 * times["products"] / times["seconds"]), "nothing is recomputed"
    assert {row["link"] for row in result["traffic"]} == {INSIDE, BETWEEN}
    assert sum(row["seconds"] for row in result["charges"]) == pytest.approx(
        sum(r["seconds"] for r in result["traffic"])
    )


def test_a_page() -> None:
    figures = figures_of(tiny.of("qwen3_moe"), fsdp=2, tp=2, ep=2)
    result = Read(plan_page(figures, {"command": "", "meshwright": "", "torch": "", "date": ""}))
    rows = result.table("part")
    assert rows[0]["part"] == "matmuls"
    assert rows[-1]["part"].startswith("a step")
    assert all(row["estimated"].endswith("inside a node") for row in result.table("what"))
    assert all(row["estimated time"] for row in result.table("over"))
    tiles = ["stored by a rank", "a step, estimated", "tokens per second per GPU", "MFU", "tokens in a step"]
    assert all(each in result.text for each in tiles)


def test_bars_of_collectives_are_as_long_as_these_take() -> None:
    """A byte between nodes takes longer than one inside."""
    figures = figures_of(tiny.of("qwen3"), fsdp=16, tp=2)
    page = plan_page(figures, {"command": "", "meshwright": "", "torch": "", "date": ""})
    seconds = [time_on_links(r.op, r.num_bytes, r.axes, figures.axes, PLAIN).seconds for r in figures.traffic]
    drawn = [float(each) for each in re.findall(r'class="part".*?class="share" style="width:([\d.]+)%', page)]
    longest = max(range(len(seconds)), key=seconds.__getitem__)
    expected = [each * drawn[longest] / seconds[longest] for each in seconds]
    assert drawn == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (1.25, "1.25 s"), (0.9999, "1.00 s"), (0.0456, "45.6 ms"), (1.2e-5, "12.0 us"), (1e-9, "0.00 us"),
     (1234.5, "1,234 s"), (9.78, "9.78 s"), (9.996, "10.0 s"), (99.6, "99.6 s"), (99.96, "100 s")],
)  # fmt: skip
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
