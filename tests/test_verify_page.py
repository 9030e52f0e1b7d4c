"""The page of `verify` and of `plan`: it says what is so, and is a page that every browser reads."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import meshwright as mw
from meshwright.axes import Axes
from meshwright.blueprint import Blueprint
from meshwright.cli import main
from meshwright.engine.step_bill import engine_bill, step_bill
from meshwright.plan import Figures, plan_page, work_of, write_page
from meshwright.plan.html import Cell, flowing, page, table, tag
from meshwright.plan.tables import ranges
from meshwright.plan.wording import size
from meshwright.sharding import Work
from meshwright.verify import Finding, Plan, RunResult, plan, report
from meshwright.verify.report import print_table, verify_page
from meshwright.verify.results import Margin, Notes, merged, read_notes
from tests import tiny, worlds
from tests.pages import Read
from tests.published_configs import QWEN2, QWEN3_5, QWEN3_30B_A3B
from tests.test_verify import directory
from tests.words import words

ORIGIN = {
    "command": "meshwright verify 'a<b>'",
    "meshwright": "1.2.3",
    "torch": "4.5.6",
    "date": "2026-11-24 09:00 UTC",
}


def whole(tried: Plan, parts: list[RunResult]) -> str:
    return verify_page(tried, parts, ORIGIN)


def read(model: str, parts: list[RunResult] | None = None, **mesh: int) -> Read:
    return Read(whole(plan(model, Axes(**mesh)), parts or [RunResult("float64", 1.0, [])]))


def planned(model: str, device: int | None = None, **mesh: int) -> Read:
    blueprint, axes = plan(model, Axes()).blueprint, Axes(**mesh)
    return Read(plan_page(Figures(model, blueprint, axes, work_of(axes, None, 1), device), ORIGIN))


def number(text: str) -> int:
    return int(text.replace(",", ""))


def test_a_large_model_is_a_small_page(tmp_path: Path) -> None:
    made = plan(directory(tmp_path / "m", QWEN3_30B_A3B), Axes(replicate=2, fsdp=4, tp=2, ep=8))
    began = time.monotonic()
    text = whole(made, [RunResult("float64", 1.0, [])])
    assert time.monotonic() - began < 15
    assert len(text) < 100_000
    result = Read(text)
    assert "num_hidden_layers 48 → 2" in result.text
    assert "Where 30,532,122,624 parameters lie" in result.text
    assert not re.search(r"https?:|//|<script|<link|@import|src=|url\(", text)
    assert re.search(
        words("color-scheme: light dark", 'name="viewport" content="width=device-width', "max-width: "), text
    )
    assert re.search(words(r"meshwright 1\.2\.3", r"torch 4\.5\.6", "2026-11-24 09:00 UTC", "'a<b>'"), result.text)

    ranks = result.table("rank")
    assert len(ranks) == 16
    assert ranks[11] == dict(rank="11", replicate="1", fsdp="1", tp="1", ep="3", **{"data rank": "5"}), "no zeros"
    assert "rank 3: data rank 1, tp 1, ep 3" in result.titles
    assert len([title for title in result.titles if title.startswith("rank ")]) == 8, "one replica is drawn"
    assert re.search(words("replicate = 2", r"ep = 8[^=]*2 groups of 8\s+one is 0-7"), result.text)

    by_name = {row["parameter"].partition("\n")[0]: row for row in result.table("parameter")}
    assert len(by_name) == 14  # not 48 times as many
    experts = by_name["layers.{i}.mlp.experts.gate_up"]
    assert experts["parameter"].splitlines()[1:] == ["layers 0-47", "expert 128, half 2, expert_ffn 768, embed 2048"]
    assert experts["placement"].splitlines() == ["cut expert by ep=8", "copies over replicate=2"]
    assert experts["on a rank"] == size(128 // 8 * 2 * 768 * 2048 * 4)
    assert f"{128 // 8 * 2 * 768 * 2048 * 4:,} bytes" in result.titles
    assert experts["keys of the files"].splitlines() == [
        f"model.layers.{{i}}.mlp.experts.{{0-127}}.{part}_proj.weight" for part in ("gate", "up")
    ]
    norm = by_name["layers.{i}.mixer.q_norm.weight"]
    assert norm["gradient reduced"].splitlines() == [
        "by FSDP over replicate=2 fsdp=4", "in the last all-reduce over tp=2"
    ]  # fmt: skip
    assert norm["placement"].splitlines() == ["rows over fsdp=4", "copies over replicate=2 tp=2"]


def test_on_a_phone_each_value_has_the_name_of_its_column() -> None:
    result = read("tiny-qwen3-moe", fsdp=2, ep=2)
    cells = [cell for table in result.tables for row in table[1:] for cell in row]
    assert len(result.labels) == len(cells)
    assert {"oracle", "holds if", "float64, 1.0 s", "keys of the files"} <= set(result.labels)


def test_kinds_of_layers_and_ties(tmp_path: Path) -> None:
    hybrid = read(directory(tmp_path / "h", QWEN3_5), fsdp=2, tp=2).table("parameter")
    by_name = {row["parameter"].partition("\n")[0]: row for row in hybrid}
    a_log = by_name["layers.{i}.mixer.gates.A_log"]
    assert re.search(words(r"^layers 0-2 4-6 8-10\b", "^never rounded"), a_log["parameter"], re.MULTILINE)
    assert a_log["placement"] == "cut key by tp=2\ncopies over fsdp=2"
    assert a_log["gradient reduced"] == "in the last all-reduce over fsdp=2"
    assert "layers 3-31 by 4" in by_name["layers.{i}.mixer.q.weight"]["parameter"]
    tied = read(directory(tmp_path / "t", QWEN2), fsdp=3, tp=2).table("parameter")
    assert re.search(r"^embed\.weight\n[\s\S]*^tied: the head too$", tied[0]["parameter"], re.MULTILINE)
    lone = read("tiny-qwen3")  # one process
    assert [t[0][0] for t in lone.tables] == ["oracle", "stored", "parameter"]


def test_an_uneven_cut_is_a_span() -> None:
    result = read("tiny-qwen3", fsdp=3, tp=2)
    assert result.table("parameter")[0]["on a rank"] == "3.108 kB to 3.256 kB"
    assert f"{4 * 37 * 21:,} to {4 * 37 * 22:,} bytes" in result.titles


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([], ""), ([3], "3"), ([0, 1, 2], "0-2"), ([0, 1, 3], "0-1 3"), ([3, 7, 11], "3-11 by 4"), ([0, 8], "0 8")],
)
def test_ranges(numbers: list[int], text: str) -> None:
    assert ranges(numbers) == text


def real(source: Path, mesh: dict[str, int]) -> tuple[list[Any], int]:
    model = mw.load(source, mw.Mesh(**mesh, device="cpu"))
    return step_bill(model, 8192, 1), sum(t.nbytes for t in model.stored().values())


def test_the_page_and_the_run_agree(tmp_path: Path) -> None:
    """The meta device gives the same numbers as ranks with a loaded model."""
    mesh = dict(fsdp=2, tp=2, ep=2)
    source = tiny.directory(tmp_path / "m", "qwen3_5_moe")
    result = worlds.run(4, real, source, mesh)
    blueprint, axes = plan(str(source), Axes(**mesh)).blueprint, Axes(**mesh)
    for rank, (charges, _) in enumerate(result):
        assert engine_bill(blueprint, axes, rank, Work(8192, 1)) == charges
    shown = read(str(source), **mesh)
    lines = shown.table("what")
    assert sum(number(row["count"]) for row in lines) == sum(c.count for c in result[0][0])
    sums = [sum(c.count * c.num_bytes for c in charges) for charges, _ in result]
    assert sums[0] == max(sums)
    assert f"{size(sums[0])}" in shown.text, "the bytes of a step"
    by_op = {row["operation"]: row for row in shown.table("over") if not row["over"]}
    assert set(by_op) == {c.op for c in result[0][0]}
    held = [num_bytes for _, num_bytes in result]
    need = Figures("it", blueprint, axes, work_of(axes, None, 1)).need
    assert [need.stored(rank)[0].num_bytes for rank in range(4)] == held
    stored = shown.table("stored")[0]
    assert stored["rank 0"] == f"{max(held) / 1e6:.3f} MB"
    assert list(stored.values())[-1] == f"{min(held) / 1e6:.3f} MB"


def test_traffic_is_summed_by_axis() -> None:
    """Each operation below the sum of its axes; nothing is lost on the way."""
    rows = planned("tiny-qwen3-moe", fsdp=2, tp=2, ep=4).table("over")
    heads = [at for at, row in enumerate(rows) if row["over"]]
    assert [rows[at]["over"] for at in heads] == ["tp=2", "ep=4", "fsdp=2", "fsdp=2 tp=2"]
    for at, after in zip(heads, [*heads[1:], len(rows)], strict=True):
        assert number(rows[at]["count"]) == sum(number(row["count"]) for row in rows[at + 1 : after])


def test_a_large_mesh_is_drawn_in_part() -> None:
    blueprint, axes = plan("tiny-qwen3-moe", Axes()).blueprint, Axes(replicate=2, fsdp=1024, tp=4)
    text = plan_page(Figures("tiny-qwen3-moe", blueprint, axes, work_of(axes, None, 1)), ORIGIN)
    assert len(text) < 100_000
    result = Read(text)
    assert len([title for title in result.titles if title.startswith("rank ")]) == 128
    assert re.search(
        words("3,968 ranks like these, to rank 4,095", "one of 2 such replicas", "8,128 more ranks"), result.text
    )


@pytest.mark.parametrize(
    "mesh",
    [dict(fsdp=7), dict(tp=2), dict(fsdp=3, tp=4), dict(fsdp=2, tp=4, ep=2), dict(fsdp=64, ep=8), dict(fsdp=9, ep=1),
     dict(fsdp=6, tp=2, ep=4), dict(replicate=3, fsdp=2), dict(fsdp=512), dict(fsdp=32, ep=8, tp=1), dict(fsdp=101),
     dict(fsdp=5, tp=2), dict(fsdp=3, ep=3), dict(fsdp=250, ep=250), dict(fsdp=12, tp=4, ep=6), dict(fsdp=300, ep=100)],
)  # fmt: skip
def test_every_rank_of_a_replica_is_drawn_once(mesh: dict[str, int]) -> None:
    axes = Axes(**mesh)
    blueprint = Blueprint.of(tiny.of("qwen3_moe", num_experts=axes.ep * -(-8 // axes.ep)))
    result = Read(plan_page(Figures("a model", blueprint, axes, work_of(axes, None, 1)), ORIGIN))
    drawn = [int(re.findall(r"\d+", title)[0]) for title in result.titles if title.startswith("rank ")]
    replica = axes.world // axes.replicate
    assert drawn == list(range(replica if replica <= 256 else 128))


def test_what_does_not_fit_is_shown_large(tmp_path: Path) -> None:
    model = directory(tmp_path / "m", QWEN3_30B_A3B)
    result = planned(model, device=80 * 10**9, fsdp=2, ep=2)
    assert re.search(
        words("does not fit 80 GB", "fsdp=16", r"moments", "activations"), result.text + str(result.tables)
    )
    assert "fits 80 GB" in planned(model, device=80 * 10**9, fsdp=64, ep=8).text


def test_findings_are_shown_and_escaped() -> None:
    bad = RunResult("float64", 1.0, [Finding("G1", "a<b>", "x & y"), *[Finding("K1", f"c{i}", "?") for i in range(60)]])
    result = read("tiny-qwen3", [bad, RunResult("float32", 1.0, [])], tp=2)
    row = next(row for row in result.table("oracle") if row["oracle"] == "G1")
    assert list(row.values())[2:] == ["FAILS (1)", "pass"]
    assert "float64 G1 a<b>: x & y" in result.text
    assert "and 10 more of K1" in result.text
    assert "findings: 61" in result.text
    assert '"a<b' not in whole(plan("tiny-qwen3", Axes(tp=2)), [bad])
    assert "a<b>" not in whole(plan("tiny-qwen3", Axes(tp=2)), [bad])


def test_findings_of_equal_layers_share_a_box_that_opens() -> None:
    names = [f"model.layers.{i}.post_attention_layernorm.weight" for i in range(5)]
    result = [*(Finding("G1", name, "off by 6.6e-01") for name in names), Finding("K1", "all_reduce", "2, not 3")]
    text = whole(plan("tiny-qwen3", Axes(tp=2)), [RunResult("float64", 1.0, result)])
    shown, _, rest = text.partition("<details><summary>All 6 findings of float64")
    assert [part.count('<pre class="finding">') for part in (shown, rest)] == [2, 6]
    assert f"(the first of 5 in {names[0].replace('0', '*')})" in Read(text).text
    assert "6 findings" not in whole(plan("tiny-qwen3", Axes(tp=2)), [RunResult("float64", 1.0, result[-2:])])
    one_left = [Finding("G1", name, "?") for name in ("a", "b", "c", "d")]  # as many lines as findings
    assert "G1 d: ?" in Read(whole(plan("tiny-qwen3", Axes(tp=2)), [RunResult("float64", 1.0, one_left)])).text


def test_the_verdict_says_where_to_begin() -> None:
    bad = RunResult("float64", 1.0, [Finding("K1", "all_reduce", "2, not 3"), Finding("G1", "norm.weight", "wrong")])
    text = whole(plan("tiny-qwen3", Axes(tp=2)), [bad])
    verdict = re.search(r'<div class="verdict fails">(.*?)</div>', text)
    assert verdict
    assert re.search(
        words("findings: 2", r"<p>begin with G1 norm\.weight, and with K1 all_reduce\b", "<p>not tried: "), verdict[1]
    )
    assert "begin with" not in read("tiny-qwen3", tp=2).text


def test_the_first_line_is_for_a_lead(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Terminal and page begin with the checks, the mesh, and what fails, or the worst gradient and its bound."""
    monkeypatch.setenv("COLUMNS", "80")
    name = "model.layers.2.post_attention_layernorm.weight"
    margins = [Margin("D1", "scores", 9, 9e-10, 1e-9), Margin("G1", "gradients", 240, 1.7e-13, 1e-9, name)]
    tried, requested = plan("tiny-qwen3", Axes(tp=2)), ("W1", "D1", "G1")
    well = RunResult("float64", 1.0, [], requested, margins=margins)
    bad = RunResult("float64", 1.0, [Finding("G1", name, "off")], requested, ended=("W1",))
    lines = {
        "4 checks on tp=2: all is well; worst gradient 1.7e-13 off, 1e-09 allowed": well,
        "4 checks on tp=2: all is well; worst of 9 scores 9.0e-10 off, 1e-09 allowed": replace(
            well, margins=margins[:1]
        ),
        "4 checks on tp=2: all is well": replace(well, margins=()),
        "1 of 4 checks on tp=2 fails: G1; findings: 1; 1 check was not answered": bad,
    }
    for first, part in lines.items():
        print_table("tiny-qwen3", tried, [part])
        message = capsys.readouterr().out
        assert message.splitlines()[0] == first
        assert "…" not in message
        verdict, _, more = first.partition("; ")
        assert f"<strong>{verdict}</strong>" in whole(tried, [part])
        assert more.split(";")[0] in Read(whole(tried, [part])).text
    print_table("tiny-qwen3", tried, [well])
    assert f"allowed, in {name}" in " ".join(capsys.readouterr().out.split()), "nothing is cut at 80 columns"


