"""A trial on its mesh, with what was recorded: what every oracle gets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from ..axes import DENSE
from ..engine import Engine, Model
from ..mesh import Mesh
from .findings import Finding, Margin, Notes
from .recorder import Seen
from .trial import Reference, Trial

Findings = Iterator[Finding]


@dataclass
class Run:
    trial: Trial
    reference: Reference
    engine: Engine
    notes: Notes = field(default_factory=Notes)
    loading: list[Seen] = field(default_factory=list)
    stepping: list[Seen] = field(default_factory=list)
    routed: dict[str, tuple[int, int, int]] = field(default_factory=dict)  # by door: passes, rows due, their width
    stored: dict[str, int] = field(default_factory=dict)  # bytes of this rank before the first update
    blame: str = ""  # what is wrong already, and makes all that comes later wrong too

    @property
    def model(self) -> Model:
        return self.engine.model

    def measured(
        self, oracle: str, what: str, count: int, worst: float = 0.0, allowed: float = 0.0, where: str = ""
    ) -> None:
        """How right it is on this rank; what all ranks find alike, rank 0 notes alone (`measured_once`)."""
        self.notes.measured(Margin(oracle, what, count, worst, allowed, where))

    def measured_once(
        self, oracle: str, what: str, count: int, worst: float = 0.0, allowed: float = 0.0, where: str = ""
    ) -> None:
        if self.model.mesh.rank == 0:
            self.measured(oracle, what, count, worst, allowed, where)


def everywhere(mesh: Mesh, numbers: list[int]) -> list[list[int]]:
    """The numbers of every rank, on every rank."""
    return mesh.gather_rows(torch.tensor([numbers], device=mesh.device), DENSE).tolist()
