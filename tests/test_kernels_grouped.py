"""Grouped products of kernels/grouped_matmul.py, next to a loop over experts, and where each of both runs."""

import sys
from functools import partial
from importlib import import_module

import pytest
import torch
import torch.nn.functional as F

from meshwright.ops import deferred_weight_grads, fp8_storage, meta_kernels, rows
from meshwright.ops.experts import LowRank
from meshwright.ops.kernels import trials
from meshwright.parallel import recompute
from tests.interpreter import assert_close, kernels_of, planted
from tests.ops.references import differentiate, rand

experts = import_module("meshwright.ops.experts")  # the package has the function under this name
NAME = "meshwright.ops.kernels.grouped_matmul"
# Rows of each expert, rows of its matrix, columns of its matrix. Tiles have 128 rows and up to 128 columns.
LOOK = 4  # experts that a program looks at together; 128 would be slow to interpret
CASES = {
    "no expert": ([], 3, 4),
    "no row": ([0, 0], 3, 4),
    "one row": ([1], 1, 1),
    "one expert of some tiles": ([300], 16, 130),
    "odd": ([3, 0, 130, 1], 7, 5),
    "whole tiles": ([128, 0, 256], 32, 16),
    "ragged tiles": ([127, 129, 0, 0, 1], 130, 33),
    "empty experts at both ends": ([0, 0, 5, 0], 4, 40),
    "more experts than looks": ([2, *[0] * LOOK, 1, 3, *[0] * LOOK], 3, 2),
}


AROUND = 1 << 16  # elements of NaN on both sides of a tensor: a planted bug may go there, and no kernel


def surrounded(x):
    """A copy of x between NaN."""
    whole = torch.full((x.numel() + 2 * AROUND,), torch.nan, dtype=x.dtype)
    inside = whole[AROUND : AROUND + x.numel()].view(x.shape)
    return inside.copy_(x)


@pytest.fixture(autouse=True)
def results(monkeypatch):
    """Collect the results that kernels write: NaN where nothing is written."""
    made, real = [], torch.Tensor.new_empty

    def filled(x, *shape, **options):
        empty = real(x, *shape, **options)
        if not empty.is_floating_point() or options:  # the interpreter's own
            return empty
        made.append(surrounded(empty.fill_(torch.nan)))
        return made[-1]

    monkeypatch.setattr(torch.Tensor, "new_empty", filled)
    yield made
    for each in made:
        whole = each.new_empty(0, device="cpu").set_(each.untyped_storage())
        assert torch.cat([whole[:AROUND], whole[-AROUND:]]).isnan().all(), "written beyond a result"


@pytest.fixture
def bfloat16_is_multiplied(monkeypatch):
    """The interpreter would multiply the bits. It rounds toward zero."""
    from triton.language import bfloat16, float32
    from triton.runtime import interpreter

    real = interpreter.InterpreterBuilder.create_dot

    def widened(factor):
        if factor.dtype.scalar != bfloat16:
            return factor
        wide = interpreter._convert_float(factor.data, bfloat16, float32, None).view("float32")
        return interpreter.TensorHandle(wide, float32)

    monkeypatch.setattr(
        interpreter.InterpreterBuilder,
        "create_dot",
        lambda self, a, b, *more: real(self, widened(a), widened(b), *more),
    )


def check(kernels, case, dtype=torch.float32, tolerance=1e-5):
    """Compare y, dx and dW with float64."""
    counts, out, width = CASES[case]
    shapes = (sum(counts), width), (sum(counts), out), (len(counts), out, width)
    x, d, weight = (surrounded(rand(*shape, seed=at, dtype=dtype, grad=False)) for at, shape in enumerate(shapes))
    product = partial(kernels.grouped_mm, offs=torch.tensor(counts).cumsum(0).int())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_SEARCHED", LOOK)
        y, dx, dw = product(x, weight.mT), product(d, weight), product(d.mT, x)
    assert {each.dtype for each in (y, dx, dw)} == {dtype}
    groups = [*zip(x.double().split(counts), d.double().split(counts), weight.double(), strict=True)]
    assert_close(y, torch.cat([d.double()[:0], *(a @ matrix.mT for a, _, matrix in groups)]), tolerance)
    assert_close(dx, torch.cat([x.double()[:0], *(b @ matrix for _, b, matrix in groups)]), tolerance)
    for got, (a, b, _) in zip(dw, groups, strict=True):
        assert_close(got, b.mT @ a, tolerance)


