"""Shrink a model: the same kinds of layers, heads, experts and files, but narrow, shallow and of odd sizes.

A mesh cuts a model by counts and kinds, which stay the same. Sizes only have to be divided; odd sizes leave a remainder
in every cut, where mistakes happen.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import lcm
from typing import Any

Json = Mapping[str, Any]

_WIDTH, ODD = 36, 37  # of hidden states: rounded up to a multiple of the heads, or odd where the family allows it
_WIDTHS = {
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
}
# Sizes that no axis cuts evenly and that need not be whole blocks. Mixers of residual streams. Indexers, with more dims
# than a head can rotate, and so few heads that often all scores are 0 and blocks tie. N-gram tables, with an odd number
# of rows in more than 10 parts.
_OTHERS = {
    "hc_lowrank": 12, "indexer_n_heads": 2, "indexer_head_dim": 18, "ngram_vocab_size_base": 40,
    "make_ngram_vocab_size_divisible_by": 39, "split_ngram_parts": 13,
}  # fmt: skip
_END = 7  # the end-of-text token in the small vocabulary; a list of them starts here and goes up by two


def shrink(config: Json, tp: int, width: int = 0, num_stages: int = 1, block: int = 0) -> dict[str, Any]:
    """Return a config with small widths and depth. Head counts, experts and everything else stay.

    `width`: width of the hidden states; 0: a width that every family can have. `num_stages`: stages of the pipeline.
    `block`: make the sides of matrices multiples of it, enough for each tp rank.
    """
    if "text_config" not in config:
        return _in_blocks(_shrink(config, tp, width, num_stages), tp, block)
    # The first num_taps layers of the text take features of the vision tower, all in the first stage.
    num_taps = _num_taps(config)
    text = _in_blocks(_shrink(config["text_config"], tp, width, num_stages, num_taps + 1), tp, block)
    text = _with_sections(text)
    small = {**config, "text_config": text}
    if config.get("vision_config"):
        small |= {"vision_config": _shrink_tower(config["vision_config"], text["hidden_size"], num_taps)}
        # placeholders must be token ids of the small vocabulary
        small |= {f"{name}_token_id": text["vocab_size"] - 5 - at for at, name in enumerate(("image", "video"))}
    return small


def _in_blocks(text: dict[str, Any], tp: int, block: int) -> dict[str, Any]:
    """Make heads, also of an indexer, and experts one block wide, MLPs one per tp rank, and hidden states two or more.

    FP8 and 8-bit optimizer state work on whole blocks, which a mesh must not cut. It takes two blocks in a row to show
    a scale of the wrong block.
    """
    if not block:
        return text
    step = lcm(text["num_attention_heads"], block)
    wide = {"hidden_size": -(-2 * block // step) * step, "head_dim": block}
    wide |= {"intermediate_size": block * tp} if "intermediate_size" in text else {}
    return {**text, **wide, **{name: block for name in (*_WIDTHS, "indexer_head_dim") if name in text}}


def _num_taps(config: Json) -> int:
    """Count the layers of the text that take features from inside the vision tower (DeepStack in Qwen3-VL)."""
    taps = (config.get("vision_config") or {}).get("deepstack_visual_indexes")
    return 3 if taps is None and str(config.get("model_type")).startswith("qwen3_vl") else len(taps or ())


def _shrink_tower(vision: Json, width: int, num_taps: int) -> dict[str, Any]:
    """Return a vision config with heads of 8 dims, two more blocks than are tapped, and a 3 x 3 position table, so that
    some images are larger than the table and need interpolation."""
    heads = vision.get("num_heads") or vision.get("num_attention_heads") or 16
    return {
        **vision, "num_heads": heads, "hidden_size": 8 * heads, "intermediate_size": 21, "depth": num_taps + 2,
        "patch_size": 4, "num_position_embeddings": 9, "out_hidden_size": width,
        "deepstack_visual_indexes": list(range(num_taps)),
    }  # fmt: skip


def _with_sections(text: dict[str, Any]) -> dict[str, Any]:
    """Divide the rotated frequencies of a head among time, height and width (M-RoPE), each at least one.

    A head that rotates only a quarter of its dims is widened to 24, which has three rotated frequencies.
    """
    group = next((name for name in ("rope_scaling", "rope_parameters") if text.get(name)), None)
    rope = text.get(group or "") or {}
    if "mrope_section" not in rope and "linear_key_head_dim" not in text:
        return text
    partial = rope.get("partial_rotary_factor") or text.get("partial_rotary_factor")
    share = partial or (0.25 if "linear_key_head_dim" in text and "hc_count" not in text else 1.0)
    text["head_dim"] = max(24, text["head_dim"]) if share == 0.25 else text["head_dim"]
    num = int(text["head_dim"] * share) // 2
    sections = [num - 2 * (num // 3), num // 3, num // 3]
    if group:
        return {**text, group: {**rope, "mrope_section": sections}}
    return {**text, "rope_parameters": {"rope_type": "default", "mrope_section": sections}}


def _shrink(text: Json, tp: int, width: int, num_stages: int, extra: int = 1) -> dict[str, Any]:
    """Return a small config of a text model. `extra`: the least number of layers beyond one per stage."""
    out = dict(text)
    out.update({name: size for name, size in {**_WIDTHS, **_OTHERS}.items() if name in out})
    out["vocab_size"] = _uneven(131, tp)
    if "intermediate_size" in out:
        out["intermediate_size"] = (43 // tp | 1) * tp  # odd on each rank
    rope = text.get("rope_scaling") or text.get("rope_parameters") or {}  # as in models/rope_config.py
    whole = (rope.get("partial_rotary_factor") or text.get("partial_rotary_factor") or 1.0) == 1.0
    out["head_dim"] = 10 if whole and "linear_key_head_dim" not in text else 16
    heads = out["num_attention_heads"]
    out["hidden_size"] = width or -(-_WIDTH // heads) * heads  # some families need the heads to divide it
    depth = _depth(text, num_stages + extra)
    out["num_hidden_layers"] = depth
    if text.get("layer_types"):
        out["layer_types"] = list(text["layer_types"])[:depth]
    if text.get("mlp_only_layers"):
        out["mlp_only_layers"] = [i for i in text["mlp_only_layers"] if i < depth]
    return {**out, **_index_and_grams(text, depth)}


def _index_and_grams(text: Json, depth: int) -> dict[str, Any]:
    """Return an indexer budget of three blocks, fewer than documents have, and narrow n-gram tables whose end-of-text
    token occurs in the data."""
    out: dict[str, Any] = {}
    if "indexer_budget" in text:
        out["indexer_budget"] = 3 * text["indexer_compress_ratio"]
    if text.get("ple_layer_ids"):
        out["ple_layer_ids"] = [number for number in text["ple_layer_ids"] if number <= depth]
        out["ple_embed_dim"] = 3 * (text.get("ngram_size", 3) - 1) * text.get("heads_per_ngram", 8)
        end = text["eos_token_id"]
        out["eos_token_id"] = [_END + 2 * i for i in range(len(end))] if isinstance(end, list) else _END
    return out


def _uneven(width: int, tp: int) -> int:
    """Return about `width`, such that the slice of the last rank is not empty but shorter than the others.

    The vocabulary is the only dim that tp may cut unevenly.
    """
    return -(-width // tp) * tp - 1 if tp > 1 else width


def _depth(text: Json, least: int) -> int:
    """Return a depth that holds every kind of layer of the model, and at least `least`, so that a pipeline has a stage
    of more than one layer."""
    kinds = [_kind(text, i) for i in range(text["num_hidden_layers"])]
    first_table = min(text.get("ple_layer_ids") or [0])  # counted from 1
    return min(len(kinds), max(least, first_table, *(kinds.index(kind) + 1 for kind in set(kinds))))


def _kind(text: Json, layer: int) -> tuple[object, bool]:
    """Return the kind of a layer: its mixer, and whether its MLP is dense."""
    every = text.get("full_attention_interval") or (4 if "linear_key_head_dim" in text else 1)
    kinds = text.get("layer_types")
    mixer = kinds[layer] if kinds else (layer + 1) % every == 0
    dense = layer in (text.get("mlp_only_layers") or ()) or (layer + 1) % (text.get("decoder_sparse_step") or 1) != 0
    return mixer, dense
