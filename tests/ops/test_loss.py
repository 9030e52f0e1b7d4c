import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.ops import (
    Candidates,
    candidate_stats,
    combine_candidate_stats,
    combine_stats,
    combine_top_k,
    loss,
    matmul,
    meta_kernels,
    token_stats,
    top_k,
)
from tests.ops import references
from tests.ops.references import assert_same, compare, differentiate, quick, rand, smoke

LABELS = torch.tensor([0, 6, -100, 7, 3, -1, 3, 99, 2, 5, 1])  # of a vocabulary of 7, some outside
# Candidates of each token: one twice, the label of most, none of the slice.
IDS = torch.stack([torch.arange(11) % 7, LABELS, torch.arange(11) % 7, torch.tensor(-1).expand(11)], 1)


@quick
@given(st.integers(0, 11), st.sampled_from([1, 3, 4, 1024]))
def test_against_reference(num_tokens, chunk):
    x, weight, labels = rand(num_tokens, 4), rand(7, 4, seed=1), LABELS[:num_tokens]
    if num_tokens:
        compare(
            lambda x, w: token_stats(x, w, labels, chunk),
            lambda x, w: references.token_stats(x, w, labels),
            [x, weight],
        )
    token_stats(x, weight, labels, chunk).sum().backward()
    assert x.grad.shape == x.shape
    assert weight.grad.shape == weight.shape
    assert num_tokens or not weight.grad.any()


