"""Gradients that are sent as narrow as products make them: the same sums, of half of the bytes."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import meshwright as mw
from meshwright.parallel import fsdp
from meshwright.verify import Recorder
from tests import parts, tiny, trials, worlds
from tests.test_savings import source, tried

__all__ = ["source"]  # a fixture

NARROW = [
    ("qwen3_5_moe", dict(fsdp=2, ep=2), dict(recompute="full")),
    ("qwen3_5_moe", dict(fsdp=2, tp=2, ep=2), dict(recompute="full")),
    ("qwen3_moe", dict(replicate=2, fsdp=2, ep=2), dict(recompute="selective")),
    ("qwen3", dict(pp=2, fsdp=2), dict()),
    ("qwen3_tied", dict(fsdp=3), dict(offload=True)),
    ("qwen3_5", dict(replicate=2), dict(gather_once=True)),
]


@pytest.mark.parametrize(("name", "mesh", "more"), parts.every(6, NARROW), ids=str)
def test_gradients_are_sent_as_narrow_as_products(
    source: Callable[..., Path], name: str, mesh: dict[str, int], more: dict[str, Any]
) -> None:
    trial = tried(source(name), mesh, narrow_grads=True, **more)
    assert trials.findings(replace(trial, steps=trial.steps if parts.ALL else 1)) == []


def in_bfloat16(directory: Path, mesh: dict[str, int], narrow: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Gradients of several micro-batches, and what was sent to sum them."""
    memory = mw.MemoryOptions(narrow_grads=narrow)
    model = mw.load(directory, mw.Mesh(**mesh, device="cpu"), dtype=torch.bfloat16, memory=memory)
    engine = mw.Engine(model, lr=1e-2)
    with Recorder() as recorder:
        engine.backward(tiny.batches(model.mesh.data_rank))
    sent = Counter[str]()
    for seen in recorder.collectives:
        sent[seen.op] += seen.num_bytes * (len(seen.ranks) > 1)
    return mw.gather(model, "grad"), sent


def both(source: Path, mesh: dict[str, int]) -> list[Any]:
    """Return the results without and with narrow gradients, of rank 0."""
    cases = {narrow: functools.partial(in_bfloat16, source, mesh, narrow) for narrow in (False, True)}
    return [ranks[0] for ranks in worlds.in_turn(trials.world_of(mesh), cases).values()]


@pytest.mark.parametrize(("name", "mesh"), [("qwen3_moe", dict(fsdp=2, ep=2)), ("qwen3_5", dict(replicate=2, fsdp=2))])
def test_what_is_sent_narrow_is_summed_wide(source: Callable[..., Path], name: str, mesh: dict[str, int]) -> None:
    """Two terms have one sum, so the result is bitwise FSDP's float32 sum, for half of the bytes."""
    (wide, by_ring), (ours, by_all) = both(source(name), mesh)
    assert all(torch.equal(wide[key], ours[key]) for key in wide)
    assert by_ring["reduce_scatter"] == 2 * (by_all["all_to_all"] - by_ring["all_to_all"]) > 0
    assert not by_all["reduce_scatter"]


def test_what_is_added_up_is_sent_wide(source: Callable[..., Path]) -> None:
    """A pipeline that holds adds up several micro-batches in float32."""
    (wide, by_ring), (ours, same) = both(source("qwen3"), dict(pp=2, fsdp=2))
    assert all(torch.equal(wide[key], ours[key]) for key in wide)
    assert by_ring == same
    with pytest.raises(mw.ConfigError, match="choose one of them"):
        mw.MemoryOptions(narrow_grads=True, sum_once=True)


def test_narrow_sums_are_caught(source: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof above sees it where what is sent is also added up as narrow."""
    real = fsdp.SentNarrow.__call__

    def narrow(self: Any, output_tensor: Tensor, **args: Any) -> None:
        real(self, output_tensor, **args)
        output_tensor.copy_(output_tensor.to(torch.bfloat16))

    whole = worlds.run(2, in_bfloat16, source("qwen3"), dict(fsdp=2), False)[0][0]
    with monkeypatch.context() as patch:
        patch.setattr(fsdp.SentNarrow, "__call__", narrow)
        planted = worlds.run(2, in_bfloat16, source("qwen3"), dict(fsdp=2), True)[0][0]
    assert not all(torch.equal(whole[key], planted[key]) for key in whole)
