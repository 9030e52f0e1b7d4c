"""Objections of a run file's JSON schema, in the words of the schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshwright.train.config_docs import schema

SCHEMA = schema()
KINDS: dict[str, Any] = {
    "string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list, "object": dict,
    "null": type(None),
}  # fmt: skip
BOUNDS: dict[str, Any] = {
    "exclusiveMinimum": lambda value, bound: value > bound, "minimum": lambda value, bound: value >= bound,
    "exclusiveMaximum": lambda value, bound: value < bound, "maximum": lambda value, bound: value <= bound,
    "minItems": lambda value, bound: len(value) >= bound, "maxItems": lambda value, bound: len(value) <= bound,
    "enum": lambda value, offered: value in offered, "const": lambda value, only: value == only,
    "pattern": lambda value, pattern: pattern in value,
}  # fmt: skip
WORDS = {"$ref", "anyOf", "type", "properties", "additionalProperties", "items", "required", *BOUNDS}
TEXTS = {"title", "description", "default", "$schema", "$defs"}


def wrong_by_schema(value: Any, about: Any = SCHEMA, at: str = "") -> Iterator[str]:
    if "$ref" in about:
        about = {**SCHEMA["$defs"][about["$ref"].rpartition("/")[2]], **about}
    assert {*about} <= WORDS | TEXTS, about  # no objection is ignored
    if "anyOf" in about and all([*wrong_by_schema(value, each, at)] for each in about["anyOf"]):
        yield f"{at}: {value!r} is of no kind"
    kind = about.get("type")
    if kind and (not isinstance(value, KINDS[kind]) or (isinstance(value, bool) and kind != "boolean")):
        yield f"{at}: {value!r} is no {kind}"
        return
    yield from (f"{at}: {value!r}, {name}" for name in BOUNDS if name in about and not BOUNDS[name](value, about[name]))
    yield from (f"{at}.{name} is missing" for name in about.get("required", ()) if name not in value)
    for name, each in value.items() if kind == "object" else ():
        yield from _of_field(each, about, name, at)
    for each in value if kind == "array" else ():
        yield from wrong_by_schema(each, about.get("items", {}), f"{at}[]")


def _of_field(value: Any, about: Any, name: str, at: str) -> Iterator[str]:
    inner = about.get("properties", {}).get(name, about.get("additionalProperties", True))
    if inner is False:
        yield f"{at}.{name}: no such field"
    elif inner is not True:
        yield from wrong_by_schema(value, inner, f"{at}.{name}")
