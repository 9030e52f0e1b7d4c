"""Pictures in a step: all ranks run the tower in the same micro-batches, whoever has pictures there.

Nobody decides by his own batch alone: the collectives of the tower would meet others, or none. Where any rank has
pictures, all run it, those without on no patches at all, so that every parameter gets a gradient. Where nobody has, it
costs nothing.
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

_BITS = 53  # that a float64 holds, in which ranks tell each other what they bring


def pictures_mask(batches: Sequence[Batch]) -> int:
    """A bit for each micro-batch with pictures; the last one stands for all that have none of their own."""
    return sum({1 << min(number, _BITS - 1) for number, batch in enumerate(batches) if batch.frames})


def forced_tower_runs(model: Model, num_batches: int) -> int:
    """The micro-batches of a step in which the tower runs whether anyone has pictures or not: all, where nothing else
    of its stage is trained. Backward must find something, and FSDP must free what it gathered."""
    names = [name for name in model.trained if 0 in stages_of_param(model.table[name], model.line)]
    alone = bool(names) and all(name.startswith(TOWER) for name in names)
    return sum({1 << min(number, _BITS - 1) for number in range(num_batches)}) if alone else 0


def sync_pictures(batches: Sequence[Batch], mask: int, tower: Tower | None) -> list[Batch]:
    """Where any rank has pictures, a batch without gets an empty set of them; where nobody has, none."""
    if tower is None:
        return list(batches)
    none = Images(torch.empty(0, tower.shape.pixels.num), ())

    def seen(number: int, batch: Batch) -> Batch:
        anyone = mask >> min(number, _BITS - 1) & 1
        return replace(batch, images=(batch.images or none) if anyone else None)

    return [seen(number, batch) for number, batch in enumerate(batches)]


def check_pictures(batches: Sequence[Batch], tower: Tower | None, *, words: bool) -> None:
    """Every place of a picture has one, and every picture is in such places. `words`: labels are words, not classes."""
    for batch in batches:
        if tower is None:
            if batch.frames:
                raise DataError(
                    f"a batch has {counted(len(batch.frames), 'frame')} of pictures, but the model was loaded without "
                    "its tower; give mw.load(..., tower=True)"
                )
            continue
        images = batch.images
        if images is not None and images.patches_PC.shape[1] != tower.shape.pixels.num:
            raise DataError(
                f"a patch of the batch has {images.patches_PC.shape[1]} numbers, and one of this tower has "
                f"{tower.shape.pixels.num}; use the processor of the model"
            )
        filled_T = torch.zeros(len(batch), dtype=torch.bool, device=batch.tokens.device)
        for frame in batch.frames:
            filled_T[frame.start : frame.stop] = True
        odd_T = filled_T != tower.is_place(batch.tokens)
        if odd_T.any():
            at = int(odd_T.nonzero()[0])
            token = int(batch.tokens[at])
            what = "is in the place of a picture" if filled_T[at] else "stands for a picture that the batch has not"
            raise DataError(
                f"token {token} at position {at} {what}; pictures go to the tokens {list(tower.ids)} of config.json: "
                "give mw.pack all of them, and placeholders= if these are others; a text that was sampled has none"
            )
        if words and (named := tower.is_place(batch.labels)).any():
            at = int(named.nonzero()[0])
            raise DataError(
                f"the label {int(batch.labels[at])} at position {at} stands for a picture, and no model writes one; "
                "set it to -100"
            )


def zero_gradients(model: Model, unused: Sequence[str]) -> None:
    """Where nobody has pictures in a step, the tower has not run. Its gradient is zero on every mesh alike; it still
    decays, and its moments still fade, as of all that a step did not use."""
    for name in unused:
        parameter = model.parameter(name)
        parameter.grad = torch.zeros_like(parameter)


def unused_tower_parameters(model: Model, mask: int) -> list[str]:
    """The trained parameters of this rank that a step has not used at all."""
    return [] if mask else [name for name in model.trainable if name.startswith(TOWER)]
