"""Measure the bfloat16 rounding error of each part of a model, ours and transformers', against float64.

A run in bfloat16 is followed by one in float64 with the same weights. There each part gets what it got in bfloat16, its
input in the forward and the gradient of its output in the backward. So the difference is what the part itself rounds,
not what came before it, and a few tokens that go to other experts count little in the medians.
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

# Of each kind: times what bfloat16 costs transformers, and beside that. One rounding of a value costs 1.6e-3.
_ALLOWED = {"forward": (1.25, 2e-4), "backward": (1.25, 2e-4), "scale": (2.0, 2e-4), "gradient": (2.0, 1e-3)}
_KINDS = {
    "forward": "outputs", "backward": "gradients of inputs", "scale": "scales of features", "gradient": "gradients",
}  # fmt: skip

_LEAST = 16  # rows or elements of a gradient: the error of fewer, such as those of 8 heads, is a matter of chance

Parts = Sequence[tuple[str, nn.Module]]


@dataclass
class Pass:
    """One forward and backward: what each part got and gave. Lists, since transformers takes document by document."""

    inputs: dict[str, list[Tensor]] = field(default_factory=dict)
    outputs: dict[str, list[Tensor]] = field(default_factory=dict)
    d_outputs: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    d_inputs: dict[str, dict[int, Tensor]] = field(default_factory=dict)  # of this part alone, not of what adds to it
    grads: dict[str, Tensor] = field(default_factory=dict)


@contextmanager
def followed(parts: Parts, before: Pass | None = None) -> Iterator[Pass]:
    """Record what parts get and give. `before`: a run whose inputs and gradients they get in place of their own."""
    seen = Pass()
    hooks = []
    for name, part in parts:
        hooks.append(part.register_forward_pre_hook(_getting(name, seen, before), with_kwargs=True))
        hooks.append(part.register_forward_hook(_giving(name, seen, before)))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _getting(name: str, seen: Pass, before: Pass | None) -> Callable[..., Any]:
    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = args[0] if args else kwargs["hidden_states"]
        if not x.is_floating_point():  # tokens
            return args, kwargs
        values = seen.inputs.setdefault(name, [])
        at, x = len(values), x.view_as(x)  # a residual that reads x too has a gradient of its own
        if before is not None:  # the value of the other run, and the graph of this one
            x = x + (before.inputs[name][at].to(x.dtype) - x).detach()
        if x.requires_grad:
            x.register_hook(lambda d: seen.d_inputs.setdefault(name, {}).__setitem__(at, d.detach()))
        values.append(x.detach())
        return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": x})

    return hook


def _giving(name: str, seen: Pass, before: Pass | None) -> Callable[..., None]:
    def hook(_module: nn.Module, _args: Any, out: Any) -> None:
        y = out[0] if isinstance(out, tuple) else out
        values = seen.outputs.setdefault(name, [])
        at = len(values)
        values.append(y.detach())
        if not y.requires_grad:
            return

        def came(d: Tensor) -> Tensor | None:
            if before is not None:
                return before.d_outputs[name][at].to(d.dtype)
            seen.d_outputs.setdefault(name, {})[at] = d.detach()
            return None

        y.register_hook(came)

    return hook


@dataclass(frozen=True)
class Cost:
    """Errors of a bfloat16 run against float64, by module or key."""

    forward: dict[str, float]  # the median error of a token
    backward: dict[str, float]  # the same of the gradient of what the part got
    scale: dict[str, float]  # of norms, of both: the error of a feature over all tokens, in which rounding averages out
    gradient: dict[str, float]  # the median error of a row of a matrix


def cost_of(narrow: Pass, wide: Pass) -> Cost:
    """Compare a run in bfloat16 with the one in float64 that followed it."""
    outputs = {name: (_rows(narrow.outputs[name]), _rows(wide.outputs[name])) for name in wide.inputs}
    back = {name: (_by_call(narrow.d_inputs[name]), _by_call(wide.d_inputs[name])) for name in wide.d_inputs}
    norms = [name for name in outputs if name.endswith("norm")]
    return Cost(
        {name: _median(*pair) for name, pair in outputs.items()},
        {name: _median(*pair) for name, pair in back.items()},
        {name: max(_scale(*pairs[name]) for pairs in (outputs, back) if name in pairs) for name in norms},
        dict(_of_gradients(narrow.grads, wide.grads)),
    )


def _of_gradients(narrow: Mapping[str, Tensor], wide: Mapping[str, Tensor]) -> Iterator[tuple[str, float]]:
    for name, keys in _alike(narrow).items():
        if narrow[keys[0]].shape[0] * len(keys) >= _LEAST:
            yield name, _median(*(_rows([grads[key] for key in keys]) for grads in (narrow, wide)))


def _by_call(several: Mapping[int, Tensor]) -> Tensor:
    return _rows([several[at] for at in sorted(several)])


def _rows(several: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.double().reshape(-1, x.shape[-1]) for x in several])


def _median(narrow: Tensor, wide: Tensor) -> float:
    """The error of a row, of those that are not all zero."""
    size = wide.norm(dim=-1)
    error = (narrow - wide).norm(dim=-1) / size
    return float(error[size > 1e-3 * size.max()].median()) if size.any() else 0.0


def _scale(narrow: Tensor, wide: Tensor) -> float:
    """By how much features as a whole are too large or too small."""
    factor_D = (narrow * wide).sum(0) / wide.square().sum(0)
    return float((factor_D - 1).abs().nan_to_num().median())


def _alike(grads: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Keys by their name, with the experts of a layer taken together: a token may have gone from one to another."""
    together: dict[str, list[str]] = {}
    for key in grads:
        together.setdefault(re.sub(r"\.experts\.\d+\.", ".experts.*.", key), []).append(key)
    return together


def r1_rounding(ours: Cost, theirs: Cost, notes: Notes) -> Iterator[Finding]:
    """In bfloat16 each part of the model, given the same, is about as near to float64 as that of transformers."""
    for kind, what in _KINDS.items():
        factor, beside = _ALLOWED[kind]
        of_ours, of_theirs = vars(ours)[kind], vars(theirs)[kind]
        for name in sorted(of_ours.keys() & of_theirs.keys()):
            error, peer = of_ours[name], of_theirs[name]
            notes.measured(Margin("R1", f"{what} in bfloat16", 1, error, factor * peer + beside, name))
            if not error <= factor * peer + beside:
                said = f"in bfloat16 its {what} are {error:.1e} off float64, those of transformers {peer:.1e}"
                yield Finding("R1", name, said, "it rounds to bfloat16 what should stay in float32")
