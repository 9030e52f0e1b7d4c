"""Where metrics go beside OUT/metrics.jsonl: TensorBoard, Weights & Biases. A dead sink never stops a run."""

from __future__ import annotations

import importlib.util
import math
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..log import logger
from .config import Config
from .fields import Place, named
from .metrics import Sink
from .toml import as_toml

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
