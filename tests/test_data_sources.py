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

from meshwright.data import ChatOptions, ImageLimits, Placeholders, scored, tokenizer_of
from meshwright.errors import ConfigError, DataError
from meshwright.objectives import ROW, Classify, Distill, Dpo, Embedding, Rerank, Reward
from meshwright.train import data_sources
from meshwright.train.config import Config, DataSection, SourceSection
from meshwright.train.data_sources import RowReader
from tests import tiny
from tests.templates import GOOD, tokenizer

NOWHERE, of = Path("nowhere"), SimpleNamespace


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


def test_settings_of_images_and_placeholders_of_texts(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key of chats has the settings of their processor, and a text must not spell a placeholder."""
    for name, value in dict(placeholders_of=(0, 1), patch_of=4).items():
        monkeypatch.setattr(data_sources, name, lambda _, value=value: value)
    monkeypatch.setattr(RowReader, "processor", lambda *_: of(settings_key="of the processor", placeholders=None))
    make, key, _ = data_sources.maker(SourceSection(path="x", kind="text"), RowReader(model, NOWHERE, tower=True))
    assert key.endswith(" (0, 1)")
    assert len(make({"text": "fine"})) == 1
    with pytest.raises(DataError, match="it has the token 0, which stands for an image"):
        make({"text": "<|endoftext|>"})
    assert data_sources.maker(SourceSection(path="x"), RowReader(model, NOWHERE))[1].endswith("of the processor")


def test_fields_of_a_source_are_renamed_for_every_objective(model: Path) -> None:
    """Answers of a reward model have a label at their last token, those of DPO their tokens."""
    section, made = SourceSection(path="x", kind="text", fields={"text": "body"}), list[Any]()
    for objective in (Dpo(), Reward(), Classify(labels=("a", "b")), None):
        reader = RowReader(model, NOWHERE, objective=objective)
        made.append(data_sources._text_rows(section, reader, tokenizer()))
    assert [each.fields for each in made] == [section.fields] * 4
    assert [each.finish for each in made[:2]] == [data_sources._as_it_is, scored]
    [ready] = data_sources.maker(SourceSection(path="x", kind="tokens", fields={"ids": "n"}), reader)[0]({"n": [1, 2]})
    assert ready.ids.tolist() == [1, 2]
    asks = RowReader(model, NOWHERE, objective=Embedding(query_prompt="q", document_prompt="d"))
    rows: Any = data_sources.maker(section, asks)[0]
    assert (rows.__self__.query_prompt, rows.__self__.document_prompt) == ("q", "d")
    assert rows.__self__.fields == section.fields


def test_a_chat_has_all_options_of_its_source(model: Path, tmp_path: Path) -> None:
    (tmp_path / "t").write_text(GOOD["plain"])
    options: dict[str, Any] = dict(thinking=True, turns="last", template_args={"a": 1}, fields={"messages": "m"})
    chat = data_sources.chat_of(SourceSection(path="x", template=str(tmp_path / "t"), **options), model, tokenizer())
    assert chat.options == ChatOptions(**options, template=GOOD["plain"])


def test_limits_of_images_are_those_of_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    marks = SimpleNamespace(convert_ids_to_tokens=lambda ids: [f"mark {each}" for each in ids])
    for name, value in dict(read_config={}, placeholders_of=(7, 8), patch_of=6, tokenizer_of=marks).items():
        monkeypatch.setattr(data_sources, name, lambda _, value=value: value)
    monkeypatch.setattr(data_sources, "Processor", lambda *given: given)
    section = SourceSection(path="d/x.jsonl", images=dict(max_pixels=1, max_video_pixels=2, fps=3.0))
    limits = ImageLimits(Path("d"), 1, 2, 3.0)
    assert RowReader(NOWHERE, NOWHERE, tower=True).processor(section) == (
        NOWHERE, Placeholders("mark 7", "mark 8", (7, 8)), 6, limits,
    )  # fmt: skip
    assert RowReader(NOWHERE, NOWHERE).processor(section) is None
    assert RowReader(NOWHERE, NOWHERE, tower=True).processor(SourceSection(path="x", kind="text")) is None


def test_images_of_any_source_have_a_processor(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RowReader, "processor", lambda _, section: section.name or None)
    plain = of_ids(model, tmp_path, eval=dict(path=ids(tmp_path / "c.jsonl", 10), name="e", kind="tokens"))
    named = [plain.data[0], plain.data[1].model_copy(update={"name": "second"})]
    made = plain.model_copy(update={"data": named})
    assert data_sources.training_data(made, model, tmp_path / "cache").processor == "second"
    assert data_sources.held_out_of(made, model, tmp_path / "cache")["e"].processor == "e"


def test_documents_are_made_as_the_source_says(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_sources, "prepare", lambda spec, cache, processes: (spec, cache, processes))
    paths = [tmp_path / name for name in ("b.txt", "a.txt")]
    for path in paths:
        path.touch()
    section = SourceSection(path=[*map(str, paths)], kind="text", split="line", on_bad="skip", name="n")
    sections = {"train": {"tower": True}, "objective": "reward"}
    reader = RowReader.of(config(**sections), model, tmp_path / "cache", 3)
    assert reader == RowReader(model, tmp_path / "cache", True, Reward(), 3)
    made: Any = data_sources.documents_of(section, replace(reader, tower=False))
    spec, cache, processes = made
    assert (spec.name, spec.files, spec.split, spec.on_bad) == ("n", (*paths,), "line", "skip")
    assert (cache, processes) == (tmp_path / "cache", 3)
    assert spec.unused is not None


def test_a_reranker_answers_at_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of several documents rename their fields themselves."""
    asked = list[SourceSection]()
    monkeypatch.setattr(data_sources, "_chat", lambda section, *_: asked.append(section) or SimpleNamespace(
        document=None, unused=None
    ))  # fmt: skip
    monkeypatch.setattr(data_sources, "answer_ids", lambda _: (7, 9))
    section = SourceSection(path="x", fields={"query": "q", "label": "l"})
    made = list[Any]()
    for objective in (Rerank(), Dpo(), Classify(labels=("a", "b")), None):
        reader = RowReader(model, NOWHERE, objective=objective)
        made.append(data_sources._chat_rows(section, reader, tokenizer(), "", None))
    assert [each.thinking for each in asked] == [False, "auto", "auto", "auto"]
    assert [each.fields for each in asked] == [{}, {}, {}, section.fields]
    assert [each.fields for each in made[:3]] == [section.fields] * 3


def test_a_turn_ends_with_the_tokens_of_both_files(model: Path) -> None:
    (model / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    chat = data_sources.chat_of(SourceSection(path="x"), model, tokenizer_of(model))
    assert chat.stop_ids == {3, 4, tokenizer().eos_token_id}


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
    """Only plain texts are cut unasked."""
    asked, source_of = list[Any](), data_sources.source_of
    noted = lambda *given, **by: asked.append((by["share"], by["too_long"])) or source_of(*given, **by)  # noqa: E731
    monkeypatch.setattr(data_sources, "source_of", noted)
    plain = of_ids(model, tmp_path, train=dict(steps=2))
    text = {"path": str(tmp_path / "c.txt"), "kind": "text"}
    (tmp_path / "c.txt").write_text("some words")
    changes: list[Any] = [{"share": 0.25}, {"share": 0.75, **text}]
    shares = [each.model_copy(update=change) for each, change in zip(plain.data, changes, strict=True)]
    data_sources.training_data(plain.model_copy(update={"data": shares}), model, tmp_path / "cache")
    assert asked == [(0.25, "stop"), (0.75, "cut")]


def test_held_out_sets_keep_their_names(model: Path, tmp_path: Path) -> None:
    paths = [ids(tmp_path / "c.jsonl", 10, 10, 9), ids(tmp_path / "d.jsonl", 12, 7)]
    sets = [dict(path=path, name=name, kind="tokens", too_long="drop") for path, name in zip(paths, "zy", strict=True)]
    made = data_sources.held_out_of(of_ids(model, tmp_path, eval=dict(sets=sets)), model, tmp_path / "cache")
    assert [*made] == ["z", "y"]
    assert [(each.num_steps, len(each.documents)) for each in made.values()] == [(3, 1), (1, 1)]
    assert [[*each.left_out()] for each in made.values()] == [[], ["1 document of y longer than 10 tokens left out"]]
    for section, names in ((sets[0], ["z"]), ({**sets[0], "name": ""}, ["held-out"]), ({}, [])):
        assert [*data_sources.sections_of(config(eval=section))] == names


def test_a_feed_has_the_streams_of_its_data_rank() -> None:
    made = data_sources.TrainingData(["d"], "plan", 1, "processor")  # type: ignore[arg-type]
    feed = made.feed(of(rank=5, data_rank=1, num_data_ranks=3), 4)  # type: ignore[arg-type]
    feed.close()
    assert (feed.documents, feed.plan, feed.processor) == (["d"], "plan", "processor")
    assert (feed.rank, feed.num_ranks, feed.micro_batches, feed.streams_per_step) == (1, 3, 4, 12)


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


def test_tokenizers_are_compared_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"own": {"a": 0, "b": 1, "c": 2}, "same": {"c": 2, "b": 1, "a": 0}, "swapped": {"a": 1, "b": 0, "c": 2},
             "more": {"a": 0, "b": 1, "c": 2, "d": 3}}  # fmt: skip
    monkeypatch.setattr(data_sources, "tokenizer_of", lambda at, _: of(get_vocab=lambda: known[at.name]))
    data_sources.check_tokenizers(Path("same"), Path("own"), "dpo.reference")
    for other, example in (
        ("swapped", r"\(2 tokens differ, such as 'a'\)"),
        ("more", r"\(1 tokens differ, such as 'd'"),
    ):
        with pytest.raises(ConfigError, match=f"dpo.reference: {other} has another tokenizer than own {example}"):
            data_sources.check_tokenizers(Path(other), Path("own"), "dpo.reference")


def test_a_model_is_a_directory_or_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_sources, "download", lambda name, weights: (name, weights))
    monkeypatch.setattr(data_sources, "extents_of_model", lambda _: None)
    assert data_sources.model_directory(str(tmp_path)) == tmp_path
    assert data_sources.model_directory("org/name") == ("org/name", False)
    with pytest.raises(ConfigError, match="neither a directory nor a hub id"):
        data_sources.model_directory("/org/name")
    assert data_sources.read_template("") == ""
