"""Our Triton kernels beside the formulas they stand for and the kernels of others: how far off, how fast, how large.

    python -m bench.kernels               # on a GPU: two or three minutes, most of them compiling
    python -m bench.kernels --tune        # and every launch of `CHOICES`, compared before it is timed
    python -m bench.kernels --rehearse    # on a CPU: tiny sizes in Triton's interpreter, in float16; times mean nothing

First the ops and products of bench/ops.py, then the gated delta rule, the only kernel with launches to choose. On a CPU
the gates choose the formulas of all others, which tests/test_kernels_*.py interpret.

Distances are from the formula in float64, as shares of the norm: output, then each gradient. Milliseconds are medians,
and MB what is kept between forward and backward beside the inputs. A launch is compared first because a compiler may
get one of them wrong and all others right: flash-linear-attention, issue 984, on Hopper.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

if "--rehearse" in sys.argv:  # whoever imports Triton first decides it for the process, and torch does
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor

from bench import ops
from bench.gpu import Device, provenance
from bench.machine import fla_runs, version_of
from meshwright.ops import delta, documents
from meshwright.ops.documents import Documents
from meshwright.ops.kernels import TOLERANCE

Op = Callable[..., Tensor]

# The gated delta rule: lengths of documents, key heads, value heads of each, head dims.
COMPARED = [
    ((1, 2, 67, 130), 2, 1, 128), ((1000, 24, 3000), 4, 2, 128), ((5000,), 2, 4, 128), ((64,) * 20, 2, 3, 128),
    ((500, 300), 2, 1, 96),
]  # fmt: skip
TIMED = [((4096, 4096), 16, 1, 128), ((4096, 4096), 16, 2, 128), ((8192,), 16, 2, 128), ((256,) * 32, 16, 2, 128)]
REHEARSED = [((1, 2, 67), 1, 2, 32)]
# Columns of values, warps and pipeline stages. With 4 warps Triton 3.7 was seen to miscompile a delta rule on Hopper.
CHOICES = {
    "prepare": [(64, 8, 1), (64, 4, 1)],
    "states": [(32, 8, 3), (32, 8, 2), (64, 8, 3), (16, 4, 3), (32, 4, 2)],
    "outputs": [(64, 8, 1), (64, 4, 1), (32, 8, 1)],
    "output_gradients": [(32, 8, 2), (64, 8, 1), (16, 8, 1)],
    "state_gradients": [(32, 8, 3), (32, 8, 2), (16, 4, 3)],
    "solved_gradients": [(32, 8, 1), (16, 8, 1), (32, 8, 2), (64, 8, 1)],
}


def inputs(case: tuple[Sequence[int], int, int, int], device: str) -> tuple[list[Tensor], Documents]:
    lengths, G, R, K = case
    noise, dtype = torch.Generator().manual_seed(0), torch.float16 if device == "cpu" else torch.bfloat16

    def rand(*shape: int) -> Tensor:
        return torch.randn(sum(lengths), *shape, generator=noise)

    streams = [x.to(device, dtype) for x in (rand(G, K), rand(G, K), rand(G, R, K))]
    gates = [x.to(device) for x in (-rand(G, R).abs() / 4, rand(G, R).sigmoid())]
    return [x.requires_grad_() for x in (*streams, *gates)], documents(lengths, device)


def results(op: Op, streams: Sequence[Tensor], docs: Documents) -> list[Tensor]:
    y = op(*streams, docs)
    weights = torch.linspace(-1, 1, y.numel(), device=y.device, dtype=torch.float64).view(y.shape)
    return [y.detach(), *torch.autograd.grad((y.double() * weights).sum(), list(streams))]


def distances(actual: Sequence[Tensor], wanted: Sequence[Tensor]) -> list[float]:
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(actual, wanted, strict=True)]


def wide(streams: Sequence[Tensor], docs: Documents) -> list[Tensor]:
    return results(delta.chunked, [x.detach().double().requires_grad_() for x in streams], docs)


def sides() -> dict[str, Op]:
    ours = {"ours": delta._triton_delta_rule, "ours, in two parts": delta._triton_delta_rule_in_parts}
    others = {"flash-linear-attention": delta._fla} if fla_runs() else {}
    return {**ours, **others, "formula": delta.chunked}


def tried(op: Op, *arguments: object) -> list[Tensor] | None:
    """Its results; None, and why, where it does not run."""
    try:
        return results(op, *arguments)  # type: ignore[arg-type] # streams and documents
    except Exception as error:  # noqa: BLE001 - whatever a kernel raises, the others are still compared
        print(f"    {op.__name__} refuses: {type(error).__name__} {str(error)[:150]}", flush=True)
        return None


def compared(cases: Sequence[tuple[Sequence[int], int, int, int]], device: str) -> None:
    print("\n| documents | heads | dims | side | o | dq | dk | dv | dg | dbeta |", "|---" * 10 + "|", sep="\n")
    for case in cases:
        (streams, docs), (lengths, G, R, K) = inputs(case, device), case
        wanted = wide(streams, docs)
        for name, op in sides().items():
            actual = tried(op, streams, docs)
            if actual is not None:
                off = " | ".join(f"{each:.1e}" for each in distances(actual, wanted))
                print(f"| {shortened(lengths)} | {G} x {R} | {K} | {name} | {off} |", flush=True)


def timed(cases: Sequence[tuple[Sequence[int], int, int, int]], device: str) -> None:
    print("\n| documents | heads | side | forward ms | backward ms | kept MB |\n|---|---|---|---|---|---|")
    for case in cases:
        (streams, docs), (lengths, G, R, _) = inputs(case, device), case
        for name, op in sides().items():
            if tried(op, streams, docs) is not None:
                forward, backward, kept = cost(op, streams, docs)
                print(
                    f"| {shortened(lengths)} | {G} x {R} | {name} | {forward:.3f} | {backward:.3f} | {kept:.0f} |",
                    flush=True,
                )


def cost(op: Op, streams: Sequence[Tensor], docs: Documents) -> tuple[float, float, float]:
    """Milliseconds of both directions, and MB that are kept between them."""
    before = allocated(streams[0])
    y = op(*streams, docs)
    kept = allocated(streams[0]) - before - y.numel() * y.element_size()
    d, forward = torch.randn_like(y), milliseconds(lambda: op(*streams, docs), y.device.type)
    backward = milliseconds(lambda: torch.autograd.grad(y, list(streams), d, retain_graph=True), y.device.type)
    return forward, backward, kept / 1e6


def allocated(x: Tensor) -> int:
    return torch.cuda.memory_allocated() if x.device.type == "cuda" else 0


def milliseconds(call: Callable[[], object], kind: str, rounds: int = 20) -> float:
    """Time the device: work is queued behind a first call, so that the host's share does not count."""
    if kind == "cpu":
        began = time.perf_counter()
        call()
        return (time.perf_counter() - began) * 1e3
    for _ in range(3):
        call()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairwise(events))


