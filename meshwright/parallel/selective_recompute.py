"""Selective activation checkpointing: keep the results of costly operations, and recompute the rest (arXiv:2205.05198).

torch's `create_selective_checkpoint_contexts` does the same but keeps too much: results after the last one that
backward needs (the output of a layer's last matmul), and a partial sum in addition to its reduce-scatter.
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
    """The detached result of an operation, and the version counters of its tensors at that time."""

    op: object
    out: Any
    versions: list[int]


class SavedResults:
    """Results of the costly operations (`ops`) of one run of a layer, in order. `reductions`: those of `ops` that save
    nothing for backward, so that their input need not be kept."""

    def __init__(self, ops: Iterable[object], reductions: Iterable[object] = ()) -> None:
        self._ops, self._results, self._needed = frozenset(ops), list[_Result | None](), 0
        self._reductions = frozenset(reductions)
        self._unused: Any = None  # the last result as the layer holds it, while no other operation has run

    @contextmanager
    def record(self) -> Iterator[None]:
        """Record results while the layer runs for the first time."""
        with _Recording(self):
            try:
                yield
            finally:
                self._unused = None  # its autograd history refers to this layer's hooks: a reference cycle
        del self._results[self._needed :]  # the replay stops at the last saved tensor

    def mark_saved(self) -> None:
        """Note that a tensor was saved for backward: everything recorded so far may be needed to recompute it."""
        self._needed, self._unused = len(self._results), None

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Return recorded results instead of computing them, each once."""
        with _Replaying(self):
            yield

    def ran(self, op: object, args: tuple[Any, ...], out: Any) -> None:
        """Record the result of an operation if it is one of `ops`."""
        if op not in self._ops:
            self._unused = None
            return
        if op in self._reductions and isinstance(args[0], Tensor) and args[0] is self._unused:
            self._drop_last(args[0])
        self._results.append(_Result(op, tree_map_only(Tensor, _detached, out), _versions(out)))
        self._unused = out

    def _drop_last(self, x: Tensor) -> None:
        """Drop the previous result if a reduction is its only consumer: the partial sum [T, D] that a reduce-scatter
        sums up.

        Its shape stands in for it on the meta device. Should anything else want its values in the replay, torch refuses
        to mix devices, so a wrong drop cannot pass unnoticed.
        """
        last = self._results[-1]
        assert last is not None
        self._results[-1] = _Result(last.op, torch.empty((), dtype=x.dtype, device="meta").expand(x.shape), [0])

    def take(self, op: object, number: int) -> Any:
        """Return the recorded result of operation `number`, and forget it."""
        result = self._results[number] if number < self._needed else None
        if result is None or result.op != op:
            recorded = "nothing" if result is None else str(result.op)
            raise StateError(
                f"backward recomputed a layer and reached {op}, where its first run recorded {recorded}; make its "
                'forward deterministic, or choose recompute="full"'
            )
        if result.versions != _versions(result.out):
            raise StateError(f"the result of {op} was written into before backward took it; write into a copy of it")
        self._results[number] = None
        return result.out

    def has(self, op: object) -> bool:
        return op in self._ops


def _detached(x: Tensor) -> Tensor:
    """Detach, but share the version counter, by which later in-place writes are noticed. Below autograd, where this
    runs, torch shares it only if ADInplaceOrView is not excluded."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return x.detach()


def _versions(out: Any) -> list[int]:
    return [each._version for each in tree_leaves(out) if isinstance(each, Tensor)]


class _Mode(TorchDispatchMode):
    """A dispatch mode over one run of a layer."""

    def __init__(self, saved: SavedResults) -> None:
        super().__init__()
        self.saved, self.number = saved, 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled kernels of `ops` run under this mode as they do elsewhere."""
        return True


class _Recording(_Mode):
    """Records results in the first run."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.saved.ran(func, args, out)
        return out


class _Replaying(_Mode):
    """Returns recorded results in the second run, in the same order."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.saved.has(func):
            return func(*args, **(kwargs or {}))
        self.number += 1
        return self.saved.take(func, self.number - 1)
