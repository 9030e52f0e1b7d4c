"""The small files beside the weights of a model (tokenizer, templates, configs), as they were when it was loaded.

A save or an export that copied them from the directory of the model would take what stands there by then: files that
somebody changed, or none. So their bytes are kept by the rank that writes them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import LoadError
from ..ops.part_sizes import part_size
from .file_version import Stamp, opened

# What a tokenizer, a processor or a reader needs.
_ENDINGS = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".bpe", ".py", ".md", "LICENSE", "NOTICE")
# Of a checkpoint. It may be the source, but they are of no other one: a manifest beside new data would vouch for them.
MANIFEST, TRAINER = "meshwright.json", "trainer.json"
_TEMPLATES = "additional_chat_templates"
_KEPT_BYTES = 64 << 20  # of one file: the largest tokenizers have half of it
_COPY_BYTES = part_size(__name__, "_COPY_BYTES", 16 << 20, small=1001)
_LOAD_AGAIN = "put the earlier one back (a copy is another file), or load the model again"


@dataclass(frozen=True)
class SmallFiles:
    """`kept`: bytes by name. `large`: the version of a file that is too large to be kept, and is copied from
    `directory`. `unreadable`: why a file was not read, which only a writer has to know."""

    directory: Path
    kept: Mapping[str, bytes] = field(default_factory=dict)
    large: Mapping[str, Stamp] = field(default_factory=dict)
    unreadable: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return sorted([*self.kept, *self.large, *self.unreadable])

    def check(self) -> None:
        """Refuse what could not be written."""
        for why in self.unreadable.values():
            raise LoadError(f"{why}, and load the model again")
        for name, stamp in self.large.items():
            with opened(self.directory / name) as file:
                file.refuse_other_than(stamp, _LOAD_AGAIN)

    def write(self, target: Path) -> None:
        self.check()
        for name in (*self.kept, *self.large):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
        for name, data in self.kept.items():
            (target / name).write_bytes(data)
        for name, stamp in self.large.items():
            with opened(self.directory / name) as file, (target / name).open("wb") as out:
                for at in range(0, stamp.num_bytes, _COPY_BYTES):
                    out.write(file.bytes_at(at, min(stamp.num_bytes - at, _COPY_BYTES)))
        self.check()  # none was written into meanwhile


def read_small(directory: Path) -> SmallFiles:
    """Read the small files that lie in a model directory now."""
    kept, large, unreadable = dict[str, bytes](), dict[str, Stamp](), dict[str, str]()
    for path in _paths(directory):
        name = str(path.relative_to(directory))
        try:
            found = _read(path)
        except (LoadError, PermissionError, FileNotFoundError) as error:
            unreadable[name] = str(error)
            continue
        if isinstance(found, bytes):
            kept[name] = found
        elif found is not None:
            large[name] = found
    return SmallFiles(directory, kept, large, unreadable)


def _read(path: Path) -> bytes | Stamp | None:
    """The bytes of a file, the version of a large one, nothing of a directory."""
    if path.is_symlink() and not path.exists():
        raise FileNotFoundError(f"{path} is a link to what is not there; mend or remove it")
    if not os.access(path, os.R_OK):
        raise PermissionError(f"{path} is to be copied and cannot be read; change its mode")
    if not path.is_file():
        return None
    with opened(path) as file:
        size = file.stamp.num_bytes
        return file.stamp if size > _KEPT_BYTES else file.bytes_at(0, size)


def _paths(directory: Path) -> Iterator[Path]:
    others = (MANIFEST, TRAINER)
    top = [path for path in directory.iterdir() if path.name.endswith(_ENDINGS) and path.name not in others]
    found = sorted([*top, *(directory / _TEMPLATES).rglob("*")])
    yield from (path for path in found if not path.name.endswith(".index.json"))
