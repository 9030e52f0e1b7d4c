"""Steps until the data, the time or somebody's patience ends: evaluated, saved and told on the way."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..data import Batch, Feed
from ..engine import Engine, StepRecord, save
from ..errors import NonFiniteError, RankError
from ..log import logger
from .metrics import Sink
from .stop import Stop

_SKIPS_IN_A_ROW = 3


@dataclass(frozen=True)
class Habits:
    """How often what is done. `limit_s`: after which the run saves and ends."""

    save_every: int
    keep: int | None = None
    keep_every: int | None = None
    eval_every: int = 0
    on_nan: str = "stop"
    limit_s: float = math.inf


@dataclass
class Position:
    """Where a run stands: all that a checkpoint holds beside the engine. `stream`: which the next step begins with."""

    plan: str
    stream: int = 0
    skipped: int = 0

    def as_json(self) -> dict[str, Any]:
        return {"plan": self.plan, "stream": self.stream, "skipped": self.skipped}


@dataclass
class Loop:
    """The training of an engine on what a feed gives, from `position` on. All ranks run it, rank 0 tells of it.

    `held_out`: batches of this data rank, by the name of what they are of.
    """

    engine: Engine
    feed: Feed
    num_steps: int
    position: Position
    folder: Path
    habits: Habits
    stop: Stop
    sinks: Sequence[Sink] = ()
    held_out: Mapping[str, Sequence[Batch]] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic

    def run(self) -> str:
        """Why it ended: "" at the end of the data."""
        self._began, self._saved_at = self.clock(), self.position.stream if self.engine.steps else -1
        why, in_a_row = "", 0
        if self.step_number >= self.num_steps:
            logger.warning("all %d steps are done already", self.num_steps)
        while self.step_number < self.num_steps and not why:
            before = self.clock()
            batches, following = self.feed.step(self.position.stream)
            wait = self.clock() - before
            try:
                record = self.engine.step(batches)
            except NonFiniteError as error:
                in_a_row += 1
                self._skip(error, in_a_row)
                record = None
            self.position.stream = following
            numbers = (float(self.stop.signal or 0), wait, self.clock() - before)
            told = self.engine.model.mesh.all_or_none(None, f"the end of step {self.step_number}", RankError, numbers)
            why = self._why(told)
            if record is not None:
                in_a_row = 0
                self._tell_step(record, wait_s=max(row[1] for row in told), step_s=max(row[2] for row in told))
            self._between(ends=bool(why) or self.step_number == self.num_steps)
        self.engine.wait()
        return why

    @property
    def step_number(self) -> int:
        """Steps that were made or skipped: what has been taken of the data."""
        return self.position.stream // self.feed.streams_per_step

    def _why(self, told: Sequence[Sequence[float]]) -> str:
        """All ranks find the same: a rank that left alone would leave the others waiting."""
        asked = max(int(row[0]) for row in told)
        if asked:
            return f"signal {asked}"
        if math.isinf(self.habits.limit_s):
            return ""
        late = max(row[2] for row in told) + self.clock() - self._began > self.habits.limit_s
        return "the time limit" if self.engine.model.mesh.of_rank_0(late) else ""

    def _skip(self, error: NonFiniteError, in_a_row: int) -> None:
        """The engine has changed nothing, and all ranks have got the same error."""
        if self.habits.on_nan == "stop" or in_a_row == _SKIPS_IN_A_ROW:
            streams = range(self.position.stream, self.position.stream + self.feed.streams_per_step)
            places = [self.feed.place(number) for number in streams]
            raise NonFiniteError(f"{error} It was trained on {'; '.join(places[:4])}") from error
        self.engine.discard()
        self.position.skipped += 1
        logger.warning("%s The step is left out (%d so far)", error, self.position.skipped)

    def _tell_step(self, record: StepRecord, *, wait_s: float, step_s: float) -> None:
        values: dict[str, Any] = {
            "train/loss": record.loss - record.router_loss,
            "train/grad_norm": record.grad_norm,
            "train/learning_rate": record.lr,
            "train/epoch": self.feed.plan.epoch_of(self.position.stream - 1),
            "train/tokens": self.engine.tokens,
            "train/targets": record.num_targets,
            "throughput/tokens_per_s": record.num_tokens / step_s,
            "time/step_s": step_s,
            "time/data_wait_share": wait_s / step_s,
        }
        if record.expert_load is not None:
            load = record.expert_load.double()
            values |= {
                "train/router_loss": record.router_loss,
                "experts/max_over_mean": (load.amax(1) / load.mean(1)).tolist(),
            }
        self._tell("step", values)

    def _tell(self, kind: str, values: Mapping[str, Any]) -> None:
        for sink in self.sinks:
            sink.write(kind, self.step_number, values)

    def _between(self, *, ends: bool) -> None:
        number, habits = self.step_number, self.habits
        if self.held_out and (ends or (habits.eval_every and number % habits.eval_every == 0)):
            self.evaluate()
        if ends or number % habits.save_every == 0:
            self.save(wait=ends)

    def evaluate(self) -> None:
        for name, batches in self.held_out.items():
            loss = self.engine.evaluate(batches)
            perplexity = math.exp(loss) if loss < 700 else math.inf
            self._tell("eval", {f"eval/{name}/loss": loss, f"eval/{name}/perplexity": perplexity})

    def save(self, *, wait: bool) -> None:
        if self._saved_at == self.position.stream:
            return
        began, habits = self.clock(), self.habits
        path = save(
            self.engine, self.folder, keep=habits.keep, keep_every=habits.keep_every, state=self.position.as_json(),
            wait=wait,
        )  # fmt: skip
        self._saved_at = self.position.stream
        self._tell("save", {"path": str(path), "seconds": round(self.clock() - began, 3)})
