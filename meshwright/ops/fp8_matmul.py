"""Products in 8-bit floating point: `y = Q1(x) @ Q2(W).T`, with a scale for each block.

Q1 rounds each 128 features of a token, Q2 each 128 x 128 of a matrix, to E4M3. No cut of a mesh falls inside of a block
(`sharding.check_fp8`), so a block has the same scale on every mesh, and no scale of a product needs another rank.
Scales are made from the values at each product; or a matrix comes as numbers already, where ranks have sent each other
these in the place of values (`Quantised`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..log import logger
from .fp8_tensor import Quantised
from .kernels import NARROW, SLOW, apart

BLOCK = 128
NUMBERS = torch.float8_e4m3fn
LARGEST = torch.finfo(NUMBERS).max
_TOLERANCE = 2e-3  # of a norm: what is rounded to bfloat16 after sums in another order


def fp8_linear(x: Tensor, weight_NK: Tensor) -> Tensor:
    """Q1(x) @ Q2(W).T. The gradient of x is the same product, with W.mT: the grid of W serves both."""
    misfits = [size for size in weight_NK.shape if size % BLOCK]
    if misfits:
        raise ValueError(
            f"a product in 8 bits has blocks of {BLOCK}, and a matrix {tuple(weight_NK.shape)} none that fit"
        )
    if x.device.type not in SLOW and x.dtype in NARROW and _has_kernel(x.device, x.dtype):
        return _by_kernel(x, weight_NK)
    return emulated(x, weight_NK)


def emulated(x: Tensor, weight_NK: Tensor) -> Tensor:
    """What the numbers of such a product are, in at least float32. A kernel may sum in another order, and no more."""
    return F.linear(rounded_rows(x), rounded_matrix(weight_NK))


def rounded_rows(x: Tensor) -> Tensor:
    """Q1(x), in at least float32."""
    numbers, scales = _quantised_rows(x)
    return (numbers.to(scales.dtype) * scales).flatten(-2)


def rounded_matrix(weight_NK: Tensor) -> Tensor:
    """Q2(W), in at least float32."""
    numbers, scales = _quantised_matrix(weight_NK)
    return (numbers.to(scales.dtype) * scales).flatten(2).flatten(0, 1)


def _quantised_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """[..., K / 128, 128], and scales [..., K / 128, 1]."""
    return _quantised(x.unflatten(-1, (-1, BLOCK)), (-1,))


def _quantised_matrix(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
    """[N / 128, 128, K / 128, 128], and scales [N / 128, 1, K / 128, 1]."""
    if isinstance(weight_NK, Quantised):
        return _in_blocks(weight_NK.codes.view(NUMBERS)), weight_NK.scales[:, None, :, None]
    return _quantised(_in_blocks(weight_NK), (1, 3))


def _in_blocks(weight_NK: Tensor) -> Tensor:
    return weight_NK.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))


def _quantised(blocks: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Numbers, and the scale of each block. A block of zeros has the scale 1."""
    wide = blocks.to(torch.promote_types(blocks.dtype, torch.float32))
    scales = scales_of(wide.abs().amax(dims, keepdim=True))
    return _numbers(wide, scales), scales


def scales_of(largest: Tensor) -> Tensor:
    """Of blocks with these largest values."""
    # by a tensor: a GPU divides by a number as it multiplies by its inverse, which rounds otherwise
    scales = largest / torch.full_like(largest, LARGEST)
    return scales.where(scales > 0, 1.0)


def _numbers(wide: Tensor, scales: Tensor) -> Tensor:
    # some devices make NaN of what is too large
    return (wide / scales).clamp(-LARGEST, LARGEST).to(NUMBERS)


def largest_of(rows_RK: Tensor, first: int) -> Tensor:
    """The largest value of each block of a matrix that these rows meet, as far as they are in it. They are some of its
    rows, from row `first` on."""
    whole = F.pad(rows_RK.abs(), (0, 0, first % BLOCK, -(first + len(rows_RK)) % BLOCK))
    return whole.unflatten(0, (-1, BLOCK)).amax(1).unflatten(1, (-1, BLOCK)).amax(2)  # over rows first: fast on a CPU


