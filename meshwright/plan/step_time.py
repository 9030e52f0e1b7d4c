"""Estimate the time of a step: matmuls, collectives by the link that they use, the host, and the pipeline bubble.

It serves to compare meshes, not to predict a run. It ignores latency, AdamW and passes over activations, and
collectives do not slow each other down. docs/plan.md has the formulas.
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
from ..sharding import TO_HOLDERS, TO_OWNERS, TOWER, Charge, Param, Table, Work
from .devices import Cluster
from .figures import Figures, Traffic
from .pipeline_timing import timetable
from .tables import ChargeLine
from .wording import duration

INSIDE, BETWEEN = "inside a node", "between nodes"
AGAIN = 4 / 3  # recompute="full" runs a second forward: a backward costs two forwards, so 4 units instead of 3
# Seconds in which the host launches forward and backward of a layer for a micro-batch: (without experts, with experts).
# Measured by bench/host.py; docs/scale.md has the table.
HOST = {"none": (2.0e-3, 2.9e-3), "selective": (6.4e-3, 9.7e-3), "full": (3.2e-3, 4.9e-3)}
_WHAT = {
    "ep": "all-to-all of experts",
    "tp": "collectives of tp",
    "cp": "collectives of cp",
    "pp": "transfers between stages",
}
# The collectives that run once per step: all-reduces of gradients outside FSDP, of the loss and the norm, and
# agreements.
_LAST = "last reductions of gradients, and agreements"
_MATRICES = "all-to-alls of whole matrices"
ASSUMED = (
    "A document fills a micro-batch. The host takes 2 to 10 ms per layer and micro-batch (docs/scale.md). Left out are "
    "latency, AdamW, passes over activations, and the sorting of token_once on the host"
)


@dataclass(frozen=True)
class LinkTime:
    """The time of a collective. `link`: "between nodes" if any of its bytes leave a node."""

    link: str
    seconds: float


@dataclass(frozen=True)
class Wait:
    """Time that compute waits for one kind of collective, which nothing overlaps."""

    what: str
    link: str
    seconds: float


@dataclass(frozen=True)
class Estimate:
    """The seconds of a step, by part. The names of the fields are keys of `plan --json`.

    `products`: the matmuls of an average rank. `waits`: exposed collectives of the rank that sends most. `gathers`: its
    all-gathers and reduce-scatters of FSDP, which overlap with matmuls. `host`: the time to launch all kernels, which
    overlaps with the device. `bubble_share`: the share of a step in which a rank waits for other stages
    (`Timetable.bubble`). `update`: the matmuls of the optimizer.
    """

    products: float
    waits: tuple[Wait, ...]
    gathers: float
    host: float
    bubble_share: float
    update: float = 0.0

    @property
    def waited(self) -> float:
        """Return the time of all exposed collectives."""
        return sum(wait.seconds for wait in self.waits)

    @property
    def launching(self) -> float:
        """Return the time in which the device idles because the host launches more slowly than it computes."""
        return max(0.0, self.host - self.products - self.waited)

    @property
    def not_hidden(self) -> float:
        """Return the time of FSDP's collectives that lasts longer than the matmuls with which they overlap."""
        return max(0.0, self.gathers - self.products - self.launching)

    @property
    def bubble(self) -> float:
        """Return the time of the pipeline bubble.

        Exposed collectives and a slow host stretch every action of a stage, so they stretch the bubble as matmuls do.
        """
        return (self.products + self.waited + self.launching) * self.bubble_share / (1 - self.bubble_share)

    @property
    def seconds(self) -> float:
        """Return the time of the step: the sum of all parts that do not overlap."""
        return self.products + self.waited + self.launching + self.not_hidden + self.bubble + self.update


