"""Samples: texts that the model generates from the prompts of a run, during training or by `meshwright sample`.

Prompts are formatted like the training data, by the template of the first source. All ranks generate together, each
token with one forward pass on the training mesh, so no second copy of the model is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..data import generation_config_of, stop_ids_of, tokenizer_of
from ..engine import Engine, Model, check_no_placeholders, check_prompts, sample
from ..errors import DataError
from ..models import placeholders_in, take, text_config
from ..weights import read_config
from .config import Config, SampleSection, SourceSection
from .data_sources import prompter, vocab_size_of
from .trained_model import TrainedModel

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
    answers = sample(
        model, prompts.ids, tokens=section.tokens, top_p=section.top_p, temperature=section.temperature,
        stop=prompts.stop, seed=seed,
    )  # fmt: skip
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
    """Load a model on one process and sample from it. `where`: see `TrainedModel.at`.

    The prompts of a run are formatted like its first source, those of any other model as chats; with `text` they are
    beginnings of texts.
    """
    trained = TrainedModel.at(where)
    source = SourceSection(path=[], kind="text") if text else trained.sources[0]
    prompts = prompts_of(section, source, trained.directory)
    assert prompts is not None, "the command line asks for one"
    return generated(trained.load(), prompts, section, seed)
