"""Run a step on one process, with our model and with that of transformers if transformers has the family.

All other comparisons of `verify` are of our code with our code. They missed nine of 26 one-line bugs that were planted
in the engine, most of them because both sides shared the bug (docs/decisions/0005-verify-asks-transformers.md). This is
the only module of the package that imports the models of transformers.

Our model takes packed documents, transformers one document after the other, so packing is compared as well. If
documents have images, so is the vision tower.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops
from ..data import IGNORE, Batch, pack
from ..engine import Engine, Model, export_adapter, gather, load, logits
from ..engine.adapters import as_in_peft
from ..mesh import Mesh
from ..models import text_config
from ..ops import loss
from ..ops.part_sizes import shrunk_part_sizes
from ..recipe import Lora
from ..weights import blocks_by_key, open_source, read_config
from .adapters import PREFIX, with_rslora
from .diagnose.forward import parts_of, recorded_forward, tower_parts_of, watched_routers
from .peer_choices import first_of_equals, recorded, taken
from .rounding import Cost, Parts, Pass, cost_of, followed
from .small_data import DocumentImages, ImagePatches, labels_of

# Our names of transformers' parts, of its lists of parts, and of the parts of a layer.
ROPE, PATCHES = "RoPE", "tower.patches"
_FEW_TOKENS = 1  # with about 130 tokens, the head's gradient is then a sum over as many chunks
_PARTS = {"rotary_emb": ROPE, "embed_tokens": "embed", "norm": "head.norm", "visual.merger": "tower.merger",
          "hyper_connection_mixer": "head.norm"}  # fmt: skip
_LISTS = {"visual.blocks": "tower.blocks", "visual.deepstack_merger_list": "tower.deep"}
_OF_LAYER = {
    "input_layernorm": "norm", "self_attn": "mixer", "linear_attn": "mixer", "post_attention_layernorm": "mlp_norm",
    "mlp": "mlp", "attn_hyper_connection": "read", "mlp_hyper_connection": "mlp_read", "ple": "grams",
}  # fmt: skip


@dataclass(frozen=True)
class Document:
    """The tokens of a document, and its images in the order of their placeholders."""

    tokens: list[int]
    images: DocumentImages = field(default_factory=list)


Documents = list[Document]


@dataclass(frozen=True)
class StepOutputs:
    """The results of one step. Tokens are those of all documents, one document after the other.

    `aux`: the router's part of the loss. `grads`: by file key. `parts`: a fingerprint of each row of a part's output.
    `experts`, `probs`: the choices of each layer of experts, and the probabilities of all its experts. `odd_shapes`:
    both shapes of the parameters whose shape differs from that in the files.

    Shapes, for T tokens, vocabulary V, E experts, k for each token: logits [T, V], experts [T, k], probs [T, E].
    """

    logits: Tensor
    loss: float
    aux: float
    grads: dict[str, Tensor]
    experts: Sequence[Tensor] = ()
    probs: Sequence[Tensor] = ()
    parts: dict[str, Tensor] = field(default_factory=dict)
    num_batches: int = 1
    odd_shapes: Mapping[str, str] = field(default_factory=dict)


def run_meshwright(
    source: Path, batches: Sequence[Documents], dtype: torch.dtype, adapter: Path | None = None
) -> StepOutputs:
    """Run a forward that records every part, then a step, with our model. `adapter`: a PEFT directory to load too."""
    lora, train = (None, "*") if adapter is None else (Lora(path=str(adapter)), "**")  # "*": tables of n-grams too
    model = load(source, Mesh(device="cpu"), dtype=dtype, tower=_has_tower(source), lora=lora, train=train)
    length = max(sum(len(d.tokens) for d in documents) for documents in batches)
    packed, scores, parts, routed = [_packed(model, documents, length) for documents in batches], [], [], []
    for batch in packed:
        num = len(batch) - batch.num_filler
        with (
            watched_routers(model) as routers,
            recorded_forward(model) as record,
            recorded_forward(model, tower_parts_of) as tower_record,
            _rotations(model) as rope,
        ):
            scores.append(logits(model, batch)[:num])
        of_tokens = {name: print_T[:num] for name, print_T in (rope | record.fingerprints).items()}
        # in the order of the computation, since M1 names the first that differs
        parts.append({ROPE: of_tokens[ROPE], **tower_record.fingerprints, **of_tokens})
        routed.append([(logits_TE[:num], expert_Tk[:num]) for _, logits_TE, expert_Tk in routers.values()])
    # Gradients need another forward: the one above has no graph, as in inference.
    engine = Engine(model, lr=1e-3)
    loss = engine.backward(packed)
    aux = engine._pending().results.router_loss
    by_layer = [[torch.cat(each) for each in zip(*of_layer, strict=True)] for of_layer in zip(*routed, strict=True)]
    probs = [logits_TE.double().softmax(-1) for logits_TE, _ in by_layer]
    experts, grads = [expert_Tk for _, expert_Tk in by_layer], gather(model, "grad")
    grads = grads if adapter is None else as_in_peft(model.table, grads, "fused")
    return StepOutputs(torch.cat(scores), loss, aux, grads, experts, probs, _joined(parts), len(batches))


def write_adapter(source: Path, lora: Lora, at: Path) -> None:
    """Write new adapters of a source as PEFT's files."""
    export_adapter(load(source, Mesh(device="cpu"), dtype=torch.float32, lora=lora, tower=_has_tower(source)), at,
                   layout="fused")  # fmt: skip


