"""Files in 8-bit numbers: loaded exactly, exported to the byte, by writers that share no code with ours."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import meshwright as mw
from meshwright.errors import LoadError, RankError
from meshwright.verify import oracles
from meshwright.weights import quant_formats, reader, whole_tensors
from tests import parts, quantised, tiny, trials, worlds
from tests.quantised import FORMATS
from tests.trials import named, world_of

MESHES: list[dict[str, int]] = [dict(), dict(fsdp=2), dict(tp=2), dict(fsdp=2, ep=2), dict(pp=2)]
TRIED = [mesh for mesh in MESHES if parts.ALL or mesh != dict(fsdp=2)]  # with experts too
FAMILIES = ("qwen3", "qwen3_moe", "qwen3_5", "qwen2", "qwen3_5_moe", "qwen3_tied")
CASES = [(family, form) for form in FORMATS for family in FAMILIES]
Case = tuple[str, str]
KEY, DOWN = "model.layers.0.mlp.down_proj.weight", "layers.0.mlp.down.weight"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    at = tmp_path_factory.mktemp("fp8")
    plain = functools.cache(lambda family: tiny.directory(at / family, family, **tiny.two_layers(family)))
    return functools.cache(
        lambda family, form: quantised.directory(plain(family), at / f"{family}, {form}", FORMATS[form])
    )


def cases_on(mesh: Mapping[str, int]) -> list[Case]:
    """Every format and every family on some mesh; on `ep`, families with experts."""
    if "ep" in mesh:
        return parts.every(11, (case for case in CASES if "moe" in case[0]), 1)
    return parts.every(17, CASES, 3 * MESHES.index(dict(mesh)))


def whole(model: mw.Model) -> dict[str, Tensor]:
    """Return tensors in their stored width, on rank 0."""
    keys = [key for key in model.keymap.keys.values() if key.name not in model.keymap.carried]
    stored = model.stored_model(model.values())
    return {key.name: t.clone() for key, t in whole_tensors(stored, model.keymap, keys, dtypes=model.kept)}


def untouched(at: Path, mesh: Mapping[str, int], out: Path, train: str) -> dict[str, Any]:
    model = mw.load(at, trials.mesh_of(mesh), dtype=torch.float32, train=train)
    assert mw.check_weights(model).ok
    mw.export(model, out)
    streamed = {name: sealed(t) for name, t in mw.stream(model, format="source")}
    return {"values": whole(model), "streamed": streamed, "bf16": mw.gather(model)}


@pytest.mark.parametrize("mesh", TRIED, ids=named)
def test_loaded_exactly_and_exported_to_the_byte(
    directory: Callable[[str, str], Path], tmp_path: Path, mesh: dict[str, int]
) -> None:
    """Trained and frozen layers take turns."""
    cases = cases_on(mesh)
    acts = {
        case: functools.partial(untouched, directory(*case), mesh, tmp_path / f"{n}", ("**", "layers.1.*")[n % 2])
        for n, case in enumerate(cases)
    }
    for n, (case, answers) in enumerate(worlds.in_turn(world_of(mesh), acts).items()):
        at, result = directory(*case), answers[0]
        expected, files = quantised.values(at, FORMATS[case[1]]), quantised.tensors(at)
        assert result["values"].keys() == expected.keys(), case
        for key, values in expected.items():
            assert torch.equal(result["values"][key].float(), values.float()), (case, key)
            assert torch.equal(result["bf16"][key].float(), values.float().to(result["bf16"][key].dtype).float())
        assert result["streamed"].keys() == files.keys(), case
        assert all(torch.equal(result["streamed"][key][1], bits(files[key])) for key in files), case
        assert all(result["streamed"][key][0] == sealed(files[key])[0] for key in files), case
        for file in at.iterdir():
            assert (tmp_path / f"{n}" / file.name).read_bytes() == file.read_bytes(), (case, file.name)


def sealed(tensor: Tensor) -> tuple[str, Tensor]:
    """Return the type and the bytes of a tensor: ranks cannot send 8-bit dtypes to each other."""
    return f"{tensor.dtype} {tuple(tensor.shape)}", bits(tensor).clone()


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def trained(at: Path, mesh: Mapping[str, int], out: Path) -> dict[str, Tensor]:
    model = mw.load(at, trials.mesh_of(mesh), dtype=torch.float32, train="layers.1.*")
    engine = mw.Engine(model, lr=1e-2)
    engine.step(tiny.batches(model.mesh.data_rank)[:1])
    mw.export(model, out / "as it was")
    mw.export(model, out / "plain", dtype=torch.bfloat16)
    mw.save(engine, out / "steps")
    mw.resume(engine, out / "steps")
    mw.export(model, out / "resumed")
    return whole(model)


@pytest.mark.parametrize("mesh", [dict(fsdp=2, tp=2) if parts.ALL else dict(fsdp=2), dict(pp=2)], ids=named)
@pytest.mark.parametrize("case", parts.every(2, [("qwen3_5_moe", "bfloat16"), ("qwen3", "powers of two")]), ids=str)
def test_a_step_changes_what_was_trained_alone(
    directory: Callable[[str, str], Path], tmp_path: Path, mesh: dict[str, int], case: Case
) -> None:
    at, form = directory(*case), FORMATS[case[1]]
    values = worlds.run(world_of(mesh), trained, at, mesh, tmp_path)[0]
    before, after = quantised.tensors(at), quantised.tensors(tmp_path / "as it was")
    assert before.keys() == after.keys()
    for key, tensor in after.items():
        if ".layers.1." not in key:
            assert same_bits(tensor, before[key]), key
        elif tensor.dtype == torch.float8_e4m3fn:
            numbers, grid = form.make(values[key].float())
            assert same_bits(tensor, numbers), key
            assert same_bits(after[key + form.suffix], grid), key
    for name in ("plain", "steps/step-000001"):
        assert "quantization_config" not in json.loads((tmp_path / name / "config.json").read_text())
        plain = quantised.tensors(tmp_path / name)
        assert all(same_bits(tensor, values[key].to(tensor.dtype)) for key, tensor in plain.items())
    resumed = quantised.tensors(tmp_path / "resumed")
    assert all(same_bits(tensor, after[key]) for key, tensor in resumed.items())


def one_element(at: Path, out: Path) -> None:
    model = mw.load(at, mw.Mesh(device="cpu"))
    model.stored()[DOWN].view(-1)[0] = 0.5
    mw.export(model, out)


def test_one_element_changes_one_block(directory: Callable[[str, str], Path], tmp_path: Path) -> None:
    at, form = directory("qwen3", "float32"), FORMATS["float32"]
    worlds.run(1, one_element, at, tmp_path / "out")
    before, after = quantised.tensors(at), quantised.tensors(tmp_path / "out")
    moved = {key for key in before if not same_bits(before[key], after[key])}
    assert moved == {KEY, KEY + form.suffix}
    assert (before[KEY + form.suffix] != after[KEY + form.suffix]).nonzero().tolist() == [[0, 0]]
    rows, columns = (before[KEY].float() != after[KEY].float()).nonzero().T
    assert rows.max() < form.block[0]
    assert columns.max() < form.block[1]


def test_transformers_reads_what_was_trained(directory: Callable[[str, str], Path], tmp_path: Path) -> None:
    """It makes values of the numbers as we do, where blocks divide the sizes."""
    worlds.run(1, trained, directory("qwen3", "transformers"), {}, tmp_path)
    ours = worlds.run(1, rounded, tmp_path / "as it was")[0]
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "as it was", dtype=torch.bfloat16).state_dict()
    assert ours.keys() == reference.keys()
    assert all(same_bits(reference[key].bfloat16(), tensor.bfloat16()) for key, tensor in ours.items())


def rounded(at: Path) -> dict[str, Tensor]:
    return mw.gather(mw.load(at, mw.Mesh(device="cpu")))


def rewritten(at: Path, out: Path, change: Callable[[dict[str, Any], dict[str, Tensor]], object]) -> Path:
    out.mkdir()
    config, files = json.loads((at / "config.json").read_text()), quantised.tensors(at)
    change(config, files)
    (out / "config.json").write_text(json.dumps(config))
    save_file(files, out / "model.safetensors")
    return out


REFUSED: dict[str, tuple[Callable[[dict[str, Any], dict[str, Tensor]], object], str]] = {
    "no scales": (lambda c, f: f.pop(KEY + "_scale_inv"), "down_proj.weight_scale_inv is missing"),
    "no numbers": (lambda c, f: f.update({KEY: f[KEY].float()}), "no parameter of the model"),
    "blocks of another size": (lambda c, f: f.update({KEY + "_scale_inv": torch.ones(2, 2)}), "blocks of 16 x 12"),
    "turned": (lambda c, f: f.update({KEY + "_scale_inv": f[KEY + "_scale_inv"].T.contiguous()}), "blocks of 16 x 12"),
    "whole numbers": (lambda c, f: f.update({KEY + "_scale_inv": f[KEY + "_scale_inv"].long()}), "I64; scales must be"),
    "no config": (lambda c, f: c.pop("quantization_config"), "is F8_E4M3; layers."),
    "another method": (lambda c, f: c["quantization_config"].update(quant_method="gptq"), "'gptq'"),
}  # fmt: skip


def test_what_is_refused(directory: Callable[[str, str], Path], tmp_path: Path) -> None:
    """Each error names the tensor or field before any module exists."""
    at = {name: rewritten(directory("qwen3", "float32"), tmp_path / name, REFUSED[name][0]) for name in REFUSED}
    result = worlds.in_turn(1, {name: functools.partial(refused, each) for name, each in at.items()})
    for name, (_, expected) in REFUSED.items():
        ((kind, message),) = result[name]
        assert issubclass(kind, LoadError), name
        assert expected in message, name


def refused(at: Path) -> tuple[type, str]:
    with pytest.raises(mw.MeshwrightError) as error:
        mw.load(at, mw.Mesh(device="cpu"))
    return type(error.value), str(error.value)


def test_odd_rows_are_not_read_in_even_blocks(tmp_path: Path) -> None:
    """192 rows are two blocks of 128: of 128 and of 64 rows."""
    at = tiny.directory(tmp_path / "plain", "qwen3", intermediate_size=192)
    form = quantised.ours(torch.bfloat16, (128, 128))
    made = quantised.directory(at, tmp_path / "q", form)
    result = worlds.run(1, untouched, made, {}, tmp_path / "out", "**")[0]["values"]
    for key, values in quantised.values(made, form).items():
        assert torch.equal(result[key].float(), values.float()), key


def halves(view: Tensor, shape: Any, scale: quant_formats.Scale) -> quant_formats.Places:
    """Blocks as large as the shape of the grid lets them seem."""
    rows, columns = (-(-size // count) for size, count in zip(shape[-2:], scale.grid(shape)[-2:], strict=True))
    return right_places(view, shape, quant_formats.Scale(scale.key, (rows, columns)))


def from_the_first_row(view: Tensor, shape: Any, scale: quant_formats.Scale) -> quant_formats.Places:
    """Read a piece as if it began at the first row of the matrix."""
    return right_places(view.as_strided(view.shape, view.stride(), 0), shape, scale)


right_places = quant_formats.Places.of
PLANTED: dict[str, tuple[Any, str, Any]] = {
    "scales divide": (reader, "dequantise", lambda numbers, grid, *_: numbers.float() / grid),
    "no scales": (reader, "dequantise", lambda numbers, grid, *_: numbers.float()),
    "scales of another block": (quant_formats.Places, "of", staticmethod(halves)),
    "scales of the first rows": (quant_formats.Places, "of", staticmethod(from_the_first_row)),
}


def compared(at: Path, plant: str) -> bool:
    where, name, wrong = PLANTED[plant]
    right = vars(where)[name]
    setattr(where, name, wrong)
    try:
        return mw.check_weights(mw.load(at, mw.Mesh(fsdp=2, device="cpu"), dtype=torch.float32)).ok
    finally:
        setattr(where, name, right)


def test_planted_bugs_are_caught(directory: Callable[[str, str], Path]) -> None:
    """check_weights reads the files in its own way."""
    at = directory("qwen3", "bfloat16")
    acts = {plant: functools.partial(compared, at, plant) for plant in PLANTED}
    result = worlds.in_turn(2, acts)
    assert not any(any(answers) for answers in result.values()), result


def own_rows_alone(grid: Tensor, at: str) -> Tensor:
    return grid


def three_times(at: Path, out: Path, plant: int) -> None:
    """Multiply the rows of the second rank by three."""
    mesh = mw.Mesh(fsdp=2, device="cpu")
    model = mw.load(at, mesh, dtype=torch.float32)
    if mesh.rank == 1:
        model.stored()[DOWN].mul_(3)
    if plant:
        mesh.all_reduce_max_ = own_rows_alone  # type: ignore[method-assign] # the planted bug
    mw.export(model, out)


def test_a_block_that_two_ranks_have_gets_one_scale(directory: Callable[[str, str], Path], tmp_path: Path) -> None:
    at = directory("qwen3", "bfloat16")
    worlds.in_turn(2, {plant: functools.partial(three_times, at, tmp_path / f"{plant}", plant) for plant in (0, 1)})
    expected = quantised.values(at, FORMATS["bfloat16"])[KEY]
    expected[18:] *= 3
    results = (quantised.values(tmp_path / f"{plant}", FORMATS["bfloat16"])[KEY] for plant in (0, 1))
    assert [bool((result - expected).norm() / expected.norm() < 0.04) for result in results] == [True, False]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e8m0fnu], ids=str)
def test_verify_says_how_numbers_differ(dtype: torch.dtype) -> None:
    """torch cannot sort 8-bit numbers."""
    one, other = (torch.tensor(values).to(dtype) for values in ([1.0, 2.0, 4.0], [4.0, 2.0, 1.0]))
    assert oracles._differs(one, other) == "2 of 3 elements differ: the right values in the wrong places"


def test_nothing_that_is_not_finite(directory: Callable[[str, str], Path], tmp_path: Path) -> None:
    with pytest.raises(RankError, match=f"{DOWN} has NaN or infinite"):
        worlds.run(1, with_nan, directory("qwen3", "bfloat16"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def with_nan(at: Path, out: Path) -> None:
    model = mw.load(at, mw.Mesh(device="cpu"))
    model.stored()[DOWN].view(-1)[0] = float("nan")
    mw.export(model, out)


def test_carried_tensors_stay_in_8_bits(directory: Callable[[str, str], Path], tmp_path: Path) -> None:
    """Tensors that the model has no part for: byte for byte; as values, where plain values are written."""
    numbers, grid = quantised.quantise(torch.randn(36, 50), quantised.BLOCK, torch.bfloat16)
    kept = {"mtp.fc.weight": numbers, "mtp.fc.weight_scale_inv": grid}
    at = rewritten(directory("qwen3_5", "bfloat16"), tmp_path / "m", lambda config, files: files.update(kept))
    worlds.run(1, trained, at, {}, tmp_path)
    as_it_was, plain = quantised.tensors(tmp_path / "as it was"), quantised.tensors(tmp_path / "plain")
    assert all(same_bits(as_it_was[key], tensor) for key, tensor in kept.items())
    assert "mtp.fc.weight_scale_inv" not in plain
    assert same_bits(plain["mtp.fc.weight"], quantised.dequantise(numbers, grid, quantised.BLOCK).bfloat16())


SIZES = dict(
    hidden_size=128, intermediate_size=256, head_dim=32, num_attention_heads=8, num_key_value_heads=4,
    moe_intermediate_size=128, shared_expert_intermediate_size=64,
)  # fmt: skip
DELTA = dict(linear_num_key_heads=2, linear_key_head_dim=32, linear_num_value_heads=4, linear_value_head_dim=32)
FIRST = quantised.ours(torch.float32, (128, 128))


def in_fp8(at: Path, mesh: Mapping[str, int], out: Path) -> dict[str, tuple[str, Tensor]]:
    model = mw.load(at, trials.mesh_of(mesh), dtype=torch.float32)
    mw.export(model, out, format="fp8")
    return {name: sealed(tensor) for name, tensor in mw.stream(model, format="fp8")}


@pytest.mark.parametrize("family", [*(["qwen3"] if parts.ALL else []), "qwen3_5_moe"])
def test_a_source_in_bfloat16_becomes_fp8(tmp_path: Path, family: str) -> None:
    """FP8 takes every matrix that blocks divide, except those that Qwen leaves wide. The mesh changes no byte, and
    transformers reads the result."""
    sizes = {**SIZES, **(DELTA if "qwen3_5" in family else {}), "num_experts": 4}
    at = tiny.directory(tmp_path / "plain", family, dtype=torch.bfloat16, **sizes)
    mesh = dict(fsdp=2, tp=2)
    streamed = worlds.run(1, in_fp8, at, {}, tmp_path / "one")[0]
    worlds.run(world_of(mesh), in_fp8, at, mesh, tmp_path / "four")
    before, after = quantised.tensors(at), quantised.tensors(tmp_path / "one")
    assert streamed.keys() == after.keys()
    in_8_bits = {key for key, tensor in after.items() if tensor.dtype == torch.float8_e4m3fn}
    expected = {key for key, tensor in before.items() if not quantised.is_kept(key, tensor)}
    assert in_8_bits == {key for key in expected if "shared_expert" not in key}  # 64 is no multiple of 128
    plain = json.loads((tmp_path / "one" / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    wide = {key.removesuffix(".weight") for key, tensor in before.items() if tensor.dim() > 1 and key not in in_8_bits}
    assert {*plain} == {"lm_head", *wide}
    for key, tensor in before.items():
        numbers, grid = FIRST.make(tensor) if key in in_8_bits else (tensor, None)
        assert same_bits(after[key], numbers), key
        assert torch.equal(streamed[key][1], bits(numbers)), key
        assert grid is None or same_bits(after[key + "_scale_inv"], grid), key
    for file in (tmp_path / "one").iterdir():
        assert (tmp_path / "four" / file.name).read_bytes() == file.read_bytes()
    ours = worlds.run(1, rounded, tmp_path / "one")[0]
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "one", dtype=torch.bfloat16).state_dict()
    shared = ours.keys() & reference.keys()  # experts may be spelled otherwise there
    assert len(shared) > 10
    assert all(same_bits(reference[key].bfloat16(), ours[key].bfloat16()) for key in shared)


def test_formats_that_are_refused(directory: Callable[[str, str], Path], tmp_path: Path) -> None:
    worlds.run(1, refuses, directory("qwen3", "bfloat16"), tmp_path / "out")
    small = tiny.directory(tmp_path / "small", "qwen3")
    with pytest.raises(RankError, match=r"whole 128 x 128 blocks, which no module of this model has"):
        worlds.run(1, lambda: mw.export(mw.load(small, mw.Mesh()), tmp_path / "out", format="fp8"))


def refuses(at: Path, out: Path) -> None:
    model = mw.load(at, mw.Mesh(device="cpu"))
    with pytest.raises(mw.ConfigError, match="choose from 'values', 'source', 'fp8'"):
        mw.export(model, out, format="int4")
    with pytest.raises(mw.ConfigError, match="give one of them"):
        mw.export(model, out, format="fp8", dtype=torch.bfloat16)
    with pytest.raises(mw.ConfigError, match="only weights"):
        next(mw.stream(model, "grad", format="fp8"))
    assert not out.exists()


def configs(at: Mapping[str, Path], out: Path) -> None:
    """Check the quantization config of exports of several kinds."""

    def message(name: str, **choices: Any) -> dict[str, Any]:
        head = "value" if name == "critic" else "lm"
        mw.export(mw.load(at[name], mw.Mesh(device="cpu"), head=head), out / name, **choices)
        result: dict[str, Any] = json.loads((out / name / "config.json").read_text())["quantization_config"]
        return result

    tied = message("tied", format="fp8")
    assert "lm_head" in tied["modules_to_not_convert"]  # it is no key of the files, and a module of readers
    critic = message("critic")
    assert critic["modules_to_not_convert"] == ["lm_head", "score"]
    other = message("other blocks", format="fp8")
    assert other["weight_block_size"] == [128, 128]
    ragged = message("experts", format="fp8")
    assert "model.layers.0.mlp.experts" in ragged["modules_to_not_convert"]
    assert not any(".experts." in key for key in quantised.tensors(out / "experts") if key.endswith("_scale_inv"))


def test_the_config_tells_what_is_in_8_bits(directory: Callable[[str, str], Path], tmp_path: Path) -> None:
    at = {
        "tied": tiny.directory(tmp_path / "tied", "qwen3_tied", **SIZES),
        "critic": directory("qwen3", "bfloat16"),
        "other blocks": quantised.directory(
            tiny.directory(tmp_path / "plain", "qwen3", **SIZES), tmp_path / "q", FORMATS["float32"]
        ),
        "experts": tiny.directory(tmp_path / "moe", "qwen3_moe", **{**SIZES, "moe_intermediate_size": 192}),
    }
    worlds.run(1, configs, at, tmp_path / "out")


def goes_on(at: Path, out: Path) -> None:
    """Resume from files alone, with their scales. Ranks refuse early what only rank 0 would notice late."""
    mesh = mw.Mesh(fsdp=2, device="cpu")
    engine = mw.Engine(mw.load(at, mesh, dtype=torch.float32), lr=1e-2)
    engine.step(tiny.batches(mesh.data_rank))
    mw.resume(engine, at)
    assert mw.check_weights(engine.model).ok
    engine.model.stored()[DOWN].view(-1)[:1] = torch.inf if mesh.rank == 1 else 0.0
    with pytest.raises(mw.MeshwrightError, match="NaN or infinite"):
        dict(mw.stream(engine.model, format="source"))
    mw.resume(engine, at)
    torch.distributed.barrier()
    if mesh.rank == 0:
        (at / "model.safetensors").rename(at / "gone")
    torch.distributed.barrier()
    for call in (lambda: mw.check_export(engine.model, out), lambda: dict(mw.stream(engine.model, format="source"))):
        with pytest.raises(mw.MeshwrightError, match=r"model\.safetensors"):
            call()
        torch.distributed.barrier()


def test_a_source_that_is_read_again(directory: Callable[[str, str], Path], tmp_path: Path) -> None:
    at = rewritten(directory("qwen3", "bfloat16"), tmp_path / "m", lambda config, files: None)
    worlds.run(2, goes_on, at, tmp_path / "out")


def heads(at: Path) -> None:
    for head in ("lm", "value", "none"):
        assert mw.check_weights(mw.load(at, mw.Mesh(device="cpu"), head=head)).ok


def test_a_head_in_8_bits(directory: Callable[[str, str], Path], tmp_path: Path) -> None:

    def change(config: dict[str, Any], files: dict[str, Tensor]) -> None:
        numbers, grid = quantised.quantise(files["lm_head.weight"], quantised.BLOCK, torch.bfloat16)
        files |= {"lm_head.weight": numbers, "lm_head.weight_scale_inv": grid}

    worlds.run(1, heads, rewritten(directory("qwen3", "bfloat16"), tmp_path / "m", change))


@pytest.mark.parametrize("most", [1e-9, 2e-7, 6.5e-7, 4e-5, 1.455e-4, 1e-3, 0.3, 20.0])
def test_small_values_keep_their_size(most: float) -> None:
    """float16 has few digits left for the smallest scales."""
    grid = quant_formats.scales_to_float(
        quant_formats.scales_to_stored(quant_formats.scales_for_amax(torch.tensor([[most]])), "F16")
    )
    value = torch.tensor([[most]])
    result = quant_formats.dequantise(quant_formats.quantise(value, grid), grid)
    assert abs(float(result) / most - 1) < (0.07 if most > 1e-7 else 1)


def kept_to_the_byte(source: Path, at: Path) -> bool:
    model = mw.load(source, mw.Mesh(device="cpu"))  # products see bfloat16 of it
    mw.export(model, at)
    return (at / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


def test_an_untouched_block_stays_at_the_ends_of_the_range(
    directory: Callable[[str, str], Path], tmp_path: Path
) -> None:
    """bfloat16 has few digits for small scales, and the largest becomes infinite. Each file has every number."""

    def change(scale: float, _: dict[str, Any], files: dict[str, Tensor]) -> None:
        key = "model.layers.0.mlp.down_proj.weight"
        codes = torch.arange(256, dtype=torch.uint8)
        codes = codes[(codes & 127) < 127].repeat(files[key].numel() // 254 + 1)[: files[key].numel()]
        files[key] = codes.view(files[key].shape).view(torch.float8_e4m3fn)
        files[key + "_scale_inv"] = torch.full_like(files[key + "_scale_inv"], scale)

    acts = {}
    for scale in (1e-40, 1e-38, 3e-38, 0.01, 7.59e35):
        source = rewritten(directory("qwen3", "float32"), tmp_path / str(scale), functools.partial(change, scale))
        acts[scale] = functools.partial(kept_to_the_byte, source, tmp_path / f"{scale}, out")
    assert all(answer == [True] for answer in worlds.in_turn(1, acts).values())


@pytest.mark.parametrize("dtype", ["F8_E8M0", "U8"])
def test_powers_of_two_are_rounded_up(dtype: str) -> None:
    """Rounded down, the largest values of a block would saturate. The codes have no larger and no smaller powers."""
    scales = torch.tensor([1.0, 1.01, 1.5, 2.0, 3.9, 0.0007, 3e38, 1e-45])
    stored = quant_formats.scales_to_float(quant_formats.scales_to_stored(scales, dtype))
    assert stored.tolist() == [1.0, 2.0, 2.0, 2.0, 4.0, 2.0**-10, 2.0**127, 2.0**-127]
