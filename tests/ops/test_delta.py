import sys
import time
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule

from meshwright.ops import causal_conv, delta, documents, gates
from meshwright.ops.delta import chunked
from tests.ops import references
from tests.ops.references import (
    Part,
    assert_no_leak,
    assert_same,
    compare,
    differentiate,
    evenly,
    in_parts,
    quick,
    ragged,
    rand,
    smoke,
)


def inputs(num_tokens, groups=2, ratio=2, key_dim=3, value_dim=4, decay=1.0):
    q, k = rand(num_tokens, groups, key_dim), rand(num_tokens, groups, key_dim, seed=1)
    v = rand(num_tokens, groups, ratio, value_dim, seed=2)
    g = -decay * rand(num_tokens, groups, ratio, seed=3, grad=False).exp()
    return [q, k, v, g.requires_grad_(), rand(num_tokens, groups, ratio, seed=4, grad=False).sigmoid().requires_grad_()]


@quick
@given(ragged, st.sampled_from([1, 2, 4]))
def test_conv_against_reference(lengths, width):
    docs = documents(lengths, "cpu")
    compare(
        lambda x, w: causal_conv(x, w, docs),
        lambda x, w: references.causal_conv(x, w, docs.bounds),
        [rand(sum(lengths), 5), rand(5, width, seed=1)],
    )


@quick
@given(ragged, st.sampled_from([1, 2, 4]), st.sampled_from([2, 3, 5]))
def test_conv_in_parts(lengths, width, parts):
    """A part may be shorter than what the convolution looks back."""
    lengths = evenly(lengths, parts)
    docs = documents(lengths, "cpu")
    compare(
        lambda x, w: in_parts(lambda part, x: causal_conv(x, w, docs, part), parts, [x]),
        lambda x, w: references.causal_conv(x, w, docs.bounds),
        [rand(sum(lengths), 5), rand(5, width, seed=1)],
    )


def test_conv_documents_do_not_leak():
    docs, weight = documents([3, 1, 2, 1, 9], "cpu"), rand(5, 4, seed=1)
    assert_no_leak(lambda x: causal_conv(x, weight, docs), [rand(16, 5)], docs.bounds)


def test_conv_keeps_an_infinity_in_its_document():
    x = rand(8, 2, grad=False)
    x[2] = torch.inf
    y = causal_conv(x, rand(2, 4, grad=False), documents([3, 5], "cpu"))
    assert torch.isfinite(y[3:]).all()


def test_gates_against_their_formula():
    a, b, A_log, dt_bias = rand(5, 2, 3), rand(5, 2, 3, seed=1), rand(2, 3, seed=2), rand(2, 3, seed=3)
    compare(
        lambda a, A_log, dt_bias: gates(a, b, A_log, dt_bias)[0],
        lambda a, A_log, dt_bias: -torch.exp(A_log) * torch.log1p(torch.exp(a + dt_bias)),
        [a, A_log, dt_bias],
    )
    compare(lambda b: gates(a, b, A_log, dt_bias)[1], lambda b: 1 / (1 + torch.exp(-b)), [b])


def test_gates_round_nothing_to_bf16():
    """Neither the parameters, whose error would compound over a document, nor the sum a + dt_bias."""
    a, b = rand(50, 6, dtype=torch.bfloat16), rand(50, 6, seed=1, dtype=torch.bfloat16)
    A_log, dt_bias = rand(6, seed=2, dtype=torch.float32), rand(6, seed=3, dtype=torch.float32)
    low, high = gates(a, b, A_log, dt_bias), gates(a.float(), b.float(), A_log, dt_bias)
    assert all(torch.equal(x, y) for x, y in zip(low, high, strict=True))


def rule(q, k, v, g, beta, docs, **part):
    return delta.delta_rule(q, k, v, (g, beta), docs, **part)


def in_chunks(size, docs):
    def chunks(*streams):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(delta, "CHUNK", size)
            return chunked(*streams, docs)

    return chunks


@quick
@given(ragged, st.sampled_from([(1, 1), (1, 3), (2, 2)]), st.sampled_from([1, 4, 8, 64]))
def test_rule_against_reference(lengths, heads, chunk):
    docs = documents(lengths, "cpu")
    compare(in_chunks(chunk, docs), lambda *x: references.delta_rule(*x, docs.bounds), inputs(sum(lengths), *heads))


@quick
@given(ragged, st.sampled_from([(1, 1), (1, 3), (2, 2)]), st.sampled_from([1, 4, 64]), st.sampled_from([2, 3, 4]))
def test_rule_in_parts(lengths, heads, chunk, parts):
    lengths = evenly(lengths, parts)
    docs = documents(lengths, "cpu")

    def ours(*streams):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(delta, "CHUNK", chunk)
            return in_parts(lambda part, *x: rule(*x, docs, states=part), parts, streams)

    compare(ours, lambda *x: references.delta_rule(*x, docs.bounds), inputs(sum(lengths), *heads, decay=0.3))


