"""Formats of chat rows (OpenAI messages, ShareGPT conversations, prompt and completion, Alpaca) as messages for a
template.

A field that would change what a row means (masks, weights, preference labels) is used or refused by its name, never
dropped: if `loss_mask` were ignored, training on the whole data set would still look fine in every curve. Other fields,
such as ids, are ignored and listed once.

The formats, by the fields that a row has:

  messages                  [{"role": "user", "content": ...}, ...]             OpenAI, TRL, ms-swift
  conversations             [{"from": "human", "value": ...}, ...]              ShareGPT, LLaMA-Factory
  prompt, completion        text, or lists of messages                          TRL
  instruction, output       text, with optional input and history               Alpaca
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import DataError
from .json_values import kind_of, parsed, without_nulls
from .message_parts import Attachments
from .messages import Message, message_of, take_trained, tools_of

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Conversation:
    """A chat. `trained`: by message, whether it is trained on (only an assistant's can be). `template_args`: arguments
    of the template for this row."""

    messages: Sequence[Message]
    tools: Sequence[Any] | None
    trained: Sequence[bool]
    template_args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Format:
    """A row format. `needs`: fields that such a row has. `may`: other fields that it may have."""

    needs: tuple[str, ...]
    messages: Callable[[Row], list[Any]]
    may: tuple[str, ...] = ()

    @property
    def fields(self) -> set[str]:
        """Return all fields that the format uses."""
        return {*self.needs, *self.may, *WITH_ALL}


KWARGS = "chat_template_kwargs"
# Fields that every format may have.
WITH_ALL = ("system", "tools", KWARGS, "image", "images", "video", "videos")
# Arguments of apply_chat_template that a row must not set through chat_template_kwargs.
_RESERVED = (
    "messages", "conversation", "chat_template", "tools", "tokenize", "add_generation_prompt", "return_dict",
    "continue_final_message", "return_assistant_tokens_mask",
)  # fmt: skip
_MESSAGES_SAY = "set train: true or false in each message instead"
_NO_WEIGHTS = "put rows of another weight into a source of their own, with the weight of [[data]]"
_PREFERENCE_LABEL = "it rates the answer, which needs a preference loss; keep the good rows and drop the field"
# Fields that change what is trained on or what the template gets: the values that have no effect, and the fix.
_MEANINGFUL_FIELDS: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "history": (([], ""), "it is read only together with instruction and output: put its turns into the messages"),
    **dict.fromkeys(("mask", "loss_mask", "completion_mask", "assistant_masks"), ((), _MESSAGES_SAY)),
    "train": ((True,), _MESSAGES_SAY),
    **dict.fromkeys(("weight", "sample_weight", "loss_weight"), ((1,), _NO_WEIGHTS)),
    "enable_thinking": ((), f"put it into {KWARGS}"),
    "functions": (([],), "give tools"),
    "kto_tag": ((), _PREFERENCE_LABEL),
}
_PREFERENCE = (
    'the row has two answers, chosen and rejected; set objective = "dpo" (or "orpo", "simpo", "reward"), because '
    "training on `chosen` alone would be something else"
)


def conversation(row: Row, fields: Mapping[str, str] | None = None, *, sees: bool = False) -> Conversation:
    """Parse a row. `fields` maps our field names to those of the row (`{"messages": "dialog"}`). `sees`: messages must
    show all images of the row.

    Order of work: rename fields, find the format, refuse fields that would change the meaning, normalise messages, read
    and remove the training masks, add the system message.
    """
    renamed = with_our_names(row, fields or {})
    chat_format = _format_of(renamed)
    _refuse_meaningful_fields(renamed, chat_format)
    attachments = Attachments(renamed)
    messages = [message_of(each, number, attachments) for number, each in enumerate(chat_format.messages(renamed))]
    if sees:
        attachments.check_all_shown()
    if not any(message["role"] == "user" for message in messages):
        raise DataError("no message has the role user; a chat needs one")
    if _is_preference(renamed) and messages[-1]["role"] != "assistant":
        raise DataError(_PREFERENCE)
    trained = [take_trained(message, number) for number, message in enumerate(messages)]
    system = _system(messages, renamed.get("system"))
    return Conversation(
        [*system, *messages], tools_of(renamed.get("tools")), [*(False for _ in system), *trained],
        _template_args(renamed.get(KWARGS)),
    )  # fmt: skip


def unused_fields(row: Row, fields: Mapping[str, str]) -> set[str]:
    """Return the non-null fields of a row that `conversation` does not use."""
    used = {fields.get(name, name) for name in _format_of(with_our_names(row, fields)).fields}
    return {name for name, value in row.items() if value is not None and name not in used}


def with_our_names(row: Row, fields: Mapping[str, str]) -> Row:
    """Rename fields of a row."""
    for name, original in fields.items():
        if original not in row:
            raise DataError(
                f"there is no field {original!r} to use as {name!r}; the row has {', '.join(map(str, row))}"
            )
    # A renamed field disappears under its old name. The union puts back a name that is also ours (two fields swapped).
    moved = {*fields.values()}
    return {name: value for name, value in row.items() if name not in moved} | {
        name: row[original] for name, original in fields.items()
    }


def _format_of(row: Row) -> _Format:
    """Return the first format whose fields a row has."""
    for chat_format in _FORMATS:
        # The first match wins. Nulls do not count, because a merged data set has every column in every row.
        if all(row.get(name) is not None for name in chat_format.needs):
            return chat_format
    if _is_preference(row):
        raise DataError(_PREFERENCE)
    known = "messages, conversations, prompt and completion, or instruction and output"
    raise DataError(
        f"the row has the fields {', '.join(map(str, row)) or 'none'}; a chat has {known}. Name yours with fields="
    )


def _of_list(name: str) -> Callable[[Row], list[Any]]:
    """Return a reader of a field that holds a list of messages."""
    return lambda row: _listed(row[name], name)


def _of_pair(row: Row) -> list[Any]:
    """Read prompt and completion, TRL's format."""
    return [*as_messages("user", row["prompt"]), *as_messages("assistant", row["completion"])]


def of_instruction(row: Row) -> list[Any]:
    """Read an Alpaca row. `history`: earlier pairs of question and answer.

    `instruction` and `input` are joined by an empty line, as in Alpaca's own prompt, but as the user's message of the
    model's chat template and not in Alpaca's "### Instruction" text.
    """
    pairs = row.get("history") or []
    if not isinstance(pairs, list) or not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        raise DataError("history must be a list of pairs [question, answer]")
    question = "\n\n".join(filter(None, (_string(row, "instruction"), _string(row, "input"))))
    turns = [*pairs, (question, _string(row, "output"))]
    roles = ("user", "assistant")
    return [{"role": role, "content": text} for turn in turns for role, text in zip(roles, turn, strict=True)]


_FORMATS = (
    _Format(("messages",), _of_list("messages")),
    _Format(("conversations",), _of_list("conversations")),
    _Format(("prompt", "completion"), _of_pair),
    _Format(("instruction", "output"), of_instruction, ("input", "history")),
)


def _listed(value: Any, what: str) -> list[Any]:
    """Check a non-empty list of messages."""
    if not isinstance(value, list) or not value:
        raise DataError(f"{what} is {kind_of(value)}, not a list of messages")
    return value


def as_messages(role: str, value: Any) -> list[Any]:
    """Return a text as one message, a list unchanged."""
    return [{"role": role, "content": value}] if isinstance(value, str) else _listed(value, role)


def _string(row: Row, name: str) -> str:
    """Return a text field; "" if missing."""
    value = row.get(name)
    if value is not None and not isinstance(value, str):
        raise DataError(f"{name} is {kind_of(value)}, not text")
    return value or ""


def _system(messages: Sequence[Message], value: Any) -> list[Message]:
    """Return the field `system` as a message, unless the messages already have it."""
    if value in (None, ""):
        return []
    if not isinstance(value, str):
        raise DataError(f"system is {kind_of(value)}, not text")
    system_messages = [number for number, message in enumerate(messages) if message["role"] == "system"]
    for number in system_messages:
        if messages[number]["content"] != value:
            raise DataError(f"the field system of the row differs from message {number}; keep one of them")
    return [] if system_messages else [{"role": "system", "content": value}]


def _template_args(value: Any) -> Mapping[str, Any]:
    """Return `chat_template_kwargs` (TRL's name)."""
    if isinstance(value, str):
        value = parsed(value.strip() or "null", f"{KWARGS} are")
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise DataError(f"{KWARGS} are {kind_of(value)}, not an object")
    if not_passed := [name for name in value if name in _RESERVED]:
        raise DataError(f"{KWARGS} name {', '.join(not_passed)}, which no template gets from a row; leave it out")
    return dict(without_nulls(value))


def _refuse_meaningful_fields(row: Row, chat_format: _Format) -> None:
    """Refuse fields that would change a row's meaning and that its format does not read."""
    for name, (harmless, fix) in _MEANINGFUL_FIELDS.items():
        value = row.get(name)
        if value is not None and name not in chat_format.fields and value not in harmless:
            raise DataError(f"the row has {name!r}, which would change its meaning and is not supported; {fix}")
    # A list of labels is a mask over tokens. A label that is a string or number is metadata, and harmless.
    if isinstance(row.get("labels"), list):
        raise DataError(f"the row has a list of 'labels', which is not supported; {_MESSAGES_SAY}")
    if chat_format.needs == ("prompt", "completion") and isinstance(row.get("label"), bool):
        raise DataError(f"the row has a 'label' next to prompt and completion; {_PREFERENCE_LABEL}")


def _is_preference(row: Row) -> bool:
    """Return whether a row has chosen and rejected answers."""
    return row.get("chosen") is not None and row.get("rejected") is not None
