"""Memory options change no number on any mesh, and do save memory or collectives."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import config as compiler

import meshwright as mw
from meshwright import parallel
from meshwright.axes import Axes
from meshwright.errors import ConfigError, MeshError
from meshwright.mesh import Memory
from meshwright.parallel import recompute
from meshwright.verify import Finding, Recorder, Trial
from tests import parts, tiny, trials, worlds
from tests.words import words


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    at, made = tmp_path_factory.mktemp("memory"), dict[str, Path]()

    def of(name: str, **changes: Any) -> Path:
        key = name + "".join(f"-{k}={v}" for k, v in changes.items())
        if key not in made:
            made[key] = tiny.directory(at / key, name, dtype=torch.bfloat16, **changes)
        return made[key]

    return of


# One layer of each kind.
TWO: dict[str, Any] = dict(num_hidden_layers=2)
MIXED: dict[str, Any] = {**TWO, "layer_types": ["linear_attention", "full_attention"]}


def tried(source: Path, mesh: dict[str, int], **memory: Any) -> Trial:
    return trials.trial(source, mesh).with_options(memory=mw.MemoryOptions(**memory))


def shallow(source: Callable[..., Path], name: str) -> Path:
    return source(name, **({} if parts.ALL else MIXED if name.startswith("qwen3_5") else TWO))


OFFLOADED = [
    ("qwen3_5_moe", dict(fsdp=2, ep=2), dict(recompute="full")),
    ("qwen3_5_moe", dict(fsdp=2, tp=2, ep=2), dict(recompute="full")),
    ("qwen3_moe", dict(tp=2, ep=2), dict()),  # one rank has all shards of the experts
    ("qwen3_5", dict(), dict(recompute="selective")),
    ("qwen3_tied", dict(replicate=2, fsdp=2), dict(reshard=False)),
]


@pytest.mark.parametrize(("name", "mesh", "more"), parts.every(3, OFFLOADED), ids=str)
def test_offload(source: Callable[..., Path], name: str, mesh: dict[str, int], more: dict[str, Any]) -> None:
    assert trials.findings(tried(shallow(source, name), mesh, offload=True, **more)) == []


ONCE = [
    ("qwen3_5_moe", dict(fsdp=2, ep=2), dict(sum_once=True, recompute="full")),
    ("qwen3_5_moe", dict(fsdp=2, tp=2, ep=2), dict(sum_once=True, recompute="full")),
    ("qwen3_moe", dict(fsdp=4, ep=2), dict(sum_once=True, gather_once=True)),
    ("qwen3_tied", dict(replicate=2, fsdp=2), dict(sum_once=True, reshard=False)),
    ("qwen3", dict(cp=2), dict(gather_once=True)),
    ("qwen3_5", dict(fsdp=2, cp=2), dict(gather_once=True)),
    ("qwen3_moe", dict(replicate=2, fsdp=2), dict(gather_once=True, recompute="selective")),
    ("qwen3", dict(pp=2, fsdp=2), dict(sum_once=True)),
]


@pytest.mark.parametrize(("name", "mesh", "more"), parts.every(4, ONCE), ids=str)
def test_once_a_step(source: Callable[..., Path], name: str, mesh: dict[str, int], more: dict[str, Any]) -> None:
    """The bill counts fewer all-gathers and reduce-scatters."""
    assert trials.findings(tried(shallow(source, name), mesh, **more)) == []


def after_failures(directory: Path, more: dict[str, bool]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the weights after two steps, and after two that follow a step which failed in its second micro-batch."""
    weights = []
    for fails in (False, True):
        model = mw.load(directory, mw.Mesh(fsdp=2), dtype=torch.float64, memory=mw.MemoryOptions(**more))
        engine, batches, calls = mw.Engine(model, lr=1e-2), tiny.batches(model.mesh.data_rank), list[int]()

        def loss(scores: Any, fields: Any, real: Any = engine.loss, calls: Any = calls) -> Tensor:
            calls.append(1)
            if len(calls) == 6:  # after the first micro-batch and the four calls of its test
                raise ValueError("planted")
            return real(scores, fields)

        if fails:
            engine.loss, real = loss, engine.loss
            with pytest.raises((ValueError, mw.MeshwrightError)):
                engine.backward(batches)
            engine.loss = real
        for _ in range(2):
            mw.logprobs(engine.model, batches[0])
            engine.step(batches)
        weights.append(mw.gather(engine.model))
    return weights[0], weights[1]


