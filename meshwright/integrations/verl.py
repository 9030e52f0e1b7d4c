"""A backend of verl 0.9.1: importing this module registers it as "meshwright", for language and value models.

verl calls a loss on whole micro-batches of jagged tensors, and divides by numbers of the whole batch itself. Its other
backends average gradients over data ranks, so its losses are multiplied by the number of data ranks. Meshwright sums
gradients. So the loss gets the true `dp_size`, which its metrics need too, and its gradient is divided by it.
"""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name
from verl.workers.config import ActorConfig, CriticConfig, EngineConfig
from verl.workers.engine.base import BaseEngine, BaseEngineCtx, EngineRegistry
from verl.workers.engine.utils import detach_tree, postprocess_batch_func, prepare_micro_batches

from .. import api as mw
from ..log import logger
from . import jagged
from .options import dtype_of, mesh_axes
from .verl_options import learning_rate, model_options, optimizer_of, peft_config

BACKEND = "meshwright"
_DATA = ("replicate", "fsdp")
_UNSUPPORTED = ("calculate_sum_pi_squared", "distillation_use_topk", "distillation_only", "enable_routing_replay")


@dataclass
class MeshwrightEngineConfig(EngineConfig):  # type: ignore[misc] # verl ships no types
    """The config of the engine itself: the mesh, and arguments of `mw.load`.

    `mesh`: sizes of axes; by default `fsdp` takes the ranks that the other axes leave. `memory`, `pipeline`, `context`:
    the fields of `mw.MemoryOptions`, `mw.Pipeline`, `mw.ContextParallel`. `load`: more arguments of `mw.load`, such as
    `fp8`. `length_multiple`: micro-batches are padded to a multiple of this many tokens. `weight_dtype`: the dtype of
    the weights that a rollout gets.
    """

    strategy: str = BACKEND
    mesh: dict[str, int | None] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    pipeline: dict[str, Any] = field(default_factory=dict)
    context: dict[str, Any] = field(default_factory=dict)
    load: dict[str, Any] = field(default_factory=dict)
    length_multiple: int = 1
    weight_dtype: str = "bfloat16"


@dataclass
class MeshwrightActorConfig(ActorConfig):  # type: ignore[misc] # verl ships no types
    """The config of an actor or a reference policy."""

    strategy: str = BACKEND
    meshwright: MeshwrightEngineConfig = field(default_factory=MeshwrightEngineConfig)
    use_remove_padding: bool = True
    use_rollout_log_probs: bool = False

    def __post_init__(self) -> None:
        """Put the engine's config where verl looks for it."""
        super().__post_init__()
        self.engine = self.meshwright


@dataclass
class MeshwrightCriticConfig(CriticConfig):  # type: ignore[misc] # verl ships no types
    """The config of a critic."""

    strategy: str = BACKEND
    meshwright: MeshwrightEngineConfig = field(default_factory=MeshwrightEngineConfig)

    def __post_init__(self) -> None:
        """Put the engine's config where verl looks for it."""
        super().__post_init__()
        self.engine = self.meshwright


class _TrainMode(BaseEngineCtx):  # type: ignore[misc] # verl ships no types
    """The context of training. What is offloaded is on the device meanwhile. Gradients are dropped unless verl keeps
    them."""

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        if self.zero_grad_on_exit or exc_type is not None:
            self.engine.optimizer_zero_grad()
        super().__exit__(exc_type, exc_val, exc_tb)


