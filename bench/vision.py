"""Time forward + backward of a vision-language model, against transformers, in one process and on two ranks.

    python -m bench.vision                     # one process, and fsdp on two ranks
    python -m bench.vision --ranks 1 --rounds 9 --append

The text model is that of bench/step.py, 8 layers of width 512; the vision encoder has 6 blocks of width 384. Documents
have 1024 tokens; two images take 128 of them (512 patches). Each rank has its own, in float32. On two ranks, the
peer is transformers' model in torch's DistributedDataParallel. `text alone` runs the same model on 1024 text tokens,
which shows what images cost. `without a tower` runs the text model on them, which shows what an idle encoder costs.
Contenders alternate in one run; times are medians of the slower rank.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import meshwright as mw
from bench.step import COMMON, TOKENS
from meshwright.verify import run_ranks

PLACE, START, END = 31990, 31991, 31992
GRID = (1, 16, 16)
PIXELS = 3 * 2 * 16 * 16
CONFIG: dict[str, Any] = {
    "model_type": "qwen3_vl", "dtype": "float32", "tie_word_embeddings": False, "image_token_id": PLACE,
    "video_token_id": 31993, "vision_start_token_id": START, "vision_end_token_id": END,
    "text_config": {
        **COMMON, "model_type": "qwen3_vl_text",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [12, 10, 10]},
    },
    "vision_config": {
        "model_type": "qwen3_vl_vision", "depth": 6, "hidden_size": 384, "num_heads": 6, "intermediate_size": 1536,
        "patch_size": 16, "out_hidden_size": 512, "num_position_embeddings": 2304, "deepstack_visual_indexes": [1, 3],
    },
}  # fmt: skip
Step = Callable[[], float]
Made = tuple[list[int], list[tuple[Tensor, tuple[int, int, int]]]]


def document(seed: int, *, sees: bool) -> Made:
    """Make a document of text tokens, with two images in it if it `sees`."""
    g = torch.Generator().manual_seed(seed)
    text = torch.randint(PLACE, (TOKENS,), generator=g).tolist()
    if not sees:
        return text, []
    num = GRID[1] * GRID[2] // 4
    run = [START, *[PLACE] * num, END]
    tokens = [*text[:100], *run, *text[100:300], *run, *text]
    return tokens[:TOKENS], [(torch.randn(4 * num, PIXELS, generator=g), GRID) for _ in range(2)]


def make(recipe: Path) -> None:
    mw.export(mw.init(recipe, mw.Mesh(device="cpu"), tower=True, dtype=torch.float32), recipe / "m")


def ours(directory: Path, ranks: int, *, sees: bool, tower: bool = True) -> Step:
    model = mw.load(directory, mw.Mesh(fsdp=ranks, device="cpu"), dtype=torch.float32, tower=tower)
    engine, (tokens, images) = mw.Engine(model, lr=1e-3), document(1 + model.mesh.data_rank, sees=sees)
    shown = {"images": [images], "placeholders": [PLACE]} if images else {}

    def step() -> float:
        loss = engine.backward([mw.pack([tokens], **shown)])
        engine.discard()
        return loss

    return step


def peer(directory: Path, ranks: int) -> Step:
    model: Any = transformers.AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32)
    tokens, images = document(1 + (dist.get_rank() if ranks > 1 else 0), sees=True)
    ids = torch.tensor([tokens])
    inputs = {
        "input_ids": ids, "mm_token_type_ids": (ids == PLACE).long(), "use_cache": False,
        "labels": ids.masked_fill(ids == PLACE, -100), "pixel_values": torch.cat([each for each, _ in images]),
        "image_grid_thw": torch.tensor([GRID] * len(images)),
    }  # fmt: skip
    run = model if ranks == 1 else DistributedDataParallel(model)

    def step() -> float:
        loss = run(**inputs).loss
        loss.backward()
        model.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


SIDES: dict[str, Callable[[Path, int], Step]] = {
    "meshwright": functools.partial(ours, sees=True),
    "transformers": peer,
    "meshwright, text alone": functools.partial(ours, sees=False),
    "meshwright, without a tower": functools.partial(ours, sees=False, tower=False),
}


def turns(directory: Path, ranks: int, rounds: int) -> dict[str, list[float]]:
    """Run all contenders in turn on this rank, and return their seconds."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    if ranks > 1:
        dist.init_process_group("gloo")
    steps = {name: begin(directory, ranks) for name, begin in SIDES.items()}
    seconds: dict[str, list[float]] = {name: [] for name in SIDES}
    for number in range(rounds + 1):
        for name, step in steps.items():
            if ranks > 1:
                dist.barrier()
            began = time.perf_counter()
            step()
            if number:  # the first round warms up
                seconds[name].append(time.perf_counter() - began)
    return seconds


def compare(ranks: int, rounds: int) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder)
        (recipe / "config.json").write_text(json.dumps(CONFIG))
        run_ranks(1, make, recipe, seconds=300)
        results = run_ranks(ranks, turns, recipe / "m", ranks, rounds, seconds=1800)
    seconds = {name: [max(s) for s in zip(*(of[name] for of in results), strict=True)] for name in SIDES}
    patches = 2 * GRID[1] * GRID[2]
    rows = [
        f"| {ranks if n == 0 else ''} | {name} | {(took := statistics.median(seconds[name])):.3f} "
        f"| {ranks * TOKENS / took:.0f} | {ranks * patches / took if n < 2 else 0:.0f} |"
        for n, name in enumerate(SIDES)
    ]
    own, other, alone, towerless = seconds.values()
    share = ratio([1 - w / m for w, m in zip(alone, own, strict=True)])
    summary = (
        f"| | transformers by meshwright {ratio([b / a for a, b in zip(own, other, strict=True)])}; "
        f"images take {share} of a step; text alone by the text model "
        f"{ratio([a / b for a, b in zip(alone, towerless, strict=True)])} | | | |"
    )
    return [*rows, summary]


def ratio(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f}-{max(values):.3f})"


HEADER = "| ranks | side | s a step | tokens/s | patches/s |\n|---|---|---|---|---|"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, choices=[1, 2], default=[1, 2])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--append", action="store_true", help="add the table to bench/results.md")
    options = parser.parse_args()
    lines = [HEADER]
    print(HEADER)
    for ranks in options.ranks:
        rows = compare(ranks, options.rounds)
        print("\n".join(rows), flush=True)
        lines += rows
    if options.append:
        title = f"\n## vision, {datetime.date.today()}\n\n{os.cpu_count()} cores of {platform.machine()}, "
        title += f"torch {torch.__version__}, transformers {transformers.__version__}, float32\n\n"
        with (Path(__file__).parent / "results.md").open("a") as file:
            file.write(title + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
