"""Quantise weights for an export in FP8: choose the scale of each block, over all ranks.

A block with unchanged values keeps the source's scale, and so gets the source's codes: an export of an untouched model
equals the source bit for bit. A trained block gets amax / 448.

Ranks cut blocks anywhere, so each contributes the amax of its part, and an all-reduce (MAX) gives that of the whole
block. Scales chosen per rank would differ within a block, and the file would depend on the mesh.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ..errors import ExportError
from ..log import progress
from ..sharding import Block, Box, Param, piece
from .keymap import Key, KeyMap
from .quant_formats import Places, as_used, quantise, scales_for_amax, scales_to_float, scales_to_stored
from .reader import Reader, chosen
from .streaming import StoredModel
from .writer import Files, staged

Grids = dict[str, Tensor]  # by the key of a matrix: a number for each block


def scales_for(stored_model: StoredModel, keymap: KeyMap) -> Grids:
    """Return the scales of every matrix that is exported in FP8. It is collective: all ranks call it and get the same
    scales."""
    quantised = [key for key, scale in sorted(keymap.scales.items()) if scale.form or key not in keymap.carried]
    if not quantised:
        return {}
    mesh = stored_model.mesh
    with contextlib.ExitStack() as files:
        scan = BlockScan(keymap, quantised, files)
        look = functools.partial(scan.scan, stored_model)
        mesh.together(look, "the comparison with the source", ExportError, "nothing was exported")
        # One all-reduce serves all matrices: thousands of small ones would take longer in latency than the bytes take
        # to send.
        for grids in (scan.amax, scan.changed):
            flat = torch.cat([grids[key].view(-1) for key in quantised]).to(mesh.device)
            per_key = mesh.all_reduce_max_(flat, "scales").cpu().split([grids[key].numel() for key in quantised])
            grids.update({key: part.view(grids[key].shape) for key, part in zip(quantised, per_key, strict=True)})
        scan.refuse_changed()
        return {key: scan.chosen(key) for key in quantised if not keymap.scales[key].form}


def quantised_tensors(keymap: KeyMap, key: str, values: Tensor) -> Mapping[str, Tensor]:
    """Quantise one whole tensor as the export would write it: codes and scales by key.

    It serves streaming of whole tensors to an inference engine in FP8; an export to files uses `scales_for`.
    """
    scale, box = keymap.scales[key], Box.whole(values.shape)
    with contextlib.ExitStack() as files:
        scan = BlockScan(keymap, [key], files)
        scan.read_scales()
        scan.scan_block(Block(box, key, tuple(values.shape), box), box, values)
        scan.refuse_changed()
        if scale.form:
            return scan.unchanged_tensors(key)
        grid = scan.chosen(key)
    numbers = quantise(as_used(values, keymap.used), Places.of(values, values.shape, scale).take(grid))
    stored = keymap.keys[scale.key]
    return {key: numbers, scale.key: scales_to_stored(grid, stored.dtype).view(stored.shape)}


def quantised_keys(keymap: KeyMap, key: str) -> list[Key]:
    """Return the keys of the tensors that `quantised_tensors` makes from one tensor, in order."""
    scale = keymap.scales[key]
    names = [key, *(scale.companion_keys if scale.form else [scale.key])]
    return [keymap.keys[name] for name in names if name in keymap.keys]


class BlockScan:
    """The amax of this rank's part of each block, and whether it differs from the source, if the source has the same
    blocks."""

    def __init__(self, keymap: KeyMap, keys: Sequence[str], files: contextlib.ExitStack) -> None:
        self.keymap = keymap
        # For a read-only format one flag per matrix is enough; a flag per group of 16 would take much memory.
        self.scales = {key: s.as_one if s.form else s for key, s in keymap.scales.items() if key in keys}
        self.amax = {key: torch.zeros(self.scales[key].grid(_shape(keymap, key))) for key in keys}
        self.changed = {key: torch.zeros_like(grid) for key, grid in self.amax.items()}
        self.source_scales: Grids = {}
        self.reader = files.enter_context(Reader(keymap.source)) if keymap.source is not None else None

    def source_reader(self, key: str) -> Reader | None:
        """Return the reader of the source if it has a key in the same blocks."""
        same = self.reader is not None and self.reader.source.scales.get(key) == self.keymap.scales[key]
        return self.reader if same else None

    def chosen(self, key: str) -> Tensor:
        """Return the scales with which a matrix is written.

        A block that changed on any rank gets a new scale on all of them.
        """
        stored = self.keymap.keys[self.keymap.scales[key].key]
        new_scales = scales_to_float(scales_to_stored(scales_for_amax(self.amax[key]), stored.dtype))
        if bool(new_scales.isinf().any()):  # equal on all ranks after the all-reduce, so all of them raise
            raise ExportError(
                f"{key} has values so large that its scales overflow {stored.dtype}; give dtype= to export it "
                "unquantised"
            )
        if key not in self.source_scales:
            return new_scales
        return torch.where(self.changed[key] > 0, new_scales, self.source_scales[key])

    def refuse_changed(self) -> None:
        """Raise if a matrix in a read-only format has changed: it can only be copied."""
        for key, scale in self.scales.items():
            if scale.form and bool(self.changed[key].any()):
                raise ExportError(
                    f"{key} has changed since it was loaded, and {scale.form} can only be copied, not written; give "
                    "dtype= to export it dequantised, or load the model again"
                )

    def unchanged_tensors(self, key: str) -> dict[str, Tensor]:
        """Return the source's tensors of a matrix."""
        assert self.reader is not None, "the matrix was read from a source"
        names = [key, *self.scales[key].companion_keys]
        return {name: self.reader.as_it_is(name) for name in names if name in self.keymap.keys}

    def read_scales(self) -> None:
        """Read the source's scales of all keys, including keys that this rank stores no part of, so that all ranks
        make the same choice."""
        for key in self.amax:
            if not self.scales[key].form and (reader := self.source_reader(key)) is not None:
                self.source_scales[key] = reader.scales(key)

    def scan(self, stored_model: StoredModel) -> None:
        """Scan everything that this rank stores."""
        check_scaled(stored_model, self.keymap)
        self.read_scales()
        spec, mesh, keymap = stored_model.spec, stored_model.mesh, self.keymap
        pieces = [piece(param, spec.rules, mesh.axes, mesh.coords) for param in _quantised_params(stored_model, keymap)]
        total = sum(each.numel for each in pieces)
        label = f"choose scales on rank {mesh.rank}"
        with progress(label, total, "elements", enabled=mesh.rank == 0) as advance:
            for each in pieces:
                layout, stored = chosen(each.param, keymap.choice), stored_model.stored[each.param.name].detach()
                for box, view in each.views(stored):
                    for block in (*layout.blocks, *layout.copies):
                        common = block.ours.meet(box)
                        if common is not None and block.key in self.amax:
                            self.scan_block(block, common, view[common.within(box).slices])
                advance(stored.numel())

    def scan_block(self, block: Block, common: Box, stored_part: Tensor) -> None:
        """Scan the overlap of a stored part with a block of a key.

        The amax is of the values as the forward used them (`as_used`), because these are quantised. The comparison with
        the source is exact: any changed bit makes a new scale.
        """
        whole, reader = block.view(torch.empty(block.shape, device="meta")), self.source_reader(block.key)
        for part in staged(block, common):
            values = stored_part[part.within(common).slices].cpu()
            places = Places.of(whole[part.within(block.ours).slices], block.shape, self.scales[block.key])
            places.into(self.amax[block.key], as_used(values, self.keymap.used).float().abs())
            if reader is not None:
                original = reader.read(reader.source.entries[block.key], block, part).to(values.dtype)
                places.into(self.changed[block.key], (values != original).float())


