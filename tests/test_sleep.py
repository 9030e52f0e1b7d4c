"""Sleep and wake: training is bitwise as without them, memory is freed, and calls that need what sleeps are refused."""

from __future__ import annotations

import contextlib
import functools
import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import meshwright as mw
from meshwright.ops import host_memory
from meshwright.ops.host_memory import HostCopy
from meshwright.ops.part_sizes import shrunk_part_sizes
from tests import parts, quantised, tiny, trials, worlds
from tests.test_checkpoint import bytes_of, writes_held_back

ROOT = Path(__file__).parents[1]
CPU = pytest.param("cpu", marks=pytest.mark.skipif(not parts.ALL, reason="make matrix runs it"))
BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
LORA = mw.Lora(rank=3, alpha=6.0, b_std=0.1)
FSDP, TP, PP, EXPERTS = dict(fsdp=2), dict(tp=2), dict(pp=2), dict(fsdp=2, ep=2)


@dataclass(frozen=True)
class Case:
    """A model on a mesh. `model`: more arguments of `mw.load`; `memory`: of `mw.MemoryOptions`."""

    name: str
    source: str = "qwen3"
    mesh: Mapping[str, int] = field(default_factory=dict)
    dtype: torch.dtype | None = F64
    model: Mapping[str, Any] = field(default_factory=dict)
    memory: Mapping[str, Any] = field(default_factory=dict)
    state: torch.dtype | None = None

    @property
    def num_batches(self) -> int:
        return 2 if "pp" in self.mesh or "gather_once" in self.memory else 1


CASES = [
    Case("one"),
    Case("one, bfloat16, 8-bit state", "wide", dtype=None, state=torch.uint8),
    Case("one, frozen in 4 bits", "wide", dtype=None, model=dict(lora=LORA, frozen="nf4")),
    Case("fsdp, frozen in 8 bits", "fp8", FSDP, F32, dict(train=["layers.1.*"])),
    Case("fsdp, gathered once", mesh=FSDP, memory=dict(gather_once=True, sum_once=True)),
    Case("fsdp, offload", mesh=FSDP, memory=dict(offload=True)),
    Case("tp", mesh=TP),
    Case("pp", mesh=PP),
    Case("pp, the last stage alone is trained", mesh=PP, model=dict(train=["layers.1.*"])),
    Case("experts, adapters", "qwen3_moe", EXPERTS, None, dict(lora=LORA)),
    *([
        Case("fsdp", mesh=FSDP),
        Case("fsdp, 8-bit state", "wide", FSDP, F32, state=torch.uint8),
        Case("experts", "qwen3_moe", EXPERTS),
        Case("fsdp, adapters", mesh=FSDP, model=dict(lora=LORA)),
        Case("fsdp, kept gathered", mesh=FSDP, memory=dict(reshard=False, recompute="full")),
        Case("fsdp, bfloat16", mesh=FSDP, dtype=None),
        Case("fsdp, bfloat16 state", mesh=FSDP, dtype=F32, state=BF16),
        Case("tp, selective", "qwen3_5", TP, F32, memory=dict(recompute="selective")),
        Case("pp, zero-bubble", mesh=PP, model=dict(pipeline=mw.Pipeline(schedule="zero-bubble"))),
        Case("replicas", mesh=dict(replicate=2), memory=dict(sum_once=True)),
        Case("experts of qwen3_5_moe", "qwen3_5_moe", EXPERTS),
        Case("experts in bfloat16, frozen in 4 bits", "wide experts", EXPERTS, None, dict(lora=LORA, frozen="nf4")),
        Case("FP8 matmuls", "blocks", FSDP, F32, dict(fp8="block")),
        Case("n-grams", "qwen4_exp", FSDP, F32),
        Case("context", "qwen3_5", dict(cp=2)),
        Case("fsdp x tp", "qwen3_moe", dict(fsdp=2, tp=2, ep=2), F32, memory=dict(gather_once=True)),
    ] if parts.ALL else []),
]  # fmt: skip
NOISE = 1000  # bytes of results of collectives, and of counters, which come and go
COUNTED = ["one, bfloat16, 8-bit state", "fsdp, frozen in 8 bits", "fsdp, gathered once", "pp"]
COUNTED += ["fsdp, adapters", "fsdp, kept gathered", "tp", "experts"] if parts.ALL else []


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    at = tmp_path_factory.mktemp("sleep")

    @functools.cache
    def of(name: str) -> Path:
        if name == "fp8":
            return quantised.directory(of("qwen3"), at / name, quantised.FORMATS["bfloat16"])
        if name == "wide":  # a block of 256 columns, and more
            return tiny.directory(at / name, "qwen3", dtype=BF16, intermediate_size=320, hidden_size=64)
        if name == "wide experts":
            return tiny.directory(at / name, "qwen3_moe", hidden_size=64, moe_intermediate_size=64)
        if name == "blocks":
            return tiny.directory(at / name, "qwen3", **tiny.in_blocks("qwen3"))
        few: dict[str, Any] = dict(num_hidden_layers=2, mlp_only_layers=[1]) if name == "qwen3_moe" else {}
        return tiny.directory(at / name, name, **few)

    return of


