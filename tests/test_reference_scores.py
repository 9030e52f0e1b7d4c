"""Reference scores: which streams a chunk scores, where a score goes, what is stored, which model is the reference."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import meshwright as mw
from meshwright.recipe import Lora, Recipe
from meshwright.train import reference_scores
from meshwright.train.reference_scores import Reference, ReferenceScores, WithReference

of = SimpleNamespace
STREAMS = [[4, 0], [2], [5], [1], [6, 3], [7], [8]]  # the documents of each stream
PARTS = np.array([1, 2, 1, 1, 2, 1, 3, 1, 1])
NAN = float("nan")


def places(number: int) -> list[tuple[int, int]]:
    """Return document and part of each document of a stream."""
    return [(d, p) for d in STREAMS[number] for p in range(PARTS[d])] if number < len(STREAMS) else [(0, 0)]


def size(place: tuple[int, int]) -> int:
    return 2 + sum(place) % 3


def scored_tokens(numbers: list[int]) -> list[torch.Tensor]:
    """Return the scores of the tokens of streams. Those of document 7 have no sum in float32."""
    values = [torch.cat([torch.full((size(at),), 10.0 * at[0] + at[1]) for at in places(n)]) for n in numbers]
    return [torch.tensor([2.0**24, 1.0, 99.0]) if n == 5 else each for n, each in zip(numbers, values, strict=True)]


def expected_score(at: tuple[int, int]) -> float:
    """A label is missing at the last token of a document."""
    return 2.0**24 + 1 if at == (7, 0) else (size(at) - 1) * (10.0 * at[0] + at[1])


def feed_of(rank: int) -> Any:
    def step(first: int) -> Any:
        numbers = [first + 2 * m + rank for m in range(2)]
        return of(batches=[mw.pack([[5] * size(at) for at in places(n)]) for n in numbers])

    plan = of(num_streams=7, stream=lambda n: [of(document=d) for d in STREAMS[n]])
    documents = [of(num_parts=PARTS)]
    return of(plan=plan, documents=documents, micro_batches=2, num_ranks=2, rank=rank, streams_per_step=4, step=step)


@pytest.mark.parametrize(("chunk", "rank", "streams"), [(0, 0, [0, 2, 4]), (0, 1, [1, 3]), (1, 0, [5]), (1, 1, [6])])
def test_each_rank_scores_its_own_streams_of_a_chunk(
    chunk: int, rank: int, streams: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk of 5 streams ends inside of a step of 4, and the last chunk has 2."""
    feed, axes, asked = feed_of(rank), list[Any](), iter(range(chunk * 5, 7, 4))

    def logprobs(model: Any, batches: Any) -> list[torch.Tensor]:
        first = next(asked)
        return scored_tokens([first + 2 * m + rank for m in range(2)])

    def gather(rows: Any, over: Any) -> Any:
        axes.append(over)
        return [np.array([[9.0, 1.0, 0.5], [9.0, 0.0, 0.25]]), rows, np.empty((0, 3))]

    monkeypatch.setattr(reference_scores, "_CHUNK", 5)
    monkeypatch.setattr(reference_scores, "logprobs", logprobs)
    scores = ReferenceScores(cast(Any, None), cast(Any, of(gather_objects=gather)), Path(), 8, 2)
    rows = scores._score_chunk(feed, cast(Any, None), chunk)
    own = sorted(at for n in streams for at in places(n))
    expected = [[*at, expected_score(at)] for at in own] + [[9.0, 0.0, 0.25], [9.0, 1.0, 0.5]]
    assert rows.tolist() == expected
    assert rows.dtype == np.float64
    assert axes == [("replicate", "fsdp")]


def test_a_rank_without_streams_of_a_chunk_has_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_scores, "_CHUNK", 1)
    monkeypatch.setattr(reference_scores, "logprobs", lambda *_: scored_tokens([1, 3]))
    mesh: Any = of(gather_objects=lambda rows, _: [rows])
    assert ReferenceScores(cast(Any, None), mesh, Path(), 8, 2)._score_chunk(feed_of(1), Mock(), 0).shape == (0, 3)


def test_a_score_goes_to_its_document_and_part() -> None:
    scores = np.full((4, 3), NAN)
    reference_scores._fill(scores, np.array([[3.0, 1.0, -7.5], [1.0, 2.0, -2.5], [3.0, 0.0, -1.0]]))
    expected = np.full((4, 3), NAN)
    expected[3, 1], expected[1, 2], expected[3, 0] = -7.5, -2.5, -1.0
    assert np.array_equal(scores, expected, equal_nan=True)


