"""Run the vision encoder on all ranks of a data rank: they divide its frames, and an all-to-all returns the rows.

Each frame runs whole on one rank (attention in the tower is within a frame), balanced by cost. One all-to-all then
brings each row to the rank that holds its placeholder token, and backward sends gradients the other way. Replicating
the tower over tp and cp would compute every frame tp x cp times.

All ranks of a data rank enter the tower if any of its frames is in the micro-batch. Which micro-batches run it is
agreed over data ranks before the step: a rank with text alone that skips the tower's FSDP all-gathers hangs the others
(transformers#37186, torchtitan#4777).
"""

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
from ..sharding import ScatterVision, find_doors, route


def arm(model: nn.Module, mesh: Mesh) -> None:
    """Give the tower's door its all-to-all over the ranks of a data rank."""
    if mesh.size_of(DATA_RANK) > 1:
        for name, door in find_doors(model, ScatterVision):
            door.armed = functools.partial(insert, group=mesh.name_of(DATA_RANK), at=name)


def insert(rows_ND: Tensor, sent: list[int], got: list[int], group: str, at: str) -> Tensor:
    """Send tower rows to the ranks of their placeholder tokens. `sent` and `got` count rows for and from each rank."""
    return AllToAll.apply(rows_ND, got, sent, group, at)


def sight_of(batch: Batch, tower: Tower, mesh: Mesh) -> VisionInput | None:
    """Return this rank's share of the frames of a batch, on the device; None without images."""
    if batch.images is None:
        return None
    frames, (first, after) = batch.images.frames, mesh.token_range(len(batch))
    plan = route(frames, len(batch), len(batch) // (after - first), first // (after - first), tower.insert.cost)
    sizes = [(frames[number].height, frames[number].width) for number in plan.own_frames]
    patches_PC = ops.to_device(batch.images.of(plan.own_frames), mesh.device)
    # uint8 pixels travel to the device as they are, a quarter of float32, and are normalised there to [-1, 1].
    if patches_PC.dtype == torch.uint8:
        patches_PC = (patches_PC.float() - 127.5) / 127.5
    at_N = ops.to_device(torch.tensor(plan.places, dtype=torch.int64, device=mesh.host), mesh.device)
    return VisionInput(patches_PC, ops.frames(sizes, mesh.device), plan.sent, plan.got, at_N)
