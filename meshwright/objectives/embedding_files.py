"""Write the small files with which sentence-transformers loads a directory as an embedding model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from ..log import logger
from ..weights import MODULES

if TYPE_CHECKING:
    from ..engine import Model

_SETTINGS = "config_sentence_transformers.json"
_POOLING, _NORMALISE = "1_Pooling", "2_Normalize"
_POOLINGS = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")


def add_embedding_files(model: Model, *, query_prompt: str = "", document_prompt: str = "") -> None:
    """Let exports and checkpoints of a model with `head="none"` hold what sentence-transformers needs: modules.json,
    last-token pooling, normalisation, and the prompts. All ranks call it, without a collective.

    A model whose directory has a modules.json, such as Qwen3-Embedding, keeps its own files; given prompts replace its
    own, and a warning names each prompt of the model that this training does not use.
    """
    if "hidden" not in model.blueprint.scores:
        raise ConfigError('an embedding model has no head on its hidden states; load it with head="none"')
    if model.mesh.rank:  # rank 0 holds the files
        return
    prompts = {"query": query_prompt, "document": document_prompt}
    if MODULES in model.small.names:
        files = _with_prompts(model.small.kept.get(_SETTINGS), prompts)
    else:
        files = _files(model.blueprint.module.shape.width, prompts)
    model.small = replace(model.small, kept={**model.small.kept, **files})


def _with_prompts(content: bytes | None, prompts: Mapping[str, str]) -> dict[str, bytes]:
    """Return a model's own settings with the given prompts; nothing if no prompt is given."""
    settings = json.loads(content) if content else {}
    own = settings.get("prompts") or {}
    for name in (name for name in prompts if own.get(name) and not prompts[name]):
        logger.warning(
            "the model's own prompt of a %s, %r, is not used in training; set %s_prompt", name, own[name], name
        )
    given = {name: prompt for name, prompt in prompts.items() if prompt}
    if not given:
        return {}
    return {_SETTINGS: (json.dumps({**settings, "prompts": {**own, **given}}, indent=2) + "\n").encode()}


def _files(width: int, prompts: Mapping[str, str]) -> dict[str, bytes]:
    """Return the files by name, in a form that versions 2 to 6 of sentence-transformers read."""
    modules = ("Transformer", ""), ("Pooling", _POOLING), ("Normalize", _NORMALISE)
    listed = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{name}"}
        for index, (name, path) in enumerate(modules)
    ]
    pooling = {f"pooling_mode_{name}": name == "lasttoken" for name in _POOLINGS}
    settings = {
        "prompts": dict(prompts),
        "default_prompt_name": None,
        "similarity_fn_name": "cosine",
    }
    contents: dict[str, Any] = {
        MODULES: listed,
        f"{_POOLING}/config.json": {"word_embedding_dimension": width, **pooling, "include_prompt": True},
        _SETTINGS: settings,
    }
    return {name: (json.dumps(content, indent=2) + "\n").encode() for name, content in contents.items()}
