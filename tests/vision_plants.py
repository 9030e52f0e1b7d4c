"""Bugs of towers and of images to plant in the package that runs: functions that monkeypatch.

tests/test_vision_planted.py lists them, each with the comparison that finds it.
"""

from __future__ import annotations

import faulthandler
import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from meshwright import ops
from meshwright.data import Batch
from meshwright.data import batch as data_batch
from meshwright.data import images as data_images
from meshwright.engine import engine as engine_module
from meshwright.mesh.collectives import AllToAll
from meshwright.models import Tower, decoder
from meshwright.models import vision_tower as models_tower
from meshwright.parallel import run_step
from meshwright.parallel import vision_encoder as parallel_tower
from meshwright.sharding import TOWER
from meshwright.sharding import vision_balance as layout_frames
from tests.plants import Patch, finished

ops_frames = importlib.import_module("meshwright.ops.vision_frames")  # its name in the package is that of a function


# Patches, and where they are.


def height_and_width_exchanged(patch: Patch) -> None:
    real = parallel_tower.ops.frames

    def turned(sizes: Any, device: Any) -> Any:
        these = real(sizes, device)
        return replace(these, sizes=tuple((w, h) for h, w in sizes), row_P=these.col_P, col_P=these.row_P)

    patch.setattr(parallel_tower.ops, "frames", turned)


