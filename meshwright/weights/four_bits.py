"""Fill frozen matrices that are stored in 4 bits (QLoRA): with codes and scales of the files, or quantised from values.

Rows are read and packed in parts, so that a rank needs a few MB on top of what it stores. Blocks run along whole rows
of our matrices and tp cuts only between them, so a matrix has the same codes on every mesh.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ..ops.codings import Coding
from ..ops.part_sizes import part_size
from ..sharding import Block, Box, Layout, Param, Piece
from .reader import Reader

_PART = part_size(__name__, "_PART", 1 << 20, small=1001)  # elements that are packed together


def fill_rows(reader: Reader, layout: Layout, piece: Piece, coding: Coding, stored: Tensor) -> None:
    """Fill the stored rows of a piece."""
    in_files = all(block.key in reader.source.scales for block in layout.blocks)
    step = max(1, _PART // piece.shape[1])
    for lo in range(piece.lo, piece.hi, step):
        part = replace(piece, lo=lo, hi=min(lo + step, piece.hi))
        rows = _read(reader, layout, part, coding) if in_files else _quantised(reader, layout, part, coding)
        stored[lo - piece.lo : part.hi - piece.lo].copy_(rows)


def _read(reader: Reader, layout: Layout, piece: Piece, coding: Coding) -> Tensor:
    """Return rows with the codes and scales of the files."""
    assert coding.scale is not None, "its scales are in the row"
    codes = torch.empty(piece.shape, dtype=torch.uint8, device="cpu")
    scales = torch.empty(piece.shape, dtype=coding.scale, device="cpu").view(_integers(coding.scale))  # of each element
    for (block, common, codes_of_box), (_, _, scales_of_box) in zip(
        _boxes(layout, piece, codes), _boxes(layout, piece, scales), strict=True
    ):
        codes_of_box.copy_(reader.codes(block, common))
        scales_of_box.copy_(reader.stored_scales_of(block, common).view(scales.dtype))
    return coding.pack(codes, scales[:, :: coding.block].contiguous())


def _integers(scale: torch.dtype) -> torch.dtype:
    """Return the dtype in which scales are copied: torch copies float8 of two kinds by value."""
    return torch.uint8 if scale.itemsize == 1 else scale


def _quantised(reader: Reader, layout: Layout, piece: Piece, coding: Coding) -> Tensor:
    """Return rows that are quantised from the values of the files."""
    values = torch.empty(piece.shape, dtype=torch.float32, device="cpu")
    reader.fill(layout, piece, values)
    by_box = (matrices_of(reader, layout, piece.param, box, coding) for box in piece.boxes)
    return coding.encode(values, torch.cat([divisors[rows] for rows, divisors in by_box]))


def matrices_of(reader: Reader, layout: Layout, param: Param, box: Box, coding: Coding) -> tuple[Tensor, Tensor]:
    """Return for each row of a box the number of its matrix in the files, and for each matrix the divisor of its
    scales, `[matrices, 1]`.
    """
    num_rows, divisors, num = len(param.rows), list[Tensor](), 0
    rows = torch.zeros(box.shape[:num_rows], dtype=torch.int64, device="cpu")
    if not coding.divided:
        return rows.view(-1), torch.ones(1, 1, dtype=torch.float32, device="cpu")
    for block in layout.blocks:
        overlap = block.ours.meet(box)
        if overlap is not None:
            places, of_block = reader.divisors_of(block, overlap, coding)
            # The number of a matrix does not depend on the column.
            rows[overlap.within(box).slices[:num_rows]] = places.rows.flatten(num_rows)[..., 0] + num
            divisors.append(of_block)
            num += len(of_block)
    return rows.view(-1), torch.cat(divisors)


def _boxes(layout: Layout, piece: Piece, tensor: Tensor) -> Iterator[tuple[Block, Box, Tensor]]:
    """Yield the overlap of a piece with each block, and the same part of a tensor in the shape of the piece."""
    for box, view in piece.views(tensor):
        for block in layout.blocks:
            common = block.ours.meet(box)
            if common is not None:
                yield block, common, view[common.within(box).slices]
