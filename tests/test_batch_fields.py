"""Fields that an objective adds to batches: where teacher scores come from, and the key that a resumed run keeps."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

import meshwright as mw
from meshwright.objectives import Distill, Rerank
from meshwright.train import batch_fields
from meshwright.train.batch_fields import BatchFields

of = SimpleNamespace
STUDENT = Path("student")


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for files and models. The key of a directory is its name."""
    monkeypatch.setattr(batch_fields, "local_directory", lambda name, _: Path(f"at {name}"))
    monkeypatch.setattr(batch_fields, "weights_fingerprint", lambda directory, _: f"sum of {directory}")
    monkeypatch.setattr(batch_fields, "teacher_of", lambda config, directory, mesh: f"teacher {directory}")
    monkeypatch.setattr(batch_fields, "check_tokenizers", Mock())
    monkeypatch.setattr(batch_fields, "check_vocabularies", Mock())
    monkeypatch.setattr(batch_fields, "check_no_images", Mock())
    monkeypatch.setattr(batch_fields, "TeacherFiles", lambda *_: of(key="of files", scored=lambda sets: f"of {sets}"))
    monkeypatch.setattr(batch_fields, "TeacherScores", lambda path, _: of(about={"teacher": f"wrote {path}"}))
    monkeypatch.setattr(batch_fields, "RowReader", of(of=lambda config, directory, cache: (directory, cache)))
    monkeypatch.setattr(batch_fields, "answer_ids", lambda reader: (5, 9))


def fields_of(objective: Any, teacher: str | None = None, scores: str | None = None) -> BatchFields:
    mesh = of(together=lambda act, *_: act())
    config = of(objective_options=objective, distill=of(teacher=teacher, scores=scores), cache="cache")
    return BatchFields(cast(Any, config), cast(Any, mesh), STUDENT)


@pytest.mark.parametrize(
    ("teacher", "scores", "key", "refuses_images"),
    [("t", None, "sum of at t", 0), (None, "s", "wrote s", 1), ("t", "s", "of files", 1)],
)
def test_the_key_of_a_teacher(teacher: str | None, scores: str | None, key: str, refuses_images: int) -> None:
    """A teacher on the mesh sees images. Stored scores have none, whoever writes them."""
    fields = fields_of(Distill(), teacher, scores)
    assert fields.key == key
    fields.score(cast(Any, ["a set"]))
    assert cast(Any, batch_fields.check_no_images).call_count == refuses_images
    of_model = cast(Any, of(blueprint=of(vocab=7), mesh=of(together=lambda act, *_: act())))
    fields.of(of_model)
    checked = cast(Any, batch_fields.check_vocabularies).call_args_list
    assert [each.args for each in checked] == [("teacher at t", of_model)] * (scores is None)
    compared = cast(Any, batch_fields.check_tokenizers).call_args_list
    assert [each.args for each in compared] == [(Path("at t"), STUDENT, "distill.teacher")] * (scores is None)


def test_stored_scores_are_added_to_each_batch() -> None:
    fields, model = fields_of(Distill(), "t", "s"), cast(Any, of(blueprint=of(vocab=7)))
    model.mesh = of(together=lambda act, *_: act())
    stored = of(add_to=lambda batch, vocab: f"{batch}, {vocab}")
    fields._files = cast(Any, of(scored=lambda sets: stored))
    fields.score(cast(Any, []))
    assert fields.of(model)(cast(Any, ["a", "b"])) == ["a, 7", "b, 7"]


def test_answers_of_a_reranker_and_nothing_for_the_next_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rerank, "with_answers", staticmethod(lambda batch, ids: (batch, ids)))
    model, batches = cast(Any, of()), cast(Any, ["a", "b"])
    reranks = fields_of(Rerank())
    assert reranks.of(model)(batches) == [("a", (5, 9)), ("b", (5, 9))]
    plain = fields_of(None)
    assert (reranks.key, plain.key, plain.of(model)(batches)) == ("", "", batches)


def test_scores_that_cannot_be_read_are_refused_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    mesh = of(together=lambda act, *words: asked.append(words) or act())
    config = of(objective_options=Distill(), distill=of(teacher="", scores="s"))
    BatchFields(cast(Any, config), cast(Any, mesh), STUDENT)
    assert asked == [("the scores of the teacher", mw.DataError, "distill.scores: ")]
