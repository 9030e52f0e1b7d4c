"""Functions that read, quantise, compare and write tensors of weights, called with small inputs of odd sizes."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from meshwright.errors import BrokenFile, ExportError, LoadError
from meshwright.ops import Grid, codings
from meshwright.sharding import Block, Box, Init, Layout, Param, Piece, Table
from meshwright.weights import bitsandbytes, deltas, frozen_scales, quant_formats, random_init, requantise, streaming
from meshwright.weights.checksums import Checks, Extent, Extents, overlapping
from meshwright.weights.frozen_scales import Values, check_same
from meshwright.weights.keymap import Key, KeyMap
from meshwright.weights.merged import Delta, MergedValues
from meshwright.weights.quant_formats import BLOCK, ONE_BLOCK, Format, Places, Scale
from meshwright.weights.writer import _side_by_side, _window

INF, NAN = float("inf"), float("nan")
FP8 = torch.float8_e4m3fn


def param(name: str, rows: dict[str, int], cols: dict[str, int], **options: Any) -> Param:
    shape = (*rows.values(), *cols.values())
    whole = Box.whole(shape)
    return Param(rows, cols, (Layout("", (Block(whole, name, shape, whole),)),), name=name, **options)


# Extents

RANGES = [(0, 4), (4, 9), (9, 12)]


@pytest.mark.parametrize(
    ("start", "stop", "parts"),
    [
        (0, 4, [(0, 4, 0)]), (3, 4, [(3, 4, 0)]), (4, 5, [(4, 5, 1)]), (3, 5, [(3, 4, 0), (4, 5, 1)]), (12, 20, []),
        (1, 12, [(1, 4, 0), (4, 9, 1), (9, 12, 2)]), (8, 9, [(8, 9, 1)]),
    ],
)  # fmt: skip
def test_a_read_is_split_at_the_bounds_of_extents(start: int, stop: int, parts: list[tuple[int, int, int]]) -> None:
    extents = [Extent(a, b, 0) for a, b in RANGES]
    assert [*overlapping(extents, start, stop)] == [extents[at] for _, _, at in parts]
    actual = Checks(Path(), {"f": extents}).split("f", start, stop)
    assert [(a, b, extents.index(extent)) for a, b, extent in actual] == parts


def test_an_extent_is_checked_in_its_own_file() -> None:
    extents = Extents()
    extents.add("a", 3, b"xyz")
    extents.update(Extents({"a": [Extent(0, 3, 1)], "b": [Extent(3, 6, 2)]}))
    [second, first], checks = extents.sorted()["a"][::-1], Checks(Path("DIR"), {})
    assert (first.start, second.start, extents.num_bytes) == (0, 3, 9)
    with pytest.raises(BrokenFile, match=r"bytes 3 to 6 of DIR/a \(key\) fail"):
        checks.check("a", second, b"xyy", "key")
    assert not checks.is_checked("a", second)
    checks.check("a", second, b"xyz")
    assert [checks.is_checked(file, extent) for file in "ab" for extent in (first, second)] == [0, 1, 0, 0]


@pytest.mark.parametrize(
    ("ranges", "wrong"),
    [
        ([(4, 7), (0, 4)], ""), ([(0, 4), (5, 7)], "byte 4 lies in no extent"), ([], "its extents end at byte 0 of 7"),
        ([(0, 5), (4, 7)], "byte 4 lies in two extents"), ([(0, 6)], "its extents end at byte 6 of 7"),
        ([(0, 8)], "its extents end at byte 8 of 7"), ([(1, 7)], "byte 0 lies in no extent"),
    ],
)  # fmt: skip
def test_extents_must_tile_their_file(ranges: list[tuple[int, int]], wrong: str) -> None:
    assert Extents({"f": [Extent(a, b, 0) for a, b in ranges], "g": []}).find_gap("f", 7) == wrong


# Changed elements

WHOLE, TURNED = Box.whole((2, 5)), Box.whole((4, 3))


@pytest.mark.parametrize(
    ("block", "box", "indices"),
    [
        (Block(WHOLE, "k", (4, 5), Box((1, 0), (3, 5))), Box((0, 1), (2, 4)), [6, 7, 8, 11, 12, 13]),
        (Block(TURNED, "k", (3, 4), Box.whole((3, 4)), turned=True), Box((1, 0), (4, 2)), [1, 5, 2, 6, 3, 7]),
        (Block(Box.whole((1, 2, 3)), "k", (4, 3), Box((2, 0), (4, 3))), Box((0, 0, 1), (1, 2, 3)), [7, 8, 10, 11]),
    ],
    ids=["rows", "transposed", "three dims"],
)
def test_changes_have_the_indices_of_the_whole_tensor(block: Block, box: Box, indices: list[int]) -> None:
    """Bits are compared: -0 differs from 0, and a NaN equals itself."""
    part = streaming.Overlap(Key("k", "BF16", block.shape, "f"), block, cast(Any, None), box)
    now = torch.arange(float(box.size))
    now[0], now[2] = NAN, 0.0
    before = now.to(torch.bfloat16)
    now[1], now[2], now[3] = -5.0, -0.0, NAN
    model: Any = SimpleNamespace(views=lambda _: iter([(block.ours, spread(block.ours, box, now))]))
    change = deltas._change(part, model, before, torch.bfloat16)
    assert (change.key, change.size, change.places.tolist()) == ("k", box.size, [1, 2, 3])
    assert change.indices.tolist() == [indices[at] for at in (1, 2, 3)]
    assert (change.indices.dtype, change.values.dtype) == (torch.int32, torch.bfloat16)
    assert str(change.values.tolist()) == "[-5.0, -0.0, nan]"
    deltas.move([before], [change.on(torch.device("cpu"))])
    assert str(before.tolist()) == str(now.tolist())


def spread(ours: Box, box: Box, values: Tensor) -> Tensor:
    whole = torch.zeros(ours.shape)
    whole[box.slices] = values.view(box.shape)
    return whole


def test_messages_of_changes_have_the_sizes_that_counts_say() -> None:
    names = {"a": torch.bfloat16, "b": torch.float32, "c": torch.bfloat16}
    bucket: Any = SimpleNamespace(keys=[Key(name, "", (9,), "f") for name in names], dtypes=names)
    change = lambda name, num: deltas.Change(  # noqa: E731 - short
        name, 9, torch.arange(num), torch.arange(num, dtype=torch.int32) + ord(name), torch.ones(num, dtype=names[name])
    )
    own = [change("a", 2), change("a", 3), change("b", 0), change("c", 4)]
    counts = deltas._counts(bucket, own)
    assert counts == [5, 0, 4]
    assert deltas._sizes(bucket, counts) == {torch.int32: 9, torch.bfloat16: 9}
    packed = deltas._packed(own, torch.device("cpu"))
    assert {dtype: len(tensor) for dtype, tensor in packed.items()} == deltas._sizes(bucket, counts)
    assert packed[torch.int32].tolist() == [97, 98, 97, 98, 99, 99, 100, 101, 102]
    assert [*packed] == sorted(packed, key=str)
    assert deltas._sizes(bucket, [0, 2, 1]) == {torch.int32: 3, torch.float32: 2, torch.bfloat16: 1}


@pytest.mark.parametrize(
    ("num", "dtype"), [(1, torch.int32), (2**31 - 1, torch.int32), (2**31, torch.int64), (2**33, torch.int64)]
)
def test_indices_are_as_wide_as_the_tensor_needs(num: int, dtype: torch.dtype) -> None:
    assert deltas.index_dtype(num) == dtype
    sent = deltas.Change("k", num, torch.tensor([num - 1]), torch.zeros(1), torch.ones(1)).on(torch.device("cpu"))
    assert (sent.places.tolist(), sent.places.dtype, len(sent.indices)) == ([num - 1], dtype, 0)


@pytest.mark.parametrize(
    ("sizes", "batches"),
    [([5, 5, 2], ["ab", "c"]), ([5, 6], ["a", "b"]), ([30, 1, 9, 1], ["a", "bc", "d"]), ([], []), ([0, 10], ["ab"])],
)
def test_buckets_hold_bounded_bytes(sizes: list[int], batches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten float32 elements fit. A larger key travels alone."""
    monkeypatch.setattr(streaming, "_BATCH_BYTES", 40)
    keys = [Key("abcd"[at], "BF16", (num, 1), "f") for at, num in enumerate(sizes)]
    actual = streaming._batches(keys, dict.fromkeys("abcd", torch.float32))
    assert ["".join(key.name for key in batch) for batch in actual] == batches


