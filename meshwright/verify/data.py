"""Data to try a mesh with: documents of 1, 2, 3 and more tokens, other ones on every data rank, a tail of filler."""

from __future__ import annotations

import torch

from ..data import Batch, pack

# one document of each stream crosses the 64 tokens that a delta rule takes at once
_SIZES = [[5, 1, 50, 13], [17, 2, 3, 46], [70, 1], [11, 11, 44, 4]]
LENGTH = 72


def ragged(
    data_rank: int, *, num: int = 2, length: int = LENGTH, vocab: int = 131, target: bool = False
) -> list[Batch]:
    """The micro-batches of a data rank, of unequal numbers of targets; every other one has weights."""
    out = []
    for number in range(num):
        g = torch.Generator().manual_seed(100 * data_rank + number)
        sizes = _SIZES[(data_rank + 2 * number) % len(_SIZES)]
        docs = [torch.randint(vocab, (n,), generator=g).tolist() for n in sizes]
        fields = {"target": [torch.randn(n, generator=g) for n in sizes]} if target else {}
        if number % 2:
            fields["weight"] = [0.5 + torch.rand(n, generator=g) for n in sizes]
        out.append(pack(docs, length=length, fields=fields))
    return out
