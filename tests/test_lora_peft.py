"""Three steps with adapters against peft and torch's AdamW, and merges equal to peft's to the bit, on other meshes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

import meshwright as mw
from meshwright.axes import Axes
from meshwright.recipe import Lora
from meshwright.weights import peft_files
from tests import parts, tiny, worlds

DOCUMENTS = [[5, 6, 7, 1, 2], [3] * 7 + [100, 130], list(range(40, 70)), [8, 8]]
AXES = dict.fromkeys(("pp", "replicate", "fsdp", "cp", "tp", "ep"), 1)
DRAWN = Lora(rank=3, alpha=6.0, expert_rank=2, b_std=0.1)  # where B is 0, A has no gradient
LR, ADAMW = (
    1e-2,
    dict(betas=(0.9, 0.95), eps=1e-3),
)  # eps: Adam would turn rounding of gradients near 0 into whole steps
CASES: list[tuple[str, dict[str, Any], dict[str, int]]] = [
    ("qwen3_5_moe", {}, dict(tp=2)),
    *parts.every(4, [
        ("qwen3", {}, dict(fsdp=3)),
        ("qwen3_moe", dict(mlp_only_layers=[]), dict(fsdp=2, ep=2)),
        ("qwen3_5", {}, dict(pp=2)),
        ("qwen2", {}, dict(tp=4)),
    ]),
]  # fmt: skip


def trained(source: Path, at: Path) -> list[float]:
    """Train three steps; write the adapters before and after."""
    model = mw.load(source, mw.Mesh(), dtype=torch.float32, lora=DRAWN)
    engine = mw.Engine(model, optimizer=mw.AdamW(weight_decay=0.1, **ADAMW), lr=LR, max_norm=None)
    mw.export_adapter(model, at / "before", layout="fused")
    losses = [engine.step([mw.pack(DOCUMENTS)]).loss for _ in range(3)]
    mw.export_adapter(model, at / "after", layout="fused")
    return losses


def merged(source: Path, at: Path, mesh: dict[str, int]) -> None:
    """Export a model with its adapters merged."""
    model = mw.load(source, mw.Mesh(**mesh), dtype=torch.float32, lora=Lora(path=str(at / "after")))
    mw.export(model, at / "merged", merge=True)


def peft_model(source: Path, adapter: Path, dtype: torch.dtype) -> Any:
    """Read our files with peft."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    return peft.PeftModel.from_pretrained(base, adapter, is_trainable=True)


def loss_of(model: Any) -> Tensor:
    """Return the mean cross-entropy over all targets of the documents."""
    terms = [
        F.cross_entropy(model(input_ids=torch.tensor([d])).logits[0, :-1], torch.tensor(d[1:]), reduction="sum")
        for d in DOCUMENTS
    ]
    return torch.stack(terms).sum() / sum(len(d) - 1 for d in DOCUMENTS)


@pytest.mark.parametrize(("family", "changes", "mesh"), CASES, ids=str)
def test_three_steps_and_the_merge_equal_those_of_peft(
    family: str, changes: dict[str, Any], mesh: dict[str, int], tmp_path: Path
) -> None:
    source = tiny.directory(tmp_path / "m", family, layout="fused", dtype=torch.bfloat16, **changes)
    losses = worlds.run(1, trained, source, tmp_path)[0]
    model = peft_model(source, tmp_path / "before", torch.float32)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR, weight_decay=0.0, **ADAMW)
    for loss in losses:
        expected = loss_of(model)
        assert loss == pytest.approx(expected.item(), abs=1e-5)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
    factors = load_file(tmp_path / "after" / peft_files.WEIGHTS_FILE)
    peft_factors = {name.replace(".default", ""): p for name, p in model.named_parameters() if p.requires_grad}
    assert factors.keys() == peft_factors.keys()
    for key, factor in factors.items():
        assert (factor - peft_factors[key]).abs().max() <= 1e-5, key

    worlds.run(Axes(**{**AXES, **mesh}).world, merged, source, tmp_path, mesh)
    ours = load_file(tmp_path / "merged" / "model.safetensors")
    wide = peft_model(source, tmp_path / "after", torch.float32).merge_and_unload().state_dict()
    narrow = peft_model(source, tmp_path / "after", torch.bfloat16).merge_and_unload().state_dict()
    for key, tensor in ours.items():
        assert torch.equal(tensor, wide[key].to(tensor.dtype)), key
        # peft rounds what it adds to fused experts to bfloat16 first, so it rounds twice. transformers rounds A_log.
        if ".experts." not in key and tensor.dtype == torch.bfloat16:
            assert torch.equal(tensor, narrow[key].to(tensor.dtype)), key
    base = load_file(source / "model.safetensors")
    assert ours.keys() == base.keys()
    assert sum(not torch.equal(ours[key], base[key]) for key in base) >= len(factors) // 2
