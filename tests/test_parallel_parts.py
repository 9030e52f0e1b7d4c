"""Parts of parallelism without ranks: flags of FSDP, transfers of stages, marks of doors, last sums, placement."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright.parallel as parallel
from meshwright.axes import Axes
from meshwright.errors import StateError
from meshwright.models import Layer, TowerBlock
from meshwright.parallel import fp8_gather, fsdp, gradient_sums, recompute, run_step
from meshwright.parallel.stage_transfers import StageTransfers, _tag
from meshwright.sharding import Dispatch, Door, Halo, Join, Swap
from meshwright.sharding.schedules import BACK, RECEIVE, SEND, THERE, Transfer

BF16, CPU = torch.bfloat16, torch.device("cpu")


class Unit(nn.Module):
    """A stand-in for an FSDP module, which notes every call."""

    def __init__(self, has_run: bool = True) -> None:
        super().__init__()
        self.calls: list[Any] = []
        group = SimpleNamespace(post_backward=self.note("post_backward"), _partial_reduce_output="partial sums")
        others = [SimpleNamespace(_fsdp_param_groups=[group, group]), SimpleNamespace(_fsdp_param_groups=[group])]
        self.state = SimpleNamespace(
            _is_root=False if has_run else None,
            _fsdp_param_group=group,
            _state_ctx=SimpleNamespace(all_states=others),
            _root_post_backward_final_callback=self.note("final"),
        )
        for flag in ("requires_all_reduce", "requires_gradient_sync", "is_last_backward", "reshard_after_backward"):
            setattr(self, f"set_{flag}", self.note(flag))
        self.reshard = self.note("reshard")

    def note(self, name: str) -> Callable[..., None]:
        return lambda *args: self.calls.append((name, *args))

    def _get_fsdp_state(self) -> Any:
        return self.state


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsdp, "FSDPModule", Unit)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(("last", "late"), [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize(("gathers", "sums"), [(False, False), (False, True), (True, False), (True, True)])
def test_flags_of_a_backward(last: bool, late: bool, gathers: bool, sums: bool) -> None:
    """Work that is done once a step comes after the last micro-batch, and not here if weight gradients come later."""
    unit, model, done = Unit(), SimpleNamespace(gathers_once=gathers, sums_once=sums), last and not late
    fsdp.before_backward(unit, model, last=last, late=late)
    expected: dict[str, bool] = {"requires_all_reduce": last}
    if sums:
        expected |= {"requires_gradient_sync": done, "is_last_backward": done}
    if gathers:
        expected["reshard_after_backward"] = done
    assert dict(unit.calls) == expected
    fsdp.before_backward(nn.Linear(1, 1), model, last=last, late=late)  # not wrapped: nothing to set


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("last", [False, True])
def test_late_gradients_of_every_group_are_reduced_after_the_last_micro_batch(last: bool) -> None:
    unit = Unit()
    fsdp.sum_late(unit, last=last)
    flags = ("requires_gradient_sync", "reshard_after_backward", "is_last_backward")
    assert sorted(unit.calls[:3]) == sorted((flag, last) for flag in flags)
    assert unit.calls[3:] == [("post_backward",)] * 3 + [("final",)] * last


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("now", [False, True])
def test_every_unit_of_a_tower_is_told_whether_replicas_sum_now(now: bool) -> None:
    units = [Unit(), Unit()]
    fsdp.sum_replicas(nn.ModuleList([nn.Linear(1, 1), *units]), now=now)
    assert [unit.calls for unit in units] == [[("requires_all_reduce", now)]] * 2
    fsdp.sum_replicas(None, now=now)


@pytest.mark.usefixtures("stand_in")
def test_a_reset_reshards_every_unit_and_drops_partial_sums() -> None:
    root, inner, fresh = Unit(), Unit(), Unit(has_run=False)
    root.add_module("inner", inner)
    inner.state._fsdp_param_group, group = None, root.state._fsdp_param_group
    fsdp.reset_after_forward([nn.Linear(1, 1), fresh, root])
    assert (root.calls, inner.calls, fresh.calls) == ([("reshard",)], [("reshard",)], [])
    assert group._partial_reduce_output is None


def test_transfers_in_flight_have_different_tags_that_both_sides_know() -> None:
    tags = {}
    for way in (THERE, BACK):
        for stage in (1, 2, 3, 511, 1023):
            for batch in (0, 1, 2, 3, 900):
                sides = [Transfer(kind, way, stage, batch, 0, 1) for kind in (SEND, RECEIVE)]
                assert _tag(sides[0]) == _tag(sides[1])
                tags[_tag(sides[0])] = (way, stage, batch)
    assert len(tags) == 2 * 5 * 5


def test_a_pass_that_ends_early_cuts_off_the_next_one_of_a_pipeline() -> None:
    for pp in (1, 2):
        mesh: Any = SimpleNamespace(axes=Axes(pp=pp), cut_off="", under_way=None)
        transfers, waited = StageTransfers(mesh, (3, 4), BF16), list[int]()
        work: Any = SimpleNamespace(wait=partial(waited.append, 1))
        transfers._sends = [(work, torch.ones(1))] * 2
        with transfers:
            pass
        assert (waited, transfers._sends, mesh.cut_off) == ([1, 1], [], "")
        with pytest.raises(KeyError), transfers:
            raise KeyError("why")
        assert mesh.cut_off == ("KeyError: 'why'" if pp > 1 else "")
        assert mesh.under_way is (transfers if pp > 1 else None)
    with pytest.raises(StateError, match="why"), transfers:
        pass


def test_a_result_is_taken_once_after_its_receive() -> None:
    transfers = StageTransfers(SimpleNamespace(), (3, 4), BF16)  # type: ignore[arg-type]
    waited: list[str] = []
    for way, stage, batch in ((THERE, 1, 0), (BACK, 1, 0), (THERE, 1, 1), (THERE, 2, 0)):
        transfers.put(way, stage, batch, torch.tensor([stage, batch, way == BACK]))
    transfers._receives[BACK, 1, 0] = SimpleNamespace(wait=lambda: waited.append(BACK))  # type: ignore[assignment]
    assert transfers.take(THERE, 1, 1).tolist() == [1, 1, 0]
    assert not waited
    assert transfers.take(BACK, 1, 0).tolist() == [1, 0, 1]
    assert (waited, transfers._receives) == ([BACK], {})
    assert [*transfers._results] == [(THERE, 1, 0), (THERE, 2, 0)]


def doors(*kinds: type) -> nn.Module:
    """A layer with a stand-in for a door of each kind."""
    layer = nn.Module()
    for number, kind in enumerate(kinds):
        door: Any = kind.__new__(kind)  # type: ignore[call-overload]
        door.again = door.back_again = None
        setattr(layer, f"door{number}", door)
    return layer


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("to_end", [False, True])
def test_a_replay_passes_all_doors_but_perhaps_the_last(full: bool, to_end: bool) -> None:
    dense = doors(Door, Door, Door)
    recompute._mark(dense, full=full, to_end=to_end)
    assert [door.again for door in vars(dense).values() if isinstance(door, Door)] == [full, full, full and to_end]
    experts = doors(Dispatch, Swap, Door, Join, Halo)
    recompute._mark(experts, full=full, to_end=to_end)
    marked = [door for door in vars(experts).values() if isinstance(door, Dispatch | Swap | Door | Join | Halo)]
    assert [door.again for door in marked] == [full] * 5
    assert [door.back_again for door in marked if isinstance(door, Dispatch)] == [full and to_end]


@pytest.mark.parametrize(("mode", "full"), [("none", False), ("selective", False), ("full", True)])
def test_marks_are_overwritten_for_each_layer(mode: str, full: bool) -> None:
    layers = [Layer.__new__(Layer), Layer.__new__(Layer), nn.Module()]
    for layer, needed in zip(layers, (True, False, None), strict=True):
        nn.Module.__init__(layer)
        layer.__dict__.update(vars(doors(Door, Door)))
        if needed is not None:
            layer.needs_output = needed  # type: ignore[assignment]
    memory: Any = SimpleNamespace(recompute=mode)
    recompute.mark(SimpleNamespace(every_layer=layers), memory)  # type: ignore[arg-type]
    again = [[door.again for door in vars(layer).values() if isinstance(door, Door)] for layer in layers]
    assert again == [[full, full], [full, False], [full, False]]


class Real:
    """A stand-in for the expert counts of a part, which keeps what it is given."""

    def begin(self, real_T: Tensor, given: Tensor | None = None) -> None:
        self.real, self.given = real_T.tolist(), given


def test_counts_leave_out_padding_and_the_last_tokens_of_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents of 4, 2 and 2 tokens, the last token padding. This rank has tokens 2 to 6."""

    class Tokens:
        num_filler, docs = 3, None
        experts: Tensor | None = torch.arange(16).view(8, 2, 1)

        def __len__(self) -> int:
            return 8

    has_next = torch.tensor([True, True, True, False, True, False, True, False])
    monkeypatch.setattr(run_step.ops, "has_next", lambda _: has_next)
    passes = run_step._Passes.__new__(run_step._Passes)
    mesh = SimpleNamespace(device=CPU, token_range=lambda num: (2, 7) if num == 8 else None)
    passes.model = SimpleNamespace(mesh=mesh)
    head = SimpleNamespace(balance=Real())
    plain, with_mtp = (SimpleNamespace(balance=Real(), mtp=mtp) for mtp in (None, head))
    passes.parts = {1: plain, 4: with_mtp}  # type: ignore[dict-item]
    batch: Any = Tokens()
    for number, part in ((1, plain), (4, with_mtp)):
        passes._count(batch, number)
        assert part.balance.real == [True, True, True, False, False]
        assert torch.equal(part.balance.given, batch.experts[2:7])
    assert (head.balance.real, head.balance.given) == ([True, False, True, False, False], None)
    batch.experts = None
    passes._count(batch, 1)
    assert plain.balance.given is None


