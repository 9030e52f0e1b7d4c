"""The parts of the estimated time of a step, each computed by hand from small uneven numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from meshwright.axes import Axes
from meshwright.plan import step_time
from meshwright.plan.communicators import _PAIR, _PEER, _RING, communicators
from meshwright.plan.devices import Cluster, cluster_of
from meshwright.plan.one_of_each_layer import OneOfEachLayer, _bubble, _transfers, hold_options
from meshwright.plan.step_time import INSIDE, Estimate, Flops, StepCost, Wait
from meshwright.recipe import MemoryOptions, Pipeline
from meshwright.sharding import TO_HOLDERS, TO_OWNERS, Charge, Param

PLAIN = Cluster(inside=400, between=40, flops=1000)  # 300 and 30 GB/s are reached, and 450 TFLOP/s
SMALL = Axes(pp=2, tp=3)
LAST = "last reductions of gradients, and agreements"


def fake(**fields: Any) -> Any:
    return cast(Any, SimpleNamespace(**fields))


def test_parts_of_a_step_add_up() -> None:
    waits = (Wait("a", INSIDE, 1.0), Wait("b", INSIDE, 2.0))
    result = Estimate(products=4.0, waits=waits, gathers=20.0, host=12.0, bubble_share=0.25, update=0.5)
    assert (result.waited, result.launching, result.not_hidden, result.bubble) == (3, 5, 11, 4)
    assert result.seconds == 4 + 3 + 5 + 11 + 4 + 0.5
    fast = Estimate(products=4.0, waits=waits, gathers=3.0, host=6.0, bubble_share=0.0)
    assert (fast.launching, fast.not_hidden, fast.seconds) == (0, 0, 7)


@pytest.mark.parametrize(
    ("waits", "more", "lines"),
    [
        ((5.0, 0.4, 0.3), {}, {"waits: 5.0, inside a node": 5, "waits: all others": 0.7}),
        ((5.0, 2.0), {}, {"waits: 5.0, inside a node": 5, "waits: 2.0, inside a node": 2}),
        ((), dict(gathers=1500.0), {"collectives of FSDP, 1,500 s, beyond matmuls": 500}),
        ((), dict(host=1200.0), {"waits: the host, which launches more slowly": 200}),
        ((), dict(update=3.0), {"matmuls of the optimizer": 3}),
        ((), dict(bubble_share=0.2), {"the pipeline bubble": 250}),
    ],
)
def test_short_waits_share_a_line(waits: tuple[float, ...], more: dict[str, float], lines: dict[str, float]) -> None:
    times = Estimate(
        **{
            **dict(products=1000.0, gathers=0.0, host=0.0, bubble_share=0.0),
            **more,
            "waits": tuple(Wait(str(seconds), INSIDE, seconds) for seconds in waits),
        }  # type: ignore[arg-type]
    )
    wanted = {"matmuls": 1000.0, **lines, "a step": 1000.0 + sum(lines.values())}
    parts = list(step_time._parts(times))
    assert [what for what, _ in parts] == [*wanted]
    assert dict(parts) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("what", "op", "over", "named"),
    [
        ("door", "all_gather", ("tp",), "collectives of tp"),
        ("door", "all_gather", ("replicate", "tp"), "collectives of tp"),
        ("door", "all_to_all", ("cp//2",), "collectives of cp"),
        ("door", "all_gather", ("cp%2",), "collectives of cp"),
        ("door", "all_to_all", ("ep",), "all-to-all of experts"),
        ("door", "send", ("pp",), "transfers between stages"),
        ("door", "all_gather", ("cp", "tp"), LAST),
        ("door", "all_reduce", ("tp",), LAST),
        (TO_OWNERS, "all_to_all", ("tp",), "all-to-alls of whole matrices"),
        (TO_HOLDERS, "all_reduce", ("fsdp",), "all-to-alls of whole matrices"),
    ],
)
def test_waits_are_named_by_their_axis(what: str, op: str, over: tuple[str, ...], named: str) -> None:
    axes = Axes(pp=2, fsdp=2, cp=4, tp=2, ep=2)
    [wait] = step_time._waits([Charge(what, op, over, 600, 1)], axes, PLAIN)
    assert wait.what == named


def test_waits_of_one_kind_are_summed() -> None:
    charges = [Charge("x", "all_gather", ("tp",), 6 * 10**8, 3), Charge("y", "reduce_scatter", ("tp",), 3 * 10**8, 1)]
    charges.append(Charge("z", "all_gather", ("cp",), 3 * 10**9, 2))
    axes = Axes(cp=2, tp=3)
    of_tp, of_cp = (3 * 0.6 + 0.3) * 2 / 3 / 300, 2 * 3.0 / 2 / 300
    waits = list(step_time._waits(charges, axes, PLAIN))
    assert [(wait.what, wait.seconds) for wait in waits] == [
        ("collectives of cp", pytest.approx(of_cp)), ("collectives of tp", pytest.approx(of_tp)),
    ]  # fmt: skip


def cost_of(recompute: str, axes: Axes = SMALL) -> StepCost:
    blueprint = fake(balance=fake(num_layers=3), table=fake(num_layers=7))
    work = fake(tokens=5, num_batches=11)
    return StepCost(blueprint, axes, work, MemoryOptions(recompute), PLAIN, Flops(2.0, 3.0), update=9 * 10**14)


def test_work_of_an_average_rank() -> None:
    """Layers with experts launch more kernels than dense ones; replicas and shards have batches of their own."""
    assert cost_of("selective").host == pytest.approx(11 * (4 * 6.4e-3 + 3 * 9.7e-3) / 2)
    assert cost_of("none").host == pytest.approx(11 * (4 * 2.0e-3 + 3 * 2.9e-3) / 2)
    axes = Axes(pp=2, replicate=2, fsdp=3, cp=2, tp=5)
    assert cost_of("none", axes).operations == pytest.approx((2 * 5 + 3 * 25) * 11 / 20)


@pytest.mark.parametrize(("recompute", "again"), [("none", 1), ("selective", 1), ("full", 4 / 3)])
def test_collectives_of_fsdp_overlap_and_others_are_waited_for(recompute: str, again: float) -> None:
    charges = [
        Charge("layers.0", "all_gather", ("tp",), 9 * 10**8, 2), Charge("door", "all_gather", ("tp",), 9 * 10**8, 1),
        Charge("there", "send", ("pp",), 3 * 10**8, 1), Charge("there", "recv", ("pp",), 3 * 10**8, 1),
    ]  # fmt: skip
    result = cost_of(recompute).estimate(charges, {"layers.0"}, 0.125)
    assert result.products == pytest.approx(again * 85 * 11 / 6 / 450e12)
    assert result.gathers == pytest.approx(2 * 0.9 * 2 / 3 / 300)
    assert {wait.what: wait.seconds for wait in result.waits} == pytest.approx(
        {"collectives of tp": 0.9 * 2 / 3 / 300, "transfers between stages": 0.3 / 300}
    )
    assert (result.update, result.bubble_share) == (pytest.approx(2.0), 0.125)


def test_throughput_counts_all_data_ranks_and_the_peak_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_time, "estimate", lambda _: fake(seconds=4.0))
    monkeypatch.setattr(step_time, "step_of", lambda _: fake(operations=9e15))
    axes = Axes(pp=2, replicate=2, fsdp=3, tp=5)
    figures = fake(work=fake(tokens=100, num_batches=3), axes=axes, cluster=PLAIN)
    assert step_time.tokens_a_second(figures) == pytest.approx(100 * 3 * 6 / 60 / 4)
    assert step_time.mfu(figures) == pytest.approx(9 / 4)


def param(name: str, rows: dict[str, int], cols: dict[str, int], **more: Any) -> Param:
    return Param(rows, cols, (), name=name, **more)


@pytest.mark.parametrize(
    ("given", "tied", "counts"),
    [
        (param("layers.0.up.weight", {"ff": 3}, {"model": 5}), False, True),
        (param("layers.0.norm.weight", {"model": 5}, {}), False, False),
        (param("layers.0.conv.weight", {"chan": 5}, {"tap": 4}), False, False),
        (param("layers.0.table.weight", {"row": 5}, {"model": 4}, by_rows=True), False, False),
        (param(f"{step_time.TOWER}patch.weight", {"ff": 5}, {"model": 4}), False, False),
        (param("embed.weight", {"vocab": 5}, {"model": 4}), False, False),
        (param("embed.weight", {"vocab": 5}, {"model": 4}), True, True),
        (param("head.weight", {"vocab": 5}, {"model": 4}), False, True),
    ],
)
def test_tokens_are_multiplied_with_matrices_only(given: Param, tied: bool, counts: bool) -> None:
    assert step_time._is_matrix(given, "embed.weight" if tied else "head.weight") == counts


def test_operations_of_a_matrix() -> None:
    expert = param("up", {"expert": 4, "ff": 3}, {"model": 5})
    dense = param("down", {"model": 5}, {"ff": 3})
    assert step_time._of_matrix(expert, 0.5, {"up"}) == 6 * 0.5 * 60
    assert step_time._of_matrix(expert, 0.5, {"down"}) == 4 * 0.5 * 60
    assert step_time._of_matrix(dense, 0.5, {"down"}) == 6 * 15
    # 2 key heads, each with queries and keys of 3 and values of 5: a state of 3 x 5.
    assert step_time._of_delta_rule({"key": 2, "chan": 3 + 3 + 5}, 5) == 18 * 2 * 3 * 5


def test_communicators_of_a_rank() -> None:
    """An exchange among ranks connects to each peer of its node, even if other operations use the group as well."""

    def of(axes: Axes, *charges: Charge) -> tuple[int, int]:
        result = communicators(fake(axes=axes, sender=0, charges=list(charges)))
        return result.count, result.num_bytes

    assert of(Axes()) == (0, 0)
    exchange, gather = (Charge("", op, ("fsdp",), 1, 1) for op in ("all_to_all", "all_gather"))
    assert of(Axes(fsdp=3), exchange, gather) == (2, 2 * _RING + 2 * _PEER)
    assert of(Axes(fsdp=3), gather) == (2, 2 * _RING)
    assert of(Axes(fsdp=16), gather, exchange) == (2, 2 * _RING + 7 * _PEER)
    transfers = [Charge("", op, ("pp",), 1, 1) for op in ("send", "recv")]
    assert of(Axes(pp=2), *transfers) == (1, _PAIR)
    assert of(Axes(pp=3), *transfers) == (2, 2 * _PAIR)


@pytest.mark.parametrize(
    ("device", "overrides", "figures"),
    [
        ("h200", {}, (450, 50, 989, "as specified for H200")),
        ("B200-180GB", {}, (900, 100, 2250, "as specified for B200")),
        ("L40S", dict(flops=7.0), (32, 25, 7, "as specified for L40S, except for options")),
        ("A100-80GB", dict(between=12.5), (300, 12.5, 312, "as specified for A100, except for options")),
        ("80GB", {}, (450, 50, 989, "assumed")),
        (None, dict(inside=1.0, between=2.0, flops=3.0), (1, 2, 3, "from options")),
    ],
)
def test_figures_of_a_cluster(device: str | None, overrides: dict[str, Any], figures: tuple[Any, ...]) -> None:
    options = {"inside": None, "between": None, "flops": None, **overrides}
    cluster = cluster_of(device, 4, options)
    assert (cluster.inside, cluster.between, cluster.flops, cluster.source) == figures
    assert cluster.gpus_per_node == 4


def test_transfers_of_a_pipeline() -> None:
    """Activations go to the next stage and gradients come back, once for each micro-batch."""
    model, work = (
        fake(whole=fake(module=fake(shape=fake(stream_width=7)))),
        fake(tokens=24, num_batches=5, compute_bytes=2),
    )
    assert _transfers(model, Axes(cp=2, tp=3), work) == []
    [charge] = _transfers(model, Axes(pp=3, cp=2, tp=3), work)
    assert (charge.op, charge.axes, charge.num_bytes, charge.count) == ("send", ("pp",), 24 // 6 * 7 * 2, 10)


@pytest.mark.parametrize(
    ("pipeline", "bubble"),
    [
        (Pipeline(), 1 - 5 * 3 / ((5 + 2) * 4)),
        (Pipeline(stages=2), 1 - 5 * 3 / ((5 + 1) * 4)),
        (Pipeline("zero-bubble"), 1 - 5 * 3 / ((5 + 2 / 3) * 4)),
        (Pipeline("v", stages=2), 1 - 5 * 3 / ((5 + 1 / 3) * 4)),
    ],
)
def test_quick_bubble(pipeline: Pipeline, bubble: float) -> None:
    model = fake(places=lambda pp: {3: (4.0, 3.0)}[pp], whole=fake(recipe=fake(pipeline=pipeline)))
    assert _bubble(model, 1, 5) == 0
    assert _bubble(model, 3, 5) == pytest.approx(bubble)


def test_costs_of_places_and_blueprints_are_cached_by_their_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A place costs as much as all of its stages."""
    costs = {2: [1.0, 2.0, 3.0, 5.0], 3: [1.0, 4.0, 2.0]}
    line = lambda pp: fake(pp=pp, stages_of=lambda place: range(place, len(costs[pp]), pp))  # noqa: E731
    monkeypatch.setattr("meshwright.plan.one_of_each_layer.costs_of_stages", lambda _, __, line: costs[line.pp])
    whole = fake(table=None, module=None, spec=fake(line=line))
    model = OneOfEachLayer(whole, fake(with_options=lambda **options: options), {})
    assert (model.places(2), model.places(3), model.places(2)) == ((7.0, 5.5), (4.0, 7 / 3), (7.0, 5.5))
    for memory in (MemoryOptions(), MemoryOptions("full"), MemoryOptions()):
        assert model.with_memory(memory) == dict(pipeline=Pipeline(), memory=memory)
    narrow, offload = MemoryOptions("full", narrow_grads=True), MemoryOptions("full", offload=True)
    once = MemoryOptions("full", gather_once=True, sum_once=True)
    assert hold_options(narrow) == hold_options(offload) == once
