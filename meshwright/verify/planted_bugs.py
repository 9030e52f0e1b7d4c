"""Bugs to plant, so that a user can see an oracle fail: `meshwright verify MODEL --mesh ... --plant NAME`.

They break the reduction of a gradient, loading, attention, the loss and the update; tests/plants.py has many more. A
bug is planted only in the ranks of the mesh, which are separate processes and end with the run. One process, the
reference, stays right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from .. import parallel
from ..axes import DENSE, Axes
from ..engine import adapters as export_adapters
from ..engine import engine as engine_module
from ..engine import model as model_module
from ..errors import ConfigError
from ..models import decoder
from ..optim import LocalOptimizer
from ..weights import merged
from ..weights import reader as loading
from .reference import weight_of


@dataclass(frozen=True)
class Bug:
    """A known mistake, and how to plant it in this process.

    `what`: a sentence for the report. `axes`: the bug shows only if one of these axes is larger than 1; if empty, it
    shows on any mesh. `plant`: patches the package. `loading`: it shows in the loaded weights, without training.
    `adapters`: it is a bug of adapters (--lora).
    """

    what: str
    axes: tuple[str, ...]
    plant: Callable[[], None]
    loading: bool = False
    adapters: bool = False


def _sum_left_out() -> None:
    """Skip the last reductions: of the gradients of norms over tp, and of other gradients that FSDP does not reduce."""
    parallel.finish = lambda *_: None


def _rows_permuted() -> None:
    """Reverse the rows of every matrix on the last rank: the right values in the wrong places."""
    real = loading.Reader.fill

    def fill(self: Any, layout: Any, piece: Any, stored: Tensor) -> None:
        real(self, layout, piece, stored)
        if dist.get_rank() == dist.get_world_size() - 1 and stored.dim() > 1:
            stored.copy_(stored.flip(0))

    loading.Reader.fill = fill  # type: ignore[method-assign]


def _leak() -> None:
    """Make one document of all tokens of a batch."""
    real = decoder.Decoder.forward

    def leaky(self: Any, tokens_T: Tensor, *more: Any) -> tuple[Tensor, ...]:
        labels_T, _, *rest = more
        return real(self, tokens_T, labels_T, decoder.ops.documents([len(tokens_T)], tokens_T.device), *rest)

    decoder.Decoder.forward = leaky  # type: ignore[method-assign, assignment]


def _mean_of_means() -> None:
    """Divide each micro-batch by its own targets, which gives tokens of short micro-batches too large a weight."""
    real = engine_module.Engine._share

    def share(self: Any, batch: Any, scores: Any, step: Any) -> Tensor:
        num = step.num_batches * self.model.mesh.num_data_ranks
        return real(self, batch, scores, step) * step.weight / (weight_of(batch) * num)

    engine_module.Engine._share = share  # type: ignore[method-assign]


def _update_lost() -> None:
    """Update a copy of the first parameter, like an optimizer that was built before the model was sharded."""
    real = LocalOptimizer.step

    def step(self: Any, stored: Any, grads: Any, lr: float, clip: Any = None) -> None:
        lost = next((name for name in stored if name in grads), "")
        real(self, {name: t.clone() if name == lost else t for name, t in stored.items()}, grads, lr, clip)

    LocalOptimizer.step = step  # type: ignore[method-assign]


def _drawn_by_rank() -> None:
    """Draw each rank's adapters from its own seed, like wrappers that are added after sharding."""
    real = model_module.fill_fresh

    def fill(param: Any, piece: Any, stored: Tensor, seed: int) -> None:
        real(param, piece, stored, seed + dist.get_rank())

    model_module.fill_fresh = fill


def _merge_left_out() -> None:
    """Export the base weights, like a trainer that unmerges before the tensors are read."""
    merged.MergedValues.__getitem__ = merged.Values.__getitem__  # type: ignore[method-assign]
    merged.MergedValues.views = merged.Values.views  # type: ignore[method-assign]


def _own_rows() -> None:
    """Write an adapter with only the rows of the writing rank, and zeros for the rows of other ranks."""
    real = export_adapters.factors_on_rank_0

    def factors(model: Any) -> dict[str, Tensor]:
        whole = real(model)
        for param in (param for param in model.table if param.adapter and param.name in model.pieces and whole):
            rows = model.pieces[param.name].shape[0]
            for key in param.layouts[0].keys:
                whole[key][rows * len(whole[key]) // param.matrix[0] :] = 0.0
        return whole

    export_adapters.factors_on_rank_0 = factors


BUGS: dict[str, Bug] = {
    "sum-left-out": Bug("gradients that FSDP does not sum are left unsummed", ("tp",), _sum_left_out),
    "rows-permuted": Bug(
        "the last rank loads the rows of its matrices in another order", (), _rows_permuted, loading=True
    ),
    "leak": Bug("packed documents see each other", (), _leak),
    "mean-of-means": Bug("the loss is the mean of the micro-batches' means", (), _mean_of_means),
    "update-lost": Bug("one parameter is updated in a copy", (), _update_lost),
    "drawn-by-rank": Bug("each rank draws its adapters from a seed of its own", DENSE, _drawn_by_rank, adapters=True),
    "merge-left-out": Bug("merged exports hold the base", (), _merge_left_out, adapters=True),
    "own-rows": Bug(
        "an adapter file holds the rows of one rank, and zeros for the others", ("fsdp",), _own_rows, adapters=True
    ),
}


def check_felt(name: str, axes: Axes, *, training: bool, adapters: bool) -> None:
    """Refuse a bug that may change nothing in this run: if the run passed, that would prove nothing."""
    if bug(name).adapters and not adapters:
        raise ConfigError(f"--plant {name} is a bug of adapters, and changes nothing without them; add --lora")
    wanted = bug(name).axes
    if wanted and not any(axes.size_of(axis) > 1 for axis in wanted):
        choices = " or ".join(f"--mesh {axis}=2" for axis in wanted)
        raise ConfigError(f"--plant {name} may change nothing on {axes}; try {choices}")
    if not training and not bug(name).loading:
        choices = " or ".join(name for name, bug in BUGS.items() if bug.loading)
        raise ConfigError(f"--weights trains nothing, so --plant {name} would change nothing; try --plant {choices}")


def bug(name: str) -> Bug:
    """Return a bug by its name, or refuse the name and list all bugs."""
    if name not in BUGS:
        known = "; ".join(f"{name}: {bug.what}" for name, bug in BUGS.items())
        raise ConfigError(f"--plant {name!r} is unknown; choose from {known}")
    return BUGS[name]
