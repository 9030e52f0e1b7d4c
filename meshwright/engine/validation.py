"""Checks of arguments, data and results, before any work: pure functions of their arguments, without a model or mesh.

Each catches a mistake that would otherwise train silently on wrong numbers, or fail much later with an error of torch.
Messages name the argument, its value and the fix.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..data import IGNORE, NO_EXPERT, WEIGHT, Batch
from ..errors import ConfigError, DataError, StateError, counted
from ..mesh import Mesh
from ..models import Balance
from ..optim import Optimizer, within
from .loss import Loss

READ = ("rank", "node")
ON_NONFINITE = ("raise", "skip")
COMPUTE = (torch.bfloat16, torch.float32, torch.float64)
_SCHEDULE = "a function of the step, such as lambda step: 1e-5 * min(1, (step + 1) / 100)"
_PADDING_FIELDS = ("attention_mask", "padding_mask")  # packed documents need none
_WEIGHT_SYNONYMS = ("weights", "loss_weight", "loss_weights", "loss_mask")  # other libraries' names of the field WEIGHT

# Sorting the experts of a long batch takes most of a second, and scores and several steps take the same batch.
_checked_experts: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

_Function = TypeVar("_Function", bound=Callable[..., Any])


def show_fields_in_help(options: type[Any]) -> Callable[[_Function], _Function]:
    """Return a decorator: `help()` then shows the fields of a dataclass instead of a function's `**fields`."""

    def spell(function: _Function) -> _Function:
        own = inspect.signature(function)
        *named, _ = own.parameters.values()
        keyword = inspect.Parameter.KEYWORD_ONLY
        fields = [inspect.Parameter(f.name, keyword, default=f.default) for f in dataclasses.fields(options)]
        vars(function)["__signature__"] = own.replace(parameters=[*named, *fields])
        return function

    return spell


def check_loading(mesh: object, dtype: object, read: str = "rank") -> None:
    """Refuse arguments of `load` or `init` of the wrong type or value."""
    check_inference_mode()
    if not isinstance(mesh, Mesh | None):
        raise ConfigError(f"mesh={mesh!r} is not a mesh; give mw.Mesh(fsdp=4), or nothing for one process")
    if dtype not in (None, *COMPUTE):
        raise ConfigError(f"dtype={dtype!r} is not supported; choose from {', '.join(map(str, COMPUTE))}")
    if read not in READ:
        raise ConfigError(f"read={read!r} is unknown; choose from {', '.join(READ)}")


def check_unquantised(config: Container[str]) -> None:
    """Refuse a quantised config for new weights, which are not quantised."""
    if "quantization_config" in config:
        raise ConfigError(
            "config.json has a quantization_config, but new weights are not quantised, so their export would be read "
            "wrongly; remove it from config.json"
        )


def check_inference_mode() -> None:
    """Refuse to run under `torch.inference_mode()`: autograd rejects its tensors in a later step."""
    if torch.is_inference_mode_enabled():
        raise StateError(
            "torch.inference_mode() is on, and later steps cannot use tensors created under it. Leave it out: "
            "logprobs, logits and evaluate compute no gradients anyway"
        )


def check_autocast(device: str) -> None:
    """Refuse to run under `torch.autocast`: it would round norms, softmax and the router, which stay in float32."""
    if torch.is_autocast_enabled(device):
        raise StateError(
            f"torch.autocast({device!r}) is on, and would round what must stay in float32. "
            "Leave it out: dtype= of mw.load sets the compute dtype"
        )


def check_engine(lr: object, loss: object, entropy: object, temperature: object, on_nonfinite: object) -> None:
    """Refuse arguments of `Engine` of the wrong type or range. A schedule is checked in each step, by `lr_of_step`."""
    check_temperature(temperature)
    check_on_nonfinite(on_nonfinite)
    if not callable(lr) and not within(lr, 0):
        raise ConfigError(f"lr={lr!r:.80} must be a number of 0 or more, or {_SCHEDULE}")
    if not callable(loss) and not isinstance(loss, Loss):
        raise ConfigError(f"loss={loss!r} must be a function of scores and fields, such as mw.losses.cross_entropy")
    if not isinstance(entropy, bool):
        raise ConfigError(f"entropy={entropy!r} must be True or False")


