"""The rows of a step: the tokens with a label of all micro-batches of all data ranks, which a loss per step gets.

Only these rows travel. An embedding model has one for each document, so a step of 8,192 documents and a width of 1,024
gathers 16 MiB in bfloat16. Ranks have unequal numbers of rows. Hosts exchange the numbers and the values of fields once
a step; devices then all-gather scores of one padded shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ..axes import TOKENS
from ..data import Batch
from ..errors import DataError
from ..mesh import Mesh
from ..ops import to_device
from .loss import Loss
from .loss_documents import LossDocuments

DATA_RANKS = ("replicate", "fsdp")
_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_EXACT = 2**53  # whole numbers up to this are exact in float64, in which hosts exchange fields


def fields_of_step(loss: Loss, batches: Sequence[Batch]) -> dict[str, object]:
    """Return the fields of the batches as a setting that must be the same on all ranks. Refuse batches that differ."""
    if loss.per != "step":
        return {}
    first = _kinds(batches[0])
    for number, batch in enumerate(batches):
        if _kinds(batch) != first:
            raise DataError(
                f"batch {number} has the fields {_kinds(batch)} and batch 0 {first}; a loss per step needs the same "
                "in all micro-batches"
            )
        for name, values_T in batch.fields.items():
            if values_T.dtype in _WHOLE and values_T.numel() and int(values_T.abs().max()) > _EXACT:
                raise DataError(
                    f"the field {name!r} has whole numbers above 2^53, which a loss per step does not get exactly"
                )
    return {"the fields of the batches, for a loss per step": first}


def _kinds(batch: Batch) -> dict[str, str]:
    """Return the fields of a batch with their dtypes and their shapes per token."""
    fields = {name: batch.fields[name] for name in sorted(batch.fields)}
    return {name: " ".join(map(str, (x.dtype, *x.shape[1:]))).removeprefix("torch.") for name, x in fields.items()}


class StepRows:
    """The rows of a step, in the order of data ranks, micro-batches and tokens.

    `docs` and `fields` are those of all rows; a document has a row for each token with a label, and none for others.
    """

    def __init__(self, mesh: Mesh, batches: Sequence[Batch]) -> None:
        self._mesh = mesh
        share = mesh.axes.cp * mesh.axes.tp
        masks = [batch.is_target_T.cpu() for batch in batches]
        counts_MS = torch.stack([mask_T.view(share, -1).sum(1) for mask_T in masks])
        num_documents = sum(batch.num_documents for batch in batches)
        at = "the sizes of a loss per step"
        sizes = mesh.all_gather_on_hosts([*counts_MS.flatten().tolist(), num_documents], DATA_RANKS, at).long()
        counts_RMS = sizes[:, :-1].view(-1, *counts_MS.shape)
        self._index, self._most = _positions(counts_RMS, mesh.device)
        self.docs, self.fields = self._exchange(batches, masks, counts_RMS.sum((1, 2)).tolist(), sizes[:, -1].tolist())
        lo, hi = mesh.token_range(len(batches[0]))
        self._own_tokens = [to_device(mask_T[lo:hi].nonzero()[:, 0], mesh.device) for mask_T in masks]
        ends = counts_RMS.flatten().cumsum(0).view(counts_RMS.shape)
        own = (mesh.data_rank, slice(None), lo // max(hi - lo, 1))
        self._own_spans = [*zip((ends - counts_RMS)[own].tolist(), ends[own].tolist(), strict=True)]

    def pick(self, number: int, values_T: Tensor) -> Tensor:
        """Return the rows of this rank in a micro-batch, from values of its tokens."""
        return values_T.index_select(0, self._own_tokens[number])

    def own(self, number: int, rows: Tensor) -> Tensor:
        """Return the rows of this rank in a micro-batch, from the rows of the step."""
        return rows[slice(*self._own_spans[number])]

    @torch.no_grad()
    def gather(self, own_rows: Sequence[Tensor]) -> Tensor:
        """All-gather the rows of the step `[N, ...]`, from those of this rank in each micro-batch."""
        own = torch.cat([*own_rows])
        padded = torch.cat([own, own.new_zeros(self._most - len(own), *own.shape[1:])])
        return self._mesh.gather_rows(padded, TOKENS, "the scores for a loss per step")[self._index]

    def _exchange(
        self, batches: Sequence[Batch], masks: Sequence[Tensor], num_rows: Sequence[int], num_documents: Sequence[int]
    ) -> tuple[LossDocuments, Mapping[str, Tensor]]:
        """Exchange documents and fields between the hosts of data ranks."""
        streams = {"labels": batches[0].labels, **batches[0].fields}
        names, widths = [*streams], [x[:1].numel() for x in streams.values()]
        documents = _documents_of(batches, masks)
        values = [_values_of(batch, names)[mask_T] for batch, mask_T in zip(batches, masks, strict=True)]
        most_documents, most_rows = max(num_documents), max(num_rows)
        padded = torch.zeros(2 * most_documents + sum(widths) * most_rows, dtype=torch.float64)
        padded[: 2 * len(documents)] = torch.tensor(documents, dtype=torch.float64).flatten()
        rows = torch.cat(values).flatten()
        padded[2 * most_documents :][: len(rows)] = rows
        at = "the documents of a loss per step"
        gathered = self._mesh.all_gather_on_hosts(padded.tolist(), DATA_RANKS, at)
        sizes, groups, fields = list[int](), list[int](), list[Tensor]()
        for rank, (row, rows_here, documents_here) in enumerate(zip(gathered, num_rows, num_documents, strict=True)):
            for size, group in row[: 2 * documents_here].long().view(-1, 2).tolist():
                sizes.append(size)
                groups.append(rank * most_documents + group)  # groups of two data ranks are two groups
            fields.append(row[2 * most_documents :][: rows_here * sum(widths)].view(-1, sum(widths)))
        device, columns = self._mesh.device, torch.cat(fields).split(widths, 1)
        whole = {
            name: to_device(values.to(like.dtype).reshape(-1, *like.shape[1:]), device)
            for values, (name, like) in zip(columns, streams.items(), strict=True)
        }
        return LossDocuments(sizes, groups, torch.ones(sum(num_rows), dtype=torch.bool, device=device)), whole


def _documents_of(batches: Sequence[Batch], masks: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Return the rows of each document, and the index of its group; groups of two batches are two groups."""
    index, documents = dict[tuple[int, int], int](), list[tuple[int, int]]()
    for number, (batch, mask_T) in enumerate(zip(batches, masks, strict=True)):
        ends = [0, *mask_T.cumsum(0).tolist()]
        for (a, b), group in zip(pairwise(batch.bounds), batch.groups, strict=False):  # padding has no group
            documents.append((ends[b] - ends[a], index.setdefault((number, group), len(index))))
    return documents


def _values_of(batch: Batch, names: Sequence[str]) -> Tensor:
    """Return labels and fields as columns. -> `[T, F]` in float64, on the host"""
    values = [batch.fields.get(name, batch.labels) for name in names]
    return torch.cat([x.detach().cpu().double().view(len(batch), -1) for x in values], 1)


def _positions(counts_RMS: Tensor, device: torch.device) -> tuple[Tensor, int]:
    """Return the position of each row of the step after the all-gather, and how many rows each rank sends.

    A rank (data rank R, share S of the tokens) sends the rows of all its micro-batches M, padded. Rows of a step are
    in the order of R, M, S.
    """
    sent_RS = counts_RMS.sum(1)
    most = int(sent_RS.max())
    before_RMS = counts_RMS.cumsum(1) - counts_RMS  # rows of earlier micro-batches of the same rank
    rank_RS = torch.arange(sent_RS.numel()).view(sent_RS.shape)
    first = (rank_RS[:, None, :] * most + before_RMS).flatten()
    counts = counts_RMS.flatten()
    shift = first - (counts.cumsum(0) - counts)
    index = torch.arange(int(counts.sum())) + shift.repeat_interleave(counts)
    return to_device(index, device), most
