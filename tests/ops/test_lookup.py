import torch

from meshwright.ops import lookup
from tests.ops.references import compare, differentiate, rand

ROWS = torch.tensor([4, 0, 4, 6, 4])  # one three times, others never


def test_against_reference():
    compare(lambda table: lookup(table, ROWS), lambda table: torch.stack([table[row] for row in ROWS]), [rand(7, 3)])


def test_no_tokens_still_give_gradients():
    _, d_table = differentiate(lambda table: lookup(table, ROWS[:0]), [rand(7, 3)])
    assert torch.equal(d_table, torch.zeros(7, 3, dtype=torch.float64))


def test_large_tables_have_the_same_gradient():
    """Large enough that its block is asked to lie in large pages."""
    _, d_table = differentiate(lambda table: lookup(table, ROWS), [rand(1 << 16, 129)])
    assert d_table.nbytes > 1 << 26
    _, d_small = differentiate(lambda table: lookup(table, ROWS), [rand(7, 129)])
    assert torch.equal(d_table[:7], d_small)
    assert not d_table[7:].any()
