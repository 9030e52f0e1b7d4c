"""Kernels are launched on the device of their tensors, and only in the form in which a trial has compiled them."""

import ast
import inspect
from collections import Counter
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from meshwright.ops import documents, kernels, loss
from meshwright.ops.kernels import launch as module
from meshwright.ops.kernels import trials
from tests.interpreter import kernels_of, planted
from tests.ops.references import rand
from tests.ops.test_kernels import mean_so_far, same
from tests.test_kernels_fp8 import bits

FILES = sorted(Path(kernels.__file__).parent.glob("*.py"))


class On:
    """A tensor as far as `launch` looks at it."""

    def __init__(self, device):
        self.device = torch.device(device)


def test_there_is_one_place_that_launches():
    calls = {
        path.name
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
    }
    assert calls == {"launch.py"}


def test_it_is_the_device_of_the_tensors(monkeypatch):
    """Triton would take the current one, which a user may have changed."""
    entered, seen = [], []
    kernel = SimpleNamespace(__name__="some")
    monkeypatch.setattr(module, "Tensor", On)
    monkeypatch.setattr(torch.accelerator, "device_index", lambda index: entered.append(index) or nullcontext())
    grids = {(7,): lambda *args, **options: seen.append((entered[-1], args[1:], options))}
    kernel = type("Kernel", (), {"__name__": "some", "__getitem__": lambda _, grid: grids[grid]})()
    module.launch(kernel, (7,), On("cuda:3"), 5, num_warps=4)
    assert seen == [(3, (5,), {"num_warps": 4})]
    with pytest.raises(ValueError, match=r"kernel some are on 2 devices"):
        module.launch(kernel, (7,), On("cuda:3"), On("cuda:0"))


def form(kernel, args, options):
    """Return what Triton compiles a kernel for: types, constants, and which addresses and numbers are multiples of 16,
    or 1."""
    parameters, given = kernel.kwargs, dict(zip(kernel.arg_names, args, strict=False)) | options
    free = {*(parameters["do_not_specialize"] or ()), *(parameters["do_not_specialize_on_alignment"] or ())}
    constants = {
        name for name, p in inspect.signature(kernel.fn).parameters.items() if "constexpr" in str(p.annotation)
    }
    made = {}
    for name, value in given.items():
        if isinstance(value, torch.Tensor):
            made[name] = value.dtype, name in free or value.data_ptr() % 16 == 0
        elif name in constants or name not in kernel.arg_names:
            made[name] = value
        elif name not in free:
            made[name] = type(value), value == 1, value % 16 == 0
    return made


def displaced(x, by):
    """A copy whose rows lie `by` elements too far apart, and whose address is no multiple of 16."""
    wide = x.new_zeros(x.shape[0], x[0].numel() + by).flatten()
    wide = torch.cat([wide.new_zeros(1), wide])[1:]
    return wide.as_strided(x.shape, (x[0].numel() + by, *x.stride()[1:]), 1).copy_(x)


