"""What an engine holds on to between calls, and what may become of it: parameters, gradients, settings, loads."""

from __future__ import annotations

import copy
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
from meshwright.optim import AdamW
from tests import tiny, trials, worlds
from tests.trials import build, mine, said


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    aux = dict(output_router_logits=True, router_aux_loss_coef=0.3)
    return tiny.directory(tmp_path_factory.mktemp("state") / "m", "qwen3_moe", **aux)


def _moved(engine: mw.Engine) -> None:
    engine.model.parts[0].float().double()


def _given(engine: mw.Engine) -> None:
    for parameter in engine.model.parts[0].parameters():
        parameter.data = parameter.data.clone()


def _from_vector(engine: mw.Engine) -> None:
    parameters = list(engine.model.parts[0].parameters())
    vector_to_parameters(parameters_to_vector(parameters), parameters)


def _set(engine: mw.Engine, **values: Any) -> None:
    for name, value in values.items():
        setattr(engine, name, value)


def _another(engine: mw.Engine) -> mw.Engine:
    return mw.Engine(engine.model, lr=1e-9)


def _second_takes_over(engine: mw.Engine) -> None:
    second = _another(engine)
    engine.backward(mine(engine))
    second.discard()
    second.backward(mine(engine))
    engine.update()


def _late(change: Callable[[mw.Engine], Any]) -> Callable[[mw.Engine], Any]:
    return lambda engine: (engine.backward(mine(engine)), change(engine), engine.update())


def _early(change: Callable[[mw.Engine], Any]) -> Callable[[mw.Engine], Any]:
    return lambda engine: (change(engine), engine.step(mine(engine)))


def _only_norms_none(engine: mw.Engine) -> None:
    for name, parameter in engine.model.parts[0].named_parameters():
        if "norm" in name:
            parameter.grad = None


