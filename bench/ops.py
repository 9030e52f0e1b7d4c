"""Ops with our Triton kernels and with the formulas for which they stand, and the speed of matmuls; for bench.kernels.

An op runs twice through the same call: as the gate of its kernel decides, and with every kernel of ours refused.
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
from meshwright.ops import documents, rows, token_stats
from meshwright.ops.fp8_matmul import fp8_linear

attention = importlib.import_module("meshwright.ops.attention")  # the package has functions under these names
experts = importlib.import_module("meshwright.ops.experts")

Milliseconds = Callable[[Callable[[], object]], float]
Call = Callable[..., Tensor]


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
    words = torch.randint(V, (T,), device=device.kind)
    stats = partial(token_stats, labels_T=words, entropy=False)
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
