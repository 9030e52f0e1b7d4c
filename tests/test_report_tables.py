"""The tables and headline figures of a report: each value comes from its own field, and old lines do not outlive it."""

from __future__ import annotations

import json
import os
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from meshwright.expert_collapse import ExpertUse
from meshwright.report import run_page, series, summary
from meshwright.report.end_of_run import last_words
from meshwright.report.run_files import Run, _has_valid_type, read_folder
from meshwright.report.starts import Failure, Start, endings, failures, start_of, story, surviving_starts
from tests.test_report import line, run_of


def start(begins: int, last: int, time: float = 0.0, ended: str | None = None, world: int = 2, **mesh: int) -> Start:
    return Start(time, begins, last, mesh, world, ended)


@pytest.mark.parametrize(
    ("name", "value", "valid"),
    [
        *((name, "7", False) for name in ("step", "time", "seconds", "num_steps", "from", "world", "number")),
        *((name, None, False) for name in ("step", "time", "seconds", "num_steps", "from", "world", "number")),
        ("world", 7, True), ("from", 3, True), ("why", "signal 15", True), ("mesh", {"fsdp": 2}, True),
        ("time", 9.9e9, True), ("time", 1.1e10, False), ("seconds", 9e6, True), ("seconds", 2e7, False),
        ("time/step_s", 9e6, True), ("time/step_s", 2e7, False), ("time/step_s", -2e7, False),
        ("time/step_s", None, True), ("time/step_s", "1", False), ("train/loss", None, True),
        ("train/loss", [1], False),
        ("experts/max_over_mean", [1, 2.5, None], True), ("experts/max_over_mean", [1, "2"], False),
        ("experts/max_over_mean", [], False), ("experts/max_over_mean", 2.5, False), ("experts/dead", [1], False),
        ("mesh", {}, True), ("mesh", [2], False), ("mesh", {"fsdp": "2"}, False), ("mesh", {"fsdp": 0}, False),
        ("experts", {"num": 8, "top_k": 2}, True), ("experts", {"num": 8}, False), ("experts", 8, False),
        ("experts", {"num": 8, "top_k": 0}, False), ("load", [[1], []], False), ("load", [], True),
        ("load", [[1, 2.5], [3]], True), ("load", [[1, None]], False), ("load", [1], False), ("load", None, False),
    ],
)  # fmt: skip
def test_types_and_ranges_of_fields(name: str, value: Any, valid: bool) -> None:
    assert _has_valid_type(name, value) is valid


def test_numbers_of_64_bits_are_read_and_larger_ones_are_not(tmp_path: Path) -> None:
    values = {"a/a": 2**62, "a/b": 2**63, "a/c": 2.5e38, "a/d": 4e38, "a/e": -(2**63), "a/f": -4e38}
    (step,) = run_of(tmp_path, line("step", 1, **values)).of("step")
    assert [step[name] for name in values] == [2**62, None, 2.5e38, None, None, None]


def test_texts_that_were_torn_inside_a_character_are_read(tmp_path: Path) -> None:
    (tmp_path / "failure.txt").write_bytes(b"rank 1 \xff died")
    (tmp_path / "metrics.jsonl").write_bytes(line("step", 1).encode() + b'{"kind": "sample", "text": "\xc3')
    run = read_folder(tmp_path)
    assert [each["step"] for each in run.of("step")] == [1]
    assert run.failure == "rank 1 \ufffd died"


