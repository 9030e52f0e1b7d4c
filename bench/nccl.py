"""Verify each mesh axis over NCCL with two ranks on one GPU, three meshes at the same time.

    python -m bench.nccl                        # on a GPU: under a minute
    python -m bench.nccl --axes tp pp           # some of them
    python -m bench.nccl --rehearse             # on a CPU, over gloo, two meshes at a time

Each row is a run of `meshwright verify --dtypes float64 --ranks-per-device 2`. NCCL's warnings go to the end of a
failed row's log, which is printed. Exit code 1: a mesh failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

SECONDS = 35  # of a mesh: one that hangs must be named before the stage ends
AT_ONCE = 3  # contexts share the time of a GPU, and the kernels of NCCL spin
# By axis: a model whose collectives use it, and the options of its mesh.
MESHES = {
    "fsdp": ("tiny-qwen3", "--mesh", "fsdp=2"),
    "tp": ("tiny-qwen3.5", "--mesh", "tp=2"),
    "ep": ("tiny-qwen3-moe", "--mesh", "fsdp=2,ep=2"),
    "cp": ("tiny-qwen3.5", "--mesh", "cp=2"),
    "pp": ("tiny-qwen3", "--mesh", "pp=2"),
    "pp, zero bubble": ("tiny-qwen3", "--mesh", "pp=2", "--schedule", "zero-bubble"),
    "replicate": ("tiny-qwen3-moe", "--mesh", "replicate=2"),
}
ON_ONE_GPU = ("--device", "cuda", "--ranks-per-device", "2")
HEADER = "| axis | mesh | result | checks | worst gradient | seconds |\n|---|---|---|---|---|---|"


@dataclass(frozen=True)
class Verified:
    """The result of a run of `meshwright verify`. `output`: its JSON if it got that far. `log`: what it printed."""

    axis: str
    code: int
    output: dict[str, Any]
    log: str

    @property
    def row(self) -> str:
        runs = self.output.get("runs", [])
        checks = [oracle for run in runs for oracle, findings in run["oracles"].items() if findings is not None]
        gradients = [margin["worst"] for run in runs for margin in run["margins"].get("G1", [])]
        worst, seconds = (f"{max(gradients):.1e}" if gradients else "-"), sum(run["seconds"] for run in runs)
        mesh = " ".join(MESHES[self.axis][2:]).replace("--", "")
        return f"| {self.axis} | {mesh} | {self._result()} | {len(checks)} | {worst} | {seconds:.1f} |"

    def _result(self) -> str:
        if self.code == 0:
            return "all is well"
        failed = {
            oracle for run in self.output.get("runs", []) for oracle, findings in run["oracles"].items() if findings
        }  # fmt: skip
        return f"failed: {', '.join(sorted(failed)) or _last_line(self.log)}"


def verified(axis: str, *on: str) -> Verified:
    """Run `meshwright verify` of an axis. `on`: options that choose the device."""
    command = [sys.executable, "-m", "meshwright", "verify", *MESHES[axis], *on, "--dtypes", "float64"]
    command += ["--against", "none", "--seconds", str(SECONDS), "--json"]
    environment = {"NCCL_DEBUG": "WARN", "NCCL_DEBUG_FILE": "/dev/stderr", **os.environ}  # standard output is JSON
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    begins = done.stdout.find("{\n")
    output = json.loads(done.stdout[begins:]) if done.returncode in (0, 1) and begins >= 0 else {}
    return Verified(axis, done.returncode, output, done.stdout[: max(begins, 0)] + done.stderr)


def _last_line(log: str) -> str:
    return (log.strip().splitlines() or ["no output"])[-1].replace("|", "/")[:150]


def every(axes: list[str], at_once: int, *on: str) -> Iterator[Verified]:
    """Verify axes at the same time, and return each as it ends."""
    with ThreadPoolExecutor(at_once) as pool:
        for done in as_completed([pool.submit(verified, axis, *on) for axis in axes]):
            yield done.result()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--axes", nargs="+", choices=list(MESHES), default=list(MESHES))
    parser.add_argument("--rehearse", action="store_true", help="processes of a CPU, over gloo")
    options = parser.parse_args()
    print(HEADER, flush=True)
    failed = 0
    for result in every(options.axes, 2 if options.rehearse else AT_ONCE, *(() if options.rehearse else ON_ONE_GPU)):
        print(result.row, flush=True)
        if result.code:
            failed = 1
            print(result.log[-3000:], json.dumps(result.output.get("runs", []))[:3000], sep="\n", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
