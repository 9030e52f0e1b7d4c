"""The engine's user interface: losses and weights, evaluation, frozen parameters, mistakes that are named."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

import meshwright as mw
from meshwright.engine.mtp import MtpRecord
from meshwright.engine.step_results import Results, norms_if_applied, results_of
from tests import parts, tiny, trials, worlds
from tests.trials import build, feed
from tests.words import words

Ran = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def ran(source: Path) -> Ran:
    """Return what all ranks of a mesh say in a function of RUNS. Runs on equally many ranks share a world."""
    runs = {_key(function, mesh): (function, mesh) for function, mesh in RUNS}

    def run(group: Sequence[str]) -> dict[str, list[Any]]:
        acts = {key: functools.partial(runs[key][0], source, runs[key][1]) for key in group}
        return worlds.in_turn(trials.world_of(runs[group[0]][1]), acts)

    shared = worlds.shared({key: trials.world_of(mesh) for key, (_, mesh) in runs.items()}, run)
    return lambda function, mesh: shared(_key(function, mesh))


def _key(function: Callable[..., Any], mesh: dict[str, int]) -> str:
    return f"{function.__name__} {trials.named(mesh)}"


def evaluated_between_steps(source: Path, mesh: dict[str, int]) -> list[float]:
    engine = build(source, mesh)
    out = [engine.evaluate(feed(engine))]
    for _ in range(2):
        out += [engine.step(feed(engine)).loss, engine.evaluate(feed(engine))]
    mw.logits(engine.model, feed(engine)[0])
    return [*out, engine.step(feed(engine)).loss]


EVALUATED: list[dict[str, int]] = [dict(fsdp=2), *([dict(), dict(tp=2), dict(fsdp=2, tp=2)] if parts.ALL else [])]


@pytest.mark.parametrize("mesh", EVALUATED, ids=trials.named)
def test_evaluation_sees_every_update_and_changes_nothing(ran: Ran, mesh: dict[str, int]) -> None:
    losses = ran(evaluated_between_steps, mesh)
    assert all(of_rank == losses[0] for of_rank in losses)
    before, *rest = losses[0]
    assert before == pytest.approx(rest[0], rel=1e-12)  # evaluate == the loss of the step that follows
    assert rest[1] == pytest.approx(rest[2], rel=1e-12)
    assert rest[3] == pytest.approx(rest[4], rel=1e-12)
    assert rest[-1] < before


def inference(source: Path, mesh: dict[str, int]) -> tuple[Tensor, Tensor, Tensor]:
    model = mw.load(source, trials.mesh_of(mesh), dtype=torch.float64)
    value = mw.load(source, model.mesh, dtype=torch.float64, head="value")
    batch = tiny.batches(model.mesh.axes.data_rank(model.mesh.rank))[0]
    return mw.logits(model, batch), mw.logprobs(model, batch), mw.logits(value, batch)


INFERRED: list[dict[str, int]] = [dict(fsdp=2, tp=2), *([dict(tp=2), dict(tp=4)] if parts.ALL else [])]


@pytest.mark.parametrize("mesh", INFERRED, ids=trials.named)
def test_logits_and_logprobs_are_the_same_on_all_ranks_of_a_data_rank(ran: Ran, mesh: dict[str, int]) -> None:
    one = ran(inference, {})[0]
    for result in ran(inference, mesh)[: mesh["tp"]]:
        for ours, reference in zip(result, one, strict=True):
            assert ours.shape == reference.shape
            assert torch.allclose(ours, reference, rtol=0, atol=1e-10)
    logits, logprobs, _ = one
    batch = tiny.batches(0)[0]
    picked = logits.log_softmax(-1).gather(1, batch.labels.clamp_min(0)[:, None])[:, 0]
    assert torch.allclose(logprobs, picked * (batch.labels >= 0), atol=1e-10)


def weighted(source: Path, mesh: dict[str, int]) -> tuple[float, dict[str, Tensor]]:
    def reinforce(scores: Any, fields: Any) -> Tensor:
        return -scores["logprobs"] * fields["advantage"] - 0.1 * scores["entropy"]

    engine = build(source, mesh, loss=reinforce, entropy=True)
    data_rank, num = engine.model.mesh.axes.data_rank(engine.model.mesh.rank), engine.model.mesh.axes.num_data_ranks
    batches = [_with_fields(rank) for rank in range(data_rank, 2, num)]
    return engine.backward(batches), mw.gather(engine.model, "grad")


def _with_fields(seed: int) -> mw.Batch:
    g = torch.Generator().manual_seed(seed)
    docs = [torch.randint(131, (n,), generator=g).tolist() for n in ((9, 20) if seed else (3, 2, 1))]
    fields = {name: [torch.rand(len(d), generator=g).tolist() for d in docs] for name in ("advantage", "weight")}
    return mw.pack(docs, length=30, fields=fields)


WEIGHTED: list[dict[str, int]] = parts.every(2, [dict(fsdp=2), dict(fsdp=2, tp=2), dict(tp=2)])


@pytest.mark.parametrize("mesh", WEIGHTED, ids=trials.named)
def test_own_loss_with_weights_and_entropy(ran: Ran, mesh: dict[str, int]) -> None:
    ref_loss, ref = ran(weighted, {})[0]
    loss, grads = ran(weighted, mesh)[0]
    assert loss == pytest.approx(ref_loss, rel=1e-12)
    for name, grad in ref.items():
        assert (grads[name] - grad).norm() <= 1e-9 * grad.norm(), name


def test_weights_divide_by_their_sum(ran: Ran) -> None:
    loss, _ = ran(weighted, {})[0]
    batches, result = [_with_fields(0), _with_fields(1)], ran(scored, {})[0]
    total = weight = 0.0
    for batch, (logprobs, entropy) in zip(batches, result, strict=True):
        w = batch.fields["weight"] * (batch.labels >= 0)
        total += float((w * (-logprobs * batch.fields["advantage"] - 0.1 * entropy)).sum())
        weight += float(w.sum())
    assert loss == pytest.approx(total / weight, rel=1e-6)  # fields are float32


def scored(source: Path, mesh: dict[str, int]) -> list[tuple[Tensor, Tensor]]:
    model = mw.load(source, trials.mesh_of(mesh), dtype=torch.float64)
    out = []
    for batch in (_with_fields(0), _with_fields(1)):
        logp = mw.logits(model, batch).log_softmax(-1)
        out.append((mw.logprobs(model, batch), -(logp.exp() * logp).sum(-1)))
    return out


def frozen(source: Path, mesh: dict[str, int]) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
    engine = build(source, mesh, train=["layers.1.*", "head.*"])
    before = mw.gather(engine.model)
    engine.backward(feed(engine))
    grads = list(mw.gather(engine.model, "grad"))
    engine.update()
    return before, mw.gather(engine.model), grads


def test_frozen_parameters_stay(ran: Ran) -> None:
    before, after, grads = ran(frozen, BOTH)[0]
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert (
        moved == set(grads) == {n for n in before if "layers.1." in n or n in ("lm_head.weight", "model.norm.weight")}
    )


def decay_only(source: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    engine = build(source, {}, optimizer=mw.AdamW(weight_decay=0.5))
    before = mw.gather(engine.model)
    engine.backward(feed(engine))
    for parameter in trials.parameters(engine.model):
        parameter.grad.zero_()
    engine.update()
    return before, mw.gather(engine.model)


def test_weight_decay_as_declared(tmp_path: Path) -> None:
    source = tiny.directory(tmp_path / "m", "qwen3_5")
    before, after = worlds.run(1, decay_only, source)[0]
    kept = {name for name in before if torch.equal(before[name], after[name])}
    assert kept == {n for n in before if n.endswith(("norm.weight", "A_log", "dt_bias"))}


def adam(source: Path, mesh: dict[str, int]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Three steps of ours, and of torch's AdamW and clipping on whole tensors with the same gradients."""
    engine = build(source, mesh, optimizer=mw.AdamW(betas=(0.8, 0.97), eps=1e-6, weight_decay=0.3), max_norm=0.05)
    plain = {name: torch.nn.Parameter(t.double()) for name, t in mw.gather(engine.model).items()}
    groups = [[p for n, p in plain.items() if ("norm" not in n) == decayed] for decayed in (True, False)]
    torchs = torch.optim.AdamW(
        [{"params": groups[0], "weight_decay": 0.3}, {"params": groups[1], "weight_decay": 0.0}],
        lr=1e-2, betas=(0.8, 0.97), eps=1e-6,
    )  # fmt: skip
    for _ in range(3):
        engine.backward(feed(engine))
        grads = mw.gather(engine.model, "grad")
        norm = torch.stack([g.norm() for g in grads.values()]).norm()  # torch's own clipping adds 1e-6 to it
        for name, grad in grads.items():
            plain[name].grad = grad * (0.05 / norm)
        torchs.step()
        engine.update()
    return _masters(engine), {name: p.detach() for name, p in plain.items()}


