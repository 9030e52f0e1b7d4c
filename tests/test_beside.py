"""Rows of experts travel while the shared expert is computed, there and in backward."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import meshwright as mw
from tests import parts, tiny, trials, worlds

MESH, SHARED = dict(fsdp=2, ep=2), "layers.0.mlp.shared.*"
SENT, AWAITED, PRODUCT = "all_to_all_single", "wait_tensor", "mm"


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name.rpartition("::")[2])
        return func(*args, **(kwargs or {}))


def products_during(names: list[str]) -> list[int]:
    """Products between the beginning of each exchange of rows and its end, where there are some."""
    result, begun, products = list[int](), 0, 0
    for name in names:
        if name == SENT:
            begun, products = begun + 1, 0
        elif name == AWAITED and begun:
            result.append(products)
            begun -= 1
        products += name == PRODUCT
    return [each for each in result if each]


def of_a_step(directory: Path, recompute: str, more: dict[str, Any]) -> tuple[list[int], list[int]]:
    memory = mw.MemoryOptions(recompute=recompute, **more)
    model = mw.load(directory, trials.mesh_of(MESH), dtype=torch.float32, memory=memory)
    engine = mw.Engine(model, lr=1e-3)
    stream = mw.pack([[5, 6, 7, 8, 9]])
    with Seen() as seen:
        mw.logprobs(model, stream)
    with Seen() as both:
        engine.step([stream])
    return products_during(seen.names), products_during(both.names)


@pytest.mark.parametrize("more", [{}, {"token_once": True}], ids=str)
def test_the_shared_expert_is_computed_while_rows_travel(tmp_path: Path, more: dict[str, Any]) -> None:
    """Three layers compute three products in forward and six in backward during the exchange of rows and weights."""
    at = tiny.directory(tmp_path / "m", "qwen3_5_moe")
    cases = {recompute: functools.partial(of_a_step, at, recompute, more) for recompute in ("none", "full")}
    (none, _), (full, _) = worlds.in_turn(2, cases).values()
    assert none == ([3, 3] * 3, [3, 3] * 3 + [6, 6] * 3)
    assert full == ([3, 3] * 3, [3, 3] * 3 + [3, 3, 6, 6] * 3)


def left_on_their_way(directory: Path, recompute: str, train: list[str]) -> int:
    model = mw.load(
        directory, trials.mesh_of(MESH), dtype=torch.float32, train=train,
        memory=mw.MemoryOptions(recompute=recompute),
    )  # fmt: skip
    engine = mw.Engine(model, lr=1e-3)
    engine.step([mw.pack([[5, 6, 7, 8, 9]])])
    return int(torch._C._distributed_c10d._get_work_registry_size())


@pytest.mark.parametrize("recompute", parts.every(2, ["none", "selective", "full"]))
def test_nothing_stays_on_its_way(tmp_path: Path, recompute: str) -> None:
    """A layer that is run again for its shared expert alone wants no rows. What was begun would be kept for ever."""
    at = tiny.directory(tmp_path / "m", "qwen3_5_moe")
    cases = {train: functools.partial(left_on_their_way, at, recompute, [train]) for train in (SHARED, "**")}
    assert worlds.in_turn(2, cases) == {SHARED: [0, 0], "**": [0, 0]}
