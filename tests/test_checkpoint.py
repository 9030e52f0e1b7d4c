"""Saved on any mesh and resumed on any other: weights, masters and moments to the bit, and the training as if it had
never been interrupted."""

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
    "qwen3_moe": {**SIZES, **DENSE},
    "qwen3_5": {**SIZES, **DENSE, **DELTA},
    "qwen3_5_moe": {**SIZES, **DELTA},
}
MESHES = [
    {}, dict(fsdp=2), dict(fsdp=3), dict(fsdp=4), dict(tp=2), dict(tp=3), dict(tp=4), dict(fsdp=2, tp=2),
    dict(replicate=2, fsdp=2), dict(fsdp=2, ep=2), dict(fsdp=2, tp=2, ep=4),
    dict(cp=2), dict(pp=2), dict(pp=3), dict(pp=2, fsdp=2), dict(pp=2, stages=2), dict(cp=2, tp=2),
]  # fmt: skip
# Those that are part of another are left to `make matrix`.
TRIED = [mesh for mesh in MESHES if parts.ALL or not any(mesh.items() < other.items() for other in MESHES if mesh)]


def world_of(mesh: Mapping[str, int]) -> int:
    return prod(size for axis, size in mesh.items() if axis not in ("ep", "stages"))


def engine_of(source: Path, mesh: Mapping[str, int], **options: Any) -> mw.Engine:
    sizes = {axis: size for axis, size in mesh.items() if axis != "stages"}
    pipeline = mw.Pipeline(stages=mesh.get("stages", 1))
    model = mw.load(source, mw.Mesh(**sizes), dtype=torch.float32, pipeline=pipeline)
    return mw.Engine(model, lr=lambda step: 1e-3 * (step + 1), **options)


def train(engine: mw.Engine, num: int) -> list[float]:
    """Some steps of two micro-batches each, of data that depend on the step."""
    rank = engine.model.mesh.data_rank
    return [engine.step(tiny.batches(100 * engine.steps + rank)).loss for _ in range(num)]


def bytes_of(at: Path) -> dict[str, bytes]:
    """Of all tensors of a checkpoint."""
    files = (path for path in at.rglob("*.safetensors") if path.parent.name != "random")
    return {str(path.relative_to(at)): path.read_bytes() for path in files}


def whole_moments(engine: mw.Engine, at: int, checkpoint: Path, folder: str) -> dict[str, torch.Tensor]:
    """By the path of `mw.stream`, which knows nothing of checkpoints."""
    model = engine.model
    stored = {name: both[at] for name, both in engine.optimizer.moments.items()}
    empty = {name: tensor for name, tensor in model.stored().items() if not tensor.numel()}
    spelled = KeyMap(model.keymap.choice, keys_of(open_source(checkpoint / folder)))
    whole = StoredModel(model.blueprint.spec, model.mesh, {**empty, **stored})
    keys = list(spelled.keys.values())
    return {key.name: tensor.clone() for key, tensor in whole_tensors(whole, spelled, keys)}


def families_on(mesh: dict[str, int]) -> list[str]:
    """Every sixth one in turn, of those with experts every second one."""
    if "ep" in mesh:
        return parts.every(2, (name for name in FAMILIES if "moe" in name), MESHES.index(mesh))
    return parts.every(6, FAMILIES, MESHES.index(mesh))


def there_and_back(source: Path, reference: Path, mesh: Mapping[str, int], out: Path) -> dict[str, Any]:
    """What a mesh resumes from a checkpoint of one process; then it saves it again."""
    engine = engine_of(source, mesh)
    mw.resume(engine, reference)
    found = {
        "": {key: tensor.clone() for key, tensor in mw.gather(engine.model).items()},
        "exp_avg": whole_moments(engine, 0, reference, "exp_avg"),
        "exp_avg_sq": whole_moments(engine, 1, reference, "exp_avg_sq"),
    }
    mw.save(engine, out)
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """Of a family: its source, and a checkpoint that one process saved after two steps."""

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
def test_every_mesh_resumes_and_saves_the_same(saved: Any, tmp_path: Path, mesh: dict[str, int]) -> None:
    """What two meshes make of the files of one process is the same on both, so each resumes what the other saved."""
    cases = {name: functools.partial(there_and_back, *saved(name), mesh, tmp_path / name) for name in families_on(mesh)}
    for name, answers in worlds.in_turn(world_of(mesh), cases).items():
        reference, again = saved(name)[1], tmp_path / name / "step-000002"
        for folder, tensors in answers[0].items():
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
        losses += train(engine, 2)
        go_on.set()
        engine.wait()
    return losses, state_of(engine)


@contextlib.contextmanager
def writes_held_back() -> Iterator[threading.Event]:
    """A host so slow that nothing of a save is written before the event: a tiny one would end before the next update,
    and a save of live memory would look right."""
    go_on, write = threading.Event(), Files.write

    def late(files: Files, *args: Any) -> None:
        assert go_on.wait(worlds.SECONDS), "nobody let the save go on"
        write(files, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Files, "write", late)
        yield go_on


