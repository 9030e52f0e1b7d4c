"""Configs and keys that are hostile, broken or of another model: each ends in an error of our own, at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import meshwright as mw
from tests import tiny
from tests.hostile import refused
from tests.words import words

CONFIGS: dict[str, tuple[bytes | dict[str, Any], str]] = {
    "no JSON": (b"{", r"config\.json: malformed"),
    "no UTF-8": (b"\xff\xfe", r"config\.json: malformed"),
    "list": (b"[1]", words(r"config\.json", r"\blist\b")),
    "null": (b"null", words(r"config\.json", "NoneType")),
    "deep": (b'{"a":' * 200_000, r"too deep|malformed"),
    "NaN": (b'{"rms_norm_eps": NaN}', r"\bNaN\b.*\bJSON\b"),
    "doubled": (b'{"model_type":"qwen3","model_type":"qwen2"}', r"'model_type'.*\btwice\b"),
    "empty": (b"{}", r"model_type=None\b"),
    "no family": (dict(model_type="llama"), r"model_type='llama'"),
    "vision": (dict(model_type="qwen2_5_vl"), r"model_type='qwen2_5_vl'"),
    "model_type of a list": (dict(model_type=["qwen3"]), r"model_type=\['qwen3'\]"),
    "layer types of lists": (dict(layer_types=[["full_attention"]] * 2), r"layer_types=.*\bstr\b"),
    "dense layers of lists": (dict(model_type="qwen3_moe", mlp_only_layers=[[1]], num_experts=8, num_experts_per_tok=2,
        moe_intermediate_size=8), r"mlp_only_layers=\[\[1\]\].*\bint\b"),
    "epsilon beyond floats": (b'{"model_type":"qwen3","num_attention_heads":4,"num_key_value_heads":2,'
                              b'"vocab_size":5,"hidden_size":8,'
                              b'"rms_norm_eps":1' + b"0" * 400 + b"}", r"rms_norm_eps=1000.*\bfloat\b"),
    "sizes beyond tensors": (dict(vocab_size=2**31 - 1, hidden_size=2**31 - 1), r"\b2147483647\b"),
    "rotated by a string": (dict(model_type="qwen3_5_text", partial_rotary_factor="x", linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8),
        r"partial_rotary_factor='x'.*\bfloat\b"),
    "text_config of a list": (dict(model_type="qwen3_5", text_config=[1]), r"text_config=\[1\]"),
    "rope of each kind of layer": (dict(rope_parameters={"full_attention": {"rope_type": "yarn", "factor": 4.0,
        "rope_theta": 1e6}}), words("'full_attention'", "rope_parameters", "rope_type.*rope_theta")),
    "rope of a string": (dict(rope_parameters="yarn"), r"rope_parameters='yarn'"),
    "layer types of a number": (dict(layer_types=5), r"layer_types=5\b.*\blist\b"),
    "router logits as text": (dict(model_type="qwen3_moe", output_router_logits="false", num_experts=8,
        num_experts_per_tok=2, moe_intermediate_size=8), r"output_router_logits='false'.*\bbool\b"),
    "dense layers of a number": (dict(model_type="qwen3_moe", mlp_only_layers=1, num_experts=8, num_experts_per_tok=2,
        moe_intermediate_size=8), r"mlp_only_layers=1\b.*\blist\b"),
    "width of a string": (dict(hidden_size="36"), r"hidden_size='36'.*\bint\b"),
    "wide": (dict(hidden_size=40), words(r"embed_tokens\.weight.*\(131, 36\)", r"embed\.weight.*\(131, 40\)")),
    "deeper than its files": (dict(num_hidden_layers=3), r"\bno model\.layers\.2\."),
    "shallower than its files": (dict(num_hidden_layers=1), words(r"model\.layers\.1\.", r"\bno parameter")),
    "endlessly wide": (dict(hidden_size=2**40), r"hidden_size=1099511627776\b"),
    "bias of attention": (dict(attention_bias=True), r"attention_bias=True"),
    "both ways": (dict(is_causal=False), r"is_causal=False\b"),
    "kv heads unsaid": (dict(num_key_value_heads=None), r"\bno 'num_key_value_heads'"),
    "other activation": (dict(hidden_act="gelu"), r"hidden_act='gelu'"),
}  # fmt: skip


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = tiny.directory(tmp_path_factory.mktemp(name), name)
        return made[name]

    return get


def copy_of(source: Path, at: Path) -> Path:
    at.mkdir()
    for path in source.iterdir():
        (at / path.name).write_bytes(path.read_bytes())
    return at


@pytest.mark.parametrize(("change", "pattern"), CONFIGS.values(), ids=CONFIGS.keys())
def test_configs(tmp_path: Path, plain: Callable[[str], Path], change: bytes | dict[str, Any], pattern: str) -> None:
    at = copy_of(plain("qwen3"), tmp_path / "m")
    if isinstance(change, dict):
        change = json.dumps(json.loads((at / "config.json").read_text()) | change).encode()
    (at / "config.json").write_bytes(change)
    with refused(mw.MeshwrightError, pattern, tmp_path):
        mw.load(at)


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        (dict(dtype=["float32"]), r"dtype=\['float32'\]"),
        (dict(quantization_config={"quant_method": "fp8"}), words(r"config\.json", "quantization_config")),
    ],
    ids=str,
)
def test_no_model_is_made_of(
    tmp_path: Path, plain: Callable[[str], Path], change: dict[str, Any], pattern: str
) -> None:
    at = copy_of(plain("qwen3"), tmp_path / "m")
    config = json.loads((at / "config.json").read_text()) | change
    (at / "config.json").write_text(json.dumps(config))
    with refused(mw.ConfigError, pattern, tmp_path):
        mw.init(at)


def test_config_that_is_missing_a_link_or_a_directory(tmp_path: Path, plain: Callable[[str], Path]) -> None:
    at = copy_of(plain("qwen3"), tmp_path / "m")
    (at / "config.json").unlink()
    with refused(mw.LoadError, r"\bno config\.json", tmp_path):
        mw.load(at)
    (at / "config.json").symlink_to("gone")
    with refused(mw.LoadError, r"\bno config\.json", tmp_path):
        mw.init(at)
    (at / "config.json").unlink()
    (at / "config.json").mkdir()
    with refused(mw.LoadError, r"\bno config\.json", tmp_path):
        mw.load(at)


Tensors = dict[str, torch.Tensor]
EXPERT = "model.layers.0.mlp.experts."


def cast(key: str, dtype: torch.dtype) -> Callable[[Tensors], object]:
    return lambda t: t.update({key: t[key].to(dtype)})


def fused(half: bool) -> Callable[[Tensors], object]:
    def change(tensors: Tensors) -> None:
        for layer in (0, 2):
            at = f"model.layers.{layer}.mlp.experts."
            tensors[at + "gate_up_proj"] = torch.zeros(8, 40, 36)
            if not half:
                tensors[at + "down_proj"] = torch.zeros(8, 36, 20)

    return change


def drop(pattern: str) -> Callable[[Tensors], object]:
    return lambda t: [t.pop(k) for k in list(t) if pattern in k]


NORM, Q, EMBED = "model.norm.weight", "model.layers.0.self_attn.q_proj.weight", "model.embed_tokens.weight"
KEYS: dict[str, tuple[str, Callable[[Tensors], object], type[mw.LoadError], str]] = {
    "int8": ("qwen3", cast(Q, torch.int8), mw.MismatchedKey, r"q_proj\.weight\b.*\bI8\b"),
    "bool": ("qwen3", cast(NORM, torch.bool), mw.MismatchedKey, r"norm\.weight\b.*\bBOOL\b"),
    "e4m3": ("qwen3", cast(Q, torch.float8_e4m3fn), mw.MismatchedKey, r"q_proj\.weight\b.*\bF8_E4M3\b"),
    "e5m2": ("qwen3", cast(Q, torch.float8_e5m2), mw.MismatchedKey, r"q_proj\.weight\b.*\bF8_E5M2\b"),
    "complex": ("qwen3", cast(NORM, torch.complex64), mw.MismatchedKey, r"norm\.weight\b.*\bC64\b"),
    "a scale": ("qwen3", lambda t: t.update({Q + "_scale_inv": torch.ones(1)}), mw.UnknownKey, r"scale_inv"),
    "a bias": ("qwen3", lambda t: t.update({Q[:-6] + "bias": torch.ones(40)}), mw.UnknownKey, r"q_proj\.bias"),
    "transposed": ("qwen3", lambda t: t.update({Q: t[Q].T.contiguous()}), mw.MismatchedKey, r"q_proj\b.*\(36, 40\)"),
    "scalar": ("qwen3", lambda t: t.update({NORM: torch.tensor(1.0)}), mw.MismatchedKey, r"norm\.weight\b.* \(\)"),
    "empty": ("qwen3", lambda t: t.update({NORM: torch.zeros(0)}), mw.MismatchedKey, r"norm\.weight\b.*\(0,\)"),
    "another prefix": ("qwen3", lambda t: t.update({"embed_tokens.weight": t.pop(EMBED)}), mw.LoadError,
        r"no layers\.0\."),
    "no head": ("qwen3", drop("lm_head"), mw.MissingKey, r"\blm_head\.weight"),
    "head of a tied model, misshapen": ("qwen3_tied", lambda t: t.update({"lm_head.weight": torch.zeros(5, 36)}),
        mw.MismatchedKey, r"lm_head\.weight"),
    "head of a tied model, integers": ("qwen3_tied", lambda t: t.update({"lm_head.weight": torch.zeros(131, 36).int()}),
        mw.MismatchedKey, r"I32"),
    "no embedding under a tie": ("qwen3_tied", drop("embed_tokens"), mw.MissingKey, r"embed_tokens"),
    "experts twice": ("qwen3_moe", fused(half=False), mw.LoadError, words(r"\bexperts\b", "per-expert, fused")),
    "experts and half of the other layout": ("qwen3_moe", fused(half=True), mw.UnknownKey, r"experts\.gate_up_proj"),
    "half of each layout": ("qwen3_moe", lambda t: (fused(half=True)(t), drop("up_proj.weight")(t),
        drop("gate_proj.weight")(t)), mw.MissingKey, r"\blayouts?\b"),
    "no experts": ("qwen3_moe", drop(".experts."), mw.MissingKey, r"\bexperts\."),
    "one expert lost": ("qwen3_moe", drop(EXPERT + "7.down"), mw.MissingKey, words(r"experts\.7\.down", r"\b1 of \d+")),
    "one expert too many": ("qwen3_moe", lambda t: t.update({EXPERT + "8.up_proj.weight": torch.zeros(20, 36)}),
        mw.UnknownKey, r"ts\.8"),
    "one expert transposed": ("qwen3_moe", lambda t: t.update({EXPERT + "3.up_proj.weight": torch.zeros(36, 20)}),
        mw.MismatchedKey, r"s\.3"),
    "no router": ("qwen3_moe", drop("mlp.gate.weight"), mw.MissingKey, r"mlp\.gate\.weight"),
    "no A_log": ("qwen3_5", drop("A_log"), mw.MissingKey, r"A_log"),
    "conv1d squeezed": ("qwen3_5", lambda t: t.update({k: v.squeeze() for k, v in t.items() if "conv" in k}),
        mw.MismatchedKey, r"conv"),
    "both prefixes": ("qwen3_5", lambda t: t.update({"model.language_model.a": torch.ones(36)}), mw.UnknownKey,
        r"language_model"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "change", "error", "pattern"), KEYS.values(), ids=KEYS.keys())
def test_keys(
    tmp_path: Path,
    plain: Callable[[str], Path],
    name: str,
    change: Callable[[Tensors], object],
    error: type[mw.LoadError],
    pattern: str,
) -> None:
    at = copy_of(plain(name), tmp_path / "m")
    tensors = load_file(at / "model.safetensors")
    change(tensors)
    save_file(tensors, at / "model.safetensors")
    with refused(error, pattern, tmp_path):
        mw.load(at)
