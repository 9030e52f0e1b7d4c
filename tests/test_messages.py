"""Messages of many data sets: roles, masks, tools, calls, thinking and parts under the names that templates know."""

from __future__ import annotations

from typing import Any

import pytest

import meshwright as mw
from meshwright.data.message_parts import Attachments
from meshwright.data.messages import message_of, role_of, tools_of

ROLES = {
    "system": "system developer", "user": "user human", "assistant": "assistant gpt chatgpt bot model function_call",
    "tool": "tool observation function ipython",
}  # fmt: skip
SAYS = {"role": "assistant", "content": "A"}


def message(**fields: Any) -> dict[str, Any]:
    return message_of({**SAYS, **fields}, 0, Attachments({}))


@pytest.mark.parametrize("role", ROLES)
def test_each_name_of_a_role(role: str) -> None:
    for name in ROLES[role].split():
        assert role_of({"role": name}) == role_of({"from": name, "value": "x"}) == role
    assert role_of({"role": role.upper()}) is None


@pytest.mark.parametrize("name", [
    "mask", "masked", "loss", "loss_mask", "loss_scale", "loss_weight", "trainable", "training", "training_detail",
    "train_detail",
])  # fmt: skip
def test_each_mask_of_a_message_is_refused(name: str) -> None:
    assert message(**{name: None}) == SAYS
    for value in (0, 1, [{"train": True}]):
        with pytest.raises(mw.DataError, match=f"message 0 has '{name}'.* set train: true or false"):
            message(**{name: value})


@pytest.mark.parametrize(
    ("tool", "wanted"),
    [
        ({"name": "f", "description": None, "parameters": {"a": None}}, {"name": "f", "parameters": {}}),
        ({"name": "f", "type": "function"}, {"name": "f", "type": "function"}),
        ({"type": "function", "function": {"name": "f", "strict": None}}, {"name": "f"}),
        ('{"name": "f", "strict": null}', {"name": "f"}),
    ],
)  # fmt: skip
def test_a_tool_is_wrapped_once_and_has_no_nulls(tool: Any, wanted: dict[str, Any]) -> None:
    assert tools_of([tool]) == [{"type": "function", "function": wanted}]


def test_a_tool_of_another_type_stays_as_it_is() -> None:
    tool = {"type": "web_search", "name": "f"}
    assert tools_of([tool, {"name": "g"}]) == [tool, {"type": "function", "function": {"name": "g"}}]
    assert [tools_of(none) for none in (None, "", " ", "null", [], "[]")] == [None] * 6


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, {}), ({"arguments": ""}, {}), ({"arguments": {"a": None, "b": 0}}, {"b": 0}),
        ({"arguments": '{"a": null, "b": ""}'}, {"b": ""}),
    ],
)  # fmt: skip
def test_arguments_of_a_call_are_an_object_without_nulls(given: dict[str, Any], wanted: dict[str, Any]) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": wanted}}
    for raw in ({"name": "f", **given}, {"id": 3, "function": {"name": "f", **given}}):
        assert message(tool_calls=[raw], content=None) == {**SAYS, "content": "", "tool_calls": [call]}


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"thinking": ""}, ""), ({"reasoning": "", "thinking": "T"}, "T"), ({"reasoning_content": "T"}, "T"),
        ({"reasoning": "T", "reasoning_details": [1]}, "T"),
    ],
)  # fmt: skip
def test_thinking_has_one_name_even_where_it_is_empty(fields: dict[str, Any], wanted: str) -> None:
    details = {name: value for name, value in fields.items() if name == "reasoning_details"}
    assert message(**fields) == {**SAYS, **details, "reasoning_content": wanted}


def test_texts_of_parts_are_joined_as_they_are() -> None:
    texts = [{"type": "text", "text": text} for text in ("a ", None, "b", "\nc")]
    assert message(content=texts)["content"] == "a b\nc"


@pytest.mark.parametrize(
    ("part", "wanted"),
    [
        ({"type": "image_url", "image_url": "a"}, {"type": "image", "image": "a"}),
        ({"type": "image", "url": "a", "fps": 2}, {"type": "image", "image": "a"}),
        ({"type": "image", "image": {"path": "a", "bytes": None}}, {"type": "image", "image": "a"}),
        ({"type": "video_url", "video_url": {"url": "a"}}, {"type": "video", "video": "a"}),
        ({"type": "video", "path": "a", "fps": 3}, {"type": "video", "video": "a", "fps": 3.0}),
        ({"type": "video", "video": [{"path": "a"}, {"url": "b"}, "c"]}, {"type": "video", "video": ["a", "b", "c"]}),
        ({"type": "video", "video": ("a", "b")}, {"type": "video", "video": ["a", "b"]}),
    ],
)
def test_a_part_names_a_path_in_many_ways(part: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert Attachments({}).parts([part], 0) == [wanted]


def test_parts_take_the_files_of_the_row_in_order() -> None:
    row = Attachments({"images": ["a", "b"], "videos": [["c", {"path": "d"}]]})
    parts = [{"type": "image"}, {"type": "text", "text": "x<video>y"}, {"type": "image_url"}]
    assert row.parts(parts, 0) == [
        {"type": "image", "image": "a"}, {"type": "text", "text": "x"}, {"type": "video", "video": ["c", "d"]},
        {"type": "text", "text": "y"}, {"type": "image", "image": "b"},
    ]  # fmt: skip
