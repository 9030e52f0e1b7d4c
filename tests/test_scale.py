"""One rank of 16,384: what it stores is what was planned, and a step's bookkeeping stays small."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import scale
from tests import worlds


@pytest.mark.parametrize("name", scale.MODELS)
def test_a_rank_of_16384(tmp_path: Path, name: str) -> None:
    source = scale.files_of(scale.MODELS[name], tmp_path / name)
    [found] = worlds.run(1, scale.measured, source, scale.MESHES[name][16384], 5461, seconds=100)
    assert found["stored"] == found["planned"]
    assert found["step"] < 5, "milliseconds"
    assert found["load"] < 30, "seconds, of which the machine may be short"
