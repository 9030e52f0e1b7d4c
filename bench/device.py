"""Time a step on one GPU, against transformers, at realistic model sizes, and compare memory with the plan.

    python -m bench.device                                        # all models: steps, and memory
    python -m bench.device --models qwen3-1.7b --kinds none fp8
    python -m bench.device --models qwen3-1.7b --profile          # also list the slowest kernels
    python -m bench.device --agreement                            # compare gradients only

A step has two documents of 4096 tokens. Weights are random, in the published sizes. A kind is one of `mw.MemoryOptions`
or fp8 (default: none, full and fp8). Meshwright has float32 parameters and optimizer state, and matmuls in bfloat16.
transformers has everything in bfloat16, with torch's fused AdamW and scaled_dot_product_attention. Seconds are medians
of 5 steps. Only one of the two is on the device at a time.

`--agreement`: the distance of each float32 gradient from that of transformers, relative to its norm.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.profiler import ProfilerActivity, profile

import meshwright as mw
from meshwright.blueprint import Blueprint
from meshwright.memory.budget import Need
from meshwright.memory.simulate import ACTIVATIONS, StepWork

DOCUMENTS, TOKENS, ROUNDS = 2, 4096, 5
QWEN3 = dict(
    model_type="qwen3", vocab_size=151936, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
    max_position_embeddings=40960, rope_theta=1000000, rms_norm_eps=1e-6,
)  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-1.7b": dict(
        QWEN3, hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16
    ),
    "qwen3-4b": dict(QWEN3, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32),
    "qwen3.5-2b": dict(
        model_type="qwen3_5_text", vocab_size=248320, hidden_size=2048, intermediate_size=6144, num_hidden_layers=24,
        num_attention_heads=8, num_key_value_heads=2, head_dim=256, tie_word_embeddings=True, linear_num_key_heads=16,
        linear_num_value_heads=16, linear_key_head_dim=128, linear_value_head_dim=128, max_position_embeddings=40960,
        rope_parameters=dict(rope_type="default", rope_theta=10000000.0, partial_rotary_factor=0.25,
                             mrope_section=[11, 11, 10]),
    ),
    "qwen3-30b-a3b, 6 layers": dict(
        {**QWEN3, "model_type": "qwen3_moe", "num_key_value_heads": 4, "tie_word_embeddings": False}, hidden_size=2048,
        intermediate_size=6144, num_hidden_layers=6, num_attention_heads=32, num_experts=128, num_experts_per_tok=8,
        moe_intermediate_size=768, norm_topk_prob=True,
    ),
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"memory": mw.MemoryOptions(recompute="selective")},
    "full": {"memory": mw.MemoryOptions(recompute="full")},
    "compiled": {"memory": mw.MemoryOptions(compiled=True)},
    "offload": {"memory": mw.MemoryOptions(offload=True)},
    "fp8": {"fp8": "block"},
}


def documents(vocab: int, num_tokens: int = TOKENS) -> list[list[int]]:
    noise = torch.Generator().manual_seed(1)
    return [torch.randint(vocab, (num_tokens,), generator=noise).tolist() for _ in range(DOCUMENTS)]


def forget() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def seconds_of(step: Callable[[], object]) -> float:
    for _ in range(2):
        step()
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def planned(model: mw.Model, memory: mw.MemoryOptions) -> tuple[float, float]:
    """Return the planned GB on the device, and the GB of activations among them."""
    need = model.need()
    work = StepWork(DOCUMENTS * TOKENS, 1, torch.bfloat16, memory, "cuda")
    parts = {s.what: s.num_bytes for s in Need(need.spec, need.axes, need.held, work).stored(0)}
    return sum(parts.values()) / 1e9, parts.get(ACTIVATIONS, 0) / 1e9


def synchronised(step: Callable[[], object]) -> Counter[str]:
    """Count where the host waited for the device, by file and line. torch warns at each such wait."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return Counter(f"{Path(w.filename).name}:{w.lineno}" for w in warned if "called a synchronizing" in str(w.message))


def profiled(step: Callable[[], object]) -> None:
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        took = time.perf_counter() - began
    kernels = sorted(seen.key_averages(), key=lambda e: -e.self_device_time_total)
    busy = sum(e.self_device_time_total for e in kernels) / 1e6
    print(f"  the device was busy for {busy:.3f} of {took:.3f} s (with the profiler)")
    for e in kernels[:22]:
        print(f"    {e.self_device_time_total / 1e3:8.1f} ms {e.count:6d} x {e.key[:110]}")


def ours(directory: Path, name: str, kind: str, profile: bool) -> str:
    forget()
    options = KINDS[kind]
    model = mw.load(directory, mw.Mesh(device="cuda"), **options)
    engine, batches = mw.Engine(model, lr=1e-4), [mw.pack(documents(model.blueprint.vocab))]

    def both_ways() -> None:
        engine.backward(batches)
        engine.discard()

    began = time.perf_counter()
    engine.step(batches)
    first = time.perf_counter() - began
    halves, whole = seconds_of(both_ways), seconds_of(lambda: engine.step(batches))
    torch.cuda.reset_peak_memory_stats()
    loss = engine.step(batches).loss
    peak = torch.cuda.max_memory_allocated() / 1e9
    waits = synchronised(lambda: engine.step(batches))
    if profile:
        profiled(lambda: engine.step(batches))
    planned_gb, activations_gb = planned(model, options.get("memory", mw.MemoryOptions()))
    print(f"  first step {first:.1f} s, loss {loss:.4f}, waits for the device {dict(waits)}", flush=True)
    return (
        f"| {name} | meshwright, {kind} | {halves:.3f} | {whole:.3f} | {DOCUMENTS * TOKENS / whole:,.0f} "
        f"| {flops(directory) / whole / 1e12:.0f} | {peak:.2f} | {planned_gb:.2f} ({activations_gb:.2f}) |"
    )