# Initial values


@pytest.mark.parametrize("kind", ["normal", "uniform", "log_uniform"])
def test_initial_values_are_those_of_their_block(kind: str) -> None:
    """Rows are counted through all dims of rows, in blocks of 64; columns are drawn whole."""
    made = param("w", {"expert": 3, "row": 40}, {"head": 2, "col": 3}, init=Init(kind, 0.3))

    def drawn(block: int) -> Tensor:
        generator, shape = random_init._generator(7, "w", block), (64, 2, 3)
        if kind == "normal":
            return torch.randn(shape, generator=generator) * 0.3
        unit = torch.rand(shape, generator=generator)
        return unit * 0.6 - 0.3 if kind == "uniform" else (unit * 0.3).clamp_min(1e-4).log()

    expected = torch.cat([drawn(0), drawn(1)])[:120].view(3, 40, 2, 3)
    for start, stop, lo, hi in (((0, 0, 0, 0), (3, 40, 2, 3), 0, 120), ((1, 10, 1, 0), (3, 33, 2, 2), 5, 44)):
        box = Box(start, stop)
        rows = expected[box.slices].flatten(0, 1).flatten(1)[lo:hi]
        stored = torch.full_like(rows, NAN)
        random_init.fill_fresh(made, Piece(made, box, lo, hi), stored, 7)
        assert torch.allclose(stored, rows, rtol=0, atol=1e-6)


