"""Calls on an engine one by one: what sleeps, how a failed save is raised, what refuses a step, what ranks compare."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.axes import DENSE, REPLICA
from meshwright.engine import agreement, sleep
from meshwright.engine import engine as engine_module
from meshwright.engine.adapters import adapters_off
from meshwright.engine.agreement import Proposal, Step, agree, check_ready, identity
from meshwright.engine.asleep import OPTIMIZER, WEIGHTS, Asleep
from meshwright.engine.step_results import Results
from meshwright.errors import NonFiniteError, StateError

of = SimpleNamespace
F64, CPU = torch.float64, torch.device("cpu")


# Sleep


def sleeper(offload: bool = False, *asleep: str) -> Any:
    held = Asleep()
    for part in asleep:
        held.add(part, of(num_bytes=1))  # type: ignore[arg-type]
    return of(
        calls=of(asleep=held), to_update=lambda: {"w": torch.ones(1)}, grads=lambda: {"w": torch.ones(1)}, parts=[],
        mesh=of(device=CPU, host=CPU), recipe=of(memory=of(offload=offload)),
    )  # fmt: skip


STATE, GRAD = "the optimizer state of w", "the gradient of w"


@pytest.mark.parametrize(
    ("offload", "asleep", "weights", "optimizer", "expected"),
    [
        (False, (), True, True, {WEIGHTS: ["w"], OPTIMIZER: [STATE, GRAD]}),
        (False, (), False, True, {OPTIMIZER: [STATE, GRAD]}),
        (False, (), True, False, {WEIGHTS: ["w"]}),
        (False, (WEIGHTS,), True, True, {OPTIMIZER: [STATE, GRAD]}),
        (False, (OPTIMIZER,), True, True, {WEIGHTS: ["w"], OPTIMIZER: [STATE]}),
        (True, (), True, True, {WEIGHTS: [], OPTIMIZER: []}),
    ],
)  # fmt: skip
def test_parts_that_are_to_sleep(
    offload: bool, asleep: tuple[str, ...], weights: bool, optimizer: bool, expected: dict[str, list[str]]
) -> None:
    """Gradients go with the optimizer state, once: those of an engine whose state sleeps already are freed."""
    wanted = {WEIGHTS: weights, OPTIMIZER: optimizer}
    local: Any = of(tensors={"w": torch.ones(1)})
    made = sleep._to_be_freed(sleeper(offload, *asleep), wanted, local)
    assert {part: [*each] for part, each in made.items()} == expected


def test_calls_are_refused_by_what_they_need() -> None:
    for part, checks in ((WEIGHTS, ("check", "check_weights")), (OPTIMIZER, ("check", "check_gradients"))):
        held = sleeper(False, part).calls.asleep
        refused = []
        for name in ("check", "check_weights", "check_gradients"):
            try:
                getattr(held, name)()
            except StateError:
                refused.append(name)
        assert refused == [*checks]
    both = sleeper(False, WEIGHTS, OPTIMIZER, OPTIMIZER).calls.asleep
    assert len(both.of([OPTIMIZER])) == 2
    assert len(both.of([WEIGHTS, OPTIMIZER])) == 3


# A save in the background


class Save:
    def __init__(self, running: bool, failure: Exception | None) -> None:
        self.is_running, self.failure, self.waited = running, failure, 0

    def wait(self) -> None:
        self.waited += 1


@pytest.mark.parametrize(
    ("running", "fails", "wait", "rank", "raises", "ends"),
    [
        (False, True, False, 0, True, True), (False, True, False, 1, False, True), (True, True, False, 0, False, False),
        (True, True, True, 0, True, True), (False, False, False, 0, False, True), (True, False, True, 1, False, True),
    ],
)  # fmt: skip
def test_a_failed_save_is_raised_once_on_rank_0(
    running: bool, fails: bool, wait: bool, rank: int, raises: bool, ends: bool
) -> None:
    """The agreement around the call raises on the other ranks."""
    engine, save = object.__new__(mw.Engine), Save(running, OSError("full") if fails else None)
    engine.model, engine.saving = of(mesh=of(rank=rank)), save  # type: ignore[assignment]
    if raises:
        with pytest.raises(OSError, match="full"):
            engine.settle_saving(wait=wait)
    else:
        engine.settle_saving(wait=wait)
    assert (engine.saving is None, save.waited) == (ends, int(ends))
    engine.settle_saving()


def test_waiting_for_a_save_raises_on_every_rank() -> None:
    engine = object.__new__(mw.Engine)
    engine.saving = Save(True, OSError("full"))  # type: ignore[assignment]
    with pytest.raises(OSError, match="full"):
        engine.wait()
    engine.wait()
    assert engine.saving is None


# Calls that a model refuses


def ready(**changes: Any) -> Any:
    """Return a model that may begin a step: a rank with two of the three trained parameters."""
    fields = dict(asleep=(), pending=None, grads={}, trainable=["a", "b"]) | changes
    calls = of(asleep=sleeper(False, *fields["asleep"]).calls.asleep, pending=fields["pending"])
    pieces = dict.fromkeys(("a", "b", "frozen"))
    return of(calls=calls, grads=lambda: fields["grads"], trainable=fields["trainable"], pieces=pieces)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, ""), ({"pending": of()}, "waiting"), ({"grads": {"a": 1}}, "waiting"), ({"asleep": [WEIGHTS]}, "asleep"),
        ({"asleep": [OPTIMIZER]}, "asleep"), ({"trainable": ["a"]}, "b and 0 more changed requires_grad"),
        ({"trainable": ["a", "b", "frozen"]}, "frozen and 0 more changed requires_grad"),
    ],
)  # fmt: skip
def test_a_step_begins_without_gradients_and_trains_what_was_named(changes: dict[str, Any], message: str) -> None:
    check = lambda: check_ready(ready(**changes), ("a", "b", "of another rank"))  # noqa: E731 - short
    if not message:
        check()
        return
    with pytest.raises(StateError, match=message):
        check()


def agreeing(monkeypatch: pytest.MonkeyPatch, **calls: Any) -> Any:
    """Return a model whose ranks agree on every call."""
    monkeypatch.setattr(agreement, "identity", lambda _: {})
    monkeypatch.setattr(agreement, "compare", lambda mesh, call, prepare, axes: (prepare()[0], "the data"))
    model: Any = object.__new__(mw.Model)
    state = dict(asleep=Asleep(), in_loss=False, half_updated="", loaded={}, shared_id=0) | calls
    model.calls, model.mesh, model.low = of(**state), of(device=CPU), of(check=lambda: None)
    return model


def test_only_calls_of_all_ranks_number_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other replicas may not take part in a call, and would give their next model the same number."""
    model, other = agreeing(monkeypatch), agreeing(monkeypatch)
    agree(model, "logprobs", Proposal, REPLICA)
    assert model.calls.shared_id == 0
    agree(model, "a step", Proposal, DENSE)
    first = model.calls.shared_id
    agree(other, "a step", Proposal)
    agree(model, "a step", Proposal)
    assert (model.calls.shared_id, other.calls.shared_id) == (first, first + 1)


