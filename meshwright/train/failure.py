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

FAILURE = "failure.txt"
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


def record(error: BaseException, rank: int, began: float, out: Path) -> str:
    """Of a rank that fails: to the file that the launcher reads, and to OUT/failure.txt unless another was first."""
    words = words_of(error)
    known = isinstance(error, MeshwrightError)
    about: dict[str, Any] = {"timestamp": str(int(time.time()))}
    if not known:
        about["py_callstack"] = "".join(traceback.format_exception(error))
    told = {
        "message": {"message": words, "extraInfo": about},
        "meshwright": {
            "rank": rank, "time": time.time(), "blames": isinstance(error, RankError),
            "final": known and not isinstance(error, _TRANSIENT),
        },
    }  # fmt: skip
    if name := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        _put(Path(name), json.dumps(told))
    if not isinstance(error, RankError) or _written_at(out / FAILURE) < began:  # it speaks of a rank that was first
        write(out, f"rank {rank} failed: {words}")
    return words


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


def first(codes: Mapping[int, tuple[int, float]], folder: Path, world: int) -> Failure | None:
    """Of an attempt: `codes` are exit codes (of a signal, negative) and when they were seen, by rank."""
    told = dict(_records(folder, world))
    found = sorted([*map(_order_of_record, told.values()), *_order_of_codes(codes, told)])
    if not found:
        return None
    rank = found[0][2]
    log = folder / f"{rank}.log"
    if rank in told:
        words = told[rank]["message"]["message"]
        return Failure(rank, world, f"failed: {words}", log, told[rank]["meshwright"]["final"])
    return Failure(rank, world, _how(codes[rank][0], log), log)


_Order = tuple[int, float, int]  # how sure it is that this was first, when, which rank


def _order_of_record(told: Mapping[str, Any]) -> _Order:
    about = told["meshwright"]
    return int(about["blames"]), about["time"], about["rank"]


def _order_of_codes(codes: Mapping[int, tuple[int, float]], told: Mapping[int, object]) -> Iterator[_Order]:
    for rank, (code, seen_at) in codes.items():
        if code and rank not in told:
            yield (0 if _signal(code) in _DEATHS else 2), seen_at, rank


def _records(folder: Path, world: int) -> Iterator[tuple[int, dict[str, Any]]]:
    for rank in range(world):
        if (file := folder / f"{rank}.json").is_file():
            yield rank, json.loads(file.read_text())


def _signal(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else ""


def _how(code: int, log: Path) -> str:
    """Of a rank that could say nothing."""
    if code == -signal.SIGKILL:
        return "was killed (SIGKILL): somebody did, or the machine had no memory left"
    lines = log.read_text(errors="replace").splitlines()[-_LINES:] if log.is_file() else []
    ended = f"ended with {_signal(code) or f'exit code {code}'}"
    return "\n".join([f"{ended}; the last that it wrote:", *(f"  {line}" for line in lines)]) if lines else ended