LIES = (
    r"StateError: [\w.]+ and \d+ more lie elsewhere than when the engine was made, .*model\.stored\(\)\[name\]\.copy_"
)
ALONE, TP, FSDP = dict[str, int](), dict(tp=2), dict(fsdp=2)
TWO = dict(replicate=2)
REFUSED: dict[str, tuple[dict[str, int], Callable[[mw.Engine], Any], str]] = {
    "moved": (ALONE, _early(_moved), LIES),
    "moved, fsdp": (FSDP, _early(_moved), LIES),
    "moved, tp": (TP, _early(_moved), LIES),
    "moved late": (FSDP, _late(_moved), LIES),
    "given another": (ALONE, _early(_given), LIES),
    "given a vector": (ALONE, _early(_from_vector), LIES),
    "another engine's": (FSDP, _second_takes_over, r"StateError: update\(\) of step 0 found those of another engine"),
    "discarded by another": (
        ALONE,
        _late(lambda e: _another(e).discard()),
        r"StateError: update\(\) of step 0 found no gradients; call backward",
    ),
    "zeroed": (
        ALONE,
        _late(lambda e: e.model.parts[0].zero_grad()),
        r"StateError: embed\.weight got no gradient, as \d+ of \d+ parameters",
    ),
    "some lost": (FSDP, _late(_only_norms_none), r"StateError: [\w.]*norm[\w.]* got no gradient, as \d+ of \d+"),
    "max_norm below 0": (ALONE, _early(lambda e: _set(e, max_norm=-1.0)), r"ConfigError: max_norm=-1\.0 must be"),
    "max_norm of nan": (
        ALONE,
        _early(lambda e: _set(e, max_norm=float("nan"))),
        r"ConfigError: max_norm=nan must be",
    ),
    "max_norm as text": (ALONE, _early(lambda e: _set(e, max_norm="1")), r"ConfigError: max_norm='1' must be"),
    "max_norm late": (
        TWO,
        _late(lambda e: _set(e, max_norm=0.1 + e.model.mesh.rank)),
        r"StateError: max_norm of step 0 is \S+, but was 1\.0 before its backward",
    ),
    "lr of two numbers": (
        ALONE,
        _early(lambda e: _set(e, lr=lambda step: torch.ones(2))),
        r"ConfigError: lr of step 0 is tensor\(\[1\., 1\.\]\); it must be a number",
    ),
    "lr of nothing": (ALONE, _early(lambda e: _set(e, lr=None)), r"ConfigError: lr of step 0 is None; it must be"),
    "a complex loss": (
        ALONE,
        _early(lambda e: _set(e, loss=lambda s, f: -s["logprobs"] * 1j)),
        r"DataError: the loss gave torch\.complex\d+; its terms must be floating",
    ),
    "deepcopy": (
        ALONE,
        lambda e: copy.deepcopy(e.model),
        r"StateError: a model .* cannot be copied; load it once more",
    ),
    "pickle": (ALONE, lambda e: pickle.dumps(e.model), r"StateError: a model .* cannot be copied"),
    "an engine as a model": (
        ALONE,
        lambda e: mw.logprobs(e, mine(e)[0]),
        r"ConfigError: Engine is no model; give what mw\.load returned \(of an engine: engine\.model\)",
    ),
    "an engine of an engine": (ALONE, lambda e: mw.Engine(e, lr=1.0), r"ConfigError: Engine is no model"),
    "no loss": (ALONE, lambda e: mw.Engine(e.model, lr=1.0, loss=None), r"ConfigError: loss=None must be"),
    "one beta": (ALONE, lambda e: mw.Engine(e.model, lr=1.0, betas=0.9), r"ConfigError: betas=0\.9 must be"),
    "entropy": (ALONE, lambda e: mw.Engine(e.model, lr=1.0, entropy="no"), r"ConfigError: entropy='no' must be True"),
    "source": (ALONE, lambda e: mw.load(None), r"LoadError: None is no path; give a Hugging Face model directory"),
    "train": (ALONE, lambda e: mw.load(e.model.directory, train=None), r"ConfigError: train=None must be a pattern"),
    "seed": (ALONE, lambda e: mw.init(e.model.directory, seed=1.5), r"ConfigError: seed=1\.5 must be a whole number"),
    "target": (ALONE, lambda e: mw.export(e.model, None), r"ExportError: None is no path; give the directory to write"),
    "fields": (
        ALONE,
        lambda e: mw.pack([[1, 2]], fields=[[1.0, 2.0]]),
        r"DataError: fields must be a dict",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(source: Path, name: str) -> None:
    mesh, act, pattern = REFUSED[name]
    for text in worlds.run(trials.world_of(mesh), said, source, mesh, act):
        assert re.search(pattern, text), text


def _remade(batch: mw.Batch, name: str) -> mw.Batch:
    docs = batch.docs
    changes: dict[str, dict[str, Any]] = {
        "labels": dict(labels=batch.labels.float()),
        "tokens": dict(tokens=batch.tokens.bool()),
        "tokens, narrow": dict(tokens=batch.tokens.to(torch.uint8)),  # which torch takes for a mask
        "labels, narrow": dict(labels=batch.labels.to(torch.int16)),
        "weight": dict(fields={"weight": batch.tokens * 1j}),
        "advantage": dict(fields={"advantage": [1.0] * len(batch)}),
        "num_filler": dict(num_filler=-3),
        "docs": dict(docs=replace(docs, bounds=(0, len(batch)))),  # one document, and yet the others' positions
        "docs, of others": dict(docs=replace(docs, cu_seqlens=docs.cu_seqlens.flip(0))),
        "docs, too short": dict(docs=replace(docs, bounds=(0, 2), cu_seqlens=docs.cu_seqlens[:2])),
        "docs, backwards": dict(docs=replace(docs, bounds=(0, 5, 3, len(batch)))),
        "docs, positions": dict(docs=replace(docs, positions_T=docs.positions_T + 1)),
    }
    return replace(batch, **changes[name])


@pytest.mark.parametrize(
    "name",
    ["labels", "tokens", "tokens, narrow", "labels, narrow",
     "weight", "advantage", "num_filler", "docs", "docs, of others", "docs, too short",
     "docs, backwards", "docs, positions"],
)  # fmt: skip
def test_a_batch_made_by_hand(source: Path, name: str) -> None:
    [text] = worlds.run(1, said, source, {}, lambda e: e.step([_remade(mw.pack([[1, 2, 3], [4, 5, 6, 7, 8]]), name)]))
    assert re.search(
        rf"DataError: {name.partition(',')[0]}\b.* is not as mw\.pack makes it; make batches with pack", text
    )


def raises_on_rank_1(source: Path) -> str:
    rank = mw.Mesh(fsdp=2).rank
    engine = build(source, FSDP, lr=lambda step: {0: 1e-3}[step * 0 + rank])
    try:
        engine.step(mine(engine))
    except Exception as error:  # noqa: BLE001 - errors of torch are what must not come
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_whatever_one_rank_raises_the_others_hear_of_it(source: Path) -> None:
    assert worlds.run(2, raises_on_rank_1, source, seconds=20) == [
        "RankError: rank 1 refuses to take part in a step; see its message",
        "KeyError: 1",
    ]


def three_steps(source: Path, mesh: dict[str, int], meddle: Callable[[mw.Engine], Any]) -> dict[str, torch.Tensor]:
    engine = build(source, mesh, router_aux="previous")
    for _ in range(3):
        meddle(engine)
        record = engine.step(mine(engine))
        assert record.expert_load is not None
        record.expert_load.zero_()  # it is the caller's own
    return engine.model.stored()


@pytest.mark.parametrize("mesh", [{}, dict(fsdp=2)], ids=str)
def test_a_discarded_step_is_not_the_one_before(source: Path, mesh: dict[str, int]) -> None:
    def other(engine: mw.Engine) -> None:
        engine.backward(tiny.batches(7))
        engine.discard()

    size = trials.world_of(mesh)
    plain = worlds.run(size, three_steps, source, mesh, lambda engine: None)
    for expected, found in zip(plain, worlds.run(size, three_steps, source, mesh, other), strict=True):
        assert all(torch.equal(expected[name], found[name]) for name in expected)


def narrow(source: Path, dtype: torch.dtype) -> tuple[float, float]:
    batches = [mw.pack([list(range(1, 101))] * 6)]
    wide, small = (
        build(source, {}, loss=lambda s, f, d=d: (-s["logprobs"] * 40).to(d)) for d in (torch.float64, dtype)
    )
    return wide.evaluate(batches), small.evaluate(batches)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_terms_of_a_narrow_loss_are_summed_wide(source: Path, dtype: torch.dtype) -> None:
    """Their sum is above what float16 holds, and 100 times a step of bfloat16 at its size."""
    [(expected, found)] = worlds.run(1, narrow, source, dtype)
    assert found == pytest.approx(expected, rel=3e-4)


def in_place(source: Path, mesh: dict[str, int]) -> tuple[float, float]:
    plain, meddling = build(source, mesh), build(source, mesh, loss=lambda s, f: s["logprobs"].neg_() * 1.0)
    return plain.evaluate(mine(plain)), meddling.evaluate(mine(plain))


def test_a_loss_may_write_into_its_scores(source: Path) -> None:
    for expected, found in worlds.run(2, in_place, source, TP):
        assert found == expected


def cut_off(source: Path, mesh: dict[str, int], target: Path) -> list[str]:
    engine, real, calls = build(source, mesh), AdamW._update, []

    def once(self: AdamW, *args: Any) -> None:
        if calls:
            raise KeyboardInterrupt
        calls.append(1)
        real(self, *args)

    AdamW._update = once  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        engine.step(mine(engine))
    AdamW._update = real  # type: ignore[method-assign]
    told = []
    for call in (
        lambda: engine.step(mine(engine)),
        engine.update,
        lambda: engine.evaluate(mine(engine)),
        lambda: mw.export(engine.model, target),
        lambda: mw.gather(engine.model),
        lambda: mw.Engine(engine.model, lr=1.0).step(mine(engine)),
    ):
        try:
            call()
        except mw.MeshwrightError as error:
            told.append(str(error))
    return told


def test_an_update_that_was_cut_off_is_not_gone_on_with(source: Path, tmp_path: Path) -> None:
    for told in worlds.run(2, cut_off, source, FSDP, tmp_path / "out"):
        assert len(told) == 6
        for text in told:
            assert re.match(r"the update of step 0 was cut off, .* may be changed; load the model again", text), text
    assert not list(tmp_path.iterdir())
