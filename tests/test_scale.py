"""One rank of 16,384: what it stores is what was planned, and a step's bookkeeping stays small."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest

from bench import scale
from meshwright.engine.garbage import nothing_collected
from tests import parts, worlds


@pytest.mark.parametrize("name", parts.every(2, scale.MODELS, 1))
def test_a_rank_of_16384(tmp_path: Path, name: str) -> None:
    source = scale.files_of(scale.MODELS[name], tmp_path / name)
    [found] = worlds.run(1, scale.measured, source, scale.MESHES[name][16384], 5461, seconds=100)
    assert found["stored"] == found["planned"]
    assert found["step"] < 5, "milliseconds"
    assert found["load"] < 30, "seconds, of which the machine may be short"


def test_the_collector_sleeps_while_a_model_is_made() -> None:
    walked: list[int] = []
    note = lambda _phase, info: walked.append(info["generation"])  # noqa: E731 - one line reads better
    gc.callbacks.append(note)
    try:
        with nothing_collected():
            walked.clear()
            made = [[number] for number in range(10 * gc.get_threshold()[0])]
            assert not gc.isenabled()
        assert not walked
        assert gc.isenabled()
        assert not any(each is made[0] for each in gc.get_objects(0)), "it is old"
        assert any(each is made[0] for each in gc.get_objects(2))
    finally:
        gc.callbacks.remove(note)


def test_what_was_dropped_is_freed_before() -> None:
    """Else a model would keep its memory beside the next one."""

    class Dropped:
        def __init__(self) -> None:
            self.itself = self

    seen = weakref.ref(Dropped())
    with nothing_collected():
        assert seen() is None


def test_what_a_user_has_frozen_stays_frozen() -> None:
    kept: list[list[int]] = [[1]]
    gc.freeze()
    try:
        with nothing_collected():
            pass
        assert not any(each is kept for each in gc.get_objects()), "which leaves out what is frozen"
    finally:
        gc.unfreeze()
    assert any(each is kept for each in gc.get_objects())
