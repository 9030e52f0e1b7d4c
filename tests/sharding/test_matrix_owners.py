"""The plan of whole-matrix updates: the matrices of a parameter, their owners, buckets, and what ranks exchange."""

import pytest

from meshwright.axes import Axes
from meshwright.errors import LayoutError
from meshwright.sharding import Box, MatrixPlan, Param, Rules, exchanged, matrix_owners
from meshwright.sharding.matrix_owners import TO_HOLDERS, TO_OWNERS, Matrix, _owners, boxes_of_matrices


def param(name, rows, cols, matrices={}, **more):  # noqa: B006 - never changed
    return Param(rows, cols, (), name=name, layer=0, matrices=matrices, **more)


@pytest.mark.parametrize(
    ("rows", "cols", "matrices", "by_head", "shapes"),
    [
        ({"a": 5}, {"b": 3}, {}, True, [(5, 3)]),
        ({"half": 2, "ffn": 3}, {"b": 4}, {"half": (1, 1)}, False, [(1, 3, 4)] * 2),
        ({"key": 2, "chan": 6}, {"b": 4}, {"chan": (1, 2, 3)}, False, [(2, 1, 4), (2, 2, 4), (2, 3, 4)]),
        ({"key": 2, "chan": 3}, {"b": 4}, {"chan": (1, 2)}, True, [(1, 1, 4), (1, 2, 4)] * 2),
        ({"key": 2, "value": 3}, {"b": 4}, {}, True, [(2, 3, 4)]),
        ({"heads": 3, "head": 2}, {"b": 4}, {}, True, [(1, 2, 4)] * 3),
        ({"heads": 3, "head": 2}, {"b": 4}, {}, False, [(3, 2, 4)]),
        ({"kv": 2, "head": 2}, {"b": 4}, {}, True, [(1, 2, 4)] * 2),
        ({"b": 4}, {"heads": 3, "head": 2}, {}, True, [(4, 3, 2)]),
        ({"b": 4}, {"input": 2, "e": 3}, {"input": (1, 1)}, False, [(4, 1, 3)] * 2),
        ({"b": 4}, {"c": 3}, None, True, []),
    ],
)
def test_matrices_of_a_parameter(rows, cols, matrices, by_head, shapes):
    given = param("w", rows, cols, matrices)
    boxes = list(boxes_of_matrices(given, by_head))
    assert [box.shape for box in boxes] == shapes
    assert sum(box.size for box in boxes) == (0 if matrices is None else given.numel)


def test_matrices_that_do_not_add_up_are_refused():
    with pytest.raises(LayoutError, match=r"w is declared as matrices of half=\(1, 2\), but half is 2"):
        list(boxes_of_matrices(param("w", {"half": 2}, {"b": 4}, {"half": (1, 2)})))


def matrix(rows, cols, *parts):
    boxes, at = [], 0
    for num, ranks in parts:
        boxes.append((Box((at, 0), (at + num, cols)), ranks))
        at += num
    return Matrix("w", Box((0, 0), (rows, cols)), rows, cols, tuple(boxes))


def test_the_cost_of_a_matrix_grows_with_its_short_side():
    assert matrix(3, 5).cost == matrix(5, 3).cost == 3 * 3 * (2 * 5 + 3)
    assert matrix(3, 5).numel == 15


def test_owners_have_little_work_then_most_of_a_matrix_then_the_lowest_rank():
    assert _owners([matrix(4, 2, (1, (3,)), (3, (5, 6)))]) == [5], "most of it, and below 6"
    assert _owners([matrix(4, 2, (2, (5,)), (2, (3,)))]) == [3]
    # The costly matrix comes first, though it is listed last; then its owner has work.
    assert _owners([matrix(4, 2, (3, (0,)), (1, (1,))), matrix(9, 9, (5, (0,)), (4, (1,)))]) == [1, 0]
    assert _owners([matrix(4, 2, (4, (0,))), matrix(9, 9, (5, (0,)), (4, (1,)))]) == [0, 0]


