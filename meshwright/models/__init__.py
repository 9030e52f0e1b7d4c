"""Model families by `model_type` (Qwen2, Qwen3, Qwen3-Next, Qwen3.5, Qwen3-VL, ...): config.json -> meta-device model.

To add a family, write its file and name it in FAMILIES, or add it from outside of the package: `FAMILIES["model_type"]
= Family(build)` (docs/add-a-model.md).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container
from dataclasses import dataclass, replace

from torch import device

from ..errors import ConfigError, UnknownKey
from ..recipe import Recipe
from ..sharding import Table, collect
from . import qwen2, qwen3, qwen3_5, qwen3_5_moe, qwen3_moe, qwen3_next, qwen3_vl, qwen4_exp
from .decoder import LM_HEAD, SCORE, SCORE_BIAS, Decoder, Embedding, Layer, Want
from .hf_config import LABELS, Json, group, label_names, take, with_labels
from .linear import Quantisable
from .lora import ADAPTER
from .lora_targets import adapt, adapters_of, without_adapters
from .mtp import PREFIX, check_mtp, give_mtp, with_mtp_layers
from .rope_config import GROUPS, sections_of
from .router_balance import Balance
from .vision_tower import Tower, TowerBlock, TowerShape, VisionInput, patch_of, tower_shape_of


@dataclass(frozen=True)
class Family:
    """A model family: how it is built, and how its files are laid out."""

    build: Callable[[Json, str, str], Decoder]  # config, key prefix, head -> model (on the meta device)
    prefixes: tuple[str, ...] = ("model.", "")  # of the text model's keys; base models are saved without any
    carried: tuple[str, ...] = ()  # keys that are copied to exports but not trained (multi-token prediction, tower)
    classifier: str = ""  # transformers' sequence classifier class, if it has one
    served: str = ""  # layout in which vLLM reads adapters of its routed experts; by default that of the source
    mtp: str = ""  # the field of the config that counts the layers of its MTP head; empty if it has none


_PREFIXES, _CARRIED = ("model.", "", "model.language_model."), ("mtp.*", "model.visual.*")
_MTP = "mtp_num_hidden_layers"
_HASHES = ("*.ple_embedding.layer_multipliers", "*.ple_embedding.ngram_heads_*")  # they follow from the config
FAMILIES = {
    "qwen2": Family(qwen2.build, classifier="Qwen2ForSequenceClassification"),
    "qwen3": Family(qwen3.build, classifier="Qwen3ForSequenceClassification"),
    "qwen3_moe": Family(qwen3_moe.build, classifier="Qwen3MoeForSequenceClassification", served="per-expert"),
    "qwen3_5_text": Family(qwen3_5.build, _PREFIXES, _CARRIED, "Qwen3_5TextForSequenceClassification", mtp=_MTP),
    # transformers 5.23 has no classifier
    "qwen3_5_moe_text": Family(qwen3_5_moe.build, _PREFIXES, _CARRIED, served="fused", mtp=_MTP),
    "qwen3_next": Family(
        qwen3_next.build,
        carried=("mtp.*",),
        classifier="Qwen3NextForSequenceClassification",
        mtp="num_nextn_predict_layers",
    ),
    "qwen4_exp_text": Family(qwen4_exp.build, _PREFIXES, (*_CARRIED, *_HASHES), served="fused", mtp=_MTP),
    "qwen3_vl_text": Family(qwen3_vl.build, _PREFIXES, _CARRIED),
    "qwen3_vl_moe_text": Family(qwen3_vl.build_moe, _PREFIXES, _CARRIED),
}
_TEXT_OF = {kind: f"{kind}_text" for kind in ("qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", "qwen4_exp")}
_CLASSIFIER_OF = {  # of models with a vision tower
    "qwen3_5": "Qwen3_5ForSequenceClassification", "qwen3_5_moe": "", "qwen3_vl": "", "qwen3_vl_moe": "",
}  # fmt: skip
VISUAL = "model.visual."  # prefix of a tower's keys
# M-RoPE (arXiv 2409.12191): how many frequencies turn with time, height and width, where the config does not say so.
_SECTIONS = {
    "qwen3_5": (11, 11, 10), "qwen3_5_moe": (11, 11, 10), "qwen4_exp": (11, 11, 10),
    "qwen3_vl": (24, 20, 20), "qwen3_vl_moe": (24, 20, 20),
}  # fmt: skip
_IDS_3_5 = {"image_token_id": 248056, "video_token_id": 248057}
_IDS_VL = {"image_token_id": 151655, "video_token_id": 151656}
_PLACEHOLDERS = {
    "qwen3_5": _IDS_3_5,
    "qwen3_5_moe": _IDS_3_5,
    "qwen4_exp": _IDS_3_5,
    "qwen3_vl": _IDS_VL,
    "qwen3_vl_moe": _IDS_VL,
}
# For these, transformers reads tie_word_embeddings at the top level only, and writes true into text_config regardless.
_TIED_AT_TOP = ("qwen3_vl", "qwen3_vl_moe")


def text_config(config: Json) -> Json:
    """Return the text part of a config, with the fields that files state at the top level: tied embeddings, labels."""
    if _kind(config) not in _TEXT_OF:
        return config
    text, tied = dict(group(config, "text_config")), config.get("tie_word_embeddings")
    if _kind(config) in _TIED_AT_TOP:
        text["tie_word_embeddings"] = tied = bool(tied)
    if tied is False and text.get("tie_word_embeddings"):
        raise ConfigError(
            "config.json: tie_word_embeddings is false at the top, which transformers reads, and true in text_config; "
            "correct either"
        )
    for name in GROUPS:
        if group(config, name):
            raise ConfigError(f"config.json: {name} at the top is never read; move it into text_config")
    if tied is not None:  # next to it, transformers writes text_config's default, false
        text["tie_word_embeddings"] = tied
    labels = {name: config[name] for name in LABELS if config.get(name) is not None}
    return {**text, **labels, "model_type": _TEXT_OF[_kind(config)]}


def _kind(config: Json) -> str:
    """Return the model_type, or what stands in its place."""
    kind = config.get("model_type")
    return kind if isinstance(kind, str) else repr(kind)


def family_of(config: Json) -> Family:
    """Return the family of a config."""
    kind = _kind(text_config(config))
    if kind not in FAMILIES:
        known = ", ".join([*FAMILIES, *_TEXT_OF])
        model_type = text_config(config).get("model_type")
        raise ConfigError(
            f"config.json: model_type={model_type!r:.200} is not a known family; known are {known}; "
            "to add one, see docs/add-a-model.md"
        )
    return FAMILIES[kind]


def classifier_of(config: Json) -> str:
    """Return what `architectures` calls a sequence classifier of this config; empty where transformers has none."""
    kind = _kind(config)
    return _CLASSIFIER_OF[kind] if kind in _CLASSIFIER_OF else family_of(config).classifier


def prefix_of(config: Json, keys: Container[str] | None) -> str:
    """Return the prefix of the text model's keys: the first that the source uses; with no source, the usual one.

    Models with a tower have `model.language_model.`, and text-only exports of the same model `model.`.
    """
    prefixes = family_of(config).prefixes
    if keys is None:
        return prefixes[-1] if _kind(config) in _TEXT_OF else prefixes[0]
    return next((p for p in prefixes if p + "embed_tokens.weight" in keys), prefixes[0])


def describe(config: Json, prefix: str, recipe: Recipe = Recipe(), keys: Collection[str] = ()) -> tuple[Decoder, Table]:
    """Build the model on the meta device and its table; check that declarations cover everything exactly once.

    `keys`: the keys of the source. Keys of a vision tower or an MTP head that is not trained are carried along
    unchanged.
    """
    family, text, head = family_of(config), text_config(config), recipe.head
    has_mtp = recipe.mtp != "carried"
    if has_mtp:
        check_mtp(text, family.mtp, head=head, tower=recipe.tower, mode=recipe.mtp)
    if SCORE_BIAS in keys:  # a critic is often saved with the unchanged config of the language model it started from
        text = {**text, "token_classification_bias": True}
    with device("meta"):
        model = family.build(text, prefix, head)
        if recipe.tower:
            _give_tower(model, config)
        if recipe.lora is not None:
            adapt(model, recipe.lora)  # before the MTP head, which is trained whole
        if has_mtp:
            new = not any(key.startswith(PREFIX) for key in keys)
            give_mtp(model, family.build, text, mode=recipe.mtp, weight=recipe.mtp_weight, new=new)
    if head == "lm" and SCORE in keys:
        raise UnknownKey(
            f"the source holds {SCORE}, the head of a classifier or a critic, not of a language model; "
            'give head="value" to train it, or head="none" to keep it as it is'
        )
    drops_head = head != "lm" and not model.shape.tied
    dropped = (*((LM_HEAD,) if drops_head else ()), *((SCORE, SCORE_BIAS) if head == "none" else ()))
    declared = (*((VISUAL,) if recipe.tower else ()), *((PREFIX,) if has_mtp else ()))
    carried = [pattern for pattern in family.carried if not pattern.startswith(declared)]
    num_first = 1 if model.tower is None else max(1, len(model.tower.shape.taps))
    both_ends = "embed.weight" if model.tied or has_mtp else None
    return model, collect(model, (*carried, *dropped), both_ends, num_first)


def placeholders_of(config: Json) -> tuple[int, int]:
    """Return the ids of the placeholder tokens for an image and for a video."""
    if _kind(config) not in _SECTIONS:
        raise ConfigError(
            f"tower=True, but model_type={_kind(config)} has no vision tower; leave it out. These have one: "
            f"{', '.join(_SECTIONS)}"
        )
    image, video = (take(config, name, int, default) for name, default in _PLACEHOLDERS[_kind(config)].items())
    return image, video


def placeholders_in(config: Json) -> tuple[int, ...]:
    """Return the placeholder ids of any model: none where it has no tower."""
    return placeholders_of(config) if _kind(config) in _SECTIONS else ()


def _give_tower(model: Decoder, config: Json) -> None:
    """Attach the vision tower that a config describes, and let RoPE see height and width."""
    ids = placeholders_of(config)
    model.tower = Tower(tower_shape_of(config, model.shape.width, len(model.layers)), model.shape.width, ids, VISUAL)
    sections = sections_of(text_config(config), model.shape.rotary.dim // 2, _SECTIONS[_kind(config)])
    model.shape = replace(model.shape, sections=sections)
