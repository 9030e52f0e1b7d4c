"""Messages of chats in the layouts that people have -> messages that a chat template takes.

A field that changes what a message means, or what is learnt of it, is taken or refused by its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import DataError
from .json_values import kind_of, parsed, without_nulls
from .message_parts import Attachments

Message = dict[str, Any]

_CALL = "function_call"  # LLaMA-Factory: a role whose text is the call
_ROLES = {
    "system": "system", "developer": "system", "user": "user", "human": "user", "assistant": "assistant",
    "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant", _CALL: "assistant",
    "tool": "tool", "observation": "tool", "function": "tool", "ipython": "tool",
}  # fmt: skip
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # of vLLM and Qwen, of OpenRouter, of gpt-oss
_MASKS = (
    "mask", "masked", "loss", "loss_mask", "loss_scale", "loss_weight", "trainable", "training", "training_detail",
    "train_detail",
)  # fmt: skip


def message_of(given: Any, number: int, shown: Attachments) -> Message:
    """Return a message with `role`, `content` as text or parts, thinking in `reasoning_content`, and arguments of calls
    as objects: a template would quote a string again."""
    message = _named(given, number)
    role = _ROLES.get(str(message.get("role")))
    if role is None:
        known = ", ".join(dict.fromkeys(_ROLES.values()))
        raise DataError(f"message {number} has the role {message.get('role')!r}; known are {known}")
    _refuse_masks(message, number)
    calls, thought = _calls(message, number), _thought(message, number)
    content = shown.parts(message.get("content"), number)
    content = _text(content, number, missing_is_fine=bool(calls or thought))
    if role == "assistant" and not isinstance(content, str):
        raise DataError(f"message {number} of the assistant shows pictures; it can only learn to say text")
    if role == "assistant" and not (content or calls or thought):
        raise DataError(f"message {number} of the assistant says nothing: no content, no thinking, no call of a tool")
    thinks = {} if thought is None else {"reasoning_content": thought}
    return {**message, "role": role, "content": content, **thinks, **({"tool_calls": calls} if calls else {})}


def _named(given: Any, number: int) -> Message:
    """Return the fields that are not null, by the names of OpenAI."""
    if not isinstance(given, Mapping):
        raise DataError(f"message {number} is {kind_of(given)}; give {{'role': ..., 'content': ...}}")
    message = {key: value for key, value in given.items() if value is not None}
    if "from" in message and "role" not in message:
        message = {"role": message.pop("from"), "content": message.pop("value", None), **message}
    return message


def _refuse_masks(message: Message, number: int) -> None:
    for name in _MASKS:
        if name in message:
            raise DataError(
                f"message {number} has {name!r}, which is not read; a message is learnt as a whole or not at all: say "
                "which by train: true or false"
            )


def _thought(message: Message, number: int) -> str | None:
    """Take the thinking out of a message, whatever its field is called; None without such a field."""
    given = {name: message.pop(name) for name in _THOUGHTS if name in message}
    for name, thought in given.items():
        if not isinstance(thought, str):
            raise DataError(f"{name} of message {number} is {kind_of(thought)}, not text")
    texts = list(dict.fromkeys(filter(None, given.values())))
    if len(texts) > 1:
        raise DataError(f"message {number} thinks differently in {' and '.join(given)}; keep one of them")
    if message.get("reasoning_details") and not texts:
        raise DataError(f"message {number} thinks in 'reasoning_details', which is not read; give reasoning_content")
    return texts[0] if texts else "" if given else None


def _text(given: Any, number: int, *, missing_is_fine: bool) -> Any:
    """Return a text, or the parts of a message that shows something."""
    if given is None and missing_is_fine:
        return ""
    if not isinstance(given, str) and not (isinstance(given, list) and given and isinstance(given[0], dict)):
        raise DataError(f"content of message {number} is {kind_of(given)}, not text")
    return given


def _calls(message: Message, number: int) -> list[Message]:
    """Take the calls of tools out of a message: a list, one in the old field of OpenAI, or a text (LLaMA-Factory)."""
    given = message.pop("tool_calls", None)
    if message["role"] == _CALL:
        given, message["content"] = message["content"], None
    if _CALL in message:
        given = [message.pop(_CALL)]
    if isinstance(given, str):
        given = parsed(given, f"the calls of tools in message {number} are")
    given = [given] if isinstance(given, Mapping) else given or []
    if not isinstance(given, list):
        raise DataError(f"the calls of tools in message {number} are {kind_of(given)}, not a list")
    return [_call(each, number) for each in given]


def _call(given: Any, number: int) -> Message:
    function = given.get("function", given) if isinstance(given, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(f"a call of a tool in message {number} has no name of a function")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = parsed(arguments or "{}", f"arguments of {function['name']} in message {number} are")
    return {"type": "function", "function": {"name": function["name"], "arguments": without_nulls(arguments)}}


def tools_of(given: Any) -> list[Any] | None:
    """Return the tools of a row as servers pass them to a template, each as {"type": "function", "function": ...}."""
    if isinstance(given, str):
        given = parsed(given.strip() or "null", "tools are")
    if not given:
        return None
    if not isinstance(given, list):
        raise DataError(f"tools are {kind_of(given)}, not a list")
    return [_tool(each, number) for number, each in enumerate(given)]


def _tool(given: Any, number: int) -> Any:
    if isinstance(given, str):
        given = parsed(given, f"tool {number} is")
    if not isinstance(given, Mapping):
        raise DataError(f"tool {number} is {kind_of(given)}, not an object")
    tool = without_nulls(given)
    is_bare = "name" in tool and "function" not in tool and tool.get("type") in (None, "function")
    return {"type": "function", "function": tool} if is_bare else tool


def take_learnt(message: Message, number: int) -> bool:
    """Return whether a message is learnt, and take out the fields that say so."""
    train, weight = message.pop("train", True), message.pop("weight", 1)
    if train not in (0, 1):
        raise DataError(f"train of message {number} is {train!r:.40}; give true or false")
    if weight not in (0, 1):
        raise DataError(
            f"weight of message {number} is {weight!r:.40}; a message is learnt as a whole or not at all, so give 1 or "
            '0. Shares: weight of [[data]] for a source, or mw.pack(fields={"weight": ...}) in a loop of your own'
        )
    return bool(message["role"] == "assistant" and train and weight)
