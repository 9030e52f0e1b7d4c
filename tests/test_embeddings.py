"""Base models as transformers saves them, without `model.` in their keys, and the embeddings of documents."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import meshwright as mw
from tests import parts, tiny, worlds

DOCUMENTS = [[5, 6, 7, 1, 2], [3] * 7 + [100, 130], list(range(40, 70)), [8, 8], [11]]
MESHES = [dict(tp=2), *parts.every(4, [dict(pp=2), dict(cp=2), dict(fsdp=3), dict(pp=2, tp=2)])]


def base_model(at: Path, name: str) -> tuple[Path, Tensor]:
    """Save a model without its head as transformers does; return it with its embeddings of the documents."""
    model = tiny.reference(name).model.eval()
    model.save_pretrained(at)
    with torch.no_grad():
        last = [model(input_ids=torch.tensor([ids])).last_hidden_state[0, -1] for ids in DOCUMENTS]
    return at, torch.stack(last)


def embedded(source: Path, mesh: dict[str, int], out: Path | None) -> Tensor:
    model = mw.load(source, mw.Mesh(**mesh), dtype=torch.float32, head="none")
    if out is not None:
        mw.export(model, out)
    return mw.embeddings(model, mw.pack(DOCUMENTS, length=60))


@pytest.mark.parametrize("name", ["qwen3_tied", *parts.every(3, ["qwen3_moe", "qwen2", "qwen3_next"], 2)])
def test_embeddings_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    source, expected = base_model(tmp_path / "m", name)
    keys = load_file(source / "model.safetensors").keys()
    assert "embed_tokens.weight" in keys
    alone = worlds.run(1, embedded, source, {}, tmp_path / "out")[0]
    assert alone.shape == expected.shape
    assert (alone - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    for mesh in MESHES if name == "qwen3_tied" else [dict(ep=2, fsdp=2)] if "moe" in name else []:
        world = max(2, len(mesh) * 2 if "pp" in mesh else max(mesh.values()))
        for each in worlds.run(world, embedded, source, mesh, None):
            assert (each - alone).abs().max() <= 1e-5 * alone.abs().max(), mesh


def test_a_base_model_without_its_head_is_refused(tmp_path: Path) -> None:
    source, _ = base_model(tmp_path / "m", "qwen3")

    def load() -> None:
        with pytest.raises(mw.MissingKey, match=r'lm_head\.weight.*head="none"'):
            mw.load(source, mw.Mesh())
        model = mw.load(source, mw.Mesh(), head="none")
        with pytest.raises(mw.StateError, match="computes hidden, not logits"):
            mw.logits(model, mw.pack(DOCUMENTS))

    worlds.run(1, load)


def test_adapters_of_a_base_model_are_for_the_class_that_loads_them(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    import transformers

    source, _ = base_model(tmp_path / "m", "qwen3_tied")

    def export() -> tuple[Tensor, str]:
        adapted = mw.load(source, mw.Mesh(), dtype=torch.float32, head="none", lora=mw.Lora(rank=2, b_std=0.1))
        mw.export_adapter(adapted, tmp_path / "adapter")
        causal = mw.load(source, mw.Mesh(), lora=mw.Lora(rank=2))
        with pytest.raises(mw.ConfigError) as error:
            mw.export_adapter(causal, tmp_path / "no")
        return mw.embeddings(adapted, mw.pack(DOCUMENTS)), str(error.value)

    expected, refusal = worlds.run(1, export)[0]
    assert "those of a base model" in refusal
    base = transformers.AutoModel.from_pretrained(source, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    last = [model(input_ids=torch.tensor([ids])).last_hidden_state[0, -1] for ids in DOCUMENTS]
    assert (torch.stack(last) - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_a_tied_base_model_trains_as_a_language_model(tmp_path: Path) -> None:
    source, _ = base_model(tmp_path / "m", "qwen3_tied")

    def train() -> tuple[float, float]:
        engine = mw.Engine(mw.load(source, mw.Mesh(), dtype=torch.float32), lr=1e-2)
        losses = [engine.step([mw.pack(DOCUMENTS)]).loss for _ in range(3)]
        mw.export(engine.model, tmp_path / "out")
        return losses[0], losses[-1]

    first, last = worlds.run(1, train)[0]
    assert last < first
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == load_file(source / "model.safetensors").keys()
