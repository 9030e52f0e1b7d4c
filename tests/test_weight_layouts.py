"""Layouts and formats in which files hold a model: which matrices stay in codes, and what is read and compared."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from meshwright.errors import LoadError
from meshwright.ops.codings import FP8
from meshwright.recipe import Lora
from meshwright.sharding import Block, Box, Layout, Param, Table
from meshwright.weights import directory, open_source, peft_files
from meshwright.weights.checksums import Extents
from meshwright.weights.keymap import Key, KeyMap
from meshwright.weights.quant_formats import BLOCK, Scale
from meshwright.weights.safetensors_header import read_header
from meshwright.weights.source import Source


def block(key: str, first: int = 0, shape: tuple[int, ...] = (2, 3), turned: bool = False) -> Block:
    """Return the block of rows `first` to `first + 2` of a parameter with 3 columns."""
    return Block(Box((first, 0), (first + 2, 3)), key, shape, Box.whole(shape), turned)


@pytest.mark.parametrize(
    ("blocks", "scaled", "low", "stays"),
    [
        ([block("a"), block("b", 2)], "ab", True, True), ([block("a"), block("b", 2)], "a", True, False),
        ([block("a"), block("b", 2)], "aB", True, False), ([block("a"), block("b", 2)], "ab", False, False),
        ([block("a", shape=(3, 2), turned=True)], "a", True, False),
        ([block("a", shape=(1, 6))], "a", True, False), ([block("a")], "", True, False),
    ],
)  # fmt: skip
def test_matrices_stay_in_codes_if_all_their_rows_are(blocks: Any, scaled: str, low: bool, stays: bool) -> None:
    """Large letters are keys in another format."""
    made = Param({"row": 2 * len(blocks)}, {"col": 3}, (Layout("", tuple(blocks)),), low=low, name="w")
    scales = {key.lower(): Scale(f"{key}_scale", BLOCK, "MXFP4" * key.isupper()) for key in scaled}
    source = Source(Path(), {}, scales=scales)
    assert KeyMap({}, {}, source=source).coding(made) is (FP8 if stays else None)
    assert KeyMap({}, {}).coding(made) is None


SHAPES = {
    "l.attn.q": (128, 128), "l.attn.k": (64, 128), "l.mlp.up": (128, 256), "l.mlp.down": (256, 128),
    "l.moe.up": (128, 128), "l.moe.down": (128, 128), "l.norm": (128, 128),
}  # fmt: skip


def test_modules_are_quantised_as_a_whole_or_not_at_all() -> None:
    """The rows of k do not fill a block, moe.up is left out, and no matmul uses the norm."""
    params = {}
    for name, shape in SHAPES.items():
        whole = Box.whole(shape)
        layout = Layout("", (Block(whole, f"{name}.weight", shape, whole),))
        params[name] = Param({"row": shape[0]}, {"col": shape[1]}, (layout,), low=name != "l.norm", name=name)
    keys = {f"{name}.weight": Key(f"{name}.weight", "BF16", shape, "f") for name, shape in SHAPES.items()}
    made = KeyMap({}, keys).in_fp8(Table(params), left_out=["l.moe.up"])
    quantised = {name: key for name, key in made.keys.items() if key.dtype != "BF16"}
    assert [(name, key.dtype, key.shape, key.file) for name, key in quantised.items()] == [
        ("l.mlp.up.weight", "F8_E4M3", (128, 256), "f"), ("l.mlp.up.weight_scale_inv", "F32", (1, 2), "f"),
        ("l.mlp.down.weight", "F8_E4M3", (256, 128), "f"), ("l.mlp.down.weight_scale_inv", "F32", (2, 1), "f"),
    ]  # fmt: skip
    assert [*made.scales] == ["l.mlp.up.weight", "l.mlp.down.weight"]
    plain = [name for name in SHAPES if ".mlp." not in name]
    assert made.quantization["modules_to_not_convert"] == ["lm_head", *plain]


def test_files_that_an_export_copies_from_must_be_unchanged() -> None:
    """They hold carried keys, and all companions of matrices that stay quantised."""
    files = dict(w="1", w_scale="2", w_packed="3", w_divisor="4", v="5", v_scale="6", mtp="7", other="8")
    entries: Any = {key: SimpleNamespace(file=file) for key, file in files.items()}
    scales = {"w": Scale("w_scale", BLOCK, packed="w_packed", divisor="w_divisor"), "v": Scale("v_scale", BLOCK)}
    seen = list[list[str]]()
    source: Any = SimpleNamespace(entries=entries, scales=scales, check_unchanged=lambda each, _: seen.append(each))
    kept = KeyMap({}, {}, carried=frozenset({"mtp"}), source=source, scales={"w": scales["w"]})
    directory._check_carried(kept)
    directory._check_carried(replace(kept, scales={}))
    directory._check_carried(KeyMap({}, {}))
    assert seen == [["1", "2", "3", "4", "7"], ["7"]]


def test_verified_bytes_are_cut_to_the_tensor(tmp_path: Path) -> None:
    """An extent may begin before the tensor and end behind it."""
    save_file({name: torch.arange(at, at + 5, dtype=torch.uint8) for at, name in enumerate("abc")}, tmp_path / "f")
    (tmp_path / "f").rename(tmp_path / "model.safetensors")
    source, extents = open_source(tmp_path), Extents()
    data, start = (tmp_path / "model.safetensors").read_bytes(), source.entries["a"].start
    for lo, hi in ((0, start), (start, start + 7), (start + 7, start + 15)):
        extents.add("model.safetensors", lo, data[lo:hi])
    checked = replace(source, extents=extents.sorted())
    assert {name: [*directory.raw_bytes(checked, name)] for name in "abc"} == {
        "a": [b"\0\1\2\3\4"], "b": [b"\1\2", b"\3\4\5"], "c": [b"\2\3\4\5\6"]
    }  # fmt: skip


def test_empty_tensors_may_begin_where_others_do(tmp_path: Path) -> None:
    fields = {"full": [0, 2], "empty": [0, 0], "last": [2, 2]}
    header = {name: {"dtype": "U8", "shape": [b - a], "data_offsets": [a, b]} for name, (a, b) in fields.items()}
    text = json.dumps(header).encode()
    (tmp_path / "f").write_bytes(struct.pack("<Q", len(text)) + text + b"xy")
    assert [entry.key for entry in read_header(tmp_path / "f")[0]] == ["empty", "full", "last"]


def gate_and_up() -> peft_files.Pair:
    """Return the factors of two experts: rank 1, 3 inputs, and 2 outputs of gate and of up."""
    a = Param({"expert": 2, "rank": 1}, {"col": 3}, (), name="a")
    return peft_files.Pair("m.experts.gate_up_proj", a, Param({"expert": 2, "out": 4}, {"rank": 1}, (), name="b"))


def test_experts_of_an_adapter_are_read_one_by_one() -> None:
    files: Any = SimpleNamespace(directory=Path("DIR"))
    tensors: dict[str, Tensor] = {}
    for expert in range(2):
        for at, name in enumerate(("gate_proj", "up_proj")):
            key = f"m.experts.{expert}.{name}.lora_"
            tensors[f"{key}A.weight"] = torch.tensor([[1.0, 2.0, 3.0]]) + expert
            tensors[f"{key}B.weight"] = torch.tensor([[5.0], [6.0]]) + 10 * expert + 100 * at

    def take(key: str, shape: Any) -> Tensor:
        assert tensors[key].shape == tuple(shape)
        return tensors[key]

    a, b = peft_files._read_each(files, gate_and_up(), "m.experts", take)
    assert a.tolist() == [[[1, 2, 3]], [[2, 3, 4]]]
    assert b.flatten(1).tolist() == [[5, 6, 105, 106], [15, 16, 115, 116]]
    tensors["m.experts.1.up_proj.lora_A.weight"] = torch.tensor([[2.0, 3.0, 4.5]])
    with pytest.raises(LoadError, match=r"m.experts.1.gate_proj and m.experts.1.up_proj have different A.* rank 2"):
        peft_files._read_each(files, gate_and_up(), "m.experts", take)


@pytest.mark.parametrize(("saved", "task"), [((), "CAUSAL_LM"), (("score",), None)])
def test_an_adapter_with_a_trained_head_has_no_task(saved: tuple[str, ...], task: str | None) -> None:
    config = peft_files.config_of(Lora(rank=3), [], "fused", "BASE", saved=saved)
    assert (config["task_type"], config["modules_to_save"], config["r"]) == (task, [*saved] or None, 3)
