"""A killed rank leaves no trace in what a run ends with: moments of those that `python -m tests.killed` tries."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import parts
from tests.killed import at_random_moments


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_rank_leaves_no_trace(tmp_path: Path) -> None:
    for found, wrong in at_random_moments(tmp_path, 2 if parts.ALL else 1, seed=1, steps=12):
        assert wrong == [], str(found)
