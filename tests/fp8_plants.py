"""Bugs of 8-bit matmuls to plant in the package that runs. See tests/plants.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.ops import Fp8, fp8_matmul, matmul
from meshwright.ops.fp8_matmul import BLOCK, rounded_matrix, rounded_rows
from meshwright.ops.fp8_tensor import Blocks, Quantised
from meshwright.parallel import fp8_gather
from tests.plants import Patch


def sideways(patch: Patch) -> None:
    """Round gradients to 8 bits along their tokens."""
    real = matmul._of_input

    def along_tokens(d: Tensor, joined: fp8_matmul.Matrix, x: Tensor, fp8: Fp8) -> Tensor:
        turned = F.pad(d.flatten(0, -2).mT, (0, -d.flatten(0, -2).shape[0] % BLOCK))
        along = rounded_rows(turned).mT[: d.flatten(0, -2).shape[0]].view_as(d)
        return (along @ rounded_matrix(joined)).to(x.dtype) if fp8 else real(d, joined, x, fp8)

    patch.setattr(matmul, "_of_input", along_tokens)


def scale_of_shard(patch: Patch) -> None:
    """Scale half a block of 128 rows by itself, or the rows of a rank where 8-bit codes are sent."""
    real = fp8_matmul.rounded_matrix

    def of_own_rows(kind: fp8_gather._WeightGroup, _: object) -> None:
        kind.scales.zero_()
        for matrix in kind.matrices:
            matrix.find_amax()
        kind.scales.copy_(fp8_matmul.scales_of(kind.scales))

    def rounded(weight: Tensor | Blocks) -> Tensor:
        if isinstance(weight, Quantised | Blocks):
            return real(weight)
        halves = weight.unflatten(0, (-1, 2, BLOCK // 2)).flatten(0, 1)
        padded = [real(F.pad(half, (0, 0, 0, BLOCK // 2))) for half in halves]
        return torch.stack([half[: BLOCK // 2] for half in padded]).view_as(weight)

    patch.setattr(fp8_gather._WeightGroup, "find_scales", of_own_rows)
    patch.setattr(fp8_gather, "_whole_matrices", lambda *_: ())  # so that matmuls quantise
    patch.setattr(fp8_matmul, "rounded_matrix", rounded)
