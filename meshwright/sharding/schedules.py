"""Schedules of a pipeline as data: what each rank of the axis pp does, in which order. Nothing here runs.

A schedule is a list of actions for each rank. So it can be looked at before any process starts: whether it stands
still, how long ranks wait, how much they keep, what they gather. `timetable.py` reckons these.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from math import inf
from typing import NamedTuple, Protocol

from ..errors import ConfigError, LayoutError
from .stage_map import Line

FORWARD, BACKWARD = "F", "B"
# The two halves of a backward. The stage before waits for the gradient of the input only, so that of the weights can
# fill the time in which a rank would otherwise wait.
INPUT, WEIGHT = "I", "W"
SEND, RECEIVE = "send", "receive"
THERE, BACK = "there", "back"  # activations go there, gradients come back


class Action(NamedTuple):
    """One micro-batch goes through one stage. `kind`: FORWARD, BACKWARD, INPUT or WEIGHT."""

    kind: str
    stage: int
    batch: int


class Transfer(NamedTuple):
    """Activations (THERE) or gradients (BACK) pass between two ranks of the axis pp.

    `kind`: SEND or RECEIVE, which side of it this is. `stage`: the one that takes them. So `way`, `stage` and `batch`
    name the transfer on both sides. `source`, `target`: the places of both ranks on the axis.
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
    """Makes the orders of a step. Stages below `trained_from` have nothing to train: no gradient comes back to them."""

    def __call__(self, line: Line, num_batches: int, trained_from: int = 0) -> Orders: ...


