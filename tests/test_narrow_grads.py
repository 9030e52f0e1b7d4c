"""Gradients that are sent as narrow as products make them: the same sums, of half of the bytes."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
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


@parts.IN_MATRIX
@pytest.mark.parametrize(("name", "mesh", "more"), NARROW, ids=str)
def test_gradients_are_sent_as_narrow_as_products(
    source: Callable[..., Path], name: str, mesh: dict[str, int], more: dict[str, Any]
) -> None:
    """tests/test_token_once.py has one of these."""
    assert trials.findings(tried(source(name), mesh, narrow_grads=True, **more)) == []


def in_bfloat16(directory: Path, mesh: dict[str, int], narrow: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Gradients of several micro-batches, and what was sent to sum them."""
    memory = mw.MemoryOptions(narrow_grads=narrow)
    model = mw.load(directory, trials.mesh_of(mesh), dtype=torch.bfloat16, memory=memory)
    engine = mw.Engine(model, lr=1e-2)
    with Recorder() as recorder:
        engine.backward(tiny.batches(model.mesh.data_rank))
    sent = Counter[str]()
    for seen in recorder.collectives:
        sent[seen.op] += seen.num_bytes * (len(seen.ranks) > 1)
    return mw.gather(model, "grad"), sent


def of_narrow_sums(directory: Path, mesh: dict[str, int]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Add up as narrow what is sent narrow."""
    real = fsdp.SentNarrow.__call__

    def narrow(self: Any, output_tensor: Tensor, **args: Any) -> None:
        real(self, output_tensor, **args)
        output_tensor.copy_(output_tensor.to(torch.bfloat16))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsdp.SentNarrow, "__call__", narrow)
        return in_bfloat16(directory, mesh, True)


def both(source: Path, mesh: dict[str, int], *others: Callable[..., Any]) -> list[Any]:
    """Return the results without and with narrow gradients, of rank 0, and those of other acts."""
    acts: list[Callable[..., Any]] = [functools.partial(in_bfloat16, narrow=narrow) for narrow in (False, True)]
    acts += others
    cases = {number: functools.partial(act, source, mesh) for number, act in enumerate(acts)}
    return [ranks[0] for ranks in worlds.in_turn(trials.world_of(mesh), cases).values()]


@pytest.mark.parametrize(("name", "mesh"), [("qwen3_moe", dict(fsdp=2, ep=2)), ("qwen3", dict(replicate=2, fsdp=2))])
def test_what_is_sent_narrow_is_summed_wide(source: Callable[..., Path], name: str, mesh: dict[str, int]) -> None:
    """Two terms have one sum, so the result is bitwise FSDP's float32 sum, for half of the bytes. Sums that
    are narrow too are others."""
    (wide, by_ring), (ours, by_all), *planted = both(source(name), mesh, *[of_narrow_sums] * ("ep" in mesh))
    assert all(torch.equal(wide[key], ours[key]) for key in wide)
    assert by_ring["reduce_scatter"] == 2 * (by_all["all_to_all"] - by_ring["all_to_all"]) > 0
    assert not by_all["reduce_scatter"]
    assert not any(all(torch.equal(wide[key], narrow[key]) for key in wide) for narrow, _ in planted)


def test_what_is_added_up_is_sent_wide(source: Callable[..., Path]) -> None:
    """A pipeline that holds adds up several micro-batches in float32."""
    (wide, by_ring), (ours, same) = both(source("qwen3"), dict(pp=2, fsdp=2))
    assert all(torch.equal(wide[key], ours[key]) for key in wide)
    assert by_ring == same
    with pytest.raises(mw.ConfigError, match="choose one of them"):
        mw.MemoryOptions(narrow_grads=True, sum_once=True)
