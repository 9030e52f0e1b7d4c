"""Rows of chat data sets, in the layouts that people have, as messages that a chat template takes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import DataError
from .parts import Shown

Message = dict[str, Any]

_ROLES = {
    "system": "system", "developer": "system", "user": "user", "human": "user", "assistant": "assistant",
    "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant", "tool": "tool",
    "observation": "tool", "function": "tool", "ipython": "tool",
}  # fmt: skip
_LAYOUTS = "messages, conversations, prompt and completion, or instruction and output"


@dataclass(frozen=True)
class Conversation:
    """`learnt`: by message, whether it is trained on. Only what an assistant says can be."""

    messages: Sequence[Message]
    tools: Sequence[Any] | None
    learnt: Sequence[bool]


def conversation(
    row: Mapping[str, Any], fields: Mapping[str, str] | None = None, *, sees: bool = False
) -> Conversation:
    """`fields`: what a field is called in the row, by what it is called here (`{"messages": "dialog"}`). `sees`: the
    messages must show all pictures that the row has."""
    for ours, theirs in (fields or {}).items():
        if theirs not in row:
            raise DataError(f"there is no field {theirs!r}, which is to be {ours!r}; it has {', '.join(map(str, row))}")
    named = {**row, **{ours: row[theirs] for ours, theirs in (fields or {}).items()}}
    shown = Shown(named)
    messages = [_message(each, number, shown) for number, each in enumerate(_messages(named))]
    if sees:
        shown.check_all_shown()
    if not any(message["role"] == "user" for message in messages):
        raise DataError("no message is a user's; a chat begins with what somebody asks")
    learnt = [_is_learnt(message) for message in messages]
    for message in messages:
        for flag in ("train", "weight"):
            message.pop(flag, None)
    return Conversation(messages, _tools(named.get("tools")), learnt)


def _messages(row: Mapping[str, Any]) -> list[Any]:
    if row.get("messages") is not None:
        return _listed(row["messages"], "messages")
    if row.get("conversations") is not None:
        return _listed(row["conversations"], "conversations")
    if row.get("prompt") is not None and row.get("completion") is not None:
        return [*_said("user", row["prompt"]), *_said("assistant", row["completion"])]
    if row.get("instruction") is not None and row.get("output") is not None:
        asked = "\n\n".join(filter(None, (row["instruction"], row.get("input"))))
        system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
        return [*system, {"role": "user", "content": asked}, {"role": "assistant", "content": row["output"]}]
    raise DataError(
        f"the row has the fields {', '.join(map(str, row)) or 'none'}; a chat has {_LAYOUTS}. Name yours with fields="
    )


def _listed(given: Any, what: str) -> list[Any]:
    if not isinstance(given, list) or not given:
        raise DataError(f"{what} is {_kind(given)}, not a list of messages")
    return given


def _said(role: str, given: Any) -> list[Any]:
    return [{"role": role, "content": given}] if isinstance(given, str) else _listed(given, role)


def _kind(given: Any) -> str:
    return f"an empty {type(given).__name__}" if given in ("", [], {}) else f"a {type(given).__name__}"


def _message(given: Any, number: int, shown: Shown) -> Message:
    """With `role` and `content` as text, and arguments of calls as objects: a template would quote a string again."""
    if not isinstance(given, Mapping):
        raise DataError(f"message {number} is {_kind(given)}; give {{'role': ..., 'content': ...}}")
    message = {key: value for key, value in given.items() if value is not None}
    if "from" in message and "role" not in message:
        message = {"role": message.pop("from"), "content": message.pop("value", None), **message}
    role = _ROLES.get(str(message.get("role")))
    if role is None:
        known = ", ".join(dict.fromkeys(_ROLES.values()))
        raise DataError(f"message {number} has the role {message.get('role')!r}; known are {known}")
    calls = [_call(each, number) for each in message.get("tool_calls") or ()]
    content = shown.parts(message.get("content"), number)
    content = _text(content, number, missing_is_fine=bool(calls or message.get("reasoning_content")))
    if role == "assistant" and not isinstance(content, str):
        raise DataError(f"message {number} of the assistant shows pictures; it can only learn to say text")
    if role == "assistant" and not (content or calls or message.get("reasoning_content")):
        raise DataError(f"message {number} of the assistant says nothing: no content, no thinking, no call of a tool")
    return {**message, "role": role, "content": content, **({"tool_calls": calls} if calls else {})}


def _text(given: Any, number: int, *, missing_is_fine: bool) -> Any:
    """A text, or the parts of a message that shows something."""
    if given is None and missing_is_fine:
        return ""
    if not isinstance(given, str) and not (isinstance(given, list) and given and isinstance(given[0], dict)):
        raise DataError(f"content of message {number} is {_kind(given)}, not text")
    return given


def _call(given: Any, number: int) -> Message:
    function = given.get("function", given) if isinstance(given, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(f"a call of a tool in message {number} has no name of a function")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError as error:
            raise DataError(f"arguments of {function['name']} in message {number} are no JSON: {error}") from error
    # tables fill the arguments of other tools with null, which would be trained on
    return {"type": "function", "function": {"name": function["name"], "arguments": _without_nulls(arguments)}}


def _tools(given: Any) -> list[Any] | None:
    if isinstance(given, str):
        try:
            given = json.loads(given or "null")
        except ValueError as error:
            raise DataError(f"tools are no JSON: {error}") from error
    if not given:
        return None
    if not isinstance(given, list):
        raise DataError(f"tools are {_kind(given)}, not a list")
    return [_without_nulls(tool) for tool in given]


def _without_nulls(given: Any) -> Any:
    if isinstance(given, Mapping):
        return {key: _without_nulls(value) for key, value in given.items() if value is not None}
    return [_without_nulls(value) for value in given] if isinstance(given, list) else given


def _is_learnt(message: Message) -> bool:
    return message["role"] == "assistant" and bool(message.get("train", True)) and message.get("weight", 1) != 0