class MeshwrightEngine(BaseEngine):  # type: ignore[misc] # verl ships no types
    """A language model on a mesh, as verl drives it."""

    head = "lm"

    def __init__(self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any) -> None:
        super().__init__()
        self.model_config, self.engine_config = model_config, engine_config
        self.optimizer_config, self.checkpoint_config = optimizer_config, checkpoint_config
        self.mode: str | None = None
        world = torch.distributed.get_world_size()
        # verl has chosen this process's device. It asks for data ranks before it asks for a model.
        name = get_device_name()
        device = torch.device(name, get_device_id()) if name != "cpu" else name
        self.mesh = mw.Mesh(**mesh_axes(engine_config.mesh, world), device=device)
        self._data_group = self.mesh.process_group(_DATA)  # collective: all ranks are together now
        self._saved: list[str] = []

    def initialize(self) -> None:
        """Load the model from its files, and make its optimizer."""
        options = model_options(self.model_config, self.engine_config, self.head)
        path = self.model_config.local_path or self.model_config.path
        self.model = mw.load(path, self.mesh, **options)
        self._engine: mw.Engine | None = None
        if not self.engine_config.forward_only:
            optim = self.optimizer_config
            self._num_scheduled = 0
            self._engine = mw.Engine(
                self.model, lr=learning_rate(optim, 0), optimizer=optimizer_of(optim), max_norm=optim.clip_grad,
                entropy=self.head == "lm", on_nonfinite="skip",
            )  # fmt: skip
        self._offload()

    @property
    def engine(self) -> mw.Engine:
        """Return the engine that trains. Refuse a model that only scores."""
        if self._engine is None:
            raise mw.StateError(
                "forward_only=True has no optimizer; train another engine, made with forward_only=False"
            )
        return self._engine

    # Offload

    @property
    def is_param_offload_enabled(self) -> bool:
        """Return whether weights stay in host memory between phases."""
        return bool(self.engine_config.param_offload)

    @property
    def is_optimizer_offload_enabled(self) -> bool:
        """Return whether optimizer state stays in host memory between phases."""
        return bool(self.engine_config.optimizer_offload)

    def train_mode(self, **kwargs: Any) -> BaseEngineCtx:
        """Return a context for training."""
        return _TrainMode(self, "train", **kwargs)

    def eval_mode(self, **kwargs: Any) -> BaseEngineCtx:
        """Return a context for scoring."""
        return BaseEngineCtx(self, "eval", **kwargs)

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move weights, and optimizer state with gradients, to host memory ("cpu") or back. `grad` has no effect alone:
        waiting gradients go with the optimizer state."""
        super().to(device=device, model=model, optimizer=optimizer, grad=grad)
        if self.mesh.device == self.mesh.host:
            return
        self._move(device != "cpu", model, optimizer)

    def _move(self, wake: bool, weights: bool, optimizer: bool) -> None:
        if self._engine is None:
            if weights:
                self.model.wake() if wake else self.model.sleep()
        elif weights or optimizer:
            move = self._engine.wake if wake else self._engine.sleep
            move(weights=weights, optimizer=optimizer)

    def _offload(self) -> None:
        """Move what the config offloads between phases to host memory."""
        weights, optimizer = self.is_param_offload_enabled, self.is_optimizer_offload_enabled
        self.to("cpu", model=weights, optimizer=optimizer, grad=weights)

    @contextlib.contextmanager
    def _on_device(self, optimizer: bool = True) -> Iterator[None]:
        """Move what is offloaded to the device while the body runs."""
        weights, optimizer = self.is_param_offload_enabled, optimizer and self.is_optimizer_offload_enabled
        self.to(self.mesh.device.type, model=weights, optimizer=optimizer, grad=weights)
        yield
        self.to("cpu", model=weights, optimizer=optimizer, grad=weights)

    # Ranks

    def get_data_parallel_size(self) -> int:
        """Return the number of data ranks: replicate x fsdp."""
        return self.mesh.num_data_ranks

    def get_data_parallel_rank(self) -> int:
        """Return which share of the data this rank gets."""
        return self.mesh.data_rank

    def get_data_parallel_group(self) -> Any:
        """Return the ranks that differ from this one in their data alone."""
        return self._data_group

    def is_mp_src_rank_with_outputs(self) -> bool:
        """Return whether this rank hands results to verl: one rank of each data rank, with the head."""
        schedule = mw.Pipeline(**self.engine_config.pipeline).schedule
        with_head = 0 if schedule == "v" else self.mesh.axes.pp - 1  # "v" puts first and last stage on one rank
        return (self.mesh.coords["pp"], self.mesh.coords["cp"], self.mesh.coords["tp"]) == (with_head, 0, 0)

    # Steps

    def optimizer_zero_grad(self) -> None:
        """Drop gradients that wait for an update."""
        if self._engine is not None:
            self._engine.discard()

    def optimizer_step(self) -> float:
        """Clip and update. Return the norm of the gradient; if it is not finite, nothing was changed."""
        norm = self.engine.update()
        if not math.isfinite(norm) and not self.mesh.rank:
            logger.warning("the gradient norm is %s: the update is skipped", norm)
        return norm

    def lr_scheduler_step(self) -> float:
        """Advance the schedule, and return the learning rate of the next step."""
        self._num_scheduled += 1
        self.engine.lr = learning_rate(self.optimizer_config, self._num_scheduled)
        return self.engine.lr

    def forward_backward_batch(
        self, data: Any, loss_function: Callable[..., Any] | None, forward_only: bool = False
    ) -> dict[str, Any]:
        """Run all micro-batches of this data rank; with `forward_only` without gradients.

        Values are jagged tensors in the order of `data`. Training returns them only if `data` asks for them with
        `return_model_output`, as verl's FSDP engine does.
        """
        # All ranks or none refuse: one alone would leave the others waiting for its micro-batches.
        temperature = self.mesh.together(
            lambda: self._checked(data), "the data of verl", mw.DataError, "nothing was run"
        )
        tu.assign_non_tensor(
            data, sp_size=self.mesh.axes.cp * self.mesh.axes.tp, dp_size=self.get_data_parallel_size(),
            batch_num_tokens=self._sum_over_data_ranks(data["loss_mask"]),
        )  # fmt: skip
        micro, indices = prepare_micro_batches(data=data, dp_group=self._data_group, same_micro_num_in_dp=True)
        documents = [list(each["input_ids"].unbind()) for each in micro]
        micro = [each.to(self.mesh.device) for each in micro]
        batches = jagged.packed(self.mesh, documents, self.engine_config.length_multiple, values=self.head == "value")
        call = _Call(self, micro, loss_function, self._entropy_of(data))
        if forward_only:
            actual = jagged.scores(self.model, batches, temperature)
            jagged.losses_of(self.mesh, call, actual)
        else:
            call.keeps_output = tu.get_non_tensor_data(data=data, key="return_model_output", default=False)
            jagged.backward(self.engine, batches, call, temperature)
        outputs = [call.outputs[number] for number in sorted(call.outputs)]  # none on a stage without the head
        return postprocess_batch_func(output_lst=outputs, indices=indices, data=data)

    def _checked(self, data: Any) -> float:
        """Refuse requests that would otherwise be ignored. Return the temperature."""
        for key in _UNSUPPORTED:
            if tu.get_non_tensor_data(data=data, key=key, default=False):
                raise mw.ConfigError(f"the data ask for {key}, which the backend {BACKEND!r} does not compute")
        if any(dict(each) for each in data.get("multi_modal_inputs", None) or []):
            raise mw.DataError("the data have images, which the backend 'meshwright' does not pass on; train on text")
        if not data["input_ids"].is_nested:
            raise mw.DataError("input_ids are padded; give jagged tensors: pad_mode=no_padding")
        positions, offsets = data.get("position_ids", None), data["input_ids"].offsets()
        if positions is not None and positions.dim() == 2:  # three-dimensional ones are those of text, without images
            from_0 = torch.arange(int(offsets[-1]), device=offsets.device)
            if not torch.equal(positions.values(), from_0 - offsets[:-1].repeat_interleave(offsets.diff())):
                raise mw.DataError("position_ids of a sample do not count from 0; custom positions are not supported")
        return self._temperature(data)

    def _sum_over_data_ranks(self, mask: Tensor) -> int:
        """Return the number of tokens of the whole batch that a mask selects."""
        own = float((mask.values() if mask.is_nested else mask).sum())
        return int(self.mesh.all_gather_on_hosts((own,), _DATA, "the tokens of the batch").sum())

    def _entropy_of(self, data: Any) -> bool:
        return bool(tu.get_non_tensor_data(data=data, key="calculate_entropy", default=False))

    def _temperature(self, data: Any) -> float:
        """Return the temperature that divides logits. A call must have only one."""
        if self.head == "value":
            return 1.0
        given = data["temperature"]
        values = sorted({float(each) for each in given.flatten()}) if isinstance(given, Tensor) else [float(given)]
        if len(values) > 1:
            raise mw.DataError(f"the samples have {len(values)} temperatures, such as {values[0]}; give all one")
        return values[0]

    def model_output(self, scores: Mapping[str, Tensor], entropy: bool) -> dict[str, Tensor]:
        """Return scores by the names that verl's losses read."""
        named = {"log_probs": scores["logprobs"]}
        return {**named, "entropy": scores["entropy"]} if entropy else named

    # Weights

    def get_per_tensor_param(
        self, layered_summon: bool = False, base_sync_done: bool = False, **kwargs: Any
    ) -> tuple[Iterator[tuple[str, Tensor]], dict[str, Any] | None]:
        """Return an iterator over (Hugging Face name, whole tensor), on every rank, and no PEFT config: adapters are
        merged, since a rollout then needs none."""
        self._check_merges()
        return self._streamed(), None

    def _check_merges(self) -> None:
        lora = self.model.recipe.lora
        if lora is not None and not self.model_config.lora.get("merge", False):
            raise mw.ConfigError(
                f"the rollout is to load adapters ({peft_config(lora)}); this backend sends merged weights: set "
                "model.lora.merge=True"
            )

    def _streamed(self) -> Iterator[tuple[str, Tensor]]:
        which = "merged" if self.model.recipe.lora is not None else "weight"
        with self._on_device(optimizer=False):
            yield from mw.stream(self.model, which, ranks="all", dtype=dtype_of(self.engine_config.weight_dtype))

    @contextlib.contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Run the body without adapters: the reference policy."""
        with self.model.base() if self.model.recipe.lora is not None else contextlib.nullcontext():
            yield

    # Checkpoints

    def save_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, global_step: int = 0,
        max_ckpt_to_keep: int | None = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        """Write `local_path/step-N`, a Hugging Face directory with optimizer state, whole or not at all. Remove the
        oldest that this run has written once there are more than `max_ckpt_to_keep`."""
        if hdfs_path:
            raise mw.ConfigError(f"hdfs_path={hdfs_path!r} is not supported; save to a mounted directory")
        with self._on_device():
            mw.save(self.engine, local_path, state={"global_step": global_step, "num_scheduled": self._num_scheduled})
        self._saved = [*(path for path in self._saved if path != local_path), local_path]
        while max_ckpt_to_keep and len(self._saved) > max_ckpt_to_keep:
            oldest = self._saved.pop(0)
            if not self.mesh.rank:
                shutil.rmtree(oldest)

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = True, **kwargs: Any
    ) -> None:
        """Resume from `local_path`, on any mesh. Nothing is deleted: there is no copy of a remote file."""
        if local_path is None:
            return
        with self._on_device():
            state = mw.resume(self.engine, local_path).state or {}
        self._num_scheduled = state.get("num_scheduled", 0)
        self.engine.lr = learning_rate(self.optimizer_config, self._num_scheduled)


class MeshwrightValueEngine(MeshwrightEngine):
    """A critic: one value for each token."""

    head = "value"

    def model_output(self, scores: Mapping[str, Tensor], entropy: bool) -> dict[str, Tensor]:
        """Return values by the name that verl's losses read."""
        return {"values": scores["values"]}


