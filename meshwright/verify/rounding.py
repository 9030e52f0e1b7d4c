"""Measure the bfloat16 rounding error of each part of a model, ours and transformers', against float64 (oracle R1).

A bfloat16 run is followed by a float64 run with the same weights. In the second run each part gets its input from the
first, and in backward the gradient of its output. So the difference is the rounding of that part alone, not that of the
parts before it. The medians hardly change when a few tokens go to other experts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .results import Finding, Margin, Notes

# For each kind: a factor of the error that bfloat16 causes in transformers, and a constant that is added. Rounding one
# value to bfloat16, with its 8 significant bits, causes a relative error of 1.6e-3 (root mean square).
_ALLOWED = {"forward": (1.25, 2e-4), "backward": (1.25, 2e-4), "scale": (2.0, 2e-4), "gradient": (2.0, 1e-3)}
_KINDS = {
    "forward": "outputs", "backward": "gradients of inputs", "scale": "scales of features", "gradient": "gradients",
}  # fmt: skip

_LEAST = 16  # rows or elements of a gradient: with fewer, such as 8 heads, the median is a matter of chance

Parts = Sequence[tuple[str, nn.Module]]


@dataclass
class Pass:
    """The inputs and outputs of each part in one forward and backward. Lists: transformers runs once per document."""

    inputs: dict[str, list[Tensor]] = field(default_factory=dict)
    outputs: dict[str, list[Tensor]] = field(default_factory=dict)
    d_outputs: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    d_inputs: dict[str, dict[int, Tensor]] = field(default_factory=dict)  # through this part alone
    grads: dict[str, Tensor] = field(default_factory=dict)


@contextmanager
def followed(parts: Parts, before: Pass | None = None) -> Iterator[Pass]:
    """Record the inputs and outputs of parts. `before`: a run whose inputs and gradients replace those of this one.

    An input is replaced by adding a detached difference, so that gradients still flow to the parts before.
    """
    record = Pass()
    hooks = []
    for name, part in parts:
        hooks.append(part.register_forward_pre_hook(_input_hook(name, record, before), with_kwargs=True))
        hooks.append(part.register_forward_hook(_output_hook(name, record, before)))
    try:
        yield record
    finally:
        for hook in hooks:
            hook.remove()


def _input_hook(name: str, record: Pass, before: Pass | None) -> Callable[..., Any]:
    """Return a forward pre-hook that records a part's input and its gradient, and replaces the input."""

    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = args[0] if args else kwargs["hidden_states"]
        if not x.is_floating_point():  # tokens
            return args, kwargs
        values = record.inputs.setdefault(name, [])
        at, x = len(values), x.view_as(x)  # a view, whose gradient excludes that of the residual, which reads x too
        if before is not None:  # the value of the other run, in the autograd graph of this run
            x = x + (before.inputs[name][at].to(x.dtype) - x).detach()
        if x.requires_grad:
            x.register_hook(lambda d: record.d_inputs.setdefault(name, {}).__setitem__(at, d.detach()))
        values.append(x.detach())
        return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": x})

    return hook


def _output_hook(name: str, record: Pass, before: Pass | None) -> Callable[..., None]:
    """Return a forward hook that records a part's output, and records or replaces the gradient that reaches it."""

    def hook(_module: nn.Module, _args: Any, out: Any) -> None:
        y = out[0] if isinstance(out, tuple) else out
        values = record.outputs.setdefault(name, [])
        at = len(values)
        values.append(y.detach())
        if not y.requires_grad:
            return

        def replace_gradient(d: Tensor) -> Tensor | None:
            if before is not None:
                return before.d_outputs[name][at].to(d.dtype)
            record.d_outputs.setdefault(name, {})[at] = d.detach()
            return None

        y.register_hook(replace_gradient)

    return hook


