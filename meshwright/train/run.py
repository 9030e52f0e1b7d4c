"""A run on one rank: build model, engine and data from a config, resume, train, export.

Every rank executes this. The order is that of cost: refusals that need only the config come before the process group,
the data before the model, and an export that would be refused is refused before the first step, not after the last.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from ..engine import (
    Engine,
    Loss,
    Model,
    StepRecord,
    check_export,
    check_export_adapter,
    export,
    export_adapter,
    load,
    losses,
    why_without_class,
)
from ..engine.losses import LossFunction
from ..errors import ConfigError
from ..log import logger
from ..mesh import Mesh
from ..mesh.memory_limits import expand_segments
from ..objectives import Embedding, add_embedding_files
from ..plan.devices import peak_of
from ..plan.step_time import flops_of
from ..weights import path_of
from . import failure
from .batch_fields import BatchFields
from .config import Config
from .config_model import optimizer_of, warn_of_memory
from .data_sources import TrainingData, batches_of, held_out_of, model_directory, training_data
from .lock import Lock, OutInUse, hold
from .loop import EARLY, Loop, LoopOptions, Speed
from .lr_schedule import schedule
from .metrics import JsonLines, Lines, Sink, check_sinks, last_step, sinks_of
from .profiler import Profiler
from .rank import LAUNCHER, handle_signals
from .reference_scores import WithReference
from .resume_point import check_reference, position_of, with_held_out
from .run_record import device_name, sizes_of, write_record
from .samples import Samples, prompts_of
from .step_metrics import BySource
from .thumbnails import write_thumbnails

EXPORT, ADAPTER = "export", "adapter"


class Trainer:
    """A run of `meshwright train` on this rank, for a loop of your own. All ranks of the mesh make one.

    >>> trainer = mw.Trainer(mw.train.read("run.toml"))          # doctest: +SKIP
    >>> for record in trainer.steps():                           # doctest: +SKIP
    ...     print(record.loss)

    Between two steps the model, the engine and everything else are yours. Whatever follows a step (evaluation, samples,
    checkpoints, metrics) has been done when `steps` yields it.
    """

    def __init__(self, config: Config) -> None:
        argument: object = config
        if not isinstance(argument, Config):
            raise ConfigError(
                f"mw.Trainer takes the config of a run, not a {type(argument).__name__}; pass mw.train.read(file) or "
                "mw.train.config_of(model=..., out=..., data=[...]). For a model and steps of your own: mw.Engine"
            )
        check_sinks(config)
        be_deterministic(config.train.deterministic)
        expand_segments(os.environ)
        self.config, self.out = config, path_of(config.out)
        self.mesh = mesh = Mesh(**config.mesh.model_dump(), timeout_s=config.launch.timeout_s)
        self._lock = _lock_of(self.out, mesh)  # before anything else touches OUT
        torch.manual_seed(config.seed * mesh.axes.world + mesh.rank)  # only a loss of the user draws random numbers
        warn_of_memory(config, mesh)
        directory, cache = model_directory(config.model), path_of(config.cache)
        self.data, held_out = training_data(config, directory, cache), held_out_of(config, directory, cache)
        # Dropped documents change what is trained on: rank 0 says so once, at the start.
        for each in (self.data, *held_out.values()) if mesh.rank == 0 else ():
            for line in each.left_out():
                logger.warning("%s", line)
        prompts = prompts_of(config.sample, config.data[0], directory)
        reference = WithReference(config, mesh, [self.data, *held_out.values()], cache)
        fields = BatchFields(config, mesh, directory)
        check_reference(config, mesh, reference.key or fields.key)  # before hours of scoring
        reference.score_named()
        fields.score([self.data, *held_out.values()])
        self.model = load(config.model, mesh, **vars(config.recipe))
        if isinstance(config.objective_options, Embedding):
            asked = config.objective_options
            add_embedding_files(self.model, query_prompt=asked.query_prompt, document_prompt=asked.document_prompt)
        if config.save.export:
            self._check_export()
        # Before a checkpoint is loaded: the model is the reference.
        self.data, *others = reference.sets(self.model)
        held_out = dict(zip(held_out, others, strict=True))
        self.engine = _engine(config, self.model, self.data)
        position = position_of(config, self.engine, self.data, reference.key or fields.key)
        fingerprints = {name: each.plan.fingerprint for name, each in held_out.items()}
        self.position = with_held_out(position, fingerprints, mesh.rank)
        self.prepare = fields.of(self.model)
        self.feed = self.data.feed(mesh, config.train.streams_per_step // mesh.num_data_ranks)
        self.held_out = {name: batches_of(each, mesh) for name, each in held_out.items()}
        self.sample = None if prompts is None else Samples(self.engine, prompts, config)
        self.sinks: list[Sink] = []  # opened by `steps`, on rank 0: a Trainer that never trains writes nothing
        self.why = ""  # why the run ended before its data, if it did

    def steps(self) -> Iterator[StepRecord | None]:
        """Train, and yield the record of each step after everything that follows it, None for a skipped step.

        A signal ends the run after the current step and a save.
        """
        if self.mesh.rank == 0:
            write_record(self.out, self.config, self.model)
            write_thumbnails(self.out, self.data)
            self.sinks.append(failure.Overcome(self.out, last_step(self.out / "metrics.jsonl")))
            self.sinks += [JsonLines(self.out / "metrics.jsonl"), Lines(self.data.num_steps, self.config.log.every)]
            self.sinks += sinks_of(self.config, self.out, self._first_step)
        with handle_signals() as stop, Profiler(self.model, self.out, self.config.log.profile) as profiler:
            loop = Loop(
                self.engine, self.feed, self.data.num_steps, self.position, self.out, _loop_options(self.config), stop,
                _speed(self.model), self.sinks, self.held_out, self.sample, self.prepare, profiler.step,
            )  # fmt: skip
            loop.begin(self._start_metrics())
            yield from loop.steps()
            self.why = loop.why
            # The launcher then knows that this rank ended by the signal, saved, and not by a failure.
            if stop.signal is not None and self.why == f"signal {stop.signal}":
                failure.record_signal(stop.signal, self.mesh.rank)
        self.feed.close()

    def run(self) -> str:
        """Train to the end and export. Return why the run ended early, "" at the end of the data.

        Early stopping is a normal end: it exports too.
        """
        for _ in self.steps():
            pass
        if self.why in ("", EARLY) and self.config.save.export:
            self._export()
        return "" if self.why == EARLY else self.why

    @property
    def _writes_adapter(self) -> bool:
        """Return whether OUT/adapter is written: if adapters alone are trained, and a class of transformers loads them.
        Others need a merged export."""
        alone = all(self.model.table[name].adapter for name in self.model.trained)
        loadable = alone and not why_without_class(self.model.blueprint)
        return self.config.lora is not None and (loadable or not self.config.save.merged)

    def _check_export(self) -> None:
        """Refuse now what the export at the end would refuse."""
        if self._writes_adapter:
            check_export_adapter(self.model, self.out / ADAPTER, overwrite=True)
        if self.config.lora is None or self.config.save.merged:
            check_export(self.model, self.out / EXPORT, overwrite=True, merge=self.config.save.merged)

    def _export(self) -> None:
        """Write OUT/export; with adapters OUT/adapter, and OUT/export if it is to be merged."""
        if self._writes_adapter:
            export_adapter(self.model, self.out / ADAPTER, overwrite=True)
        if self.config.lora is None or self.config.save.merged:
            export(self.model, self.out / EXPORT, overwrite=True, merge=self.config.save.merged)

    @property
    def _first_step(self) -> int:
        """The number of the first step of this start, counted from 1."""
        return self.position.stream // self.config.train.streams_per_step + 1

    def _start_metrics(self) -> dict[str, object]:
        """Return the values of the "start" event, which the live view and the report need to read the others."""
        axes, balance = self.mesh.axes, self.model.blueprint.balance
        experts = {"num": balance.num_experts, "top_k": balance.top_k}
        return {
            "num_steps": self.data.num_steps,
            "world": axes.world,
            "mesh": sizes_of(axes),
            "tokens_per_step": self.config.train.step_tokens,
            "from": self._first_step - 1,
            "writes": self.model.blueprint.head == "lm" and self.config.objective != "rerank",
            **({"experts": experts} if balance.num_experts else {}),
        }


def run(config: Config) -> str:
    """Train on this rank. Collective. Return why the run ended early, "" at the end of the data."""
    return Trainer(config).run()


def _lock_of(out: Path, mesh: Mesh) -> Lock | None:
    """Lock OUT on rank 0, unless its launcher holds the lock. All ranks refuse an OUT that another run holds."""
    lock, refusal = None, ""
    if mesh.rank == 0 and LAUNCHER not in os.environ:
        try:
            lock = hold(out)
        except OutInUse as error:
            refusal = str(error)
    if refusal := mesh.broadcast_object(refusal):
        raise OutInUse(refusal)
    return lock


def be_deterministic(enabled: bool) -> None:
    """Switch on deterministic operations, before a device is used: cuBLAS reads its workspace setting only once."""
    if enabled:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def _engine(config: Config, model: Model, data: TrainingData) -> Engine:
    """Create the engine. With several sources the cross-entropy also accumulates that of each."""
    optim, several, objective = config.optim, len(data.documents) > 1, config.objective_options
    loss: Loss | LossFunction = BySource(len(data.documents)) if several else losses.cross_entropy
    return Engine(
        model, lr=schedule(optim, data.num_steps), optimizer=optimizer_of(optim),
        max_norm=None if optim.max_norm is False else optim.max_norm, router_aux=config.train.router_aux,
        loss=loss if objective is None else objective.loss,
    )  # fmt: skip


def _loop_options(config: Config) -> LoopOptions:
    """Translate the sections of the file into options of the loop."""
    hours, save, held_out = config.train.time_limit, config.save, config.eval
    return LoopOptions(
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
    """Return the FLOPs of a token and the peak of all devices; the peak is unknown for devices not in the table."""
    peak = peak_of(device_name(model.mesh.device))
    flops = flops_of(model.blueprint, {*model.trained})
    return Speed(flops, None if peak is None else peak * model.mesh.axes.world)