def test_every_block_has_its_own_seed() -> None:
    names = [(seed, name, block) for seed in (0, 1) for name in ("a", "b") for block in (0, 1)]
    seeds = {random_init._generator(*name).initial_seed() for name in names}
    assert len(seeds) == 8
    assert max(seeds) > 1 << 60
    for kind in ("zeros", "ones"):
        stored, made = torch.full((2, 3), 5.0), param("w", {"row": 2}, {"col": 3}, init=Init(kind))
        random_init.fill_fresh(made, Piece(made, Box.whole((2, 3)), 0, 2), stored, 0)
        assert stored.unique().tolist() == [float(kind == "ones")]
    smallest = random_init._draw(Init("log_uniform", 1e-5), (2, 3), torch.Generator())
    assert smallest.tolist() == torch.full((2, 3), 1e-4).log().tolist()


# Scales of blocks

ROWS_OF_VIEW = [[0, 1, 1, 1], [3, 4, 4, 4], [3, 4, 4, 4]]


@pytest.mark.parametrize(
    ("view", "shape", "expected", "rows"),
    [
        (lambda w: w[1:4, 2:6], (5, 7), ROWS_OF_VIEW, range(2)),
        (lambda w: w[1:4, 2:6].T, (5, 7), torch.tensor(ROWS_OF_VIEW).T.tolist(), range(2)),
        (lambda w: w[:, 1:4, 6], (2, 5, 7), [[2, 5, 5], [11, 14, 14]], range(5)),
        (lambda w: w[1, 4:, 3:], (2, 5, 7), [[16, 16, 16, 17]], range(5, 6)),
    ],
)
def test_the_scale_of_each_element_of_a_view(view: Any, shape: Any, expected: Any, rows: range) -> None:
    """Blocks have 2 rows and 3 columns; those at the end are smaller."""
    scale, elements = Scale("s", (2, 3)), view(torch.empty(shape, device="meta"))
    scales = torch.arange(math.prod(scale.grid(shape))).view(-1, scale.grid(shape)[-1])
    places = Places.of(elements, shape, scale)
    assert places.take(scales).tolist() == expected
    assert places.rows_of_blocks == rows
    assert places.below(rows.start).take(scales[rows.start :]).tolist() == expected
    grid, values = torch.zeros(scales.shape), torch.arange(1.0, 1 + math.prod(elements.shape)).view(elements.shape)
    places.into(grid, values)
    largest = {
        at: max(values[torch.tensor(expected) == at].tolist()) for at in torch.tensor(expected).unique().tolist()
    }
    assert grid.flatten().tolist() == [largest.get(at, 0.0) for at in range(grid.numel())]
    assert scale.grid((4, 129, 5)) == (4, 65, 2)


