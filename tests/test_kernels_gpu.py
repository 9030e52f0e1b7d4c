"""On an accelerator: each kernel passes its trial at sizes of published models, and the ops that use it are right."""

from importlib import import_module

import pytest
import torch

from meshwright.ops import documents, fp8_matmul, loss, rows, token_stats
from meshwright.optim import AdamW
from tests.interpreter import assert_close, kernels_of
from tests.ops import references
from tests.ops.references import rand
from tests.test_kernels_adamw import check, check_nothing_written, numbers_of, slice_of
from tests.test_kernels_fp8 import bits, sample

attention = import_module("meshwright.ops.attention")  # the package has functions under these names
experts = import_module("meshwright.ops.experts")

pytestmark = pytest.mark.gpu
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture
def device():
    return torch.accelerator.current_accelerator()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [151936, 248320, 151669, 151936 // 8, 7])
def test_logits(device, vocab_size, dtype):
    assert loss._has_kernel(torch.zeros(1, 4, dtype=dtype, device=device), vocab_size)


def test_products_are_accumulated_in_float32(device):
    d, dw = torch.zeros(8, 16, dtype=torch.bfloat16, device=device), torch.zeros(16, 8, device=device)
    assert loss._accumulates_wide(d, dw)


@pytest.mark.parametrize("entropy", [True, False])
def test_the_whole_loss(device, entropy):
    """In chunks, beside float64 on the CPU, with bfloat16 activations and a float32 weight."""
    x = rand(70, 64, dtype=torch.bfloat16, grad=False).to(device).requires_grad_()
    weight = rand(9001, 64, seed=1, dtype=torch.float32, grad=False).to(device).requires_grad_()
    labels = torch.arange(70) * 131 - 100
    stats = token_stats(x, weight, labels.to(device), 32, entropy)
    (stats * torch.linspace(-1, 1, stats.numel(), device=device).view(stats.shape)).sum().backward()
    rounded = weight.detach().bfloat16().cpu().double().requires_grad_()
    exact = x.detach().cpu().double().requires_grad_()
    want = references.token_stats(exact, rounded, labels)
    want = want if entropy else want * torch.tensor([1.0, 1.0, 0.0])
    (want * torch.linspace(-1, 1, want.numel()).view(want.shape)).sum().backward()
    for got, due in ((stats.detach(), want.detach()), (x.grad, exact.grad), (weight.grad, rounded.grad)):
        assert (got.cpu().double() - due).norm() <= 1e-2 * due.norm()


def test_fp8(device):
    assert fp8_matmul._quantises_in_one_kernel(device)
    x = sample(384, 2048).nan_to_num(1.0, 2.0, 3.0).to(device)
    for dtype in DTYPES:
        for make in (fp8_matmul._matrix_operand, lambda x, one: fp8_matmul._rows_operand(x, 3, one)):
            for operand in (x.to(dtype), x.to(dtype).mT):
                assert all(map(torch.equal, *(map(bits, make(operand, one)) for one in (True, False))))


@pytest.mark.parametrize("dtype", DTYPES)
def test_experts(device, dtype):
    assert experts._has_kernel(torch.zeros(2, 3, 4, dtype=dtype, device=device))
    for width, num in ((2048, 8), (2048, 10), (100, 3)):
        assert rows._has_kernel(torch.zeros(2, width, dtype=dtype, device=device), num)


@pytest.mark.parametrize(
    ("widths", "dtype"),
    [((384, 512), torch.bfloat16), ((4, 512), torch.bfloat16), ((300, 37), torch.bfloat16), ((300, 37), torch.float16)],
)
def test_grouped_products(device, widths, dtype):
    """By the kernel, next to float64: many experts, some of them empty, and no wait for the device."""
    product, counts = kernels_of("grouped_matmul").grouped_mm, [each % 9 * 40 for each in range(160)]
    shapes = (sum(counts), widths[1]), (sum(counts), widths[0]), (160, *widths)
    x, d, weight = (rand(*shape, seed=at, dtype=dtype, grad=False).to(device) for at, shape in enumerate(shapes))
    assert experts._has_product(x, weight)
    ends = torch.tensor(counts).cumsum(0).int().to(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = [product(x, weight.mT, offs=ends), product(d, weight, offs=ends), product(d.mT, x, offs=ends)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    groups = [*zip(x.split(counts), d.split(counts), weight, strict=True)]
    due = [
        torch.cat([a.double() @ matrix.double().mT for a, _, matrix in groups]),
        torch.cat([b.double() @ matrix.double() for _, b, matrix in groups]),
        torch.stack([b.double().mT @ a.double() for a, b, _ in groups]),
    ]
    for got, want in zip(results, due, strict=True):
        assert (got.double() - want).norm() <= rows.ROUNDING[dtype] * want.norm()
    assert not results[2][0].any(), "an expert without rows"


@pytest.mark.parametrize("copy", [None, torch.bfloat16])
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])
def test_adamw(device, state, copy):
    kernels = kernels_of("adamw")
    for size in (1, 4096, 10_007):
        check(kernels, slice_of(kernels, size, state, state, copy, device), 3.0, numbers_of(kernels), device=device)
    check_nothing_written(kernels, torch.nan, device)
    weight = torch.zeros(64, device=device)
    assert AdamW(state_dtype=state).fuses(weight, weight)


@pytest.mark.parametrize("heads", [(16, 8), (32, 4)])
def test_documents_of_one_length(device, heads):
    docs, shapes = documents((512, 512, 512), device), [(1536, num, 128) for num in (heads[0], heads[1], heads[1])]
    low = [rand(*shape, seed=at, dtype=torch.bfloat16, grad=False).to(device) for at, shape in enumerate(shapes)]
    results = []
    for op in (attention._equal_documents, attention._by_document):
        given = [x.detach().requires_grad_() for x in low]
        o = op(*given, docs)
        o.backward(torch.linspace(-1, 1, o.numel(), device=device).view(o.shape).to(o.dtype))
        results.append([o.detach(), *(x.grad for x in given)])
    for got, want in zip(*results, strict=True):
        assert_close(got.cpu(), want.cpu(), 3e-2)
