"""P1: measure what FP8 matmuls cost a model in loss, predictions and gradients, relative to bfloat16.

FP8 changes the numbers by design, so no bound on single values applies. Training needs gradients to keep their
direction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..data import IGNORE, Batch
from ..engine import Engine, gather, logits
from ..mesh import Mesh
from .reference import Trial
from .results import Finding, Margin, Notes

_ALARM = 0.9  # the lowest accepted cosine of all gradients; 0.985 is usual if some tokens change experts


@dataclass(frozen=True)
class StepValues:
    """The results of one forward and backward."""

    loss: float
    logprobs: Sequence[Tensor]  # of the whole vocabulary, by batch; empty with a value head
    grads: dict[str, Tensor]


def measure_fp8_cost(wide: Trial, low: Trial) -> tuple[Notes, list[str]]:
    """Run the same trial in bfloat16 without and with FP8 matmuls, and compare. -> notes, and lines for the report

    Call it in a separate process: it loads the real weights twice.
    """
    notes, batches = Notes(), wide.data(0, 0)
    before, after = (_step_values(trial.engine(Mesh(device="cpu")), batches) for trial in (wide, low))
    cosines = {name: _cosine([before.grads[name]], [after.grads[name]]) for name in before.grads}
    notes.add_findings("P1", p1_cost(before, after, notes))
    worst = min(cosines, key=lambda name: cosines[name])
    lines = [
        f"loss {before.loss:.5f} in bfloat16, {after.loss:.5f} in FP8 ({after.loss / before.loss - 1:+.2%})",
        f"cosine of gradients {_cosine([*before.grads.values()], [*after.grads.values()]):.5f}; the least is "
        f"{cosines[worst]:.5f}, of {worst}",
    ]
    if before.logprobs:
        lines.insert(1, f"{_divergence(before, after, batches):.2e} nats of KL divergence per token")
    return notes, [f"{each}, on random tokens" for each in lines]


def p1_cost(before: StepValues, after: StepValues, notes: Notes) -> Iterator[Finding]:
    """Gradients with FP8 matmuls point in the direction of those in bfloat16."""
    lost = 1 - _cosine([*before.grads.values()], [*after.grads.values()])
    notes.add_margin(
        Margin(
            "P1", "gradients, as one vector, compared with bfloat16: 1 - cosine", len(before.grads), lost, 1 - _ALARM
        )
    )
    if not lost <= 1 - _ALARM:
        guess = "leave layers out with fp8_skip=, the first and the last ones first"
        yield Finding("P1", "all gradients", f"their cosine with those of bfloat16 is {1 - lost:.4f}", guess)


def _step_values(engine: Engine, batches: Sequence[Batch]) -> StepValues:
    logprobs = (
        [] if "values" in engine.model.blueprint.scores else [logits(engine.model, b).log_softmax(-1) for b in batches]
    )
    loss = engine.backward(batches)
    return StepValues(loss, logprobs, gather(engine.model, "grad"))


def _divergence(before: StepValues, after: StepValues, batches: Sequence[Batch]) -> float:
    """Return the mean KL divergence of the predictions in FP8 from those in bfloat16, over tokens with a label."""
    of_batches = []
    for p, q, batch in zip(before.logprobs, after.logprobs, batches, strict=True):
        of_batches.append((p.exp() * (p - q)).sum(-1)[batch.labels != IGNORE])
    return float(torch.cat(of_batches).mean())


def _cosine(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """Return the cosine of two lists of tensors, each taken as one vector."""
    pairs = [(x.double().flatten(), y.double().flatten()) for x, y in zip(a, b, strict=True)]
    both, of_a, of_b = (
        sum(float(t) for t in each) for each in zip(*((x @ y, x @ x, y @ y) for x, y in pairs), strict=True)
    )
    return both / ((of_a * of_b) ** 0.5 or 1.0)
