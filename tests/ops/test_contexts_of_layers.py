"""Contexts that a layer's backward reads: deferred weight gradients, and choices that a recompute replays."""

from contextlib import suppress

import pytest
import torch
from torch import nn

from meshwright.ops import deferred_weight_grads, replayed_choices
from meshwright.ops.deferred_weight_grads import deferred, deferring_weight_grads, is_deferring
from meshwright.ops.replayed_choices import Choices, replayed


def test_jobs_of_the_outer_context_go_on_after_an_inner_one():
    outer, inner = [], []
    with deferring_weight_grads(outer):
        with suppress(KeyError), deferring_weight_grads(inner):
            assert deferred([], list)
            raise KeyError
        assert is_deferring()
        assert deferred([], list)
        assert deferred([], list)
    assert (len(outer), len(inner)) == (2, 1)
    assert not is_deferring()
    assert not deferred([], list)
    assert deferred_weight_grads._jobs is None


def test_a_job_computes_gradients_of_trained_weights_alone():
    first, frozen, last = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    frozen.requires_grad_(False)
    coded, jobs, calls = object(), [], []

    def gradients():
        calls.append(torch.is_grad_enabled())
        return [torch.ones(2), torch.ones(2), None, torch.full((2,), 5.0)]

    with deferring_weight_grads(jobs):
        assert deferred([first, frozen, coded, 3 * last], gradients)
    assert (calls, first.grad) == ([], None)
    jobs[0]()
    assert calls == [False]
    assert (first.grad.tolist(), frozen.grad, last.grad.tolist()) == ([1, 1], None, [15, 15])


def choose(number):
    return replayed(lambda: torch.tensor(number)).item()


def test_choices_are_replayed_in_order_and_again_from_the_first():
    choices = Choices()
    with choices.made():
        assert [choose(number) for number in (4, 9, 2)] == [4, 9, 2]
    for _ in range(2):
        with choices.taken():
            assert [choose(number) for number in (7, 7, 7)] == [4, 9, 2]
            with pytest.raises(IndexError):
                choose(7)
    assert choose(7) == 7


def test_a_layer_within_a_recomputed_one_has_choices_of_its_own():
    outer, inner = Choices(), Choices()
    with outer.made():
        choose(1)
        with suppress(KeyError), inner.made():
            choose(2)
            raise KeyError
        choose(3)
    with outer.taken():
        assert choose(0) == 1
        with inner.taken():
            assert choose(0) == 2
        assert choose(0) == 3
    assert replayed_choices._active is None
