"""The live view of a run, plain lines and the last words; no process stays behind."""

from __future__ import annotations

import io
import math
import os
import platform
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console, RenderableType

import meshwright as mw
from meshwright.log import logger
from meshwright.train import config_file, display, launch, lock, loop, processes
from meshwright.train.display import Display, RunState, Screen, Tail, parsed_lines, sparkline
from meshwright.train.failure import Failure
from meshwright.train.metrics import JsonLines
from meshwright.train.processes import Ended
from tests.screenshot import BEGAN, run_state, step_line
from tests.started import Started, forked_ranks, gone, listening
from tests.test_train import chats, file_of, source

SHOWN = [
    "step 412 of 1,000", "0:26:27 left", "1.7000 at step 400", "9.13e-06", "98,765", "MFU 41.2%", "61.2 GB on rank 3",
    "1.48 of the mean", "0.2%", "step 400, 0:02:00 ago",
]  # fmt: skip


def drawn(frame: RenderableType, width: int, encoding: str = "utf-8") -> list[str]:
    out = io.TextIOWrapper(io.BytesIO(), encoding)
    Console(file=out, width=width, color_system=None).print(frame)
    out.seek(0)
    return out.read().splitlines()


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_a_frame_holds_all_at_any_width(width: int) -> None:
    lines = drawn(Screen(run_state(), "", now=BEGAN + 1200), width)
    assert {cell_len(line) for line in lines} == {width}
    assert len(lines) <= (13 if width == 40 else 8)
    text = "\n".join(lines)
    for value in SHOWN:
        assert value in text, text
    assert "▁" in text
    assert "…" not in text


def test_a_frame_of_little() -> None:
    """Frames before the first step; of a dense model on an unknown device; with a loss that is no number."""
    new = RunState("a run", "2 ranks: fsdp=2", 10)
    text = "\n".join(drawn(Screen(new, "no step yet, 0:00:09: load m on rank 0: 5 of 9"), 80))
    assert "step 0 of 10" in text
    assert "load m on rank 0" in text
    lacking = {**step_line(3), "train/loss": None, "train/grad_norm": None, "nan": ["train/loss"]}
    for name in ("throughput/mfu", "memory/peak_bytes", "memory/rank", "experts/max_over_mean", "experts/dead"):
        del lacking[name]
    new.take(lacking)
    text = "\n".join(drawn(Screen(new, "signal 2"), 80, "ascii"))
    assert "nan" in text
    assert "signal 2" in text
    assert text.isascii()
    assert sparkline([1.0, float("nan"), 3.0, 2.0], 9) == "▁ █▅"
    assert sparkline([*range(100)], 8) == "▁▂▃▄▅▆▇█"


def test_a_frame_cuts_neither_warnings_nor_samples(tmp_path: Path) -> None:
    """The experts that nothing reaches, what the model wrote, and a status that is longer than a line."""
    result = run_state(0)
    result.take({"kind": "start", "step": 0, "num_steps": 1000, "experts": {"num": 16, "top_k": 2}})
    for step in range(1, 26):
        unused = {"experts/max_over_mean": [1.2, 7.9, 1.0], "experts/dead": 24} if step > 4 else {}
        result.take(step_line(step, **unused))
        assert bool(result.experts.warning()) == (step >= 20)
    for step, text in ((10, "old"), (20, "because of\nRayleigh scattering " + "very " * 40)):
        result.take({"kind": "sample", "step": step, "time": 0, "number": 0, "prompt": "Why is it blue?", "text": text})
    display = Display(result, tmp_path, plain=True, every=1, signals=[2])
    lines = drawn(display._frame(ends=False), 80)
    assert [line[:1] for line in lines[-2:]] == ["╰", ""], "^C is written behind the last line"
    assert drawn(display._frame(ends=True), 80)[-1].startswith("╰")
    text = " ".join(" ".join(lines).replace("│", "").split())
    assert "step 20 Why is it blue? because of Rayleigh scattering very" in text
    assert "old" not in text
    assert "in step 25, 24 of 48 got no token, and the busiest one, in layer 1, got 7.90 times its share" in text
    assert "a second signal ends them at once" in text
    assert "24 experts" in text


