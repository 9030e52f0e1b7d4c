"""Against transformers, float32, odd sizes: logits, every gradient, packed documents beside documents one at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import meshwright as mw
from meshwright.layout import segments
from meshwright.models import qwen3_5
from tests import tiny, worlds

DOCUMENTS = [[5, 6, 7, 1, 2], [9], [3] * 7 + [100, 130], list(range(40, 110)), [8, 8]]


def theirs(name: str) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Logits of each document alone, gradients and value of the mean loss over all targets."""
    model = tiny.reference(name)
    num_targets = sum(len(d) - 1 for d in DOCUMENTS)
    logits = [model(torch.tensor([d])).logits[0] for d in DOCUMENTS]
    targets = [torch.tensor(d[1:], dtype=torch.int64) for d in DOCUMENTS]
    terms = [F.cross_entropy(x[:-1], t, reduction="sum") for x, t in zip(logits, targets, strict=True)]
    loss = torch.stack(terms).sum() / num_targets
    loss.backward()
    grads = {k: torch.zeros_like(p) if p.grad is None else p.grad for k, p in model.named_parameters()}
    return torch.cat(logits).detach(), tiny._per_expert(grads), loss.detach()


def ours(source: Path) -> tuple[Tensor, dict[str, Tensor], float]:
    model = mw.load(source, dtype=torch.float32)
    batch = mw.pack(DOCUMENTS)
    logits = mw.logits(model, batch)
    engine = mw.Engine(model, lr=1e-3)
    loss = engine.backward([batch])
    return logits, mw.gather(model, "grad"), loss


def kl(a: Tensor, b: Tensor) -> float:
    p, q = a.double().log_softmax(-1), b.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.parametrize("name", list(tiny.ODD))
def test_logits_and_gradients(tmp_path: Path, name: str) -> None:
    source = tiny.directory(tmp_path / "m", name)
    logits, grads, loss = worlds.run(1, ours, source)[0]
    ref_logits, ref_grads, ref_loss = worlds.run(1, theirs, name)[0]
    assert (logits - ref_logits).abs().max() <= 1e-5 * ref_logits.abs().max()
    assert kl(ref_logits, logits) <= 3e-7
    assert math.isclose(loss, ref_loss.item(), rel_tol=1e-6)
    assert set(grads) == set(ref_grads)
    norm = torch.stack([g.double().norm() for g in ref_grads.values()]).norm().item()
    for key, ref in ref_grads.items():
        error = (grads[key].double() - ref.double()).norm().item()
        assert error <= 1e-5 * max(ref.double().norm().item(), 1e-2 * norm), f"{key}: {error / norm:.2e} of the norm"


def test_permuted_segments_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A declaration that takes [Q | K | V] for [K | Q | V] loads, trains and exports without a complaint; only another
    implementation can tell."""
    real: Callable[..., Any] = segments

    def swapped(key: str, shape: Any, cuts: Any, source: Any) -> Any:
        layout = real(key, shape, cuts, source)
        q, k, v = layout.blocks
        return type(layout)(
            layout.name, (type(q)(q.ours, q.key, q.shape, k.theirs), type(k)(k.ours, k.key, k.shape, q.theirs), v)
        )

    monkeypatch.setattr(qwen3_5, "segments", swapped)
    source = tiny.directory(tmp_path / "m", "qwen3_5")
    logits, _, _ = worlds.run(1, ours, source)[0]
    ref_logits, _, _ = worlds.run(1, theirs, "qwen3_5")[0]
    assert (logits - ref_logits).abs().max() > 1e-2


@pytest.mark.parametrize("name", list(tiny.ODD))
def test_transformers_loads_the_export(tmp_path: Path, name: str) -> None:
    import transformers

    source = tiny.directory(tmp_path / "m", name)
    worlds.run(1, _train_and_export, source, tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ids = torch.tensor([DOCUMENTS[3]])
    with torch.no_grad():
        expected = model(ids).logits[0]
    found = worlds.run(1, _logits, tmp_path / "out", DOCUMENTS[3])[0]
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def _train_and_export(source: Path, out: Path) -> None:
    model = mw.load(source, dtype=torch.float32)
    mw.Engine(model, lr=1e-2).step([mw.pack(DOCUMENTS)])
    mw.export(model, out)


def _logits(source: Path, document: list[int]) -> Tensor:
    return mw.logits(mw.load(source, dtype=torch.float32), mw.pack([document]))
