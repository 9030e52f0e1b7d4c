"""Files of Qwen4-Exp beyond those that tests/tiny.py writes: in FP8, and with another hash than the config's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import meshwright as mw
from tests import tiny, trials, worlds
from tests.test_weights import same_files

TABLE = ".ngram_embedding."


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.directory(tmp_path_factory.mktemp("q4") / "m", "qwen4_exp", dtype=torch.bfloat16)


def in_fp8(source: Path, at: Path) -> dict[str, torch.Tensor]:
    """Write a model as published FP8 files are: experts in blocks, and one scale for all parts of the table. Return the
    values of the table's parts."""
    at.mkdir()
    out, values, tensors = {}, {}, load_file(source / "model.safetensors")
    largest = max(value.float().abs().max() for key, value in tensors.items() if TABLE in key)
    for key, value in tensors.items():
        stem, is_part, _ = key.partition(TABLE)
        if not is_part and ".experts." not in key:
            out[key] = value
            continue
        amax = largest if is_part else value.float().abs().max()
        scale = (amax / 448).bfloat16()
        out[key] = (value.float() / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
        if is_part:
            out[f"{stem}{TABLE}weight_scale"], values[key] = scale.reshape(1), out[key].float() * scale.float()
        else:
            out[f"{key}_scale_inv"] = scale.reshape(1, 1)
    save_file(out, at / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    quantised = dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[128, 128])
    (at / "config.json").write_text(json.dumps({**config, "quantization_config": quantised}))
    return values


def load_and_export(source: Path, out: Path, mesh: dict[str, int]) -> torch.Tensor:
    """Return the rows that this rank holds."""
    model = mw.load(source, trials.mesh_of(mesh), dtype=torch.float32)
    mw.export(model, out)
    return model.stored()["layers.1.grams.table"].detach().clone()


def test_fp8_files_are_read_with_the_scale_of_the_table(tmp_path: Path, source: Path) -> None:
    """A scale that is registered and never used gives fluent nonsense (vllm#53896)."""
    expected = in_fp8(source, tmp_path / "fp8")
    for number, mesh in enumerate((dict(), dict(fsdp=2, tp=2))):
        out = tmp_path / f"out{number}"
        rows = torch.cat(worlds.run(trials.world_of(mesh), load_and_export, tmp_path / "fp8", out, mesh))
        parts = [expected[f"model.layers.1.ple.ple_embedding{TABLE}shard_{i}.weight"] for i in range(12)]
        assert torch.equal(rows, torch.cat(parts))
        same_files(tmp_path / "fp8", out)


def refused(source: Path, train: str) -> str:
    return trials.error_of(lambda: mw.load(source, mw.Mesh(device="cpu"), train=train))


def test_a_table_with_one_scale_is_not_trained(tmp_path: Path, source: Path) -> None:
    """An outlier of one row would move all others."""
    in_fp8(source, tmp_path / "fp8")
    assert "one scale for all parts" in worlds.run(1, refused, tmp_path / "fp8", "*")[0]


@pytest.mark.parametrize("name", ["layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets"])
def test_a_hash_of_other_files_is_refused(tmp_path: Path, source: Path, name: str) -> None:
    """Another vocabulary or seed reads other rows of the table, and trains."""
    tensors = load_file(source / "model.safetensors")
    (key,) = (key for key in tensors if key.endswith(name))
    tensors[key][-1] += 2
    (tmp_path / "m").mkdir()
    save_file(tensors, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "m" / "config.json").write_bytes((source / "config.json").read_bytes())
    said = worlds.run(1, refused, tmp_path / "m", "**")[0]
    assert key in said
    assert str(int(tensors[key][-1])) in said


def by_rows(source: Path) -> list[tuple[str, ...]]:
    """Train tables with Muon; return their state."""
    model = mw.load(source, mw.Mesh(device="cpu"), dtype=torch.float32, train="*")
    engine = mw.Engine(model, lr=1e-3, optimizer=mw.Muon())
    return [engine.optimizer.state_names[param.name] for param in model.table if param.by_rows]


def test_no_optimizer_gathers_a_table(source: Path) -> None:
    assert worlds.run(1, by_rows, source) == [[("exp_avg", "exp_avg_sq")]]
