"""The report of runs: read as they lie, thinned without losing a peak, drawn offline at any width."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import meshwright as mw
from meshwright.cli import main
from meshwright.report import last_words, series, summary
from meshwright.report.run_files import Run, read_folder, read_run
from meshwright.report.run_page import report_page
from meshwright.report.series import chart_data, thin_indices
from tests.fake_runs import fake_run
from tests.pages import Read

PACKAGE = Path(mw.__file__).parent / "report"
BUNDLE = "9511057df085f485da5dfe249483a27b180a237521ffc8a4a33b3d3d21979f56"


def line(kind: str, step: int, **values: Any) -> str:
    return json.dumps({"kind": kind, "step": step, "time": 1000.0 + step, **values}) + "\n"


def without_scripts(page: str) -> str:
    return re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)


def test_a_run_that_went_on(tmp_path: Path) -> None:
    """The steps behind its checkpoint were made anew; so was what had been saved there, and how it had ended."""
    text = line("start", 0, num_steps=9, **{"from": 0})
    text += "".join(line("step", n, **{"train/loss": 1.0}) for n in range(1, 6)) + line("save", 5, path="lost")
    text += line("end", 5, why="signal 15") + line("start", 3, num_steps=9, **{"from": 3})
    text += line("step", 4, **{"train/loss": 2.0}) + line("new-kind", 4) + "[1, 2]\n" + '{"kind": "step", "st'
    (tmp_path / "metrics.jsonl").write_text(text)
    run = read_run(tmp_path)
    assert [(each["step"], each["train/loss"]) for each in run.of("step")] == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0)]
    assert not [*run.of("save"), *run.of("end")]
    assert (len(run.starts), run.num_steps) == (2, 9)
    assert "at step 4 of 9" in report_page([run], {"command": "x", "date": "today"}).lower()


def test_starts_on_several_meshes(tmp_path: Path) -> None:
    """The story of the meshes, marks where one began, and how each start ended; a start that made no step is none."""
    begun = [
        (0, 47, {"fsdp": 2}, None), (40, 45, {"fsdp": 2}, None), (40, 49, {"tp": 2, "ep": 2}, "signal 15"),
        (49, 49, {"pp": 2}, None), (49, 60, {"pp": 2}, ""),
    ]  # fmt: skip
    text, time = "", 0.0
    for first, last, mesh, why in begun:
        about = {"num_steps": 90, "world": 2, "mesh": mesh, "from": first, "experts": {"num": 8, "top_k": 1}}
        text += line("start", first, **about, time=(time := time + 1000))
        for step in range(first + 1, last + 1):
            used = {"experts/max_over_mean": [1.0, 7.5], "experts/dead": 3} if step > 20 else {}
            text += line("step", step, **{"train/loss": 1.0, "train/tokens": 10 * step, **used}, time=time + step)
        text += line("end", last, why=why) if why is not None else ""
    (tmp_path / "metrics.jsonl").write_text(text)
    overcome = "1970-01-01 00:17:30 +0000\nrank 1 of 2 was killed\n  at step 47\n\n"
    overcome += "1970-01-01 01:34:00 +0100\nrank 0 <died>\n\n"
    (tmp_path / "overcome.txt").write_text(overcome)
    (tmp_path / "failure.txt").write_text("not moved yet")
    os.utime(tmp_path / "failure.txt", (4500, 4500))
    run = read_run(tmp_path)
    page = report_page([run], {"command": "x", "date": "today"})
    assert "fsdp=2 (40 steps) → tp=2,ep=2 (9 steps) → pp=2 (11 steps)" in page
    marks = chart_data([run])["runs"][0]["marks"]
    assert [(m["step"], m["tokens"], m["mesh"], m["again"]) for m in marks] == [
        (1, 10, "fsdp=2", False), (40, 400, "tp=2,ep=2", True), (49, 490, "pp=2", True)
    ]  # fmt: skip
    # Seconds since the first step, at 1001 s: the starts at 1000, 3000 and 5000 s.
    assert [m["time"] for m in marks] == [0.0, 1999.0, 3999.0]
    rows = Read(without_scripts(page)).table("started")
    assert [row["how it ended"] for row in rows] == [
        "rank 1 of 2 was killed", "rank 0 <died>", "ended by signal 15", "not moved yet", "done"
    ]  # fmt: skip
    assert [row["mesh"] for row in rows][1:3] == ["fsdp=2", "tp=2 ep=2"]
    assert re.search(r'class="finding overcome">[^<]*rank 1 of 2 was killed\n  at step 47</pre>', page)
    assert re.search(r'class="finding overcome">[^<]*not moved yet</pre>', page)
    assert 'class="finding"' not in page
    assert "in step 60, 3 of 16 got no token" in page
    assert "got 7.50 times its share, of 8.00 that are possible" in page


def test_the_last_words_of_a_run(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "first", steps=120)
    held_out = (2 * (1.25 + 1.3 * math.exp(-120 / 200)) - 0.2) / 2
    message = rf"done, 120 steps; loss \d\.\d{{4}}; lowest held-out loss {held_out:.4f}, at step 120"
    assert re.fullmatch(message, last_words(folder, "runs/a b")[0])
    assert last_words(folder, "runs/a b")[1:] == [
        "written to runs/a b:", "  metrics.jsonl              every figure of every step", "next:",
        "  meshwright report 'runs/a b'",
    ]  # fmt: skip
    (folder / "export").mkdir()
    assert any(row.startswith("  export  ") for row in last_words(folder, "x"))
    (folder / "metrics.jsonl").write_text(line("start", 0))
    assert last_words(folder, "x") == []


def test_values_that_are_no_numbers(tmp_path: Path) -> None:
    """NaN and what is too large are no number; a line of another kind than ours is left out, as is one without end."""
    bad = ["NaN", "-Infinity", "1e308", "9" * 400, '"x"', "[1]", "{}", "[" * 9000 + "]" * 9000]
    text = line("start", 0, num_steps=9, experts={"num": 4, "top_k": 1}) + "".join(
        line("step", n, **{"train/loss": "@"}).replace('"@"', value) for n, value in enumerate(bad, 1)
    )
    text += line("step", 9, **{"train/loss": 1.0, "experts/max_over_mean": [1.0], "experts/dead": 1e308})
    text += '{"a":' * 9000 + "\n"
    text += line("step", 8, **{"train/loss": 1.0, "experts/max_over_mean": [1e308, 1.0], "experts/dead": 0})
    text += line("step", 10, **{"time/step_s": 1e30}) + line("start", 10, time=2**62)
    text += line("experts", 10, load=[[1e308, 1.0]]) + line("experts", 9, load=[[1, "x"]])
    text += line("save", 9, seconds=None, path="p") + line("sample", 9, number=[])
    text += "".join(json.dumps({"kind": "step", "step": step, "train/loss": 5.0}) + "\n" for step in ("7", 7.5, None))
    (tmp_path / "metrics.jsonl").write_text(text)
    run = read_run(tmp_path)
    steps = [(each["step"], each["train/loss"]) for each in run.of("step")]
    assert steps == [*((n, None) for n in (1, 2, 3, 4)), (8, 1.0), (9, 1.0)]
    assert not [*run.of("experts"), *run.of("save"), *run.of("sample")]
    assert "at step 9 of 9" in report_page([run], {"command": "x", "date": "today"}).lower()


def test_what_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "holds no metrics.jsonl" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_text(line("start", 0))
    assert main(["report", str(tmp_path)]) == 2
    assert "holds no step yet" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "none")]) == 2
    assert "is not a directory" in capsys.readouterr().err


@pytest.mark.parametrize("num", [7, 2000, 2001, 31_337])
def test_peaks_stay(num: int) -> None:
    values: list[float | None] = [float(n % 17) for n in range(num)]
    values[num // 2 + 1], values[num // 3] = 99.0, -99.0  # inside of a stretch, where the number is large
    values[num // 4 : num // 4 + num // 9] = [None] * (num // 9)
    kept = thin_indices(values, 2000)
    assert len(kept) <= 2000
    assert {0, num - 1, values.index(99.0)} <= {*kept}
    assert -99.0 not in values or values.index(-99.0) in kept
    assert kept == sorted({*kept})


def test_charts_of_what_is_there(tmp_path: Path) -> None:
    values = {"train/loss": 1.0, "train/grad_norm": None, "nan": ["train/grad_norm"]}
    (tmp_path / "metrics.jsonl").write_text(line("step", 1, **values) + line("step", 2, **values))
    data = chart_data([read_run(tmp_path)])
    assert [chart["metric"] for chart in data["charts"]] == ["train/loss"]
    assert data["experts"] == [None]


def run_of(folder: Path, *lines: str) -> Run:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(lines))
    return read_folder(folder)


def test_lines_of_one_step_do_not_replace_each_other(tmp_path: Path) -> None:
    """The samples of a step have numbers, and the best checkpoint may be of the step of another one."""
    run = run_of(
        tmp_path,
        line("start", 0, num_steps=9),
        *(line("sample", 2, number=number, text=f"text {number}") for number in (0, 1)),
        line("save", 2, path="checkpoints/step-000002", seconds=1.25),
        line("save", 2, path="best/step-000002", seconds=2, best=True),
        line("start", 2, num_steps=20, **{"from": 2}),
    )
    assert [each["text"] for each in run.of("sample")] == ["text 0", "text 1"]
    assert summary.checkpoint_rows(run) == [
        ["2", "checkpoints/step-000002", "1.2 s", ""], ["2", "best/step-000002", "2.0 s", "best"]
    ]  # fmt: skip
    assert run.num_steps == 20, "the last start was given more steps"


def test_the_best_is_the_lowest_mean_of_all_sets(tmp_path: Path) -> None:
    losses = [(3.0, 1.0), (1.0, 2.0), (0.5, 4.0), (None, 0.0)]
    evals = [line("eval", n, **{"eval/a/loss": a, "eval/b/loss": b, "eval/b/perplexity": 0.0})
             for n, (a, b) in enumerate(losses, 1)]  # fmt: skip
    assert run_of(tmp_path, *evals).best == (1.5, 2)


@pytest.mark.parametrize(
    ("ends", "text", "state"),
    [
        (None, "at step 3 of 9", "open"),
        ("", "done, 3 steps", "good"),
        ("early stopping", "ended at step 3 of 9 by early stopping", "good"),
        ("signal 15", "ended at step 3 of 9 by signal 15", "open"),
    ],
)
def test_how_a_run_ended(tmp_path: Path, ends: str | None, text: str, state: str) -> None:
    """A failure of a start before this one, or after the end of a run, is not how it ended."""
    rest = [] if ends is None else [line("end", 3, why=ends)]
    (tmp_path / "failure.txt").write_text("rank 1 died")
    lines = (line("start", 0, num_steps=9), line("step", 3, **{"train/loss": 1.0}), *rest)
    os.utime(tmp_path / "failure.txt", (999, 999))
    assert summary.outcome(run_of(tmp_path, *lines)) == (text, state)
    os.utime(tmp_path / "failure.txt", (2000, 2000))
    failed = ("failed after step 3 of 9", "bad")
    assert summary.outcome(read_folder(tmp_path)) == (failed if ends is None else (text, state))


def test_tiles(tmp_path: Path) -> None:
    """The rate is a median: the first step compiles. With several runs, what is equal in all is left out."""
    steps = [
        line("step", step, **{"throughput/tokens_per_s": rate, "throughput/mfu": rate and rate / 1e6,
             "train/loss": 1.0 / step, "train/tokens": 1_500 * step, "memory/peak_bytes": 10**9 * step,
             "time/step_s": 30.0})
        for step, rate in enumerate((9_000, 1_000, None, 300_000, 2_000, 20_000), 1)
    ]  # fmt: skip
    (tmp_path / "layout.json").write_text(json.dumps({"parameters": 2_000_000, "trained": 500_000}))
    held_out = line("eval", 3, **{"eval/a/loss": 0.75, "eval/b/loss": 0.25})
    run = run_of(tmp_path, line("start", 0), line("start", 0), *steps, held_out)
    expected = {
        "loss of the last step": "0.1667", "lowest held-out loss, step 3": "0.5000",
        "tokens trained on": "9 k", "tokens a second, median": "9 k",
        "MFU, median": "0.9%", "peak memory of a rank": "6.0 GB", "parameters, 500 k trained": "2 M",
        "took, in 2 starts": "0:03:00",
    }  # fmt: skip
    assert dict(summary.tiles(run)) == expected
    several = expected.keys() - {"tokens trained on", "parameters, 500 k trained"}
    assert dict(summary.tiles(run, only_differing=True)).keys() == several


def test_outputs_are_of_a_run_that_ended_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a run whose last start writes no checkpoints cannot be sampled from."""
    folders = ("export", "checkpoints/.step-000003", "checkpoints/step-000001", "checkpoints/step-000002")
    for name in (*folders, "best/step-000001"):
        (tmp_path / name).mkdir(parents=True)
    newest = lambda folder: max(folder.iterdir(), default=None)  # noqa: E731 - short
    monkeypatch.setattr("meshwright.report.end_of_run.newest_whole", newest)
    step = line("step", 2, **{"train/loss": 1.0})

    def words_of(why: str, *writes: bool | None) -> str:
        said = [{} if each is None else {"writes": each} for each in writes]
        starts = (line("start", n, num_steps=9, **each, **{"from": n}) for n, each in enumerate(said))
        run_of(tmp_path, *starts, step, line("end", 2, why=why))
        return "\n".join(last_words(tmp_path, "x"))

    text = words_of("", False, True)
    assert re.search(r"checkpoints/step-000002 +the newest checkpoint of 2\n", text)
    assert re.search(r"best/step-000001 +the one with the lowest held-out loss\n", text)
    assert text.endswith('meshwright sample x --prompt "..."')
    assert "  export " in text
    assert "  export " in words_of("early stopping", True)
    assert "  export " not in words_of("signal 15", True)
    assert words_of("", True, False).endswith("report x")
    assert "sample x" in words_of("")
    assert "sample x" in words_of("", False, None), "an old version does not say whether it writes"
    for left, sampled in ((["checkpoints"], True), (["best"], False), ([], False)):
        whole = lambda folder, left=left: folder / "step-000001" if folder.name in left else None  # noqa: E731 - short
        monkeypatch.setattr("meshwright.report.end_of_run.newest_whole", whole)
        assert ("sample x" in words_of("", True)) is sampled


