"""The oracles: what must hold of a run on any mesh, each a function that returns what it found wrong.

The tests and the `verify` command share them. Every rank calls every oracle in the same order; findings name the
parameter, the numbers and the likely cause.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from ..axes import DENSE, Sum
from ..engine import Engine, Model, gather, stream
from ..engine.bill import step_bill
from ..errors import LayoutError
from ..layout import Box, Charge, check_tiling, owned
from ..mesh import Mesh
from ..weights import blocks_by_key, raw_tensor
from .diagnose.causes import cause_of, cause_of_loss, scale
from .diagnose.forward import Wrong, about_doors, by_logits, first_wrong, scores_of, watched
from .diagnose.gradients import suspects, where
from .recorder import Recorder, Seen
from .trial import LR, Reference, Trial, unrounded
from .weights import differences

_UPDATE = 1e-6  # of the lr: what rounding in float64 may do to an update


@dataclass(frozen=True)
class Finding:
    oracle: str
    name: str  # of the parameter, key or collective
    what: str

    def __str__(self) -> str:
        return f"{self.oracle} {self.name}: {self.what}"


@dataclass
class Run:
    """A trial on its mesh, with what was recorded."""

    trial: Trial
    reference: Reference
    engine: Engine
    loading: list[Seen] = field(default_factory=list)
    stepping: list[Seen] = field(default_factory=list)
    stored: dict[str, int] = field(default_factory=dict)  # bytes of this rank before the first update
    blame: str = ""  # what is wrong already, and makes all that comes later wrong too

    @property
    def model(self) -> Model:
        return self.engine.model


Findings = Iterator[Finding]


def w1_load(run: Run) -> Findings:
    """Every stored element is bitwise the source's."""
    found = [Finding("W1", each.name, str(each)) for each in differences(run.model, list(run.model.pieces))]
    if sum(n for (n,) in _everywhere(run.model.mesh, [len(found)])):
        run.blame = "weights are not those of the source, see W1"
    yield from found


def _differs(ours: Tensor, theirs: Tensor) -> str:
    wrong = int((ours != theirs).sum())
    moved = torch.equal(ours.flatten().sort().values, theirs.flatten().sort().values)
    return f"{wrong} of {ours.numel()} elements differ" + (": the right values in the wrong places" if moved else "")


def l1_silent_load(run: Run) -> Findings:
    """Loading issues no collective."""
    yield from silent(run.loading)


def silent(loading: list[Seen]) -> Findings:
    yield from (Finding("L1", seen.op, f"loading issued an {seen}") for seen in loading)


def t1_tiling(run: Run) -> Findings:
    """What the owners hold tiles every tensor; what others hold is a copy of it."""
    model, axes = run.model, run.model.mesh.axes
    boxes: dict[str, list[Box]] = {name: [] for name in model.table.params}
    for rank in range(axes.world):
        for name, piece in owned(model.blueprint.spec, axes, rank).items():
            boxes[name].extend(piece.boxes)
    for param in model.table:
        try:
            check_tiling(boxes[param.name], param.shape, param.name)
        except LayoutError as error:
            yield Finding("T1", param.name, str(error))


def s1_loss(run: Run, loss: float, evaluated: float | None = None) -> Findings:
    """The loss of the first step is that of one process, and so is what `evaluate` says of the same data."""
    ref = run.reference
    if not _is_that_of(loss, ref.losses[0], run):
        why = run.blame or cause_of_loss(loss, ref.losses[0], ref.aux[0], ref.sums, run.trial.axes)
        yield Finding("S1", "loss", f"{loss!r}, one process finds {ref.losses[0]!r}: {why}")
        run.blame = run.blame or "the loss is wrong already, see S1"
    elif evaluated is not None:
        terms, weight = (sum(each) for each in zip(*(batch for of_rank in ref.sums for batch in of_rank), strict=True))
        if not _is_that_of(evaluated, terms / weight, run):
            yield Finding("S1", "evaluate", f"{evaluated!r}, one process finds {terms / weight!r}; the step is right")


def _is_that_of(loss: float, expected: float, run: Run) -> bool:
    return abs(loss - expected) <= run.trial.tolerance.loss * abs(expected)


