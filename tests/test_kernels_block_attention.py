"""Attention over chosen blocks by kernels/block_attention.py, next to the formula of ops/chosen_blocks.py."""

from functools import partial

import pytest
import torch

from meshwright.ops import chosen_blocks, documents, meta_kernels
from meshwright.ops.chosen_blocks import Choice, block_attention, block_keys, blocks_of, choose_blocks
from meshwright.ops.kernels import trials
from tests.interpreter import kernels_of, planted

# lengths of documents; query and kv heads, dims; tokens of a block, blocks of a choice; the first query
CASES = {
    "one document": ([37], (4, 2, 16), (4, 3), 0),
    "packed": ([5, 1, 23, 40, 2], (6, 2, 10), (4, 2), 0),
    "a part of a stream": ([5, 1, 23, 40, 3], (6, 2, 10), (3, 2), 24),
    "many blocks, one kv head": ([70], (12, 1, 20), (2, 30), 35),
    "blocks of one token": ([9, 40], (2, 2, 16), (1, 5), 0),
    "no whole block": ([3, 2, 1], (2, 1, 8), (4, 2), 0),
    "wide blocks": ([90], (2, 1, 16), (24, 2), 0),
}


def made(case, dtype=torch.float32):
    """Inputs, a choice, and a gradient of the output."""
    lengths, (heads, kv, dim), (size, num), first = CASES[case]
    g, docs, total = torch.Generator().manual_seed(1), documents(lengths, "cpu"), sum(lengths)
    normal = partial(torch.randn, generator=g)
    q = normal(total - first, heads, dim).to(dtype)
    k, v = (normal(total, kv, dim).to(dtype) for _ in range(2))
    blocks = blocks_of(docs.positions_T, size)
    chosen = choose_blocks(normal(total - first, 3, 8), block_keys(normal(total, 8), blocks), blocks, first, num)
    choice = Choice(chosen.int(), blocks, docs.positions_T, docs.bounds, first)
    return (q, k, v), choice, normal(total - first, heads, dim).to(dtype)


def differentiate(inputs, choice, d):
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    o = block_attention(*inputs, choice)
    return [o.detach(), *torch.autograd.grad(o, inputs, d)]


def worst(kernels, case, monkeypatch):
    """The largest error of output and gradients, relative to the norm."""
    inputs, choice, d = made(case)
    want = differentiate([x.double() for x in inputs], choice, d.double())
    monkeypatch.setattr(chosen_blocks, "_has_kernel", lambda *_: True)
    monkeypatch.setattr("meshwright.ops.kernels.block_attention.attend", kernels.attend)
    monkeypatch.setattr("meshwright.ops.kernels.block_attention.gradients", kernels.gradients)
    got = differentiate(inputs, choice, d)
    return max(((a.double() - b).norm() / b.norm()).item() for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_against_the_formula(case, monkeypatch):
    assert worst(kernels_of("block_attention"), case, monkeypatch) < 2e-6


PLANTS: dict[str, tuple[str, str]] = {
    "the tail starts one early": ("query - tail + 1 + n", "query - tail + n"),
    "no tail in forward": (
        "for at in range(0, count + PER, PER):  # the last", "for at in range(0, count, PER):  # the last",
    ),
    "queries of another block": ("order.values, firsts_B, right=True", "order.values, firsts_B, right=False"),
    "sums are not rescaled": ("sums = sums * rescale[:, None] +", "sums = sums +"),
    "the total is not rescaled": ("total * rescale + tl.sum(p, 1)", "total + tl.sum(p, 1)"),
    "values of the first kv head": (
        "v_NK = _load(v + g * K, keys, valid, G * K, K, KP)\n        sums",
        "v_NK = _load(v, keys, valid, G * K, K, KP)\n        sums",
    ),
    "gradients of queries without delta": ("p * (d_p - delta_R[:, None]) * scale", "p * d_p * scale"),
    "gradients of keys without delta": ("p_MN * (d_p - delta_M[:, None]) * scale", "p_MN * d_p * scale"),
    "gradients of keys without the scale": ("(d_p - delta_M[:, None]) * scale", "(d_p - delta_M[:, None])"),
    "the tail gives values no gradient": ("dv_SGK[keys] += (p[..., None] * d).sum(2)", "pass"),
    "keys of the tail at no distance": (
        "slice(seen.first + lost - back, seen.first + num - back)", "slice(seen.first + lost, seen.first + num)",
    ),
    "the first query of a block left out": (
        "for at in range(start, stop, PER):", "for at in range(start + 1, stop, PER):",
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", PLANTS)
def test_planted_bugs_are_seen(bug, tmp_path, monkeypatch):
    kernels = planted("block_attention", *PLANTS[bug], tmp_path)
    assert not worst(kernels, "packed", monkeypatch) < 1e-3


def test_the_trial_accepts_the_kernel_and_no_planted_one(monkeypatch, tmp_path, caplog):
    kernels_of("block_attention")
    (q, k, _), choice, _ = made("packed", torch.float16)  # the interpreter multiplies no bfloat16
    monkeypatch.setattr(trials, "SLOW", ())
    monkeypatch.setattr(trials, "_passed", {})
    monkeypatch.setattr(chosen_blocks, "kind_of", lambda _: "accelerator")
    assert chosen_blocks._has_kernel(q, k, choice)
    wrong = planted("block_attention", "total * rescale + tl.sum(p, 1)", "total + tl.sum(p, 1)", tmp_path)
    monkeypatch.setattr("meshwright.ops.kernels.block_attention.attend", wrong.attend)
    assert chosen_blocks._has_kernel(q, k, choice), "the trial runs once for a kind of input"
    assert not chosen_blocks._has_kernel(torch.cat([q, q], 1), k, choice)
    assert "kernel block_attention is off by" in caplog.text
    assert not chosen_blocks._has_kernel(q.double(), k, choice)


def test_a_plan_for_a_gpu_counts_no_scores():
    """The formula holds the scores of 1,024 queries; the kernel a number for each query and head."""
    (q, k, v), choice, _ = made("packed", torch.bfloat16)
    on_meta = [x.to("meta").requires_grad_() for x in (q, k, v)]
    blocks = choice.blocks._replace(last_B=choice.blocks.last_B.to("meta"))
    with meta_kernels.planned_for("cuda"):
        assert chosen_blocks._has_kernel(on_meta[0], on_meta[1], choice)
        chosen = choice._replace(chosen_Tb=choice.chosen_Tb.to("meta"), blocks=blocks)
        block_attention(*on_meta, chosen).sum().backward()
    assert [x.grad.shape for x in on_meta] == [x.shape for x in (q, k, v)]
