"""Check what a blueprint trains, in which dtype and coding it stores parameters, and what it says of those left out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from meshwright.axes import Axes
from meshwright.blueprint import Blueprint
from meshwright.errors import MissingKey
from meshwright.ops.codings import FP8, NF4, Coding
from meshwright.recipe import Lora, Recipe
from meshwright.weights import Entry, KeyMap, Source
from meshwright.weights.file_version import Stamp
from tests import tiny

BF16, F32 = torch.bfloat16, torch.float32
TABLE = "layers.1.grams.table"
WIDE = dict(hidden_size=64, intermediate_size=96, head_dim=32, dtype="bfloat16")  # down has no whole blocks of 64
DOWN, Q = "layers.0.mlp.down.weight", "layers.0.mixer.q.weight"


def blueprint(family: str, fields: Any = None, **options: Any) -> Blueprint:
    return Blueprint.of({**tiny.ODD[family], **(fields or {})}, None, Recipe(**options))


@pytest.mark.parametrize(
    ("train", "table", "index"), [("**", BF16, BF16), ([TABLE], F32, BF16), (["**", TABLE], F32, BF16)]
)
def test_a_table_is_float32_where_it_is_trained(train: Any, table: torch.dtype, index: torch.dtype) -> None:
    """An indexer has no gradient. Both are drawn, and keep the dtype of their files."""
    made = blueprint("qwen4_exp", dict(dtype="bfloat16"), train=train)
    stored = made.stored_dtypes(BF16, {*made.trained()})
    assert stored[TABLE] == table
    assert {dtype for name, dtype in stored.items() if "index" in name} == {index}


@pytest.mark.parametrize(("options", "named"), [({}, True), (dict(lora=Lora()), False), (dict(train=[TABLE]), False)])
def test_a_frozen_table_is_reported_where_train_could_name_it(options: dict[str, Any], named: bool) -> None:
    made = blueprint("qwen4_exp", **options)
    said = made.left_out({*made.trained()})
    assert (f"{TABLE} (" in said) is named
    assert "has no gradient and stays as it is (3 such parameters)" in said
    assert blueprint("qwen3").left_out([]) == ""


@pytest.mark.parametrize(("family", "vocabulary"), [("qwen3", "head.weight"), ("qwen3_tied", "embed.weight")])
def test_a_frozen_vocabulary_is_wide_while_something_is_trained(family: str, vocabulary: str) -> None:
    made = blueprint(family, dict(dtype="bfloat16"), lora=Lora(targets="q_proj"))
    trained = {*made.trained()}
    assert {name for name, dtype in made.stored_dtypes(BF16, trained).items() if dtype == F32} == {*trained, vocabulary}
    assert {*made.stored_dtypes(BF16, set()).values()} == {BF16, F32}  # adapters are in no other dtype
    assert made.stored_dtypes(BF16, set())[vocabulary] == BF16


@pytest.mark.parametrize(
    ("codings", "trained", "wide"),
    [({Q: NF4}, "", True), ({Q: FP8}, "", False), ({}, "", False), ({Q: NF4}, DOWN, False)],
)
def test_frozen_matrices_are_wide_next_to_others_in_4_bits(
    codings: dict[str, Coding], trained: str, wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = blueprint("qwen3", WIDE, lora=Lora())
    monkeypatch.setattr(Blueprint, "codings", lambda *_: codings)
    left = made.left_wide([trained], Axes())
    assert Q not in left
    assert (DOWN in left) is wide
    assert not any("norm" in name for name in left)


def test_columns_in_whole_blocks_are_quantised() -> None:
    made = blueprint("qwen3", WIDE, lora=Lora(), frozen="nf4")
    assert made.codings({*made.trained()}, Axes()).keys() >= {Q}
    assert DOWN in made.left_wide({*made.trained()}, Axes())


@pytest.mark.parametrize("new", [False, True])
@pytest.mark.parametrize("lora", [None, Lora()])
def test_a_trained_mtp_head_has_parts_without_a_gradient(lora: Lora | None, new: bool) -> None:
    made = blueprint("qwen4_exp", dict(mtp_num_hidden_layers=1), mtp="head", lora=lora)
    if not new:
        made = replace(made, keymap=replace(made.keymap, source=cast(Any, "files that have it")))
    head = {param.name for param in made.table if param.name.startswith("head.mtp.") and not param.adapter}
    index = {name for name in head if "index" in name}
    assert index
    assert head & {*made.trained()} == head - index


@pytest.mark.parametrize("there", ["none", "all", "half"])
def test_a_head_is_new_if_the_source_has_nothing_of_it(there: str) -> None:
    """Half of a matrix would be drawn anew, and nothing would say so."""
    fields = dict(mtp_num_hidden_layers=1)
    table = blueprint("qwen3_5", fields, mtp="head").table
    made = {param.name: param.layouts[0].keys for param in table if there != "none" or not param.optional}
    shapes = {key: shape for keys in made.values() for key, shape in keys.items()}
    if there == "half":
        del shapes["mtp.layers.0.mlp.up_proj.weight"]
    entries = {key: Entry(key, "f", "BF16", shape, 0, 1) for key, shape in shapes.items()}
    source = Source(Path(), entries, stamps={"f": Stamp(1, 2, 3)})
    if there == "half":
        with pytest.raises(MissingKey, match=r"has no mtp\.layers\.0\.mlp\.up_proj\.weight, which head\.mtp\."):
            Blueprint.of({**tiny.ODD["qwen3_5"], **fields}, source, Recipe(mtp="head"))
        return
    fresh = Blueprint.of({**tiny.ODD["qwen3_5"], **fields}, source, Recipe(mtp="head")).keymap.fresh
    assert fresh == ({param.name for param in table if param.optional} if there == "none" else set())
    assert bool(fresh) is (there == "none")


def test_codes_of_files_that_tp_cuts_within_a_block_are_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank of tp=2 has 96 of 192 columns. FP8 may be cut anywhere, and trained matrices are no codes."""
    made = blueprint("qwen3", {**WIDE, "intermediate_size": 192}, lora=Lora())
    coding = {Q: NF4, DOWN: NF4, "layers.1.mlp.down.weight": FP8}
    monkeypatch.setattr(KeyMap, "coding", lambda _, param: coding.get(param.name))
    assert made.codings((), Axes()) == coding
    assert made.codings((), Axes(tp=2)) == {Q: NF4, "layers.1.mlp.down.weight": FP8}
    assert made.codings([Q], Axes(tp=2)) == {"layers.1.mlp.down.weight": FP8}
    monkeypatch.setitem(coding, DOWN, FP8)
    assert made.codings((), Axes(tp=2)) == coding
