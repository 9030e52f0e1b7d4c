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
from ..axes import Axes
from ..engine import engine as engine_module
from ..errors import ConfigError
from ..models import decoder
from ..optim import LocalOptimizer
from ..weights import reader as loading
from .reference import weight_of


@dataclass(frozen=True)
class Bug:
    """A known mistake, and how to plant it in this process.

    `what`: a sentence for the report. `axes`: it shows only where one of them is larger than 1; on any mesh if empty.
    `plant`: patches the package. `loading`: it shows in the loaded weights, without training.
    """

    what: str
    axes: tuple[str, ...]
    plant: Callable[[], None]
    loading: bool = False


def _sum_left_out() -> None:
    """Skip the last reductions: of norms over tp, and of other gradients that FSDP does not reduce."""
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
    """Divide each micro-batch by its own targets, which gives tokens of short ones too large a weight."""
    real = engine_module.Engine._share

    def share(self: Any, batch: Any, scores: Any, step: Any) -> Tensor:
        num = step.num_batches * self.model.mesh.num_data_ranks
        return real(self, batch, scores, step) * step.weight / (weight_of(batch) * num)

    engine_module.Engine._share = share  # type: ignore[method-assign]


def _update_lost() -> None:
    """Update a copy of the first parameter, as an optimizer does that was built before the model was sharded."""
    real = LocalOptimizer.step

    def step(self: Any, stored: Any, grads: Any, lr: float, clip: Any = None) -> None:
        real(self, {name: t.clone() if i == 0 else t for i, (name, t) in enumerate(stored.items())}, grads, lr, clip)

    LocalOptimizer.step = step  # type: ignore[method-assign]


BUGS: dict[str, Bug] = {
    "sum-left-out": Bug("gradients that FSDP does not sum are left unsummed", ("tp",), _sum_left_out),
    "rows-permuted": Bug(
        "the last rank loads the rows of its matrices in another order", (), _rows_permuted, loading=True
    ),
    "leak": Bug("packed documents see each other", (), _leak),
    "mean-of-means": Bug("the loss is the mean of the micro-batches' means", (), _mean_of_means),
    "update-lost": Bug("one parameter is updated in a copy", (), _update_lost),
}


def check_felt(name: str, axes: Axes, *, training: bool) -> None:
    """Refuse a bug that may change nothing on this mesh: a run that passes would then prove nothing."""
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
