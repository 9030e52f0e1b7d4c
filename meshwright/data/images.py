"""Pictures of documents: which tokens they take the place of, and where those are in time, height and width.

Pictures and videos are one list, in the order of their places in the text. A video of t slices is t frames, each with a
run of places of its own; a picture is one frame. Four patches take one place.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor

from ..errors import DataError, counted

PLACEHOLDERS = (151655, 151656, 248056, 248057)  # pictures and videos: of Qwen3-VL, of Qwen3.5
_MERGED = 2  # patches of a side that take one place
Grid = tuple[int, int, int]
Picture = tuple[Tensor, Grid]  # its patches, and how many they are in time, height and width


@dataclass(frozen=True)
class Frame:
    """`height` and `width` in patches; its first place is token `start` of the stream."""

    height: int
    width: int
    start: int

    @property
    def num_patches(self) -> int:
        return self.height * self.width

    @property
    def num_tokens(self) -> int:
        return self.num_patches // _MERGED**2

    @property
    def stop(self) -> int:
        return self.start + self.num_tokens

    @property
    def tokens(self) -> range:
        return range(self.start, self.stop)


@dataclass(frozen=True, eq=False)  # eq would ask tensors for one truth value
class Images:
    """The patches of all frames of a batch, in the order of the frames."""

    patches_PC: Tensor
    frames: tuple[Frame, ...]

    def __post_init__(self) -> None:
        given, frames = self.patches_PC, self.frames
        if given.dim() != 2 or len(given) != sum(f.num_patches for f in frames):
            raise DataError("the patches of a batch must be a row for each patch of its frames; use mw.pack(images=)")
        if any(a.stop > b.start for a, b in pairwise(frames)):
            raise DataError("the frames of a batch must be in the order of their places; use mw.pack(images=)")

    def of(self, numbers: Sequence[int]) -> Tensor:
        """The patches of some frames."""
        parts = self.patches_PC.split([frame.num_patches for frame in self.frames])
        return torch.cat([self.patches_PC[:0], *(parts[number] for number in numbers)])

    def within(self, start: int, stop: int, to: int) -> Images:
        """Those whose places are in a part of the stream that is to begin at token `to`."""
        numbers = [number for number, frame in enumerate(self.frames) if start <= frame.start < stop]
        frames = tuple(replace(f, start=f.start - start + to) for f in (self.frames[number] for number in numbers))
        return Images(self.of(numbers), frames)


def joined_images(parts: Sequence[Images]) -> Images | None:
    """Pictures of several parts of a stream; None where there are none."""
    frames = tuple(frame for part in parts for frame in part.frames)
    return Images(torch.cat([part.patches_PC for part in parts]), frames) if frames else None


def turns_of(bounds: Sequence[int], frames: Sequence[Frame]) -> Tensor:
    """Time, height and width of each token, `[T, 3]`. They begin at 0 in each document. A word is at one number in all
    three, the next free one; the tokens of a frame are at its first free number in time, and at that plus their row and
    column in the others."""
    turns_T3 = torch.empty(bounds[-1], 3, dtype=torch.int64)
    waiting = list(reversed(frames))
    for start, stop in pairwise(bounds):
        at, free = start, 0
        while at < stop:
            frame = waiting[-1] if waiting and waiting[-1].start < stop else None
            words = (frame.start if frame else stop) - at
            turns_T3[at : at + words] = torch.arange(free, free + words)[:, None]
            at, free = at + words, free + words
            if frame:
                turns_T3[at : frame.stop] = free + _grid(frame)
                at, free = frame.stop, free + max(frame.height, frame.width) // _MERGED
                waiting.pop()
    return turns_T3


def _grid(frame: Frame) -> Tensor:
    """Time, row and column of each token of a frame."""
    sizes = (1, frame.height // _MERGED, frame.width // _MERGED)
    return torch.stack(torch.meshgrid(*map(torch.arange, sizes), indexing="ij"), -1).view(-1, 3)


def images_of(
    documents: Sequence[Sequence[int]], images: Sequence[Sequence[Picture]], placeholders: Sequence[int]
) -> Images | None:
    """The pictures of all documents, each in the places of its own."""
    if not isinstance(images, list | tuple) or not all(isinstance(each, list | tuple) for each in images):
        raise DataError("images must be a list of lists: of each document its pictures, [] where it has none")
    if len(images) != len(documents):
        raise DataError(
            f"images: {counted(len(images), 'list')} for {counted(len(documents), 'document')}; give one for each "
            "document, [] where it has none"
        )
    patches, frames, begin = list[Tensor](), list[Frame](), 0
    for number, (document, pictures) in enumerate(zip(documents, images, strict=True)):
        found, sizes = _checked(number, pictures)
        patches += found
        frames += [replace(f, start=begin + f.start) for f in _placed(number, document, sizes, placeholders)]
        begin += len(document)
    if len({(p.dtype, p.shape[1]) for p in patches}) > 1:
        kinds = ", ".join(sorted({f"{p.dtype} [..., {p.shape[1]}]" for p in patches}))
        raise DataError(f"the pictures of a batch differ: {kinds}; give all as one processor makes them")
    return Images(torch.cat(patches), tuple(frames)) if frames else None


def _checked(number: int, pictures: Sequence[Picture]) -> tuple[list[Tensor], list[tuple[int, int]]]:
    """The patches of the pictures of a document, and the sizes of its frames."""
    patches, sizes = [], []
    for which, picture in enumerate(pictures):
        name = f"picture {which} of document {number}"
        try:
            pixels, grid = picture
            pixels, (time, height, width) = torch.as_tensor(pixels), (operator.index(each) for each in _plain(grid))
        except (TypeError, ValueError):
            raise DataError(f"{name} must be (pixels, (time, height, width)), as a processor gives them") from None
        if time < 1 or min(height, width) < _MERGED or height % _MERGED or width % _MERGED:
            raise DataError(
                f"{name} has {time} x {height} x {width} patches; height and width must be even, and at least {_MERGED}"
            )
        if pixels.dim() != 2 or len(pixels) != time * height * width:
            raise DataError(
                f"the pixels of {name} have the shape {tuple(pixels.shape)} for {time} x {height} x {width} patches; "
                "give one row a patch"
            )
        if not pixels.is_floating_point() and pixels.dtype != torch.uint8:
            raise DataError(f"the pixels of {name} are {pixels.dtype}; give floating point numbers, or uint8")
        if pixels.requires_grad:
            raise DataError(f"the pixels of {name} require grad, and a batch is data; give pixels.detach()")
        patches.append(pixels)
        sizes += [(height, width)] * time
    return patches, sizes


def _plain(grid: Any) -> Any:
    """Whole numbers also where they are those of numpy or torch."""
    return grid.tolist() if hasattr(grid, "tolist") else grid


def ids_of(placeholders: Any) -> tuple[int, ...]:
    """The tokens that stand for pictures."""
    try:
        return tuple(operator.index(token) for token in _plain(placeholders))
    except TypeError:
        raise DataError(f"placeholders={placeholders!r:.80} must be a list of token ids") from None


def runs_of(document: Sequence[int], placeholders: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Where places stand one after the other: start and number. Those of pictures and of videos are apart."""
    at = 0
    for token, same in groupby(document):
        num = sum(1 for _ in same)
        if token in placeholders:
            yield at, num
        at += num


