"""Time the pipeline of a plan: the layers of each coordinate on pp, their cost, and the timetable with its bubble.

The unit of time is the forward of an average stage. A backward takes two units, one for each half. A stage costs in
proportion to the parameters that a token is multiplied with. Attention over tokens and transfers take no time.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from ..errors import counted
from ..sharding import Action, Line, Timetable, costs_of_stages, peak_kept, times
from ..sharding.schedules import BACKWARD, FORWARD, INPUT, WEIGHT
from .figures import Figures

# A backward computes two gradients, of the input and of the weights, each as expensive as the forward.
COSTS = {FORWARD: 1.0, BACKWARD: 2.0, INPUT: 1.0, WEIGHT: 1.0}
LEGEND = (
    "One line per coordinate on pp. F0: forward of micro-batch 0. B: backward, or its halves I (gradient of the input) "
    "and W (gradients of the weights). Lower case: a later stage of the same ranks. Dots: idle."
)


@dataclass(frozen=True)
class StageLine:
    """A pipeline stage. `first`, `last`: its layers. `share`: its part of the work of the whole model."""

    stage: int
    first: int
    last: int
    share: float


@dataclass(frozen=True)
class PlaceLine:
    """A coordinate on pp. Its ranks hold the same stages and work at the same time.

    `idle`: the share of a step in which they wait. `most_kept`: the peak number of pairs of stage and micro-batch whose
    activations are kept. `num_bytes`: the bytes of its first rank; no other rank of the coordinate stores more.
    """

    place: int
    rank: int
    stages: tuple[StageLine, ...]
    idle: float
    most_kept: int
    num_bytes: int


@cache  # terminal, page, JSON and the estimate of a step all need it; figures equal only themselves
def timetable(figures: Figures) -> Timetable:
    """Return when each action of the schedule runs."""
    shares = _shares(figures)

    def cost(action: Action) -> float:
        """Return the units of time of an action: an average stage has share 1 / number of stages."""
        return COSTS[action.kind] * shares[action.stage] * len(shares)

    return times(map_of(figures), figures.orders, cost)


def map_of(figures: Figures) -> Line:
    """Return the map of layers to stages and of stages to ranks."""
    return figures.blueprint.spec.line(figures.axes.pp)


def _shares(figures: Figures) -> list[float]:
    """Return each stage's share of the work of the whole model."""
    costs = costs_of_stages(figures.blueprint.table, figures.blueprint.module, map_of(figures))
    return [cost / sum(costs) for cost in costs]


def place_lines(figures: Figures) -> list[PlaceLine]:
    """Return a line for each coordinate on pp."""
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
    """Name a stage and its layers, as `stage 1: layers 4-7`."""
    layers = f"layer {stage.first}" if stage.first == stage.last else f"layers {stage.first}-{stage.last}"
    return f"stage {stage.stage}: {layers}"


def about_schedule(figures: Figures) -> str:
    """Describe the schedule and its bubble in a sentence."""
    pipeline, pp = figures.blueprint.recipe.pipeline, figures.axes.pp
    batches = counted(figures.work.num_batches, "micro-batch", "micro-batches")
    return (
        f"{batches} through {counted(map_of(figures).num_stages, 'stage')} on {counted(pp, 'group')} of ranks, "
        f"schedule {pipeline.schedule}: a rank waits {timetable(figures).bubble:.1%} of a step on average (the bubble)"
    )


def pipeline_notes(figures: Figures) -> list[str]:
    """List what the pipeline costs in time or memory, and what it changes."""
    pp, spec, num = figures.axes.pp, figures.blueprint.spec, figures.work.num_batches
    lines = []
    if num < pp:
        batches = counted(num, "micro-batch", "micro-batches")
        lines.append(
            f"{batches} for pp={pp} cannot keep all stages busy: a rank waits {timetable(figures).bubble:.1%} of a "
            f"step. Use more --micro-batches: {pp} or several times as many."
        )
    # Without these axes nothing is sharded, so `hold` would save no collective. Only experts are on efsdp.
    sharding = ("fsdp", "cp", "efsdp") if figures.blueprint.balance.num_experts else ("fsdp", "cp")
    if not spec.holds(pp) and any(figures.axes.size_of(axis) > 1 for axis in sharding):
        lines.append(
            "Parameters are gathered and gradients reduced in every micro-batch; with --hold once a step, which takes "
            "more memory. A run does so by default if that memory is less than a third of its device."
        )
    if figures.blueprint.balance.coefficient and figures.blueprint.balance.num_layers:
        lines.append('The plan assumes router_aux="previous" for the router\'s aux loss: a pipeline refuses "pooled".')
    return lines


def pipeline_json(figures: Figures) -> dict[str, Any]:
    """Return the pipeline as JSON. `timetable`: for each coordinate on pp its actions in order, each as kind, stage,
    micro-batch, start and end."""
    table = timetable(figures)
    return {
        **asdict(figures.blueprint.recipe.pipeline),
        "ends": map_of(figures).ends,
        "bubble": table.bubble,
        "places": [asdict(line) for line in place_lines(figures)],
        "timetable": [[[*slot.action, slot.start, slot.end] for slot in row] for row in table.rows],
    }
