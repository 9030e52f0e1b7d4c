"""What the model writes after the prompts of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..data import generation_config_of, stop_ids_of, tokenizer_of
from ..engine import Engine, check_prompts, sample
from ..errors import DataError
from ..models import text_config
from ..weights import read_config
from .config import Config
from .sources import prompter

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


def prompts_of(config: Config, directory: Path) -> Prompts | None:
    """Those of the config, or None where it has none. What cannot be sampled from is refused."""
    section = config.sample
    if not section.prompts:
        return None
    tokenizer = tokenizer_of(directory, _OTHERWISE)
    make, about = prompter(config.data[0], directory, tokenizer), text_config(read_config(directory))
    try:
        ids = [make(text) for text in section.prompts]
        check_prompts(ids, section.tokens, int(about["vocab_size"]), about.get("max_position_embeddings"))
    except DataError as error:
        raise DataError(f"prompts of [sample]: {error}") from error
    return Prompts(section.prompts, ids, stop_ids_of(tokenizer, generation_config_of(directory)), tokenizer)


@dataclass(frozen=True)
class Samples:
    """Each call samples once. All ranks make it together."""

    engine: Engine
    prompts: Prompts
    config: Config

    def __call__(self) -> list[tuple[str, str]]:
        section, prompts = self.config.sample, self.prompts
        seed = (self.config.seed << 64) + self.engine.steps
        said = sample(
            self.engine.model, prompts.ids, tokens=section.tokens, top_p=section.top_p, stop=prompts.stop, seed=seed
        )
        return [(text, prompts.text_of(ids)) for text, ids in zip(prompts.texts, said, strict=True)]
