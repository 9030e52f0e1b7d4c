"""Place images and videos at their placeholder tokens, and compute the 3-D positions (M-RoPE) of all tokens.

Images and videos are one list, in the order of their placeholders in the text. A video of t slices is t frames, each
with its own run of placeholders (Qwen3-VL puts a timestamp between); an image is one frame. Four patches merge into one
token.
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

PLACEHOLDERS = (151655, 151656, 248056, 248057)  # image and video placeholders: of Qwen3-VL, of Qwen3.5
_MERGED = 2  # spatial merge: 2 x 2 patches become one token
Grid = tuple[int, int, int]
ImagePatches = tuple[Tensor, Grid]  # patches, and their numbers in time, height and width


@dataclass(frozen=True)
class Frame:
    """`height` and `width` in patches; `start` is its first placeholder in the stream."""

    height: int
    width: int
    start: int

    @property
    def num_patches(self) -> int:
        """Return the number of patches."""
        return self.height * self.width

    @property
    def num_tokens(self) -> int:
        """Return the number of placeholder tokens."""
        return self.num_patches // _MERGED**2

    @property
    def stop(self) -> int:
        """Return the position after its last placeholder."""
        return self.start + self.num_tokens

    @property
    def tokens(self) -> range:
        """Return the positions of its placeholders."""
        return range(self.start, self.stop)


@dataclass(frozen=True, eq=False)  # eq would ask tensors for one truth value
class Images:
    """The patches of all frames of a batch, in the order of the frames."""

    patches_PC: Tensor
    frames: tuple[Frame, ...]

    def __post_init__(self) -> None:
        patches, frames = self.patches_PC, self.frames
        if patches.dim() != 2 or len(patches) != sum(f.num_patches for f in frames):
            raise DataError("the patches of a batch must be a row for each patch of its frames; use mw.pack(images=)")
        if any(a.stop > b.start for a, b in pairwise(frames)):
            raise DataError("the frames of a batch must be in the order of their places; use mw.pack(images=)")

    def of(self, numbers: Sequence[int]) -> Tensor:
        """Return the patches of the frames with these numbers."""
        # `patches[:0]` keeps dtype and width when no frame is selected.
        parts = self.patches_PC.split([frame.num_patches for frame in self.frames])
        return torch.cat([self.patches_PC[:0], *(parts[number] for number in numbers)])

    def within(self, start: int, stop: int, to: int) -> Images:
        """Return the frames of a range of the stream, moved so that the range begins at token `to`.

        Used when documents are redistributed over micro-batches: images follow their document.
        """
        numbers = [number for number, frame in enumerate(self.frames) if start <= frame.start < stop]
        frames = tuple(replace(f, start=f.start - start + to) for f in (self.frames[number] for number in numbers))
        return Images(self.of(numbers), frames)


def joined_images(parts: Sequence[Images]) -> Images | None:
    """Concatenate the images of parts of a stream; None if there are none."""
    frames = tuple(frame for part in parts for frame in part.frames)
    return Images(torch.cat([part.patches_PC for part in parts]), frames) if frames else None


def turns_of(bounds: Sequence[int], frames: Sequence[Frame]) -> Tensor:
    """Return the position of each token in time, height and width, `[T, 3]`: M-RoPE of Qwen2-VL (arXiv:2409.12191).

    Positions begin at 0 in each document. A text token has the same number in all three, the next free one. The tokens
    of a frame share their time; height and width add the row and column. After a frame of h x w tokens the next free
    number is max(h, w) further. If they were computed over the whole packed stream, positions would be wrong from the
    second document on.

    Example: two text tokens, an image of 4 x 4 patches (2 x 2 tokens), a text token:

      token     t  t  i  i  i  i  t
      time      0  1  2  2  2  2  4
      height    0  1  2  2  3  3  4
      width     0  1  2  3  2  3  4
    """
    turns_T3 = torch.empty(bounds[-1], 3, dtype=torch.int64)
    remaining = list(reversed(frames))
    for start, stop in pairwise(bounds):
        position, next_position = start, 0
        while position < stop:
            frame = remaining[-1] if remaining and remaining[-1].start < stop else None
            num_text = (frame.start if frame else stop) - position
            turns_T3[position : position + num_text] = torch.arange(next_position, next_position + num_text)[:, None]
            position, next_position = position + num_text, next_position + num_text
            if frame:
                turns_T3[position : frame.stop] = next_position + _grid(frame)
                position, next_position = frame.stop, next_position + max(frame.height, frame.width) // _MERGED
                remaining.pop()
    return turns_T3


def _grid(frame: Frame) -> Tensor:
    """Return time, row and column of each token of a frame."""
    sizes = (1, frame.height // _MERGED, frame.width // _MERGED)
    return torch.stack(torch.meshgrid(*map(torch.arange, sizes), indexing="ij"), -1).view(-1, 3)


def images_of(
    documents: Sequence[Sequence[int]], images: Sequence[Sequence[ImagePatches]], placeholders: Sequence[int]
) -> Images | None:
    """Return the images of all documents, each frame at its placeholders.

    The number of placeholders is fixed by the size of an image, so text and pixels must come from one processor with
    one setting. Everything is checked on the host before the model runs, because a mismatch inside the model would be
    an index error on one rank and a hang on all others.
    """
    if not isinstance(images, list | tuple) or not all(isinstance(each, list | tuple) for each in images):
        raise DataError("images must be a list of lists: of each document its images, [] where it has none")
    if len(images) != len(documents):
        raise DataError(
            f"images: {counted(len(images), 'list')} for {counted(len(documents), 'document')}; give one for each "
            "document, [] where it has none"
        )
    patches, frames, doc_start = list[Tensor](), list[Frame](), 0
    for number, (document, doc_images) in enumerate(zip(documents, images, strict=True)):
        doc_patches, sizes = _check_images(number, doc_images)
        patches += doc_patches
        frames += [replace(f, start=doc_start + f.start) for f in _place_frames(number, document, sizes, placeholders)]
        doc_start += len(document)
    # All patches of a batch are one tensor, so they must agree in dtype and patch size.
    if len({(p.dtype, p.shape[1]) for p in patches}) > 1:
        kinds = ", ".join(sorted({f"{p.dtype} [..., {p.shape[1]}]" for p in patches}))
        raise DataError(f"the images of a batch differ: {kinds}; give all as one processor makes them")
    return Images(torch.cat(patches), tuple(frames)) if frames else None


def _check_images(number: int, images: Sequence[ImagePatches]) -> tuple[list[Tensor], list[tuple[int, int]]]:
    """Return the patches of a document's images, and the sizes of its frames."""
    patches, sizes = [], []
    for which, image in enumerate(images):
        name = f"image {which} of document {number}"
        try:
            pixels, grid = image
            # `operator.index` refuses floats: a size of 16.0 would pass arithmetic checks and fail in the model.
            pixels, (time, height, width) = torch.as_tensor(pixels), (operator.index(each) for each in _as_list(grid))
        except (TypeError, ValueError):
            raise DataError(f"{name} must be (pixels, (time, height, width)), as a processor gives them") from None
        if time < 1 or min(height, width) < _MERGED or height % _MERGED or width % _MERGED:
            raise DataError(
                f"{name} has {time} x {height} x {width} patches; height and width must be even, and at least {_MERGED}"
            )
        if pixels.dim() != 2 or len(pixels) != time * height * width:
            raise DataError(
                f"the pixels of {name} have the shape {tuple(pixels.shape)} for {time} x {height} x {width} patches; "
                "give one row per patch"
            )
        if not pixels.is_floating_point() and pixels.dtype != torch.uint8:
            raise DataError(f"the pixels of {name} are {pixels.dtype}; give floating point numbers, or uint8")
        if pixels.requires_grad:
            raise DataError(f"the pixels of {name} require grad, and a batch is data; give pixels.detach()")
        patches.append(pixels)
        sizes += [(height, width)] * time
    return patches, sizes


