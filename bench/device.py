"""Time a step on one GPU, against transformers, at realistic model sizes, and compare memory with the plan.

    python -m bench.device                                        # all models but 8B: steps, and memory
    python -m bench.device --models qwen3-1.7b --kinds none formulas compiled fp8+compiled
    python -m bench.device --models qwen3-1.7b --profile          # also list the ten dearest kernels
    python -m bench.device --agreement                            # compare gradients only
    python -m bench.device --rehearse                             # tiny sizes on a CPU; times mean nothing

A step has two documents of 4096 tokens. Weights are random, in the published sizes. A kind is one of `mw.MemoryOptions`
(none, selective, full, compiled, offload), fp8, moments (of AdamW in bfloat16), muon or formulas (without our Triton
kernels), or several joined by "+" (default: none, full and fp8). Meshwright has float32 parameters and optimizer state,
and matmuls in bfloat16. Of the peers, transformers has everything in bfloat16, with torch's fused AdamW and
scaled_dot_product_attention; float32 has masters and moments as Meshwright does, by autocast; compiled and liger are
the first one, compiled by torch or with Liger's kernels. A row that fails says why. Seconds are medians of 5 steps.
Only one side is on the device at a time.

`--agreement`: the distance of each float32 gradient from that of transformers, relative to its norm.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers

import meshwright as mw
from bench.device_peers import PEERS, name_of, steps_of, why_absent
from bench.gpu import Device, formulas_only, profiled, provenance
from meshwright.blueprint import Blueprint
from meshwright.memory.budget import Need
from meshwright.memory.simulate import ACTIVATIONS, StepWork
from meshwright.optim import AdamW, Muon
from meshwright.recipe import MemoryOptions

DOCUMENTS, TOKENS = 2, 4096
QWEN3 = dict(
    model_type="qwen3", vocab_size=151936, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
    max_position_embeddings=40960, rope_theta=1000000, rms_norm_eps=1e-6,
)  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-1.7b": dict(
        QWEN3, hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16
    ),
    "qwen3-4b": dict(QWEN3, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32),
    "qwen3-8b": dict(
        {**QWEN3, "tie_word_embeddings": False}, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36,
        num_attention_heads=32,
    ),
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
# Published sizes, made small for a rehearsal; heads of 128 and widths in whole blocks of 128, as FP8 needs them.
TINY = dict(hidden_size=128, intermediate_size=256, num_attention_heads=2, num_key_value_heads=1, vocab_size=997)
KINDS: dict[str, dict[str, Any]] = {
    "none": {},
    "formulas": {"formulas": True},
    "moments": {"optimizer": AdamW(state_dtype=torch.bfloat16)},
    "muon": {"optimizer": Muon()},
    "fp8": {"fp8": "block"},
    "selective": {"memory": MemoryOptions(recompute="selective")},
    "full": {"memory": MemoryOptions(recompute="full")},
    "compiled": {"memory": MemoryOptions(compiled=True)},
    "offload": {"memory": MemoryOptions(offload=True)},
}


@dataclass(frozen=True)
class Kind:
    """How Meshwright runs a model. `formulas`: without our Triton kernels."""

    memory: MemoryOptions = MemoryOptions()
    fp8: str | None = None
    optimizer: AdamW = AdamW()
    formulas: bool = False


def kind_of(text: str) -> Kind:
    """Parse "moments+compiled". One field of `mw.MemoryOptions` at most, since each of those kinds sets all of it."""
    options: dict[str, Any] = {}
    for part in text.split("+"):
        if part not in KINDS or options.keys() & KINDS[part].keys():
            raise argparse.ArgumentTypeError(f"{text!r}: join kinds of {', '.join(KINDS)} that go together by +")
        options |= KINDS[part]
    return Kind(**options)


def config_of(name: str, device: Device) -> dict[str, Any]:
    config = {**MODELS[name], "dtype": "bfloat16"}
    if device.rehearses:
        few = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
        heads = {"linear_num_key_heads": 1, "linear_num_value_heads": 2}
        config |= TINY | {key: value for key, value in (few | heads).items() if key in config}
        config["num_hidden_layers"] = 4 if "linear_num_key_heads" in config else 2
    return config


def num_tokens_of(device: Device) -> int:
    """Return the tokens of a document."""
    return 128 if device.rehearses else TOKENS


def documents(vocab: int, num_tokens: int) -> list[list[int]]:
    noise = torch.Generator().manual_seed(1)
    return [torch.randint(vocab, (num_tokens,), generator=noise).tolist() for _ in range(DOCUMENTS)]


def planned(model: mw.Model, memory: MemoryOptions, num_tokens: int) -> tuple[float, float]:
    """Return the planned GB on the device, and the GB of activations among them."""
    need = model.need()
    work = StepWork(DOCUMENTS * num_tokens, 1, torch.bfloat16, memory, "cuda")
    parts = {s.what: s.num_bytes for s in Need(need.spec, need.axes, need.held, work).stored(0)}
    return sum(parts.values()) / 1e9, parts.get(ACTIVATIONS, 0) / 1e9


def synchronised(device: Device, step: Callable[[], object]) -> Counter[str]:
    """Count where the host waited for the device, by file and line. torch warns at each such wait."""
    if device.rehearses:
        return Counter()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return Counter(f"{Path(w.filename).name}:{w.lineno}" for w in warned if "called a synchronizing" in str(w.message))


@dataclass(frozen=True)
class Measured:
    """A side of the table. `halves`: seconds of forward and backward. `planned`: GB, also of activations."""

    model: str
    side: str
    halves: float
    whole: float
    num_tokens: int
    flops: float
    peak_gb: float
    planned: str = "-"

    def row(self, device: Device) -> str:
        speed, tokens = self.flops / self.whole, self.num_tokens / self.whole
        return (
            f"| {self.model} | {self.side} | {self.halves:.4f} | {self.whole:.4f} | {tokens:,.0f} | {speed / 1e12:.0f} "
            f"| {device.mfu(speed)} | {self.peak_gb:.2f} | {self.planned} |"
        )


def ours(folder: Path, name: str, kind: str, options: argparse.Namespace) -> str:
    device, chosen = options.device, kind_of(kind)
    with formulas_only() if chosen.formulas else contextlib.nullcontext():
        return _ours(folder, name, kind, chosen, device, options.profile and kind == options.kinds[0])


def _ours(folder: Path, name: str, kind: str, chosen: Kind, device: Device, profile: bool) -> str:
    device.forget()
    memory = chosen.memory if chosen.memory.compiled else replace(chosen.memory, compiled=False)  # not by default
    model = mw.init(folder, mw.Mesh(device=device.kind), memory=memory, fp8=chosen.fp8)
    engine = mw.Engine(model, lr=1e-4, optimizer=chosen.optimizer)
    batches = [mw.pack(documents(model.blueprint.vocab, num_tokens_of(device)))]

    def both_ways() -> None:
        engine.backward(batches)
        engine.discard()

    def step() -> float:
        return engine.step(batches).loss

    began = time.perf_counter()
    loss = step()
    first = time.perf_counter() - began
    halves, whole = device.seconds_of(both_ways), device.seconds_of(step)
    if profile:
        profiled(device, f"{name} | meshwright, {kind}", step)
    waits = synchronised(device, step)
    print(f"  first step {first:.1f} s, loss {loss:.4f}, waits for the device {dict(waits)}", flush=True)
    gb, of_activations = planned(model, memory, num_tokens_of(device))
    return Measured(
        name, f"meshwright, {kind}", halves, whole, DOCUMENTS * num_tokens_of(device),
        flops(folder, num_tokens_of(device)), device.peak_gb(step), f"{gb:.2f} ({of_activations:.2f})",
    ).row(device)  # fmt: skip


def flops(folder: Path, num_tokens: int) -> float:
    """Return the FLOPs of all matmuls of a step: 6 per used parameter and token, and half of attention's (causal)."""
    config = json.loads((folder / "config.json").read_text())
    table, used = Blueprint.of(config).table, 0.0
    for p in table:
        share = 1.0
        if ".experts." in p.name:
            share = config["num_experts_per_tok"] / config["num_experts"]
        if "embed" not in p.name or config["tie_word_embeddings"]:
            used += p.numel * share
    full = sum(1 for n in range(config["num_hidden_layers"]) if config["model_type"] != "qwen3_5_text" or n % 4 == 3)
    attention = full * 6 * num_tokens * config["num_attention_heads"] * config["head_dim"]
    return DOCUMENTS * num_tokens * (6 * used + attention)


