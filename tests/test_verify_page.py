"""`meshwright verify --html`: the page says what is so, and is a page that every browser reads."""

from __future__ import annotations

import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import meshwright as mw
from meshwright import cli, parallel
from meshwright.axes import Axes
from meshwright.engine.bill import engine_bill, step_bill
from meshwright.layout import Work
from meshwright.plan.page import page, plan_of, write_page
from meshwright.plan.tables import ranges
from meshwright.verify import Finding, Plan, RunResult, plan
from meshwright.verify.page import results
from tests import tiny, worlds
from tests.test_verify import QWEN2, QWEN3_5, QWEN3_30B_A3B, directory


class Read(HTMLParser):
    """Its tables as lists of rows of texts, and all other text. Tags must be closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.text, self.open, self.tags = "", list[str](), set[str]()
        self.feed(text)
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        if tag != "meta":
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += data
        elif self.open and self.open[-1] != "style":
            self.text += data

    def table(self, first: str) -> list[dict[str, str]]:
        """The table whose first column is called so."""
        head, *rows = next(t for t in self.tables if t[0][0] == first)
        assert all(len(row) == len(head) for row in rows)
        return [dict(zip(head, row, strict=True)) for row in rows]


def whole(tried: Plan, parts: list[RunResult]) -> str:
    return page(f"{tried.model} on {tried.axes}", results(tried, parts), plan_of(tried.blueprint, tried.axes))


def read(model: str, parts: list[RunResult] | None = None, **mesh: int) -> Read:
    return Read(whole(plan(model, Axes(**mesh)), parts or [RunResult("float64", 1.0, [])]))


def number(text: str) -> int:
    return int(text.replace(",", ""))


def test_a_large_model_is_a_small_page(tmp_path: Path) -> None:
    made = plan(directory(tmp_path / "m", QWEN3_30B_A3B), Axes(replicate=2, fsdp=4, tp=2, ep=8))
    began = time.monotonic()
    text = whole(made, [RunResult("float64", 1.0, [])])
    assert time.monotonic() - began < 15
    assert len(text) < 100_000
    found = Read(text)
    assert "num_hidden_layers 48 → 2" in found.text
    assert "Where 30,532,122,624 parameters lie" in found.text
    assert not re.search(r"https?:|//|<script|<link|@import|src=|url\(", text)
    assert "color-scheme: light dark" in text

    ranks = found.table("rank")
    assert len(ranks) == 16
    assert ranks[11] == dict(
        rank="11", pp="0", replicate="1", fsdp="1", cp="0", tp="1", efsdp="0", ep="3", **{"data rank": "5"}
    )
    groups = {row["axis"]: row["groups of ranks that differ on it alone"] for row in found.table("axis")}
    assert groups["ep"] == "[0-7]   [8-15]"

    by_name = {row["parameter"]: row for row in found.table("parameter")}
    assert len(by_name) == 14  # not 48 times as many
    experts = by_name["layers.{i}.mlp.experts.gate_up"]
    assert experts["layers"] == "0-47"
    assert experts["dims"] == "expert 128, half 2, expert_ffn 768, embed 2048"
    assert experts["cut"] == "expert by ep=8"
    assert experts["bytes on a rank"] == f"{128 // 8 * 2 * 768 * 2048 * 4:,}"
    assert experts["keys of the files"].splitlines() == [
        f"model.layers.{{i}}.mlp.experts.{{0-127}}.{part}_proj.weight" for part in ("gate", "up")
    ]
    norm = by_name["layers.{i}.mixer.q_norm.weight"]
    assert norm["gradient summed by FSDP over"] == "replicate=2 fsdp=4"
    assert norm["in the last sums of gradients over"] == "tp=2"
    assert norm["copied over"] == "replicate=2 tp=2"


def test_kinds_of_layers_and_ties(tmp_path: Path) -> None:
    hybrid = read(directory(tmp_path / "h", QWEN3_5), fsdp=2, tp=2).table("parameter")
    a_log = next(row for row in hybrid if row["parameter"] == "layers.{i}.mixer.gates.A_log\nnever rounded")
    assert a_log["layers"].startswith("0-2 4-6 8-10")
    assert (a_log["rows stored in shards over"], a_log["in the last sums of gradients over"]) == ("-", "fsdp=2")
    assert next(row for row in hybrid if row["parameter"] == "layers.{i}.mixer.q.weight")["layers"] == "3-31 by 4"
    tied = read(directory(tmp_path / "t", QWEN2), fsdp=3, tp=2).table("parameter")
    assert tied[0]["parameter"] == "embed.weight\ntied: the head too"
    lone = read("tiny-qwen3")  # one process
    assert [t[0][0] for t in lone.tables] == ["oracle", "rank", "axis", "parameter", "operation", "what"]
    assert lone.table("what") == []


def test_an_uneven_cut_is_a_span() -> None:
    embed = read("tiny-qwen3", fsdp=3, tp=2).table("parameter")[0]
    assert embed["bytes on a rank"] == f"{4 * 36 * 21:,} to {4 * 36 * 22:,}"


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([], ""), ([3], "3"), ([0, 1, 2], "0-2"), ([0, 1, 3], "0-1 3"), ([3, 7, 11], "3-11 by 4"), ([0, 8], "0 8")],
)
def test_ranges(numbers: list[int], text: str) -> None:
    assert ranges(numbers) == text


def real(source: Path, mesh: dict[str, int]) -> tuple[list[Any], int]:
    model = mw.load(source, mw.Mesh(**mesh, device="cpu"))
    return step_bill(model, 4096, 1), sum(t.nbytes for t in model.stored().values())


def test_the_page_and_the_run_agree(tmp_path: Path) -> None:
    """What is worked out on the meta device is what ranks find of a model that they hold."""
    mesh = dict(fsdp=2, tp=2, ep=2)
    source = tiny.directory(tmp_path / "m", "qwen3_5_moe")
    found = worlds.run(4, real, source, mesh)
    blueprint, axes = plan(str(source), Axes(**mesh)).blueprint, Axes(**mesh)
    for rank, (charges, _) in enumerate(found):
        assert engine_bill(blueprint, axes, rank, Work(4096, 1)) == charges
    shown = read(str(source), **mesh)
    lines = shown.table("what")
    assert sum(number(row["how many"]) for row in lines) == sum(c.count for c in found[0][0])
    for row in shown.table("operation"):
        sums = [sum(c.count * c.num_bytes for c in charges if c.op == row["operation"]) for charges, _ in found]
        assert (number(row["bytes of rank 0"]), number(row["most of any rank"])) == (sums[0], max(sums))
        assert sums[0] == sum(number(r["bytes in all"]) for r in lines if r["operation"] == row["operation"])
    held = [num_bytes for _, num_bytes in found]
    assert f"A rank stores {min(held):,} to {max(held):,} bytes" in shown.text or f"{held[0]:,} bytes" in shown.text


def test_what_was_found_is_shown_and_escaped() -> None:
    bad = RunResult("float64", 1.0, [Finding("G1", "a<b>", "x & y"), *[Finding("K1", f"c{i}", "?") for i in range(60)]])
    found = read("tiny-qwen3", [bad, RunResult("float32", 1.0, [])], tp=2)
    row = next(row for row in found.table("oracle") if row["oracle"] == "G1")
    assert list(row.values())[2:] == ["FAILS (1)", "pass"]
    assert "float64 G1 a<b>: x & y" in found.text
    assert "and 10 more of K1" in found.text
    assert "findings: 61" in found.text
    assert "b" not in found.tags


def test_the_command_writes_it_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "page.html"
    target.write_text("of yesterday")
    monkeypatch.setattr(parallel, "finish", lambda grads, mesh: None)
    said = ["verify", "tiny-qwen3", "--mesh", "tp=2", "--dtypes", "float64", "--html", str(target)]
    assert cli.main(said) == 1
    found = Read(target.read_text())
    assert "a sum over tp" in found.text
    assert next(row for row in found.table("oracle") if row["oracle"] == "G1")["holds if"].startswith("Every gradient")
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]
    capsys.readouterr()


def test_a_page_that_cannot_be_made_leaves_the_old_one(tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    target.write_text("of yesterday")
    with pytest.raises(UnicodeEncodeError):
        write_page(target, "\ud800")  # cannot be encoded
    assert target.read_text() == "of yesterday"
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]


@pytest.mark.parametrize("at", ["no/such/place.html", "."])
def test_a_place_that_cannot_be_written_is_refused_at_once(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["verify", "tiny-qwen3", "--mesh", "tp=2", "--html", at]) == 2
    assert f"--html {at}" in capsys.readouterr().err