def merged_by_both(source: Path, adapter: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the weights of a source with an adapter merged by us, and merged by peft. Both read a config with
    `use_rslora`, which our own exports never write."""
    adapter = with_rslora(adapter)
    model = load(
        source, Mesh(device="cpu"), dtype=torch.float32, lora=Lora(path=str(adapter)), tower=_has_tower(source)
    )
    peer = _with_adapter(_model(source, with_experts=_has_experts(source)), adapter).merge_and_unload()
    return gather(model, "merged"), dict(peer.state_dict())


def _has_tower(source: Path) -> bool:
    """Return whether a source has a vision tower. Sources with only the text model have a language model's config."""
    return "vision_config" in read_config(source)


def _packed(model: Model, documents: Documents, length: int) -> Batch:
    """Pack documents into a batch, with their images if the model has a tower."""
    tokens, tower = [d.tokens for d in documents], model.parts[0].tower
    if tower is None:
        return pack(tokens, length=length)
    return pack(tokens, length=length, images=[d.images for d in documents], placeholders=tower.ids)


def _joined(prints: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Concatenate the fingerprints of batches or documents. Without images they have none of the tower."""
    names = dict.fromkeys(name for each in prints for name in each)
    return {name: torch.cat([each[name] for each in prints if name in each]) for name in names}


@contextmanager
def _rotations(model: Model) -> Iterator[dict[str, Tensor]]:
    """Record a fingerprint of the RoPE tables. They are an argument of layers, not the output of a module."""
    prints: dict[str, Tensor] = {}

    def note(_module: nn.Module, args: Any) -> None:
        prints[ROPE] = _print(torch.cat(args[1], -1))

    hook = model.parts[0].layers["0"].register_forward_pre_hook(note)
    try:
        yield prints
    finally:
        hook.remove()


def _print(x_TD: Tensor) -> Tensor:
    """Return the fingerprint of each row, as `recorded_forward` computes it."""
    return x_TD.detach().double() @ torch.arange(x_TD.shape[-1], dtype=torch.float64).cos()


def without_peft() -> str:
    """Return why peft cannot be imported; "" if it can."""
    try:
        import peft  # noqa: F401 - only whether it is there
    except ImportError as error:
        return "peft is not installed" if error.name == "peft" else f"peft cannot be imported: {error}"
    return ""


def unsupported(source: Path) -> str:
    """Return why transformers cannot run a model; "" if it can."""
    try:
        from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    except ImportError as error:
        return f"transformers cannot be imported: {error}"
    kind = str(read_config(source).get("model_type"))
    what, models = "language model", MODEL_FOR_CAUSAL_LM_MAPPING
    if _has_tower(source):
        what, models = "vision-language model", MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    known = kind in CONFIG_MAPPING and CONFIG_MAPPING[kind] in models
    return "" if known else f"this version of transformers has no {what} of {kind!r}"


def run_transformers(source: Path, batches: Sequence[Documents], adapter: Path | None = None) -> StepOutputs:
    """Run the same step with the model of transformers, in float32; with the layers of peft if there is an adapter."""
    with_experts = _has_experts(source)
    (model, odd), prints = _loaded(source, with_experts), list[dict[str, Tensor]]()
    if adapter is not None:
        _with_adapter(model, adapter)  # in place: the model itself then has peft's layers
    routed = {"output_router_logits": True} if with_experts else {}
    with first_of_equals():
        outs = [[_forward(model, d, prints, **routed) for d in documents] for documents in batches]
    labels = [[_labels(model, d) for d in documents] for documents in batches]
    terms = [_terms(out.logits[0], labels_T) for of, each in zip(outs, labels, strict=True)
             for out, labels_T in zip(of, each, strict=True)]  # fmt: skip
    # One divisor for the step, as in our engine. The loss that transformers returns is a mean over one call.
    loss = torch.stack(terms).sum() / sum(int((labels_T != IGNORE).sum()) for each in labels for labels_T in each)
    routers = [
        [torch.cat(each) for each in zip(*(out.router_logits for out in of), strict=True)] for of in outs if routed
    ]
    aux = _aux(model, routers) if routers else torch.zeros(())
    (loss + aux).backward()
    # A parameter that no token reaches has no gradient in torch, and zeros in ours.
    trained = ((k, p) for k, p in model.named_parameters() if p.requires_grad)
    grads = {_key_of(k): torch.zeros_like(p) if p.grad is None else p.grad for k, p in trained}
    grads = dict(_in_parts(grads, open_source(source).entries))
    probs = [torch.cat(each).detach().double().softmax(-1) for each in zip(*routers, strict=True)]
    experts = [p.topk(model.config.get_text_config().num_experts_per_tok, -1).indices for p in probs]
    scores = torch.cat([out.logits[0] for of in outs for out in of]).detach()
    return StepOutputs(scores, (loss + aux).item(), aux.item(), grads, experts, probs, _joined(prints), odd_shapes=odd)


def meshwright_cost(source: Path, documents: Documents, device: str) -> Cost:
    """Return the rounding error of bfloat16 in each part of our model. Both runs have weights rounded to bfloat16, as
    matmuls take them, so that only the arithmetic differs.

    Gradients of steep parameters are left out: rounding changes a whole slope, and one token can dominate.
    """
    narrow, wide = (
        load(source, Mesh(device=device), dtype=dtype, tower=_has_tower(source), train="*")
        for dtype in (torch.bfloat16, torch.float64)
    )
    stored = narrow.stored()
    for name, weight in wide.stored().items():
        weight.copy_(stored[name] if narrow.table[name].float32 else stored[name].bfloat16())
    batch = _packed(narrow, documents, sum(len(d.tokens) for d in documents))

    def run(model: Model, record: Pass) -> None:
        with _cast_weights(model), _few_tokens_at_once():
            Engine(model, lr=1e-3).backward([batch])
        made_of = blocks_by_key(model.table, model.keymap.choice)
        steep = {key for key, blocks in made_of.items() if any(param.steep for param, _ in blocks)}
        record.grads = {key: grad for key, grad in gather(model, "grad").items() if key not in steep}

    choices = ops.Choices()
    both = [(model, [*parts_of(model), *_tower_parts(model)]) for model in (narrow, wide)]
    return cost_of(*_both(both, run, [choices.made(), choices.taken()]))


@contextmanager
def _cast_weights(model: Model) -> Iterator[None]:
    """Let layers read weights in the compute dtype, as FSDP hands them out.

    One process keeps them in float32, which would hide an op that sums a gradient in the dtype of its weight. The cast
    is part of the graph, so gradients still reach the parameters.
    """
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
        original, loss.CHUNK = loss.CHUNK, _FEW_TOKENS
        try:
            yield
        finally:
            loss.CHUNK = original


def _tower_parts(model: Model) -> Iterator[tuple[str, nn.Module]]:
    """Yield the parts of a tower whose input is the output of another part: all but the one that reads pixels."""
    return ((name, part) for name, part in tower_parts_of(model) if name != PATCHES)


def transformers_cost(source: Path, documents: Documents) -> Cost:
    """Return the rounding error of bfloat16 in each part of transformers' model."""
    with_experts = _has_experts(source)
    narrow, wide = (_model(source, with_experts).to(dtype) for dtype in (torch.bfloat16, torch.float64))
    wide.load_state_dict(narrow.state_dict())

    def run(model: Any, record: Pass) -> None:
        outs = [model(**_inputs(model, d), use_cache=False).logits[0] for d in documents]
        torch.stack([_terms(out, _labels(model, d)) for out, d in zip(outs, documents, strict=True)]).sum().backward()
        record.grads = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}

    made: list[Tensor] = []
    both = [(model, [*_peer_parts(model)]) for model in (narrow, wide)]
    return cost_of(*_both(both, run, [recorded(made), taken(made)]))


def _both(
    models: Sequence[tuple[Any, Parts]], run: Callable[[Any, Pass], None],
    choices: Sequence[AbstractContextManager[None]],
) -> list[Pass]:  # fmt: skip
    """Run a model in bfloat16, then the wide one with the same inputs of parts, and the same choices of experts and key
    blocks: a choice that rounding flips is no error of the part, but changes whole gradients."""
    passes: list[Pass] = []
    for (model, parts), choice in zip(models, choices, strict=True):
        with choice, followed(parts, passes[0] if passes else None) as record:
            run(model, record)
        passes.append(record)
    return passes


def _peer_parts(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield the parts of transformers' model by our names, except the rotary embedding, whose input is positions."""
    named = ((_part_of(name), module) for name, module in model.base_model.named_modules())
    return ((part, module) for part, module in named if part and part != ROPE)


def _has_experts(source: Path) -> bool:
    return bool(text_config(read_config(source)).get("num_experts"))


def _with_adapter(model: Any, adapter: Path) -> Any:
    """Put the layers of peft into a model of transformers, with the factors of a directory."""
    import peft

    return peft.PeftModel.from_pretrained(model, adapter, is_trainable=True)


def _key_of(name: str) -> str:
    """Return the key in files of a parameter of transformers' model, or of peft's layers in it."""
    return PREFIX + name.replace(".default.", ".") if ".lora_" in name else name


def _in_parts(grads: Mapping[str, Tensor], keys: Container[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield gradients by file key: transformers joins a table that the files hold in parts."""
    for key, grad in grads.items():
        stem = key.removesuffix("weight")
        parts = list(takewhile(keys.__contains__, (f"{stem}shard_{i}.weight" for i in count())))
        yield from zip(parts, grad.chunk(len(parts)), strict=True) if parts else [(key, grad)]


def _model(source: Path, with_experts: bool) -> Any:
    """Load transformers' model in float32 with its plainest kernels: faster expert kernels need rows of 16 bytes."""
    return _loaded(source, with_experts)[0]


def _loaded(source: Path, with_experts: bool) -> tuple[Any, dict[str, str]]:
    """Load transformers' model. -> the model; its parameters of another shape than in files, which are not loaded"""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    plain: Any = {"attn_implementation": "eager", **({"experts_implementation": "eager"} if with_experts else {})}
    kind: Any = transformers.AutoModelForImageTextToText if _has_tower(source) else transformers.AutoModelForCausalLM
    plain |= {"ignore_mismatched_sizes": True, "output_loading_info": True}
    model, info = kind.from_pretrained(source, dtype=torch.float32, **plain)
    odd = info["mismatched_keys"]
    return model.eval(), {key: f"{[*files]} in our files, {[*own]} there" for key, files, own in odd}


def _forward(model: Any, document: Document, prints: list[dict[str, Tensor]], **routed: bool) -> Any:
    """Run transformers' model on a document, and append the fingerprints of its parts to `prints`.

    Without a KV cache: training has no use for one, and with one transformers 5.23 ignores the bounds of packed
    documents.
    """
    with _watched(model) as record:
        out = model(**_inputs(model, document), use_cache=False, **routed)
    of_parts = {name: torch.cat(each) for name, each in record.items()}
    of_parts |= {name: _in_order(of_parts[name], document.images) for name in of_parts if name.startswith("tower.")}
    # transformers embeds placeholders too, and overwrites these rows with images; ours leaves them 0.
    places = torch.isin(torch.tensor(document.tokens), torch.tensor(_places(model)))
    of_parts["embed"] = of_parts["embed"].masked_fill(places, 0.0)
    prints.append(of_parts)
    return out


def _places(model: Any) -> list[int]:
    """Return the placeholder tokens of images and of videos."""
    config = model.config
    return [config.image_token_id, config.video_token_id] if "vision_config" in config.sub_configs else []


def _inputs(model: Any, document: Document) -> dict[str, Tensor]:
    """Return a document as the arguments of transformers' model.

    The model computes positions itself, and tells images apart only if no two of them touch.
    """
    inputs = {"input_ids": torch.tensor([document.tokens])}
    if not document.images:
        return inputs
    image, video = _places(model)
    ids = inputs["input_ids"]
    inputs["mm_token_type_ids"] = (ids == image).long() + 2 * (ids == video).long()
    names = {True: ("pixel_values", "image_grid_thw"), False: ("pixel_values_videos", "video_grid_thw")}
    for still, (pixels, grids) in names.items():
        if of_kind := [each for each in document.images if _is_still(each) == still]:
            inputs[pixels] = torch.cat([_normed(patches_PC) for patches_PC, _ in of_kind])
            inputs[grids] = torch.tensor([grid for _, grid in of_kind])
    return inputs


def _normed(patches_PC: Tensor) -> Tensor:
    """Normalise patches like the processors of transformers: rescale bytes to 0..1, then use mean and deviation 0.5."""
    return (patches_PC / 255 - 0.5) / 0.5 if patches_PC.dtype == torch.uint8 else patches_PC


def _is_still(image: ImagePatches) -> bool:
    """Return whether it is an image, not a video: one frame in time."""
    return image[1][0] == 1


def _in_order(print_R: Tensor, images: DocumentImages) -> Tensor:
    """Return rows in the order of placeholders: the tower of transformers takes all images of a document, then its
    videos.

    `print_R`: fingerprints of R rows, each of one patch or, behind the merger, of several.
    """
    order = sorted(range(len(images)), key=lambda at: not _is_still(images[at]))
    sizes = [len(patches_PC) for patches_PC, _ in images]
    each = sum(sizes) // len(print_R)  # patches per row
    rows = dict(zip(order, print_R.split([sizes[at] // each for at in order]), strict=True))
    return torch.cat([rows[at] for at in range(len(images))])


def _labels(model: Any, document: Document) -> Tensor:
    """Return the label of each token, computed without `pack`."""
    return labels_of([document.tokens], set(_places(model)))


def _terms(logits_TV: Tensor, labels_T: Tensor) -> Tensor:
    """Return the sum of the cross-entropies of a document, with torch's own function."""
    return F.cross_entropy(logits_TV, labels_T, reduction="sum", ignore_index=IGNORE)


def _aux(model: Any, routers: Sequence[Sequence[Tensor]]) -> Tensor:
    """Return the mean over micro-batches of the aux loss that transformers computes.

    Each family of transformers has a copy of the function, so it is looked up in the module of the model's class.
    """
    config = model.config.get_text_config()
    if not config.output_router_logits:
        return torch.zeros(())
    of_batch = sys.modules[type(model).__module__].load_balancing_loss_func
    each = [of_batch(tuple(layers), config.num_experts, config.num_experts_per_tok) for layers in routers]
    return config.router_aux_loss_coef * torch.stack(each).mean()


@contextmanager
def _watched(model: Any) -> Iterator[dict[str, list[Tensor]]]:
    """Record fingerprints of the parts of transformers' model, as `recorded_forward` does for our model."""
    record: dict[str, list[Tensor]] = {}

    def note(name: str, out: Any) -> None:
        if name == ROPE:  # its tables hold each cosine and sine twice
            x_TD = torch.cat([x[0, :, : x.shape[-1] // 2] for x in out], -1)
        else:
            x_TD = out[0] if isinstance(out, tuple) else out
        record.setdefault(name, []).append(_print(x_TD.reshape(-1, x_TD.shape[-1])))

    def hook(name: str) -> Any:
        return lambda _module, _args, out: note(name, out)

    named = dict(model.base_model.named_modules())
    hooks = [module.register_forward_hook(hook(_part_of(name))) for name, module in named.items() if _part_of(name)]
    if "visual.blocks.0" in named:  # patches with positions are the output of no module
        hooks.append(named["visual.blocks.0"].register_forward_pre_hook(lambda _module, args: note(PATCHES, args)))
    try:
        yield record
    finally:
        for each in hooks:
            each.remove()


def _part_of(name: str) -> str:
    """Return our name of a module of transformers; "" if we have no such part."""
    name = name.removeprefix("language_model.")
    group, _, last = name.rpartition(".")
    kind, _, number = group.rpartition(".")
    if group in _LISTS:
        return f"{_LISTS[group]}.{last}"
    return f"layers.{number}.{_OF_LAYER[last]}" if kind == "layers" and last in _OF_LAYER else _PARTS.get(name, "")
