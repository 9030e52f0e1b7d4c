"""`meshwright chat`: the history that a server would keep, and what a terminal or a pipe gets to see."""

from __future__ import annotations

import copy
import functools
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import meshwright as mw
from meshwright.cli import chat_command, main
from meshwright.data import Chat, ChatOptions
from meshwright.engine import Decoding
from meshwright.train import chat_session
from meshwright.train.chat_session import ChatSession, _source_of
from meshwright.train.config import SourceSection
from tests.templates import GOOD, tokenizer

QUESTION = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


@functools.cache
def words(template: str) -> Any:
    result = copy.deepcopy(tokenizer())
    result.chat_template = GOOD[template]
    return result


class Says:
    """Stands for the model: says the next of some answers, and remembers what it was asked."""

    def __init__(self, template: str, *answers: str) -> None:
        self.words, self.answers, self.asked, self.hows = words(template), list(answers), list[str](), list[Decoding]()

    def __call__(self, _model: Any, prompts: Sequence[Sequence[int]], how: Decoding) -> Iterator[list[int]]:
        self.asked.append(self.words.decode(prompts[0]))
        self.hows.append(how)
        ids = self.words.encode(self.answers.pop(0) + "<|im_end|>", add_special_tokens=False)
        for token in ids[: how.tokens]:
            yield [token]


def session(monkeypatch: pytest.MonkeyPatch, says: Says, *, longest: int | None = None, **options: Any) -> ChatSession:
    monkeypatch.setattr(chat_session, "token_stream", says)
    no_model: Any = None
    return ChatSession(Chat(says.words, ChatOptions(**options)), no_model, Decoding(100), longest, system="Be brief.")


def ask(chat: ChatSession, question: str) -> str:
    return "".join(chat.answers(question))


SYSTEM = "<|im_start|>system\nBe brief.<|im_end|>\n"
HISTORIES: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "thinking is dropped": ("hybrid", {}, "<think>\nhm\n</think>\n\nyes", "yes"),
    "thinking is kept": ("block after the question", {"template_args": {"preserve_thinking": True}},
        "hm\n</think>\n\nyes", "<think>\nhm\n</think>\n\nyes"),
    "the prompt opens the thinking": ("block after the question", {}, "hm\n</think>\n\nyes", "yes"),
    "it does not think": ("hybrid", {"thinking": False}, "yes", "yes"),
    "it is cut off while it thinks": ("hybrid", {}, "<think>\nhm", ""),
}  # fmt: skip


@pytest.mark.parametrize("case", HISTORIES)
def test_the_history_is_that_of_a_server(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    template, options, answer, kept = HISTORIES[case]
    says = Says(template, answer, "no")
    chat = session(monkeypatch, says, **options)
    opened = "<think>\n" if template.startswith("block") else ""
    block = "<think>\n\n</think>\n\n" if options.get("thinking") is False else ""
    assert ask(chat, "Why?") == opened + answer
    assert ask(chat, "Sure?") == opened + "no"
    first = SYSTEM + QUESTION.format("Why?")
    assert says.asked[0] == first + opened + block
    assert says.asked[1] == first + kept + "<|im_end|>\n" + QUESTION.format("Sure?") + opened + block
    assert says.hows[0].seed != says.hows[1].seed
    chat.reset()
    says.answers.append("again")
    ask(chat, "Why?")
    assert says.asked[2] == says.asked[0]


def test_what_is_forgotten_and_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that is ended early is kept as far as it went; a question without an answer, or refused, is not."""
    says = Says("plain", "", "a long answer", "yes")
    chat = session(monkeypatch, says)
    assert ask(chat, "Hello?") == ""
    with pytest.raises(mw.DataError, match="holds the special token"):
        ask(chat, "<|im_end|>")
    with pytest.raises(mw.StateError, match="takes no images"):
        chat.show("a.png")
    answer = chat.answers("Why?")
    begun = next(answer) + next(answer)
    answer.close()
    ask(chat, "Sure?")
    assert begun
    assert says.asked[-1] == (
        SYSTEM + QUESTION.format("Why?") + begun.strip() + "<|im_end|>\n" + QUESTION.format("Sure?")
    )


def test_an_image_is_shown_with_one_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next question has none, and neither has a conversation that starts over."""
    asked, hows = list[Any](), list[Decoding]()

    def image(path: str) -> None:
        if path == "bad.png":
            raise mw.DataError("no image")

    def request(messages: list[Any]) -> Any:
        asked.append(messages)
        views = [SimpleNamespace(grid=7)] if isinstance(messages[-1]["content"], list) else []
        return SimpleNamespace(ids=[1, 2], opens_thinking=False, views=views)

    def stream(_model: Any, _prompts: Any, how: Decoding) -> Iterator[list[int]]:
        hows.append(how)
        yield [5]

    monkeypatch.setattr(chat_session, "token_stream", stream)
    processor = SimpleNamespace(image=image, pixels=lambda view: "pixels")
    words = SimpleNamespace(decode=lambda ids, skip_special_tokens: "yes")
    sees: Any = SimpleNamespace(processor=processor, request=request, tokenizer=words)
    for seed in (0, 1):
        chat = ChatSession(sees, cast(Any, None), Decoding(100, seed=seed), None)
        chat.show("a.png")
        with pytest.raises(mw.DataError, match="no image"):
            chat.show("bad.png")
        assert [ask(chat, question) for question in ("What?", "And?")] == ["yes", "yes"]
        chat.show("b.png")
        chat.reset()
        ask(chat, "Hi")
    shown = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "What?"}]
    first, answer = {"role": "user", "content": shown}, {"role": "assistant", "content": "yes"}
    assert asked[3:] == [
        [first],
        [first, answer, {"role": "user", "content": "And?"}],
        [{"role": "user", "content": "Hi"}],
    ]
    assert [how.images for how in hows[3:]] == [[[("pixels", 7)]], None, None]
    assert len({how.seed for how in hows}) == 6, "two seeds share no question"