def test_a_resumed_run_forgets_what_it_repeats(tmp_path: Path) -> None:
    """Lines of the step of the checkpoint stay, as do all starts; an earlier end goes, even one before that step."""
    kinds = ("step", "eval", "sample", "save", "experts")
    lines = [line(kind, step) for kind in kinds for step in (3, 4)]
    run = run_of(tmp_path, line("start", 0), line("start", 4), *lines, line("end", 3, why="x"), line("start", 3))
    assert {kind: [each["step"] for each in run.of(kind)] for kind in (*kinds, "end", "start")} == {
        **{kind: [3] for kind in kinds}, "end": [], "start": [0, 3, 4],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("failed_at", "ended", "failure", "overcome"),
    [
        (150, False, "", ["old", "new"]),  # between the two starts
        (200, False, "new", ["old"]),  # a failure at the very second of the start is of that start
        (250, False, "new", ["old"]),
        (250, True, "", ["old", "new"]),
    ],
)
def test_a_failure_is_of_the_last_start_or_was_overcome(
    tmp_path: Path, failed_at: int, ended: bool, failure: str, overcome: list[str]
) -> None:
    (tmp_path / "failure.txt").write_text("new")
    (tmp_path / "overcome.txt").write_text("1970-01-01 00:00:50 +0000\nold\n")
    os.utime(tmp_path / "failure.txt", (failed_at, failed_at))
    starts = [line("start", 0, time=100.0), line("start", 2, time=200.0)]
    run = run_of(tmp_path, *starts, *([line("end", 2, why="")] if ended else []))
    assert (run.failure, [each.words for each in run.overcome]) == (failure, overcome)


def test_files_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("environment.json", "layout.json", "images.json", "verify.json", "config.toml", "overcome.txt")
    for name in names:
        (tmp_path / name).write_text("[1]" if name == "layout.json" else f'{{"is": "{name}"}}')
    monkeypatch.chdir(tmp_path)
    run = run_of(Path(), line("step", 1))
    assert run.name == tmp_path.name
    assert {*run.texts} == {*names}
    assert [run.json(name) for name in ("verify.json", "layout.json", "none.json", "config.toml")] == [
        {"is": "verify.json"}, {}, {}, {"is": "config.toml"},
    ]  # fmt: skip


def test_the_line_of_a_start() -> None:
    assert start_of({"step": 7, "from": 0, "time": 5, "world": 6, "mesh": {"tp": 3}}) == start(0, 0, 5.0, None, 6, tp=3)
    assert start_of({"step": 7}) == start(7, 7, 0.0, None, 1)
    taken = start(3, 3).after({"kind": "step", "step": 9}).after({"kind": "eval", "step": 12})
    assert (taken.last, taken.ended) == (9, None)
    assert taken.after({"kind": "end", "step": 9}).ended == ""
    assert [start(0, 1, tp=2, ep=1).on, start(0, 1, tp=1).on, start(0, 1, world=1).on] == ["tp=2", "2 ranks", "1 rank"]


def test_starts_that_made_the_curves() -> None:
    """The third start resumed an older checkpoint; the fourth made no step, and yet what it would repeat is gone."""
    first, second, third, idle = start(0, 45, fsdp=2), start(40, 60, tp=2), start(20, 50, pp=2), start(30, 30, cp=2)
    assert surviving_starts([first, second, third]) == [first, third]
    assert surviving_starts([first, second, idle]) == [first]
    assert surviving_starts([first, start(0, 9)]) == [start(0, 9)]
    assert story([first, second, third], 50) == "fsdp=2 (20 steps) → pp=2 (30 steps)"
    assert story([first, start(40, 41, fsdp=2)], 41) == story([], 9) == ""


def test_how_each_start_ended() -> None:
    """A failure counts for the start in whose time it falls: from its first second to before the next start."""
    starts = [start(0, 1, 10.0), start(1, 2, 20.0), start(2, 3, 30.0), start(3, 4, 40.0, ""), start(4, 5, 50.0)]
    overcome = [Failure(5.0, "early"), Failure(20.0, "\n second\nmore"), Failure(40.0, "late")]
    common = ["stopped; no reason is written", "second", "stopped; no reason is written", "done"]
    assert [*endings(starts, overcome, "the disk\nis full")] == [*common, "failed: the disk"]
    assert [*endings(starts, overcome, "")] == [*common, "no end is written yet"]
    assert [*endings([start(0, 1, 1.0, "signal 2")], [], "x")] == ["ended by signal 2"]


