"""Ops with our Triton kernels and with the formulas for which they stand, and the speed of matmuls; for bench.kernels.

An op runs twice through the same call: as the gate of its kernel decides, and with every kernel of ours refused. Rows
are multiplied by the matrices of experts in each of the three ways of ops/experts.py, whatever it would choose.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu import Device, formulas_only
from bench.machine import version_of
from meshwright.ops import documents, rows, token_stats
from meshwright.ops.fp8_matmul import fp8_linear

attention = importlib.import_module("meshwright.ops.attention")  # the package has functions under these names
experts = importlib.import_module("meshwright.ops.experts")

Milliseconds = Callable[[Callable[[], object]], float]
Call = Callable[..., Tensor]
Multiply = Callable[[Tensor, Tensor, bool], Tensor]


@dataclass(frozen=True)
class Op:
    """An op. `formula`: what the kernel replaces where no gate chooses between them."""

    name: str
    size: str
    call: Call
    inputs: Sequence[Tensor]
    formula: Call | None = None
    trained: Sequence[int] = field(default=())  # inputs that get a gradient

    def results(self, call: Call) -> list[Tensor]:
        """Run forward, and backward where an input is trained. -> output, gradients"""
        return self.run(call, [x.clone() for x in self.inputs])  # some ops write into their input

    def run(self, call: Call, inputs: Sequence[Tensor] | None = None) -> list[Tensor]:
        given = [x.detach().requires_grad_(at in self.trained) for at, x in enumerate(inputs or self.inputs)]
        y = call(*given)
        leaves = [given[at] for at in self.trained]
        return [y.detach(), *(torch.autograd.grad(y, leaves, torch.ones_like(y)) if leaves else ())]


def noise(device: Device, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    g = torch.Generator(device.kind).manual_seed(sum(shape))
    return torch.randn(*shape, generator=g, device=device.kind, dtype=torch.float32).to(dtype)


def ops(device: Device) -> Iterator[Op]:
    """Make the ops of a step of Qwen3 at the sizes of 1.7B and of 30B-A3B, one at a time; small ones on a CPU."""
    T, D, V, E, R = (128, 128, 997, 4, 128) if device.rehearses else (8192, 2048, 151936, 128, 1536)
    labels = torch.randint(V, (T,), device=device.kind)
    stats = partial(token_stats, labels_T=labels, entropy=False)
    weight = noise(device, V, D, dtype=torch.float32) / 50
    yield Op("loss", f"{T} x {V}, width {D}", stats, [noise(device, T, D), weight], trained=(0, 1))
    matrix = noise(device, 6 * D, D)
    yield Op("FP8 product", f"{T} x {D} -> {6 * D}", fp8_linear, [noise(device, T, D), matrix])
    counts = torch.arange(E, device=device.kind) % 9
    zeros = partial(experts.without_unused, counts_E=counts)
    yield Op("zeros of experts without rows", f"{E} x {R} x {D}", zeros, [noise(device, E, R, D)])
    order = torch.randperm(8 * T, device=device.kind)
    yield Op("sum of 8 rows", f"{8 * T} x {D}", partial(rows.sum_rows, at_N=order, num=8), [noise(device, 8 * T, D)])
    docs = documents([T // 2, T // 2], device.kind)
    streams = [noise(device, T, heads, 128) for heads in (16, 8, 8)]
    one, each = (partial(op, docs=docs) for op in (attention._equal_documents, attention._by_document))
    yield Op("attention of equal documents", f"2 x {T // 2}, heads 16 / 8", one, streams, each, (0, 1, 2))


def compared(device: Device, milliseconds: Milliseconds) -> None:
    print("\n| op | size | off by | kernel ms | formula ms | formula / kernel |\n|---|---|---|---|---|---|", flush=True)
    for op in ops(device):
        results = op.results(op.call)
        kernel = milliseconds(partial(op.run, op.call))
        with formulas_only():
            expected = op.results(op.formula or op.call)
            formula = milliseconds(partial(op.run, op.formula or op.call))
        off = max(
            float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(results, expected, strict=True)
        )
        print(
            f"| {op.name} | {op.size} | {off:.1e} | {kernel:.3f} | {formula:.3f} | {formula / kernel:.2f} |", flush=True
        )
        del results, expected


def products(device: Device, milliseconds: Milliseconds) -> None:
    """Print how fast torch multiplies at the sizes of 1.7B, and at those of the experts of 30B-A3B."""
    T, D, E, R = (128, 128, 4, 128) if device.rehearses else (65536, 2048, 128, 1536)
    x, d, w = noise(device, T, D), noise(device, T, R), noise(device, E, R, D)
    ends = torch.arange(1, E + 1, device=device.kind, dtype=torch.int32) * (T // E)
    calls = {
        "linear": lambda: F.linear(x, w[0]),
        "batched": lambda: torch.bmm(x.view(E, -1, D), w.mT),
        "grouped, forward": lambda: F.grouped_mm(x, w.mT, offs=ends),
        "grouped, dx": lambda: F.grouped_mm(d, w, offs=ends),
        "grouped, dW": lambda: F.grouped_mm(d.mT, x, offs=ends),
    }
    print("\n| product | size | ms | TFLOP/s | MFU |\n|---|---|---|---|---|", flush=True)
    for name, call in calls.items():
        ms = milliseconds(call)
        speed = 2 * T * D * R / ms * 1e3
        print(
            f"| {name} | {T} x {D} -> {R}, {E} experts | {ms:.3f} | {speed / 1e12:.0f} | {device.mfu(speed)} |",
            flush=True,
        )


def grouped(device: Device, milliseconds: Milliseconds) -> None:
    """Print what rows by experts' matrices take, forward and backward: in 30B-A3B, and of adapters of its `gate_up`."""
    num, D, F_, E = (64, 32, 16, 10) if device.rehearses else (65536, 2048, 768, 128)
    share_E = torch.arange(E, device=device.kind) % 9  # an expert in nine has no rows, and one twice the mean
    counts_E = share_E * num // share_E.sum()
    counts_E[-1] += num - counts_E.sum()
    print("\n| rows by expert | side | sizes | off by | ms | TFLOP/s | MFU |", "|---" * 7 + "|", sep="\n", flush=True)
    cases = {"gate_up": [(2 * F_, D)], "down": [(D, F_)]}
    for name, shapes in (cases | {f"adapters of rank {r}": [(r, D), (2 * F_, r)] for r in (16, 4)}).items():
        _print_ways(device, milliseconds, name, counts_E, _streams(device, num, E, shapes))


