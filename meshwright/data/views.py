"""Views: pictures and videos of documents by path, with what of them is seen. Their pixels are read when wanted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import DataError
from .video import pictures_of

Grid = tuple[int, int, int]  # patches in time, height and width


@dataclass(frozen=True)
class View:
    """`files`: one, or of a video its pictures. `num_bytes`: of all, when they were looked at. `taken`: of a video,
    which of its pictures, of which there are `fps` a second."""

    files: tuple[str, ...]
    grid: Grid
    num_bytes: int
    taken: tuple[int, ...] = ()
    fps: float = 0.0

    @property
    def times(self) -> list[float]:
        """Of each slice of a video, which is two pictures, in seconds."""
        at = [number / self.fps for number in (*self.taken, *self.taken[-1:] * (len(self.taken) % 2))]
        return [(first + second) / 2 for first, second in zip(at[::2], at[1::2], strict=True)]

    @property
    def content(self) -> str:
        """All but where it lies."""
        return repr((self.grid, self.num_bytes, self.taken, self.fps))

    def pictures(self) -> Iterator[Any]:
        """As PIL has them, in colours."""
        num_bytes = sum(Path(file).stat().st_size if Path(file).is_file() else 0 for file in self.files)
        if num_bytes != self.num_bytes:
            raise DataError(
                f"{self.files[0]} had {self.num_bytes} bytes when the data were read, and has {num_bytes}; put back "
                "what was there, or touch the file of the data, and all is read anew"
            )
        return pictures_of([Path(file) for file in self.files], self.taken)

    def __str__(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def of(text: str) -> View:
        found = json.loads(text)
        time, height, width = found.pop("grid")
        files, taken = (tuple(found.pop(name)) for name in ("files", "taken"))
        return View(files, (time, height, width), taken=taken, **found)
