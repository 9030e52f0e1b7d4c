"""FP8 all-gathers send the codes of FP8 matmuls. Every number equals that of quantising after the gather."""

from __future__ import annotations

import functools
import itertools
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

import meshwright as mw
from meshwright.axes import Axes
from meshwright.blueprint import Blueprint
from meshwright.engine.step_bill import engine_bill
from meshwright.mesh import Mesh
from meshwright.ops import Blocks, fp8_matmul
from meshwright.parallel import fp8_gather
from meshwright.plan.figures import Figures, work_of
from meshwright.recipe import Recipe
from meshwright.sharding import GATHERED, QUANTISED, SCALES
from meshwright.verify import Recorder
from meshwright.verify.fp8_matmuls import q1_matmuls
from meshwright.verify.results import Notes
from tests import fp8_plants, parts, tiny, trials, worlds
from tests.words import words

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
SAVED: dict[str, dict[str, Any]] = {
    "": {}, "full": dict(recompute="full"), "selective": dict(recompute="selective"), "gathered": dict(reshard=False),
    "once": dict(gather_once=True, sum_once=True), "host": dict(offload=True), "compiled": dict(compiled=True),
}  # fmt: skip
NUM = 3 if parts.ALL else 2  # micro-batches: the first gathers new weights, each later one what it gathered
USUAL = ("", "full", "selective", "gathered", "once")
SHAPES = {
    "": mw.Pipeline(),
    "at each use": mw.Pipeline(hold=False),
    "late": mw.Pipeline(schedule="zero-bubble"),
    "v": mw.Pipeline(schedule="v", stages=2),
}


