"""The oracles of `verify`: properties that hold on any mesh. Each is a function that yields a finding per violation.

The tests and the `verify` command share them. Every rank calls every oracle in the same order, since some gather or
reduce; findings name the parameter, the numbers and the likely cause. The first sentence of an oracle's docstring is
what `meshwright verify` prints under "holds if". Oracles of collectives are in `collective_checks.py`, and those of one
process in `independent_checks.py` and `transformers_oracles.py`.

A mistake makes everything after it wrong too. So the first oracle that fails writes its name to `run.blame`, and later
findings name that as their cause instead of a guess.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import pairwise

import torch
from torch import Tensor

from ..data import Batch
from ..engine import gather, stream
from ..errors import LayoutError
from ..sharding import Box, check_tiling, owned
from ..weights import blocks_by_key, of_table, raw_tensor
from .diagnose.causes import cause_of, cause_of_loss, scale
from .diagnose.forward import FirstWrong, about_doors, by_logits, first_wrong, recorded_forward, scores_of
from .diagnose.gradients import common_property, suspects
from .independent_checks import UPDATE
from .reference import TOLERANCES, Findings, Run, everywhere, fresh_weights, loads_of, lr_of_trial, unrounded
from .results import Finding
from .weight_checks import checksum_of, weight_differences
from .whole_state import whole_state

_STEEP = 30.0  # factor by which rounding may move a gradient more if it comes through a steep function
_LESS_THAN_LOST = 0.9  # relative to its norm: a gradient of zeros is off by 1


def w1_load(run: Run) -> Findings:
    """Every stored element is bitwise the source's, and new weights are those of one process.

    The files are read by another reader than the one that loads, so a mistake in ours shows. New weights are drawn on
    the mesh too: a generator that counts within a rank's piece would give another model on each mesh.
    """
    findings = [Finding("W1", each.name, str(each)) for each in weight_differences(run.model, list(run.model.pieces))]
    if sum(n for (n,) in everywhere(run.model.mesh, [len(findings)])):
        run.blame = "weights are not those of the source, see W1"
    run.record("W1", "elements of all ranks", sum(piece.numel for piece in run.model.pieces.values()))
    yield from findings
    yield from _fresh_weights(run)
    if run.trial.draws:
        yield from _new_weights(run)


def _fresh_weights(run: Run) -> Findings:
    """Compare the weights that the source lacks, such as adapters. Loading draws them, and they must not depend on the
    mesh."""
    fresh, expected = fresh_weights(run.model), run.reference.fresh
    for name, tensor in fresh.items():
        if not _same_bits(tensor, expected[name]):
            yield Finding(
                "W1", name, f"drawn when loading: {_differs(tensor, expected[name])} from those of one process"
            )
    if expected:
        run.record_once("W1", "keys that the source lacks", len(expected))


def _new_weights(run: Run) -> Findings:
    """Compare weights drawn on the mesh with those drawn on one process, on rank 0, which gathers them."""
    new, expected = run.trial.new_weights(run.model.mesh), run.reference.new_weights
    for name, tensor in new.items():
        if not _same_bits(tensor, expected[name]):
            yield Finding("W1", name, f"new weights: {_differs(tensor, expected[name])} from those of one process")
    run.record_once("W1", "keys of new weights", len(expected))


def _differs(actual: Tensor, expected: Tensor) -> str:
    """Describe a difference. Equal values in another order point to a wrong placement, not to wrong arithmetic."""
    wrong = int((actual != expected).sum())
    # torch cannot sort FP8
    moved = torch.equal(*(each.flatten().double().sort().values for each in (actual, expected)))
    return f"{wrong} of {actual.numel()} elements differ" + (": the right values in the wrong places" if moved else "")


def t1_tiling(run: Run) -> Findings:
    """The pieces that owners hold tile every tensor exactly; all other pieces are copies.

    An element with two owners would count twice in the norm, and one without would be missing in it and in exports.
    Ownership is computed from declarations for all ranks, so no communication is needed.
    """
    model, axes = run.model, run.model.mesh.axes
    boxes: dict[str, list[Box]] = {name: [] for name in model.table.params}
    for rank in range(axes.world):
        for name, piece in owned(model.blueprint.spec, axes, rank).items():
            boxes[name].extend(piece.boxes)
    for param in model.table:
        try:
            check_tiling(boxes[param.name], param.shape, param.name)
        except LayoutError as error:
            yield Finding("T1", param.name, str(error))
    run.record_once("T1", "parameters", len(model.table.params))
    # New files, which no source gives a dtype, must keep in float32 what may never be rounded.
    for key, made in of_table(model.table, torch.bfloat16).keys.items():
        if made.dtype != "F32" and any(
            p.float32 for p, _ in blocks_by_key(model.table, model.keymap.choice).get(key, ())
        ):
            yield Finding("T1", key, f"new files would hold it in {made.dtype}, but it must never be rounded")


def s1_loss(run: Run, loss: float, evaluated: float | None = None) -> Findings:
    """The loss of the first step is that of one process and a plain mean, and so is what `evaluate` returns.

    A wrong divisor scales all gradients and fails nothing else, so a wrong loss comes with a guess of its divisor.
    """
    ref, limit = run.reference, run.trial.tolerance.loss
    expected, error = ref.steps[0].loss, _relative_error(loss, ref.steps[0].loss)
    if not error <= limit:
        alone = any(finding.name == "loss of one process" for finding in ref.notes.findings)
        guess = "one process is wrong already, see above" if alone else ""
        guess = guess or cause_of_loss(
            loss, expected, ref.aux[0], ref.loss_sums, run.engine._pending().weight, run.trial.axes
        )
        yield Finding("S1", "loss", f"{loss!r}, one process has {expected!r}", run.blame or guess)
        run.blame = run.blame or "the loss is wrong already, see S1"
    run.record_once("S1", "loss", 1, error, limit)
    yield from _mtp(run)
    if evaluated is not None:
        # `evaluate` leaves the aux loss out, so a plain mean of the terms is all that it may return.
        terms, weight = (
            sum(each) for each in zip(*(batch for of_rank in ref.loss_sums for batch in of_rank), strict=True)
        )
        error = _relative_error(evaluated, terms / weight)
        if not error <= limit:
            yield Finding(
                "S1", "evaluate", f"{evaluated!r}, a plain mean of the terms is {terms / weight!r}", run.blame
            )
        run.record_once("S1", "loss of evaluate", 1, error, limit)


def _mtp(run: Run) -> Findings:
    """Compare what a trained MTP head reports."""
    record, expected = run.engine._pending().results.mtp, run.reference.steps[0].mtp
    if record is None or expected is None:
        return
    limit = run.trial.tolerance.loss
    error = _relative_error(record.loss, expected.loss)
    if not error <= limit:
        what = f"{record.loss!r}, one process has {expected.loss!r}"
        yield Finding("S1", "loss of the MTP head", what, run.blame or "its labels are moved within a rank's tokens")
    run.record_once("S1", "loss of the MTP head", 1, error, limit)
    off = abs(record.acceptance - expected.acceptance)
    if run.trial.dtype == torch.float64 and not off <= limit:  # rounding may change the likeliest token
        what = f"{record.acceptance!r}, one process has {expected.acceptance!r}"
        yield Finding("S1", "acceptance of the MTP head", what, run.blame)


def _relative_error(actual: float, expected: float) -> float:
    return abs(actual - expected) / (abs(expected) or 1.0)


def g1_gradients(run: Run, step: int = 0) -> Findings:
    """Every gradient of every step is that of one process. Call it between backward and update.

    Whole gradients are gathered on rank 0 under the names of the files. Findings begin with those nearest to the loss:
    an error in the backward pass spreads to all gradients that backward computes later.
    """
    ref = run.reference.steps[step]
    if not ref.grads or (step and run.blame):  # an earlier error makes these wrong too
        return
    grads, limit = gather(run.model, "grad"), run.trial.tolerance.grad
    wrong = []
    if run.model.mesh.rank == 0:
        yield from (Finding("G1", name, "it has no gradient") for name in ref.grads if name not in grads)
        worst, at = 0.0, ""
        for names in _compared_together(run, [name for name in ref.grads if name in grads]):
            actual, expected = (torch.cat([each[n].double().flatten() for n in names]) for each in (grads, ref.grads))
            # A gradient that is nearly 0 is measured by the norm of all. That is 0 too where a vision tower alone is
            # trained and no batch has images.
            size = (max(expected.norm().item(), 1e-6 * ref.norms[0]) or 1.0) * _moved(run, names[0])
            error = (actual - expected).norm().item() / size
            worst, at = max((worst, at), (error, names[0]))
            if not error <= limit:
                wrong.append(names)
        run.record("G1", "gradients", len(grads), worst, limit, at)
    # Only rank 0 has compared. A result that may differ between ranks must not decide which collectives they issue
    # next.
    if not everywhere(run.model.mesh, [len(wrong)])[0][0]:
        return
    made = suspects(run.model, grads, wrong, run.reference, step)  # on all ranks: it reduces gradients again
    # An error of the forward pass (`blame`) explains all gradients, so a common property would mislead.
    shared = "" if run.blame else common_property(run.model, made, ref.grads)
    for name, suspect in made.items():
        what, guess = cause_of(suspect)
        yield Finding("G1", name, what + (f" in step {step}" if step else ""), run.blame or guess + shared)
        shared = ""
    run.blame = run.blame or f"the gradients of step {step} are wrong, see G1"


def _moved(run: Run, key: str) -> float:
    """Return the factor by which rounding may move the gradient of a key more than other gradients.

    The gate of n-grams takes a root with slopes up to 500 near 0, where rounding of the argument changes the whole
    slope. One token can then be most of the gradient. float64 rounds so little that its bound holds.
    """
    made_of = blocks_by_key(run.model.table, run.model.keymap.choice)
    steep = any(param.steep for param, _ in made_of.get(key, ()))
    if not steep or run.trial.dtype == torch.float64:
        return 1.0
    return max(1.0, min(_STEEP, _LESS_THAN_LOST / run.trial.tolerance.grad))


def _compared_together(run: Run, names: list[str]) -> list[list[str]]:
    """Group the keys that are compared as one tensor: each key alone, but in bfloat16 all experts of a layer together,
    since rounding sends tokens to other experts."""
    if run.trial.dtype != torch.bfloat16:
        return [[name] for name in names]
    made_of = blocks_by_key(run.model.table, run.model.keymap.choice)
    together: dict[str, list[str]] = {}
    for name in names:
        together.setdefault(made_of[name][0][0].name, []).append(name)
    return list(together.values())


def g2_replicas(run: Run) -> Findings:
    """Ranks that hold the same elements hold the same bits, of weights and (before the update) of gradients.

    Copies that drift apart raise no error: each rank goes on with its own. Ranks exchange a checksum per parameter, so
    the comparison is exact and costs next to nothing.
    """
    model, axes = run.model, run.model.mesh.axes
    for kind, tensors in (("weight", model.stored()), ("gradient", model.grads())):
        names = list(model.table.params if kind == "weight" else model.trained)  # the same on all ranks
        sums = everywhere(model.mesh, [checksum_of(tensors[name]) if name in tensors else -1 for name in names])
        copied = {name: [a for a in model.placement(name).copies if axes.size_of(a) > 1] for name in names}
        drifted = False
        for i, name in enumerate(names):
            for axis in copied[name]:
                for peers in axes.groups((axis,)):
                    odd = [r for r in peers if sums[r][i] != sums[peers[0]][i]]
                    drifted |= bool(odd)
                    if odd and model.mesh.rank == peers[0]:
                        guess = f"a sum over {axis} is missing" if kind == "gradient" else run.blame
                        what = f"the {kind} of ranks {[peers[0], *odd]} differs along {axis}"
                        yield Finding("G2", name, what, guess)
        run.record_once("G2", f"{kind}s with copies", sum(map(bool, copied.values())))
        if drifted:
            run.blame = run.blame or "copies differ, see G2"


def n1_norm(run: Run, step: int = 0) -> Findings:
    """With gradients of all ones the squared norm is the number of elements; the real norm is that of one process, and
    every token counts once in the load of its experts.

    The norm decides how much clipping scales every gradient, so one that counts copies twice trains with another lr.
    """
    expected, limit = run.reference.steps[step], run.trial.tolerance.grad
    if step == 0:
        yield from _norm_of_ones(run)
    elif run.blame:
        return
    norms = run.engine.norms(run.model.grads())
    error = max(_relative_error(*both) for both in zip(norms, expected.norms, strict=True))
    if not error <= limit:
        name = "norm" + (f" of step {step}" if step else "")
        yield Finding("N1", name, f"{_named(norms)}, one process has {_named(expected.norms)}", run.blame)
    # Ranks agree on the verdict: a rank with a different `blame` would skip oracles that other ranks run, and these
    # would hang.
    if any(n for (n,) in everywhere(run.model.mesh, [int(not error <= limit)])):
        run.blame = run.blame or f"the norm of step {step} is wrong, see N1"
    run.record_once("N1", "norms", 1, error, limit)
    loads, expected_loads = loads_of(run.engine), expected.loads
    if run.trial.dtype != torch.float64:  # rounding may send a token to another expert, but never drops it
        loads, expected_loads = loads.sum(), expected_loads.sum()
    if not torch.equal(loads.cpu(), expected_loads):
        yield Finding(
            "N1", "load of experts", f"{loads.tolist()}, one process counts {expected_loads.tolist()}", run.blame
        )
    if expected_loads.numel():
        run.record_once("N1", "counts of experts", expected_loads.numel())


def _named(norms: Sequence[float]) -> str:
    return " and (MTP head) ".join(map(repr, norms))


def _norm_of_ones(run: Run) -> Findings:
    """Count elements by a norm of ones, which is exact: an element counted twice or not at all shows as an integer."""
    pieces = run.model.pieces  # a tensor stored in 4 bits has fewer bytes than elements
    ones = {name: torch.ones(pieces[name].shape, device=t.device) for name, t in run.model.stored().items()}
    expected = sum(p.numel for p in run.model.table)
    squared = sum(norm**2 for norm in run.engine.norms(ones))
    if not abs(squared - expected) <= 0.5:
        guess = "copies are counted too" if squared > expected else "some shards are left out"
        yield Finding("N1", "norm of ones", f"counts {squared:.2f} elements of {expected}", guess)
    if any(n for (n,) in everywhere(run.model.mesh, [int(not abs(squared - expected) <= 0.5)])):
        run.blame = run.blame or "the norm is wrong, see N1"
    run.record_once("N1", "elements of a norm of ones", expected)


def u1_update(run: Run, step: int, before: Mapping[str, Tensor], with_gradient: Set[str]) -> Findings:
    """Every parameter with a gradient moves and stays finite.

    In float64 the weights after each update are also those of one process. A narrower dtype does not allow this: AdamW
    divides by the root of the second moment, so a gradient that is only rounding makes a whole step.

    `before`: the weights of this rank before the first step. `with_gradient`: its parameters whose first gradient is
    not zero.
    """
    for name, tensor in run.model.stored().items():
        if not tensor.isfinite().all():
            what = f"{int((~tensor.isfinite()).sum())} elements on rank {run.model.mesh.rank} are not finite"
            yield Finding("U1", name, f"{what} after step {step}", run.blame)
        elif step == 0 and name in with_gradient and torch.equal(tensor, before[name]):
            what = f"it has a gradient on rank {run.model.mesh.rank}, but no update moved it"
            yield Finding("U1", name, what, "the module uses a copy of what is updated")
    if step == 0:
        run.record("U1", "moved parameters of all ranks", len(with_gradient))
    expected = run.reference.steps[step].weights
    if not expected or run.blame:
        return
    # The bound is relative to the lr, not to the weight: an update of AdamW is about as large as the lr.
    weights, limit, worst, at, num = unrounded(run.model), UPDATE * lr_of_trial(step), 0.0, "", 0
    compared = all(each.grads for each in run.reference.steps[: step + 1])
    right = "gradients and norms up to this step are right" if compared else "norms up to this step are right"
    for name, tensor in weights.items():
        off = (tensor - expected[name]).abs().nan_to_num(torch.inf)
        worst, at, num = *max((worst, at), (off.max().item(), name)), num + off.numel()
        if (off > limit).any():
            what = f"{int((off > limit).sum())} of {off.numel()} elements differ from one process after step {step}"
            yield Finding("U1", name, what, f"{right}, so the update itself is not")
    run.record_once("U1", "elements after updates", num, worst, limit, at)
    if everywhere(run.model.mesh, [int(worst > limit)])[0][0]:
        run.blame = f"the update of step {step} is wrong, see U1"
    elif run.reference.steps[step].state:
        yield from _state_after_updates(run, run.reference.steps[step].state)


def _state_after_updates(run: Run, expected: Mapping[str, Tensor]) -> Findings:
    """Compare optimizer state with that of one process. Muon's weights are right with gradients of any scale."""
    limit, worst, at, num = TOLERANCES[torch.float64].grad, 0.0, "", 0
    for name, tensor in whole_state(run.engine).items():
        off = float((tensor - expected[name]).norm() / max(float(expected[name].norm()), 1e-30))
        worst, at, num = *max((worst, at), (off, name)), num + tensor.numel()
        if not off <= limit:
            yield Finding("U1", name, f"differs from one process by {off:.1e} of its norm after the last step")
    run.record_once("U1", "elements of optimizer state", num, worst, limit, at)


