"""The small files by which sentence-transformers loads a directory as an embedding model."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from ..weights import MODULES

if TYPE_CHECKING:
    from ..engine import Model

_POOLING, _NORMALISE = "1_Pooling", "2_Normalize"
_POOLINGS = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")


def add_embedding_files(model: Model, *, query_prompt: str = "") -> None:
    """Let exports and checkpoints of a model with `head="none"` hold what sentence-transformers needs: modules.json,
    last-token pooling, normalisation, and the prompt of queries. All ranks call it, without a collective.

    A model whose directory has a modules.json, such as Qwen3-Embedding, keeps its own files.
    """
    if "hidden" not in model.blueprint.scores:
        raise ConfigError('an embedding model has no head on its hidden states; load it with head="none"')
    if MODULES in model.small.names or model.mesh.rank:  # rank 0 holds the files
        return
    files = _files(model.blueprint.module.shape.width, query_prompt)
    model.small = replace(model.small, kept={**model.small.kept, **files})


def _files(width: int, query_prompt: str) -> dict[str, bytes]:
    """Return the files by name. Versions 2 to 6 of sentence-transformers read this form of them."""
    modules = ("Transformer", ""), ("Pooling", _POOLING), ("Normalize", _NORMALISE)
    listed = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{name}"}
        for index, (name, path) in enumerate(modules)
    ]
    pooling = {f"pooling_mode_{name}": name == "lasttoken" for name in _POOLINGS}
    settings = {
        "prompts": {"query": query_prompt, "document": ""},
        "default_prompt_name": None,
        "similarity_fn_name": "cosine",
    }
    contents: dict[str, Any] = {
        MODULES: listed,
        f"{_POOLING}/config.json": {"word_embedding_dimension": width, **pooling, "include_prompt": True},
        "config_sentence_transformers.json": settings,
    }
    return {name: (json.dumps(content, indent=2) + "\n").encode() for name, content in contents.items()}
