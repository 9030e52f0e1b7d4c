"""Data to try a mesh with: documents of 1, 2, 3 and more tokens, other ones on every data rank, a tail of filler."""

from __future__ import annotations

import torch

from ..data import Batch, pack

_SIZES = [[5, 1, 9, 13], [17, 2, 3], [30, 1], [11, 11, 11, 4]]
LENGTH = 40


def ragged(
    data_rank: int, *, num: int = 2, length: int = LENGTH, vocab: int = 131, target: bool = False
) -> list[Batch]:
    """The micro-batches of a data rank, of unequal numbers of targets."""
    out = []
    for number in range(num):
        g = torch.Generator().manual_seed(100 * data_rank + number)
        sizes = _SIZES[(data_rank + 2 * number) % len(_SIZES)]
        docs = [torch.randint(vocab, (n,), generator=g).tolist() for n in sizes]
        fields = {"target": [torch.randn(n, generator=g).tolist() for n in sizes]} if target else None
        out.append(pack(docs, length=length, fields=fields))
    return out
