"""The state dict of an engine: its planes (weights and optimizer state) and its counters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import CheckpointError
from .agreement import check_ready
from .optimizer_state import COUNTERS, StateDict, check_same_keys, check_same_scale, planes_in_memory, take_planes

if TYPE_CHECKING:
    from .engine import Engine


def state_of(engine: Engine) -> StateDict:
    """Return weights, optimizer state and counters: live memory, not copies."""
    check_ready(engine.model, engine.trained)
    counters = {"step": torch.tensor(engine.steps), "tokens": torch.tensor(engine.tokens)}
    counters |= {"router_load": engine.router.trained_load.clone()}
    if engine.mtp is not None:
        counters["mtp_router_load"] = engine.mtp.router.trained_load.clone()
    if (lora := engine.model.recipe.lora) is not None:
        counters["adapter_scale"] = torch.tensor(lora.scale, dtype=torch.float64)
    return {**planes_in_memory(engine.model, engine.optimizer, engine.state_layout), COUNTERS: counters}


def take_state(engine: Engine, state: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Continue from a state dict. All ranks call it, and all raise if one cannot."""
    engine.model.calls.asleep.check()

    def take() -> None:
        own = state_of(engine)
        check_same_keys(own, state)
        counters = state[COUNTERS]
        check_same_scale(engine.model.recipe.lora, counters)
        take_planes({name: own[name] for name in own if name != COUNTERS}, state)
        engine.steps = engine.optimizer.steps = int(counters["step"])
        engine.tokens = int(counters["tokens"])
        engine.router.resume(counters["router_load"].tolist())
        if engine.mtp is not None:
            engine.mtp.router.resume(counters["mtp_router_load"].tolist())

    engine.model.mesh.together(take, "load_state_dict", CheckpointError, "the state dict was not loaded")