def _placed(
    number: int, document: Sequence[int], sizes: Sequence[tuple[int, int]], placeholders: Sequence[int]
) -> Iterator[Frame]:
    """Frames in the runs of a document, run by run: that the sum of all is right would let exchanged pictures pass."""
    waiting = list(reversed(sizes))
    for start, num in runs_of(document, placeholders):
        at = start
        while at < start + num:
            if not waiting:
                raise DataError(
                    f"document {number} has {counted(num, 'place')} for a picture at token {start}, and "
                    f"{counted(len(sizes), 'frame')}, none of which is left for {at}; give all its pictures, in the "
                    f"order of their places. If {document[at]} is a word of this model, name the tokens that are none: "
                    "placeholders="
                )
            frame = Frame(*waiting.pop(), at)
            if frame.stop > start + num:
                raise DataError(
                    f"frame {len(sizes) - len(waiting) - 1} of document {number} has {frame.height} x {frame.width} "
                    f"patches, which take {counted(frame.num_tokens, 'place')}, and {start + num - at} are left of the "
                    f"{num} at token {start}; pictures must be in the order of their places, in the sizes for which "
                    "the text was made"
                )
            yield frame
            at = frame.stop
    if waiting:
        raise DataError(
            f"document {number} has {counted(len(sizes), 'frame')}, and places for {len(sizes) - len(waiting)} of "
            f"them; are {list(placeholders)} the tokens of the places? (placeholders=)"
        )


