"""Read image and video files with Pillow and PyAV (FFmpeg): sizes from headers, frames as RGB."""

from __future__ import annotations

import base64
import io
import json
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from ..errors import DataError

_SIDEWAYS = (5, 6, 7, 8)  # EXIF orientations in which width and height are swapped
_ORIENTATION = 0x0112
_STILL = {".gif", ".webp", ".png", ".apng"}  # image formats that may be animated
_COUNTED = ("GIF", "WEBP", "PNG")  # formats whose frames Pillow counts
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")  # not EPS, which Pillow hands to Ghostscript
# FFmpeg follows playlists to other files and URLs, so no playlist format is allowed, and only local files.
_CONTAINERS = {"format_whitelist": "mov,matroska,avi,mpeg,mpegts", "protocol_whitelist": "file"}
_VIDEOS = "MP4, MOV, Matroska, WebM, AVI, MPEG"
MOST_PIXELS = 64 << 20  # of an image: 4 times as many as any Qwen processor keeps, and 192 MiB as RGB
_END_BYTES = 4096  # read from each end of a file, to tell it from another file of the same size
_ENDS = {"JPEG": b"\xff\xd9", "PNG": b"IEND"}  # near the end of a whole file, never in compressed pixels
# Exceptions that Pillow raises for broken files.
_OF_PILLOW = (OSError, ValueError, SyntaxError, IndexError, TypeError, RuntimeError, EOFError, struct.error)


@dataclass(frozen=True)
class Clip:
    """A video: number of frames, frames per second, size (height, width)."""

    num: int
    fps: float
    size: tuple[int, int]


@contextmanager
def open_image(file: Path) -> Iterator[Any]:
    """Open an image, with Pillow's errors as DataErrors.

    Only listed formats are allowed: Pillow's plugins include parsers for old formats with a history of security bugs,
    and one that runs Ghostscript.
    """
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise DataError("images are read by Pillow; install it: pip install 'meshwright[vision]'") from error
    try:
        with Image.open(file, formats=_FORMATS) as image:
            _check_size(file, *image.size)
            yield image
    except UnidentifiedImageError as error:
        raise DataError(f"{file} cannot be read as an image: it is none of {', '.join(_FORMATS)}") from error
    except (*_OF_PILLOW, Image.DecompressionBombError) as error:
        raise DataError(f"{file} cannot be read as an image: {error}") from error


def _check_size(file: Path, width: int, height: int) -> None:
    """Refuse an image by its header: a small file can decompress to more pixels than fit into memory."""
    if width * height > MOST_PIXELS:
        raise DataError(f"{file} has {width} x {height} pixels, above the limit of {MOST_PIXELS:,}; make it smaller")


def size_of(file: Path) -> tuple[int, int]:
    """Return height and width after EXIF rotation. Refuse a file that has been cut off."""
    with open_image(file) as image:
        width, height = image.size
        if not _seems_whole(file, image.format):
            image.load()
        is_sideways = image.getexif().get(_ORIENTATION) in _SIDEWAYS
    return (width, height) if is_sideways else (height, width)


def _seems_whole(file: Path, kind: str) -> bool:
    """Return whether a file has the end mark of its format. Without one, only decoding shows whether it is whole.

    Most broken images are interrupted downloads. Decoding every image would take hours for a million of them.
    """
    ends = _ends_of(file)
    if kind == "WEBP":
        return int.from_bytes(ends[4:8], "little") + 8 <= file.stat().st_size
    return kind in _ENDS and _ENDS[kind] in ends[-_END_BYTES:]


def _ends_of(file: Path) -> bytes:
    """Return the first and the last bytes of a file."""
    with file.open("rb") as opened:
        head = opened.read(_END_BYTES)
        opened.seek(max(0, file.stat().st_size - _END_BYTES))
        return head + opened.read()


def clip_of(file: Path) -> Clip:
    """Return frame count, rate and size of a video or animated image."""
    if file.suffix.lower() not in _STILL:
        return _clip(file)
    with open_image(file) as image:
        num = image.n_frames if image.format in _COUNTED else 1
        if num > 1:
            image.load()  # Pillow reads the duration of an animated WebP with its first frame
        duration_ms = float(image.info.get("duration") or 0)
        if num > 1 and duration_ms <= 0:
            raise DataError(f'{file} has no frame duration; give its frames as a list of images, with "fps"')
        return Clip(num, 1000.0 / (duration_ms or 1000.0), image.size[::-1])


def read_images(files: Sequence[Path], frame_numbers: Sequence[int]) -> Iterator[Any]:
    """Yield RGB frames: one of each image file; those with `frame_numbers` of a video; or the only image."""
    if len(files) > 1 or not frame_numbers:
        for file in files:
            with open_image(file) as image:
                yield _upright(image)
    elif files[0].suffix.lower() in _STILL:
        with open_image(files[0]) as image:
            for number in frame_numbers:
                image.seek(number)
                yield _to_rgb(image)
    else:
        yield from _decoded(files[0], frame_numbers)


def _upright(image: Any) -> Any:
    """Apply EXIF rotation."""
    from PIL import ImageOps

    return _to_rgb(ImageOps.exif_transpose(image))


