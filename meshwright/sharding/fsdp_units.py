"""Units: parameters that FSDP gathers and frees together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from .doors import Dispatch, find

TOWER = "tower."  # so begin the names of what a tower is made of


@dataclass(frozen=True)
class Unit:
    """The parameters of a submodule. `again`: backward gathers them a second time."""

    name: str
    params: tuple[str, ...]
    expert: bool
    again: bool

    @property
    def shard(self) -> tuple[str, ...]:
        """The axes over which it is stored in shards."""
        return ("efsdp",) if self.expert else ("fsdp", "cp")


def units_of(
    model: nn.Module, gathered: Sequence[nn.Module], *, reshard: bool = True, kept: bool = True
) -> tuple[Unit, ...]:
    """Experts, then the units around them, then the root with what is left: the order in which FSDP wraps them.

    Without `reshard`, what forward has gathered stays until backward is done with it. So does the last unit, with which
    backward begins, where it follows at once (`kept`).
    """
    names = {module: name for name, module in model.named_modules()}
    experts = dict.fromkeys(name.rpartition(".")[0] for name, _ in find(model, Dispatch))
    inside: dict[str, list[str]] = {name: [] for name in (*experts, *(names[m] for m in gathered), "")}
    place = {name: number for number, name in enumerate(inside)}
    for param, _ in model.named_parameters():
        inside[min((name for name in _around(param) if name in place), key=place.__getitem__)].append(param)
    last = ("", names[gathered[-1]]) if kept else ()
    return tuple(
        Unit(name, tuple(params), name in experts, again=reshard and name not in last)
        for name, params in inside.items()
    )


def _around(name: str) -> Iterator[str]:
    """The modules that a parameter is in, from its own to the root."""
    while name:
        name = name.rpartition(".")[0]
        yield name
