"""Elementwise formulas in one kernel, on devices where each operation by itself would pass all numbers through memory.

`torch.compile` makes the kernel of the formula itself, so there is one form of it in this house. It is not trusted: on
the first numbers of a kind it must agree with the formula as it is written. Else that is used, which is said once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from meshwright.log import logger
from meshwright.ops.kernels import NARROW, SLOW

_TOLERANCE = 1e-2  # of a norm: the kernel rounds once where the formula rounds each of its parts to bfloat16

Found = TypeVar("Found")  # a tensor, or several
Formula = Callable[..., Found]


def fused(formula: Formula[Found]) -> Formula[Found]:
    """`formula` in one kernel for 16-bit numbers on a device; as it is elsewhere. It has no gradient of its own.

    The first of its arguments is a tensor that says which device and dtype, and how many rows there are: another number
    of them does not compile it anew. Within a layer that is compiled as a whole it is a part of that.
    """
    return _in_one_kernel(formula, exact=False)


def fused_exactly(formula: Formula[Found]) -> Formula[Found]:
    """The same where each bit counts. The kernel is slower: it divides as the formula does."""
    return _in_one_kernel(formula, exact=True)


def _in_one_kernel(formula: Formula[Found], exact: bool) -> Formula[Found]:
    chosen: dict[object, Formula[Found]] = {}

    @functools.wraps(formula)
    def op(*args: Any) -> Found:
        x = args[0]
        if torch.compiler.is_compiling() or x.device.type in SLOW or x.dtype not in NARROW or len(x) < 2:
            return formula(*args)
        plain = [each.detach() if isinstance(each, Tensor) else each for each in args]
        key = (x.device, *map(_kind, plain))
        if key not in chosen:
            with torch.no_grad(), _disable_current_modes():  # those of a layer that is recomputed are not of a trial
                chosen[key] = _chosen(formula, plain, exact)
        return chosen[key](*plain)

    return op


def _kind(argument: object) -> object:
    return (argument.dtype, argument.shape[1:]) if isinstance(argument, Tensor) else argument


def _chosen(formula: Formula[Found], args: list[Any], exact: bool) -> Formula[Found]:
    """The kernel, if it agrees with the formula on these arguments."""
    name, compiled = formula.__name__.strip("_"), _compiled(formula, exact)
    for x in args:
        if isinstance(x, Tensor) and x.dim() > 1 and len(x) == len(args[0]):
            torch._dynamo.maybe_mark_dynamic(x, 0)
    try:
        found = compiled(*args)
    except Exception as error:  # noqa: BLE001 - whatever a compiler raises, the formula works
        logger.warning("%s cannot be compiled (%.300s); it runs uncompiled, which is slower", name, error)
        return formula
    off = max(_distance(a, b, exact) for a, b in zip(*map(tree_leaves, (found, formula(*args))), strict=True))
    if off > (0 if exact else _TOLERANCE):
        logger.warning("%s is off by %.1e of the norm where it is compiled; it runs uncompiled", name, off)
        return formula
    return compiled


def _compiled(formula: Formula[Found], exact: bool) -> Formula[Found]:
    """By itself: torch takes shapes for dynamic that differ between two calls of one function, and widths are not."""
    assert isinstance(formula, FunctionType)
    alone = FunctionType(formula.__code__.replace(), formula.__globals__, formula.__name__, formula.__defaults__)
    return torch.compile(alone, options={"eager_numerics.division_rounding": True} if exact else None)


def _distance(found: Tensor, due: Tensor, exact: bool) -> float:
    """As a share of the norm; infinite where one alone is finite. What both have for infinite or NaN is no fault."""
    a, b = found.float(), due.float()
    if not torch.equal(a.isfinite(), b.isfinite()):
        return float("inf")
    a, b = a.nan_to_num(), b.nan_to_num()
    if exact:
        return float(not torch.equal(a, b))
    return ((a - b).norm() / b.norm().clamp_min(1e-12)).item()
