"""The oracles: what must hold of a run on any mesh, each a function that returns what it found wrong.

The tests and the `verify` command share them. Every rank calls every oracle in the same order; findings name the
parameter, the numbers and the likely cause. Those of collectives are in `collectives.py`, those of one process in
`plain.py` and `against.py`.
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
from .diagnose.forward import Wrong, about_doors, by_logits, first_wrong, scores_of, watched
from .diagnose.gradients import suspects, where
from .independent_checks import UPDATE
from .reference import Findings, Run, everywhere, lr_of_trial, unrounded
from .results import Finding
from .weight_checks import checksum_of, weight_differences


def w1_load(run: Run) -> Findings:
    """Every stored element is bitwise the source's, and new weights are those of one process."""
    found = [Finding("W1", each.name, str(each)) for each in weight_differences(run.model, list(run.model.pieces))]
    if sum(n for (n,) in everywhere(run.model.mesh, [len(found)])):
        run.blame = "weights are not those of the source, see W1"
    run.measured("W1", "elements of all ranks", sum(piece.numel for piece in run.model.pieces.values()))
    yield from found
    if run.trial.draws:
        yield from _drawn(run)


def _drawn(run: Run) -> Findings:
    found, due = run.trial.drawn(run.model.mesh), run.reference.drawn
    for name, tensor in found.items():
        if not _same_bits(tensor, due[name]):
            yield Finding("W1", name, f"new weights: {_differs(tensor, due[name])} from those of one process")
    run.measured_once("W1", "keys of new weights", len(due))


def _differs(ours: Tensor, theirs: Tensor) -> str:
    wrong = int((ours != theirs).sum())
    # torch sorts no floating point numbers of 8 bits
    moved = torch.equal(*(each.flatten().double().sort().values for each in (ours, theirs)))
    return f"{wrong} of {ours.numel()} elements differ" + (": the right values in the wrong places" if moved else "")


def t1_tiling(run: Run) -> Findings:
    """What the owners hold tiles every tensor; what others hold is a copy of it."""
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
    run.measured_once("T1", "parameters", len(model.table.params))
    for key, made in of_table(model.table, torch.bfloat16).keys.items():
        if made.dtype != "F32" and any(
            p.float32 for p, _ in blocks_by_key(model.table, model.keymap.choice).get(key, ())
        ):
            yield Finding("T1", key, f"new files would hold it in {made.dtype}, but it is never to be rounded")


def s1_loss(run: Run, loss: float, evaluated: float | None = None) -> Findings:
    """The loss of the first step is that of one process and a plain mean, and so is what `evaluate` says."""
    ref, limit = run.reference, run.trial.tolerance.loss
    due, error = ref.steps[0].loss, _apart(loss, ref.steps[0].loss)
    if not error <= limit:
        alone = any(finding.name == "loss of one process" for finding in ref.notes.findings)
        guess = "one process is wrong already, see above" if alone else ""
        guess = guess or cause_of_loss(loss, due, ref.aux[0], ref.sums, run.engine._pending().weight, run.trial.axes)
        yield Finding("S1", "loss", f"{loss!r}, one process finds {due!r}", run.blame or guess)
        run.blame = run.blame or "the loss is wrong already, see S1"
    run.measured_once("S1", "loss", 1, error, limit)
    if evaluated is not None:
        terms, weight = (sum(each) for each in zip(*(batch for of_rank in ref.sums for batch in of_rank), strict=True))
        error = _apart(evaluated, terms / weight)
        if not error <= limit:
            yield Finding(
                "S1", "evaluate", f"{evaluated!r}, a plain mean of the terms is {terms / weight!r}", run.blame
            )
        run.measured_once("S1", "loss of evaluate", 1, error, limit)


def _apart(found: float, due: float) -> float:
    return abs(found - due) / (abs(due) or 1.0)


def g1_gradients(run: Run, step: int = 0) -> Findings:
    """Every gradient of every step is that of one process. Call between backward and update. Those nearest to the loss
    come first: what goes wrong on the way back makes all before it wrong."""
    ref = run.reference.steps[step]
    if not ref.grads or (step and run.blame):  # what is wrong already makes these wrong too
        return
    found, limit = gather(run.model, "grad"), run.trial.tolerance.grad
    wrong = []
    if run.model.mesh.rank == 0:
        yield from (Finding("G1", name, "it has no gradient") for name in ref.grads if name not in found)
        worst, at = 0.0, ""
        for names in _judged_together(run, [name for name in ref.grads if name in found]):
            mine, due = (torch.cat([grads[n].double().flatten() for n in names]) for grads in (found, ref.grads))
            size = max(due.norm().item(), 1e-6 * ref.norm) or 1.0  # zero where nobody sees and a tower alone is trained
            error = (mine - due).norm().item() / size
            worst, at = max((worst, at), (error, names[0]))
            if not error <= limit:
                wrong.append(names)
        run.measured("G1", "gradients", len(found), worst, limit, at)
    if not everywhere(run.model.mesh, [len(wrong)])[0][0]:
        return
    made = suspects(run.model, found, wrong, run.reference, step)  # all ranks: it sums once more
    said = "" if run.blame else where(run.model, made, ref.grads)  # of a wrong way there, none of back
    for name, suspect in made.items():
        what, guess = cause_of(suspect)
        yield Finding("G1", name, what + (f" in step {step}" if step else ""), run.blame or guess + said)
        said = ""
    run.blame = run.blame or f"the gradients of step {step} are wrong, see G1"


