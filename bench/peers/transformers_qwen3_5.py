"""What the installed transformers does with a tiny Qwen3.5: packed documents, float32 parameters, extra tensors.

    .venv/bin/python bench/peers/transformers_qwen3_5.py

Each line is a fact about the release that it names, on a random model of two layers on the CPU, with no kernels of
other packages. The same call on a model of attention only shows that it is right there. `docs/peers.md` quotes it.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: everything is made here
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening, Qwen3_5TextConfig, Qwen3Config

DOCUMENTS = [[5, 6, 7, 1, 2], [9, 4, 4], [3] * 6 + [100]]
SHAPE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.2,
}
DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
A_LOG = "model.layers.0.linear_attn.A_log"


def main() -> None:
    transformers.logging.set_verbosity_error()
    print(f"transformers {transformers.__version__}, torch {torch.__version__.partition('+')[0]}, CPU")
    for config in (Qwen3Config(**SHAPE), Qwen3_5TextConfig(**SHAPE, **DELTA)):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
        print(f"{type(model).__name__}, packed against alone: logits differ by {leak(model):.0e} of the largest one")
    print(f"{type(model).__name__}, packed with bounds: {told_the_bounds(model)}")
    with tempfile.TemporaryDirectory() as folder:
        round_trip(model, Path(folder))


def packed(**how: bool) -> dict[str, Any]:
    """The documents in one row, as the library's own collator packs them."""
    made = DataCollatorWithFlattening(**how)([{"input_ids": d} for d in DOCUMENTS])
    return {**{k: v for k, v in made.items() if k != "labels"}, "use_cache": False}


@torch.no_grad()
def leak(model: Any) -> float:
    """Packed with position ids that restart, against each document alone."""
    alone = torch.cat([model(torch.tensor([d]), use_cache=False).logits[0] for d in DOCUMENTS])
    difference: Tensor = model(**packed()).logits[0] - alone
    return float(difference.abs().max() / alone.abs().max())


def told_the_bounds(model: Any) -> str:
    """The same with the bounds of the documents as arguments: what a kernel needs, and this release asks for."""
    try:
        model(**packed(return_flash_attn_kwargs=True, return_seq_idx=True))
    except ValueError as error:
        return f"refused: {error}"
    return "computed"


def round_trip(model: Any, at: Path) -> None:
    """A bfloat16 directory as hubs have them: A_log in float32, tensors of multi-token prediction beside the model."""
    model.save_pretrained(at / "source")
    file = at / "source" / "model.safetensors"
    tensors = {k: v if k == A_LOG else v.bfloat16() for k, v in load_file(file).items()}
    save_file({**tensors, "mtp.fc.weight": torch.ones(2, 2)}, file, metadata={"format": "pt"})
    loaded = AutoModelForCausalLM.from_pretrained(at / "source", dtype=torch.bfloat16)
    loaded.save_pretrained(at / "saved")
    saved = load_file(at / "saved" / "model.safetensors")
    exact, actual = tensors[A_LOG], saved[A_LOG]
    print(f"A_log: {exact.dtype} in the source, {actual.dtype} when saved; {changed(exact, actual)}")
    print(f"mtp.fc.weight: in the source, {'kept' if 'mtp.fc.weight' in saved else 'not'} in what is saved")


def changed(a: Tensor, b: Tensor) -> str:
    return f"{int((a != b.to(a.dtype)).sum())} of {a.numel()} values changed"


if __name__ == "__main__":
    main()
