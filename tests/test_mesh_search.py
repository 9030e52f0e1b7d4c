"""Mesh search: sizes of axes, variants of options, lower bounds of memory, and the words of its command."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from meshwright.axes import Axes
from meshwright.errors import ConfigError
from meshwright.optim import AdamW
from meshwright.plan import fit_advice, search
from meshwright.plan.fit_advice import _fewer_tokens, options_of
from meshwright.plan.least_memory import LeastMemory
from meshwright.plan.mesh_checks import _primes
from meshwright.plan.requested import _words_to_repeat, mesh_of, search_request
from meshwright.plan.search import Candidate, Cut, Search, Size, Variant, _cps, _cuts, _holds, _keeps_busy, divisors
from meshwright.plan.step_time import INSIDE, Estimate, Wait
from meshwright.plan.terminal import _largest, _words_for_mesh, parts_of_step, why
from meshwright.recipe import RECOMPUTE, MemoryOptions, Pipeline, Recipe
from meshwright.sharding import Stored

GB = 10**9


def fake(**fields: Any) -> Any:
    return cast(Any, SimpleNamespace(**fields))


def anything(*_: Any, **__: Any) -> bool:
    return True


def test_divisors_and_prime_factors() -> None:
    assert [divisors(n) for n in (1, 7, 12)] == [[1], [1, 7], [1, 2, 3, 4, 6, 12]]
    assert [_primes(n) for n in (1, 2, 9, 12, 45, 49, 1001)] == [[1], [2], [3], [2, 3], [3, 5], [7], [7, 11, 13]]


@pytest.mark.parametrize(
    ("num", "tp", "tokens", "cps"),
    [
        (8, 1, 8192, [1, 2, 4, 8]),
        (8, 1, 4096, [1, 2, 4]),  # 1,024 tokens for each rank of cp
        (12, 1, 8192, [1, 2, 4]),
        (8, 3, 8192, []),  # tp does not divide the tokens
        (8, 3, 6144, [1, 2, 4]),
        (8, 1, 512, [1]),
        (4, 1, 4098, [1, 2]),
    ],
)
def test_sizes_of_cp(num: int, tp: int, tokens: int, cps: list[int]) -> None:
    assert list(_cps(num, tp, Size(8, 8, tokens, tokens), anything)) == cps


def test_sizes_of_cp_that_the_model_allows() -> None:
    assert list(_cps(8, 2, Size(8, 8, 16384, 16384), lambda cp, tp: (cp, tp) != (2, 2))) == [1, 4, 8]


def test_a_pipeline_needs_enough_micro_batches() -> None:
    asked: list[tuple[int, int]] = []

    def allowed(num: int, pp: int) -> bool:
        asked.append((num, pp))
        return num % pp == 0

    assert _keeps_busy(1, 1, allowed)
    assert [_keeps_busy(4, num, allowed) for num in (3, 4, 9, 12)] == [False, True, False, True]
    assert asked == [(4, 4), (5, 4), (4, 4)], "one number stands for all with its remainder"


def meshes(size: Size, num_experts: int = 0, allowed: Any = anything) -> set[str]:
    return {f"{cut.axes} x{cut.num_batches}" for cut in _cuts(size, allowed, num_experts)}


def test_meshes_of_a_few_ranks() -> None:
    """6 ranks in nodes of 3 with 12 streams: tp stays in a node, and replicas have at least a node."""
    of_six = Size(6, 3, 1536, 12 * 1536)
    flat = {"fsdp=6 x2", "replicate=2 fsdp=3 x2", "fsdp=2 tp=3 x6", "replicate=2 tp=3 x6"}
    assert meshes(of_six) == {
        *flat, "pp=2 fsdp=3 x4", "pp=2 tp=3 x12", "pp=3 fsdp=2 x6", "pp=6 x12",
    }  # fmt: skip
    assert meshes(of_six, 0, lambda *_, **sizes: sizes.get("pp", 1) == 1) == flat
    assert meshes(Size(3, 8, 1024, 4 * 1024)) == {"pp=3 x4"}, "three data ranks do not divide four streams"


def test_sizes_of_ep_divide_a_replica_and_the_experts() -> None:
    size = Size(12, 4, 1024, 12 * 1024)
    no_others = lambda *_, **sizes: set(sizes) <= {"fsdp", "ep", "cp", "tp"} and sizes.get("tp", 1) == 1  # noqa: E731
    of_twelve = {f"fsdp=12{ep}" for ep in ("", " ep=2", " ep=3", " ep=6")}
    replicas = {f"replicate=2 fsdp=6{ep}" for ep in ("", " ep=2", " ep=3", " ep=6")}
    threes = {f"replicate=3 fsdp=4{ep}" for ep in ("", " ep=2")}
    assert meshes(size, 18, no_others) == {f"{each} x1" for each in (*of_twelve, *replicas, *threes)}
    assert meshes(size, 18, lambda *_, **s: no_others(**s) and s.get("ep") != 6) == {
        f"{each} x1" for each in (*of_twelve, *replicas, *threes) if "ep=6" not in each
    }


def test_replicas_have_a_few_nodes_at_most() -> None:
    only_data = lambda *_, **sizes: set(sizes) <= {"cp", "tp"} and sizes.get("tp", 1) == 1  # noqa: E731
    names = meshes(Size(40, 2, 1024, 40 * 1024), 0, only_data)
    assert {int(name.partition("fsdp=")[2].partition(" ")[0]) for name in names} == {40, 2, 4, 5, 8}


def test_a_pipeline_holds_unless_it_may_not() -> None:
    memory = MemoryOptions()
    held = [_holds(Cut(Axes(pp=pp), 1), Variant(memory, hold)) for pp in (1, 2) for hold in (True, False, None)]
    assert held == [False, False, False, True, False, True]


class LeastOf(LeastMemory):
    """A model of 7 layers with 600 dense elements and 400 of experts; 50 frozen bytes."""

    _dense_elements = 600  # type: ignore[assignment]
    _expert_elements = 400  # type: ignore[assignment]
    _frozen_bytes = 50.0  # type: ignore[assignment]

    def __init__(self) -> None:
        line = lambda pp: fake(stages_of=lambda _: [0, 2], layers_of=lambda stage: range(stage + 1))  # noqa: E731
        super().__init__(fake(table=fake(num_layers=7), spec=fake(line=line)), 8, 3.0)
        self._kept: Any = lambda kind, spread: {"none": 7000, "full": 700}[kind] + 70 * spread


@pytest.mark.parametrize(
    ("mesh", "num_batches", "memory", "holds", "num_bytes"),
    [
        ({}, 1, MemoryOptions(), False, 7 * 1000 + 50 + max(4000, 7000)),
        ({}, 2, MemoryOptions(), False, 7 * 1000 + 50 + 4000 + 7000),
        ({}, 1, MemoryOptions("full"), False, 7 * 1000 + 50 + 4000),
        ({}, 2, MemoryOptions("full"), False, 7 * 1000 + 50 + 4000 + 700 + 900),
        ({}, 2, MemoryOptions("full", offload=True), False, 700 + 900),
        (dict(fsdp=2, ep=2), 1, MemoryOptions(), False, 7 * 500 + 25 + 7070),
        (dict(replicate=2, fsdp=2), 1, MemoryOptions(), False, 7 * 500 + 25 + 7000),
        (dict(cp=2, tp=5), 2, MemoryOptions(), False, 7 * 100 + 5 + 400 + 700),
    ],
)
def test_least_bytes_of_a_mesh(
    mesh: dict[str, int], num_batches: int, memory: MemoryOptions, holds: bool, num_bytes: float
) -> None:
    least = LeastOf()
    if not mesh.get("pp"):
        least._share = lambda _: 1.0  # type: ignore[method-assign]
    assert least.num_bytes(Axes(**mesh), num_batches, memory, holds=holds) == pytest.approx(num_bytes)


def test_least_bytes_of_a_pipeline() -> None:
    """The first rank has 4 of 7 layers and keeps as many micro-batches as places. The first backward frees one before
    all gradients exist."""
    least, axes = LeastOf(), Axes(pp=2, fsdp=2)
    state, shared = 7 * 250 + 12.5, 7000 * 4 / 7
    for num_batches, moment in ((1, shared), (2, max(2 * shared, 1000 + shared)), (3, 1000 + 2 * shared)):
        assert least.num_bytes(axes, num_batches, MemoryOptions(), holds=False) == pytest.approx(state + moment)
    held = least.num_bytes(axes, 1, MemoryOptions(), holds=True) - state - shared
    assert held == pytest.approx(1000 / 2 * 6)


@pytest.mark.parametrize(
    ("mesh", "held"),
    [
        (dict(pp=5), 0),
        (dict(pp=5, tp=3), 400 / 5 * 6),  # the ranks of tp shard experts
        (dict(pp=5, fsdp=2, ep=2), 600 / 5 * 6),  # each rank has its experts, which nothing shards
        (dict(pp=5, cp=2, tp=3), (600 / 3 + 400) / 5 * 6),
        (dict(pp=5, fsdp=4, ep=2), (600 + 400 / 2) / 5 * 6),
        (dict(pp=5, replicate=2), (600 + 400) / 5 * 6),
        (dict(pp=5, replicate=2, fsdp=2, ep=2), (600 + 400 / 2) / 5 * 6),
    ],
)
def test_bytes_that_hold_keeps(mesh: dict[str, int], held: float) -> None:
    assert LeastOf()._held(Axes(**mesh)) == pytest.approx(held)


def candidate(parts: Estimate, **figures: Any) -> Any:
    return fake(estimate=parts, figures=fake(**figures))


def times(products: float, *waits: float, host: float = 0.0, gathers: float = 0.0, share: float = 0.0) -> Estimate:
    named = tuple(Wait(f"w{n}", INSIDE, seconds) for n, seconds in enumerate(waits))
    return Estimate(products, named, gathers, host, share)


def test_parts_of_a_step_have_names_for_a_sentence() -> None:
    parts = parts_of_step(candidate(times(4.0, 1.0, 2.0, host=12.0, gathers=20.0, share=0.25)))
    assert parts == {
        "matmuls": 4, "the host": 5, "w0 inside a node": 1, "w1 inside a node": 2,
        "collectives of FSDP beyond matmuls": 11, "its pipeline": 4,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("own", "text"),
    [
        (times(8.0, 2.0), "waits 20% of a step for w0; as fast as the first"),
        (times(8.0, 4.0), "waits 33% of a step for w0, 2.00 s longer than the first"),
        (times(9.0, 3.0), "waits 25% of a step for w0; matmuls take 1.00 s longer than in the first"),
        (times(11.0, 2.0), "waits 15% of a step for w0; matmuls take 3.00 s longer than in the first"),
        (times(8.0, 2.0, host=11.0), "waits 18% of a step for w0; the host takes 1.00 s longer than in the first"),
        (times(16.0, 0.1), "hardly waits; matmuls take 8.00 s longer than in the first"),
    ],
)
def test_reasons_why_a_mesh_is_slower(own: Estimate, text: str) -> None:
    first = candidate(times(8.0, 2.0))
    assert why(first, first) == "waits 20% of a step for w0 inside a node"
    assert why(candidate(own), first) == text.replace("w0", "w0 inside a node")


def test_the_largest_kind_is_one_on_the_device() -> None:
    stored = [Stored("parameters", 3 * GB), Stored("moments", 9 * GB, host=True), Stored("activations", 4 * GB)]
    figures = dict(most=fake(stored=stored), optimizer=AdamW())
    assert _largest(candidate(times(1.0), **figures)) == "activations (4.000 GB)"


@pytest.mark.parametrize(
    ("words", "left"),
    [
        ("plan m --search 8 --fp8", "plan m --fp8"),
        ("plan m --sea=8 --top=3 --json --device H100", "plan m --device H100"),
        ("plan m --global-tokens 9 --tokens 5 --recompute full --offload --search 2", "plan m"),
        ("plan - --search 8", "plan -"),
        ("plan m --optimizer muon --state-dtype bfloat16 --search 8", "plan m --optimizer muon --state-dtype bfloat16"),
    ],
)
def test_words_of_a_search_that_every_mesh_repeats(words: str, left: str) -> None:
    assert list(_words_to_repeat(shlex.split(words))) == left.split()


@pytest.mark.parametrize(
    ("mesh", "left"),
    [
        (dict(pp=2, cp=2), "--schedule v --stages=2 --hold --ends 1,2 --context x --no-hold m"),
        (dict(pp=2), "--schedule v --stages=2 --hold --ends 1,2 --no-hold m"),
        (dict(cp=2), "--context x m"),
        ({}, "m"),
    ],
)
def test_words_of_absent_axes_are_left_out(mesh: dict[str, int], left: str) -> None:
    words = "--schedule v --stages=2 --hold --ends 1,2 --context x --no-hold m"
    assert list(_words_for_mesh(shlex.split(words), Axes(**mesh))) == left.split()


def options(**more: Any) -> dict[str, Any]:
    none: Iterable[str] = ("mesh", "micro_batches", "html", "ends", "tokens", "global_tokens", "recompute")
    others = dict.fromkeys((*none, "inside", "between", "flops", "state_dtype"))
    plain = dict(model="m", device="H200", search=6, gpus_per_node=4, optimizer="adamw", top=3)
    return {**others, **plain, "command": "x plan m --sea 6", **more}


def test_a_search_as_requested() -> None:
    plain = search_request(options())
    assert plain.size == Size(6, 4, 8192, 6 * 8192)
    assert (plain.device, plain.recompute, plain.top, plain.words) == (141 * GB, RECOMPUTE, 3, ("x", "plan", "m"))
    assert (plain.cluster.gpus_per_node, plain.cluster.flops, plain.optimizer) == (4, 989, AdamW())
    changed = dict(tokens=5, global_tokens=40, recompute="full", state_dtype="bfloat16", between=7.0)
    other = search_request(options(**changed))
    assert (other.size, other.recompute) == (Size(6, 4, 5, 40), ("full",))
    assert (other.optimizer, other.cluster.between) == (AdamW(state_dtype=torch.bfloat16), 7.0)
    assert search_request(options(tokens=5)).size.global_tokens == 30
    for name in ("mesh", "micro_batches", "html", "ends"):
        with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} does not go with --search"):
            search_request(options(**{name: "1"}))
    with pytest.raises(ConfigError, match="--search needs a --device"):
        search_request(options(device=""))


def test_a_mesh_as_text() -> None:
    assert mesh_of("fsdp=2, tp=12 ep=3") == dict(fsdp=2, tp=12, ep=3)
    assert mesh_of("fsdp=999999999") == dict(fsdp=999_999_999)
    for wrong in ("fsdp", "dp=2", "fsdp=-1", "fsdp=", "fsdp=1000000000", "fsdp=2,fsdp=2"):
        with pytest.raises(ConfigError, match="--mesh"):
            mesh_of(wrong)


@pytest.mark.parametrize(
    ("mesh", "tokens", "num", "smaller"),
    [
        ({}, 8192, 3, [(4096, 6), (2048, 12), (1024, 24)]),
        (dict(cp=2), 8192, 1, [(4096, 2), (2048, 4)]),
        (dict(tp=3), 6144, 1, [(3072, 2), (1536, 4)]),
        (dict(tp=3), 3 * 2**10 + 3, 1, []),
        (dict(cp=2, fsdp=2), 2048, 1, []),
    ],
)
def test_smaller_micro_batches_of_the_same_step(
    mesh: dict[str, int], tokens: int, num: int, smaller: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    axes = Axes(**mesh)
    monkeypatch.setattr(fit_advice, "replace", lambda _, work: (work.tokens, work.num_batches))
    offered = list(_fewer_tokens(fake(axes=axes, work=fake(tokens=tokens, num_batches=num))))
    assert offered == [(f"--tokens {tokens}", (tokens, num)) for tokens, num in smaller]


def test_choices_of_a_search_as_options() -> None:
    def spelled(hold: bool | None, recompute: str) -> str:
        figures = fake(axes=Axes(pp=2, tp=3), work=fake(num_batches=5), memory=MemoryOptions(recompute))
        return options_of(Candidate(figures, hold))

    assert spelled(None, "none") == "--mesh pp=2,tp=3 --micro-batches 5"
    assert spelled(False, "full") == "--mesh pp=2,tp=3 --micro-batches 5 --recompute full --no-hold"
    assert spelled(True, "none") == "--mesh pp=2,tp=3 --micro-batches 5 --hold"


def searching(least: dict[tuple[str, bool | None], int], pipeline: Pipeline, device: int) -> Any:
    blueprint = fake(recipe=Recipe(pipeline=pipeline))
    asked = fake(recompute=("none", "selective", "full"), device=device)
    bound = lambda _, variant: least[variant.memory.recompute, variant.hold]  # noqa: E731
    return fake(blueprint=blueprint, request=asked, _least=bound)


@pytest.mark.parametrize(
    ("pp", "pipeline", "device", "tried"),
    [
        (1, Pipeline(), 3, ["none None", "selective None", "full None"]),
        (1, Pipeline(), 2, ["selective None", "full None"]),
        (1, Pipeline(), 0, ["full None"]),  # it shows how far the mesh is from fitting
        (2, Pipeline(), 5, ["selective True", "full True", "none False", "selective False", "full False"]),
        (2, Pipeline(hold=True), 9, ["none True", "selective True", "full True"]),
        (2, Pipeline("zero-bubble"), 3, ["none None", "selective None", "full None"]),
    ],
)
def test_variants_of_a_mesh(pp: int, pipeline: Pipeline, device: int, tried: list[str]) -> None:
    """The fastest first: a pipeline holds what it can, and recomputes as little as it can."""
    least = {(kind, hold): 3 - n + 3 * bool(hold) for n, kind in enumerate(RECOMPUTE) for hold in (True, False, None)}
    variants = Search._variants(searching(least, pipeline, device), Cut(Axes(pp=pp), 4), MemoryOptions())
    assert [f"{each.memory.recompute} {each.hold}" for each in variants] == tried


def test_the_fastest_of_each_mesh_that_fits() -> None:
    def costed(seconds: float, fits: bool = True) -> Any:
        return fake(estimate=fake(seconds=seconds), figures=fake(fits=fits, axes=seconds))

    first, second, third = (Cut(Axes(fsdp=n), 1) for n in (1, 2, 3))
    one, two = Variant(MemoryOptions()), Variant(MemoryOptions("full"))
    actual = {
        (first, one): costed(5), (first, two): costed(3), (second, one): costed(1, False), (second, two): costed(4),
        (third, one): costed(2),
    }  # fmt: skip
    of = fake(in_full=actual, request=fake(top=2), best=[])
    assert [each.estimate.seconds for each in Search._fastest(of)] == [2, 3]
    so_far = cast(Any, Search._so_far).fget
    assert so_far(of) == "none fits yet"
    of.best = [costed(5), costed(3), costed(4)]
    assert so_far(of) == "the best so far: 3, 3 s a step"


def test_progress_never_falls(monkeypatch: pytest.MonkeyPatch) -> None:
    now, said = [10.0], list[str]()
    monkeypatch.setattr(search.time, "monotonic", lambda: now[0])
    of = fake(done=0.5, last=9.0, in_full={1: 1}, say=said.append, _so_far="so")
    for moment, done in ((10.0, 0.6), (13.0, 0.4), (16.0, 0.7), (17.0, 7.0)):
        now[0] = moment
        Search._report_progress(of, done)
    assert said == ["60% done, 1 mesh costed in full; so", "100% done, 1 mesh costed in full; so"]


def test_the_nearest_mesh_is_among_those_with_the_smallest_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Among meshes with equal parts, those with the most tp and pp are costed. The nearest is named."""
    costed: list[str] = []
    left = {"tp=8": -9, "pp=2 tp=4": -5, "tp=4": -1, "fsdp=2 tp=4": -3, "replicate=8": 100}

    def in_full(cut: Cut, variant: str) -> Any:
        costed.append(f"{cut.axes} {variant}")
        return SimpleNamespace(left_bytes=left[str(cut.axes)], cut=cut)

    monkeypatch.setattr(search, "_NEAREST", 3)
    request, recipe = SimpleNamespace(recompute=("none", "full")), SimpleNamespace(memory=MemoryOptions())
    searching = cast(Any, SimpleNamespace(
        blueprint=SimpleNamespace(recipe=recipe), request=request, _once=False, _seconds=0.0, _in_full=in_full,
        least=SimpleNamespace(elements=lambda axes: 8 / axes.world * axes.replicate),
        _variants=lambda _, memory: ["first", f"{memory.recompute} {memory.offload}"], _report_progress=lambda _: None,
    ))  # fmt: skip
    meshes = [Axes(replicate=8), Axes(fsdp=2, tp=4), Axes(tp=4), Axes(tp=8), Axes(pp=2, tp=4)]
    nearest = Search._nearest(searching, [Cut(axes, 1) for axes in meshes])
    assert costed == ["tp=8 full True", "pp=2 tp=4 full True", "fsdp=2 tp=4 full True"]
    assert str(cast(Any, nearest).cut.axes) == "fsdp=2 tp=4"
    costed.clear()
    searching._once, searching._seconds = True, 10.0**9  # no offload with gradients that are summed once; out of time
    nearest = Search._nearest(searching, [Cut(axes, 1) for axes in meshes])
    assert costed == ["tp=8 full False", "pp=2 tp=4 full False", "fsdp=2 tp=4 full False"]
    assert str(cast(Any, nearest).cut.axes) == "tp=8"
