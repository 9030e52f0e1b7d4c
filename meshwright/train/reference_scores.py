"""Log-probabilities of whole documents under a reference model: computed once, on any mesh, and cached like the tokens.

The key names the reference's weights (a checksum of every byte), the documents, and the dtype. So a score of other
weights or other tokens is never used. Scores are written in chunks of 256 streams, of a plan that does not depend on
the mesh: a killed run continues at the next chunk, on any number of ranks.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from ..data import Documents, Feed, Plan, Processor, source_of
from ..engine import LossDocuments, Model, load, logprobs
from ..errors import DataError, RankError, counted
from ..log import logger, progress
from ..mesh import Mesh
from ..objectives import REFERENCE, weights_fingerprint
from ..ops.part_sizes import part_size
from ..recipe import Recipe
from ..weights import local_directory
from .config import Config
from .data_sources import TrainingData, check_tokenizers, model_directory

Scores = NDArray[np.float64]  # [rows of the data, documents of a row]; NaN where nothing was scored

_VERSION = 1
_CHUNK = part_size(__name__, "_CHUNK", 256, small=3)  # streams
_DIGEST_BYTES = 16


@dataclass(frozen=True)
class Reference:
    """A reference model. `directory`: its weights. `recipe`: how it runs. `weights`: the checksum of its files."""

    directory: Path
    recipe: Recipe
    weights: str

    @classmethod
    def of(cls, config: Config, mesh: Mesh) -> Reference:
        """Return the reference of a run: `dpo.reference`, or the model as it is before training."""
        named = _named(config)
        directory = local_directory(named or config.model, mesh)
        recipe = replace(config.recipe, train=(), lora=None, mtp="carried")
        if named:  # another model is scored as its files have it, not as a base under adapters
            check_tokenizers(directory, model_directory(config.model), "dpo.reference")
            recipe = replace(recipe, frozen=None)
        elif config.lora is None and recipe.frozen is not None:
            recipe = replace(recipe, train=config.recipe.train)  # which matrices stay in 4 bits
        return cls(directory, recipe, weights_fingerprint(directory, mesh))

    @property
    def key(self) -> str:
        """Return what its log-probabilities depend on, besides the tokens."""
        recipe = self.recipe
        numerics = f"{recipe.dtype} {recipe.fp8} {recipe.fp8_skip} {recipe.frozen}"
        return f"{self.weights} {numerics} {recipe.train if recipe.frozen else ''}"

    def load(self, mesh: Mesh) -> Model:
        """Load the reference model, frozen."""
        return load(self.directory, mesh, **vars(self.recipe))


def _named(config: Config) -> str:
    """Return the reference that a run file names, empty for the model itself."""
    return "" if config.dpo is None else config.dpo.reference


class ReferenceScores:
    """The scores of a reference model in a folder of the cache."""

    def __init__(self, reference: Reference, mesh: Mesh, folder: Path, length: int, micro_batches: int) -> None:
        self.reference, self.mesh, self.folder, self.length = reference, mesh, folder, length
        self.micro_batches = micro_batches

    def stored(self, documents: Documents) -> tuple[Plan, Scores, list[int]]:
        """Return the plan that scores documents, their scores so far, and the missing chunks. Collective.

        Rank 0 alone looks at the folder: hosts may not share it.
        """
        plan = Plan([source_of(documents, self.length, too_long="drop")], length=self.length, epochs=1)
        scores = np.full((len(documents), int(documents.num_parts.max(initial=1))), np.nan)
        chunks = range(-(-plan.num_streams // _CHUNK))
        read, failure = dict[int, Scores | None](), None
        try:
            read = {n: _read(self._file(plan, n)) for n in chunks} if self.mesh.rank == 0 else {}
        except OSError as error:
            failure = error
        self.mesh.all_or_none(failure, f"reading reference scores in {self.folder}", RankError)
        known: dict[int, Scores] = self.mesh.broadcast_object({n: rows for n, rows in read.items() if rows is not None})
        for rows in known.values():
            _fill(scores, rows)
        return plan, scores, [n for n in chunks if n not in known]

    def score(self, documents: Documents, model: Model, processor: Processor | None) -> Scores:
        """Return the scores of all documents; compute and store missing ones. Collective."""
        plan, scores, lacking = self.stored(documents)
        feed = Feed(
            [documents], plan, micro_batches=self.micro_batches, rank=self.mesh.data_rank,
            num_ranks=self.mesh.num_data_ranks, processor=processor,
        )  # fmt: skip
        title = f"reference scores of {documents.name}"
        total = sum(_size(plan, chunk) for chunk in lacking)
        with contextlib.closing(feed), progress(title, total, "streams", enabled=not self.mesh.rank) as advance:
            for chunk in lacking:
                rows = self._score_chunk(feed, model, chunk)
                _fill(scores, rows)
                self._keep(self._file(plan, chunk), rows)
                advance(_size(plan, chunk))
        self._check_complete(documents, scores)
        return scores

    def _check_complete(self, documents: Documents, scores: Scores) -> None:
        """Refuse scores in which a document of a batch may be missing."""
        is_used = (documents.lengths >= 2) & (documents.lengths <= self.length)
        is_part = np.arange(scores.shape[1]) < documents.num_parts[:, None]
        lacking = np.flatnonzero((np.isnan(scores) & is_part & is_used[:, None]).any(1))
        if len(lacking):
            raise DataError(
                f"the reference scores of {counted(len(lacking), 'row')} are missing, first that of "
                f"{documents.place(int(lacking[0]))}; remove {self.folder} to compute them again"
            )

    def _score_chunk(self, feed: Feed, model: Model, chunk: int) -> Scores:
        """Return `[n, 3]`, document, part and score, for a chunk of streams: of all data ranks, on all ranks."""
        own = list[tuple[int, int, float]]()
        stop = min((chunk + 1) * _CHUNK, feed.plan.num_streams)
        for first in range(chunk * _CHUNK, stop, feed.streams_per_step):
            numbers = [first + m * feed.num_ranks + feed.rank for m in range(feed.micro_batches)]
            batches = feed.step(first).batches
            for number, batch, values_T in zip(numbers, batches, logprobs(model, batches), strict=True):
                # The last step of a chunk may reach into the next one, which scores these streams itself.
                if number < stop:
                    sums = LossDocuments.of(batch).sum(values_T.cpu().double()).tolist()
                    own += [(*place, value) for place, value in zip(_places(feed, number), sums, strict=True)]
        parts = self.mesh.gather_objects(np.array(own, dtype=np.float64).reshape(-1, 3), ("replicate", "fsdp"))
        rows = np.concatenate(parts)
        return rows[np.lexsort((rows[:, 1], rows[:, 0]))]  # an order that does not depend on the mesh

    def _keep(self, file: Path, rows: Scores) -> None:
        """Write a chunk on rank 0. If the disk is full, all ranks raise."""
        failure = None
        try:
            if self.mesh.rank == 0:
                _write(file, rows)
        except OSError as error:
            failure = error
        self.mesh.all_or_none(failure, f"writing reference scores to {file.parent}", RankError)

    def _file(self, plan: Plan, chunk: int) -> Path:
        key = hashlib.sha256(f"{_VERSION} {_CHUNK} {self.reference.key} {plan.fingerprint}".encode()).hexdigest()[:32]
        return self.folder / key / f"{chunk:06d}"


def _size(plan: Plan, chunk: int) -> int:
    """Return the number of streams of a chunk; the last one may have fewer."""
    return min(_CHUNK, plan.num_streams - chunk * _CHUNK)


def _places(feed: Feed, number: int) -> Iterator[tuple[int, int]]:
    """Yield the document and the part of each document of a stream, in its order."""
    for piece in feed.plan.stream(number):
        for part in range(int(feed.documents[0].num_parts[piece.document])):
            yield piece.document, part


def _fill(scores: Scores, rows: Scores) -> None:
    scores[rows[:, 0].astype(int), rows[:, 1].astype(int)] = rows[:, 2]


def _read(file: Path) -> Scores | None:
    """Return the rows of a chunk, None if it was not written, or is damaged."""
    if not file.is_file():
        return None
    content = file.read_bytes()
    digest, data = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    if digest != xxhash.xxh3_128_digest(data):
        logger.warning("computing reference scores again: %s fails its checksum", file)
        return None
    return np.frombuffer(data, dtype="<f8").reshape(-1, 3)


def _write(file: Path, rows: Scores) -> None:
    """Write the rows of a chunk, atomically."""
    file.parent.mkdir(parents=True, exist_ok=True)
    data = rows.astype("<f8").tobytes()
    temporary = file.with_suffix(f".{secrets.token_hex(4)}")  # another run may write the same scores
    temporary.write_bytes(xxhash.xxh3_128_digest(data) + data)
    temporary.replace(file)


class WithReference:
    """Adds the scores of the reference model to the data of a run, if its objective asks for them.

    The model itself is the reference unless `dpo.reference` names another one. That one is loaded, scores, and is freed
    before the model is loaded, so memory never holds both.
    """

    def __init__(self, config: Config, mesh: Mesh, sets: Sequence[TrainingData], cache: Path) -> None:
        self.key, self._sets, self._own, self._mesh = "", sets, not _named(config), mesh
        self._known: list[list[Scores]] | None = None
        self._reference = self._stored = None
        if config.objective != "dpo":
            return
        self._reference = reference = Reference.of(config, mesh)
        self.key = reference.key
        micro_batches = config.train.streams_per_step // mesh.num_data_ranks
        self._stored = ReferenceScores(reference, mesh, cache / "reference", config.train.length, micro_batches)

    def score_named(self) -> None:
        """Score with a reference that the run file names, before the model is loaded. Collective."""
        if self._stored is None or self._reference is None:
            return
        looks = [[self._stored.stored(each) for each in data.documents] for data in self._sets]
        if not any(lacking for of_set in looks for _, _, lacking in of_set):
            self._known = [[scores for _, scores, _ in of_set] for of_set in looks]
        elif not self._own:
            self._known = self._score(self._reference.load(self._mesh))

    def _score(self, model: Model) -> list[list[Scores]]:
        assert self._stored is not None
        return [[self._stored.score(each, model, data.processor) for each in data.documents] for data in self._sets]

    def sets(self, model: Model) -> list[TrainingData]:
        """Return the sets with the scores of their documents. Collective. `model`: the one to train, before it is."""
        if self._stored is None:
            return [*self._sets]
        if self._known is None:  # the model itself is the reference
            assert self._own, "a named reference has scored before"
            base = model.base() if model.recipe.lora is not None else contextlib.nullcontext()
            with base, torch.no_grad():
                self._known = self._score(model)
        return [
            replace(data, documents=[d.with_values({REFERENCE: x}) for d, x in zip(data.documents, own, strict=True)])
            for data, own in zip(self._sets, self._known, strict=True)
        ]
