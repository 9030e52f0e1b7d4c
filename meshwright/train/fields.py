"""The fields of a config, walked: where they are, what they hold, how a value is written in TOML."""

from __future__ import annotations

import datetime
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

Place = tuple[str | int, ...]  # ("data", 0, "weight")


@dataclass(frozen=True)
class Leaf:
    """A field that holds a value, not a section. `field.metadata` has its marks."""

    place: Place
    field: FieldInfo
    value: Any


def leaves(section: BaseModel, at: Place = ()) -> Iterator[Leaf]:
    """All values of a config. A list of sections is one, and so is what it holds."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from leaves(value, (*at, name))
            continue
        yield Leaf((*at, name), field, value)
        for number, each in enumerate(value if section_of(field.annotation) else ()):
            yield from leaves(each, (*at, name, number))


def declared(section: type[BaseModel], at: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    """All fields that there are, sections among them."""
    for name, field in section.model_fields.items():
        yield (*at, name), field
        inner = section_of(field.annotation)
        if inner is not None:
            yield from declared(inner, (*at, name))


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section that a field is, or is a list of."""
    for each in (annotation, *get_args(annotation)):
        if isinstance(each, type) and issubclass(each, BaseModel):
            return each
    return None


def is_list(annotation: Any) -> bool:
    return get_origin(annotation) is list


def named(place: Place) -> str:
    text = ""
    for part in place:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def written(value: Any) -> str:
    """As in the file. tomllib reads, and nothing in the standard library writes."""
    if isinstance(value, BaseModel):
        return written(value.model_dump(exclude_defaults=True))
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(key)} = {written(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(written, value)) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # nan, inf, -inf
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    text = json.dumps(value, ensure_ascii=False)
    return text.replace("\x7f", "\\u007f")  # JSON takes it bare, TOML does not


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else written(name)
