"""Independent implementations of labels, the mean loss, the optimizer and the choice of experts.

A mesh is compared with one process of the same code, which cannot see a mistake that both make. So the process itself
is held against these few lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..data import IGNORE
from ..engine import Engine, Model
from ..optim import Optimizer
from ..weights import chosen
from .diagnose.forward import scores_of, watched_routers
from .fp8_matmuls import q1_products
from .results import Finding, Margin, Notes

if TYPE_CHECKING:
    from .reference import StepOf, Trial

UPDATE = 1e-6  # of the lr: what rounding in float64 may do to an update


def notes_of(
    trial: Trial, engine: Engine, before: Mapping[str, Tensor], steps: Sequence[StepOf],
    sums: Sequence[Sequence[tuple[float, float]]], aux: float,
) -> Notes:  # fmt: skip
    """What is wrong with one process already, and how right it is. `before`: its weights before the first step."""
    notes = Notes()
    notes.findings += [*_labels(trial, notes), *_mean(steps[0].loss, sums, aux, trial, notes)]
    notes.findings += [*_first_aux(trial, engine, aux, notes), *_loads(trial, engine, steps, notes)]
    notes.findings += _rounded(engine, steps[0].grads)
    if trial.asks_products:
        notes.found("Q1", q1_products(engine, trial.data(0, 0)[:1], notes))
    if trial.adds_up:
        notes.found("O1", o1_updates(engine, before, steps, notes))
    return notes


def _rounded(engine: Engine, grads: Mapping[str, Tensor]) -> Iterator[Finding]:
    """Gradients are handed out as wide as they are summed."""
    wide = {tensor.dtype for tensor in engine.model.stored().values()}
    for key, grad in grads.items():
        if grad.dtype not in wide:
            what = f"its gradient is handed out in {grad.dtype}, but was summed in {' or '.join(map(str, wide))}"
            yield Finding("G1", key, what, "the dtype of the file is taken where gradients are streamed")


def _labels(trial: Trial, notes: Notes) -> Iterator[Finding]:
    num = 0
    for step in range(trial.steps):
        for rank in range(trial.axes.num_data_ranks):
            both = zip(trial.data(rank, step), trial.data.labels(rank, step), strict=True)
            for number, (batch, due_T) in enumerate(both):
                found_T, num = batch.labels[: len(due_T)], num + len(due_T)
                off = (found_T != due_T).nonzero().flatten().tolist()
                if off or (batch.labels[len(due_T) :] != IGNORE).any():
                    at = off[0] if off else len(due_T)
                    what = f"of token {at} of batch {number} it is {batch.labels[at].item()}"
                    due = due_T[at].item() if off else IGNORE
                    yield Finding(
                        "D1", "labels", f"{what}, the documents say {due}", "a token predicts beyond its document"
                    )
                    return
    notes.measured(Margin("D1", "labels", num))


def _mean(
    loss: float, sums: Sequence[Sequence[tuple[float, float]]], aux: float, trial: Trial, notes: Notes
) -> Iterator[Finding]:
    """The loss is the sum of weighted terms by the sum of weights, of what the model itself says of each token."""
    terms, weight = (sum(each) for each in zip(*(batch for of_rank in sums for batch in of_rank), strict=True))
    due, allowed = terms / weight + aux, trial.tolerance.loss
    error = abs(loss - due) / abs(due)
    if not error <= allowed:
        what = f"one process finds {loss!r}, the mean of its own terms is {due!r}"
        yield Finding("S1", "loss of one process", what, "weights or targets are counted wrongly, on a mesh too")
    notes.measured(Margin("S1", "loss of one process beside a plain mean", 1, error, allowed))


def _first_aux(trial: Trial, engine: Engine, aux: float, notes: Notes) -> Iterator[Finding]:
    """With router_aux="previous" the first step takes even shares k / E, so its aux loss is the coefficient times k,
    whatever the weights: the mean over layers and tokens of E * sum(k / E * probability)."""
    balance, allowed = engine.router.balance, trial.tolerance.loss
    due = balance.coefficient * balance.top_k
    if trial.router_aux != "previous" or not balance.num_layers or not due:
        return
    error = abs(aux - due) / due
    if not error <= allowed:
        what = f"one process finds {aux!r} in the first step, {balance.coefficient} * {balance.top_k} is due"
        yield Finding("S1", "aux loss of one process", what, "it is not averaged over layers and tokens")
    notes.measured(Margin("S1", "aux loss of even shares", 1, error, allowed))


def _loads(trial: Trial, engine: Engine, steps: Sequence[StepOf], notes: Notes) -> Iterator[Finding]:
    balance = engine.router.balance
    if not balance.num_layers:
        return
    for number, step in enumerate(steps):
        ranks = range(trial.axes.num_data_ranks)
        num_tokens = sum(bounds[-1] for rank in ranks for bounds in trial.data.bounds(rank, number))
        due = balance.top_k * num_tokens
        if any(load != due for load in step.loads.sum(1).tolist()):
            what = f"one process counts {step.loads.sum(1).tolist()} choices by layer in step {number}"
            yield Finding("N1", "load of experts", f"{what}; {num_tokens} tokens choose {balance.top_k}, {due} in all")
    notes.measured(Margin("N1", "layers whose experts get top_k x tokens", balance.num_layers * len(steps)))
    yield from _routing(engine.model, trial, notes)


def _routing(model: Model, trial: Trial, notes: Notes) -> Iterator[Finding]:
    """Experts and weights are those of the router's own numbers, in float64. Ties may fall either way."""
    with watched_routers(model) as seen:
        scores_of(model, trial.data(0, 0)[0])
    allowed, worst, where, num = (1e-10 if trial.dtype == torch.float64 else 1e-5), 0.0, "", 0
    for layer, (weight_Tk, logits_TE, expert_Tk) in seen.items():
        all_TE = logits_TE.double().softmax(-1)
        due_Tk, found_Tk = all_TE.topk(expert_Tk.shape[1], -1).values, all_TE.gather(1, expert_Tk)
        shared_Tk = (found_Tk / found_Tk.sum(-1, keepdim=True), found_Tk)  # renormalised or not: the family says it
        off = min((weight_Tk.double() - each).abs().max().item() for each in shared_Tk)
        off = max(off, (found_Tk.sort(descending=True).values - due_Tk).abs().max().item())
        num += len(expert_Tk)
        if off > worst:
            worst, where = off, f"layer {layer} of experts"
        if not off <= allowed:
            what = f"experts or weights of layer {layer} of experts are off by {off:.1e} from its own logits"
            yield Finding("N1", "router", what, "its softmax is rounded, or other experts are taken than the largest")
    notes.measured(Margin("N1", "choices of experts", num, worst, allowed, where))


