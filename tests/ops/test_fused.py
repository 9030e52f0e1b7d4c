"""A formula in one kernel is used where it agrees with the formula as it is written, and nowhere else."""

import logging
import os
from unittest.mock import patch

import pytest
import torch
from torch._inductor import config as inductor
from torch._inductor import cpu_vec_isa

from meshwright.log import logger
from meshwright.ops import causal_conv, delta, documents, gated_rms_norm, norms, rms_norm, rope, rotate, swiglu
from meshwright.ops import fused as module
from meshwright.ops.fused import fused
from tests import parts, worlds
from tests.ops.references import assert_same, rand

BF16 = torch.bfloat16


def third(x, by):
    return x / by, x.float().sum(-1)


@pytest.fixture
def compiles(monkeypatch):
    """A CPU counts as a device with kernels. How often something was compiled, and by what; `with_` says another."""
    monkeypatch.setattr(module, "SLOW", ("meta",))

    class Compiler:
        calls = 0
        kernel = staticmethod(lambda formula: formula)

        def __call__(self, formula):
            def compiled(*args):
                return self.kernel(formula)(*args)

            self.calls += 1
            return compiled

    compiler = Compiler()
    monkeypatch.setattr(module, "_compiled", compiler)
    return compiler


def test_once_for_any_number_of_rows(compiles):
    op = fused(third)
    for num in (5, 7, 2, 5):
        x = rand(num, 3).to(BF16)
        for result, expected in zip(op(x, 3.0), third(x, 3.0), strict=True):
            assert torch.equal(result, expected)
    assert compiles.calls == 1
    op(rand(5, 4).to(BF16), 3.0)
    op(rand(5, 3).to(BF16), 2.0)
    assert compiles.calls == 3, "another width, and another number, are of another kind"


@pytest.mark.parametrize("x", [rand(5, 3).float(), rand(5, 3), rand(1, 3).to(BF16), rand(0, 3).to(BF16)])
def test_wide_numbers_and_single_rows_take_the_formula(x, compiles):
    fused(third)(x, 3.0)
    assert not compiles.calls


def test_nothing_is_compiled_on_a_cpu(monkeypatch):
    monkeypatch.setattr(module, "_compiled", None)
    fused(third)(rand(5, 3).to(BF16), 3.0)


def slightly_off(formula):
    return lambda *args: tuple(1.02 * part for part in formula(*args))


def nowhere(formula):
    return lambda *args: 1 / 0


def not_finite(formula):
    def kernel(*args):
        first, second = formula(*args)
        return first, second.index_fill(0, torch.tensor(1), float("inf"))

    return kernel


@pytest.mark.parametrize(
    ("kernel", "message"), [(slightly_off, "off by 2."), (nowhere, "division by zero"), (not_finite, "off by inf")]
)
def test_another_answer_is_not_used(kernel, message, compiles, caplog, monkeypatch):
    monkeypatch.setattr(logger, "propagate", True)
    compiles.kernel, op, x = kernel, fused(third), rand(5, 3).to(BF16)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert torch.equal(op(x, 3.0)[0], x / 3.0)
    assert len(caplog.records) == 1
    assert message in caplog.text
    assert "third" in caplog.text


def test_what_fails_later_is_not_used_from_then_on(compiles, caplog, monkeypatch):
    monkeypatch.setattr(logger, "propagate", True)
    calls, op, x = [], fused(third), rand(5, 3).to(BF16)

    def kernel(*args):
        calls.append(args)
        return third(*args) if len(calls) < 3 else 1 / 0  # the first two are the trial

    compiles.kernel = lambda _: kernel
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert torch.equal(op(x, 3.0)[0], x / 3.0)
    assert len(caplog.records) == 1


def test_a_trial_takes_a_few_rows(compiles, monkeypatch):
    rows = []
    monkeypatch.setattr(module, "_TRIAL_ROWS", 4)
    compiles.kernel = lambda formula: lambda *args: rows.append(len(args[0])) or formula(*args)
    fused(third)(rand(9, 3).to(BF16), 3.0)
    assert rows == [9, 4, 9]


@pytest.mark.parametrize("other", [float("-inf"), float("nan"), 1.0])
def test_what_is_not_finite_hides_nothing(other):
    expected = torch.tensor([1.0, float("inf"), 3.0])
    assert module._distance(expected, expected) == 0
    assert module._distance(expected.index_fill(0, torch.tensor(1), other), expected) == float("inf")
    assert module._distance(expected + torch.tensor([1.0, 0, 0]), expected) > 0.3


def test_what_both_have_for_nan_is_no_fault(compiles, caplog, monkeypatch):
    monkeypatch.setattr(logger, "propagate", True)
    x = torch.tensor([[1.0, float("nan")], [float("inf"), 2.0]]).to(BF16)
    fused(third)(x, 3.0)
    assert not caplog.records


