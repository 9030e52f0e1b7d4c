"""What a caller may get wrong, refused before any work. Pure checks: nothing here knows a model or a rank."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..data import IGNORE, WEIGHT, Batch
from ..errors import ConfigError, DataError, StateError, counted
from ..mesh import Mesh
from ..optim import Optimizer, within

READ = ("rank", "node")
COMPUTE = (torch.bfloat16, torch.float32, torch.float64)
_SCHEDULE = "a function of the step, such as lambda step: 1e-5 * min(1, (step + 1) / 100)"
_PADDING = ("attention_mask", "padding_mask")  # what documents have no need of
_MEANT = ("weights", "loss_weight", "loss_weights", "loss_mask")  # other libraries' names of the field WEIGHT

_Function = TypeVar("_Function", bound=Callable[..., Any])


def spelled_out(options: type[Any]) -> Callable[[_Function], _Function]:
    """Make `help()` show the fields of a dataclass in place of the `**fields` of a function."""

    def spell(function: _Function) -> _Function:
        own = inspect.signature(function)
        *kept, _ = own.parameters.values()
        keyword = inspect.Parameter.KEYWORD_ONLY
        more = [inspect.Parameter(f.name, keyword, default=f.default) for f in dataclasses.fields(options)]
        vars(function)["__signature__"] = own.replace(parameters=[*kept, *more])
        return function

    return spell


def check_loading(mesh: object, dtype: object, read: str = "rank") -> None:
    check_inference_mode()
    if not isinstance(mesh, Mesh | None):
        raise ConfigError(f"mesh={mesh!r} is no mesh; give mw.Mesh(fsdp=4), or nothing for one process")
    if dtype not in (None, *COMPUTE):
        raise ConfigError(f"dtype={dtype!r} is not supported; choose from {', '.join(map(str, COMPUTE))}")
    if read not in READ:
        raise ConfigError(f"read={read!r} is unknown; choose from {', '.join(READ)}")


def check_unquantised(config: Container[str]) -> None:
    if "quantization_config" in config:
        raise ConfigError(
            "config.json has a quantization_config, but new weights are not quantised, and a reader of their export "
            "would take them for it; remove it from config.json"
        )


def check_inference_mode() -> None:
    if torch.is_inference_mode_enabled():
        raise StateError(
            "torch.inference_mode() is on, and later steps cannot use tensors that are made under it. Leave it out: "
            "logprobs, logits and evaluate take no gradients anyway"
        )


def check_autocast(device: str) -> None:
    if torch.is_autocast_enabled(device):
        raise StateError(
            f"torch.autocast({device!r}) is on, which would round what must stay wide. "
            "Leave it out: dtype= of mw.load is what a model computes in"
        )


def check_engine(lr: object, loss: object, entropy: object) -> None:
    if not callable(lr) and not within(lr, 0):
        raise ConfigError(f"lr={lr!r:.80} must be a number of 0 or more, or {_SCHEDULE}")
    if not callable(loss):
        raise ConfigError(f"loss={loss!r} must be a function of scores and fields, such as mw.losses.cross_entropy")
    if not isinstance(entropy, bool):
        raise ConfigError(f"entropy={entropy!r} must be True or False")


def check_optimizer(optimizer: object) -> None:
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"optimizer={optimizer!r:.80} is no mw.Optimizer; give mw.AdamW(betas=(0.9, 0.95)), or a subclass of "
            "mw.Optimizer"
        )


def lr_of_step(lr: object, step: int) -> float:
    """The number that a user's `lr`, or the schedule in its place, gave for a step."""
    number = lr.item() if isinstance(lr, Tensor) and lr.numel() == 1 else lr
    if not within(number, 0):
        raise ConfigError(f"lr of step {step} is {lr!r}; it must be a number of 0 or more")
    return float(number)  # type: ignore[arg-type] # `within` has looked


def norm_bound(max_norm: object) -> float | None:
    if max_norm is None:
        return None
    if not within(max_norm, 0) or max_norm == 0:
        raise ConfigError(f"max_norm={max_norm!r} must be a number above 0, or None")
    return float(max_norm)  # type: ignore[arg-type] # `within` has looked


def check_batches(batches: object, vocab: int, share: int) -> None:
    """All that can be wrong with the batches of a call. `share` must divide their tokens."""
    if isinstance(batches, Batch) or not isinstance(batches, Sequence):
        raise DataError("a step takes a list of batches: engine.step([batch])")
    if not batches:
        raise DataError("a step needs at least one batch")
    for batch in batches:
        if not isinstance(batch, Batch):
            raise DataError(f"a batch must be made by mw.pack, not a {type(batch).__name__}")
        _check_batch(batch, vocab, share)
    sizes = sorted({len(batch) for batch in batches})
    if len(sizes) > 1:
        raise DataError(f"the batches of a step have {sizes} tokens; pack(..., length=) makes them equal")


