"""The training loop: steps, and between them evaluation, samples, checkpoints and metrics.

The loop ends with the data, at a time limit, by early stopping, or after a signal. Every rank runs it and must take the
same branches: most of what happens between steps is collective, and a rank that took another branch would leave the
others waiting. So whatever one rank alone can know (a signal, the clock, a file) is exchanged before any decision
depends on it.
"""

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

from ..checkpoint import CHECKPOINTS, remove_later
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
_SKIPS_IN_A_ROW = 3  # this many are no outlier: the run has diverged
_EXPERT_LOAD_EVERY = 10  # steps between two records of the load of every expert, layers x experts numbers


@dataclass(frozen=True)
class LoopOptions:
    """Intervals of evaluations, saves and samples, and the conditions for an early end.

    Intervals are in steps, 0 for never. `keep`: how many checkpoints stay, None for all. `patience`: the number of
    evaluations in a row without a lower loss that ends the run, None for no early stopping. `limit_s`: seconds after
    which the run saves and ends.
    """

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
    """The inputs of MFU. `peak`: operations per second of all devices together, None if unknown.

    Model FLOPs utilisation counts what the model needs, so recomputation does not raise it (PaLM, arXiv:2204.02311).
    """

    flops: Flops
    peak: float | None = None


@dataclass
class Loop:
    """The loop over the steps of a feed, from `position` to `num_steps`. All ranks run it; rank 0 has the sinks.

    `held_out`: this data rank's batches of each held-out set, by name. `sample`: returns pairs of prompt and generated
    text. `prepare`: adds the fields that an objective needs to the batches of a step. `traced`: a context manager
    around each step and what follows it, for the profiler.
    """

    engine: Engine
    feed: Feed
    num_steps: int
    position: Position
    folder: Path
    options: LoopOptions
    stop: Stop
    speed: Speed
    sinks: Sequence[Sink] = ()
    held_out: Mapping[str, Sequence[Batch]] = field(default_factory=dict)
    sample: Callable[[], Sequence[tuple[str, str]]] | None = None
    prepare: Callable[[Sequence[Batch]], Sequence[Batch]] = lambda batches: batches
    traced: Callable[[], AbstractContextManager[None]] = nullcontext
    clock: Callable[[], float] = time.monotonic
    why: str = ""  # why the run ended before its data, if it did
    _writing: tuple[int, dict[str, object]] | None = None  # step and metrics of a save that is not complete yet
    _unlogged_load: Mapping[str, Any] | None = None  # of the last step, which was not recorded

    def run(self) -> str:
        """Run all steps. Return why the loop ended, "" at the end of the data."""
        for _ in self.steps():
            pass
        return self.why

    def steps(self) -> Iterator[StepRecord | None]:
        """Yield each step's record after everything that follows the step, None for a skipped one.

        A generator, so that `Trainer.steps` can hand control to a user's loop between steps.
        """
        self._began, self._saved_at = self.clock(), self.position.stream if self.engine.steps else -1
        self._skips_in_a_row, self.why = 0, self._out_of_patience()
        if self.why or self.step_number >= self.num_steps:
            logger.warning("nothing left to do: %s", self.why or f"all {self.num_steps} steps are done")
        while self.step_number < self.num_steps and not self.why:
            with self.traced():
                record, measured = self._step()
                self.why = self._why(measured)
                if record is not None:
                    self._log_step(record, measured)
                self._after_step()
            yield record
        self.engine.wait()
        self._log_saved()
        if self._unlogged_load is not None:
            self._log("experts", self._unlogged_load)  # the report shows the last step
        self._log("end", {"why": self.why})

    def begin(self, values: Mapping[str, Any]) -> None:
        """Log the start of the run, or of a resumed part of it."""
        self._log("start", values)

    @property
    def step_number(self) -> int:
        """The number of steps so far, skipped ones included: the part of the data that is used up."""
        return self.position.stream // self.feed.streams_per_step

    def _step(self) -> tuple[StepRecord | None, Measured]:
        """Run one step and exchange its measurements. The record is None if the step was skipped."""
        before, self._unlogged_load = self.clock(), None
        with region("wait for data"):
            batches, next_stream = self.feed.step(self.position.stream)
        wait = self.clock() - before
        record = None
        try:
            record = self.engine.step(self.prepare(batches))
            self._skips_in_a_row = 0
        except NonFiniteError as error:
            self._skip(error)
        self.position.stream = next_stream
        # A skipped step made forward passes too; `take` must empty its sums, or the next step would count them.
        by_source = self.engine.loss.take() if isinstance(self.engine.loss, BySource) else []
        signal, took = int(self.stop.signal or 0), self.clock() - before
        reading = Reading(signal, wait, took, squares_of(batches), by_source)
        return record, gather_readings(self.engine.model.mesh, reading, f"the end of step {self.step_number}")

    def _why(self, measured: Measured) -> str:
        """Return why the run ends after this step, "" if it continues. All ranks return the same.

        The run ends if one more step of this length would pass the time limit, since a job scheduler kills what is
        late. Clocks of ranks differ, so rank 0's decides.
        """
        if measured.signal:
            return f"signal {measured.signal}"
        if math.isinf(self.options.limit_s):
            return ""
        late = measured.step_s + self.clock() - self._began > self.options.limit_s
        return "the time limit" if self.engine.model.mesh.broadcast_object(late) else ""

    def _skip(self, error: NonFiniteError) -> None:
        """Skip a step with a non-finite loss or norm, or raise an error that names its documents.

        The engine has changed no parameter and raises the same error on all ranks, so all skip together. The learning
        rate follows the number of updates, which does not change.
        """
        self._skips_in_a_row += 1
        if self.options.on_nan == "stop" or self._skips_in_a_row == _SKIPS_IN_A_ROW:
            streams = range(self.position.stream, self.position.stream + self.feed.streams_per_step)
            places = [self.feed.place(number) for number in streams]
            raise NonFiniteError(f"{error} The step's data: {'; '.join(places[:4])}") from error
        self.engine.discard()
        self.position.skipped += 1
        logger.warning("%s The step is skipped (%d so far)", error, self.position.skipped)

    def _log_step(self, record: StepRecord, measured: Measured) -> None:
        """Log the metrics of a step. Names with a slash group them in TensorBoard and Weights & Biases."""
        bound = self.engine.max_norm
        values: dict[str, Any] = {
            "train/loss": record.loss - record.router_loss,  # without the aux loss, as `evaluate` computes it
            "train/grad_norm": record.grad_norm,
            "train/clipped": int(bound is not None and record.grad_norm > bound),
            "train/learning_rate": record.lr,
            "train/epoch": round(self.feed.plan.epochs_before(self.position.stream), 4),
            "train/tokens": self.engine.tokens,
            "train/targets": record.num_targets,
            "throughput/tokens_per_s": record.num_tokens / measured.step_s,
            "time/step_s": measured.step_s,
            "time/data_wait_share": measured.wait_s / measured.step_s,
            "memory/peak_bytes": measured.peak_bytes,
            "memory/rank": measured.peak_rank,
            **{f"train/{name}": value for name, value in record.metrics.items()},
        }
        if self.speed.peak is not None:
            flops = self.speed.flops.of(record.num_tokens, measured.squares)
            values["throughput/mfu"] = flops / measured.step_s / self.speed.peak
        for documents, (total, num) in zip(self.feed.documents, measured.sources, strict=False):
            values |= {f"train/loss/{documents.name}": total / num} if num else {}
        if record.mtp is not None:
            values |= {"train/mtp_loss": record.mtp.loss, "train/mtp_acceptance": record.mtp.acceptance}
        if record.expert_load is not None:
            values |= self._expert_metrics(record, record.expert_load.double())
        self._log("step", values)

    def _expert_metrics(self, record: StepRecord, load: torch.Tensor) -> dict[str, Any]:
        """Return the metrics of the experts, and log the whole load [layers, experts] now and then."""
        self._unlogged_load = {"load": load.long().tolist()}
        if self.step_number % _EXPERT_LOAD_EVERY == 1:
            self._log("experts", self._unlogged_load)
            self._unlogged_load = None
        return {
            "train/router_loss": record.router_loss,
            "experts/max_over_mean": (load.amax(1) / load.mean(1)).tolist(),
            "experts/dead": int((load == 0).sum()),
        }

    def _log(self, kind: str, values: Mapping[str, Any], step: int | None = None) -> None:
        """Write one event to all sinks."""
        for sink in self.sinks:
            sink.write(kind, self.step_number if step is None else step, values)

    def _after_step(self) -> None:
        """Evaluate, sample and save if their intervals say so, or at the end of the data.

        A run that ends early saves, but makes no extra evaluation: the resumed run must take the same decisions (early
        stopping, best checkpoint) as one that never stopped.
        """
        if self.engine.saving is None or self.engine.saving.succeeded:
            self._log_saved()
        number, options, last = self.step_number, self.options, self.step_number == self.num_steps
        if self.held_out and (last or _is_multiple(number, options.eval_every)):
            self.evaluate()
        if self.sample is not None and (last or _is_multiple(number, options.sample_every)):
            with region("sample"):
                samples = self.sample()
            for index, (prompt, text) in enumerate(samples):
                self._log("sample", {"number": index, "prompt": prompt, "text": text})
        ends = last or bool(self.why)
        if ends or _is_multiple(number, options.save_every):
            self.save(wait=ends or options.wait)

    def evaluate(self) -> float:
        """Log the loss of each held-out set and return their mean.

        A new lowest mean saves the best checkpoint; otherwise patience may end the run.
        """
        with region("evaluate"):
            losses, values = dict[str, float](), dict[str, float]()
            for name, batches in self.held_out.items():
                losses[name] = loss = self.engine.evaluate(self.prepare(batches))
                figures = self.engine.metrics or {"perplexity": perplexity_of(loss)}
                values |= {f"eval/{name}/{figure}": value for figure, value in {"loss": loss, **figures}.items()}
        self._log("eval", values)
        mean, position, options = statistics.fmean(losses.values()), self.position, self.options
        if math.isfinite(mean) and (position.lowest is None or mean < position.lowest):
            position.lowest, position.since = mean, 0
            if options.best:
                self._save_best()
        else:
            position.since += 1
            self.why = self.why or self._out_of_patience()
        return mean

    def _out_of_patience(self) -> str:
        """Return the reason for early stopping if it applies, else "". A resumed run checks it before any step."""
        patience = self.options.patience
        return EARLY if patience is not None and self.position.since >= patience else ""

    def _save_best(self) -> None:
        """Save to OUT/best, and remove what an earlier start saved there at a later step.

        A run that resumes from a checkpoint before its best step takes that step a second time, maybe with other
        options: the new weights replace the old ones.
        """
        self._save(BEST, keep=1, wait=self.options.wait)

    def save(self, *, wait: bool) -> None:
        """Save a checkpoint of the run, unless the last one is of this position."""
        if self._saved_at == self.position.stream:
            return
        self._save(CHECKPOINTS, keep=self.options.keep, wait=wait)
        self._saved_at = self.position.stream

    def _save(self, name: str, *, keep: int | None, wait: bool) -> None:
        """Save to OUT/`name`. The metrics of the save are logged once its checkpoint is complete."""
        began, every = self.clock(), self.options.keep_every if name == CHECKPOINTS else None
        state = asdict(self.position)
        with region("save"):
            path = save(self.engine, self.folder / name, keep=keep, keep_every=every, state=state, wait=wait)
        self._log_saved()  # the previous save, for which this one has waited
        values = {"path": str(path), "seconds": round(self.clock() - began, 3)}
        self._writing = self.step_number, values | ({"best": True} if name == BEST else {})
        if wait:
            self._log_saved()

    def _log_saved(self) -> None:
        """Log the pending save, which is complete by now.

        A background save can still fail, and readers of metrics.jsonl rely on every checkpoint that it names.
        """
        if self._writing is not None:
            (step, values), self._writing = self._writing, None
            self._log("save", values, step)
            if values.get("best"):
                self._remove_undone(Path(str(values["path"])))

    def _remove_undone(self, best: Path) -> None:
        """Remove later steps beside a new best: an earlier start saved them, and this one takes their steps again."""
        model = self.engine.model
        if model.mesh.rank == 0:
            try:
                remove_later(best, model.small.directory)
            except OSError as error:
                logger.warning("later steps beside %s could not be removed: %s", best, error)


def perplexity_of(loss: float) -> float:
    """Return e to the loss; `math.exp` overflows above 709."""
    return math.inf if loss >= 700 else math.exp(loss)


def _is_multiple(number: int, every: int) -> bool:
    """Return whether something with this interval happens at a step; 0 is never."""
    return every > 0 and number % every == 0
