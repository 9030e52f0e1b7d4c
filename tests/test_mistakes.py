"""Mistakes of a user are named on all ranks, before any work."""

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
from tests.trials import feed
from tests.words import words


def _on_rank_1(mistaken: Any, fine: Any) -> Any:
    return lambda engine: engine.step(mistaken(engine) if engine.model.mesh.rank == 1 else fine(engine))


def _with(engine: mw.Engine, loss: Any) -> mw.Engine:
    return mw.Engine(engine.model, lr=1.0, loss=loss)


def _ratio_of_answers(engine: mw.Engine) -> None:
    """Return the ratio of whole answers; it is 1 in the first step."""
    batches = feed(engine)
    lo, hi = engine.model.mesh.token_range(len(batches[0]))
    old_T = mw.logprobs(engine.model, batches[0])[lo:hi]
    loss = lambda s, f: -(s["logprobs"] - old_T[: len(s["logprobs"])]).mean().exp().expand_as(s["logprobs"])  # noqa: E731
    _with(engine, loss).step(batches[:1])


MISTAKES: list[tuple[str, dict[str, int], Any, str]] = [
    ("update first", {}, lambda e: e.update(), words("^StateError", r"update\(\)", "step 0", r"backward\(batches\)")),
    ("backward twice", {}, lambda e: [e.backward(feed(e)), e.backward(feed(e))],
        words("^StateError", "gradients", r"update\(\)", r"discard\(\)")),
    ("vocabulary", {}, lambda e: e.step([mw.pack([[1, 131]])]), words("^DataError", "token 131", "position 1",
        "vocabulary of 131")),
    ("gradients", {}, lambda e: mw.gather(e.model, "grad"),
        words("^StateError", "gradients", r"engine\.backward\(.*update\(\)")),
    ("which", {}, lambda e: mw.gather(e.model, "momentum"), words("^ConfigError", "'momentum'", "'weight'", "'grad'")),
    ("state dict", {}, lambda e: [part.state_dict() for part in e.model.parts],
        words("^StateError", "state dict", r"mw\.gather\(model\)")),
    ("bad data on one rank", dict(fsdp=2), _on_rank_1(lambda e: [mw.pack([[1, 999]], length=tiny.LENGTH)] * 2, feed),
        words("^RankError", "rank 1 ", "a step", "DataError: .*token 999") + "|" + words("^DataError", "token 999")),
    ("a field that is not there", {}, lambda e: mw.Engine(e.model, lr=1.0, loss=lambda s,
        f: f["advantage"]).step(feed(e)), words("^DataError", "'advantage'", r"scores \['logprobs'\]",
        r"pack\(.*fields=")),
    ("two engines", {}, lambda e: [e.backward(feed(e)), mw.Engine(e.model, lr=1.0).backward(feed(e))],
        words("^StateError", "gradients", r"update\(\)", r"discard\(\)")),
    ("lr of nan", {}, lambda e: mw.Engine(e.model, lr=lambda s: float("nan")).step(feed(e)),
        words("^ConfigError", r"\blr\b", "step 0", r"\bnan\b")),
    ("loading", {}, lambda e: [part.layers["0"].load_state_dict({}) for part in e.model.parts],
        words("^StateError", "state dict", r"mw\.load")),
    ("a loss of another shape", {}, lambda e: mw.Engine(e.model, lr=1.0, loss=lambda s,
        f: s["logprobs"].mean()).step(feed(e)), words("^DataError", r"loss.* \(\) ", rf"\({tiny.LENGTH},\)")),
    ("not finite", dict(fsdp=2), lambda e: mw.Engine(e.model, lr=1.0, loss=lambda s,
        f: s["logprobs"] * (1e308 if e.model.mesh.rank else 1)).step(feed(e)),
        words("^NonFiniteError", r"\bloss\b", "step 0", "-inf")),
    ("no batches", dict(fsdp=2), _on_rank_1(lambda e: [None], feed),
        words("^DataError", r"mw\.pack", "NoneType") + "|" + words("^RankError", "rank 1 ", "a step", "NoneType")),
    ("a loss of nothing", {}, lambda e: _with(e, lambda s, f: None).step(feed(e)),
        words("^DataError", "loss.*NoneType")),
    ("a detached loss", {}, lambda e: _with(e, lambda s, f: -s["logprobs"].detach()).step(feed(e)),
        words("^StateError", r"\bloss\b", "detach")),
    ("without gradients", dict(tp=2), lambda e: torch.no_grad()(e.step)(feed(e)),
        words("^StateError", r"\bloss\b", r"torch\.no_grad\(\)", "train= of mw")),
    ("a loss that runs its model", dict(fsdp=2), lambda e: _with(e, lambda s, f: (mw.logprobs(e.model, feed(e)[0]),
        -s["logprobs"])[1]).step(feed(e)), words("^StateError", "logprobs", "model", r"\bloss\b", r"pack\(.*fields=")),
    ("frozen later", {}, lambda e: _switched(e, "head.weight", on=False),
        words("^StateError", r"head\.weight", "0 more", "requires_grad", "train= of mw")),
    ("a loss of whole documents", dict(tp=2), _ratio_of_answers,
        words("^DataError", r"\bloss\b", 'per="document"', r"mw\.logprobs")),
]  # fmt: skip


