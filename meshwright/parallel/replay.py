"""Activation checkpointing by saved-tensor hooks: backward recomputes what forward would have saved.

torch's `checkpoint(use_reentrant=False)` works the same way, with much that our layers do not need: RNG states, nested
checkpoints, early-stop bookkeeping for several graphs. That costs the host half a millisecond or more per layer, and a
GPU that is bound by launches waits for it.

pack: forward of the layer saves a numbered slot in place of each tensor. unpack: the first slot that backward asks for
runs the layer once more, under hooks that fill the slots in the same order, up to the last one.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import count
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..errors import StateError

Context = Callable[[], AbstractContextManager[Any]]


def recompute_saved_tensors(
    run: Callable[..., Any], args: tuple[Any, ...], context: Context, saved: Callable[[], None] = lambda: None
) -> saved_tensors_hooks:
    """Return hooks under which `run(*args)` saves slots instead of tensors.

    Backward runs it once more within `context`, up to the last tensor that was saved. `saved` is called for each of
    them.
    """
    replay = _Replay(run, args, context, saved)
    return saved_tensors_hooks(replay.pack, replay.unpack)


class _Slot:
    """Stand in for a saved tensor: its index, and its shape and dtype to compare with the second run."""

    __slots__ = ("__weakref__", "index", "meta")

    def __init__(self, index: int, tensor: Tensor) -> None:
        self.index, self.meta = index, (tensor.shape, tensor.dtype)


class _AllReadyError(Exception):
    """Ends the second run: all saved tensors are ready, and nothing after them is needed."""


class _Replay:
    """The hooks of one run of a layer, and what its second run computed."""

    def __init__(
        self, run: Callable[..., Any], args: tuple[Any, ...], context: Context, saved: Callable[[], None]
    ) -> None:
        self.run, self.args, self.context, self.saved = run, args, context, saved
        self.versions = [arg._version for arg in args if isinstance(arg, Tensor)]
        self.slots: list[weakref.ref[_Slot]] = []  # alive as long as the backward node that will unpack it
        self.ready: dict[int, Tensor] = {}

    def pack(self, tensor: Tensor) -> _Slot:
        """Save a slot instead of a tensor: 100 bytes in place of megabytes."""
        slot = _Slot(len(self.slots), tensor)
        self.slots.append(weakref.ref(slot))
        self.saved()
        return slot

    def unpack(self, slot: _Slot) -> Tensor:
        """Return a recomputed tensor to its backward node, and forget it: it is unpacked once."""
        if slot.index not in self.ready:
            self._run()
        return self.ready.pop(slot.index)

    def _run(self) -> None:
        """Run the layer again and collect what it saves. Refuse inputs whose version counter has changed since."""
        if self.versions != [arg._version for arg in self.args if isinstance(arg, Tensor)]:
            raise StateError(
                "an input of a layer was written into in place before backward could recompute the layer; write into "
                'a copy of it, or choose recompute="none"'
            )
        indices = count()
        keep = functools.partial(self._keep, indices)
        hooks = saved_tensors_hooks(keep, _refuse)
        with contextlib.suppress(_AllReadyError), self.context(), hooks, torch.enable_grad():
            self.run(*self.args)
        if (num_saved := next(indices)) != len(self.slots):
            raise StateError(
                f"a layer saved {len(self.slots)} tensors for backward in its first run, and {num_saved} when it ran "
                'again; make its forward deterministic, or choose recompute="none"'
            )

    def _keep(self, indices: Iterator[int], tensor: Tensor) -> None:
        """Fill the slot of the first run with a tensor of the second.

        The graph of the second run is thrown away, so its own nodes get None. A slot that is gone belongs to a node
        that is gone, and needs nothing.
        """
        index = next(indices)
        slot = self.slots[index]()
        if slot is not None:
            if slot.meta != (tensor.shape, tensor.dtype):
                (saved_shape, saved_dtype), (shape, new_dtype) = slot.meta, (tensor.shape, tensor.dtype)
                raise StateError(
                    f"a layer saved {tuple(saved_shape)} in {saved_dtype} for backward in its first run, and "
                    f"{tuple(shape)} in {new_dtype} when it ran again; make its forward deterministic"
                )
            # Detached: an op that saves its own output (softmax) would otherwise be in a reference cycle with it.
            self.ready[index] = tensor.detach()
        if index == len(self.slots) - 1:
            raise _AllReadyError


def _refuse(_: None) -> NoReturn:
    raise StateError(
        'a layer calls autograd within its own forward, so backward cannot recompute it; choose recompute="none"'
    )
