"""Losses of reinforcement learning on meshes: equal to the same by hand, refused where they cannot be right."""

from __future__ import annotations

import functools
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import meshwright as mw
from meshwright.engine.loss_documents import LossDocuments
from tests import parts, rl_losses, tiny, trials, worlds
from tests.rl_losses import LOSSES
from tests.words import words

TEMPERATURE = 0.7
# The most tokens of a micro-batch: a data rank gets one, two or four of them.
MAX_TOKENS = {"fsdp=2,ep=2": 48, "tp=2": 160, "cp=2": 44}
MESHES: list[dict[str, int]] = [dict(fsdp=2, ep=2), dict(tp=2), dict(cp=2), dict(pp=2)]
BOTH = dict(fsdp=2, tp=2, ep=2)
ALL_MESHES: list[dict[str, int]] = [
    *MESHES, BOTH, dict(fsdp=2), dict(replicate=2), dict(tp=4), dict(cp=2, tp=2), dict(pp=2, tp=2), dict(fsdp=2, cp=2),
]  # fmt: skip
# Every loss on the first mesh, and every third one on each other axis; in `make matrix` all on all.
TRIED = [
    (mesh, loss)
    for number, mesh in enumerate(ALL_MESHES if parts.ALL else MESHES)
    for loss in (parts.every(3, LOSSES, number) if number else LOSSES)
]
TRIED += [] if parts.ALL else [(BOTH, loss) for loss in parts.every(6, LOSSES)]
FAMILIES = ("qwen3_moe", "qwen3_5") if parts.ALL else ("qwen3_moe",)
STEPPED = (
    LOSSES if parts.ALL else ("ppo", "critic", "pairwise")
)  # in a whole step, and scored: of each mesh at least one


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    at = tmp_path_factory.mktemp("rl")
    few: dict[str, Any] = dict(num_hidden_layers=2, mlp_only_layers=[1])
    made = {name: tiny.directory(at / name, name) for name in ("qwen3_5", "qwen3")}
    return made | {"qwen3_moe": tiny.directory(at / "qwen3_moe", "qwen3_moe", **few)}


def engine_of(source: Path, mesh: dict[str, int], loss: str) -> mw.Engine:
    """Build an engine that changes no weight, on a model for all losses of its head."""
    function, head, _ = LOSSES[loss]
    temperature = 1.0 if head == "value" else TEMPERATURE
    model = _model(source, trials.named(mesh), head)
    return mw.Engine(model, lr=0.0, loss=function, entropy=loss == "gspo", temperature=temperature)


@functools.cache
def _model(source: Path, mesh: str, head: str) -> mw.Model:
    of = next(each for each in [{}, *ALL_MESHES] if trials.named(each) == mesh)
    return mw.load(source, trials.mesh_of(of), dtype=torch.float64, head=head)


def batches_of(mesh: mw.Mesh, loss: str = "ppo", max_tokens: int = 64, **options: Any) -> list[mw.Batch]:
    return mw.batches(
        rl_losses.documents(), mesh, max_tokens=max_tokens, trained=rl_losses.masks(), fields=rl_losses.fields(),
        groups=LOSSES[loss][2], **options,
    )  # fmt: skip


def gradients(
    source: Path, mesh: dict[str, int], loss: str
) -> tuple[list[float], list[dict[str, float]], dict[str, Tensor]]:
    """The losses and the metrics that `backward`, a step and `evaluate` say, and the gradients."""
    engine = engine_of(source, mesh, loss)
    batches = batches_of(engine.model.mesh, loss, MAX_TOKENS.get(trials.named(mesh), 64))
    losses, metrics = [engine.backward(batches)], [dict(engine.metrics)]
    grads = mw.gather(engine.model, "grad")
    engine.discard()
    if loss in STEPPED:
        record = engine.step(batches)
        losses += [record.loss, engine.evaluate(batches)]
        metrics.append(dict(record.metrics))
    return losses, metrics, grads