@pytest.mark.parametrize(
    ("images", "last"), [([], -1), ([0], -1), ([1], 0), ([0, 1, 1, 0], 2), ([1, 0, 0], 0), ([0, 0, 1], 2)]
)
def test_the_last_micro_batch_with_images(images: list[int], last: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_step, "sight_of", lambda batch, _tower, _mesh: batch[0] or None)
    mesh = SimpleNamespace(token_range=lambda num: (num, num + 3))
    for number in (0, 1):
        part = SimpleNamespace(shape=SimpleNamespace(stream_width=4), tower=object())
        stages = [SimpleNamespace(number=number, module=part)]
        pipeline = SimpleNamespace(schedule="1f1b")
        model: Any = SimpleNamespace(stages=stages, mesh=mesh, dtype=BF16, pipeline=pipeline)
        batches, want = [[each] for each in images or [0]], None
        passes = run_step._Passes(model, batches, want)  # type: ignore[arg-type]
        assert passes._last_with_images == (last if number == 0 else -1)
        assert (passes.transfers.shape, passes.transfers.dtype, passes._defers) == ((3, 4), BF16, False)


def test_gradients_are_summed_in_one_buffer_for_each_set_of_axes() -> None:
    calls: list[Any] = []

    def double(flat: Tensor, over: Any) -> None:
        calls.append((flat.tolist(), over.axes, over.num_bytes))
        flat *= 2 if over.axes == ("tp",) else 3

    mesh: Any = SimpleNamespace(axes=Axes(tp=2, fsdp=2), device=CPU, all_reduce_=double)
    a, b, c, d = torch.arange(6.0).view(2, 3), torch.tensor([7.0]), torch.tensor([1.0, 2.0]), torch.tensor([5.0])
    turned = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).T
    tp = ("tp", "cp")
    gradient_sums.finish([(tp, a), (("fsdp", "tp"), c), (("cp",), d), ((), d), (("tp",), b), (tp, turned)], mesh)
    assert calls == [
        ([0, 1, 2, 3, 4, 5, 7, 1, 3, 2, 4], ("tp",), 44), ([1, 2], ("fsdp", "tp"), 8),
    ]  # fmt: skip
    assert (a.tolist(), b.tolist(), c.tolist()) == ([[0, 2, 4], [6, 8, 10]], [14], [3, 6])
    assert (d.tolist(), turned.tolist()) == ([5], [[2, 6], [4, 8]])