def _to_rgb(image: Any) -> Any:
    """Convert to RGB, with transparency on white as inference servers do: dropping alpha can leave black on black."""
    from PIL import Image

    if "A" not in image.getbands() and "transparency" not in image.info:
        return image.convert("RGB")
    # Composite instead of converting: `convert("RGB")` would drop alpha and keep whatever colour transparent pixels
    # have.
    rgba = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Open a video, with FFmpeg's errors as DataErrors.

    `protocol_whitelist=file` keeps FFmpeg from opening URLs that a crafted file names.
    """
    try:
        import av
    except ImportError as error:
        raise DataError(
            f"{file} is read by PyAV; install it: pip install 'meshwright[vision]'. Or give the frames of a video as a "
            'list of images, and "fps"'
        ) from error
    try:
        with av.open(str(file), container_options=_CONTAINERS) as container:
            if not container.streams.video:
                raise DataError(f"{file} has no video stream")
            yield container
    except (av.FFmpegError, OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read as a video ({_VIDEOS}): {error}") from error


def _clip(file: Path) -> Clip:
    """Read a video's header. If it lacks the number of frames, count them by decoding."""
    with _opened(file) as container:
        stream = container.streams.video[0]
        num = stream.frames or sum(1 for _ in container.decode(video=0))
        if not num or not stream.average_rate:
            raise DataError(f"{file} does not give its number of frames or its frame rate")
        _check_size(file, stream.width, stream.height)
        return Clip(num, float(stream.average_rate), (stream.height, stream.width))


def _decoded(file: Path, frame_numbers: Sequence[int]) -> Iterator[Any]:
    """Decode some frames, in order; a frame that is listed twice is yielded twice."""
    remaining = list(reversed(frame_numbers))
    with _opened(file) as container:
        for number, frame in enumerate(container.decode(video=0)):
            # A frame may be used twice when a clip has fewer frames than the minimum.
            while remaining and remaining[-1] == number:
                remaining.pop()
                yield frame.to_image()
            if not remaining:
                return
    raise DataError(f"{file} ends before frame {remaining[-1]}, which its header promises; it may be truncated")


Grid = tuple[int, int, int]  # patches in time, height and width


@dataclass(frozen=True)
class View:
    """An image or video with its patch grid. `files`: one file, or an image for each frame of a video. `num_bytes` and
    `ends`: their size and a checksum of their first and last bytes when they were read. `taken`: the used frames of a
    video, which has `fps` frames per second.

    A document keeps only these paths and numbers of an image, a few hundred bytes. Pixels are read when a batch is
    made, and never by ranks that do not encode them.
    """

    files: tuple[str, ...]
    grid: Grid
    num_bytes: int
    ends: str
    taken: tuple[int, ...] = ()
    fps: float = 0.0

    @staticmethod
    def read(files: Sequence[Path], grid: Grid, taken: Sequence[int] = (), fps: float = 0.0) -> View:
        """Return the view of files as they are now."""
        num_bytes, ends = _state_of(files)
        return View(tuple(map(str, files)), grid, num_bytes, ends, tuple(taken), fps)

    @property
    def times(self) -> list[float]:
        """Return the time of each slice of a video (two frames) in seconds."""
        seconds = [number / self.fps for number in (*self.taken, *self.taken[-1:] * (len(self.taken) % 2))]
        return [(first + second) / 2 for first, second in zip(seconds[::2], seconds[1::2], strict=True)]

    @property
    def content(self) -> str:
        """Return a text that identifies the content of the image, without its path."""
        return repr((self.grid, self.num_bytes, self.ends, self.taken, self.fps))

    def change(self) -> str:
        """Return how the files differ from those that were read; "" if they do not."""
        paths = [Path(file) for file in self.files]
        if missing := next((path for path in paths if not path.is_file()), None):
            return f"there is no file {missing} any more"
        num_bytes, ends = _state_of(paths)
        if num_bytes != self.num_bytes:
            return f"{paths[0]} had {self.num_bytes} bytes when the data were read, and now has {num_bytes}"
        return "" if ends == self.ends else f"{paths[0]} has other bytes than when the data were read"

    def images(self) -> Iterator[Any]:
        """Yield the frames as RGB. Refuse files that have changed since the grid was computed."""
        # Checked again at this point: days may pass between reading the data and training on them.
        if change := self.change():
            raise DataError(f"{change}; restore it, or start the run again, which then reads the data again")
        return read_images([Path(file) for file in self.files], self.taken)

    def thumbnail(self, side: int) -> str:
        """Return the first frame as a JPEG of at most `side` x `side` pixels, in base64."""
        image, jpeg = next(self.images()), io.BytesIO()
        image.thumbnail((side, side))
        image.save(jpeg, "JPEG", quality=70)
        return base64.b64encode(jpeg.getvalue()).decode()

    def __str__(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def of(text: str) -> View:
        """Parse what `str(view)` wrote."""
        fields = json.loads(text)
        time, height, width = fields.pop("grid")
        files, taken = (tuple(fields.pop(name)) for name in ("files", "taken"))
        return View(files, (time, height, width), taken=taken, **fields)


def _state_of(files: Sequence[Path]) -> tuple[int, str]:
    """Return the size of all files, and a checksum of their ends.

    Whole files are not read: both ends hold compressed pixels or checksums of them, in all formats but BMP and TIFF.
    """
    ends = xxhash.xxh3_64()
    for file in files:
        ends.update(_ends_of(file))
    return sum(file.stat().st_size for file in files), ends.hexdigest()
