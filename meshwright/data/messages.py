"""Normalise chat messages of many data sets for a chat template: role, content, thinking, tool calls.

A field that changes what a message means, or whether it is trained on, is used or refused by its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import DataError
from .json_values import kind_of, parsed, without_nulls
from .message_parts import Attachments

Message = dict[str, Any]

_CALL = "function_call"  # LLaMA-Factory: a role whose text is the call
# Role names of OpenAI, ShareGPT, LLaMA-Factory and Llama, mapped to those that Qwen's templates know.
_ROLES = {
    "system": "system", "developer": "system", "user": "user", "human": "user", "assistant": "assistant",
    "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant", _CALL: "assistant",
    "tool": "tool", "observation": "tool", "function": "tool", "ipython": "tool",
}  # fmt: skip
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # of vLLM and Qwen, of OpenRouter, of gpt-oss
# Names under which data sets and trainers (Axolotl, ms-swift, LLaMA-Factory) mark what is trained on.
_MASKS = (
    "mask", "masked", "loss", "loss_mask", "loss_scale", "loss_weight", "trainable", "training", "training_detail",
    "train_detail",
)  # fmt: skip


def role_of(value: Any) -> str | None:
    """Return the role of a message as templates name it, None for an unknown one."""
    return _ROLES.get(str(_with_openai_names(value, 0).get("role")))


def message_of(value: Any, number: int, attachments: Attachments) -> Message:
    """Return a message with `role`, `content` as text or parts, thinking in `reasoning_content`, and arguments of tool
    calls as objects (a template would quote a JSON string a second time).

    Role names are mapped too (`gpt`, `model`, `human`, ...). An unknown role is an error: a template would write the
    name unchanged, and the model would see a header that it does not know.
    """
    message = _with_openai_names(value, number)
    role = _ROLES.get(str(message.get("role")))
    if role is None:
        known = ", ".join(dict.fromkeys(_ROLES.values()))
        raise DataError(f"message {number} has the role {message.get('role')!r}; known are {known}")
    _refuse_masks(message, number)
    calls, thinking = _calls(message, number), _thinking(message, number)
    content = attachments.parts(message.get("content"), number)
    content = _text(content, number, missing_is_fine=bool(calls or thinking))
    if role == "assistant" and not isinstance(content, str):
        raise DataError(f"message {number} of the assistant shows images; a model can only be trained to write text")
    if role == "assistant" and not (content or calls or thinking):
        raise DataError(f"message {number} of the assistant says nothing: no content, no thinking, no tool call")
    thinking_field = {} if thinking is None else {"reasoning_content": thinking}
    return {**message, "role": role, "content": content, **thinking_field, **({"tool_calls": calls} if calls else {})}


def _with_openai_names(raw: Any, number: int) -> Message:
    """Return the non-null fields under OpenAI's names (ShareGPT has `from` and `value`)."""
    if not isinstance(raw, Mapping):
        raise DataError(f"message {number} is {kind_of(raw)}; give {{'role': ..., 'content': ...}}")
    message = {key: raw for key, raw in raw.items() if raw is not None}
    if "from" in message and "role" not in message:
        message = {"role": message.pop("from"), "content": message.pop("value", None), **message}
    return message


def _refuse_masks(message: Message, number: int) -> None:
    """Refuse per-message masks and weights."""
    for name in _MASKS:
        if name in message:
            raise DataError(
                f"message {number} has {name!r}, which is not supported; a message is trained on as a whole or not at "
                "all: set train: true or false"
            )


def _thinking(message: Message, number: int) -> str | None:
    """Take the thinking out of a message, whatever its field is called; None without such a field.

    Three names are in use: reasoning_content (vLLM, Qwen), reasoning (OpenRouter) and thinking (gpt-oss). A template
    reads one of them, and silently ignores the other two.
    """
    value = {name: message.pop(name) for name in _THOUGHTS if name in message}
    for name, thinking in value.items():
        if not isinstance(thinking, str):
            raise DataError(f"{name} of message {number} is {kind_of(thinking)}, not text")
    texts = list(dict.fromkeys(filter(None, value.values())))
    if len(texts) > 1:
        raise DataError(f"message {number} thinks differently in {' and '.join(value)}; keep one of them")
    if message.get("reasoning_details") and not texts:
        raise DataError(
            f"message {number} thinks in 'reasoning_details', which is not supported; give reasoning_content"
        )
    return texts[0] if texts else "" if value else None


def _text(value: Any, number: int, *, missing_is_fine: bool) -> Any:
    """Check a content: text, or the parts of a message that shows something."""
    if value is None and missing_is_fine:
        return ""
    if not isinstance(value, str) and not (isinstance(value, list) and value and isinstance(value[0], dict)):
        raise DataError(f"content of message {number} is {kind_of(value)}, not text")
    return value


def _calls(message: Message, number: int) -> list[Message]:
    """Take the tool calls out of a message: a list, one call in OpenAI's old field, or text (LLaMA-Factory)."""
    value = message.pop("tool_calls", None)
    # LLaMA-Factory: the text of a `function_call` message is the call, as JSON.
    if message["role"] == _CALL:
        value, message["content"] = message["content"], None
    if _CALL in message:
        value = [message.pop(_CALL)]
    if isinstance(value, str):
        value = parsed(value, f"the calls of tools in message {number} are")
    value = [value] if isinstance(value, Mapping) else value or []
    if not isinstance(value, list):
        raise DataError(f"the calls of tools in message {number} are {kind_of(value)}, not a list")
    return [_call(each, number) for each in value]


def _call(value: Any, number: int) -> Message:
    """Return a tool call with parsed arguments."""
    function = value.get("function", value) if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(f"a tool call in message {number} has no function name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = parsed(arguments or "{}", f"arguments of {function['name']} in message {number} are")
    return {"type": "function", "function": {"name": function["name"], "arguments": without_nulls(arguments)}}


def tools_of(value: Any) -> list[Any] | None:
    """Return the tools of a row as servers pass them to a template: `{"type": "function", "function": ...}`.

    Some data sets store tools as a JSON string, some as bare functions without the outer object. Servers pass a list of
    objects, and so must training, or the rendered system message differs.
    """
    if isinstance(value, str):
        value = parsed(value.strip() or "null", "tools are")
    if not value:
        return None
    if not isinstance(value, list):
        raise DataError(f"tools are {kind_of(value)}, not a list")
    return [_tool(each, number) for number, each in enumerate(value)]


def _tool(value: Any, number: int) -> Any:
    """Return one tool as `{"type": "function", "function": ...}`."""
    if isinstance(value, str):
        value = parsed(value, f"tool {number} is")
    if not isinstance(value, Mapping):
        raise DataError(f"tool {number} is {kind_of(value)}, not an object")
    tool = without_nulls(value)
    is_bare = "name" in tool and "function" not in tool and tool.get("type") in (None, "function")
    return {"type": "function", "function": tool} if is_bare else tool


def take_trained(message: Message, number: int) -> bool:
    """Return whether a message is trained on, and remove the fields `train` and `weight`."""
    # Remove them, since a template gets the message and may iterate over its fields.
    train, weight = message.pop("train", True), message.pop("weight", 1)
    if train not in (0, 1):
        raise DataError(f"train of message {number} is {train!r:.40}; give true or false")
    if weight not in (0, 1):
        raise DataError(
            f"weight of message {number} is {weight!r:.40}; a message is trained on as a whole or not at all, so give "
            '1 or 0. Fractions: weight of [[data]] for a source, or mw.pack(fields={"weight": ...}) in your own loop'
        )
    return bool(message["role"] == "assistant" and train and weight)
