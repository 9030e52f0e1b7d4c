"""Check what a family computes where `config.json` leaves a field out, and which fields of attention it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.errors import ConfigError
from meshwright.models import describe
from meshwright.recipe import Recipe
from meshwright.sharding import Init
from tests import seeing
from tests.tiny import ODD

Fields = dict[str, Any]


@pytest.mark.parametrize("field", ["use_sliding_window", "attention_dropout", "hidden_act", "is_causal"])
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen4_exp"])
def test_fields_that_would_change_attention_are_refused(name: str, field: str) -> None:
    other = {"use_sliding_window": True, "attention_dropout": 0.5, "hidden_act": "gelu", "is_causal": False}[field]
    with pytest.raises(ConfigError, match=f"{field}="):
        describe({**ODD[name], field: other}, "model.")


def least_of(name: str, **changes: Any) -> Fields:
    """Return a config without the fields that have a default."""
    optional = ("head_dim", "rope_parameters", "norm_topk_prob", "hc_count", "hc_lowrank", "full_attention_interval")
    config = {key: value for key, value in ODD[name].items() if key not in optional}
    return {**config, "hidden_size": 56, "indexer_head_dim": 256, **changes}


@pytest.mark.parametrize(
    ("name", "head", "rotated", "theta", "renormalise"),
    [
        ("qwen2", 14, 14, 1e4, None), ("qwen3", 128, 128, 1e4, None), ("qwen3_moe", 14, 14, 1e4, False),
        ("qwen3_5", 256, 64, 1e4, None), ("qwen3_5_moe", 256, 64, 1e4, True), ("qwen3_next", 256, 64, 1e4, True),
        ("qwen4_exp", 256, 256, 1e4, True), ("qwen3_vl_text", 128, 128, 5e5, None),
        ("qwen3_vl_moe_text", 14, 14, 5e5, True),
    ],
)  # fmt: skip
def test_defaults_of_families(name: str, head: int, rotated: int, theta: float, renormalise: bool | None) -> None:
    """A head of 14 dims is the width, 56, over the number of heads."""
    like = {"qwen3_vl_text": "qwen3", "qwen3_vl_moe_text": "qwen3_moe"}.get(name, name)
    model, _ = describe(least_of(like, model_type=ODD[like]["model_type"] if like == name else name), "model.")
    mixer = next(layer.mixer for layer in model.layers.values() if hasattr(layer.mixer, "head"))
    assert mixer.head == head
    assert (model.shape.rotary.dim, model.shape.rotary.theta) == (rotated, theta)
    routed = [layer.mlp.routing.renormalise for layer in model.layers.values() if hasattr(layer.mlp, "routing")]
    assert {*routed} == (set() if renormalise is None else {renormalise})


def test_defaults_of_residual_streams_and_sections() -> None:
    model, wide = (describe(least_of("qwen4_exp", head_dim=head), "model.")[0] for head in (64, 256))
    assert (model.shape.streams, model.layers["0"].read.down.param.rows) == (4, {"rank": 320})
    assert model.layers["2"].mixer.indexer.index.sections == (11, 11, 10)
    assert wide.layers["2"].mixer.indexer.index.sections is None, "they are for 32 frequencies"


@pytest.mark.parametrize(
    ("name", "head", "sections"),
    [("qwen3_vl", 128, (24, 20, 20)), ("qwen3_vl_moe", 128, (24, 20, 20)), ("qwen3_5", 256, (11, 11, 10)),
     ("qwen3_5_moe", 256, (11, 11, 10)), ("qwen4_exp", 64, (11, 11, 10))],
)  # fmt: skip
def test_default_sections_of_models_that_see(name: str, head: int, sections: Any) -> None:
    config = seeing.of(name, head_dim=head, rope_parameters=None, indexer_head_dim=head)
    model, _ = describe(config, "model.language_model.", Recipe(tower=True))
    assert model.shape.sections == sections


def test_initial_values_of_a_delta_net() -> None:
    model, table = describe(ODD["qwen3_5"], "model.")
    values = {name: table[f"layers.0.mixer.{name}"].init for name in ("gates.A_log", "gates.dt_bias", "norm.weight")}
    assert [*values.values()] == [Init("log_uniform", 16.0), Init("ones"), Init("ones")]
    assert model.layers["0"].mixer.states.floats, "state maps multiply up over parts"


@pytest.mark.parametrize("changes", [dict(mlp_only_layers=[0, 2]), dict(decoder_sparse_step=2)], ids=str)
def test_the_layer_of_an_mtp_head_has_experts_if_any_layer_has(changes: Fields) -> None:
    model, _ = describe({**ODD["qwen3_next"], "mlp_only_layers": [], **changes}, "model.", Recipe(mtp="all"))
    assert model.mtp is not None
    assert hasattr(model.mtp.layer.mlp, "experts")
