"""The oracles of what ranks send: nothing while they load, the same on all ranks, and just what the bill says."""

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
from ..sharding import ROWS, Charge, Dispatch, PendingRows, Pictures, StartDispatch, find_doors, hops
from .recorder import TRANSFERS, Seen
from .reference import Findings, Run
from .results import Finding


def l1_silent_load(run: Run) -> Findings:
    """Loading issues no collective."""
    run.measured("L1", "collectives", len(run.loading))
    yield from silent(run.loading)


def silent(loading: list[Seen]) -> Findings:
    yield from (Finding("L1", seen.op, f"loading issued an {seen}") for seen in loading)


def c1_collectives(run: Run) -> Findings:
    """The ranks of a group issue the same operations in the same order."""
    model = run.model
    mine = [f"{seen.op}{seen.ranks}" for seen in run.stepping if seen.op not in TRANSFERS]
    all_seen: list[list[str]] = [[] for _ in range(model.mesh.axes.world)]
    dist.all_gather_object(all_seen, mine)
    for group in {seen.ranks for seen in run.stepping}:
        here = [s for s in mine if s.endswith(str(group))]
        for other in group:
            there = [s for s in all_seen[other] if s.endswith(str(group))]
            if there != here:
                at = next(
                    (i for i, (a, b) in enumerate(zip(here, there, strict=False)) if a != b), min(len(here), len(there))
                )
                yield Finding("C1", str(list(group)), f"ranks {model.mesh.rank} and {other} part at collective {at}")
    run.measured("C1", "collectives of all ranks", len(mine))


def k1_bill(run: Run, tokens: int, num_batches: int) -> Findings:
    """The collectives of a step are those of the bill: how many, among whom, how many bytes. So is what is stored."""
    yield from _stored_as_billed(run)
    mesh, optimizer = run.model.mesh, run.engine.optimizer.options
    bill = step_bill(run.model, tokens, num_batches, run.engine.router.mode, _pictures(run), optimizer)
    due: Counter[tuple[str, tuple[int, ...]]] = Counter()
    paid, due_bytes, paid_bytes = due.copy(), due.copy(), due.copy()
    routed = {charge.what: charge for charge in bill if charge.between}
    for charge in bill:
        key = (charge.op, mesh.axes.group(mesh.rank, charge.axes))
        due[key] += charge.count
        due_bytes[key] += charge.count * charge.num_bytes * (charge.what not in routed)
    for seen in run.stepping:
        paid[seen.op, seen.ranks] += 1
        paid_bytes[seen.op, seen.ranks] += seen.num_bytes * (_what(seen) not in routed)
    for op, ranks in sorted(due.keys() | paid.keys(), key=lambda key: (paid[key] - due[key], key)):
        if due[op, ranks] != paid[op, ranks]:
            more = paid[op, ranks] - due[op, ranks]
            hint = f": {more} that nobody declared" if more > 0 else f": {-more} left out on all of them"
            apart = _places_apart(run, bill, op, ranks)
            yield Finding("K1", op, f"{paid[op, ranks]} {_among(mesh, ranks, bill)} {due[op, ranks]}{hint}{apart}")
        elif op != "all_to_all" and due_bytes[op, ranks] != paid_bytes[op, ranks]:
            yield Finding("K1", op, f"{paid_bytes[op, ranks]} bytes {_among(mesh, ranks, bill)} {due_bytes[op, ranks]}")
    # What a rank of experts receives depends on the router: those bytes are compared as a sum over all ranks.
    both = [sum(n for (op, _), n in c.items() if op == "all_to_all") for c in (due_bytes, paid_bytes)]
    want, got = mesh.all_reduce_(torch.tensor(both, device=mesh.device), Sum("bytes of all-to-alls", DENSE)).tolist()
    if want != got and mesh.rank == 0:
        yield Finding("K1", "all_to_all", f"{got} bytes among all ranks, the bill says {want}")
    yield from _routed_as_billed(run, routed)
    run.measured("K1", "collectives of all ranks, in number and bytes", len(run.stepping))


