"""The engine on a device of another name: no tensor is forgotten on the CPU, and every number is bitwise the CPU's."""

from __future__ import annotations

import multiprocessing
import pickle  # noqa: TID251 - between two processes of this test
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import meshwright as mw
from tests import parts, renamed, tiny, trials, worlds

AUX = dict(output_router_logits=True, router_aux_loss_coef=0.3)
# Even shards: FSDP gives uneven ones new memory at the first forward where it meets a subclass of Tensor.
MODELS: dict[str, dict[str, Any]] = {"qwen3": dict(vocab_size=132), "qwen3_5_moe": AUX, "qwen2": {}}
MODELS["qwen3_tied"] = dict(vocab_size=132, layout="twice")


def used(source: Path, out: Path, mesh: dict[str, int], device: str, dtype: torch.dtype, head: str) -> list[Any]:
    """What a user does, with everything that it gives him."""
    if device == renamed.NAME:
        renamed.install()
    # The kernels of attention are chosen by the name of the device.
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return list(_use(source, out, mesh, device, dtype, head))


def _use(source: Path, out: Path, mesh: dict[str, int], device: str, dtype: torch.dtype, head: str) -> Any:
    model = mw.load(source, mw.Mesh(**mesh, device=device), dtype=dtype, head=head)
    assert all(p.device.type == device for p in trials.parameters(model))
    value = head == "value"
    engine = mw.Engine(model, lr=1e-2, entropy=not value, loss=mw.losses.squared_error if value else _entropic)
    batches = tiny.batches(model.mesh.data_rank, target=value)
    yield engine.evaluate(batches)
    for _ in range(2):
        record = engine.step(batches)
        yield from (record.loss, record.grad_norm, record.expert_load)
    yield engine.backward(batches)
    yield from mw.gather(model, "grad").values()
    engine.discard()
    yield from (tensor for _, tensor in mw.stream(model))
    yield mw.logits(model, batches[0])
    if not value:
        yield mw.logprobs(model, batches[0])
    mw.export(model, out)
    fresh = mw.init(source, model.mesh, dtype=dtype)
    yield from mw.gather(fresh).values()


def _entropic(scores: Any, fields: Any) -> Tensor:
    return -scores["logprobs"] - 0.1 * scores["entropy"]


CASES = [
    ("qwen3_5_moe", dict(tp=2, ep=2), torch.float32, "lm"),
    ("qwen3", {}, torch.float32, "value"),
    ("qwen3", {}, torch.float32, "lm"),
    ("qwen3_5_moe", {}, torch.float32, "lm"),
    ("qwen3", dict(fsdp=2), torch.float32, "lm"),
    ("qwen3_tied", dict(tp=2), torch.float32, "lm"),
    ("qwen2", {}, torch.float64, "lm"),
]


@pytest.fixture(scope="module")
def fresh() -> Iterator[ProcessPoolExecutor]:
    """A process that forks ranks and does nothing else: torch counts its kinds of devices at the first backward, which
    other tests have made in this one."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


def on_ranks(size: int, *args: Any) -> bytes:
    torch.set_num_threads(1)
    return pickle.dumps(worlds.run(size, compared, *args))


@pytest.mark.parametrize(("name", "mesh", "dtype", "head"), parts.every(4, CASES), ids=str)
def test_every_number_is_that_of_the_cpu(
    fresh: ProcessPoolExecutor, tmp_path: Path, name: str, mesh: dict[str, int], dtype: torch.dtype, head: str
) -> None:
    source = tiny.directory(tmp_path / "m", name, **MODELS[name])
    size, found = trials.world_of(mesh), {}
    for device in ("cpu", renamed.NAME):
        run = fresh.submit(on_ranks, size, source, tmp_path / device, mesh, device, dtype, head)
        found[device] = pickle.loads(run.result(timeout=100))
    for here, there in zip(*found.values(), strict=True):
        assert len(here) == len(there) > 9
        for a, b in zip(here, there, strict=True):
            assert torch.equal(a, b) if isinstance(a, Tensor) else a == b
    files = [(tmp_path / device / "model.safetensors").read_bytes() for device in found]
    assert files[0] == files[1]


def compared(*args: Any) -> list[Any]:
    return [x.raw if isinstance(x, renamed.Moon) else x for x in used(*args)]


def mixed() -> list[str]:
    renamed.install()
    there, said = torch.ones(3, device=renamed.NAME), []
    for mistake in (lambda: there + torch.zeros(3), lambda: there[torch.tensor([0])], there.numpy):
        try:
            mistake()
            said.append("nothing")
        except (RuntimeError, TypeError) as error:
            said.append(str(error))
    view = there[1:]
    view.add_(torch.tensor(2.0))  # a number without dims may come from anywhere
    return [*said, str(there.tolist())]


def test_the_device_refuses_what_an_accelerator_would() -> None:
    added, indexed, numpy, whole = worlds.run(1, mixed)[0]
    assert "aten.add.Tensor mixes moon with cpu" in added
    assert "mixes moon with cpu" in indexed
    assert numpy != "nothing"
    assert whole == "[1.0, 3.0, 3.0]"


def test_a_tensor_made_without_its_device_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny.directory(tmp_path / "m", "qwen3", **MODELS["qwen3"])
    real = torch.arange

    def forgetful(*args: Any, device: object = None) -> Tensor:
        return real(*args)

    monkeypatch.setattr(torch, "arange", forgetful)
    with pytest.raises(mw.RankError, match="mixes moon with cpu"):
        worlds.run(1, compared, source, tmp_path / "o", {}, renamed.NAME, torch.float32, "lm")
