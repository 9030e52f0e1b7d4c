"""M1, M2 and R1: compare one process of ours with transformers' model, in float64 and in bfloat16, and with peft.

Our model runs twice, in float64 and in float32. transformers runs in float32, so it may differ from our float64 run by
its own rounding. Our float32 run shows how large that is; transformers may be off by a few times as much. No fixed
bound fits all families, because a delta net can be ill-conditioned.

A check that transformers cannot run is neither a pass nor a failure. It is reported as not tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ..errors import ConfigError
from ..recipe import Lora
from .results import Finding, Margin, Notes, merged
from .rounding import r1_rounding
from .transformers_peer import (
    PATCHES,
    ROPE,
    Documents,
    StepOutputs,
    merged_by_both,
    meshwright_cost,
    run_meshwright,
    run_transformers,
    transformers_cost,
    unsupported,
    without_peft,
    write_adapter,
)

_ALLOWED = {
    "logits": 1e-5,
    "gradients": 1e-5,
    "parts": 1e-5,
    "loss": 1e-6,
    "aux": 1e-5,
    "merged": 1e-6,
}  # always allowed for float32
_NOISE = 10  # in addition, this many times our own float32 error
_OWN = 1e-3  # bound of our own float32 error: a larger one is not rounding, and would allow transformers anything
_CLOSE = 1e-3  # of a ratio to an integer
_GAP = 1e-5  # between the probabilities of two experts that rounding may exchange


def compare_with_transformers(
    sources: Sequence[Path], steps: Mapping[str, Sequence[Documents]], device: str = "cpu"
) -> tuple[Notes, str]:
    """Run M1 and R1 over several steps. -> notes, and why they could not run ("" if they did)

    Call it in a separate process. `sources`: the same model in several layouts of files; the first is spelled like
    transformers' parameters. `steps`: micro-batches, by their name in findings. `device`: where our bfloat16 run takes
    place, with the kernels of that device.
    """
    notes, why_not, first = Notes(), unsupported(sources[0]), next(iter(steps.values()))
    if not why_not:
        try:
            peers = [run_transformers(sources[0], batches) for batches in steps.values()]
            others = [run_transformers(source, first) for source in sources[1:]]
            cost = transformers_cost(sources[0], first[0])
        except Exception as error:  # noqa: BLE001 - an error of transformers is none of ours
            return notes, f"transformers fails on this model: {type(error).__name__}: {error!s:.200}"
        # Our model runs outside of `try`: an error in it is a finding, not a reason to skip.
        for (name, batches), peer in zip(steps.items(), peers, strict=True):
            wide, narrow = (run_meshwright(sources[0], batches, dtype) for dtype in (torch.float64, torch.float32))
            findings = m1_against(peer, wide, narrow, notes)
            notes.add_findings("M1", (replace(each, what=f"{each.what}, in {name}") for each in findings))
        for source, peer in zip(sources[1:], others, strict=True):
            wide, narrow = (run_meshwright(source, first, dtype) for dtype in (torch.float64, torch.float32))
            notes.add_findings("M1", _files(source.name, peer, wide, narrow, notes))
        notes.add_findings("R1", r1_rounding(meshwright_cost(sources[0], first[0], device), cost, notes))
        notes.margins = merged(notes.margins)
    return notes, why_not


def m1_against(peer: StepOutputs, wide: StepOutputs, narrow: StepOutputs, notes: Notes) -> Iterator[Finding]:
    """One process gives the logits, loss, gradients and choices of experts of transformers.

    `wide`: our run in float64, which is compared with `peer`. `narrow`: our run in float32, whose distance from `wide`
    sets the bound. Findings come in the order of the computation, so begin with the first.
    """
    if peer.odd_shapes:  # transformers draws these parameters anew, so nothing else can be compared
        for name, shapes in sorted(peer.odd_shapes.items()):
            yield Finding("M1", name, f"its shape is {shapes}", "transformers reads config.json otherwise")
        return
    yield from _own_float32(wide, narrow, notes)
    forward = [*_parts(peer, wide, narrow, notes), *_logits(peer, wide, narrow, notes), *_experts(peer, wide, notes)]
    yield from forward
    # Losses say nothing new once the forward pass differs.
    aux = (peer.aux, wide.aux, narrow.aux)
    loss = [] if forward else [*_number("aux", "router's aux loss", aux, notes, _about_aux(peer, wide))]
    guess = "see the router's aux loss" if loss else "" if forward else "logits agree: labels, weights or what divides"
    loss += _number("loss", "loss", (peer.loss, wide.loss, narrow.loss), notes, guess)
    yield from loss
    # A parameter without a gradient is never trained; in transformers its gradient must be 0 too.
    untrained = {name for name in peer.grads.keys() - wide.grads.keys() if not peer.grads[name].any()}
    for name in sorted((peer.grads.keys() ^ wide.grads.keys()) - untrained):
        yield Finding("M1", name, f"{'transformers' if name in peer.grads else 'only meshwright'} has this parameter")
    yield from _gradients(peer, wide, narrow, notes, not (forward or loss))


def compare_with_peft(source: Path, batches: Sequence[Documents], lora: Lora, adapter: Path) -> tuple[Notes, str]:
    """Run M2 over one step. -> notes, and why it could not run ("" if it did)

    Call it in a separate process. `source`: spelled like transformers' parameters. `adapter`: where to write PEFT's
    files, which both sides read.
    """
    notes, why_not = Notes(), without_peft() or unsupported(source)
    if why_not:
        return notes, why_not
    try:
        write_adapter(source, lora, adapter)
    except ConfigError as error:  # targets that name only dense layers, which this model lacks
        return notes, str(error)
    try:
        peer = run_transformers(source, batches, adapter)
    except Exception as error:  # noqa: BLE001 - an error of peft is none of ours
        return notes, f"peft fails on this model: {type(error).__name__}: {error!s:.200}"
    wide, narrow = (run_meshwright(source, batches, dtype, adapter) for dtype in (torch.float64, torch.float32))
    notes.add_findings("M2", m2_against(peer, wide, narrow, merged_by_both(source, adapter), notes))
    return notes, ""


def m2_against(
    peer: StepOutputs, wide: StepOutputs, narrow: StepOutputs,
    merged: tuple[Mapping[str, Tensor], Mapping[str, Tensor]], notes: Notes,
) -> Iterator[Finding]:  # fmt: skip
    """One process with adapters gives the logits, the loss and the gradients of all factors of peft, and its merge.

    It is M1 with adapters in both models. `merged`: weights in float32, ours and peft's.
    """
    own = Notes()
    for finding in m1_against(peer, wide, narrow, own):
        texts = (finding.what, finding.guess)
        what, guess = (text.replace("transformers'", "peft's").replace("transformers", "peft") for text in texts)
        yield replace(finding, oracle="M2", what=what, guess=guess)
    for margin in own.margins:
        notes.add_margin(replace(margin, oracle="M2"))
    ours, theirs = merged
    worst, where = 0.0, ""
    for key, tensor in ours.items():
        off = (tensor.double() - theirs[key].double()).abs().max().item() / tensor.abs().max().item()
        worst, where = max((worst, where), (off, key))
        if not off <= _ALLOWED["merged"]:
            yield Finding("M2", key, f"merged, it is {off:.1e} off what peft's merge_and_unload makes")
    notes.add_margin(Margin("M2", "merged weights", len(ours), worst, _ALLOWED["merged"], where))


def _own_float32(wide: StepOutputs, narrow: StepOutputs, notes: Notes) -> Iterator[Finding]:
    """Compare our run in float32 with that in float64, which may take another code path, for example to sort scores."""
    off = (narrow.logits.double() - wide.logits.double()).abs().max().item() / wide.logits.abs().max().item()
    notes.add_margin(Margin("M1", "logits in float32, against float64", 1, off, _OWN))
    if not off <= _OWN:
        yield Finding("M1", "logits in float32", f"{off:.1e} off ours in float64", "float32 takes another path")


def _parts(peer: StepOutputs, wide: StepOutputs, narrow: StepOutputs, notes: Notes) -> Iterator[Finding]:
    """Yield the first part of the model whose output differs. Later differences follow from it."""
    names = [name for name in wide.parts if name in peer.parts]
    for name in names:
        margin = _margin("parts", "parts of the forward", peer.parts[name], wide.parts[name], narrow.parts[name], name)
        if not margin.worst <= margin.allowed:
            what = f"its output is the first that differs from transformers', by {margin.worst:.1e}"
            yield Finding("M1", name, what, _about_part(name, wide))
            return
        notes.add_margin(margin)


def _about_part(name: str, wide: StepOutputs) -> str:
    """Guess why a part differs while all before it agree.

    A vision tower's addition between layers is not the output of a part, so the next norm is the first to differ.
    """
    otherwise = "positions or fields of config.json" if name == ROPE else "its weights"
    guess = f"it computes something else, or {otherwise} are read otherwise"
    taken = [
        f"layers.{number}.norm" for number in range(1 + sum(part.startswith("tower.deep.") for part in wide.parts))
    ]
    if PATCHES not in wide.parts or name not in taken:
        return guess
    return f"rows of the tower are added elsewhere or in another order; or {guess}"


def _margin(
    kind: str, what: str, peer: torch.Tensor, wide: torch.Tensor, narrow: torch.Tensor, where: str = ""
) -> Margin:
    """Return the largest error relative to the largest value, and the bound of this kind plus our own noise."""
    scale = peer.double().abs().max().item()
    off, noise = ((x.double() - wide.double()).abs().max().item() / scale for x in (peer, narrow))
    return Margin("M1", what, 1, off, _ALLOWED[kind] + _NOISE * noise, where)


def _logits(peer: StepOutputs, wide: StepOutputs, narrow: StepOutputs, notes: Notes) -> Iterator[Finding]:
    margin = _margin("logits", "logits of a step", peer.logits, wide.logits, narrow.logits)
    notes.add_margin(margin)
    if not margin.worst <= margin.allowed:
        yield Finding("M1", "logits", f"{margin.worst:.1e} off those of transformers, {margin.allowed:.0e} allowed")


def _number(
    kind: str, name: str, numbers: tuple[float, float, float], notes: Notes, guess: str = ""
) -> Iterator[Finding]:
    """Compare a number. `numbers`: those of transformers, of our model in float64, and of our model in float32."""
    peer, wide, narrow = numbers
    if not peer and not wide:
        return
    off, noise = (abs(x - wide) / max(abs(peer), 1e-30) for x in (peer, narrow))
    margin = Margin("M1", name, 1, off, _ALLOWED[kind] + _NOISE * noise)
    notes.add_margin(margin)
    if not off <= margin.allowed:
        yield Finding("M1", name, f"{wide!r}, transformers has {peer!r}: {off:.1e} off", guess)


def _about_aux(peer: StepOutputs, wide: StepOutputs) -> str:
    """Guess why the aux loss differs, from the ratio to that of transformers."""
    ratio = wide.aux / peer.aux if peer.aux else 0.0
    if abs(ratio - wide.num_batches) < _CLOSE and wide.num_batches > 1:
        return f"{wide.num_batches} micro-batches are summed, not averaged"
    return f"{ratio:.4g} times that of transformers, as when router_aux_loss_coef is read otherwise" if ratio else ""


def _gradients(
    peer: StepOutputs, wide: StepOutputs, narrow: StepOutputs, notes: Notes, only_backward: bool
) -> Iterator[Finding]:
    """Compare gradients, those nearest to the loss first. `only_backward`: forward pass and loss agree.

    The first wrong gradient then bounds the mistake: backward is right down to the last gradient that agrees.
    """
    norm = torch.stack([g.double().norm() for g in peer.grads.values()]).norm().item()
    worst = Margin("M1", "gradients", 0, 0.0, _ALLOWED["gradients"])
    names, right = [name for name in reversed(list(wide.grads)) if name in peer.grads], "the loss"
    for name in names:
        of = [each.grads[name].double().flatten() for each in (peer, wide, narrow)]
        floor = max(of[0].norm().item(), 1e-2 * norm)  # a gradient near 0 is measured by 1% of the norm of all
        off, noise = (of[0] - of[1]).norm().item() / floor, (of[2] - of[1]).norm().item() / floor
        margin = Margin("M1", "gradients", len(names), off, _ALLOWED["gradients"] + _NOISE * noise, name)
        worst = max(worst, margin, key=lambda margin: margin.share)
        if not off <= margin.allowed:
            guess = (
                f"forward and loss agree, so backward is wrong between {right} and this key" if only_backward else ""
            )
            yield Finding("M1", name, f"its gradient is {off:.1e} off that of transformers", guess)
            only_backward = False
        else:
            right = name
    notes.add_margin(worst)


def _experts(peer: StepOutputs, wide: StepOutputs, notes: Notes) -> Iterator[Finding]:
    """Compare the choices of experts, except for tokens whose last chosen and first rejected experts are nearly tied.

    Indices are sorted: the order in which a token's experts are listed has no effect.
    """
    num = 0
    for layer, (a_Tk, b_Tk, probs_TE) in enumerate(zip(peer.experts, wide.experts, peer.probs, strict=True)):
        k, num_experts = a_Tk.shape[1], probs_TE.shape[1]
        best_TE = probs_TE.sort(-1, descending=True).values
        sure_T = (
            best_TE[:, k - 1] - best_TE[:, k] > _GAP if k < num_experts else torch.ones(len(a_Tk), dtype=torch.bool)
        )
        off_T = (a_Tk.sort().values != b_Tk.sort().values).any(-1) & sure_T
        num += int(sure_T.sum())
        if off_T.any():
            yield Finding("M1", f"layer {layer} of experts", f"{int(off_T.sum())} tokens go to other experts")
    if peer.experts:
        notes.add_margin(Margin("M1", "choices of experts", num))


def _files(layout: str, peer: StepOutputs, wide: StepOutputs, narrow: StepOutputs, notes: Notes) -> Iterator[Finding]:
    """Compare the logits of the same model loaded from files in another layout, such as one tensor per expert.

    transformers converts layouts itself, so its reading of the files is independent of ours.
    """
    margin = _margin("logits", f"logits of files in the layout {layout}", peer.logits, wide.logits, narrow.logits)
    notes.add_margin(margin)
    if not margin.worst <= margin.allowed:
        what = f"logits are {margin.worst:.1e} off those of transformers, {margin.allowed:.0e} allowed"
        yield Finding("M1", f"files in the layout {layout}", what, "its blocks are put in other places")
