"""M1: one process of ours beside transformers' own model, where it knows the family.

All else that `verify` compares is our code with our code. This is the only place of the package where transformers'
models are imported. Its documents are run one by one, ours packed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..data import pack
from ..engine import Engine, gather, load, logits
from ..mesh import Mesh
from ..weights import read_config
from .diagnose.routers import watched_routers
from .findings import Finding, Margin, Notes, merged

_LOGITS, _GRADS, _LOSS = 1e-5, 1e-5, 1e-6  # what float32 may cost transformers, beside what it costs us
_NOISE = 10  # times what float32 costs us
_GAP = 1e-5  # between two experts that may change places


@dataclass(frozen=True)
class Said:
    """What a model says of documents."""

    logits: Tensor  # [T, V]
    loss: float
    grads: dict[str, Tensor]
    experts: Sequence[Tensor]  # by layer of experts: [T, k]
    probs: Sequence[Tensor]  # by layer of experts: [T, E]


def compare(source: Path, several: Sequence[list[list[int]]]) -> tuple[Notes, str]:
    """What is found with several lists of documents, or why transformers cannot be the peer. Call it in a process of
    its own."""
    notes, why_not = Notes(), _stranger(read_config(source))
    for documents in several if not why_not else ():
        try:
            theirs = _theirs(source, documents)
        except Exception as error:  # noqa: BLE001 - what fails there says nothing of us
            return notes, f"transformers fails on this model: {type(error).__name__}: {error!s:.200}"
        wide, narrow = (_ours(source, documents, dtype) for dtype in (torch.float64, torch.float32))
        notes.found("M1", m1_against(theirs, wide, narrow, notes))
    notes.margins = merged(notes.margins)
    return notes, why_not


def _stranger(config: dict[str, Any]) -> str:
    try:
        from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING
    except ImportError as error:
        return f"transformers cannot be imported: {error}"
    kind = str(config.get("model_type"))
    known = kind in CONFIG_MAPPING and CONFIG_MAPPING[kind] in MODEL_FOR_CAUSAL_LM_MAPPING
    return "" if known else f"this version of transformers has no language model of {kind!r}"


def _ours(source: Path, documents: list[list[int]], dtype: torch.dtype) -> Said:
    model = load(source, Mesh(device="cpu"), dtype=dtype)
    batch = pack(documents)
    with watched_routers(model) as seen:
        scores = logits(model, batch)
    engine = Engine(model, lr=1e-3)
    loss = engine.backward([batch])
    probs = [logits_TE.double().softmax(-1) for _, logits_TE, _ in seen.values()]
    return Said(scores, loss, gather(model, "grad"), [expert_Tk for _, _, expert_Tk in seen.values()], probs)


def _theirs(source: Path, documents: list[list[int]]) -> Said:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    with_experts = bool(read_config(source).get("num_experts"))
    plain = {"attn_implementation": "eager", **({"experts_implementation": "eager"} if with_experts else {})}
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **plain).eval()
    routed = {"output_router_logits": True} if with_experts else {}
    outs = [model(torch.tensor([d]), use_cache=False, **routed) for d in documents]
    both = zip(outs, documents, strict=True)
    terms = [F.cross_entropy(out.logits[0, :-1], torch.tensor(d[1:]), reduction="sum") for out, d in both if len(d) > 1]
    loss = torch.stack(terms).sum() / sum(len(d) - 1 for d in documents)
    routers = [torch.cat(each) for each in zip(*(out.router_logits for out in outs), strict=True)] if routed else []
    if routers and model.config.output_router_logits:
        aux = sys.modules[type(model).__module__].load_balancing_loss_func
        k, num = model.config.num_experts_per_tok, model.config.num_experts
        loss = loss + model.config.router_aux_loss_coef * aux(tuple(routers), num, k)
    loss.backward()
    grads = {k: torch.zeros_like(p) if p.grad is None else p.grad for k, p in model.named_parameters()}
    probs = [router.detach().double().softmax(-1) for router in routers]
    experts = [p.topk(model.config.num_experts_per_tok, -1).indices for p in probs]
    return Said(torch.cat([out.logits[0] for out in outs]).detach(), loss.item(), grads, experts, probs)


def m1_against(theirs: Said, wide: Said, narrow: Said, notes: Notes) -> Iterator[Finding]:
    """One process gives the logits, loss, gradients and choices of experts of transformers. Ours in float64 is the one
    to compare with; what float32 costs us, it may cost them a few times."""
    scale = theirs.logits.abs().max().item()
    off = (theirs.logits - wide.logits).abs().max().item() / scale
    allowed = _LOGITS + _NOISE * (narrow.logits - wide.logits).abs().max().item() / scale
    yield from _judged("logits", off, allowed, "the forward computes something else than transformers", notes)
    off, noise = abs(theirs.loss - wide.loss) / abs(theirs.loss), abs(narrow.loss - wide.loss) / abs(theirs.loss)
    yield from _judged("loss", off, _LOSS + _NOISE * noise, "", notes)
    yield from _experts(theirs, wide, notes)
    for name in sorted(theirs.grads.keys() ^ wide.grads.keys()):
        yield Finding("M1", name, f"{'transformers' if name in theirs.grads else 'only meshwright'} has this parameter")
    norm = torch.stack([g.double().norm() for g in theirs.grads.values()]).norm().item()
    worst = Margin("M1", "gradients", len(theirs.grads), 0.0, _GRADS)
    for name in theirs.grads.keys() & wide.grads.keys():
        of = [said.grads[name].double().flatten() for said in (theirs, wide, narrow)]
        floor = max(of[0].norm().item(), 1e-2 * norm)
        off, noise = (of[0] - of[1]).norm().item() / floor, (of[2] - of[1]).norm().item() / floor
        here = Margin("M1", "gradients", len(theirs.grads), off, _GRADS + _NOISE * noise, name)
        worst = max(worst, here, key=lambda margin: margin.share)
        if not off <= here.allowed:
            yield Finding("M1", name, f"its gradient is {off:.1e} off that of transformers, {here.allowed:.0e} allowed")
    notes.measured(worst)


def _judged(what: str, off: float, allowed: float, guess: str, notes: Notes) -> Iterator[Finding]:
    notes.measured(Margin("M1", what, 1, off, allowed))
    if not off <= allowed:
        yield Finding("M1", what, f"{off:.1e} off those of transformers, {allowed:.0e} allowed", guess)


def _experts(theirs: Said, ours: Said, notes: Notes) -> Iterator[Finding]:
    num = 0
    for layer, (a_Tk, b_Tk, probs_TE) in enumerate(zip(theirs.experts, ours.experts, theirs.probs, strict=True)):
        kth_T = probs_TE.gather(1, a_Tk).min(-1).values
        sure_T = (probs_TE.topk(min(a_Tk.shape[1] + 1, probs_TE.shape[1]), -1).values[:, -1] < kth_T - _GAP) | (
            a_Tk.shape[1] == probs_TE.shape[1]
        )
        off_T = (a_Tk.sort().values != b_Tk.sort().values).any(-1) & sure_T
        num += int(sure_T.sum())
        if off_T.any():
            yield Finding("M1", f"layer {layer} of experts", f"{int(off_T.sum())} tokens go to other experts")
    if theirs.experts:
        notes.measured(Margin("M1", "choices of experts", num))
