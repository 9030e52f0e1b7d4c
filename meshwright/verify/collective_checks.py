"""Check the collectives of a run: none while loading, the same order on all ranks, and exactly those of the bill.

The bill is computed from declarations before anything runs, and the recorder counts what really ran. So an added,
forgotten or repeated collective shows even where results stay right.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from ..axes import DENSE, Sum
from ..engine import Engine
from ..engine.step_bill import step_bill
from ..mesh import Mesh
from ..sharding import ROWS, Charge, Dispatch, ImageFrames, PendingRows, StartDispatch, find_doors, hops
from .recorder import TRANSFERS, RecordedCollective
from .reference import Findings, Run
from .results import Finding


def l1_silent_load(run: Run) -> Findings:
    """Loading issues no collective.

    Each rank reads its own boxes of the files. A broadcast would make one rank read for all.
    """
    run.record("L1", "collectives", len(run.loading_collectives))
    yield from loading_findings(run.loading_collectives)


def loading_findings(loading: list[RecordedCollective]) -> Findings:
    """Yield a finding for each collective that loading issued."""
    yield from (Finding("L1", each.op, f"loading issued an {each}") for each in loading)


def c1_collectives(run: Run) -> Findings:
    """The ranks of a group issue the same operations in the same order.

    Backends match collectives by order, not by name. Ranks that differ hang, or exchange the wrong data.
    """
    model = run.model
    # Transfers of a pipeline are left out: they are between two ranks of a group, and its other ranks do not issue
    # them.
    local = [f"{each.op}{each.ranks}" for each in run.step_collectives if each.op not in TRANSFERS]
    of_ranks: list[list[str]] = [[] for _ in range(model.mesh.axes.world)]
    dist.all_gather_object(of_ranks, local)
    for group in {each.ranks for each in run.step_collectives}:
        local_ops = [s for s in local if s.endswith(str(group))]
        for other in group:
            remote_ops = [s for s in of_ranks[other] if s.endswith(str(group))]
            if remote_ops != local_ops:
                at = next(
                    (i for i, (a, b) in enumerate(zip(local_ops, remote_ops, strict=False)) if a != b),
                    min(len(local_ops), len(remote_ops)),
                )
                yield Finding("C1", str(list(group)), f"ranks {model.mesh.rank} and {other} differ at collective {at}")
    run.record("C1", "collectives of all ranks", len(local))


def k1_bill(run: Run, tokens: int, num_batches: int) -> Findings:
    """The collectives of a step are those of the bill in number, ranks and bytes; so are the bytes that ranks store.

    It sees mistakes that leave every number right, such as a unit that FSDP gathers twice. Collectives are compared by
    operation and group; only a difference is then traced to a place. `tokens`: of a micro-batch.
    """
    yield from _stored_as_billed(run)
    mesh, optimizer = run.model.mesh, run.engine.optimizer.options
    bill = step_bill(run.model, tokens, num_batches, run.engine.router.mode, _image_frames(run), optimizer)
    billed: Counter[tuple[str, tuple[int, ...]]] = Counter()
    paid, billed_bytes, paid_bytes = billed.copy(), billed.copy(), billed.copy()
    # The router decides the bytes of these collectives, so here they are only counted; `_routed_as_billed` compares
    # bytes.
    routed = {charge.what: charge for charge in bill if charge.between}
    for charge in bill:
        key = (charge.op, mesh.axes.group(mesh.rank, charge.axes))
        billed[key] += charge.count
        billed_bytes[key] += charge.count * charge.num_bytes * (charge.what not in routed)
    for each in run.step_collectives:
        paid[each.op, each.ranks] += 1
        paid_bytes[each.op, each.ranks] += each.num_bytes * (_what(each) not in routed)
    for op, ranks in sorted(billed.keys() | paid.keys(), key=lambda key: (paid[key] - billed[key], key)):
        if billed[op, ranks] != paid[op, ranks]:
            more = paid[op, ranks] - billed[op, ranks]
            # There are fewer than billed, yet nothing hung, so all ranks of the group left them out.
            hint = f": {more} are not declared" if more > 0 else f": {-more} left out on all of them"
            apart = _places_that_differ(run, bill, op, ranks)
            yield Finding("K1", op, f"{paid[op, ranks]} {_among(mesh, ranks, bill)} {billed[op, ranks]}{hint}{apart}")
        elif op != "all_to_all" and billed_bytes[op, ranks] != paid_bytes[op, ranks]:
            yield Finding(
                "K1", op, f"{paid_bytes[op, ranks]} bytes {_among(mesh, ranks, bill)} {billed_bytes[op, ranks]}"
            )
    # What a rank of experts receives depends on the router: those bytes are compared as a sum over all ranks.
    both = [sum(n for (op, _), n in c.items() if op == "all_to_all") for c in (billed_bytes, paid_bytes)]
    want, got = mesh.all_reduce_(torch.tensor(both, device=mesh.device), Sum("bytes of all-to-alls", DENSE)).tolist()
    if want != got and mesh.rank == 0:
        yield Finding("K1", "all_to_all", f"{got} bytes among all ranks, the bill says {want}")
    yield from _routed_as_billed(run, routed)
    run.record("K1", "collectives of all ranks, in number and bytes", len(run.step_collectives))


def _routed_as_billed(run: Run, routed: Mapping[str, Charge]) -> Findings:
    """Compare the bytes of token dispatch with the router's choices, as counted by `watching_routes`.

    They are summed over the ranks that share experts: where tokens are sent once per node, a rank also forwards rows of
    other ranks.
    """
    mesh, item = run.model.mesh, run.model.dtype.itemsize
    for what, charge in routed.items():
        passes, rows, width = run.routed[what]  # recompute may have passed the door again, with the same rows
        expected = rows * charge.count // passes * width * item
        local = sum(each.num_bytes for each in run.step_collectives if _what(each) == what)
        got, want = mesh.all_reduce_(torch.tensor([local, expected], device=mesh.device), Sum("rows", ("ep",))).tolist()
        if got != want:
            yield Finding("K1", what, f"{got} bytes among all of ep, what was routed takes {want}")


@contextmanager
def watching_routes(run: Run) -> Iterator[None]:
    """Count how often each door of experts is passed, and to how many ranks its tokens must go.

    Only armed doors are wrapped: without ep no rows leave a rank.
    """
    doors = [each for part in run.model.parts for each in find_doors(part, Dispatch) if each[1].armed is not None]
    real = [door.armed or door.local for _, door in doors]
    axes, once = run.model.mesh.axes, run.model.recipe.memory.token_once

    def counted(route: StartDispatch, name: str, door: Dispatch, *args: Tensor) -> PendingRows:
        for hop in hops(name, door.num_experts, axes, once):
            passes, rows, _ = run.routed.get(hop.at + ROWS, (0, 0, 0))
            # A token goes once to each rank that has some of its experts. Sorted by rank, each change is one more.
            distinct = 1 + ((args[2] // hop.num_here).sort(-1).values.diff(dim=-1) != 0).sum(-1)
            run.routed[hop.at + ROWS] = passes + 1, rows + int(distinct.sum()), door.width
        return route(*args)

    for (name, door), route in zip(doors, real, strict=True):
        door.armed = functools.partial(counted, route, name, door)
    try:
        yield
    finally:
        for (_, door), route in zip(doors, real, strict=True):
            door.armed = route


def _what(each: RecordedCollective) -> str:
    """Return the name of a collective's charge in the bill: its place, without the direction."""
    return each.at.removeprefix(" at ").rpartition(", ")[0]


