"""What the declarations say of themselves: to editors, to readers, and to a run that goes on with another file."""

from __future__ import annotations

import inspect
from collections.abc import Container, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from .config import Config, Fixed, Leaf, Place, SourceSection, leaves, named, section_of, written

_HEAD = """# The file of a run

`meshwright train run.toml` reads it; [Fine-tune Qwen3](finetune.md) shows one. All but `model`, `out` and a source
of data may be left out. Every field can be set on the command line: `--set mesh.tp=2 data.0.weight=0.5`, and
`--set train.steps=` takes one out of the file. This page is made of the declarations. A field that is "not there yet"
is refused. Editors complete the file with [this schema](../examples/meshwright.schema.json): its first line is then
`#:schema PATH`.
"""


@dataclass(frozen=True)
class ChangedField:
    """A field that another file says otherwise. `may`: whether a run may go on with it."""

    place: Place
    before: Any
    after: Any
    may: bool

    def __str__(self) -> str:
        what = f"{named(self.place)}: {written(self.before)} before, {written(self.after)} now"
        return what if self.may else f"{what}; a run goes on with what it began with: change it back, or choose out"


def changed_fields(old: Config, new: Config) -> list[ChangedField]:
    """Which fields have changed since a run began. What files hold is not looked at: the plan's fingerprint knows."""
    before, after = ({leaf.place: leaf for leaf in leaves(_resolved(config))} for config in (old, new))
    out = []
    for place in dict.fromkeys([*before, *after]):
        one, two = before.get(place), after.get(place)
        if one is None or two is None or _held(one) == _held(two):
            continue  # what a whole source holds is told with the list
        out.append(ChangedField(place, one.value, two.value, not _is_fixed(place)))
    return out


def _resolved(config: Config) -> Config:
    """With the default that depends on another field written out."""
    train = config.train.model_copy(update={"tokens_per_step": config.train.step_tokens})
    return config.model_copy(update={"train": train})


def _held(leaf: Leaf) -> Any:
    """Of a list of sections only how many there are: what they hold is compared for itself."""
    return len(leaf.value) if section_of(leaf.field.annotation) else leaf.value


def _is_fixed(place: Place) -> bool:
    """The innermost mark holds."""
    section: type[BaseModel] | None = Config
    fixed = False
    for name in place:
        if isinstance(name, str) and section is not None:
            field = section.model_fields[name]
            fixed = next((mark.fixed for mark in field.metadata if isinstance(mark, Fixed)), fixed)
            section = section_of(field.annotation)
    return fixed


def schema() -> dict[str, Any]:
    """For editors: the first line of a file names it, as `#:schema meshwright.schema.json`."""
    about = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return {**about, **Config.model_json_schema(), "title": "A run of meshwright train"}


def documentation() -> str:
    """docs/train-config.md."""
    return "\n".join([_HEAD, *(_of_section(title, section) for title, section in _sections(Config))])


def options_table(options: type[Any], but: Container[str] = ()) -> str:
    """Return the table of docs/reference.md that says what the fields of a dataclass of options do."""
    shown = [each for each in fields(options) if each.name not in but]
    columns = ["field", "default", "does", *(["costs"] if any(each.metadata["costs"] for each in shown) else [])]
    rows = [[f"`{each.name}`", _default(each.default), each.metadata["text"], each.metadata["costs"]] for each in shown]
    lines = (f"| {' | '.join(row[: len(columns)])} |" for row in [columns, *rows])
    return "\n".join([next(lines), "|---" * len(columns) + "|", *lines])


def _default(value: object) -> str:
    return f"`mw.{type(value).__name__}()`" if is_dataclass(value) else f"`{value!r}`".replace("'", '"')


def _sections(section: type[BaseModel], title: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    yield title, section
    for name, field in section.model_fields.items():
        if inner := section_of(field.annotation):
            at = f"{title.strip('[]')}.{name}" if title else name
            yield from _sections(inner, f"[{at}]" if inner is field.annotation else f"[[{at}]]")


def _of_section(title: str, section: type[BaseModel]) -> str:
    shares = issubclass(section, SourceSection) and title != "[[data]]"
    own = inspect.get_annotations(section) if shares else section.model_fields
    rows = [_row(name, field) for name, field in section.model_fields.items() if name in own]
    others = [f"`{name}`" for name in section.model_fields if name not in own]
    if others:
        rows.append(f"| {', '.join(others)} | | As of `[[data]]`. |")
    head = f"## {f'`{title}`' if title else 'At the top'}\n\n{section.__doc__}\n"
    return "\n".join([head, "| field | default | means |", "|---|---|---|", *filter(None, rows), ""])


def _row(name: str, field: FieldInfo) -> str:
    if section_of(field.annotation):
        return ""  # it has a table of its own
    default = "needed" if field.is_required() else "none" if field.default is None else f"`{written(field.default)}`"
    means = " ".join((field.description or "").split())
    return f"| `{name}` | {default} | {means} |"
