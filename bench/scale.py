"""Time what one rank of thousands does on a laptop: loading before the first byte is read, and a step's bookkeeping.

    python -m bench.scale                       # Qwen3-235B and a Qwen3.5-397B, as one rank of 64 to 16,384
    python -m bench.scale --models 235B --ranks 1024

Process groups are torch's fake ones, and files have headers and holes. Nothing is computed or sent. Times are CPU
seconds of one thread; each line runs in a new process.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg

import meshwright as mw
from bench.plans import QWEN3_235B
from meshwright.blueprint import Blueprint
from meshwright.engine.agreement import Data, GatheredData, Proposal, warn_of_same_data, whole_step
from meshwright.mesh import Memory
from meshwright.weights import make_files

QWEN3_5_397B: dict[str, Any] = dict(
    model_type="qwen3_5_moe_text", vocab_size=248320, hidden_size=4096, num_hidden_layers=60, num_attention_heads=32,
    num_key_value_heads=2, head_dim=256, num_experts=512, num_experts_per_tok=10, moe_intermediate_size=1024,
    shared_expert_intermediate_size=1024, linear_num_key_heads=16, linear_num_value_heads=64, linear_key_head_dim=128,
    linear_value_head_dim=128, linear_conv_kernel_dim=4, tie_word_embeddings=False, dtype="bfloat16",
    rope_parameters=dict(rope_type="default", rope_theta=1e7, partial_rotary_factor=0.25, mrope_section=[11, 11, 10]),
)  # fmt: skip
ENOUGH = Memory(1 << 40, 1 << 40, shared=True)  # no tensor is written, so any size will do
MODELS = {"235B": QWEN3_235B, "397B": QWEN3_5_397B}
# 397B has 2 kv heads: with more tp ranks, several have copies of a kv head
MESHES = {
    "235B": {
        64: dict(fsdp=16, tp=4, ep=16), 1024: dict(fsdp=128, tp=8, ep=64),
        16384: dict(replicate=8, fsdp=256, tp=8, ep=64),
    },
    "397B": {
        64: dict(fsdp=32, tp=2, ep=32), 1024: dict(fsdp=256, tp=4, ep=128),
        16384: dict(replicate=8, fsdp=512, tp=4, ep=128),
    },
}  # fmt: skip


@contextmanager
def alone(rank: int, axes: dict[str, int]) -> Iterator[mw.Mesh]:
    """Open the mesh of one rank. Its collectives return at once, without data."""
    world = torch.tensor([size for axis, size in axes.items() if axis != "ep"]).prod().item()
    dist.init_process_group("fake", rank=rank, world_size=int(world), store=torch._C._distributed_c10d.HashStore())
    with (
        patch.object(mw.Mesh, "_refuse_another", lambda mesh: setattr(mesh, "least_bytes", ENOUGH.device_bytes)),
        patch.object(mw.Mesh, "memory", ENOUGH),
    ):
        yield mw.Mesh(**axes, device="cpu")


def seconds(act: Callable[[], Any]) -> tuple[float, Any]:
    begun = time.process_time()
    done = act()
    return time.process_time() - begun, done


def gathered_by(mesh: mw.Mesh) -> GatheredData:
    """Return what ranks gather before a step, if all bring equally many tokens."""
    row = astuple(Data(weight=1.0, num_targets=8000, num_batches=2, num_tokens=8192, num_real=16000, checksum=7))
    ranks = mesh.ranks_over(mw.axes.DENSE)
    return GatheredData(torch.tensor([row], dtype=torch.float64).repeat(len(ranks), 1), mesh.axes.data_rank(ranks))


def measured(source: Path, axes: dict[str, int], rank: int) -> dict[str, float]:
    with alone(rank, axes) as mesh, patch("meshwright.engine.model.fill", lambda *_: 0):
        groups, _ = seconds(lambda: mesh.process_group(mw.axes.DENSE))
        loading, model = seconds(lambda: mw.load(source, mesh))
        engine, made = seconds(lambda: mw.Engine(model, lr=1e-5))
        gathered = gathered_by(mesh)
        step = min(seconds(lambda: step_of(gathered, mesh))[0] for _ in range(5))
        stored = sum(tensor.nbytes for tensor in model.stored().values())
        planned = next(s.num_bytes for s in model.need().stored(rank) if s.what == "parameters")
    return {"load": loading, "engine": engine, "step": 1e3 * step, "stored": stored, "planned": planned,
            "trained": len(made.trained), "groups": groups}  # fmt: skip


def step_of(gathered: GatheredData, mesh: mw.Mesh) -> None:
    whole_step(Proposal(Data()), gathered, mesh)
    warn_of_same_data(gathered, 1)


def files_of(config: dict[str, Any], at: Path) -> Path:
    """Write a model directory with headers, and holes in place of weights."""
    at.mkdir()
    (at / "config.json").write_text(json.dumps(config))
    keymap = Blueprint.of(config).keymap
    make_files(at, keymap)
    weight_map = {key.name: key.file for key in keymap.keys.values()}
    (at / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return at


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=[*MODELS], choices=MODELS)
    parser.add_argument("--ranks", nargs="+", type=int, default=[64, 1024, 16384])
    options = parser.parse_args()
    print("| model | rank of | load without reading, s | engine, s | bookkeeping of a step, ms | stored = planned |")
    print("|---|---|---|---|---|---|")
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        for name in options.models:
            source = files_of(MODELS[name], Path(folder) / name)
            for world in options.ranks:
                with fork.Pool(1) as pool:
                    got = pool.apply(measured, (source, MESHES[name][world], world // 3))
                same = "yes" if got["stored"] == got["planned"] else f"{got['stored']} and {got['planned']}"
                print(
                    f"| {name} | {world:,} | {got['load']:.2f} | {got['engine']:.2f} | {got['step']:.2f} | {same} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
