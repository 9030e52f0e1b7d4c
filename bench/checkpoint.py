"""Time saving and resuming about 1 GB on local ranks, against raw I/O of the same bytes and torch's DCP.

    python -m bench.checkpoint                                    # fsdp=2, tp=2 and fsdp=2 x tp=2 x ep=2
    python -m bench.checkpoint --layouts fsdp2 --rounds 9

The model is a Qwen3 of 64 million parameters (with experts where the mesh has ep): weights in bfloat16, masters and
optimizer state in float32. All contenders take turns in the same processes with one thread per rank. Times are medians
of the slower rank, and every write ends with its bytes on the disk (fsync).

- raw: each rank writes as many bytes as `mw.save` does into its own file, and reads them back into new memory.
- copy, exchange: what a save with `wait=False` must do before it returns.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageWriter

import meshwright as mw
from meshwright.verify import run_ranks
from meshwright.weights import StoredModel, whole_rows

MODEL = {
    "model_type": "qwen3", "vocab_size": 16000, "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64,
    "tie_word_embeddings": True, "dtype": "bfloat16",
}  # fmt: skip
EXPERTS = MODEL | {
    "model_type": "qwen3_moe", "num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 224,
    "norm_topk_prob": True,
}  # fmt: skip
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "fsdp2": (MODEL, {"fsdp": 2}),
    "tp2": (MODEL, {"tp": 2}),
    "fsdp2+tp2+ep2": (EXPERTS, {"fsdp": 2, "tp": 2, "ep": 2}),
}


# The mesh of the checkpoint that `resume, other mesh` reads.
OTHER = {"fsdp2": {"tp": 2}, "tp2": {"fsdp": 2}, "fsdp2+tp2+ep2": {"fsdp": 2, "ep": 2}}


def save_on(config: Path, mesh: dict[str, int], at: Path) -> None:
    mw.save(engine_on(config, mesh), at)


def engine_on(config: Path, mesh: dict[str, int]) -> mw.Engine:
    """Return an engine that has trained one step, so that it has optimizer state to save."""
    model = mw.init(config, mw.Mesh(**mesh, device="cpu"))
    engine = mw.Engine(model, lr=1e-3)
    engine.step([mw.pack([list(range(63))], length=64)])
    return engine


def raw_write(tensors: list[torch.Tensor], at: Path) -> None:
    fd = os.open(at, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for tensor in tensors:
        left = memoryview(tensor.reshape(-1).view(torch.uint8).numpy()).cast("B")
        while left:
            left = left[os.write(fd, left[: 16 << 20]) :]
    os.fsync(fd)
    os.close(fd)


def raw_read(at: Path) -> None:
    into, fd = memoryview(bytearray(at.stat().st_size)), os.open(at, os.O_RDONLY)
    while into:
        into = into[os.readv(fd, [into[: 16 << 20]]) :]
    os.close(fd)


def pieces(engine: mw.Engine) -> list[torch.Tensor]:
    stored, moments = engine.model.stored(), engine.optimizer.state
    weights = [tensor.bfloat16() for tensor in stored.values()]
    return [*weights, *stored.values(), *(moment for both in moments.values() for moment in both)]


def timed(act: Callable[[], object]) -> float:
    dist.barrier()
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def peak_bytes(act: Callable[[], object]) -> int:
    """Return the peak memory of a call, above what the process had before. Writing 5 to clear_refs resets VmHWM."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    act()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def turns(config: Path, mesh: dict[str, int], rounds: int, at: Path) -> dict[str, list[float]]:
    engine = engine_on(config, mesh)
    rank, results = dist.get_rank(), dict[str, list[float]]()
    own_file = at / f"raw-{rank}"
    state = {f"{rank}.{number}": tensor for number, tensor in enumerate(pieces(engine))}

    folder = at / "now"

    def note(name: str, act: Callable[[], object]) -> None:
        results.setdefault(name, []).append(timed(act))

    def writes(name: str, act: Callable[[], object]) -> None:
        """Time a write into a new folder, after the disk has written everything else."""
        if rank == 0:
            folder.mkdir()
            os.sync()
        note(name, act)
        engine.wait()
        dist.barrier()
        if rank == 0:
            shutil.rmtree(folder)

    results["bytes"] = [float(sum(tensor.numel() * tensor.element_size() for tensor in state.values()))]
    results["peak bytes of a save"] = [float(peak_bytes(lambda: mw.save(engine, at / "ours")))]
    raw_write(list(state.values()), own_file)
    for _ in range(rounds):
        writes("raw write", lambda: raw_write(list(state.values()), folder / str(rank)))
        writes("save", lambda: mw.save(engine, folder))
        writes("dcp save", lambda: dcp.save(state, checkpoint_id=folder))
        writes("dcp hf save", lambda: save_consolidated(engine, folder))
        note("copy", lambda: [tensor.clone() for tensor in (*engine.model.stored().values(), *_moments(engine))])
        note("exchange", lambda: exchange(engine))
        writes("save, blocked", lambda: mw.save(engine, folder, wait=False))
        note("raw read", lambda: raw_read(own_file))
        note("resume", lambda: mw.resume(engine, at / "ours"))
        note("resume, other mesh", lambda: mw.resume(engine, at / "other"))
    return results


