"""Q1: compare each FP8 matmul with its definition, on one process and on every rank.

One process and the ranks run the same code, so comparing them would not show a mistake in the matmul itself. The
definition divides each block of an operand by its scale, rounds to E4M3 by a table of all values, multiplies by the
scale again, and multiplies the matrices in float64. Blocks are those of DeepSeek-V3 (arXiv:2412.19437): 1 x 128 for
activations, 128 x 128 for weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..data import Batch
from ..engine import Engine, Model
from ..ops.deferred_weight_grads import is_deferring
from ..ops.experts import _LoopedLinear
from ..ops.fp8_matmul import block_amax, scales_of
from ..ops.fp8_tensor import Fp8, Quantised
from ..ops.matmul import _Linears
from ..ops.norms import upcast
from .results import Finding, Margin, Notes

# Relative to the norm of a result. Rounding a result to bfloat16 costs 1.6e-3; FP8 costs ten times that.
_ALLOWED = {torch.float64: 1e-9, torch.bfloat16: 4e-3}
_MATCHES = {torch.float64: 1e-6, torch.bfloat16: 4e-3}  # the distance to a matmul with a known mistake
# All magnitudes of E4M3: subnormal numbers below 2^-6, then 8 per power of two. The last code is NaN, so 448 is the
# largest value.
_SIZES = [k / 8 * 2.0**-6 for k in range(8)] + [(1 + k / 8) * 2.0**e for e in range(-6, 9) for k in range(8)][:-1]
_VALUES = torch.tensor(_SIZES, dtype=torch.float64, device="cpu")

Rounding = Callable[[Tensor], Tensor]


def nearest(quotients: Tensor) -> Tensor:
    """Round each element to the nearest E4M3 value, and a tie to the even code (IEEE 754's default)."""
    size = quotients.float().double().abs().clamp(max=_SIZES[-1])
    above = torch.searchsorted(_VALUES, size).clamp(max=len(_SIZES) - 1)
    below = (above - 1).clamp(min=0)
    up, down = _VALUES[above] - size, size - _VALUES[below]
    takes_up = (up < down) | ((up == down) & (above % 2 == 0))
    return torch.where(takes_up, _VALUES[above], _VALUES[below]).copysign(quotients)


def rounded(x: Tensor, block: tuple[int, int], *, multiplied: bool = False) -> Tensor:
    """Quantise a matrix to FP8 with a scale per block, and dequantise it. `multiplied`: make the mistake of
    `_multiplied`."""
    (rows, columns), (height, width) = x.shape, block
    scales = x.abs().view(rows // height, height, columns // width, width).amax((1, 3)) / _SIZES[-1]
    scales = scales.where(scales > 0, 1.0).repeat_interleave(height, 0).repeat_interleave(width, 1)
    return nearest(x * scales if multiplied else x / scales) * scales


def _rows(x: Tensor) -> Tensor:
    """Round activations: a scale for each 128 features of a token."""
    return rounded(x, (1, 128))


def _columns(x: Tensor) -> Tensor:
    """Round with a known mistake: blocks of 128 tokens of one feature."""
    short = -len(x) % 128
    return rounded(torch.nn.functional.pad(x, (0, 0, 0, short)), (128, 1))[: len(x)]


def _plain(x: Tensor) -> Tensor:
    """Widen without rounding."""
    return x.double()


def _matrix(weight: Tensor) -> Tensor:
    """Round a weight: a scale for each block of 128 x 128."""
    return rounded(weight, (128, 128))


def _shard(weight: Tensor) -> Tensor:
    """Round with a known mistake: each of two shards of a block has a scale."""
    return rounded(weight, (64, 128))


def _multiplied(weight: Tensor) -> Tensor:
    """Round with a known mistake: the scale multiplies before rounding, where it should divide."""
    return rounded(weight, (128, 128), multiplied=True)


# Known mistakes: the guess, and how each would round the two operands. `{}` stands for the operand.
_MISTAKES: tuple[tuple[str, Rounding, Rounding], ...] = (
    ("nothing is rounded", _plain, _plain),
    ("the weight is not rounded", _rows, _plain),
    ("{} is not rounded", _plain, _matrix),
    ("{} is rounded along the wrong side", _columns, _matrix),
    ("scales multiply where they divide", _rows, _multiplied),
    ("half a block has a separate scale, as of a shard", _rows, _shard),
)

# The gradient of a weight is a matmul in the compute dtype: rounding it is the mistake.
_OF_WEIGHT = (("its operands are rounded, and should not be", _rows, _rows),)


@dataclass
class Fp8Matmul:
    """One FP8 matmul: its operands, its result, and the gradients of a backward pass.

    `name`: the parameter, or the first of several joined ones. `y`: the result without bias. `gradients`: those of "y",
    "x" and "weight", as far as they exist.
    """

    name: str
    x: Tensor
    weight: Tensor
    y: Tensor
    gradients: dict[str, Tensor] = field(default_factory=dict)


def q1_matmuls(engine: Engine, batches: Sequence[Batch], notes: Notes) -> Iterator[Finding]:
    """The FP8 matmuls are those that `fp8=` selects, and equal their definition, forward and backward.

    If a result is off, the matmul is computed once more with each known mistake. A mistake that gives the same result
    is named as the likely cause.
    """
    selected = engine.model.blueprint.spec.fp8 & engine.model.pieces.keys()
    with watch_fp8(engine.model) as watch:
        engine.backward(batches)
        engine.discard()
    for name in sorted(watch.names - selected):
        yield Finding(
            "Q1", name, "its matmul is in FP8, but fp8= does not select it", "a matmul takes no notice of fp8="
        )
    for name in sorted(selected - watch.names):
        yield Finding("Q1", name, "its matmul is not in FP8, but fp8= selects it", "a matmul takes no notice of fp8=")
    yield from (_of_scales(name, *each) for name, each in watch.scales.items() if not torch.equal(*each))
    worst, where, num, dtype = 0.0, "", 0, engine.model.dtype
    for matmul in watch.matmuls():
        for what, actual, expected, with_mistake in _compared(matmul):
            num, error = num + 1, _off(actual, expected)
            worst, where = max((worst, where), (error, f"{what} of {matmul.name}"))
            if not error <= _ALLOWED[dtype]:
                known = _OF_WEIGHT if what == "dW" else _MISTAKES
                matches = (text for text, q1, q2 in known if _off(actual, with_mistake(q1, q2)) < _MATCHES[dtype])
                guess = next(matches, "").format("x" if what == "y" else "dy")
                yield Finding("Q1", matmul.name, f"{what} is off by {error:.1e} of its norm", guess)
    notes.add_margin(Margin("Q1", "FP8 matmuls and their gradients", num, worst, _ALLOWED[dtype], where))


def _of_scales(name: str, actual: Tensor, expected: Tensor) -> Finding:
    """Return the finding for wrong scales. A shard with some rows of a block takes a scale that is too small, because
    its largest value is at most that of all rows; without rows it takes the scale 1."""
    of_some = bool(((actual <= expected) | (actual == 1)).all())
    detail = (
        f"{int((actual != expected).sum())} of {expected.numel()} scales are not those of the values that ranks store"
    )
    return Finding("Q1", name, detail, "a block has the scale of some of its rows, as of a shard" if of_some else "")


def _off(actual: Tensor, expected: Tensor) -> float:
    """Return the distance of two results, relative to the norm of the expected one."""
    return float((actual - expected).norm() / (expected.norm() or 1.0))


def _compared(matmul: Fp8Matmul) -> Iterator[tuple[str, Tensor, Tensor, Callable[[Rounding, Rounding], Tensor]]]:
    """Yield each result of a matmul: its name, the actual result, the definition, and the result for operands rounded
    by two other functions.

    y = x W^T and dx = dy W take rounded operands. dW = dy^T x takes them unrounded.
    """
    x, weight, grads = _wide(matmul.x), _wide(matmul.weight), matmul.gradients
    yield "y", matmul.y.cpu(), _rows(x) @ _matrix(weight).mT, lambda q1, q2: q1(x) @ q2(weight).mT
    if "y" not in grads:
        return
    d = _wide(grads["y"])
    if "x" in grads:
        yield "dx", grads["x"].cpu(), _rows(d) @ _matrix(weight), lambda q1, q2: q1(d) @ q2(weight)
    if "weight" in grads:
        yield "dW", grads["weight"].cpu(), _plain(d).mT @ _plain(x), lambda q1, _: q1(d).mT @ q1(x)


def _wide(operand: Tensor) -> Tensor:
    """Widen an operand: scales are computed in at least float32."""
    return upcast(operand).cpu()


@dataclass
class _Call:
    """A call of a matmul op, with several joined weights or with the experts of a rank."""

    names: Sequence[str]
    x: Tensor
    weights: Sequence[Tensor]
    bias: Tensor | None
    counts: Sequence[int] | None  # number of rows of each expert
    y: Tensor = field(init=False)
    gradients: dict[object, Tensor] = field(default_factory=dict)  # of "y", "x" and the weights by their number

    def watch(self, name: object, tensor: Tensor) -> Tensor:
        """Return a view of a tensor whose gradient, that of this matmul alone, is stored."""
        if not tensor.requires_grad:
            return tensor
        view = tensor.view_as(tensor)
        view.register_hook(lambda grad: self.gradients.__setitem__(name, grad.clone()))
        return view

    def matmuls(self) -> Iterator[Fp8Matmul]:
        """Yield the matmuls of the call: one for joined weights, and one for each expert with rows."""
        x, y, grads = self.x.flatten(0, -2), self.y.flatten(0, -2), dict(self.gradients)
        y = y.double() if self.bias is None else y.double() - self.bias
        for name in {"x", "y"} & grads.keys():
            grads[name] = grads[name].flatten(0, -2)
        if self.counts is None:
            weights = [grads.get(i, torch.zeros_like(w)) for i, w in enumerate(self.weights)]
            whole = {"weight": torch.cat(weights)} if grads.keys() - {"x", "y"} else {}
            yield Fp8Matmul(self.names[0], x, torch.cat([*self.weights]), y, {**_named(grads), **whole})
            return
        end = 0
        for expert, count in enumerate(self.counts):
            rows, end = slice(end, end + count), end + count
            of_expert = {name: grad[rows] for name, grad in _named(grads).items()}
            of_expert |= {"weight": grads[0][expert]} if 0 in grads else {}
            if count:
                yield Fp8Matmul(
                    f"{self.names[0]} of expert {expert}", x[rows], self.weights[0][expert], y[rows], of_expert
                )


def _named(gradients: Mapping[object, Tensor]) -> dict[str, Tensor]:
    return {name: grad for name, grad in gradients.items() if isinstance(name, str)}


class Fp8Watch:
    """Records the FP8 matmuls of a model while it watches.

    FSDP frees a gathered weight after use, and may gather it as FP8 codes alone. So operands are copied when a matmul
    runs, as the values that they had before rounding.
    """

    def __init__(self, model: Model) -> None:
        self._parts = model.parts
        self._calls: list[_Call] = []
        parameters = {name: p for part in model.parts for name, p in part.named_parameters()}
        stored = {n: p for n, p in parameters.items() if n in model.low.names and isinstance(p, DTensor)}
        # of parameters that FSDP gathers as FP8: the scales that arrived, and the scales of the stored values
        self.scales: dict[str, tuple[Tensor, Tensor]] = {}
        # Codes arrive without the values that they were rounded from, so all ranks gather these, in the same order.
        self._values = {name: p.full_tensor().detach().to(model.dtype) for name, p in stored.items()}

    @property
    def names(self) -> set[str]:
        return {name for call in self._calls for name in call.names}

    def matmuls(self) -> Iterator[Fp8Matmul]:
        for call in self._calls:
            yield from call.matmuls()

    def linears(self, x: Tensor, bias: Tensor | None, fp8: Fp8, *weights: Tensor) -> Tensor:
        """Run the op for one or several joined weights, and record it if it is in FP8."""
        if not fp8:
            return _LINEARS(x, bias, fp8, *weights)
        call = self._call(x, weights, bias, None)
        # A deferred weight gradient (zero bubble) needs the parameter itself, not a view of it.
        watched = [weight if is_deferring() else call.watch(number, weight) for number, weight in enumerate(weights)]
        return self._made(call, _LINEARS(call.watch("x", x), bias, fp8, *watched))

    def experts(self, x: Tensor, weight: Tensor, counts: list[int], fp8: Fp8) -> Tensor:
        """Run the op for the experts of a rank, and record it if it is in FP8."""
        if not fp8:
            return _EXPERTS(x, weight, counts, fp8)
        call = self._call(x, [weight], None, counts)
        return self._made(
            call, _EXPERTS(call.watch("x", x), weight if is_deferring() else call.watch(0, weight), counts, fp8)
        )

    def _name(self, weight: Tensor) -> str:
        """Return the name of the parameter whose memory a weight shares, or whose rows it copies."""
        held = {name: p for part in self._parts for name, p in part.named_parameters() if not isinstance(p, DTensor)}
        home = _codes(weight).untyped_storage().data_ptr()
        shared = (name for name, p in held.items() if _codes(p).untyped_storage().data_ptr() == home)
        plain = ((n, p) for n, p in held.items() if not isinstance(p, Quantised) and p.shape[1:] == weight.shape[1:])
        copies = (name for name, p in plain if torch.equal(p, weight[: len(p)]))
        return next(shared, "") or next(copies, "something else")

    def _values_of(self, name: str, weight: Tensor) -> Tensor:
        """Return the values of a weight before rounding: where FSDP gathers codes, the values that ranks store."""
        if not isinstance(weight, Quantised):
            return weight.detach().clone()  # FSDP frees what it has gathered
        first = weight.codes.storage_offset() // weight.shape[-1]
        values = self._values[name][first : first + weight.shape[:-1].numel()]
        arrived = weight.scales.reshape(-1, weight.scales.shape[-1])
        self.scales.setdefault(name, (arrived.clone(), scales_of(block_amax(values, 0).to(arrived.dtype))))
        return values.view(weight.shape)

    def _call(self, x: Tensor, weights: Sequence[Tensor], bias: Tensor | None, counts: list[int] | None) -> _Call:
        """Record a call before it runs."""
        names = [self._name(weight) for weight in weights]
        values = [self._values_of(name, weight).to(x.dtype) for name, weight in zip(names, weights, strict=True)]
        self._calls.append(_Call(names, x.detach(), values, None if bias is None else bias.detach(), counts))
        return self._calls[-1]

    def _made(self, call: _Call, y: Tensor) -> Tensor:
        """Record the result of a call, and return it so that its gradient is recorded too."""
        call.y = y.detach()
        return call.watch("y", y)


def _codes(weight: Tensor) -> Tensor:
    """Return the memory that a weight shares with its parameter."""
    return weight.codes if isinstance(weight, Quantised) else weight


_LINEARS, _EXPERTS = _Linears.apply, _LoopedLinear.apply


@contextmanager
def watch_fp8(model: Model) -> Iterator[Fp8Watch]:
    """Watch the FP8 matmuls of a model, by replacing the ops that run them."""
    watch = Fp8Watch(model)
    _Linears.apply, _LoopedLinear.apply = watch.linears, watch.experts  # type: ignore[method-assign]
    try:
        yield watch
    finally:
        _Linears.apply, _LoopedLinear.apply = _LINEARS, _EXPERTS  # type: ignore[method-assign]
