"""Images in a step: all ranks run the vision tower in the same micro-batches.

The tower has collectives (FSDP gathers its parameters), and each rank has other images, or none. If each rank decided
by its own batch, collectives of different kinds would pair up, or a rank would wait forever. So ranks agree on a mask
with a bit for each micro-batch. If any rank has images, all ranks run the tower, those without images on zero
patches. If no rank has, none runs it, and it costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ..data import Batch, Images
from ..errors import DataError, counted
from ..models import Tower
from ..sharding import TOWER, stages_of_param
from .model import Model

_BITS = 53  # of the mask: it travels in a row of float64, which hold integers of 53 bits


def images_mask(batches: Sequence[Batch]) -> int:
    """Return a bit for each micro-batch with images. The last bit stands for all later micro-batches too."""
    return sum({1 << min(number, _BITS - 1) for number, batch in enumerate(batches) if batch.frames})


def forced_tower_runs(model: Model, num_batches: int) -> int:
    """Return the mask of micro-batches in which the tower runs even if no rank has images.

    These are all if nothing else of the first stage is trained, and none otherwise. Without the tower, backward of that
    stage would have no graph, and FSDP frees gathered parameters only in backward.
    """
    names = [name for name in model.trained if 0 in stages_of_param(model.table[name], model.line)]
    only_tower = bool(names) and all(name.startswith(TOWER) for name in names)
    return sum({1 << min(number, _BITS - 1) for number in range(num_batches)}) if only_tower else 0


def sync_images(batches: Sequence[Batch], mask: int, tower: Tower | None) -> list[Batch]:
    """Return the batches with images according to the mask of all ranks: a batch without images gets an empty set
    of them if any rank has some, so that it runs the tower too."""
    if tower is None:
        return list(batches)
    empty = Images(torch.empty(0, tower.shape.pixels.num), ())

    def synced(number: int, batch: Batch) -> Batch:
        any_rank = mask >> min(number, _BITS - 1) & 1
        return replace(batch, images=(batch.images or empty) if any_rank else None)

    return [synced(number, batch) for number, batch in enumerate(batches)]


def check_images(batches: Sequence[Batch], tower: Tower | None, *, token_labels: bool) -> None:
    """Refuse placeholders without an image, and images at other tokens. `token_labels`: labels are no classes.

    Both would train without an error: on the embedding of the placeholder, or on images that replace text.
    """
    for batch in batches:
        if tower is None:
            if batch.frames:
                raise DataError(
                    f"a batch has {counted(len(batch.frames), 'frame')} of images, but the model was loaded without "
                    "its tower; use mw.load(..., tower=True)"
                )
            continue
        images = batch.images
        if images is not None and images.patches_PC.shape[1] != tower.shape.pixels.num:
            raise DataError(
                f"a patch of the batch has {images.patches_PC.shape[1]} values, but the vision tower takes "
                f"{tower.shape.pixels.num}; use the processor of the model"
            )
        filled_T = torch.zeros(len(batch), dtype=torch.bool, device=batch.tokens.device)
        for frame in batch.frames:
            filled_T[frame.start : frame.stop] = True
        odd_T = filled_T != tower.is_place(batch.tokens)
        if odd_T.any():
            at = int(odd_T.nonzero()[0])
            token = int(batch.tokens[at])
            what = "is in the place of an image" if filled_T[at] else "stands for an image that the batch lacks"
            raise DataError(
                f"token {token} at position {at} {what}; images go to the tokens {list(tower.ids)} of config.json: "
                "give mw.pack all images, and placeholders= if your token ids differ; sampled text must not contain "
                "these tokens"
            )
        if token_labels and (is_image_T := tower.is_place(batch.labels)).any():
            at = int(is_image_T.nonzero()[0])
            raise DataError(
                f"the label {int(batch.labels[at])} at position {at} stands for an image, which no model generates; "
                "set it to -100"
            )


def zero_gradients(model: Model, unused: Sequence[str]) -> None:
    """Set zero gradients for a tower that did not run in a step, on every rank. So it is updated like any parameter
    that a step does not use: weight decay applies, and its optimizer state decays."""
    for name in unused:
        parameter = model.parameter(name)
        parameter.grad = torch.zeros_like(parameter)


def unused_tower_parameters(model: Model, mask: int) -> list[str]:
    """Return the trained tower parameters of this rank if no micro-batch of a step has run the tower."""
    return [] if mask else [name for name in model.trainable if name.startswith(TOWER)]
