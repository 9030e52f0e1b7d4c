"""The most memory that a step takes: as `meshwright plan` says, and as torch's profiler counts it on a CPU.

    python -m bench.memory                                   # the models of bench.step, on one process and on meshes
    python -m bench.memory --models qwen3 --meshes fsdp=2 --dtypes float32 --recompute full

Both are of two micro-batches, of the rank that takes most, and without parameters and moments, which are there before.
`of it activations`: what the plan says of these alone. `--append` adds the table to bench/results.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile

import meshwright as mw
from bench.step import MODELS, TOKENS
from meshwright.axes import Axes
from meshwright.blueprint import Blueprint
from meshwright.memory.budget import Need, held_while_training
from meshwright.memory.simulate import ACTIVATIONS, StepWork
from meshwright.mesh import collectives, local_collectives
from meshwright.plan.requested import mesh_of
from meshwright.recipe import Recipe
from meshwright.verify.local_ranks import run_ranks

BATCHES = 2  # the second finds gradients there
MESHES = ("", "fsdp=2", "tp=2", "cp=2", "fsdp=2,ep=2", "pp=2", "fsdp=2,tp=2")


class Asked(NamedTuple):
    config: Mapping[str, Any]
    sizes: Mapping[str, int]
    dtype: torch.dtype
    memory: mw.MemoryOptions
    tokens: int
    num_batches: int = BATCHES


def said(asked: Asked) -> dict[str, int]:
    """By the plan, of the rank that takes most: bytes of each kind beside parameters and moments."""
    axes, memory = Axes(**asked.sizes), asked.memory
    blueprint = Blueprint.of(dict(asked.config), None, Recipe(memory=memory))
    held = held_while_training(asked.dtype, frozenset(blueprint.table.params), offload=memory.offload)
    passing = StepWork(asked.tokens, asked.num_batches, asked.dtype, memory, "cpu")
    need = Need(blueprint.spec, axes, held, passing)
    parts = [{s.what: s.num_bytes for s in need.stored(rank)} for rank in axes.group(0, ("pp",))]
    for each in parts:
        for what in ("parameters", "moments"):
            each.pop(what)
    return max(parts, key=lambda each: sum(each.values()))


def counted(asked: Asked) -> int:
    """By torch, of the rank that takes most."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**asked.config, "dtype": "bfloat16"}))
        return max(run_ranks(Axes(**asked.sizes).world, _of_rank, folder, asked, seconds=900))


def _of_rank(folder: str, asked: Asked) -> int:
    model = mw.init(folder, mw.Mesh(**asked.sizes, device="cpu"), dtype=asked.dtype, memory=asked.memory)
    engine, vocab = mw.Engine(model, lr=1e-3), model.blueprint.vocab
    noise = torch.Generator().manual_seed(model.mesh.data_rank)
    documents = torch.randint(vocab, (asked.num_batches, asked.tokens), generator=noise).tolist()
    batches = [mw.pack([document]) for document in documents]
    engine.backward(batches)  # kernels are chosen and FSDP is set up
    engine.discard()
    with _freed_here(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        engine.backward(batches)
    return most_of(profiled)


@contextmanager
def _freed_here() -> Iterator[None]:
    """The profiler looks at one thread alone, and would take what gloo's threads free for memory that is held for ever.
    So within it sums and gathers make what they make without gloo, and rows are exchanged in another thread."""

    def all_gather(x: torch.Tensor, size: int, _group: str) -> torch.Tensor:
        return x.repeat(size, *[1] * (x.dim() - 1))

    def reduce_scatter(x: torch.Tensor, size: int, _group: str) -> torch.Tensor:
        return x.chunk(size)[0].clone()

    def start_all_to_all(x: torch.Tensor, outs: list[int], ins: list[int], group: str) -> torch.Tensor:
        held = x.contiguous()
        out = held.new_empty(sum(outs), *held.shape[1:])

        def exchange() -> None:
            out.copy_(torch.ops._c10d_functional.wait_tensor(real(held.clone(), outs, ins, group)))

        unseen = threading.Thread(target=exchange)
        unseen.start()
        unseen.join()
        return out

    def swap(sent: Sequence[torch.Tensor], got: Sequence[torch.Tensor], *_: object) -> None:
        for part, to in zip(sent, got, strict=True):
            if part.data_ptr() != to.data_ptr():  # its own is there already
                to.copy_(part)

    real = collectives.start_all_to_all
    of_doors = patch.multiple(
        collectives, all_gather=all_gather, reduce_scatter=reduce_scatter, start_all_to_all=start_all_to_all
    )
    with of_doors, patch.object(local_collectives, "_swap", swap):
        yield


def most_of(profiled: profile) -> int:
    """The most that was there at once of what was allocated while the profiler looked."""
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
    asked = Asked(MODELS[name], mesh_of(mesh), dtype, mw.MemoryOptions(recompute=recompute), TOKENS)
    parts, found = said(asked), counted(asked)
    due, passing = sum(parts.values()), parts[ACTIVATIONS]
    return (
        f"| {name} | {mesh or 'one'} | {str(dtype)[6:]} | {recompute} | {due / 1e6:.1f} | {passing / 1e6:.1f} "
        f"| {found / 1e6:.1f} | {due / found:.3f} |"
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
