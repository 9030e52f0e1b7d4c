"""Check messages, specs and buckets of the weight sync, function by function, in one process."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.errors import ConfigError, RankError
from meshwright.weight_sync import (
    TensorSpec,
    apply_delta,
    receive_from_group,
    receive_from_process,
    send_to_group,
    shared_memory,
)
from meshwright.weight_sync import group as weight_group
from meshwright.weight_sync import process as weight_process
from meshwright.weight_sync.buckets import unpack
from meshwright.weight_sync.process import _Channel, _Gone
from meshwright.weight_sync.specs import of_json, to_json

DTYPES = {
    torch.float64: 8, torch.float32: 4, torch.float16: 2, torch.bfloat16: 2, torch.int64: 8, torch.int32: 4,
    torch.int16: 2, torch.int8: 1, torch.uint8: 1, torch.bool: 1, torch.float8_e4m3fn: 1, torch.float8_e5m2: 1,
    torch.float8_e8m0fnu: 1,
}  # fmt: skip


def test_specs_of_every_dtype_return_from_json() -> None:
    specs = [TensorSpec(str(dtype), (3, 1, 5), dtype) for dtype in DTYPES]
    assert of_json(to_json(specs)) == specs
    assert [spec.num_bytes for spec in specs] == [15 * size for size in DTYPES.values()]
    assert to_json([TensorSpec("a", (), torch.bool)]) == [["a", [], "bool"]]
    assert [TensorSpec("a", shape, torch.int16).num_bytes for shape in ((), (0, 4))] == [2, 0]


@pytest.mark.parametrize("seen", [("b", (2, 3), "float32"), ("a", (3, 2), "float32"), ("a", (2, 3), "int32")])
def test_a_tensor_that_was_not_announced_is_refused(seen: tuple[str, tuple[int, ...], str]) -> None:
    spec = TensorSpec("a", (2, 3), torch.float32)
    spec.check("a", torch.empty(2, 3))
    with pytest.raises(ConfigError, match=rf"yields {seen[0]} .*announced a \[2, 3\] float32"):
        spec.check(seen[0], torch.empty(seen[1], dtype=getattr(torch, seen[2])))


def test_a_delta_reaches_both_bounds_of_a_tensor() -> None:
    tensor = torch.zeros(2, 3, requires_grad=True)
    apply_delta(tensor, torch.tensor([5, 0], dtype=torch.int32), torch.tensor([7.0, 2.0]))
    apply_delta(tensor, torch.empty(0, dtype=torch.int32), torch.empty(0))
    assert tensor.tolist() == [[2, 0, 0], [0, 0, 7]]
    for indices, values in (([6], [1.0]), ([-1], [1.0]), ([0, 6], [1.0, 1.0]), ([0, 1], [1.0]), ([0], [1.0, 2.0])):
        with pytest.raises(ConfigError):
            apply_delta(tensor, torch.tensor(indices), torch.tensor(values))
    for other in (torch.zeros(2, 3).half(), torch.zeros(3, 2).T):
        with pytest.raises(ConfigError, match="keep whole contiguous tensors"):
            apply_delta(other, torch.tensor([0]), torch.tensor([1.0]))
    assert tensor.tolist() == [[2, 0, 0], [0, 0, 7]]


class Group:
    """A process group of one sender, which records its messages, or of a receiver, which gets those of a sender."""

    def __init__(self, rank: int, sent: list[Tensor], lost_at: int | None = None) -> None:
        self.own, self.sent, self.lost_at, self.number, self.roots = rank, sent, lost_at, 0, set[int]()

    def rank(self) -> int:
        return self.own

    def size(self) -> int:
        return 3

    def broadcast(self, tensors: list[Tensor], options: Any) -> Any:
        if self.number == self.lost_at:
            raise RuntimeError("reset by peer")
        self.roots.add(options.rootRank)
        if self.own == 1:
            self.sent.append(tensors[0].clone())
        else:
            tensors[0].copy_(self.sent[self.number])
        self.number += 1
        return SimpleNamespace(wait=lambda: None)


SPECS = [
    TensorSpec("b", (), torch.int8),
    TensorSpec("a", (700,), torch.float32),
    TensorSpec("none", (0,), torch.float32),
]
TENSORS = {"b": torch.tensor(7, dtype=torch.int8), "a": torch.arange(700.0), "none": torch.empty(0)}


def received(sent: list[Tensor]) -> dict[str, Tensor]:
    group: Any = Group(2, sent)
    return dict(receive_from_group(group, 1))


def test_a_group_receives_what_was_sent() -> None:
    """2,801 bytes in buckets of at least 1,024, which begin with eight bytes."""
    for wanted, sizes in ((1, [1032] * 3), (2000, [2008] * 2), (None, [2809]), (9000, [2809])):
        sent: list[Tensor] = []
        group: Any = Group(1, sent)
        send_to_group(TENSORS.items(), SPECS, group, bucket_bytes=wanted)
        assert [len(each) for each in sent[2:]] == sizes
        assert group.roots == {1}
        result = received(sent)
        assert [*result] == [*TENSORS]
        assert all(torch.equal(result[name], TENSORS[name]) for name in TENSORS)


@pytest.mark.parametrize(("after", "number"), [(0, 0), (1, 0), (2, 2)])
def test_an_error_longer_than_a_bucket_is_cut(after: int, number: int) -> None:
    def stream() -> Iterator[tuple[str, Tensor]]:
        yield from [*TENSORS.items()][:after]
        raise ValueError("y" * 3000)

    sent: list[Tensor] = []
    group: Any = Group(1, sent)
    with pytest.raises(ValueError, match="y"):
        send_to_group(stream(), SPECS, group, bucket_bytes=1)
    assert [len(each) for each in sent[2:]] == [1032] * (number + 1)
    with pytest.raises(RankError) as caught:
        received(sent)
    assert str(caught.value).partition(": ")[2] == "ValueError: " + "y" * (1024 - 12)


@pytest.mark.parametrize(
    ("lost_at", "what"), [(0, "the metadata"), (1, "the metadata"), (2, "bucket 1 of 3"), (4, "bucket 3 of 3")]
)
def test_a_lost_receiver_ends_the_stream(lost_at: int, what: str) -> None:
    left: Any = iter(TENSORS.items())
    group: Any = Group(1, [], lost_at)
    with pytest.raises(RankError, match=f"^{what} was not taken by the group: reset by peer"):
        send_to_group(left, SPECS, group, bucket_bytes=1)
    assert list(left) == []


def test_a_message_of_another_sender_is_no_stream() -> None:
    with pytest.raises(RankError, match="no stream of weights"):
        received([torch.full((16,), 200, dtype=torch.uint8)])


def test_a_rank_outside_of_the_group_only_iterates() -> None:
    left = iter(TENSORS.items())
    send_to_group(left, SPECS, None)
    assert list(left) == []


def test_buckets_in_memory_that_was_used_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what was sent counts, and no old bytes of the head say that the sender failed."""
    filled = lambda self, num: torch.full((num,), 255, dtype=torch.uint8)  # noqa: E731 - short
    monkeypatch.setattr(weight_group._Carrier, "empty", filled)
    sent: list[Tensor] = []
    group: Any = Group(1, sent)
    send_to_group(TENSORS.items(), SPECS, group, bucket_bytes=1)
    assert all(torch.equal(tensor, TENSORS[name]) for name, tensor in received(sent).items())


