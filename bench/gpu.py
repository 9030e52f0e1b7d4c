"""Measure a step on one GPU: its seconds, its dearest kernels, and the same with our kernels switched off."""

from __future__ import annotations

import contextlib
import gc
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile

from bench.machine import versions
from meshwright.ops import kernels
from meshwright.ops.kernels import trials
from meshwright.plan.devices import peak_of

DEAREST = 10


@dataclass(frozen=True)
class Device:
    """The device that is measured; on a CPU a rehearsal, whose times mean nothing."""

    kind: str = "cuda"
    rounds: int = 5

    @property
    def rehearses(self) -> bool:
        return self.kind == "cpu"

    @property
    def name(self) -> str:
        return platform.machine() if self.rehearses else torch.cuda.get_device_name()

    def synchronize(self) -> None:
        if not self.rehearses:
            torch.cuda.synchronize()

    def forget(self) -> None:
        """Free what earlier measurements held, and count memory anew."""
        gc.collect()
        if not self.rehearses:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak_gb(self, step: Callable[[], object]) -> float:
        if self.rehearses:
            return 0.0
        torch.cuda.reset_peak_memory_stats()
        step()
        return torch.cuda.max_memory_allocated() / 1e9

    def seconds_of(self, step: Callable[[], object]) -> float:
        """Return the median seconds of a step, after two that are not counted."""
        times = [self._timed(step) for _ in range(2 + self.rounds)]
        return statistics.median(times[2:])

    def _timed(self, step: Callable[[], object]) -> float:
        self.synchronize()
        began = time.perf_counter()
        step()
        self.synchronize()
        return time.perf_counter() - began

    def mfu(self, flops_per_second: float) -> str:
        """Return the share of the vendor's bfloat16 rate, in percent; "-" where that is unknown."""
        peak = peak_of(self.name)
        return f"{flops_per_second / peak:.0%}" if peak else "-"


def provenance(device: Device) -> str:
    """Name the device and the versions that decide what runs on it."""
    nccl = "" if device.rehearses else f", NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    return f"{device.name}, {versions()}{nccl}"


PROFILE_HEADER = "| model | side, kind | kernel | ms | launches | of the step |\n|---|---|---|---|---|---|"


def profiled(device: Device, label: str, step: Callable[[], object]) -> None:
    """Print the dearest kernels of a step as rows, and how much of it the device was busy."""
    activity = ProfilerActivity.CPU if device.rehearses else ProfilerActivity.CUDA
    device.synchronize()
    with profile(activities=[activity]) as seen:
        seconds = device._timed(step)
    costs = [(_own_us(device, event), event.count, event.key) for event in seen.key_averages()]
    print(PROFILE_HEADER)
    print(
        f"| {label} | all kernels | {sum(us for us, *_ in costs) / 1e3:.1f} | - | {seconds:.3f} s with the profiler |"
    )
    for us, count, key in sorted(costs, reverse=True)[:DEAREST]:
        print(f"| {label} | {key[:90].replace('|', '/')} | {us / 1e3:.2f} | {count} | {us / seconds / 1e6:.1%} |")


def _own_us(device: Device, event: torch.autograd.profiler_util.FunctionEventAvg) -> float:
    return float(event.self_cpu_time_total if device.rehearses else event.self_device_time_total)


@contextlib.contextmanager
def formulas_only() -> Iterator[None]:
    """Run the formulas in place of our Triton kernels, as where the gate of each refuses it."""
    agrees = kernels.agrees

    def refuses_ours(kernel: kernels.Op, *others: object) -> bool:
        return "triton" not in kernel.__name__ and agrees(kernel, *others)  # type: ignore[arg-type] # passed on

    with (
        patch.object(trials, "_compare", lambda *_: False), patch.dict(trials._passed, clear=True),
        patch.object(kernels, "agrees", refuses_ours), patch.dict(kernels._agreed, clear=True),
    ):  # fmt: skip
        yield
