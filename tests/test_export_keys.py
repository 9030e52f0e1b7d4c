"""Keys, dtypes, config and index of an export, and the bytes that are copied from its source."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from meshwright.axes import Axes
from meshwright.errors import ConfigError, ExportError, LoadError, MissingKey
from meshwright.ops.codings import FOUR_BITS, divisor_for_amax
from meshwright.sharding import Block, Box, Layout, Param, Rules, Table
from meshwright.weights import directory, keymap, reader, small_files
from meshwright.weights.checksums import Extents
from meshwright.weights.directory import Export, exported_config
from meshwright.weights.file_version import Opened
from meshwright.weights.hub import is_hub_id
from meshwright.weights.keymap import ADAPTERS, Key, KeyMap
from meshwright.weights.quant_formats import BLOCK, Scale
from meshwright.weights.small_files import SmallFiles
from meshwright.weights.source import INDEX, Source, index_files, open_source
from meshwright.weights.writer import Files, make_files

FP8_CONFIG = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}


def key(name: str, dtype: str = "BF16", file: str = "a.safetensors", shape: tuple[int, ...] = (2, 3)) -> Key:
    return Key(name, dtype, shape, file)


def key_map(*keys: Key, **fields: Any) -> KeyMap:
    return KeyMap({}, {each.name: each for each in keys}, **fields)


def source_of(*keys: Key, **fields: Any) -> Source:
    entries: Any = {
        each.name: SimpleNamespace(key=each.name, dtype=each.dtype, shape=each.shape, file=each.file) for each in keys
    }
    return Source(Path("DIR"), entries, **fields)


def param(name: str, shape: tuple[int, int] = (2, 3), adapter: bool = False) -> Param:
    box = Box.whole(shape)
    layout = Layout("", (Block(box, name, shape, box),))
    return Param({"row": shape[0]}, {"col": shape[1]}, (layout,), adapter=adapter, name=name)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float16, dict(w="F16", log="F32", bias="F32", mtp="BF16", codes="F16", ids="I64")),
        (torch.float64, dict(w="F64", log="F64", bias="F64", mtp="BF16", codes="F64", ids="I64")),
        (torch.bfloat16, dict(w="BF16", log="F32", bias="BF16", mtp="BF16", codes="BF16", ids="I64")),
    ],
)
def test_another_dtype_widens_exact_keys_and_keeps_carried_ones(dtype: torch.dtype, expected: dict[str, str]) -> None:
    """A carried key changes its dtype only where the source has it quantised."""
    source = source_of(scales={"codes": Scale("codes_scale", BLOCK)})
    keys = (key("w"), key("log", "F32"), key("bias"), key("mtp"), key("codes"), key("ids", "I64"))
    before = key_map(*keys, carried=frozenset({"mtp", "codes", "ids"}), source=source)
    after = before.recast(dtype, exact={"log", "bias"})
    assert {name: each.dtype for name, each in after.keys.items()} == expected
    assert [*after.keys] == [*before.keys]


@pytest.mark.parametrize("dtype", [torch.int8, torch.complex64, torch.float8_e4m3fn, torch.bool])
def test_no_export_has_a_dtype_that_holds_no_weights(dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=rf"dtype={dtype} is not .* choose from .*torch\.bfloat16"):
        key_map(key("w")).recast(dtype)


def test_parts_of_a_key_map() -> None:
    parts = key_map(
        key("w"), key("mtp"), key("w.lora_A", "F32", ADAPTERS), carried=frozenset({"mtp", "w"}),
        scales={"w": Scale("w_scale", BLOCK)}, quantization={"quant_method": "fp8"}, source=source_of(key("w")),
    )  # fmt: skip
    adapters, base, rest = parts.of_adapters(), parts.of_base(), parts.without("mtp")
    assert [*adapters.keys] == ["w.lora_A"]
    assert (adapters.carried, adapters.scales, adapters.quantization) == (frozenset(), {}, {})
    assert [*base.keys] == ["w", "mtp"]
    assert (base.carried, base.scales, base.quantization) == (parts.carried, parts.scales, parts.quantization)
    assert base.of_base() is base
    assert ([*rest.keys], rest.carried) == (["w", "w.lora_A"], frozenset({"w"}))
    assert parts.fresh_keys == {"mtp", "w.lora_A"}
    assert key_map(key("w")).fresh_keys == {"w"}


@pytest.mark.parametrize(
    ("last", "head"),
    [("F32", "F32"), ("F16", "F16"), ("BF16", "BF16"), ("F64", "F32"), ("I64", "F32"), ("F8_E5M2", "F32")],
)
def test_new_parameters_go_behind_the_last_key_of_the_source(last: str, head: str) -> None:
    """Adapters are F32 in a file of their own. Scales have no keys, and quantised matrices the dtype that is given."""
    scales = {name: Scale(f"{name}_scale", BLOCK) for name in ("w", "mtp.w")}
    codes = [each for name in scales for each in (key(name, "F8_E4M3", "b"), key(f"{name}_scale", "F32", "b"))]
    given = (*codes, key("norm", "F32", "a"), key("mtp.x", last, "a"))
    table = Table({n: param(n, adapter=n == "lora") for n in ("w", "norm", "head", "lora")}, carried=("mtp.*",))
    metadata = {"b": {"format": "np"}}
    source = source_of(*given, scales=scales, metadata=metadata)
    made = keymap.of_source(table, source, {}, ["lora", "head"], torch.float16)
    actual = [(each.name, each.dtype, each.file) for each in made.keys.values()]
    assert actual == [
        ("w", "F16", "b"), ("mtp.w", "F16", "b"), ("norm", "F32", "a"), ("mtp.x", last, "a"), ("head", head, "a"),
        ("lora", "F32", ADAPTERS),
    ]  # fmt: skip
    assert (made.carried, made.fresh) == (frozenset({"mtp.w", "mtp.x"}), frozenset({"head", "lora"}))
    assert made.metadata == {**metadata, ADAPTERS: {"format": "pt"}}


CONFIG: dict[str, Any] = {"torch_dtype": "float32", "n": 1, "quantization_config": {"quant_method": "old"}}
WITH_TEXT = {**CONFIG, "text_config": {"torch_dtype": "float32", "dtype": "float32", "m": 2}}


@pytest.mark.parametrize(
    ("config", "dtype", "scaled", "expected"),
    [
        (CONFIG, None, False, {"torch_dtype": "float32", "n": 1}),
        (CONFIG, None, True, {"torch_dtype": "float32", "n": 1, "quantization_config": {"quant_method": "fp8"}}),
        (CONFIG, torch.float16, True, {"n": 1, "quantization_config": {"quant_method": "fp8"}, "dtype": "float16"}),
        (WITH_TEXT, torch.bfloat16, False, {"n": 1, "text_config": {"dtype": "bfloat16", "m": 2}, "dtype": "bfloat16"}),
        ({"text_config": None, "dtype": "float32"}, torch.float16, False, {"text_config": None, "dtype": "float16"}),
    ],
)
def test_the_config_says_what_is_written(config: Any, dtype: torch.dtype | None, scaled: bool, expected: Any) -> None:
    scales = {"w": Scale("w_scale", BLOCK)} if scaled else {}
    before = json.dumps(config)
    assert exported_config(config, dtype, key_map(scales=scales, quantization={"quant_method": "fp8"})) == expected
    assert json.dumps(config) == before


def test_the_index_keeps_the_fields_of_the_source(tmp_path: Path) -> None:
    index = {"metadata": {"total_size": 9, "made_by": "x"}, "weight_map": {"gone": "c"}, "more": [1]}
    keys = (key("z", file="b"), key("a", "F32", "c", (5,)))
    small = SmallFiles(tmp_path, {"config.json": b'{"n":1}', "t/x.txt": b"x"})
    export = Export(key_map(*keys, source=source_of(index=index)), {"n": 1}, small, tmp_path / "out")
    directory.write_small(export, tmp_path)
    written = json.loads((tmp_path / INDEX).read_text())
    assert written == {**index, "metadata": {"total_size": 12 + 20, "made_by": "x"}, "weight_map": {"a": "c", "z": "b"}}
    assert [*written["weight_map"]] == ["a", "z"]
    assert (tmp_path / "config.json").read_bytes() == b'{"n":1}'
    target = export.target()
    assert (target.num_bytes, target.source) == (32, tmp_path)
    assert target.names == {"config.json", "t/x.txt", "b", "c", INDEX}
    assert index_files(tmp_path) == ["c", "b"]


@pytest.mark.parametrize(("files", "index", "expected"), [("aa", None, False), ("aa", {}, True), ("ab", None, True)])
def test_an_index_is_written_for_several_files_or_where_the_source_has_one(
    files: str, index: Any, expected: bool, tmp_path: Path
) -> None:
    keys = [key(f"k{at}", file=file) for at, file in enumerate(files)]
    small = SmallFiles(tmp_path, {"config.json": b'{"n": 1}'})  # of the source, which has another value
    export = Export(key_map(*keys, source=source_of(index=index)), {"n": 2}, small, tmp_path / "out")
    directory.write_small(export, tmp_path)
    assert ((tmp_path / INDEX).exists(), INDEX in export.target().names) == (expected, expected)
    assert json.loads((tmp_path / "config.json").read_text()) == {"n": 2}
    assert (index_files(tmp_path) == []) is not expected


def saved(at: Path, tensors: Mapping[str, Tensor], file: str = "model.safetensors") -> Source:
    at.mkdir(exist_ok=True)
    save_file(dict(tensors), at / file)
    return open_source(at)


@pytest.mark.parametrize(
    ("stored", "message"),
    [([3, 1, 4], ""), ([3, 1, 5], "number 2 is 5, and 4 follows"), ([3, 1], "it has 2 numbers"),
     ([3, 1, 4, 1], "it has 4 numbers"), ([2, 1, 5], "number 0 is 2, and 3 follows")],
)  # fmt: skip
def test_constants_are_those_of_the_config(tmp_path: Path, stored: list[int], message: str) -> None:
    source = saved(tmp_path, {"ids": torch.tensor(stored)})
    table = Table({}, constants={"missing": (1,), "ids": (3, 1, 4)})
    if not message:
        directory.check_constants(table, source)
        return
    with pytest.raises(LoadError, match=f"ids: {message} from vocab_size"):
        directory.check_constants(table, source)


def test_first_bytes_of_a_tensor_end_with_it(tmp_path: Path) -> None:
    numbers = torch.arange(1200, dtype=torch.int16)
    source = saved(tmp_path, {"a": numbers, "b": torch.tensor([7, 8], dtype=torch.int16)})
    assert directory.first_bytes(source, "a") == numbers[:512].numpy().tobytes()
    assert directory.first_bytes(source, "b") == b"\7\0\10\0"


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_carried_codes_are_dequantised_if_the_dtype_holds_them(tmp_path: Path, dtype: str) -> None:
    codes = torch.tensor([[1.0, -2.0, 448.0], [0.0, 0.5, -448.0]])
    tensors = {"w": codes.to(torch.float8_e4m3fn), "w_scale_inv": torch.tensor([[1000.0]])}
    source = saved(tmp_path, tensors).scaled_by(FP8_CONFIG)
    keys = key_map(key("w", dtype), carried=frozenset({"w"}), source=source)
    if dtype == "F16":
        with pytest.raises(ExportError, match=r"w has values that torch.float16 cannot hold"):
            b"".join(directory._carried_bytes(keys, "w"))
        return
    expected = (codes * 1000).to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
    assert b"".join(directory._carried_bytes(keys, "w")) == expected
    unchanged = key_map(key("w", "F8_E4M3"), carried=frozenset({"w"}), source=source, scales=source.scales)
    assert b"".join(directory._carried_bytes(unchanged, "w")) == tensors["w"].view(torch.uint8).numpy().tobytes()


def test_ranks_divide_the_carried_keys(tmp_path: Path) -> None:
    names = ["c", "a", "d", "b", "e"]
    source = saved(tmp_path, {name: torch.full((3,), at, dtype=torch.uint8) for at, name in enumerate(names)})
    keymap_ = key_map(*(key(name, "U8", shape=(3,)) for name in names), carried=frozenset(names), source=source)
    written: dict[int, dict[str, bytes]] = {}
    for rank in range(2):
        copied = written.setdefault(rank, {})
        files: Any = SimpleNamespace(
            keymap=keymap_, copy=lambda to, parts, copied=copied: copied.update({to.name: b"".join(parts)})
        )
        directory.copy_carried(files, rank, 2)
    assert written == {0: {"a": b"\1\1\1", "c": b"\0\0\0", "e": b"\4\4\4"}, 1: {"b": b"\3\3\3", "d": b"\2\2\2"}}


def test_bytes_of_a_key_are_written_in_parts(tmp_path: Path) -> None:
    keys = key_map(key("a", "U8", "f", (3,)), key("b", "U8", "f", (6,)))
    extents = Extents()
    (tmp_path / "sub").mkdir()
    make_files(tmp_path, keys, extents, "sub")
    with Files(tmp_path, keys, extents, "sub") as files:
        files.copy(keys.keys["b"], [b"12", b"345", b"6"])
        files.put("a", b"yz", 1)
        files.put("a", b"x", 0)
    data, size = (tmp_path / "sub" / "f").read_bytes(), keys.headers["f"].file_bytes
    assert (data[-9:], len(data)) == (b"xyz123456", size)
    assert [*extents.of_file] == ["sub/f"]
    assert extents.num_bytes == size
    assert extents.find_gap("sub/f", size) == ""
    files.close()
    with pytest.raises(OSError, match=r"No space left.*sub/f'"), files._with_file_name("f"):
        raise OSError(28, "No space left on device")


def test_each_rank_puts_its_files_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, synced = key_map(key("a", "U8", "f", (3,)), key("b", "U8", "g", (2,))), list[str]()
    make_files(tmp_path, keys)
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    mesh = SimpleNamespace(rank=0, axes=SimpleNamespace(world=1))
    model: Any = SimpleNamespace(spec=SimpleNamespace(table=()), mesh=mesh)
    with Files(tmp_path, keys) as files:
        for name in "ab":
            files.put(name, b"x", 0)
        for act in directory._write_actions(model, files, lambda _: None):
            act()
    assert sorted(synced) == [str(tmp_path / "f"), str(tmp_path / "g")]


def test_ranks_count_what_they_write() -> None:
    """Five rows of one matrix on two replicas; no rank stores the other."""
    spec = SimpleNamespace(table=[param("a", (5, 3)), param("b", (5, 3))], rules=Rules())
    ranks: list[Any] = [SimpleNamespace(axes=Axes(replicate=2), rank=rank) for rank in range(2)]
    models: list[Any] = [SimpleNamespace(spec=spec, mesh=mesh, stored={"a": None}) for mesh in ranks]
    assert [*map(directory._num_written, models)] == [9, 6]


A, B, C = torch.arange(150, dtype=torch.int16), torch.arange(7, dtype=torch.int16), torch.arange(6).view(2, 3)


@pytest.mark.parametrize(
    "other",
    [
        {"a": A, "b": B, "d": C}, {"a": A, "b": B}, {"a": A, "b": B, "c": C.view(3, 2)},
        {"a": A, "b": B.view(torch.float16), "c": C}, {"a": A.where(A != 75, 1), "b": B, "c": C},
        {"a": A.where(A != 106, 1), "b": B, "c": C}, {"a": A, "b": B.where(B != 6, 1), "c": C},
        {"a": A, "b": B, "c": C.where(C != 3, 1)},
    ],
    ids=["a key", "fewer keys", "a shape", "a dtype", "the middle", "64 bytes after it", "the end", "the last key"],
)  # fmt: skip
def test_a_checksum_tells_models_apart(tmp_path: Path, other: dict[str, Tensor]) -> None:
    first = saved(tmp_path / "first", {"a": A, "b": B, "c": C}).checksum()
    saved(tmp_path / "again", {"c": C, "b": B}, "1.safetensors")
    assert saved(tmp_path / "again", {"a": A}, "2.safetensors").checksum() == first
    assert saved(tmp_path / "other", other).checksum() != first


def test_a_checksum_looks_at_every_tensor_of_a_small_model(tmp_path: Path) -> None:
    tensors = {str(at): torch.tensor(at % 7, dtype=torch.uint8) for at in range(600)}
    first = saved(tmp_path / "a", tensors).checksum()
    for at in (1, 599):
        changed = {**tensors, str(at): torch.tensor(9, dtype=torch.uint8)}
        assert saved(tmp_path / f"b{at}", changed).checksum() != first


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("org/name", True), ("a1/b.c-d_e", True), ("a/_b", True), ("a", False), ("a/", False), ("/b", False),
        ("a/b/c", False), ("-a/b", False), ("a/-b", False), (".a/b", False), ("a/.b", False), ("a/b c", False),
        ("ä/b", False), ("~/b", False),
    ],
)  # fmt: skip
def test_which_names_are_ids_of_the_hub(source: str, expected: bool) -> None:
    assert is_hub_id(source) is expected


def test_a_file_is_read_until_all_bytes_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network file system may return less than requested."""
    source = saved(tmp_path, {"a": torch.arange(9, dtype=torch.uint8), "b": torch.zeros(2, dtype=torch.uint8)})
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, num, at: pread(fd, min(num, 2), at))
    assert directory.raw_tensor(source, "a").tolist() == [*range(9)]


