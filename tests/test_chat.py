"""A trained turn stands after the very tokens that a server would send, in any template; no other role is trained."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import meshwright as mw
from meshwright.data import chat as chats
from meshwright.data.chat import Chat, ChatOptions
from meshwright.data.chat_formats import conversation
from meshwright.data.message_parts import Attachments
from meshwright.data.messages import message_of
from meshwright.data.tokens import Tokens
from tests import parts
from tests.templates import GOOD, KEPT, REFUSED, tokenizer

CHATS = 300  # of each template
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
CASES = [(name, {}) for name in GOOD] + list(KEPT.items())


def drawn(seed: int) -> dict[str, Any]:
    """A conversation with thinking in all places, tools, and newlines at the borders. Each text says whose it is."""
    dice = random.Random(seed)
    edge = lambda: "\n" * dice.choice([0, 0, 0, 1, 2])  # noqa: E731 - one line reads better
    number, messages = iter(range(1000)), list[dict[str, Any]]()
    if dice.random() < 0.4:
        messages.append({"role": "system", "content": f"S{next(number)}"})
    tools = TOOLS if dice.random() < 0.5 else None
    for _ in range(dice.randint(1, 4)):
        messages.append({"role": "user", "content": f"{edge()}U{next(number)}{edge()}"})
        while tools and dice.random() < 0.4:
            arguments = {"at": next(number), "unused": None}
            call = {"name": "look", "arguments": json.dumps(arguments) if dice.random() < 0.5 else arguments}
            content = dice.choice([None, f"A{next(number)}"])
            messages.append({"role": "assistant", "content": content, "tool_calls": [{"function": call}]})
            messages += [{"role": "tool", "content": f"R{next(number)}"} for _ in range(dice.randint(1, 2))]
        messages.append(_answer(dice, f"{edge()}A{next(number)}{edge()}", f"A{next(number)}"))
    return {"messages": messages, "tools": tools}


def _answer(dice: random.Random, content: str, thought: str) -> dict[str, Any]:
    kind = dice.choice(["none", "field", "inside", "closing tag"])
    if kind == "field":
        return {"role": "assistant", "content": content, "reasoning_content": thought}
    if kind == "inside":
        content = f"<think>\n{thought}\n</think>\n\n{content}"
    elif kind == "closing tag":
        content = f"{thought}\n</think>\n\n{content}"
    return {"role": "assistant", "content": content}


def sent(row: dict[str, Any], number: int, template: str, args: dict[str, Any], thinks: bool) -> list[int]:
    """The prompt of a server, written without the code under test."""
    messages = [
        {k: v for k, v in m.items() if v is not None} | {"content": m["content"] or ""} for m in row["messages"]
    ]
    for message in messages:
        for call in message.get("tool_calls", ()):
            inputs = call["function"]["arguments"]
            arguments = json.loads(inputs) if isinstance(inputs, str) else inputs
            at = {key: value for key, value in arguments.items() if value is not None}
            message["tool_calls"] = [{"type": "function", "function": {"name": "look", "arguments": at}}]
    text = tokenizer().apply_chat_template(
        messages[:number], tools=row["tools"], chat_template=template, tokenize=False, add_generation_prompt=True,
        enable_thinking=thinks, **args,
    )  # fmt: skip
    return list(tokenizer().encode(text, add_special_tokens=False))


def thinks(message: dict[str, Any]) -> bool:
    return "reasoning_content" in message or "</think>" in (message["content"] or "")


def check(row: dict[str, Any], documents: list[Tokens], template: str, args: dict[str, Any]) -> int:
    """Count the right turns; raise at the first wrong one."""
    wanted = [number for number, message in enumerate(row["messages"]) if message["role"] == "assistant"]
    result = [(document, span) for document in documents for span in document.spans]
    assert len(result) == len(wanted), "each turn once"
    for number, (document, (start, stop)) in zip(wanted, result, strict=True):
        message = row["messages"][number]
        prompt = sent(row, number, template, args, thinks(message))
        assert document.ids[:start].tolist() == prompt, f"message {number}: another context than a server's"
        text = tokenizer().decode(document.ids[start:stop])
        assert text.find("<|im_end|>") == len(text) - len("<|im_end|>"), text
        assert not any(other in text for other in "USR"), f"message {number} trains messages of others: {text!r}"
        assert (message["content"] or "").rpartition("</think>")[2].strip() in text
        for call in message.get("tool_calls", ()):
            assert call["function"]["name"] in text
            assert "null" not in text
    return len(wanted)


def check_all(name: str, args: dict[str, Any], num: int = CHATS) -> int:
    chat = Chat(tokenizer(), ChatOptions(template=GOOD[name], template_args=args))
    return sum(check(row, chat.documents(row), GOOD[name], args) for row in map(drawn, range(num)))


@pytest.mark.parametrize(("name", "args"), parts.every(2, CASES), ids=str)
def test_every_turn_stands_where_a_server_would_ask_for_it(name: str, args: dict[str, Any]) -> None:
    assert check_all(name, args) > 2 * CHATS


@pytest.mark.parametrize("name", REFUSED)
def test_a_template_that_prompts_otherwise_is_refused(name: str) -> None:
    chat = Chat(tokenizer(), ChatOptions(template=REFUSED[name]))
    for seed in range(20):
        with pytest.raises(mw.DataError, match=r"message \d+ differently from its generation prompt"):
            chat.documents(drawn(seed))


def test_history_that_stays_is_one_document() -> None:
    row = {"messages": [{"role": ("user", "assistant")[n % 2], "content": f"{'UA'[n % 2]}{n}"} for n in range(8)]}
    documents = {
        name: len(Chat(tokenizer(), ChatOptions(template=GOOD[name])).documents(row)) for name in ("plain", "hybrid")
    }
    assert documents == {"plain": 1, "hybrid": 4}


def one(**changes: Any) -> dict[str, Any]:
    asks, says = {"role": "user", "content": "U0"}, {"role": "assistant", "content": "A1"}
    return {"messages": [asks, says, {**asks, "content": "U2"}, {**says, "content": "A3", **changes}]}


def trained(row: dict[str, Any], **options: Any) -> list[str]:
    chat = Chat(tokenizer(), ChatOptions(**{"template": GOOD["hybrid"], **options}))
    return [tokenizer().decode(d.ids[a:b]) for d in chat.documents(row) for a, b in d.spans]


def test_which_turns_are_trained() -> None:
    assert trained(one(), turns="last") == ["A3<|im_end|>"]
    assert trained(one(train=False)) == trained(one(weight=0)) == ["A1<|im_end|>"]
    assert trained(one(), thinking=True)[1] == "<think>\n\n</think>\n\nA3<|im_end|>"
    assert trained(one(reasoning_content="A9"))[1] == "<think>\nA9\n</think>\n\nA3<|im_end|>"


MARKED = """{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\\n' -}}{%- if m.role == 'assistant' -%}
{%- generation -%}{{- m.content + '<|im_end|>' -}}{%- endgeneration -%}{%- else -%}{{- m.content + '<|im_end|>' -}}
{%- endif -%}{{- '\\n' -}}{%- endfor -%}"""


def test_joined_is_one_render_with_the_marks_of_the_template() -> None:
    assert trained(one(), template=MARKED, turns="joined") == ["A1<|im_end|>", "A3<|im_end|>"]
    with pytest.raises(mw.DataError, match="generation"):
        trained(one(), turns="joined")
    shows = ChatOptions(template="{{ tools | length }}{{ mood }}" + MARKED, turns="joined", template_args={"mood": "a"})
    [made] = Chat(tokenizer(), shows).documents({**one(), "tools": TOOLS, "chat_template_kwargs": {"mood": "b"}})
    assert tokenizer().decode(made.ids).startswith("1b<|im_start|>user")


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": [{"from": "human", "value": "U0"}, {"from": "gpt", "value": "A1"}]},
        {"prompt": "U0", "completion": "A1"},
        {"prompt": [{"role": "user", "content": "U0"}], "completion": [{"role": "assistant", "content": "A1"}]},
        {"instruction": "U0", "input": "", "output": "A1"},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "U0"}]},
            {"role": "model", "content": "A1"}]},
    ],
)  # fmt: skip
def test_layouts_of_others(row: dict[str, Any]) -> None:
    result = conversation(row)
    assert [(m["role"], m["content"]) for m in result.messages] == [("user", "U0"), ("assistant", "A1")]
    assert result.trained == [False, True]


def test_renamed_fields() -> None:
    row = {"dialog": one()["messages"], "functions": json.dumps(TOOLS)}
    result = conversation(row, {"messages": "dialog", "tools": "functions"})
    assert len(result.messages) == 4
    assert result.tools == TOOLS
    with pytest.raises(mw.DataError, match="no field 'talk'"):
        conversation(row, {"messages": "talk"})


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ({}, "the row has the fields none"),
        ({"messages": "hello"}, "not a list of messages"),
        ({"messages": []}, "an empty list"),
        ({"messages": [{"role": "user", "content": 7}]}, "content of message 0 is a number"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, "'narrator'; known are system, user, assistant, tool"),
        ({"messages": [{"role": "system", "content": "x"}]}, "no message has the role user"),
        (one(content=""), "message 3 of the assistant says nothing"),
        (one(content=None), "content of message 3 is null"),
        (one(tool_calls=[{"function": {"arguments": "{}"}}]), "no function name"),
        (one(tool_calls=[{"function": {"name": "f", "arguments": "{"}}]), "of f in message 3 are not valid JSON"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "shows one more image than the row has"),
        ({**one(), "tools": "{"}, "tools are not valid JSON"),
    ],
)  # fmt: skip
def test_a_bad_row_is_named(row: dict[str, Any], wanted: str) -> None:
    with pytest.raises(mw.DataError, match=wanted):
        Chat(tokenizer(), ChatOptions(template=GOOD["plain"])).documents(row)


def test_a_turn_without_an_end_is_refused() -> None:
    endless = GOOD["plain"].replace("{{- '<|im_end|>\\n' -}}\n  {%- endif -%}\n{%- endfor", "{%- endif -%}\n{%- endfor")
    assert endless != GOOD["plain"]
    with pytest.raises(mw.DataError, match="no stop token ends message 1"):
        trained(one(), template=endless)


Turn = Callable[..., tuple[list[int], list[int]]]


def _of_one_render(self: Chat, chat: Any, number: int, seen: object) -> tuple[list[int], list[int]]:
    """Masks by the lengths of prefixes, as many do it."""
    whole = self._ids(self._render(chat, len(chat.messages), {}, add_generation_prompt=False))
    before = len(self._ids(self._render(chat, number, {}, add_generation_prompt=True)))
    after = len(self._ids(self._render(chat, number + 1, {}, add_generation_prompt=False)))
    return whole[:before], whole[before:after]


def _changed(change: Callable[[list[int], list[int]], tuple[list[int], list[int]]]) -> Turn:
    real = Chat._turn
    return lambda self, chat, number, seen: change(*real(self, chat, number, seen))


def _deaf(self: Chat, chat: Any, num: int, flags: Any, **how: Any) -> str:
    return str(self._apply(chat.messages[:num], tools=chat.tools, tokenize=False, **how))


def _no_tools(self: Chat, chat: Any, num: int, flags: Any, **how: Any) -> str:
    return str(self._apply(chat.messages[:num], tokenize=False, **how, **flags))


def _with_nulls(row: dict[str, Any], fields: object, **_: object) -> Any:
    result = conversation(row)
    for message in result.messages:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"]["unused"] = None
    return result


_documents = Chat.documents


def _glued(self: Chat, row: dict[str, Any]) -> list[Tokens]:
    ids, spans = list[int](), list[tuple[int, int]]()
    for document in _documents(self, row):
        spans += [(a + len(ids), b + len(ids)) for a, b in document.spans]
        ids += document.ids.tolist()
    return [chats.tokens(ids, spans)]


PLANTS: dict[str, tuple[object, str, object]] = {
    "prefixes of one render": (Chat, "_turn", _of_one_render),
    "one token too late": (Chat, "_turn", _changed(lambda p, c: ([*p, c[0]], c[1:]))),
    "the header trained": (Chat, "_turn", _changed(lambda p, c: (p[:-3], [*p[-3:], *c]))),
    "the newline as a part of the stop": (Chat, "_turn", _changed(lambda p, c: (p, [*c, *tokenizer().encode("\n")]))),
    "the flag left out": (Chat, "_render", _deaf),
    "tools not passed": (Chat, "_render", _no_tools),
    "nulls in arguments": (chats, "conversation", _with_nulls),
    "one document for all turns": (chats.Chat, "documents", _glued),
}


@pytest.mark.parametrize("name", PLANTS)
def test_planted_mistakes_are_caught(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(*PLANTS[name])  # type: ignore[arg-type]
    with pytest.raises((AssertionError, mw.DataError)):
        check_all("hybrid", {}, 20)


@pytest.mark.parametrize(
    ("row", "images", "videos"),
    [
        (dict(image="a.png"), ["a.png"], []), (dict(images="a.png"), ["a.png"], []),
        (dict(images=["a.png", "b.png"]), ["a.png", "b.png"], []), (dict(images=("a.png",)), ["a.png"], []),
        (dict(images=[], image="a.png"), ["a.png"], []), (dict(images=["b.png"], image="a.png"), ["b.png"], []),
        (dict(video="a.mp4"), [], ["a.mp4"]), (dict(videos=["a.mp4"]), [], ["a.mp4"]), (dict(images=None), [], []),
        (dict(image={"url": "a.png"}), [{"url": "a.png"}], []),
    ],
)  # fmt: skip
def test_attachments_of_a_row(row: dict[str, Any], images: list[Any], videos: list[Any]) -> None:
    made = Attachments(row)
    assert made.left == {"image": images, "video": videos}
    assert made.num == {"image": len(images), "video": len(videos)}


def test_attachments_are_used_in_order_and_counted() -> None:
    made = Attachments(dict(images=["a.png", {"path": "b.png"}], video="c.mp4"))
    assert made.parts("x<image><video> y<image>", 0) == [
        {"type": "text", "text": "x"}, {"type": "image", "image": "a.png"}, {"type": "video", "video": "c.mp4"},
        {"type": "text", "text": " y"}, {"type": "image", "image": "b.png"},
    ]  # fmt: skip
    made.check_all_shown()
    with pytest.raises(mw.DataError, match="message 4 shows one more image than the row has: 2 in 'images'"):
        made.parts("<image>", 4)
    unused = Attachments(dict(images=["a.png", "b.png"]))
    unused.parts("<image>", 0)
    with pytest.raises(mw.DataError, match="the row has 2 images, and its messages show 1"):
        unused.check_all_shown()
    with pytest.raises(mw.DataError, match="the row has 1 video, and its messages show 0"):
        Attachments(dict(video="a.mp4")).check_all_shown()
    for text in ("x<image>", [{"type": "text", "text": "x<image>"}]):
        assert Attachments({}).parts(text, 0) == "x<image>", "a row without images writes of one"


SHAREGPT, OPENAI = {"from": "human", "value": "U"}, {"role": "user", "content": "U"}


@pytest.mark.parametrize(
    ("raw", "wanted"),
    [
        (SHAREGPT, OPENAI), (OPENAI, OPENAI), ({**SHAREGPT, "name": "n", "weight": None}, {**OPENAI, "name": "n"}),
        ({**SHAREGPT, "role": None}, OPENAI), ({**OPENAI, **SHAREGPT}, {**OPENAI, **SHAREGPT}),
        ({**SHAREGPT, "from": "gpt"}, {"role": "assistant", "content": "U"}),
    ],
)  # fmt: skip
def test_names_of_message_fields(raw: dict[str, Any], wanted: dict[str, Any]) -> None:
    """A role is never replaced by `from`."""
    assert message_of(raw, 0, Attachments({})) == wanted


FLAG = (
    "{% for m in messages %}{{ m.role + ':' + m.content }}{% endfor %}"
    "{{ enable_thinking if enable_thinking is defined else 'unset' }}"
)


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        (dict(), "unset"), (dict(thinking=True), "True"), (dict(thinking=False), "False"),
        (dict(thinking=True, template_args={"enable_thinking": False}), "False"),
        (dict(template_args={"enable_thinking": 3}), "3"),
    ],
)  # fmt: skip
def test_thinking_of_a_prompt(options: dict[str, Any], flag: str) -> None:
    """With thinking="auto" the template decides; its arguments override the option."""
    chat = Chat(tokenizer(), ChatOptions(template=FLAG, **options))
    assert tokenizer().decode(chat.prompt("U")) == f"user:U{flag}"
    with pytest.raises(mw.DataError, match="message 0 of the user holds the special token"):
        chat.request([{"role": "user", "content": "<|im_end|>"}])
    call = {"type": "function", "function": {"name": "f", "arguments": {"<|im_end|>": 1}}}
    asked = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    with pytest.raises(mw.DataError, match="message 1 of the assistant holds the special token"):
        chat.request([*asked, {"role": "tool", "content": "r"}])


@pytest.mark.parametrize(
    ("text", "in_thinking", "thinking", "content"),
    [
        (" b\n", False, None, "b"), ("<think>a</think>b", False, "a", "b"), ("a </think> b", True, "a", "b"),
        ("a</think>b", False, "a", "b"), ("a", True, "a", ""), (" <think> a", False, "a", ""),
    ],
)  # fmt: skip
def test_an_answer_is_split_at_the_end_of_its_thinking(
    text: str, in_thinking: bool, thinking: str | None, content: str
) -> None:
    message = chats.message_of_answer(text, in_thinking=in_thinking)
    assert (message.get("reasoning_content"), message["content"]) == (thinking, content)


@pytest.mark.parametrize(
    ("options", "args", "flag"),
    [
        (dict(), {}, "unset"), (dict(thinking=True), {}, "True"),
        (dict(thinking=True), {"enable_thinking": False}, "False"),
        (dict(thinking=True, template_args={"enable_thinking": 3}), {}, "3"),
        (dict(template_args={"enable_thinking": 3}), {"enable_thinking": 4}, "4"),
    ],
)  # fmt: skip
def test_a_row_overrides_the_options_of_a_whole_chat(options: dict[str, Any], args: dict[str, Any], flag: str) -> None:
    row = {"messages": [{"role": "user", "content": "U"}], "chat_template_kwargs": args}
    made = Chat(tokenizer(), ChatOptions(template=FLAG, **options)).document(row)
    assert (tokenizer().decode(made.ids), made.spans) == (f"user:U{flag}", ())


def test_a_whole_chat_ends_with_its_last_stop_token() -> None:
    made = Chat(tokenizer(), ChatOptions(template=GOOD["plain"])).document(one())
    assert tokenizer().decode(made.ids).endswith("U2<|im_end|>\n<|im_start|>assistant\nA3<|im_end|>")


@pytest.mark.parametrize(
    ("content", "thought", "wanted"),
    [
        ("A", None, False), ("A", " \n", False), ("A", "T", True), ("<think>\n\n</think>\n\nA", None, False),
        ("T</think>A", None, True), ("\n<think>T</think>", "", True), (" </think>A", None, False),
    ],
)  # fmt: skip
def test_an_empty_block_is_no_thinking(content: str, thought: str | None, wanted: bool) -> None:
    assert chats.thinks({"role": "assistant", "content": content, "reasoning_content": thought}) is wanted


@pytest.mark.parametrize(
    ("named", "eos", "wanted"),
    [(None, 7, {7}), (5, 7, {5, 7}), ([5, 0], 7, {5, 0, 7}), (0, None, {0}), ([], 7, {7}), (7, 7, {7})],
)
def test_stop_tokens_are_those_of_both_files(named: Any, eos: int | None, wanted: set[int]) -> None:
    assert chats.stop_ids_of(SimpleNamespace(eos_token_id=eos), {"eos_token_id": named}) == wanted


def test_only_special_tokens_are_refused_in_texts() -> None:
    """Qwen's tokenizers add <think> as a token that is not special. The longest of several tokens is named."""
    added = [SimpleNamespace(content=text, special=text != "<think>") for text in ("<|a|>", "<think>", "<|a|>b")]
    known = SimpleNamespace(added_tokens_decoder=dict(enumerate(added)), all_special_tokens=["<eos>"])
    assert chats._special_tokens(known).findall("x<|a|>b<think><eos>.<|a|>") == ["<|a|>b", "<eos>", "<|a|>"]
    none = SimpleNamespace(added_tokens_decoder={}, all_special_tokens=[])
    assert chats._special_tokens(none).search("a") is None
