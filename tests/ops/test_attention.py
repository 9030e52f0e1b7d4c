from importlib import import_module

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.ops import attention, documents, meta_kernels
from meshwright.ops.kernels import agrees
from tests.ops import references
from tests.ops.references import assert_no_leak, compare, evenly, quick, ragged, rand, smoke

module = import_module("meshwright.ops.attention")  # the package has the function under this name


def inputs(num_tokens, heads=4, kv_heads=2, dim=4):
    shapes = [(num_tokens, heads, dim), (num_tokens, kv_heads, dim), (num_tokens, kv_heads, dim)]
    return [rand(*shape, seed=i) for i, shape in enumerate(shapes)]


@quick
@given(ragged, st.sampled_from([(1, 1), (2, 1), (6, 3), (4, 4), (6, 2)]), st.sampled_from([1, 4]))
def test_against_reference(lengths, heads, dim):
    docs = documents(lengths, "cpu")
    compare(
        lambda q, k, v: attention(q, k, v, docs),
        lambda q, k, v: references.attention(q, k, v, docs.bounds),
        inputs(sum(lengths), *heads, dim),
    )


def in_parts(attend, parts):
    def attended(q, k, v):
        num = len(q) // parts
        return torch.cat([attend(piece, k, v, number * num) for number, piece in enumerate(q.split(num))])

    return attended


@quick
@given(ragged, st.sampled_from([(1, 1), (4, 4), (6, 2)]), st.sampled_from([2, 3, 5]))
def test_queries_in_parts(lengths, heads, parts):
    lengths = evenly(lengths, parts)
    docs = documents(lengths, "cpu", padded=20)
    compare(
        in_parts(lambda q, k, v, first: attention(q, k, v, docs, first), parts),
        lambda q, k, v: references.attention(q, k, v, docs.bounds),
        inputs(sum(lengths), *heads),
    )


def kernel(late):
    """Loop over documents like torch's kernel for several lengths. With `late` the last query sees all keys, otherwise
    the first query sees the first key."""

    def varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, window_size, enable_gqa):
        assert window_size == (-1, 0)
        assert enable_gqa
        rows = []
        for i in range(len(cu_q) - 1):
            (a, b), (c, d) = cu_q[i : i + 2].tolist(), cu_k[i : i + 2].tolist()
            assert 0 < b - a <= min(max_q, d - c)
            assert d - c <= max_k
            before = d - c - (b - a) if late else 0
            x = torch.cat([q[:1].expand(before, -1, -1), q[a:b]])
            rows.append(references.attention(x, k[c : c + len(x)], v[c : c + len(x)], (0, len(x)))[before:])
        return torch.cat(rows)

    return varlen_attn


@quick
@given(ragged, st.sampled_from([2, 3, 5]))
def test_queries_in_parts_by_the_kernel(lengths, parts):
    lengths = evenly(lengths, parts)
    docs = documents(lengths, "cpu", padded=20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.nn.attention.varlen.varlen_attn", kernel(late=True))
        patch.setattr(module, "fastest", lambda kernel, *_, **__: kernel)
        compare(
            in_parts(lambda q, k, v, first: attention(q, k, v, docs, first), parts),
            lambda q, k, v: references.attention(q, k, v, docs.bounds),
            inputs(sum(lengths), 6, 2),
        )


@pytest.mark.parametrize("late", [True, False])
def test_a_kernel_that_lets_the_first_query_see_the_first_key_alone_is_not_used(monkeypatch, late):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel(late))
    assert agrees(module._varlen_last_queries, module._by_document, inputs(1), module._last_queries, (5, 7)) == late


def test_documents_do_not_leak():
    docs = documents([3, 1, 1, 6], "cpu")
    assert_no_leak(lambda q, k, v: attention(q, k, v, docs), inputs(11), docs.bounds)


def test_no_documents_still_give_gradients():
    streams = inputs(0)
    attention(*streams, documents([], "cpu")).sum().backward()
    assert all(x.grad is not None for x in streams)


def test_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match=r"\b2 kv heads\b.*\b3 query heads\b"):
        attention(*inputs(4, heads=3), documents([4], "cpu"))
    with pytest.raises(ValueError, match=r"\bq\b.*\b5 tokens\b.*\b4\b"):
        attention(*inputs(5), documents([4], "cpu"))
    with pytest.raises(ValueError, match=r"\bq\b.*\b2 tokens\b.*\b3\b.*\b4\b"):
        attention(*(x[: 2 + 2 * bool(i)] for i, x in enumerate(inputs(4))), documents([4], "cpu"), first=3)
    with pytest.raises(ValueError, match=r"\b2 tokens from token -1\b"):
        attention(*(x[: 2 + 2 * bool(i)] for i, x in enumerate(inputs(4))), documents([4], "cpu"), first=-1)
    with pytest.raises(ValueError, match=r"\bv has 5 tokens\b"):
        attention(*inputs(4)[:2], inputs(5)[2], documents([4], "cpu"))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)])
def test_smoke(dtype, tolerance):
    docs = documents([20, 1, 11], "cpu")
    smoke(lambda q, k, v: attention(q, k, v, docs), inputs(32, dim=16), dtype, tolerance)


EQUAL = [(1, 1), (2, 2, 2), (5,) * 4, (64, 64)]


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (6, 2)])
@pytest.mark.parametrize("lengths", EQUAL)
def test_documents_of_one_length_are_one_call(lengths, heads):
    docs = documents(lengths, "cpu")
    compare(
        lambda q, k, v: module._equal_documents(q, k, v, docs),
        lambda q, k, v: references.attention(q, k, v, docs.bounds),
        inputs(sum(lengths), *heads),
    )


