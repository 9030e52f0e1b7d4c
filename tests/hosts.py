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
        """Run torchrun in this process."""
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
        self.both, self._port = (first, second), 0

    def start(self, number: int, arguments: list[str], *, max_restarts: int = 0) -> Started:
        """`torchrun ... -m meshwright ARGUMENTS` on that host, with one rank, as docs/several-hosts.md has it."""
        self._port = self._port if number else _free_port()  # one that was used waits for a minute to be used again
        first, place = self.both[0].address, self.both[number]
        static = [f"--node-rank={number}", f"--master-addr={first}", f"--master-port={self._port}"]
        dynamic = [
            "--rdzv-backend=c10d", f"--rdzv-endpoint={first}:{self._port}", f"--rdzv-conf=is_host={1 - number}",
            f"--local-addr={place.address}", f"--max-restarts={max_restarts}",
        ]  # fmt: skip
        args = ["--nnodes=2", "--nproc-per-node=1", *(dynamic if max_restarts else static), "-m", "meshwright"]
        return Started([*args, *arguments], main=place.torchrun, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")

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
    """An OSError where neither is possible."""
    with contextlib.ExitStack() as stack:
        try:
            hosts = _joined(stack)
        except PermissionError:
            hosts = [Host(address, "lo") for address in ("127.0.0.1", "127.0.0.2")]
            _free_port(hosts[1].address)
        yield Hosts(*hosts)


def _joined(stack: contextlib.ExitStack) -> list[Host]:
    """Two namespaces and a cable. The stack takes them away."""
    names = [f"mw{os.getpid()}{side}" for side in "ab"]
    for name in names:
        _ip("netns", "add", name)
        stack.callback(_ip, "netns", "del", name)  # and its end of the cable
    _ip("link", "add", names[0], "netns", names[0], "type", "veth", "peer", "name", names[1], "netns", names[1])
    hosts = [Host(f"10.213.7.{at}", name, name) for at, name in enumerate(names, 1)]
    for host in hosts:
        _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", host.device)
        for device in ("lo", host.device):
            _ip("-n", host.namespace, "link", "set", device, "up")
    return hosts


def _ip(*arguments: str) -> None:
    """A PermissionError where it cannot be done, or there is no such program."""
    done = subprocess.run(["sh", "-c", 'ip "$@"', "ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise PermissionError(f"ip {' '.join(arguments)}: {done.stderr}")


def _free_port(address: str = "127.0.0.1") -> int:
    with socket.socket() as free:
        free.bind((address, 0))
        return int(free.getsockname()[1])
