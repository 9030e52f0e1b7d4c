"""The record of a run in OUT: config.toml, environment.json, layout.json.

They answer questions that come up months later: which settings (defaults written out), which versions and machine, and
how each parameter was sharded. A resumed run compares config.toml with its own config.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..axes import DENSE, Axes
from ..checkpoint import RUN
from ..engine import Model
from ..plan import Figures, ParameterLine, identical_params, origin, parameter_lines, work_of
from ..sharding import Param
from .config import Config
from .config_file import as_toml


def write_record(out: Path, config: Config, model: Model) -> None:
    """Write the three files; a resumed run overwrites them with its own."""
    out.mkdir(parents=True, exist_ok=True)
    (out / RUN).write_text(as_toml(config))
    for name, values in (("environment", _environment(model)), ("layout", _layout(config, model))):
        (out / f"{name}.json").write_text(json.dumps(values, indent=1) + "\n")


def device_name(device: torch.device) -> str:
    """Return the device name, as the table of peaks lists it; "cpu" for any CPU, as their peaks are not listed."""
    if device.type == "cpu":
        return "cpu"
    return str(torch.get_device_module(device).get_device_name(device))


def sizes_of(axes: Axes) -> dict[str, int]:
    """Return the sizes of all axes by name."""
    return {axis: axes.size_of(axis) for axis in (*DENSE, "ep")}


def _environment(model: Model) -> dict[str, Any]:
    """Return versions, command, machine and device of rank 0."""
    command = shlex.join(["python", "-m", "meshwright", *sys.argv[1:]])
    where = {"machine": platform.node(), "system": platform.platform(), "cores": os.cpu_count()}
    return {**origin(command), **where, "device": device_name(model.mesh.device), "world": model.mesh.axes.world}


def _layout(config: Config, model: Model) -> dict[str, Any]:
    """Return the mesh, and a row for each group of parameters that differ only in their layer."""
    axes, trained = model.mesh.axes, {*model.trained}
    frozen = frozenset(model.blueprint.table.params) - trained
    work = replace(work_of(axes, config.train.length, 1), frozen=frozen, begins=model.begun)
    figures = Figures(config.model, model.blueprint, axes, work)
    groups = zip(identical_params(model.blueprint), parameter_lines(figures), strict=True)
    return {
        "model": str(model.config.get("model_type")),
        "parameters": figures.num_parameters,
        "trained": sum(param.numel for param in model.table if param.name in trained),
        "world": axes.world,
        "mesh": sizes_of(axes),
        "table": [_row(group, line, trained, model) for group, line in groups],
    }


def _row(group: Sequence[Param], line: ParameterLine, trained: Set[str], model: Model) -> Mapping[str, Any]:
    """Describe a group of parameters that differ only in their layer: shape, dtype, sharding, bytes on a rank."""
    cuts = [line.cut.strip("-"), f"stored over {line.shards}" if line.shards.strip("-") else ""]
    return {
        "name": line.name,
        "count": len(group),
        "shape": list(group[0].shape),
        "dtype": str(torch.uint8 if group[0].name in model.numbers else model.kept[group[0].name])[6:],
        "trained": any(param.name in trained for param in group),
        "cut": ", ".join(filter(None, cuts)) or "whole on every rank",
        "bytes_per_rank": line.most_bytes * len(group),
    }
