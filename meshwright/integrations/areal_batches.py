"""Cut AReaL's padded batches into micro-batches of packed documents, the same number on all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from areal.api.cli_args import MicroBatchSpec
from areal.utils.data import (
    MicroBatchList,
    allocate_balanced_mbs,
    amend_position_ids,
    concat_batch,
    pack_tensor_dict,
)
from torch import Tensor

from .. import api as mw
from . import jagged

_IMAGES = ("pixel_values", "image_grid_thw", "video_grid_thw")


@dataclass(frozen=True)
class MicroBatches:
    """The micro-batches of one call: as AReaL's losses see them, and as batches of Meshwright.

    `sizes`: tokens of each row of the input. `meta`: turns results back into a list of trajectories, if the input was
    one.
    """

    cut: MicroBatchList
    batches: list[mw.Batch]
    sizes: list[int]
    meta: Any

    def scores(self, number: int, scores: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the scores of a micro-batch. The one token of an empty micro-batch is dropped."""
        return {name: x[: self.cut.group_lens[number]] for name, x in scores.items()}


def micro_batches(mesh: mw.Mesh, input_: Any, config: Any, multiple: int) -> MicroBatches:
    """Cut a padded batch, or a list of trajectories, as the config's `mb_spec` says. If one rank refuses its data, all
    ranks raise."""
    spec, at, what = config.mb_spec, "the data of AReaL", "nothing was run"
    data, meta = mesh.together(lambda: _checked(input_, spec), at, mw.DataError, what)
    sizes = data["attention_mask"].sum(1).tolist()
    groups = _agreed(mesh, sizes, spec, spec.n_mbs or 1)
    cut = mesh.together(lambda: _cut(data, spec, groups), at, mw.DataError, what)
    documents = [list(mb["input_ids"].split(mb["cu_seqlens"].diff().tolist())) for mb in cut.mbs]
    least = spec.max_tokens_per_mb if config.pad_to_maximum and spec.max_tokens_per_mb else 0
    batches = jagged.packed(mesh, documents, multiple, least, values=config.is_critic)
    return MicroBatches(cut.to(mesh.device), batches, sizes, meta)


def _checked(input_: Any, spec: Any) -> tuple[dict[str, Any], Any]:
    """Return the input as one batch of rows, and the metadata that undoes this. Refuse unusable data."""
    data, meta = concat_batch(input_) if isinstance(input_, list) else (dict(input_), None)
    if missing := [name for name in ("input_ids", "attention_mask") if name not in data]:
        raise mw.DataError(f"the data have no {missing[0]}; give padded rows with input_ids and attention_mask")
    images = [name for name, x in data.items() if name.startswith("multi_modal_input") and any(map(bool, x))]
    if images := images + [name for name in _IMAGES if name in data]:
        raise mw.DataError(f"the data have images ({images[0]}), which are not passed on; train on text")
    mask = data["attention_mask"]
    if not torch.equal(mask.bool(), torch.arange(mask.shape[1], device=mask.device) < mask.sum(1)[:, None]):
        raise mw.DataError("attention_mask has a gap, or padding before tokens; pad each row at its end only")
    if len(mask) % spec.granularity:
        raise mw.DataError(f"{len(mask)} rows are not a multiple of mb_spec.granularity={spec.granularity}")
    return amend_position_ids(data), meta


def _groups(sizes: Sequence[int], spec: Any, num: int) -> list[list[int]]:
    """Return the rows of each micro-batch, at least `num` of them."""
    units = torch.tensor(sizes).view(-1, spec.granularity)
    wanted = MicroBatchSpec.new(spec, n_mbs=num, max_tokens_per_mb=spec.max_tokens_per_mb or sum(sizes) + 1)
    rows = torch.arange(len(sizes)).view(-1, spec.granularity)
    return [rows[group].flatten().tolist() for group in allocate_balanced_mbs(wanted, units.sum(1).tolist())]


def _agreed(mesh: mw.Mesh, sizes: Sequence[int], spec: Any, num: int) -> list[list[int]]:
    """Return this data rank's micro-batches: at least `num`, and as many as the rank that needs most."""
    at = "the micro-batches of AReaL"
    groups = mesh.together(lambda: _groups(sizes, spec, num), at, mw.DataError, "nothing was run")
    counts = mesh.all_or_none(None, at, numbers=(len(groups),))
    return groups if counts.min() == counts.max() else _agreed(mesh, sizes, spec, int(counts.max()))


def _cut(data: dict[str, Any], spec: Any, groups: Sequence[Sequence[int]]) -> MicroBatchList:
    """Return the packed rows of each micro-batch. Values that are not tensors over rows go whole to all."""
    mask, order = data["attention_mask"], list(chain.from_iterable(groups))
    over_tokens = {name for name, x in data.items() if torch.is_tensor(x) and x.numel() == mask.numel()}
    by_row = {name for name in data if name.startswith("multi_modal_input")}

    def rows_of(name: str, x: Any, rows: Sequence[int]) -> Any:
        return x[list(rows)] if name in over_tokens else [x[row] for row in rows] if name in by_row else x

    mbs = [pack_tensor_dict({name: rows_of(name, x, rows) for name, x in data.items()}) for rows in groups]
    back = torch.tensor(order).argsort().tolist()
    return MicroBatchList(
        data=data, mb_spec=spec, mbs=mbs, group_lens=[int(mb["cu_seqlens"][-1]) for mb in mbs],
        forward_indices=order, backward_indices=back,
    )  # fmt: skip
