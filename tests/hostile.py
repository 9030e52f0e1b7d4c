"""Hostile and broken sources, for several tests."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import meshwright as mw

INDEX = "model.safetensors.index.json"
WAYS_OUT = (
    "fetch", "mend", "remove", "correct", "give", "convert", "choose", "check", "put", "must", "set it", "write",
    "use", "repair", "rename", "ended", "not supported", "known are", "at most", "needs it",
)  # fmt: skip


@contextmanager
def refused(error: type[Exception], pattern: str, directory: Path) -> Iterator[None]:
    """One error of our own, with a way out, within a second of CPU, with no file touched and none left open."""
    before, fds, began = tree(directory), set(os.listdir("/proc/self/fd")), (time.process_time(), time.monotonic())
    with pytest.raises(error, match=pattern) as caught:
        yield
    assert isinstance(caught.value, mw.MeshwrightError)
    assert any(way in str(caught.value) for way in WAYS_OUT), f"no way out in: {caught.value}"
    assert len(str(caught.value)) < 2000, "the message quotes too much"
    str(caught.value).encode()
    assert time.process_time() - began[0] < 1
    assert time.monotonic() - began[1] < 10, "it waited for something"
    assert tree(directory) == before
    assert set(os.listdir("/proc/self/fd")) <= fds


def tree(directory: Path) -> dict[str, object]:
    return {
        str(p): (p.lstat().st_mtime_ns, p.lstat().st_size) for p in [*directory.rglob("*"), directory] if p.is_symlink()
        or p.exists()
    }  # fmt: skip


def index(at: Path, weight_map: object) -> None:
    (at / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
