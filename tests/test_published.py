"""`verify --weights` names files that were damaged before they were loaded, though they agree with themselves."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.cli import main
from meshwright.verify.weight_checks import strange_in
from tests import tiny
from tests.words import words


def flipped(at: Path, bit: int) -> None:
    """One bit of the first number of the payload. Of bfloat16, 14 is the top of the exponent, 0 the last digit."""
    data = bytearray(at.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    data[start + bit // 8] ^= 1 << bit % 8
    at.write_bytes(bytes(data))


def output_of(capsys: pytest.CaptureFixture[str], source: Path) -> tuple[int, dict[str, Any]]:
    code = main(["verify", str(source), "--mesh", "fsdp=2", "--weights", "--json"])
    return code, json.loads(capsys.readouterr().out)["runs"][0]


def published(at: Path) -> Path:
    """Write a model like the cache of the hub: links to blobs named by their sha256."""
    made = tiny.directory(at / "made", "qwen3", dtype=torch.bfloat16)
    blobs, snapshot = at / "blobs", at / "snapshots" / "1"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    data = (made / "model.safetensors").read_bytes()
    blob = blobs / hashlib.sha256(data).hexdigest()
    blob.write_bytes(data)
    (snapshot / "model.safetensors").symlink_to(os.path.relpath(blob, snapshot))
    (snapshot / "config.json").write_bytes((made / "config.json").read_bytes())
    return snapshot


def test_a_flipped_bit_of_a_published_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The last digit of a weight differs, which no look at the numbers shows."""
    source = published(tmp_path)
    code, run = output_of(capsys, source)
    assert (code, run["oracles"]["W1"]) == (0, [])
    assert [m["count"] for m in run["margins"]["W1"] if "sha256" in m["what"]] == [1]
    flipped((source / "model.safetensors").resolve(), 0)
    code, run = output_of(capsys, source)
    assert code == 1
    [result] = run["oracles"]["W1"]
    assert result["name"] == "model.safetensors"
    assert re.search(words("sha256", "the hub has [0-9a-f]{64}", "fetch the file again"), result["what"]), result


def test_what_a_download_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside a directory that the hub's command line filled."""
    source = tiny.directory(tmp_path / "m", "qwen3", dtype=torch.bfloat16)
    noted = source / ".cache" / "huggingface" / "download"
    noted.mkdir(parents=True)
    digest = hashlib.sha256((source / "model.safetensors").read_bytes()).hexdigest()
    (noted / "model.safetensors.metadata").write_text(f"{'a' * 40}\n{digest}\n1700000000.0\n")
    assert output_of(capsys, source)[0] == 0
    flipped(source / "model.safetensors", 0)
    assert output_of(capsys, source)[0] == 1


def test_a_weight_that_no_model_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tiny.directory(tmp_path / "m", "qwen3", dtype=torch.bfloat16)
    code, run = output_of(capsys, source)
    assert code == 0
    assert any("is not known" in note for note in run["notes"]), run
    flipped(source / "model.safetensors", 14)
    code, run = output_of(capsys, source)
    assert code == 1
    [result] = run["oracles"]["W1"]
    assert re.search(words(r"a weight of \d\S*e\+3\d on rank 0", "usual"), result["what"]), result
    assert "damaged" in result["guess"]


def test_a_weight_that_is_not_finite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tiny.directory(tmp_path / "m", "qwen3", dtype=torch.bfloat16)
    data = bytearray((source / "model.safetensors").read_bytes())
    data[-2:] = b"\xc0\x7f"  # NaN
    (source / "model.safetensors").write_bytes(bytes(data))
    code, run = output_of(capsys, source)
    assert code == 1
    assert re.search(r"1 of \d+ elements on rank 1 are not finite", run["oracles"]["W1"][0]["what"]), run


def test_a_factor_of_a_whole_matrix_is_no_damage() -> None:
    """Scales that lack a global factor make all values large; a flipped bit makes one."""
    matrix = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))
    damaged = matrix.clone()
    damaged[3, 4] = 1e38
    (of_bit,), (of_factor,) = (list(strange_in("it", each, 0)) for each in (damaged, matrix * 1e6))
    assert "a flipped bit" in of_bit.guess
    assert "its scales are taken otherwise" in of_factor.guess
    assert list(strange_in("it", matrix, 0)) == []
