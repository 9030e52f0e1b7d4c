"""Units: parameters that FSDP gathers and frees together."""

from __future__ import annotations

from collections.abc import Sequence
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
    params = [name for name, _ in model.named_parameters()]
    experts = list(dict.fromkeys(name.rpartition(".")[0] for name, _ in find(model, Dispatch)))
    taken: set[str] = set()
    units = []
    for name in [*experts, *(names[m] for m in gathered), ""]:
        inside = [n for n in params if n.startswith(f"{name}." if name else "") and n not in taken]
        taken.update(inside)
        last = kept and name in ("", names[gathered[-1]])
        units.append(Unit(name, tuple(inside), name in experts, again=reshard and not last))
    return tuple(units)
