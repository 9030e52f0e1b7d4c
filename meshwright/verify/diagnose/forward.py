"""Where a forward goes wrong: a fingerprint of the output of every submodule, one number a token.

The reference is each document alone on one process. So both a leak and a wrong door show in the submodule that has it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...axes import DENSE
from ...data import Batch
from ...engine import Model, logits, logprobs
from ...models import Embedding
from ...sharding import Door, find_doors

RIGHT = 1 << 30  # stands for the number of a submodule where none is wrong


@dataclass
class Watched:
    """One forward: fingerprints in the order in which submodules ran, and how often each door was passed."""

    prints: dict[str, Tensor] = field(default_factory=dict)
    passed: Counter[str] = field(default_factory=Counter)


def scores_of(model: Model, documents: Any) -> Tensor:
    return (logits if "values" in model.blueprint.scores else logprobs)(model, documents)


def by_logits(model: Model, batch: Batch) -> Tensor:
    """The same by another way: log-probabilities from the logits of the whole vocabulary."""
    found = logits(model, batch)
    if "values" in model.blueprint.scores:
        return found
    labels = batch.labels.to(found.device)
    picked: Tensor = found.log_softmax(-1).gather(1, labels.clamp_min(0)[:, None])[:, 0]
    return picked.masked_fill(labels < 0, 0.0)


def parts_of(model: Model) -> Iterator[tuple[str, nn.Module]]:
    """Of what this rank has: the embedding, the norms, mixer and MLP of every layer, and the last norm."""
    for stage in model.parts:
        if isinstance(stage.embed, Embedding):
            yield "embed", stage.embed
        for number, layer in stage.layers.items():
            yield from ((f"layers.{number}.{name}", part) for name, part in layer.named_children())
        if stage.head is not None:
            yield "head.norm", stage.head.norm


def tower_parts_of(model: Model) -> Iterator[tuple[str, nn.Module]]:
    """What a tower makes of patches, and of four of them. A rank has those of the frames that it runs."""
    for stage in model.parts:
        if (tower := stage.tower) is not None:
            yield from (("tower.patches", tower.patches), ("tower.merger", tower.merger))
            for name, parts in (("blocks", tower.blocks), ("deep", tower.deep)):
                yield from ((f"tower.{name}.{number}", part) for number, part in parts.items())


@contextmanager
def watched(model: Model, parts: Callable[[Model], Iterator[tuple[str, nn.Module]]] = parts_of) -> Iterator[Watched]:
    seen = Watched()

    def note(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_module: nn.Module, _args: Any, out: Any) -> None:
            if not isinstance(out, Tensor):
                return
            wave = torch.arange(out.shape[-1], device=out.device, dtype=torch.float64).cos()
            seen.prints[name] = out.detach().double() @ wave

        return hook

    def counting(name: str, armed: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: (seen.passed.update([name]), armed(x))[1]

    hooks = [part.register_forward_hook(note(name)) for name, part in parts(model)]
    doors = [(door, name, door.armed) for part in model.parts for name, door in find_doors(part, Door) if door.armed]
    for door, name, armed in doors:
        door.armed = counting(name, armed)
    try:
        yield seen
    finally:
        for door, _, armed in doors:
            door.armed = armed
        for hook in hooks:
            hook.remove()


@dataclass(frozen=True)
class Wrong:
    """The first submodule that is wrong on any rank. `leak`: where no document comes before, it is right."""

    part: str
    leak: bool
    ratio: float  # to what it should be, where that is one number; else NaN


def first_wrong(model: Model, seen: Watched, reference: Mapping[str, Tensor], start: int, close: float) -> Wrong | None:
    """Every rank calls it and gets the same. `start`: where the second document begins."""
    mesh, rows = model.mesh, torch.tensor([[float(RIGHT), float(RIGHT), float("nan")]], dtype=torch.float64)
    names = list(reference)
    for at, name in reversed(list(enumerate(names))):
        if name not in seen.prints:
            continue  # another stage has it
        num = len(reference[name])
        lo, hi = mesh.token_range(num)
        theirs, mine = reference[name][lo:hi], seen.prints[name].cpu()
        off = (mine - theirs).abs() > close * reference[name].abs().max()
        if off.any() or not mine.isfinite().all():
            ratio = float(mine @ theirs / theirs.square().sum())
            alike = (mine - ratio * theirs).abs().max() <= close * reference[name].abs().max()
            rows[0, 0], rows[0, 2] = at, ratio if alike else float("nan")
            rows[0, 1] = at if off[: max(0, start - lo)].any() else rows[0, 1]
    found = mesh.gather_rows(rows.to(mesh.device), DENSE).tolist()
    first = min(found)
    if first[0] == RIGHT:
        return None
    return Wrong(names[int(first[0])], min(row[1] for row in found) == RIGHT, first[2])


def about_doors(model: Model, part: str, passed: Mapping[str, int]) -> str:
    """What is wrong with the doors of a submodule on a mesh with tp, or nothing."""
    axes, inside = model.mesh.axes, f"{part}."
    all_doors = (name for whole in model.parts for name, _ in find_doors(whole, Door))
    doors = [name.removeprefix(inside) for name in all_doors if name.startswith(inside)]
    cut = [p.name for p in model.table if p.name.startswith(inside) and "tp" in model.placement(p.name).split.values()]
    unpassed = [name for name in doors if not passed.get(inside + name)]
    if axes.tp == 1:
        return ""
    if unpassed:
        return f"its doors {' and '.join(unpassed)} were not passed"
    if cut and not doors:
        return f"tp cuts {cut[0]}, but there is no door"
    if doors and not cut:
        return f"no rule cuts a weight between its doors {' and '.join(doors)}: each rank of tp computes all of it"
    return ""


Routed = dict[int, tuple[Tensor, Tensor, Tensor]]  # by layer of experts: weight_Tk, logits_TE, expert_Tk


@contextmanager
def watched_routers(model: Model) -> Iterator[Routed]:
    seen: Routed = {}
    balance = model.blueprint.balance
    real = balance.watch

    def watch(layer: int, weight_Tk: Tensor, logits_TE: Tensor, expert_Tk: Tensor) -> Tensor:
        seen[layer] = (weight_Tk.detach(), logits_TE.detach(), expert_Tk)
        return real(layer, weight_Tk, logits_TE, expert_Tk)

    balance.watch = watch  # type: ignore[method-assign] # of this one object, and only for a forward
    try:
        yield seen
    finally:
        del balance.watch  # the method of the class is back
