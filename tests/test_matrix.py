"""A few runs of the full matrix (`make matrix`), such that any two of its dials meet in all of their values: axes of
size 8 with each other, all else on up to 4 ranks.

Pairs that meet in tests/test_meshes.py need no run here: it tries every family on every mesh of up to 4 ranks with more
oracles. Only its families without experts are counted, whose dials are all as there. The others are counted here alone:
their routers train by an aux loss too, which they do not there.
"""

from __future__ import annotations

import pytest

from tests import matrix, tiny, trials


def proven() -> list[matrix.Dials]:
    """What tests/test_meshes.py runs in float64, of the families without experts."""
    one = dict(replicate=1, fsdp=1, tp=1, ep=1)
    return [
        matrix.Dials(
            **{"family": name.removesuffix("_tied"), **one, **mesh},
            recompute="none",
            kind="tied" if config["tie_word_embeddings"] else "untied",
            reshard=True,
        )
        for name, config in tiny.ODD.items()
        for mesh in trials.MESHES
        if "moe" not in name
    ]


PROVEN = proven()
RUNS = matrix.pairwise(matrix.everything(), PROVEN)


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

    assert met([*RUNS, *PROVEN]) == met(matrix.everything())
    dials = 3 * 3 * 2
    assert len(matrix.everything()) == 2 * 50 * dials + 3 * (20 * dials + 30)


def test_what_is_proven_is_what_the_meshes_try() -> None:
    from tests.test_meshes import CASES

    tried = {(case.name, case.mesh) for case in CASES if case.head == "lm"}
    assert tried >= {(name, tuple(mesh.items())) for name in tiny.ODD for mesh in trials.MESHES}
    assert set(PROVEN) <= set(matrix.everything())