def test_documents_of_one_length_in_slices_of_one_matmul():
    """As layers bring them: q, k and v are views of one tensor."""
    docs, x = documents((5, 5, 5), "cpu"), rand(15, 8, 4)

    def split(attend):
        return lambda x: attend(*x.split([4, 2, 2], 1), docs)

    compare(split(module._equal_documents), split(module._by_document), [x])


@pytest.mark.parametrize(
    ("lengths", "calls", "dim"),
    [
        ((512, 512), 1, 8),
        ((512, 256), 2, 8),
        ((512,), 1, 8),
        ((256,) * 3, 1, 8),
        ((500, 500), 2, 8),
        ((512, 512), 2, 4),
        ((512, 512), 2, 264),
        ((256, 256), 1, 256),
    ],
)
def test_one_call_is_for_long_documents_of_one_length_off_the_cpu(monkeypatch, lengths, calls, dim):
    called, docs = [], documents(lengths, "cpu")
    real = torch.nn.functional.scaled_dot_product_attention

    def counted(*given, **options):
        called.append(given)
        return real(*given, **options)

    monkeypatch.setattr(module.F, "scaled_dot_product_attention", counted)
    monkeypatch.setattr(module, "_LONG_MACS", 1)
    streams = [x.detach() for x in inputs(sum(lengths), dim=dim)]
    eager = attention(*streams, docs)
    assert len(called) == len(lengths), "a CPU takes one document after the other"
    called.clear()
    monkeypatch.setattr(module, "kind_of", lambda _: "accelerator")
    assert torch.allclose(attention(*streams, docs), eager, rtol=0, atol=1e-12)
    assert len(called) == calls


def test_each_kind_of_queries_has_a_trial_of_its_own(monkeypatch):
    tried = []

    def fastest(kernel, plain, inputs, prepare=list, lengths=(), planned=None):
        tried.append((kernel, prepare, planned))
        return plain

    monkeypatch.setattr(module, "fastest", fastest)
    (q, k, v), docs = inputs(4), documents((4,), "cpu")
    attention(q, k, v, docs)
    attention(q[2:], k, v, docs, 2)
    attention(q, k, v, docs, causal=False)
    assert tried == [
        (module._varlen, list, meta_kernels.attention),
        (module._varlen_last_queries, module._last_queries, meta_kernels.attention),
        (module._varlen_bidirectional, list, meta_kernels.attention),
    ]


@pytest.mark.parametrize(
    ("op", "num_queries", "bounds", "window"),
    [
        (module._varlen, 9, [0, 3, 4, 9], (-1, 0)),
        (module._varlen_bidirectional, 9, [0, 3, 4, 9], (-1, -1)),
        (module._varlen_last_queries, 6, [0, 0, 1, 6], (-1, 0)),
    ],
)
def test_the_varlen_kernel_gets_bounds_without_padding_and_the_window(monkeypatch, op, num_queries, bounds, window):
    given = []

    def varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, window_size):
        given.append((cu_q.tolist(), cu_k.tolist(), max_q, max_k, window_size))
        return q

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    q, k, v = inputs(9)
    op(q[-num_queries:], k, v, documents((3, 1, 5), "cpu", padded=8))
    assert given == [(bounds, [0, 3, 4, 9], 5, 5, window)]


@pytest.mark.parametrize(
    ("slow", "dtype", "heads"),
    [(("cpu",), torch.float32, [0, 1]), ((), torch.bfloat16, [0, 1]), ((), torch.float32, [0, 0, 0, 1, 1, 1])],
)
def test_a_gpu_repeats_each_kv_head_for_its_queries_in_float32(monkeypatch, slow, dtype, heads):
    monkeypatch.setattr(module, "SLOW", slow)
    q, k = torch.zeros(1, 6, 2, dtype=dtype), torch.arange(2).to(dtype).view(1, 2, 1)
    same_q, *others = module._with_heads_of_torch(q, k, 10 + k)
    assert same_q is q
    assert [x.flatten().tolist() for x in others] == [heads, [10 + head for head in heads]]


def test_a_plan_of_documents_of_one_length(monkeypatch):
    monkeypatch.setattr(module, "_LONG_MACS", 1)
    docs = documents((256, 256), "cpu")
    q, k, v = (torch.empty(512, heads, 8, device="meta").requires_grad_() for heads in (4, 2, 2))
    with meta_kernels.planned_for("cuda"):
        o = attention(q, k, v, docs)
        o.sum().backward()
    assert (o.shape, k.grad.shape) == (q.shape, k.shape)


PLANTED_IN_ONE_CALL = {
    "each document sees the others": lambda q, k, v, docs: module._by_document(q, k, v, documents((len(q),), "cpu")),
    "not causal": lambda q, k, v, docs: module._by_document(q, k, v, docs, causal=False),
    "documents in another order": lambda q, k, v, docs: module._equal_documents(q.roll(5, 0), k, v, docs),
    "tokens for heads": lambda q, k, v, docs: module._equal_documents(q.transpose(0, 1).reshape(q.shape), k, v, docs),
}


@pytest.mark.parametrize("plant", PLANTED_IN_ONE_CALL)
def test_planted_bugs_of_one_call_are_seen(plant):
    docs = documents((5, 5, 5), "cpu")
    with pytest.raises(AssertionError):
        compare(
            lambda q, k, v: PLANTED_IN_ONE_CALL[plant](q, k, v, docs),
            lambda q, k, v: references.attention(q, k, v, docs.bounds),
            inputs(15, 4, 2),
        )
