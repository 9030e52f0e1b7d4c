"""Refuse meshes that do not fit a model or this machine, before any process starts.

`plan`, `verify` and `train` share these checks. They call the functions that a run calls, and catch their errors, so a
plan refuses exactly what a run refuses. Unlike a run, they list everything that is wrong, with sizes that work.
"""

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
from ..errors import ConfigError, LayoutError, MeshError, counted
from ..memory.budget import Need, held_while_training
from ..mesh import memory_of
from ..mesh.shared_devices import can_be_shared
from ..optim import AdamW, Optimizer, check_blocks
from ..sharding import Rules, ShardingSpec, check_context, check_fp8, gathered_in_fp8, hops, place, program_of

RANKS_A_CORE = 16  # processes per CPU core, above which a run would take hours
PROCESS_BYTES = 64 << 20  # memory of a forked rank without a model


def check_devices(axes: Axes, device: str, model: str = "MODEL", ranks_per_device: int = 1) -> None:
    """Refuse a mesh with more ranks than this machine's devices allow, or than its CPU cores can serve."""
    try:
        wanted, cores = torch.device(device), os.cpu_count() or 1
    except RuntimeError as error:
        raise ConfigError(f"--device {device!r} is not a kind of device; choose cpu or cuda") from error
    if ranks_per_device > 1 and not can_be_shared(wanted):
        raise ConfigError(
            f"--ranks-per-device {ranks_per_device} lets NCCL ranks share a GPU, which needs --device cuda; leave "
            "the option out otherwise: CPU processes share the cores anyway"
        )
    if wanted.type == "cpu" and axes.world > RANKS_A_CORE * cores:
        raise MeshError(
            f"{axes} is {axes.world} processes for {cores} {'core' if cores == 1 else 'cores'}, which would take "
            f"hours; at most {RANKS_A_CORE * cores} are started on this machine. {_instead(axes, model)}"
        )
    if wanted.type != "cpu":
        _check_accelerators(axes, wanted, ranks_per_device)


