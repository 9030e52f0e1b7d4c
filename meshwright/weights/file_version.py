"""Notice when a model file changes between two reads: compare inode, size and modification time of the open descriptor.

A model is read in several passes: headers, then rows, then carried tensors at export, maybe days later. Another job may
replace the files meanwhile, and a mixture of two versions loads without an error. The path stays the same, but `fstat`
of the open descriptor shows the change.

Limits: a write in place that restores size and mtime goes unnoticed. So does the second of two writes within one tick
of the file system's clock.
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
    """The identity of one version of a file: inode, size and modification time."""

    inode: int
    num_bytes: int
    changed_ns: int

    def change_to(self, now: Stamp) -> str:
        """Describe how another version differs from this one.

        A tool may have touched the file without changing its content. For that case the text includes the `touch -d`
        command that restores the modification time to the nanosecond.
        """
        if now.inode != self.inode:
            return f"it is another file now (inode {now.inode}, it was {self.inode})"
        if now.num_bytes != self.num_bytes:
            return f"it has {now.num_bytes} bytes now, it had {self.num_bytes}"
        seconds, nanoseconds = divmod(self.changed_ns, 10**9)
        return (
            f"it was written into, or touched, {(now.changed_ns - self.changed_ns) / 1e9:.3f} s after the version that "
            f"was read (if it was only touched, restore its time with `touch -d @{seconds}.{nanoseconds:09} FILE`)"
        )


@dataclass(frozen=True)
class Opened:
    """A regular file, open for reading, with its version."""

    path: Path
    fd: int
    stamp: Stamp

    def refuse_other_than(self, expected: Stamp, fix: str) -> None:
        """Raise LoadError if the file is not the `expected` version. The message ends with `fix`.

        The message names the difference and how to undo it. A `cp -r` without `-p`, or a `touch`, changes only the
        time. Such a file is refused too, since only reading all of it would prove that its content is equal.
        """
        if self.stamp != expected:
            raise LoadError(f"{self.path} has changed since it was first read: {expected.change_to(self.stamp)}; {fix}")

    def bytes_at(self, start: int, length: int) -> bytes:
        """Return exactly `length` bytes from `start`, or raise BrokenFile."""
        chunks, at = [], start
        try:
            while at < start + length and (chunk := os.pread(self.fd, start + length - at, at)):
                chunks.append(chunk)
                at += len(chunk)
        except OSError as error:
            raise BrokenFile(
                f"{self.path} cannot be read: {error.strerror}; check its permissions and its disk"
            ) from error
        if at != start + length:
            raise BrokenFile(f"{self.path} ended at byte {at} of {start + length} while it was read; fetch it again")
        return b"".join(chunks)


def open_file(path: Path) -> Opened:
    """Open a regular file; the caller closes it. Raise BrokenFile for a directory, a pipe or a broken link.

    The version comes from the descriptor, not from the path. So it always belongs to the file that is open.
    """
    try:
        fd = os.open(
            path, os.O_RDONLY | os.O_NONBLOCK
        )  # opening a named pipe would otherwise block until a process opens it for writing
    except OSError as error:
        raise BrokenFile(
            f"{path} cannot be read: {error.strerror}; fetch it again, repair the link, or check its permissions"
        ) from error
    stat_result = os.fstat(fd)
    if not stat.S_ISREG(stat_result.st_mode):
        os.close(fd)
        raise BrokenFile(f"{path} is not a regular file; put the file itself there, or a link to it")
    return Opened(path, fd, Stamp(stat_result.st_ino, stat_result.st_size, stat_result.st_mtime_ns))


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Opened]:
    """Open a regular file; close it at the end of the block."""
    file = open_file(path)
    try:
        yield file
    finally:
        os.close(file.fd)