def _refused() -> None:
    raise StateError("codes of a step that failed")


@pytest.mark.parametrize(
    ("calls", "low", "message"),
    [
        ({"half_updated": "the update of step 3 was interrupted"}, None, "interrupted; load the model again"),
        ({"in_loss": True}, None, "called inside the loss"),
        ({"asleep": sleeper(False, WEIGHTS).calls.asleep}, None, "weights are asleep"),
        ({}, _refused, "codes of a step that failed"),
    ],
)
def test_a_model_that_cannot_be_used_refuses_every_call(
    monkeypatch: pytest.MonkeyPatch, calls: dict[str, Any], low: Any, message: str
) -> None:
    model = agreeing(monkeypatch, **calls)
    model.low.check = low or model.low.check
    with pytest.raises(StateError, match=message):
        agree(model, "a step", Proposal)
    if "asleep" in calls:
        agree(model, "wake", Proposal, asleep=True)


def test_adapters_are_off_until_the_outermost_context_ends() -> None:
    model: Any = of(calls=of(in_base=False), parts=())
    with adapters_off(model):
        with adapters_off(model):
            pass
        assert model.calls.in_base
    assert not model.calls.in_base


# Steps that are not finite


class Discards:
    """Return what an engine has discarded."""

    def __init__(self, **fields: Any) -> None:
        self.num = 0
        self.engine: Any = object.__new__(mw.Engine)
        vars(self.engine).update({"steps": 7, "discard": self.count, **fields})

    def count(self) -> None:
        self.num += 1