def _judged_together(run: Run, names: list[str]) -> list[list[str]]:
    """Each key by itself; but in bf16, where rounding sends a token to another expert, all experts of a layer."""
    if run.trial.dtype != torch.bfloat16:
        return [[name] for name in names]
    made_of = blocks_by_key(run.model.table, run.model.keymap.choice)
    together: dict[str, list[str]] = {}
    for name in names:
        together.setdefault(made_of[name][0][0].name, []).append(name)
    return list(together.values())


def g2_replicas(run: Run) -> Findings:
    """Ranks that hold the same elements hold the same bits, of weights and (before update) of gradients."""
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
        run.measured_once("G2", f"{kind}s with copies", sum(map(bool, copied.values())))
        if drifted:
            run.blame = run.blame or "copies differ, see G2"


def n1_norm(run: Run, step: int = 0) -> Findings:
    """With gradients that are all 1, the squared norm is the number of elements; the real norm is the reference's, and
    every token counts once in the load of its experts."""
    due, limit = run.reference.steps[step], run.trial.tolerance.grad
    if step == 0:
        yield from _norm_of_ones(run)
    elif run.blame:
        return
    norm = run.engine.norm(run.model.grads())
    error = _apart(norm, due.norm)
    if not error <= limit:
        yield Finding(
            "N1", "norm" + (f" of step {step}" if step else ""), f"{norm!r}, one process finds {due.norm!r}", run.blame
        )
    if any(n for (n,) in everywhere(run.model.mesh, [int(not error <= limit)])):
        run.blame = run.blame or f"the norm of step {step} is wrong, see N1"
    run.measured_once("N1", "norms", 1, error, limit)
    loads, due_loads = run.engine.router.load_LE, due.loads
    if run.trial.dtype != torch.float64:  # rounding sends a token to another expert, but not away
        loads, due_loads = loads.sum(), due_loads.sum()
    if not torch.equal(loads.cpu(), due_loads):
        yield Finding("N1", "load of experts", f"{loads.tolist()}, one process counts {due_loads.tolist()}", run.blame)
    if due_loads.numel():
        run.measured_once("N1", "counts of experts", due_loads.numel())


def _norm_of_ones(run: Run) -> Findings:
    ones = {name: torch.ones_like(t, dtype=torch.float32) for name, t in run.model.stored().items()}
    expected = sum(p.numel for p in run.model.table)
    squared = run.engine.norm(ones) ** 2
    if not abs(squared - expected) <= 0.5:
        guess = "copies are counted too" if squared > expected else "some shards are left out"
        yield Finding("N1", "norm of ones", f"counts {squared:.2f} elements of {expected}", guess)
    if any(n for (n,) in everywhere(run.model.mesh, [int(not abs(squared - expected) <= 0.5)])):
        run.blame = run.blame or "the norm is wrong, see N1"
    run.measured_once("N1", "elements of a norm of ones", expected)


def u1_update(run: Run, step: int, before: Mapping[str, Tensor], pushed: Set[str]) -> Findings:
    """Every parameter with a gradient moves and stays finite. In float64 the weights after each update are those of one
    process."""
    for name, tensor in run.model.stored().items():
        if not tensor.isfinite().all():
            what = f"{int((~tensor.isfinite()).sum())} elements on rank {run.model.mesh.rank} are not finite"
            yield Finding("U1", name, f"{what} after step {step}", run.blame)
        elif step == 0 and name in pushed and torch.equal(tensor, before[name]):
            what = f"it has a gradient on rank {run.model.mesh.rank}, but no update moved it"
            yield Finding("U1", name, what, "the module uses a copy of what is updated")
    if step == 0:
        run.measured("U1", "moved parameters of all ranks", len(pushed))
    due = run.reference.steps[step].weights
    if not due or run.blame:
        return
    found, limit, worst, at, num = unrounded(run.model), UPDATE * lr_of_trial(step), 0.0, "", 0
    compared = all(each.grads for each in run.reference.steps[: step + 1])
    right = "gradients and norms up to here are right" if compared else "norms up to here are right"
    for name, tensor in found.items():
        off = (tensor - due[name]).abs().nan_to_num(torch.inf)
        worst, at, num = *max((worst, at), (off.max().item(), name)), num + off.numel()
        if (off > limit).any():
            what = (
                f"{int((off > limit).sum())} of {off.numel()} elements end other than in one process after step {step}"
            )
            yield Finding("U1", name, what, f"{right}, so the update itself is not")
    run.measured_once("U1", "elements after updates", num, worst, limit, at)
    if everywhere(run.model.mesh, [int(worst > limit)])[0][0]:
        run.blame = f"the update of step {step} is wrong, see U1"


