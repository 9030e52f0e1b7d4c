"""Data for trials: documents of 1, 2, 3 and more tokens, different on every data rank, and padding at the end.

Each size has a reason. On each data rank one document crosses the 64 tokens that the delta rule solves at
once. On data rank 0 one begins at 64 and one at 128, so that both a chunk and its past belong to another document. A
step of few tokens leaves experts with one row or none. A long stream has more tokens than the loss takes at once.

Two gaps in earlier data explain the rest. With streams of 40 tokens no test crossed a chunk of the delta rule. And with
images in the last micro-batch of every step, gradients of a vision tower that replicas never reduced went unnoticed.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..data import IGNORE, Batch, pack

LENGTH, FEW, LONG = 136, 8, 1100
FEW_STEP, LONG_STEP = 1, 2
_SIZES = [[5, 1, 58, 64, 4], [17, 2, 3, 46, 21], [70, 1, 65], [11, 11, 44, 4, 59]]
_FEW_SIZES = [[1, 5], [5], [2, 1, 3], [3, 2, 2]]  # neighbours, and so micro-batches, differ in their padding
_LONG_SIZES = [400, 17, 95, 300, 200, 61]  # one begins at 512, one has a block of 4 more than the budget


ImagePatches = tuple[Tensor, tuple[int, int, int]]  # patches, and their numbers in time, height and width
DocumentImages = list[ImagePatches]


@dataclass(frozen=True)
class Vision:
    """The facts about a vision tower that data needs: the placeholder tokens, and how many values a patch has."""

    image: int
    video: int
    numbers: int


# Patterns of documents, used in turn: a number of text tokens, or an image's size in time, height and width. Some
# images touch, some are first or last, two have different shapes but equally many placeholders, and a video has text
# between its slices.
_PATTERNS: list[list[int | tuple[int, int, int]]] = [
    [2, (1, 2, 6), 1, (1, 6, 2), 2, (3, 4, 2), 1],
    [(1, 2, 4), (1, 4, 2), 3, (1, 2, 2)],
]
# For transformers, which takes touching images for one: here none touch. Also, a video comes before images.
_APART: list[list[int | tuple[int, int, int]]] = [
    [2, (1, 2, 6), 1, (1, 6, 2), 2, (3, 4, 2), 1],
    [(1, 2, 4), 1, (1, 4, 2), 2, (2, 2, 4), 3, (1, 2, 2)],
]
_LEAST = 28  # tokens of a document that gets images


@dataclass(frozen=True)
class Data:
    """Micro-batches with different numbers of targets; every other one has weights. Call `Data(...)(data_rank, step)`.

    With `few` and `long`, the steps `FEW_STEP` and `LONG_STEP` have micro-batches of these lengths: one each, or
    `num_special` where a pipeline needs more. Everything is drawn from seeds, so all ranks and one process can compute
    the data of any rank.

    `target`: draw targets for a value head. `apart`: no images touch.
    """

    num: int = 2
    length: int = LENGTH
    vocab: int = 131
    target: bool = False
    few: int = 0
    long: int = 0
    seed: int = 0
    num_special: int = 1
    vision: Vision | None = None
    apart: bool = False

    def __call__(self, data_rank: int, step: int = 0) -> list[Batch]:
        out = []
        for number, documents in enumerate(self.documents(data_rank, step)):
            g = self._generator(data_rank, step, number + 50)
            fields = {"target": [torch.randn(len(d), generator=g) for d in documents]} if self.target else {}
            if number % 2:
                fields["weight"] = [0.5 + torch.rand(len(d), generator=g) for d in documents]
            images = self._pack_arguments(self.images(data_rank, step)[number])
            out.append(pack(documents, length=self._special(step) or self.length, fields=fields, **images))
        return out

    def _pack_arguments(self, images: list[DocumentImages]) -> dict[str, Any]:
        """Return the arguments of `pack` for images; empty where no document has any."""
        ids = (self.vision.image, self.vision.video) if self.vision else ()
        return {"images": images, "placeholders": ids} if ids and any(images) else {}

    def documents(self, data_rank: int, step: int = 0) -> list[list[list[int]]]:
        """Return the tokens of the documents of each micro-batch."""
        out, special = [], self._special(step)
        for number in range(self.num_special if special else self.num):
            g = self._generator(data_rank, step, number)
            sizes = _SIZES[(data_rank + 2 * number) % len(_SIZES)]
            if special:
                sizes = _LONG_SIZES if step == LONG_STEP else _FEW_SIZES[(data_rank + number) % len(_FEW_SIZES)]
            texts = [torch.randint(self.vocab, (size,), generator=g).tolist() for size in sizes]
            out.append([self._with_places(each, at, data_rank, number, step) for at, each in enumerate(texts)])
        return out

    def images(self, data_rank: int, step: int = 0) -> list[list[DocumentImages]]:
        """Return the images of each document of each micro-batch."""
        out = []
        for number, documents in enumerate(self.documents(data_rank, step)):
            g = self._generator(data_rank, step, number + 25)
            sizes = [self._sizes(len(d), at, data_rank, number, step) for at, d in enumerate(documents)]
            as_bytes = number % 2 == 0 and step != LONG_STEP  # a processor may return either
            out.append([[(self._patches(size, g, as_bytes), size) for size in of_doc] for of_doc in sizes])
        return out

    def sees(self, data_rank: int, number: int, step: int) -> bool:
        """Return whether a data rank has images in a micro-batch.

        In the step of few tokens no data rank has any; in the long one data rank 0 has. In other steps all have some in
        the first micro-batch, and every second data rank in the following ones. The last of three or more micro-batches
        has none: a reduction over replicas that runs only there would leave out the tower's gradients.
        """
        if self.vision is None or step == FEW_STEP:
            return False
        if step == LONG_STEP:
            return data_rank == 0
        return number == 0 or (data_rank % 2 == 1 and (self.num < 3 or number < self.num - 1))

    def _parts(self, size: int, at: int, *where: int) -> list[int | tuple[int, int, int]]:
        patterns = _APART if self.apart else _PATTERNS
        return patterns[at % len(patterns)] if size >= _LEAST and self.sees(*where) else []

    def _sizes(self, size: int, at: int, *where: int) -> list[tuple[int, int, int]]:
        return [part for part in self._parts(size, at, *where) if not isinstance(part, int)]

    def _patches(self, size: tuple[int, int, int], g: torch.Generator, as_bytes: bool) -> Tensor:
        assert self.vision is not None, "only a model with a vision tower has images"
        shape = (size[0] * size[1] * size[2], self.vision.numbers)
        if as_bytes:  # as `meshwright train` reads images
            return torch.randint(256, shape, generator=g, dtype=torch.uint8)
        return torch.randn(shape, generator=g)

    def _with_places(self, text: list[int], at: int, *where: int) -> list[int]:
        """Put the placeholders of images into a text, and replace tokens of it that look like one."""
        if self.vision is None:
            return text
        ids, tokens = (self.vision.image, self.vision.video), list[int]()
        spare = next(token for token in range(self.vocab) if token not in ids)
        text = [spare if token in ids else token for token in text]
        for part in self._parts(len(text), at, *where):
            if isinstance(part, int):
                tokens += text[len(tokens) : len(tokens) + part]
                continue
            time, height, width = part
            for number in range(time):
                tokens += text[len(tokens) : len(tokens) + (number > 0)]
                tokens += [ids[time > 1]] * (height * width // 4)  # the merger joins 2 x 2 patches into a token
        return tokens + text[len(tokens) :]

    def labels(self, data_rank: int, step: int = 0) -> list[Tensor]:
        """Compute the labels of each micro-batch independently of `pack`: the next token of the same document."""
        ids = {self.vision.image, self.vision.video} if self.vision else set[int]()
        return [labels_of(documents, ids) for documents in self.documents(data_rank, step)]

    def bounds(self, data_rank: int, step: int = 0) -> list[list[int]]:
        """Return where documents begin and end in each micro-batch, without padding."""
        return [list(accumulate(map(len, ds), initial=0)) for ds in self.documents(data_rank, step)]

    def _special(self, step: int) -> int:
        """Return the length of a step that differs from the others, else 0."""
        return {FEW_STEP: self.few, LONG_STEP: self.long}.get(step, 0)

    def _generator(self, data_rank: int, step: int, number: int) -> torch.Generator:
        """Return a generator for some micro-batch. All steps except the special ones have the same data."""
        at = 10_007 * step if self._special(step) else 0
        return torch.Generator().manual_seed(1_000_003 * self.seed + at + 100 * data_rank + number)


def labels_of(documents: list[list[int]], places: set[int]) -> Tensor:
    """Return the labels of documents. A placeholder neither has a label nor is one. `places`: the placeholder
    tokens."""
    flat: list[int] = []
    for document in documents:
        for token, after in zip(document, [*document[1:], IGNORE], strict=True):
            flat.append(IGNORE if token in places or after in places else after)
    return torch.tensor(flat)


def ragged(
    data_rank: int, *, num: int = 2, length: int = LENGTH, vocab: int = 131, target: bool = False
) -> list[Batch]:
    """Return the micro-batches of a data rank."""
    return Data(num, length, vocab, target)(data_rank)