@pytest.mark.parametrize(
    ("norms", "on_nonfinite", "expected"),
    [
        ([3.0], "raise", 3.0), ([3.0, 4.0], "skip", 3.0), ([math.inf], "skip", math.inf),
        ([3.0, math.inf], "skip", math.nan), ([math.nan, 4.0], "skip", math.nan), ([3.0, math.inf], "raise", None),
        ([math.inf], "raise", None),
    ],
)  # fmt: skip
def test_an_update_says_whether_it_was_applied(
    monkeypatch: pytest.MonkeyPatch, norms: list[float], on_nonfinite: str, expected: float | None
) -> None:
    """A norm of the MTP head that is not finite skips the update too."""
    monkeypatch.setattr(engine_module, "check_complete", lambda *_: None)
    results = Results(mtp=engine_module.results_of([1.0, 0.0, 1.0, 1.0], [], torch.zeros(0), True, []).mtp)
    step = Step(0.1, 1.0, 1.0, 1, 1, 1, results=results)
    applied: list[Any] = []
    of_step = Discards(
        model=of(grads=dict, trainable=(), mesh=of(device=CPU)), on_nonfinite=on_nonfinite, _pending=lambda: step,
        _norms=of(on_host=lambda _: norms), _apply=lambda *each: applied.append(each[3]()),
    )  # fmt: skip
    if expected is None:
        with pytest.raises(NonFiniteError, match="of step 7 is inf; no parameter was changed"):
            of_step.engine.update()
    else:
        assert of_step.engine.update() == pytest.approx(expected, nan_ok=True)
    finite = all(map(math.isfinite, norms))
    assert (applied, of_step.num) == ([norms] * finite, int(not finite))


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_interrupted_step_leaves_no_gradients(error: type[BaseException]) -> None:
    of_step = Discards()
    with pytest.raises(error), of_step.engine._discards_on_error():
        raise error
    assert of_step.num == 1
    with of_step.engine._discards_on_error():
        pass
    assert of_step.num == 1


def stepped(on_nonfinite: str, reached: bool, error: Exception | None) -> Any:
    """Return the engine and the record of a step that may fail, before or after its results are known."""

    def step(batches: Any, step: Step, results: list[Results]) -> None:
        if reached:
            results.append(Results(loss=2.0, norms=[5.0, 6.0], metrics={"kl": 0.5}))
        if error is not None:
            raise error
        engine.steps += 1

    engine = Discards(
        _agree=lambda *_: Step(0.1, 1.0, 8.0, num_targets=3, num_tokens=4, num_batches=1), _step=step, metrics={},
        on_nonfinite=on_nonfinite, router=of(balance=of(num_layers=0)),
    ).engine  # fmt: skip
    return engine, engine.step([])


def test_a_skipped_step_has_a_record_of_its_own_number() -> None:
    for error, skipped in ((None, ""), (NonFiniteError("the loss is nan"), "the loss is nan")):
        engine, record = stepped("skip", True, error)
        assert (record.step, record.skipped, engine.steps) == (8, skipped, 8 - bool(error))
        assert (record.loss, record.grad_norm, record.lr, record.num_targets, record.num_tokens) == (2, 5, 0.1, 3, 4)
        assert record.metrics == engine.metrics == {"kl": 0.5}
    for on_nonfinite, reached in (("raise", True), ("skip", False)):
        with pytest.raises(NonFiniteError, match="the loss is nan"):
            stepped(on_nonfinite, reached, NonFiniteError("the loss is nan"))


def test_an_update_is_of_the_engine_that_ran_backward() -> None:
    step = Step(0.1, 1.0, 1.0, 1, 1, 1)
    calls = of(asleep=Asleep(), pending=None)
    engine = Discards(model=of(calls=calls, check_whole=lambda: None)).engine
    for owner, message in ((None, "gradients of another engine"), (of(), "gradients of another engine")):
        calls.pending = replace(step, owner=owner)
        with pytest.raises(StateError, match=message):
            engine._pending()
    calls.pending = None
    with pytest.raises(StateError, match="no gradients"):
        engine._pending()
    calls.pending = replace(step, owner=engine)
    assert engine._pending() is calls.pending


