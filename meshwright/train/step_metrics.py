"""What the ranks measure in a step, and tell each other at its end in one collective."""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..data import IGNORE, SOURCE, Batch
from ..engine import losses
from ..engine.losses import Fields, Scores
from ..errors import RankError
from ..mesh import Mesh


class BySource:
    """The usual loss. It keeps the sum of its terms for each source of the data, and how many there were."""

    def __init__(self, num_sources: int) -> None:
        self.num_sources = num_sources
        self._found: list[Tensor] = []  # [sources, 2] of each micro-batch, where the scores are

    def __call__(self, scores: Scores, fields: Fields) -> Tensor:
        terms_T = losses.cross_entropy(scores, fields)
        if torch.is_grad_enabled():  # neither evaluations nor what the engine tries with a loss
            source_T, is_target_T = fields[SOURCE], fields["labels"] != IGNORE
            here = [is_target_T & (source_T == number) for number in range(self.num_sources)]
            kept_T = terms_T.detach().double()
            rows = [torch.stack([kept_T.masked_fill(~each, 0.0).sum(), each.sum().double()]) for each in here]
            self._found.append(torch.stack(rows))
        return terms_T

    def take(self) -> list[float]:
        """Of the micro-batches since it was asked last: sum and number of the first source, of the second, ..."""
        found, self._found = self._found, []
        return torch.stack(found).sum(0).flatten().tolist() if found else [0.0] * (2 * self.num_sources)


class Reading(NamedTuple):
    """Of one rank. `squares`: of the lengths of its documents. `sources`: what `BySource` took."""

    signal: int
    wait_s: float
    step_s: float
    squares: float
    sources: Sequence[float]


class Measured(NamedTuple):
    """Of all ranks: a signal that any of them got, the longest times, the fullest memory."""

    signal: int
    wait_s: float
    step_s: float
    squares: float
    peak_bytes: int
    peak_rank: int
    sources: tuple[tuple[float, float], ...]


def gather_readings(mesh: Mesh, reading: Reading, at: str) -> Measured:
    """Every rank calls it, and gets the same."""
    own = (*reading[:4], float(_peak_bytes(mesh.device)), *reading.sources)
    rows = mesh.all_or_none(None, at, RankError, [float(number) for number in own])
    signal, wait, time, _, peak, *_ = rows.amax(0).tolist()
    _, _, _, squares, _, *sums = rows.sum(0).tolist()  # a rank has the terms of its own tokens alone
    return Measured(
        int(signal), wait, time, squares * mesh.num_data_ranks / len(rows), int(peak), int(rows[:, 4].argmax()),
        tuple(zip(sums[::2], sums[1::2], strict=True)),
    )  # fmt: skip


def squares_of(batches: Sequence[Batch]) -> float:
    """Of the lengths of documents, without filler."""
    ends = [(batch.bounds, len(batch) - batch.num_filler) for batch in batches]
    return float(sum((b - a) ** 2 for bounds, end in ends for a, b in pairwise(bounds) if b <= end))


def _peak_bytes(device: torch.device) -> int:
    """Of the device since the process began; of a CPU all that the process had."""
    if device.type != "cpu":
        return int(torch.get_device_module(device).max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
