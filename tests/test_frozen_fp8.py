"""Frozen matrices of FP8 files stay in 8 bits, and change no result."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

import meshwright as mw
from meshwright import ops
from meshwright.blueprint import Blueprint
from meshwright.cli import main
from meshwright.weights import chosen, frozen_scales
from tests import parts, quantised, tiny, trials, worlds
from tests.test_frozen import BF16, EXPERTS, F32, F64, FSDP, ONE, REPLICAS, SOME, TP, Case, outputs_of, same

FAMILIES = ("qwen2", "qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe")
TRAINED = {**SOME, "qwen3_5_moe": ["layers.*.mixer.qkv*", "layers.1.mlp.experts.down", "layers.2.*", "head.*"]}
CASES = parts.every(
    6,
    [
        *(Case(name, ONE, dtype) for name, dtype in zip(FAMILIES, (F32, BF16, F64, F32, BF16), strict=True)),
        *(Case(name, mesh) for name in ("qwen2", "qwen3_5") for mesh in (FSDP, TP)),
        *(Case("qwen3_tied", mesh, F32) for mesh in (FSDP, TP, REPLICAS)),
        *(Case("qwen3_moe", EXPERTS, dtype) for dtype in (F32, F64, BF16)),
        *(Case("qwen3_5_moe", mesh) for mesh in (EXPERTS, dict(fsdp=3), dict(pp=2), dict(fsdp=2, cp=2))),
        *(Case("qwen3_5", mesh, memory=mw.MemoryOptions(recompute="full", offload=True)) for mesh in (ONE, FSDP)),
        Case("qwen3_moe", EXPERTS, memory=mw.MemoryOptions(recompute="selective", reshard=False)),
        Case("qwen3_moe", FSDP, F32, memory=mw.MemoryOptions(compiled=True)),
    ],
    first=5,
)


def both(case: Case, source: Path, out: Path) -> tuple[dict[str, Any], dict[str, Any], set[str]]:
    """Return the results with frozen matrices as codes, and as float32 values."""
    load = functools.partial(mw.load, source, mw.Mesh(**case.mesh), dtype=case.dtype, memory=case.memory)
    model = load(train=TRAINED[case.name])
    stored = model.stored()
    codes = {name for name, tensor in stored.items() if tensor.dtype == torch.uint8}
    assert codes == model.numbers & stored.keys()
    narrow = outputs_of(model, out / "narrow")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Blueprint, "codings", lambda *_: {})
        model = load(train=TRAINED[case.name])
        assert not any(t.dtype == torch.uint8 for t in model.stored().values())
        return narrow, outputs_of(model, out / "wide"), codes


def form_of(name: str) -> quantised.Format:
    forms = [*quantised.FORMATS]
    return quantised.FORMATS[forms[FAMILIES.index(name) if name in FAMILIES else -1]]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    at = tmp_path_factory.mktemp("sources")
    return functools.cache(
        lambda name: quantised.directory(tiny.directory(at / name, name), at / f"{name} in 8 bits", form_of(name))
    )


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, source: Callable[[str], Path]) -> Callable[[str], Any]:
    """Run all cases of a mesh in one world."""
    at = tmp_path_factory.mktemp("frozen")
    by_name = {str(case): case for case in CASES}

    def run(group: Any) -> Any:
        acts = {c: functools.partial(both, by_name[c], source(by_name[c].name), at / f"out-{c}") for c in group}
        ranks = worlds.in_turn(trials.world_of(dict(by_name[group[0]].mesh)), acts, seconds=120)
        return {case: (ranks[case], at / f"out-{case}") for case in group}

    return worlds.shared({name: case.mesh for name, case in by_name.items()}, run)


@pytest.mark.parametrize("case", [str(case) for case in CASES])
def test_results_equal_those_of_float32(ran: Callable[[str], Any], case: str) -> None:
    ranks, out = ran(case)
    for narrow, wide, _ in ranks:
        for what in wide:
            assert same(narrow[what], wide[what]), f"{what} differs"
    assert any(codes for _, _, codes in ranks)
    for path in (out / "wide").iterdir():
        assert (out / "narrow" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("recompute", parts.every(2, ["none", "full"]))
def test_every_oracle(source: Callable[[str], Path], recompute: str) -> None:
    """Gradients in float64 and the bytes of collectives are compared. Planted bugs have tp too."""
    trial = trials.changed(
        trials.trial(source("qwen3_moe"), dict(fsdp=2, tp=2, ep=2) if parts.ALL else dict(fsdp=2, ep=2)),
        train=["layers.1.*", "head.*"], memory=mw.MemoryOptions(recompute=recompute), steps=3 if parts.ALL else 1,
    )  # fmt: skip
    assert not trials.findings(trial)


def fp8_matmuls(plain: Path, at: Path) -> None:
    """Train with FP8 matmuls, of which some have frozen FP8 matrices."""
    mw.export(mw.load(plain, mw.Mesh(device="cpu")), at, format="fp8")
    load = functools.partial(mw.load, at, mw.Mesh(device="cpu"), train=["layers.1.mixer.*", "*norm*"], fp8="block")
    batches, results = tiny.batches(0), []
    for quantised_ in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not quantised_:
                patch.setattr(Blueprint, "codings", lambda *_: {})
            model = load()
            assert bool(model.numbers) == quantised_
            engine = mw.Engine(model, lr=1e-2)
            engine.backward(batches)
            results.append({"grad": mw.gather(model, "grad"), "logits": mw.logits(model, batches[0])})
    assert same(*results)


@pytest.mark.parametrize("name", [*(["qwen3"] if parts.ALL else []), "qwen3_5_moe"])
def test_fp8_matmuls_of_frozen_matrices(tmp_path: Path, name: str) -> None:
    plain = tiny.directory(tmp_path / "m", name, dtype=BF16, **tiny.in_blocks(name))
    worlds.run(1, fp8_matmuls, plain, tmp_path / "out")


def read_by_node(source: Path) -> None:
    """Load with one reader per node, which sends codes."""
    mesh = mw.Mesh(fsdp=2, device="cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        model = mw.load(source, mw.Mesh(fsdp=2, device="cpu"), train="layers.1.*", read="node")
    assert mw.check_weights(model).ok
    sent = {charge.what: charge.num_bytes for charge in model.load_bill}
    assert {name for name in sent if sent[name] == model.pieces[name].numel} >= model.numbers & sent.keys() != set()
    assert mesh.axes == model.mesh.axes


def test_read_by_one_rank_for_all(source: Callable[[str], Path]) -> None:
    worlds.run(2, read_by_node, source("qwen3_moe"))


def saved_for_backward(source: Path) -> None:
    """Check that backward saves codes, and never their values."""
    model = mw.load(source, mw.Mesh(device="cpu"), dtype=F32, train=["*norm*"])
    engine, saved = mw.Engine(model, lr=1e-2), list[tuple[int, torch.dtype]]()

    def save(tensor: Tensor) -> Tensor:
        saved.append((tensor.numel(), tensor.dtype))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        engine.backward(tiny.batches(0)[:1])
    sizes = {model.pieces[name].numel for name in model.numbers}
    sizes -= {model.pieces[name].numel for name in model.pieces.keys() - model.numbers}
    kinds = [dtype for num, dtype in saved if num in sizes]
    assert set(kinds) == {torch.uint8}


def test_backward_decodes_again(source: Callable[[str], Path]) -> None:
    worlds.in_turn(1, {name: functools.partial(saved_for_backward, source(name)) for name in ("qwen3", "qwen3_moe")})


def saves(source: Path, out: Path) -> dict[str, Any]:
    model = mw.load(source, mw.Mesh(tp=2, device="cpu"), dtype=F32, train="layers.1.*")
    engine = mw.Engine(model, lr=1e-2)
    engine.step(tiny.batches(model.mesh.data_rank)[:1])
    mw.save(engine, out / "steps")
    mw.save(engine, out / "wide", dtype=F32)
    mw.save(engine, out / "background", wait=False)
    engine.wait()
    return mw.gather(model)


def resumes(source: Path, at: Path, out: Path) -> dict[str, Any]:
    model = mw.load(source, mw.Mesh(fsdp=3, device="cpu"), dtype=F32, train="layers.1.*")
    engine, weights = mw.Engine(model, lr=1e-2), []
    for name in ("steps", "wide", "background"):
        mw.resume(engine, at / name)
        weights.append(mw.gather(model))
    assert all(same(each, weights[0]) for each in weights)
    mw.resume(engine, source)
    assert mw.check_weights(model).ok
    with pytest.raises(mw.CheckpointError, match=r"cannot be resumed: .*frozen and kept in 8 bits"):
        mw.resume(engine, out)
    assert mw.check_weights(model).ok, "nothing was replaced"
    state = engine.state_dict()
    frozen = {key for name in model.numbers for key in keys_of(model, name)}
    assert frozen
    assert frozen.isdisjoint(state["weights"])
    engine.load_state_dict(state)
    return weights[0]


def keys_of(model: mw.Model, name: str) -> list[str]:
    return [block.key for block in chosen(model.table[name], model.keymap.choice).blocks]


def another(source: Path, out: Path) -> None:
    """Export the model with other values in a frozen matrix."""
    model = mw.load(source, mw.Mesh(device="cpu"))
    model.stored()["layers.0.mixer.q.weight"].mul_(1.5)
    mw.export(model, out)


def test_checkpoints_resume_on_another_mesh(source: Callable[[str], Path], tmp_path: Path) -> None:
    worlds.run(1, another, source("qwen3"), tmp_path / "other")
    at = source("qwen3")
    saved = worlds.run(2, saves, at, tmp_path / "out")[0]
    resumed = worlds.run(3, resumes, at, tmp_path / "out", tmp_path / "other")[0]
    assert same(saved, resumed)


def decoded(source: Path, out: Path) -> dict[str, float]:
    """Return how often each stored code is decoded."""
    model = mw.load(source, mw.Mesh(device="cpu"), train="head.*")
    stored, made, real = sum(model.pieces[name].numel for name in model.numbers), list[int](), ops.Grid.values

    def values(grid: ops.Grid, codes: Tensor, dtype: torch.dtype) -> Tensor:
        made.append(codes.numel())
        return real(grid, codes, dtype)

    times = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops.Grid, "values", values)
        for name, act in {
            "gather": lambda: mw.gather(model),
            "W1": lambda: mw.check_weights(model),
            "float16": lambda: mw.export(model, out, dtype=torch.float16),
        }.items():
            made.clear()
            act()
            times[name] = sum(made) / stored
    return times


def test_each_code_is_decoded_once(source: Callable[[str], Path], tmp_path: Path) -> None:
    """A parameter with many keys is decoded key by key."""
    (times,) = worlds.run(1, decoded, source("qwen3_moe"), tmp_path / "out")
    assert times["gather"] == times["W1"] == 1
    assert times["float16"] <= 3


def cannot_read(source: Path) -> str:
    """Load where the reader of a node cannot read scales."""
    mesh = mw.Mesh(fsdp=2, device="cpu", timeout_s=20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        if mesh.rank == 0:
            patch.setattr("meshwright.engine.model.grid_of", broken)
        with pytest.raises(mw.LoadError) as error:
            mw.load(source, mesh, train=[], read="node")
    return str(error.value)


def broken(*_: object) -> None:
    raise mw.LoadError("the disk is broken")


def test_a_failed_read_of_scales_raises_on_all_ranks(source: Callable[[str], Path]) -> None:
    assert all("the disk is broken" in error for error in worlds.run(2, cannot_read, source("qwen3")))


def written_into(source: Path) -> None:
    model = mw.load(source, mw.Mesh(fsdp=2, device="cpu"), train="layers.1.*", dtype=F32)
    engine, batches = mw.Engine(model, lr=1e-2), tiny.batches(model.mesh.data_rank)[:1]
    engine.step(batches)
    mw.logprobs(model, batches[0])
    model.stored()["layers.0.mixer.q.weight"].mul_(2)
    with pytest.raises(mw.StateError, match=r"layers\.0\.mixer\.q\.weight is frozen and stays in 8 bits"):
        engine.step(batches)


def test_writes_into_codes_are_refused(source: Callable[[str], Path]) -> None:
    worlds.run(2, written_into, source("qwen3"))


def by_torch(source: Path, at: Path) -> dict[str, Tensor]:
    model = mw.load(source, mw.Mesh(device="cpu"), train="layers.1.*", dtype=F32)
    engine = mw.Engine(model, lr=1e-2)
    engine.step(tiny.batches(0)[:1])
    dcp.save(engine.state_dict(), checkpoint_id=at)
    return mw.gather(model)


def resumed(source: Path, at: Path) -> dict[str, Tensor]:
    model = mw.load(source, mw.Mesh(device="cpu"), train="layers.1.*", dtype=F32)
    mw.resume(mw.Engine(model, lr=1e-2), at)
    return mw.gather(model)


def test_torch_checkpoints_convert_back(source: Callable[[str], Path], tmp_path: Path) -> None:
    at = source("qwen3_moe")
    (saved,) = worlds.run(1, by_torch, at, tmp_path / "dcp")
    command = ["convert", str(tmp_path / "dcp"), str(tmp_path / "again"), "--to", "meshwright", "--like", str(at)]
    assert main(command) == 0
    assert same(worlds.run(1, resumed, at, tmp_path / "again")[0], saved)


@functools.cache
def float32_logits(source: Path) -> Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Blueprint, "codings", lambda *_: {})
        model = mw.load(source, trials.mesh_of(dict(fsdp=2, tp=2)), dtype=F32, train=[])
        return mw.logits(model, tiny.batches(model.mesh.data_rank)[0])


def planted(source: Path, bug: str) -> tuple[bool, bool]:
    """Return whether W1 passes, and whether logits equal those of float32 values."""
    expected = float32_logits(source)
    with pytest.MonkeyPatch.context() as patch:
        BUGS[bug](patch)
        model = mw.load(source, trials.mesh_of(dict(fsdp=2, tp=2)), dtype=F32, train=[])
        logits = mw.logits(model, tiny.batches(model.mesh.data_rank)[0])
        return mw.check_weights(model).ok, torch.equal(logits, expected)


def of_own_rows(patch: pytest.MonkeyPatch) -> None:
    """Take the scales of the first rows for the rows of a rank."""
    patch.setattr("meshwright.engine.model.rows_of", lambda piece, grid: grid[: piece.hi - piece.lo])


def of_whole_columns(patch: pytest.MonkeyPatch) -> None:
    """Take the scales of the first columns for the columns of a tp rank."""
    made = frozen_scales.grid_of

    def shifted(*args: Any) -> ops.Grid:
        grid = made(*args)
        return replace(grid, columns=grid.columns - grid.columns.min())

    patch.setattr("meshwright.engine.model.grid_of", shifted)


def divided(patch: pytest.MonkeyPatch) -> None:
    values = ops.Grid.values
    patch.setattr(ops.Grid, "values", lambda grid, *rest: values(replace(grid, scales=1 / grid.scales), *rest))


BUGS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "": lambda _: None, "own rows": of_own_rows, "columns": of_whole_columns, "divided": divided,
}  # fmt: skip


def test_w1_or_logits_detect_planted_bugs(source: Callable[[str], Path]) -> None:
    acts = {bug: functools.partial(planted, source("qwen3"), bug) for bug in BUGS}
    ranks = worlds.in_turn(4, acts)
    equal = {bug: {all(each) for each in zip(*of_bug, strict=True)} for bug, of_bug in ranks.items()}
    assert equal.pop("") == {True}
    assert all(False in each for each in equal.values()), equal
