"""A few runs of the full matrix (`make matrix`) on up to 4 ranks, in which any two options meet in all of their values.
An axis of size 4 is tried only with ep=4. MESHWRIGHT_ALL=1 pairs axes of size 4 with all options, and axes of size 8
with each other.

Pairs that meet in tests/test_meshes.py are left out: it has more oracles. Of its families with experts only pairs of
axes count, since routers of this file also train by an aux loss.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests import matrix, parts, tiny
from tests.test_meshes import CASES

AXES = {"pp", "replicate", "fsdp", "cp", "tp", "ep"}


def proven() -> list[matrix.Dials]:
    """Return the float64 runs of tests/test_meshes.py."""
    return [
        matrix.Dials(
            **{"family": case.name.removesuffix("_tied"), **dict.fromkeys(AXES, 1), **dict(case.mesh)},
            recompute="none",
            kind="tied" if tiny.ODD[case.name]["tie_word_embeddings"] else "untied",
            reshard=True,
        )
        for case in CASES
        if case.name.removesuffix("_tied") in matrix.FAMILIES and case.head == "lm"
    ]


def proven_pairs(run: matrix.Dials) -> set[object]:
    pairs: set[Any] = matrix.pairs_of(run)
    return {(one, other) for one, other in pairs if "moe" not in run.family or {one[0], other[0]} <= AXES}


def everything() -> list[matrix.Dials]:
    """Return all runs; for `make test` an axis of four only with as many ranks of experts, which cuts all as well."""
    if parts.ALL:
        return matrix.everything((1, 2, 4, 8))
    return [run for run in matrix.everything((1, 2, 4)) if run.ep == 4 or 4 not in vars(run).values()]


EVERYTHING, PROVEN = everything(), set().union(*map(proven_pairs, proven()))
RUNS = matrix.pairwise(EVERYTHING, PROVEN)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> matrix.Matrix:
    batches = (1, 3) if parts.ALL else (1, 2)
    return matrix.Matrix(tmp_path_factory.mktemp("matrix"), batches=batches)


@pytest.mark.parametrize("runs", matrix.by_mesh(RUNS), ids=lambda runs: f"{runs[0].axes}".replace(" ", ","))
def test_every_two_options(made: matrix.Matrix, runs: list[matrix.Dials]) -> None:
    wrong = {str(run): lines[:3] for run, lines in zip(runs, made.findings(runs), strict=True) if lines}
    assert wrong == {}


def test_all_pairs_are_run() -> None:
    def met(runs: list[matrix.Dials]) -> set[object]:
        return set().union(*map(matrix.pairs_of, runs))

    assert met(RUNS) | PROVEN >= met(EVERYTHING)
    assert {*proven()} <= {*matrix.everything((1, 2, 4))}
