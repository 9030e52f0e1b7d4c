"""Copies of storages in host buffers, function by function."""

import pytest
import torch

from meshwright.ops import host_memory
from meshwright.ops.host_memory import HostCopy, bytes_of, storages_of, to_device


def test_a_storage_is_counted_once_and_an_empty_one_never():
    whole, other = torch.arange(6.0), torch.arange(3)
    actual = storages_of([whole[1:3], other, torch.empty(0), whole[4:], whole])
    assert {at: storage.nbytes() for at, storage in actual.items()} == {whole.data_ptr(): 24, other.data_ptr(): 24}


@pytest.mark.parametrize(
    ("capacity", "lengths"), [(64, [64] * 6), (100, [100, 100, 100, 84]), (384, [384]), (1000, [384]), (383, [383, 1])]
)
def test_storages_come_back_from_buffers_of_any_size(capacity, lengths, monkeypatch):
    """They have 1, 64, 65 and 100 bytes, which take 64, 64, 128 and 128 bytes of the buffers."""
    monkeypatch.setattr(host_memory, "_PINNED_BYTES", capacity)
    tensors = [torch.randint(1, 256, (size,), dtype=torch.uint8) for size in (1, 64, 65, 100)]
    expected, versions = [x.clone() for x in tensors], [x._version for x in tensors]
    copy = HostCopy.of([tensors[0], tensors[1], tensors[1], tensors[2][3:], tensors[3]])
    assert [len(buffer) for buffer in copy.buffers] == lengths
    assert (copy.num_bytes, [*copy.sizes]) == (230, [1, 64, 65, 100])
    flat = torch.cat([*copy.buffers])
    for start, each in zip((0, 64, 128, 256), expected, strict=True):
        assert torch.equal(flat[start : start + len(each)], each)
    copy.free()
    assert [x.untyped_storage().nbytes() for x in tensors] == [0] * 4
    copy.restore()
    assert all(torch.equal(x, each) for x, each in zip(tensors, expected, strict=True))
    assert [x._version for x in tensors] == versions


def test_nothing_takes_no_buffer():
    copy = HostCopy.of([torch.empty(0)])
    copy.free()
    copy.restore()
    assert (copy.num_bytes, [*copy.buffers]) == (0, [])


def test_bytes_are_the_memory_of_a_tensor_from_its_first_element():
    x = torch.arange(5, dtype=torch.int16)
    view = bytes_of(x[1:4])
    assert view.tobytes() == bytes([1, 0, 2, 0, 3, 0])
    view[0] = 9
    assert x.tolist() == [0, 9, 2, 3, 4]
    assert bytes_of(torch.empty(0)).nbytes == 0


def test_a_host_copy_to_the_host_is_the_tensor_itself():
    x = torch.ones(3)
    assert to_device(x, "cpu") is x
    assert to_device(x, "meta").device.type == "meta"


class OnHost:
    """A tensor as far as `to_device` looks at it: which calls it gets."""

    def __init__(self, pinned, device="cpu", calls=()):
        self.pinned, self.device, self.calls = pinned, torch.device(device), list(calls)

    def is_pinned(self):
        return self.pinned

    def __getattr__(self, name):
        return lambda *args, **options: OnHost(self.pinned, self.device, [*self.calls, (name, *args, options)])


@pytest.mark.parametrize(
    ("x", "calls"),
    [
        (OnHost(False), [("contiguous", {}), ("pin_memory", {}), ("to", "cuda", {"non_blocking": True})]),
        (OnHost(True), [("clone", {}), ("pin_memory", {}), ("to", "cuda", {"non_blocking": True})]),
        (OnHost(False, "cuda"), [("to", "cuda", {})]),
    ],
    ids=["pageable", "pinned", "not on the host"],
)
def test_a_copy_to_a_device_is_queued_from_pinned_memory_of_its_own(x, calls):
    """The owner of a pinned tensor may write to it at once."""
    assert to_device(x, "cuda").calls == calls
