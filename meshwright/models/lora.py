"""LoRA (arXiv 2106.09685): low-rank adapters of the matrices of linear layers and experts, `W + scale * B @ A`.

An adapter is two more declared parameters next to its base. B has the rows of the base and A its columns, by the same
named dims, so the sharding rules cut them as they cut the base: B with its rows (column parallel), A with its columns
(row parallel). The factor that no axis cuts is whole on every rank, and its gradient is summed by the rule for all
that is whole. The branch ends in the state of the base's output, a shard or a partial sum, before the same door. So
adapters have no collective of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

import torch
from torch import Tensor, nn

from .. import ops
from ..recipe import Lora
from ..sharding import Block, Box, Declared, Init, Layout, Param, weight

ADAPTER = "base_model.model."  # PEFT's prefix of the keys of adapters


def factor_key(module: str, factor: str) -> str:
    """Return the key of a factor, "A" or "B", of a module's adapter, as PEFT spells it."""
    return f"{ADAPTER}{module}.lora_{factor}.weight"


def modules_of(param: Param) -> list[str]:
    """Return the names of the modules, in the files, whose matrices a parameter holds."""
    return [key.removesuffix(".weight") for key in param.layouts[0].keys]


class Adapter(nn.Module):
    """The adapter of a linear layer.

    Where the base joins several matrices of the files (gate and up), each has an A of its own, as in PEFT.
    """

    def __init__(self, base: Param, lora: Lora) -> None:
        super().__init__()
        modules, rank = modules_of(base), lora.rank
        self.parts, self.scale, self.on = len(modules), lora.scale, True
        part = dict(list(base.rows.items())[:1]) if self.parts > 1 else {}
        assert list(part.values()) in ([], [self.parts]), f"{modules}: joined rows must be [part, ...]"
        self.a = _beside(
            base, {**part, "rank": rank}, base.cols, _first_init(base), layouts=_a_layout(base, modules, rank)
        )
        self.b = _beside(base, base.rows, {"rank": rank}, _second_init(lora), layouts=_b_layout(base, rank))

    def add_to(self, y: Tensor, low: Tensor, rows: slice | None = None) -> Tensor:
        """Add `scale * low @ B.T` to the output of the base, where low is `x @ A.T`; with `rows`, of those of B only.

        `torch.add` on a GPU multiplies and adds in float32 and rounds once. On a CPU it first rounds `scale` to the
        dtype of y.
        """
        b = self.b if rows is None else self.b[rows]
        if self.parts == 1:
            return torch.add(y, ops.linear(low, b), alpha=self.scale)
        pairs = zip(low.chunk(self.parts, -1), b.chunk(self.parts), strict=True)
        return torch.add(y, torch.cat([ops.linear(part, up) for part, up in pairs], -1), alpha=self.scale)


class ExpertAdapter(nn.Module):
    """The adapters of one stacked matrix of all routed experts: an A and a B for each expert, on its ep rank.

    Gate and up of an expert share one A, as in PEFT, whose base is one matrix `[2F, D]`.
    """

    def __init__(self, base: Param, module: str, lora: Lora) -> None:
        super().__init__()
        rank = lora.expert_rank or lora.rank
        self.scale, self.on = lora.scale, True
        rows_a = {"expert": base.rows["expert"], "rank": rank}
        self.a = _beside(base, rows_a, base.cols, _first_init(base), key=factor_key(module, "A"))
        self.b = _beside(base, base.rows, {"rank": rank}, _second_init(lora), key=factor_key(module, "B"))

    def factors(self, num_experts: int) -> ops.LowRank | None:
        """Return the factors of the experts of this rank, or None where the adapter is switched off."""
        if not self.on:
            return None
        a_ErI, b_EOr = (factor.unflatten(0, (num_experts, -1)) for factor in (self.a, self.b))
        return ops.LowRank(a_ErI, b_EOr, self.scale)


def _beside(
    base: Param, rows: Mapping[str, int], cols: Mapping[str, int], init: Init, *, key: str | None = None,
    layouts: Sequence[Layout] = (),
) -> Declared:  # fmt: skip
    """Declare a factor that lives where its base does: the same layer and, by its dims, the same ranks.

    It has no weight decay, as PEFT's users expect: the library's default of 0.1 would pull `B @ A`, not W, towards 0.
    """
    made = weight(rows, cols, key=key, layouts=layouts, init=init, decay=False, adapter=True)
    made.param = replace(made.param, layer=base.layer, first=base.first)
    return made


def _first_init(base: Param) -> Init:
    """Return PEFT's initialisation of A: `kaiming_uniform_(a=sqrt(5))`, which is uniform within 1 / sqrt(columns)."""
    return Init("uniform", prod(base.cols.values()) ** -0.5)


def _second_init(lora: Lora) -> Init:
    """Return the initialisation of B: zeros, so that step 0 is the base bit for bit, unless the caller draws it."""
    return Init("normal", lora.b_std) if lora.b_std else Init("zeros")


def _a_layout(base: Param, modules: Sequence[str], rank: int) -> list[Layout]:
    """Return the layout of A: a key for each module, stacked along `part` if there are several."""
    shape, whole = (rank, prod(base.cols.values())), (rank, *base.cols.values())
    blocks = []
    for number, module in enumerate(modules):
        lead = ((number,), (number + 1,)) if len(modules) > 1 else ((), ())
        ours = Box((*lead[0], *(0 for _ in whole)), (*lead[1], *whole))
        blocks.append(Block(ours, factor_key(module, "A"), shape, Box.whole(shape)))
    return [Layout("lora", tuple(blocks))]


def _b_layout(base: Param, rank: int) -> list[Layout]:
    """Return the layout of B: the blocks of the base, with `rank` columns in place of its own.

    So rows that the base reorders (q, k and v of a delta net) are reordered in B too, and the file has PEFT's order.
    """
    num_rows, blocks = len(base.rows), []
    for block in base.layouts[0].blocks:
        ours = Box((*block.ours.start[:num_rows], 0), (*block.ours.stop[:num_rows], rank))
        source = Box((block.source.start[0], 0), (block.source.stop[0], rank))
        key = factor_key(block.key.removesuffix(".weight"), "B")
        blocks.append(Block(ours, key, (block.shape[0], rank), source))
    return [Layout("lora", tuple(blocks))]
