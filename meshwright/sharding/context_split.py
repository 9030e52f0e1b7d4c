"""Context parallelism by mixer: how many neighbours on cp swap tokens for heads, and what is done over the others."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd

from ..axes import Axes
from ..errors import LayoutError
from ..recipe import ContextParallel
from .doors import ATTENTION, DELTA, Deal, Swap, find
from .rules import ShardingSpec

BEYOND = {ATTENTION: "gather", DELTA: "state"}  # keys and values are gathered; a state is passed on


def asked(context: ContextParallel, mixer: str) -> int | None:
    return {ATTENTION: context.attention, DELTA: context.delta}[mixer]


def neighbours(context: ContextParallel, mixer: str, heads: int, cp: int) -> int:
    """Between how many a mixer swaps, with so many heads on a rank of tp."""
    common, wanted = gcd(heads, cp), asked(context, mixer)
    if wanted is not None:
        return wanted
    return common if mixer == ATTENTION or common == cp else 1


def deals(spec: ShardingSpec, axes: Axes, coords: Mapping[str, int]) -> dict[Swap, Deal]:
    """How the heads of a tp rank are dealt out, for each mixer of the model."""
    found = {}
    for name, swap in find(spec.module, Swap):
        start, stop = spec.rules.span(swap.heads.dim, swap.heads.size, axes, coords, name)
        found[swap] = Deal(start, stop, neighbours(spec.recipe.context, swap.mixer, stop - start, axes.cp))
    return found


def ways(spec: ShardingSpec, axes: Axes) -> str:
    """What each mixer does under cp, for people: `attention: swap 4 x gather 2, delta: state 8`."""
    found = {}
    for swap, deal in deals(spec, axes, axes.coords(0)).items():
        both = {"swap": deal.parts, BEYOND[swap.mixer]: axes.cp // deal.parts}
        found[swap.mixer] = " x ".join(f"{way} {size}" for way, size in both.items() if size > 1)
    return ", ".join(f"{mixer}: {way}" for mixer, way in found.items() if way)


def check_context(spec: ShardingSpec, axes: Axes) -> None:
    """Refuse a `mw.ContextParallel` that the mesh or the model cannot follow."""
    dealt = deals(spec, axes, axes.coords(0))
    for mixer in BEYOND:
        wanted, heads = asked(spec.recipe.context, mixer), dict[int, str]()
        for name, swap in find(spec.module, Swap):
            if swap.mixer == mixer:
                heads.setdefault(dealt[swap].stop - dealt[swap].start, name)
        if wanted is not None:
            _check(mixer, wanted, heads, axes)


def _check(mixer: str, wanted: int, heads: Mapping[int, str], axes: Axes) -> None:
    """`heads`: how many a rank of tp has, and the first mixer that has so many."""
    if not heads:
        raise LayoutError(f"{mixer}={wanted} of mw.ContextParallel: the model has no such mixer; leave it out")
    common = gcd(axes.cp, *heads)
    if common % wanted:
        named = " and ".join(f"the {num} heads of {name}" for num, name in heads.items())
        of_tp = f" that tp={axes.tp} leaves to a rank" if axes.tp > 1 else ""
        choices = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
        raise LayoutError(
            f"{mixer}={wanted} of mw.ContextParallel does not divide cp={axes.cp} and {named}{of_tp}; "
            f"choose {mixer} from {choices}"
        )
