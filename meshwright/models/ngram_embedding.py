"""Embeddings of hashed n-grams, added to the residual streams of a layer (Qwen4-Exp's PLE; Engram, arXiv 2601.07372).

The rows of the table are spread over the ranks of a pipeline stage (`sharding.Lookup`). Its gradient and optimizer
state would be as large as those of the rest of the model, so it is trained only where `train` names it.

Shapes: T own tokens, n residual streams, D width of one, C = n D, h hashed heads, E width of their rows together.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .. import ops
from ..errors import ConfigError
from ..sharding import IF_NAMED, OWN, SHARE, Block, Box, Constants, Door, Halo, Init, Layout, Lookup, weight
from .decoder import Shape
from .hf_config import Json, divides, take
from .linear import Linear


def hash_of(config: Json, vocab: int, number: int) -> ops.NgramHash:
    """Read the hash of table `number`, from 0."""
    end = config.get("eos_token_id")
    end = end[0] if isinstance(end, list) and end else end
    if type(end) is not int or not 0 <= end < vocab:
        raise ConfigError(f"config.json: eos_token_id={end!r:.200}; n-grams end at it, so it must be a token")
    if take(config, "ngram_size", int, 3) < 2:
        raise ConfigError("config.json: ngram_size=1; n-grams have at least 2 tokens")
    return ops.NgramHash(
        vocab, take(config, "ngram_size", int, 3), take(config, "heads_per_ngram", int, 8),
        take(config, "ngram_vocab_size_base", int, 20_000_000),
        take(config, "make_ngram_vocab_size_divisible_by", int, 128), take(config, "seed", int, 1234), end, number,
    )  # fmt: skip


class KeyLinear(Linear):
    """Keys of n-grams. Rounding dominates their gradients, which pass the gate's root: its slope reaches 500 near 0."""

    steep = True


class NgramEmbedding(nn.Module):
    """Rows of bigrams, trigrams, ..., gated by the residual streams, and a causal convolution of them.

    Token ids of the whole stream are on every rank, so each hashes for itself, and nothing is sent but rows and the
    halo of the convolution.
    """

    def __init__(self, shape: Shape, config: Json, number: int, at: str) -> None:
        super().__init__()
        self.hash, self.streams, self.eps = hash_of(config, shape.vocab, number), shape.streams, shape.eps
        heads, E = len(self.hash.rows_of_heads), take(config, "ple_embed_dim", int, shape.width)
        wide, width = {"stream": shape.streams, "embed": shape.width}, divides("heads", heads, "ple_embed_dim", E)
        key, parts = at + "ple_embedding.", take(config, "split_ngram_parts", int, 512)
        rows, layout = {"gram": self.hash.num_rows}, _in_parts(key, self.hash.num_rows, width, parts)
        init = Init("normal", shape.std)
        self.table = weight(
            rows, {"code": width}, layouts=[layout], init=init, by_rows=True, trains=IF_NAMED, steep=True
        )
        self.key = KeyLinear(wide, {"grams": E}, shape.std, key=at + "key_proj")
        self.value = Linear({"embed": shape.width}, {"grams": E}, shape.std, key=at + "value_proj")
        self.norm_key, self.norm_query, self.norm_conv = (
            weight(wide, key=f"{at}norm_{name}.weight", decay=False, init=Init("zeros"), steep=name != "conv")
            for name in ("key", "query", "conv")
        )
        taps = take(config, "ple_conv_kernel_size", int, 4)
        self.conv = weight(wide, {"tap": taps}, layouts=[_channels(at, wide, taps)], init=Init("zeros"))
        self.share, self.own, self.look_up = Door(SHARE, 0), Door(OWN, 0), Lookup(heads, width)
        self.halo = Halo(shape.stream_width, (taps - 1) * self.hash.size)
        # The hash of files must be that of the config: another vocabulary size or seed reads other rows.
        hashed = {"layer_multipliers": self.hash.multipliers, "ngram_heads_vocab_sizes": self.hash.rows_of_heads,
                  "ngram_heads_offsets": self.hash.offsets}  # fmt: skip
        self.constants = Constants({key + name: tuple(values) for name, values in hashed.items()})

    def rows(self, docs: ops.Documents, dtype: torch.dtype) -> Tensor:
        """Look up the rows of own tokens. -> e_TE"""
        assert docs.tokens_T is not None, "the decoder adds them"
        row_Sh = ops.ngram_rows(docs.tokens_T, docs.positions_T, self.hash)
        row_Th = self.own(self.share(row_Sh))
        return self.look_up(self.table, row_Th.flatten(), dtype).view(len(row_Th), -1)

    def forward(self, x_TC: Tensor, e_TE: Tensor, docs: ops.Documents) -> Tensor:
        n, eps = self.streams, self.eps
        key_TC = ops.grouped_rms_norm(self.key(e_TE), self.norm_key, n, eps)
        query_TC = ops.grouped_rms_norm(x_TC, self.norm_query, n, eps)
        agreement_Tn = (ops.upcast(key_TC) * ops.upcast(query_TC)).unflatten(1, (n, -1)).sum(-1)
        g_Tn = agreement_Tn / math.sqrt(x_TC.shape[1] // n)
        gate_Tn = (g_Tn.abs().clamp_min(1e-6).sqrt() * g_Tn.sign()).sigmoid().to(x_TC.dtype)
        a_TC = (gate_Tn[:, :, None] * self.value(e_TE)[:, None]).flatten(1)
        normed_TC = ops.grouped_rms_norm(a_TC, self.norm_conv, n, eps)
        return a_TC + ops.causal_conv(normed_TC, self.conv, docs, self.halo, self.hash.size)


def _in_parts(key: str, rows: int, width: int, parts: int) -> Layout:
    """Return the layout of a table that files keep in equal parts of its rows."""
    num, whole = divides("split_ngram_parts", parts, "the rows of the n-gram table", rows), Box.whole
    blocks = [
        Block(Box((i * num, 0), ((i + 1) * num, width)), f"{key}ngram_embedding.shard_{i}.weight", (num, width),
              whole((num, width)))
        for i in range(parts)
    ]  # fmt: skip
    return Layout("parts", tuple(blocks))


def _channels(at: str, wide: dict[str, int], taps: int) -> Layout:
    """Return the layout of a depthwise convolution in files: `[channels, 1, taps]`."""
    ours, source = (*wide.values(), taps), (math.prod(wide.values()), 1, taps)
    return Layout("channels", (Block(Box.whole(ours), at + "conv1d.weight", source, Box.whole(source)),))