def test_failures_are_blocks_of_a_time_and_a_text() -> None:
    text = "torn\n1970-01-01 00:01:00 +0000\na\nb\n\n1970-01-01 02:02:00 +0200\nc\n"
    assert failures(text) == [Failure(60.0, "a\nb"), Failure(120.0, "c")]


def test_the_table_of_parameters() -> None:
    rows = [
        {"name": "q", "count": 3, "shape": [4, 6], "dtype": "bfloat16", "trained": True,
         "cut": "tp", "bytes_per_rank": 1500},
        {"name": "norm", "dtype": "float32"},
    ]  # fmt: skip
    run = Run("r", {}, {"layout.json": json.dumps({"table": rows})})
    assert summary.parameter_table(run) == [
        ["q", "3", "4 x 6", "bfloat16", "yes", "tp", "1.5 kB"], ["norm", "1", "", "float32", "frozen", "", "0 bytes"]
    ]  # fmt: skip


def test_the_table_of_starts() -> None:
    starts = [start(0, 1200, 10.0, "signal 15", 1600, fsdp=8, tp=200), start(1000, 1001, 20.0, None, 3)]
    _, rows = summary.starts(Run("r", {}, starts=starts))
    assert [row[1:3] + row[4:5] for row in rows] == [["0", "1,200", "1,600"], ["1,000", "1,001", "3"]]
    assert [row[3].text for row in rows] == ["fsdp=8 tp=200", "3 ranks"]
    assert [row[5].kind for row in rows] == ["overcome", ""]
    assert [row[5].text for row in rows] == ["ended by signal 15", "no end is written yet"]


def test_a_time_has_hours_and_minutes() -> None:
    assert summary.when(datetime(2026, 3, 4, 5, 6).timestamp()) == "2026-03-04 05:06"


def test_held_out_losses_and_environment() -> None:
    lines = [
        {"step": 5, "eval/b/loss": 0.5, "train/loss": 1.0},
        {"step": 1000, "eval/a/loss": None, "eval/b/loss": 2.0},
    ]
    run = Run("r", {"eval": lines}, {"environment.json": '{"gpu": "H200", "compiled": true, "debug": false, "n": 1}'})
    assert summary.held_out(run) == (
        ["step", "a, loss", "b, loss"], [["5", "-", "0.5000"], ["1,000", "-", "2.0000"]]
    )  # fmt: skip
    assert summary.environment(run) == [["gpu", "H200"], ["compiled", "true"], ["debug", "false"], ["n", "1"]]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"ok": true, "mesh": "tp=2", "model": "m"}', ("meshwright verify passed on tp=2", True)),
        ('{"ok": false}', ("meshwright verify FAILED on its mesh", False)),
        ('{"ok": "false"}', ("meshwright verify FAILED on its mesh", False)),
        ('{"mesh": "tp=2"}', ("meshwright verify FAILED on tp=2", False)),
        ("{}", None),
    ],
)
def test_only_a_proof_that_says_so_passed(text: str, expected: tuple[str, bool] | None) -> None:
    assert summary.proof(Run("r", {}, {"verify.json": text})) == expected


@pytest.mark.parametrize(
    ("layout", "text"),
    [({"world": 6, "mesh": {"fsdp": 3, "tp": 2, "ep": 1}}, "6 ranks, fsdp=3 tp=2"), ({"mesh": {"tp": 1}}, "1 rank")],
)
def test_the_mesh_of_a_run(layout: dict[str, Any], text: str) -> None:
    assert summary.mesh(Run("r", {}, {"layout.json": json.dumps(layout)})) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.0, "0"), (-2.5, "-2.5000"), (0.0005, "0.0005"), (0.00012346, "0.0001235"), (12_345.6, "1.235e+04"),
     (9_999.0, "9999.0000"), (3, "3")],
)  # fmt: skip
def test_figures_have_four_digits(value: float | None, text: str) -> None:
    assert summary.figure(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (999, "999"), (1000, "1 k"), (-1500, "-1.5 k"), (2_340_000, "2.34 M"), (10**9, "1 B"), (3e12, "3 T")],
)
def test_large_numbers_have_a_unit(value: float | None, text: str) -> None:
    assert summary.with_unit(value) == text


