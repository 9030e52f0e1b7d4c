"""Hashed n-grams: the constants of a published model, and the rows of tokens against loops over documents."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.ops import NgramHash, documents, ngram_rows
from tests.ops.references import quick, ragged

# Qwen3.8-Flash-Next, as its files state them.
REAL = NgramHash(248320, 3, 8, 20_000_000, 128, 1234, 248044)
END = 2


def test_constants_of_the_published_model():
    assert REAL.multipliers == [23703573157769, 20109073645365, 8052911324071]
    assert len(REAL.rows_of_heads) == 16
    assert (REAL.rows_of_heads[0], REAL.rows_of_heads[-1]) == (20_000_003, 20_000_171)
    assert sum(REAL.rows_of_heads) == 320_001_446
    assert REAL.num_rows == 320_001_536
    assert REAL.offsets[:2] == [0, 20_000_003]
    assert REAL.offsets[-1] + REAL.rows_of_heads[-1] == 320_001_446


def test_no_token_overflows():
    """A token times its factor stays below 2**63, and so does the exclusive or of several."""
    last = torch.tensor([REAL.vocab - 1] * 3)
    assert all((REAL.vocab - 1) * factor < 1 << 63 for factor in REAL.multipliers)
    rows_h = ngram_rows(last, torch.arange(3), REAL)[-1].tolist()
    bigram = ((REAL.vocab - 1) * REAL.multipliers[0]) ^ ((REAL.vocab - 1) * REAL.multipliers[1])
    trigram = bigram ^ ((REAL.vocab - 1) * REAL.multipliers[2])
    heads = zip(REAL.rows_of_heads, REAL.offsets, strict=True)
    assert rows_h == [(bigram if h < 8 else trigram) % size + at for h, (size, at) in enumerate(heads)]


def test_tables_share_no_prime_and_no_factor():
    first, second = (replace(REAL, first_prime=50, number=number) for number in (0, 1))
    assert first.rows_of_heads == [53, 59, 61, 67, 71, 73, 79, 83, 89, 97, 101, 103, 107, 109, 113, 127]
    assert second.rows_of_heads[0] == 131
    assert replace(first, first_prime=53).rows_of_heads == first.rows_of_heads, "it may be a prime itself"
    assert replace(first, row_multiple=1).num_rows == sum(first.rows_of_heads)
    assert replace(first, row_multiple=sum(first.rows_of_heads)).num_rows == sum(first.rows_of_heads)
    assert not {*first.multipliers} & {*second.multipliers}


@pytest.mark.parametrize("change", [dict(vocab=248319), dict(seed=1235), dict(number=1)], ids=str)
def test_another_vocabulary_seed_or_table_has_other_factors(change):
    assert replace(REAL, **change).multipliers != REAL.multipliers


def slow_rows(texts, hash_):
    """One document, one token, one head at a time. Before a text stand ends of text."""
    rows = []
    for text in texts:
        for t in range(len(text)):
            back = [*reversed(text[: t + 1])]
            for place, token in enumerate(back[1:], 1):
                if token == hash_.end:
                    back[place:] = []
                    break
            back = (back + [hash_.end] * hash_.size)[: hash_.size]
            of_token = []
            for h, (size, at) in enumerate(zip(hash_.rows_of_heads, hash_.offsets, strict=True)):
                gram = 0
                for token, factor in zip(back[: 2 + h // hash_.heads_per_size], hash_.multipliers, strict=False):
                    gram ^= token * factor
                of_token.append(gram % size + at)
            rows.append(of_token)
    return rows


@quick
@given(ragged, st.sampled_from([2, 3, 4]), st.integers(0, 5))
def test_rows_against_reference(lengths, size, seed):
    """With a vocabulary of four nearly every text has ends inside of it, at its ends, and several in a row."""
    hash_ = NgramHash(4, size, 2, 50, 36, seed, END)
    tokens = torch.randint(4, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    result = ngram_rows(tokens, documents(lengths, "cpu").positions_T, hash_)
    assert result.tolist() == slow_rows([part.tolist() for part in tokens.split(lengths)], hash_)
    assert result.max() < hash_.num_rows