@pytest.mark.parametrize("case", CASES)
def test_against_a_loop(case):
    check(kernels_of("grouped_matmul"), case)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 6e-4), (torch.bfloat16, 8e-3)])
def test_products_are_summed_in_float32_and_rounded_once(dtype, tolerance, request):
    kernels = kernels_of("grouped_matmul")
    request.getfixturevalue("bfloat16_is_multiplied")
    check(kernels, "ragged tiles", dtype, tolerance)


def test_other_strides_are_copied():
    product, (x, weight) = kernels_of("grouped_matmul").grouped_mm, (rand(9, 4), rand(2, 4, 6))
    x, weight, ends = x.float(), weight.float(), torch.tensor([4, 9], dtype=torch.int32)
    want = product(x, weight, offs=ends)
    wide = torch.zeros(9, 8).index_copy(1, torch.arange(4) * 2, x)[:, ::2]
    assert torch.equal(product(wide, weight.transpose(0, 2).contiguous().transpose(0, 2), offs=ends), want)


@pytest.mark.slow
def test_matrices_beyond_32_bits(monkeypatch):
    """The last of them begins after more elements than an int32 counts. Few of their pages exist."""
    kernels, depth = kernels_of("grouped_matmul"), 131_200
    for name, size in (("_STEP_BYTES", 2**14), ("_ROWS", 16)):  # the interpreter is slow by the step and by the row
        monkeypatch.setattr(kernels, name, size)
    weight = torch.empty(130, depth, 128, dtype=torch.float16)
    assert 2**31 < weight[:-1].numel() < 2**32
    weight[-1] = 0
    weight[-1, -1] = 3
    ends = torch.tensor([*[0] * 129, 1], dtype=torch.int32)
    assert (kernels.grouped_mm(torch.ones(1, depth).half(), weight, offs=ends) == 3).all()


PLANTS = {
    "a row too few": ("in_rows, in_columns = row < end - first,", "in_rows, in_columns = row < end - first - 1,"),
    "the last column left out": ("< end - first, col < C - left", "< end - first, col < C - left - 1"),
    "the matrix of the expert before": ("weight += expert.to(tl.int64)", "weight += (expert - 1).to(tl.int64)"),
    "rows of the expert before": ("x += first.to(tl.int64) * K", "x += begin.to(tl.int64) * K"),
    "a step of a product left out": ("for step in range(0, K, STEP)", "for step in range(STEP, K, STEP)"),
    "too long a product": ("mask=in_rows & (along < K - step)", "mask=in_rows & (along <= K - step)"),
    "one expert too far": ("(next_tile <= tile)", "(next_tile <= tile + 1)"),
    "experts of one look alone": ("range(0, num_experts, SEARCHED)", "range(0, SEARCHED, SEARCHED)"),
    "tiles too few": ("len(x_NK) // _ROWS + num_experts", "len(x_NK) // _ROWS + 1"),
    "the first tile of an expert alone": ("(tile - begin // ROWS - expert) * ROWS", "0"),
    "no zeros": ("mask=in_height & in_columns)\n\n", "mask=in_height & in_columns & (begin < end))\n\n"),
    "the gradient of another expert": ("out += (expert.to(tl.int64) * R", "out += ((expert // 2).to(tl.int64) * R"),
    "rows of the next expert too": ("(across < end - step) & in_height", "in_height"),
    "a step of rows left out": ("for step in range(begin, end, STEP)", "for step in range(begin, end - STEP, STEP)"),
    "a row of the gradient left out": ("r < R - top", "r < R - top - 1"),
    "matrices that lie by column read by row": ("by_column, _ROWS", "not by_column, _ROWS"),
}  # fmt: skip


def check_some(kernels):
    for case in ("odd", "ragged tiles", "more experts than looks"):
        check(kernels, case)


@pytest.mark.parametrize("bug", PLANTS)
def test_planted_bugs_are_seen(bug, tmp_path, results):
    kernels = planted("grouped_matmul", *PLANTS[bug], tmp_path)
    with pytest.raises(AssertionError):
        check_some(kernels)
    results.clear()