def test_steps_that_are_made_again() -> None:
    """Their earlier lines vanish; the time left is computed anew."""
    result = run_state(20)
    result.take({"kind": "eval", "step": 18, "time": 0, "eval/a/loss": 1.0})
    result.starts(again=True)
    assert not result.begun
    result.take(step_line(16, **{"train/loss": 7.0, "time": BEGAN + 999, "time/step_s": 3.0}))
    assert result.begun
    assert list(result.losses) == [*range(1, 17)]
    assert result.losses[16] == 7.0
    assert result.held_out == {"a": {}}
    assert result.left_s == (1000 - 16) * 3.0
    result.take(step_line(18, time=BEGAN + 999 + 8))
    assert result.left_s == (1000 - 18) * 4.0
    assert "restarts" in "\n".join(drawn(Screen(result, ""), 80))


def test_a_file_is_followed(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "x")
    assert [*tail.lines()] == []
    added = [('{"a": 1}\n{"b"', ['{"a": 1}']), (": 2}\n", ['{"b": 2}']), ("", []), ("{\n1\n", ["{", "1"])]
    with (tmp_path / "x").open("w") as out:
        for text, whole in added:
            out.write(text)
            out.flush()
            assert [*tail.lines()] == whole
    assert [*Tail(tmp_path / "x", at_end=True).lines()] == []
    assert [*parsed_lines(['{"a": 1}', '{"kind": "st', "2"])] == [{"a": 1}, 2]


def config_of(tmp_path: Path, *sets: str) -> Any:
    text = 'model = "a"\nout = "%s"\n[[data]]\npath = "x"\n' % (tmp_path / "out")
    (tmp_path / "run.toml").write_text(text)
    return config_file.read(tmp_path / "run.toml", sets)


@pytest.mark.parametrize(
    ("mesh", "smaller"),
    [
        (dict(fsdp=4), (1, 2)),  # 3 does not divide 32 streams
        (dict(replicate=2, fsdp=4), (2, 2)),
        (dict(replicate=2, fsdp=2, tp=2), (2, 1)),
        (dict(fsdp=2, tp=2, ep=4), None),  # nor ep two ranks
        (dict(fsdp=4, tp=2, ep=4), (1, 2)),
        (dict(tp=2), None),
        ({}, None),
    ],
)
def test_the_largest_smaller_mesh(tmp_path: Path, mesh: dict[str, int], smaller: tuple[int, int] | None) -> None:
    config = config_of(tmp_path, *(f"mesh.{axis}={size}" for axis, size in mesh.items()))
    result = launch.smaller_mesh(config)
    assert (result and (result.mesh.replicate, result.mesh.fsdp)) == smaller


def attempts(monkeypatch: pytest.MonkeyPatch, config: Any, script: list[tuple[int, int, bool]]) -> list[Any]:
    """Runs that fail: (rank, steps made, final) of each; afterwards one that ends well. What each was started with."""
    started, out = [], Path(config.out)
    sink = JsonLines(out / "metrics.jsonl")

    def ended(world: int, arguments: list[str], logs: Path, timeout: int, requested: list[int]) -> Ended:
        started.append((world, arguments[1:], logs.name, timeout))
        logs.mkdir(parents=True)
        if len(started) > len(script):
            return Ended()
        rank, steps, final = script[len(started) - 1]
        for step in range(steps):
            sink.write("step", step, step_line(step))
        return Ended(Failure(rank, world, "failed: it is planted", logs / f"{rank}.log", final))

    monkeypatch.setattr(processes, "run_ranks", ended)
    with Display(RunState("", "", 9), out, plain=True, every=1) as display:
        try:
            launch._launch(config, ["train"], out, display, [])
        except mw.RankError as error:
            started.append(str(error))
    return started


