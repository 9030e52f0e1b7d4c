"""What a run tells: a line of JSON for each step, evaluation and save, and a line on the terminal."""

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

HISTORY = 256 * 1024  # bytes of metrics.jsonl that are read when a run goes on: the last hundreds of steps
WIDTH = 80  # of a line on a terminal that is none, or a small one


class Sink(Protocol):
    """Where metrics go."""

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None: ...


class JsonLines:
    """A file to which lines are added. Of lines of the same step the last one holds: a run that was killed goes on from
    a checkpoint before its end."""

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self.file = file.open("a", buffering=1)

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        wrong = [name for name, value in values.items() if isinstance(value, float) and not math.isfinite(value)]
        plain = {name: None if name in wrong else value for name, value in values.items()}
        told = {"kind": kind, "step": step, "time": round(time.time(), 3), **plain, **({"nan": wrong} if wrong else {})}
        self.file.write(json.dumps(told) + "\n")


class Lines:
    """A line for each of `every` steps, evaluations and saves, of 80 columns."""

    def __init__(self, num_steps: int, every: int = 1, say: Callable[[str], None] | None = None) -> None:
        self.num_steps, self.every = num_steps, every
        self.say = say or _say

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        if kind == "step":
            if step % self.every == 0 or step == self.num_steps:
                self.say(_step_line(step, self.num_steps, values))
        elif kind == "eval":
            told = "  ".join(f"{name} {number(value, '.4f')}" for name, value in values.items())
            self.say("\n".join(textwrap.wrap(f"step {step}  {told}", WIDTH, subsequent_indent="  ")))
        elif kind == "sample":
            self.say(f"step {step}  sample {values.get('number', '')}: {values['prompt']!r} -> {values['text']!r}")
        elif kind == "save":
            self.say(f"step {step}  save: {values['path']}, {values['seconds']} s")
        elif kind == "end" and values["why"]:
            self.say(f"step {step}  ended by {values['why']}")


def tail_of(file: Path, num_bytes: int) -> bytes:
    """The last whole lines, of which the first may lie further back."""
    if not file.is_file():
        return b""
    with file.open("rb") as opened:
        size = file.stat().st_size
        opened.seek(max(0, size - num_bytes))
        text = opened.read()
    return text if size <= num_bytes else text.partition(b"\n")[2]


def parsed_lines(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Without those that a run was killed in."""
    for line in lines:
        with suppress(json.JSONDecodeError):
            yield json.loads(line)


def last_step(file: Path) -> int:
    """Return the last step that the file tells of; 0 for none."""
    lines = parsed_lines(tail_of(file, HISTORY).decode(errors="replace").splitlines())
    return [0, *(line["step"] for line in lines if line["kind"] == "step")][-1]


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _step_line(step: int, num_steps: int, values: Mapping[str, Any]) -> str:
    left = (num_steps - step) * values["time/step_s"]
    lr = f"  lr {number(values['train/learning_rate'], '.2e')}"
    text = (
        f"step {step:>{len(str(num_steps))}}/{num_steps}  loss {number(values['train/loss'], '.4f')}  "
        f"norm {number(values['train/grad_norm'], '.3g')}{lr}  "
        f"{token_amount(values['throughput/tokens_per_s'])} tok/s  {clock(left)} left"
    )
    return text if len(text) <= WIDTH else text.replace(lr, "")  # which the schedule says as well


def number(value: float | None, spec: str) -> str:
    """JSON has no number for what is none."""
    return "nan" if value is None else format(value, spec)


def token_amount(value: float) -> str:
    """Of tokens: 12,345 or 1.23M."""
    return f"{value:,.0f}" if value < 1e6 else f"{value / 1e6:.2f}M"


def clock(seconds: float) -> str:
    minutes, hours = int(seconds) // 60, int(seconds) // 3600
    if hours >= 100:
        return f"{hours // 24} days"
    return f"{hours}:{minutes % 60:02}:{int(seconds) % 60:02}"


_NEEDS = {"tensorboard": "tensorboard", "wandb": "wandb"}  # package, by field of [log]


def missing_packages(config: Config) -> Iterator[tuple[Place, str]]:
    """Say which packages the config needs that are not installed."""
    for field, package in _NEEDS.items():
        if getattr(config.log, field) and importlib.util.find_spec(package) is None:
            yield ("log", field), f"needs the package {package}: pip install {package}, or leave it out"


def check_sinks(config: Config) -> None:
    """Before any work: a run that finds out at its first step has loaded a model for nothing."""
    for place, why in missing_packages(config):
        raise ConfigError(f"{named(place)} {why}")


def sinks_of(config: Config, out: Path, first_step: int) -> list[Sink]:
    """Those that the config asks for. `first_step`: what a run that goes on writes first; later ones were of an end
    that is forgotten."""
    made: list[Sink] = []
    if config.log.tensorboard:
        made.append(Guarded("TensorBoard", lambda: TensorBoard(out / "tensorboard", first_step)))
    if config.log.wandb:
        made.append(Guarded("Weights & Biases", lambda: WeightsAndBiases(config, out)))
    return made


class Guarded:
    """A sink that is given up at its first failure, which is told."""

    def __init__(self, name: str, make: Any) -> None:
        self.name, self.sink = name, None
        self._try(lambda: setattr(self, "sink", make()))

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        if self.sink is not None:
            self._try(lambda: self.sink.write(kind, step, values))

    def _try(self, act: Any) -> None:
        try:
            act()
        except Exception as error:  # noqa: BLE001 - whatever a service of others does, the training goes on
            self.sink = None
            logger.warning("%s gets no more metrics: %s; OUT/metrics.jsonl has them all", self.name, error)


class TensorBoard:
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
    """The id of the run is kept in OUT, so that a run that goes on is the same there too."""

    def __init__(self, config: Config, out: Path) -> None:
        wandb: Any = importlib.import_module("wandb")
        kept = out / "wandb-id.txt"
        if not kept.is_file():
            kept.write_text(secrets.token_hex(8))
        self.run: Any = wandb.init(
            project=config.log.wandb, id=kept.read_text().strip(), name=out.name, dir=str(out), resume="allow",
            config={"toml": as_toml(config), **config.model_dump()},
        )  # fmt: skip

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        self.run.log(dict(_scalars(values)), step=step)
        if kind == "end":
            self.run.finish()


def _scalars(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Of a list of layers the worst."""
    for name, value in values.items():
        found = max(value) if isinstance(value, list) and value and isinstance(value[0], float) else value
        if "/" in name and isinstance(found, int | float) and math.isfinite(found):
            yield name, float(found)
