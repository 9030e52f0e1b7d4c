"""The file of a run, read and written. What is wrong with it is told at once: all of it, each with its line."""

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
from .config import Config, Place, declared, is_list, named, section_of, written
from .config_checks import contradictions
from .foreign_names import ELSEWHERE, refusal_of

Mistake = tuple[Place, str]
Look = Callable[[Config], Iterable[Mistake]]
_DUMMIES: dict[Place, Any] = {("model",): "?", ("out",): "?", ("data",): [{"path": "?"}]}


def read(path: str | Path, sets: Sequence[str] = (), look: Look | None = None) -> Config:
    """The config of a file, changed by `sets`: "mesh.tp=2", "data.0.weight=0.5"; "train.steps=" takes a field out.

    `look`: what else is to be looked at, such as the files that it names.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
        given = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no TOML: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{path} cannot be read: its lists or tables are nested too deeply") from error
    places, told = _changed(given, sets)
    config, mistakes = _validated(given)
    mistakes = _all(mistakes, [*contradictions(config)], look(config) if look else ())
    where = _lines(text, [place for place, _ in mistakes]) | places if mistakes else {}
    told += [f"{named(place)}{_where(place, where)}: {why}" for place, why in mistakes]
    return _unless(told, config, str(path))


def _all(of_fields: Sequence[Mistake], conflicts: Sequence[Mistake], looked: Iterable[Mistake]) -> list[Mistake]:
    """Leave out what follows from another mistake.

    A field that is wrong holds something else by now. Where the model is missing or refuses the mesh, no length that
    would fit to that mesh is advised: the mesh has to change first.
    """
    wrong = {place for place, _ in of_fields}
    looked = [each for each in looked if not any(each[0][:end] in wrong for end in range(1, len(each[0]) + 1))]
    if refused := {place for place, _ in looked if place[0] in ("model", "mesh")}:
        conflicts = [each for each in conflicts if each[0] not in {("train", "length"), *refused}]
    known = {place for place, _ in conflicts}
    return list(dict.fromkeys([*of_fields, *conflicts, *(each for each in looked if each[0] not in known)]))


def config_of(**given: Any) -> Config:
    """The config of a run that is made in Python: `config_of(model=..., out=..., data=[{"path": ...}], mesh={...})`."""
    config, mistakes = _validated(copy.deepcopy(given))
    mistakes += contradictions(config)
    return _unless([f"{named(place)}: {why}" for place, why in mistakes], config, "the config")


def _unless(told: Sequence[str], config: Config, what: str) -> Config:
    if told:
        raise ConfigError("\n".join([f"{what} has {counted(len(told), 'mistake')}:", *(f"  {line}" for line in told)]))
    return config


def as_toml(config: Config) -> str:
    """All fields, so that the file says what was trained, whatever defaults become."""
    given = config.model_dump(exclude_none=True)
    plain = {name: value for name, value in given.items() if not isinstance(value, dict) and name != "data"}
    out = [_table(plain)]
    out += [f"[[data]]\n{_table(each)}" for each in given["data"]]
    out += [f"[{name}]\n{_table(value)}" for name, value in given.items() if isinstance(value, dict)]
    return "\n".join(out)


def _table(values: Mapping[str, Any]) -> str:
    return "".join(f"{name} = {written(value)}\n" for name, value in values.items())


def _validated(given: Mapping[str, Any]) -> tuple[Config, list[Mistake]]:
    """With what is wrong left out: pydantic looks no further in a section with a mistake, and contradictions in the
    rest are to be told as well."""
    mistakes: list[Mistake] = []
    left = copy.deepcopy(dict(given))
    while True:
        try:
            config, wrong = _with_checkpoint(Config.model_validate(left))
            return config, [*mistakes, *wrong]
        except ValidationError as error:
            by_place: dict[Place, list[Any]] = {}
            for each in error.errors():
                by_place.setdefault(_field_at(each["loc"]), []).append(each)
        for place, errors in by_place.items():
            mistakes.append((place, sentence(place, errors, _at(left, place))))
        for place in sorted(by_place, key=len, reverse=True):  # what holds another goes last
            _leave_out(left, place, is_known=by_place[place][0]["type"] != "extra_forbidden")


def _with_checkpoint(config: Config) -> tuple[Config, list[Mistake]]:
    """Name the newest checkpoint where the model is a run, so that the record of the new run says which it was."""
    try:
        given = path_of(config.model)
        found = newest_of(given) if exists(given, Path.is_dir) else given
    except MeshwrightError as error:
        return config, [(("model",), str(error))]
    return (config if found == given else config.model_copy(update={"model": str(found)})), []


def _field_at(loc: Place) -> Place:
    """The field, without what pydantic adds of the values in it and of the alternatives that there are."""
    section: Any = Config
    many = False
    place: list[str | int] = []
    for part in loc:
        if section is None:
            break
        place.append(part)
        if many:
            many = False
        else:
            field = section.model_fields.get(part)
            section = section_of(field.annotation) if field else None
            many = field is not None and is_list(field.annotation)
    return tuple(place)


def _at(given: Any, place: Place) -> Any:
    for part in place:
        if isinstance(given, Mapping):
            given = given.get(str(part))
        else:
            given = given[part]
    return given


def _leave_out(left: dict[str, Any], place: Place, *, is_known: bool) -> None:
    """Or put something in the place of what cannot be left out: it is told, and never used."""
    inner: Any = _at(left, place[:-1])
    if is_known and (place in _DUMMIES or place[-1] == "path"):
        inner[place[-1]] = copy.deepcopy(_DUMMIES.get(place, "?"))
    elif isinstance(inner, list):
        inner[int(place[-1])] = {"path": "?"}
    else:
        del inner[place[-1]]


def _lines(text: str, places: Sequence[Place]) -> dict[Place, str]:
    """tomllib does not say where a key is. It is in the line after the longest beginning of the file that is TOML and
    has no such key."""
    wanted = {place[:end] for place in places for end in range(1, len(place) + 1)}
    lines, found, whole = text.split("\n"), dict[Place, str](), 0
    for end in range(1, len(lines) + 1):
        try:
            given = tomllib.loads("\n".join(lines[:end]))
        except tomllib.TOMLDecodeError:  # in the middle of a value of several lines
            continue
        found |= {place: f"line {whole + 1}" for place in wanted if place not in found and _has(given, place)}
        whole = end
    return found


def _has(given: Any, place: Place) -> bool:
    for part in place:
        if isinstance(given, Mapping) and part in given:
            given = given[str(part)]
        elif isinstance(given, list) and isinstance(part, int) and part < len(given):
            given = given[part]
        else:
            return False
    return True


def _where(place: Place, where: Mapping[Place, str]) -> str:
    """Of the field itself, else of its section where that is one of several."""
    ends = [len(place), *(end for end in range(len(place) - 1, 0, -1) if isinstance(place[end - 1], int))]
    found = next((where[place[:end]] for end in ends if place[:end] in where), "")
    return f" ({found})" if found else ""


def _changed(given: dict[str, Any], sets: Sequence[str]) -> tuple[dict[Place, str], list[str]]:
    """Which fields were set, and what could not be."""
    places: dict[Place, str] = {}
    told = []
    for text in sets:
        try:
            places[_set(given, text)] = f"--set {text}"
        except ConfigError as error:
            told.append(f"--set {written(text)}: {error}")
    return places, told


def _set(given: dict[str, Any], text: str) -> Place:
    name, equals, value = text.partition("=")
    parts = [part.strip() for part in name.split(".")]
    if not equals or not all(parts):
        raise ConfigError("it is no FIELD=VALUE, as mesh.tp=2 or data.0.weight=0.5")
    place: list[str | int] = []
    inner: Any = given
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
    if isinstance(inner, list):
        if not part.isdecimal() or int(part) > len(inner):
            many = f"is {len(inner)} of them" if len(inner) == 1 else f"are {len(inner)} of them"
            raise ConfigError(f"there {many}, counted from 0; {part} is none")
        return int(part)
    if not isinstance(inner, dict):
        raise ConfigError(f"{named(tuple(place))} is a value, and has no fields")
    return part


def _is_empty(inner: Any, key: str | int) -> bool:
    return key == len(inner) if isinstance(inner, list) else key not in inner


def _put(inner: Any, key: str | int, value: Any) -> None:
    if isinstance(inner, list) and key == len(inner):
        inner.append(value)  # one more source
    else:
        inner[key] = value


def _value(text: str) -> Any:
    """In the file's own spelling; what is none is text."""
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        return text
    except RecursionError as error:
        raise ConfigError("its lists or tables are nested too deeply") from error


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