def test_the_notes_of_all_ranks_are_one(tmp_path: Path) -> None:
    """A rank that was killed has left half a line. Counts add up, and the worst share of a bound remains."""
    far, near = Margin("G1", "gradients", 5, 8e-10, 1e-9, "a"), Margin("G1", "gradients", 7, 9e-10, 1e-8, "b")
    first, second = Notes(tmp_path / "0.notes"), Notes(tmp_path / "1.notes")
    for notes in (first, second):
        notes.add_findings("G1", [Finding("G1", "norm", "off")])
    first.add_margin(near)
    second.add_margin(far)
    second.add_margin(Margin("W1", "weights", 3))
    with (tmp_path / "1.notes").open("a") as file:
        file.write('["margin", {"oracle\n["ended", "W1"]\n')
    made = read_notes(tmp_path)
    assert made.findings == [Finding("G1", "norm", "off")]
    assert made.margins == [replace(far, count=12), Margin("W1", "weights", 3)]
    assert made.ended == ["G1"], "what follows half a line is not read"
    assert merged([far, near]) == merged([near, far]) == made.margins[:1]


def test_what_one_run_left_open_another_may_answer() -> None:
    """The text of an oracle is its worst margin in the first run that has any, and no "all equal" of what fails."""
    margins = [
        Margin("G1", "copies", 900),
        Margin("G1", "gradients", 9, 2e-10, 1e-9),
        Margin("G1", "sums", 4, 9e-9, 1e-8),
    ]
    requested = ("W1", "G1", "K1")
    cut = RunResult("float64", 1.0, [Finding("W1", "x", "off")], requested, margins=margins, ended=("W1",))
    well = RunResult("float32", 1.0, [], requested, ended=("W1", "G1"))
    tried = plan("tiny-qwen3", Axes(tp=2))
    assert report.headline(tried, [cut, well])[1] == "findings: 1; 1 check was not answered"
    assert report.margin_text([well, cut], "G1") == "4 sums: 9.0e-09 off, 1e-08 allowed"
    bad = replace(cut, findings=[Finding("G1", "x", "off")], margins=margins[:1])
    assert report.margin_text([bad], "G1") == ""
    assert report.margin_text([replace(bad, findings=[])], "G1") == "900 copies, all equal"
    runs = report.report_json("m", tried, [cut, well], ORIGIN)["runs"]
    assert [run["oracles"]["G1"] for run in runs] == [None, []]
    assert runs[0]["oracles"]["W1"] == [{"name": "x", "what": "off", "guess": ""}]
    assert [each["count"] for each in runs[0]["margins"]["G1"]] == [900, 9, 4]


