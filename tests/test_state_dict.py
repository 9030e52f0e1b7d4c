"""The state of an engine through torch.distributed.checkpoint, in a user's own code: from any mesh to any other.

What a DTensor could not say without losing rows (TransformerEngine#2713, pytorch#168134) has a test by name.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import meshwright as mw
from meshwright.engine import engine_state
from meshwright.engine.asleep import Asleep
from meshwright.recipe import Lora
from tests import parts, tiny, worlds
from tests.test_checkpoint import FAMILIES, engine_of, train, world_of
from tests.test_checkpoint_broken import error_of
from tests.words import words

Case = tuple[list[str], dict[str, int], dict[str, int]]
DENSE = ["qwen2", "qwen3", "qwen3_tied", "qwen3_5"]
CASES: dict[str, Case] = {
    "from one process": (["qwen3_tied", "qwen3_5_moe"], {}, dict(fsdp=2, tp=2)),
    "shards of rows that tp cut": (DENSE, dict(fsdp=2, tp=2), dict(fsdp=3)),
    "empty pieces of biases": (["qwen2", "qwen3_5"], dict(fsdp=4), dict(tp=3)),
    "copies of a kv head": (["qwen3", "qwen3_moe"], dict(tp=2), dict(fsdp=3)),
    "grouped experts": (["qwen3_moe", "qwen3_5_moe"], dict(fsdp=2, ep=2), dict(fsdp=2, tp=2, ep=4)),
}


def saved(source: Path, out: Path, mesh: Mapping[str, int]) -> None:
    """Save by torch, and by `mw.save` as reference."""
    engine = engine_of(source, mesh)
    train(engine, 1)
    mw.save(engine, out / "ours", dtype=torch.float32)
    dcp.save(engine.state_dict(), checkpoint_id=out / "dcp")


def resumed(source: Path, out: Path, mesh: Mapping[str, int]) -> None:
    engine = engine_of(source, mesh)
    load(engine, out)
    mw.save(engine, out / "again", dtype=torch.float32)


def load(engine: mw.Engine, out: Path) -> None:
    state = engine.state_dict()
    dcp.load(state, checkpoint_id=out / "dcp")
    engine.load_state_dict(state)
    assert (engine.steps, engine.optimizer.steps) == (1, 1)


def tensors(at: Path) -> dict[str, torch.Tensor]:
    return {f"{file.parent.name}/{key}": tensor for file in at.rglob("model.safetensors")
            for key, tensor in load_file(file).items()}  # fmt: skip


@pytest.mark.parametrize("case", parts.every(5, CASES, 3))
def test_any_mesh_loads_what_any_mesh_saved(tmp_path: Path, case: str) -> None:
    fit, first, second = CASES[case]
    families = parts.every(4, fit)
    few = dict(num_key_value_heads=1, num_hidden_layers=2) if "copies" in case else {}
    sources = {name: tiny.directory(tmp_path / name / "m", name, **{**FAMILIES[name], **few}) for name in families}

    def each(act: Callable[..., Any], mesh: dict[str, int]) -> None:
        runs = {name: functools.partial(act, sources[name], tmp_path / name, mesh) for name in families}
        worlds.in_turn(world_of(mesh), runs)

    each(saved, first)
    each(resumed, second)
    for name in families:
        ours, again = (tensors(tmp_path / name / folder / "step-000001") for folder in ("ours", "again"))
        assert ours.keys() == again.keys()
        assert [key for key in ours if not torch.equal(ours[key], again[key])] == [], name


def crossing(source: Path) -> list[float]:
    """A collective of the user's that rank 0 begins before a step and rank 1 after it, as a thread would."""
    engine = engine_of(source, dict(fsdp=2))
    works, of_user = [], torch.ones(7)
    if dist.get_rank() == 0:
        works.append(dist.all_reduce(of_user, async_op=True))
    losses = train(engine, 1)
    if dist.get_rank() == 1:
        works.append(dist.all_reduce(of_user, async_op=True))
    for work in works:
        work.wait()
    return [*losses, float(of_user.sum())]


def test_what_a_user_sends_never_meets_what_we_send(tmp_path: Path) -> None:
    """`dcp.async_save` plans in a thread, over the default group. In our order on one rank, in another on the next."""
    first, second = worlds.run(2, crossing, tiny.directory(tmp_path / "m", "qwen3"))
    assert first == second
    assert first[-1] == 14


