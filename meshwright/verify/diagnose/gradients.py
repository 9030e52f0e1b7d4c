"""Diagnose a set of wrong gradients: the axes of their parameters, a common property, the distance to the loss.

One wrong gradient says little; the set of wrong ones says much. If exactly the parameters that tp splits are wrong,
look at tp. If exactly those before some layer are wrong, look at the backward pass of that layer.
"""

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
    model: Model, grads: Mapping[str, Tensor], wrong: Sequence[Sequence[str]], reference: Reference, step: int
) -> dict[str, Suspect]:
    """Return the wrong gradients by key, those nearest to the loss first.

    Every rank calls it, since it reduces and gathers; `wrong` is filled on rank 0 alone.
    """
    # Repeat the reductions, over each axis and over all: where one was missing, this gives the right gradient.
    again = {axis: _summed_again(model, {axis}) for axis in _live(model)}
    over_all = _summed_again(model, set(_live(model)))
    made_of, order = blocks_by_key(model.table, model.keymap.choice), list(model.table.params)
    # Gradients come by keys of the files, placements by parameter: a key takes the parameter of its first block.
    names = {keys[0]: made_of[keys[0]][0][0].name for keys in wrong}
    summed = _explaining_axes(model, set(names.values()))
    out = {}
    placed = {name: model.placement(name) for name in names.values()}
    for keys in sorted(wrong, key=lambda keys: -order.index(names[keys[0]])):
        whole = lambda grads, keys=keys: torch.cat([grads[k].double().flatten() for k in keys])  # noqa: E731 - short
        copies = " and ".join(axis for axis in placed[names[keys[0]]].copies if axis in again)
        retried = {axis: whole(grads) for axis, grads in again.items()}
        expected, at = whole(reference.steps[step].grads), placed[names[keys[0]]]
        out[keys[0]] = Suspect(
            whole(grads), expected, model.mesh.axes, summed, {**retried, copies: whole(over_all)},
            whole(reference.aux[1]) if reference.aux[0] and step == 0 else None, model.table[names[keys[0]]].both_ends,
            at.shard, {*names.values()} == {"head.weight"},
        )  # fmt: skip
    return out


def _live(model: Model) -> list[str]:
    """Return the axes of more than one rank that some parameter uses."""
    used = {a for p in model.table for a in _axes(model, p.name)}
    return [a for a in dict.fromkeys((*DENSE, *EXPERT)) if a in used and model.mesh.axes.size_of(a) > 1]


def _axes(model: Model, name: str) -> set[str]:
    at = model.placement(name)
    return {*at.copies, *at.shard, *at.split.values()}


def _summed_again(model: Model, axes: set[str]) -> dict[str, Tensor]:
    """Gather the gradients as if copies were summed over `axes` once more. The model's own gradients stay unchanged.

    Only copies are summed: shards that FSDP has reduced hold different rows on each rank, which must not be added up.
    """
    originals = {}
    for name, grad in model.grads().items():
        copies = model.placement(name).copies
        originals[name] = grad.clone()
        model.mesh.all_reduce_(grad, Sum("a sum once more", tuple(axis for axis in copies if axis in axes)))
    gathered = gather(model, "grad")
    for name, grad in model.grads().items():
        grad.copy_(originals[name])
    return gathered


def _explaining_axes(model: Model, wrong: set[str]) -> list[str]:
    """Return the axes that best explain the wrong parameters.

    Each axis has two groups, the parameters whose gradients are summed over it and those that it cuts. The
    smallest groups with all wrong parameters win; if no group has them all, every axis remains.
    """
    groups: list[tuple[str, set[str]]] = []
    placed = {p.name: model.placement(p.name) for p in model.table}
    for axis in _live(model):
        groups.append((axis, {n for n, at in placed.items() if axis in (*at.copies, *at.shard)}))
        groups.append((axis, {n for n, at in placed.items() if axis in at.split.values()}))
    fits = [(axis, len(names)) for axis, names in groups if wrong <= names]
    fewest = min((num for _, num in fits), default=0)
    return list(dict.fromkeys(axis for axis, num in fits if num == fewest)) or _live(model)


def common_property(model: Model, made: Mapping[str, Suspect], grads: Mapping[str, Tensor]) -> str:
    """Return a property that only the wrong gradients share: a kind of parameter, or a place in the model."""
    made_of = blocks_by_key(model.table, model.keymap.choice)
    wrong = {made_of[key][0][0].name for key in made}
    used = {made_of[key][0][0].name for key, grad in grads.items() if grad.any()}
    return _kind(model, wrong, used) or _broken_backward(model, wrong, used)


def _kind(model: Model, wrong: set[str], used: set[str]) -> str:
    """Return the kind of parameters that is wrong as a whole, while all others are right.

    Parameters without a gradient in this step are neither wrong nor right, so they do not count. If everything is
    wrong, no kind is named, because every kind would fit.
    """
    kinds = {"the float32 parameters": {p.name for p in model.table if p.float32}}
    for axis in _live(model):
        cut = {p.name for p in model.table if axis in model.placement(p.name).split.values()}
        uncut = set(model.table.params) - cut
        kinds |= {f"the parameters that {axis} cuts": cut, f"the parameters that {axis} does not cut": uncut}
    kind = next((kind for kind, names in kinds.items() if names & used == wrong != used), "")
    return f". Only {kind} are wrong" if kind else ""


def _broken_backward(model: Model, wrong: set[str], used: set[str]) -> str:
    """Return where the backward pass breaks: all gradients before some part are wrong, and all after it right."""
    parts: dict[str, list[bool]] = {}  # in forward order: which of its gradients are wrong
    for name in model.table.params:
        if name in used:
            parts.setdefault(_part(name), []).append(name in wrong)
    all_wrong = [part for part, each in parts.items() if all(each)]
    behind = list(parts)[len(all_wrong) :]
    # At least two parts in a row from the input must be wrong, or it may be chance. After the break nothing may be
    # wrong, except in the part of the break itself: it has gradients before and after the break.
    if len(all_wrong) < 2 or not behind or all_wrong != list(parts)[: len(all_wrong)]:
        return ""
    if any(any(parts[part]) for part in behind[1:]):
        return ""
    look = f"look at the backward pass through {behind[0]}, and at what K1 reports of doors of its kind"
    return f". All gradients from the input to {behind[0]} are wrong, and all from it to the loss are right: {look}"


def _part(name: str) -> str:
    """Return the part of the model that a parameter belongs to, such as `layers.0.mixer` or `embed`."""
    return ".".join(name.split(".")[:3]) if name.startswith("layers.") else name.split(".")[0]