def needs(line: Line, action: Action) -> Iterator[Action]:
    """What must be done before an action can begin, on whatever rank."""
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
    """Forwards and backwards take turns, so that a rank keeps no more micro-batches than stages are left.

    With several stages a rank it is interleaved: micro-batches go in groups of pp through the first stage of each rank,
    then through the second. A rank then waits for shorter stages, and sends more often.
    """
    _refuse(line, num_batches, trained_from)
    if line.turn:
        raise ConfigError("the schedule deals stages to the ranks in turn, this line turns; choose the schedule v")
    if line.stages_a_rank > 1 and num_batches % line.pp:
        above = -(-num_batches // line.pp) * line.pp
        raise ConfigError(
            f"{line.stages_a_rank} stages a rank take micro-batches in groups of pp={line.pp}, and {num_batches} is no "
            f"multiple of it; give {above} micro-batches a step, or choose 1 stage a rank"
        )
    return _trained([_taking_turns(line, rank, num_batches) for rank in range(line.pp)], trained_from)


def _taking_turns(line: Line, rank: int, num_batches: int) -> list[Action]:
    pp, stages = line.pp, line.stages_of(rank)
    groups = [range(g, min(g + pp, num_batches)) for g in range(0, num_batches, pp)]
    there = [Action(FORWARD, stage, m) for group in groups for stage in stages for m in group]
    back = [Action(BACKWARD, stage, m) for group in groups for stage in reversed(stages) for m in group]
    # The first backward comes when the first micro-batch has been at the end and is back.
    ahead = pp - 1 - rank if len(stages) == 1 else 2 * (pp - 1 - rank) + (len(stages) - 1) * pp
    turns = [action for pair in zip(there[ahead:], back, strict=False) for action in pair]
    return there[:ahead] + turns + back[len(there[ahead:]) :]


def zero_bubble(line: Line, num_batches: int, trained_from: int = 0) -> Orders:
    """ZB-H1: `one_f_one_b` with backwards cut in two. The halves of the weights wait, and fill the end of the step.

    Rank r lets r micro-batches wait: as many as it keeps fewer than rank 0. So no rank keeps more than rank 0 does.
    """
    return [_cut_in_two(order, rank) for rank, order in enumerate(one_f_one_b(line, num_batches, trained_from))]


def _cut_in_two(order: Sequence[Action], most_waiting: int) -> list[Action]:
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
    """Stages there and back, backwards cut in two: every rank keeps as much as the others, and waits half as long.

    `most`: how many pairs of stage and micro-batch a rank may keep. The default, `2 * pp`, is what rank 0 keeps in
    1F1B, since stages are half as long. Less saves memory and costs time.
    """
    _refuse(line, num_batches, trained_from)
    if not line.turn:
        raise ConfigError(
            "the schedule v needs stages that go there and back; give a line of 2 stages a rank that turns"
        )
    most = 2 * line.pp if most is None else most
    if most < line.stages_a_rank:
        raise ConfigError(f"most={most} keeps a micro-batch from going there and back; give 2 or more")
    return _trained(_greedy(line, num_batches, (FORWARD, INPUT, WEIGHT), most), trained_from)


def forwards(line: Line, num_batches: int) -> Orders:
    """Evaluation: nothing is kept, and nothing comes back."""
    _refuse(line, num_batches, 0)
    return _greedy(line, num_batches, (FORWARD,), inf)


# What a user can choose, for a step that trains. All are called alike.
ORDERS: dict[str, Schedule] = {"1f1b": one_f_one_b, "zero-bubble": zero_bubble, "v": v_schedule}


def _refuse(line: Line, num_batches: int, trained_from: int) -> None:
    if num_batches < 1:
        raise ConfigError(f"a step of {num_batches} micro-batches does nothing; give 1 or more")
    if not 0 <= trained_from <= line.last:
        raise ConfigError(f"no stage is trained from stage {trained_from}; the line has stages 0-{line.last}")


def _trained(orders: Orders, trained_from: int) -> Orders:
    """Without the backwards of stages below the first that is trained: no gradient goes there."""
    return [[a for a in order if a.kind == FORWARD or a.stage >= trained_from] for order in orders]


def _greedy(line: Line, num_batches: int, kinds: tuple[str, ...], most: float) -> Orders:
    """All actions take one moment. In each, a rank takes the most urgent action that it can."""
    queues = [
        [deque(Action(kind, stage, m) for m in range(num_batches)) for kind in kinds for stage in line.stages_of(rank)]
        for rank in range(line.pp)
    ]
    orders: Orders = [[] for _ in queues]
    done, kept = set[Action](), Counter[int]()
    while any(queue for held in queues for queue in held):
        taken = []
        for rank, held in enumerate(queues):
            ready = [queue for queue in held if queue and done.issuperset(needs(line, queue[0]))]
            ready = [queue for queue in ready if _has_room(line, queue[0], kept, most)]
            if ready:
                taken.append((rank, min(ready, key=lambda queue: _urgency(queue[0])).popleft()))
        for rank, action in taken:
            orders[rank].append(action)
            done.add(action)
            kept[action.stage] += (action.kind == FORWARD) - (action.kind == WEIGHT)
    return orders


def _has_room(line: Line, action: Action, kept: Counter[int], most: float) -> bool:
    """A later stage of the rank has one place to itself. Else forwards of the first could fill the rank for ever."""
    stages = line.stages_of(line.rank_of(action.stage))
    taken = sum(max(kept[stage], stage > action.stage) for stage in stages)
    return action.kind != FORWARD or taken < most


def _urgency(action: Action) -> tuple[int, int, int]:
    """What other ranks wait for goes first: a gradient, then what is nearest to the loss. Weights wait longest."""
    kind, stage, batch = action
    if kind == FORWARD:
        return 1, -stage, batch
    return 0 if kind == INPUT else 2, batch, -stage


def moments(line: Line, orders: Orders) -> Iterator[list[tuple[int, Action]]]:
    """What ranks do at the same moment if each takes the next of its actions as soon as it can.

    A stage waits while two of its results wait for the next one. Else stages without a backward, which are quicker,
    would run ahead and fill the memory of others with activations.
    """
    wanted = {action for order in orders for action in order}
    at, done, num_done = [0] * len(orders), set[Action](), Counter[tuple[str, int]]()

    def can_go(action: Action) -> bool:
        then = follower(action)
        ahead = num_done[action[:2]] - num_done[then[:2]] if then in wanted else 0
        return ahead < 2 and done.issuperset(needs(line, action))

    while any(i < len(order) for i, order in zip(at, orders, strict=True)):
        heads = [(rank, order[at[rank]]) for rank, order in enumerate(orders) if at[rank] < len(order)]
        moment = [(rank, action) for rank, action in heads if can_go(action)]
        if not moment:
            stuck = ", ".join(f"rank {rank} at {a.kind}{a.batch} of stage {a.stage}" for rank, a in heads)
            raise LayoutError(f"the schedule stands still with {stuck}; put first what these wait for")
        yield moment
        for rank, action in moment:
            at[rank] += 1
            done.add(action)
            num_done[action[:2]] += 1


def program(line: Line, orders: Orders) -> Program:
    """The orders with what is sent and received, a list for each rank of the axis pp.

    The two sides of a transfer are written down at the same moment, so every pair of ranks meets in the same order on
    both sides, and no rank waits for ever even if each transfer waits for its other side. NCCL needs this: it has one
    queue for each pair. Where transfers do not block, nobody waits longer than the orders make him. Between two stages
    of one rank nothing is sent.
    """
    wanted = {action for order in orders for action in order}
    out: Program = [[] for _ in orders]
    for moment in moments(line, orders):
        for rank, action in moment:
            out[rank].append(action)
        for rank, action in moment:
            then = follower(action)
            if then in wanted and line.rank_of(then.stage) != rank:
                there_or_back = THERE if action.kind == FORWARD else BACK
                passing = (there_or_back, then.stage, then.batch, rank, line.rank_of(then.stage))
                out[rank].append(Transfer(SEND, *passing))
                out[passing[-1]].append(Transfer(RECEIVE, *passing))
    return out


def follower(action: Action) -> Action | None:
    """The action of a neighbouring stage that takes the result. Nobody takes a gradient of weights."""
    steps = {FORWARD: 1, BACKWARD: -1, INPUT: -1}
    return action._replace(stage=action.stage + steps[action.kind]) if action.kind in steps else None
