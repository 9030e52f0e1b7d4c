"""Compare Qwen4-Exp with transformers in float32: streams, n-grams and chosen blocks, each field away from its default.

transformers runs documents one at a time: packed, it lets n-grams and the convolution cross them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import meshwright as mw
from meshwright.models import ngram_embedding, qwen3_5, sparse_attention
from meshwright.ops import chosen_blocks
from tests import parts, tiny, worlds
from tests.plants import Patch, Plant, around, planted
from tests.test_transformers import DOCUMENTS, Documents, compare, reference_outputs

# Texts end inside of documents and at both of their ends, and one ends twice in a row.
ENDS: Documents = [*DOCUMENTS, [7, 5, 5, 7], [100, 130, 7, 7, 8, 9, 10, 7, 11], [5, 9, 5, 6, 9, 9, 5, 6, 7, 5, 6]]
WHOLE = dict(rope_type="default", rope_theta=10000.0)  # no share of the dims, no sections
FOUR = dict(ngram_size=4, heads_per_ngram=1, ple_embed_dim=9, seed=99)
# Near 0 the gate's root is as steep as 500, and transformers' float32 may be 3e-5 from its float64: not so with this.
CALM = dict(rms_norm_eps=1e-3)
FIELDS: dict[str, dict[str, Any]] = {
    "two values a key": dict(linear_num_value_heads=8),
    "two streams": dict(hc_count=2, hc_lowrank=5, rms_norm_eps=1e-2, num_key_value_heads=1),
    "one expert": dict(output_gate_type=None, norm_topk_prob=False, num_experts_per_tok=1, **CALM),
    "two tables": dict(**FOUR, **CALM, ple_layer_ids=[4, 1], ple_conv_kernel_size=3),
    "blocks of three": dict(indexer_budget=9, indexer_compress_ratio=3, indexer_n_heads=1, indexer_head_dim=8),
    "several ends": dict(eos_token_id=[7, 9], tie_word_embeddings=True),
    "no table": dict(ple_layer_ids=None, eos_token_id=None, layer_types=None),
    "all dims rotate": dict(rope_parameters=WHOLE, indexer_head_dim=16, linear_num_value_heads=4),
    "four streams": dict(hc_count=4, output_gate_type="silu", ple_conv_kernel_size=2, ple_embed_dim=4),
}  # fmt: skip


@pytest.mark.parametrize("changes", parts.every(3, FIELDS), ids=str)
def test_logits_and_gradients(tmp_path: Path, changes: str) -> None:
    compare(tmp_path, "qwen4_exp", FIELDS[changes], ENDS)


def _scores(source: Path, plants: dict[str, Plant | None]) -> dict[str, Tensor]:
    """Return the logits of our model, with each of several bugs in turn."""
    out, batch = {}, mw.pack(ENDS)
    for name, plant in plants.items():
        with planted(plant):
            out[name] = mw.logits(mw.load(source, dtype=torch.float32), batch)
    return out


def turned_by_the_last_token(patch: Patch) -> None:
    """Rotate the key of a block as its last token."""
    real, tables = sparse_attention.Indexer.keys, sparse_attention.ops.rope_tables

    def keys(self: Any, *args: Any) -> Tensor:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(
                sparse_attention.ops, "rope_tables", lambda at_B, *more: tables(at_B + self.index.size - 1, *more)
            )
            return real(self, *args)

    patch.setattr(sparse_attention.Indexer, "keys", keys)


@around(chosen_blocks.Choice, "visible_keys")
def own_token_forced_in(real: Any, choice: Any) -> Tensor:
    mask_TS: Tensor = real(choice).clone()
    own_T = torch.arange(len(mask_TS))
    mask_TS[own_T, choice.first + own_T] = True
    return mask_TS


@around(chosen_blocks, "_order")
def later_of_equals(real: Any, score_TB: Tensor) -> Tensor:
    return (score_TB.view(torch.int32).long() << 31) | torch.arange(score_TB.shape[-1])


@around(ngram_embedding.ops, "read_streams")
def summed_streams(real: Any, x_TC: Tensor, mixer: Any, streams: int, eps: float) -> Any:
    mixed_TD, inject_Tn = real(x_TC, mixer, streams, eps)
    return mixed_TD * streams, inject_Tn


@around(ngram_embedding, "_in_parts")
def parts_by_name(real: Any, *args: Any) -> Any:
    """Take `shard_10` before `shard_2`: on export every part goes back to where it came from."""
    layout = real(*args)
    keys = sorted(block.key for block in layout.blocks)
    return replace(layout, blocks=tuple(b._replace(key=key) for b, key in zip(layout.blocks, keys, strict=True)))


PLANTS: dict[str, Plant | None] = {
    "nothing": None,
    "blocks turned by their last token": turned_by_the_last_token,
    "own token forced in": own_token_forced_in,
    "later of equal blocks": later_of_equals,
    "streams summed": summed_streams,
    "parts of a table by name": parts_by_name,
    "equal injections": around(ngram_embedding.ops, "write_streams")(
        lambda real, x_TC, out_TD, inject_Tn: real(x_TC, out_TD, torch.ones_like(inject_Tn))
    ),
    "another end of texts": around(ngram_embedding.ops, "ngram_rows")(
        lambda real, tokens_T, at_T, hash_: real(tokens_T, at_T, replace(hash_, end=9))
    ),
    "neighbours in the convolution": around(ngram_embedding.ops, "causal_conv")(
        lambda real, x, weight, docs, halo, step=1: real(x, weight, docs, halo, 1)
    ),
    "delta net's gate by silu": around(qwen3_5.ops, "gated_rms_norm")(
        lambda real, *args: real(*args[:4], "silu")
    ),
}  # fmt: skip


def test_what_only_another_implementation_sees(tmp_path: Path) -> None:
    """Each bug is the same on every mesh, so no oracle that compares our code with our code finds it."""
    source = tiny.directory(tmp_path / "m", "qwen4_exp")
    expected = worlds.run(1, reference_outputs, "qwen4_exp", {}, ENDS)[0][0]
    scale = expected.abs().max()
    errors = {
        name: float((logits - expected).abs().max() / scale)
        for name, logits in worlds.run(1, _scores, source, PLANTS)[0].items()
    }
    assert errors.pop("nothing") <= 1e-5
    assert {name for name, error in errors.items() if error < 1e-2} == set()
