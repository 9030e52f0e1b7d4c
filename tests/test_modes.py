"""Global switches of torch are refused, or have no effect."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import meshwright as mw
from tests import tiny, trials, worlds
from tests.trials import build, feed, said
from tests.words import words


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.directory(tmp_path_factory.mktemp("modes") / "m", "qwen3_moe")


inferring = torch.inference_mode()
rounding = torch.autocast("cpu", torch.bfloat16)
CALLS: dict[str, tuple[dict[str, int], Callable[..., Any]]] = {
    "step": ({}, lambda on, e: on(e.step)(feed(e))),
    "update": (dict(fsdp=2), lambda on, e: (e.backward(feed(e)), on(e.update)())),
    "evaluate": (dict(fsdp=2), lambda on, e: on(e.evaluate)(feed(e))),
    "logprobs": (dict(tp=2), lambda on, e: on(mw.logprobs)(e.model, feed(e)[0])),
    "logits": ({}, lambda on, e: on(mw.logits)(e.model, feed(e)[0])),
    "gather": (dict(fsdp=2), lambda on, e: on(mw.gather)(e.model)),
    "engine": ({}, lambda on, e: on(mw.Engine)(e.model, lr=1.0)),
    "load": ({}, lambda on, e: on(mw.load)(e.model.directory, e.model.mesh)),
    "init": ({}, lambda on, e: on(mw.init)(e.model.directory, e.model.mesh)),
}


@pytest.fixture(scope="module")
def messages_under_inference_mode(source: Path) -> Callable[[str], list[str]]:
    return trials.said_by_all(source, {name: (mesh, partial(act, inferring)) for name, (mesh, act) in CALLS.items()})


@pytest.mark.parametrize("name", CALLS)
def test_inference_mode_is_refused(messages_under_inference_mode: Callable[[str], list[str]], name: str) -> None:
    """Tensors made under it fail in a later step, deep inside torch: FSDP keeps some from its first forward."""
    for text in messages_under_inference_mode(name):
        assert re.search(words("^StateError", r"torch\.inference_mode\(\)"), text), text


def test_a_batch_of_inference_mode_is_refused(source: Path) -> None:
    for text in worlds.run(2, said, source, dict(fsdp=2), lambda engine: engine.step(inferring(feed)(engine))):
        assert re.search(words("^DataError", r"\bbatch\b", r"torch\.inference_mode\(\)"), text), text


@pytest.mark.parametrize("name", ["step", "logits"])
def test_autocast_is_refused(source: Path, name: str) -> None:
    mesh, act = CALLS[name]
    [text] = worlds.run(1, said, source, mesh, lambda engine: act(rounding, engine))
    assert re.search(words("^StateError", r"torch\.autocast\('cpu'\)", "dtype= of mw"), text), text


def under(source: Path, dtype: torch.dtype) -> list[Any]:
    """Take a step late in a run: some dtypes cannot hold 301."""
    torch.set_default_dtype(dtype)
    engine = build(source, {}, loss=lambda scores, fields: -scores["logprobs"] * fields["advantage"])
    batch = mw.pack([[5, 6, 7], [8, 9]], fields={"advantage": [[1.1, -0.3, 0.7], [0.2, 0.9]]})
    engine.step([batch])
    engine.optimizer.steps = 300
    record = engine.step([batch])
    return [record.loss, record.grad_norm, batch.fields["advantage"].double(), *engine.model.stored().values()]


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_default_dtype_of_torch_changes_nothing(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    source = tiny.directory(tmp_path / "m", family)
    [expected], [result] = (worlds.run(1, under, source, default) for default in (torch.float32, dtype))
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(expected, result, strict=True))


def on(source: Path, device: str) -> list[Any]:
    torch.set_default_device(device)
    engine = mw.Engine(mw.init(source, mw.Mesh(tp=2, device="cpu"), dtype=torch.float64), lr=1e-2)
    batch = mw.pack([[5, 6, 7], [8, 9]], length=6)
    record = engine.step([batch])
    loaded = mw.load(source, engine.model.mesh)
    weights = [*engine.model.stored().values(), *loaded.stored().values(), *mw.gather(loaded).values()]
    return [record.loss, record.grad_norm, *weights, mw.logprobs(engine.model, batch)]


def test_the_default_device_of_torch_changes_nothing(source: Path) -> None:
    for expected, result in zip(*(worlds.run(2, on, source, device) for device in ("cpu", "meta")), strict=True):
        assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(expected, result, strict=True))
