"""The tables of the tiny models, on the meta device."""

from functools import cache

import torch

from meshwright.models import describe
from meshwright.recipe import Pipeline, Recipe
from meshwright.sharding import Layout, Param, Rules, ShardingSpec, Table
from tests.tiny import ODD

TINY = sorted(ODD)


@cache
def table_of(name: str, head: str = "lm") -> Table:
    return describe(ODD[name], "model.", Recipe(head=head))[1]


def spec_of(table: Table, pp: int) -> ShardingSpec:
    """Cut stages of equal length, and add layers where they are too few."""
    own = 1 + max((p.layer for p in table if p.layer is not None), default=-1)
    more = {f"more.{i}": Param({"embed": 3}, {}, (), name=f"more.{i}", layer=i) for i in range(own, max(own, pp, 1))}
    num, whole = max(own, pp, 1), Table({**table.params, **more}, table.carried)
    ends = tuple(-(-num * (stage + 1) // pp) for stage in range(pp))
    return ShardingSpec(whole, Rules(), recipe=Recipe(pipeline=Pipeline(ends=ends)))


def choices_of(table: Table) -> list[dict[str, str]]:
    """Every choice of one layout name for each group."""
    result: list[dict[str, str]] = [{}]
    for group in sorted({p.group for p in table if p.group}):
        names = {layout.name for p in table if p.group == group for layout in p.layouts}
        result = [{**choice, group: name} for choice in result for name in sorted(names)]
    return result


def layout_of(param: Param, choice: dict[str, str]) -> Layout:
    result = [a for a in param.layouts if not param.group or a.name == choice[param.group]]
    assert len(result) == 1
    return result[0]


def source_of(table: Table, choice: dict[str, str]) -> dict[str, torch.Tensor]:
    """A source in which every element has a number of its own; copies are filled by the test."""
    out, at = {}, 0
    for param in table:
        for block in layout_of(param, choice).blocks:
            if block.key not in out:
                num = torch.Size(block.shape).numel()
                out[block.key] = torch.arange(at, at + num).view(block.shape)
                at += num
    return out
