"""A trained model by its path: a run, a checkpoint, an export, an adapter, or any other model.

`meshwright sample` and `meshwright chat` load it on one process, and format prompts as its run formatted its data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from ..checkpoint import RUN, is_checkpoint, newest_of, run_of
from ..engine import Engine, Model, load, resume
from ..models import placeholders_in
from ..recipe import Lora
from ..weights import path_of, peft_files, read_config
from .config import Config, SourceSection
from .config_file import read
from .data_sources import model_directory


@dataclass(frozen=True)
class TrainedModel:
    """The location of a model and its tokenizer, and the run that trained it, if any.

    `where`: a checkpoint, a Hugging Face directory or a hub id. `base`: the model that adapters are added to, else the
    same as `where`.
    """

    where: str
    base: str
    config: Config | None = None
    lora: Lora | None = None

    @staticmethod
    def at(where: str) -> TrainedModel:
        """Find the model of a path: a model directory, a hub id, a PEFT adapter, a checkpoint, or a run or folder of
        checkpoints, whose newest is taken. Adapters are added to the base that their config or their run names.
        """
        checkpoint = newest_of(path_of(where))
        where = where if checkpoint == path_of(where) else str(checkpoint)
        run = run_of(checkpoint) if is_checkpoint(checkpoint) else None
        if run is not None:
            config = read(run / RUN)
            lora = config.recipe.lora
            return TrainedModel(where, where if lora is None else config.model, config, lora)
        if (path_of(where) / peft_files.CONFIG_FILE).is_file():
            return TrainedModel(where, peft_files.base_of(where), None, Lora(path=str(path_of(where))))
        return TrainedModel(where, where)

    @cached_property
    def directory(self) -> Path:
        """Return the directory with config, tokenizer and templates."""
        return model_directory(self.base)

    @property
    def sources(self) -> Sequence[SourceSection]:
        """Return the sources of its run; of other models one of chats, with the tokenizer's template."""
        return [SourceSection(path=[])] if self.config is None else self.config.data

    @property
    def can_see(self) -> bool:
        """Return whether `load(tower=True)` gives a model that takes images. Adapters need a run that trained so."""
        if self.lora is not None:
            return self.config is not None and self.config.recipe.tower
        config = read_config(self.directory)
        return bool(placeholders_in(config)) and "vision_config" in config

    def load(self, *, tower: bool = False) -> Model:
        """Load the model on one process, to generate with it."""
        if self.config is not None and self.lora is not None:  # a checkpoint of adapters, which only an engine restores
            model = load(self.base, **vars(self.config.recipe))
            resume(Engine(model, lr=0.0), self.where)
            return model
        dtype = "bfloat16" if self.config is None else self.config.train.dtype
        # Frozen, so that there are no float32 masters.
        return load(self.base, dtype=getattr(torch, dtype), train=[], tower=tower, lora=self.lora)
