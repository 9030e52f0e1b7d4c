"""Compare the peak memory of a step that `meshwright plan` computes with what torch's profiler counts on a CPU.

    python -m bench.memory                                   # the models of bench.step, on one process and on meshes
    python -m bench.memory --models qwen3 --meshes fsdp=2 --dtypes float32 --recompute full

Both are for two micro-batches, on the rank that needs most, without parameters and optimizer state, which exist before.
`of it activations` is the planned part for activations. `--append` adds the table to bench/results.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import meshwright as mw
from bench.step import MODELS, TOKENS
from meshwright.axes import Axes
from meshwright.blueprint import Blueprint
from meshwright.memory.budget import Need, held_while_training
from meshwright.memory.simulate import ACTIVATIONS, StepWork
from meshwright.mesh import local_collectives
from meshwright.plan.requested import mesh_of
from meshwright.recipe import Recipe
from meshwright.verify.local_ranks import run_ranks

BATCHES = 2  # the second has the gradients of the first in memory
MESHES = ("", "fsdp=2", "tp=2", "cp=2", "fsdp=2,ep=2", "pp=2", "fsdp=2,tp=2")


class Case(NamedTuple):
    """A model, a mesh and options whose memory is measured."""

    config: Mapping[str, Any]
    sizes: Mapping[str, int]
    dtype: torch.dtype
    memory: mw.MemoryOptions
    tokens: int
    num_batches: int = BATCHES
    mtp: str = "carried"


def planned(case: Case) -> dict[str, int]:
    """Return the planned bytes by kind on the rank that needs most, without parameters and optimizer state."""
    axes, memory = Axes(**case.sizes), case.memory
    blueprint = Blueprint.of(dict(case.config), None, Recipe(memory=memory, mtp=case.mtp))
    held = held_while_training(case.dtype, frozenset(blueprint.table.params), offload=memory.offload)
    work = StepWork(case.tokens, case.num_batches, case.dtype, memory, "cpu")
    need = Need(blueprint.spec, axes, held, work)
    parts = [{s.what: s.num_bytes for s in need.stored(rank)} for rank in axes.group(0, ("pp",))]
    for each in parts:
        for what in ("parameters", "moments"):
            each.pop(what)
    return max(parts, key=lambda each: sum(each.values()))


def counted(case: Case) -> int:
    """Return the peak bytes that torch's profiler counts on the rank that needs most."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**case.config, "dtype": "bfloat16"}))
        return max(run_ranks(Axes(**case.sizes).world, _of_rank, folder, case, seconds=900))


def _of_rank(folder: str, case: Case) -> int:
    mesh, recipe = mw.Mesh(**case.sizes, device="cpu"), Recipe(dtype=case.dtype, memory=case.memory, mtp=case.mtp)
    model = mw.init(folder, mesh, **vars(recipe))
    engine, vocab = mw.Engine(model, lr=1e-3), model.blueprint.vocab
    noise = torch.Generator().manual_seed(model.mesh.data_rank)
    documents = torch.randint(vocab, (case.num_batches, case.tokens), generator=noise).tolist()
    batches = [mw.pack([document]) for document in documents]
    engine.backward(batches)  # kernels are chosen and FSDP is set up
    engine.discard()
    no_buffers = patch.object(local_collectives, "_add_up", _without_buffers)
    with no_buffers, profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        engine.backward(batches)
    return most_of(profiled)


def _without_buffers(
    out: torch.Tensor, parts: Sequence[torch.Tensor], _op: str, group: dist.ProcessGroup, _what: str
) -> None:
    """Stand in for a sum over ranks, which on the host receives into buffers that NCCL does not need."""
    out.copy_(parts[group.rank()])


def most_of(profiled: profile) -> int:
    """Return the peak of the memory that was allocated while the profiler ran."""
    assert profiled.profiler is not None
    assert profiled.profiler.kineto_results is not None
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


HEADER = (
    "| model | mesh | dtype | recompute | plan MB | of it activations | counted MB | plan / counted |\n"
    "|---|---|---|---|---|---|---|---|"
)


def row(name: str, mesh: str, dtype: torch.dtype, recompute: str) -> str:
    case = Case(MODELS[name], mesh_of(mesh), dtype, mw.MemoryOptions(recompute=recompute), TOKENS)
    parts, counted_bytes = planned(case), counted(case)
    planned_bytes, activations = sum(parts.values()), parts[ACTIVATIONS]
    return (
        f"| {name} | {mesh or 'one'} | {str(dtype)[6:]} | {recompute} | {planned_bytes / 1e6:.1f} "
        f"| {activations / 1e6:.1f} | {counted_bytes / 1e6:.1f} | {planned_bytes / counted_bytes:.3f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--meshes", nargs="+", default=list(MESHES), help="as --mesh of meshwright plan")
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--recompute", nargs="+", default=["none", "full"], choices=["none", "selective", "full"])
    parser.add_argument("--append", action="store_true", help="add the table to bench/results.md")
    options = parser.parse_args()
    lines = [HEADER]
    print(HEADER)
    for name in options.models:
        for mesh in options.meshes:
            if "ep=" in mesh and "moe" not in name:
                continue
            for dtype in options.dtypes:
                for recompute in options.recompute:
                    lines.append(row(name, mesh, getattr(torch, dtype), recompute))
                    print(lines[-1], flush=True)
    if options.append:
        title = (
            f"\n## Memory, {datetime.date.today()}\n\ntorch {torch.__version__}, {TOKENS} tokens, two micro-batches\n\n"
        )
        with (Path(__file__).parent / "results.md").open("a") as file:
            file.write(title + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