def u1_alive(run: Run, losses: Sequence[float]) -> Findings:
    """The next forward passes use the updated weights, and so do `stream` and `export`.

    A module that holds a copy of a parameter never learns, although its gradients and the updates are right.
    """
    for step, (loss, expected) in enumerate(zip(losses, run.reference.steps, strict=True)):
        error, limit = _relative_error(loss, expected.loss), run.trial.tolerance.loss
        if step and not error <= limit:
            guess = run.blame or "weights are right, so the forward does not see the update"
            yield Finding("U1", f"loss of step {step}", f"{loss!r}, one process has {expected.loss!r}", guess)
        if step:
            run.record_once("U1", "losses after updates", 1, error, limit, f"step {step}")
    if run.trial.dtype == torch.float64:
        weights = unrounded(run.model)
        for name, tensor in stream(run.model, "weight"):
            if not _same_bits(tensor, weights[name].to(tensor.dtype)):
                what = "what stream and export hand out is not what was trained"
                yield Finding("U1", name, what, "an earlier copy is handed out")


def e1_export(run: Run) -> Findings:
    """Before any training, an export equals the source byte for byte.

    It cannot replace W1: a permutation that loading makes and the export undoes would pass.
    """
    source = run.model.keymap.source
    assert source is not None
    names = []
    for name, tensor in stream(run.model, "weight", format="source"):
        names.append(name)
        if name in source.entries and not _same_bits(tensor, raw_tensor(source, name)):
            yield Finding("E1", name, f"{_differs(tensor, raw_tensor(source, name))} from the source")
    unpacked = {key for key, scale in source.scales.items() if scale.packed}  # stored packed, handed out unpacked
    missing = set(source.entries) - set(names) - run.model.keymap.carried - unpacked
    if run.model.mesh.rank == 0 and missing:
        yield Finding("E1", min(missing), f"{len(missing)} keys of the source are not handed out")
    run.record_once("E1", "keys", len(names))


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Compare as bytes, so that NaN equals itself and 0 differs from -0."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def d1_documents(run: Run) -> Findings:
    """Packed documents give the same scores as each document alone.

    The first finding names the submodule where outputs begin to differ, which says more than every wrong gradient. With
    a mesh this covers the whole forward pass, since the reference is one process.
    """
    if any(finding.name == "labels" for finding in run.reference.notes.findings):
        run.blame = run.blame or "the labels are not those of the documents, see D1 labels"
    for number, batch in enumerate(run.trial.packed()):  # the same on all ranks
        if not (number and run.blame):
            yield from _documents_of(run, number, batch)


