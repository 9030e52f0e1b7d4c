"""The launcher names the rank that failed first, by the records of ranks and by their exit codes."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.train import failure


def write_record(folder: Path, rank: int, when: float, **details: int) -> None:
    details = {"rank": rank, "blames": False, "signal": 0, "final": rank == 1, **details}
    record = {"message": {"message": f"reason {rank}", "extraInfo": {}}, "meshwright": {"time": when, **details}}
    (folder / f"{rank}.json").write_text(json.dumps(record))


# Records by rank: time and details. Codes by rank: exit code and time.
CASES = {
    "the earlier of two causes": ({1: (7.0, {}), 2: (5.0, {})}, {0: (1, 1.0)}, 0, 2),
    "a cause before an earlier accusation": ({1: (7.0, {}), 2: (5.0, dict(blames=True))}, {}, 0, 1),
    "a cause before an earlier signal": ({1: (7.0, {}), 2: (5.0, dict(signal=15))}, {}, 0, 1),
    "a death before an earlier accusation": ({1: (5.0, dict(blames=True))}, {2: (-9, 8.0)}, 0, 2),
    "a bus error before an earlier exit": ({}, {0: (1, 1.0), 2: (-7, 8.0)}, 0, 2),
    "an illegal instruction before an earlier exit": ({}, {0: (1, 1.0), 2: (-4, 8.0)}, 0, 2),
    "a float exception before an earlier exit": ({}, {0: (1, 1.0), 2: (-8, 8.0)}, 0, 2),
    "a segmentation fault before an earlier exit": ({}, {0: (1, 1.0), 2: (-11, 8.0)}, 0, 2),
    "an accusation before an earlier exit": ({1: (5.0, dict(blames=True))}, {2: (-15, 1.0)}, 0, 1),
    "a cause before an earlier abort": ({2: (9.1, {})}, {0: (-6, 9.0), 1: (-9, 39.0), 2: (2, 9.0)}, 0, 2),
    "an exit before a later end by a signal": ({}, {0: (-15, 9.0), 1: (1, 8.0)}, 0, 1),
    "the record of the last rank": ({2: (5.0, {})}, {}, 0, 2),
    "no failure": ({}, {0: (0, 1.0), 1: (0, 2.0), 2: (0, 3.0)}, 0, None),
    "the signal that was passed on": ({1: (2.0, dict(signal=15))}, {0: (-15, 1.0), 1: (143, 2.0)}, 15, None),
    "another signal than the one passed on": ({}, {0: (-15, 1.0), 1: (-9, 2.0)}, 15, 1),
    "lost peers after a signal": ({1: (2.0, dict(blames=True))}, {0: (-15, 1.0), 1: (1, 2.0), 2: (143, 3.0)}, 15, None),
    "an exit after a signal": ({1: (2.0, dict(blames=True))}, {0: (-15, 1.0), 1: (1, 2.0), 2: (3, 3.0)}, 15, 1),
    "lost peers while a rank lives": ({1: (2.0, dict(blames=True))}, {0: (-15, 1.0), 1: (1, 2.0)}, 15, 1),
}


@pytest.mark.parametrize("case", CASES)
def test_the_first_failure_is_the_likeliest_cause(case: str, tmp_path: Path) -> None:
    records, codes, sent, expected = CASES[case]
    for rank, (when, details) in records.items():
        write_record(tmp_path, rank, when, **details)
    actual = failure.first(codes, tmp_path, 3, sent)
    assert (actual and actual.rank) == expected
    if actual:
        assert (actual.world, actual.log, actual.final) == (
            3,
            tmp_path / f"{actual.rank}.log",
            expected == 1 and 1 in records,
        )


@pytest.mark.parametrize(
    ("error", "blames", "final", "stack"),
    [
        (mw.DataError("x"), False, True, False), (mw.ConfigError("x"), False, True, False),
        (mw.RankError("x"), True, False, False), (mw.CheckpointError("x"), False, False, False),
        (mw.ExportError("x"), False, False, False), (ValueError("x"), False, False, True),
    ],
)  # fmt: skip
def test_a_rank_records_what_a_restart_would_do(
    error: Exception, blames: bool, final: bool, stack: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only an error that explains itself and that no other rank caused would be raised again."""
    monkeypatch.setenv(failure.ERROR_FILE, str(tmp_path / "1.json"))
    before = time.time()
    message = failure.record(error, 1)
    written = json.loads((tmp_path / "1.json").read_text())
    details = written["meshwright"]
    assert before <= details.pop("time") <= time.time()
    assert details == dict(rank=1, blames=blames, final=final, signal=0)
    assert written["message"]["message"] == message == ("ValueError: x" if stack else "x")
    assert ("py_callstack" in written["message"]["extraInfo"]) == stack
    assert [each.name for each in tmp_path.iterdir()] == ["1.json"]
    actual = failure.first({1: (2, 1.0)}, tmp_path, 3)
    assert actual == failure.Failure(1, 3, f"failed: {message}", tmp_path / "1.log", final)