def test_a_failed_step_leaves_no_pending_gradients(source: Callable[..., Path]) -> None:
    options = (dict(sum_once=True, gather_once=True), dict(sum_once=True), dict(gather_once=True))
    for more in parts.every(3, options):
        whole, after = worlds.run(2, after_failures, source("qwen3_moe", num_hidden_layers=2), more)[0]
        assert all(torch.equal(whole[key], after[key]) for key in whole), more


AUX = dict(output_router_logits=True, router_aux_loss_coef=0.3)


def _loads(directory: Path, fails: bool) -> Tensor:
    engine = mw.Engine(mw.load(directory, mw.Mesh(), dtype=torch.float64), lr=1e-3, router_aux="previous")
    batches, real = tiny.batches(0), engine.loss

    def loss(scores: Any, fields: Any) -> Tensor:
        batches_seen.append(1)
        if len(batches_seen) == 6:  # after the first micro-batch and the four calls of its test
            raise ValueError("planted")
        return real(scores, fields)

    batches_seen: list[int] = []
    if fails:
        engine.loss = loss
        with pytest.raises(ValueError, match="planted"):
            engine.backward(batches)
        engine.loss = real
    engine.backward(batches)
    return engine.router.load_LE


def test_expert_load_excludes_a_failed_step(source: Callable[..., Path]) -> None:
    """The aux loss of the next step depends on the load."""
    at = source("qwen3_moe", **AUX)
    loads = worlds.in_turn(1, {fails: partial(_loads, at, fails) for fails in (True, False)})
    assert torch.equal(loads[True][0], loads[False][0])


