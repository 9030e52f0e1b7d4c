"""Files, configs and pickles that are refused. Keys that are: tests/test_weights.py."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

import meshwright as mw
from tests import tiny
from tests.words import words

HEADERS: list[tuple[str, Callable[[bytes], bytes], str]] = [
    ("truncated", lambda raw: raw[:-1], r"model\.safetensors.*\btruncated\b"),
    ("grown", lambda raw: raw + b"\0", r"model\.safetensors.*\bgrown\b"),
    ("empty", lambda raw: b"", words(r"model\.safetensors", r"\b0 bytes\b", "truncated")),
    ("huge header", lambda raw: struct.pack("<Q", 1 << 60) + raw[8:], rf"\b{1 << 60}\b.*\btruncated\b"),
    ("no json", lambda raw: raw[:8] + b"x" + raw[9:], words(r"model\.safetensors", "malformed", "header")),
    ("unknown dtype", lambda raw: raw.replace(b'"F32"', b'"F99"', 1), r"dtype 'F99'"),
    ("gap", lambda raw: raw.replace(b'"shape":[36]', b'"shape":[35]', 1), words(r"\b140 bytes\b", r"\b144\b")),
]


@pytest.mark.parametrize(("change", "pattern"), [h[1:] for h in HEADERS], ids=[h[0] for h in HEADERS])
def test_broken_files(tmp_path: Path, change: Callable[[bytes], bytes], pattern: str) -> None:
    source = tiny.directory(tmp_path / "m", "qwen3")
    path = source / "model.safetensors"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(mw.BrokenFile, match=pattern):
        mw.load(source)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"model_type": "llama"}, r"model_type='llama'"),
        ({"hidden_act": "gelu"}, r"hidden_act='gelu'"),
        ({"attention_bias": True}, r"attention_bias=True"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4}}, r"rope_type='dynamic'"),
        ({"num_key_value_heads": 3}, words("num_key_value_heads=3", "num_attention_heads=4")),
        ({"vocab_size": None}, r"\bno 'vocab_size'"),
        ({"vocab_size": "many"}, words("vocab_size='many'", r"\bint\b")),
        ({"num_hidden_layers": 0}, r"num_hidden_layers=0\b"),
    ],
    ids=str,
)
def test_configs_that_are_refused(tmp_path: Path, fields: dict[str, object], pattern: str) -> None:
    source = tiny.directory(tmp_path / "m", "qwen3")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, **fields}))
    with pytest.raises(mw.ConfigError, match=pattern):
        mw.load(source)


def test_pickles_are_refused(tmp_path: Path) -> None:
    source = tiny.directory(tmp_path / "m", "qwen3")
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    with pytest.raises(mw.LoadError, match=words(r"pytorch_model\.bin", "pickle")):
        mw.load(source)