@pytest.mark.parametrize(("vocab_size", "tokens"), [(151936, 3533), (151936 // 8, 28268), (1 << 21, 1024)])
def test_a_gpu_holds_half_a_billion_logits_at_once(vocab_size, tokens):
    x, weight = (torch.empty(rows, 4, device="meta") for rows in (9, vocab_size))
    assert loss._chunk(x, weight) == 1024
    with meta_kernels.planned_for("cuda"):
        assert loss._chunk(x, weight) == tokens


@pytest.mark.parametrize("entropy", [True, False])
def test_gradcheck(entropy):
    inputs, num = (rand(11, 4), rand(7, 4, seed=1)), 2 + entropy  # the largest logit has no gradient
    assert torch.autograd.gradcheck(lambda x, w: token_stats(x, w, LABELS, 4, entropy)[:, :num], inputs)


def test_without_entropy_the_third_is_the_largest_logit_and_its_gradient_ignored():
    x, weight = rand(11, 4), rand(7, 4, seed=1)
    full, part = token_stats(x, weight, LABELS), token_stats(x, weight, LABELS, entropy=False)
    assert torch.equal(full[:, :2], part[:, :2])
    assert torch.equal(part[:, 2], (x @ weight.T).amax(1))
    d = rand(11, 3, seed=2, grad=False)
    got = torch.autograd.grad(part, (x, weight), d)
    want = torch.autograd.grad(full, (x, weight), d * torch.tensor([1.0, 1.0, 0.0]))
    assert_same(got, want)


@pytest.mark.parametrize(("entropy", "temperature"), [(True, 0.6), (False, 0.6), (True, 2.0)])
def test_logits_over_a_temperature(entropy, temperature):
    """Stats and gradients are those of a weight divided by it; the kept probabilities of the last chunk too."""
    pair, num = [rand(11, 4), rand(7, 4, seed=1)], 2 + entropy
    compare(
        lambda x, w: token_stats(x, w, LABELS, 4, entropy, temperature)[:, :num],
        lambda x, w: references.token_stats(x, w / temperature, LABELS)[:, :num],
        pair,
    )
    largest = token_stats(*pair, LABELS, 4, False, temperature)[:, 2]
    assert torch.equal(largest, (pair[0] @ pair[1].T / temperature).amax(1))


@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize(("temperature", "own"), [(1.0, 1.0), (1.0, 2.0), (0.7, 0.7), (2.0, 0.5)])
def test_candidates(monkeypatch, entropy, temperature, own):
    """In chunks of 4 tokens, with 2 rows widened at a time."""
    monkeypatch.setattr(loss, "CHUNK", 4)
    monkeypatch.setattr(loss, "_WIDENED_ON_CPU", 14)
    columns = [n for n in range(9) if entropy or n != 2]
    compare(
        lambda x, w: candidate_stats(x, w, LABELS, Candidates(IDS, own, rest=True), entropy, temperature)[:, columns],
        lambda x, w: references.candidate_stats(x, w, LABELS, IDS, temperature, own)[:, columns],
        [rand(11, 4), rand(7, 4, seed=1)],
    )
    without = candidate_stats(rand(11, 4), rand(7, 4, seed=1), LABELS, Candidates(IDS, own), False, temperature)
    assert torch.allclose(without[:, 2], (rand(11, 4) @ rand(7, 4, seed=1).T / temperature).amax(1), rtol=1e-12)
    assert without.shape[1] == 8


@pytest.mark.parametrize("cuts", [[7], [3, 4], [1, 5, 1]])
def test_candidates_of_slices(monkeypatch, cuts):
    """A slice may have no entry that is no candidate."""
    monkeypatch.setattr(loss, "CHUNK", 4)
    starts, labels = [sum(cuts[:i]) for i in range(len(cuts))], LABELS % 7

    def ours(x, weight):
        parts = zip(weight.split(cuts), starts, strict=True)
        stats = [
            candidate_stats(x, part, labels - start, Candidates(IDS - start, 2.0, rest=True)) for part, start in parts
        ]
        logprobs, _, of_candidates, rest = combine_candidate_stats(torch.stack(stats), 4)
        return torch.cat([logprobs[:, None], of_candidates.masked_fill((IDS < 0) | (IDS > 6), 0.0), rest], 1)

    def reference(x, weight):
        all_logs = (x @ weight.T / 2.0).log_softmax(-1)
        logs = all_logs.gather(1, IDS.clamp(0, 6)).masked_fill((IDS < 0) | (IDS > 6), 0.0)
        logprobs = (x @ weight.T).log_softmax(-1).gather(1, labels[:, None])
        is_given = (IDS[:, :, None] == torch.arange(7)).any(1)
        return torch.cat([logprobs, logs, all_logs.masked_fill(is_given, -torch.inf).logsumexp(-1, keepdim=True)], 1)

    compare(ours, reference, [rand(11, 4), rand(7, 4, seed=1)])


@pytest.mark.parametrize("cuts", [[7], [3, 4], [1, 5, 1]])
@pytest.mark.parametrize("distance", [21.0, 60.0])
def test_the_rest_of_a_sure_model(distance, cuts):
    """The candidates have all but 1e-9, or 1e-26, in float32. Value and gradient are those of float64."""
    ids, starts = torch.tensor([[0, 3]]).repeat(9, 1), [sum(cuts[:i]) for i in range(len(cuts))]
    weight = torch.cat([rand(7, 4, seed=1, grad=False), -distance / 2 * torch.ones(7, 1)], 1)
    weight[[0, 3], 4] *= -1
    x = torch.cat([rand(9, 4, grad=False), torch.ones(9, 1)], 1)

    def differentiated(dtype):
        inputs = [each.to(dtype).requires_grad_() for each in (x, weight)]
        parts = zip(inputs[1].split(cuts), starts, strict=True)
        stats = [
            candidate_stats(inputs[0], part, ids[:, 0] - at, Candidates(ids - at, rest=True)) for part, at in parts
        ]
        rest = combine_candidate_stats(torch.stack(stats), 2)[3]
        return [rest, *torch.autograd.grad(rest.sum(), inputs)]

    for got, right in zip(differentiated(torch.float32), differentiated(torch.float64), strict=True):
        assert (got.double() - right).norm() <= 3e-6 * right.norm()


def test_no_rest_is_finite():
    """Value and gradients, where all seven entries are candidates."""
    inputs = [rand(3, 4), rand(7, 4, seed=1)]
    stats = candidate_stats(*inputs, torch.tensor([0, 1, 2]), Candidates(torch.arange(7).repeat(3, 1), rest=True))
    rest = combine_candidate_stats(stats[None], 7)[3]
    assert (rest < -1e300).all()
    assert all(each.isfinite().all() for each in (rest, *torch.autograd.grad(rest.sum(), inputs)))


@pytest.mark.parametrize("cuts", [[7], [3, 4], [1, 5, 1]])
def test_top_k_of_slices(monkeypatch, cuts):
    """A slice may have fewer entries than are asked for."""
    monkeypatch.setattr(loss, "CHUNK", 4)
    x, weight = rand(11, 4, grad=False), rand(7, 4, seed=1, grad=False)
    stats = torch.stack([top_k(x, part, 4, 0.7) for part in weight.split(cuts)])
    for number, start in enumerate(sum(cuts[:i]) for i in range(len(cuts))):
        stats[number, :, 5:] += start
    logprobs, ids = combine_top_k(stats)
    best = (x @ weight.T / 0.7).log_softmax(-1).topk(4, -1)
    assert torch.equal(ids.long(), best.indices)
    assert torch.allclose(logprobs, best.values, rtol=1e-12)


@pytest.mark.parametrize("own", [1.0, 2.0])
def test_gradients_of_candidates_are_rounded_once(monkeypatch, own):
    monkeypatch.setattr(matmul, "_cpu_has_bf16", lambda: True)

    def ours(x, w):
        stats = candidate_stats(x, w, LABELS % 7, Candidates(IDS % 7, own, rest=True))
        logprobs, _, given, rest = combine_candidate_stats(stats[None], 4)
        return logprobs.double() + given.double().square().sum(-1) + rest[:, 0]

    inputs = [rand(11, 4, grad=False).bfloat16().requires_grad_(), rand(7, 4, seed=1, grad=False).requires_grad_()]
    made = differentiate(ours, inputs)
    exact = differentiate(ours, [each.detach().bfloat16().double().requires_grad_() for each in inputs])
    for got, wanted in zip(made, exact, strict=True):
        assert (got.double() - wanted).norm() <= 1e-2 * wanted.norm()


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_side_gets_no_gradient(frozen):
    pair = [rand(11, 4), rand(7, 4, seed=1)]
    pair[frozen].requires_grad_(False)
    token_stats(*pair, LABELS, 4).sum().backward()
    assert pair[frozen].grad is None
    assert pair[1 - frozen].grad is not None


def slices(x, weight, labels, cuts, chunk=4):
    starts = [sum(cuts[:i]) for i in range(len(cuts))]
    parts = zip(weight.split(cuts), starts, strict=True)
    return torch.stack([token_stats(x, part, labels - start, chunk) for part, start in parts])


@quick
@given(st.sampled_from([[7], [3, 4], [1, 5, 1], [1] * 7]))
def test_slices_of_the_vocabulary_make_log_softmax(cuts):
    labels = torch.tensor([0, 6, 1, 5, 3, 2, 3, 0, 2, 5, 1])

    def ours(x, weight):
        return torch.stack(combine_stats(slices(x, weight, labels, cuts)))

    def reference(x, weight):
        logp = (x @ weight.T).log_softmax(-1)
        return torch.stack([logp.gather(1, labels[:, None])[:, 0], -(logp.exp() * logp).sum(-1)])

    compare(ours, reference, [rand(11, 4), rand(7, 4, seed=1)])


def test_a_label_in_no_slice_counts_as_zero_logit():
    x, weight = rand(11, 4), rand(7, 4, seed=1)
    logprobs, _ = combine_stats(slices(x, weight, torch.full((11,), -100), [3, 4]))
    assert torch.allclose(logprobs, -(x @ weight.T).logsumexp(-1))


def test_logits_that_are_all_large_lose_few_digits():
    """All near 1000, where a float32 has four digits behind the point: what they have in common must not be summed."""
    x, weight = rand(16, 64, grad=False), 0.3 * rand(500, 64, seed=1, grad=False)
    x[:, 0] = weight[:, 0] = 1000**0.5
    labels = torch.arange(16)

    def entropy(dtype):
        inputs = [t.to(dtype).requires_grad_() for t in (x, weight)]
        return differentiate(lambda *both: combine_stats(token_stats(*both, labels)[None])[1], inputs)

    for result, exact in zip(entropy(torch.float32), entropy(torch.float64), strict=True):
        assert (result.double() - exact).norm() <= 7e-4 * exact.norm()


def test_large_logits_are_finite():
    x, weight, labels = rand(11, 4, dtype=torch.float32), rand(7, 4, seed=1, dtype=torch.float32), LABELS.clamp(0, 6)
    logprobs, entropy = combine_stats(slices(x * 1e4, weight, labels, [3, 4]))
    (logprobs.sum() + entropy.sum()).backward()
    assert all(torch.isfinite(t).all() for t in (logprobs, entropy, x.grad, weight.grad))


@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize(
    ("dtype", "of_weight", "tolerance"),
    [
        (torch.float64, torch.float64, 1e-12),
        (torch.float64, torch.float32, 1e-6),  # cast for the product
        (torch.bfloat16, torch.float64, 2e-2),
    ],
)
def test_parts_of_rows_and_vocabulary_change_nothing(monkeypatch, entropy, dtype, of_weight, tolerance):
    """A large vocabulary widens few rows at once, and casts few of its own."""
    inputs, chunk = [rand(11, 4, dtype=dtype), rand(7, 4, seed=1, dtype=of_weight)], 5
    whole = differentiate(lambda x, w: token_stats(x, w, LABELS, chunk, entropy), inputs)
    for on in ("", "_ON_CPU"):
        monkeypatch.setattr(loss, f"_WIDENED{on}", 14)  # two rows
        monkeypatch.setattr(loss, f"_CAST_ROWS{on}", 3)
    parts = differentiate(lambda x, w: token_stats(x, w, LABELS, chunk, entropy), inputs)
    assert_same(parts, whole, tolerance)
    assert of_weight == dtype or len(loss._vocab_slices(inputs[1], inputs[0])) == 3, "the weight is cast in parts"


def test_float32_is_summed_in_float32_over_chunks():
    """256 chunks of gradient 1 each: a bf16 sum would stop at 256 ulps and lose the rest."""
    x = torch.ones(1024, 1, dtype=torch.bfloat16)
    weight = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    token_stats(x, weight, torch.zeros(1024, dtype=torch.int64), chunk=1)[:, 1].sum().backward()
    assert weight.grad.item() == 1024


@pytest.mark.parametrize("chunk", [1, 1024])  # its logits made again, and its shares kept
def test_a_sure_token_keeps_its_small_gradient_in_bfloat16(monkeypatch, chunk):
    """Its share is 0.999, which bf16 rounds to 1: the gradient of its label must not be made of that."""
    monkeypatch.setattr(matmul, "_cpu_has_bf16", lambda: True)  # logits in bf16, whatever machine tests run on
    x, weight, labels = torch.full((2, 1), 6.9), torch.tensor([[1.0], [0.0], [-1.0]]), torch.tensor([0, 0])

    def ours(x, weight):
        return -combine_stats(token_stats(x, weight, labels, chunk, entropy=False)[None])[0]

    result = differentiate(ours, [x.bfloat16().requires_grad_(), weight.requires_grad_()])
    exact = differentiate(ours, [x.bfloat16().double().requires_grad_(), weight.detach().double().requires_grad_()])
    for ours_local, wanted in zip(result, exact, strict=True):
        assert torch.allclose(ours_local.double(), wanted, rtol=2e-2, atol=0)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)])
