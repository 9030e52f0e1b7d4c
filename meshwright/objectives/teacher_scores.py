"""Files of teacher scores for distillation: computed once, then read in every epoch and run without the teacher.

A directory holds `teacher.json`, which identifies the teacher, and safetensors files. A document has two tensors, named
by the checksum of its tokens: `KEY.ids`, int32 `[tokens, K]`, the likeliest token first, and `KEY.logprobs`, float32 or
float16 `[tokens, K]`, at the temperature of `teacher.json`. Row t is what the teacher predicts at token t.
docs/distillation.md has the format for other programs.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from ..axes import DENSE
from ..data import Batch
from ..engine import Model, top_logprobs
from ..errors import BrokenFile, ConfigError, DataError, RankError
from ..mesh import Mesh
from ..ops.part_sizes import part_size
from ..weights import open_source, read_header, read_json
from .distillation import IDS, LOGPROBS, Distill

ABOUT = "teacher.json"
FORMAT = 1
_IDS, _LOGPROBS = ".ids", ".logprobs"
_DTYPES = {"float32": torch.float32, "float16": torch.float16}
_BLOCK = part_size(__name__, "_BLOCK", 64 << 20, small=1000)  # bytes of a weight file that one rank hashes at a time
_FILE_BYTES = part_size(__name__, "_FILE_BYTES", 256 << 20, small=1500)  # after which a writer begins another file


def document_key(tokens: Tensor) -> str:
    """Return the key of a document: the 128-bit xxh3 of its tokens as little-endian int32, in hex."""
    return xxhash.xxh3_128_hexdigest(tokens.cpu().numpy().astype("<i4").tobytes())


def weights_fingerprint(directory: Path | str, mesh: Mesh | None = None) -> str:
    """Return a checksum of the weights of a Hugging Face directory: of config.json and of all weight files.

    With a mesh, all ranks call it and share the reading.
    """
    path = Path(directory)
    files = ["config.json", *sorted(open_source(path).files)]
    blocks = [(file, at) for file in files for at in range(0, (path / file).stat().st_size, _BLOCK)]
    if mesh is None:
        parts = [_digests(path, blocks)]
    else:
        read = lambda: _digests(path, blocks[mesh.rank :: mesh.axes.world])  # noqa: E731 - short
        own = mesh.together(read, f"reading the weights in {path}", RankError, "no checksum was made: ")
        parts = mesh.gather_objects(own, DENSE)
    everywhere = {key: value for part in parts for key, value in part.items()}
    return hashlib.sha256(repr(sorted(everywhere.items())).encode()).hexdigest()[:32]


def _digests(directory: Path, blocks: Sequence[tuple[str, int]]) -> dict[tuple[str, int], str]:
    """Return the checksums of blocks of files."""
    digests = {}
    for file, at in blocks:
        with (directory / file).open("rb") as data:
            data.seek(at)
            digests[file, at] = xxhash.xxh3_128_hexdigest(data.read(_BLOCK))
    return digests


class TeacherScoresWriter:
    """Writes the scores of a teacher. One rank of each data rank writes; all ranks call it.

    >>> with TeacherScoresWriter(directory, objective, model, teacher=weights_fingerprint(path)) as writer:
    ...     writer.score(batches)                                   # doctest: +SKIP

    It continues in a directory with scores of the same teacher, temperature and K, and skips documents that are there.
    If all documents of a call are there, the teacher does not run.
    """

    def __init__(
        self, directory: Path | str, objective: Distill, model: Model, *, teacher: str, dtype: str = "float32"
    ) -> None:  # fmt: skip
        if dtype not in _DTYPES:
            raise ConfigError(f"dtype={dtype!r} is unknown; choose from {', '.join(_DTYPES)}")
        self.directory, self.objective, self.dtype = Path(directory), objective, dtype
        self.model, self.mesh = model, model.mesh
        self._about = {
            "format": FORMAT, "teacher": teacher, "temperature": float(objective.temperature),
            "top_k": objective.top_k, "dtype": dtype,
        }  # fmt: skip
        self._tensors, self._num_bytes = dict[str, Tensor](), 0
        self._known = self.mesh.together(self._begin, "the start of teacher scores", DataError, "nothing was scored: ")

    def _begin(self) -> set[str]:
        """Write `teacher.json` on rank 0. Return the keys of the documents that already have scores."""
        file = self.directory / ABOUT
        if file.is_file():
            _check_same(file, read_json(file), self._about)
        elif self.mesh.rank == 0:
            self.directory.mkdir(parents=True, exist_ok=True)
            _write(file, json.dumps(self._about, indent=2).encode() + b"\n")
        return {*_index(self.directory)}

    @property
    def _writes(self) -> bool:
        return not any(self.mesh.coords[axis] for axis in ("cp", "tp", "pp"))

    def score(self, batches: Sequence[Batch]) -> None:
        """Score the documents that have no scores yet, and keep the results for the files."""
        at, what = "keeping teacher scores", "scores were not written: "
        own = self.mesh.together(lambda: self._lacking(batches), at, DataError, what)
        lacking = {key for keys in self.mesh.gather_objects(own, ("replicate", "fsdp")) for key in keys}
        if not lacking:
            return
        scored = top_logprobs(self.model, batches, self.objective.top_k, temperature=self.objective.temperature)

        def add() -> None:
            for batch, top in zip(batches, scored, strict=True) if self._writes else ():
                self._add(batch, top, own)

        # A full disk of one rank ends the scoring on all.
        self.mesh.together(add, at, DataError, what)
        self._known |= lacking

    def _lacking(self, batches: Sequence[Batch]) -> set[str]:
        """Return the keys of this data rank's documents without scores."""
        for batch in batches:
            _refuse_images(batch)
        return {document_key(tokens) for batch in batches for tokens in batch.split(batch.tokens)} - self._known

    def _add(self, batch: Batch, top: Mapping[str, Tensor], lacking: set[str]) -> None:
        of_documents = (batch.split(x.cpu()) for x in (batch.tokens, top["ids"], top["logprobs"]))
        for tokens, ids, logprobs in zip(*of_documents, strict=True):
            key = document_key(tokens)
            if key in lacking:
                lacking.remove(key)
                self._tensors[key + _IDS] = ids.to(torch.int32).contiguous()
                self._tensors[key + _LOGPROBS] = logprobs.to(_DTYPES[self.dtype]).contiguous()
                self._num_bytes += self._tensors[key + _IDS].nbytes + self._tensors[key + _LOGPROBS].nbytes
                if self._num_bytes >= _FILE_BYTES:
                    self._flush()

    def _flush(self) -> None:
        """Write a file, which gets its name only when it is complete."""
        if not self._tensors:
            return
        prefix = f"scores-{self.mesh.data_rank:05d}-"
        self.directory.mkdir(parents=True, exist_ok=True)  # rank 0 has made it on its own host only
        numbers = [int(each.stem.removeprefix(prefix)) for each in self.directory.glob(f"{prefix}*.safetensors")]
        number = max(numbers, default=-1) + 1
        file = self.directory / f"{prefix}{number:05d}.safetensors"
        temporary = file.with_suffix(".part")
        temporary.write_bytes(save(self._tensors))  # `save_file` would let only this user read it
        os.replace(temporary, file)
        self._tensors, self._num_bytes = {}, 0

    def close(self) -> None:
        """Write what remains, and return when all ranks have."""
        self.mesh.together(self._flush, "the end of teacher scores", DataError, "scores were not written: ")

    def __enter__(self) -> TeacherScoresWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:  # after an error, other ranks may never call it
            self.close()