def exchange(engine: mw.Engine) -> None:
    """Exchange the rows that tp cuts into column strips, as a save does before it writes them."""
    model, moments = engine.model, engine.optimizer.state
    first, second = ({name: both[at] for name, both in moments.items()} for at in (0, 1))
    for values in (model.stored(), first, second):
        deque(whole_rows(StoredModel(model.blueprint.spec, model.mesh, values)), maxlen=0)


def save_consolidated(engine: mw.Engine, folder: Path) -> None:
    """Save the same tensors as Hugging Face files with DCP: sharded files first, then consolidated."""
    planes = {name: keys for name, keys in engine.state_dict().items() if name != "counters"}
    flat = {f"{plane}.{key}": tensor for plane, keys in planes.items() for key, tensor in keys.items()}
    files = {name: 1 + list(planes).index(name.split(".")[0]) for name in flat}
    writer = HuggingFaceStorageWriter(
        str(folder), fqn_to_index_mapping=files, save_distributed=True, enable_consolidation=True
    )
    dcp.save(flat, storage_writer=writer)


def _moments(engine: mw.Engine) -> list[torch.Tensor]:
    return [moment for both in engine.optimizer.state.values() for moment in both]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write; this disk is measured")
    options = parser.parse_args()
    for layout in options.layouts:
        config, mesh = LAYOUTS[layout]
        world = max(1, mesh.get("fsdp", 1) * mesh.get("tp", 1))
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config))
            run_ranks(2, save_on, Path(folder), OTHER[layout], Path(folder) / "other", seconds=600)
            ranks = run_ranks(world, turns, Path(folder), mesh, options.rounds, Path(folder), seconds=3600)
        show(layout, ranks)


def show(layout: str, ranks: list[dict[str, list[float]]]) -> None:
    names = list(ranks[0])
    median = {name: statistics.median(map(max, zip(*(rank[name] for rank in ranks), strict=True))) for name in names}
    median["copy + exchange"] = median["copy"] + median["exchange"]
    for name, value in median.items():
        reference = {
            "save": "raw write",
            "dcp save": "raw write",
            "resume": "raw read",
            "resume, other mesh": "raw read",
            "dcp hf save": "raw write",
            "save, blocked": "copy + exchange",
        }.get(name)
        ratio = f"  {median[reference] / value:.2f} of {reference}" if reference else ""
        print(f"{layout:14} {name:16} {value / 1e6 if value > 1000 else value:8.3f}{ratio}")


if __name__ == "__main__":
    main()
