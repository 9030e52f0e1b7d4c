"""What a model says of documents: ours, in one process, and transformers' own, where it knows the family.

All else that `verify` compares is our code with our code. This is the only module of the package that imports the
models of transformers. Ours takes the documents packed, theirs takes one after the other. A model that sees is asked
of its tower too, if documents have pictures.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data import IGNORE, Batch, pack
from ..engine import Engine, Model, gather, load, logits
from ..mesh import Mesh
from ..models import text_config
from ..ops import loss
from ..ops.part_sizes import shrunk_part_sizes
from ..weights import read_config
from .diagnose.forward import parts_of, tower_parts_of, watched, watched_routers
from .rounding import Cost, Parts, Pass, cost_of, followed
from .small_data import Picture, Pictures, labels_of

# Our parts by the names of theirs, those of lists, and those of a layer.
ROPE, PATCHES = "RoPE", "tower.patches"
_FEW_TOKENS = 1  # of about 130: the head's gradient is a sum over as many chunks
_PARTS = {"rotary_emb": ROPE, "embed_tokens": "embed", "norm": "head.norm", "visual.merger": "tower.merger"}
_LISTS = {"visual.blocks": "tower.blocks", "visual.deepstack_merger_list": "tower.deep"}
_OF_LAYER = {
    "input_layernorm": "norm", "self_attn": "mixer", "linear_attn": "mixer", "post_attention_layernorm": "mlp_norm",
    "mlp": "mlp",
}  # fmt: skip


@dataclass(frozen=True)
class Document:
    tokens: list[int]
    pictures: Pictures = field(default_factory=list)  # in the order of their places


Documents = list[Document]


@dataclass(frozen=True)
class Said:
    """What a model says of a step. Tokens are those of all documents, one after the other."""

    logits: Tensor  # [T, V]
    loss: float
    aux: float  # the router's part of it
    grads: dict[str, Tensor]
    experts: Sequence[Tensor] = ()  # by layer of experts: [T, k]
    probs: Sequence[Tensor] = ()  # by layer of experts: [T, E]
    parts: dict[str, Tensor] = field(default_factory=dict)  # a fingerprint of each row that a part gives out
    num_batches: int = 1


def ours(source: Path, batches: Sequence[Documents], dtype: torch.dtype) -> Said:
    model = load(source, Mesh(device="cpu"), dtype=dtype, tower=_sees(source))
    length = max(sum(len(d.tokens) for d in documents) for documents in batches)
    packed, scores, parts, routed = [_packed(model, documents, length) for documents in batches], [], [], []
    for batch in packed:
        num = len(batch) - batch.num_filler
        with (
            watched_routers(model) as routers,
            watched(model) as seen,
            watched(model, tower_parts_of) as looked,
            _rotations(model) as rope,
        ):
            scores.append(logits(model, batch)[:num])
        of_tokens = {name: print_T[:num] for name, print_T in (rope | seen.prints).items()}
        parts.append({ROPE: of_tokens[ROPE], **looked.prints, **of_tokens})  # as they follow from each other
        routed.append([(logits_TE[:num], expert_Tk[:num]) for _, logits_TE, expert_Tk in routers.values()])
    engine = Engine(model, lr=1e-3)
    loss = engine.backward(packed)
    aux = engine._pending().router_loss
    by_layer = [[torch.cat(each) for each in zip(*of_layer, strict=True)] for of_layer in zip(*routed, strict=True)]
    probs = [logits_TE.double().softmax(-1) for logits_TE, _ in by_layer]
    experts = [expert_Tk for _, expert_Tk in by_layer]
    return Said(torch.cat(scores), loss, aux, gather(model, "grad"), experts, probs, _joined(parts), len(batches))


def _sees(source: Path) -> bool:
    """Sources that are to be asked of the text alone have a language model's config."""
    return "vision_config" in read_config(source)


