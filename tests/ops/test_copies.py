import pytest
import torch

from meshwright.ops import Copies, by_expert, copies_of, gather_copies, runs, sum_copies, turns
from meshwright.ops import rows as module
from tests.ops.references import compare, rand

CASES = {"several": [2, 0, 0, 1, 2, 2, 3], "one each": [1, 0, 2], "one row": [0, 0, 0], "none": []}


def copies(of: list[int]) -> Copies:
    number = torch.tensor(of, dtype=torch.long)
    count = number.bincount()
    sizes = [int((count > turn).sum()) for turn in range(int(count.max()) if of else 1)]
    return copies_of(number, turns(number), sizes)


@pytest.mark.parametrize("of", CASES.values(), ids=CASES)
def test_copied_against_reference(of):
    num = max(of, default=-1) + 1
    compare(
        lambda x: gather_copies(x, copies(of)),
        lambda x: torch.stack([x[n] for n in of]) if of else x * 1,
        [rand(num, 3)],
    )


@pytest.mark.parametrize("of", CASES.values(), ids=CASES)
def test_summed_against_reference(of):
    def sums(y):
        rows = [sum(y[at] for at, n in enumerate(of) if n == row) for row in range(max(of, default=-1) + 1)]
        return torch.stack(rows) if rows else y * 1

    compare(lambda y: sum_copies(y, copies(of)), sums, [rand(len(of), 3)])


def test_sums_are_rounded_once():
    """In bfloat16 each of the last 256 of 512 copies of a row would count double."""
    y = torch.full((512, 8), 1.01, dtype=torch.bfloat16)
    assert torch.equal(sum_copies(y, copies([0] * 512)), torch.full((1, 8), 512 * 1.0078125, dtype=torch.bfloat16))


def test_runs_and_turns():
    run, place = runs(torch.tensor([3, 3, 5, 9, 9, 9]))
    assert (run.tolist(), place.tolist()) == ([0, 0, 1, 2, 2, 2], [0, 1, 0, 0, 1, 2])
    assert turns(torch.tensor([2, 0, 2, 2, 0])).tolist() == [0, 0, 1, 2, 1]
    assert [each.tolist() for each in runs(torch.tensor([7, 7, 7]))] == [[0, 0, 0], [0, 1, 2]]
    assert [len(each) for each in runs(torch.tensor([], dtype=torch.long))] == [0, 0]


def test_by_expert_against_reference():
    expert = torch.tensor([[3, 1], [0, 3], [3, 2], [1, 0], [3, 1]])  # of 5, one without tokens
    factors = torch.arange(1.0, 6.0, dtype=torch.float64)

    def ours(x, weight):
        rows = by_expert(x, weight, expert, 5)
        assert (rows.counts_E.tolist(), rows.counts) == ([2, 3, 1, 4, 0], None)
        return rows.back(rows.x_ND * (factors.repeat_interleave(rows.counts_E) * rows.weight_N)[:, None])

    def plain(x, weight):
        return torch.stack(
            [sum(w * factors[e] * x[t] for e, w in zip(expert[t], weight[t], strict=True)) for t in range(5)]
        )

    compare(ours, plain, [rand(5, 3), rand(5, 2)])


@pytest.mark.parametrize(("num", "asked"), [(1, []), (3, [3])])
def test_the_kernel_of_sums_is_chosen_for_their_number_of_rows(num, asked, monkeypatch):
    seen, y = [], rand(6, 2, grad=False)
    monkeypatch.setattr(module, "_has_kernel", lambda y_ND, num: seen.append(num))
    assert torch.equal(module.sum_rows(y, torch.arange(6).flip(0), num), y.flip(0).view(6 // num, num, 2).sum(1))
    assert seen == asked