def test_a_damaged_chunk_is_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, rows = tmp_path / "key" / "000003", np.array([[1.0, 0.0, -3.25], [2.0, 1.0, 1 / 3]])
    assert reference_scores._read(file) is None
    reference_scores._write(file, rows)
    assert [*file.parent.iterdir()] == [file]
    assert np.array_equal(cast(Any, reference_scores._read(file)), rows)
    assert not caplog.records
    whole = file.read_bytes()
    for harmed in (whole[:-1] + b"x", b"x" + whole[1:], whole[:-24], b""):
        file.write_bytes(harmed)
        assert reference_scores._read(file) is None
    assert len(caplog.records) == 4


class Plan:
    """A plan of some streams, whose fingerprint says how it was made."""

    num_streams = 7

    def __init__(self, sources: Any, *, length: int, epochs: float) -> None:
        self.fingerprint = str((sources, length, epochs))


class Documents:
    name, num_parts, lengths = "some", np.array([1, 2, 1]), np.array([4, 5, 6])

    def __len__(self) -> int:
        return 3

    def place(self, number: int) -> str:
        return f"row {number}"


DOCUMENTS: Any = Documents()
CHUNKS = [[[1.0, 1.0, -1.5]], [[0.0, 0.0, -2.5], [1.0, 0.0, -3.5]], [[2.0, 0.0, -4.5]]]


def mesh_of(rank: int = 0, **changes: Any) -> Any:
    def all_or_none(failure: Any, at: str, error: Any) -> None:
        assert error is mw.errors.RankError
        if failure is not None:
            raise error(f"{at}: {failure}")

    same = dict(data_rank=1, num_data_ranks=2, broadcast_object=lambda value: value)
    return of(rank=rank, all_or_none=all_or_none, **{**same, **changes})


def scores_of(at: Path, monkeypatch: pytest.MonkeyPatch, mesh: Any, key: str = "k") -> ReferenceScores:
    monkeypatch.setattr(reference_scores, "_CHUNK", 3)
    monkeypatch.setattr(reference_scores, "Plan", Plan)
    monkeypatch.setattr(reference_scores, "source_of", lambda documents, length, too_long: f"{length} {too_long}")
    return ReferenceScores(cast(Any, of(key=key)), mesh, at, 8, 5)


def test_chunks_that_are_not_stored_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = scores_of(tmp_path, monkeypatch, mesh_of())
    plan, scores, lacking = stored.stored(DOCUMENTS)
    assert plan.fingerprint == "(['8 drop'], 8, 1)"
    assert scores.shape == (3, 2)
    assert np.isnan(scores).all()
    assert lacking == [0, 1, 2]
    with monkeypatch.context() as patch:
        patch.setattr(Plan, "num_streams", 6)
        assert stored.stored(DOCUMENTS)[2] == [0, 1]  # both are full
    for chunk in (1, 2):
        stored._keep(stored._file(plan, chunk), np.array(CHUNKS[chunk]))
    _, scores, lacking = stored.stored(DOCUMENTS)
    assert np.array_equal(scores, [[-2.5, NAN], [-3.5, NAN], [-4.5, NAN]], equal_nan=True)
    assert lacking == [0]


def test_rank_0_alone_reads_and_writes_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {2: np.array(CHUNKS[2])}
    monkeypatch.setattr(reference_scores, "_read", Mock(side_effect=OSError("another host has no such folder")))
    other = scores_of(tmp_path, monkeypatch, mesh_of(1, broadcast_object=lambda value: known if value == {} else None))
    plan, scores, lacking = other.stored(DOCUMENTS)
    assert (scores[2, 0], lacking) == (-4.5, [0, 1])
    other._keep(other._file(plan, 0), np.array(CHUNKS[0]))
    assert not [*tmp_path.iterdir()]


def test_a_disk_error_of_scores_is_raised_on_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = scores_of(tmp_path, monkeypatch, mesh_of())
    monkeypatch.setattr(reference_scores, "_read", Mock(side_effect=OSError("stale")))
    with pytest.raises(mw.errors.RankError, match=r"reading reference scores in .*: stale"):
        stored.stored(DOCUMENTS)
    monkeypatch.setattr(reference_scores, "_write", Mock(side_effect=OSError("full")))
    with pytest.raises(mw.errors.RankError, match=r"writing reference scores to .*: full"):
        stored._keep(tmp_path / "x", np.array(CHUNKS[0]))