def raster_order(patch: Patch) -> None:
    """Row by row over the whole frame, in place of blocks of four."""

    def places(height: int, width: int) -> tuple[Tensor, ...]:
        return tuple(x.flatten() for x in torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij"))

    patch.setattr(ops_frames, "_places", places)


def time_before_channels(patch: Patch) -> None:
    real = models_tower.Patches.forward

    def forward(self: Any, patches_PC: Tensor, frames: Any) -> Tensor:
        return real(self, patches_PC.view(len(patches_PC), 3, 2, -1).transpose(1, 2).flatten(1), frames)

    patch.setattr(models_tower.Patches, "forward", forward)


def corners_not_aligned(patch: Patch) -> None:
    def taps(at_P: Tensor, size_P: Tensor, side: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        place_P = ((at_P.to(dtype) + 0.5) * side / size_P.to(dtype) - 0.5).clamp(0, side - 1)
        low_P = place_P.floor()
        share_P, low_P = place_P - low_P, low_P.long()
        return [(low_P, 1 - share_P), ((low_P + 1).clamp(max=side - 1), share_P)]

    patch.setattr(ops_frames, "_taps", taps)


def table_of_zero_gradient(patch: Patch) -> None:
    real = models_tower.ops.interpolated
    patch.setattr(
        models_tower.ops,
        "interpolated",
        lambda table, *rest: real(table.detach(), *rest) + 0.0 * table.sum().to(rest[1]),
    )


# Blocks and mergers.


def parts_within_heads(patch: Patch) -> None:
    """q, k and v as [heads, 3, K], in place of [3, heads, K]."""
    real = models_tower.TowerBlock.__init__

    def init(self: Any, *args: Any) -> None:
        real(self, *args)
        parts = lambda x: x.view(-1, self.heads, 3, self.head).transpose(1, 2).flatten(1)  # noqa: E731 - short
        self.qkv.register_forward_hook(lambda _module, _args, out: parts(out))

    patch.setattr(models_tower.TowerBlock, "__init__", init)


def theta_of_a_text(patch: Patch) -> None:
    patch.setattr(models_tower, "_theta", lambda vision: 1e6)


def _gelu(patch: Patch, kind: Callable[[str], str]) -> None:
    gelu = lambda x, approximate="none": F.gelu(x, approximate=kind(approximate))  # noqa: E731 - one line reads better
    patch.setattr(models_tower, "F", SimpleNamespace(gelu=gelu))


def merger_with_tanh(patch: Patch) -> None:
    _gelu(patch, lambda _: "tanh")


def blocks_with_exact_gelu(patch: Patch) -> None:
    _gelu(patch, lambda _: "none")


def eps_of_torch(patch: Patch) -> None:
    patch.setattr(models_tower, "_EPS", 1e-5)


def _clips(lengths: Sequence[int]) -> list[int]:
    """Frames of a size that follow each other, as one."""
    out, last = list[int](), 0
    for length in lengths:
        if out and length == last:
            out[-1] += length
        else:
            out.append(length)
        last = length
    return out


def frames_of_a_clip_see_each_other(patch: Patch) -> None:
    real = models_tower.ops.attention

    def attention(q: Tensor, k: Tensor, v: Tensor, docs: Any, *rest: Any, causal: bool = True) -> Tensor:
        seen = docs if causal else ops.documents(_clips(docs.lengths), q.device)
        return real(q, k, v, seen, *rest, causal=causal)

    patch.setattr(models_tower.ops, "attention", attention)


def frames_see_each_other(patch: Patch) -> None:
    real = models_tower.TowerBlock.block

    def leaky(self: Any, x_PE: Tensor, tables: Any, _: ops.Documents) -> Tensor:
        return real(self, x_PE, tables, ops.documents([len(x_PE)] if len(x_PE) else [], x_PE.device))

    patch.setattr(models_tower.TowerBlock, "block", leaky)


def merger_norm_over_four(patch: Patch) -> None:
    """Norm four patches as one row, like the mergers of the first layers."""

    def forward(self: Any, x_PE: Tensor) -> Tensor:
        four = 4 * x_PE.shape[1]
        times = four // len(self.norm.weight)
        w, b = self.norm.weight.repeat(times), self.norm.bias.repeat(times)
        x_NF = F.layer_norm(x_PE.view(-1, four), (four,), w.to(x_PE.dtype), b.to(x_PE.dtype), 1e-6)
        return self.fc2(F.gelu(self.fc1(x_NF)))  # type: ignore[no-any-return] - of any module

    patch.setattr(models_tower.Merger, "forward", forward)


# What the text makes of the rows.


def _change_rows(patch: Patch, change: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]) -> None:
    """The rows that a tower gives, changed after the hooks on it have seen them."""
    real = torch.nn.Module.__call__
    patch.setattr(Tower, "__call__", lambda self, sight: change(real(self, sight)), raising=False)


def features_a_layer_late(patch: Patch) -> None:
    _change_rows(patch, lambda rows: (rows[0], torch.zeros_like(rows[0]), *rows[1:]))


def features_reversed(patch: Patch) -> None:
    _change_rows(patch, lambda rows: (rows[0], *reversed(rows[1:])))


def places_train_their_row(patch: Patch) -> None:
    """The row of the embedding that stands for an image gets a gradient, though its value is left out."""
    real = decoder.Embedding.forward

    def forward(self: Any, tokens_T: Tensor, none_T: Tensor | None = None) -> Tensor:
        x_TD = real(self, tokens_T, none_T)
        if none_T is None:
            return x_TD
        row_TD = real(self, tokens_T) * none_T[:, None]
        return x_TD + row_TD - row_TD.detach()

    patch.setattr(decoder.Embedding, "forward", forward)


# Positions and order.

Turn = Callable[[Tensor, Sequence[int], Sequence[Any]], None]


def _turned(patch: Patch, change: Turn) -> None:
    """Positions of tokens, changed in place. Only those of the batch: transformers gets the right ones."""
    real = data_batch.turns_of

    def turns_of(bounds: Sequence[int], frames: Sequence[Any]) -> Tensor:
        turns_T3 = real(bounds, frames)
        change(turns_T3, bounds, frames)
        return turns_T3

    patch.setattr(data_batch, "turns_of", turns_of)


def _after(bounds: Sequence[int], frame: Any) -> slice:
    """Return the tokens after a frame in its document."""
    return slice(frame.stop, next(bound for bound in bounds if bound >= frame.stop))


def positions_count_patches(patch: Patch) -> None:
    """A frame takes height times width positions, in place of the larger of both."""

    def change(turns_T3: Tensor, bounds: Sequence[int], frames: Sequence[Any]) -> None:
        for frame in frames:
            turns_T3[_after(bounds, frame)] += frame.num_tokens - max(frame.height, frame.width) // 2

    _turned(patch, change)


def time_counts_frames(patch: Patch) -> None:
    def change(turns_T3: Tensor, bounds: Sequence[int], frames: Sequence[Any]) -> None:
        for start, stop in pairwise(bounds):
            for number, frame in enumerate(f for f in frames if start <= f.start < stop):
                turns_T3[frame.start : frame.stop, 0] += number

    _turned(patch, change)


def positions_run_over_documents(patch: Patch) -> None:
    def change(turns_T3: Tensor, bounds: Sequence[int], frames: Sequence[Any]) -> None:
        for start, stop in list(pairwise(bounds))[1:]:
            turns_T3[start:stop] += turns_T3[:start].max() + 1

    _turned(patch, change)


def images_of_a_size_exchanged(patch: Patch) -> None:
    """Swap neighbours in a document: nothing but their pixels tells them apart."""
    real = data_images._check_images

    def exchanged(number: int, images: Any) -> Any:
        patches, sizes = real(number, images)
        for at in range(len(patches) - 1):
            if patches[at].shape == patches[at + 1].shape and images[at][1] == images[at + 1][1]:
                patches[at], patches[at + 1] = patches[at + 1], patches[at]
        return patches, sizes

    patch.setattr(data_images, "_check_images", exchanged)


# Between ranks.


def biases_summed_twice(patch: Patch) -> None:
    """Multiply the biases of the tower, as if each rank that has run it summed them."""

    def more(grads: dict[str, Tensor]) -> None:
        for name in grads:
            if name.startswith("tower.") and name.endswith("bias"):
                grads[name].mul_(dist.get_world_size())

    finished(patch, more)


def shares_not_summed(patch: Patch) -> None:
    """Each rank keeps its share of the gradients of the tower."""
    real = engine_module.axes_left_to_sum
    patch.setattr(
        engine_module,
        "axes_left_to_sum",
        lambda param, *rest: () if param.name.startswith(TOWER) else real(param, *rest),
    )


def a_bias_of_every_rank(patch: Patch) -> None:
    """Rows are taken for partial sums, each with the last bias."""
    real = models_tower.Merger.forward

    def forward(self: Any, x_PE: Tensor) -> Tensor:
        bias = self.fc2.bias.to(x_PE.dtype)
        return real(self, x_PE) + (dist.get_world_size() - 1) * bias

    patch.setattr(models_tower.Merger, "forward", forward)


class _Sliced(AllToAll):
    """Sends gradients back, of which each rank takes those of its own tokens alone."""

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None, None, None, None]:
        back, *none = AllToAll.backward(ctx, d)
        kept = [piece * float(rank == dist.get_rank()) for rank, piece in enumerate(back.split(ctx.ins))]
        return torch.cat(kept), *none  # type: ignore[return-value] - as many as Exchange has


