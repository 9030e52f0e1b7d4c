"""Knowledge distillation: train a student on a teacher's top-K next-token probabilities.

The teacher is a second model on the same mesh (`Distill.ask`), or its scores come from files (`TeacherScores`). Terms
are per token, so packing, micro-batches and the mesh change nothing. The "candidates" of a token are the teacher's K
likeliest next tokens; "the rest" is all other tokens of the vocabulary.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..data import Batch
from ..engine import Loss, Model, top_logprobs
from ..errors import ConfigError, DataError
from ..recipe import option
from .checks import check_number

IDS, LOGPROBS = "teacher_ids", "teacher_logprobs"  # the fields `[T, K]` of a batch
KINDS, REST = ("forward", "reverse"), ("bucket", "renormalise")
# Models with one tokenizer may pad their vocabularies differently: Qwen2.5 0.5B and 7B differ by 128 rows.
_PADDING_ROWS = 1 << 10
Result = tuple[Tensor, dict[str, Tensor]]


@dataclass(frozen=True)
class Distill:
    """Distillation (arXiv 1503.02531): `alpha * temperature**2 * KL + (1 - alpha) * cross-entropy`, a mean over tokens.

    The KL divergence compares student and teacher at the temperature; the cross-entropy of the labels is at temperature
    1. The gradient of the KL divergence shrinks with the square of the temperature, and the factor makes up for that.
    """

    head: ClassVar[str] = "lm"
    rows: ClassVar[str] = "documents"

    temperature: float = option(1.0, "Divides the logits of teacher and student for the KL divergence.")
    kind: str = option(
        "forward", 'The direction of the KL divergence: "forward" weighs tokens by the teacher, so the student covers '
        'all that are likely there; "reverse" weighs them by the student, which may keep to a part of them.',
        choices=KINDS,
    )  # fmt: skip
    alpha: float = option(0.5, "The share of the KL divergence in the loss; cross-entropy has the rest.")
    top_k: int = option(64, "K, the number of the teacher's likeliest tokens that count.")
    rest: str = option(
        "bucket", 'The treatment of all other tokens: "bucket" compares their whole probability as one more token, '
        '"renormalise" leaves them out and rescales the probabilities of the K tokens to sum to 1.', choices=REST,
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_number("distill.temperature", self.temperature, above=True)
        check_number("distill.alpha", self.alpha, above=True)
        if self.alpha > 1:
            raise ConfigError(f"distill.alpha={self.alpha!r} must be above 0 and at most 1")
        if type(self.top_k) is not int or self.top_k < 1:
            raise ConfigError(f"distill.top_k={self.top_k!r} must be a whole number above 0")
        for name, value, known in (("kind", self.kind, KINDS), ("rest", self.rest, REST)):
            if value not in known:
                raise ConfigError(f"distill.{name}={value!r} is unknown; choose from {', '.join(known)}")
        if self.rest == "renormalise" and self.top_k == 1:
            raise ConfigError("distill.top_k=1 leaves one token with the share 1, and nothing to learn; give top_k=2")

    @property
    def loss(self) -> Loss:
        """Return the loss for an engine. Leave the temperature of the engine itself at 1."""
        metrics = ("kl", "cross_entropy", "agreement")
        in_bucket = self.rest == "bucket"
        return Loss(self, metrics=metrics, candidates=IDS, candidate_temperature=self.temperature, rest=in_bucket)

    def ask(self, teacher: Model, batches: Sequence[Batch], student: Model) -> list[Batch]:
        """Return the batches with the fields that the loss reads: the teacher's likeliest tokens, and their
        log-probabilities at the temperature. All ranks call it.

        A token that the student does not have, such as a row of padding, becomes -1: its probability counts as part of
        the rest.
        """
        check_vocabularies(teacher, student)
        vocab = student.blueprint.vocab
        self.check_rest(vocab)
        scored = top_logprobs(teacher, batches, self.top_k, temperature=self.temperature)
        return [
            batch.with_fields(
                **{IDS: top["ids"].masked_fill(top["ids"] >= vocab, -1), LOGPROBS: top["logprobs"]}
            )
            for batch, top in zip(batches, scored, strict=True)
        ]  # fmt: skip

    def check_rest(self, vocab: int) -> None:
        """Refuse a K that covers the student's whole vocabulary and leaves no rest."""
        if self.rest == "bucket" and self.top_k >= vocab:
            raise ConfigError(
                f"distill.top_k={self.top_k} leaves no other tokens of the student's {vocab:,}; take fewer, or "
                'rest="renormalise"'
            )

    def __call__(self, scores: Mapping[str, Tensor], fields: Mapping[str, Tensor]) -> Result:
        if LOGPROBS not in fields:
            raise DataError(
                f"the batch has no field {LOGPROBS!r}, the teacher's log-probabilities of {IDS!r}; Distill.ask adds "
                "both, and TeacherScores reads them from files"
            )
        student_TK, is_candidate_TK = scores["candidate_logprobs"], fields[IDS] >= 0
        teacher_TK = fields[LOGPROBS].to(student_TK.dtype)
        rest_T = scores["rest_logprobs"] if self.rest == "bucket" else None
        kl_T = divergence(teacher_TK, student_TK, is_candidate_TK, rest_T, kind=self.kind)
        cross_entropy_T = -scores["logprobs"]
        terms_T = self.alpha * self.temperature**2 * kl_T
        if self.alpha < 1:
            terms_T = terms_T + (1 - self.alpha) * cross_entropy_T
        likeliest = [each.masked_fill(~is_candidate_TK, -math.inf).argmax(-1) for each in (teacher_TK, student_TK)]
        agreement_T = (likeliest[0] == likeliest[1]).to(kl_T.dtype)
        return terms_T, {"kl": kl_T, "cross_entropy": cross_entropy_T, "agreement": agreement_T}


