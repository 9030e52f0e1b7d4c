"""A layer keeps only those products that its backward needs."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.errors import StateError
from meshwright.parallel import recompute
from meshwright.parallel.replay import recompute_saved_tensors
from meshwright.parallel.selective_recompute import SavedResults

_aten = torch.ops.aten
MM, SORT, COS, SIN, NEG = (getattr(_aten, name).default for name in ("mm", "sort", "cos", "sin", "neg"))
MUL = _aten.mul.Tensor


def rand(seed: int = 0) -> Tensor:
    return torch.randn(3, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64, requires_grad=True)


def ran(run, *args: Tensor, ops=(MM,)) -> tuple[list[object], list[Tensor]]:
    """Return the products kept, and gradients."""
    kept = SavedResults(ops, (MUL,))
    with kept.record(), recompute_saved_tensors(run, args, kept.replay, kept.mark_saved):
        y = run(*args)
    assert kept._unused is None, "its history refers to this layer: a cycle"
    held = [*kept._results]
    y.sum().backward()
    assert not any(kept._results), "each is forgotten as it is taken"
    return held, [x.grad for x in args]


def test_only_what_is_saved_afterwards_is_kept():
    """The first product is, for the sine wants it; not the last one."""
    x, w = rand(), rand(1)
    held, result = ran(lambda x, w: (x @ w).sin() @ w, x, w)
    assert [each.op for each in held] == [MM]
    y, v = (t.detach().requires_grad_() for t in (x, w))
    ((y @ v).sin() @ v).sum().backward()
    assert [torch.equal(*pair) for pair in zip(result, (y.grad, v.grad), strict=True)] == [True, True]


def test_what_goes_into_another_alone_is_not_kept():
    """A partial sum is not kept when its sum is: its shape is enough."""
    x = rand()
    held, result = ran(lambda x: Twice.apply(x.neg()).sin(), x, ops=(NEG, MUL))
    assert [each.out.device.type for each in held] == ["meta", "cpu"]
    assert held[0].out.untyped_storage().nbytes() <= 8
    y = x.detach().requires_grad_()
    (2 * y.neg()).sin().sum().backward()
    assert torch.equal(result[0], y.grad)


class Twice(torch.autograd.Function):
    """Saves nothing, as no collective does."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, d):
        return d * 2


def test_a_factor_of_another_product_is_kept():
    """Its gradient wants it."""
    x, w = rand(), rand(1)
    held, result = ran(lambda x, w: (x @ w @ w).sin(), x, w)
    assert [each.out.device.type for each in held] == ["cpu", "cpu"]
    y, v = (t.detach().requires_grad_() for t in (x, w))
    (y @ v @ v).sin().sum().backward()
    assert [torch.equal(*pair) for pair in zip(result, (y.grad, v.grad), strict=True)] == [True, True]


def test_one_that_is_wanted_after_all_is_not_made_up():
    """Loudly: a shape alone stands for it."""

    def run(x):
        partial = x.neg()
        return Twice.apply(partial).sin() * partial.sin()

    with pytest.raises((RuntimeError, NotImplementedError), match=r"(?i)meta"):
        ran(run, rand(), ops=(NEG, MUL))


def test_several_results_of_one_operation():
    x = rand()
    _, result = ran(lambda x: x.sort(0)[0].sin(), x, ops=(SORT,))
    assert torch.equal(result[0], x.detach().cos())


def test_one_that_was_written_into_is_refused():
    def run(x):
        y = x.cos()
        out = y.sin()
        with torch.no_grad():
            y.add_(1)
        return out

    with pytest.raises(StateError, match="written into before backward took it"):
        ran(run, rand(), ops=(COS,))


def test_another_way_through_a_layer_is_refused():
    ways = iter((torch.cos, torch.sin))
    with pytest.raises(StateError, match=r"reached aten.sin.default, .* aten.cos.default"):
        ran(lambda x: next(ways)(x).exp().cos(), rand(), ops=(COS, SIN))


def test_a_second_backward_is_refused():
    kept, x = SavedResults((COS,)), rand()
    with kept.record(), recompute_saved_tensors(lambda x: x.cos().sin(), (x,), kept.replay, kept.mark_saved):
        y = x.cos().sin()
    y.sum().backward(retain_graph=True)
    with pytest.raises(StateError, match="recorded nothing"):
        y.sum().backward()


def test_a_result_that_another_operation_has_read_is_kept():
    x = rand()
    held, result = ran(lambda x: (y := x.neg()).cos() + Twice.apply(y).sin(), x, ops=(NEG, MUL))
    assert [each.out.device.type for each in held] == ["cpu", "cpu"]
    y = x.detach().requires_grad_()
    (y.neg().cos() + (2 * y.neg()).sin()).sum().backward()
    assert torch.equal(result[0], y.grad)


@pytest.mark.parametrize(
    ("run", "name"),
    [
        (lambda x: (x @ x).sin(), "mm"),
        (lambda x: F.linear(x, x, x[0]).sin(), "addmm"),
        (
            lambda x: F.scaled_dot_product_attention(*[x[None, None]] * 3).sin(),
            "_scaled_dot_product_flash_attention_for_cpu",
        ),
        (lambda x: x.softmax(0).sin(), ""),
    ],
)
def test_products_and_attention_are_kept(run, name):
    x = rand()
    held, result = ran(run, x, ops=recompute._COSTLY)
    assert [each.op for each in held] == ([getattr(_aten, name).default] if name else [])
    y = x.detach().requires_grad_()
    run(y).sum().backward()
    assert torch.equal(result[0], y.grad)


@pytest.mark.parametrize(
    ("again", "message"),
    [
        (lambda x: x.float().sin().cos().double(), r"saved \(3, 3\) in torch.float64 .* \(3, 3\) in torch.float32"),
        (lambda x: x[:2].sin().cos(), r"saved \(3, 3\) in torch.float64 .* \(2, 3\) in torch.float64"),
        (lambda x: x.sin(), "saved 2 tensors for backward in its first run, and 1 when it ran again"),
    ],
)
def test_a_second_run_that_saves_other_tensors_is_refused(again, message):
    ways, x = iter((lambda x: x.sin().cos(), again)), rand()

    def run(x):
        return next(ways)(x)

    with recompute_saved_tensors(run, (x,), nullcontext):
        y = run(x)
    with pytest.raises(StateError, match=message):
        y.sum().backward()


def test_a_layer_keeps_no_partial_sum_of_a_collective(monkeypatch):
    made = []

    class Noted(SavedResults):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(recompute, "SavedResults", Noted)
    monkeypatch.setattr(recompute, "OPS", [MUL])
    recompute._checkpointed(lambda x: Twice.apply(x.neg()).sin(), [NEG, MUL], rand())
    assert [each.out.device.type for each in made[0]._results] == ["meta", "cpu"]