def peer(folder: Path, name: str, which: str, options: argparse.Namespace) -> str:
    device = options.device
    device.forget()
    config, num_tokens = json.loads((folder / "config.json").read_text()), num_tokens_of(device)
    side, given = name_of(which, config), documents(config["vocab_size"], num_tokens)
    half, step = steps_of(folder, which, given, device)
    halves, whole = device.seconds_of(half), device.seconds_of(step)
    print(f"  {side}: loss {step():.4f}", flush=True)
    if options.profile and which == options.peers[0]:
        profiled(device, f"{name} | {side}", step)
    return Measured(
        name, side, halves, whole, DOCUMENTS * num_tokens, flops(folder, num_tokens), device.peak_gb(step)
    ).row(device)  # fmt: skip


def agreement(directory: Path, name: str, device: Device) -> str:
    """Compare every gradient of 512 tokens with that of transformers in float32: ours in float32, both in bfloat16."""

    def of_peer(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        device.forget()
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).to(device.kind)
        ids = torch.tensor(documents(model.config.vocab_size, 256), device=device.kind)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return {k: p.grad.float().cpu() for k, p in model.named_parameters()}

    def of_ours(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        device.forget()
        model = mw.load(directory, mw.Mesh(device=device.kind), dtype=dtype)
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


HEADER = [
    "| model | side, kind | forward + backward s | step s | tokens/s | TFLOP/s | MFU | peak GB "
    "| plan GB (activations) |",
    "|---" * 9 + "|",
]
AGREEMENT = [
    "| model | gradients | ours in float32: worst (median) | ours in bfloat16 | transformers in bfloat16 |",
    "|---|---|---|---|---|",
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="+", choices=list(MODELS), default=[name for name in MODELS if "8b" not in name]
    )
    parser.add_argument("--kinds", nargs="*", default=["none", "full", "fp8"], metavar="KIND")
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=["transformers"])
    parser.add_argument("--profile", action="store_true", help="list the dearest kernels of the first kind and peer")
    parser.add_argument("--agreement", action="store_true", help="compare gradients instead of timing")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on a CPU")
    options = parser.parse_args()
    for kind in options.kinds:
        kind_of(kind)  # before any model is made
    options.device = Device("cpu", rounds=1) if options.rehearse else Device()
    print(provenance(options.device), flush=True)
    rows = list(AGREEMENT if options.agreement else HEADER)
    print("\n".join(rows), flush=True)
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder:
            rows += measured(name, Path(folder), options)
    print("", *rows, sep="\n")
    return int(any("| failed: " in row for row in rows))


