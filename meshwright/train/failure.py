"""Find why a run failed: the rank that failed first, its message, and its log.

When one rank fails, all others fail soon after: their collectives break, or the launcher ends them. The last lines on
the terminal are then those of a healthy rank. So each rank records its own failure in a file (the protocol of
torchrun's error files), and the launcher looks for the cause among these records and the exit codes.
"""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, ExportError, MeshwrightError, RankError

FAILURE, OVERCOME = "failure.txt", "overcome.txt"
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # torchrun's variable: the file in which a rank records its failure
_FRAMES, _LINES = 4, 8  # of a traceback, and of the end of a log, in a message; the log has everything
# A rank never dies of these because a peer failed, so such a death comes first.
_DEATHS = ("SIGKILL", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE")
# These may not recur after a restart; every other MeshwrightError would be raised again.
_TRANSIENT = (RankError, CheckpointError, ExportError)


@dataclass(frozen=True)
class Failure:
    """The first failure of an attempt. `final`: a restart would fail in the same way.

    `how` completes the sentence "rank 3 of 8 ...", on one line or several.
    """

    rank: int
    world: int
    how: str
    log: Path
    final: bool = False

    def __str__(self) -> str:
        multiline = "\n" in self.how
        return f"rank {self.rank} of {self.world} {self.how}{chr(10) if multiline else '; '}its log is {self.log}"

    @property
    def short(self) -> str:
        """The first line, without the log."""
        return f"rank {self.rank} of {self.world} {self.how.splitlines()[0]}"


def message_of(error: BaseException) -> str:
    """Return an error as text for people.

    A MeshwrightError is a refusal that explains itself. For any other error the last frames say where it comes from.
    """
    if isinstance(error, MeshwrightError):
        return str(error)
    summary = "".join(traceback.format_exception_only(error)).strip()
    frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
    return "\n".join([summary, *(f"  {each.filename}:{each.lineno} in {each.name}: {each.line}" for each in frames)])


def record(error: BaseException, rank: int) -> str:
    """Record for the launcher why this rank fails. Return the message."""
    message, known = message_of(error), isinstance(error, MeshwrightError)
    final = known and not isinstance(error, _TRANSIENT)
    stack = "" if known else "".join(traceback.format_exception(error))
    _write_record(message, stack, rank=rank, blames=isinstance(error, RankError), final=final, signal=0)
    return message


def record_signal(number: int, rank: int) -> None:
    """Record for the launcher that this rank got a signal, and that the run was saved and ends."""
    message = f"got {signal.Signals(number).name}; the step was finished and the run saved"
    _write_record(message, "", rank=rank, blames=False, final=False, signal=number)


def _write_record(message: str, stack: str, **details: int) -> None:
    """Write the error file of this rank, in torchrun's format, which torchrun quotes in its own summary.

    Our launcher reads `meshwright` too. `blames`: the error accuses another rank, so it is a consequence.
    """
    extra = {"timestamp": str(int(time.time())), **({"py_callstack": stack} if stack else {})}
    record = {"message": {"message": message, "extraInfo": extra}, "meshwright": {"time": time.time(), **details}}
    if name := os.environ.get(ERROR_FILE):
        _replace(Path(name), json.dumps(record))


def write_first(error: BaseException, rank: int, began: float, out: Path) -> None:
    """Write OUT/failure.txt from a rank, as torchrun and other launchers do not.

    An error that blames another rank never overwrites a file written since `began`: that one is nearer to the cause.
    """
    if not isinstance(error, RankError) or _written_at(out / FAILURE) < began:
        write(out, f"rank {rank} failed: {message_of(error)}")


def write(out: Path, message: str) -> Path:
    """Write OUT/failure.txt and return its path."""
    out.mkdir(parents=True, exist_ok=True)
    _replace(out / FAILURE, message + "\n")
    return out / FAILURE


def _written_at(file: Path) -> float:
    return file.stat().st_mtime if file.exists() else 0.0


def _replace(file: Path, text: str) -> None:
    """Write a file atomically, by a rename: other processes may read it at any time."""
    temporary = file.with_name(f"{file.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(file)


class Overcome:
    """A metrics sink that moves OUT/failure.txt to OUT/overcome.txt once the run is past the step of that failure.

    Until then the failure may happen again, at the same step. `reached`: the last step of the attempt that failed.
    """

    def __init__(self, out: Path, reached: int) -> None:
        self.out, self.reached = out, reached

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        file = self.out / FAILURE
        if (kind == "end" or (kind == "step" and step > self.reached)) and file.exists():
            when = time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(_written_at(file)))
            with (self.out / OVERCOME).open("a") as earlier:
                earlier.write(f"{when}\n{file.read_text()}\n")
            file.unlink()


def first(codes: Codes, folder: Path, world: int, sent: int = 0) -> Failure | None:
    """Return the first failure of an attempt, None if no rank failed.

    `codes`: exit codes (negative for signals) and their times, for ranks that the launcher did not kill. `sent`: the
    signal that the launcher passed on, 0 for none. A rank that ends by this signal, or loses a peer that did, has not
    failed.

    Candidates are ordered by how certainly they are a cause, then by time. Times alone do not suffice: the record of a
    consequence can be written before the exit of the rank that caused it is noticed.
    """
    records = dict(_records(folder, world))
    if sent:
        all_left = len(codes) == world
        codes = {rank: code for rank, code in codes.items() if code[0] not in (0, -sent, 128 + sent)}
        records = {rank: each for rank, each in records.items() if not each["meshwright"]["signal"]}
        if all_left and all(rank in records and records[rank]["meshwright"]["blames"] for rank in codes):
            return None
    candidates = sorted([*map(_order_of_record, records.values()), *_order_of_codes(codes, records)])
    if not candidates:
        return None
    rank = candidates[0][2]
    log = folder / f"{rank}.log"
    if rank in records:
        return Failure(rank, world, _how_recorded(records[rank]), log, records[rank]["meshwright"]["final"])
    return Failure(rank, world, _how_ended(codes[rank][0], log), log)


Codes = Mapping[int, tuple[int, float]]  # exit code and time, by rank
_Order = tuple[int, float, int]  # class of certainty (0: surely a cause), time, rank


def _order_of_record(record: Mapping[str, Any]) -> _Order:
    """Rank a record: an error of its own is a cause, one that blames a peer, or a signal, may be a consequence."""
    details = record["meshwright"]
    return int(details["blames"] or details["signal"] > 0), details["time"], details["rank"]


def _order_of_codes(codes: Mapping[int, tuple[int, float]], records: Mapping[int, object]) -> Iterator[_Order]:
    """Rank the exits without a record: a death such as SIGKILL is a cause, any other exit comes last."""
    for rank, (code, when) in codes.items():
        if code and rank not in records:
            yield (0 if _signal(code) in _DEATHS else 2), when, rank


def _records(folder: Path, world: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the error files of the ranks that wrote one."""
    for rank in range(world):
        if (file := folder / f"{rank}.json").is_file():
            yield rank, json.loads(file.read_text())


def _how_recorded(record: Mapping[str, Any]) -> str:
    """Describe a failure by the rank's own record."""
    message = record["message"]["message"]
    if record["meshwright"]["signal"]:
        return f"{message}. This command did not send that signal: a user did, or a memory guard such as earlyoom"
    return f"failed: {message}"


def _signal(code: int) -> str:
    """Return the name of the signal that ended a process, "" if it exited."""
    return signal.Signals(-code).name if code < 0 else ""


def _how_ended(code: int, log: Path) -> str:
    """Describe the end of a rank that left no record, with the last lines of its log."""
    if code == -signal.SIGKILL:
        return "was killed (SIGKILL): by a user, or because the machine ran out of memory"
    lines = log.read_text(errors="replace").splitlines()[-_LINES:] if log.is_file() else []
    ended = f"ended with {_signal(code) or f'exit code {code}'}"
    return "\n".join([f"{ended}; its last output:", *(f"  {line}" for line in lines)]) if lines else ended