class TeacherScores:
    """Reads the scores of a teacher from a directory, for the batches of a run.

    `teacher`: the fingerprint of the weights that the scores must come from; by default any. An objective may use a
    smaller K than was stored.
    """

    def __init__(self, directory: Path | str, objective: Distill, *, teacher: str = "") -> None:
        self.directory, self.objective = Path(directory), objective
        file = self.directory / ABOUT
        if not file.is_file():
            raise DataError(f"{file} is not there, so {self.directory} holds no scores of a teacher; write them first")
        self.about = read_json(file)
        wanted = {"format": FORMAT, "temperature": float(objective.temperature)}
        _check_same(file, self.about, {**wanted, "teacher": teacher} if teacher else wanted)
        if not isinstance(self.about.get("teacher"), str) or not isinstance(self.about.get("top_k"), int):
            raise BrokenFile(f"{file} lacks teacher or top_k; score again, or correct it")
        if self.about["top_k"] < objective.top_k:
            raise ConfigError(
                f"{file} has top_k={self.about.get('top_k')}, and the objective top_k={objective.top_k}; take as many, "
                "or score again with more"
            )
        self._file_of = _index(self.directory)
        self._opened = dict[str, Any]()

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self._file_of)

    def document(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the likeliest next tokens in a document, and their log-probabilities. -> `[tokens, K]` each"""
        key, k = document_key(tokens), self.objective.top_k
        if key not in self._file_of:
            raise DataError(
                f"{self.directory} has no scores of a document of {len(tokens)} tokens ({tokens[:8].tolist()} ...); "
                "score it too, with the same tokenizer, template and length of documents"
            )
        name = self._file_of[key]
        if name not in self._opened:
            self._opened[name] = safe_open(self.directory / name, "pt")
        ids, logprobs = (self._opened[name].get_tensor(key + each) for each in (_IDS, _LOGPROBS))
        if len(ids) != len(tokens) or ids.shape != logprobs.shape:
            shapes = [*ids.shape], [*logprobs.shape]
            raise BrokenFile(f"{self.directory / name} has {shapes} for {len(tokens)} tokens; score them again")
        return ids[:, :k], logprobs[:, :k].float()

    def add_to(self, batch: Batch, vocab: int) -> Batch:
        """Return a batch with the fields of `Distill.loss`. `vocab`: the student's size; larger ids become -1."""
        _refuse_images(batch)
        self.objective.check_rest(vocab)
        if not batch.num_documents:
            none = torch.full((len(batch), self.objective.top_k), -1, device=batch.tokens.device)
            return batch.with_fields(**{IDS: none, LOGPROBS: torch.zeros_like(none, dtype=torch.float32)})
        parts = [self.document(tokens) for tokens in batch.split(batch.tokens)]
        ids_TK, logprobs_TK = (batch.join([each[i] for each in parts]).to(batch.tokens.device) for i in (0, 1))
        return batch.with_fields(**{IDS: ids_TK.masked_fill(ids_TK >= vocab, -1), LOGPROBS: logprobs_TK})


def _index(directory: Path) -> dict[str, str]:
    """Return the file of each document."""
    index: dict[str, str] = {}
    for file in sorted(directory.glob("scores-*.safetensors")):
        for entry in read_header(file)[0]:
            if entry.key.endswith(_IDS):
                index[entry.key.removesuffix(_IDS)] = file.name
    return index


def _check_same(file: Path, about: Mapping[str, object], wanted: Mapping[str, object]) -> None:
    """Refuse scores of another teacher, temperature or format."""
    for name, value in wanted.items():
        if about.get(name) != value:
            raise ConfigError(
                f"{file} says {name}={about.get(name)!r}, and {value!r} is wanted; choose another directory, or remove "
                "this one and score again"
            )


def _refuse_images(batch: Batch) -> None:
    """Refuse a batch with images: the key of a document depends on its tokens alone."""
    if batch.frames:
        raise DataError("scores of a teacher are stored by tokens, which do not hold images; ask the teacher in each "
                        "step instead (Distill.ask)")  # fmt: skip


def _write(file: Path, content: bytes) -> None:
    """Write a file, which gets its name only when it is complete."""
    temporary = file.with_suffix(".part")
    temporary.write_bytes(content)
    os.replace(temporary, file)
