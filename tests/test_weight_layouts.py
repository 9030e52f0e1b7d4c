"""Keys, layouts and files of weights: what is read and compared, which matrices stay in codes, what must fit."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file

from meshwright.axes import Axes
from meshwright.blueprint import Blueprint
from meshwright.errors import LoadError, MismatchedKey, MissingKey
from meshwright.ops.codings import FOUR_BITS, FP8
from meshwright.recipe import Lora, Recipe
from meshwright.sharding import Block, Box, Layout, Param, Piece, Rules, Table, piece, rows_to_write
from meshwright.weights import (
    StoredModel,
    directory,
    four_bits,
    make_files,
    open_source,
    read_config,
    requantise,
    writer,
)
from meshwright.weights import keymap as keymap_module
from meshwright.weights.checksums import Extents
from meshwright.weights.frozen_scales import grid_of
from meshwright.weights.keymap import ADAPTERS, Key, KeyMap, of_table
from meshwright.weights.quant_formats import BLOCK, Scale, also_plain
from meshwright.weights.read_plan import Read, load_bill, plan_reads
from meshwright.weights.reader import Reader, check_keys, choose, chosen
from meshwright.weights.source import Source
from meshwright.weights.writer import Files
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


def test_scales_and_their_matrices_must_be_of_one_version() -> None:
    """A matrix that the source lacks has no file there."""
    files, seen = dict(w="2", w_scale="1", v="2"), list[list[str]]()
    entries: Any = {key: SimpleNamespace(file=file) for key, file in files.items()}
    source: Any = SimpleNamespace(entries=entries, check_unchanged=seen.append)
    scales = {"w": Scale("w_scale", BLOCK), "new": Scale("new_scale", BLOCK)}
    model: Any = SimpleNamespace(spec=SimpleNamespace(table=()), stored={})
    requantise.check_scaled(model, KeyMap({}, {}, source=source, scales=scales))
    assert seen == [["1", "2"]]


def test_the_second_copy_of_a_tied_head_has_scales_of_its_own() -> None:
    whole = Box.whole((2, 3))
    layout = Layout("", (Block(whole, "embed", (2, 3), whole),), (Block(whole, "head", (2, 3), whole),))
    made = Param({"row": 2}, {"col": 3}, (layout,), name="embed.weight")
    keys = {"head": Key("head", "F8_E4M3", (2, 3), "f"), "embed": Key("embed", "F32", (2, 3), "f")}
    keymap = KeyMap({}, keys, scales={"head": Scale("head_scale", BLOCK)})
    mesh = SimpleNamespace(axes=Axes(), coords=Axes().coords(0), rank=1)
    model: Any = SimpleNamespace(
        spec=SimpleNamespace(table=[made], rules=Rules()), mesh=mesh,
        stored={"embed.weight": torch.tensor([[1.0, -7.0, 2.0], [3.0, 0.0, 5.0]])},
    )  # fmt: skip
    with contextlib.ExitStack() as files:
        scan = requantise.BlockScan(keymap, ["head"], files)
    scan.scan(model)
    assert scan.amax["head"].tolist() == [[7.0]]


def test_fp8_has_the_values_that_matmuls_use(tmp_path: Path) -> None:
    """In bfloat16 1.0634 is 1.0625, half between two codes: the even one is taken. In float32 the other is nearer."""
    values, keys = torch.tensor([[448.0, 1.0634]]), {"w": Key("w", "F8_E4M3", (1, 2), "f")}
    keys["w_scale"] = Key("w_scale", "F32", (1, 1), "f")
    for used, expected in ((torch.bfloat16, [448.0, 1.0]), (torch.float32, [448.0, 1.125])):
        keymap = KeyMap({}, keys, scales={"w": Scale("w_scale", BLOCK)}, used=used)
        made = requantise.quantised_tensors(keymap, "w", values)
        assert (made["w"].float().tolist(), made["w_scale"].tolist()) == ([expected], [[1.0]])
        make_files(tmp_path, keymap)
        whole = Box.whole((1, 2))
        param = Param({"row": 1}, {"col": 2}, (Layout("", (Block(whole, "w", (1, 2), whole),)),), name="w")
        with Files(tmp_path, keymap, scales={"w": torch.ones(1, 1)}) as files:
            files.write(Piece(param, whole, 0, 1), values)
        start = keymap.starts["w"]
        assert (tmp_path / "f").read_bytes()[start : start + 2] == bytes(made["w"].view(torch.uint8).flatten().tolist())


def test_scales_of_late_rows_have_the_scales_of_their_block(tmp_path: Path) -> None:
    """NF4 with a scale for each row, and one for each 256 of these scales, whatever rows were read before."""
    absmax, values = torch.tensor([1.0, 10.0, 100.0]), torch.arange(256.0)
    codes = (torch.arange(600) % 251).to(torch.uint8)
    save_file({"s": codes, "n": absmax, "v": values}, tmp_path / "model.safetensors")
    source = open_source(tmp_path)
    scale = Scale("s", (1, 64), "NF4", nested=("n", "v"), offset=0.5)
    entries = {**source.entries, "w": source.entries["s"]._replace(key="w", shape=(600, 64))}
    with Reader(replace(source, entries=entries, scales={"w": scale})) as reader:
        for rows in (range(1, 3), range(254, 258), range(255, 257), range(510, 600), range(600)):
            expected = [codes[row].item() * absmax[row // 256].item() + 0.5 for row in rows]
            assert reader._stored_rows("w", rows).flatten().tolist() == expected


def test_matrices_of_several_stacks_are_numbered_through() -> None:
    """Two experts: three rows of each from one tensor, two from another. NVFP4 divides the scales of each matrix."""
    ours = (Box.whole((2, 3, 16)), Box((0, 3, 0), (2, 5, 16)))
    blocks = [Block(box, key, box.shape, Box.whole(box.shape)) for box, key in zip(ours, "ab", strict=True)]
    made = Param({"expert": 2, "row": 5}, {"col": 16}, (), name="w")
    read: Any = Reader(Source(Path(), {each.key: SimpleNamespace(key=each.key, shape=each.shape) for each in blocks}))
    read._divisor_of = lambda entry, number, _: torch.tensor(float(number) + 10 * (entry.key == "b"))
    layout, coding = Layout("", tuple(blocks)), FOUR_BITS["nvfp4"]
    for box, rows, divisors in (
        (Box.whole((2, 5, 16)), [0, 0, 0, 2, 2, 1, 1, 1, 3, 3], [0, 1, 10, 11]),
        (Box((1, 2, 0), (2, 5, 16)), [0, 1, 1], [1, 11]),
    ):
        numbers, used = four_bits.matrices_of(read, layout, made, box, coding)
        assert (numbers.tolist(), used.flatten().tolist()) == (rows, divisors)


@pytest.mark.parametrize(
    ("first", "rows", "scales"),
    [(0, [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5], [0, 1, 10, 11, 20, 21]),
     (3, [0, 1, 1, 2, 2, 3, 3, 4, 4], [1, 10, 11, 20, 21]), (9, [0, 1, 1], [20, 21])],
)  # fmt: skip
def test_scales_of_several_blocks_follow_each_other(first: int, rows: list[int], scales: list[int]) -> None:
    """Three matrices of four rows are one parameter, and each has two rows of scales. A rank takes what it needs."""
    shape, keys = (4, 6), "abc"
    blocks = [Block(Box((4 * at, 0), (4 * at + 4, 6)), key, shape, Box.whole(shape)) for at, key in enumerate(keys)]
    entries: Any = {key: SimpleNamespace(key=key, shape=shape) for key in keys}
    read: Any = Reader(Source(Path(), entries, scales=dict.fromkeys(keys, Scale("s", (2, 3)))))
    read._scales_of_rows = lambda key, rows: torch.tensor([[10.0 * keys.index(key) + row] * 2 for row in rows])
    made = Param({"row": 12}, {"col": 6}, (), name="w")
    grid = grid_of(made, Box((first, 0), (12, 6)), Layout("", tuple(blocks)), read, FP8)
    assert (grid.rows.tolist(), grid.columns.tolist()) == (rows, [0, 0, 0, 1, 1, 1])
    assert grid.scales.tolist() == [[scale, scale] for scale in scales]


def test_a_new_group_has_the_layout_of_the_trunk() -> None:
    """Experts of a new MTP head are spelled as the experts of the layers are. A group of another name is not."""
    box = Box.whole((2, 3))

    def param(name: str, group: str, optional: bool) -> Param:
        layouts = tuple(Layout(each, (Block(box, f"{name}.{each}", (2, 3), box),)) for each in ("each", "fused"))
        return Param({"row": 2}, {"col": 3}, layouts, group=group, optional=optional, name=name)

    table = Table({
        "up": param("up", "experts", False), "mtp": param("mtp", "mtp.experts", True), "new": param("new", "head", True)
    })  # fmt: skip
    for layout in ("each", "fused"):
        entries: Any = {f"up.{layout}": SimpleNamespace(shape=(2, 3))}
        chosen = {"experts": layout, "mtp.experts": layout, "head": "each"}
        assert choose(table, Source(Path(), entries)) == chosen
        entries["mtp.fused"] = SimpleNamespace(shape=(2, 3))
        assert choose(table, Source(Path(), entries)) == {**chosen, "mtp.experts": "fused"}


@pytest.mark.parametrize(("ranks", "charges"), [
    ((4,), [[], []]), ((4, 5), [[("send", 1)], [("recv", 1)]]), ((5,), [[("send", 1)], [("recv", 1)]]),
    ((5, 6, 7), [[("send", 3)], [("recv", 1)]]), ((6,), [[("send", 1)], []]),
])  # fmt: skip
def test_a_reader_sends_to_all_others_that_store_a_piece(ranks: tuple[int, ...], charges: Any) -> None:
    """It may store nothing of it: a piece of another stage. Ranks 4 to 7 are a node; the bill is that of 4 and of 5."""
    piece = Piece(Param({"row": 2}, {"col": 3}, (), name="w"), Box.whole((2, 3)), 0, 1)
    plan = [Read(piece, Layout("", ()), torch.bfloat16, ranks)]
    bills = [load_bill(plan, rank, range(4, 8)) for rank in (4, 5)]
    assert [[(each.op, each.count) for each in bill] for bill in bills] == charges
    assert {(each.what, each.axes, each.num_bytes) for bill in bills for each in bill} <= {("w", ("node",), 6)}


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


def test_new_weights_are_in_the_layouts_that_are_asked_for() -> None:
    table = Blueprint.of(tiny.of("qwen3_moe")).table
    first, *others = table.groups["experts"]
    assert of_table(table, torch.bfloat16).choice == {"experts": first}
    for layout in (first, *others):
        made = of_table(table, torch.bfloat16, {"experts": layout})
        assert made.choice == {"experts": layout}
        assert {*made.keys} == {key for param in table for key in chosen(param, made.choice).keys}
    assert others


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


@pytest.mark.parametrize("at_a_time", [1, 2, 5])
@pytest.mark.parametrize("rank", [0, 6, 7])
def test_ranks_exchange_until_each_has_its_rows(rank: int, at_a_time: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """36 rows on two replicas of tp=4: five for each rank, and one for rank 7, which takes part as often."""
    axes, spec, name = Axes(replicate=2, tp=4), Blueprint.of(tiny.of("qwen3")).spec, "layers.0.mlp.down.weight"
    whole, param = torch.randn(36, 44), spec.table[name]
    strips = [piece(param, spec.rules, axes, axes.coords(each)).box.slices for each in range(8)]
    rows, calls = [rows_to_write(param, spec.rules, axes, each) for each in range(8)], list[int]()
    group = range(rank // 4 * 4, rank // 4 * 4 + 4)

    def all_to_all(sent: torch.Tensor, outs: list[int], ins: list[int], _: str) -> torch.Tensor:
        windows = [
            slice(*(min(of.lo + len(calls) * at_a_time + more, of.hi) for more in (0, at_a_time))) for of in rows
        ]
        calls.append(rank)
        expected = [whole[strips[rank]][windows[to]].flatten() for to in group]
        assert (sent.tolist(), ins) == (torch.cat(expected).tolist(), [len(part) for part in expected])
        received = [whole[strips[each]][windows[rank]].flatten() for each in group]
        assert outs == [len(part) for part in received]
        return torch.cat(received)

    monkeypatch.setattr(writer, "all_to_all", all_to_all)
    monkeypatch.setattr(writer, "_WINDOW_BYTES", at_a_time * 44 * 4)
    size_of = lambda over: prod(axes.sizes(over))  # noqa: E731 - short
    mesh: Any = SimpleNamespace(axes=axes, rank=rank, coords=axes.coords(rank), size_of=size_of, name_of="-".join)
    written = list(writer.whole_rows(StoredModel(spec, mesh, {name: whole[strips[rank]].contiguous()})))
    assert len(calls) == -(-5 // at_a_time)
    assert torch.equal(torch.cat([values for _, values in written]), whole[rows[rank].lo : rows[rank].hi])
    assert sum(of.hi - of.lo for of, _ in written) == (1 if rank == 7 else 5)
