"""The line of pipeline stages: which layers make a stage, and which rank of the axis pp holds it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

from ..errors import ConfigError, MeshError, counted


@dataclass(frozen=True)
class Line:
    """Stage s has the layers from `ends[s - 1]` up to `ends[s]`.

    Stages are dealt to the ranks in turn, stage s to rank `s % pp`. With `turn` they go there and back, a V: rank r
    holds the stages r and `2 * pp - 1 - r`. Then a rank that keeps a micro-batch long in one stage keeps it briefly in
    the other, so that all ranks keep equally much.
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
                "give as many ends as a multiple of pp"
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
        """The stage with the head; the embedding is in stage 0."""
        return self.num_stages - 1

    def rank_of(self, stage: int) -> int:
        """The place on the axis pp of the rank that holds a stage."""
        return 2 * self.pp - 1 - stage if self.turn and stage >= self.pp else stage % self.pp

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that the rank at this place of the axis pp holds, in their order."""
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
    """Where stages end if the dearest of them is to be as cheap as can be, since all others wait for it.

    `costs`: of each layer. `first`, `last`: what the embedding and the head add. Of equally good bounds it takes those
    that give the early stages less, because these keep the activations of the most micro-batches.
    """
    if not 1 <= num_stages <= len(costs):
        raise MeshError(
            f"{counted(len(costs), 'layer')} cannot make {counted(num_stages, 'pipeline stage')}: each has 1 or more; "
            f"choose pp and the stages of a rank so that their product is from 1 to {len(costs)}"
        )
    sums = [[0.0, *accumulate(costs[begin:])] for begin in range(len(costs))]
    best: list[dict[int, tuple[float, tuple[int, ...]]]] = [{0: (0.0, ())}]  # of each number of stages, by their end
    for stage in range(num_stages):
        extra = first * (stage == 0) + last * (stage == num_stages - 1)
        before, num_after = best[-1], num_stages - 1 - stage
        best.append({
            end: min(
                (max(dearest, sums[begin][end - begin] + extra), (*ends, end))
                for begin, (dearest, ends) in before.items()
                if begin < end
            )
            for end in range(stage + 1, len(costs) - num_after + 1)
        })  # fmt: skip
    return best[-1][len(costs)][1]


def balanced(line: Line, costs: Sequence[float], last: float = 0.0) -> Line:
    """The same stages with other ends, if the dearest rank gets cheaper by them.

    A large head makes one stage dear however layers are cut. The other stages of its rank are then to be small, since
    all ranks wait for the dearest. Ends move by one layer at a time for as long as that helps.
    """

    def dearest(ends: tuple[int, ...]) -> tuple[float, float]:
        """Rank and stage."""
        sums = [sum(costs[begin:end]) for begin, end in pairwise((0, *ends))]
        sums[-1] += last
        return max(sum(sums[stage] for stage in line.stages_of(rank)) for rank in range(line.pp)), max(sums)

    ends = line.ends
    while True:
        moved = [(*ends[:at], ends[at] + by, *ends[at + 1 :]) for at in range(len(ends) - 1) for by in (-1, 1)]
        best = min((each for each in moved if all(a < b for a, b in pairwise((0, *each)))), key=dearest, default=ends)
        if dearest(best) >= dearest(ends):
            return replace(line, ends=ends)
        ends = best
