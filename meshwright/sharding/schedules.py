"""Pipeline schedules as lists of actions: 1F1B, interleaved 1F1B, zero bubble (ZB-H1) and V (ZB-V).

A schedule is a list of actions for each rank of the axis pp: forward and backward of micro-batches through stages. As
data it can be examined before any process starts: whether it deadlocks, how long ranks wait (the bubble), how many
micro-batches' activations they keep, how often they gather parameters. `timetable.py` computes these.

1F1B: PipeDream-Flush and Megatron (arXiv 2104.04473; the order comes from PipeDream, 1806.03377). Zero bubble: arXiv
2401.10241. V-shaped stages with controllable memory: 2405.15362.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from math import inf
from typing import NamedTuple, Protocol

from ..errors import ConfigError, LayoutError
from .stage_map import Line

FORWARD, BACKWARD = "F", "B"
# The two halves of a backward. The previous stage waits for the gradient of the input only, so the gradient of the
# weights can fill the time in which a rank would idle (arXiv 2401.10241 calls these halves B and W).
INPUT, WEIGHT = "I", "W"
SEND, RECEIVE = "send", "receive"
THERE, BACK = "there", "back"  # activations go there, gradients come back


class Action(NamedTuple):
    """One micro-batch passes one stage. `kind`: FORWARD, BACKWARD, INPUT or WEIGHT."""

    kind: str
    stage: int
    batch: int


class Transfer(NamedTuple):
    """Activations (THERE) or gradients (BACK) go from one rank of the axis pp to another.

    `kind`: SEND or RECEIVE, the side that this is. `stage`: the one that consumes them. So `way`, `stage` and `batch`
    name the transfer on both sides. `source`, `target`: positions of both ranks on the axis.
    """

    kind: str
    way: str
    stage: int
    batch: int
    source: int
    target: int


Orders = list[list[Action]]
Program = list[list[Action | Transfer]]


class Schedule(Protocol):
    """A function that makes the orders of a step.

    Stages below `trained_from` have nothing to train: no gradient goes back to them.
    """

    def __call__(self, line: Line, num_batches: int, trained_from: int = 0) -> Orders: ...


def needs(line: Line, action: Action) -> Iterator[Action]:
    """Yield what must be done before an action can begin, on whatever rank."""
    kind, stage, batch = action
    if kind == FORWARD:
        if stage > 0:
            yield Action(FORWARD, stage - 1, batch)
    elif kind == WEIGHT:
        yield Action(INPUT, stage, batch)
    else:
        yield Action(FORWARD, stage, batch)
        if stage < line.last:
            yield Action(kind, stage + 1, batch)


def one_f_one_b(line: Line, num_batches: int, trained_from: int = 0) -> Orders:
    """Alternate forwards and backwards (1F1B): a rank keeps at most as many micro-batches as there are stages from it
    on.

    GPipe (all forwards first) has the same bubble of (pp - 1) / (m + pp - 1) for m micro-batches, but keeps all m.

    With several stages per rank it is Megatron's interleaved schedule (arXiv 2104.04473): micro-batches go in groups of
    pp through the first stage of each rank, then through the second. The number of stages per rank divides the bubble,
    and multiplies what a rank sends.
    """
    _check(line, num_batches, trained_from)
    if line.turn:
        raise ConfigError("1f1b deals stages to the ranks in turn, but this line turns (a V); choose the schedule v")
    if line.stages_a_rank > 1 and num_batches % line.pp:
        above = -(-num_batches // line.pp) * line.pp
        raise ConfigError(
            f"{line.stages_a_rank} stages a rank run micro-batches in groups of pp={line.pp}, and {num_batches} is not "
            f"a multiple of it; give {above} micro-batches a step, or choose 1 stage a rank"
        )
    return _without_untrained([_one_f_one_b_of_rank(line, rank, num_batches) for rank in range(line.pp)], trained_from)


def _one_f_one_b_of_rank(line: Line, rank: int, num_batches: int) -> list[Action]:
    """List a rank's actions: warm-up forwards, then one forward and one backward in turn, then the remaining
    backwards.
    """
    pp, stages = line.pp, line.stages_of(rank)
    groups = [range(g, min(g + pp, num_batches)) for g in range(0, num_batches, pp)]
    forward = [Action(FORWARD, stage, m) for group in groups for stage in stages for m in group]
    backward = [Action(BACKWARD, stage, m) for group in groups for stage in reversed(stages) for m in group]
    # Warm up until the first micro-batch has passed the last stage and its gradient can be back. Interleaved, this is
    # Megatron's 2 (pp - rank - 1) + (stages per rank - 1) pp.
    num_warmup = pp - 1 - rank if len(stages) == 1 else 2 * (pp - 1 - rank) + (len(stages) - 1) * pp
    steady = [action for pair in zip(forward[num_warmup:], backward, strict=False) for action in pair]
    return forward[:num_warmup] + steady + backward[len(forward[num_warmup:]) :]


def zero_bubble(line: Line, num_batches: int, trained_from: int = 0) -> Orders:
    """ZB-H1 (arXiv 2401.10241): 1F1B with split backwards, whose weight halves are delayed into the cool-down bubble.

    Rank r delays the weight halves of r micro-batches, because it keeps r fewer of them than rank 0. So no rank exceeds
    the memory of rank 0, and the bubble is about a third of that of 1F1B.
    """
    return [_defer_weights(order, rank) for rank, order in enumerate(one_f_one_b(line, num_batches, trained_from))]


def _defer_weights(order: Sequence[Action], most_waiting: int) -> list[Action]:
    """Split backwards into halves; let up to `most_waiting` weight halves wait."""
    out, waiting = list[Action](), deque[Action]()
    for action in order:
        if action.kind == FORWARD:
            out.append(action)
            continue
        out.append(action._replace(kind=INPUT))
        waiting.append(action._replace(kind=WEIGHT))
        if len(waiting) > most_waiting:
            out.append(waiting.popleft())
    return [*out, *waiting]


def v_schedule(line: Line, num_batches: int, trained_from: int = 0, most: int | None = None) -> Orders:
    """Schedule a V of stages greedily, with split backwards: ZB-V (arXiv 2401.10241, 2405.15362).

    Stages descend to the last rank and come back up: rank r holds the stages r and 2 pp - 1 - r. A micro-batch that it
    keeps long in one is brief in the other, so all ranks keep the same number. `most`: how many pairs of stage and
    micro-batch a rank may keep. The default, `2 * pp`, is what rank 0 keeps in 1F1B, since stages are half as long. A
    smaller number saves memory and costs time.
    """
    _check(line, num_batches, trained_from)
    if not line.turn:
        raise ConfigError(
            "the schedule v needs stages that go there and back (a V); give a line of 2 stages per rank with turn=True"
        )
    most = 2 * line.pp if most is None else most
    if most < line.stages_a_rank:
        raise ConfigError(f"most={most} does not let a micro-batch go there and back; give 2 or more")
    return _without_untrained(_greedy(line, num_batches, (FORWARD, INPUT, WEIGHT), most), trained_from)


def forwards(line: Line, num_batches: int) -> Orders:
    """Order the forwards of an evaluation: nothing is kept, and no gradient comes back."""
    _check(line, num_batches, 0)
    return _greedy(line, num_batches, (FORWARD,), inf)


# The schedules that a user can choose for a training step.
ORDERS: dict[str, Schedule] = {"1f1b": one_f_one_b, "zero-bubble": zero_bubble, "v": v_schedule}


def _check(line: Line, num_batches: int, trained_from: int) -> None:
    """Refuse a step without micro-batches, and a first trained stage that does not exist."""
    if num_batches < 1:
        raise ConfigError(f"a step of {num_batches} micro-batches does nothing; give 1 or more")
    if not 0 <= trained_from <= line.last:
        raise ConfigError(f"no stage is trained from stage {trained_from}; the line has stages 0-{line.last}")


def _without_untrained(orders: Orders, trained_from: int) -> Orders:
    """Drop the backwards of stages below the first that is trained: no gradient goes there."""
    return [[a for a in order if a.kind == FORWARD or a.stage >= trained_from] for order in orders]


def _greedy(line: Line, num_batches: int, kinds: tuple[str, ...], most: float) -> Orders:
    """Schedule in rounds of one action each: a rank runs its most urgent action that is ready."""
    queues = [
        [deque(Action(kind, stage, m) for m in range(num_batches)) for kind in kinds for stage in line.stages_of(rank)]
        for rank in range(line.pp)
    ]
    orders: Orders = [[] for _ in queues]
    done, kept = set[Action](), Counter[int]()
    while any(queue for rank_queues in queues for queue in rank_queues):
        chosen = []
        for rank, rank_queues in enumerate(queues):
            ready = [queue for queue in rank_queues if queue and done.issuperset(needs(line, queue[0]))]
            ready = [queue for queue in ready if _has_room(line, queue[0], kept, most)]
            if ready:
                chosen.append((rank, min(ready, key=lambda queue: _urgency(queue[0])).popleft()))
        for rank, action in chosen:
            orders[rank].append(action)
            done.add(action)
            kept[action.stage] += (action.kind == FORWARD) - (action.kind == WEIGHT)
    return orders


def _has_room(line: Line, action: Action, kept: Counter[int], most: float) -> bool:
    """Return whether a rank may start a forward without exceeding `most`.

    Each later stage of the rank has one place reserved. Otherwise forwards of the first stage could fill the rank, and
    no micro-batch would ever come back to free a place.
    """
    stages = line.stages_of(line.rank_of(action.stage))
    num_kept = sum(max(kept[stage], stage > action.stage) for stage in stages)
    return action.kind != FORWARD or num_kept < most


def _urgency(action: Action) -> tuple[int, int, int]:
    """Rank actions by who waits: gradients of inputs first, then forwards nearest to the loss, weight gradients
    last.
    """
    kind, stage, batch = action
    if kind == FORWARD:
        return 1, -stage, batch
    return 0 if kind == INPUT else 2, batch, -stage


def moments(line: Line, orders: Orders) -> Iterator[list[tuple[int, Action]]]:
    """Yield what ranks do at the same time if each runs its next action as soon as it can.

    Raise if the schedule deadlocks. A stage stops when two of its results wait for the next stage. Otherwise stages
    without a backward, which are faster, would run ahead and fill the memory of others with activations.
    """
    scheduled = {action for order in orders for action in order}
    positions, done, num_done = [0] * len(orders), set[Action](), Counter[tuple[str, int]]()

    def can_go(action: Action) -> bool:
        next_action = follower(action)
        ahead = num_done[action[:2]] - num_done[next_action[:2]] if next_action in scheduled else 0
        return ahead < 2 and done.issuperset(needs(line, action))

    while any(i < len(order) for i, order in zip(positions, orders, strict=True)):
        heads = [(rank, order[positions[rank]]) for rank, order in enumerate(orders) if positions[rank] < len(order)]
        moment = [(rank, action) for rank, action in heads if can_go(action)]
        if not moment:
            stuck = ", ".join(f"rank {rank} at {a.kind}{a.batch} of stage {a.stage}" for rank, a in heads)
            raise LayoutError(f"the schedule deadlocks with {stuck}; move what these wait for before them")
        yield moment
        for rank, action in moment:
            positions[rank] += 1
            done.add(action)
            num_done[action[:2]] += 1


def program(line: Line, orders: Orders) -> Program:
    """Add sends and receives to the orders; return a list for each rank of the axis pp.

    Both sides of a transfer are listed at the same moment, so every pair of ranks meets in the same order on both
    sides. Then no rank deadlocks even if each transfer blocks until its peer joins. NCCL requires it: it runs the
    transfers of a pair in one queue. Where transfers do not block, ranks wait no longer than the orders make them.
    Stages of the same rank exchange nothing.
    """
    scheduled = {action for order in orders for action in order}
    out: Program = [[] for _ in orders]
    for moment in moments(line, orders):
        for rank, action in moment:
            out[rank].append(action)
        for rank, action in moment:
            next_action = follower(action)
            if next_action in scheduled and line.rank_of(next_action.stage) != rank:
                direction = THERE if action.kind == FORWARD else BACK
                passing = (direction, next_action.stage, next_action.batch, rank, line.rank_of(next_action.stage))
                out[rank].append(Transfer(SEND, *passing))
                out[passing[-1]].append(Transfer(RECEIVE, *passing))
    return out


def follower(action: Action) -> Action | None:
    """Return the action of a neighbouring stage that consumes the result; None for a weight gradient."""
    steps = {FORWARD: 1, BACKWARD: -1, INPUT: -1}
    return action._replace(stage=action.stage + steps[action.kind]) if action.kind in steps else None
