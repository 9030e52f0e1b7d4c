"""Small questions about the pieces of a rank: sizes, columns, heads under cp, and the doors that have them."""

import pytest
import torch

from meshwright.axes import Axes
from meshwright.errors import LayoutError
from meshwright.recipe import ContextParallel, Recipe
from meshwright.sharding import (
    ATTENTION,
    DELTA,
    SPARSE,
    Block,
    Box,
    HeadSplit,
    Join,
    Lookup,
    Param,
    Rules,
    ShardingSpec,
    Span,
    Swap,
    Table,
    check_context,
    column_axes,
    consecutive_columns,
    find_doors,
    head_splits,
    is_run,
    local_sizes,
    piece,
    place,
    rows_to_write,
    shape_before_fsdp,
    storage_order,
    tp_sizes,
    ways,
)
from meshwright.sharding.context_split import num_swapping
from tests.sharding.test_bill import model_of

RULES = Rules()
W = Param({"embed": 5}, {"part": 2, "heads": 6, "head": 3}, (), name="w")
AXES = Axes(fsdp=2, tp=3)


def test_sizes_and_columns_of_a_rank():
    assert local_sizes(W, RULES, AXES) == {"embed": 5, "part": 2, "heads": 2, "head": 3}
    assert consecutive_columns(W, RULES, AXES) == 2 * 3
    assert consecutive_columns(W, RULES, Axes()) == 2 * 6 * 3
    assert column_axes(W, place(W, RULES, AXES)) == ("tp",)
    assert column_axes(Param(W.cols, W.rows, (), name="w"), place(W, RULES, AXES)) == ()
    assert [piece(W, RULES, AXES, AXES.coords(rank)).first_col for rank in range(3)] == [0, 6, 12]
    part = Param({"embed": 5}, {"heads": 6, "head": 3}, (), name="w")
    assert [piece(part, RULES, AXES, AXES.coords(rank)).shape for rank in (1, 4)] == [(3, 6), (2, 6)]
    assert [piece(part, RULES, AXES, AXES.coords(rank)).first_col for rank in range(3)] == [0, 6, 12]
    assert shape_before_fsdp(part, RULES, AXES, AXES.coords(4)) == (5, 6)
    table = Param({"gram": 7}, {"code": 2}, (), name="t", by_rows=True)
    assert shape_before_fsdp(table, RULES, AXES, AXES.coords(0)) == (2, 2)


def test_row_numbers_are_those_of_the_whole_matrix():
    """tp gives heads 2 and 3 to rank 1; its shard of 12 rows are the second half of each key's."""
    given, axes = Param({"out": 2, "heads": 6, "head": 3}, {"embed": 4}, (), name="w"), Axes(fsdp=2, tp=3)
    rows = [*range(6, 12), *range(24, 30)]
    held = [piece(given, RULES, axes, axes.coords(rank)).row_numbers(torch.device("cpu")).tolist() for rank in (1, 4)]
    assert held == [rows[:6], rows[6:]]


def test_ranks_that_hold_equal_rows_divide_them_to_write():
    """3 ranks of tp hold other columns of 3 rows of a shard, and 2 replicas the same: each writes half a row more."""
    axes = Axes(replicate=2, fsdp=2, tp=3)
    written = [rows_to_write(W, RULES, axes, rank) for rank in range(axes.world)]
    assert [(each.lo, each.hi) for each in written] == [
        (0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 5), (3, 3), (3, 3), (3, 3), (5, 5), (5, 5), (5, 5),
    ]  # fmt: skip
    assert {each.box for each in written} == {Box.whole((5, 2, 6, 3))}


def test_tp_divides_all_dims_that_must_divide():
    given = {"heads": 12, "ffn": 18, "kv": 5, "vocab": 7, "embed": 11, "expert": 13}
    params = [Param({dim: size}, {}, (), name=dim) for dim, size in given.items()]
    assert tp_sizes(ShardingSpec(Table({each.name: each for each in params}), RULES)) == [1, 2, 3, 6]


@pytest.mark.parametrize(("size", "tp", "choices"), [(3, 5, "1, 2, 3"), (6, 4, "1, 2, 3, 6"), (5, 4, "1, 2, 3, 5")])
def test_a_span_that_leaves_a_rank_without_any_is_refused_on_all(size, tp, choices):
    for rank in range(tp):
        with pytest.raises(LayoutError, match=rf"tp={tp} leaves a rank without any of .*choose tp from {choices}$"):
            RULES.span("vocab", size, Axes(tp=tp), {"tp": rank}, "w")
    assert [RULES.span("vocab", 7, Axes(tp=3), {"tp": rank}, "w") for rank in range(3)] == [(0, 3), (3, 6), (6, 7)]


def test_the_order_of_the_source_of_a_turned_block():
    source = torch.arange(24).view(2, 3, 4)
    block = Block(Box((0, 0, 0), (2, 4, 3)), "k", (2, 3, 4), Box.whole((2, 3, 4)), turned=True)
    view = block.view(source)
    assert torch.equal(view, source.mT)
    assert storage_order(view) == (0, 2, 1)
    assert storage_order(source) == (0, 1, 2)
    assert storage_order(source.permute(2, 0, 1)) == (1, 2, 0)


@pytest.mark.parametrize(
    ("context", "mixer", "heads", "cp", "num"),
    [
        ({}, ATTENTION, 6, 4, 2), ({}, ATTENTION, 4, 8, 4), ({}, ATTENTION, 8, 4, 4), ({}, ATTENTION, 5, 4, 1),
        ({}, DELTA, 8, 4, 4), ({}, DELTA, 6, 4, 1), ({}, SPARSE, 8, 4, 1),
        (dict(attention=1), ATTENTION, 8, 4, 1), (dict(delta=2), DELTA, 6, 4, 2), (dict(delta=2), ATTENTION, 8, 4, 4),
        (dict(attention=2, delta=2), SPARSE, 8, 4, 1),
    ],
)  # fmt: skip
def test_how_many_neighbours_swap(context, mixer, heads, cp, num):
    assert num_swapping(ContextParallel(**context), mixer, heads, cp) == num