def _image_frames(run: Run) -> ImageFrames:
    """Return the frames of this rank in the first step, per micro-batch; None where no data rank has images.

    As soon as one data rank has images, the bill charges all ranks for the vision encoder.
    """
    data, local = run.trial.data, run.trial.batches(run.model, 0)
    ranks = range(run.model.mesh.num_data_ranks)
    anyone = [any(data.sees(rank, number, 0) for rank in ranks) for number in range(len(local))]
    return tuple(batch.frames if used else None for used, batch in zip(anyone, local, strict=True))


def _stored_as_billed(run: Run) -> Findings:
    """Compare the bytes of parameters, gradients and optimizer state with the bill, for each rank separately."""
    rank, billed = run.model.mesh.rank, Counter(dict.fromkeys(run.stored, 0))
    for stored in run.model.need(run.trial.optimizer).stored(rank):
        billed[stored.what] += stored.num_bytes
    for what, num_bytes in run.stored.items():
        if num_bytes != billed[what]:
            yield Finding("K1", what, f"{num_bytes} bytes on rank {rank}, the bill says {billed[what]}")


def _among(mesh: Mesh, ranks: tuple[int, ...], bill: Sequence[Charge]) -> str:
    """Name a group by its ranks and by its axes in the bill."""
    over = {c.axes for c in bill if mesh.axes.group(mesh.rank, c.axes) == ranks}
    live = {" x ".join(a for a in axes if mesh.axes.size_of(a) > 1) for axes in over}
    return f"among ranks {list(ranks)} ({' or '.join(sorted(live)) or 'no group of the bill'}), the bill says"


def _places_that_differ(run: Run, bill: Sequence[Charge], op: str, ranks: tuple[int, ...]) -> str:
    """Name the doors and reductions at which one kind of collective runs too seldom or too often.

    Layers are counted together. FSDP's own collectives are not named: they announce no place.
    """
    mesh, more = run.model.mesh, Counter[str]()
    places = {place_in_bill(charge.what) for charge in bill} - {
        unit.name or "root" for stage in run.model.stages for unit in stage.units
    }
    for charge in bill:
        if place_in_bill(charge.what) in places and (charge.op, mesh.axes.group(mesh.rank, charge.axes)) == (op, ranks):
            more[same_kind(place_in_bill(charge.what))] -= charge.count
    for each in run.step_collectives:
        if place_in_bill(each.at) in places and (each.op, each.ranks) == (op, ranks):
            more[same_kind(place_in_bill(each.at))] += 1
    text = ", ".join(f"{name} {num:+}" for name, num in sorted(more.items()) if num)
    return f" ({text})" if text else ""


def place_in_bill(name: str) -> str:
    """Return the door or reduction of a charge, or of the place that a rank had announced."""
    return name.removeprefix(" at ").partition(",")[0]


def same_kind(name: str) -> str:
    """Replace the numbers in a name by `*`, so that all layers and experts share one."""
    return re.sub(r"\d+", "*", name)


def stored_bytes(engine: Engine) -> dict[str, int]:
    """Return the bytes of parameters and gradients of this rank.

    Call it between backward and update: only then do gradients exist.
    """
    tensors_of = {"parameters": engine.model.stored(), "gradients": engine.model.grads()}
    return {what: sum(t.nbytes for t in tensors.values()) for what, tensors in tensors_of.items()}
