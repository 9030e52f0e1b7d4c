"""Layers that run again for backward keep nothing of it, and notice what was changed."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import meshwright as mw
from meshwright.parallel import replay
from tests import tiny, worlds


def growth(directory: Path, recompute: str) -> list[int]:
    """Return how many recomputed tensors exist after each step. A changed input is refused."""
    model = mw.load(directory, mw.Mesh(device="cpu"), dtype=torch.float32, memory=mw.MemoryOptions(recompute=recompute))
    engine, seen, counts = mw.Engine(model, lr=1e-3), list[weakref.ref[Tensor]](), list[int]()
    real = replay._Replay._keep

    def keep(self: Any, numbers: Any, tensor: Tensor) -> Tensor:
        if tensor.grad_fn is not None:  # no parameter
            seen.append(weakref.ref(tensor))
        return real(self, numbers, tensor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay._Replay, "_keep", keep)
        for _ in range(3):
            engine.step(tiny.batches(0))
            gc.collect()
            counts.append(sum(each() is not None for each in seen))
    x = torch.ones(4, requires_grad=True) * 2
    with replay.recompute_saved_tensors(torch.sin, (x,), nullcontext):
        y = torch.sin(x)
    with torch.no_grad():
        x.mul_(2)
    with pytest.raises(mw.StateError, match="written into"):
        y.sum().backward()
    return counts


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_nothing_stays_of_what_ran_again(tmp_path: Path, recompute: str) -> None:
    """A step of backward that saves its own output would hold itself."""
    for name in ("qwen3_moe", "qwen3_5"):
        (counts,) = worlds.run(1, growth, tiny.directory(tmp_path / name, name), recompute)
        assert counts[0] >= counts[-1], counts
