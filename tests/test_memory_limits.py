"""Memory limits: ranks share the host of a machine; device and host memory are limited separately."""

from __future__ import annotations

import pytest
import torch

from meshwright.memory.budget import fits
from meshwright.mesh import memory_limits
from meshwright.mesh.memory_limits import Memory, memory_of
from meshwright.sharding import Stored


def test_ranks_of_a_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_limits, "_host_bytes", lambda: 1000)
    assert memory_of(torch.device("cpu"), 3) == Memory(333, 333, shared=True)


@pytest.mark.parametrize(
    ("device", "host", "apart", "together"), [(60, 90, True, False), (61, 10, False, True), (10, 91, False, True)]
)
def test_device_and_host_count_apart_unless_they_share_memory(
    device: int, host: int, apart: bool, together: bool
) -> None:
    stored = [Stored("parameters", device), Stored("masters", host, host=True)]
    assert fits(stored, Memory(60, 90, shared=False)) == apart
    assert fits(stored, Memory(120, 120, shared=True)) == together