def test_long_names_break_where_a_reader_would_break_them() -> None:
    assert flowing("in model.layers.2.down_proj.weight: 1.5e-09 off") == (
        'in model.<wbr>layers.<wbr>2.<wbr>down_<wbr>proj.<wbr>weight: <span class="unbroken">1.5e-09</span> off'
    )
    assert flowing('short.name="previous"; a<b>') == "short.name=&quot;previous&quot;; a&lt;b&gt;"
    assert flowing("(--html x)") == '(<span class="unbroken">--html</span> x)'
    noted = table(["a"], [[Cell("`evaluate` <it>", note="mlp.experts.3.down_proj.weight")]])
    assert "<code>evaluate</code> &lt;it&gt;" in noted
    assert "<small>mlp.<wbr>experts.<wbr>" in noted


def test_the_name_of_a_column_stands_above_its_numbers() -> None:
    made = table(["over", "bytes"], [[Cell("tp=2", "group"), Cell("12", "number group")]])
    assert '<th>over</th><th class="number">bytes</th>' in made


def test_the_router_is_spoken_of_where_there_is_one() -> None:
    assert "router is taken" in planned("tiny-qwen3-moe", tp=2).text
    assert "router is taken" not in planned("tiny-qwen3", tp=2).text


def test_numbers_of_ranks_stand_out_from_their_shade() -> None:
    """The accent of a dark page is light: there numbers turn dark at a paler shade than on a light page turn light."""
    blueprint, axes = plan("tiny-qwen3", Axes()).blueprint, Axes(fsdp=11)
    text = plan_page(Figures("tiny-qwen3", blueprint, axes, work_of(axes, None, 1)), ORIGIN)
    drawn = re.findall(r'<i(?: class="(\w+)")? title="rank[^>]* style="--shade:(\d+)%"', text)
    turned = {int(shade): kind for kind, shade in drawn}
    assert turned == {n: "deep" if n > 84 else "middle" if n > 66 else "" for n in range(0, 101, 10)}