def test_samples_of_many_steps(tmp_path: Path) -> None:
    """The newest are open; the first and the twelve before the newest can be unfolded, the latest of them on top."""
    lines = [line("sample", step, text=f"text {step}") for step in range(1, 21)]
    page = report_page([run_of(tmp_path, line("step", 20), *lines)], {"command": "x", "date": "today"})
    shown = [int(step) for step in re.findall(r"What the model writes after step (\d+)", page)]
    assert shown == [20, *range(19, 7, -1), 1]
    assert "Samples of earlier steps" in page.partition("after step 20")[2].partition("after step 19")[0]


def test_curves_of_held_out_sets_are_in_the_order_of_their_names() -> None:
    """Names of other figures, and of sets that come later, do not disturb it."""
    names = "zebracdfghij"
    lines = [{"step": 1, **{f"eval/{name}/loss": 1.0 for name in names[:6]}, "eval/a/accuracy": 0.5},
             {"step": 2, **{f"eval/{name}/loss": 2.0 for name in names[6:]}, "eval/a/mtp_loss": 3.0}]  # fmt: skip
    curves = list(series._held_out_curves("loss", 3, Run("r", {"eval": lines}), 100))
    assert [curve["label"] for curve in curves] == [f"r: {name}" for name in sorted(names)]
    assert all((curve["run"], curve["points"]) == (3, True) for curve in curves)


