"""The full matrix: every family on every mesh of 1 to 8 ranks, however memory is saved, whatever head is trained.

    make matrix                                     # all of it: hours on two cores, it says how many
    python -m tests.matrix --ranks 1 2 4            # of these sizes
    python -m tests.matrix --only qwen3_moe fsdp=2,tp=2,ep=2 full
    python -m tests.matrix --fp8 --only none reshard untied       # products in 8 bits, of models in whole blocks
    python -m tests.matrix --ranks 8 --after 1200   # continue a run that stopped after "1200 of 1680 runs"

A run loads a model and makes a step of 1 micro-batch and then, on updated weights, one of 3; in `make test` on more
than 2 ranks only the second of these steps. After each, every
gradient, the norm, the loss, the load of the experts, replicas and the bill (collectives and bytes) are compared with
one process, in float64. `tests/test_matrix.py` takes a few runs in which every two options meet in all of their values.
"""

from __future__ import annotations

import argparse
import functools
import heapq
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import asdict, dataclass
from itertools import combinations, product
from pathlib import Path
from typing import Any

import torch

import meshwright as mw
from meshwright.axes import Axes
from meshwright.log import quiet
from meshwright.recipe import Recipe
from meshwright.verify import Data, Finding, Recorder, Reference, ReferenceStep, Run, Trial, collective_checks, oracles
from tests import parts, tiny, worlds

KINDS = ("tied", "untied", "value")
RECOMPUTE = ("none", "selective", "full")

# Query heads for tp=8 (and too few kv heads); other sizes are odd; the two layers differ.
_HEADS = dict(num_attention_heads=8, head_dim=6, num_hidden_layers=2, intermediate_size=40)
_DELTA = dict(
    num_attention_heads=8, head_dim=8, num_hidden_layers=2, linear_num_key_heads=8, linear_num_value_heads=16,
    layer_types=["linear_attention", "full_attention"],
)  # fmt: skip
_AUX = dict(output_router_logits=True, router_aux_loss_coef=0.3)  # the router's aux loss is trained too
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": dict(num_attention_heads=8, hidden_size=48, num_hidden_layers=2, intermediate_size=40),
    "qwen3": _HEADS,
    "qwen3_moe": {**_HEADS, **_AUX},
    "qwen3_5": {**_DELTA, "intermediate_size": 40},
    "qwen3_5_moe": {**_DELTA, **_AUX},
}
# FP8 matmuls need whole blocks of 128 on each of 8 ranks of tp.
_BLOCKS = dict(hidden_size=256, head_dim=128, num_key_value_heads=8)
_BLOCKS_OF: dict[str, int] = {
    "intermediate_size": 1024, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128,
}  # fmt: skip


def in_blocks(family: str) -> dict[str, Any]:
    sizes = {name: size for name, size in _BLOCKS_OF.items() if name in tiny.ODD[family]}
    rope = {"rope_parameters": tiny.ALIGNED[family]["rope_parameters"]} if "rope_parameters" in tiny.ODD[family] else {}
    return {**FAMILIES[family], **_BLOCKS, **sizes, **rope}


@dataclass(frozen=True)
class Dials:
    """The options of one run."""

    family: str
    pp: int
    replicate: int
    fsdp: int
    cp: int
    tp: int
    ep: int
    recompute: str
    kind: str
    reshard: bool

    @property
    def axes(self) -> Axes:
        return Axes(self.pp, self.replicate, self.fsdp, self.cp, self.tp, self.ep)

    def __str__(self) -> str:
        mesh = ",".join(str(self.axes).split()) if self.axes.world > 1 else "one"
        return f"{self.family} {mesh} {self.recompute} {self.kind} {'reshard' if self.reshard else 'keep'}"


def meshes(world: int) -> Iterator[tuple[int, ...]]:
    """Two layers make at most two stages; tests/test_pipeline.py has larger pp."""
    for pp, replicate, fsdp, cp, tp, ep in product((1, 2), *[(1, 2, 4, 8)] * 5):
        if pp * replicate * fsdp * cp * tp == world and (fsdp * cp * tp) % ep == 0:
            yield pp, replicate, fsdp, cp, tp, ep


def everything(ranks: Sequence[int] = (1, 2, 4, 8)) -> list[Dials]:
    """List all runs. `ep` changes nothing without experts, which one run per mesh shows."""
    grid = [mesh for world in ranks for mesh in meshes(world)]
    runs = [
        Dials(family, *mesh, recompute, kind, reshard)
        for mesh, family, kind, recompute, reshard in product(grid, FAMILIES, KINDS, RECOMPUTE, (True, False))
    ]
    plain = ("none", "untied", True)
    return [r for r in runs if "moe" in r.family or r.ep == 1 or (r.recompute, r.kind, r.reshard) == plain]