def engine_of(source: Path, case: Case) -> mw.Engine:
    memory = mw.MemoryOptions(**case.memory)
    mesh = trials.mesh_of(dict(case.mesh))
    model = mw.load(source, mesh, dtype=case.dtype, memory=memory, **case.model)
    aux = "previous" if mesh.axes.pp > 1 else "pooled"
    return mw.Engine(model, lr=1e-2, router_aux=aux, optimizer=mw.AdamW(state_dtype=case.state))


def local_tensors(engine: mw.Engine) -> Iterator[Tensor]:
    """Yield what takes memory, not as the engine lists it."""
    for part in engine.model.parts:
        for parameter in part.parameters():
            for tensor in (parameter, parameter.grad):
                if tensor is not None:
                    yield tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()
        for module in part.modules():
            for grid in vars(module).get("grids", {}).values():
                yield from (grid.scales, grid.rows, grid.columns)
    for state in engine.optimizer.state.values():
        yield from state


def stored_bytes(tensors: Iterator[Tensor]) -> int:
    """Count the bytes of storages, each once."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def all_bytes() -> int:
    """Count the bytes of all tensors of this process on the device: all but copies of what sleeps."""
    gc.collect()
    found = gc.get_objects()
    copies = {id(buffer) for each in found if type(each) is HostCopy for buffer in each.buffers}
    tensors = [each for each in found if type(each) in (Tensor, torch.nn.Parameter) and id(each) not in copies]
    return stored_bytes(tensor for tensor in tensors if tensor.layout == torch.strided and not tensor.is_meta)


class Sleeper:
    """Sleeps and wakes where `sleeps`, and compares the bytes with those of storages."""

    def __init__(self, engine: mw.Engine, sleeps: bool) -> None:
        self.engine, self.sleeps, self.freed = engine, sleeps, list[int]()

    def __call__(self, **levels: bool) -> None:
        if not self.sleeps:
            return
        before = stored_bytes(local_tensors(self.engine))
        freed = self.engine.sleep(**levels)
        assert self.engine.sleep(**levels) == 0, "the second time there is nothing more"
        left = stored_bytes(local_tensors(self.engine))
        assert freed == before - left
        if not self.engine.model.recipe.memory.offload:
            assert levels or left == 0
        assert self.engine.wake() == freed
        assert self.engine.wake() == 0
        assert stored_bytes(local_tensors(self.engine)) == before
        self.freed.append(freed)


def trained(source: Path, case: Case, sleeps: bool) -> tuple[dict[str, Any], list[int]]:
    """Return all that two steps make."""
    engine = engine_of(source, case)
    batches, nap = trials.feed(engine, num=case.num_batches), Sleeper(engine, sleeps)
    nap()  # before the first step there is no optimizer state
    record = engine.step(batches)
    with shrunk_part_sizes():
        nap()
        nap(weights=False)
    losses = [record.loss, record.grad_norm, engine.backward(batches)]
    nap()
    scores = [mw.logprobs(engine.model, batches[0])]
    nap(optimizer=False)
    losses += [engine.update(), engine.evaluate(batches)]
    return {
        "losses": losses,
        "scores": scores,
        "weights": {name: tensor.clone() for name, tensor in engine.model.stored().items()},
        "state": {name: [each.clone() for each in state] for name, state in engine.optimizer.state.items()},
    }, nap.freed


def both(source: Path, case: Case) -> tuple[str, list[int]]:
    """Return where training with sleep differs, and how many bytes each sleep has freed."""
    (without, _), (with_sleep, freed) = trained(source, case, False), trained(source, case, True)
    return ", ".join(differences(without, with_sleep)), freed


def differences(a: Any, b: Any, at: str = "") -> Iterator[str]:
    if isinstance(a, Mapping):
        assert a.keys() == b.keys(), at
        for key in a:
            yield from differences(a[key], b[key], f"{at}/{key}")
    elif isinstance(a, list):
        assert len(a) == len(b), at
        for number, (left, right) in enumerate(zip(a, b, strict=True)):
            yield from differences(left, right, f"{at}/{number}")
    elif not (torch.equal(a, b) if isinstance(a, Tensor) else a == b):
        yield at


def in_worlds(sources: Callable[[str], Path], act: Callable[[Path, Case], Any], names: Sequence[str]) -> Any:
    """Return the results of all ranks by the name of a case. Cases of one mesh share a world."""
    by_name = {case.name: case for case in CASES if case.name in names}

    def run(group: Sequence[str]) -> dict[str, Any]:
        cases = {name: functools.partial(act, sources(by_name[name].source), by_name[name]) for name in group}
        return worlds.in_turn(trials.world_of(dict(by_name[group[0]].mesh)), cases)

    return worlds.shared({name: case.mesh for name, case in by_name.items()}, run)


@pytest.fixture(scope="module")
def ran(sources: Callable[[str], Path]) -> Callable[[str], list[tuple[str, list[int]]]]:
    return in_worlds(sources, both, [case.name for case in CASES])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_training_is_bitwise_as_without_sleep(ran: Callable[[str], Any], case: Case) -> None:
    for differs, freed in ran(case.name):
        assert differs == ""
        if case.memory.get("offload"):
            assert not any(freed), "it is on the host already"
        elif "alone" not in case.name:  # the first stage then has nothing to update
            assert all(num > 0 for num in freed), freed


def remaining(source: Path, case: Case) -> tuple[int, int, int]:
    """Return the bytes that sleep says it frees, those that all tensors of the process lose, and what stays of the
    model."""
    before_loading = all_bytes()
    engine = engine_of(source, case)
    engine.step(trials.feed(engine, num=1))
    engine.backward(trials.feed(engine, num=2))
    before = all_bytes()
    freed = engine.sleep()
    asleep = all_bytes()
    engine.wake()
    assert abs(all_bytes() - before) < NOISE
    return freed, before - asleep, asleep - before_loading


@pytest.fixture(scope="module")
def counted(sources: Callable[[str], Path]) -> Callable[[str], list[tuple[int, int, int]]]:
    return in_worlds(sources, remaining, COUNTED)


@pytest.mark.parametrize("name", COUNTED)
def test_no_other_memory_stays(counted: Callable[[str], list[tuple[int, int, int]]], name: str) -> None:
    """Bound the bytes that stay: tables of RoPE, counters of the router, and the like."""
    for freed, lost, stays in counted(name):
        assert abs(freed - lost) < NOISE < freed / 10
        assert stays < freed / 10, (freed, stays)


Act = Callable[[mw.Engine, list[mw.Batch], Path], Any]
NEED_ALL: dict[str, Act] = {
    "step": lambda engine, batches, _: engine.step(batches),
    "backward": lambda engine, batches, _: engine.backward(batches),
    "update": lambda engine, *_: engine.update(),
    "save": lambda engine, _, at: mw.save(engine, at / "no"),
    "save in the background": lambda engine, _, at: mw.save(engine, at / "no", wait=False),
    "resume": lambda engine, _, at: mw.resume(engine, at / "saved"),
    "state_dict": lambda engine, *_: engine.state_dict(),
    "load_state_dict": lambda engine, *_: engine.load_state_dict({}),
    "gather gradients": lambda engine, *_: mw.gather(engine.model, "grad"),
    "grads": lambda engine, *_: engine.model.grads(),
}
NEED_WEIGHTS: dict[str, Act] = {
    "evaluate": lambda engine, batches, _: engine.evaluate(batches),
    "logprobs": lambda engine, batches, _: mw.logprobs(engine.model, batches[0]),
    "logits": lambda engine, batches, _: mw.logits(engine.model, batches[0]),
    "sample": lambda engine, *_: mw.sample(engine.model, [[1, 2]], tokens=2),
    "gather": lambda engine, *_: mw.gather(engine.model),
    "export": lambda engine, _, at: mw.export(engine.model, at / "exported", overwrite=True),
    "check_export": lambda engine, _, at: mw.check_export(engine.model, at / "another"),
    "stored": lambda engine, *_: engine.model.stored(),
    "values": lambda engine, *_: engine.model.values(),
}


def refused(source: Path, at: Path) -> dict[str, dict[str, str]]:
    """Return the errors of all calls while all is asleep, the optimizer state alone, and after it has woken."""
    engine = engine_of(source, Case("", mesh=FSDP))
    batches = trials.feed(engine, num=1)
    engine.step(batches)
    mw.save(engine, at / "saved")
    engine.backward(batches)
    errors = {}
    engine.sleep()
    calls = {**NEED_ALL, **NEED_WEIGHTS}
    errors["all"] = {name: trials.error_of(lambda act=act: act(engine, batches, at)) for name, act in calls.items()}
    engine.wake(optimizer=False)
    errors["optimizer"] = {
        name: trials.error_of(lambda act=act: act(engine, batches, at)) for name, act in calls.items()
    }
    engine.wake()
    engine.update()
    return errors


@pytest.fixture(scope="module")
def errors(sources: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return worlds.run(2, refused, sources("qwen3"), tmp_path_factory.mktemp("refused"))


def test_calls_that_need_what_sleeps_are_refused(errors: list[Any]) -> None:
    for of_rank in errors:
        for name, error in of_rank["all"].items():
            assert error.startswith("StateError: "), (name, error)
            assert "engine.wake()" in error, (name, error)
        for name in NEED_ALL:
            assert "optimizer state and gradients are asleep" in of_rank["optimizer"][name], name
        assert {of_rank["optimizer"][name] for name in NEED_WEIGHTS} == {""}


def disagreeing(source: Path) -> list[str]:
    """Return what ranks say that make other calls, or cannot copy, and that a step then works."""
    engine = engine_of(source, Case("", mesh=FSDP))
    batches, rank = trials.feed(engine, num=1), engine.model.mesh.rank
    engine.step(batches)
    lacks = RuntimeError("out of memory")

    def fails(*_: Any) -> None:
        raise lacks

    def once(name: str, act: Callable[[], Any]) -> str:
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(host_memory, name, fails)
            return trials.error_of(act)

    said = [
        trials.error_of(engine.sleep if rank else lambda: engine.step(batches)),
        trials.error_of(lambda: engine.sleep(weights=bool(rank))),
        trials.error_of(engine.wake if rank else engine.sleep),
        trials.error_of(lambda: engine.sleep(weights=False, optimizer=False)),
        trials.error_of(lambda: engine.sleep(weights=1)),  # type: ignore[arg-type] # a mistake
        once("_padded", engine.sleep),
    ]
    assert engine.model.calls.asleep.copies == {}
    reference = engine.evaluate(batches)
    engine.sleep()
    said.append(trials.error_of(lambda: engine.wake(weights=bool(rank))))
    said.append(once("_padded", engine.wake))  # rank 0 has allocated all, and rank 1 the first storages
    assert stored_bytes(local_tensors(engine)) == 0
    said.append(trials.error_of(lambda: engine.evaluate(batches)))
    engine.wake()
    assert engine.evaluate(batches) == reference
    engine.step(batches)
    return said


def test_ranks_sleep_and_wake_together(sources: Callable[[str], Path]) -> None:
    for said in worlds.run(2, disagreeing, sources("qwen3")):
        call, level, wakes, nothing, number, copy, wake_level, wake, asleep = said
        assert "the call is sleep on rank 1 and a step on rank 0" in call
        assert "weights= is True on rank 1 and False on rank 0" in level
        assert "the call is wake on rank 1 and sleep on rank 0" in wakes
        assert "ConfigError: weights=False, optimizer=False leaves nothing to do" in nothing
        assert "weights=1 must be True or False" in number
        assert "StateError: " in copy
        assert "nothing was put to sleep: out of memory" in copy
        assert "weights= is True on rank 1 and False on rank 0" in wake_level
        assert "StateError: " in wake
        assert "it stays asleep; free memory of the device" in wake
        assert "out of memory" in wake
        assert "engine.wake()" in asleep


def frozen(source: Path) -> tuple[bool, list[str]]:
    """Return whether a reference without an engine scores as before, and what is said of overwritten codes."""
    model = mw.load(source, mw.Mesh(device="cpu"), train=[], dtype=F32)
    batch = tiny.batches(0, num=1)[0]
    before, wide = mw.logprobs(model, batch), next(n for n in model.stored() if n not in model.numbers)
    said, freed = list[str](), model.sleep()
    said.append(trials.error_of(lambda: mw.logprobs(model, batch)))
    same = model.wake() == freed > 0 and torch.equal(before, mw.logprobs(model, batch))
    array = model.stored()[wide].view(torch.int16).numpy()
    said.append(trials.error_of(model.sleep))
    model.stored()[min(model.numbers)].zero_()
    said.append(trials.error_of(lambda: mw.logprobs(model, batch)))
    assert array.size
    return same, said


def test_a_frozen_model_sleeps_and_notices_overwritten_codes(sources: Callable[[str], Path]) -> None:
    ((same, (asleep, fixed, overwritten)),) = worlds.run(1, frozen, sources("fp8"))
    assert same
    assert "model.wake()" in asleep
    assert "cannot be freed: something has called numpy() on it" in fixed
    assert "something has overwritten them" in overwritten


def saved(source: Path, at: Path) -> None:
    """Save with and without sleep, in the background too: sleep then frees what the thread has copied."""
    for sleeps in (False, True):
        engine = engine_of(source, Case("", mesh=EXPERTS, dtype=F32))
        engine.step(trials.feed(engine, num=1))
        with writes_held_back() if sleeps else contextlib.nullcontext(threading.Event()) as go_on:
            mw.save(engine, at / f"{sleeps} first", wait=not sleeps)
            if sleeps:
                engine.sleep()
            go_on.set()
            engine.wait()
        if sleeps:
            engine.wake()
        mw.save(engine, at / f"{sleeps} second")
        mw.export(engine.model, at / f"{sleeps} exported")
        if sleeps:  # what has written files can sleep
            assert engine.sleep() > 0
            engine.wake()
            mw.resume(engine, at / "False first")
            assert engine.sleep() > 0
            engine.wake()
            mw.save(engine, at / "True third")


def test_checkpoints_are_as_without_sleep(sources: Callable[[str], Path], tmp_path: Path) -> None:
    worlds.run(2, saved, sources("qwen3_moe"), tmp_path)
    expected = bytes_of(tmp_path / "False first")
    for name in ("False second", "True first", "True second", "True third"):
        assert bytes_of(tmp_path / name) == expected, name
    assert len(expected) == 3
    assert bytes_of(tmp_path / "False exported") == bytes_of(tmp_path / "True exported")


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu), CPU])
def test_on_a_device(source: Path, device: str) -> None:
    """Copies are pinned, and the device has the memory back. In a process of its own: forked ones see no device."""
    command = [sys.executable, "-m", "tests.sleep_on_device", device, str(source)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert "slept" in done.stdout, done.stdout + done.stderr
