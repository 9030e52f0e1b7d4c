"""The estimated time of a step as lines of a table, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from .figures import Figures, Traffic
from .flops import flops_of
from .tables import ChargeLine
from .times import ASSUMED, Estimate, Sent, cluster_in, estimate, operations, sent
from .wording import duration

_SHORT = 1e-3  # of a step: shorter waits share a line


@dataclass(frozen=True)
class StepLine:
    """`share`: of the step."""

    what: str
    seconds: float
    share: float


def step_lines(figures: Figures) -> list[StepLine]:
    found = estimate(figures)
    return [StepLine(what, seconds, seconds / found.seconds) for what, seconds in _parts(found)]


def _parts(found: Estimate) -> Iterator[tuple[str, float]]:
    """The parts of a step, and the step."""
    yield "products", found.products
    long = [wait for wait in found.waits if wait.seconds >= _SHORT * found.seconds]
    yield from ((f"waits: {wait.what}, {wait.link}", wait.seconds) for wait in long)
    if len(long) < len(found.waits):
        yield "waits: all others", found.waited - sum(wait.seconds for wait in long)
    if found.launching:
        yield "waits: the host, which launches more slowly", found.launching
    if found.gathers:
        yield f"gathers and sums of FSDP, {duration(found.gathers)}, beyond products", found.not_hidden
    if found.bubble_share:
        yield "waiting of the pipeline (the bubble)", found.bubble
    yield "a step", found.seconds


def speed(figures: Figures) -> str:
    return f"{tokens_a_second(figures):,.0f} tokens a second of each rank, MFU {mfu(figures):.1%}"


def mfu(figures: Figures) -> float:
    """Model FLOPs utilisation: what the tokens need, by what the devices could do, without what is recomputed."""
    axes, cluster = figures.axes, cluster_in(figures)
    needed = operations(flops_of(figures.blueprint, figures.blueprint.table.params.keys()), figures)
    return needed / (axes.cp * axes.tp * axes.pp) / (estimate(figures).seconds * cluster.flops * 10**12)


def tokens_a_second(figures: Figures) -> float:
    """Of a rank: all tokens of a step, over all ranks."""
    work, axes = figures.work, figures.axes
    tokens = work.tokens * work.num_batches * axes.num_data_ranks
    return tokens / axes.world / estimate(figures).seconds


def assumptions(figures: Figures) -> str:
    """In one line."""
    left_out = ", and so are copies to and from the host" if figures.savings.offload else ""
    return f"Estimated for {cluster_in(figures).told}. {ASSUMED}{left_out}."


def sent_of(figures: Figures, line: Traffic | ChargeLine) -> Sent:
    """The time of all collectives of a line."""
    return sent(line.op, line.num_bytes, line.axes, figures.axes, cluster_in(figures))


def timed(figures: Figures, line: Traffic | ChargeLine) -> dict[str, Any]:
    """A line of the collectives for a program."""
    return {**asdict(line), **(asdict(sent_of(figures, line)) if figures.cluster else {})}


def times_as_json(figures: Figures) -> dict[str, Any] | None:
    if figures.cluster is None:
        return None
    found = estimate(figures)
    reckoned = {
        "launching": found.launching, "not_hidden": found.not_hidden, "bubble": found.bubble, "seconds": found.seconds,
    }  # fmt: skip
    return {
        **asdict(found), **reckoned, "tokens_a_second": tokens_a_second(figures), "mfu": mfu(figures),
        "cluster": asdict(figures.cluster), "assumptions": assumptions(figures),
    }  # fmt: skip
