"""The small files of a model (tokenizer, chat template, image processor, configs), as they were when it was loaded.

If an export copied them from the source directory at the end of a run, they might have changed by then. So the writing
rank keeps their bytes from the start.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import LoadError
from ..ops.part_sizes import part_size
from .file_version import Stamp, opened

# Files that a tokenizer, an image processor or a human reader needs.
_ENDINGS = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".bpe", ".py", ".md", "LICENSE", "NOTICE")
# Files of a checkpoint, never copied from the source: an old manifest next to new weights would seem to describe them.
MANIFEST, TRAINER = "meshwright.json", "trainer.json"
MODULES = "modules.json"  # of sentence-transformers
_TEMPLATES = "additional_chat_templates"
_KEPT_BYTES = 64 << 20  # the largest tokenizer.json files have half of this
_COPY_BYTES = part_size(__name__, "_COPY_BYTES", 16 << 20, small=1001)
_LOAD_AGAIN = "put the old file back (a copy has another inode and will not do), or load the model again"


@dataclass(frozen=True)
class SmallFiles:
    """Small files by name. `kept`: their bytes. `large`: the version of a file too large to keep, copied from
    `directory`. `unreadable`: why a file could not be read, which is an error only for an export."""

    directory: Path
    kept: Mapping[str, bytes] = field(default_factory=dict)
    large: Mapping[str, Stamp] = field(default_factory=dict)
    unreadable: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """Return the names of all files that an export writes."""
        return sorted([*self.kept, *self.large, *self.unreadable])

    def check(self) -> None:
        """Raise if a file can no longer be written as it was at load."""
        for reason in self.unreadable.values():
            raise LoadError(f"{reason}, and load the model again")
        for name, stamp in self.large.items():
            with opened(self.directory / name) as file:
                file.refuse_other_than(stamp, _LOAD_AGAIN)

    def write(self, target: Path) -> None:
        """Write the files into a directory.

        The files are checked before and after: a large file that changes during the copy must not end up half old and
        half new.
        """
        self.check()
        for name in (*self.kept, *self.large):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
        for name, data in self.kept.items():
            (target / name).write_bytes(data)
        for name, stamp in self.large.items():
            with opened(self.directory / name) as file, (target / name).open("wb") as out:
                for at in range(0, stamp.num_bytes, _COPY_BYTES):
                    out.write(file.bytes_at(at, min(stamp.num_bytes - at, _COPY_BYTES)))
        self.check()  # again: a file may have been written into during the copy


def read_small(directory: Path) -> SmallFiles:
    """Read the small files of a model directory.

    An unreadable file is an error only for an export: a model can be loaded without its README.
    """
    kept, large, unreadable = dict[str, bytes](), dict[str, Stamp](), dict[str, str]()
    for path in _paths(directory):
        name = str(path.relative_to(directory))
        try:
            content = _read(path)
        except (LoadError, PermissionError, FileNotFoundError) as error:
            unreadable[name] = str(error)
            continue
        if isinstance(content, bytes):
            kept[name] = content
        elif content is not None:
            large[name] = content
    return SmallFiles(directory, kept, large, unreadable)


def _read(path: Path) -> bytes | Stamp | None:
    """Return a file's bytes, the version of a large file, or None for a directory."""
    if path.is_symlink() and not path.exists():
        raise FileNotFoundError(f"{path} is a broken link; repair or remove it")
    if not os.access(path, os.R_OK):
        raise PermissionError(f"{path} would be copied to the export, but cannot be read; change its mode")
    if not path.is_file():
        return None
    with opened(path) as file:
        size = file.stamp.num_bytes
        return file.stamp if size > _KEPT_BYTES else file.bytes_at(0, size)


def _paths(directory: Path) -> Iterator[Path]:
    """Yield the small files. An index is not one: the export writes its own."""
    checkpoint_files = (MANIFEST, TRAINER)
    candidates = [
        path for path in directory.iterdir() if path.name.endswith(_ENDINGS) and path.name not in checkpoint_files
    ]
    folders = [directory / name for name in (_TEMPLATES, *_module_folders(directory))]
    paths = sorted({*candidates, *(path for folder in folders for path in folder.rglob("*"))})
    yield from (path for path in paths if not path.name.endswith(".index.json"))


def _module_folders(directory: Path) -> Iterator[str]:
    """Yield the folders that modules.json of sentence-transformers names, such as `1_Pooling`: an embedding model
    without them would pool and normalise differently. A file of another form names no folders."""
    try:
        modules = json.loads((directory / MODULES).read_bytes())
    except (OSError, ValueError):
        return
    for module in modules if isinstance(modules, list) else []:
        name = module.get("path") if isinstance(module, dict) else None
        # A link or `..` would copy files from elsewhere on this machine.
        if isinstance(name, str) and name and name == Path(name).name and not (directory / name).is_symlink():
            yield name
