"""Frozen matrices in 4 bits (QLoRA): formulas, memory, checkpoints, merges. Gradients: test_lora_meshes.py."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import meshwright as mw
from meshwright.axes import Axes
from meshwright.blueprint import Blueprint
from meshwright.ops import codings, matmul
from meshwright.ops.codings import MXFP4, NF4, NVFP4, Coding, divisor_for_amax, in_memory
from meshwright.plan import Figures, objections, work_of
from meshwright.recipe import FOUR_BITS, Lora, Recipe
from meshwright.sharding import pieces
from meshwright.weights import frozen_scales, whole_tensors
from tests import parts, quantised, tiny, trials, worlds
from tests.published_configs import QWEN3_30B_A3B
from tests.test_lora_meshes import DRAWN

BF16, F32 = torch.bfloat16, torch.float32


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Files of a family in bfloat16, or quantised."""
    at = tmp_path_factory.mktemp("four bits")
    few: dict[str, Any] = {} if parts.ALL else {"qwen3_moe": dict(hidden_size=128, num_experts=4)}
    sizes = lambda name: tiny.in_blocks(name) | few.get(name, {})  # noqa: E731 - short
    plain = functools.cache(lambda name: tiny.directory(at / name, name, dtype=BF16, **sizes(name)))
    packed = functools.cache(
        lambda name, form: quantised.in_groups(plain(name), at / f"{name} in {form}", form.split()[0])
    )
    return lambda name, form="": packed(name, form) if "files" in form else plain(name)


def frozen_of(form: str) -> str | None:
    return None if "files" in form else form


