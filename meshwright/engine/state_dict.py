"""The state of a training under the names of the files, for `torch.distributed.checkpoint` in code of the user's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .. import checkpoint as disk
from ..checkpoint import FIRST, SECOND, WEIGHTS, Sharded
from ..errors import CheckpointError, ConfigError
from ..optim import AdamW
from ..weights import Values
from .model import Model
from .moments import Kept, named, scales_of

StateDict = dict[str, dict[str, Any]]
COUNTERS = "counters"


def planes_in_memory(model: Model, optimizer: AdamW, kept: Kept) -> dict[str, dict[str, Sharded]]:
    """By plane and key: what this rank holds, live, in the dtype in which it is held. Moments that no step has made yet
    are made: they are zero, and may be about to be filled."""
    live, _ = model.values().apart  # what stays in 8 bits is of the source, and takes nothing
    stored, out, owned = Values(live), dict[str, dict[str, Sharded]](), model.owned.union(scales_of(model.owned))
    trained = {name: live[name] for name in model.trained if name in live}
    optimizer.make_moments(trained)
    both = {**optimizer.moments, **optimizer.new_moments(trained, empty=True)}
    first, second = (Values({name: pair[at] for name, pair in both.items()}) for at in (0, 1))
    values = {WEIGHTS: stored, FIRST: first, SECOND: second}
    moments = {name: pair[0].dtype for name, pair in both.items()}
    for plane in disk.planes_of(kept.spec.table, model.keymap, {}, moments):
        held = disk.with_zeros(values[plane.name], plane, model.table, stored)
        whole = {name: held[name] if name in values[plane.name] else held[name].contiguous() for name in held}
        found = disk.sharded(whole, kept.pieces, owned, plane.keymap)
        out[plane.name] = {named(key, tensor.dtype): tensor for key, tensor in found.items()}
    return out


def check_same_keys(mine: Mapping[str, Mapping[str, object]], given: object) -> None:
    """Before anything is taken."""
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"a state dict is a dict, not a {type(given).__name__}; give what engine.state_dict() returned"
        )
    for plane, keys in mine.items():
        theirs = given.get(plane, {})
        odd = sorted({*keys} ^ {*theirs})
        if odd:
            whose = "the state dict" if odd[0] in theirs else "this engine"
            raise CheckpointError(
                f"{plane}/{odd[0]} is in {whose} alone ({len(odd)} such keys); give what engine.state_dict() of an "
                "engine of the same model with the same train= returned"
            )


def take_planes(mine: Mapping[str, Mapping[str, Sharded]], given: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Into live memory. What a load has put there already stays."""
    with torch.no_grad():
        for plane, keys in mine.items():
            for key, tensor in keys.items():
                disk.take(tensor, given[plane][key], f"{plane}/{key}")
