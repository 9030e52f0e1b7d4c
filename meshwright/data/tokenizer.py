"""The tokenizer of a model directory."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from ..errors import DataError

_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "special_tokens_map.json",
          "chat_template.jinja", "generation_config.json")  # fmt: skip


def tokenizer_of(directory: Path, otherwise: str = 'give rows of ids (kind = "tokens")') -> Any:
    """`otherwise`: what to do where there is none."""
    from transformers import AutoTokenizer  # takes a second to import: only who reads text waits for it

    if not (directory / "tokenizer_config.json").is_file() and not (directory / "tokenizer.json").is_file():
        raise DataError(f"{directory} holds no tokenizer; put its files there, or {otherwise}")
    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"the tokenizer of {directory} cannot be read: {error}") from error


def fingerprint_of(directory: Path) -> str:
    """Of all files that say how text becomes tokens."""
    found = hashlib.sha256()
    for name in _FILES:
        if (directory / name).is_file():
            found.update(name.encode() + b"\0" + (directory / name).read_bytes())
    return found.hexdigest()


def generation_config_of(directory: Path) -> dict[str, Any]:
    file = directory / "generation_config.json"
    found = json.loads(file.read_text()) if file.is_file() else {}
    return found if isinstance(found, dict) else {}
