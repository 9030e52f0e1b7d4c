"""Two hosts on one machine: a network namespace each, joined by a cable that can be cut. Where namespaces cannot be
made, two addresses of the loopback device; the second host is then not cut off but stopped."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from meshwright.watch import heartbeat
from tests.started import Started

_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Host:
    """`namespace`: its name; empty for one that shares the network of this machine. `device`: its end of the cable."""

    address: str
    device: str
    namespace: str = ""

    def torchrun(self, arguments: list[str]) -> int:
        """As the program of that name, in this process."""
        if self.namespace:
            with Path(f"/run/netns/{self.namespace}").open() as file:
                failed = ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET)
            assert not failed, os.strerror(ctypes.get_errno())
        os.environ["GLOO_SOCKET_IFNAME"] = self.device
        heartbeat._home = lambda: self.address  # type: ignore[assignment] # else both would be one machine
        try:
            torchrun.main(arguments)
        except ChildFailedError as error:
            print(error)
            return 1
        return 0


class Hosts:
    def __init__(self, first: Host, second: Host) -> None:
        self.both, self._port = (first, second), _free_port()

    def start(self, number: int, arguments: list[str]) -> Started:
        """`torchrun ... -m meshwright ARGUMENTS` on that host, with one rank."""
        first = self.both[0].address
        given = [
            "--nnodes=2", "--nproc-per-node=1", f"--node-rank={number}", "--rdzv-backend=c10d", "--rdzv-id=run",
            f"--rdzv-endpoint={first}:{self._port}", f"--local-addr={self.both[number].address}",
            f"--rdzv-conf=is_host={1 - number},read_timeout=5", "-m", "meshwright", *arguments,
        ]  # fmt: skip
        return Started(given, main=self.both[number].torchrun)

    def cut(self, second: Started) -> None:
        """The second host from the first."""
        host = self.both[1]
        if host.namespace:
            _ip("-n", host.namespace, "link", "set", host.device, "down")
            return
        for pid in (second.pid, *second.ranks):
            os.kill(pid, signal.SIGSTOP)

    def mend(self, second: Started) -> None:
        """Stopped processes go on. A cable stays cut."""
        for pid in (second.pid, *second.ranks):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def two_hosts() -> Iterator[Hosts]:
    names = [f"mw{os.getpid()}{side}" for side in "ab"]
    try:
        with contextlib.ExitStack() as stack:
            for name in names:
                _ip("netns", "add", name)
                stack.callback(_ip, "netns", "del", name)  # and its end of the cable
            _ip("link", "add", names[0], "netns", names[0], "type", "veth", "peer", "name", names[1], "netns", names[1])
            hosts = [Host(f"10.213.7.{at}", name, name) for at, name in enumerate(names, 1)]
            for host in hosts:
                _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", host.device)
                for device in ("lo", host.device):
                    _ip("-n", host.namespace, "link", "set", device, "up")
            yield Hosts(*hosts)
    except (FileNotFoundError, PermissionError):
        yield Hosts(Host("127.0.0.1", "lo"), Host("127.0.0.2", "lo"))


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise PermissionError(f"ip {' '.join(arguments)}: {done.stderr}")


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