def test_a_median_counts_zeros_and_only_measured_steps() -> None:
    values = (5.0, 0.0, None, 9.0, 0.0, 1.0)
    run = Run("r", {"step": [{"step": n, "x": value, "time/step_s": value} for n, value in enumerate(values)]})
    assert (summary._median(run, "x"), summary._median(run, "y")) == (1.0, None)
    assert summary._duration(run) == "0:00:15"
    even = Run("r", {"step": [{"x": value} for value in (4.0, 1.0, 2.0, 3.0)]})
    assert summary._median(even, "x") == 3.0


def test_a_model_that_is_trained_whole_has_no_trained_part() -> None:
    for layout, label in (({"parameters": 5, "trained": 5}, "parameters"), ({"parameters": 5}, "parameters")):
        run = Run("r", {"step": [{"step": 1}]}, {"layout.json": json.dumps(layout)})
        assert dict(summary.tiles(run))[label] == "5"


def test_config_fields_that_differ() -> None:
    """A broken config has no fields; output and logging do not count, but names with the same beginning do."""
    configs = [
        "steps = [1, 2]\nout = 'a'\noutput = 1\nlogs = 1\n[log]\nevery = 1\n[[data]]\nx = 1\n[[data]]\nx = false",
        "steps = [1, 3]\nout = 'b'\nlogs = 2\nseed = 7\n[[data]]\nx = 1\n[[data]]\nx = true",
        "==",
    ]
    rows = summary.differing_fields([Run("r", {}, {"config.toml": text}) for text in configs])
    assert rows == [
        ["steps", "[1, 2]", "[1, 3]", ""], ["output", "1", "", ""], ["logs", "1", "2", ""],
        ["data[0].x", "1", "1", ""], ["data[1].x", "false", "true", ""],
        ["seed", "", "7", ""],
    ]  # fmt: skip


def test_images_of_a_run_are_a_few_and_only_base64() -> None:
    good = [{"file": f"{n}.png", "place": f"row {n}", "jpeg": "QUJD" if n else "QQ=="} for n in range(9)]
    bad: list[Any] = [{"file": "x", "jpeg": text} for text in ('QQ=="><b>', "", "A" * 40_001)]
    images_of = lambda listed: summary.images(Run("r", {}, {"images.json": json.dumps({"images": listed})}))  # noqa: E731
    assert images_of(good) == [(f"{n}.png", f"row {n}", "QUJD" if n else "QQ==") for n in range(8)]
    assert images_of(["text", {"file": 1}, *bad, good[0], {"jpeg": "QQ"}]) == [
        ("0.png", "row 0", "QQ=="),
        ("", "", "QQ"),
    ]
    assert images_of({"0": good[0]}) == images_of(None) == []


@pytest.mark.parametrize(
    ("worst", "dead", "collapsed"),
    [([1.0, 2.0], 3, False), ([1.0, 2.0], 4, True), ([3.6, 1.0], 0, True), ([1.0, 3.5], 0, False)],
)
def test_a_step_in_which_experts_collapsed(worst: list[float], dead: int, collapsed: bool) -> None:
    """8 experts, 2 of a token, 2 layers: a quarter of all 16 is dead, or the busiest has 0.9 of 4 times its share."""
    use = ExpertUse()
    use.take({"kind": "start", "step": 0, "experts": {"num": 8, "top_k": 2}})
    use.take({"kind": "step", "step": 1, "experts/max_over_mean": worst, "experts/dead": dead})
    assert (use.num_steps, use.num_collapsed) == (1, int(collapsed))


