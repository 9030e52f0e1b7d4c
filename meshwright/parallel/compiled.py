"""Compile layers with torch.compile, and decide whether to compile if the user has not decided."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError
from ..log import logger
from ..mesh.memory_limits import has_inductor
from ..models import Decoder, Layer
from ..recipe import LATE, Recipe

# Inductor's option to divide exactly as torch does, so that scales of FP8 blocks are bitwise equal: its name in newer
# releases (torch 2.11 or later), and the older name.
_DIVISION = ("eager_numerics.division_rounding", "emulate_divison_rounding")

_MOST_LENGTHS = 2  # a hybrid model has two kinds of layers in one function


def compile_layer(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compile the forward of a layer, for each number of tokens."""
    known = torch._inductor.list_options()
    return torch.compile(run, dynamic=False, options={name: True for name in _DIVISION if name in known})


class CompiledLayer:
    """The forward of a layer, compiled in passes with gradients, for the first lengths of a micro-batch.

    Each length is compiled separately. Lengths in samples and evaluations vary, and torch gives up on a function that
    it has compiled eight times.
    """

    def __init__(self, run: Callable[..., Tensor]) -> None:
        self.plain, self.compiled = run, compile_layer(run)
        self.lengths = set[int]()

    def __call__(self, x_TD: Tensor, *args: Any) -> Tensor:
        if not torch.is_grad_enabled() or not self._takes(len(x_TD)):
            return self.plain(x_TD, *args)
        try:
            return self.compiled(x_TD, *args)
        except torch._dynamo.exc.TorchDynamoException as error:
            raise ConfigError(
                f"a layer does not compile: {error!s:.500}\nGive compiled=False of mw.MemoryOptions, or report it"
            ) from error

    def _takes(self, length: int) -> bool:
        """Return whether a length is among the first ones."""
        if length not in self.lengths and len(self.lengths) == _MOST_LENGTHS:
            _say_once(f"layers are compiled for {_MOST_LENGTHS} lengths of a micro-batch; others run slower, such as "
                      f"{length:,} tokens a rank: give mw.pack or mw.batches a length=")  # fmt: skip
            return False
        self.lengths.add(length)
        return True


@cache
def _say_once(text: str) -> None:
    logger.warning(text)


def with_compiled(recipe: Recipe, model: Decoder, device: torch.device) -> Recipe:
    """Return the recipe with `compiled` decided: on an accelerator, unless something forbids it."""
    memory = recipe.memory
    if memory.compiled is not None:
        return recipe
    if not has_inductor(device):
        return replace(recipe, memory=replace(memory, compiled=False))
    reason = _forbidden(recipe, model)
    failure = "" if reason else _failure(device)
    if failure:
        logger.warning("layers are not compiled, and run slower: %s", failure)
    elif reason:
        logger.info("layers are not compiled: %s", reason)
    else:
        logger.info("layers are compiled, which takes minutes in the first step; compiled=False leaves it")
    return replace(recipe, memory=replace(memory, compiled=not (reason or failure)))


def _forbidden(recipe: Recipe, model: Decoder) -> str:
    """Return the reason why layers must not be compiled; empty if they may be."""
    if recipe.memory.recompute == "selective":
        return 'recompute="selective" chooses among the operations of a layer'
    if recipe.pipeline.schedule in LATE:
        return f"schedule={recipe.pipeline.schedule!r} splits backward in two"
    if recipe.dtype == torch.float64:
        return "dtype=torch.float64 is for proofs"
    if recipe.fp8 is not None:
        return f"fp8={recipe.fp8!r} gathers codes, and compiled layers gather values"
    others = [type(layer).__name__ for layer in model.layers.values() if not isinstance(layer, Layer)]
    if others:
        return f"{others[0]} is not a subclass of models.decoder.Layer"
    if sys.version_info[:3] == (3, 13, 0):
        return "Python 3.13.0 crashes in compiled layers; 3.13.1 does not"
    return ""


def _failure(device: torch.device) -> str:
    """Compile a small function, and return how it fails: without Triton or a C compiler, or on an old GPU."""

    def square(x: Tensor) -> Tensor:
        return x * x + 1

    x = torch.linspace(-2, 2, 64, device=device)
    try:
        right = torch.allclose(torch.compile(square)(x), square(x))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a compiler raises, layers run without it
        return f"torch.compile fails here ({error!s:.300})"
    return "" if right else "torch.compile computes something else here"
