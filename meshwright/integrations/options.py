"""Translate what configs of several frameworks share into Meshwright's options: mesh, model, learning rate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from .. import api as mw

_AXES = ("pp", "replicate", "fsdp", "cp", "tp", "ep")


def mesh_axes(axes: Mapping[str, int | None], world: int) -> dict[str, Any]:
    """Return the sizes of the mesh axes. By default `fsdp` takes the ranks that the other axes leave."""
    if unknown := [name for name in axes if name not in _AXES]:
        raise mw.ConfigError(f"mesh has {unknown[0]!r}; its axes are {', '.join(_AXES)}")
    sizes = {name: size for name, size in axes.items() if size is not None}
    others = math.prod(size for name, size in sizes.items() if name not in ("fsdp", "ep"))
    return {"fsdp": max(1, world // max(1, others)), **sizes}


def load_options(head: str, dtype: str, recompute: bool, choices: Any) -> dict[str, Any]:
    """Return arguments of `mw.load`. `choices` has the fields of `mw.MemoryOptions`, `mw.Pipeline` and
    `mw.ContextParallel` as dicts `memory`, `pipeline`, `context`.

    Layers are not compiled unless `memory` says so, so that old log-probabilities and those of training round equally.
    """
    memory = {"compiled": False, "recompute": "full" if recompute else "none"}
    return {
        "head": head,
        "dtype": dtype_of(dtype),
        "memory": mw.MemoryOptions(**{**memory, **choices.memory}),
        "pipeline": mw.Pipeline(**choices.pipeline),
        "context": mw.ContextParallel(**choices.context),
    }


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype for a name such as "bfloat16" or "bf16"."""
    names = {"bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}
    known = {each: getattr(torch, each) for each in names.values()}
    wanted = known.get(names.get(name, name))
    if wanted is None:
        raise mw.ConfigError(f"dtype={name!r} is not supported; choose from {', '.join(known)}")
    return wanted


def cosine(progress: float, least: float, cycles: float = 0.5) -> float:
    """Return the factor of a cosine schedule, from 1 down to `least`, at a progress from 0 to 1."""
    wave = math.cos(math.pi * cycles * 2.0 * progress)
    return max(least, wave * (1 - least) / 2 + (1 + least) / 2)
