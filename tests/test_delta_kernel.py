"""The Triton kernels of the gated delta rule beside their formula in float64, in Triton's interpreter, on a CPU.

The interpreter has no bfloat16. What the kernels compute on a GPU is compared there, before they are used
(`meshwright.ops.kernels.agrees`) and in `python -m bench.kernels`.
"""

import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed, whose interpreter runs the kernels")

import meshwright.ops.kernels as gate
from meshwright.ops import delta, documents, meta_kernels, planned_for
from meshwright.ops.documents import WHOLE
from meshwright.ops.kernels import delta_rule as kernels
from meshwright.verify.poisoned_memory import poisoned_memory
from tests.ops.references import differentiate, evenly, in_parts

FILES = ("delta_parts", "delta_forward", "delta_backward", "delta_rule")  # in the order of their imports


def inputs(lengths, heads=(1, 1), dims=(16, 16), decay=1.0, dtype=torch.float32):
    noise, num_tokens = torch.Generator().manual_seed(len(lengths)), sum(lengths)

    def rand(*shape):
        return torch.randn(num_tokens, *shape, generator=noise)

    (G, R), (K, V) = heads, dims
    streams = [x.to(dtype) for x in (rand(G, K), rand(G, K), rand(G, R, V))]
    return [x.requires_grad_() for x in (*streams, -decay * rand(G, R).exp(), rand(G, R).sigmoid())]


def distances(op, streams, docs):
    """Compare outputs and each gradient with those of the formula in float64, as shares of the norm."""
    actual = differentiate(lambda *x: op(*x, docs).double(), [x.detach().requires_grad_() for x in streams])
    wide = [x.detach().double().requires_grad_() for x in streams]
    wanted = differentiate(lambda *x: delta.chunked(*x, docs), wide)
    return [float((a.double() - b).norm() / b.norm().clamp_min(1e-30)) for a, b in zip(actual, wanted, strict=True)]


def by_parts(num):
    def op(*arguments):
        *streams, docs = arguments
        return in_parts(lambda part, *x: delta._part_by(kernels, x, docs, part), num, streams)

    return op