def _masters(engine: mw.Engine) -> dict[str, Tensor]:
    """The float64 parameters by Hugging Face name: gradients are handed out in the dtype in which they are stored."""
    for parameter in trials.parameters(engine.model):
        parameter.grad = parameter.detach().clone()
    return mw.gather(engine.model, "grad")


def test_three_steps_are_those_of_torch(ran: Ran) -> None:
    result, expected = ran(adam, {})[0]
    for name, p in expected.items():
        assert torch.allclose(result[name], p, rtol=0, atol=1e-12), name


def recovered_in_old_torch(source: Path, mesh: dict[str, int]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    with pytest.MonkeyPatch.context() as patch:  # torch before 2.13
        patch.delattr(FSDPModule, "reset_iter_state", raising=False)
        return recovered(source, mesh)


def recovered(source: Path, mesh: dict[str, int]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    calls = []

    def fails_once(scores: Any, fields: Any) -> Tensor:
        calls.append(scores["logprobs"].requires_grad)
        if sum(calls) == 2:
            raise RuntimeError("the user's own mistake")
        return -scores["logprobs"]

    engine, fine = build(source, mesh, loss=fails_once), build(source, mesh)
    with pytest.raises(RuntimeError):
        engine.backward(feed(engine))
    engine.backward(feed(engine))
    fine.backward(feed(fine))
    return mw.gather(engine.model, "grad"), mw.gather(fine.model, "grad")


RECOVERED: list[dict[str, int]] = [dict(fsdp=2), *([dict(), dict(replicate=2)] if parts.ALL else [])]


@pytest.mark.parametrize("function", [recovered, recovered_in_old_torch])
@pytest.mark.parametrize("mesh", RECOVERED, ids=trials.named)
def test_a_step_that_failed_half_way_leaves_nothing(ran: Ran, mesh: dict[str, int], function: Any) -> None:
    result, expected = ran(function, mesh)[0]
    for name, grad in expected.items():
        assert (result[name] - grad).norm() <= 1e-12 * grad.norm(), name


def values_of_last_tokens(source: Path, mesh: dict[str, int]) -> tuple[float, float]:
    engine = build(source, mesh, head="value", loss=mw.losses.squared_error)
    weigh = [[0.0, 0.0, 1.0], [0.0, 2.0]]
    batch = lambda last: mw.pack(  # noqa: E731 - two batches that differ in one number
        [[1, 2, 3], [4, 5]],
        labels=[[-100, -100, 0], [-100, 0]],
        length=8,
        fields={"target": [[0.0, 0.0, 1.0], [0.0, last]], "weight": weigh},
    )
    value = mw.logits(engine.model, batch(0.0))
    expected = ((value[2] - 1) ** 2 / 2 + 2 * (value[4] - 3) ** 2 / 2) / 3
    return engine.evaluate([batch(3.0)]), float(expected)


@pytest.mark.parametrize(
    ("loss", "norms", "head", "text"),
    [
        (1.0, (1.0, 1.0), 1.0, ""),
        (math.nan, (math.nan, 1.0), 1.0, "the loss of step 7 is nan"),
        (1.0, (math.inf, 1.0), 1.0, "the gradient norm of step 7 is inf"),
        (1.0, (1.0, 1.0), math.inf, "the loss of the MTP head of step 7 is inf"),
        (1.0, (1.0, math.nan), 1.0, "the gradient norm of the MTP head of step 7 is nan"),
        (1.0, (1.0,), 1.0, ""),
    ],
)
def test_the_number_that_is_not_finite_is_named(loss: float, norms: tuple[float], head: float, text: str) -> None:
    """A metric may be anything. The MTP head has a norm of its own where it is clipped alone."""
    shares = [loss - 0.25, 0.25, head, 0.5, math.nan, 3.0]
    made = results_of(shares, norms, torch.zeros(0), True, ["a", "b"])
    assert made.nonfinite(7) == text
    assert (made.router_loss, made.metrics["b"], math.isnan(made.metrics["a"])) == (0.25, 3.0, True)
    assert made.mtp is not None
    assert (made.mtp.acceptance, made.mtp.grad_norm is None) == (0.5, len(norms) == 1)
    without = results_of([*shares[:2], *shares[4:]], norms[:1], torch.zeros(0), False, ["a", "b"])
    assert without.mtp is None
    assert without.metrics["b"] == 3.0
    assert Results(mtp=MtpRecord(1.0, 1.0)).nonfinite(1) == "", "after backward there is no norm"


@pytest.mark.parametrize(
    ("reduced", "norms", "applied"),
    [
        ([0.0, 1.0, 0.5, 2.0], [3.0], True),
        ([0.0, 1.0, 0.5, math.nan], [3.0], True),  # a metric
        ([1.0, 1.0, 0.5, 2.0], [3.0], False),  # the loss has failed on a rank
        ([0.0, math.nan, 0.5, 2.0], [3.0], False),
        ([0.0, 1.0, math.inf, 2.0], [3.0], False),
        ([0.0, 1.0, 0.5, 2.0], [3.0, math.inf], False),
    ],
)
def test_norms_are_no_numbers_where_a_step_raises(reduced: list[float], norms: list[float], applied: bool) -> None:
    """A fused update multiplies by them before the host knows."""
    result = norms_if_applied(torch.tensor(reduced), torch.tensor(norms), num_metrics=1)
    assert result.tolist() == norms if applied else bool(result.isnan().all())


def test_a_value_head_trains_the_last_token(ran: Ran) -> None:
    result, expected = ran(values_of_last_tokens, {})[0]
    assert result == pytest.approx(expected, rel=1e-12)


def divided_by_length(source: Path, mesh: dict[str, int]) -> list[tuple[float, float]]:
    loss, made = lambda scores, fields: -scores["logprobs"] / fields["length"], []
    for length in (9, None):
        engine = build(source, mesh, loss=loss)
        batch = mw.pack([[1, 2, 3], [4, 5]], length=length, fields={"length": [[3.0] * 3, [2.0] * 2]})
        made.append((engine.backward([batch]), engine.update()))
    return made


def test_a_field_may_be_a_divisor_with_filler(ran: Ran) -> None:
    filled, full = ran(divided_by_length, {})[0]
    assert filled == pytest.approx(full)


def only_the_head(source: Path, mesh: dict[str, int]) -> list[str]:
    engine = build(source, mesh, head="value", train="head.weight", loss=mw.losses.squared_error)
    engine.step(feed(engine, target=True))
    return engine.model.trainable


def test_a_rank_that_stores_nothing_of_what_is_trained(ran: Ran) -> None:
    assert ran(only_the_head, FSDP) == [["head.weight"]] * 2


BAD_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "head": (dict(head="reward"), words("ConfigError", "head='reward'", "lm, value, none")),
    "train": (dict(train="layer.*"), words("ConfigError", r"train='layer\.\*'", r"embed\.weight")),
    "dtype": (dict(dtype=torch.float16), words("ConfigError", r"\bdtype=torch\.float16", r"torch\.bfloat16")),
}


def badly_loaded(source: Path, mesh: dict[str, int]) -> dict[str, str]:
    return {
        name: trials.error_of(lambda options=options: mw.load(source, trials.mesh_of(mesh), **options))
        for name, (options, _) in BAD_OPTIONS.items()
    }


def test_bad_options_of_load(ran: Ran) -> None:
    for name, text in ran(badly_loaded, {})[0].items():
        assert re.search(BAD_OPTIONS[name][1], text), text


def test_pack_refuses_what_does_not_fit() -> None:
    with pytest.raises(mw.DataError, match=words(r"\b2 documents\b", r"\b5 tokens\b", r"length=4\b")):
        mw.pack([[1, 2, 3], [4, 5]], length=4)
    with pytest.raises(mw.DataError, match=words(r"\bdocument 1\b", r"\bempty\b")):
        mw.pack([[1], []])
    with pytest.raises(mw.DataError, match=words(r"\blabels\b", r"\bdocument 0\b", "1 value for 2 tokens")):
        mw.pack([[1, 2]], labels=[[1]])
    with pytest.raises(mw.DataError, match=words(r"\b2 documents\b", r"\b5 tokens\b", r"length=0\b")):
        mw.pack([[1, 2, 3], [4, 5]], length=0)
    for document in ([1.5, 2], [True, False]):
        with pytest.raises(mw.DataError, match=words(r"\bdocuments\b", "whole numbers", r"torch\.(float32|bool)")):
            mw.pack([document])


@pytest.mark.parametrize(
    ("arguments", "options", "pattern"),
    [
        (([1, 2, 3],), {}, words(r"\bdocuments\b", r"\blist\b", r"pack\(\[\[5, 6, 7\], \[8, 9\]\]\)")),
        ((torch.tensor([[[1, 2, 3]]]),), {}, words(r"\bdocuments\b", r"\blists? of\b", r"\[1, 3\]|\[3\]")),
        (([[1, None]],), {}, words(r"\bdocuments\b", r"\bnumbers\b", "NoneType")),
        (([[1, 2**63]],), {}, words(r"\bdocuments\b", r"\bnumbers\b", "[Oo]verflow")),
        ((["ab"],), {}, words(r"\bdocuments\b", "token ids", r"\btext\b", r"tokenizer\(texts\)")),
        (([[1, 2]],), dict(length=4.0), words(r"length=4\.0", "whole number")),
        (([[1, 2]],), dict(fields={"gain": [1.0]}), words(r"fields\['gain'\]", r"\blist\b", r"pack\(\[\[")),
    ],
    ids=str,
)
def test_pack_says_what_it_wants(arguments: tuple[Any, ...], options: dict[str, Any], pattern: str) -> None:
    with pytest.raises(mw.DataError, match=pattern):
        mw.pack(*arguments, **options)


@pytest.mark.parametrize("kind", [np.int32, np.uint16, np.int64])
def test_pack_takes_whole_numbers_of_any_width(kind: Any) -> None:
    batch = mw.pack([np.array([1, 2, 3], kind), np.array([4, 65], kind)])
    assert batch.tokens.tolist() == [1, 2, 3, 4, 65]
    assert batch.tokens.dtype == batch.labels.dtype == torch.int64


NUM_STEPS = 2 if parts.ALL else 1


def stepped(source: Path, mesh: dict[str, int], halves: bool) -> tuple[list[Any], dict[str, Tensor]]:
    """Make clipped steps, at once or by their two halves."""
    engine, numbers = build(source, mesh, max_norm=0.01), list[Any]()
    for _ in range(NUM_STEPS):
        if halves:
            numbers += [engine.backward(feed(engine)), engine.update(), engine.router.load_LE.tolist()]
        else:
            record = engine.step(feed(engine))
            assert record.expert_load is not None
            numbers += [record.loss, record.grad_norm, record.expert_load.tolist()]
    return numbers, _masters(engine)


@pytest.mark.parametrize("mesh", parts.every(3, [dict(fsdp=2, ep=2), dict(fsdp=2, tp=2), dict()]), ids=trials.named)
def test_a_step_is_its_two_halves(tmp_path: Path, mesh: dict[str, int]) -> None:
    source = tiny.directory(tmp_path / "m", "qwen3_moe", output_router_logits=True, router_aux_loss_coef=0.3)
    cases = {halves: functools.partial(stepped, source, mesh, halves) for halves in (False, True)}
    for (numbers, weights), (expected, wanted) in zip(
        *worlds.in_turn(trials.world_of(mesh), cases).values(), strict=True
    ):
        assert numbers == expected
        assert all(torch.equal(weights[name], wanted[name]) for name in wanted)


def _spoil(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(float("inf"))


def overflown(source: Path, mesh: dict[str, int]) -> str:
    """The loss is a number, and the norm of its gradients is none."""
    engine = build(source, mesh)
    before = mw.gather(engine.model)
    parameter = next(p for name, p in engine.model.parts[0].named_parameters() if "embed" in name)
    hook = parameter.register_post_accumulate_grad_hook(_spoil)
    with pytest.raises(mw.NonFiniteError) as message:
        engine.step(feed(engine))
    hook.remove()
    after = mw.gather(engine.model)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert engine.step(feed(engine)).step == 1, "the next step finds no gradients"
    return str(message.value)


def test_a_norm_that_is_no_number_changes_nothing(ran: Ran) -> None:
    for message in ran(overflown, FSDP):
        assert message.startswith("the gradient norm of step 0 is ")
        assert message.endswith("; no parameter was changed")


def mended_rate(source: Path, mesh: dict[str, int]) -> tuple[float, float]:
    engine = build(source, mesh, max_norm=0.01)
    agreed, engine.lr = engine.lr, -1.0
    with pytest.raises(mw.ConfigError, match=words(r"\blr\b", "step 0", r"-1\b")):
        engine.backward(feed(engine))
    engine.lr = agreed
    engine.backward(feed(engine))
    norm = engine.update()
    fine = build(source, mesh, max_norm=0.01)
    fine.backward(feed(fine))
    return norm, fine.update()


def test_a_bad_rate_leaves_the_gradients_as_they_were(ran: Ran) -> None:
    norm, expected = ran(mended_rate, {})[0]
    assert norm == pytest.approx(expected, rel=1e-12)


def on_hidden(source: Path, mesh: dict[str, int]) -> tuple[list[float], dict[str, Tensor]]:
    engine = build(source, mesh, head="none", loss=lambda scores, _: scores["hidden"].square().mean(1))
    losses = [engine.step(feed(engine)).loss for _ in range(2)]
    return losses, mw.gather(engine.model)


def test_a_loss_on_hidden_states_is_the_same_on_a_mesh(ran: Ran) -> None:
    losses, weights = ran(on_hidden, {})[0]
    result = ran(on_hidden, TP)
    assert all(of_rank == pytest.approx(losses, rel=1e-12) for of_rank, _ in result)
    for key, tensor in result[0][1].items():  # all of it is handed out by rank 0
        assert torch.allclose(tensor, weights[key], rtol=1e-6, atol=1e-9), key


def discarded_first(source: Path, mesh: dict[str, int]) -> float:
    engine = build(source, mesh)
    engine.discard()
    return engine.step(feed(engine)).loss


def test_nothing_to_discard(ran: Ran) -> None:
    """FSDP cannot be reset before its first forward."""
    first, second = ran(discarded_first, FSDP)
    assert first == second


FSDP, TP, BOTH = dict(fsdp=2), dict(tp=2), dict(fsdp=2, tp=2)
RUNS: list[tuple[Callable[..., Any], dict[str, int]]] = [
    *((evaluated_between_steps, mesh) for mesh in EVALUATED), *((inference, mesh) for mesh in [{}, *INFERRED]),
    *((weighted, mesh) for mesh in [{}, *WEIGHTED]), (scored, {}), (frozen, BOTH), (adam, {}),
    *((function, mesh) for function in (recovered, recovered_in_old_torch) for mesh in RECOVERED),
    (values_of_last_tokens, {}), (divided_by_length, {}), (only_the_head, FSDP), (badly_loaded, {}), (overflown, FSDP),
    (mended_rate, {}), (on_hidden, {}), (on_hidden, TP), (discarded_first, FSDP),
]  # fmt: skip
