"""State of an engine between calls: parameters, gradients, settings, loads."""

from __future__ import annotations

import copy
import functools
import pickle  # noqa: TID251 - to see it refused
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import meshwright as mw
from meshwright.optim import LocalOptimizer
from tests import parts, tiny, trials, worlds
from tests.trials import build, feed
from tests.words import words


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    aux = dict(output_router_logits=True, router_aux_loss_coef=0.3)
    return tiny.directory(tmp_path_factory.mktemp("state") / "m", "qwen3_moe", **aux)


def _moved(engine: mw.Engine) -> None:
    for part in engine.model.parts:
        part.float().double()


def _reallocated(engine: mw.Engine) -> None:
    for parameter in trials.parameters(engine.model):
        parameter.data = parameter.data.clone()


def _from_vector(engine: mw.Engine) -> None:
    parameters = list(trials.parameters(engine.model))
    vector_to_parameters(parameters_to_vector(parameters), parameters)


def _set(engine: mw.Engine, **values: Any) -> None:
    for name, value in values.items():
        setattr(engine, name, value)


def _another(engine: mw.Engine) -> mw.Engine:
    return mw.Engine(engine.model, lr=1e-9)


def _second_takes_over(engine: mw.Engine) -> None:
    second = _another(engine)
    engine.backward(feed(engine))
    second.discard()
    second.backward(feed(engine))
    engine.update()


def _late(change: Callable[[mw.Engine], Any]) -> Callable[[mw.Engine], Any]:
    return lambda engine: (engine.backward(feed(engine)), change(engine), engine.update())


def _early(change: Callable[[mw.Engine], Any]) -> Callable[[mw.Engine], Any]:
    return lambda engine: (change(engine), engine.step(feed(engine)))


def _only_norms_none(engine: mw.Engine) -> None:
    for name in engine.model.trainable:
        if "norm" in name:
            engine.model.parameter(name).grad = None


ALONE, TP, FSDP = dict[str, int](), dict(tp=2), dict(fsdp=2)
REFUSED: dict[str, tuple[dict[str, int], Callable[[mw.Engine], Any], str]] = {
    "another engine's": (FSDP, _second_takes_over, words("^StateError", r"update\(\)", "step 0",
        "another engine|other engine", r"backward\(")),
    "discarded by another": (ALONE, _late(lambda e: _another(e).discard()),
        words("^StateError(?!.*other engine)", r"update\(\)", "step 0", r"backward\(")),
    "zeroed": (ALONE, _late(lambda e: [part.zero_grad() for part in e.model.parts]),
        words("^StateError", r"embed\.weight", "gradient", r"(\d+) of \1 parameters")),
    "some lost": (FSDP, _late(_only_norms_none), words("^StateError", r"\w\.[\w.]*norm[\w.]* ", "gradient",
        r"(\d+) of (?!\1)\d+ parameters")),
    "max_norm below 0": (ALONE, _early(lambda e: _set(e, max_norm=-1.0)), r"^ConfigError: .*max_norm=-1\.0"),
    "lr of nothing": (ALONE, _early(lambda e: _set(e, lr=None)), words("^ConfigError", r"\blr\b", "step 0", "None")),
    "a complex loss": (ALONE, _early(lambda e: _set(e, loss=lambda s, f: -s["logprobs"] * 1j)),
        words("^DataError", r"\bloss\b", r"torch\.complex\d+", "floating")),
    "deepcopy": (ALONE, lambda e: copy.deepcopy(e.model),
        words("^StateError", "model", r"\bcop", r"mw\.gather\(model\)")),
    "pickle": (ALONE, lambda e: pickle.dumps(e.model), words("^StateError", "model", r"\bcop", r"mw\.gather\(model\)")),
    "an engine as a model": (ALONE, lambda e: mw.logprobs(e, feed(e)[0]),
        words("^ConfigError", "Engine", r"mw\.load", r"engine\.model")),
    "an engine of an engine": (ALONE, lambda e: mw.Engine(e, lr=1.0),
        words("^ConfigError", "Engine", r"mw\.load", r"engine\.model")),
    "no loss": (ALONE, lambda e: mw.Engine(e.model, lr=1.0, loss=None), r"^ConfigError: .*\bloss=None"),
    "one beta": (ALONE, lambda e: mw.Engine(e.model, lr=1.0, optimizer=mw.AdamW(betas=0.9)),
        r"^ConfigError: .*betas=0\.9\b"),
    "entropy": (ALONE, lambda e: mw.Engine(e.model, lr=1.0, entropy="no"), words("^ConfigError", "entropy='no'", "True",
        "False")),
    "source": (ALONE, lambda e: mw.load(None), words("^LoadError", "None", "Hugging Face", "directory")),
    "train": (ALONE, lambda e: mw.load(e.model.directory, train=None), r"^ConfigError: .*train=None"),
    "target": (ALONE, lambda e: mw.export(e.model, None), words("^ExportError", "None", "directory")),
    "fields": (ALONE, lambda e: mw.pack([[1, 2]], fields=[[1.0, 2.0]]), words("^DataError", r"\bfields\b", "dict")),
}  # fmt: skip


