"""Sections of a run file become sources, plans and cache keys: which settings count, in which order, and how often."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from meshwright.errors import ConfigError, DataError
from meshwright.objectives import ROW, Classify, Distill, Dpo, Embedding, Rerank, Reward
from meshwright.train import data_sources
from meshwright.train.config import Config, DataSection, SourceSection
from meshwright.train.data_sources import RowReader
from tests import tiny
from tests.templates import GOOD, tokenizer

NOWHERE = Path("nowhere")


def config(*sources: dict[str, Any], **sections: Any) -> Config:
    return Config.model_validate({"model": "m", "out": "o", "data": [*sources] or [{"path": "x"}], **sections})


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Write a model directory without weights."""
    at = tmp_path / "model"
    tokenizer().save_pretrained(at)
    (at / "chat_template.jinja").write_text(GOOD["hybrid"])
    (at / "config.json").write_text(json.dumps(tiny.of("qwen3", vocab_size=400)))
    return at


def test_the_cache_key_has_all_that_an_objective_changes() -> None:
    objectives: list[Any] = [
        None, Dpo(), Reward(), Classify(labels=("a", "b")), Classify(labels=("b", "a")), Embedding(),
        Embedding(query_prompt="q: "), Embedding(document_prompt="q: "), Rerank(), Rerank(instruction="x"),
        Rerank(answers=("yes", "no")),
    ]  # fmt: skip
    keys = [RowReader(NOWHERE, NOWHERE, objective=each).rows_key for each in objectives]
    assert len({*keys}) == len(keys)
    assert keys[:3] == ["", "pairs", "scored_pairs"]
    assert RowReader(NOWHERE, NOWHERE, objective=Distill()).rows_key == ""  # the same documents as without a teacher


def test_the_cache_key_has_all_settings_that_change_tokens(model: Path, tmp_path: Path) -> None:
    reader, plain = RowReader(model, tmp_path), SourceSection(path="x")
    (tmp_path / "t").write_text(GOOD["plain"])
    key = lambda reader=reader, **changes: data_sources.maker(plain.model_copy(update=changes), reader)[1]  # noqa: E731
    same = key()
    assert key(path="y", name="n", too_long="cut", on_bad="skip") == same
    keys = [
        same, key(kind="text"), key(kind="tokens"), key(fields={"messages": "m"}), key(thinking=False),
        key(thinking=True), key(turns="last"), key(template=str(tmp_path / "t")), key(template_args={"a": 1}),
        key(replace(reader, objective=Dpo())), key(replace(reader, objective=Reward())),
        key(kind="text", fields={"text": "m"}),
    ]  # fmt: skip
    (tmp_path / "t").write_text(GOOD["hybrid"])
    keys.append(key(template=str(tmp_path / "t")))
    (model / "config.json").write_text(json.dumps(tiny.of("qwen3", vocab_size=401)))
    keys.append(key(kind="tokens"))
    assert key() == same
    tokens = json.loads((model / "tokenizer.json").read_text())
    (model / "tokenizer.json").write_text(json.dumps(tokens, indent=1))
    keys += [key(), key(kind="text"), key(replace(reader, objective=Embedding()))]
    assert len({*keys}) == len(keys)


def test_images_are_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_sources, "read_config", lambda _: {})
    monkeypatch.setattr(data_sources, "placeholders_of", lambda _: (7, 8))
    make = lambda row: row  # noqa: E731
    assert data_sources._without_images(make, "k", RowReader(NOWHERE, NOWHERE)) == (make, "k")
    checked, key = data_sources._without_images(make, "k", RowReader(NOWHERE, NOWHERE, tower=True))
    assert checked is not make
    assert key == "k (7, 8)"


def test_classes_are_named_by_label(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_sources, "answer_ids", lambda _: (30, 20))
    names = [
        RowReader(NOWHERE, NOWHERE, objective=each).names_of_classes
        for each in (Classify(labels=("c", "a", "b")), Rerank(answers=("n", "y")), Dpo(), None)
    ]
    assert names == [{0: "c", 1: "a", 2: "b"}, {30: "n", 20: "y"}, {}, {}]


def test_names_of_sources_are_as_short_as_they_are_unique() -> None:
    sections = [
        SourceSection(path="a/x.jsonl"), SourceSection(path=["b/x.jsonl", "c"]), SourceSection(path=["d/y", "e/z"]),
        SourceSection(path="f/w", name="n"), SourceSection(path="g/n"),
    ]  # fmt: skip
    assert data_sources.names_of(sections) == ["a/x.jsonl", "b/x.jsonl, c", "y", "n", "g/n"]


