"""Steps until the data, the time or somebody's patience ends: evaluated, saved and told on the way."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..checkpoint import CHECKPOINTS, final_place, newest_whole
from ..data import Batch, Feed
from ..engine import Engine, StepRecord, save
from ..errors import NonFiniteError
from ..log import logger
from ..plan.step_time import Flops
from ..watch import region
from .metrics import Sink
from .rank import Stop
from .resume_point import Position
from .step_metrics import BySource, Measured, Reading, gather_readings, squares_of

BEST = "best"
EARLY = "early stopping"
_SKIPS_IN_A_ROW = 3
_MATRIX_EVERY = 10  # steps between two whole matrices of the load of experts


@dataclass(frozen=True)
class Habits:
    """How often what is done. `limit_s`: after which the run saves and ends. `patience`: so many evaluations in a row
    without a lower loss end it; None for any number."""

    save_every: int
    keep: int | None = None
    keep_every: int | None = None
    wait: bool = False
    eval_every: int = 0
    best: bool = False
    patience: int | None = None
    sample_every: int = 0
    on_nan: str = "stop"
    limit_s: float = math.inf


@dataclass(frozen=True)
class Speed:
    """What a step is measured by. `peak`: operations a second of all devices together, where they are known."""

    flops: Flops
    peak: float | None = None


@dataclass
class Loop:
    """The training of an engine on what a feed gives, from `position` on. All ranks run it, rank 0 tells of it.

    `held_out`: batches of this data rank, by the name of what they are of. `sample` gives prompts and what the model
    writes after them. `traced`: around each step with all that is due after it.
    """

    engine: Engine
    feed: Feed
    num_steps: int
    position: Position
    folder: Path
    habits: Habits
    stop: Stop
    speed: Speed
    sinks: Sequence[Sink] = ()
    held_out: Mapping[str, Sequence[Batch]] = field(default_factory=dict)
    sample: Callable[[], Sequence[tuple[str, str]]] | None = None
    traced: Callable[[], AbstractContextManager[None]] = nullcontext
    clock: Callable[[], float] = time.monotonic
    why: str = ""  # the run ended before the data did
    _writing: tuple[int, dict[str, object]] | None = None  # the save whose checkpoint is not whole yet: step, values
    _unwritten_load: Mapping[str, Any] | None = None  # of the experts in the last step

    def run(self) -> str:
        """Why it ended: "" at the end of the data."""
        for _ in self.steps():
            pass
        return self.why

    def steps(self) -> Iterator[StepRecord | None]:
        """After each step, with all that is due then done: what it was, or None for one that was left out."""
        self._began, self._saved_at = self.clock(), self.position.stream if self.engine.steps else -1
        self._in_a_row, self.why = 0, self._out_of_patience()
        if self.why or self.step_number >= self.num_steps:
            logger.warning("nothing is left to do: %s", self.why or f"all {self.num_steps} steps are done")
        while self.step_number < self.num_steps and not self.why:
            with self.traced():
                record, told = self._step()
                self.why = self._why(told)
                if record is not None:
                    self._tell_step(record, told)
                self._between()
            yield record
        self.engine.wait()
        self._tell_saved()
        if self._unwritten_load is not None:
            self._tell("experts", self._unwritten_load)  # the report shows the last step too
        self._tell("end", {"why": self.why})

    def begin(self, about: Mapping[str, Any]) -> None:
        self._tell("start", about)

    @property
    def step_number(self) -> int:
        """Steps that were made or skipped: what has been taken of the data."""
        return self.position.stream // self.feed.streams_per_step

    def _step(self) -> tuple[StepRecord | None, Measured]:
        before, self._unwritten_load = self.clock(), None
        with region("wait for data"):
            batches, following = self.feed.step(self.position.stream)
        wait = self.clock() - before
        record = None
        try:
            record = self.engine.step(batches)
            self._in_a_row = 0
        except NonFiniteError as error:
            self._skip(error)
        self.position.stream = following
        of_sources = self.engine.loss.take() if isinstance(self.engine.loss, BySource) else []
        signal, took = int(self.stop.signal or 0), self.clock() - before
        reading = Reading(signal, wait, took, squares_of(batches), of_sources)
        return record, gather_readings(self.engine.model.mesh, reading, f"the end of step {self.step_number}")

    def _why(self, told: Measured) -> str:
        """All ranks find the same: a rank that left alone would leave the others waiting."""
        if told.signal:
            return f"signal {told.signal}"
        if math.isinf(self.habits.limit_s):
            return ""
        late = told.step_s + self.clock() - self._began > self.habits.limit_s
        return "the time limit" if self.engine.model.mesh.broadcast_object(late) else ""

    def _skip(self, error: NonFiniteError) -> None:
        """The engine has changed nothing, and all ranks have got the same error."""
        self._in_a_row += 1
        if self.habits.on_nan == "stop" or self._in_a_row == _SKIPS_IN_A_ROW:
            streams = range(self.position.stream, self.position.stream + self.feed.streams_per_step)
            places = [self.feed.place(number) for number in streams]
            raise NonFiniteError(f"{error} It was trained on {'; '.join(places[:4])}") from error
        self.engine.discard()
        self.position.skipped += 1
        logger.warning("%s The step is left out (%d so far)", error, self.position.skipped)

    def _tell_step(self, record: StepRecord, told: Measured) -> None:
        bound = self.engine.max_norm
        values: dict[str, Any] = {
            "train/loss": record.loss - record.router_loss,
            "train/grad_norm": record.grad_norm,
            "train/clipped": int(bound is not None and record.grad_norm > bound),
            "train/learning_rate": record.lr,
            "train/epoch": round(self.feed.plan.epochs_before(self.position.stream), 4),
            "train/tokens": self.engine.tokens,
            "train/targets": record.num_targets,
            "throughput/tokens_per_s": record.num_tokens / told.step_s,
            "time/step_s": told.step_s,
            "time/data_wait_share": told.wait_s / told.step_s,
            "memory/peak_bytes": told.peak_bytes,
            "memory/rank": told.peak_rank,
        }
        if self.speed.peak is not None:
            flops = self.speed.flops.of(record.num_tokens, told.squares)
            values["throughput/mfu"] = flops / told.step_s / self.speed.peak
        for documents, (total, num) in zip(self.feed.documents, told.sources, strict=False):
            values |= {f"train/loss/{documents.name}": total / num} if num else {}
        if record.expert_load is not None:
            values |= self._of_experts(record, record.expert_load.double())
        self._tell("step", values)

    def _of_experts(self, record: StepRecord, load: torch.Tensor) -> dict[str, Any]:
        self._unwritten_load = {"load": load.long().tolist()}
        if self.step_number % _MATRIX_EVERY == 1:
            self._tell("experts", self._unwritten_load)
            self._unwritten_load = None
        return {
            "train/router_loss": record.router_loss,
            "experts/max_over_mean": (load.amax(1) / load.mean(1)).tolist(),
            "experts/dead": int((load == 0).sum()),
        }

    def _tell(self, kind: str, values: Mapping[str, Any], step: int | None = None) -> None:
        for sink in self.sinks:
            sink.write(kind, self.step_number if step is None else step, values)

    def _between(self) -> None:
        """A run that ends before its time does what is due, and no more: it will go on as if it had not ended."""
        if self.engine.saving is None or self.engine.saving.succeeded:
            self._tell_saved()
        number, habits, last = self.step_number, self.habits, self.step_number == self.num_steps
        if self.held_out and (last or _is_due(number, habits.eval_every)):
            self.evaluate()
        if self.sample is not None and (last or _is_due(number, habits.sample_every)):
            with region("sample"):
                said = self.sample()
            for at, (prompt, text) in enumerate(said):
                self._tell("sample", {"number": at, "prompt": prompt, "text": text})
        ends = last or bool(self.why)
        if ends or _is_due(number, habits.save_every):
            self.save(wait=ends or habits.wait)

    def evaluate(self) -> float:
        """The mean loss of the held-out sets, each of which is told. The lowest so far is kept where that is wished."""
        with region("evaluate"):
            found = {name: self.engine.evaluate(batches) for name, batches in self.held_out.items()}
        perplexities = {name: math.exp(loss) if loss < 700 else math.inf for name, loss in found.items()}
        told = {f"eval/{name}/loss": loss for name, loss in found.items()}
        self._tell("eval", told | {f"eval/{name}/perplexity": each for name, each in perplexities.items()})
        mean, position, habits = statistics.fmean(found.values()), self.position, self.habits
        if math.isfinite(mean) and (position.lowest is None or mean < position.lowest):
            position.lowest, position.since = mean, 0
            if habits.best:
                self._save_best()
        else:
            position.since += 1
            self.why = self.why or self._out_of_patience()
        return mean

    def _out_of_patience(self) -> str:
        patience = self.habits.patience
        return EARLY if patience is not None and self.position.since >= patience else ""

    def _save_best(self) -> None:
        """A run that goes on from before it finds it again, and leaves it as it is."""
        mesh, folder = self.engine.model.mesh, self.folder / BEST
        found = mesh.broadcast_object(newest_whole(folder) if mesh.rank == 0 else None)
        if found is None or found.name != final_place(folder, self.engine.steps).name:
            self._save(BEST, keep=1, wait=self.habits.wait)

    def save(self, *, wait: bool) -> None:
        if self._saved_at == self.position.stream:
            return
        self._save(CHECKPOINTS, keep=self.habits.keep, wait=wait)
        self._saved_at = self.position.stream

    def _save(self, name: str, *, keep: int | None, wait: bool) -> None:
        began, every = self.clock(), self.habits.keep_every if name == CHECKPOINTS else None
        state = asdict(self.position)
        with region("save"):
            path = save(self.engine, self.folder / name, keep=keep, keep_every=every, state=state, wait=wait)
        self._tell_saved()  # of the save before, which this one has waited for
        values = {"path": str(path), "seconds": round(self.clock() - began, 3)}
        self._writing = self.step_number, values | ({"best": True} if name == BEST else {})
        if wait:
            self._tell_saved()

    def _tell_saved(self) -> None:
        """Tell of a checkpoint, which is whole by now: one that is written in the background may fail until then."""
        if self._writing is not None:
            (step, values), self._writing = self._writing, None
            self._tell("save", values, step)


def _is_due(number: int, every: int) -> bool:
    return every > 0 and number % every == 0
