"""A power cut, for the directory tree of a test.

A disk keeps what was synced to it: the bytes of a file at its last fsync, the names in a directory at the
directory's last fsync. Of all else it keeps any part. `Disk` watches a tree at each call that a program makes to change
names or to fsync, and `after_a_cut` makes trees that a cut at any of these moments could leave: each change of names
that is not yet on the disk kept or lost, each file that is not yet on it whole, torn, empty or as it was.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_WATCHED = ("fsync", "rename", "mkdir", "unlink", "rmdir")
_DRAWN = 6  # random states at each moment, in addition to those made by rule


@dataclass
class Name:
    """A change of a name in a directory: what it means from then on (None: nothing)."""

    name: str
    node: int | None


@dataclass
class Folder:
    now: dict[str, int] = field(default_factory=dict)
    on_disk: dict[str, int] = field(default_factory=dict)
    pending: list[list[Name]] = field(default_factory=list)  # those of a rename stand or fall together

    def left(self, kept: list[bool]) -> dict[str, int]:
        names = dict(self.on_disk)
        for change, stays in zip(self.pending, kept, strict=True):
            for each in change if stays else ():
                if each.node is None:
                    names.pop(each.name, None)
                else:
                    names[each.name] = each.node
        return names


@dataclass
class File:
    now: bytes = b""
    on_disk: bytes | None = None  # never there

    def left(self, fate: str) -> bytes:
        if self.now == self.on_disk or fate == "whole":
            return self.now
        if fate == "torn":
            return self.now[: len(self.now) // 2] + bytes(len(self.now) - len(self.now) // 2)
        return self.on_disk or b""


FATES = ("whole", "torn", "as it was")


class Disk:
    """`moments`: of each, all that is on the disk and all that may be. `promised`: what must stay from now on."""

    def __init__(self, root: Path) -> None:
        self.root, self.promised, self._held = root, 0, dict[int, int]()
        self.folders: dict[int, Folder] = {}
        self.files: dict[int, File] = {}
        self.moments: list[tuple[str, int, dict[int, Folder], dict[int, File]]] = []
        self.look()
        for folder in self.folders.values():
            folder.on_disk, folder.pending = dict(folder.now), []

    def watch(self, patch: Any) -> None:
        for name in _WATCHED:
            real = getattr(os, name)
            patch.setattr(
                os, name, lambda *args, _name=name, _real=real, **named: self._call(_name, _real, args, named)
            )

    def _call(self, name: str, real: Any, args: Any, named: Any) -> Any:
        self.look()
        self.note(f"before {name} {args[0]}")
        out = real(*args, **named)
        if name == "fsync":
            self._on_disk(os.fstat(args[0]).st_ino)
        self.look()
        return out

    def _on_disk(self, node: int) -> None:
        if node in self.files:
            self.files[node].on_disk = self.files[node].now
        elif node in self.folders:
            folder = self.folders[node]
            folder.on_disk, folder.pending = dict(folder.now), []

    def note(self, what: str) -> None:
        folders = {
            node: Folder(dict(folder.now), dict(folder.on_disk), list(folder.pending))
            for node, folder in self.folders.items()
        }
        self.moments.append(
            (what, self.promised, folders, {node: File(f.now, f.on_disk) for node, f in self.files.items()})
        )

    def look(self) -> None:
        """Record every change since the last look."""
        self._look(self.root)

    def _look(self, at: Path) -> int:
        node = self._node(at)
        if at.is_file():
            self.files.setdefault(node, File()).now = at.read_bytes()
            return node
        folder = self.folders.setdefault(node, Folder())
        now = {name: self._look(at / name) for name in sorted(os.listdir(at))}
        gone = {name: node for name, node in folder.now.items() if name not in now}
        for name, there in now.items():
            if folder.now.get(name) != there:
                before = [old for old, node in gone.items() if node == there]
                folder.pending.append([*(Name(old, None) for old in before), Name(name, there)])
                gone = {old: node for old, node in gone.items() if old not in before}
        folder.pending += [[Name(name, None)] for name in gone]
        folder.now = now
        return node

    def _node(self, at: Path) -> int:
        """Keep it open, so that no other file gets its number."""
        node = at.stat().st_ino
        if node not in self._held:
            self._held[node] = os.open(at, os.O_RDONLY)
        return node

    def close(self) -> None:
        while self._held:
            os.close(self._held.popitem()[1])

    def after_a_cut(self, into: Path) -> Iterator[tuple[str, int, Path]]:
        """Each tree that a cut could leave, as `into/N`, with its moment and what was promised by then."""
        drawn, seen = random.Random(5), set[Any]()
        for what, promised, folders, files in self.moments:
            for kept, fates in _choices(folders, files, drawn):
                tree = self._tree(self._node(self.root), folders, files, kept, fates)
                if (key := (promised, _key(tree))) not in seen:
                    seen.add(key)
                    at = into / str(len(seen))
                    _make(at, tree)
                    yield what, promised, at

    def _tree(self, node: int, folders: Any, files: Any, kept: Any, fates: Any) -> Any:
        if node in files:
            return files[node].left(fates[node])
        names = folders[node].left(kept[node])
        return {name: self._tree(inner, folders, files, kept, fates) for name, inner in names.items()}


def _choices(folders: dict[int, Folder], files: dict[int, File], drawn: random.Random) -> Iterator[Any]:
    """All names kept or lost, all but one, one alone, the first ones, some; with each fate of the files."""
    changes = [(node, at) for node, folder in folders.items() for at in range(len(folder.pending))]
    ways = [{*changes}, set[Any](), *({c} for c in changes), *({*changes} - {c} for c in changes)]
    ways += [set(changes[:num]) for num in range(1, len(changes))]
    ways += [{c for c in changes if drawn.random() < 0.5} for _ in range(_DRAWN)]
    for number, way in enumerate(ways):
        kept = {node: [(node, at) in way for at in range(len(f.pending))] for node, f in folders.items()}
        for fate in FATES if number < 2 else (FATES[number % 3],):
            yield kept, dict.fromkeys(files, fate)
        yield kept, {node: drawn.choice(FATES) for node in files}


def _key(tree: Any) -> Any:
    return hash(tree) if isinstance(tree, bytes) else tuple((name, _key(inner)) for name, inner in sorted(tree.items()))


def _make(at: Path, tree: Any) -> None:
    if isinstance(tree, bytes):
        at.write_bytes(tree)
        return
    at.mkdir()
    for name, inner in tree.items():
        _make(at / name, inner)
