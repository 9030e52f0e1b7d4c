"""What a mesh, or this machine, cannot do: refused before any process starts."""

from __future__ import annotations

import os

import torch

from .. import parallel
from ..axes import Axes
from ..blueprint import Blueprint
from ..engine.fit import Need, widths_of
from ..errors import ConfigError, MeshError
from ..layout import Held, pieces
from ..mesh import memory_of, refuse_unbuilt

RANKS_A_CORE = 32
PROCESS_BYTES = 64 << 20  # of a forked rank without a model


def check_devices(axes: Axes, device: str) -> None:
    try:
        kind, cores = torch.device(device).type, os.cpu_count() or 1
    except RuntimeError as error:
        raise ConfigError(f"--device {device!r} is no kind of device; choose cpu, or cuda") from error
    if kind == "cpu" and axes.world > RANKS_A_CORE * cores:
        raise MeshError(
            f"{axes} is {axes.world} processes for {cores} cores, which would take hours; choose at most "
            f"{RANKS_A_CORE * cores}: what is wrong on an axis of size 64 is nearly always wrong on one of size 2"
        )
    if kind != "cpu" and torch.accelerator.device_count() < axes.world:
        num = torch.accelerator.device_count()
        raise MeshError(f"{axes} needs {axes.world} devices, {num} are here; leave out --device to use CPU processes")


def check_layout(blueprint: Blueprint, axes: Axes) -> None:
    """What each rank of the mesh would refuse. Ranks that differ only in fsdp get the same answer."""
    refuse_unbuilt(axes)
    at = {rank: axes.coords(rank) for rank in range(axes.world)}
    for rank in {(coords["tp"], coords["ep"]): rank for rank, coords in at.items()}.values():
        pieces(blueprint.spec, axes, rank)
        list(parallel.spans(blueprint.spec, axes, rank))


def check_memory(blueprint: Blueprint, axes: Axes, dtype: torch.dtype, device: str, *, training: bool) -> None:
    """On CPUs all ranks share one memory, so that a larger mesh is no way out.

    On other devices each rank asks its own as it loads: a process that has asked one cannot fork ranks that use it.
    """
    here = torch.device(device)
    if here.type != "cpu":
        return
    held = Held(widths_of(dtype), frozenset(blueprint.table.params if training else ()))
    a_rank, alone = (
        PROCESS_BYTES + sum(s.num_bytes for s in Need(blueprint.spec, mesh, held).stored()) for mesh in (axes, Axes())
    )
    wanted, has = max(axes.world * a_rank, alone), memory_of(here, ranks_here=1).host_bytes
    if wanted > has:
        what = "training" if training else "holding the weights"
        raise MeshError(
            f"{what} on {axes} takes {wanted / 1e9:.1f} GB ({axes.world} processes of {a_rank / 1e9:.1f}, one alone "
            f"{alone / 1e9:.1f}) in {str(dtype).removeprefix('torch.')}, this machine has {has / 1e9:.1f} GB; choose "
            f"fewer ranks{', leave out --full, or choose narrower --dtypes' if training else ' or fsdp for the others'}"
        )