def test_a_rank_records_a_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(failure.ERROR_FILE, str(tmp_path / "2.json"))
    failure.record_signal(signal.SIGUSR1, 2)
    details = json.loads((tmp_path / "2.json").read_text())["meshwright"]
    assert {**details, "time": 0} == dict(time=0, rank=2, blames=False, final=False, signal=signal.SIGUSR1)
    actual = failure.first({2: (138, 1.0)}, tmp_path, 3)
    assert actual is not None
    assert actual.how.startswith("got SIGUSR1; the step was finished and the run saved. This command did not send")
    assert failure.first({2: (138, 1.0)}, tmp_path, 3, signal.SIGUSR1) is None


def deeper(calls: int) -> None:
    if calls:
        deeper(calls - 1)
    raise ValueError("too deep")


def test_the_message_of_an_unknown_error_has_its_last_frames() -> None:
    with pytest.raises(ValueError, match="too deep") as caught:
        deeper(5)
    summary, *frames = failure.message_of(caught.value).splitlines()
    assert summary == "ValueError: too deep"
    assert len(frames) == 4
    assert frames[-1].startswith(f"  {__file__}:")
    assert frames[-1].endswith('in deeper: raise ValueError("too deep")')


@pytest.mark.parametrize(
    ("code", "num_lines", "first_line", "last"),
    [
        (-9, 3, "was killed (SIGKILL): by a user, or because the machine ran out of memory", []),
        (-11, 9, "ended with SIGSEGV; its last output:", [f"  line {n}" for n in range(1, 9)]),
        (3, 2, "ended with exit code 3; its last output:", ["  line 0", "  line 1"]),
        (-15, 0, "ended with SIGTERM", []), (4, None, "ended with exit code 4", []),
    ],
)  # fmt: skip
def test_the_end_of_a_rank_without_a_record(
    code: int, num_lines: int | None, first_line: str, last: list[str], tmp_path: Path
) -> None:
    if num_lines is not None:
        (tmp_path / "1.log").write_text("".join(f"line {n}\n" for n in range(num_lines)))
    actual = failure.first({1: (code, 1.0)}, tmp_path, 3)
    assert actual is not None
    assert actual.how.splitlines() == [first_line, *last]
    assert actual.short == f"rank 1 of 3 {first_line}"
    assert str(actual) == f"rank 1 of 3 {actual.how}{chr(10) if last else '; '}its log is {tmp_path / '1.log'}"
    assert not actual.final


@pytest.mark.parametrize(
    ("error", "written", "began", "replaced"),
    [
        (mw.RankError("x"), 1000.0, 1000.0, False), (mw.RankError("x"), 1000.0, 1000.5, True),
        (mw.RankError("x"), 1000.0, 999.0, False), (mw.RankError("x"), None, 1000.0, True),
        (mw.DataError("x"), 1000.0, 999.0, True), (ValueError("x"), 1000.0, 999.0, True),
    ],
)  # fmt: skip
def test_an_accusation_replaces_only_the_words_of_an_earlier_run(
    error: Exception, written: float | None, began: float, replaced: bool, tmp_path: Path
) -> None:
    file = failure.write(tmp_path / "a" / "out", "rank 0 failed: y")
    if written is None:
        file.unlink()
    else:
        os.utime(file, (written, written))
    failure.write_first(error, 1, began, file.parent)
    text = f"rank 1 failed: {failure.message_of(error)}\n" if replaced else "rank 0 failed: y\n"
    assert file.read_text() == text
    assert [each.name for each in file.parent.iterdir()] == ["failure.txt"]


@pytest.mark.parametrize(
    ("kind", "step", "overcome"),
    [("step", 6, True), ("step", 5, False), ("end", 5, True), ("end", 2, True), ("eval", 9, False), ("save", 9, False)],
)
def test_a_failure_is_overcome_by_a_later_step_or_the_end(kind: str, step: int, overcome: bool, tmp_path: Path) -> None:
    failure.write(tmp_path, "rank 0 failed: y")
    os.utime(tmp_path / "failure.txt", (1e9, 1e9))
    (tmp_path / "overcome.txt").write_text("earlier\n\n")
    failure.Overcome(tmp_path, 5).write(kind, step, {})
    assert (tmp_path / "failure.txt").exists() != overcome
    when = time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(1e9))
    added = f"{when}\nrank 0 failed: y\n\n" if overcome else ""
    assert (tmp_path / "overcome.txt").read_text() == f"earlier\n\n{added}"
