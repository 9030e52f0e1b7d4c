"""Copy a rank's shard of a model to the meta device, with its doors armed, to run it without memory or other ranks.

On the meta device tensors have shapes but no data, as with torch's FakeTensorMode. The copy runs a real forward and
backward of the real modules, so its result holds for any model family, without a formula for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from .. import ops
from ..axes import Axes
from ..models import Decoder, Quantisable, Want
from ..models.decoder import Embedding
from ..ops.codings import Coding, in_memory
from ..parallel import context, expert, lookup, recompute, tensor
from ..recipe import MemoryOptions
from ..sharding import Param, ShardingSpec, Span, Stage, find_doors, shape_before_fsdp


@dataclass(frozen=True)
class Seen:
    """The forms in which a forward sees parameters. `frozen`: for parameters that are not trained, the dtype in which
    they are stored, or their coding in 8 or 4 bits.
    """

    compute: torch.dtype
    memory: MemoryOptions
    frozen: Mapping[str, torch.dtype | Coding] = field(default_factory=dict)


class FakeMesh:
    """The part of a mesh that doors need. Meta collectives use only shapes, so no process group is created."""

    def __init__(self, axes: Axes, rank: int) -> None:
        self.axes, self.coords = axes, axes.coords(rank)

    def name_of(self, _: object) -> str:
        """Return any name: it is never resolved."""
        return "a group that does not exist"


def _wait_tensor(x: Tensor) -> Tensor:
    """Replace `wait_tensor`, which allocates a new tensor on the meta device and returns its argument elsewhere."""
    return x.detach()


def _grouped_mm(a: Tensor, b: Tensor, offs: Tensor, **_: object) -> Tensor:
    """Replace `_grouped_mm`, whose meta kernel refuses float32."""
    shape = (len(a), b.shape[-1]) if b.dim() == 3 else (len(offs), len(a), b.shape[1])
    return a.new_empty(shape)


_REPLACED: dict[Any, Any] = {
    torch.ops.aten._grouped_mm.default: _grouped_mm,
    torch.ops._c10d_functional.wait_tensor.default: _wait_tensor,
}


class MetaKernels(TorchDispatchMode):
    """A dispatch mode for running a meta copy. It replaces kernels that torch lacks on the meta device, or that behave
    differently there.

    torch derives meta shapes in Python, 0.1 ms per operation. A model repeats the same operations on the same shapes in
    each layer and loss chunk, so each is derived only once. A search over hundreds of meshes depends on it.

    In-place operations need no derivation: they return an argument.
    """

    def __init__(self) -> None:
        super().__init__()
        self._derived: dict[Any, tuple[torch.Size, tuple[int, ...], torch.dtype] | None] = {}

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _REPLACED:
            return _REPLACED[func](*args, **kwargs)
        if (written := _written(func)) is not None:
            return kwargs[written] if written in kwargs else args[0]
        # Views and in-place operations must run: the result shares memory with an argument, and only new memory must be
        # counted.
        if not _is_fresh(func):
            return func(*args, **kwargs)
        # Meta outputs depend only on shapes, strides, dtypes and plain arguments.
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
    """Return whether an operation returns one new tensor, which shares no memory with an argument."""
    schema = func._schema
    plain = all(each.alias_info is None for each in (*schema.arguments, *schema.returns))
    return plain and len(schema.returns) == 1 and str(schema.returns[0].type) == "Tensor"


def _is_meta(out: Any) -> bool:
    """Return whether an output is one non-empty tensor on the meta device."""
    return isinstance(out, Tensor) and out.device.type == "meta" and out.untyped_storage().nbytes() != 0


def _shapes(value: Any) -> Any:
    """Return a hashable key of arguments: shapes, strides and dtypes of tensors, values of everything else."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device.type
    return (type(value), *map(_shapes, value)) if isinstance(value, list | tuple) else (type(value), value)