@pytest.mark.parametrize("modules", ["list", "{}", "{", '["x", 1]'])
def test_which_small_files_are_copied(tmp_path: Path, modules: str) -> None:
    """Folders of modules lie in the directory itself, and are no links to other places."""
    copied = ["1_Pooling/config.json", "1_Pooling/sub/x.bin", "additional_chat_templates/a.txt", "LICENSE", "b.jinja"]
    others = ["x.bin", "m.st", "x.bin.index.json", "trainer.json", "meshwright.json", INDEX]
    for name in (*copied, *others, "2_Other/config.json", "2_Other/sub/y.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "3_Link").symlink_to(tmp_path / "2_Other")
    given: list[Any] = ["1_Pooling", "", "2_Other/sub", "../elsewhere", "3_Link", 4]
    listed = json.dumps([*({"path": path} for path in given), {"name": "2_Other"}, "2_Other"])
    (tmp_path / "modules.json").write_text(listed if modules == "list" else modules)
    small = small_files.read_small(tmp_path)
    assert [*small.kept] == small.names == sorted([*copied[0 if modules == "list" else 2 :], "modules.json"])
    assert small.kept["LICENSE"] == b"LICENSE"


def test_a_large_file_that_changes_as_it_is_copied_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_files, "_KEPT_BYTES", 5)
    monkeypatch.setattr(small_files, "_COPY_BYTES", 4)
    for name, text in (("five.txt", "12345"), ("long.txt", "123456789")):
        (tmp_path / name).write_text(text)
    small, out = small_files.read_small(tmp_path), tmp_path / "out"
    assert ([*small.kept], [*small.large]) == (["five.txt"], ["long.txt"])
    small.write(out)
    assert [(out / name).read_text() for name in small.names] == ["12345", "123456789"]
    bytes_at = Opened.bytes_at

    def touched(file: Opened, start: int, length: int) -> bytes:
        os.utime(file.path, (1, 1))
        return bytes_at(file, start, length)

    monkeypatch.setattr(Opened, "bytes_at", touched)
    with pytest.raises(LoadError, match=r"long.txt has changed since it was first read: .* load the model again"):
        small.write(out)


