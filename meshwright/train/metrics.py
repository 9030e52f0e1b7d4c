"""Metrics of a run and where they go: metrics.jsonl, the terminal, TensorBoard, Weights & Biases.

Rank 0 alone writes them. metrics.jsonl is the record: the live view, `meshwright report` and a resumed run read it.
External services may fail at any time, so their sinks are guarded: a failure loses metrics, never the run.
"""

from __future__ import annotations

import importlib.util
import json
import math
import secrets
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from ..errors import ConfigError
from ..log import logger
from .config import Config, Place, named
from .config_file import as_toml

HISTORY = 256 * 1024  # bytes of metrics.jsonl that are read when a run resumes: some hundreds of steps
WIDTH = 80  # of a line in plain mode


class Sink(Protocol):
    """A destination of metrics. `kind`: "start", "step", "eval", "save", "sample", "experts" or "end"."""

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None: ...


class JsonLines:
    """A sink that appends a JSON object per event to a file.

    A killed run resumes from a checkpoint before its last step, so steps may be repeated: of lines with the same step
    the last one counts. Non-finite numbers, which JSON lacks, become null, and `nan` lists their names.
    """

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self.file = file.open("a", buffering=1)

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        non_finite = [name for name, value in values.items() if isinstance(value, float) and not math.isfinite(value)]
        plain = {name: None if name in non_finite else value for name, value in values.items()}
        event = {
            "kind": kind, "step": step, "time": round(time.time(), 3), **plain,
            **({"nan": non_finite} if non_finite else {}),
        }  # fmt: skip
        self.file.write(json.dumps(event) + "\n")


class Lines:
    """A sink that prints lines of 80 columns: every `every`-th step, and each evaluation, sample and save."""

    def __init__(self, num_steps: int, every: int = 1, say: Callable[[str], None] | None = None) -> None:
        self.num_steps, self.every = num_steps, every
        self.say = say or _say

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        if kind == "step":
            if step % self.every == 0 or step == self.num_steps:
                self.say(_step_line(step, self.num_steps, values))
        elif kind == "eval":
            losses = "  ".join(f"{name} {number(value, '.4f')}" for name, value in values.items())
            self.say("\n".join(textwrap.wrap(f"step {step}  {losses}", WIDTH, subsequent_indent="  ")))
        elif kind == "sample":
            self.say(f"step {step}  sample {values.get('number', '')}: {values['prompt']!r} -> {values['text']!r}")
        elif kind == "save":
            self.say(f"step {step}  save: {values['path']}, {values['seconds']} s")
        elif kind == "end" and values["why"]:
            self.say(f"step {step}  ended by {values['why']}")


def tail_of(file: Path, num_bytes: int) -> bytes:
    """Return the last `num_bytes` of a file without a first line that is cut."""
    if not file.is_file():
        return b""
    with file.open("rb") as opened:
        size = file.stat().st_size
        opened.seek(max(0, size - num_bytes))
        text = opened.read()
    return text if size <= num_bytes else text.partition(b"\n")[2]


