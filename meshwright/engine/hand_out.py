"""What leaves the engine: tensors under their Hugging Face names, and whole directories."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from .. import weights
from ..errors import ConfigError, StateError
from ..mesh import watched
from .model import Model


def stream(model: Model, which: str = "weight") -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, whole tensor) one after the other on global rank 0, in the source's layout.

    All ranks must run through it; elsewhere it yields nothing. Savings: a few tensors (64 MiB) at a time. Weights come
    in the dtype of the source, gradients in float32; tensors that are not trained (`mtp.*`) are left out.
    """
    stored = _stored(model, which)
    keys = [k for k in model.spelling.keys.values() if k.name not in model.spelling.carried]
    made_of = weights.blocks_by_key(model.table, model.spelling.choice)
    keys = [k for k in keys if all(p.name in stored for p, _ in made_of[k.name])]
    for key, tensor in weights.whole_tensors(model.holding(stored), model.spelling, keys, exact=which == "weight"):
        yield key.name, tensor


@watched()
def gather(model: Model, which: str = "weight") -> dict[str, Tensor]:
    """`stream` as a dict: whole on rank 0, empty elsewhere."""
    return dict(stream(model, which))


@watched()
def export(model: Model, directory: str | os.PathLike[str], *, dtype: torch.dtype | None = None) -> None:
    """Write a Hugging Face directory: files, keys, layouts and dtypes as in the source (or in `dtype`, which rounds
    none of the float32 parameters).

    It appears whole or not at all. All ranks call it.
    """
    made_of = weights.blocks_by_key(model.table, model.spelling.choice)
    exact = {key for key, parts in made_of.items() if any(param.float32 for param, _ in parts)}
    spelling = model.spelling if dtype is None else model.spelling.recast(dtype, exact)
    config = weights.exported_config(model.config, dtype)
    weights.write_directory(
        model.holding(model.stored()), spelling, config, model.directory, Path(directory).absolute()
    )


def _stored(model: Model, which: str) -> dict[str, Tensor]:
    if which == "weight":
        return model.stored()
    if which != "grad":
        raise ConfigError(f"stream(model, {which!r}): choose 'weight' or 'grad'")
    grads = model.grads()
    if not grads:
        raise StateError("there are no gradients; call engine.backward(batches) and not yet update()")
    return grads
