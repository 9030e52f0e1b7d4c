"""The update of kernels/adamw.py, beside the textbook formula of optim/adamw.py, after gradients were clipped."""

import pytest
import torch

from meshwright.ops.kernels import trials
from meshwright.optim import AdamW, adamw
from tests.interpreter import assert_close, kernels_of, planted
from tests.ops.references import rand

BLOCK = 1024


class Cautious(AdamW):
    """An optimizer of a user that changes AdamW's formula."""

    def plain_update(self, weight, grad, state, *, lr, step, decays):
        new, state = super().plain_update(weight, grad, state, lr=lr, step=step, decays=decays)
        return torch.where((weight - new) * grad > 0, new, weight), state


OPTIONS = AdamW(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


def slice_of(kernels, size, grads=torch.float32, state=torch.float32, copy=None, device="cpu"):
    noise = (rand(size, seed=seed, dtype=torch.float32, grad=False) for seed in range(4))
    weight, grad, mean, square = (x.to(device) for x in noise)
    narrow = None if copy is None else torch.full((size,), 7.0, dtype=copy, device=device)
    return kernels.Slice(weight, grad.to(grads), 0.1 * mean.to(state), square.square().to(state), narrow)


def numbers_of(kernels, step=3, decays=True, max_norm=1.0, lr=1e-2):
    return kernels.Update(lr, step, OPTIONS.betas, OPTIONS.eps, OPTIONS.weight_decay * decays, max_norm)


def formula(part, norm, numbers):
    """Clip, then update, in float64. -> weight, moments"""
    factor = numbers.max_norm / norm if norm > numbers.max_norm else 1.0
    state = [part.mean.double(), part.square.double()]
    weight, state = OPTIONS.plain_update(
        part.weight.double(), part.grad.double() * factor, state, lr=numbers.lr, step=numbers.step,
        decays=numbers.weight_decay > 0,
    )  # fmt: skip
    return weight, *state


def check(kernels, part, norm, numbers, device="cpu"):
    want = formula(part, norm, numbers)
    grad = part.grad.clone()
    kernels.update(part, torch.tensor(norm, dtype=torch.float64, device=device), numbers)
    for got, expected in zip((part.weight, part.mean, part.square), want, strict=True):
        narrow = got.dtype != torch.float32
        assert_close(got, expected, 4e-3 if narrow else 3e-7)
    assert torch.equal(part.grad, grad), "gradients are only read"
    if part.copy is not None:
        assert torch.equal(part.copy, part.weight.to(part.copy.dtype))


@pytest.mark.parametrize("norm", [0.0, 0.5, 1.0, 17.0])
@pytest.mark.parametrize("size", [0, 1, 7, BLOCK, BLOCK + 1])
def test_against_the_formula(size, norm):
    kernels = kernels_of("adamw")
    check(kernels, slice_of(kernels, size), norm, numbers_of(kernels))


@pytest.mark.parametrize("step", [1, 2, 1000])
@pytest.mark.parametrize("decays", [True, False])
def test_steps_and_decay(step, decays):
    kernels = kernels_of("adamw")
    check(kernels, slice_of(kernels, 33), 3.0, numbers_of(kernels, step, decays))


def test_no_clipping():
    kernels = kernels_of("adamw")
    check(kernels, slice_of(kernels, 33), 1e9, numbers_of(kernels, max_norm=float("inf")))


def test_a_huge_norm_that_float32_cannot_hold():
    kernels = kernels_of("adamw")
    check(kernels, slice_of(kernels, 33), 1e60, numbers_of(kernels))


def test_a_copy_for_matmuls_and_narrow_state():
    kernels = kernels_of("adamw")
    check(kernels, slice_of(kernels, 1000, torch.float16, torch.float16, torch.float16), 2.0, numbers_of(kernels))


def test_many_steps_beside_the_kernel_of_torch():
    """Run the calls of optim/adamw.py, with gradients that were clipped before."""
    kernels = kernels_of("adamw")
    ours, peer = slice_of(kernels, 100), slice_of(kernels, 100)
    for step in range(1, 30):
        grad = rand(100, seed=step, dtype=torch.float32, grad=False)
        norm = grad.norm().double()
        ours.grad.copy_(grad)
        kernels.update(ours, norm, numbers_of(kernels, step))
        lists = ([peer.weight], [grad * (1.0 / norm.item())], [peer.mean], [peer.square], [])
        torch._fused_adamw_(
            *lists, [torch.tensor(float(step))], lr=1e-2, beta1=0.9, beta2=0.95, weight_decay=0.1, eps=1e-8,
            amsgrad=False, maximize=False,
        )  # fmt: skip
    for got, want in zip((ours.weight, ours.mean, ours.square), (peer.weight, peer.mean, peer.square), strict=True):
        assert_close(got, want, 1e-6)


@pytest.mark.parametrize("norm", [torch.nan, torch.inf, -torch.inf])
def test_nothing_is_written_where_the_norm_is_not_finite(norm):
    kernels = kernels_of("adamw")
    check_nothing_written(kernels, norm)


def check_nothing_written(kernels, norm, device="cpu"):
    part = slice_of(kernels, 9, copy=torch.float16, device=device)
    part.grad[3] = norm
    before = [x.clone() for x in (part.weight, part.grad, part.mean, part.square, part.copy)]
    kernels.update(part, torch.tensor(norm, dtype=torch.float64, device=device), numbers_of(kernels))
    after = (part.weight, part.grad, part.mean, part.square, part.copy)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(after, before, strict=True))


