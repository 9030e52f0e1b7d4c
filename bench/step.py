"""Time forward + backward in one process against transformers, and relate it to the matmul roofline.

    python -m bench.step                     # all three models, float32 and bfloat16
    python -m bench.step --models qwen3 --dtypes float32 --rounds 5
    python -m bench.step --fp8 --device cuda --width 4096    # FP8 against bfloat16

The models are small: 8 layers, width 512, vocabulary 32000, 1024 tokens of one document. Each step has a new document,
as in training, the same for both libraries, which alternate in one run. Times are medians over the rounds. Peak memory
is that of a fresh process during its steps, weights and libraries included. `--append` adds the table to
bench/results.md.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

import meshwright as mw

TOKENS, THREADS = 1024, 2
COMMON = dict(
    vocab_size=32000, hidden_size=512, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=2,
    head_dim=64, intermediate_size=1536, tie_word_embeddings=False, max_position_embeddings=4096,
)  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": dict(model_type="qwen3", **COMMON),
    "qwen3_moe": dict(
        model_type="qwen3_moe", **COMMON, num_experts=32, num_experts_per_tok=4, moe_intermediate_size=256,
        norm_topk_prob=True,
    ),
    "qwen3_5": dict(
        model_type="qwen3_5_text", **COMMON, linear_num_key_heads=4, linear_num_value_heads=8,
        linear_key_head_dim=64, linear_value_head_dim=64,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.25,
                             mrope_section=[3, 3, 2]),
    ),
}  # fmt: skip

Step = Callable[[], float]


def make(recipe: Path) -> None:
    """Write a model with random weights next to its config."""
    mw.export(mw.init(recipe, mw.Mesh(device="cpu")), recipe / "m")


def document(seed: int = 1) -> list[int]:
    return torch.randint(32000, (TOKENS,), generator=torch.Generator().manual_seed(seed)).tolist()


def ours(directory: Path, dtype: torch.dtype) -> Step:
    return our_step(mw.load(directory, mw.Mesh(device="cpu"), dtype=dtype), map(document, count(1)))


def our_step(model: mw.Model, documents: Iterator[list[int]]) -> Step:
    engine = mw.Engine(model, lr=1e-3)

    def step() -> float:
        loss = engine.backward([mw.pack([next(documents)])])
        engine.discard()
        return loss

    return step


def peer(directory: Path, dtype: torch.dtype) -> Step:
    return their_step(
        transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype), map(document, count(1))
    )


def their_step(model: Any, documents: Iterator[list[int]]) -> Step:
    def step() -> float:
        ids = torch.tensor([next(documents)])
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        model.zero_grad(set_to_none=True)
        return loss.item()

    return step


def in_blocks(name: str, width: int) -> dict[str, Any]:
    """Return the config of a model in another width, with matrices of whole 128 x 128 blocks, as FP8 needs them."""
    config = {**MODELS[name], "hidden_size": width, "intermediate_size": 3 * width, "head_dim": 128}
    config |= {"num_attention_heads": width // 128, "num_key_value_heads": max(1, width // 512)}
    if "moe_intermediate_size" in config:
        config |= {"moe_intermediate_size": max(128, width // 2)}
    if "linear_key_head_dim" in config:
        config |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "rope_parameters": None}
    return config


def measure_fp8(name: str, rounds: int, device: str, width: int) -> str:
    """Time our step in bfloat16 and in FP8, alternating, on any device."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        (directory / "config.json").write_text(json.dumps({**in_blocks(name, width), "dtype": "bfloat16"}))
        mesh, times = mw.Mesh(device=device), {fp8: list[float]() for fp8 in (None, "block")}
        models = {fp8: mw.init(directory, mesh, fp8=fp8) for fp8 in times}
        steps = {fp8: our_step(model, map(document, count(1))) for fp8, model in models.items()}
        losses = [step() for step in steps.values()]
        for _ in range(rounds):
            for fp8, step in steps.items():
                mesh.synchronize()
                begin = time.perf_counter()
                step()  # its loss is a number on the host: the device has finished
                times[fp8].append(time.perf_counter() - begin)
        num = sum(p.numel for p in models[None].table)
    wide, low = (statistics.median(each) for each in times.values())
    return (
        f"| {name}, {num / 1e6:.0f}M | {wide:.3f} | {low:.3f} | {wide / low:.2f} | {losses[0]:.5f} | {losses[1]:.5f} |"
    )


SIDES = {"meshwright": ours, "transformers": peer}


def flops(config: dict[str, Any], parameters: int) -> float:
    """Return the FLOPs of all matmuls of a step, 6 per used parameter and token, without attention."""
    unused = config["vocab_size"] * config["hidden_size"]  # the embedding is looked up
    if "num_experts" in config:
        idle = config["num_experts"] - config["num_experts_per_tok"]
        unused += config["num_hidden_layers"] * idle * 3 * config["hidden_size"] * config["moe_intermediate_size"]
    return 6.0 * (parameters - unused) * TOKENS


