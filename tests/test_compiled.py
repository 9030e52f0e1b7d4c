"""Layers are compiled where the user has left it open, nothing forbids it, and the device is an accelerator."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import meshwright as mw
from meshwright.blueprint import Blueprint
from meshwright.parallel import compiled as module
from meshwright.recipe import Recipe
from tests import tiny
from tests.words import words

GPU = torch.device("meta", 3)  # it stands for one that compiles by default


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "has_inductor", lambda device: device.type == "meta")
    monkeypatch.setattr(torch, "compile", lambda f, **_: f)
    monkeypatch.setattr(torch, "allclose", lambda a, b: True)


def decided(recipe: Recipe, device: torch.device = GPU, model: Any = None) -> bool | None:
    return module.with_compiled(recipe, model or Blueprint.of(tiny.of("qwen3")).module, device).memory.compiled


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        (Recipe(), ""),
        (Recipe(memory=mw.MemoryOptions(recompute="full")), ""),
        (Recipe(memory=mw.MemoryOptions(recompute="selective")), "selective"),
        (Recipe(pipeline=mw.Pipeline("zero-bubble")), "zero-bubble"),
        (Recipe(pipeline=mw.Pipeline("v")), "'v'"),
        (Recipe(fp8="block"), "fp8"),
        (Recipe(dtype=torch.float64), "float64"),
    ],
)
def test_by_default_on_a_gpu(recipe: Recipe, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "meshwright"):
        assert decided(recipe) is not bool(reason)
    assert (reason in caplog.text and "not compiled" in caplog.text) if reason else "minutes" in caplog.text


@pytest.mark.usefixtures("on_a_gpu")
def test_what_the_model_or_the_machine_forbids(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    foreign: Any = SimpleNamespace(layers={"0": torch.nn.Linear(1, 1)})
    with caplog.at_level(logging.INFO, "meshwright"):
        assert decided(Recipe(), model=foreign) is False
        assert "Linear is not a subclass" in caplog.text
        with monkeypatch.context() as patch:
            patch.setattr(sys, "version_info", (3, 13, 0, "final", 0))
            assert decided(Recipe()) is False
        assert "3.13.0" in caplog.text
        monkeypatch.setattr(torch, "allclose", lambda a, b: False)
        assert decided(Recipe()) is False
        assert "something else" in caplog.text
        monkeypatch.setattr(torch, "compile", lambda f: 1 / 0)
        assert decided(Recipe()) is False
    assert caplog.records[-1].levelno == logging.WARNING
    assert "division by zero" in caplog.records[-1].message
    monkeypatch.setattr(torch, "compile", refuse(torch.OutOfMemoryError))
    with pytest.raises(torch.OutOfMemoryError):
        decided(Recipe())


def refuse(error: type[Exception]) -> Callable[..., Any]:
    def raised(*_: object) -> Any:
        raise error

    return raised


def test_what_the_user_says_counts_and_a_cpu_compiles_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_failure", None)
    with caplog.at_level(logging.INFO, "meshwright"):
        assert decided(Recipe(), torch.device("cpu")) is False
        for choice in (True, False):
            for device in (GPU, torch.device("cpu")):
                assert decided(Recipe(memory=mw.MemoryOptions(compiled=choice)), device) is choice
    assert not caplog.text
    with pytest.raises(mw.ConfigError, match=words("compiled='auto'", "None")):
        mw.MemoryOptions(compiled="auto")  # type: ignore[arg-type]


@pytest.mark.usefixtures("source")
def test_loading_decides(source: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests import worlds

    assert worlds.run(1, loaded, source) == [(False, [False, True])]


def loaded(source: Any) -> tuple[bool | None, list[bool]]:
    """Return what a CPU decides, and which of two passes, without and with gradients, were compiled where a device
    compiles."""
    mesh, ran = mw.Mesh(device="cpu"), list[bool]()
    by_default = mw.load(source, mesh).recipe.memory.compiled

    def compile_layer(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def compiled(*args: Any) -> Tensor:
            ran[-1] = True
            return run(*args)

        return compiled

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "has_inductor", lambda _: True)
        patch.setattr(module, "_failure", lambda device: "")
        patch.setattr(module, "compile_layer", compile_layer)
        model = mw.load(source, mesh, dtype=torch.float32)
        engine = mw.Engine(model, lr=1e-3)
        for act in (engine.evaluate, engine.backward):
            ran.append(False)
            act(tiny.batches(0))
    return by_default, ran


def test_many_lengths_and_failures_of_the_compiler(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """torch gives up on a function that it has compiled eight times, with a warning that few understand."""
    compiled_for = list[int]()

    def compile_layer(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def compiled(x: Tensor) -> Tensor:
            compiled_for.append(len(x))
            if len(x) == 1:
                raise torch._dynamo.exc.TorchDynamoException("no compiler")
            return run(x)

        return compiled

    monkeypatch.setattr(module, "compile_layer", compile_layer)
    module._say_once.cache_clear()
    layer = module.CompiledLayer(lambda x: 2 * x)
    for length in (4, 7, 9, 7, 4, 9):
        assert torch.equal(layer(torch.ones(length)), torch.full((length,), 2.0))
    assert compiled_for == [4, 7, 7, 4]
    assert len([each for each in caplog.messages if "others run slower, such as 9 tokens" in each]) == 1
    with pytest.raises(mw.ConfigError, match="no compiler\\nGive compiled=False"):
        module.CompiledLayer(lambda x: x)(torch.ones(1))


def test_divisions_are_rounded_as_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales of FP8 blocks are quotients: an approximate one differs in its last bit from that of an all-gather."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(torch, "compile", lambda f, **options: given.update(options))
    module.compile_layer(lambda: torch.empty(0))
    assert [*given["options"].values()] == [True], given
    assert given["dynamic"] is False
