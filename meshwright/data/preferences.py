"""Rows of preferences (a chosen and a rejected answer to one prompt) as groups of two documents.

The formats, by the fields that a row has next to `chosen` and `rejected`:

  prompt                        text, or a list of messages                       TRL
  messages or conversations     the chat so far                                   ms-swift, LLaMA-Factory
  instruction                   with optional input and history                   Alpaca
  none of these                 whole chats in chosen and rejected                TRL, UltraFeedback, HH-RLHF

Both answers get the same prompt, token by token, and only what differs between them is trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import DataError
from .chat import Chat, thinks
from .chat_formats import KWARGS, WITH_ALL, as_messages, of_instruction, with_our_names
from .json_values import kind_of
from .message_parts import Attachments
from .messages import message_of, role_of
from .tokenizer import encoded
from .tokens import Tokens, together, tokens

Row = Mapping[str, Any]
Finish = Callable[[Tokens], Tokens]
_ANSWERS = ("chosen", "rejected")
_PROMPTS = ("prompt", "messages", "conversations", "instruction")
_WITH_INSTRUCTION = ("input", "history")


@dataclass(frozen=True)
class ChatPairs:
    """Preferences over chats. `finish`: what each document becomes, such as one with a label at its last token.

    `fields` renames fields of rows, and the options of `chat` must not.
    """

    chat: Chat
    finish: Finish
    fields: Mapping[str, str] = field(default_factory=dict)

    def documents(self, row: Row) -> list[Tokens]:
        """Return the pair of a row, the chosen answer first."""
        row = with_our_names(row, self.fields)
        prompt, answers = _split(row)
        rest = {name: value for name, value in row.items() if name not in (*_ANSWERS, *_PROMPTS, *_WITH_INSTRUCTION)}
        rest[KWARGS] = self._template_args(rest.get(KWARGS), answers)
        pair = [self._document({**rest, "messages": [*prompt, *answer]}, name) for name, answer in answers.items()]
        chosen, rejected = ([*each.ids[: each.spans[0][0]]] for each in pair)
        if chosen != rejected:
            raise DataError(
                "the chat template renders another prompt for the chosen answer than for the rejected one; set "
                "thinking=, or give a template of your own"
            )
        return [together([self.finish(each) for each in pair])]

    def _template_args(self, given: Any, answers: Mapping[str, list[Any]]) -> Any:
        """Request thinking in both prompts if one of the answers has thinking: otherwise the prompts would differ."""
        options = self.chat.options
        if (
            options.thinking != "auto"
            or "enable_thinking" in options.template_args
            or not isinstance(given, Mapping | None)
        ):
            return given
        normal = (message_of(each, 0, Attachments({})) for answer in answers.values() for each in answer)
        return {"enable_thinking": any(thinks(each) for each in normal if each["role"] == "assistant"), **(given or {})}

    def _document(self, row: Row, name: str) -> Tokens:
        """Return one of the two documents."""
        documents = self.chat.documents(row)
        if len(documents) != 1 or not documents[0].num_targets:
            raise DataError(
                f"{name} makes {len(documents)} documents with trained tokens, and an answer of a pair is one: a turn "
                "before the last one thinks, or nothing of it is trained on"
            )
        return documents[0]

    def unused(self, row: Row) -> set[str]:
        """Return the fields of a row that are not used."""
        return _unused(row, self.fields, WITH_ALL)


@dataclass(frozen=True)
class TextPairs:
    """Preferences over plain texts: `prompt`, `chosen` and `rejected`, concatenated without a template."""

    tokenizer: Any  # one of transformers
    finish: Finish
    fields: Mapping[str, str] = field(default_factory=dict)

    def documents(self, row: Row) -> list[Tokens]:
        """Return the pair of a row, the chosen answer first. The end token is a part of each answer."""
        row = with_our_names(row, self.fields)
        texts = {name: row.get(name) for name in ("prompt", *_ANSWERS)}
        for name, text in texts.items():
            if not isinstance(text, str) and not (name == "prompt" and text is None):
                raise DataError(
                    f'its field {name!r} is {kind_of(text)}, not text; for messages leave kind = "text" out'
                )
        if texts["chosen"] == texts["rejected"]:
            raise DataError(_SAME)
        prompt = encoded(self.tokenizer, texts["prompt"] or "")
        end = [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        answers = [[*encoded(self.tokenizer, texts[name] or ""), *end] for name in _ANSWERS]
        pair = [tokens([*prompt, *ids], [(len(prompt), len(prompt) + len(ids))]) for ids in answers]
        if not all(each.num_targets for each in pair):
            raise DataError("one of its answers is empty")
        return [together([self.finish(each) for each in pair])]

    def unused(self, row: Row) -> set[str]:
        """Return the fields of a row that are not used."""
        return _unused(row, self.fields, ("prompt",))


_SAME = "chosen and rejected are the same; leave the row out"


def _split(row: Row) -> tuple[list[Any], dict[str, list[Any]]]:
    """Return the messages of the prompt, which are not trained on, and the messages of both answers."""
    answers = {name: _messages_of(row, name) for name in _ANSWERS}
    chosen, rejected = answers.values()
    if chosen == rejected:
        raise DataError(_SAME)
    if "margin" in row and row["margin"] is not None:
        raise DataError("the row has a 'margin', which would change the loss and is not supported; drop the field")
    prompt = _prompt_of(row)
    if role_of(chosen[0]) != "assistant":  # whole chats
        common = 0
        while common < min(map(len, (chosen, rejected))) - 1 and chosen[common] == rejected[common]:
            common += 1
        _check_is_shown(prompt, chosen[:common])
        prompt, answers = chosen[:common], {name: answer[common:] for name, answer in answers.items()}
    for name, answer in answers.items():
        if role_of(answer[-1]) != "assistant":
            raise DataError(f"the last message of {name} is not the assistant's, so nothing of it can be compared")
    if not prompt:
        raise DataError("the row has no prompt, and chosen and rejected do not begin with the same messages")
    untrained = [{**message, "train": False} if isinstance(message, Mapping) else message for message in prompt]
    return untrained, answers


def _messages_of(row: Row, name: str) -> list[Any]:
    """Return an answer as messages: a text and a single message become a list."""
    value = row.get(name)
    if value is None:
        has = ", ".join(map(str, row)) or "none"
        raise DataError(
            f"the row has no {name!r}, which a pair needs; it has the fields {has}. Name yours with fields="
        )
    return as_messages("assistant", [value] if isinstance(value, Mapping) else value)


def _prompt_of(row: Row) -> list[Any]:
    """Return the messages before the answers, from the field that holds them; an empty list without such a field."""
    for name in _PROMPTS:
        value = row.get(name)
        if value is not None and value != "":
            return of_instruction(row)[:-1] if name == "instruction" else as_messages("user", value)
    return []


def _check_is_shown(prompt: list[Any], chat: list[Any]) -> None:
    """Refuse a prompt that whole chats do not contain: it would be dropped."""
    missing = [message for message in prompt if message not in chat]
    if missing:
        raise DataError(
            "the row has a prompt and whole chats in chosen and rejected, and the chats do not contain the prompt "
            f"{str(missing[0])!r:.80}; drop one of them"
        )


def _unused(row: Row, fields: Mapping[str, str], also: tuple[str, ...]) -> set[str]:
    """Return the non-null fields of a row that are not used."""
    used = {fields.get(name, name) for name in (*_ANSWERS, *_PROMPTS, *_WITH_INSTRUCTION, *also)}
    return {name for name, value in row.items() if value is not None and name not in used}
