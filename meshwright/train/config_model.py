"""The model of a config on its mesh, before anything runs."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..axes import Axes
from ..blueprint import Blueprint
from ..engine import Context, Savings
from ..engine.validation import in_fp8, matching, patterns_of
from ..errors import MeshError
from ..log import logger
from ..memory.budget import fits, too_large
from ..mesh import Mesh
from ..optim import AdamW, Optimizer, check_blocks
from ..plan import Figures, find, objections, reasons, work_of
from ..plan.figures import COMPUTE
from ..plan.wording import name_of
from .config import Config, OptimSection, TrainSection

_SAVINGS = ("recompute", "reshard", "offload", "compiled", "gather_once", "sum_once", "narrow_grads", "token_once")


def savings_of(section: TrainSection) -> Savings:
    return Savings(**section.model_dump(include={*_SAVINGS}))


def optimizer_of(section: OptimSection) -> Optimizer:
    first, second = section.betas
    dtype = getattr(torch, section.state_dtype) if section.state_dtype else None
    return AdamW(betas=(first, second), eps=section.eps, weight_decay=section.weight_decay, state_dtype=dtype)


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
    blueprint = laid_out(model_of(config), config)
    refused = objections_to(blueprint, config)
    if refused:
        raise MeshError(reasons(refused))
    check_state(blueprint, config)
    axes = Axes(**config.mesh.model_dump())
    work, savings = work_of(axes, config.train.length, _num_batches(config) or 1), savings_of(config.train)
    return Figures(config.model, blueprint, axes, work, savings=savings, optimizer=optimizer_of(config.optim))


def model_of(config: Config) -> Blueprint:
    """Return the model of a config, of which only the headers are read."""
    return find(config.model, "lm", weights=False, say=logger.info, tower=config.train.tower)


def laid_out(blueprint: Blueprint, config: Config) -> Blueprint:
    blueprint = blueprint.run_by(config.pipeline.settings(), savings_of(config.train).traffic)
    blueprint = blueprint.in_context(Context(**config.context.model_dump()))
    return blueprint.in_fp8(in_fp8(config.train.fp8, config.train.fp8_skip, blueprint.table))


def objections_to(blueprint: Blueprint, config: Config) -> list[str]:
    """Say why the model cannot be trained on the mesh of a config."""
    sizes, found = config.mesh.model_dump(), list[str]()
    if sizes["ep"] > 1 and "ep" not in {blueprint.spec.rules.axis.get(d) for p in blueprint.table for d in p.dims}:
        found.append(f"ep={sizes.pop('ep')} shares out experts, and this model has none; leave ep out")
    return [*found, *objections(blueprint, sizes, _num_batches(config))]


def check_state(blueprint: Blueprint, config: Config) -> None:
    """Refuse 8-bit optimizer state where a mesh cuts through its blocks."""
    optimizer = optimizer_of(config.optim)
    if optimizer.state_dtype == torch.uint8:
        quantised = optimizer.quantised(blueprint.table, trained_names(blueprint, config))
        check_blocks(blueprint.spec, Axes(**config.mesh.model_dump()), quantised, 'state_dtype = "bfloat16"')


def trained_names(blueprint: Blueprint, config: Config) -> list[str]:
    """Return the parameters that are trained. Refuse a pattern that names none."""
    names = blueprint.table.params
    trained = {name for each in patterns_of(config.train.train) for name in matching(each, names, "train")}
    return [name for name in names if name in trained]


def _num_batches(config: Config) -> int | None:
    """Return the micro-batches of a data rank in a step, None where they are no whole number."""
    num, rest = divmod(config.train.step_tokens, config.train.length * config.mesh.num_data_ranks)
    return None if rest else num