@dataclass(frozen=True)
class Cost:
    """Errors of a bfloat16 run relative to float64, by module or key.

    `forward`: the median error of a token in the output of a part. `backward`: that of its input's gradient. `scale`:
    for norms, the error of a feature's scale over all tokens, in either direction. `gradient`: the median error of a
    row of a weight's gradient.
    """

    forward: dict[str, float]
    backward: dict[str, float]
    scale: dict[str, float]
    gradient: dict[str, float]


def cost_of(narrow: Pass, wide: Pass) -> Cost:
    """Compare a run in bfloat16 with the run in float64 that followed it."""
    outputs = {name: (_rows(narrow.outputs[name]), _rows(wide.outputs[name])) for name in wide.inputs}
    back = {name: (_by_call(narrow.d_inputs[name]), _by_call(wide.d_inputs[name])) for name in wide.d_inputs}
    norms = [name for name in outputs if name.endswith("norm")]
    return Cost(
        {name: _median(*pair) for name, pair in outputs.items()},
        {name: _median(*pair) for name, pair in back.items()},
        {name: max(_scale(*pairs[name]) for pairs in (outputs, back) if name in pairs) for name in norms},
        dict(_gradient_errors(narrow.grads, wide.grads)),
    )


def _gradient_errors(narrow: Mapping[str, Tensor], wide: Mapping[str, Tensor]) -> Iterator[tuple[str, float]]:
    """Yield the median error of each gradient that has enough rows."""
    for name, keys in _by_name(narrow).items():
        if narrow[keys[0]].shape[0] * len(keys) >= _LEAST:
            yield name, _median(*(_rows([grads[key] for key in keys]) for grads in (narrow, wide)))


def _by_call(several: Mapping[int, Tensor]) -> Tensor:
    """Concatenate in the order of forward calls: backward runs them in a different order."""
    return _rows([several[at] for at in sorted(several)])


def _rows(several: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.double().reshape(-1, x.shape[-1]) for x in several])


def _median(narrow: Tensor, wide: Tensor) -> float:
    """Return the median relative error of the rows that are not almost zero."""
    size = wide.norm(dim=-1)
    error = (narrow - wide).norm(dim=-1) / size
    return float(error[size > 1e-3 * size.max()].median()) if size.any() else 0.0


def _scale(narrow: Tensor, wide: Tensor) -> float:
    """Return by how much features as a whole are too large or too small.

    The factor of each feature is fitted over all tokens, so random rounding cancels but the error of a weight that was
    itself rounded, such as the 1 + w of a norm, does not.
    """
    factor_D = (narrow * wide).sum(0) / wide.square().sum(0)
    return float((factor_D - 1).abs().nan_to_num().median())


def _by_name(grads: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Group keys by name, all experts of a layer together: rounding may have sent a token to another expert."""
    together: dict[str, list[str]] = {}
    for key in grads:
        together.setdefault(re.sub(r"\.experts\.\d+\.", ".experts.*.", key), []).append(key)
    return together


def r1_rounding(ours: Cost, peer: Cost, notes: Notes) -> Iterator[Finding]:
    """In bfloat16 each part of the model, with the same input, is about as close to float64 as that of transformers.

    No fixed bound fits: what bfloat16 costs depends on the part and on the data. A part that rounds where it should
    compute in float32, as norms, softmax and the delta rule should, is off by much more than transformers' own.
    """
    for kind, what in _KINDS.items():
        factor, constant = _ALLOWED[kind]
        our_errors, peer_errors = vars(ours)[kind], vars(peer)[kind]
        for name in sorted(our_errors.keys() & peer_errors.keys()):
            error, peer_error = our_errors[name], peer_errors[name]
            notes.add_margin(Margin("R1", f"{what} in bfloat16", 1, error, factor * peer_error + constant, name))
            if not error <= factor * peer_error + constant:
                text = f"in bfloat16 its {what} are {error:.1e} off float64, those of transformers {peer_error:.1e}"
                yield Finding("R1", name, text, "it rounds to bfloat16 what should stay in float32")
