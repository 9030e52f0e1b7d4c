"""Stored teacher scores: which sets are scored, with which K and dtype, on which rank, and by which teacher."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch

import meshwright as mw
from meshwright.objectives import Distill
from meshwright.objectives.teacher_scores import ABOUT, FORMAT
from meshwright.recipe import Lora, Recipe
from meshwright.train import teacher_files
from meshwright.train.teacher_files import TeacherFiles

of = SimpleNamespace
OBJECTIVE = Distill(top_k=7, temperature=2.0)


def test_a_teacher_has_the_layout_of_the_student_and_its_own_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher_files, "load", load := Mock())
    recipe = Recipe(
        train="layers.**", lora=Lora(), mtp="all", frozen="nf4", fp8="block", fp8_skip=("*.o",), dtype=torch.float64,
        head="lm", tower=True, mtp_weight=0.5,
    )  # fmt: skip
    teacher_files.teacher_of(cast(Any, of(recipe=recipe)), Path("teacher"), cast(Any, "mesh"))
    expected = Recipe(train=(), mtp="carried", dtype=torch.float64, head="lm", tower=True, mtp_weight=0.5)
    load.assert_called_once_with(Path("teacher"), "mesh", **vars(expected))


def a_set(name: str, num_streams: int = 7) -> Any:
    plan = of(fingerprint=name, num_streams=num_streams)
    return of(plan=plan, documents=[of(name=name, num_views=torch.zeros(2))])


def test_marked_sets_have_all_their_scores(tmp_path: Path) -> None:
    sets = [a_set("a"), a_set("b"), a_set("c")]
    teacher_files._mark(tmp_path, sets[1]).touch()
    assert teacher_files.lacking(tmp_path, sets) == [sets[0], sets[2]]


def test_a_folder_without_scores_passes(tmp_path: Path) -> None:
    teacher_files.check_stored(tmp_path, OBJECTIVE, "t")
    (tmp_path / ABOUT).write_text(json.dumps(dict(format=FORMAT, temperature=2.0, teacher="t", top_k=9)))
    teacher_files.check_stored(tmp_path, OBJECTIVE, "t")
    teacher_files.check_stored(tmp_path, OBJECTIVE)
    for wanted, teacher, message in (
        (OBJECTIVE, "another", "is wanted.*another directory"),
        (replace(OBJECTIVE, top_k=10), "t", "top_k=9"),
        (replace(OBJECTIVE, temperature=3.0), "t", r"teacher\.json.*temperature=2\.0, and 3\.0"),
    ):
        with pytest.raises(mw.MeshwrightError, match=message):
            teacher_files.check_stored(tmp_path, wanted, teacher)


def test_images_in_any_source_of_any_set_are_refused() -> None:
    sets: Any = [of(documents=[of(name=n, num_views=torch.tensor(v)) for n, v in each]) for each in (
        [("a", [0, 0]), ("b", [0])], [("c", [0]), ("d", [0, 2])],
    )]  # fmt: skip
    teacher_files.check_no_images(sets[:1])
    with pytest.raises(mw.DataError, match="d has images"):
        teacher_files.check_no_images(sets)


def files_of(at: Path, monkeypatch: pytest.MonkeyPatch, rank: int = 0, **changes: Any) -> TeacherFiles:
    """Return the files of the scores in a folder, on a rank of 3."""

    def together(act: Any, at: str, error: Any, what: str) -> Any:
        assert (error, what) == (mw.DataError, "distill.scores: ")
        together.calls.append(at)  # type: ignore[attr-defined]
        return act()

    together.calls = list[str]()  # type: ignore[attr-defined]

    mesh = of(rank=rank, num_data_ranks=3, together=together, broadcast_object=lambda value: value)
    mesh = of(**{**vars(mesh), **changes})
    config: Any = of(distill=of(scores=str(at), teacher="t"), train=of(streams_per_step=12), recipe=Recipe())
    monkeypatch.setattr(teacher_files, "local_directory", lambda name, _: Path(f"at {name}"))
    monkeypatch.setattr(teacher_files, "check_tokenizers", Mock())
    monkeypatch.setattr(teacher_files, "weights_fingerprint", lambda directory, _: f"sum of {directory}")
    monkeypatch.setattr(teacher_files, "teacher_of", lambda config, directory, mesh: f"teacher {directory}")
    return TeacherFiles(config, OBJECTIVE, cast(Any, mesh), Path("student"))


def test_scores_of_another_teacher_are_refused_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher_files, "check_stored", check := Mock())
    files = files_of(tmp_path, monkeypatch)
    assert files.key == "sum of at t"
    check.assert_called_once_with(tmp_path, OBJECTIVE, "sum of at t")
    cast(Any, teacher_files.check_tokenizers).assert_called_once_with(Path("at t"), Path("student"), "distill.teacher")


@pytest.mark.parametrize(
    ("rank", "numbers", "expected"), [(0, None, ["a", "c"]), (1, [2], ["c"]), (1, [], None), (0, [], None)]
)
def test_rank_0_decides_which_sets_are_scored(
    tmp_path: Path, rank: int, numbers: list[int] | None, expected: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank may see a new file later than rank 0."""
    sets = [a_set("a"), a_set("b"), a_set("c")]
    teacher_files._mark(tmp_path, sets[1]).touch()
    broadcast = lambda value: value if numbers is None else numbers  # noqa: E731 - short
    files = files_of(tmp_path, monkeypatch, rank, broadcast_object=broadcast)
    scored, read = list[list[str]](), Mock(return_value="the scores")
    monkeypatch.setattr(teacher_files, "TeacherScores", read)
    monkeypatch.setattr(files, "_score", lambda sets: scored.append([each.plan.fingerprint for each in sets]))
    assert cast(Any, files.scored(sets)) == "the scores"
    assert scored == ([] if expected is None else [expected])
    read.assert_called_once_with(tmp_path, OBJECTIVE, teacher="sum of at t")
    assert cast(Any, files._mesh.together).calls == ["the stored scores of the teacher"] * 2


