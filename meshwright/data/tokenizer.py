"""The tokenizer of a model directory."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from ..errors import DataError
from .json_values import read_object

_TOKENS, _CONFIG = "tokenizer.json", "tokenizer_config.json"
_MOST_TEMPLATE_BYTES = 4 << 20
_FILES = (_TOKENS, _CONFIG, "vocab.json", "merges.txt", "special_tokens_map.json",
          "chat_template.jinja", "generation_config.json")  # fmt: skip


def tokenizer_of(directory: Path, otherwise: str = 'give rows of ids (kind = "tokens")') -> Any:
    """`otherwise`: what to do where there is none."""
    from transformers import AutoTokenizer  # takes a second to import: only who reads text waits for it

    if not (directory / _CONFIG).is_file() and not (directory / _TOKENS).is_file():
        raise DataError(f"{directory} holds no tokenizer; put its files there, or {otherwise}")
    for name in (_CONFIG, "special_tokens_map.json", "config.json"):
        if (directory / name).is_file():
            read_object(directory / name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        tokenizer.encode("a")
    except Exception as error:  # transformers checks no field, so that anything may be raised
        raise DataError(
            f"{_broken(directory)} cannot be read as a tokenizer: {type(error).__name__}: {error}; fetch it again"
        ) from error
    return tokenizer


def _broken(directory: Path) -> Path:
    """Return which file keeps a tokenizer from being read: the first that cannot be read alone."""
    from tokenizers import Tokenizer
    from transformers import AutoConfig

    alone = ((_TOKENS, Tokenizer.from_file), ("config.json", AutoConfig.from_pretrained))
    for file, read in ((directory / name, read) for name, read in alone):
        try:
            if file.is_file():
                read(str(file))
        except Exception:  # noqa: BLE001 - both libraries raise anything; the caller says what it was
            return file
    return directory / _CONFIG


def encoded(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a text. Refuse a text that is no Unicode: JSON can name half of a character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        near = ascii(text[max(0, error.start - 20) : error.start + 1])
        raise DataError(
            f"a text holds half of a character, {text[error.start]!a}, without its other half: {near}; write the "
            "file again as UTF-8"
        ) from error
    return list(tokenizer.encode(text, add_special_tokens=False))


def fingerprint_of(directory: Path) -> str:
    """Of all files that say how text becomes tokens."""
    found = hashlib.sha256()
    for name in _FILES:
        if (directory / name).is_file():
            found.update(name.encode() + b"\0" + (directory / name).read_bytes())
    return found.hexdigest()


def generation_config_of(directory: Path) -> dict[str, Any]:
    file = directory / "generation_config.json"
    return read_object(file) if file.is_file() else {}


def template_of(file: Path) -> str:
    """Return the text of a chat template."""
    try:
        if file.exists() and not file.is_file():
            raise DataError(f"the chat template {file} is no file; give the path of a text")
        if file.stat().st_size > _MOST_TEMPLATE_BYTES:
            raise DataError(f"the chat template {file} has {file.stat().st_size:,} bytes, too many for a template")
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"the chat template {file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"the chat template {file} is not UTF-8: {error.reason} at its byte {error.start}") from error
