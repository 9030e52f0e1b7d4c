"""Somebody on the same machine connects to all ports of a run, and sends pickles and junk. Nothing of it may run, and
the run ends like an undisturbed one."""

from __future__ import annotations

import base64
import os
import pickle  # noqa: TID251 - written to check that no process loads it
import random
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from torch.distributed import DistNetworkError, DistStoreError, TCPStore

from tests.killed import differences, last_files, prepare
from tests.started import Started, descendants, forked_ranks, ports

STEPS, _SECONDS = 30, 100.0
_MESHES: tuple[dict[str, int], ...] = ({"fsdp": 2}, {"pp": 2})
_LOOPBACK = "0100007F"  # 127.0.0.1, as /proc/net/tcp has it
_AGAIN = 0.1  # probability that a port is attacked again at each look
_RENDEZVOUS = "torch.rendezvous.meshwright"  # torchrun loads a pickle of this name at each of its heartbeats


class Intruder:
    """Pickle as a call that makes a directory."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.mark),)


@dataclass
class Attack:
    """Ports that a run listened on, the number of connections to them, and those still open."""

    mark: Path
    dice: random.Random
    seen: set[tuple[str, int]] = field(default_factory=set)
    num_sent: int = 0
    open: list[socket.socket] = field(default_factory=list)

    def look(self, launcher: int) -> None:
        stores = ports([launcher])
        for address, port in sorted(stores | ports(descendants(launcher))):
            if (address, port) not in self.seen or self.dice.random() < _AGAIN:
                self.seen.add((address, port))
                self._send(port)
                if (address, port) in stores:
                    self._set(port)

    def _send(self, port: int) -> None:
        harmful = pickle.dumps(Intruder(self.mark))
        for content in (harmful, self.dice.randbytes(4096), b"GET / HTTP/1.1\r\n\r\n", harmful[:9], b""):
            with suppress(OSError):  # refused, or closed before all was sent
                connection = socket.create_connection(("127.0.0.1", port), timeout=1)
                self.open.append(connection)
                connection.sendall(content)
                self.num_sent += 1
                if content == harmful:
                    connection.close()

    def _set(self, port: int) -> None:
        """Speak as a rank does: leave pickles under the name at which torchrun looks for one."""
        harmful = pickle.dumps(Intruder(self.mark))
        with suppress(DistStoreError, DistNetworkError):  # the run has just ended
            store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=2))
            for name, content in ((_RENDEZVOUS, base64.b64encode(harmful)), (f"raw/{_RENDEZVOUS}", harmful)):
                store.set(name, content)
                self.num_sent += 1

    def close(self) -> None:
        for connection in self.open:
            connection.close()


def attack(at: Path, num: int, seed: int) -> Iterator[tuple[str, str]]:
    """Return the ports that were attacked, and the promises that did not hold."""
    paths, whole = [], []
    for mesh in _MESHES[:num]:
        place = at / "-".join(mesh)
        place.mkdir()
        paths.append(prepare(place, STEPS, mesh))
        assert _run(paths[-1], place / "whole", None) == 0
        whole.append(last_files(place / "whole", STEPS))
    for number in range(num):
        of, out = number % len(_MESHES), at / f"run-{number}"
        attack = Attack(at / f"it-ran-{number}", random.Random(seed + number))
        code = _run(paths[of], out, attack)
        what = f"{_MESHES[of]}, {len(attack.seen)} ports, {attack.num_sent} times"
        yield what, ", ".join(_wrong(attack, code, out, whole[of]))


def _run(path: Path, out: Path, attack: Attack | None) -> int:
    with forked_ranks(), Started(["train", str(path), "--set", f"out={out}"]) as run:
        if attack:
            while run.more():
                attack.look(run.pid)
            attack.close()
        return run.end(_SECONDS)


def _wrong(attack: Attack, code: int, out: Path, whole: Mapping[str, bytes]) -> Iterator[str]:
    if elsewhere := {address for address, _ in attack.seen} - {_LOOPBACK}:
        yield f"it listens on {elsewhere}"
    if attack.mark.exists():
        yield "a pickle was run"
    if len(attack.seen) < 3 or attack.num_sent < 10:  # the store, and a socket of each rank
        yield "nearly nothing was attacked"
    if code or len([*(out / "logs").iterdir()]) > 1:
        yield f"exit code {code}, {len([*(out / 'logs').iterdir()])} starts"
    else:
        yield from differences(last_files(out, STEPS), whole)