def codes_of(rows_RK: Tensor, first: int, scales: Tensor) -> Tensor:
    """The numbers of some rows of a matrix, from row `first` on; `scales` are those of all of its blocks."""
    at = torch.arange(first, first + len(rows_RK), device=scales.device) // BLOCK
    blocks = rows_RK.to(scales.dtype).unflatten(1, (-1, BLOCK))
    return _numbers(blocks, scales[at][..., None]).flatten(1).view(torch.uint8)


def stacked(weights: Sequence[Tensor]) -> Tensor:
    """Several matrices as one. If one of them came as numbers, so do the others, each in blocks of its own."""
    if not any(isinstance(weight, Quantised) for weight in weights):
        return torch.cat([*weights])
    low = [weight if isinstance(weight, Quantised) else _as_numbers(weight) for weight in weights]
    return Quantised(torch.cat([w.codes for w in low]), torch.cat([w.scales for w in low]), low[0].dtype)


def _as_numbers(weight_NK: Tensor) -> Quantised:
    numbers, scales = _quantised_matrix(weight_NK)
    return Quantised(numbers.reshape(weight_NK.shape).view(torch.uint8), scales[:, 0, :, 0], weight_NK.dtype)


def _by_kernel(x: Tensor, weight_NK: Tensor) -> Tensor:
    """torch's. It wants rows that lie one after the other on both sides, whatever strides came (W.mT has others), a
    multiple of 4 tokens, their scales by column, and a multiple of 4 scales in a row of W."""
    rows_MK = x.flatten(0, -2)
    num_rows, (num, width) = len(rows_MK), weight_NK.shape
    numbers, scales = _quantised_rows(F.pad(rows_MK, (0, 0, 0, -num_rows % 4)))
    of_weight, weight_scales = _quantised_matrix(weight_NK)
    grid = F.pad(weight_scales.view(num // BLOCK, width // BLOCK), (0, -(width // BLOCK) % 4)).contiguous()
    y: Tensor = F.scaled_mm(
        numbers.flatten(1).contiguous(), of_weight.reshape(num, width).contiguous().t(),
        scales.squeeze(-1).t().contiguous().t(), F.ScalingType.BlockWise1x128,
        grid.t(), F.ScalingType.BlockWise128x128, output_dtype=x.dtype,
    )  # fmt: skip
    return y[:num_rows].view(*x.shape[:-1], num)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch's kernel agrees with what is emulated here. It is tried once, and waits for the device."""
    return _tried(device, dtype)


@functools.cache
def _tried(device: torch.device, dtype: torch.dtype) -> bool:
    return apart(lambda: _agrees(device, dtype), device)


def _agrees(device: torch.device, dtype: torch.dtype) -> bool:
    noise = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, 384, generator=noise) for rows in (67, 256))
    x[:, :128] *= torch.logspace(-4, 4, 67)[:, None]  # each block needs a scale of its own
    x, weight = x.to(device, dtype), weight.to(device, dtype)
    turned = weight.mT.contiguous().mT  # as the weight of a backward comes
    try:
        found = torch.cat([_by_kernel(x, weight), _by_kernel(x.mT.contiguous().mT, turned)])
    except Exception as error:  # noqa: BLE001 - whatever a kernel raises, ours works
        logger.warning("no kernel for products in 8 bits on %s (%s); they are emulated, which is slow", device, error)
        return False
    due = emulated(x, weight).to(dtype).repeat(2, 1)
    off = ((found.float() - due.float()).norm(dim=1) / due.float().norm(dim=1)).max().item()
    if not off <= _TOLERANCE:  # NaN too
        logger.warning(
            "the kernel for products in 8 bits is off by %.1e of the norm on %s; it is not used", off, device
        )
    return off <= _TOLERANCE
