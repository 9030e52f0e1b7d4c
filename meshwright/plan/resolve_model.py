"""Resolve the model that a user names: a directory, a config, a hub id, or one of the built-in tiny models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..blueprint import Blueprint
from ..errors import ConfigError
from ..recipe import Recipe
from ..weights import (
    CONFIG,
    download,
    exists,
    is_hub_id,
    open_index,
    open_source,
    path_of,
    peft_files,
    read_config,
    read_stamped_json,
)

Say = Callable[[str], None]  # prints a line of progress

# Sizes are odd on purpose: uneven cuts and empty shards show bugs that powers of two hide.

_COMMON = {
    "vocab_size": 131, "hidden_size": 37, "intermediate_size": 44, "num_hidden_layers": 2, "num_attention_heads": 12,
    "num_key_value_heads": 3, "head_dim": 10, "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip
_EXPERTS = {
    "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20,
    "output_router_logits": True,  # the router's aux loss is trained too
}  # fmt: skip
_HYBRID = {
    "num_hidden_layers": 3, "head_dim": 16, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
    "linear_key_head_dim": 6, "linear_value_head_dim": 10,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}  # fmt: skip

# Built-in models, for a user without a model at hand.
TINY: dict[str, dict[str, Any]] = {
    "tiny-qwen2": {**_COMMON, "model_type": "qwen2", "tie_word_embeddings": True, "hidden_size": 72},  # heads divide it
    "tiny-qwen3": {**_COMMON, "model_type": "qwen3"},
    "tiny-qwen3-moe": {
        **_COMMON, **_EXPERTS, "model_type": "qwen3_moe", "num_hidden_layers": 3, "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "tiny-qwen3.5": {**_COMMON, **_HYBRID, "model_type": "qwen3_5_text", "linear_num_value_heads": 4},
    "tiny-qwen3.5-moe": {
        **_COMMON, **_HYBRID, **_EXPERTS, "model_type": "qwen3_5_moe_text", "shared_expert_intermediate_size": 28,
    },
    "tiny-qwen3-moe-fp8": {  # whole blocks of 128 x 128 for --fp8; one dense layer, one with experts
        **_COMMON, **_EXPERTS, "model_type": "qwen3_moe", "norm_topk_prob": True, "mlp_only_layers": [0],
        "hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 2,
        "head_dim": 128, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
    },
}  # fmt: skip


def find(model: str, recipe: Recipe, weights: bool, say: Say) -> Blueprint:
    """Return the blueprint of a model in its real sizes. `weights`: all files of its weights must exist.

    Without `weights`, only the small files of a hub model are downloaded: its config and its index.
    """
    if recipe.lora is not None:
        recipe = replace(recipe, lora=peft_files.recipe_of(recipe.lora))  # those of its adapter files, if any
    if model in TINY:
        if weights:
            raise ConfigError(f"{model} has no trained weights; name a directory or a hub id")
        return Blueprint.of(TINY[model], None, recipe)
    at = path_of(model)
    if at.suffix == ".json" and at.name != CONFIG and not exists(at, Path.is_dir):
        return _of_config_alone(at, recipe, weights)
    directory, from_hub = _located(model, weights, say)
    peft_files.check_has_base(directory)
    has_weights = any(directory.glob("*.safetensors"))
    if weights and not has_weights:
        raise ConfigError(f"{directory} has no *.safetensors; give a directory that does")
    # The local cache of the hub may hold only some of the files. The index names all of them.
    source = open_index(directory) if (from_hub and not weights) or not has_weights else open_source(directory)
    # Headers are compared with the model even if the weights are not read, so a wrong config is refused early.
    config = read_config(directory)
    files = source if source.entries else None
    return Blueprint.of(config, files, recipe, directory=directory, stored=torch.float64)


def _of_config_alone(path: Path, recipe: Recipe, weights: bool) -> Blueprint:
    """Return the blueprint of a config under another name than config.json. It has no weights, whatever else is in its
    directory."""
    if not exists(path, Path.is_file):
        raise ConfigError(f"{path} does not exist; name a config (*.json), or a directory with a {CONFIG}")
    if weights:
        raise ConfigError(f"{path} is a config without weights; name a directory or a hub id")
    config, _ = read_stamped_json(path)
    try:
        return Blueprint.of(config, None, recipe)
    except ConfigError as error:
        raise ConfigError(f"{path} is not the config of a model: {error}") from error


def _located(model: str, weights: bool, say: Say) -> tuple[Path, bool]:
    """Return the directory of a model, and whether it comes from the hub. Download only what is needed."""
    at = path_of(model)
    if at.name == CONFIG:  # a config.json stands for its directory
        if not exists(at, Path.is_file):
            raise ConfigError(f"{model} does not exist; name a directory with a {CONFIG}")
        at = at.parent
    if exists(at, Path.is_dir):
        return at, False
    if not is_hub_id(model):
        known = ", ".join(TINY)
        raise ConfigError(
            f"{model!r} is neither a directory nor a config (*.json), nor one of {known}, nor a hub id (org/name)"
        )
    say(f"fetching {model} from the hub: " + ("its weights too" if weights else "its config alone"))
    return download(model, weights), True
