"""The model of a config on its mesh, before anything runs: what is refused, its layout, and an estimate of memory.

All of it is computed from config.json and the headers of the weight files, on the meta device. The launcher and
`--dry-run` can thus refuse a mesh in seconds that ranks would refuse after minutes.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ..axes import Axes
from ..blueprint import Blueprint
from ..errors import MeshError
from ..log import logger
from ..memory.budget import fits, too_large
from ..mesh import Mesh
from ..optim import AdamW, Muon, Optimizer, check_blocks
from ..plan import Figures, find, objections, reasons, work_of
from ..plan.figures import COMPUTE
from ..recipe import patterns_of
from .config import Config, OptimSection


def optimizer_of(section: OptimSection) -> Optimizer:
    """Return the optimizer of a run file."""
    first, second = section.betas
    dtype = getattr(torch, section.state_dtype) if section.state_dtype else None
    decay = section.weight_decay
    if section.kind == "adamw":
        return AdamW(betas=(first, second), eps=section.eps, weight_decay=decay, state_dtype=dtype)
    return Muon(
        betas=(first, second), eps=section.eps, weight_decay=decay, state_dtype=dtype, momentum=section.momentum,
        by_head=section.by_head, exclude=tuple(section.exclude), matrix_dtype=getattr(torch, section.matrix_dtype),
    )  # fmt: skip


def warn_of_memory(config: Config, mesh: Mesh) -> None:
    """Warn, before minutes of loading, that a step will probably not fit into memory.

    It is a warning and not a refusal, because the estimate is high: it counts everything FSDP gathers as if it were in
    memory at the same time. The estimate does not cover frozen parameters, compiled layers and other dtypes; for these
    nothing is logged.
    """
    recipe = config.recipe
    if mesh.rank or recipe.memory.compiled or patterns_of(recipe.train) != ["**"] or recipe.dtype != COMPUTE:
        return
    try:
        need = replace(layout_of(config), device=mesh.least_bytes).need
        if not fits(need.stored(), mesh.memory):
            logger.warning("a step will probably fail: %s", too_large(need, mesh.memory))
    except Exception as error:  # noqa: BLE001 - a custom model may read values, which the meta device lacks
        logger.debug("the memory of a step is unknown: %s", error)


def layout_of(config: Config) -> Figures:
    """Return where the parameters are stored and what a step communicates. Refuse an invalid mesh."""
    blueprint = model_of(config)
    refused = objections_to(blueprint, config)
    if refused:
        raise MeshError(reasons(refused))
    optimizer_of(config.optim).check(blueprint.table, blueprint.trained())
    check_state(blueprint, config)
    axes = Axes(**config.mesh.model_dump())
    work = work_of(axes, config.train.length, _num_batches(config) or 1)
    return Figures(config.model, blueprint, axes, work, optimizer=optimizer_of(config.optim))


def model_of(config: Config) -> Blueprint:
    """Return the blueprint of a config's model. Only headers of weight files are read, and no download of weights."""
    return find(config.model, config.recipe, weights=False, say=logger.info)


def objections_to(blueprint: Blueprint, config: Config) -> list[str]:
    """Return the reasons why the model cannot be trained on the mesh of a config."""
    sizes, problems = config.mesh.model_dump(), list[str]()
    if sizes["ep"] > 1 and "ep" not in {blueprint.spec.rules.axis.get(d) for p in blueprint.table for d in p.dims}:
        problems.append(f"ep={sizes.pop('ep')} divides experts, but this model has none; leave ep out")
    return [*problems, *objections(blueprint, sizes, _num_batches(config))]


def check_state(blueprint: Blueprint, config: Config) -> None:
    """Refuse 8-bit optimizer state where a mesh cuts through its blocks."""
    optimizer = optimizer_of(config.optim)
    if optimizer.state_dtype == torch.uint8:
        quantised = optimizer.quantised(blueprint.table, blueprint.trained())
        check_blocks(blueprint.spec, Axes(**config.mesh.model_dump()), quantised, 'state_dtype = "bfloat16"')


def _num_batches(config: Config) -> int | None:
    """Return the number of micro-batches per data rank and step, None if it is not whole."""
    num, rest = divmod(config.train.step_tokens, config.train.length * config.mesh.num_data_ranks)
    return None if rest else num