def test_received_tensors_lie_on_the_device_of_the_receiver() -> None:
    tensors = dict(unpack(SPECS, lambda: torch.zeros(5000, dtype=torch.uint8), torch.device("meta")))
    assert {name: (tensor.device.type, tuple(tensor.shape)) for name, tensor in tensors.items()} == {
        "b": ("meta", ()), "a": ("meta", (700,)), "none": ("meta", (0,))
    }  # fmt: skip


def test_a_receiver_waits_only_so_long_for_a_sender(tmp_path: Path) -> None:
    """For one that has not begun to listen, and for one that hangs."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sender:
        sender.bind(str(tmp_path / "it"))
        with pytest.raises(RankError, match=r"no sender listens at .* within 0\.03 s"):
            dict(receive_from_process(tmp_path / "it", timeout_s=0.03))
        sender.listen(1)
        with pytest.raises(RankError, match=r"did not answer for 0\.03 s; the weights are incomplete"):
            dict(receive_from_process(tmp_path / "it", timeout_s=0.03))


def test_the_loss_of_a_sender_is_no_end_of_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, others = socket.socketpair()
    bucket, offered, handle = shared_memory.make(9, torch.device("cpu"))
    assert handle is not None
    values = bucket.tolist()
    with ours:
        sender = _Channel(others)
        sender.say({**offered, "specs": to_json([TensorSpec("a", (3,), torch.uint8)] * 4)})
        sender.give(handle)
        sender.say({"num_bytes": 9})
        monkeypatch.setattr(weight_process, "_connected", lambda *_: nullcontext(ours))
        stream = receive_from_process("it")
        assert [next(stream)[1].tolist() for _ in range(3)] == [values[:3], values[3:6], values[6:]]
        others.close()
        with pytest.raises(RankError, match=r"the sender at it closed the connection.* incomplete"):
            next(stream)


def test_a_message_may_arrive_in_parts() -> None:
    data, asked = b'{"num_bytes":31}', list[int]()
    wire = bytearray(struct.pack("<Q", len(data)) + data + b"next")

    def recv(num: int) -> bytes:
        asked.append(num)
        part = bytes(wire[: min(num, 3)])
        del wire[: len(part)]
        return part

    sock: Any = SimpleNamespace(recv=recv)
    assert _Channel(sock).hear() == {"num_bytes": 31}
    assert asked == [8, 5, 2, 16, 13, 10, 7, 4, 1]
    assert bytes(wire) == b"next"
    with pytest.raises(_Gone, match="closed the connection"):
        _Channel(sock)._exactly(5)


def test_messages_are_heard_as_they_were_said() -> None:
    ours, others = socket.socketpair()
    with ours, others:
        others.settimeout(0.05)
        said, heard = _Channel(ours), _Channel(others)
        for message in ({"a": "é" * 300}, {}):
            said.say(message)
            assert heard.hear() == message
        said.say({"error": "ValueError: no"})
        with pytest.raises(RankError, match="incomplete: ValueError: no"):
            heard.hear()
        with pytest.raises(_Gone, match=r"did not answer for 0\.05 s"):
            heard.hear()
        ours.close()
        with pytest.raises(_Gone, match="closed the connection"):
            heard.take_handle()
        with pytest.raises(_Gone, match="closed the connection"):
            heard.say({})


def test_a_handle_of_a_device_is_opened_as_it_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """All fields of a handle differ, so none can take the place of another."""
    asked, storage = list[Any](), torch.arange(64, dtype=torch.uint8).untyped_storage()
    share = (9, b"\x01", 64, 20, b"\x02", 30, b"\x03", True)
    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", lambda self: share)
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", lambda *given: asked.append(given) or storage)
    monkeypatch.setattr(shared_memory, "finish", lambda device: asked.append(device.type))
    bucket, offered, handle = shared_memory.make(5, torch.device("meta"))
    assert (len(bucket), handle, offered["num_bytes"]) == (5, None, 5)
    assert offered["ipc"] == [9, "01", 64, 20, "02", 30, "03", True, 0]
    ipc = [*offered["ipc"][:-1], 40]  # where the bucket begins in the memory of the handle
    device: Any = SimpleNamespace(type="cuda")
    monkeypatch.setattr(shared_memory.torch, "empty", lambda *size, device, dtype=None: torch.zeros(*size, dtype=dtype))
    attached = shared_memory.attach({**offered, "ipc": ipc, "mark": bytes(range(40, 56)).hex()}, None, device)
    assert attached.tolist() == [40, 41, 42, 43, 44]
    assert asked == ["meta", (None, b"\x01", 64, 20, b"\x02", 30, b"\x03", True)]


@pytest.mark.parametrize(("size", "padded"), [(1, 16), (5, 16), (16, 16), (40, 40), (100_000, 100_000)])
def test_a_bucket_smaller_than_its_mark(size: int, padded: int) -> None:
    cpu = torch.device("cpu")
    bucket, offered, handle = shared_memory.make(size, cpu)
    assert handle is not None
    assert os.fstat(handle).st_size == padded
    assert os.fstat(handle).st_blocks * 512 >= padded, "the memory is reserved, so that no write can fail"
    assert (len(bucket), offered["num_bytes"], offered["ipc"], len(offered["mark"])) == (size, size, None, 32)
    attached = shared_memory.attach(offered, handle, cpu)
    assert len(attached) == size
    bucket[-1] = 201
    assert attached[-1] == 201