def meta_copy(spec: ShardingSpec, stage: Stage, mesh: Any, seen: Seen, layers: Sequence[int]) -> Decoder:
    """Copy some layers of a stage (and its embedding and head) to the meta device, sharded as on this rank, with its
    doors armed.

    It is a deepcopy with a memo that maps each parameter to its meta shard. So torch copies modules, buffers and ties,
    and no full parameter is ever created.
    """
    stage_model: Decoder = stage.module
    original = stage_model.with_layers(layers)
    forms = dict(_forms(spec, stage, mesh.axes, seen))
    shaped = {id(p): _shaped(p, name, spec, mesh, forms[name]) for name, p in original.named_parameters()}
    model = deepcopy(original, dict(shaped))
    for name, parameter in model.named_parameters():
        _add_grid(model, name, spec.table[name], parameter, forms[name])
    for name, span in find_doors(model, Span):
        span.start, span.stop = spec.rules.span(span.dim, span.size, mesh.axes, mesh.coords, name)
    for name in spec.fp8 & {name for name, _ in model.named_parameters()}:
        owner, _, last = name.rpartition(".")
        model.get_submodule(owner).in_fp8 |= {last}  # type: ignore[operator]
    if isinstance(model.embed, Embedding):
        model.embed.compute = seen.compute
    recompute.disarm(model)  # a compiled `run` of the original would run the original's layer
    tensor.arm(model, mesh)
    context.arm(replace(spec, module=model), model, mesh)
    expert.arm(model, mesh, token_once=seen.memory.token_once)
    lookup.arm(spec, model, mesh)
    recompute.arm(model, replace(seen.memory, compiled=False))
    return model


def forward(model: Decoder, axes: Axes, num_tokens: int, x_TD: Tensor | None = None) -> Tensor:
    """Run the forward of a meta copy, and return its scores or the output of its stage. `x_TD`: input of a stage
    without embedding."""
    # One document is enough: where documents end does not change the memory of a packed stream.
    own = num_tokens // (axes.cp * axes.tp)
    tokens_T = torch.zeros(num_tokens, dtype=torch.int64, device="meta")
    for balance in (model.balance, *([] if model.mtp is None else [model.mtp.balance])):
        balance.begin(torch.ones(own, dtype=torch.bool, device="meta"))
        balance.slope_E = torch.zeros(balance.num_experts, device="meta")
    want = Want(model.scores[0], mtp=model.mtp is not None)
    score, *mtp = model(tokens_T, tokens_T, ops.documents([num_tokens], "meta"), want, x_TD)
    return score + mtp[0] if mtp else score


def _forms(spec: ShardingSpec, stage: Stage, axes: Axes, seen: Seen) -> Iterator[tuple[str, torch.dtype | Coding]]:
    """Yield the form in which a forward sees each parameter: codes unchanged, else the compute dtype if FSDP gathers
    it, else the stored dtype."""
    stored = torch.promote_types(seen.compute, torch.float32)
    for unit in stage.units:
        wrapped = seen.memory.offload or prod(axes.sizes(("replicate", *unit.shard))) > 1
        for name in unit.params:
            own = seen.frozen.get(name, stored)
            gathered = wrapped and spec.table[name].in_fsdp and not isinstance(own, Coding)
            yield name, seen.compute if gathered else own


def _shaped(given: nn.Parameter, name: str, spec: ShardingSpec, mesh: Any, form: torch.dtype | Coding) -> nn.Parameter:
    """Return an empty meta parameter in the shape of this rank's shard."""
    param = spec.table[name]
    shape, dtype = in_memory(shape_before_fsdp(param, spec.rules, mesh.axes, mesh.coords), form)
    return nn.Parameter(torch.empty(shape, device="meta", dtype=dtype), requires_grad=given.requires_grad)


def _add_grid(model: Decoder, name: str, param: Param, stored: Tensor, form: torch.dtype | Coding) -> None:
    """Give a module the scales of a matrix that is stored as codes, as loading does."""
    if not isinstance(form, Coding):
        return
    owner, _, last = name.rpartition(".")
    module = model.get_submodule(owner)
    assert isinstance(module, Quantisable), "codes belong to a module with scales"
    # tp cuts columns of codes in whole blocks, so columns and bytes of a row have the same share.
    columns = param.matrix[1] * stored.shape[1] // form.row_bytes(param.matrix[1])
    rows = torch.empty(len(stored), dtype=torch.int64, device="meta")
    scales = torch.empty(1, 1 if form.scale is not None else columns, device="meta")
    module.grids[last] = ops.Grid(scales, rows, torch.empty(columns, dtype=torch.int64, device="meta"), form)
