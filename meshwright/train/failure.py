"""Why a run failed, in words: which rank, what it said, where its log lies. The first to fail is named, not a rank that
fell because its peer did."""

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
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # torchrun's name: its value is where a rank tells of its failure
_FRAMES, _LINES = 4, 8  # of a traceback and of a log; the log has the rest
_DEATHS = ("SIGKILL", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE")  # nothing that a rank does because its peer fell
_TRANSIENT = (RankError, CheckpointError, ExportError)  # of what meshwright refuses, the rest is refused again


@dataclass(frozen=True)
class Failure:
    """`final`: the same would happen again."""

    rank: int
    world: int
    how: str
    log: Path
    final: bool = False

    def __str__(self) -> str:
        many = "\n" in self.how
        return f"rank {self.rank} of {self.world} {self.how}{chr(10) if many else '; '}its log is {self.log}"

    @property
    def short(self) -> str:
        return f"rank {self.rank} of {self.world} {self.how.splitlines()[0]}"


def words_of(error: BaseException) -> str:
    """What meshwright refuses says it itself; of anything else also where it comes from."""
    if isinstance(error, MeshwrightError):
        return str(error)
    said = "".join(traceback.format_exception_only(error)).strip()
    frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
    return "\n".join([said, *(f"  {each.filename}:{each.lineno} in {each.name}: {each.line}" for each in frames)])


def record(error: BaseException, rank: int) -> str:
    """Tell the launcher why this rank fails. Returns the words."""
    words, known = words_of(error), isinstance(error, MeshwrightError)
    final = known and not isinstance(error, _TRANSIENT)
    stack = "" if known else "".join(traceback.format_exception(error))
    _tell(words, stack, rank=rank, blames=isinstance(error, RankError), final=final, signal=0)
    return words


def record_signal(number: int, rank: int) -> None:
    """Tell the launcher that this rank got a signal, and that the run was saved and ends."""
    words = f"got {signal.Signals(number).name}; the step was finished and the run saved"
    _tell(words, "", rank=rank, blames=False, final=False, signal=number)


def _tell(words: str, stack: str, **about: int) -> None:
    """In the file that the launcher reads, ours or torchrun."""
    extra = {"timestamp": str(int(time.time())), **({"py_callstack": stack} if stack else {})}
    record = {"message": {"message": words, "extraInfo": extra}, "meshwright": {"time": time.time(), **about}}
    if name := os.environ.get(ERROR_FILE):
        _put(Path(name), json.dumps(record))


def write_first(error: BaseException, rank: int, began: float, out: Path) -> None:
    """Write OUT/failure.txt, unless this rank blames another that has written it since `began`."""
    if not isinstance(error, RankError) or _written_at(out / FAILURE) < began:
        write(out, f"rank {rank} failed: {words_of(error)}")


def write(out: Path, words: str) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    _put(out / FAILURE, words + "\n")
    return out / FAILURE


def _written_at(file: Path) -> float:
    return file.stat().st_mtime if file.exists() else 0.0


def _put(file: Path, text: str) -> None:
    """Whole or not at all: another process reads it at any time."""
    part = file.with_name(f"{file.name}.{os.getpid()}")
    part.write_text(text)
    part.replace(file)


class Overcome:
    """A sink of metrics: moves OUT/failure.txt to OUT/overcome.txt once the run is past the step of that failure, or
    ends. `reached`: the last step of the attempt that failed."""

    def __init__(self, out: Path, reached: int) -> None:
        self.out, self.reached = out, reached

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        file = self.out / FAILURE
        if (kind == "end" or (kind == "step" and step > self.reached)) and file.exists():
            when = time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(_written_at(file)))
            with (self.out / OVERCOME).open("a") as earlier:
                earlier.write(f"{when}\n{file.read_text()}\n")
            file.unlink()


def first(codes: Codes, folder: Path, world: int, asked: int = 0) -> Failure | None:
    """The first failure of an attempt.

    `codes`: exit codes (of a signal, negative) and when they were seen, of the ranks that the launcher did not kill.
    `asked`: the signal that the launcher passed on. A rank that ends by it, or in its turn loses one that did, has not
    failed.
    """
    told = dict(_records(folder, world))
    if asked:
        all_left = len(codes) == world
        codes = {rank: seen for rank, seen in codes.items() if seen[0] not in (0, -asked, 128 + asked)}
        told = {rank: each for rank, each in told.items() if not each["meshwright"]["signal"]}
        if all_left and all(rank in told and told[rank]["meshwright"]["blames"] for rank in codes):
            return None
    found = sorted([*map(_order_of_record, told.values()), *_order_of_codes(codes, told)])
    if not found:
        return None
    rank = found[0][2]
    log = folder / f"{rank}.log"
    if rank in told:
        return Failure(rank, world, _said(told[rank]), log, told[rank]["meshwright"]["final"])
    return Failure(rank, world, _how(codes[rank][0], log), log)


Codes = Mapping[int, tuple[int, float]]
_Order = tuple[int, float, int]  # how sure it is that this was first, when, which rank


def _order_of_record(told: Mapping[str, Any]) -> _Order:
    about = told["meshwright"]
    return int(about["blames"] or about["signal"] > 0), about["time"], about["rank"]


def _order_of_codes(codes: Mapping[int, tuple[int, float]], told: Mapping[int, object]) -> Iterator[_Order]:
    for rank, (code, seen_at) in codes.items():
        if code and rank not in told:
            yield (0 if _signal(code) in _DEATHS else 2), seen_at, rank


def _records(folder: Path, world: int) -> Iterator[tuple[int, dict[str, Any]]]:
    for rank in range(world):
        if (file := folder / f"{rank}.json").is_file():
            yield rank, json.loads(file.read_text())


def _said(told: Mapping[str, Any]) -> str:
    words = told["message"]["message"]
    if told["meshwright"]["signal"]:
        return f"{words}. This command did not send that signal: somebody did, or a guard of memory such as earlyoom"
    return f"failed: {words}"


def _signal(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else ""


def _how(code: int, log: Path) -> str:
    """Of a rank that could say nothing."""
    if code == -signal.SIGKILL:
        return "was killed (SIGKILL): somebody did, or the machine had no memory left"
    lines = log.read_text(errors="replace").splitlines()[-_LINES:] if log.is_file() else []
    ended = f"ended with {_signal(code) or f'exit code {code}'}"
    return "\n".join([f"{ended}; the last that it wrote:", *(f"  {line}" for line in lines)]) if lines else ended