def g1_gradients(run: Run) -> Findings:
    """Every gradient is that of one process. Call between backward and update. Those nearest to the loss come first:
    what goes wrong on the way back makes all before it wrong."""
    found, refs, limit = gather(run.model, "grad"), run.reference.grads, run.trial.tolerance.grad
    wrong = []
    if run.model.mesh.rank == 0:
        yield from (Finding("G1", name, "it has no gradient") for name in refs if name not in found)
        for names in _judged_together(run, [name for name in refs if name in found]):
            mine, ref = (torch.cat([grads[n].double().flatten() for n in names]) for grads in (found, refs))
            if not (mine - ref).norm().item() <= limit * max(ref.norm().item(), 1e-6 * run.reference.norm):
                wrong.append(names)
    numbers = [len(wrong)] if run.model.mesh.rank == 0 else [0]
    if not _everywhere(run.model.mesh, numbers)[0][0]:
        return
    made = suspects(run.model, found, wrong, run.reference)  # all ranks: it sums once more
    said = "" if run.blame else where(run.model, made, run.reference)  # of a wrong way there, none of back
    for name, suspect in made.items():
        yield Finding("G1", name, cause_of(suspect, run.blame) + said)
        said = ""
    run.blame = run.blame or "the gradients are wrong, see G1"


def _judged_together(run: Run, names: list[str]) -> list[list[str]]:
    """Each key by itself; but in bf16, where rounding sends a token to another expert, all experts of a layer."""
    if run.trial.dtype != torch.bfloat16:
        return [[name] for name in names]
    made_of = blocks_by_key(run.model.table, run.model.keymap.choice)
    together: dict[str, list[str]] = {}
    for name in names:
        together.setdefault(made_of[name][0][0].name, []).append(name)
    return list(together.values())


def g2_replicas(run: Run) -> Findings:
    """Ranks that hold the same elements hold the same bits, of weights and (before update) of gradients."""
    model, axes = run.model, run.model.mesh.axes
    grads = model.grads()
    for kind, tensors in (("weight", model.stored()), ("gradient", grads)):
        names = [name for name in model.pieces if name in tensors]
        sums = _everywhere(model.mesh, [_crc(tensors[name]) for name in names])
        for i, name in enumerate(names):
            for axis in model.placement(name).copies:
                peers = axes.group(model.mesh.rank, (axis,))
                odd = [r for r in peers if sums[r][i] != sums[peers[0]][i]]
                if odd and model.mesh.rank == peers[0]:
                    hint = f": is a sum over {axis} missing?" if kind == "gradient" else ""
                    yield Finding("G2", name, f"the {kind} of ranks {[peers[0], *odd]} differs along {axis}{hint}")


def n1_norm(run: Run) -> Findings:
    """With gradients that are all 1, the squared norm is the number of elements; the real norm is the reference's, and
    every token counts once in the load of its experts."""
    ones = {name: torch.ones_like(t) for name, t in run.model.stored().items()}
    expected = sum(p.numel for p in run.model.table)
    squared = run.engine.norm(ones) ** 2
    if abs(squared - expected) > 0.5:
        hint = "copies are counted too" if squared > expected else "some shards are left out"
        yield Finding("N1", "norm of ones", f"counts {squared:.2f} elements of {expected}: {hint}")
    norm = run.engine.norm(run.model.grads())
    if not abs(norm - run.reference.norm) <= run.trial.tolerance.grad * run.reference.norm:
        hint = f": {run.blame}" if run.blame else ""
        yield Finding("N1", "norm", f"{norm!r}, one process finds {run.reference.norm!r}{hint}")
    loads, expected_loads = run.engine.router.load_LE, run.reference.loads
    if run.trial.dtype != torch.float64:  # rounding sends a token to another expert, but not away
        loads, expected_loads = loads.sum(), expected_loads.sum()
    if not torch.equal(loads.cpu(), expected_loads):
        yield Finding("N1", "load of experts", f"{loads.tolist()}, one process counts {expected_loads.tolist()}")


def u1_alive(run: Run, before: Mapping[str, Tensor], pushed: set[str], losses: Sequence[float]) -> Findings:
    """Every parameter that was pushed moved, and the next forwards saw it; weights end as those of one process."""
    after = run.model.stored()
    for name in sorted(pushed):
        if torch.equal(after[name], before[name]):
            yield Finding(
                "U1", name, f"it has a gradient on rank {run.model.mesh.rank}, but no update moved it: is it a copy?"
            )
    later = list(enumerate(zip(losses, run.reference.losses, strict=True)))[1:]
    for step, (loss, ref_loss) in later:
        if not _is_that_of(loss, ref_loss, run):
            hint = run.blame or "the gradients were right, so the update was not, or is not seen"
            yield Finding("U1", f"loss of step {step}", f"{loss!r}, one process finds {ref_loss!r}: {hint}")
    yield from _weights_after(run)


