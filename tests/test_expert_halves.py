"""Tokens that go to their experts in two halves: the same numbers, of which one half travels beside the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import meshwright as mw
from meshwright import parallel
from meshwright.layout import portions
from tests import parts, trials, worlds
from tests.test_beside import AWAITED, SENT
from tests.test_savings import source, tried

__all__ = ["source"]  # a fixture

Given = Callable[..., Path]
CASES = [
    ("qwen3_moe", dict(fsdp=2, ep=2), dict(recompute="full")),
    ("qwen3_moe", dict(fsdp=4, ep=4), dict(token_once=2, recompute="full")),
    ("qwen3_5_moe", dict(tp=2, ep=2), dict(recompute="selective", token_once=True)),
    ("qwen3_5_moe", dict(fsdp=2, tp=2, ep=4), dict()),
    ("qwen3_moe", dict(pp=2, fsdp=2, ep=2), dict(sum_once=True, recompute="full")),
    ("qwen3_moe", dict(fsdp=2, cp=2, ep=2), dict(recompute="selective", narrow_grads=True)),
    ("qwen3_5_moe", dict(fsdp=2, tp=2, ep=4), dict(token_once=2)),
    ("qwen3_5_moe", dict(replicate=2, tp=2, ep=2), dict(offload=True, token_once=True)),
    ("qwen3_moe", dict(fsdp=2, tp=4, ep=8), dict(token_once=2, recompute="selective")),
    ("qwen3_moe", dict(fsdp=2), dict()),  # nothing to do
]


@pytest.mark.parametrize(("name", "mesh", "more"), parts.every(3, CASES), ids=str)
def test_the_numbers_stay_the_same(source: Given, name: str, mesh: dict[str, int], more: dict[str, Any]) -> None:
    assert trials.findings(tried(source(name), mesh, **{"expert_halves": True, **more})) == []


def test_gradients_of_weights_that_come_late(source: Given) -> None:
    """Those of experts come twice, once for each half."""
    trial = tried(source("qwen3_5_moe"), dict(pp=2, fsdp=2, ep=2), expert_halves=True)
    assert trials.findings(replace(trial, pipeline=mw.Pipeline("zero-bubble"))) == []


@pytest.mark.parametrize("train", [["layers.1.*"], ["layers.0.*", "layers.2.mlp.router*"], ["head.*"]], ids=str)
def test_what_is_frozen_brings_no_gradients(source: Given, train: list[str]) -> None:
    trial = replace(tried(source("qwen3_moe"), dict(fsdp=2, ep=2), expert_halves=True, recompute="full"), train=train)
    assert trials.findings(trial) == []


def with_few_tokens(directory: Path, halves: bool, once: bool | int) -> tuple[float, dict[str, torch.Tensor]]:
    """A rank has one token, which leaves nothing for its second half."""
    savings = mw.Savings(expert_halves=halves, token_once=once)
    model = mw.load(directory, mw.Mesh(tp=2, ep=2, device="cpu"), dtype=torch.float64, savings=savings)
    engine = mw.Engine(model, lr=1e-3)
    loss = engine.backward([mw.pack([[5, 6]])])
    return loss, mw.gather(model, "grad")


@pytest.mark.parametrize("once", [False, True])
def test_a_half_may_be_empty(source: Given, once: bool) -> None:
    at = source("qwen3_moe")
    (loss, grads), (same, others) = (worlds.run(2, with_few_tokens, at, on, once)[0] for on in (False, True))
    assert abs(loss - same) < 1e-12
    assert all(torch.allclose(grads[key], others[key], rtol=1e-9, atol=1e-12) for key in grads)


def test_portions() -> None:
    assert portions(7, halves=False) == [("", 7)]
    assert [num for _, num in portions(7, halves=True)] == [4, 3]
    assert [num for _, num in portions(1, halves=True)] == [1, 0]


# What travels beside what.


class Beside(TorchDispatchMode):
    """How many products are made between the beginning of each exchange and its end, in the order of the ends."""

    def __init__(self) -> None:
        super().__init__()
        self.on_their_way: dict[int, int] = {}
        self.products = 0
        self.found: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, name = func(*args, **(kwargs or {})), func._schema.name.rpartition("::")[2]
        if name == SENT:
            self.on_their_way[out.untyped_storage()._cdata] = self.products
        elif name == AWAITED and (key := args[0].untyped_storage()._cdata) in self.on_their_way:
            self.found.append(self.products - self.on_their_way.pop(key))
        self.products += name in ("mm", "_grouped_mm")
        return out


def beside(directory: Path, recompute: str, once: bool | int, mesh: dict[str, int]) -> tuple[list[int], list[int], int]:
    """In a forward, and in a step; and how many exchanges nobody has waited for then."""
    savings = mw.Savings(recompute=recompute, expert_halves=True, token_once=once)
    model = mw.load(directory, mw.Mesh(**mesh, device="cpu"), dtype=torch.float32, savings=savings)
    engine = mw.Engine(model, lr=1e-3)
    stream = mw.pack([[5, 6, 7, 8, 9]])
    with Beside() as forward:
        mw.logprobs(model, stream)
    with Beside() as both:
        engine.step([stream])
    left = int(torch._C._distributed_c10d._get_work_registry_size())
    return [num for num in forward.found if num], [num for num in both.found if num], left


ONE_LAYER = dict(num_hidden_layers=1, mlp_only_layers=[])


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("once", [False, True])
def test_one_half_travels_beside_the_other(source: Given, recompute: str, once: bool) -> None:
    """The second half there, weights and rows, beside both products of the first; the first half back beside those of
    the second. In backward beside twice as many, and, with whole layers run again, first beside all before them too. A
    layer that runs again sends no way back."""
    at = source("qwen3_moe", **ONE_LAYER)
    forward, step, left = worlds.run(2, beside, at, recompute, once, dict(fsdp=2, ep=2))[0]
    assert (forward, left) == ([2, 2, 2], 0)
    if recompute == "full":
        first = step.pop(5)
        assert first > 4
        assert step == [2, 2, 2, 2, 2, 4, 4]
    else:
        assert step == [2, 2, 2, 4, 4, 4]


def test_over_nodes_the_longest_way_is_beside_the_other_half(source: Given) -> None:
    """Rows of the second half there between nodes, and their weights within them; those of the first half back between
    nodes."""
    at = source("qwen3_moe", **ONE_LAYER)
    forward, step, left = worlds.run(4, beside, at, "full", 2, dict(fsdp=4, ep=4))[0]
    assert (forward, left) == ([2, 2, 2], 0)
    assert step.pop(5) > 4
    assert step == [2, 2, 2, 2, 2, 4, 4]


def _halves_change_places(patch: pytest.MonkeyPatch) -> None:
    real = parallel.expert._in_halves
    patch.setattr(parallel.expert, "_in_halves", lambda *args: real(*args)[::-1])


def _the_first_half_stays_back(patch: pytest.MonkeyPatch) -> None:
    """As without halves: the numbers stay right, so only the bill says it."""
    patch.setattr(parallel.expert, "_in_halves", parallel.expert._at_once)


def _again_is_sent_too(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(parallel.expert_group, "runs_again", lambda: False)


PLANTED = {
    "halves change places": _halves_change_places,
    "all at once": _the_first_half_stays_back,
    "a layer that runs again sends its rows back": _again_is_sent_too,
}


@pytest.mark.parametrize("plant", PLANTED.values(), ids=PLANTED)
def test_planted_bugs_are_found(source: Given, plant: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    trial = tried(source("qwen3_moe", **ONE_LAYER), dict(fsdp=2, ep=2), expert_halves=True, recompute="full")
    trial = replace(trial, steps=1)
    trials.reference(trial)
    plant(monkeypatch)
    assert trials.findings(trial)
