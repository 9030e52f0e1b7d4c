"""Read and write run files (TOML). All mistakes of a file are reported in one error, each with its line.

Steps of reading: parse the TOML, apply `--set`, validate single fields (pydantic), check fields against each other
(`config_checks.py`), and run the caller's further checks, such as whether files exist (`preflight.py`). A job may wait
for hours in a queue, so mistakes must not come to light one start at a time.
"""

from __future__ import annotations

import copy
import difflib
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..checkpoint import newest_of
from ..errors import ConfigError, MeshwrightError, counted
from ..weights import exists, path_of
from .config import Config, Place, declared, is_list, named, section_of, to_toml
from .config_checks import contradictions
from .foreign_names import ELSEWHERE, refusal_of

Mistake = tuple[Place, str]
Look = Callable[[Config], Iterable[Mistake]]
# Values for required fields that are wrong or missing, so that validation of the others can continue. Never used.
_PLACEHOLDERS: dict[Place, Any] = {("model",): "?", ("out",): "?", ("data",): [{"path": "?"}]}


def read(path: str | Path, sets: Sequence[str] = (), look: Look | None = None) -> Config:
    """Read the config of a run file. `ConfigError` lists all mistakes.

    `sets`: changes as on the command line, "mesh.tp=2", "data.0.weight=0.5"; "train.steps=" removes a field.

    `look`: further checks of the config; they yield mistakes, as `preflight.mistakes` does.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
        values = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{path} cannot be read: its lists or tables are nested too deeply") from error
    places, lines = _apply_sets(values, sets)
    config, mistakes = _validate(values)
    mistakes = _independent(mistakes, [*contradictions(config)], look(config) if look else ())
    where = _lines(text, [place for place, _ in mistakes]) | places if mistakes else {}
    lines += [f"{named(place)}{_where(place, where)}: {why}" for place, why in mistakes]
    return _refuse(lines, config, str(path))


def _independent(
    of_fields: Sequence[Mistake], conflicts: Sequence[Mistake], others: Iterable[Mistake]
) -> list[Mistake]:
    """Merge the mistakes of the three kinds of checks, without those that only follow from another.

    A wrong field holds a placeholder by now, so what the later checks say about it is void. If the model is missing or
    refuses the mesh, no length that fits this mesh is advised: the mesh has to change first.
    """
    wrong = {place for place, _ in of_fields}
    others = [each for each in others if not any(each[0][:end] in wrong for end in range(1, len(each[0]) + 1))]
    if refused := {place for place, _ in others if place[0] in ("model", "mesh")}:
        conflicts = [each for each in conflicts if each[0] not in {("train", "length"), *refused}]
    known = {place for place, _ in conflicts}
    return list(dict.fromkeys([*of_fields, *conflicts, *(each for each in others if each[0] not in known)]))


def config_of(**sections: Any) -> Config:
    """Return a config from Python values: `config_of(model=..., out=..., data=[{"path": ...}], mesh={...})`.

    `ConfigError` lists all mistakes.
    """
    config, mistakes = _validate(sections)
    mistakes += contradictions(config)
    return _refuse([f"{named(place)}: {why}" for place, why in mistakes], config, "the config")


def _refuse(lines: Sequence[str], config: Config, what: str) -> Config:
    """Return the config, or raise one `ConfigError` with a line for each mistake."""
    if lines:
        raise ConfigError(
            "\n".join([f"{what} has {counted(len(lines), 'mistake')}:", *(f"  {line}" for line in lines)])
        )
    return config


def as_toml(config: Config) -> str:
    """Write all fields, defaults too, so that the record of a run stays right when a default changes.

    With `path` of `[lora]` its other fields come from the adapter's files, which a default would contradict.
    """
    values = config.model_dump(exclude_none=True)
    if config.lora is not None and config.lora.path is not None:
        values["lora"] = config.lora.model_dump(exclude_unset=True)
    plain = {name: value for name, value in values.items() if not isinstance(value, dict) and name != "data"}
    out = [_table(plain)]
    out += [f"[[data]]\n{_table(each)}" for each in values["data"]]
    out += [f"[{name}]\n{_table(value)}" for name, value in values.items() if isinstance(value, dict)]
    return "\n".join(out)


def _table(values: Mapping[str, Any]) -> str:
    return "".join(f"{name} = {to_toml(value)}\n" for name, value in values.items())


def _validate(values: Mapping[str, Any]) -> tuple[Config, list[Mistake]]:
    """Validate each field. Return a config without the wrong ones, and the mistakes.

    pydantic builds no model from values with a mistake, but the other checks need one. So wrong fields are removed, or
    replaced by placeholders, and validation starts again until it succeeds.
    """
    mistakes: list[Mistake] = []
    remaining = copy.deepcopy(dict(values))
    while True:
        try:
            config, wrong = _with_checkpoint(Config.model_validate(remaining))
            return config, [*mistakes, *wrong]
        except ValidationError as error:
            by_place: dict[Place, list[Any]] = {}
            for each in error.errors():
                by_place.setdefault(_field_at(each["loc"]), []).append(each)
        for place, errors in by_place.items():
            mistakes.append((place, sentence(place, errors, _at(remaining, place))))
        for place in sorted(by_place, key=len, reverse=True):  # inner fields first: their section may go too
            _remove(remaining, place, is_known=by_place[place][0]["type"] != "extra_forbidden")


def _with_checkpoint(config: Config) -> tuple[Config, list[Mistake]]:
    """Replace a model that is a run by its newest checkpoint, so that config.toml of the new run records which one."""
    try:
        model = path_of(config.model)
        checkpoint = newest_of(model) if exists(model, Path.is_dir) else model
    except MeshwrightError as error:
        return config, [(("model",), str(error))]
    return (config if checkpoint == model else config.model_copy(update={"model": str(checkpoint)})), []


def _field_at(loc: Place) -> Place:
    """Return the path of the field in a location of pydantic.

    pydantic appends keys inside of the value and the names of the alternatives of a union.
    """
    section: Any = Config
    indexed = False  # whether the next part is an index into a list of sections
    place: list[str | int] = []
    for part in loc:
        if section is None:
            break
        place.append(part)
        if indexed:
            indexed = False
        else:
            field = section.model_fields.get(part)
            section = section_of(field.annotation) if field else None
            indexed = field is not None and is_list(field.annotation)
    return tuple(place)


def _at(value: Any, place: Place) -> Any:
    """Return the value at a path, None for a missing last key."""
    for part in place:
        if isinstance(value, Mapping):
            value = value.get(str(part))
        else:
            value = value[part]
    return value


def _remove(values: dict[str, Any], place: Place, *, is_known: bool) -> None:
    """Remove a wrong field, or put a placeholder in if it is required."""
    inner: Any = _at(values, place[:-1])
    if is_known and (place in _PLACEHOLDERS or place[-1] == "path"):
        inner[place[-1]] = copy.deepcopy(_PLACEHOLDERS.get(place, "?"))
    elif isinstance(inner, list):
        inner[int(place[-1])] = {"path": "?"}
    else:
        del inner[place[-1]]


def _lines(text: str, places: Sequence[Place]) -> dict[Place, str]:
    """Return the line of each path of a field, and of each section around it, as `line 7`.

    tomllib does not report lines. So growing beginnings of the file are parsed: a key stands in the line after the
    longest beginning that is valid TOML and lacks the key. This is right for any spelling of TOML, and its quadratic
    cost is only paid for a file with mistakes.
    """
    prefixes = {place[:end] for place in places for end in range(1, len(place) + 1)}
    lines, line_of, parsed = text.split("\n"), dict[Place, str](), 0
    for end in range(1, len(lines) + 1):
        try:
            values = tomllib.loads("\n".join(lines[:end]))
        except tomllib.TOMLDecodeError:  # in the middle of a value of several lines
            continue
        line_of |= {place: f"line {parsed + 1}" for place in prefixes if place not in line_of and _has(values, place)}
        parsed = end
    return line_of


def _has(value: Any, place: Place) -> bool:
    """Return whether a value exists at a path."""
    for part in place:
        if isinstance(value, Mapping) and part in value:
            value = value[str(part)]
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
        else:
            return False
    return True


def _where(place: Place, where: Mapping[Place, str]) -> str:
    """Return ` (line 7)` or ` (--set ...)` for a field, or for its element of a list if the field itself is missing."""
    ends = [len(place), *(end for end in range(len(place) - 1, 0, -1) if isinstance(place[end - 1], int))]
    source = next((where[place[:end]] for end in ends if place[:end] in where), "")
    return f" ({source})" if source else ""


def _apply_sets(values: dict[str, Any], sets: Sequence[str]) -> tuple[dict[Place, str], list[str]]:
    """Apply `--set` arguments in place. Return the argument that set each field, and the mistakes in others."""
    places: dict[Place, str] = {}
    lines = []
    for text in sets:
        try:
            places[_set(values, text)] = f"--set {text}"
        except ConfigError as error:
            lines.append(f"--set {to_toml(text)}: {error}")
    return places, lines


def _set(values: dict[str, Any], text: str) -> Place:
    """Set a field from `FIELD=VALUE` and return its path. Sections on the way are created; no value removes a field."""
    name, equals, value = text.partition("=")
    parts = [part.strip() for part in name.split(".")]
    if not equals or not all(parts):
        raise ConfigError("write FIELD=VALUE, such as mesh.tp=2 or data.0.weight=0.5")
    place: list[str | int] = []
    inner: Any = values
    for part, following in zip(parts, [*parts[1:], ""], strict=True):
        key = _key(inner, part, place)
        place.append(key)
        if following and _is_empty(inner, key):
            empty: Any = [] if following.isdecimal() else {}
            _put(inner, key, empty)
        if following:
            inner = inner[key]
        elif value.strip() or isinstance(inner, list):
            _put(inner, key, _value(value))
        else:
            inner.pop(key, None)
    return tuple(place)


def _key(inner: Any, part: str, place: Sequence[str | int]) -> str | int:
    """Return a part of a path as a key of `inner`: an index for a list, where the length itself appends an element."""
    if isinstance(inner, list):
        if not part.isdecimal() or int(part) > len(inner):
            many = f"has {len(inner)} element" if len(inner) == 1 else f"has {len(inner)} elements"
            raise ConfigError(f"the list {many}, counted from 0; {part} is not an index of it")
        return int(part)
    if not isinstance(inner, dict):
        raise ConfigError(f"{named(tuple(place))} is a value and has no fields")
    return part


def _is_empty(inner: Any, key: str | int) -> bool:
    """Return whether nothing is stored at a key yet."""
    return key == len(inner) if isinstance(inner, list) else key not in inner


def _put(inner: Any, key: str | int, value: Any) -> None:
    """Store a value; the index after the last one appends, so that `data.1.path=y` adds a source."""
    if isinstance(inner, list) and key == len(inner):
        inner.append(value)
    else:
        inner[key] = value


def _value(text: str) -> Any:
    """Parse a value as TOML; what is not TOML is text, so that a shell needs no second level of quotes."""
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        return text
    except RecursionError as error:
        raise ConfigError("its lists or tables are nested too deeply") from error


_EXPECTED = {  # what a field should be, by the type of pydantic's error; braces refer to its context
    "string_type": "text in quotes", "int_type": "a whole number", "float_type": "a number",
    "bool_type": "true or false", "list_type": "a list", "dict_type": "a table", "model_type": "a table",
    "greater_than": "a number above {gt:g}", "greater_than_equal": "a number of {ge:g} or more",
    "less_than": "a number below {lt:g}",
    "less_than_equal": "a number of at most {le:g}", "finite_number": "a finite number",
    "too_short": "a list of {min_length}",
    "too_long": "a list of {max_length}", "string_pattern_mismatch": "a path with a slash",
    "recursion_loop": "nested less deeply",
    "literal_error": "{expected}", "invalid-json-value": "a JSON value (no dates)",
}  # fmt: skip


def sentence(place: Place, errors: Sequence[Any], actual: Any) -> str:
    """Return one sentence for all pydantic errors of a field, of which a union has one per alternative."""
    kind = errors[0]["type"]
    if kind == "extra_forbidden":
        return f"unknown field{_suggestion(place)}"
    if kind == "missing":
        return "it is missing, and has no default"
    expected = list(dict.fromkeys(_expected(each) for each in errors))
    value = to_toml(actual)
    value = value if len(value) <= 60 else f"{value[:57]}..."
    return f"it should be {', or '.join(expected)}, not {value}{_did_you_mean(actual, expected)}"


def _expected(error: Mapping[str, Any]) -> str:
    """Return what a field should be, in the words of TOML rather than of Python."""
    if error["type"] not in _EXPECTED:
        return f"otherwise ({error['msg']})"
    return _EXPECTED[error["type"]].format(**error.get("ctx", {})).replace("'", '"').replace("False", "false")


def _did_you_mean(actual: Any, expected: Sequence[str]) -> str:
    """Suggest the most similar of the allowed words."""
    words = re.findall(r'"([^"]*)"', " ".join(expected))
    close = difflib.get_close_matches(actual, words, 1, 0.6) if isinstance(actual, str) else []
    return f"; did you mean {to_toml(close[0])}?" if close else ""


def _suggestion(place: Place) -> str:
    """Suggest what to write instead of an unknown field.

    In this order: a typo of a field in the section, the reason why a feature is missing, the field that has this name
    in another trainer (`foreign_names.py`), and less similar names in this section or another. So a foreign name such
    as `batch_size` is explained before it is compared with names that merely look like it.
    """
    name, known = str(place[-1]), [path for path, _ in declared(Config)]
    section = tuple(part for part in place[:-1] if isinstance(part, str))
    in_section = [path[-1] for path in known if path[:-1] == section]
    if slip := difflib.get_close_matches(name, in_section, 1, 0.85):
        return f"; did you mean {slip[0]}?"
    if why := refusal_of(name):
        return f": {why}"
    if elsewhere := ELSEWHERE.get(name.lower().replace("-", "_")):
        return f"; did you mean {_in_section(elsewhere, section)}?"
    names = {path[-1]: path for path in reversed(known)}  # the first section that declares a name wins
    for near, cutoff in ((in_section, 0.7), ([*names], 0.75), (in_section, 0.5)):
        if close := difflib.get_close_matches(name, near, 1, cutoff):
            return f"; did you mean {close[0] if near is in_section else _in_section(names[close[0]], section)}?"
    return f"; known fields: {', '.join(in_section)}"


def _in_section(path: tuple[str, ...], section: tuple[str, ...]) -> str:
    """Name a field as seen from a section: `lr of [optim]`."""
    if path[:-1] == section:
        return path[-1]
    return f"{path[-1]} of [{'.'.join(path[:-1])}]" if path[:-1] else f"{path[-1]} at the top"