CASES = {
    "one token": dict(lengths=[1]),
    "one chunk": dict(lengths=[64]),
    "a document less than a chunk, one more": dict(lengths=[63, 65]),
    "documents that end and begin in a chunk": dict(lengths=[5, 70, 1, 60, 33], heads=(1, 2), dims=(16, 32)),
    "many in a chunk": dict(lengths=[1, 2, 3, 58, 64, 7, 1]),
    "a document of several chunks": dict(lengths=[3, 200], decay=0.02),
    "two key heads for three value heads each": dict(lengths=[20, 40], heads=(2, 3)),
    "two key heads for two, other dims": dict(lengths=[70], heads=(2, 2), dims=(32, 16)),
    "dims that are no power of two": dict(lengths=[9, 70], heads=(2, 1), dims=(10, 37)),
    "values wider than a program takes": dict(lengths=[5, 62], dims=(20, 80)),
    "no decay": dict(lengths=[130], decay=0.0),
    "strong decay": dict(lengths=[100, 20], decay=300.0),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_beside_the_formula(case):
    streams = inputs(**case)
    assert max(distances(delta._triton_delta_rule, streams, documents(case["lengths"], "cpu"))) <= 1e-5


def test_one_token_that_forgets_all():
    """Its log decay must cancel no digit of those around it."""
    streams = inputs([100], decay=0.01)
    with torch.no_grad():
        streams[3][30] = -1e6
    assert max(distances(delta._triton_delta_rule, streams, documents([100], "cpu"))) <= 1e-5


def test_float16():
    streams = inputs([1, 2, 67], heads=(1, 2), dims=(32, 32), dtype=torch.float16, decay=0.25)
    assert max(distances(delta._triton_delta_rule, streams, documents([1, 2, 67], "cpu"))) <= 2e-3


def test_views_are_read_where_they_are():
    """q, k and v of a layer are columns of one tensor."""
    docs, (q, k, v, g, beta) = documents([20, 30], "cpu"), inputs([20, 30], heads=(2, 2))
    joined = torch.cat([x.detach().flatten(1) for x in (q, k, v)], dim=1)
    views = [
        x.unflatten(1, like.shape[1:]) for x, like in zip(joined.split([32, 32, 64], dim=1), (q, k, v), strict=True)
    ]
    assert kernels.Operands.of(*views, g, beta).q.data_ptr() == joined.data_ptr()
    whole = delta._triton_delta_rule(q, k, v, g, beta, docs)
    assert torch.equal(delta._triton_delta_rule(*views, g, beta, docs), whole)
    columns = v.transpose(1, 3).contiguous().transpose(1, 3)  # whose rows are not contiguous
    assert torch.equal(delta._triton_delta_rule(q, k, columns, g, beta, docs), whole)


def test_padded_bounds():
    """`cu_seqlens` has a fixed length; what is beyond the documents is not read."""
    streams = inputs([50, 30])
    padded = delta._triton_delta_rule(*streams, documents([50, 30], "cpu", padded=9))
    assert torch.equal(padded, delta._triton_delta_rule(*streams, documents([50, 30], "cpu")))


def test_no_tokens():
    streams = inputs([])
    actual = differentiate(lambda *x: delta._triton_delta_rule(*x, documents([], "cpu")), streams)
    assert [x.shape for x in actual] == [streams[2].shape, *(x.shape for x in streams)]


@pytest.mark.parametrize(
    ("lengths", "num", "heads", "dims"),
    [
        ([140], 2, (1, 2), (16, 16)),
        ([100, 36], 2, (1, 1), (20, 37)),
        ([5, 130, 1, 50], 3, (1, 1), (16, 16)),
        ([3] * 8, 4, (1, 1), (16, 16)),
    ],
)
def test_parts_beside_the_formula(lengths, num, heads, dims):
    """A part continues the document that the one before it began, whether it ends there, later, or never began."""
    lengths = evenly(lengths, num)
    streams = inputs(lengths, heads, dims, decay=0.02)
    assert max(distances(by_parts(num), streams, documents(lengths, "cpu"))) <= 1e-5


def test_what_the_gate_compares_for_parts():
    streams = inputs([1, 2, 67, 30], decay=0.1)
    assert max(distances(delta._triton_delta_rule_in_parts, streams, documents([1, 2, 67, 30], "cpu"))) <= 1e-5


@pytest.mark.parametrize(
    ("refused", "runs"),
    [((), "_triton_delta_rule"), (("_triton_delta_rule",), "_fla"), (("_triton_delta_rule", "_fla"), "chunked")],
)
def test_ours_is_tried_first(monkeypatch, refused, runs):
    """Then flash-linear-attention's, then the formula runs."""
    tried = []

    def agrees(kernel, *_):
        tried.append(kernel.__name__)
        return kernel.__name__ not in refused

    monkeypatch.setattr(gate, "SLOW", ())
    monkeypatch.setattr(gate, "NARROW", (torch.float32,))
    monkeypatch.setattr(gate, "_agreed", {})
    monkeypatch.setattr(gate, "agrees", agrees)
    assert delta._fastest(inputs([3])).__name__ == runs
    assert tried == ["_triton_delta_rule", "_fla"][: len(refused) + (runs != "chunked")]


@pytest.mark.parametrize("num", [1, 2])
def test_the_gate_lets_them_pass(monkeypatch, num):
    """All the way from `delta_rule`, with the trial run in the interpreter."""
    monkeypatch.setattr(gate, "SLOW", ())
    monkeypatch.setattr(gate, "NARROW", (torch.float32,))
    monkeypatch.setattr(gate, "_agreed", {})
    monkeypatch.setattr(gate, "TOLERANCE", 1e-5)

    def rule(*arguments):
        *streams, docs = arguments

        def part_of_it(part, q, k, v, *gates):
            return delta.delta_rule(q, k, v, gates, docs, part)

        return part_of_it(WHOLE, *streams) if num == 1 else in_parts(part_of_it, num, streams)

    assert max(distances(rule, inputs([20, 20]), documents([20, 20], "cpu"))) <= 1e-5
    assert {key[0].__name__: agreed for key, agreed in gate._agreed.items()} == {
        "_triton_delta_rule" if num == 1 else "_triton_delta_rule_in_parts": True
    }


@pytest.mark.parametrize("dims", [(128, 128), (20, 80)])
@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("parts", [1, 2])
def test_stand_ins_save_what_the_kernels_save(dims, ratio, parts):
    """A plan counts them: number, shape and dtype of what is kept for backward, and of every gradient."""
    docs, streams = documents([70, 30], "cpu"), inputs([70, 30], (1, ratio), dims)

    def kept(module, streams):
        actual = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: actual.append(x) or x, lambda x: x):
            pieces = [x[:50] for x in streams]
            stream = module.stream_of(docs, 2, 0) if parts == 2 else module.stream_of(documents([50], "cpu"), 1, 0)
            state = torch.zeros(1, ratio, *dims, device=streams[0].device, requires_grad=True) if parts == 2 else None
            results = [module.from_state(pieces, stream, state)]
            results += [module.state_map(pieces, stream)] if parts == 2 else []
        wanted = [*streams, *([] if state is None else [state])]
        grads = torch.autograd.grad([x.float().sum() for x in results], wanted)
        shapes = [(tuple(x.shape), x.dtype) for x in [*results, *grads]]
        # Positions and bounds are left out: the documents keep them anyway.
        return sorted((tuple(x.shape), str(x.dtype)) for x in actual if x.is_floating_point()), shapes

    with planned_for("cuda"):
        planned = kept(meta_kernels, [x.detach().to("meta").requires_grad_() for x in streams])
    assert planned == kept(kernels, streams)