def pairwise(runs: Sequence[Dials], proven: Set[object] = frozenset()) -> list[Dials]:
    """Choose runs in which any two options meet in all values in which they meet in `runs`, preferring small worlds.
    Pairs in `proven` are left out."""
    pairs = {run: pairs_of(run) for run in runs}
    left = set().union(*pairs.values()).difference(proven)
    # The gain of a run only falls, so the top run is the best if it is still the top after a recount.
    heap = [(-len(pairs[run]) / cost(run), at, run) for at, run in enumerate(runs)]
    heapq.heapify(heap)
    chosen = []
    while left:
        _, at, run = heapq.heappop(heap)
        now = -len(pairs[run] & left) / cost(run)
        if heap and now > heap[0][0]:
            heapq.heappush(heap, (now, at, run))
        else:
            chosen.append(run)
            left -= pairs[run]
    return _needed(chosen, pairs, proven)


def cost(run: Dials) -> float:
    """Weigh large worlds, which have more pairs."""
    return run.axes.world**0.6


_AXES = ("pp", "replicate", "fsdp", "cp", "tp", "ep")
_LARGE = {8} if parts.ALL else {4, 8}


def pairs_of(run: Dials) -> set[object]:
    """Return all pairs of two options of a run, with their values.

    A large axis is only paired with axes of its own size and of 1, since an axis of half the size meets the other
    options in the same code. `ep` only counts where there are experts. `make matrix` runs all pairs.
    """
    idle = set() if "moe" in run.family or run.ep == 1 else {"ep"}
    return {
        (one, other)
        for one, other in combinations(vars(run).items(), 2)
        if not (large := _LARGE & {one[1], other[1]})
        or ({one[0], other[0]} <= {*_AXES} and {one[1], other[1]} <= {1, *large} and len(large) == 1)
        if not idle & {one[0], other[0]} or "family" in (one[0], other[0])
    }


def _needed(chosen: Sequence[Dials], pairs: dict[Dials, set[object]], proven: Set[object]) -> list[Dials]:
    """Drop runs whose pairs all meet in others, the largest first."""
    needed = list(chosen)
    for run in sorted(chosen, key=lambda run: -run.axes.world):
        others = set().union(*(pairs[other] for other in needed if other != run))
        if pairs[run] <= others | proven:
            needed.remove(run)
    return needed


@dataclass(frozen=True)
class Course:
    """Model and data of all runs of a family, head and number of data ranks. `batches`: micro-batches of each step."""

    source: Path
    head: str
    num_data_ranks: int
    batches: tuple[int, ...]
    router_aux: str = "pooled"
    fp8: str | None = None

    def trial(self, num: int, run: Dials | None = None) -> Trial:
        data = Data(num=num, target=self.head == "value")
        axes = Axes(replicate=self.num_data_ranks) if run is None else run.axes
        memory = mw.MemoryOptions() if run is None else mw.MemoryOptions(recompute=run.recompute, reshard=run.reshard)
        recipe = Recipe(head=self.head, dtype=torch.float64, memory=memory, fp8=self.fp8)
        return Trial(self.source, axes, data, recipe, router_aux=self.router_aux)


def refer(course: Course) -> list[Reference]:
    """Make a reference for each step on one process."""
    engine, out = course.trial(1).engine(mw.Mesh(device="cpu")), []
    for num in course.batches:
        loss = engine.backward(course.trial(num).all_batches())
        grads = mw.gather(engine.model, "grad")
        norm = engine.update()
        out.append(Reference([ReferenceStep(loss, [norm], engine.router.load_LE, grads)]))
    return out


def examine(runs: Sequence[tuple[Dials, Course]], references: dict[Course, list[Reference]]) -> list[list[str]]:
    """Return the findings of this rank in each run. The runs share a mesh."""
    first = runs[0][0]
    mesh = mw.Mesh(**asdict(first.axes), device="cpu", timeout_s=60)
    return [[str(f) for f in _steps(run, course, references[course], mesh)] for run, course in runs]


