"""List placement and bill as lines of tables. Identical layers share a line, and so do the keys of experts.

A model of 94 layers with 128 experts has thousands of parameters, but only a few kinds, which people compare.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any

from ..blueprint import Blueprint
from ..ops.codings import Coding, in_memory
from ..sharding import Charge, Param, axes_left_to_sum, piece, place, summed_by_fsdp
from ..weights import chosen
from .figures import Figures, live_axes


@dataclass(frozen=True)
class ParameterLine:
    """Parameters that differ only in their layer. {i} in the name stands for the number of the layer."""

    name: str
    remarks: tuple[str, ...]
    layers: str
    dims: str
    cut: str  # dims that tp or ep splits
    shards: str  # axes over which FSDP then shards the rows
    copies: str  # axes on which each rank stores the same
    num_parameters: int  # elements of all parameters of the line
    least_bytes: int  # of one parameter on a rank
    most_bytes: int
    by_fsdp: str  # axes over which FSDP reduces the gradient
    late: str  # axes over which the all-reduce at the end of the step reduces it
    keys: tuple[str, ...]  # in the files


@dataclass(frozen=True)
class ChargeLine:
    """Charges that differ only in their layer: collectives of the same operation, axes and size."""

    what: str
    layers: str
    op: str
    over: str
    num_ranks: int  # in each group
    one_bytes: int  # of one collective: its larger side
    count: int
    num_bytes: int
    axes: tuple[str, ...]
    between: tuple[int, int] | None  # least and most bytes of one, if the router decides: `one_bytes` is an expectation


def parameter_lines(figures: Figures) -> list[ParameterLine]:
    """Return a line for each kind of parameter."""
    return [_parameter_line(group, figures) for group in identical_params(figures.blueprint)]


def identical_params(blueprint: Blueprint) -> list[list[Param]]:
    """Group parameters that differ only in their layer: same name, dims, dtype and keys."""
    groups: dict[Any, list[Param]] = {}
    for param in blueprint.table:
        key = (_pattern(param.name)[0], tuple(param.dims.items()), param.float32, tuple(_keys(param, blueprint)))
        groups.setdefault(key, []).append(param)
    return list(groups.values())


def _parameter_line(group: list[Param], figures: Figures) -> ParameterLine:
    """Describe a group by its first parameter, which represents all."""
    param, blueprint, axes = group[0], figures.blueprint, figures.axes
    rules = blueprint.spec.rules
    placement = place(param, rules, axes)
    places = blueprint.spec.places(param, axes)
    # Visit only the extreme ranks: a mesh may have thousands.
    coords = [at for at in map(axes.coords, figures.extremes) if at["pp"] in places]
    form = figures.stored_form(param.name)
    shapes = [in_memory(piece(param, rules, axes, at).shape, form) for at in coords]
    num_bytes = [prod(shape) * dtype.itemsize for shape, dtype in shapes]
    remarks = {"tied: the head too": param.both_ends and blueprint.module.tied, "never rounded": param.float32,
               f"frozen, in {form.name if isinstance(form, Coding) else ''}": isinstance(form, Coding),
               "not in the files: initialised": param.name in blueprint.keymap.fresh,
               f"at pp {' and '.join(map(str, sorted(places)))}": axes.pp > 1 and param.layer is None}  # fmt: skip
    return ParameterLine(
        name=_pattern(param.name)[0],
        remarks=tuple(remark for remark, holds in remarks.items() if holds),
        layers=ranges([p.layer for p in group if p.layer is not None]),
        dims=", ".join(f"{dim} {size}" for dim, size in param.dims.items()),
        cut=", ".join(f"{dim} by {axis}={axes.size_of(axis)}" for dim, axis in placement.split.items()) or "-",
        shards=live_axes(placement.shard, axes),
        copies=live_axes(placement.copies, axes),
        num_parameters=sum(p.numel for p in group),
        least_bytes=min(num_bytes),
        most_bytes=max(num_bytes),
        by_fsdp=live_axes(summed_by_fsdp(param, placement), axes),
        late=live_axes(axes_left_to_sum(param, rules, axes), axes),
        keys=tuple(_keys(param, blueprint)),
    )


def _keys(param: Param, blueprint: Blueprint) -> list[str]:
    """List the keys of a parameter in the files. Keys that differ in one number (experts) share an entry."""
    # Expert keys have two numbers, the layer and the expert; the layer is replaced first.
    runs: dict[str, list[int]] = {}
    for key in chosen(param, blueprint.keymap.choice).keys:
        text = _pattern(key)[0] if param.layer is not None else key
        pattern, number = _pattern(text, "{}")
        runs.setdefault(pattern, []).extend([] if number is None else [number])
    return [text.replace("{}", "{" + ranges(numbers) + "}") for text, numbers in runs.items()]


def charge_lines(figures: Figures) -> Iterator[ChargeLine]:
    """Yield a line for each kind of charge.

    Charges share a line if they differ only in the layer number, so a line loses only the order of layers.
    """
    axes, groups = figures.axes, dict[Charge, list[int | None]]()
    for charge in figures.charges:
        what, layer = _pattern(charge.what)
        groups.setdefault(replace(charge, what=what), []).append(layer)
    for charge, layers in groups.items():
        count = charge.count * len(layers)
        yield ChargeLine(
            what=charge.what,
            layers=ranges([n for n in layers if n is not None]),
            op=charge.op,
            over=live_axes(charge.axes, axes),
            num_ranks=prod(axes.sizes(charge.axes)),
            one_bytes=charge.num_bytes,
            count=count,
            num_bytes=count * charge.num_bytes,
            axes=charge.axes,
            between=charge.between,
        )


def _pattern(name: str, mark: str = "{i}") -> tuple[str, int | None]:
    """Replace the first number in a dotted name by `mark`; return the new name and the number."""
    parts = name.split(".")
    at = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    if at is None:
        return name, None
    return ".".join([*parts[:at], mark, *parts[at + 1 :]]), int(parts[at])


@dataclass(frozen=True)
class AxisLine:
    """An axis of more than one rank. The ranks of one of its groups differ only in their coordinate on this axis."""

    axis: str
    size: int
    num_groups: int
    first_group: str  # the one with rank 0


def axis_lines(figures: Figures) -> list[AxisLine]:
    """Return a line for each axis of more than one rank."""
    axes = figures.axes
    return [
        AxisLine(name, axes.size_of(name), axes.world // axes.size_of(name), ranges(axes.group(0, (name,)), ", "))
        for name in figures.live
    ]


def ranges(numbers: Sequence[int], between: str = " ") -> str:
    """Shorten a list of numbers: consecutive ones as `0-3 8`, evenly spaced ones as `3-47 by 4`."""
    steps = {b - a for a, b in pairwise(numbers)}
    if len(numbers) > 2 and len(steps) == 1 and steps != {1}:
        return f"{numbers[0]}-{numbers[-1]} by {steps.pop()}"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return between.join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