def check_optimizer(optimizer: object) -> None:
    """Refuse anything but a `mw.Optimizer`, such as an optimizer of `torch.optim`."""
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"optimizer={optimizer!r:.80} is not a mw.Optimizer; give mw.AdamW(betas=(0.9, 0.95)), or a subclass of "
            "mw.Optimizer"
        )


def lr_of_step(lr: object, step: int) -> float:
    """Return the learning rate of a step as a float. Refuse what is not a number of 0 or more, such as NaN."""
    # Schedules often return a tensor of one element, or a numpy number.
    number = lr.item() if isinstance(lr, Tensor) and lr.numel() == 1 else lr
    if not isinstance(number, Real) or not within(float(number), 0):
        raise ConfigError(f"lr of step {step} is {lr!r}; it must be a number of 0 or more")
    return float(number)


def norm_bound(max_norm: object) -> float | None:
    """Return the bound of gradient clipping as a float, or None for no clipping."""
    if max_norm is None:
        return None
    if not within(max_norm, 0) or max_norm == 0:
        raise ConfigError(f"max_norm={max_norm!r} must be a number above 0, or None")
    return float(max_norm)  # type: ignore[arg-type] # `within` has looked


def check_batches(batches: object, vocab: int, share: int) -> None:
    """Refuse batches of the wrong type, of unequal lengths, or with values out of range. `share`, cp x tp, must divide
    their length, because these ranks split a batch evenly."""
    if not isinstance(batches, Sequence):
        raise DataError("step, backward and evaluate take a list of batches: engine.step([batch])")
    if not batches:
        raise DataError("a step needs at least one batch")
    for batch in batches:
        if not isinstance(batch, Batch):
            raise DataError(f"a batch must be made by mw.pack, not a {type(batch).__name__}")
        _check_batch(batch, vocab, share)
    sizes = sorted({len(batch) for batch in batches})
    if len(sizes) > 1:
        raise DataError(f"the batches of a step have {sizes} tokens; pack them to one length: pack(..., length=)")


def _check_batch(batch: Batch, vocab: int, share: int) -> None:
    """Refuse one batch with values out of range. A token beyond the vocabulary would crash a kernel on a device, with
    an error that names no token."""
    if len(batch) % share:
        fit = -(-len(batch) // share) * share
        raise DataError(
            f"a batch of {counted(len(batch), 'token')} does not divide into cp*tp={share}; pack(..., length={fit})"
        )
    if batch.tokens.is_inference():
        raise DataError("a batch was packed under torch.inference_mode(), so no step can use it; pack it outside of it")
    # A weight of NaN or infinity would make the divisor of the whole step NaN, and name no position.
    weights = batch.fields.get(WEIGHT)
    if weights is not None and weights.dim() > 1:
        tokens = counted(len(batch), "token")
        raise DataError(f"the field {WEIGHT!r} has shape {tuple(weights.shape)} for {tokens}; give one weight a token")
    if weights is not None and not weights.isfinite().all():
        at = int((~weights.isfinite()).nonzero()[0])
        raise DataError(f"the weight at position {at} is {float(weights[at])}; weights must be finite numbers")
    # The only negative number with a meaning is the label -100.
    for what, values, lowest in (("token", batch.tokens, 0), ("label", batch.labels, IGNORE)):
        bad = (values < lowest) | (values >= vocab) | ((values < 0) & (values != lowest))
        if bad.any():
            at = int(bad.nonzero()[0])
            raise DataError(f"{what} {int(values[at])} at position {at} is outside the vocabulary of {vocab}")


def check_given_experts(batches: Sequence[Batch], balance: Balance) -> None:
    """Refuse expert choices of another shape than the model's, out of range, or with one expert twice for a token."""
    shape = (balance.num_layers, balance.top_k)
    for batch in batches:
        if batch.experts is None:
            continue
        seen = (batch.experts._version, shape, balance.num_experts)
        if _checked_experts.get(batch.experts) == seen:
            continue
        if not balance.num_layers:
            raise DataError("the batch has choices of experts, but the model has no experts; leave experts= out")
        if batch.experts.shape[1:] != shape:
            raise DataError(
                f"experts of the batch has shape {tuple(batch.experts.shape[1:])} per token, and the model has "
                f"{balance.num_layers} layers with experts and {balance.top_k} experts per token"
            )
        sorted_TLk = batch.experts.sort(-1).values
        none, bad = (sorted_TLk == NO_EXPERT).all(-1), (sorted_TLk < 0) | (sorted_TLk >= balance.num_experts)
        wrong_TL = ~none & (bad.any(-1) | (sorted_TLk[..., 1:] == sorted_TLk[..., :-1]).any(-1))
        if wrong_TL.any():
            token, layer = wrong_TL.nonzero()[0].tolist()
            raise DataError(
                f"token {token} has the experts {batch.experts[token, layer].tolist()} in layer {layer} of those with "
                f"experts; they must be {balance.top_k} different ones of 0..{balance.num_experts - 1}, or all -1"
            )
        _checked_experts[batch.experts] = seen


def check_prompts(prompts: object, tokens: object, vocab: int, longest: int | None) -> None:
    """Refuse prompts that a model cannot continue. `longest`: the number of positions that it was built for."""
    if type(tokens) is not int or tokens < 1:
        raise ConfigError(f"tokens={tokens!r:.80} must be a whole number above 0: how many to generate per prompt")
    if not isinstance(prompts, Sequence) or isinstance(prompts, str) or not prompts:
        raise DataError("prompts must be a list of lists of token ids, such as [[5, 6, 7]]")
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, str) or not isinstance(prompt, Sequence) or not all(type(each) is int for each in prompt):
            raise DataError(f"prompt {number} is not a list of token ids; give the token ids of a tokenizer")
        if not prompt:
            raise DataError(f"prompt {number} is empty; give at least one token to continue from")
        if not all(0 <= token < vocab for token in prompt):
            raise DataError(f"prompt {number} has a token outside the vocabulary of {vocab}")
        if longest is not None and len(prompt) + tokens > longest:
            raise DataError(
                f"prompt {number} has {counted(len(prompt), 'token')}, and with the {tokens} after it more than the "
                f"{longest} positions of the model; take a shorter prompt, or fewer tokens"
            )


