"""The tower on several ranks: those of a data rank share out the frames of their stream, each whole, and one all-to-all
brings the rows of all to the ranks whose tokens they are for."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from .. import ops
from ..axes import DATA_RANK
from ..data import Batch
from ..mesh import Mesh
from ..mesh.collectives import AllToAll
from ..models import Tower, VisionInput
from ..sharding import Insert, find_doors, route


def arm(model: nn.Module, mesh: Mesh) -> None:
    if mesh.size_of(DATA_RANK) > 1:
        for name, door in find_doors(model, Insert):
            door.armed = functools.partial(insert, group=mesh.name_of(DATA_RANK), at=name)


def insert(rows_ND: Tensor, sent: list[int], got: list[int], group: str, at: str) -> Tensor:
    return AllToAll.apply(rows_ND, got, sent, group, at)


def sight_of(batch: Batch, tower: Tower, mesh: Mesh) -> VisionInput | None:
    """This rank's part of the pictures of a batch, on the device."""
    if batch.images is None:
        return None
    frames, (first, after) = batch.images.frames, mesh.token_range(len(batch))
    way = route(frames, len(batch), len(batch) // (after - first), first // (after - first), tower.insert.cost)
    sizes = [(frames[number].height, frames[number].width) for number in way.own_frames]
    patches_PC = ops.to_device(batch.images.of(way.own_frames), mesh.device)
    if patches_PC.dtype == torch.uint8:
        patches_PC = (patches_PC.float() - 127.5) / 127.5
    at_N = ops.to_device(torch.tensor(way.places, dtype=torch.int64, device=mesh.host), mesh.device)
    return VisionInput(patches_PC, ops.frames(sizes, mesh.device), way.sent, way.got, at_N)