def test_a_cpu_never_imports_the_kernels():
    run = (
        "import sys, torch; from meshwright.ops import delta_rule, documents\n"
        "q, k, v = (torch.randn(5, 1, 4, dtype=torch.bfloat16) for _ in range(3))\n"
        "g = torch.zeros(5, 1, 1); delta_rule(q, k, v[:, :, None], (g, g), documents([5], 'cpu'))\n"
        "assert 'meshwright.ops.kernels.delta_rule' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", run], check=True)


def test_nothing_is_transposed_in_registers():
    """Triton 3.4 to 3.7.0 miscompiles the product of a transposed result on Hopper."""
    for name in FILES:
        text = Path(gate.__file__).with_name(f"{name}.py").read_text("utf-8")
        assert not any(word in text for word in ("tl.trans(", ".trans(", ".T\n", ".T,", ".T)", "permute(")), name


@pytest.mark.gpu
@pytest.mark.parametrize("op", [delta._triton_delta_rule, delta._triton_delta_rule_in_parts])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "dims"), [((2, 1), (128, 128)), ((1, 3), (128, 128)), ((2, 2), (96, 80))])
def test_on_an_accelerator(op, dtype, heads, dims):
    device, lengths = torch.accelerator.current_accelerator(), [1, 2, 300, 77, 1000]
    *streams, g, beta = (x.detach().to(device) for x in inputs(lengths, heads, dims, decay=0.25))
    low = [x.requires_grad_() for x in (*(x.to(dtype) for x in streams), g, beta)]
    docs, cpu_docs = documents(lengths, device), documents(lengths, "cpu")
    y = op(*low, docs)
    d = torch.linspace(-1, 1, y.numel()).view(y.shape)
    actual = [y, *torch.autograd.grad((y.float() * d.to(device)).sum(), low)]
    wide = [x.detach().cpu().double().requires_grad_() for x in low]
    y = delta.chunked(*wide, cpu_docs)
    wanted = [y, *torch.autograd.grad((y * d).sum(), wide)]
    for a, b in zip(actual, wanted, strict=True):
        assert (a.detach().cpu().double() - b).norm() <= 1e-2 * b.norm()


