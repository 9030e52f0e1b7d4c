"""Codes and scales of kernels/fp8_blocks.py are equal to the bit to those of ops/fp8_matmul.py."""

import pytest
import torch
import torch.nn.functional as F

from meshwright.ops import fp8_matmul
from meshwright.ops.kernels import trials
from tests.interpreter import kernels_of, planted
from tests.ops.references import rand

CODES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
FINITE = CODES[CODES.isfinite()].unique()
TIES = (FINITE[1:] + FINITE[:-1]) / 2


def bits(x):
    return x.contiguous().flatten().view(torch.uint8)


def sample(num_rows, width, seed=0):
    """Blocks of any magnitude; each code, each tie and its neighbours; zeros, subnormals, and what is not finite."""
    x = rand(num_rows, width, seed=seed, dtype=torch.float32, grad=False)
    x *= torch.logspace(-8, 8, num_rows)[:, None]
    special = torch.cat([FINITE, TIES, *(TIES.nextafter(torch.tensor(to)) for to in (-torch.inf, torch.inf))])
    runs = [torch.cat([TIES[i::9][:127], torch.tensor([448.0])]) for i in range(2)]
    runs = [
        factor * F.pad(run, (0, 128 - len(run))) for run in runs for factor in (3.7, 0.3, 1e-5)
    ]  # scales of any digits
    runs += [torch.cat([special[i : i + 127], torch.tensor([448.0])]) for i in range(0, len(special) - 127, 127)]
    runs += [torch.zeros(128), torch.full((128,), 1e-45), torch.full((128,), -1e-40), 1e-30 * torch.randn(128)]
    for at, worst in enumerate((torch.nan, torch.inf, -torch.inf)):
        runs.append(torch.randn(128).where(torch.arange(128) != 40 * at, worst))
    blocks = x.view(-1, 128)
    chosen = runs[: len(blocks)] if len(blocks) > 1 else []
    for at, run in enumerate(chosen):
        blocks[-1 - at] = run
    return x


def check_rows(kernels, x, padding=0):
    codes, scales = kernels.quantised_rows(x, padding)
    want_codes, want_scales = fp8_matmul._rows_operand(x, padding, one_kernel=False)
    assert (codes.dtype, codes.shape, codes.stride()) == (want_codes.dtype, want_codes.shape, want_codes.stride())
    assert scales.shape == want_scales.shape
    assert scales.t().is_contiguous()
    assert torch.equal(bits(scales), bits(want_scales)), "scales"
    assert torch.equal(bits(codes), bits(want_codes)), "codes"


def check_matrix(kernels, weight):
    codes, scales = kernels.quantised_matrix(weight)
    want_codes, want_scales = fp8_matmul._matrix_operand(weight, one_kernel=False)
    assert (codes.dtype, codes.shape) == (want_codes.dtype, want_codes.shape)
    assert codes.is_contiguous()
    assert torch.equal(bits(scales), bits(want_scales)), "scales"
    assert torch.equal(bits(codes), bits(want_codes)), "codes"


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("num_rows", [0, 1, 31, 33, 70])
def test_rows(num_rows, padding):
    check_rows(kernels_of("fp8_blocks"), sample(num_rows, 384), padding)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_of_16_bits(dtype):
    x = sample(33, 256)
    x[x.abs() < 1e-38] = 0.0  # the interpreter widens subnormal bfloat16 numbers wrongly
    check_rows(kernels_of("fp8_blocks"), x.to(dtype), 3)


def test_rows_of_any_strides():
    wide = sample(70, 512)
    check_rows(kernels_of("fp8_blocks"), wide[1::2, 128:384])
    check_rows(kernels_of("fp8_blocks"), sample(128, 40).mT[:, :128])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (384, 128)])
def test_matrices_and_their_transposes(shape, dtype):
    for seed in range(2):
        weight = sample(*shape, seed=seed).nan_to_num(1.0, 2.0, 3.0)
        weight = weight.where(weight.abs() > 1e-38, 0.0).to(dtype)  # see above
        check_matrix(kernels_of("fp8_blocks"), weight)
        check_matrix(kernels_of("fp8_blocks"), weight.mT)


@pytest.mark.parametrize("worst", [torch.nan, torch.inf, -torch.inf, 0.0, 1e-45])
def test_a_block_with_something_else(worst):
    weight = rand(256, 256, dtype=torch.float32, grad=False)
    weight[128:, :128] = 0.0
    weight[200, 5] = worst
    check_matrix(kernels_of("fp8_blocks"), weight)