def values_slowly(coding: Coding, row: list[int], columns: int, divisor: float) -> list[float]:
    """Decode a row number by number."""
    size = 4 if coding is NF4 else 1
    raw = torch.tensor(row[columns // 2 :], dtype=torch.uint8)
    scales = raw.view({NF4: F32, NVFP4: torch.float8_e4m3fn, MXFP4: torch.uint8}[coding]).double().tolist()
    assert len(row) == columns // 2 + columns // coding.block * size
    out = []
    for j in range(columns):
        byte = row[j // 2]
        nibbles = (byte // 16, byte % 16) if coding is NF4 else (byte % 16, byte // 16)
        scale = 2.0 ** (scales[j // 32] - 127) if coding is MXFP4 else scales[j // coding.block]
        if coding is NVFP4:
            scale = torch.tensor(scale / divisor, dtype=torch.float64).float().double().item()
        out.append(torch.tensor(coding.table[nibbles[j % 2]], dtype=F32).double().item() * scale)
    return out


def nearest(coding: Coding, scaled: float) -> float:
    """Return the nearest value of the table; of two the lower one (NF4), or the one with an even code."""
    table = [torch.tensor(value, dtype=F32).item() for value in coding.table]
    if coding is NF4:
        return min(table, key=lambda value: (abs(value - scaled), value))
    best = min(range(8), key=lambda code: (abs(table[code] - abs(scaled)), code % 2))
    return table[best] * (-1 if scaled < 0 else 1)


@pytest.mark.parametrize("name", FOUR_BITS)
def test_formulas_are_those_of_the_formats(name: str) -> None:
    coding, columns = codings.FOUR_BITS[name], 128
    values = torch.randn(5, columns, generator=torch.Generator().manual_seed(3)) * 0.04
    values[1] *= 1e-3  # small scales next to large ones
    values[2, :64], values[3, 5] = 0.0, 3.0
    values[4, :16] = torch.tensor(
        [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, *(-0.25, -0.75, -1.25, -1.75), *[0.0] * 4]
    )
    divisor = divisor_for_amax(values.abs().amax()) if coding.divided else torch.ones(())
    divisors = divisor.expand(5, 1)
    rows = coding.encode(values, divisors)
    assert rows.shape == coding.stored(values.shape)
    decoded = coding.decode(rows, columns, divisors)
    for row, made, given in zip(rows, decoded, values, strict=True):
        slow = values_slowly(coding, row.tolist(), columns, divisor.item())
        assert torch.equal(made, torch.tensor(slow, dtype=torch.float64).float())
        scales = coding._wide(row[None, columns // 2 :])[0] / divisor
        for j, value in enumerate(given.tolist()):
            scale = scales[j // coding.block].item()
            # bitsandbytes multiplies by the inverse of the scale, in float32.
            scaled = (given[j] * (1 / scales[j // coding.block])).item() if coding is NF4 and scale else 0.0
            scaled = value / scale if coding is not NF4 and scale else scaled
            assert made[j].item() == torch.tensor(nearest(coding, scaled), dtype=F32).mul(scale).item(), (j, value)
    blocks = values.unflatten(1, (-1, coding.block)).abs().amax(-1)
    wide = coding._wide(rows[:, columns // 2 :])
    if coding is NF4:
        assert torch.equal(wide, blocks)
    elif coding is MXFP4:
        assert torch.equal(wide[blocks > 0], torch.exp2(blocks[blocks > 0].log2().floor() - 2))
    else:
        exact = blocks / 6 * divisor  # rounded to 3 bits of mantissa, or to 2^-9
        assert ((wide - exact).abs() <= (exact / 16).clamp(min=2**-10)).all()


def expanded(at: Path, out: Path, frozen: str | None) -> None:
    """Write the values of a base in 4 bits as float32."""
    mw.export(mw.load(at, mw.Mesh(device="cpu"), train=[], frozen=frozen), out, dtype=F32)


def answers(at: Path, frozen: str | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """Return what a model with adapters says, and its gradients."""
    model = mw.load(at, mw.Mesh(device="cpu"), dtype=F32, lora=DRAWN, frozen=frozen)
    engine, batches = mw.Engine(model, lr=1e-2), tiny.batches(model.mesh.data_rank)[:2]
    assert mw.check_weights(model).ok
    said = mw.logprobs(model, batches[0])
    engine.backward(batches)
    return said, mw.gather(model, "grad")


@pytest.mark.parametrize(
    ("name", "form"), [("qwen3_moe", "nf4"), *parts.every(4, [("qwen3_5", "MXFP4 files"), ("qwen3", "nvfp4"),
        ("qwen3", "mxfp4"), ("qwen3_5_moe", "NVFP4 files")])]
)  # fmt: skip
def test_equal_to_files_of_the_dequantised_values(
    source: Callable[..., Path], tmp_path: Path, name: str, form: str
) -> None:
    """A base in 4 bits and the same values in float32 give the same bits."""
    at, frozen = source(name, form), frozen_of(form)
    acts = {
        "expand": functools.partial(expanded, at, tmp_path / "wide", frozen),
        "narrow": functools.partial(answers, at, frozen),
        "wide": functools.partial(answers, tmp_path / "wide"),
    }
    result = {what: one[0] for what, one in worlds.in_turn(1, acts).items()}
    assert torch.equal(result["narrow"][0], result["wide"][0])
    assert result["narrow"][1].keys() == result["wide"][1].keys()
    assert all(torch.equal(grad, result["wide"][1][key]) for key, grad in result["narrow"][1].items())
    assert "quantization_config" not in json.loads((tmp_path / "wide" / "config.json").read_text())


def as_in_files(at: Path, out: Path, mesh: dict[str, int]) -> tuple[dict[str, Tensor], set[str], Tensor]:
    model = mw.load(at, mw.Mesh(**mesh), dtype=F32, train="*norm*")
    assert mw.check_weights(model).ok
    mw.export(model, out)
    streamed = {key for key, _ in mw.stream(model, format="source")}
    keys = [key for key in model.keymap.keys.values() if key.name not in model.keymap.carried]
    stored = model.stored_model(model.values())
    whole = {key.name: t.clone() for key, t in whole_tensors(stored, model.keymap, keys, dtypes=model.kept)}
    packed = [model.stored()[name] for name in model.codings]
    assert all(tensor.dtype == torch.uint8 for tensor in packed)
    billed = {each.what: each.num_bytes for each in model.need().stored(model.mesh.rank)}
    assert billed["parameters"] == sum(tensor.nbytes for tensor in model.stored().values())
    with pytest.MonkeyPatch.context() as patch:  # one rank reads for both
        patch.setenv("LOCAL_WORLD_SIZE", str(model.mesh.axes.world))
        other = mw.load(at, mw.Mesh(**mesh), dtype=F32, train="*norm*", read="node")
    assert all(torch.equal(tensor, other.stored()[name]) for name, tensor in model.stored().items())
    return whole, streamed, torch.tensor([len(packed)])


@pytest.mark.parametrize("nested", [True, *parts.every(2, [False], first=1)])
def test_nf4_files_of_bitsandbytes(source: Callable[..., Path], tmp_path: Path, nested: bool) -> None:
    """Read exactly, kept in 4 bits, and copied to the byte."""
    at, values = quantised.in_nf4(source("qwen3_moe"), tmp_path / "nf4", nested)
    mesh = dict(fsdp=2, ep=2)
    whole, streamed, num = worlds.run(2, as_in_files, at, tmp_path / "out", mesh)[0]
    assert num > 0
    assert whole.keys() == values.keys()
    assert all(torch.equal(whole[key].float(), values[key].float()) for key in values)
    assert streamed == quantised.tensors(at).keys()
    for file in at.iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()


DOWN, STATE = "model.layers.0.mlp.down_proj.weight", ".quant_state.bitsandbytes__nf4"
BROKEN: dict[str, tuple[Callable[[dict[str, Any], dict[str, Tensor]], object], str]] = {
    "fp4": (lambda config, _: config.update(bnb_4bit_quant_type="fp4"), "bnb_4bit_quant_type='fp4'"),
    "8 bits": (lambda config, _: config.update(load_in_4bit=False), "load_in_4bit=False"),
    "no scales": (lambda _, files: files.pop(f"{DOWN}.absmax"), f"{DOWN}.absmax is missing"),
    "other values": (lambda _, files: files.update({f"{DOWN}.quant_map": torch.linspace(-1, 1, 16)}), "other than"),
    "short": (lambda _, files: files.update({DOWN: files[DOWN][:-2].clone()}), "in NF4"),
    "no state": (lambda _, files: files.update({f"{DOWN}{STATE}": torch.zeros(3, dtype=torch.uint8)}), "fetch it"),
}


def refused(at: Path) -> str:
    with pytest.raises(mw.MeshwrightError) as error:
        mw.load(at, mw.Mesh(device="cpu"), train=[])
    return str(error.value)


def test_broken_nf4_files_are_refused(source: Callable[..., Path], tmp_path: Path) -> None:
    at, _ = quantised.in_nf4(source("qwen3"), tmp_path / "nf4", False)
    for name, (damage, _) in BROKEN.items():
        config, files = json.loads((at / "config.json").read_text()), quantised.tensors(at)
        damage(config["quantization_config"], files)
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        save_file(files, tmp_path / name / "model.safetensors")
    said = worlds.in_turn(1, {name: functools.partial(refused, tmp_path / name) for name in BROKEN})
    for name, (message,) in said.items():
        assert BROKEN[name][1] in message, (name, message)


def swapped(patch: pytest.MonkeyPatch) -> None:
    real = codings._pairs
    patch.setattr(codings, "_pairs", lambda coding, device: real(replace(coding, high_first=True), device))


def neighbours(patch: pytest.MonkeyPatch) -> None:
    real = Coding._wide
    patch.setattr(Coding, "_wide", lambda coding, stored: real(coding, stored).roll(1, 1))


def of_first_rows(patch: pytest.MonkeyPatch) -> None:
    """Store the codes of the first rank on every rank."""
    from meshwright.weights import read_plan

    real = read_plan.fill_rows
    patch.setattr(read_plan, "fill_rows", lambda reader, layout, piece, *rest: real(
        reader, layout, replace(piece, lo=0, hi=piece.hi - piece.lo), *rest))  # fmt: skip


def other_divisor(patch: pytest.MonkeyPatch) -> None:
    """Divide the scales of the matrices of a stack by the number of the first."""
    real = frozen_scales.matrices_of

    def first(*args: Any) -> tuple[Tensor, Tensor]:
        rows, divisors = real(*args)
        return torch.zeros_like(rows), divisors

    patch.setattr(frozen_scales, "matrices_of", first)


PLANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "": lambda _: None, "nibbles swapped": swapped, "scales of neighbours": neighbours,
    "codes of another rank": of_first_rows, "another divisor": other_divisor,
}  # fmt: skip


def planted(at: Path, plant: str, frozen: str | None = "nvfp4") -> tuple[bool, Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        PLANTS[plant](patch)
        model = mw.load(at, trials.mesh_of(dict(fsdp=2)), dtype=F32, lora=DRAWN, frozen=frozen)
        return mw.check_weights(model).ok, mw.logprobs(model, tiny.batches(model.mesh.data_rank)[0])


def test_planted_bugs_are_detected(source: Callable[..., Path], tmp_path: Path) -> None:
    at = source("qwen3_moe")
    worlds.run(1, expanded, at, tmp_path / "wide", "nvfp4")
    acts: dict[str, Callable[[], Any]] = {"wide": functools.partial(planted, tmp_path / "wide", "", None)}
    ranks = worlds.in_turn(2, acts | {plant: functools.partial(planted, at, plant) for plant in PLANTS})
    _, right = ranks.pop("wide")[0]
    said = {plant: torch.allclose(of[0][1], right, atol=1e-5) for plant, of in ranks.items()}
    assert said == {plant: plant == "" for plant in PLANTS}
    # Decoding is shared with the check, so only what is stored can be wrong there.
    checked = {plant: all(ok for ok, _ in of) for plant, of in ranks.items()}
    assert checked == {plant: plant not in ("codes of another rank", "another divisor") for plant in PLANTS}


def saved_for_backward(at: Path, keeps_values: bool) -> bool:
    """Return whether backward saves no values of a matrix in 4 bits."""
    with pytest.MonkeyPatch.context() as patch:
        if keeps_values:
            patch.setattr(matmul, "split_weights", lambda weights: ([w.to(F32) for w in weights], [None] * 9))
            patch.setattr(matmul, "join_weights", lambda tensors, _: tensors)
        model = mw.load(at, mw.Mesh(device="cpu"), dtype=F32, lora=Lora(rank=3), frozen="nf4")
        engine, saved = mw.Engine(model, lr=1e-2), list[tuple[torch.Size, torch.dtype]]()

        def save(tensor: Tensor) -> Tensor:
            saved.append((tensor.shape, tensor.dtype))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            engine.backward(tiny.batches(0)[:1])
    codes = {model.stored()[name].numel() for name in model.codings}
    values = {(model.pieces[name].numel, model.pieces[name].shape[1]) for name in model.codings}
    assert any(dtype == torch.uint8 and shape.numel() in codes for shape, dtype in saved) or keeps_values
    matrices = [(shape, dtype) for shape, dtype in saved if 2 <= len(shape) <= 3]  # heads of attention have four dims
    return not any((shape.numel(), shape[-1]) in values and dtype.is_floating_point for shape, dtype in matrices)


def test_backward_keeps_codes_alone(source: Callable[..., Path]) -> None:
    cases = [("qwen3", False), ("qwen3", True), ("qwen3_moe", False)]
    acts = {case: functools.partial(saved_for_backward, source(case[0]), case[1]) for case in cases}
    assert worlds.in_turn(1, acts) == {case: [not case[1]] for case in cases}


def trains(at: Path, out: Path) -> tuple[float, dict[str, Tensor], dict[str, Tensor], bool]:
    model = mw.load(at, mw.Mesh(fsdp=2, device="cpu"), lora=replace(DRAWN, b_std=0.0), frozen="nf4")
    base = mw.load(at, mw.Mesh(fsdp=2, device="cpu"), train=[], frozen="nf4")
    batches = tiny.batches(model.mesh.data_rank)[:1]
    same = torch.equal(mw.logprobs(model, batches[0]), mw.logprobs(base, batches[0]))
    engine = mw.Engine(model, lr=1e-2)
    engine.step(batches)
    mw.save(engine, out / "steps")
    mw.export(model, out / "merged", merge=True)
    masked = mw.Engine(mw.load(at, mw.Mesh(fsdp=2, device="cpu"), train="layers.1.*", frozen="nf4"), lr=1e-2)
    masked.step(batches)
    mw.save(masked, out / "masked")
    return engine.evaluate(batches), mw.gather(model, "adapter"), mw.gather(base), same


def resumes(at: Path, out: Path, frozen: str) -> tuple[float, dict[str, Tensor]] | str:
    """Resume adapters, and a run without them that trains a layer whole, on another mesh."""
    model = mw.load(at, mw.Mesh(tp=2, device="cpu"), lora=DRAWN, frozen=frozen)
    engine = mw.Engine(model, lr=1e-2)
    if frozen != "nf4":
        with pytest.raises(mw.CheckpointError) as error:
            mw.resume(engine, out / "steps")
        return str(error.value)
    mw.resume(engine, out / "steps")
    wide = mw.Engine(mw.load(at, model.mesh, train="layers.1.*"), lr=1e-2)
    with pytest.raises(mw.CheckpointError, match="trained with frozen='nf4', the engine's model has frozen=None"):
        mw.resume(wide, out / "masked")
    masked = mw.Engine(mw.load(at, model.mesh, train="layers.1.*", frozen=frozen), lr=1e-2)
    mw.resume(masked, out / "masked")
    assert masked.steps == 1
    assert masked.model.codings
    streams = [tiny.batches(rank)[0] for rank in range(2)]
    return engine.evaluate(streams), mw.gather(model, "adapter")


def test_checkpoints_and_merges(source: Callable[..., Path], tmp_path: Path) -> None:
    at = source("qwen3_5_moe" if parts.ALL else "qwen3_moe")
    loss, factors, base, same = worlds.run(2, trains, at, tmp_path)[0]
    assert same, "step 0 is the base in 4 bits to the bit"
    acts = {frozen: functools.partial(resumes, at, tmp_path, frozen) for frozen in ("nf4", "mxfp4")}
    again, refusal = (ranks[0] for ranks in worlds.in_turn(2, acts).values())
    assert all(torch.equal(factor, again[1][key]) for key, factor in factors.items())
    assert again[0] == pytest.approx(loss, rel=1e-2)
    assert "frozen" in refusal
    assert "nf4" in refusal
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    key = "layers.1.self_attn.o_proj"
    (name,) = (name for name in base if key in name)
    a, b = (next(t for k, t in factors.items() if f"{key}.lora_{part}" in k).float() for part in "AB")
    (values,) = worlds.run(1, dequantised, at, name)
    assert torch.equal(merged[name], (values + b @ a * DRAWN.scale).to(BF16))


def dequantised(at: Path, name: str, frozen: str | None = "nf4") -> Tensor:
    model = mw.load(at, mw.Mesh(device="cpu"), train=[], frozen=frozen)
    keys = [key for key in model.keymap.keys.values() if key.name == name]
    whole = whole_tensors(model.stored_model(model.values()), model.keymap, keys, dtypes=model.kept)
    return next(tensor for _, tensor in whole).clone()


def merged_of(at: Path, out: Path, name: str) -> tuple[Tensor, Tensor]:
    """Export a base of 4-bit files with adapters merged, and return one of its weights as it should be."""
    model = mw.load(at, mw.Mesh(device="cpu"), lora=DRAWN)
    mw.export(model, out, merge=True)
    factors = mw.gather(model, "adapter")
    a, b = (next(t for key, t in factors.items() if f"0.self_attn.q_proj.lora_{part}" in key) for part in "AB")
    values = dequantised(at, name, None)
    return values, (values + b.float() @ a.float() * DRAWN.scale).to(BF16)


def test_merged_weights_of_4_bit_files_are_plain(source: Callable[..., Path], tmp_path: Path) -> None:
    at, name = source("qwen3", "MXFP4 files"), "model.layers.0.self_attn.q_proj.weight"
    values, merged = worlds.run(1, merged_of, at, tmp_path / "out", name)[0]
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(written[name], merged)
    assert not torch.equal(values.to(BF16), merged)
    assert not any("scale" in key or "packed" in key for key in written)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def refusals(at: Path, packed: Path, odd: Path) -> dict[str, str]:
    acts: dict[str, Callable[[], object]] = {
        "all trained": lambda: mw.load(at, frozen="nf4"),
        "unknown": lambda: mw.load(at, lora=Lora(), frozen="int4"),
        "quantised": lambda: mw.load(packed, lora=Lora(), frozen="nf4"),
        "trained": lambda: mw.load(packed, train="layers.0.mixer.q.weight"),
        "init": lambda: mw.init(at, lora=Lora(), frozen="nf4"),
        "odd": lambda: mw.load(odd, lora=Lora(), frozen="nf4"),
    }
    said = {}
    for what, act in acts.items():
        with pytest.raises(mw.MeshwrightError) as error:
            act()
        said[what] = str(error.value)
    return said


def test_what_is_refused(source: Callable[..., Path], tmp_path: Path) -> None:
    odd = tiny.directory(tmp_path / "odd", "qwen3", dtype=BF16)
    (said,) = worlds.run(1, refusals, source("qwen3"), source("qwen3", "NVFP4 files"), odd)
    for what, words in {
        "all trained": ("nothing to quantise", "lora=mw.Lora()"), "unknown": ("nf4, nvfp4, mxfp4",),
        "quantised": ("quantised already", "leave frozen out"), "trained": ("NVFP4", "lora=mw.Lora()"),
        "init": ("mw.init",), "odd": ("nothing to quantise", "no matrix has a multiple"),
    }.items():  # fmt: skip
        assert all(word in said[what] for word in words), (what, said[what])
    config = json.loads((source("qwen3") / "config.json").read_text()) | {"head_dim": 32}
    blueprint = Blueprint.of(config, None, Recipe(lora=Lora(), frozen="nf4"))
    wanted = r"with tp=4 a rank has 32 of layers\.0\.mixer\.o\.weight; choose tp from 1, 2$"
    with pytest.raises(mw.LayoutError, match=wanted):
        blueprint.codings(frozenset(blueprint.trained()), Axes(tp=4))
    assert any(re.search(wanted, each) for each in objections(blueprint, dict(tp=4)))


@pytest.mark.parametrize(("frozen", "gigabytes"), [("nf4", 21.28), ("mxfp4", 20.35)])
def test_the_30b_fits_on_one_card(frozen: str, gigabytes: float) -> None:
    """The plan counts what is allocated, to the byte."""
    config = {**QWEN3_30B_A3B, "dtype": "bfloat16"}
    blueprint = Blueprint.of(config, None, Recipe(lora=Lora(rank=16), frozen=frozen))
    figures = Figures("Qwen3-30B-A3B", blueprint, Axes(), work_of(Axes(), 4096, 1), 80 * 10**9)
    assert figures.fits
    assert figures.most.num_bytes < 60e9
    parameters = figures.most.parts["parameters"]
    assert parameters / 1e9 == pytest.approx(gigabytes, abs=0.01)
    trained = {*blueprint.trained()}
    forms = {**blueprint.stored_dtypes(BF16, trained), **blueprint.codings(trained, Axes())}
    made = [in_memory(piece.shape, forms[name]) for name, piece in pieces(blueprint.spec, Axes(), 0).items()]
    assert sum(torch.empty(shape, dtype=dtype, device="meta").nbytes for shape, dtype in made) == parameters


@pytest.mark.parametrize(
    ("coding", "columns", "num_bytes"),
    [(codings.FP8, 192, 192), (NF4, 192, 96 + 3 * 4), (NVFP4, 48, 24 + 3), (MXFP4, 96, 48 + 3)],
)
def test_a_row_has_its_codes_and_its_scales(coding: Coding, columns: int, num_bytes: int) -> None:
    assert coding.row_bytes(columns) == num_bytes
    assert in_memory([5, 7, columns], coding) == ((5, 7, num_bytes), torch.uint8)
    assert in_memory([7, columns], torch.bfloat16) == ((7, columns), torch.bfloat16)