# The whole op.

COUNTS = [3, 0, 5, 0]
SHAPES = (8, 6), (4, 14, 6), (4, 6, 7), (4, 2, 6), (4, 14, 2), (4, 3, 7), (4, 6, 3)  # x, gate_up, down, adapters


def mixture(x, gate_up, down, *adapters):
    """Experts whose counts are on the device alone."""
    lora = [LowRank(*pair, 0.5) if pair else None for pair in (adapters[:2], adapters[2:])]
    given = rows.Rows(x, x.new_ones(len(x)), torch.tensor(COUNTS), None, lambda y_ND: y_ND)
    return experts.experts(given, gate_up, down, lora=tuple(lora))


@pytest.fixture
def by_kernel(monkeypatch):
    """Multiply by the kernel, which never waits for the counts."""
    kernels_of("grouped_matmul")
    monkeypatch.setattr(experts, "can_group", lambda *_: False)
    monkeypatch.setattr(experts, "_has_product", lambda *_: True)
    monkeypatch.setattr(experts, "to_host", None)


@pytest.mark.parametrize("num", [3, 7], ids=["plain", "adapters"])
def test_experts_and_adapters(num, request):
    inputs = [rand(*shape, seed=at, dtype=torch.float32) for at, shape in enumerate(SHAPES[:num])]
    want = differentiate(mixture, [x.detach().double().requires_grad_() for x in inputs])
    request.getfixturevalue("by_kernel")
    for got, due in zip(differentiate(mixture, inputs), want, strict=True):
        assert_close(got, due)


def test_weight_gradients_are_deferred(by_kernel):
    inputs = [rand(*shape, seed=at, dtype=torch.float32) for at, shape in enumerate(SHAPES[:3])]
    want = torch.autograd.grad(mixture(*inputs).square().sum(), inputs)
    jobs = []
    with deferred_weight_grads.deferring_weight_grads(jobs):
        mixture(*inputs).square().sum().backward()
    assert [x.grad is None for x in inputs] == [False, True, True]
    for job in jobs:
        job()
    assert all(map(torch.equal, (x.grad for x in inputs), want))


def test_selective_recomputation_keeps_products(by_kernel, monkeypatch):
    kernels, launched = kernels_of("grouped_matmul"), []
    real = kernels.launch
    monkeypatch.setattr(
        kernels, "launch", lambda kernel, *more, **options: launched.append(1) or real(kernel, *more, **options)
    )
    inputs = [rand(*shape, seed=at, dtype=torch.float32) for at, shape in enumerate(SHAPES[:3])]
    want = differentiate(mixture, inputs)
    for kept, num in ((recompute._COSTLY, 6), ([], 8)):
        launched.clear()
        got = differentiate(partial(recompute._checkpointed, mixture, kept), inputs)
        assert len(launched) == num
        assert all(map(torch.equal, got, want))


def test_no_gradient_of_codes_is_computed(by_kernel):
    """Frozen weights in 8 bits: the gradient of x alone, through the values that codes stand for."""
    x, gate_up, down = (rand(*shape, seed=at, dtype=torch.float32) for at, shape in enumerate(SHAPES[:3]))
    codes, scales = gate_up.detach().clamp(-2, 2).to(torch.float8_e4m3fn).view(torch.uint8), torch.full((1, 1), 0.5)
    grid = fp8_storage.Grid(scales, torch.zeros(4, 14, dtype=torch.int64), torch.zeros(6, dtype=torch.int64))
    frozen = fp8_storage.FrozenWeight(codes, grid)
    got = differentiate(lambda x, down: mixture(x, frozen, down), [x, down])
    want = differentiate(lambda x, down: mixture(x, frozen.to(torch.float32), down), [x, down])
    assert all(map(torch.equal, got, want))


# Which product runs where.

WIDE, NARROW = (4, 32, 16), (4, 16, 4)  # of a rank of 4: 8 bytes


@pytest.fixture
def device(monkeypatch):
    """A CPU that passes for an accelerator."""
    monkeypatch.setattr(trials, "SLOW", ())
    monkeypatch.setattr(trials, "_passed", {})
    monkeypatch.setattr(trials, "in_own_thread", lambda trial, _: trial())
    monkeypatch.setattr(experts, "kind_of", lambda _: "cuda")
    monkeypatch.setattr(experts, "_capability", lambda _: (9, 0))


