"""Distillation on meshes: losses and gradients equal those by hand from full logits, with any words of a teacher."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import meshwright as mw
from meshwright.models import Want
from meshwright.objectives import Distill
from meshwright.objectives.distillation import IDS, LOGPROBS
from tests import parts, rl_losses, tiny, trials, worlds
from tests.test_rl import worst

VOCAB = 131  # two slices of tp: 66 words and 65
MESHES: dict[str, list[dict[str, int]]] = {
    "qwen3": [dict(fsdp=2), dict(cp=2), *([dict(cp=2, tp=2), dict(tp=4)] if parts.ALL else [])],
    "qwen3_tied": [dict(tp=2), dict(pp=2)],
    "qwen3_moe": [dict(fsdp=2, tp=2, ep=2)],
}
RUNS = [(source, mesh) for source, meshes in MESHES.items() for mesh in meshes]
BATCHES = {1: 136, 2: 68, 4: 36}  # the tokens of a micro-batch, by their number on one data rank
# By name: the objective, the words, the number of micro-batches.
CASES: dict[str, tuple[Distill, str, int]] = {
    "forward": (Distill(top_k=5), "likely", 1),
    "forward at 2": (Distill(2.0, alpha=0.3, top_k=5), "in one slice", 2),
    "reverse at 2": (Distill(2.0, "reverse", alpha=1.0, top_k=5), "at borders", 4),
    "reverse, renormalised": (Distill(1.0, "reverse", rest="renormalise", top_k=5), "likely", 2),
    "forward at 2, renormalised": (Distill(2.0, rest="renormalise", top_k=5), "at borders", 1),
    "a teacher": (Distill(2.0, top_k=9), "of a teacher", 2),
}  # fmt: skip
CUSTOM = "a loss of documents"


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    at = tmp_path_factory.mktemp("distillation")
    made = {name: tiny.directory(at / name, name) for name in MESHES}
    # Another model, with a few rows of padding more; rows that the student lacks must not be its words.
    return {**made, "teacher": tiny.directory(at / "teacher", "qwen3", vocab_size=140, num_hidden_layers=3)}


def fields_of(kind: str) -> dict[str, list[Tensor]]:
    """Words of each token, and log-probabilities that leave a part for the others. Some tokens have fewer words."""
    draw, made = torch.Generator().manual_seed(5), dict[str, list[Tensor]]({IDS: [], LOGPROBS: []})
    for tokens in rl_losses.documents():
        logs = (2 * torch.randn(len(tokens), VOCAB, generator=draw, dtype=torch.float64)).log_softmax(-1)
        logprobs, ids = logs.topk(5, -1)
        if kind == "in one slice":
            logprobs, ids = logs[:, :60].topk(5, -1)
            ids = ids.int()
        elif kind == "at borders":  # of the slices, and the label itself
            ids = torch.tensor([[0, 65, 66, 130, 0]]).repeat(len(tokens), 1)
            ids[:-1, 4] = torch.tensor(tokens[1:])
            ids[torch.isin(ids[:, 4], ids[0, :4]), 4] = -1
            logprobs = logs.gather(1, ids.clamp(min=0))
        ids[::3, 3] = -1
        made[IDS].append(ids)
        made[LOGPROBS].append(logprobs)
    return made


def entropic(scores: Any, fields: Any, docs: Any) -> Tensor:
    """All scores at once, of whole documents: their parts must come back to the right words."""
    assert fields[IDS].shape == scores["word_logprobs"].shape
    both = docs.mean(scores["word_logprobs"].exp()).square().sum(-1) + docs.mean(scores["entropy"])
    return both * docs.mean(scores["logprobs"])


def batches_of(mesh: mw.Mesh, kind: str, num: int) -> list[mw.Batch]:
    fields = None if kind == "of a teacher" else fields_of(kind)
    return mw.batches(
        rl_losses.documents(), mesh, max_tokens=BATCHES[num], trained=rl_losses.masks(), fields=fields
    )  # fmt: skip


Answer = tuple[float, dict[str, float], dict[str, Tensor]]


def answers(at: Mapping[str, Path], source: str, mesh: dict[str, int]) -> dict[str, Any]:
    """All cases on a mesh with one model."""
    engine = trials.build(at[source], mesh)
    model, made = engine.model, dict[str, Any]()
    for name, (objective, kind, num) in CASES.items():
        batches = batches_of(model.mesh, kind, num)
        if kind == "of a teacher":
            teacher = mw.load(at["teacher"], model.mesh, dtype=torch.float64, train=[])
            batches = objective.ask(teacher, batches, model)
        assert model.mesh.num_data_ranks > 1 or len(batches) == num
        engine.loss = objective.loss
        made[name] = _answer(engine, batches)
        if num == 2:
            assert engine.evaluate(batches) == pytest.approx(made[name][0], rel=1e-12)
    loss = mw.Loss(entropic, per="document", words=IDS)
    batches = batches_of(model.mesh, "likely", 2)
    made[CUSTOM] = _answer(mw.Engine(model, lr=1.0, loss=loss, entropy=True, temperature=0.7), batches)
    tops = mw.top_logprobs(model, batches, 70, temperature=0.7)  # more than a slice has
    for name in ("ids", "logprobs"):
        made[name] = mw.by_document(model.mesh, batches, [each[name] for each in tops])
    return made


def _answer(engine: mw.Engine, batches: list[mw.Batch]) -> Answer:
    loss = engine.backward(batches)
    grads = mw.gather(engine.model, "grad")
    engine.discard()
    return loss, dict(engine.metrics), grads


def expected(at: Mapping[str, Path], source: str) -> dict[str, Any]:
    """Compute the same from the logits of one long forward, which autograd differentiates."""
    model = trials.build(at[source], {}).model
    teacher = mw.load(at["teacher"], model.mesh, dtype=torch.float64, train=[])
    made = dict[str, Any]()
    for name, (objective, kind, _) in CASES.items():
        batch = batches_of(model.mesh, kind, 1)[0]
        fields = batch.fields or _likeliest(mw.logits(teacher, batch) / objective.temperature, objective.top_k)
        loss, metrics = by_hand(objective, _logits(model, batch), batch, fields)
        loss.backward()
        made[name] = (float(loss), metrics, mw.gather(model, "grad"))
        model.forget_grads()
    batch = mw.pack(rl_losses.documents(), trained=rl_losses.masks(), fields=fields_of("likely"))
    logs = (_logits(model, batch) / 0.7).log_softmax(-1)
    loss = _entropic(logs, batch)
    loss.backward()
    made[CUSTOM] = (float(loss), {}, mw.gather(model, "grad"))
    top = logs.detach().topk(70, -1)
    return {**made, "ids": batch.split(top.indices), "logprobs": batch.split(top.values)}


def _logits(model: mw.Model, batch: mw.Batch) -> Tensor:
    (part,) = model.parts
    part.balance.begin(torch.arange(len(batch)) < len(batch) - batch.num_filler)
    (logits,) = part(batch.tokens, batch.labels, batch.docs, Want("logits"))
    return logits


def _likeliest(logits: Tensor, k: int) -> dict[str, Tensor]:
    """Return the fields of a teacher, without the words that no student has."""
    logprobs, ids = logits.log_softmax(-1).topk(k, -1)
    assert (ids >= VOCAB).any()
    return {IDS: ids.masked_fill(ids >= VOCAB, -1), LOGPROBS: logprobs}


def by_hand(
    objective: Distill, logits: Tensor, batch: mw.Batch, fields: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, float]]:
    """Sum over tokens and words in plain loops."""
    probs, sure = (logits / objective.temperature).softmax(-1), logits.log_softmax(-1)
    kls, entropies, same = [], [], []
    for t in batch.is_target_T.nonzero()[:, 0].tolist():
        ids = [int(i) for i in fields[IDS][t] if i >= 0]
        p = torch.stack([x for i, x in zip(fields[IDS][t], fields[LOGPROBS][t], strict=True) if i >= 0]).exp()
        q = probs[t, ids]
        same.append(float(p.argmax() == q.argmax()))
        if objective.rest == "bucket":
            p, q = torch.cat([p, 1 - p.sum(0, keepdim=True)]), torch.cat([q, 1 - q.sum(0, keepdim=True)])
        else:
            p, q = p / p.sum(), q / q.sum()
        p, q = (p, q) if objective.kind == "forward" else (q, p)
        kls.append((p * (p / q).log()).sum())
        entropies.append(-sure[t, batch.labels[t]])
    kl, entropy = torch.stack(kls).mean(), torch.stack(entropies).mean()
    loss = objective.alpha * objective.temperature**2 * kl + (1 - objective.alpha) * entropy
    return loss, {"kl": float(kl), "cross_entropy": float(entropy), "agreement": sum(same) / len(same)}


def _entropic(logs: Tensor, batch: mw.Batch) -> Tensor:
    terms = []
    parts_of = [batch.split(x) for x in (logs, batch.fields[IDS], batch.labels)]
    for log, ids, labels in zip(*parts_of, strict=True):
        has = labels >= 0
        if not has.any():
            continue
        own = log.gather(1, ids.clamp(min=0)).masked_fill(ids < 0, 0.0)[has].exp()
        both = own.mean(0).square().sum() - (log[has].exp() * log[has]).sum(-1).mean()
        terms.append(both * log[has].gather(1, labels[has][:, None]).mean())
    return torch.stack(terms).mean()


_expected: dict[str, dict[str, Any]] = {}


def _wanted(sources: Mapping[str, Path], source: str) -> dict[str, Any]:
    if not _expected:
        cases = {name: lambda name=name: expected(sources, name) for name in MESHES}
        _expected.update({name: made[0] for name, made in worlds.in_turn(1, cases).items()})
    return _expected[source]


@pytest.mark.parametrize(
    ("source", "mesh"), RUNS, ids=lambda each: each if isinstance(each, str) else trials.named(each)
)
def test_losses_and_gradients_are_those_by_hand(
    sources: dict[str, Path], source: str, mesh: dict[str, int]
) -> None:  # fmt: skip
    wanted = _wanted(sources, source)
    for rank, made in enumerate(worlds.run(trials.world_of(mesh), answers, sources, source, mesh)):
        for name in (*CASES, CUSTOM):
            (loss, metrics, grads), (wanted_loss, wanted_metrics, wanted_grads) = made[name], wanted[name]
            assert loss == pytest.approx(wanted_loss, rel=1e-9), name
            assert metrics == pytest.approx(wanted_metrics, rel=1e-9), name
            assert rank or worst(grads, wanted_grads) < 1e-9, name
        for found, right in zip(made["ids"], wanted["ids"], strict=True):
            assert torch.equal(found, right)
        torch.testing.assert_close(made["logprobs"], wanted["logprobs"], rtol=1e-9, atol=1e-12)
