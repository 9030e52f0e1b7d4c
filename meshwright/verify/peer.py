"""What a model says of documents: ours, in one process, and transformers' own, where it knows the family.

All else that `verify` compares is our code with our code. This is the only module of the package that imports the
models of transformers. Ours takes the documents packed, theirs takes one after the other.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data import pack
from ..engine import Engine, Model, gather, load, logits
from ..mesh import Mesh
from ..weights import read_config
from .diagnose.forward import watched
from .diagnose.routers import watched_routers

Documents = list[list[int]]
# Our parts by the names of theirs, and those of a layer.
ROPE = "RoPE"
_PARTS = {"rotary_emb": ROPE, "embed_tokens": "embed", "norm": "head.norm"}
_OF_LAYER = {
    "input_layernorm": "norm", "self_attn": "mixer", "linear_attn": "mixer", "post_attention_layernorm": "mlp_norm",
    "mlp": "mlp",
}  # fmt: skip


@dataclass(frozen=True)
class Said:
    """What a model says of a step. Tokens are those of all documents, one after the other."""

    logits: Tensor  # [T, V]
    loss: float
    aux: float  # the router's part of it
    grads: dict[str, Tensor]
    experts: Sequence[Tensor] = ()  # by layer of experts: [T, k]
    probs: Sequence[Tensor] = ()  # by layer of experts: [T, E]
    parts: dict[str, Tensor] = field(default_factory=dict)  # [T]: a fingerprint of what each part gives out
    num_batches: int = 1


def ours(source: Path, batches: Sequence[Documents], dtype: torch.dtype) -> Said:
    model = load(source, Mesh(device="cpu"), dtype=dtype)
    length = max(sum(map(len, documents)) for documents in batches)
    packed, scores, parts, routed = [pack(documents, length=length) for documents in batches], [], [], []
    for batch in packed:
        num = len(batch) - batch.num_filler
        with watched_routers(model) as routers, watched(model) as seen, _rotations(model) as rope:
            scores.append(logits(model, batch)[:num])
        parts.append({name: print_T[:num] for name, print_T in (rope | seen.prints).items()})
        routed.append([(logits_TE[:num], expert_Tk[:num]) for _, logits_TE, expert_Tk in routers.values()])
    engine = Engine(model, lr=1e-3)
    loss = engine.backward(packed)
    aux = engine._pending().router_loss
    by_layer = [[torch.cat(each) for each in zip(*of_layer, strict=True)] for of_layer in zip(*routed, strict=True)]
    probs = [logits_TE.double().softmax(-1) for logits_TE, _ in by_layer]
    experts = [expert_Tk for _, expert_Tk in by_layer]
    prints = {name: torch.cat([each[name] for each in parts]) for name in parts[0]}
    return Said(torch.cat(scores), loss, aux, gather(model, "grad"), experts, probs, prints, len(batches))


@contextmanager
def _rotations(model: Model) -> Iterator[dict[str, Tensor]]:
    """What the layers are told of positions, as `watched` says it of what parts give out."""
    seen: dict[str, Tensor] = {}

    def note(_module: nn.Module, args: Any) -> None:
        seen[ROPE] = _print(torch.cat(args[1], -1))

    hook = model.parts[0].layers["0"].register_forward_pre_hook(note)
    try:
        yield seen
    finally:
        hook.remove()


def _print(x_TD: Tensor) -> Tensor:
    return x_TD.detach().double() @ torch.arange(x_TD.shape[-1], dtype=torch.float64).cos()


def stranger(source: Path) -> str:
    """Why transformers cannot be the peer; nothing if it can."""
    try:
        from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING
    except ImportError as error:
        return f"transformers cannot be imported: {error}"
    kind = str(read_config(source).get("model_type"))
    known = kind in CONFIG_MAPPING and CONFIG_MAPPING[kind] in MODEL_FOR_CAUSAL_LM_MAPPING
    return "" if known else f"this version of transformers has no language model of {kind!r}"


def theirs(source: Path, batches: Sequence[Documents]) -> Said:
    with_experts = bool(read_config(source).get("num_experts"))
    model = _model(source, with_experts)
    routed = {"output_router_logits": True} if with_experts else {}
    with _watched(model) as parts:
        outs = [[model(torch.tensor([d]), use_cache=False, **routed) for d in documents] for documents in batches]
    terms = [_terms(out.logits[0], d) for of, documents in zip(outs, batches, strict=True)
             for out, d in zip(of, documents, strict=True)]  # fmt: skip
    loss = torch.stack(terms).sum() / sum(len(d) - 1 for documents in batches for d in documents)
    routers = [
        [torch.cat(each) for each in zip(*(out.router_logits for out in of), strict=True)] for of in outs if routed
    ]
    aux = _aux(model, routers) if routers else torch.zeros(())
    (loss + aux).backward()
    grads = {k: torch.zeros_like(p) if p.grad is None else p.grad for k, p in model.named_parameters()}
    probs = [torch.cat(each).detach().double().softmax(-1) for each in zip(*routers, strict=True)]
    experts = [p.topk(model.config.num_experts_per_tok, -1).indices for p in probs]
    scores = torch.cat([out.logits[0] for of in outs for out in of]).detach()
    prints = {name: torch.cat(each) for name, each in parts.items()}
    return Said(scores, (loss + aux).item(), aux.item(), grads, experts, probs, prints)


def _model(source: Path, with_experts: bool) -> Any:
    """In float32 and as plain as can be: its faster experts want widths of whole 16 bytes."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    plain = {"attn_implementation": "eager", **({"experts_implementation": "eager"} if with_experts else {})}
    return transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **plain).eval()


def _terms(logits_TV: Tensor, document: list[int]) -> Tensor:
    return F.cross_entropy(logits_TV[:-1], torch.tensor(document[1:], dtype=torch.int64), reduction="sum")


def _aux(model: Any, routers: Sequence[Sequence[Tensor]]) -> Tensor:
    """The mean over micro-batches of what transformers makes of each."""
    config = model.config
    if not config.output_router_logits:
        return torch.zeros(())
    of_batch = sys.modules[type(model).__module__].load_balancing_loss_func
    each = [of_batch(tuple(layers), config.num_experts, config.num_experts_per_tok) for layers in routers]
    return config.router_aux_loss_coef * torch.stack(each).mean()


@contextmanager
def _watched(model: Any) -> Iterator[dict[str, list[Tensor]]]:
    """What each part gives out, as `diagnose.forward.watched` of ours: one number a token."""
    seen: dict[str, list[Tensor]] = {}

    def hook(name: str) -> Any:
        def note(_module: nn.Module, _args: Any, out: Any) -> None:
            if name == ROPE:  # theirs have each cosine and sine twice
                x_TD = torch.cat([x[0, :, : x.shape[-1] // 2] for x in out], -1)
            else:
                x_TD = out[0] if isinstance(out, tuple) else out
            seen.setdefault(name, []).append(_print(x_TD.reshape(-1, x_TD.shape[-1])))

        return note

    hooks = []
    for their_name, module in model.base_model.named_modules():
        *layer, last = their_name.split(".")
        if not layer and last in _PARTS:
            hooks.append(module.register_forward_hook(hook(_PARTS[last])))
        elif len(layer) == 2 and last in _OF_LAYER:
            hooks.append(module.register_forward_hook(hook(f"layers.{layer[1]}.{_OF_LAYER[last]}")))
    try:
        yield seen
    finally:
        for each in hooks:
            each.remove()