@pytest.fixture(scope="module")
def messages_of_all(source: Path) -> Callable[[str], list[str]]:
    return trials.said_by_all(source, {name: (mesh, act) for name, (mesh, act, _) in REFUSED.items()})


@pytest.mark.parametrize("name", REFUSED)
def test_refused(messages_of_all: Callable[[str], list[str]], name: str) -> None:
    for text in messages_of_all(name):
        assert re.search(REFUSED[name][2], text), text


def _remade(batch: mw.Batch, name: str) -> mw.Batch:
    changes: dict[str, dict[str, Any]] = {
        "labels": dict(labels=batch.labels.float()),
        "tokens": dict(tokens=batch.tokens.bool()),
        "tokens, narrow": dict(tokens=batch.tokens.to(torch.uint8)),  # which torch takes for a mask
        "labels, narrow": dict(labels=batch.labels.to(torch.int16)),
        "advantage": dict(fields={"advantage": [1.0] * len(batch)}),
        "bounds, backwards": dict(bounds=(0, 5, 3, len(batch))),
    }
    return replace(batch, **changes[name])


MADE_BY_HAND = ["labels", "tokens", "tokens, narrow", "labels, narrow", "advantage", "bounds, backwards"]


@pytest.mark.parametrize("name", MADE_BY_HAND)
def test_a_batch_made_by_hand(name: str) -> None:
    with pytest.raises(mw.DataError, match=words(rf"\b{name.partition(',')[0]}\b", r"mw\.pack")):
        _remade(mw.pack([[1, 2, 3], [4, 5, 6, 7, 8]]), name)


def losses_after(source: Path, mesh: dict[str, int], meddle: Callable[[mw.Engine], Any], late: bool) -> list[float]:
    """Return the losses of a step and behind it. `meddle` changes the engine before the step, or within it if
    `late`."""
    engine = build(source, mesh)
    if not late:
        meddle(engine)
    loss = engine.backward(feed(engine, num=1))
    if late:
        meddle(engine)
    engine.update()
    return [loss, engine.evaluate(feed(engine, num=1))]


HARMLESS: dict[str, Callable[[mw.Engine], Any]] = {
    "parameters moved there and back": _moved,  # their first values are float32
    "parameters in other memory": _reallocated,
    "parameters from a vector": _from_vector,
    "max_norm late": lambda e: _set(e, max_norm=0.1 + e.model.mesh.rank),
    "lr late": lambda e: _set(e, lr=0.1 + e.model.mesh.rank),
}


@pytest.mark.parametrize("mesh", parts.every(3, [FSDP, TP, ALONE]), ids=trials.named)
def test_what_an_engine_does_not_hold_on_to(source: Path, mesh: dict[str, int]) -> None:
    """An update is written into the parameters of its moment, by what the ranks agreed on before backward."""
    after = {("nothing", False): functools.partial(losses_after, source, mesh, lambda engine: None, False)}
    for name, meddle in HARMLESS.items():
        if "vector" in name and mesh != ALONE:
            continue  # torch cannot make a vector of shards
        for late in [True] if name.endswith("late") else [False, True][: 1 if "moved" in name else 2]:
            after[name, late] = functools.partial(losses_after, source, mesh, meddle, late)
    result = worlds.in_turn(trials.world_of(mesh), after)
    assert result == dict.fromkeys(after, result["nothing", False])


