"""Slow, obvious forms of every op: loops over documents, tokens, heads and experts, nothing shared with the ops."""

from bisect import bisect
from itertools import pairwise

import torch
from hypothesis import settings
from hypothesis import strategies as st

quick = settings(deadline=None, max_examples=20, derandomize=True)
ragged = st.lists(st.sampled_from([1, 1, 2, 3, 4, 5, 9, 17, 23]), min_size=1, max_size=6)


def rand(*shape, seed=0, dtype=torch.float64, grad=True):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.to(dtype).requires_grad_(grad)


def differentiate(function, inputs):
    """The output and the gradients of all inputs, for one fixed random gradient of the output."""
    inputs = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    y = function(*inputs)
    d = torch.randn(y.shape, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    y.backward(d.to(y.dtype))
    return [y.detach(), *(x.grad for x in inputs if x.requires_grad)]


def assert_same(got, want, tolerance=1e-10):
    assert len(got) == len(want)
    for i, (g, wanted) in enumerate(zip(got, want, strict=True)):
        assert g is not None, f"gradient {i} is None"
        w = torch.zeros_like(g) if wanted is None else wanted
        assert g.shape == w.shape, (i, g.shape, w.shape)
        scale = max(1.0, w.abs().max().item()) if w.numel() else 1.0
        error = (g.double() - w.double()).abs().max().item() if g.numel() else 0.0
        assert error <= tolerance * scale, f"result {i} (0 is the output) is off by {error}"


def compare(op, reference, inputs, tolerance=1e-10):
    assert_same(differentiate(op, inputs), differentiate(reference, inputs), tolerance)


def smoke(op, inputs, dtype, tolerance):
    """A lower precision keeps the dtype and finite values, and is near float64 of the same rounded numbers."""
    low = [x.detach().to(dtype).requires_grad_(x.requires_grad) for x in inputs]
    got = differentiate(op, low)
    assert all(torch.isfinite(x).all() for x in got)
    assert [x.dtype for x in got] == [dtype] * len(got)
    assert_same(got, differentiate(op, [x.detach().double().requires_grad_(x.requires_grad) for x in low]), tolerance)


def assert_no_leak(op, streams, bounds):
    """Each document's output: no gradient to another document's inputs, no change when those change."""
    for start, stop in pairwise(bounds):
        inputs = [x.detach().clone().requires_grad_() for x in streams]
        y = op(*inputs)
        y[start:stop].square().sum().backward()
        outside = torch.ones(bounds[-1], dtype=torch.bool)
        outside[start:stop] = False
        for x in inputs:
            assert (x.grad[outside] == 0).all()
        changed = [x.detach().clone() for x in streams]
        for x in changed:
            x[outside] = x[outside] * 7 - 3
        assert (op(*changed)[start:stop] - y[start:stop]).abs().max() <= 1e-12


class Part:
    """One part of a stream computed in parts on one process. It gets the results of the other parts once all are
    known."""

    def __init__(self, parts, part, rows):
        self.parts, self.part, self._rows = parts, part, rows

    def __call__(self, x):
        if self._rows is None:
            raise _Brought(x)
        return torch.cat(self._rows)


class _Brought(Exception):
    def __init__(self, rows):
        super().__init__()
        self.rows = rows


def in_parts(op, parts, streams):
    """`op(part, *streams of it)` of each part, joined. Inputs from other parts stay in their graph."""
    pieces, brought = list(zip(*(x.chunk(parts) for x in streams), strict=True)), []
    for number, piece in enumerate(pieces):
        try:
            op(Part(parts, number, None), *piece)
        except _Brought as requested:
            brought.append(requested.rows)
    return torch.cat([op(Part(parts, number, brought), *piece) for number, piece in enumerate(pieces)])


def evenly(lengths, parts):
    """Add a document where the lengths do not divide into this many parts."""
    return [*lengths, *([-sum(lengths) % parts] if sum(lengths) % parts else [])]


def attention(q, k, v, bounds):
    group = q.shape[1] // k.shape[1]
    rows = []
    for start, stop in pairwise(bounds):
        for t in range(start, stop):
            heads = []
            for h in range(q.shape[1]):
                scores = k[start : t + 1, h // group] @ q[t, h] / q.shape[2] ** 0.5
                heads.append(scores.softmax(0) @ v[start : t + 1, h // group])
            rows.append(torch.stack(heads))
    return torch.stack(rows)


def causal_conv(x, weight, bounds):
    width = weight.shape[1]
    rows = []
    for start, stop in pairwise(bounds):
        for t in range(start, stop):
            y = torch.zeros_like(x[0])
            for s in range(max(start, t - width + 1), t + 1):
                y = y + weight[:, width - 1 - (t - s)] * x[s]
            rows.append(y * torch.sigmoid(y))
    return torch.stack(rows)


def delta_rule(q, k, v, g, beta, bounds):
    def unit(x):
        return x / (x.pow(2).sum() + 1e-6).sqrt()

    rows = []
    for start, stop in pairwise(bounds):
        states = {(j, r): q.new_zeros(q.shape[2], v.shape[3]) for j in range(v.shape[1]) for r in range(v.shape[2])}
        for t in range(start, stop):
            outs = []
            for j, r in states:
                key, query = unit(k[t, j]), unit(q[t, j]) * q.shape[2] ** -0.5
                state = states[j, r] * g[t, j, r].exp()
                state = state + torch.outer(key, beta[t, j, r] * (v[t, j, r] - state.T @ key))
                states[j, r] = state
                outs.append(state.T @ query)
            rows.append(torch.stack(outs).view(v.shape[1:]))
    return torch.stack(rows)


def experts(x, gate_up, down, counts):
    ffn = down.shape[2]
    rows, n = [], 0
    for e, count in enumerate(counts.tolist()):
        for _ in range(count):
            gate, up = gate_up[e, :ffn] @ x[n], gate_up[e, ffn:] @ x[n]
            rows.append(down[e] @ (gate * torch.sigmoid(gate) * up))
            n += 1
    return torch.stack(rows) if rows else x * 0


def token_stats(x, weight, labels):
    logits = x @ weight.T
    target = [row[label] if 0 <= label < len(weight) else row[0] * 0 for row, label in zip(logits, labels, strict=True)]
    minus_entropy = (logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    return torch.stack([logits.exp().sum(-1).log(), torch.stack(target), minus_entropy], dim=-1)


def candidate_stats(x, weight, labels, ids, temperature, candidate_temperature):
    """The numbers of `token_stats`, the logsumexp at the temperature of the candidates, the logit of each candidate,
    and the logsumexp of all other entries."""
    logits = x @ weight.T / candidate_temperature
    of_candidates = [
        torch.stack([row[i] if 0 <= i < len(weight) else row[0] * 0 for i in own])
        for row, own in zip(logits, ids, strict=True)
    ]
    lse = logits.exp().sum(-1, keepdim=True).log()
    rest = [
        torch.stack([row[i] for i in range(len(weight)) if i not in own]).exp().sum().log()
        for row, own in zip(logits, ids.tolist(), strict=True)
    ]
    own, rest_T1 = token_stats(x, weight / temperature, labels), torch.stack(rest)[:, None]
    return torch.cat([own, lse, torch.stack(of_candidates), rest_T1], dim=-1)


# What 8 bits (E4M3) can be: a sign, four bits of exponent and three of fraction; no infinities, and zero twice.
_FP8 = sorted(
    {k / 8 * 2.0**-6 for k in range(8)} | {(1 + k / 8) * 2.0**e for e in range(-6, 9) for k in range(8)} - {480.0}
)
_IS_EVEN = {value: index % 2 == 0 for index, value in enumerate(_FP8)}


def fp8_number(value):
    """The nearest, of two that are equally near the even one."""
    if value != value:
        return value
    size = min(abs(value), 448.0)
    at = bisect(_FP8, size)
    near = _FP8[max(0, at - 1) : at + 1]
    nearest = min(near, key=lambda known: (abs(size - known), not _IS_EVEN[known]))
    return nearest * (-1 if value < 0 else 1)


def fp8_block(block):
    """Rounded to 8 bits with a scale of its own, which is as wide as the sums."""
    wide = block.to(torch.promote_types(block.dtype, torch.float32))
    scale = wide.abs().max() / 448
    if not scale > 0:
        scale = torch.ones_like(scale)
    quotients = (wide / scale).float() if wide.dtype == torch.float64 else wide / scale
    numbers = [fp8_number(value) for value in quotients.flatten().tolist()]
    return torch.tensor(numbers, dtype=wide.dtype).view(block.shape) * scale


def fp8_rows(x):
    runs = [fp8_block(run) for row in x for run in row.split(128)]
    return torch.cat(runs).view(x.shape) if runs else x


def fp8_matrix(weight):
    return torch.cat(
        [torch.cat([fp8_block(block) for block in rows.split(128, 1)], 1) for rows in weight.split(128, 0)], 0
    )
