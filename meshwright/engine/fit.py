"""Whether a run fits, known from the drawing before any memory is taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..errors import MeshError
from ..layout import Rules, Stored, Table, Unit, Widths, storage
from ..mesh import Axes, Room

_MOST = 4096  # how far a larger mesh is looked for


@dataclass(frozen=True)
class Need:
    """What decides about the bytes of a rank. `trained`: names of parameters."""

    units: Sequence[Unit]
    table: Table
    rules: Rules
    axes: Axes
    widths: Widths
    trained: frozenset[str]
    offload: bool = False

    def stored(self, rank: int = 0) -> list[Stored]:
        return storage(
            self.units, self.table, self.rules, self.axes, rank, self.widths, trained=self.trained, offload=self.offload
        )


def widths_of(compute: torch.dtype, state: torch.dtype | None = None) -> Widths:
    stored = torch.promote_types(compute, torch.float32)
    return Widths(stored.itemsize, compute.itemsize, (state or stored).itemsize)


def refuse_too_large(need: Need, room: Room) -> None:
    """Rank 0 stores most. Activations are not counted: what is refused cannot run, what is not may still be short."""
    stored = need.stored()
    if _fits(stored, room):
        return
    parts = ", ".join(f"{s.what} {_gb(s.num_bytes)}{' on the host' if s.host else ''}" for s in stored)
    raise MeshError(
        f"{need.axes} does not fit: a rank needs {_gb(sum(s.num_bytes for s in stored))} ({parts}) and has "
        f"{_gb(room.device_bytes)}{'' if room.shared else f', and {_gb(room.host_bytes)} on the host'}; "
        f"{_ways_out(need, room)}"
    )


def _fits(stored: Sequence[Stored], room: Room) -> bool:
    host, device = (sum(s.num_bytes for s in stored if s.host == at) for at in (True, False))
    if room.shared:
        return host + device <= room.host_bytes
    return device <= room.device_bytes and host <= room.host_bytes


def _ways_out(need: Need, room: Room) -> str:
    """The smallest fsdp that would do, and whether host memory would."""
    found = []
    sizes = (need.axes.fsdp << n for n in range(1, 13) if need.axes.fsdp << n <= _MOST)
    larger = (replace(need, axes=replace(need.axes, fsdp=size)) for size in sizes)
    enough = next((r.axes for r in larger if _fits(r.stored(), room)), None)
    if enough is not None:
        found.append(f"fsdp={enough.fsdp} ({enough.world} ranks)")
    if not need.offload and _fits(replace(need, offload=True).stored(), room):
        found.append("Savings(offload=True)")
    return "choose " + " or ".join(found) if found else f"no fsdp up to {_MOST} would do: choose more memory"


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.3g} GB"
