"""Translate verl's configs into arguments of Meshwright: model, optimizer, learning rate, without importing verl."""

from __future__ import annotations

from typing import Any

from .. import api as mw
from .options import cosine, load_options


def model_options(model: Any, engine: Any, head: str) -> dict[str, Any]:
    """Return the arguments of `mw.load`."""
    options = load_options(head, engine.dtype, model.enable_gradient_checkpointing, engine)
    if engine.forward_only:
        options["train"] = []
    if lora := lora_of(model):
        options["lora"] = lora
    return {**options, **engine.load}


def lora_of(model: Any) -> mw.Lora | None:
    """Return the adapters that verl's model config asks for."""
    if model.lora_rank <= 0 and not model.lora_adapter_path:
        return None
    for name in ("exclude_modules", "target_parameters"):
        if model[name]:
            raise mw.ConfigError(f"model.{name}={model[name]!r} is not supported; name what is adapted: target_modules")
    if model.lora_adapter_path:  # as in verl's own engines, alpha and targets are those of the files
        rank = {"rank": model.lora_rank} if model.lora_rank > 0 else {}
        return mw.Lora(path=model.lora_adapter_path, **rank)
    targets = model.target_modules
    return mw.Lora(
        rank=model.lora_rank, alpha=float(model.lora_alpha),
        targets=targets if isinstance(targets, str) else list(targets),
    )  # fmt: skip


def peft_config(lora: mw.Lora) -> dict[str, Any]:
    """Return the fields of PEFT's config that a rollout reads."""
    targets = lora.targets if isinstance(lora.targets, str) else list(lora.targets)
    return {"r": lora.rank, "lora_alpha": lora.alpha, "target_modules": targets, "lora_dropout": 0.0, "bias": "none"}


def optimizer_of(optim: Any) -> mw.AdamW:
    """Return the optimizer. Refuse any but AdamW: a run must not train with an optimizer that its config does not
    name."""
    name, extra = optim.get("optimizer", "AdamW"), dict(optim.get("override_optimizer_config") or {})
    if str(name).lower() not in ("adamw", "adam"):
        raise mw.ConfigError(f"optim.optimizer={name!r} is not supported; choose AdamW")
    eps = extra.pop("eps", optim.get("eps") or 1e-8)
    if extra:
        raise mw.ConfigError(f"optim.override_optimizer_config has {sorted(extra)}; only eps is supported")
    return mw.AdamW(betas=(optim.betas[0], optim.betas[1]), eps=eps, weight_decay=optim.weight_decay)


def learning_rate(optim: Any, step: int) -> float:
    """Return the learning rate after `step` calls of `lr_scheduler_step`, by the formulas of verl's FSDP engine."""
    total, warmup = optim.total_training_steps, optim.lr_warmup_steps
    if warmup is None or warmup <= 0:
        warmup = int(optim.lr_warmup_steps_ratio * total)
    kind = optim.get("lr_scheduler_type") or "constant"
    if kind not in ("constant", "cosine"):
        raise mw.ConfigError(f"optim.lr_scheduler_type={kind!r} is not supported; choose constant or cosine")
    if kind == "cosine" and not optim.get("zero_indexed_step", True):
        step += 1
    if step < warmup:
        return optim.lr * step / warmup
    if kind == "constant":
        return optim.lr
    progress = (step - warmup) / max(1, total - warmup)
    return optim.lr * cosine(progress, optim.get("min_lr_ratio") or 0.0, optim.get("num_cycles", 0.5))
