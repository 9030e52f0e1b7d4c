"""Axes against arrays of rank numbers."""

import re
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.axes import Axes
from meshwright.errors import MeshError
from tests.sharding.reference import DENSE_NAMES, EXPERT_NAMES, all_sizes, coordinates, examples, meshes

SUBSETS = [(v, s) for v in (DENSE_NAMES, EXPERT_NAMES) for n in range(len(v) + 1) for s in combinations(v, n)]


def ranks_as_array(axes, view):
    inner = axes.fsdp * axes.cp * axes.tp
    sizes = {"pp": axes.pp, "replicate": axes.replicate, "fsdp": axes.fsdp, "cp": axes.cp, "tp": axes.tp}
    sizes |= {"ep": axes.ep, "efsdp": inner // axes.ep}
    return np.arange(axes.world).reshape([sizes[a] for a in view])


def expected_groups(axes, view, chosen):
    """Rows of the array whose last dims are the chosen axes."""
    ranks = ranks_as_array(axes, view)
    last = [view.index(a) for a in chosen]
    first = [d for d in range(len(view)) if d not in last]
    size = int(np.prod([ranks.shape[d] for d in last]))
    return sorted(tuple(sorted(row)) for row in ranks.transpose(first + last).reshape(-1, size).tolist())


def test_coordinates_of_every_mesh_up_to_64_ranks():
    """Check every rank of small meshes, and every seventh and the last of large ones."""
    for sizes in all_sizes():
        axes, world = Axes(*sizes), int(np.prod(sizes[:5]))
        assert axes.world == world
        ranks = np.array(sorted({*range(0, world, 1 if world <= 16 else 7), world - 1}))
        inner = sizes[2] * sizes[3] * sizes[4]
        dense = np.unravel_index(ranks, sizes[:5])
        expert = np.unravel_index(ranks, (sizes[0], sizes[1], inner // sizes[5], sizes[5]))
        want = dict(zip((*DENSE_NAMES, *EXPERT_NAMES), (*dense, *expert), strict=True))
        want["ends"] = (dense[0] > 0) & (dense[0] == sizes[0] - 1)  # 1 on the last of several stages
        result = [axes.coords(rank) for rank in ranks.tolist()]
        assert all(f.keys() == want.keys() for f in result)
        assert all([f[name] for f in result] == want[name].tolist() for name in want), axes


@examples(40)
@given(meshes())
def test_coordinates_of_every_rank(axes):
    assert [axes.coords(rank) for rank in range(axes.world)] == coordinates(axes)


def test_one_group_of_many_meshes_up_to_64_ranks():
    for number, sizes in enumerate(all_sizes()):
        if number % 9 and np.prod(sizes[:5]) > 12:
            continue
        axes, (view, chosen) = Axes(*sizes), SUBSETS[number * 7 % len(SUBSETS)]
        rank = number * 13 % axes.world
        ranks = ranks_as_array(axes, view)
        at = np.unravel_index(rank, ranks.shape)
        local = ranks[tuple(slice(None) if a in chosen else i for a, i in zip(view, at, strict=True))]
        assert axes.group(rank, chosen) == tuple(local.flatten().tolist()), (axes, rank, chosen)


@examples(40)
@given(meshes(24), st.sampled_from(SUBSETS), st.randoms())
def test_groups_partition_the_world(axes, subset, random):
    view, chosen = subset
    shuffled = tuple(random.sample(chosen, len(chosen)))
    result = axes.groups(shuffled)
    assert result == expected_groups(axes, view, chosen)
    assert sorted(r for group in result for r in group) == list(range(axes.world))
    assert all(axes.group(r, shuffled) == group for group in result for r in group)


@examples(10)
@given(meshes(64), st.sampled_from(SUBSETS))
def test_groups_of_large_meshes(axes, subset):
    assert axes.groups(subset[1]) == expected_groups(axes, *subset)


@examples(40)
@given(meshes(48), st.data())
def test_cp_in_halves(axes, data):
    """Groups of neighbours, and ranks at the same place of such groups."""
    ranks = ranks_as_array(axes, DENSE_NAMES)
    check_halves(axes, data, "cp", axes.cp, ranks.reshape(-1, axes.cp, axes.tp))


@examples(40)
@given(meshes(48), st.data())
def test_ep_in_halves(axes, data):
    check_halves(axes, data, "ep", axes.ep, ranks_as_array(axes, EXPERT_NAMES).reshape(-1, axes.ep, 1))


def check_halves(axes, data, axis, size, ranks):
    inner = data.draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
    outer = size // inner
    ranks = ranks.reshape(len(ranks), outer, inner, -1)
    names = axes.halves(inner, axis)
    assert axes.sizes(names) == (outer, inner)
    for name, dim in zip(names, (1, 2), strict=True):
        if axes.size_of(name) > 1:
            rows = np.moveaxis(ranks, dim, -1).reshape(-1, axes.size_of(name)).tolist()
            assert axes.groups((name,)) == sorted(map(tuple, rows))
            assert all(axes.group(rank, (name,)) == tuple(row) for row in rows for rank in row)


@examples(100)
@given(meshes())
def test_data_ranks_differ_only_in_replicate_and_fsdp(axes):
    at = coordinates(axes)
    streams: dict[tuple[int, int], set[int]] = {}
    for rank, c in enumerate(at):
        streams.setdefault((c["replicate"], c["fsdp"]), set()).add(axes.data_rank(rank))
    assert [streams[key] for key in sorted(streams)] == [{n} for n in range(axes.num_data_ranks)]


@examples(100)
@given(meshes())
def test_sizes(axes):
    assert axes.size_of("efsdp") * axes.ep == axes.fsdp * axes.cp * axes.tp
    at = coordinates(axes)
    for name in {*DENSE_NAMES, *EXPERT_NAMES}:
        assert axes.size_of(name) == len({c[name] for c in at})
    assert axes.sizes(("tp", "pp", "efsdp")) == (axes.tp, axes.pp, axes.size_of("efsdp"))


def test_order_is_outer_to_inner():
    axes = Axes(pp=2, replicate=2, fsdp=2, cp=2, tp=2, ep=4)
    assert [axes.group(0, (a,))[1] for a in DENSE_NAMES] == [16, 8, 4, 2, 1]
    assert axes.group(0, ("ep",)) == (0, 1, 2, 3)
    assert axes.group(0, ("efsdp",)) == (0, 4)


@pytest.mark.parametrize("name", [*DENSE_NAMES, "ep"])
@pytest.mark.parametrize("size", [0, -1, -8, True, False, 2.0, 1.5])
def test_bad_sizes_are_refused_by_name_and_number(name, size):
    with pytest.raises(MeshError, match=rf"{name}={size!r}(?!\w)"):
        Axes(**{name: size})


@pytest.mark.parametrize("size", ["2", [2]])
@pytest.mark.parametrize("name", [*DENSE_NAMES, "ep"])
def test_sizes_of_another_type_are_refused_by_name(name, size):
    with pytest.raises(MeshError, match=re.escape(f"{name}={size!r}")):
        Axes(**{name: size})


@examples(60)
@given(meshes(), st.integers(2, 70))
def test_ep_must_divide(axes, ep):
    inner = axes.fsdp * axes.cp * axes.tp
    sizes = {"pp": axes.pp, "replicate": axes.replicate, "fsdp": axes.fsdp, "cp": axes.cp, "tp": axes.tp}
    if inner % ep == 0:
        assert Axes(**sizes, ep=ep).size_of("efsdp") == inner // ep
        return
    choices = ", ".join(str(n) for n in range(1, inner + 1) if inner % n == 0)
    with pytest.raises(MeshError, match=rf"ep={ep}\b.*={inner}\b.*\bep from {choices}(?![\d,])"):
        Axes(**sizes, ep=ep)


def test_a_mesh_says_its_sizes():
    assert str(Axes()) == "one process"
    assert str(Axes(fsdp=2, tp=3, ep=6)) == "fsdp=2 tp=3 ep=6"


def test_at_most_two_stages_are_ends():
    assert [Axes(pp=pp, tp=3).sizes(("ends", "tp")) for pp in (1, 2, 3, 5)] == [(1, 3), (2, 3), (2, 3), (2, 3)]
