"""The bill of a step on models that consist of a few doors and parameters, with bytes and counts worked out by hand."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
from torch import nn

from meshwright.axes import Axes
from meshwright.ops.codings import Coding
from meshwright.recipe import MemoryOptions, Pipeline, Recipe
from meshwright.sharding import (
    DELTA,
    ENTER,
    MEET,
    OWN,
    SHARE,
    Charge,
    Dispatch,
    Door,
    Halo,
    Hop,
    Join,
    Line,
    Lookup,
    Param,
    Rules,
    ScatterVision,
    ShardingSpec,
    Span,
    Stage,
    Swap,
    Table,
    Unit,
    Work,
    bill,
    gathered_bytes,
    padded,
)
from meshwright.sharding.bill import (
    _doors,
    _experts,
    _halos,
    _inserts,
    _last_sums,
    _lookups,
    _Passes,
    _rows,
    _scales,
    _swaps,
    _transfers,
    _unit,
)

ONE = Line(1, (1,))
WORK = Work(tokens=24, num_batches=5)  # 2 bytes to compute with, 4 as stored
# A gradient comes to layer 0 in 3 micro-batches of 5; in one of these it begins there.
BEGUN = {"layers.0": {f"layers.0.x{at}, {way}": n for at, way, n in (("", "forward", 1), ("", "backward", 2))}}
PASSES = _Passes(Counter({"layers.0": 3}), Counter(), {})
BEGINS = _Passes(Counter({"layers.0": 3}), Counter({"layers.0": 1}), BEGUN)


def model_of(**doors):
    """A model whose layer 0 has some doors."""
    model, layer = nn.Module(), nn.Module()
    for name, door in doors.items():
        setattr(layer, name, door)
    model.layers = nn.ModuleDict({"0": layer})
    model.tower = model.mtp = None
    model.tied = False
    return model


def again(door):
    door.again = True
    return door


def spec_of(model=None, params=(), recipe=Recipe(), units=(), line=ONE):
    """A spec whose stages are given: the first has the model and the units."""
    model = model or model_of()
    spec = ShardingSpec(Table({each.name: each for each in params}), Rules(), model, recipe)
    spec._lines[line.pp] = line
    spec._stages[line.pp] = tuple(
        Stage(number, model, units if number == 0 else ()) for number in range(line.num_stages)
    )
    return spec


def rows_of(charges):
    return [(c.what, c.op, c.axes, c.num_bytes, c.count) for c in charges]


@pytest.mark.parametrize(
    ("passes", "forwards", "backwards"), [(PASSES, 5 + 3, 3), (BEGINS, 5 + 2 + 1, 2 + 2)], ids=["passes", "begins"]
)
def test_a_door_counts_recomputation_and_the_part_in_which_gradients_begin(passes, forwards, backwards):
    stage = Stage(0, model_of(x=again(Door(ENTER, 6)), share=Door(SHARE, 9), own=Door(OWN, 9)), ())
    assert rows_of(_doors(stage, Axes(cp=2, tp=3), WORK, passes)) == [
        ("layers.0.x", "all_gather", ("tp",), 12 * 6 * 2, forwards),
        ("layers.0.x", "reduce_scatter", ("tp",), 12 * 6 * 2, backwards),
    ]


def test_a_door_of_floats_has_the_stored_width_and_no_recomputation():
    stage = Stage(0, model_of(x=Door(MEET, 3, floats=True)), ())
    assert [(c.num_bytes, c.count) for c in _doors(stage, Axes(tp=3), WORK, PASSES)] == [(24 * 3 * 4, 5), (288, 3)]


@pytest.mark.parametrize(
    ("number", "detached", "embed", "head"),
    [(0, False, (2, 2), (2, 2)), (0, True, (2, 1), (2, 2)), (1, False, (1, 1), (2, 2)), (1, True, (1, 0), (2, 2))],
)
def test_an_mtp_head_passes_the_doors_of_embedding_and_head_once_more(number, detached, embed, head):
    model = nn.Module()
    model.embed, model.head, model.mtp = nn.Module(), nn.Module(), SimpleNamespace(detached=detached)
    model.embed.leave, model.head.enter, model.head.meet = (Door(ENTER, 1) for _ in range(3))
    model.head.mtp_door = Door(ENTER, 1)
    passes = _Passes(Counter(embed=5, head=5), Counter(), {})
    charges = list(_doors(Stage(number, model, ()), Axes(tp=2), WORK, passes))
    counts = [(a.count, b.count) for a, b in zip(charges[::2], charges[1::2], strict=True)]
    assert counts == [tuple(5 * n for n in each) for each in (embed, head, head, (1, 1))]


def dispatch(back_again):
    door = again(Dispatch(8, 6, 3, lambda *_: None))
    door.back_again = back_again
    return door


@pytest.mark.parametrize("back_again", [False, True])
def test_experts_send_every_copy_of_a_token(back_again):
    """4 own tokens with 3 copies each. Rows go there and back, in backward twice too."""
    model = model_of(x=dispatch(back_again))
    charges = _experts(model, spec_of(model), Axes(fsdp=5, cp=2, tp=3, ep=2), WORK, PASSES)
    assert rows_of(charges) == [
        ("layers.0.x, the counts", "all_to_all", ("ep",), 8 * 8, 5 + 3),
        ("layers.0.x, weights", "all_to_all", ("ep",), 12 * 4, 5 + 3 + 3),
        ("layers.0.x, rows", "all_to_all", ("ep",), 12 * 6 * 2, 2 * 5 + 3 * (1 + back_again) + 2 * 3),
    ]


def test_experts_in_which_a_gradient_begins_have_a_part_of_a_backward():
    sent = {"the counts, forward": 1, "weights, backward": 1, "rows, forward": 2, "rows, backward": 1}
    begun = {"layers.0": {f"layers.0.x, {what}": num for what, num in sent.items()}}
    passes, model = _Passes(Counter({"layers.0": 3}), Counter({"layers.0": 1}), begun), model_of(x=dispatch(False))
    charges = _experts(model, spec_of(model), Axes(fsdp=5, cp=2, tp=3, ep=2), WORK, passes)
    assert [c.count for c in charges] == [5 + (2 + 1), 5 + (2 + 0) + (2 + 1), 2 * 5 + (2 + 2) + (2 * 2 + 1)]


def test_tokens_that_go_once_send_codes_and_an_expected_number_of_rows():
    """Each of 4 places has 2 of 8 experts: a token misses one with probability C(6, 3) / C(8, 3)."""
    model = model_of(x=dispatch(False))
    spec = spec_of(model, recipe=Recipe(memory=MemoryOptions(token_once=True)))
    counts, weights, codes, rows = _experts(model, spec, Axes(fsdp=4, cp=2, tp=3, ep=4), WORK, PASSES)
    assert (counts.num_bytes, counts.count) == ((8 + 4 * 2) * 8, 8)
    assert (weights.num_bytes, weights.count) == (12 * 4, 11)
    assert (codes.what, codes.num_bytes, codes.count) == ("layers.0.x, the experts of rows", 12 * 8, 8)
    assert (rows.num_bytes, rows.between, rows.count) == (10 * 12, (8 * 12, 12 * 12), 2 * 5 + 3 + 2 * 3)


@pytest.mark.parametrize(
    ("hop", "top_k", "result"),
    [
        (Hop("x", ("ep//2",), 3, 12, 3), 5, (4 * 2, 11, 4 * 3)),  # 12 * (1 - C(8, 5) / C(12, 5)) = 11.2
        (Hop("x", ("ep//2",), 3, 12, 3), 2, (4 * 1, 7, 4 * 2)),  # 12 * (1 - C(8, 2) / C(12, 2)) = 6.9
        (Hop("x", ("ep%2",), 2, 4, 6), 1, (0, 4, 4 * 3 * 1)),  # tokens come from 3 nodes
        (Hop("x", ("ep%2",), 2, 4, 6), 3, (0, 11, 4 * 3 * 2)),  # 24 * (1 - C(10, 3) / C(12, 3)) = 10.9
    ],
)
def test_rows_of_a_hop(hop, top_k, result):
    assert _rows(hop, 4, top_k) == result


def mixer():
    """4 query heads, 2 kv heads. On 8 ranks of cp, 4 neighbours swap, in 2 groups."""
    swap = again(Swap(Span("heads", 4), [(5, 1), (3, 2)], 7))
    joins = dict(
        all_k=again(Join(swap, 5, serves=2)), floats=Join(swap, 2, rows=9, floats=True),
        few=Join(swap, 2, rows=99, has_gradient=False),
    )  # fmt: skip
    return dict(swap=swap, **joins)


def test_context_parallelism_swaps_in_groups_and_gathers_between_them():
    """A rank has 3 tokens, a group 12."""
    model, axes = model_of(**mixer()), Axes(cp=8)
    inner, outer = ("cp%4",), ("cp//4",)
    assert rows_of(_swaps(model, spec_of(model), axes, axes.coords(5), WORK, PASSES)) == [
        ("layers.0.swap", "all_to_all", inner, 12 * (5 + 3) * 2, 5 + 3 + 3),
        ("layers.0.swap, the way back", "all_to_all", inner, 12 * 7 * 2, 5 + 3 + 3),
        ("layers.0.all_k", "all_gather", outer, 2 * 12 * 5 * 2, 5 + 3),
        ("layers.0.all_k", "reduce_scatter", outer, 2 * 12 * 5 * 2, 3),
        ("layers.0.floats", "all_gather", outer, 2 * 9 * 2 * 4, 5),
        ("layers.0.floats", "reduce_scatter", outer, 2 * 9 * 2 * 4, 3),
        ("layers.0.few", "all_gather", outer, 2 * 12 * 2 * 2, 5),
        ("layers.0.few", "reduce_scatter", outer, 2 * 12 * 2 * 2, 0),
    ]


def test_a_delta_net_that_cannot_swap_over_all_of_cp_does_not_swap():
    model, axes = model_of(swap=Swap(Span("key", 4), [(5, 1)], 7, DELTA)), Axes(cp=8)
    assert [c.axes for c in _swaps(model, spec_of(model), axes, axes.coords(0), WORK, PASSES)] == [("cp%1",)] * 2
    assert not [c for c in bill(spec_of(model), axes, 0, WORK) if "swap" in c.what]


def frame(start, stop, num_patches):
    return SimpleNamespace(tokens=range(start, stop), num_patches=num_patches)


@pytest.mark.parametrize(("num_back", "sizes"), [(1, [3, 1]), (0, [3])])
def test_rows_of_images_are_charged_for_each_micro_batch_that_has_some(num_back, sizes):
    """Rank 1 of 2 has tokens 4-7. It gets 2 rows of the large frame from rank 0, and keeps 1 of the small one."""
    model, axes = model_of(x=ScatterVision(6, float)), Axes(fsdp=3, cp=2)
    work = Work(tokens=8, num_batches=2, images=((frame(2, 6, 16), frame(6, 7, 4)), None))
    passes = _Passes(Counter({"layers.0": num_back}), Counter(), {})
    charges = rows_of(_inserts(model, axes, 3, work, passes))
    assert charges == [("layers.0.x", "all_to_all", ("cp", "tp"), n * 6 * 2, 1) for n in sizes]
    assert work.num_seeing == 1


@pytest.mark.parametrize(("rows", "num"), [(3, 3), (9, 4)])
def test_a_halo_has_no_more_rows_than_a_part(rows, num):
    charges = _halos(model_of(x=again(Halo(5, rows))), Axes(fsdp=7, cp=2, tp=3), WORK, PASSES)
    num_bytes = 6 * num * 5 * 2
    assert rows_of(charges) == [
        ("layers.0.x", "all_gather", ("cp", "tp"), num_bytes, 5 + 3),
        ("layers.0.x", "reduce_scatter", ("cp", "tp"), num_bytes, 3),
    ]


@pytest.mark.parametrize(("frozen", "num"), [((), 10), (("layers.0.table",), 5), (("layers.0.x",), 10)])
def test_a_lookup_asks_for_rows_of_own_tokens_over_the_ranks_of_a_stage(frozen, num):
    axes, stage = Axes(replicate=7, fsdp=5, cp=2, tp=3), ("fsdp", "cp", "tp")
    assert rows_of(_lookups(model_of(x=Lookup(2, 9)), axes, replace(WORK, frozen=frozenset(frozen)))) == [
        ("layers.0.x, counts", "all_to_all", stage, 30 * 8, 5),
        ("layers.0.x, row numbers", "all_to_all", stage, 4 * 2 * 8, 5),
        ("layers.0.x", "all_to_all", stage, 4 * 2 * 9 * 2, num),
    ]


W = Param({"heads": 6, "head": 5}, {"embed": 7}, (), name="layers.0.w", layer=0)
N = Param({"embed": 7}, {}, (), name="layers.0.n", layer=0)
F = Param({"ratio": 3}, {}, (), name="layers.0.f", layer=0, float32=True)
MESH = Axes(replicate=2, fsdp=2, cp=2, tp=3)  # tp leaves 10 rows of w; 4 shards have 3 rows of it, and 2 of n
UNIT = Unit("layers.0", ("layers.0.w", "layers.0.n", "layers.0.f"), expert=False, again=True)


def charges_of_unit(unit=UNIT, passes=PASSES, axes=MESH, memory=MemoryOptions(), line=ONE, **work):
    recipe = Recipe(memory=memory, pipeline=Pipeline(hold=line.pp > 1))
    spec = spec_of(params=(W, N, F), recipe=recipe, units=(unit,), line=line)
    return [c[1:] for c in rows_of(_unit(unit, spec, axes, axes.coords(0), replace(WORK, **work), passes))]


SHARD = ("fsdp", "cp")
SENT = [("reduce_scatter", SHARD, 23 * 4 * 4, 5), ("all_reduce", ("replicate",), 23 * 4, 1)]
ONLY_N = [("reduce_scatter", SHARD, 2 * 4 * 4, 5), ("all_reduce", ("replicate",), 2 * 4, 1)]


@pytest.mark.parametrize(
    ("given", "result"),
    [
        ({}, [("all_gather", SHARD, 23 * 2 * 4, 5 + 3), *SENT]),
        (dict(unit=replace(UNIT, again=False)), [("all_gather", SHARD, 23 * 2 * 4, 5), *SENT]),
        (dict(frozen=frozenset({"layers.0.w"})), [("all_gather", SHARD, 23 * 2 * 4, 5 + 3), *ONLY_N]),
        (dict(frozen=frozenset(UNIT.params)), [("all_gather", SHARD, 23 * 2 * 4, 5 + 3)]),
        (dict(passes=_Passes(Counter(), Counter(), {})), [("all_gather", SHARD, 23 * 2 * 4, 5)]),
        (dict(memory=MemoryOptions(gather_once=True)), [("all_gather", SHARD, 23 * 2 * 4, 1), *SENT]),
        (
            dict(memory=MemoryOptions(sum_once=True)),
            [("all_gather", SHARD, 23 * 2 * 4, 8), (*SENT[0][:3], 1), SENT[1]],
        ),
        (
            dict(memory=MemoryOptions(narrow_grads=True)),
            [("all_gather", SHARD, 23 * 2 * 4, 8), ("all_to_all", SHARD, 23 * 4 * 2, 5), SENT[1]],
        ),
        (  # what a pipeline holds is summed in float32
            dict(memory=MemoryOptions(narrow_grads=True), line=Line(2, (1, 2)), axes=replace(MESH, pp=2)),
            [("all_gather", SHARD, 23 * 2 * 4, 1), (*SENT[0][:3], 1), SENT[1]],
        ),
        (
            dict(numbers={"layers.0.w": Coding("fp8")}),
            [("all_gather", SHARD, (3 * 7 + 2 * 2) * 4, 8), *SENT],
        ),
        (dict(unit=replace(UNIT, params=("layers.0.f",))), []),
    ],
)  # fmt: skip
def test_a_unit_is_gathered_and_reduced(given, result):
    assert charges_of_unit(**given) == result


def test_a_unit_of_the_tower_is_gathered_where_there_are_images():
    unit = Unit("tower.merger", ("layers.0.n",), expert=False, again=True)
    passes = _Passes(Counter({"tower.merger": 2}), Counter(), {})
    seeing = ((), None, (frame(0, 1, 4),), None, None)
    gathered, *_ = charges_of_unit(unit, passes, images=seeing)
    assert gathered == ("all_gather", SHARD, 2 * 2 * 4, 2 + 2)
    assert charges_of_unit(unit, passes, images=(None,) * 5) == []


def test_experts_are_sharded_over_what_ep_leaves():
    experts = Param({"expert": 6, "ffn_": 2}, {"embed": 7}, (), name="layers.0.e", layer=0)
    unit, axes = Unit("layers.0", ("layers.0.e",), expert=True, again=True), replace(MESH, ep=2)
    spec = spec_of(params=(experts,), units=(unit,))
    gathered, reduced, summed = rows_of(_unit(unit, spec, axes, axes.coords(0), WORK, PASSES))
    assert gathered[2:] == (("efsdp",), 1 * 7 * 2 * 6, 8)  # 6 rows of an ep rank in 6 shards
    assert reduced[2:] == (("efsdp",), 1 * 7 * 4 * 6, 5)
    assert summed[2:] == (("replicate",), 7 * 4, 1)


def test_padding_and_codes_of_a_unit():
    spec, coords = spec_of(params=(W, N, F)), MESH.coords(0)
    assert padded(UNIT, spec, MESH, coords) == 3 * 7 + 2
    assert padded(UNIT, spec, MESH, coords, {"layers.0.w"}) == 2
    assert gathered_bytes(UNIT, spec, MESH, coords, 2, {}) == (3 * 7 + 2) * 2
    assert gathered_bytes(UNIT, spec, MESH, coords, 2, {"layers.0.w": Coding("fp8")}) == 3 * 7 + 2 * 2


def test_scales_of_trained_codes_are_summed_for_each_mesh_of_shards():
    """256 x 384 elements have 2 x 3 blocks; experts of an ep rank 3 x 128 x 128."""
    dense = Param({"a": 256}, {"b": 384}, (), name="layers.0.a", layer=0)
    frozen = Param({"a": 128}, {"b": 128}, (), name="layers.0.b", layer=0)
    experts = Param({"expert": 6, "f": 128}, {"b": 128}, (), name="layers.0.e", layer=0)
    units = (
        Unit("layers.0", ("layers.0.a", "layers.0.b"), expert=False, again=True),
        Unit("layers.0.e", ("layers.0.e",), expert=True, again=True),
    )
    spec, axes = spec_of(params=(dense, frozen, experts), units=units), Axes(fsdp=4, ep=2)
    work = replace(WORK, numbers=dict.fromkeys(spec.table.params, Coding("fp8")), frozen=frozenset({"layers.0.b"}))
    charges = rows_of(_scales(spec.stages(axes, 0), spec, axes, axes.coords(0), work))
    assert [c[1:] for c in charges] == [("all_reduce", SHARD, 6 * 4, 1), ("all_reduce", ("efsdp",), 3 * 4, 1)]
    later = rows_of(_scales([Stage(0, None, ()), *spec.stages(axes, 0)], spec, axes, axes.coords(0), work))
    assert later == charges
    nothing = _scales(spec.stages(axes, 0), spec, axes, axes.coords(0), replace(work, numbers={}))
    assert [c.count for c in nothing] == [0, 0]


def test_transfers_are_of_own_tokens_and_of_stages_with_something_to_train():
    params = [Param({"embed": 3}, {}, (), name=f"layers.{n}.w", layer=n) for n in range(3)]
    line, axes, model = Line(3, (1, 2, 3)), Axes(pp=3, cp=2, tp=3), model_of()
    model.shape = SimpleNamespace(stream_width=10)
    spec = spec_of(model, params, line=line)
    num_bytes = 24 // 6 * 10 * 2
    middle = [c[:2] + c[3:] for c in rows_of(_transfers(spec, axes, axes.coords(6), WORK))]
    assert sorted(middle) == [
        ("what goes back to stage 0", "send", num_bytes, 5),
        ("what goes back to stage 1", "recv", num_bytes, 5),
        ("what goes there to stage 1", "recv", num_bytes, 5),
        ("what goes there to stage 2", "send", num_bytes, 5),
    ]
    frozen = replace(WORK, frozen=frozenset({"layers.0.w"}))
    assert [c.what for c in _transfers(spec, axes, axes.coords(0), frozen)] == ["what goes there to stage 1"]
    assert not list(_transfers(spec_of(model, params), Axes(tp=3), Axes(tp=3).coords(0), WORK))


@pytest.mark.parametrize(
    ("change", "result"),
    [
        ({}, {("tp",): 2 * 4, ("replicate", "fsdp", "cp", "tp"): 3 * 4 + 2 * 4}),
        (dict(frozen=frozenset({"layers.0.f"})), {("tp",): 2 * 4, ("replicate", "fsdp", "cp", "tp"): 2 * 4}),
        (dict(images=()), {("tp",): 2 * 4, ("replicate", "fsdp", "cp", "tp"): 3 * 4}),
    ],
)
def test_gradients_outside_of_fsdp_are_summed_by_axes(change, result):
    """w is cut by tp, n has copies on tp, f and t on all ranks; t is in the tower."""
    t = Param({"eye": 2}, {}, (), name="tower.t", first=True, float32=True)
    spec = spec_of(params=(W, N, F, t), units=(UNIT, Unit("tower", ("tower.t",), expert=False, again=True)))
    work = replace(WORK, images=((), None), **{k: v for k, v in change.items() if k == "frozen"})
    work = replace(work, **{k: v for k, v in change.items() if k == "images"})
    assert {c.axes: c.num_bytes for c in _last_sums(spec, MESH, 0, work)} == result


def test_the_bill_leaves_out_axes_of_one_rank_and_what_is_never_sent():
    model = model_of(enter=Door(ENTER, 6), x=Halo(5, 3), look=Lookup(2, 9), see=ScatterVision(6, float))
    units = (replace(UNIT, params=("layers.0.w", "layers.0.f")), Unit("", ("layers.0.n",), expert=False, again=False))
    spec = spec_of(model, (W, N, F), units=units)
    charges = bill(spec, Axes(fsdp=2), 1, WORK)
    assert {(c.what, c.op) for c in charges} == {
        *((unit, op) for unit in ("layers.0", "root") for op in ("all_gather", "reduce_scatter")),
        ("the last sums of gradients", "all_reduce"),
        *((f"layers.0.look{what}", "all_to_all") for what in ("", ", counts", ", row numbers")),
    }
    assert all(isinstance(c, Charge) and c.count for c in charges)
    assert bill(spec, Axes(), 0, WORK) == []
    frozen = replace(WORK, frozen=frozenset(spec.table.params))
    frozen = replace(frozen, images=((frame(2, 6, 16),), None, (), None, None))
    charges = Counter((c.what, c.op, c.count) for c in bill(spec, Axes(tp=2), 1, frozen))
    assert charges == {
        ("layers.0.enter", "all_gather", 5): 1, ("layers.0.x", "all_gather", 5): 1,
        **{(f"layers.0.look{what}", "all_to_all", 5): 1 for what in (", counts", ", row numbers")},
        ("layers.0.look", "all_to_all", 10): 1, ("layers.0.see", "all_to_all", 1): 2,
    }  # fmt: skip