def expected(source: Path, loss: str) -> tuple[float, dict[str, float], dict[str, Tensor]]:
    """Compute the step by hand: scores of all documents from plain logits, and a loss over lists."""
    engine = engine_of(source, {}, loss)
    actual: dict[str, Any] = {}

    def whole(scores: Any, fields: Any, docs: Any) -> Tensor:
        values = {key: torch.cat(docs.split(x)) for key, x in scores.items()}
        total, actual["metrics"] = rl_losses.by_hand(loss, values)
        actual["loss"] = float(total)
        return total

    engine.loss = mw.Loss(whole, per="micro_batch", normalise=False)
    batch = mw.pack(rl_losses.documents(), trained=rl_losses.masks())
    if loss == "ppo":  # scores at a temperature, from logits that nothing has divided
        logits = mw.logits(engine.model, batch) / TEMPERATURE
        logprobs = logits.log_softmax(-1).gather(1, batch.labels.clamp(min=0)[:, None])[:, 0]
        assert torch.allclose(
            mw.logprobs(engine.model, batch, temperature=TEMPERATURE), logprobs.where(batch.is_target_T, 0.0)
        )
    engine.backward([batch])
    grads = mw.gather(engine.model, "grad")
    engine.discard()
    return actual["loss"], actual["metrics"], grads


_answers: dict[tuple[str, str], Any] = {}


def _expected(source: Path, loss: str) -> Any:
    key = (source.name, loss)
    if key not in _answers:
        cases = {(source.name, name): lambda name=name: expected(source, name) for name in LOSSES}
        _answers.update({k: actual[0] for k, actual in worlds.in_turn(1, cases).items()})
    return _answers[key]


_runs: dict[tuple[str, str], dict[str, list[Any]]] = {}


def _run(source: Path, mesh: dict[str, int], loss: str) -> list[Any]:
    key = (source.name, trials.named(mesh))
    if key not in _runs:
        cases = {name: lambda name=name: gradients(source, mesh, name) for on, name in TRIED if on == mesh}
        _runs[key] = worlds.in_turn(trials.world_of(mesh), cases)
    return _runs[key][loss]