def check_no_placeholders(prompts: Sequence[Sequence[int]], places: Sequence[int]) -> None:
    """Refuse image placeholders in prompts: `sample` takes no images, so the model would read the embedding of the
    placeholder itself."""
    for number, prompt in enumerate(prompts):
        if placeholders := sorted({*prompt} & {*places}):
            raise DataError(
                f"prompt {number} has the token {placeholders[0]}, which stands for an image; samples take text only"
            )


def check_temperature(temperature: object, scores: Container[str] = ("logprobs",)) -> None:
    """Refuse a temperature that logits cannot be divided by, or for a head that has no logits."""
    if not isinstance(temperature, Real) or not within(float(temperature), 0) or not temperature:
        raise ConfigError(
            f"temperature={temperature!r:.80} must be a number above 0, such as that of the sampler; by default 1"
        )
    if temperature != 1 and "logprobs" not in scores:
        raise ConfigError(
            f"temperature={temperature} divides logits, and the head of this model has none; leave it out"
        )


def check_candidates(loss: Loss, temperature: float, scores: Container[str]) -> None:
    """Refuse a loss of candidates for a head that predicts no tokens, or with a temperature of its own next to the
    engine's."""
    if not loss.candidates:
        return
    if "logprobs" not in scores:
        raise ConfigError(
            f"the loss scores the candidates of {loss.candidates!r}, and the head of this model predicts no tokens"
        )
    if loss.candidate_temperature is None:
        return
    check_temperature(loss.candidate_temperature)
    if temperature != 1:
        raise ConfigError(
            f"the engine has temperature={temperature} and the loss candidate_temperature="
            f"{loss.candidate_temperature}, which leaves log-probabilities of labels at 1; leave one of them out"
        )


