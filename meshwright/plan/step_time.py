"""How long a step takes, estimated: products, collectives by the link that they go over, the pipeline's waiting.

It is made to compare meshes. Latency, AdamW and passes over activations take no time here, and no collective is in the
way of another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from math import gcd, prod
from typing import Any

from ..axes import ENDS, Axes
from ..blueprint import Blueprint
from ..errors import ConfigError
from ..recipe import MemoryOptions
from ..sharding import TOWER, Charge, Param, Table, Work
from .devices import Cluster
from .figures import Figures, Traffic
from .pipeline_timing import timetable
from .tables import ChargeLine
from .wording import duration

INSIDE, BETWEEN = "inside a node", "between nodes"
AGAIN = 4 / 3  # of the products, where backward makes whole layers again
# Seconds that the host takes to launch forward and backward of a layer for a micro-batch: without experts, and with
# them. As bench/host.py has measured them; docs/scale.md shows the table.
HOST = {"none": (2.0e-3, 2.9e-3), "selective": (6.4e-3, 9.7e-3), "full": (3.2e-3, 4.9e-3)}
_WHAT = {
    "ep": "exchanges of experts",
    "tp": "collectives of tp",
    "cp": "collectives of cp",
    "pp": "transfers between stages",
}
_SUMS = "last sums, and what ranks tell each other"
ASSUMED = (
    "A document fills a micro-batch. The host takes 2 to 10 ms a layer and micro-batch (docs/scale.md). Left out are "
    "latency, AdamW, passes over activations, and what token_once has the host do"
)


@dataclass(frozen=True)
class Sent:
    """`link`: between nodes, if anything goes there."""

    link: str
    seconds: float


@dataclass(frozen=True)
class Wait:
    """What products wait for, over a link."""

    what: str
    link: str
    seconds: float


@dataclass(frozen=True)
class Estimate:
    """Seconds of a step. `products` are those of an average rank, the collectives those of the rank that sends most.

    `gathers`: FSDP's gathers and sums, which run beside products. `host`: to launch all of it, while the device works.
    `bubble_share`: the share of the time in which a rank waits for other stages, as `Timetable.bubble`.
    """

    products: float
    waits: tuple[Wait, ...]
    gathers: float
    host: float
    bubble_share: float

    @property
    def waited(self) -> float:
        return sum(wait.seconds for wait in self.waits)

    @property
    def launching(self) -> float:
        """For how long the device has nothing to do, because the host is slower."""
        return max(0.0, self.host - self.products - self.waited)

    @property
    def not_hidden(self) -> float:
        """Of FSDP's collectives, what products do not last for."""
        return max(0.0, self.gathers - self.products - self.launching)

    @property
    def bubble(self) -> float:
        """A stage that waits for others lets the next stages wait longer too."""
        return (self.products + self.waited + self.launching) * self.bubble_share / (1 - self.bubble_share)

    @property
    def seconds(self) -> float:
        return self.products + self.waited + self.launching + self.not_hidden + self.bubble


