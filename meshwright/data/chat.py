"""Chats as documents: a trained turn stands after the very tokens that an inference engine would send.

A template may write history otherwise than the turn that was trained on: it drops thinking of earlier turns, or adds an
empty block to the last one. So each turn is rendered as a server would ask for it, and a document ends where the next
turn's prompt is no continuation of it. That needs no knowledge of any template.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import DataError
from .chat_formats import Conversation, conversation, unused_fields
from .message_parts import A
from .messages import Message
from .processor import Processor
from .template_sandbox import MOST_CHARACTERS, bounded, install
from .tokenizer import encoded
from .tokens import Tokens, tokens
from .vision_files import View

Turns = Literal["each", "last", "joined"]


@dataclass(frozen=True)
class ChatOptions:
    """`thinking`: whether the prompt asks for it; "auto": where the turn thinks. `turns`: which of the assistant's are
    trained; "joined" renders the chat once, with the template's own marks, whatever a server would send.

    `template`: the text of one to take instead of the tokenizer's. `fields`: see `conversation`.
    """

    thinking: Literal["auto"] | bool = "auto"
    turns: Turns = "each"
    template: str | None = None
    template_args: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, str] = field(default_factory=dict)


class Chat:
    """Turns rows of chats into documents. `tokenizer`: one of transformers. `processor`: of a model that sees."""

    def __init__(
        self, tokenizer: Any, options: ChatOptions | None = None, stop_ids: Collection[int] = (),
        processor: Processor | None = None,
    ) -> None:  # fmt: skip
        self.tokenizer, self.options, self.processor = tokenizer, options or ChatOptions(), processor
        self.stop_ids = frozenset(stop_ids) or stop_ids_of(tokenizer, {})
        self._special = _special_tokens(tokenizer)
        install()
        if not self.options.template and not tokenizer.chat_template:
            raise DataError(
                'the tokenizer has no chat template; give template= of the data, or take texts (kind = "text", --text)'
            )

    def documents(self, row: Mapping[str, Any]) -> list[Tokens]:
        """None where nothing of the row is to be trained on."""
        chat = conversation(row, self.options.fields, sees=self.processor is not None)
        self._check_texts(chat)
        views = [views_of(message, self.processor) for message in chat.messages]
        if self.options.turns == "joined":
            return self._joined(chat, any(views))
        wanted = [number for number, learnt in enumerate(chat.learnt) if learnt]
        found: list[tuple[list[int], list[tuple[int, int]], list[View]]] = []
        for number in wanted[-1:] if self.options.turns == "last" else wanted:
            seen = [view for of_message in views[:number] for view in of_message]
            prompt, turn = self._turn(chat, number, seen)
            if not found or prompt[: len(found[-1][0])] != found[-1][0]:
                found.append(([], [], []))
            ids, spans, before = found[-1]
            before += seen[len(before) :]
            ids += prompt[len(ids) :]
            spans.append((len(ids), len(ids) + len(turn)))
            ids += turn
        return [tokens(ids, spans, seen) for ids, spans, seen in found]

    def unused(self, row: Mapping[str, Any]) -> set[str]:
        """Return the fields of a row that change nothing of its documents."""
        return unused_fields(row, self.options.fields)

    def _check_texts(self, chat: Conversation) -> None:
        """Refuse texts that would become other tokens than their author meant."""
        for number, message in enumerate(chat.messages):
            if found := next(filter(None, map(self._special.search, _texts_of(message))), None):
                raise DataError(
                    f"message {number} of the {message['role']} holds the special token {found[0]!r}, which is no text "
                    "to a model or a server: it would mark where a turn ends or begins. Write it otherwise"
                )
        if found := next(filter(None, map(self._special.search, _texts_of(chat.tools))), None):
            raise DataError(f"the tools hold the special token {found[0]!r}, which is no text to a model")
        for number, (message, learnt) in enumerate(zip(chat.messages, chat.learnt, strict=True)):
            content = message["content"]
            if learnt and content.lstrip().startswith("<think>") and "</think>" not in content:
                raise DataError(
                    f"message {number} begins with <think> and has no </think>: its thinking was cut off, and a model "
                    "would learn never to answer. End it, or leave it out"
                )

    def prompt(self, text: str) -> list[int]:
        """What a server would send where a user begins with `text`. With thinking="auto" the template decides."""
        chat, thinking = conversation({"messages": [{"role": "user", "content": text}]}), self.options.thinking
        flags = {**({} if thinking == "auto" else {"enable_thinking": thinking}), **self.options.template_args}
        return self._ids(bounded(lambda: self._render(chat, 1, flags, add_generation_prompt=True)))

    def _turn(self, chat: Conversation, number: int, seen: Sequence[View]) -> tuple[list[int], list[int]]:
        """What a server would send for message `number`, and what it should get."""
        thinks = _thinks(chat.messages[number]) if self.options.thinking == "auto" else self.options.thinking
        flags = {"enable_thinking": thinks, **self.options.template_args, **chat.template_args}
        head, whole = bounded(
            lambda: (
                self._render(chat, number, flags, add_generation_prompt=True),
                self._render(chat, number + 1, flags, add_generation_prompt=False),
            )
        )
        if not whole.startswith(head):
            at = next(
                (i for i, (a, b) in enumerate(zip(head, whole, strict=False)) if a != b), min(len(head), len(whole))
            )
            raise DataError(
                f"the template writes message {number} otherwise than it prompts for it: the prompt goes on "
                f"{head[at : at + 40]!r}, the chat {whole[at : at + 40]!r}. Set thinking=, give a template of your own "
                'or turns="joined"'
            )
        # two calls: no token straddles the border, as none does when a server generates
        turn = self._ids(self._with_places(whole[len(head) :], []))
        last = max((at for at, token in enumerate(turn) if token in self.stop_ids), default=None)
        if last is None:
            raise DataError(
                f"no stop token closes message {number}, which ends in {whole[-40:]!r}; a model would never learn to "
                "end. Name the stop tokens in generation_config.json"
            )
        return self._ids(self._with_places(head, seen)), turn[: last + 1]

    def _with_places(self, text: str, seen: Sequence[View]) -> str:
        return text if self.processor is None else self.processor.with_places(text, seen)

    def _render(self, chat: Conversation, num: int, flags: Mapping[str, Any], **how: Any) -> str:
        text = str(self._apply(chat.messages[:num], tools=chat.tools, tokenize=False, **how, **flags))
        if len(text) > MOST_CHARACTERS:
            raise DataError(
                f"the template writes {len(text):,} characters for the first {num} messages; at most "
                f"{MOST_CHARACTERS:,} are taken"
            )
        return text

    def _apply(self, messages: Sequence[Message], **how: Any) -> Any:
        try:
            return self.tokenizer.apply_chat_template(list(messages), chat_template=self.options.template, **how)
        except Exception as error:  # a template is a program of somebody else
            raise DataError(
                f"the template refuses the first {len(messages)} messages: {type(error).__name__}: {error}"
            ) from error

    def _ids(self, text: str) -> list[int]:
        return encoded(self.tokenizer, text)

    def _joined(self, chat: Conversation, sees: bool) -> list[Tokens]:
        """As the template marks it. Which tokens are a message's only the template knows, so none can be left out."""
        if sees:
            raise DataError('turns="joined" knows no pictures; leave turns= out')
        if not all(learnt for learnt, m in zip(chat.learnt, chat.messages, strict=True) if m["role"] == "assistant"):
            raise DataError('turns="joined" trains every turn of the assistant, and one of them has train=false')
        flags = {**self.options.template_args, **chat.template_args}
        found = bounded(
            lambda: self._apply(
                chat.messages,
                tools=chat.tools,
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=True,
                **flags,
            )
        )
        mask = [0, *found["assistant_masks"], 0]
        if not any(mask):
            raise DataError(
                'the template has no generation marks, which turns="joined" needs; no template of Qwen has. Leave '
                "turns= out"
            )
        starts = [at for at in range(1, len(mask)) if mask[at] and not mask[at - 1]]
        stops = [at for at in range(1, len(mask)) if not mask[at] and mask[at - 1]]
        return [tokens(found["input_ids"], [(a - 1, b - 1) for a, b in zip(starts, stops, strict=True)])]