def u1_alive(run: Run, losses: Sequence[float]) -> Findings:
    """The next forwards see what was updated, and it is what is handed out."""
    for step, (loss, due) in enumerate(zip(losses, run.reference.steps, strict=True)):
        error, limit = _apart(loss, due.loss), run.trial.tolerance.loss
        if step and not error <= limit:
            guess = run.blame or "weights are right, so the forward does not see the update"
            yield Finding("U1", f"loss of step {step}", f"{loss!r}, one process finds {due.loss!r}", guess)
        if step:
            run.measured_once("U1", "losses after updates", 1, error, limit, f"step {step}")
    if run.trial.dtype == torch.float64:
        found = unrounded(run.model)
        for name, tensor in stream(run.model):
            if not _same_bits(tensor, found[name].to(tensor.dtype)):
                what = "what stream and export hand out is not what was trained"
                yield Finding("U1", name, what, "an earlier copy is handed out")


def e1_export(run: Run) -> Findings:
    """What is handed out is the source, byte for byte, as long as nothing was trained."""
    source = run.model.keymap.source
    assert source is not None
    names = []
    for name, tensor in stream(run.model, format="source"):
        names.append(name)
        if name in source.entries and not _same_bits(tensor, raw_tensor(source, name)):
            yield Finding("E1", name, f"{_differs(tensor, raw_tensor(source, name))} from the source")
    made = {key for key, scale in source.scales.items() if scale.packed}  # of packed numbers, which are handed out
    missing = set(source.entries) - set(names) - run.model.keymap.carried - made
    if run.model.mesh.rank == 0 and missing:
        yield Finding("E1", min(missing), f"{len(missing)} keys of the source are not handed out")
    run.measured_once("E1", "keys", len(names))


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def d1_documents(run: Run) -> Findings:
    """Packed documents give what each gives alone. First comes the part of the model where they begin to differ."""
    if any(finding.name == "labels" for finding in run.reference.notes.findings):
        run.blame = run.blame or "the labels are not those of the documents, see D1 labels"
    for number, batch in enumerate(run.trial.packed()):  # the same on all ranks
        if not (number and run.blame):
            yield from _documents_of(run, number, batch)


def _documents_of(run: Run, number: int, batch: Batch) -> Findings:
    model, limit, bounds, ref = run.model, run.trial.tolerance.logprob, batch.bounds, run.reference
    with watched(model) as seen:
        packed = scores_of(model, batch).cpu()
    wrong = first_wrong(model, seen, ref.prints[number], bounds[1], limit)
    errors = [(packed[a:b] - alone).abs().max().item() for a, b, alone in _documents(bounds, ref.alone[number])]
    off = [i for i, error in enumerate(errors) if not error <= limit]
    at = f"document {errors.index(max(errors))} of batch {number}"
    run.measured("D1", "documents on all ranks", len(errors), max(errors), limit, at)
    whole = (packed - by_logits(model, batch).cpu()).abs().max().item()  # on all ranks, whatever they have found
    run.measured_once("D1", "scores beside those of the logits", len(batch), whole, limit)
    if not any(n for (n,) in everywhere(model.mesh, [len(off)])):
        if not whole <= limit:
            what = f"log-probabilities of batch {number} are {whole:.1e} off those that the logits give"
            yield Finding("D1", "logits", what, _unmasked(packed, batch))
        return
    wrong = wrong or Wrong("head", leak=0 not in off, ratio=float("nan"))  # all before it is right
    leak = wrong.leak and 0 not in off and wrong.part.endswith("mixer")  # elsewhere no token sees another
    guess = run.blame or ("a leak from the documents before" if leak else about_doors(model, wrong.part, seen.passed))
    if not guess and wrong.ratio == wrong.ratio:
        guess = scale(wrong.ratio, run.trial.axes)
    if off:
        yield Finding("D1", wrong.part, "what it gives out is the first that is wrong", guess)
    run.blame = run.blame or f"the forward is wrong from {wrong.part} on, see D1"
    for i in off:
        what = f"scores off by {errors[i]:.1e} from the document alone"
        hint = "a leak" if leak else "not a leak, so is the first document" if 0 in off else ""
        yield Finding("D1", f"document {i} of batch {number}", what, hint)


def _unmasked(scores_T: Tensor, batch: Batch) -> str:
    unlabelled = scores_T.dim() == 1 and bool(scores_T[~batch.is_target_T].any())
    return "tokens without a label have some, where 0 is due" if unlabelled else ""


def _documents(bounds: Sequence[int], alone: Sequence[Tensor]) -> Iterator[tuple[int, int, Tensor]]:
    return ((a, b, scores) for (a, b), scores in zip(pairwise(bounds), alone, strict=True))
