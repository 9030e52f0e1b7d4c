"""Files of Qwen4-Exp, bit by bit: exports from any mesh are the source, and checkpoints of one resume on another."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import meshwright as mw
from tests import parts, tiny, trials, worlds
from tests.test_checkpoint import bytes_of, train, whole_moments
from tests.test_weights import load_and_export, same_files

PARTS = 12
STEM = "model.layers.1.ple.ple_embedding."
INTEGERS = {f"{STEM}{name}" for name in ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")}
SHARDS = {f"{STEM}ngram_embedding.shard_{part}.weight" for part in range(PARTS)}
EXPORTED = [{}, dict(fsdp=3), dict(tp=2), dict(pp=2), dict(fsdp=2, tp=2, ep=2)]


@pytest.fixture(scope="module", params=parts.every(2, ["fused", "per-expert"]))
def source(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A source as on the hub: `A_log` in bfloat16 too, and each part of the table with rows of its own."""
    at = tiny.directory(tmp_path_factory.mktemp("m") / "m", "qwen4_exp", dtype=torch.bfloat16, layout=request.param)
    tensors = load_file(at / "model.safetensors")
    tensors = {key: value.bfloat16() if value.is_floating_point() else value for key, value in tensors.items()}
    assert tensors.keys() >= SHARDS
    assert {key for key, value in tensors.items() if value.dtype == torch.int64} == INTEGERS
    save_file(tensors, at / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((at / "config.json").read_text()) | {"layer_types": None, "full_attention_interval": 3}
    (at / "config.json").write_text(json.dumps(config, indent=3))
    return at


@pytest.mark.parametrize("mesh", parts.every(5, EXPORTED, 4), ids=trials.named)
def test_export_is_the_source(source: Path, tmp_path: Path, mesh: dict[str, int]) -> None:
    assert all(worlds.run(trials.world_of(mesh), load_and_export, source, mesh, tmp_path / "out"))
    same_files(source, tmp_path / "out")


def export_trained(source: Path, out: Path) -> None:
    model = mw.load(source, trials.mesh_of(dict(fsdp=2)), dtype=torch.float32, train="*")
    train(mw.Engine(model, lr=0.1), 1)
    mw.export(model, out)


def test_a_trained_table_goes_back_into_its_parts(source: Path, tmp_path: Path) -> None:
    """The integers and the indexer stay."""
    worlds.run(2, export_trained, source, tmp_path / "out")
    before, after = (load_file(at / "model.safetensors") for at in (source, tmp_path / "out"))
    assert {key: (t.shape, t.dtype) for key, t in before.items()} == {k: (t.shape, t.dtype) for k, t in after.items()}
    same = {key for key in before if torch.equal(before[key], after[key])}
    assert same == INTEGERS | {key for key in before if ".indexer." in key}


# Both ways each in `make matrix`: rows cut in 3 and whole, stages and rows by four ranks, two ways of four ranks.
PAIRS: list[tuple[dict[str, int], dict[str, int]]] = [
    (dict(fsdp=3), dict(pp=2)),
    (dict(tp=2), dict(cp=2, tp=2)),
    (dict(fsdp=2, tp=2, ep=2), dict(replicate=2, fsdp=2)),
]

KINDS = parts.every(2, ("*", "**"))  # with tables of n-grams trained, and frozen


def engine_of(source: Path, mesh: dict[str, int], trained: str) -> mw.Engine:
    model = mw.load(source, trials.mesh_of(mesh), dtype=torch.float32, train=trained)
    return mw.Engine(model, lr=1e-2)


def saved(source: Path, mesh: dict[str, int], trained: str, out: Path) -> None:
    engine = engine_of(source, mesh, trained)
    train(engine, 2)
    mw.save(engine, out)


def resumed(source: Path, mesh: dict[str, int], trained: str, saved_at: Path, out: Path) -> dict[str, Any]:
    """Resume on a mesh, and save again. Return weights and moments as they were resumed."""
    engine, step = engine_of(source, mesh, trained), saved_at / "step-000002"
    mw.resume(engine, step)
    moments = {name: whole_moments(engine, at, step, name) for at, name in enumerate(("exp_avg", "exp_avg_sq"))}
    tensors = {"": {key: tensor.clone() for key, tensor in mw.gather(engine.model).items()}, **moments}
    mw.save(engine, out)
    return tensors


@pytest.mark.parametrize("pair", parts.every(3, PAIRS), ids=lambda pair: " and ".join(map(trials.named, pair)))
def test_checkpoints_move_between_meshes(source: Path, tmp_path: Path, pair: tuple[dict[str, int], ...]) -> None:
    """Moments of a trained table too; a frozen one has none."""

    def on(mesh: dict[str, int], act: Callable[..., Any], *paths: Callable[[str], Path]) -> Any:
        acts = {kind: partial(act, source, mesh, kind, *(path(kind) for path in paths)) for kind in KINDS}
        return worlds.in_turn(trials.world_of(mesh), acts)

    def folder(name: str) -> Callable[[str], Path]:
        return lambda trained: tmp_path / f"{name} {len(trained)}"

    ways = [(*pair, "a"), (*pair[::-1], "b")][: 2 if parts.ALL else 1]
    for mesh, _, name in ways:
        on(mesh, saved, folder(name))
    for _, mesh, name in ways:
        for trained, ranks in on(mesh, resumed, folder(name), folder(f"{name} again")).items():
            at, again = (folder(each)(trained) / "step-000002" for each in (name, f"{name} again"))
            assert bytes_of(again) == bytes_of(at)
            for kept, tensors in ranks[0].items():
                expected = load_file(at / kept / "model.safetensors")
                assert tensors.keys() == expected.keys() - INTEGERS
                assert [key for key, tensor in tensors.items() if not torch.equal(tensor, expected[key])] == []
                assert (tensors.keys() >= SHARDS) == (kept == "" or trained == "*")
                assert not any(".indexer." in key for key in tensors) or kept == ""