@pytest.mark.parametrize(
    ("about", "top_k", "dtype"),
    [(None, 7, "float32"), ({"top_k": 9, "dtype": "float64"}, 9, "float64"), ({"top_k": 8}, 8, "float32")],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_scores_are_added_as_the_folder_has_them(
    tmp_path: Path, rank: int, about: dict[str, Any] | None, top_k: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder may hold more tokens than the objective asks for. Rank 0 marks the sets after the last score."""
    monkeypatch.setattr(teacher_files, "check_stored", Mock())
    files, sets, made = files_of(tmp_path, monkeypatch, rank), [a_set("a"), a_set("b")], list[Any]()
    if about is not None:
        (tmp_path / ABOUT).write_text(json.dumps(about))

    @contextmanager
    def writer(*args: Any, **options: Any) -> Any:
        made.append((args, options))
        yield "writer"
        assert teacher_files.lacking(tmp_path, sets) == sets  # a mark says that the writer has ended

    monkeypatch.setattr(teacher_files, "TeacherScoresWriter", writer)
    monkeypatch.setattr(files, "_score_set", lambda data, writer: made.append((data.plan.fingerprint, writer)))
    files._score(sets)
    stored = Distill(top_k=top_k, temperature=2.0)
    arguments = (tmp_path, stored, "teacher at t"), dict(teacher="sum of at t", dtype=dtype)
    assert made == [arguments, ("a", "writer"), ("b", "writer")]
    assert teacher_files.lacking(tmp_path, sets) == (sets if rank else [])


def test_all_streams_of_a_set_are_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """25 streams in steps of 12: the last step has one."""
    closed, advanced, scored = Mock(), list[Any](), list[str]()

    @contextmanager
    def progress(title: str, total: int, unit: str, *, enabled: bool) -> Any:
        advanced.append((title, total, enabled))
        yield advanced.append

    def feed(mesh: Any, micro_batches: int) -> Any:
        assert micro_batches == 4
        streams = micro_batches * mesh.num_data_ranks
        return of(streams_per_step=streams, close=closed, step=lambda first: of(batches=f"from {first}"))

    monkeypatch.setattr(teacher_files, "progress", progress)
    data = of(documents=[of(name="a"), of(name="b")], plan=of(num_streams=25), feed=feed)
    files_of(tmp_path, monkeypatch)._score_set(cast(Any, data), cast(Any, of(score=scored.append)))
    assert scored == ["from 0", "from 12", "from 24"]
    assert advanced == [("teacher's scores of a, b", 25, True), 12, 12, 1]
    closed.assert_called_once_with()