def _packed(model: Model, documents: Documents, length: int) -> Batch:
    tokens, tower = [d.tokens for d in documents], model.parts[0].tower
    if tower is None:
        return pack(tokens, length=length)
    return pack(tokens, length=length, images=[d.pictures for d in documents], placeholders=tower.ids)


def _joined(prints: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Of all batches or documents. Those without pictures say nothing of the tower."""
    names = dict.fromkeys(name for each in prints for name in each)
    return {name: torch.cat([each[name] for each in prints if name in each]) for name in names}


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
        from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    except ImportError as error:
        return f"transformers cannot be imported: {error}"
    kind = str(read_config(source).get("model_type"))
    sees, models = "language model", MODEL_FOR_CAUSAL_LM_MAPPING
    if _sees(source):
        sees, models = "model that sees", MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    known = kind in CONFIG_MAPPING and CONFIG_MAPPING[kind] in models
    return "" if known else f"this version of transformers has no {sees} of {kind!r}"


def theirs(source: Path, batches: Sequence[Documents]) -> Said:
    with_experts = bool(text_config(read_config(source)).get("num_experts"))
    model, prints = _model(source, with_experts), list[dict[str, Tensor]]()
    routed = {"output_router_logits": True} if with_experts else {}
    outs = [[_asked(model, d, prints, **routed) for d in documents] for documents in batches]
    labels = [[_labels(model, d) for d in documents] for documents in batches]
    terms = [_terms(out.logits[0], labels_T) for of, each in zip(outs, labels, strict=True)
             for out, labels_T in zip(of, each, strict=True)]  # fmt: skip
    loss = torch.stack(terms).sum() / sum(int((labels_T != IGNORE).sum()) for each in labels for labels_T in each)
    routers = [
        [torch.cat(each) for each in zip(*(out.router_logits for out in of), strict=True)] for of in outs if routed
    ]
    aux = _aux(model, routers) if routers else torch.zeros(())
    (loss + aux).backward()
    grads = {k: torch.zeros_like(p) if p.grad is None else p.grad for k, p in model.named_parameters()}
    probs = [torch.cat(each).detach().double().softmax(-1) for each in zip(*routers, strict=True)]
    experts = [p.topk(model.config.get_text_config().num_experts_per_tok, -1).indices for p in probs]
    scores = torch.cat([out.logits[0] for of in outs for out in of]).detach()
    return Said(scores, (loss + aux).item(), aux.item(), grads, experts, probs, _joined(prints))


def our_cost(source: Path, documents: Documents, device: str) -> Cost:
    """Return what bfloat16 costs each part of our model. The weights are those that products take."""
    narrow, wide = (
        load(source, Mesh(device=device), dtype=dtype, tower=_sees(source)) for dtype in (torch.bfloat16, torch.float64)
    )
    stored = narrow.stored()
    for name, weight in wide.stored().items():
        weight.copy_(stored[name] if narrow.table[name].float32 else stored[name].bfloat16())
    batch = _packed(narrow, documents, sum(len(d.tokens) for d in documents))

    def run(model: Model, seen: Pass) -> None:
        with _cast_weights(model), _few_tokens_at_once():
            Engine(model, lr=1e-3).backward([batch])
        seen.grads = gather(model, "grad")

    return cost_of(*_both([(model, [*parts_of(model), *_seeing_parts(model)]) for model in (narrow, wide)], run))


@contextmanager
def _cast_weights(model: Model) -> Iterator[None]:
    """Let layers read weights in the compute dtype, as FSDP hands them out. One process keeps them in float32, where an
    op that sums a gradient in the dtype of its weight would look right."""
    (part,) = model.parts
    narrow = [(module, name, parameter) for path, module in part.named_modules()
              for name, parameter in module.named_parameters(recurse=False)
              if not model.table[f"{path}.{name}"].float32]  # fmt: skip

    def cast(_module: nn.Module, _args: Any) -> None:
        for module, name, parameter in narrow:
            del module._parameters[name]
            setattr(module, name, parameter.to(model.dtype))

    def restore(_module: nn.Module, _args: Any, _out: Any) -> None:
        for module, name, parameter in narrow:
            delattr(module, name)
            module.register_parameter(name, parameter)

    hooks = [part.register_forward_pre_hook(cast), part.register_forward_hook(restore)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _few_tokens_at_once() -> Iterator[None]:
    """Let the loss take few tokens at once. A sum over many chunks shows the dtype in which it is accumulated."""
    with shrunk_part_sizes():
        kept, loss.CHUNK = loss.CHUNK, _FEW_TOKENS
        try:
            yield
        finally:
            loss.CHUNK = kept


def _seeing_parts(model: Model) -> Iterator[tuple[str, nn.Module]]:
    """The parts of a tower that get values: all but the one that makes them of pixels."""
    return ((name, part) for name, part in tower_parts_of(model) if name != PATCHES)


def their_cost(source: Path, documents: Documents) -> Cost:
    """Return what bfloat16 costs each part of transformers' model."""
    with_experts = bool(text_config(read_config(source)).get("num_experts"))
    narrow, wide = (_model(source, with_experts).to(dtype) for dtype in (torch.bfloat16, torch.float64))
    wide.load_state_dict(narrow.state_dict())

    def run(model: Any, seen: Pass) -> None:
        outs = [model(**_inputs(model, d), use_cache=False).logits[0] for d in documents]
        torch.stack([_terms(out, _labels(model, d)) for out, d in zip(outs, documents, strict=True)]).sum().backward()
        seen.grads = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}

    return cost_of(*_both([(model, [*_their_parts(model)]) for model in (narrow, wide)], run))