def test_a_warning_needs_enough_steps_of_which_most_collapsed() -> None:
    bad = {"kind": "step", "step": 1234, "experts/max_over_mean": [1.0, 3.9, 2.0], "experts/dead": 2}
    good = {**bad, "step": 1, "experts/max_over_mean": [1.0, 1.5, 1.0]}
    empty = [{**bad, "experts/dead": None}, {**bad, "experts/max_over_mean": [None, 3.9]}, {**bad, "kind": "eval"}]
    begin = {"kind": "start", "step": 0, "experts": {"num": 8, "top_k": 2}}

    def warned(*lines: dict[str, Any], first: dict[str, Any] = begin) -> str:
        use = ExpertUse()
        for each in (first, *lines):
            use.take(each)
        return use.warning()

    assert warned(*[bad] * 19, *empty) == ""
    assert warned(*[good] * 10, *[bad] * 10) == ""
    assert warned(*[bad] * 20, first={"kind": "start", "step": 0}) == ""
    text = warned(*[good] * 10, *[bad] * 11, begin)
    assert "collapsed in 11 of 21 steps: in step 1,234, 2 of 24 got no token" in text
    assert "in layer 1, got 3.90 times its share, of 4.00 that" in text
    run = Run("r", {"start": [begin], "step": [bad] * 20})
    assert summary.experts_warning(run) == warned(*[bad] * 20)


def test_values_of_a_line() -> None:
    read = {"memory/peak_bytes": 2.5e9, "a": [1.0, None, 3.0, 2.0], "b": [None], "c": -1}
    assert [series._value(read, name) for name in (*read, "none")] == [2.5, 3.0, None, -1, None]
    assert series._value({}, "memory/peak_bytes") is None
    assert [series.significant(value) for value in (None, 123_456.0, -0.000123456)] == [None, 123_460.0, -0.00012346]
    assert series._percent_of_mean([1, 2, 0, 2]) == [80, 160, 0, 160]


def test_a_mark_is_at_the_last_step_before_the_start() -> None:
    steps = [{"step": n, "train/tokens": 10 * n, "time": 100.0 + n} for n in (2, 4, 7)]
    run = Run("r", {"step": steps})
    assert series._begin(run) == 102.0
    position = [
        series._mark_position(run, start(begins, 9, time)) for begins, time in ((0, 90.0), (4, 105.26), (6, 107))
    ]
    assert position == [
        {"step": 2, "tokens": 20, "time": 0.0}, {"step": 4, "tokens": 40, "time": 3.3},
        {"step": 4, "tokens": 40, "time": 5.0},
    ]  # fmt: skip


def test_marks_name_a_mesh_only_where_it_changes() -> None:
    steps = [{"step": n, "time": float(n)} for n in range(1, 10)]
    starts = [start(0, 3, fsdp=2), start(2, 5, fsdp=2), start(4, 7, tp=2), start(6, 9, fsdp=2)]
    marks_of = lambda some: [(m["mesh"], m["again"]) for m in series._marks(Run("r", {"step": steps}, starts=some))]  # noqa: E731
    assert marks_of(starts) == [("fsdp=2", False), ("", True), ("tp=2", True), ("fsdp=2", True)]
    assert marks_of(starts[:2]) == [("", False), ("", True)]


def test_curves_that_share_axes() -> None:
    """A step of a curve is an index into the steps of its own run; a step with only an evaluation has one too."""
    curves = {"a": [{"run": 0, "step": [9]}, {"run": 1, "step": [2, 6]}], "b": [{"run": 1, "step": [2, 4, 6]}]}
    steps = [{"step": n, "train/tokens": 3 * n, "time": 10.0 + 1.26 * n} for n in (2, 4)]
    run = Run("r", {"step": steps, "eval": [{"step": 4, "time": 99.0}, {"step": 6}]})
    assert series._shared_axes(1, run, curves) == {
        "step": [2, 4, 6], "tokens": [6, 12, None], "time": [0.0, 2.5, 0.0]
    }  # fmt: skip
    assert curves == {"a": [{"run": 0, "step": [9]}, {"run": 1, "at": [0, 2]}], "b": [{"run": 1, "at": None}]}


