"""Locate where a forward pass goes wrong: a fingerprint of the output of every submodule, one number per token.

The reference is each document alone on one process. So the submodule that leaks between documents differs first, and
so does one whose door (collective) is wrong. A fingerprint is a dot product with fixed coefficients: it is small enough
to keep for every submodule, and an error in any feature changes it.
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

RIGHT = 1 << 30  # stands for "no submodule is wrong": larger than every index


@dataclass
class ForwardRecord:
    """One forward pass: fingerprints in the order in which submodules ran, and how often each door was passed."""

    fingerprints: dict[str, Tensor] = field(default_factory=dict)
    doors_passed: Counter[str] = field(default_factory=Counter)


def scores_of(model: Model, documents: Any) -> Tensor:
    """Return a head's output for each token: log-probabilities of labels, or the values of a value head."""
    return (logits if "values" in model.blueprint.scores else logprobs)(model, documents)


def by_logits(model: Model, batch: Batch) -> Tensor:
    """Return the scores computed in another way: a softmax over the logits of the whole vocabulary.

    `logprobs` works in chunks of tokens and never holds all logits. With tp each rank has a slice of the vocabulary.
    """
    scores = logits(model, batch)
    if "values" in model.blueprint.scores:
        return scores
    labels = batch.labels.to(scores.device)
    picked: Tensor = scores.log_softmax(-1).gather(1, labels.clamp_min(0)[:, None])[:, 0]
    return picked.masked_fill(labels < 0, 0.0)


def parts_of(model: Model) -> Iterator[tuple[str, nn.Module]]:
    """Yield this rank's submodules: the embedding, the norms, mixer and MLP of every layer, and the last norm."""
    for stage in model.parts:
        if isinstance(stage.embed, Embedding):
            yield "embed", stage.embed
        for number, layer in stage.layers.items():
            yield from ((f"layers.{number}.{name}", part) for name, part in layer.named_children())
        if stage.head is not None:
            yield "head.norm", stage.head.norm


def tower_parts_of(model: Model) -> Iterator[tuple[str, nn.Module]]:
    """Yield the submodules of a vision tower. A row of their outputs is a patch, or four patches after the merger, not
    a token; a rank has only rows of the frames that it runs."""
    for stage in model.parts:
        if (tower := stage.tower) is not None:
            yield from (("tower.patches", tower.patches), ("tower.merger", tower.merger))
            for name, parts in (("blocks", tower.blocks), ("deep", tower.deep)):
                yield from ((f"tower.{name}.{number}", part) for number, part in parts.items())


@contextmanager
def recorded_forward(
    model: Model, parts: Callable[[Model], Iterator[tuple[str, nn.Module]]] = parts_of
) -> Iterator[ForwardRecord]:
    """Record the forward passes of a model while the context is open. `parts`: the submodules to record.

    A door of one process does nothing and is not armed, so only the doors of a mesh are counted.
    """
    record = ForwardRecord()

    def fingerprint(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_module: nn.Module, _args: Any, out: Any) -> None:
            out = out[0] if isinstance(out, tuple) else out
            if not isinstance(out, Tensor):
                return
            # Cosines of integers: no two coefficients are equal, so swapped features show.
            wave = torch.arange(out.shape[-1], device=out.device, dtype=torch.float64).cos()
            record.fingerprints[name] = out.detach().double() @ wave

        return hook

    def counting(name: str, armed: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: (record.doors_passed.update([name]), armed(x))[1]

    hooks = [part.register_forward_hook(fingerprint(name)) for name, part in parts(model)]
    doors = [(door, name, door.armed) for part in model.parts for name, door in find_doors(part, Door) if door.armed]
    for door, name, armed in doors:
        door.armed = counting(name, armed)
    try:
        yield record
    finally:
        for door, _, armed in doors:
            door.armed = armed
        for hook in hooks:
            hook.remove()


@dataclass(frozen=True)
class FirstWrong:
    """The first submodule whose output is wrong on any rank. `leak`: document 0, which no document precedes, is
    right."""

    part: str
    leak: bool
    ratio: float  # of the wrong output to the right one, if it is the same number everywhere; else NaN


def first_wrong(
    model: Model, record: ForwardRecord, reference: Mapping[str, Tensor], start: int, close: float
) -> FirstWrong | None:
    """Return the first wrong submodule, the same on every rank; all ranks call it.

    `start`: where the second document begins. `close`: the allowed error, relative to the largest fingerprint.
    """
    # Each rank compares its own share of the tokens (sequence parallelism); all ranks then take the earliest.
    mesh, rows = model.mesh, torch.tensor([[float(RIGHT), float(RIGHT), float("nan")]], dtype=torch.float64)
    names = list(reference)
    # A row per rank: the first wrong submodule, the first that is wrong in document 0, and the ratio. From the last
    # submodule to the first, so that the first overwrites the others.
    for at, name in reversed(list(enumerate(names))):
        if name not in record.fingerprints:
            continue  # another stage has it
        num = len(reference[name])
        lo, hi = mesh.token_range(num)
        expected, actual = reference[name][lo:hi], record.fingerprints[name].cpu()
        off = (actual - expected).abs() > close * reference[name].abs().max()
        if off.any() or not actual.isfinite().all():
            ratio = float(actual @ expected / expected.square().sum())
            is_multiple = (actual - ratio * expected).abs().max() <= close * reference[name].abs().max()
            rows[0, 0], rows[0, 2] = at, ratio if is_multiple else float("nan")
            rows[0, 1] = at if off[: max(0, start - lo)].any() else rows[0, 1]
    gathered = mesh.gather_rows(rows.to(mesh.device), DENSE).tolist()
    first = min(gathered)
    if first[0] == RIGHT:
        return None
    return FirstWrong(names[int(first[0])], min(row[1] for row in gathered) == RIGHT, first[2])


def about_doors(model: Model, part: str, passed: Mapping[str, int]) -> str:
    """Return what is wrong with the doors of a submodule under tensor parallelism, or "".

    Weights that tp splits and doors belong together (arXiv:1909.08053): with one but not the other, each rank either
    adds up only its share, or computes all of it and adds it up several times.
    """
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
        return f"tp cuts {cut[0]}, but it has no door"
    if doors and not cut:
        return f"no rule cuts a weight between its doors {' and '.join(doors)}: each rank of tp computes all of it"
    return ""


Routed = dict[int, tuple[Tensor, Tensor, Tensor]]  # by layer of experts: weight_Tk, logits_TE, expert_Tk


@contextmanager
def watched_routers(model: Model) -> Iterator[Routed]:
    """Record each router's logits and choices in a forward pass.

    `Balance.watch` is where every router reports its choices, so replacing it sees all families.
    """
    routed: Routed = {}
    balance = model.blueprint.balance
    real = balance.watch

    def watch(layer: int, weight_Tk: Tensor, logits_TE: Tensor, expert_Tk: Tensor) -> Tensor:
        routed[layer] = (weight_Tk.detach(), logits_TE.detach(), expert_Tk)
        return real(layer, weight_Tk, logits_TE, expert_Tk)

    balance.watch = watch  # type: ignore[method-assign] # of this one object, and only for a forward
    try:
        yield routed
    finally:
        del balance.watch  # uncovers the method of the class
