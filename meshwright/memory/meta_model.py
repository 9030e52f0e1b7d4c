"""A rank's part of a model as it would run there, without memory and without other ranks: to see what it will hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from .. import ops
from ..axes import Axes
from ..models import Decoder
from ..models.decoder import Embedding
from ..parallel import context, expert, recompute, tensor
from ..recipe import MemoryOptions
from ..sharding import ShardingSpec, Span, Stage, cut, find, matrix_shape, place


class Paper:
    """A mesh as far as doors ask it. On the meta device a collective has shapes alone, so no group is asked for."""

    def __init__(self, axes: Axes, rank: int) -> None:
        self.axes, self.coords = axes, axes.coords(rank)

    def name_of(self, _: object) -> str:
        return "nobody"


def _same(x: Tensor) -> Tensor:
    """torch's own makes another tensor on the meta device, where elsewhere it gives back what it waited for."""
    return x.detach()


def _grouped(a: Tensor, b: Tensor, offs: Tensor, **_: object) -> Tensor:
    """torch refuses float32 on the meta device, which it multiplies elsewhere."""
    shape = (len(a), b.shape[-1]) if b.dim() == 3 else (len(offs), len(a), b.shape[1])
    return a.new_empty(shape)


_MADE: dict[Any, Any] = {
    torch.ops.aten._grouped_mm.default: _grouped,
    torch.ops._c10d_functional.wait_tensor.default: _same,
}


class MetaKernels(TorchDispatchMode):
    """Run a sketch within it: it replaces what torch lacks on the meta device, or has otherwise there.

    torch derives shapes in Python, which takes 0.1 ms an operation. A sketch repeats the same operations in each layer
    and each chunk of the loss, so an operation on the same shapes is derived once.
    """

    def __init__(self) -> None:
        super().__init__()
        self._derived: dict[Any, tuple[torch.Size, tuple[int, ...], torch.dtype] | None] = {}

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _MADE:
            return _MADE[func](*args, **kwargs)
        if (written := _written(func)) is not None:
            return kwargs[written] if written in kwargs else args[0]
        if not _is_fresh(func):
            return func(*args, **kwargs)
        key = (func, _shapes(args), _shapes(tuple(kwargs.items())))
        if key not in self._derived:
            out = func(*args, **kwargs)
            self._derived[key] = (out.shape, out.stride(), out.dtype) if _is_meta(out) else None
            return out
        if (derived := self._derived[key]) is None:
            return func(*args, **kwargs)
        shape, stride, dtype = derived
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


@cache
def _written(func: Any) -> str | None:
    """Return the name of the argument that an operation overwrites and returns, shape unchanged: `x` of `x.mul_(y)`."""
    schema = func._schema
    written = [each.name for each in schema.arguments if each.alias_info is not None and each.alias_info.is_write]
    returned = [each.alias_info is not None and each.alias_info.is_write for each in schema.returns]
    keeps_shape = torch.Tag.inplace_view not in func.tags and schema.name.startswith("aten::")
    is_it = returned == [True] and len(written) == 1 and (written[0] == "out" or schema.arguments[0].name == written[0])
    return written[0] if is_it and keeps_shape and "resize" not in schema.name else None


@cache
def _is_fresh(func: Any) -> bool:
    """Whether an operation returns one new tensor, which shares no memory with an argument."""
    schema = func._schema
    plain = all(each.alias_info is None for each in (*schema.arguments, *schema.returns))
    return plain and len(schema.returns) == 1 and str(schema.returns[0].type) == "Tensor"


def _is_meta(out: Any) -> bool:
    return isinstance(out, Tensor) and out.device.type == "meta" and out.untyped_storage().nbytes() != 0


def _shapes(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device.type
    return (type(value), *map(_shapes, value)) if isinstance(value, list | tuple) else (type(value), value)


def sketched(
    spec: ShardingSpec, stage: Stage, paper: Any, compute: torch.dtype, memory: MemoryOptions, layers: Sequence[int]
) -> Decoder:
    """Some layers of a stage on the meta device, with what is before and behind all layers. Its doors are armed."""
    of_stage: Decoder = stage.module
    model = of_stage.with_layers(layers)
    widths = dict(_widths(spec, stage, paper.axes, compute, memory))
    given = {id(p): _shaped(p, name, spec, paper, widths[name]) for name, p in model.named_parameters()}
    sketch = deepcopy(model, dict(given))
    for name, span in find(sketch, Span):
        span.start, span.stop = spec.rules.span(span.dim, span.size, paper.axes, paper.coords, name)
    for name in spec.fp8 & {name for name, _ in sketch.named_parameters()}:
        owner, _, last = name.rpartition(".")
        sketch.get_submodule(owner).in_fp8 |= {last}  # type: ignore[operator]
    if isinstance(sketch.embed, Embedding):
        sketch.embed.compute = compute
    recompute.disarm(sketch)  # if it was armed: what is compiled would run the layers that it was compiled for
    tensor.arm(sketch, paper)
    context.arm(replace(spec, module=sketch), sketch, paper)
    expert.arm(sketch, paper, token_once=memory.token_once)
    recompute.arm(sketch, replace(memory, compiled=False))
    return sketch


def forward(sketch: Decoder, axes: Axes, num_tokens: int, x_TD: Tensor | None = None) -> Tensor:
    """The scores of a sketch, or what it gives to the next stage. `x_TD`: what the layers are given, where nothing is
    looked up."""
    own = num_tokens // (axes.cp * axes.tp)
    tokens_T = torch.zeros(num_tokens, dtype=torch.int64, device="meta")
    sketch.balance.begin(torch.ones(own, dtype=torch.bool, device="meta"))
    sketch.balance.slope_E = torch.zeros(sketch.balance.num_experts, device="meta")
    return sketch(tokens_T, tokens_T, ops.documents([num_tokens], "meta"), sketch.scores[0], x_TD)[0]


def _widths(
    spec: ShardingSpec, stage: Stage, axes: Axes, compute: torch.dtype, memory: MemoryOptions
) -> Iterator[tuple[str, torch.dtype]]:
    """As the work finds each parameter: what FSDP gathers is as narrow as the work, what it leaves is as stored."""
    stored = torch.promote_types(compute, torch.float32)
    for unit in stage.units:
        wrapped = memory.offload or prod(axes.sizes(("replicate", *unit.shard))) > 1
        for name in unit.params:
            yield name, compute if wrapped and not spec.table[name].float32 else stored


def _shaped(given: nn.Parameter, name: str, spec: ShardingSpec, paper: Any, dtype: torch.dtype) -> nn.Parameter:
    param = spec.table[name]
    box = cut(param, place(param, spec.rules, paper.axes), paper.axes, paper.coords)
    made = torch.empty(matrix_shape(param, box.shape), device="meta", dtype=dtype)
    return nn.Parameter(made, requires_grad=given.requires_grad)
