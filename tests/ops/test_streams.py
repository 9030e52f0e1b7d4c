"""Residual streams and n-grams of Qwen4-Exp against loops over tokens, and the numbers of its published files."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.ops import causal_conv, documents, gated_rms_norm
from meshwright.ops.ngrams import NgramHash, ngram_rows
from meshwright.ops.streams import StreamGates, grouped_rms_norm, read_streams, write_streams
from tests.ops.references import compare, in_parts, quick, ragged, rand, smoke

STREAMS, WIDTH, RANK = 3, 4, 5
PUBLISHED = NgramHash(
    vocab=248320, size=3, heads_per_size=8, first_prime=20_000_000, row_multiple=128, seed=1234, end=248044
)
TINY = NgramHash(vocab=31, size=4, heads_per_size=2, first_prime=50, row_multiple=48, seed=5, end=7, number=1)


def mixer(inject=True):
    wide = STREAMS * WIDTH
    shapes = [(wide,), (RANK, wide), (wide, RANK), *([(STREAMS, wide)] if inject else [])]
    return [rand(*shape, seed=seed + 1) for seed, shape in enumerate(shapes)]


def slow_read(x, norm, down, up, inject=None):
    """One token and one stream at a time."""
    rows = []
    for token in x:
        normed = []
        for stream, weight in zip(token.chunk(STREAMS), norm.chunk(STREAMS), strict=True):
            normed.append(stream / (stream.square().sum() / WIDTH + 1e-6).sqrt() * (1 + weight))
        y = torch.cat(normed)
        low = down @ y / STREAMS
        gate = 1 / (1 + torch.exp(-(up @ (low / (1 + torch.exp(-low))))))
        seen = sum((gate * y).chunk(STREAMS)) / STREAMS
        parts = [seen] if inject is None else [seen, 2 / (1 + torch.exp(-(inject @ y / STREAMS)))]
        rows.append(torch.cat(parts))
    return torch.stack(rows)


def joined_read(x, norm, down, up, inject=None):
    seen, gates = read_streams(x, StreamGates(norm, down, up, inject), STREAMS, 1e-6)
    return seen if gates is None else torch.cat([seen, gates], -1)


@pytest.mark.parametrize("inject", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 7])
def test_read_against_reference(num_tokens, inject):
    compare(joined_read, slow_read, [rand(num_tokens, STREAMS * WIDTH), *mixer(inject)])


def test_read_of_frozen_parameters_and_in_bfloat16():
    x, (norm, down, up, inject) = rand(6, STREAMS * WIDTH), mixer()
    frozen = [norm, down.detach(), up, inject.detach()]
    compare(joined_read, slow_read, [x, *frozen])
    smoke(lambda x: joined_read(x, norm, down, up, inject), [x], torch.bfloat16, 0.1)


def test_read_keeps_its_input_alone():
    x, saved = rand(64, STREAMS * WIDTH), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        joined_read(x, *mixer())
    assert [t.shape for t in saved if t.shape[0] == 64] == [x.shape]


def test_write_adds_to_each_stream():
    x, out, gates = rand(5, STREAMS * WIDTH), rand(5, WIDTH, seed=1), rand(5, STREAMS, seed=2)

    def slow(x, out, gates):
        return torch.cat([x[:, s * WIDTH : (s + 1) * WIDTH] + gates[:, s, None] * out for s in range(STREAMS)], 1)

    compare(write_streams, slow, [x, out, gates])


def test_grouped_norm_is_one_norm_a_group():
    x, weight = rand(5, 12), rand(12, seed=1)

    def slow(x, weight):
        parts = zip(x.chunk(4, 1), weight.chunk(4), strict=True)
        return torch.cat([p / (p.square().mean(1, keepdim=True) + 1e-6).sqrt() * (1 + w) for p, w in parts], 1)

    compare(lambda x, w: grouped_rms_norm(x, w, 4, 1e-6), slow, [x, weight])
    low, rounded = x.bfloat16(), weight.bfloat16()
    assert torch.equal(grouped_rms_norm(low, weight, 4, 1e-6), grouped_rms_norm(low, rounded, 4, 1e-6))


def test_a_gated_norm_may_have_a_sigmoid():
    def slow(x, gate, weight):
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight / (1 + torch.exp(-gate))

    inputs = [rand(5, 6), rand(5, 6, seed=1), rand(6, seed=2)]
    compare(lambda x, g, w: gated_rms_norm(x, g, w, 1e-6, "sigmoid"), slow, inputs)


def slow_dilated(x, weight, bounds, dilation):
    rows = []
    for start, stop in pairwise(bounds):
        for t in range(start, stop):
            taps = [(t - back * dilation, weight[:, -1 - back]) for back in range(weight.shape[1])]
            y = sum(x[at] * tap for at, tap in taps if at >= start)
            rows.append(y / (1 + torch.exp(-y)))
    return torch.stack(rows)


@quick
@given(ragged, st.sampled_from([1, 2, 4]), st.sampled_from([2, 3]), st.sampled_from([1, 2, 5]))
def test_dilated_convolution(lengths, width, dilation, parts):
    """Also in parts that are shorter than what it looks back."""
    lengths = [*lengths, -sum(lengths) % parts or parts]
    docs = documents(lengths, "cpu")
    compare(
        lambda x, w: in_parts(lambda part, x: causal_conv(x, w, docs, part, dilation), parts, [x]),
        lambda x, w: slow_dilated(x, w, docs.bounds, dilation),
        [rand(sum(lengths), 3), rand(3, width, seed=1)],
    )


def test_the_hash_is_that_of_the_published_files():
    assert PUBLISHED.multipliers == [23703573157769, 20109073645365, 8052911324071]
    assert PUBLISHED.rows_of_heads[0] == 20_000_003
    assert PUBLISHED.rows_of_heads[-1] == 20_000_171
    assert sum(PUBLISHED.rows_of_heads) == 320_001_446
    assert PUBLISHED.num_rows == 320_001_536
    assert all(size % d for size in TINY.rows_of_heads for d in range(2, math.isqrt(size) + 1))
    assert TINY.rows_of_heads[0] == 79, "the first table has 53, 59, 61, 67, 71, 73"


def slow_rows(tokens, bounds, hash_):
    """By its definition: token by token, in Python's integers."""
    rows = []
    for start, stop in pairwise(bounds):
        for t in range(start, stop):
            seen = []
            for back in range(hash_.size):
                cut = t - back < start or hash_.end in tokens[t - back : t]
                seen.append(hash_.end if cut else tokens[t - back])
            row = []
            for head, (size, offset) in enumerate(zip(hash_.rows_of_heads, hash_.offsets, strict=True)):
                gram = 0
                for back in range(2 + head // hash_.heads_per_size):
                    gram ^= seen[back] * hash_.multipliers[back]
                assert 0 <= gram < 1 << 63
                row.append(gram % size + offset)
            rows.append(row)
    return rows


@quick
@given(ragged, st.integers(0, 9), st.sampled_from([TINY, PUBLISHED]))
def test_rows_against_reference(lengths, seed, hash_):
    docs = documents(lengths, "cpu")
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(hash_.vocab, (sum(lengths),), generator=random)
    tokens[torch.rand(len(tokens), generator=random) < 0.3] = hash_.end
    rows = ngram_rows(tokens, docs.positions_T, hash_)
    assert rows.tolist() == slow_rows(tokens.tolist(), docs.bounds, hash_)
    assert rows.max() < hash_.num_rows
