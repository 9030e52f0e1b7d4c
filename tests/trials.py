"""Run the oracles on a mesh in a forked world, with references computed once a session; engines for other tests."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

import meshwright as mw
from meshwright.axes import Axes
from meshwright.recipe import ContextParallel, MemoryOptions, Pipeline, Recipe
from meshwright.sharding import Door, Param, Table, find_doors
from meshwright.verify import Data, Finding, Reference, Trial, examine, run_reference
from tests import parts, tiny, worlds

_STEPS = 3 if parts.ALL else 2  # the third has long documents

MESHES: list[dict[str, int]] = [
    dict(),
    dict(tp=2),
    dict(fsdp=2),
    dict(replicate=2),
    dict(fsdp=2, tp=2),
    dict(replicate=2, fsdp=2),
    dict(tp=4),  # copies of 2 kv heads
]
CONTEXT_MESHES: list[dict[str, int]] = [
    dict(cp=2, tp=2),  # 2 query heads per tp rank share a kv head
    dict(fsdp=2, cp=2),
]
PIPELINE_MESHES: list[dict[str, int]] = [dict(pp=2, tp=2), dict(pp=2, cp=2)]
EXPERT_MESHES: list[dict[str, int]] = [
    dict(fsdp=2, ep=2),
    dict(fsdp=2, tp=2, ep=2),
    dict(fsdp=2, tp=2, ep=4),
    dict(tp=4, ep=4),
    dict(fsdp=2, cp=2, ep=4),
]


def table_of(names: str, decayed: str = "") -> Table:
    """Return declarations of some parameters, a letter each, for an optimizer alone."""
    return Table({name: Param({"rows": 1}, {"cols": 1}, (), name=name, decay=name in decayed) for name in names})


def named(mesh: dict[str, int]) -> str:
    return ",".join(f"{k}={v}" for k, v in mesh.items()) or "one"


def parameters(model: mw.Model) -> list[torch.nn.Parameter]:
    return [parameter for part in model.parts for parameter in part.parameters()]


def door_of(model: mw.Model, name: str) -> Door:
    return {door_name: door for part in model.parts for door_name, door in find_doors(part, Door)}[name]


def world_of(mesh: dict[str, int]) -> int:
    return prod(v for k, v in mesh.items() if k != "ep")


def build(source: Path, mesh: dict[str, int], **options: Any) -> mw.Engine:
    """Build an engine in float64. Options go to the engine or to loading."""
    loading = {k: options.pop(k) for k in ("head", "train") if k in options}
    return mw.Engine(mw.load(source, mesh_of(mesh), dtype=torch.float64, **loading), **{"lr": 1e-2, **options})


def mesh_of(mesh: dict[str, int]) -> mw.Mesh:
    """Return the one mesh of a forked rank."""
    return _mesh(Axes(**mesh))


@functools.cache
def _mesh(axes: Axes) -> mw.Mesh:
    return mw.Mesh(**asdict(axes), device="cpu", timeout_s=30)


def feed(engine: mw.Engine, **options: Any) -> list[mw.Batch]:
    """Return this data rank's part of the data of all tests."""
    return tiny.batches(engine.model.mesh.data_rank, **options)


def said(source: Path, mesh: dict[str, int], act: Callable[[mw.Engine], Any]) -> str:
    """Return the error, of any class, that a new engine raises, or "nothing"."""
    engine = build(source, mesh)
    try:
        act(engine)
    except Exception as error:  # noqa: BLE001 - errors of torch would be a failure
        return f"{type(error).__name__}: {error}"
    return "nothing"


def error_of(act: Callable[[], object]) -> str:
    """Return the error of the package that an act raises, or ""."""
    try:
        act()
    except mw.MeshwrightError as error:
        return f"{type(error).__name__}: {error}"
    return ""


Act = Callable[[mw.Engine], Any]


