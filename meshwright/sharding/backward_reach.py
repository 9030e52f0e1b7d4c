"""Find which parts of a pipeline stage backward passes when some parameters are frozen.

Autograd stops at the first module with something to train. So with frozen layers, doors and units before it send
nothing in backward, and the bill must not charge for them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ..axes import Axes
from .fsdp_units import TOWER, Unit
from .rules import ShardingSpec
from .stages import Stage, trained_from

_NUMBERED = ("layers.", TOWER)  # prefixes whose numbered submodules are parts of their own


def in_order(units: Iterable[Unit]) -> list[Unit]:
    """Order units as forward finishes with them: units of experts before the layer around them, the root last."""
    units = list(units)
    experts, ordered = [unit for unit in units if unit.expert], list[Unit]()
    for unit in units:
        if not unit.expert:
            inside = f"{unit.name}." if unit.name else ""
            ordered += [each for each in experts if each.name.startswith(inside) and each not in ordered]
            ordered.append(unit)
    return ordered


def part_of(name: str) -> str:
    """Name the part of a stage that a parameter, door or unit is in: a layer, a block of the tower, embedding
    or head.
    """
    depth = 3 if name.startswith((f"{TOWER}blocks.", f"{TOWER}deep.")) else 2 if name.startswith(_NUMBERED) else 1
    return ".".join(name.split(".")[:depth])


def passed(stage: Stage, spec: ShardingSpec, axes: Axes, trained: Collection[str], *, with_images: bool) -> set[str]:
    """Return the parts through which a gradient passes. `with_images`: in a micro-batch in which the tower runs.

    It passes all doors of such a part, except in the part in which it begins (`begins_in`).
    """
    trained_parts, from_before = _trained_parts(stage, trained), _sends_gradient_back(stage, spec, axes, trained)
    in_tower = _tower_parts(stage, trained_parts) if with_images else set[str]()
    text = trained_parts & {"embed", "head"} - _looked_up_alone(stage)
    reaches = from_before or "embed" in trained_parts or bool(in_tower)
    for number in stage.module.layers:
        part = f"layers.{number}"
        reaches = reaches or part in trained_parts
        text |= {part} if reaches else set()
    return in_tower | text | ({"head", ""} if reaches or text else set())


def _looked_up_alone(stage: Stage) -> set[str]:
    """Return the embedding where it only looks tokens up for a detached MTP head: no gradient comes to it."""
    mtp = stage.module.mtp
    return {"embed"} if stage.number and mtp is not None and mtp.detached and not stage.module.tied else set()


def begins_in(stage: Stage, spec: ShardingSpec, axes: Axes, trained: Collection[str], *, with_images: bool) -> str:
    """Name the layer, or the head, that a gradient reaches and does not leave, since nothing before it is trained.

    Empty where gradients go all the way to the embedding or the tower, or on to the previous stage, or where there are
    none.
    """
    trained_parts = _trained_parts(stage, trained)
    if (
        _sends_gradient_back(stage, spec, axes, trained)
        or "embed" in trained_parts
        or (with_images and _tower_parts(stage, trained_parts))
    ):
        return ""
    parts = [f"layers.{number}" for number in stage.module.layers]
    return next((part for part in (*parts, "head") if part in trained_parts), "")


def _trained_parts(stage: Stage, trained: Collection[str]) -> set[str]:
    """Return the parts of a stage with something to train."""
    return {part_of(name) for unit in stage.units for name in unit.params if name in trained}


def _sends_gradient_back(stage: Stage, spec: ShardingSpec, axes: Axes, trained: Collection[str]) -> bool:
    """Return whether this stage sends a gradient to the previous one."""
    return stage.number > trained_from(spec.table, spec.line(axes.pp), [*trained])


def _tower_parts(stage: Stage, trained_parts: set[str]) -> set[str]:
    """Return the parts of the tower that a gradient passes: blocks in sequence, each merger after one of them."""
    tower, parts, reaches = stage.module.tower, set[str](), f"{TOWER}patches" in trained_parts
    if tower is None:
        return parts
    parts |= {f"{TOWER}patches"} if reaches else set()
    block_reached: dict[int, bool] = {}
    for number in range(len(tower.blocks)):
        part = f"{TOWER}blocks.{number}"
        block_reached[number] = reaches = reaches or part in trained_parts
        parts |= {part} if reaches else set()
    mergers = {f"{TOWER}deep.{n}": tap for n, tap in enumerate(tower.shape.taps)}
    mergers[f"{TOWER}merger"] = len(tower.blocks) - 1
    parts |= {part for part, block in mergers.items() if part in trained_parts or block_reached[block]}
    return parts | ({f"{TOWER}insert"} if parts else set())
