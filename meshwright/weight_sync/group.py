"""Broadcast weights over the caller's process group, from a rank of a mesh to inference processes.

Such a group is made outside the mesh, with NCCL or gloo, as inference engines make it (vLLM's stateless process group,
SGLang's update_weights_from_distributed). The first broadcast is the metadata, as JSON; then buckets follow. Every
bucket begins with a number that says whether the sender failed: every receiver then raises its error, and none hangs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import ConfigError, RankError
from ..watch import waiting_at
from .buckets import Stream, bucket_size, exhaust, fill, num_buckets, unpack
from .specs import TensorSpec, encoded, of_json, to_json

_HEAD = 8  # bytes before the bucket: the length of an error message in it, else 0
_MARK = 0x6D6573687772  # before the metadata: a receiver with a wrong src must not take another message for a length
_LEAST = 1024  # bytes of a bucket, so that a message fits


def send_to_group(
    stream: Stream, specs: Sequence[TensorSpec], group: dist.ProcessGroup | None, *,
    bucket_bytes: int | None = None, device: torch.device | str | None = None,
) -> None:  # fmt: skip
    """Broadcast the tensors of a stream from this process to the others of a group.

    All ranks of the mesh iterate a stream: those outside of the group pass `group=None`, and take part without sending.
    `specs`: from `mw.tensor_specs` with the same arguments. `device`: where buckets lie, by default on the host; for
    NCCL, on the device of the tensors. If a receiver is lost, the stream is exhausted before RankError is raised,
    because other ranks of the mesh wait in its collectives.
    """
    if group is None:
        exhaust(stream)
        return
    tensors = iter(stream)
    try:
        size = max(_LEAST, bucket_size(specs, bucket_bytes))
        _send(tensors, specs, _Carrier(group, group.rank(), torch.device(device or "cpu")), size)
    except Exception:
        exhaust(tensors)
        raise


def _send(tensors: Stream, specs: Sequence[TensorSpec], carrier: _Carrier, size: int) -> None:
    """Broadcast the metadata, then the buckets."""
    at = "the metadata"
    try:
        carrier.send_object({"specs": to_json(specs), "bucket_bytes": size})
        bucket = carrier.empty(_HEAD + size)
        bucket[:_HEAD] = 0
        for number, _ in enumerate(_reported(fill(tensors, specs, bucket[_HEAD:]), carrier, bucket)):
            at = f"bucket {number + 1} of {num_buckets(specs, size)}"
            carrier.broadcast(bucket)
    except _Lost as error:
        raise RankError(f"{at} was not taken by the group: {error}; a receiver is lost, so make a new group") from error


def receive_from_group(
    group: dist.ProcessGroup, src: int, *, device: torch.device | str | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the (name, tensor) that `send_to_group` sends, on `device`. Each tensor owns its memory.

    `src`: the rank of the sender in the group, not in the world (`dist.get_group_rank(group, global_rank)`). Every
    receiver must exhaust the iterator.
    """
    if not 0 <= src < group.size() or src == group.rank():
        raise ConfigError(
            f"src={src} is not another rank of this group of {group.size()}, in which this process is rank "
            f"{group.rank()}; give the rank of the sender in the group: dist.get_group_rank(group, global_rank)"
        )
    carrier = _Carrier(group, src, torch.device(device or "cpu"))
    try:
        meta = carrier.receive_object()
        bucket = carrier.empty(_HEAD + meta["bucket_bytes"])

        def take() -> Tensor:
            carrier.broadcast(bucket)
            if length := int(bucket[:_HEAD].view(torch.int64)):
                text = bytes(bucket[_HEAD : _HEAD + length].tolist()).decode(errors="replace")
                raise RankError(f"the sender failed, so the weights are incomplete: {text}")
            return bucket[_HEAD:]

        yield from unpack(of_json(meta["specs"]), take, carrier.device)
    except _Lost as error:
        raise RankError(f"the sender is lost, so the weights are incomplete; make a new group: {error}") from error


def _reported(filled: Iterator[int], carrier: _Carrier, bucket: Tensor) -> Iterator[int]:
    """Pass on the buckets of a stream. If the stream raises, the next bucket carries the error to the receivers."""
    while True:
        try:
            num = next(filled, None)
        except Exception as error:
            text = torch.tensor(list(f"{type(error).__name__}: {error}".encode()[: len(bucket) - _HEAD]))
            bucket[:_HEAD].view(torch.int64).fill_(len(text))
            bucket[_HEAD : _HEAD + len(text)] = text.to(bucket)
            carrier.broadcast(bucket)
            raise
        if num is None:
            return
        yield num


class _Lost(Exception):
    """A broadcast failed: a process of the group is gone, or did not answer in time."""


class _Carrier:
    """Broadcasts of bytes from one rank of a group. The group may be one that torch.distributed never registered."""

    def __init__(self, group: dist.ProcessGroup, src: int, device: torch.device) -> None:
        self.group, self.device = group, device
        self.options = dist.BroadcastOptions()
        self.options.rootRank = src

    def empty(self, num: int) -> Tensor:
        return torch.empty(num, dtype=torch.uint8, device=self.device)

    def broadcast(self, x: Tensor) -> None:
        """Broadcast a tensor in place."""
        try:
            with waiting_at("the sending of weights to a group outside of the mesh"):
                self.group.broadcast([x], self.options).wait()
        except RuntimeError as error:
            raise _Lost(str(error)) from error

    def send_object(self, message: dict[str, Any]) -> None:
        """Broadcast JSON: a mark, its length, then its bytes."""
        data = torch.frombuffer(bytearray(encoded(message)), dtype=torch.uint8).to(self.device)
        self.broadcast(torch.tensor([_MARK, len(data)], dtype=torch.int64, device=self.device).view(torch.uint8))
        self.broadcast(data)

    def receive_object(self) -> dict[str, Any]:
        """Return what `send_object` sends."""
        head = self.empty(16).fill_(0)
        self.broadcast(head)
        mark, length = head.view(torch.int64).tolist()
        if mark != _MARK:
            raise RankError("this message is no stream of weights: give receive_from_group the sender's rank (src=)")
        data = self.empty(length)
        self.broadcast(data)
        message: dict[str, Any] = json.loads(bytes(data.tolist()))
        return message
