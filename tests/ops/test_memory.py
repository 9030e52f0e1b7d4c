from pathlib import Path

import pytest
import torch

from meshwright.ops import host_memory
from meshwright.ops.host_memory import with_huge_pages

MIB = 1 << 20


def advised(block: torch.Tensor) -> bool:
    """Whether the mapping in the middle of the block is marked for huge pages."""
    middle, inside = block.data_ptr() + block.nbytes // 2, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if not first.endswith(":"):
            begin, end = (int(x, 16) for x in first.split("-"))
            inside = begin <= middle < end
        elif inside and first == "VmFlags:":
            return "hg" in rest.split()
    raise AssertionError("no mapping holds the block")


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a kernel without transparent huge pages"
)
def test_large_blocks_are_marked():
    assert advised(with_huge_pages(torch.empty(40 * MIB, dtype=torch.uint8)))


def test_small_ones_are_left_alone(monkeypatch):
    """What is asked for and not what the mapping says: a block may lie where an earlier one was marked and freed."""
    asked = []
    monkeypatch.setattr(host_memory, "_of_libc", lambda name: lambda *arguments: asked.append(name))
    with_huge_pages(torch.empty(20 * MIB, dtype=torch.uint8))
    assert not asked
    with_huge_pages(torch.empty(40 * MIB, dtype=torch.uint8))
    assert asked == ["madvise"]


def test_any_block_comes_back_as_it_is():
    for block in (torch.arange(6), torch.empty(0), torch.empty(3, device="meta"), torch.ones(48 * MIB // 4)[1:]):
        before = block.clone()
        assert with_huge_pages(block) is block
        assert block.is_meta or torch.equal(block, before)
