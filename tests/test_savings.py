"""What saves memory or time changes no number: on meshes that combine, and it does save."""

from __future__ import annotations

import ctypes
import re
import sys
from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch._inductor import config as compiler

import meshwright as mw
from meshwright import parallel
from meshwright.axes import Axes
from meshwright.errors import ConfigError, MeshError
from meshwright.mesh import Memory
from meshwright.parallel import recompute
from meshwright.sharding.schedules import FORWARD, Action
from meshwright.verify import Recorder, Trial
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


def tried(source: Path, mesh: dict[str, int], **memory: Any) -> Trial:
    return trials.trial(source, mesh).with_options(memory=mw.MemoryOptions(**memory))


OFFLOADED = [
    ("qwen3_5_moe", dict(fsdp=2, ep=2), dict(recompute="full")),
    ("qwen3_5_moe", dict(fsdp=2, tp=2, ep=2), dict(recompute="full")),
    ("qwen3_moe", dict(tp=2, ep=2), dict()),  # the experts' shards: one rank
    ("qwen3_5", dict(), dict(recompute="selective")),
    ("qwen3_tied", dict(replicate=2, fsdp=2), dict(reshard=False)),
]


@pytest.mark.parametrize(("name", "mesh", "more"), parts.every(3, OFFLOADED), ids=str)
def test_offloaded(source: Callable[..., Path], name: str, mesh: dict[str, int], more: dict[str, Any]) -> None:
    assert trials.findings(tried(source(name), mesh, offload=True, **more)) == []


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
    """And every collective with its bytes: fewer gatherings, fewer sums."""
    assert trials.findings(tried(source(name), mesh, **more)) == []