@pytest.mark.parametrize(
    ("sizes", "made_early"), [(dict(tp=2, ep=2), False), (dict(pp=2), True), (dict(replicate=2), True)]
)
def test_ranks_that_run_other_code_make_every_group_at_the_start(
    sizes: dict[str, int], made_early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel, "axes_left_to_sum", lambda param, *_: param)
    monkeypatch.setattr(parallel, "head_splits", lambda *_: {"a": SimpleNamespace(parts=2)})
    monkeypatch.setattr(parallel, "hops", lambda *_: [SimpleNamespace(axes=("hop", "pp"))])
    made, on_host = list[Any](), list[Any]()
    axes = SimpleNamespace(
        pp=sizes.get("pp", 1), replicate=sizes.get("replicate", 1), ep=2,
        size_of=lambda axis: 1 if axis == "alone" else 2, halves=lambda parts: [f"half{parts}"],
    )  # fmt: skip
    mesh: Any = SimpleNamespace(axes=axes, coords={}, process_group=made.append, host_groups=on_host.append)
    memory = SimpleNamespace(token_once=False)
    spec: Any = SimpleNamespace(
        table=[("late", "alone"), ("alone",), ("late",)], rules=None, recipe=SimpleNamespace(memory=memory)
    )
    parallel._make_groups(spec, mesh)
    assert (made[0], on_host) == (parallel.REPLICA, [parallel.REPLICA])
    late = [*parallel._AXES, ("late",), ("half2",), ("hop", "pp")]
    assert made[1:] == (list(dict.fromkeys(late)) if made_early else [])