def _check_batch(batch: Batch, vocab: int, share: int) -> None:
    if len(batch) % share:
        fit = -(-len(batch) // share) * share
        raise DataError(
            f"a batch of {counted(len(batch), 'token')} does not divide into cp*tp={share}; pack(..., length={fit})"
        )
    if batch.tokens.is_inference():
        raise DataError("a batch was packed under torch.inference_mode(), so no step can use it. Pack it outside")
    weights = batch.fields.get(WEIGHT)
    if weights is not None and not weights.isfinite().all():
        at = int((~weights.isfinite()).nonzero()[0])
        raise DataError(f"the weight at position {at} is {float(weights[at])}; weights must be finite numbers")
    for what, values, lowest in (("token", batch.tokens, 0), ("label", batch.labels, IGNORE)):
        bad = (values < lowest) | (values >= vocab) | ((values < 0) & (values != lowest))
        if bad.any():
            at = int(bad.nonzero()[0])
            raise DataError(f"{what} {int(values[at])} at position {at} is outside the vocabulary of {vocab}")


def check_prompts(prompts: object, tokens: object, vocab: int, longest: int | None) -> None:
    """What a model is to go on from. `longest`: the positions that it knows."""
    if type(tokens) is not int or tokens < 1:
        raise ConfigError(f"tokens={tokens!r:.80} must be a whole number above 0: of what is written after each prompt")
    if not isinstance(prompts, Sequence) or isinstance(prompts, str) or not prompts:
        raise DataError("prompts must be a list of lists of token ids, such as [[5, 6, 7]]")
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, str) or not isinstance(prompt, Sequence) or not all(type(each) is int for each in prompt):
            raise DataError(f"prompt {number} is no list of token ids; give those that a tokenizer makes of a text")
        if not prompt:
            raise DataError(f"prompt {number} is empty; a model needs a token to go on from")
        if not all(0 <= token < vocab for token in prompt):
            raise DataError(f"prompt {number} has a token outside the vocabulary of {vocab}")
        if longest is not None and len(prompt) + tokens > longest:
            raise DataError(
                f"prompt {number} has {counted(len(prompt), 'token')}, and with the {tokens} after it more than the "
                f"{longest} positions of the model; take a shorter prompt, or fewer tokens"
            )


def check_no_places(prompts: Sequence[Sequence[int]], places: Sequence[int]) -> None:
    """Nothing shows a sample a picture: the model would read the embedding of the token that stands for one."""
    for number, prompt in enumerate(prompts):
        if found := sorted({*prompt} & {*places}):
            raise DataError(f"prompt {number} has the token {found[0]}, which stands for a picture; samples see none")


def check_top_p(top_p: object) -> None:
    if top_p is not None and (not within(top_p, 0) or not 0 < top_p <= 1):  # type: ignore[operator] # `within` has looked
        raise ConfigError(
            f"top_p={top_p!r:.80} must be a number above 0, and at most 1; None takes the likeliest token"
        )


def check_terms(terms: object, num_tokens: int) -> None:
    """What a user's loss gave."""
    if not isinstance(terms, Tensor) or terms.shape != (num_tokens,):
        gave = tuple(terms.shape) if isinstance(terms, Tensor) else type(terms).__name__
        raise DataError(f"the loss gave {gave} for {(num_tokens,)} tokens; it must give one term a token")
    if not terms.is_floating_point():
        raise DataError(f"the loss gave {terms.dtype}; its terms must be floating point numbers")


_UNTRAINED = (
    "the loss depends on no trained parameter: torch.no_grad() is on, or train= of mw.load leaves out all that it "
    "depends on"
)


def check_trains(trained: Sequence[str]) -> None:
    """Before a step, on all ranks: in a pipeline those without the loss would wait for a gradient."""
    if not trained or not torch.is_grad_enabled():
        raise StateError(_UNTRAINED)


def check_trainable(loss: Tensor) -> None:
    if not loss.requires_grad:
        raise StateError(_UNTRAINED)


def check_differentiable(terms: Tensor, scores: Iterable[Tensor]) -> None:
    if any(x.requires_grad for x in scores) and not terms.requires_grad:
        raise StateError("the terms of the loss depend on none of its scores: they are detached, or constant")


def check_complete(grads: Container[str], trainable: Sequence[str]) -> None:
    """Every trained parameter has a gradient; zeros, if it was not used."""
    lacking = [name for name in trainable if name not in grads]
    if lacking:
        none_has = "FSDP was kept from its sums over fsdp, or from those over replicate that end a step"
        raise StateError(
            f"{lacking[0]} got no gradient, and so {len(lacking)} of {len(trainable)} parameters; each must: "
            + (none_has if len(lacking) == len(trainable) else "zeros if it is unused")
        )


def check_read(fields: set[str]) -> None:
    """Refuse a field that must be meant to weigh the terms, but that neither the loss nor the engine has read."""
    for name in sorted(fields & {*_PADDING}):
        raise DataError(
            f"nobody reads the field {name!r}: documents are packed without padding, which would be learnt; cut it off "
            "and leave the field out"
        )
    for name in sorted(fields & {*_MEANT}):
        raise DataError(
            f"nobody reads the field {name!r}: the loss did not ask for it, and the field that weighs the terms is "
            f"{WEIGHT!r}; rename it, or leave it out"
        )


def check_by_token(loss: Callable[[slice], Tensor], num_tokens: int, has_term_T: Tensor, way_out: str) -> None:
    """A loss must give the same terms for a half of the tokens, because a rank may have a part of a document."""
    half = num_tokens // 2
    whole_T = loss(slice(None))
    try:
        both_T = torch.cat([loss(slice(0, half)), loss(slice(half, None))])
    except Exception as error:
        raise DataError(f"the loss fails on a part of its tokens ({error}); {way_out}") from error
    same_T = torch.isclose(both_T, whole_T, rtol=1e-4, atol=1e-5, equal_nan=True)
    if not (same_T | ~has_term_T).all():
        raise DataError(f"the loss of a token depends on others; {way_out}")