def test_starts_after_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    less = ["--set", "mesh.replicate=1", "mesh.fsdp=1"]
    config = config_of(tmp_path, "mesh.fsdp=2", "launch.max_restarts=3", "launch.shutdown_timeout=7")
    planted = "rank {} of {} failed: it is planted; its log is {}"
    log = f"{tmp_path / 'out' / 'logs'}/{{}}/{{}}.log".format
    # the same rank twice: without it; logs of each start have a place of their own
    assert attempts(monkeypatch, config, [(1, 2, False), (1, 2, False)]) == [
        (2, [], "0", 7),
        (2, [], "1", 7),
        (1, less, "2", 7),
    ]
    # another rank each time
    result = attempts(monkeypatch, config, [(1, 2, False), (0, 2, False)])
    assert [each[0] for each in result] == [2, 2, 2]
    assert result[0][2] == "3"
    # at once, where the file says so
    eager = config.model_copy(update={"launch": config.launch.model_copy(update={"fewer": True})})
    assert [each[0] for each in attempts(monkeypatch, eager, [(0, 1, False)])] == [2, 1]
    # two starts without a step, a mistake that would be made again, too many failures
    assert attempts(monkeypatch, config, [(1, 0, False), (0, 0, False)])[2:] == [planted.format(0, 2, log(9, 0))]
    assert len(attempts(monkeypatch, config, [(1, 5, True)])) == 2
    assert len(attempts(monkeypatch, config, [(n % 2, 1, False) for n in range(9)])) == 5
    assert (tmp_path / "out" / "failure.txt").read_text().startswith("rank 1 of")


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Path:
    at = tmp_path_factory.mktemp("runs")
    chats(at / "chats.jsonl")
    model = source(at / "m", "qwen3_tied")
    path = file_of(at, model, train={"steps": 2_000, "dtype": "float32"}, save={"export": False, "every": 1_000})
    launch.prepared(config_file.read(path))  # once for all tests
    return at


@pytest.fixture(autouse=True)
def _forked() -> Iterator[None]:
    with forked_ranks():
        yield


@pytest.fixture
def out(at: Path, request: pytest.FixtureRequest) -> Path:
    return at / request.node.name


def command(at: Path, out: Path, *sets: str) -> list[str]:
    return ["train", str(at / "run.toml"), "--set", f"out={out}", *sets]


def steps(out: Path) -> int:
    file = out / "metrics.jsonl"
    return file.read_text().count('"step"') if file.is_file() else 0


COLOURS = re.compile(r"\x1b\[[\d;]*(?:3|4|9)\d[\d;]*m")


def test_a_killed_rank_and_a_terminal_without_colours(at: Path, out: Path) -> None:
    """80 columns: what is waited for, then numbers; the last line names the rank."""
    with Started(command(at, out, "mesh.fsdp=2"), 80, NO_COLOR="1") as run:
        run.until(lambda: "tokens/s" in run.output)
        assert "no step yet" in run.output
        assert listening([run.pid, *run.ranks]) == {"0100007F"}  # on loopback alone, whatever else the machine has
        holder = f"in use by another run, process {run.pid} on {platform.node()}, since .*choose another out"
        with pytest.raises(lock.OutInUse, match=holder):
            lock.hold(out)
        os.kill(run.ranks[1], signal.SIGKILL)
        assert run.end() == 2
    lock.hold(out).close()
    why = "killed (SIGKILL): by a user, or because the machine ran out of memory"
    message = f"rank 1 of 2 was {why}; its log is {out}/logs/0/1.log"
    assert run.last_line == f"meshwright: {message}"
    assert (out / "failure.txt").read_text() == f"{message}\n"
    assert not COLOURS.search(run.output)
    frames = re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", run.output).splitlines()
    assert {cell_len(line.rstrip("\r")) for line in frames if line.startswith("│ loss")} == {80}


