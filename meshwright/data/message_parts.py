"""What messages show beside text: pictures and videos by path, in the layouts that people have."""

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
    """The pictures and videos of a row that its messages name only by their order."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        self.left = {kind: _listed(row, names) for kind, names in _LISTS.items()}
        self.num = {kind: len(left) for kind, left in self.left.items()}

    def next(self, kind: str, number: int) -> Any:
        if not self.left[kind]:
            raise DataError(
                f"message {number} shows one more {kind} than the row has: {self.num[kind]} in {_LISTS[kind][0]!r}"
            )
        return self.left[kind].pop(0)

    def check_all_shown(self) -> None:
        for kind, left in self.left.items():
            if left:
                raise DataError(
                    f"the row has {counted(self.num[kind], kind)}, and its messages show {self.num[kind] - len(left)}; "
                    f"each has a part {{'type': '{kind}'}} or <{kind}> in a text"
                )

    def parts(self, content: Any, number: int) -> Any:
        """The content of a message: a text, or parts if it shows something."""
        if isinstance(content, str):
            return self._in_text(content, number) if any(self.num.values()) else content
        if not isinstance(content, list) or not all(isinstance(part, Mapping) for part in content):
            return content
        found = [each for part in content for each in self._part(part, number)]
        return found if any(part["type"] != "text" for part in found) else "".join(part["text"] for part in found)

    def _part(self, part: Mapping[str, Any], number: int) -> list[Part]:
        kind = str(part.get("type"))
        kind = _NESTED.get(kind, kind)
        if kind == "text":
            text = self._in_text(str(part.get("text") or ""), number) if any(self.num.values()) else None
            return text if isinstance(text, list) else [{"type": "text", "text": str(part.get("text") or "")}]
        if kind not in _PATHS:
            raise DataError(f"message {number} holds {part.get('type')!r}; text, pictures and videos can be trained on")
        named = [_unwrapped(part[name]) for name in (*_NESTED, *_PATHS[kind]) if part.get(name)]
        path = _path(named[0] if named else self.next(kind, number), kind, number)
        more = {"fps": _rate(part["fps"], number)} if kind == "video" and part.get("fps") else {}
        return [{"type": kind, kind: path, **more}]

    def _in_text(self, text: str, number: int) -> Any:
        pieces = [piece for piece in _MARK.split(text) if piece]
        if not any(_MARK.fullmatch(piece) for piece in pieces):
            return text
        found = list[Part]()
        for piece in pieces:
            kind = piece[1:-1] if _MARK.fullmatch(piece) else ""
            path = _path(self.next(kind, number), kind, number) if kind else piece
            found.append({"type": kind, kind: path} if kind else {"type": "text", "text": piece})
        return found


def _rate(given: Any, number: int) -> float:
    if not isinstance(given, int | float) or not 0 < given < math.inf:
        raise DataError(f"message {number} shows a video with fps={given!r:.50}; it must be a number above 0")
    return float(given)


def _listed(row: Mapping[str, Any], names: tuple[str, ...]) -> list[Any]:
    given: Any = next((row[name] for name in names if row.get(name)), [])
    return list(given) if isinstance(given, list | tuple) else [given]


def _unwrapped(given: Any) -> Any:
    """Some have the path in an object of its own."""
    return (given.get("url") or given.get("path") or given) if isinstance(given, Mapping) else given


def _path(given: Any, kind: str, number: int) -> Any:
    """A path; of a video it may be a list of those of its pictures."""
    given = _unwrapped(given)
    if kind == "video" and isinstance(given, list | tuple):
        return [_path(each, "image", number) for each in given]
    if not isinstance(given, str):
        raise DataError(
            f"message {number} shows {A[kind]} that is {kind_of(given)}, not a path; write it as a file beside "
            "the data, and name that"
        )
    return given
