"""Kernels of others are used only where they agree with ours; that they do on an accelerator is a `gpu` test."""

import logging
from importlib import import_module
from itertools import pairwise

import pytest
import torch

from meshwright.ops import delta, documents, kernels, meta_kernels
from meshwright.ops.kernels import agrees, fastest
from meshwright.parallel.replay import recompute_saved_tensors
from meshwright.parallel.selective_recompute import SavedResults
from tests.ops import references
from tests.ops.references import assert_same, differentiate, rand

attention = import_module("meshwright.ops.attention")  # the package has the function under this name


def mean_so_far(x, docs):
    parts = [x[a:b].cumsum(0) / torch.arange(1, b - a + 1)[:, None] for a, b in pairwise(docs.bounds)]
    return torch.cat(parts)


def same(x, docs):
    return mean_so_far(x, docs)


def leaks(x, docs):
    return x.cumsum(0) / (docs.positions_T + 1)[:, None]


def wrong_gradient(x, docs):
    return mean_so_far(x, docs).detach() + 0.9 * (x - x.detach())


def gradient_in_another_order(x, docs):
    turned = mean_so_far(x, docs).flip(0)
    return mean_so_far(x, docs).detach() + turned - turned.detach()


def not_a_number(x, docs):
    return mean_so_far(x, docs) / 0 * 0


def not_installed(x, docs):
    import a_package_that_nobody_has

    return a_package_that_nobody_has.kernel(x, docs)


def refuses(x, docs):
    raise RuntimeError("head size 3 is not supported")


@pytest.mark.parametrize("kept", [[], [torch.ops.aten.cumsum.default]], ids=["full", "selective"])
def test_a_kernel_is_tried_while_a_layer_is_recomputed(kept, monkeypatch):
    """The trial's own backward must not be a part of the layer's."""
    monkeypatch.setattr(kernels, "SLOW", ())
    monkeypatch.setattr(kernels, "_agreed", {})
    monkeypatch.setattr(kernels, "NARROW", (torch.float64,))
    docs, x = documents((2, 3), torch.device("cpu")), rand(5, 3).requires_grad_()

    def layer(x):
        return fastest(same, mean_so_far, [x])(x * 2, docs).exp()

    ours = SavedResults(kept)
    with ours.record(), recompute_saved_tensors(layer, (x,), ours.replay, ours.mark_saved):
        made = layer(x)
    (grad,) = torch.autograd.grad(made.sum(), x)
    (wanted,) = torch.autograd.grad(mean_so_far(x * 2, docs).exp().sum(), x)
    assert list(kernels._agreed.values()) == [True]
    assert torch.equal(grad, wanted)


@pytest.mark.parametrize(
    ("kernel", "used", "message"),
    [
        (same, True, ""),
        (leaks, False, "kernel leaks is off by"),
        (wrong_gradient, False, "kernel wrong_gradient is off by"),
        (gradient_in_another_order, False, "kernel gradient_in_another_order is off by"),
        (not_a_number, False, "kernel not_a_number is off by nan"),
        (not_installed, False, "kernel not_installed is not installed (No module named 'a_package_that_nobody_has')"),
        (refuses, False, "kernel refuses refuses torch.float32 (head size 3 is not supported)"),
    ],
)
def test_only_what_agrees_is_used(kernel, used, message, caplog):
    with caplog.at_level(logging.WARNING, "meshwright"), torch.no_grad():
        assert agrees(kernel, mean_so_far, [torch.zeros(4, 3)]) == used
    assert caplog.text == "" if not message else message in caplog.text


def test_trying_leaves_the_random_numbers_of_the_user_alone():
    torch.manual_seed(5)
    want = torch.rand(3)
    torch.manual_seed(5)
    agrees(same, mean_so_far, [torch.zeros(4, 3)])
    assert torch.equal(torch.rand(3), want)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_nothing_is_tried_in_wide_dtypes(monkeypatch, dtype):
    """Kernels of others multiply float32 in TF32, well within what is right for bfloat16."""
    monkeypatch.setattr(kernels, "SLOW", ())
    assert fastest(same, mean_so_far, [torch.zeros(4, 3, dtype=dtype)]) is mean_so_far


def test_an_argument_that_an_older_version_has_not():
    assert kernels.accepts(same, "docs")
    assert not kernels.accepts(same, "enable_gqa")


def test_nothing_is_tried_on_a_cpu():
    assert fastest(refuses, mean_so_far, [torch.zeros(4, 3)]) is mean_so_far


LENGTHS = [1, 2, 300, 77, 1000]


def on_accelerator(*tensors, dtype=torch.bfloat16):
    device = torch.accelerator.current_accelerator()
    return [t.detach().to(device, dtype).requires_grad_() for t in tensors]


@pytest.mark.gpu
@pytest.mark.parametrize("head", [64, 128, 256])
def test_attention_on_an_accelerator(head):
    streams = [rand(sum(LENGTHS), heads, head, seed=heads) for heads in (8, 2, 2)]
    low = on_accelerator(*streams)
    assert agrees(attention._varlen, attention._by_document, low)
    docs = documents(LENGTHS, low[0].device)
    result = [x.cpu() for x in differentiate_there(lambda *x: attention.attention(*x, docs), low)]
    place = [x.detach().cpu().double().requires_grad_() for x in low]
    wanted = differentiate(lambda *x: references.attention(*x, documents(LENGTHS, "cpu").bounds), place)
    assert_same(result, wanted, 3e-2)


