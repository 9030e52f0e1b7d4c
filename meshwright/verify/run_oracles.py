"""Run all oracles in their order, in one load and a few steps.

    load        L1 T1 W1 E1    what ranks store, before any computation
    forward     D1 Q1          with the source's weights
    each step   S1 (first)     after backward: the loss
                G1 N1 G2 A1    between backward and update
                U1 G2          after the update
    the end     U1 A1 H1 E2    later losses, the base of adapters, a loss with entropy, exports of trained weights
                C1 K1          the collectives of the first step

M1, M2, R1, O1, E3 and P1 check one process, and run elsewhere. Oracles communicate, so all ranks must run the same
ones: they first agree on whatever decides that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext

from torch._C._distributed_c10d import PrefixStore, Store

from ..engine import save
from ..mesh import Mesh
from ..sharding import STATE
from .adapters import a1_base, a1_frozen, e3_resume
from .collective_checks import c1_collectives, k1_bill, l1_silent_load, stored_bytes, watching_routes
from .entropy import backward_with_entropy, h1_entropy
from .exports import e2_exports
from .fp8_cost import p1_cost
from .fp8_matmuls import q1_matmuls
from .independent_checks import o1_updates
from .oracles import (
    d1_documents,
    e1_export,
    g1_gradients,
    g2_replicas,
    n1_norm,
    s1_loss,
    t1_tiling,
    u1_alive,
    u1_update,
    w1_load,
)
from .poisoned_memory import poisoned_memory
from .recorder import Recorder
from .reference import Reference, Run, Trial, everywhere, part_sizes_of
from .results import Finding, Notes
from .rounding import r1_rounding
from .transformers_oracles import m1_against, m2_against

# In the order of the report: an error makes later oracles fail too, so begin with the first failure.
ORACLES: dict[str, Callable[..., Iterator[Finding]]] = {
    "L1": l1_silent_load, "T1": t1_tiling, "W1": w1_load, "E1": e1_export, "M1": m1_against, "M2": m2_against,
    "R1": r1_rounding, "D1": d1_documents, "Q1": q1_matmuls, "S1": s1_loss, "G1": g1_gradients, "N1": n1_norm,
    "G2": g2_replicas, "O1": o1_updates, "U1": u1_update, "A1": a1_base, "H1": h1_entropy, "E2": e2_exports,
    "E3": e3_resume, "C1": c1_collectives, "K1": k1_bill, "P1": p1_cost,
}  # fmt: skip


def examine(
    trial: Trial, reference: Reference, mesh: Mesh, store: Store | None = None, notes: Notes | None = None
) -> list[Finding]:
    """Run the trial on the mesh and return the findings of this rank. Every rank calls it.

    Rank 0 also returns the findings of one process. `notes` receives findings and margins as soon as they are known.
    `store`: lets ranks compare their collectives before they issue them, so that ranks that disagree do not hang.
    """
    notes = notes or Notes()
    if mesh.rank == 0:
        notes.add(reference.notes)
    with part_sizes_of(trial), poisoned_memory() if trial.keeps_all else nullcontext():
        _examine(trial, reference, mesh, store, notes)
    return notes.findings


def _examine(trial: Trial, reference: Reference, mesh: Mesh, store: Store | None, notes: Notes) -> None:
    """Load, and run the oracles of loading and of the forward pass, then those of the steps.

    Each recorder has a prefix of its keys in the store, since each counts its collectives from 0.
    """
    with Recorder(store and PrefixStore("load", store), mesh.rank) as loading:
        engine = trial.engine(mesh)
    run = Run(trial, reference, engine, notes, loading.collectives)
    for name, check in (
        ("L1", l1_silent_load),
        ("T1", t1_tiling),
        ("W1", w1_load),
        ("E1", e1_export),
        ("D1", d1_documents),
    ):
        notes.add_findings(name, check(run))
    if trial.checks_fp8_matmuls:
        notes.add_findings("Q1", q1_matmuls(engine, trial.batches(engine.model, 0), notes))
    with_entropy = None
    if trial.checks_entropy:
        # H1 compares gradients of the untrained model, so its pass comes before the first step.
        with Recorder(store and PrefixStore("entropy", store), mesh.rank):  # names a rank that skips a collective
            with_entropy = backward_with_entropy(engine.model, trial.batches(engine.model, 0), trial.router_aux)
    _steps(run, store)
    if with_entropy is not None and not run.blame:  # else the loss with entropy is wrong too, and H1 says nothing new
        notes.add_findings("H1", h1_entropy(run, with_entropy))


def _steps(run: Run, store: Store | None) -> None:
    """Train the trial's steps, and check each between backward and update, and after the update.

    The first step is recorded for C1 and K1. Collectives of the oracles are not: they run outside of `recorder`.
    """
    engine, mesh, notes, trial = run.engine, run.model.mesh, run.notes, run.trial
    batches, losses = trial.batches(run.model, 0), []
    before, with_gradient = {n: t.clone() for n, t in run.model.stored().items()}, set[str]()
    with Recorder(store and PrefixStore("evaluate", store), mesh.rank):
        evaluated = engine.evaluate(batches)
    recorder = Recorder(store and PrefixStore("step", store), mesh.rank)
    for step in range(trial.steps):
        first = step == 0
        if trial.checkpoint is not None and trial.checks_resuming and step == trial.steps - 1:
            save(engine, trial.checkpoint)
        with recorder if first else nullcontext(), watching_routes(run) if first else nullcontext():
            losses.append(engine.backward(trial.batches(run.model, step)))
        if first:
            with_gradient = {name for name, grad in run.model.grads().items() if grad.any()}
            run.stored = stored_bytes(engine)
            notes.add_findings("S1", s1_loss(run, losses[0], evaluated))
        notes.add_findings("G1", g1_gradients(run, step))
        with Recorder(store and PrefixStore(f"norm {step}", store), mesh.rank):  # names a rank that skips a norm
            notes.add_findings("N1", n1_norm(run, step))
        notes.add_findings("G2", g2_replicas(run))
        if first and trial.recipe.lora is not None:
            notes.add_findings("A1", a1_frozen(run))
        with recorder if first else nullcontext():
            engine.update()
        if first:
            run.stored[STATE] = engine.optimizer.num_bytes
        notes.add_findings("U1", u1_update(run, step, before, with_gradient))
        notes.add_findings("G2", g2_replicas(run))  # again: ranks may update copies differently
    run.step_collectives = recorder.collectives
    notes.add_findings("U1", u1_alive(run, losses))
    if trial.recipe.lora is not None:
        notes.add_findings("A1", a1_base(run, before))
    # Export only if no oracle failed on any rank: if copies differ, exports would differ too.
    if trial.checks_exports and not any(n for (n,) in everywhere(mesh, [int(bool(run.blame))])):
        notes.add_findings("E2", e2_exports(run))
    notes.add_findings("C1", c1_collectives(run))
    notes.add_findings("K1", k1_bill(run, len(batches[0]), len(batches)))