def ranks_in_node(axes: Axes, over: tuple[str, ...], gpus_per_node: int) -> int:
    """Return how many ranks of a group over some axes are sure to share a node. Consecutive ranks fill a node.

    Groups may begin at different ranks of a node: the gcd counts what holds for all of them.
    """
    if axes.world <= gpus_per_node:
        return prod(axes.sizes(over))
    num = 1
    for axis, stride in axes.strides(over).items():
        # ENDS pairs the first and the last coordinate on pp, which share a tied embedding.
        apart = stride * (axes.pp - 1) if axis == ENDS else stride
        num *= gcd(axes.size_of(axis), gpus_per_node // apart) if apart and gpus_per_node % apart == 0 else 1
    return num


def time_on_links(op: str, num_bytes: int, over: tuple[str, ...], axes: Axes, cluster: Cluster) -> LinkTime:
    """Return the time of a collective over some axes. `num_bytes`: the bytes of its larger side, as in the bill.

    Links inside and between nodes work at the same time, so the slower one decides.
    """
    num, in_node = prod(axes.sizes(over)), ranks_in_node(axes, over, cluster.gpus_per_node)
    inside, between = 0.0, 0.0
    if op in ("send", "recv"):  # one neighbour on pp
        inside, between = (num_bytes, between) if in_node == num else (inside, num_bytes)
    elif op == "all_to_all":  # an equal part for each rank; a rank keeps its own
        inside, between = num_bytes * (in_node - 1) / num, num_bytes * (num - in_node) / num
    else:
        # A ring. An all-reduce goes round twice: reduce-scatter, then all-gather. Each rank has its own link to other
        # nodes, so the ranks of a node share what a ring sends between nodes.
        passes, nodes = 2 if op == "all_reduce" else 1, num / in_node
        inside = passes * num_bytes * (num - 1) / num if in_node > 1 else 0.0
        between = passes * num_bytes * (nodes - 1) / nodes / in_node
    seconds = max(inside / cluster.bytes_inside, between / cluster.bytes_between)
    return LinkTime(BETWEEN if between else INSIDE, seconds)


def required_cluster(figures: Figures) -> Cluster:
    """Return the cluster of the figures; raise if they have none."""
    if figures.cluster is None:
        raise ConfigError(
            "these figures have no cluster, so nothing says how long a step takes; give Figures a cluster"
        )
    return figures.cluster


@dataclass(frozen=True)
class StepCost:
    """The work of a step that trains every parameter, and the devices that do it."""

    blueprint: Blueprint
    axes: Axes
    work: Work
    memory: MemoryOptions
    cluster: Cluster
    flops: Flops
    update: int = 0  # operations of the optimizer's matmuls for which a step waits

    @property
    def operations(self) -> float:
        """Return the operations of an average rank, without recompute."""
        num_ranks = self.axes.cp * self.axes.tp * self.axes.pp
        return self.flops.of(self.work.tokens, self.work.tokens**2) * self.work.num_batches / num_ranks

    @property
    def host(self) -> float:
        """Return the seconds in which the host of a rank launches its layers, forward and backward."""
        with_experts = self.blueprint.balance.num_layers
        dense, mixture = HOST[self.memory.recompute]
        layers = dense * (self.blueprint.table.num_layers - with_experts) + mixture * with_experts
        return self.work.num_batches * layers / self.axes.pp

    def estimate(self, charges: Sequence[Charge], units: Set[str], bubble_share: float) -> Estimate:
        """Estimate the time of a step in which a rank sends `charges`. `units`: names of FSDP units, whose collectives
        overlap with matmuls; all others are exposed."""
        again = AGAIN if self.memory.recompute == "full" else 1.0
        waits = [c for c in charges if c.what not in units and c.op != "recv"]  # links send and receive at once
        return Estimate(
            products=again * self.operations / self.cluster.matmul_flops,
            waits=tuple(_waits(waits, self.axes, self.cluster)),
            gathers=sum(_seconds(c, self.axes, self.cluster) for c in charges if c.what in units),
            host=self.host,
            bubble_share=bubble_share,
            update=self.update / self.cluster.matmul_flops,
        )


def step_of(figures: Figures) -> StepCost:
    """Return the work of a planned step."""
    blueprint = figures.blueprint
    flops = flops_of(blueprint, blueprint.table.params.keys())
    cluster = required_cluster(figures)
    return StepCost(blueprint, figures.axes, figures.work, figures.memory, cluster, flops, figures.update_operations)


def estimate(figures: Figures) -> Estimate:
    """Estimate the time of a step from the bill of the rank that sends most."""
    bubble = timetable(figures).bubble if figures.axes.pp > 1 else 0.0
    units = fsdp_units(figures.blueprint, figures.axes, figures.sender)
    return step_of(figures).estimate(figures.charges, units, bubble)


def fsdp_units(blueprint: Blueprint, axes: Axes, rank: int) -> Set[str]:
    """Return the names of FSDP's collectives in the bill."""
    return {unit.name or "root" for stage in blueprint.spec.stages(axes, rank) for unit in stage.units}


def _seconds(charge: Charge, axes: Axes, cluster: Cluster) -> float:
    """Return the seconds of all collectives of a charge."""
    return charge.count * time_on_links(charge.op, charge.num_bytes, charge.axes, axes, cluster).seconds


def _waits(charges: list[Charge], axes: Axes, cluster: Cluster) -> Iterator[Wait]:
    """Yield the time of exposed collectives, summed by kind and link, the longest first."""
    seconds_of = defaultdict[tuple[str, str], float](float)
    for charge in charges:
        live = [axis for axis in charge.axes if axes.size_of(axis) > 1]
        # The name of an axis without its half: `cp//4` and `cp%4` are both cp.
        first = live[0].partition("/")[0].partition("%")[0] if len(live) == 1 else ""
        link = time_on_links(charge.op, charge.num_bytes, charge.axes, axes, cluster).link
        what = _LAST if charge.op == "all_reduce" else _WHAT.get(first, _LAST)
        what = _MATRICES if charge.what in (TO_OWNERS, TO_HOLDERS) else what
        seconds_of[what, link] += _seconds(charge, axes, cluster)
    for (what, link), seconds in sorted(seconds_of.items(), key=lambda row: -row[1]):
        yield Wait(what, link, seconds)


_SHORT = 1e-3  # share of a step: shorter waits are joined in one line


@dataclass(frozen=True)
class StepLine:
    """A part of a step, as a line of the terminal and the page. `share`: its share of the step."""

    what: str
    seconds: float
    share: float


def step_lines(figures: Figures) -> list[StepLine]:
    """List the parts of a step that add up to it, and last the step itself."""
    times = estimate(figures)
    return [StepLine(what, seconds, seconds / times.seconds) for what, seconds in _parts(times)]


def _parts(times: Estimate) -> Iterator[tuple[str, float]]:
    """Yield each part of a step with its seconds, and last the step."""
    yield "matmuls", times.products
    long = [wait for wait in times.waits if wait.seconds >= _SHORT * times.seconds]
    yield from ((f"waits: {wait.what}, {wait.link}", wait.seconds) for wait in long)
    if len(long) < len(times.waits):
        yield "waits: all others", times.waited - sum(wait.seconds for wait in long)
    if times.launching:
        yield "waits: the host, which launches more slowly", times.launching
    if times.gathers:
        yield f"collectives of FSDP, {duration(times.gathers)}, beyond matmuls", times.not_hidden
    if times.update:
        yield "matmuls of the optimizer", times.update
    if times.bubble_share:
        yield "the pipeline bubble", times.bubble
    yield "a step", times.seconds


def speed(figures: Figures) -> str:
    """Return throughput and MFU in words."""
    return f"{tokens_a_second(figures):,.0f} tokens per second per rank, MFU {mfu(figures):.1%}"


def mfu(figures: Figures) -> float:
    """Return the model FLOPs utilisation: the operations that tokens need, without recompute, divided by the peak of
    the devices (as PaLM defines it, arXiv:2204.02311)."""
    return step_of(figures).operations / (estimate(figures).seconds * required_cluster(figures).flops * 10**12)


def tokens_a_second(figures: Figures) -> float:
    """Return the tokens per second per rank."""
    work, axes = figures.work, figures.axes
    tokens = work.tokens * work.num_batches * axes.num_data_ranks
    return tokens / axes.world / estimate(figures).seconds


def assumptions(figures: Figures) -> str:
    """Name in one line what the estimate assumes and leaves out."""
    left_out = ", and so are copies to and from the host" if figures.memory.offload else ""
    return f"Estimated for {required_cluster(figures).description}. {ASSUMED}{left_out}."


def link_time(figures: Figures, line: Traffic | ChargeLine) -> LinkTime:
    """Return the time of all collectives of a line."""
    return time_on_links(line.op, line.num_bytes, line.axes, figures.axes, required_cluster(figures))


def timed(figures: Figures, line: Traffic | ChargeLine) -> dict[str, Any]:
    """Return a line of collectives as JSON; with a cluster also its link and time."""
    return {**asdict(line), **(asdict(link_time(figures, line)) if figures.cluster else {})}


def times_as_json(figures: Figures) -> dict[str, Any] | None:
    """Return the estimate as JSON; None without a cluster."""
    if figures.cluster is None:
        return None
    times = estimate(figures)
    derived = {
        "launching": times.launching, "not_hidden": times.not_hidden, "bubble": times.bubble, "seconds": times.seconds,
    }  # fmt: skip
    return {
        **asdict(times), **derived, "tokens_a_second": tokens_a_second(figures), "mfu": mfu(figures),
        "cluster": asdict(figures.cluster), "assumptions": assumptions(figures),
    }  # fmt: skip


@dataclass(frozen=True)
class Flops:
    """The operations of a forward and a backward: per token, and per square of a document's length (attention)."""

    per_token: float
    per_square: float

    def of(self, tokens: float, squares: float) -> float:
        """Return the operations of some tokens. `squares`: the sum of the squared lengths of their documents."""
        return self.per_token * tokens + self.per_square * squares


def flops_of(blueprint: Blueprint, trained: Set[str]) -> Flops:
    """Count the operations of a model: 6 per token and element of a matrix, 4 for a frozen one.

    A matmul has 2 operations (multiply, add) per element in forward, 2 for the gradient of its input and, if the matrix
    is trained, 2 for that of its weight. A token passes top-k of the experts.
    """
    table, balance = blueprint.table, blueprint.balance
    share = balance.top_k / balance.num_experts if balance.num_experts else 1.0
    vocabulary = blueprint.module.vocabulary
    per_token = sum(_of_matrix(param, share, trained) for param in table if _is_matrix(param, vocabulary))
    per_token += sum(_of_delta_rule(param.rows, values) for param, values in _delta_nets(table))
    if (mtp := blueprint.module.mtp) is not None:  # the MTP head scores the vocabulary once more
        per_token += _of_matrix(table[vocabulary], share, set() if mtp.detached else trained)
    # Causal attention: scores and values are 2 matmuls of 2 operations over half a square, times 3 with backward.
    squares = [param.cols for param in table if "heads" in param.cols]
    return Flops(per_token, sum(6.0 * cols["heads"] * cols["head"] for cols in squares))


def _is_matrix(param: Param, vocabulary: str) -> bool:
    """Return whether tokens are multiplied with a parameter.

    Rows of a table are only looked up, and so is an embedding unless it is also the tied head. A depthwise convolution
    mixes no channels. A vision tower is not counted: its work depends on patches, not on tokens.
    """
    return (
        bool(param.cols)
        and not param.name.startswith(TOWER)
        and "tap" not in param.cols
        and not param.by_rows
        and (param.name != "embed.weight" or vocabulary == param.name)
    )


def _of_matrix(param: Param, share: float, trained: Set[str]) -> float:
    """Return the operations per token of a matrix. `share`: the share of experts that a token passes."""
    used = share if "expert" in param.dims else 1.0
    return (6.0 if param.name in trained else 4.0) * used * param.numel


def _delta_nets(table: Table) -> Iterator[tuple[Param, int]]:
    """Yield the convolution of each delta net, over queries, keys and values, and the width of a key head's values."""
    for param in table:
        if "chan" in param.rows and "tap" in param.cols:
            yield param, table[param.name.replace("conv.weight", "out.weight")].cols["value"]


def _of_delta_rule(rows: Mapping[str, int], values: int) -> float:
    """Return the operations per token of the gated delta rule (arXiv:2412.06464).

    Each key head has a state of key x values, which a token reads, corrects and reads again: 3 matmuls of 2 operations,
    times 3 with backward.
    """
    key = (rows["chan"] - values) // 2
    return 18.0 * rows["key"] * key * values