def ours(x, weight, cos, sin):
    y = rms_norm(x, weight, 1e-6)
    return swiglu(rotate(rms_norm(y, weight, 1e-6, zero_centred=True), cos, sin))


def of_delta_nets(x, weight, cos, sin):
    docs = documents([2, len(x) - 2], x.device)
    taps = torch.cat([cos, sin], dim=-1).flatten()[: 4 * x[0].numel()].view(-1, 4)
    y = causal_conv(x.flatten(1), taps, docs).view(x.shape)
    return gated_rms_norm(y, x, weight.to(torch.promote_types(weight.dtype, torch.float32)), 1e-6)


def of_experts(x, weight, *_):
    return swiglu(x.flatten(1), (x * weight).mean((1, 2)).to(torch.promote_types(x.dtype, torch.float32)))


@pytest.mark.slow
def test_norms_gates_and_rotations(tmp_path):
    """Compiled in earnest, by a rank of its own: torch writes into its environment. Nor does it share what others
    compile at the same time. All kernels take half a minute, and twice that while other tests run: `make matrix`."""
    worlds.run(1, compiled_on_a_cpu, str(tmp_path), ALL if parts.ALL else (of_experts,), seconds=240)


def compiled_on_a_cpu(cache, functions):
    """Compile without vectors: g++ would take longer to find out which kinds the CPU has than for the kernels."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    options = {"compile_threads": 1, "cpp_cache_precompile_headers": False}
    no_vectors = patch.object(cpu_vec_isa, "valid_vec_isa_list", list)
    with patch.object(module, "SLOW", ("meta",)), inductor.patch(options), no_vectors:
        compiled_on("cpu", functions)


@pytest.mark.gpu
def test_norms_gates_and_rotations_on_an_accelerator():
    compiled_on(torch.accelerator.current_accelerator(), ALL)


ALL = (ours, of_delta_nets, of_experts)


def compiled_on(device, functions):
    """Compare outputs and gradients of several lengths with float64, which is never compiled."""
    seen, chosen = [], module._chosen
    refused = patch.object(module.logger, "warning", lambda message, *args: pytest.fail(message % args))
    with refused, patch.object(module, "_chosen", lambda *args: seen.append(chosen(*args)) or seen[-1]):
        for num in (67, 13, 130):
            inputs = [rand(num, 3, 64), 1 + rand(64, seed=1) / 8, rand(num, 32, seed=2), rand(num, 32, seed=3)]
            for function in functions:
                result = differentiated(function, inputs, device, BF16)
                assert_same(result, differentiated(function, inputs, "cpu", torch.float64), 3e-2)
    formulas = {
        each.__wrapped__ for of in (norms, rope, delta) for each in vars(of).values() if hasattr(each, "__wrapped__")
    }
    assert not formulas & {*seen}, "each agreed"
    if functions == ALL:
        assert len(seen) == 13, "both kinds of norms, and of their gradients, among them"
    else:
        assert len(seen) == 2, "a gate with weights, and its gradient"


def differentiated(function, inputs, device, dtype):
    x, weight, *tables = (x.detach().to(device, dtype) for x in inputs)
    x.requires_grad_(), weight.requires_grad_()
    y = function(x, weight, *tables)
    y.backward(rand(*y.shape, seed=9).to(device, dtype))
    return [each.detach().cpu() for each in (y, x.grad, weight.grad)]


def test_a_kernel_serves_only_what_it_was_tried_with(compiles):
    op, x = fused(third), rand(5, 3).to(BF16)
    op(x, 3.0)
    with torch.inference_mode():
        op(x, 3.0)
    assert compiles.calls == 2, "torch specialises on it"
    op(rand(3, 5).to(BF16).T, 3.0)
    assert compiles.calls == 3, "other strides"
    op(rand(5, 3).half(), 3.0)
    assert compiles.calls == 4, "another dtype"


def scaled(x, weight):
    return x * (weight[:, None] if len(weight) != x.shape[1] else weight)


@pytest.mark.parametrize(
    ("width", "num_weights", "of_trial"), [(9, 9, 9), (3, 9, 4), (3, 3, 3)], ids=["square", "by row", "by column"]
)
def test_a_trial_cuts_the_arguments_with_a_row_each(compiles, monkeypatch, width, num_weights, of_trial):
    """A weight for each column may be as long as there are rows."""
    sizes = []
    monkeypatch.setattr(module, "_TRIAL_ROWS", 4)
    compiles.kernel = lambda formula: lambda *args: sizes.append([len(each) for each in args]) or formula(*args)
    fused(scaled)(rand(9, width).to(BF16), rand(num_weights).to(BF16))
    assert sizes == [[9, num_weights], [4, of_trial], [9, num_weights]]