def test_missing_chunks_are_scored_and_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    feeds, scored, advanced, closed = list[Any](), list[int](), list[Any](), list[int]()

    def feed(*args: Any, **options: Any) -> Any:
        feeds.append((args[0], options))
        return of(close=lambda: closed.append(1))

    @contextmanager
    def progress(title: str, total: int, unit: str, *, enabled: bool) -> Any:
        advanced.append((title, total, enabled))
        yield advanced.append

    stored = scores_of(tmp_path, monkeypatch, mesh_of())
    monkeypatch.setattr(reference_scores, "Feed", feed)
    monkeypatch.setattr(reference_scores, "progress", progress)
    monkeypatch.setattr(stored, "_score_chunk", lambda feed, model, n: scored.append(n) or np.array(CHUNKS[n]))
    plan, _, _ = stored.stored(DOCUMENTS)
    stored._keep(stored._file(plan, 1), np.array(CHUNKS[1]))
    scores = stored.score(DOCUMENTS, cast(Any, "model"), cast(Any, "processor"))
    expected = [[-2.5, NAN], [-3.5, -1.5], [-4.5, NAN]]
    assert np.array_equal(scores, expected, equal_nan=True)
    assert scored == [0, 2]
    assert feeds == [([DOCUMENTS], dict(micro_batches=5, rank=1, num_ranks=2, processor="processor"))]
    assert advanced == [("reference scores of some", 4, True), 3, 1]  # the last chunk has one stream
    assert closed == [1]
    _, again, lacking = stored.stored(DOCUMENTS)
    assert np.array_equal(again, expected, equal_nan=True)
    assert lacking == []


def test_documents_without_a_score_are_not_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = scores_of(tmp_path, monkeypatch, mesh_of())
    monkeypatch.setattr(reference_scores, "Feed", lambda *_, **__: of(close=lambda: None))
    monkeypatch.setattr(stored, "_score_chunk", lambda feed, model, n: np.array(CHUNKS[min(n, 1)]))
    with pytest.raises(mw.DataError, match="scores of 1 row are missing, first that of row 2; remove"):
        stored.score(DOCUMENTS, cast(Any, None), None)


def test_chunks_are_kept_apart_by_reference_plan_and_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = []
    for key, plan in (("k", "p"), ("l", "p"), ("k", "q")):
        stored = scores_of(tmp_path, monkeypatch, mesh_of(), key)
        files += [stored._file(cast(Any, of(fingerprint=plan)), n) for n in (0, 12)]
    monkeypatch.setattr(reference_scores, "_CHUNK", 4)
    files.append(stored._file(cast(Any, of(fingerprint="q")), 0))
    monkeypatch.setattr(reference_scores, "_VERSION", 2)
    files.append(stored._file(cast(Any, of(fingerprint="q")), 0))
    assert len({*files}) == len(files)
    assert files[1].name == "000012"
    assert files[0].parent == files[1].parent
    assert files[0].parent.parent == tmp_path


# The reference of a run

LORA, NF4 = dict(lora=Lora(rank=2)), dict(frozen="nf4")


