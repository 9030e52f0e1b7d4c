"""Stand-ins for kernels on the meta device: shapes and dtypes of what they save and return."""

from contextlib import suppress

import pytest
import torch

from meshwright.ops import meta_kernels
from meshwright.ops.meta_kernels import kind_of, planned_for, to_host

BF16, F32 = torch.bfloat16, torch.float32


def meta(*shape, dtype=BF16):
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point)


def kinds(tensors):
    return [(tuple(x.shape), x.dtype) for x in tensors]


def test_the_meta_device_stands_for_a_kind_until_the_context_ends():
    device = torch.device("meta")
    with planned_for("cuda"):
        with suppress(KeyError), planned_for("xpu"):
            assert (kind_of(device), kind_of(torch.device("cpu"))) == ("xpu", "cpu")
            raise KeyError
        assert kind_of(device) == "cuda"
    assert kind_of(device) == "cpu"


def test_counts_come_to_the_host_by_group():
    assert to_host([torch.tensor([1, 2, 3]), torch.tensor([4])], [9, 9]) == [[1, 2, 3], [4]]
    groups = [meta(3, dtype=torch.int64), meta(2, dtype=torch.int64), meta(4, dtype=torch.int64)]
    assert to_host(groups, [11, 4, 2]) == [[4, 4, 3], [2, 2], [1, 1, 0, 0]]


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_attention_saves_a_float32_number_for_each_row(kind):
    q, k, v = meta(5, 6, 8), meta(5, 2, 8), meta(5, 2, 8)
    with planned_for(kind):
        o = meta_kernels.attention(q, k, v)
        saved = kinds(o.grad_fn.saved_tensors)
        o.sum().backward()
    kv, qo = ((5, 2, 8), BF16), ((5, 6, 8), BF16)
    assert saved == [qo, kv, kv, qo, ((5, 6), F32)]
    assert kinds([o, q.grad, k.grad, v.grad]) == [qo, qo, kv, kv]


@pytest.mark.parametrize(
    ("width", "padded", "power"),
    [(1, 16, 1), (16, 16, 16), (17, 32, 32), (33, 64, 64), (64, 64, 64), (65, 128, 128), (129, 192, 256)],
)
def test_widths_of_solutions(width, padded, power):
    assert (meta_kernels._padded_values(width), meta_kernels._power_of_two(width)) == (padded, power)


SOLVED = [
    ((3, 6, 64, 64), BF16), ((3, 6, 64, 128), BF16), ((3, 6, 64, 32), BF16), ((3, 6, 32, 128), BF16),
    ((3, 6, 64), F32), ((3, 6, 64), F32),
]  # fmt: skip


@pytest.mark.parametrize("with_state", [False, True])
def test_the_delta_rule_saves_its_operands_and_chunks(with_state):
    """129 tokens are 3 chunks; 2 groups of 3 heads; keys of 20 numbers are padded to 32, values of 70 to 128."""
    q, k, v = meta(129, 2, 20), meta(129, 2, 20), meta(129, 2, 3, 70)
    g, beta = meta(129, 2, 3, dtype=F32), meta(129, 2, 3)
    state = meta(2, 3, 20, 70, dtype=F32) if with_state else None
    o = meta_kernels.from_state((q, k, v, g, beta), None, state)
    assert kinds([o]) == kinds([v])
    assert kinds(o.grad_fn.saved_tensors) == [*kinds([q, k, v, g, beta]), *SOLVED]
    o.sum().backward()
    inputs = [q, k, v, g, beta] + [state] * with_state
    assert kinds([x.grad for x in inputs]) == kinds(inputs)


def test_the_map_of_a_part_has_columns_for_its_state_and_its_values():
    inputs = [meta(129, 2, 20), meta(129, 2, 20), meta(129, 2, 3, 50), meta(129, 2, 3, dtype=F32), meta(129, 2, 3)]
    affine = meta_kernels.state_map(inputs, None)
    assert kinds([affine]) == [((2, 3, 20, 70), F32)]
    k, _, g, beta = inputs[1:]
    assert kinds(affine.grad_fn.saved_tensors) == [*kinds([k]), ((129, 2, 3, 70), BF16), *kinds([g, beta]), *SOLVED]
    affine.sum().backward()
    assert kinds([x.grad for x in inputs[1:]]) == kinds(inputs[1:])
    assert inputs[0].grad is None


def test_only_rows_that_are_not_contiguous_are_copied():
    x = torch.empty(4, 6, device="meta")
    apart, turned = x[:, :3], x.T
    kept = meta_kernels._rows([x, x[::2], turned])
    assert kept[0] is x
    assert [each.stride() for each in kept] == [(6, 1), (12, 1), (4, 1)]
    assert meta_kernels._rows([apart])[0] is apart


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_attention_accumulates_the_gradient_of_queries_in_float32_on_a_gpu(kind, monkeypatch):
    made, real = [], meta_kernels._float32_like
    monkeypatch.setattr(meta_kernels, "_float32_like", lambda x: made.append(x.shape) or real(x))
    with planned_for(kind):
        meta_kernels.attention(meta(5, 6, 8), meta(5, 2, 8), meta(5, 2, 8)).sum().backward()
    assert made == [(5, 6), *([(5, 6, 8)] if kind == "cuda" else [])]


@pytest.mark.parametrize(("ratio", "dtype"), [(1, BF16), (2, F32)])
def test_what_the_delta_rule_needs_in_backward(ratio, dtype, monkeypatch):
    """Gradients of q for each value head, of the solutions, of the states, and of both gates."""
    made, real = [], torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda x, **options: made.append(real(x, **options)) or made[-1])
    g, beta = meta(70, 2, ratio, dtype=F32), meta(70, 2, ratio)
    meta_kernels.delta_rule(meta(70, 2, 16), meta(70, 2, 16), meta(70, 2, ratio, 32), g, beta, None).sum().backward()
    assert kinds(made) == [
        ((70, 2, ratio, 16), dtype), ((2, 2 * ratio, 64, 32), BF16), ((2, 2 * ratio, 16, 32), BF16),
        ((70, 2, ratio), F32), ((70, 2, ratio), BF16),
    ]  # fmt: skip