def test_others_read_it_without_us(tmp_path: Path) -> None:
    """Whole tensors by the names of the files, by torch alone."""
    source = tiny.directory(tmp_path / "m", "qwen3_moe", num_hidden_layers=2)
    worlds.run(2, saved, source, tmp_path, dict(tp=2, ep=2))
    expected = load_file(tmp_path / "ours" / "step-000001" / "model.safetensors")
    result = {"weights": {key: torch.empty_like(tensor) for key, tensor in expected.items()}}
    dcp.load(result, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert all(torch.equal(tensor, expected[key]) for key, tensor in result["weights"].items())


def refusals(source: Path, others: Path) -> dict[str, str]:
    engine = engine_of(source, dict(fsdp=2))
    state, other = engine.state_dict(), engine_of(others, dict(fsdp=2)).state_dict()
    key = next(iter(state["weights"]))
    result = {
        "no dict": error_of(lambda: engine.load_state_dict(7)),  # type: ignore[arg-type]
        "another model": error_of(lambda: engine.load_state_dict(other)),
        "a key is missing": error_of(
            lambda: engine.load_state_dict(
                {**state, "weights": {k: v for k, v in state["weights"].items() if k != key}}
            )
        ),
        "arithmetic": error_of(lambda: state["weights"][key] + 1),
    }
    engine.backward(tiny.batches(0))
    return {**result, "gradients wait": error_of(engine.state_dict)}


def test_what_is_refused(tmp_path: Path) -> None:
    source, other = (tiny.directory(tmp_path / name, name) for name in ("qwen3", "qwen3_moe"))
    for result in worlds.run(2, refusals, source, other):
        assert re.search(words("state dict is a dict", "int"), result["no dict"])
        assert re.search(words("mlp", "alone", "same model"), result["another model"])
        assert re.search(words("this engine alone"), result["a key is missing"])
        assert re.search(words("StateError", r"mw\.gather"), result["arithmetic"])
        assert re.search(words("StateError", "update"), result["gradients wait"])


def test_the_router_goes_on(tmp_path: Path) -> None:
    """Counters and the router's load of the step before (what others call extra state) come back with the rest. An
    asynchronous save is of its moment."""
    aux = dict(output_router_logits=True, router_aux_loss_coef=0.5)
    source = tiny.directory(tmp_path / "m", "qwen3_5_moe", **tiny.TWO_LAYERS, **aux)
    acts = {resume: functools.partial(previous, source, tmp_path, resume) for resume in (False, True)}
    results = worlds.in_turn(2, acts)
    assert results[False] == results[True]


def previous(source: Path, out: Path, resume: bool) -> list[float]:
    engine = engine_of(source, dict(fsdp=2, ep=2), router_aux="previous")
    if resume:
        load(engine, out)
        return train(engine, 1)
    train(engine, 1)
    future = dcp.async_save(engine.state_dict(), checkpoint_id=out / "dcp")
    losses = train(engine, 1)
    future.result()
    return losses


def counting(steps: int, tokens: int, alpha: float, loads: list[Any]) -> Any:
    """Return an engine of adapters and an MTP head, without tensors."""
    routers = [
        SimpleNamespace(
            trained_load=torch.full((1, 2), 2.5 * steps + n), resume=lambda load, n=n: loads.append((n, load))
        )
        for n in range(2)
    ]  # fmt: skip
    mesh = SimpleNamespace(together=lambda act, *_: act())
    recipe, calls = SimpleNamespace(lora=Lora(rank=2, alpha=alpha)), SimpleNamespace(asleep=Asleep())
    return SimpleNamespace(
        steps=steps, tokens=tokens, optimizer=SimpleNamespace(steps=steps), router=routers[0], state_layout=None,
        mtp=SimpleNamespace(router=routers[1]), trained=[],
        model=SimpleNamespace(mesh=mesh, recipe=recipe, calls=calls),
    )  # fmt: skip


def test_all_counters_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the load of both routers. Adapters of another scale are refused before anything changes."""
    monkeypatch.setattr(engine_state, "check_ready", lambda *_: None)
    monkeypatch.setattr(engine_state, "planes_in_memory", lambda *_: {})
    loads: list[Any] = []
    engine, state = counting(0, 0, 4.0, loads), engine_state.state_of(counting(7, 900, 4.0, loads))
    assert error_of(lambda: engine_state.take_state(counting(0, 0, 4.5, loads), state)) == (
        "CheckpointError: the state dict has adapters of scale 2, this engine's have 2.25 (lora.alpha, lora.rank, "
        "lora.rslora); load the model with the lora= that was saved"
    )
    assert loads == []
    engine_state.take_state(engine, state)
    assert (engine.steps, engine.optimizer.steps, engine.tokens) == (7, 7, 900)
    assert loads == [(0, [[17.5, 17.5]]), (1, [[18.5, 18.5]])]
