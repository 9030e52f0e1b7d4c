"""Cut a stream of tensors into buckets of a fixed number of bytes, and put them together again.

Tensors follow one another without gaps, so a tensor larger than a bucket travels in parts, and many small ones share
one. The receiver knows the specs, so buckets need no index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from ..errors import ConfigError
from ..ops.part_sizes import part_size
from .specs import TensorSpec

Stream = Iterable[tuple[str, Tensor]]
_BUCKET_BYTES = part_size(__name__, "_BUCKET_BYTES", 256 << 20, small=4_001)


def bucket_size(specs: Sequence[TensorSpec], wanted: int | None) -> int:
    """Return the bytes of a bucket: no more than the whole stream needs."""
    wanted = _BUCKET_BYTES if wanted is None else wanted
    if wanted < 1:
        raise ConfigError(f"bucket_bytes={wanted} must be at least 1; 256 << 20 is usual")
    return max(1, min(wanted, sum(spec.num_bytes for spec in specs)))


def num_buckets(specs: Sequence[TensorSpec], size: int) -> int:
    """Return how many buckets carry these tensors: at least one, so that there is a last one to wait for."""
    return max(1, -(-sum(spec.num_bytes for spec in specs) // size))


def fill(stream: Stream, specs: Sequence[TensorSpec], bucket: Tensor) -> Iterator[int]:
    """Fill a bucket again and again. Yield how many bytes it holds; it is overwritten when the next item is asked for.

    Each tensor is compared with its spec. The last bucket is yielded after the stream has ended. So if the stream
    raises, receivers are still waiting, and can be sent the error.
    """
    used, tensors = 0, iter(stream)
    for spec in specs:
        data, at = bytes_of(_next(tensors, spec)), 0
        while at < len(data):
            if used == len(bucket):
                yield used
                used = 0
            num = min(len(bucket) - used, len(data) - at)
            bucket[used : used + num].copy_(data[at : at + num])
            used, at = used + num, at + num
        del data
    for name, _ in tensors:
        raise ConfigError(f"the stream yields {name} after the last of {len(specs)} specs; take both from one model")
    yield used


def _next(tensors: Iterator[tuple[str, Tensor]], spec: TensorSpec) -> Tensor:
    """Return the next tensor of a stream, which must be the one that was announced."""
    for name, tensor in tensors:
        spec.check(name, tensor)
        return tensor
    raise ConfigError(f"the stream ended before {spec}; take stream and specs from one model")


def unpack(
    specs: Sequence[TensorSpec], take: Callable[[], Tensor], device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a stream, assembled from the buckets that `take` returns one after the other."""
    bucket, used = take(), 0
    for spec in specs:
        tensor = torch.empty(spec.shape, dtype=spec.dtype, device=device)
        data, at = bytes_of(tensor), 0
        while at < len(data):
            if used == len(bucket):
                bucket, used = take(), 0
            num = min(len(bucket) - used, len(data) - at)
            data[at : at + num].copy_(bucket[used : used + num])
            used, at = used + num, at + num
        yield spec.name, tensor


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, a view where it is contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def exhaust(stream: Iterable[object]) -> None:
    """Iterate a stream to its end and drop its items, because other ranks of the mesh wait in its collectives."""
    for _ in stream:
        pass