AXES = Axes(pp=2, replicate=2, fsdp=3)  # the last replica of stage 1 is ranks 9, 10 and 11
PARAMS = (param("a", {"r": 7}, {"c": 5}), param("b", {"r": 3}, {"c": 2}), param("v", {"r": 7}, {"c": 4}, None))


def test_parts_go_to_owners_and_updates_to_all_that_store_them():
    """Rows of a: 3, 3, 1; of b: 1, 1, 1. Rank 9 owns a, and rank 10 b, as rank 9 has work."""
    plans = [MatrixPlan(PARAMS, Rules(), AXES, rank) for rank in (9, 10, 11)]
    assert [plan.owner for plan in plans] == [[9, 10]] * 3
    assert [(plan.own, plan.resident) for plan in plans] == [([0], []), ([1], []), ([], [])]
    assert [dict(exchanged(plan)) for plan in plans] == [
        {TO_OWNERS: [(3 + 1) * 5], TO_HOLDERS: [1 * 2]},
        {TO_OWNERS: [2 * 2], TO_HOLDERS: [3 * 5]},
        {TO_OWNERS: [0], TO_HOLDERS: [1 * 5 + 1 * 2]},
    ]
    (bucket,) = plans[0].buckets
    assert bucket.own == (0,)
    assert [(part.rank, part.at, part.box.shape) for part in bucket.to_owners.sends] == [(10, 1, (1, 2))]
    assert [(part.rank, part.at, part.box.shape) for part in bucket.to_owners.receives] == [
        (10, 0, (3, 5)), (11, 0, (1, 5)),
    ]  # fmt: skip
    assert [(part.rank, part.at) for part in bucket.to_holders.sends] == [(10, 0), (11, 0)]
    assert plans[0].critical_cost == 5 * 5 * (2 * 7 + 5)


def test_copies_are_sent_once_and_all_of_them_are_updated():
    """tp=2 leaves two copies of both halves of rows; owner 0 has the first half."""
    plan = MatrixPlan([param("a", {"r": 4}, {"c": 5})], Rules(), Axes(fsdp=2, tp=2), 0)
    assert plan.matrices[0].parts == ((Box((0, 0), (2, 5)), (0, 1)), (Box((2, 0), (4, 5)), (2, 3)))
    (bucket,) = plan.buckets
    assert [part.rank for part in bucket.to_owners.receives] == [2]
    assert [part.rank for part in bucket.to_holders.sends] == [1, 2, 3]
    other = MatrixPlan([param("a", {"r": 4}, {"c": 5})], Rules(), Axes(fsdp=2, tp=2), 3)
    assert (other.buckets[0].to_owners.sends, len(other.buckets[0].to_holders.receives)) == ((), 1)
    both = [param(name, {"r": 4}, {"c": c}) for name, c in (("a", 5), ("b", 3))]
    second = MatrixPlan(both, Rules(), Axes(fsdp=2, tp=2), 1)
    assert (second.owner, [part.rank for part in second.buckets[0].to_owners.receives]) == ([0, 1], [2])


def test_whole_matrices_stay_where_they_are():
    experts = param("e", {"expert": 4, "f": 3}, {"c": 5}, {"expert": (1,) * 4})
    plans = [MatrixPlan([experts, PARAMS[0]], Rules(), Axes(fsdp=2, ep=2), rank) for rank in (0, 1)]
    assert [plan.resident for plan in plans] == [[0, 1], [2, 3]]
    assert [plan.owner for plan in plans] == [[0, 0, 1, 1, 0]] * 2
    cost = 3 * 3 * (2 * 5 + 3)
    assert plans[0].critical_cost == 2 * cost + 5 * 5 * (2 * 7 + 5)
    lone = MatrixPlan([experts], Rules(), Axes(fsdp=2, replicate=3), 5)
    assert lone.group == (4, 5)
    assert not any(lone._travels(at) for at in lone.resident)


