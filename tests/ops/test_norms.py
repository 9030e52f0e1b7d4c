import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm, Qwen3_5RMSNormGated

from meshwright.ops import gated_rms_norm, layer_norm, rms_norm, swiglu, upcast
from tests.ops.references import compare, rand, smoke


def reference(x, weight):
    return torch.stack([row / ((row * row).sum() / row.numel() + 1e-6).sqrt() * weight for row in x])


def test_upcast_is_to_at_least_float32():
    want = {torch.bfloat16: torch.float32, torch.float32: torch.float32, torch.float64: torch.float64}
    assert {d: upcast(torch.ones(1, dtype=d)).dtype for d in want} == want


def plain(x, weight):
    return rms_norm(x, weight, 1e-6)


def zero_centred(x, weight):
    return rms_norm(x, weight, 1e-6, zero_centred=True)


def gated(x, gate, weight):
    return gated_rms_norm(x, gate, weight, 1e-6)


@pytest.mark.parametrize("num_tokens", [1, 7])
def test_against_reference(num_tokens):
    x, gate, weight = rand(num_tokens, 6), rand(num_tokens, 6, seed=1), rand(6, seed=2)
    compare(plain, reference, [x, weight])
    compare(zero_centred, lambda x, w: reference(x, 1 + w), [x, weight])
    compare(gated, lambda x, g, w: reference(x, w) * g * g.sigmoid(), [x, gate, weight])

    def unweighted(both):
        return both[:, :3] * both[:, :3].sigmoid() * both[:, 3:]

    compare(swiglu, unweighted, [x])
    compare(swiglu, lambda both, weight: unweighted(both) * weight[:, None], [x, rand(len(x))])


def test_no_tokens_still_give_gradients():
    x, weight = rand(0, 6), rand(6)
    (plain(x, weight).sum() + zero_centred(x, weight).sum() + gated(x, x, weight).sum()).backward()
    assert (weight.grad == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_bitwise_as_transformers(dtype, weight_dtype):
    x, gate, weight = rand(5, 16, dtype=dtype), rand(5, 16, seed=1, dtype=dtype), rand(16, seed=2, dtype=weight_dtype)
    cases = [
        (Qwen3RMSNorm(16, 1e-6), lambda w: plain(x, w), (x,)),
        (Qwen3_5RMSNorm(16, 1e-6), lambda w: zero_centred(x, w), (x,)),
        (Qwen3_5RMSNormGated(16, 1e-6), lambda w: gated(x, gate, w), (x, gate)),
    ]
    for module, op, inputs in cases:
        exact = isinstance(module, Qwen3_5RMSNormGated)  # the others bring their weight to the dtype of x
        module.weight.data = weight.detach().clone() if exact else weight.detach().to(dtype)
        y = op(weight)
        assert y.dtype == dtype  # also where a float32 weight makes transformers return float32
        assert torch.equal(y, module(*inputs).to(dtype))


def test_zero_centred_keeps_small_weights():
    x = torch.ones(1, 8, dtype=torch.float32)
    weight = torch.full((8,), 2**-12, dtype=torch.bfloat16)  # 1 + w is 1 in bf16
    assert (rms_norm(x, weight, 0.0, zero_centred=True) == 1 + 2**-12).all()
    x, weight = rand(4, 64, dtype=torch.bfloat16), torch.full((64,), 2**-9, dtype=torch.bfloat16)
    assert torch.equal(zero_centred(x, weight), zero_centred(x.float(), weight).bfloat16())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)])
def test_smoke(dtype, tolerance):
    x, gate, weight = rand(9, 16), rand(9, 16, seed=1), rand(16, seed=2)
    smoke(plain, [x, weight], dtype, tolerance)
    smoke(gated, [x, gate, weight], dtype, tolerance)
    smoke(swiglu, [torch.cat([x, gate], -1)], dtype, tolerance)


def test_gradients_of_a_layer_norm_are_summed_over_rows_in_float32():
    """torch's kernel for CPUs sums them in bfloat16, and loses more the more rows there are."""

    def gradients(dtype):
        inputs = [rand(4000, 16), rand(16, seed=1), rand(16, seed=2)]
        inputs = [each.detach().bfloat16().to(dtype).requires_grad_() for each in inputs]
        layer_norm(*inputs, 1e-6).backward(rand(4000, 16, seed=3, grad=False).bfloat16().to(dtype))
        return [each.grad.double() for each in inputs]

    for result, exact in zip(gradients(torch.bfloat16), gradients(torch.float64), strict=True):
        assert (result - exact).norm() <= 4e-3 * exact.norm()


WIDE = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("op", [plain, zero_centred, gated])
def test_gradients_in_bfloat16_are_those_of_float32_rounded_once(op):
    """Also where a weight in float32 is rounded first; the gated norm alone takes it as it is."""
    x, gate, weight = rand(5, 16), rand(5, 16, seed=1), rand(16, seed=2, dtype=torch.float32)
    streams = [each.bfloat16() for each in ([x, gate] if op is gated else [x])]

    def gradients(dtype):
        inputs = [each.detach().to(dtype).requires_grad_() for each in streams]
        own = weight if op is gated or dtype == torch.bfloat16 else weight.bfloat16().float()
        own = own.detach().clone().requires_grad_()
        op(*inputs, own).backward(rand(5, 16, seed=3, grad=False).bfloat16().to(dtype))
        return [*(each.grad.bfloat16() for each in inputs), own.grad]

    assert all(map(torch.equal, *map(gradients, WIDE)))


def test_a_layer_norm_rounds_its_weights_to_the_dtype_of_its_input():
    x, weight, bias = rand(5, 16, dtype=torch.bfloat16), *(rand(16, seed=n, dtype=torch.float32) for n in (1, 2))
    expected = layer_norm(x, weight.bfloat16(), bias.bfloat16(), 1e-6)
    assert torch.equal(layer_norm(x, weight, bias, 1e-6), expected)


def test_the_gradient_of_a_routing_weight_is_summed_in_float32():
    """257 terms of 1: bfloat16 rounds their sum to 256. silu(16) is 16 in bfloat16."""
    gate_up = torch.cat([torch.full((1, 257), 16.0), torch.full((1, 257), 1 / 16)], 1).bfloat16()
    weight_N = torch.ones(1, requires_grad=True)
    swiglu(gate_up, weight_N).backward(torch.ones(1, 257, dtype=torch.bfloat16))
    assert weight_N.grad.tolist() == [257.0]
