"""Schedules of a pipeline on paper: carried out by two small machines, and held against the formulas.

The machines (`meet`, `finish_times`) ask nothing of the code under test but which rank holds a stage. They know what an
action takes and what it leaves (`wants`, `makes`).
"""

import random
from collections import Counter, deque
from functools import cache
from itertools import combinations, pairwise

import pytest

from meshwright.errors import ConfigError, LayoutError, MeshError
from meshwright.sharding import ORDERS, Action, Line, Transfer, balanced, even, forwards, program
from meshwright.sharding.schedules import v_schedule
from meshwright.sharding.timetable import Gathers, Slot, Timetable, draw, gathers, peak_kept, times

COST = {"F": 1, "B": 2, "I": 1, "W": 1}
KINDS = {"1f1b": "FB", "zero-bubble": "FIW", "v": "FIW", "forwards": "F"}


def line_of(pp, a_rank=1, turn=False):
    return Line(pp, tuple(range(1, pp * a_rank + 1)), turn)


def line_for(name, pp, a_rank=1):
    return line_of(pp, 2, turn=True) if name == "v" else line_of(pp, a_rank)


def orders_of(name, line, num_batches, trained_from=0):
    return forwards(line, num_batches) if name == "forwards" else ORDERS[name](line, num_batches, trained_from)


def timed(line, orders):
    return times(line, orders, lambda action: COST[action.kind])


