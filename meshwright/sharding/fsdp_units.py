"""FSDP units: sets of parameters that are all-gathered, freed and reduce-scattered together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from .doors import Dispatch, find_doors

TOWER = "tower."  # prefix of the names of the vision tower's parameters
MTP = "head.mtp"  # likewise of the MTP head's


@dataclass(frozen=True)
class Unit:
    """The parameters of a submodule. `again`: backward gathers them a second time (FSDP's reshard_after_forward)."""

    name: str
    params: tuple[str, ...]
    expert: bool
    again: bool

    @property
    def shard(self) -> tuple[str, ...]:
        """Return the axes over which it is sharded.

        Experts are already spread over ep; they are sharded over what remains of the same ranks. Dense parameters are
        sharded over cp too, whose ranks would otherwise hold identical copies.
        """
        return ("efsdp",) if self.expert else ("fsdp", "cp")


def units_of(
    model: nn.Module, gathered: Sequence[nn.Module], *, reshard: bool = True, stays: Sequence[nn.Module] = ()
) -> tuple[Unit, ...]:
    """Return the units of experts, then those around them, then the root with the rest: the order in which FSDP wraps
    them.

    Without `reshard`, parameters stay gathered from forward to backward. Those in `stays` always do: backward begins
    with them, and would gather again what was just freed.
    """
    names = {module: name for name, module in model.named_modules()}
    experts = dict.fromkeys(name.rpartition(".")[0] for name, _ in find_doors(model, Dispatch))
    params_of: dict[str, list[str]] = {name: [] for name in (*experts, *(names[m] for m in gathered), "")}
    place = {name: number for number, name in enumerate(params_of)}
    for param, _ in model.named_parameters():
        params_of[min((name for name in _around(param) if name in place), key=place.__getitem__)].append(param)
    stay = {names[module] for module in stays}
    return tuple(
        Unit(name, tuple(params), name in experts, again=reshard and name not in stay)
        for name, params in params_of.items()
    )


def _around(name: str) -> Iterator[str]:
    """Yield the names of the modules that contain a parameter, from its own to the root."""
    while name:
        name = name.rpartition(".")[0]
        yield name