def test_all_text_is_escaped() -> None:
    cells = table(["<h>"], [["<b>&amp;"], [Cell("<i>.a-name-that-may-be-broken", "k", "<u>", '"<s>')]])
    result = Read(page("<title>", ORIGIN, [cells, tag("p", "<q>")]))
    assert result.tables[0] == [["<h>"], ["<b>&amp;"], ["<i>.a-name-that-may-be-broken\n<u>"]]
    assert result.titles == ['"<s>']
    assert result.tags.isdisjoint(["b", "u", "s", "q"])


def test_the_verdict_names_what_was_not_tried() -> None:
    assert re.search(words("all is well", r"not tried: [^<]*\breplicate\b"), read("tiny-qwen3", tp=2).text)


def test_a_page_that_cannot_be_made_leaves_the_old_one(tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    target.write_text("of yesterday")
    with pytest.raises(UnicodeEncodeError):
        write_page(target, "\ud800")  # cannot be encoded
    assert target.read_text() == "of yesterday"
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]


@pytest.mark.parametrize("command", ["verify", "plan"])
@pytest.mark.parametrize("at", ["no/such/place.html", "."])
def test_a_place_that_cannot_be_written_is_refused_at_once(
    at: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([command, "tiny-qwen3", "--mesh", "tp=2", "--html", at]) == 2
    assert f"--html {at}" in capsys.readouterr().err


def test_a_margin_beyond_its_bound_is_a_finding(tmp_path: Path) -> None:
    """An oracle may record a comparison and forget to report it, as E3 once did."""
    notes = Notes(tmp_path / "0.notes")
    near, far, lost = (Margin("E3", "weights", 1, worst, 1e-9, "a") for worst in (1e-9, 2e-9, float("nan")))
    for margin, num in ((near, 0), (Margin("W1", "keys", 3), 0), (far, 1), (lost, 1), (near, 1)):
        notes.add_margin(margin)
        assert [finding.name for finding in read_notes(tmp_path).findings] == ["a"] * num
    assert "weights: nan off, 1.0e-09 allowed" in read_notes(tmp_path).findings[0].what
    notes.add_findings("E3", [Finding("E3", "b", "off")])
    assert [finding.name for finding in read_notes(tmp_path).findings] == ["b"]
