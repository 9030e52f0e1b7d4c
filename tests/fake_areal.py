"""As much of AReaL's names as its engine uses: configs, a base class, padded batches that become packed ones.

Only names, arguments and defaults follow AReaL 1.0.4 (`tests/areal_1_0_4.json`, compared with AReaL by tests/areal).
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tests import fake_modules


@dataclass
class OptimizerConfig:
    type: str = "adam"
    lr: float = 1e-3
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    min_lr_ratio: float = 0.0
    lr_scheduler_type: str = "constant"
    warmup_steps_proportion: float = 0.001
    gradient_clipping: float = 1.0


@dataclass
class FSDPEngineConfig:
    wrap_policy: Any = None
    offload_params: bool = False
    per_layer_optim_step: bool = False
    shard_vision_across_sp: bool = False


@dataclass
class MicroBatchSpec:
    n_mbs: int | None = 1
    granularity: int = 1
    max_tokens_per_mb: int | None = None

    @classmethod
    def new(cls, spec: Any, **changes: Any) -> Any:
        return replace(spec, **changes)


@dataclass
class OtherEngineConfig:
    virtual_pipeline_parallel_size: int = 1


@dataclass
class TrainEngineConfig:
    experiment_name: str = "e"
    trial_name: str = "t"
    path: str = ""
    attn_impl: str = "flash_attention_2"
    use_kernels: bool = False
    init_from_scratch: bool = False
    is_critic: bool = False
    temperature: float = 1.0
    mb_spec: MicroBatchSpec = field(default_factory=MicroBatchSpec)
    pad_to_maximum: bool = False
    gradient_checkpointing: bool = False
    dtype: str = "bfloat16"
    grad_reduce_dtype: str = "float32"
    optimizer_dtype: str = "float32"
    optimizer: OptimizerConfig | None = None
    fsdp: FSDPEngineConfig = field(default_factory=FSDPEngineConfig)
    archon: OtherEngineConfig = field(default_factory=OtherEngineConfig)
    megatron: OtherEngineConfig = field(default_factory=OtherEngineConfig)
    use_lora: bool = False
    lora_rank: int = 32
    lora_alpha: int = 16
    target_modules: list[str] = field(default_factory=list)
    peft_type: str = "lora"
    enable_tree_training: bool = False
    backend: str = ""
    _version: str = "v1"


@dataclass
class ParallelStrategy:
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    context_parallel_size: int = 1
    expert_parallel_size: int = 1
    expert_tensor_parallel_size: int = 1


@dataclass
class ParamSpec:
    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass
class SaveLoadMeta:
    path: str
    weight_format: str
    with_optim: bool
    tokenizer: Any = None
    processor: Any = None


@dataclass
class WeightUpdateMeta:
    type: str
    path: str | None = None
    gen_allocation: Any = None
    nccl_master_address: str | None = None
    nccl_master_port: int | None = None
    nccl_group_name: str | None = None
    weight_chunked_mem_mb: int = 1024


@dataclass
class FinetuneSpec:
    total_train_steps: int = 10


class TrainEngine:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.forward_batch(*args, **kwargs)

    def eval(self: Any) -> Any:
        return self.train(False)


@dataclass
class MicroBatchList:
    data: dict[str, Any]
    mb_spec: Any
    mbs: list[dict[str, Any]]
    group_lens: list[int]
    forward_indices: list[int]
    backward_indices: list[int]

    def to(self, device: Any) -> MicroBatchList:
        return self


def allocate_balanced_mbs(spec: Any, lens: list[int]) -> list[list[int]]:
    """As many micro-batches as their tokens need, in an order that is not that of the rows."""
    num = max(spec.n_mbs, -(-sum(lens) // spec.max_tokens_per_mb))
    if len(lens) < num:
        raise RuntimeError(f"{len(lens)} rows are too few for {num} micro-batches")
    return [list(range(len(lens)))[n::num] for n in reversed(range(num))]


def amend_position_ids(data: dict[str, Any]) -> dict[str, Any]:
    mask = data["attention_mask"]
    return {**data, "position_ids": torch.arange(mask.shape[1]).expand(mask.shape)}


def pack_tensor_dict(data: dict[str, Any]) -> dict[str, Any]:
    mask = data["attention_mask"].bool()
    over_tokens = lambda x: torch.is_tensor(x) and x.shape == mask.shape  # noqa: E731 - short
    packed = {k: x[mask] if over_tokens(x) else x for k, x in data.items() if k != "attention_mask"}
    return {**packed, "cu_seqlens": torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0))}


def concat_batch(trajectories: list[dict[str, Any]]) -> tuple[dict[str, Any], Any]:
    flat = {k: [row for each in trajectories for row in each[k]] for k in trajectories[0]}
    sizes = [each["attention_mask"].shape for each in trajectories]
    return {k: pad_sequence(x, batch_first=True) for k, x in flat.items()}, sizes


def split_batch(result: Tensor, sizes: Any) -> list[Tensor]:
    return [x[:, : size[1]] for x, size in zip(result.split([size[0] for size in sizes]), sizes, strict=True)]


def reorder_and_pad_outputs(outputs: Any, output_seqlens: list[int], mb_list: MicroBatchList, aggregate_fn: Any) -> Any:
    rows = aggregate_fn(outputs).split([output_seqlens[n] for n in mb_list.forward_indices])
    return pad_sequence([rows[n] for n in mb_list.backward_indices], batch_first=True)


class Group:
    """A group with servers that keeps what it is asked to broadcast."""

    def __init__(self) -> None:
        self.sent: list[Tensor] = []

    def broadcast(self, tensors: list[Tensor], options: Any) -> Any:
        self.sent += [x.clone() for x in tensors]
        return SimpleNamespace(wait=lambda: None)


class Servers:
    """An inference engine that notes its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.specs: list[list[ParamSpec]] = []

    def _note(self, call: str) -> Future[None]:
        self.calls.append(call)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def pause_generation(self) -> None:
        self._note("pause")

    def continue_generation(self) -> None:
        self._note("continue")

    def update_weights_from_disk(self, meta: Any) -> Future[None]:
        return self._note(f"read {meta.path}")

    def init_weights_update_group(self, meta: Any) -> Future[None]:
        return self._note(f"join {meta.nccl_group_name}")

    def update_weights_from_distributed(self, meta: Any, specs: list[ParamSpec]) -> Future[None]:
        self.specs.append(specs)
        return self._note("receive")


