"""Fields that an objective needs in every batch: the likeliest tokens of a teacher, the answers of a reranker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ..data import Batch
from ..engine import Model
from ..errors import DataError
from ..mesh import Mesh
from ..objectives import Distill, Rerank, TeacherScores, weights_fingerprint
from ..objectives.distillation import check_vocabularies
from ..weights import local_directory, path_of
from .config import Config
from .data_sources import RowReader, TrainingData, answer_ids, check_tokenizers
from .teacher_files import TeacherFiles, check_no_images, teacher_of

Prepare = Callable[[Sequence[Batch]], Sequence[Batch]]


class BatchFields:
    """Adds the fields of an objective to the batches of a step.

    `key`: what the fields depend on, apart from the batches; a resumed run must have the same key.
    """

    def __init__(self, config: Config, mesh: Mesh, directory: Path) -> None:
        self.key, self._teacher, self._scores, self._answers = "", None, None, (0, 0)
        self._objective = objective = config.objective_options
        section, self._files = config.distill, None
        if isinstance(objective, Distill) and section is not None and section.teacher and section.scores:
            self._files = TeacherFiles(config, objective, mesh, directory)
            self.key = self._files.key
        elif isinstance(objective, Distill) and section is not None and section.scores:
            read = lambda: TeacherScores(path_of(section.scores), objective)  # noqa: E731 - short
            self._scores = mesh.together(read, "the scores of the teacher", DataError, "distill.scores: ")
            self.key = str(self._scores.about["teacher"])
        elif isinstance(objective, Distill) and section is not None:
            teacher = local_directory(section.teacher, mesh)
            check_tokenizers(teacher, directory, "distill.teacher")
            self._teacher, self.key = teacher_of(config, teacher, mesh), weights_fingerprint(teacher, mesh)
        elif isinstance(objective, Rerank):
            self._answers = answer_ids(RowReader.of(config, directory, path_of(config.cache)))

    def score(self, sets: Sequence[TrainingData]) -> None:
        """Compute the teacher scores that the run stores in files and that are missing, before the model is loaded.
        Free the teacher afterwards. Collective."""
        if self._scores is not None or self._files is not None:
            check_no_images(sets)
        if self._files is not None:
            self._scores = self._files.scored(sets)

    def of(self, model: Model) -> Prepare:
        """Return the function that adds the fields, for a model. It is collective for a teacher on the mesh."""
        if self._teacher is not None:
            check_vocabularies(self._teacher, model)
        if isinstance(self._objective, Distill):
            return lambda batches: self._of_teacher(batches, model)
        if isinstance(self._objective, Rerank):
            return lambda batches: [Rerank.with_answers(batch, self._answers) for batch in batches]
        return lambda batches: batches

    def _of_teacher(self, batches: Sequence[Batch], model: Model) -> list[Batch]:
        assert isinstance(self._objective, Distill), "the caller has looked"
        if self._teacher is not None:
            return self._objective.ask(self._teacher, batches, model)
        assert self._scores is not None, "it is one or the other"
        stored, vocab = self._scores, model.blueprint.vocab
        add = lambda: [stored.add_to(batch, vocab) for batch in batches]  # noqa: E731 - short
        # A document may lack scores on one data rank alone, and the others would wait for it.
        return model.mesh.together(add, "the scores of the teacher", DataError, "distill.scores: ")
