"""Rerankers: the probability of "yes" against "no" as the next token of a prompt with a query and a document."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..data import Batch
from ..engine import Loss
from ..errors import ConfigError
from ..recipe import option

ANSWERS = "answers"  # the field `[T, 2]` with the ids of "no" and "yes"
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"  # Qwen3-Reranker's own


@dataclass(frozen=True)
class Rerank:
    """Cross-entropy over two next tokens at the end of each document, as Qwen3-Reranker scores (arXiv 2506.05176)."""

    head: ClassVar[str] = "lm"
    rows: ClassVar[str] = "reranked"

    instruction: str = option(INSTRUCTION, "The task, which the prompt names.")
    answers: Sequence[str] = option(("no", "yes"), "The two answers, each one token: against, and for.")

    def __post_init__(self) -> None:
        given: object = self.answers
        if not isinstance(given, list | tuple) or len(given) != 2 or not all(isinstance(each, str) for each in given):
            raise ConfigError(f"rerank.answers={given!r:.80} must be two texts, such as ['no', 'yes']")
        if given[0] == given[1]:
            raise ConfigError(f"rerank.answers={given!r:.80} must be two different texts")
        object.__setattr__(self, "answers", tuple(given))

    @property
    def loss(self) -> Loss:
        """Return the loss for an engine."""
        return Loss(self, metrics=("accuracy",), candidates=ANSWERS)

    @staticmethod
    def with_answers(batch: Batch, answers: tuple[int, int]) -> Batch:
        """Return a batch with the field that the loss reads. `answers`: the ids of "no" and "yes"."""
        return batch.with_fields(**{ANSWERS: torch.tensor([answers]).expand(len(batch), 2).contiguous()})

    def __call__(self, scores: Mapping[str, Tensor], fields: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        answers_T2, labels_T = scores["candidate_logprobs"], fields["labels"]
        is_yes_T = (labels_T == fields[ANSWERS][:, 1]).long()
        logprobs_T2 = answers_T2.log_softmax(-1)
        terms_T = -logprobs_T2.gather(1, is_yes_T[:, None])[:, 0]
        return terms_T, {"accuracy": (answers_T2.argmax(-1) == is_yes_T).to(answers_T2.dtype)}
