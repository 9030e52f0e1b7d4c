"""Numbers and scales bit by bit; products and gradients; what a kernel must do before it is used."""

import pytest
import torch

from meshwright.ops import Grid, Quantised, deferred_weight_grads, fp8_matmul, fp8_storage, linear, linears
from tests.ops.references import compare, fp8_block, fp8_matrix, fp8_rows, rand
from tests.ops.rows import experts as experts_of

WIDE = [torch.float64, torch.float32, torch.bfloat16]
CODES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
FINITE = CODES[CODES.isfinite()]


def bits(x):
    return x.contiguous().view(torch.uint8)


def special(*shape, dtype):
    """Blocks of zeros, of subnormals, of ties, of what is too small for a scale, and one value far above the rest."""
    x = rand(*shape, seed=3, grad=False)
    flat = x.view(-1, 128)
    flat[0] = 0
    flat[1, :120] = torch.arange(120) * 2.0**-10
    flat[1, 120] = 448.0  # the scale is 1: halves of the smallest number are ties
    flat[2, :126] = ((FINITE[1:127] + FINITE[:126]) / 2)[:126]
    flat[2, 126:] = 448.0
    flat[3] *= 1e-30
    flat[4] = 1e-45
    flat[5, 7] = -1e6
    return x.to(dtype)


@pytest.mark.parametrize("dtype", WIDE)
def test_rows_bit_by_bit(dtype):
    x = special(5, 384, dtype=dtype)
    assert torch.equal(bits(fp8_matmul.rounded_rows(x)), bits(fp8_rows(x)))


@pytest.mark.parametrize("dtype", WIDE)
def test_matrices_bit_by_bit(dtype):
    weight = special(256, 384, dtype=dtype)
    assert torch.equal(bits(fp8_matmul.rounded_matrix(weight)), bits(fp8_matrix(weight)))


def test_every_code_stays_as_it_is():
    row = torch.cat([FINITE, FINITE[:2]]).view(2, 128)
    assert torch.equal(fp8_matmul.rounded_rows(row), row)


def test_the_grid_of_a_turned_matrix_is_the_turned_grid():
    weight = rand(256, 384, grad=False)
    assert torch.equal(fp8_matmul.rounded_matrix(weight.mT), fp8_matmul.rounded_matrix(weight).mT)


@pytest.mark.parametrize("worst", [torch.inf, -torch.inf, torch.nan])
def test_non_finite_values_stay(worst):
    x = rand(2, 128, grad=False)
    x[1, 5] = worst
    y = linear(x, rand(128, 128, seed=1, grad=False), fp8=True)
    assert y[0].isfinite().all()
    assert not y[1].isfinite().any()


@pytest.mark.parametrize("shape", [(0, 128), (1, 128), (2, 3, 128)])
def test_any_number_of_tokens(shape):
    x = rand(*shape)
    y = linear(x, rand(256, 128, seed=1), fp8=True)
    y.sum().backward()
    assert (*y.shape, x.grad.shape) == (*shape[:-1], 256, x.shape)


