"""Checkpoints of any mesh resume on any other: weights, masters and optimizer state are bitwise equal, and training
continues as if it had never been interrupted."""

from __future__ import annotations

import contextlib
import functools
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

import meshwright as mw
from meshwright.checkpoint import check_bytes, opened_at
from meshwright.weights import Files, StoredModel, keys_of, open_source, whole_tensors
from meshwright.weights.keymap import KeyMap
from tests import parts, tiny, worlds

# Sizes that 2, 3 and 4 divide, or that may be uneven (the vocabulary) or stay whole (kv heads).
SIZES: dict[str, Any] = dict(num_attention_heads=12, num_hidden_layers=4)
DENSE = dict(intermediate_size=48)
DELTA = dict(
    linear_num_key_heads=12, linear_num_value_heads=24,
    layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"],
)  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {**SIZES, **DENSE, "hidden_size": 72},
    "qwen3": {**SIZES, **DENSE},
    "qwen3_tied": {**SIZES, **DENSE},
    "qwen3_moe": {**SIZES, **DENSE, "num_experts": 4},
    "qwen3_5": {**SIZES, **DENSE, **DELTA},
    "qwen3_5_moe": {**SIZES, **DELTA, "num_experts": 4},
}
MESHES = [
    {}, dict(fsdp=2), dict(fsdp=3), dict(fsdp=4), dict(tp=2), dict(tp=3), dict(tp=4), dict(fsdp=2, tp=2),
    dict(replicate=2, fsdp=2), dict(fsdp=2, ep=2), dict(fsdp=2, tp=2, ep=4),
    dict(cp=2), dict(pp=2), dict(pp=3), dict(pp=2, fsdp=2), dict(pp=2, stages=2), dict(cp=2, tp=2),
    dict(replicate=2, cp=2),
]  # fmt: skip
# `make matrix` tries them all; `make test` has each axis, and 3 shards, which are uneven.
FEW: list[dict[str, int]] = [
    dict(fsdp=3), dict(tp=3), dict(replicate=2, cp=2), dict(fsdp=2, tp=2, ep=4), dict(pp=2, stages=2),
]  # fmt: skip
TRIED = MESHES if parts.ALL else FEW


def world_of(mesh: Mapping[str, int]) -> int:
    return prod(size for axis, size in mesh.items() if axis not in ("ep", "stages"))


def engine_of(source: Path, mesh: Mapping[str, int], **options: Any) -> mw.Engine:
    sizes = {axis: size for axis, size in mesh.items() if axis != "stages"}
    pipeline = mw.Pipeline(stages=mesh.get("stages", 1))
    model = mw.load(source, mw.Mesh(**sizes), dtype=torch.float32, pipeline=pipeline)
    return mw.Engine(model, lr=lambda step: 1e-3 * (step + 1), **options)


def train(engine: mw.Engine, num: int) -> list[float]:
    """Take steps of two micro-batches each. The data depend on the step."""
    rank = engine.model.mesh.data_rank
    return [engine.step(tiny.batches(100 * engine.steps + rank)).loss for _ in range(num)]


def bytes_of(at: Path) -> dict[str, bytes]:
    """Read all tensor files of a checkpoint."""
    files = (path for path in at.rglob("*.safetensors") if path.parent.name != "random")
    return {str(path.relative_to(at)): path.read_bytes() for path in files}


def whole_moments(engine: mw.Engine, at: int, checkpoint: Path, folder: str) -> dict[str, torch.Tensor]:
    """Gather optimizer state as `mw.stream` does, without any code of checkpoints."""
    model = engine.model
    stored = {name: both[at] for name, both in engine.optimizer.state.items()}
    empty = {name: tensor for name, tensor in model.stored().items() if not tensor.numel()}
    keymap = KeyMap(model.keymap.choice, keys_of(open_source(checkpoint / folder)))
    whole = StoredModel(model.blueprint.spec, model.mesh, {**empty, **stored})
    keys = list(keymap.keys.values())
    return {key.name: tensor.clone() for key, tensor in whole_tensors(whole, keymap, keys)}


def families_on(mesh: dict[str, int]) -> list[str]:
    """Return one family per mesh, in turn; every second one of those with experts."""
    if "ep" in mesh:
        return parts.every(2, (name for name in FAMILIES if "moe" in name), MESHES.index(mesh))
    return parts.every(6, FAMILIES, MESHES.index(mesh))


