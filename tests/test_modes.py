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
from tests import parts, tiny, trials, worlds
from tests.trials import build, feed
from tests.words import words

inferring = torch.inference_mode()
rounding = torch.autocast("cpu", torch.bfloat16)
CALLS: dict[str, tuple[dict[str, int], Callable[..., Any]]] = {
    "step": ({}, lambda on, e: on(e.step)(feed(e))),
    "update": (dict(fsdp=2), lambda on, e: (e.backward(feed(e)), on(e.update)())),
    "evaluate": (dict(fsdp=2), lambda on, e: on(e.evaluate)(feed(e))),
    "logprobs": (dict(fsdp=2), lambda on, e: on(mw.logprobs)(e.model, feed(e)[0])),
    "logits": ({}, lambda on, e: on(mw.logits)(e.model, feed(e)[0])),
    "gather": (dict(fsdp=2), lambda on, e: on(mw.gather)(e.model)),
    "engine": ({}, lambda on, e: on(mw.Engine)(e.model, lr=1.0)),
    "load": ({}, lambda on, e: on(mw.load)(e.model.directory, e.model.mesh)),
    "init": ({}, lambda on, e: on(mw.init)(e.model.directory, e.model.mesh)),
}


ACTS = {name: (mesh, partial(act, inferring)) for name, (mesh, act) in CALLS.items()}
ACTS["batch"] = dict(fsdp=2), lambda engine: engine.step(inferring(feed)(engine))
ACTS |= {f"{name}, rounding": (CALLS[name][0], partial(CALLS[name][1], rounding)) for name in ("step", "logits")}


@pytest.fixture(scope="module")
def messages(source: Path) -> Callable[[str], list[str]]:
    return trials.said_by_all(source, ACTS)


@pytest.mark.parametrize("name", CALLS)
def test_inference_mode_is_refused(messages: Callable[[str], list[str]], name: str) -> None:
    """Tensors made under it fail in a later step, deep inside torch: FSDP keeps some from its first forward."""
    for text in messages(name):
        assert re.search(words("^StateError", r"torch\.inference_mode\(\)"), text), text


def test_a_batch_of_inference_mode_is_refused(messages: Callable[[str], list[str]]) -> None:
    for text in messages("batch"):
        assert re.search(words("^DataError", r"\bbatch\b", r"torch\.inference_mode\(\)"), text), text


@pytest.mark.parametrize("name", ["step", "logits"])
def test_autocast_is_refused(messages: Callable[[str], list[str]], name: str) -> None:
    [text] = messages(f"{name}, rounding")
    assert re.search(words("^StateError", r"torch\.autocast\('cpu'\)", "dtype= of mw"), text), text


def under(source: Path, dtype: torch.dtype) -> list[Any]:
    """Take a step late in a run: some dtypes cannot hold 301."""
    torch.set_default_dtype(dtype)
    try:
        engine = build(source, {}, loss=lambda scores, fields: -scores["logprobs"] * fields["advantage"])
        batch = mw.pack([[5, 6, 7], [8, 9]], fields={"advantage": [[1.1, -0.3, 0.7], [0.2, 0.9]]})
        engine.step([batch])
        engine.optimizer.steps = 300
        record = engine.step([batch])
        return [record.loss, record.grad_norm, batch.fields["advantage"].double(), *engine.model.stored().values()]
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5"])
def test_the_default_dtype_of_torch_changes_nothing(tmp_path: Path, family: str) -> None:
    source = tiny.directory(tmp_path / "m", family)
    tried = parts.every(2, [torch.bfloat16, torch.float16], family != "qwen3_moe")
    check_equal({dtype: partial(under, source, dtype) for dtype in (torch.float32, *tried)}, 1)


def check_equal(acts: dict[Any, Callable[[], list[Any]]], size: int) -> None:
    """Check that all acts have the results of the first one."""
    first, *others = worlds.in_turn(size, acts).values()
    for ranks in others:
        for expected, result in zip(first, ranks, strict=True):
            pairs = zip(expected, result, strict=True)
            assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in pairs)


def on(source: Path, device: str) -> list[Any]:
    torch.set_default_device(device)
    try:
        engine = mw.Engine(mw.init(source, trials.mesh_of(dict(tp=2)), dtype=torch.float64), lr=1e-2)
        batch = mw.pack([[5, 6, 7], [8, 9]], length=6)
        record = engine.step([batch])
        loaded = mw.load(source, engine.model.mesh)
        weights = [*engine.model.stored().values(), *loaded.stored().values(), *mw.gather(loaded).values()]
        return [record.loss, record.grad_norm, *weights, mw.logprobs(engine.model, batch)]
    finally:
        torch.set_default_device(None)


def test_the_default_device_of_torch_changes_nothing(tmp_path: Path) -> None:
    source = tiny.directory(tmp_path / "m", "qwen3_moe")
    check_equal({device: partial(on, source, device) for device in ("meta", "cpu")}, 2)
