"""As much of verl's names as its backend uses: a registry, base classes, dicts of jagged tensors, losses.

Only names and arguments follow verl 0.9.1 (`tests/verl_0_9_1.json`, compared with verl itself by tests/verl).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests import fake_modules


class Data(dict[str, Any]):
    """Stand for a TensorDict, as the backend reads it."""

    def to(self, device: Any) -> Data:
        return Data({k: v.to(device) if isinstance(v, Tensor) else v for k, v in self.items()})

    def rows(self, numbers: list[int]) -> Data:
        pick = lambda x: jagged([x.unbind()[n] for n in numbers])  # noqa: E731 - short
        return Data({k: pick(v) if isinstance(v, Tensor) and v.is_nested else v for k, v in self.items()})


def jagged(values: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(values, layout=torch.jagged)


class BaseEngine:
    def train_batch(self: Any, data: Any, loss_function: Any) -> Any:
        self.optimizer_zero_grad()
        outputs = self.forward_backward_batch(data, loss_function, forward_only=False)
        norm = self.optimizer_step()
        if self.is_mp_src_rank_with_outputs():
            outputs["metrics"]["grad_norm"] = norm
        return outputs

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None: ...


class BaseEngineCtx:
    def __init__(self, engine: Any, mode: str, **kwargs: Any) -> None:
        self.engine, self.mode, self.zero_grad_on_exit = engine, mode, kwargs.get("zero_grad_on_exit", True)

    def __enter__(self) -> None:
        self.engine.mode = self.mode

    def __exit__(self, *_: Any) -> None:
        self.engine.mode = None


class EngineRegistry:
    engines: dict[tuple[str, str], type] = {}  # noqa: RUF012 - one registry, as in verl

    @classmethod
    def register(cls, model_type: str, backend: str, device: Any) -> Any:
        return lambda engine: cls.engines.setdefault((model_type, backend), engine)


@dataclass
class Config:
    """A config that can be read as a mapping, too."""

    def get(self, name: str, default: Any = None) -> Any:
        return vars(self).get(name, default)

    def __getitem__(self, name: str) -> Any:
        return vars(self)[name]


@dataclass
class EngineConfig(Config):
    strategy: str = ""
    dtype: str = "bfloat16"
    forward_only: bool = False
    param_offload: bool = False
    optimizer_offload: bool = False


@dataclass
class RoleConfig(Config):
    strategy: str = ""

    def __post_init__(self) -> None: ...


@dataclass
class ModelConfig(Config):
    path: str = ""
    local_path: str | None = None
    enable_gradient_checkpointing: bool = False
    lora_rank: int = 0
    lora_alpha: int = 16
    lora_adapter_path: str | None = None
    target_modules: Any = "all-linear"
    exclude_modules: Any = None
    target_parameters: Any = None
    lora: dict[str, Any] = field(default_factory=dict)


@dataclass
class OptimizerConfig(Config):
    lr: float = 1e-3
    lr_warmup_steps: int = -1
    lr_warmup_steps_ratio: float = 0.0
    total_training_steps: int = 10
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    clip_grad: float = 0.5
    optimizer: str = "AdamW"
    override_optimizer_config: Any = None
    lr_scheduler_type: str = "cosine"
    min_lr_ratio: float | None = None
    num_cycles: float = 0.5
    zero_indexed_step: bool = True


def prepare_micro_batches(data: Data, dp_group: Any, same_micro_num_in_dp: bool) -> tuple[list[Data], list[list[int]]]:
    """Two micro-batches, in an order that is not that of the data."""
    num = len(data["input_ids"].unbind())
    bins = [list(range(num))[1::2], list(range(num))[::2]]
    return [data.rows(numbers) for numbers in bins], bins


def postprocess_batch_func(output_lst: list[Any], indices: list[list[int]], data: Data) -> dict[str, Any]:
    actual: dict[str, dict[int, Tensor]] = {}
    for numbers, output in zip(indices, output_lst, strict=False):
        for name, x in output["model_output"].items():
            actual.setdefault(name, {}).update(zip(numbers, x.unbind(), strict=True))
    metrics: dict[str, list[Any]] = {}
    for output in output_lst:
        for name, value in output["metrics"].items():
            metrics.setdefault(name, []).append(value)
    model_output = {name: jagged([rows[n] for n in sorted(rows)]) for name, rows in actual.items()}
    return {"model_output": model_output, "loss": [o["loss"] for o in output_lst], "metrics": metrics}


def assign_non_tensor(data: Data, **values: Any) -> None:
    data.update(values)


def get_non_tensor_data(data: Data, key: str, default: Any) -> Any:
    return data.get(key, default)


_MODULES: Mapping[str, Mapping[str, Any]] = {
    "verl": {},
    "verl.utils": {},
    "verl.utils.tensordict_utils": dict(assign_non_tensor=assign_non_tensor, get_non_tensor_data=get_non_tensor_data),
    "verl.utils.device": dict(get_device_id=lambda: "cpu", get_device_name=lambda: "cpu"),
    "verl.workers": {},
    "verl.workers.config": dict(ActorConfig=RoleConfig, CriticConfig=RoleConfig, EngineConfig=EngineConfig),
    "verl.workers.engine": {},
    "verl.workers.engine.base": dict(
        BaseEngine=BaseEngine, BaseEngineCtx=BaseEngineCtx, EngineRegistry=EngineRegistry
    ),
    "verl.workers.engine.utils": dict(
        detach_tree=lambda x: x, postprocess_batch_func=postprocess_batch_func,
        prepare_micro_batches=prepare_micro_batches,
    ),
}  # fmt: skip


def installed() -> AbstractContextManager[None]:
    """Pretend that verl is installed."""
    return fake_modules.installed(_MODULES)
