"""The pipeline of a plan: which layers each place of the axis pp has, what they cost, when it works and when it waits.

A unit of time is the forward of an average stage. A backward takes two, each of its halves one, and a stage longer if
more elements are multiplied in it. Attention among tokens and transfers take no time here: this is an estimate.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from ..errors import counted
from ..sharding import Action, Line, Timetable, costs_of_stages, peak_kept, times
from ..sharding.schedules import BACKWARD, FORWARD, INPUT, WEIGHT
from .figures import Figures

COSTS = {FORWARD: 1.0, BACKWARD: 2.0, INPUT: 1.0, WEIGHT: 1.0}
LEGEND = (
    "A line for each place on pp. F0: forward of micro-batch 0. B: backward, or its halves I (gradient of the input) "
    "and W (of the weights). Small letters: a later stage of the place. A dot: it waits."
)


@dataclass(frozen=True)
class StageLine:
    """`first`, `last`: layers. `share`: of all that a token is multiplied with."""

    stage: int
    first: int
    last: int
    share: float


@dataclass(frozen=True)
class PlaceLine:
    """A place on the axis pp: its ranks work at the same time. `most_kept`: pairs of stage and micro-batch whose
    activations are kept at once. `num_bytes`: what the first rank of the place stores; none of it stores more."""

    place: int
    rank: int
    stages: tuple[StageLine, ...]
    idle: float
    most_kept: int
    num_bytes: int


@cache
def timetable(figures: Figures) -> Timetable:
    shares = _shares(figures)

    def cost(action: Action) -> float:
        return COSTS[action.kind] * shares[action.stage] * len(shares)

    return times(map_of(figures), figures.orders, cost)


def map_of(figures: Figures) -> Line:
    return figures.blueprint.spec.line(figures.axes.pp)


def _shares(figures: Figures) -> list[float]:
    costs = costs_of_stages(figures.blueprint.table, figures.blueprint.module, map_of(figures))
    return [cost / sum(costs) for cost in costs]


def place_lines(figures: Figures) -> list[PlaceLine]:
    line, shares, table = map_of(figures), _shares(figures), timetable(figures)

    def stage_line(stage: int) -> StageLine:
        layers = line.layers_of(stage)
        return StageLine(stage, layers[0], layers[-1], shares[stage])

    return [
        PlaceLine(
            place, rank, tuple(map(stage_line, line.stages_of(place))), table.idle(place),
            peak_kept(figures.orders[place]), sum(s.num_bytes for s in figures.need.stored(rank)),
        )
        for place, rank in enumerate(figures.axes.group(0, ("pp",)))
    ]  # fmt: skip


def layers_of_stage(stage: StageLine) -> str:
    layers = f"layer {stage.first}" if stage.first == stage.last else f"layers {stage.first}-{stage.last}"
    return f"stage {stage.stage}: {layers}"


def about_schedule(figures: Figures) -> str:
    pipeline, pp = figures.blueprint.recipe.pipeline, figures.axes.pp
    batches = counted(figures.work.num_batches, "micro-batch", "micro-batches")
    return (
        f"{batches} through {counted(map_of(figures).num_stages, 'stage')} on {counted(pp, 'place')} by the schedule "
        f"{pipeline.schedule}: a rank waits {timetable(figures).bubble:.1%} of a step on average (the bubble)"
    )


def pipeline_notes(figures: Figures) -> list[str]:
    """What costs time or memory, or differs, because there is a pipeline."""
    pp, spec, num = figures.axes.pp, figures.blueprint.spec, figures.work.num_batches
    found = []
    if num < pp:
        batches = counted(num, "micro-batch", "micro-batches")
        found.append(
            f"{batches} for pp={pp} cannot keep all stages at work: a rank waits {timetable(figures).bubble:.1%} of a "
            f"step. Give more --micro-batches: {pp} or several times as many."
        )
    if not spec.holds(pp) and any(figures.axes.size_of(axis) > 1 for axis in ("fsdp", "cp", "efsdp")):
        found.append(
            "Parameters are gathered, and gradients summed, in every micro-batch. --hold tells what it takes to do "
            "that once a step. A run does so by itself where that takes less than a third of its device."
        )
    if figures.blueprint.balance.coefficient and figures.blueprint.balance.num_layers:
        found.append('The router\'s aux loss is taken to be router_aux="previous": a pipeline refuses "pooled".')
    return found


def pipeline_json(figures: Figures) -> dict[str, Any]:
    """`timetable`: of each place on pp its actions in order, each with kind, stage, micro-batch, start and end."""
    table = timetable(figures)
    return {
        **asdict(figures.blueprint.recipe.pipeline),
        "ends": map_of(figures).ends,
        "bubble": table.bubble,
        "places": [asdict(line) for line in place_lines(figures)],
        "timetable": [[[*slot.action, slot.start, slot.end] for slot in row] for row in table.rows],
    }
