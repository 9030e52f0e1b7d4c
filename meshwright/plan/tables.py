"""Placement and bill as lines of tables. Layers that are alike share a line, and so do the keys of experts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch

from ..axes import Axes
from ..blueprint import Blueprint
from ..engine.fit import widths_of
from ..layout import Charge, Param, axes_left_to_sum, piece, place, summed_by_fsdp
from ..weights import chosen

STORED_BYTES = widths_of(torch.bfloat16).stored  # of an element, as a rank keeps it
PARAMETERS = (
    "parameter", "layers", "dims", "cut", "rows stored in shards over", "copied over", "bytes on a rank",
    "gradient summed by FSDP over", "in the last sums of gradients over", "keys of the files",
)  # fmt: skip
CHARGES = ("what", "layers", "operation", "over", "ranks in the group", "bytes of one", "how many", "bytes in all")


def alike(blueprint: Blueprint) -> list[list[Param]]:
    """Parameters that differ only in their layer."""
    groups: dict[Any, list[Param]] = {}
    for param in blueprint.table:
        key = (_pattern(param.name)[0], tuple(param.dims.items()), param.float32, tuple(_keys(param, blueprint)))
        groups.setdefault(key, []).append(param)
    return list(groups.values())


def parameter_line(group: list[Param], blueprint: Blueprint, axes: Axes) -> list[object]:
    param, rules, item = group[0], blueprint.spec.rules, STORED_BYTES
    placement, late = place(param, rules, axes), axes_left_to_sum(param, rules, axes)
    num_bytes = [item * piece(param, rules, axes, axes.coords(rank)).numel for rank in range(axes.world)]
    remarks = {"tied: the head too": param.tied, "never rounded": param.float32,
               "not in the files: drawn": param.name in blueprint.keymap.fresh}  # fmt: skip
    return [
        "\n".join([_pattern(param.name)[0], *(remark for remark, holds in remarks.items() if holds)]),
        ranges([p.layer for p in group if p.layer is not None]),
        ", ".join(f"{dim} {size}" for dim, size in param.dims.items()),
        ", ".join(f"{dim} by {axis}={axes.size_of(axis)}" for dim, axis in placement.split.items()) or "-",
        _live(placement.shard, axes), _live(placement.copies, axes), span(num_bytes),
        _live(summed_by_fsdp(param, placement), axes), _live(late, axes), "\n".join(_keys(param, blueprint)),
    ]  # fmt: skip


def _keys(param: Param, blueprint: Blueprint) -> list[str]:
    """Its keys in the files. Those that differ in one number (experts) stand as one."""
    runs: dict[str, list[int]] = {}
    for key in chosen(param, blueprint.keymap.choice).keys:
        text = _pattern(key)[0] if param.layer is not None else key
        again, number = _pattern(text, "{}")
        runs.setdefault(again, []).extend([] if number is None else [number])
    return [text.replace("{}", "{" + ranges(numbers) + "}") for text, numbers in runs.items()]


def charge_lines(charges: Iterable[Charge], axes: Axes) -> Iterator[list[object]]:
    groups: dict[Any, list[int | None]] = {}
    for c in charges:
        what, layer = _pattern(c.what)
        groups.setdefault((what, c.op, c.axes, c.num_bytes, c.count), []).append(layer)
    for (what, op, over, num_bytes, count), layers in groups.items():
        group, many = axes.group(0, over), count * len(layers)
        yield [
            what, ranges([n for n in layers if n is not None]), op, _live(over, axes),
            f"{len(group)}: {ranges(group)}", num_bytes, many, many * num_bytes,
        ]  # fmt: skip


def _pattern(name: str, mark: str = "{i}") -> tuple[str, int | None]:
    """A name with its first number marked, and that number."""
    parts = name.split(".")
    at = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    if at is None:
        return name, None
    return ".".join([*parts[:at], mark, *parts[at + 1 :]]), int(parts[at])


def _live(over: Sequence[str], axes: Axes) -> str:
    return " ".join(f"{a}={axes.size_of(a)}" for a in over if axes.size_of(a) > 1) or "-"


def span(numbers: Sequence[int]) -> str:
    least, most = min(numbers), max(numbers)
    return f"{most:,}" if least == most else f"{least:,} to {most:,}"


def ranges(numbers: Sequence[int]) -> str:
    """`0-3 8`; evenly spaced ones as `3-47 by 4`."""
    steps = {b - a for a, b in pairwise(numbers)}
    if len(numbers) > 2 and len(steps) == 1 and steps != {1}:
        return f"{numbers[0]}-{numbers[-1]} by {steps.pop()}"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return " ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
