"""Translate AReaL's configs into arguments of Meshwright, and refuse unsupported fields, without importing AReaL."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

from .. import api as mw
from .options import cosine, load_options

# Fields with one supported value: that value, and what to do instead.
_ONLY: dict[str, tuple[Any, str]] = {
    "use_kernels": (False, "Meshwright chooses its own kernels"),
    "enable_tree_training": (False, "sequences are packed whole; leave it False"),
    "grad_reduce_dtype": ("float32", "gradients are summed in float32"),
    "optimizer_dtype": ("float32", "trained parameters and optimizer state are stored in float32"),
    "peft_type": ("lora", "adapters are LoRA"),
    "fsdp.wrap_policy": (None, "each layer is a unit of FSDP"),
    "fsdp.per_layer_optim_step": (False, "use fsdp.offload_params, which keeps optimizer state in host memory"),
    "fsdp.shard_vision_across_sp": (False, "images are not passed on"),
    "optimizer.type": ("adam", "the optimizer is AdamW"),
}
_OTHER_ENGINES = ("megatron", "archon")


@dataclass(frozen=True)
class EngineOptions:
    """Choices for which AReaL's config has no field.

    `replicate`: how many copies of the sharded parameters there are (HSDP); it divides the data-parallel size.
    `memory`, `pipeline`, `context`: the fields of `mw.MemoryOptions`, `mw.Pipeline`, `mw.ContextParallel`. `load`: more
    arguments of `mw.load`, such as `fp8`. `length_multiple`: micro-batches are padded to a multiple of this many
    tokens.
    """

    replicate: int = 1
    memory: dict[str, Any] = field(default_factory=dict)
    pipeline: dict[str, Any] = field(default_factory=dict)
    context: dict[str, Any] = field(default_factory=dict)
    load: dict[str, Any] = field(default_factory=dict)
    length_multiple: int = 1


def check_config(config: Any) -> None:
    """Refuse, by name, each setting of an AReaL config that Meshwright does not support."""
    for name, (only, instead) in _ONLY.items():
        owner, _, last = name.rpartition(".")
        owned = getattr(config, owner) if owner else config
        if owned is not None and getattr(owned, last) != only:
            raise mw.ConfigError(f"{name}={getattr(owned, last)!r} is not supported: {instead}")
    if "/" in config.attn_impl:
        raise mw.ConfigError(f"attn_impl={config.attn_impl!r} is not supported: Meshwright chooses its own kernels")
    for name in _OTHER_ENGINES:
        given = getattr(config, name)
        default = type(given)()
        changed = [each.name for each in fields(given) if getattr(given, each.name) != getattr(default, each.name)]
        if changed:
            raise mw.ConfigError(
                f"{name}.{changed[0]}={getattr(given, changed[0])!r} is an option of AReaL's own {name} engine; leave "
                "it out, or set what means the same in EngineOptions (memory, pipeline, load)"
            )


def mesh_axes(strategy: Any, replicate: int) -> dict[str, Any]:
    """Return the sizes of the mesh axes of a parallel strategy. Its data-parallel size is `replicate` x `fsdp`."""
    if strategy.expert_tensor_parallel_size != 1:
        raise mw.ConfigError(
            f"expert_tensor_parallel_size={strategy.expert_tensor_parallel_size} is not supported: experts are whole; "
            "place them with expert_parallel_size"
        )
    data = strategy.data_parallel_size
    if replicate < 1 or data % replicate:
        raise mw.ConfigError(f"replicate={replicate} does not divide data_parallel_size={data}; choose a divisor")
    return {
        "pp": strategy.pipeline_parallel_size, "replicate": replicate, "fsdp": data // replicate,
        "cp": strategy.context_parallel_size, "tp": strategy.tensor_parallel_size, "ep": strategy.expert_parallel_size,
    }  # fmt: skip


def model_options(config: Any, options: EngineOptions) -> dict[str, Any]:
    """Return the arguments of `mw.load`."""
    choices = replace(options, memory={"offload": config.fsdp.offload_params, **options.memory})
    head = "value" if config.is_critic else "lm"
    chosen = load_options(head, config.dtype, config.gradient_checkpointing, choices)
    if config.optimizer is None:
        chosen["train"] = []
    if config.use_lora:
        chosen["lora"] = mw.Lora(rank=config.lora_rank, alpha=float(config.lora_alpha), targets=_targets(config))
    return {**chosen, **options.load}


def _targets(config: Any) -> str | list[str]:
    """Return the modules with adapters. No names mean all linear layers, as in AReaL."""
    names = list(config.target_modules)
    return "all-linear" if names in ([], ["all-linear"]) else names


def optimizer_of(optim: Any) -> mw.AdamW:
    """Return the optimizer."""
    return mw.AdamW(betas=(optim.beta1, optim.beta2), eps=optim.eps, weight_decay=optim.weight_decay)


def check_schedule(optim: Any) -> None:
    """Refuse a schedule of the learning rate that AReaL's engines do not agree on, or that none of them has."""
    kind = optim.lr_scheduler_type
    if kind not in ("constant", "linear", "cosine"):
        raise mw.ConfigError(f"optimizer.lr_scheduler_type={kind!r} is unknown; choose constant, linear or cosine")
    if kind == "linear" and optim.min_lr_ratio:
        raise mw.ConfigError(
            f"optimizer.min_lr_ratio={optim.min_lr_ratio} with lr_scheduler_type='linear': AReaL's FSDP engine ignores "
            "it, and its Megatron engine does not; set it to 0, or choose cosine"
        )


def learning_rate(optim: Any, total: int, step: int) -> float:
    """Return the learning rate after `step` calls of `lr_scheduler_step`, by the formulas of AReaL's FSDP engine."""
    kind, least = optim.lr_scheduler_type, optim.min_lr_ratio
    warmup = int(optim.warmup_steps_proportion * total)
    if step < warmup:
        floor = least if kind == "cosine" else 0.0
        return optim.lr * (floor + (1.0 - floor) * step / warmup)
    progress = (step - warmup) / max(1, total - warmup)
    if kind == "linear":
        return optim.lr * max(0.0, 1.0 - progress)
    return optim.lr * (cosine(progress, least) if kind == "cosine" else 1.0)