ONE_BY_ONE = [
    ((4096, 4096), 8, True), ((8192,), 2, True), ((8192, 256), 4, True), ((2048,) * 4, 16, False),
    ((8192, *[256] * 9), 8, False),
    ((8192, 8100), 8, False), ((), 8, False),
]  # fmt: skip


@pytest.mark.parametrize(("lengths", "heads", "long"), ONE_BY_ONE)
def test_few_long_documents_are_called_one_by_one_on_a_gpu(lengths, heads, long):
    q_THK, docs = torch.empty(sum(lengths), heads, 128, device="meta"), documents(lengths, "cpu")
    with meta_kernels.planned_for("cuda"):
        assert attention._prefers_one_call_each(q_THK, docs) == long
    assert not attention._prefers_one_call_each(q_THK, docs)


@pytest.mark.gpu
def test_long_documents_on_an_accelerator():
    lengths = [4096, 5120]
    low = on_accelerator(*(rand(sum(lengths), heads, 128, seed=heads) for heads in (8, 2, 4)))
    low[2] = low[2][:, :2].detach().requires_grad_()
    docs = documents(lengths, low[0].device)
    assert attention._prefers_one_call_each(low[0], docs)
    result, wanted = (
        differentiate_there(lambda *x, op=op: op(*x, docs), [x.detach().requires_grad_() for x in low])
        for op in (attention.attention, attention._varlen)
    )
    assert_same([x.cpu() for x in result], [x.cpu().double() for x in wanted], 3e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("head", [64, 128, 256])
def test_late_queries_on_an_accelerator(head):
    """The queries are the last 1200 tokens, from the middle of a document."""
    streams = [rand(sum(LENGTHS), heads, head, seed=heads) for heads in (8, 2, 2)]
    low = on_accelerator(streams[0][-1200:], *streams[1:])
    assert agrees(attention._varlen_last_queries, attention._by_document, low, attention._last_queries, (67, 130))
    docs, first = documents(LENGTHS, low[0].device), sum(LENGTHS) - 1200
    result = [x.cpu() for x in differentiate_there(lambda *x: attention.attention(*x, docs, first), low)]
    place = [x.detach().cpu().double().requires_grad_() for x in low]
    cpu_docs = documents(LENGTHS, "cpu")
    assert_same(result, differentiate(lambda *x: attention.attention(*x, cpu_docs, first), place), 3e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_delta_rule_on_an_accelerator(ratio):
    pytest.importorskip("fla")
    T = sum(LENGTHS)
    q, k, v = rand(T, 2, 128), rand(T, 2, 128, seed=1), rand(T, 2, ratio, 128, seed=2)
    g, beta = -rand(T, 2, ratio, seed=3).abs() / 4, rand(T, 2, ratio, seed=4).sigmoid()
    low = [*on_accelerator(q, k, v), *on_accelerator(g, beta, dtype=torch.float32)]
    assert agrees(delta._fla, delta.chunked, low, delta._gated)
    docs = documents(LENGTHS, low[0].device)
    result = [x.cpu() for x in differentiate_there(lambda q, k, v, *gates: delta.delta_rule(q, k, v, gates, docs), low)]
    place = [x.detach().cpu().double().requires_grad_() for x in low]
    cpu_docs = documents(LENGTHS, "cpu")
    assert_same(result, differentiate(lambda *x: delta.chunked(*x, cpu_docs), place), 3e-2)


def differentiate_there(function, inputs):
    """`references.differentiate` where the inputs are."""
    y = function(*inputs)
    d = torch.randn(y.shape, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    y.backward(d.to(y.device, y.dtype))
    return [y.detach(), *(x.grad for x in inputs)]


def product(a, b, docs):
    return a * b


def gradient_by_the_wrong_factor(a, b, docs):
    """The gradient of a is multiplied by a itself, and not by b."""
    x = a * a.detach() + b * a.detach()
    return x - x.detach() + product(a, b, docs).detach()


def test_the_inputs_of_a_trial_differ():
    inputs = [torch.zeros(4, 3)] * 2
    assert agrees(product, product, inputs)
    assert not agrees(gradient_by_the_wrong_factor, product, inputs)


def test_a_kernel_is_tried_for_each_kind_of_inputs(monkeypatch):
    """A refusal of one kind, or of one kernel, says nothing about another."""
    tried = []

    def compared(kernel, plain, inputs, *_):
        tried.append([(x.dtype, x.shape[1]) for x in inputs])
        return len(tried) > 1

    monkeypatch.setattr(kernels, "SLOW", ())
    monkeypatch.setattr(kernels, "_agreed", {})
    monkeypatch.setattr(kernels, "agrees", compared)
    x, wide, half = torch.zeros(4, 3).bfloat16(), torch.zeros(4, 5).bfloat16(), torch.zeros(4, 3).half()
    chosen = [fastest(same, mean_so_far, [x, other]) for other in (x, x[:2], wide, half, x)]
    assert chosen == [mean_so_far, mean_so_far, same, same, mean_so_far]
    assert tried == [[(x.dtype, 3), (y.dtype, y.shape[1])] for y in (x, wide, half)]
