"""Connect the ranks of a group on one machine by Unix sockets, and exchange tensors over them.

The calling thread sends and receives itself. gloo's receiving thread polls for a lock that the sending thread holds,
so where ranks share cores it takes 10 to 20 times the CPU time of such an exchange (docs/log.md).
"""

from __future__ import annotations

import datetime
import os
import secrets
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from ..ops.part_sizes import part_size

# The number of the exchange in its group, the bytes that follow, and what they are for.
_HEADER = struct.Struct("<QQ32s")
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
# Bytes that a rank may send before the other one reads; the kernel may grant less, and some thousands at least.
_BUFFER = part_size(__name__, "_BUFFER", 1 << 20, small=16384)
_RETRY_S = 0.01
_LONGEST_POLL_MS = 2**31 - 1
_OPEN: WeakSet[LocalSockets] = WeakSet()


def machine_of(node: range) -> str:
    """Describe where this process runs: ranks of equal descriptions can reach each other by Unix sockets. They run in
    the same boot of a machine, in one network and user namespace, as one user. "" if this system lacks such sockets.

    `node`: the ranks of this machine, as the launcher numbers them. Without a launcher these are all ranks.
    """
    if sys.platform != "linux":  # abstract addresses and SO_PEERCRED
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return " ".join(
            (boot, *(os.readlink(f"/proc/self/ns/{name}") for name in ("net", "user")), f"{os.geteuid()} {node}")
        )
    except OSError:
        return ""


