"""Bugs to plant, so that a user can see an oracle fail: `meshwright verify MODEL --mesh ... --plant NAME`.

Each is one that was reported of a training engine. It is planted in the ranks of the mesh alone, which are processes of
their own and end with the run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .. import ops, parallel
from ..axes import Axes
from ..engine import engine as engine_module
from ..engine import loss_terms
from ..errors import ConfigError
from ..models import decoder, vision_tower
from ..ops import fp8_matmul, matmul
from ..ops.fp8_matmul import BLOCK, rounded_matrix, rounded_rows
from ..ops.fp8_tensor import Quantised
from ..optim import LocalOptimizer
from ..parallel import fp8_gather, run_step
from ..sharding import TOWER
from ..weights import reader as loading
from .reference import weight_of


@dataclass(frozen=True)
class Bug:
    what: str
    axes: tuple[str, ...]  # it shows where one of them is larger than 1; anywhere if none is named
    plant: Callable[[], None]
    loading: bool = False  # it shows in what is loaded
    tower: bool = False  # it shows in models that see, with pictures
    fp8: bool = False  # it shows in products in 8 bits


def _sum_left_out() -> None:
    parallel.finish = lambda *_: None


def _averaged() -> None:
    real = parallel.finish

    def averaged(grads: Any, mesh: Any) -> None:
        grads = list(grads)
        real(grads, mesh)
        for axes, grad in grads:
            grad.div_(mesh.size_of(axes) if axes else 1)

    parallel.finish = averaged


def _copies_counted() -> None:
    real = engine_module.squares
    engine_module.squares = lambda grads, owned, device: real(grads, {*grads} | set(owned), device)  # type: ignore[call-overload]


def _rows_permuted() -> None:
    real = loading.Reader.fill

    def fill(self: Any, layout: Any, piece: Any, stored: Tensor) -> None:
        real(self, layout, piece, stored)
        if dist.get_rank() == dist.get_world_size() - 1 and stored.dim() > 1:
            stored.copy_(stored.flip(0))

    loading.Reader.fill = fill  # type: ignore[method-assign]


def _leak() -> None:
    real = decoder.Decoder.forward

    def leaky(self: Any, tokens_T: Tensor, *more: Any) -> tuple[Tensor, ...]:
        labels_T, _, *rest = more
        return real(self, tokens_T, labels_T, decoder.ops.documents([len(tokens_T)], tokens_T.device), *rest)

    decoder.Decoder.forward = leaky  # type: ignore[method-assign, assignment]


def _mean_of_means() -> None:
    real = engine_module.Engine._share

    def share(self: Any, batch: Any, scores: Any, step: Any) -> Tensor:
        num = step.num_batches * self.model.mesh.num_data_ranks
        return real(self, batch, scores, step) * step.weight / (weight_of(batch) * num)

    engine_module.Engine._share = share  # type: ignore[method-assign]


def _update_lost() -> None:
    real = LocalOptimizer.step

    def step(self: Any, stored: Any, grads: Any, lr: float) -> None:
        real(self, {name: t.clone() if i == 0 else t for i, (name, t) in enumerate(stored.items())}, grads, lr)

    LocalOptimizer.step = step  # type: ignore[method-assign]


def _weights_ignored() -> None:
    loss_terms.WEIGHT = "another field"


def _frames_leak() -> None:
    real = vision_tower.TowerBlock.block

    def leaky(self: Any, x_PE: Tensor, tables: vision_tower.Tables, _: ops.Documents) -> Tensor:
        return real(self, x_PE, tables, ops.documents([len(x_PE)] if len(x_PE) else [], x_PE.device))

    vision_tower.TowerBlock.block = leaky  # type: ignore[method-assign, assignment]


def _rows_elsewhere() -> None:
    real = run_step.sight_of

    def sight_of(*given: Any) -> vision_tower.Sight | None:
        sight = real(*given)
        return sight and replace(sight, at_N=sight.at_N.flip(0))

    run_step.sight_of = sight_of  # type: ignore[assignment]


def _tower_unsummed() -> None:
    real = engine_module.axes_left_to_sum
    engine_module.axes_left_to_sum = lambda param, *rest: () if param.name.startswith(TOWER) else real(param, *rest)


def _tower_left_out() -> None:
    run_step.sum_replicas = lambda *_, **__: None


def _sideways() -> None:
    real = matmul._of_input

    def sideways(d: Tensor, joined: Tensor, x: Tensor, fp8: bool) -> Tensor:
        turned = F.pad(d.flatten(0, -2).mT, (0, -d.flatten(0, -2).shape[0] % BLOCK))
        along = rounded_rows(turned).mT[: d.flatten(0, -2).shape[0]].view_as(d)
        return (along @ rounded_matrix(joined)).to(x.dtype) if fp8 else real(d, joined, x, fp8)

    matmul._of_input = sideways


def _scale_of_shard() -> None:
    real = fp8_matmul.rounded_matrix

    def of_own_rows(kind: fp8_gather._Kind, _: object) -> None:
        kind.scales.zero_()
        for matrix in kind.matrices:
            matrix.find_largest()
        kind.scales.copy_(fp8_matmul.scales_of(kind.scales))

    def rounded(weight: Tensor) -> Tensor:
        if isinstance(weight, Quantised):
            return real(weight)
        halves = weight.unflatten(0, (-1, 2, BLOCK // 2))
        return torch.stack(
            [real(F.pad(half, (0, 0, 0, BLOCK // 2)))[: BLOCK // 2] for half in halves.flatten(0, 1)]
        ).view_as(weight)

    fp8_gather._Kind.find_scales = of_own_rows  # type: ignore[method-assign, assignment]
    fp8_matmul.rounded_matrix = rounded  # type: ignore[assignment]


BUGS: dict[str, Bug] = {
    "sum-left-out": Bug("gradients that FSDP does not sum are left unsummed", ("tp",), _sum_left_out),
    "averaged": Bug("they are averaged instead of summed", ("tp",), _averaged),
    "copies-counted": Bug("the gradient norm counts copies too", ("tp", "replicate"), _copies_counted),
    "rows-permuted": Bug(
        "the last rank loads the rows of its matrices in another order", (), _rows_permuted, loading=True
    ),
    "leak": Bug("packed documents see each other", (), _leak),
    "mean-of-means": Bug("the loss is the mean of the micro-batches' means", (), _mean_of_means),
    "update-lost": Bug("one parameter is updated in a copy", (), _update_lost),
    "weights-ignored": Bug("the weights of tokens are only counted", (), _weights_ignored),
    "frames-leak": Bug("pictures see each other in the tower", (), _frames_leak, tower=True),
    "rows-elsewhere": Bug("what the tower sees goes to other places", (), _rows_elsewhere, tower=True),
    "tower-unsummed": Bug("each rank keeps its share of the tower's gradients", ("tp",), _tower_unsummed, tower=True),
    "tower-left-out": Bug(
        "replicas sum in the last micro-batch alone, though the tower ran before it",
        ("replicate",),
        _tower_left_out,
        tower=True,
    ),
    "fp8-sideways": Bug("gradients are rounded to 8 bits along their tokens", (), _sideways, fp8=True),
    "fp8-scale-of-shard": Bug(
        "half a block of 128 rows has a scale of its own, or the rows of a rank where 8-bit numbers are sent",
        (),
        _scale_of_shard,
        fp8=True,
    ),
}


def check_felt(name: str, axes: Axes, *, training: bool, sees: bool, in_fp8: bool) -> None:
    """Refuse a bug that may change nothing: that it is not found would mean nothing."""
    wanted = bug(name).axes
    if bug(name).fp8 and not in_fp8:
        raise ConfigError(f"--plant {name} changes nothing without products in 8 bits; add --fp8")
    if bug(name).tower and not sees:
        raise ConfigError(f"--plant {name} changes nothing without the tower of a model that sees; add --tower")
    if wanted and not any(axes.size_of(axis) > 1 for axis in wanted):
        choices = " or ".join(f"--mesh {axis}=2" for axis in wanted)
        raise ConfigError(f"--plant {name} may change nothing on {axes}; try {choices}")
    if not training and not bug(name).loading:
        choices = " or ".join(name for name, bug in BUGS.items() if bug.loading)
        raise ConfigError(f"--weights trains nothing, so --plant {name} would change nothing; try --plant {choices}")


def bug(name: str) -> Bug:
    if name not in BUGS:
        known = "; ".join(f"{name}: {bug.what}" for name, bug in BUGS.items())
        raise ConfigError(f"--plant {name!r} is unknown; choose from {known}")
    return BUGS[name]