def check_scaled(stored_model: StoredModel, keymap: KeyMap) -> None:
    """Check that stored values are finite and that the source's files are unchanged."""
    for param in _quantised_params(stored_model, keymap):
        if not bool(stored_model.stored[param.name].isfinite().all()):
            raise ExportError(f"{param.name} has NaN or infinite values, which FP8 cannot hold; nothing was written")
    if keymap.source is not None:
        read = [*keymap.scales, *(scale.key for scale in keymap.scales.values())]
        entries = keymap.source.entries
        keymap.source.check_unchanged(sorted({entries[key].file for key in read if key in entries}))


def _shape(keymap: KeyMap, key: str) -> Sequence[int]:
    """Return the shape of a matrix."""
    if key in keymap.keys or keymap.source is None:
        return keymap.keys[key].shape
    return keymap.source.entries[key].shape  # packed 4-bit codes: the export has no key of this name


def _quantised_params(stored_model: StoredModel, keymap: KeyMap) -> Iterator[Param]:
    """Yield the stored parameters that are exported in FP8."""
    for param in stored_model.spec.table:
        keys = chosen(param, keymap.choice).keys
        if param.name in stored_model.stored and not keymap.scales.keys().isdisjoint(keys):
            yield param


def write_scales(files: Files, rank: int = 0, world: int = 1) -> None:
    """Write the scales; rank n mod world writes those of matrix n."""
    for number, (key, grid) in enumerate(sorted(files.scales.items())):
        if number % world == rank:
            scale = files.keymap.keys[files.keymap.scales[key].key]
            data = scales_to_stored(grid, scale.dtype).contiguous().view(-1).view(torch.uint8)
            files.put(scale.name, data.numpy().data, 0)