class Slow(torch.autograd.Function):
    """One product by its definition: the gradient of the weight is of operands that are not rounded."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return fp8_rows(x) @ fp8_matrix(weight).mT

    @staticmethod
    def backward(ctx, d):
        x, weight = ctx.saved_tensors
        return fp8_rows(d) @ fp8_matrix(weight), d.mT @ x


def weights():
    return [rand(rows, 256, seed=rows) for rows in (128, 384)]


def test_product_and_gradients():
    biases = [rand(len(w), seed=len(w) + 1) for w in weights()]
    compare(
        lambda x, *args: torch.cat(linears(x, args[:2], args[2:], fp8=True), -1),
        lambda x, *args: torch.cat([Slow.apply(x, w) + b for w, b in zip(args[:2], args[2:], strict=True)], -1),
        [rand(7, 256), *weights(), *biases],
    )


def test_bfloat16_is_rounded_first():
    """A master is gathered in the compute dtype: its blocks are of what comes, not of what is stored."""
    x, master = rand(7, 256, dtype=torch.bfloat16), weights()[0].detach().float()
    expected = (fp8_rows(x.detach()) @ fp8_matrix(master.bfloat16()).mT).bfloat16()
    assert torch.equal(linear(x, master, fp8=True), expected)


def test_late_weights_get_the_same_gradients():
    def gradients(jobs):
        args = [rand(7, 256), *weights()]
        if jobs is None:
            torch.cat(linears(args[0], args[1:], fp8=True), -1).square().sum().backward()
        else:
            with deferred_weight_grads.deferring_weight_grads(jobs):
                torch.cat(linears(args[0], args[1:], fp8=True), -1).square().sum().backward()
            for job in jobs:
                job()
        return [g.grad for g in args]

    for now, later in zip(gradients(None), gradients([]), strict=True):
        assert torch.equal(now, later)


def test_a_matrix_without_whole_blocks_is_refused():
    for shape in ((128, 192), (192, 128)):
        with pytest.raises(ValueError, match="multiples of 128"):
            linear(rand(3, shape[1]), rand(*shape), fp8=True)


@pytest.mark.parametrize("which", [(True, True), (True, False), (False, True)])
def test_experts(which):
    counts = torch.tensor([3, 0, 4])

    def slow(x, gate_up, down):
        out = []
        for rows, pair, back in zip(x.split(counts.tolist()), gate_up, down, strict=True):
            both = Slow.apply(rows, pair) if which[0] else rows @ pair.mT
            gate, up = both.chunk(2, -1)
            hidden = torch.nn.functional.silu(gate) * up
            out.append(Slow.apply(hidden, back) if which[1] else hidden @ back.mT)
        return torch.cat(out)

    arguments = [rand(7, 128), rand(3, 512, 128, seed=1), rand(3, 128, 256, seed=2)]
    compare(lambda *args: experts_of(*args, counts, fp8=which), slow, arguments)


def test_a_row_has_the_same_numbers_in_any_company():
    """No routing, no packing and no mesh changes what an expert says of a token."""
    pairs = rand(2, 256, 128, seed=1, grad=False), rand(2, 128, 128, seed=2, grad=False)
    x = rand(6, 128, grad=False)
    both = experts_of(x, *pairs, torch.tensor([3, 3]), fp8=(True, True))
    alone = experts_of(x[2:3], *pairs, torch.tensor([1, 0]), fp8=(True, True))
    assert (both[2:3] - alone).abs().max() <= 1e-12 * alone.abs().max()


def test_a_kernel_gets_what_torch_wants_of_it(monkeypatch):
    """Hopper's: tokens in fours, their scales by column, four scales in a row of the matrix. Made by hand."""
    seen = {}

    def kernel(a, b, scale_a, of_a, scale_b, of_b, output_dtype):
        seen.update(a=a, b=b, scale_a=scale_a, scale_b=scale_b)
        assert a.is_contiguous()
        assert b.t().is_contiguous()  # as torch refuses others
        assert (of_a, of_b) == (fp8_matmul.F.ScalingType.BlockWise1x128, fp8_matmul.F.ScalingType.BlockWise128x128)
        x = a.float().unflatten(1, (-1, 128)) * scale_a[:, :, None]
        grid = scale_b[: a.shape[1] // 128].t().repeat_interleave(128, 0).repeat_interleave(128, 1)
        return (x.flatten(1) @ (b.t().float() * grid).t()).to(output_dtype)

    monkeypatch.setattr(fp8_matmul.F, "scaled_mm", kernel)
    assert fp8_matmul._compare_kernel(torch.device("cpu"), torch.bfloat16)
    assert seen["a"].shape == (68, 384)  # 67 rows
    assert seen["scale_a"].shape == (68, 3)
    assert seen["scale_a"].stride() == (1, 68)
    assert seen["scale_b"].shape == (4, 2)
    assert seen["scale_b"].stride() == (1, 4)
    x, weight = rand(2, 3, 384, dtype=torch.bfloat16, grad=False), rand(256, 384, dtype=torch.bfloat16, grad=False)
    assert torch.equal(fp8_matmul._by_kernel(x, weight), fp8_matmul.emulated(x, weight).bfloat16())
    turned, column = weight.mT.contiguous().mT, x.mT.contiguous().mT
    assert torch.equal(fp8_matmul._by_kernel(column, turned), fp8_matmul.emulated(x, weight).bfloat16())


@pytest.mark.parametrize("wrong", ["raises", "is off"])
def test_a_kernel_that_does_not_agree_is_not_used(monkeypatch, caplog, wrong):
    def kernel(a, b, *_, **__):
        if wrong == "raises":
            raise RuntimeError("no such scaling")
        return torch.zeros(len(a), b.shape[1])

    monkeypatch.setattr(fp8_matmul.F, "scaled_mm", kernel)
    assert not fp8_matmul._compare_kernel(torch.device("cpu"), torch.bfloat16)
    assert ("no such scaling" if wrong == "raises" else "of the norm") in caplog.text


def test_the_slow_form_by_hand():
    """The reference itself: 3 of 448 is a scale of 3 / 448; 1 becomes 149.3, which lies between 144 and 160."""
    block = torch.tensor([3.0, 1.0, 0.0, -3.0], dtype=torch.float64)
    assert torch.allclose(fp8_block(block), torch.tensor([3.0, 144 * 3 / 448, 0.0, -3.0], dtype=torch.float64))


@pytest.mark.gpu
def test_on_an_accelerator():
    """Numbers and scales to the bit, and products by whichever way is taken."""
    device = torch.accelerator.current_accelerator()
    x, weight = special(67, 384, dtype=torch.bfloat16), special(256, 384, dtype=torch.bfloat16)
    assert torch.equal(bits(fp8_matmul.rounded_rows(x.to(device)).cpu()), bits(fp8_matmul.rounded_rows(x)))
    assert torch.equal(
        bits(fp8_matmul.rounded_matrix(weight.to(device)).cpu()), bits(fp8_matmul.rounded_matrix(weight))
    )
    args = [x.to(device).requires_grad_(), weight.to(device).requires_grad_()]
    y = linear(*args, fp8=True)
    y.backward(torch.ones_like(y))
    expected = [fp8_matmul.emulated(x, weight), fp8_matmul.emulated(torch.ones(67, 256), weight.mT)]
    for result, wanted in zip((y, args[0].grad), expected, strict=True):
        assert (result.cpu().double() - wanted.double()).norm() <= 5e-3 * wanted.double().norm()


@pytest.mark.parametrize(("first", "num"), [(0, 128), (100, 28), (100, 29), (127, 2), (130, 250), (256, 3), (37, 0)])
def test_rows_from_anywhere_touch_the_blocks_of_their_matrix(first, num):
    """Row r has -r in its first block of columns, and 1000 + r in the second."""
    numbers = torch.arange(first, first + num, dtype=torch.float32)
    rows = torch.cat([-numbers[:, None].expand(num, 128), 1000 + numbers[:, None].expand(num, 128)], 1)
    grid = [(row, row // 128) for row in range(first, first + num)]
    blocks = range(first // 128, -(-(first + num) // 128))
    last = [max([row for row, block in grid if block == each], default=0) for each in blocks]
    amax = fp8_matmul.block_amax(rows, first)
    expected = [[row, 1000 + row if any(block == each for _, block in grid) else 0]
                for each, row in zip(blocks, last, strict=True)]  # fmt: skip
    assert amax.tolist() == expected
    scales = torch.tensor([[1.0, 4.0], [2.0, 8.0], [4.0, 16.0]])
    codes = fp8_matmul.codes_of(rows, first, scales)
    assert (codes.shape, codes.dtype) == (rows.shape, torch.uint8)
    for code, row, (_, block) in zip(codes, rows, grid, strict=True):
        divided = torch.cat([row[:128] / scales[block, 0], row[128:] / scales[block, 1]])
        assert torch.equal(code, divided.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8))


def test_a_grid_goes_to_a_device_whole():
    grid = Grid(torch.ones(2, 3), torch.zeros(4, dtype=torch.int64), torch.zeros(5, dtype=torch.int64)).to(
        torch.device("meta")
    )
    assert {x.device.type for x in (grid.scales, grid.rows, grid.columns)} == {"meta"}


@pytest.mark.parametrize("elements", [1, 8, 301])
def test_every_part_of_a_matrix_is_dequantised(elements, monkeypatch):
    monkeypatch.setattr(fp8_storage, "_PART", elements)
    codes, scales = torch.tensor([[2.0, 4.0, 8.0]] * 5).to(torch.float8_e4m3fn), torch.tensor([[1.0, 3.0], [5.0, 7.0]])
    grid = Grid(scales, torch.tensor([0, 0, 1, 1, 0]), torch.tensor([0, 1, 1]))
    even, odd = [2.0, 12.0, 24.0], [10.0, 28.0, 56.0]
    assert grid.values(codes.view(torch.uint8), torch.float64).tolist() == [even, even, odd, odd, even]


def stack_of_codes():
    return Quantised(torch.zeros(3, 256, 128, dtype=torch.uint8), torch.ones(3, 2, 1), torch.bfloat16)


@pytest.mark.parametrize(
    "cut",
    [
        lambda x: x.as_strided((3, 256, 128), (256 * 128, 1, 256)),
        lambda x: x.as_strided((3, 256, 128), x.stride(), 128),
        lambda x: x.as_strided((1, 256, 128), x.stride()),
        lambda x: x.transpose(0, 1),
        lambda x: x.transpose(0, 2),
        lambda x: x.select(1, 0),
        lambda x: x[0].select(0, 0),
        lambda x: x.view(12, 64, 128),
        lambda x: x.view(6, 256, 64),
    ],
)
def test_views_that_would_part_codes_from_their_scales_are_refused(cut):
    with pytest.raises(ValueError, match=r"cannot be|can only|has no matrices"):
        cut(stack_of_codes())


def test_views_of_codes_have_the_scales_of_their_blocks():
    x = stack_of_codes()
    x.scales[:] = torch.arange(6.0).view(3, 2, 1)
    assert [each.scales.flatten().tolist() for each in x] == [[0, 1], [2, 3], [4, 5]]
    assert [each.scales.flatten().tolist() for each in x.view(6, 128, 128)] == [[n] for n in range(6)]
    assert (x[1].mT.shape, x[1].mT.scales.tolist()) == ((128, 256), [[2, 3]])
    assert x.as_strided(x.shape, x.stride()).scales.tolist() == x.scales.tolist()
    like = torch.empty_like(x, dtype=torch.float32)
    assert (type(like), like.shape, like.dtype) == (torch.Tensor, x.shape, torch.float32)
    assert torch.empty_like(x).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("dtype", "by_kernel"), [(torch.bfloat16, True), (torch.float16, True), (torch.float32, False)]
)
def test_products_in_32_bits_stay_with_the_formula(dtype, by_kernel, monkeypatch):
    monkeypatch.setattr(fp8_matmul, "SLOW", ())
    monkeypatch.setattr(fp8_matmul, "_has_kernel", lambda *_: True)
    monkeypatch.setattr(fp8_matmul, "_by_kernel", lambda *_: "by kernel")
    y = fp8_matmul.fp8_linear(torch.ones(2, 128, dtype=dtype), torch.ones(128, 128, dtype=dtype))
    assert isinstance(y, str) == by_kernel


@pytest.mark.parametrize(
    ("dtype", "by_kernel"), [(torch.float64, False), (torch.float32, True), (torch.bfloat16, True)]
)
def test_matrices_in_64_bits_are_quantised_by_the_formula(dtype, by_kernel, monkeypatch):
    seen, real = [], fp8_matmul._matrix_operand
    monkeypatch.setattr(fp8_matmul, "_quantises_in_one_kernel", lambda _: True)
    monkeypatch.setattr(
        fp8_matmul, "_matrix_operand", lambda weight, one_kernel: seen.append(one_kernel) or real(weight, False)
    )
    fp8_matmul.quantise(torch.ones(128, 128, dtype=dtype))
    assert seen == [by_kernel]


@pytest.mark.parametrize("which", [(True, False), (False, True)])
def test_one_product_in_fp8_leaves_the_grouped_kernel(which):
    """In float32 a CPU groups experts, which no FP8 product does."""
    args = [rand(7, 128, grad=False), rand(3, 512, 128, seed=1, grad=False), rand(3, 128, 256, seed=2, grad=False)]
    counts = torch.tensor([3, 0, 4])
    wide, narrow = (experts_of(*(x.to(dtype) for x in args), counts, fp8=which) for dtype in WIDE[:2])
    plain = experts_of(*args, counts)
    assert (narrow - wide).norm() < 0.1 * (narrow - plain).norm()
