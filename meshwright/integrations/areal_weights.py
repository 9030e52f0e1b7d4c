"""Write the weights of an AReaL engine to files, and send them to inference servers."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from areal.api import ParamSpec, SaveLoadMeta
from areal.engine.core.distributed import init_custom_process_group
from areal.infra.platforms import current_platform
from areal.utils import name_resolve, names
from areal.utils.constants import DIST_GROUP_DEFAULT_TIMEOUT
from areal.utils.network import find_free_ports, format_host_for_url, gethostip
from torch import Tensor

from .. import api as mw
from ..weight_sync.buckets import exhaust
from .options import dtype_of

_GROUP = "update_weight_group"
_FORMATS = ("hf", "dcp")


def check(meta: Any, config: Any) -> None:
    """Refuse an unsupported way to send weights."""
    if meta.type == "awex":
        raise mw.ConfigError("weights of type 'awex' are not supported; set weight_update_mode to disk or xccl")
    if meta.type == "disk":
        return
    if config.use_lora:
        raise mw.ConfigError("adapters go to inference servers by files: set weight_update_mode='disk' with use_lora")
    stages = meta.gen_allocation.parallel.pipeline_parallel_size
    if stages > 1:
        raise mw.ConfigError(
            f"the servers have {stages} pipeline stages, which need a group each; set weight_update_mode='disk', or "
            "serve without pipeline stages"
        )


def check_format(meta: Any) -> None:
    """Refuse a format of weights that AReaL does not know."""
    if meta.weight_format not in _FORMATS:
        raise mw.ConfigError(f"weight_format={meta.weight_format!r} is unknown; choose from {', '.join(_FORMATS)}")


def export(model: mw.Model, meta: Any, config: Any) -> None:
    """Write a Hugging Face directory in the compute dtype, as AReaL does. Format "dcp" is written in float32, because
    training continues from it. Adapters are written as PEFT files.
    """
    if model.recipe.lora is not None:
        mw.export_adapter(model, meta.path, overwrite=True)
        return
    dtype = dtype_of(config.dtype) if meta.weight_format == "hf" else torch.promote_types(model.dtype, torch.float32)
    mw.export(model, meta.path, dtype=dtype, overwrite=True)
    tools = [each for each in (meta.tokenizer, meta.processor) if each is not None]

    def write() -> None:
        for tool in tools if model.mesh.rank == 0 else []:
            tool.save_pretrained(meta.path)

    model.mesh.together(write, f"the tokenizer in {meta.path}", mw.ExportError, "the tokenizer was not written")


def load(model: mw.Model, meta: Any) -> mw.Model:
    """Load the weights of a Hugging Face directory as a new model with the same recipe."""
    if model.recipe.lora is not None:
        raise mw.ConfigError(f"{meta.path}: adapters are loaded with their optimizer state (with_optim=True) only")
    recipe = {each.name: getattr(model.recipe, each.name) for each in fields(model.recipe)}
    return mw.load(meta.path, model.mesh, **recipe)


def replace_weights(engine: mw.Engine, new: mw.Model) -> None:
    """Copy the weights of another model into an engine's model. The optimizer state stays."""
    if engine.model.numbers:
        raise mw.ConfigError("frozen weights in 8 or 4 bits cannot be replaced; make a new engine from that directory")
    engine.discard()  # gradients of the replaced weights
    stored = engine.model.stored()
    with torch.no_grad():
        for name, tensor in new.stored().items():
            stored[name].copy_(tensor)


@dataclass(frozen=True)
class Rollout:
    """A connected inference engine. `group`: on rank 0, if weights go over the network, this rank and all servers."""

    mesh: mw.Mesh
    engine: Any
    group: Any = None

    def update_from_disk(self, model: mw.Model, meta: Any, config: Any, version: int) -> None:
        """Write the weights to `meta.path`, and make the servers read them. They keep generating until then."""
        export(model, SaveLoadMeta(path=meta.path, weight_format="hf", with_optim=False), config)

        def notify() -> None:
            if self.mesh.rank:
                return
            self.engine.pause_generation()
            read = self.engine.update_weights_from_disk(meta)
            name = names.update_weights_from_disk(config.experiment_name, config.trial_name, version)
            name_resolve.add(name, str(time.time()), keepalive_ttl=120)  # seconds, as in AReaL
            read.result()
            self.engine.continue_generation()

        self._together(notify)

    def update_over_group(self, model: mw.Model, meta: Any, config: Any) -> None:
        """Broadcast the weights in the compute dtype, in buckets, from rank 0 to the servers."""
        stream = mw.stream(model, dtype=dtype_of(config.dtype))

        def send() -> None:
            try:
                if self.mesh.rank == 0:
                    self._send(stream, meta)
            finally:
                exhaust(stream)  # the other ranks of the mesh wait in its collectives

        self._together(send)

    def _send(self, stream: Iterable[tuple[str, Tensor]], meta: Any) -> None:
        self.engine.pause_generation()
        options = dist.BroadcastOptions()
        options.rootRank = 0
        for bucket in buckets(stream, meta.weight_chunked_mem_mb << 20):
            received = self.engine.update_weights_from_distributed(meta, [_spec(*each) for each in bucket])
            for _, tensor in bucket:
                self.group.broadcast([tensor.to(self.mesh.device)], options).wait()
            received.result()
        self.engine.continue_generation()

    def _together(self, act: Any) -> None:
        self.mesh.together(act, "the weights for the servers", mw.RankError, "the servers have not got the weights")


def connected(mesh: mw.Mesh, engine: Any, meta: Any, before: Rollout | None) -> Rollout:
    """Connect to an inference engine. The process group with its servers is made once."""
    if meta.type == "disk":
        return Rollout(mesh, engine)
    if before is not None and before.group is not None:
        return Rollout(mesh, engine, before.group)
    make = lambda: None if mesh.rank else _group(engine, meta)  # noqa: E731 - short
    group = mesh.together(make, "the group with the servers", mw.RankError, "no group was made")
    return Rollout(mesh, engine, group)


def _group(engine: Any, meta: Any) -> Any:
    """Make a process group of this process and all servers, while the servers join it."""
    meta.nccl_master_address, meta.nccl_group_name = gethostip(), _GROUP
    (meta.nccl_master_port,) = find_free_ports(1)
    joined = engine.init_weights_update_group(meta)
    with _own_store():
        group = init_custom_process_group(
            backend=current_platform.communication_backend,
            world_size=meta.gen_allocation.parallel.world_size + 1,
            init_method=f"tcp://{format_host_for_url(meta.nccl_master_address)}:{meta.nccl_master_port}",
            rank=0, group_name=_GROUP, timeout=DIST_GROUP_DEFAULT_TIMEOUT,
        )  # fmt: skip
    joined.result()
    return group


@contextlib.contextmanager
def _own_store() -> Iterator[None]:
    """Let this process open its own store while the body runs: under torchrun it would connect to torchrun's."""
    name = "TORCHELASTIC_USE_AGENT_STORE"
    before = os.environ.get(name)
    os.environ[name] = str(False)
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def buckets(tensors: Iterable[tuple[str, Tensor]], limit: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield named tensors in lists of at most `limit` bytes, or of one tensor that is larger."""
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


def _spec(name: str, tensor: Tensor) -> Any:
    """Return the metadata of a tensor, as the servers read it."""
    return ParamSpec(name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
