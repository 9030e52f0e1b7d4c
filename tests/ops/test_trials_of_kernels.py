"""A kernel is tried once for each kind of input that it is compiled for, and never for inputs that it does not take."""

from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from meshwright.ops import chosen_blocks, loss, rows
from meshwright.ops.kernels import trials
from meshwright.optim import AdamW, adamw

experts = import_module("meshwright.ops.experts")  # the package has the function under this name
HALF = torch.bfloat16


def zeros(*shape, dtype=HALF):
    return torch.zeros(shape, dtype=dtype)


def of_blocks(q=(3, 4, 8), k=(3, 2, 8), size=4, dtype=HALF):
    choice = SimpleNamespace(blocks=SimpleNamespace(size=size))
    return chosen_blocks._has_kernel(zeros(*q, dtype=dtype), zeros(*k, dtype=dtype), choice)


def of_logits(size=7, dtype=HALF):
    return loss._has_kernel(zeros(3, 4, dtype=dtype), size)


def of_wide_sums(d=(3, 32), dw=(32, 64), dtype=HALF, wide=torch.float32):
    return loss._accumulates_wide(zeros(*d, dtype=dtype), zeros(*dw, dtype=wide))


def of_rows(width=8, num=3, dtype=HALF):
    return rows._has_kernel(zeros(6, width, dtype=dtype), num)


def of_products(out=48, width=80, dtype=HALF):
    return experts._has_product(zeros(3, width, dtype=dtype), zeros(5, out, width, dtype=dtype))


def of_zeros(shape=(5, 4, 8), dtype=HALF):
    return experts._has_kernel(zeros(*shape, dtype=dtype))


def of_adamw(grad=HALF, param=torch.float32, state=None, options=AdamW):
    return options(state_dtype=state).fuses(zeros(16, dtype=param), zeros(16, dtype=grad))


class Other(AdamW):
    """An AdamW with an update of its own."""

    def update(self, slices, *, lr, step, decays):
        raise NotImplementedError


class Textbook(AdamW):
    """An AdamW with a formula of its own."""

    def plain_update(self, *given, **options):
        raise NotImplementedError


# Per gate: inputs that need a trial of their own, one by one, and inputs for which no kernel exists.
GATES = {
    of_blocks: (
        [
            dict(dtype=torch.float16), dict(q=(3, 8, 8)), dict(k=(3, 1, 8)), dict(size=2),
            dict(q=(3, 4, 16), k=(3, 2, 16)),
        ],
        [dict(dtype=torch.float32)],
    ),
    of_logits: (
        [dict(dtype=torch.float16), dict(dtype=torch.float32), dict(size=8)],
        [dict(dtype=torch.float64), dict(size=0)],
    ),
    of_wide_sums: (
        [dict(dtype=torch.float16), dict(dw=(33, 64)), dict(dw=(32, 65))],
        [dict(dtype=torch.float32), dict(wide=torch.float64)],
    ),
    of_rows: ([dict(dtype=torch.float16), dict(width=9), dict(num=4)], [dict(dtype=torch.float64)]),
    of_products: ([dict(dtype=torch.float16), dict(out=64), dict(width=64)], [dict(dtype=torch.float32)]),
    of_zeros: ([dict(dtype=torch.float32), dict(shape=(5, 3, 7))], []),
    of_adamw: (
        [dict(grad=torch.float32), dict(state=HALF)],
        [
            dict(param=torch.float64), dict(param=HALF), dict(grad=torch.float16), dict(options=Other),
            dict(options=Textbook),
        ],
    ),
}  # fmt: skip


@pytest.fixture
def tried(monkeypatch):
    """Let the CPU stand for an accelerator, and return the kinds that are tried."""
    kinds = []

    def agrees(kernel, kind, device, trial, most):
        kinds.append((kernel, kind, most))
        return True

    for module in (chosen_blocks, loss, rows, experts, adamw):
        monkeypatch.setattr(module, "agrees", agrees)
        if hasattr(module, "kind_of"):
            monkeypatch.setattr(module, "kind_of", lambda _: "cuda")
    monkeypatch.setattr(adamw, "SLOW", ())
    return kinds


