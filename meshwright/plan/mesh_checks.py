"""What a mesh, or this machine, cannot do: refused before any process starts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from math import gcd

import torch

from .. import parallel
from ..axes import Axes
from ..blueprint import Blueprint
from ..errors import ConfigError, LayoutError, MeshError
from ..memory.budget import Need, held_while_training
from ..mesh import memory_of
from ..optim import AdamW, Optimizer, check_blocks
from ..sharding import Rules, ShardingSpec, check_context, check_fp8, gathered_in_fp8, hops, place, program_of

RANKS_A_CORE = 16
PROCESS_BYTES = 64 << 20  # of a forked rank without a model


def check_devices(axes: Axes, device: str, model: str = "MODEL") -> None:
    try:
        kind, cores = torch.device(device).type, os.cpu_count() or 1
    except RuntimeError as error:
        raise ConfigError(f"--device {device!r} is no kind of device; choose cpu, or cuda") from error
    if kind == "cpu" and axes.world > RANKS_A_CORE * cores:
        raise MeshError(
            f"{axes} is {axes.world} processes for {cores} {'core' if cores == 1 else 'cores'}, which would take "
            f"hours; at most {RANKS_A_CORE * cores} are started here. {_instead(axes, model)}"
        )
    if kind != "cpu" and torch.accelerator.device_count() < axes.world:
        num = torch.accelerator.device_count()
        raise MeshError(f"{axes} needs {axes.world} devices, {num} are here; leave out --device to use CPU processes")


def _instead(axes: Axes, model: str) -> str:
    """What to do where this machine is too small for a mesh."""
    ways = [f"meshwright plan {model} --mesh {as_option(axes)} says what each rank stores and sends, with no process"]
    small = smaller(axes)
    if small != axes:
        why = "what is wrong on a large axis is nearly always wrong on a small one"
        ways.append(f"meshwright verify {model} --mesh {as_option(small)} proves a small mesh of the same kind: {why}")
    return "\n  ".join(["Instead:", *ways])


def smaller(axes: Axes) -> Axes:
    """The smallest mesh on which the same axes are above 1.

    Each size becomes a prime factor of itself, so it divides all dims that the one asked for divides.
    """
    sizes = asdict(axes)
    meshes = (dict(zip(sizes, chosen, strict=True)) for chosen in product(*map(_primes, sizes.values())))
    fit = [Axes(**at) for at in meshes if at["fsdp"] * at["cp"] * at["tp"] % at["ep"] == 0]
    return min(fit, key=lambda a: (a.world, a.ep))


def _primes(size: int) -> list[int]:
    """The prime factors of a size, each once; of 1 there is 1 alone."""
    found, factor = [], 2
    while factor * factor <= size:
        if size % factor == 0:
            found.append(factor)
            while size % factor == 0:
                size //= factor
        factor += 1
    return [*found, size] if size > 1 or not found else found


def as_option(axes: Axes) -> str:
    return ",".join(f"{axis}={size}" for axis, size in asdict(axes).items() if size > 1) or "fsdp=1"


def check_layout(
    blueprint: Blueprint, axes: Axes, num_batches: int | None = None, optimizer: Optimizer = AdamW()
) -> None:
    """What any rank of the mesh would refuse."""
    found = objections(blueprint, asdict(axes), num_batches, optimizer)
    if found:
        raise MeshError(reasons(found))


def reasons(refused: Sequence[str]) -> str:
    """One reason as it is, several as a list."""
    if len(refused) == 1:
        return refused[0]
    return "\n  - ".join([f"the mesh is impossible, for {len(refused)} reasons:", *refused])


def objections(
    blueprint: Blueprint, sizes: Mapping[str, int], num_batches: int | None = None, optimizer: Optimizer = AdamW()
) -> list[str]:
    """Why the model cannot lie on a mesh of these sizes, or go through its pipeline in a step of so many micro-batches:
    all that is wrong, not what is wrong first."""
    asked = {**asdict(Axes()), **sizes}
    if min(asked.values()) < 1:
        return [f"{axis}={size} is not a size; give 1 or more" for axis, size in asked.items() if size < 1]
    # tp and ep alone cut dims, and here ep divides: so dims are looked at even where the mesh itself cannot be
    cuts = Axes(fsdp=asked["ep"], tp=asked["tp"], ep=asked["ep"])
    found = [*_of_mesh(asked, blueprint.recipe.memory.token_once), *_of_dims(blueprint, cuts)]
    of_spec = Axes(tp=asked["tp"], cp=asked["cp"])
    quantised = optimizer.quantised(blueprint.table, blueprint.table.params)
    of_state = partial(check_blocks, quantised=quantised, instead="state in bfloat16")
    checks: tuple[Callable[[ShardingSpec, Axes], None], ...] = (check_context, check_fp8, of_state)
    ways = (*_of_parameters(blueprint, cuts), *(each for c in checks for each in _refused(c, blueprint, of_spec)))
    return [*found, *(() if found else ways), *_of_stages(blueprint, asked["pp"], num_batches)]


def _of_mesh(sizes: Mapping[str, int], token_once: bool | int) -> Iterator[str]:
    try:
        axes = Axes(**sizes)
        hops("", axes.ep, axes, token_once)  # refuses nodes that do not divide ep
    except (MeshError, ConfigError) as error:
        yield str(error)


def _of_dims(blueprint: Blueprint, cuts: Axes) -> Iterator[str]:
    """Of each axis the dims that it does not divide, and the sizes that divide all of its dims."""
    rules, first = blueprint.spec.rules, dict[tuple[str, int], str]()
    for param in blueprint.table:
        for dim, size in param.dims.items():
            first.setdefault((dim, size), param.name)
    against: dict[str, list[tuple[str, int]]] = {}
    for dim, size in first:
        try:
            rules.split_to_all({dim: size}, cuts, "")
        except LayoutError:
            against.setdefault(rules.axis[dim], []).append((dim, size))
    for axis, dims in against.items():
        of_axis = {dim: size for dim, size in first if rules.axis.get(dim) == axis}
        common = gcd(*(size for dim, size in of_axis.items() if dim not in rules.whole | rules.uneven))
        allowed = [n for n in range(1, common + 1) if common % n == 0 and _splits(rules, of_axis, axis, n)]
        for uneven, what in ((False, "does not divide"), (True, "leaves a rank without any of")):
            named = [f"{dim}={size} of {first[dim, size]}" for dim, size in dims if (dim in rules.uneven) == uneven]
            if named:
                choices = ", ".join(map(str, allowed))
                yield f"{axis}={cuts.size_of(axis)} {what} {', '.join(named)}; choose {axis} from {choices}"


def _splits(rules: Rules, dims: Mapping[str, int], axis: str, parts: int) -> bool:
    """Whether an axis of this size would be refused in its turn."""
    try:
        rules.split_to_all(dims, Axes(fsdp=parts, ep=parts) if axis == "ep" else Axes(**{axis: parts}), "")
    except LayoutError:
        return False
    return True


def _of_parameters(blueprint: Blueprint, cuts: Axes) -> Iterator[str]:
    """What else placing a model refuses. The last parts are the smallest, so what leaves any rank without leaves it."""
    try:
        for param in blueprint.table:
            place(param, blueprint.spec.rules, cuts)
        list(parallel.spans(blueprint.spec, cuts, cuts.world - 1))
    except LayoutError as error:
        yield str(error)


def _refused(check: Callable[[ShardingSpec, Axes], None], blueprint: Blueprint, axes: Axes) -> Iterator[str]:
    try:
        check(blueprint.spec, axes)
    except LayoutError as error:
        yield str(error)


def _of_stages(blueprint: Blueprint, pp: int, num_batches: int | None) -> Iterator[str]:
    if pp == 1:
        return
    pipeline = blueprint.recipe.pipeline
    try:
        blueprint.recipe.check_schedule()
        line = blueprint.spec.line(pp)
        if num_batches is not None:
            program_of(line, pipeline.schedule, num_batches, 0)
    except (ConfigError, MeshError) as error:
        yield str(error)


def check_memory(
    blueprint: Blueprint, axes: Axes, dtype: torch.dtype, device: str, model: str = "MODEL", *, training: bool
) -> None:
    """On CPUs all ranks share one memory, so that a larger mesh is no way out.

    On other devices each rank asks its own as it loads: a process that has asked one cannot fork ranks that use it.
    """
    here = torch.device(device)
    if here.type != "cpu":
        return
    low = gathered_in_fp8(blueprint.spec, blueprint.table.params)
    held = held_while_training(dtype, frozenset(blueprint.table.params if training else ()), low=low)
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
            f". {_instead(axes, model)}"
        )
