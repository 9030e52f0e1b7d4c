"""Pipeline stages of a model: which layers and FSDP units each contains, how costs balance, the user's choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

from torch import nn

from ..errors import MeshError, counted
from ..recipe import Pipeline
from .doors import Dispatch, find_doors
from .fsdp_units import MTP, Unit, units_of
from .params import Param, Table
from .schedules import ORDERS, Program, forwards, program
from .stage_map import Line, balanced, even


@dataclass(frozen=True, eq=False)
class Stage:
    """A part of the model, under the names of the whole, with the units that are gathered in it."""

    number: int
    module: Any  # a models.Decoder; typing it would import an upper layer
    units: tuple[Unit, ...]


def line_of(table: Table, module: nn.Module, pp: int, pipeline: Pipeline) -> Line:
    """Return where the stages of a model end on `pp` ranks."""
    if pp == 1:
        return Line(1, (max(1, table.num_layers),))
    num_stages, turn = pp * pipeline.stages, pipeline.schedule == "v"
    costs, last = costs_of(table, module)
    balanced_ends = balanced(Line(pp, even(costs, num_stages, last=last), turn), costs, last).ends
    balanced_ends = tuple(max(end, table.num_first_layers + stage) for stage, end in enumerate(balanced_ends))
    ends = balanced_ends if pipeline.ends is None else pipeline.ends
    if len(ends) != num_stages or ends[-1] != table.num_layers:
        raise MeshError(
            f"ends={ends}: pp={pp} with {counted(pipeline.stages, 'stage')} a rank has {num_stages} stages, and the "
            f"last of them ends after all {table.num_layers} layers; ends={balanced_ends} would make them cost about "
            "the same"
        )
    if ends[0] < table.num_first_layers:
        raise MeshError(
            f"ends={ends}: the first {table.num_first_layers} layers take what the tower sees (deepstack), so all of "
            f"them must be in the first stage; choose ends={balanced_ends}, or fewer stages"
        )
    line = Line(pp, tuple(ends), turn)
    if line.turn and any(param.both_ends for param in table):
        raise MeshError(
            "the schedule v has the first and the last stage on one rank, which would hold the embedding twice: the "
            "head is tied, or an MTP head is trained; choose 1f1b or zero-bubble"
        )
    return line


def costs_of(table: Table, module: nn.Module) -> tuple[list[float], float]:
    """Return the cost of each layer, and of the head: the weight elements that a token is multiplied with.

    Of experts only the k chosen ones count, and tables in which rows are looked up do not. Attention scores are left
    out: they depend on the lengths of documents. A trained MTP head scores the vocabulary a second time.
    """
    costs, last = [0.0] * table.num_layers, 0.0
    times = 2 if any(name.startswith(MTP) for name in table.params) else 1
    top_k = {door.num_experts: door.top_k for _, door in find_doors(module, Dispatch)}
    for param in (param for param in table if not param.by_rows):
        experts = param.dims.get("expert", 0)
        active = prod(param.shape) * (top_k.get(experts, experts) / experts if experts else 1)
        if param.layer is not None:
            costs[param.layer] += active
        elif param.name == "head.weight" or (param.both_ends and "head.weight" not in table.params):
            last += active * times  # the matrix that scores the vocabulary
        elif not param.first:
            last += active
    return costs, last


def costs_of_stages(table: Table, module: nn.Module, line: Line) -> list[float]:
    """Return the cost of each stage: its layers by `costs_of`, and the head in the last."""
    costs, last = costs_of(table, module)
    sums = [sum(costs[layer] for layer in line.layers_of(stage)) for stage in range(line.num_stages)]
    return [*sums[:-1], sums[-1] + last]


def stages_of_param(param: Param, line: Line) -> tuple[int, ...]:
    """Return the stages that hold a parameter: some embeddings are in the first and the last."""
    if param.layer is not None:
        return (line.stage_of(param.layer),)
    if param.both_ends:
        return tuple(dict.fromkeys((0, line.last)))
    return (0,) if param.first else (line.last,)


def stages_of(module: Any, line: Line, *, reshard: bool) -> tuple[Stage, ...]:
    """Return all stages. A single one is the whole model.

    Several stages free their last unit between forward and backward too: other micro-batches run in between.
    """
    if line.num_stages == 1:
        stays = module.kept_units()
        return (Stage(0, module, units_of(module, module.units(), reshard=reshard, stays=stays)),)
    parts = [
        module.part(line.layers_of(number), first=number == 0, last=number == line.last)
        for number in range(line.num_stages)
    ]
    return tuple(
        Stage(number, part, units_of(part, part.units(), reshard=reshard)) for number, part in enumerate(parts)
    )


@cache
def program_of(line: Line, schedule: str, num_batches: int, trained_from: int) -> Program:
    """Return the program of a training step, a list for each position of the axis pp."""
    return program(line, ORDERS[schedule](line, num_batches, trained_from))


@cache
def forward_program(line: Line, num_batches: int) -> Program:
    """Return the program of an evaluation."""
    return program(line, forwards(line, num_batches))


def transfer_name(way: str, stage: int) -> str:
    """Name a transfer to a stage, for errors and the bill."""
    return f"what goes {way} to stage {stage}"


def trained_from(table: Table, line: Line, trained: Sequence[str]) -> int:
    """Return the first stage that has something to train: those before it need no backward."""
    return min((min(stages_of_param(table[name], line)) for name in trained), default=0)
