"""Whether a mesh fits, and what to choose where it does not: a mesh of as many ranks first, then more of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache

import torch

from ..errors import counted
from ..recipe import RECOMPUTE
from .figures import Figures, work_of
from .mesh_checks import as_option, objections
from .search import LEAST_TOKENS, Asked, Candidate, Search, Size
from .wording import name_of, nominal, not_counted, size

_SECONDS = 12.0  # of a CPU, to look for another mesh


@dataclass(frozen=True)
class Verdict:
    """`ok` is None where nothing was asked."""

    ok: bool | None
    text: str
    more: str


def verdict(figures: Figures) -> Verdict:
    needed, device, host = figures.most.device_bytes, figures.device, figures.most.host_bytes
    beside, there = (f" and {size(host)} on the host", " on it") if host else ("", "")
    if device is None:
        return Verdict(None, f"{size(needed)} a rank{beside}", not_counted(figures))
    if figures.fits:
        left = f"A rank stores {size(needed)}{beside}, and {size(device - needed)} are left{there}."
        return Verdict(True, f"fits {nominal(device)}", f"{left} {not_counted(figures)}")
    over = f"A rank stores {size(needed)}{there}, which is {size(needed - device)} too much."
    return Verdict(False, f"does not fit {nominal(device)}", f"{over} Way out: {advice(figures)}.")


@cache  # a page asks as often as a terminal; figures are equal to themselves alone
def advice(figures: Figures) -> str:
    found = [*_of_as_many_ranks(figures), *figures.choices] or helps(figures)
    return f"choose {' or '.join(found)}" if found else "choose more ranks or larger devices"


def _of_as_many_ranks(figures: Figures) -> list[str]:
    """The quickest mesh of as many ranks that fits, as options, with the same tokens in a step."""
    if figures.axes.world == 1 or figures.passing is None or figures.cluster is None:
        return []
    other = [found for found in _searched(figures) if found.figures.axes != figures.axes]
    return [f"{options_of(found)} (the same {counted(figures.axes.world, 'rank')})" for found in other]


def _searched(figures: Figures) -> list[Candidate]:
    assert figures.device is not None, "something does not fit"
    assert figures.cluster is not None, "meshes are compared by their time"
    work, pipeline = figures.work, figures.blueprint.recipe.pipeline
    step = work.tokens * work.num_batches * figures.axes.num_data_ranks
    of_step = Size(figures.axes.world, figures.cluster.gpus_per_node, work.tokens, step)
    kinds = RECOMPUTE[RECOMPUTE.index(figures.memory.recompute) :]
    asked = Asked(figures.model, of_step, "", figures.device, figures.cluster, kinds, figures.optimizer, 1)
    free = figures.blueprint.with_options(pipeline=replace(pipeline, ends=None, hold=None))
    return Search(free, asked, lambda _: None).quickest(_SECONDS)


def options_of(candidate: Candidate) -> str:
    """Spell what a search has chosen as options of `meshwright plan`."""
    figures = candidate.figures
    hold = {True: " --hold", False: " --no-hold", None: ""}[candidate.chosen_hold]
    recompute = figures.memory.recompute
    return (
        f"--mesh {as_option(figures.axes)} --micro-batches {figures.work.num_batches}"
        f"{f' --recompute {recompute}' if recompute != 'none' else ''}{hold}"
    )


def helps(figures: Figures) -> list[str]:
    """The options, each alone, with which figures that do not fit would: of a kind the smallest change that does."""
    kinds = (_fewer_tokens(figures), _narrower(figures))
    first = (next((option for option, changed in kind if changed.fits), None) for kind in kinds)
    return [option for option in first if option is not None]


def _fewer_tokens(figures: Figures) -> Iterator[tuple[str, Figures]]:
    """In a micro-batch, of which a step then has more."""
    axes, tokens, num = figures.axes, figures.work.tokens, figures.work.num_batches
    while tokens % (2 * axes.cp * axes.tp) == 0 and tokens // 2 >= LEAST_TOKENS * axes.cp:
        tokens, num = tokens // 2, num * 2
        yield f"--tokens {tokens}", replace(figures, work=work_of(axes, tokens, num))


def _narrower(figures: Figures) -> Iterator[tuple[str, Figures]]:
    """Yield options for optimizer state in a narrower dtype."""
    dtypes = (torch.float32, torch.bfloat16, torch.uint8)
    for dtype in dtypes[dtypes.index(figures.optimizer.state_dtype or torch.float32) + 1 :]:
        optimizer = replace(figures.optimizer, state_dtype=dtype)
        if not objections(figures.blueprint, asdict(figures.axes), figures.work.num_batches, optimizer):
            yield f"--state-dtype {name_of(dtype)}", replace(figures, optimizer=optimizer)
