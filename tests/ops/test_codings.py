"""Scales of 4-bit formats at the ends of their range: blocks of zeros, tiny and huge ones."""

import torch

from meshwright.ops import codings


def test_scales_that_are_powers_of_two_stay_within_a_byte():
    amax = torch.tensor([0.0, 2.0**-140, 2.0**-125, 1.0, 5.9, 8.0, 3e38])
    scales = codings._e8m0_scales(amax).view(torch.uint8)
    assert scales.tolist() == [127, 0, 0, 125, 127, 128, 252]


def test_a_matrix_of_zeros_has_the_divisor_1():
    assert codings.divisor_for_amax(torch.tensor([0.0, 6.0, 672.0])).tolist() == [1.0, 448.0, 4.0]


def test_zeros_have_the_code_of_0():
    """bitsandbytes writes this code, number 7 of the table, next to the scale 0."""
    row = codings.NF4.encode(torch.zeros(1, 64), torch.ones(1, 1))
    assert row.tolist() == [[0x77] * 32 + [0] * 4]
