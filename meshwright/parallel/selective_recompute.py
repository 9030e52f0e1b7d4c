"""What some operations of a layer return, kept for the run of the layer in backward: there it is taken, not made again.

torch's contexts for selective checkpoints do the same. But they keep what comes after all that backward needs too, such
as what the last product of a layer returns; and partial sums, beside the sums that were made of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ..errors import StateError


@dataclass(frozen=True)
class _Result:
    """What an operation returned, without its history, and how often its tensors had been written into by then."""

    op: object
    out: Any
    versions: list[int]


class Kept:
    """Results of a run of a layer, in their order. `sums`: those of the operations that save nothing for backward."""

    def __init__(self, ops: Iterable[object], sums: Iterable[object] = ()) -> None:
        self._ops, self._results, self._needed = frozenset(ops), list[_Result | None](), 0
        self._sums = frozenset(sums)
        self._unused: Any = None  # the last of them as the layer has it, until it does anything else

    @contextmanager
    def made(self) -> Iterator[None]:
        """Within it they are made."""
        with _Making(self):
            try:
                yield
            finally:
                self._unused = None  # it has a history, which hooks of this layer are in
        del self._results[self._needed :]  # the run in backward ends with the last tensor that was saved

    def saved(self) -> None:
        """A tensor was saved for backward, and the results so far may make it again."""
        self._needed, self._unused = len(self._results), None

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Within it they are those that were made, each for one time."""
        with _Taking(self):
            yield

    def ran(self, op: object, args: tuple[Any, ...], out: Any) -> None:
        if op not in self._ops:
            self._unused = None
            return
        if op in self._sums and isinstance(args[0], Tensor) and args[0] is self._unused:
            self._leave_out_the_last(args[0])
        self._results.append(_Result(op, tree_map_only(Tensor, _alone, out), _versions(out)))
        self._unused = out

    def _leave_out_the_last(self, x: Tensor) -> None:
        """All that the layer does with it is another result. Its shape stands for it: should something else want it
        later, torch refuses to reckon with that."""
        last = self._results[-1]
        assert last is not None
        self._results[-1] = _Result(last.op, torch.empty((), dtype=x.dtype, device="meta").expand(x.shape), [0])

    def take(self, op: object, number: int) -> Any:
        result = self._results[number] if number < self._needed else None
        if result is None or result.op != op:
            told = "nothing" if result is None else str(result.op)
            raise StateError(f"backward ran a layer again and came to {op}, for which {told} is kept in this place")
        if result.versions != _versions(result.out):
            raise StateError(f"what {op} returned was written into before backward took it; change a copy of it")
        self._results[number] = None
        return result.out

    def has(self, op: object) -> bool:
        return op in self._ops


def _alone(x: Tensor) -> Tensor:
    """It shares the count of writes. Below autograd, where this runs, torch leaves that out unless told."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return x.detach()


def _versions(out: Any) -> list[int]:
    return [each._version for each in tree_leaves(out) if isinstance(each, Tensor)]


class _Mode(TorchDispatchMode):
    def __init__(self, kept: Kept) -> None:
        super().__init__()
        self.kept, self.number = kept, 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Formulas that are compiled run within it as they do elsewhere."""
        return True


class _Making(_Mode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.kept.ran(func, args, out)
        return out


class _Taking(_Mode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.kept.has(func):
            return func(*args, **(kwargs or {}))
        self.number += 1
        return self.kept.take(func, self.number - 1)
