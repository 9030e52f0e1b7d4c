import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.ops import attention, documents
from tests.ops import references
from tests.ops.references import assert_no_leak, compare, quick, ragged, rand, smoke


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


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)])
def test_smoke(dtype, tolerance):
    docs = documents([20, 1, 11], "cpu")
    smoke(lambda q, k, v: attention(q, k, v, docs), inputs(32, dim=16), dtype, tolerance)