PLANTS = [
    ("not clipped", "* factor\n", "\n"),
    ("small norms are enlarged", "tl.where(total > max_norm, max_norm", "tl.where(total > 0.0, max_norm"),
    ("clipped by the square", "max_norm / total", "max_norm / (total * total)"),
    ("NaN is written", 'if tl.abs(total) < float("inf"):', 'if tl.abs(total) != float("inf"):'),
    ("an infinite norm is written", 'if tl.abs(total) < float("inf"):', "if total == total:"),
    ("one beta for both", "v = beta2 * tl", "v = beta1 * tl"),
    ("the square of an unclipped gradient", "rest2 * g * g", "rest2 * g * g / (factor * factor)"),
    ("no correction of the first moment", "tl.div_rn(m, correction1)", "m"),
    ("no correction of the second moment", "tl.sqrt_rn(tl.div_rn(v, correction2))", "tl.sqrt_rn(v)"),
    ("eps inside of the root", "tl.div_rn(v, correction2)) + eps", "tl.div_rn(v, correction2) + eps)"),
    ("decay as L2 (Adam)", "g = tl.load(grad", "g = (1 - kept) / lr * tl.load(weight + at) + tl.load(grad"),
    ("decay without lr", "1 - lr * numbers.weight_decay", "1 - numbers.weight_decay"),
    ("a mask off by one", "inside = at < size", "inside = at < size - 1"),
    ("the copy is of the old weight", "w.to(copy.dtype.element_ty)", "(w + lr * change).to(copy.dtype.element_ty)"),
    ("the last block left out", "triton.cdiv(size, _BLOCK)", "max(1, size // _BLOCK)"),
    ("the moment of the last step", "tl.store(mean + at, m.to", "tl.store(mean + at, g.to"),
]  # fmt: skip


def check_all(kernels):
    for norm in (0.5, 3.0):
        check(kernels, slice_of(kernels, BLOCK + 5, copy=torch.float16), norm, numbers_of(kernels))
    small = slice_of(kernels, 9)
    small.square.mul_(1e-16)
    small.grad.mul_(1e-8)
    check(kernels, small, 0.5, numbers_of(kernels))
    for norm in (torch.nan, torch.inf):
        check_nothing_written(kernels, norm)


def test_the_checks_of_plants_pass_without_one():
    check_all(kernels_of("adamw"))


@pytest.mark.parametrize(("old", "new"), [p[1:] for p in PLANTS], ids=[p[0] for p in PLANTS])
def test_planted_bugs_are_seen(old, new, tmp_path):
    kernels = planted("adamw", old, new, tmp_path)
    with pytest.raises(AssertionError):
        check_all(kernels)


def test_the_trial_accepts_the_kernel_and_no_planted_one(monkeypatch, tmp_path, caplog):
    kernels_of("adamw")
    monkeypatch.setattr(trials, "SLOW", ())
    monkeypatch.setattr(adamw, "SLOW", ())
    x = torch.zeros(8)
    for name, old, new in (("", None, None), PLANTS[0], *PLANTS[3:5], PLANTS[7], PLANTS[12]):
        monkeypatch.setattr(trials, "_passed", {})
        kernels = planted("adamw", old, new, tmp_path) if old else kernels_of("adamw")
        monkeypatch.setattr("meshwright.ops.kernels.adamw.update", kernels.update)
        assert OPTIONS.fuses(x, x) is (old is None), (name, caplog.text)
    monkeypatch.setattr(trials, "_passed", {})
    monkeypatch.setattr("meshwright.ops.kernels.adamw.update", kernels_of("adamw").update)
    assert not OPTIONS.fuses(x[1:], x[1:]), "an address that the trial has not had"
    assert not Cautious().fuses(x, x), "a formula of its own"
    assert not OPTIONS.fuses(x.double(), x.double())
    assert not OPTIONS.fuses(torch.zeros(4, 2).t(), x)


def test_no_kernel_on_a_cpu():
    assert not OPTIONS.fuses(torch.zeros(8), torch.zeros(8))
