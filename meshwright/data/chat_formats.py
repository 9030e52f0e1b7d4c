"""Rows of chat data sets, in the layouts that people have, as messages that a chat template takes.

A field that changes what a row means is taken or refused by its name. Others, such as ids and sources, are not used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import DataError
from .json_values import kind_of, parsed, without_nulls
from .message_parts import Attachments
from .messages import Message, message_of, take_learnt, tools_of

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Conversation:
    """`learnt`: by message, whether it is trained on. Only what an assistant says can be. `template_args`: what the
    template gets for this row."""

    messages: Sequence[Message]
    tools: Sequence[Any] | None
    learnt: Sequence[bool]
    template_args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Layout:
    """`needs`: fields that a row of this layout has. `may`: others that it may have."""

    needs: tuple[str, ...]
    messages: Callable[[Row], list[Any]]
    may: tuple[str, ...] = ()

    @property
    def fields(self) -> set[str]:
        return {*self.needs, *self.may, *_WITH_ALL}


_KWARGS = "chat_template_kwargs"
_WITH_ALL = ("system", "tools", _KWARGS, "image", "images", "video", "videos")
_OURS = (
    "messages", "conversation", "chat_template", "tools", "tokenize", "add_generation_prompt", "return_dict",
    "continue_final_message", "return_assistant_tokens_mask",
)  # fmt: skip
_MESSAGES_SAY = "say of each message by train: true or false whether it is learnt"
_NO_WEIGHTS = "give a source of its own to rows of another weight, with the weight of [[data]]"
_JUDGED = "it says whether the answer is good, which needs a loss of its own; keep the good rows, without it"
# Fields that change what is learnt of a row or what its template gets: values that change nothing, and the way out.
_OTHERS: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "history": (([], ""), "it is read beside instruction and output alone: put its turns into the messages"),
    **dict.fromkeys(("mask", "loss_mask", "completion_mask", "assistant_masks"), ((), _MESSAGES_SAY)),
    "train": ((True,), _MESSAGES_SAY),
    **dict.fromkeys(("weight", "sample_weight", "loss_weight"), ((1,), _NO_WEIGHTS)),
    "enable_thinking": ((), f"put it into {_KWARGS}"),
    "functions": (([],), "give tools"),
    "kto_tag": ((), _JUDGED),
}
_PREFERENCE = (
    "a row of preferences (chosen, rejected) needs a loss such as DPO, which meshwright train has not; learning "
    "`chosen` alone would be something else. See docs/losses.md for a loss of your own"
)


def conversation(row: Row, fields: Mapping[str, str] | None = None, *, sees: bool = False) -> Conversation:
    """`fields`: what a field is called in the row, by what it is called here (`{"messages": "dialog"}`). `sees`: the
    messages must show all pictures that the row has."""
    named = _named(row, fields or {})
    layout = _layout_of(named)
    _refuse_others(named, layout)
    shown = Attachments(named)
    messages = [message_of(each, number, shown) for number, each in enumerate(layout.messages(named))]
    if sees:
        shown.check_all_shown()
    if not any(message["role"] == "user" for message in messages):
        raise DataError("no message is a user's; a chat begins with what somebody asks")
    if _is_preference(named) and messages[-1]["role"] != "assistant":
        raise DataError(_PREFERENCE)
    learnt = [take_learnt(message, number) for number, message in enumerate(messages)]
    system = _system(messages, named.get("system"))
    return Conversation(
        [*system, *messages], tools_of(named.get("tools")), [*(False for _ in system), *learnt],
        _template_args(named.get(_KWARGS)),
    )  # fmt: skip


def unused_fields(row: Row, fields: Mapping[str, str]) -> set[str]:
    """Return the fields of a row that `conversation` does not use, but for those that are null."""
    used = {fields.get(name, name) for name in _layout_of(_named(row, fields)).fields}
    return {name for name, value in row.items() if value is not None and name not in used}


def _named(row: Row, fields: Mapping[str, str]) -> Row:
    for ours, theirs in fields.items():
        if theirs not in row:
            raise DataError(f"there is no field {theirs!r}, which is to be {ours!r}; it has {', '.join(map(str, row))}")
    moved = {*fields.values()} - {*fields}
    return {name: value for name, value in row.items() if name not in moved} | {
        ours: row[theirs] for ours, theirs in fields.items()
    }


def _layout_of(row: Row) -> _Layout:
    for layout in _LAYOUTS:
        if all(row.get(name) is not None for name in layout.needs):
            return layout
    if _is_preference(row):
        raise DataError(_PREFERENCE)
    known = "messages, conversations, prompt and completion, or instruction and output"
    raise DataError(
        f"the row has the fields {', '.join(map(str, row)) or 'none'}; a chat has {known}. Name yours with fields="
    )


def _of_list(name: str) -> Callable[[Row], list[Any]]:
    return lambda row: _listed(row[name], name)


def _of_pair(row: Row) -> list[Any]:
    return [*_said("user", row["prompt"]), *_said("assistant", row["completion"])]


def _of_instruction(row: Row) -> list[Any]:
    """Alpaca. `history`: pairs of what was asked and answered before."""
    pairs = row.get("history") or []
    if not isinstance(pairs, list) or not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        raise DataError("history is no list of pairs, each of what was asked and what was answered")
    asked = "\n\n".join(filter(None, (_string(row, "instruction"), _string(row, "input"))))
    turns = [*pairs, (asked, _string(row, "output"))]
    roles = ("user", "assistant")
    return [{"role": role, "content": text} for turn in turns for role, text in zip(roles, turn, strict=True)]


_LAYOUTS = (
    _Layout(("messages",), _of_list("messages")),
    _Layout(("conversations",), _of_list("conversations")),
    _Layout(("prompt", "completion"), _of_pair),
    _Layout(("instruction", "output"), _of_instruction, ("input", "history")),
)


def _listed(given: Any, what: str) -> list[Any]:
    if not isinstance(given, list) or not given:
        raise DataError(f"{what} is {kind_of(given)}, not a list of messages")
    return given


def _said(role: str, given: Any) -> list[Any]:
    return [{"role": role, "content": given}] if isinstance(given, str) else _listed(given, role)


def _string(row: Row, name: str) -> str:
    given = row.get(name)
    if given is not None and not isinstance(given, str):
        raise DataError(f"{name} is {kind_of(given)}, not text")
    return given or ""


def _system(messages: Sequence[Message], given: Any) -> list[Message]:
    """Return the message that the field `system` of a row puts before the others, if they do not begin with it."""
    if given in (None, ""):
        return []
    if not isinstance(given, str):
        raise DataError(f"system is {kind_of(given)}, not text")
    stated = [number for number, message in enumerate(messages) if message["role"] == "system"]
    for number in stated:
        if messages[number]["content"] != given:
            raise DataError(f"the field system of the row says something else than its message {number}; keep one")
    return [] if stated else [{"role": "system", "content": given}]


def _template_args(given: Any) -> Mapping[str, Any]:
    """Return what TRL calls `chat_template_kwargs`."""
    if isinstance(given, str):
        given = parsed(given.strip() or "null", f"{_KWARGS} are")
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise DataError(f"{_KWARGS} are {kind_of(given)}, not an object")
    if not_passed := [name for name in given if name in _OURS]:
        raise DataError(f"{_KWARGS} name {', '.join(not_passed)}, which no template gets from a row; leave it out")
    return dict(without_nulls(given))


def _refuse_others(row: Row, layout: _Layout) -> None:
    """Refuse fields that change what a row means and that its layout does not read."""
    for name, (harmless, way_out) in _OTHERS.items():
        value = row.get(name)
        if value is not None and name not in layout.fields and value not in harmless:
            raise DataError(f"the row has {name!r}, which changes what it means and is not read; {way_out}")
    if isinstance(row.get("labels"), list):
        raise DataError(f"the row has a list of 'labels', which are not read; {_MESSAGES_SAY}")
    if layout.needs == ("prompt", "completion") and isinstance(row.get("label"), bool):
        raise DataError(f"the row has a 'label' beside prompt and completion; {_JUDGED}")


def _is_preference(row: Row) -> bool:
    return row.get("chosen") is not None and row.get("rejected") is not None