def test_labels_and_names_of_curves() -> None:
    step = {"step": 1, "train/rewards_chosen": 1.0, "train/rewards_rejected": -1.0, "train/loss": 2.0}
    runs = [Run("one", {"step": [step], "eval": [{"step": 1, "eval/x/kl": 0.5}]}), Run("two", {"step": [step]})]
    labels = lambda metric, some: [(c["run"], c["label"], c["y"]) for c in series._chart(metric, some, 100)]  # noqa: E731
    rewards = [("rewards_chosen", [1.0]), ("rewards_rejected", [-1.0])]
    assert labels("rewards", runs[:1]) == [(0, *each) for each in rewards]
    assert labels("rewards", runs) == [
        (n, f"{run.name}: {label}", y) for n, run in enumerate(runs) for label, y in rewards
    ]  # fmt: skip
    assert labels("train/loss", runs) == [(0, "one", [2.0]), (1, "two", [2.0])]
    assert labels("train/kl", runs) == [(0, "one: x", [0.5])]


def test_loads_of_experts_are_evenly_spaced_steps() -> None:
    lines = [{"step": n, "load": [[n, 1], [1, 1]]} for n in range(1, 8)] + [{"step": 8, "load": [[]]}, {"step": 9}]
    run = Run("r", {"experts": lines})
    steps_of = lambda room: series._expert_loads(run, room)["steps"]  # type: ignore[index] # noqa: E731 - it has loads
    assert (steps_of(1000), steps_of(12), steps_of(1)) == ([*range(1, 8)], [1, 4, 7], [1, 7])
    assert series._expert_loads(Run("r", {"experts": lines[-2:]}), 9) is None


def test_runs_share_the_room_of_heat_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(series, "_MATRIX_NUMBERS", 24)
    lines = {"step": [{"step": 1}], "experts": [{"step": n, "load": [[1, 1], [1, 1]]} for n in range(1, 10)]}
    for num, shown in ((1, 6), (2, 3), (5, 2)):
        experts = series.chart_data([Run("r", lines)] * num)["experts"]
        assert [len(each["steps"]) for each in experts] == [shown] * num


def test_charts_share_the_points_of_the_page() -> None:
    """Two runs have 2000 points each, as one has; twenty have 200, as a hundred would."""
    steps = [{"step": n, "time": 0.0, "train/loss": float(n)} for n in range(2001)]
    for num, most in ((1, 2000), (2, 2000), (4, 1000), (30, 200)):
        runs = series.chart_data([Run("r", {"step": steps})] * num)["runs"]
        assert most / 3 < len(runs[0]["step"]) <= most


def test_the_page_shows_each_part(tmp_path: Path) -> None:
    """The file of the run, its environment, proof, checkpoints and parameters; and nothing that is absent."""
    origin = {"command": "x", "date": "today"}
    bare = run_page.report_page([run_of(tmp_path / "bare", line("step", 1))], origin)
    titles = ("Starts", "Held-out data", "Checkpoints", "The mesh: ", "The file of the run", "Where it ran", "verify")
    assert [title for title in titles if f"{title}</summary>" in bare or f"{title}<" in bare] == []
    texts = {
        "config.toml": "seed = 77", "environment.json": '{"host": "worker-9"}', "verify.json": '{"ok": false}',
        "layout.json": json.dumps({"world": 3, "model": "tiny-x", "table": [{"name": "q", "cut": "by rows"}]}),
        "images.json": json.dumps({"images": [{"file": "a/cat.png", "place": "b/row", "jpeg": "QUJD"}]}),
    }  # fmt: skip
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    lines = [line("eval", 1, **{"eval/a/loss": 0.75}), line("save", 1, path="there", seconds=2.0)]
    page = run_page.report_page([run_of(tmp_path, line("step", 1), *lines)], origin)
    for text in (
        "seed = 77",
        "worker-9",
        "FAILED",
        "tiny-x",
        "3 ranks",
        "by rows",
        "0.7500",
        "there",
        "cat.png",
        "row",
    ):
        assert text in page, text
    assert '<p class="fails">meshwright verify' in page
    assert "base64,QUJD" in page


