"""The tower on several ranks: those of a data rank share out the frames of their stream, each whole, and one all-to-all
brings the rows of all to the ranks whose tokens they are for."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from .. import ops
from ..data import Batch, Images
from ..layout import Insert, Route, find, route, share
from ..mesh import Mesh
from ..mesh.collectives import Exchange
from ..models import Eye, Sight

AXES = ("cp", "tp")  # the ranks of a data rank, in the order of their tokens


def arm(model: nn.Module, mesh: Mesh) -> None:
    if mesh.size_of(AXES) > 1:
        for name, door in find(model, Insert):
            door.armed = functools.partial(insert, group=mesh.name_of(AXES), at=name)


def insert(rows_ND: Tensor, sent: list[int], got: list[int], group: str, at: str) -> Tensor:
    return Exchange.apply(rows_ND, got, sent, group, at)


def route_of(images: Images, num_tokens: int, parts: int, at: int, eye: Eye) -> Route:
    """What part `at` of the ranks that share a stream of so many tokens has to do with its pictures."""
    num = num_tokens // parts
    owners = share([frame.num_patches for frame in images.frames], parts, eye.cost)
    runs = [range(frame.start, frame.stop) for frame in images.frames]
    return route(runs, owners, at, [range(part * num, (part + 1) * num) for part in range(parts)])


def sight_of(batch: Batch, eye: Eye, mesh: Mesh) -> Sight | None:
    """This rank's part of the pictures of a batch, on the device."""
    if batch.images is None:
        return None
    first, after = mesh.token_range(len(batch))
    way = route_of(batch.images, len(batch), len(batch) // (after - first), first // (after - first), eye)
    sizes = [(frame.height, frame.width) for frame in (batch.images.frames[number] for number in way.mine)]
    patches_PC = batch.images.of(way.mine).to(mesh.device)
    if patches_PC.dtype == torch.uint8:
        patches_PC = (patches_PC.float() - 127.5) / 127.5
    at_N = torch.tensor(way.places, dtype=torch.int64, device=mesh.host).to(mesh.device)
    return Sight(patches_PC, ops.frames(sizes, mesh.device), way.sent, way.got, at_N)
