"""Fresh values that do not depend on the mesh: drawn in blocks of matrix rows, each by (seed, parameter, block)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import product
from math import prod

import torch
from torch import Tensor

from ..sharding import Box, Init, Param, Piece

_ROWS = 64  # of a block: few enough that a rank draws little that it does not keep


def fill_fresh(param: Param, piece: Piece, stored: Tensor, seed: int) -> None:
    if param.init.kind in ("zeros", "ones"):
        stored.fill_(param.init.kind == "ones")
        return
    at = 0
    cols = tuple(slice(a, b) for a, b in zip(*_cols(param, piece.box), strict=True))
    inner = tuple(param.cols.values())
    for box in piece.boxes:
        for first, last in _row_runs(param, box):
            for lo in range(first - first % _ROWS, last, _ROWS):
                block = _draw(param.init, (_ROWS, *inner), _generator(seed, param.name, lo // _ROWS))
                kept = block[max(first - lo, 0) : last - lo]
                kept = kept[(slice(None), *cols)].flatten(1) if inner else kept
                stored[at : at + len(kept)].copy_(kept)
                at += len(kept)


def _cols(param: Param, box: Box) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return box.start[len(param.rows) :], box.stop[len(param.rows) :]


def _row_runs(param: Param, box: Box) -> Iterator[tuple[int, int]]:
    """The rows of a box as ranges of rows of the whole matrix, in the order in which they are stored."""
    sizes = tuple(param.rows.values())
    ranges = [range(a, b) for a, b in zip(box.start, box.stop, strict=True)]
    for outer in product(*ranges[: len(sizes) - 1]):
        base = sum(i * prod(sizes[d + 1 :]) for d, i in enumerate(outer))
        yield base + box.start[len(sizes) - 1], base + box.stop[len(sizes) - 1]


def _generator(seed: int, name: str, block: int) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=8).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest, "little") >> 1)


def _draw(init: Init, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if init.kind == "normal":
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") * init.scale
    assert init.kind == "log_uniform", init
    drawn = torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu")
    return (drawn * init.scale).clamp_min(1e-4).log()
