"""Units that this rank does not share with any other: nothing to gather or to sum, only a dtype to compute in.

FSDP over one rank would copy every parameter and every gradient for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def cast(module: nn.Module, parameters: Iterable[nn.Parameter], compute: torch.dtype) -> None:
    """In the forward of `module` its parameters read as `compute`; their gradients arrive in the stored dtype."""
    places = {p: _place(module, p) for p in parameters if p.dtype != compute}
    if places:
        swap = _Swap(list(places.values()), compute)
        module.register_forward_pre_hook(swap.before)
        module.register_forward_hook(swap.after, always_call=True)


def _place(module: nn.Module, parameter: nn.Parameter) -> tuple[nn.Module, str]:
    return next((m, name) for m in module.modules() for name, p in m.named_parameters(recurse=False) if p is parameter)


class _Swap:
    """Hooks that put cast copies in the places of parameters, and the parameters back."""

    def __init__(self, places: list[tuple[nn.Module, str]], compute: torch.dtype) -> None:
        self.places, self.compute = places, compute
        self.kept: list[Tensor | None] = []

    def before(self, _module: nn.Module, _args: object) -> None:
        self.kept = [owner._parameters[name] for owner, name in self.places]
        for (owner, name), parameter in zip(self.places, self.kept, strict=True):
            assert parameter is not None
            owner._parameters[name] = parameter.to(self.compute)  # type: ignore[assignment]  # part of the graph

    def after(self, _module: nn.Module, _args: object, _out: object) -> None:
        """Also after a forward that raised."""
        for (owner, name), parameter in zip(self.places, self.kept, strict=True):
            owner._parameters[name] = parameter  # type: ignore[assignment]
