"""Read `config.json` for the models: fields, labels, RoPE, towers, n-grams, and the kinds of layers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from meshwright import ops
from meshwright.errors import ConfigError
from meshwright.models import (
    FAMILIES,
    classifier_of,
    describe,
    family_of,
    hf_config,
    placeholders_in,
    placeholders_of,
    prefix_of,
    text_config,
)
from meshwright.models.hf_config import (
    Labels,
    divides,
    label_names,
    labels_of,
    listed,
    refuse,
    refuse_endless,
    take,
    with_labels,
)
from meshwright.models.mtp import check_mtp, with_mtp_layers
from meshwright.models.ngram_embedding import hash_of
from meshwright.models.qwen3 import Heads, depth_of, heads_of, shape_of
from meshwright.models.qwen3_5 import DeltaShape, delta_of, layer_types
from meshwright.models.qwen3_moe import balance_of, routing_of
from meshwright.models.qwen4_exp import _layers_with_table
from meshwright.models.rope_config import rope_fields, rotary_of, sections_of
from meshwright.models.sparse_attention import IndexShape, index_of
from meshwright.models.vision_tower import patch_of, tower_shape_of
from tests.tiny import ODD

Fields = dict[str, Any]


@pytest.mark.parametrize(
    ("fields", "kind", "default", "result"),
    [
        (dict(x=3), int, 7, 3), ({}, int, 7, 7), (dict(x=None), int, 7, 7), (dict(x=2**31 - 1), int, None, 2**31 - 1),
        (dict(x=3), float, 0.5, 3.0), (dict(x=0), float, 0.5, 0.0), (dict(x=False), bool, True, False),
        (dict(x=""), str, "y", ""), (dict(x=-1.5), float, None, -1.5),
    ],
)  # fmt: skip
def test_a_field_is_read(fields: Fields, kind: type, default: object, result: object) -> None:
    read = take(fields, "x", kind, default)
    assert (read, type(read)) == (result, kind)


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({}, int), (dict(x=0), int), (dict(x=-1), int), (dict(x=True), int), (dict(x=True), float), (dict(x=2.0), int),
        (dict(x=2**31), int), (dict(x=2**31), float), (dict(x=math.inf), float), (dict(x=math.nan), float),
        (dict(x=1), bool), (dict(x="3"), int),
    ],
)  # fmt: skip
def test_a_field_that_cannot_be_is_refused(fields: Fields, kind: type) -> None:
    with pytest.raises(ConfigError, match=r"x\b"):
        take(fields, "x", kind)


@pytest.mark.parametrize("name", hf_config.MOST)
def test_bounds_of_sizes(name: str) -> None:
    assert take({name: hf_config.MOST[name]}, name, int) == hf_config.MOST[name]
    with pytest.raises(ConfigError, match="at most"):
        take({name: hf_config.MOST[name] + 1}, name, int)


def test_small_readers() -> None:
    refuse({"a": None, "b": 2}, {"a": (1,), "b": (1, 2), "c": (5,)})
    with pytest.raises(ConfigError, match="b=2 is not supported; it must be 1 or 3"):
        refuse({"b": 2}, {"a": (1,), "b": (1, 3)})
    assert divides("a", 3, "b", 12) == 4
    assert listed({"a": ["x", "y"]}, "a", str) == ["x", "y"]
    assert listed({"a": None}, "a", str) == listed({}, "a", str) == []
    for wrong in (["x", 3], [3, "x"], "x", {"x": 1}):
        with pytest.raises(ConfigError, match="must be a list of str"):
            listed({"a": wrong}, "a", str)
    refuse_endless(16, 4096)
    with pytest.raises(ConfigError, match="at most 65536"):
        refuse_endless(17, 4096)


TOKEN, SEQUENCE = ["XForTokenClassification"], ["XForSequenceClassification"]


@pytest.mark.parametrize(
    ("fields", "labels", "names"),
    [
        ({}, Labels(1, bias=False, new=True), ["LABEL_0"]),
        (dict(architectures=["XForCausalLM"], num_labels=3), Labels(3, new=True), ["LABEL_0", "LABEL_1", "LABEL_2"]),
        (dict(architectures=SEQUENCE), Labels(2, new=False), ["LABEL_0", "LABEL_1"]),
        (dict(architectures=TOKEN), Labels(2, bias=True, new=False), ["LABEL_0", "LABEL_1"]),
        (
            dict(architectures=TOKEN, token_classification_bias=False, num_labels=1),
            Labels(1, bias=False, new=False), ["LABEL_0"],
        ),
        (dict(token_classification_bias=True), Labels(1, bias=True, new=False), ["LABEL_0"]),
        (dict(id2label={"0": "no", "1": "yes", "2": "?"}), Labels(3, new=True), ["no", "yes", "?"]),
        (dict(architectures=SEQUENCE, id2label={"1": "b", "0": "a", "2": 7}), Labels(3, new=False), ["a", "b", "7"]),
        (dict(num_labels=2, id2label={"1": "b", "7": "a"}), Labels(2, new=True), ["LABEL_0", "b"]),
        (dict(id2label={"0": "", "1": 0}), Labels(2, new=True), ["", "0"]),
    ],
)  # fmt: skip
def test_labels(fields: Fields, labels: Labels, names: list[str]) -> None:
    assert labels_of(fields) == labels
    assert label_names(fields) == names


@pytest.mark.parametrize(
    "fields", [dict(num_labels=2, id2label={"0": "a"}), dict(classifier_dropout=0.1), dict(architectures="x")]
)
def test_labels_that_disagree_are_refused(fields: Fields) -> None:
    with pytest.raises(ConfigError):
        labels_of(fields)


def test_names_of_labels_are_written_both_ways() -> None:
    named = dict(id2label={"0": "a", "1": "b"}, label2id={"a": 0, "b": 1}, num_labels=2)
    assert with_labels({"x": 1}, []) == {"x": 1}
    assert with_labels({"x": 1, "num_labels": 1}, ["a", "b"]) == {"x": 1, **named}
    classifier = {"architectures": SEQUENCE, "id2label": {0: "a", 1: "b"}}
    assert with_labels(classifier, ["a", "b"]) == {**classifier, **named}
    for changed in (["b", "a"], ["a"], ["a", "b", "c"]):
        with pytest.raises(ConfigError, match="is of a classifier"):
            with_labels(classifier, changed)
    with pytest.raises(ConfigError, match="is of a classifier"):
        with_labels({"architectures": SEQUENCE}, ["a", "b"])


YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=2048)
LLAMA = dict(YARN, rope_type="llama3", low_freq_factor=1.0, high_freq_factor=3.0)


@pytest.mark.parametrize(
    ("config", "head", "options", "result"),
    [
        ({}, 12, {}, ops.Rotary(12, 1e4, None, 1.0)),
        ({}, 12, dict(theta=5e5), ops.Rotary(12, 5e5, None, 1.0)),
        (dict(rope_theta=7e3), 12, dict(theta=5e5), ops.Rotary(12, 7e3, None, 1.0)),
        (dict(rope_theta=7e3, rope_parameters=dict(rope_theta=9e3)), 12, {}, ops.Rotary(12, 9e3, None, 1.0)),
        (dict(rope_theta=7e3, rope_scaling=dict(type="mrope")), 12, {}, ops.Rotary(12, 7e3, None, 1.0)),
        ({}, 24, dict(partial=0.25), ops.Rotary(6, 1e4, None, 1.0)),
        (dict(partial_rotary_factor=0.5), 24, dict(partial=0.25), ops.Rotary(12, 1e4, None, 1.0)),
        (
            dict(partial_rotary_factor=0.5, rope_parameters=dict(partial_rotary_factor=0.75)), 24, dict(partial=0.25),
            ops.Rotary(18, 1e4, None, 1.0),
        ),
        (dict(rope_scaling=dict(type="linear", factor=3)), 12, {}, ops.Rotary(12, 1e4, ops.LinearScaling(3.0), 1.0)),
        (dict(rope_scaling=LLAMA), 12, {}, ops.Rotary(12, 1e4, ops.Llama3Scaling(4.0, 2048, 1.0, 3.0), 1.0)),
        (
            dict(rope_scaling=YARN), 12, {},
            ops.Rotary(12, 1e4, ops.YarnScaling(4.0, 2048, 1.0, 32.0, True), 0.1 * math.log(4) + 1),
        ),
        (
            dict(rope_scaling=dict(YARN, attention_factor=1.5, beta_slow=2, beta_fast=9, truncate=False)), 12, {},
            ops.Rotary(12, 1e4, ops.YarnScaling(4.0, 2048, 2.0, 9.0, False), 1.5),
        ),
        (
            dict(rope_scaling=dict(YARN, mscale=0.5, mscale_all_dim=2.0)), 12, {},
            ops.Rotary(12, 1e4, ops.YarnScaling(4.0, 2048, 1.0, 32.0, True),
                       (0.05 * math.log(4) + 1) / (0.2 * math.log(4) + 1)),
        ),
        (  # the context may stand at the top
            dict(original_max_position_embeddings=99, rope_scaling=dict(type="yarn", factor=2.0)), 12, {},
            ops.Rotary(12, 1e4, ops.YarnScaling(2.0, 99, 1.0, 32.0, True), 0.1 * math.log(2) + 1),
        ),
        (
            dict(rope_scaling=dict(type="linear", factor=3.0), rope_parameters=dict(rope_theta=7.0, rope_type="linear",
                 factor=2.0), rope_theta=5.0), 12, {}, ops.Rotary(12, 5.0, ops.LinearScaling(3.0), 1.0),
        ),
    ],
)  # fmt: skip
def test_rope(config: Fields, head: int, options: Fields, result: ops.Rotary) -> None:
    rotary = rotary_of(config, head, **options)
    assert rotary == replace(result, attention=pytest.approx(result.attention))


@pytest.mark.parametrize(
    ("config", "head", "options"),
    [
        (dict(rope_theta=1.0), 12, {}), ({}, 7, {}), ({}, 10, dict(partial=0.25 / 3)),
        (dict(partial_rotary_factor=0.5), 12, {}), (dict(partial_rotary_factor=1.5), 12, dict(partial=0.5)),
        (dict(partial_rotary_factor=0.0), 12, dict(partial=0.5)), (dict(rope_scaling=YARN), 12, dict(scaled=False)),
        (dict(rope_scaling=dict(YARN, beta_slow=32.0)), 12, {}),
        (dict(rope_scaling=dict(LLAMA, low_freq_factor=3.0)), 12, {}),
        (dict(rope_scaling=dict(YARN, factor=2e6)), 12, {}),
        (dict(rope_scaling=dict(type="default"), rope_parameters=dict(mrope_section=[1, 1, 1])), 12, {}),
    ],
)  # fmt: skip
def test_rope_that_is_not_computed_is_refused(config: Fields, head: int, options: Fields) -> None:
    with pytest.raises(ConfigError):
        rotary_of(config, head, **options)


def test_sections_of_mrope() -> None:
    default = (3, 2, 1)
    assert sections_of({}, 6, default) == default
    assert sections_of(dict(rope_scaling=dict(mrope_section=[1, 0, 5])), 6, default) == (1, 0, 5)
    for wrong in ([1, 5], [1, 1, 5], [-1, 1, 6]):
        with pytest.raises(ConfigError, match="mrope_section"):
            sections_of(dict(rope_scaling=dict(mrope_section=wrong)), 6, default)
    with pytest.raises(ConfigError, match="mrope_interleaved"):
        sections_of(dict(rope_scaling=dict(mrope_interleaved=False)), 6, default)
    assert rope_fields(dict(rope_scaling=dict(type="mrope", rope_theta=None)))["rope_type"] == "default"


def test_shapes_of_attention_delta_nets_and_experts() -> None:
    attention = dict(num_attention_heads=12, num_key_value_heads=3)
    assert heads_of(attention, 5, bias=True) == Heads(12, 3, 5, normed=True, bias=True, gated=False)
    assert heads_of({**attention, "head_dim": 7}, 5, normed=False, gated=True) == Heads(12, 3, 7, False, False, True)
    with pytest.raises(ConfigError, match="num_key_value_heads=5"):
        heads_of({**attention, "num_key_value_heads": 5}, 5)
    delta = dict(linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=5, linear_value_head_dim=7)
    assert delta_of(delta) == DeltaShape(2, 3, 5, 7, 4)
    assert delta_of({**delta, "linear_conv_kernel_dim": 3}).kernel == 3
    experts = dict(num_experts_per_tok=3, moe_intermediate_size=5, num_hidden_layers=2)
    routing = routing_of({**experts, "num_experts": 8}, renormalise=True)
    assert (routing.experts, routing.top_k, routing.ffn, routing.renormalise, routing.turned) == (8, 3, 5, True, False)
    assert routing_of({**experts, "num_local_experts": 3}, renormalise=False).experts == 3
    with pytest.raises(ConfigError, match="is more than num_experts=2"):
        routing_of({**experts, "num_experts": 2}, renormalise=False)
    with pytest.raises(ConfigError, match="17 layers of 4096 experts"):
        routing_of({**experts, "num_experts": 4096, "num_hidden_layers": 17}, renormalise=False)
    given = dict(router_aux_loss_coef=0.25)
    balances = [
        balance_of(f, routing)
        for f in (given, {**given, "output_router_logits": True}, dict(output_router_logits=True))
    ]
    assert [(each.num_experts, each.top_k, each.coefficient) for each in balances] == [
        (8, 3, 0.0),
        (8, 3, 0.25),
        (8, 3, 0.001),
    ]


def test_what_all_families_share() -> None:
    rotary = ops.Rotary(4, 1e4, None, 1.0)
    least = shape_of(dict(vocab_size=11, hidden_size=6), rotary)
    assert (least.vocab, least.width, least.eps, least.tied, least.std, least.zero_centred) == (
        11,
        6,
        1e-6,
        False,
        0.02,
        False,
    )
    more = dict(rms_norm_eps=1e-5, tie_word_embeddings=True, initializer_range=0.5, num_labels=3)
    shape = shape_of(dict(vocab_size=11, hidden_size=6, **more), rotary, zero_centred=True)
    assert (shape.eps, shape.tied, shape.std, shape.zero_centred, shape.labels.num) == (1e-5, True, 0.5, True, 3)
    assert shape.stream_width == 6
    assert depth_of(dict(num_hidden_layers=2, layer_types=["full_attention"] * 2)) == 2
    for wrong in (["full_attention"], ["full_attention", "sliding_attention"]):
        with pytest.raises(ConfigError, match="must be 2 of 'full_attention'"):
            depth_of(dict(num_hidden_layers=2, layer_types=wrong))


def test_kinds_of_layers() -> None:
    linear, full = "linear_attention", "full_attention"
    assert layer_types(dict(num_hidden_layers=5)) == [linear] * 3 + [full, linear]
    assert layer_types(dict(num_hidden_layers=4, full_attention_interval=3)) == [linear, linear, full, linear]
    assert layer_types(dict(num_hidden_layers=2, layer_types=[full, linear])) == [full, linear]
    for wrong in ([full], [full, "other"]):
        with pytest.raises(ConfigError, match="must be 2 of"):
            layer_types(dict(num_hidden_layers=2, layer_types=wrong))
    of_tables = dict(num_hidden_layers=5)
    assert _layers_with_table({**of_tables, "ple_layer_ids": [5, 1]}) == [0, 4]
    for numbers in ([4], [0], [6], [1, 1]):
        with pytest.raises(ConfigError, match="ple_layer_ids"):
            _layers_with_table({**of_tables, "ple_layer_ids": numbers})


def experts_in(config: Fields) -> list[bool]:
    model, _ = describe(config, "model.")
    return [hasattr(layer.mlp, "experts") for layer in model.layers.values()]


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_next"])
def test_which_layers_have_experts(name: str) -> None:
    config = {**ODD[name], "num_hidden_layers": 5, "layer_types": None, "mlp_only_layers": [3]}
    assert experts_in(config) == [True, True, True, False, True]
    assert experts_in({**config, "decoder_sparse_step": 2}) == [False, True, False, False, False]


def test_hashes_of_ngrams() -> None:
    hashed = hash_of(dict(eos_token_id=[5, 6]), 11, 2)
    assert hashed == ops.NgramHash(11, 3, 8, 20_000_000, 128, 1234, 5, 2)
    given = dict(eos_token_id=0, ngram_size=2, heads_per_ngram=3, ngram_vocab_size_base=50, seed=9)
    assert hash_of({**given, "make_ngram_vocab_size_divisible_by": 6}, 11, 0) == ops.NgramHash(11, 2, 3, 50, 6, 9, 0, 0)
    for wrong in ({}, dict(eos_token_id=11), dict(eos_token_id=-1), dict(eos_token_id=True), dict(eos_token_id=[])):
        with pytest.raises(ConfigError, match="eos_token_id"):
            hash_of(wrong, 11, 0)
    with pytest.raises(ConfigError, match="ngram_size=1"):
        hash_of(dict(eos_token_id=1, ngram_size=1), 11, 0)


def test_shape_of_an_indexer() -> None:
    given = dict(indexer_n_heads=5, indexer_head_dim=8, indexer_compress_ratio=4, indexer_budget=12)
    assert index_of(given, ops.Rotary(8, 1e4, None, 1.0), (2, 1, 1)) == IndexShape(5, 8, 4, 3, (2, 1, 1))
    with pytest.raises(ConfigError, match="fewer dims than the 10"):
        index_of(given, ops.Rotary(10, 1e4, None, 1.0), None)
    with pytest.raises(ConfigError, match="indexer_budget=10"):
        index_of({**given, "indexer_budget": 10}, ops.Rotary(8, 1e4, None, 1.0), None)


TOWER = dict(depth=5, hidden_size=24, num_heads=3, intermediate_size=20, patch_size=4, out_hidden_size=36,
             num_position_embeddings=25, initializer_range=0.5)  # fmt: skip


def tower_of(model_type: str = "qwen3_5", width: int = 36, **changes: Any) -> Any:
    vision = {k: v for k, v in {**TOWER, **changes}.items() if v is not None}
    return tower_shape_of(dict(model_type=model_type, vision_config=vision), width, 3)


def test_shape_of_a_tower() -> None:
    shape = tower_of()
    assert (shape.width, shape.depth, shape.heads, shape.ffn, shape.places) == (24, 5, 3, 20, 25)
    assert (shape.theta, shape.std, shape.pixels.sizes, shape.pixels.num) == (1e4, 0.5, (3, 2, 4, 4), 96)
    assert (shape.taps, shape.head) == ((), 8)
    assert shape.cost(7) == 7 * (4 * 24 * 24 + 2 * 24 * 20 + 2 * 7 * 24)
    assert tower_of(rope_parameters=dict(rope_theta=7.0)).theta == 7.0
    older = tower_of(num_heads=None, num_attention_heads=2, depth=None, num_hidden_layers=4)
    assert (older.heads, older.depth) == (2, 4)
    least = tower_of(width=3584, **dict.fromkeys(TOWER))
    assert (least.width, least.depth, least.heads, least.ffn) == (1152, 27, 16, 4304)
    assert (least.places, least.std, least.pixels.side) == (2304, 0.02, 16)
    assert patch_of(dict(vision_config=dict(patch_size=14))) == 14
    assert tower_of("qwen3_vl", deepstack_visual_indexes=[0, 2, 4]).taps == (0, 2, 4)
    assert tower_of("qwen3_vl", deepstack_visual_indexes=[]).taps == ()
    assert tower_of("qwen3_vl_moe", depth=25).taps == (8, 16, 24)


@pytest.mark.parametrize(
    "changes",
    [
        dict(num_heads=4), dict(num_position_embeddings=24), dict(out_hidden_size=35), dict(num_heads=5),
        dict(model_type="qwen3_vl", deepstack_visual_indexes=[1, 5]), dict(deepstack_visual_indexes=[1]),
        dict(model_type="qwen3_vl", deepstack_visual_indexes=[2, 1]), dict(hidden_act="gelu"),
        dict(model_type="qwen3_vl", deepstack_visual_indexes=[0, 1, 2, 3]), dict(in_channels=1),
        dict(model_type="qwen3_vl", deepstack_visual_indexes=[-1, 1]),
        dict(model_type="qwen3_vl", deepstack_visual_indexes=[1, 1]), dict(spatial_merge_size=1),
        dict(temporal_patch_size=1), dict(rope_parameters=dict(rope_type="yarn", factor=2.0)),
    ],
)  # fmt: skip
def test_towers_that_are_not_computed_are_refused(changes: Fields) -> None:
    with pytest.raises(ConfigError):
        tower_of(**changes)


def test_text_of_a_config_with_a_tower() -> None:
    whole = dict(model_type="qwen3_5", tie_word_embeddings=True, architectures=TOKEN, num_labels=3, id2label=None,
                 text_config=dict(hidden_size=5, num_labels=9, tie_word_embeddings=False))  # fmt: skip
    assert text_config(whole) == dict(
        model_type="qwen3_5_text", hidden_size=5, tie_word_embeddings=True, architectures=TOKEN, num_labels=3
    )
    inner = dict(model_type="qwen3_5", text_config=dict(tie_word_embeddings=True))
    assert text_config(inner)["tie_word_embeddings"] is True
    assert text_config({**inner, "model_type": "qwen3_vl"})["tie_word_embeddings"] is False
    assert (
        text_config({**inner, "model_type": "qwen3_vl_moe", "tie_word_embeddings": True})["tie_word_embeddings"] is True
    )
    with pytest.raises(ConfigError, match="is false at the top"):
        text_config({**inner, "tie_word_embeddings": False})
    with_bias = {**inner, "text_config": dict(token_classification_bias=True), "token_classification_bias": False}
    assert text_config(with_bias)["token_classification_bias"] is False
    for name in ("rope_scaling", "rope_parameters"):
        with pytest.raises(ConfigError, match=f"{name} at the top"):
            text_config({**inner, name: {"rope_type": "default"}})
    assert text_config(ODD["qwen3"]) is ODD["qwen3"]


@pytest.mark.parametrize(
    ("kind", "classifier", "served", "mtp", "keys_without_source"),
    [
        ("qwen2", "Qwen2ForSequenceClassification", "", "", "model."),
        ("qwen3_moe", "Qwen3MoeForSequenceClassification", "per-expert", "", "model."),
        ("qwen3_5", "Qwen3_5ForSequenceClassification", "", "mtp_num_hidden_layers", "model.language_model."),
        ("qwen3_5_text", "Qwen3_5TextForSequenceClassification", "", "mtp_num_hidden_layers", "model."),
        ("qwen3_5_moe", "", "fused", "mtp_num_hidden_layers", "model.language_model."),
        ("qwen3_5_moe_text", "", "fused", "mtp_num_hidden_layers", "model."),
        ("qwen3_next", "Qwen3NextForSequenceClassification", "", "num_nextn_predict_layers", "model."),
        ("qwen3_vl", "", "", "", "model.language_model."), ("qwen3_vl_moe", "", "", "", "model.language_model."),
        ("qwen4_exp", "", "fused", "mtp_num_hidden_layers", "model.language_model."),
    ],
)  # fmt: skip
def test_families(kind: str, classifier: str, served: str, mtp: str, keys_without_source: str) -> None:
    config = dict(model_type=kind, text_config={})
    family = family_of(config)
    assert (classifier_of(config), family.served, family.mtp) == (classifier, served, mtp)
    assert prefix_of(config, None) == keys_without_source
    assert prefix_of(config, {"embed_tokens.weight", "model.norm.weight"}) == ""
    assert prefix_of(config, {"model.embed_tokens.weight"}) == "model."
    assert prefix_of(config, {"norm.weight"}) == "model."
    visual = "model.visual.*" in family.carried
    assert visual == (kind not in ("qwen2", "qwen3_moe", "qwen3_next"))
    assert ("mtp.*" in family.carried) == (visual or kind == "qwen3_next")


def test_ids_of_placeholders() -> None:
    assert placeholders_of(dict(model_type="qwen3_5_moe")) == (248056, 248057)
    assert placeholders_of(dict(model_type="qwen3_vl", video_token_id=7)) == (151655, 7)
    assert placeholders_of(dict(model_type="qwen3_vl_moe")) == (151655, 151656)
    assert placeholders_in(dict(model_type="qwen4_exp", image_token_id=5)) == (5, 248057)
    assert placeholders_in(ODD["qwen3"]) == ()
    for wrong in ("151655", 0, -1):
        with pytest.raises(ConfigError, match="image_token_id="):
            placeholders_of(dict(model_type="qwen3_vl", image_token_id=wrong))
    with pytest.raises(ConfigError, match="has no vision tower"):
        placeholders_of(ODD["qwen3_5"])


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ({}, dict(field=""), "has no MTP head"), ({}, dict(head="value"), "predicts tokens"),
        ({}, dict(tower=True), "tower=True"), (dict(mtp_use_dedicated_embeddings=True), {}, "dedicated"),
        (dict(n=2), {}, "n=2"), (dict(n=1), {}, ""), ({}, {}, ""),
    ],
)  # fmt: skip
def test_mtp_heads_that_are_not_trained(config: Fields, options: Fields, message: str) -> None:
    asked = dict(field="n", head="lm", tower=False, mode="all") | options
    field = asked.pop("field")
    if not message:
        check_mtp(config, field, **asked)
        return
    with pytest.raises(ConfigError, match=message):
        check_mtp(config, field, **asked)


def test_the_number_of_mtp_layers_stands_where_the_family_says_it() -> None:
    assert with_mtp_layers({"a": 1}, "n", 3) == {"a": 1, "n": 3}
    assert with_mtp_layers({"a": 1, "text_config": {"b": 2}}, "n", 0) == {"a": 1, "text_config": {"b": 2, "n": 0}}
    assert {family.mtp for family in FAMILIES.values()} == {"", "mtp_num_hidden_layers", "num_nextn_predict_layers"}