_READ = ("input_ids", "pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw", "mm_token_type_ids")
_IGNORED = ("attention_mask", "second_per_grid_ts", "token_type_ids")


def are_of_processor(made: Mapping[str, Any]) -> bool:
    """Whether it is what a processor made, not a tokenizer alone."""
    return "mm_token_type_ids" in made or any(name.startswith("pixel_values") for name in made)


def of_processor(made: Mapping[str, Any], number: int) -> tuple[list[int], list[Picture], set[int]]:
    """What a processor of Hugging Face made of one document: its tokens, its pictures, and what stands for them."""
    unknown = sorted(set(made) - {*_READ, *_IGNORED})
    if unknown or "input_ids" not in made:
        raise DataError(
            f"document {number} is a dict with {', '.join(sorted(made))}; of a processor are read {', '.join(_READ)}"
        )
    mask = made.get("attention_mask")
    if mask is not None and not bool(torch.as_tensor(mask).bool().all()):
        raise DataError(f"document {number} is padded (attention_mask); give each document alone, without padding=")
    tokens, kinds = (_row(made.get(name), number) for name in ("input_ids", "mm_token_type_ids"))
    pictures = {
        1: _pictures(made, number, "pixel_values", "image_grid_thw"),
        2: _pictures(made, number, "pixel_values_videos", "video_grid_thw"),
    }
    if not kinds:
        if any(pictures.values()):
            raise DataError(f"document {number} has pictures, but no mm_token_type_ids; ask the processor for them")
        return tokens, [], set()
    if len(kinds) != len(tokens):
        raise DataError(f"document {number} has {len(kinds)} mm_token_type_ids for {counted(len(tokens), 'token')}")
    ids = {kind: {token for token, each in zip(tokens, kinds, strict=True) if each == kind} for kind in (1, 2)}
    return tokens, list(_in_order(number, tokens, ids, pictures)), ids[1] | ids[2]


def _row(values: Any, number: int) -> list[int]:
    if values is None:
        return []
    found = torch.as_tensor(values)
    if found.dim() == 2 and len(found) == 1:
        found = found[0]
    if found.dim() != 1:
        raise DataError(f"document {number} has the shape {tuple(found.shape)}; give each document alone")
    out: list[int] = found.tolist()
    return out


def _pictures(made: Mapping[str, Any], number: int, pixels: str, grids: str) -> list[Picture]:
    if made.get(pixels) is None:
        return []
    shapes, values = torch.as_tensor(made.get(grids, [])), torch.as_tensor(made[pixels])
    if shapes.dim() != 2 or shapes.shape[1] != 3 or int(shapes.prod(1).sum()) != len(values):
        raise DataError(
            f"document {number} has {grids} {shapes.tolist()!s:.80} for {counted(len(values), 'patch', 'patches')} of "
            f"{pixels}; give both as the processor made them"
        )
    each = [(int(t), int(h), int(w)) for t, h, w in shapes.tolist()]
    return list(zip(values.split([t * h * w for t, h, w in each]), each, strict=True))


def _in_order(
    number: int, tokens: Sequence[int], ids: Mapping[int, set[int]], pictures: Mapping[int, list[Picture]]
) -> Iterator[Picture]:
    """Pictures and videos in the order of their places."""
    waiting = {kind: list(reversed(each)) for kind, each in pictures.items()}
    slices = 0  # of the video at hand that are still to come
    for start, num in runs_of(tokens, [*ids[1], *ids[2]]):
        kind = 1 if tokens[start] in ids[1] else 2
        left = num
        while left > 0:
            if kind == 1 or not slices:
                if not waiting[kind]:
                    raise DataError(f"document {number} has places at token {start} for which it has no pixels")
                picture = waiting[kind].pop()
                yield picture
                slices = picture[1][0] if kind == 2 else 0
                size = picture[1][1] * picture[1][2] // _MERGED**2
            left, slices = left - size, max(0, slices - 1)
    for kind, name in ((1, "picture"), (2, "video")):
        if waiting[kind]:
            raise DataError(f"document {number} has {counted(len(waiting[kind]), name)} without a place")
