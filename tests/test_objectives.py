"""Numbers of objectives: classes and rerankers by hand on every mesh, and every objective with packing off."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import meshwright as mw
from meshwright.data import cut
from meshwright.engine.batching import _units
from meshwright.models import Want
from meshwright.objectives import Classify, Distill, Rerank
from tests import contrast, parts, rl_losses, test_distillation, tiny, trials, worlds
from tests.test_rl import worst

MESHES: list[dict[str, int]] = [dict(cp=2), dict(pp=2), dict(fsdp=2, tp=2, ep=2)]
ALL_MESHES: list[dict[str, int]] = [*MESHES, {}, dict(fsdp=2), dict(tp=2)]
NO, YES = 70, 3  # of both slices of the vocabulary over tp
LENGTHS = {1: 136, 2: 68, 4: 36}  # the tokens of a micro-batch, by their number on one data rank
LAST = {"classify": Classify(), "rerank": Rerank()}

Answer = tuple[float, dict[str, float], dict[str, Tensor]]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    at, few = tmp_path_factory.mktemp("objectives"), dict(num_hidden_layers=2, mlp_only_layers=[1])
    return {
        "lm": tiny.directory(at / "lm", "qwen3_moe", **few),
        "classes": tiny.classifier(at / "classes", "qwen3_moe", "Sequence", num_labels=3, **few),
    }


def engine_of(sources: Mapping[str, Path], mesh: dict[str, int], objective: Any) -> mw.Engine:
    """Build an engine for an objective, or for the next token with None."""
    source = sources["classes" if isinstance(objective, Classify) else "lm"]
    options = (
        {"loss": mw.losses.cross_entropy} if objective is None else {"loss": objective.loss, "head": objective.head}
    )
    return trials.build(source, mesh, router_aux="previous", **options)


def labels_of(name: str) -> list[list[int]]:
    """Return a class, or one of two answers, at the last token of each document."""
    return [
        [-100] * (size - 1) + [(7 * number) % 3 if name == "classify" else (NO, YES)[number * number % 3 % 2]]
        for number, size in enumerate(rl_losses.SIZES)
    ]


def last_batches(mesh: mw.Mesh, name: str, num: int) -> list[mw.Batch]:
    batches = mw.batches(rl_losses.documents(), mesh, max_tokens=LENGTHS[num], labels=labels_of(name))
    return [Rerank.with_answers(each, (NO, YES)) for each in batches] if name == "rerank" else batches


def answer(engine: mw.Engine, batches: list[mw.Batch]) -> Answer:
    loss = engine.backward(batches)
    grads = mw.gather(engine.model, "grad")
    engine.discard()
    return loss, dict(engine.metrics), grads


def of_mesh(sources: Mapping[str, Path], mesh: dict[str, int]) -> dict[tuple[str, int], Answer]:
    """Take one number of micro-batches on each mesh; in `make matrix` all on all."""
    made = {}
    for name, objective in LAST.items():
        engine = engine_of(sources, mesh, objective)
        for num in parts.every(len(LENGTHS), LENGTHS, ALL_MESHES.index(mesh)):
            batches = last_batches(engine.model.mesh, name, num)
            assert engine.model.mesh.num_data_ranks > 1 or len(batches) == num
            made[name, num] = answer(engine, batches)
            assert engine.evaluate(batches) == pytest.approx(made[name, num][0], rel=1e-12)
    return made


def by_hand(sources: Mapping[str, Path], name: str) -> Answer:
    """Compute the step from what the head says of each document alone, and differentiate with autograd."""
    model = engine_of(sources, {}, LAST[name]).model
    (part,) = model.parts
    terms, right = [], []
    for tokens, labels in zip(rl_losses.documents(), labels_of(name), strict=True):
        batch = mw.pack([tokens], labels=[labels])
        part.balance.begin(torch.ones(len(batch), dtype=torch.bool))
        want = Want("values" if name == "classify" else "logits")
        (scores,) = part(batch.tokens, batch.labels, batch.docs, want)
        last = scores[-1] if name == "classify" else scores[-1, [NO, YES]]
        label = labels[-1] if name == "classify" else [NO, YES].index(labels[-1])
        terms.append(-(last[label].exp() / last.exp().sum()).log())
        right.append(float(last[label] == last.max()))
    loss = torch.stack(terms).mean()
    loss.backward()
    return float(loss), {"accuracy": sum(right) / len(right)}, mw.gather(model, "grad")


@functools.cache
def _by_hand(at: tuple[tuple[str, Path], ...]) -> dict[str, Answer]:
    cases = {name: functools.partial(by_hand, dict(at), name) for name in LAST}
    return {name: ranks[0] for name, ranks in worlds.in_turn(1, cases).items()}


@pytest.mark.parametrize("mesh", ALL_MESHES if parts.ALL else MESHES, ids=trials.named)
def test_classes_and_answers_are_those_by_hand(sources: dict[str, Path], mesh: dict[str, int]) -> None:
    wanted = _by_hand(tuple(sources.items()))
    for rank, made in enumerate(worlds.run(trials.world_of(mesh), of_mesh, sources, mesh)):
        for (name, num), (loss, metrics, grads) in made.items():
            of_hand = wanted[name]
            assert loss == pytest.approx(of_hand[0], rel=1e-9), (name, num)
            assert metrics == pytest.approx(of_hand[1], rel=1e-9), (name, num)
            assert rank or worst(grads, of_hand[2]) < 1e-9, (name, num)


def unpacked(batches: list[mw.Batch]) -> list[mw.Batch]:
    """Return a batch for each document, or for each group of them."""
    units = [(batch, unit) for batch in batches for unit in _units(batch)]
    size = max(sum(batch.bounds[n + 1] - batch.bounds[n] for n in unit) for batch, unit in units)
    return [cut(batch, unit, size + size % 2) for batch, unit in units]


def _pairs(mesh: mw.Mesh) -> list[mw.Batch]:
    return mw.batches(
        rl_losses.documents(), mesh, max_tokens=72, trained=rl_losses.masks(), groups=rl_losses.PAIRS,
        fields={"reference": rl_losses.fields()["reference"]},
    )  # fmt: skip


OBJECTIVES: dict[str, tuple[Any, Any]] = {
    "sft": (None, lambda mesh: test_distillation.batches_of(mesh, "of a teacher", 2)),
    **{name: (each, _pairs) for name, each in rl_losses.OBJECTIVES.items()},
    **{name: (each, functools.partial(last_batches, name=name, num=2)) for name, each in LAST.items()},
    "distill": (Distill(2.0, top_k=5), lambda mesh: test_distillation.batches_of(mesh, "likely", 2)),
    "embedding": (contrast.CASES["two batches"][0], lambda mesh: contrast.batches(mesh, 72)),
}


def both_ways(sources: Mapping[str, Path], mesh: dict[str, int], name: str) -> tuple[Answer, Answer]:
    objective, make = OBJECTIVES[name]
    engine = engine_of(sources, mesh, objective)
    packed = make(engine.model.mesh)
    alone = unpacked(packed)
    assert len(packed) < len(alone)
    assert all(len({*each.groups}) == 1 for each in alone)
    return answer(engine, packed), answer(engine, alone)


@pytest.mark.parametrize("mesh", [{}, pytest.param({"tp": 2}, marks=parts.IN_MATRIX)], ids=trials.named)
def test_packing_off_changes_no_number(sources: dict[str, Path], mesh: dict[str, int]) -> None:
    """A micro-batch holds one document, or one group of documents that a term is about."""
    cases = {name: functools.partial(both_ways, sources, mesh, name) for name in parts.every(2, OBJECTIVES)}
    for name, ranks in worlds.in_turn(trials.world_of(mesh), cases).items():
        (loss, metrics, grads), (loss_alone, metrics_alone, grads_alone) = ranks[0]
        assert loss_alone == pytest.approx(loss, rel=1e-9), name
        assert metrics_alone == pytest.approx(metrics, rel=1e-9), name
        assert worst(grads_alone, grads) < 1e-9, name
