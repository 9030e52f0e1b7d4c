"""What the model writes after the prompts of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..checkpoint import RUN, is_checkpoint, newest_of, run_of
from ..data import generation_config_of, stop_ids_of, tokenizer_of
from ..engine import Engine, Model, check_no_placeholders, check_prompts, load, sample
from ..errors import DataError
from ..models import placeholders_in, take, text_config
from ..weights import path_of, read_config
from .config import Config, SampleSection, SourceSection
from .config_file import read
from .data_sources import model_directory, prompter, vocab_size_of

_OTHERWISE = "leave prompts of [sample] out"


@dataclass(frozen=True)
class Prompts:
    """Texts, and the ids that a model is given for them."""

    texts: Sequence[str]
    ids: Sequence[list[int]]
    stop: frozenset[int]
    tokenizer: Any

    def text_of(self, ids: Sequence[int]) -> str:
        """Without the token that ended it."""
        ended = bool(ids) and ids[-1] in self.stop
        return str(self.tokenizer.decode(ids[:-1] if ended else ids))


def prompts_of(section: SampleSection, source: SourceSection, directory: Path) -> Prompts | None:
    """As rows of `source` would be asked; None where the section has none. What cannot be sampled from is refused."""
    if not section.prompts:
        return None
    tokenizer = tokenizer_of(directory, _OTHERWISE)
    try:
        make, about = prompter(source, directory, tokenizer), text_config(read_config(directory))
        ids = [make(text) for text in section.prompts]
        longest = take(about, "max_position_embeddings", int) if about.get("max_position_embeddings") else None
        check_prompts(ids, section.tokens, vocab_size_of(directory), longest)
        check_no_placeholders(ids, placeholders_in(read_config(directory)))
    except DataError as error:
        raise DataError(f"the prompts of a sample: {error}") from error
    return Prompts(section.prompts, ids, stop_ids_of(tokenizer, generation_config_of(directory)), tokenizer)


def generated(model: Model, prompts: Prompts, section: SampleSection, seed: int) -> list[tuple[str, str]]:
    """Each prompt, and what the model writes after it. All ranks call it."""
    said = sample(model, prompts.ids, tokens=section.tokens, top_p=section.top_p, stop=prompts.stop, seed=seed)
    return [(text, prompts.text_of(ids)) for text, ids in zip(prompts.texts, said, strict=True)]


@dataclass(frozen=True)
class Samples:
    """Each call samples once. All ranks make it together."""

    engine: Engine
    prompts: Prompts
    config: Config

    def __call__(self) -> list[tuple[str, str]]:
        seed = (self.config.seed << 64) + self.engine.steps
        return generated(self.engine.model, self.prompts, self.config.sample, seed)


def sample_at(where: str, section: SampleSection, *, seed: int, text: bool) -> list[tuple[str, str]]:
    """On one process: of a checkpoint, asked as the first source of its run, or of any model, asked as a chat. `where`
    may be a run, or a folder of checkpoints, of which the newest is taken.

    With `text` prompts are given as they are.
    """
    found, source, dtype = newest_of(path_of(where)), SourceSection(path=[]), "bfloat16"
    where = where if found == path_of(where) else str(found)
    run = run_of(found) if is_checkpoint(found) else None
    if run is not None:
        config = read(run / RUN)
        source, dtype = config.data[0], config.train.dtype
    if text:
        source = SourceSection(path=[], kind="text")
    prompts = prompts_of(section, source, model_directory(where))
    assert prompts is not None, "the command line asks for one"
    model = load(where, dtype=getattr(torch, dtype), train=[])  # frozen weights stay in the dtype of the files
    return generated(model, prompts, section, seed)
