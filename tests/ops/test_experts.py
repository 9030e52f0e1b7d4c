from importlib import import_module

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.models.qwen3_moe import modeling_qwen3_moe
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig

from meshwright.ops import matmul, route
from meshwright.ops.deferred_weight_grads import deferring_weight_grads
from meshwright.ops.experts import _factor, can_group, without_unused
from tests.ops import references
from tests.ops.references import compare, differentiate, quick, rand, smoke
from tests.ops.rows import experts

module = import_module("meshwright.ops.experts")  # the package has the function under this name

loads = st.lists(st.sampled_from([0, 0, 1, 2, 5, 7, 13]), min_size=1, max_size=6)


def inputs(counts, width=8, ffn=12, dtype=torch.float64):
    n, e = sum(counts), len(counts)
    shapes = [(n, width), (e, 2 * ffn, width), (e, width, ffn)]
    return [rand(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]


@quick
@given(loads, st.sampled_from([1, 3, 4]))
def test_against_reference(counts, ffn):
    counts_E = torch.tensor(counts)
    compare(lambda *x: experts(*x, counts_E), lambda *x: references.experts(*x, counts_E), inputs(counts, 5, ffn))


@quick
@given(loads, st.sampled_from([(8, 16), (16, 8), (8, 6), (6, 8)]), st.sampled_from([torch.float32, torch.bfloat16]))
def test_low_precision_grouped_and_not(counts, widths, dtype):
    streams, counts_E = inputs(counts, *widths), torch.tensor(counts)
    assert can_group(streams[0].to(dtype), streams[2].to(dtype)) == (dtype == torch.float32 and 6 not in widths)
    smoke(lambda *x: experts(*x, counts_E), streams, dtype, 1e-5 if dtype == torch.float32 else 6e-2)


@pytest.mark.parametrize("counts", [[1, 7, 0, 5], [13, 0, 0, 0], [0, 0, 0, 9], [4]])
def test_grouped_equals_looped(counts):
    streams, counts_E = inputs(counts, dtype=torch.float32), torch.tensor(counts)
    assert can_group(streams[0], streams[2])
    wide = differentiate(lambda *x: experts(*x, counts_E), [x.detach().double().requires_grad_() for x in streams])
    references.assert_same(differentiate(lambda *x: experts(*x, counts_E), streams), wide, 1e-5)


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_what_is_frozen_gets_no_gradient_and_costs_none(monkeypatch, frozen):
    made, real = [], torch.empty_like  # the gradient of all experts' weights is one block, of three dims
    monkeypatch.setattr(torch, "empty_like", lambda x: real(x) if x.dim() < 3 else made.append(x) or real(x))
    streams, counts_E = inputs([3, 0, 5]), torch.tensor([3, 0, 5])
    whole = differentiate(lambda *x: experts(*x, counts_E), streams)
    assert len(made) == 2
    streams[frozen].requires_grad_(False)
    part = differentiate(lambda *x: experts(*x, counts_E), streams)
    assert len(made) - 2 == 2 - (frozen > 0)
    del whole[1 + frozen]
    assert all(map(torch.equal, part, whole))


def test_bfloat16_on_a_cpu_meets_few_numbers_of_rows(monkeypatch):
    """Each would be a kernel more, compiled for 3 ms and kept in a megabyte."""
    monkeypatch.setattr(matmul, "_cpu_has_bf16", lambda: True)
    sizes = {n: len(_factor(torch.zeros(n, 1, dtype=torch.bfloat16))) for n in range(1, 2**15)}
    assert len(set(sizes.values())) <= 80
    assert all(0 <= size - n < max(16, n / 8 + 1) for n, size in sizes.items())
    rows = rand(37, 5, dtype=torch.bfloat16, grad=False)
    assert torch.equal(_factor(rows)[:37], rows)
    assert not _factor(rows)[37:].any()


@pytest.mark.parametrize("has_bf16", [True, False])
def test_bfloat16_with_and_without_instructions(monkeypatch, has_bf16):
    monkeypatch.setattr(matmul, "_cpu_has_bf16", lambda: has_bf16)
    counts = [1, 0, 37, 5]
    smoke(lambda *x: experts(*x, torch.tensor(counts)), inputs(counts), torch.bfloat16, 6e-2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [[0, 0, 0], [0, 3, 0]])
def test_unused_experts_get_zeros_and_not_none(counts, dtype):
    streams = inputs(counts, dtype=dtype)
    experts(*streams, torch.tensor(counts)).sum().backward()  # sum: its gradient has stride 0
    for weight in streams[1:]:
        for e, count in enumerate(counts):
            assert bool((weight.grad[e] == 0).all()) == (count == 0)


def test_strides_that_the_kernel_dislikes():
    streams, counts_E = inputs([3, 2], dtype=torch.float32), torch.tensor([3, 2])
    want = experts(*streams, counts_E)
    tangled = [x.detach().mT.contiguous().mT.requires_grad_() for x in streams]
    y = experts(*tangled, counts_E)
    assert torch.allclose(y, want)
    y.backward(torch.ones(8, 5).T)
    assert all(x.grad is not None for x in tangled)


def test_refuses_counts_that_are_not_the_rows():
    with pytest.raises(ValueError, match=r"\b4\b.*\b5 rows\b"):
        experts(*inputs([3, 2]), torch.tensor([3, 1]))


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_route_as_transformers(renormalise, dtype):
    config = Qwen3MoeConfig(hidden_size=8, num_experts=16, num_experts_per_tok=3, norm_topk_prob=renormalise)
    router = modeling_qwen3_moe.Qwen3MoeTopKRouter(config).to(dtype)
    router.weight.data = rand(16, 8, dtype=dtype, grad=False)
    logits, weights, indices = router(rand(30, 8, seed=1, dtype=dtype))
    ours = route(logits, 3, renormalise)
    assert torch.equal(ours[1], indices)
    assert torch.equal(ours[0].to(dtype), weights)
    assert ours[0].dtype == torch.float32


def test_qwen3_5_renormalises():
    config = modeling_qwen3_5_moe.Qwen3_5MoeTextConfig(hidden_size=8, num_experts=16, num_experts_per_tok=3)
    router = modeling_qwen3_5_moe.Qwen3_5MoeTopKRouter(config)
    router.weight.data = rand(16, 8, dtype=torch.float32, grad=False)
    logits, weights, indices = router(rand(30, 8, seed=1, dtype=torch.float32))
    logits = F.linear(rand(30, 8, seed=1, dtype=torch.float32), router.weight)
    ours = route(logits, 3, True)
    assert torch.equal(ours[1], indices)
    assert torch.allclose(ours[0], weights)


@pytest.mark.parametrize("renormalise", [False, True])
def test_route_against_its_formula(renormalise):
    def reference(logits):
        rows = []
        for row in logits:
            p = row.exp() / row.exp().sum()
            top = torch.stack([p[i] for i in sorted(range(len(p)), key=lambda i: -p[i].item())[:3]])
            rows.append(top / top.sum() if renormalise else top)
        return torch.stack(rows)

    compare(lambda x: route(x, 3, renormalise)[0], reference, [rand(11, 6)])


def test_route_and_experts_as_the_whole_block():
    config = Qwen3MoeConfig(hidden_size=8, moe_intermediate_size=12, num_experts=6, num_experts_per_tok=2)
    config._experts_implementation = "eager"
    block = modeling_qwen3_moe.Qwen3MoeSparseMoeBlock(config).double()
    for i, parameter in enumerate(block.parameters()):
        parameter.data = rand(*parameter.shape, seed=i, grad=False)
    x = rand(20, 8, seed=9)
    weights_Tk, indices_Tk = route(x @ block.gate.weight.T, 2, config.norm_topk_prob)
    order = indices_Tk.flatten().argsort(stable=True)
    y = experts(
        x[order // 2], block.experts.gate_up_proj, block.experts.down_proj, indices_Tk.flatten().bincount(minlength=6)
    )
    ours = torch.zeros_like(x).index_add(0, order // 2, y * weights_Tk.flatten()[order, None])
    assert torch.allclose(ours, block(x[None])[0], atol=1e-6)  # their softmax is float32


def test_an_expert_without_rows_has_a_gradient_of_zeros_whatever_a_kernel_left_there():
    left = torch.full((4, 2, 3), float("nan"))
    left[1] = 1.0
    result = without_unused(left, torch.tensor([0, 5, 0, 0]))
    assert torch.equal(result, torch.tensor([0.0, 1.0, 0.0, 0.0])[:, None, None].expand(4, 2, 3))


def test_what_a_grouped_product_leaves_for_unused_experts_is_no_late_gradient(monkeypatch):
    real, jobs, counts_E = F.grouped_mm, [], torch.tensor([3, 0, 5])

    def dirty(a, b, *, offs):
        y = real(a, b, offs=offs)
        return y.index_fill(0, torch.tensor([1]), torch.nan) if a.dim() == b.dim() == 2 else y

    streams = inputs([3, 0, 5], dtype=torch.float32)
    wanted = differentiate(lambda *x: experts(*x, counts_E), streams)[2:]
    monkeypatch.setattr(F, "grouped_mm", dirty)
    d = torch.randn(8, 8, generator=torch.Generator().manual_seed(99), dtype=torch.float64).float()
    with deferring_weight_grads(jobs):
        experts(*streams, counts_E).backward(d)
    assert [x.grad for x in streams[1:]] == [None, None]
    for job in jobs:
        job()
    references.assert_same([x.grad for x in streams[1:]], wanted, 1e-6)


def test_gradients_of_unused_experts_are_zeroed_off_the_cpu(monkeypatch):
    zeroed = []
    monkeypatch.setattr(module, "without_unused", lambda d_EOI, counts_E: zeroed.append(counts_E) or d_EOI)
    for device, num in (("cpu", 0), ("meta", 1)):
        weight_EOI = torch.ones(2, 3, 4, device=device, requires_grad=True)
        module._ZeroGradient.apply(weight_EOI, torch.tensor([0, 1], device=device)).sum().backward()
        assert len(zeroed) == num


def test_counts_that_the_host_knows_are_not_asked_for_again(monkeypatch):
    monkeypatch.setattr(module, "to_host", None)
    streams, counts_E = inputs([2, 0, 3]), torch.tensor([2, 0, 3])
    wanted = references.experts(*streams, counts_E)
    assert torch.allclose(experts(*streams, counts_E, [2, 0, 3]), wanted, rtol=1e-12)


def test_each_row_is_multiplied_by_its_routing_weight():
    counts_E = torch.tensor([2, 0, 3])
    compare(
        lambda weight, *x: experts(*x, counts_E, weight_N=weight),
        lambda weight, *x: references.experts(*x, counts_E) * weight[:, None],
        [rand(5, seed=7), *inputs([2, 0, 3])],
    )