def raises_on_rank_1(source: Path) -> str:
    rank = mw.Mesh(fsdp=2).rank
    engine = build(source, FSDP, lr=lambda step: {0: 1e-3}[step * 0 + rank])
    try:
        engine.step(feed(engine))
    except Exception as error:  # noqa: BLE001 - errors of torch are what must not come
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_whatever_one_rank_raises_the_others_hear_of_it(source: Path) -> None:
    first, second = worlds.run(2, raises_on_rank_1, source, seconds=20)
    assert re.search(words("^RankError", "rank 1 ", "a step", "KeyError: 1"), first), first
    assert second == "KeyError: 1"


def two_steps(source: Path, mesh: dict[str, int], meddle: Callable[[mw.Engine], Any]) -> dict[str, torch.Tensor]:
    engine = build(source, mesh, router_aux="previous")
    for _ in range(2):
        meddle(engine)
        record = engine.step(feed(engine, num=1))
        assert record.expert_load is not None
        record.expert_load.zero_()  # it is the caller's own
    return engine.model.stored()


@pytest.mark.parametrize("mesh", parts.every(2, [FSDP, ALONE]), ids=str)
def test_a_discarded_step_is_not_the_one_before(source: Path, mesh: dict[str, int]) -> None:
    def other(engine: mw.Engine) -> None:
        engine.backward(tiny.batches(7, num=1))
        engine.discard()

    cases = {name: functools.partial(two_steps, source, mesh, act) for name, act in
             {"plain": lambda engine: None, "discarded": other}.items()}  # fmt: skip
    for expected, result in zip(*worlds.in_turn(trials.world_of(mesh), cases).values(), strict=True):
        assert all(torch.equal(expected[name], result[name]) for name in expected)


def narrow(source: Path, dtype: torch.dtype) -> tuple[float, float]:
    batches = [mw.pack([list(range(1, 101))] * 6)]
    wide, small = (
        build(source, {}, loss=lambda s, f, d=d: (-s["logprobs"] * 40).to(d)) for d in (torch.float64, dtype)
    )
    return wide.evaluate(batches), small.evaluate(batches)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_terms_of_a_narrow_loss_are_summed_wide(source: Path, dtype: torch.dtype) -> None:
    """Their sum is above what float16 holds, and 100 times a step of bfloat16 at its size."""
    [(expected, result)] = worlds.run(1, narrow, source, dtype)
    assert result == pytest.approx(expected, rel=3e-4)


def in_place(source: Path, mesh: dict[str, int]) -> tuple[float, float]:
    plain, meddling = build(source, mesh), build(source, mesh, loss=lambda s, f: s["logprobs"].neg_() * 1.0)
    return plain.evaluate(feed(plain)), meddling.evaluate(feed(plain))


def test_a_loss_may_write_into_its_scores(source: Path) -> None:
    for expected, result in worlds.run(2, in_place, source, TP):
        assert result == expected


def cut_off(source: Path, mesh: dict[str, int], target: Path) -> list[str]:
    engine, real, calls = build(source, mesh), LocalOptimizer._update, []

    def once(self: LocalOptimizer, *args: Any) -> None:
        if calls:
            raise KeyboardInterrupt
        calls.append(1)
        real(self, *args)

    LocalOptimizer._update = once  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        engine.step(feed(engine))
    LocalOptimizer._update = real  # type: ignore[method-assign]
    message = []
    for call in (
        lambda: engine.step(feed(engine)),
        engine.update,
        lambda: engine.evaluate(feed(engine)),
        lambda: mw.export(engine.model, target),
        lambda: mw.gather(engine.model),
        lambda: mw.Engine(engine.model, lr=1.0).step(feed(engine)),
    ):
        try:
            call()
        except mw.MeshwrightError as error:
            message.append(str(error))
    return message


def test_an_update_that_was_cut_off_is_not_gone_on_with(source: Path, tmp_path: Path) -> None:
    for message in worlds.run(2, cut_off, source, FSDP, tmp_path / "out"):
        assert len(message) == 6
        for text in message:
            assert re.search(words(r"\bupdate\b", "step 0", "parameters", r"\bload"), text), text
    assert not list(tmp_path.iterdir())
