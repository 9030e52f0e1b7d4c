"""E2 of `meshwright verify`: exports after training. tests/test_causes.py plants a bug that it finds."""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.sharding import Box
from meshwright.verify.fp8_exports import SCALES, _change_one_in_two_blocks, _check_matrix, check_in_8_bits


def output_of(weight: Tensor, scales: Tensor, written: Tensor) -> list[str]:
    """Return the findings for a file whose codes were made with `scales`, and which holds the scales `written`."""
    codes = (weight / scales.repeat_interleave(128, 0).repeat_interleave(128, 1)).to(torch.float8_e4m3fn)
    return [finding.what for finding in check_in_8_bits("it", "key", codes, written, weight)]


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


def test_blocks_without_a_change_keep_codes_and_scales() -> None:
    generator = torch.Generator().manual_seed(1)
    codes = (100 * torch.randn(256, 256, generator=generator)).clamp(-400, 400).to(torch.float8_e4m3fn)
    codes[::128, ::128] = 448  # the largest value of each block
    scales = torch.tensor([[0.5, 0.25], [2.0, 1.0]])
    weight = codes.double() * scales.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    weight[0, 0] *= 2
    files = {"w": codes, "w" + SCALES: scales}

    def changed(at: tuple[int, int], factor: float) -> dict[str, Tensor]:
        """Return the files with other scales of one block, and the codes that fit them."""
        new_scales = scales.clone()
        new_scales[at] *= factor
        wide = new_scales.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
        return {"w": (weight / wide).to(torch.float8_e4m3fn), "w" + SCALES: new_scales}

    assert not [*_check_matrix("w", files, changed((0, 0), 2.0), weight)]
    both = changed((0, 0), 2.0)
    both["w" + SCALES][1, 1] *= 1 + 1e-4  # too small a difference to make a code wrong
    (finding,) = _check_matrix("w", files, both, weight)
    assert "1 of 3 blocks without a change" in finding.what
    assert "further off" in next(_check_matrix("w", files, files, weight)).what
    assert "has not written it in FP8" in next(_check_matrix("w", files, {"w": codes}, weight)).what


def test_the_value_of_a_block_that_changes_does_not_depend_on_the_cut() -> None:
    whole = torch.zeros(3, 256, 384)
    _change_one_in_two_blocks(Box.whole(whole.shape), whole)
    assert whole.nonzero()[:4].tolist() == [[0, 5, 7], [0, 5, 263], [0, 133, 7], [0, 133, 263]]
    parts = torch.zeros_like(whole)
    for start, stop in ((0, 5), (5, 130), (130, 256)):
        _change_one_in_two_blocks(Box((0, start, 6), (3, stop, 384)), parts[:, start:stop, 6:])
    assert torch.equal(whole, parts)
