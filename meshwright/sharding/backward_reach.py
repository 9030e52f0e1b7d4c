"""Flow: the parts of a stage that backward passes, where not everything is trained."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ..axes import Axes
from .fsdp_units import TOWER, Unit
from .rules import ShardingSpec
from .stages import Stage, trained_from

_DEEP = ("layers.", TOWER)  # of these each part counts


def in_order(units: Iterable[Unit]) -> list[Unit]:
    """Units as forward is done with them: those of experts before the layer around them, the root last."""
    units = list(units)
    experts, found = [unit for unit in units if unit.expert], list[Unit]()
    for unit in units:
        if not unit.expert:
            inside = f"{unit.name}." if unit.name else ""
            found += [each for each in experts if each.name.startswith(inside) and each not in found]
            found.append(unit)
    return found


def part_of(name: str) -> str:
    """The part of a stage that a parameter, a door or a unit is in: a layer, a block of the tower, an end."""
    depth = 3 if name.startswith((f"{TOWER}blocks.", f"{TOWER}deep.")) else 2 if name.startswith(_DEEP) else 1
    return ".".join(name.split(".")[:depth])


def passed(stage: Stage, spec: ShardingSpec, axes: Axes, trained: Collection[str], *, pictures: bool) -> set[str]:
    """The parts through which a gradient comes. `pictures`: in a micro-batch in which the tower runs.

    Of a part that it reaches it passes all doors, but for the part in which it begins (`begins_in`).
    """
    learning, carried = _learning(stage, trained), _carried(stage, spec, axes, trained)
    seen = _in_tower(stage, learning) if pictures else set[str]()
    text = learning & {"embed", "head"}
    flows = carried or "embed" in learning or bool(seen)
    for number in stage.module.layers:
        part = f"layers.{number}"
        flows = flows or part in learning
        text |= {part} if flows else set()
    return seen | text | ({"head", ""} if flows or text else set())


def begins_in(stage: Stage, spec: ShardingSpec, axes: Axes, trained: Collection[str], *, pictures: bool) -> str:
    """The layer, or the head, that a gradient reaches and does not leave: nothing before it is trained. Empty where
    gradients begin in the embedding or the tower, or go on to the stage before, or where there are none."""
    learning = _learning(stage, trained)
    if _carried(stage, spec, axes, trained) or "embed" in learning or (pictures and _in_tower(stage, learning)):
        return ""
    parts = [f"layers.{number}" for number in stage.module.layers]
    return next((part for part in (*parts, "head") if part in learning), "")


def _learning(stage: Stage, trained: Collection[str]) -> set[str]:
    """The parts of a stage with something to train."""
    return {part_of(name) for unit in stage.units for name in unit.params if name in trained}


def _carried(stage: Stage, spec: ShardingSpec, axes: Axes, trained: Collection[str]) -> bool:
    """Whether the stage before is given a gradient."""
    return stage.number > trained_from(spec.table, spec.line(axes.pp), [*trained])


def _in_tower(stage: Stage, learning: set[str]) -> set[str]:
    """Blocks one after the other; each merger stands behind one of them."""
    tower, found, flows = stage.module.tower, set[str](), f"{TOWER}patches" in learning
    if tower is None:
        return found
    found |= {f"{TOWER}patches"} if flows else set()
    behind: dict[int, bool] = {}
    for number in range(len(tower.blocks)):
        part = f"{TOWER}blocks.{number}"
        behind[number] = flows = flows or part in learning
        found |= {part} if flows else set()
    mergers = {f"{TOWER}deep.{n}": tap for n, tap in enumerate(tower.shape.taps)}
    mergers[f"{TOWER}merger"] = len(tower.blocks) - 1
    found |= {part for part, block in mergers.items() if part in learning or behind[block]}
    return found | ({f"{TOWER}insert"} if found else set())
