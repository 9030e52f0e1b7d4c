"""Steps of transformers that `bench.device` times: in bfloat16, with float32 masters, compiled, with Liger."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers

from bench.gpu import Device
from bench.machine import fla_runs

PEERS = {
    "transformers": "transformers",
    "float32": "transformers, float32 + autocast",
    "compiled": "transformers, compiled",
    "liger": "transformers, Liger",
}
Step = Callable[[], float]


def why_absent(peer: str) -> str:
    """Return why a peer cannot be tried here; empty if it can."""
    return "liger-kernel is not installed" if peer == "liger" and find_spec("liger_kernel") is None else ""


def name_of(peer: str, config: dict[str, Any]) -> str:
    with_fla = "linear_num_key_heads" in config and fla_runs()
    return PEERS[peer] + (" + flash-linear-attention" if with_fla else "")


def steps_of(folder: Path, peer: str, documents: list[list[int]], device: Device) -> tuple[Step, Step]:
    """Return forward + backward, and the whole step, of a model with random weights.

    Parameters, gradients and moments are in bfloat16; for "float32" in float32, with products in bfloat16 by autocast.
    """
    model = model_of(folder, peer, device)
    ids = torch.tensor(documents, device=device.kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    autocast = torch.autocast(device.kind, torch.bfloat16) if peer == "float32" else contextlib.nullcontext()

    def both_ways() -> float:
        with autocast:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return float(loss.detach())

    def half() -> float:
        loss = both_ways()
        model.zero_grad(set_to_none=True)
        return loss

    def step() -> float:
        loss = both_ways()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return half, step


def model_of(folder: Path, peer: str, device: Device) -> Any:
    config = transformers.AutoConfig.from_pretrained(folder)
    dtype = torch.float32 if peer == "float32" else torch.bfloat16
    with torch.device(device.kind):  # drawn there: normal numbers of 8 billion parameters take a CPU a minute
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).train()
    if peer == "liger":
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model)
    return torch.compile(model) if peer == "compiled" else model
