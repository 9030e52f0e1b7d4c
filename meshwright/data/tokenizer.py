"""Load the tokenizer of a model directory, and fingerprint the files that determine tokens."""

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


def tokenizer_of(directory: Path, fix: str = 'give rows of ids (kind = "tokens")') -> Any:
    """Load the tokenizer. `fix`: what to do if there is none."""
    from transformers import AutoTokenizer  # imported on first use because it takes a second

    if not (directory / _CONFIG).is_file() and not (directory / _TOKENS).is_file():
        raise DataError(f"{directory} holds no tokenizer; put its files into it, or {fix}")
    # Read these files first, with clear errors: transformers reports a broken JSON file in many ways, mostly without
    # its name.
    for name in (_CONFIG, "special_tokens_map.json", "config.json"):
        if (directory / name).is_file():
            read_object(directory / name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        # Some broken tokenizers load and fail at the first text.
        tokenizer.encode("a")
    except Exception as error:  # transformers checks no field, so it may raise anything
        raise DataError(
            f"{_broken(directory)} cannot be read as a tokenizer: {type(error).__name__}: {error}; fetch it again"
        ) from error
    return tokenizer


def _broken(directory: Path) -> Path:
    """Return the file that keeps a tokenizer from loading: the first one that cannot be read on its own."""
    from tokenizers import Tokenizer
    from transformers import AutoConfig

    readers = ((_TOKENS, Tokenizer.from_file), ("config.json", AutoConfig.from_pretrained))
    for file, read in ((directory / name, read) for name, read in readers):
        try:
            if file.is_file():
                read(str(file))
        except Exception:  # noqa: BLE001 - both libraries raise anything; the caller says what it was
            return file
    return directory / _CONFIG


def encoded(tokenizer: Any, text: str) -> list[int]:
    """Tokenise text without special tokens. Refuse lone surrogates, which JSON can spell and UTF-8 cannot.

    Special tokens are not added because chat templates write their own, and packed documents must not get a second
    start token.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        context = ascii(text[max(0, error.start - 20) : error.start + 1])
        raise DataError(
            f"a text holds half of a character, {text[error.start]!a}, without its other half: {context}; rewrite the "
            "file as UTF-8"
        ) from error
    return list(tokenizer.encode(text, add_special_tokens=False))


def fingerprint_of(directory: Path) -> str:
    """Return a hash of all files that determine how text becomes tokens.

    A changed tokenizer changes every token of the cache and of the plan, so this is part of both keys.
    """
    digest = hashlib.sha256()
    for name in _FILES:
        if (directory / name).is_file():
            digest.update(name.encode() + b"\0" + (directory / name).read_bytes())
    return digest.hexdigest()


def generation_config_of(directory: Path) -> dict[str, Any]:
    """Return generation_config.json, or {}."""
    file = directory / "generation_config.json"
    return read_object(file) if file.is_file() else {}


def template_of(file: Path) -> str:
    """Read a chat template."""
    try:
        if file.exists() and not file.is_file():
            raise DataError(f"the chat template {file} is not a file; give the path of a text file")
        if file.stat().st_size > _MOST_TEMPLATE_BYTES:
            raise DataError(f"the chat template {file} has {file.stat().st_size:,} bytes, too many for a template")
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"the chat template {file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"the chat template {file} is not UTF-8: {error.reason} at its byte {error.start}") from error
