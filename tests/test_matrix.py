"""A few runs of the full matrix (`make matrix`), such that any two of its dials meet in all of their values."""

from __future__ import annotations

from itertools import combinations

import pytest

from tests import matrix

RUNS = matrix.pairwise(matrix.everything())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> matrix.Matrix:
    return matrix.Matrix(tmp_path_factory.mktemp("matrix"))


@pytest.mark.parametrize("runs", matrix.by_mesh(RUNS), ids=lambda runs: f"{runs[0].axes}".replace(" ", ","))
def test_every_two_dials(made: matrix.Matrix, runs: list[matrix.Dials]) -> None:
    wrong = {str(run): lines[:3] for run, lines in zip(runs, made.findings(runs), strict=True) if lines}
    assert wrong == {}


def test_pairs_are_all_there() -> None:
    def met(runs: list[matrix.Dials]) -> set[object]:
        return {pair for run in runs for pair in combinations(vars(run).items(), 2)}

    assert met(RUNS) == met(matrix.everything())
    dials = 3 * 3 * 2
    assert len(matrix.everything()) == 2 * 50 * dials + 3 * (20 * dials + 30)
