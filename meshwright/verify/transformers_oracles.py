"""M1 and R1: one process of ours beside transformers' own model, in float64 and in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from .results import Finding, Margin, Notes, merged
from .rounding import r1_rounding
from .transformers_peer import PATCHES, ROPE, Documents, Said, our_cost, ours, stranger, their_cost, theirs

_ALLOWED = {"logits": 1e-5, "gradients": 1e-5, "parts": 1e-5, "loss": 1e-6, "aux": 1e-5}  # what float32 may cost them
_NOISE = 10  # times what float32 costs us, beside that
_CLOSE = 1e-3  # of a ratio to a whole number
_GAP = 1e-5  # between two experts that may change places


def ask_transformers(
    sources: Sequence[Path], steps: Mapping[str, Sequence[Documents]], device: str = "cpu"
) -> tuple[Notes, str]:
    """What is found in several steps, or why transformers cannot be the peer. Call it in a process of its own.

    `sources`: the same model in several layouts of files. The first is spelled as transformers spells its parameters.
    `steps`: micro-batches, by what they are. `device`: where bfloat16 is tried, with the kernels that it has.
    """
    notes, why_not, first = Notes(), stranger(sources[0]), next(iter(steps.values()))
    if not why_not:
        try:
            peers = [theirs(sources[0], batches) for batches in steps.values()]
            others = [theirs(source, first) for source in sources[1:]]
            cost = their_cost(sources[0], first[0])
        except Exception as error:  # noqa: BLE001 - what fails there says nothing of us
            return notes, f"transformers fails on this model: {type(error).__name__}: {error!s:.200}"
        for (name, batches), peer in zip(steps.items(), peers, strict=True):
            wide, narrow = (ours(sources[0], batches, dtype) for dtype in (torch.float64, torch.float32))
            found = m1_against(peer, wide, narrow, notes)
            notes.found("M1", (replace(each, what=f"{each.what}, in {name}") for each in found))
        for source, peer in zip(sources[1:], others, strict=True):
            wide, narrow = (ours(source, first, dtype) for dtype in (torch.float64, torch.float32))
            notes.found("M1", _files(source.name, peer, wide, narrow, notes))
        notes.found("R1", r1_rounding(our_cost(sources[0], first[0], device), cost, notes))
        notes.margins = merged(notes.margins)
    return notes, why_not


def m1_against(peer: Said, wide: Said, narrow: Said, notes: Notes) -> Iterator[Finding]:
    """One process gives the logits, loss, gradients and choices of experts of transformers. Ours in float64 is the one
    to compare with; what float32 costs us, it may cost them a few times."""
    forward = [*_parts(peer, wide, narrow, notes), *_logits(peer, wide, narrow, notes), *_experts(peer, wide, notes)]
    yield from forward
    aux = (peer.aux, wide.aux, narrow.aux)
    loss = [] if forward else [*_number("aux", "router's aux loss", aux, notes, _about_aux(peer, wide))]
    guess = "see the router's aux loss" if loss else "" if forward else "logits agree: labels, weights or what divides"
    loss += _number("loss", "loss", (peer.loss, wide.loss, narrow.loss), notes, guess)
    yield from loss
    for name in sorted(peer.grads.keys() ^ wide.grads.keys()):
        yield Finding("M1", name, f"{'transformers' if name in peer.grads else 'only meshwright'} has this parameter")
    yield from _gradients(peer, wide, narrow, notes, not (forward or loss))


def _parts(peer: Said, wide: Said, narrow: Said, notes: Notes) -> Iterator[Finding]:
    """The first part of the model that gives out something else. Later ones follow from it."""
    names = [name for name in wide.parts if name in peer.parts]
    for name in names:
        margin = _margin("parts", "parts of the forward", peer.parts[name], wide.parts[name], narrow.parts[name], name)
        if not margin.worst <= margin.allowed:
            what = f"what it gives out is the first that differs from transformers', by {margin.worst:.1e}"
            yield Finding("M1", name, what, _about_part(name, wide))
            return
        notes.measured(margin)


def _about_part(name: str, wide: Said) -> str:
    """All before it agrees, but for what the tower adds between layers."""
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
    scale = peer.double().abs().max().item()
    off, noise = ((x.double() - wide.double()).abs().max().item() / scale for x in (peer, narrow))
    return Margin("M1", what, 1, off, _ALLOWED[kind] + _NOISE * noise, where)


def _logits(peer: Said, wide: Said, narrow: Said, notes: Notes) -> Iterator[Finding]:
    margin = _margin("logits", "logits of a step", peer.logits, wide.logits, narrow.logits)
    notes.measured(margin)
    if not margin.worst <= margin.allowed:
        yield Finding("M1", "logits", f"{margin.worst:.1e} off those of transformers, {margin.allowed:.0e} allowed")


def _number(
    kind: str, name: str, numbers: tuple[float, float, float], notes: Notes, guess: str = ""
) -> Iterator[Finding]:
    """Theirs, ours in float64 and ours in float32."""
    peer, wide, narrow = numbers
    if not peer and not wide:
        return
    off, noise = (abs(x - wide) / max(abs(peer), 1e-30) for x in (peer, narrow))
    margin = Margin("M1", name, 1, off, _ALLOWED[kind] + _NOISE * noise)
    notes.measured(margin)
    if not off <= margin.allowed:
        yield Finding("M1", name, f"{wide!r}, transformers has {peer!r}: {off:.1e} off", guess)


def _about_aux(peer: Said, wide: Said) -> str:
    ratio = wide.aux / peer.aux if peer.aux else 0.0
    if abs(ratio - wide.num_batches) < _CLOSE and wide.num_batches > 1:
        return f"{wide.num_batches} micro-batches are summed, not averaged"
    return f"{ratio:.4g} times theirs, as when router_aux_loss_coef is read otherwise" if ratio else ""


def _gradients(peer: Said, wide: Said, narrow: Said, notes: Notes, way_back: bool) -> Iterator[Finding]:
    """Those nearest to the loss first. `way_back`: all before it agrees."""
    norm = torch.stack([g.double().norm() for g in peer.grads.values()]).norm().item()
    worst = Margin("M1", "gradients", 0, 0.0, _ALLOWED["gradients"])
    names, right = [name for name in reversed(list(wide.grads)) if name in peer.grads], "the loss"
    for name in names:
        of = [said.grads[name].double().flatten() for said in (peer, wide, narrow)]
        floor = max(of[0].norm().item(), 1e-2 * norm)
        off, noise = (of[0] - of[1]).norm().item() / floor, (of[2] - of[1]).norm().item() / floor
        here = Margin("M1", "gradients", len(names), off, _ALLOWED["gradients"] + _NOISE * noise, name)
        worst = max(worst, here, key=lambda margin: margin.share)
        if not off <= here.allowed:
            guess = f"forward and loss agree, so the way back is wrong between {right} and here" if way_back else ""
            yield Finding("M1", name, f"its gradient is {off:.1e} off that of transformers", guess)
            way_back = False
        else:
            right = name
    notes.measured(worst)


def _experts(peer: Said, wide: Said, notes: Notes) -> Iterator[Finding]:
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
        notes.measured(Margin("M1", "choices of experts", num))


def _files(layout: str, peer: Said, wide: Said, narrow: Said, notes: Notes) -> Iterator[Finding]:
    """The same model, its files spelled otherwise."""
    margin = _margin("logits", f"logits of files in the layout {layout}", peer.logits, wide.logits, narrow.logits)
    notes.measured(margin)
    if not margin.worst <= margin.allowed:
        what = f"logits are {margin.worst:.1e} off those of transformers, {margin.allowed:.0e} allowed"
        yield Finding("M1", f"files in the layout {layout}", what, "its blocks are put in other places")
