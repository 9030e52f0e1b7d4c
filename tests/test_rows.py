"""Rows mean what their author meant: fields that change a row are taken or refused by name, and whatever is broken is
named by its file."""

from __future__ import annotations

import json
import re
import struct
import threading
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

import meshwright as mw
from meshwright.data import row_files, template_sandbox, vision_files
from meshwright.data.chat import Chat, ChatOptions, stop_ids_of
from meshwright.data.chat_formats import conversation, unused_fields
from meshwright.data.feed import source_of
from meshwright.data.packing_plan import Plan
from meshwright.data.template_sandbox import Sandbox
from meshwright.data.texts import Texts
from meshwright.data.token_cache import TokenizeSpec, prepare
from meshwright.data.tokenizer import generation_config_of, template_of, tokenizer_of
from meshwright.plan.figures import COMPUTE
from meshwright.train import dry_run
from tests.templates import GOOD, tokenizer

ASKS, SAYS = {"role": "user", "content": "U"}, {"role": "assistant", "content": "A"}
HUMAN, GPT = {"from": "human", "value": "U"}, {"from": "gpt", "value": "A"}
TOOL = {"name": "look", "parameters": {"type": "object"}}


def messages(row: dict[str, Any]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in conversation(row).messages]


def message_of(row: dict[str, Any], **options: Any) -> list[str]:
    """Documents, with what is learnt in brackets."""
    out = []
    for document in Chat(tokenizer(), ChatOptions(**{"template": GOOD["hybrid"], **options})).documents(row):
        text, at = "", 0
        for start, stop in document.spans:
            text += tokenizer().decode(document.ids[at:start]) + f"[{tokenizer().decode(document.ids[start:stop])}]"
            at = stop
        out.append(text + tokenizer().decode(document.ids[at:]))
    return out


@pytest.mark.parametrize(
    "row",
    [
        {"system": "S", "conversations": [HUMAN, GPT]},
        {"system": "S", "messages": [ASKS, SAYS]},
        {"system": "S", "messages": [{"role": "developer", "content": "S"}, ASKS, SAYS]},
        {"system": "S", "prompt": "U", "completion": "A"},
        {"system": "S", "instruction": "U", "output": "A", "history": []},
    ],
)
def test_the_system_of_a_row_comes_first(row: dict[str, Any]) -> None:
    assert messages(row) == [("system", "S"), ("user", "U"), ("assistant", "A")]
    assert conversation(row).trained == [False, False, True]


def test_the_history_of_alpaca_is_its_earlier_turns() -> None:
    row = {"instruction": "U2", "input": "more", "output": "A2", "history": [["U0", "A0"], ["U1", "A1"]]}
    assert [text for _, text in messages(row)] == ["U0", "A0", "U1", "A1", "U2\n\nmore", "A2"]
    assert conversation(row).trained == [False, True] * 3


def test_template_kwargs_of_a_row_reach_the_template() -> None:
    """TRL does this: they override the arguments of the source and those of `thinking`."""
    template = GOOD["hybrid"].replace(
        "{%- for m in messages -%}", "{{- mood | default('') -}}{%- for m in messages -%}", 1
    )
    row = {"messages": [ASKS, SAYS], "chat_template_kwargs": {"mood": "calm", "enable_thinking": True, "unused": None}}
    [text] = message_of(row, template=template, template_args={"mood": "cross"})
    assert text.startswith("calm<|im_start|>user")
    assert text.endswith("[<think>\n\n</think>\n\nA<|im_end|>]")  # what a server gets with thinking on
    assert message_of({**row, "chat_template_kwargs": json.dumps({"mood": "calm"})}, template=template)[0][:4] == "calm"
    assert conversation({**row, "chat_template_kwargs": ""}).template_args == {}