@pytest.mark.parametrize("gate", GATES)
def test_each_kind_of_input_is_tried(gate, tried):
    others, _ = GATES[gate]
    assert all(gate(**options) for options in ({}, *others, {}))
    kinds = [kind for _, kind, _ in tried]
    assert kinds[0] == kinds[-1]
    assert len(set(kinds)) == 1 + len(others)


@pytest.mark.parametrize("gate", GATES)
def test_inputs_that_no_kernel_takes_are_not_tried(gate, tried):
    assert not any(gate(**options) for options in GATES[gate][1])
    assert not tried


@pytest.mark.parametrize(("gate", "dtype"), [(of_rows, "dtype"), (of_logits, "dtype"), (of_adamw, "grad")])
def test_the_wider_the_dtype_the_less_a_kernel_may_be_off(gate, dtype, tried):
    state = {"state": HALF} if gate is of_adamw else {}
    gate(**{dtype: torch.float32})
    gate(**{dtype: HALF} | state)
    (_, _, of_float32), (_, _, of_bfloat16) = tried
    assert of_float32 <= 1e-5 < of_bfloat16 < 5e-3


@pytest.mark.parametrize("size", [1, 48, 256, 257, 384, 385, 1000])
def test_widths_share_the_trial_of_a_product_where_its_kernel_is_the_same(size, tried):
    """A tile covers at most 128 of them, and the kernel is compiled for whether 16 divides the width."""
    of_products(out=size)
    (_, (_, out, _), _) = tried[0]
    assert (out % 128, out > 128) == (size % 128, size > 128)
    assert out == size if size <= 256 else 128 < out <= 256


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("result", "expected", "distance"),
    [
        ([1.0, NAN], [1.0, NAN], 0.0), ([3.0, 4.5], [3.0, 4.0], 0.1), ([1.0, INF], [1.0, -INF], INF),
        ([1.0, NAN], [1.0, INF], INF), ([1.0, 2.0], [1.0, NAN], INF), ([1.0, NAN], [1.0, 2.0], INF),
        ([1.0], [1.0, 1.0], INF), ([2.0, INF], [1.0, INF], 1.0),
    ],
)  # fmt: skip
def test_how_far_a_result_is_off(result, expected, distance):
    assert trials.distance(torch.tensor(result), torch.tensor(expected)) == pytest.approx(distance)


def test_equal_bits_are_more_than_equal_numbers():
    zero = torch.zeros(2)
    assert trials.distance(zero, zero.clone()) == 0.0
    assert 0.0 < trials.distance(zero, -zero) < 1e-300
    assert trials.distance(zero, zero.double()) == INF


@pytest.fixture
def device(monkeypatch):
    """A CPU that passes for an accelerator without trials so far."""
    monkeypatch.setattr(trials, "SLOW", ())
    monkeypatch.setattr(trials, "_passed", {})
    return torch.device("cpu")


def test_a_trial_speaks_for_one_kernel_kind_and_device(device, monkeypatch):
    asked, (x, y) = [], torch.eye(2)
    monkeypatch.setattr(trials, "in_own_thread", lambda trial, device: asked.append(device) or trial())
    for kernel, kind, where, due, outcome in (
        ("a", 1, device, x, True), ("a", 1, device, y, True), ("a", 2, device, y, False), ("b", 1, device, y, False),
        ("a", 1, torch.device("meta"), y, False), ("a", 2, device, x, False),
    ):  # fmt: skip
        assert trials.agrees(kernel, kind, where, lambda due=due: ([x], [due]), 0.1) == outcome
    assert len(asked) == 4


def test_a_kernel_that_returns_fewer_results_does_not_agree(device):
    x = torch.ones(2)
    assert not trials.agrees("a", 1, device, lambda: ([x], [x, x]), 0.1)


def test_compiled_layers_keep_the_formula(device, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not trials.agrees("a", 1, device, None, 0.1)
    assert not trials._passed
