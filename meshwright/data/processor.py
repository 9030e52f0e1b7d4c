"""The processor of a model that sees: files of pictures and videos -> patches, and what the text says of them.

Sizes are chosen as transformers' Qwen3VLProcessor does, from the same files beside config.json. It looks at the header
of a file when data are read, and at its pixels when they are trained on.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import DataError, counted
from .json_values import read_object
from .vision_files import Clip, Grid, View, clip_of, size_of

_MERGED, _SLICES = 2, 2  # patches of a side that take one place, and pictures that make one slice of a video
_MOST_OBLONG = 200
_FILES = {"image": "preprocessor_config.json", "video": "video_preprocessor_config.json"}
_KNOWN = {
    "merge_size": (_MERGED,), "temporal_patch_size": (_SLICES,), "image_mean": ([0.5, 0.5, 0.5],),
    "image_std": ([0.5, 0.5, 0.5],), "do_resize": (True,), "do_rescale": (True,), "do_normalize": (True,),
    "resample": (3,),
}  # fmt: skip


@dataclass(frozen=True)
class ImageLimits:
    """What a user wants otherwise. `root`: where relative paths begin."""

    root: Path = Path()
    max_pixels: int | None = None
    max_video_pixels: int | None = None
    fps: float | None = None


@dataclass(frozen=True)
class Placeholders:
    """The tokens of a picture and of a video in the text, with their ids, and those around a slice of a video."""

    image: str
    video: str
    ids: tuple[int, int]
    start: str = "<|vision_start|>"
    end: str = "<|vision_end|>"


class Processor:
    """Of a model directory. `patch`: pixels of a side of a patch, as the tower has it."""

    def __init__(self, directory: Path, marks: Placeholders, patch: int, wishes: ImageLimits = ImageLimits()) -> None:
        self.directory, self.marks, self.patch, self.wishes = directory, marks, patch, wishes
        self._settings: dict[str, Mapping[str, Any]] = {}

    @property
    def told(self) -> str:
        """All that the places of a picture depend on."""
        found = [_read(self.directory / name) for name in ("processor_config.json", *_FILES.values())]
        return repr((found, self.patch, self.wishes))

    def picture(self, path: str) -> View:
        file = self._file(path)
        height, width = self._fitted("image", *size_of(file))
        return View((str(file),), self._grid(1, height, width), file.stat().st_size)

    def video(self, given: str | Sequence[str], fps: float | None) -> View:
        """A file, of which some pictures are taken; or all pictures that are given, of which `fps` are a second."""
        if not isinstance(given, str):
            if not given or not fps:
                raise DataError('a video that is given as pictures has some, and "fps" beside them, for the times')
            files = [self._file(path) for path in given]
            return self._slices(files, Clip(len(files), fps, size_of(files[0])), range(len(files)))
        file = self._file(given)
        clip = clip_of(file)
        return self._slices([file], clip, self._taken(clip))

    def _slices(self, files: Sequence[Path], clip: Clip, taken: Sequence[int]) -> View:
        num = len(taken)
        if num < _SLICES:
            raise DataError(f"the video {files[0]} has {num} picture; give two or more, or a picture")
        height, width = self._fitted("video", *_at_least(self._factor, *clip.size), num)
        grid = self._grid(-(-num // _SLICES), height, width)
        return View(tuple(map(str, files)), grid, sum(f.stat().st_size for f in files), tuple(taken), clip.fps)

    def _taken(self, clip: Clip) -> list[int]:
        """Which pictures of a file: so many a second, evenly."""
        settings = self._of("video")
        fps = self.wishes.fps or float(settings.get("fps") or 2)
        num = int(clip.num / clip.fps * fps)
        num = min(max(num, int(settings.get("min_frames", 4))), int(settings.get("max_frames", 768)), clip.num)
        return [int(each) for each in np.linspace(0, clip.num - 1, num).round()]

    def text_of(self, view: View) -> str:
        """What stands in the place of its mark. Each slice of a video has its time before it."""
        _, height, width = view.grid
        places, marks = height * width // _MERGED**2, self.marks
        if not view.taken:
            return marks.image * places
        run = marks.start + marks.video * places + marks.end
        return "".join(f"<{at:.1f} seconds>{run}" for at in view.times)

    def with_places(self, text: str, views: Sequence[View]) -> str:
        """A text in which each mark has become the places of what it stands for."""
        image, video = re.escape(self.marks.image), re.escape(self.marks.video)
        pieces = re.split(f"({image}|{video})", text)
        due = [self.marks.video if view.taken else self.marks.image for view in views]
        if pieces[1::2] != due:
            raise DataError(
                f"the template writes {len(pieces) // 2} marks for {counted(len(due), 'picture')} and videos of the "
                f"messages, or a text holds {self.marks.image} or {self.marks.video} itself; take the template of a "
                "model that sees"
            )
        places = [self.text_of(view) for view in views]
        return "".join(places[at // 2] if at % 2 else piece for at, piece in enumerate(pieces))

    def pixels(self, view: View) -> Tensor:
        """A row of bytes for each patch: the four of a place behind each other, and places row by row."""
        size = (view.grid[1] * self.patch, view.grid[2] * self.patch)
        shown = [_resized(picture, size) for picture in view.pictures()]
        shown += shown[-1:] * (view.grid[0] * _SLICES - len(shown))  # a picture is shown twice, an odd video's last too
        return torch.from_numpy(patched(np.stack(shown), self.patch))

    @property
    def _factor(self) -> int:
        return self.patch * _MERGED

    def _grid(self, time: int, height: int, width: int) -> Grid:
        return time, height // self.patch, width // self.patch

    def _fitted(self, kind: str, height: int, width: int, num: int = 0) -> tuple[int, int]:
        size = self._of(kind)["size"]
        least, most = size["shortest_edge"], size["longest_edge"]
        wished = self.wishes.max_video_pixels if kind == "video" else self.wishes.max_pixels
        most = most if wished is None else max(least, min(most, wished))
        return fitted(height, width, self._factor, (least, most), num)

    def _file(self, path: str) -> Path:
        found = self.wishes.root / path.removeprefix("file://")
        if "://" in path.removeprefix("file://") or path.startswith("data:"):
            raise DataError(f"{path:.80} is no path of a file; fetch pictures before the run, and name their files")
        try:
            there = found.is_file()
        except OSError as error:  # a name that no file can have
            raise DataError(f"{path:.80} is no path of a file: {error.strerror}") from error
        if not there:
            raise DataError(f"there is no file {found}; relative paths begin at the data, or at pictures.root")
        return found.absolute()

    def _of(self, kind: str) -> Mapping[str, Any]:
        if kind not in self._settings:
            self._settings[kind] = self._checked(kind)
        return self._settings[kind]

    def _checked(self, kind: str) -> Mapping[str, Any]:
        """Of `processor_config.json` or a file of its own, as versions of transformers write them."""
        joint = _read(self.directory / "processor_config.json").get(f"{kind}_processor")
        found = joint or _read(self.directory / _FILES[kind])
        if not found:
            raise DataError(
                f"{self.directory} has no {_FILES[kind]}, which says how large a {kind} may be; take it from where the "
                "model came from"
            )
        for name, known in _KNOWN.items():
            if found.get(name, known[0]) not in known:
                raise DataError(f"{_FILES[kind]}: {name}={found[name]!r} is not known here; known is {known[0]!r}")
        if found.get("patch_size") != self.patch:
            raise DataError(
                f"{_FILES[kind]}: patch_size={found.get('patch_size')}, and the tower has {self.patch}; take the file "
                "from where the model came from"
            )
        size = found.get("size") or {}
        size = {"shortest_edge": found.get("min_pixels"), "longest_edge": found.get("max_pixels"), **size}
        if not all(type(edge) is int and edge > 0 for edge in (size["shortest_edge"], size["longest_edge"])):
            raise DataError(
                f"{_FILES[kind]}: size={size} must name shortest_edge and longest_edge, in pixels of a {kind}"
            )
        return {**found, "size": size}


def fitted(height: int, width: int, factor: int, pixels: tuple[int, int], num: int = 0) -> tuple[int, int]:
    """The nearest size that is a multiple of `factor` and has between so many pixels. `num`: pictures of a video, of
    all of which the pixels are counted."""
    least, most = pixels
    if max(height, width) > _MOST_OBLONG * min(height, width):
        raise DataError(
            f"a picture of {height} x {width} pixels is more than {_MOST_OBLONG} times as long as wide; cut it"
        )
    high, wide = (round(side / factor) * factor for side in (height, width))
    counted, shown = (round(num / _SLICES) * _SLICES, num) if num else (1, 1)
    if counted * high * wide > most:
        by = math.sqrt(shown * height * width / most)
        high, wide = (max(factor, math.floor(side / by / factor) * factor) for side in (height, width))
    elif counted * high * wide < least:
        by = math.sqrt(least / (shown * height * width))
        high, wide = (math.ceil(side * by / factor) * factor for side in (height, width))
    return high, wide


def _at_least(factor: int, height: int, width: int) -> tuple[int, int]:
    """A video that is too small is made larger first."""
    if height >= factor and width >= factor:
        return height, width
    by = max(factor / height, factor / width)
    return int(height * by), int(width * by)


def patched(shown_FHWC: np.ndarray[Any, Any], patch: int) -> np.ndarray[Any, Any]:
    """Pictures, two to a slice -> a row for each patch, in which colours come first, then time, then rows."""
    num, height, width, colours = shown_FHWC.shape
    high, wide = height // patch // _MERGED, width // patch // _MERGED
    cut = shown_FHWC.reshape(num // _SLICES, _SLICES, high, _MERGED, patch, wide, _MERGED, patch, colours)
    rows = cut.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
    return np.ascontiguousarray(rows).reshape(-1, colours * _SLICES * patch * patch)


def _resized(picture: Any, size: tuple[int, int]) -> np.ndarray[Any, Any]:
    from PIL.Image import Resampling

    return np.asarray(picture.resize(size[::-1], Resampling.BICUBIC))


def _read(file: Path) -> dict[str, Any]:
    return read_object(file) if file.is_file() else {}