def _check_accelerators(axes: Axes, wanted: torch.device, ranks_per_device: int) -> None:
    """Refuse more ranks than `ranks_per_device` for each device of this machine; "cuda:0" is one device."""
    has = torch.accelerator.device_count()
    is_one = wanted != torch.device(wanted.type)
    num, needed = min(1, has) if is_one else has, -(-axes.world // ranks_per_device)
    if num >= needed:
        return
    each = f" of {ranks_per_device} ranks each" if ranks_per_device > 1 else ""
    ways = ["leave out --device to use CPU processes"]
    if num and can_be_shared(wanted):
        ways.append(f"let ranks share a device: --ranks-per-device {-(-axes.world // num)}")
    raise MeshError(
        f"{axes} needs {counted(needed, 'device')}{each}, {'this machine' if num == has else f'--device {wanted}'} has "
        f"{num}; {', or '.join(ways)}"
    )


def _instead(axes: Axes, model: str) -> str:
    """Return what to do if this machine is too small for a mesh: plan it, or verify a small one of the same kind."""
    ways = [f"meshwright plan {model} --mesh {as_option(axes)} shows what each rank stores and sends, with no process"]
    small = smaller(axes)
    if small != axes:
        why = "what is wrong on a large axis is nearly always wrong on a small one"
        ways.append(f"meshwright verify {model} --mesh {as_option(small)} proves a small mesh of the same kind: {why}")
    return "\n  ".join(["Instead:", *ways])


def smaller(axes: Axes) -> Axes:
    """Return the smallest mesh on which the same axes are larger than 1.

    Each size is replaced by one of its prime factors, so it divides every dim that the original size divides.
    """
    sizes = asdict(axes)
    # Not every product is a mesh: ep must divide the ranks of a replica. Among meshes of equal size the smaller ep is
    # taken.
    meshes = (dict(zip(sizes, chosen, strict=True)) for chosen in product(*map(_primes, sizes.values())))
    fit = [Axes(**at) for at in meshes if at["fsdp"] * at["cp"] * at["tp"] % at["ep"] == 0]
    return min(fit, key=lambda a: (a.world, a.ep))


def _primes(size: int) -> list[int]:
    """Return the prime factors of a size, each once; [1] for 1."""
    primes, factor = [], 2
    while factor * factor <= size:
        if size % factor == 0:
            primes.append(factor)
            while size % factor == 0:
                size //= factor
        factor += 1
    return [*primes, size] if size > 1 or not primes else primes


def as_option(axes: Axes) -> str:
    """Spell a mesh as `--mesh` takes it."""
    return ",".join(f"{axis}={size}" for axis, size in asdict(axes).items() if size > 1) or "fsdp=1"


def check_layout(
    blueprint: Blueprint, axes: Axes, num_batches: int | None = None, optimizer: Optimizer = AdamW()
) -> None:
    """Raise `MeshError` with every reason if any rank of the mesh would refuse the model."""
    refused = objections(blueprint, asdict(axes), num_batches, optimizer)
    if refused:
        raise MeshError(reasons(refused))


def reasons(refused: Sequence[str]) -> str:
    """Return the text of an error: one reason unchanged, several as a list."""
    if len(refused) == 1:
        return refused[0]
    return "\n  - ".join([f"the mesh is impossible, for {len(refused)} reasons:", *refused])


def objections(
    blueprint: Blueprint, sizes: Mapping[str, int], num_batches: int | None = None, optimizer: Optimizer = AdamW()
) -> list[str]:
    """List every reason why the model does not fit a mesh of these sizes; empty if it does.

    `num_batches`: also check the schedule of the pipeline for a step of this many micro-batches.
    """
    wanted = {**asdict(Axes()), **sizes}
    if min(wanted.values()) < 1:
        return [f"{axis}={size} is not a size; give 1 or more" for axis, size in wanted.items() if size < 1]
    # Only tp and ep split dims. On this mesh ep always divides the ranks, so dims are checked even if the requested
    # mesh is impossible.
    cuts = Axes(fsdp=wanted["ep"], tp=wanted["tp"], ep=wanted["ep"])
    refused = [*_check_mesh(wanted, blueprint.recipe.memory.token_once), *_check_dims(blueprint, cuts)]
    tp_and_cp = Axes(tp=wanted["tp"], cp=wanted["cp"])
    quantised = optimizer.quantised(blueprint.table, blueprint.table.params)
    check_state = partial(check_blocks, quantised=quantised, instead="state in bfloat16")
    check_frozen = partial(_check_frozen, blueprint)
    checks: tuple[Callable[[ShardingSpec, Axes], None], ...] = (check_context, check_fp8, check_state, check_frozen)
    later = (*_check_params(blueprint, cuts), *(each for c in checks for each in _caught(c, blueprint, tp_and_cp)))
    # The later checks would only repeat that a dim does not divide.
    return [*refused, *(() if refused else later), *_check_stages(blueprint, wanted["pp"], num_batches)]


def _check_mesh(sizes: Mapping[str, int], token_once: bool | int) -> Iterator[str]:
    """Yield the reasons why the sizes are not a mesh for any model."""
    try:
        axes = Axes(**sizes)
        hops("", axes.ep, axes, token_once)  # refuses nodes that do not divide ep
    except (MeshError, ConfigError) as error:
        yield str(error)


def _check_dims(blueprint: Blueprint, cuts: Axes) -> Iterator[str]:
    """Yield for each axis the dims that it does not divide, and the sizes that divide all dims it splits."""
    rules, first = blueprint.spec.rules, dict[tuple[str, int], str]()
    for param in blueprint.table:
        for dim, size in param.dims.items():
            first.setdefault((dim, size), param.name)
    undivided: dict[str, list[tuple[str, int]]] = {}
    for dim, size in first:
        try:
            rules.split_to_all({dim: size}, cuts, "")
        except LayoutError:
            undivided.setdefault(rules.axis[dim], []).append((dim, size))
    for axis, dims in undivided.items():
        # A size that works divides the gcd of all dims that must be split evenly; the rules then decide the rest.
        of_axis = {dim: size for dim, size in first if rules.axis.get(dim) == axis}
        common = gcd(*(size for dim, size in of_axis.items() if dim not in rules.whole | rules.uneven))
        allowed = [n for n in range(1, common + 1) if common % n == 0 and _splits(rules, of_axis, axis, n)]
        for uneven, what in ((False, "does not divide"), (True, "leaves a rank without any of")):
            named = [f"{dim}={size} of {first[dim, size]}" for dim, size in dims if (dim in rules.uneven) == uneven]
            if named:
                choices = ", ".join(map(str, allowed))
                yield f"{axis}={cuts.size_of(axis)} {what} {', '.join(named)}; choose {axis} from {choices}"


def _splits(rules: Rules, dims: Mapping[str, int], axis: str, parts: int) -> bool:
    """Return whether the rules accept an axis of this size, so that a suggested size is never refused."""
    try:
        rules.split_to_all(dims, Axes(fsdp=parts, ep=parts) if axis == "ep" else Axes(**{axis: parts}), "")
    except LayoutError:
        return False
    return True


def _check_params(blueprint: Blueprint, cuts: Axes) -> Iterator[str]:
    """Yield all other refusals of the placement of parameters.

    The last rank has the smallest parts: if any rank is left without a part, it is.
    """
    try:
        for param in blueprint.table:
            place(param, blueprint.spec.rules, cuts)
        list(parallel.spans(blueprint.spec, cuts, cuts.world - 1))
    except LayoutError as error:
        yield str(error)


def _check_frozen(blueprint: Blueprint, _: ShardingSpec, axes: Axes) -> None:
    """Refuse a mesh that cuts frozen matrices within a block of the 4 bits to which loading quantises them."""
    if blueprint.made is not None:
        blueprint.codings(frozenset(blueprint.trained()), axes)


def _caught(check: Callable[[ShardingSpec, Axes], None], blueprint: Blueprint, axes: Axes) -> Iterator[str]:
    """Yield the message of a check that raises."""
    try:
        check(blueprint.spec, axes)
    except LayoutError as error:
        yield str(error)


def _check_stages(blueprint: Blueprint, pp: int, num_batches: int | None) -> Iterator[str]:
    """Yield the reasons why layers or micro-batches do not fit the stages of the pipeline."""
    if pp == 1:
        return
    pipeline = blueprint.recipe.pipeline
    # A run makes the same calls at load and at its first step, and they would raise the same errors.
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
    """Refuse a mesh whose CPU processes together need more memory than this machine has.

    They share one memory, so more ranks do not help. On other devices each rank checks its own as it loads: a process
    that has initialised a device cannot fork ranks that use it.
    """
    kind = torch.device(device)
    if kind.type != "cpu":
        return
    # Weights, gradients and optimizer state; activations are not counted.
    low = gathered_in_fp8(blueprint.spec, blueprint.table.params)
    held = held_while_training(dtype, frozenset(blueprint.table.params if training else ()), low=low)
    a_rank, alone = (
        PROCESS_BYTES + sum(s.num_bytes for s in Need(blueprint.spec, mesh, held).stored()) for mesh in (axes, Axes())
    )
    # `alone`: the reference of `verify` is one process with the whole model.
    wanted, has = max(axes.world * a_rank, alone), memory_of(kind, local_ranks=1).host_bytes
    if wanted > has:
        what = "training" if training else "holding the weights"
        raise MeshError(
            f"{what} on {axes} takes {wanted / 1e9:.1f} GB ({axes.world} processes of {a_rank / 1e9:.1f}, one alone "
            f"{alone / 1e9:.1f}) in {str(dtype).removeprefix('torch.')}, this machine has {has / 1e9:.1f} GB; choose "
            f"fewer ranks{', leave out --full, or choose narrower --dtypes' if training else ' or fsdp for the others'}"
            f". {_instead(axes, model)}"
        )