def small(name: str, layers: int) -> dict[str, Any]:
    """Return a config with a layer of each kind in whole blocks."""
    changes = dict(
        hidden_size=128, num_hidden_layers=layers, num_experts=4, num_experts_per_tok=2, mlp_only_layers=[],
        num_attention_heads=2, intermediate_size=256, linear_num_key_heads=2, linear_num_value_heads=4,
        layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    config = tiny.ALIGNED[name]
    return {**config, **{key: value for key, value in changes.items() if key in config}}


@dataclass(frozen=True)
class Case:
    name: str
    mesh: Mapping[str, int]
    dtype: torch.dtype = BF16
    saved: str = ""
    shape: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        more = [self.saved, self.shape, *self.more]
        return "-".join(filter(None, [self.name, trials.named(dict(self.mesh)), str(self.dtype)[6:], *more]))


HSDP = dict(replicate=2, fsdp=2)
ALL = [
    *(Case("qwen3", dict(fsdp=2), dtype, saved) for dtype, saved in itertools.product((BF16, F64, F32), USUAL)),
    *(Case("qwen3_moe", dict(fsdp=3), dtype, saved) for dtype, saved in itertools.product((F32, BF16, F64), USUAL)),
    *(Case("qwen3_5", dict(fsdp=2, tp=2), dtype) for dtype in (F64, BF16)),
    *(Case("qwen3", HSDP, dtype, saved) for dtype, saved in ((F64, "gathered"), (BF16, "full"))),
    *(Case("qwen3_5", dict(fsdp=2, cp=2), dtype, "selective") for dtype in (BF16, F64)),  # cp: also tests/test_fp8.py
    *(Case(name, dict(fsdp=2, ep=2), F32) for name in ("qwen3_5_moe", "qwen3_moe")),
    *(Case(name, dict(fsdp=4, ep=2), saved=saved) for name, saved in (("qwen3_moe", ""), ("qwen3_5_moe", "full"))),
    *(Case("qwen3_moe", dict(pp=2, fsdp=2), shape=shape) for shape in ("late", "", "at each use", "v")),
    Case("qwen3_moe", dict(fsdp=4, ep=2), F32),
    Case("qwen3_5_moe", dict(fsdp=3), BF16, "gathered"),
    Case("qwen3_tied", dict(replicate=2), F32),  # the shards are one rank: nothing is gathered
    *(Case("qwen3_moe", {}, dtype, saved) for dtype, saved in itertools.product((F32, BF16, F64), ("", "selective"))),
    Case("qwen3", {}, F32, "compiled"),
    Case("qwen3", {}, F32, "host"),
    Case("qwen3_5_moe", dict(tp=2), BF16, "selective"),
    Case("qwen3_moe", dict(pp=2), shape="late"),
    Case("qwen3", dict(fsdp=2), more=dict(train=["*.q.weight", "*.gate_up.weight", "*.o.*"])),
    Case("qwen3_moe", dict(fsdp=2), F32, more=dict(fp8_skip=["*.k.*", "*.experts.down", "layers.0.mixer*"])),
    Case("qwen3", dict(fsdp=2), F32, "compiled"),  # compiled modules gather in the compute dtype
]  # fmt: skip
FEW = [
    Case("qwen3", {}, BF16, "full"),  # no rank shares a weight: modules take the codes
    Case("qwen3", dict(fsdp=2), BF16, "full"),
    Case("qwen3", dict(fsdp=2), more=dict(train=["*.q.weight", "*.gate_up.weight", "*.o.*"])),
    Case("qwen3", dict(fsdp=2), F32, "host"),  # offloaded parameters are gathered in the compute dtype
    Case("qwen3_moe", dict(fsdp=3), BF16, "gathered"),
    Case("qwen3", dict(fsdp=2), F32, "once"),
    Case("qwen3_moe", dict(tp=2, ep=2), F32),  # the shards are over tp, and those of experts are whole
    Case("qwen3_moe", dict(pp=2), shape="late"),  # weights are whole: those of a mesh of more are in `make matrix`
]
CASES = {str(case): case for case in (*FEW, *(ALL if parts.ALL else []))}


def load(case: Case, source: Path) -> mw.Model:
    saved = mw.MemoryOptions(**SAVED[case.saved])
    options = {"memory": saved, "pipeline": SHAPES[case.shape], **case.more}
    return mw.load(source, trials.mesh_of(dict(case.mesh)), dtype=case.dtype, fp8="block", **options)


def results_of(model: mw.Model) -> dict[str, Tensor]:
    """Return all results of two steps, and those of weights that were modified in place or loaded."""
    engine, results = mw.Engine(model, lr=1e-2, router_aux="previous"), dict[str, Tensor]()
    batches = [*tiny.batches(model.mesh.data_rank), *tiny.batches(model.mesh.data_rank + 8)][:NUM]
    for step in range(2):
        results[f"logprobs before {step}"] = mw.logprobs(model, batches[0])
        results[f"loss {step}"] = torch.tensor(engine.backward(batches if parts.ALL else batches[step:]))
        results |= {f"gradient {step} of {name}": grad.clone() for name, grad in model.grads().items()}
        engine.update()
        results |= {f"{name} after {step}": stored.clone() for name, stored in model.stored().items()}
    for stored in model.stored().values():
        stored.mul_(1.25)
    results["logprobs of other weights"] = mw.logprobs(model, batches[1])
    results["loss of other weights"] = torch.tensor(engine.evaluate(batches[:1]))
    if model.mesh.axes.world == 1:
        with tempfile.TemporaryDirectory() as at:
            dcp.save(engine.state_dict(), checkpoint_id=at)
            engine.step(batches[:1])
            results["logprobs after a third step"] = mw.logprobs(model, batches[1])
            state = engine.state_dict()
            dcp.load(state, checkpoint_id=at)
            engine.load_state_dict(state)
        results["logprobs of loaded weights"] = mw.logprobs(model, batches[1])
    return results


@contextmanager
def after_the_gather() -> Iterator[None]:
    """Quantise in each matmul what FSDP gathers in the compute dtype, and what is whole on a rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fp8_gather, "_attach_hooks", lambda _: None)
        patch.setattr(fp8_gather.Fp8Gather, "check", lambda _: None)
        patch.setattr(fp8_gather, "_whole_matrices", lambda *_: ())
        yield


def sent_by(name: str, source: Path) -> tuple[dict[str, Tensor], int]:
    """Return the results of a case, and the bytes of its all-gathers."""
    trials.mesh_of(dict(CASES[name].mesh))  # a mesh has all-gathers of its own, so it is made before
    with Recorder() as recorder:
        results = results_of(load(CASES[name], source))
    return results, sum(each.num_bytes for each in recorder.collectives if each.op == "all_gather")


@functools.cache
def of_gathered_values(name: str, source: Path) -> tuple[dict[str, Tensor], int]:
    with after_the_gather():
        return sent_by(name, source)


def both(name: str, source: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], list[int]]:
    """Return the results with gathered codes and with gathered values, and the bytes of all-gathers in both."""
    low, low_bytes = sent_by(name, source)
    wide, wide_bytes = of_gathered_values(name, source)
    return low, wide, [low_bytes, wide_bytes]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    at = tmp_path_factory.mktemp("sources")
    return functools.cache(
        lambda name, layers=2: tiny.directory(at / f"{name}-{layers}", name, dtype=BF16, **small(name, layers))
    )


def layers_of(case: Case) -> int:
    """Return as many layers as stages, one of each kind, or two where layers are gathered again or once."""
    if "pp" in case.mesh:
        return 4 if parts.ALL else 2
    return 2 if parts.ALL or case.name.startswith("qwen3_5") or case.saved in ("full", "once") else 1


# Planted bugs change the results of a run.


def of_own_rows(patch: pytest.MonkeyPatch) -> None:
    """Take the largest value of a block from the rows of one rank."""
    patch.setattr(Mesh, "all_reduce_max_", lambda _mesh, x, *_: x)


def of_an_earlier_step(patch: pytest.MonkeyPatch) -> None:
    begin, begun = fp8_gather.Fp8Gather.begin, set[int]()

    def once(low: fp8_gather.Fp8Gather) -> None:
        if id(low) not in begun:
            begin(low)
        begun.add(id(low))

    patch.setattr(fp8_gather.Fp8Gather, "begin", once)


def of_unrounded(patch: pytest.MonkeyPatch) -> None:
    """Compute scales from the float32 masters."""
    find = fp8_gather._Matrix.find_amax
    patch.setattr(fp8_gather._Matrix, "find_amax", lambda matrix: find(replace(matrix, compute=F32)))


def never_dropped(patch: pytest.MonkeyPatch) -> None:
    """Keep the codes of a gather beyond the update."""
    patch.setattr(fp8_gather.Fp8Gather, "end", lambda _: None)


def kept_until(change: str, patch: pytest.MonkeyPatch) -> None:
    """Keep the blocks of whole matrices until an engine has run `change`."""
    quantise, real, runs = fp8_gather._WholeMatrix.quantise, getattr(mw.Engine, change), list[object]()
    kept = dict[tuple[int, str, int], Blocks]()

    def counted(engine: mw.Engine, *args: Any) -> Any:
        runs.append(engine)
        return real(engine, *args)

    def once(of: fp8_gather._WholeMatrix) -> None:
        key = (id(of.shard.holder), of.shard.last, len(runs))
        if key not in kept:
            quantise(of)
        kept[key] = of._kept[of.shard.last] = kept.get(key) or of._kept[of.shard.last]

    patch.setattr(mw.Engine, change, counted)
    patch.setattr(fp8_gather._WholeMatrix, "quantise", once)


def of_another_layer(patch: pytest.MonkeyPatch) -> None:
    begin = fp8_gather.Fp8Gather.begin

    def exchanged(low: fp8_gather.Fp8Gather) -> None:
        begin(low)
        one, other = (whole._kept for whole in low._whole if whole.shard.name.endswith("mixer.o.weight"))
        one["weight"], other["weight"] = other["weight"], one["weight"]

    patch.setattr(fp8_gather.Fp8Gather, "begin", exchanged)


ALONE, SHARDED = "qwen3-one-bfloat16-full", "qwen3-fsdp=2-bfloat16-train"
BUGS: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "stale after an update": (ALONE, functools.partial(kept_until, "load_state_dict")),
    "stale after a load": (ALONE, functools.partial(kept_until, "update")),
    "of another layer": (ALONE, of_another_layer),
    "own rows": (SHARDED, of_own_rows),
    "an earlier step": (SHARDED, of_an_earlier_step),
    "unrounded": (SHARDED, of_unrounded),
    "never dropped": (SHARDED, never_dropped),
}


def with_bug(bug: str, source: Path) -> bool:
    """Compare the results with those of values that each matmul quantises."""
    name, plant = BUGS[bug]
    expected, _ = of_gathered_values(name, source)
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        results = results_of(load(CASES[name], source))
    return all(torch.equal(results[what], expected[what]) for what in expected)


@pytest.fixture(scope="module")
def ran(source: Callable[..., Path]) -> Callable[[str], Any]:
    """Run all cases and bugs of a mesh in one world."""
    case_of = {**CASES, **{bug: CASES[name] for bug, (name, _) in BUGS.items()}}

    def act(name: str) -> Callable[[], Any]:
        at = source(case_of[name].name, layers_of(case_of[name]))
        return functools.partial(with_bug if name in BUGS else both, name, at)

    def run(group: Sequence[str]) -> Any:
        world = trials.world_of(dict(case_of[group[0]].mesh))
        return worlds.in_turn(world, {name: act(name) for name in group}, seconds=120)

    return worlds.shared({name: case.mesh for name, case in case_of.items()}, run)


@pytest.mark.parametrize("case", CASES)
def test_results_are_bitwise_equal(ran: Callable[[str], Any], case: str) -> None:
    for low, wide, _ in ran(case):
        assert low.keys() == wide.keys()
        for what in low:
            assert torch.equal(low[what], wide[what]), what
    plain = "fsdp" not in CASES[case].mesh or CASES[case].saved in ("host", "compiled")
    for _, _, (low_bytes, wide_bytes) in ran(case):
        assert low_bytes == wide_bytes if plain else low_bytes < 0.9 * wide_bytes


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_change_results(ran: Callable[[str], Any], bug: str) -> None:
    assert not all(ran(bug))


BILLED = parts.every(
    8,
    [
        Case("qwen3", dict(fsdp=2), BF16, "gathered"),
        Case("qwen3_5_moe", dict(fsdp=2, ep=2), BF16, "full"),
        Case("qwen3", dict(fsdp=2), F64, "gathered"),
        Case("qwen3_moe", dict(fsdp=3), F64, "gathered"),
        Case("qwen3_moe", dict(pp=2, fsdp=2), F64, shape="late"),
        Case("qwen3_5", dict(fsdp=2, cp=2), BF16, "selective"),
        Case("qwen3_tied", HSDP, F64),
        Case("qwen3", dict(fsdp=2, tp=2), F64),
    ],
)


def trial(case: Case, source: Path) -> trials.Trial:
    made = trials.trial(source, dict(case.mesh), "lm", case.dtype)
    memory, pipeline = mw.MemoryOptions(**SAVED[case.saved]), SHAPES[case.shape]
    return trials.changed(made, fp8="block", memory=memory, pipeline=pipeline, router_aux="previous", steps=1)


@pytest.mark.parametrize("case", BILLED, ids=str)
def test_every_oracle(source: Callable[[str], Path], case: Case) -> None:
    """Every matmul follows its definition from the stored shards; every collective has the bytes of the bill. K1
    detects a gather of values."""
    right = trial(case, source(case.name, layers_of(case)))
    planted = {"values": after_the_gather} if case is BILLED[0] else {}
    tried = dict.fromkeys(("right", *planted), right)
    findings = trials.findings_in_turn(tried, lambda name: planted.get(name, trials.nullcontext)())
    assert findings.pop("right") == []
    for of_values in findings.values():
        assert {(each.oracle, each.name) for each in of_values} == {("K1", "all_gather")}


def test_plan_counts_one_byte_per_fp8_element() -> None:
    """A layer of a real size takes a byte for each element of its matrices, and two for all others."""
    config = dict(
        model_type="qwen3", vocab_size=151936, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128,
    )  # fmt: skip
    axes, (blueprint, in_fp8) = Axes(fsdp=64), (Blueprint.of(config, None, Recipe(fp8=fp8)) for fp8 in (None, "block"))
    low = [param.name for param in blueprint.table if param.low]
    plans = [Figures("a model", each, axes, work_of(axes, None, 1)) for each in (blueprint, in_fp8)]
    wide_bytes, low_bytes = (
        {c.what: c.num_bytes for c in engine_bill(each.blueprint, axes, 0, each.work) if c.op != "reduce_scatter"}
        for each in plans
    )
    numel = sum(blueprint.table[name].numel for name in low)
    assert low_bytes[SCALES] == numel // 128**2 * 4
    assert wide_bytes["layers.0"] - low_bytes["layers.0"] == numel // 36
    most = (replace(each.need, passing=None).stored() for each in plans)
    gathered = [next(s.num_bytes for s in stored if s.what == GATHERED) for stored in most]
    assert gathered[0] - gathered[1] == numel // 36 - low_bytes[SCALES]  # the largest two: embedding and a layer


def num_quantised(source: Path, mesh: Mapping[str, int]) -> tuple[int, int, int]:
    """Return how often a step of two micro-batches quantises a weight, for matmuls to take and in a matmul, and how
    many weights there are."""
    before, inside, plain = list[object](), list[object](), fp8_matmul.emulated

    def noted(real: Callable[..., Any], of: object, *args: Any) -> Any:
        before.append(of)
        return real(of, *args)

    def counted(x: Tensor, weight: Any) -> Tensor:
        inside.extend([weight] if type(weight) is Tensor else [])
        return plain(x, weight)

    model = load(Case("qwen3_moe", mesh, saved="full"), source)
    engine, batches = mw.Engine(model, lr=1e-2), tiny.batches(0)[:2]
    with pytest.MonkeyPatch.context() as patch:
        for kind, name in ((fp8_gather._Matrix, "_codes"), (fp8_gather._WholeMatrix, "quantise")):
            real = getattr(kind, name)
            patch.setattr(kind, name, lambda of, *args, real=real: noted(real, of, *args))
        patch.setattr(fp8_matmul, "emulated", counted)
        engine.step(batches)
    return len(before), len(inside), len(model.blueprint.spec.fp8)


@pytest.mark.parametrize("mesh", [{}, dict(fsdp=2)], ids=trials.named)
def test_a_step_quantises_each_weight_once(source: Callable[..., Path], mesh: dict[str, int]) -> None:
    """Forward, recomputation and backward of all micro-batches take the same codes."""
    for before, inside, num in worlds.run(trials.world_of(mesh), num_quantised, source("qwen3_moe", 2), mesh):
        assert (before, inside) == (num, 0)


def test_plan_counts_the_codes_that_a_step_keeps() -> None:
    config = dict(tiny.ALIGNED["qwen3"])
    for axes, memory, kept in (
        (Axes(), mw.MemoryOptions(), 1),
        (Axes(), mw.MemoryOptions(compiled=True), 1),
        (Axes(), mw.MemoryOptions(offload=True), 0),
        (Axes(fsdp=2), mw.MemoryOptions(), 1),
        (Axes(fsdp=2), mw.MemoryOptions(compiled=True), 0),  # each matmul quantises what was gathered
    ):
        blueprint = Blueprint.of(config, None, Recipe(fp8="block", memory=memory))
        numel = sum(blueprint.table[name].numel for name in blueprint.spec.fp8)
        figures = Figures("a model", blueprint, axes, work_of(axes, None, 1))
        stored = {each.what: each.num_bytes for each in replace(figures.need, passing=None).stored(0)}
        scales = numel // 128**2 * 4 if axes.world == 1 else 0
        assert stored.get(QUANTISED, 0) == kept * (numel // axes.world + scales)


def with_scales_of_shards(source: Path) -> list[str]:
    """Return the findings of Q1 on a rank."""
    with pytest.MonkeyPatch.context() as patch:
        fp8_plants.scale_of_shard(patch)
        tried = trial(Case("qwen3", dict(fsdp=2), F64), source)
        engine = tried.engine(mw.Mesh(fsdp=2, device="cpu"))
        return [str(each) for each in q1_matmuls(engine, tried.batches(engine.model, 0)[:1], Notes())]


def test_q1_names_scales_of_a_shard(source: Callable[..., Path]) -> None:
    """`test_every_oracle` runs Q1 on the same matmuls without a bug."""
    for of_rank in worlds.run(2, with_scales_of_shards, source("qwen3", 1)):
        line = next(line for line in of_rank if "layers.0.mixer.q.weight" in line)
        assert re.search(words("scales are not those of the values", "some of its rows, as of a shard"), line)


def errors_of_lost_hooks(source: Path) -> list[str]:
    """Drop the hooks of a parameter on the last rank alone. Every rank must raise an error."""
    model = load(Case("qwen3", dict(fsdp=2)), source)
    engine, batches = mw.Engine(model, lr=1e-2), tiny.batches(model.mesh.data_rank)
    engine.step(batches)
    if model.mesh.rank:
        local = model.parameter("layers.1.mixer.o.weight")._local_tensor  # type: ignore[attr-defined] # a DTensor
        vars(local).clear()
    errors = []
    for call in (lambda: engine.step(batches), lambda: mw.logprobs(model, batches[0])):
        with pytest.raises(mw.MeshwrightError) as raised:
            call()
        errors.append(str(raised.value))
    return errors


def test_a_lost_hook_is_an_error_on_every_rank(source: Callable[[str], Path]) -> None:
    for of_rank in worlds.run(2, errors_of_lost_hooks, source("qwen3")):
        for message in of_rank:
            assert re.search(words(r"layers\.1\.mixer\.o\.weight was replaced", r"model\.stored\(\)"), message)
