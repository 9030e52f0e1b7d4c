"""A recorder records every collective, and nothing after it is left."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshwright.mesh.collectives import AllGather, all_gather
from meshwright.verify import Recorder
from tests import worlds
from tests.trials import mesh_of

ALL = (0, 1)


def _ops(recorder: Recorder) -> list[tuple[str, tuple[int, ...], int]]:
    return [(seen.op, seen.ranks, seen.num_bytes) for seen in recorder.collectives]


def _forward_and_backward_are_recorded() -> None:
    mesh = mesh_of(dict(tp=2))
    x = torch.ones(3, 5, requires_grad=True)
    with Recorder() as recorder:
        AllGather.apply(x, 2, mesh.name_of(("tp",))).sum().backward()
        dist.all_reduce(torch.ones(7))
    assert _ops(recorder) == [("all_gather", ALL, 120), ("reduce_scatter", ALL, 120), ("all_reduce", ALL, 28)]


def _nothing_is_recorded_outside() -> None:
    mesh_of(dict(tp=2))
    dist.all_reduce(torch.ones(7))
    recorder = Recorder()
    with pytest.raises(ZeroDivisionError), recorder:
        raise ZeroDivisionError(dist.all_reduce(torch.ones(2)))
    dist.all_reduce(torch.ones(7))
    assert _ops(recorder) == [("all_reduce", ALL, 8)]


def _a_recorder_goes_on() -> None:
    mesh_of(dict(tp=2))
    with Recorder() as recorder:
        dist.all_reduce(torch.ones(7))
    with recorder, Recorder() as second:
        dist.all_reduce(torch.ones(2))
    assert _ops(recorder) == [("all_reduce", ALL, 28), ("all_reduce", ALL, 8)]
    assert _ops(second) == [("all_reduce", ALL, 8)]


def _compiled_code_is_recorded() -> None:
    mesh = mesh_of(dict(tp=2))

    def twice(x: Any) -> Any:
        return all_gather(2 * x, 2, mesh.name_of(("tp",))) + 1

    act = twice if mesh.rank else torch.compile(twice, backend="eager")  # it takes seconds
    with Recorder() as recorder:
        assert torch.equal(act(torch.ones(3, 5)), torch.full((6, 5), 3.0))
    assert _ops(recorder) == [("all_gather", ALL, 120)]


def test_every_collective_is_recorded_with_its_bytes() -> None:
    acts = [_forward_and_backward_are_recorded, _nothing_is_recorded_outside, _a_recorder_goes_on]
    worlds.in_turn(2, {act.__name__: act for act in (*acts, _compiled_code_is_recorded)})


def test_only_collectives_are_in_the_namespace_that_is_recorded() -> None:
    """The recorder takes each operation of `meshwright::` for a collective, so kernels have another namespace."""
    ours = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith("meshwright::")}
    into, new = ("all_gather", "reduce_scatter", "all_reduce"), ("all_gather_into_tensor", "reduce_scatter_tensor")
    assert ours == {f"meshwright::{name}" for name in (*into, *new, "all_to_all_single")}
