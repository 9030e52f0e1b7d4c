"""Helpers for JSON values: names for error messages, parsing with DataErrors, dropping nulls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import DataError

_MOST_BYTES = 256 << 20  # of a settings file; the largest known tokenizer.json has 33 MB


def kind_of(value: Any) -> str:
    """Return the kind of a JSON value with an article, such as "a list", for error messages."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return "a number"
    for kind, name in ((str, "string"), (Mapping, "object"), (list | tuple, "list")):
        if isinstance(value, kind):
            return f"an empty {name}" if not value else f"an {name}" if name == "object" else f"a {name}"
    return f"of type {type(value).__name__}"


def parsed(text: str, what: str) -> Any:
    """Parse JSON text. `what`: subject and verb of the error, such as "tools are"."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{what} not valid JSON: {error}") from error


def read_object(file: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    RecursionError is caught because deeply nested JSON is a cheap way to crash a parser.
    """
    try:
        if file.stat().st_size > _MOST_BYTES:
            raise DataError(f"{file} has {file.stat().st_size:,} bytes, too many for settings; fetch it again")
        value = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{file} cannot be read: {error}; fetch or write it again") from error
    if not isinstance(value, dict):
        raise DataError(f"{file} holds {kind_of(value)} where an object is wanted; fetch or write it again")
    return value


def without_nulls(value: Any) -> Any:
    """Drop null fields, recursively: tables (Parquet, Arrow) add every field of any row to all rows.

    Otherwise a template that asks `if message.tool_calls is defined` sees a null in every message.
    """
    if isinstance(value, Mapping):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value