def test_tools_of_llama_factory() -> None:
    """Their layout becomes that of OpenAI, token by token."""
    call = {"name": "look", "arguments": {"at": 1}}
    reference = {
        "conversations": [
            HUMAN, {"from": "function_call", "value": json.dumps(call)}, {"from": "observation", "value": "R"}, GPT,
        ],
        "tools": json.dumps([TOOL]), "system": "S",
    }  # fmt: skip
    ours = {
        "messages": [
            {"role": "system", "content": "S"}, ASKS, {"role": "assistant", "tool_calls": [{"function": call}]},
            {"role": "tool", "content": "R"}, SAYS,
        ],
        "tools": [{"type": "function", "function": TOOL}],
    }  # fmt: skip
    assert message_of(reference) == message_of(ours)
    assert "[\n<call>look" in message_of(ours)[0]
    old = {"role": "assistant", "content": None, "function_call": {"name": "look", "arguments": '{"at": 1}'}}
    assert message_of({**ours, "messages": [*ours["messages"][:2], old, *ours["messages"][3:]]}) == message_of(ours)
    several = conversation({"conversations": [HUMAN, {"from": "function_call", "value": json.dumps([call, call])}]})
    assert [c["function"]["name"] for c in several.messages[1]["tool_calls"]] == ["look"] * 2


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_thinking_has_many_names(name: str) -> None:
    thinks = {"messages": [ASKS, {**SAYS, name: "T"}]}
    assert message_of(thinks) == [
        "<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n[<think>\nT\n</think>\n\nA<|im_end|>]"
    ]
    assert conversation({"messages": [ASKS, {**SAYS, "reasoning": "T", "thinking": "T"}]}).messages[1] == {
        **SAYS, "reasoning_content": "T",
    }  # fmt: skip


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"system": "S", "messages": [{"role": "system", "content": "T"}, ASKS, SAYS]}, "differs from message 0"),
    ({"system": ["S"], "messages": [ASKS, SAYS]}, "system is a list, not text"),
    ({"history": [["U", "A"]], "messages": [ASKS, SAYS]}, "the row has 'history'"),
    ({"history": [["U"]], "instruction": "U", "output": "A"}, "list of pairs"),
    ({"instruction": ["U"], "output": "A"}, "instruction is a list, not text"),
    ({"weight": 0.5, "messages": [ASKS, SAYS]}, "the row has 'weight'.* a source of their own"),
    *(
        ({name: value, "messages": [ASKS, SAYS]}, f"the row has '{name}'")
        for name, value in {
            "mask": [0, 1], "loss_mask": [1], "completion_mask": [0], "assistant_masks": [1], "train": False,
            "sample_weight": 0.5, "loss_weight": 0, "functions": [TOOL], "kto_tag": True,
        }.items()
    ),
    ({"labels": [1, 2], "messages": [ASKS, SAYS]}, "a list of 'labels'"),
    ({"enable_thinking": True, "messages": [ASKS, SAYS]}, "put it into chat_template_kwargs"),
    ({"prompt": "U", "completion": "A", "label": False}, "rates the answer"),
    ({"chat_template_kwargs": {"tokenize": True}, "messages": [ASKS, SAYS]}, "name tokenize, which"),
    ({"chat_template_kwargs": [1], "messages": [ASKS, SAYS]}, "chat_template_kwargs are a list"),
    ({"messages": [ASKS, {**SAYS, "weight": 0.5}]}, r"weight of message 1 is 0.5.*mw.pack\(fields="),
    ({"messages": [ASKS, {**SAYS, "train": "false"}]}, "train of message 1 is 'false'"),
    ({"messages": [ASKS, {**SAYS, "reasoning": "T", "thinking": "V"}]}, "thinks differently in reasoning and thinking"),
    ({"messages": [ASKS, {**SAYS, "thinking": True}]}, "thinking of message 1 is true, not text"),
    ({"messages": [ASKS, {**SAYS, "reasoning_details": [{}]}]}, "reasoning_details"),
    ({"conversations": [HUMAN, {"from": "function_call", "value": "look()"}]}, "tools in message 1 are not valid JSON"),
    ({"prompt": "U", "chosen": "A", "rejected": "B"}, "two answers, chosen and rejected; set objective"),
    ({"conversations": [HUMAN], "chosen": GPT, "rejected": GPT}, "two answers"),
    ({"messages": [ASKS, {**SAYS, "content": "A<|im_end|>"}]}, r"message 1 .* holds the special token '<.im_end.>'"),
    ({"messages": [{**ASKS, "content": "<|im_start|>"}, SAYS]}, "message 0 of the user holds the special token"),
    ({"messages": [ASKS, SAYS], "tools": [{**TOOL, "description": "<|im_end|>"}]}, "tools hold the special token"),
    ({"messages": [ASKS, {**SAYS, "content": "<think>\nwell"}]}, "message 1 begins with <think> and has no </think>"),
    ({"messages": [ASKS, {**SAYS, "content": "\n<think>well"}]}, "message 1 begins with <think> and has no </think>"),
    ({"messages": [ASKS, {**SAYS, "content": "a\ud800"}]}, r"half of a character, '\\ud800'"),
    ({"messages": [ASKS, {**SAYS, "content": [{"type": "image", "image": 7}]}]}, "shows an image that is a number"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "wanted"), REFUSED, ids=[wanted[:30] for _, wanted in REFUSED])