@pytest.mark.parametrize(
    ("used", "values", "expected"),
    [
        (torch.bfloat16, [1.003, -1.005, 0.0, 3.4e38], [1.0, -1.0078125, 0.0, 3.4e38]),
        (torch.float16, [1.0004, 70000.0, 65519.0, -70000.0], [1.0, 70000.0, 65504.0, -70000.0]),
    ],
)
def test_values_are_rounded_as_matmuls_use_them(used: Any, values: list[float], expected: list[float]) -> None:
    """A value that would overflow stays."""
    assert quant_formats.as_used(torch.tensor(values), used).tolist() == torch.tensor(expected).tolist()


def test_codes_saturate_and_a_scale_of_zero_gives_zeros() -> None:
    values, scales = torch.tensor([1000.0, -1000.0, 5.0, 3.0]), torch.tensor([2.0, 1.0, 0.0, 2.0])
    assert quant_formats.quantise(values, scales).float().tolist() == [448.0, -448.0, 0.0, 1.5]
    assert quant_formats.scales_for_amax(torch.tensor([0.0, 896.0])).tolist() == [1.0, 2.0]


def compressed(strategy: str, num_bits: int = 8, name: str | None = None, **weights: Any) -> dict[str, Any]:
    group = {"weights": {"type": "float", "num_bits": num_bits, "strategy": strategy, **weights}}
    return {"quant_method": "compressed-tensors", "config_groups": {"a": group, "b": group}, "format": name}


MXFP4 = dict(num_bits=4, group_size=32)
GROUPLESS = {"quant_method": "compressed-tensors", "config_groups": {"a": "x"}}
BITSANDBYTES = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


@pytest.mark.parametrize(
    ("config", "suffix", "block", "name"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 64]}, "_scale_inv", (128, 64), ""),
        ({"quant_method": "fp8"}, "_scale_inv", ONE_BLOCK, ""),
        (compressed("tensor"), "_scale", ONE_BLOCK, ""),
        (compressed("channel"), "_scale", (1, ONE_BLOCK[1]), ""),
        (compressed("block", block_structure=[32, 16]), "_scale", (32, 16), ""),
        (compressed("group", name="mxfp4-pack-quantized", **MXFP4), "_scale", (1, 32), "MXFP4"),
        (compressed("group", name="mxfp8-quantized", group_size=32), "_scale", (1, 32), "MXFP8"),
        (BITSANDBYTES, ".absmax", (1, 64), "NF4"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "", (), "weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": [0, 1]}, "", (), "weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": [True, 1]}, "", (), "weight_block_size"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "", (), "fmt='e5m2'"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "", (), "'static'"),
        (compressed("token"), "", (), "'token'"), (compressed("tensor", 4), "", (), "in 4 bits"),
        (compressed("tensor", symmetric=False), "", (), "symmetric"),
        (compressed("group", name="mxfp4-pack-quantized", num_bits=4, group_size=16), "", (), "group_size 16"),
        (compressed("tensor") | {"transform_config": {"a": 1}}, "", (), "transform_config"),
        (compressed("tensor_group", name="nvfp4-pack-quantized", num_bits=4), "", (), "4 bits of 'float'.*'nvfp4-"),
        (compressed("group", name="mxfp6-pack-quantized", **MXFP4), "", (), "format 'mxfp6-pack-quantized'"),
        (compressed("group", name="pack-quantized", **MXFP4), "", (), "format 'pack-quantized'"),
        (compressed("group", name="mxfp4-pack-quantized", **MXFP4, type="int"), "", (), "4 bits of 'int'"),
        (compressed("group", **MXFP4), "", (), "format None"), (GROUPLESS, "", (), "None bits"),
        (GROUPLESS | {"config_groups": {}}, "", (), "0 different formats"),
        *(({"quant_method": each}, "", (), repr(each)) for each in ("gptq", "awq", "mxfp4", "modelopt")),
        (["fp8"], "", (), "not an object"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "", (), "'fp4'"),
        (BITSANDBYTES | {"load_in_4bit": None}, "", (), "load_in_4bit=None"),
        (BITSANDBYTES | {"bnb_4bit_quant_storage": "bfloat16"}, "", (), "'bfloat16'"),
    ],
)  # fmt: skip
def test_formats_that_configs_describe(config: Any, suffix: str, block: tuple[int, ...], name: str) -> None:
    if not suffix:
        with pytest.raises(LoadError, match=name):
            quant_formats._format_of(config)
        return
    actual = quant_formats._format_of(config)
    assert (actual.suffix, actual.block, actual.name) == (suffix, block, name)


