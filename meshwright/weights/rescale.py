"""With which scales values become 8-bit numbers in a file.

A block that is as it was gets the scale of the source, with which its numbers are those of the source again. A block
that was trained gets the scale that it needs. Ranks cut blocks anywhere, so each says what it has of every block, and
the most of all counts: that is exact.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..errors import ExportError, failure_in
from ..layout import Block, Box, Param, piece
from ..log import progress
from .keymap import KeyMap
from .load import Reader, chosen
from .scales import Places, as_numbers, as_stored, needed, numbers_of
from .streaming import StoredModel
from .writing import Files, staged

Grids = dict[str, Tensor]  # by the key of a matrix: a number for each block


def scales_for(stored_model: StoredModel, keymap: KeyMap) -> Grids:
    """By the key of what is written in 8 bits. All ranks call it, and get the same."""
    if not keymap.scales:
        return {}
    assert keymap.source is not None
    mesh, trained = stored_model.mesh, [key for key in sorted(keymap.scales) if key not in keymap.carried]
    with Reader(keymap.source) as reader:
        looked = _Look(reader, {key: torch.zeros_like(reader.scales(key), device="cpu") for key in trained})
        failure = failure_in(lambda: looked.at(stored_model, keymap), ExportError, "nothing was exported")
        mesh.all_or_none(failure, "the comparison with the source", ExportError)
        most, changed = (mesh.most_(_flat(grids).to(mesh.device), "scales").cpu() for grids in looked.found)
        sizes = [looked.most[key].numel() for key in trained]
        parts = zip(trained, most.split(sizes), changed.split(sizes), strict=True)
        return {key: _chosen(reader, key, of_block, moved) for key, of_block, moved in parts}


def numbers_and_scales(reader: Reader, key: str, values: Tensor) -> tuple[Tensor, Tensor]:
    """A whole tensor as a file would hold it."""
    scale, whole = reader.source.scales[key], Box.whole(values.shape)
    looked = _Look(reader, {key: torch.zeros_like(reader.scales(key))})
    looked.block(Block(whole, key, tuple(values.shape), whole), whole, values)
    grid = _chosen(reader, key, looked.most[key], looked.changed[key])
    entry = reader.source.entries[scale.key]
    numbers = numbers_of(values, Places.of(values, values.shape, scale).take(grid))
    return numbers, as_stored(grid, entry.dtype).view(entry.shape)


def _flat(grids: Grids) -> Tensor:
    return torch.cat([torch.empty(0), *(grid.view(-1) for grid in grids.values())])


def _chosen(reader: Reader, key: str, most: Tensor, changed: Tensor) -> Tensor:
    before, dtype = reader.scales(key), reader.source.entries[reader.source.scales[key].key].dtype
    new = as_numbers(as_stored(needed(most.view(before.shape)), dtype))
    return torch.where(changed.view(before.shape) > 0, new, before)


class _Look:
    """What a rank has of each block: its largest value, and whether any differs from the source."""

    def __init__(self, reader: Reader, grids: Grids) -> None:
        self.reader, self.most = reader, grids
        self.changed = {key: torch.zeros_like(grid) for key, grid in grids.items()}

    @property
    def found(self) -> tuple[Grids, Grids]:
        return self.most, self.changed

    def at(self, stored_model: StoredModel, keymap: KeyMap) -> None:
        spec, mesh = stored_model.spec, stored_model.mesh
        held = [(param, stored_model.stored[param.name].detach()) for param in _scaled(stored_model, keymap)]
        total = sum(stored.numel() for _, stored in held)
        label = f"compare with {self.reader.source.directory} on rank {mesh.rank}"
        with progress(label, total, "elements", enabled=mesh.rank == 0) as advance:
            for param, stored in held:
                if not bool(stored.isfinite().all()):
                    raise ExportError(f"{param.name} has values that are not finite; nothing was exported")
                layout = chosen(param, keymap.choice)
                for box, view in piece(param, spec.rules, mesh.axes, mesh.coords).views(stored):
                    for block in (*layout.blocks, *layout.copies):
                        common = block.ours.meet(box)
                        if common is not None and block.key in self.most:
                            self.block(block, common, view[common.within(box).slices])
                advance(stored.numel())

    def block(self, block: Block, common: Box, ours: Tensor) -> None:
        source = self.reader.source
        whole = block.view(torch.empty(block.shape, device="meta"))
        for part in staged(block, common):
            values = ours[part.within(common).slices].cpu()
            places = Places.of(whole[part.within(block.ours).slices], block.shape, source.scales[block.key])
            before = self.reader.read(source.entries[block.key], block, part).to(values.dtype)
            places.into(self.most[block.key], values.float().abs())
            places.into(self.changed[block.key], (values != before).float())


def _scaled(stored_model: StoredModel, keymap: KeyMap) -> Iterator[Param]:
    for param in stored_model.spec.table:
        keys = chosen(param, keymap.choice).keys
        if param.name in stored_model.stored and not keymap.scales.keys().isdisjoint(keys):
            yield param


def write_scales(files: Files, rank: int = 0, world: int = 1) -> None:
    """Each by one rank."""
    for number, (key, grid) in enumerate(sorted(files.scales.items())):
        if number % world == rank:
            scale = files.keymap.keys[files.keymap.scales[key].key]
            data = as_stored(grid, scale.dtype).contiguous().view(-1).view(torch.uint8)
            files.put(scale.name, data.numpy().data, 0)
