"""Two ranks over NCCL on one GPU, or over gloo, one of which is killed or falls asleep in its second step.

python -m tests.lost_on_device cuda asleep MODEL

A program of its own: ranks are forked, and a process that has used CUDA, as tests may have, must not fork them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

import meshwright as mw
from meshwright.mesh.shared_devices import environment_of
from meshwright.verify import run_ranks
from meshwright.watch import heartbeat
from tests import tiny
from tests.test_lost_ranks import asleep, at_a_door, killed

# NCCL's watchdog ends a rank at the timeout. The diagnosis is due a tenth of it earlier, and takes 2.5 beats.
TIMEOUT_S = {"cuda": 20.0, "cpu": 3.0}
BEAT_S = 0.4
ACTS = {"killed": killed, "asleep": asleep}


def train(device: str, act: str, source: Path) -> None:
    """Take a step, then one in which rank 1 acts in the forward of its second micro-batch."""
    heartbeat.BEAT_S = BEAT_S
    if device == "cuda":
        os.environ.update(environment_of(int(os.environ["RANK"]), 2))
    mesh = mw.Mesh(tp=2, device=device, timeout_s=TIMEOUT_S[device])
    engine = mw.Engine(mw.load(source, mesh, dtype=torch.float64), lr=1e-2)
    engine.step(tiny.batches(0))
    if mesh.rank == 1:
        at_a_door("layers.1.mixer.enter", 2, ACTS[act])(engine)
    engine.step(tiny.batches(0))


if __name__ == "__main__":
    run_ranks(2, train, sys.argv[1], sys.argv[2], Path(sys.argv[3]), seconds=2 * TIMEOUT_S[sys.argv[1]] + 20)