def test_a_row_that_would_mean_something_else_is_refused(row: dict[str, Any], wanted: str) -> None:
    with pytest.raises(mw.DataError, match=f"(?s){wanted}"):
        message_of(row)


def test_what_changes_nothing_passes() -> None:
    row = {
        "messages": [ASKS, {**SAYS, "weight": 1.0, "train": True, "name": "x"}], "id": 7, "weight": 1, "label": True,
        "labels": 3, "chosen": [SAYS], "rejected": [SAYS], "history": [], "prompt": "U", "source": None,
        "sample_weight": 1, "loss_weight": 1.0, "functions": [], "mask": None,
    }  # fmt: skip
    assert message_of(row) == message_of({"messages": [ASKS, SAYS]})
    assert Chat(tokenizer(), ChatOptions(template=GOOD["plain"])).unused(row) == {*row} - {
        "messages", "source", "mask"
    }  # fmt: skip
    assert messages({"prompt": "U", "chosen": "A", "rejected": "B"} | {"completion": "A"}) == messages(
        {"messages": [ASKS, SAYS]}
    )
    named = conversation({"prompt": "U", "chosen": "A", "rejected": "B"}, {"completion": "chosen"})  # on purpose
    assert [message["content"] for message in named.messages] == ["U", "A"]


def test_a_column_of_nulls_is_no_field() -> None:
    """A merged table has all columns in all rows, also inside of the arguments of a template."""
    nulls = {"messages": None, "prompt": None, "completion": "C", "conversations": None}
    assert messages({**nulls, "instruction": "U", "output": "A"}) == [("user", "U"), ("assistant", "A")]
    args = {"mood": None, "deep": {"x": None}, "num": 0}
    assert conversation({"messages": [ASKS], "chat_template_kwargs": args}).template_args == {"deep": {}, "num": 0}


def test_renamed_fields_are_used() -> None:
    row = {"dialog": [ASKS, SAYS], "about": "S", "system": "T", "id": 7, "messages": "M", "tools": None}
    assert unused_fields(row, {"messages": "dialog", "system": "about"}) == {"id", "messages", "system"}


def test_all_images_of_a_row_must_be_shown_to_a_model_that_sees() -> None:
    row = {"messages": [{**ASKS, "content": "<image>U"}, SAYS], "images": ["a.png", "b.png"]}
    assert len(conversation(row).messages) == 2
    with pytest.raises(mw.DataError, match="the row has 2 images, and its messages show 1"):
        conversation(row, sees=True)
    assert len(conversation({**row, "images": ["a.png"]}, sees=True).messages) == 2


def chats(file: Path, *rows: Any) -> Path:
    file.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return file


def recipe(file: Path, **options: Any) -> TokenizeSpec:
    chat = Chat(tokenizer(), ChatOptions(template=GOOD["plain"]))
    return TokenizeSpec(
        **{"name": "data", "files": (file,), "make": chat.documents, "settings_key": "", "unused": chat.unused}
        | options
    )