def test_offload_keeps_on_the_host_only_what_fsdp_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh: Any = SimpleNamespace(host=CPU, device=torch.device("meta"))
    for offload in (True, False):
        model = nn.Module()
        model.weight = nn.Parameter(torch.empty(3, device="meta", dtype=BF16))
        model.frozen = nn.Parameter(torch.empty(2, device="meta"), requires_grad=False)
        model.register_buffer("table", torch.empty(1, device="meta"))
        parallel._allocate(model, mesh, offload)
        assert {each.device.type for each in model.parameters()} == {"meta"}
        assert (model.weight.requires_grad, model.frozen.requires_grad) == (True, False)
        assert model.get_buffer("table").device.type == ("cpu" if offload else "meta")
    monkeypatch.setattr(parallel, "DTensor", nn.Parameter)
    parallel._allocate(model, mesh, offload=True)
    assert {each.device.type for each in model.parameters()} == {"cpu"}


def test_parts_of_rows_end_at_blocks_of_the_whole_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.arange(300.0)[:, None].expand(300, 256)
    for elements, parts in ((1, [100, 128, 256, 384]), (2 * 128 * 256, [100, 256]), (3 * 128 * 256, [100, 384])):
        monkeypatch.setattr(fp8_gather, "_PART", elements)
        got = [*fp8_gather._parts(rows, 100, BF16)]
        assert [first for _, first in got] == parts
        assert {part.dtype for part, _ in got} == {BF16}
        assert torch.equal(torch.cat([part for part, _ in got]), rows.to(BF16))
        assert [len(part) for part, _ in got] == [
            end - begin for begin, end in zip(parts, [*parts[1:], 400], strict=True)
        ]


def test_disarmed_layers_and_blocks_of_a_tower_run_plainly() -> None:
    kept = nn.Identity()
    parts: list[Any] = [kind.__new__(kind) for kind in (Layer, TowerBlock)]
    for part in parts:
        nn.Module.__init__(part)
        part.run = None
    recompute.disarm(nn.ModuleList([kept, *parts]))  # type: ignore[arg-type]
    assert [part.run for part in parts] == [part.block for part in parts]
    assert not hasattr(kept, "run")
