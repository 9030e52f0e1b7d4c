"""AdamW and the gradient norm over local shards: each element is counted once, and updated where it is stored."""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from ..errors import ConfigError
from ..ops import int8_state
from ..ops.part_sizes import part_size

# elements that are updated together: narrow moments are widened a part at a time
_PART = part_size(__name__, "_PART", 1 << 24, small=1001)
# elements of a gradient that is joined with others: a few MB for thousands of them
_SMALL = part_size(__name__, "_SMALL", 1 << 12, small=101)
# elements that become codes together, which takes a dozen buffers of their size
_CODES = part_size(__name__, "_CODES", 1 << 22, small=701)
# buffers that stay in the cache: larger ones took four times as long
_CODES_HOST = part_size(__name__, "_CODES_HOST", 1 << 19, small=701)
_STATES = (torch.float32, torch.bfloat16, torch.uint8)
_TINY = torch.finfo(torch.float32).tiny  # a smaller eps would be 0
_MOST_BETA = 0.98  # with a larger beta a moment in bfloat16 stands still while the true one moves by 20% and more

Slice = tuple[str, slice | None]  # of a parameter, flat; None: all of it
Moments = dict[str, tuple[Tensor, Tensor]]  # by parameter, the first and the second


def within(value: object, low: float, high: float = math.inf) -> bool:
    """Whether it is a number of at least `low` and below `high`; NaN is not."""
    return isinstance(value, int | float) and low <= value < high


@dataclass(frozen=True)
class Settings:
    """`state`: the dtype in which both moments are stored. None: that of the parameters."""

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    state: torch.dtype | None = None

    def __post_init__(self) -> None:
        betas: object = self.betas
        if not isinstance(betas, tuple | list) or [within(beta, 0, 1) for beta in betas] != [True, True]:
            raise ConfigError(f"betas={self.betas!r} must be two numbers from 0 to below 1")
        if not within(self.eps, _TINY):
            raise ConfigError(f"eps={self.eps!r} must be a number of {_TINY:.2g} or more")
        if not within(self.weight_decay, 0):
            raise ConfigError(f"weight_decay={self.weight_decay!r} must be a number of 0 or more")
        if self.state not in (None, *_STATES):
            raise ConfigError(f"state_dtype={self.state} is not offered; choose from {', '.join(map(str, _STATES))}")
        if self.state == torch.bfloat16 and max(self.betas) > _MOST_BETA:
            raise ConfigError(
                f"state_dtype=torch.bfloat16 with betas={self.betas}: the change of a moment in a step would be "
                f"rounded away; choose betas of at most {_MOST_BETA}, or torch.float32 or torch.uint8"
            )


