"""The map of pipeline stages: which layers make up a stage, and which rank of the axis pp holds it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

from ..errors import ConfigError, MeshError, counted


@dataclass(frozen=True)
class Line:
    """Stage s has the layers from `ends[s - 1]` up to `ends[s]`; stage s is on rank `s % pp`.

    With `turn` the stages form a V: rank r holds the stages r and `2 * pp - 1 - r`. A micro-batch that a rank keeps
    long in one of them is brief in the other, so all ranks keep the same amount of activations.
    """

    pp: int
    ends: tuple[int, ...]
    turn: bool = False

    def __post_init__(self) -> None:
        if any(a >= b for a, b in pairwise((0, *self.ends))):
            raise ConfigError(f"ends={self.ends} leaves a stage without a layer; give bounds that increase, above 0")
        if self.pp < 1 or not self.ends or self.num_stages % self.pp:
            raise ConfigError(
                f"{counted(self.num_stages, 'pipeline stage')} cannot be dealt evenly to pp={self.pp} ranks; "
                "give a multiple of pp ends"
            )
        if self.turn and self.num_stages != 2 * self.pp:
            raise ConfigError(
                f"{counted(self.num_stages, 'stage')} on pp={self.pp} make {self.stages_a_rank} a rank; a V has 2, one "
                "there and one back; choose 2 stages a rank, or another schedule"
            )

    @property
    def num_stages(self) -> int:
        return len(self.ends)

    @property
    def stages_a_rank(self) -> int:
        return self.num_stages // self.pp

    @property
    def last(self) -> int:
        """Return the stage with the head; the embedding is in stage 0."""
        return self.num_stages - 1

    def rank_of(self, stage: int) -> int:
        """Return the position on the axis pp of the rank that holds a stage."""
        return 2 * self.pp - 1 - stage if self.turn and stage >= self.pp else stage % self.pp

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that the rank at this position of the axis pp holds, in order."""
        return self._held[rank]

    @cached_property
    def _held(self) -> tuple[tuple[int, ...], ...]:
        stages = range(self.num_stages)
        return tuple(tuple(s for s in stages if self.rank_of(s) == rank) for rank in range(self.pp))

    def layers_of(self, stage: int) -> range:
        return range(self.ends[stage - 1] if stage else 0, self.ends[stage])

    def stage_of(self, layer: int) -> int:
        if not 0 <= layer < self.ends[-1]:
            raise MeshError(f"layer {layer} is in no stage: the line has {counted(self.ends[-1], 'layer')}")
        return next(stage for stage, end in enumerate(self.ends) if layer < end)


def even(costs: Sequence[float], num_stages: int, first: float = 0.0, last: float = 0.0) -> tuple[int, ...]:
    """Return where stages end so that the most expensive one is as cheap as possible, since all others wait for it.

    `costs`: the cost of each layer. `first`, `last`: the costs of the embedding and the head. Among equally good cuts
    it takes the one that gives early stages less, because they keep the activations of the most micro-batches (dynamic
    programming over stages; ties compare the tuples of ends).
    """
    if not 1 <= num_stages <= len(costs):
        raise MeshError(
            f"{counted(len(costs), 'layer')} cannot make {counted(num_stages, 'pipeline stage')}: each has 1 or more; "
            f"choose pp and the stages of a rank so that their product is from 1 to {len(costs)}"
        )
    sums = [[0.0, *accumulate(costs[begin:])] for begin in range(len(costs))]
    # best[n][end]: the cost of the most expensive of the first n stages that end there, and their ends
    best: list[dict[int, tuple[float, tuple[int, ...]]]] = [{0: (0.0, ())}]
    for stage in range(num_stages):
        extra = first * (stage == 0) + last * (stage == num_stages - 1)
        previous, num_after = best[-1], num_stages - 1 - stage
        best.append({
            end: min(
                (max(highest, sums[begin][end - begin] + extra), (*ends, end))
                for begin, (highest, ends) in previous.items()
                if begin < end
            )
            for end in range(stage + 1, len(costs) - num_after + 1)
        })  # fmt: skip
    return best[-1][len(costs)][1]


def balanced(line: Line, costs: Sequence[float], last: float = 0.0) -> Line:
    """Move the ends of stages for as long as the most expensive rank gets cheaper.

    A large head makes its stage expensive however layers are cut. Then the other stages of its rank should be small,
    since all ranks wait for that rank. Ends move by one layer at a time (hill climbing).
    """

    def bottleneck(ends: tuple[int, ...]) -> tuple[float, float]:
        """Return the cost of the most expensive rank, then that of the most expensive stage."""
        sums = [sum(costs[begin:end]) for begin, end in pairwise((0, *ends))]
        sums[-1] += last
        return max(sum(sums[stage] for stage in line.stages_of(rank)) for rank in range(line.pp)), max(sums)

    ends = line.ends
    while True:
        candidates = [(*ends[:at], ends[at] + by, *ends[at + 1 :]) for at in range(len(ends) - 1) for by in (-1, 1)]
        best = min(
            (each for each in candidates if all(a < b for a, b in pairwise((0, *each)))), key=bottleneck, default=ends
        )
        if bottleneck(best) >= bottleneck(ends):
            return replace(line, ends=ends)
        ends = best