def test_one_document_over_all_parts_of_many_chunks():
    docs = documents([396], "cpu")
    compare(
        lambda *x: in_parts(lambda part, *x: rule(*x, docs, states=part), 4, x),
        lambda *x: references.delta_rule(*x, docs.bounds),
        inputs(396, 1, 2, decay=0.01),
    )


def test_a_state_ends_with_its_document():
    """A non-finite state ends too, if its last part begins another document."""
    docs, streams = documents([5, 7], "cpu"), [x.detach() for x in inputs(12)]
    before = in_parts(lambda part, *x: rule(*x, docs, states=part), 3, streams)
    for x in streams[:3]:
        x[:5] *= 1e3
    after = in_parts(lambda part, *x: rule(*x, docs, states=part), 3, streams)
    assert torch.equal(after[5:], before[5:])


@pytest.mark.parametrize("part", [0, 1, 2])
def test_every_part_takes_what_all_bring(part):
    """The first needs nothing of it. But a rank that is not in the graph would be waited for in backward."""
    docs, streams, x = documents([12], "cpu"), inputs(4), rand(4, 5)
    states = [rand(1, 2, 2, 3, 7, seed=i) for i in range(3)]
    tails = [rand(3, 5, seed=i) for i in range(3)]
    rule(*streams, docs, states=Part(3, part, states)).sum().backward()
    causal_conv(x, rand(5, 4), docs, Part(3, part, tails)).sum().backward()
    assert all(rows.grad is not None for rows in (*states, *tails))
    assert [bool(rows.grad.any()) for rows in states] == [number < part for number in range(3)]
    assert [bool(rows.grad.any()) for rows in tails] == [number == part - 1 for number in range(3)]


def test_rule_over_documents_longer_than_its_real_chunk():
    docs = documents([3, 130, 64, 1, 67], "cpu")
    compare(lambda *x: rule(*x, docs), lambda *x: references.delta_rule(*x, docs.bounds), inputs(265, 1, 2, decay=0.05))


@pytest.mark.parametrize("chunk", [4, 64])
def test_rule_documents_do_not_leak(chunk):
    docs = documents([3, 1, 9, 1, 2, 13], "cpu")
    assert_no_leak(in_chunks(chunk, docs), inputs(29), docs.bounds)


def test_a_document_is_the_same_alone_and_packed():
    lengths = [7, 70, 1, 50]
    docs, streams = documents(lengths, "cpu"), inputs(128, decay=0.1)
    packed = rule(*streams, docs)
    pieces = zip(*(x.split(lengths) for x in streams), strict=True)
    alone = [rule(*piece, documents([n], "cpu")) for n, piece in zip(lengths, pieces, strict=True)]
    assert (packed - torch.cat(alone)).abs().max() < 1e-13


@pytest.mark.parametrize("expected", [torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule])
def test_rule_as_transformers(expected):
    streams = [x.detach().float().requires_grad_() for x in inputs(150, 2, 2, 8, 16, decay=0.1)]

    def reference(q, k, v, g, beta):
        flat = [q[None], k[None], v.flatten(1, 2)[None], g.flatten(1)[None], beta.flatten(1)[None]]
        return expected(*flat, use_qk_l2norm_in_kernel=True)[0][0].view(v.shape)

    ours = differentiate(lambda *x: rule(*x, documents([150], "cpu")), streams)
    assert_same(ours, differentiate(reference, streams), 1e-5)


