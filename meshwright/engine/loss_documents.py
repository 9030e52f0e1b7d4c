"""Sums, means and splits over the documents and groups of a micro-batch, for losses per document or group."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from ..data import Batch


class LossDocuments:
    """Turns values of tokens `[T, ...]` into values of documents `[D, ...]` and of groups `[G, ...]`, and back.

    Padding is no document. Sums and means over a document are over its tokens with a label.
    """

    def __init__(self, sizes: Sequence[int], groups: Sequence[int], is_target_T: Tensor) -> None:
        device = is_target_T.device
        self.num, self.sizes, self.is_target_T = len(sizes), list(sizes), is_target_T
        index = {group: at for at, group in enumerate(dict.fromkeys(groups))}
        self.num_groups = len(index)
        self.group_numbers = [index[group] for group in groups]  # of each document, on the host
        self.group_D = torch.tensor(self.group_numbers, dtype=torch.int64, device=device)
        self._sizes_D = torch.tensor(self.sizes, dtype=torch.int64, device=device)
        self._groups = list(groups)

    @classmethod
    def of(cls, batch: Batch) -> LossDocuments:
        """Return the documents of a batch."""
        sizes = [b - a for a, b in pairwise(batch.bounds)][: batch.num_documents]
        return cls(sizes, batch.groups, batch.is_target_T)

    @property
    def num_targets_D(self) -> Tensor:
        """Return the number of tokens of each document that have a label, as float64."""
        return self.sum(self.is_target_T.double())

    def sum(self, values_T: Tensor) -> Tensor:
        """Sum over the tokens of each document that have a label. -> `[D, ...]`"""
        return _sums(_masked(values_T, self.is_target_T), self._sizes_D, sum(self.sizes))

    def mean(self, values_T: Tensor) -> Tensor:
        """Return the mean over the tokens of each document that have a label, 0 without any. -> `[D, ...]`"""
        sums_D = self.sum(values_T)
        return sums_D / _like(self.num_targets_D.clamp(min=1), sums_D)

    def spread(self, values_D: Tensor) -> Tensor:
        """Return for each token the value of its document, 0 at padding. -> `[T, ...]`"""
        spread = values_D.repeat_interleave(self._sizes_D, 0)
        return torch.cat([spread, spread.new_zeros(len(self.is_target_T) - len(spread), *spread.shape[1:])])

    def split(self, values_T: Tensor) -> list[Tensor]:
        """Split values of tokens into a tensor for each document, without padding."""
        return list(values_T[: sum(self.sizes)].split(self.sizes))

    def group_sum(self, values_D: Tensor) -> Tensor:
        """Sum over the documents of each group. -> `[G, ...]`"""
        return _sums(values_D[self.by_group], self._sizes_G, self.num)

    def group_mean(self, values_D: Tensor) -> Tensor:
        """Return the mean over the documents of each group, those without a label too. -> `[G, ...]`"""
        sums_G = self.group_sum(values_D)
        return sums_G / _like(self._sizes_G, sums_G)

    def group_spread(self, values_G: Tensor) -> Tensor:
        """Return for each document the value of its group. -> `[D, ...]`"""
        return values_G[self.group_D]

    def group_split(self, values_D: Tensor) -> list[Tensor]:
        """Split values of documents into a tensor for each group, in the order of its documents: such as pairs."""
        return list(values_D[self.by_group].split(self._sizes_G.tolist()))

    @property
    def by_group(self) -> Tensor:
        """Return the documents by group, in their order."""
        return self.group_D.argsort(stable=True)

    @property
    def _sizes_G(self) -> Tensor:
        return torch.bincount(self.group_D, minlength=self.num_groups)

    def num_terms(self, per: str) -> int:
        """Return the number of terms of a loss per "document", "group", "step" or "micro_batch"."""
        return {"document": self.num, "group": self.num_groups, "step": self.num_groups}.get(per, 1)

    def has_target(self, per: str) -> Tensor:
        """Return whether each document has a token with a label; per "group" and "step", whether each group has one;
        True per "micro_batch"."""
        has_D = self.num_targets_D > 0
        if per == "document":
            return has_D
        return self.group_sum(has_D.double()) > 0 if per in ("group", "step") else has_D.new_ones(())

    def part(self, per: str, terms: Sequence[int]) -> tuple[Tensor, LossDocuments]:
        """Return the token positions of the documents of some terms, and these documents alone."""
        of_term = range(self.num) if per == "document" else self.group_D.tolist()
        numbers = [number for number, term in enumerate(of_term) if term in terms]
        starts, device = list(accumulate(self.sizes, initial=0)), self.is_target_T.device
        rows = torch.cat([torch.arange(starts[n], starts[n + 1], device=device) for n in numbers])
        sizes, groups = [self.sizes[n] for n in numbers], [self._groups[n] for n in numbers]
        return rows, LossDocuments(sizes, groups, self.is_target_T[rows])


def _like(numbers: Tensor, values: Tensor) -> Tensor:
    """Return one number per row in the dtype of values `[rows, ...]`, to be broadcast over them."""
    return numbers.to(values.dtype).view(-1, *[1] * (values.dim() - 1))


def _masked(values_T: Tensor, mask_T: Tensor) -> Tensor:
    """Return values with 0 where the mask is false."""
    return values_T.masked_fill(~mask_T.view(-1, *[1] * (values_T.dim() - 1)), 0)


def _sums(values: Tensor, sizes: Tensor, num: int) -> Tensor:
    """Sum consecutive rows: of each segment of `sizes`, `num` rows together. -> in at least float32

    Partial sums are float64: in bfloat16 a sum of ones stops growing at 256. A reduction by segments adds without
    atomics, so each run gets the same bits.
    """
    dtype = torch.promote_types(values.dtype, torch.float32)
    if not len(sizes):
        return values.new_zeros(0, *values.shape[1:], dtype=dtype)
    return torch.segment_reduce(values[:num].double().contiguous(), "sum", lengths=sizes, axis=0).to(dtype)
