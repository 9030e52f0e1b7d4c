"""Distillation on meshes: losses and gradients equal those by hand from full logits, with any candidates."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import meshwright as mw
from meshwright.models import Want
from meshwright.objectives import Distill, TeacherScores, TeacherScoresWriter, distillation, weights_fingerprint
from meshwright.objectives.distillation import IDS, LOGPROBS, divergence
from meshwright.ops.part_sizes import shrunk_part_sizes
from tests import parts, rl_losses, tiny, trials, worlds
from tests.test_rl import worst
from tests.words import words

VOCAB = 131  # two slices of tp: 66 tokens and 65
MESHES: dict[str, list[dict[str, int]]] = {
    "qwen3_tied": [dict(tp=2), dict(pp=2)],
    "qwen3_moe": [dict(fsdp=2, ep=2), dict(cp=2), *([dict(fsdp=2, tp=2, ep=2)] if parts.ALL else [])],
    **({"qwen3": [dict(cp=2), dict(fsdp=2), dict(cp=2, tp=2), dict(tp=4)]} if parts.ALL else {}),
}
RUNS = [(source, mesh) for source, meshes in MESHES.items() for mesh in meshes]
BATCHES = {1: 136, 2: 68, 4: 36}  # the tokens of a micro-batch, by their number on one data rank
# By name: the objective, the candidates, the number of micro-batches.
CASES: dict[str, tuple[Distill, str, int]] = {
    "forward": (Distill(top_k=5), "likely", 1),
    "forward at 2": (Distill(2.0, alpha=0.3, top_k=5), "in one slice", 2),
    "reverse at 2": (Distill(2.0, "reverse", alpha=1.0, top_k=5), "at borders", 4),
    "reverse, renormalised": (Distill(1.0, "reverse", rest="renormalise", top_k=5), "likely", 2),
    "forward at 2, renormalised": (Distill(2.0, rest="renormalise", top_k=5), "at borders", 1),
    "a teacher": (Distill(2.0, top_k=9), "of a teacher", 2),
}  # fmt: skip
CUSTOM = "a loss of documents"


def tried(mesh: dict[str, int]) -> list[str]:
    """Return all cases under tp, where the slices of the vocabulary matter, and every third one on other axes."""
    return list(CASES) if "tp" in mesh else parts.every(3, CASES, 2 if "fsdp" in mesh else "cp" in mesh)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    at = tmp_path_factory.mktemp("distillation")
    made = {name: tiny.directory(at / name, name) for name in {"qwen3", *MESHES}}
    # Another model, with a few rows of padding more; rows that the student lacks must not be candidates.
    return {
        **made,
        "scores": at / "scores",
        "teacher": tiny.directory(at / "teacher", "qwen3", vocab_size=140, num_hidden_layers=3),
    }


def fields_of(kind: str) -> dict[str, list[Tensor]]:
    """Candidates of each token, and log-probabilities that leave a part for the others. Some tokens have fewer."""
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
    """All scores at once, of whole documents: their parts must come back to the right candidates."""
    assert fields[IDS].shape == scores["candidate_logprobs"].shape
    both = docs.mean(scores["candidate_logprobs"].exp()).square().sum(-1) + docs.mean(scores["entropy"])
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
    for name, (objective, kind, num) in ((name, CASES[name]) for name in tried(mesh)):
        batches = batches_of(model.mesh, kind, num)
        if kind == "of a teacher":
            teacher = mw.load(at["teacher"], model.mesh, dtype=torch.float64, train=[])
            batches = objective.ask(teacher, batches, model)
            _write_and_read(at["scores"] / trials.named(mesh), teacher, batches)
        assert model.mesh.num_data_ranks > 1 or len(batches) == num
        engine.loss = objective.loss
        made[name] = _answer(engine, batches)
        if num == 2:
            assert engine.evaluate(batches) == pytest.approx(made[name][0], rel=1e-12)
    loss = mw.Loss(entropic, per="document", candidates=IDS)
    batches = batches_of(model.mesh, "likely", 2)
    made[CUSTOM] = _answer(mw.Engine(model, lr=1.0, loss=loss, entropy=True, temperature=0.7), batches)
    tops = mw.top_logprobs(model, batches, 70, temperature=0.7)  # more than a slice has
    for name in ("ids", "logprobs"):
        made[name] = mw.by_document(model.mesh, batches, [each[name] for each in tops])
    return made


def _write_and_read(at: Path, teacher: mw.Model, batches: list[mw.Batch]) -> None:
    """Files hold what the teacher says, whoever wrote them; a second writer has nothing left to do."""
    objective = CASES["a teacher"][0]
    written = []
    for _ in range(2):
        with shrunk_part_sizes(), TeacherScoresWriter(at, objective, teacher, teacher="one") as writer:
            writer.score(batches)
        written.append(sorted(at.iterdir()))
    assert written[0] == written[1]
    assert len(written[0]) > 1 + teacher.mesh.num_data_ranks
    stored = TeacherScores(at, replace(objective, top_k=8), teacher="one")
    assert len(stored) == len(rl_losses.SIZES)
    for batch in batches:
        read = stored.add_to(replace(batch, fields={}), VOCAB)
        end = len(batch) - batch.num_filler
        assert torch.equal(read.fields[IDS][:end], batch.fields[IDS][:end, :8].int())
        assert torch.equal(read.fields[LOGPROBS][:end], batch.fields[LOGPROBS][:end, :8].float())


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
    """Return the fields of a teacher, without the tokens that no student has."""
    logprobs, ids = logits.log_softmax(-1).topk(k, -1)
    assert (ids >= VOCAB).any()
    return {IDS: ids.masked_fill(ids >= VOCAB, -1), LOGPROBS: logprobs}


def by_hand(
    objective: Distill, logits: Tensor, batch: mw.Batch, fields: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, float]]:
    """Sum over tokens and candidates in plain loops."""
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
        for name in (*tried(mesh), CUSTOM):
            (loss, metrics, grads), (wanted_loss, wanted_metrics, wanted_grads) = made[name], wanted[name]
            assert loss == pytest.approx(wanted_loss, rel=1e-9), name
            assert metrics == pytest.approx(wanted_metrics, rel=1e-9), name
            assert rank or worst(grads, wanted_grads) < 1e-9, name
        for got, right in zip(made["ids"], wanted["ids"], strict=True):
            assert torch.equal(got, right)
        torch.testing.assert_close(made["logprobs"], wanted["logprobs"], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["forward", "reverse"])
@pytest.mark.parametrize("distance", [2.0, 8.0, 14.0, 18.0, 24.0])
def test_a_small_rest_is_right_in_float32(kind: str, distance: float) -> None:
    """Two candidates have all but a part of 0.1 to 1e-10, which float32 does not see in a sum near 1."""
    others = torch.randn(20, generator=torch.Generator().manual_seed(1), dtype=torch.float64) - distance
    both = [
        torch.cat([torch.tensor(own, dtype=torch.float64), others * 1.01])[None] for own in ([0.6, 0.3], [0.2, 0.9])
    ]

    def differentiated(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        logits = both[1].to(dtype).requires_grad_()
        teacher, student = (each.log_softmax(-1) for each in (both[0].to(dtype), logits))
        rest = student[:, 2:].logsumexp(-1)
        value = divergence(teacher[:, :2], student[:, :2], torch.ones(1, 2, dtype=torch.bool), rest, kind=kind)
        return value.detach().double(), torch.autograd.grad(value.sum(), logits)[0].double()

    for got, right in zip(differentiated(torch.float32), differentiated(torch.float64), strict=True):
        assert (got - right).abs().max() <= 2e-6


@pytest.mark.parametrize("kind", ["forward", "reverse"])
@pytest.mark.parametrize("rest", ["bucket", "renormalise"])
def test_sure_candidates_are_finite(kind: str, rest: str) -> None:
    """Sums that round to 1 or above, of stored float16 too; tokens with fewer candidates, or none at all."""
    teacher = torch.tensor([[1e-4, -30.0], [-1e-4, 0.0], [0.0, 0.0]])
    student = torch.tensor([[0.0, -40.0], [-20.0, 0.0], [0.0, 0.0]], requires_grad=True)
    is_candidate = torch.tensor([[True, True], [True, False], [False, False]])
    rests = torch.tensor([-90.0, -1e-6, 0.0]) if rest == "bucket" else None
    values = divergence(teacher, student, is_candidate, rests, kind=kind)[:2]
    (gradient,) = torch.autograd.grad(values.sum(), student)
    assert values.isfinite().all()
    assert gradient[:2].isfinite().all()


def test_equal_distributions_have_no_distance() -> None:
    whole = torch.randn(5, 9, dtype=torch.float64).log_softmax(-1)
    logs = whole[:, :6]
    for rest in (whole[:, 6:].logsumexp(-1), None):
        for kind in ("forward", "reverse"):
            assert divergence(logs, logs, torch.ones(5, 6, dtype=torch.bool), rest, kind=kind).abs().max() < 1e-14


SURE, PAIR = Distill(alpha=1.0, top_k=2), (0, 130)  # of both slices of tp


def _sure_batch(dtype: torch.dtype) -> mw.Batch:
    batch = mw.pack([[1, 2, 3, 4, 5, 6], [7, 8, 9]], length=10)
    logprobs = torch.tensor([0.5, 0.3], dtype=dtype).log().expand(len(batch), 2).contiguous()
    return batch.with_fields(**{IDS: torch.tensor([PAIR]).repeat(len(batch), 1), LOGPROBS: logprobs})


def _sure_student(source: Path) -> None:
    """Change the rows of two tokens in the head so that every token of the batch predicts them."""
    batch, file = _sure_batch(torch.float64), source / "model.safetensors"
    logits = mw.logits(mw.load(source, mw.Mesh(), dtype=torch.float64), batch)
    weights = load_file(file)
    direction = weights["lm_head.weight"].double().T @ torch.linalg.pinv(logits).sum(1)
    weights["lm_head.weight"][list(PAIR)] = (torch.tensor([[25.3], [25.0]]) * direction).float()
    save_file(weights, file, metadata={"format": "pt"})


def _of_sure_student(source: Path, mesh: dict[str, int], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return gradients, and how much the student leaves to all other tokens."""
    model, batch = mw.load(source, trials.mesh_of(mesh), dtype=dtype), _sure_batch(dtype)
    rest = mw.logits(model, batch).log_softmax(-1).double().exp()[:8]
    rest[:, PAIR] = 0.0
    engine = mw.Engine(model, lr=1.0, loss=SURE.loss)
    loss = engine.backward([batch])
    return {"loss": torch.tensor(loss), "rest": rest.sum(-1), **mw.gather(model, "grad")}


