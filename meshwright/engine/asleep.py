"""Track which parts of a model sleep, in host memory with their device storages freed (`Engine.sleep`)."""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import StateError, counted
from ..ops.host_memory import HostCopy

# The parts that sleep and wake as a whole. Gradients that wait for an update go with the optimizer state: scoring needs
# neither.
WEIGHTS, OPTIMIZER = "weights", "optimizer"
_WORDS = {WEIGHTS: "the weights are", OPTIMIZER: "optimizer state and gradients are"}


class Asleep:
    """The host copies of each part that is asleep: several, if two engines train parts of one model.

    A part without bytes on this rank has an empty copy, so that all ranks refuse the same calls.
    """

    def __init__(self) -> None:
        self.copies: dict[str, list[HostCopy]] = {}

    def __contains__(self, part: str) -> bool:
        return part in self.copies

    def add(self, part: str, copy: HostCopy) -> None:
        """Note that a part is about to be freed. Note it first: an interrupted `free` then leaves a part that can be
        woken."""
        self.copies.setdefault(part, []).append(copy)

    def of(self, parts: Iterable[str]) -> list[HostCopy]:
        """Return the copies of some parts."""
        return [copy for part in parts for copy in self.copies.get(part, [])]

    def check(self) -> None:
        """Refuse a call that needs weights and optimizer state."""
        self._refuse(WEIGHTS, OPTIMIZER)

    def check_weights(self) -> None:
        """Refuse a call that needs weights. Without this check it would read freed memory, and crash."""
        self._refuse(WEIGHTS)

    def check_gradients(self) -> None:
        """Refuse a call that needs gradients."""
        self._refuse(OPTIMIZER)

    def _refuse(self, *parts: str) -> None:
        for part in parts:
            if part in self.copies:
                num_bytes = sum(copy.num_bytes for copy in self.copies[part])
                raise StateError(
                    f"{_WORDS[part]} asleep, {counted(num_bytes, 'byte')} of this rank in host memory; call "
                    "engine.wake() first, or model.wake() of a model without an engine"
                )
