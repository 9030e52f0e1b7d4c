"""Hand weights to another process of the same host through one bucket of shared memory, for colocated rollouts.

A Unix socket carries the handshake, as JSON. The sender fills the bucket and says so; the receiver copies it out and
says so; only then does the sender fill it again. If either process dies, the socket closes, so the other one notices at
once.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError, RankError
from . import shared_memory
from .buckets import Stream, bucket_size, exhaust, fill, num_buckets, unpack
from .specs import TensorSpec, encoded, of_json, to_json

_PAUSE = 0.02  # seconds between two tries to connect


def send_to_process(
    stream: Stream, specs: Sequence[TensorSpec], address: str | os.PathLike[str], *, bucket_bytes: int | None = None,
    timeout_s: float = 60.0, device: torch.device | str | None = None,
) -> None:  # fmt: skip
    """Send the tensors of a stream to the process that calls `receive_from_process(address)`.

    `address`: the path of a socket that this call makes and removes, at most about 100 characters long. `timeout_s`:
    how long to wait for the receiver to come, and then for each bucket to be taken. `device`: where the bucket lies, by
    default on the host; on a GPU it is shared by CUDA IPC (not yet tested on a GPU). The stream is exhausted before an
    error is raised, because the other ranks of the mesh wait in its collectives. With `mw.stream(ranks="all")` each
    rank can have a receiver, at an address of its own.
    """
    tensors = iter(stream)
    try:
        with _accepted(os.fspath(address), timeout_s) as sock:
            _send(tensors, specs, _Channel(sock), torch.device(device or "cpu"), bucket_bytes)
    except Exception:
        exhaust(tensors)
        raise


def receive_from_process(
    address: str | os.PathLike[str], *, timeout_s: float = 60.0, device: torch.device | str | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the (name, tensor) that `send_to_process` sends, on `device`, by default the host. Each owns its memory.

    `timeout_s`: how long to wait for the sender to listen, and then for each bucket.
    """
    on = torch.device(device or "cpu")
    with _connected(os.fspath(address), timeout_s) as sock:
        channel = _Channel(sock)
        try:
            offered = channel.hear()
            bucket = shared_memory.attach(offered, channel.take_handle() if offered["ipc"] is None else None, on)
            channel.say({"attached": True})
            first = True

            def take() -> Tensor:
                nonlocal first
                if not first:
                    _taken(channel, on)
                first = False
                channel.hear()
                return bucket

            yield from unpack(of_json(offered["specs"]), take, on)
            _taken(channel, on)
        except _Gone as error:
            raise RankError(f"the sender at {address} {error}; the weights are incomplete") from error


def _send(
    tensors: Stream, specs: Sequence[TensorSpec], channel: _Channel, device: torch.device, bucket_bytes: int | None
) -> None:
    """Share a bucket, then fill it again each time that the receiver has taken it."""
    size, at = bucket_size(specs, bucket_bytes), "the metadata"
    try:
        bucket, offered, handle = shared_memory.make(size, device)
        channel.say({**offered, "specs": to_json(specs)})
        if handle is not None:
            channel.give(handle)
        channel.hear()
        for number, num_bytes in enumerate(_reported(fill(tensors, specs, bucket), channel)):
            at = f"bucket {number + 1} of {num_buckets(specs, size)}"
            shared_memory.finish(device)
            channel.say({"num_bytes": num_bytes})
            channel.hear()
    except _Gone as error:
        raise RankError(f"the receiver {error}, and did not take {at}; start it again, then send again") from error


def _taken(channel: _Channel, device: torch.device) -> None:
    """Say that the bucket may be filled again."""
    shared_memory.finish(device)
    channel.say({"taken": True})


def _reported(filled: Iterator[int], channel: _Channel) -> Iterator[int]:
    """Pass on the buckets of a stream. If the stream raises, the receiver gets the reason."""
    try:
        yield from filled
    except Exception as error:
        with contextlib.suppress(_Gone):
            channel.say({"error": f"{type(error).__name__}: {error}"})
        raise


class _Gone(Exception):
    """The other process closed the connection, or did not answer in time."""


class _Channel:
    """Messages over a socket, each a length and JSON; and file descriptors, each with one byte."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            raise _Gone(f"did not answer for {self.sock.gettimeout():g} s") from None
        except OSError as error:
            raise _Gone(f"closed the connection ({error})") from error

    def say(self, message: dict[str, Any]) -> None:
        data = encoded(message)
        with self._watched():
            self.sock.sendall(struct.pack("<Q", len(data)) + data)

    def hear(self) -> dict[str, Any]:
        """Return the next message. Raise the error that the other process reports."""
        (length,) = struct.unpack("<Q", self._exactly(8))
        message: dict[str, Any] = json.loads(self._exactly(length))
        if "error" in message:
            raise RankError(f"the sender failed, so the weights are incomplete: {message['error']}")
        return message

    def give(self, handle: int) -> None:
        """Send a file descriptor, and close this process's own."""
        try:
            with self._watched():
                socket.send_fds(self.sock, [b"-"], [handle])
        finally:
            os.close(handle)

    def take_handle(self) -> int:
        """Return the file descriptor that `give` sends."""
        with self._watched():
            data, handles, *_ = socket.recv_fds(self.sock, 1, 1)
        if not data:
            raise _Gone("closed the connection")
        return handles[0]

    def _exactly(self, num: int) -> bytes:
        data = bytearray()
        while len(data) < num:
            with self._watched():
                part = self.sock.recv(num - len(data))
            if not part:
                raise _Gone("closed the connection")
            data += part
        return bytes(data)


@contextlib.contextmanager
def _accepted(address: str, timeout_s: float) -> Iterator[socket.socket]:
    """Listen, and connect with the first receiver. The socket's path exists only while this call waits."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            listener.bind(address)
        except OSError as error:
            raise ConfigError(
                f"no socket can be made at {address}: {error}. If it exists, a killed sender may have left it: remove "
                "it, or choose another path, of at most about 100 characters, in a directory that exists"
            ) from None
        try:
            os.chmod(address, 0o600)  # before listen: no other user can connect in between
            listener.listen(1)
            listener.settimeout(timeout_s)
            sock, _ = listener.accept()
        except TimeoutError:
            raise RankError(
                f"no receiver came to {address} within {timeout_s:g} s; start one: receive_from_process"
            ) from None
        finally:
            os.unlink(address)
    with sock:
        sock.settimeout(timeout_s)
        yield sock


@contextlib.contextmanager
def _connected(address: str, timeout_s: float) -> Iterator[socket.socket]:
    """Connect to a sender, which may begin to listen later."""
    deadline = time.monotonic() + timeout_s
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(address)
            break
        except (FileNotFoundError, ConnectionRefusedError):
            sock.close()
            if time.monotonic() > deadline:
                raise RankError(
                    f"no sender listens at {address} within {timeout_s:g} s; call send_to_process"
                ) from None
            time.sleep(_PAUSE)
        except OSError as error:
            sock.close()
            raise ConfigError(f"{address} is not the socket of a sender: {error}") from None
    with sock:
        sock.settimeout(timeout_s)
        yield sock
