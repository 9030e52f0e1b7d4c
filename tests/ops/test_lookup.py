import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.ops import lookup, reordered
from tests.ops.references import compare, differentiate, rand

ROWS = torch.tensor([4, 0, 4, 6, 4])  # one three times, others never


def test_against_reference():
    compare(lambda table: lookup(table, ROWS), lambda table: torch.stack([table[row] for row in ROWS]), [rand(7, 3)])


def test_no_tokens_still_give_gradients():
    _, d_table = differentiate(lambda table: lookup(table, ROWS[:0]), [rand(7, 3)])
    assert torch.equal(d_table, torch.zeros(7, 3, dtype=torch.float64))


def test_a_row_of_many_tokens_is_summed_in_float32():
    """Half of the tokens are the same: in bfloat16 its gradient would stop growing."""
    rows = torch.cat([torch.zeros(1024, dtype=torch.long), torch.arange(1, 1025)])
    result = differentiate(lambda table: lookup(table, rows), [rand(1025, 8, dtype=torch.bfloat16)])[1]
    wide = differentiate(lambda table: lookup(table, rows), [rand(1025, 8)])[1]
    assert (result.double() - wide).norm() <= 5e-3 * wide.norm()


def test_the_same_bits_each_time_on_several_threads():
    rows = torch.arange(4096) % 3

    def gradient() -> torch.Tensor:
        return differentiate(lambda table: lookup(table, rows), [rand(3, 64, dtype=torch.float32)])[1]

    kept = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        first = gradient()
        assert all(torch.equal(gradient(), first) for _ in range(20))
    finally:
        torch.set_num_threads(kept)


def test_large_tables_have_the_same_gradient():
    """The tensor is large enough for a request of large pages."""
    _, d_table = differentiate(lambda table: lookup(table, ROWS), [rand(1 << 16, 129)])
    assert d_table.nbytes > 1 << 26
    _, d_small = differentiate(lambda table: lookup(table, ROWS), [rand(7, 129)])
    assert torch.equal(d_table[:7], d_small)
    assert not d_table[7:].any()


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("num", [0, 1, 5])
def test_reordered_against_reference(num, k):
    order = torch.randperm(num * k, generator=torch.Generator().manual_seed(0))
    compare(
        lambda x: reordered(x, order, order.argsort()),
        lambda x: torch.stack([x[at // k] for at in order]) if num else x * 1,
        [rand(num, 3)],
    )


def test_gradients_of_a_row_are_summed_in_float32():
    """In bfloat16 each of the last 256 of 512 copies of a row would count double."""
    order = torch.arange(512)
    x = rand(1, 8, dtype=torch.bfloat16)
    (result,) = torch.autograd.grad(reordered(x, order, order), x, torch.full((512, 8), 1.01, dtype=torch.bfloat16))
    assert torch.equal(result, torch.full((1, 8), 512 * 1.0078125, dtype=torch.bfloat16))


class Recorded(TorchDispatchMode):
    """Record the numbers that each operation gets."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.numbers = {**vars(self).get("numbers", {}), func: [each for each in args if not torch.is_tensor(each)]}
        return func(*args, **(kwargs or {}))


def test_a_device_gives_every_row_the_sum_of_its_tokens():
    """No row is padding, and no gradient is divided by how often its row occurs."""
    table = torch.empty(7, 3, device="meta", requires_grad=True)
    x = lookup(table, ROWS.to("meta"))
    with Recorded() as recorded:
        (grad,) = torch.autograd.grad(x.sum(), table)
    assert grad.shape == (7, 3)
    assert recorded.numbers[torch.ops.aten.embedding_dense_backward.default] == [7, -1, False]