def test_bad_rows_are_grouped_and_all_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good, typo = {"messages": [ASKS, SAYS], "id": 1}, [{"messages": [{**ASKS, "role": f"n{n}"}]} for n in range(30)]
    half = {"messages": [ASKS, {**SAYS, "content": "a\ud800"}]}
    file = chats(tmp_path / "a.jsonl", good, *typo, half, '{"messages"', "null")
    with pytest.raises(mw.DataError) as error:
        prepare(recipe(file), tmp_path / "cache")
    message_of = str(error.value).splitlines()
    assert [line.split(": ")[0] for line in message_of[1:-1]] == [
        f"  30 rows, the first {file}:2", f"  1 row, the first {file}:32", f"  1 row, the first {file}:33",
        f"  1 row, the first {file}:34",
    ]  # fmt: skip
    assert message_of[4].endswith("it is null, not an object")
    documents = prepare(recipe(file, on_bad="skip"), tmp_path / "cache")
    assert (len(documents), documents.statistics.skipped, documents.unused) == (1, 33, ["id"])
    assert "fields of data that are not used: id" in caplog.text
    for listing in (tmp_path / "cache").glob("*.rows.txt"):
        assert [line.split(": ")[0] for line in listing.read_text().splitlines()] == [
            f"{file}:{n}" for n in range(2, 35)
        ]
    text = chats(tmp_path / "t.jsonl", {"text": "a"}, '{"text": "a\\ud800"}')
    of_texts = recipe(text, make=Texts(tokenizer()).documents, unused=None, on_bad="skip")
    assert prepare(of_texts, tmp_path / "cache").statistics.skipped == 1


def test_a_list_of_rows_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"text": "ä€\n"}, {"text": "b"}, 7, {"text": "c"}]
    file = tmp_path / "a.json"
    for indent in (None, 1):
        file.write_text("\ufeff\n" + json.dumps(rows, indent=indent, ensure_ascii=False) + "\n")
        [shard] = row_files.shards_of(row_files.files_of(file))
        read = [*row_files.rows_of(shard)]
        assert [row.values for row in read] == [rows[0], rows[1], {}, rows[3]]
        assert read[2].wrong == "it is a number, not an object"
    assert [row_files.place_of(file, row.at) for row in read] == [f"{file}:{n}" for n in (3, 6, 9, 10)]
    for text, wanted in (
        ('[{"text": "a"}', "Expecting ',' or ']'"), ('[{"text": "a"},]', "not a JSON list"),
        ('[{} {}]', "line 1 column 5"),
        ("[{}] {}", "Extra data"), ("[" * 100_000, "not a JSON list"), ('["\\ud8', "not a JSON list"),
    ):  # fmt: skip
        file.write_text(text)
        with pytest.raises(mw.DataError, match=f"a.json.*{wanted}"):
            [*row_files.rows_of(row_files.shards_of([file])[0])]
    monkeypatch.setattr(row_files, "_ARRAY_BYTES", 3)
    with pytest.raises(mw.DataError, match=r"above the limit .* jq -c '\.\[\]'"):
        [*row_files.rows_of(row_files.shards_of([file])[0])]
    chats(file, {"text": "a"}, {"text": "b"})  # lines under another name
    assert [row.values["text"] for shard in row_files.shards_of([file]) for row in row_files.rows_of(shard)] == [
        "a",
        "b",
    ]
    with pytest.raises(mw.DataError, match=r"name its .json yourself"):
        row_files.files_of(tmp_path)


@pytest.mark.parametrize("harm", ["empty", "junk", "cut", "inside"])
def test_a_broken_table_is_named(tmp_path: Path, harm: str) -> None:
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["words"] * 1000 + [str(n) for n in range(1000)]}), file, compression="none")
    whole = file.read_bytes()
    inside = whole[:40] + bytes(200) + whole[240:]
    file.write_bytes({"empty": b"", "junk": b"x" * 500, "cut": whole[:-100], "inside": inside}[harm])
    with pytest.raises(mw.DataError, match=r"a.parquet is not a complete Parquet file"):
        [row for shard in row_files.shards_of([file]) for row in row_files.rows_of(shard)]


ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize("on_bad", ["stop", "skip"])
def test_a_template_without_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_bad: str) -> None:
    monkeypatch.setattr(template_sandbox, "_POLLS", 4)
    make = Chat(tokenizer(), ChatOptions(template=ENDLESS)).documents
    file = chats(tmp_path / "a.jsonl", {"messages": [ASKS, SAYS]})
    before = threading.active_count()
    with pytest.raises(mw.DataError, match=r"^\S*a.jsonl:1: the chat template has not ended in 0 seconds; check it"):
        prepare(recipe(file, make=make, on_bad=on_bad), tmp_path / "cache")
    for thread in threading.enumerate():
        if thread.name.startswith("template"):
            thread.join(5)
    assert threading.active_count() <= before, "it goes on"
    assert not template_sandbox._POOLS, "a killed thread takes no other row"


