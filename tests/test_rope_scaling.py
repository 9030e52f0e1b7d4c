"""RoPE scaled to longer contexts: as transformers computes it, on documents longer than the original context; what it
would guess, skip or warn about is refused."""

from __future__ import annotations

import json
import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.models.rope_config import KINDS, rotary_of
from meshwright.ops import Rotary, rope_tables
from meshwright.verify import shrink
from tests import parts, tiny, trials, worlds
from tests.test_transformers import agree, ours, reference_outputs
from tests.words import words

Fields = dict[str, Any]

CONTEXT = "original_max_position_embeddings"
CARD: Fields = {"factor": 4.0, CONTEXT: 16}  # as the model cards write it, but for a shorter context
# The documents have up to 70 tokens. In a context of 16, frequencies of each kind are there: kept, mixed, scaled.
SCALED: dict[str, Fields] = {
    "yarn": {"rope_type": "yarn", **CARD},
    "yarn, attention": {"rope_type": "yarn", **CARD, "beta_fast": 2.0, "beta_slow": 0.01, "attention_factor": 0.7},
    "yarn, mscale": {"rope_type": "yarn", "factor": 3, CONTEXT: 40, "beta_fast": 4, "beta_slow": 0.1, "mscale": 0.707,
                     "mscale_all_dim": 2, "truncate": False},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 0.1, "high_freq_factor": 2.0, CONTEXT: 16},
}  # fmt: skip
PARTLY = {"rope_theta": 1000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
FAMILIES = ("qwen2", "qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe")
SHALLOW = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}


def parameters(name: str, kind: str) -> Fields:
    """Return the fields of a family's config, as transformers 5 writes them."""
    return {**(PARTLY if name.startswith("qwen3_5") else {"rope_theta": 1000.0}), **SCALED[kind]}


# Each kind, and each family; in `make matrix` each with each.
TRIED = {
    "qwen3": list(SCALED), "qwen3_moe": ["linear"], "qwen3_5_moe": ["yarn, mscale", "llama3"],
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES if parts.ALL else TRIED)
def test_logits_and_gradients(tmp_path: Path, name: str) -> None:
    shallow = SHALLOW if name.startswith("qwen3_5") else {}
    kinds = list(SCALED) if parts.ALL else TRIED[name]
    compare_all(tmp_path, {kind: (name, {"rope_parameters": parameters(name, kind), **shallow}) for kind in kinds})


def compare_all(at: Path, cases: dict[str, tuple[str, Fields]]) -> None:
    """Compare with transformers, in one world."""
    acts = dict[str, Any]()
    for case, (name, changes) in cases.items():
        acts[case] = partial(ours, tiny.directory(at / case, name, **changes))
        acts[f"{case}, transformers"] = partial(reference_outputs, name, changes)
    made = {case: ranks[0] for case, ranks in worlds.in_turn(1, acts).items()}
    for case in cases:
        agree(made[case], made[f"{case}, transformers"])


# Where the files of one time or another state the fields.
SPELLED: dict[str, tuple[str, Fields]] = {
    "Qwen2.5": ("qwen2", dict(rope_scaling={"type": "yarn", **CARD}, rope_theta=1000.0)),
    "Qwen3": ("qwen3", dict(rope_scaling={"rope_type": "yarn", **CARD}, rope_theta=1000.0, max_position_embeddings=40)),
    "both": ("qwen3", dict(rope_scaling={"rope_theta": 100.0, **SCALED["yarn"]}, rope_parameters={"rope_theta": 1e6})),
    "both, and the top": (
        "qwen3", dict(rope_scaling=SCALED["linear"], rope_parameters={"rope_theta": 1e6}, rope_theta=100.0),
    ),
    "context at the top": ("qwen3", dict(rope_scaling={"type": "yarn", "factor": 4.0}, **{CONTEXT: 16})),
    "nothing of a head": ("qwen3_5", dict(rope_scaling=SCALED["yarn"], rope_parameters=None, **SHALLOW)),
}  # fmt: skip


def test_spelled_as_in_files(tmp_path: Path) -> None:
    compare_all(tmp_path, SPELLED)


