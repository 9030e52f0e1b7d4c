"""Run an optimizer on the shards of one rank: hold its state, and update slice by slice, in place."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops.kernels.launch import is_dense
from ..ops.part_sizes import part_size
from ..sharding import Table
from .base import Clip, Optimizer, Slices
from .int8_state import BLOCK, SCALES, Place, decode, dice, encode, num_blocks, seed_of, zero_codes
from .whole_matrices import WholeMatrices

# elements that are updated together: narrow state is widened a part at a time
_PART = part_size(__name__, "_PART", 1 << 24, small=1001)
# elements that are quantised together, which takes a dozen buffers of their size
_CODES = part_size(__name__, "_CODES", 1 << 22, small=701)
# buffers that stay in the cache: larger ones took four times as long
_CODES_HOST = part_size(__name__, "_CODES_HOST", 1 << 19, small=701)

Slice = tuple[str, slice | None]  # of a parameter, flat; None: all of it
State = dict[str, tuple[Tensor, ...]]  # by parameter, a tensor for each of `Optimizer.state_names`


@dataclass(frozen=True)
class Part:
    """Slices that one call updates. `live`: state is updated where it is stored; else it is widened for the call.

    `whole`: the slices belong to matrices that are updated whole.
    """

    slices: list[Slice]
    decays: bool
    whole: bool
    live: bool


class LocalOptimizer:
    """Optimizer state of the trained parameters of one rank. Each step gets the parameters themselves and updates them
    in place, where the next forward reads.

    `quantised`: the matrices with 8-bit state. Their state is `uint8`, and its scales are under `NAME.scales`.
    """

    def __init__(
        self, options: Optimizer, table: Table, quantised: Mapping[str, Place] | None = None,
        matrices: WholeMatrices | None = None,
    ) -> None:  # fmt: skip
        self.options, self.steps, self.quantised = options, 0, quantised or {}
        self.matrices = matrices  # for an optimizer that needs whole matrices
        self.state_names = {param.name: options.state_names_of(param) for param in table}
        self.decayed = {param.name for param in table if param.decay}
        self.whole = {param.name for param in table if options.updates_whole(param)}
        self.by_rows = {param.name for param in table if param.by_rows}  # rows are updated where they have a gradient
        self.state: State = {}  # created by the first step: until then it takes no memory
        self._has_kernel: dict[torch.device, bool] = {}
        # The slices of a step are computed once, and again only if a step updates other parameters than the last one:
        # Python loops over thousands of parameters would delay every step.
        self._updated: list[str] = []
        self._parts: list[Part] = []

    @property
    def num_bytes(self) -> int:
        """Return the bytes of state that exists on this rank, scales included."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Return all state that exists on this rank, scales included, by a name for errors."""
        return {f"{name} ({at})": each for name, state in self.state.items() for at, each in enumerate(state)}

    def by_name(self, state: State) -> dict[str, dict[str, Tensor]]:
        """Return state by the name of each tensor, and then by parameter."""
        return {
            name: {param: tensors[at] for param, tensors in state.items() if at < len(tensors)}
            for at, name in enumerate(self.options.state_names)
        }

    def make_state(self, stored: Mapping[str, Tensor]) -> None:
        """Create missing state. An empty piece has none."""
        self.state |= self.new_state({name: t for name, t in stored.items() if name not in self.state})

    def new_state(self, stored: Mapping[str, Tensor], *, empty: bool = False) -> State:
        """Return zero state for all pieces that are not empty; with `empty`, for the empty ones alone."""
        made = State()
        for name, tensor in stored.items():
            if empty == bool(tensor.numel()):
                continue
            num = len(self.state_names[name])
            if name in self.quantised:
                made |= zero_codes(name, tensor, num)
            else:
                dtype = self.options.wide_dtype(tensor.dtype)
                made[name] = tuple(torch.zeros_like(tensor, dtype=dtype) for _ in range(num))
        return made

    def fuses(self, stored: Mapping[str, Tensor], grads: Mapping[str, Tensor]) -> bool:
        """Return whether `step` can clip, which takes a fused update for each of the pieces."""
        dense = {name: grad for name, grad in grads.items() if name not in self.by_rows}
        if self.quantised or self.matrices is not None or not dense:
            return False
        pieces = ((self.state.get(name, ()), stored[name], grad) for name, grad in dense.items())
        return all(self.options.fuses(piece, grad) and all(map(is_dense, state)) for state, piece, grad in pieces)

    def has_kernel(self, device: torch.device) -> bool:
        """Return whether the fused update works on a device.

        Ranks compare the answer: copies of a parameter would drift apart if one rank updated its copy by the formula.
        """
        if device not in self._has_kernel:
            piece = torch.zeros(16, device=device, dtype=torch.float32)
            self._has_kernel[device] = self.options.fuses(piece, piece)
        return self._has_kernel[device]

    @torch.no_grad()
    def step(
        self, stored: Mapping[str, Tensor], grads: Mapping[str, Tensor], lr: float, clip: Clip | None = None
    ) -> None:
        """Update the stored pieces of the parameters that have gradients; with `clip`, clip them in the same pass."""
        stored = {name: t for name, t in stored.items() if name in grads and t.numel()}
        self.make_state(stored)
        tables = {name: stored.pop(name) for name in [*stored] if name in self.by_rows}
        if clip is not None:
            self._step_fused(stored, grads, lr, clip)  # raises before anything is written
        for name, table in tables.items():
            self._update_rows(name, table, grads[name], lr, clip)
        if clip is None:
            if self._updated != [*stored]:
                self._updated, self._parts = [*stored], list(self._divided(stored))
            for part in self._parts:
                self._update(part, stored, grads, lr)
        self._update_whole(stored, grads, lr)
        self.steps += 1

    def _update_whole(self, stored: Mapping[str, Tensor], grads: Mapping[str, Tensor], lr: float) -> None:
        """Update whole matrices, together with the ranks that store other parts of them."""
        names = [name for name in grads if name in self.whole]  # also parameters without rows on this rank
        if self.matrices is not None and names:
            own = {name: stored[name] for name in names if name in stored}
            self.matrices.update(own, {name: grads[name] for name in names}, self.state, lr)

    def _step_fused(self, stored: Mapping[str, Tensor], grads: Mapping[str, Tensor], lr: float, clip: Clip) -> None:
        """Queue the updates of all pieces; only then wait, and raise if they have written nothing."""
        for decays in (True, False):
            names = [name for name in stored if (name in self.decayed) == decays]
            state = tuple([self.state[name][at] for name in names] for at in range(len(self.options.state_names)))
            slices = Slices(names, [stored[name] for name in names], [grads[name] for name in names], state)
            self.options.fused_update(slices, clip, lr=lr, step=self.steps + 1, decays=decays)
        clip.finite()

    def _divided(self, stored: Mapping[str, Tensor]) -> Iterator[Part]:
        """Divide parameters into parts. All parameters of a part have the same number of state tensors and one decay,
        since fused kernels take one."""
        kinds: dict[tuple[bool, bool, int], dict[str, Tensor]] = {}
        for name, tensor in stored.items():
            kind = (name not in self.whole, name not in self.decayed, len(self.state_names[name]))
            kinds.setdefault(kind, {})[name] = tensor
        for (elementwise, constant, num), some in sorted(kinds.items(), key=lambda each: each[0]):
            whole, decays = not elementwise, not constant
            for slices in _parts(some, self.quantised) if num or elementwise else ():
                is_live = all(self._is_live(name, at, stored[name]) for name, at in slices)
                yield Part(slices, decays, whole, is_live)

    def _update_rows(self, name: str, table: Tensor, grad: Tensor, lr: float, clip: Clip | None) -> None:
        """Update the rows of a table that have a gradient, in slices; all others keep their bytes, and their state.

        An update of all rows is another optimizer: it would decay rows that no token used, and move them by old
        momentum. torch.optim.SparseAdam also updates such rows alone. Bias correction counts the steps of the run.
        """
        rows, most = grad.any(1).nonzero().squeeze(1), max(_PART // table.shape[1], 1)
        factor = 1.0 if clip is None else clip.factor.to(grad.dtype)
        for some in rows.split(most):
            weight, state = table[some], [each[some].to(table.dtype) for each in self.state[name]]
            slices = Slices([name], [weight], [grad[some] * factor], tuple([each] for each in state))
            self.options.update(slices, lr=lr, step=self.steps + 1, decays=name in self.decayed)
            for kept, new in zip((table, *self.state[name]), (weight, *state), strict=True):
                kept[some] = new.to(kept.dtype)

    def _is_live(self, name: str, at: slice | None, stored: Tensor) -> bool:
        """Return whether an update can write the state in place: it is whole, not quantised, and as wide as the
        parameter."""
        is_wide = all(each.dtype == stored.dtype for each in self.state[name])
        return at is None and name not in self.quantised and is_wide

    def _update(self, part: Part, stored: Mapping[str, Tensor], grads: Mapping[str, Tensor], lr: float) -> None:
        """Widen the state of a part if needed, update it, and narrow it again. So wide copies exist for one part at a
        time."""
        views = [_of(stored[name], at) for name, at in part.slices]
        state = [self.state[n] for n, _ in part.slices] if part.live else list(map(self._wide, part.slices, views))
        of_views = [_of(grads[name].contiguous(), at) for name, at in part.slices]
        num = len(self.state_names[part.slices[0][0]])  # the same for all parameters of a part
        by_name = tuple([each[at] for each in state] for at in range(num))
        slices = Slices([name for name, _ in part.slices], views, of_views, by_name, part.whole)
        self.options.update(slices, lr=lr, step=self.steps + 1, decays=part.decays)
        for (name, at), wide in [] if part.live else zip(part.slices, state, strict=True):
            self._store(name, at, wide, self.steps)

    def _wide(self, of: Slice, like: Tensor) -> Sequence[Tensor]:
        """Return the state of a slice in the dtype of the parameter: live memory, if it is stored in this dtype."""
        name, at = of
        if name not in self.quantised:
            state: Sequence[Tensor] = self.state[name]
            if at is not None:
                state = [_of(each, at) for each in state]
            return state if not state or state[0].dtype == like.dtype else [each.to(like.dtype) for each in state]
        assert at is not None
        rows = self._rows(name, at)
        quantised = zip(self.state[name], self.state[name + SCALES], self.options.codes, strict=True)
        wide = [decode(codes[rows], scales[rows], code) for codes, scales, code in quantised]
        return [each.contiguous().view(like.shape).to(like.dtype) for each in wide]

    def _store(self, name: str, at: slice | None, wide: Sequence[Tensor], step: int) -> None:
        """Write updated state back in the form in which it is stored."""
        if name in self.quantised:
            assert at is not None
            self._encode(name, self._rows(name, at), wide, step)
            return
        tensors = self.state[name]
        for narrow, each in zip(tensors, wide, strict=True):
            if narrow.dtype != each.dtype:
                _of(narrow, at).copy_(each)

    def _encode(self, name: str, rows: slice, wide: Sequence[Tensor], step: int) -> None:
        """Quantise rows of state, with the stochastic rounding of a step."""
        # Row numbers are those of the whole matrix, so the same random numbers are drawn on every mesh.
        first, place = self.state[name][0], self.quantised[name]
        width, numbers = first.shape[1], place.rows(first.device)[rows]
        num_cols = num_blocks(width) * BLOCK
        for which, (each, code) in enumerate(zip(wide, self.options.codes, strict=True)):
            random = dice(seed_of(name, which, step), numbers, place.first_col, num_cols)
            new = encode(each.view(-1, width), code, random)
            for key, values in zip((name, name + SCALES), new, strict=True):
                self.state[key][which][rows] = values

    def _rows(self, name: str, at: slice) -> slice:
        """Return the rows of a slice of whole rows."""
        width = self.state[name][0].shape[1]
        return slice(at.start // width, at.stop // width)

    def encode(self, name: str, wide: Sequence[Tensor]) -> None:
        """Quantise state that was loaded, as if the last step had computed it."""
        for at in _slices(wide[0].numel(), _size(wide[0])):
            self._store(name, at, [each.view(-1)[at] for each in wide], self.steps - 1)


def _of(tensor: Tensor, at: slice | None) -> Tensor:
    """Return a flat slice of a tensor, or the tensor itself if `at` is None: making a view takes the host longer than
    the update."""
    return tensor if at is None else tensor.view(-1)[at]


def _size(tensor: Tensor) -> int:
    """Return how many elements of a quantised matrix are updated together: whole rows."""
    width, most = tensor.shape[1], min(_PART, _CODES_HOST if tensor.is_cpu else _CODES)
    return max(most - most % width, width)


def _parts(stored: Mapping[str, Tensor], quantised: Container[str] = ()) -> Iterator[list[Slice]]:
    """Yield slices of flat parameters of one dtype and device: at most `_PART` elements together, or one row of a
    quantised matrix."""
    part: list[Slice] = []
    left, kind = 0, None
    for name, view in stored.items():
        num, its_kind = view.numel(), (view.device, view.dtype)
        for at in _slices(num, _size(view)) if name in quantised else _slices(num, _PART) if num > _PART else (None,):
            size = num if at is None else at.stop - at.start
            if part and (size > left or its_kind != kind):
                yield part
                part = []
            left, kind = (left if part else _PART) - size, its_kind
            part.append((name, at))
    if part:
        yield part


def _slices(num: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, num)) for start in range(0, num, size))
