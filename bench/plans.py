"""Time the planning of a rank for models that no laptop holds: saving and exporting Qwen3-235B-A22B as one of 1,024
ranks, and the number of reads that load Qwen3-8B on tp=8.

    python -m bench.plans

Only headers are written and read. Saving computes the place of every range of bytes; loading counts every read. Times
are CPU seconds of one thread, medians of 3 rounds.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

import torch
from torch import Tensor

from meshwright.axes import Axes
from meshwright.blueprint import Blueprint
from meshwright.checkpoint import planes_of
from meshwright.sharding import Block, Box, Piece, check_rows_to_write, column_axes, piece, place, rows_to_write
from meshwright.weights import Files, KeyMap, chosen, make_files, open_source
from meshwright.weights.reader import Reader, contiguous
from meshwright.weights.safetensors_header import DTYPES, Entry
from meshwright.weights.writer import staged

QWEN3_8B: dict[str, Any] = dict(
    model_type="qwen3", vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36,
    num_attention_heads=32, num_key_value_heads=8, head_dim=128, tie_word_embeddings=False, dtype="bfloat16",
)  # fmt: skip
QWEN3_235B: dict[str, Any] = dict(
    model_type="qwen3_moe", vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=94,
    num_attention_heads=64, num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
    moe_intermediate_size=1536, norm_topk_prob=True, tie_word_embeddings=False, dtype="bfloat16",
)  # fmt: skip
AXES = Axes(fsdp=128, tp=8, ep=64)
WINDOW_BYTES = 16 << 20  # of rows that come by an exchange


class Places(Files):
    """Files that record the place of each range of bytes instead of writing it."""

    def __init__(self, keymap: KeyMap) -> None:
        super().__init__(Path(), keymap)
        self.places: list[tuple[str, int, int]] = []

    def _write_box(self, block: Block, common: Box, values: Tensor) -> None:
        key = self.keymap.keys[block.key]
        size, start = DTYPES[key.dtype].itemsize, self._start[key.name]
        whole = block.view(torch.empty(key.shape, device="meta"))
        for part in staged(block, common):
            wanted = whole[part.within(block.ours).slices]
            for offset, length in contiguous(wanted.shape, wanted.stride(), int(wanted.storage_offset())):
                self.places.append((key.file, start + offset * size, length * size))


def windows(blueprint: Blueprint, rank: int) -> Iterator[Piece]:
    """Yield what a rank writes, in the windows in which rows arrive from an exchange."""
    for param in blueprint.table:
        own_rows = rows_to_write(param, blueprint.spec.rules, AXES, rank)
        exchanged = column_axes(param, place(param, blueprint.spec.rules, AXES))
        rows = max(1, WINDOW_BYTES // (param.matrix[1] * 4)) if exchanged else max(1, own_rows.hi - own_rows.lo)
        for lo in range(own_rows.lo, own_rows.hi, rows):
            yield replace(own_rows, lo=lo, hi=min(lo + rows, own_rows.hi))


def plan(blueprint: Blueprint, keymaps: list[KeyMap], rank: int) -> list[Places]:
    """Compute everything that a rank must know before it writes, headers included."""
    names = sorted(blueprint.table.params)
    for name in names[rank :: AXES.world]:
        check_rows_to_write(blueprint.table[name], blueprint.spec, AXES)
    files = [Places(keymap) for keymap in keymaps]
    for rows in windows(blueprint, rank):
        values = torch.empty(rows.shape, device="meta")
        for each in files:
            each.write(rows, values)
    return files


def save(blueprint: Blueprint, rank: int) -> list[Places]:
    wide = dict.fromkeys(blueprint.table.params, torch.float32)
    planes = planes_of(blueprint.table, replace(blueprint.keymap), wide, wide)  # a copy that has no headers yet
    return plan(blueprint, [plane.keymap for plane in planes], rank)


def export(blueprint: Blueprint, rank: int) -> list[Places]:
    return plan(blueprint, [replace(blueprint.keymap)], rank)


def timed(act: Callable[[Blueprint, int], list[Places]], blueprint: Blueprint, rank: int) -> str:
    seconds = []
    for _ in range(3):
        begun = time.process_time()
        files = act(blueprint, rank)
        seconds.append(time.process_time() - begun)
    runs = [run for each in files for run in each.places]
    return f"{statistics.median(seconds):.2f} s, {len(runs)} runs, {sum(run[2] for run in runs) / 1e9:.2f} GB"


class Counting(Reader):
    """A reader that counts reads and makes none."""

    num_reads = 0

    def _pread(self, entry: Entry, into: memoryview, offset: int) -> None:
        self.num_reads, self.num_bytes = self.num_reads + 1, self.num_bytes + len(into)


def reads(config: dict[str, Any], axes: Axes) -> str:
    """Return the number of reads of rank 0, from files that have only headers."""
    with tempfile.TemporaryDirectory() as folder:
        make_files(Path(folder), Blueprint.of(config).keymap)
        blueprint = Blueprint.of(config, open_source(folder))
        source = blueprint.keymap.source
        assert source is not None
        reader = Counting(source)
        with reader:
            for param in blueprint.table:
                held = piece(param, blueprint.spec.rules, axes, axes.coords(0))
                stored = torch.empty(held.shape, device="meta")
                reader.fill(chosen(param, blueprint.keymap.choice), held, stored)
    return f"{reader.num_reads} reads of {reader.num_bytes / 1e9:.2f} GB"


def main() -> None:
    torch.set_num_threads(1)
    blueprint = Blueprint.of(QWEN3_235B)
    print(f"Qwen3-235B-A22B on {AXES}: {len(blueprint.keymap.keys)} keys")
    for rank in (0, 517):
        print(f"  rank {rank}: a save {timed(save, blueprint, rank)}; an export {timed(export, blueprint, rank)}")
    print(f"Qwen3-8B on tp=8: {reads(QWEN3_8B, Axes(tp=8))}")


if __name__ == "__main__":
    main()
