"""The tables of the tiny models, on the meta device."""

from functools import cache

import torch

from meshwright.layout import Layout, Param, Table
from meshwright.models import describe

from ..tiny import ODD

TINY = sorted(ODD)


@cache
def table_of(name: str, head: str = "lm") -> Table:
    return describe(ODD[name], "model.", head)[1]


def choices_of(table: Table) -> list[dict[str, str]]:
    """Every choice of one layout name for each group."""
    found: list[dict[str, str]] = [{}]
    for group in sorted({p.group for p in table if p.group}):
        names = {layout.name for p in table if p.group == group for layout in p.layouts}
        found = [{**choice, group: name} for choice in found for name in sorted(names)]
    return found


def layout_of(param: Param, choice: dict[str, str]) -> Layout:
    found = [a for a in param.layouts if not param.group or a.name == choice[param.group]]
    assert len(found) == 1
    return found[0]


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
