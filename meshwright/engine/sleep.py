"""Sleep and wake: free the device memory of a model and its optimizer while a rollout engine uses the device.

Tensors stay; only their storages are emptied and refilled. So FSDP2, the optimizer, hooks and the user's references see
the same tensors after a wake, with the same bytes at another address. Replacing tensors would lose what hangs on these
objects: FSDP2's views of its shards, FP8 hooks, the version counters by which overwritten codes are noticed.

All ranks agree on each call, as on a step. They copy first and free only if every rank has copied; a wake that fails on
any rank frees again what the others have allocated, and can be repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from ..errors import ConfigError, StateError
from ..log import logger
from ..models import Quantisable
from ..ops.host_memory import HostCopy, release_cached_memory
from ..optim import LocalOptimizer
from ..watch import doing, names_lost_ranks
from .agreement import Proposal, agree
from .asleep import OPTIMIZER, WEIGHTS
from .model import Model


@names_lost_ranks()
def put_to_sleep(
    model: Model, wanted: Mapping[str, bool], optimizer: LocalOptimizer | None = None,
    settle_saving: Callable[[], None] = lambda: None,
) -> int:  # fmt: skip
    """Copy the wanted parts to the host and free their storages. Return how many bytes of the device were freed."""

    def propose() -> Proposal:
        settle_saving()
        for tensors in _to_be_freed(model, wanted, optimizer).values():
            _check_resizable(tensors)
        return _proposal(wanted)

    doing("sleep")
    agree(model, "sleep", propose, asleep=True)
    mesh, tensors_of = model.mesh, _to_be_freed(model, wanted, optimizer)
    mesh.synchronize()  # with FSDP's streams too, which may still read

    def copy() -> dict[str, HostCopy]:
        copies = {part: HostCopy.of(tensors.values()) for part, tensors in tensors_of.items()}
        mesh.synchronize()
        return copies

    copies = mesh.together(copy, "the copy to host memory", StateError, "nothing was put to sleep")
    for part, of_part in copies.items():
        model.calls.asleep.add(part, of_part)
        of_part.free()
    release_cached_memory(mesh.device)
    num_bytes = sum(copy.num_bytes for copy in copies.values())
    if model.recipe.memory.offload and not mesh.rank:
        logger.info("offload=True keeps what sleeps in host memory anyway: sleep freed %s bytes", f"{num_bytes:,}")
    return num_bytes


@names_lost_ranks()
def wake_up(model: Model, wanted: Mapping[str, bool]) -> int:
    """Allocate what sleeps of the wanted parts, and copy it back. Return how many bytes of the device it takes."""
    doing("wake")
    agree(model, "wake", lambda: _proposal(wanted), asleep=True)
    mesh, asleep = model.mesh, model.calls.asleep
    parts = [part for part in wanted if wanted[part]]
    copies = asleep.of(parts)

    def restore() -> None:
        for copy in copies:
            copy.restore()
        mesh.synchronize()

    at, what = "the allocation of what is asleep", "it stays asleep; free memory of the device, and call wake() again"
    try:
        mesh.together(restore, at, StateError, what)
    except BaseException:  # Ctrl-C too: the host copies are whole, so all goes back to sleep
        mesh.synchronize()
        for copy in copies:
            copy.free()
        release_cached_memory(mesh.device)
        raise
    for part in parts:
        asleep.copies.pop(part, None)
    return sum(copy.num_bytes for copy in copies)


def _proposal(wanted: Mapping[str, bool]) -> Proposal:
    """Return the arguments, which all ranks compare. Refuse a call that asks for nothing."""
    for part, value in wanted.items():
        if not isinstance(value, bool):
            raise ConfigError(f"{part}={value!r} must be True or False")
    if not any(wanted.values()):
        arguments = ", ".join(f"{part}=False" for part in wanted)
        raise ConfigError(f"{arguments} leaves nothing to do; leave one of them out")
    return Proposal(settings={f"{part}=": value for part, value in wanted.items()})


def _to_be_freed(
    model: Model, wanted: Mapping[str, bool], optimizer: LocalOptimizer | None
) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of each wanted part by a name for errors. A part that already sleeps adds nothing, except the
    optimizer state of another engine."""
    asleep, tensors_of = model.calls.asleep, dict[str, dict[str, Tensor]]()
    if wanted.get(WEIGHTS) and WEIGHTS not in asleep:
        tensors_of[WEIGHTS] = {**model.to_update(), **_scales(model)}
    if wanted.get(OPTIMIZER) and optimizer is not None:
        state = {f"the optimizer state of {name}": tensor for name, tensor in optimizer.tensors.items()}
        grads = {} if OPTIMIZER in asleep else model.grads()
        tensors_of[OPTIMIZER] = {**state, **{f"the gradient of {name}": grad for name, grad in grads.items()}}
    return {part: _on_device(model, tensors) for part, tensors in tensors_of.items()}


def _scales(model: Model) -> dict[str, Tensor]:
    """Return what dequantises the frozen parameters that are stored as codes."""
    modules = [(name, module) for part in model.parts for name, module in part.named_modules()]
    return {
        f"the {each} of {name}.{last}": tensor
        for name, module in modules if isinstance(module, Quantisable) for last, grid in module.grids.items()
        for each, tensor in (("scales", grid.scales), ("rows", grid.rows), ("columns", grid.columns))
    }  # fmt: skip


def _on_device(model: Model, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that take memory of the device. With `offload` they are on the host; on a CPU mesh, where the
    host is the device, all are on it."""
    mesh = model.mesh
    if mesh.device == mesh.host and model.recipe.memory.offload:
        return {}
    return {name: tensor for name, tensor in tensors.items() if tensor.device.type == mesh.device.type}


def _check_resizable(tensors: Mapping[str, Tensor]) -> None:
    """Refuse storages that torch cannot free in place."""
    fixed = [name for name, tensor in tensors.items() if not tensor.untyped_storage().resizable()]
    if fixed:
        raise StateError(
            f"{fixed[0]} ({len(fixed)} such tensors) cannot be freed: something has called numpy() on it, or shares "
            "its memory with another process; copy tensors of model.stored() first, as in .clone().numpy()"
        )