def chosen(shape, dtype, monkeypatch):
    """Name what multiplies rows by matrices of a shape."""
    monkeypatch.setattr(experts, "_grouped", lambda _, product: "torch's" if product is F.grouped_mm else "ours")
    monkeypatch.setattr(experts, "_looped", lambda _: "loop")
    x = torch.zeros(3, shape[2], dtype=dtype)
    given = rows.Rows(x, x.new_ones(3), torch.tensor([3, 0, 0, 0]), None, lambda y_ND: y_ND)
    return experts._multiply(x, (torch.zeros(shape, dtype=dtype),), given)


@pytest.mark.parametrize(
    ("capability", "shape", "dtype", "agrees", "choice"),
    [
        (9, WIDE, torch.bfloat16, None, "torch's"),
        (10, WIDE, torch.bfloat16, None, "torch's"),
        (8, WIDE, torch.bfloat16, True, "ours"),
        (8, WIDE, torch.bfloat16, False, "loop"),
        (12, WIDE, torch.bfloat16, True, "ours"),
        (9, NARROW, torch.bfloat16, True, "ours"),
        (9, NARROW, torch.bfloat16, False, "loop"),
        (9, WIDE, torch.float16, True, "ours"),
        (9, WIDE, torch.float32, None, "loop"),
        (9, WIDE, torch.float64, None, "loop"),
    ],
)
def test_the_choice(capability, shape, dtype, agrees, choice, device, monkeypatch):
    monkeypatch.setattr(experts, "_capability", lambda _: (capability, 0))
    monkeypatch.setattr(experts, "agrees", lambda *_: agrees)  # asked where the outcome is True or False
    assert chosen(shape, dtype, monkeypatch) == choice


def test_without_triton_a_loop_runs(device, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, NAME, None)
    monkeypatch.delattr("meshwright.ops.kernels.grouped_matmul", raising=False)
    assert chosen(NARROW, torch.bfloat16, monkeypatch) == "loop"
    assert "kernel grouped_matmul does not run" in caplog.text


def test_the_trial_accepts_the_kernel_and_no_wrong_one(device, monkeypatch, caplog):
    kernels_of("grouped_matmul")
    choose = partial(chosen, (4, 5, 3), torch.float16, monkeypatch)
    assert choose() == "ours", caplog.text
    shape = lambda a, b, offs: (len(a), b.shape[2]) if b.dim() == 3 else (len(offs), len(a), b.shape[1])  # noqa: E731
    monkeypatch.setattr(f"{NAME}.grouped_mm", lambda a, b, *, offs: a.new_zeros(shape(a, b, offs)))
    assert choose() == "ours", "the trial runs once for a kind of input"
    monkeypatch.setattr(trials, "_passed", {})
    assert choose() == "loop"
    assert "kernel grouped_matmul is off by" in caplog.text


def test_a_trial_stands_for_all_widths_with_its_tiles_and_edges(monkeypatch):
    tried = []
    monkeypatch.setattr(experts, "agrees", lambda _, kind, *more: tried.append(kind[1:]))
    for shape in ((4, 2048, 768), (4, 1536, 2048), (4, 784, 300), (4, 257, 256), (4, 16, 1)):
        experts._has_product(torch.zeros(1, shape[2], dtype=torch.float16), torch.zeros(shape, device="meta"))
    assert tried == [(256, 256), (256, 256), (144, 172), (129, 256), (16, 1)]


def test_nothing_is_tried_on_a_cpu_or_for_a_plan(monkeypatch):
    monkeypatch.setattr(trials, "_compare", None)
    assert chosen(WIDE, torch.bfloat16, monkeypatch) == "loop"
    assert chosen(WIDE, torch.float16, monkeypatch) == "loop"
    assert chosen(WIDE, torch.float32, monkeypatch) == "torch's"
    with torch.device("meta"), meta_kernels.planned_for("cuda"):
        assert chosen(WIDE, torch.bfloat16, monkeypatch) == "torch's"
        assert chosen(NARROW, torch.bfloat16, monkeypatch) == "loop"
