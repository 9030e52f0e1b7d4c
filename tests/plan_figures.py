"""Figures of plans for tiny models, shared by tests of plans."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from meshwright.axes import Axes
from meshwright.blueprint import Blueprint
from meshwright.plan.devices import Cluster
from meshwright.plan.figures import Figures, work_of
from meshwright.recipe import Pipeline, Recipe
from tests import tiny

GB = 10**9
H100 = Cluster(gpus_per_node=4)
EVEN = tiny.of("qwen3", num_hidden_layers=8, vocab_size=4)


def fake(**fields: Any) -> Any:
    return cast(Any, SimpleNamespace(**fields))


def figures_of(
    name: str, num: int = 3, tokens: int = 64, device: int | None = None, pipeline: Pipeline = Pipeline(), **mesh: int
) -> Figures:
    axes, config = Axes(**mesh), EVEN if name == "even" else tiny.of(name)
    blueprint = Blueprint.of(config, None, Recipe(pipeline=pipeline))
    return Figures("a model", blueprint, axes, work_of(axes, tokens, num), device, cluster=H100)
