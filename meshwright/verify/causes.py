"""From a wrong gradient to its likely cause: the ratio to the right one says which sum is missing or made twice."""

from __future__ import annotations

from torch import Tensor

from ..mesh import Axes

_CLOSE = 1e-3


def cause_of(found: Tensor, reference: Tensor, axes: Axes) -> str:
    found, reference = found.double().flatten(), reference.double().flatten()
    norm = reference.norm().item()
    if found.shape != reference.shape:
        return f"{found.numel()} elements, one process has {reference.numel()}"
    if norm == 0:
        return f"norm {found.norm().item():.3g}, but no token of the step reaches it: it must be zero"
    ratio = (found @ reference).item() / norm**2
    error = (found - reference).norm().item() / norm
    said = f"off by {error:.1e} of its norm, ratio {found.norm().item() / norm:.6g}"
    if (found - ratio * reference).norm() <= _CLOSE * norm and abs(ratio - 1) > _CLOSE:
        return f"{said}: {_scale(ratio, axes)}"
    if (found.sort().values - reference.sort().values).norm() <= _CLOSE * norm:
        return f"{said}: the right values in the wrong places, as when segments or heads are swapped"
    if ratio < 1:
        return f"{said}: a share of it, as when a sum over {_wide(axes)} is missing"
    return f"{said}: no simple factor"


def _scale(ratio: float, axes: Axes) -> str:
    sizes = {a: axes.size_of(a) for a in ("replicate", "fsdp", "cp", "tp", "ep") if axes.size_of(a) > 1}
    for name, size in sizes.items():
        if abs(ratio - size) < _CLOSE:
            return f"{size} times too large = {name}, as when it is summed once too often over {name}"
        if abs(ratio * size - 1) < _CLOSE:
            return f"1/{size} of it = 1/{name}, as when it is averaged over {name}, or a sum over {name} is missing"
    return f"{ratio:.6g} times what it should be"


def _wide(axes: Axes) -> str:
    return " or ".join(a for a in ("replicate", "fsdp", "cp", "tp", "ep") if axes.size_of(a) > 1) or "ranks"