@pytest.mark.parametrize(
    ("thinking", "args"), [(None, {"enable_thinking": True, "x": 1}), (False, {"x": 1}), (True, {"x": 1})]
)
def test_prompts_are_those_of_the_first_chats_of_a_run(thinking: bool | None, args: dict[str, Any]) -> None:
    """The option decides about thinking, whatever the arguments of the template say."""
    text, first, second = (SourceSection(path=[name]) for name in ("t", "a", "b"))
    text = text.model_copy(update={"kind": "text"})
    first = first.model_copy(update={"template_args": {"enable_thinking": True, "x": 1}})
    source = _source_of(cast(Any, SimpleNamespace(sources=[text, first, second])), thinking)
    assert (source.path, source.template_args, source.images.root) == (["a"], args, str(Path.cwd()))
    assert source.thinking == (first.thinking if thinking is None else thinking)
    assert _source_of(cast(Any, SimpleNamespace(sources=[text])), thinking).path == []


@pytest.mark.parametrize("sees", [True, False])
def test_a_chat_is_opened(sees: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its options and its prompt are tried before the model is loaded, which takes images if the run did."""
    asked, loaded = list[Any](), list[bool]()
    request = lambda messages: asked.append(messages) or SimpleNamespace(ids=[1, 2, 3])  # noqa: E731 - short

    def load(*, tower: bool) -> None:
        loaded.append(tower)

    trained = SimpleNamespace(directory=Path("d"), sources=[], can_see=sees, load=load)
    stand_ins: dict[str, Any] = dict(
        TrainedModel=SimpleNamespace(at=lambda where: trained), chat_of=lambda *_: SimpleNamespace(request=request),
        tokenizer_of=lambda *_: "words", read_config=lambda _: {"max_position_embeddings": 4},
        text_config=lambda config: config, _processor=lambda *_: None, vocab_size_of=lambda _: 10,
        stop_ids_of=lambda *_: frozenset({9}), generation_config_of=lambda _: {},
    )  # fmt: skip
    for name, value in stand_ins.items():
        monkeypatch.setattr(chat_session, name, value)
    chat = chat_session.open_chat("w", Decoding(7, seed=3), system="S")
    assert (chat.decoding, chat.longest, loaded) == (Decoding(7, seed=3, stop=frozenset({9})), 4, [sees])
    assert [[each["role"] for each in messages] for messages in asked] == [["system", "user"]]
    assert chat.messages == [{"role": "system", "content": "S"}]
    with pytest.raises(mw.ConfigError):
        chat_session.open_chat("w", Decoding(7, top_p=5.0))
    monkeypatch.setattr(chat_session, "read_config", lambda _: {"max_position_embeddings": 3})
    with pytest.raises(mw.DataError):
        chat_session.open_chat("w", Decoding(7))
    assert loaded == [sees]


def test_pieces_are_whole_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer has a token for each byte."""
    text = "é 漢 😀 !"
    pieces = list(session(monkeypatch, Says("plain", text)).answers("?"))
    assert "".join(pieces) == text
    assert [piece for piece in pieces if piece] == [*text]


def test_a_full_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer gets what is left of the context; without any the question is refused."""
    says = Says("plain", "x" * 50, "y")
    prompt = len(words("plain").encode(SYSTEM + QUESTION.format("?"), add_special_tokens=False))
    chat = session(monkeypatch, says, longest=prompt + 10)
    assert ask(chat, "?") == "x" * 10
    with pytest.raises(mw.DataError, match=r"leave none of the .* positions of the model for an answer"):
        ask(chat, "?")


def test_ctrl_c_ends_an_answer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The first one ends it after its token, and the chat goes on; the second one ends the program."""
    says, before = Says("plain", "abcdef", "abcdef"), signal.getsignal(signal.SIGINT)
    chat = session(monkeypatch, says)

    def pressed(times: int) -> None:
        def stream(*given: Any) -> Iterator[list[int]]:
            for number, token in enumerate(says(*given)):
                for _ in range(times if number == 2 else 0):
                    os.kill(os.getpid(), signal.SIGINT)
                yield token

        monkeypatch.setattr(chat_session, "token_stream", stream)
        chat_command._answer(chat, "?")

    pressed(1)
    assert capsys.readouterr().out == "abc\n"
    with pytest.raises(KeyboardInterrupt):
        pressed(2)
    assert signal.getsignal(signal.SIGINT) == before


@pytest.mark.parametrize(("option", "thinking"), [([], None), (["on"], True), (["off"], False)])
def test_options_of_a_chat(monkeypatch: pytest.MonkeyPatch, option: list[str], thinking: bool | None) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(chat_session, "open_chat", lambda *given, **named: asked.append((given, named)))
    monkeypatch.setattr(sys, "stdin", type("Lines", (list,), {"isatty": lambda _: False})())
    flags = ["--tokens", "7", "--top-p", "0.5", "--temperature", "0.25", "--seed", "3", "--system", "S"]
    assert main(["chat", "m", *flags, *(["--thinking", *option] if option else [])]) == 0
    decoding = Decoding(7, top_p=0.5, temperature=0.25, seed=3)
    assert asked == [(("m", decoding), dict(system="S", thinking=thinking))]


def test_an_image_is_shown_by_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    chat, shown = session(monkeypatch, Says("plain")), list[str]()
    monkeypatch.setattr(chat, "show", shown.append)
    assert chat_command._take(chat, "/image  a cat.png")
    assert shown == ["a cat.png"]


@pytest.mark.parametrize("on_terminal", [False, True])
def test_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], on_terminal: bool) -> None:
    """Commands, empty lines, a message that begins with a slash; an error ends a pipe, and not a terminal."""
    says = Says("plain", "one", "two", "three")
    chat = session(monkeypatch, says)
    lines = ["Hi", "", "/no_think x", "/reset", "/image", "Hi", "/exit", "never"]

    def typed(_prompt: str) -> str:
        if line := lines.pop(0):
            return line
        raise KeyboardInterrupt  # at the prompt it discards the line

    monkeypatch.setattr(chat_session, "open_chat", lambda *_, **__: chat)
    monkeypatch.setattr("builtins.input", typed)
    stdin = type("Lines", (list,), {"isatty": lambda _: on_terminal})([f"{line}\n" for line in lines])
    monkeypatch.setattr(sys, "stdin", stdin)
    result = main(["chat", "nowhere"])
    shown = capsys.readouterr()
    assert "/image needs the path of an image" in shown.err
    assert result == (0 if on_terminal else 2)
    assert shown.out == ("one\ntwo\nthree\n" if on_terminal else "one\ntwo\n")
    assert says.asked[1].count("user") == 2
    assert not on_terminal or says.asked[2] == says.asked[0]


def test_ctrl_d_ends_the_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    typed = iter(["a", KeyboardInterrupt(), "b", EOFError(), "never"])

    def line(_prompt: str) -> str:
        each = next(typed)
        if isinstance(each, BaseException):
            raise each
        return each

    monkeypatch.setattr("builtins.input", line)
    assert [*chat_command._typed()] == ["a", "b"]
    assert capsys.readouterr().err == "\n/exit or Ctrl-D ends the chat\n\n"