NAMES: dict[str, str] = {}  # what was published
_UTILS = dict(
    stats_tracker=SimpleNamespace(export_all=lambda reduce_group: {}),
    perf_tracer=SimpleNamespace(),
    names=SimpleNamespace(update_weights_from_disk=lambda e, t, v: f"{e}/{t}/{v}"),
    name_resolve=SimpleNamespace(add=lambda name, value, keepalive_ttl: NAMES.update({name: value})),
)
_MODULES: Mapping[str, Mapping[str, Any]] = {
    "areal": {},
    "areal.api": dict(
        ModelAllocation=SimpleNamespace(), ParamSpec=ParamSpec, SaveLoadMeta=SaveLoadMeta, TrainEngine=TrainEngine
    ),
    "areal.api.cli_args": dict(MicroBatchSpec=MicroBatchSpec),
    "areal.api.io_struct": dict(DeviceRuntimeInfo=SimpleNamespace(get_current=lambda: "nothing")),
    "areal.engine": {},
    "areal.engine.core": dict(reorder_and_pad_outputs=reorder_and_pad_outputs),
    "areal.engine.core.distributed": dict(init_custom_process_group=lambda **_: Group()),
    "areal.infra": {},
    "areal.infra.dist_rollout": dict(DistRolloutCoordinator=SimpleNamespace),
    "areal.infra.platforms": dict(
        current_platform=SimpleNamespace(device_type="cpu", communication_backend="gloo", empty_cache=lambda: None)
    ),
    "areal.utils": _UTILS,
    "areal.utils.constants": dict(DIST_GROUP_DEFAULT_TIMEOUT=datetime.timedelta(seconds=60)),
    "areal.utils.data": dict(
        MicroBatchList=MicroBatchList, allocate_balanced_mbs=allocate_balanced_mbs,
        amend_position_ids=amend_position_ids, concat_batch=concat_batch, pack_tensor_dict=pack_tensor_dict,
        split_batch=split_batch,
    ),
    "areal.utils.network": dict(
        find_free_ports=lambda count: [1] * count, format_host_for_url=lambda host: host, gethostip=lambda: "host"
    ),
}  # fmt: skip


def installed() -> AbstractContextManager[None]:
    """Pretend that AReaL is installed."""
    return fake_modules.installed(_MODULES)