def test_smoke(dtype, tolerance):
    assert token_stats(rand(11, 8, dtype=dtype), rand(7, 8, dtype=dtype), LABELS).dtype == torch.float32
    smoke(lambda x, w: token_stats(x, w, LABELS, 4).to(dtype), [rand(11, 8), rand(7, 8, seed=1)], dtype, tolerance)


def test_gradients_of_stats_are_divided_by_the_temperature_of_their_logits():
    d = torch.tensor([[6.0, 12.0, 18.0, 24.0, 30.0]])
    assert loss._over_temperatures(d, 1.0, 1.0) is d
    assert loss._over_temperatures(d, 2.0, 1.0).tolist() == [[3, 6, 9, 24, 30]]
    assert loss._over_temperatures(d, 1.0, 3.0).tolist() == [[6, 12, 18, 8, 10]]
    assert loss._over_temperatures(d, 2.0, 2.0).tolist() == [[3, 6, 9, 12, 15]]


def test_a_label_is_likeliest_if_no_slice_has_a_larger_logit():
    """Logits of two slices: the label's is the largest, is tied, is beaten in its own and in the other slice."""
    targets = [[3.0, 3.0, 2.0, 2.0, 0.0, -1.0], [0.0, 0.0, 0.0, 0.0, 4.0, 0.0]]
    largest = [[3.0, 3.0, 3.0, 2.0, 1.0, -1.0], [1.0, 3.0, 1.0, 5.0, 4.0, -2.0]]
    stats = torch.stack([torch.full((2, 6), 9.0), torch.tensor(targets), torch.tensor(largest)], -1).requires_grad_()
    result = loss.is_likeliest(stats)
    assert result.tolist() == [True, True, False, False, True, True]


