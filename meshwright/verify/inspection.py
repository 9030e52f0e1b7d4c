"""Verify a model of the user on a mesh of the user: make a source, run one process, run the mesh, compare them."""

from __future__ import annotations

import functools
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from ..axes import Axes
from ..blueprint import Blueprint, draw
from ..engine import export, init, load
from ..errors import ConfigError, RankError
from ..log import quiet
from ..mesh import Mesh
from ..plan import TINY, Say, check_devices, check_layout, check_memory, find
from ..weights import of_table
from .data import LENGTH, ragged
from .oracles import ORACLES, Finding, examine, silent
from .ranks import run_ranks
from .recorder import Recorder
from .shrink import shrink
from .trial import Reference, Trial, refer
from .weights import WeightCheck, check_weights

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
_STEPS = {"float64": 3, "float32": 1, "bfloat16": 1}

RUN = "RUN"  # the finding where a run stopped before its end
WEIGHTS = "weights"  # a run that loads the model as it is and compares its bytes, and does no more
FULL, SHRUNK = "full", "shrunk"


@dataclass(frozen=True)
class Options:
    """What of a model is to be tried, and how."""

    head: str = "lm"
    dtypes: Sequence[str] = tuple(DTYPES)
    kind: str = SHRUNK  # or FULL, or WEIGHTS
    device: str = "cpu"
    seconds: float = 600.0  # that one run may take

    def __post_init__(self) -> None:
        unknown = [d for d in self.dtypes if d not in DTYPES]
        if unknown:
            raise ConfigError(f"dtype {unknown[0]!r} is unknown; choose from {', '.join(DTYPES)}")
        if not 0 < self.seconds < float("inf"):
            raise ConfigError(f"--seconds {self.seconds} must be above 0; the default is 600")


@dataclass(frozen=True)
class Plan:
    """What is to be tried. Made by `plan`, which refuses what cannot be."""

    model: str  # as the user names it
    blueprint: Blueprint  # in its real sizes
    runs: Blueprint  # what runs in its place: small, or the same
    axes: Axes
    options: Options

    @property
    def kind(self) -> str:
        return self.options.kind

    @property
    def directory(self) -> Path:
        assert self.blueprint.directory is not None, "`find` has refused a model that has no files"
        return self.blueprint.directory


@dataclass(frozen=True)
class RunResult:
    """What was found in one run. `name`: its dtype, or WEIGHTS."""

    name: str
    seconds: float
    findings: Sequence[Finding]
    oracles: Sequence[str] = tuple(ORACLES)  # what was asked
    notes: Sequence[str] = ()


def plan(model: str, axes: Axes, options: Options = Options(), say: Say = print) -> Plan:
    """Everything that can be refused is refused here, before any process starts."""
    check_devices(axes, options.device, model)
    runs = blueprint = find(model, options.head, weights=False, say=say)
    check_layout(blueprint, axes)
    training = options.kind != WEIGHTS
    widest = max((DTYPES[d] for d in options.dtypes), key=lambda d: d.itemsize) if training else torch.float32
    if options.kind == SHRUNK and model not in TINY:
        runs = draw(shrink(blueprint.config, axes.tp), head=options.head)
        check_layout(runs, axes)
    check_memory(runs, axes, widest, options.device, model, training=training)
    if options.kind != SHRUNK:  # not before: it may fetch many gigabytes
        runs = blueprint = find(model, options.head, weights=True, say=say)
    return Plan(model, blueprint, runs, axes, options)


def inspect(plan: Plan, say: Say) -> list[RunResult]:
    """Run it. `say` is told what is going on."""
    if plan.kind == WEIGHTS:
        return [_compare_weights(plan, say)]
    with quiet(), tempfile.TemporaryDirectory() as folder:
        source = source_of(plan, Path(folder), say)
        return [_run(plan, dtype, source, say) for dtype in plan.options.dtypes]


def source_of(plan: Plan, folder: Path, say: Say) -> Path:
    """The directory that is tried: the user's, or a small model that is made in `folder`."""
    if plan.kind == FULL:
        return plan.directory
    source = folder / "model"
    say("making a model of odd sizes")
    run_ranks(1, _make, plan, folder / "recipe", source, seconds=plan.options.seconds)
    return source


