"""Data to try a mesh with: documents of 1, 2, 3 and more tokens, other ones on every data rank, a tail of filler.

What they are chosen for: on each data rank one document crosses the 64 tokens that a delta rule solves at once. On data
rank 0 one begins at 64 and one at 128, so that both a chunk and its past belong to another document. A step of few
tokens leaves experts with one row or none. A long stream has more tokens than the loss takes at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from ..data import IGNORE, Batch, pack

LENGTH, FEW, LONG = 136, 8, 1100
FEW_STEP, LONG_STEP = 1, 2
_SIZES = [[5, 1, 58, 64, 4], [17, 2, 3, 46, 21], [70, 1, 65], [11, 11, 44, 4, 59]]
_FEW_SIZES = [[2, 1, 3], [1, 4], [5], [3, 2, 2]]
_LONG_SIZES = [400, 7, 105, 300, 200, 61]  # one begins at 512


@dataclass(frozen=True)
class Data:
    """Micro-batches of unequal numbers of targets; every other one has weights. `Data(...)(data_rank, step)`.

    With `few` and `long`, `FEW_STEP` and `LONG_STEP` have micro-batches of these lengths: one each, or `num_special`,
    where a pipeline takes no fewer.
    """

    num: int = 2
    length: int = LENGTH
    vocab: int = 131
    target: bool = False  # for a value head
    few: int = 0
    long: int = 0
    seed: int = 0
    num_special: int = 1

    def __call__(self, data_rank: int, step: int = 0) -> list[Batch]:
        out = []
        for number, documents in enumerate(self.documents(data_rank, step)):
            g = self._generator(data_rank, step, number + 50)
            fields = {"target": [torch.randn(len(d), generator=g) for d in documents]} if self.target else {}
            if number % 2:
                fields["weight"] = [0.5 + torch.rand(len(d), generator=g) for d in documents]
            out.append(pack(documents, length=self._special(step) or self.length, fields=fields))
        return out

    def documents(self, data_rank: int, step: int = 0) -> list[list[list[int]]]:
        """Of each micro-batch."""
        out, special = [], self._special(step)
        for number in range(self.num_special if special else self.num):
            g = self._generator(data_rank, step, number)
            sizes = _SIZES[(data_rank + 2 * number) % len(_SIZES)]
            if special:
                sizes = _LONG_SIZES if step == LONG_STEP else _FEW_SIZES[(data_rank + number) % len(_FEW_SIZES)]
            out.append([torch.randint(self.vocab, (size,), generator=g).tolist() for size in sizes])
        return out

    def labels(self, data_rank: int, step: int = 0) -> list[Tensor]:
        """Of each micro-batch, reckoned here: the next token of the same document. `pack` must find the same."""
        return [_labels(documents) for documents in self.documents(data_rank, step)]

    def bounds(self, data_rank: int, step: int = 0) -> list[list[int]]:
        """Where documents begin and end, without filler."""
        return [list(accumulate(map(len, ds), initial=0)) for ds in self.documents(data_rank, step)]

    def _special(self, step: int) -> int:
        """The length of a step that differs from the others, else 0."""
        return {FEW_STEP: self.few, LONG_STEP: self.long}.get(step, 0)

    def _generator(self, data_rank: int, step: int, number: int) -> torch.Generator:
        at = 10_007 * step if self._special(step) else 0
        return torch.Generator().manual_seed(1_000_003 * self.seed + at + 100 * data_rank + number)


def _labels(documents: list[list[int]]) -> Tensor:
    flat: list[int] = []
    for document in documents:
        flat += document[1:]
        flat.append(IGNORE)
    return torch.tensor(flat)


def ragged(
    data_rank: int, *, num: int = 2, length: int = LENGTH, vocab: int = 131, target: bool = False
) -> list[Batch]:
    """The micro-batches of a data rank."""
    return Data(num, length, vocab, target)(data_rank)