def counts_twice(patch: pytest.MonkeyPatch) -> None:
    real, real_end = mw.engine.router.Balance.watch, mw.engine.router.Router.set_slope

    def counts_again(self: Any, layer: int, *args: Any) -> Tensor:
        before = self.counts.get(layer, 0)
        out = real(self, layer, *args)
        self.counts[layer] = self.counts[layer] + before
        return out

    def counts_late(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._local_LE += 0 if not self.balance.counts else torch.stack(list(self.balance.counts.values())).double()
        return real_end(self, *args, **kwargs)

    patch.setattr(mw.engine.router.Balance, "watch", counts_again)
    patch.setattr(mw.engine.router.Router, "set_slope", counts_late)


def routes_unsteadily(patch: pytest.MonkeyPatch) -> None:
    """In the recomputation the last digit differs, as with atomics of a GPU."""
    real = mw.ops.route

    def unsteady(logits_TE: Tensor, *args: Any) -> Any:
        in_backward = torch._C._current_graph_task_id() != -1
        return real(logits_TE + in_backward * 1e-14 * torch.arange(logits_TE.shape[1]), *args)

    patch.setattr(mw.ops, "route", unsteady)


@contextmanager
def changed(change: Callable[[pytest.MonkeyPatch], None]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        change(patch)
        yield


@pytest.fixture(scope="module")
def ties(tmp_path_factory: pytest.TempPathFactory) -> Trial:
    """A trial in which all experts tie."""
    at = tiny.directory(tmp_path_factory.mktemp("ties") / "m", "qwen3_moe", num_hidden_layers=1, mlp_only_layers=[])
    tensors = load_file(at / "model.safetensors")
    save_file(
        {k: t.zero_() if k.endswith("mlp.gate.weight") else t for k, t in tensors.items()}, at / "model.safetensors"
    )
    return replace(tried(at, dict(fsdp=2, ep=2), recompute="full"), steps=1)


@pytest.fixture(scope="module")
def findings(ties: Trial) -> dict[Any, list[Finding]]:
    return trials.findings_in_turn(dict.fromkeys((routes_unsteadily, counts_twice), ties), changed)


def test_n1_detects_loads_counted_twice(findings: dict[Any, list[Finding]]) -> None:
    assert any("N1 load of experts" in str(f) for f in findings[counts_twice])


def test_a_token_is_routed_once(findings: dict[Any, list[Finding]]) -> None:
    assert findings[routes_unsteadily] == []


@parts.IN_MATRIX
def test_a_token_that_is_routed_twice_is_reported(ties: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    """The experts are not saved."""
    monkeypatch.setattr("meshwright.ops.experts.replayed", lambda make: make())
    with pytest.raises(mw.RankError, match=r"a layer saved .* when it ran again"):
        trials.findings_in_turn({routes_unsteadily: ties}, changed)


def test_selective_saves_attention_of_accelerators() -> None:
    """The kernel runs forward once on the meta device, though backward recomputes the operation after it."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from meshwright.ops.attention import _varlen

    names: list[str] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    docs = mw.ops.documents([5, 11], "meta")
    qkv = torch.empty(16, 2, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    with Seen():
        out = recompute._checkpointed(lambda x: _varlen(x, x, x, docs).sin(), recompute._COSTLY, qkv)
        out.backward(torch.empty_like(out))
    assert [names.count(f"torch_attn._varlen_attn{way}.default") for way in ("", "_backward")] == [1, 1]


def test_bfloat16_state_is_rounded_float32_state() -> None:
    from meshwright.optim import AdamW, LocalOptimizer

    g = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(7, 5, generator=g) for name in ("a", "b")}
    grads = [{name: torch.randn(7, 5, generator=g) for name in weights} for _ in range(3)]
    for decay in (0.0, 0.3):
        narrow = {name: w.clone() for name, w in weights.items()}
        optimizer = LocalOptimizer(AdamW(weight_decay=decay, state_dtype=torch.bfloat16), trials.table_of("ab", "a"))
        expected = {}
        for name, start in weights.items():
            w, m, v = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
            for t, grad in enumerate((each[name] for each in grads), 1):
                m, v = 0.9 * m + 0.1 * grad, 0.95 * v + 0.05 * grad.square()
                w *= 1 - 0.01 * (decay if name == "a" else 0)
                w -= 0.01 * (m / (1 - 0.9**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-8)
                m, v = m.bfloat16().float(), v.bfloat16().float()
            expected[name] = w
        for each in grads:
            optimizer.step(narrow, each, 0.01)
        assert {state.dtype for both in optimizer.state.values() for state in both} == {torch.bfloat16}
        for name in narrow:
            torch.testing.assert_close(narrow[name], expected[name], rtol=1e-6, atol=1e-7)


def test_slices_of_an_update_equal_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of 16 elements split large parameters and join small ones."""
    from meshwright.optim import AdamW, local

    def trained(part: int) -> dict[str, Tensor]:
        monkeypatch.setattr(local, "_PART", part)
        g = torch.Generator().manual_seed(0)
        weights = {
            name: torch.randn(size, generator=g) for name, size in dict(a=(7, 5), b=(3,), c=(16,), d=(1,)).items()
        }
        adam = local.LocalOptimizer(AdamW(state_dtype=torch.bfloat16), trials.table_of("abcd", "ac"))
        for _ in range(3):
            adam.step(weights, {name: torch.randn(w.shape, generator=g) for name, w in weights.items()}, 0.1)
        return weights

    whole, sliced = trained(1 << 20), trained(16)
    assert all(torch.equal(whole[name], sliced[name]) for name in whole)


def _passing(directory: Path, offload: bool, train: str) -> tuple[dict[str, int], dict[str, int]]:
    """Return the most bytes that FSDP holds for a step, and the bytes on the bill."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    model = mw.load(directory, mw.Mesh(replicate=2), train=train, memory=mw.MemoryOptions(offload=offload))
    engine, real = mw.Engine(model, lr=1e-2), FSDPParamGroup.wait_for_unshard
    groups = _groups(model)
    most = {"gathered parameters": 0, "gradients of a replica": 0}

    def wait(group: Any) -> None:
        real(group)
        tensors = [t for g in groups for p in g.fsdp_params for t in getattr(p, "all_gather_outputs", [])]
        waiting = [g._partial_reduce_output for g in groups if g._partial_reduce_output is not None]
        for what, num in zip(most, (sum(t.untyped_storage().size() for t in tensors),
                                    sum(t.nbytes for t in waiting)), strict=True):  # fmt: skip
            most[what] = max(most[what], num)

    with patch.object(FSDPParamGroup, "wait_for_unshard", wait):
        engine.backward(tiny.batches(model.mesh.data_rank))
    return most, {s.what: s.num_bytes for s in model.need().stored(model.mesh.rank)}


def test_gathers_of_replicas_are_on_the_bill(source: Callable[..., Path]) -> None:
    """FSDP copies gathers even of one rank, and leaves the reduced gradients of a replica on the device."""
    cases = {case: partial(_passing, shallow(source, "qwen3"), *case) for case in ((True, "**"), (False, "*norm*"))}
    for (offload, _), ((most, billed), _) in worlds.in_turn(2, cases).items():
        assert 0 < most["gathered parameters"] <= billed["gathered parameters"]
        waiting = most["gradients of a replica"]
        assert billed.get("gradients of a replica", 0) == (waiting if offload else 0)  # else they are the gradients
        assert 0 < billed["gradients on their way"] < 2 * waiting  # frozen parameters have none


def _groups(model: mw.Model) -> list[Any]:
    from torch.distributed.fsdp import FSDPModule

    modules = [m for part in model.parts for m in part.modules() if isinstance(m, FSDPModule)]
    return [group for m in modules if (group := m._get_fsdp_state()._fsdp_param_group)]


def _whole_gradients(directory: Path) -> int:
    """Count unsharded gradients between two micro-batches, and after the last."""
    engine = mw.Engine(mw.load(directory, mw.Mesh(fsdp=2), dtype=torch.float32), lr=1e-2)
    unsharded, passes, finish = [], parallel.run_step._Passes, engine._finish

    def looked_at(real: Callable[..., Any]) -> Callable[..., Any]:
        def look(*args: Any) -> Any:
            for param in (p for group in _groups(engine.model) for p in group.fsdp_params):
                if hasattr(param, "unsharded_accumulated_grad"):
                    unsharded.append(param.unsharded_accumulated_grad is not None)
                unsharded.append(
                    param.unsharded_param.grad is not None if hasattr(param, "_unsharded_param") else False
                )
            return real(*args)

        return look

    passes.forward, engine._finish = looked_at(passes.forward), looked_at(finish)
    engine.backward([b for n in range(2) for b in tiny.batches(engine.model.mesh.data_rank)])
    assert len(unsharded) > 10
    return sum(unsharded)


def test_accumulated_gradients_are_shards(source: Callable[..., Path]) -> None:
    assert worlds.run(2, _whole_gradients, shallow(source, "qwen3")) == [0, 0]


def _gradients(directory: Path, backend: str) -> tuple[dict[str, Tensor], Counter[tuple[str, int]]]:
    """Return gradients, and the collectives with their bytes. `backend`: of torch.compile; "": nothing is compiled."""
    with patch.object(torch, "compile", partial(torch.compile, backend=backend)):
        memory = mw.MemoryOptions(compiled=bool(backend))
        model = mw.load(directory, mw.Mesh(tp=2), dtype=torch.float64, memory=memory)
        engine = mw.Engine(model, lr=1e-3)
        with Recorder() as recorder:
            engine.backward(tiny.batches(0))
    assert bool(counters["stats"]["unique_graphs"]) == bool(backend)
    return mw.gather(model, "grad"), Counter((each.op, each.num_bytes) for each in recorder.collectives)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=parts.IN_MATRIX)])
def test_compiled_gradients_and_collectives(source: Callable[..., Path], backend: str) -> None:
    """torch cuts the graphs of forward and backward with either backend. g++ takes most of the time of inductor."""
    at = source("qwen3", num_hidden_layers=1)
    (plain, sent), _ = worlds.run(2, _gradients, at, "")
    with compiler.patch({"compile_threads": 1, "cpp.simdlen": 1}):  # no processes of a rank; less work for g++
        importlib.import_module("torch._inductor.compile_fx")  # once, not on each rank
        (compiled, sent_compiled), _ = worlds.run(2, _gradients, at, backend, seconds=240)
    assert sent_compiled == sent
    for name, grad in plain.items():
        assert (compiled[name] - grad).norm() <= 1e-9 * grad.norm(), name


def _graphs(directory: Path) -> list[int]:
    """Count graphs after a step, and after one with other documents; -1 where the compiler gave up."""
    made, real = [], torch.compile
    torch.compile = lambda f, **options: real(f, backend="eager", **options)  # type: ignore[assignment]
    model = mw.load(directory, mw.Mesh(tp=2, ep=2), dtype=torch.float64, memory=mw.MemoryOptions(compiled=True))
    engine = mw.Engine(model, lr=1e-3)
    for lengths in ([9, 7], [3, 5, 4, 4]):
        engine.step([mw.pack([list(range(length)) for length in lengths])])
        frames = counters["frames"]
        made.append(counters["stats"]["unique_graphs"] if frames["ok"] == frames["total"] else -1)
    return made


@pytest.mark.slow
@parts.IN_MATRIX
def test_layers_and_documents_share_graphs(source: Callable[..., Path]) -> None:
    """torch gives up at 8 graphs per function. One per door or layer would exceed that."""
    layers = dict(num_hidden_layers=4, layer_types=["linear_attention", "full_attention"] * 2)
    importlib.import_module("torch._dynamo")  # once, not on each rank
    once, again = worlds.run(2, _graphs, source("qwen3_5_moe", **layers))[0]
    assert 0 < once == again <= 10


@pytest.mark.parametrize(
    ("memory", "pattern"),
    [
        (dict(recompute="half"), words("recompute='half'", "none, selective, full")),
        (dict(recompute="selective", compiled=True), words('recompute="full"', '"none"', "compiled=False")),
    ],
)
def test_recompute_refuses_other_values(source: Callable[..., Path], memory: dict[str, Any], pattern: str) -> None:
    assert re.search(pattern, worlds.run(1, _refused, source("qwen3"), memory)[0])


def _refused(directory: Path, memory: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        mw.init(directory, memory=mw.MemoryOptions(**memory))
    return str(caught.value)


@pytest.mark.parametrize(
    ("more", "pattern"),
    [
        (dict(state_dtype=torch.bfloat16, betas=(0.9, 0.999)), words("state_dtype=|bfloat16", "betas", r"\b0\.98\b")),
        (dict(state_dtype=torch.float16), words(r"state_dtype=torch\.float16", r"torch\.bfloat16")),
    ],
)
def test_refused_by_the_optimizer(more: dict[str, Any], pattern: str) -> None:
    with pytest.raises(ConfigError, match=pattern):
        mw.AdamW(**more)


def _with_memory(directory: Path, what: str, memory: Memory) -> str:
    mw.Mesh.memory = property(lambda self: memory)  # type: ignore[method-assign,assignment]
    try:
        model = mw.load(directory, mw.Mesh(fsdp=2), dtype=torch.float32)
        if what == "train":
            mw.Engine(model, lr=1e-3)
    except MeshError as error:
        return str(error)
    return ""


def test_load_and_training_refuse_what_cannot_fit(source: Callable[..., Path]) -> None:
    """27,796 parameters over 2 ranks take 56 kB, gradients as much, optimizer state twice as much."""
    cases = [("infer", 200_000, 10**9), ("train", 600_000, 10**9), ("train", 200_000, 10**9), ("infer", 1_000, 1_000)]
    acts = {case: partial(_with_memory, source("qwen3"), case[0], Memory(*case[1:], shared=False)) for case in cases}
    fits, trains, (message, other), (tiny_memory, _) = worlds.in_turn(2, acts).values()
    assert fits == trains == [""] * 2
    assert message == other
    assert re.search(words("fsdp=2", r"\brank\b", r"\b0\.0002 GB\b", r"\b1 GB\b.*\bhost\b"), message), message
    assert "MemoryOptions(offload=True)" in message  # no fsdp helps: each rank gathers a whole layer
    assert re.search(words(r"\bno fsdp\b", r"\b4096\b"), tiny_memory), tiny_memory


@pytest.mark.parametrize("option", ["", "gather_once", "sum_once", "offload"])
def test_offload_is_advised_where_it_is_allowed(option: str) -> None:
    """Where it would fit, but what the run has chosen keeps the whole model on the device, or offloads already."""
    from meshwright.blueprint import Blueprint
    from meshwright.memory.budget import Need, choices, held_while_training
    from meshwright.recipe import Recipe

    memory = mw.MemoryOptions(**({option: True} if option else {}))
    blueprint = Blueprint.of({**tiny.of("qwen3")}, None, Recipe(memory=memory))
    held = held_while_training(torch.float32, frozenset(blueprint.table.params), offload=memory.offload)
    need = Need(blueprint.spec, Axes(fsdp=2), held)
    on_device = sum(
        each.num_bytes for each in replace(need, held=replace(held, offload=True)).stored() if not each.host
    )
    advice = " ".join(choices(need, Memory(on_device, 10**9, shared=False)))
    assert ("offload=True" in advice) == (not option), advice
    assert "offload" not in " ".join(choices(need, Memory(on_device - 1, 10**9, shared=False)))
