"""Keys, layouts and files of weights: what is read and compared, which matrices stay in codes, what must fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file

from meshwright.axes import Axes
from meshwright.blueprint import Blueprint
from meshwright.errors import LoadError, MismatchedKey, MissingKey
from meshwright.ops.codings import FP8
from meshwright.recipe import Lora, Recipe
from meshwright.sharding import Block, Box, Layout, Param, Table
from meshwright.weights import directory, open_source, read_config
from meshwright.weights import keymap as keymap_module
from meshwright.weights.checksums import Extents
from meshwright.weights.keymap import ADAPTERS, Key, KeyMap, of_table
from meshwright.weights.quant_formats import BLOCK, Scale, also_plain
from meshwright.weights.read_plan import plan_reads
from meshwright.weights.reader import check_keys
from meshwright.weights.source import Source
from tests import tiny


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


def test_dtypes_of_new_weights() -> None:
    """Float32 parameters and adapters are F32 in any dtype; adapters have their own file."""
    table = Blueprint.of(tiny.of("qwen3_5_moe"), None, Recipe(lora=Lora(rank=2))).table
    keymap = of_table(table, torch.bfloat16)
    wide = {key for param in table if param.float32 or param.adapter for key in param.layouts[0].keys}
    adapters = {key for param in table if param.adapter for key in param.layouts[0].keys}
    assert adapters
    assert wide > adapters
    assert {name for name, key in keymap.keys.items() if key.dtype == "F32"} == wide
    assert {key.dtype for key in keymap.keys.values()} == {"F32", "BF16"}
    assert {name for name, key in keymap.keys.items() if key.file == ADAPTERS} == adapters


def test_only_named_parameters_are_read() -> None:
    spec = Blueprint.of(tiny.of("qwen3")).spec
    choice = of_table(spec.table, torch.float32).choice
    keymap: Any = SimpleNamespace(source=1, fresh={"head.weight"}, choice=choice, file_dtype=lambda _: torch.bfloat16)

    def reads(*named: Sequence[str]) -> list[tuple[str, tuple[int, ...]]]:
        return [(r.piece.param.name, r.ranks) for r in plan_reads(spec, Axes(tp=2), range(2), keymap, *named)]

    names = [param.name for param in spec.table if param.name != "head.weight"]
    assert list(dict.fromkeys(name for name, _ in reads())) == names
    norm = next(name for name in names if "norm" in name)
    assert reads([norm, "head.weight"]) == [(norm, (0, 1))]  # whole on both ranks of tp
    assert [ranks for _, ranks in reads(["layers.0.mlp.down.weight"])] == [(0,), (1,)]
    assert reads([]) == []


def test_headers_must_fit_the_model() -> None:
    table = Blueprint.of(tiny.of("qwen3")).table
    entries = {
        key: SimpleNamespace(file="f", shape=shape, dtype="BF16")
        for param in table for key, shape in param.layouts[0].keys.items()
    }  # fmt: skip
    key, *_ = (key for key in entries if key.endswith("q_proj.weight"))

    def check(fresh: Sequence[str] = (), stored: torch.dtype = torch.float32, scales: Any = (), **changes: Any) -> None:
        changed = {**entries, key: SimpleNamespace(**{**vars(entries[key]), **changes})}
        if changes.get("shape") == ():
            del changed[key]
        source: Any = SimpleNamespace(directory="DIR", entries=changed, scales=scales)
        check_keys(table, source, of_table(table, torch.float32).choice, fresh, stored)

    check()
    for dtype in ("F32", "F16", "BF16"):
        check(dtype=dtype)
    check(dtype="F64", stored=torch.float64)
    check(dtype="F8_E4M3", scales=[key])
    check(shape=(), fresh=[next(param.name for param in table if key in param.layouts[0].keys)])
    for error, message, changes in (
        (MismatchedKey, f"f: {key} is F64 and would be rounded to torch.float32", dict(dtype="F64")),
        (MismatchedKey, f"f: {key} is F8_E4M3; .* fetch the unquantised model", dict(dtype="F8_E4M3")),
        (MismatchedKey, rf"f: {key} is \(1, 2\), but .* needs \(", dict(shape=(1, 2))),
        (MissingKey, f"DIR has no {key}, which .* is read from; fetch the file that holds it", dict(shape=())),
    ):
        with pytest.raises(error, match=message):
            check(**cast(Any, changes))


@pytest.mark.parametrize(
    ("sizes", "numbers"),
    [
        ([], []), ([99], [0]), ([3, 3, 4], [0, 0, 0]), ([3, 3, 5], [0, 0, 1]), ([11, 1], [0, 1]), ([0, 11], [0, 0]),
        ([4, 7, 2, 2], [0, 1, 1, 2]), ([6, 4, 6, 4, 1], [0, 0, 1, 1, 2]),
    ],
)  # fmt: skip
def test_files_of_new_weights(sizes: list[int], numbers: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Files have at most 10 bytes here. A larger key has a file of its own, and none stays empty."""
    monkeypatch.setattr(keymap_module, "_MAX_FILE_BYTES", 10)
    files = keymap_module._assign_files({str(at): size for at, size in enumerate(sizes)})
    last = max(numbers, default=0)
    name = lambda n: f"model-{n + 1:05d}-of-{last + 1:05d}.safetensors" if last else "model.safetensors"  # noqa: E731
    assert list(files.values()) == [name(number) for number in numbers]


@pytest.mark.parametrize(
    ("before", "field", "after"),
    [
        (dict(quant_method="bitsandbytes"), "llm_int8_skip_modules", ["lm_head", "m"]),
        (dict(quant_method="bitsandbytes", llm_int8_skip_modules=None), "llm_int8_skip_modules", ["lm_head", "m"]),
        (dict(quant_method="bitsandbytes", llm_int8_skip_modules=["a"]), "llm_int8_skip_modules", ["a", "m"]),
        (dict(quant_method="compressed-tensors"), "ignore", ["m"]),
        (dict(quant_method="compressed-tensors", ignore=["a"]), "ignore", ["a", "m"]),
        (dict(quant_method="fp8"), "modules_to_not_convert", ["m"]),
        (dict(quant_method="fp8", modules_to_not_convert=None), "modules_to_not_convert", ["m"]),
        (dict(quant_method="fp8", ignored_layers=["a"]), "ignored_layers", ["a", "m"]),
    ],
)  # fmt: skip
def test_lists_of_modules_that_stay_unquantised(before: dict[str, Any], field: str, after: list[str]) -> None:
    assert also_plain(before, ["m"]) == {**before, field: after}
    assert also_plain(before, []) is before


def test_a_folder_of_checkpoints_is_not_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest one is suggested that has a config, in whatever order the system lists them."""
    glob = Path.glob
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter(sorted(glob(self, pattern), reverse=True)))
    with pytest.raises(LoadError, match=r"has no config\.json; give a Hugging Face model directory$"):
        read_config(tmp_path)
    for step in (3, 10, 2, 30):
        (tmp_path / f"step-{step:06d}").mkdir()
    for step in (3, 10, 2):
        (tmp_path / f"step-{step:06d}" / "config.json").write_text('{"a": 1}')
    with pytest.raises(LoadError, match=r"it holds checkpoints: give one of them, such as .*step-000010$"):
        read_config(tmp_path)
    assert read_config(tmp_path / "step-000010") == {"a": 1}
