import pytest
import torch
import torch.nn.functional as F

from meshwright.ops import linear, linears, matmul
from meshwright.ops.deferred_weight_grads import deferring_weight_grads
from tests.ops.references import compare, rand

ROWS = (5, 1, 3)


def weights(dtype=torch.float64):
    return [rand(rows, 4, seed=rows, dtype=dtype) for rows in ROWS]


def biases():
    return [rand(rows, seed=10 + rows) for rows in ROWS]


def test_one_product_is_that_of_each_weight():
    compare(
        lambda x, *ws: torch.cat(linears(x, ws), -1),
        lambda x, *ws: torch.cat([F.linear(x, w) for w in ws], -1),
        [rand(7, 4), *weights()],
    )


@pytest.mark.parametrize("shape", [(7, 4), (2, 3, 4)])
def test_each_with_its_bias(shape):
    compare(
        lambda x, *args: torch.cat(linears(x, args[:3], args[3:]), -1),
        lambda x, *args: torch.cat([F.linear(x, w, b) for w, b in zip(args[:3], args[3:], strict=True)], -1),
        [rand(*shape), *weights(), *biases()],
    )


def test_bfloat16_rounds_the_weights_and_the_results_alone(monkeypatch):
    x, args = rand(7, 4, dtype=torch.bfloat16), weights(torch.float32)

    def apart(x, *ws):
        return torch.cat([F.linear(x.float(), w.bfloat16().float()) for w in ws], -1).bfloat16()

    compare(lambda x, *ws: torch.cat(linears(x, ws), -1), apart, [x, *args], 1e-2)
    monkeypatch.setattr(matmul, "_cpu_has_bf16", lambda: False)
    assert torch.equal(torch.cat(linears(x, args), -1), apart(x, *args)), "as if the CPU multiplied bfloat16"


@pytest.mark.parametrize("frozen", range(4))
def test_what_is_frozen_gets_no_gradient(frozen):
    args = [rand(7, 4), *weights()]
    args[frozen].requires_grad_(False)
    torch.cat(linears(args[0], args[1:]), -1).sum().backward()
    assert [t.grad is None for t in args] == [i == frozen for i in range(4)]


def test_backward_keeps_only_the_operands():
    """The joined weight least of all: it would outlive the gathered weights that FSDP frees."""
    x, args, kept = rand(7, 4), weights(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
        linears(x, args)
    assert set(kept) == {t.data_ptr() for t in (x, *args)}


def test_a_single_product_defers_its_weight_gradient_too():
    x, weight, jobs = rand(7, 4), rand(3, 4, seed=1), []
    with deferring_weight_grads(jobs):
        linear(x, weight).sum().backward()
    assert (len(jobs), weight.grad) == (1, None)
    jobs[0]()
    assert torch.allclose(weight.grad, x.detach().sum(0).expand(3, 4), rtol=1e-12)