@cache
def cases():
    """(name, line, micro-batches, the first stage with a backward, orders): every kind, half with frozen stages."""
    draws, result = random.Random(24), []
    for _ in range(360):
        name, pp, num_batches = draws.choice(list(KINDS)), draws.randint(1, 8), draws.randint(1, 24)
        turn = name == "v" or (name == "forwards" and draws.random() < 0.5)
        a_rank = 2 if turn else draws.randint(1, 3)
        if a_rank > 1 and not turn and name != "forwards":
            num_batches = max(1, num_batches // pp) * pp
        line = line_of(pp, a_rank, turn)
        frozen = draws.choice([0, draws.randint(0, line.last)])
        first = line.num_stages if name == "forwards" else frozen
        result.append((name, line, num_batches, first, orders_of(name, line, num_batches, frozen)))
    return result


@cache
def programs():
    return [(line, first, program(line, orders)) for _, line, _, first, orders in cases()]


def wants(line, action):
    kind, stage, batch = action
    if kind == "F":
        return [("there", stage, batch)] if stage else []
    if kind == "W":
        return [("waiting", stage, batch)]
    return [("kept", stage, batch), *([("back", stage, batch)] if stage < line.last else [])]


def makes(line, first, action):
    """`first`: the first stage with a backward. Those below keep nothing, and no gradient is made for them."""
    kind, stage, batch = action
    made = [("kept", stage, batch)] * (kind == "F" and stage >= first)
    made += [("there", stage + 1, batch)] * (kind == "F" and stage < line.last)
    made += [("waiting", stage, batch)] * (kind == "I")
    return made + [("back", stage - 1, batch)] * (kind in "BI" and stage > first)


class Ranks:
    """The results that each rank made, and those that it received."""

    def __init__(self, line, first):
        self.line, self.first = line, first
        self.held = [set() for _ in range(line.pp)]
        self.most_waiting = 0  # results of one way that a stage was sent, and has not yet taken

    def act(self, rank, action):
        held = self.held[rank]
        assert self.line.rank_of(action.stage) == rank
        for result in wants(self.line, action):
            assert result in held, f"rank {rank} has no {result} for {action}"
            held.remove(result)
        held.update(makes(self.line, self.first, action))

    def pass_on(self, transfer):
        result = transfer.way, transfer.stage, transfer.batch
        assert result in self.held[transfer.source], f"{transfer}: nothing to send"
        self.held[transfer.source].remove(result)
        self.held[transfer.target].add(result)
        waiting = sum(result[:2] == (transfer.way, transfer.stage) for result in self.held[transfer.target])
        self.most_waiting = max(self.most_waiting, waiting)


def meet(line, first, lists):
    """Carry the lists out as if each transfer waited for its other side. (actions left over, and what ranks held)."""
    left, ranks, moved = [deque(actions) for actions in lists], Ranks(line, first), True
    while moved:
        moved = False
        for rank, actions in enumerate(left):
            while actions and isinstance(actions[0], Action):
                ranks.act(rank, actions.popleft())
                moved = True
            if actions and actions[0].kind == "send":
                other = left[actions[0].target]
                if other and other[0] == actions[0]._replace(kind="receive"):
                    actions.popleft()
                    ranks.pass_on(other.popleft())
                    moved = True
    return [action for actions in left for action in actions], ranks


def finish_times(line, first, lists):
    """When each rank is done if it waits for nothing but what an action takes, and each pair has one queue."""
    at, free, posted, clock = [0] * line.pp, [0] * line.pp, {}, Counter()
    ready = [dict() for _ in lists]
    queues = {
        pair: deque(a[1:] for a in lists[pair[0]] if of_pair(a, pair)) for pair in combinations(range(line.pp), 2)
    }
    for _ in range(sum(map(len, lists)) + 1):
        for rank, actions in enumerate(lists):
            while at[rank] < len(actions):
                action = actions[at[rank]]
                if isinstance(action, Transfer):
                    posted.setdefault(action[1:], []).append(free[rank])
                elif all(result in ready[rank] for result in wants(line, action)):
                    free[rank] = max([free[rank], *(ready[rank][result] for result in wants(line, action))])
                    free[rank] += COST[action.kind]
                    ready[rank].update(dict.fromkeys(makes(line, first, action), free[rank]))
                else:
                    break
                at[rank] += 1
        for pair, queue in queues.items():
            while queue and len(posted.get(queue[0], [])) == 2:
                way, stage, batch, _, target = passing = queue.popleft()
                clock[pair] = ready[target][way, stage, batch] = max(clock[pair], *posted[passing])
        if at == list(map(len, lists)):
            return free
    raise AssertionError("stands still")


def of_pair(action, pair):
    return isinstance(action, Transfer) and {action.source, action.target} == set(pair)


def test_one_stage_is_a_plain_loop():
    line = line_of(1)
    (actions,) = program(line, ORDERS["1f1b"](line, 3))
    assert actions == [Action(kind, 0, batch) for batch in range(3) for kind in "FB"]
    assert program(line, forwards(line, 2)) == [[Action("F", 0, 0), Action("F", 0, 1)]]


def test_every_action_is_done_once_by_the_rank_of_its_stage():
    for name, line, num_batches, first, orders in cases():
        wanted = {
            Action(kind, stage, batch)
            for kind in KINDS[name]
            for stage in range(line.num_stages)
            for batch in range(num_batches)
            if kind == "F" or stage >= first
        }
        done = [action for order in orders for action in order]
        assert len(done) == len(wanted)
        assert set(done) == wanted
        assert all(line.rank_of(a.stage) == rank for rank, order in enumerate(orders) for a in order)


def test_gradients_of_a_stage_are_added_up_in_the_order_of_micro_batches():
    """The step reduces gradients after the weight half of the last micro-batch, so no other may come later."""
    for _, line, num_batches, first, orders in cases():
        for stage in range(first, line.num_stages):
            order = orders[line.rank_of(stage)]
            assert [a.batch for a in order if a.stage == stage and a.kind in "BW"] == [*range(num_batches)]


def test_programs_do_not_stand_still_even_if_every_transfer_blocks():
    """`Ranks` sees that each action has what it takes, and that each result is taken once."""
    for (line, first, lists), (*_, orders) in zip(programs(), cases(), strict=True):
        left, ranks = meet(line, first, lists)
        assert not left
        assert not any(ranks.held), "a result was made or sent, and not taken"
        assert ranks.most_waiting <= 2, "a stage ran ahead, and filled the memory of another rank"
        assert [[a for a in actions if isinstance(a, Action)] for actions in lists] == orders


def test_pairs_meet_in_the_same_order_and_only_neighbours_meet():
    num_transfers = 0
    for line, _, lists in programs():
        for pair in combinations(range(line.pp), 2):
            local, other = ([a for a in lists[rank] if of_pair(a, pair)] for rank in pair)
            assert [a[1:] for a in local] == [a[1:] for a in other]
            assert all(a.kind != b.kind for a, b in zip(local, other, strict=True))
            num_transfers += len(local)
        for rank, actions in enumerate(lists):
            for a in actions:
                if isinstance(a, Transfer):
                    assert rank == (a.source if a.kind == "send" else a.target)
                    before = a.stage - 1 if a.way == "there" else a.stage + 1
                    assert (line.rank_of(before), line.rank_of(a.stage)) == (a.source, a.target)
    assert num_transfers > 10_000


def test_transfers_that_do_not_block_cost_no_time():
    """The times of a table are those of the program, though each pair of ranks has but one queue for both ways."""
    for (line, first, lists), (*_, orders) in zip(programs(), cases(), strict=True):
        table = timed(line, orders)
        assert finish_times(line, first, lists) == [row[-1].end for row in table.rows]
        for row in table.rows:
            assert all(a.end <= b.start for a, b in pairwise(row))
            assert all(slot.end - slot.start == COST[slot.action.kind] for slot in row)


def unpaired(line, orders):
    """Receive before each action and send after it, as one would without `program`."""
    has = {action for order in orders for action in order}
    lists = [[] for _ in orders]
    for rank, order in enumerate(orders):
        for action in order:
            kind, stage, batch = action
            way, step = ("there", 1) if kind == "F" else ("back", -1)
            before, after = Action(kind, stage - step, batch), Action(kind, stage + step, batch)
            source, target = line.rank_of(stage - step), line.rank_of(stage + step)
            if kind != "W" and before in has and source != rank:
                lists[rank].append(Transfer("receive", way, stage, batch, source, rank))
            lists[rank].append(action)
            if kind != "W" and after in has and target != rank:
                lists[rank].append(Transfer("send", way, stage + step, batch, rank, target))
    return lists


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("name", ["1f1b", "zero-bubble"])
def test_the_machine_sees_a_program_without_pairing(name, pp):
    line = line_of(pp)
    orders = ORDERS[name](line, 2 * pp)
    left, _ = meet(line, 0, unpaired(line, orders))
    assert left, "one rank sends forward, the other backward, and both wait"
    assert not meet(line, 0, program(line, orders))[0]


def test_orders_that_cannot_be_carried_out_are_refused():
    line = line_of(2)
    orders = ORDERS["1f1b"](line, 2)
    orders[1].reverse()
    with pytest.raises(LayoutError, match=r"deadlocks with rank 0 at B0 of stage 0, rank 1 at B1 of stage 1"):
        program(line, orders)


def bubble(name, pp, num_batches, a_rank=1):
    line = line_for(name, pp, a_rank)
    return timed(line, ORDERS[name](line, num_batches)).bubble


def test_bubbles_are_those_of_the_formulas():
    for pp in range(1, 9):
        late = pp - 1
        for num in {pp, pp + 1, 2 * pp, 3 * pp, 24}:
            assert bubble("1f1b", pp, num) == pytest.approx(late / (num + late))
            assert bubble("zero-bubble", pp, num) == pytest.approx(late / (3 * num + late))
            if num % pp == 0:
                assert bubble("1f1b", pp, num, 2) == pytest.approx(late / (2 * num + late))
                assert bubble("1f1b", pp, num, 3) == pytest.approx(late / (3 * num + late))
                assert bubble("zero-bubble", pp, num, 2) == pytest.approx(late / (3 * 2 * num + late))
            exact = late / (6 * num + late)
            if pp in (1, 2, 3, 4) or (pp, num) in [(8, 8), (8, 16), (8, 24)]:
                assert bubble("v", pp, num) == pytest.approx(exact)
            assert exact - 1e-9 <= bubble("v", pp, num) <= (late + 4) / (6 * num + late + 4), "up to 4 moments more"


def test_the_figures_of_the_design():
    """pp4 M8, pp8 M16: 1F1B, interleaved with two stages a rank, ZB-H1, V."""
    for pp, figures in [(4, (27.3, 15.8, 11.1, 5.9)), (8, (30.4, 17.9, 12.7, 6.8))]:
        names = [("1f1b", 1), ("1f1b", 2), ("zero-bubble", 1), ("v", 2)]
        assert tuple(round(100 * bubble(name, pp, 2 * pp, v), 1) for name, v in names) == figures


def kept(name, pp, num_batches, a_rank=1):
    return list(map(peak_kept, ORDERS[name](line_for(name, pp, a_rank), num_batches)))


def test_ranks_keep_what_the_formulas_say():
    for pp in range(1, 9):
        for num in {1, pp - 1, pp, pp + 1, 3 * pp} - {0}:
            assert kept("1f1b", pp, num) == [min(num, pp - rank) for rank in range(pp)]
            assert kept("zero-bubble", pp, num) == [min(num, pp)] * pp
            assert max(kept("v", pp, num)) <= 2 * pp
        for a_rank in (2, 3):
            ahead = [2 * (pp - rank - 1) + (a_rank - 1) * pp for rank in range(pp)]
            for num in (pp, 3 * pp):
                assert kept("1f1b", pp, num, a_rank) == [min(a_rank * num, 1 + a) for a in ahead]
        assert kept("v", pp, 3 * pp) == [2 * pp] * pp


def test_nothing_is_kept_for_stages_without_backward():
    assert list(map(peak_kept, forwards(line_of(4, 2), 8))) == [0] * 4
    assert list(map(peak_kept, ORDERS["1f1b"](line_of(4), 8, 2))) == [0, 0, 2, 1]


@pytest.mark.parametrize("most", [2, 3, 5, 8])
def test_a_v_keeps_no_more_than_it_may(most):
    line = line_of(4, 2, turn=True)
    orders = v_schedule(line, 9, most=most)
    assert max(map(peak_kept, orders)) <= most
    assert not meet(line, 0, program(line, orders))[0]


@pytest.mark.parametrize(
    ("name", "rank", "how", "result"),
    [
        ("1f1b", 0, dict(), Gathers(8, 8, 8)),
        ("zero-bubble", 0, dict(), Gathers(8, 8, 8)),
        # F0-F3 share a gathering, B0 finds it; each of F4-F7 gathers for B1-B4; B5-B7 gather again.
        ("1f1b", 0, dict(again=False), Gathers(5, 3, 8)),
        ("1f1b", 3, dict(again=False), Gathers(8, 0, 8)),
        # F0-F3, then F I W four times, and each W comes after the I of its stage has freed the unit.
        ("zero-bubble", 0, dict(again=False), Gathers(5, 3, 8)),
        ("1f1b", 0, dict(hold=True), Gathers(1, 0, 1)),
        ("zero-bubble", 2, dict(hold=True), Gathers(1, 0, 1)),
    ],
)
def test_gatherings_of_a_unit(name, rank, how, result):
    line = line_of(4)
    assert gathers(ORDERS[name](line, 8)[rank], rank, **how) == result


def test_gatherings_of_units_that_are_not_trained():
    line = line_of(4)
    frozen = ORDERS["1f1b"](line, 8, 1)[0]
    assert gathers(frozen, 0) == Gathers(8, 0, 0)
    assert gathers(frozen, 0, again=False) == Gathers(1, 0, 0)
    assert gathers(frozen, 0, hold=True) == Gathers(1, 0, 0)
    assert gathers(forwards(line, 8)[1], 1) == Gathers(8, 0, 0)


def test_even_is_as_even_as_any_bounds():
    draws = random.Random(7)
    for _ in range(300):
        costs = [draws.randint(1, 9) for _ in range(draws.randint(1, 9))]
        num_stages, first, last = draws.randint(1, len(costs)), draws.randint(0, 9), draws.randint(0, 20)

        def highest_cost(ends, costs=costs, first=first, last=last):
            parts = [sum(costs[a:b]) for a, b in pairwise((0, *ends))]
            parts[0] += first
            parts[-1] += last
            return max(parts)

        ends = even(costs, num_stages, first, last)
        assert Line(num_stages, ends).num_stages == num_stages
        assert ends[-1] == len(costs)
        every = ((*inner, len(costs)) for inner in combinations(range(1, len(costs)), num_stages - 1))
        assert highest_cost(ends) == min(map(highest_cost, every))


def test_even_makes_room_for_the_head():
    assert even([1.0] * 36, 4, last=3.2) == (10, 20, 30, 36), "Qwen3-8B: its head costs as much as 3.2 layers"
    assert even([1.0] * 8, 4) == (2, 4, 6, 8)
    assert even([1.0] * 5, 4) == (1, 2, 3, 5), "early stages keep more micro-batches, so they get fewer layers"


def test_a_dear_head_makes_the_other_stages_of_its_rank_small():
    """Stages of equal cost may leave one rank with far more than the others."""
    costs, head = [3.0] * 8, 16.4  # the benches': the head is 40 % of the work
    assert even(costs, 4, last=head) == (2, 4, 7, 8)
    assert balanced(Line(2, (2, 4, 7, 8), turn=True), costs, head).ends == (1, 4, 7, 8), "22 of 40 and not 25"
    assert balanced(Line(2, (2, 4, 7, 8)), costs, head).ends == (3, 4, 7, 8)
    draws = random.Random(11)
    for _ in range(200):
        pp, stages = draws.randint(1, 4), draws.randint(1, 3)
        costs = [float(draws.randint(1, 9)) for _ in range(draws.randint(pp * stages, 20))]
        line = Line(pp, even(costs, pp * stages, last=5.0))
        result = balanced(line, costs, 5.0)
        assert (result.pp, result.turn, result.num_stages, result.ends[-1]) == (pp, False, pp * stages, len(costs))
        assert of_ranks(result, costs, 5.0) <= of_ranks(line, costs, 5.0)
        assert stages > 1 or result == line, "with one stage a rank nothing can be better"


def of_ranks(line, costs, last):
    sums = [sum(costs[layer] for layer in line.layers_of(stage)) for stage in range(line.num_stages)]
    sums[-1] += last
    return max(sum(sums[stage] for stage in line.stages_of(rank)) for rank in range(line.pp))


def test_layers_and_stages_tile():
    draws = random.Random(3)
    for _ in range(100):
        pp, turn = draws.randint(1, 8), draws.random() < 0.5
        num_stages = pp * (2 if turn else draws.randint(1, 3))
        num_layers = num_stages + draws.randint(0, 9)
        ends = (*sorted(draws.sample(range(1, num_layers), num_stages - 1)), num_layers)
        line = Line(pp, ends, turn)
        layers = [layer for stage in range(num_stages) for layer in line.layers_of(stage)]
        assert layers == list(range(num_layers))
        assert all(layer in line.layers_of(line.stage_of(layer)) for layer in layers)
        held = [stage for rank in range(pp) for stage in line.stages_of(rank)]
        assert sorted(held) == list(range(num_stages))
        assert all(line.rank_of(stage) == rank for rank in range(pp) for stage in line.stages_of(rank))


def test_a_v_turns_on_the_last_rank():
    line = line_of(3, 2, turn=True)
    assert [line.stages_of(rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]
    assert [line_of(3, 2).stages_of(rank) for rank in range(3)] == [(0, 3), (1, 4), (2, 5)]


@pytest.mark.parametrize(
    ("error", "make", "says"),
    [
        (MeshError, lambda: even([1.0] * 3, 4), "3 layers cannot make 4 pipeline stages.*product is from 1 to 3"),
        (ConfigError, lambda: Line(2, (2, 2)), r"ends=\(2, 2\) leaves a stage without a layer; give"),
        (ConfigError, lambda: Line(2, (1, 2, 3)), "3 pipeline stages cannot be dealt evenly to pp=2 ranks; give"),
        (ConfigError, lambda: Line(2, ()), "0 pipeline stages"),
        (ConfigError, lambda: line_of(2, 3, True), "6 stages on pp=2 make 3 a rank; a V has 2, .*choose"),
        (ConfigError, lambda: line_of(2, 1, True), "2 stages on pp=2 make 1 a rank"),
        (MeshError, lambda: line_of(2).stage_of(2), "layer 2 is in no stage: the line has 2 layers"),
        (MeshError, lambda: line_of(2).stage_of(-1), "layer -1 is in no stage"),
        (ConfigError, lambda: ORDERS["1f1b"](line_of(4, 2), 6), r"pp=4\b.*\b6\b.*give 8 .*or"),
        (ConfigError, lambda: ORDERS["zero-bubble"](line_of(4, 2), 6), "groups of pp=4"),
        (ConfigError, lambda: ORDERS["1f1b"](line_of(4, 2, True), 8), "choose the schedule v"),
        (ConfigError, lambda: ORDERS["v"](line_of(4, 2), 8), "schedule v needs.*turn"),
        (ConfigError, lambda: v_schedule(line_of(4, 2, True), 8, most=1), "most=1 .*give 2 or more"),
        (ConfigError, lambda: forwards(line_of(2), 0), "a step of 0 micro-batches does nothing; give 1 or more"),
        (ConfigError, lambda: ORDERS["1f1b"](line_of(2), 0), "a step of 0 micro-batches"),
        (ConfigError, lambda: ORDERS["v"](line_of(2, 2, True), 4, 4), "from stage 4; the line has stages 0-3"),
    ],
)
def test_refused_with_numbers_and_a_way_out(error, make, says):
    with pytest.raises(error, match=says):
        make()


def test_a_drawing():
    row = (Slot(0, 1, Action("F", 0, 9)), Slot(1, 2, Action("F", 0, 12)), Slot(3, 3.1, Action("B", 0, 9)))
    assert draw(Timetable((row,)), columns=2) == "  0 F9F ..", "a part of a number would be another micro-batch"
    line = line_of(2)
    assert draw(timed(line, ORDERS["1f1b"](line, 2)), columns=2).splitlines() == [
        "  0 F0F1....B0  ..B1  ",
        "  1 ..F0B0  F1B1  ....",
    ]
    line = line_of(2, 2, turn=True)
    assert draw(timed(line, ORDERS["v"](line, 2)), columns=2).splitlines() == [
        "  0 F0F1..f0i0f1i1I0w0I1W0w1W1",
        "  1 ..F0f0F1f1i0I0i1I1w0W0w1W1",
    ]
