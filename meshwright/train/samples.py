"""Samples: texts that the model generates from the prompts of a run, during training or by `meshwright sample`.

Prompts are formatted like the training data, by the template of the first source. All ranks generate together, each
token with one forward pass on the training mesh, so no second copy of the model is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..checkpoint import RUN, is_checkpoint, newest_of, run_of
from ..data import generation_config_of, stop_ids_of, tokenizer_of
from ..engine import Engine, Model, check_no_placeholders, check_prompts, load, resume, sample
from ..errors import DataError
from ..models import placeholders_in, take, text_config
from ..recipe import Lora
from ..weights import path_of, peft_files, read_config
from .config import Config, SampleSection, SourceSection
from .config_file import read
from .data_sources import model_directory, prompter, vocab_size_of

_WITHOUT_TOKENIZER = "leave prompts of [sample] out"  # the fix in the message for a missing tokenizer


@dataclass(frozen=True)
class Prompts:
    """Prompts as text and as token ids. `stop`: the tokens that end an answer."""

    texts: Sequence[str]
    ids: Sequence[list[int]]
    stop: frozenset[int]
    tokenizer: Any

    def text_of(self, ids: Sequence[int]) -> str:
        """Decode an answer without the token that ended it."""
        ended = bool(ids) and ids[-1] in self.stop
        return str(self.tokenizer.decode(ids[:-1] if ended else ids))


def prompts_of(section: SampleSection, source: SourceSection, directory: Path) -> Prompts | None:
    """Tokenise the prompts of a section, formatted like rows of `source`; None if it has no prompts.

    Refuse empty prompts, prompts longer than the model's context, and ids that the model does not have.
    """
    if not section.prompts:
        return None
    tokenizer = tokenizer_of(directory, _WITHOUT_TOKENIZER)
    try:
        make, config = prompter(source, directory, tokenizer), text_config(read_config(directory))
        ids = [make(text) for text in section.prompts]
        longest = take(config, "max_position_embeddings", int) if config.get("max_position_embeddings") else None
        check_prompts(ids, section.tokens, vocab_size_of(directory), longest)
        check_no_placeholders(ids, placeholders_in(read_config(directory)))
    except DataError as error:
        raise DataError(f"the prompts of a sample: {error}") from error
    return Prompts(section.prompts, ids, stop_ids_of(tokenizer, generation_config_of(directory)), tokenizer)


def generated(model: Model, prompts: Prompts, section: SampleSection, seed: int) -> list[tuple[str, str]]:
    """Return pairs of prompt and generated text. Collective."""
    answers = sample(model, prompts.ids, tokens=section.tokens, top_p=section.top_p, stop=prompts.stop, seed=seed)
    return [(text, prompts.text_of(ids)) for text, ids in zip(prompts.texts, answers, strict=True)]


@dataclass(frozen=True)
class Samples:
    """A function that generates one sample of each prompt. Collective."""

    engine: Engine
    prompts: Prompts
    config: Config

    def __call__(self) -> list[tuple[str, str]]:
        # Distinct for each run and step, and the same again after a resume.
        seed = (self.config.seed << 64) + self.engine.steps
        return generated(self.engine.model, self.prompts, self.config.sample, seed)


def sample_at(where: str, section: SampleSection, *, seed: int, text: bool) -> list[tuple[str, str]]:
    """Load a model on one process and sample from it.

    `where`: a model directory, a hub id, a PEFT adapter, a checkpoint, or a run or folder of checkpoints, whose newest
    is taken. Adapters are added to the base that their config or their run names. The prompts of a checkpoint are
    formatted like the first source of its run, those of any other model as chats; with `text` they are beginnings of
    texts.
    """
    checkpoint, source, dtype, lora = newest_of(path_of(where)), SourceSection(path=[]), "bfloat16", None
    where = where if checkpoint == path_of(where) else str(checkpoint)
    run = run_of(checkpoint) if is_checkpoint(checkpoint) else None
    if run is not None:
        config = read(run / RUN)
        source, dtype, lora = config.data[0], config.train.dtype, config.recipe.lora
    base = config.model if run is not None and lora is not None else where
    if run is None and (path_of(where) / peft_files.CONFIG_FILE).is_file():
        base, lora = peft_files.base_of(where), Lora(path=str(path_of(where)))
    if text:
        source = SourceSection(path=[], kind="text")
    prompts = prompts_of(section, source, model_directory(base))
    assert prompts is not None, "the command line asks for one"
    if run is not None and lora is not None:  # a checkpoint of adapters, which only an engine restores
        model = load(base, **vars(config.recipe))
        resume(Engine(model, lr=0.0), where)
    else:
        model = load(base, dtype=getattr(torch, dtype), train=[], lora=lora)  # frozen: no float32 masters
    return generated(model, prompts, section, seed)