def divergence(
    teacher_TK: Tensor, student_TK: Tensor, is_candidate_TK: Tensor, student_rest_T: Tensor | None, *,
    kind: str = "forward",
) -> Tensor:  # fmt: skip
    """Return the KL divergence of two distributions over K candidates, from their log-probabilities. -> `[T]`

    `is_candidate_TK`: which of the K are candidates. `student_rest_T`: the student's log-probability of the rest, which
    counts as one more candidate; with None the K candidates are renormalised. `kind`: as in `Distill`.
    """
    teacher, student = (each.masked_fill(~is_candidate_TK, 0.0) for each in (teacher_TK, student_TK))
    if student_rest_T is None:
        teacher, student = (each - _log_total(each, is_candidate_TK) for each in (teacher, student))
    else:
        teacher = torch.cat([teacher, _log_rest(_log_total(teacher, is_candidate_TK))], -1)
        student = torch.cat([student, student_rest_T[:, None]], -1)
        is_candidate_TK = torch.cat([is_candidate_TK, is_candidate_TK.new_ones(len(is_candidate_TK), 1)], -1)
    weight, distance = (teacher, teacher - student) if kind == "forward" else (student, student - teacher)
    return (weight.exp() * distance).masked_fill(~is_candidate_TK, 0.0).sum(-1)


def _log_total(logprobs_TK: Tensor, is_candidate_TK: Tensor) -> Tensor:
    return logprobs_TK.masked_fill(~is_candidate_TK, -math.inf).logsumexp(-1, keepdim=True)


def _log_rest(log_total: Tensor) -> Tensor:
    """Return log(1 - exp(log_total)), the teacher's log-probability of the rest, which has no gradient.

    `expm1` keeps digits where the total is near 1, `log1p` where it is small. A total that rounds to 1 or above, as
    float16 files may give, is clamped to leave the smallest rest that the dtype resolves.
    """
    log_total = log_total.clamp(max=-torch.finfo(log_total.dtype).eps)
    near_1, small = (-torch.expm1(log_total)).log(), torch.log1p(-log_total.exp())
    return near_1.where(log_total > -math.log(2), small)


def check_vocabularies(teacher: Model, student: Model) -> None:
    """Refuse a teacher with another vocabulary. Sizes may differ by rows of padding."""
    sizes = teacher.blueprint.vocab, student.blueprint.vocab
    if abs(sizes[0] - sizes[1]) > _PADDING_ROWS:
        raise ConfigError(
            f"the vocabulary of the teacher has {sizes[0]:,} tokens and that of the student {sizes[1]:,}, so their "
            "tokenizers differ; take a teacher with the tokenizer of the student"
        )