# What an engine proposes


class Ends(Exception):
    """The arguments of a function that a test does not call."""


def _ends(*args: Any) -> None:
    raise Ends(*args)


def test_an_engine_must_have_room_for_its_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizer first looks at the parameters that it would train."""
    checked: list[Any] = []
    for name in ("check_is_model", "check_optimizer", "state_layout"):
        monkeypatch.setattr(engine_module, name, lambda *_: None)
    monkeypatch.setattr(engine_module, "refuse_too_large", _ends)
    model: Any = of(table="table", trained="trained", need=lambda optimizer: ("need", optimizer), mesh=of(memory=5))
    options: Any = of(check=lambda *args: checked.append(args))
    with pytest.raises(Ends) as end:
        mw.Engine(model, lr=0.1, optimizer=options)
    assert end.value.args == (("need", options), 5)
    assert checked == [("table", "trained")]


def proposed(monkeypatch: pytest.MonkeyPatch, call: str = agreement.STEP, rank: int = 0, **changes: Any) -> Any:
    """Return the proposal of an engine, what it measures, the step, and the calls of other functions."""
    made = of(calls=[])
    note = lambda name, result=None: lambda *args, **more: made.calls.append(name) or result  # noqa: E731 - short
    model = of(
        blueprint=of(scores=("logprobs", "entropy")), mesh=of(rank=rank, num_data_ranks=3), calls=of(in_base=False)
    )
    fields = dict(
        model=model, loss=mw.losses.cross_entropy, temperature=1.0, on_nonfinite="raise", lr=lambda step: step / 10,
        max_norm=2, optimizer=of(options=mw.AdamW(eps=1e-7)), trained=("a",), want="entropy",
        settle_saving=note("settle"), _terms=of(failure="old"), _settings=lambda: {"own": 1},
    ) | changes  # fmt: skip
    engine = Discards(**fields).engine
    step = Step(0.7, 2.0, 8.0, num_targets=3, num_tokens=4, num_batches=5, images_mask=1)

    def data_of(_: Any, batches: Any, *args: Any) -> str:
        made.measured = args
        return "data"

    def agree(_: Any, name: str, propose: Any) -> Any:
        assert name == call
        made.proposal = propose()
        return made.proposal, "gathered"

    fakes = dict(
        check_ready=note("ready"), data_of=data_of, agree=agree, warn_of_same_data=note("warn"),
        whole_step=note("whole", step), forced_tower_runs=note("forced", 6), fields_of_step=note("fields", {"f": 2}),
    )  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(engine_module, name, fake)
    made.step = engine._agree(call, ["batch"])
    assert made.step.owner is engine
    assert engine._terms.failure is None
    return made


def test_a_step_proposes_its_rate_and_its_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    made = proposed(monkeypatch)
    settings = made.proposal.settings
    assert (made.proposal.data, made.proposal.lr, made.proposal.max_norm) == ("data", 0.7, 2.0)
    assert settings.items() >= {"own": 1, "f": 2, "optimizer": "AdamW", "eps": 1e-7}.items()
    assert made.measured == ("entropy", "token", "")
    assert made.calls == ["settle", "ready", "fields", "warn", "whole", "forced"]
    assert (made.step.weight, made.step.images_mask) == (8.0, 7)
    assert "warn" not in proposed(monkeypatch, rank=1).calls


def test_an_evaluation_needs_no_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    made = proposed(monkeypatch, agreement.EVALUATE, lr=None, trained=())
    assert (made.proposal.data, made.proposal.settings, made.step.images_mask) == ("data", {"own": 1, "f": 2}, 1)
    assert made.calls == ["settle", "fields", "warn", "whole"]


def test_a_loss_that_divides_itself_has_no_divisor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its targets are counted all the same."""
    loss = mw.Loss(lambda s, f, d: s, per="document", candidates="ids")
    divided = replace(loss, normalise=False)
    for each, per, weight in ((loss, "document", 8.0), (divided, "micro_batch", 1.0)):
        made = proposed(monkeypatch, loss=each)
        assert (made.measured, made.step.weight) == (("entropy", per, "ids"), weight)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0}, "temperature=0"), ({"on_nonfinite": "ignore"}, "on_nonfinite='ignore'"),
        ({"lr": -1.0}, "lr of step 7"), ({"max_norm": 0}, "max_norm=0"), ({"trained": ()}, "no trained parameter"),
        ({"temperature": 0.5, "loss": mw.Loss(lambda s, f: s, candidates="ids", candidate_temperature=2.0)},
         "leave one of them out"),
        ({"settle_saving": lambda: _ends("a save has failed")}, "a save has failed"),
    ],
)  # fmt: skip
def test_what_was_assigned_between_steps_is_checked(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises((mw.MeshwrightError, Ends), match=message):
        proposed(monkeypatch, **changes)


# Settings that ranks compare


def model_of(**changes: Any) -> Any:
    """Return a stand-in for a model with everything that defines it."""
    fields: dict[str, Any] = dict(
        config={"b": 1, "a": {"x": [1]}}, dtype=F64, shared_id=1, fp8={"p"}, origin="files", tower=False, mtp="head",
        mtp_weight=0.1, trained=("a", "b"), memory=mw.MemoryOptions(), pipeline=mw.Pipeline(),
        context=mw.ContextParallel(), in_base=False,
    ) | changes  # fmt: skip
    now = of(**fields)
    recipe = of(memory=now.memory, pipeline=now.pipeline, context=now.context, mtp=now.mtp, mtp_weight=now.mtp_weight)
    blueprint = of(config=now.config, spec=of(fp8=now.fp8), origin=now.origin, tower=now.tower)
    return of(
        trained=now.trained,
        blueprint=blueprint,
        dtype=now.dtype,
        recipe=recipe,
        calls=of(shared_id=now.shared_id, in_base=now.in_base),
    )


CHANGES: dict[str, Any] = dict(
    config={"b": 2, "a": {"x": [1]}}, dtype=torch.float32, shared_id=2, fp8={"q"}, origin="seed 0", tower=True,
    mtp="all", mtp_weight=0.2, trained=("a", "c"), memory=mw.MemoryOptions(offload=True),
    pipeline=mw.Pipeline(schedule="zero-bubble"), context=mw.ContextParallel(attention=1),
    in_base=True,
)  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_all_that_defines_a_model_is_compared(name: str) -> None:
    one, other = identity(model_of()), identity(model_of(**{name: CHANGES[name]}))
    assert len([key for key in one if one[key] != other.get(key)]) == 1
    assert identity(model_of()) == identity(model_of(config={"a": {"x": [1]}, "b": 1}))
    nested = ({"a": {"x": 1, "y": 2}}, {"a": {"y": 2, "x": 1}})
    assert identity(model_of(config=nested[0])) == identity(model_of(config=nested[1]))


ENGINE: dict[str, Any] = dict(
    steps=3, loss=mw.Loss(mw.losses.cross_entropy, candidates="ids"), temperature=1.0, on_nonfinite="raise",
    router=of(mode="pooled"), want="logprobs",
)  # fmt: skip
OF_ENGINE: dict[str, Any] = {
    "steps": 4, "temperature": 0.5, "on_nonfinite": "skip", "router": of(mode="previous"), "want": "entropy",
    **{f"loss {name}": replace(ENGINE["loss"], **{name: value}) for name, value in (
        ("function", mw.losses.squared_error), ("normalise", False), ("metrics", ("a",)), ("candidates", "more"),
        ("candidate_temperature", 2.0), ("rest", True),
    )},
}  # fmt: skip


@pytest.mark.parametrize("name", OF_ENGINE)
def test_all_settings_of_an_engine_are_compared(name: str) -> None:
    def settings(**changes: Any) -> dict[str, object]:
        engine: Any = object.__new__(mw.Engine)
        vars(engine).update({**ENGINE, "model": of(mesh=of(device=CPU, host=CPU)), **changes})
        engine.optimizer = of(has_kernel=lambda device: True)
        return engine._settings()

    one, other = settings(), settings(**{name.partition(" ")[0]: OF_ENGINE[name]})
    assert len([key for key in one if one[key] != other[key]]) == 1
