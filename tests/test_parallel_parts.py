"""Parts of parallelism without ranks: flags of FSDP, transfers of stages, marks of doors, last sums, placement."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright.parallel as parallel
from meshwright.axes import DATA_RANK, DENSE, STAGE, TOKENS, Axes
from meshwright.errors import StateError
from meshwright.models import Layer, TowerBlock
from meshwright.parallel import (
    expert_dedup,
    expert_exchange,
    fp8_gather,
    fsdp,
    gradient_sums,
    recompute,
    run_step,
    vision_encoder,
)
from meshwright.parallel.stage_transfers import StageTransfers, _tag
from meshwright.sharding import Dispatch, Door, Halo, Hop, Join, Swap
from meshwright.sharding.schedules import BACK, RECEIVE, SEND, THERE, Action, Transfer

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
        self.set_modules_to_backward_prefetch = self.note("prefetch")

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


@pytest.mark.usefixtures("stand_in")
def test_backward_prefetches_only_what_it_reaches_in_every_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient comes to layer 0 only through the tower, where there are images."""
    names = ("tower.blocks.0", "tower.merger", "layers.0", "layers.1", "layers.2", "head.mtp.layer", "")
    model, text = {name: Unit() for name in names}, {"layers.1", "layers.2", ""}
    monkeypatch.setattr(fsdp, "passed", lambda *_, with_images: text | {*names} if with_images else text)
    units = [SimpleNamespace(name=name, expert=False) for name in names]
    stage = SimpleNamespace(module=SimpleNamespace(get_submodule=model.__getitem__), units=units)
    fsdp.prefetch_in_order(stage, None, None, ())  # type: ignore[arg-type]
    asked = {name: [key for key in names if model[key] is unit.calls[0][1][0]] for name, unit in model.items()}
    following = {"tower.merger": "tower.blocks.0", "layers.2": "layers.1", "": "layers.2"}
    assert asked == {name: [following.get(name, name)] for name in names}