@dataclass
class _Parameter:
    """A whole parameter in float64, and its optimizer state."""

    weight: Tensor
    state: tuple[Tensor, ...]


def o1_updates(
    engine: Engine, before: Mapping[str, Tensor], steps: Sequence[StepOf], notes: Notes
) -> Iterator[Finding]:
    """Compare the updates of one process with those of the plain optimizer: with schedule, clipping by one norm for
    all, and decay of what has two dims or more."""
    table, choice = engine.model.table, engine.model.keymap.choice
    twice = {copy.key for param in table for copy in chosen(param, choice).copies}
    optimizer, most, worst, where = engine.optimizer.options, engine.max_norm or float("inf"), 0.0, ""
    zeros = {k: tuple(torch.zeros_like(w).double() for _ in optimizer.state_names) for k, w in before.items()}
    kept = {k: _Parameter(w.double(), zeros[k]) for k, w in before.items()}
    assert callable(engine.lr)
    for number, step in enumerate(steps):
        norm = sum(float(g.double().square().sum()) for k, g in step.grads.items() if k not in twice) ** 0.5
        lrs = (engine.lr(number), engine.lr(number + 1), engine.lr(max(0, number - 1)))
        lr, clip = lrs[0], min(1.0, most / norm) if norm else 1.0
        for key, grad in step.grads.items():
            make = _maker(optimizer, kept[key], grad.double(), number + 1)
            due, state = make(lr, clip, grad.dim() > 1)
            off = (step.weights[key] - due).abs().nan_to_num(torch.inf)
            if off.max() > worst * lr:
                worst, where = off.max().item() / lr, f"{key} after step {number}"
            if not off.max() <= UPDATE * lr:
                plain = f"a plain {type(optimizer).__name__}"
                what = f"{int((off > UPDATE * lr).sum())} of {off.numel()} elements end other than in {plain}"
                guess = _guess(make, step.weights[key], lrs, (clip, most / norm), grad.dim() > 1)
                yield Finding(
                    "O1", key, f"{what} after step {number}, by up to {off.max().item() / lr:.1e} of lr", guess
                )
            # from what the engine has, so that one wrong update is named once
            kept[key] = _Parameter(step.weights[key].double(), state)
    num = sum(w.numel() for w in before.values()) * len(steps)
    notes.measured(Margin("O1", "updates of elements, in parts of lr", num, worst, UPDATE, where))


Make = Callable[[float, float, bool], tuple[Tensor, tuple[Tensor, ...]]]


def _maker(optimizer: Optimizer, kept: _Parameter, grad: Tensor, number: int) -> Make:
    """Return what gives weight and state after update `number` (1, 2, ...), for any lr and clip, decayed or not."""

    def make(lr: float, clip: float, decays: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
        return optimizer.plain_update(kept.weight, grad * clip, kept.state, lr=lr, step=number, decays=decays)

    return make


def _guess(make: Make, found: Tensor, lrs: tuple[float, float, float], clips: tuple[float, float], decays: bool) -> str:
    """Which mistake gives just these numbers. `lrs`: of this step, the next, the one before. `clips`: what scales the
    gradient, and what would if it were scaled up too."""
    (now, later, before), (clip, to_most) = lrs, clips
    mistakes = {
        "the lr of the next step is taken": make(later, clip, decays),
        "the lr of the step before is taken": make(before, clip, decays),
        "it decays, though it has one dim" if not decays else "it does not decay": make(now, clip, not decays),
        "the gradient is not clipped": make(now, 1.0, decays),
        "the gradient is clipped twice": make(now, clip * clip, decays),
        "the gradient is scaled to max_norm, though it is smaller": make(now, to_most, decays),
    }
    return next((what for what, made in mistakes.items() if (found - made[0]).abs().max() <= UPDATE * now), "")
