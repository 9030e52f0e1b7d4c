"""The files that determine how text becomes tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.data.tokenizer import fingerprint_of

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
