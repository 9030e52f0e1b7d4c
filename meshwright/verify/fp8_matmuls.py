"""Products in 8 bits, each held against its definition, on one process and on every rank.

All run the same code, so what it does wrong everywhere would not show between them.
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
from ..ops.fp8_tensor import Quantised
from ..ops.matmul import _Linears
from ..ops.norms import upcast
from .results import Finding, Margin, Notes

# Of a norm. A result in bfloat16 is rounded once, which costs 1.6e-3; 8 bits cost ten times as much.
_ALLOWED = {torch.float64: 1e-9, torch.bfloat16: 4e-3}
_ALIKE = {torch.float64: 1e-6, torch.bfloat16: 4e-3}  # to a product with a known mistake
_SIZES = [k / 8 * 2.0**-6 for k in range(8)] + [(1 + k / 8) * 2.0**e for e in range(-6, 9) for k in range(8)][:-1]
_VALUES = torch.tensor(_SIZES, dtype=torch.float64, device="cpu")  # of E4M3, without their sign

Rounding = Callable[[Tensor], Tensor]


def nearest(quotients: Tensor) -> Tensor:
    """The E4M3 value nearest to each; of two that are equally near, the even one."""
    size = quotients.float().double().abs().clamp(max=_SIZES[-1])
    above = torch.searchsorted(_VALUES, size).clamp(max=len(_SIZES) - 1)
    below = (above - 1).clamp(min=0)
    up, down = _VALUES[above] - size, size - _VALUES[below]
    takes_up = (up < down) | ((up == down) & (above % 2 == 0))
    return torch.where(takes_up, _VALUES[above], _VALUES[below]).copysign(quotients)


def rounded(x: Tensor, block: tuple[int, int], *, multiplied: bool = False) -> Tensor:
    """What 8 bits keep of a matrix in blocks of so many rows and columns."""
    (rows, columns), (height, width) = x.shape, block
    scales = x.abs().view(rows // height, height, columns // width, width).amax((1, 3)) / _SIZES[-1]
    scales = scales.where(scales > 0, 1.0).repeat_interleave(height, 0).repeat_interleave(width, 1)
    return nearest(x * scales if multiplied else x / scales) * scales


def _rows(x: Tensor) -> Tensor:
    """A scale for each 128 features of a token."""
    return rounded(x, (1, 128))


def _columns(x: Tensor) -> Tensor:
    """Along the wrong side: blocks of 128 tokens, each of one feature."""
    short = -len(x) % 128
    return rounded(torch.nn.functional.pad(x, (0, 0, 0, short)), (128, 1))[: len(x)]


def _plain(x: Tensor) -> Tensor:
    return x.double()


def _matrix(weight: Tensor) -> Tensor:
    return rounded(weight, (128, 128))


def _shard(weight: Tensor) -> Tensor:
    return rounded(weight, (64, 128))


def _multiplied(weight: Tensor) -> Tensor:
    return rounded(weight, (128, 128), multiplied=True)


_MISTAKES: tuple[tuple[str, Rounding, Rounding], ...] = (
    ("nothing is rounded", _plain, _plain),
    ("the weight is not rounded", _rows, _plain),
    ("{} is not rounded", _plain, _matrix),
    ("{} is rounded along the wrong side", _columns, _matrix),
    ("scales multiply where they divide", _rows, _multiplied),
    ("half a block has a scale of its own, as of a shard", _rows, _shard),
)


_OF_WEIGHT = (("its operands are rounded, and should not be", _rows, _rows),)


@dataclass
class Product:
    """One that was made in 8 bits: its operands, and the gradients that came and went."""

    name: str  # of the parameter; of several that are joined, of the first
    x: Tensor
    weight: Tensor
    y: Tensor  # without a bias
    gradients: dict[str, Tensor] = field(default_factory=dict)  # of "y", "x" and "weight", where they came


def q1_products(engine: Engine, batches: Sequence[Batch], notes: Notes) -> Iterator[Finding]:
    """Products in 8 bits are those that were asked for, and are what their definition says, back and forth."""
    asked = engine.model.blueprint.spec.fp8 & engine.model.pieces.keys()
    with watch_fp8(engine.model) as seen:
        engine.backward(batches)
        engine.discard()
    for name in sorted(seen.names - asked):
        yield Finding(
            "Q1", name, "its product is in 8 bits, which was not asked for", "a product takes no notice of fp8="
        )
    for name in sorted(asked - seen.names):
        yield Finding("Q1", name, "its product is not in 8 bits, as was asked for", "a product takes no notice of fp8=")
    yield from (_of_scales(name, *each) for name, each in seen.scales.items() if not torch.equal(*each))
    worst, where, num, dtype = 0.0, "", 0, engine.model.dtype
    for product in seen.products():
        for what, found, due, with_mistake in _compared(product):
            num, error = num + 1, _off(found, due)
            worst, where = max((worst, where), (error, f"{what} of {product.name}"))
            if not error <= _ALLOWED[dtype]:
                known = _OF_WEIGHT if what == "dW" else _MISTAKES
                alike = (text for text, q1, q2 in known if _off(found, with_mistake(q1, q2)) < _ALIKE[dtype])
                guess = next(alike, "").format("x" if what == "y" else "dy")
                yield Finding("Q1", product.name, f"{what} is off by {error:.1e} of its norm", guess)
    notes.measured(Margin("Q1", "products in 8 bits and their gradients", num, worst, _ALLOWED[dtype], where))


def _of_scales(name: str, found: Tensor, due: Tensor) -> Finding:
    """Of some rows of a block the largest value is at most that of all; of none of its rows the scale is 1."""
    of_some = bool(((found <= due) | (found == 1)).all())
    detail = f"{int((found != due).sum())} of {due.numel()} scales are not those of the values that ranks store"
    return Finding("Q1", name, detail, "a block has the scale of some of its rows, as of a shard" if of_some else "")


def _off(found: Tensor, due: Tensor) -> float:
    return float((found - due).norm() / (due.norm() or 1.0))


def _compared(product: Product) -> Iterator[tuple[str, Tensor, Tensor, Callable[[Rounding, Rounding], Tensor]]]:
    """What it is, what was found, what is due, and what it would be of operands that are rounded in another way."""
    x, weight, given = _wide(product.x), _wide(product.weight), product.gradients
    yield "y", product.y.cpu(), _rows(x) @ _matrix(weight).mT, lambda q1, q2: q1(x) @ q2(weight).mT
    if "y" not in given:
        return
    d = _wide(given["y"])
    if "x" in given:
        yield "dx", given["x"].cpu(), _rows(d) @ _matrix(weight), lambda q1, q2: q1(d) @ q2(weight)
    if "weight" in given:
        yield "dW", given["weight"].cpu(), _plain(d).mT @ _plain(x), lambda q1, _: q1(d).mT @ q1(x)


def _wide(operand: Tensor) -> Tensor:
    """Its scales are computed in at least float32."""
    return upcast(operand).cpu()


@dataclass
class _Call:
    names: Sequence[str]
    x: Tensor
    weights: Sequence[Tensor]
    bias: Tensor | None
    counts: Sequence[int] | None  # of rows for each expert
    y: Tensor = field(init=False)
    gradients: dict[object, Tensor] = field(default_factory=dict)  # of "y", "x" and the weights by their number

    def watch(self, name: object, tensor: Tensor) -> Tensor:
        """The same, where its gradient of this product alone is kept."""
        if not tensor.requires_grad:
            return tensor
        seen = tensor.view_as(tensor)
        seen.register_hook(lambda grad: self.gradients.__setitem__(name, grad.clone()))
        return seen

    def products(self) -> Iterator[Product]:
        x, y, grads = self.x.flatten(0, -2), self.y.flatten(0, -2), dict(self.gradients)
        y = y.double() if self.bias is None else y.double() - self.bias
        for name in {"x", "y"} & grads.keys():
            grads[name] = grads[name].flatten(0, -2)
        if self.counts is None:
            weights = [grads.get(i, torch.zeros_like(w)) for i, w in enumerate(self.weights)]
            whole = {"weight": torch.cat(weights)} if grads.keys() - {"x", "y"} else {}
            yield Product(self.names[0], x, torch.cat([*self.weights]), y, {**_named(grads), **whole})
            return
        end = 0
        for expert, count in enumerate(self.counts):
            rows, end = slice(end, end + count), end + count
            mine = {name: grad[rows] for name, grad in _named(grads).items()}
            mine |= {"weight": grads[0][expert]} if 0 in grads else {}
            if count:
                yield Product(f"{self.names[0]} of expert {expert}", x[rows], self.weights[0][expert], y[rows], mine)


def _named(gradients: Mapping[object, Tensor]) -> dict[str, Tensor]:
    return {name: grad for name, grad in gradients.items() if isinstance(name, str)}


class Fp8Watch:
    """What was made in 8 bits while it was watched."""

    def __init__(self, model: Model) -> None:
        self._parts = model.parts
        self._calls: list[_Call] = []
        parameters = {name: p for part in model.parts for name, p in part.named_parameters()}
        stored = {n: p for n, p in parameters.items() if n in model.low.names and isinstance(p, DTensor)}
        self.scales: dict[str, tuple[Tensor, Tensor]] = {}  # of what is gathered as numbers: as they came, and are due
        # Numbers come without their values. All ranks fetch these in the same order.
        self._values = {name: p.full_tensor().detach().to(model.dtype) for name, p in stored.items()}

    @property
    def names(self) -> set[str]:
        return {name for call in self._calls for name in call.names}

    def products(self) -> Iterator[Product]:
        for call in self._calls:
            yield from call.products()

    def linears(self, x: Tensor, bias: Tensor | None, fp8: bool, *weights: Tensor) -> Tensor:
        if not fp8:
            return _LINEARS(x, bias, fp8, *weights)
        call = self._call(x, weights, bias, None)
        given = [weight if is_deferring() else call.watch(number, weight) for number, weight in enumerate(weights)]
        return self._made(call, _LINEARS(call.watch("x", x), bias, fp8, *given))

    def experts(self, x: Tensor, weight: Tensor, counts: list[int], fp8: bool) -> Tensor:
        if not fp8:
            return _EXPERTS(x, weight, counts, fp8)
        call = self._call(x, [weight], None, counts)
        return self._made(
            call, _EXPERTS(call.watch("x", x), weight if is_deferring() else call.watch(0, weight), counts, fp8)
        )

    def _name(self, weight: Tensor) -> str:
        """Of the parameter that it is, or is a copy of the rows of."""
        held = {name: p for part in self._parts for name, p in part.named_parameters() if not isinstance(p, DTensor)}
        home = _codes(weight).untyped_storage().data_ptr()
        alike = (name for name, p in held.items() if _codes(p).untyped_storage().data_ptr() == home)
        plain = ((n, p) for n, p in held.items() if not isinstance(p, Quantised) and p.shape[1:] == weight.shape[1:])
        copies = (name for name, p in plain if torch.equal(p, weight[: len(p)]))
        return next(alike, "") or next(copies, "something else")

    def _values_of(self, name: str, weight: Tensor) -> Tensor:
        """Before they were rounded to 8 bits. Of numbers that FSDP has gathered, those that ranks store."""
        if not isinstance(weight, Quantised):
            return weight.detach().clone()  # FSDP frees what it has gathered
        first = weight.codes.storage_offset() // weight.shape[-1]
        values = self._values[name][first : first + weight.shape[:-1].numel()]
        found = weight.scales.reshape(-1, weight.scales.shape[-1])
        self.scales.setdefault(name, (found.clone(), scales_of(block_amax(values, 0).to(found.dtype))))
        return values.view(weight.shape)

    def _call(self, x: Tensor, weights: Sequence[Tensor], bias: Tensor | None, counts: list[int] | None) -> _Call:
        names = [self._name(weight) for weight in weights]
        kept = [self._values_of(name, weight).to(x.dtype) for name, weight in zip(names, weights, strict=True)]
        self._calls.append(_Call(names, x.detach(), kept, None if bias is None else bias.detach(), counts))
        return self._calls[-1]

    def _made(self, call: _Call, y: Tensor) -> Tensor:
        call.y = y.detach()
        return call.watch("y", y)


def _codes(weight: Tensor) -> Tensor:
    """Memory that it shares with its parameter."""
    return weight.codes if isinstance(weight, Quantised) else weight


_LINEARS, _EXPERTS = _Linears.apply, _LoopedLinear.apply


@contextmanager
def watch_fp8(model: Model) -> Iterator[Fp8Watch]:
    """The products of a model."""
    seen = Fp8Watch(model)
    _Linears.apply, _LoopedLinear.apply = seen.linears, seen.experts  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        _Linears.apply, _LoopedLinear.apply = _LINEARS, _EXPERTS  # type: ignore[method-assign]
