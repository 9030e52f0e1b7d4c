"""Statistics and gradients of logits by kernels/logits.py, beside the formula of ops/loss.py in float64."""

import pytest
import torch

from meshwright.ops import loss, meta_kernels, token_stats
from meshwright.ops.kernels import trials
from tests.interpreter import assert_close, kernels_of, planted
from tests.ops import references
from tests.ops.references import assert_same, differentiate, rand

BLOCK = 8192
VOCAB_SIZES = [1, 7, 129, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 17]


def sample(vocab_size, seed=0):
    """Rows of logits of very different size, with labels at the ends of blocks, in no block, and ignored."""
    logits = rand(8, vocab_size, seed=seed, dtype=torch.float32, grad=False)
    logits *= torch.tensor([1e-3, 1, 1, 5, 5, 20, 80, 1])[:, None]
    logits[7] += 1000
    logits[5, vocab_size // 2] = 300
    logits[2:5, -1] += 12  # the largest comes last, in a block of its own
    last = vocab_size - 1
    labels = torch.tensor([0, last, -100, vocab_size, min(BLOCK, last), min(BLOCK - 1, last), vocab_size // 2, 1])
    return logits, labels


def check(kernels, vocab_size, entropy, temperature=1.0):
    kind = loss.Kind(entropy, temperature)
    logits, labels = sample(vocab_size)
    exact = logits.mul_(temperature).double()
    want = loss._stats(exact, labels, kind, into_probs=False)
    stats = kernels.token_stats(logits, labels, *kind)
    assert_close(stats, want)
    d = rand(8, 3, seed=9, dtype=torch.float32, grad=False)
    loss._overwrite_with_gradient(exact, want, d.double(), labels, kind, are_probs=False)
    kernels.overwrite_with_gradient(logits, want.float(), d, labels, *kind)
    assert_close(logits[:7], exact[:7])
    assert_close(logits[7:], exact[7:], 1e-3)  # all near 1000, where a float32 has four digits behind the point


def check_all(kernels):
    for vocab_size in (129, BLOCK + 1):
        check(kernels, vocab_size, entropy=True)


@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_against_the_formula(vocab_size, entropy):
    check(kernels_of("logits"), vocab_size, entropy)


@pytest.mark.parametrize("temperature", [0.7, 3.0])
def test_at_a_temperature(temperature):
    for entropy in (True, False):
        check(kernels_of("logits"), 129, entropy, temperature)


def test_strided_rows_and_gradients():
    """A slice of a wider chunk, as a tensor-parallel rank may hold it, and a gradient that is expanded."""
    kernels = kernels_of("logits")
    logits, labels = sample(300)
    wide = torch.full((8, 512), float("nan"))
    wide[:, :300] = logits
    stats = kernels.token_stats(wide[:, :300], labels, True)
    assert torch.equal(stats, kernels.token_stats(logits, labels, True))
    d = torch.ones(3).expand(8, 3)
    kernels.overwrite_with_gradient(wide[:, :300], stats, d, labels, True)
    kernels.overwrite_with_gradient(logits, stats, d.contiguous(), labels, True)
    assert torch.equal(wide[:, :300], logits)
    assert wide[:, 300:].isnan().all(), "written beyond the row"


def test_no_tokens():
    kernels, none = kernels_of("logits"), torch.empty(0, 5)
    stats = kernels.token_stats(none, torch.empty(0, dtype=torch.int64), True)
    assert stats.shape == (0, 3)
    kernels.overwrite_with_gradient(none, stats, stats, torch.empty(0, dtype=torch.int64), True)


@pytest.mark.parametrize("entropy", [True, False])
def test_what_is_not_finite_is_seen_as_by_the_formula(entropy):
    logits, labels = sample(BLOCK + 5)[0], torch.zeros(8, dtype=torch.int64)
    logits[0, 3] = torch.nan
    logits[1, BLOCK + 2] = torch.nan
    logits[2, 3] = torch.inf
    logits[3, 3] = -torch.inf
    logits[4, :BLOCK] = -torch.inf  # a whole block, and finite ones behind it
    logits[5] = -torch.inf
    want = loss._stats(logits.clone(), labels, loss.Kind(entropy, 1.0), into_probs=False)
    got = kernels_of("logits").token_stats(logits, labels, entropy)
    if not entropy:  # the largest logit of a row that has no finite sum is never read
        for stats in (got, want):
            stats[:, 2].masked_fill_(~want[:, 0].isfinite(), 0.0)
    assert_close(got, want)


PLANTS = [
    ("a mask off by one", "mask=at < V, other=-float", "mask=at < V - 1, other=-float"),
    ("sums are not rescaled", "total = rescale * total", "total = total"),
    ("the largest of the last block alone", "tl.maximum(largest, tl.max(x, 0))", "tl.max(x, 0)"),
    ("the first block left out", "for first in range(0, V, B)", "for first in range(B if V > B else 0, V, B)"),
    ("the entropy does not move with the largest", "rescale * (weighted + moved)", "rescale * weighted"),
    ("entropy counted beyond the row", "tl.where(at < V, exp * (x", "tl.where(at <= V, exp * (x"),
    ("a label beyond the vocabulary", "(label >= 0) & (label < V)", "(label >= 0) & (label <= V)"),
    ("an ignored label", "(label >= 0) & (label < V)", "label < V"),
    ("the gradient of a label in another block", "at == tl.load(labels + t)", "at % B == tl.load(labels + t)"),
    ("the entropy's gradient without its mean", "(log_p - tl.load(stats + t * 3 + 2))", "log_p"),
    ("the gradient of the stats of another row", "factor = tl.load(d_stats + t * 3)", "factor = tl.load(d_stats)"),
    ("the last block of gradients left out", "triton.cdiv(vocab_size, _BLOCK)", "max(1, vocab_size // _BLOCK)"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new"), [p[1:] for p in PLANTS], ids=[p[0] for p in PLANTS])
def test_planted_bugs_are_seen(old, new, tmp_path):
    kernels = planted("logits", old, new, tmp_path)
    with pytest.raises(AssertionError):
        check_all(kernels)


LABELS = torch.tensor([0, 6, -100, 7, 3, -1, 3, 99, 2, 5, 1])  # of a vocabulary of 7, some outside


@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("chunk", [4, 1024])
def test_the_loss_by_the_kernel(monkeypatch, entropy, chunk):
    """All of `token_stats`, in chunks, with the last chunk's logits kept, as a device with the kernel runs it."""
    kernels_of("logits")
    monkeypatch.setattr(loss, "_has_kernel", lambda *_: True)
    inputs = [rand(11, 4, dtype=torch.float32), rand(7, 4, seed=1, dtype=torch.float32)]
    got = differentiate(lambda x, w: token_stats(x, w, LABELS, chunk, entropy), inputs)
    exact = [x.detach().double().requires_grad_() for x in inputs]

    def by_formula(x, w):
        stats = references.token_stats(x, w, LABELS)
        return stats if entropy else torch.cat([stats[:, :2], (x @ w.T).detach().amax(1, keepdim=True)], 1)

    assert_same(got, differentiate(by_formula, exact), 1e-5)


def test_a_second_backward_recomputes_what_the_first_overwrote(monkeypatch):
    kernels_of("logits")
    monkeypatch.setattr(loss, "_has_kernel", lambda *_: True)
    x, weight = rand(11, 4, dtype=torch.float32), rand(7, 4, seed=1, dtype=torch.float32)
    total = token_stats(x, weight, LABELS, 4).sum()
    first, second = (torch.autograd.grad(total, (x, weight), retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))


def test_the_trial_accepts_the_kernel_and_no_planted_one(monkeypatch, tmp_path, caplog):
    kernels_of("logits")
    x = torch.zeros(3, 4)
    monkeypatch.setattr(trials, "SLOW", ())
    monkeypatch.setattr(trials, "_passed", {})
    monkeypatch.setattr(loss, "kind_of", lambda _: "accelerator")
    assert loss._has_kernel(x, 300)
    wrong = planted("logits", "total = rescale * total", "total = total", tmp_path)
    monkeypatch.setattr("meshwright.ops.kernels.logits.token_stats", wrong.token_stats)
    assert loss._has_kernel(x, 300), "the trial runs once for a kind of input"
    assert not loss._has_kernel(x, BLOCK + 300)
    assert "kernel logits is off by" in caplog.text
    assert not loss._has_kernel(x.double(), 300)
    assert not loss._has_kernel(x, 0)


def test_no_kernel_on_a_cpu():
    assert not loss._has_kernel(torch.zeros(3, 4), 300)
    assert not trials.agrees("any", None, torch.device("cpu"), lambda: ([], []), 1.0)


def test_a_plan_for_a_gpu_counts_no_wide_copies():
    """The formula widens up to 2^25 logits at a time; the kernel needs three numbers a token."""
    x, weight = torch.empty(9, 4, device="meta"), torch.empty(300, 4, device="meta")
    with meta_kernels.planned_for("cuda"):
        assert loss._has_kernel(x, 300)
        stats = token_stats(x.requires_grad_(), weight.requires_grad_(), torch.empty(9, device="meta").long())
        stats.sum().backward()
    assert stats.shape == (9, 3)
    assert (x.grad.shape, weight.grad.shape) == (x.shape, weight.shape)


@pytest.mark.parametrize(("tokens", "chunk"), [(9, 3533), (3533, 3533), (8192, 2731), (8192 * 4, 3277)])
def test_chunks_of_one_size(tokens, chunk):
    x, weight = torch.empty(tokens, 4, device="meta"), torch.empty(151936, 4, device="meta")
    with meta_kernels.planned_for("cuda"):
        assert loss._chunk(x, weight) == chunk