def parsed_lines(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Parse lines of JSON, and skip those that are incomplete because the run was killed while it wrote them."""
    for line in lines:
        with suppress(json.JSONDecodeError):
            yield json.loads(line)


def last_step(file: Path) -> int:
    """Return the last step in a metrics file, 0 if it has none."""
    lines = parsed_lines(tail_of(file, HISTORY).decode(errors="replace").splitlines())
    return [0, *(line["step"] for line in lines if line["kind"] == "step")][-1]


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _step_line(step: int, num_steps: int, values: Mapping[str, Any]) -> str:
    """Format a step in 80 columns; the learning rate goes first if they do not suffice."""
    left = (num_steps - step) * values["time/step_s"]
    lr = f"  lr {number(values['train/learning_rate'], '.2e')}"
    accuracy = f"accuracy {number(values['train/accuracy'], '.2f')}  " if "train/accuracy" in values else ""
    text = (
        f"step {step:>{len(str(num_steps))}}/{num_steps}  loss {number(values['train/loss'], '.4f')}  "
        f"{accuracy}norm {number(values['train/grad_norm'], '.3g')}{lr}  "
        f"{token_amount(values['throughput/tokens_per_s'])} tok/s  {clock(left)} left"
    )
    return text if len(text) <= WIDTH else text.replace(lr, "")  # the schedule determines it anyway


def number(value: float | None, spec: str) -> str:
    """Format a number; None is a NaN that went through JSON."""
    return "nan" if value is None else format(value, spec)


def token_amount(value: float) -> str:
    """Format a number of tokens: 12,345 or 1.23M."""
    return f"{value:,.0f}" if value < 1e6 else f"{value / 1e6:.2f}M"


def clock(seconds: float) -> str:
    """Format a duration: 1:02:03, or days from 100 hours on."""
    minutes, hours = int(seconds) // 60, int(seconds) // 3600
    if hours >= 100:
        return f"{hours // 24} days"
    return f"{hours}:{minutes % 60:02}:{int(seconds) % 60:02}"


_NEEDS = {"tensorboard": "tensorboard", "wandb": "wandb"}  # the package that a field of [log] needs


def missing_packages(config: Config) -> Iterator[tuple[Place, str]]:
    """Yield a mistake for each package that the config needs and that is not installed."""
    for field, package in _NEEDS.items():
        if getattr(config.log, field) and importlib.util.find_spec(package) is None:
            yield ("log", field), f"needs the package {package}: pip install {package}, or leave it out"


def check_sinks(config: Config) -> None:
    """Refuse missing packages before the model is loaded, which may take minutes."""
    for place, why in missing_packages(config):
        raise ConfigError(f"{named(place)} {why}")


def sinks_of(config: Config, out: Path, first_step: int) -> list[Sink]:
    """Return the sinks of services that the config names.

    `first_step`: the first step that this start writes. TensorBoard discards what an earlier, killed attempt wrote from
    that step on.
    """
    sinks: list[Sink] = []
    if config.log.tensorboard:
        sinks.append(Guarded("TensorBoard", lambda: TensorBoard(out / "tensorboard", first_step)))
    if config.log.wandb:
        sinks.append(Guarded("Weights & Biases", lambda: WeightsAndBiases(config, out)))
    return sinks


class Guarded:
    """A sink that is dropped, with a warning, at its first failure."""

    def __init__(self, name: str, make: Any) -> None:
        self.name, self.sink = name, None
        self._try(lambda: setattr(self, "sink", make()))

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        if self.sink is not None:
            self._try(lambda: self.sink.write(kind, step, values))

    def _try(self, action: Any) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - no failure of a service may stop the training
            self.sink = None
            logger.warning("%s gets no more metrics: %s; OUT/metrics.jsonl has them all", self.name, error)


class TensorBoard:
    """A sink that writes TensorBoard's event files. They are flushed when something rare happens, not at each step."""

    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder), purge_step=first_step)

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        writer: Any = self.writer
        for name, value in _scalars(values):
            writer.add_scalar(name, value, step)
        if kind == "sample":
            writer.add_text(f"sample/{values['number']}", f"{values['prompt']}\n\n{values['text']}", step)
        if kind in ("eval", "save", "end"):
            writer.flush()


class WeightsAndBiases:
    """A sink for Weights & Biases. Its run id is stored in OUT, so that a resumed run continues the same curves."""

    def __init__(self, config: Config, out: Path) -> None:
        wandb: Any = importlib.import_module("wandb")
        id_file = out / "wandb-id.txt"
        if not id_file.is_file():
            id_file.write_text(secrets.token_hex(8))
        self.run: Any = wandb.init(
            project=config.log.wandb, id=id_file.read_text().strip(), name=out.name, dir=str(out), resume="allow",
            config={"toml": as_toml(config), **config.model_dump()},
        )  # fmt: skip

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        self.run.log(dict(_scalars(values)), step=step)
        if kind == "end":
            self.run.finish()


def _scalars(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the finite scalar metrics; of a list over layers the largest value."""
    for name, value in values.items():
        scalar = max(value) if isinstance(value, list) and value and isinstance(value[0], float) else value
        if "/" in name and isinstance(scalar, int | float) and math.isfinite(scalar):
            yield name, float(scalar)
