"""The image and video processor of Qwen3-VL: files -> patches, and their placeholder tokens in the text.

Sizes and patches equal those of transformers' Qwen3VLProcessor, from the same config files (tests compare them). It is
a separate implementation because reading data needs only sizes, from file headers; pixels are decoded when a batch is
made.

Example: an image of 640 x 480 pixels with patches of 16 becomes 40 x 30 patches, 20 x 15 tokens. Its single mark in
the text becomes 300 placeholder tokens.
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

_MERGE, _TEMPORAL_PATCH = 2, 2  # 2 x 2 patches become one token; 2 video frames become one slice of patches
_MOST_OBLONG = 200  # largest aspect ratio, as in transformers
_FILES = {"image": "preprocessor_config.json", "video": "video_preprocessor_config.json"}
_SUPPORTED = {
    "merge_size": (_MERGE,), "temporal_patch_size": (_TEMPORAL_PATCH,), "image_mean": ([0.5, 0.5, 0.5],),
    "image_std": ([0.5, 0.5, 0.5],), "do_resize": (True,), "do_rescale": (True,), "do_normalize": (True,),
    "resample": (3,),
}  # fmt: skip


@dataclass(frozen=True)
class ImageLimits:
    """The user's limits. `root`: where relative paths start."""

    root: Path = Path()
    max_pixels: int | None = None
    max_video_pixels: int | None = None
    fps: float | None = None


@dataclass(frozen=True)
class Placeholders:
    """The placeholder tokens of images and videos with their ids, and the tokens around a video slice."""

    image: str
    video: str
    ids: tuple[int, int]
    start: str = "<|vision_start|>"
    end: str = "<|vision_end|>"


