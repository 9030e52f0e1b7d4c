"""Keep ranks of one machine on its loopback interface, which no other machine can reach."""

from __future__ import annotations

import os
import socket

from torch._C._distributed_c10d import TCPStore

ADDRESS = "127.0.0.1"
_DEVICES = ("lo", "lo0")  # Linux; macOS and the BSDs
_CHOICES = {"GLOO_SOCKET_IFNAME": "", "NCCL_SOCKET_IFNAME": "="}  # prefix of the name; NCCL's "=" is an exact match


def serve_store() -> TCPStore:
    """Return a TCPStore that listens on loopback only, on a free port.

    By default torch listens on all interfaces, with IPv6. Each rank then connects as `::ffff:127.0.0.1`, torch asks the
    name server for that address, and waits 5 s if no answer comes.
    """
    server = socket.create_server((ADDRESS, 0))
    port = server.getsockname()[1]
    return TCPStore(ADDRESS, port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach())


def loopback_devices() -> dict[str, str]:
    """Return the environment variables that keep gloo and NCCL on loopback, without those that the user has set."""
    device = next((name for _, name in socket.if_nameindex() if name in _DEVICES), None)
    if device is None:
        return {}
    return {name: mark + device for name, mark in _CHOICES.items() if name not in os.environ}
