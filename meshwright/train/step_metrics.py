"""Measurements of a step: each rank's own, exchanged in one all-gather at the end of the step.

Times, memory, a received signal and the loss of each source are a few numbers per rank. One collective for all of them
costs one latency, and every rank gets the same result, so all can base decisions on it.
"""

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
    """Cross-entropy that also accumulates the sum and number of its terms for each data source.

    The sums stay on the device until the end of the step: reading them earlier would make the host wait.
    """

    def __init__(self, num_sources: int) -> None:
        self.num_sources = num_sources
        self._sums: list[Tensor] = []  # [sources, 2] for each micro-batch, on the device of the scores

    def __call__(self, scores: Scores, fields: Fields) -> Tensor:
        terms_T = losses.cross_entropy(scores, fields)
        if torch.is_grad_enabled():  # not in evaluations, nor when the engine probes the loss
            source_T, is_target_T = fields[SOURCE], fields["labels"] != IGNORE
            masks = [is_target_T & (source_T == number) for number in range(self.num_sources)]
            values_T = terms_T.detach().double()
            rows = [torch.stack([values_T.masked_fill(~mask_T, 0.0).sum(), mask_T.sum().double()]) for mask_T in masks]
            self._sums.append(torch.stack(rows))
        return terms_T

    def take(self) -> list[float]:
        """Return and reset the sums since the last call: sum and number of the first source, then of the second, ..."""
        sums, self._sums = self._sums, []
        return torch.stack(sums).sum(0).flatten().tolist() if sums else [0.0] * (2 * self.num_sources)


class Reading(NamedTuple):
    """The measurements of one rank.

    `squares`: the sum of squared document lengths, to which the operations of causal attention are proportional.
    `sources`: the sums of `BySource`.
    """

    signal: int
    wait_s: float
    step_s: float
    squares: float
    sources: Sequence[float]


class Measured(NamedTuple):
    """The measurements of all ranks: any signal, the longest times, the highest peak of memory and its rank, sums."""

    signal: int
    wait_s: float
    step_s: float
    squares: float
    peak_bytes: int
    peak_rank: int
    sources: tuple[tuple[float, float], ...]


def gather_readings(mesh: Mesh, reading: Reading, at: str) -> Measured:
    """All-gather the readings of all ranks. Collective; every rank returns the same.

    Ranks that differ only in tp, cp and pp read the same documents. A sum over all ranks counts these once for each
    such rank, so squares are scaled by `num_data_ranks / len(rows)`.
    """
    values = (*reading[:4], float(_peak_bytes(mesh.device)), *reading.sources)
    rows = mesh.all_or_none(None, at, RankError, [float(value) for value in values])
    signal, wait, time, _, peak, *_ = rows.amax(0).tolist()
    _, _, _, squares, _, *sums = rows.sum(0).tolist()  # the loss term of a token is on one rank only
    return Measured(
        int(signal), wait, time, squares * mesh.num_data_ranks / len(rows), int(peak), int(rows[:, 4].argmax()),
        tuple(zip(sums[::2], sums[1::2], strict=True)),
    )  # fmt: skip


def squares_of(batches: Sequence[Batch]) -> float:
    """Return the sum of squared document lengths, without the padding at the end of a stream."""
    ends = [(batch.bounds, len(batch) - batch.num_filler) for batch in batches]
    return float(sum((b - a) ** 2 for bounds, end in ends for a, b in pairwise(bounds) if b <= end))


def _peak_bytes(device: torch.device) -> int:
    """Return the peak of allocated device memory; on a CPU the peak resident size of the process.

    `ru_maxrss` is in bytes on macOS and in KiB on Linux.
    """
    if device.type != "cpu":
        return int(torch.get_device_module(device).max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
