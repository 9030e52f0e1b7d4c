"""A new optimizer is one file: this one defines two, and everything takes them without another line.

SGD has one state tensor, so nothing may count on the two moments of AdamW. `Normalised` looks at whole matrices, so an
update gathers what other ranks hold.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

import meshwright as mw
from meshwright.axes import Axes
from meshwright.blueprint import Blueprint
from meshwright.checkpoint import opened_at, summary
from meshwright.cli import main
from meshwright.optim import Slices
from meshwright.plan import Figures, work_of
from meshwright.plan.terminal import plan_json
from meshwright.plan.wording import kind
from meshwright.sharding import Param
from tests import parts, tiny, trials, worlds
from tests.test_checkpoint_broken import error_of
from tests.trials import build, feed
from tests.words import words


@dataclass(frozen=True, kw_only=True)
class SGD(mw.Optimizer):
    """SGD with momentum, as torch.optim.SGD has it."""

    state_names: ClassVar[tuple[str, ...]] = ("momentum_buffer",)
    momentum: float = 0.9

    def update(self, slices: Slices, *, lr: float, step: int, decays: bool) -> None:
        (buffers,) = slices.state
        torch._foreach_mul_(buffers, self.momentum)
        torch._foreach_add_(buffers, slices.grads)
        torch._foreach_add_(slices.params, buffers, alpha=-lr)

    def plain_update(
        self, weight: Tensor, grad: Tensor, state: Sequence[Tensor], *, lr: float, step: int, decays: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        buffer = self.momentum * state[0] + grad
        return weight - lr * buffer, (buffer,)


@dataclass(frozen=True, kw_only=True)
class Normalised(mw.Optimizer):
    """Each matrix goes against its gradient, divided by the norm of that: no state, but the whole matrix."""

    state_names: ClassVar[tuple[str, ...]] = ()
    needs_whole_matrix: ClassVar[bool] = True

    def update(self, slices: Slices, *, lr: float, step: int, decays: bool) -> None:
        torch._foreach_sub_(slices.params, slices.grads, alpha=lr)  # of what is no matrix

    def matrix_direction(self, matrix: Tensor) -> Tensor:
        return matrix / (matrix.norm() + 1e-3)

    def matrix_step(self, param: Tensor, direction: Tensor, shape: tuple[int, int], *, lr: float, decays: bool) -> None:
        param.sub_(direction, alpha=lr)

    def plain_update(
        self, weight: Tensor, grad: Tensor, state: Sequence[Tensor], *, lr: float, step: int, decays: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        return weight - lr * grad, ()

    def plain_matrix_update(
        self, weight: Tensor, grad: Tensor, state: Sequence[Tensor], *, lr: float, step: int, decays: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        return weight - lr * grad / (grad.norm() + 1e-3), ()


@dataclass(frozen=True, kw_only=True)
class Unequal(SGD):
    """The embedding has one state tensor, all others two."""

    state_names: ClassVar[tuple[str, ...]] = ("momentum_buffer", "sums")

    def state_names_of(self, param: Param) -> tuple[str, ...]:
        return self.state_names[:1] if param.name.startswith("embed") else self.state_names

    def update(self, slices: Slices, *, lr: float, step: int, decays: bool) -> None:
        for state in slices.state:
            torch._foreach_add_(state, slices.grads)


def not_updated(source: Path) -> list[str]:
    engine = build(source, {}, optimizer=Unequal())
    engine.step(feed(engine))
    return [name for name, state in engine.optimizer.state.items() if not all(each.any() for each in state)]


def test_parameters_may_have_unequal_state(source: Path) -> None:
    assert worlds.run(1, not_updated, source) == [[]]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.directory(tmp_path_factory.mktemp("m"), "qwen3_moe", num_hidden_layers=2)


def trained(source: Path, mesh: dict[str, int], out: Path) -> tuple[dict[str, Tensor], int, int]:
    """Two steps, saved after the first: weights at the end, bytes of state, and those that were billed."""
    engine = build(source, mesh, optimizer=SGD())
    engine.step(feed(engine))
    mw.save(engine, out / "runs")
    dcp.save(engine.state_dict(), checkpoint_id=out / "dcp")
    engine.step(feed(engine))
    stored = engine.model.need(SGD()).stored(engine.model.mesh.rank)
    [billed] = [each.num_bytes for each in stored if each.what == "moments"]
    return mw.gather(engine.model), engine.optimizer.num_bytes, billed


def by_torch(source: Path) -> dict[str, Tensor]:
    """Run the same steps by torch.optim.SGD, on whole tensors."""
    engine = build(source, {}, optimizer=SGD(), max_norm=None)
    plain = {name: torch.nn.Parameter(whole.double()) for name, whole in mw.gather(engine.model).items()}
    sgd = torch.optim.SGD(plain.values(), lr=1e-2, momentum=0.9)
    for _ in range(3):
        engine.backward(feed(engine))
        for name, grad in mw.gather(engine.model, "grad").items():
            plain[name].grad = grad
        engine.update()
        sgd.step()
    ours = mw.gather(engine.model)  # rounded to the dtype of the files
    return {name: parameter.detach().to(ours[name].dtype) - ours[name] for name, parameter in plain.items()}


def resumed(source: Path, mesh: dict[str, int], out: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], str, str]:
    """Resume from the checkpoint and from torch's; return the weights after the second step, and the errors with
    another optimizer."""
    engine, by_dcp = (build(source, mesh, optimizer=SGD()) for _ in range(2))
    mw.resume(engine, out / "runs")
    state = by_dcp.state_dict()
    dcp.load(state, checkpoint_id=out / "dcp")
    by_dcp.load_state_dict(state)
    for each in (engine, by_dcp):
        each.step(feed(each))
    adamw = build(source, mesh)
    errors = [error_of(lambda: mw.resume(adamw, out / "runs")), error_of(lambda: adamw.load_state_dict(state))]
    return mw.gather(engine.model), mw.gather(by_dcp.model), *errors


@pytest.fixture(scope="module")
def saved(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    out = tmp_path_factory.mktemp("saved")
    return out, worlds.run(2, trained, source, dict(cp=2), out)  # one data rank, as tp=2 has


def test_it_trains_as_by_torch(source: Path) -> None:
    [off] = worlds.run(1, by_torch, source)
    assert max(float(each.abs().max()) for each in off.values()) < 1e-7


def test_it_goes_on_on_another_mesh(source: Path, saved: tuple[Path, Any]) -> None:
    out, result = saved
    for ours, by_dcp, *errors in worlds.run(2, resumed, source, dict(tp=2), out):
        for name in ours:
            torch.testing.assert_close(ours[name], result[0][0][name], rtol=2e-7, atol=1e-9)  # rounded to float32
            assert torch.equal(ours[name], by_dcp[name])
        assert re.search(words("CheckpointError", "momentum_buffer", "AdamW", "exp_avg", "optimizer="), errors[0])
        assert re.search(words("CheckpointError", "exp_avg|momentum_buffer"), errors[1])


def test_a_checkpoint_has_its_state(source: Path, saved: tuple[Path, Any], tmp_path: Path) -> None:
    out, _ = saved
    step = "step-000001"
    held = summary(opened_at(out / "runs" / step))
    assert {*held["planes"]} == {"weights", "master", "momentum_buffer"}
    assert held["planes"]["momentum_buffer"]["tensors"] == held["planes"]["weights"]["tensors"]
    assert held["settings"] | {"momentum": 0.9, "state": "None"} == held["settings"]
    assert "betas" not in held["settings"]
    assert main(["convert", str(out / "runs"), str(tmp_path / "dcp"), "--to", "dcp"]) == 0
    convert = ["convert", str(tmp_path / "dcp"), str(tmp_path / "back"), "--to", "meshwright", "--like", str(source)]
    assert main(convert) == 0
    files = sorted((out / "runs" / step / "momentum_buffer").glob("*.safetensors"))
    assert files
    for file in files:
        assert file.read_bytes() == (tmp_path / "back" / step / "momentum_buffer" / file.name).read_bytes()


def test_its_bytes_are_billed_and_planned(source: Path, saved: tuple[Path, Any]) -> None:
    for _, held, billed in saved[1]:
        assert held == billed
    blueprint = Blueprint.of(json.loads((source / "config.json").read_text()))
    figures, plain = (
        Figures("it", blueprint, Axes(fsdp=2), work_of(Axes(fsdp=2), 64, 1), optimizer=optimizer)
        for optimizer in (SGD(), mw.AdamW())
    )
    planned, of_adamw = (plan_json(each, {})["memory"][0]["bytes"]["moments"] for each in (figures, plain))
    assert 2 * planned == of_adamw > 0
    assert (kind("moments", figures), kind("moments", plain)) == ("state of SGD", "moments of AdamW")


TRIED = [(SGD(), dict(fsdp=2)), (Normalised(), dict(fsdp=2)), (Normalised(), dict(tp=2))]


def test_oracles_take_it(source: Path) -> None:
    """O1 compares updates with the plain one, U1 the mesh with one process, K1 bytes and collectives with the bill."""
    tried = {str(each): replace(trials.trial(source, each[1]), optimizer=each[0]) for each in parts.every(2, TRIED)}
    for of_one in (reference.notes for reference in trials.references([*tried.values()])):
        assert not of_one.findings
        assert "O1" in {margin.oracle for margin in of_one.margins}
    assert trials.findings_in_turn(tried) == {name: [] for name in tried}


def test_narrow_state_is_for_every_optimizer_and_8_bits_for_those_with_codes() -> None:
    assert SGD(state_dtype=torch.bfloat16).wide_dtype(torch.float32) == torch.bfloat16
    with pytest.raises(mw.ConfigError, match=words(r"state_dtype=torch\.uint8", r"torch\.bfloat16")):
        SGD(state_dtype=torch.uint8)