def after_failures(directory: Path, more: dict[str, bool]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights after two steps; and after two before which another has failed in its second micro-batch."""
    found = []
    for fails in (False, True):
        model = mw.load(directory, mw.Mesh(fsdp=2), dtype=torch.float64, memory=mw.MemoryOptions(**more))
        engine, batches, calls = mw.Engine(model, lr=1e-2), tiny.batches(model.mesh.data_rank), list[int]()

        def loss(scores: Any, fields: Any, real: Any = engine.loss, calls: Any = calls) -> Tensor:
            calls.append(1)
            if len(calls) == 2:
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
        found.append(mw.gather(engine.model))
    return found[0], found[1]


def test_a_failed_step_leaves_nothing_that_waits(source: Callable[..., Path]) -> None:
    for more in (dict(sum_once=True), dict(gather_once=True), dict(sum_once=True, gather_once=True)):
        whole, after = worlds.run(2, after_failures, source("qwen3_moe", num_hidden_layers=2), more)[0]
        assert all(torch.equal(whole[key], after[key]) for key in whole), more


AUX = dict(output_router_logits=True, router_aux_loss_coef=0.3)


@pytest.mark.parametrize(
    ("name", "kind"), parts.every(4, product(["qwen3_moe", "qwen3_5_moe"], ["selective", "full"]), 3)
)
def test_aux_loss_is_counted_once(source: Callable[..., Path], name: str, kind: str) -> None:
    """On one data rank: pooled, it depends on what a micro-batch of all data ranks is. The other pairs of family and
    kind are in tests/test_matrix.py, on other meshes."""
    assert trials.findings(tried(source(name, **AUX), dict(tp=2, ep=2), recompute=kind)) == []


def test_loads_counted_twice_are_found(source: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    trial, real = tried(source("qwen3_moe"), dict(fsdp=2), recompute="full"), mw.engine.router.Balance.watch
    trials.reference(trial)

    def counts_again(self: Any, layer: int, *args: Any) -> Tensor:
        before = self.counts.get(layer, 0)
        out = real(self, layer, *args)
        self.counts[layer] = self.counts[layer] + before
        return out

    def counts_late(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._local_LE += 0 if not self.balance.counts else torch.stack(list(self.balance.counts.values())).double()
        return real_end(self, *args, **kwargs)

    real_end = mw.engine.router.Router.set_slope
    monkeypatch.setattr(mw.engine.router.Balance, "watch", counts_again)
    monkeypatch.setattr(mw.engine.router.Router, "set_slope", counts_late)
    assert any("N1 load of experts" in str(f) for f in trials.findings(trial))


def _loads(directory: Path, fails: bool) -> Tensor:
    engine = mw.Engine(mw.load(directory, mw.Mesh(), dtype=torch.float64), lr=1e-3, router_aux="previous")
    batches, real = tiny.batches(0), engine.loss

    def loss(scores: Any, fields: Any) -> Tensor:
        batches_seen.append(1)
        if len(batches_seen) == 2:
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


def test_a_step_that_failed_is_not_counted(source: Callable[..., Path]) -> None:
    """In the load of the experts, of which the aux loss of the next step is made."""
    at = source("qwen3_moe", **AUX)
    assert torch.equal(worlds.run(1, _loads, at, True)[0], worlds.run(1, _loads, at, False)[0])


@pytest.mark.parametrize(
    "kept", parts.every(2, [True, False]), ids=lambda kept: "choice kept" if kept else "choice made again"
)
def test_a_token_is_routed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool) -> None:
    """All experts tie; in the recomputation the last digit falls the other way, as with atomics of a GPU."""
    at = tiny.directory(tmp_path / "ties", "qwen3_moe")
    tensors = load_file(at / "model.safetensors")
    save_file(
        {k: t.zero_() if k.endswith("mlp.gate.weight") else t for k, t in tensors.items()}, at / "model.safetensors"
    )
    trial, real = tried(at, dict(fsdp=2, ep=2), recompute="full"), mw.ops.route
    trials.reference(trial)

    def unsteady(logits_TE: Tensor, *args: Any) -> Any:
        in_backward = torch._C._current_graph_task_id() != -1
        return real(logits_TE + in_backward * 1e-14 * torch.arange(logits_TE.shape[1]), *args)

    monkeypatch.setattr(mw.ops, "route", unsteady)
    if kept:
        assert trials.findings(trial) == []
        return
    monkeypatch.setattr("meshwright.ops.experts.replayed", lambda make: make())
    with pytest.raises(mw.RankError, match=r"a layer saved .* when it ran again"):
        trials.findings(trial)


def test_the_attention_of_accelerators_is_kept_by_selective() -> None:
    """Its kernel at the meta device: one forward, though backward makes again what stands behind it."""
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


def _kept_by_forward(directory: Path, kind: str) -> int:
    """Bytes that the process holds more of after a forward than before: what backward will want."""
    model = mw.load(directory, mw.Mesh(device="cpu"), dtype=torch.float32, memory=mw.MemoryOptions(recompute=kind))
    batch = mw.pack([torch.randint(131, (500,)).tolist() for _ in range(4)])

    def resident() -> int:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    def forward() -> Tensor:
        scores = parallel.run_step._Passes(model, [batch], "logprobs").forward(Action(FORWARD, 0, 0))
        assert scores is not None
        return scores[0]

    with torch.no_grad():
        forward()
    before = resident()
    scores = forward()
    after = resident()
    scores.sum().backward()
    return after - before


@pytest.mark.skipif(sys.platform != "linux", reason="reads the process's memory where Linux shows it")
@pytest.mark.parametrize("name", parts.every(2, ["qwen3_moe", "qwen3"]))
def test_recomputing_saves_memory(source: Callable[..., Path], name: str) -> None:
    at = source(name, hidden_size=96, num_hidden_layers=8)
    none, selective, full = (worlds.run(1, _kept_by_forward, at, k)[0] for k in ("none", "selective", "full"))
    assert full < 0.3 * none
    assert full < selective < 0.8 * none


def _steps(directory: Path, state: torch.dtype | None) -> tuple[list[float], dict[str, Tensor], int]:
    engine = mw.Engine(
        mw.load(directory, mw.Mesh(fsdp=2), dtype=torch.float32), lr=1e-2, optimizer=mw.AdamW(state_dtype=state)
    )
    batches = tiny.batches(engine.model.mesh.data_rank)
    losses = [engine.step(batches).loss for _ in range(12)]
    moments = {name: both[1] for name, both in engine.optimizer.state.items()}
    return losses, moments, engine.optimizer.num_bytes


def test_moments_in_bfloat16(source: Callable[..., Path]) -> None:
    """Half the bytes; the same course within what 8 bits can say."""
    (wide, in_32, wide_bytes), _ = worlds.run(2, _steps, source("qwen3"), None)
    (narrow, in_16, narrow_bytes), _ = worlds.run(2, _steps, source("qwen3"), torch.bfloat16)
    assert narrow_bytes * 2 == wide_bytes
    assert narrow[0] == wide[0]
    assert narrow[-1] < 0.9 * narrow[0]
    assert abs(narrow[-1] - wide[-1]) < 0.02 * wide[-1]
    for name, moment in in_16.items():
        assert moment.dtype == torch.bfloat16
        torch.testing.assert_close(moment.float(), in_32[name], rtol=0.3, atol=float(in_32[name].max()) * 0.05)


def test_one_update_with_narrow_moments_is_that_of_wide_ones_rounded() -> None:
    from meshwright.optim import AdamW, LocalOptimizer

    g = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(7, 5, generator=g) for name in ("a", "b")}
    grads = [{name: torch.randn(7, 5, generator=g) for name in weights} for _ in range(3)]
    for decay in (0.0, 0.3):
        narrow = {name: w.clone() for name, w in weights.items()}
        ours = LocalOptimizer(AdamW(weight_decay=decay, state_dtype=torch.bfloat16), {"a"})
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
            ours.step(narrow, each, 0.01)
        for name in narrow:
            torch.testing.assert_close(narrow[name], expected[name], rtol=1e-6, atol=1e-7)


def test_parts_of_an_update_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of 16 elements: several to a parameter, several parameters to a part."""
    from meshwright.optim import AdamW, local

    def trained(part: int) -> dict[str, Tensor]:
        monkeypatch.setattr(local, "_PART", part)
        g = torch.Generator().manual_seed(0)
        weights = {
            name: torch.randn(size, generator=g) for name, size in dict(a=(7, 5), b=(3,), c=(16,), d=(1,)).items()
        }
        adam = local.LocalOptimizer(AdamW(state_dtype=torch.bfloat16), {"a", "c"})
        for _ in range(3):
            adam.step(weights, {name: torch.randn(w.shape, generator=g) for name, w in weights.items()}, 0.1)
        return weights

    whole, sliced = trained(1 << 20), trained(16)
    assert all(torch.equal(whole[name], sliced[name]) for name in whole)


def _passing(directory: Path, offload: bool, train: str) -> tuple[dict[str, int], dict[str, int]]:
    """What FSDP holds beside what is stored, at its most, and the bill's word for it."""
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

    FSDPParamGroup.wait_for_unshard = wait  # type: ignore[method-assign]
    engine.backward(tiny.batches(model.mesh.data_rank))
    return most, {s.what: s.num_bytes for s in model.need().stored(model.mesh.rank)}


@pytest.mark.parametrize(("offload", "train"), [(True, "**"), (False, "*norm*")])
def test_what_replicas_gather_is_on_the_bill(source: Callable[..., Path], offload: bool, train: str) -> None:
    """FSDP copies what it gathers even from one rank, and keeps the sums of a replica on the device."""
    most, billed = worlds.run(2, _passing, source("qwen3"), offload, train)[0]
    assert 0 < most["gathered parameters"] <= billed["gathered parameters"]
    waiting = most["gradients of a replica"]
    assert billed.get("gradients of a replica", 0) == (waiting if offload else 0)  # else they are the gradients
    assert 0 < billed["gradients on their way"] < 2 * waiting  # nothing for what is frozen


def _groups(model: mw.Model) -> list[Any]:
    from torch.distributed.fsdp import FSDPModule

    modules = [m for part in model.parts for m in part.modules() if isinstance(m, FSDPModule)]
    return [group for m in modules if (group := m._get_fsdp_state()._fsdp_param_group)]


def _whole_gradients(directory: Path) -> int:
    """Elements of gradients that are held whole between two micro-batches, and after the last."""
    engine = mw.Engine(mw.load(directory, mw.Mesh(fsdp=2), dtype=torch.float32), lr=1e-2)
    seen, passes, finish = [], parallel.run_step._Passes, engine._finish

    def looked_at(real: Callable[..., Any]) -> Callable[..., Any]:
        def look(*args: Any) -> Any:
            for param in (p for group in _groups(engine.model) for p in group.fsdp_params):
                if hasattr(param, "unsharded_accumulated_grad"):
                    seen.append(param.unsharded_accumulated_grad is not None)
                seen.append(param.unsharded_param.grad is not None if hasattr(param, "_unsharded_param") else False)
            return real(*args)

        return look

    passes.forward, engine._finish = looked_at(passes.forward), looked_at(finish)
    engine.backward([b for n in range(2) for b in tiny.batches(engine.model.mesh.data_rank)])
    assert len(seen) > 10
    return sum(seen)


def test_accumulated_gradients_are_shards(source: Callable[..., Path]) -> None:
    assert worlds.run(2, _whole_gradients, source("qwen3")) == [0, 0]


def _gradients(directory: Path, compiled: bool) -> tuple[dict[str, Tensor], Counter[tuple[str, int]]]:
    """And which collectives were needed, of how many bytes."""
    model = mw.load(directory, mw.Mesh(tp=2), dtype=torch.float64, memory=mw.MemoryOptions(compiled=compiled))
    engine = mw.Engine(model, lr=1e-3)
    with Recorder() as recorder:
        engine.backward(tiny.batches(0))
    return mw.gather(model, "grad"), Counter((seen.op, seen.num_bytes) for seen in recorder.collectives)


@pytest.mark.slow
def test_compiled(source: Callable[..., Path]) -> None:
    (plain, sent), _ = worlds.run(2, _gradients, source("qwen3"), False)
    with compiler.patch(compile_threads=1):  # else each rank starts processes for it
        (compiled, sent_compiled), _ = worlds.run(2, _gradients, source("qwen3"), True, seconds=240)
    assert sent_compiled == sent
    for name, grad in plain.items():
        assert (compiled[name] - grad).norm() <= 1e-9 * grad.norm(), name


def _graphs(directory: Path) -> list[int]:
    """How many the compiler made after a step, and after one of other documents; -1 where it gave up."""
    from torch._dynamo.utils import counters

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
def test_layers_and_documents_share_what_is_compiled(source: Callable[..., Path]) -> None:
    """torch gives up at 8 graphs for a place of the code: a door's name or a layer's number would use them up."""
    layers = dict(num_hidden_layers=4, layer_types=["linear_attention", "full_attention"] * 2)
    once, again = worlds.run(2, _graphs, source("qwen3_5_moe", **layers))[0]
    assert 0 < once == again <= 10


@pytest.mark.parametrize(
    ("memory", "pattern"),
    [
        (dict(recompute="half"), words("recompute='half'", "none, selective, full")),
        (dict(recompute="selective", compiled=True), words('recompute="full"', '"none"', "compiled=False")),
    ],
)
def test_refused(source: Callable[..., Path], memory: dict[str, Any], pattern: str) -> None:
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


def _little_memory(directory: Path, what: str, memory: Memory) -> str:
    mw.Mesh.memory = property(lambda self: memory)  # type: ignore[method-assign,assignment]
    try:
        model = mw.load(directory, mw.Mesh(fsdp=2), dtype=torch.float32)
        if what == "train":
            mw.Engine(model, lr=1e-3)
    except MeshError as error:
        return str(error)
    return ""


def test_what_cannot_fit_is_refused(source: Callable[..., Path]) -> None:
    """27,796 parameters over 2 ranks: 56 kB to look at, as much for gradients, twice as much for moments."""
    at = source("qwen3")
    assert worlds.run(2, _little_memory, at, "look", Memory(200_000, 10**9, shared=False))[0] == ""
    assert worlds.run(2, _little_memory, at, "train", Memory(600_000, 10**9, shared=False))[0] == ""
    told = worlds.run(2, _little_memory, at, "train", Memory(200_000, 10**9, shared=False))
    assert told[0] == told[1]
    assert re.search(words("fsdp=2", r"\brank\b", r"\b0\.0002 GB\b", r"\b1 GB\b.*\bhost\b"), told[0]), told[0]
    assert "MemoryOptions(offload=True)" in told[0]  # no fsdp: a layer must be gathered all the same
    told = worlds.run(2, _little_memory, at, "look", Memory(1_000, 1_000, shared=False))
    assert re.search(words(r"\bno fsdp\b", r"\b4096\b"), told[0]), told[0]


def test_a_published_model_is_refused_where_it_cannot_fit() -> None:
    from meshwright.blueprint import Blueprint
    from meshwright.memory.budget import Need, held_while_training, refuse_too_large
    from tests.test_verify import QWEN3_30B_A3B

    blueprint = Blueprint.of(QWEN3_30B_A3B)
    held = held_while_training(torch.bfloat16, frozenset(blueprint.table.params))
    need = Need(blueprint.spec, Axes(fsdp=2, ep=2), held)
    with pytest.raises(MeshError, match=words("fsdp=2 ep=2", r"fsdp=8\b.*\b8 ranks")):
        refuse_too_large(need, Memory(80 * 10**9, 10**12, shared=False))
