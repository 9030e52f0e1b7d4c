"""Read the files of a run, such as metrics.jsonl, even while it runs or after it was killed in the middle of a line.

Any program may have written these files. Types and ranges are checked as they are read, so that the page can trust
them.

Lines of metrics.jsonl, one of each kind:

  {"kind": "start", "step": 0, "mesh": {"fsdp": 2}, "world": 2, "num_steps": 1000, "time": ...}
  {"kind": "step", "step": 1, "train/loss": 11.93, "train/grad_norm": 4.2, "throughput/tokens_per_s": 5120, ...}
  {"kind": "eval", "step": 50, "eval/held_out/loss": 10.8}
  {"kind": "end", "step": 1000, "why": ""}
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .starts import Failure, Start, failures, start_of

METRICS = "metrics.jsonl"
_NUMBER_FIELDS = ("step", "time", "seconds", "num_steps", "from", "world", "number")
_LARGEST = 3e38  # about the range of float32; larger values are treated as NaN
_LATEST_S, _LONGEST_S = 1e10, 1e7  # a time stamp up to the year 2286; a duration up to 115 days
_OUR_FILES = (
    "config.toml", "environment.json", "layout.json", "images.json", "verify.json", "failure.txt", "overcome.txt",
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """A run. `lines`: by kind, the last line written for each step. NaN is None. `failed_at`: when failure.txt was
    written."""

    name: str
    lines: Mapping[str, Sequence[Mapping[str, Any]]]
    texts: Mapping[str, str] = field(default_factory=dict)
    starts: Sequence[Start] = ()
    failed_at: float = 0.0

    def of(self, kind: str) -> Sequence[Mapping[str, Any]]:
        """Return the lines of a kind."""
        return self.lines.get(kind, ())

    def json(self, name: str) -> Mapping[str, Any]:
        """Return the object in a JSON file of the run; {} if it is missing or invalid."""
        try:
            value = json.loads(self.texts.get(name, "{}"))
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}

    @property
    def num_steps(self) -> int | None:
        """Return the planned number of steps, if known."""
        return next((int(start["num_steps"]) for start in reversed(self.of("start")) if "num_steps" in start), None)

    @property
    def last(self) -> Mapping[str, Any]:
        """Return the line of the last step."""
        return self.of("step")[-1]

    @property
    def failure(self) -> str:
        """Return why the last start failed; "" if it is running or ended well.

        failure.txt stays in place after a restart, so its time is compared with that of the last start.
        """
        return "" if self.of("end") or self._started_again else self.texts.get("failure.txt", "")

    @property
    def overcome(self) -> list[Failure]:
        """Return the failures after which the run was started again. The last one may still be in failure.txt."""
        failed = failures(self.texts.get("overcome.txt", ""))
        if "failure.txt" in self.texts and not self.failure:
            failed.append(Failure(self.failed_at, self.texts["failure.txt"].strip()))
        return failed

    @property
    def _started_again(self) -> bool:
        """Return whether a start followed the last failure."""
        return bool(self.starts) and self.failed_at < self.starts[-1].time

    @property
    def best(self) -> tuple[float, int] | None:
        """Return the lowest mean of the held-out losses, and its step."""
        means = []
        for line in self.of("eval"):
            losses = [value for name, value in line.items() if name.endswith("/loss")]
            if losses and None not in losses:
                means.append((math.fsum(losses) / len(losses), int(line["step"])))
        return min(means) if means else None


def read_run(folder: Path) -> Run:
    """Read a run that has made a step."""
    file = folder / METRICS
    if not file.is_file():
        raise ConfigError(f"{folder} holds no {METRICS}; give the `out` directory of a run that has made a step")
    run = read_folder(folder)
    if not run.of("step"):
        raise ConfigError(f"{file} holds no step yet; a report needs one")
    return run


def read_folder(folder: Path) -> Run:
    """Read whatever a run has written so far."""
    by_kind: dict[str, dict[Any, dict[str, Any]]] = {}
    starts: list[Start] = []
    # Later lines win: a run that resumed from an older checkpoint has written some steps twice, and the second time
    # counts.
    for line in _lines(folder / METRICS):
        if line["kind"] == "start":
            starts.append(start_of(line))
            _forget_after(by_kind, starts[-1].begins)
        elif starts:
            starts[-1] = starts[-1].after(line)
        by_kind.setdefault(line["kind"], {})[_key(line)] = line
    ordered = {kind: [lines[key] for key in sorted(lines)] for kind, lines in by_kind.items()}
    texts = {name: _text(folder / name) for name in _OUR_FILES if (folder / name).is_file()}
    failed_at = (folder / "failure.txt").stat().st_mtime if "failure.txt" in texts else 0.0
    return Run(folder.resolve().name, ordered, texts, starts, failed_at)


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the valid lines of a metrics file."""
    if not file.is_file():
        return
    # Read line by line: a long run has hundreds of MB, and the page needs only one dict per step.
    with file.open(encoding="utf-8", errors="replace") as lines:
        yield from filter(None, map(_parse_line, lines))


