"""Initialise parameters so that values do not depend on the mesh: each block of 64 rows has its own generator.

The seed of a block is a hash of (seed, parameter name, block number), a counter-based scheme. A generator per rank
gives every tp shard the same numbers (ms-swift#7944), or different numbers for each mesh size (pytorch#168058);
DTensor's offset-based RNG still depends on the sharded dim, and with CPU offload repeats values in every layer
(torchtitan#4511).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import product
from math import prod

import torch
from torch import Tensor

from ..sharding import Box, Init, Param, Piece

_ROWS = 64  # rows of a block: a rank draws whole blocks, so at most 63 rows too many at each end of its shard


def fill_fresh(param: Param, piece: Piece, stored: Tensor, seed: int) -> None:
    """Fill this rank's piece of a parameter with its initial values.

    Rows are counted in the whole matrix, so a shard of rows 100 to 200 draws blocks 1, 2 and 3 and keeps rows 100 to
    199 of them: the same numbers that one process would have there.
    """
    if param.init.kind in ("zeros", "ones"):
        stored.fill_(param.init.kind == "ones")
        return
    written_rows = 0
    cols = tuple(slice(a, b) for a, b in zip(*_cols(param, piece.box), strict=True))
    inner = tuple(param.cols.values())
    for box in piece.boxes:
        for first, last in _row_runs(param, box):
            # The whole block is drawn even if only some rows are kept, because element n of a generator depends on
            # those before it.
            for lo in range(first - first % _ROWS, last, _ROWS):
                block = _draw(param.init, (_ROWS, *inner), _generator(seed, param.name, lo // _ROWS))
                kept = block[max(first - lo, 0) : last - lo]
                kept = kept[(slice(None), *cols)].flatten(1) if inner else kept
                stored[written_rows : written_rows + len(kept)].copy_(kept)
                written_rows += len(kept)


def _cols(param: Param, box: Box) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return start and stop of a box in the column dims."""
    return box.start[len(param.rows) :], box.stop[len(param.rows) :]


def _row_runs(param: Param, box: Box) -> Iterator[tuple[int, int]]:
    """Yield the rows of a box as ranges of rows of the whole matrix, in the order in which they are stored."""
    sizes = tuple(param.rows.values())
    ranges = [range(a, b) for a, b in zip(box.start, box.stop, strict=True)]
    for outer in product(*ranges[: len(sizes) - 1]):
        base = sum(i * prod(sizes[d + 1 :]) for d, i in enumerate(outer))
        yield base + box.start[len(sizes) - 1], base + box.stop[len(sizes) - 1]


def _generator(seed: int, name: str, block: int) -> torch.Generator:
    """Return the generator of a block. It is seeded by blake2b: `hash()` differs between processes."""
    digest = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=8).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest, "little") >> 1)


def _draw(init: Init, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw a block on the CPU in float32: CUDA generators would give other numbers.

    `log_uniform` is the initialisation of `A_log` in Mamba-like layers: log of a uniform sample in (0, scale).
    """
    if init.kind == "normal":
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") * init.scale
    assert init.kind in ("uniform", "log_uniform"), init
    drawn = torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu")
    if init.kind == "uniform":
        return (2 * drawn - 1) * init.scale
    return (drawn * init.scale).clamp_min(1e-4).log()