def test_rows_that_are_cast_at_a_time_depend_on_the_device(monkeypatch):
    monkeypatch.setattr(loss, "_CAST_ROWS_ON_CPU", 3)
    monkeypatch.setattr(loss, "_CAST_ROWS", 5)
    x, weight = torch.empty(2, 4, dtype=torch.bfloat16, device="meta"), torch.empty(7, 4, device="meta")
    assert loss._vocab_slices(weight, x) == [slice(0, 3), slice(3, 6), slice(6, 9)]
    with meta_kernels.planned_for("cuda"):
        assert loss._vocab_slices(weight, x) == [slice(0, 5), slice(5, 10)]
        assert loss._vocab_slices(weight.to(x.dtype), x) == [slice(0, 7)]
        assert loss._vocab_slices(weight, x.float()) == [slice(0, 7)]


@pytest.mark.parametrize("add", [False, True])
def test_a_narrow_product_is_written_to_a_wide_gradient_or_added(add, monkeypatch):
    calls = []
    monkeypatch.setattr(torch, "addmm", lambda *args, **kwargs: calls.append((*args, kwargs)))
    dw, d, x = torch.ones(3, 2), torch.ones(5, 3, dtype=torch.bfloat16), torch.ones(5, 2, dtype=torch.bfloat16)
    loss._add_product(dw, d, x, add)
    ((base, left, right, options),) = calls
    assert (base is dw, left.shape, right is x) == (True, (3, 5), True)
    assert options["out"] is dw
    assert (options["out_dtype"], options["beta"]) == (torch.float32, int(add))
    loss._add_product(dw.to("meta"), d.to("meta"), x.to("meta"), add)
    assert len(calls) == 1


@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("candidates", [None, Candidates(IDS, 2.0, rest=True)])
def test_a_second_backward_has_the_gradients_of_the_first(entropy, candidates):
    """Backward overwrites the logits that forward leaves in memory."""
    inputs = rand(11, 4), rand(7, 4, seed=1)
    if candidates is None:
        total = token_stats(*inputs, LABELS, 4, entropy)[:, :2].square().sum()
    else:
        total = candidate_stats(*inputs, LABELS, candidates, entropy)[:, :2].square().sum()
    first, second = (torch.autograd.grad(total, inputs, retain_graph=True) for _ in range(2))
    assert_same(second, first, 1e-12)


def test_gradients_of_the_input_are_summed_over_the_vocabulary_in_float32(monkeypatch):
    """512 slices add 1 / 512 each: a bf16 sum would stop at one half."""
    monkeypatch.setattr(matmul, "_cpu_has_bf16", lambda: True)
    monkeypatch.setattr(loss, "_CAST_ROWS_ON_CPU", 1)
    x = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    token_stats(x, torch.ones(512, 1), torch.zeros(2, dtype=torch.int64))[:, 0].sum().backward()
    assert x.grad.tolist() == [[1.0], [1.0]]