@pytest.mark.parametrize("huge", [50.0, 1e4, 1e30, torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_very_negative_decay_is_finite_and_hurts_no_neighbour(huge, dtype):
    """A state that is forgotten at once. In float32, too, the decay after it must keep its digits."""
    docs, streams = documents([5, 90, 33], "cpu"), [x.detach().to(dtype) for x in inputs(128, decay=0.01)]
    streams[3][::7] = -huge
    got = differentiate(lambda *x: rule(*x, docs), [x.requires_grad_() for x in streams])
    assert all(torch.isfinite(x).all() for x in got)
    wide = [x.detach().double().clamp(min=-1e5).requires_grad_() for x in streams]
    want = differentiate(lambda *x: references.delta_rule(*x, docs.bounds), wide)
    assert_same(got, want, 1e-10 if dtype == torch.float64 else 3e-6)


def test_no_decay_at_all_is_finite():
    streams = inputs(40)
    streams[3] = torch.zeros_like(streams[3]).requires_grad_()
    docs = documents([40], "cpu")
    compare(in_chunks(16, docs), lambda *x: references.delta_rule(*x, docs.bounds), streams)


def test_zero_keys_are_finite():
    streams = inputs(20)
    with torch.no_grad():
        streams[0][3], streams[1][3] = 0, 0
    docs = documents([20], "cpu")
    compare(in_chunks(16, docs), lambda *x: references.delta_rule(*x, docs.bounds), streams)


def test_no_tokens_still_give_gradients():
    docs, weight, streams = documents([], "cpu"), rand(5, 4), inputs(0)
    (causal_conv(rand(0, 5), weight, docs).sum() + rule(*streams, docs).sum()).backward()
    assert all(x.grad is not None for x in [weight, *streams])
    assert (weight.grad == 0).all()


def test_refuses_a_stream_of_another_length():
    with pytest.raises(ValueError, match=r"\bq\b.*\b5 tokens\b.*\b4\b"):
        rule(*inputs(5), documents([4], "cpu"))
    with pytest.raises(ValueError, match=r"\bx\b.*\b5 tokens\b.*\b4\b"):
        causal_conv(rand(5, 2), rand(2, 4), documents([4], "cpu"))
    with pytest.raises(ValueError, match=r"\bx\b.*\b4 tokens\b.*\b2 in each of 2 parts\b"):
        causal_conv(rand(4, 2), rand(2, 4), documents([4], "cpu"), Part(2, 0, None))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)])
def test_smoke(dtype, tolerance):
    docs = documents([20, 1, 3, 100], "cpu")
    smoke(lambda x, w: causal_conv(x, w, docs), [rand(124, 6), rand(6, 4, seed=1)], dtype, tolerance)
    smoke(lambda *x: rule(*x, docs), inputs(124, key_dim=8, value_dim=8, decay=0.1), dtype, tolerance)


def test_quick_at_1024_tokens():
    docs, streams = (
        documents([1000, 24], "cpu"),
        [x.detach().float().requires_grad_() for x in inputs(1024, 4, 2, 32, 32)],
    )
    start = time.perf_counter()
    rule(*streams, docs).sum().backward()
    assert time.perf_counter() - start < 5  # 0.06 s when alone; the bound only catches a loop over tokens


def test_a_convolution_in_parts_is_rounded_as_one_of_the_whole():
    docs, x, weight = documents([3, 9], "cpu"), rand(12, 5, dtype=torch.bfloat16), rand(5, 4, seed=1)
    whole = causal_conv(x, weight, docs)
    in_three = in_parts(lambda part, x: causal_conv(x, weight, docs, part), 3, [x])
    assert in_three.dtype == torch.bfloat16
    assert torch.equal(in_three, whole)


def test_gradients_of_taps_are_not_rounded_to_the_dtype_of_the_stream():
    docs, x, weight = documents([3, 9], "cpu"), rand(12, 5, dtype=torch.bfloat16, grad=False), torch.ones(5, 4)
    low, wide = (weight.to(dtype).clone().requires_grad_() for dtype in (torch.float32, torch.float64))
    d = rand(12, 5, seed=2, grad=False).bfloat16()
    causal_conv(x, low, docs).backward(d)
    causal_conv(x.double(), wide, docs).backward(d.double())
    assert (low.grad - wide.grad).norm() <= 1e-6 * wide.grad.norm()


def test_an_empty_part_goes_to_no_kernel(monkeypatch):
    monkeypatch.setattr(delta, "_fastest_halves", None)
    maps = [rand(1, 2, 2, 3, 7, seed=i) for i in range(2)]
    assert rule(*inputs(0), documents([], "cpu"), states=Part(2, 1, maps)).shape == (0, 2, 2, 4)


def test_what_flash_linear_attention_gets(monkeypatch):
    """A key head for each value head, heads side by side, and the bounds of documents without padding."""

    def chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens, use_qk_l2norm_in_kernel):
        assert use_qk_l2norm_in_kernel
        assert (cu_seqlens.tolist(), cu_seqlens.dtype) == ([0, 3, 12], torch.int64)
        assert q.shape[:3] == k.shape[:3] == v.shape[:3] == g.shape == beta.shape == (1, 12, 6)
        one_value = [v[0].unsqueeze(2), g[0].unsqueeze(2), beta[0].unsqueeze(2)]
        return references.delta_rule(q[0], k[0], *one_value, cu_seqlens.tolist()).squeeze(2)[None], None

    module = SimpleNamespace(chunk_gated_delta_rule=chunk_gated_delta_rule)
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", module)
    docs, streams = documents([3, 9], "cpu", padded=5), inputs(12, ratio=3)
    compare(lambda *x: delta._fla(*x, docs), lambda *x: references.delta_rule(*x, docs.bounds), streams)
