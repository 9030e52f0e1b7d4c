"""A model of the user's on a mesh of the user's: make a source, find out what one process says, examine the mesh."""

from __future__ import annotations

import functools
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..engine import export, init, load
from ..errors import ConfigError, RankError
from ..log import quiet
from ..mesh import Axes, Mesh, refuse_unbuilt
from ..models import describe, prefix_of, text_config
from ..weights import of_table
from .data import LENGTH, ragged
from .oracles import ORACLES, Finding, examine, silent
from .precision import Cost, Portrait, Precision, cost_of, portray
from .ranks import run_ranks
from .recorder import Recorder
from .shrink import TINY, shrink
from .subject import Say, Subject, check_devices, check_layout, check_memory, find
from .trial import Reference, Trial, refer
from .weights import WeightCheck, check_weights

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
_STEPS = {"float64": 3, "float32": 1, "bfloat16": 1}

RUN = "RUN"  # the finding where a run stopped before its end
WEIGHTS = "weights"  # a run that loads the model as it is and compares its bytes, and does no more
FULL, SHRUNK = "full", "shrunk"


@dataclass(frozen=True)
class Plan:
    """What is to be tried. Made by `plan`, which refuses what cannot be."""

    subject: Subject  # the model as it is
    config: Mapping[str, Any]  # of what runs: shrunk, or not
    axes: Axes
    head: str
    dtypes: Sequence[str]
    kind: str  # FULL, SHRUNK or WEIGHTS
    device: str = "cpu"
    seconds: float = 600.0

    @property
    def vocab(self) -> int:
        return int(text_config(self.config)["vocab_size"])

    @property
    def choice(self) -> Mapping[str, str]:
        return self.subject.choice


@dataclass(frozen=True)
class Part:
    """What was found in one run. `name`: its dtype, or WEIGHTS."""

    name: str
    seconds: float
    findings: Sequence[Finding]
    oracles: Sequence[str] = tuple(ORACLES)  # what was asked
    notes: Sequence[str] = ()
    precision: Precision | None = None  # what bfloat16 adds, where that was asked


def plan(
    model: str, axes: Axes, *, head: str = "lm", dtypes: Sequence[str] = tuple(DTYPES), kind: str = SHRUNK,
    device: str = "cpu", seconds: float = 600.0, say: Say = print,
) -> Plan:  # fmt: skip
    """Everything that can be refused is refused here, before any process."""
    unknown = [d for d in dtypes if d not in DTYPES]
    if unknown:
        raise ConfigError(f"dtype {unknown[0]!r} is unknown; choose from {', '.join(DTYPES)}")
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"--seconds {seconds}: one run may take some seconds above 0; the default is 600")
    refuse_unbuilt(axes)
    check_devices(axes, device)
    subject = find(model, head, False, say)
    check_layout(subject.module, subject.table, axes)
    widest = torch.float32 if kind == WEIGHTS else max((DTYPES[d] for d in dtypes), key=lambda d: d.itemsize)
    config, drawing = subject.config, (subject.module, subject.table)
    if kind == SHRUNK and model not in TINY:
        config = shrink(config, axes.tp)
        drawing = describe(config, prefix_of(config, None), head)
        check_layout(*drawing, axes)
    check_memory(*drawing, axes, widest, device, training=kind != WEIGHTS)
    if kind != SHRUNK:  # not before: it may fetch many gigabytes
        subject = find(model, head, True, say)
    return Plan(subject, config, axes, head, tuple(dtypes), kind, device, seconds)


def inspect(plan: Plan, say: Say) -> list[Part]:
    """Run it. `say` is told what is going on."""
    if plan.kind == WEIGHTS:
        return [_compare_weights(plan, say)]
    with quiet(), tempfile.TemporaryDirectory() as folder:
        source = plan.subject.directory
        if plan.kind == SHRUNK or source is None:
            source = Path(folder) / "model"
            say("making a model of odd sizes")
            run_ranks(1, _make, plan, Path(folder) / "recipe", source, seconds=plan.seconds)
        return _with_precision(plan, [_part(plan, dtype, source, say) for dtype in plan.dtypes], source, say)


