"""Outputs derived from the declared fields: the docs page, the JSON schema, and the differences between two configs.

`python -m tests.write_docs` writes the page and the schema; a test compares both with the declarations.
"""

from __future__ import annotations

import inspect
from collections.abc import Container, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from .config import Config, Leaf, Place, SourceSection, is_list, leaves, named, section_of, to_toml
from .config_section import Fixed

_HEAD = """# The file of a run

`meshwright train run.toml` reads it; [Fine-tune Qwen3](finetune.md) shows one. Only `model`, `out` and one source of
data are required. Every field can be set on the command line: `--set mesh.tp=2 data.0.weight=0.5`. `--set train.steps=`
removes a field of the file. This page is generated from the declarations in `meshwright/train/config.py`. Editors
complete the file with [this schema](../examples/meshwright.schema.json) if its first line is `#:schema PATH`.
"""


@dataclass(frozen=True)
class ChangedField:
    """A field that differs between two configs of a run. `may`: whether the run may resume with the new value."""

    place: Place
    before: Any
    after: Any
    may: bool

    def __str__(self) -> str:
        what = f"{named(self.place)}: {to_toml(self.before)} before, {to_toml(self.after)} now"
        return what if self.may else f"{what}; a run must keep this value: change it back, or choose another out"


def changed_fields(old: Config, new: Config) -> list[ChangedField]:
    """Return the fields that differ between the config a run began with and the one it resumes with.

    Only the config is compared. The fingerprint of the packing plan covers the content of the data files.
    """
    before, after = ({leaf.place: leaf for leaf in leaves(_resolved(config))} for config in (old, new))
    out = []
    for place, old_leaf in before.items():
        new_leaf = after.get(place)
        if new_leaf is None or _compared(old_leaf) == _compared(new_leaf):
            continue  # the fields of an added or removed source: the list of sources itself differs
        out.append(ChangedField(place, old_leaf.value, new_leaf.value, not _is_fixed(place)))
    return out


def _resolved(config: Config) -> Config:
    """Fill in the default that depends on another field, so that setting it explicitly changes nothing."""
    train = config.train.model_copy(update={"tokens_per_step": config.train.step_tokens})
    return config.model_copy(update={"train": train})


def _compared(leaf: Leaf) -> Any:
    """Return the value to compare: for a list of sections only its length, as each field in it is a leaf too."""
    return len(leaf.value) if is_list(leaf.field.annotation) and section_of(leaf.field.annotation) else leaf.value


def _is_fixed(place: Place) -> bool:
    """Return whether the field at a path is fixed, by the innermost `Fixed` mark on the way to it."""
    section: type[BaseModel] | None = Config
    fixed = False
    for name in place:
        if isinstance(name, str) and section is not None:
            field = section.model_fields[name]
            fixed = next((mark.fixed for mark in field.metadata if isinstance(mark, Fixed)), fixed)
            section = section_of(field.annotation)
    return fixed


def schema() -> dict[str, Any]:
    """Return the JSON schema of a run file, for editors. The file names it in a first line `#:schema PATH`."""
    header = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return {**header, **Config.model_json_schema(), "title": "A run of meshwright train"}


def documentation() -> str:
    """Return the text of docs/train-config.md."""
    return "\n".join([_HEAD, *(_section_page(title, section) for title, section in _sections(Config))])


def options_table(options: type[Any], but: Container[str] = ()) -> str:
    """Return the table in docs/reference.md for a dataclass of options."""
    listed = [each for each in fields(options) if each.name not in but]
    columns = ["field", "default", "does", *(["costs"] if any(each.metadata["costs"] for each in listed) else [])]
    rows = [
        [f"`{each.name}`", _default(each.default), each.metadata["text"], each.metadata["costs"]] for each in listed
    ]
    lines = (f"| {' | '.join(row[: len(columns)])} |" for row in [columns, *rows])
    return "\n".join([next(lines), "|---" * len(columns) + "|", *lines])


def _default(value: object) -> str:
    """Format a default as Python. A nested dataclass of options is its constructor call."""
    return f"`mw.{type(value).__name__}()`" if is_dataclass(value) else f"`{value!r}`".replace("'", '"')


def _sections(section: type[BaseModel], title: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield every section in the order of declaration, with its TOML header: "", `[mesh]`, `[[data]]`."""
    yield title, section
    for name, field in section.model_fields.items():
        if inner := section_of(field.annotation):
            at = f"{title.strip('[]')}.{name}" if title else name
            yield from _sections(inner, f"[[{at}]]" if is_list(field.annotation) else f"[{at}]")


def _section_page(title: str, section: type[BaseModel]) -> str:
    """Format one section. Held-out sections inherit the fields of a source, which are listed under `[[data]]` only."""
    inherits = issubclass(section, SourceSection) and title != "[[data]]"
    explained = inspect.get_annotations(section) if inherits else section.model_fields
    rows = [_row(name, field) for name, field in section.model_fields.items() if name in explained]
    others = [f"`{name}`" for name in section.model_fields if name not in explained]
    if others:
        rows.append(f"| {', '.join(others)} | | As in `[[data]]`. |")
    head = f"## {f'`{title}`' if title else 'At the top'}\n\n{section.__doc__}\n"
    return "\n".join([head, "| field | default | description |", "|---|---|---|", *filter(None, rows), ""])


def _row(name: str, field: FieldInfo) -> str:
    """Format one field as a table row, "" for a section, which has a separate table."""
    if section_of(field.annotation):
        return ""
    default = "required" if field.is_required() else "none" if field.default is None else f"`{to_toml(field.default)}`"
    text = " ".join((field.description or "").split())
    return f"| `{name}` | {default} | {text} |"
