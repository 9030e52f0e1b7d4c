"""Verify a user's model on a user's mesh: make a source, run one process, run the mesh, compare.

    plan      validates everything, with the real sizes
    inspect   makes a small model, then for each dtype: one process, the mesh
              then one process and transformers

Each run is a set of forked processes: a failure, hang or death in one becomes a finding, and later runs continue.
Because it forks, this process never initialises a device or a process group.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..axes import Axes
from ..blueprint import Blueprint
from ..engine import load
from ..errors import ConfigError, RankError, counted
from ..log import quiet
from ..mesh import Mesh
from ..mesh.shared_devices import environment_of
from ..models import text_config
from ..ops.fp8_matmul import BLOCK
from ..optim import AdamW, Muon, Optimizer
from ..optim.int8_state import BLOCK as STATE_BLOCK
from ..plan import TINY, Say, check_devices, check_layout, check_memory, find
from ..recipe import MemoryOptions, Recipe
from .adapters import drawn, e3_resume, on_kinds
from .collective_checks import loading_findings
from .fp8_cost import measure_fp8_cost
from .local_ranks import run_ranks
from .planted_bugs import bug, check_felt
from .recorder import Recorder
from .reference import Reference, Trial, run_reference
from .results import Finding, Margin, Notes, read_notes
from .run_oracles import ORACLES, examine
from .small_data import FEW, LENGTH, LONG, Data
from .small_model import ODD, shrink
from .small_source import steps_of, vision_of, write_peers, write_small
from .transformers_oracles import compare_with_peft, compare_with_transformers
from .weight_checks import WeightCheck, check_weights, damaged_files, published_sums, strange_weights

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
_STEPS = {"float64": 3, "float32": 1, "bfloat16": 1}

RUN = "RUN"  # names the finding of a run that stopped before its end
WEIGHTS = "weights"  # a run that only loads the model unchanged and compares its bytes
FULL, SHRUNK = "full", "shrunk"
TRANSFORMERS = "transformers"  # the run that compares one process with transformers
PEFT = "peft"  # the run that compares adapters of one process with those of peft
IN_BLOCKS = "tiny-qwen3-moe-fp8"  # a tiny model whose matrices have whole blocks of 128
_TINY = 100_000  # elements of the model that the small part sizes were chosen for
_OF_PEER = ("M1", "R1")  # oracles that have a separate run
FP8 = "fp8"  # the run that measures what FP8 matmuls cost


@dataclass(frozen=True)
class Options:
    """The options of `meshwright verify`: which runs to try, and how.

    `kind`: SHRUNK runs a small model of the same kind, FULL the real model; WEIGHTS only loads. `seconds`: time limit
    of one run. `against`: TRANSFORMERS or "none". `seed`: of weights and data. `plant`: a bug to plant in the ranks of
    the mesh, to see an oracle catch it. `ranks_per_device`: how many ranks may share a GPU.
    """

    recipe: Recipe = Recipe()
    dtypes: Sequence[str] = tuple(DTYPES)
    kind: str = SHRUNK
    device: str = "cpu"
    seconds: float = 600.0
    against: str = TRANSFORMERS
    seed: int = 0
    plant: str = ""
    optimizer: Optimizer = AdamW()
    ranks_per_device: int = 1

    def __post_init__(self) -> None:
        if self.plant:
            bug(self.plant)
        unknown = [d for d in self.dtypes if d not in DTYPES]
        if unknown:
            raise ConfigError(f"dtype {unknown[0]!r} is unknown; choose from {', '.join(DTYPES)}")
        if not 0 < self.seconds < float("inf"):
            raise ConfigError(f"--seconds {self.seconds} must be above 0; the default is 600")
        if type(self.ranks_per_device) is not int or self.ranks_per_device < 1:
            raise ConfigError(f"--ranks-per-device {self.ranks_per_device!r} must be a whole number of at least 1")


@dataclass(frozen=True)
class Plan:
    """A validated request. `plan` makes it, and refuses what cannot run.

    `model`: the name that the user gave. `blueprint`: the model with its real sizes. `runs`: the model that runs, a
    small one or `blueprint` itself.
    """

    model: str
    blueprint: Blueprint
    runs: Blueprint
    axes: Axes
    options: Options

    @property
    def kind(self) -> str:
        return self.options.kind

    @property
    def num_batches(self) -> int:
        """The number of micro-batches of a step. A pipeline needs enough for each rank to reach the steady state of
        1F1B (arXiv:2104.04473). A vision tower needs at least three, so that in one no data rank has images."""
        return max(2 * self.axes.pp, 3 if self.runs.tower else 0)

    @property
    def directory(self) -> Path:
        assert self.blueprint.directory is not None, "`find` has refused a model that has no files"
        return self.blueprint.directory


@dataclass(frozen=True)
class RunResult:
    """The result of one run. `name`: its dtype, or WEIGHTS, TRANSFORMERS, PEFT or FP8.

    `oracles`: those that this run checks. `ended`: those that ran to completion, fewer if a rank stopped. `untried`:
    what it could not check, and why.
    """

    name: str
    seconds: float
    findings: Sequence[Finding]
    oracles: Sequence[str] = tuple(ORACLES)
    notes: Sequence[str] = ()
    margins: Sequence[Margin] = ()
    ended: Sequence[str] = tuple(ORACLES)
    untried: Sequence[str] = ()


def plan(model: str, axes: Axes, options: Options = Options(), say: Say = print) -> Plan:
    """Validate a request, and refuse everything that cannot run before any process starts."""
    check_devices(axes, options.device, model, options.ranks_per_device)
    if options.plant:
        check_felt(options.plant, axes, training=options.kind != WEIGHTS, adapters=options.recipe.lora is not None)
    runs = blueprint = find(model, options.recipe, weights=False, say=say)  # config and index suffice so far
    optimizer = options.optimizer
    optimizer.check(blueprint.table, blueprint.trained())
    # The real sizes first: a small model might fit a mesh that the real one does not.
    check_layout(blueprint, axes, 2 * axes.pp, optimizer)
    training = options.kind != WEIGHTS
    widest = max((DTYPES[d] for d in options.dtypes), key=lambda d: d.itemsize) if training else torch.float32
    if options.kind == SHRUNK and model not in TINY:
        runs = _small(blueprint, axes, options)
        check_layout(runs, axes, None, optimizer)
    if options.optimizer.state_dtype == torch.uint8 and options.recipe.lora is not None:
        raise ConfigError("adapters keep their optimizer state wide, so --state-dtype uint8 would change nothing here")
    if options.optimizer.state_dtype == torch.uint8 and not optimizer.quantised(runs.table, runs.table.params):
        raise ConfigError(f"{model} has no matrix whose moments would be in 8 bits; try {IN_BLOCKS}")
    check_memory(runs, axes, widest, options.device, model, training=training)
    if options.kind != SHRUNK:  # after all checks, because it may download many gigabytes
        runs = blueprint = find(model, options.recipe, weights=True, say=say)
    return Plan(model, blueprint, runs, axes, options)


def _small(of_all: Blueprint, axes: Axes, options: Options) -> Blueprint:
    """Return a small model of the same kind, of odd width where the family and the device allow it.

    Odd sizes leave remainders in every cut. But some families need heads to divide the width, device kernels need rows
    that are multiples of 16 bytes, and FP8 and 8-bit state need whole blocks.
    """
    stages = of_all.recipe.pipeline.stages
    num_stages = axes.pp * stages if axes.pp > 1 else 1
    block = BLOCK if options.recipe.fp8 else STATE_BLOCK if options.optimizer.state_dtype == torch.uint8 else 0
    small = partial(shrink, of_all.config, axes.tp, num_stages=num_stages, block=block)
    if options.device == "cpu" and not block:
        with contextlib.suppress(ConfigError):
            return _in_place_of(of_all, small(width=ODD))
    return _in_place_of(of_all, small())


def _in_place_of(of_all: Blueprint, config: Mapping[str, Any]) -> Blueprint:
    """Return the blueprint of a small model with the options of the large one, except those that name layers: the small
    model has too few layers for `ends` and for the patterns of `fp8_skip` and `lora.targets`."""
    pipeline = replace(of_all.recipe.pipeline, ends=None)
    recipe = replace(of_all.recipe, pipeline=pipeline, fp8=None, fp8_skip=(), lora=on_kinds(of_all))
    small = Blueprint.of(config, None, recipe)
    if not of_all.spec.fp8:
        return small
    in_fp8 = of_all.spec.fp8 & small.table.params.keys()
    skipped = [param.name for param in small.table if param.low and param.name not in in_fp8]
    return Blueprint.of(config, None, replace(small.recipe, fp8="block", fp8_skip=skipped))


def inspect(plan: Plan, say: Say) -> list[RunResult]:
    """Run a plan, and return the result of each of its runs. `say` receives a line of progress before each."""
    if plan.kind == WEIGHTS:
        return [_compare_weights(plan, say)]
    with quiet(), tempfile.TemporaryDirectory() as folder:
        source = make_source(plan, Path(folder), say)
        runs = [_run(plan, dtype, source, Path(folder), say) for dtype in plan.options.dtypes]
        runs += [_run_fp8_cost(plan, source, say)] if plan.options.recipe.fp8 and plan.kind == FULL else []
        if plan.options.against != TRANSFORMERS:
            return runs
        runs.append(_run_transformers(plan, Path(folder), say))
        return runs if plan.options.recipe.lora is None else [*runs, _run_peft(plan, Path(folder), say)]


def _run_fp8_cost(plan: Plan, source: Path, say: Say) -> RunResult:
    """Run P1: the real weights on one process, with and without FP8 matmuls."""
    began, low = time.monotonic(), trial_of(plan, "bfloat16", source)
    say("fp8: one process, compared with itself in bfloat16")
    try:
        notes, lines = run_ranks(
            1, measure_fp8_cost, low.with_options(fp8=None, fp8_skip=()), low, seconds=plan.options.seconds
        )[0]
    except RankError as error:
        return RunResult(FP8, time.monotonic() - began, [_stopped(1, error)], ("P1",), ended=())
    return RunResult(FP8, time.monotonic() - began, notes.findings, ("P1",), lines, notes.margins)


def _run_transformers(plan: Plan, folder: Path, say: Say) -> RunResult:
    """Run M1 and R1. They check the family, not the weights, so they always take a small language model of the family,
    with the vision tower if the run has one."""
    began, options, config = time.monotonic(), plan.options, _config_of_peers(plan)
    say("transformers: one process of ours, compared with its model")
    try:
        made = run_ranks(1, write_peers, config, plan.runs.tower, folder / "peers", options.seed,
                         seconds=options.seconds)  # fmt: skip
        layouts, vision = made[0]
        steps = steps_of(text_config(config)["vocab_size"], options.seed, vision)
        sources = [folder / "peers" / layout for layout in layouts]
        notes, why_not = run_ranks(
            1, compare_with_transformers, sources, steps, options.device, seconds=options.seconds
        )[0]
    except RankError as error:
        return RunResult(TRANSFORMERS, time.monotonic() - began, [_stopped(1, error)], _OF_PEER, ended=())
    seconds = time.monotonic() - began
    if why_not:
        return RunResult(TRANSFORMERS, seconds, [], (), untried=[f"{' and '.join(_OF_PEER)}, because {why_not}"])
    return RunResult(TRANSFORMERS, seconds, notes.findings, _OF_PEER, (), notes.margins, notes.ended)


def _run_peft(plan: Plan, folder: Path, say: Say) -> RunResult:
    """Run M2, on M1's small model, with adapters on the kinds of modules that the user chose."""
    began, options, config = time.monotonic(), plan.options, _without_dense_layers(_config_of_peers(plan))
    lora, at = drawn(on_kinds(plan.blueprint)), folder / "peft"
    assert lora is not None
    say("peft: one process of ours with adapters, compared with its layers in transformers' model")
    try:
        layouts, vision = run_ranks(1, write_peers, config, plan.runs.tower, at, options.seed,
                                    seconds=options.seconds)[0]  # fmt: skip
        first = next(iter(steps_of(text_config(config)["vocab_size"], options.seed, vision).values()))
        notes, why_not = run_ranks(
            1, compare_with_peft, at / layouts[0], first, lora, at / "adapter", seconds=options.seconds
        )[0]
    except RankError as error:
        return RunResult(PEFT, time.monotonic() - began, [_stopped(1, error)], ("M2",), ended=())
    seconds = time.monotonic() - began
    if why_not:
        return RunResult(PEFT, seconds, [], (), untried=[f"M2, because {why_not}"])
    return RunResult(PEFT, seconds, notes.findings, ("M2",), (), notes.margins, notes.ended)