def _streams(device: Device, num: int, E: int, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Draw rows and the matrices that multiply them one after the other."""
    dtype = torch.float32 if device.rehearses else torch.bfloat16  # what torch groups on a CPU
    weights = [noise(device, E, *shape, dtype=dtype) / shape[1] ** 0.5 for shape in shapes]
    return [noise(device, num, shapes[0][1], dtype=dtype), *weights]


def _print_ways(
    device: Device, milliseconds: Milliseconds, name: str, counts_E: Tensor, streams: Sequence[Tensor]
) -> None:  # fmt: skip
    """Print the time of each way, and how far off the loop it is."""
    x, *weights = streams
    sizes = " x ".join(map(str, [len(x), x.shape[1], *(weight.shape[1] for weight in weights)]))
    expected: list[Tensor] = []
    for side, way in _ways(x, weights, counts_E).items():
        op = Op(name, sizes, partial(_in_turn, way), streams, trained=range(len(streams)))
        try:
            results, ms = op.run(op.call), milliseconds(partial(op.run, op.call))
        except Exception as error:  # noqa: BLE001 - whatever a kernel raises, the others are still timed
            print(f"    {side} refuses {name}: {type(error).__name__} {str(error)[:150]}", flush=True)
            continue
        expected = expected or results
        off = max(
            float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(results, expected, strict=True)
        )
        speed = 6 * len(x) * sum(weight[0].numel() for weight in weights) / ms * 1e3
        print(f"| {name} | {side} | {sizes} | {off:.1e} | {ms:.3f} | {speed / 1e12:.0f} | {device.mfu(speed)} |")


def _in_turn(way: Callable[[], Multiply], x: Tensor, *weights: Tensor) -> Tensor:
    """Multiply rows by the matrices of one weight after the other."""
    multiply = way()
    for weight in weights:
        x = multiply(x, weight, False)
    return x


def _ways(x: Tensor, weights: Sequence[Tensor], counts_E: Tensor) -> dict[str, Callable[[], Multiply]]:
    """Return the ways that this machine has; the loop, the reference, comes first."""
    given = rows.Rows(x, x.new_ones(len(x)), counts_E, None, lambda y_ND: y_ND)
    ways = {"loop": partial(experts._looped, given)}
    if all(experts.can_group(x, weight) for weight in weights):
        ways["torch's"] = partial(experts._grouped, counts_E, F.grouped_mm)
    if version_of("triton"):
        ways["ours"] = partial(experts._grouped, counts_E, experts.OUR_PRODUCT)
    else:
        print("triton is not installed: our grouped product is left out", flush=True)
    return ways