def test_a_sure_student_learns_what_its_teacher_leaves_to_other_tokens(tmp_path: Path) -> None:
    """It gives two tokens all but about 1e-9. In float32, 1 minus their sum is 0, and has no gradient."""
    source = tiny.directory(tmp_path / "m", "qwen3")
    worlds.run(1, _sure_student, source)
    [exact] = worlds.run(1, _of_sure_student, source, {}, torch.float64)
    rest = exact.pop("rest")
    assert ((rest > 5e-10) & (rest < 1e-9)).all()
    for mesh in ({}, {"tp": 2}):
        made = worlds.run(trials.world_of(mesh), _of_sure_student, source, mesh, torch.float32)[0]
        for name, right in exact.items():
            assert (made[name].double() - right).norm() <= 1e-4 * right.norm(), (mesh, name)


def _step(engine: mw.Engine, loss: Any = None, **fields: Any) -> None:
    batch = mw.pack([[1, 2, 3], [4, 5]])
    options = {"loss": loss or Distill(top_k=2).loss, **{k: fields.pop(k) for k in ("temperature",) if k in fields}}
    mw.Engine(engine.model, lr=1e-3, **options).step([batch.with_fields(**fields)])


def _of(rows: list[list[int]]) -> dict[str, Tensor]:
    return {IDS: torch.tensor(rows), LOGPROBS: torch.full((len(rows), len(rows[0])), -1.0)}


