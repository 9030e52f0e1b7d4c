"""Images and videos of a chat message, named by path or URL, in the formats of OpenAI, Qwen, LLaMA-Factory and others.

All of these name the same image:

  {"type": "image", "image": "a.png"}
  {"type": "image_url", "image_url": {"url": "a.png"}}
  "<image> What is this?"  with  "images": ["a.png"]  in the row
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from ..errors import DataError, counted
from .json_values import kind_of

Part = dict[str, Any]  # {"type": "text", "text": ...}, {"type": "image", "image": path} or {"type": "video", ...}

A = {"image": "an image", "video": "a video"}
_PATHS = {"image": ("image", "path", "url"), "video": ("video", "path", "url")}
_NESTED = {"image_url": "image", "video_url": "video"}  # {"type": "image_url", "image_url": {"url": path}}
_LISTS = {"image": ("images", "image"), "video": ("videos", "video")}  # of a row: what its messages show, in order
_MARK = re.compile("(<image>|<video>)")  # in a text, one of these lists


class Attachments:
    """The images and videos of a row that its messages refer to only by order (`<image>` in a text).

    LLaMA-Factory and ms-swift keep the paths in lists of the row, in the order of the marks in all messages.
    """

    def __init__(self, row: Mapping[str, Any]) -> None:
        self.left = {kind: _listed(row, names) for kind, names in _LISTS.items()}
        self.num = {kind: len(left) for kind, left in self.left.items()}

    def next(self, kind: str, number: int) -> Any:
        """Return the next image or video of the row."""
        if not self.left[kind]:
            raise DataError(
                f"message {number} shows one more {kind} than the row has: {self.num[kind]} in {_LISTS[kind][0]!r}"
            )
        return self.left[kind].pop(0)

    def check_all_shown(self) -> None:
        """Raise if the row has images or videos that no message shows: training on the text alone would teach the model
        to guess."""
        for kind, left in self.left.items():
            if left:
                raise DataError(
                    f"the row has {counted(self.num[kind], kind)}, and its messages show {self.num[kind] - len(left)}; "
                    f"each has a part {{'type': '{kind}'}} or <{kind}> in a text"
                )

    def parts(self, content: Any, number: int) -> Any:
        """Return the content of a message: text, or a list of parts if it shows something."""
        if isinstance(content, str):
            return self._in_text(content, number) if any(self.num.values()) else content
        if not isinstance(content, list) or not all(isinstance(part, Mapping) for part in content):
            return content
        part_list = [each for part in content for each in self._part(part, number)]
        return (
            part_list
            if any(part["type"] != "text" for part in part_list)
            else "".join(part["text"] for part in part_list)
        )

    def _part(self, part: Mapping[str, Any], number: int) -> list[Part]:
        """Parse one part."""
        kind = str(part.get("type"))
        kind = _NESTED.get(kind, kind)
        if kind == "text":
            text = self._in_text(str(part.get("text") or ""), number) if any(self.num.values()) else None
            return text if isinstance(text, list) else [{"type": "text", "text": str(part.get("text") or "")}]
        # A template that does not know audio and files would drop them silently.
        if kind not in _PATHS:
            raise DataError(f"message {number} holds {part.get('type')!r}; only text, images and videos are supported")
        paths = [_unwrapped(part[name]) for name in (*_NESTED, *_PATHS[kind]) if part.get(name)]
        path = _path(paths[0] if paths else self.next(kind, number), kind, number)
        extra = {"fps": _rate(part["fps"], number)} if kind == "video" and part.get("fps") else {}
        return [{"type": kind, kind: path, **extra}]

    def _in_text(self, text: str, number: int) -> Any:
        """Split a text at `<image>` and `<video>`."""
        pieces = [piece for piece in _MARK.split(text) if piece]
        if not any(_MARK.fullmatch(piece) for piece in pieces):
            return text
        part_list = list[Part]()
        for piece in pieces:
            kind = piece[1:-1] if _MARK.fullmatch(piece) else ""
            path = _path(self.next(kind, number), kind, number) if kind else piece
            part_list.append({"type": kind, kind: path} if kind else {"type": "text", "text": piece})
        return part_list


def _rate(value: Any, number: int) -> float:
    """Check the frame rate of a video given as images."""
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise DataError(f"message {number} shows a video with fps={value!r:.50}; it must be a number above 0")
    return float(value)


def _listed(row: Mapping[str, Any], names: tuple[str, ...]) -> list[Any]:
    """Return a field as a list."""
    value: Any = next((row[name] for name in names if row.get(name)), [])
    return list(value) if isinstance(value, list | tuple) else [value]


def _unwrapped(value: Any) -> Any:
    """Return the path inside an object such as `{"url": ...}`."""
    return (value.get("url") or value.get("path") or value) if isinstance(value, Mapping) else value


def _path(value: Any, kind: str, number: int) -> Any:
    """Return a path; for a video it may be a list of image paths."""
    value = _unwrapped(value)
    if kind == "video" and isinstance(value, list | tuple):
        return [_path(each, "image", number) for each in value]
    if not isinstance(value, str):
        raise DataError(
            f"message {number} shows {A[kind]} that is {kind_of(value)}, not a path; write it to a file next to the "
            "data, and give its path"
        )
    return value
