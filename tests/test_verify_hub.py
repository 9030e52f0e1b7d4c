"""`meshwright verify org/name`: the files that it fetches, and the errors when it cannot."""

from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from meshwright.axes import Axes
from meshwright.cli import main
from meshwright.verify import FULL, WEIGHTS, Options, plan
from tests import tiny
from tests.words import words


@pytest.fixture
def requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Stand in for a hub with org/tiny; record whether each call wants weights."""
    whole, requests = tiny.directory(tmp_path / "hub", "qwen3_moe", layout="fused"), list[bool]()
    keys = ["model.layers.0.mlp.experts.gate_up_proj"]
    assert all(key in (whole / "model.safetensors").read_bytes().decode("latin1") for key in keys)

    def snapshot_download(repo_id: str, *, allow_patterns: list[str], **options: Any) -> str:
        assert repo_id == "org/tiny"
        requests.append("*.safetensors" in allow_patterns)
        if requests[-1]:
            return str(whole)
        small = tmp_path / "config-only"
        small.mkdir(exist_ok=True)
        shutil.copy(whole / "config.json", small)
        return str(small)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download, raising=False)
    return requests


def test_the_config_alone_is_fetched_for_a_shrunk_run(requests: list[bool], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "org/tiny", "--dtypes", "float64", "--against", "none"]) == 0
    assert requests == [False]
    assert re.search(words("org/tiny", r"\bhub\b", r"\bconfig\b"), capsys.readouterr().err)


@pytest.mark.parametrize("kind", [FULL, WEIGHTS])
def test_the_mesh_is_looked_at_before_weights_are_fetched(requests: list[bool], kind: str) -> None:
    assert plan("org/tiny", Axes(tp=2), Options(kind=kind)).blueprint.keymap.choice == {"experts": "fused"}
    assert requests == [False, True]
    with pytest.raises(Exception, match=words("tp=3", "tp from 1, 2")):
        plan("org/tiny", Axes(tp=3), Options(kind=kind))
    assert requests == [False, True, False]


def test_the_index_tells_how_experts_are_spelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files in a cache are ignored: they may be half of them."""
    whole = tiny.directory(tmp_path / "hub", "qwen3_moe", layout="fused")
    from safetensors import safe_open

    with safe_open(whole / "model.safetensors", "pt") as file:
        keys = list(file.keys())
    weight_map = dict.fromkeys(keys, "model-00002-of-00002.safetensors") | {
        "model.norm.weight": "model-00001-of-00002.safetensors"
    }
    (whole / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (whole / "model.safetensors").rename(whole / "model-00002-of-00002.safetensors")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: str(whole), raising=False)
    assert plan("org/tiny", Axes(fsdp=2)).blueprint.keymap.choice == {"experts": "fused"}


def test_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def snapshot_download(repo_id: str, **options: Any) -> str:
        assert options["etag_timeout"] < 5
        raise errors.LocalEntryNotFoundError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download, raising=False)
    began = time.monotonic()
    assert main(["verify", "org/tiny", "--mesh", "tp=2"]) == 2
    wanted = words("org/tiny", r"\bhub\b", r"\bcache\b", "HF_HUB_OFFLINE")
    assert re.search(wanted, capsys.readouterr().err)
    assert time.monotonic() - began < 5