def said_by_all(source: Path, acts: Mapping[str, tuple[dict[str, int], Act]]) -> Callable[[str], list[str]]:
    """Return the errors of all ranks of a mesh by the name of an act. Acts of one mesh share a world and have an engine
    each. An act must end on all ranks, and must not change settings of torch."""

    def run(group: Sequence[str]) -> dict[str, list[str]]:
        mesh = acts[group[0]][0]
        cases = {name: functools.partial(said, source, mesh, acts[name][1]) for name in group}
        return worlds.in_turn(world_of(mesh), cases)

    return worlds.shared({name: named(mesh) for name, (mesh, _) in acts.items()}, run)


class Brief(Trial):
    """A trial whose documents run alone for the first micro-batch only: gradients are compared for all of them."""

    def packed(self) -> list[mw.Batch]:
        return super().packed() if parts.ALL else super().packed()[:1]


def trial(
    source: Path, mesh: dict[str, int], head: str = "lm", dtype: torch.dtype = torch.float64, brief: bool = True
) -> Trial:
    return (Brief if brief else Trial)(
        source, Axes(**mesh), Data(target=head == "value"), Recipe(head=head, dtype=dtype),
        steps=_STEPS if dtype == torch.float64 else 1,
        thorough=False, small_parts=int(dtype != torch.float32),
    )  # fmt: skip


def changed(tried: Trial, **changes: Any) -> Trial:
    """Return a trial with other fields, of itself or of its recipe."""
    of_recipe = {name: changes.pop(name) for name in [*changes] if name in Recipe.__dataclass_fields__}
    return replace(tried.with_options(**of_recipe), **changes)


_ON_A_MESH: dict[str, Any] = {"memory": MemoryOptions(), "pipeline": Pipeline(), "context": ContextParallel()}
_references: dict[Any, Reference] = {}


def reference(tried: Trial) -> Reference:
    """Return the reference of one process. Its data depend on the number of data ranks."""
    return references([tried])[0]


def references(several: Sequence[Trial]) -> list[Reference]:
    """Return references, and make the missing ones in one world."""
    keys = [_key(tried) for tried in several]
    lacking = {key: tried for key, tried in zip(keys, several, strict=True) if key not in _references}
    if lacking:
        made = worlds.in_turn(1, {key: functools.partial(run_reference, tried) for key, tried in lacking.items()})
        _references.update({key: reference for key, (reference,) in made.items()})
    return [_references[key] for key in keys]


def _key(tried: Trial) -> tuple[Any, ...]:
    recipe = str(replace(tried.recipe, **_ON_A_MESH))
    options = tried.steps, tried.thorough, tried.router_aux, tried.optimizer, recipe
    return tried.source, tried.axes.num_data_ranks, tried.data, *options


def findings(tried: Trial) -> list[Finding]:
    """Return the findings of all ranks."""
    return findings_in_turn({"it": tried})["it"]


Name = TypeVar("Name")


def findings_in_turn(
    several: Mapping[Name, Trial], around: Callable[[Name], AbstractContextManager[Any]] = nullcontext
) -> dict[Name, list[Finding]]:
    """Return the findings of several trials of one mesh, in one world. `around`: a context on each rank."""
    refs = references(list(several.values()))
    cases = {
        name: functools.partial(_examine, tried, ref, str(name), functools.partial(around, name))
        for (name, tried), ref in zip(several.items(), refs, strict=True)
    }
    world = next(iter(several.values())).axes.world
    runs = worlds.in_turn(world, cases)
    return {name: [finding for of_rank in ranks for finding in of_rank] for name, ranks in runs.items()}


def _examine(
    tried: Trial, ref: Reference, name: str, around: Callable[[], AbstractContextManager[Any]]
) -> list[Finding]:
    mesh = _mesh(tried.axes)
    store = dist.distributed_c10d._get_default_store() if mesh.axes.world > 1 else None
    with around():  # each trial has keys of its own in the store
        return examine(tried, ref, mesh, store and dist.PrefixStore(name, store))