def test_each_run_of_a_page_has_its_own_verdict_starts_and_experts(tmp_path: Path) -> None:
    """The first run failed; the second one has experts, and was started twice."""
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "failure.txt").write_text("the disk is full")
    lines = [line("start", 0), line("step", 1), line("start", 1), line("step", 2), line("experts", 2, load=[[1, 3]])]
    bad, good = run_of(tmp_path / "bad", line("step", 1)), run_of(tmp_path / "good", *lines, line("end", 2, why=""))
    page_of = lambda *runs: run_page.report_page(runs, {"command": "x", "date": "today"})  # noqa: E731 - short
    alone, both = page_of(bad), page_of(bad, good)
    for page, verdicts in ((alone, ["fails"]), (both, ["fails", "pass"])):
        assert re.findall(r'class="verdict (\w*)"', page) == verdicts
        assert re.findall(r'class="finding"><pre>(.*?)</pre>', page) == ["the disk is full"]
    assert re.findall(r'data-run="(\d)"', both) == ["1"]
    assert ["tokens trained on" in page for page in (alone, both)] == [True, False]
    assert ["What differs" in page for page in (alone, both)] == [False, True]
    assert [page.count("Starts</summary>") for page in (alone, both)] == [0, 1]
    assert ["how it ended" in page for page in (alone, page_of(good))] == [False, True]


def test_samples_stand_below_their_own_step(tmp_path: Path) -> None:
    lines = [line("sample", step, number=n, text=f"text {step}.{n}") for step in (1, 2) for n in (0, 1)]
    run = run_of(tmp_path, line("step", 2), *lines)
    for step in (1, 2):
        assert re.findall(r"text \d\.\d", run_page._samples_of(run, step)) == [f"text {step}.0", f"text {step}.1"]


def test_a_figure_names_the_runs_or_the_sources_of_one() -> None:
    curves = [{"label": "code"}, {"label": "text"}]
    named = lambda metric, *runs: run_page._figure({"metric": metric, "curves": curves}, runs)  # noqa: E731 - short
    assert "<small>code" not in named("train/loss", "r")
    assert "<small>text" in named("source", "r")
    assert "<small>r<" not in named("source", "r")
    many = named("source", *"abcdefghi")
    assert 'run run0"></i><small>i<' in many
    assert "<small>code" not in many
    assert ["wide" in named(metric, "r") for metric in ("train/loss", "source")] == [True, False]


def test_last_words_warn_of_unused_experts(tmp_path: Path) -> None:
    used = {"experts/max_over_mean": [8.0], "experts/dead": 7}
    steps = (line("step", n, **used, **{"train/loss": n / 16}) for n in range(1, 21))
    lines = [line("start", 0, experts={"num": 8, "top_k": 1}), *steps]
    run_of(tmp_path, *lines)
    words = last_words(tmp_path, "out")
    assert words[0] == "at step 20; loss 1.2500"
    assert words[1].startswith("warning: experts collapsed in 20 of 20 steps")
    (tmp_path / "adapter").mkdir()
    run_of(tmp_path, *lines, line("end", 20, why=""))
    assert any(each.startswith("  adapter  ") for each in last_words(tmp_path, "out"))
    assert read_folder(tmp_path).of("end")[-1]["why"] == ""
