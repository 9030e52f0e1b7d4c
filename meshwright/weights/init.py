"""Fresh values that do not depend on the mesh: each is drawn by (seed, parameter, index in the outermost dim)."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from ..layout import Init, Param, Piece


def fill_fresh(param: Param, piece: Piece, stored: Tensor, seed: int) -> None:
    for box, view in piece.views(stored):
        if param.init.kind in ("zeros", "ones"):
            view.fill_(param.init.kind == "ones")
            continue
        inner = tuple(slice(a, b) for a, b in zip(box.start[1:], box.stop[1:], strict=True))
        for index in range(box.start[0], box.stop[0]):
            row = _draw(param.init, param.shape[1:], _generator(seed, param.name, index))
            view[index - box.start[0]].copy_(row[inner])


def _generator(seed: int, name: str, index: int) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}/{name}/{index}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def _draw(init: Init, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if init.kind == "normal":
        return torch.randn(shape, generator=generator) * init.scale
    assert init.kind == "log_uniform", init
    return (torch.rand(shape, generator=generator) * init.scale).clamp_min(1e-4).log()
