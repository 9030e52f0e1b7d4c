"""One rank of 16,384: what it stores is what was planned, and a step's bookkeeping stays small."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from bench import scale
from meshwright.ops.garbage import collector_paused
from tests import parts, worlds


@pytest.mark.slow
@pytest.mark.parametrize("name", parts.every(2, scale.MODELS, 1))
def test_a_rank_of_16384(tmp_path: Path, name: str) -> None:
    layers = {} if parts.ALL else {"num_hidden_layers": 8}  # three of four are delta nets
    source = scale.files_of({**scale.MODELS[name], **layers}, tmp_path / name)
    [result] = worlds.run(1, scale.measured, source, scale.MESHES[name][16384], 5461, seconds=100)
    assert result["stored"] == result["planned"]
    assert result["step"] < 5, "milliseconds"
    assert result["load"] < 30, "seconds, of which the machine may be short"


def test_the_collector_sleeps_while_a_model_is_made() -> None:
    walked: list[int] = []
    note = lambda _phase, info: walked.append(info["generation"])  # noqa: E731 - one line reads better
    gc.callbacks.append(note)
    try:
        with collector_paused():
            walked.clear()
            made = [[number] for number in range(10 * gc.get_threshold()[0])]
            assert made
            assert not walked
            assert not gc.isenabled()
        assert gc.isenabled()
    finally:
        gc.callbacks.remove(note)
    gc.disable()
    try:
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled(), "as it was before"
    finally:
        gc.enable()