def test_a_source_that_comes_later_has_a_curve(tmp_path: Path) -> None:
    """A rare source has no token in the first steps."""
    usual = {"train/loss": 1.0, "train/loss/all": 1.5}
    lines = [line("step", step, **usual, **({"train/loss/rare": 2.0} if step == 99 else {})) for step in range(1, 100)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    charts = {chart["metric"]: chart["curves"] for chart in chart_data([read_run(tmp_path)])["charts"]}
    assert [curve["label"] for curve in charts["source"]] == ["all", "rare"]


def test_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whole, below 2 MB, and nothing in it ends a script or asks the network for anything."""
    runs = [fake_run(tmp_path / name, seed=seed) for seed, name in enumerate(("first", "second", "third"))]
    assert main(["report", *map(str, runs), "--html", str(tmp_path / "all.html")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "all.html")
    text = (tmp_path / "all.html").read_text()
    assert 600_000 < len(text.encode()) < 2_000_000
    assert text.count("</script>") == 3
    assert "&lt;/script&gt;&lt;b&gt;1 &lt; 2 &amp; 3?" in text
    without = without_scripts(text)
    assert not re.search(r"(?:src|href)=|url\(|@import", without)
    read = Read(without)
    differs = {row["field"]: row["second"] for row in read.table("field")}
    assert {*differs} == {"seed", "optim.lr", "optim.schedule"}
    assert differs["optim.schedule"] == "linear"
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])  # type: ignore[index] # it is there
    loss = data["charts"][0]["curves"]
    assert [curve["label"] for curve in loss][:3] == ["first", "first: code", "first: held-out"]
    assert len(loss[0]["y"]) == 1000
    assert text.count('<i class="run run1"></i><small>second</small>') == len(data["charts"])  # at every chart
    assert [chart["metric"] for chart in data["charts"] if chart["from_zero"]] == ["memory/peak_bytes"]
    assert [experts["steps"][-1] for experts in data["experts"]] == [1000] * 3
    key = '<i class="run run1"></i><small>code</small>'  # of the sources: colours of several runs are the runs' own
    assert key in report_page([read_run(runs[0])], {"command": "x", "date": "today"})
    assert key not in text


def test_the_bundle_is_what_was_built() -> None:
    """charts.NOTICE says how to build it; a new build changes this."""
    assert hashlib.sha256((PACKAGE / "charts.min.js").read_bytes()).hexdigest() == BUNDLE
    notice = (PACKAGE / "charts.NOTICE").read_text()
    assert "npm install echarts@6.1.0" in notice
    assert "Apache License" in (PACKAGE / "charts.LICENSE").read_text()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.skip("no Chromium is on the PATH")
    with sync.sync_playwright() as playwright:
        result = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield result
        result.close()


@pytest.mark.parametrize(
    ("width", "scheme", "runs"), [(390, "dark", 3), (1280, "light", 3), (390, "light", 1), (1280, "dark", 1)]
)
def test_in_a_browser(tmp_path: Path, browser: Any, width: int, scheme: str, runs: int) -> None:
    """No request but for the page, no error, no line too wide; a tooltip holds every run; a slider changes experts."""
    folders = [fake_run(tmp_path / f"run-{n}", seed=n, steps=60 if n else 1) for n in reversed(range(runs))]
    main(["report", *map(str, folders), "--html", str(tmp_path / "page.html")])
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True, is_mobile=width < 500,
        has_touch=width < 500,
    )  # fmt: skip
    page, note, requested = context.new_page(), list[str](), list[str]()
    page.on("console", lambda message: note.append(message.text))
    page.on("pageerror", lambda error: note.append(str(error)))
    page.on("request", lambda request: requested.append(request.url))
    page.goto((tmp_path / "page.html").as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") == width
    plot = page.locator('[data-metric="train/loss"]')
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    at = (box["x"] + box["width"] * (0.5 if runs > 1 else 0.53), box["y"] + box["height"] * 0.4)
    (page.touchscreen.tap if width < 500 else page.mouse.move)(*at)
    if runs > 1:
        page.wait_for_selector(".tip", timeout=3000)
        output = page.locator(".tip").first.inner_text()
        assert all(f"run-{n}" in output for n in (1, 2)), output
    page.select_option("#axis", "tokens")
    page.locator("#smooth").fill("90")
    slider = page.locator(".heat").first.locator("xpath=..").locator("input")
    slider.fill("0")
    assert page.locator("output").first.inner_text() == "1"
    page.emulate_media(color_scheme="dark" if scheme == "light" else "light")
    page.wait_for_timeout(100)
    assert (note, len(requested)) == ([], 1)
    context.close()
