"""Say whether a plan fits, and suggest what would: another mesh with as many ranks, then options or more ranks.

Every suggestion is computed with the same figures as the plan itself, so it does fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache

import torch

from ..errors import counted
from ..recipe import RECOMPUTE
from .figures import Figures, work_of
from .mesh_checks import as_option, objections
from .search import LEAST_TOKENS, Candidate, Search, SearchRequest, Size
from .wording import name_of, nominal, not_counted, size

_SEARCH_SECONDS = 12.0  # CPU seconds of the search for another mesh: fewer than for `--search`, which a user requests


@dataclass(frozen=True)
class Verdict:
    """The first line that a reader looks for, and the details below it. `ok` is None if no device was named."""

    ok: bool | None
    text: str
    more: str


def verdict(figures: Figures) -> Verdict:
    """Return whether the rank that stores most fits the device, by how much, and what to do if it does not."""
    needed, device, host = figures.most.device_bytes, figures.device, figures.most.host_bytes
    and_host, on_device = (f" and {size(host)} on the host", " on the device") if host else ("", "")
    if device is None:
        return Verdict(None, f"{size(needed)} per rank{and_host}", not_counted(figures))
    if figures.fits:
        left = f"A rank stores {size(needed)}{and_host}, and {size(device - needed)} remain free{on_device}."
        return Verdict(True, f"fits {nominal(device)}", f"{left} {not_counted(figures)}")
    over = f"A rank stores {size(needed)}{on_device}, which is {size(needed - device)} too much."
    return Verdict(False, f"does not fit {nominal(device)}", f"{over} To fit, {advice(figures)}.")


@cache  # terminal, page and JSON each need it, and a search takes seconds; figures equal only themselves
def advice(figures: Figures) -> str:
    """Return what would fit, as the end of a sentence."""
    options = [*_other_meshes(figures), *figures.choices] or helps(figures)
    return f"choose {' or '.join(options)}" if options else "choose more ranks or larger devices"


def _other_meshes(figures: Figures) -> list[str]:
    """Return the options of the fastest mesh with the same number of ranks and tokens per step that fits, if any."""
    if figures.axes.world == 1 or figures.passing is None or figures.cluster is None:
        return []
    candidates = [each for each in _search(figures) if each.figures.axes != figures.axes]
    return [f"{options_of(each)} (the same {counted(figures.axes.world, 'rank')})" for each in candidates]


def _search(figures: Figures) -> list[Candidate]:
    """Search the meshes that do the same step on the same devices; return at most one."""
    assert figures.device is not None, "something does not fit"
    assert figures.cluster is not None, "meshes are compared by their time"
    work, pipeline = figures.work, figures.blueprint.recipe.pipeline
    step = work.tokens * work.num_batches * figures.axes.num_data_ranks
    of_step = Size(figures.axes.world, figures.cluster.gpus_per_node, work.tokens, step)
    # Recompute as much as the user, or more: less would take more memory than the plan that does not fit.
    kinds = RECOMPUTE[RECOMPUTE.index(figures.memory.recompute) :]
    request = SearchRequest(figures.model, of_step, "", figures.device, figures.cluster, kinds, figures.optimizer, 1)
    # `ends` belongs to one pipeline length, and `hold` was decided for this mesh.
    free = figures.blueprint.with_options(pipeline=replace(pipeline, ends=None, hold=None))
    return Search(free, request, lambda _: None).quickest(_SEARCH_SECONDS)


def options_of(candidate: Candidate) -> str:
    """Spell the choices of a search as options of `meshwright plan`."""
    figures = candidate.figures
    hold = {True: " --hold", False: " --no-hold", None: ""}[candidate.chosen_hold]
    recompute = figures.memory.recompute
    return (
        f"--mesh {as_option(figures.axes)} --micro-batches {figures.work.num_batches}"
        f"{f' --recompute {recompute}' if recompute != 'none' else ''}{hold}"
    )


def helps(figures: Figures) -> list[str]:
    """List options that each make the plan fit: for each kind, the smallest change that is enough."""
    kinds = (_fewer_tokens(figures), _narrower_state(figures))
    first = (next((option for option, changed in kind if changed.fits), None) for kind in kinds)
    return [option for option in first if option is not None]


def _fewer_tokens(figures: Figures) -> Iterator[tuple[str, Figures]]:
    """Yield smaller micro-batches, with more of them so that the tokens of a step stay the same."""
    axes, tokens, num = figures.axes, figures.work.tokens, figures.work.num_batches
    # Below LEAST_TOKENS a search would not try a mesh either.
    while tokens % (2 * axes.cp * axes.tp) == 0 and tokens // 2 >= LEAST_TOKENS * axes.cp:
        tokens, num = tokens // 2, num * 2
        yield f"--tokens {tokens}", replace(figures, work=work_of(axes, tokens, num))


def _narrower_state(figures: Figures) -> Iterator[tuple[str, Figures]]:
    """Yield options for optimizer state in a narrower dtype."""
    dtypes = (torch.float32, torch.bfloat16, *([torch.uint8] if figures.optimizer.codes else []))
    for dtype in dtypes[dtypes.index(figures.optimizer.state_dtype or torch.float32) + 1 :]:
        optimizer = replace(figures.optimizer, state_dtype=dtype)
        # 8-bit state is quantised in blocks, so a mesh that cuts blocks is refused.
        if not objections(figures.blueprint, asdict(figures.axes), figures.work.num_batches, optimizer):
            yield f"--state-dtype {name_of(dtype)}", replace(figures, optimizer=optimizer)
