"""Batches, rows and files of data that are refused; near ones pass."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from jinja2.exceptions import SecurityError
from safetensors.torch import save_file

import meshwright as mw
from meshwright.data import json_values
from meshwright.data.chat import Chat, ChatOptions
from meshwright.data.feed import source_of
from meshwright.data.images import Frame, Images
from meshwright.data.labelled import Labelled, WholeText
from meshwright.data.message_parts import Attachments
from meshwright.data.messages import message_of, tools_of
from meshwright.data.packing_plan import DataSource, Plan
from meshwright.data.preferences import ChatPairs, TextPairs
from meshwright.data.processor import Placeholders, Processor
from meshwright.data.retrieval import Retrieval
from meshwright.data.template_sandbox import MOST_CHARACTERS, Sandbox
from meshwright.data.texts import Texts
from meshwright.data.token_cache import Documents
from meshwright.data.tokens import tokens
from meshwright.data.vision_files import View, clip_of
from meshwright.errors import BrokenFile, ConfigError, DataError
from meshwright.objectives.distillation import Distill
from meshwright.objectives.rerank import Rerank
from meshwright.objectives.teacher_scores import ABOUT, FORMAT, TeacherScores, document_key
from meshwright.train.data_sources import RowReader, answer_ids, check_tokenizers
from meshwright.train.reference_scores import ReferenceScores
from tests.refusals import Refusal
from tests.templates import GOOD, tokenizer
from tests.words import words

DOCS, IMAGE, VIDEO = [[5, 6, 7], [8, 9]], 70, 71
GRID = (1, 2, 2)  # one placeholder


def packed(**fields: Any) -> mw.Batch:
    return mw.pack(fields.pop("documents", DOCS), **fields)


def pack_with(name: str) -> Callable[[Any], mw.Batch]:
    return lambda value: packed(**{name: value})


def batch_with(name: str) -> Callable[[Any], mw.Batch]:
    """Make a batch of two documents by hand, or with one wrong field."""
    made = dict(tokens=torch.arange(5), labels=torch.arange(5), bounds=(0, 3, 5))
    return lambda value: mw.Batch(**{**made, name: value})


pixels = lambda num=4, width=6, **how: torch.zeros(num, width, **how)  # noqa: E731 - short


def output(**fields):
    return (
        dict(input_ids=[5, IMAGE, 6], mm_token_type_ids=[0, 1, 0], pixel_values=pixels(), image_grid_thw=[GRID])
        | fields
    )


shown = lambda *images: mw.pack([[IMAGE], [IMAGE]], images=[*images], placeholders=[IMAGE])  # noqa: E731 - short
PACKED: dict[str, Refusal] = {
    "experts as a list": Refusal(batch_with("experts"), [0], DataError, "experts of the batch is list for 5 tokens",
        (None, torch.zeros(5, 2, 1))),
    "rows of patches": Refusal(lambda num: Images(pixels(num), (Frame(2, 2, 0),)), 5, DataError,
        "a row for each patch", (4,)),
    "dims of patches": Refusal(lambda shape: Images(torch.zeros(shape), (Frame(2, 2, 0),)), (4, 2, 3), DataError,
        "a row for each patch", ((4, 6),)),
    "order of frames": Refusal(lambda start: Images(pixels(8), (Frame(2, 2, 1), Frame(2, 2, start))), 1, DataError,
        "in the order of their places", (2,)),
    "images twice": Refusal(lambda images: mw.pack([output()], images=images), [[]], DataError,
        "leave images= out", (None,)),
    "unequal images": Refusal(lambda image: shown([(pixels(), GRID)], [image]), (pixels(width=7), GRID), DataError,
        r"the images of a batch differ & \[..., 6\] & \[..., 7\]", ((pixels(), GRID),)),
    "no slices": Refusal(lambda time: shown([(pixels(4 * time), (time, 2, 2))], [(pixels(), GRID)]), 0, DataError,
        "image 0 of document 0 has 0 x 2 x 2 patches", (1,)),
    "dtypes of images": Refusal(lambda image: shown([(pixels(), GRID)], [image]),
        (pixels(dtype=torch.uint8), GRID), DataError, "float32 & uint8"),
    "gradients of pixels": Refusal(lambda image: shown([image], [image]), (pixels(requires_grad=True), GRID), DataError,
        "the pixels of image 0 of document 0 require grad", ((pixels(), GRID),)),
    "fields of a processor": Refusal(lambda fields: mw.pack([output(**fields)]), dict(audio_values=[1]), DataError,
        "document 0 is a dict with audio_values & pixel_values", (dict(attention_mask=[1, 1, 1]),)),
    "no input_ids": Refusal(lambda fields: mw.pack([fields]), dict(pixel_values=pixels()), DataError,
        "document 0 is a dict with pixel_values"),
    "two rows": Refusal(lambda ids: mw.pack([output(input_ids=ids)]), [[5, IMAGE, 6]] * 2, DataError,
        r"document 0 has the shape \(2, 3\); give each document alone", ([[5, IMAGE, 6]],)),
    "images without places": Refusal(lambda kinds: mw.pack([output(mm_token_type_ids=kinds)]), [0, 0, 0], DataError,
        "document 0 has 1 image without placeholders", ([0, 1, 0],)),
    "places without images": Refusal(lambda kinds: mw.pack([output(mm_token_type_ids=kinds)]), [0, 1, 1], DataError,
        "placeholders at token 2 without pixels", ([0, 1, 0],)),
    "a number as documents": Refusal(pack_with("documents"), [5, 6], DataError,
        r"documents must be a list & pack\(\[\[5", ([[5, 6]],)),
    "length=7.5": Refusal(pack_with("length"), 7.5, DataError, "length=7.5 must be a whole number", (5, 6, None)),
    "no documents": Refusal(pack_with("documents"), [], DataError, r"pack\(\[\[0\]\]", ([[0]],)),
    "rows as tokens": Refusal(pack_with("documents"), [torch.zeros(3, 2).long()], DataError,
        r"documents must be a list of numbers for each document, got lists of \[2\]", ([torch.zeros(3).long()],)),
}  # fmt: skip


@pytest.mark.parametrize("case", PACKED)
def test_batches_are_refused(case: str) -> None:
    PACKED[case].check()


# Plans


def plan(lengths: list[list[int]], number: int = 0, **fields: Any) -> Any:
    made = [DataSource(f"d{n}", np.array(each)) for n, each in enumerate(lengths)]
    return Plan([replace(each, **fields) for each in made], length=8, epochs=1).stream(number)


shares = lambda *values: Plan(  # noqa: E731 - short
    [DataSource(f"d{n}", np.array([4, 4]), share=share) for n, share in enumerate(values)], length=8, streams=2
)
PLANS: dict[str, Refusal] = {
    "a source of short documents": Refusal(lambda lengths: plan([[4, 4], lengths]), [1, 1], DataError,
        "d1 has no document of two or more tokens; leave it out", ([1, 2],)),
    "short documents alone": Refusal(lambda lengths: plan([lengths]), [1], DataError, "check the paths", ([2],)),
    "stream -1": Refusal(lambda number: plan([[4, 4]], number), -1, DataError, "there is no stream -1", (0, 99)),
    "a share of some": Refusal(lambda values: shares(*values), (0.5, None), DataError,
        "d1 has no share, others have; give all one or none", ((0.5, 0.5), (None, None))),
    "a share of the last": Refusal(lambda values: shares(*values), (None, 0.5), DataError, "d0 has no share"),
    "weight 0": Refusal(lambda weight: plan([[4, 4]], weight=weight), 0, DataError, "d0 is not above 0", (0.5,)),
    "share 0": Refusal(lambda share: shares(share, 1.0), 0.0, DataError, "d0 is not above 0", (0.1,)),
}  # fmt: skip


@pytest.mark.parametrize("case", PLANS)
def test_sources_of_a_plan_are_refused(case: str) -> None:
    PLANS[case].check()


def test_rows_that_make_several_documents_are_not_cut() -> None:
    def cut(num_parts: list[int], too_long: Any = "cut") -> DataSource:
        lengths = np.array([4, 4])
        made = SimpleNamespace(
            lengths=lengths, num_parts=np.array(num_parts), name="d", content="", num_views=0 * lengths
        )
        return source_of(cast(Documents, made), 8, too_long=too_long)

    with pytest.raises(DataError, match='rows of d make several documents each; take too_long = "stop" or "drop"'):
        cut([1, 2])
    assert cut([1, 1]).cut
    assert not cut([1, 2], "drop").cut


@pytest.mark.parametrize("shows", [0, 1])
def test_only_long_documents_must_show_no_images_to_be_cut(shows: int) -> None:
    """An error names up to 20 rows."""
    lengths, num_views = np.array([4] + [9] * 25), np.array([1] + [0] * 24 + [shows])
    ones, place = np.ones_like(lengths), lambda n: f"row {n}"
    made = cast(Any, SimpleNamespace(
        lengths=lengths, num_parts=ones, name="d", content="", num_views=num_views, place=place,
    ))  # fmt: skip
    if shows:
        with pytest.raises(DataError, match=r"1 document of d with images have more than 8 tokens.* row 25;"):
            source_of(made, 8, too_long="cut")
    else:
        assert source_of(made, 8, too_long="cut").cut
    with pytest.raises(DataError, match=r"(?s)25 documents .*\n  row 1: 9 tokens\n.*  row 20: 9.*\n  and 5 more\n"):
        source_of(made, 8)


# Rows

U, A, B = {"role": "user", "content": "U"}, {"role": "assistant", "content": "A"}, {"role": "assistant", "content": "B"}
MARKED = (
    "{% for m in messages %}{{ m.role + ':' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
chat = lambda template, **options: Chat(tokenizer(), ChatOptions(template=template, **options))  # noqa: E731 - short
joined = lambda row: chat(MARKED, turns="joined").documents(row)  # noqa: E731 - short
message = lambda raw: message_of(raw, 3, Attachments({}))  # noqa: E731 - short
pairs = lambda row: ChatPairs(chat(GOOD["hybrid"]), lambda each: each).documents(row)  # noqa: E731 - short
texts = lambda row: TextPairs(tokenizer(), lambda each: each).documents(row)  # noqa: E731 - short
whole = WholeText(tokenizer())
label = lambda row: Labelled(whole.document, whole.unused, ("bad", "good")).documents(row)  # noqa: E731 - short
clip = lambda fps: message(  # noqa: E731 - short
    dict(role="user", content=[dict(type="video", video=["a.png", "b.png"], fps=fps)])
)
call = dict(name="look", arguments={})
ROWS: dict[str, Refusal] = {
    "joined turns": Refusal(joined, dict(messages=[U, {**A, "train": False}, U, B]), DataError,
        'turns="joined" trains every turn & train=false', (dict(messages=[U, A, U, B]),)),
    "template": Refusal(lambda text: chat("{{ messages[1].content }}").prompt(text), "U", DataError,
        "the template refuses the first 1 messages: UndefinedError"),
    "no message": Refusal(message, "U", DataError, r"message 3 is a string; give \{'role'", (U,)),
    "rate 'fast'": Refusal(clip, "fast", DataError, "message 3 shows a video with fps='fast'", (0.5, 2)),
    "rate -1": Refusal(clip, -1, DataError, "fps=-1; it must be a number above 0"),
    "rate inf": Refusal(clip, float("inf"), DataError, "fps=inf"),
    "calls": Refusal(message, {**A, "tool_calls": 7}, DataError, "calls of tools in message 3 are a number, not a list",
        ({**A, "tool_calls": [call]}, {**A, "tool_calls": call}, {**A, "tool_calls": json.dumps([call])})),
    "tools": Refusal(tools_of, dict(name="look"), DataError, "tools are an object, not a list",
        ([dict(name="look")], None, "")),
    "tool": Refusal(tools_of, [dict(name="look"), 7], DataError, "tool 1 is a number, not an object",
        ([json.dumps(dict(name="look"))],)),
    "a number as text": Refusal(Texts(tokenizer()).documents, dict(text=7), DataError,
        "its field 'text' is a number, not text & the fields text", (dict(text="x"), dict(text=""))),
    "a text to classify": Refusal(label, dict(text="", label=0), DataError, "field 'text' is no text & Name yours",
        (dict(text="x", label=0),)),
    "label 2": Refusal(label, dict(text="x", label=2), DataError, "its label is 2; give a number from 0 to 1 & 'good'",
        (dict(text="x", label=1), dict(text="x", label="bad"))),
    "label -1": Refusal(label, dict(text="x", label=-1), DataError, "its label is -1"),
    "label True": Refusal(label, dict(text="x", label=True), DataError, "its label is True"),
    "label 'fair'": Refusal(label, dict(text="x", label="fair"), DataError, "its label is 'fair'"),
    "meaning": Refusal(Retrieval().texts, dict(query="q", positive="p", instruction="i"), DataError,
        "the row has 'instruction' & inside of the texts", (dict(query="q", positive="p", instruction=""),)),
    "two queries": Refusal(Retrieval().texts, dict(query=["q", "r"], positive="p"), DataError,
        "fields query, positive; it needs query and positive", (dict(query=["q"], positive=["p", "o"]),)),
    "no positive": Refusal(Retrieval().texts, dict(query="q", positive=[]), DataError, "it needs query and positive"),
    "positive and negative": Refusal(Retrieval().texts, dict(query="q", positive="p", negative=["n", "p"]), DataError,
        "the text 'p' is a positive and a negative", (dict(query="q", positive="p", negative=["n"]),)),
    "a number as a query": Refusal(Retrieval().texts, dict(query=7, positive="p"), DataError,
        "its field 'query' is a number"),
    "an empty positive": Refusal(Retrieval().texts, dict(query="q", positive=["p", ""]), DataError,
        "its field 'positive' is a list"),
    "equal answers": Refusal(texts, dict(prompt="p", chosen="a", rejected="a"), DataError, "are the same",
        (dict(prompt="p", chosen="a", rejected="b"), dict(prompt=None, chosen="a", rejected="b"))),
    "messages as text": Refusal(texts, dict(prompt="p", chosen=[A], rejected="a"), DataError,
        "its field 'chosen' is a list, not text & kind"),
    "equal chats": Refusal(pairs, dict(prompt="U", chosen="A", rejected="A"), DataError, "are the same",
        (dict(prompt="U", chosen="A", rejected="B"),)),
    "two documents": Refusal(pairs, dict(prompt=[U], chosen=[{**A, "reasoning_content": "x"}, U, A], rejected=[B]),
        DataError, "chosen makes 2 documents with trained tokens", (dict(prompt=[U], chosen=[A], rejected=[B]),)),
    "nothing trained": Refusal(pairs, dict(prompt=[U], chosen=[A], rejected=[{**B, "train": False}]), DataError,
        "rejected makes 0 documents"),
}  # fmt: skip


@pytest.mark.parametrize("case", ROWS)
def test_rows_are_refused(case: str) -> None:
    ROWS[case].check()


def test_an_empty_answer_is_refused() -> None:
    """Only a tokenizer without an end token makes one."""
    endless = SimpleNamespace(eos_token_id=None, encode=lambda text, **_: [*text.encode()])
    documents = TextPairs(endless, lambda each: each).documents
    with pytest.raises(DataError, match="one of its answers is empty"):
        documents(dict(prompt="p", chosen="a", rejected=""))
    documents(dict(prompt="p", chosen="a", rejected="b"))


def test_prompts_of_a_pair_must_be_equal() -> None:
    """A template that shows its flags makes unequal prompts, if a row sets them for one answer."""
    made = [tokens(ids, [(2, 3)]) for ids in ([1, 2, 3], [1, 9, 4], [1, 2, 4])]
    for second, is_refused in ((1, True), (2, False)):
        answers = iter([made[0], made[second]])
        stub = SimpleNamespace(documents=lambda _, answers=answers: [next(answers)], options=ChatOptions())
        documents = ChatPairs(cast(Chat, stub), lambda each: each).documents
        row = dict(prompt="U", chosen="A", rejected="B")
        if is_refused:
            with pytest.raises(DataError, match="renders another prompt for the chosen answer"):
                documents(row)
        else:
            documents(row)


def test_a_tokenizer_without_a_template_has_no_chats() -> None:
    for template in ("", GOOD["plain"]):
        if template:
            chat(template)
            continue
        with pytest.raises(DataError, match=words("the tokenizer has no chat template", "kind = .text")):
            chat(template)


def test_joined_turns_show_no_images() -> None:
    view = View(("a",), GRID, 1, "")
    processor = SimpleNamespace(image=lambda _: view, placeholders=SimpleNamespace(ids=()), root=Path())
    made = Chat(tokenizer(), ChatOptions(template=MARKED, turns="joined"), processor=cast(Processor, processor))
    row = dict(messages=[dict(role="user", content=[dict(type="image", image="a.png")]), A])
    with pytest.raises(DataError, match='turns="joined" does not support images'):
        made.documents(row)
    made.documents(dict(messages=[U, A]))


IMAGES = Processor(Path(), Placeholders("<I>", "<V>", (IMAGE, VIDEO)), 8)
STILL, MOVING = View(("a",), GRID, 1, ""), View(("b",), GRID, 1, "", (0,), 2.0)
FILES: dict[str, Refusal] = {
    "places for images": Refusal(lambda text: IMAGES.with_places(text, [STILL]), "a<I>b<I>", DataError,
        "writes 2 placeholders for 1 image & contains <I> or <V>", ("a<I>b",)),
    "no place": Refusal(lambda text: IMAGES.with_places(text, [STILL]), "ab", DataError, "writes 0 placeholders"),
    "order of places": Refusal(lambda text: IMAGES.with_places(text, [STILL, MOVING]), "<V><I>", DataError,
        "writes 2 placeholders for 2 images", ("<I><V>",)),
    "format": Refusal(lambda text: Sandbox().from_string("{{ '" + text + "' % 1 }}").render(), "%1000000d",
        SecurityError, "a width of 7 digits", ("%999999d",)),
    "an argument as a width": Refusal(lambda text: Sandbox().from_string("{{ text % (1, 1) }}").render(text=text),
        "%*d", SecurityError, "one that is an argument", ("%d%d",)),
    "product": Refusal(lambda num: Sandbox().from_string("{% set x = [0] * num %}").render(num=num),
        MOST_CHARACTERS + 1, SecurityError, f"more than {MOST_CHARACTERS:,} elements", (10**6,)),
    "power": Refusal(lambda num: Sandbox().from_string("{% set x = 2 ** num %}").render(num=num), (1 << 19) + 1,
        SecurityError, "more than 1,048,576 bits", (1 << 19,)),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_texts_of_templates_are_refused(case: str) -> None:
    FILES[case].check()


def test_settings_are_small_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.json"
    file.write_text('{"a": 1}')
    for most, is_refused in ((7, True), (8, False)):
        monkeypatch.setattr(json_values, "_MOST_BYTES", most)
        if is_refused:
            with pytest.raises(DataError, match=r"a\.json has 8 bytes, too many for settings"):
                json_values.read_object(file)
        else:
            assert json_values.read_object(file) == {"a": 1}


@pytest.mark.parametrize(("package", "file"), [("PIL", "a.png"), ("av", "a.mp4")])
def test_a_missing_package_is_named(package: str, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DataError, match=r"read by (Pillow|PyAV); install it: pip install 'meshwright\[vision\]'"):
        clip_of(Path(file))


# Scores and tokenizers


def test_scores_of_a_teacher_must_be_whole(tmp_path: Path) -> None:
    document, about = torch.tensor([5, 6, 7]), dict(format=FORMAT, temperature=1.0, teacher="t", top_k=2)
    key = document_key(document)

    def scores(num: int, k: int, batch: mw.Batch | None = None, **changes: Any) -> Any:
        (tmp_path / ABOUT).write_text(json.dumps({n: x for n, x in {**about, **changes}.items() if x is not None}))
        made = {key + ".ids": torch.zeros(num, 2, dtype=torch.int32), key + ".logprobs": torch.zeros(num, k)}
        save_file(made, tmp_path / "scores-0.safetensors")
        return TeacherScores(tmp_path, Distill(top_k=2)).add_to(batch or mw.pack([document]), 131)

    scores(3, 2)
    for missing in ("teacher", "top_k"):
        with pytest.raises(BrokenFile, match="lacks teacher or top_k"):
            scores(3, 2, **{missing: None})
    with pytest.raises(ConfigError, match="has top_k=1, and the objective top_k=2"):
        scores(3, 2, top_k=1)
    for num, k in ((2, 2), (3, 1)):
        with pytest.raises(BrokenFile, match=rf"\[{num}, 2\], \[{num}, {k}\].* for 3 tokens; score them again"):
            scores(num, k)
    with pytest.raises(DataError, match="do not hold images"):
        scores(3, 2, mw.pack([[IMAGE]], images=[[(pixels(), GRID)]], placeholders=[IMAGE]))


def test_reference_scores_must_be_complete(tmp_path: Path) -> None:
    """Documents that no batch has, and parts that a row has not, need no score."""
    place = lambda n: f"row {n}"  # noqa: E731 - short
    made = SimpleNamespace(lengths=np.array([1, 2, 8, 9]), num_parts=np.array([2, 2, 1, 2]), place=place)
    reference = ReferenceScores(cast(Any, None), cast(Any, None), tmp_path, 8, 1)
    nan = float("nan")
    whole = np.array([[nan, nan], [1, 1], [1, nan], [nan, nan]])
    reference._check_complete(cast(Documents, made), whole)
    for at, row in (((1, 1), 1), ((2, 0), 2), ((1, 0), 1)):
        scores = whole.copy()
        scores[at] = nan
        with pytest.raises(DataError, match=f"reference scores of 1 row are missing, first that of row {row}; remove"):
            reference._check_complete(cast(Documents, made), scores)


def test_models_have_fitting_tokenizers_and_classes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        tokenizer().save_pretrained(tmp_path / name)
    check_tokenizers(tmp_path / "a", tmp_path / "b", "dpo.reference")
    file = tmp_path / "b" / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "additional_special_tokens": ["<|new|>"]}))
    with pytest.raises(ConfigError, match=r"dpo.reference: .* has another tokenizer than .*1 tokens? differ.*new"):
        check_tokenizers(tmp_path / "b", tmp_path / "a", "dpo.reference")
    config = tmp_path / "a" / "config.json"
    reader = RowReader(tmp_path / "a", tmp_path, objective=Rerank(answers=("\n\n", "y")))
    first, second = answer_ids(reader)
    assert [first, second] == [tokenizer().encode(answer)[0] for answer in ("\n\n", "y")]
    with pytest.raises(ConfigError, match=r"'nay' is \d tokens of this model; give answers of one"):
        answer_ids(replace(reader, objective=Rerank(answers=("nay", "y"))))
    for names, is_refused in ((["a"], True), (["a", "b"], False)):
        config.write_text(json.dumps(dict(model_type="qwen3", id2label=dict(enumerate(names)))))
        if is_refused:
            with pytest.raises(ConfigError, match="names no classes; set labels of"):
                _ = reader.label_names
        else:
            assert reader.label_names == names