def measured(name: str, folder: Path, options: argparse.Namespace) -> list[str]:
    (folder / "config.json").write_text(json.dumps(config_of(name, options.device)))
    if options.agreement:
        mw.export(mw.init(folder, mw.Mesh(device=options.device.kind)), directory := folder / "m")
        return [reported(agreement, directory, name, options.device)]
    # Liger replaces functions of transformers' modules, so it comes last.
    absent = {which: why for which in options.peers if (why := why_absent(which))}
    print(*(f"  {which} is left out: {why}" for which, why in absent.items()), sep="\n", flush=True)
    present = sorted((which for which in options.peers if which not in absent), key=list(PEERS).index)
    sides = [(ours, kind) for kind in options.kinds]
    sides[1:1] = [(peer, which) for which in present]  # first what is compared: a limit may end this
    return [reported(measure, folder, name, side, options) for measure, side in sides]


def reported(measure: Callable[..., str], folder: Path, name: str, *args: Any) -> str:
    """Print and return the row of a measurement. A failure is a row too, prints its traceback, and stops no other."""
    try:
        row = measure(folder, name, *args)
    except Exception as error:  # noqa: BLE001 - any failure
        print(traceback.format_exc(limit=-6), flush=True)
        side = f"meshwright, {args[0]}" if measure is ours else str(PEERS.get(str(args[0]), measure.__name__))
        why = " ".join(f"{type(error).__name__} {error}".replace("|", "/").split())[:120]
        row = f"| {name} | {side} | failed: {why} |" + " - |" * (HEADER[1].count("|") - 4)
    print(row, flush=True)
    return row


if __name__ == "__main__":
    sys.exit(main())
