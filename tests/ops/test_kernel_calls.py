"""Check what ops hand to their kernels and make of the results, with stand-ins for Triton that compute the formulas."""

import sys
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from meshwright.ops import Blocks, by_expert, delta, documents, fp8_matmul, loss, meta_kernels, planned_for, rows
from meshwright.ops import token_stats as stats_of
from meshwright.ops.documents import WHOLE
from tests.ops import references
from tests.ops.references import Part, compare, differentiate, evenly, in_parts, rand
from tests.ops.test_delta import inputs as delta_inputs
from tests.ops.test_loss import LABELS

experts = import_module("meshwright.ops.experts")  # the package has the function under this name
KERNELS = "meshwright.ops.kernels"


class DeltaKernels:
    """The kernels of the delta rule, by its formula. A stream is the positions of a part."""

    @staticmethod
    def stream_of(docs, parts, part):
        num = len(docs.positions_T) // parts
        return docs.positions_T[part * num : (part + 1) * num]

    @staticmethod
    def state_map(inputs, positions_T):
        try:
            delta._chunked(inputs, positions_T, Part(2, 0, None))
        except references._Brought as brought:
            return brought.rows[0]

    @staticmethod
    def from_state(inputs, positions_T, state):
        if state is None:
            return delta._chunked(inputs, positions_T, WHOLE)
        constant = torch.cat([state.new_zeros(*state.shape[:-1], state.shape[-2]), state], -1)
        return delta._chunked(inputs, positions_T, Part(2, 1, [constant[None]]))


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("lengths", [[12], [5, 1, 18], [3] * 4])
def test_parts_of_the_delta_rule_by_kernels(lengths, parts):
    """Each part begins with the state that the maps of the earlier ones leave."""
    lengths = evenly(lengths, parts)
    docs = documents(lengths, "cpu")
    compare(
        lambda *x: in_parts(lambda part, *x: delta._part_by(DeltaKernels, x, docs, part), parts, x),
        lambda *x: references.delta_rule(*x, docs.bounds),
        delta_inputs(sum(lengths), decay=0.3),
    )


@pytest.mark.parametrize("op", [delta._triton_delta_rule, delta._triton_delta_rule_in_parts])
def test_the_delta_rule_by_kernels(op, monkeypatch):
    """Compute a whole stream, and as the trial of parts computes it."""
    monkeypatch.setattr(delta, "_triton_module", lambda: DeltaKernels)
    docs = documents([5, 1, 12], "cpu")
    compare(
        lambda *x: op(*x, docs), lambda *x: references.delta_rule(*x, docs.bounds), delta_inputs(18, ratio=3, decay=0.3)
    )


def test_a_whole_stream_without_tokens_goes_to_no_kernel(monkeypatch):
    monkeypatch.setattr(delta, "_triton_module", None)
    assert delta._triton_delta_rule(*delta_inputs(0), documents([], "cpu")).shape == (0, 2, 2, 4)


def test_parts_of_a_plan_have_the_stand_ins_of_kernels():
    inputs = [x.detach().bfloat16().to("meta") for x in delta_inputs(4)]
    with planned_for("cuda"):
        assert delta._fastest_halves(inputs) is meta_kernels
        assert delta._fastest(inputs) is meta_kernels.delta_rule
    assert delta._fastest_halves(inputs) is None


def stats_by_formula(logits_TV, labels_T, kind):
    return loss._stats(logits_TV, labels_T, kind, into_probs=False)


def overwrite_by_formula(block_TV, stats_T3, d_T3, labels_T, kind):
    loss._overwrite_with_gradient(block_TV, stats_T3, d_T3, labels_T, kind, are_probs=False)


@pytest.fixture
def logits_kernel(monkeypatch):
    """Let the loss take a kernel that is the formula."""
    monkeypatch.setattr(loss, "_has_kernel", lambda *_: True)
    monkeypatch.setattr(loss, "_stats_by_kernel", stats_by_formula)
    monkeypatch.setattr(loss, "_overwrite_by_kernel", overwrite_by_formula)


