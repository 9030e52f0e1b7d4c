"""The base class of optimizers. A new optimizer is one subclass of `Optimizer`, in one file.

Its members say which state a parameter has, in which dtype, what an update does, and what it should have done. The
engine, checkpoints, state dicts, `convert`, plans, the memory bill and oracle O1 read them and name no optimizer.

A rank stores rows of each matrix (decision 0002), and `update` gets just these, as flat slices. Elementwise optimizers
need no more. One that needs whole matrices, such as Muon (arXiv 2502.16982), sets `needs_whole_matrix`. For matrices,
its `update` then updates the state alone. Ranks that store parts of a matrix run `matrix_input` before and
`matrix_step` after the one rank that gets the whole matrix runs `matrix_direction`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import inf, prod
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..axes import STAGE, Axes
from ..errors import ConfigError
from ..sharding import Charge, MatrixPlan, Param, Rules, Table, exchanged
from .int8_state import Code, is_quantised, num_blocks

_WIDE = (torch.float32, torch.bfloat16)


def within(value: object, low: float, high: float = inf) -> bool:
    """Return whether `value` is a number of at least `low` and below `high`; NaN is not."""
    return isinstance(value, int | float) and low <= value < high


@dataclass(frozen=True)
class Slices:
    """Slices of local pieces that one call updates in place. The lists belong together by index.

    All tensors of one call have one dtype and one device. `state` has a list for each of `Optimizer.state_names_of`.
    Large pieces are cut, so slices are flat. `whole`: the slices belong to matrices that `matrix_step` will update, so
    only their state is updated now.
    """

    names: list[str]
    params: list[Tensor]
    grads: list[Tensor]
    state: tuple[list[Tensor], ...]
    whole: bool = False


@dataclass(frozen=True)
class Clip:
    """The clipping that a fused update does while it reads gradients; it does not write them.

    `norm`: the gradient norm, on its device; if it is not finite, the update must write nothing. `max_norm`: infinite
    for no clipping. `finite` waits for the device, and raises if nothing was written. `apart`: another norm for some
    parameters, by name.
    """

    norm: Tensor
    max_norm: float
    finite: Callable[[], object]
    apart: Mapping[str, Tensor] = field(default_factory=dict)

    def norm_of(self, name: str) -> Tensor:
        """Return the norm by which a parameter's gradient is clipped."""
        return self.apart.get(name, self.norm)

    @property
    def factor(self) -> Tensor:
        """Return the factor for gradients, on their device: 1 where the norm is small enough."""
        return (self.max_norm / self.norm).clamp(max=1.0)