def _parse_line(line: str) -> dict[str, Any] | None:
    """Parse a line. None for a torn line or one of another program."""
    try:
        record = json.loads(line, parse_constant=lambda _: None, parse_float=_float_or_none, parse_int=_int64_or_none)
    except (ValueError, RecursionError):
        return None
    is_ours = isinstance(record, dict) and isinstance(record.get("kind"), str) and isinstance(record.get("step"), int)
    return record if is_ours and all(_has_valid_type(name, value) for name, value in record.items()) else None


def _float_or_none(text: str) -> float | None:
    """Parse a float; None if it is infinite or too large."""
    return value if abs(value := float(text)) <= _LARGEST else None


def _int64_or_none(text: str) -> int | None:
    """Parse an int; None if it does not fit into 64 bits."""
    return value if abs(value := int(text)) < 2**63 else None


def _has_valid_type(name: str, value: Any) -> bool:
    """Return whether a value has the type and range that its name implies.

    A file that another program has touched must not break the page: a line with a string in place of a number is
    dropped.
    """
    if name in _CHECKS:
        return _CHECKS[name](value)
    if name in _NUMBER_FIELDS and not isinstance(value, int | float):
        return False
    if name in ("time", "seconds") or name.startswith("time/"):
        limit = _LATEST_S if name == "time" else _LONGEST_S
        return value is None or (isinstance(value, int | float) and abs(value) <= limit)
    return "/" not in name or isinstance(value, int | float | None)


def _is_list_of(kind: Any, value: Any) -> bool:
    """Return whether a value is a list of a type."""
    return isinstance(value, list) and all(isinstance(each, kind) for each in value)


def _is_dict_of_sizes(value: Any) -> bool:
    """Return whether a value is a dict of whole numbers above 0."""
    return isinstance(value, dict) and all(isinstance(each, int) and each > 0 for each in value.values())


_CHECKS: Mapping[str, Callable[[Any], bool]] = {
    "mesh": _is_dict_of_sizes,
    "experts": lambda value: _is_dict_of_sizes(value) and {"num", "top_k"} <= {*value},
    "experts/max_over_mean": lambda value: _is_list_of(int | float | None, value) and len(value) > 0,
    "load": lambda value: isinstance(value, list) and all(_is_list_of(int | float, each) and each for each in value),
}


def _key(line: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the key under which a later line replaces an earlier one: the step; samples have a number, the best
    checkpoint is separate."""
    return (line["step"], line.get("number", 0), bool(line.get("best")))


def _forget_after(by_kind: Mapping[str, dict[Any, Any]], begins: int) -> None:
    """Drop the lines of steps that a resumed run repeats, and those of its earlier end.

    Samples and evaluations of those steps are dropped with them; starts are kept, because they are the history.
    """
    for kind, lines in by_kind.items():
        for key in [key for key in lines if kind == "end" or (kind != "start" and key[0] > begins)]:
            del lines[key]


def _text(file: Path) -> str:
    """Read a text file."""
    return file.read_text("utf-8", errors="replace")
