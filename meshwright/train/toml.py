"""The file of a run, read and written. What is wrong with it is told at once: all of it, each with its line."""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..checkpoint import newest_of
from ..errors import ConfigError, MeshwrightError, counted
from ..weights import exists, path_of
from .config import Config
from .contradictions import contradictions
from .fields import Place, is_list, named, section_of, written
from .sentences import sentence

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
