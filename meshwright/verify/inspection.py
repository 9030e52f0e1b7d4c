"""A model of the user's on a mesh of the user's: make a source, find out what one process says, examine the mesh."""

from __future__ import annotations

import functools
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .. import parallel
from ..engine import export, init
from ..errors import ConfigError, MeshError, RankError
from ..layout import Rules, pieces
from ..log import quiet
from ..mesh import Axes, Mesh, refuse_unbuilt
from ..models import describe, prefix_of, text_config
from ..weights import choose, of_table, open_source, read_config
from .data import LENGTH, ragged
from .oracles import Finding, examine
from .ranks import run_ranks
from .shrink import TINY, shrink
from .trial import Reference, Trial, refer

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
_STEPS = {"float64": 3, "float32": 1, "bfloat16": 1}

RUN = "RUN"  # the finding where a run stopped before its end

Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """What is to be tried. Made by `plan`, which refuses what cannot be."""

    config: Mapping[str, Any]
    axes: Axes
    head: str
    dtypes: Sequence[str]
    directory: Path | None = None  # of the weights themselves; without, they are drawn
    choice: Mapping[str, str] = field(default_factory=dict)  # how the model's files spell it
    device: str = "cpu"
    seconds: float = 600.0

    @property
    def vocab(self) -> int:
        return int(text_config(self.config)["vocab_size"])


@dataclass(frozen=True)
class Part:
    """What was found in one dtype."""

    dtype: str
    seconds: float
    findings: Sequence[Finding]


def plan(
    model: str, axes: Axes, *, head: str = "lm", dtypes: Sequence[str] = tuple(DTYPES), full: bool = False,
    device: str = "cpu", seconds: float = 600.0,
) -> Plan:  # fmt: skip
    """Everything that can be refused is refused here, before any process."""
    unknown = [d for d in dtypes if d not in DTYPES]
    if unknown:
        raise ConfigError(f"dtype {unknown[0]!r} is unknown; choose from {', '.join(DTYPES)}")
    _check_devices(axes, device)
    choice: Mapping[str, str] = {}
    directory = None
    if model in TINY:
        if full:
            raise ConfigError(f"{model} has no weights to take as they are; leave out --full, or name a directory")
        config: Mapping[str, Any] = TINY[model]
    else:
        directory = _directory(model)
        config = read_config(directory)
        if any(directory.glob("*.safetensors")):
            found = open_source(directory)
            _, table = describe(config, prefix_of(config, found.entries), head, found.entries)
            choice = choose(table, found)
        elif full:
            raise ConfigError(f"{directory} holds no *.safetensors to take as they are; leave out --full")
        check_layout(config, axes, head)
        if not full:
            config, directory = shrink(config, axes.tp), None
    check_layout(config, axes, head)
    return Plan(config, axes, head, tuple(dtypes), directory, choice, device, seconds)


def _directory(model: str) -> Path:
    at = Path(model)
    if at.is_dir():
        return at
    known = ", ".join(TINY)
    raise ConfigError(f"{model!r} is neither a directory nor one of {known}; for a hub id, download it first")


def _check_devices(axes: Axes, device: str) -> None:
    kind = torch.device(device).type
    if kind != "cpu" and torch.accelerator.device_count() < axes.world:
        num = torch.accelerator.device_count()
        raise MeshError(f"{axes} needs {axes.world} devices, {num} are here; leave out --device to use CPU processes")


def check_layout(config: Mapping[str, Any], axes: Axes, head: str) -> None:
    """What each rank of the mesh would refuse, found without any of them."""
    refuse_unbuilt(axes)
    module, table = describe(config, prefix_of(config, None), head)
    for rank in range(axes.world):
        pieces(table, Rules(), axes, axes.coords(rank))
        list(parallel.spans(module, Rules(), axes, rank))


def inspect(plan: Plan, say: Say) -> list[Part]:
    """Run it. `say` is told what is going on."""
    with quiet(), tempfile.TemporaryDirectory() as folder:
        source = plan.directory
        if source is None:
            source = Path(folder) / "model"
            say("making a model of odd sizes")
            run_ranks(1, _make, plan, Path(folder) / "recipe", source, seconds=plan.seconds)
        return [_part(plan, dtype, source, say) for dtype in plan.dtypes]


def _part(plan: Plan, dtype: str, source: Path, say: Say) -> Part:
    began = time.monotonic()
    share = plan.axes.tp * plan.axes.cp
    length = -(-LENGTH // share) * share  # a batch divides into the shares of a data rank
    data = functools.partial(ragged, vocab=plan.vocab, length=length, target=plan.head == "value")
    trial = Trial(source, plan.axes, data, plan.head, DTYPES[dtype], steps=_STEPS[dtype])
    say(f"{dtype}: one process")
    reference = run_ranks(1, refer, trial, seconds=plan.seconds)[0]
    say(f"{dtype}: {plan.axes.world} ranks, {plan.axes}")
    try:
        ranks = run_ranks(plan.axes.world, _examine, trial, reference, plan.device, plan.seconds, seconds=plan.seconds)
        found = [finding for of_rank in ranks for finding in of_rank]
    except RankError as error:
        found = [Finding(RUN, f"{plan.axes.world} ranks", f"it stopped\n{error}")]
    return Part(dtype, time.monotonic() - began, found)


def _examine(trial: Trial, reference: Reference, device: str, seconds: float) -> list[Finding]:
    a = trial.axes
    mesh = Mesh(a.pp, a.replicate, a.fsdp, a.cp, a.tp, a.ep, device=device, timeout_s=min(seconds, 60.0))
    store = dist.distributed_c10d._get_default_store() if a.world > 1 else None
    return examine(trial, reference, mesh, store)


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