def test_a_template_that_explodes_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = iter([0, 1 << 20, 2 << 30])
    monkeypatch.setattr(template_sandbox, "_peak_bytes", lambda: next(sizes))
    with pytest.raises(mw.DataError, match="more than 1 GiB of memory"):
        message_of({"messages": [ASKS, SAYS]}, template=ENDLESS)
    monkeypatch.undo()
    monkeypatch.setattr("meshwright.data.chat.MOST_CHARACTERS", 10)
    with pytest.raises(mw.DataError, match="writes 11 characters for the first 1 messages; at most 10"):
        message_of({"messages": [ASKS, SAYS]}, template="{{ 'x' * 11 }}")


@pytest.mark.parametrize(("platform", "wanted"), [("linux", 3072), ("darwin", 3)])
def test_the_memory_of_a_process_is_counted_in_bytes(
    monkeypatch: pytest.MonkeyPatch, platform: str, wanted: int
) -> None:
    usage = SimpleNamespace(getrusage=lambda _: SimpleNamespace(ru_maxrss=3), RUSAGE_SELF=0)
    monkeypatch.setattr(template_sandbox, "resource", usage)
    monkeypatch.setattr(template_sandbox, "sys", SimpleNamespace(platform=platform))
    assert template_sandbox._peak_bytes() == wanted


def test_a_forked_process_renders_in_threads_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "_POOLS", {})
    parent = template_sandbox._executor()
    assert template_sandbox._executor() is parent
    monkeypatch.setattr(template_sandbox, "os", SimpleNamespace(getpid=lambda: -1))
    assert template_sandbox._executor() is not parent


TOO_LARGE = {  # of one operation in C, which no thread could end
    "'a' * 10 ** 8", "10 ** n", "[0] * n", "n * [0]", "(2 ** 999999) * (2 ** 999999)", "'%99999999d' % 1",
    "'%*d' % (n, 1)", "'%99999999d'|format(1)", "'a'.rjust(n)", "'a'.zfill(n)", "'a'.center(width)",
    "'a'|center(n)", "'a'|indent(width=n)", "1|round(n, 'ceil')", "[1]|batch(n, 2)|list", "range(n)|list",
}  # fmt: skip


@pytest.mark.parametrize("operation", sorted(TOO_LARGE))
def test_an_operation_that_could_not_be_ended_is_refused(operation: str) -> None:
    with pytest.raises(mw.DataError, match=r"SecurityError|OverflowError"):
        message_of(
            {"messages": [ASKS, SAYS]}, template="{% set n = 99999999 %}{% set width = n %}{{ " + operation + " }}"
        )


def test_what_templates_compute_stays() -> None:
    args = "2 ** 10, 7 % 2, 'ab' * 3, [0] * 2, 2 * 0.5, '%05.1f' % 2, '%s'|format(10 ** 12), 'a'.ljust(3), 9e9|round"
    [ours, plain] = [each().from_string("{{ [" + args + "] }}") for each in (Sandbox, ImmutableSandboxedEnvironment)]
    assert ours.render() == plain.render()