def check_candidate_ids(batches: Sequence[Batch], candidates: str, vocab: int) -> None:
    """Refuse candidates that are missing or outside of the vocabulary, and a token with a label and no candidate: its
    term would be meaningless, without an error."""
    for batch in batches if candidates else ():
        if candidates not in batch.fields:
            raise DataError(
                f"the batch has no field {candidates!r}, whose candidates the loss scores; add it by with_fields"
            )
        ids_TK = batch.fields[candidates]
        if ids_TK.dim() != 2 or ids_TK.dtype not in (torch.int64, torch.int32):
            raise DataError(f"{candidates!r} is {ids_TK.dtype} {tuple(ids_TK.shape)}; give whole numbers [tokens, K]")
        bad_TK = (ids_TK < -1) | (ids_TK >= vocab)
        if bad_TK.any():
            token, at = bad_TK.nonzero()[0].tolist()
            raise DataError(
                f"candidate {int(ids_TK[token, at])} of {candidates!r} at token {token} is outside the vocabulary of "
                f"{vocab}; -1 is no candidate"
            )
        none_T = (ids_TK < 0).all(-1) & batch.is_target_T.to(ids_TK.device)
        if none_T.any():
            token = int(none_T.nonzero()[0])
            raise DataError(f"token {token} has a label, and no candidate in {candidates!r}; give one or more")


def check_on_nonfinite(value: object) -> None:
    """Refuse an unknown way to treat a step that is not finite."""
    if value not in ON_NONFINITE:
        raise ConfigError(f"on_nonfinite={value!r:.80} is unknown; choose from {', '.join(ON_NONFINITE)}")


def check_num_top(k: object, vocab: int) -> None:
    """Refuse a k that is not from 1 to the size of the vocabulary."""
    if type(k) is not int or not 0 < k <= vocab:
        raise ConfigError(f"k={k!r:.80} must be a whole number from 1 to the {vocab} tokens of the vocabulary")


def check_top_p(top_p: object) -> None:
    """Refuse a `top_p` that is not a probability above 0."""
    if top_p is not None and (not within(top_p, 0) or not 0 < top_p <= 1):  # type: ignore[operator] # `within` has looked
        raise ConfigError(
            f"top_p={top_p!r:.80} must be a number above 0, and at most 1; None chooses the likeliest token"
        )


def check_terms(terms: object, shape: tuple[int, ...], per: str) -> None:
    """Refuse the result of a user's loss unless it is one floating-point number per unit, as `per` says."""
    if not isinstance(terms, Tensor) or terms.shape != shape:
        result = tuple(terms.shape) if isinstance(terms, Tensor) else type(terms).__name__
        hint = ' (for a loss of whole documents: mw.Loss(..., per="document"))' if per == "token" else ""
        if per == "micro_batch":
            raise DataError(f"the loss returned {result}; a loss per micro_batch must return one number")
        raise DataError(f"the loss returned {result} for {shape} {per}s; it must return one term per {per}{hint}")
    if not terms.is_floating_point():
        raise DataError(f"the loss returned {terms.dtype}; its terms must be floating point numbers")


def check_metrics(metrics: object, names: Sequence[str], terms: Tensor) -> None:
    """Refuse metrics of a loss with other names than it declared, or of another shape than its terms."""
    if not isinstance(metrics, Mapping) or {*metrics} != {*names}:
        returned = sorted(metrics) if isinstance(metrics, Mapping) else type(metrics).__name__
        raise DataError(
            f"the loss returned the metrics {returned}, and metrics={(*names,)} names others; return (terms, "
            "{name: values}) with exactly these names"
        )
    for name, values in metrics.items():
        if not isinstance(values, Tensor) or values.shape != terms.shape:
            result = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise DataError(f"the metric {name!r} of the loss has shape {result}, and its terms {tuple(terms.shape)}")


_UNTRAINED = (
    "the loss depends on no trained parameter: torch.no_grad() is on, or train= of mw.load excludes all parameters "
    "that it depends on"
)


def check_trains(trained: Sequence[str], *, in_base: bool = False) -> None:
    """Refuse a step without anything to train. It runs on all ranks before the step: in a pipeline, only the last stage
    sees the loss, and the other stages would wait for its gradient."""
    if in_base:
        raise StateError("model.base() switches the adapters off, so nothing would train them; leave it before a step")
    if not trained or not torch.is_grad_enabled():
        raise StateError(_UNTRAINED)


def check_trainable(loss: Tensor) -> None:
    """Refuse a loss that no gradient flows from."""
    if not loss.requires_grad:
        raise StateError(_UNTRAINED)