@pytest.mark.parametrize(
    ("kind", "rows", "given", "policy"),
    [
        ("text", "documents", None, "cut"), ("text", "pairs", None, "stop"), ("chat", "documents", None, "stop"),
        ("tokens", "documents", None, "stop"), ("text", "documents", "drop", "drop"),
        ("chat", "documents", "cut", "cut"),
    ],
)  # fmt: skip
def test_only_plain_texts_are_cut_unasked(kind: Any, rows: str, given: Any, policy: str) -> None:
    assert data_sources.overlong_policy(SourceSection(path="x", kind=kind, too_long=given), rows) == policy


def test_paths_of_images_start_from_the_data(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    cases = {
        str(tmp_path / "d"): tmp_path / "d", str(tmp_path / "d" / "x.jsonl"): tmp_path / "d",
        (str(tmp_path / "x.jsonl"), "/elsewhere/y"): tmp_path,
    }  # fmt: skip
    for path, root in cases.items():
        section = SourceSection(path=path if isinstance(path, str) else [*path])
        assert data_sources._root(section) == root
    assert data_sources._root(SourceSection(path="x", images={"root": "/r"})) == Path("/r")


def test_only_missing_paths_without_a_suffix_are_hub_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "there").mkdir(parents=True)
    paths = ["org/name", "org/there", "org/chats.jsonl", "name", "/org/name"]
    assert [data_sources._is_of_hub(path) for path in paths] == [True, False, False, False, False]
    (tmp_path / "a.jsonl").touch()
    data_sources.check_source_files(SourceSection(path=["a.jsonl", "org/name"]))
    with pytest.raises(DataError):
        data_sources.check_source_files(SourceSection(path=["a.jsonl", "b.jsonl"]))
    for option in ("hf_subset", "hf_split", "hf_revision"):
        with pytest.raises(DataError, match="leave them out"):
            data_sources.check_source_files(SourceSection(path="a.jsonl", **{option: "x"}))


def test_all_failures_of_sources_are_reported_at_once() -> None:
    def fail(text: str) -> int:
        raise DataError(text)

    assert data_sources.all_of([lambda: 2, lambda: 1]) == [2, 1]
    with pytest.raises(DataError, match=r"^a$"):
        data_sources.all_of([lambda: 2, lambda: fail("a")])
    with pytest.raises(DataError, match=r"^a\nb$"):
        data_sources.all_of([lambda: fail("a"), lambda: 2, lambda: fail("b")])


class Rows:
    """Documents of some rows."""

    def __init__(self, *rows: int) -> None:
        self.rows, self.values = rows, dict[str, Any]()

    def __len__(self) -> int:
        return len(self.rows)

    def row_numbers(self) -> Any:
        return np.array(self.rows, dtype=np.float64)

    def with_values(self, values: dict[str, Any]) -> Rows:
        result = Rows(*self.rows)
        result.values = values
        return result


def test_rows_of_retrieval_have_numbers_of_their_own_in_all_sources() -> None:
    documents: Any = [Rows(0, 0, 1), Rows(0, 1), Rows(0, 0)]
    numbered: Any = data_sources._numbered(documents, RowReader(NOWHERE, NOWHERE, objective=Embedding()))
    assert [each.values[ROW].tolist() for each in numbered] == [[0, 0, 1], [3, 4], [5, 5]]
    assert data_sources._numbered(documents, RowReader(NOWHERE, NOWHERE, objective=Dpo())) == documents


def ids(at: Path, *sizes: int) -> str:
    at.write_text("".join(json.dumps({"ids": [n + 1] * size}) + "\n" for n, size in enumerate(sizes)))
    return str(at)


def of_ids(model: Path, tmp_path: Path, **sections: Any) -> Config:
    train = {"length": 10, "tokens_per_step": 30, **sections.pop("train", {})}
    first, second = ids(tmp_path / "a.jsonl", *[10] * 4), ids(tmp_path / "b.jsonl", *[5] * 6)
    return config(
        dict(path=first, kind="tokens", weight=2.0), dict(path=second, kind="tokens", weight=0.5), model=str(model),
        train=train, **sections,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("train", "streams", "steps"),
    [({}, 10, 4), (dict(epochs=2.0), 20, 7), (dict(steps=2), 6, 2), (dict(tokens=31), 6, 2)],
)
def test_a_plan_has_the_weights_and_the_end_of_the_config(
    model: Path, tmp_path: Path, train: dict[str, Any], streams: int, steps: int
) -> None:
    """An epoch reads 8 full documents, and 3 that fill half a stream each."""
    data = data_sources.training_data(of_ids(model, tmp_path, train=train, seed=5), model, tmp_path / "cache")
    assert (data.plan.num_streams, data.num_steps) == (streams, steps)
    assert [*data.plan.weights] == [2.0, 0.5]
    assert (data.plan.seed, data.plan.length) == (5, 10)
    assert [each.name for each in data.documents] == ["a.jsonl", "b.jsonl"]
    assert data.processor is None


