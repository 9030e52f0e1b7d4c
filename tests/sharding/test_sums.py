"""FSDP and `finish` together sum each gradient once over every rank that uses an element."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.axes import Axes
from meshwright.sharding import Param, Rules, axes_left_to_sum, holders
from tests.parts import every
from tests.sharding.reference import coordinates, cut_ids, examples, is_expert, meshes, params
from tests.sharding.tables import TINY, table_of


def summed_by_fsdp(param):
    """`parallel.fsdp`: experts over the expert mesh, the rest over the dense mesh, float32 parameters left out."""
    if param.float32:
        return ()
    return ("replicate", "efsdp") if is_expert(param) else ("replicate", "fsdp", "cp")


def shares_of(axes, at, over):
    """Return for every rank whose shares it has after a sum over some axes."""
    view = ("pp", "replicate", "efsdp", "ep") if "efsdp" in over else ("pp", "replicate", "fsdp", "cp", "tp")
    fixed = [a for a in view if a not in over]
    return [[r for r, other in enumerate(at) if all(other[a] == local[a] for a in fixed)] for local in at]


def users_of(param, axes, at):
    """Return for every rank the ranks of its stage whose tokens meet the same elements: those of its cut by tp or
    ep."""
    cuts = [tuple(cut_ids(param, axes, c).flatten().tolist()) for c in at]
    return [
        [r for r, other in enumerate(at) if other["pp"] == local["pp"] and cuts[r] == cuts[rank]]
        if cuts[rank]
        else None
        for rank, local in enumerate(at)
    ]


def check_sums(param, axes):
    at = coordinates(axes)
    first = shares_of(axes, at, summed_by_fsdp(param))
    second = shares_of(axes, at, axes_left_to_sum(param, Rules(), axes))
    for rank, users in enumerate(users_of(param, axes, at)):
        reached = sorted(share for other in second[rank] for share in first[other])
        assert users is None or reached == users, f"{param.name} on {axes}: rank {rank} sums {reached} and not {users}"


@pytest.mark.parametrize("name", every(2, TINY))
@examples(6)
@given(meshes(48, tp=[1, 2, 4], ep=[1, 2, 4, 8]))
def test_tiny_models(name, axes):
    kinds = {(tuple(p.dims), p.float32): p for p in table_of(name)}  # one of each kind
    for param in kinds.values():
        check_sums(param, axes)


@st.composite
def placed(draw):
    axes = draw(meshes(48))
    return axes, draw(params(axes))


@examples(100)
@given(placed())
def test_any_parameter(case):
    check_sums(case[1], case[0])


@pytest.mark.parametrize("ep", [1, 2, 8])
def test_every_kind_on_the_mesh_of_all_axes(ep):
    axes = Axes(pp=2, replicate=2, fsdp=2, cp=2, tp=2, ep=ep)
    for dims in ({"heads": 4}, {"embed": 3}, {"kv": 2}, {"kv": 1}, {"vocab": 5}, {"vocab": 1}):
        for float32 in (False, True):
            check_sums(Param(dims, {"chan": 2}, (), float32=float32, name=f"{dims}"), axes)
    check_sums(Param({"expert": 8}, {"embed": 2}, (), name="experts"), axes)


def test_float32_experts_are_summed_over_all_that_use_them():
    check_sums(Param({"expert": 4}, {"embed": 2}, (), float32=True, name="experts"), Axes(replicate=2, fsdp=4, ep=2))


def test_a_tied_parameter_is_summed_over_both_end_stages():
    """Its gradients arise on the first stage and on the last. A stage between them has no part of it."""
    axes = Axes(pp=3, fsdp=2, tp=2)
    tied = Param({"vocab": 6}, {"embed": 2}, (), name="embed.weight", first=True, both_ends=True)
    assert axes_left_to_sum(tied, Rules(), axes) == ("ends",)
    assert [axes.group(rank, ("ends",)) for rank in range(4)] == [(0, 8), (1, 9), (2, 10), (3, 11)]
    assert axes.groups(("ends",)) == [(0, 8), (1, 9), (2, 10), (3, 11), (4,), (5,), (6,), (7,)]
    assert holders(tied, Rules(), axes, 9) == (1, 9)
    assert axes.group(2, ("ends", "tp")) == (2, 3, 10, 11)
    assert Axes().group(0, ("ends",)) == (0,)
