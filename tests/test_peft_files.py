"""Adapters in PEFT's files: what is refused, whose factors are exchanged, and the config that is written."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from meshwright.blueprint import Blueprint
from meshwright.errors import LoadError
from meshwright.recipe import Lora, Recipe
from meshwright.sharding import Param
from meshwright.weights import peft_files
from meshwright.weights.peft_files import (
    CONFIG_FILE,
    PREFIX,
    WEIGHTS_FILE,
    AdapterFiles,
    Pair,
    base_of,
    open_adapter,
    recipe_of,
)
from tests import tiny


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


@pytest.mark.parametrize(("saved", "task"), [((), "CAUSAL_LM"), (("score",), None)])
def test_an_adapter_with_a_trained_head_has_no_task(saved: tuple[str, ...], task: str | None) -> None:
    config = peft_files.config_of(Lora(rank=3), [], "fused", "BASE", saved=saved)
    assert (config["task_type"], config["modules_to_save"], config["r"]) == (task, [*saved] or None, 3)


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


HALF = {"experts": 2}


@pytest.mark.parametrize(
    ("fields", "rank"),
    [
        (dict(rank_pattern=None, alpha_pattern=None), None), (dict(rank_pattern=HALF, alpha_pattern={"experts": 4}), 2),
        (dict(rank_pattern={"experts": 1}, alpha_pattern={"experts": 4}, use_rslora=True), 1),  # the root of a rank
        (dict(rank_pattern={"experts": 1}, alpha_pattern={"experts": 2}, use_rslora=True), "refused"),
        (dict(rank_pattern={"experts": 3}, alpha_pattern={"experts": 6 * (1 - 1e-9)}), 3),  # may be rounded
        (dict(rank_pattern={"experts": 3}, alpha_pattern={"experts": 6.006}), "refused"),
        (dict(rank_pattern={"a.experts": 2, "b.experts": 3}, alpha_pattern={"experts": 4}), "refused"),
        (dict(rank_pattern={"q_proj": 2}, alpha_pattern={"experts": 4}), "refused"),
        (dict(rank_pattern=HALF, alpha_pattern={"q_proj": 4}), "refused"), (dict(rank_pattern=HALF), "refused"),
        (dict(rank_pattern=HALF, alpha_pattern={"experts": 8}), "refused"),
        (dict(alpha_pattern={"experts": 4}), "refused"),
    ],
)  # fmt: skip
def test_experts_of_another_rank_have_the_scale_of_all(fields: dict[str, Any], rank: int | str | None) -> None:
    files = AdapterFiles(Path("DIR"), {"r": 4, "lora_alpha": 8.0, **fields}, {})
    if rank != "refused":
        assert peft_files._expert_rank(files) == rank
        return
    with pytest.raises(LoadError, match=r"rank_pattern=.* and alpha_pattern=.* give modules scales of their own"):
        peft_files._expert_rank(files)


MODULES = ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.experts.3.up_proj")
TARGETS = ("model.layers.0.mlp.experts.up_proj", "model.layers.0.self_attn.q_proj")


TWO = dict(r=4, lora_alpha=6)


@pytest.mark.parametrize(
    ("config", "given", "expected"),
    [
        (TWO, {}, dict(rank=4, alpha=6, rslora=False, expert_rank=None)), ({}, {}, dict(rank=8, alpha=8)),
        (TWO, dict(rank=4, alpha=6.0), dict(rank=4)), (TWO, dict(rank=5), "lora.rank=5"),
        (TWO, dict(alpha=7.0), "lora.alpha=7.0"), (TWO, dict(expert_rank=2), "lora.expert_rank=2"),
        (TWO | dict(use_rslora=True), {}, dict(rslora=True, alpha=6)),
        (TWO | dict(use_rslora=True), dict(rank=4, alpha=12.0), dict(rslora=True, alpha=6)),  # the same scale
        (TWO, dict(rank=4, alpha=3.0, rslora=True), dict(rslora=False, alpha=6)),
        (TWO, dict(targets=("k_proj",)), "lora.targets="),
        (TWO | dict(rank_pattern={"experts": 2}, alpha_pattern={"experts": 3}), {}, dict(rank=4, expert_rank=2)),
    ],
)  # fmt: skip
def test_the_options_of_an_adapter_are_those_of_its_files(
    tmp_path: Path, config: Any, given: Any, expected: Any
) -> None:
    names = (*MODULES, "model.layers.0.mlp.experts", "model.layers.0.mlp.experts.base_layer")
    shapes = {f"{PREFIX}{name}.lora_A.weight": (2, 3) for name in names}
    lora = Lora(**given, path=str(adapter(tmp_path, shapes, **config)))
    if isinstance(expected, str):
        with pytest.raises(LoadError, match=f"{expected}.* leave it out"):
            recipe_of(lora)
        return
    stated = recipe_of(lora)
    assert {name: vars(stated)[name] for name in expected} == expected
    assert (tuple(sorted(stated.targets)), stated.path) == (TARGETS, str(tmp_path.resolve()))
    assert recipe_of(plain := Lora(rank=3)) is plain


@pytest.mark.parametrize(
    ("stated", "config", "message"),
    [(["rank"], dict(r=4, lora_alpha=8), "lora.rank=16, but"), (["rank"], dict(r=16, lora_alpha=8), ""),
     (["alpha"], dict(r=4, lora_alpha=6), "lora.alpha=32.0, but"),
     (["targets"], dict(r=4, lora_alpha=8), "lora.targets="),
     (["path"], dict(r=4, lora_alpha=6), "")],
)  # fmt: skip
def test_a_stated_default_may_not_contradict_the_files(
    tmp_path: Path, stated: list[str], config: Any, message: str
) -> None:
    lora = Lora(path=str(adapter(tmp_path, **config)))
    recipe_of(lora)
    with pytest.raises(LoadError, match=message) if message else contextlib.nullcontext():
        recipe_of(lora, stated)


def test_ranks_compare_all_bytes_of_an_adapter(tmp_path: Path) -> None:
    lora, values, seen = Lora(path=str(tmp_path)), torch.zeros(3000), set[str]()
    for at in (0, 1500, -1):
        values[at] += 1
        save_file({"a": values}, tmp_path / WEIGHTS_FILE)
        seen.add(peft_files.checksum(lora))
    assert len(seen) == 3
    assert peft_files.checksum(Lora()) == ""


@pytest.mark.parametrize("base", [None, "", 3, "org/base"])
def test_an_adapter_names_its_base(tmp_path: Path, base: Any) -> None:
    at = adapter(tmp_path, **({} if base is None else {"base_model_name_or_path": base}))
    if base == "org/base":
        assert base_of(at) == base
        return
    with pytest.raises(LoadError, match="names no base_model_name_or_path"):
        base_of(at)
