"""Building blocks of the run file's schema: strict sections, the mark of fixed fields, constrained types."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from types import GenericAlias, UnionType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model
from pydantic_core import PydanticCustomError


@dataclass(frozen=True)
class Fixed:
    """Mark a field, or all fields of a section, as fixed for the life of a run.

    A resumed run must have the same value. The mark is metadata of the annotation, and the innermost one counts.
    """

    fixed: bool = True


FIXED, FREE = Fixed(), Fixed(False)
Positive = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]


def _only_false(value: Any) -> Any:
    """Refuse 0 and 0.0, which are equal to False in Python, so that pydantic's Literal would take them."""
    if value is not False:
        raise PydanticCustomError("literal_error", "it should be {expected}", {"expected": "false"})
    return value


OnlyFalse = Annotated[Literal[False], BeforeValidator(_only_false)]
CheckpointPath = Annotated[str, Field(pattern="/")]  # without the slash, a typo of "auto" would be a path


class Section(BaseModel):
    """A table of the run file: frozen, strict, no unknown keys, no NaN or infinity.

    The string below each field is its description.
    """

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, frozen=True, use_attribute_docstrings=True
    )


def section_from(options: type[Any], base: type[Section] = Section, but: Container[str] = ()) -> type[Section]:
    """Create a section with a field for each field of a dataclass of options, except those in `but`.

    The dataclass stays the only declaration, so that Python, the run file and the command line cannot drift apart.
    """
    chosen: dict[str, Any] = {
        each.name: _declared(each) for each in dataclasses.fields(options) if each.name not in but
    }
    return create_model(base.__name__, __base__=base, **chosen)


def _declared(option: dataclasses.Field[Any]) -> tuple[Any, Any]:
    """Return the annotation and the pydantic field of an option, from the metadata of its dataclass field."""
    choices, default = (
        option.metadata["choices"],
        [*option.default] if isinstance(option.default, tuple) else option.default,
    )
    kind = Literal[choices] if choices else _toml_type(option.type)
    kind = kind | None if choices and default is None else kind
    text = Field(default, description=option.metadata["text"])
    return (Annotated[kind, FIXED] if option.metadata["fixed"] else kind), text


def _toml_type(kind: Any) -> Any:
    """Return the type of an option in TOML: integers are above 0, and sequences are lists."""
    if isinstance(kind, UnionType):
        return reduce(or_, map(_toml_type, get_args(kind)))
    if get_origin(kind) in (tuple, Sequence):
        return GenericAlias(list, (_toml_type(get_args(kind)[0]),))
    return Positive if kind is int else kind