def a_slice_for_a_sum(patch: Patch) -> None:
    patch.setattr(parallel_tower, "AllToAll", _Sliced)


def replicas_summed_at_the_last(patch: Patch) -> None:
    """FSDP reduces replicas in the last micro-batch, though the tower ran only before it."""
    patch.setattr(run_step, "sum_replicas", lambda tower, *, now: None)


def frames_shared_otherwise(patch: Patch) -> None:
    """The last rank gives away the last of equally costly frames first."""
    real = layout_frames.balance_frames

    def share(sizes: Sequence[int], parts: int, cost: Any) -> tuple[int, ...]:
        if dist.get_rank() < dist.get_world_size() - 1:
            return real(sizes, parts, cost)
        return real(sizes[::-1], parts, cost)[::-1]

    patch.setattr(layout_frames, "balance_frames", share)


def rows_at_other_places(patch: Patch) -> None:
    real = run_step.sight_of

    def sight_of(*args: Any) -> Any:
        sight = real(*args)
        return sight and replace(sight, at_N=sight.at_N.roll(1))

    patch.setattr(run_step, "sight_of", sight_of)


def each_by_its_own_batch(patch: Patch) -> None:
    """A rank without images leaves the tower out, even if others have some."""

    def own(batches: Sequence[Batch], mask: int, tower: Any) -> list[Batch]:
        return list(batches)

    faulthandler.disable()  # gloo ends a rank, and the stack of it says nothing
    patch.setattr(engine_module, "sync_images", own)
