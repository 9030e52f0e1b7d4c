"""Independent implementations of labels, the mean loss, the optimizer and the choice of experts.

A mesh is compared with one process that runs the same code, so a mistake in both would not show. These checks compare
that process with a few plain lines that use neither `pack` nor the engine. They also cover what transformers does not
define: how micro-batches make up a step, and how a step updates weights.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..data import IGNORE
from ..engine import Engine, Model, MtpRecord
from ..models import PREFIX, text_config
from ..optim import Optimizer
from ..sharding import Param
from ..weights import chosen
from .diagnose.forward import scores_of, watched_routers
from .file_matrices import indices_of_matrices
from .fp8_matmuls import q1_matmuls
from .results import Finding, Margin, Notes

if TYPE_CHECKING:
    from ..engine.router import Router
    from .reference import ReferenceStep, Trial

UPDATE = 1e-6  # of the lr: the error that rounding in float64 may cause in an update


def notes_of(
    trial: Trial, engine: Engine, before: Mapping[str, Tensor], steps: Sequence[ReferenceStep],
    sums: Sequence[Sequence[tuple[float, float]]], aux: float,
) -> Notes:  # fmt: skip
    """Run all checks of one process, and return their findings and margins.

    `before`: its weights before the first step. `sums`: sums of loss terms and of weights, by data rank and batch.
    `aux`: the router's part of the first loss.
    """
    notes = Notes()
    notes.findings += [*_labels(trial, notes), *_mean(steps[0].loss, sums, aux, trial, notes)]
    notes.findings += [*_first_aux(trial, engine, aux, notes), *_loads(trial, engine, steps, notes)]
    notes.findings += _slopes(trial, engine, steps, notes)
    notes.findings += _rounded(engine, steps[0].grads)
    if trial.checks_fp8_matmuls:
        notes.add_findings("Q1", q1_matmuls(engine, trial.data(0, 0)[:1], notes))
    if trial.checks_updates:
        notes.add_findings("O1", o1_updates(engine, before, steps, notes))
    return notes


def _rounded(engine: Engine, grads: Mapping[str, Tensor]) -> Iterator[Finding]:
    """Check that gradients are handed out in the dtype in which they are summed.

    After rounding to the dtype of the files, a wrong gradient could equal the right one.
    """
    wide = {tensor.dtype for tensor in engine.model.stored().values()}
    for key, grad in grads.items():
        if grad.dtype not in wide:
            what = f"its gradient is handed out in {grad.dtype}, but was summed in {' or '.join(map(str, wide))}"
            yield Finding("G1", key, what, "the dtype of the file is taken where gradients are streamed")


def _labels(trial: Trial, notes: Notes) -> Iterator[Finding]:
    """Check `pack`: the label of a token is the next one of its document, and padding has none."""
    num = 0
    # One finding is enough: if `pack` is wrong, it is wrong everywhere.
    for step in range(trial.steps):
        for rank in range(trial.axes.num_data_ranks):
            both = zip(trial.data(rank, step), trial.data.labels(rank, step), strict=True)
            for number, (batch, expected_T) in enumerate(both):
                labels_T, num = batch.labels[: len(expected_T)], num + len(expected_T)
                off = (labels_T != expected_T).nonzero().flatten().tolist()
                if off or (batch.labels[len(expected_T) :] != IGNORE).any():
                    at = off[0] if off else len(expected_T)
                    what = f"token {at} of batch {number} has the label {batch.labels[at].item()}"
                    expected = expected_T[at].item() if off else IGNORE
                    yield Finding(
                        "D1", "labels", f"{what}, the documents say {expected}", "a token predicts beyond its document"
                    )
                    return
    notes.add_margin(Margin("D1", "labels", num))


def _mean(
    loss: float, sums: Sequence[Sequence[tuple[float, float]]], aux: float, trial: Trial, notes: Notes
) -> Iterator[Finding]:
    """Check that the loss is the sum of weighted terms divided by the sum of weights, from the model's own scores.

    Both sums are over the whole step: a mean of micro-batch means gives tokens of short micro-batches more weight
    (torchtitan#2206).
    """
    terms, weight = (sum(each) for each in zip(*(batch for of_rank in sums for batch in of_rank), strict=True))
    expected, allowed = terms / weight + aux, trial.tolerance.loss
    error = abs(loss - expected) / abs(expected)
    if not error <= allowed:
        what = f"one process has {loss!r}, the mean of its own terms is {expected!r}"
        yield Finding("S1", "loss of one process", what, "weights or targets are counted wrongly, on a mesh too")
    notes.add_margin(Margin("S1", "loss of one process compared with a plain mean", 1, error, allowed))


def mtp_of_one(
    trial: Trial, record: MtpRecord | None, alone: tuple[float, float] | None, notes: Notes
) -> Iterator[Finding]:
    """Check the loss and the acceptance of an MTP head against those of each document alone, with labels and weights
    from lists."""
    if record is None or alone is None:
        return
    allowed = trial.tolerance.loss
    compared = [("loss", record.loss, alone[0])]
    if trial.dtype == torch.float64:  # rounding may change the likeliest token, and make ties
        compared.append(("acceptance", record.acceptance, alone[1]))
    for name, actual, expected in compared:
        error = abs(actual - expected)
        if not error <= allowed * max(1.0, abs(expected)):
            what = f"one process has {actual!r}, documents alone give {expected!r}"
            guess = "labels cross documents, or weights or targets are counted wrongly"
            yield Finding("S1", f"{name} of the MTP head", what, guess)
        notes.add_margin(Margin("S1", f"{name} of the MTP head compared with documents alone", 1, error, allowed))


def _first_aux(trial: Trial, engine: Engine, aux: float, notes: Notes) -> Iterator[Finding]:
    """Check the router's aux loss (arXiv:2101.03961) in the one case with a closed form.

    With router_aux="previous" the first step assumes that experts get even shares k / E. Its aux loss is the mean over
    layers and tokens of E * sum(k / E * probability), times the coefficient. Probabilities sum to 1, so this is the
    coefficient times k, whatever the weights.
    """
    balance, allowed = engine.router.balance, trial.tolerance.loss
    expected = balance.coefficient * balance.top_k
    if trial.router_aux != "previous" or not balance.num_layers or not expected:
        return
    error = abs(aux - expected) / expected
    if not error <= allowed:
        what = f"one process has {aux!r} in the first step, expected {balance.coefficient} * {balance.top_k}"
        yield Finding("S1", "aux loss of one process", what, "it is not averaged over layers and tokens")
    notes.add_margin(Margin("S1", "aux loss of even shares", 1, error, allowed))


def _loads(trial: Trial, engine: Engine, steps: Sequence[ReferenceStep], notes: Notes) -> Iterator[Finding]:
    """Check that every token, but no padding, chooses top_k experts in each layer."""
    balance = engine.router.balance
    if not balance.num_layers:
        return
    for number, step in enumerate(steps):
        bounds = [each for rank in range(trial.axes.num_data_ranks) for each in trial.data.bounds(rank, number)]
        num_tokens, num_documents = sum(each[-1] for each in bounds), sum(len(each) - 1 for each in bounds)
        expected = [balance.top_k * num_tokens] * balance.num_layers
        if engine.mtp is not None:  # no next token follows the last one of a document
            expected += [balance.top_k * (num_tokens - num_documents)]
        if step.loads.sum(1).tolist() != expected:
            what = f"one process counts {step.loads.sum(1).tolist()} choices by layer in step {number}"
            yield Finding(
                "N1", "load of experts", f"{what}; {num_tokens} tokens choose {balance.top_k}, {expected} in all"
            )
    notes.add_margin(Margin("N1", "layers whose experts get top_k x tokens", len(expected) * len(steps)))
    yield from _routing(engine.model, trial, notes)


class Slope(NamedTuple):
    """The aux loss of a router in one micro-batch.

    `slope_E`: its gradient with respect to each expert's probability; None if the aux loss is not trained. `count_E`:
    the tokens that chose each expert, over all layers.
    """

    slope_E: Tensor | None
    count_E: Tensor


@contextmanager
def recorded_slopes(engine: Engine) -> Iterator[list[list[Slope]]]:
    """Record the slopes of each router, by micro-batch."""
    slopes: list[list[Slope]] = [[] for _ in engine._routers]
    for router, recorded in zip(engine._routers, slopes, strict=True):
        router.set_slope = partial(_recorded_slope, router, router.set_slope, recorded)  # type: ignore[method-assign]
    try:
        yield slopes
    finally:
        for router in engine._routers:
            del router.set_slope


def _recorded_slope(
    router: Router, set_slope: Callable[[int, int], Tensor], slopes: list[Slope], *given: int
) -> Tensor:
    aux, counts = set_slope(*given), [count_E.double() for count_E in router.balance.counts.values()]
    zeros_E = torch.zeros(router.balance.num_experts, dtype=torch.float64)
    slopes.append(Slope(router.balance.slope_E, torch.stack(counts).sum(0) if counts else zeros_E))
    return aux


def _slopes(trial: Trial, engine: Engine, steps: Sequence[ReferenceStep], notes: Notes) -> Iterator[Finding]:
    """Check the gradient of the aux loss in each step, for the routers of the trunk and of an MTP head.

    The loss is coefficient * E * sum(f_e * P_e), with P_e the mean probability of expert e over tokens and layers. So
    each probability has the gradient coefficient * E * f_e / (tokens * layers). The coefficient is that of config.json,
    for an MTP head times the weight of its loss. f_e is the share of tokens that chose expert e: in the micro-batch
    ("pooled"), which then counts as one of several; or in the step before ("previous"), and in the first step k / E.
    """
    config, num_layers = text_config(engine.model.config), engine.router.balance.num_layers
    if not config.get("output_router_logits") or not num_layers:
        return
    coefficient, k = float(config.get("router_aux_loss_coef", 0.001)), int(config["num_experts_per_tok"])
    of_head = coefficient * engine.model.recipe.mtp_weight
    parts = [("the trunk", slice(0, num_layers), coefficient), ("the MTP head", slice(num_layers, None), of_head)]
    num, worst, allowed = 0, 0.0, trial.tolerance.loss
    for number, step in enumerate(steps):
        for (name, layers, factor), slopes in zip(parts, step.slopes, strict=False):
            for slope_E, count_E in slopes:
                load_E, tokens = count_E, count_E.sum() / k * len(slopes)
                if trial.router_aux == "previous":
                    load_E = steps[number - 1].loads[layers].sum(0) if number else torch.ones_like(count_E)
                    tokens = step.loads[layers].sum() / k
                if not load_E.any() or not tokens:  # no token of the micro-batch has a next one in its document
                    continue
                expected_E = factor * len(load_E) * load_E * k / load_E.sum() / tokens
                actual_E = torch.zeros_like(expected_E) if slope_E is None else slope_E.double()
                size = float(expected_E.norm()) or 1.0  # a coefficient may be 0
                error, num = float((actual_E - expected_E).norm()) / size, num + 1
                worst = max(worst, error)
                if not error <= allowed:
                    what = f"its gradients in step {number} are off by {error:.1e} from {factor:g} * E * f / tokens"
                    yield Finding("S1", f"aux loss of {name}", what, "another coefficient, or shares of another step")
    notes.add_margin(Margin("S1", "gradients of the aux loss, by micro-batch", num, worst, allowed))


def new_weights_are_trained(
    fresh: Mapping[str, Tensor], grads: Mapping[str, Tensor], notes: Notes
) -> Iterator[Finding]:
    """Check that each weight that the source lacks (an adapter, a new head) has a gradient; frozen it would stay as it
    was drawn.

    `fresh`: these weights, by key. `grads`: the gradients of the first step.
    """
    for key in fresh:
        if key not in grads:  # zeros are no sign: perhaps no token chose this expert
            yield Finding("G1", key, "the source lacks it, and it has no gradient", "it is frozen, and stays as drawn")
    if fresh:
        notes.add_margin(Margin("G1", "new weights that have a gradient", len(fresh)))


def _routing(model: Model, trial: Trial, notes: Notes) -> Iterator[Finding]:
    """Check the chosen experts and their weights against the router's own logits, in float64. Ties may fall either
    way, so the probabilities of the chosen experts are compared, not their indices."""
    with watched_routers(model) as routed:
        scores_of(model, trial.data(0, 0)[0])
    allowed, worst, where, num = (1e-10 if trial.dtype == torch.float64 else 1e-5), 0.0, "", 0
    for layer, (weight_Tk, logits_TE, expert_Tk) in routed.items():
        all_TE = logits_TE.double().softmax(-1)
        best_Tk, chosen_Tk = all_TE.topk(expert_Tk.shape[1], -1).values, all_TE.gather(1, expert_Tk)
        weights_Tk = (chosen_Tk / chosen_Tk.sum(-1, keepdim=True), chosen_Tk)  # families renormalise or do not
        off = min((weight_Tk.double() - each).abs().max().item() for each in weights_Tk)
        off = max(off, (chosen_Tk.sort(descending=True).values - best_Tk).abs().max().item())
        num += len(expert_Tk)
        if off > worst:
            worst, where = off, f"layer {layer} of experts"
        if not off <= allowed:
            what = f"experts or weights of layer {layer} of experts are off by {off:.1e} from its own logits"
            yield Finding("N1", "router", what, "its softmax is rounded, or other experts are taken than the largest")
    notes.add_margin(Margin("N1", "choices of experts", num, worst, allowed, where))


@dataclass
class _Parameter:
    """A tensor of the files in float64, and its optimizer state, as the textbook formula leaves them.

    `matrices`: indices of the matrices that are updated separately; empty if the tensor is updated as a whole.
    """

    weight: Tensor
    state: tuple[Tensor, ...]
    matrices: Sequence[Tensor] = ()

    def updated(self, optimizer: Optimizer, grad: Tensor, **how: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the weight and the state after a plain update."""
        if not self.matrices:
            return optimizer.plain_update(self.weight, grad, self.state, **how)
        weight, *state = (each.clone() for each in (self.weight, *self.state))
        for at in self.matrices:
            before = [each.view(-1)[at] for each in (self.weight, grad.contiguous(), *self.state)]
            new = optimizer.plain_matrix_update(before[0], before[1], before[2:], **how)
            for tensor, values in zip((weight, *state), (new[0], *new[1]), strict=True):
                tensor.view(-1)[at.reshape(-1)] = values.reshape(-1)
        return weight, tuple(state)


def _parameter(engine: Engine, key: str, param: Param, weight: Tensor) -> _Parameter:
    """Return a tensor of the files before the first step, with state of zeros."""
    optimizer, matrices = engine.optimizer.options, list[Tensor]()
    if optimizer.updates_whole(param):
        matrices = indices_of_matrices(key, weight.shape, engine.model.config, by_head=optimizer.by_head)
    num = len(optimizer.state_names_of(param))
    return _Parameter(weight.contiguous(), tuple(torch.zeros_like(weight) for _ in range(num)), matrices)


def _declared_as_others(
    engine: Engine, params: Mapping[str, _Parameter], declared: Mapping[str, Param]
) -> Iterator[Finding]:
    """Yield a finding for each tensor whose key makes it a matrix but whose declaration does not, or the reverse."""
    for key, param in params.items():
        is_matrix = bool(indices_of_matrices(key, param.weight.shape, engine.model.config))
        if engine.optimizer.options.needs_whole_matrix and is_matrix != (declared[key].matrices is not None):
            what = f"is {'a' if is_matrix else 'no'} matrix, and {declared[key].name} is declared otherwise"
            yield Finding("O1", key, what, "Param.matrices is wrong")


def o1_updates(
    engine: Engine, before: Mapping[str, Tensor], steps: Sequence[ReferenceStep], notes: Notes
) -> Iterator[Finding]:
    """The updates of one process are those of the optimizer's textbook formula.

    That is `Optimizer.plain_update` in float64, with the schedule, clipping by one norm over all gradients (with
    mtp="head" the MTP head has its own norm), and weight decay of parameters with two dims or more, except adapters.
    Table rows without a gradient stay unchanged. An optimizer of whole matrices gets each matrix of a tensor
    separately. `before`: the weights before the first step.
    """
    apart = engine.model.recipe.mtp == "head"
    table, choice = engine.model.table, engine.model.keymap.choice
    # A tied parameter has two keys, and counts once in the norm.
    twice = {copy.key for param in table for copy in chosen(param, choice).copies}
    # O1 cannot rely on the engine's norm, its clipping or its counters: it starts from gradients, weights and options.
    optimizer, most, worst, where = engine.optimizer.options, engine.max_norm or float("inf"), 0.0, ""
    tables = {block.key for param in table if param.by_rows for block in chosen(param, choice).blocks}
    declared = {block.key: param for param in table for block in chosen(param, choice).blocks}
    params = {k: _parameter(engine, k, declared[k], w.double()) for k, w in before.items()}
    wrong = [*_declared_as_others(engine, params, declared)]
    yield from wrong
    params = {key: param for key, param in params.items() if key not in {finding.name for finding in wrong}}
    assert callable(engine.lr)
    for number, step in enumerate(steps):
        norms = _norms(step.grads, twice, apart)
        lrs = (engine.lr(number), engine.lr(number + 1), engine.lr(max(0, number - 1)))
        lr = lrs[0]
        for key, grad in ((key, grad) for key, grad in step.grads.items() if key in params):
            norm = norms[apart and key.startswith(PREFIX)]
            clip = min(1.0, most / norm) if norm else 1.0
            make, decays = (
                _maker(optimizer, params[key], grad.double(), number + 1, only_met=key in tables),
                grad.dim() > 1 and not _adapts(key),
            )
            expected, state = make(lr, clip, decays)
            off = (step.weights[key] - expected).abs().nan_to_num(torch.inf)
            if off.max() > worst * lr:
                worst, where = off.max().item() / lr, f"{key} after step {number}"
            if not off.max() <= UPDATE * lr:
                plain = f"a plain {type(optimizer).__name__}"
                what = f"{int((off > UPDATE * lr).sum())} of {off.numel()} elements differ from {plain}"
                guess = _guess(make, step.weights[key], lrs, (clip, most / norm), decays)
                yield Finding(
                    "O1", key, f"{what} after step {number}, by up to {off.max().item() / lr:.1e} of lr", guess
                )
            # Continue from the engine's weights, so that one wrong update gives one finding.
            params[key] = replace(params[key], weight=step.weights[key].double(), state=state)
    num = sum(grad.numel() for step in steps for grad in step.grads.values())
    notes.add_margin(Margin("O1", "updates of elements, in parts of lr", num, worst, UPDATE, where))


def _norms(grads: Mapping[str, Tensor], twice: Container[str], apart: bool) -> dict[bool, float]:
    """Return the norm of all gradients, each parameter counted once; with `apart`, that of an MTP head under True."""
    squares = {False: 0.0, True: 0.0}
    for key, grad in grads.items():
        if key not in twice:
            squares[apart and key.startswith(PREFIX)] += float(grad.double().square().sum())
    return {which: total**0.5 for which, total in squares.items()}


def _adapts(key: str) -> bool:
    """Return whether a key is a factor of an adapter: decay would pull B @ A towards 0, and PEFT has none."""
    return ".lora_" in key


Make = Callable[[float, float, bool], tuple[Tensor, tuple[Tensor, ...]]]


def _maker(optimizer: Optimizer, param: _Parameter, grad: Tensor, number: int, only_met: bool = False) -> Make:
    """Return a function that computes weight and state after update `number` (1, 2, ...) for any lr, clip and decay.

    `only_met`: only rows with a gradient are updated.
    """

    def make(lr: float, clip: float, decays: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
        new = param.updated(optimizer, grad * clip, lr=lr, step=number, decays=decays)
        if not only_met:
            return new
        met, old = (grad != 0).any(1, keepdim=True), (param.weight, *param.state)
        weight, *state = (torch.where(met, *both) for both in zip((new[0], *new[1]), old, strict=True))
        return weight, tuple(state)

    return make


def _guess(
    make: Make, weight: Tensor, lrs: tuple[float, float, float], clips: tuple[float, float], decays: bool
) -> str:
    """Return the mistake that gives exactly this weight, or "".

    `lrs`: the learning rates of this step, the next and the previous one. `clips`: the factor that clipping multiplies
    the gradient by, and the factor if it also scaled small gradients up to max_norm.
    """
    (now, later, before), (clip, to_most) = lrs, clips
    mistakes = {
        "the lr of the next step is taken": make(later, clip, decays),
        "the lr of the previous step is taken": make(before, clip, decays),
        "it decays, though it has one dim or is an adapter" if not decays else "it does not decay": make(
            now, clip, not decays
        ),
        "the gradient is not clipped": make(now, 1.0, decays),
        "the gradient is clipped twice": make(now, clip * clip, decays),
        "the gradient is scaled to max_norm, though it is smaller": make(now, to_most, decays),
    }
    return next((what for what, made in mistakes.items() if (weight - made[0]).abs().max() <= UPDATE * now), "")