def test_a_copy_of_a_whole_matrix_gets_its_update():
    plans = [MatrixPlan([param("a", {"r": 4}, {"c": 5})], Rules(), Axes(tp=3), rank) for rank in range(3)]
    assert [plan.resident for plan in plans] == [[], [], []]
    (owner, other, _) = ([plan.buckets[0].to_owners, plan.buckets[0].to_holders] for plan in plans)
    assert [[len(each.sends), len(each.receives)] for each in (*owner, *other)] == [[0, 0], [2, 0], [0, 0], [0, 1]]


def test_layers_of_one_kind_share_boxes_unless_their_matrices_differ():
    plan = MatrixPlan(
        [param("a", {"r": 4}, {"c": 5}, {"r": (1, 3)}), param("b", {"r": 4}, {"c": 5}, {"r": (2, 2)}),
         param("c", {"r": 4}, {"c": 5}, {"r": (1, 3)}), param("d", {"r": 4}, {"c": 5}, {"r": (1, 3)}, float32=True)],
        Rules(), Axes(fsdp=2), 0,
    )  # fmt: skip
    assert [(each.name, each.rows, each.cols) for each in plan.matrices] == [
        ("a", 1, 5), ("a", 3, 5), ("b", 2, 5), ("b", 2, 5), ("c", 1, 5), ("c", 3, 5), ("d", 1, 5), ("d", 3, 5),
    ]  # fmt: skip
    assert [len(each.parts) for each in plan.matrices[4:]] == [1, 2, 1, 1]
    assert plan.matrices[-1].parts[0][1] == (0, 1), "both ranks store what FSDP does not cut"


def test_buckets_are_waves_of_one_matrix_of_each_owner(monkeypatch):
    """Owners get 2 matrices each. A bucket has room for 2 x 10 elements, so each wave of 2 x 8 has its own."""
    params = [param(name, {"r": 2 * n}, {"c": 4 // n}) for name, n in (("a", 1), ("b", 2), ("c", 1), ("d", 2))]
    for most, sizes in ((10, [2, 2]), (16, [4]), (3, [2, 2])):
        monkeypatch.setattr(matrix_owners, "_BUCKET", most)
        plan = MatrixPlan(params, Rules(), Axes(fsdp=2), 1)
        assert [len(some) for some in plan._in_buckets] == sizes
        for some in plan._in_buckets:
            assert sorted(plan.owner[at] for at in some) == sorted([0, 1] * (len(some) // 2))
        costs = [plan.matrices[at].cost for some in plan._in_buckets for at in some]
        assert costs == sorted(costs, reverse=True)
    assert plan.critical_cost == sum(plan._most_work(some) for some in plan._in_buckets)


def test_costly_matrices_are_exchanged_first_and_buckets_are_filled_anew(monkeypatch):
    monkeypatch.setattr(matrix_owners, "_BUCKET", 36)
    small, large = ([param(f"{name}{n}", {"r": r}, {"c": r}) for n in range(2)] for name, r in (("s", 2), ("l", 6)))
    assert [sorted(some) for some in MatrixPlan([*small, *large], Rules(), Axes(fsdp=2), 0)._in_buckets] == [
        [2, 3], [0, 1],
    ]  # fmt: skip
    eight = [param(f"p{n}", {"r": 4}, {"c": 4}) for n in range(8)]
    assert [len(some) for some in MatrixPlan(eight, Rules(), Axes(fsdp=2), 0)._in_buckets] == [4, 4]


def test_a_parameter_that_is_no_matrix_does_not_share_boxes_with_one_that_is():
    params = [param("a", {"r": 7}, {"c": 5}), param("b", {"r": 7}, {"c": 5}, None)]
    for order in (params, params[::-1]):
        assert {each.name for each in MatrixPlan(order, Rules(), Axes(fsdp=2), 0).matrices} == {"a"}
