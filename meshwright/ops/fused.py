"""Elementwise formulas in one kernel, on devices where each operation by itself would pass all numbers through memory.

`torch.compile` makes the kernel of the formula itself, so there is one form of it in this house. It is not trusted: on
the first rows of a kind it must agree with the formula as it is written. Else that is used, which is said once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import count
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from ..log import logger
from .kernels import NARROW, SLOW

_TOLERANCE = 1e-2  # of a norm: the kernel rounds once where the formula rounds each of its parts to bfloat16
_FEW = 512  # rows that both are tried on: all of them would take memory that no plan counts

Found = TypeVar("Found")  # a tensor, or several
Formula = Callable[..., Found]
_numbers = count()


def fused(formula: Formula[Found]) -> Formula[Found]:
    """`formula` in one kernel for 16-bit numbers on a device; as it is elsewhere. It has no gradient of its own, and
    writes into none of its arguments.

    The first of its arguments is a tensor that says which device and dtype, and how many rows there are: another number
    of them does not compile it anew. Within a layer that is compiled as a whole it is a part of that.
    """
    chosen: dict[object, Formula[Found]] = {}

    @functools.wraps(formula)
    def op(*args: Any) -> Found:
        x = args[0]
        if torch.compiler.is_compiling() or x.device.type in SLOW or x.dtype not in NARROW or len(x) < 2:
            return formula(*args)
        plain = [each.detach() if isinstance(each, Tensor) else each for each in args]
        key = (x.device, torch.is_inference_mode_enabled(), *map(_kind, plain))
        with torch.no_grad():
            if key not in chosen:
                with _disable_current_modes():  # those of a layer that is recomputed are not of a trial
                    chosen[key] = _chosen(formula, plain)
            try:
                return chosen[key](*plain)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # noqa: BLE001 - such as a full disk, where it is compiled for other strides
                chosen[key] = _refused(formula, error)
                return formula(*plain)

    return op


def _kind(argument: object) -> object:
    """What a kernel is made for: all but the number of rows."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.dim(), argument.shape[1:], argument.stride()[1:]
    return argument


def _chosen(formula: Formula[Found], args: list[Any]) -> Formula[Found]:
    """The kernel, if it agrees with the formula on the first rows."""
    compiled, rows = _compiled(formula), len(args[0])
    of_rows = [
        isinstance(x, Tensor) and len(x) == rows and (x.dim() > 1 or rows not in args[0].shape[1:]) for x in args
    ]
    for x, has_rows in zip(args, of_rows, strict=True):
        if has_rows:
            torch._dynamo.maybe_mark_dynamic(x, 0)
    few = [x[:_FEW] if has_rows else x for x, has_rows in zip(args, of_rows, strict=True)]
    try:
        compiled(*args)  # for so many rows: torch chooses by them how a kernel goes through memory
        found = tree_leaves(compiled(*few))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a compiler raises, the formula works
        return _refused(formula, error)
    for a, b in zip(found, tree_leaves(formula(*few)), strict=True):
        if not (off := _distance(a, b)) <= _TOLERANCE:  # NaN too
            told = "%s is off by %.1e of the norm where it is compiled; it runs uncompiled, which is slower"
            logger.warning(told, formula.__name__, off)
            return formula
    return compiled


def _refused(formula: Formula[Found], error: Exception) -> Formula[Found]:
    logger.warning("%s cannot be compiled (%.300s); it runs uncompiled, which is slower", formula.__name__, error)
    return formula


def _compiled(formula: Formula[Found]) -> Formula[Found]:
    """By itself: torch takes sizes for dynamic that differ between two calls of one function, and widths are not. It
    knows a function by its name and where it stands."""
    assert isinstance(formula, FunctionType)
    code = formula.__code__.replace(co_name=f"{formula.__name__}_{next(_numbers)}")
    return torch.compile(FunctionType(code, formula.__globals__, code.co_name, formula.__defaults__))


def _distance(found: Tensor, due: Tensor) -> float:
    """As a share of the norm; infinite where what is not finite differs. What both have for infinite or NaN is no
    fault."""
    a, b = found.float(), due.float()
    finite = b.isfinite()
    if not torch.equal(a.isfinite(), finite) or not torch.equal(*(x[~finite].nan_to_num() for x in (a, b))):
        return float("inf")
    a, b = (x.where(finite, 0.0).double() for x in (a, b))
    return ((a - b).norm() / b.norm().clamp_min(1e-12)).item()
