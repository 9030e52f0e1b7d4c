"""A few runs of the full matrix (`make matrix`) on up to 4 ranks, such that any two of its dials meet in all of their
values. With MESHWRIGHT_ALL=1 also axes of size 8 with each other.

Pairs that meet in tests/test_meshes.py need no run here: it has more oracles. Only its families without experts are
counted, whose dials are all as there. The others are counted here alone: their routers train by an aux loss too, which
they do not there.
"""

from __future__ import annotations

import pytest

from tests import matrix, parts, tiny
from tests.test_meshes import CASES


def proven() -> list[matrix.Dials]:
    """What tests/test_meshes.py runs in float64, of the families without experts."""
    one = dict.fromkeys(("pp", "replicate", "fsdp", "cp", "tp", "ep"), 1)
    return [
        matrix.Dials(
            **{"family": case.name.removesuffix("_tied"), **one, **dict(case.mesh)},
            recompute="none",
            kind="tied" if tiny.ODD[case.name]["tie_word_embeddings"] else "untied",
            reshard=True,
        )
        for case in CASES
        if "moe" not in case.name and case.head == "lm"
    ]


PROVEN = proven()
EVERYTHING = matrix.everything((1, 2, 4, 8) if parts.ALL else (1, 2, 4))
RUNS = matrix.pairwise(EVERYTHING, PROVEN)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> matrix.Matrix:
    return matrix.Matrix(tmp_path_factory.mktemp("matrix"))


@pytest.mark.parametrize("runs", matrix.by_mesh(RUNS), ids=lambda runs: f"{runs[0].axes}".replace(" ", ","))
def test_every_two_dials(made: matrix.Matrix, runs: list[matrix.Dials]) -> None:
    wrong = {str(run): lines[:3] for run, lines in zip(runs, made.findings(runs), strict=True) if lines}
    assert wrong == {}


def test_pairs_are_all_there() -> None:
    def met(runs: list[matrix.Dials]) -> set[object]:
        return set().union(*map(matrix.pairs_of, runs))

    assert met([*RUNS, *PROVEN]) == met(EVERYTHING)
    assert set(PROVEN) <= set(EVERYTHING)
