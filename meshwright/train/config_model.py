"""The model of a config on its mesh, before anything runs."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..axes import Axes
from ..blueprint import Blueprint
from ..errors import MeshError
from ..log import logger
from ..memory.budget import fits, too_large
from ..mesh import Mesh
from ..optim import AdamW, Optimizer, check_blocks
from ..plan import Figures, find, objections, reasons, work_of
from ..plan.figures import COMPUTE
from ..recipe import patterns_of
from .config import Config, OptimSection


def optimizer_of(section: OptimSection) -> Optimizer:
    first, second = section.betas
    dtype = getattr(torch, section.state_dtype) if section.state_dtype else None
    return AdamW(betas=(first, second), eps=section.eps, weight_decay=section.weight_decay, state_dtype=dtype)


def warn_of_memory(config: Config, mesh: Mesh) -> None:
    """Say before minutes of loading that a step will hardly fit. It is no refusal: what FSDP gathers is counted as if
    all of it were there at once. Nothing is said of what is not planned for: frozen parameters, compiled layers, or
    another dtype."""
    recipe = config.recipe
    if mesh.rank or recipe.memory.compiled or patterns_of(recipe.train) != ["**"] or recipe.dtype != COMPUTE:
        return
    try:
        need = replace(layout_of(config), device=mesh.least_bytes).need
        if not fits(need.stored(), mesh.memory):
            logger.warning("a step will probably fail: %s", too_large(need, mesh.memory))
    except Exception as error:  # noqa: BLE001 - a model of somebody's own may read values, which a sketch has not
        logger.debug("what a step needs of memory is not known: %s", error)


def layout_of(config: Config) -> Figures:
    """Where its parameters lie and what a step sends. A mesh that cannot be is refused, with those that can."""
    blueprint = model_of(config)
    refused = objections_to(blueprint, config)
    if refused:
        raise MeshError(reasons(refused))
    check_state(blueprint, config)
    axes = Axes(**config.mesh.model_dump())
    work = work_of(axes, config.train.length, _num_batches(config) or 1)
    return Figures(config.model, blueprint, axes, work, optimizer=optimizer_of(config.optim))


def model_of(config: Config) -> Blueprint:
    """Return the model of a config, of which only the headers are read."""
    return find(config.model, config.recipe, weights=False, say=logger.info)


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
        quantised = optimizer.quantised(blueprint.table, blueprint.trained())
        check_blocks(blueprint.spec, Axes(**config.mesh.model_dump()), quantised, 'state_dtype = "bfloat16"')


def _num_batches(config: Config) -> int | None:
    """Return the micro-batches of a data rank in a step, None where they are no whole number."""
    num, rest = divmod(config.train.step_tokens, config.train.length * config.mesh.num_data_ranks)
    return None if rest else num