@pytest.mark.parametrize(("entropy", "temperature"), [(True, 1.0), (False, 0.7)])
@pytest.mark.parametrize("chunk", [4, 1024])
def test_the_loss_by_a_kernel(entropy, temperature, chunk, logits_kernel):
    num = 2 + entropy
    compare(
        lambda x, w: stats_of(x, w, LABELS, chunk, entropy, temperature)[:, :num],
        lambda x, w: references.token_stats(x, w / temperature, LABELS)[:, :num],
        [rand(11, 4), rand(7, 4, seed=1)],
    )


def test_scores_of_candidates_go_to_no_kernel(logits_kernel, monkeypatch):
    monkeypatch.setattr(loss, "_stats_by_kernel", None)
    x, weight, ids = rand(11, 4), rand(7, 4, seed=1), (LABELS % 7)[:, None]
    stats = loss.candidate_stats(x, weight, LABELS, loss.Candidates(ids, 2.0, rest=True), True)
    assert torch.allclose(stats, references.candidate_stats(x, weight, LABELS, ids, 1.0, 2.0), rtol=1e-12)


WRONG_LOGITS = {
    "": None,
    "no temperature": ("_stats_by_kernel", lambda x, t, kind: stats_by_formula(x, t, kind._replace(temperature=1.0))),
    "no entropy": ("_stats_by_kernel", lambda x, t, kind: stats_by_formula(x, t, kind._replace(entropy=False))),
    "labels of others": ("_stats_by_kernel", lambda x, t, kind: stats_by_formula(x, t.clamp(0), kind)),
    "a label on the border": (
        "_stats_by_kernel", lambda x, t, kind: stats_by_formula(x, t.clamp(max=x.shape[1] - 1), kind),
    ),
    "gradients without entropy": (
        "_overwrite_by_kernel", lambda x, s, d, t, kind: overwrite_by_formula(x, s, d, t, kind._replace(entropy=False)),
    ),
    "gradients without labels": (
        "_overwrite_by_kernel", lambda x, s, d, t, kind: overwrite_by_formula(x, s, d, torch.full_like(t, -1), kind),
    ),
    "gradients without temperature": (
        "_overwrite_by_kernel",
        lambda x, s, d, t, kind: overwrite_by_formula(x, s, d, t, kind._replace(temperature=1.0)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG_LOGITS)
def test_the_trial_of_the_loss_sees(wrong, logits_kernel, monkeypatch):
    if WRONG_LOGITS[wrong] is not None:
        monkeypatch.setattr(loss, *WRONG_LOGITS[wrong])
    results, due = loss._compare_kernel(torch.zeros(1, 4), 9)
    assert len(results) == len(due) == 4
    assert all(map(torch.equal, results, due)) == (not wrong)


class Fp8Kernels:
    """The kernels that quantise, by their formulas."""

    @staticmethod
    def quantised_rows(rows_MK, num_padding):
        return fp8_matmul._rows_operand(rows_MK, num_padding, False)

    @staticmethod
    def quantised_matrix(weight_NK):
        return fp8_matmul._matrix_operand(weight_NK, False)

    @staticmethod
    def turned(codes):
        return codes.mT.contiguous()


def of_wrong_scales(codes_and_scales):
    return codes_and_scales[0], codes_and_scales[1].roll(1, 0)


WRONG_FP8 = {
    "": {},
    "no padding": {"quantised_rows": lambda x, _: Fp8Kernels.quantised_rows(x, 0)},
    "scales of neighbours": {"quantised_rows": lambda x, num: of_wrong_scales(Fp8Kernels.quantised_rows(x, num))},
    "scales of other blocks": {"quantised_matrix": lambda w: of_wrong_scales(Fp8Kernels.quantised_matrix(w))},
    "codes that are not turned": {"turned": lambda codes: codes.contiguous().view(codes.mT.shape)},
}


@pytest.mark.parametrize("wrong", WRONG_FP8)
def test_the_trial_of_quantising_sees(wrong, monkeypatch):
    module = type("Kernels", (Fp8Kernels,), {name: staticmethod(op) for name, op in WRONG_FP8[wrong].items()})
    monkeypatch.setitem(sys.modules, f"{KERNELS}.fp8_blocks", module)
    results, due = fp8_matmul._compare_quantised(torch.device("cpu"))
    same = [a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
            for a, b in zip(results, due, strict=True)]  # fmt: skip
    assert all(same) == (not wrong)


def test_codes_of_a_matrix_serve_its_product_and_that_of_its_transpose(monkeypatch):
    monkeypatch.setitem(sys.modules, f"{KERNELS}.fp8_blocks", Fp8Kernels)
    blocks = fp8_matmul.quantise(rand(256, 384, dtype=torch.float32, grad=False))
    for matrix in (blocks, blocks.mT, Blocks(blocks.codes.mT.contiguous(), blocks.scales.mT)):
        codes, scales = fp8_matmul._matrix_operand(matrix, one_kernel=True)
        assert codes.is_contiguous()
        assert torch.equal(codes.view(torch.uint8), matrix.codes)
        assert torch.equal(scales, matrix.scales)


def test_rows_of_a_token_are_summed_by_a_kernel(monkeypatch):
    """In forward those of its experts, in backward those of its copies."""
    given = []

    def sum_rows(y_ND, at_N, num):
        given.append(num)
        return rows._sum_rows(y_ND, at_N, num)

    expert, streams = torch.tensor([[3, 1], [0, 3], [2, 0]]), [rand(3, 4), rand(3, 2, seed=1)]

    def mixed(x, weight):
        made = by_expert(x, weight, expert, 5)
        return made.back(made.x_ND * made.weight_N[:, None])

    wanted = differentiate(mixed, streams)
    monkeypatch.setitem(sys.modules, f"{KERNELS}.row_sums", SimpleNamespace(sum_rows=sum_rows))
    monkeypatch.setattr(rows, "_has_kernel", lambda *_: True)
    assert all(map(torch.equal, differentiate(mixed, streams), wanted))
    assert given == [2, 2]


@pytest.mark.parametrize("order", ["as asked", "as they lie"])
def test_the_trial_of_sums_takes_rows_in_another_order(order, monkeypatch):
    def sum_rows(y_ND, at_N, num):
        return rows._sum_rows(y_ND, at_N if order == "as asked" else at_N.sort().values, num)

    monkeypatch.setitem(sys.modules, f"{KERNELS}.row_sums", SimpleNamespace(sum_rows=sum_rows))
    monkeypatch.setattr(rows, "kind_of", lambda _: "cuda")
    monkeypatch.setattr(rows, "agrees", lambda _kernel, _kind, _device, trial, _most: all(map(torch.equal, *trial())))
    assert rows._has_kernel(torch.zeros(4, 5), 3) == (order == "as asked")


@pytest.mark.parametrize("unused", ["zeros", "as they were"])
def test_the_trial_of_zeros_has_experts_whose_memory_is_no_number(unused, monkeypatch):
    zero = (
        (lambda d, counts: d.masked_fill_((counts == 0)[:, None, None], 0.0)) if unused == "zeros" else lambda d, _: d
    )
    monkeypatch.setitem(sys.modules, f"{KERNELS}.unused_experts", SimpleNamespace(zero_unused=zero))
    shapes = []

    def agrees(_, kind, device, trial, most):
        (result,), (due,) = trial()
        shapes.append(result[0].numel() % 16 > 0)
        return torch.equal(result, due)

    monkeypatch.setattr(experts, "agrees", agrees)
    for width in (16, 17):
        assert experts._has_kernel(torch.zeros(2, 1, width)) == (unused == "zeros")
    assert shapes == [False, True]


def test_late_gradients_of_looped_experts_without_rows_are_zeros(monkeypatch):
    monkeypatch.setattr(torch, "empty_like", lambda x: torch.full_like(x, torch.nan))
    x, d, weight = torch.ones(3, 4), torch.ones(3, 2), torch.zeros(3, 2, 4)
    grads = experts._weight_gradients(x, d, weight, [2, 0, 1])
    assert grads[:, 0, 0].tolist() == [2.0, 0.0, 1.0]
