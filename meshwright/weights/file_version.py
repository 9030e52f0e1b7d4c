"""A file that is opened more than once must be the same file each time: its stamp is taken from what is read.

A writer that replaces files, or writes into them, while we read would leave us a mixture of two versions. A path says
nothing of that; a descriptor does. Not seen is a writer who leaves size and time of change as they were in a file that
he writes into, and two writes within one tick of the file system's clock.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import BrokenFile, LoadError


@dataclass(frozen=True)
class Stamp:
    """What tells one version of a file from another."""

    inode: int
    num_bytes: int
    changed_ns: int

    def change_to(self, now: Stamp) -> str:
        """What differs, in words."""
        if now.inode != self.inode:
            return f"it is another file now (inode {now.inode}, it was {self.inode})"
        if now.num_bytes != self.num_bytes:
            return f"it has {now.num_bytes} bytes now, it had {self.num_bytes}"
        seconds, rest = divmod(self.changed_ns, 10**9)
        return (
            f"it was written into, or touched, {(now.changed_ns - self.changed_ns) / 1e9:.3f} s after the version that "
            f"was read (if it was only touched, `touch -d @{seconds}.{rest:09} FILE` gives it back its time)"
        )


@dataclass(frozen=True)
class Opened:
    """A regular file, open for reading."""

    path: Path
    fd: int
    stamp: Stamp

    def refuse_other_than(self, was: Stamp, way_out: str) -> None:
        if self.stamp != was:
            raise LoadError(f"{self.path} has changed since it was first read: {was.change_to(self.stamp)}; {way_out}")

    def bytes_at(self, start: int, length: int) -> bytes:
        """All of them, or an error."""
        parts, at = [], start
        try:
            while at < start + length and (part := os.pread(self.fd, start + length - at, at)):
                parts.append(part)
                at += len(part)
        except OSError as error:
            raise BrokenFile(
                f"{self.path} cannot be read: {error.strerror}; check its permissions and its disk"
            ) from error
        if at != start + length:
            raise BrokenFile(f"{self.path} ended at byte {at} of {start + length} while it was read; fetch it again")
        return b"".join(parts)


def open_file(path: Path) -> Opened:
    """Whatever else has the name (a directory, a pipe, a broken link) is refused. The caller closes it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would wait for a writer
    except OSError as error:
        raise BrokenFile(
            f"{path} cannot be read: {error.strerror}; fetch it again, mend the link, or check its permissions"
        ) from error
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        os.close(fd)
        raise BrokenFile(f"{path} is no regular file; put the file itself there, or a link to it")
    return Opened(path, fd, Stamp(found.st_ino, found.st_size, found.st_mtime_ns))


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Opened]:
    file = open_file(path)
    try:
        yield file
    finally:
        os.close(file.fd)