def spec_of(context=ContextParallel(), **doors):
    return ShardingSpec(Table({}), RULES, model_of(**doors), Recipe(context=context))


def mixers():
    return dict(a=Swap(Span("heads", 12), [(1, 1)], 1), d=Swap(Span("key", 6), [(1, 1)], 1, DELTA))


def test_heads_of_a_tp_rank_are_dealt_out_over_cp():
    spec, axes = spec_of(**mixers()), Axes(cp=4, tp=3)
    of_tp = [[(d.start, d.stop, d.parts) for d in head_splits(spec, axes, axes.coords(r)).values()] for r in range(3)]
    assert of_tp == [[(0, 4, 4), (0, 2, 1)], [(4, 8, 4), (2, 4, 1)], [(8, 12, 4), (4, 6, 1)]]
    assert ways(spec, axes) == "attention: swap 4, delta: state 4"
    assert ways(spec, Axes(cp=8, tp=2)) == "attention: swap 2 x gather 4, delta: state 8"
    assert ways(spec, Axes()) == ""


@pytest.mark.parametrize(
    ("context", "message"),
    [
        (dict(attention=3), r"attention=3 .*cp=4 and the 4 heads of layers\.0\.a that tp=3 leaves.*from 1, 2, 4$"),
        (dict(delta=4), r"delta=4 .*cp=4 and the 2 heads of layers\.0\.d.*from 1, 2$"),
    ],
)
def test_a_number_of_neighbours_must_divide_cp_and_heads(context, message):
    spec, axes = spec_of(ContextParallel(**context), **mixers()), Axes(cp=4, tp=3)
    with pytest.raises(LayoutError, match=message):
        check_context(spec, axes)
    check_context(spec_of(ContextParallel(attention=4, delta=2), **mixers()), axes)


def test_a_number_of_neighbours_must_divide_the_heads_of_every_layer():
    few = dict(few=Swap(Span("heads", 6), [(1, 1)], 1))
    with pytest.raises(LayoutError, match=r"the 4 heads of layers\.0\.a and the 2 heads of layers\.0\.few .* 1, 2$"):
        check_context(spec_of(ContextParallel(attention=4), **mixers(), **few), Axes(cp=4, tp=3))


def test_options_of_a_mixer_that_the_model_lacks_are_refused():
    with pytest.raises(LayoutError, match=r"delta=2 .*has no such mixer"):
        check_context(spec_of(ContextParallel(delta=2), a=mixers()["a"]), Axes(cp=2))


def test_a_swap_on_one_rank_of_several():
    deal = HeadSplit(6, 12, 3)
    assert [list(deal.heads(part)) for part in range(3)] == [[6, 7], [8, 9], [10, 11]]
    swap = Swap(Span("heads", 24, 6, 12), [(5, 1), (3, 4)], 7)
    assert list(swap.own_heads) == [*range(6, 12)]
    swap.parts, swap.part, swap.groups, swap.group = 3, 2, 4, 1
    assert list(swap.own_heads) == [10, 11]
    assert swap.widths(deal) == (2 * 5 + 1 * 3, 2 * 7)
    join = Join(swap, 3, serves=4, rows=8)
    assert (join.parts, join.part) == (4, 1)
    assert [join.elements(HeadSplit(6, 12, 2), num) for num in (5, 9)] == [5 * 2 * 3, 8 * 2 * 3]
    assert (len(Span("heads", 24, 6, 12)), len(Span("heads", 24))) == (6, 24)
    assert len(Span("heads", 24, 3, 3)) == 0


@pytest.mark.parametrize(
    ("numbers", "result"),
    [([], True), ([4], True), ([4, 5, 6], True), ([4, 5, 7], False), ([5, 4], False), ([4, 4], False)],
)
def test_runs(numbers, result):
    assert is_run(numbers) == result


def test_doors_are_found_by_class_and_named_by_their_modules():
    given = mixers()
    model = model_of(**given, look=Lookup(2, 3, "grams"))
    model.top = given["a"]
    assert [name for name, _ in find_doors(model, Swap)] == ["top", "layers.0.a", "layers.0.d"]
    ((name, door),) = find_doors(model, Lookup)
    assert door.parameter(name) == "layers.0.grams"


@pytest.mark.parametrize(
    ("cut", "dims", "message"),
    [
        ({"heads": "tp", "ffn": "tp"}, {"heads": 2, "ffn": 4}, "heads by tp and ffn by tp"),
        ({"embed": "fsdp"}, {"embed": 4}, "embed by fsdp"), ({"embed": "cp"}, {"embed": 4}, "embed by cp"),
        ({"embed": "replicate"}, {"embed": 4}, "embed by replicate"),
        ({"expert": "ep", "heads": "tp"}, {"expert": 4, "heads": 2}, "expert by ep and heads by tp"),
    ],
)  # fmt: skip
def test_an_axis_cuts_one_dim_and_does_nothing_else_to_a_parameter(cut, dims, message):
    axes = Axes(replicate=2, fsdp=2, cp=2, tp=2, ep=2)
    with pytest.raises(LayoutError, match=rf"^w: the rules cut {message}; an axis cuts one dim"):
        place(Param(dims, {}, (), name="w"), Rules(axis=cut), axes)
    assert place(Param(dims, {}, (), name="w"), Rules(axis=cut), Axes()).split == {}
