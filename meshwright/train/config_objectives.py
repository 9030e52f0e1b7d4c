"""The sections of a run file for objectives other than the next token, made from the options of `objectives/`."""

from __future__ import annotations

from typing import Annotated

from ..objectives import Classify, Distill, Dpo, Embedding, Orpo, Rerank, Reward, Simpo
from .config_section import FIXED, section_from


class DpoSection(section_from(Dpo)):  # type: ignore[misc]  # the fields are those of the dataclass
    """Options of `objective = "dpo"`; docs/preferences.md explains them."""

    reference: Annotated[str, FIXED] = ""
    """The reference model: a directory or a hub id. By default the model as it is before training, without `[lora]`."""


class OrpoSection(section_from(Orpo)):  # type: ignore[misc]  # the fields are those of the dataclass
    """Options of `objective = "orpo"`."""


class SimpoSection(section_from(Simpo)):  # type: ignore[misc]  # the fields are those of the dataclass
    """Options of `objective = "simpo"`."""


class RewardSection(section_from(Reward)):  # type: ignore[misc]  # the fields are those of the dataclass
    """Options of `objective = "reward"`."""


class ClassifySection(section_from(Classify)):  # type: ignore[misc]  # the fields are those of the dataclass
    """Options of `objective = "classify"`; docs/classify.md explains them."""


class DistillSection(section_from(Distill)):  # type: ignore[misc]  # the fields are those of the dataclass
    """Options of `objective = "distill"`; docs/distillation.md explains them."""

    teacher: Annotated[str, FIXED] = ""
    """The teacher: a directory or a hub id, with the tokenizer of the model. It runs on the same mesh, frozen."""
    scores: Annotated[str, FIXED] = ""
    """A directory with stored scores of a teacher. With `teacher` the run first computes missing ones."""


class EmbeddingSection(section_from(Embedding)):  # type: ignore[misc]  # the fields are those of the dataclass
    """Options of `objective = "embedding"`; docs/embeddings.md explains them."""


class RerankSection(section_from(Rerank)):  # type: ignore[misc]  # the fields are those of the dataclass
    """Options of `objective = "rerank"`; docs/embeddings.md explains them."""