def _routed_as_billed(run: Run, routed: Mapping[str, Charge]) -> Findings:
    """The router decides how many rows go to other ranks. So they are counted from its choices, and compared as a sum
    over all ranks that share experts: a rank of a node sends on rows of others."""
    mesh, item = run.model.mesh, run.model.dtype.itemsize
    for what, charge in routed.items():
        passes, rows, width = run.routed[what]  # backward may have passed the door again, with the same rows
        due = rows * charge.count // passes * width * item
        mine = sum(seen.num_bytes for seen in run.stepping if _what(seen) == what)
        got, want = mesh.all_reduce_(torch.tensor([mine, due], device=mesh.device), Sum("rows", ("ep",))).tolist()
        if got != want:
            yield Finding("K1", what, f"{got} bytes among all of ep, what was routed takes {want}")


@contextmanager
def watching_routes(run: Run) -> Iterator[None]:
    """Count how often each door of experts is passed, and to how many ranks its tokens must go."""
    doors = [found for part in run.model.parts for found in find_doors(part, Dispatch) if found[1].armed is not None]
    real = [door.armed or door.local for _, door in doors]
    axes, once = run.model.mesh.axes, run.model.recipe.memory.token_once

    def counted(route: StartDispatch, name: str, door: Dispatch, *args: Tensor) -> PendingRows:
        for hop in hops(name, door.num_experts, axes, once):
            passes, rows, _ = run.routed.get(hop.at + ROWS, (0, 0, 0))
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


def _what(seen: Seen) -> str:
    """The name of its charge in the bill: the place, without the direction."""
    return seen.at.removeprefix(" at ").rpartition(", ")[0]


def _pictures(run: Run) -> Pictures:
    """Of the first step: the frames of this rank where anyone has some."""
    data, mine = run.trial.data, run.trial.batches(run.model, 0)
    ranks = range(run.model.mesh.num_data_ranks)
    anyone = [any(data.sees(rank, number, 0) for rank in ranks) for number in range(len(mine))]
    return tuple(batch.frames if seen else None for seen, batch in zip(anyone, mine, strict=True))


def _stored_as_billed(run: Run) -> Findings:
    rank, due = run.model.mesh.rank, Counter(dict.fromkeys(run.stored, 0))
    for stored in run.model.need(run.trial.optimizer).stored(rank):
        due[stored.what] += stored.num_bytes
    for what, num_bytes in run.stored.items():
        if num_bytes != due[what]:
            yield Finding("K1", what, f"{num_bytes} bytes on rank {rank}, the bill says {due[what]}")


def _among(mesh: Mesh, ranks: tuple[int, ...], bill: Sequence[Charge]) -> str:
    """A group of ranks, and the axes that the bill knows it by."""
    over = {c.axes for c in bill if mesh.axes.group(mesh.rank, c.axes) == ranks}
    live = {" x ".join(a for a in axes if mesh.axes.size_of(a) > 1) for axes in over}
    return f"among ranks {list(ranks)} ({' or '.join(sorted(live)) or 'no group of the bill'}), the bill says"


def _places_apart(run: Run, bill: Sequence[Charge], op: str, ranks: tuple[int, ...]) -> str:
    """At which doors, or sums of the engine, the collectives of one kind are too few or too many; layers alike are one.
    What FSDP does has no place."""
    mesh, more = run.model.mesh, Counter[str]()
    places = {place_in_bill(charge.what) for charge in bill} - {
        unit.name or "root" for stage in run.model.stages for unit in stage.units
    }
    for charge in bill:
        if place_in_bill(charge.what) in places and (charge.op, mesh.axes.group(mesh.rank, charge.axes)) == (op, ranks):
            more[same_kind(place_in_bill(charge.what))] -= charge.count
    for seen in run.stepping:
        if place_in_bill(seen.at) in places and (seen.op, seen.ranks) == (op, ranks):
            more[same_kind(place_in_bill(seen.at))] += 1
    told = ", ".join(f"{name} {num:+}" for name, num in sorted(more.items()) if num)
    return f" ({told})" if told else ""


def place_in_bill(name: str) -> str:
    """The door, or the sum of the engine, of a charge or of where a rank stood."""
    return name.removeprefix(" at ").partition(",")[0]


def same_kind(name: str) -> str:
    """A name with its numbers marked: the same for all layers and experts."""
    return re.sub(r"\d+", "*", name)


def stored_bytes(engine: Engine) -> dict[str, int]:
    """Between backward and update, when gradients are there."""
    kept = {"parameters": engine.model.stored(), "gradients": engine.model.grads()}
    return {what: sum(t.nbytes for t in tensors.values()) for what, tensors in kept.items()}
