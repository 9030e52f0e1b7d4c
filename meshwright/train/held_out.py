"""Held-out data as batches: the same documents on every mesh, and on every data rank as many batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..data import Batch, Plan, source_of
from ..mesh import Mesh
from .config import Config, SourceSection
from .sources import Data, Reader, documents_of, is_too_long

_ONLY = "held-out"


def sections_of(config: Config) -> Mapping[str, SourceSection]:
    """The held-out sets by name; none where the file has no [eval]."""
    section = config.eval
    if section.path:
        return {section.name or _ONLY: section}
    return {each.name: each for each in section.sets}


def held_out(config: Config, directory: Path, mesh: Mesh, cache: Path) -> dict[str, Sequence[Batch]]:
    """Of this data rank; the last batches may be of filler."""
    reader = Reader(directory, cache, config.train.tower)
    return {name: _batches(section, config.train.length, reader, mesh) for name, section in sections_of(config).items()}


def _batches(section: SourceSection, length: int, reader: Reader, mesh: Mesh) -> Sequence[Batch]:
    documents = documents_of(section, reader)
    plan = Plan([source_of(documents, length, too_long=is_too_long(section))], length=length, epochs=1)
    feed = Data([documents], plan, plan.num_streams, reader.processor(section)).feed(mesh, micro_batches=1)
    batches = [feed.step(first).batches[0] for first in range(0, plan.num_streams, mesh.num_data_ranks)]
    feed.close()
    return batches
