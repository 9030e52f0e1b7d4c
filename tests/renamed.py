"""A device that is not there: tensors of the renamed PrivateUse1 backend, each a CPU tensor in disguise.

It behaves as an accelerator does where code may forget it: an op that mixes its tensors with those of a CPU raises
(but for numbers without dims), and data comes back only through `.cpu()`, `.item()` and the like. Call `install` in a
process of its own: the renaming cannot be undone.

`with Waits() as waits` notes every call at which the host would wait for the work that an accelerator has queued: what
reads data, what makes a tensor of a size that depends on data, and what copies from memory that is not pinned.
"""

from __future__ import annotations

import traceback
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "moon"
COPIES = ("aten::copy_", "aten::_to_copy")
READS = (
    "aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::masked_select", "aten::_unique2",
    "aten::unique_dim", "aten::unique_consecutive", "aten::bincount",
)  # fmt: skip
_PINNED = "moon_pinned"  # an attribute of tensors on the host


class Waits:
    """Each with the line of meshwright that asked for it."""

    def __init__(self) -> None:
        self.at: list[str] = []

    def __enter__(self) -> Self:
        _WAITS.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _WAITS.remove(self)


_WAITS: list[Waits] = []


def _wait(what: str) -> None:
    if _WAITS:
        lines = [frame for frame in traceback.extract_stack() if "/meshwright/" in frame.filename]
        at = f"{Path(lines[-1].filename).name} {lines[-1].name}" if lines else "?"
        for waits in _WAITS:
            waits.at.append(f"{what} at {at}")


def _waits_for(func: Any, args: Any, kwargs: Any) -> str:
    """Why the host would wait in this op; nothing, if it would not."""
    name = func._schema.name
    if name in READS:
        return name
    if name == "aten::_to_copy":
        return "" if torch.device(kwargs.get("device") or NAME).type == NAME else "a copy to the host"
    if name == "aten::copy_":
        into, x = args[:2]
        if not isinstance(into, Moon):
            return "a copy to the host"
        unpinned = not isinstance(x, Moon) and x.dim() and not (hasattr(x, _PINNED) and args[2:3] == (True,))
        return "a copy from the host" if unpinned else ""
    if name == "aten::repeat_interleave" and kwargs.get("output_size") is None and len(args) == 1:
        return name
    masks = [x for x in pytree.tree_leaves(args[1:2]) if isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8)]
    return f"{name} by a mask" if masks and name in ("aten::index", "aten::index_put_") else ""


class Moon(Tensor):
    """Views and in-place changes go to the CPU tensor that it wraps, so they share its memory."""

    raw: Tensor

    @staticmethod
    def __new__(cls, raw: Tensor) -> Moon:
        made = Tensor._make_wrapper_subclass(
            cls, raw.size(), raw.stride(), raw.storage_offset(), dtype=raw.dtype, device=torch.device(NAME, 0)
        )
        made.raw = raw
        return made

    def __repr__(self) -> str:
        return f"Moon({self.raw})"

    def tolist(self) -> Any:  # torch's own refuses every subclass
        _wait("tolist")
        return self.raw.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        astray = [x for x in tensors if not isinstance(x, Moon) and x.dim()]
        if astray and func._schema.name not in COPIES:
            raise RuntimeError(
                f"{func} mixes {NAME} with {astray[0].device}, a tensor of shape {tuple(astray[0].shape)}"
            )
        if why := _waits_for(func, args, kwargs):
            _wait(why)
        out = on_cpu(func, args, kwargs)
        if not func._schema.name.startswith("aten::"):  # of a process group
            return out
        if func._schema.name == "aten::_to_copy" and torch.device(kwargs.get("device") or NAME).type != NAME:
            return out.raw
        return return_and_correct_aliasing(func, args, kwargs, out)


def on_cpu(func: Any, args: Any, kwargs: Any) -> Any:
    args, kwargs = pytree.tree_map(_unwrap, (args, kwargs))
    return pytree.tree_map_only(Tensor, Moon, func(*args, **kwargs))


def _unwrap(x: Any) -> Any:
    if isinstance(x, torch.device) and x.type == NAME:
        return torch.device("cpu")
    return x.raw if isinstance(x, Moon) else x


class Queue:
    """A stream, or an event on it: what is sent to this device is done at once."""

    def __init__(self, *_: object, **__: object) -> None: ...
    def wait_stream(self, _: Queue) -> None: ...
    def wait_event(self, _: Queue) -> None: ...
    def record_event(self, _: Queue | None = None) -> Queue:
        return self

    def record(self, _: Queue | None = None) -> None: ...
    def wait(self, _: Queue | None = None) -> None: ...
    def synchronize(self) -> None: ...


class Module(_DummyBackendModule):
    """What FSDP and the mesh ask of `torch.moon`."""

    Stream = Event = Queue

    def get_device_properties(self, _: torch.device) -> SimpleNamespace:
        return SimpleNamespace(total_memory=1 << 30)

    def synchronize(self) -> None: ...

    def current_stream(self, _: object = None) -> Queue:
        return Queue()

    def stream(self, _: Queue) -> Any:
        return nullcontext()


MADE = ("empty.memory_format", "empty_strided", "arange", "arange.start", "arange.start_step")  # out of nothing
WHOLE = ("silu_backward",)  # which torch would take apart for a device that has no such kernel, and round otherwise


def install() -> None:
    """An op that takes tensors of the device comes to `__torch_dispatch__`; what else is to run is registered."""
    _setup_privateuseone_for_python_backend(NAME, Module())
    # FSDP frees the memory behind a tensor by the size of its storage; here that memory is the wrapped tensor's.
    _fsdp_param.alloc_storage = _fsdp_param.free_storage = lambda _: None
    dist.Backend.default_device_backend_map[NAME] = "gloo"
    for name in (*MADE, *WHOLE):
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        _kernels.impl(name, lambda *args, op=op, **kwargs: on_cpu(op, args, kwargs), "PrivateUse1")
    # `torch.tensor(..., device=)` copies without asking Python first.
    _kernels.impl("_copy_from", _copy_from, "PrivateUse1")
    Tensor.pin_memory = _pinned  # type: ignore[method-assign] # torch's own asks the device for such memory


def _copy_from(x: Tensor, into: Tensor, _: bool = False) -> Any:
    _wait("a tensor made of numbers")
    return on_cpu(Tensor.copy_, (into, x), {})


def _pinned(x: Tensor) -> Tensor:
    made = x.clone()
    setattr(made, _PINNED, True)
    return made


_kernels = torch.library.Library("aten", "IMPL")