def worst(actual: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert actual.keys() == wanted.keys()
    return max(float((actual[k] - x).norm() / x.norm().clamp(min=1e-12)) for k, x in wanted.items())


@pytest.mark.parametrize(
    ("mesh", "loss"), TRIED, ids=lambda each: each if isinstance(each, str) else trials.named(each)
)
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_by_hand(sources: dict[str, Path], family: str, mesh: dict[str, int], loss: str) -> None:
    value, metrics, grads = _expected(sources[family], loss)
    for rank, (actual, actual_metrics, actual_grads) in enumerate(_run(sources[family], mesh, loss)):
        assert actual == pytest.approx([value] * len(actual), rel=1e-9)
        for each in actual_metrics:
            assert {key: each[key] for key in metrics} == pytest.approx(metrics, rel=1e-9)
        if not rank:
            assert worst(actual_grads, grads) < 1e-9


def _mixing(scores: Any, fields: Any, docs: Any) -> Tensor:
    """Advantages normalised over whatever documents share a micro-batch."""
    reward_D = docs.mean(fields["advantage"])
    return docs.mean(scores["logprobs"]) * (reward_D - reward_D.mean())


def _centred(scores: Any, fields: Any) -> Tensor:
    """Constant advantages of a micro-batch show no mean, and the next micro-batch has one."""
    return -scores["logprobs"] * (fields["advantage"] - fields["advantage"].mean())


def _scaled(scores: Any, fields: Any, docs: Any) -> Tensor:
    advantage_D = docs.mean(fields["advantage"])
    return -docs.mean(scores["logprobs"]) * advantage_D / advantage_D.abs().max()


def _refused_with_constants(loss: Any) -> Any:
    documents, numbers = [[1, 2, 3, 4, 5, 6, 7, 8], [6, 7, 8], [9, 10, 11, 12]], [2.0, 1.0, 1.0]
    fields = {"advantage": [[number] * len(doc) for number, doc in zip(numbers, documents, strict=True)]}
    return lambda e: mw.Engine(e.model, lr=1.0, loss=loss).step(
        mw.batches(documents, e.model.mesh, fields=fields, max_tokens=8)
    )


def _of_prompt(scores: Any, fields: Any) -> Tensor:
    """Each token reads the next one."""
    return -scores["logprobs"] - 0.1 * scores["logprobs"].roll(-1)


def _wrong_metrics(scores: Any, fields: Any, docs: Any) -> Any:
    return -docs.mean(scores["logprobs"]), {"other": docs.mean(scores["logprobs"])}


def _weight_later(engine: mw.Engine) -> None:
    batch = mw.pack([[1, 2, 3], [4, 5]])
    engine.step([batch])
    engine.step([batch.with_fields(weight=torch.ones(5))])


def _late_failure(scores: Any, fields: Any, docs: Any) -> Tensor:
    raise ValueError("no reward for some document")


def _refused(loss: Any, **options: Any) -> Any:
    return lambda e: mw.Engine(e.model, lr=1.0, loss=loss, **options).step(batches_of(e.model.mesh))


def _fails_on_rank_0(engine: mw.Engine) -> None:
    def loss(scores: Any, fields: Any, docs: Any) -> Tensor:
        return _late_failure(scores, fields, docs) if not engine.model.mesh.rank else -docs.mean(scores["logprobs"])

    _refused(mw.Loss(loss, per="document"))(engine)


REFUSED: dict[str, tuple[dict[str, int], Any, str]] = {
    "a document that reads others": (dict(fsdp=2), _refused(mw.Loss(_mixing, per="document")),
        words("DataError", "loss of a document", "other documents", r"groups=", 'per="group"')),
    "a group that reads others": (dict(tp=2), _refused(mw.Loss(_mixing, per="group")),
        words("DataError", "group")),
    "a token that reads constant fields of others": (dict(), _refused_with_constants(_centred),
        words("DataError", "loss of a token", "other tokens")),
    "the same under tp": (dict(tp=2), _refused_with_constants(_centred), words("DataError", "other tokens")),
    "a document that reads constant fields of others": (dict(tp=2), _refused_with_constants(
        mw.Loss(_scaled, per="document")), words("DataError", "other documents")),
    "a function without docs": (dict(), lambda e: mw.Loss(_of_prompt, per="document"),
        words("^ConfigError", r"function\(scores, fields, docs\)", "_of_prompt")),
    "a token that reads the next": (dict(fsdp=2), _refused(_of_prompt),
        words("DataError", "loss of a token", "other tokens", 'per="document"')),
    "a mean of micro-batches": (dict(), lambda e: mw.Loss(rl_losses.dapo, per="micro_batch"),
        words("^ConfigError", "micro_batch", "packed", "normalise=False")),
    "an unknown unit": (dict(), lambda e: mw.Loss(rl_losses.dapo, per="sequence"),
        words("^ConfigError", "per='sequence'", "'document'")),
    "other metrics": (dict(tp=2), _refused(mw.Loss(_wrong_metrics, per="document", metrics=("kl",))),
        words("DataError", r"metrics \['other'\]", "'kl'")),
    "metrics without a name": (dict(), lambda e: mw.Loss(rl_losses.ppo, metrics="kl"), words("^ConfigError", "'kl'")),
    "one rank fails": (dict(tp=2), _fails_on_rank_0, words("no reward for some document")),
    "detached": (dict(), _refused(mw.Loss(lambda s, f, d: d.mean(f["old"]), per="document")),
        words("StateError", "loss", "detached")),
    "temperature": (dict(), _refused(None, temperature=0), words("^ConfigError", "temperature=0", "above 0")),
    "temperature of scores": (dict(fsdp=2), lambda e: mw.scores(e.model, trials.feed(e), temperature=float("nan")),
        words("ConfigError", "temperature=nan")),
    "skip": (dict(), _refused(None, on_nonfinite="ignore"), words("^ConfigError", "on_nonfinite='ignore'", "skip")),
    "other numbers of batches": (dict(fsdp=2), lambda e: mw.logprobs(e.model, trials.feed(e)[: 1 + e.model.mesh.rank]),
        words("^RankError", "rank 1", "2 batches", "the first 1")),
    "other groups": (dict(tp=2), lambda e: mw.Engine(e.model, lr=1.0).step([mw.pack([[1, 2], [3, 4], [5, 6], [7, 8]],
        groups=[[0, 0, 1, 1], [0, 1, 0, 1]][e.model.mesh.rank])]), words("RankError", "different batches")),
    "a loss that no rank but one can call": (dict(fsdp=2), lambda e: (setattr(e, "loss", 3 if e.model.mesh.rank else
        e.loss), e.step(trials.feed(e))), words("ConfigError", "loss=3")),
    "a weight later": (dict(), lambda e: _weight_later(mw.Engine(e.model, lr=1e-3, loss=mw.Loss(lambda s, f, d:
        -d.mean(s["logprobs"]), per="document"))), words("^DataError", "'weight'", "per document")),
    "no list": (dict(), lambda e: mw.by_document(e.model.mesh, mw.pack([[1, 2]]), [torch.zeros(2)]),
        words("^DataError", "by_document takes a list")),
    "max_tokens": (dict(tp=2), lambda e: mw.batches([[1]], e.model.mesh, max_tokens=1),
        words("^DataError", r"max_tokens=1 is less than cp\*tp=2")),
    "documents of each rank": (dict(fsdp=2), lambda e: mw.by_document(e.model.mesh, trials.feed(e),
        [torch.zeros(len(b)) for b in trials.feed(e)]), words("^DataError", "by_document", r"mw\.batches")),
}  # fmt: skip


@pytest.fixture(scope="module")
def messages(sources: dict[str, Path]) -> Any:
    return trials.said_by_all(sources["qwen3"], {name: (mesh, act) for name, (mesh, act, _) in REFUSED.items()})


@pytest.mark.parametrize("name", REFUSED)
def test_a_loss_that_cannot_be_right_is_refused_on_all_ranks(messages: Any, name: str) -> None:
    for text in messages(name):
        assert re.search(REFUSED[name][2], text), text


def _nan_in(engine: mw.Engine, step: int, what: str) -> mw.Loss:
    """A loss that is NaN on one data rank; whose value alone is not finite; or whose gradient alone."""
    bad = engine.model.mesh.data_rank == engine.model.mesh.num_data_ranks - 1

    def loss(scores: Any, fields: Any) -> Any:
        if what == "loss":
            return -scores["logprobs"] * (math.nan if bad else 1.0), {"seen": torch.ones_like(scores["logprobs"])}
        if what == "value":
            return -scores["logprobs"] + (math.inf if bad else 0.0), {"seen": torch.ones_like(scores["logprobs"])}
        return -scores["logprobs"] + (scores["logprobs"] * 0).sqrt() * float(bad), {
            "seen": torch.ones_like(scores["logprobs"])
        }

    return mw.Loss(loss, metrics=("seen",))


def skipped(source: Path, mesh: dict[str, int]) -> tuple[list[Any], bool]:
    """Steps that are not finite between two that are, and whether those are as the two alone."""
    engine, plain = (trials.build(source, mesh, on_nonfinite=each) for each in ("skip", "raise"))
    batches = trials.feed(engine)
    for each in (engine, plain):
        each.step(batches)
    before, good, records = mw.gather(engine.model), engine.loss, []
    for number, what in enumerate(("loss", "value", "gradient")):
        engine.loss = _nan_in(engine, 1, what)
        if number % 2 != ("pp" in mesh):
            engine.backward(batches)
            record: Any = engine.update()
        else:
            record = engine.step(batches)
        records.append((what, record, engine.steps, _equal(before, mw.gather(engine.model))))
    engine.loss = good
    again, alone = engine.step(batches), plain.step(batches)
    same = (again.loss, again.grad_norm, again.step) == (alone.loss, alone.grad_norm, alone.step)
    return records, same and _equal(mw.gather(engine.model), mw.gather(plain.model))


def _equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("mesh", [dict(fsdp=2), dict(pp=2)], ids=trials.named)
def test_a_step_that_is_not_finite_is_skipped_as_a_value(sources: dict[str, Path], mesh: dict[str, int]) -> None:
    for records, as_alone in worlds.run(2, skipped, sources["qwen3"], mesh):
        assert as_alone, "a step that was skipped has left something behind"
        for what, record, steps, same in records:
            assert same, f"parameters changed: {what}"
            assert steps == 1
            if isinstance(record, float):
                assert not math.isfinite(record)
            else:
                assert record.step == 2
                assert re.search("of step 1 is (nan|inf)", record.skipped)
                assert ("gradient norm" if what == "gradient" else "loss") in record.skipped
                assert math.isfinite(record.loss) == (what == "gradient")
                assert record.metrics["seen"] == pytest.approx(1.0)


def unusual(source: Path) -> dict[str, Any]:
    """Losses that write into their scores, divide 0 by 0 in documents without a label, or have weights of any sum."""
    engine = trials.build(source, {})
    documents, trained = [[1, 2, 3, 4], [5, 6, 7], [8, 9]], [[0, 1, 1, 1], [0, 0, 0], [1, 1]]
    batch = mw.pack(documents, trained=trained)

    def grads(loss: Any, batch: mw.Batch = batch) -> dict[str, Tensor]:
        engine.loss = loss
        engine.backward([batch])
        actual = mw.gather(engine.model, "grad")
        engine.discard()
        return actual

    def own_mean(scores: Any, fields: Any, docs: Any) -> Tensor:
        pairs = zip(docs.split(scores["logprobs"]), docs.split(docs.is_target_T), strict=True)
        return torch.stack([-(x * mask).sum() / mask.sum() for x, mask in pairs])  # 0 / 0 without a label

    def clamped(scores: Any, fields: Any, docs: Any) -> Tensor:
        return -docs.mean(scores["logprobs"].clamp_(min=-1e3))

    mean = grads(mw.Loss(lambda s, f, d: -d.mean(s["logprobs"]), per="document"))
    signed = batch.with_fields(weight=torch.tensor([1.0, -1.0, 0, 0, 0, 0, 0, 0, 0]))
    summed = grads(mw.Loss(lambda s, f: -s["logprobs"], normalise=False), signed)
    by_hand = grads(mw.Loss(lambda s, f, d: -(s["logprobs"] * f["w"]).sum(), "micro_batch", normalise=False),
                    batch.with_fields(w=signed.fields["weight"]))  # fmt: skip
    return {
        "0 / 0": worst(grads(mw.Loss(own_mean, per="document")), mean),
        "in place": worst(grads(mw.Loss(clamped, per="document")), mean),
        "weights that sum to 0": worst(summed, by_hand),
    }


def test_unusual_losses(sources: dict[str, Path]) -> None:
    (actual,) = worlds.run(1, unusual, sources["qwen3"])
    assert max(actual.values()) < 1e-9, actual


def test_sums_of_documents_are_wide() -> None:
    """A sum of ones in bfloat16 would end at 256; whole numbers and masks have sums too."""
    docs = LossDocuments([2000, 3], [7, 7], torch.ones(2005, dtype=torch.bool))
    ones = torch.ones(2005, 2, dtype=torch.bfloat16)
    assert docs.sum(ones).tolist() == [[2000.0] * 2, [3.0] * 2]
    assert docs.mean(ones).dtype == torch.float32
    assert docs.sum(ones[:, 0] > 0).tolist() == docs.sum(torch.ones(2005).long()).tolist() == [2000.0, 3.0]
    assert docs.mean(torch.ones(2005, 2, 2)).shape == (2, 2, 2)
    assert docs.group_mean(docs.sum(ones)).tolist() == [[1001.5] * 2]


@pytest.mark.slow
def test_the_example_runs(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Weights to every rank, sleep, samples, a step: rounds of examples/grpo.py; 40 raise the reward to 0.7."""
    from examples import grpo

    monkeypatch.setattr(sys, "argv", ["grpo", "--rounds", "3" if parts.ALL else "1"])
    grpo.main()
    said = capfd.readouterr().out
    assert re.search(r"round   0: reward \d\.\d\d of 1\.5, entropy \d", said), said
