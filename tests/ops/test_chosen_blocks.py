"""Choice of blocks and attention over them, against loops over documents, queries and blocks."""

import math
import sys
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.ops import chosen_blocks as module
from meshwright.ops import documents, part_sizes
from meshwright.ops.chosen_blocks import Choice, block_attention, block_keys, blocks_of, choose_blocks
from tests.ops.references import assert_no_leak, compare, quick, ragged, rand

HEADS, DIM = 3, 4


def slow_seen(q, k, bounds, size, num):
    """The keys that each query sees, as sets: per document, per query, one score at a time."""
    seen = [set() for _ in range(bounds[-1])]
    for start, stop in pairwise(bounds):
        for t in range(start, stop):
            whole = (t + 1 - start) // size
            scores = []
            for b in range(whole):
                key = sum(k[start + b * size + i] for i in range(size)) / size
                scores.append(sum(max(0.0, float(q[t, h] @ key)) for h in range(len(q[t]))))
            best = sorted(range(whole), key=lambda b: (-scores[b], b))[:num]
            seen[t] |= {start + b * size + i for b in best for i in range(size)}
            seen[t] |= set(range(start + whole * size, t + 1))
    return seen


def chosen(q, k, docs, size, num, first=0):
    blocks = blocks_of(docs.positions_T, size)
    ids = choose_blocks(q, block_keys(k, blocks), blocks, first, num)
    return Choice(ids, blocks, docs.positions_T, docs.bounds, first)


@quick
@given(ragged, st.sampled_from([1, 2, 4]), st.sampled_from([1, 3]), st.sampled_from([0.0, 1.0]))
def test_choice_against_reference(lengths, size, num, scale):
    """`scale` 0 makes all scores equal: the earlier block wins then."""
    docs = documents(lengths, "cpu")
    q, k = scale * rand(sum(lengths), HEADS, DIM, grad=False), rand(sum(lengths), DIM, seed=1, grad=False)
    choice = chosen(q, k, docs, size, num)
    mask, blocks = choice.visible_keys(), choice.blocks
    expected = slow_seen(q, k, docs.bounds, size, num)
    assert [set(row.nonzero().flatten().tolist()) for row in mask] == expected
    narrow = choose_blocks(q.float(), block_keys(k, blocks).float(), blocks, 0, num)
    assert torch.equal(narrow, choice.chosen_Tb), "the order of float32 scores is that of float64"


@quick
@given(ragged, st.sampled_from([2, 4]), st.sampled_from([2, 3]))
def test_a_part_of_the_queries_chooses_as_the_whole_does(lengths, size, parts):
    lengths = [*lengths, -sum(lengths) % parts or parts]
    docs, total = documents(lengths, "cpu"), sum(lengths)
    q, k = rand(total, HEADS, DIM, grad=False), rand(total, DIM, seed=1, grad=False)
    whole = chosen(q, k, docs, size, 2).chosen_Tb
    own = total // parts
    with part_sizes.shrunk_part_sizes():
        cut = [chosen(q[p * own : (p + 1) * own], k, docs, size, 2, p * own).chosen_Tb for p in range(parts)]
    assert torch.equal(torch.cat(cut), whole)


def slow_attention(q, k, v, seen):
    rows = []
    for t, keys in enumerate(seen):
        at, heads = sorted(keys), []
        for h in range(q.shape[1]):
            g = h * k.shape[1] // q.shape[1]
            weights = torch.softmax(torch.stack([q[t, h] @ k[s, g] for s in at]) / math.sqrt(q.shape[2]), 0)
            heads.append(sum(w * v[s, g] for w, s in zip(weights, at, strict=True)))
        rows.append(torch.stack(heads))
    return torch.stack(rows)