@parts.IN_MATRIX
@pytest.mark.parametrize(("name", "mesh"), [("qwen3_5", dict(fsdp=2)), ("qwen3", dict(tp=2))])
def test_every_oracle_on_a_mesh(tmp_path: Path, name: str, mesh: dict[str, int]) -> None:
    changes = {"rope_parameters": parameters(name, "yarn")}
    source = tiny.directory(tmp_path / "m", name, dtype=torch.bfloat16, **changes)
    assert trials.findings(trials.trial(source, mesh)) == []


CARDS: dict[str, Fields] = {
    "Qwen3": dict(model_type="qwen3", num_hidden_layers=64, num_attention_heads=8, num_key_value_heads=2, head_dim=128,
        vocab_size=151936, hidden_size=5120, intermediate_size=25600, rope_theta=1000000, max_position_embeddings=40960,
        rope_scaling={"rope_type": "yarn", "factor": 4.0, CONTEXT: 32768}),
    "Qwen3.5": {**tiny.ODD["qwen3_5"], "head_dim": 256, "rope_parameters": None,
        "rope_scaling": dict(rope_type="yarn", rope_theta=1e7, partial_rotary_factor=0.25, mrope_interleaved=True,
        mrope_section=[11, 11, 10], factor=4.0, **{CONTEXT: 262144})},
}  # fmt: skip


@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS.keys())
def test_a_shrunk_model_is_scaled_too(card: Fields) -> None:
    """So that `meshwright verify` tries it: on the 72 tokens of its streams the tables differ."""
    small = shrink(card, 1)
    share = 0.25 if "linear_key_head_dim" in card else None
    scaled = rotary_of(small, small["head_dim"], partial=share)
    plain = Rotary(scaled.dim, scaled.theta)
    assert scaled.dim == (4 if share else 10)
    assert math.isclose(scaled.attention, 0.1 * math.log(4) + 1)
    sines = [rope_tables(torch.arange(72), rotary)[1] for rotary in (scaled, plain)]
    assert (sines[0] / scaled.attention - sines[1]).abs().max() > 1e-3


def test_a_shrunk_head_can_be_rotated_in_part() -> None:
    """Wherever the config says which part."""
    for where in ("rope_scaling", "rope_parameters"):
        assert shrink(tiny.of("phi3", **{where: {"partial_rotary_factor": 0.5}}), 1)["head_dim"] == 16


