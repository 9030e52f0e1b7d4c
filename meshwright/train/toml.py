"""The file of a run, read and written. What is wrong with it is told at once: all of it, each with its line."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from ..errors import ConfigError, counted
from .config import Config, EvalSection

Place = tuple[str | int, ...]
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def read(path: str | Path, sets: Sequence[str] = ()) -> Config:
    """The config of a file, changed by `sets`: "mesh.tp=2", "data.0.weight=0.5"."""
    path = Path(path)
    try:
        text = path.read_text()
        given = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no TOML: {error}") from error
    for each in sets:
        _set(given, each)
    config, mistakes = _validated(given)
    mistakes = [(place, why) for place, why in mistakes] + list(contradictions(config))
    if mistakes:
        lines = [f"  {_named(place)}{_line(text, place)}: {why}" for place, why in mistakes]
        raise ConfigError("\n".join([f"{path} has {counted(len(lines), 'mistake')}:", *lines]))
    return config


def _validated(given: Mapping[str, Any]) -> tuple[Config, list[tuple[Place, str]]]:
    """With what is wrong left out, so that contradictions in the rest are told as well."""
    mistakes: list[tuple[Place, str]] = []
    left = json.loads(json.dumps(given, default=str))
    for _ in range(50):
        try:
            return Config.model_validate(left), mistakes
        except ValidationError as error:
            for each in error.errors():
                place = _real(left, each["loc"])
                if (place, why := _said(each, place)) not in mistakes and not _is_told(place, mistakes):
                    mistakes.append((place, why))
                _leave_out(left, place, each["type"])
    raise ConfigError(f"{mistakes[0][1]}")


def _real(given: Any, loc: Place) -> Place:
    """Without the names of alternatives, which pydantic adds."""
    place: list[str | int] = []
    for part in loc:
        if isinstance(given, Mapping) and (part in given or not place):
            given = given.get(part)
        elif isinstance(given, list) and isinstance(part, int) and part < len(given):
            given = given[part]
        elif isinstance(given, Mapping):
            place.append(part)
            break
        else:
            break
        place.append(part)
    return tuple(place)


def _is_told(place: Place, mistakes: Sequence[tuple[Place, str]]) -> bool:
    return any(place == told for told, _ in mistakes)


def _said(error: Any, place: Place) -> str:
    if error["type"] == "extra_forbidden":
        return f"there is no such field{_nearest(place)}"
    if error["type"] == "missing":
        return "it is missing, and has no default"
    given = error.get("input")
    return f"{_lower(error['msg'])}, not {given!r:.60}"


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _nearest(place: Place) -> str:
    """The name that is meant, there or in another section."""
    name, all_places = str(place[-1]), dict(_fields(Config))
    here = [p for p in all_places if p[:-1] == _plain(place)[:-1]]
    close = difflib.get_close_matches(name, [p[-1] for p in here], 1, 0.5)
    if close:
        return f"; did you mean {close[0]}?"
    elsewhere = [".".join(p) for p in all_places if p[-1] == name]
    elsewhere += [".".join(p) for p in all_places if difflib.get_close_matches(name, [p[-1]], 1, 0.75)]
    return f"; did you mean {elsewhere[0]}?" if elsewhere else f"; there are {', '.join(p[-1] for p in here)}"


def _plain(place: Place) -> tuple[str, ...]:
    return tuple(str(part) for part in place if not isinstance(part, int))


def _fields(section: type[BaseModel], at: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, field in section.model_fields.items():
        yield (*at, name), field
        inner = _section_of(field.annotation)
        if inner is not None:
            yield from _fields(inner, (*at, name))


def _section_of(annotation: Any) -> type[BaseModel] | None:
    for each in (annotation, *get_args(annotation)):
        if isinstance(each, type) and issubclass(each, BaseModel):
            return each
    return None


_DUMMY: dict[Place, Any] = {("model",): "?", ("out",): "?", ("data",): [{"path": "?"}]}


def _leave_out(left: dict[str, Any], place: Place, kind: str) -> None:
    """Or put something in the place of what cannot be left out: it is told, and never used."""
    dummy = _DUMMY.get(place) or ("?" if place[-1] == "path" else None)
    inner: Any = left
    for part in place[:-1]:
        inner = inner[part]
    if dummy is not None and kind != "extra_forbidden":
        inner[place[-1]] = dummy
    elif isinstance(inner, list):
        inner[int(place[-1])] = {"path": "?"}
    else:
        inner.pop(place[-1], None)


def _named(place: Place) -> str:
    text = ""
    for part in place:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _line(text: str, place: Place) -> str:
    """tomllib does not say where a key is."""
    lines, at = text.splitlines(), 0
    *section, key = place
    name, number = (str(section[0]), section[1] if len(section) > 1 else 0) if section else ("", 0)
    if section:
        heads = [n for n, line in enumerate(lines) if re.match(rf"\s*\[\[?\s*{re.escape(name)}\s*\]\]?", line)]
        if not isinstance(number, int) or number >= len(heads):
            return ""
        at = heads[number] + 1
    for n in range(at, len(lines)):
        if re.match(r"\s*\[", lines[n]):
            break
        if re.match(rf"\s*{re.escape(str(key))}\s*=", lines[n]):
            return f" (line {n + 1})"
    heads = [n for n, line in enumerate(lines) if re.match(rf"\s*\[\[?\s*{re.escape(str(key))}\s*\]\]?", line)]
    return f" (line {heads[0] + 1})" if heads and not section else ""


def _set(given: dict[str, Any], text: str) -> None:
    """`mesh.tp=2`, in the file's own spelling of values; what is none is text."""
    place, equals, value = text.partition("=")
    parts = [part.strip() for part in place.split(".")]
    if not equals or not all(parts):
        raise ConfigError(f"--set {text!r} is no FIELD=VALUE, as mesh.tp=2 or data.0.weight=0.5")
    try:
        found = tomllib.loads(f"x = {value}")["x"]
    except tomllib.TOMLDecodeError:
        found = value
    inner: Any = given
    for part in parts[:-1]:
        inner = _within(inner, part, text)
    if isinstance(inner, list):
        _within(inner, parts[-1], text)
        inner[int(parts[-1])] = found
    elif isinstance(inner, dict):
        inner[parts[-1]] = found
    else:
        raise ConfigError(f"--set {text!r}: {'.'.join(parts[:-1])} is a value, and has no fields")