@quick
@given(ragged, st.sampled_from([2, 4]))
def test_attention_against_reference(lengths, size):
    docs, total = documents(lengths, "cpu"), sum(lengths)
    index_q, index_k = rand(total, HEADS, DIM, seed=7, grad=False), rand(total, DIM, seed=8, grad=False)
    seen = slow_seen(index_q, index_k, docs.bounds, size, 2)
    choice = chosen(index_q, index_k, docs, size, 2)
    inputs = [rand(total, 4, 6), rand(total, 2, 6, seed=1), rand(total, 2, 6, seed=2)]
    with part_sizes.shrunk_part_sizes():
        compare(
            lambda q, k, v: block_attention(q, k, v, choice),
            lambda q, k, v: slow_attention(q, k, v, seen),
            inputs,
        )


def test_documents_do_not_leak():
    docs = documents([3, 1, 8, 1, 9], "cpu")
    index_q, index_k = rand(22, HEADS, DIM, seed=7, grad=False), rand(22, DIM, seed=8, grad=False)
    choice = chosen(index_q, index_k, docs, 2, 2)
    streams = [rand(22, 4, 6), rand(22, 2, 6, seed=1), rand(22, 2, 6, seed=2)]
    assert_no_leak(lambda q, k, v: block_attention(q, k, v, choice), streams, docs.bounds)


def test_enough_blocks_are_causal_attention():
    docs = documents([5, 12], "cpu")
    mask = chosen(rand(17, HEADS, DIM, grad=False), rand(17, DIM, seed=1, grad=False), docs, 4, 3).visible_keys()
    causal = torch.block_diag(*(torch.ones(n, n).tril() for n in (5, 12))).bool()
    assert torch.equal(mask, causal)


def test_blocks_of_documents_that_end_within_one():
    blocks = blocks_of(documents((3, 1, 4), "cpu").positions_T, 2)
    assert blocks.last_B.tolist() == [1, 5, 7, 1], "those behind the last whole one lie within the stream"
    assert blocks.before_S.tolist() == [0, 0, 0, 1, 1, 1, 1, 1]
    assert blocks.visible_S.tolist() == [0, 1, 1, 0, 0, 1, 1, 2]


def late_choice(first):
    docs = documents((3, 1, 8), "cpu")
    blocks = blocks_of(docs.positions_T, 2)
    chosen_Tb = torch.tensor([[-1, -1]] * 5 + [[1, -1]] * 2 + [[1, 2], [2, -1]] + [[1, 3]] * 3, dtype=torch.int32)
    return Choice(chosen_Tb[first:], blocks, docs.positions_T, docs.bounds, first)


@pytest.mark.parametrize("queries", [1, 4, 1024])
def test_queries_from_the_middle_of_a_stream_have_their_own_gradients(monkeypatch, queries):
    monkeypatch.setattr(module, "QUERIES", queries)
    choice, scale = late_choice(6), 4**-0.5

    def slowly(q, k, v):
        # Token 6 is the third of its document: it sees block 1 (tokens 4 and 5), and itself.
        rows = [[4, 5, 6], [4, 5, 6, 7], [6, 7, 8], [4, 5, 8, 9], [4, 5, 8, 9, 10], [4, 5, 8, 9]]
        return torch.stack([((k[at, 0] @ x[0]) * scale).softmax(0) @ v[at, 0] for x, at in zip(q, rows, strict=True)])

    streams = [rand(6, 1, 4), rand(12, 1, 4, seed=1), rand(12, 1, 4, seed=2)]
    compare(lambda q, k, v: block_attention(q, k, v, choice)[:, 0], slowly, streams)


def test_gradients_of_keys_are_summed_over_queries_in_float32(monkeypatch):
    """All queries see the first token equally: its value gets 1 + 1/2 + 1/3 + ..., which bfloat16 stops adding to. As
    its value alone is 1, query n moves its key by (8 / n) (1 - 1 / n) / sqrt(8)."""
    monkeypatch.setattr(module, "QUERIES", 1)
    num = 150
    docs = documents((num,), "cpu")
    q, k, v = (torch.zeros(num, 1, 8, dtype=torch.bfloat16) for _ in range(3))
    q[:], v[0] = 1.0, 1.0
    k.requires_grad_(), v.requires_grad_()
    blocks = blocks_of(docs.positions_T, 2 * num)
    choice = Choice(torch.full((num, 1), module.NO_BLOCK), blocks, docs.positions_T, docs.bounds)
    block_attention(q, k, v, choice).sum().backward()
    assert abs(v.grad[0, 0, 0].item() - sum(1 / n for n in range(1, num + 1))) < 0.03
    assert abs(k.grad[0, 0, 0].item() - sum(8 / n * (1 - 1 / n) for n in range(1, num + 1)) / 8**0.5) < 0.06
    assert {x.dtype for x in (k.grad, v.grad)} == {torch.bfloat16}


