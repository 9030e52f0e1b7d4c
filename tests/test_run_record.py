"""The record of a run in OUT: how parameters are sharded, and what each rank stores of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from meshwright.axes import Axes
from meshwright.sharding import Param, Work
from meshwright.train import run_record
from meshwright.train.run_record import _layout, _row, sizes_of

of = SimpleNamespace


def param(name: str, rows: int = 6) -> Param:
    return Param({"ff": rows}, {"model": 5}, (), name=name)


def line_of(name: str, cut: str = "-", shards: str = "-") -> Any:
    return of(name=name, cut=cut, shards=shards, most_bytes=40, least_bytes=30)


GROUP = [param(f"layers.{number}.up") for number in range(3)]


@pytest.mark.parametrize(
    ("cut", "shards", "trained", "numbers", "expected"),
    [
        ("-", "-", {"layers.0.up"}, set(), ("whole on every rank", True, "bfloat16")),
        ("ff by tp=2", "-", {"layers.2.up"}, set(), ("ff by tp=2", True, "bfloat16")),
        ("-", "fsdp=2", set(), {"layers.0.up"}, ("stored over fsdp=2", False, "uint8")),
        ("ff by tp=2", "fsdp=2 cp=2", set(), set(), ("ff by tp=2, stored over fsdp=2 cp=2", False, "bfloat16")),
    ],
)
def test_a_row_describes_all_layers(
    cut: str, shards: str, trained: set[str], numbers: set[str], expected: tuple[str, bool, str]
) -> None:
    """Bytes are those of the rank with the largest part, of all three layers."""
    model: Any = of(numbers=numbers, kept={"layers.0.up": torch.bfloat16})
    row = _row(GROUP, line_of("layers.{i}.up", cut, shards), trained, model)
    assert (row["cut"], row["trained"], row["dtype"]) == expected
    assert {key: row[key] for key in ("name", "count", "shape", "bytes_per_rank")} == {
        "name": "layers.{i}.up", "count": 3, "shape": [6, 5], "bytes_per_rank": 120,
    }  # fmt: skip


def test_a_layout_counts_the_micro_batches_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer where gradients begin is known from the model. What is frozen sends no gradients."""
    made: list[Any] = []
    params = [*GROUP, param("head", 7)]
    table = of(params={each.name: each for each in params})
    monkeypatch.setattr(run_record, "Figures", lambda *given: made.append(given) or of(num_parameters=999))
    monkeypatch.setattr(run_record, "identical_params", lambda _: [GROUP, params[3:]])
    monkeypatch.setattr(run_record, "parameter_lines", lambda _: [line_of("layers.{i}.up"), line_of("head")])
    kept, axes = dict.fromkeys(table.params, torch.float32), Axes(fsdp=2, tp=3)
    model: Any = of(
        mesh=of(axes=axes), trained=["head", "layers.1.up"], blueprint=of(table=table), begun=("layers.1", "head"),
        config={"model_type": "qwen3"}, table=params, numbers={}, kept=kept,
    )  # fmt: skip
    layout = _layout(cast(Any, of(model="m", train=of(length=24))), model)
    [(name, blueprint, of_axes, work)] = made
    assert (name, blueprint, of_axes) == ("m", model.blueprint, axes)
    assert work == Work(24, 1, 2, 4, frozen=frozenset({"layers.0.up", "layers.2.up"}), begins=("layers.1", "head"))
    assert (layout["model"], layout["parameters"], layout["trained"], layout["world"]) == ("qwen3", 999, 30 + 35, 6)
    assert layout["mesh"] == sizes_of(axes) == dict(pp=1, replicate=1, fsdp=2, cp=1, tp=3, ep=1)
    assert [(row["name"], row["trained"], row["count"]) for row in layout["table"]] == [
        ("layers.{i}.up", True, 3), ("head", True, 1),
    ]  # fmt: skip