class Processor:
    """The processor of a model directory. `patch`: the side of a patch in pixels, from the vision tower."""

    def __init__(
        self, directory: Path, placeholders: Placeholders, patch: int, wishes: ImageLimits = ImageLimits()
    ) -> None:
        self.directory, self.placeholders, self.patch, self.wishes = directory, placeholders, patch, wishes
        self._settings: dict[str, Mapping[str, Any]] = {}

    @property
    def settings_key(self) -> str:
        """Return everything that the placeholders of an image depend on, for the cache key.

        Other limits give other numbers of placeholders. Without this in the key, pixels and cached placeholders would
        disagree after a change of `max_pixels`.
        """
        settings = [_read(self.directory / name) for name in ("processor_config.json", *_FILES.values())]
        return repr((settings, self.patch, self.wishes))

    def image(self, path: str) -> View:
        """Return the grid of an image, from its header."""
        file = self._file(path)
        height, width = self._fitted_size("image", *size_of(file))
        return View.read([file], self._grid(1, height, width))

    def video(self, source: str | Sequence[str], fps: float | None) -> View:
        """Return the grid of a video: a file, whose frames are sampled, or a list of images at `fps`."""
        if not isinstance(source, str):
            if not source or not fps:
                raise DataError('a video given as a list of images must not be empty, and needs its "fps"')
            files = [self._file(path) for path in source]
            return self._slices(files, Clip(len(files), fps, size_of(files[0])), range(len(files)))
        file = self._file(source)
        clip = clip_of(file)
        return self._slices([file], clip, self._sampled_frames(clip))

    def _slices(self, files: Sequence[Path], clip: Clip, frame_numbers: Sequence[int]) -> View:
        """Return the grid of some frames of a video."""
        num = len(frame_numbers)
        if num < _TEMPORAL_PATCH:
            raise DataError(f"the video {files[0]} has {num} frame; give two or more, or an image")
        height, width = self._fitted_size("video", *_at_least(self._factor, *clip.size), num)
        grid = self._grid(-(-num // _TEMPORAL_PATCH), height, width)
        return View.read(files, grid, frame_numbers, clip.fps)

    def _sampled_frames(self, clip: Clip) -> list[int]:
        """Return the frames to sample from a file: `fps` per second, evenly spaced.

        `n = clip(frames / clip_fps * fps, min_frames, max_frames)` frames at `linspace(0, last, n)`, as in
        transformers. Frames are decoded in order up to the last one, since seeking in a video is not exact.
        """
        settings = self._of("video")
        fps = self.wishes.fps or float(settings.get("fps") or 2)
        num = int(clip.num / clip.fps * fps)
        num = min(max(num, int(settings.get("min_frames", 4))), int(settings.get("max_frames", 768)), clip.num)
        return [int(each) for each in np.linspace(0, clip.num - 1, num).round()]

    @staticmethod
    def num_tokens(view: View) -> int:
        """Return the number of placeholder tokens of an image or a video."""
        return math.prod(view.grid) // _MERGE**2

    def text_of(self, view: View) -> str:
        """Return the text that replaces a placeholder mark. In a video the time of each slice precedes it, as in
        Qwen3-VL."""
        _, height, width = view.grid
        num_tokens, placeholders = height * width // _MERGE**2, self.placeholders
        if not view.taken:
            return placeholders.image * num_tokens
        video_tokens = placeholders.start + placeholders.video * num_tokens + placeholders.end
        return "".join(f"<{at:.1f} seconds>{video_tokens}" for at in view.times)

    def with_places(self, text: str, views: Sequence[View]) -> str:
        """Replace each mark in a rendered chat by the placeholders of its image or video."""
        image, video = re.escape(self.placeholders.image), re.escape(self.placeholders.video)
        pieces = re.split(f"({image}|{video})", text)
        expected = [self.placeholders.video if view.taken else self.placeholders.image for view in views]
        if pieces[1::2] != expected:
            raise DataError(
                f"the chat template writes {len(pieces) // 2} placeholders for {counted(len(expected), 'image')} and "
                f"videos of the messages, or a text contains {self.placeholders.image} or {self.placeholders.video} "
                "itself; use the template of a vision-language model"
            )
        # `re.split` with a group alternates text and marks, so odd positions are marks.
        replacements = [self.text_of(view) for view in views]
        return "".join(replacements[at // 2] if at % 2 else piece for at, piece in enumerate(pieces))

    def pixels(self, view: View) -> Tensor:
        """Decode and return a uint8 row for each patch, the four patches of a token together, tokens row by row."""
        size = (view.grid[1] * self.patch, view.grid[2] * self.patch)
        frames = [_resized(image, size) for image in view.images()]
        # An image is repeated to fill its slice of two frames, and so is an odd last frame.
        frames += frames[-1:] * (view.grid[0] * _TEMPORAL_PATCH - len(frames))
        return torch.from_numpy(patched(np.stack(frames), self.patch))

    @property
    def _factor(self) -> int:
        """Return the side of a token in pixels."""
        return self.patch * _MERGE

    def _grid(self, time: int, height: int, width: int) -> Grid:
        """Return the numbers of patches."""
        return time, height // self.patch, width // self.patch

    def _fitted_size(self, kind: str, height: int, width: int, num: int = 0) -> tuple[int, int]:
        """Return the size to which an image or video is resized."""
        size = self._of(kind)["size"]
        min_pixels, max_pixels = size["shortest_edge"], size["longest_edge"]
        user_limit = self.wishes.max_video_pixels if kind == "video" else self.wishes.max_pixels
        max_pixels = max_pixels if user_limit is None else max(min_pixels, min(max_pixels, user_limit))
        return fitted(height, width, self._factor, (min_pixels, max_pixels), num)

    def _file(self, path: str) -> Path:
        """Return an existing local file."""
        file = self.wishes.root / path.removeprefix("file://")
        if "://" in path.removeprefix("file://") or path.startswith("data:"):
            raise DataError(f"{path:.80} is not a local path; download images before the run, and give their paths")
        try:
            is_file = file.is_file()
        except OSError as error:  # a name that no file can have
            raise DataError(f"{path:.80} is not a valid path: {error.strerror}") from error
        if not is_file:
            raise DataError(f"there is no file {file}; relative paths start at the data, or at images.root")
        return file.absolute()

    def _of(self, kind: str) -> Mapping[str, Any]:
        """Return the settings for images or videos, read once."""
        if kind not in self._settings:
            self._settings[kind] = self._checked_settings(kind)
        return self._settings[kind]

    def _checked_settings(self, kind: str) -> Mapping[str, Any]:
        """Read settings from `processor_config.json` or a separate file (versions of transformers differ), and refuse
        values that this processor does not implement."""
        # Recent versions of transformers write one processor_config.json; older ones write a file for images and one
        # for videos.
        joint = _read(self.directory / "processor_config.json").get(f"{kind}_processor")
        settings = joint or _read(self.directory / _FILES[kind])
        if not settings:
            raise DataError(
                f"{self.directory} has no {_FILES[kind]}, which limits the size of {kind}s; copy it from the original "
                "model"
            )
        for name, allowed in _SUPPORTED.items():
            if settings.get(name, allowed[0]) not in allowed:
                raise DataError(f"{_FILES[kind]}: {name}={settings[name]!r} is not supported, only {allowed[0]!r}")
        if settings.get("patch_size") != self.patch:
            raise DataError(
                f"{_FILES[kind]}: patch_size={settings.get('patch_size')}, but the vision tower has {self.patch}; copy "
                "the file from the original model"
            )
        size = settings.get("size") or {}
        # `min_pixels` and `max_pixels` are the older names.
        size = {"shortest_edge": settings.get("min_pixels"), "longest_edge": settings.get("max_pixels"), **size}
        if not all(type(edge) is int and edge > 0 for edge in (size["shortest_edge"], size["longest_edge"])):
            raise DataError(
                f"{_FILES[kind]}: size={size} must name shortest_edge and longest_edge, in pixels of {kind}s"
            )
        return {**settings, "size": size}


def fitted(height: int, width: int, factor: int, pixels: tuple[int, int], num: int = 0) -> tuple[int, int]:
    """Return the nearest size that is a multiple of `factor` with a pixel count between the limits ("smart resize" of
    Qwen2-VL). For a video, pixels of all `num` frames count.

    `height` and `width` are rounded to multiples of `factor` (patch * 2). If the area exceeds the maximum, both are
    divided by sqrt(area / max) and rounded down; if it is below the minimum, multiplied by sqrt(min / area) and rounded
    up. The aspect ratio changes by at most the rounding.
    """
    min_pixels, max_pixels = pixels
    if max(height, width) > _MOST_OBLONG * min(height, width):
        raise DataError(f"an image of {height} x {width} pixels has an aspect ratio above {_MOST_OBLONG}; crop it")
    fitted_height, fitted_width = (round(side / factor) * factor for side in (height, width))
    # Rounding follows transformers: the frames that count for the limit are rounded to whole slices, the scale uses the
    # real number.
    counted_frames, num_frames = (round(num / _TEMPORAL_PATCH) * _TEMPORAL_PATCH, num) if num else (1, 1)
    if counted_frames * fitted_height * fitted_width > max_pixels:
        scale = math.sqrt(num_frames * height * width / max_pixels)
        fitted_height, fitted_width = (
            max(factor, math.floor(side / scale / factor) * factor) for side in (height, width)
        )
    # Enlarging rounds up and shrinking rounds down, so that the limit holds after rounding to the grid.
    elif counted_frames * fitted_height * fitted_width < min_pixels:
        scale = math.sqrt(min_pixels / (num_frames * height * width))
        fitted_height, fitted_width = (math.ceil(side * scale / factor) * factor for side in (height, width))
    return fitted_height, fitted_width


def _at_least(factor: int, height: int, width: int) -> tuple[int, int]:
    """Enlarge a video frame that is smaller than one token."""
    if height >= factor and width >= factor:
        return height, width
    scale = max(factor / height, factor / width)
    return int(height * scale), int(width * scale)


def patched(frames_FHWC: np.ndarray[Any, Any], patch: int) -> np.ndarray[Any, Any]:
    """Cut frames, two to a slice, into a row for each patch: colours first, then time, then rows.

    Input `[frames, H, W, 3]`; output `[frames/2 * H/p * W/p, 3 * 2 * p * p]`. An image is two equal frames, because the
    tower's patch embedding spans two in time.
    """
    num, height, width, colours = frames_FHWC.shape
    rows_of_patches, cols_of_patches = height // patch // _MERGE, width // patch // _MERGE
    cut = frames_FHWC.reshape(
        num // _TEMPORAL_PATCH, _TEMPORAL_PATCH, rows_of_patches, _MERGE, patch, cols_of_patches, _MERGE, patch, colours
    )
    # (slice, row of tokens, column of tokens, row in token, column in token | colour, time, y, x): the order in which
    # the tower's patch embedding, a Conv3d flattened to a matmul, has its weights.
    rows = cut.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
    return np.ascontiguousarray(rows).reshape(-1, colours * _TEMPORAL_PATCH * patch * patch)


def _resized(image: Any, size: tuple[int, int]) -> np.ndarray[Any, Any]:
    """Resize with Pillow's bicubic filter. torch's antialiased filter differs in the last bits."""
    from PIL.Image import Resampling

    return np.asarray(image.resize(size[::-1], Resampling.BICUBIC))


def _read(file: Path) -> dict[str, Any]:
    """Read a JSON file; {} if it does not exist."""
    return read_object(file) if file.is_file() else {}