YARN = SCALED["yarn"]
LLAMA3 = SCALED["llama3"]
REFUSED: dict[str, tuple[Fields, str]] = {
    "dynamic": (dict(rope_scaling={"type": "dynamic", "factor": 2.0}),
        words("rope_type='dynamic'", "length", "'yarn'")),
    "longrope": (dict(rope_parameters={"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}),
        words("rope_type='longrope'", "rope_parameters", "length", "'yarn'")),
    "unknown": (dict(rope_scaling={"rope_type": "yarm"}), words("rope_type='yarm'", *map(repr, KINDS))),
    "of a list": (dict(rope_scaling={"rope_type": ["yarn"]}), r"rope_type=\['yarn'\]"),
    "two types": (dict(rope_parameters={"rope_type": "default", "type": "yarn", **CARD}),
        words("rope_type='default'", "type='yarn'", "remove either")),
    "no type": (dict(rope_scaling={"factor": 4.0}), words("'factor' of rope_scaling", "rope_type='default'", "yarn")),
    "no factor": (dict(rope_scaling={"type": "yarn", CONTEXT: 16}), words("no 'factor'", "rope_type='yarn'")),
    "factor of null": (dict(rope_scaling={"type": "linear", "factor": None}),
        words("no 'factor'", "rope_type='linear'")),
    "no context": (dict(rope_scaling={"type": "yarn", "factor": 4.0}), words(f"no '{CONTEXT}'", "rope_type='yarn'")),
    "two contexts": (dict(rope_scaling=YARN, **{CONTEXT: 8}), words(f"{CONTEXT}=8", "16", "correct either")),
    "small factor": (dict(rope_scaling={**YARN, "factor": 0.5}), words(r"factor=0\.5", "at least 1")),
    "endless factor": (dict(rope_scaling={**YARN, "factor": 1e300}), words(r"factor=1e\+300", "at most")),
    "factor as text": (dict(rope_scaling={**YARN, "factor": "4.0"}), r"factor='4\.0' must be of type float"),
    "factor as bool": (dict(rope_scaling={**YARN, "factor": True}), r"factor=True must be of type float"),
    "half a token": (dict(rope_scaling={**YARN, CONTEXT: 16.5}), rf"{CONTEXT}=16\.5 must be of type int"),
    "no tokens": (dict(rope_scaling={**YARN, CONTEXT: 0}), words(f"{CONTEXT}=0", "at least 1")),
    "beta crossed": (dict(rope_scaling={**YARN, "beta_fast": 1}), words(r"beta_fast=1\.0", r"above beta_slow=1\.0")),
    "beta of nothing": (dict(rope_scaling={**YARN, "beta_slow": 0}), words(r"beta_slow=0\.0", "at least")),
    "llama3 crossed": (dict(rope_scaling={**LLAMA3, "high_freq_factor": 0.1}),
        words(r"high_freq_factor=0\.1", r"above low_freq_factor=0\.1")),
    "attention of nothing": (dict(rope_scaling={**YARN, "attention_factor": 0}),
        words(r"attention_factor=0\.0", "at least")),
    "mscale alone": (dict(rope_scaling={**YARN, "mscale": 0.7}), words(r"'mscale': 0\.7", "mscale_all_dim")),
    "attention twice": (dict(rope_scaling={**YARN, "attention_factor": 1.0, "mscale": 0.7, "mscale_all_dim": 0.7}),
        words("'attention_factor': 1.0", "alone")),
    "truncate as text": (dict(rope_scaling={**YARN, "truncate": "no"}), r"truncate='no' must be of type bool"),
    "truncate of null": (dict(rope_scaling={**YARN, "truncate": None}), r"truncate=None of rope_scaling\b.*bool"),
    "a field of another type": (dict(rope_scaling={**SCALED["linear"], "beta_fast": 32}),
        words("'beta_fast' of rope_scaling", "rope_type='linear'")),
    "theta lost": (dict(rope_scaling=YARN, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
        words(r"rope_theta=1000000\.0 of rope_parameters", "lost", "rope_scaling")),
    "scaling lost": (dict(rope_scaling={"rope_type": "default"}, rope_parameters=YARN),
        words(r"factor=4\.0 of rope_parameters", "lost", "rope_scaling")),
    "theta of one": (dict(rope_scaling=YARN, rope_theta=1.0), words(r"rope_theta=1\.0", "above 1")),
    "part of a head": (dict(rope_scaling={**YARN, "partial_rotary_factor": 0.25}),
        words(r"partial_rotary_factor=0\.25", "whole heads", "remove")),
}  # fmt: skip


def refusal(at: Path, config: Fields) -> str:
    (at / "config.json").write_text(json.dumps(config))
    with pytest.raises(mw.ConfigError) as refused:
        mw.init(at)
    return str(refused.value)


@pytest.mark.parametrize(("changes", "pattern"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(tmp_path: Path, changes: Fields, pattern: str) -> None:
    message = refusal(tmp_path, tiny.of("qwen3", **changes))
    assert message.startswith("config.json: ")
    assert re.search(pattern, message), message


def test_fields_next_to_the_text_config_are_refused(tmp_path: Path) -> None:
    """transformers reads those inside alone, and would train without them."""
    config = {"model_type": "qwen3_5", "text_config": tiny.ODD["qwen3_5"], "rope_scaling": YARN}
    assert "rope_scaling at the top" in refusal(tmp_path, config)


def test_a_family_that_computes_no_scaling_refuses_it(tmp_path: Path) -> None:
    """transformers takes yarn for longrope in Phi-3."""
    import examples.phi3  # noqa: F401 - registers the family

    assert "rope_type='yarn' is not supported for this family" in refusal(tmp_path, tiny.of("phi3", rope_scaling=YARN))
