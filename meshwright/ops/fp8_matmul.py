"""FP8 (E4M3) block-scaled matmul: `y = Q1(x) @ Q2(W).T`, as DeepSeek-V3 trains (arXiv 2412.19437, section 3.3).

Q1 rounds every 128 features of a token with one scale (1 x 128 blocks), Q2 every 128 x 128 block of a matrix. Small
blocks keep an outlier from flushing its whole tensor to zero, as one scale per tensor would. Weights use square blocks,
so that W and W.mT have the same scales and forward and backward see the same rounded W.

No mesh cuts through a block (`sharding.check_fp8` refuses such a mesh), so a block has the same scale on every mesh,
and no scale of a matmul needs another rank. A weight may also come as FP8 codes and scales (`Blocks`): from an FP8
all-gather, or quantised earlier in the step. The weight gradient is not rounded to FP8.

Shapes: M tokens, N output and K input features.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..log import logger
from .fp8_tensor import Blocks, Quantised
from .kernels import NARROW, SLOW, in_own_thread
from .kernels.trials import agrees

Matrix = Tensor | Blocks  # a weight of a matmul: values, or codes and scales

BLOCK = 128
NUMBERS = torch.float8_e4m3fn
LARGEST = torch.finfo(NUMBERS).max  # 448
_KERNEL_DTYPES = (*NARROW, torch.float32)  # of matrices that kernels/fp8_blocks.py takes
_TOLERANCE = 2e-3  # relative to the norm: a sum in another order, then rounded to bfloat16, differs by this much


def fp8_linear(x: Tensor, weight_NK: Matrix) -> Tensor:
    """Return Q1(x) @ Q2(W).T. The gradient of x is the same product with W.mT: one grid of scales serves both."""
    misfits = [size for size in weight_NK.shape if size % BLOCK]
    if misfits:
        raise ValueError(
            f"an FP8 matmul needs dims that are multiples of {BLOCK}, but the matrix is {tuple(weight_NK.shape)}; "
            "leave it out with fp8_skip="
        )
    if x.device.type not in SLOW and x.dtype in NARROW and _has_kernel(x.device, x.dtype):
        return _by_kernel(x, weight_NK)
    return emulated(x, weight_NK)


def emulated(x: Tensor, weight_NK: Matrix) -> Tensor:
    """Compute the reference result of an FP8 matmul, in at least float32.

    A kernel may differ from it only in the order of sums.
    """
    return F.linear(rounded_rows(x), rounded_matrix(weight_NK))


def rounded_rows(x: Tensor) -> Tensor:
    """Return Q1(x), dequantised, in at least float32."""
    codes, scales = _quantised_rows(x)
    return (codes.to(scales.dtype) * scales).flatten(-2)


def rounded_matrix(weight_NK: Matrix) -> Tensor:
    """Return Q2(W), dequantised, in at least float32."""
    codes, scales = _quantised_matrix(weight_NK)
    return (codes.to(scales.dtype) * scales).flatten(2).flatten(0, 1)


def _quantised_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise activations. -> codes [..., K / 128, 128], scales [..., K / 128, 1]"""
    return _quantised(x.unflatten(-1, (-1, BLOCK)), (-1,))


def _quantised_matrix(weight_NK: Matrix) -> tuple[Tensor, Tensor]:
    """Quantise a weight. -> codes [N / 128, 128, K / 128, 128], scales [N / 128, 1, K / 128, 1]"""
    if isinstance(weight_NK, Quantised | Blocks):
        return _in_blocks(weight_NK.codes.view(NUMBERS)), weight_NK.scales[:, None, :, None]
    return _quantised(_in_blocks(weight_NK), (1, 3))


def _in_blocks(weight_NK: Tensor) -> Tensor:
    """View a matrix [N, K] as blocks [N / 128, 128, K / 128, 128]."""
    return weight_NK.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))