def _weights_after(run: Run) -> Findings:
    """In float64 alone: AdamW makes a whole step of a gradient that is nothing but rounding."""
    if run.trial.dtype != torch.float64:
        return
    found = unrounded(run.model)
    for name, tensor in stream(run.model):
        if not torch.equal(tensor, found[name].to(tensor.dtype)):
            yield Finding("U1", name, "what stream and export hand out is not what was trained, but an earlier copy?")
    for name, tensor in found.items() if not run.blame else ():
        off = (tensor - run.reference.trained[name]).abs() > _UPDATE * LR
        if off.any():
            what = f"{int(off.sum())} of {off.numel()} elements end other than in one process"
            yield Finding("U1", name, f"{what}: the gradients were right, so the updates were not")


def c1_collectives(run: Run) -> Findings:
    """The ranks of a group issue the same operations in the same order."""
    model = run.model
    mine = [f"{seen.op}{seen.ranks}" for seen in run.stepping]
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


def e1_export(run: Run) -> Findings:
    """What is handed out is the source, byte for byte, as long as nothing was trained."""
    source = run.model.keymap.source
    assert source is not None
    names = []
    for name, tensor in stream(run.model):
        names.append(name)
        if name in source.entries and not _same_bits(tensor, raw_tensor(source, name)):
            yield Finding("E1", name, f"{_differs(tensor, raw_tensor(source, name))} from the source")
    missing = set(source.entries) - set(names) - run.model.keymap.carried
    if run.model.mesh.rank == 0 and missing:
        yield Finding("E1", min(missing), f"{len(missing)} keys of the source are not handed out")


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def d1_documents(run: Run) -> Findings:
    """Packed documents give what each gives alone. First comes the part of the model where they begin to differ."""
    model, batch = run.model, run.trial.data(0)[0]  # the same on all ranks
    limit, bounds = run.trial.tolerance.logprob, batch.bounds
    with watched(model) as seen:
        packed = scores_of(model, batch).cpu()
    wrong = first_wrong(model, seen, run.reference.prints, bounds[1], limit)
    errors = [(packed[a:b] - alone).abs().max().item() for a, b, alone in _documents(bounds, run.reference.alone)]
    off = [i for i, error in enumerate(errors) if not error <= limit]
    whole = by_logits(model, batch).cpu()  # on all ranks, whatever they have found
    if not off:
        if not (packed - whole).abs().max() <= limit:
            yield Finding("D1", "logits", "log-probabilities are right, but not those that the logits give")
        return
    wrong = wrong or Wrong("head", leak=0 not in off, ratio=float("nan"))  # all before it is right
    leak = wrong.leak and 0 not in off
    why = run.blame or ("a leak from the documents before" if leak else about_doors(model, wrong.part, seen.passed))
    if not why and wrong.ratio == wrong.ratio:
        why = scale(wrong.ratio, run.trial.axes)
    yield Finding("D1", wrong.part, f"what it gives out is the first that is wrong{why and ': '}{why}")
    run.blame = run.blame or f"the forward is wrong from {wrong.part} on, see D1"
    for i in off:
        hint = ": a leak" if leak else ", which is not a leak: so is the first document"
        yield Finding("D1", f"document {i}", f"scores off by {errors[i]:.1e} from the document alone{hint}")


def _documents(bounds: Sequence[int], alone: Sequence[Tensor]) -> Iterator[tuple[int, int, Tensor]]:
    return ((a, b, scores) for (a, b), scores in zip(pairwise(bounds), alone, strict=True))


def k1_bill(run: Run, tokens: int, num_batches: int) -> Findings:
    """The collectives of a step are those of the bill: how many, among whom, how many bytes. So is what is stored."""
    yield from _stored_as_billed(run)
    mesh, bill = run.model.mesh, step_bill(run.model, tokens, num_batches)
    due: Counter[tuple[str, tuple[int, ...]]] = Counter()
    paid, due_bytes, paid_bytes = due.copy(), due.copy(), due.copy()
    for charge in bill:
        key = (charge.op, mesh.axes.group(mesh.rank, charge.axes))
        due[key] += charge.count
        due_bytes[key] += charge.count * charge.num_bytes
    for seen in run.stepping:
        paid[seen.op, seen.ranks] += 1
        paid_bytes[seen.op, seen.ranks] += seen.num_bytes
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
    want, got = mesh.sum_(torch.tensor(both, device=mesh.device), Sum("bytes of all-to-alls", DENSE)).tolist()
    if want != got and mesh.rank == 0:
        yield Finding("K1", "all_to_all", f"{got} bytes among all ranks, the bill says {want}")