def check_differentiable(terms: Tensor, scores: Iterable[Tensor]) -> None:
    """Refuse terms without a gradient, although the scores have one."""
    if any(x.requires_grad for x in scores) and not terms.requires_grad:
        raise StateError("the terms of the loss depend on none of its scores: they are detached, or constant")


def check_complete(grads: Container[str], trainable: Sequence[str]) -> None:
    """Refuse an update unless every trained parameter has a gradient, zeros if it is unused.

    A missing one means that someone switched FSDP's reduction off or set `grad = None`. The parameter would silently
    stay as it is.
    """
    missing = [name for name in trainable if name not in grads]
    if missing:
        all_missing = "the reduce-scatter of FSDP over fsdp, or its all-reduce over replicate, did not run"
        raise StateError(
            f"{missing[0]} has no gradient, like {len(missing)} of {len(trainable)} parameters; each needs one: "
            + (all_missing if len(missing) == len(trainable) else "zeros if it is unused")
        )


def check_read(fields: set[str], per: str = "token") -> None:
    """Refuse an unread field whose name says that it should mask or weigh the terms.

    Other libraries read such fields. Ignoring one would train on padding, or with weights of 1, without an error.
    """
    for name in sorted(fields & {*_PADDING_FIELDS}):
        raise DataError(
            f"the field {name!r} is not read: documents are packed without padding, and padding inside a document "
            "would be trained on; cut it off and leave the field out"
        )
    if per != "token" and WEIGHT in fields:
        raise DataError(
            f"the field {WEIGHT!r} is not read: it weighs the terms of a loss per token, and this one is per {per}; "
            "read it in the loss, or leave it out"
        )
    for name in sorted(fields & {*_WEIGHT_SYNONYMS}):
        raise DataError(
            f"the field {name!r} is not read: the loss does not use it, and the field that weighs the terms is "
            f"{WEIGHT!r}; rename it, or leave it out"
        )


def check_by_token(loss: Callable[[slice], Tensor], has_term_T: Tensor) -> None:
    """Refuse a loss whose terms change if it runs on every second token alone: a rank may have part of a document.

    `loss` returns the terms of a slice of tokens.
    """
    hint = (
        'a rank may have only a part of a document. Give mw.Loss(..., per="document"), whose function gets whole '
        "documents on any mesh; or compute values of a document before the step (mw.logprobs) and pass them as a field"
    )
    if len(has_term_T) < 2:
        return
    whole_T, parts_T = loss(slice(None)), torch.empty_like(has_term_T, dtype=torch.float64)
    try:
        for rows in (slice(0, None, 2), slice(1, None, 2)):
            parts_T[rows] = loss(rows).double()
    except Exception as error:
        raise DataError(f"the loss fails on a part of its tokens ({error}); {hint}") from error
    # Positions without a term are ignored: their scores may be anything.
    if not (_is_same(parts_T, whole_T) | ~has_term_T).all():
        raise DataError(f"the loss of a token depends on other tokens; {hint}")


def check_apart(loss: Callable[[Sequence[int]], Tensor], has_target: Tensor, per: str) -> None:
    """Refuse a loss whose terms change if it runs on a part of the documents or groups of a micro-batch: its value
    would depend on how documents are packed.

    `loss` returns the terms of some of them.
    """
    num, hint = len(has_target), (
        "what belongs together is a group: give mw.batches(groups=) and per=\"group\", or per=\"micro_batch\" for a "
        "loss that you divide yourself"
    )  # fmt: skip
    whole, parts = loss(range(num)), torch.empty_like(has_target, dtype=torch.float64)
    try:
        for first in (0, 1):
            parts[first::2] = loss(range(first, num, 2)).double()
    except Exception as error:
        raise DataError(f"the loss fails on a part of its {per}s ({error}); {hint}") from error
    if not (_is_same(parts, whole) | ~has_target).all():
        raise DataError(f"the loss of a {per} depends on other {per}s of its micro-batch; {hint}")


def _is_same(parts: Tensor, whole: Tensor) -> Tensor:
    """Compare terms with a tolerance for other kernels on other shapes."""
    return torch.isclose(parts, whole.double(), rtol=1e-4, atol=1e-5, equal_nan=True)
