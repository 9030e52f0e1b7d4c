"""The files that determine how text becomes tokens."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshwright.data.tokenizer import encoded, fingerprint_of
from meshwright.train.config import DataSection
from meshwright.train.data_sources import prompter

NAMES = ["tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "special_tokens_map.json",
         "chat_template.jinja", "generation_config.json"]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_each_file_of_a_tokenizer_changes_its_fingerprint(tmp_path: Path, name: str) -> None:
    for each in NAMES:
        (tmp_path / each).write_text("{}")
    same, file = fingerprint_of(tmp_path), tmp_path / name
    (tmp_path / "config.json").write_text("{}")
    assert fingerprint_of(tmp_path) == same
    file.write_text("[]")
    changed = fingerprint_of(tmp_path)
    file.unlink()
    assert len({same, changed, fingerprint_of(tmp_path)}) == 3


def test_the_name_of_a_file_is_in_the_fingerprint(tmp_path: Path) -> None:
    prints = []
    for name in NAMES:
        (tmp_path / name).write_text("{}")
        prints.append(fingerprint_of(tmp_path))
        (tmp_path / name).unlink()
    assert len({*prints}) == len(NAMES)


def test_the_end_of_a_long_file_is_in_the_fingerprint(tmp_path: Path) -> None:
    prints = []
    for end in "ab":
        (tmp_path / "tokenizer.json").write_text("x" * (1 << 20) + end)
        prints.append(fingerprint_of(tmp_path))
    assert prints[0] != prints[1]


def test_no_special_token_is_added_to_a_text() -> None:
    """Templates write those of a chat, and a packed document must have no second start token."""
    encode = lambda text, add_special_tokens=True: [0] * add_special_tokens + [*map(ord, text)]  # noqa: E731 - short
    known: Any = SimpleNamespace(encode=encode)
    assert encoded(known, "ab") == [97, 98]
    assert prompter(DataSection(path="x", kind="text"), Path(), known)("ab") == [97, 98]