def test_a_plan_has_the_shares_of_the_config(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, source_of = list[Any](), data_sources.source_of
    noted = lambda *given, **by: asked.append(by["share"]) or source_of(*given, **by)  # noqa: E731
    monkeypatch.setattr(data_sources, "source_of", noted)
    plain = of_ids(model, tmp_path, train=dict(steps=2))
    shares = [each.model_copy(update={"share": s}) for each, s in zip(plain.data, (0.25, 0.75), strict=True)]
    data_sources.training_data(plain.model_copy(update={"data": shares}), model, tmp_path / "cache")
    assert asked == [0.25, 0.75]


def test_held_out_sets_keep_their_names(model: Path, tmp_path: Path) -> None:
    paths = [ids(tmp_path / "c.jsonl", 10, 10, 9), ids(tmp_path / "d.jsonl", 12, 7)]
    sets = [dict(path=path, name=name, kind="tokens", too_long="drop") for path, name in zip(paths, "zy", strict=True)]
    made = data_sources.held_out_of(of_ids(model, tmp_path, eval=dict(sets=sets)), model, tmp_path / "cache")
    assert [*made] == ["z", "y"]
    assert [(each.num_steps, len(each.documents)) for each in made.values()] == [(3, 1), (1, 1)]
    assert [[*each.left_out()] for each in made.values()] == [[], ["1 document of y longer than 10 tokens left out"]]
    for section, names in ((sets[0], ["z"]), ({**sets[0], "name": ""}, ["held-out"]), ({}, [])):
        assert [*data_sources.sections_of(config(eval=section))] == names


def test_all_ranks_have_the_same_number_of_batches() -> None:
    asked, closed = list[Any](), list[bool]()

    def step(first: int) -> Any:
        return SimpleNamespace(batches=[first, "another"])

    feed = SimpleNamespace(step=step, close=lambda: closed.append(True))
    data: Any = SimpleNamespace(
        plan=SimpleNamespace(num_streams=7), feed=lambda mesh, micro_batches: asked.append(micro_batches) or feed
    )
    mesh: Any = SimpleNamespace(num_data_ranks=3)
    assert [*data_sources.batches_of(data, mesh)] == [0, 3, 6]
    assert (asked, closed) == ([1], [True])


def test_a_prompt_is_formatted_as_its_source(model: Path) -> None:
    known = copy.deepcopy(tokenizer())  # other tests share it
    plain = data_sources.prompter(DataSection(path="x", kind="text"), model, known)("Hi")
    assert known.decode(plain) == "Hi"
    known.chat_template = GOOD["hybrid"]
    asked = data_sources.prompter(DataSection(path="x"), model, known)("Hi")
    assert known.decode(asked).startswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant")


def test_the_prompt_of_a_reranker_is_that_of_its_model_card() -> None:
    asked = list[Any]()
    chat: Any = SimpleNamespace(request=lambda messages: asked.append(messages) or SimpleNamespace(ids=[3, 4]))
    prompt = data_sources.RerankPrompt(chat, Rerank(instruction="I", answers=("n", "y")))
    assert prompt("Q", "D") == [3, 4]
    [[system, user]] = asked
    assert system["role"] == "system"
    assert system["content"].endswith('Note that the answer can only be "y" or "n".')
    assert user == {"role": "user", "content": "<Instruct>: I\n<Query>: Q\n<Document>: D"}


def test_a_model_is_a_directory_or_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_sources, "download", lambda name, weights: (name, weights))
    monkeypatch.setattr(data_sources, "extents_of_model", lambda _: None)
    assert data_sources.model_directory(str(tmp_path)) == tmp_path
    assert data_sources.model_directory("org/name") == ("org/name", False)
    with pytest.raises(ConfigError, match="neither a directory nor a hub id"):
        data_sources.model_directory("/org/name")
    assert data_sources.read_template("") == ""