def test_scales_of_a_matrix_by_its_format() -> None:
    packed, nested = Format("_scale", (1, 16), (), "NVFP4", packed=True, divided=True), Format(".absmax", (1, 64))
    entries: Any = {"m.weight_packed": 1, "m.input_global_scale": 1, "t.weight_scale": 1, "n.weight.quant_map": 1}
    scale = packed.scale("m.weight", entries)
    assert scale == Scale("m.weight_scale", (1, 16), "NVFP4", "m.weight_packed", "m.weight_global_scale",
                          ("m.input_global_scale",))  # fmt: skip
    assert scale.companion_keys == (
        "m.weight_scale", "m.weight_packed", "m.weight_global_scale", "m.input_global_scale"
    )  # fmt: skip
    assert [packed.has(key, entries) for key in ("m.weight", "n.weight")] == [True, False]
    of_table = Format("_scale_inv", BLOCK).scale("t.shard_3.weight", entries)
    assert (of_table.key, of_table.block, bool(of_table.form)) == ("t.weight_scale", ONE_BLOCK, True)
    own = Format("_scale_inv", BLOCK).scale("t.shard_3.weight", entries | {"t.shard_3.weight_scale_inv": 1})
    assert own == Scale("t.shard_3.weight_scale_inv", BLOCK)
    with_states = Format(nested.suffix, nested.block, packed=True, states={
        "n.weight": bitsandbytes.State((2, 64), nested=True), "p.weight": bitsandbytes.State((2, 64), offset=0.5)
    })  # fmt: skip
    actual = with_states.scale("n.weight", entries)
    ends = (".nested_absmax", ".nested_quant_map")
    assert (actual.nested, actual.offset) == (tuple(f"n.weight{end}" for end in ends), 0.0)
    assert actual.companion_keys == ("n.weight.absmax", "n.weight.quant_map")
    assert with_states.scale("p.weight", entries) == Scale("p.weight.absmax", (1, 64), offset=0.5)
    assert [with_states.has(key, entries) for key in ("p.weight", "q.weight")] == [True, False]


@pytest.mark.parametrize(("dtype", "expected"), [("F32", [[3.0, 2.0]]), ("BF16", [[3.0, 2.0]]), ("F16", None)])
def test_only_blocks_that_changed_get_new_scales(dtype: str, expected: Any) -> None:
    scale = Scale("w_scale", BLOCK)
    keys = {"w": Key("w", "F8_E4M3", (2, 256), "f"), "w_scale": Key("w_scale", dtype, (1, 2), "f")}
    with contextlib.ExitStack() as files:
        scan = requantise.BlockScan(KeyMap({}, keys, scales={"w": scale}), ["w"], files)
    scan.amax["w"][:] = torch.tensor([[448.0, 896.0]])
    assert scan.chosen("w").tolist() == [[1.0, 2.0]]
    scan.changed["w"][:] = torch.tensor([[0.0, 1.0]])
    scan.source_scales["w"] = torch.tensor([[3.0, 4.0]])
    assert scan.chosen("w").tolist() == [[3.0, 2.0]]
    if expected is None:
        scan.amax["w"][0, 1] = 448.0 * 70000
        with pytest.raises(ExportError, match="scales overflow F16"):
            scan.chosen("w")


@pytest.mark.parametrize("value", [INF, -INF, NAN])
def test_values_that_fp8_cannot_hold_are_refused(value: float) -> None:
    table = Table({name: param(name, {"row": 1}, {"col": 2}) for name in ("plain", "w")})
    keymap = KeyMap({}, {}, scales={"w": Scale("w_scale", BLOCK)})
    stored = {"plain": torch.tensor([[value, 1.0]]), "w": torch.tensor([[1.0, 2.0]])}
    model: Any = SimpleNamespace(spec=SimpleNamespace(table=table), stored=stored)
    requantise.check_scaled(model, keymap)
    stored["w"][0, 1] = value
    with pytest.raises(ExportError, match="w has NaN or infinite values"):
        requantise.check_scaled(model, keymap)