def _steps(dials: Dials, course: Course, references: list[Reference], mesh: mw.Mesh) -> Iterator[Finding]:
    engine = course.trial(1, dials).engine(mesh)
    for num, reference in zip(course.batches, references, strict=True):
        trial = course.trial(num, dials)
        batches = trial.batches(engine.model, 0)
        run = Run(trial, reference, engine)
        with Recorder() as recorder:
            loss = engine.backward(batches)
            run.stored = collective_checks.stored_bytes(engine)
        findings = [
            *oracles.s1_loss(run, loss),
            *oracles.g1_gradients(run),
            *oracles.n1_norm(run),
            *oracles.g2_replicas(run),
        ]
        with recorder:
            engine.update()
        run.step_collectives = recorder.collectives
        findings += [*collective_checks.c1_collectives(run), *collective_checks.k1_bill(run, len(batches[0]), num)]
        yield from (Finding(f.oracle, f"{num} micro-batches, {f.name}", f.what, f.guess) for f in findings)


class Matrix:
    """Runs by mesh, which share sources and references."""

    def __init__(self, folder: Path, fp8: str | None = None, batches: tuple[int, ...] = (1, 3)) -> None:
        self.folder, self.fp8, self.batches = folder, fp8, batches
        self.references = dict[Course, list[Reference]]()

    def courses(self, runs: Sequence[Dials]) -> list[Course]:
        """Return the course of each run, and make missing references in one world."""
        made = [self._course(run) for run in runs]
        lacking = {course: functools.partial(refer, course) for course in made if course not in self.references}
        if lacking:
            self.references.update({course: answer for course, (answer,) in worlds.in_turn(1, lacking).items()})
        return made

    def _course(self, run: Dials) -> Course:
        tied = run.kind == "tied"
        at = self.folder / f"{run.family}{'-tied' if tied else ''}"
        if not at.exists():
            changes = {**(in_blocks(run.family) if self.fp8 else FAMILIES[run.family]), "tie_word_embeddings": tied}
            tiny.directory(at, run.family, dtype=torch.bfloat16, **changes)
        aux = "previous" if run.pp > 1 else "pooled"  # a pipeline cannot pool
        head = "value" if run.kind == "value" else "lm"
        batches = self.batches if parts.ALL or run.axes.world <= 2 else self.batches[-1:]  # new weights: on two ranks
        return Course(at, head, run.axes.num_data_ranks, batches, aux, self.fp8)

    def findings(self, runs: Sequence[Dials]) -> list[list[str]]:
        """Return the findings of all ranks in each run. The runs share a mesh."""
        both = list(zip(runs, self.courses(runs), strict=True))
        seconds = 60.0 + 20.0 * len(runs)
        ranks = worlds.run(runs[0].axes.world, examine, both, self.references, seconds=seconds)
        return [[line for rank in ranks for line in rank[i]] for i in range(len(runs))]


def by_mesh(runs: Iterable[Dials], most: int = 30) -> list[list[Dials]]:
    """Group runs by mesh, at most `most` together: a hang or a death ends a whole group."""
    groups: dict[Axes, list[Dials]] = {}
    for run in runs:
        groups.setdefault(run.axes, []).append(run)
    return [group[i : i + most] for group in groups.values() for i in range(0, len(group), most)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8], choices=[1, 2, 4, 8])
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="runs whose name has all these words")
    parser.add_argument("--after", type=int, default=0, metavar="N", help="skip the first N runs")
    parser.add_argument("--fp8", action="store_true", help="FP8 matmuls, on models in whole blocks of 128")
    options = parser.parse_args()
    torch.set_num_threads(1)
    runs = [run for run in everything(options.ranks) if set(options.only) <= set(str(run).split())]
    if not 0 <= options.after < len(runs):
        parser.error(f"nothing to run: {len(runs)} runs match these words and sizes, --after {options.after}")
    total, runs = len(runs), [run for group in by_mesh(runs) for run in group][options.after :]
    began, done, wrong = time.monotonic(), options.after, 0
    with quiet(), tempfile.TemporaryDirectory() as folder:
        matrix = Matrix(Path(folder), "block" if options.fp8 else None)
        for group in by_mesh(runs):
            try:
                findings = matrix.findings(group)
            except mw.RankError as error:
                findings = [[f"RUN {error}"], *([[]] * (len(group) - 1))]
            for run, lines in zip(group, findings, strict=True):
                wrong += bool(lines)
                for line in lines[:3]:
                    print(f"{run}: {line}", flush=True)
            done += len(group)
            print(f"{time.monotonic() - began:7.0f} s  {done} of {total} runs, {wrong} wrong", flush=True)
    steps = len(runs) * len(matrix.batches)
    print(f"{'passed' if not wrong else 'FAILED'}: {len(runs)} runs, {steps} steps, {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