def check_turned(kernels):
    codes = torch.randint(0, 256, (256, 384), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    turned = kernels.turned(codes)
    assert turned.is_contiguous()
    assert torch.equal(turned, codes.mT)


def test_codes_turned_for_backward():
    check_turned(kernels_of("fp8_blocks"))


def test_one_matrix_in_a_wider_one():
    check_matrix(kernels_of("fp8_blocks"), sample(256, 512)[:, 128:384].nan_to_num(1.0, 2.0, 3.0))


PLANTS = [
    ("a scale for all rows", "tl.max(tl.abs(wide), 1), tl", "tl.max(tl.max(tl.abs(wide), 1), 0) + 0 * row, tl"),
    ("the scale of another block", "block.to(tl.int64) * num_out", "(block // 2).to(tl.int64) * num_out"),
    ("ties away from zero", "((magnitude >> 20) & 1)", "1"),
    ("toward zero", "magnitude + 0x7FFFF + ((magnitude >> 20) & 1)", "magnitude"),
    ("no subnormal codes", "tl.where(magnitude < 0x3C800000, subnormal, normal)", "normal"),
    ("the first subnormal too late", "magnitude < 0x3C800000", "magnitude < 0x3C000000"),
    ("the sign is lost", "| sign)", "| (sign & 0))"),
    ("NaN is a number", "tl.where(magnitude > 0x7F800000, 0x7F, code)", "code"),
    ("NaN is not seen in the scale", "& (num_nans == 0)", ""),
    ("zero as a scale", "tl.where((scale > 0) & (num_nans == 0), scale, 1.0)", "tl.where(num_nans == 0, scale, 1.0)"),
    ("powers of two", "scale = tl.div_rn(largest, 448.0)", "scale = tl.exp2(tl.ceil(tl.log2(largest / 448.0)))"),
    ("240, of another format", "tl.div_rn(largest, 448.0)", "tl.div_rn(largest, 240.0)"),
    ("a multiplication for a division", "tl.div_rn(x, scale)", "x * tl.div_rn(1.0, scale)"),
    ("the last row left out", "mask=(row < M)[:, None], other", "mask=(row < M - 1)[:, None], other"),
    ("padding is not written", "code, mask=(row < num_out)[:, None]", "code, mask=(row < M)[:, None]"),
    ("a transposed block stays as it was", "code = tl.trans(code)", "code = code"),
    ("codes are not turned", "n * SIDE + j, tl.trans(block)", "n * SIDE + j, block"),
    ("codes of another block", "(k * SIDE + i) * N", "(k // 2 * SIDE + i) * N"),
    ("scales by column for a matrix", "n * tl.num_programs(1) + k, scale", "k * tl.num_programs(0) + n, scale"),
]  # fmt: skip


def check_all(kernels):
    check_rows(kernels, sample(33, 384), 3)
    weight = sample(256, 384).nan_to_num(1.0, 2.0, 3.0)
    weight[3, 5] = torch.nan
    check_matrix(kernels, weight)
    check_matrix(kernels, weight.mT)
    check_turned(kernels)


@pytest.mark.parametrize(("old", "new"), [p[1:] for p in PLANTS], ids=[p[0] for p in PLANTS])
def test_planted_bugs_are_seen(old, new, tmp_path, monkeypatch):
    kernels = planted("fp8_blocks", old, new, tmp_path)
    real = torch.Tensor.new_empty  # nothing is right by the luck of a fresh page
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda x, *shape, **more: real(x, *shape, **more).fill_(77))
    with pytest.raises(AssertionError):
        check_all(kernels)


def test_the_trial_accepts_the_kernel_and_no_planted_one(monkeypatch, tmp_path, caplog):
    kernels_of("fp8_blocks")
    monkeypatch.setattr(trials, "SLOW", ())
    for old, new in ((None, None), *(plant[1:] for plant in PLANTS[1:4])):
        monkeypatch.setattr(trials, "_passed", {})
        kernels = planted("fp8_blocks", old, new, tmp_path) if old else kernels_of("fp8_blocks")
        for name in ("quantised_rows", "quantised_matrix", "turned"):
            monkeypatch.setattr(f"meshwright.ops.kernels.fp8_blocks.{name}", getattr(kernels, name))
        assert fp8_matmul._quantises_in_one_kernel(torch.device("cpu")) is (old is None), (old, caplog.text)
    assert "kernel fp8_blocks is off by" in caplog.text


def test_no_kernel_on_a_cpu():
    assert not fp8_matmul._quantises_in_one_kernel(torch.device("cpu"))


def test_operands_by_the_formula_are_the_blocks_of_the_product():
    """Dequantised, the operands of `scaled_mm` are those that `emulated` multiplies."""
    x, weight = rand(7, 256, dtype=torch.float32, grad=False), rand(384, 256, seed=1, dtype=torch.float32, grad=False)
    codes, scales = fp8_matmul._rows_operand(x, 1, one_kernel=False)
    assert torch.equal(codes[:7].float() * scales[:7].repeat_interleave(128, 1), fp8_matmul.rounded_rows(x))
    codes, scales = fp8_matmul._matrix_operand(weight.mT, one_kernel=False)
    grid = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert torch.equal(codes.float() * grid, fp8_matmul.rounded_matrix(weight.mT))
