"""The model of a config on its mesh, before anything runs."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..axes import Axes
from ..engine import Context, Savings
from ..engine.arguments import in_fp8, matching, patterns_of
from ..engine.fit import fits, too_large
from ..errors import MeshError
from ..layout import check_coded, coded_of
from ..log import logger
from ..mesh import Mesh
from ..plan import Figures, find, objections, told, work_of
from ..plan.figures import COMPUTE
from ..plan.wording import name_of
from .config import Config, TrainSection

_SAVINGS = ("recompute", "reshard", "offload", "compiled", "gather_once", "sum_once", "narrow_grads", "token_once")


def savings_of(section: TrainSection) -> Savings:
    return Savings(**section.model_dump(include={*_SAVINGS}))


def warn_of_memory(config: Config, mesh: Mesh) -> None:
    """Say before minutes of loading that a step will hardly fit. It is no refusal: what FSDP gathers is counted as if
    all of it were there at once. Nothing is said of what is not planned for: frozen parameters, compiled layers, or
    another dtype."""
    train = config.train
    if mesh.rank or train.compiled or patterns_of(train.train) != ["**"] or train.dtype != name_of(COMPUTE):
        return
    try:
        need = replace(layout_of(config), device=mesh.least_bytes).need
        if not fits(need.stored(), mesh.memory):
            logger.warning("a step will probably fail: %s", too_large(need, mesh.memory))
    except Exception as error:  # noqa: BLE001 - a model of somebody's own may read values, which a sketch has not
        logger.debug("what a step needs of memory is not known: %s", error)


def layout_of(config: Config) -> Figures:
    """Where its parameters lie and what a step sends. A mesh that cannot be is refused, with those that can."""
    blueprint = find(config.model, "lm", weights=False, say=logger.info, tower=config.train.tower)
    blueprint = blueprint.run_by(config.pipeline.settings(), savings_of(config.train).traffic)
    blueprint = blueprint.in_context(Context(**config.context.model_dump()))
    blueprint = blueprint.in_fp8(in_fp8(config.train.fp8, config.train.fp8_skip, blueprint.table))
    sizes = config.mesh.model_dump()
    num_batches = config.train.streams_per_step // config.mesh.num_data_ranks
    refused = objections(blueprint, sizes, num_batches)
    if refused:
        raise MeshError(told(refused))
    axes = Axes(**sizes)
    if config.optim.state_dtype == "uint8":
        names = blueprint.table.params
        trained = {name for each in patterns_of(config.train.train) for name in matching(each, names, "train")}
        coded = coded_of(blueprint.table, [name for name in names if name in trained])
        check_coded(blueprint.spec, axes, coded, 'state_dtype = "bfloat16"')
    state = getattr(torch, config.optim.state_dtype) if config.optim.state_dtype else None
    work, savings = work_of(axes, config.train.length, num_batches), savings_of(config.train)
    return Figures(config.model, blueprint, axes, work, savings=savings, state_dtype=state)
