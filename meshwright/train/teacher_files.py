"""Stored teacher scores for the data of a run: missing ones are computed once, before the student is loaded.

The documents of a set are those of its packing plan. Once all of them have scores, a file `complete-KEY` says so, and
later starts neither load the teacher nor look for documents without scores.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from ..engine import Model, load
from ..errors import DataError
from ..log import progress
from ..mesh import Mesh
from ..objectives import Distill, TeacherScores, TeacherScoresWriter, weights_fingerprint
from ..objectives.teacher_scores import ABOUT
from ..weights import local_directory, path_of, read_json
from .config import Config
from .data_sources import TrainingData, check_tokenizers

Made = TypeVar("Made")


def teacher_of(config: Config, directory: Path, mesh: Mesh) -> Model:
    """Load a teacher, frozen. It has the layout of the student, and runs as its files have it: nothing is quantised."""
    recipe = replace(config.recipe, train=(), lora=None, mtp="carried", frozen=None, fp8=None, fp8_skip=())
    return load(directory, mesh, **vars(recipe))


def lacking(folder: Path, sets: Sequence[TrainingData]) -> list[TrainingData]:
    """Return the sets whose scores in `folder` are not known to be complete."""
    return [data for data in sets if not _mark(folder, data).is_file()]


def check_stored(folder: Path, objective: Distill, teacher: str = "") -> None:
    """Refuse scores of another teacher, at another temperature, or with a smaller K. A folder without scores passes."""
    if (folder / ABOUT).is_file():
        TeacherScores(folder, objective, teacher=teacher)


def check_no_images(sets: Sequence[TrainingData]) -> None:
    """Refuse data with images: scores are stored by tokens, which do not hold them."""
    for documents in (each for data in sets for each in data.documents):
        if documents.num_views.any():
            raise DataError(
                f"distill.scores: {documents.name} has images, and scores are stored by tokens, which do not hold "
                "them; leave scores out, and give distill.teacher, which then scores each step"
            )


class TeacherFiles:
    """The scores of the teacher `distill.teacher` in the directory `distill.scores`. All ranks make one.

    `key`: the checksum of the teacher's weights.
    """

    def __init__(self, config: Config, objective: Distill, mesh: Mesh, student: Path) -> None:
        assert config.distill is not None, "the caller has looked"
        self._config, self._objective, self._mesh = config, objective, mesh
        self._folder = path_of(config.distill.scores)
        self._teacher = local_directory(config.distill.teacher, mesh)
        check_tokenizers(self._teacher, student, "distill.teacher")
        self.key = weights_fingerprint(self._teacher, mesh)
        check = lambda: check_stored(self._folder, objective, self.key)  # noqa: E731 - short
        self._together(check, "the stored scores of the teacher")

    def scored(self, sets: Sequence[TrainingData]) -> TeacherScores:
        """Return the stored scores, after computing missing ones. Collective."""
        numbers = [n for n, data in enumerate(sets) if lacking(self._folder, [data])]
        to_score = [sets[n] for n in self._mesh.broadcast_object(numbers)]  # rank 0 looks: others may see files later
        if to_score:
            self._score(to_score)
        read = lambda: TeacherScores(self._folder, self._objective, teacher=self.key)  # noqa: E731 - short
        return self._together(read, "the stored scores of the teacher")

    def _score(self, sets: Sequence[TrainingData]) -> None:
        about = read_json(self._folder / ABOUT) if (self._folder / ABOUT).is_file() else {}
        stored = replace(self._objective, top_k=about.get("top_k", self._objective.top_k))  # it may be larger
        dtype, teacher = str(about.get("dtype", "float32")), teacher_of(self._config, self._teacher, self._mesh)
        with TeacherScoresWriter(self._folder, stored, teacher, teacher=self.key, dtype=dtype) as writer:
            for data in sets:
                self._score_set(data, writer)

        def mark() -> None:
            for data in sets if not self._mesh.rank else ():
                _mark(self._folder, data).touch()

        self._together(mark, "the end of teacher scores")

    def _score_set(self, data: TrainingData, writer: TeacherScoresWriter) -> None:
        micro_batches = self._config.train.streams_per_step // self._mesh.num_data_ranks
        feed, total = data.feed(self._mesh, micro_batches), data.plan.num_streams
        title = f"teacher's scores of {', '.join(each.name for each in data.documents)}"
        with contextlib.closing(feed), progress(title, total, "streams", enabled=not self._mesh.rank) as advance:
            for first in range(0, total, feed.streams_per_step):
                writer.score(feed.step(first).batches)
                advance(min(feed.streams_per_step, total - first))

    def _together(self, act: Callable[[], Made], at: str) -> Made:
        return self._mesh.together(act, at, DataError, "distill.scores: ")


def _mark(folder: Path, data: TrainingData) -> Path:
    key = f"{data.plan.fingerprint} {data.plan.num_streams}"
    return folder / f"complete-{hashlib.sha256(key.encode()).hexdigest()[:32]}"
