"""Fuse elementwise formulas into one kernel with torch.compile, and check the kernel before trusting it.

RMSNorm, RoPE and SwiGLU are memory-bound: each separate operation would read and write all activations once more. The
kernel is compiled from the formula itself, so there is one source. It is used only if it agrees with the plain formula
on the first inputs of its kind; otherwise the formula runs as it is, and a warning says so once.
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

_TOLERANCE = 1e-2  # of the norm: the kernel rounds once, the formula rounds each intermediate result to bfloat16
_TRIAL_ROWS = 512  # rows of the comparison: more would take memory that no plan counts

Result = TypeVar("Result")  # a tensor, or a tuple of them
Formula = Callable[..., Result]
_serial = count()


def fused(formula: Formula[Result]) -> Formula[Result]:
    """Decorate a formula to run as one kernel for 16-bit dtypes on an accelerator; elsewhere it runs as it is.

    The formula has no autograd and writes into none of its arguments; it is the forward or the backward of
    an autograd.Function. Its first argument is a tensor that determines device, dtype and the number of rows; another
    number of rows does not recompile. Inside a layer that is compiled as a whole, the formula is inlined.
    """
    chosen: dict[object, Formula[Result]] = {}

    @functools.wraps(formula)
    def op(*args: Any) -> Result:
        x = args[0]
        if torch.compiler.is_compiling() or x.device.type in SLOW or x.dtype not in NARROW or len(x) < 2:
            return formula(*args)
        detached = [each.detach() if isinstance(each, Tensor) else each for each in args]
        key = (x.device, torch.is_inference_mode_enabled(), *map(_cache_key, detached))
        with torch.no_grad():
            if key not in chosen:
                with _disable_current_modes():  # a dispatch mode of activation checkpointing must not see the trial
                    chosen[key] = _chosen(formula, detached)
            try:
                return chosen[key](*detached)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # noqa: BLE001 - such as a full disk when it compiles for other strides
                chosen[key] = _refused(formula, error)
                return formula(*detached)

    return op


def _cache_key(argument: object) -> object:
    """Return what a kernel is specialised on: everything except the number of rows."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.dim(), argument.shape[1:], argument.stride()[1:]
    return argument


def _chosen(formula: Formula[Result], args: list[Any]) -> Formula[Result]:
    """Return the compiled kernel if it agrees with the formula on the first rows."""
    compiled, rows = _compiled(formula), len(args[0])
    by_rows = [
        isinstance(x, Tensor) and len(x) == rows and (x.dim() > 1 or rows not in args[0].shape[1:]) for x in args
    ]
    for x, has_rows in zip(args, by_rows, strict=True):
        if has_rows:
            torch._dynamo.maybe_mark_dynamic(x, 0)
    few = [x[:_TRIAL_ROWS] if has_rows else x for x, has_rows in zip(args, by_rows, strict=True)]
    try:
        compiled(*args)  # with all rows first: torch chooses the kernel's tiling by their number
        results = tree_leaves(compiled(*few))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a compiler raises, the formula works
        return _refused(formula, error)
    for a, b in zip(results, tree_leaves(formula(*few)), strict=True):
        if not (off := _distance(a, b)) <= _TOLERANCE:  # NaN too
            text = "%s is off by %.1e of the norm where it is compiled; it runs uncompiled, which is slower"
            logger.warning(text, formula.__name__, off)
            return formula
    return compiled


def _refused(formula: Formula[Result], error: Exception) -> Formula[Result]:
    """Warn, and fall back to the formula."""
    logger.warning("%s cannot be compiled (%.300s); it runs uncompiled, which is slower", formula.__name__, error)
    return formula


def _compiled(formula: Formula[Result]) -> Formula[Result]:
    """Compile a copy of the formula under a unique name.

    torch.compile makes a size dynamic once it differs between two calls of the same code object, which it identifies by
    name and line. Widths never vary for one use of a formula, so each use gets its own code object and stays static.
    """
    assert isinstance(formula, FunctionType)
    code = formula.__code__.replace(co_name=f"{formula.__name__}_{next(_serial)}")
    return torch.compile(FunctionType(code, formula.__globals__, code.co_name, formula.__defaults__))


def _distance(result: Tensor, expected: Tensor) -> float:
    """Return the distance of two results relative to the norm; infinite if they are not finite in different places.

    Where both are infinite or both NaN, the kernel is not to blame.
    """
    a, b = result.float(), expected.float()
    finite = b.isfinite()
    if not torch.equal(a.isfinite(), finite) or not torch.equal(*(x[~finite].nan_to_num() for x in (a, b))):
        return float("inf")
    a, b = (x.where(finite, 0.0).double() for x in (a, b))
    return ((a - b).norm() / b.norm().clamp_min(1e-12)).item()