def trial_of(plan: Plan, dtype: str, source: Path) -> Trial:
    share = plan.axes.tp * plan.axes.cp
    length = -(-LENGTH // share) * share  # a batch divides into the shares of a data rank
    head = plan.options.head
    data = functools.partial(ragged, vocab=plan.runs.vocab, length=length, target=head == "value")
    return Trial(source, plan.axes, data, head, DTYPES[dtype], steps=_STEPS[dtype])


def _run(plan: Plan, dtype: str, source: Path, say: Say) -> RunResult:
    began, trial, seconds = time.monotonic(), trial_of(plan, dtype, source), plan.options.seconds
    num = 1
    try:
        say(f"{dtype}: one process")
        reference = run_ranks(num, refer, trial, seconds=seconds)[0]
        num = plan.axes.world
        say(f"{dtype}: {num} ranks, {plan.axes}")
        ranks = run_ranks(num, _examine, plan, trial, reference, seconds=seconds)
        found = list(dict.fromkeys(finding for of_rank in ranks for finding in of_rank))  # what all say, once
    except RankError as error:
        found = [_stopped(num, error)]
    return RunResult(dtype, time.monotonic() - began, found)


def _stopped(num_ranks: int, error: RankError) -> Finding:
    return Finding(RUN, "one process" if num_ranks == 1 else f"{num_ranks} ranks", f"it stopped\n{error}")


def mesh_of(plan: Plan) -> Mesh:
    a, seconds = plan.axes, plan.options.seconds
    # with WEIGHTS a rank may have to wait until the slowest has read its part
    patience = seconds if plan.kind == WEIGHTS else min(seconds, 60.0)
    return Mesh(a.pp, a.replicate, a.fsdp, a.cp, a.tp, a.ep, device=plan.options.device, timeout_s=patience)


def _examine(plan: Plan, trial: Trial, reference: Reference) -> list[Finding]:
    mesh = mesh_of(plan)
    store = dist.distributed_c10d._get_default_store() if plan.axes.world > 1 else None
    return examine(trial, reference, mesh, store)


def _compare_weights(plan: Plan, say: Say) -> RunResult:
    began, num = time.monotonic(), plan.axes.world
    say(f"{plan.directory}: loading on {plan.axes.world} ranks, {plan.axes}, then comparing")
    try:
        ranks = run_ranks(num, _load_and_compare, plan, seconds=plan.options.seconds)
    except RankError as error:
        return RunResult(WEIGHTS, time.monotonic() - began, [_stopped(num, error)], ("L1", "W1"))
    check: WeightCheck = ranks[0][1]
    found = [finding for of_rank, _ in ranks for finding in of_rank]
    found += [Finding("W1", d.name, str(d)) for d in check.differences]
    compared = f"{check.num_elements} elements compared on {num} ranks; an element that two ranks store counts twice"
    notes = [f"{compared}; {check.num_differences} boxes differ"]
    notes += [f"{name} is not in the files and was drawn: nothing to compare" for name in check.skipped]
    return RunResult(WEIGHTS, time.monotonic() - began, found, ("L1", "W1"), notes)


def _load_and_compare(plan: Plan) -> tuple[list[Finding], WeightCheck]:
    wide = "F64" in {key.dtype for key in plan.blueprint.keymap.keys.values()}
    mesh = mesh_of(plan)
    with Recorder() as recorder:
        model = load(plan.directory, mesh, head=plan.options.head, dtype=torch.float64 if wide else None)
    return list(silent(recorder.seen)), check_weights(model)


def _make(plan: Plan, recipe: Path, at: Path) -> None:
    """Random weights, all away from values such as 0 and 1 that would hide a mistake."""
    recipe.mkdir()
    (recipe / "config.json").write_text(json.dumps(dict(plan.runs.config)))
    model = init(recipe, Mesh(device="cpu"), head=plan.options.head, dtype=torch.float32)
    g = torch.Generator().manual_seed(1)
    for stored in model.stored().values():
        stored.add_(torch.randn(stored.shape, generator=g), alpha=0.05)
    keymap = of_table(model.table, torch.bfloat16, plan.blueprint.keymap.choice)  # as the user's files are spelled
    model.blueprint = replace(model.blueprint, keymap=keymap)
    export(model, at)