def test_a_second_signal_leaves_at_once(at: Path, out: Path) -> None:
    """A stuck rank does not delay it, and no process is left. The terminal has 200 columns."""
    with Started(command(at, out, "mesh.fsdp=2"), 200) as run:
        run.until(lambda: "tokens/s" in run.output)
        assert COLOURS.search(run.output)
        ranks = run.ranks
        os.kill(ranks[1], signal.SIGSTOP)
        os.kill(run.pid, signal.SIGINT)
        run.until(lambda: "signal 2: finishing the step" in run.output)
        began = time.monotonic()
        os.kill(run.pid, signal.SIGINT)
        assert run.end() == 130
    assert time.monotonic() - began < 10
    assert run.last_line.startswith("meshwright: signal 2: ended at once")
    assert len(ranks) == 2
    assert gone(ranks)


def test_an_error_of_a_rank_on_a_pipe(at: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain lines of 80 columns, warnings of ours, the words of the rank that failed and not of the one that fell."""

    def between(self: loop.Loop, **_: object) -> None:
        if self.engine.model.mesh.rank == 1:
            raise ValueError("it is planted")
        logger.warning("a warning\nof two lines")
        print("noise", file=sys.stderr)

    monkeypatch.setattr(loop.Loop, "_after_step", between)
    with Started(command(at, out, "mesh.fsdp=2")) as run:
        assert run.end() == 2
    assert "step    1/2000  loss " in run.output
    assert "\x1b" not in run.output
    assert "meshwright: a warning\nmeshwright: of two lines\n" in run.output
    assert "noise" not in run.output
    log = (out / "logs" / "0" / "0.log").read_text()
    assert log.startswith("load ")  # and nothing was written over it
    assert "noise" in log
    assert "step    1/2000  loss " in log
    words = run.output[run.output.rindex("meshwright: ") :]
    assert words.startswith("meshwright: rank 1 of 2 failed: ValueError: it is planted\n")
    assert "test_train_live.py:" in words
    assert run.last_line == f"its log is {out}/logs/0/1.log"
    assert words == f"meshwright: {(out / 'failure.txt').read_text()}"
    assert "Traceback" in (out / "logs" / "0" / "1.log").read_text()


def test_ctrl_c_and_a_killed_launcher(at: Path, out: Path) -> None:
    """One rank: saved at the first; the same command goes on, is killed, and takes its rank along."""
    with Started(command(at, out, "log.every=7")) as run:
        run.until(lambda: "step   14/" in run.output)
        os.kill(run.pid, signal.SIGINT)
        assert run.end() == 130
    assert run.last_line == f"meshwright: ended by signal 2; the same command resumes from {out}"
    assert f"  meshwright report {out}\n  meshwright sample {out} --prompt" in run.output
    assert re.search(
        r"ended at step \d+ of 2,000 by signal 2; loss \d\.\d+\nwritten to .*\n  checkpoints/step-", run.output
    )
    nothing = config_file.read(at / "run.toml", [f"out={out}/nothing"])
    assert launch.what_next(nothing) == "nothing was saved yet: the same command starts anew"
    assert "step   13/" not in run.output
    before = steps(out)
    with Started([*command(at, out), "--plain"], 80) as run:
        run.until(lambda: steps(out) > before and "step" in run.output)
        assert "resuming from" in run.output
        assert (out / "logs" / "1" / "0.log").is_file()
        ranks = run.ranks
        os.kill(run.pid, signal.SIGKILL)
        run.end()
    assert len(ranks) == 1
    assert gone(ranks)


def test_a_mean_is_of_what_is_finite() -> None:
    assert display._mean([1.0, math.nan, 4.0, math.inf]) == 2.5
    assert math.isnan(display._mean([math.nan]))