def resumed_and_saved(source: Path, reference: Path, mesh: Mapping[str, int], out: Path) -> dict[str, Any]:
    """Resume a checkpoint of one process, and save it again. Return what was resumed."""
    engine = engine_of(source, mesh)
    mw.resume(engine, reference)
    tensors = {
        "": {key: tensor.clone() for key, tensor in mw.gather(engine.model).items()},
        "exp_avg": whole_moments(engine, 0, reference, "exp_avg"),
        "exp_avg_sq": whole_moments(engine, 1, reference, "exp_avg_sq"),
    }
    mw.save(engine, out)
    return tensors


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """Make the source of a family, and a checkpoint that one process saves after two steps."""

    @functools.cache
    def make(name: str) -> tuple[Path, Path]:
        at = tmp_path_factory.mktemp(name)
        source = tiny.directory(at / "source", name, dtype=torch.bfloat16, **FAMILIES[name])
        worlds.run(1, one_process, source, at / "runs")
        return source, at / "runs" / "step-000002"

    return make


def one_process(source: Path, out: Path) -> None:
    engine = engine_of(source, {})
    train(engine, 2)
    assert mw.save(engine, out) == out / "step-000002"


@pytest.mark.parametrize("mesh", TRIED, ids=lambda mesh: "-".join(f"{a}{n}" for a, n in mesh.items()) or "one")
def test_every_mesh_resumes_and_saves_equal_bytes(saved: Any, tmp_path: Path, mesh: dict[str, int]) -> None:
    """All meshes read and write the files of one process, so each resumes what another saves."""
    cases = {
        name: functools.partial(resumed_and_saved, *saved(name), mesh, tmp_path / name) for name in families_on(mesh)
    }
    for name, ranks in worlds.in_turn(world_of(mesh), cases).items():
        reference, again = saved(name)[1], tmp_path / name / "step-000002"
        for folder, tensors in ranks[0].items():
            expected = load_file(reference / folder / "model.safetensors")
            assert tensors.keys() == expected.keys()
            wrong = [key for key in expected if not torch.equal(tensors[key], expected[key])]
            assert not wrong, f"{name} {folder}: {wrong}"
        assert bytes_of(again) == bytes_of(reference), name
        assert len(bytes_of(reference)) == 4


def interrupted(source: Path, out: Path, mesh: Mapping[str, int], wait: bool) -> tuple[list[float], Any]:
    engine = engine_of(source, mesh)
    losses = train(engine, 2)
    with contextlib.nullcontext(threading.Event()) if wait else writes_held_back() as go_on:
        mw.save(engine, out, state={"seen": 14}, wait=wait)
        losses += train(engine, 1)
        go_on.set()
        engine.wait()
    return losses, state_of(engine)


@contextlib.contextmanager
def writes_held_back() -> Iterator[threading.Event]:
    """Delay writes until the event. A tiny save would end before the next update, which would hide that it reads live
    memory."""
    go_on, write = threading.Event(), Files.write

    def late(files: Files, *args: Any) -> None:
        assert go_on.wait(worlds.SECONDS), "the event was never set"
        write(files, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Files, "write", late)
        yield go_on


def resumed(source: Path, out: Path, mesh: Mapping[str, int]) -> tuple[list[float], Any]:
    engine = engine_of(source, mesh)
    resumed_from = mw.resume(engine, out)
    assert (resumed_from.step, resumed_from.state) == (2, {"seen": 14})
    assert resumed_from.directory == out / "step-000002"
    assert resumed_from.tokens == engine.tokens > 0
    return train(engine, 1), state_of(engine)


