"""Pretend that a package is installed, with as many of its names as a test needs."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any


@contextmanager
def installed(modules: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """Pretend it while the body runs. `modules`: the names in each module; a module follows its parent."""
    made, top = dict[str, ModuleType](), next(iter(modules))
    for name, values in modules.items():
        module = made[name] = ModuleType(name)
        vars(module).update(values)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(made[parent], last, module)
    kept = {name: sys.modules.pop(name) for name in [*sys.modules] if name.split(".")[0] == top}
    sys.modules.update(made)
    try:
        yield
    finally:
        for name in made:
            del sys.modules[name]
        sys.modules.update(kept)