@pytest.mark.parametrize("by", [1, 16])
@pytest.mark.parametrize("width", [128, 40])
def test_the_form_of_a_launch_is_that_of_the_trial(monkeypatch, by, width):
    """Whatever the layout of the inputs."""
    formed = []

    def recorded(kernel, grid, *args, **options):
        formed.append(form(kernel, args, options))
        module.launch(kernel, grid, *args, **options)

    x, at, docs = rand(6, width, dtype=torch.float32, grad=False), torch.arange(6), documents([6], "cpu")
    v, gates = rand(6, 1, 2, width, dtype=torch.float32, grad=False), rand(6, 1, 2, dtype=torch.float32, grad=False)
    rule, sums, fp8 = kernels_of("delta_rule"), kernels_of("row_sums"), kernels_of("fp8_blocks")
    grouped, weight = kernels_of("grouped_matmul"), rand(2, 24, width, dtype=torch.float32, grad=False)
    product = partial(grouped.grouped_mm, offs=torch.tensor([2, 6], dtype=torch.int32))
    for each in (rule, sums, fp8, grouped):
        monkeypatch.setattr(each, "launch", recorded)
    calls = [
        (lambda y: sums.sum_rows(y, at, 2), [x]),
        (lambda q, k, *more: rule.from_state((q, k, *more), rule.stream_of(docs, 1, 0), None),
         [x[:, None], x[:, None].clone(), v, -gates.abs(), gates.sigmoid()]),
        (lambda y, w: product(y, w.mT), [x, weight]),
        (product, [rand(6, 24, dtype=torch.float32, grad=False), weight]),
        (lambda d, y: product(d.mT, y), [rand(6, 24, dtype=torch.float32, grad=False), x]),
    ]  # fmt: skip
    if width == 128:
        calls += [(fp8.quantised_rows, [x]), (fp8.quantised_matrix, [rand(128, 256, dtype=torch.float32, grad=False)])]
        calls += [(lambda y: fp8.quantised_rows(y[:1]), [x])]
    for call, inputs in calls:
        formed.clear()
        plain = call(*inputs)
        expected = [*formed]
        formed.clear()
        result = call(*(displaced(each, by) for each in inputs))
        assert formed == expected
        assert all(map(torch.equal, *((each if type(each) is tuple else (each,)) for each in (result, plain))))


def test_columns_of_a_matrix_are_read_where_they_lie(monkeypatch):
    """Unless they begin at other addresses than in the trial."""
    fp8, seen = kernels_of("fp8_blocks"), []
    monkeypatch.setattr(fp8, "launch", lambda kernel, grid, x, *args, **options: seen.append(x))
    for num_rows, offset, kept in ((48, 0, True), (40, 0, False), (48, 1, False)):
        x = torch.zeros(128 * num_rows + offset)[offset:].view(128, num_rows).t()
        fp8.quantised_rows(x)
        assert (seen.pop().data_ptr() == x.data_ptr()) == kept


def test_any_number_of_rows_has_one_form(monkeypatch):
    fp8, formed = kernels_of("fp8_blocks"), []
    monkeypatch.setattr(fp8, "launch", lambda kernel, _, *args, **options: formed.append(form(kernel, args, options)))
    for num_rows in (1, 16, 17):
        fp8.quantised_rows(torch.zeros(num_rows, 128), -num_rows % 4)
    assert formed[0] == formed[1] == formed[2]


def test_columns_beyond_32_bits():
    """The last of 128 columns begins after more elements than an int32 counts. Few of their pages exist, and what an
    overflow would read is memory too: 2^32 elements before."""
    distance, before = 17_000_000, 2**31
    assert 2**31 < 127 * distance < 2**32
    buffer = torch.empty(before + 127 * distance + 32, dtype=torch.int8)
    far = buffer.as_strided((32, 128), (1, distance), before)
    near = (100 * rand(32, 128, dtype=torch.float32, grad=False)).clamp(-127, 127).to(torch.int8)
    far.copy_(near)
    fp8 = kernels_of("fp8_blocks")
    assert fp8._as_tried(far).data_ptr() == far.data_ptr()
    for got, want in zip(fp8.quantised_rows(far), fp8.quantised_rows(near), strict=True):
        assert torch.equal(bits(got), bits(want))


class InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, chosen):
        ctx.chosen = chosen
        return x.clone()

    @staticmethod
    def backward(ctx, d):
        ctx.chosen.append(kernels.fastest(same, mean_so_far, [d]))
        return d, None