def _documents_of(run: Run, number: int, batch: Batch) -> Findings:
    """Compare one batch. All ranks run the same batch, though data ranks train on different ones."""
    model, limit, bounds, ref = run.model, run.trial.tolerance.logprob, batch.bounds, run.reference
    with recorded_forward(model) as record:
        packed = scores_of(model, batch).cpu()
    wrong = first_wrong(model, record, ref.fingerprints[number], bounds[1], limit)
    errors = [
        (packed[a:b] - alone).abs().max().item() for a, b, alone in _documents(bounds, ref.document_scores[number])
    ]
    off = [i for i, error in enumerate(errors) if not error <= limit]
    at = f"document {errors.index(max(errors))} of batch {number}"
    run.record("D1", "documents on all ranks", len(errors), max(errors), limit, at)
    # `logprobs` never forms the logits of the whole vocabulary. Compare it with a softmax that does. All ranks take
    # part, whatever they measured.
    whole = (packed - by_logits(model, batch).cpu()).abs().max().item()
    run.record_once("D1", "scores compared with those of the logits", len(batch), whole, limit)
    if not any(n for (n,) in everywhere(model.mesh, [len(off)])):
        if not whole <= limit:
            what = f"log-probabilities of batch {number} are {whole:.1e} off those of its logits"
            yield Finding("D1", "logits", what, _unmasked(packed, batch))
        return
    # No submodule differs but the scores do: then it is the head. No document precedes document 0, so if it is wrong
    # too, tokens of other documents cannot be the cause.
    wrong = wrong or FirstWrong("head", leak=0 not in off, ratio=float("nan"))
    leak = wrong.leak and 0 not in off and wrong.part.endswith("mixer")  # tokens see each other only in a mixer
    guess = run.blame or (
        "a leak from the documents before" if leak else about_doors(model, wrong.part, record.doors_passed)
    )
    if not guess and wrong.ratio == wrong.ratio:  # not NaN: the output is a multiple of the right one
        guess = scale(wrong.ratio, run.trial.axes)
    if off:
        yield Finding("D1", wrong.part, "its output is the first that is wrong", guess)
    run.blame = run.blame or f"the forward is wrong from {wrong.part} on, see D1"
    for i in off:
        what = f"scores off by {errors[i]:.1e} from the document alone"
        hint = "a leak" if leak else "not a leak, because the first document is wrong too" if 0 in off else ""
        yield Finding("D1", f"document {i} of batch {number}", what, hint)


def _unmasked(scores_T: Tensor, batch: Batch) -> str:
    """Guess that tokens without a label got a log-probability: padding, placeholders, and last tokens of documents."""
    unlabelled = scores_T.dim() == 1 and bool(scores_T[~batch.is_target_T].any())
    return "tokens without a label have one other than 0" if unlabelled else ""


def _documents(bounds: Sequence[int], alone: Sequence[Tensor]) -> Iterator[tuple[int, int, Tensor]]:
    """Yield the bounds of each document in a batch, and its scores alone."""
    return ((a, b, scores) for (a, b), scores in zip(pairwise(bounds), alone, strict=True))
