"""What is said of a field that is wrong: what was given, what is wanted, which name was probably meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from .config import Config
from .fields import Place, declared, written
from .foreign_names import ELSEWHERE, refusal_of

_WANTED = {  # by pydantic's type of error; braces take from its context
    "string_type": "text in quotes", "int_type": "a whole number", "float_type": "a number",
    "bool_type": "true or false", "list_type": "a list", "dict_type": "a table", "model_type": "a table",
    "greater_than": "a number above {gt:g}", "greater_than_equal": "a number of {ge:g} or more",
    "less_than": "a number below {lt:g}",
    "less_than_equal": "a number of at most {le:g}", "finite_number": "a finite number",
    "too_short": "a list of {min_length}",
    "too_long": "a list of {max_length}", "string_pattern_mismatch": "a path with a slash",
    "recursion_loop": "nested less deeply",
    "literal_error": "{expected}", "invalid-json-value": "of what JSON has (no dates)",
}  # fmt: skip


def sentence(place: Place, errors: Sequence[Any], given: Any) -> str:
    """Of all errors of a field: one for each alternative that it has."""
    kind = errors[0]["type"]
    if kind == "extra_forbidden":
        return f"there is no such field{_meant(place)}"
    if kind == "missing":
        return "it is missing, and has no default"
    wanted = list(dict.fromkeys(_wanted(each) for each in errors))
    value = written(given)
    value = value if len(value) <= 60 else f"{value[:57]}..."
    return f"it should be {', or '.join(wanted)}, not {value}{_close(given, wanted)}"


def _wanted(error: Mapping[str, Any]) -> str:
    if error["type"] not in _WANTED:
        return f"otherwise ({error['msg']})"
    return _WANTED[error["type"]].format(**error.get("ctx", {})).replace("'", '"').replace("False", "false")


def _close(given: Any, wanted: Sequence[str]) -> str:
    words = re.findall(r'"([^"]*)"', " ".join(wanted))
    close = difflib.get_close_matches(given, words, 1, 0.6) if isinstance(given, str) else []
    return f"; did you mean {written(close[0])}?" if close else ""


def _meant(place: Place) -> str:
    """Return what others call it, a name like it in the section, or one like it in another section."""
    name, known = str(place[-1]), [there for there, _ in declared(Config)]
    section = tuple(part for part in place[:-1] if isinstance(part, str))
    in_section = [there[-1] for there in known if there[:-1] == section]
    if slip := difflib.get_close_matches(name, in_section, 1, 0.85):
        return f"; did you mean {slip[0]}?"
    if why := refusal_of(name):
        return f": {why}"
    if elsewhere := ELSEWHERE.get(name.lower().replace("-", "_")):
        return f"; did you mean {_in_section(elsewhere, section)}?"
    names = {there[-1]: there for there in reversed(known)}
    for near, cutoff in ((in_section, 0.7), ([*names], 0.75), (in_section, 0.5)):
        if close := difflib.get_close_matches(name, near, 1, cutoff):
            return f"; did you mean {close[0] if near is in_section else _in_section(names[close[0]], section)}?"
    return f"; there are {', '.join(in_section)}"


def _in_section(found: tuple[str, ...], section: tuple[str, ...]) -> str:
    if found[:-1] == section:
        return found[-1]
    return f"{found[-1]} of [{'.'.join(found[:-1])}]" if found[:-1] else f"{found[-1]} at the top"
