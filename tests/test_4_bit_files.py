"""Files in NVFP4, MXFP4 and MXFP8, as compressed-tensors writes them: read exactly, kept to the byte, never trained."""

from __future__ import annotations

import contextlib
import functools
import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import preset_name_to_scheme
from torch import Tensor

import meshwright as mw
from meshwright.blueprint import Blueprint
from meshwright.cli import main
from meshwright.engine import model as engine_model
from meshwright.errors import LoadError, MismatchedKey, RankError
from meshwright.ops.codings import NF4
from meshwright.sharding import Block, Box
from meshwright.weights import Reader, bitsandbytes, open_index, open_source, quant_formats, whole_tensors
from meshwright.weights import reader as load
from meshwright.weights.bitsandbytes import State
from meshwright.weights.quant_formats import scales_of
from meshwright.weights.safetensors_header import Entry
from tests import parts, quantised, tiny, trials, worlds
from tests.quantised import FORMS, SIZES, in_groups, quantization_config, tensors, written
from tests.test_four_bits import STATE
from tests.test_fp8_files import bits, from_the_first_row, rewritten, same_bits, sealed
from tests.trials import named, world_of
from tests.words import words

FAMILIES = ("qwen3", "qwen3_5", "qwen3_moe", "qwen3_5_moe")
MESHES: list[dict[str, int]] = [dict(), dict(fsdp=2), dict(tp=2), dict(fsdp=2, ep=2)]
Case = tuple[str, str]
KEY, NAME = "model.layers.0.mlp.down_proj.weight", "layers.0.mlp.down.weight"


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def values(at: Path) -> dict[str, Tensor]:
    """Return the values of a directory in float64, number by number."""
    result, out = tensors(at), {}
    for key, tensor in result.items():
        base, _, last = key.rpartition(".")
        if last == "weight_packed":
            rows = [[E2M1[n] for byte in row for n in (byte & 15, byte >> 4)] for row in tensor.tolist()]
            out[f"{base}.weight"] = scaled(torch.tensor(rows, dtype=torch.float64), result, f"{base}.weight")
        elif last == "weight" and f"{key}_scale" in result:
            out[key] = scaled(tensor.double(), result, key)
        elif not last.endswith("_scale"):
            out[key] = tensor.double()
    return out


