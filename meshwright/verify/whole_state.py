"""Gather optimizer state on rank 0: a wrong factor in a gradient may show only there.

Muon divides an update by its norm, so with scaled gradients its weights are right, but its momentum is not.
"""

from __future__ import annotations

from torch import Tensor

from ..checkpoint import planes_of, with_zeros
from ..engine import Engine
from ..weights import Values, whole_tensors


def whole_state(engine: Engine) -> dict[str, Tensor]:
    """Return wide optimizer state on rank 0, by state name and Hugging Face name. All ranks call it."""
    model, optimizer = engine.model, engine.optimizer
    stored = Values(model.values().apart[0])
    trained = {name: stored[name] for name in model.trained if name in stored}
    state = optimizer.by_name({**optimizer.new_state(trained, empty=True), **optimizer.state})
    whole: dict[str, Tensor] = {}
    has = optimizer.state_names
    dtypes = {
        name: {param: model.kept[param] for param in model.trained if name in has[param]}
        for name in optimizer.options.state_names
    }
    for plane in planes_of(model.table, model.keymap, {}, dtypes)[1:]:
        values = with_zeros(Values(state.get(plane.name, {})), plane, model.table, stored)
        keys = [key for key in plane.keymap.keys.values() if key.name not in plane.keymap.carried]
        tensors = whole_tensors(model.stored_model(values), plane.keymap, keys)
        whole |= {f"{plane.name} of {key.name}": tensor for key, tensor in tensors}
    return whole
