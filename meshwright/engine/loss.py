"""`mw.Loss`: a loss function and the unit of its terms, which is a token, document, group, micro-batch or step."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass

from ..errors import ConfigError
from .losses import LossFunction

PER = ("token", "document", "group", "micro_batch", "step")


def _takes(function: Callable[..., object], num: int) -> bool:
    """Return whether a function can be called with this many arguments; True for those without a signature."""
    try:
        inspect.signature(function).bind(*range(num))
    except ValueError:
        return True
    except TypeError:
        return False
    return True


@dataclass(frozen=True)
class Loss:
    """A loss function, and the unit of its terms.

    >>> engine = Engine(model, lr=1e-6, loss=Loss(gspo, per="document", metrics=("kl",)))      # doctest: +SKIP

    `per`: with "token" a term depends on its token alone. With "document", "group" and "micro_batch" the function is
    called as `function(scores, fields, docs)` with the whole micro-batch, on any mesh: scores are all-gathered over cp
    and tp, and `docs` (`LossDocuments`) sums and splits them by document. It returns a term for each document, for each
    group (`mw.batches(groups=)`), or one number.

    With "step" the function gets the tokens with a label of all micro-batches of all data ranks, `[N, ...]`, and `docs`
    counts these tokens alone. It returns a term for each group of the step. So a contrastive loss has every document of
    the step as a negative, on any mesh and with any number of micro-batches.

    `normalise`: the engine divides by the number of tokens, documents or groups with a label in the whole step (of
    tokens: by the sum of their weights). With False it does not divide, because the function has done so.

    `metrics`: names of figures. The function then returns `(terms, {name: values})`, with values in the shape of its
    terms, and `record.metrics` has their mean over the step, or their sum with `normalise=False`.

    `candidates`: the name of a field of token ids `[T, K]`, such as the likeliest next tokens of a teacher, with -1 for
    no candidate. The function then gets `scores["candidate_logprobs"]` too: `[T, K]`, their log-probabilities, and 0
    for no candidate. `candidate_temperature` divides the logits for these, and leaves "logprobs" and "entropy" at
    temperature 1; without it all are at the temperature of the engine. `rest` adds `scores["rest_logprobs"]`, `[T]`:
    the log-probability of all other tokens of the vocabulary, exact even where 1 minus the probability of the
    candidates would lose all digits.
    """

    function: LossFunction
    per: str = "token"
    normalise: bool = True
    metrics: tuple[str, ...] = ()
    candidates: str = ""
    candidate_temperature: float | None = None
    rest: bool = False

    def __post_init__(self) -> None:
        self._check_function()
        if not isinstance(self.normalise, bool):
            raise ConfigError(f"normalise={self.normalise!r} must be True or False")
        if self.per == "micro_batch" and self.normalise:
            raise ConfigError(
                'a loss per="micro_batch" is a number that the engine cannot divide: a mean over micro-batches would '
                "depend on how documents are packed; divide it yourself and give normalise=False"
            )
        names: object = self.metrics
        if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
            raise ConfigError(f'metrics={names!r} must be a tuple of names, such as ("kl", "clip_fraction")')
        if not isinstance(self.candidates, str):
            raise ConfigError(f"candidates={self.candidates!r} must be the name of a field of token ids [tokens, K]")
        if self.candidate_temperature is not None and not self.candidates:
            raise ConfigError(f"candidate_temperature={self.candidate_temperature!r} has no effect without candidates=")
        if not isinstance(self.rest, bool):
            raise ConfigError(f"rest={self.rest!r} must be True or False")
        if self.rest and not self.candidates:
            raise ConfigError("rest=True has no effect without candidates=: it is about all tokens but these")

    def _check_function(self) -> None:
        """Refuse a function that cannot be called as `per` says."""
        if not callable(self.function):
            raise ConfigError(f"loss={self.function!r} must be a function of scores and fields, such as cross_entropy")
        if self.per not in PER:
            raise ConfigError(f"per={self.per!r} is unknown; choose from {', '.join(map(repr, PER))}")
        arguments = ("scores", "fields") if self.per == "token" else ("scores", "fields", "docs")
        if not _takes(self.function, len(arguments)):
            raise ConfigError(
                f"a loss per {self.per} is called as function({', '.join(arguments)}), and {self.name} does not take "
                f"{len(arguments)} arguments; give it these, or another per="
            )

    @property
    def name(self) -> str:
        """Return the name of the function, or an objective with its options. Ranks compare it."""
        function: object = self.function
        # Only a dataclass of options: any other may hold data that differ between ranks.
        if is_dataclass(function) and all("text" in each.metadata for each in fields(function)):
            return repr(function)
        named = function if inspect.isroutine(function) else type(function)
        return str(named.__qualname__)

    @classmethod
    def of(cls, loss: Loss | LossFunction) -> Loss:
        """Return a `Loss`, made from the function if the user gave only that."""
        return loss if isinstance(loss, Loss) else cls(loss)
