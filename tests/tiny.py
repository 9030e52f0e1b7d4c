"""Tiny models of odd sizes, written as Hugging Face directories, and unequal data for them."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import transformers

from meshwright.verify.small_data import LENGTH  # noqa: F401 - of its batches
from meshwright.verify.small_data import ragged as batches  # noqa: F401 - what all tests train on
from tests import parts

ODD: dict[str, dict[str, Any]] = {
    "qwen3": dict(model_type="qwen3", vocab_size=131, hidden_size=36, intermediate_size=44, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=10, tie_word_embeddings=False),
    "qwen3_moe": dict(model_type="qwen3_moe", vocab_size=131, hidden_size=36, intermediate_size=44, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=10, tie_word_embeddings=False, num_experts=8,
        num_experts_per_tok=3, moe_intermediate_size=20, norm_topk_prob=True, mlp_only_layers=[1]),
    "qwen3_5": dict(model_type="qwen3_5_text", vocab_size=131, hidden_size=36, intermediate_size=44,
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=16, tie_word_embeddings=False,
        linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=6, linear_value_head_dim=10,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.25,
        mrope_section=[1, 1, 0])),
}  # fmt: skip
ODD["qwen2"] = dict(
    model_type="qwen2", vocab_size=131, hidden_size=56, intermediate_size=44, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
)  # fmt: skip
ODD["qwen3_5_moe"] = {
    **{k: v for k, v in ODD["qwen3_5"].items() if k != "intermediate_size"},
    **dict(model_type="qwen3_5_moe_text", num_experts=8, num_experts_per_tok=3, moe_intermediate_size=20),
    **dict(shared_expert_intermediate_size=28),
}
ODD["qwen3_next"] = {
    **ODD["qwen3_5_moe"], "model_type": "qwen3_next", "intermediate_size": 44, "mlp_only_layers": [1],
    "shared_expert_intermediate_size": 24,  # with 28, transformers' float32 is 1.06e-5 from its float64 in one A_log
    "rope_parameters": dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.25),
}  # fmt: skip
ODD["qwen4_exp"] = dict(
    model_type="qwen4_exp_text", vocab_size=131, hidden_size=32, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, linear_num_key_heads=4, linear_num_value_heads=12, linear_key_head_dim=6,
    linear_value_head_dim=10, moe_intermediate_size=20, shared_expert_intermediate_size=28, num_experts=8,
    num_experts_per_tok=3, hc_count=3, hc_lowrank=12, ple_layer_ids=[2], ple_embed_dim=24, ngram_size=3,
    heads_per_ngram=2, ngram_vocab_size_base=50, make_ngram_vocab_size_divisible_by=36, split_ngram_parts=12, seed=77,
    indexer_n_heads=5, indexer_kv_heads=1, indexer_head_dim=12, indexer_budget=6, indexer_compress_ratio=2,
    output_gate_type="sigmoid", eos_token_id=7, tie_word_embeddings=False,
    rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5, mrope_section=[2, 1, 1],
    mrope_interleaved=True),
    layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
)  # fmt: skip
ODD["qwen3_tied"] = {**ODD["qwen3"], "tie_word_embeddings": True}

# The same in whole blocks of 128 on each of four ranks of tp, but for the two kv heads: what products in 8 bits want.
ALIGNED: dict[str, dict[str, Any]] = {
    name: {
        **config,
        **dict(hidden_size=512 if name == "qwen2" else 256, head_dim=128),
        **{each: size for each, size in (
            ("intermediate_size", 512), ("shared_expert_intermediate_size", 128), ("moe_intermediate_size", 128),
            ("linear_key_head_dim", 128), ("linear_value_head_dim", 128), ("indexer_head_dim", 128),
        ) if each in config},
        **({"rope_parameters": {**config["rope_parameters"], "partial_rotary_factor": 0.25, "mrope_section": [6, 5, 5]}}
           if "mrope_section" in config.get("rope_parameters", {}) else {}),
    }
    for name, config in ODD.items()
}  # fmt: skip


TWO_LAYERS: dict[str, Any] = dict(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
_FEW = {**TWO_LAYERS, "ple_layer_ids": [1]}


def two_layers(family: str) -> dict[str, Any]:
    """Return the changes that leave two layers, one of each kind, in `make test`; none in `make matrix`."""
    return {} if parts.ALL else {name: value for name, value in _FEW.items() if name in ODD[family]}


def in_blocks(name: str) -> dict[str, Any]:
    """Return the half of those layers that `make test` needs: one of each kind, with experts for two ranks of tp."""
    few = {**_FEW}
    if name == "qwen3_5_moe":
        few |= dict(linear_num_key_heads=2, linear_num_value_heads=4, num_experts=4)
    if name in ("qwen3", "qwen3_5", "qwen3_5_moe"):  # their other sides have several blocks
        few |= dict(hidden_size=128)
    return ALIGNED[name] if parts.ALL else {**ALIGNED[name], **{k: v for k, v in few.items() if k in ALIGNED[name]}}


# Families that are not in the package: what docs/add-a-model.md adds.
OUTSIDE: dict[str, dict[str, Any]] = {
    "phi3": dict(model_type="phi3", vocab_size=131, hidden_size=40, intermediate_size=44, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False, pad_token_id=None),
}  # fmt: skip

CLASSES = {
    "qwen4_exp_text": (transformers.Qwen4ExpTextConfig, transformers.Qwen4ExpForCausalLM),
    "qwen3_next": (transformers.Qwen3NextConfig, transformers.Qwen3NextForCausalLM),
    "phi3": (transformers.Phi3Config, transformers.Phi3ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3_5_moe_text": (transformers.Qwen3_5MoeTextConfig, transformers.Qwen3_5MoeForCausalLM),
    "qwen3_5_text": (transformers.Qwen3_5TextConfig, transformers.Qwen3_5ForCausalLM),
}


def of(name: str, **changes: Any) -> dict[str, Any]:
    return {**{**ODD, **OUTSIDE}[name], **changes}


def fresh(name: str, kind: str = "", **changes: Any) -> Any:
    """transformers' new model of an odd config. `kind`: "Sequence" or "Token" for a classifier."""
    config = deepcopy(of(name, **changes))  # transformers writes what it infers into the fields of RoPE
    make_config, make_model = CLASSES[config["model_type"]]
    if kind:
        make_model = getattr(transformers, f"{make_config.__name__.removesuffix('Config')}For{kind}Classification")
    torch.manual_seed(7)
    return make_model(make_config(**{k: v for k, v in config.items() if k != "model_type"})).float().eval()