class LocalSockets:
    """The connections of this rank to all other ranks of a group. The first exchange opens them.

    Every rank of the group must take part in every exchange, in the same order. Each message says which exchange it
    belongs to, how long it is and what it is for. So ranks that have diverged get an error instead of each other's
    numbers.
    """

    def __init__(self, name: str, ranks: Sequence[int], rank: int, store: Store, timeout: datetime.timedelta) -> None:
        self._name, self._ranks, self._rank, self._store = name, tuple(ranks), rank, store
        self._seconds = timeout.total_seconds()
        self._peers: dict[int, socket.socket] = {}
        self._turn, self._failure, self._busy = 0, "", False
        self._lock = threading.RLock()
        _OPEN.add(self)

    def exchange(self, sent: Sequence[Tensor], received: Sequence[Tensor], what: str) -> None:
        """Send `sent[rank]` to each other rank of the group, and fill `received[rank]` with what it sends to this one.

        `what`: the operation and dtype, in up to 32 characters, which must be equal on all ranks.
        """
        with self._lock:
            if self._failure:
                raise dist.DistBackendError(self._failure)
            if self._busy:  # the lock lets the same thread in again
                raise dist.DistBackendError("a signal handler must not run a collective within another one")
            self._busy = True
            try:
                if len(self._peers) < len(self._ranks) - 1:
                    self._connect()
                self._turn += 1
                outgoing = {rank: _bytes(sent[rank]) for rank in self._peers}
                self._exchange(outgoing, {rank: _bytes(received[rank]) for rank in self._peers}, what.encode()[:32])
            except BaseException as error:
                self.fail(error)
                raise
            finally:
                self._busy = False

    def fail(self, error: BaseException) -> None:
        """Close the connections after an error: the other ranks would take this rank's next message for the one that
        it did not send, or for the rest of one."""
        reason = f"{type(error).__name__}: {error!s:.500}"
        self._failure = self._failure or f"an error closed the connections of ranks {list(self._ranks)}: {reason}"
        self.close()

    def close(self) -> None:
        """Close the connections of this process. Forked children close their copies when they start."""
        for peer in self._peers.values():
            peer.close()

    def __del__(self) -> None:
        self.close()

    def _exchange(self, sent: Mapping[int, memoryview], received: Mapping[int, memoryview], what: bytes) -> None:
        """Send and receive whatever the sockets can take and give, until all is done."""
        outgoing = {r: [memoryview(_HEADER.pack(self._turn, len(view), what)), view] for r, view in sent.items()}
        incoming = {rank: _Incoming(view, (self._turn, len(view), what)) for rank, view in received.items()}
        for rank in tuple(outgoing):
            self._send(rank, outgoing)
        deadline = time.monotonic() + self._seconds
        while incoming or outgoing:
            for rank, can_receive in self._ready(incoming, outgoing, deadline):
                if can_receive and self._receive(rank, incoming[rank]):
                    del incoming[rank]
                elif not can_receive:
                    self._send(rank, outgoing)

    def _ready(
        self, incoming: Mapping[int, object], outgoing: Mapping[int, object], deadline: float
    ) -> Iterator[tuple[int, bool]]:
        """Wait for sockets. Yield a rank for each, and whether it has sent something; otherwise it can take more."""
        poll, numbers = select.poll(), {}
        for rank, peer in self._peers.items():
            wanted = select.POLLIN * (rank in incoming) | select.POLLOUT * (rank in outgoing)
            if wanted:
                numbers[peer.fileno()] = rank
                poll.register(peer, wanted)
        events = poll.poll(min(max(0.0, deadline - time.monotonic()) * 1000, _LONGEST_POLL_MS))
        if not events and time.monotonic() >= deadline:
            missing = [self._ranks[rank] for rank in sorted({*incoming, *outgoing})]
            raise dist.DistBackendError(f"no answer from ranks {missing} within {self._seconds:g} s")
        for number, event in events:
            rank = numbers[number]
            if event & select.POLLOUT and rank in outgoing:
                yield rank, False
            if event & ~select.POLLOUT and rank in incoming:
                yield rank, True

    def _send(self, rank: int, outgoing: dict[int, list[memoryview]]) -> None:
        """Send as much as the socket takes; forget the rank when all is sent."""
        parts = outgoing[rank]
        try:
            num_sent = self._peers[rank].sendmsg(parts, (), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return
        except OSError as error:
            raise self._lost(rank, error) from error
        head, body = parts
        outgoing[rank] = [head[num_sent:], body[max(0, num_sent - len(head)) :]]
        if not any(len(part) for part in outgoing[rank]):
            del outgoing[rank]

    def _receive(self, rank: int, message: _Incoming) -> bool:
        """Receive what the socket has. Return whether the message is complete."""
        try:
            num_bytes = self._peers[rank].recvmsg_into(message.missing(), 0, socket.MSG_DONTWAIT)[0]
        except BlockingIOError:
            return False
        except OSError as error:
            raise self._lost(rank, error) from error
        if num_bytes == 0:
            raise self._lost(rank, None)
        return message.add(num_bytes, self._ranks[rank])

    def _lost(self, rank: int, error: OSError | None) -> dist.DistBackendError:
        reason = "" if error is None else f": {error}"
        return dist.DistBackendError(f"rank {self._ranks[rank]} has closed its connection{reason}")

    def _connect(self) -> None:
        """Connect to each rank before this one, and accept those after it.

        An address is random, and only processes of this user can use it: both sides ask the kernel who the other is.
        """
        deadline = time.monotonic() + self._seconds
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                address = f"\0meshwright-{secrets.token_hex(16)}"
                listener.bind(address)
                listener.listen(len(self._ranks))
                self._store.set(f"{self._name}/{self._rank}", address)
                for rank in range(self._rank):
                    self._peers[rank] = self._connected(rank, deadline)
                while len(self._peers) < len(self._ranks) - 1:
                    self._accept(listener, deadline)
        except OSError as error:
            raise dist.DistBackendError(f"a rank of {list(self._ranks)} was lost as they connected: {error}") from error

    def _connected(self, rank: int, deadline: float) -> socket.socket:
        """Connect to a rank. Its address may be that of an earlier start for a moment."""
        key = f"{self._name}/{rank}"
        while True:
            peer = socket.socket(socket.AF_UNIX)
            peer.setblocking(False)  # another user may have filled the queue of the listener
            try:
                self._store.wait([key], datetime.timedelta(seconds=max(_RETRY_S, deadline - time.monotonic())))
                peer.connect(self._store.get(key).decode())
                break
            except (dist.DistStoreError, ConnectionRefusedError, BlockingIOError):
                peer.close()
            if time.monotonic() > deadline:
                raise dist.DistBackendError(f"no connection to rank {self._ranks[rank]} within {self._seconds:g} s")
            time.sleep(_RETRY_S)
        if _user_of(peer) != os.geteuid():
            raise dist.DistBackendError(f"another user's process answers at the address of rank {self._ranks[rank]}")
        peer.sendmsg([_HEADER.pack(self._rank, 0, b"")], (), socket.MSG_NOSIGNAL)
        return _sized(peer)

    def _accept(self, listener: socket.socket, deadline: float) -> None:
        """Accept a connection, unless it is that of another user's process."""
        missing = [self._ranks[r] for r in range(self._rank + 1, len(self._ranks)) if r not in self._peers]
        late = dist.DistBackendError(f"no connection from ranks {missing} within {self._seconds:g} s")
        if time.monotonic() > deadline:
            raise late
        listener.settimeout(max(_RETRY_S, deadline - time.monotonic()))
        try:
            peer, _ = listener.accept()
            if _user_of(peer) != os.geteuid():
                peer.close()
                return
            peer.settimeout(max(_RETRY_S, deadline - time.monotonic()))
            head = peer.recv(_HEADER.size)  # sent in one piece
        except TimeoutError as error:
            raise late from error
        if len(head) < _HEADER.size:
            raise dist.DistBackendError(f"one of ranks {missing} has closed its connection")
        self._peers[_HEADER.unpack(head)[0]] = _sized(peer)


class _Incoming:
    """A message that is being received. `expected`: its header."""

    def __init__(self, body: memoryview, expected: tuple[int, int, bytes]) -> None:
        self.head, self.body, self.num_bytes = bytearray(_HEADER.size), body, 0
        self.expected = expected

    def missing(self) -> list[memoryview]:
        """Return the places of the bytes that have not arrived yet."""
        past_head = max(0, self.num_bytes - len(self.head))
        return [memoryview(self.head)[self.num_bytes :], self.body[past_head:]]

    def add(self, num_bytes: int, rank: int) -> bool:
        """Count what has arrived. Return whether that is all; raise if it is not the message that was expected."""
        before, self.num_bytes = self.num_bytes, self.num_bytes + num_bytes
        if before < len(self.head) <= self.num_bytes and self.head != _HEADER.pack(*self.expected):
            turn, size, what = _HEADER.unpack(self.head)
            raise dist.DistBackendError(
                f"rank {rank} sends {_described(turn, size, what)}, but this rank expects {_described(*self.expected)}"
            )
        return self.num_bytes == len(self.head) + len(self.body)


def _described(turn: int, size: int, what: bytes) -> str:
    text = what.rstrip(b"\0").decode(errors="replace")
    return f"{size} bytes of {text or 'nothing'} in exchange {turn} of the group"


def _bytes(x: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    return x.detach().view(-1).view(torch.uint8).numpy().data


def _user_of(peer: socket.socket) -> int:
    """Return the user of the process at the other end."""
    _, user, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(user)


def _sized(peer: socket.socket) -> socket.socket:
    peer.settimeout(None)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
    return peer


def _close_in_child() -> None:
    """Close the ends that a forked child has inherited: they would keep connections open after the rank has died."""
    for sockets in tuple(_OPEN):
        sockets.close()


os.register_at_fork(after_in_child=_close_in_child)
