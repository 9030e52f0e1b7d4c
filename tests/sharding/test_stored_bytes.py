"""Bytes that a rank stores and gathers, ranks that store most and least, and matrices with FP8 matmuls."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from meshwright.axes import Axes
from meshwright.errors import LayoutError
from meshwright.ops.codings import Coding
from meshwright.recipe import MemoryOptions, Recipe
from meshwright.sharding import (
    Block,
    Box,
    Held,
    Layout,
    Line,
    Param,
    Rules,
    ShardingSpec,
    Stage,
    Table,
    Unit,
    Widths,
    check_fp8,
    extreme_ranks,
    gathered_in_fp8,
    narrow_bytes,
    pieces,
    quantised_once,
    storage,
)
from meshwright.sharding.fp8_blocks import _misfits, num_scales

W = Param({"heads": 6, "head": 5}, {"embed": 8}, (), name="layers.0.w", layer=0)
N = Param({"embed": 7}, {}, (), name="layers.0.n", layer=0)
F = Param({"ratio": 3}, {}, (), name="layers.0.f", layer=0, float32=True)
MESH = Axes(replicate=2, fsdp=2, cp=2, tp=3)  # tp leaves 10 rows of w; 4 shards have 3 rows of it, and 2 of n
UNIT = Unit("layers.0", ("layers.0.w", "layers.0.f"), expert=False, again=True)
ROOT = Unit("", ("layers.0.n",), expert=False, again=False)
HELD = Held(Widths(stored=4, compute=2), {"layers.0.w", "layers.0.f"}, lambda _, shape: 10 * shape[0])


def spec_of(params=(W, N, F), units=(UNIT, ROOT), pp=1, **recipe):
    spec = ShardingSpec(Table({each.name: each for each in params}), Rules(), nn.Module(), Recipe(**recipe))
    spec._lines[pp] = Line(pp, tuple(range(3 - pp, 3)))
    spec._stages[pp] = tuple(Stage(number, None, units) for number in range(pp))
    return spec


def memory(**options):
    return dict(memory=MemoryOptions(**options))


def stored(axes=MESH, rank=0, held=HELD, **spec):
    return {(s.what, s.host): s.num_bytes for s in storage(spec_of(pp=axes.pp, **spec), axes, rank, held)}


PARAMETERS, GRADIENTS, STATE = ("parameters", False), ("gradients", False), ("moments", False)
GATHERED, WHOLE = ("gathered parameters", False), ("whole gradients of the stages", False)
SENT, CODES = ("gradients on their way", False), ("FP8 codes of weights", False)
# n is 7 elements in shards of 2, w 10 rows of 8 in shards of 3; both are padded when they are gathered.
PLAIN = {
    PARAMETERS: (24 + 2 + 3) * 4, GRADIENTS: (24 + 3) * 4, STATE: 10 * (3 + 3), GATHERED: (24 + 2) * 4 * 2,
    SENT: 24 * 4 * (4 + 2),
}  # fmt: skip
ON_HOST = {
    ("parameters", True): (24 + 2) * 4, PARAMETERS: 3 * 4, ("gradients", True): 24 * 4, GRADIENTS: 3 * 4,
    ("moments", True): 30, STATE: 30,
}  # fmt: skip
FOUR = Coding("4 bits", block=4, scale=torch.float8_e4m3fn)  # 8 columns are 4 bytes of codes and 2 scales


@pytest.mark.parametrize(
    ("given", "changed"),
    [
        ({}, {}),
        (dict(rank=11), {PARAMETERS: (8 + 1 + 3) * 4, GRADIENTS: (8 + 3) * 4, STATE: 10 * (1 + 3)}),
        (dict(held=replace(HELD, narrow={"layers.0.n": 2})), {PARAMETERS: (24 + 3) * 4 + 2 * 2}),
        (
            dict(held=replace(HELD, numbers={"layers.0.w": FOUR})),
            {PARAMETERS: 3 * 6 + (2 + 3) * 4, GATHERED: (3 * 6 + 2 * 2) * 4},
        ),
        (dict(held=replace(HELD, low={"layers.0.w"})), {GATHERED: (24 + 2 * 2) * 4}),
        (memory(sum_once=True), {WHOLE: 24 * 4 * 4}),
        (memory(narrow_grads=True), {SENT: 24 * 4 * (4 + 2 + 2 * 2)}),
        (dict(held=replace(HELD, widths=Widths(4, 4))), {GATHERED: 26 * 4 * 4, SENT: 24 * 4 * (4 + 4)}),
    ],
    ids=["plain", "a last rank", "narrow", "4 bits", "fp8", "sum once", "narrow gradients", "float32"],
)
def test_bytes_of_a_rank(given, changed):
    assert stored(**given) == {**PLAIN, **changed}


@pytest.mark.parametrize("replicate", [2, 1])
def test_offloaded_bytes_are_on_the_host_and_gradients_of_a_replica_wait_on_the_device(replicate):
    axes = replace(MESH, replicate=replicate)
    waiting = {("gradients of a replica", False): 24 * 4} if replicate == 2 else {}
    result = {**ON_HOST, GATHERED: PLAIN[GATHERED], SENT: PLAIN[SENT], **waiting}
    assert stored(axes, held=replace(HELD, offload=True)) == result


def test_one_process_gathers_nothing_unless_it_offloads():
    assert {what for what, _ in stored(Axes())} == {"parameters", "gradients", "moments"}
    alone = stored(Axes(), held=replace(HELD, offload=True, low={"layers.0.w"}))
    assert alone[GATHERED] == (240 + 7) * 2, "a copy has values"


def test_the_two_largest_units_are_gathered_at_once_next_to_those_that_stay():
    params = [Param({"a": 8 * n}, {}, (), name=f"p{n}", layer=0) for n in (1, 2, 3, 4)]
    units = [Unit(p.name, (p.name,), expert=False, again=p.name != "p1") for p in params]
    held = replace(HELD, trained={"p2", "p3"})
    result = stored(Axes(fsdp=8), held=held, params=params, units=tuple(units[::-1]))
    assert (result[GATHERED], result[SENT]) == ((8 + 24 + 32) * 2, 24 * 6)


B = Param({"heads": 2, "head": 256}, {"embed": 384}, (), name="layers.0.b", layer=0, low=True)


@pytest.mark.parametrize(
    ("axes", "options", "codes", "scales"),
    [
        (Axes(fsdp=2), {}, 256 * 384, 2 * 3 * 2),
        (Axes(fsdp=2, tp=2), {}, 128 * 384, 2 * 3),
        (Axes(tp=2), {}, 256 * 384 + 2 * 3 * 4, None),
        (Axes(tp=2), dict(offload=True), 0, None),
        (Axes(fsdp=2), dict(compiled=True), 0, 2 * 3 * 2),
        (Axes(tp=2), dict(compiled=True), 256 * 384 + 2 * 3 * 4, None),
    ],
)
def test_codes_of_a_step_and_their_scales(axes, options, codes, scales):
    """512 x 384 elements have 4 x 3 scales; tp cuts the rows of scales."""
    unit = Unit("layers.0", ("layers.0.b",), expert=False, again=True)
    spec = spec_of((B,), (unit,), **memory(**options))
    object.__setattr__(spec, "fp8", frozenset({"layers.0.b", "other"}))  # `replace` would drop the given stages
    held = replace(HELD, trained={"layers.0.b"}, low={"layers.0.b"}, offload=options.get("offload", False))
    result = {s.what: s.num_bytes for s in storage(spec, axes, 0, held)}
    assert result.get("FP8 codes of weights", 0) == codes
    assert quantised_once(spec, axes, unit, {"layers.0.b"}) == (("layers.0.b",) if codes else ())
    assert quantised_once(spec, axes, unit, ()) == ()
    if scales is not None:
        assert num_scales(unit, spec, axes, axes.coords(0), {"layers.0.b"}) == scales
        assert result["gathered parameters"] == 512 // axes.tp * 384 + scales * 4
    assert num_scales(unit, spec, axes, axes.coords(0), ()) == 0


def test_trained_parameters_are_gathered_in_fp8_unless_values_are_asked_for():
    spec = replace(spec_of(), fp8=frozenset({"layers.0.w", "layers.0.n"}))
    assert gathered_in_fp8(spec, {"layers.0.w", "layers.0.f"}) == {"layers.0.w"}
    assert gathered_in_fp8(spec, {"layers.0.w"}, wide=True) == frozenset()


@pytest.mark.parametrize(
    ("options", "axes", "widths", "result"),
    [
        ({}, Axes(fsdp=2), (2, 4), 0),
        (dict(narrow_grads=True), Axes(fsdp=2), (2, 4), 4),
        (dict(narrow_grads=True), Axes(cp=2), (2, 4), 4),
        (dict(narrow_grads=True), Axes(fsdp=2), (4, 4), 4),
        (dict(narrow_grads=True), Axes(replicate=2, tp=2), (2, 4), 0),
    ],
)
def test_narrow_gradients_need_buffers(options, axes, widths, result):
    assert narrow_bytes(spec_of(**memory(**options)), axes, UNIT, *widths) == result


VARIED = (
    Param({"heads": 6}, {"embed": 3}, (), name="a", layer=0), Param({"vocab": 7}, {"embed": 2}, (), name="b", layer=1),
    Param({"expert": 6, "f": 5}, {"embed": 2}, (), name="c", layer=1), Param({"embed": 5}, {}, (), name="d", layer=0),
    Param({"ratio": 3}, {}, (), name="e", layer=1, float32=True),
    Param({"gram": 11}, {"code": 2}, (), name="t", layer=0, by_rows=True),
)  # fmt: skip


@pytest.mark.parametrize(
    "axes",
    [Axes(), Axes(fsdp=3), Axes(tp=2, fsdp=3), Axes(tp=3, ep=2, fsdp=2), Axes(tp=2, ep=3, fsdp=3, cp=2),
     Axes(pp=2, replicate=2, fsdp=3, tp=2, ep=6), Axes(pp=2, fsdp=4, cp=3, ep=6), Axes(tp=6, fsdp=2, ep=3)],
    ids=str,
)  # fmt: skip
def test_extreme_ranks_store_the_most_and_the_least_of_each_parameter_and_of_all(axes):
    spec = spec_of(VARIED, (), pp=axes.pp)
    numel = [{name: p.numel for name, p in pieces(spec, axes, rank).items()} for rank in range(axes.world)]
    few = extreme_ranks(spec, axes)
    assert few == sorted({*few})
    for stage in range(axes.pp):
        ranks = [rank for rank in range(axes.world) if axes.coords(rank)["pp"] == stage]
        chosen = [rank for rank in few if rank in ranks]
        totals = [lambda rank: sum(numel[rank].values()), *(lambda r, n=name: numel[r][n] for name in numel[ranks[0]])]
        for of in totals:
            assert max(map(of, chosen)) == max(map(of, ranks))
            assert min(map(of, chosen)) == min(map(of, ranks))


def test_extreme_ranks_are_few():
    assert extreme_ranks(spec_of(VARIED, (), pp=2), Axes(pp=2, replicate=2, fsdp=4, tp=2)) == [0, 6, 7, 16, 22, 23]


def matrix(name, rows, cols, blocks=None):
    made = Param(rows, cols, (), name=name, layer=0, low=True)
    whole = [Block(Box.whole(made.shape), name, made.matrix, Box.whole(made.matrix))]
    parts = [Block(Box(a, b), name, (1,), Box.whole((1,))) for a, b in blocks or ()]
    return replace(made, layouts=(Layout("one", tuple(parts or whole)),))


@pytest.mark.parametrize(
    ("given", "tp", "result"),
    [
        (matrix("w", {"heads": 6, "head": 64}, {"embed": 128}), 1, ""),
        (matrix("w", {"heads": 6, "head": 64}, {"embed": 128}), 2, "192 rows"),
        (matrix("w", {"heads": 6, "head": 64}, {"embed": 128}), 3, ""),
        (matrix("w", {"embed": 128}, {"heads": 6, "head": 64}), 2, "192 columns"),
        (matrix("w", {"embed": 128}, {"heads": 6, "head": 64}), 3, ""),
        (matrix("w", {"kv": 2, "head": 128}, {"embed": 128}), 4, "only a share of the gradient"),
        (matrix("w", {"kv": 2, "head": 128}, {"embed": 128}), 2, ""),
        (matrix("w", {"half": 2, "ffn": 64}, {"embed": 128}), 1, "64 rows"),
        (matrix("w", {"expert": 2, "half": 2, "expert_ffn": 64}, {"embed": 128}), 1, "64 rows"),
        (matrix("w", {"expert": 2, "embed": 64}, {"expert_ffn": 128}), 1, "64 rows"),
        # q, k and values of a key head are 128, 128 and 64 rows of the file: runs end within the head
        (
            matrix("w", {"key": 2, "chan": 320}, {"embed": 128}, [
                ((0, 0, 0), (2, 128, 128)), ((0, 128, 0), (2, 256, 128)), ((0, 256, 0), (2, 320, 128)),
            ]), 1, "64 rows",
        ),
        (
            matrix("w", {"key": 2, "chan": 256}, {"embed": 128}, [
                ((0, 0, 0), (2, 128, 128)), ((0, 128, 0), (2, 256, 128)),
            ]), 2, "",
        ),
    ],
)  # fmt: skip
def test_parts_of_a_rank_that_are_no_whole_blocks(given, tp, result):
    spec = replace(spec_of((given, replace(given, name="v"), N), ()), fp8=frozenset({"w", "v"}))
    assert _misfits(spec, tp) == ({"w": result, "v": result} if result else {})


@pytest.mark.parametrize(
    ("params", "tp", "message"),
    [
        ([matrix("l.0.w", {"a": 100}, {"b": 128})], 1, "no matrix of this model has; leave it out"),
        (
            [matrix(name, {"a": size}, {"b": 128}) for name, size in (("l.0.w", 100), ("l.1.w", 100), ("v", 128))], 1,
            r"100 rows of l\.0\.w; leave it out with fp8_skip=\['l\.\*\.w'\]",
        ),
        (
            [matrix("l.0.w", {"heads": 6, "head": 64}, {"b": 128})], 2,
            r"192 rows of l\.0\.w, with tp=2; choose tp from 1, 3, or leave it out",
        ),
    ],
)  # fmt: skip
def test_a_mesh_that_leaves_no_whole_blocks_is_refused_with_what_can_be(params, tp, message):
    spec = replace(spec_of(tuple(params), ()), fp8=frozenset(each.name for each in params))
    with pytest.raises(LayoutError, match=message):
        check_fp8(spec, Axes(tp=tp))


def test_blocks_that_stay_whole_are_accepted():
    spec = replace(spec_of((B,), ()), fp8=frozenset({"layers.0.b"}))
    check_fp8(replace(spec, table=Table({"layers.0.b": matrix("layers.0.b", B.rows, B.cols)})), Axes(tp=2))


def test_equal_dims_with_other_blocks_in_the_files_are_another_kind():
    rows, cols = {"key": 2, "chan": 320}, {"embed": 128}
    cuts = [((0, 0, 0), (2, 256, 128)), ((0, 256, 0), (2, 320, 128))]
    given = (matrix("v", rows, cols), matrix("w", rows, cols, cuts))
    assert _misfits(replace(spec_of(given, ()), fp8=frozenset("vw")), 1) == {"w": "64 rows"}


def test_columns_that_tp_cuts_are_another_kind():
    given = (matrix("v", {"a": 128}, {"b": 384}), matrix("w", {"a": 128}, {"ffn": 384}))
    assert _misfits(replace(spec_of(given, ()), fp8=frozenset("vw")), 2) == {"w": "192 columns"}
