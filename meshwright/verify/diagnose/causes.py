"""Guess the cause of a wrong gradient or loss: compute what each known mistake would give, and compare.

The usual mistakes of parallel training have simple signatures. A reduction done twice scales a gradient by the size of
an axis; an average instead of a sum scales it by the inverse; a missing reduction leaves one rank's share; a wrong
divisor changes the loss by a known factor. A guess is a hint, never a verdict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...axes import Axes

_CLOSE = 1e-3  # relative: far above rounding in float64, far below 2 and 1/2, the nearest factors of a mistake
_AXES = ("replicate", "fsdp", "cp", "tp", "ep")


@dataclass(frozen=True)
class Suspect:
    """A wrong gradient, the right one, and what the wrong one becomes under some changes.

    `summed`: the axes of more than one rank over which it should be summed. `retried`: by axes, the gradient summed
    over them once more. `aux`: the part of the right one that comes from the router's aux loss. `sharded`: the axes
    over which FSDP reduces it; its reductions cannot be repeated, so `retried` covers only the others. `last`: only
    this gradient is wrong, and only the loss comes after it.
    """

    gradient: Tensor
    reference: Tensor
    axes: Axes
    summed: Sequence[str]
    retried: Mapping[str, Tensor] = field(default_factory=dict)
    aux: Tensor | None = None
    tied: bool = False
    sharded: Sequence[str] = _AXES
    last: bool = False


def cause_of(s: Suspect) -> tuple[str, str]:
    """Return what is wrong, in numbers, and a guess of the cause."""
    actual, reference = s.gradient.double().flatten(), s.reference.double().flatten()
    norm = reference.norm().item()
    if actual.shape != reference.shape:
        return f"{actual.numel()} elements, one process has {reference.numel()}", ""
    if norm == 0:
        return f"norm {actual.norm().item():.3g}, but no token of the step reaches it: it must be zero", ""
    what = (
        f"off by {(actual - reference).norm().item() / norm:.1e} of its norm, ratio {actual.norm().item() / norm:.6g}"
    )
    return what, _guess(s, actual, reference, norm)


def _guess(s: Suspect, actual: Tensor, reference: Tensor, norm: float) -> str:
    """Return the first mistake that explains the gradient.

    Mistakes are tried from the most to the least specific, because a gradient that an exact factor explains is often
    close to other mistakes too: an average over two ranks and "one rank's share" both give about half of it.
    """
    if not actual.any():
        return "it is zero, nothing flows back to it, as when a value is detached or a collective has no backward"
    # A multiple of the right gradient: the best factor in the least-squares sense.
    ratio = (actual @ reference).item() / norm**2
    if _close(actual, ratio * reference, norm) and abs(ratio - 1) > _CLOSE:
        return scale(ratio, s.axes, s.summed)
    if _close(actual, reference, norm):  # every guess below would fit
        return "rounding to a narrower dtype in backward, or a small part of it is lost"
    for axes, once_more in s.retried.items():
        if _close(once_more.double().flatten(), reference):
            return f"one rank's share of it, a sum over {axes} is missing"
    if s.aux is not None and (mixture := _mixture(actual, reference, s.aux.double().flatten())):
        return mixture
    if _close(actual.sort().values, reference.sort().values):
        return "the right values in the wrong places, as when segments or heads are swapped"
    if s.tied:
        return "it is tied, as when the embedding or the head gives it no gradient"
    if s.last:
        return "all others are right, and it is the last before the loss: look at the chunks of ops/loss.py"
    # No mistake fits. Name those that could not be tried: FSDP's own reductions, and the backward of doors.
    over = [axis for axis in s.summed if axis in s.sharded]
    missing = f"a sum over {' or '.join(over)} is missing, or " if over else ""
    doors = [a for a in ("tp", "ep") if s.axes.size_of(a) > 1]
    through = f" through a door of {' or '.join(doors)}" if doors else ""
    return f"no simple factor, as when {missing}a part of it is lost in backward{through}"


def _close(a: Tensor, b: Tensor, norm: float | None = None) -> bool:
    return bool((a - b).norm() <= _CLOSE * (b.norm() if norm is None else norm))


def scale(ratio: float, axes: Axes, summed: Sequence[str] = _AXES) -> str:
    """Explain a factor by the size of an axis.

    `summed`: the axes to consider. With fsdp=2,tp=2 a factor of 2 fits both. So all axes that fit are named, those over
    which this gradient is summed first.
    """
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


def _mixture(actual: Tensor, reference: Tensor, aux: Tensor) -> str:
    """Express a gradient as a times that of the loss plus b times that of the router's aux loss; else return "".

    The two take different paths: the aux loss is pooled over ranks and micro-batches by the router, the loss is divided
    by the targets of the step. So one of them may be counted too often while the other is right.
    """
    both = torch.stack([reference - aux, aux], 1)
    a, b = torch.linalg.lstsq(both, actual[:, None]).solution.flatten().tolist()
    if not _close(both @ torch.tensor([a, b], dtype=actual.dtype), actual):
        return ""
    if abs(a) < _CLOSE:
        return f"only the router's aux loss reaches it ({b:.4g} times), the loss itself does not"
    return f"{a:.4g} times the gradient of the loss and {b:.4g} times that of the router's aux loss"


def cause_of_loss(
    loss: float,
    reference: float,
    aux: float,
    sums: Sequence[Sequence[tuple[float, float]]],
    divisor: float,
    axes: Axes,
) -> str:
    """Guess why the loss is wrong although the forward pass is right, from what it may have been divided by.

    `aux`: the router's part of the reference. `sums`: sums of terms and of weights, by data rank and batch. `divisor`:
    what the engine divides by. A sum over the step divided once is the right loss; the usual mistakes divide each rank
    or micro-batch by its own count, which weights short ones too much.
    """
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
    main = reference - aux  # each guess is of the loss without the aux loss, which has another divisor
    for what, guess in guesses.items():
        # With one data rank or one micro-batch some mistakes still give the right loss, so they explain nothing.
        if abs(loss - aux - guess) <= 1e-6 * abs(guess) < abs(main - guess):
            return what
    if aux and abs(loss - reference) <= 0.5 * abs(main):
        return (
            f"the router's aux loss would be {loss - main:.6g}, one process has {aux:.6g} "
            f"({(loss - main) / aux:.4g} times): counted again for each micro-batch or rank, with padding tokens, "
            "or with each rank's own tokens alone"
        )
    if abs(divisor / weight - 1) > _CLOSE:
        return f"it is divided by {divisor:.6g}, but the weights of its targets sum to {weight:.6g}"
    return scale(loss / reference, axes)