def tuned(case: tuple[Sequence[int], int, int, int], device: str) -> None:
    """Every launch of each kernel, with the fastest right ones of the kernels before it."""
    kernels = delta._triton_module()
    streams, docs = inputs(case, device)
    small, few = inputs(REHEARSED[0] if device == "cpu" else COMPARED[1], device)
    wanted = wide(small, few)
    print("\n| kernel | columns, warps, stages | off by | forward ms | backward ms |\n|---|---|---|---|---|")
    for kernel, launch in list(kernels.TUNED.items()):
        best, choices = launch, []
        for choice in CHOICES[kernel.__name__]:
            kernels.TUNED[kernel] = kernels.Tuning(*choice)
            actual = tried(delta._triton_delta_rule, small, few)
            if actual is None:
                continue
            off, (forward, backward, _) = max(distances(actual, wanted)), cost(delta._triton_delta_rule, streams, docs)
            print(f"| {kernel.__name__} | {choice} | {off:.1e} | {forward:.3f} | {backward:.3f} |", flush=True)
            choices += [(forward + backward, kernels.Tuning(*choice))] if off <= TOLERANCE else []
        kernels.TUNED[kernel] = min(choices)[1] if choices else best
    print("TUNED =", {kernel.__name__: tuple(launch) for kernel, launch in kernels.TUNED.items()})


def fenced(table: Callable[..., None], *arguments: object) -> None:
    """Print a table. One that fails is a line, and stops no other."""
    try:
        table(*arguments)
    except Exception as error:  # noqa: BLE001 - any failure
        print(f"failed: {table.__name__}: {type(error).__name__} {error}", flush=True)


def shortened(lengths: Sequence[int]) -> str:
    return f"{len(lengths)} x {lengths[0]}" if len(set(lengths)) == 1 else "+".join(map(str, lengths))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="try every launch of each kernel")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on a CPU, in the interpreter")
    options = parser.parse_args()
    device = "cpu" if options.rehearse else "cuda"
    on = Device(device)
    print(provenance(on), flush=True)
    for table in (ops.compared, ops.products, ops.grouped):
        fenced(table, on, partial(milliseconds, kind=device))
    if not version_of("triton"):
        print("triton is not installed: the delta rule is left out, and the tests of kernels are skipped")
        return
    compared(REHEARSED if options.rehearse else COMPARED, device)
    timed(REHEARSED if options.rehearse else TIMED, device)
    if options.tune:
        tuned(REHEARSED[0] if options.rehearse else TIMED[1], device)


if __name__ == "__main__":
    main()
