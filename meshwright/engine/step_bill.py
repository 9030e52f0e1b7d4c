"""The bill of an engine step: the model's collectives, and the engine's own.

The engine adds the agreement, and the all-reduces of the loss, the norm and the expert load. Their descriptions are
those that the engine runs (`loss_sum`, `norm_sum`, `step_load`), so the bill cannot drift from the code.
"""

from __future__ import annotations

from ..axes import DENSE, Axes
from ..blueprint import Blueprint
from ..ops.codings import FP8
from ..optim import AdamW, Optimizer
from ..sharding import Charge, ImageFrames, Work, bill
from .agreement import NUM_COLUMNS, STEP, agreement_name
from .model import Model
from .mtp import LABEL
from .router import pooled_counts, step_load
from .step_results import loss_sum, norm_sum
from .vision_sync import forced_tower_runs


def step_bill(
    model: Model, tokens: int, num_batches: int, router_aux: str = "pooled", images: ImageFrames = (),
    optimizer: Optimizer = AdamW(),
) -> list[Charge]:  # fmt: skip
    """Return the collectives of `engine.step` on this rank, for `num_batches` micro-batches of `tokens` tokens.

    `images`: for each micro-batch the frames of this data rank, None if no data rank has any.
    """
    compute = model.dtype.itemsize
    frozen = frozenset(model.table.params) - {*model.trained}
    if forced_tower_runs(model, num_batches):  # the tower runs even without images
        images = tuple(frames or () for frames in images or [None] * num_batches)
    numbers = {**model.codings, **dict.fromkeys(model.low.names, FP8)}
    work = Work(tokens, num_batches, compute, max(4, compute), images, frozen, numbers, model.begun)
    return engine_bill(model.blueprint, model.mesh.axes, model.mesh.rank, work, router_aux, optimizer)


def engine_bill(
    blueprint: Blueprint, axes: Axes, rank: int, work: Work, router_aux: str = "pooled",
    optimizer: Optimizer = AdamW(),
) -> list[Charge]:  # fmt: skip
    """Return the bill of any rank of any mesh, without devices or process groups."""
    charges = bill(blueprint.spec, axes, rank, work)
    if axes.world > 1:
        # Between hosts, in float64. With accelerators and more than 32 ranks it runs as several smaller all-gathers, of
        # which the last has this size.
        charges.append(Charge(agreement_name(STEP), "all_gather", DENSE, axes.world * NUM_COLUMNS * 8, 1))
        charges += [Charge.of(loss_sum(blueprint.recipe)), Charge.of(norm_sum(blueprint.recipe))]
        mtp = blueprint.module.mtp
        for balance, label in ((blueprint.balance, ""), *([] if mtp is None else [(mtp.balance, LABEL)])):
            if balance.num_layers:
                charges.append(Charge.of(step_load(balance, label)))
            if balance.num_layers and balance.coefficient and router_aux == "pooled":
                charges.append(Charge.of(pooled_counts(balance, label), work.num_batches))
    trained = [param for param in blueprint.spec.params(axes, rank) if param.name not in work.frozen]
    charges += optimizer.charges(trained, blueprint.spec.rules, axes, rank, work.stored_bytes)
    return charges