class _Call:
    """The loss of one call of `forward_backward_batch`, and what it returned for each micro-batch."""

    def __init__(self, owner: MeshwrightEngine, micro: Sequence[Any], loss: Callable[..., Any] | None, entropy: bool):
        self.owner, self.micro, self.loss, self.entropy = owner, micro, loss, entropy
        self.outputs: dict[int, dict[str, Any]] = {}
        self.keeps_output = True

    def __call__(self, number: int, scores: dict[str, Tensor]) -> Tensor:
        """Return the loss of a micro-batch for gradients that are summed over data ranks."""
        data, offsets = self.micro[number], self.micro[number]["input_ids"].offsets()
        jagged_of = lambda x: torch.nested.nested_tensor_from_jagged(x, offsets)  # noqa: E731 - short
        output = {name: jagged_of(x) for name, x in self.owner.model_output(scores, self.entropy).items()}
        loss, metrics = torch.ones(()), {}
        if self.loss is not None:
            group = self.owner.get_data_parallel_group()
            loss, metrics = self.loss(model_output=output, data=data, dp_group=group)
        kept = {name: x.detach() for name, x in output.items()} if self.keeps_output else {}
        self.outputs[number] = {"model_output": kept, "loss": loss.item(), "metrics": detach_tree(metrics)}
        # The one place where verl's mean over data ranks becomes our sum.
        return loss / self.owner.get_data_parallel_size()


_DEVICES = sorted({get_device_name(), "cpu"})
EngineRegistry.register("language_model", BACKEND, _DEVICES)(MeshwrightEngine)
EngineRegistry.register("value_model", BACKEND, _DEVICES)(MeshwrightValueEngine)
