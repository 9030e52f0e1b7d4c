"""The bill of a step of the engine: the model's, and the engine's own: count, loss, norm and the router's."""

from __future__ import annotations

from collections.abc import Sequence

from ..layout import Charge, Rules, Step, Table, Unit, bill
from ..mesh import DENSE, Axes
from ..models import Balance, Decoder
from .agreement import TOLD, place
from .engine import STEP
from .model import Model


def step_bill(model: Model, tokens: int, num_batches: int, router_aux: str = "pooled") -> list[Charge]:
    """What this rank pays for `engine.step` of `num_batches` batches of `tokens` tokens."""
    compute = model.dtype.itemsize
    step = Step(tokens, num_batches, compute, max(4, compute))
    axes, rank = model.mesh.axes, model.mesh.rank
    return engine_bill(model.parts[0], model.units, model.table, model.rules, axes, rank, step, router_aux)


def engine_bill(
    module: Decoder, units: Sequence[Unit], table: Table, rules: Rules, axes: Axes, rank: int, step: Step,
    router_aux: str = "pooled",
) -> list[Charge]:  # fmt: skip
    """The same of any rank of any mesh, from the drawing alone: the module may be on the meta device, its doors
    unarmed, and no process group need exist."""
    charges = bill(module, units, table, rules, axes, rank, step)
    if axes.world > 1:
        charges.append(Charge(place(STEP), "all_gather", DENSE, axes.world * TOLD * 8, 1))
        charges += [Charge("the loss", "all_reduce", DENSE, 16, 1), Charge("the norm", "all_reduce", DENSE, 8, 1)]
        charges += _router(module.balance, step.num_batches, router_aux)
    return charges


def _router(balance: Balance, num_batches: int, router_aux: str) -> list[Charge]:
    axes = ("replicate", "fsdp", "cp", "tp")
    load = Charge("the load of the experts", "all_reduce", axes, balance.num_layers * balance.num_experts * 8, 1)
    aux = Charge("the router's pooled counts", "all_reduce", axes, balance.num_experts * 8, num_batches)
    pooled = balance.coefficient and router_aux == "pooled"
    return [load, aux] if balance.num_layers and pooled else [load] if balance.num_layers else []