def test_nothing_is_tried_inside_a_backward(monkeypatch):
    """Its own backward would wait for autograd's thread of the device, which waits for the trial."""
    monkeypatch.setattr(kernels, "SLOW", ())
    monkeypatch.setattr(kernels, "_agreed", {})
    monkeypatch.setattr(kernels, "NARROW", (torch.float64,))
    rand(1).sum().backward()  # the number of a backward is not 0
    x, chosen = rand(5, 3), []
    InBackward.apply(x, chosen).sum().backward()
    assert chosen == [mean_so_far]
    assert not kernels._agreed
    assert kernels.fastest(same, mean_so_far, [x]) is same
    InBackward.apply(x, chosen).sum().backward()
    assert chosen[1:] == [same], "what was tried before may run"


def test_each_form_is_tried(monkeypatch):
    """Sizes that are multiples of 16 and others; products of widths that are aligned in another way."""
    kernels_of("unused_experts")
    experts, tried = import_module("meshwright.ops.experts"), Counter()

    def compared(kernel, trial, most):
        tried[kernel] += 1
        results, due = trial()
        return all(trials.distance(a, b) <= most for a, b in zip(results, due, strict=True))

    monkeypatch.setattr(trials, "SLOW", ())
    monkeypatch.setattr(trials, "_passed", {})
    monkeypatch.setattr(trials, "_compare", compared)
    monkeypatch.setattr(loss, "kind_of", lambda _: "accelerator")
    monkeypatch.setattr(loss, "_add_product", lambda dw, d, x, add: dw.copy_((1 + add) * (d.T.float() @ x.float())))
    for width in (4, 8, 3, 5):
        assert experts._has_kernel(torch.zeros(2, 4, width))
        assert loss._accumulates_wide(torch.zeros(3, 16 + width, dtype=torch.bfloat16), torch.zeros(16 + width, 8))
    assert tried == {"unused_experts": 2, "addmm with a float32 result": 4}
    unaligned = torch.full((2 * 16 + 1,), 7.0)[1:].view(2, 4, 4)
    monkeypatch.setattr("meshwright.ops.kernels.unused_experts.zero_unused", None)
    assert experts.without_unused(unaligned, torch.tensor([0, 1])).sum() == 7 * 16, "by the formula"


def test_a_plant_in_the_layout_is_seen(monkeypatch, tmp_path):
    """Rows are read where they lie, although their kernel was tried with dense ones."""
    wrong = planted("row_sums", "y_ND = dense_rows(y_ND)", "pass", tmp_path)
    monkeypatch.setattr(kernels_of("row_sums"), "sum_rows", wrong.sum_rows)
    formed = []
    monkeypatch.setattr(wrong, "launch", lambda kernel, _, *args, **options: formed.append(form(kernel, args, options)))
    x, at = rand(6, 128, dtype=torch.float32, grad=False), torch.arange(6)
    for y in (x, displaced(x, 1)):
        wrong.sum_rows(y, at, 2)
    assert formed[0] != formed[1]


@pytest.mark.parametrize(
    ("first", "distance", "width", "is_kept"),
    [
        (0, 128, 128, True), (0, 40, 40, True), (0, 144, 128, True), (0, 129, 128, False), (0, 144, 40, False),
        (0, 48, 32, True), (4, 128, 128, True), (1, 128, 128, False),
    ],
)  # fmt: skip
def test_rows_that_no_trial_has_seen_are_copied(first, distance, width, is_kept):
    """A kernel is compiled for whether 16 divides the distance of rows, their width, and the address in bytes."""
    x = torch.arange(4.0 * 144)[first:].as_strided((3, width), (distance, 1), first)
    rows = module.dense_rows(x)
    assert (rows is x) == is_kept
    assert torch.equal(rows, x)
    assert is_kept or rows.is_contiguous()
    assert (module.dense(x) is x) == (is_kept and distance == width)
    assert module.dense_rows(x[:0]).shape == (0, width)


def test_rows_whose_elements_lie_apart_are_copied():
    turned = torch.arange(48.0 * 16).view(48, 16).T
    assert module.dense_rows(turned).is_contiguous()
    assert torch.equal(module.dense(turned), turned)