# Bugs, each planted in a copy of the kernels: a file, a text that stands in it once, and its replacement.
PLANTS = {
    "a token sees one before its document": (
        "delta_parts",
        "(position[:, None] >= distance)",
        "(position[:, None] + 1 >= distance)",
    ),
    "a token does not see the first of its document": (
        "delta_parts",
        "(position[:, None] >= distance)",
        "(position[:, None] > distance)",
    ),
    "gradients leave the document": (
        "delta_parts",
        "(distance >= 0) & (position[None, :] >= distance)",
        "distance >= 0",
    ),
    "the state of the document before is read": (
        "delta_parts",
        "tl.cumsum(g, 0), position > tl.arange(0, C)",
        "tl.cumsum(g, 0), position >= tl.arange(0, C)",
    ),
    "other documents write into the state": ("delta_parts", "last(position, C) >= C - 1 - i", "i >= 0"),
    "a token's own decay counts for what it writes": (
        "delta_forward",
        "load_gate(g + h, start + 1, num, H, C)",
        "load_gate(g + h, start, num, H, C)",
    ),
    "log decays are differences of sums": (
        "delta_parts",
        "tl.cumsum(after, 0, reverse=True)",
        "tl.sum(after, 0) - tl.cumsum(after, 0) + after",
    ),
    "the last chunk of a document is left out": (
        "delta_forward",
        "range(n_first, n_last + 1)",
        "range(n_first, n_last)",
    ),
    "a document that begins in a chunk writes it": (
        "delta_forward",
        "(start >= begin) & every",
        "(start + C >= begin) & every",
    ),
    "the first chunk of a document is not written": (
        "delta_forward",
        "(start >= begin) & every",
        "(start > begin) & every",
    ),
    "a document of one chunk is skipped": ("delta_forward", " | (n_first * C == begin)", ""),
    "value heads take turns with key heads": ("delta_forward", "(h // R)", "(h % (H // R))"),
    "padding reads the next head": (
        "delta_parts",
        "    if width % W != 0:\n        mask = mask & (c < width)[None, :]\n    return",
        "    return",
    ),
    "the chunk's system is inverted by blocks alone": ("delta_forward", "unit - E + E2", "unit - E"),
    "beta is left out of the system": ("delta_forward", "beta_C[:, None] * kk", "kk"),
    "a norm has no gradient": ("delta_parts", " - x * (r * r * r * tl.sum(x * dy, 1) / (scale * scale))[:, None]", ""),
    "q is scaled in its norm's gradient": ("delta_parts", " / (scale * scale)", ""),
    "du lacks what the state passes on": (
        "delta_backward",
        "((start + C <= end) | is_last) & every",
        "(start + C < end) & every",
    ),
    "gradients pass through a document's start": (
        "delta_backward",
        "d_KV *= decay_through(g_C, position_C, C)",
        "d_KV *= tl.exp(tl.sum(g_C, 0))",
    ),
    "dg lacks what decays on the way": (
        "delta_backward",
        "tl.sum(pairs, 1) - tl.sum(pairs, 0) + of_state",
        "tl.sum(pairs, 1) + of_state",
    ),
    "dg lacks the state that passes through": (
        "delta_backward",
        " + decay_through(g_C, position_C, C) * tl.sum(d_through_K, 0)",
        "",
    ),
    "dbeta lacks the state": (
        "delta_backward",
        "tl.sum(pairs, 1) + of_state\n    pairs *=",
        "tl.sum(pairs, 1)\n    pairs *=",
    ),
    "the identity of a part is not read": (
        "delta_forward",
        "mask=reads, other=0.0",
        "mask=reads & (begin < 0), other=0.0",
    ),
    "a part's last state has the padding's decay": (
        "delta_parts",
        "tl.load(at + inside) + (row - inside)",
        "tl.load(at + inside)",
    ),
    "a part's map has no gradient": (
        "delta_backward",
        "mask=is_last & every, other=0.0",
        "mask=(begin < 0) & every, other=0.0",
    ),
    "a part's state has no gradient": (
        "delta_backward",
        "d_KV, mask=is_first & every",
        "d_KV, mask=(begin < 0) & every",
    ),
    "values that end inside a block": (
        "delta_rule",
        "-(-V // _columns(V)) * _columns(V)",
        "V // _columns(V) * _columns(V)",
    ),
}


@pytest.fixture
def planted(monkeypatch, tmp_path):
    """Kernels with a bug."""

    def plant(file, old, new):
        for name in FILES:
            source = shutil.copy(Path(gate.__file__).with_name(f"{name}.py"), tmp_path)
            if name == file:
                text = Path(source).read_text("utf-8")
                assert text.count(old) >= 1, f"{old!r} does not stand in {file}"
                Path(source).write_text(text.replace(old, new), "utf-8")
            full = f"{gate.__name__}.{name}"
            spec = importlib.util.spec_from_file_location(full, source)
            monkeypatch.setitem(sys.modules, full, module := importlib.util.module_from_spec(spec))
            spec.loader.exec_module(module)
        return module

    return plant


def seen(module):
    """How far kernels are off, at worst, in a stream and in three parts of one. Memory that no kernel writes is NaN:
    where it happens to be 0, padding that is read changes nothing."""
    with poisoned_memory():
        return furthest(module)


def furthest(module):

    def parts(*arguments):
        *streams, docs = arguments
        return in_parts(lambda part, *x: delta._part_by(module, x, docs, part), 3, streams)

    def whole(*arguments):
        *streams, docs = arguments
        return module.from_state(streams, module.stream_of(docs, 1, 0), None)

    streams = inputs([3, 65, 1, 64], heads=(2, 2), dims=(16, 20), decay=0.1)
    with torch.no_grad():
        streams[3][2] = -1e6
    worst = max(distances(whole, streams, documents([3, 65, 1, 64], "cpu")))
    # The second part begins a document, the third goes on with it. Parts are longer than a chunk, or not.
    for lengths in ([70, 140], [20, 40]):
        if worst <= 1e-5:
            worst = max(distances(parts, inputs(lengths, decay=0.02), documents(lengths, "cpu")))
    return worst


def test_no_bug(planted):
    assert seen(planted(None, "", "")) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("bug", PLANTS.values(), ids=PLANTS)
def test_bugs_are_seen(planted, bug):
    assert not seen(planted(*bug)) <= 1e-5
