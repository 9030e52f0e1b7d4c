"""Attention over chosen blocks of keys (Qwen4-Exp's QSA), with the indexer that chooses them.

The indexer has no gradient: choices are not differentiable, and transformers has no loss for it. So it stays as it is
in the files, and its parameters are declared as never trained; a zero gradient would let weight decay shrink them.

Shapes: T tokens of this cp rank, S tokens of the stream, B blocks; h heads of the indexer, d their dims.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .. import ops
from ..errors import ConfigError
from ..sharding import NEVER, SPARSE, Init, Join, Swap, weight
from .decoder import Rope, Shape
from .hf_config import Json, divides, refuse, take
from .qwen3 import Attention, Heads


@dataclass(frozen=True)
class IndexShape:
    """The shape of an indexer, and how much its queries may see."""

    heads: int
    dim: int
    size: int  # tokens of a block
    num: int  # blocks that a query may choose
    sections: tuple[int, int, int] | None  # of M-RoPE, for streams with images


def index_of(config: Json, rotary: ops.Rotary, sections: tuple[int, int, int] | None) -> IndexShape:
    """Read the shape of the indexer."""
    refuse(config, {"indexer_kv_heads": (1,)})
    dim, size = take(config, "indexer_head_dim", int), take(config, "indexer_compress_ratio", int)
    if rotary.dim > dim:
        raise ConfigError(f"config.json: indexer_head_dim={dim} has fewer dims than the {rotary.dim} that RoPE rotates")
    num = divides("indexer_compress_ratio", size, "indexer_budget", take(config, "indexer_budget", int))
    return IndexShape(take(config, "indexer_n_heads", int), dim, size, num, sections)


class Indexer(nn.Module):
    """Scores blocks of keys for each query, and chooses the best. Each rank of tp does the same work."""

    def __init__(self, shape: Shape, index: IndexShape, swap: Swap, at: str) -> None:
        super().__init__()
        self.index, self.eps, self.rotary = index, shape.eps, shape.rotary
        rows, init = {"index": (index.heads + 1) * index.dim}, Init("normal", shape.std)
        self.qk = weight(rows, {"embed": shape.width}, key=at + "index_qk_proj.weight", init=init, trains=NEVER)
        self.q_norm, self.k_norm = (
            weight(
                {"index_dim": index.dim}, key=f"{at}{x}_layernorm.weight", decay=False, init=Init("zeros"), trains=NEVER
            )
            for x in "qk"
        )
        # Raw keys of all parts of the stream: all ranks then pool the same blocks, wherever parts begin.
        self.all_k = Join(swap, index.dim, serves=swap.heads.size, has_gradient=False)

    @torch.no_grad()
    def forward(self, x_TD: Tensor, rope: Rope, docs: ops.Documents) -> ops.Choice | None:
        """Return what each query of this part sees; None where that is every token before it."""
        index, first = self.index, self.all_k.part * len(x_TD)
        qk_TC = ops.linear(x_TD, self.qk)
        q_Thd = qk_TC[:, : index.heads * index.dim].unflatten(1, (index.heads, index.dim))
        k_Sd = self.all_k(qk_TC[:, index.heads * index.dim :])
        if max(docs.lengths) // index.size <= index.num:
            return None
        q_Thd = ops.rotate(ops.rms_norm(q_Thd, self.q_norm, self.eps, zero_centred=True), *rope)
        blocks = ops.blocks_of(docs.positions_T, index.size)
        keys_Bd = self.keys(k_Sd, blocks, docs)
        chosen_Tb = ops.replayed(lambda: ops.choose_blocks(q_Thd, keys_Bd, blocks, first, index.num).int())
        return ops.Choice(chosen_Tb, blocks, docs.positions_T, docs.bounds, first)

    def keys(self, k_Sd: Tensor, blocks: ops.TokenBlocks, docs: ops.Documents) -> Tensor:
        """Return the key of each block: the mean of raw keys, normalised, rotated as the first token of the block."""
        keys_Bd = ops.rms_norm(ops.block_keys(k_Sd, blocks), self.k_norm, self.eps, zero_centred=True)
        turns = docs.positions_T if docs.turns_T3 is None else docs.turns_T3
        first_B = (blocks.last_B - (blocks.size - 1)).clamp(min=0)
        rope = ops.rope_tables(turns[first_B], self.rotary, ops.upcast(k_Sd[:0]).dtype, self.index.sections)
        return ops.rotate(keys_Bd[:, None], *rope)[:, 0]


class SparseAttention(Attention):
    """Attention in which each query sees the blocks that the indexer chose for it, and the tokens after the last block.

    Under cp keys and values are gathered and queries stay: beyond the budget the work of a query does not grow with
    its position, so equal parts of the stream are balanced.
    """

    mixer = SPARSE

    def __init__(self, shape: Shape, heads: Heads, index: IndexShape, at: str) -> None:
        super().__init__(shape, heads, at)
        self.indexer = Indexer(shape, index, self.swap, at + "indexer.")

    def forward(self, x_TD: Tensor, rope: Rope, docs: ops.Documents) -> Tensor:
        x_TD = self.enter(x_TD)
        q_THK, k_SGK, v_SGK, gate = self.project(x_TD, rope)
        return self.output(self.attend(x_TD, rope, docs, (q_THK, k_SGK, v_SGK)), gate)

    @ops.uncompiled  # which way it goes, and which keys are read, depends on the lengths of documents
    def attend(self, x_TD: Tensor, rope: Rope, docs: ops.Documents, qkv: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Let the queries see what the indexer chooses for them."""
        choice = self.indexer(x_TD, rope, docs)
        if choice is None:
            return ops.attention(*qkv, docs, self.swap.group * len(qkv[0]))
        return ops.block_attention(*qkv, choice)
