"""Thumbnails of the images that a run trains on, in OUT/images.json.

The report reads them from there, because it may be made on a machine without the data.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..data import Documents
from ..errors import DataError
from .data_sources import TrainingData

FILE = "images.json"
_NUM = 8
_SIDE = 160  # pixels: 3 to 8 KiB as JPEG


def write_thumbnails(out: Path, data: TrainingData) -> None:
    """Write a few images of each source, evenly spaced; no file where there are none."""
    sources = [each for each in data.documents if each.num_views.any()]
    images = [entry for each in sources for entry in _entries(each, max(1, _NUM // len(sources)))]
    (out / FILE).unlink(missing_ok=True)
    if images:
        (out / FILE).write_text(json.dumps({"images": images[:_NUM]}, indent=1) + "\n")


def _entries(documents: Documents, num: int) -> Iterator[dict[str, str]]:
    """Yield the first images of some documents. One that cannot be read is left out: training will name it."""
    shows = np.flatnonzero(documents.num_views)
    for at in np.linspace(0, len(shows) - 1, min(num, len(shows))).astype(int).tolist():
        number = int(shows[at])
        view = documents.tokens(number).views[0]
        try:
            yield {"place": documents.place(number), "file": view.files[0], "jpeg": view.thumbnail(_SIDE)}
        except DataError:
            continue