def test_ranks_divide_the_writing_of_scales() -> None:
    names = ["c", "a", "b"]
    written: list[tuple[int, str, bytes]] = []
    for rank in range(2):
        files: Any = SimpleNamespace(
            scales={name: torch.tensor([[float(at), 2.0]]) for at, name in enumerate(names)},
            keymap=KeyMap({}, {f"{name}_s": Key(f"{name}_s", "BF16", (1, 2), "f") for name in names},
                          scales={name: Scale(f"{name}_s", BLOCK) for name in names}),
            put=lambda name, data, at, rank=rank: written.append((rank, name, bytes(data[at:]))),
        )  # fmt: skip
        requantise.write_scales(files, rank, 2)
    assert written == [(0, "a_s", b"\x80\x3f\0\x40"), (0, "c_s", b"\0\0\0\x40"), (1, "b_s", b"\0\x40\0\x40")]


def test_frozen_codes_keep_their_scales_among_other_tensors() -> None:
    codes = torch.tensor([[1.0, 2.0, -3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]]).to(FP8).view(torch.uint8)
    grid = Grid(torch.tensor([[1.0, 10.0], [2.0, 20.0]]), torch.tensor([0, 1, 1]), torch.tensor([0, 1, 1]))
    values = Values({"w": codes}, {"w": grid}).with_tensors({"z": torch.ones(2)})
    whole = [[1.0, 20.0, -30.0], [8.0, 100.0, 120.0], [14.0, 160.0, 180.0]]
    assert values["w"].tolist() == whole
    assert values.only(lambda name: name == "w")["w"].tolist() == whole
    writable, frozen = values.apart
    assert ([*writable], [*frozen], frozen["w"].tolist()) == (["z"], ["w"], whole)
    made = param("w", {"expert": 2, "row": 2}, {"col": 3})
    first, second = values.views(Piece(made, Box.whole((2, 2, 3)), 0, 3))
    assert (first[0].shape, second[0].shape) == ((1, 2, 3), (1, 1, 3))
    assert cast(Any, first[1])[slice(0, 1), slice(1, 2), slice(1, 3)].tolist() == [[[100.0, 120.0]]]
    assert cast(Any, second[1])[slice(0, 1), slice(0, 1), slice(0, 2)].tolist() == [[[14.0, 160.0]]]


# Rows that ranks write


@pytest.mark.parametrize(
    ("first", "num", "expected"), [(0, 4, (3, 7)), (4, 5, (7, 10)), (7, 2, (10, 10)), (9, 1, (10, 10))]
)
def test_windows_end_with_the_rows(first: int, num: int, expected: tuple[int, int]) -> None:
    rows = Piece(param("w", {"row": 12}, {"col": 2}), Box.whole((12, 2)), 3, 10)
    window = _window(rows, first, num)
    assert (window.lo, window.hi) == expected


@pytest.mark.parametrize("dim", [0, 1])
def test_rows_are_assembled_from_strips_of_columns(dim: int) -> None:
    made, whole = param("w", {"row": 5}, {"head": 3, "col": 4}), torch.arange(60.0).view(5, 3, 4)
    boxes = [Box((0, 0, 0), (5, 1, 4)), Box((0, 1, 0), (5, 3, 4))] if not dim else [
        Box((0, 0, 0), (5, 3, 1)), Box((0, 0, 1), (5, 3, 4))
    ]  # fmt: skip
    strips = [Piece(made, box, 0, 5) for box in boxes]
    parts = tuple(whole[1:3, box.start[1] : box.stop[1], box.start[2] : box.stop[2]].flatten() for box in boxes)
    rows = _side_by_side(Piece(made, Box.whole((5, 3, 4)), 1, 3), strips, parts)
    assert torch.equal(rows, whole[1:3].view(2, 12))


# Merged and frozen weights