def state_of(engine: mw.Engine) -> Any:
    weights = {name: tensor.clone() for name, tensor in engine.model.stored().items()}
    return weights, engine.optimizer.state, engine.steps, engine.tokens, engine.router.load_LE


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b) and a.dtype == b.dtype
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.parametrize(
    ("number", "mesh"),
    parts.every(3, enumerate([dict(fsdp=2), {}, dict(tp=2), dict(pp=2), dict(fsdp=2, tp=2, ep=2), dict(pp=2, cp=2)])),
    ids=str,
)
def test_resumed_training_equals_uninterrupted(tmp_path: Path, number: int, mesh: dict[str, int]) -> None:
    fit = [name for name in FAMILIES if "moe" in name or "ep" not in mesh]
    families = parts.every(len(fit), fit, number + 4) if mesh else fit  # a delta rule, a plain one
    few = {name: tiny.TWO_LAYERS if "qwen3_5" in name else {} for name in families}
    sources = {name: tiny.directory(tmp_path / name, name, dtype=torch.bfloat16, **few[name]) for name in families}
    wait = [(at + number // 2) % 2 == 0 for at in range(len(families))]
    acts: dict[str, Any] = {}
    for at, name in enumerate(families):
        acts[name] = functools.partial(interrupted, sources[name], tmp_path / f"run-{name}", mesh, wait[at])
        acts[f"{name} resumed"] = functools.partial(resumed, sources[name], tmp_path / f"run-{name}", mesh)
    results = worlds.in_turn(world_of(mesh), acts)
    for name in families:
        for (losses, state), (late, later) in zip(results[name], results[f"{name} resumed"], strict=True):
            assert losses[2:] == late
            assert same(state, later), name


def previous(source: Path, out: Path, resume: bool) -> list[float]:
    engine = engine_of(source, dict(fsdp=2), router_aux="previous")
    if resume:
        mw.resume(engine, out)
        return train(engine, 1)
    train(engine, 1)
    engine.backward(tiny.batches(5 + engine.model.mesh.rank))
    engine.discard()  # the load of a discarded step is not that of the step before
    mw.save(engine, out)
    return train(engine, 1)


def test_the_load_of_the_step_before_is_saved(tmp_path: Path) -> None:
    source = tiny.directory(
        tmp_path / "m", "qwen3_moe", output_router_logits=True, router_aux_loss_coef=0.5, num_hidden_layers=2
    )
    runs = worlds.in_turn(
        2, {resume: functools.partial(previous, source, tmp_path / "run", resume) for resume in (False, True)}
    )
    assert runs[False] == runs[True]


def drawn(source: Path, out: Path, resume: bool) -> list[float]:
    """Draw random numbers before and after a checkpoint, as a loss with dropout does."""
    engine = engine_of(source, dict(fsdp=2))
    torch.manual_seed(engine.model.mesh.rank + 10 * resume)
    torch.rand(3)
    if resume:
        mw.resume(engine, out)
    else:
        mw.save(engine, out)
    return torch.rand(5).tolist()


def test_random_state_is_resumed(tmp_path: Path) -> None:
    source = tiny.directory(tmp_path / "m", "qwen3")
    acts = {resume: functools.partial(drawn, source, tmp_path / "run", resume) for resume in (False, True)}
    results = worlds.in_turn(2, acts)
    assert results[False][0] != results[False][1]
    assert results[True] == results[False]


def saved_before_a_step(source: Path, out: Path) -> tuple[Any, Any]:
    engine = engine_of(source, dict(fsdp=2))
    engine.evaluate(tiny.batches(0))
    at = mw.save(engine, out)
    assert not (at / "exp_avg").exists()
    again = engine_of(source, dict(fsdp=2))
    train(again, 1)
    assert mw.resume(again, out).step == 0
    return (train(engine, 1), state_of(engine)), (train(again, 1), state_of(again))


def test_checkpoint_before_the_first_step(tmp_path: Path) -> None:
    source = tiny.directory(tmp_path / "m", "qwen3_tied", dtype=torch.bfloat16)
    for new, resumed_ in worlds.run(2, saved_before_a_step, source, tmp_path / "run"):
        assert same(new, resumed_)


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "frozen": (dict(train=["layers.*", "head.weight"]), {}),
    "frozen parts of a key, bfloat16 state": (
        dict(train="layers.1.*"), dict(optimizer=mw.AdamW(state_dtype=torch.bfloat16))
    ),
    "a new value head, offload": (
        dict(head="value", memory=mw.MemoryOptions(offload=True, recompute="full")),
        dict(loss=mw.losses.squared_error),
    ),
    "float64": (dict(dtype=torch.float64), {}),
    "bfloat16": (dict(dtype=torch.bfloat16), {}),
}  # fmt: skip


def with_options(source: Path, out: Path, case: str, mesh: Mapping[str, int]) -> tuple[Any, Any]:
    def made() -> mw.Engine:
        of_load, of_engine = OPTIONS[case]
        model = mw.load(source, mw.Mesh(**mesh), **{"dtype": torch.float32, **of_load})
        return mw.Engine(model, lr=1e-3, **of_engine)

    def go(engine: mw.Engine) -> Any:
        batch = tiny.batches(engine.steps)[0]
        return engine.step([batch.with_fields(target=torch.ones(len(batch)))]).loss, state_of(engine)

    engine = made()
    go(engine)
    mw.save(engine, out)
    again = made()
    mw.resume(again, out)
    return go(engine), go(again)


KINDS: list[tuple[dict[str, int], list[str]]] = [
    (dict(), ["float64", "frozen parts of a key, bfloat16 state"]),
    (dict(fsdp=3), parts.every(3, ["a new value head, offload", "frozen parts of a key, bfloat16 state", "bfloat16"])),
    (dict(fsdp=2, tp=2, ep=2) if parts.ALL else dict(tp=2, ep=2),
     parts.every(2, ["frozen", "a new value head, offload"])),
]  # fmt: skip


@pytest.mark.parametrize(("mesh", "chosen"), KINDS, ids=str)
def test_every_option_resumes(tmp_path: Path, mesh: dict[str, int], chosen: list[str]) -> None:
    """Pieces of 3 ranks are uneven, some are empty."""
    source = tiny.directory(tmp_path / "m", "qwen3_5_moe", dtype=torch.bfloat16, **tiny.TWO_LAYERS, num_experts=4)
    cases = {case: functools.partial(with_options, source, tmp_path / case, case, mesh) for case in chosen}
    for case, ranks in worlds.in_turn(world_of(mesh), cases).items():
        for uninterrupted, resumed_ in ranks:
            assert same(uninterrupted, resumed_), case


def on_another_mesh(source: Path, out: Path, mesh: Mapping[str, int], save: bool) -> list[float]:
    engine = engine_of(source, mesh)
    if not save:
        mw.resume(engine, out)
    else:
        train(engine, 1)
        mw.save(engine, out)
    whole = [list(range(3 + step, 43 + step)) for step in range(4)]
    return [engine.step(mw.batches(whole, engine.model.mesh, length=80)).loss for _ in range(2)]


def test_training_continues_on_another_mesh(tmp_path: Path) -> None:
    source = tiny.directory(tmp_path / "m", "qwen3_5_moe", **tiny.TWO_LAYERS, num_experts=4)
    [one] = worlds.run(1, on_another_mesh, source, tmp_path / "run", {}, True)
    meshes: list[dict[str, int]] = [dict(tp=2), dict(fsdp=2, ep=2), dict(cp=2), dict(pp=2)]
    tried = parts.every(4, meshes, 1)
    acts = {str(mesh): functools.partial(on_another_mesh, source, tmp_path / "run", mesh, False) for mesh in tried}
    for mesh, ranks in worlds.in_turn(2, acts).items():
        assert all(losses == pytest.approx(one, rel=1e-4) for losses in ranks), mesh


def logits(directory: Path, tokens: torch.Tensor) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        return model.eval()(tokens[None]).logits[0]


@pytest.mark.parametrize("name", ["qwen3_tied", "qwen3_5_moe"])
def test_transformers_loads_checkpoints(saved: Any, tmp_path: Path, name: str) -> None:
    source, at = saved(name)
    saved_layout, layout = (
        [(key, t.dtype, t.shape) for key, t in load_file(folder / "model.safetensors").items()]
        for folder in (at, source)
    )
    assert saved_layout == layout
    tokens = torch.arange(5, 60)
    [result] = worlds.run(1, our_logits, at, tokens)
    assert torch.allclose(logits(at, tokens), result, rtol=0, atol=2e-5 * float(result.abs().max()))


def our_logits(at: Path, tokens: torch.Tensor) -> torch.Tensor:
    return mw.logits(mw.load(at, dtype=torch.float32), mw.pack([tokens.tolist()]))


def in_float32(source: Path, out: Path) -> None:
    engine = engine_of(source, {})
    train(engine, 1)
    mw.save(engine, out, dtype=torch.float32)
    weights = {name: tensor.clone() for name, tensor in engine.model.stored().items()}
    again = engine_of(source, {})
    mw.resume(again, out)
    assert same(weights, again.model.stored())


def test_float32_checkpoints_need_no_masters(tmp_path: Path) -> None:
    source = tiny.directory(tmp_path / "m", "qwen3_tied", dtype=torch.bfloat16)
    worlds.run(1, in_float32, source, tmp_path / "run")
    at = tmp_path / "run" / "step-000001"
    assert not (at / "master").exists()
    assert {tensor.dtype for tensor in load_file(at / "model.safetensors").values()} == {torch.float32}
    assert json.loads((at / "config.json").read_text())["dtype"] == "float32"


def from_a_checkpoint(at: Path, out: Path) -> None:
    """Load a checkpoint, export and train it, and save it with counters and a manifest of its own."""
    engine = engine_of(at, {})
    mw.export(engine.model, out / "exported")
    train(engine, 1)
    mw.save(engine, out / "run")


def test_load_accepts_a_checkpoint(saved: Any, tmp_path: Path) -> None:
    source, at = saved("qwen3_tied")
    worlds.run(1, from_a_checkpoint, at, tmp_path)
    assert {p.name for p in (tmp_path / "exported").iterdir()} == {p.name for p in source.iterdir()}
    checkpoint = opened_at(tmp_path / "run")
    assert check_bytes(checkpoint) == []
    assert checkpoint.trainer["step"] == 1
    assert not {"meshwright.json", "runs/00000.json"} & set(checkpoint.manifest.files)
