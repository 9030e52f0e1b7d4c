"""Zeros for experts without rows, and sums of a token's rows, beside the formulas of ops/experts.py and ops/rows.py."""

from importlib import import_module

import pytest
import torch

from meshwright.ops import meta_kernels, rows
from meshwright.ops.kernels import trials
from tests.interpreter import assert_close, kernels_of, planted
from tests.ops.references import assert_same, differentiate, rand

experts = import_module("meshwright.ops.experts")  # the package has the function under this name
BLOCK = 8192


def check_zeros(kernels, shape, counts, dtype=torch.float32):
    counts = torch.tensor(counts, dtype=torch.int64)
    before = rand(*shape, dtype=dtype, grad=False)
    before[counts == 0] = torch.nan
    around = torch.full((2 + before.numel(),), 7.0, dtype=dtype)  # a guard on both sides
    inside = around[1:-1].view(shape)
    inside.copy_(before)
    actual = kernels.zero_unused(inside, counts)
    assert torch.equal(actual, experts._without_unused(before, counts))
    assert actual.data_ptr() == inside.data_ptr()
    assert (around[0], around[-1]) == (7, 7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(3, 1, 1), (3, 5, 7), (3, 2, BLOCK // 2), (3, 1, BLOCK + 1), (3, 0, 4)])
def test_zeros(shape, dtype):
    for counts in ([0, 2, 0], [1, 0, 9], [0, 0, 0], [1, 1, 1]):
        check_zeros(kernels_of("unused_experts"), shape, counts, dtype)


def test_no_experts():
    check_zeros(kernels_of("unused_experts"), (0, 3, 4), [])


ZEROS = [
    ("experts with rows too", "if tl.load(counts + expert) == 0:", "if tl.load(counts + expert) >= 0:"),
    ("experts with rows alone", "if tl.load(counts + expert) == 0:", "if tl.load(counts + expert) != 0:"),
    ("the last element left out", "mask=at < size", "mask=at < size - 1"),
    ("one element too many", "mask=at < size", "mask=at <= size"),
    ("the last block left out", "triton.cdiv(size, _BLOCK)", "max(1, size // _BLOCK)"),
    ("always the first expert", "d + expert * size + at", "d + at"),
    ("a multiplication", "tl.zeros([B], d.dtype.element_ty)", "0 * tl.load(d + expert * size + at, mask=at < size)"),
]


def check_all_zeros(kernels):
    for shape in ((3, 5, 7), (3, 1, BLOCK + 1)):
        check_zeros(kernels, shape, [2, 0, 1])


@pytest.mark.parametrize(("old", "new"), [p[1:] for p in ZEROS], ids=[p[0] for p in ZEROS])
def test_planted_bugs_of_zeros_are_seen(old, new, tmp_path):
    kernels = planted("unused_experts", old, new, tmp_path)
    with pytest.raises(AssertionError):
        check_all_zeros(kernels)


def check_sums(kernels, tokens, num, width, dtype=torch.float32, tolerance=1e-6):
    y = rand(tokens * num, width, dtype=dtype, grad=False)
    at = torch.randperm(tokens * num, generator=torch.Generator().manual_seed(5))
    actual = kernels.sum_rows(y, at, num)
    assert actual.dtype == dtype
    assert_close(actual, rows._sum_rows(y.double(), at, num), tolerance)


@pytest.mark.parametrize("width", [1, 7, 1024, 1025])
@pytest.mark.parametrize(("tokens", "num"), [(0, 2), (1, 1), (5, 2), (3, 8)])
def test_sums(tokens, num, width):
    check_sums(kernels_of("row_sums"), tokens, num, width)


def test_sums_are_rounded_once():
    check_sums(kernels_of("row_sums"), 7, 8, 60, torch.float16, 5e-4)
    y = torch.tensor([[2048.0], [1.0], [1.0], [-2048.0]]).half()
    assert kernels_of("row_sums").sum_rows(y, torch.arange(4), 4).item() == 2


def test_sums_of_rows_in_a_wider_tensor():
    kernels, wide, at = kernels_of("row_sums"), rand(6, 48, dtype=torch.float32, grad=False), torch.arange(6).flip(0)
    for y in (wide[:, 16:32], wide[:, 2:7], wide.t().contiguous().t()):
        assert_close(kernels.sum_rows(y, at, 2), rows._sum_rows(y, at, 2), 1e-6)


SUMS = [
    ("the first row twice", "for nth in range(NUM)", "for nth in range(-1, NUM)"),
    ("the last row left out", "for nth in range(NUM)", "for nth in range(NUM - 1)"),
    ("the rows of another token", "at + t * NUM + nth", "at + nth * tl.num_programs(0) + t"),
    ("a mask off by one", "mask=col < D, other", "mask=col < D - 1, other"),
    ("the last block left out", "triton.cdiv(width, _BLOCK)", "max(1, width // _BLOCK)"),
    ("rows one after the other, as if dense", "row * stride", "row * D"),
    ("rounded after each addition", "total += tl", "total = total.to(tl.float16).to(tl.float32) + tl"),
]  # fmt: skip


def check_all_sums(kernels):
    for width in (7, 1025):
        check_sums(kernels, 3, 4, width)
    y = rand(6, 48, dtype=torch.float32, grad=False)[:, 16:32]
    assert_close(kernels.sum_rows(y, torch.arange(6), 2), rows._sum_rows(y, torch.arange(6), 2), 1e-6)


@pytest.mark.parametrize(("old", "new"), [p[1:] for p in SUMS], ids=[p[0] for p in SUMS])
def test_planted_bugs_of_sums_are_seen(old, new, tmp_path):
    kernels = planted("row_sums", old, new, tmp_path)
    with pytest.raises(AssertionError):
        check_all_sums(kernels)


def test_a_mixture_by_the_kernels(monkeypatch):
    """Rows to experts and back, forward and backward, as a device with both kernels runs them."""
    kernels_of("row_sums")
    expert_Tk = torch.tensor([[0, 3], [3, 1], [0, 1], [1, 3], [3, 0]])  # none for expert 2

    def layer(x_TD, weight_Tk):
        sorted_rows = rows.by_expert(x_TD, weight_Tk, expert_Tk, 4)
        return sorted_rows.back(sorted_rows.x_ND.sin() * sorted_rows.weight_N[:, None])

    inputs = [rand(5, 6, dtype=torch.float32), rand(5, 2, seed=1, dtype=torch.float32)]
    want = differentiate(layer, [x.detach().double().requires_grad_() for x in inputs])
    monkeypatch.setattr(rows, "_has_kernel", lambda *_: True)
    assert_same(differentiate(layer, inputs), want, 1e-5)


def test_trials_accept_the_kernels_and_no_planted_one(monkeypatch, tmp_path, caplog):
    for name in ("row_sums", "unused_experts"):
        kernels_of(name)
    monkeypatch.setattr(trials, "SLOW", ())
    monkeypatch.setattr(rows, "kind_of", lambda _: "accelerator")
    x = torch.zeros(3, 40)
    for file, name, plants, has in (
        ("row_sums", "sum_rows", SUMS, lambda: rows._has_kernel(x, 4)),
        ("unused_experts", "zero_unused", ZEROS, lambda: experts._has_kernel(x)),
    ):
        for old, new in ((None, None), plants[1][1:]):
            monkeypatch.setattr(trials, "_passed", {})
            kernels = planted(file, old, new, tmp_path) if old else kernels_of(file)
            monkeypatch.setattr(f"meshwright.ops.kernels.{file}.{name}", getattr(kernels, name))
            assert has() is (old is None), caplog.text


def test_no_kernel_on_a_cpu():
    x = torch.zeros(3, 4)
    assert not rows._has_kernel(x, 2)
    assert not experts._has_kernel(x)


def test_a_plan_for_a_gpu_counts_no_sorted_copy():
    y, at = torch.empty(6, 4, device="meta", dtype=torch.bfloat16), torch.empty(6, device="meta", dtype=torch.int64)
    with meta_kernels.planned_for("cuda"):
        assert rows._has_kernel(y, 2)
        assert rows.sum_rows(y, at, 2).shape == (3, 4)
