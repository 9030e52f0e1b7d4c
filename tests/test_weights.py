"""Loading reads what a rank owns and nothing else; exporting gives back every byte, from any mesh, or nothing."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import meshwright as mw
from meshwright.errors import RankError
from meshwright.verify import Recorder
from meshwright.weights import open_source, raw_tensor
from tests import parts, tiny, trials, worlds
from tests.words import words

MESHES = trials.MESHES if parts.ALL else [dict(), dict(fsdp=2), dict(tp=4)]
ALL = [*MESHES, *(trials.EXPERT_MESHES if parts.ALL else [dict(fsdp=2, tp=2, ep=4), dict(cp=2, ep=2)])]
LAYOUTS = ["per-expert", "fused"]
EXPORTED = ["qwen3", "qwen3_tied", "qwen3_5"]
# Pairs of a mesh and a layout of experts, or a mesh and another family: `make test` has each in a few.
OF_EXPERTS = [(trials.named(mesh), layout) for n, mesh in enumerate(ALL) for layout in parts.every(2, LAYOUTS, n + 1)]
OF_OTHERS = [
    (trials.named(mesh), name)
    for mesh in MESHES
    for name in (EXPORTED if parts.ALL else {"fsdp=2": ["qwen3_tied", "qwen3_5"], "tp=4": ["qwen3_5"]}.get(
        trials.named(mesh), []))
]  # fmt: skip
HYBRID = [trials.named(mesh) for mesh in MESHES if (trials.named(mesh), "qwen3_5") in OF_OTHERS]


def load_and_count(source: Path, mesh: dict[str, int], out: Path) -> tuple[tuple[int, int, int], bool]:
    """Collectives, bytes read, bytes that this rank owns in the source's dtypes; and whether an export changed none."""
    there = trials.mesh_of(mesh)
    with Recorder() as recorder:
        model = mw.load(source, there)
    bits = {key: torch.finfo(dtype).bits for key, dtype in _dtypes(source).items()}
    sizes = {name: bits[key] // 8 for key, made_of in _made_of(model).items() for name in made_of}
    owned = sum(piece.numel * sizes[name] for name, piece in model.pieces.items())
    return (len(recorder.collectives), model.bytes_read, owned), unchanged_by_export(model, out)


def _made_of(model: mw.Model) -> dict[str, list[str]]:
    from meshwright.weights import blocks_by_key

    return {k: [p.name for p, _ in parts] for k, parts in blocks_by_key(model.table, model.keymap.choice).items()}


def _dtypes(source: Path) -> dict[str, torch.dtype]:
    return {k: v.dtype for k, v in load_file(source / "model.safetensors").items()}


def load_and_export(source: Path, mesh: dict[str, int], out: Path) -> bool:
    return unchanged_by_export(mw.load(source, trials.mesh_of(mesh)), out)


def unchanged_by_export(model: mw.Model, out: Path) -> bool:
    before = {name: t.clone() for name, t in model.stored().items()}
    mw.export(model, out)
    return all(torch.equal(before[name], t) for name, t in model.stored().items())


def same_files(source: Path, out: Path) -> None:
    for path in sorted(source.glob("*.safetensors")):
        assert (out / path.name).read_bytes() == path.read_bytes(), f"{path.name} differs"
    assert (out / "config.json").read_bytes() == (source / "config.json").read_bytes()
    assert {p.name for p in out.iterdir()} == {p.name for p in source.iterdir()}


FEW = dict(num_experts=8 if parts.ALL else 4)
Source = tuple[str, str | None]  # a family, and the layout of its experts


@dataclass(frozen=True)
class Moved:
    """Bytes that each rank read of a source on a mesh, and its export."""

    source: Path
    out: Path
    read: list[tuple[int, int, int]]
    kept: list[bool]


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[str, Source]], Moved]:
    """All sources that are moved on a mesh share a world."""
    at = tmp_path_factory.mktemp("moved")
    experts: list[Source] = [("qwen3_moe", layout) for layout in LAYOUTS]
    sources = {
        (name, layout): tiny.directory(
            at / f"{name}-{layout}", name, dtype=torch.bfloat16, layout=layout, **(FEW if layout else {})
        )
        for name, layout in [*experts, *((name, None) for name in EXPORTED)]
    }
    meshes = {trials.named(mesh): mesh for mesh in ALL}
    wanted = [*((mesh, ("qwen3_moe", layout)) for mesh, layout in OF_EXPERTS), *((m, (n, None)) for m, n in OF_OTHERS)]
    groups = [[case for case in wanted if case[0] == name] for name in meshes]

    def move(group: Sequence[tuple[str, Source]]) -> dict[tuple[str, Source], Moved]:
        mesh, out = meshes[group[0][0]], {case: at / "-".join(map(str, (case[0], *case[1]))) for case in group}
        cases = {case: partial(load_and_count, sources[case[1]], mesh, out[case]) for case in group}
        result = worlds.in_turn(trials.world_of(mesh), cases)
        of_ranks = {case: map(list, zip(*ranks, strict=True)) for case, ranks in result.items()}
        return {case: Moved(sources[case[1]], out[case], *each) for case, each in of_ranks.items()}

    return worlds.Shared(groups, move)


