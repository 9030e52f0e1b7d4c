"""Ranks of one machine talk over its loopback device, which no other machine reaches."""

from __future__ import annotations

import os
import socket

from torch._C._distributed_c10d import TCPStore

ADDRESS = "127.0.0.1"
_DEVICES = ("lo", "lo0")  # of Linux; of macOS and the BSDs
_CHOICES = {"GLOO_SOCKET_IFNAME": "", "NCCL_SOCKET_IFNAME": "="}  # what precedes the name; "=": no other that begins so


def serve_store() -> TCPStore:
    """Return a store that listens on loopback alone, on a free port.

    By itself torch listens on all interfaces, by IPv6 too. There each rank that connects is `::ffff:127.0.0.1`; torch
    asks the name server for the name of that, and waits 5 s for an answer that is lost.
    """
    listening = socket.create_server((ADDRESS, 0))
    port = listening.getsockname()[1]
    return TCPStore(ADDRESS, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


def loopback_devices() -> dict[str, str]:
    """Return the environment that keeps gloo and NCCL on loopback, without what the user has set."""
    device = next((name for _, name in socket.if_nameindex() if name in _DEVICES), None)
    if device is None:
        return {}
    return {name: mark + device for name, mark in _CHOICES.items() if name not in os.environ}