def resumed(source: Path, out: Path, mesh: Mapping[str, int]) -> tuple[list[float], Any]:
    engine = engine_of(source, mesh)
    found = mw.resume(engine, out)
    assert (found.step, found.state, found.directory) == (2, {"seen": 14}, out / "step-000002")
    assert found.tokens == engine.tokens > 0
    return train(engine, 2), state_of(engine)


def state_of(engine: mw.Engine) -> Any:
    weights = {name: tensor.clone() for name, tensor in engine.model.stored().items()}
    return weights, engine.optimizer.moments, engine.steps, engine.tokens, engine.router.load_LE


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
    parts.every(2, enumerate([dict(fsdp=2), {}, dict(pp=2, cp=2), dict(tp=2), dict(fsdp=2, tp=2, ep=2)])),
    ids=str,
)
def test_as_if_never_interrupted(tmp_path: Path, number: int, mesh: dict[str, int]) -> None:
    fit = [name for name in FAMILIES if "moe" in name or "ep" not in mesh]
    families = parts.every(len(fit), fit, number + 4) if mesh else fit  # a delta rule, a plain one, experts
    sources = {name: tiny.directory(tmp_path / name, name, dtype=torch.bfloat16) for name in families}
    wait = [(at + number // 2) % 2 == 0 for at in range(len(families))]
    runs = {name: functools.partial(interrupted, sources[name], tmp_path / f"run-{name}", mesh, wait[at])
            for at, name in enumerate(families)}  # fmt: skip
    before = worlds.in_turn(world_of(mesh), runs)
    after = worlds.in_turn(
        world_of(mesh),
        {name: functools.partial(resumed, sources[name], tmp_path / f"run-{name}", mesh) for name in families},
    )
    for name in families:
        for (losses, state), (late, later) in zip(before[name], after[name], strict=True):
            assert losses[2:] == late
            assert same(state, later), name


def previous(source: Path, out: Path, resume: bool) -> list[float]:
    engine = engine_of(source, dict(fsdp=2), router_aux="previous")
    if resume:
        mw.resume(engine, out)
        return train(engine, 2)
    losses = train(engine, 2)
    engine.backward(tiny.batches(5 + engine.model.mesh.rank))
    engine.discard()  # a step that is left out: its load is not that of the step before
    mw.save(engine, out)
    return losses + train(engine, 2)


def test_the_load_of_the_step_before_is_saved(tmp_path: Path) -> None:
    source = tiny.directory(tmp_path / "m", "qwen3_moe", output_router_logits=True, router_aux_loss_coef=0.5)
    [losses, _] = worlds.run(2, previous, source, tmp_path / "run", False)
    [late, _] = worlds.run(2, previous, source, tmp_path / "run", True)
    assert losses[2:] == late


def drawn(source: Path, out: Path, resume: bool) -> list[float]:
    """As a loss with dropout would draw them."""
    engine = engine_of(source, dict(fsdp=2))
    torch.manual_seed(engine.model.mesh.rank)
    torch.rand(3)
    if resume:
        mw.resume(engine, out)
    else:
        train(engine, 1)
        mw.save(engine, out)
    return torch.rand(5).tolist()


def test_random_numbers_go_on(tmp_path: Path) -> None:
    source = tiny.directory(tmp_path / "m", "qwen3")
    first = worlds.run(2, drawn, source, tmp_path / "run", False)
    assert first[0] != first[1]
    assert worlds.run(2, drawn, source, tmp_path / "run", True) == first


def before_a_step(source: Path, out: Path) -> tuple[Any, Any]:
    engine = engine_of(source, dict(fsdp=2))
    engine.evaluate(tiny.batches(0))
    at = mw.save(engine, out)
    assert not (at / "exp_avg").exists()
    again = engine_of(source, dict(fsdp=2))
    train(again, 1)
    assert mw.resume(again, out).step == 0
    return (train(engine, 2), state_of(engine)), (train(again, 2), state_of(again))


def test_before_the_first_step(tmp_path: Path) -> None:
    source = tiny.directory(tmp_path / "m", "qwen3_tied", dtype=torch.bfloat16)
    for new, resumed_ in worlds.run(2, before_a_step, source, tmp_path / "run"):
        assert same(new, resumed_)


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "frozen": (dict(train=["layers.*", "head.weight"]), {}),
    "frozen parts of a key": (dict(train="layers.1.*"), {}),
    "a new value head": (dict(head="value"), dict(loss=mw.losses.squared_error)),
    "bfloat16 moments": ({}, dict(state_dtype=torch.bfloat16)),
    "offload": (dict(savings=mw.Savings(offload=True, recompute="full")), {}),
    "float64": (dict(dtype=torch.float64), {}),
    "bfloat16": (dict(dtype=torch.bfloat16), {}),
}


def with_options(source: Path, out: Path, case: str, mesh: Mapping[str, int]) -> tuple[Any, Any]:
    def made() -> mw.Engine:
        of_load, of_engine = OPTIONS[case]
        model = mw.load(source, mw.Mesh(**mesh), **{"dtype": torch.float32, **of_load})
        return mw.Engine(model, lr=1e-3, **of_engine)

    def go(engine: mw.Engine) -> Any:
        batches = [[b.with_fields(target=torch.ones(len(b))) for b in tiny.batches(engine.steps)] for _ in range(2)]
        return [engine.step(step).loss for step in batches], state_of(engine)

    engine = made()
    go(engine)
    mw.save(engine, out)
    again = made()
    mw.resume(again, out)
    return go(engine), go(again)


KINDS: list[tuple[dict[str, int], list[str]]] = [
    (dict(), ["bfloat16 moments", "float64", "frozen parts of a key"]),
    (dict(fsdp=3), parts.every(2, ["a new value head", "frozen parts of a key", "offload", "bfloat16"])),
    (dict(fsdp=2, tp=2, ep=2), parts.every(2, ["frozen", "a new value head"])),
]  # fmt: skip


@pytest.mark.parametrize(("mesh", "chosen"), KINDS, ids=str)
def test_every_kind_of_model(tmp_path: Path, mesh: dict[str, int], chosen: list[str]) -> None:
    """Uneven and empty pieces too."""
    few = dict(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    source = tiny.directory(tmp_path / "m", "qwen3_5_moe", dtype=torch.bfloat16, **few)
    cases = {case: functools.partial(with_options, source, tmp_path / case, case, mesh) for case in chosen}
    for case, answers in worlds.in_turn(world_of(mesh), cases).items():
        for on, resumed_ in answers:
            assert same(on, resumed_), case


def on_another_mesh(source: Path, out: Path, mesh: Mapping[str, int], save: bool) -> list[float]:
    engine = engine_of(source, mesh)
    if not save:
        mw.resume(engine, out)
    else:
        train(engine, 1)
        mw.save(engine, out)
    whole = [list(range(3 + step, 43 + step)) for step in range(4)]
    return [engine.step(mw.batches(whole, engine.model.mesh, length=80)).loss for _ in range(3)]


def test_training_goes_on_on_another_mesh(tmp_path: Path) -> None:
    source = tiny.directory(tmp_path / "m", "qwen3_5_moe")
    [one] = worlds.run(1, on_another_mesh, source, tmp_path / "run", {}, True)
    for mesh in (dict(tp=2), dict(fsdp=2, ep=2), dict(cp=2), dict(pp=2)):
        for losses in worlds.run(2, on_another_mesh, source, tmp_path / "run", mesh, False):
            assert losses == pytest.approx(one, rel=1e-4)


def logits(directory: Path, tokens: torch.Tensor) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        return model.eval()(tokens[None]).logits[0]


@pytest.mark.parametrize("name", ["qwen3_tied", "qwen3_moe", "qwen3_5_moe"])
def test_transformers_loads_it(saved: Any, tmp_path: Path, name: str) -> None:
    source, at = saved(name)
    ours, theirs = load_file(at / "model.safetensors"), load_file(source / "model.safetensors")
    assert [(k, t.dtype, t.shape) for k, t in ours.items()] == [(k, t.dtype, t.shape) for k, t in theirs.items()]
    tokens = torch.arange(5, 60)
    [found] = worlds.run(1, our_logits, at, tokens)
    assert torch.allclose(logits(at, tokens), found, rtol=0, atol=2e-5 * float(found.abs().max()))


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


def test_weights_that_are_their_own_masters(tmp_path: Path) -> None:
    source = tiny.directory(tmp_path / "m", "qwen3_tied", dtype=torch.bfloat16)
    worlds.run(1, in_float32, source, tmp_path / "run")
    at = tmp_path / "run" / "step-000001"
    assert not (at / "master").exists()
    assert {tensor.dtype for tensor in load_file(at / "model.safetensors").values()} == {torch.float32}
    assert json.loads((at / "config.json").read_text())["dtype"] == "float32"


def from_a_checkpoint(at: Path, out: Path) -> None:
    """Its counters and its manifest are of that checkpoint alone."""
    engine = engine_of(at, {})
    mw.export(engine.model, out / "exported")
    train(engine, 1)
    mw.save(engine, out / "run")


def test_a_checkpoint_is_a_source_like_any_other(saved: Any, tmp_path: Path) -> None:
    source, at = saved("qwen3_tied")
    worlds.run(1, from_a_checkpoint, at, tmp_path)
    assert {p.name for p in (tmp_path / "exported").iterdir()} == {p.name for p in source.iterdir()}
    found = opened_at(tmp_path / "run")
    assert check_bytes(found) == []
    assert found.trainer["step"] == 1
    assert not {"meshwright.json", "runs/00000.json"} & set(found.manifest.files)
