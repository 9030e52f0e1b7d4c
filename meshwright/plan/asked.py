"""What options of the command line ask for: a mesh, and a pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from ..axes import OTHER_NAMES, Axes
from ..errors import ConfigError
from ..layout import Pipeline

_AXES = tuple(asdict(Axes()))


def mesh_of(text: str) -> dict[str, int]:
    """`fsdp=2,tp=2` as sizes."""
    sizes: dict[str, int] = {}
    for part in filter(None, text.replace(" ", ",").split(",")):
        axis, equals, size = part.partition("=")
        valid = bool(equals) and size.isdecimal() and len(size) <= 9
        if valid and axis in OTHER_NAMES:
            raise ConfigError(f"--mesh {text!r:.200}: there is no {axis!r}; choose {OTHER_NAMES[axis]}={size}")
        if axis not in _AXES or not valid:
            raise ConfigError(f"--mesh {text!r:.200}: {part!r:.200} is not AXIS=N with AXIS of {', '.join(_AXES)}")
        if axis in sizes:
            raise ConfigError(f"--mesh {text!r} gives {axis} twice")
        sizes[axis] = int(size)
    return sizes


def pipeline_of(options: Mapping[str, Any], sizes: Mapping[str, int]) -> Pipeline:
    """An option for each field, None where it was not given."""
    given = {field.name: options[field.name] for field in fields(Pipeline) if options[field.name] is not None}
    if given and sizes.get("pp", 1) == 1:
        raise ConfigError(f"--{next(iter(given))} is of a pipeline, and --mesh has none; give it pp=2 or more")
    return Pipeline(**given)
