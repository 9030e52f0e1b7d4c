"""The objective of an embedding model: contrastive learning over all documents of a step (InfoNCE, arXiv 1807.03748).

A group is a query, its positive, and any number of hard negatives, in that order. The embedding of a document is the
last hidden state of its last token, normalised. A query is compared with the positives and hard negatives of all groups
of the step, on all ranks and in all micro-batches: `mw.Loss(per="step")`. So a larger step has more negatives, and a
larger mesh alone changes no number.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize
from torch.utils.checkpoint import checkpoint

from ..data import IGNORE
from ..engine import Loss, LossDocuments
from ..errors import ConfigError, DataError
from ..ops.part_sizes import part_size
from ..recipe import option
from .checks import check_number

ROW = "row"  # the field with a number that groups of the same query share, such as those of a row with two positives
KEEP_ALL = 2.0  # no two cosines differ by more
_ANCHORS = part_size(__name__, "_ANCHORS", 1024, small=2)


def last_token_labels(documents: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return `labels=` of `mw.pack` and `mw.batches` that mark the last token of each document, and no other.

    >>> batches = mw.batches(documents, mesh, length=8192, groups=groups,
    ...                      labels=mw.objectives.last_token_labels(documents))    # doctest: +SKIP
    """
    empty = next((number for number, document in enumerate(documents) if not len(document)), None)
    if empty is not None:
        raise DataError(f"document {empty} is empty, so it has no last token; leave it out")
    return [[IGNORE] * (len(document) - 1) + [0] for document in documents]


