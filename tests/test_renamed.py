"""The engine on a device of another name: no tensor stays on the CPU, every result is bitwise equal to the CPU's, and
the host rarely waits."""

from __future__ import annotations

import functools
import multiprocessing
import pickle  # noqa: TID251 - between two processes of this test
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import meshwright as mw
from meshwright import ops
from meshwright.axes import DENSE, REPLICA
from meshwright.mesh.hosts import rounds
from tests import parts, renamed, tiny, trials, worlds

AUX = dict(output_router_logits=True, router_aux_loss_coef=0.3)
# Even shards: FSDP gives uneven ones new memory at the first forward where it meets a subclass of Tensor.
TWO = dict(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])  # one layer of each kind
MODELS: dict[str, dict[str, Any]] = {"qwen3": dict(vocab_size=132), "qwen3_5_moe": {**AUX, **TWO}, "qwen2": {}}
MODELS["qwen3_tied"] = dict(vocab_size=132, layout="twice")


def used(source: Path, out: Path, mesh: dict[str, int], device: str, dtype: torch.dtype, head: str) -> list[Any]:
    """Return the results of all calls that a user may make."""
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
    """Start a process that only forks ranks. torch counts kinds of devices at the first backward, which this process
    has made in other tests."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


def on_ranks(size: int, *args: Any) -> bytes:
    torch.set_num_threads(1)
    return pickle.dumps(worlds.run(size, compared, *args))


@pytest.mark.parametrize(("name", "mesh", "dtype", "head"), parts.every(4, CASES), ids=str)
def test_results_equal_those_of_the_cpu(
    fresh: ProcessPoolExecutor, tmp_path: Path, name: str, mesh: dict[str, int], dtype: torch.dtype, head: str
) -> None:
    source = tiny.directory(tmp_path / "m", name, **MODELS[name])
    size, results = trials.world_of(mesh), {}
    for device in ("cpu", renamed.NAME):
        run = fresh.submit(on_ranks, size, source, tmp_path / device, mesh, device, dtype, head)
        results[device] = pickle.loads(run.result(timeout=100))
    for cpu, device_ in zip(*results.values(), strict=True):
        assert len(cpu) == len(device_) > 6
        for a, b in zip(cpu, device_, strict=True):
            assert torch.equal(a, b) if isinstance(a, Tensor) else a == b
    files = [(tmp_path / device / "model.safetensors").read_bytes() for device in results]
    assert files[0] == files[1]


def compared(*args: Any) -> list[Any]:
    return [x.raw if isinstance(x, renamed.Moon) else x for x in used(*args)]


def mixed() -> list[str]:
    renamed.install()
    x, errors = torch.ones(3, device=renamed.NAME), []
    for mistake in (lambda: x + torch.zeros(3), lambda: x[torch.tensor([0])], x.numpy):
        try:
            mistake()
            errors.append("nothing")
        except (RuntimeError, TypeError) as error:
            errors.append(str(error))
    view = x[1:]
    view.add_(torch.tensor(2.0))  # a tensor without dims may be on any device
    return [*errors, str(x.tolist())]


def test_the_device_refuses_what_accelerators_refuse() -> None:
    added, indexed, numpy, whole = worlds.run(1, mixed)[0]
    assert "aten.add.Tensor mixes moon with cpu" in added
    assert "mixes moon with cpu" in indexed
    assert numpy != "nothing"
    assert whole == "[1.0, 3.0, 3.0]"


def test_a_tensor_without_a_device_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny.directory(tmp_path / "m", "qwen3", **MODELS["qwen3"])
    real = torch.arange

    def forgetful(*args: Any, device: object = None) -> Tensor:
        return real(*args)

    monkeypatch.setattr(torch, "arange", forgetful)
    with pytest.raises(mw.RankError, match="mixes moon with cpu"):
        worlds.run(1, compared, source, tmp_path / "o", {}, renamed.NAME, torch.float32, "lm")


def waits() -> dict[str, int]:
    renamed.install()
    x, on_host = torch.ones(3, device=renamed.NAME), torch.ones(3)
    acts: dict[str, Callable[[], object]] = {
        "item": lambda: x.sum().item(), "tolist": x.tolist, "cpu": x.cpu, "bool": lambda: bool(x.sum()),
        "copy_": lambda: on_host.copy_(x), "equal": lambda: torch.equal(x, x), "nonzero": x.nonzero,
        "mask": lambda: x[x > 0], "made": lambda: torch.tensor([1.0], device=renamed.NAME),
        "pageable": lambda: on_host.to(renamed.NAME, non_blocking=True),
        "pinned": lambda: ops.to_device(on_host, renamed.NAME),
        "blocking": lambda: on_host.pin_memory().to(renamed.NAME), "kernel": lambda: x.add_(2.0).sum(),
        "filled": lambda: x.new_full((1,), 3.0),
    }  # fmt: skip
    counts = {}
    for name, act in acts.items():
        with renamed.Waits() as seen:
            act()
        counts[name] = len(seen.at)
    return counts


def test_waits_of_an_accelerator_are_counted() -> None:
    counts = worlds.run(1, waits)[0]
    assert counts == {name: int(name not in ("pinned", "kernel", "filled")) for name in counts}


def waits_of_a_step(
    source: Path, mesh: dict[str, int], options: dict[str, Any], recompute: Any, slips: bool
) -> list[str]:
    renamed.install()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        on_device = mw.Mesh(**mesh, device=renamed.NAME)
        once = options.get("token_once", False)
        memory = mw.MemoryOptions(recompute=recompute, token_once=once, narrow_grads=bool(once))
        model = mw.load(source, on_device, dtype=torch.float32, memory=memory)
        more = {name: value for name, value in options.items() if name != "token_once"}
        engine = mw.Engine(model, lr=1e-2, loss=_looks if slips else _entropic, entropy=True, **more)
        batches = tiny.batches(on_device.data_rank)
        engine.step(batches)  # makes all that is made once
        with renamed.Waits() as seen:
            engine.step(batches)
    return seen.at


def _looks(scores: Any, fields: Any) -> Tensor:
    """Read a value on the host in a loss."""
    scores["logprobs"].sum().item()
    return _entropic(scores, fields)


WAITING: list[tuple[str, dict[str, int], dict[str, Any], Any]] = [
    ("qwen3", dict(tp=2), dict(optimizer=mw.AdamW(state_dtype=torch.uint8)), "selective"),
    ("qwen3", {}, {}, "none"),
    ("qwen3", dict(fsdp=2), {}, "full"),
    ("qwen3", dict(pp=2), dict(optimizer=mw.AdamW(state_dtype=torch.bfloat16)), "none"),
    ("qwen3_5_moe", dict(fsdp=2, ep=2), dict(token_once=True), "full"),
    ("qwen3_5_moe", {}, {}, "none"),
    ("qwen3_5_moe", dict(tp=2, ep=2), {}, "none"),
    ("qwen3_5_moe", dict(fsdp=2, ep=2), dict(router_aux="previous"), "full"),
    ("qwen3", dict(cp=2), {}, "none"),
    ("qwen3_5_moe", dict(fsdp=4, ep=4), dict(token_once=2), "none"),
    ("qwen3", dict(fsdp=2, cp=2), {}, "none"),
    ("qwen3", dict(replicate=2, tp=2), {}, "none"),
]


def waits_on_ranks(size: int, *args: Any) -> bytes:
    torch.set_num_threads(1)
    return pickle.dumps(worlds.run(size, waits_of_a_step, *args))


@pytest.mark.parametrize(("name", "mesh", "options", "recompute"), parts.every(4, WAITING), ids=str)
def test_a_step_waits_for_the_device_once(
    fresh: ProcessPoolExecutor, tmp_path: Path, name: str, mesh: dict[str, int], options: dict[str, Any], recompute: str
) -> None:
    """Each forward of a layer of experts waits once for its numbers of rows, or twice with nodes."""
    source = tiny.directory(tmp_path / "m", name, **MODELS[name])
    args = trials.world_of(mesh), source, mesh, options, recompute, False
    of_experts = 2 if "moe" in name else 0
    layers = of_experts * (2 if options.get("token_once") == 2 else 1)
    num_forwards = 2 * (2 if recompute == "full" else 1)  # of 2 batches
    for seen in pickle.loads(fresh.submit(waits_on_ranks, *args).result(timeout=100)):
        assert len(seen) == 1 + layers * num_forwards, seen
        assert [each for each in seen if "tolist" not in each] == ["a copy to the host at __init__.py to_host"]


def test_one_more_wait_is_counted(fresh: ProcessPoolExecutor, tmp_path: Path) -> None:
    source = tiny.directory(tmp_path / "m", "qwen3", **MODELS["qwen3"])
    run = fresh.submit(waits_on_ranks, 1, source, {}, {}, "none", True)
    (seen,) = pickle.loads(run.result(timeout=100))
    assert len(seen) == 3, "one for each of 2 batches"
    assert sum("aten::_local_scalar_dense" in each for each in seen) == 2


def exchanged_between_hosts() -> tuple[list[Any], str]:
    """As 2,048 ranks do it: in rounds, of which none is among all."""
    renamed.install()
    with patch("meshwright.mesh.rounds", functools.partial(rounds, most=2)):
        mesh = mw.Mesh(replicate=2, fsdp=2, device=renamed.NAME)
        with renamed.Waits() as seen:
            rows = mesh.all_or_none(None, "a test", numbers=[mesh.rank, -mesh.rank])
            of_replicas = mesh.all_or_none(None, "a test", numbers=[mesh.rank], axes=REPLICA)
            assert mesh.gather_objects(("rank", mesh.rank), DENSE) == [("rank", rank) for rank in range(4)]
            assert mesh.broadcast_object(f"rank {mesh.rank}") == "rank 0"
        assert not seen.at
        assert [group.size() for group in mesh.host_groups(DENSE)] == [2, 2]
        try:
            mesh.all_or_none(ValueError("too much") if mesh.rank == 2 else None, "a test")
        except (ValueError, mw.RankError) as error:
            return [rows.tolist(), of_replicas.flatten().tolist()], str(error)
    return [], "nothing"


def test_hosts_exchange_numbers_and_objects_in_rounds() -> None:
    for rank, ((rows, of_replicas), said) in enumerate(worlds.run(4, exchanged_between_hosts)):
        assert rows == [[0, 0], [1, -1], [2, -2], [3, -3]]
        assert of_replicas == ([0, 1] if rank < 2 else [2, 3])
        assert said == ("too much" if rank == 2 else "rank 2 failed in a test: ValueError: too much")


@pytest.mark.parametrize(
    ("num", "sizes"), [(8, [8]), (32, [32]), (1024, [32, 32]), (16384, [16, 32, 32]), (74, [37, 2])]
)
def test_rounds_of_hosts(num: int, sizes: list[int]) -> None:
    """Each rank is in one group of each round. Gathered rows are in the order of ranks."""
    all_ranks = list(range(3, 3 + num))
    all_rounds = rounds([all_ranks])
    assert [len(groups[0]) for groups in all_rounds] == sizes
    known = {rank: [rank] for rank in all_ranks}
    for groups in all_rounds:
        assert sorted(rank for part in groups for rank in part) == all_ranks
        gathered = {part[0]: [each for other in part for each in known[other]] for part in groups}
        known = {rank: gathered[part[0]] for part in groups for rank in part}  # members of a group share a list
    assert known.keys() == {*all_ranks}
    assert all(ranks == all_ranks for ranks in {id(ranks): ranks for ranks in known.values()}.values())
