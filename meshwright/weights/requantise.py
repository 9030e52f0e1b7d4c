"""With which scales values become 8-bit numbers in a file.

A block that is as it was gets the scale of the source, with which its numbers are those of the source again. A block
that was trained gets the scale that it needs. Ranks cut blocks anywhere, so each says what it has of every block, and
the most of all counts: that is exact. A matrix in a format that is only read must be as it was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ..errors import ExportError, failure_in
from ..log import progress
from ..sharding import Block, Box, Param, piece
from .keymap import KeyMap
from .quant_formats import Places, as_used, quantise, scales_for_amax, scales_to_float, scales_to_stored
from .reader import Reader, chosen
from .streaming import StoredModel
from .writer import Files, staged

Grids = dict[str, Tensor]  # by the key of a matrix: a number for each block


def scales_for(stored_model: StoredModel, keymap: KeyMap) -> Grids:
    """By the key of what is written in 8 bits. All ranks call it, and get the same."""
    trained = [key for key, scale in sorted(keymap.scales.items()) if scale.form or key not in keymap.carried]
    if not trained:
        return {}
    mesh = stored_model.mesh
    with contextlib.ExitStack() as files:
        looked = BlockScan(keymap, trained, files)
        failure = failure_in(lambda: looked.at(stored_model), ExportError, "nothing was exported")
        mesh.all_or_none(failure, "the comparison with the source", ExportError)
        for grids in (looked.most, looked.changed):
            found = mesh.most_(torch.cat([grids[key].view(-1) for key in trained]).to(mesh.device), "scales").cpu()
            parts = found.split([grids[key].numel() for key in trained])
            grids.update({key: part.view(grids[key].shape) for key, part in zip(trained, parts, strict=True)})
        looked.refuse_changed()
        return {key: looked.chosen(key) for key in trained if not keymap.scales[key].form}


def quantised_tensors(keymap: KeyMap, key: str, values: Tensor) -> Mapping[str, Tensor]:
    """A whole tensor as a file would hold it."""
    scale, whole = keymap.scales[key], Box.whole(values.shape)
    with contextlib.ExitStack() as files:
        looked = BlockScan(keymap, [key], files)
        looked.read_scales()
        looked.block(Block(whole, key, tuple(values.shape), whole), whole, values)
        looked.refuse_changed()
        if scale.form:
            return looked.as_they_are(key)
        grid = looked.chosen(key)
    numbers = quantise(as_used(values, keymap.used), Places.of(values, values.shape, scale).take(grid))
    stored = keymap.keys[scale.key]
    return {key: numbers, scale.key: scales_to_stored(grid, stored.dtype).view(stored.shape)}


class BlockScan:
    """What a rank has of each block: its largest value, and whether any differs from the source, if that has the same
    blocks."""

    def __init__(self, keymap: KeyMap, keys: Sequence[str], files: contextlib.ExitStack) -> None:
        self.keymap = keymap
        # Of what is only read it is enough to know whether anything differs, and groups of 16 would take much memory.
        self.scales = {key: s.as_one if s.form else s for key, s in keymap.scales.items() if key in keys}
        self.most = {key: torch.zeros(self.scales[key].grid(_shape(keymap, key))) for key in keys}
        self.changed = {key: torch.zeros_like(grid) for key, grid in self.most.items()}
        self.earlier: Grids = {}  # scales of the source
        self.reader = files.enter_context(Reader(keymap.source)) if keymap.source is not None else None

    def before(self, key: str) -> Reader | None:
        """Who reads what the source has for a key in the same blocks."""
        same = self.reader is not None and self.reader.source.scales.get(key) == self.keymap.scales[key]
        return self.reader if same else None

    def chosen(self, key: str) -> Tensor:
        """The scales with which a matrix is written."""
        stored = self.keymap.keys[self.keymap.scales[key].key]
        new = scales_to_float(scales_to_stored(scales_for_amax(self.most[key]), stored.dtype))
        if bool(new.isinf().any()):  # on all ranks alike
            raise ExportError(f"{key} has values for which {stored.dtype}, the dtype of its scales, is too small")
        return torch.where(self.changed[key] > 0, new, self.earlier[key]) if key in self.earlier else new

    def refuse_changed(self) -> None:
        """What is only read is written as the source has it, so it must not be anything else."""
        for key, scale in self.scales.items():
            if scale.form and bool(self.changed[key].any()):
                raise ExportError(
                    f"{key} is no longer what the source holds, and {scale.form} is not written here; "
                    "give dtype=, which writes values, or load the model again"
                )

    def as_they_are(self, key: str) -> dict[str, Tensor]:
        """What the source has of a matrix."""
        assert self.reader is not None, "it was read from there"
        names = [key, *self.scales[key].beside]
        return {name: self.reader.as_it_is(name) for name in names if name in self.keymap.keys}

    def read_scales(self) -> None:
        """Of all keys, also of those of which this rank has nothing."""
        for key in self.most:
            if not self.scales[key].form and (reader := self.before(key)) is not None:
                self.earlier[key] = reader.scales(key)

    def at(self, stored_model: StoredModel) -> None:
        """All that this rank stores."""
        check_scaled(stored_model, self.keymap)
        self.read_scales()
        spec, mesh, keymap = stored_model.spec, stored_model.mesh, self.keymap
        held = [piece(param, spec.rules, mesh.axes, mesh.coords) for param in _scaled(stored_model, keymap)]
        total = sum(each.numel for each in held)
        label = f"choose scales on rank {mesh.rank}"
        with progress(label, total, "elements", enabled=mesh.rank == 0) as advance:
            for each in held:
                layout, stored = chosen(each.param, keymap.choice), stored_model.stored[each.param.name].detach()
                for box, view in each.views(stored):
                    for block in (*layout.blocks, *layout.copies):
                        common = block.ours.meet(box)
                        if common is not None and block.key in self.most:
                            self.block(block, common, view[common.within(box).slices])
                advance(stored.numel())

    def block(self, block: Block, common: Box, ours: Tensor) -> None:
        whole, reader = block.view(torch.empty(block.shape, device="meta")), self.before(block.key)
        for part in staged(block, common):
            values = ours[part.within(common).slices].cpu()
            places = Places.of(whole[part.within(block.ours).slices], block.shape, self.scales[block.key])
            places.into(self.most[block.key], as_used(values, self.keymap.used).float().abs())
            if reader is not None:
                before = reader.read(reader.source.entries[block.key], block, part).to(values.dtype)
                places.into(self.changed[block.key], (values != before).float())


def check_scaled(stored_model: StoredModel, keymap: KeyMap) -> None:
    """What this rank stores can be written in 8 bits, and what it is compared with is as it was loaded."""
    for param in _scaled(stored_model, keymap):
        if not bool(stored_model.stored[param.name].isfinite().all()):
            raise ExportError(f"{param.name} has values that are not finite; nothing was written")
    if keymap.source is not None:
        read = [*keymap.scales, *(scale.key for scale in keymap.scales.values())]
        entries = keymap.source.entries
        keymap.source.check_unchanged(sorted({entries[key].file for key in read if key in entries}))


def _shape(keymap: KeyMap, key: str) -> Sequence[int]:
    if key in keymap.keys or keymap.source is None:
        return keymap.keys[key].shape
    return keymap.source.entries[key].shape  # of packed numbers, which no file has under this key


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
            data = scales_to_stored(grid, scale.dtype).contiguous().view(-1).view(torch.uint8)
            files.put(scale.name, data.numpy().data, 0)