def scaled(numbers: Tensor, result: Mapping[str, Tensor], key: str) -> Tensor:
    """Every value is exact in float32; in NVFP4 the scale and the value are rounded to it, as the library does."""
    grid = result[f"{key}_scale"]
    if grid.dtype == torch.uint8:
        by_group = [[2.0 ** (u - 127) for u in row] for row in grid.tolist()]
    else:
        divisor = float(result[f"{key}_global_scale"])
        by_group = (torch.tensor(grid.double().tolist(), dtype=torch.float64) / divisor).float().tolist()
    size = 32 if grid.dtype == torch.uint8 else 16
    each = [[number * row[c // size] for c, number in enumerate(line)]
            for line, row in zip(numbers.tolist(), by_group, strict=True)]  # fmt: skip
    return torch.tensor(each, dtype=torch.float64)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    at = tmp_path_factory.mktemp("4bit")
    plain = functools.cache(lambda family: tiny.directory(at / family, family, **SIZES, **tiny.two_layers(family)))
    return functools.cache(lambda family, form: in_groups(plain(family), at / f"{family}, {form}", form))


expected = functools.cache(values)


@pytest.mark.parametrize("form", FORMS)
def test_our_reading_is_the_library_s(directory: Callable[[str, str], Path], form: str) -> None:
    """The library rounds 4-bit values to bfloat16."""
    at = directory("qwen3", form)
    result, reader = tensors(at), BaseCompressor.get_value_from_registry(FORMS[form])
    base = KEY.removesuffix("weight")
    module = {key.removeprefix(base): tensor for key, tensor in result.items() if key.startswith(base)}
    reference = reader.decompress(module, preset_name_to_scheme(form, ["Linear"]))["weight"]
    assert same_bits(reference, expected(at)[KEY].float().to(reference.dtype))
    if form != "NVFP4":
        assert torch.equal(expected(at)[KEY].float().double(), expected(at)[KEY])


def cases_on(mesh: Mapping[str, int]) -> list[Case]:
    """Every format on every mesh; a family of its own, or all of them."""
    families = FAMILIES if parts.ALL else [FAMILIES[MESHES.index(dict(mesh))]]
    families = ["qwen3_5"] if mesh == dict(tp=2) and not parts.ALL else families
    return [(family, form) for family in families for form in FORMS if "ep" not in mesh or "moe" in family]


def untouched(at: Path, mesh: Mapping[str, int], out: Path) -> dict[str, Any]:
    model = mw.load(at, trials.mesh_of(dict(mesh)), dtype=torch.float32, train="*norm*")
    assert mw.check_weights(model).ok
    # MXFP8, and what tp cuts within a group, are stored as values.
    assert all(model.stored()[name].dtype == torch.uint8 for name in model.codings)
    assert {coding.name for coding in model.codings.values()} <= {"nvfp4", "mxfp4"}
    mw.export(model, out)
    keys = [key for key in model.keymap.keys.values() if key.name not in model.keymap.carried]
    stored = model.stored_model(model.values())
    whole = {key.name: t.clone() for key, t in whole_tensors(stored, model.keymap, keys, dtypes=model.kept)}
    streamed = {name: sealed(tensor) for name, tensor in mw.stream(model, format="source")}
    return {"values": whole, "streamed": streamed, "bf16": mw.gather(model)}


@pytest.mark.parametrize("mesh", MESHES if parts.ALL else [dict(), *MESHES[2:]], ids=named)
def test_loaded_exactly_and_exported_to_the_byte(
    directory: Callable[[str, str], Path], tmp_path: Path, mesh: dict[str, int]
) -> None:
    cases = cases_on(mesh)
    acts = {case: functools.partial(untouched, directory(*case), mesh, tmp_path / " ".join(case)) for case in cases}
    for case, answers in worlds.in_turn(world_of(mesh), acts).items():
        at, result = directory(*case), answers[0]
        wanted, files = expected(at), tensors(at)
        assert result["values"].keys() == wanted.keys(), case
        for key, whole in wanted.items():
            assert same_bits(result["values"][key].float(), whole.float()), (case, key)
            assert same_bits(result["bf16"][key], whole.float().to(result["bf16"][key].dtype)), (case, key)
        assert result["streamed"].keys() == files.keys(), case
        assert all(result["streamed"][key][0] == sealed(files[key])[0] for key in files), case
        assert all(torch.equal(result["streamed"][key][1], bits(files[key])) for key in files), case
        for file in at.iterdir():
            assert (tmp_path / " ".join(case) / file.name).read_bytes() == file.read_bytes(), (case, file.name)


def trained(at: Path, mesh: Mapping[str, int], out: Path) -> dict[str, int]:
    model = mw.load(at, trials.mesh_of(dict(mesh)), dtype=torch.float32, train=["*norm*", "*router*"])
    read = model.bytes_read
    engine = mw.Engine(model, lr=1e-2)
    engine.step(tiny.batches(model.mesh.data_rank)[:1])
    mw.export(model, out / "as it was")
    mw.export(model, out / "plain", dtype=torch.float32)
    mw.save(engine, out / "steps")
    before = {name: tensor.clone() for name, tensor in model.stored().items()}
    again = mw.Engine(mw.load(at, model.mesh, dtype=torch.float32, train=["*norm*", "*router*"]), lr=1e-2)
    mw.resume(again, out / "steps")
    assert all(same_bits(tensor, before[name]) for name, tensor in again.model.stored().items())
    mw.export(again.model, out / "resumed")
    return {"read": read, "frozen": len(before) - len(model.trainable)}


TRAINED = [(case, mesh) for case in (("qwen3_5_moe", "NVFP4"), ("qwen3_moe", "MXFP8"))
           for mesh in (dict(fsdp=2, ep=2), dict())]  # fmt: skip


# Every third of four: each format on a mesh, and each mesh with a format.
@pytest.mark.parametrize(
    ("case", "mesh"), parts.every(3, TRAINED), ids=lambda part: named(part) if isinstance(part, dict) else str(part)
)
def test_what_is_frozen_stays(
    directory: Callable[[str, str], Path], tmp_path: Path, mesh: dict[str, int], case: Case
) -> None:
    """Frozen parameters stay through training, saves and resumes."""
    at = directory(*case)
    worlds.run(world_of(mesh), trained, at, mesh, tmp_path)
    before, after = tensors(at), tensors(tmp_path / "as it was")
    assert before.keys() == after.keys()
    moved = {key for key in before if not same_bits(before[key], after[key])}
    assert moved
    assert all("norm" in key or "mlp.gate.weight" in key for key in moved), moved
    config, as_it_was = (json.loads((p / "config.json").read_text()) for p in (at, tmp_path / "as it was"))
    assert config == as_it_was
    for name in ("plain", "steps/step-000001"):
        assert "quantization_config" not in json.loads((tmp_path / name / "config.json").read_text())
        assert tensors(tmp_path / name).keys() == expected(at).keys()
    plain = tensors(tmp_path / "plain")
    assert all(same_bits(plain[key], expected(at)[key].float()) for key in expected(at).keys() - moved)
    for file in (tmp_path / "as it was").iterdir():
        assert (tmp_path / "resumed" / file.name).read_bytes() == file.read_bytes()


def bytes_read(at: Path) -> int:
    """Load on a rank that stores half of each matrix."""
    return mw.load(at, trials.mesh_of(dict(fsdp=2)), train=[]).bytes_read


def test_a_rank_reads_its_bytes_alone(directory: Callable[[str, str], Path]) -> None:
    """Global scales are the exception: both ranks may need them."""
    acts = {form: functools.partial(bytes_read, directory("qwen3", form)) for form in FORMS}
    for form, ranks in worlds.in_turn(2, acts).items():
        files = tensors(directory("qwen3", form))
        size = sum(tensor.nbytes for key, tensor in files.items() if not key.endswith("global_scale"))
        num = sum(key.endswith("weight_global_scale") for key in files)
        assert size <= sum(ranks) - 4 * num <= size + 4 * num, form


@pytest.mark.parametrize("form", FORMS)
def test_any_box(directory: Callable[[str, str], Path], form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may begin and end within a byte, and within a group; short strips may be read together or each alone."""
    at = directory("qwen3", form)
    source = open_source(at).scaled_by(json.loads((at / "config.json").read_text()))
    entry, wanted = source.entries[KEY], expected(at)[KEY].float()
    whole = Box.whole(entry.shape)
    for together in (True, False):
        monkeypatch.setattr(load, "_SHORT_BYTES", (64 << 10) * together)
        with Reader(source) as reader:
            for first, last in ((0, 96), (1, 96), (0, 95), (7, 8), (15, 17), (31, 66), (33, 63), (48, 96)):
                part = Box((3, first), (61, last))
                result = reader.read(entry, Block(whole, KEY, entry.shape, whole), part)
                assert same_bits(result, wanted[part.slices]), (together, part)


def refuses(at: Path, plain: Path) -> None:
    mesh = mw.Mesh(device="cpu")
    for train in ("**", "layers.1.*", ["*norm*", NAME]):
        with pytest.raises(mw.ConfigError, match=r"_proj\.weight is NVFP4.*train=\['\*norm\*'") as e:
            mw.load(at, mesh, train=train)
        assert "FP8" in str(e.value)
    mw.load(plain, mesh)  # the same model, which fits


def not_read(*_: Any) -> int:
    raise AssertionError("weights were read")


def test_training_is_refused_before_anything_is_read(
    directory: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_model, "fill", not_read)
    with pytest.raises(RankError, match="weights were read"):
        worlds.run(1, refuses, directory("qwen3", "NVFP4"), directory("qwen3", "NVFP4").parent / "qwen3")


def changed(at: Path, out: Path) -> None:
    """Change a number on the second rank alone."""
    mesh = mw.Mesh(fsdp=2, device="cpu")
    model = mw.load(at, mesh, dtype=torch.float32, train=[])
    if mesh.rank == 1:
        model.stored()[NAME][-1, -1] += 1
    with pytest.raises(mw.MeshwrightError, match=r"down_proj\.weight has changed.*MXFP8.*dtype="):
        mw.export(model, out)
    assert not out.exists()
    mw.export(model, out, dtype=torch.float32)


def test_what_changed_is_not_written_as_it_was(directory: Callable[[str, str], Path], tmp_path: Path) -> None:
    at = directory("qwen3", "MXFP8")
    worlds.run(2, changed, at, tmp_path / "out")
    assert int((tensors(tmp_path / "out")[KEY] != expected(at)[KEY].float()).sum()) == 1


def in_fp8(at: Path, out: Path) -> None:
    mw.export(mw.load(at, mw.Mesh(device="cpu"), dtype=torch.float32, train=[]), out, format="fp8")


def test_it_may_be_written_in_fp8(tmp_path: Path) -> None:
    sizes = dict(hidden_size=128, intermediate_size=128, head_dim=32)
    at = in_groups(tiny.directory(tmp_path / "plain", "qwen3", **sizes), tmp_path / "q", "NVFP4")
    worlds.run(1, in_fp8, at, tmp_path / "out")
    result = tensors(tmp_path / "out")
    assert result.keys() == {
        *expected(at),
        *(f"{key}_scale_inv" for key in expected(at) if f"{key}_scale_inv" in result),
    }
    numbers, grid = quantised.quantise(expected(at)[KEY].float(), (128, 128), torch.float32)
    assert same_bits(result[KEY], numbers)
    assert same_bits(result[KEY + "_scale_inv"], grid)


def kept(at: Path, out: Path) -> None:
    model = mw.load(at, mw.Mesh(device="cpu"), train=[])
    mw.export(model, out / "as it was")
    mw.export(model, out / "plain", dtype=torch.bfloat16)


def test_what_the_model_has_no_part_for(directory: Callable[[str, str], Path], tmp_path: Path) -> None:
    extra = written("mtp.fc.weight", torch.randn(8, 64), "NVFP4")
    at = rewritten(directory("qwen3_5", "NVFP4"), tmp_path / "m", lambda config, files: files.update(extra))
    worlds.run(1, kept, at, tmp_path)
    before, after = tensors(at), tensors(tmp_path / "as it was")
    assert before.keys() == after.keys()
    assert all(same_bits(tensor, after[key]) for key, tensor in before.items())
    plain = tensors(tmp_path / "plain")
    assert plain.keys() == values(at).keys()
    assert same_bits(plain["mtp.fc.weight"], values(at)["mtp.fc.weight"].float().bfloat16())


Files = dict[str, Tensor]
PACKED, SCALE, GLOBAL = KEY + "_packed", KEY + "_scale", KEY + "_global_scale"


def change_weights(config: dict[str, Any], **changes: Any) -> None:
    config["quantization_config"]["config_groups"]["group_0"]["weights"].update(changes)


def of(config: dict[str, Any], **changes: Any) -> None:
    config["quantization_config"].update(changes)


BROKEN: dict[str, tuple[Callable[[dict[str, Any], Files], object], type, str]] = {
    "no scale": (lambda c, f: f.pop(SCALE), MismatchedKey, f"{PACKED} is U8, but its {SCALE} is missing"),
    "no global scale": (lambda c, f: f.pop(GLOBAL), MismatchedKey, f"{PACKED} is U8, but its {GLOBAL} is missing"),
    "no numbers": (lambda c, f: f.pop(PACKED), LoadError, "down_proj"),
    "a grid of groups of 32": (lambda c, f: f.update({SCALE: f[SCALE][:, ::2].clone()}), MismatchedKey,
        "is (64, 3), but model.layers.0.mlp.down_proj.weight (64, 96) has (64, 6) blocks of 1 x 16"),
    "bytes": (lambda c, f: f.update({SCALE: bits(f[SCALE]).view(64, 6).clone()}), MismatchedKey,
        "U8; scales must be F8_E4M3"),
    "two global scales": (lambda c, f: f.update({GLOBAL: torch.ones(2)}), MismatchedKey, "F32 (2,), but must be one"),
    "narrow": (
        lambda c, f: f.update({PACKED: f[PACKED][:, :40].clone(), SCALE: f[SCALE][:, :5].clone()}), MismatchedKey,
        "down_proj.weight is (64, 80), but layers.0.mlp.down.weight needs (64, 96)"),
    "twice": (lambda c, f: f.update({KEY: torch.ones(64, 96)}), LoadError, "remove one of them"),
    "no config": (lambda c, f: c.pop("quantization_config"), LoadError, "has no model.layers.0.self_attn.q_proj"),
    "groups of 64": (lambda c, f: change_weights(c, group_size=64), LoadError, "group_size 64"),
    "two formats": (lambda c, f: c["quantization_config"]["config_groups"].update(
        group_1=quantization_config("MXFP4")["config_groups"]["group_0"] | {"format": FORMS["MXFP4"]}),
        LoadError, "2 different"),
}  # fmt: skip


def test_what_is_refused(directory: Callable[[str, str], Path], tmp_path: Path) -> None:
    acts = {
        name: functools.partial(refused, rewritten(directory("qwen3", "NVFP4"), tmp_path / name, BROKEN[name][0]))
        for name in BROKEN
    }
    for name, ((kind, message),) in worlds.in_turn(1, acts).items():
        assert issubclass(kind, BROKEN[name][1]), (name, kind, message)
        assert BROKEN[name][2] in message, (name, message)


def refused(at: Path) -> tuple[type, str]:
    with pytest.raises(mw.MeshwrightError) as error:
        mw.load(at, mw.Mesh(device="cpu"), train=[])
    return type(error.value), str(error.value)


def high_first(packed: Tensor, **_: bool) -> Tensor:
    return right_unpacked(packed.bitwise_left_shift(4) | packed.bitwise_right_shift(4))


def multiplied(self: Reader, key: str) -> Tensor:
    return 1 / right_divisor(self, key)


def groups_of_32(view: Tensor, shape: Any, scale: quant_formats.Scale) -> quant_formats.Places:
    return right_places(view, shape, quant_formats.Scale(scale.key, (1, 32)))


right_places, right_unpacked, right_divisor = quant_formats.Places.of, quant_formats.unpacked, Reader._divisor
PLANTED: dict[str, tuple[Any, str, Any]] = {
    "the high four bits first": (load, "unpacked", high_first),
    "the global scale multiplies": (Reader, "_divisor", multiplied),
    "scales of other groups": (quant_formats.Places, "of", staticmethod(groups_of_32)),
    "scales of the first rows": (quant_formats.Places, "of", staticmethod(from_the_first_row)),
}


def compared(at: Path, plant: str) -> bool:
    where, name, wrong = PLANTED[plant]
    right = vars(where)[name]
    setattr(where, name, wrong)
    try:
        return mw.check_weights(mw.load(at, trials.mesh_of(dict(fsdp=2)), train=[])).ok
    finally:
        setattr(where, name, right)


def test_planted_bugs_are_caught(directory: Callable[[str, str], Path]) -> None:
    """check_weights reads the files in its own way."""
    at = directory("qwen3", "NVFP4")
    result = worlds.in_turn(2, {plant: functools.partial(compared, at, plant) for plant in PLANTED})
    assert not any(any(answers) for answers in result.values()), result


@pytest.mark.parametrize(("name", "option"), [("qwen3_5", "--weights"), ("qwen3", "--full")])
def test_the_command(
    directory: Callable[[str, str], Path], capsys: pytest.CaptureFixture[str], name: str, option: str
) -> None:
    """It trains what can be trained."""
    at = directory(name, "NVFP4")
    more = ["--mesh", "fsdp=2", "--dtypes", "float32"] if option == "--full" else ["--mesh", "tp=2"]
    assert main(["verify", str(at), *more, option, "--json"]) == 0
    assert not any(any(run["oracles"].values()) for run in json.loads(capsys.readouterr().out)["runs"])


def test_an_index_alone_tells_how_files_spell_it(directory: Callable[[str, str], Path], tmp_path: Path) -> None:
    """No header says what is packed."""
    at = directory("qwen3_moe", "NVFP4")
    keys = dict.fromkeys(tensors(at), "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": keys}))
    result = Blueprint.of(json.loads((at / "config.json").read_text()), open_index(tmp_path))
    assert result.keymap.choice == {"experts": "per-expert"}


@pytest.mark.parametrize(
    ("nested", "dtype", "message"),
    [(False, "F32", ""), (True, "U8", ""), (False, "U8", "is U8, and the files hold no scales of it"),
     (True, "F32", "is F32, and the files hold scales of it")],
)  # fmt: skip
def test_scales_of_nf4_are_codes_where_they_have_scales(nested: bool, dtype: str, message: str) -> None:
    entry = lambda key, dtype, shape: Entry(key, "a", dtype, shape, 0, 1)  # noqa: E731 - short
    entries = {"w": entry("w", quant_formats.PACKED, (3, 64)), "w.absmax": entry("w.absmax", dtype, (3,))}
    config = dict(quantization_config=dict(quant_method="bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type="nf4"))
    with pytest.raises(MismatchedKey, match=message) if message else contextlib.nullcontext():
        scales_of(config, entries, {"w": State((3, 64), nested)})


STATE_OF_NF4 = dict(quant_type="nf4", blocksize=64, shape=[3, 128])
NESTED = dict(nested_blocksize=256, nested_offset=0.25)


@pytest.mark.parametrize(
    ("fields", "nested", "shape", "expected"),
    [
        ({}, "", (192, 1), State((3, 128))), (NESTED, "am", (192, 1), State((3, 128), True, 0.25)),
        (dict(nested_blocksize=256), "am", (192, 1), State((3, 128), True)),
        (dict(shape=[4, 96]), "", (192, 1), r"is \(4, 96\) in NF4; only matrices whose columns are a multiple of 64"),
        (dict(shape=[384]), "", (192, 1), "in NF4"), (dict(shape=[1, 3, 128]), "", (192, 1), "in NF4"),
        ({}, "", (96, 2), "in NF4"), ({}, "", (191, 1), "in NF4"),
        (dict(blocksize=128), "", (192, 1), "other than"), (dict(quant_type="fp4"), "", (192, 1), "other than"),
        (dict(nested_blocksize=128), "am", (192, 1), "other than"), (dict(shape="x"), "", (192, 1), "fetch it again"),
        (NESTED, "a", (192, 1), "w.nested_quant_map is missing"), (NESTED, "m", (192, 1), "w.nested_absmax is missing"),
    ],
)  # fmt: skip
def test_states_of_nf4(fields: dict[str, Any], nested: str, shape: tuple[int, ...], expected: Any) -> None:
    """Blocks of other sizes, or blocks that cross rows, would be read as other values."""
    ends = dict(zip("am", bitsandbytes.NESTED, strict=True))
    keys = ["w", "w.absmax", "w.quant_map", f"w{STATE}", *(f"w{ends[each]}" for each in nested)]
    entries = {key: Entry(key, "f", "U8", shape, 0, 1) for key in keys}
    content = {f"w{STATE}": json.dumps(STATE_OF_NF4 | fields).encode()}

    def read(entry: Entry) -> bytes:
        return content.get(entry.key, struct.pack("<16f", *NF4.table))

    if isinstance(expected, State):
        assert bitsandbytes.states_of(entries, read) == {"w": expected}
        content["w.quant_map"] = struct.pack("<16f", *NF4.table[:15], 0.5)
        expected = "values of its codes, other than"
    with pytest.raises(LoadError, match=expected):
        bitsandbytes.states_of(entries, read)


@pytest.mark.parametrize(
    ("shape", "scales", "fits"),
    [
        ((128, 128), (1, 1), True), ((128, 128), (1,), True), ((128, 128), (), True), ((128, 128), (2,), False),
        ((128, 128), (1, 2), False), ((256, 128), (2, 1), True), ((256, 128), (1,), False), ((256, 128), (), False),
        ((256, 128), (2,), False), ((256, 128), (1, 2), False), ((129, 128), (2, 1), True), ((129, 128), (1, 1), False),
    ],
)  # fmt: skip
def test_scales_of_one_block_may_have_fewer_dims(shape: tuple[int, ...], scales: tuple[int, ...], fits: bool) -> None:
    """Exporters write the scale of an FP8 matrix that is one block as one number."""
    key = "w.weight_scale_inv"
    entries = {"w.weight": Entry("w.weight", "a", "F8_E4M3", shape, 0, 1), key: Entry(key, "a", "F32", scales, 0, 1)}
    config = dict(quantization_config=dict(quant_method="fp8", weight_block_size=[128, 128]))
    if fits:
        assert [*scales_of(config, entries)] == ["w.weight"]
        return
    with pytest.raises(MismatchedKey, match=words("w.weight_scale_inv is", "blocks of 128 x 128")):
        scales_of(config, entries)