PLAIN = [[1, 2]] * 5
REFUSED: dict[str, tuple[Any, str]] = {
    "no candidates": (_step, words("DataError", "no field 'teacher_ids'", "with_fields")),
    "no log-probabilities": (lambda e: _step(e, teacher_ids=torch.tensor(PLAIN)),
        words("DataError", "no field 'teacher_logprobs'", "Distill.ask")),
    "a candidate of another vocabulary": (lambda e: _step(e, **_of([*PLAIN[:3], [1, 131], [1, 2]])),
        words("DataError", "candidate 131", "token 3", "vocabulary of 131")),
    "candidates as numbers with a point": (lambda e: _step(e, teacher_ids=torch.ones(5, 2)),
        words("DataError", "float32", "whole numbers")),
    "one candidate a token": (lambda e: _step(e, teacher_ids=torch.ones(5).long()), words("DataError", r"\(5,\)", "K")),
    "a temperature of the engine too": (lambda e: _step(e, **_of(PLAIN), temperature=2.0),
        words("ConfigError", "temperature=2.0", "candidate_temperature=1.0", "leave one")),
    "a temperature without candidates": (lambda e: mw.Loss(entropic, per="document", candidate_temperature=2.0),
        words("ConfigError", "candidate_temperature=2.0", "candidates=")),
    "the rest of nothing": (lambda e: mw.Loss(entropic, "document", rest=True),
        words("ConfigError", "rest=True", "candidates=")),
    "a rest that is no choice": (lambda e: mw.Loss(entropic, "document", candidates=IDS, rest="bucket"),
        words("ConfigError", "rest='bucket'", "True or False")),
    "no other tokens": (lambda e: Distill(top_k=131).ask(e.model, [mw.pack([[1, 2]])], e.model),
        words("ConfigError", "top_k=131", "131", "renormalise")),
    "more tokens than there are": (lambda e: mw.top_logprobs(e.model, mw.pack([[1, 2]]), 132),
        words("ConfigError", "k=132", "131")),
    "likeliest tokens of a critic": (lambda e: mw.top_logprobs(trials.build(e.model.directory, {}, head="value").model,
        mw.pack([[1, 2]]), 2), words("StateError", "top_logprobs", "head=")),
    "an unknown kind": (lambda e: Distill(kind="js"), words("ConfigError", "kind='js'", "forward")),
    "rows of three": (lambda e: mw.pack([[1, 2]], fields={"x": [torch.zeros(2, 3, 4)]}),
        words("DataError", r"x has shape \(2, 3, 4\)")),
}  # fmt: skip


