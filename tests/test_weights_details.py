"""Details of reading and writing weights: which values count as equal, which files and keys are read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from meshwright.axes import Axes
from meshwright.blueprint import Blueprint
from meshwright.errors import BrokenFile, LoadError, MismatchedKey, MissingKey
from meshwright.ops import Grid
from meshwright.ops.codings import FP8, NF4
from meshwright.recipe import Lora, Recipe
from meshwright.weights import frozen_scales, peft_files, read_config, small_files
from meshwright.weights import keymap as keymap_module
from meshwright.weights.frozen_scales import Values, check_same
from meshwright.weights.keymap import ADAPTERS, of_table
from meshwright.weights.peft_files import CONFIG_FILE, PREFIX, WEIGHTS_FILE, AdapterFiles, Pair, open_adapter
from meshwright.weights.quant_formats import also_plain
from meshwright.weights.read_plan import plan_reads
from meshwright.weights.reader import check_keys
from meshwright.weights.source import _read_index
from tests import tiny

# Frozen weights that are compared with files


def frozen(coding: Any) -> tuple[Values, Tensor, Tensor]:
    """Return a matrix in codes, the values that it was made of, and those that it stands for."""
    made = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    made[0, 0] = float("nan") if coding is FP8 else made[0, 0]
    scales = torch.ones(1, 1)
    grid = Grid(scales, torch.zeros(3, dtype=torch.int64), torch.zeros(64, dtype=torch.int64), coding)
    if coding is FP8:
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
    source = SimpleNamespace(directory="DIR", stamps={}, check_unchanged=lambda _: None)
    check_same(values, 0, cast(Any, [SimpleNamespace(piece=piece, layout=None)]), cast(Any, source))


@pytest.mark.parametrize("coding", [FP8, NF4], ids=["fp8", "nf4"])
def test_frozen_codes_equal_their_values(coding: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In 4 bits the values before quantisation are accepted too: the model's own files have these."""
    values, made, dequantised = frozen(coding)
    compare(values, dequantised, monkeypatch)
    assert not torch.equal(made, dequantised)
    other = dequantised.clone()
    other[2, 63] = 0.0 if other[2, 63] else 1.0
    for refused in [other, *([made] if coding is FP8 else [])]:
        with pytest.raises(LoadError, match=f"DIR has other values of w, .* {8 if coding is FP8 else 4} bits"):
            compare(values, refused, monkeypatch)
    if coding is not FP8:
        compare(values, made, monkeypatch)


