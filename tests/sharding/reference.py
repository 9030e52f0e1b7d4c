"""Slow and obvious: what the design says about meshes and placing, on arrays of element numbers.

This module does not call the code under test, save for the types that carry its inputs (`Axes`, `Param`).
"""

from functools import cache
from itertools import product
from math import prod
from typing import Any

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st

from meshwright.axes import Axes
from meshwright.sharding import Param, Table

MAX_WORLD = 64
DENSE_NAMES = ("pp", "replicate", "fsdp", "cp", "tp")
EXPERT_NAMES = ("pp", "replicate", "efsdp", "ep")
GOES = {"heads": "tp", "kv": "tp", "key": "tp", "ffn": "tp", "vocab": "tp", "expert": "ep"}


def examples(number: int) -> Any:
    return settings(deadline=None, derandomize=True, database=None, max_examples=number)


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


@cache
def all_sizes(max_world: int = MAX_WORLD) -> list[tuple[int, int, int, int, int, int]]:
    """Every (pp, replicate, fsdp, cp, tp, ep) with at most so many ranks."""
    result = []
    for world in range(1, max_world + 1):
        for pp, replicate, fsdp, cp in product(divisors(world), repeat=4):
            if world % (pp * replicate * fsdp * cp) == 0:
                tp = world // (pp * replicate * fsdp * cp)
                result += [(pp, replicate, fsdp, cp, tp, ep) for ep in divisors(fsdp * cp * tp)]
    return result


@st.composite
def meshes(draw: Any, max_world: int = MAX_WORLD, tp: list[int] | None = None, ep: list[int] | None = None) -> Axes:
    """Axis by axis, so that every axis is often larger than 1 and all of them at once too."""
    sizes, left = {}, max_world
    for name in draw(st.permutations(DENSE_NAMES)):
        choices = [n for n in (tp if name == "tp" and tp else range(1, 9)) if n <= left]
        sizes[name] = draw(st.sampled_from(choices))
        left //= sizes[name]
    inner = divisors(sizes["fsdp"] * sizes["cp"] * sizes["tp"])
    return Axes(**sizes, ep=draw(st.sampled_from([n for n in inner if ep is None or n in ep])))


def coordinates(axes: Axes) -> list[dict[str, int]]:
    """Return the coordinates of every rank on all axes, as a DeviceMesh has them."""
    inner = axes.fsdp * axes.cp * axes.tp
    dense = np.arange(axes.world).reshape(axes.pp, axes.replicate, axes.fsdp, axes.cp, axes.tp)
    expert = np.arange(axes.world).reshape(axes.pp, axes.replicate, inner // axes.ep, axes.ep)
    out: list[dict[str, int]] = [{} for _ in range(axes.world)]
    for names, view in ((DENSE_NAMES, dense), (EXPERT_NAMES, expert)):
        for index in np.ndindex(view.shape):
            out[view[index]].update(zip(names, index, strict=True))
    for at in out:
        at["ends"] = int(0 < at["pp"] == axes.pp - 1)
    return out


def chunks(values: torch.Tensor, parts: int) -> list[torch.Tensor]:
    """`torch.chunk` of dim 0, with empty ones where it gives fewer; so does FSDP."""
    result = list(values.chunk(parts)) if len(values) else []
    return result + [values[:0]] * (parts - len(result))


def numbered(param: Param) -> torch.Tensor:
    return torch.arange(prod(param.shape)).view(param.shape)


def is_expert(param: Param) -> bool:
    return "expert" in param.dims


def is_split(dim: str, size: int, axes: Axes) -> bool:
    """kv heads stay whole where tp does not divide them; every other dim that has an axis is split on it."""
    return dim in GOES and not (dim == "kv" and size % axes.tp)


def cut_ids(param: Param, axes: Axes, at: dict[str, int]) -> torch.Tensor:
    """The element numbers that tp or ep leave to a rank, in the dims of the parameter."""
    ids = numbered(param)
    for number, (dim, size) in enumerate(param.dims.items()):
        if is_split(dim, size, axes):
            parts = axes.tp if GOES[dim] == "tp" else axes.ep
            ids = ids.index_select(number, chunks(torch.arange(size), parts)[at[GOES[dim]]])
    return ids


def stored_ids(param: Param, axes: Axes, at: dict[str, int]) -> torch.Tensor:
    """The element numbers that a rank stores: its cut as a matrix, the rows in shards of FSDP."""
    ids = cut_ids(param, axes, at)
    num_rows = len(param.rows)
    rows = prod(ids.shape[:num_rows])
    matrix = ids.reshape(rows, *([prod(ids.shape[num_rows:])] if param.cols else []))
    if is_expert(param):
        return chunks(matrix, axes.fsdp * axes.cp * axes.tp // axes.ep)[at["efsdp"]]
    if param.by_rows:
        return chunks(matrix, axes.fsdp * axes.cp * axes.tp)[(at["fsdp"] * axes.cp + at["cp"]) * axes.tp + at["tp"]]
    if param.float32:
        return matrix
    return chunks(matrix, axes.fsdp * axes.cp)[at["fsdp"] * axes.cp + at["cp"]]


def num_holders(param: Param, axes: Axes) -> int:
    """Count the ranks of a stage that hold each element."""
    if is_expert(param) or param.by_rows:
        return axes.replicate
    tp_splits = any(is_split(dim, size, axes) for dim, size in param.dims.items())
    return axes.replicate * (1 if tp_splits else axes.tp) * (axes.fsdp * axes.cp if param.float32 else 1)


def stages_of(name: str, table: Table, pp: int) -> set[int]:
    """Layers in even runs, the rest at the ends; a tied embedding at both."""
    layers = {param.layer for param in table if param.layer is not None}
    if name.startswith("layers."):
        return {int(name.split(".")[1]) * pp // len(layers)}
    if table[name].both_ends:
        return {0, pp - 1}
    return {pp - 1 if name.startswith("head.") else 0}


@st.composite
def params(draw: Any, axes: Axes, name: str = "synthetic", kinds: tuple[str, ...] = ("dense", "expert")) -> Param:
    """Any parameter that this mesh can place: dims in any order, at most one on a mesh axis."""
    sizes, small = {}, st.integers(1, 5)
    kind = draw(st.sampled_from(kinds))
    goes = draw(st.sampled_from(["heads", "key", "ffn", "kv", "vocab", None])) if kind == "dense" else "expert"
    if goes in ("kv", "vocab"):
        sizes[goes] = draw(st.integers(1, 2 * axes.tp + 3))
    elif goes is not None:
        sizes[goes] = draw(st.integers(1, 3)) * (axes.ep if goes == "expert" else axes.tp)
    for plain in draw(st.lists(st.sampled_from(["embed", "head", "chan"]), unique=True, min_size=goes is None)):
        sizes[plain] = draw(small)
    order = draw(st.permutations(list(sizes)))
    num_rows = draw(st.integers(1, len(order)))
    rows, cols = ({d: sizes[d] for d in part} for part in (order[:num_rows], order[num_rows:]))
    return Param(rows, cols, (), float32=kind == "dense" and draw(st.booleans()), name=name, first=True)