@pytest.fixture(scope="module")
def messages(sources: dict[str, Path]) -> dict[str, str]:
    def of_all() -> dict[str, str]:
        engine = trials.build(sources["qwen3"], {})
        return {name: trials.error_of(lambda act=act: act(engine)) for name, (act, _) in REFUSED.items()}

    return worlds.run(1, of_all)[0]


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_right_is_refused(messages: dict[str, str], name: str) -> None:
    assert re.search(REFUSED[name][1], messages[name]), messages[name]


def test_tokens_that_the_student_lacks_are_no_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of padding of a larger vocabulary: asked for, and read from files, whose K may be larger too."""
    batch, objective = mw.pack([[5, 6]], length=3), Distill(2.0, top_k=2)
    ids, logprobs = torch.tensor([[8, 9, 1], [9, 8, 1]]), torch.tensor([[-0.5, -1.0, -3.0]] * 2)
    asked: list[Any] = []

    def top(model: Any, batches: Any, k: int, *, temperature: float) -> Any:
        asked.append((model, k, temperature))
        padded = [torch.cat([x[:, :k], torch.zeros(1, k, dtype=x.dtype)]) for x in (ids, logprobs)]
        return [dict(zip(("ids", "logprobs"), padded, strict=True)) for _ in batches]

    monkeypatch.setattr(distillation, "top_logprobs", top)
    teacher, student = (SimpleNamespace(blueprint=SimpleNamespace(vocab=num)) for num in (12, 9))
    [made] = objective.ask(cast(Any, teacher), [batch], cast(Any, student))
    assert asked == [(teacher, 2, 2.0)]
    monkeypatch.setattr(TeacherScores, "document", lambda *_: (ids[:, :2], logprobs[:, :2]))
    stored = object.__new__(TeacherScores)
    stored.objective = objective
    for each in (made, stored.add_to(batch, 9)):
        assert each.fields[IDS][:2].tolist() == [[8, -1], [-1, 8]]
        assert each.fields[LOGPROBS][:2].tolist() == [[-0.5, -1.0]] * 2


def test_files_of_scores_never_get_an_earlier_name(tmp_path: Path) -> None:
    """A user may have removed one of them. Each data rank has names of its own."""
    for name in ("scores-00001-00000", "scores-00001-00002", "scores-00000-00007"):
        (tmp_path / f"{name}.safetensors").write_bytes(b"")
    tensors = {"a.ids": torch.zeros(2, 3, dtype=torch.int32)}
    writer: Any = SimpleNamespace(
        directory=tmp_path, mesh=SimpleNamespace(data_rank=1), _tensors=tensors, _num_bytes=24
    )
    for _ in range(2):
        TeacherScoresWriter._flush(writer)
    assert (writer._tensors, writer._num_bytes) == ({}, 0)
    assert load_file(tmp_path / "scores-00001-00003.safetensors").keys() == {"a.ids"}
    assert len([*tmp_path.iterdir()]) == 4


def test_scores_of_another_teacher_are_refused(sources: dict[str, Path], tmp_path: Path) -> None:
    assert worlds.run(1, _other_scores, sources["qwen3"], tmp_path) == [None]


def _other_scores(source: Path, at: Path) -> None:
    model, batch = trials.build(source, {}).model, mw.pack([[1, 2, 3], [4, 5]], length=6)
    objective, teacher = Distill(2.0, top_k=3), weights_fingerprint(source)
    with TeacherScoresWriter(at, objective, model, teacher=teacher, dtype="float16") as writer:
        writer.score([batch])
    assert len({file.stat().st_mode for file in at.iterdir() if file.is_file()}) == 1, "whoever may read one reads all"
    made = TeacherScores(at, objective, teacher=teacher).add_to(batch, 131)
    exact = objective.ask(model, [batch], model)[0]
    assert torch.equal(made.fields[IDS], exact.fields[IDS].masked_fill(exact.fields[IDS] < 0, 0))
    assert torch.allclose(made.fields[LOGPROBS].double(), exact.fields[LOGPROBS].double(), rtol=1e-3)
    engine = mw.Engine(model, lr=1e-3, loss=objective.loss)
    assert engine.step([made]).metrics["kl"] == pytest.approx(0.0, abs=1e-5)
    more: dict[str, Any] = {
        "'other' is wanted": lambda: TeacherScores(at, objective, teacher="other"),
        "temperature=2.0, and 1.0": lambda: TeacherScores(at, Distill(top_k=3)),
        "top_k=3, and the objective top_k=4": lambda: TeacherScores(at, Distill(2.0, top_k=4)),
        "dtype='float16', and 'float32'": lambda: TeacherScoresWriter(at, objective, model, teacher=teacher),
        "document of 2 tokens": lambda: TeacherScores(at, objective).add_to(mw.pack([[7, 8]]), 131),
        "holds no scores": lambda: TeacherScores(at / "none", objective),
        "dtype='int8'": lambda: TeacherScoresWriter(at, objective, model, teacher="", dtype="int8"),
    }
    for text, act in more.items():
        assert text in trials.error_of(act), trials.error_of(act)
    changed = mw.load(tiny.directory(at / "wide", "qwen3", vocab_size=3000), model.mesh, train=[])
    assert "3,000 tokens and that of the student 131" in trials.error_of(lambda: objective.ask(changed, [batch], model))