def in_layouts(name: str, group: str, **layouts: tuple[str, tuple[int, int]]) -> Param:
    made = tuple(
        Layout(layout, (Block(Box.whole(shape), key, shape, Box.whole(shape)),))
        for layout, (key, shape) in layouts.items()
    )
    return replace(param(name), layouts=made, group=group, name=name)


def source_in(**shapes: tuple[int, int]) -> Source:
    return source_of(*(key(name, shape=shape) for name, shape in shapes.items()))


def test_layouts_of_equal_keys_are_told_apart_by_all_their_shapes() -> None:
    """A square matrix fits either of them."""
    table = Table({
        "up": in_layouts("up", "experts", rows=("u", (2, 2)), turned=("u", (2, 2))),
        "down": in_layouts("down", "experts", rows=("d", (2, 3)), turned=("d", (3, 2))),
        "head": in_layouts("head", "head", own=("h", (2, 3)), tied=("e", (2, 3))),
    })  # fmt: skip
    shapes = dict(u=(2, 2), h=(2, 3))
    assert reader.choose(table, source_in(**shapes, d=(2, 3))) == {"experts": "rows", "head": "own"}
    assert reader.choose(table, source_in(**shapes, d=(3, 2))) == {"experts": "turned", "head": "own"}
    assert reader.choose(table, source_in(**shapes, d=(3, 3))) == {"experts": "rows", "head": "own"}
    with pytest.raises(LoadError, match=r"the head in 2 layouts \(own, tied\)"):
        reader.choose(table, source_in(**shapes, d=(2, 3), e=(2, 3)))
    with pytest.raises(MissingKey, match="nearest is 'rows', which lacks 1 of 2 keys, first u"):
        reader.choose(table, source_in(h=(2, 3), d=(2, 3)))


def test_the_layout_is_named_that_lacks_the_smallest_share_of_its_keys() -> None:
    layouts = {"fused": ["a"], "each": ["b", "c", "d"]}
    assert "nearest is 'each', which lacks 2 of 3 keys, first c;" in reader._nearest("x", layouts, source_in(b=(2, 3)))


def test_each_matrix_is_divided_by_its_own_largest_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_STAGED_ELEMENTS", 5)
    values = torch.zeros(3, 3, 4)
    values[0, 0, 0], values[1, 0, 1], values[1, 2, 3], values[2, 1, 1] = 100.0, 3.0, -7.0, 50.0
    source = saved(tmp_path, {"w": values})
    entry, coding = source.entries["w"], FOUR_BITS["nvfp4"]
    with reader.Reader(source) as opened:
        actual = [opened._divisor_of(entry, number, coding) for number in (1, 2, 0)]
        assert opened._divisor_of(entry, 1, FOUR_BITS["mxfp4"]).item() == 1.0
    assert actual == [divisor_for_amax(torch.tensor(largest)) for largest in (7.0, 50.0, 100.0)]
    assert {at: each.item() for at, each in source.divisors.items()} == {
        ("w", number): each.item() for number, each in zip((1, 2, 0), actual, strict=True)
    }
