"""What a run left in its folder, read as it is: also while it still runs, and when it was cut off in a line."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .starts import Failure, Start, failures, start_of

METRICS = "metrics.jsonl"
_NUMBERS = ("step", "time", "seconds", "num_steps", "from", "world", "number")
_LARGEST = 3e38  # about the range of float32: what is larger is no number, as what is not finite
_LATEST_S, _LONGEST_S = 1e10, 1e7  # since 1970, about the year 2286; of a step or a save, 115 days
_OUR_FILES = ("config.toml", "environment.json", "layout.json", "verify.json", "failure.txt", "overcome.txt")


@dataclass(frozen=True)
class Run:
    """`lines`: of each kind the values by step, those that were written last. A NaN is None there. `failed_at`: when
    failure.txt was written."""

    name: str
    lines: Mapping[str, Sequence[Mapping[str, Any]]]
    texts: Mapping[str, str] = field(default_factory=dict)
    starts: Sequence[Start] = ()
    failed_at: float = 0.0

    def of(self, kind: str) -> Sequence[Mapping[str, Any]]:
        return self.lines.get(kind, ())

    def json(self, name: str) -> Mapping[str, Any]:
        """Of a file; empty where it is not there, or no JSON."""
        try:
            found = json.loads(self.texts.get(name, "{}"))
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    @property
    def num_steps(self) -> int | None:
        """That it was to make."""
        return next((int(start["num_steps"]) for start in reversed(self.of("start")) if "num_steps" in start), None)

    @property
    def last(self) -> Mapping[str, Any]:
        return self.of("step")[-1]

    @property
    def failure(self) -> str:
        """Why the last start failed; "" if it goes on or has ended well."""
        return "" if self.of("end") or self._started_again else self.texts.get("failure.txt", "")

    @property
    def overcome(self) -> list[Failure]:
        """Failures after which the run was started again. The last may still lie where it was written."""
        found = failures(self.texts.get("overcome.txt", ""))
        if "failure.txt" in self.texts and not self.failure:
            found.append(Failure(self.failed_at, self.texts["failure.txt"].strip()))
        return found

    @property
    def _started_again(self) -> bool:
        return bool(self.starts) and self.failed_at < self.starts[-1].time

    @property
    def best(self) -> tuple[float, int] | None:
        """The lowest mean of the held-out losses, and its step."""
        found = []
        for line in self.of("eval"):
            losses = [value for name, value in line.items() if name.endswith("/loss")]
            if losses and None not in losses:
                found.append((math.fsum(losses) / len(losses), int(line["step"])))
        return min(found) if found else None


def read_run(folder: Path) -> Run:
    """Read a run that has made a step."""
    file = folder / METRICS
    if not file.is_file():
        raise ConfigError(f"{folder} holds no {METRICS}; give the `out` of a run's file, after its first step")
    run = read_folder(folder)
    if not run.of("step"):
        raise ConfigError(f"{file} holds no step yet; a report needs one")
    return run


def read_folder(folder: Path) -> Run:
    """Read whatever a run has left so far."""
    kept: dict[str, dict[Any, dict[str, Any]]] = {}
    starts: list[Start] = []
    for line in _lines(folder / METRICS):
        if line["kind"] == "start":
            starts.append(start_of(line))
            _forget_after(kept, starts[-1].begins)
        elif starts:
            starts[-1] = starts[-1].after(line)
        kept.setdefault(line["kind"], {})[_key(line)] = line
    ordered = {kind: [by[key] for key in sorted(by)] for kind, by in kept.items()}
    texts = {name: _text(folder / name) for name in _OUR_FILES if (folder / name).is_file()}
    failed_at = (folder / "failure.txt").stat().st_mtime if "failure.txt" in texts else 0.0
    return Run(folder.resolve().name, ordered, texts, starts, failed_at)


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    if not file.is_file():
        return
    with file.open(encoding="utf-8", errors="replace") as lines:
        yield from filter(None, map(_read, lines))


def _read(line: str) -> dict[str, Any] | None:
    """A line of ours. None: the last line of a run that was cut off or still runs, or one of another program."""
    try:
        found = json.loads(line, parse_constant=lambda _: None, parse_float=_finite, parse_int=_small)
    except (ValueError, RecursionError):
        return None
    known = isinstance(found, dict) and isinstance(found.get("kind"), str) and isinstance(found.get("step"), int)
    return found if known and all(_fits(name, value) for name, value in found.items()) else None


def _finite(text: str) -> float | None:
    return value if abs(value := float(text)) <= _LARGEST else None


def _small(text: str) -> int | None:
    return value if abs(value := int(text)) < 2**63 else None


def _fits(name: str, value: Any) -> bool:
    """Whether a value is of the kind that its name promises."""
    if name == "load":
        return isinstance(value, list) and all(_is_list_of(int | float, layer) for layer in value)
    if name in _NUMBERS and not isinstance(value, int | float):
        return False
    if name in ("time", "seconds") or name.startswith("time/"):
        most = _LATEST_S if name == "time" else _LONGEST_S
        return value is None or (isinstance(value, int | float) and abs(value) <= most)
    if name.startswith("experts/") and isinstance(value, list):
        return _is_list_of(int | float | None, value)
    return "/" not in name or isinstance(value, int | float | None)


def _is_list_of(kind: Any, value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, kind) for each in value)


def _key(found: Mapping[str, Any]) -> tuple[Any, ...]:
    """One line a step, but for samples, of which there are several, and checkpoints, of which the best is one more."""
    return (found["step"], found.get("number", 0), bool(found.get("best")))


def _forget_after(kept: Mapping[str, dict[Any, Any]], begins: int) -> None:
    """A run that goes on from a checkpoint makes the steps behind it anew. How it ended before is past, too."""
    for kind, by in kept.items():
        for key in [key for key in by if kind == "end" or (kind != "start" and key[0] > begins)]:
            del by[key]


def _text(file: Path) -> str:
    return file.read_text("utf-8", errors="replace")