def _within(inner: Any, part: str, text: str) -> Any:
    if isinstance(inner, list):
        if not part.isdecimal() or int(part) >= len(inner):
            raise ConfigError(f"--set {text!r}: there are {len(inner)} of them, counted from 0; {part!r} is none")
        return inner[int(part)]
    if not isinstance(inner, dict):
        raise ConfigError(f"--set {text!r}: what holds {part!r} is a value, and has no fields")
    return inner.setdefault(part, {})


def contradictions(config: Config) -> Iterator[tuple[Place, str]]:
    train, mesh = config.train, config.mesh
    ends = [name for name in ("steps", "epochs", "tokens") if getattr(train, name) is not None]
    if len(ends) > 1:
        yield ("train", ends[1]), f"{' and '.join(ends)} both say when the run ends; give one"
    if isinstance(train.tokens, str) and num_tokens(train.tokens) is None:
        yield ("train", "tokens"), f'{train.tokens!r} is no number of tokens; write 2000000000 or "2B"'
    per_step, ranks = train.tokens_per_step or 32 * train.length, mesh.num_data_ranks
    if per_step % (train.length * ranks):
        fits = max(1, per_step // (train.length * ranks)) * train.length * ranks
        unit, near = f"{train.length} x {ranks}", f"{fits} or {fits + train.length * ranks}"
        yield ("train", "tokens_per_step"), f"{per_step} is no multiple of length x data ranks, {unit}; take {near}"
    yield from _of_shares(config)
    if train.steps is not None and isinstance(config.optim.warmup, int) and config.optim.warmup >= train.steps:
        yield ("optim", "warmup"), f"{config.optim.warmup} steps of warm-up, and the run has {train.steps}"
    if config.save.keep_every is not None and config.save.keep == "all":
        yield ("save", "keep_every"), "all checkpoints stay anyway; leave one of them out"
    if not config.eval.path and config.eval != EvalSection():
        yield ("eval", "path"), "there is nothing to evaluate; give path of [eval], or leave the section out"


def _of_shares(config: Config) -> Iterator[tuple[Place, str]]:
    with_share = [data.share is not None for data in config.data]
    if any(with_share) and not all(with_share):
        yield (
            ("data", with_share.index(False), "share"),
            "other sources have a share of the tokens; give all one or none",
        )
    if any(with_share) and config.train.steps is None and config.train.tokens is None:
        yield (
            ("data", with_share.index(True), "share"),
            "with shares there are no epochs; give steps or tokens of [train]",
        )
    for number, data in enumerate(config.data):
        if data.share is not None and data.weight != 1:
            yield ("data", number, "share"), "share and weight say how often a source is seen; give one"


def num_tokens(text: str | int) -> int | None:
    """`2B` as a number."""
    found = re.fullmatch(r"\s*([\d.]+)\s*([KMBT]?)\s*", str(text).upper())
    try:
        return round(float(found[1]) * _UNITS[found[2]]) if found else None
    except ValueError:
        return None


def schema() -> dict[str, Any]:
    """For editors: the first line of a file names it, as `#:schema meshwright.schema.json`."""
    return Config.model_json_schema()


def as_toml(config: Config) -> str:
    """All fields, so that the file says what was trained, whatever defaults become."""
    given = config.model_dump(exclude_none=True)
    plain = {name: value for name, value in given.items() if not isinstance(value, dict) and name != "data"}
    out = [_table(plain)]
    out += [f"[[data]]\n{_table(each)}" for each in given["data"]]
    out += [f"[{name}]\n{_table(value)}" for name, value in given.items() if isinstance(value, dict)]
    return "\n".join(out)


def _table(values: Mapping[str, Any]) -> str:
    return "".join(f"{name} = {_value(value)}\n" for name, value in values.items())


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(key)} = {_value(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def documentation() -> str:
    """Every field, by section."""
    out = []
    for title, section in [("", Config), *((n, _section_of(f.annotation)) for n, f in Config.model_fields.items())]:
        if section is None:
            continue
        name = f"[[{title}]]" if title == "data" else f"[{title}]"
        out.append(f"## {f'`{name}`' if title else 'At the top'}\n\n{section.__doc__}\n")
        out.append("| field | default | means |\n|---|---|---|")
        for field, about in section.model_fields.items():
            if _section_of(about.annotation) is None:
                default = "needed" if about.is_required() else f"`{_value(about.default)}`"
                out.append(f"| `{field}` | {'none' if default == '`null`' else default} | {about.description} |")
        out.append("")
    return "\n".join(out)
