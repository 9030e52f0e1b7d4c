"""Which gradients are wrong says where to look: on which axes their parameters lie, how near to the loss they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ...axes import DENSE, EXPERT, Sum
from ...engine import Model, gather
from ...weights import blocks_by_key
from ..reference import Reference
from .causes import Suspect


def suspects(
    model: Model, found: Mapping[str, Tensor], wrong: Sequence[Sequence[str]], reference: Reference, step: int
) -> dict[str, Suspect]:
    """By key, those nearest to the loss first. Every rank calls it; rank 0 knows what is wrong."""
    again = {axis: _summed_again(model, {axis}) for axis in _live(model)}
    over_all = _summed_again(model, set(_live(model)))
    made_of, order = blocks_by_key(model.table, model.keymap.choice), list(model.table.params)
    names = {keys[0]: made_of[keys[0]][0][0].name for keys in wrong}
    summed = _axes_of(model, set(names.values()))
    out = {}
    placed = {name: model.placement(name) for name in names.values()}
    for keys in sorted(wrong, key=lambda keys: -order.index(names[keys[0]])):
        whole = lambda grads, keys=keys: torch.cat([grads[k].double().flatten() for k in keys])  # noqa: E731 - short
        copies = " and ".join(axis for axis in placed[names[keys[0]]].copies if axis in again)
        retried = {axis: whole(grads) for axis, grads in again.items()}
        due, at = whole(reference.steps[step].grads), placed[names[keys[0]]]
        out[keys[0]] = Suspect(
            whole(found), due, model.mesh.axes, summed, {**retried, copies: whole(over_all)},
            whole(reference.aux[1]) if reference.aux[1] and step == 0 else None, model.table[names[keys[0]]].tied,
            at.shard, {*names.values()} == {"head.weight"},
        )  # fmt: skip
    return out


def _live(model: Model) -> list[str]:
    used = {a for p in model.table for a in _axes(model, p.name)}
    return [a for a in dict.fromkeys((*DENSE, *EXPERT)) if a in used and model.mesh.axes.size_of(a) > 1]


def _axes(model: Model, name: str) -> set[str]:
    at = model.placement(name)
    return {*at.copies, *at.shard, *at.split.values()}


def _summed_again(model: Model, axes: set[str]) -> dict[str, Tensor]:
    """The gradients as they would be if copies were summed over `axes` (once more)."""
    kept = {}
    for name, grad in model.grads().items():
        copies = model.placement(name).copies
        kept[name] = grad.clone()
        model.mesh.all_reduce_(grad, Sum("a sum once more", tuple(axis for axis in copies if axis in axes)))
    found = gather(model, "grad")
    for name, grad in model.grads().items():
        grad.copy_(kept[name])
    return found


def _axes_of(model: Model, wrong: set[str]) -> list[str]:
    """The axes that explain why just these are wrong: they are summed over it, or cut by it, and few others are."""
    groups: list[tuple[str, set[str]]] = []
    placed = {p.name: model.placement(p.name) for p in model.table}
    for axis in _live(model):
        groups.append((axis, {n for n, at in placed.items() if axis in (*at.copies, *at.shard)}))
        groups.append((axis, {n for n, at in placed.items() if axis in at.split.values()}))
    fits = [(axis, len(names)) for axis, names in groups if wrong <= names]
    fewest = min((num for _, num in fits), default=0)
    return list(dict.fromkeys(axis for axis, num in fits if num == fewest)) or _live(model)


def where(model: Model, made: Mapping[str, Suspect], grads: Mapping[str, Tensor]) -> str:
    """What all the wrong ones say together."""
    made_of = blocks_by_key(model.table, model.keymap.choice)
    wrong = {made_of[key][0][0].name for key in made}
    used = {made_of[key][0][0].name for key, grad in grads.items() if grad.any()}
    return _kind(model, wrong, used) or _begins(model, wrong, used)


def _kind(model: Model, wrong: set[str], used: set[str]) -> str:
    """What they have in common, and no others."""
    kinds = {"the float32 parameters": {p.name for p in model.table if p.float32}}
    for axis in _live(model):
        cut = {p.name for p in model.table if axis in model.placement(p.name).split.values()}
        uncut = set(model.table.params) - cut
        kinds |= {f"the parameters that {axis} cuts": cut, f"the parameters that {axis} does not cut": uncut}
    found = next((kind for kind, names in kinds.items() if names & used == wrong != used), "")
    return f". Wrong are {found}, and no others" if found else ""


def _begins(model: Model, wrong: set[str], used: set[str]) -> str:
    """Where the way back is broken: all from the input to a part of the model is wrong, what comes after it right."""
    parts: dict[str, list[bool]] = {}  # in forward order: which of its gradients are wrong
    for name in model.table.params:
        if name in used:
            parts.setdefault(_part(name), []).append(name in wrong)
    all_wrong = [part for part, each in parts.items() if all(each)]
    behind = list(parts)[len(all_wrong) :]
    if len(all_wrong) < 2 or not behind or all_wrong != list(parts)[: len(all_wrong)]:
        return ""
    if any(any(parts[part]) for part in behind[1:]):
        return ""
    look = f"look at the way back through {behind[0]}, and at what K1 says of doors like its own"
    return f". All from the input to {behind[0]} are wrong and all from there to the loss right: {look}"


def _part(name: str) -> str:
    return ".".join(name.split(".")[:3]) if name.startswith("layers.") else name.split(".")[0]