def _as_list(grid: Any) -> Any:
    """Return the list of a numpy array or tensor; anything else unchanged."""
    return grid.tolist() if hasattr(grid, "tolist") else grid


def ids_of(placeholders: Any) -> tuple[int, ...]:
    """Return placeholder token ids as a tuple."""
    try:
        return tuple(operator.index(token) for token in _as_list(placeholders))
    except TypeError:
        raise DataError(f"placeholders={placeholders!r:.80} must be a list of token ids") from None


def runs_of(document: Sequence[int], placeholders: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield runs of equal placeholder tokens: start and length. Images and videos form separate runs."""
    at = 0
    for token, same in groupby(document):
        run_length = sum(1 for _ in same)
        if token in placeholders:
            yield at, run_length
        at += run_length


def _place_frames(
    number: int, document: Sequence[int], sizes: Sequence[tuple[int, int]], placeholders: Sequence[int]
) -> Iterator[Frame]:
    """Assign frames to runs of placeholders, run by run. Checking only the total would let swapped images pass."""
    remaining = list(reversed(sizes))
    for start, num in runs_of(document, placeholders):
        at = start
        while at < start + num:
            if not remaining:
                raise DataError(
                    f"document {number} has {counted(num, 'placeholder')} at token {start}, but its "
                    f"{counted(len(sizes), 'frame')} end before token {at}; give all its images, in the order of "
                    f"their placeholders. If {document[at]} is an ordinary token of this model, name the "
                    "placeholder tokens: placeholders="
                )
            frame = Frame(*remaining.pop(), at)
            # A frame must fit into one run: placeholders of two images are always separated by their start and end
            # tokens.
            if frame.stop > start + num:
                raise DataError(
                    f"frame {len(sizes) - len(remaining) - 1} of document {number} has {frame.height} x {frame.width} "
                    f"patches and takes {counted(frame.num_tokens, 'placeholder')}, but {start + num - at} are left of "
                    f"the {num} at token {start}; images must be in the order of their placeholders, in the sizes "
                    "for which the text was made"
                )
            yield frame
            at = frame.stop
    if remaining:
        raise DataError(
            f"document {number} has {counted(len(sizes), 'frame')}, but placeholders for {len(sizes) - len(remaining)} "
            f"of them; check that {list(placeholders)} are the placeholder tokens (placeholders=)"
        )


_USED = ("input_ids", "pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw", "mm_token_type_ids")
_IGNORED = ("attention_mask", "second_per_grid_ts", "token_type_ids")


def are_of_processor(output: Mapping[str, Any]) -> bool:
    """Return whether a dict is the output of a multimodal processor, not of a tokenizer."""
    return "mm_token_type_ids" in output or any(name.startswith("pixel_values") for name in output)


def of_processor(output: Mapping[str, Any], number: int) -> tuple[list[int], list[ImagePatches], set[int]]:
    """Return tokens, images and placeholder ids from the output of a Hugging Face processor for one document.

    The output has tensors over all images (`pixel_values [patches, C]`, `image_grid_thw [n, 3]`) and separate ones
    for videos; mm_token_type_ids gives the kind of each token.
    """
    unknown = sorted(set(output) - {*_USED, *_IGNORED})
    if unknown or "input_ids" not in output:
        raise DataError(
            f"document {number} is a dict with {', '.join(sorted(output))}; of a processor's output the fields "
            f"{', '.join(_USED)} are used"
        )
    mask = output.get("attention_mask")
    if mask is not None and not bool(torch.as_tensor(mask).bool().all()):
        raise DataError(f"document {number} is padded (attention_mask); give each document alone, without padding=")
    tokens, kinds = (_row(output.get(name), number) for name in ("input_ids", "mm_token_type_ids"))
    images = {
        1: _images(output, number, "pixel_values", "image_grid_thw"),
        2: _images(output, number, "pixel_values_videos", "video_grid_thw"),
    }
    if not kinds:
        if any(images.values()):
            raise DataError(f"document {number} has images, but no mm_token_type_ids; ask the processor for them")
        return tokens, [], set()
    if len(kinds) != len(tokens):
        raise DataError(f"document {number} has {len(kinds)} mm_token_type_ids for {counted(len(tokens), 'token')}")
    # mm_token_type_ids marks image tokens 1 and video tokens 2, so the placeholder ids need not be known.
    ids = {kind: {token for token, each in zip(tokens, kinds, strict=True) if each == kind} for kind in (1, 2)}
    return tokens, list(_in_order(number, tokens, ids, images)), ids[1] | ids[2]


def _row(values: Any, number: int) -> list[int]:
    """Return a 1-D list; a batch of one document is accepted."""
    if values is None:
        return []
    values_1d = torch.as_tensor(values)
    if values_1d.dim() == 2 and len(values_1d) == 1:
        values_1d = values_1d[0]
    if values_1d.dim() != 1:
        raise DataError(f"document {number} has the shape {tuple(values_1d.shape)}; give each document alone")
    ids: list[int] = values_1d.tolist()
    return ids


def _images(output: Mapping[str, Any], number: int, pixel_name: str, grid_name: str) -> list[ImagePatches]:
    """Split the concatenated pixels of a processor by its grids."""
    if output.get(pixel_name) is None:
        return []
    shapes, values = torch.as_tensor(output.get(grid_name, [])), torch.as_tensor(output[pixel_name])
    if shapes.dim() != 2 or shapes.shape[1] != 3 or int(shapes.prod(1).sum()) != len(values):
        raise DataError(
            f"document {number} has {grid_name} {shapes.tolist()!s:.80} for "
            f"{counted(len(values), 'patch', 'patches')} of {pixel_name}; give both as the processor made them"
        )
    shapes_list = [(int(t), int(h), int(w)) for t, h, w in shapes.tolist()]
    return list(zip(values.split([t * h * w for t, h, w in shapes_list]), shapes_list, strict=True))


def _in_order(
    number: int, tokens: Sequence[int], ids: Mapping[int, set[int]], images: Mapping[int, list[ImagePatches]]
) -> Iterator[ImagePatches]:
    """Yield images and videos in the order of their placeholders: the processor returns them as two separate lists."""
    remaining = {kind: list(reversed(each)) for kind, each in images.items()}
    slices_left = 0  # remaining slices of the current video
    for start, num in runs_of(tokens, [*ids[1], *ids[2]]):
        kind = 1 if tokens[start] in ids[1] else 2
        places_left = num
        while places_left > 0:
            # An image starts at each run. A video has one run for each slice, so only its first run takes the next
            # video.
            if kind == 1 or not slices_left:
                if not remaining[kind]:
                    raise DataError(f"document {number} has placeholders at token {start} without pixels for them")
                image = remaining[kind].pop()
                yield image
                slices_left = image[1][0] if kind == 2 else 0
                places_of_slice = image[1][1] * image[1][2] // _MERGED**2
            places_left, slices_left = places_left - places_of_slice, max(0, slices_left - 1)
    for kind, name in ((1, "image"), (2, "video")):
        if remaining[kind]:
            raise DataError(f"document {number} has {counted(len(remaining[kind]), name)} without placeholders")
