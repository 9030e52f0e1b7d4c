"""Calls on an engine one by one: what sleeps, how a failed save is raised, and which settings ranks compare."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.engine import sleep
from meshwright.engine.agreement import identity
from meshwright.engine.asleep import OPTIMIZER, WEIGHTS, Asleep
from meshwright.errors import StateError

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
