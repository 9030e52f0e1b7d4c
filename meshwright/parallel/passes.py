"""Passes: forward and backward of the micro-batches of a step, through the stages of a model.

With one stage they are a plain loop. A pipeline replaces the loop by a schedule, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..data import Batch
from ..mesh import Mesh
from ..models import Decoder
from ..watch import doing
from .fsdp import last_micro_batch, reset_after_forward

Scores = tuple[Tensor, ...]


class Staged(Protocol):
    """A model on a mesh, as far as a pass must know it."""

    parts: tuple[Decoder, ...]
    mesh: Mesh


def run(
    model: Staged,
    batches: Sequence[Batch],
    want: str,
    term: Callable[[Batch, Scores], tuple[Tensor, Tensor]],
    task: str,
) -> Tensor:
    """Forward and backward of every micro-batch; the sum of the shares.

    `term` makes two things of a batch and its scores: the number that backward starts from, and this rank's shares.
    """
    total = None
    for number, batch in enumerate(batches, 1):
        doing(f"{task}, micro-batch {number} of {len(batches)}")
        last_micro_batch(model.parts, number == len(batches))
        loss, share = term(batch, forward(model, batch, want))
        loss.backward()
        total = share if total is None else total + share
    assert total is not None, "a step has at least one batch"
    return total


@torch.no_grad()
def run_forward(
    model: Staged, batches: Sequence[Batch], want: str, term: Callable[[Batch, Scores], Tensor]
) -> list[Tensor]:
    """What `term` makes of each batch and its scores, without gradients."""
    try:
        return [term(batch, forward(model, batch, want)) for batch in batches]
    finally:
        reset_after_forward(model.parts)


def forward(model: Staged, batch: Batch, want: str) -> Scores:
    (part,) = model.parts
    lo, hi = model.mesh.token_range(len(batch))
    filler_at = len(batch) - batch.num_filler
    part.balance.begin(torch.arange(lo, hi, device=model.mesh.device) < filler_at)
    return part(batch.tokens, batch.labels, batch.docs, want)