@pytest.mark.parametrize("cut", [False, True])
def test_each_group_of_rows_has_the_addition_of_its_factor(cut: bool) -> None:
    made = param("w", {"row": 6}, {"col": 3})
    delta = Delta(torch.tensor([[[1.0, 2.0, 3.0]], [[-1.0, 0.0, 5.0]]]), torch.arange(6.0).view(6, 1), 0.5)
    whole = [[0, 0, 0], [0.5, 1, 1.5], [1, 2, 3], [-1.5, 0, 7.5], [-2, 0, 10], [-2.5, 0, 12.5]]
    box, columns = (Box((1, 1), (6, 3)), slice(1, 3)) if cut else (Box.whole((6, 3)), slice(0, 3))
    piece, first = Piece(made, box, 1, 4), 1 + box.start[0]
    expected = torch.tensor(whole)[first : first + 3, columns]
    assert delta.of(piece).tolist() == expected.tolist()
    stored = torch.full(expected.shape, 2.0, dtype=torch.bfloat16)
    both = {"w": delta, "x": delta}
    merged = MergedValues({"w": stored, "v": stored, "x": 0 * stored}, deltas=both, pieces=dict.fromkeys(both, piece))
    assert (merged["w"].dtype, merged["w"].tolist()) == (torch.float32, (expected + 2).tolist())
    assert [cast(Any, view).tolist() for _, view in merged.views(piece)] == [(expected + 2).tolist()]
    assert merged["v"] is stored
    assert merged["x"].tolist() == expected.tolist()
    assert [*merged._last] == ["x"], "one copy at a time"
    assert stored.unique().tolist() == [2.0]


def frozen(coding: Any) -> tuple[Values, Tensor, Tensor]:
    """Return a matrix in codes, the values that it was made of, and those that it stands for."""
    made = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    made[0, 0] = float("nan") if coding is codings.FP8 else made[0, 0]
    scales = torch.ones(1, 1)
    grid = Grid(scales, torch.zeros(3, dtype=torch.int64), torch.zeros(64, dtype=torch.int64), coding)
    if coding is codings.FP8:
        codes = made.to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        codes = coding.encode(made, scales[grid.rows])
    return Values({"w": codes}, {"w": grid}), made, grid.values(codes, torch.float32)


def compare(values: Values, file_values: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare frozen weights with a file of some values."""

    class FakeReader:
        def __init__(self, _source: Any) -> None:
            pass

        def __enter__(self) -> FakeReader:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def fill(self, _layout: Any, _piece: Any, out: Tensor) -> None:
            out.copy_(file_values)

    monkeypatch.setattr(frozen_scales, "Reader", FakeReader)
    piece = SimpleNamespace(numel=192, shape=(3, 64), param=SimpleNamespace(name="w"))
    again: list[Any] = []
    source = SimpleNamespace(directory="DIR", stamps={"file": 1}, check_unchanged=again.extend)
    check_same(values, 0, cast(Any, [SimpleNamespace(piece=piece, layout=None)]), cast(Any, source))
    assert again == ["file"], "it may have changed meanwhile"


@pytest.mark.parametrize("coding", [codings.FP8, codings.NF4], ids=["fp8", "nf4"])
def test_frozen_codes_equal_their_values(coding: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In 4 bits the values before quantisation are accepted too: the model's own files have these."""
    values, made, dequantised = frozen(coding)
    compare(values, dequantised, monkeypatch)
    assert not torch.equal(made, dequantised)
    other = dequantised.clone()
    other[2, 63] = 0.0 if other[2, 63] else 1.0
    for refused in [other, *([made] if coding is codings.FP8 else [])]:
        with pytest.raises(LoadError, match=f"DIR has other values of w, .* {8 if coding is codings.FP8 else 4} bits"):
            compare(values, refused, monkeypatch)
    if coding is not codings.FP8:
        compare(values, made, monkeypatch)


def test_each_matrix_of_a_stack_is_quantised_with_its_own_divisor() -> None:
    made, divisors, coding = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)), [1.0, 300.0], codings.NVFP4
    columns = torch.zeros(64, dtype=torch.int64)
    alone = [
        frozen_scales._quantised_as(Grid(torch.tensor([[divisors[at]]]), torch.tensor([0]), columns, coding), row[None])
        for row, at in zip(made, (0, 1, 1), strict=True)
    ]
    both = Grid(torch.tensor(divisors).view(2, 1), torch.tensor([0, 1, 1]), columns, coding)
    assert frozen_scales._quantised_as(both, made).tolist() == torch.cat(alone).tolist()


def test_values_that_quantise_to_others_are_accepted_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of a checkpoint equal those in memory; whether they would quantise to the same is not asked."""
    values, _, dequantised = frozen(codings.NF4)
    monkeypatch.setattr(frozen_scales, "_quantised_as", lambda _grid, tensor: tensor + 1)
    compare(values, dequantised, monkeypatch)
