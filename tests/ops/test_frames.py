import pytest
import torch
import torch.nn.functional as F

from meshwright.ops import frame_tables, frames, interpolated
from tests.ops.references import compare, rand

SIZES = [(2, 2), (2, 6), (4, 4), (6, 2), (70, 4)]  # with a side of one block, of the table, and beyond it


def in_blocks(x_HWE):
    """Row by row, and so within each block of 2 x 2."""
    height, width, _ = x_HWE.shape
    rows = [(y + a, x + b) for y in range(0, height, 2) for x in range(0, width, 2) for a in (0, 1) for b in (0, 1)]
    return torch.stack([x_HWE[row, col] for row, col in rows])


def by_torch(table):
    """The corners of the table are those of the frame."""
    side = round(len(table) ** 0.5)
    square = table.view(side, side, -1).permute(2, 0, 1)[None]
    grown = [F.interpolate(square, size=size, mode="bilinear", align_corners=True)[0] for size in SIZES]
    return torch.cat([in_blocks(x_EHW.permute(1, 2, 0)) for x_EHW in grown])


def test_the_table_against_that_of_torch():
    like = torch.empty(0, dtype=torch.float64)
    compare(lambda table: interpolated(table, frames(SIZES, "cpu"), like), by_torch, [rand(16, 6)])


def test_the_table_is_rounded_once():
    """Weights in bfloat16 would be 2e-3 off, and a sum in float32 would lift all that comes after."""
    table = rand(16, 6, dtype=torch.bfloat16, grad=False)
    result = interpolated(table, frames(SIZES, "cpu"), torch.empty(0, dtype=torch.bfloat16))
    assert result.dtype == torch.bfloat16
    wide = by_torch(table.double())
    assert ((result - wide).abs() <= 2**-8 * wide.abs() + 1e-6).all()


@pytest.mark.parametrize("size", [(1, 1), (2, 3), (0, 2)])
def test_a_frame_of_less_than_a_block_is_refused(size):
    with pytest.raises(ValueError, match="both must be even, and at least 2"):
        frames([(2, 2), size], "cpu")


def test_angles_of_frames_are_counted_in_float32():
    tables = [frame_tables(frames([(300, 2)], "cpu"), 8, 1e4, dtype) for dtype in (torch.bfloat16, torch.float32)]
    assert all(map(torch.equal, *tables))
    cos, _ = tables[0]
    assert cos.dtype == torch.float32
    rows, cols = (torch.tensor(at, dtype=torch.float32) for at in (257, 1))
    assert torch.allclose(cos[257 // 2 * 4 + 3], torch.stack([rows, rows / 100, cols, cols / 100]).cos())
