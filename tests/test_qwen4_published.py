"""Qwen3.8-Flash-Next as it is published: its parameters, and what 64 ranks store of them."""

from __future__ import annotations

import pytest
import torch

from meshwright.axes import STAGE, Axes
from meshwright.blueprint import Blueprint
from meshwright.ops.codings import in_memory
from meshwright.plan.figures import Figures, work_of
from meshwright.recipe import MemoryOptions, Recipe
from meshwright.sharding import piece, pieces
from tests.published_configs import QWEN4_EXP

BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def blueprint() -> Blueprint:
    return Blueprint.of(QWEN4_EXP, None, Recipe(memory=MemoryOptions(recompute="full")))


def test_its_parameters_are_those_of_the_files(blueprint: Blueprint) -> None:
    """Without the MTP layer and the tower, which are carried."""
    (table,) = (param for param in blueprint.table if param.by_rows)
    assert table.matrix == (320_001_536, 160)
    assert sum(param.numel for param in blueprint.table) - table.numel == 125_743_653_760
    left = blueprint.left_out({*blueprint.trained()})
    assert "layers.1.grams.table (51,200,245,760 elements) is frozen" in left
    assert "(36 such parameters)" in left, "three of each indexer"


@pytest.mark.parametrize(
    ("axes", "gigabytes"), [(Axes(fsdp=64, ep=64), 49.65), (Axes(pp=4, fsdp=8, tp=2, ep=16), 55.67)]
)
def test_64_ranks_hold_what_the_plan_says(blueprint: Blueprint, axes: Axes, gigabytes: float) -> None:
    """Eight micro-batches of 8,192 tokens, to the byte of what is allocated."""
    figures = Figures("Qwen3.8-Flash-Next", blueprint, axes, work_of(axes, 8192, 8), 80 * 10**9)
    assert figures.fits
    assert figures.most.num_bytes / 1e9 == pytest.approx(gigabytes, abs=0.05)
    forms = blueprint.stored_dtypes(BF16, {*blueprint.trained()})
    made = [in_memory(each.shape, forms[name]) for name, each in pieces(blueprint.spec, axes, 0).items()]
    allocated = sum(torch.empty(shape, dtype=dtype, device="meta").nbytes for shape, dtype in made)
    assert allocated == figures.most.parts["parameters"]


def test_rows_of_the_table_are_spread_over_a_stage(blueprint: Blueprint) -> None:
    """Also where they do not divide; each has one holder, and a complete gradient."""
    table, spec = blueprint.table["layers.1.grams.table"], blueprint.spec
    for axes in (Axes(fsdp=64), Axes(pp=4, fsdp=8, tp=2), Axes(replicate=3, fsdp=7, cp=5, tp=2)):
        place, stage = (
            spec.line(axes.pp).rank_of(spec.line(axes.pp).stage_of(1)),
            range(axes.world // axes.pp // axes.replicate),
        )
        own = dict(pp=place, replicate=axes.replicate - 1)
        ranks = [rank for rank in range(axes.world) if own.items() <= axes.coords(rank).items()]
        held = [piece(table, spec.rules, axes, axes.coords(rank)) for rank in ranks]
        ends = [0, *(each.hi for each in held)]
        assert len(held) == len(stage) == len(axes.group(ranks[0], STAGE))
        assert [each.lo for each in held] == ends[:-1]
        assert ends[-1] == table.matrix[0]