def _quantised(blocks: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return the codes and scales of blocks that span `dims`. A block of zeros has the scale 1."""
    values = blocks.to(torch.promote_types(blocks.dtype, torch.float32))
    scales = scales_of(values.abs().amax(dims, keepdim=True))
    return _round_to_fp8(values, scales), scales


def scales_of(largest: Tensor) -> Tensor:
    """Return the scale of each block from its largest magnitude, which maps to the largest E4M3 value.

    Scales stay float32: rounding them up to powers of two, as some formats do, would waste up to one bit of range.
    """
    # Divide by a tensor: a GPU computes a division by a Python number as a multiplication with its inverse, which
    # rounds differently, and scales must be bitwise equal on every device.
    scales = largest / torch.full_like(largest, LARGEST)
    return scales.where(scales > 0, 1.0)


def _round_to_fp8(values: Tensor, scales: Tensor) -> Tensor:
    """Divide by the scales and round to E4M3."""
    # E4M3 has no infinity, and some devices convert a value that is too large to NaN. The division may round up past
    # LARGEST.
    return (values / scales).clamp(-LARGEST, LARGEST).to(NUMBERS)


def block_amax(rows_RK: Tensor, first: int) -> Tensor:
    """Return the largest magnitude of each block that these rows of a matrix touch, counting only elements of these
    rows.

    The rows begin at row `first`. An all-reduce MAX over the ranks that hold a block then gives the magnitude of the
    whole.
    """
    padded = F.pad(rows_RK.abs(), (0, 0, first % BLOCK, -(first + len(rows_RK)) % BLOCK))
    return padded.unflatten(0, (-1, BLOCK)).amax(1).unflatten(1, (-1, BLOCK)).amax(2)  # over rows first: fast on a CPU


def codes_of(rows_RK: Tensor, first: int, scales: Tensor) -> Tensor:
    """Return the FP8 codes of rows of a matrix from row `first` on; `scales` are those of all its blocks."""
    at = torch.arange(first, first + len(rows_RK), device=scales.device) // BLOCK
    blocks = rows_RK.to(scales.dtype).unflatten(1, (-1, BLOCK))
    return _round_to_fp8(blocks, scales[at][..., None]).flatten(1).view(torch.uint8)


def concat_weights(weights: Sequence[Matrix]) -> Matrix:
    """Concatenate matrices by rows. If one of them is quantised, quantise the others too, each in its own blocks."""
    plain = [weight for weight in weights if isinstance(weight, Tensor) and not isinstance(weight, Quantised)]
    return torch.cat(plain) if len(plain) == len(weights) else join([quantise(weight) for weight in weights])


def join(parts: Sequence[Blocks]) -> Blocks:
    """Concatenate quantised matrices by rows."""
    return Blocks(torch.cat([part.codes for part in parts]), torch.cat([part.scales for part in parts]))


def quantise(weight_NK: Matrix) -> Blocks:
    """Quantise a matrix to codes and scales, which serve forward, recompute and backward; `Blocks` pass through."""
    if isinstance(weight_NK, Blocks):
        return weight_NK
    if isinstance(weight_NK, Quantised):
        return weight_NK.blocks
    one_kernel = weight_NK.dtype in _KERNEL_DTYPES and _quantises_in_one_kernel(weight_NK.device)
    codes, scales = _matrix_operand(weight_NK, one_kernel)
    return Blocks(codes.view(torch.uint8), scales.contiguous())


def _by_kernel(x: Tensor, weight_NK: Matrix) -> Tensor:
    """Call torch's `scaled_mm`.

    It needs row-major operands (W.mT is not), a multiple of 4 tokens, the scales of tokens in column-major order, and a
    multiple of 4 scales per row of W.
    """
    rows_MK = x.flatten(0, -2)
    num_rows, (num_out, width) = len(rows_MK), weight_NK.shape
    one_kernel = _quantises_in_one_kernel(x.device)
    codes, scales = _rows_operand(rows_MK, -num_rows % 4, one_kernel)
    weight_codes, weight_scales = _matrix_operand(weight_NK, one_kernel)
    grid = F.pad(weight_scales, (0, -(width // BLOCK) % 4)).contiguous()
    y: Tensor = F.scaled_mm(
        codes, weight_codes.t(), scales, F.ScalingType.BlockWise1x128,
        grid.t(), F.ScalingType.BlockWise128x128, output_dtype=x.dtype,
    )  # fmt: skip
    return y[:num_rows].view(*x.shape[:-1], num_out)


def _rows_operand(rows_MK: Tensor, num_padding: int, one_kernel: bool) -> tuple[Tensor, Tensor]:
    """Quantise activations, followed by rows of zeros. -> codes [M, K], scales [M, K / 128] by column"""
    if one_kernel:
        from .kernels import fp8_blocks

        return fp8_blocks.quantised_rows(rows_MK, num_padding)
    codes, scales = _quantised_rows(F.pad(rows_MK, (0, 0, 0, num_padding)))
    return codes.flatten(1).contiguous(), scales.squeeze(-1).t().contiguous().t()


def _matrix_operand(weight_NK: Matrix, one_kernel: bool) -> tuple[Tensor, Tensor]:
    """Quantise a weight, unless it is quantised. -> codes [N, K], contiguous, scales [N / 128, K / 128]"""
    if one_kernel:
        from .kernels import fp8_blocks

        if not isinstance(weight_NK, Quantised | Blocks):
            return fp8_blocks.quantised_matrix(weight_NK)
        if weight_NK.codes.mT.is_contiguous():  # as in backward
            return fp8_blocks.turned(weight_NK.codes.mT).view(NUMBERS), weight_NK.scales
    codes, scales = _quantised_matrix(weight_NK)
    return codes.reshape(weight_NK.shape).contiguous(), scales[:, 0, :, 0]


def _quantises_in_one_kernel(device: torch.device) -> bool:
    """Return whether kernels/fp8_blocks.py quantises here, to the same bits as the formulas above."""
    return agrees("fp8_blocks", None, device, functools.partial(_compare_quantised, device), 0.0)


def _compare_quantised(device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
    """Return codes and scales of numbers of every kind by the kernel, and by the formula."""
    results: tuple[list[Tensor], list[Tensor]] = ([], [])
    for into, one_kernel in zip(results, (True, False), strict=True):
        for dtype in (*NARROW, torch.float32):
            x_MK = _numbers_of_every_kind().to(device, dtype)
            codes, scales = _matrix_operand(x_MK[:, :128], one_kernel=False)
            quantised = Blocks(codes.view(torch.uint8), scales)
            matrices: list[Matrix] = [x_MK, x_MK.mT, quantised, quantised.mT]
            operands = [_matrix_operand(matrix, one_kernel) for matrix in matrices]
            operands += [_rows_operand(x, 3, one_kernel) for x in (x_MK[:45], x_MK.mT)]
            for codes, scales in operands:
                bits = codes.view(torch.uint8)
                into += [bits.where(bits & 127 != 127, 127), scales]  # the sign of NaN codes depends on the device
    return results


def _numbers_of_every_kind() -> Tensor:
    """Return 256 x 256 numbers: of any magnitude, ties, zeros, and some that are not finite."""
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(0), device="cpu")
    x *= torch.logspace(-12, 4, 256)[:, None].roll(128, 0)
    x[0, :128], x[2, :128] = 0.0, 1e-42
    x[1, :128] = torch.arange(128) * 2.0**-10
    x[1, 0] = 448.0  # makes the scale 1, so odd multiples are ties of subnormal codes
    x[3, 5], x[4, 7], x[140, 200] = torch.nan, -torch.inf, torch.inf
    return x


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether torch's kernel agrees with `emulated`.

    It is tried once per device and dtype, and waits for the device.
    """
    return _kernel_agrees(device, dtype)


@functools.cache
def _kernel_agrees(device: torch.device, dtype: torch.dtype) -> bool:
    """Cache the comparison; `_has_kernel` itself is constant-folded by `torch.compile`."""
    return in_own_thread(lambda: _compare_kernel(device, dtype), device)


def _compare_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Compare the kernel with `emulated` on random matrices whose blocks differ in magnitude by 10**8."""
    noise = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, 384, generator=noise) for rows in (67, 256))
    x[:, :128] *= torch.logspace(-4, 4, 67)[:, None]  # each block needs its own scale
    x, weight = x.to(device, dtype), weight.to(device, dtype)
    transposed = weight.mT.contiguous().mT  # the strides that a weight has in backward
    try:
        outputs = torch.cat([_by_kernel(x, weight), _by_kernel(x.mT.contiguous().mT, transposed)])
    except torch.OutOfMemoryError:  # says nothing about the kernel, and the answer would be cached for good
        raise
    except Exception as error:  # noqa: BLE001 - whatever a kernel raises, ours works
        logger.warning("no FP8 matmul kernel on %s (%s); FP8 is emulated, which is slow", device, error)
        return False
    expected = emulated(x, weight).to(dtype).repeat(2, 1)
    off = ((outputs.float() - expected.float()).norm(dim=1) / expected.float().norm(dim=1)).max().item()
    if not off <= _TOLERANCE:  # NaN too
        logger.warning(
            "the FP8 matmul kernel is off by %.1e of the norm on %s; FP8 is emulated, which is slow", off, device
        )
    return off <= _TOLERANCE