def reads_its_own(of: Moved, mesh: str) -> None:
    """Ranks read whole rows of what tp cuts by columns: short strips are read with the bytes between them."""
    parts = 1 if "tp=" not in mesh else int(mesh.split("tp=")[1][0])
    for collectives, read, owned in of.read:
        assert collectives == 0
        assert owned <= read <= (1.02 if parts == 1 else parts) * owned


@pytest.mark.parametrize(("mesh", "layout"), OF_EXPERTS)
def test_reads_its_own_bytes_without_collectives(moved: Any, mesh: str, layout: str) -> None:
    reads_its_own(moved((mesh, ("qwen3_moe", layout))), mesh)


@pytest.mark.parametrize("mesh", HYBRID)
def test_reads_its_own_bytes_of_a_hybrid(moved: Any, mesh: str) -> None:
    reads_its_own(moved((mesh, ("qwen3_5", None))), mesh)


def is_the_source(of: Moved) -> None:
    assert all(of.kept)
    same_files(of.source, of.out)


@pytest.mark.parametrize(("mesh", "layout"), OF_EXPERTS)
def test_export_of_experts_is_the_source(moved: Any, mesh: str, layout: str) -> None:
    is_the_source(moved((mesh, ("qwen3_moe", layout))))


@pytest.mark.parametrize(("mesh", "name"), OF_OTHERS)
def test_export_is_the_source(moved: Any, mesh: str, name: str) -> None:
    is_the_source(moved((mesh, (name, None))))


def test_tied_head_stored_twice(tmp_path: Path) -> None:
    source = tiny.directory(tmp_path / "m", "qwen3_tied", layout="twice")
    assert all(worlds.run(2, load_and_export, source, dict(tp=2), tmp_path / "out"))
    same_files(source, tmp_path / "out")


def test_tied_head_stored_twice_and_different(tmp_path: Path) -> None:
    source = tiny.directory(tmp_path / "m", "qwen3_tied", layout="twice")
    changed(source, lambda tensors: tensors["lm_head.weight"].add_(1))
    with pytest.raises(
        RankError, match=words("LoadError", r"lm_head\.weight", r"model\.embed_tokens\.weight", r"config\.json")
    ):
        worlds.run(1, load_and_export, source, {}, tmp_path / "out")


