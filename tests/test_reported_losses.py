"""The loss and the metrics that an engine reports after a backward, an evaluation or a step, on stand-ins for ranks."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import meshwright as mw
from meshwright.engine import engine as engine_module
from meshwright.engine.agreement import Step
from meshwright.errors import NonFiniteError, RankError, StateError

of: Any = SimpleNamespace
F64, CPU = torch.float64, torch.device("cpu")
LOSS = mw.Loss(mw.losses.cross_entropy, metrics=("kl", "clip"))


class Mesh:
    """The mesh of one rank, on which an all-reduce adds what other ranks have."""

    def __init__(self, *others: float) -> None:
        self.device, self.others, self.failures = CPU, torch.tensor(others, dtype=F64), list[Any]()

    def all_reduce_(self, x: Tensor, _: Any) -> Tensor:
        return x + self.others

    def to_host(self, results: list[Tensor]) -> list[Tensor]:
        return results

    def all_or_none(self, failure: Any, at: str) -> None:
        self.failures.append((failure, at))
        raise RankError("the loss failed on a rank")


class Terms:
    """Terms of a loss that are known."""

    failure: Exception | None = None
    of_step: Any = None

    def begin(self, loss: Any, batches: Any, local: Any, temperature: float, *, grad: bool = True) -> Any:
        assert (batches, local, temperature, grad) == (["host"], ["one", "two"], 0.5, False)
        return self.of_step

    def wanted(self, *_: Any) -> str:
        return "want"

    def __call__(self, loss: Any, batch: str, scores: Any) -> tuple[Tensor, Tensor]:
        terms, metrics = {"one": ([1.0, 5.0], [1.0, 8.0]), "two": ([2.0], [3.0, 0.0])}[batch]
        return torch.tensor(terms, requires_grad=True), torch.tensor(metrics, dtype=F64)


def engine_of(mesh: Mesh, **changes: Any) -> Any:
    """Return an engine in its step 7, whose loss has the divisor 4. It counts what it discards."""
    engine: Any = object.__new__(mw.Engine)
    model = of(mesh=mesh, recipe=of(mtp="carried"), calls=of(pending=None, half_updated="the update"))
    engine.num_discards = 0
    fields = dict(
        model=model, loss=LOSS, metrics={}, steps=7, mtp=None, temperature=0.5, on_nonfinite="raise", _terms=Terms(),
        router=of(load_LE=torch.zeros(0)), _agree=lambda *_: Step(0.1, None, 4.0, 3, 9, 2),
        _local_batches=lambda *_: ["one", "two"], discard=lambda: vars(engine).update(num_discards=1),
    )  # fmt: skip
    vars(engine).update(fields | changes)
    return engine


@pytest.mark.parametrize("per_step", [False, True])
def test_an_evaluation_is_of_all_ranks(monkeypatch: pytest.MonkeyPatch, per_step: bool) -> None:
    """Other ranks have a loss of 1 and metrics of 0.5 and 0.25."""
    engine = engine_of(Mesh(0, 1.0, 0, 0.5, 0.25))
    run = lambda model, local, want, term: [term(batch, ()) for batch in local]  # noqa: E731 - short
    monkeypatch.setattr(engine_module.parallel, "run_forward", run)
    if per_step:
        engine._terms.of_step = of(value=torch.tensor(6.0), metrics_M=torch.tensor([2.0, 1.0], dtype=F64))
    assert engine.evaluate(["host"]) == (6 / 4 if per_step else 8 / 4) + 1
    assert engine.metrics == ({"kl": 1.0, "clip": 0.5} if per_step else {"kl": 1.5, "clip": 2.25})
    assert (engine.steps, engine.model.calls.pending) == (7, None)


def test_a_stage_without_the_head_adds_zeros_to_an_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(Mesh(0, 1.0, 0, 0.5, 0.25))
    monkeypatch.setattr(engine_module.parallel, "run_forward", lambda *_: [])
    assert engine.evaluate(["host"]) == 1.0
    assert engine.metrics == {"kl": 0.5, "clip": 0.25}


def test_a_backward_keeps_its_results_for_the_update() -> None:
    """The loss of the router is a part of the loss."""
    engine = engine_of(Mesh(), _backward=lambda *_: "shares", _reduced_shares=lambda _: [2.0, 0.25, 0.5, 7.0])
    assert engine.backward(["host"]) == 2.25
    pending = engine.model.calls.pending
    assert engine.metrics == pending.results.metrics == {"kl": 0.5, "clip": 7.0}
    assert (pending.results.loss, pending.results.router_loss, pending.weight, engine.num_discards) == (
        2.25,
        0.25,
        4,
        0,
    )


@pytest.mark.parametrize("on_nonfinite", ["raise", "skip"])
def test_a_backward_that_is_not_finite_raises_or_waits_for_the_update(on_nonfinite: str) -> None:
    shares = [math.inf, 0.25, 0.5, 7.0]
    engine = engine_of(
        Mesh(), _backward=lambda *_: "shares", _reduced_shares=lambda _: shares, on_nonfinite=on_nonfinite
    )
    if on_nonfinite == "skip":
        assert engine.backward(["host"]) == math.inf
        assert engine.model.calls.pending.results.loss == math.inf
    else:
        with pytest.raises(NonFiniteError, match="the loss of step 7 is inf; no parameter was changed"):
            engine.backward(["host"])
    assert (engine.num_discards, engine.model.calls.pending is None) == ((0, False), (1, True))[on_nonfinite == "raise"]


@pytest.mark.parametrize("on_nonfinite", ["raise", "skip"])
@pytest.mark.parametrize("loss", [2.0, math.nan])
def test_a_step_waits_for_its_loss_and_its_norm(loss: float, on_nonfinite: str) -> None:
    """A fused update, queued before, has seen the same numbers, so it has changed nothing either."""
    engine, results = engine_of(Mesh(), on_nonfinite=on_nonfinite), list[Any]()
    on_device = [torch.tensor([0, loss, 0.25, 0.5, 7.0], dtype=F64), torch.tensor([3.0], dtype=F64), torch.ones(2)]
    if math.isfinite(loss):
        assert engine._waited(on_device, results) is results[0]
    else:
        with pytest.raises(NonFiniteError, match="the loss of step 7 is nan"):
            engine._waited(on_device, results)
    assert (results[0].norms, results[0].metrics, results[0].load.tolist()) == ([3], {"kl": 0.5, "clip": 7}, [1, 1])
    assert engine.model.calls.half_updated == ("the update" if math.isfinite(loss) else "")


@pytest.mark.parametrize("failure", [None, ValueError("no such field")])
def test_a_loss_that_fails_on_a_rank_raises_on_all(failure: Exception | None) -> None:
    """A rank that has not failed learns it from the sum."""
    engine = engine_of(Mesh(1 if failure is None else 0, 0, 0, 0, 0))
    engine._terms.failure = failure
    with pytest.raises(RankError):
        engine._reduced_shares(torch.zeros(4, dtype=F64))
    assert engine.model.mesh.failures == [(failure, "the loss of step 7")]
    assert engine._terms.failure is None
    engine.model.mesh.others.zero_()
    assert engine._reduced_shares(torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=F64)) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("missing", "message"), [((), ""), (("visual.a",), ""), (("w",), "w has no gradient"), (("visual.a", "w"), "w has")]
)
def test_gradients_are_complete_before_they_are_summed(
    monkeypatch: pytest.MonkeyPatch, missing: tuple[str, ...], message: str
) -> None:
    """A tower that did not run has no gradients until all ranks give it zeros."""
    acts: list[Any] = []
    grads = {name: f"gradient of {name}" for name in ("w", "norm", "visual.a") if name not in missing}
    monkeypatch.setattr(engine_module, "zero_gradients", lambda _, names: acts.append(names))
    monkeypatch.setattr(engine_module, "unused_tower_parameters", lambda _, mask: ["visual.a"] if mask == 0 else [])
    monkeypatch.setattr(engine_module.parallel, "finish", lambda pairs, mesh: acts.append(pairs))
    sums = {name: f"axes of {name}" for name in ("w", "norm", "visual.a")}
    engine = engine_of(Mesh(), _looked_up=["embed"], _left_to_sum=sums)
    engine.model.grads, engine.model.trainable = lambda: grads, [*sums]
    step = Step(0.1, None, 4.0, 3, 9, 2)
    if message:
        with pytest.raises(StateError, match=message):
            engine._finish(step)
        return
    engine._finish(step)
    assert acts == [["embed"], [(f"axes of {name}", grad) for name, grad in grads.items()], ["visual.a"]]