def squares(grads: Mapping[str, Tensor], owned: Container[str], device: torch.device) -> Tensor:
    """Sum of squares of the gradient elements that this rank owns, in float64."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    alike = defaultdict[tuple[torch.device, torch.dtype], list[Tensor]](list)
    for name, grad in grads.items():
        if name in owned:
            alike[grad.device, grad.dtype].append(grad)
    for some in alike.values():
        norms = torch._foreach_norm(_runs(some), 2.0, torch.float64)
        total += torch.stack(norms).square().sum().to(device)
    return total


def _runs(grads: Sequence[Tensor]) -> list[Tensor]:
    """The same elements. Small gradients are joined: a call for each takes the host longer than the copy. Large ones
    are split: on the host torch widens what it is given, all of it at once."""
    small: list[Tensor] = []
    large: list[Tensor] = []
    for grad in grads:
        if grad.numel() <= _SMALL:
            small.append(grad)
        else:
            large += grad.reshape(-1).split(_PART) if grad.is_cpu and grad.numel() > _PART else [grad]
    return [*large, _flatten_dense_tensors(small)] if small else large


@dataclass(frozen=True)
class Place:
    """Where the stored rows of a matrix lie in the whole one. Its moments are rounded by that, so they are the same on
    every mesh."""

    rows: Callable[[torch.device], Tensor]  # their numbers
    first_col: int


@dataclass(frozen=True)
class Part:
    """What one call updates. `live`: all of it where it is stored; else slices, or moments that are widened for it."""

    slices: list[Slice]
    decay: float
    live: bool


class AdamW:
    """Keeps the moments of the parameters that are trained. The parameters themselves are given to every step: so an
    update is written where the next forward reads.

    `coded`: the matrices whose moments are codes of 8 bits. Beside their moments, which are `uint8`, are the scales of
    these, `NAME.scales`.
    """

    def __init__(self, decayed: Container[str], settings: Settings, coded: Mapping[str, Place] | None = None) -> None:
        self.settings, self.decayed, self.steps, self.coded = settings, decayed, 0, coded or {}
        self.moments: Moments = {}  # made by the first step: until then none takes memory
        self._updated: list[str] = []  # names, by the last step
        self._parts: list[Part] = []  # how they are shared out: made again only where a step updates others

    def make_moments(self, stored: Mapping[str, Tensor]) -> None:
        """Those that are not there yet. An empty piece has none."""
        self.moments |= self.new_moments({name: t for name, t in stored.items() if name not in self.moments})

    def new_moments(self, stored: Mapping[str, Tensor], *, empty: bool = False) -> Moments:
        """Zeros. `empty`: of the empty pieces alone, else of all others."""
        state, made = self.settings.state, Moments()
        wide = None if state == torch.uint8 else state
        for name, tensor in stored.items():
            if empty == bool(tensor.numel()):
                continue
            if name in self.coded:
                made |= zero_codes(name, tensor)
            else:
                made[name] = (torch.zeros_like(tensor, dtype=wide), torch.zeros_like(tensor, dtype=wide))
        return made

    @torch.no_grad()
    def step(self, stored: Mapping[str, Tensor], grads: Mapping[str, Tensor], lr: float) -> None:
        """Update what is stored of the parameters that have gradients."""
        stored = {name: t for name, t in stored.items() if name in grads and t.numel()}
        self.make_moments(stored)
        if self._updated != [*stored]:
            self._updated, self._parts = [*stored], list(self._shared_out(stored))
        for part in self._parts:
            self._update(part, stored, grads, lr)
        self.steps += 1

    def _shared_out(self, stored: Mapping[str, Tensor]) -> Iterator[Part]:
        for decays, decay in ((True, self.settings.weight_decay), (False, 0.0)):
            some = {name: t for name, t in stored.items() if (name in self.decayed) == decays}
            for slices in _parts(some, self.coded):
                yield Part(slices, decay, all(self._is_live(name, at, stored[name]) for name, at in slices))

    def _is_live(self, name: str, at: slice | None, stored: Tensor) -> bool:
        return at is None and name not in self.coded and self.moments[name][0].dtype == stored.dtype

    def _update(self, part: Part, stored: Mapping[str, Tensor], grads: Mapping[str, Tensor], lr: float) -> None:
        views = [_of(stored[name], at) for name, at in part.slices]
        moments = [self.moments[n] for n, _ in part.slices] if part.live else list(map(self._wide, part.slices, views))
        beta1, beta2 = self.settings.betas
        step = torch.full((), self.steps + 1, dtype=torch.float32, device=views[0].device)
        torch._fused_adamw_(  # as torch's optimizer calls it, after it has sorted all that it was given
            views, [_of(grads[name].contiguous(), at) for name, at in part.slices],
            [m for m, _ in moments], [v for _, v in moments], [], [step] * len(views),
            lr=lr, beta1=beta1, beta2=beta2, weight_decay=part.decay, eps=self.settings.eps,
            amsgrad=False, maximize=False,
        )  # fmt: skip
        for (name, at), wide in [] if part.live else zip(part.slices, moments, strict=True):
            self._keep(name, at, wide, self.steps)

    def _wide(self, of: Slice, like: Tensor) -> Sequence[Tensor]:
        """Both moments of a slice, like what they are of: live memory, if they are kept in this dtype."""
        name, at = of
        if name not in self.coded:
            both: Sequence[Tensor] = self.moments[name]
            if at is not None:
                both = [_of(moment, at) for moment in both]
            return both if both[0].dtype == like.dtype else [moment.to(like.dtype) for moment in both]
        assert at is not None
        rows = self._rows(name, at)
        three = zip(self.moments[name], self.moments[name + int8_state.SCALES], int8_state.CODES, strict=True)
        wide = [int8_state.decode(kept[rows], scales[rows], code) for kept, scales, code in three]
        return [moment.contiguous().view(like.shape).to(like.dtype) for moment in wide]

    def _keep(self, name: str, at: slice | None, wide: Sequence[Tensor], step: int) -> None:
        if name in self.coded:
            assert at is not None
            self._encode(name, self._rows(name, at), wide, step)
            return
        both = self.moments[name]
        if both[0].dtype != wide[0].dtype:
            for kept, moment in zip(both, wide, strict=True):
                _of(kept, at).copy_(moment)

    def _encode(self, name: str, rows: slice, wide: Sequence[Tensor], step: int) -> None:
        first, place = self.moments[name][0], self.coded[name]
        width, numbers = first.shape[1], place.rows(first.device)[rows]
        num_cols = int8_state.num_blocks(width) * int8_state.BLOCK
        for which, (moment, code) in enumerate(zip(wide, int8_state.CODES, strict=True)):
            seed = zlib.crc32(name.encode()) | which << 32 | step << 33
            dice = int8_state.dice(seed, numbers, place.first_col, num_cols)
            new = int8_state.encode(moment.view(-1, width), code, dice)
            for kept, found in zip((name, name + int8_state.SCALES), new, strict=True):
                self.moments[kept][which][rows] = found

    def _rows(self, name: str, at: slice) -> slice:
        """Those of a slice of whole rows."""
        width = self.moments[name][0].shape[1]
        return slice(at.start // width, at.stop // width)

    def encode(self, name: str, wide: Sequence[Tensor]) -> None:
        """Keep moments that were reckoned elsewhere, as if the last step had made them."""
        for at in _slices(wide[0].numel(), _size(wide[0])):
            self._keep(name, at, [moment.view(-1)[at] for moment in wide], self.steps - 1)


def _of(tensor: Tensor, at: slice | None) -> Tensor:
    """Some of the elements of a tensor, flat; itself, if these are all. Views take longer than what they are for."""
    return tensor if at is None else tensor.view(-1)[at]


def zero_codes(name: str, stored: Tensor) -> Moments:
    """Moments in 8 bits, and their scales."""
    grid = (len(stored), int8_state.num_blocks(stored.shape[1]))
    first, second = (torch.zeros_like(stored, dtype=torch.uint8) for _ in range(2))
    return {name: (first, second),
            name + int8_state.SCALES: (stored.new_zeros(grid, dtype=torch.float32),
                                  stored.new_zeros(grid, dtype=torch.float32))}  # fmt: skip


def _size(tensor: Tensor) -> int:
    """How many elements of a matrix in codes are updated together: whole rows."""
    width, most = tensor.shape[1], min(_PART, _CODES_HOST if tensor.is_cpu else _CODES)
    return max(most - most % width, width)


def _parts(stored: Mapping[str, Tensor], coded: Container[str] = ()) -> Iterator[list[Slice]]:
    """Slices of flat parameters: of one kind, and at most `_PART` elements together, or one row of codes."""
    part: list[Slice] = []
    left, kind = 0, None
    for name, view in stored.items():
        num, its_kind = view.numel(), (view.device, view.dtype)
        for at in _slices(num, _size(view)) if name in coded else _slices(num, _PART) if num > _PART else (None,):
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
