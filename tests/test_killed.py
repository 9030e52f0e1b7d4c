"""A killed rank leaves no trace in the state of a finished run. `python -m tests.killed` tries more moments."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import parts
from tests.killed import at_random_moments


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_rank_leaves_no_trace(tmp_path: Path) -> None:
    mesh, num = ({"fsdp": 2, "tp": 2}, 2) if parts.ALL else ({"fsdp": 2}, 1)
    for kill, wrong in at_random_moments(tmp_path, num, seed=1, steps=8, mesh=mesh):
        assert wrong == [], str(kill)
