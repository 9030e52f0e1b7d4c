"""From what is wrong to its likely cause: numbers that a mistake would give are computed and compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...axes import Axes

_CLOSE = 1e-3
_AXES = ("replicate", "fsdp", "cp", "tp", "ep")


@dataclass(frozen=True)
class Suspect:
    """A wrong gradient, and what it is when this or that is done to it or left out."""

    found: Tensor
    reference: Tensor
    axes: Axes
    summed: Sequence[str]  # the axes of more than one rank over which it is to be summed
    retried: Mapping[str, Tensor] = field(default_factory=dict)  # by axes: summed over them once more
    aux: Tensor | None = None  # the router's aux loss alone gives this
    tied: bool = False
    sharded: Sequence[str] = _AXES  # the axes over which FSDP reduces it; `retried` shows sums over the others
    last: bool = False  # it alone is wrong, and nothing comes after it but the loss


def cause_of(s: Suspect) -> tuple[str, str]:
    """What is wrong, and a guess of why."""
    found, reference = s.found.double().flatten(), s.reference.double().flatten()
    norm = reference.norm().item()
    if found.shape != reference.shape:
        return f"{found.numel()} elements, one process has {reference.numel()}", ""
    if norm == 0:
        return f"norm {found.norm().item():.3g}, but no token of the step reaches it: it must be zero", ""
    said = f"off by {(found - reference).norm().item() / norm:.1e} of its norm, ratio {found.norm().item() / norm:.6g}"
    return said, _guess(s, found, reference, norm)


def _guess(s: Suspect, found: Tensor, reference: Tensor, norm: float) -> str:
    if not found.any():
        return "it is zero, nothing flows back to it, as when a value is detached or a collective has no backward"
    ratio = (found @ reference).item() / norm**2
    if _close(found, ratio * reference, norm) and abs(ratio - 1) > _CLOSE:
        return scale(ratio, s.axes, s.summed)
    if _close(found, reference, norm):  # every guess below would fit
        return "rounding to a narrower dtype on its way, or a small part of it that is lost"
    for axes, once_more in s.retried.items():
        if _close(once_more.double().flatten(), reference):
            return f"one rank's share of it, a sum over {axes} is missing"
    if s.aux is not None and (parts := _parts(found, reference, s.aux.double().flatten())):
        return parts
    if _close(found.sort().values, reference.sort().values):
        return "the right values in the wrong places, as when segments or heads are swapped"
    if s.tied:
        return "it is tied, as when the embedding or the head gives it no gradient"
    if s.last:
        return "all others are right, and it is the last before the loss: look at the chunks of ops/loss.py"
    over = [axis for axis in s.summed if axis in s.sharded]
    missing = f"a sum over {' or '.join(over)} is missing, or " if over else ""
    doors = [a for a in ("tp", "ep") if s.axes.size_of(a) > 1]
    through = f" through a door of {' or '.join(doors)}" if doors else ""
    return f"no simple factor, as when {missing}a part of it is lost on its way back{through}"


def _close(a: Tensor, b: Tensor, norm: float | None = None) -> bool:
    return bool((a - b).norm() <= _CLOSE * (b.norm() if norm is None else norm))


def scale(ratio: float, axes: Axes, summed: Sequence[str] = _AXES) -> str:
    """`summed`: the axes that come into question."""
    sizes = {a: axes.size_of(a) for a in summed if axes.size_of(a) > 1} or {
        a: axes.size_of(a) for a in _AXES if axes.size_of(a) > 1
    }
    many = " or ".join(a for a, n in sizes.items() if abs(ratio - n) < _CLOSE)
    if many:
        return f"{ratio:.3g} times too large = {many}, as when it is summed once too often over {many}"
    few = " or ".join(a for a, n in sizes.items() if abs(ratio * n - 1) < _CLOSE)
    if few:
        return f"1/{1 / ratio:.3g} of it = 1/{few}, as when it is averaged over {few} instead of summed"
    return f"{ratio:.6g} times what it should be"


def _parts(found: Tensor, reference: Tensor, aux: Tensor) -> str:
    """`found` as a times the gradient of the loss and b times that of the router's aux loss, where it is such."""
    both = torch.stack([reference - aux, aux], 1)
    a, b = torch.linalg.lstsq(both, found[:, None]).solution.flatten().tolist()
    if not _close(both @ torch.tensor([a, b], dtype=found.dtype), found):
        return ""
    if abs(a) < _CLOSE:
        return f"only the router's aux loss reaches it ({b:.4g} times), the loss itself does not"
    return f"{a:.4g} times the gradient of the loss and {b:.4g} times that of the router's aux loss"


def cause_of_loss(
    found: float,
    reference: float,
    aux: float,
    sums: Sequence[Sequence[tuple[float, float]]],
    divisor: float,
    axes: Axes,
) -> str:
    """A wrong loss of a right forward: what was it divided by? `sums`: terms and weights by data rank and batch.
    `divisor`: what the engine takes."""
    ranks = [tuple(map(sum, zip(*batches, strict=True))) for batches in sums]
    batches = [batch for of_rank in sums for batch in of_rank]
    total, weight = (sum(each) for each in zip(*ranks, strict=True))
    by_rank, by_batch = (sum(terms / weight for terms, weight in each) for each in (ranks, batches))
    guesses = {
        "each data rank divides by its own targets, not by those of the whole step": by_rank,
        "it is a mean of the data ranks' means, whatever their targets": by_rank / len(ranks),
        "each micro-batch is divided by its own targets": by_batch,
        "each micro-batch is divided by its own targets, and then averaged": by_batch / len(batches),
        "each micro-batch is divided by its own targets, averaged on a rank, summed over ranks": by_batch
        / len(sums[0]),
        "it is divided by the targets of one micro-batch": total / batches[0][1],
        "it is divided by nothing": total,
    }
    main = reference - aux
    for what, loss in guesses.items():
        # With one data rank or one micro-batch some mistakes give the right loss, and so explain nothing.
        if abs(found - aux - loss) <= 1e-6 * abs(loss) < abs(main - loss):
            return what
    if aux and abs(found - reference) <= 0.5 * abs(main):
        return (
            f"the router's aux loss would be {found - main:.6g}, one process has {aux:.6g} "
            f"({(found - main) / aux:.4g} times): counted again for each micro-batch or rank, with filler tokens, "
            "or with each rank's own tokens alone"
        )
    if abs(divisor / weight - 1) > _CLOSE:
        return f"it is divided by {divisor:.6g}, but the weights of its targets sum to {weight:.6g}"
    return scale(found / reference, axes)
