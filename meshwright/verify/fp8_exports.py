"""E2 in FP8: check codes and scales of exports, and that blocks without a change keep those of the source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from ..engine import export, load
from ..sharding import Box
from .reference import Findings, Run, unrounded
from .results import Finding
from .weight_checks import scaled

# FP8 as in DeepSeek-V3 (arXiv:2412.19437): E4M3 codes, and a scale for each block of 128 x 128.
BLOCK = (128, 128)
SCALES = "_scale_inv"
_LARGEST = 448.0  # the largest value of E4M3
_STEP = 2.0**-4  # half of the relative distance between two neighbouring values: E4M3 has 3 bits of mantissa
_LEAST = 2.0**-10  # half of the smallest value, 2^-9

_CHANGED = 10.0  # far above the largest value of a block, so that its scale changes too


def check_unchanged_blocks(run: Run, source: Path, files: Mapping[str, Tensor]) -> Findings:
    """Load an FP8 export on the mesh, change a few values, and export it again.

    A block without a change keeps the codes and scales of the source. A block in which one rank has changed a value
    gets a new scale, and the ranks that store the rest of it write new codes too. `files`: the tensors of `source` on
    rank 0.
    """
    mesh, at = run.model.mesh, source.with_name(f"{source.name} changed")
    model = load(source, mesh, **vars(replace(run.trial.recipe.plain(), lora=None)))
    for name, stored in model.stored().items():
        if model.table[name].low:
            for box, view in model.pieces[name].views(stored):
                _change_one_in_two_blocks(box, view)
    weights = unrounded(model)
    export(model, at)
    if mesh.rank == 0:
        written = {key: tensor for file in at.glob("*.safetensors") for key, tensor in load_file(file).items()}
        for key in (key for key in files if key + SCALES in files):
            yield from _check_matrix(key, files, written, weights[key].to(model.dtype))


def _change_one_in_two_blocks(box: Box, values: Tensor) -> None:
    """Change one value in every other block of a parameter, wherever a rank stores it. `box`: the place of `values`."""
    (top, bottom), (left, right) = zip(box.start[-2:], box.stop[-2:], strict=True)
    rows = torch.arange(top, bottom, device=values.device) % BLOCK[0] == 5
    columns = torch.arange(left, right, device=values.device) % (2 * BLOCK[1]) == 7
    values.masked_fill_(rows[:, None] & columns, _CHANGED)


def _check_matrix(key: str, files: Mapping[str, Tensor], written: Mapping[str, Tensor], weight: Tensor) -> Findings:
    way = "the export of an FP8 model"
    if key not in written or key + SCALES not in written:
        yield Finding("E2", key, f"{way} has not written it in FP8")
        return
    yield from check_in_8_bits(way, key, written[key], written[key + SCALES], weight)
    old = scaled(files[key], files[key + SCALES], BLOCK)
    kept = _block_max(((weight - old).abs() > 0.5 * old.abs()).double()) == 0
    same_codes = _block_max((files[key].float() != written[key].float()).double()) == 0
    wrong = kept & ~(same_codes & (files[key + SCALES] == written[key + SCALES]).view(kept.shape))
    if wrong.any():
        what = f"{int(wrong.sum())} of {int(kept.sum())} blocks without a change have other codes or scales"
        yield Finding("E2", key, f"{way}: {what}", "each rank decides from its own part whether a block has changed")


def check_in_8_bits(
    way: str, key: str, codes: Tensor, scales: Tensor, weight: Tensor, slack: Tensor | float = 0.0
) -> Findings:
    """Check that each code is the nearest to its weight, and that the largest weight of a block has the largest code.

    `slack`: the error that a weight may have already. The second check catches scales that are too large: every code
    may then be the nearest, yet bits are wasted.
    """
    size, values = weight.double().abs(), scaled(codes, scales, BLOCK).double()
    step = scaled(torch.ones_like(weight), scales, BLOCK).double()
    off = (values - weight.double()).abs()
    # The distance between codes grows with the value; among subnormal numbers it is constant.
    wrong = ~(off <= 1.001 * torch.maximum(size * _STEP, step * _LEAST) + slack)
    if wrong.any():
        what = f"{int(wrong.sum())} of {off.numel()} values of {way} are further off than rounding to FP8"
        yield Finding("E2", key, what, "codes or scales of other blocks")
    largest = _block_max(size / step)
    unlike = ~((largest / _LARGEST - 1).abs() <= 0.01) & (_block_max(size) > 0)
    if unlike.any():
        what = f"{int(unlike.sum())} of {largest.numel()} scales of {way} are not those of the largest value of a block"
        yield Finding("E2", key, what, "a scale of another block, or of some of its rows")


def _block_max(of_elements: Tensor) -> Tensor:
    """Return the largest element of each block. Blocks at the edges are padded with zeros."""
    rows, columns = BLOCK
    short = [-size % whole for size, whole in zip(of_elements.shape[-2:], BLOCK, strict=True)]
    return (
        F.pad(of_elements, (0, short[1], 0, short[0]))
        .unflatten(-1, (-1, columns))
        .unflatten(-3, (-1, rows))
        .amax((-3, -1))
    )