def test_carried_tensors_and_small_files_survive(tmp_path: Path) -> None:
    """A sharded source with an index, names of its own, mtp tensors that we do not train, and a tokenizer."""
    source = tiny.directory(tmp_path / "m", "qwen3_5", dtype=torch.bfloat16, **tiny.TWO_LAYERS)
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    extra = {"mtp.fc.weight": torch.randn(3, 5).bfloat16(), "mtp.count": torch.tensor(7), "mtp.none": torch.zeros(0, 4)}
    keys = sorted(tensors)
    parts = {
        "a.safetensors": {k: tensors[k] for k in keys[::2]},
        "b.safetensors": {k: tensors[k] for k in keys[1::2]} | extra,
    }
    for file, part in parts.items():
        save_file(part, source / file)
    weight_map = {k: file for file, part in parts.items() for k in part}
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    (source / "tokenizer.json").write_text("{}")
    worlds.run(2, load_and_export, source, dict(fsdp=2), tmp_path / "out")
    same_files(source, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"] == weight_map


CARRIED = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "C64": 64, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
           "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4, "I64": 64, "I32": 32, "I16": 16,
           "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8}  # fmt: skip


def _append(path: Path, extra: dict[str, tuple[str, list[int], bytes]]) -> None:
    """Add tensors of any dtype behind those of a file."""
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    for key, (dtype, shape, values) in extra.items():
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(values)]}
        data += values
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_every_dtype_of_the_format_is_carried(tmp_path: Path) -> None:
    """Integers, flags, scalars, empty tensors, float8 and what torch has no dtype for: byte for byte."""
    source = tiny.directory(tmp_path / "m", "qwen3_5", dtype=torch.bfloat16, **tiny.TWO_LAYERS)
    extra = {f"mtp.{d}": (d, [2, 4], bytes(range(7, 7 + bits))) for d, bits in CARRIED.items()}
    extra |= {f"mtp.{d}.empty": (d, [3, 0], b"") for d in CARRIED}
    extra |= {f"mtp.{d}.scalar": (d, [], b"\x01" * (bits // 8)) for d, bits in CARRIED.items() if bits % 8 == 0}
    _append(source / "model.safetensors", extra)
    worlds.run(2, load_and_export, source, dict(fsdp=2), tmp_path / "out")
    same_files(source, tmp_path / "out")
    result = open_source(source)
    assert {e.dtype for e in result.entries.values()} == set(CARRIED)
    for key, (_, _, values) in extra.items():
        assert bytes(raw_tensor(result, key).flatten().contiguous().view(torch.uint8).tolist()) == values


@pytest.mark.parametrize("mesh", parts.every(2, [dict(tp=2), {}]), ids=trials.named)
def test_dtypes_mixed_key_by_key(tmp_path: Path, mesh: dict[str, int]) -> None:
    """One parameter of ours may have two: gate in bfloat16, up in float32."""
    source = tiny.directory(tmp_path / "m", "qwen3_5", dtype=torch.bfloat16, **tiny.TWO_LAYERS)
    kinds = [torch.float32, torch.bfloat16, torch.float16]
    changed(source, lambda t: t.update({k: v.to(kinds[i % 3]) for i, (k, v) in enumerate(sorted(t.items()))}))
    assert all(worlds.run(trials.world_of(mesh), load_and_export, source, mesh, tmp_path / "out"))
    assert _keys(source) == _keys(tmp_path / "out")


def _keys(directory: Path) -> dict[str, tuple[torch.dtype, bytes]]:
    result = load_file(directory / "model.safetensors")
    return {k: (v.dtype, v.flatten().view(torch.uint8).numpy().tobytes()) for k, v in result.items()}


def conditional(at: Path, name: str) -> Path:
    """A source of conditional generation: text under `model.language_model.`, a tower and only some of the mtp."""
    few = {**tiny.TWO_LAYERS, **(FEW if "moe" in name else {})}
    source = tiny.directory(at, name, dtype=torch.bfloat16, **few)
    text = json.loads((source / "config.json").read_text())
    config = {"model_type": text["model_type"].removesuffix("_text"), "text_config": {**text, "mtp_num_layers": 1}}
    (source / "config.json").write_text(json.dumps({**config, "vision_config": {"depth": 1}, "dtype": "bfloat16"}))
    tensors = load_file(source / "model.safetensors")
    moved = {k.replace("model.", "model.language_model.", 1): v for k, v in tensors.items()}
    moved |= {"model.visual.patch_embed.proj.weight": torch.randn(4, 3, 2, 2), "mtp.norm.weight": torch.ones(36)}
    save_file(moved, source / "model.safetensors")
    return source


@pytest.mark.parametrize(
    ("name", "mesh"),
    parts.every(2, [("qwen3_5", dict(tp=2)), ("qwen3_5", {}), ("qwen3_5_moe", dict(fsdp=2, ep=2))]),
    ids=str,
)
def test_conditional_generation(tmp_path: Path, name: str, mesh: dict[str, int]) -> None:
    source = conditional(tmp_path / "m", name)
    assert all(worlds.run(trials.world_of(mesh), load_and_export, source, mesh, tmp_path / "out"))
    same_files(source, tmp_path / "out")


def test_export_in_another_dtype(tmp_path: Path) -> None:
    source = tiny.directory(tmp_path / "m", "qwen3_5")
    worlds.run(1, lambda: mw.export(mw.load(source), tmp_path / "out", dtype=torch.bfloat16))
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        dtypes = {k: file.get_tensor(k).dtype for k in file.keys()}  # noqa: SIM118 - no dict
    exact = ("A_log", "dt_bias", "linear_attn.norm.weight")
    assert {d for k, d in dtypes.items() if k.endswith(exact)} == {torch.float32}, "never rounded"
    assert {d for k, d in dtypes.items() if not k.endswith(exact)} == {torch.bfloat16}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_export_through_a_link_and_over_an_empty_directory(tmp_path: Path) -> None:
    source = tiny.directory(tmp_path / "m", "qwen3")
    (tmp_path / "empty").mkdir(0o700)
    for name, to in (("link", "empty"), ("dangling", "new")):
        (tmp_path / name).symlink_to(tmp_path / to)
        worlds.run(1, load_and_export, source, {}, tmp_path / name)
        assert (tmp_path / name).is_symlink()
        same_files(source, tmp_path / to)
    assert {p.name for p in tmp_path.iterdir()} == {"m", "empty", "new", "link", "dangling"}
    assert (tmp_path / "empty").stat().st_mode & 0o777 == 0o700


def initialised(config: Path, mesh: dict[str, int]) -> dict[str, torch.Tensor]:
    return mw.gather(mw.init(config, trials.mesh_of(mesh), seed=3))


@pytest.mark.parametrize("name", ["qwen3_5_moe", *(["qwen3_moe", "qwen3_5"] if parts.ALL else [])])
def test_init_does_not_depend_on_the_mesh(tmp_path: Path, name: str) -> None:
    source = tiny.directory(tmp_path / "m", name, **({} if parts.ALL else {**tiny.TWO_LAYERS, **FEW}))
    (source / "model.safetensors").unlink()
    one = worlds.run(1, initialised, source, {})[0]
    meshes = {str(mesh): mesh for mesh in (dict(tp=2), dict(fsdp=2), dict(replicate=2))}
    cases = {name: partial(initialised, source, mesh) for name, mesh in meshes.items()}
    for many, _ in worlds.in_turn(2, cases).values():
        assert all(torch.equal(one[k], many[k]) for k in one)
        assert set(one) == set(many)
    matrices = [v.flatten() for v in one.values() if v.ndim > 1 and v.numel() > 100]
    assert all(not torch.equal(a[:50], b[:50]) for i, a in enumerate(matrices) for b in matrices[:i])


def changed(source: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, source / "model.safetensors")


def export_after(source: Path, out: Path, change: Callable[[Path], object], **options: torch.dtype) -> None:
    model = mw.load(source)
    change(source)
    mw.export(model, out, **options)


def test_a_source_that_changed_is_not_read_again(tmp_path: Path) -> None:
    """Carried tensors are copied from it: by old offsets they would be other tensors' bytes."""
    source = tiny.directory(tmp_path / "m", "qwen3_5")
    changed(source, lambda tensors: tensors.update({"mtp.fc.weight": torch.ones(3, 5)}))
    again = lambda at: changed(at, lambda tensors: tensors.update({"mtp.a": torch.zeros(7)}))  # noqa: E731
    with pytest.raises(RankError, match=words("ExportError", r"/out\b", r"\bchanged\b", "loaded")):
        worlds.run(1, export_after, source, tmp_path / "out", again)
    assert {p.name for p in tmp_path.iterdir()} == {"m"}


def test_float64_sources_are_not_rounded(tmp_path: Path) -> None:
    source = tiny.directory(tmp_path / "m", "qwen3")
    changed(source, lambda tensors: tensors.update({"model.norm.weight": torch.rand(36, dtype=torch.float64)}))
    with pytest.raises(mw.MismatchedKey, match=words(r"model\.norm\.weight", r"\bF64\b", r"torch\.float32")):
        mw.load(source)
    worlds.run(1, lambda: mw.export(mw.load(source, dtype=torch.float64), tmp_path / "out"))
    same_files(source, tmp_path / "out")