def test_values_that_quantise_to_others_are_accepted_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of a checkpoint equal those in memory; whether they would quantise to the same is not asked."""
    values, _, dequantised = frozen(NF4)
    monkeypatch.setattr(frozen_scales, "_quantised_as", lambda _grid, tensor: tensor + 1)
    compare(values, dequantised, monkeypatch)


# Adapters of PEFT


def adapter(at: Path, shapes: Mapping[str, Sequence[int]] | None = None, **config: Any) -> Path:
    at.mkdir(exist_ok=True)
    made = {PREFIX + "q.lora_A.weight": (2, 4)} if shapes is None else shapes
    save_file({key: torch.zeros(*shape) for key, shape in made.items()}, at / WEIGHTS_FILE)
    (at / CONFIG_FILE).write_text(json.dumps(config))
    return at


ODD_OPTIONS: dict[str, Any] = dict(
    peft_type="LOHA", use_dora=True, fan_in_fan_out=True, bias="all", lora_bias=True, trainable_token_indices=[1],
    modules_to_save=["lm_head"], layer_replication=[[0, 2]], megatron_config={"a": 1}, use_qalora=True,
    alora_invocation_tokens=[1], use_bdlora=True, arrow_config={"k": 1}, ensure_weight_tying=True,
    init_lora_weights="pissa",
)  # fmt: skip


@pytest.mark.parametrize("name", ODD_OPTIONS)
def test_options_of_adapters_that_change_numbers_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(LoadError, match=rf"adapter_config\.json: {name}=.* is not supported.* train one with {name}="):
        open_adapter(adapter(tmp_path, **{name: ODD_OPTIONS[name]}))
    for plain in peft_files._PLAIN[name]:
        open_adapter(adapter(tmp_path, **{name: plain}))
    assert {*ODD_OPTIONS} == {*peft_files._PLAIN}
    assert open_adapter(adapter(tmp_path, r=4)).shapes == {"q.lora_A.weight": (2, 4)}


@pytest.mark.parametrize("init", [True, False, "gaussian", "orthogonal", "eva", None])
def test_adapters_of_any_start_that_leaves_the_base(tmp_path: Path, init: Any) -> None:
    assert open_adapter(adapter(tmp_path, init_lora_weights=init)).config == {"init_lora_weights": init}


def test_broken_adapters_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="does not begin with base_model"):
        open_adapter(adapter(tmp_path, {"q.lora_A.weight": (2, 4)}))
    (adapter(tmp_path) / CONFIG_FILE).write_text("[]")
    with pytest.raises(LoadError, match=r"adapter_config\.json is not an object"):
        open_adapter(tmp_path)
    (tmp_path / CONFIG_FILE).unlink()
    with pytest.raises(LoadError, match="is not a PEFT adapter that can be read"):
        open_adapter(tmp_path)
    (adapter(tmp_path) / WEIGHTS_FILE).write_bytes(b"\xff" * 20)
    with pytest.raises(LoadError, match=r"adapter_model\.safetensors cannot be read"):
        open_adapter(tmp_path)


@pytest.mark.parametrize(
    ("version", "swapped"),
    [("0.18.1", True), ("0.19.0", True), ("0.19.1", False), ("0.21.2", False), ("1.0.0", False),
     ("0.19.0.dev0@unknown", True), ("0.19.1@abc", False), ("0.19", None), ("", None), (None, None), (19, None)],
)  # fmt: skip
def test_versions_of_peft_that_exchange_dims(version: Any, swapped: bool | None) -> None:
    assert AdapterFiles(Path(), {"peft_version": version}, {}).swapped is swapped


EXPERTS, RANK = 3, 2


def fused(a: Sequence[int], b: Sequence[int], **config: Any) -> tuple[AdapterFiles, Any]:
    """Return an adapter of 3 fused experts with these shapes, and the down projection [width 4 -> height 4 or 5]."""
    shapes = {"m.experts.lora_A.weight": tuple(a), "m.experts.lora_B.weight": tuple(b)}
    pair = SimpleNamespace(module="m.experts.down_proj", experts=EXPERTS, sizes=(RANK, 4, 5))
    return AdapterFiles(Path("DIR"), config, shapes), pair


def read(files: AdapterFiles, pair: Any) -> tuple[Tensor, Tensor]:
    take = lambda key, shape: torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)  # noqa: E731 - short
    return peft_files._read_fused(files, cast(Pair, pair), "m.experts", take)


def test_fused_adapters_that_do_not_fit() -> None:
    usual, exchanged = ((6, 4), (5, 6)), ((6, 5), (4, 6))
    for shapes, config in ((usual, {}), (usual, dict(peft_version="0.21.2")), (exchanged, {}),
                           (exchanged, dict(peft_version="0.19.0"))):  # fmt: skip
        a, b = read(*fused(*shapes, **config))
        assert (a.shape, b.shape) == ((EXPERTS, RANK, 4), (EXPERTS, 5, RANK))
    none = r"0 adapters fit m\.experts\.down_proj \(3 experts of \[5, 4\], rank 2; .* Base, rank and targets must be"
    for shapes, config in ((usual, dict(peft_version="0.19.0")), (exchanged, dict(peft_version="0.19.1")),
                           (((6, 4), (5, 4)), {})):  # fmt: skip
        with pytest.raises(LoadError, match=none):
            read(*fused(*shapes, **config))


def test_square_fused_adapters_need_their_version() -> None:
    def square(**config: Any) -> tuple[Tensor, Tensor]:
        files, pair = fused((6, 4), (4, 6), **config)
        pair.sizes = (RANK, 4, 4)
        return read(files, pair)

    with pytest.raises(LoadError, match=r"2 adapters fit .*peft_version=None.* after 0\.19\.0: add the peft_version"):
        square()
    (new_a, new_b), (old_a, old_b) = square(peft_version="0.21.2"), square(peft_version="0.19.0")
    # The product of an expert is transposed: B A of one is A^T B^T of the other.
    torch.testing.assert_close(new_b @ new_a, (old_b @ old_a).mT)


# Keys


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


@pytest.mark.parametrize("weight_map", [{"a": 1}, {"a": "x", "b": 1}, {"b": None, "a": "x"}, {}, ["a"], None, "x"])
def test_an_index_maps_keys_to_names(tmp_path: Path, weight_map: Any) -> None:
    at = tmp_path / "model.safetensors.index.json"
    at.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(BrokenFile, match=r"weight_map is .*it must map keys to file names"):
        _read_index(at)
    at.write_text(json.dumps({"weight_map": {"a": "x", "b": "y"}, "metadata": {}}))
    assert _read_index(at)[0]["weight_map"] == {"a": "x", "b": "y"}
    at.write_text(json.dumps({"weight_map": {"a": "x"}, "metadata": 1}))
    with pytest.raises(BrokenFile, match="metadata is 1, not an object"):
        _read_index(at)


def test_small_files_are_listed_in_the_order_of_their_names(tmp_path: Path) -> None:
    names = [f"{letter}.json" for letter in "zebracdf"]
    for name in (*names, "model.safetensors.index.json", "weights.safetensors"):
        (tmp_path / name).write_text("{}")
    assert [path.name for path in small_files._paths(tmp_path)] == sorted(names)


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


def config(layout: str, family: str = "qwen3_moe", plain: Sequence[str] = (), **options: Any) -> dict[str, Any]:
    """Return the adapter_config.json of a model with adapters."""
    lora = Lora(**{"rank": 4, "alpha": 8.0, **options})
    table = Blueprint.of(tiny.of(family, num_hidden_layers=2), None, Recipe(lora=lora)).table
    pairs = peft_files.pairs_of([param for param in table if param.adapter])
    return peft_files.config_of(lora, pairs, layout, "BASE", plain=plain)


def test_config_of_adapters_of_experts() -> None:
    fused, each, dense = config("fused"), config("per-expert"), config("fused", "qwen3")
    assert fused["target_parameters"]
    assert all(".experts." in name for name in fused["target_parameters"])
    assert not any("experts" in name for name in fused["target_modules"])
    assert each["target_parameters"] is dense["target_parameters"] is None
    assert {*each["target_modules"]} >= {*fused["target_modules"], "gate_proj", "up_proj", "down_proj"}
    plain = config("per-expert", plain=["model.layers.1.mlp.up_proj"])["target_modules"]
    assert "up_proj" not in plain
    assert sum(name.endswith(".up_proj") and ".experts." in name for name in plain) == 8  # of its one layer of experts
    assert "gate_proj" in plain


@pytest.mark.parametrize(
    ("options", "alpha", "pattern", "alphas"),
    [
        ({}, 8.0, {}, {}), (dict(rslora=True), 16.0, {}, {}), (dict(expert_rank=4), 8.0, {}, {}),
        (dict(expert_rank=2), 8.0, 2, 4.0), (dict(expert_rank=2, rslora=True), 16.0, 2, 8.0),
    ],
)  # fmt: skip
def test_scales_of_adapters(options: dict[str, Any], alpha: float, pattern: Any, alphas: Any) -> None:
    """The factor of rsLoRA is in alpha; experts of another rank have the same scale, alpha / rank."""
    made = config("fused", **options)
    assert (made["r"], made["lora_alpha"], made["use_rslora"]) == (4, alpha, False)
    assert [*made["rank_pattern"].values()] == ([pattern] if pattern else [])
    assert [*made["alpha_pattern"].values()] == ([alphas] if alphas else [])
    assert config("fused", "qwen3", **options)["rank_pattern"] == {}
    files = AdapterFiles(Path(), made, {})
    assert peft_files._expert_rank(files) == (pattern or None)
    assert (made["task_type"], made["modules_to_save"]) == ("CAUSAL_LM", None)


@pytest.mark.parametrize(
    "config",
    [
        dict(rank_pattern={"a.experts": 2, "b.experts": 3}, alpha_pattern={"experts": 4.0}),
        dict(rank_pattern={"q_proj": 2}, alpha_pattern={"experts": 4.0}),
        dict(rank_pattern={"experts": 2}, alpha_pattern={"q_proj": 4.0}),
        dict(rank_pattern={"experts": 2}), dict(rank_pattern={"experts": 2}, alpha_pattern={"experts": 8.0}),
        dict(alpha_pattern={"experts": 4.0}),
    ],
)  # fmt: skip
def test_adapters_with_scales_of_their_own_are_refused(config: dict[str, Any]) -> None:
    def rank_of(**fields: Any) -> int | None:
        return peft_files._expert_rank(AdapterFiles(Path("DIR"), {"r": 4, "lora_alpha": 8.0, **fields}, {}))

    with pytest.raises(LoadError, match=r"rank_pattern=.* and alpha_pattern=.* give modules scales of their own"):
        rank_of(**config)
    assert rank_of(rank_pattern={"experts": 2}, alpha_pattern={"experts": 4.0}) == 2
    assert rank_of(rank_pattern=None, alpha_pattern=None) is None
    assert rank_of(rank_pattern={"experts": 1}, alpha_pattern={"experts": 4.0}, use_rslora=True) == 1