@pytest.mark.parametrize(
    ("named", "recipe", "directory", "expected"),
    [
        ("", {}, "at m", {}), ("", LORA, "at m", {}), ("", {**LORA, **NF4}, "at m", NF4),
        ("", NF4, "at m", {**NF4, "train": "layers.**"}), ("r", {}, "at r", {}), ("r", NF4, "at r", {}),
        ("r", {**LORA, **NF4}, "at r", {}),
    ],
)  # fmt: skip
def test_the_reference_runs_like_the_model_before_training(
    named: str, recipe: dict[str, Any], directory: str, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = Mock()
    monkeypatch.setattr(reference_scores, "local_directory", lambda name, _: f"at {name}")
    monkeypatch.setattr(reference_scores, "model_directory", lambda name: f"at {name}")
    monkeypatch.setattr(reference_scores, "weights_fingerprint", lambda directory, _: f"sum of {directory}")
    monkeypatch.setattr(reference_scores, "check_tokenizers", checked)
    whole = Recipe(train="layers.**", mtp="all", dtype=torch.float64, **recipe)
    config: Any = of(dpo=of(reference=named), model="m", recipe=whole, lora=whole.lora)
    result = Reference.of(config, cast(Any, None))
    assert vars(result.recipe) == vars(Recipe(**{"train": (), "mtp": "carried", "dtype": torch.float64, **expected}))
    assert (result.directory, result.weights) == (directory, f"sum of {directory}")
    assert [each.args for each in checked.call_args_list] == ([("at r", "at m", "dpo.reference")] if named else [])


def test_which_matrices_have_4_bits_is_in_the_key() -> None:
    keys = [
        Reference(Path(), Recipe(train=train, **frozen), "w").key for frozen in (NF4, {}) for train in ("a.**", "b.**")
    ]
    assert keys[0] != keys[1]
    assert keys[2] == keys[3]


def run_with(objective: str = "dpo", named: str = "", **recipe: Any) -> tuple[WithReference, Any]:
    """Return the scores of a run with a set of two sources and one of a single source, and its mesh."""
    sets: Any = [
        mw.train.data_sources.TrainingData([documents(n) for n in names], cast(Any, None), 1, cast(Any, f"p{names}"))
        for names in ("ab", "c")
    ]
    train = of(streams_per_step=12, length=40)
    config: Any = of(objective=objective, dpo=of(reference=named) if objective == "dpo" else None, train=train)
    mesh = of(num_data_ranks=3)
    return WithReference(config, cast(Any, mesh), sets, Path("cache")), mesh


def documents(name: str) -> Any:
    return of(name=name, with_values=lambda values: (name, values))


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> Any:
    reference = of(key="its key", load=Mock(return_value="the reference"))
    monkeypatch.setattr(Reference, "of", lambda config, mesh: reference)
    return reference


@pytest.mark.parametrize(
    ("named", "lacking", "loads", "known"),
    [("", "", 0, True), ("", "c", 0, False), ("r", "", 0, True), ("r", "c", 1, True), ("r", "b", 1, True)],
)
def test_a_named_reference_is_loaded_for_missing_scores_alone(
    named: str, lacking: str, loads: int, known: bool, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores of the model itself wait until it is loaded."""
    run, mesh = run_with(named=named)
    assert run._stored is not None
    assert (run.key, run._stored.micro_batches, run._stored.length) == ("its key", 4, 40)
    assert run._stored.folder == Path("cache/reference")
    stored = lambda each: ("plan", f"scores of {each.name}", [1] if each.name in lacking else [])  # noqa: E731 - short
    score = lambda each, model, processor: f"scores of {each.name}"  # noqa: E731 - short
    monkeypatch.setattr(run._stored, "stored", stored)
    monkeypatch.setattr(run._stored, "score", scored := Mock(side_effect=score))
    run.score_named()
    assert [each.args for each in reference.load.call_args_list] == [(mesh,)] * loads
    assert run._known == ([["scores of a", "scores of b"], ["scores of c"]] if known else None)
    expected = [(d, m, p) for d, m, p in zip("abc", ["the reference"] * 3, ["pab", "pab", "pc"], strict=True)]
    assert [(each.args[0].name, *each.args[1:]) for each in scored.call_args_list] == expected * loads
    own: Any = of(recipe=of(lora=None))
    made = [[*each.documents] for each in run.sets(own)]
    value = lambda name: (name, {"reference": f"scores of {name}"})  # noqa: E731 - short
    assert made == [[value("a"), value("b")], [value("c")]]
    assert len(scored.call_args_list) == 3 * (loads or not known)


@pytest.mark.parametrize("adapters", [True, False])
def test_the_model_scores_without_its_adapters(adapters: bool, reference: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = run_with()
    inside, seen = list[str](), list[Any]()

    @contextmanager
    def base() -> Any:
        inside.append("base")
        yield
        inside.clear()

    model: Any = of(recipe=of(lora=Lora() if adapters else None), base=base if adapters else nullcontext)
    note = lambda *_: seen.append(([*inside], torch.is_grad_enabled())) or "scores"  # noqa: E731 - short
    monkeypatch.setattr(run._stored, "score", note)
    run.sets(model)
    assert seen == [(["base"] if adapters else [], False)] * 3
    run.sets(model)
    assert len(seen) == 3  # known now


def test_other_objectives_have_no_reference(reference: Any) -> None:
    run, _ = run_with("sft")
    run.score_named()
    assert run.key == ""
    assert [[each.name for each in data.documents] for data in run.sets(cast(Any, None))] == [["a", "b"], ["c"]]
    reference.load.assert_not_called()
