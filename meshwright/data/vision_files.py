"""Files of pictures and videos, read by Pillow and PyAV: how large they are, and their pictures in colours."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import DataError

_TURNED = (5, 6, 7, 8)  # ways in which a camera was held on its side
_ORIENTATION = 0x0112
_STILL = {".gif", ".webp", ".png", ".apng"}  # files of pictures that may be several
_MOVING = ("GIF", "WEBP", "PNG")  # which Pillow counts
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")  # Pillow would give an EPS to Ghostscript
# FFmpeg would follow a playlist to other files and addresses: no format that only names others is among these.
_CONTAINERS = {"format_whitelist": "mov,matroska,avi,mpeg,mpegts", "protocol_whitelist": "file"}
_VIDEOS = "MP4, MOV, Matroska, WebM, AVI, MPEG"
MOST_PIXELS = 64 << 20  # of a picture: 4 times as many as any processor of Qwen keeps, and 192 MiB in colours
# What it says of files that are broken.
_OF_PILLOW = (OSError, ValueError, SyntaxError, IndexError, TypeError, RuntimeError, EOFError, struct.error)


@dataclass(frozen=True)
class Clip:
    """`num` pictures, `fps` a second, all of a size (height, width)."""

    num: int
    fps: float
    size: tuple[int, int]


@contextmanager
def open_picture(file: Path) -> Iterator[Any]:
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise DataError("pictures are read by Pillow; install it: pip install 'meshwright[vision]'") from error
    try:
        with Image.open(file, formats=_FORMATS) as picture:
            _check_size(file, *picture.size)
            yield picture
    except UnidentifiedImageError as error:
        raise DataError(f"{file} cannot be read as a picture: it is none of {', '.join(_FORMATS)}") from error
    except (*_OF_PILLOW, Image.DecompressionBombError) as error:
        raise DataError(f"{file} cannot be read as a picture: {error}") from error


def _check_size(file: Path, width: int, height: int) -> None:
    """Refuse a picture by its header: a small file can hold more pixels than there is memory."""
    if width * height > MOST_PIXELS:
        raise DataError(f"{file} has {width} x {height} pixels, and at most {MOST_PIXELS:,} are read; make it smaller")


def size_of(file: Path) -> tuple[int, int]:
    """Height and width, as a person sees it."""
    with open_picture(file) as picture:
        width, height = picture.size
        turned = picture.getexif().get(_ORIENTATION) in _TURNED
    return (width, height) if turned else (height, width)


def clip_of(file: Path) -> Clip:
    if file.suffix.lower() not in _STILL:
        return _clip(file)
    with open_picture(file) as picture:
        num = picture.n_frames if picture.format in _MOVING else 1
        lasts = float(picture.info.get("duration") or 0)
        if num > 1 and lasts <= 0:
            raise DataError(f'{file} does not say how long a picture lasts; give its pictures as a list, and "fps"')
        return Clip(num, 1000.0 / (lasts or 1000.0), picture.size[::-1])


def pictures_of(files: Sequence[Path], taken: Sequence[int]) -> Iterator[Any]:
    """One of each of several files; or those of a video that are taken, in their order; or the only one."""
    if len(files) > 1 or not taken:
        for file in files:
            with open_picture(file) as picture:
                yield _upright(picture)
    elif files[0].suffix.lower() in _STILL:
        with open_picture(files[0]) as picture:
            for number in taken:
                picture.seek(number)
                yield _in_colours(picture)
    else:
        yield from _decoded(files[0], taken)


def _upright(picture: Any) -> Any:
    from PIL import ImageOps

    return _in_colours(ImageOps.exif_transpose(picture))


def _in_colours(picture: Any) -> Any:
    """On white where one sees through it, as servers show it: black on nothing would be black on black."""
    from PIL import Image

    if "A" not in picture.getbands() and "transparency" not in picture.info:
        return picture.convert("RGB")
    seen = picture.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", seen.size, "white"), seen).convert("RGB")


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        import av
    except ImportError as error:
        raise DataError(
            f"{file} is read by PyAV; install it: pip install 'meshwright[vision]'. Or give the pictures of a video as "
            'a list, and "fps"'
        ) from error
    try:
        with av.open(str(file), container_options=_CONTAINERS) as container:
            if not container.streams.video:
                raise DataError(f"{file} has no pictures")
            yield container
    except (av.FFmpegError, OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read as a video ({_VIDEOS}): {error}") from error


def _clip(file: Path) -> Clip:
    with _opened(file) as container:
        stream = container.streams.video[0]
        num = stream.frames or sum(1 for _ in container.decode(video=0))
        if not num or not stream.average_rate:
            raise DataError(f"{file} does not say how many pictures it has, or how many a second")
        _check_size(file, stream.width, stream.height)
        return Clip(num, float(stream.average_rate), (stream.height, stream.width))


def _decoded(file: Path, taken: Sequence[int]) -> Iterator[Any]:
    """A picture that is taken twice comes twice."""
    waiting = list(reversed(taken))
    with _opened(file) as container:
        for number, frame in enumerate(container.decode(video=0)):
            while waiting and waiting[-1] == number:
                waiting.pop()
                yield frame.to_image()
            if not waiting:
                return
    raise DataError(f"{file} ends before picture {waiting[-1]}, though it says that it has it")


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