def roofline(dtype: torch.dtype) -> float:
    """Measure the FLOP/s of a matmul as layers have it, in this run: the speed of the machine varies."""
    x, w = torch.randn(TOKENS, 512, dtype=dtype), torch.randn(3072, 512, dtype=dtype)
    times = []
    for _ in range(30):
        begin = time.perf_counter()
        torch.nn.functional.linear(x, w)
        times.append(time.perf_counter() - begin)
    return 2.0 * TOKENS * 512 * 3072 / statistics.median(times)


def peak_megabytes(side: str, directory: Path, dtype: torch.dtype) -> float:
    """Return the peak memory of a fresh process during two steps, without the peak of loading."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_held, (side, directory, dtype))


def _held(side: str, directory: Path, dtype: torch.dtype) -> float:
    torch.set_num_threads(THREADS)
    step = SIDES[side](directory, dtype)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again
    for _ in range(2):
        step()
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) / 1024


def measure(name: str, dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        (directory / "config.json").write_text(json.dumps({**MODELS[name], "dtype": "bfloat16"}))
        model = mw.init(directory, mw.Mesh(device="cpu"))
        num = sum(p.numel for p in model.table)
        mw.export(model, directory / "m")
        steps = {side: make(directory / "m", dtype) for side, make in SIDES.items()}
        losses = {side: step() for side, step in steps.items()}
        times: dict[str, list[float]] = {side: [] for side in steps}
        speed = []
        for _ in range(rounds):
            speed.append(roofline(dtype))
            for side, step in steps.items():
                begin = time.perf_counter()
                step()
                times[side].append(time.perf_counter() - begin)
        peaks = {side: peak_megabytes(side, directory / "m", dtype) for side in steps}
    ratios = [b / a for a, b in zip(times["meshwright"], times["transformers"], strict=True)]
    ideal = flops(MODELS[name], num) / statistics.median(speed)
    return dict(
        model=name, dtype=str(dtype).removeprefix("torch."), million=num / 1e6, ideal=ideal, losses=losses,
        ours=statistics.median(times["meshwright"]), peer=statistics.median(times["transformers"]),
        ratio=statistics.median(ratios), low=min(ratios), high=max(ratios), peaks=peaks,
    )  # fmt: skip


HEADER = (
    "| model | dtype | meshwright s | transformers s | ratio (min-max) | of roofline | peak MB ours | transformers |\n"
    "|---|---|---|---|---|---|---|---|"
)


def row(r: dict[str, Any]) -> str:
    peaks = r["peaks"]
    return (
        f"| {r['model']}, {r['million']:.0f}M | {r['dtype']} | {r['ours']:.3f} | {r['peer']:.3f} "
        f"| {r['ratio']:.2f} ({r['low']:.2f}-{r['high']:.2f}) | {r['ideal'] / r['ours']:.0%} "
        f"| {peaks['meshwright']:.0f} | {peaks['transformers']:.0f} |"
    )


def needs(package: str) -> None:
    """Refuse a missing package before a minute is spent on models."""
    if importlib.util.find_spec(package) is None:
        raise SystemExit(f"this bench needs {package}: pip install -e '.[bench]' -c requirements/constraints.txt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--fp8", action="store_true", help="compare our FP8 with our bfloat16")
    parser.add_argument("--device", default="cpu", help="device of --fp8 (default cpu, which emulates FP8)")
    parser.add_argument("--width", type=int, default=512, help="width of the models of --fp8 (default 512)")
    parser.add_argument("--append", action="store_true", help="add the table to bench/results.md")
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    if options.fp8:
        print("| model | bfloat16 s | fp8 s | ratio | loss in bfloat16 | in fp8 |\n|---|---|---|---|---|---|")
        for name in options.models:
            print(measure_fp8(name, options.rounds, options.device, options.width), flush=True)
        return
    lines = [HEADER]
    print(HEADER)
    for name in options.models:
        for dtype in options.dtypes:
            result = measure(name, getattr(torch, dtype), options.rounds)
            lines.append(row(result))
            print(lines[-1], f" losses {result['losses']}", flush=True)
    if options.append:
        title = f"\n## step, {datetime.date.today()}\n\n{THREADS} threads of {platform.machine()}, "
        title += f"torch {torch.__version__}, transformers {transformers.__version__}, {TOKENS} tokens, "
        title += f"{torch.backends.cpu.get_cpu_capability()}\n\n"
        with (Path(__file__).parent / "results.md").open("a") as file:
            file.write(title + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
