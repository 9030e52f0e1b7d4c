"""A `TrainEngine` of AReaL 1.0.4: a language model or a critic on a mesh, driven by AReaL's trainers.

AReaL calls a loss on whole micro-batches of packed sequences. The loss is a mean over a micro-batch, and a weight, such
as the number of its answer tokens, turns it into a part of the mean over the whole batch. AReaL's own engines average
gradients over data ranks and then multiply by the number of data ranks. Meshwright sums gradients, so it needs no such
factor.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from areal.api import ModelAllocation, TrainEngine
from areal.api.io_struct import DeviceRuntimeInfo
from areal.engine.core import reorder_and_pad_outputs
from areal.infra.dist_rollout import DistRolloutCoordinator
from areal.infra.platforms import current_platform
from areal.utils import perf_tracer, stats_tracker
from areal.utils.constants import DIST_GROUP_DEFAULT_TIMEOUT
from areal.utils.data import split_batch
from torch import Tensor

from .. import api as mw
from ..log import logger
from . import areal_weights, jagged
from .areal_batches import MicroBatches, micro_batches
from .areal_options import (
    EngineOptions,
    check_config,
    check_schedule,
    learning_rate,
    mesh_axes,
    model_options,
    optimizer_of,
)

_DATA = ("replicate", "fsdp")
_MODEL = ("pp", "cp", "tp")
_ALL = ("pp", "replicate", "fsdp", "cp", "tp")


class MeshwrightEngine(TrainEngine):  # type: ignore[misc] # AReaL ships no types
    """A model on a mesh, as AReaL drives it. The config is AReaL's `TrainEngineConfig`.

    `options`: choices for which that config has no field. Set it in a subclass, so that AReaL's workers import it too.
    """

    options: ClassVar[EngineOptions] = EngineOptions()

    def __init__(self, config: Any) -> None:
        check_config(config)
        if config.optimizer is not None:
            check_schedule(config.optimizer)
        self.config = config
        self.is_offload = self.own_global_group = self._initialized = False
        self._version = self._num_scheduled = self._total_steps = 0
        self._engine: mw.Engine | None = None
        self._rollout: areal_weights.Rollout | None = None
        self._coordinator: Any = None

    # Setup

    def create_process_group(self, parallel_strategy: Any = None) -> None:
        """Make the mesh, by default from the strategy in `config.backend`."""
        if parallel_strategy is None:
            parallel_strategy = ModelAllocation.from_str(self.config.backend).parallel
        axes = mesh_axes(parallel_strategy, self.options.replicate)
        self.own_global_group = not dist.is_initialized()
        timeout = DIST_GROUP_DEFAULT_TIMEOUT.total_seconds()
        self.mesh = mw.Mesh(**axes, device=current_platform.device_type, timeout_s=timeout)
        # Collective, so all ranks make them in this order.
        self._data_group, self._model_group = self.mesh.process_group(_DATA), self.mesh.process_group(_MODEL)
        self._cpu_group = self.mesh.host_group(_ALL)

    def initialize(self, addr: str | None, ft_spec: Any, *args: Any, **kwargs: Any) -> None:
        """Load the model from its files, and make its optimizer, unless the config has none."""
        if addr is not None:
            raise mw.ConfigError(f"addr={addr!r}: the engine runs in this process; give None")
        self._total_steps = ft_spec.total_train_steps
        load = mw.init if self.config.init_from_scratch else mw.load
        self.model = load(self.config.path, self.mesh, **model_options(self.config, self.options))
        self._engine = None if self.config.optimizer is None else self._new_engine()
        self._initialized = True

    def _new_engine(self) -> mw.Engine:
        optim = self.config.optimizer
        return mw.Engine(
            self.model, lr=self._lr, optimizer=optimizer_of(optim), max_norm=optim.gradient_clipping,
            entropy=not self.config.is_critic, on_nonfinite="skip",
        )  # fmt: skip

    @property
    def _lr(self) -> float:
        return learning_rate(self.config.optimizer, self._total_steps, self._num_scheduled)

    @property
    def engine(self) -> mw.Engine:
        """Return the engine that trains. Refuse a model that only scores."""
        if self._engine is None:
            raise mw.StateError("optimizer=None: the model has no optimizer and only scores; set optimizer to train it")
        return self._engine

    @property
    def initialized(self) -> bool:
        """Return whether the model is loaded."""
        return self._initialized

    def destroy(self) -> None:
        """Drop model and optimizer. End the process group, if this engine has made it."""
        if self._initialized:
            del self.model
        self._engine, self._initialized = None, False
        gc.collect()
        current_platform.empty_cache()
        if self.own_global_group and dist.is_initialized():
            dist.barrier(group=self._cpu_group)
            dist.destroy_process_group()
            self.own_global_group = False

    # Ranks

    @property
    def data_parallel_group(self) -> Any:
        """Return the ranks that differ from this one in their data alone."""
        return self._data_group

    @property
    def data_parallel_rank(self) -> int:
        """Return which share of the data this rank gets."""
        return self.mesh.data_rank

    @property
    def data_parallel_world_size(self) -> int:
        """Return the number of data ranks: replicate x fsdp."""
        return self.mesh.num_data_ranks

    @property
    def context_and_model_parallel_group(self) -> Any:
        """Return the ranks that read the same data as this one."""
        return self._model_group

    @property
    def cpu_group(self) -> Any:
        """Return a group between the hosts of all ranks."""
        return self._cpu_group

    def current_data_parallel_head(self) -> int:
        """Return the global rank of the first rank that reads the same data as this one."""
        return self.mesh.ranks[int(self.mesh.ranks_over(_MODEL)[0])]

    def is_data_parallel_head(self) -> bool:
        """Return whether this rank is the first of those that read the same data."""
        return self.current_data_parallel_head() == self.mesh.ranks[self.mesh.rank]

    # Steps

    def train(self, mode: bool = True) -> MeshwrightEngine:
        """Do nothing: the models have no dropout, so they compute the same in training and evaluation."""
        return self

    def optimizer_zero_grad(self) -> None:
        """Drop gradients that wait for an update."""
        self.engine.discard()

    def optimizer_step(self) -> dict[str, float]:
        """Clip and update. If the norm of the gradient is not finite, nothing is changed."""
        norm = self.engine.update()
        applied = math.isfinite(norm)
        if not applied and not self.mesh.rank:
            logger.warning("the gradient norm is %s: the update is skipped", norm)
        return {"update_successful": float(applied), "grad_norm": norm, "lr": self._lr}

    def lr_scheduler_step(self) -> None:
        """Advance the schedule of the learning rate."""
        self._num_scheduled += 1
        self.engine.lr = self._lr

    def forward_backward_batch(
        self, mb_list: Any, process_output_fn: Callable[..., Any], forward_only: bool = False
    ) -> None:
        """Raise: the callback wants whole logits, which no rank has."""
        raise mw.ConfigError(
            "forward_backward_batch hands whole logits to a callback, and here each rank computes only its part of the "
            "vocabulary; call train_batch, eval_batch or forward_batch, whose losses get log-probabilities and entropy"
        )

    def train_batch(
        self, input_: Any, loss_fn: Callable[..., Any], loss_weight_fn: Callable[..., Any]
    ) -> dict[str, float]:
        """Update the model with a batch of this data rank. Return norm, learning rate and what else AReaL logs."""
        self._ensure_ready()
        self.optimizer_zero_grad()
        given = self._micro_batches(input_)
        jagged.backward(self.engine, given.batches, self._loss(given, loss_fn, loss_weight_fn), self._temperature)
        return {**self.optimizer_step(), "num_micro_batches": len(given.batches)}

    @torch.no_grad()
    def eval_batch(self, input_: Any, loss_fn: Callable[..., Any], loss_weight_fn: Callable[..., Any]) -> Tensor:
        """Return the loss over the whole batch of all data ranks, on all ranks. Change nothing."""
        self._ensure_ready()
        given = self._micro_batches(input_)
        loss = self._loss(given, loss_fn, loss_weight_fn)
        scores = jagged.scores(self.model, given.batches, self._temperature)
        own = sum(float(each) for each in jagged.losses_of(self.mesh, loss, scores))
        total = self.mesh.all_gather_on_hosts((own,), _DATA, "the loss of the batch").sum()
        return total.to(self.mesh.device, torch.float32)

    @torch.no_grad()
    def forward_batch(
        self, input_: Any, output_seqlens: list[int] | None = None, aggregate_fn: Callable[..., Any] = torch.cat
    ) -> Any:
        """Return log-probabilities, or values of a critic, padded as the input is."""
        self._ensure_ready()
        given = self._micro_batches(input_)
        widths = [each["attention_mask"].shape[-1] for each in input_] if isinstance(input_, list) else given.sizes
        if output_seqlens is not None and list(output_seqlens) not in (given.sizes, widths):
            raise mw.DataError(f"output_seqlens={output_seqlens} are not the lengths of the rows, {given.sizes}")
        name = "values" if self.config.is_critic else "logprobs"
        scores = jagged.scores(self.model, given.batches, self._temperature)
        outputs = [given.scores(number, each)[name] for number, each in enumerate(scores)]
        result = reorder_and_pad_outputs(outputs, given.sizes, given.cut, aggregate_fn)
        return result if given.meta is None else split_batch(result, given.meta)

    def _micro_batches(self, input_: Any) -> MicroBatches:
        return micro_batches(self.mesh, input_, self.config, self.options.length_multiple)

    @property
    def _temperature(self) -> float:
        return 1.0 if self.config.is_critic else self.config.temperature

    def _loss(self, given: MicroBatches, loss_fn: Callable[..., Any], weight_fn: Callable[..., Any]) -> _Loss:
        """Return the loss of one call, after the weights of all micro-batches of all data ranks were summed."""
        weigh = lambda: [float(weight_fn(mb)) for mb in given.cut.mbs]  # noqa: E731 - short
        weights = self.mesh.together(weigh, "loss_weight_fn", mw.DataError, "nothing was run")
        total = float(self.mesh.all_gather_on_hosts((sum(weights),), _DATA, "the weight of the batch").sum())
        if not total > 0:
            raise mw.DataError(f"the weights of all micro-batches sum to {total}; give some tokens to learn from")
        return _Loss(given, loss_fn, [weight / total for weight in weights], self.config.is_critic)

    # Weights and checkpoints

    def connect_engine(self, engine: Any, meta: Any) -> None:
        """Connect to an inference engine. Weights that go over the network need a group with its servers."""
        areal_weights.check(meta, self.config)
        self._coordinator = DistRolloutCoordinator(rollout_engine=engine, train_engine=self)
        self._rollout = areal_weights.connected(self.mesh, engine, meta, self._rollout)
        dist.barrier(group=self._cpu_group)

    def update_weights(self, meta: Any) -> None:
        """Hand the weights to the inference engine, and wait until it has them."""
        if self._rollout is None:
            raise mw.StateError("no inference engine is connected; call connect_engine first")
        areal_weights.check(meta, self.config)
        with self._awake():
            if meta.type == "disk":
                self._rollout.update_from_disk(self.model, meta, self.config, self._version)
            else:
                self._rollout.update_over_group(self.model, meta, self.config)
        dist.barrier(group=self._cpu_group)

    def rollout_batch(self, data: Any, workflow: Any, workflow_kwargs: Any = None, group_size: int = 1) -> Any:
        """Run a workflow on the inference engine, and share the trajectories between data ranks."""
        return self._connected().rollout_batch(
            data, workflow=workflow, workflow_kwargs=workflow_kwargs, group_size=group_size
        )

    def prepare_batch(
        self, dataloader: Any, workflow: Any, workflow_kwargs: Any = None, should_accept_fn: Any = None,
        group_size: int = 1, dynamic_bs: bool = False,
    ) -> Any:  # fmt: skip
        """Take the next trajectories of an asynchronous rollout, and share them between data ranks."""
        return self._connected().prepare_batch(
            dataloader, workflow=workflow, workflow_kwargs=workflow_kwargs, should_accept_fn=should_accept_fn,
            group_size=group_size, dynamic_bs=dynamic_bs,
        )  # fmt: skip

    def _connected(self) -> Any:
        if self._coordinator is None:
            raise mw.StateError("no inference engine is connected; call connect_engine first")
        return self._coordinator

    def set_version(self, version: int) -> None:
        """Set the version of the weights."""
        self._version = version

    def get_version(self) -> int:
        """Return the version of the weights."""
        return self._version

    def save(self, meta: Any) -> None:
        """Write weights, with `with_optim` a checkpoint: `meta.path/step-N`, which resumes on any mesh."""
        areal_weights.check_format(meta)
        with self._awake():
            if meta.with_optim:
                mw.save(self.engine, meta.path, keep=1, state={"num_scheduled": self._num_scheduled})
            else:
                areal_weights.export(self.model, meta, self.config)

    def load(self, meta: Any) -> None:
        """Read what `save` has written. Weights alone leave the optimizer state and the schedule as they are."""
        areal_weights.check_format(meta)
        with self._awake():
            if not meta.with_optim:
                self._take(areal_weights.load(self.model, meta))
                return
            state = mw.resume(self.engine, meta.path).state or {}
            self._num_scheduled = state.get("num_scheduled", 0)
            self.engine.lr = self._lr

    def _take(self, new: mw.Model) -> None:
        """Use the weights of a new model. Without an optimizer it replaces the old model; else its weights are
        copied."""
        if self._engine is None:
            self.model = new
        else:
            areal_weights.replace_weights(self._engine, new)

    # Memory

    def offload(self) -> None:
        """Move weights, optimizer state and waiting gradients to host memory."""
        self.model.sleep() if self._engine is None else self._engine.sleep()
        self.is_offload = True

    def onload(self) -> None:
        """Move weights, optimizer state and waiting gradients back to the device."""
        self.model.wake() if self._engine is None else self._engine.wake()
        self.is_offload = False

    def _ensure_ready(self) -> None:
        if self.is_offload:
            self.onload()

    @contextlib.contextmanager
    def _awake(self) -> Iterator[None]:
        """Move what is offloaded to the device while the body runs."""
        asleep = self.is_offload
        self._ensure_ready()
        yield
        if asleep:
            self.offload()

    def get_device_stats(self) -> Any:
        """Return the memory that is in use on this rank's device."""
        return DeviceRuntimeInfo.get_current()

    # Statistics

    def export_stats(self) -> dict[str, float]:
        """Return what losses and trainers have recorded, over all data ranks. Losses run on stages with the head."""
        stats = stats_tracker.export_all(reduce_group=self._data_group)
        if self.mesh.axes.pp == 1:
            return stats
        return {name: x for each in self.mesh.gather_objects(stats, ("pp",)) for name, x in each.items()}

    def save_perf_tracer(self, step: int | None = None, force: bool = False) -> None:
        """Save AReaL's trace."""
        perf_tracer.save(step=step, force=force)

    def config_perf_tracer(self, config: Any, rank: int, role: str) -> None:
        """Configure AReaL's tracer once."""
        if not perf_tracer.is_configured():
            perf_tracer.configure(config, rank=rank, role=role)


@dataclass(frozen=True, eq=False)
class _Loss:
    """The loss of one call: AReaL's loss of each micro-batch, times the micro-batch's share of the total weight."""

    given: MicroBatches
    loss_fn: Callable[..., Any]
    shares: list[float]
    is_critic: bool

    def __call__(self, number: int, scores: dict[str, Tensor]) -> Tensor:
        """Return this micro-batch's part of the loss. As in AReaL, weight 0 skips the loss."""
        scores, mb = self.given.scores(number, scores), self.given.cut.mbs[number]
        if not self.shares[number]:
            return torch.stack([x.sum() for x in scores.values()]).sum() * 0.0
        named = [scores["values"]] if self.is_critic else [scores["logprobs"], scores["entropy"]]
        return self.loss_fn(*named, mb) * self.shares[number]