def views_of(message: Message, processor: Processor | None) -> list[View]:
    """What a message shows, in its order."""
    parts = [] if isinstance(message["content"], str) else message["content"]
    shown = [part for part in parts if part["type"] != "text"]
    if shown and processor is None:
        raise DataError(
            f"a message of the {message['role']} shows {A[shown[0]['type']]}, which a model sees with its tower; set "
            "train.tower = true"
        )
    return [
        processor.picture(part["image"]) if part["type"] == "image" else processor.video(part["video"], part.get("fps"))
        for part in shown
        if processor is not None
    ]


def _thinks(message: Message) -> bool:
    """In a field of its own, or inside the content, of which a raw completion has the closing tag alone."""
    thought = message.get("reasoning_content") or ""
    content = message["content"]
    if not thought and "</think>" in content:
        thought = content.split("</think>")[0].rpartition("<think>")[2]
    return bool(str(thought).strip())


def stop_ids_of(tokenizer: Any, generation_config: Mapping[str, Any]) -> frozenset[int]:
    """What ends a turn: `eos_token_id` of generation_config.json, and that of the tokenizer."""
    given = generation_config.get("eos_token_id")
    named = [each for each in (given if isinstance(given, list) else [given]) if each is not None]
    if not all(type(each) is int and each >= 0 for each in named):
        raise DataError(
            f"generation_config.json: eos_token_id={given!r:.80} must be the number of a token, or a list of such; "
            "fetch the file again, or correct it"
        )
    own = tokenizer.eos_token_id
    return frozenset(named if own is None else (*named, own))


def _special_tokens(tokenizer: Any) -> re.Pattern[str]:
    """Return what finds the special tokens of a tokenizer in a text; the longest one where several begin."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    names = sorted({*added, *tokenizer.all_special_tokens}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, names)) or r"(?!)")


def _texts_of(value: Any) -> Iterator[str]:
    """All texts of a message or of tools, however deep."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _texts_of(each)
