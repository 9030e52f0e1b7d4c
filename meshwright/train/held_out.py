"""Held-out data as batches: the same documents on every mesh, and on every data rank as many batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from ..data import Batch, Plan, source_of
from ..mesh import Mesh
from .config import Config, SourceSection
from .sources import Data, Reader, all_of, documents_of, is_too_long

_ONLY = "held-out"


def sections_of(config: Config) -> Mapping[str, SourceSection]:
    """The held-out sets by name; none where the file has no [eval]."""
    section = config.eval
    if section.path:
        return {section.name or _ONLY: section}
    return {each.name: each for each in section.sets}


def held_out_of(config: Config, directory: Path, cache: Path, *, processes: int = 1) -> dict[str, Data]:
    """The held-out sets by name, tokenised and packed. Every process makes the same."""
    reader, sections = Reader(directory, cache, config.train.tower, processes), sections_of(config)
    made = all_of(partial(_data, section, config.train.length, reader) for section in sections.values())
    return dict(zip(sections, made, strict=True))


def _data(section: SourceSection, length: int, reader: Reader) -> Data:
    documents = documents_of(section, reader)
    plan = Plan([source_of(documents, length, too_long=is_too_long(section))], length=length, epochs=1)
    return Data([documents], plan, plan.num_streams, reader.processor(section))


def batches_of(data: Data, mesh: Mesh) -> Sequence[Batch]:
    """The batches of this data rank; the last ones may be of filler."""
    feed = data.feed(mesh, micro_batches=1)
    batches = [feed.step(first).batches[0] for first in range(0, data.plan.num_streams, mesh.num_data_ranks)]
    feed.close()
    return batches
