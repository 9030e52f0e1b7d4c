"""Rollout routing replay: expert choices out of a forward, and into others."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import meshwright as mw
from tests import parts, rl_losses, tiny, trials, worlds
from tests.words import words

expert_ops = importlib.import_module("meshwright.ops.experts")  # `ops.experts` is the function

MESHES: list[dict[str, int]] = [
    dict(fsdp=2, tp=2, ep=4),
    dict(pp=2),
    *([dict(cp=2, ep=2), dict(fsdp=2, ep=2), dict(tp=2), dict(replicate=2), dict(pp=2, tp=2)] if parts.ALL else []),
]
FAMILIES = ("qwen3_moe", "qwen3_5_moe", "qwen4_exp") if parts.ALL else ("qwen3_moe", "qwen3_5_moe")
TRIED = [(family, mesh) for number, family in enumerate(FAMILIES) for mesh in parts.every(2, MESHES, number)]
RECOMPUTE = mw.MemoryOptions(recompute="full")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    at = tmp_path_factory.mktemp("replay")
    made = {name: tiny.directory(at / name, name) for name in FAMILIES}
    aux = dict(output_router_logits=True, router_aux_loss_coef=0.1)
    made["with an aux loss"] = tiny.directory(at / "aux", "qwen3_moe", **aux)
    return made | {"qwen3": tiny.directory(at / "qwen3", "qwen3")}


def model_of(source: Path, mesh: dict[str, int], recompute: bool = False) -> mw.Model:
    options = {"memory": RECOMPUTE} if recompute else {}
    return mw.load(source, trials.mesh_of(mesh), dtype=torch.float64, **options)


def rollout(model: mw.Model) -> list[Tensor]:
    """Other choices than the router makes, for most tokens of most documents: as of a rollout in another precision."""
    layers, top_k, num = (
        model.blueprint.balance.num_layers,
        model.blueprint.balance.top_k,
        model.blueprint.balance.num_experts,
    )
    draw = torch.Generator().manual_seed(5)
    choices = []
    for tokens in rl_losses.documents():
        noise = torch.rand(len(tokens), layers, num, generator=draw)
        own = noise.topk(top_k).indices.to(torch.int32)
        own[torch.rand(len(tokens), layers, generator=draw) < 0.2] = -1  # where the rollout says nothing
        choices.append(own)
    return choices


def trained(source: Path, mesh: dict[str, int], recompute: bool) -> dict[str, Any]:
    engine = mw.Engine(model_of(source, mesh, recompute), lr=1e-2)
    mesh_, documents = engine.model.mesh, rl_losses.documents()
    given = rollout(engine.model)
    batches = mw.batches(documents, mesh_, max_tokens=64, trained=rl_losses.masks(), experts=given)
    seen = [mw.expert_choices(engine.model, batch) for batch in batches]
    # The same choices, recorded and given back: nothing changes.
    again = [mw.pack([batch.tokens.tolist()], experts=[of.cpu()]) for batch, of in zip(batches, seen, strict=True)]
    assert all(torch.equal(mw.expert_choices(engine.model, each), of) for each, of in zip(again, seen, strict=True))
    by_document = mw.by_document(mesh_, batches, [each.double() for each in seen])
    loss = engine.backward(batches)
    grads = mw.gather(engine.model, "grad")
    return {"loss": loss, "grads": grads, "choices": [each.to(torch.int32) for each in by_document]}


@pytest.mark.parametrize(
    ("family", "mesh"), TRIED, ids=lambda each: each if isinstance(each, str) else trials.named(each)
)
def test_replayed_choices_on_a_mesh(sources: dict[str, Path], family: str, mesh: dict[str, int]) -> None:
    recomputes = parts.every(2, (False, True), FAMILIES.index(family))
    cases = {each: lambda each=each: trained(sources[family], mesh, each) for each in recomputes}
    alone = _alone(sources[family])
    for ranks in worlds.in_turn(trials.world_of(mesh), cases, seconds=120).values():
        for rank, answer in enumerate(ranks):
            assert answer["loss"] == pytest.approx(alone["loss"], rel=1e-9)
            assert all(torch.equal(a, b) for a, b in zip(answer["choices"], alone["choices"], strict=True))
            if not rank:
                for key, grad in alone["grads"].items():
                    assert (answer["grads"][key] - grad).norm() <= 1e-9 * grad.norm().clamp(min=1e-12), key


_found: dict[str, Any] = {}


def _alone(source: Path) -> dict[str, Any]:
    if source.name not in _found:
        (_found[source.name],) = worlds.run(1, trained, source, {}, False)
    return _found[source.name]


def inside(source: Path) -> list[bool]:
    """Bitwise: choices of the router given back to it; and other choices given, or made where the router chooses."""
    engine = mw.Engine(model_of(source, {}), lr=1e-2)
    batch = mw.pack(rl_losses.documents(), trained=rl_losses.masks())

    def step(batch: mw.Batch) -> dict[str, Tensor]:
        loss = engine.backward([batch])
        grads = mw.gather(engine.model, "grad") | {"loss": torch.tensor(loss, dtype=torch.float64)}
        engine.discard()
        return grads

    own = step(batch)
    chosen = mw.expert_choices(engine.model, batch)
    given = mw.pack(rl_losses.documents(), trained=rl_losses.masks(), experts=batch.split(chosen))
    other = torch.cat(rollout(engine.model))
    replayed = step(mw.pack(rl_losses.documents(), trained=rl_losses.masks(), experts=batch.split(other)))
    real, layers = expert_ops._choose, iter(range(engine.model.blueprint.balance.num_layers))

    def made(shares_TE: Tensor, k: int, given_Tk: Tensor | None) -> Tensor:
        assert given_Tk is None
        at, own_Tk = other[:, next(layers)].long(), real(shares_TE, k, None)
        return at.where(at >= 0, own_Tk)

    expert_ops._choose = made
    try:
        as_made = step(batch)
    finally:
        expert_ops._choose = real
    same = lambda a, b: all(torch.equal(a[key], b[key]) for key in a)  # noqa: E731 - short
    router = [key for key in own if re.search(r"mlp\.gate\.weight", key)]
    return [
        same(own, step(given)), same(replayed, as_made), not same(own, replayed),
        all(bool(replayed[key].norm() > 0) for key in router), bool(router),
    ]  # fmt: skip


def test_given_choices_are_those_made_inside_to_the_bit(sources: dict[str, Path]) -> None:
    assert worlds.run(1, inside, sources["with an aux loss"]) == [[True] * 5]


def _with(experts: Any) -> Any:
    return lambda e: e.step([mw.pack([[1, 2, 3, 4]], experts=[experts])])


CHOICES = torch.tensor([[[0, 1, 2], [3, 4, 5]]] * 4)
REFUSED: dict[str, tuple[str, Any, str]] = {
    "another number of layers": ("qwen3_moe", _with(CHOICES[:, :1]), words("DataError", r"\(1, 3\)", "2 layers")),
    "out of range": ("qwen3_moe", _with(CHOICES + 4), words("DataError", "layer 1", r"0\.\.7")),
    "of other documents": ("qwen3_moe", _with(CHOICES[:3]), words("DataError", "documents of", r"\[4\]")),
    "no whole numbers": ("qwen3_moe", _with(CHOICES.float()), words("DataError", "whole numbers")),
    "choices of a dense model": ("qwen3", lambda e: mw.expert_choices(e.model, mw.pack([[1, 2]])),
        words("StateError", "no experts")),
}  # fmt: skip


def test_choices_that_cannot_be_are_refused(sources: dict[str, Path]) -> None:
    cases = {
        name: lambda family=family, act=act: trials.said(sources[family], {}, act)
        for name, (family, act, _) in REFUSED.items()
    }  # fmt: skip
    for name, (text,) in worlds.in_turn(1, cases).items():
        assert re.search(REFUSED[name][2], text), text