def flops(directory: Path) -> float:
    """Return the FLOPs of all matmuls of a step: 6 per used parameter and token, and half of attention's (causal)."""
    config = json.loads((directory / "config.json").read_text())
    table, used = Blueprint.of(config).table, 0.0
    for p in table:
        share = 1.0
        if ".experts." in p.name:
            share = config["num_experts_per_tok"] / config["num_experts"]
        if "embed" not in p.name or config["tie_word_embeddings"]:
            used += p.numel * share
    full = sum(1 for n in range(config["num_hidden_layers"]) if config["model_type"] != "qwen3_5_text" or n % 4 == 3)
    attention = full * 6 * TOKENS * config["num_attention_heads"] * config["head_dim"]
    return DOCUMENTS * TOKENS * (6 * used + attention)


def peer(directory: Path, name: str, profile: bool, **options: Any) -> str:
    forget()
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, **options).cuda()
    ids = torch.tensor(documents(model.config.vocab_size), device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def both_ways() -> float:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return float(loss)

    def half() -> None:
        both_ways()
        model.zero_grad(set_to_none=True)

    def step() -> float:
        loss = both_ways()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    halves, whole = seconds_of(half), seconds_of(step)
    torch.cuda.reset_peak_memory_stats()
    loss = step()
    peak = torch.cuda.max_memory_allocated() / 1e9
    if profile:
        profiled(step)
    print(f"  transformers: loss {loss:.4f}", flush=True)
    return (
        f"| {name} | transformers | {halves:.3f} | {whole:.3f} | {DOCUMENTS * TOKENS / whole:,.0f} "
        f"| {flops(directory) / whole / 1e12:.0f} | {peak:.2f} | - |"
    )


def agreement(directory: Path, name: str) -> str:
    """Compare every gradient of 512 tokens with that of transformers in float32: ours in float32, both in bfloat16."""

    def of_peer(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        forget()
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).cuda()
        ids = torch.tensor(documents(model.config.vocab_size, 256), device="cuda")
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return {k: p.grad.float().cpu() for k, p in model.named_parameters()}

    def of_ours(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        forget()
        model = mw.load(directory, mw.Mesh(device="cuda"), dtype=dtype)
        engine = mw.Engine(model, lr=1e-4)
        engine.backward([mw.pack(documents(model.blueprint.vocab, 256))])
        return {k: g.float().cpu() for k, g in mw.gather(model, "grad").items()}

    expected, result = of_peer(torch.float32), of_ours(torch.float32)
    same, low, peer_low = (
        _distances(each, expected) for each in (result, of_ours(torch.bfloat16), of_peer(torch.bfloat16))
    )
    cells = [f"{max(each.values()):.1e} ({statistics.median(each.values()):.1e})" for each in (same, low, peer_low)]
    worst = max(same, key=lambda key: same[key])
    return f"| {name} | {len(same)} of {len(expected)} | {cells[0]} {worst} | {cells[1]} | {cells[2]} |"


def _distances(result: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> dict[str, float]:
    return {k: float((result[k] - expected[k]).norm() / expected[k].norm()) for k in expected.keys() & result.keys()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--kinds", nargs="*", choices=list(KINDS), default=["none", "full", "fp8"])
    parser.add_argument("--profile", action="store_true", help="list the slowest kernels")
    parser.add_argument("--agreement", action="store_true", help="compare gradients instead of timing")
    parser.add_argument("--no-peer", action="store_true", help="leave transformers out")
    options = parser.parse_args()
    print(torch.cuda.get_device_name(), f"torch {torch.__version__}", f"transformers {transformers.__version__}",
          f"python {platform.python_version()}", sep=", ", flush=True)  # fmt: skip
    rows = AGREEMENT if options.agreement else HEADER
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder:
            rows += measured(name, Path(folder), options)
    print("\n".join(rows))


HEADER = [
    "| model | side, kind | forward + backward s | step s | tokens/s | TFLOP/s | peak GB | plan GB (activations) |",
    "|---|---|---|---|---|---|---|---|",
]
AGREEMENT = [
    "| model | gradients | ours in float32: worst (median) | ours in bfloat16 | transformers in bfloat16 |",
    "|---|---|---|---|---|",
]


def measured(name: str, folder: Path, options: argparse.Namespace) -> list[str]:
    (folder / "config.json").write_text(json.dumps({**MODELS[name], "dtype": "bfloat16"}))
    mw.export(mw.init(folder, mw.Mesh(device="cuda")), directory := folder / "m")
    if options.agreement:
        return reported(agreement, directory, name)
    rows = [row for kind in options.kinds for row in reported(ours, directory, name, kind, options.profile)]
    return rows if options.no_peer else rows + reported(peer, directory, name, options.profile)


def reported(measure: Callable[..., str], *args: Any) -> list[str]:
    """Print and return the row of a measurement. A failure prints its traceback and does not stop the others."""
    try:
        row = measure(*args)
    except Exception:  # noqa: BLE001 - any failure
        print("FAILED", measure.__name__, *args[1:], traceback.format_exc(limit=-6), flush=True)
        return []
    print(row, flush=True)
    return [row]


if __name__ == "__main__":
    main()
