"""Write small models with random weights, and make the documents for comparing them with transformers and peft."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..blueprint import Blueprint
from ..engine import export, init
from ..mesh import Mesh
from ..recipe import Recipe
from ..weights import of_table
from .small_data import FEW, FEW_STEP, LONG, LONG_STEP, Data, Vision
from .transformers_peer import Document, Documents


def vision_of(blueprint: Blueprint) -> Vision | None:
    """Return the facts about a vision tower that data needs; None without a tower."""
    tower = blueprint.module.tower
    return None if tower is None else Vision(tower.ids[0], tower.ids[1], tower.shape.pixels.num)


def write_peers(config: Mapping[str, Any], tower: bool, folder: Path, seed: int) -> tuple[list[str], Vision | None]:
    """Write one small model in every file layout of experts, first in the one that transformers' modules use.

    -> the layouts, and the facts about the vision tower that data needs
    """
    blueprint = Blueprint.of(config, None, Recipe(tower=tower))
    layouts = sorted(blueprint.table.groups.get("experts", ["fused"]), key=lambda name: name != "fused")
    for layout in layouts:
        write_small(folder / layout, blueprint, {"experts": layout}, torch.float32, seed)
    return layouts, vision_of(blueprint)


def steps_of(vocab: int, seed: int, vision: Vision | None = None) -> dict[str, list[Documents]]:
    """Return the data of M1, by its name in findings.

    The long document also has the first and the last token of the vocabulary. The first micro-batch and the long
    document have images, the step of few tokens has none.
    """
    data = Data(vocab=vocab, few=FEW, long=LONG, seed=seed, vision=vision, apart=True)
    longest = _documents(data, LONG_STEP)[0][0]
    long = [[Document([0, *longest.tokens, vocab - 1], longest.images)]]
    return {
        "two micro-batches": _documents(data, 0), "few tokens": _documents(data, FEW_STEP), "a long document": long,
    }  # fmt: skip


def _documents(data: Data, step: int) -> list[Documents]:
    """Return the documents of each micro-batch of data rank 0, with their images."""
    both = zip(data.documents(0, step), data.images(0, step), strict=True)
    return [[Document(*each) for each in zip(tokens, images, strict=True)] for tokens, images in both]


def write_small(
    at: Path, like: Blueprint, choice: Mapping[str, str], dtype: torch.dtype, seed: int, head: str | None = None
) -> None:
    """Write files with random weights. No weight keeps an initial value such as 0 or 1, which would hide a mistake: a
    norm of all ones looks right in any order.

    `head`: the head of the files, by default that of `like`. With "lm" a value head is new to whoever loads them.
    """
    recipe = at.with_name(f"{at.name}'s recipe")
    recipe.mkdir(parents=True)
    plain = {name: value for name, value in like.config.items() if name != "quantization_config"}
    (recipe / "config.json").write_text(json.dumps(plain))
    model = init(recipe, Mesh(device="cpu"), head=head or like.head, dtype=torch.float32, seed=seed, tower=like.tower)
    # `init` draws as for training; add noise to weights that it leaves constant, such as norms.
    g = torch.Generator().manual_seed(seed + 1)
    for name, stored in model.stored().items():
        stored.add_(torch.randn(stored.shape, generator=g), alpha=0.05)
        if (
            model.table[name].init.kind == "log_uniform"
        ):  # a decay of the delta net: let every other head remember for long
            stored.view(-1)[::2] = -4.6
    choice = {group: name for group, name in choice.items() if group in model.table.groups}
    model.blueprint = replace(model.blueprint, keymap=of_table(model.table, dtype, choice))  # the layout of the files
    export(model, at)