@pytest.mark.parametrize(
    ("has_grad", "in_grad_mode", "waits"), [(True, True, False), (False, True, True), (False, False, False)]
)
def test_rows_without_a_gradient_are_awaited_where_a_layer_may_run_again(
    has_grad: bool, in_grad_mode: bool, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay stops at the last saved tensor, before the wait."""
    done: list[Any] = []

    def transfer(*args: Any) -> Any:
        done.append(("begin", *args))
        return SimpleNamespace(begin=lambda x: x + 1, end=lambda x: done.append("end") or x + 2)

    monkeypatch.setattr(expert_exchange, "AsyncAllToAll", transfer)
    monkeypatch.setattr(expert_exchange.AllToAll, "apply", lambda x, *args: done.append(("whole", *args)) or x + 3)
    group = expert_exchange.Group("a group", Hop("x", ("ep",), 2, 4, 2))
    with torch.set_grad_enabled(in_grad_mode):
        rows = group.begin(torch.zeros(1, requires_grad=has_grad), [1, 2], [3, 0], ", rows")
    where = ([1, 2], [3, 0], "a group", "x, rows")
    assert done == [("whole" if waits else "begin", *where)]
    assert rows().item() == 3
    assert done[1:] == ([] if waits else ["end"])


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


def test_a_tensor_is_kept_until_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []

    def isend(x: Tensor, **where: Any) -> Any:
        sent.append((x.tolist(), x.is_contiguous(), where))
        is_second = len(sent) == 2
        return SimpleNamespace(is_completed=lambda: is_second)

    monkeypatch.setattr(torch.distributed, "isend", isend)
    transfers = StageTransfers(SimpleNamespace(process_group=lambda axes: axes), (3, 4), BF16)  # type: ignore[arg-type]
    for batch in range(4):
        transfers.put(THERE, 1, batch, torch.full((2, 3), float(batch)).T)
        step = Transfer(SEND, THERE, 1, batch, 0, 5)
        transfers.send(step)
        where = dict(group=("pp",), group_dst=5, tag=_tag(step))
        assert sent[-1] == ([[batch] * 2] * 3, True, where)
    assert [x[0, 0].item() for _, x in transfers._sends] == [0, 2, 3]


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
    of_a_step = [
        DENSE, TOKENS, ("pp",), ("pp", "cp"), ("tp",), ("cp",), DATA_RANK, ("ep",), ("replicate",), ("fsdp", "cp"),
        ("efsdp",), STAGE,
    ]  # fmt: skip
    late = [*of_a_step, ("late",), ("half2",), ("hop", "pp")]
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


class Passes:
    """A stand-in for the passes of a step through frozen and trained stages."""

    def __init__(self, model: Any, batches: Any, want: Any) -> None:
        self.transfers = nullcontext()

    def note(self, *_: Any) -> None: ...

    def forward(self, step: Action) -> Any:
        return None


def test_frozen_stages_are_freed_after_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have no backward, where FSDP frees what forward has gathered."""
    freed: list[Any] = []
    monkeypatch.setattr(run_step, "_Passes", Passes)
    monkeypatch.setattr(run_step, "program_of", lambda *_: [[], [Action("F", 1, batch) for batch in range(3)]])
    monkeypatch.setattr(run_step, "reset_after_forward", freed.append)
    model: Any = SimpleNamespace(
        line=None, pipeline=SimpleNamespace(schedule="v"), trained_from=3, mesh=SimpleNamespace(coords={"pp": 1}),
        low=SimpleNamespace(quantised=nullcontext),
        stages=[SimpleNamespace(number=number, module=f"stage {number}") for number in (0, 2, 3, 5)],
    )  # fmt: skip
    batches: Any = [1.0, 2.0, 4.0]
    total = run_step.run(model, batches, None, lambda batch, _: (None, torch.tensor([batch])), "a step")  # type: ignore[arg-type]
    assert (total.tolist(), freed) == ([7.0], [["stage 0", "stage 2"]])


def passes_of(**fields: Any) -> run_step._Passes:
    """Return passes of 3 micro-batches without a model. The second micro-batch is the last with images."""
    made = run_step._Passes.__new__(run_step._Passes)
    model = SimpleNamespace(trained_from=2, line=SimpleNamespace(last=9, num_stages=10), sums_once=False)
    vars(model).update(fields)
    batch = SimpleNamespace(fields={}, tokens=None, labels=None, docs=None)
    vars(made).update(
        model=model, batches=[batch] * 3, want=SimpleNamespace(of=lambda _: None), _inputs={}, _outputs={}, _jobs={},
        _defers=False, _vision=[None] * 3, _last_with_images=1, transfers=StageTransfers(None, (1,), BF16),  # type: ignore[arg-type]
        _count=lambda *_: None,
    )  # fmt: skip
    return made


@pytest.mark.parametrize(("stage", "wants"), [(1, False), (2, False), (3, True)])
def test_a_stage_wants_a_gradient_of_its_input_if_one_before_it_is_trained(stage: int, wants: bool) -> None:
    passes, weight = passes_of(), torch.ones(1, requires_grad=True)
    passes.parts = {stage: lambda _t, _l, _d, _w, x, _v: (x * weight,)}  # type: ignore[dict-item]
    passes.transfers.put(THERE, stage, 1, torch.full((1,), 3.0))
    assert passes.forward(Action("F", stage, 1)) is None
    assert ([*passes._inputs] == [(stage, 1)]) == wants
    sent = passes.transfers.take(THERE, stage + 1, 1)
    assert (sent.item(), sent.requires_grad) == (3.0, False)
    assert [*passes._outputs] == [(stage, 1)]


@pytest.mark.parametrize("gathers_once", [False, True])
@pytest.mark.parametrize("sums_once", [False, True])
def test_replicas_of_a_tower_are_summed_after_the_last_images(
    sums_once: bool, gathers_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `sum_once` all is reduced after the last micro-batch."""
    summed, before = list[Any](), list[Any]()
    monkeypatch.setattr(run_step, "sum_replicas", lambda tower, *, now: summed.append((tower, now)))
    monkeypatch.setattr(run_step, "before_backward", lambda *_, last, late: before.append((last, late)))
    passes = passes_of(sums_once=sums_once, gathers_once=gathers_once)
    passes.parts = {0: SimpleNamespace(tower="tower")}  # type: ignore[dict-item]
    for batch in range(3):
        passes.transfers.put(BACK, 0, batch, torch.ones(1))
        passes.start(Action("B", 0, batch), torch.ones(1, requires_grad=True) * 2)
        passes.backward(Action("B", 0, batch))
    assert before == [(False, False), (False, False), (True, False)]
    assert summed == ([] if sums_once else [("tower", False), ("tower", True), ("tower", False)])


def test_expected_rows_of_a_hop_are_those_of_all_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """6 places have 2 of 12 experts. A token has 3, so 4 tokens make 24 * (1 - C(10, 3) / C(12, 3)) = 11 rows. A node
    has 2 places, which get 4 copies of 3 rows."""
    asked: list[Any] = []
    to_host = expert_dedup.ops.to_host
    monkeypatch.setattr(expert_dedup.ops, "to_host", lambda x, totals: asked.append(totals) or to_host(x, totals))
    group: Any = SimpleNamespace(hop=Hop("x", ("ep%2",), 2, 4, 6), counts=lambda counts_RC: counts_RC)
    of_N, expert_N = torch.tensor([0, 0, 1, 2]), torch.tensor([0, 3, 1, 2])
    expert_dedup._outgoing(expert_dedup._Requests(of_N, expert_N, 3, 4, 3), group)
    assert asked == [[11, 11, 4, 4, 4, 4 - 11, 11 - 3]]


@pytest.mark.parametrize(("pixels", "values"), [(torch.tensor([[0, 255]], dtype=torch.uint8), [[-1.0, 1.0]]),
                                                (torch.tensor([[0.5, 3.0]]), [[0.5, 3.0]])])  # fmt: skip
def test_a_rank_runs_its_own_frames(pixels: Tensor, values: list[list[float]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two ranks has tokens 6 to 11, and runs the smaller frame. It gets one row of the other."""
    monkeypatch.setattr(vision_encoder.ops, "frames", lambda sizes, _device: sizes)
    first, second = (
        SimpleNamespace(height=height, width=width, tokens=tokens, num_patches=height * width)
        for height, width, tokens in ((4, 6, range(2, 7)), (2, 6, range(7, 10)))
    )
    images = SimpleNamespace(frames=[first, second], of=lambda own: pixels if own == (1,) else None)
    batch: Any = type("Batch", (), {"images": images, "__len__": lambda _: 12})()
    mesh: Any = SimpleNamespace(token_range=lambda num: (num // 2, num), device=CPU, host=CPU)
    seen = vision_encoder.sight_of(batch, SimpleNamespace(insert=SimpleNamespace(cost=float)), mesh)  # type: ignore[arg-type]
    assert seen is not None
    assert (seen.patches_PC.tolist(), seen.frames) == (values, [(2, 6)])
    assert (seen.sent, seen.got, seen.at_N.tolist()) == ([0, 3], [1, 3], [0, 1, 2, 3])
    batch.images = None
    assert vision_encoder.sight_of(batch, None, mesh) is None  # type: ignore[arg-type]