def _without_dense_layers(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of a model with experts in every layer: in a Qwen3-MoE, peft 0.21 mistakes `gate_proj` of a
    dense layer for an expert's."""
    dense = {"mlp_only_layers": [], "decoder_sparse_step": 1}
    return {**config, **{name: value for name, value in dense.items() if name in config}}


def _config_of_peers(plan: Plan) -> dict[str, Any]:
    """Return the config of the small model that is compared with transformers; without a tower, only the text
    config."""
    config = dict(plan.runs.config if plan.kind == SHRUNK else shrink(plan.runs.config, 1))
    # transformers gives the embedding of the padding token no gradient
    text = {**text_config(config), "pad_token_id": None}
    return {**config, "text_config": text} if plan.runs.tower else text


def make_source(plan: Plan, folder: Path, say: Say) -> Path:
    """Return the source to try: the user's directory, or a small model that is written to `folder`."""
    if plan.kind == FULL:
        return plan.directory
    source = folder / "model"
    say("making a model of odd sizes")
    # Like the user's files: in bfloat16, with the same names and layout of experts.
    choice, head = plan.blueprint.keymap.choice, "lm" if lacks_head(plan.blueprint) else plan.runs.head
    run_ranks(1, write_small, source, plan.runs, choice, torch.bfloat16, plan.options.seed, head,
              seconds=plan.options.seconds)  # fmt: skip
    return source


def lacks_head(blueprint: Blueprint) -> bool:
    """Return whether the value head is new, because the files lack it. Without files, adapters are taken to start from
    a language model."""
    if blueprint.head != "value":
        return False
    keymap = blueprint.keymap
    if keymap.source is None:
        return blueprint.recipe.lora is not None
    return any(blueprint.table[name].optional for name in keymap.fresh)


def trial_of(plan: Plan, dtype: str, source: Path) -> Trial:
    """Return the trial of a run: the plan's model, mesh and options with the data and steps that its dtype gets."""
    share = plan.axes.tp * plan.axes.cp
    length, few, long = (-(-n // share) * share for n in (LENGTH, FEW, LONG))  # tp x cp must divide a batch
    head, small = plan.runs.head, plan.kind == SHRUNK
    special = (few, long) if small else (0, 0)
    pp = plan.axes.pp
    # All steps of a pipeline have several micro-batches. The aux loss has a gradient from the second step on, and each
    # micro-batch has its own padding. Interleaved stages take micro-batches in groups of pp.
    data = Data(
        plan.num_batches, length, plan.runs.vocab, head == "value", *special, seed=plan.options.seed,
        num_special=pp, vision=vision_of(plan.runs),
    )  # fmt: skip
    recipe = replace(
        plan.runs.recipe, dtype=DTYPES[dtype], memory=memory_of(plan, dtype), lora=drawn(plan.runs.recipe.lora),
        train=("**" if plan.runs.recipe.lora else "*") if small else trainable(plan.blueprint),
    )  # fmt: skip
    return Trial(
        source, plan.axes, data, recipe, steps=_STEPS[dtype], router_aux="previous" if pp > 1 else "pooled",
        keeps_all=small, draws=small, optimizer=optimizer_of(plan, dtype),
        small_parts=_small_parts(plan, dtype) if small else 0,
        checkpoint=source.parent / f"{dtype} checkpoint" if small else None,
    )  # fmt: skip


def optimizer_of(plan: Plan, dtype: str) -> Optimizer:
    """Return the optimizer of a trial. In float64 Muon iterates in float64: in bfloat16, one element that rounds
    differently changes a whole update. Other dtypes compare no updates, and count the bytes of the user's iteration."""
    optimizer = plan.options.optimizer
    if isinstance(optimizer, Muon) and dtype == "float64":
        return replace(optimizer, matrix_dtype=None)
    return optimizer


def _small_parts(plan: Plan, dtype: str) -> int:
    """Return a factor of the small part sizes with which they split the model a few times. It is 0 in float32, for the
    sizes of real runs, so that both are tried."""
    num = sum(param.numel for param in plan.runs.table)
    return 0 if dtype == "float32" else max(1, num // _TINY)


def memory_of(plan: Plan, dtype: str) -> MemoryOptions:
    """Return the memory options of a run. If the user passes none, the float32 run tries two that change how a step
    runs."""
    if plan.options.recipe.memory == MemoryOptions() and dtype == "float32" and plan.kind == SHRUNK:
        return MemoryOptions(recompute="selective", sum_once=True)
    return plan.options.recipe.memory


def trainable(blueprint: Blueprint) -> Sequence[str]:
    """Return patterns of the parameters that can be trained: not those in read-only formats. With adapters, "**" means
    only the adapters."""
    if blueprint.recipe.lora is not None:
        return ("**",)
    frozen = {param.name for param in blueprint.table if blueprint.keymap.only_read(param) is not None}
    return [name for name in blueprint.table.params if name not in frozen] if frozen else ("**",)


def _run(plan: Plan, dtype: str, source: Path, folder: Path, say: Say) -> RunResult:
    """Run one process, then the mesh, in one dtype. A run that stops is a finding; the notes of its ranks remain."""
    began, trial, seconds = time.monotonic(), trial_of(plan, dtype, source), plan.options.seconds
    num, stopped, notes_dir = 1, list[Finding](), folder / f"{dtype} notes"
    notes_dir.mkdir()
    try:
        say(f"{dtype}: one process")
        reference = run_ranks(num, run_reference, trial, seconds=seconds)[0]
        num = plan.axes.world
        say(f"{dtype}: {counted(num, 'rank')}, {plan.axes}")
        run_ranks(num, _examine, plan, trial, reference, notes_dir, seconds=seconds)
        if trial.checks_resuming and not read_notes(notes_dir).findings:  # else training already went wrong
            num = 1
            say(f"{dtype}: one process, resumed from the checkpoint of the ranks")
            run_ranks(num, _resume, trial, reference, notes_dir, seconds=seconds)
    except RankError as error:
        stopped = [_stopped(num, error)]
    notes, oracles = read_notes(notes_dir), oracles_of(trial)
    ended = [oracle for oracle in oracles if oracle in notes.ended]
    findings = [*stopped, *notes.findings]
    lines = [f"with {options}"] if (options := options_of(trial)) else []
    return RunResult(dtype, time.monotonic() - began, findings, oracles, lines, notes.margins, ended)


def options_of(trial: Trial) -> str:
    """Return the options that differ from the defaults, spelled as for `mw.MemoryOptions` and `mw.Engine`."""
    options, plain = asdict(trial.recipe.memory), asdict(MemoryOptions())
    texts = [f"{name}={value!r}" for name, value in options.items() if value != plain[name]]
    state, kind = trial.optimizer.state_dtype, type(trial.optimizer)
    texts += [f"optimizer=mw.{kind.__name__}"] if kind is not AdamW else []
    return ", ".join([*texts, *([f"state_dtype={state}"] if state else [])])


def oracles_of(trial: Trial) -> list[str]:
    """Return the oracles that a trial runs. M1, M2, R1 and P1 have separate runs."""
    optional = {
        "O1": trial.checks_updates, "E2": trial.checks_exports, "H1": trial.checks_entropy,
        "Q1": trial.checks_fp8_matmuls, "A1": trial.recipe.lora is not None, "E3": trial.checks_resuming,
        **dict.fromkeys((*_OF_PEER, "M2", "P1"), False),
    }  # fmt: skip
    return [oracle for oracle in ORACLES if optional.get(oracle, True)]


def _stopped(num_ranks: int, error: RankError) -> Finding:
    """Return the finding of a run that a rank stopped, with the ranks' last lines."""
    return Finding(RUN, "one process" if num_ranks == 1 else counted(num_ranks, "rank"), f"it stopped\n{error}")


def mesh_of(plan: Plan) -> Mesh:
    """Return the mesh of a plan; each rank calls it."""
    seconds = plan.options.seconds
    os.environ.update(environment_of(int(os.environ["RANK"]), plan.options.ranks_per_device))
    # collectives time out sooner than the run, so that an error names the door; but with WEIGHTS a rank may wait for
    # the slowest reader
    timeout_s = seconds if plan.kind == WEIGHTS else min(seconds, 60.0)
    return Mesh(**asdict(plan.axes), device=plan.options.device, timeout_s=timeout_s)


def _examine(plan: Plan, trial: Trial, reference: Reference, notes_dir: Path) -> None:
    mesh = mesh_of(plan)
    store = dist.distributed_c10d._get_default_store() if plan.axes.world > 1 else None
    _plant(plan)
    examine(trial, reference, mesh, store, Notes(notes_dir / f"{mesh.rank}.notes"))


def _resume(trial: Trial, reference: Reference, notes_dir: Path) -> None:
    notes = Notes(notes_dir / "resumed.notes")
    notes.add_findings("E3", e3_resume(trial, reference, notes))


def _plant(plan: Plan) -> None:
    """Plant the bug that the user chose, in this rank."""
    if plan.options.plant:
        bug(plan.options.plant).plant()


def _compare_weights(plan: Plan, say: Say) -> RunResult:
    """Load the real weights on the mesh and compare their bytes with the files, and the files with the hub."""
    began, num = time.monotonic(), plan.axes.world
    say(f"{plan.directory}: loading on {counted(num, 'rank')}, {plan.axes}, then comparing")
    try:
        ranks = run_ranks(num, _load_and_compare, plan, seconds=plan.options.seconds)
    except RankError as error:
        return RunResult(WEIGHTS, time.monotonic() - began, [_stopped(num, error)], ("L1", "W1"))
    check: WeightCheck = ranks[0][1]
    findings = [finding for of_rank, _ in ranks for finding in of_rank]
    findings += [Finding("W1", d.name, str(d)) for d in check.differences]
    files = plan.blueprint.keymap.files
    sums = published_sums(plan.directory, files)
    say(f"sha256 of {counted(len(sums), 'file')} that the hub's cache knows")
    findings += damaged_files(plan.directory, sums)
    notes = [f"{counted(check.num_differences, 'box', 'boxes')} differ; an element that two ranks store counts twice"]
    notes += [f"{name} is not in the files and was drawn: nothing to compare" for name in check.skipped]
    if len(sums) < len(files):
        notes.append(f"the published sha256 of {counted(len(files) - len(sums), 'file')} is not known")
    margins = [Margin("L1", "collectives", 0), Margin("W1", "elements of all ranks", check.num_elements)]
    margins += [Margin("W1", "files with the hub's sha256", len(sums))] if sums else []
    return RunResult(WEIGHTS, time.monotonic() - began, findings, ("L1", "W1"), notes, margins)


def _load_and_compare(plan: Plan) -> tuple[list[Finding], WeightCheck]:
    """Load the real weights on a rank and compare them. -> this rank's findings, the comparison over all ranks"""
    # Trained parameters are stored in float32, which would round files of float64; bytes are compared, so load those
    # in float64.
    wide = "F64" in {key.dtype for key in plan.blueprint.keymap.keys.values()}
    dtype, train, mesh = torch.float64 if wide else None, trainable(plan.blueprint), mesh_of(plan)
    recipe = plan.options.recipe.plain(dtype=dtype, train=train)
    _plant(plan)
    with Recorder() as recorder:
        model = load(plan.directory, mesh, **vars(recipe))
    return [*loading_findings(recorder.collectives), *strange_weights(model)], check_weights(model)