def reference(name: str, kind: str = "", **changes: Any) -> Any:
    """Move every parameter away from its special initial value."""
    model = fresh(name, kind, **changes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def directory(
    at: Path, name: str, *, dtype: torch.dtype = torch.float32, layout: str | None = None, **changes: Any
) -> Path:
    """Save the reference under `at` in `dtype`, float32 for what hub files keep so; experts in `layout`."""
    from safetensors.torch import save_file

    model = reference(name, **changes)
    tensors = {}
    for key, value in model.state_dict().items():
        tensors[key] = value.detach().to(stored_dtype(key, value, dtype)).contiguous().clone()
    tensors = in_parts(tensors)
    if layout != "fused":
        tensors = _per_expert(tensors)
    if of(name, **changes)["tie_word_embeddings"] and layout != "twice":
        tensors.pop("lm_head.weight", None)
    at.mkdir(parents=True, exist_ok=True)
    save_file(tensors, at / "model.safetensors", metadata={"format": "pt"})
    config = {
        **of(name, **changes),
        "dtype": str(dtype).removeprefix("torch."),
        "architectures": [type(model).__name__],
    }
    (at / "config.json").write_text(json.dumps(config))
    return at


def with_mtp(source: Path, *, layout: str = "", field: str = "mtp_num_hidden_layers") -> Path:
    """Add a drawn MTP head to the files of a tiny model. `layout`: of its experts, by default that of the trunk."""
    from safetensors.torch import load_file, save_file

    tensors, config = load_file(source / "model.safetensors"), json.loads((source / "config.json").read_text())
    full = next(k for k in tensors if ".self_attn." in k).partition(".self_attn.")[0]
    experts = next((k.partition(".mlp.")[0] for k in tensors if ".mlp.experts." in k), full)
    moved = {k.replace(full, "mtp.layers.0"): k for k in tensors if k.startswith(f"{full}.") and ".mlp." not in k}
    moved |= {k.replace(experts, "mtp.layers.0"): k for k in tensors if k.startswith(f"{experts}.mlp.")}
    D, n = config["hidden_size"], config.get("hc_count", 1)
    shapes: dict[str, tuple[int, ...]] = {key: tensors[k].shape for key, k in moved.items()}
    shapes |= {"mtp.pre_fc_norm_hidden.weight": (n * D,), "mtp.pre_fc_norm_embedding.weight": (D,)}
    if n > 1:
        mixer = {k: tensors[k].shape for k in tensors if k.startswith("model.hyper_connection_mixer.")}
        shapes |= {f"mtp.{k.removeprefix('model.')}": shape for k, shape in mixer.items()}
        shapes |= {"mtp.fc_hidden.weight": (D, D), "mtp.fc_embedding.weight": (D, D)}
    else:
        shapes |= {"mtp.norm.weight": (D,), "mtp.fc.weight": (D, 2 * D)}
    g, dtype = torch.Generator().manual_seed(3), tensors["model.embed_tokens.weight"].dtype
    drawn = {
        key: torch.randn(shapes[key], generator=g) * (0.2 if len(shapes[key]) > 1 else 0.1) for key in sorted(shapes)
    }
    if layout == "fused":
        drawn = _fused(drawn)
    save_file({**tensors, **{k: x.to(dtype) for k, x in drawn.items()}}, source / "model.safetensors", {"format": "pt"})
    (source / "config.json").write_text(json.dumps({**config, field: 1}))
    return source


def _fused(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Stack experts that have a key each, as files with one key for all of them have it."""
    apart = {k: x for k, x in tensors.items() if ".experts." in k and k.endswith("proj.weight")}
    at = next(iter(apart)).partition(".experts.")[0] + ".experts."
    num = 1 + max(int(k.removeprefix(at).partition(".")[0]) for k in apart)
    of = lambda name: torch.stack([apart[f"{at}{e}.{name}.weight"] for e in range(num)])  # noqa: E731 - short
    stacked = {"gate_up_proj": torch.cat([of("gate_proj"), of("up_proj")], 1), "down_proj": of("down_proj")}
    return {k: x for k, x in tensors.items() if k not in apart} | {at + name: x for name, x in stacked.items()}


def classifier(at: Path, name: str, kind: str, **changes: Any) -> Path:
    """A classifier under `at`, as transformers itself writes it."""
    reference(name, kind, **changes).save_pretrained(at)
    return at


def _per_expert(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    out = {}
    for key, value in tensors.items():
        if key.endswith("experts.gate_up_proj"):
            for e, both in enumerate(value):
                for part, name in zip(both.chunk(2), ("gate_proj", "up_proj"), strict=True):
                    out[key.replace("gate_up_proj", f"{e}.{name}.weight")] = part.contiguous().clone()
        elif key.endswith("experts.down_proj"):
            for e, one in enumerate(value):
                out[key.replace("down_proj", f"{e}.down_proj.weight")] = one.contiguous().clone()
        else:
            out[key] = value
    return in_parts(out)


def stored_dtype(key: str, value: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a key in files of `dtype`."""
    if not value.is_floating_point():
        return value.dtype
    return torch.float32 if key.endswith(("A_log", "linear_attn.norm.weight")) else dtype


def in_parts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Cut a table of n-grams into the parts in which files keep it; transformers joins them."""
    out, num = {}, ODD["qwen4_exp"]["split_ngram_parts"]
    for key, value in tensors.items():
        if key.endswith("ngram_embedding.weight"):
            stem = key.removesuffix("weight")
            out.update(
                {f"{stem}shard_{i}.weight": part.contiguous().clone() for i, part in enumerate(value.chunk(num))}
            )
        else:
            out[key] = value
    return out
