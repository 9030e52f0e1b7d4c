"""Engines to make mistakes with; the oracles on a mesh in a forked world, their references computed once a session."""

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
from meshwright.sharding import Door, find_doors
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
    dict(tp=4),  # 2 kv heads: copies
]
CONTEXT_MESHES: list[dict[str, int]] = [
    dict(cp=2, tp=2),  # 2 query heads a tp rank, which share a kv head
    dict(fsdp=2, cp=2),
]
PIPELINE_MESHES: list[dict[str, int]] = [
    dict(pp=2, tp=2),
    dict(pp=2, cp=2),
]
EXPERT_MESHES: list[dict[str, int]] = [
    dict(fsdp=2, ep=2),
    dict(fsdp=2, tp=2, ep=2),
    dict(fsdp=2, tp=2, ep=4),
    dict(tp=4, ep=4),
    dict(fsdp=2, cp=2, ep=4),
]


def named(mesh: dict[str, int]) -> str:
    return ",".join(f"{k}={v}" for k, v in mesh.items()) or "one"


def parameters(model: mw.Model) -> list[torch.nn.Parameter]:
    return [parameter for part in model.parts for parameter in part.parameters()]


def door_of(model: mw.Model, name: str) -> Door:
    return {found: door for part in model.parts for found, door in find_doors(part, Door)}[name]


def world_of(mesh: dict[str, int]) -> int:
    return prod(v for k, v in mesh.items() if k != "ep")


def build(source: Path, mesh: dict[str, int], **options: Any) -> mw.Engine:
    """In float64. Options are the engine's, or those of loading."""
    loading = {k: options.pop(k) for k in ("head", "train") if k in options}
    return mw.Engine(mw.load(source, mesh_of(mesh), dtype=torch.float64, **loading), **{"lr": 1e-2, **options})


def mesh_of(mesh: dict[str, int]) -> mw.Mesh:
    """One for all that a forked rank does."""
    return _mesh(Axes(**mesh))


@functools.cache
def _mesh(axes: Axes) -> mw.Mesh:
    return mw.Mesh(**asdict(axes), device="cpu", timeout_s=30)


def mine(engine: mw.Engine, **options: Any) -> list[mw.Batch]:
    """This rank's part of the data that all tests train on."""
    return tiny.batches(engine.model.mesh.data_rank, **options)


def said(source: Path, mesh: dict[str, int], act: Callable[[mw.Engine], Any]) -> str:
    """The error that a new engine answers with, whoever's it is; or "nothing"."""
    engine = build(source, mesh)
    try:
        act(engine)
    except Exception as error:  # noqa: BLE001 - errors of torch are what must not come
        return f"{type(error).__name__}: {error}"
    return "nothing"


def error_of(act: Callable[[], object]) -> str:
    """Return the error of the package that an act raises, or nothing."""
    try:
        act()
    except mw.MeshwrightError as error:
        return f"{type(error).__name__}: {error}"
    return ""


Act = Callable[[mw.Engine], Any]


def said_by_all(source: Path, acts: Mapping[str, tuple[dict[str, int], Act]]) -> Callable[[str], list[str]]:
    """What every rank of a mesh says of an act, by its name. The acts of one mesh share a world, each with an engine of
    its own: none may leave a rank behind, or a switch of torch set."""
    of_mesh: dict[str, list[str]] = {}
    for name, (mesh, _) in acts.items():
        of_mesh.setdefault(named(mesh), []).append(name)

    def run(group: Sequence[str]) -> dict[str, list[str]]:
        mesh = acts[group[0]][0]
        cases = {name: functools.partial(said, source, mesh, acts[name][1]) for name in group}
        return worlds.in_turn(world_of(mesh), cases)

    return worlds.Shared(list(of_mesh.values()), run)


def trial(source: Path, mesh: dict[str, int], head: str = "lm", dtype: torch.dtype = torch.float64) -> Trial:
    return Trial(
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
    """Of one process; the number of data ranks decides which data it sees."""
    return references([tried])[0]


def references(several: Sequence[Trial]) -> list[Reference]:
    """Those that are not known yet in one world."""
    keys = [
        (
            t.source,
            t.axes.num_data_ranks,
            t.data,
            t.steps,
            t.thorough,
            t.optimizer,
            str(replace(t.recipe, **_ON_A_MESH)),
        )
        for t in several
    ]
    lacking = {key: tried for key, tried in zip(keys, several, strict=True) if key not in _references}
    if lacking:
        found = worlds.in_turn(1, {key: functools.partial(run_reference, tried) for key, tried in lacking.items()})
        _references.update({key: answers[0] for key, answers in found.items()})
    return [_references[key] for key in keys]


def findings(tried: Trial) -> list[Finding]:
    """Of all ranks together; none when all is well."""
    return findings_in_turn({"it": tried})["it"]


Name = TypeVar("Name")


def findings_in_turn(
    several: Mapping[Name, Trial], around: Callable[[Name], AbstractContextManager[Any]] = nullcontext
) -> dict[Name, list[Finding]]:
    """The findings of several trials of one mesh, in one world. `around`: what each rank does about each trial."""
    refs = references(list(several.values()))
    cases = {
        name: functools.partial(_examine, tried, ref, str(name), functools.partial(around, name))
        for (name, tried), ref in zip(several.items(), refs, strict=True)
    }
    world = next(iter(several.values())).axes.world
    found = worlds.in_turn(world, cases)
    return {name: [finding for of_rank in ranks for finding in of_rank] for name, ranks in found.items()}


def _examine(
    tried: Trial, ref: Reference, name: str, around: Callable[[], AbstractContextManager[Any]]
) -> list[Finding]:
    mesh = _mesh(tried.axes)
    store = dist.distributed_c10d._get_default_store() if mesh.axes.world > 1 else None
    with around():  # each trial has keys of its own in the store
        return examine(tried, ref, mesh, store and dist.PrefixStore(name, store))
