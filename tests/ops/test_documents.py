import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.ops import WHOLE, documents, has_next, next_in_document
from meshwright.ops.documents import check_tokens, part_of
from tests.ops.references import Part, quick, ragged


@quick
@given(ragged)
def test_positions_restart_and_bounds_agree(lengths):
    docs = documents(lengths, "cpu", padded=20)
    assert docs.positions_T.tolist() == [i for n in lengths for i in range(n)]
    assert docs.positions_T.dtype == torch.int64
    assert docs.bounds == tuple(sum(lengths[:i]) for i in range(len(lengths) + 1))
    assert docs.lengths == tuple(lengths)
    assert docs.cu_seqlens.dtype == torch.int32
    assert docs.cu_seqlens.tolist() == [*docs.bounds] + [sum(lengths)] * (20 - len(docs.bounds))


@quick
@given(ragged, st.data())
def test_documents_that_reach_into_a_part(lengths, data):
    """The part reaches from the beginning of its first document."""
    docs, total = documents(lengths, "cpu", padded=20), sum(lengths)
    first = data.draw(st.integers(0, total - 1))
    stop = data.draw(st.integers(first + 1, total))
    start, result = docs.reaching(first, stop)
    assert start == first - docs.positions_T[first]
    assert result.positions_T.tolist() == docs.positions_T[start:stop].tolist()
    assert result.bounds == tuple(sorted({0, stop - start, *(b - start for b in docs.bounds if start < b < stop)}))
    assert result.cu_seqlens.tolist() == list(result.bounds)


def test_unpadded_and_empty():
    assert documents([3, 1], "cpu").cu_seqlens.tolist() == [0, 3, 4]
    empty = documents([], "cpu", padded=2)
    assert (empty.bounds, empty.cu_seqlens.tolist(), empty.positions_T.numel()) == ((0,), [0, 0], 0)


def test_refuses_what_it_cannot_hold():
    with pytest.raises(ValueError, match=r"\bdocument 1\b.*\b0\b"):
        documents([2, 0, 3], "cpu")
    with pytest.raises(ValueError, match=r"\bdocument 0\b.*-2\b"):
        documents([-2], "cpu")
    with pytest.raises(ValueError, match=r"\bpadded >= 4\b"):
        documents([1, 2, 3], "cpu", padded=3)


def test_exact_bounds_are_wide_and_not_padded():
    docs = documents([3, 1, 2], "cpu", padded=7)
    assert docs.exact_cu_seqlens.tolist() == [0, 3, 4, 6]
    assert docs.exact_cu_seqlens.dtype == torch.int64
    assert docs.exact_cu_seqlens is docs.exact_cu_seqlens


def test_the_last_token_of_a_document_has_no_next_one():
    docs = documents([3, 1, 2], "cpu")
    assert has_next(docs).tolist() == [True, True, False, False, True, False]
    assert next_in_document(torch.tensor([5, 6, 7, 8, 9, 10]), docs, -100).tolist() == [6, 7, -100, -100, 10, -100]


def test_a_part_gets_the_positions_of_its_own_tokens():
    docs, x = documents([4, 2], "cpu"), torch.zeros(2, 1)
    assert [part_of(docs, Part(3, part, None), x=x).tolist() for part in range(3)] == [[0, 1], [2, 3], [0, 1]]
    assert part_of(docs, WHOLE, x=torch.zeros(6)).tolist() == [0, 1, 2, 3, 0, 1]


@pytest.mark.parametrize("wrong", ["first", "second"])
def test_every_stream_must_have_the_length_of_its_documents(wrong):
    docs = documents([4, 2], "cpu")
    for check, right in ((check_tokens, 6), (lambda docs, **streams: part_of(docs, Part(2, 0, None), **streams), 3)):
        streams = {"first": torch.zeros(right), "second": torch.zeros(right)}
        check(docs, **streams)
        with pytest.raises(ValueError, match=rf"{wrong} has 1 tokens but its documents have {right}"):
            check(docs, **streams | {wrong: torch.zeros(1)})