def in_a_node(axes: Axes, over: tuple[str, ...], gpus_per_node: int) -> int:
    """How many ranks of a group over some axes lie in one node, for certain: ranks stand in nodes in their order."""
    if axes.world <= gpus_per_node:
        return prod(axes.sizes(over))
    num = 1
    for axis, stride in axes.strides(over).items():
        apart = stride * (axes.pp - 1) if axis == ENDS else stride
        num *= gcd(axes.size_of(axis), gpus_per_node // apart) if apart and gpus_per_node % apart == 0 else 1
    return num


def time_on_links(op: str, num_bytes: int, over: tuple[str, ...], axes: Axes, cluster: Cluster) -> Sent:
    """`num_bytes`: of the larger side, as the bill has them. Each rank has a link of its own to other nodes, so that of
    a ring each rank of a node carries a share between nodes. Both links work at the same time."""
    num, here = prod(axes.sizes(over)), in_a_node(axes, over, cluster.gpus_per_node)
    inside, between = 0.0, 0.0
    if op in ("send", "recv"):  # to one neighbour
        inside, between = (num_bytes, between) if here == num else (inside, num_bytes)
    elif op == "all_to_all":  # an equal part for each rank
        inside, between = num_bytes * (here - 1) / num, num_bytes * (num - here) / num
    else:  # a ring: there and back for an all-reduce
        ways, nodes = 2 if op == "all_reduce" else 1, num / here
        inside = ways * num_bytes * (num - 1) / num if here > 1 else 0.0
        between = ways * num_bytes * (nodes - 1) / nodes / here
    seconds = max(inside / cluster.bytes_inside, between / cluster.bytes_between)
    return Sent(BETWEEN if between else INSIDE, seconds)


def required_cluster(figures: Figures) -> Cluster:
    if figures.cluster is None:
        raise ConfigError("these figures are of no cluster, so nothing says how long a step takes")
    return figures.cluster


@dataclass(frozen=True)
class StepCost:
    """The work of ranks in a step of a model that is trained as a whole."""

    blueprint: Blueprint
    axes: Axes
    work: Work
    memory: MemoryOptions
    cluster: Cluster
    flops: Flops

    @property
    def operations(self) -> float:
        """Return the operations of a rank on average, without those of recomputation."""
        num_ranks = self.axes.cp * self.axes.tp * self.axes.pp
        return self.flops.of(self.work.tokens, self.work.tokens**2) * self.work.num_batches / num_ranks

    @property
    def host(self) -> float:
        """Return the seconds in which the host of a rank launches its layers."""
        with_experts = self.blueprint.balance.num_layers
        dense, mixture = HOST[self.memory.recompute]
        layers = dense * (self.blueprint.table.num_layers - with_experts) + mixture * with_experts
        return self.work.num_batches * layers / self.axes.pp

    def estimate(self, charges: Sequence[Charge], units: Set[str], bubble_share: float) -> Estimate:
        """Estimate the time of a step in which a rank sends `charges`, those of `units` beside matmuls."""
        again = AGAIN if self.memory.recompute == "full" else 1.0
        waits = [c for c in charges if c.what not in units and c.op != "recv"]  # it comes while others are sent
        return Estimate(
            products=again * self.operations / self.cluster.products,
            waits=tuple(_waits(waits, self.axes, self.cluster)),
            gathers=sum(_seconds(c, self.axes, self.cluster) for c in charges if c.what in units),
            host=self.host,
            bubble_share=bubble_share,
        )


def step_of(figures: Figures) -> StepCost:
    blueprint = figures.blueprint
    flops = flops_of(blueprint, blueprint.table.params.keys())
    return StepCost(blueprint, figures.axes, figures.work, figures.memory, required_cluster(figures), flops)


def estimate(figures: Figures) -> Estimate:
    """Estimate the time of a step from everything that the rank that pays most sends."""
    bubble = timetable(figures).bubble if figures.axes.pp > 1 else 0.0
    units = fsdp_units(figures.blueprint, figures.axes, figures.sender)
    return step_of(figures).estimate(figures.charges, units, bubble)


def fsdp_units(blueprint: Blueprint, axes: Axes, rank: int) -> Set[str]:
    """Return the names under which the bill has the collectives of FSDP."""
    return {unit.name or "root" for stage in blueprint.spec.stages(axes, rank) for unit in stage.units}


def _seconds(charge: Charge, axes: Axes, cluster: Cluster) -> float:
    return charge.count * time_on_links(charge.op, charge.num_bytes, charge.axes, axes, cluster).seconds


def _waits(charges: list[Charge], axes: Axes, cluster: Cluster) -> Iterator[Wait]:
    """Together what is for the same and goes over the same link; first what takes longest."""
    found = defaultdict[tuple[str, str], float](float)
    for charge in charges:
        live = [axis for axis in charge.axes if axes.size_of(axis) > 1]
        first = live[0].partition("/")[0].partition("%")[0] if len(live) == 1 else ""
        link = time_on_links(charge.op, charge.num_bytes, charge.axes, axes, cluster).link
        what = _SUMS if charge.op == "all_reduce" else _WHAT.get(first, _SUMS)
        found[what, link] += _seconds(charge, axes, cluster)
    for (what, link), seconds in sorted(found.items(), key=lambda row: -row[1]):
        yield Wait(what, link, seconds)


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
    return step_of(figures).operations / (estimate(figures).seconds * required_cluster(figures).flops * 10**12)


def tokens_a_second(figures: Figures) -> float:
    """Of a rank: all tokens of a step, over all ranks."""
    work, axes = figures.work, figures.axes
    tokens = work.tokens * work.num_batches * axes.num_data_ranks
    return tokens / axes.world / estimate(figures).seconds


def assumptions(figures: Figures) -> str:
    """In one line."""
    left_out = ", and so are copies to and from the host" if figures.memory.offload else ""
    return f"Estimated for {required_cluster(figures).told}. {ASSUMED}{left_out}."


def sent_of(figures: Figures, line: Traffic | ChargeLine) -> Sent:
    """The time of all collectives of a line."""
    return time_on_links(line.op, line.num_bytes, line.axes, figures.axes, required_cluster(figures))


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


@dataclass(frozen=True)
class Flops:
    """Of a forward and a backward: for each token, and for each square of a document's length."""

    per_token: float
    per_square: float

    def of(self, tokens: float, squares: float) -> float:
        return self.per_token * tokens + self.per_square * squares


def flops_of(blueprint: Blueprint, trained: Set[str]) -> Flops:
    """A product costs 2 operations an element forward, 2 for what it reads and, where it is trained, 2 for itself."""
    table, balance = blueprint.table, blueprint.balance
    share = balance.top_k / balance.num_experts if balance.num_experts else 1.0
    vocabulary = blueprint.module.vocabulary
    per_token = sum(_of_matrix(param, share, trained) for param in table if _is_matrix(param, vocabulary))
    per_token += sum(_of_delta_rule(param.rows, values) for param, values in _delta_nets(table))
    squares = [param.cols for param in table if "heads" in param.cols]
    return Flops(per_token, sum(6.0 * cols["heads"] * cols["head"] for cols in squares))


def _is_matrix(param: Param, vocabulary: str) -> bool:
    """Looking a word up is no product, and neither is a convolution of a channel with itself. A tower is not counted:
    its work is by patches."""
    return (
        bool(param.cols)
        and not param.name.startswith(TOWER)
        and "tap" not in param.cols
        and (param.name != "embed.weight" or vocabulary == param.name)
    )


def _of_matrix(param: Param, share: float, trained: Set[str]) -> float:
    used = share if "expert" in param.dims else 1.0
    return (6.0 if param.name in trained else 4.0) * used * param.numel


def _delta_nets(table: Table) -> Iterator[tuple[Param, int]]:
    """What makes queries, keys and values of a delta net, and the width of the values of a key head."""
    for param in table:
        if "chan" in param.rows and "embed" in param.cols:
            out = param.name.replace("qkv.weight", "out.weight")
            yield param, table[out].cols["value"]


def _of_delta_rule(rows: Mapping[str, int], values: int) -> float:
    """The recurrence: for each key head a state of key x values is read, corrected and read again, and thrice that in
    the backward."""
    key = (rows["chan"] - values) // 2
    return 18.0 * rows["key"] * key * values
