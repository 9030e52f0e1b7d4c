"""Check what `distribute` checks, pads and wraps, with stand-ins for the model and its mesh."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from meshwright import parallel
from meshwright.axes import Axes
from meshwright.errors import ConfigError, LayoutError, StateError
from meshwright.models import TowerBlock
from meshwright.ops.codings import Coding
from meshwright.parallel import fp8_gather, recompute
from meshwright.recipe import MemoryOptions
from meshwright.sharding import Unit

F32, CODES = torch.float32, Coding("fp8")


def fake(**fields: Any) -> Any:
    return SimpleNamespace(**fields)


@pytest.mark.parametrize(
    ("low", "stored", "padded"),
    [((), {"w": F32}, []), (("w",), {"w": F32}, [1, 2]), ((), {"v": F32, "w": CODES}, [1, 2])],
    ids=["values", "gathered in fp8", "a frozen base in codes"],
)
def test_shards_with_codes_are_padded_before_the_first_forward(
    low: tuple[str, ...], stored: dict[str, Any], padded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each check runs before a group is made, so that all ranks refuse."""
    done, asked = list[Any](), list[Any]()
    for name in ("check_context", "check_fp8", "hops", "_make_groups", "_mark_fp8", "_place"):
        monkeypatch.setattr(parallel, name, lambda *args, name=name: done.append(name))
    monkeypatch.setattr(parallel, "spans", lambda *_: [])
    monkeypatch.setattr(
        parallel, "gathered_in_fp8", lambda _, *trained, wide: asked.append((*trained, wide)) or frozenset(low)
    )
    monkeypatch.setattr(parallel, "Fp8Gather", lambda stages, *_: len(stages))
    monkeypatch.setattr(parallel.fsdp, "prefetch_in_order", lambda *args: asked.append(args[-1]))
    monkeypatch.setattr(parallel.fsdp, "pad_shards", done.append)
    module, memory = nn.ParameterDict({"w": torch.empty(1), "v": torch.empty(1)}), MemoryOptions(compiled=True)
    module.get_parameter("v").requires_grad = False
    spec = fake(
        recipe=fake(memory=memory), table=fake(params=["v", "w"]), module=module,
        stages=lambda *_: [fake(module=n) for n in (1, 2)],
    )  # fmt: skip
    stages, gather = parallel.distribute(spec, fake(axes=Axes(), rank=0), F32, stored)
    checks = ["check_context", "check_fp8", "hops", "_make_groups", "_mark_fp8"]
    assert done == [*checks, "_place", "_place", *padded]
    assert (len(stages), gather) == (2, 2)
    assert asked == [{"w"}, {"w"}, ({"w"}, True)]


@pytest.mark.parametrize(
    ("shape", "stored", "message"),
    [
        ((3, 8), F32, ""), ((2, 8), F32, r"w: rank 5 stores \(3, 8\), but the table says \(2, 8\)"),
        ((3, 4), F32, r"stores \(3, 8\), but the table says \(3, 4\)"), ((24,), F32, r"table says \(24,\)"),
        ((3, 8), CODES, ""),
    ],
)  # fmt: skip
def test_what_fsdp_stores_must_be_what_the_table_says(
    shape: tuple[int, ...], stored: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Module()
    model.w = nn.Parameter(torch.empty(3, 8))
    monkeypatch.setattr(parallel, "pieces", lambda *_: {"w": fake(shape=shape), "v": None})
    mesh = fake(axes=None, rank=5)
    if not message:
        parallel._check_placed(["w"], fake(), model, mesh, {"w": stored})
        return
    with pytest.raises(LayoutError, match=message):
        parallel._check_placed(["w"], fake(), model, mesh, {"w": stored})


def model_with(block: Any, *layers: nn.Module) -> Any:
    return fake(every_layer=layers, tower=fake(blocks={"0": block}))


@pytest.mark.parametrize(("mode", "kept"), [("none", None), ("selective", recompute._COSTLY), ("full", [])])
def test_blocks_of_a_tower_are_recomputed_as_layers_are(mode: str, kept: list[Any] | None) -> None:
    block: Any = TowerBlock.__new__(TowerBlock)
    nn.Module.__init__(block)
    block.run = print
    recompute.arm(model_with(block), MemoryOptions(recompute=mode))
    assert block.run is print if kept is None else block.run.args == (print, kept)


@pytest.mark.parametrize("options", [dict(recompute="full"), dict(recompute="selective"), dict(compiled=True)])
def test_a_layer_of_another_class_cannot_run_again(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute, "keep_traceable", lambda: None)
    with pytest.raises(ConfigError, match=r"work on subclasses of models\.decoder\.Layer, and Linear is not one"):
        recompute.arm(model_with(None, nn.Linear(1, 1)), MemoryOptions(**options))
    recompute.arm(model_with(None, nn.Linear(1, 1)), MemoryOptions())


@pytest.mark.parametrize(
    ("axes", "wrapped"),
    [(Axes(tp=2, ep=2), {"w": False, "e": False}), (Axes(tp=2), {"w": False}), (Axes(fsdp=2), {}),
     (Axes(replicate=2), {"w": True, "e": True}), (Axes(replicate=2, cp=2, ep=2), {"e": True})],
    ids=str,
)  # fmt: skip
def test_fsdp_wraps_whole_matrices_of_replicas(
    axes: Axes, wrapped: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weight that FSDP does not gather is quantised where it is stored: for replicas in the shard of a DTensor."""
    model = nn.Module()
    model.w, model.e = nn.Parameter(torch.empty(1)), nn.Parameter(torch.empty(1))
    units = [Unit("", (name,), expert=name == "e", again=True) for name in ("w", "e")]
    monkeypatch.setattr(fp8_gather, "quantised_once", lambda _spec, _axes, unit, trained: unit.params)
    made = fp8_gather._whole_matrices([fake(module=model, units=units)], fake(), fake(axes=axes), F32)
    assert {each.shard.name: each.shard.wrapped for each in made} == wrapped


def test_a_gathered_weight_has_no_shard_to_quantise() -> None:
    model = nn.Module()
    model.w = nn.Parameter(torch.empty(1))
    assert fp8_gather._LocalShard("w", model, "w", 0, wrapped=False).rows is model.w
    with pytest.raises(StateError, match="w is all-gathered right now"):
        _ = fp8_gather._LocalShard("w", model, "w", 0).rows


@pytest.mark.parametrize(("compute", "dtype"), [(torch.bfloat16, F32), (F32, F32), (torch.float64, torch.float64)])
def test_scales_of_a_group_are_parts_of_one_tensor(compute: torch.dtype, dtype: torch.dtype) -> None:
    shards = [fake(parameter=torch.empty(rows, cols)) for rows, cols in ((256, 384), (128, 128))]
    group = fp8_gather._weight_group(("fsdp",), shards, fake(device=torch.device("cpu")), compute)
    assert (group.scales.shape, group.scales.dtype) == ((7,), dtype)
    group.scales.copy_(torch.arange(7.0))
    assert [matrix.scales.tolist() for matrix in group.matrices] == [[[0, 1, 2], [3, 4, 5]], [[6]]]