def _stored_as_billed(run: Run) -> Findings:
    rank, due = run.model.mesh.rank, Counter(dict.fromkeys(run.stored, 0))
    for stored in run.model.need().stored(rank):
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
    places = {place_of(charge.what) for charge in bill} - {
        unit.name or "root" for unit in run.model.blueprint.spec.units
    }
    for charge in bill:
        if place_of(charge.what) in places and (charge.op, mesh.axes.group(mesh.rank, charge.axes)) == (op, ranks):
            more[same_kind(place_of(charge.what))] -= charge.count
    for seen in run.stepping:
        if place_of(seen.at) in places and (seen.op, seen.ranks) == (op, ranks):
            more[same_kind(place_of(seen.at))] += 1
    told = ", ".join(f"{name} {num:+}" for name, num in sorted(more.items()) if num)
    return f" ({told})" if told else ""


def place_of(name: str) -> str:
    """The door, or the sum of the engine, of a charge or of where a rank stood."""
    return name.removeprefix(" at ").partition(",")[0]


def same_kind(name: str) -> str:
    """A name with its numbers marked: the same for all layers and experts."""
    return re.sub(r"\d+", "*", name)


def stored_bytes(engine: Engine) -> dict[str, int]:
    """Between backward and update, when gradients are there."""
    kept = {"parameters": engine.model.stored(), "gradients": engine.model.grads()}
    return {what: sum(t.nbytes for t in tensors.values()) for what, tensors in kept.items()}


def moment_bytes(engine: Engine) -> int:
    """After the first update, which makes the moments."""
    return sum(m.nbytes for both in engine.optimizer.moments.values() for m in both)


def _crc(tensor: Tensor) -> int:
    return zlib.crc32(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def _everywhere(mesh: Mesh, numbers: list[int]) -> list[list[int]]:
    """The numbers of every rank, on every rank."""
    return mesh.gather_rows(torch.tensor([numbers], device=mesh.device), DENSE).tolist()


ORACLES: dict[str, Callable[..., Findings]] = {
    "L1": l1_silent_load, "T1": t1_tiling, "W1": w1_load, "E1": e1_export, "D1": d1_documents, "S1": s1_loss,
    "G1": g1_gradients, "N1": n1_norm, "G2": g2_replicas, "U1": u1_alive, "C1": c1_collectives, "K1": k1_bill,
}  # fmt: skip


def examine(trial: Trial, reference: Reference, mesh: Mesh, store: Store | None = None) -> list[Finding]:
    """All oracles, in one load and a few steps. Every rank calls it and gets its own findings."""
    with Recorder(store and PrefixStore("load", store), mesh.rank) as loading:
        engine = trial.engine(mesh)
    run = Run(trial, reference, engine, loading.seen)
    checks: list[Callable[[Run], Findings]] = [l1_silent_load, t1_tiling, w1_load, e1_export, d1_documents]
    findings = [finding for check in checks for finding in check(run)]
    findings += _steps(run, store)
    return findings


def _steps(run: Run, store: Store | None) -> list[Finding]:
    findings: list[Finding] = []
    engine, mesh, batches = run.engine, run.model.mesh, run.trial.batches(run.model)
    before, found = {n: t.clone() for n, t in run.model.stored().items()}, []
    evaluated = engine.evaluate(batches)
    recorder = Recorder(store and PrefixStore("step", store), mesh.rank)
    with recorder:
        found.append(engine.backward(batches))
    pushed = {name for name, grad in run.model.grads().items() if grad.any()}
    run.stored = stored_bytes(engine)
    findings += [*s1_loss(run, found[0], evaluated), *g1_gradients(run), *n1_norm(run), *g2_replicas(run)]
    with recorder:
        engine.update()
    run.stored["moments"] = moment_bytes(engine)
    run.stepping = recorder.seen
    for _ in range(run.trial.steps - 1):
        found.append(engine.backward(batches))
        findings += g2_replicas(run)
        engine.update()
    findings += g2_replicas(run)
    findings += u1_alive(run, before, pushed, found)
    findings += c1_collectives(run)
    findings += k1_bill(run, len(batches[0]), len(batches))
    return findings