@dataclass(frozen=True, kw_only=True)
class Optimizer(ABC):
    """Options of an optimizer, its state and its update.

    `state_dtype`: the storage dtype of all state tensors; None: that of the parameters. With torch.bfloat16 a slice at
    a time is widened for the update; with torch.uint8 matrices are quantised as `codes` says.
    """

    state_names: ClassVar[tuple[str, ...]]  # of each parameter's state tensors; folders of a checkpoint
    codes: ClassVar[tuple[Code, ...]] = ()  # how each state tensor is quantised to 8 bits; empty: it cannot be
    needs_whole_matrix: ClassVar[bool] = False  # each matrix is sent to one rank, which `charges` bills

    state_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        known = (*_WIDE, torch.uint8) if self.codes else _WIDE
        if self.state_dtype not in (None, *known):
            raise ConfigError(
                f"state_dtype={self.state_dtype} is not offered; choose from {', '.join(map(str, known))}"
            )

    @abstractmethod
    def update(self, slices: Slices, *, lr: float, step: int, decays: bool) -> None:
        """Update parameters and state in place. `step` is 1 in the first update. `decays`: False for norms and
        biases."""

    def fuses(self, param: Tensor, grad: Tensor) -> bool:
        """Return whether `fused_update` can update such pieces. By default an optimizer has no fused update."""
        return False

    def fused_update(self, slices: Slices, clip: Clip, *, lr: float, step: int, decays: bool) -> None:
        """Clip and update uncut pieces in one pass, with state in its storage dtype."""
        raise NotImplementedError(f"{type(self).__name__}.fuses returned True, so it must define fused_update")

    @abstractmethod
    def plain_update(
        self, weight: Tensor, grad: Tensor, state: Sequence[Tensor], *, lr: float, step: int, decays: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the new weight and state of one whole parameter, from the textbook formula: oracle O1 compares the
        engine with it, in float64. So it shares no code with `update`."""

    @property
    def by_head(self) -> bool:
        """Return whether the rows of each head are updated as a matrix of their own."""
        return False

    @property
    def matrix_dtype(self) -> torch.dtype | None:
        """The dtype in which matrices are sent and computed; None: that of the parameters."""
        return None

    def check(self, table: Table, trained: Sequence[str]) -> None:
        """Refuse an optimizer of whole matrices where none is trained: adapters, or norms and embeddings alone."""
        if not self.needs_whole_matrix:
            return
        kind, adapters = type(self).__name__, [name for name in trained if table[name].adapter]
        if adapters:
            raise ConfigError(
                f"{kind} updates whole matrices, and {adapters[0]} is a factor of one (lora=); train it with AdamW"
            )
        if trained and not any(self.updates_whole(table[name]) for name in trained):
            raise ConfigError(
                f"{kind} updates whole matrices, and none of the {len(trained)} trained parameters is one, such as "
                f"{trained[0]}; use AdamW, or widen train="
            )

    def updates_whole(self, param: Param) -> bool:
        """Return whether a parameter is updated as whole matrices, which its declaration takes from the files."""
        return self.needs_whole_matrix and param.matrices is not None

    def matrix_input(self, grad: Tensor, state: Sequence[Tensor]) -> Tensor:
        """Return the input of `matrix_direction`, computed elementwise from a part of a gradient and of the updated
        state."""
        return grad

    def matrices_per_call(self, like: Tensor) -> int:
        """Return how many matrices of the size of `like` one call of `matrix_direction` gets. Above 1 it gets a batch,
        [number, rows, columns], filled up with zeros. The number must not depend on the mesh: other shapes may choose
        other kernels, whose results differ in bits."""
        return 1

    def matrix_direction(self, matrix: Tensor) -> Tensor:
        """Return the update of one whole matrix, or of a batch, from its input, which it leaves as it is."""
        raise NotImplementedError(f"{type(self).__name__} says needs_whole_matrix, so it must define matrix_direction")

    def matrix_step(self, param: Tensor, direction: Tensor, shape: tuple[int, int], *, lr: float, decays: bool) -> None:
        """Apply a part of an update to the same part of a parameter, in place. `shape`: the shape of the whole
        matrix."""
        raise NotImplementedError(f"{type(self).__name__} says needs_whole_matrix, so it must define matrix_step")

    def plain_matrix_update(
        self, weight: Tensor, grad: Tensor, state: Sequence[Tensor], *, lr: float, step: int, decays: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the new weight and state of one matrix that is updated whole, as `plain_update` does."""
        raise NotImplementedError(
            f"{type(self).__name__} says needs_whole_matrix, so it must define plain_matrix_update"
        )

    def charges(self, trained: Iterable[Param], rules: Rules, axes: Axes, rank: int, itemsize: int) -> list[Charge]:
        """Return the collectives that an update adds to the bill of a step. `trained`: the parameters that a rank
        stores pieces of."""
        whole = [param for param in trained if self.updates_whole(param)]
        if not whole or prod(axes.sizes(STAGE)) == 1:
            return []
        item = itemsize if self.matrix_dtype is None else self.matrix_dtype.itemsize
        exchanges = exchanged(MatrixPlan(whole, rules, axes, rank, by_head=self.by_head))
        counts = Counter((what, numel) for what, numels in exchanges.items() for numel in numels)
        return [Charge(what, "all_to_all", STAGE, numel * item, num) for (what, numel), num in counts.items()]

    def operations(self, trained: Iterable[Param], rules: Rules, axes: Axes, rank: int) -> int:
        """Return the floating-point operations of an update's matmuls, which a step waits for. Elementwise ones do not
        count."""
        return 0

    def state_names_of(self, param: Param) -> tuple[str, ...]:
        """Return the names of the state that a parameter has: all of `state_names`, or the first of them."""
        return self.state_names

    @property
    def label(self) -> str:
        """The name of the state in plans."""
        return f"state of {type(self).__name__}"

    def settings(self) -> dict[str, Any]:
        """Return the options as a checkpoint records them, in JSON: its format calls the dtype of state `state`."""
        options = asdict(self)
        dtype = options.pop("state_dtype")
        return {name: list(v) if isinstance(v, tuple) else v for name, v in options.items()} | {"state": str(dtype)}

    def quantised(self, table: Table, trained: Iterable[str]) -> tuple[str, ...]:
        """Return the parameters whose state is quantised to 8 bits. Each has scales, `NAME.scales`."""
        if self.state_dtype != torch.uint8:
            return ()
        return tuple(name for name in trained if is_quantised(table[name]))

    def wide_dtype(self, stored: torch.dtype) -> torch.dtype:
        """Return the dtype of state that is not quantised, for parameters stored in `stored`."""
        return stored if self.state_dtype in (None, torch.uint8) else self.state_dtype

    def state_bytes(self, stored: torch.dtype, param: Param, shape: Sequence[int]) -> int:
        """Return the bytes of all state of a piece of a parameter, scales among them."""
        numel, num = prod(shape), len(self.state_names_of(param))
        if self.state_dtype != torch.uint8 or not is_quantised(param):
            return num * numel * self.wide_dtype(stored).itemsize
        return num * (numel + shape[0] * num_blocks(shape[1]) * torch.float32.itemsize)

    def least_bytes(self, table: Table, stored: torch.dtype) -> int:
        """Return the least bytes of state that any element of a model has."""
        each = 1 if self.quantised(table, table.params) else self.wide_dtype(stored).itemsize
        return min(len(self.state_names_of(param)) for param in table) * each