def _trial(plan: Plan, dtype: str, source: Path) -> Trial:
    share = plan.axes.tp * plan.axes.cp
    length = -(-LENGTH // share) * share  # a batch divides into the shares of a data rank
    data = functools.partial(ragged, vocab=plan.vocab, length=length, target=plan.head == "value")
    return Trial(source, plan.axes, data, plan.head, DTYPES[dtype], steps=_STEPS[dtype])


def _part(plan: Plan, dtype: str, source: Path, say: Say) -> Part:
    began, trial = time.monotonic(), _trial(plan, dtype, source)
    num = 1
    try:
        say(f"{dtype}: one process")
        reference = run_ranks(num, refer, trial, seconds=plan.seconds)[0]
        num = plan.axes.world
        say(f"{dtype}: {num} ranks, {plan.axes}")
        ranks = run_ranks(plan.axes.world, _examine, plan, trial, reference, seconds=plan.seconds)
        found = list(dict.fromkeys(finding for of_rank in ranks for finding in of_rank))  # what all say, once
    except RankError as error:
        found = [_stopped(num, error)]
    return Part(dtype, time.monotonic() - began, found)


def _with_precision(plan: Plan, parts: list[Part], source: Path, say: Say) -> list[Part]:
    """Of a model as it is: random weights would tell nothing of what bfloat16 costs."""
    wide = next((d for d in ("float64", "float32") if d in plan.dtypes), None)
    stopped = any(finding.oracle == RUN for part in parts for finding in part.findings)
    if plan.kind != FULL or "bfloat16" not in plan.dtypes or wide is None or stopped:
        return parts
    say(f"what bfloat16 adds to {wide}: one process, then {plan.axes.world} ranks")
    try:
        found = _measured(plan, wide, source)
    except RankError as error:  # what the oracles found is not lost with it
        return [*parts[:-1], replace(parts[-1], notes=[f"what bfloat16 adds is not known: {error}"])]
    return [replace(part, precision=found) if part.name == "bfloat16" else part for part in parts]


def _measured(plan: Plan, wide: str, source: Path) -> Precision:
    def run(size: int, dtype: str) -> Cost:
        told: list[Cost] = run_ranks(size, _cost, plan, dtype, source, size, measure, seconds=plan.seconds)
        return told[0]

    measure = run_ranks(1, portray, _trial(plan, wide, source), seconds=plan.seconds)[0]
    costs = {"bfloat16, one process": run(1, "bfloat16")}
    for dtype in ("bfloat16", wide) if plan.axes.world > 1 else ():
        costs[f"{dtype}, {plan.axes}"] = run(plan.axes.world, dtype)
    return Precision(f"{wide}, one process", costs)


def _cost(plan: Plan, dtype: str, source: Path, size: int, measure: Portrait) -> Cost | None:
    trial = _trial(plan, dtype, source)
    mesh = _mesh(plan) if size > 1 else None
    found = portray(trial, mesh)
    return cost_of(found, measure, trial.data(0), plan.head) if mesh is None or mesh.rank == 0 else None


def _stopped(num_ranks: int, error: RankError) -> Finding:
    return Finding(RUN, "one process" if num_ranks == 1 else f"{num_ranks} ranks", f"it stopped\n{error}")


def _mesh(plan: Plan) -> Mesh:
    a = plan.axes
    patience = plan.seconds if plan.kind == WEIGHTS else min(plan.seconds, 60.0)  # there, until the slowest has read
    return Mesh(a.pp, a.replicate, a.fsdp, a.cp, a.tp, a.ep, device=plan.device, timeout_s=patience)


def _examine(plan: Plan, trial: Trial, reference: Reference) -> list[Finding]:
    mesh = _mesh(plan)
    store = dist.distributed_c10d._get_default_store() if plan.axes.world > 1 else None
    return examine(trial, reference, mesh, store)


def _compare_weights(plan: Plan, say: Say) -> Part:
    began = time.monotonic()
    say(f"{plan.subject.directory}: loading on {plan.axes.world} ranks, {plan.axes}, then comparing")
    try:
        ranks = run_ranks(plan.axes.world, _load_and_compare, plan, seconds=plan.seconds)
    except RankError as error:
        return Part(WEIGHTS, time.monotonic() - began, [_stopped(plan.axes.world, error)], ("L1", "W1"))
    check: WeightCheck = ranks[0][1]
    found = [finding for of_rank, _ in ranks for finding in of_rank]
    found += [Finding("W1", d.name, str(d)) for d in check.differences]
    compared = f"{check.num_elements} elements compared on {plan.axes.world} ranks, those stored twice also twice"
    notes = [f"{compared}; {check.num_differences} boxes differ"]
    notes += [f"{name} is not in the files and was drawn: nothing to compare" for name in check.skipped]
    return Part(WEIGHTS, time.monotonic() - began, found, ("L1", "W1"), notes)


def _load_and_compare(plan: Plan) -> tuple[list[Finding], WeightCheck]:
    assert plan.subject.directory is not None
    wide = "F64" in plan.subject.dtypes
    mesh = _mesh(plan)
    with Recorder() as recorder:
        model = load(plan.subject.directory, mesh, head=plan.head, dtype=torch.float64 if wide else None)
    return list(silent(recorder.seen)), check_weights(model)


def _make(plan: Plan, recipe: Path, at: Path) -> None:
    """Random weights, all away from values such as 0 and 1 that would hide a mistake."""
    recipe.mkdir()
    (recipe / "config.json").write_text(json.dumps(dict(plan.config)))
    model = init(recipe, Mesh(device="cpu"), head=plan.head, dtype=torch.float32)
    g = torch.Generator().manual_seed(1)
    for stored in model.stored().values():
        stored.add_(torch.randn(stored.shape, generator=g), alpha=0.05)
    model.spelling = of_table(model.table, torch.bfloat16, plan.choice)
    export(model, at)