def _switched(engine: mw.Engine, name: str, *, on: bool) -> None:
    engine.model.parameter(name).requires_grad_(on)
    engine.step(feed(engine))


PATTERNS = {name: pattern for name, _, _, pattern in MISTAKES}


@pytest.fixture(scope="module")
def messages_of_mistakes(source: Path) -> Callable[[str], list[str]]:
    return trials.said_by_all(source, {name: (mesh, mistake) for name, mesh, mistake, _ in MISTAKES})


@pytest.mark.parametrize("name", PATTERNS)
def test_mistakes_are_named_on_all_ranks(messages_of_mistakes: Callable[[str], list[str]], name: str) -> None:
    for text in messages_of_mistakes(name):
        assert re.search(PATTERNS[name], text), text


def refused(source: Path, args: dict[str, Any]) -> str:
    options = dict(args)
    loading = {name: options.pop(name) for name in ("head", "mesh") if name in options}
    try:
        if "optimizer" in options:
            options["optimizer"] = mw.AdamW(**options["optimizer"])
        mw.Engine(mw.load(source, **loading), **{"lr": 1e-3, **options})
    except mw.ConfigError as error:
        return str(error)
    return "nothing"


ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    str(options): (options, pattern)
    for options, pattern in [
        (dict(lr="1e-3"), r"lr='1e-3'"),
        (dict(lr=float("inf")), r"lr=inf\b"),
        (dict(optimizer=dict(betas=(0.9,))), r"betas=\(0\.9,\)"),
        (dict(optimizer=dict(weight_decay=float("inf"))), r"weight_decay=inf\b"),
        (dict(optimizer=dict(eps=1e-60)), r"eps=1e-60\b"),
        (dict(optimizer=dict(state_dtype="bfloat16")), words("state_dtype=bfloat16", r"torch\.bfloat16")),
        (dict(head="value", entropy=True), words("entropy=True", "head", "values")),
        (dict(mesh=4), words("mesh=4", r"mw\.Mesh\(fsdp=4\)")),
    ]
}


@pytest.fixture(scope="module")
def messages_of_arguments(source: Path) -> dict[str, list[str]]:
    return worlds.in_turn(1, {name: partial(refused, source, options) for name, (options, _) in ARGUMENTS.items()})


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_that_cannot_be(messages_of_arguments: dict[str, list[str]], name: str) -> None:
    [result] = messages_of_arguments[name]
    assert re.search(ARGUMENTS[name][1], result), result


@pytest.mark.parametrize(
    ("options", "env", "pattern"),
    [
        (dict(device="foo"), {}, r"device='foo'"),
        (dict(device="meta"), {}, r"device='meta'"),
        (dict(device="cuda"), {}, words("device='cuda'", "device='cpu'")),
        (dict(timeout_s=0), {}, r"timeout_s=0\b"),
        ({}, dict(WORLD_SIZE="1"), words("WORLD_SIZE=1", "RANK, MASTER_ADDR, MASTER_PORT", "torchrun")),
        ({}, dict(WORLD_SIZE="abc", RANK="0", MASTER_ADDR="x", MASTER_PORT="1"), r"WORLD_SIZE='abc'"),
    ],
    ids=str,
)
def test_meshes_that_cannot_begin(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], env: dict[str, str], pattern: str
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    with pytest.raises(mw.MeshError, match=pattern):
        mw.Mesh(**options)