@dataclass(frozen=True)
class Embedding:
    """Trains embeddings: each query should be nearest to its own positive, among all documents of the step.

    The model has `head="none"`. Only the last token of each document has a label.
    """

    head: ClassVar[str] = "none"
    rows: ClassVar[str] = "retrieval"

    temperature: float = option(0.05, "Divides the cosines; the `scale` of sentence-transformers is its inverse.")
    dims: Sequence[int] = option(
        (), "Matryoshka (arXiv 2205.13147): the loss is the mean over these prefixes of the embedding, such as "
        "[1024, 512, 256]. Empty: the whole embedding.",
    )  # fmt: skip
    query_prompt: str = option(
        "", "The text before each query, such as 'Instruct: ...\\nQuery:'. Exports name it for sentence-transformers."
    )
    document_prompt: str = option("", "The text before each document.")
    symmetric: bool = option(
        False, "Also compare each positive with all queries, and take the mean of both directions."
    )
    false_negative_margin: float = option(
        KEEP_ALL, "Leave out documents whose cosine with the query is greater than the positive's by more than this; "
        "Qwen3-Embedding (arXiv 2506.05176) takes 0.1. 2 leaves out none.",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_number("embedding.temperature", self.temperature, above=True)
        check_number("embedding.false_negative_margin", self.false_negative_margin)
        dims: object = self.dims
        if not isinstance(dims, list | tuple) or not all(type(each) is int and each > 0 for each in dims):
            raise ConfigError(f"embedding.dims={dims!r} must be whole numbers above 0, such as (1024, 512, 256)")
        object.__setattr__(self, "dims", tuple(dims))
        if len({*dims}) < len(dims):
            raise ConfigError(f"embedding.dims={dims!r} has a number twice")

    @property
    def loss(self) -> Loss:
        """Return the loss for an engine."""
        return Loss(self, per="step", metrics=("accuracy", "positive_cosine", "negative_cosine"))

    def __call__(
        self, scores: Mapping[str, Tensor], fields: Mapping[str, Tensor], docs: LossDocuments
    ) -> tuple[Tensor, dict[str, Tensor]]:
        if "hidden" not in scores:
            raise DataError('the loss of embeddings reads hidden states; load the model with head="none"')
        roles, hidden_ND = _roles(docs, fields.get(ROW)), scores["hidden"]
        dims = self.dims or (hidden_ND.shape[1],)
        if max(dims) > hidden_ND.shape[1]:
            raise ConfigError(
                f"embedding.dims={self.dims} is more than the {hidden_ND.shape[1]} numbers of the model's embeddings"
            )
        results = {dim: self._of_prefix(normalize(hidden_ND[:, :dim], dim=-1), roles) for dim in dims}
        terms_G = torch.stack([terms_G for terms_G, _ in results.values()]).mean(0)
        return terms_G, results[max(dims)][1]

    def _of_prefix(self, unit_ND: Tensor, roles: "_Roles") -> tuple[Tensor, dict[str, Tensor]]:
        """Return the terms and the metrics of one prefix of the embeddings."""
        queries, candidates = roles.query.of(unit_ND), roles.candidate.of(unit_ND)
        terms_G, positive_G, nearest_G = self._contrast(queries, candidates, roles.own_G)
        metrics = {
            "accuracy": (positive_G > nearest_G).to(positive_G.dtype),  # recall at 1
            "positive_cosine": positive_G,
            "negative_cosine": nearest_G,
        }
        if self.symmetric:
            positives = _Side(candidates.unit_ND[roles.own_G], roles.query.group_N, roles.query.row_N)
            terms_G = (terms_G + self._contrast(positives, queries, roles.query.group_N)[0]) / 2
        return terms_G, metrics

    def _contrast(self, anchors: "_Side", others: "_Side", own_G: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compare each anchor with `others`; `own_G` says which one is its own. Return the cross-entropies, the cosines
        with their own, and the greatest cosines with any other.

        Backward recomputes the cosines of one part of the anchors at a time: a matrix of all cosines would grow with
        the square of the step.
        """
        parts = zip(*(each.split(_ANCHORS) for each in (*anchors, own_G)), strict=True)
        part_of = partial(checkpoint, self._contrast_part, use_reentrant=False, preserve_rng_state=False)
        results = [part_of(_Side(*part), others, own_of_part_G) for *part, own_of_part_G in parts]
        terms_G, positive_G, nearest_G = (torch.cat(each) for each in zip(*results, strict=True))
        return terms_G, positive_G, nearest_G

    def _contrast_part(
        self, anchors: "_Side", others: "_Side", own_G: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        cosine_GC, own_G1 = anchors.unit_ND @ others.unit_ND.t(), own_G[:, None]
        positive_G1 = cosine_GC.gather(1, own_G1)
        is_false_GC = (cosine_GC > positive_G1 + self.false_negative_margin).detach()
        # Groups of the same row share a query, so the positive of one is not a negative of another.
        is_same_GC = (anchors.row_N[:, None] == others.row_N) & (anchors.group_N[:, None] != others.group_N)
        logits_GC = (cosine_GC / self.temperature).masked_fill(is_false_GC | is_same_GC, -torch.inf)
        terms_G = cross_entropy(logits_GC, own_G, reduction="none")
        nearest_G = cosine_GC.detach().masked_fill(is_same_GC, -1.0).scatter(1, own_G1, -1.0).amax(1)
        return terms_G, positive_G1[:, 0].detach(), nearest_G


class _Side(NamedTuple):
    """Embeddings to compare, with the group and the row of each."""

    unit_ND: Tensor
    group_N: Tensor
    row_N: Tensor


class _Documents(NamedTuple):
    """Documents of a step by number, with their groups and rows."""

    number_N: Tensor
    group_N: Tensor
    row_N: Tensor

    def of(self, unit_ND: Tensor) -> _Side:
        """Return the embeddings of these documents."""
        return _Side(unit_ND[self.number_N], self.group_N, self.row_N)


class _Roles(NamedTuple):
    """The roles of the documents of a step. Candidates are all documents but the queries."""

    query: _Documents  # of each group
    candidate: _Documents
    own_G: Tensor  # the positive of each group, as a number of a candidate


def _roles(docs: LossDocuments, row_N: Tensor | None) -> _Roles:
    """Assign a role to each document. Sizes and groups are on the host, so no device is waited for."""
    if wrong := [number for number, size in enumerate(docs.sizes) if size != 1]:
        raise DataError(
            f"document {wrong[0]} of the step has {docs.sizes[wrong[0]]} tokens with a label, like {len(wrong)} of "
            f"{docs.num}; only the last token of each may have one: labels=mw.objectives.last_token_labels(documents)"
        )
    members: list[list[int]] = [[] for _ in range(docs.num_groups)]
    for number, group in enumerate(docs.group_numbers):
        members[group].append(number)
    if short := [group for group in members if len(group) < 2]:
        raise DataError(
            f"document {short[0][0]} of the step is alone, like {len(short)} of {docs.num}; a group is a query, its "
            "positive, and hard negatives, in one batch: give mw.batches(groups=)"
        )
    candidates = sorted(number for group in members for number in group[1:])
    at = {number: index for index, number in enumerate(candidates)}
    numbers = [group[0] for group in members], candidates, [at[group[1]] for group in members]
    query_G, candidate_C, own_G = (torch.tensor(each, device=docs.group_D.device) for each in numbers)
    row_N = docs.group_D if row_N is None else row_N
    of = lambda number_N: _Documents(number_N, docs.group_D[number_N], row_N[number_N])  # noqa: E731 - short
    return _Roles(of(query_G), of(candidate_C), own_G)
