"""A run on one rank: model, engine and data of a config, trained from where the last checkpoint stands."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from ..engine import Engine, Model, StepRecord, check_export, export, load, losses
from ..errors import ConfigError
from ..log import logger
from ..mesh import Mesh
from ..plan.devices import peak_of
from ..plan.step_time import flops_of
from ..weights import path_of
from . import failure
from .config import Config
from .config_model import optimizer_of, warn_of_memory
from .data_sources import TrainingData, batches_of, held_out_of, model_directory, training_data
from .lock import Lock, OutInUse, hold
from .loop import EARLY, Habits, Loop, Speed
from .lr_schedule import schedule
from .metrics import JsonLines, Lines, Sink, check_sinks, last_step, sinks_of
from .profiler import Profiler
from .rank import LAUNCHER, listening
from .resume_point import position_of
from .run_record import device_name, sizes_of, write_record
from .samples import Samples, prompts_of
from .step_metrics import BySource

EXPORT = "export"


class Trainer:
    """A run of `meshwright train` on this rank, for a loop of your own. All ranks of the mesh make one.

    >>> trainer = mw.Trainer(mw.train.read("run.toml"))          # doctest: +SKIP
    >>> for record in trainer.steps():                           # doctest: +SKIP
    ...     print(record.loss)

    Between two steps the model, the engine and everything else are yours. What is due after a step (evaluation,
    samples, checkpoints, metrics) is done when it is handed out.
    """

    def __init__(self, config: Config) -> None:
        given: object = config
        if not isinstance(given, Config):
            raise ConfigError(
                f"mw.Trainer takes the config of a run, not a {type(given).__name__}; give mw.train.read(file) or "
                "mw.train.config_of(model=..., out=..., data=[...]). For a model and steps of your own: mw.Engine"
            )
        check_sinks(config)
        be_deterministic(config.train.deterministic)
        self.config, self.out = config, path_of(config.out)
        self.mesh = mesh = Mesh(**config.mesh.model_dump(), timeout_s=config.launch.timeout_s)
        self._lock = _lock_of(self.out, mesh)
        torch.manual_seed(config.seed * mesh.axes.world + mesh.rank)  # the engine draws nothing; a loss may
        warn_of_memory(config, mesh)
        directory, cache = model_directory(config.model), path_of(config.cache)
        self.data, held_out = training_data(config, directory, cache), held_out_of(config, directory, cache)
        for each in (self.data, *held_out.values()) if mesh.rank == 0 else ():
            for line in each.left_out():
                logger.warning("%s", line)
        prompts = prompts_of(config.sample, config.data[0], directory)
        self.model = load(config.model, mesh, **vars(config.recipe))
        if config.save.export:
            check_export(self.model, self.out / EXPORT, overwrite=True)
        self.engine = _engine(config, self.model, self.data)
        self.position = position_of(config, self.engine, self.data)
        self.feed = self.data.feed(mesh, config.train.streams_per_step // mesh.num_data_ranks)
        self.held_out = {name: batches_of(each, mesh) for name, each in held_out.items()}
        self.sample = None if prompts is None else Samples(self.engine, prompts, config)
        self.sinks: list[Sink] = []
        self.why = ""  # the run ended before the data did

    def steps(self) -> Iterator[StepRecord | None]:
        """Train, and give each step when all that was due after it is done; None for one that was left out. Signals
        end it after a step, saved."""
        if self.mesh.rank == 0:
            write_record(self.out, self.config, self.model)
            self.sinks.append(failure.Overcome(self.out, last_step(self.out / "metrics.jsonl")))
            self.sinks += [JsonLines(self.out / "metrics.jsonl"), Lines(self.data.num_steps, self.config.log.every)]
            self.sinks += sinks_of(self.config, self.out, self._first_step)
        with listening() as stop, Profiler(self.model, self.out, self.config.log.profile) as profiler:
            loop = Loop(
                self.engine, self.feed, self.data.num_steps, self.position, self.out, _habits(self.config), stop,
                _speed(self.model), self.sinks, self.held_out, self.sample, profiler.step,
            )  # fmt: skip
            loop.begin(self._beginning())
            yield from loop.steps()
            self.why = loop.why
            if stop.signal is not None and self.why == f"signal {stop.signal}":
                failure.record_signal(stop.signal, self.mesh.rank)
        self.feed.close()

    def run(self) -> str:
        """All steps, and the export. Why it ended early, "" at the end of the data."""
        for _ in self.steps():
            pass
        if self.why in ("", EARLY) and self.config.save.export:
            export(self.model, self.out / EXPORT, overwrite=True)
        return "" if self.why == EARLY else self.why

    @property
    def _first_step(self) -> int:
        return self.position.stream // self.config.train.streams_per_step + 1

    def _beginning(self) -> dict[str, object]:
        axes, balance = self.mesh.axes, self.model.blueprint.balance
        experts = {"num": balance.num_experts, "top_k": balance.top_k}
        return {
            "num_steps": self.data.num_steps,
            "world": axes.world,
            "mesh": sizes_of(axes),
            "tokens_per_step": self.config.train.step_tokens,
            "from": self._first_step - 1,
            **({"experts": experts} if balance.num_experts else {}),
        }


def run(config: Config) -> str:
    """Train on this rank. All ranks of the mesh call it. Returns why it ended early, "" otherwise."""
    return Trainer(config).run()


def _lock_of(out: Path, mesh: Mesh) -> Lock | None:
    """Rank 0 holds OUT, unless its launcher does. All ranks refuse one that another run holds."""
    found, told = None, ""
    if mesh.rank == 0 and LAUNCHER not in os.environ:
        try:
            found = hold(out)
        except OutInUse as error:
            told = str(error)
    if told := mesh.broadcast_object(told):
        raise OutInUse(told)
    return found


def be_deterministic(wished: bool) -> None:
    """Before a device is used: its library of products reads the environment once."""
    if wished:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def _engine(config: Config, model: Model, data: TrainingData) -> Engine:
    optim, several = config.optim, len(data.documents) > 1
    return Engine(
        model, lr=schedule(optim, data.num_steps), optimizer=optimizer_of(optim),
        max_norm=None if optim.max_norm is False else optim.max_norm, router_aux=config.train.router_aux,
        loss=BySource(len(data.documents)) if several else losses.cross_entropy,
    )  # fmt: skip


def _habits(config: Config) -> Habits:
    hours, save, held_out = config.train.time_limit, config.save, config.eval
    return Habits(
        save_every=save.every,
        keep=None if save.keep == "all" else save.keep,
        keep_every=save.keep_every,
        wait=save.wait,
        eval_every=held_out.every,
        best=held_out.best,
        patience=config.train.early_stopping,
        sample_every=config.sample.every,
        on_nan=config.train.on_nan,
        limit_s=math.inf if hours is None else 3600 * hours,
    )


def _speed(model: Model) -> Speed:
    peak = peak_of(device_name(model.mesh.device))
    flops = flops_of(model.blueprint, {*model.trained})
    return Speed(flops, None if peak is None else peak * model.mesh.axes.world)
