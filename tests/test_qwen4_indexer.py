"""The indexer of Qwen4-Exp: never trained, its choices replayed in recomputed layers; and configs that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import meshwright as mw
from meshwright import ops
from meshwright.models import describe
from tests import parts, tiny, worlds
from tests.plants import Patch, Plant, planted
from tests.words import words

TABLE = "layers.1.grams.table"
LINEAR, FULL = "linear_attention", "full_attention"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.directory(tmp_path_factory.mktemp("m") / "m", "qwen4_exp", dtype=torch.bfloat16)


def unmoved(source: Path, train: str) -> tuple[set[str], set[str], set[str]]:
    """Return the parameters that three steps with a large weight decay left as they were, those that the model says it
    trains, and those with optimizer state."""
    model = mw.load(source, dtype=torch.float32, train=train)
    before = {name: tensor.clone() for name, tensor in model.stored().items()}
    engine = mw.Engine(model, lr=0.05, optimizer=mw.AdamW(weight_decay=0.5))
    for step in range(3):
        engine.step(tiny.batches(step))
    same = {name for name, tensor in model.stored().items() if torch.equal(tensor, before[name])}
    return same, {*model.trainable}, {*engine.optimizer.state}


@pytest.mark.parametrize("train", ["**", "*"])
def test_the_indexer_stays_as_it_is_in_the_files(source: Path, train: str) -> None:
    """A gradient of zeros would let weight decay shrink it. A table that is not named stays as well."""
    [(same, trained, with_state)] = worlds.run(1, unmoved, source, train)
    indexer = {f"layers.2.mixer.indexer.{name}" for name in ("qk", "q_norm", "k_norm")}
    assert same == (indexer if train == "*" else indexer | {TABLE})
    assert not same & trained
    assert with_state == trained


@worlds.world(1)
def test_an_indexer_that_is_named_is_refused(source: Path) -> None:
    with pytest.raises(mw.ConfigError, match=words("train", r"indexer\.\*", "has no gradient")):
        mw.load(source, mw.Mesh(device="cpu"), train="layers.2.mixer.indexer.*")


def other_blocks_the_second_time(patch: Patch) -> None:
    """Let every second choice of blocks be another one, as a kernel without a fixed order makes it."""
    real, calls = ops.choose_blocks, list[int]()

    def choose(q: Tensor, keys: Tensor, blocks: Any, first: int, num: int) -> Tensor:
        calls.append(1)
        sign = 1 if len(calls) % 2 else -1
        return real(sign * q, keys, blocks, first, num)

    patch.setattr(ops, "choose_blocks", choose)


def chosen_again(patch: Patch) -> None:
    other_blocks_the_second_time(patch)
    patch.setattr(ops, "replayed", lambda make: make())


def gradients(source: Path, recompute: str, plant: Plant | None) -> dict[str, Tensor]:
    with planted(plant):
        model = mw.load(source, dtype=torch.float64, memory=mw.MemoryOptions(recompute=recompute))
        mw.Engine(model, lr=1e-3).backward(tiny.batches(0)[:1])
        return mw.gather(model, "grad")


@pytest.mark.parametrize("recompute", parts.every(2, ["full", "selective"]))
def test_recomputed_layers_take_the_blocks_of_forward(source: Path, recompute: str) -> None:
    """Weights of one choice would meet gradients of another: finite, and wrong."""
    cases: dict[str, tuple[str, Plant | None]] = {
        "plain": ("none", None),
        "replayed": (recompute, other_blocks_the_second_time),
        "chosen again": (recompute, chosen_again),
    }
    [result] = worlds.run(1, lambda: {name: gradients(source, *case) for name, case in cases.items()})
    plain, replayed, again = (result[name] for name in cases)
    assert all((plain[key] - replayed[key]).abs().max() <= 1e-12 for key in plain)
    assert max((plain[key] - again[key]).norm() / plain[key].norm() for key in plain if "layers.2." in key) > 1e-3


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "one stream": (dict(hc_count=1), words(r"\bhc_count=1\b", "at least 2")),
    "two index keys": (dict(indexer_kv_heads=2), words(r"\bindexer_kv_heads=2\b")),
    "a part of a block": (dict(indexer_budget=7), words(r"\bindexer_compress_ratio=2\b", r"\bindexer_budget=7\b")),
    "no budget": (dict(indexer_budget=None), words(r"'indexer_budget'")),
    "no heads of the index": (dict(indexer_n_heads=None), words(r"'indexer_n_heads'")),
    "a narrow index": (dict(indexer_head_dim=6), words(r"\bindexer_head_dim=6\b", r"\b8\b")),
    "a table at attention": (dict(ple_layer_ids=[3]), words(r"\bple_layer_ids=\[3\]")),
    "a table counted from 0": (dict(ple_layer_ids=[0]), words(r"\bple_layer_ids=\[0\]", "from 1")),
    "a table behind the last layer": (dict(ple_layer_ids=[5]), words(r"\bple_layer_ids=\[5\]")),
    "a table twice": (dict(ple_layer_ids=[2, 2]), words(r"\bple_layer_ids=\[2, 2\]", "different")),
    "no list of tables": (dict(ple_layer_ids=2), words(r"\bple_layer_ids=2\b")),
    "uneven parts": (dict(split_ngram_parts=5), words(r"\bsplit_ngram_parts=5\b", r"\b252\b")),
    "the default of parts": (dict(split_ngram_parts=None), words(r"\bsplit_ngram_parts=512\b")),
    "no end": (dict(eos_token_id=None), words(r"\beos_token_id=None\b")),
    "an empty list of ends": (dict(eos_token_id=[]), words(r"\beos_token_id=\[\]")),
    "an end that is no token": (dict(eos_token_id="</s>"), words(r"\beos_token_id='</s>'")),
    "another gate": (dict(output_gate_type="tanh"), words(r"\boutput_gate_type='tanh'")),
    "a width that heads do not divide": (dict(ple_embed_dim=26), words(r"\bheads=4\b", r"\bple_embed_dim=26\b")),
    "another kind of layer": (dict(layer_types=[LINEAR, LINEAR, "sliding_attention", LINEAR]), words("layer_types")),
    "too few kinds": (dict(layer_types=[LINEAR, LINEAR, FULL]), words("layer_types", r"\b4\b")),
    "another activation": (dict(hidden_act="gelu"), words(r"\bhidden_act='gelu'")),
    "biases": (dict(attention_bias=True), words(r"\battention_bias=True\b")),
    "dropout": (dict(attention_dropout=0.1), words(r"\battention_dropout=0\.1\b")),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    changes, pattern = REFUSED[name]
    with pytest.raises(mw.ConfigError, match=words(r"config\.json") + pattern):
        describe(tiny.of("qwen4_exp", **changes), "model.")


def test_both_names_of_its_attention_are_accepted() -> None:
    kinds = [LINEAR, LINEAR, "indexed_attention", LINEAR]
    names = [{*describe(tiny.of("qwen4_exp", layer_types=kinds), "model.")[1].params} for kinds in (kinds, None)]
    assert any("layers.2.mixer.indexer" in name for name in names[0])
    assert any("layers.3.mixer.indexer" in name for name in names[1]), "every fourth layer"