def test_what_a_kernel_reads_of_a_choice(monkeypatch):
    fake = SimpleNamespace(Seen=lambda *fields: fields)
    monkeypatch.setitem(sys.modules, "meshwright.ops.kernels.block_attention", fake)
    starts, counts, tails, last_B, size, first = module._seen(late_choice(7))
    assert starts.tolist()[:2] == [[4, 6], [6, 0]]
    assert starts.tolist()[2:] == [[4, 8]] * 3
    assert (counts.tolist(), tails.tolist()) == ([2, 1, 2, 2, 2], [0, 1, 0, 1, 0])
    assert (last_B.tolist(), size, first) == ([1, 5, 7, 9, 11, 1], 2, 7)
    assert {x.dtype for x in (starts, counts, tails)} == {torch.int32}


@pytest.mark.parametrize("late", [True, False])
def test_the_trial_of_the_kernel_has_queries_from_the_middle(monkeypatch, late):
    """A kernel that is right for the whole stream alone fails its trial."""

    def by_kernel(q, k, v, choice):
        return [module._forward((q, k, v), choice) * (late or choice.first == 0)]

    monkeypatch.setattr(module, "_by_kernel", by_kernel)
    monkeypatch.setattr(module, "_gradients_by_kernel", lambda of, choice, _, d: module._gradients(of, choice, d))
    results, due = module._compare_kernel(torch.zeros(1, 2, 8), torch.zeros(1, 1, 8), 2)
    assert len(results) == len(due) == 8
    assert all(torch.equal(*pair) for pair in zip(results, due, strict=True)) == late


def test_a_plan_assumes_the_longest_reach():
    choice = late_choice(6)
    assert choice.reach == (4, 12)
    assert choice._replace(chosen_Tb=choice.chosen_Tb.to("meta")).reach == (0, 12)


def test_a_kernel_counts_the_first_block_of_a_stream_too(monkeypatch):
    monkeypatch.setitem(sys.modules, "meshwright.ops.kernels.block_attention", SimpleNamespace(Seen=lambda *each: each))
    docs = documents((9,), "cpu")
    ids = torch.tensor([[0, module.NO_BLOCK], [module.NO_BLOCK] * 2, [1, 0], [0, 1]])
    starts, counts, *_ = module._seen(Choice(ids, blocks_of(docs.positions_T, 3), docs.positions_T, docs.bounds, 4))
    assert counts.tolist() == [1, 0, 2, 2]
    assert [row[:num] for row, num in zip(starts.tolist(), counts.tolist(), strict=True)] == [[0], [], [3, 0], [0, 3]]


def test_a_plan_counts_what_a_kernel_sums_and_keeps_in_float32(monkeypatch):
    made, real = [], torch.Tensor.new_empty
    monkeypatch.setattr(
        torch.Tensor, "new_empty", lambda x, *args, **options: made.append(real(x, *args, **options)) or made[-1]
    )
    q, k, v = (
        torch.empty(9, heads, width, dtype=torch.bfloat16, device="meta") for heads, width in ((6, 4), (2, 4), (2, 5))
    )
    _, lse_TH = module._by_kernel(q, k, v, late_choice(3))
    assert (lse_TH.shape, lse_TH.dtype) == ((9, 6), torch.float32)
    made.clear()
    grads = module._gradients_by_kernel((q, k, v), late_choice(3), (), q)
    assert [(x.shape, x.dtype) for x in grads] == [(x.shape, x.dtype) for x in (q, k, v)]
    assert [(x.shape, x.dtype) for x in made] == [(x.shape, torch.float32) for x in (k, v)]
