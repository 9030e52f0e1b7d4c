"""Choose each mixer's context parallelism: Ulysses within groups of cp ranks, all-gather or state passing between them.

Ulysses (arXiv 2309.14509) swaps tokens for heads by all-to-all. It is the cheapest way, but takes at most as many ranks
as there are heads. If cp is larger, it runs within groups of neighbouring ranks. Between the groups, attention
all-gathers keys and values, and the delta net passes its state on.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd

from ..axes import Axes
from ..errors import LayoutError
from ..recipe import ContextParallel
from .doors import ATTENTION, DELTA, SPARSE, HeadSplit, Swap, find_doors
from .rules import ShardingSpec

BEYOND = {ATTENTION: "gather", DELTA: "state", SPARSE: "gather"}  # between groups: gather keys and values, or a state


def requested_parts(context: ContextParallel, mixer: str) -> int | None:
    """Return how many neighbours the user asks to swap tokens for heads; None if the option is not set."""
    return {ATTENTION: context.attention, DELTA: context.delta, SPARSE: None}[mixer]


def num_swapping(context: ContextParallel, mixer: str, heads: int, cp: int) -> int:
    """Return how many neighbours swap tokens for heads in a mixer that has `heads` heads on a tp rank.

    Attention swaps between as many ranks as its heads allow, because that costs less than gathering keys and values.
    The delta net swaps over all of cp or not at all. Sparse attention never swaps.
    """
    common, requested = gcd(heads, cp), requested_parts(context, mixer)
    if requested is not None:
        return requested
    return common if mixer == ATTENTION or (mixer == DELTA and common == cp) else 1


def head_splits(spec: ShardingSpec, axes: Axes, coords: Mapping[str, int]) -> dict[Swap, HeadSplit]:
    """Return how the heads of a tp rank are dealt out, for each mixer of the model."""
    deal_of = {}
    for name, swap in find_doors(spec.module, Swap):
        start, stop = spec.rules.span(swap.heads.dim, swap.heads.size, axes, coords, name)
        deal_of[swap] = HeadSplit(start, stop, num_swapping(spec.recipe.context, swap.mixer, stop - start, axes.cp))
    return deal_of


def ways(spec: ShardingSpec, axes: Axes) -> str:
    """Describe what each mixer does under cp: `attention: swap 4 x gather 2, delta: state 8`."""
    texts = {}
    for swap, deal in head_splits(spec, axes, axes.coords(0)).items():
        both = {"swap": deal.parts, BEYOND[swap.mixer]: axes.cp // deal.parts}
        texts[swap.mixer] = " x ".join(f"{verb} {size}" for verb, size in both.items() if size > 1)
    return ", ".join(f"{mixer}: {verb}" for mixer, verb in texts.items() if verb)


def check_context(spec: ShardingSpec, axes: Axes) -> None:
    """Refuse a `mw.ContextParallel` that the mesh or the model cannot follow."""
    deal_of = head_splits(spec, axes, axes.coords(0))
    for mixer in BEYOND:
        requested, heads = requested_parts(spec.recipe.context, mixer), dict[int, str]()
        for name, swap in find_doors(spec.module, Swap):
            if swap.mixer == mixer:
                heads.setdefault(deal_of[swap].stop - deal_of[swap].start, name)
        if requested is not None:
            _check_mixer(mixer, requested, heads, axes)


def _check_mixer(mixer: str, requested: int, heads: Mapping[int, str], axes: Axes) -> None:
    """Refuse a number of neighbours that does not divide cp and the heads.

    `heads` maps each number of heads that mixers have on a tp rank to the first mixer with that number.
    """
    if not heads:
        raise LayoutError(f"{mixer}={requested} of mw.ContextParallel: the model has no such mixer; leave it out")
    common = gcd(axes.cp, *heads)
    if common % requested:
        named = " and ".join(f"the {num} heads of {name}" for num, name in heads.items())
        of_tp = f" that tp={axes.tp} leaves to a rank" if axes.tp > 1 else ""
        choices = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
        raise LayoutError(
            f"{mixer}={requested} of mw.ContextParallel does not divide cp={axes.cp} and {named}{of_tp}; "
            f"choose {mixer} from {choices}"
        )
