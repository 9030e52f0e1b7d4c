"""E2 of `meshwright verify`: exports after training. tests/test_causes.py plants a bug that it finds."""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.verify.exports import _in_8_bits


def output_of(weight: Tensor, scales: Tensor, written: Tensor) -> list[str]:
    """Return the findings for a file whose codes were made with `scales`, and which holds the scales `written`."""
    codes = (weight / scales.repeat_interleave(128, 0).repeat_interleave(128, 1)).to(torch.float8_e4m3fn)
    return [finding.what for finding in _in_8_bits("it", "key", codes, written, weight)]


def test_8_bits_are_those_of_the_weight_and_of_each_block() -> None:
    weight = torch.randn(256, 384, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weight[128:, :128] = 0  # a block without a largest value
    most = weight.view(2, 128, 3, 128).abs().amax((1, 3)).float()
    scales = torch.where(most > 0, most / 448, 1.0)
    assert output_of(weight, scales, scales) == []
    (others, _) = output_of(weight, scales, scales.flip(0))
    assert "further off than rounding" in others
    large = scales.clone()
    large[0, 1] *= 4
    (too_large,) = output_of(weight, large, large)
    assert too_large == "1 of 6 scales of it are not those of the largest value of a block"
