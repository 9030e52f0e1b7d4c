"""C1 on records that no run can make. tests/test_causes.py plants bugs in runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch.distributed as dist

import meshwright as mw
from meshwright.verify import RecordedCollective, Run, Trial, collective_checks
from tests import tiny, trials, worlds


def recorded_otherwise(trial: Trial, ref: Any) -> list[str]:
    """Return the findings of C1 where ranks recorded different orders. The watch stops any such run earlier."""
    engine = trial.engine(mw.Mesh(fsdp=2))
    run = Run(trial, ref, engine)
    recorded = [RecordedCollective(op, (0, 1), 8) for op in ("all_gather", "all_reduce")]
    run.step_collectives = recorded[:: 1 if dist.get_rank() else -1]
    return [str(f) for f in collective_checks.c1_collectives(run)]


def test_recorded_orders_that_differ(tmp_path: Path) -> None:
    trial = trials.trial(tiny.directory(tmp_path / "m", "qwen3"), dict(fsdp=2))
    for lines in worlds.run(2, recorded_otherwise, trial, trials.reference(trial)):
        assert any(re.search(r"C1 \[0, 1\]: .*\b[01] and [01]\b.*\bcollective 0\b", line) for line in lines), lines
