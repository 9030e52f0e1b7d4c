"""Whom to try: a user's model as it is, drawn on the meta device from its config and the headers of its files."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from .. import parallel
from ..engine.fit import Need, widths_of
from ..errors import ConfigError, MeshError
from ..layout import Rules, Table, pieces, units_of
from ..mesh import Axes, refuse_unbuilt, room_of
from ..models import Decoder, describe, prefix_of
from ..weights import (
    Source,
    carried_keys,
    check_keys,
    choose,
    download,
    is_hub_id,
    looked_at,
    of_table,
    open_index,
    open_source,
    path_of,
    read_config,
)
from .shrink import TINY

Say = Callable[[str], None]
RANKS_A_CORE = 32
PROCESS_BYTES = 64 << 20  # of a forked rank without a model


@dataclass(frozen=True)
class Subject:
    """The model in its real sizes. `choice`: how its files spell it, as far as they are known."""

    name: str
    config: Mapping[str, Any]
    module: Decoder
    table: Table
    choice: Mapping[str, str]
    directory: Path | None = None  # of its files; a built-in name has none
    fresh: tuple[str, ...] = ()  # parameters that the files lack: drawn
    dtypes: frozenset[str] = frozenset()  # of the keys of its files


def find(model: str, head: str, weights: bool, say: Say) -> Subject:
    """`weights`: the files of the weights are wanted too, whole and fit for the model."""
    if model in TINY:
        if weights:
            raise ConfigError(f"{model} has no weights to take as they are; name a directory or a hub id")
        return _drawn(model, TINY[model], None, Source(Path(), {}), head)
    directory, from_hub = _located(model, weights, say)
    config = read_config(directory)
    there = any(directory.glob("*.safetensors"))
    if weights and not there:
        raise ConfigError(f"{directory} holds no *.safetensors to take as they are; give a directory that does")
    # a cache of the hub may hold a few of the files: only the index tells of all
    source = open_index(directory) if (from_hub and not weights) or not there else open_source(directory)
    subject = _drawn(model, config, directory, source, head)
    if source.stamps:  # the headers were read, and what they hold must fit even where the weights are not taken
        check_keys(subject.table, source, subject.choice, subject.fresh, torch.float64)
        carried_keys(subject.table, source, subject.choice)
    return subject


def _drawn(model: str, config: Mapping[str, Any], directory: Path | None, source: Source, head: str) -> Subject:
    keys = source.entries
    module, table = describe(config, prefix_of(config, keys or None), head, keys)
    fresh = tuple(p.name for p in table if p.optional and not any(k in keys for k in p.layouts[0].keys))
    choice = choose(table, source) if keys else of_table(table, torch.bfloat16).choice
    dtypes = frozenset(entry.dtype for entry in keys.values())
    return Subject(model, config, module, table, choice, directory, fresh, dtypes)


def _located(model: str, weights: bool, say: Say) -> tuple[Path, bool]:
    at = path_of(model)
    if looked_at(at, Path.is_dir):
        return at, False
    if not is_hub_id(model):
        known = ", ".join(TINY)
        raise ConfigError(f"{model!r} is neither a directory nor one of {known}, nor a hub id (org/name)")
    say(f"fetching {model} from the hub: " + ("its weights too" if weights else "its config alone"))
    return download(model, weights), True


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


def check_layout(module: Decoder, table: Table, axes: Axes) -> None:
    """What each rank of the mesh would refuse, without any of them. Ranks that only store other rows are alike."""
    refuse_unbuilt(axes)
    where = {rank: axes.coords(rank) for rank in range(axes.world)}
    for rank in {(at["tp"], at["ep"]): rank for rank, at in where.items()}.values():
        pieces(table, Rules(), axes, where[rank])
        list(parallel.spans(module, Rules(), axes, rank))


def stored_bytes(table: Table, axes: Axes, rank: int, item: int = 4) -> int:
    """Of all parameters, as a rank keeps them."""
    return item * sum(piece.numel for piece in pieces(table, Rules(), axes, axes.coords(rank)).values())


def check_memory(module: Decoder, table: Table, axes: Axes, dtype: torch.dtype, device: str, training: bool) -> None:
    """Before any process. On CPUs all ranks share one memory, so a larger mesh is no way out. Of other devices each
    rank asks its own as it loads: a process that has asked one cannot fork ranks that use it."""
    here = torch.device(device)
    if here.type != "cpu":
        return
    units, trained = units_of(module, module.units()), frozenset(table.params if training else ())
    need = Need(units, table, Rules(), axes, widths_of(dtype), trained)
    a_rank = PROCESS_BYTES + sum(s.num_bytes for s in need.stored())
    alone = PROCESS_BYTES + sum(s.num_bytes for s in replace(need, axes=Axes()).stored())  # what it is compared with
    wanted, has = max(axes.world * a_rank, alone), room_of(here, ranks_here=1).host_bytes
    if wanted > has:
        what = "training" if training else "holding the weights"
        raise MeshError(
            f"{what} on {axes} takes {wanted / 1e9:.1f} GB ({axes.world} processes of {a_rank / 1e9:.1f}, one alone "
            f"{alone / 1e9:.1f}) in {str(dtype).removeprefix('torch.')}, this machine has {has / 1e9:.1f} GB; choose "
            f"fewer ranks{', leave out --full, or choose narrower --dtypes' if training else ' or fsdp for the others'}"
        )