DEEP = "[" * 100_000
BROKEN: dict[str, tuple[str, str]] = {
    f"{name} {text[:20]}": (name, text)
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json")
    for text in ("[]", "null", '"x"', "{", DEEP, "")
} | {
    "model of tokenizer.json": ("tokenizer.json", '{"model": "x", "added_tokens": {}}'),
    "tokens of tokenizer_config.json": ("tokenizer_config.json", '{"added_tokens_decoder": [1]}'),
    "eos_token of tokenizer_config.json": ("tokenizer_config.json", '{"eos_token": [1, {}]}'),
    "model_type of config.json": ("config.json", '{"model_type": [1]}'),
    "vocab_size of config.json": ("config.json", '{"model_type": "qwen3", "vocab_size": "x"}'),
    "text as eos_token_id": ("generation_config.json", '{"eos_token_id": "x"}'),
    "object as eos_token_id": ("generation_config.json", '{"eos_token_id": [{}]}'),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    at = tmp_path_factory.mktemp("tokenizer")
    tokenizer().save_pretrained(at)
    (at / "config.json").write_text('{"model_type": "qwen3"}')
    (at / "generation_config.json").write_text('{"eos_token_id": [2]}')
    return at


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files_of_a_tokenizer_are_named(directory: Path, case: str) -> None:
    name, text = BROKEN[case]
    whole = (directory / name).read_text()
    (directory / name).write_text(text)
    try:
        with pytest.raises(mw.DataError) as error:
            stop_ids_of(tokenizer_of(directory), generation_config_of(directory))
    finally:
        (directory / name).write_text(whole)
    assert re.search(rf"(^|/){name}\b", str(error.value))


def test_whole_files_of_a_tokenizer(directory: Path) -> None:
    assert stop_ids_of(tokenizer_of(directory), generation_config_of(directory)) == {2}


def test_a_template_must_be_a_small_text(tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    for path, content, wanted in (
        (Path("/dev/zero"), None, "is not a file"), (file, b"\xff", "is not UTF-8"), (file, bytes(5 << 20), "too many"),
        (tmp_path, None, "is not a file"), (tmp_path / "none", None, "No such file"),
    ):  # fmt: skip
        if content:
            path.write_bytes(content)
        with pytest.raises(mw.DataError, match=wanted):
            template_of(path)


def png(file: Path, width: int, height: int) -> Path:
    """The header of a large image, which needs no more bytes."""
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(b"")),
        (b"IEND", b""),
    )
    made = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    ]
    file.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(made))
    return file


def test_images_that_no_processor_needs(tmp_path: Path) -> None:
    from PIL import Image

    Image.new("RGB", (9, 8)).save(tmp_path / "a.png")
    assert vision_files.size_of(tmp_path / "a.png") == (8, 9)
    with pytest.raises(mw.DataError, match=r"a.png has 9000 x 9000 pixels, above the limit of 67,108,864"):
        vision_files.size_of(png(tmp_path / "a.png", 9000, 9000))
    (tmp_path / "b.png").write_bytes(
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n"
    )
    with pytest.raises(mw.DataError, match=r"b.png cannot be read as an image: it is none of PNG, JPEG"):
        vision_files.size_of(tmp_path / "b.png")


def test_dropped_documents_are_not_counted(tmp_path: Path) -> None:
    rows = [{"text": "ab"}, {"text": "a" * 50}, {"text": "abc"}, {"text": "a" * 60}]
    result = prepare(
        recipe(chats(tmp_path / "a.jsonl", *rows), make=Texts(tokenizer()).documents, unused=None), tmp_path / "cache"
    )
    source = source_of(result, 10, too_long="drop")
    counts = result.statistics_of(source.lengths > 0)
    assert (counts.documents, counts.tokens, counts.targets, counts.longest, counts.too_long) == (2, 7, 5, 4, 2)
    assert result.statistics.targets == 7 + 112 - 4
    sections = {"train": SimpleNamespace(streams_per_step=1), "mesh": SimpleNamespace(num_data_ranks=1)}
    config = SimpleNamespace(**sections, distill=None, objective_options=None, recipe=SimpleNamespace(dtype=COMPUTE))
    data = SimpleNamespace(documents=[result], plan=Plan([source], length=10, epochs=1), num_steps=1)
    text = dry_run.dry_run(config, data, {})  # type: ignore[arg-type]
    assert "2 documents longer than 10 tokens left out" in text
    assert text.splitlines()[1].split()[1:6] == ["4", "2", "7", "5", "4"]
    assert "leaves much padding" in text
    full = SimpleNamespace(**{**vars(data), "plan": Plan([source], length=7, epochs=1)})
    assert "leaves much padding" not in dry_run.dry_run(config, full, {})  # type: ignore[arg-type]