def _both(models: Sequence[tuple[Any, Parts]], run: Callable[[Any, Pass], None]) -> list[Pass]:
    """Run a model in bfloat16, then the wide one that follows it."""
    passes: list[Pass] = []
    for model, parts in models:
        with followed(parts, passes[0] if passes else None) as seen:
            run(model, seen)
        passes.append(seen)
    return passes


def _their_parts(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """The parts of transformers' model by our names, but for the rotations, which get positions."""
    named = ((_part_of(name), module) for name, module in model.base_model.named_modules())
    return ((part, module) for part, module in named if part and part != ROPE)


def _model(source: Path, with_experts: bool) -> Any:
    """In float32 and as plain as can be: its faster experts want widths of whole 16 bytes."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    plain = {"attn_implementation": "eager", **({"experts_implementation": "eager"} if with_experts else {})}
    kind = transformers.AutoModelForImageTextToText if _sees(source) else transformers.AutoModelForCausalLM
    return kind.from_pretrained(source, dtype=torch.float32, **plain).eval()


def _asked(model: Any, document: Document, prints: list[dict[str, Tensor]], **routed: bool) -> Any:
    """What it says of a document; `prints` gets what its parts gave out. Without a cache: there is nothing to keep, and
    with one transformers 5.23 would not see the bounds of packed documents."""
    with _watched(model) as seen:
        out = model(**_inputs(model, document), use_cache=False, **routed)
    found = {name: torch.cat(each) for name, each in seen.items()}
    found |= {name: _as_they_come(found[name], document.pictures) for name in found if name.startswith("tower.")}
    places = torch.isin(torch.tensor(document.tokens), torch.tensor(_places(model)))
    found["embed"] = found["embed"].masked_fill(places, 0.0)  # theirs looks up rows that pictures then replace
    prints.append(found)
    return out


def _places(model: Any) -> list[int]:
    """The tokens that stand for pictures and for videos."""
    config = model.config
    return [config.image_token_id, config.video_token_id] if "vision_config" in config.sub_configs else []


def _inputs(model: Any, document: Document) -> dict[str, Tensor]:
    """As transformers takes a document, with positions of its own. It finds them only where no two pictures touch."""
    inputs = {"input_ids": torch.tensor([document.tokens])}
    if not document.pictures:
        return inputs
    picture, video = _places(model)
    ids = inputs["input_ids"]
    inputs["mm_token_type_ids"] = (ids == picture).long() + 2 * (ids == video).long()
    names = {True: ("pixel_values", "image_grid_thw"), False: ("pixel_values_videos", "video_grid_thw")}
    for still, (pixels, grids) in names.items():
        if of_kind := [each for each in document.pictures if _is_still(each) == still]:
            inputs[pixels] = torch.cat([_normed(patches_PC) for patches_PC, _ in of_kind])
            inputs[grids] = torch.tensor([grid for _, grid in of_kind])
    return inputs


def _normed(patches_PC: Tensor) -> Tensor:
    """Return the values of a patch. Of bytes: rescaled to 0..1, then with mean and deviation 0.5, as processors do."""
    return (patches_PC / 255 - 0.5) / 0.5 if patches_PC.dtype == torch.uint8 else patches_PC


def _is_still(picture: Picture) -> bool:
    return picture[1][0] == 1


def _as_they_come(print_R: Tensor, pictures: Pictures) -> Tensor:
    """Rows in the order of places. The tower of transformers is given the pictures of a document, then its videos."""
    order = sorted(range(len(pictures)), key=lambda at: not _is_still(pictures[at]))
    sizes = [len(patches_PC) for patches_PC, _ in pictures]
    each = sum(sizes) // len(print_R)  # patches for a row
    rows = dict(zip(order, print_R.split([sizes[at] // each for at in order]), strict=True))
    return torch.cat([rows[at] for at in range(len(pictures))])


def _labels(model: Any, document: Document) -> Tensor:
    return labels_of([document.tokens], set(_places(model)))


def _terms(logits_TV: Tensor, labels_T: Tensor) -> Tensor:
    return F.cross_entropy(logits_TV, labels_T, reduction="sum", ignore_index=IGNORE)


def _aux(model: Any, routers: Sequence[Sequence[Tensor]]) -> Tensor:
    """The mean over micro-batches of what transformers makes of each."""
    config = model.config.get_text_config()
    if not config.output_router_logits:
        return torch.zeros(())
    of_batch = sys.modules[type(model).__module__].load_balancing_loss_func
    each = [of_batch(tuple(layers), config.num_experts, config.num_experts_per_tok) for layers in routers]
    return config.router_aux_loss_coef * torch.stack(each).mean()


@contextmanager
def _watched(model: Any) -> Iterator[dict[str, list[Tensor]]]:
    """What each part gives out, as `diagnose.forward.watched` of ours: one number a row."""
    seen: dict[str, list[Tensor]] = {}

    def note(name: str, out: Any) -> None:
        if name == ROPE:  # theirs have each cosine and sine twice
            x_TD = torch.cat([x[0, :, : x.shape[-1] // 2] for x in out], -1)
        else:
            x_TD = out[0] if isinstance(out, tuple) else out
        seen.setdefault(name, []).append(_print(x_TD.reshape(-1, x_TD.shape[-1])))

    def hook(name: str) -> Any:
        return lambda _module, _args, out: note(name, out)

    named = dict(model.base_model.named_modules())
    hooks = [module.register_forward_hook(hook(_part_of(name))) for name, module in named.items() if _part_of(name)]
    if "visual.blocks.0" in named:  # what it is given is the output of no module
        hooks.append(named["visual.blocks.0"].register_forward_pre_hook(lambda _module, args: note(PATCHES, args)))
    try:
        yield seen
    finally:
        for each in hooks:
            each.remove()


def _part_of(name: str) -> str:
    """Our name of a part of theirs; empty where it is none of ours."""
    name = name.removeprefix("language_model.")
    group, _, last = name.rpartition(".")
    kind, _, number = group.rpartition(".")
    if group in _LISTS:
        return f"{_LISTS[group]}.{last}"
    return f"layers.{number}.{_OF_LAYER[last]}" if kind == "layers" and last in _OF_LAYER else _PARTS.get(name, "")
