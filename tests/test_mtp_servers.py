"""The MTP head of an export as the loaders of vLLM and SGLang read it: their rules as data.

Read in their main branches: vLLM (models/qwen3_5_mtp.py 01d99805, models/qwen3_next_mtp.py 055e47c2,
models/qwen4_exp/nvidia/mtp.py 03cae783 and qsa.py 010efafd, layers/fused_moe/routed_experts.py 002d6073) and SGLang
(srt/models/qwen3_5_mtp.py 008b79d2, qwen3_next.py 0201bc80, qwen4_exp_mtp.py 02d38b77, qwen4_exp.py 02962d78). One
rank, files that are not quantised, no options.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import meshwright as mw
from tests import tiny, worlds

Shards = dict[Any, tuple[int, ...]]  # the shape of each part of a parameter, all of which files must fill
Parameters = dict[str, Shards]
Filled = dict[str, dict[Any, Tensor]]
Stacks = tuple[tuple[str, str, Any], ...]  # a part of a name, what stands instead, and which shard it is

QKV: Stacks = (("q_proj", "qkv_proj", "q"), ("k_proj", "qkv_proj", "k"), ("v_proj", "qkv_proj", "v"))
GATE_UP: Stacks = (("gate_proj", "gate_up_proj", 0), ("up_proj", "gate_up_proj", 1))
WITH_DOT: Stacks = tuple((f".{part}", f".{whole}", shard) for part, whole, shard in (*QKV, *GATE_UP))
INJECTED = "hyper_connection.input_mix_weight_down_block_inject.weight"
STREAMS: Stacks = (
    ("hyper_connection.input_mix_weight_down.weight", INJECTED, 0),
    ("hyper_connection.block_inject_weight.weight", INJECTED, 1),
    (".indexer.index_qk_proj.", ".qkv_proj.", "index"),
)
EMBED, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class Loader:
    """How a server reads the keys of a family."""

    name_of: Callable[[str], str | None]  # of the parameter, before stacking; None: not read
    stacks: Stacks
    reads_fused: bool = True  # experts in one key, gate above up


def vllm_3_5(key: str) -> str | None:
    if key.startswith("mtp."):
        return key.replace("mtp.", "model.")
    if "embed_tokens" in key:
        return key.replace("language_model.", "")
    return key if "lm_head" in key else None


def vllm_next(key: str) -> str | None:
    if key.startswith("mtp."):
        return key.replace("mtp.", "model.")
    return key if "embed_tokens" in key or "lm_head" in key else None


def vllm_4(key: str) -> str | None:
    key = re.sub(r"^(model\.)?language_model\.", "", key)
    key = re.sub(r"^embed_tokens\.", "model.embed_tokens.", key)
    if key.startswith("mtp."):
        return key.replace("mtp.", "model.", 1)
    return key if key.startswith(("model.embed_tokens.", "lm_head.")) else None


def sglang_3_5(key: str) -> str | None:
    if key in (EMBED, "model.language_model.embed_tokens.weight"):
        return EMBED
    if "mtp" not in key:
        return None
    key = key.replace("mtp.", "model.").replace("model.fc", "fc").replace("model.pre_fc", "pre_fc")
    return key.replace(".self_attn", "")


def sglang_next(key: str) -> str | None:
    if "mtp" not in key:
        return None
    above = ("mtp.fc.weight", "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight")
    return key.removeprefix("mtp.") if key in above else key.replace("mtp", "model").replace(".self_attn", "")


SERVERS: dict[str, dict[str, Loader]] = {
    "vllm": {
        "qwen3_5": Loader(vllm_3_5, QKV + GATE_UP),
        "qwen3_5_moe": Loader(vllm_3_5, QKV + GATE_UP),
        "qwen3_next": Loader(vllm_next, WITH_DOT),
        "qwen4_exp": Loader(vllm_4, STREAMS + WITH_DOT),
    },
    "sglang": {
        "qwen3_5": Loader(sglang_3_5, QKV + GATE_UP),
        "qwen3_5_moe": Loader(sglang_3_5, QKV + GATE_UP),
        "qwen3_next": Loader(sglang_next, QKV + GATE_UP, reads_fused=False),
        "qwen4_exp": Loader(sglang_3_5, QKV + GATE_UP),
    },
}


def parameters_of(server: str, family: str, config: Mapping[str, Any]) -> Parameters:
    """Return what the MTP model of a server has, by its config.

    vLLM refuses parameters without a weight, the vocabulary among them. SGLang takes that of the main model.
    """
    c = {**config, **config.get("text_config", {})}
    D, V, at = c["hidden_size"], c["vocab_size"], "model.layers.0."
    top = "model." if server == "vllm" else ""
    out: Parameters = {}
    if not (server == "sglang" and family == "qwen3_next"):
        out[EMBED] = {"": (V, D)}
    if server == "vllm" and (family == "qwen3_next" or not c["tie_word_embeddings"]):
        out[LM_HEAD] = {"": (V, D)}
    out |= {f"{top}pre_fc_norm_embedding.weight": {"": (D,)}}
    out |= {f"{top}pre_fc_norm_hidden.weight": {"": (D * c.get("hc_count", 1),)}}
    out |= _attention(server, c, at + ("self_attn." if server == "vllm" else ""))
    out |= _experts(c, f"{at}mlp.") if "num_experts" in c else _dense(c["intermediate_size"], D, f"{at}mlp.")
    if family == "qwen4_exp":
        out |= {f"{top}fc_{name}.weight": {"": (D, D)} for name in ("hidden", "embedding")}
        for each in (f"{at}attn_hyper_connection.", f"{at}mlp_hyper_connection.", "model.hyper_connection_mixer."):
            out |= _streams(server, c, each)
        return out
    norms = ("model.norm", f"{at}input_layernorm", f"{at}post_attention_layernorm")
    return out | {f"{top}fc.weight": {"": (D, 2 * D)}} | {f"{norm}.weight": {"": (D,)} for norm in norms}


def _attention(server: str, c: Mapping[str, Any], at: str) -> Parameters:
    """Return attention's, where half of what queries have is their gate. vLLM stacks the indexer below the values."""
    D, H, G, K = (c[k] for k in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"))
    out: Parameters = {
        f"{at}qkv_proj.weight": {"q": (2 * H * K, D), "k": (G * K, D), "v": (G * K, D)},
        f"{at}o_proj.weight": {"": (D, H * K)}, f"{at}q_norm.weight": {"": (K,)}, f"{at}k_norm.weight": {"": (K,)},
    }  # fmt: skip
    if "indexer_n_heads" not in c:
        return out
    size = c["indexer_head_dim"]
    index = ((c["indexer_n_heads"] + c["indexer_kv_heads"]) * size, D)
    if server == "vllm":
        out[f"{at}qkv_proj.weight"]["index"] = index
    else:
        out[f"{at}indexer.index_qk_proj.weight"] = {"": index}
    return out | {f"{at}indexer.{name}_layernorm.weight": {"": (size,)} for name in ("q", "k")}


def _dense(width: int, D: int, at: str) -> Parameters:
    return {f"{at}gate_up_proj.weight": {0: (width, D), 1: (width, D)}, f"{at}down_proj.weight": {"": (D, width)}}


def _experts(c: Mapping[str, Any], at: str) -> Parameters:
    D, E, width = c["hidden_size"], c["num_experts"], c["moe_intermediate_size"]
    return {
        f"{at}gate.weight": {"": (E, D)}, f"{at}shared_expert_gate.weight": {"": (1, D)},
        **_dense(c["shared_expert_intermediate_size"], D, f"{at}shared_expert."),
        f"{at}experts.w13_weight": {(e, part): (width, D) for e in range(E) for part in ("w1", "w3")},
        f"{at}experts.w2_weight": {(e, "w2"): (D, width) for e in range(E)},
    }  # fmt: skip


def _streams(server: str, c: Mapping[str, Any], at: str) -> Parameters:
    """Return a mixer's, of which the last injects nothing. vLLM pads what it stacks; files do not have the padding."""
    wide, rank, n = c["hc_count"] * c["hidden_size"], c["hc_lowrank"], c["hc_count"]
    out: Parameters = {f"{at}hc_norm.weight": {"": (wide,)}, f"{at}input_mix_weight_up.weight": {"": (wide, rank)}}
    down, inject = (rank, wide), (n, wide)
    if at.endswith("mixer."):
        return out | {f"{at}input_mix_weight_down.weight": {"": down}}
    if server == "vllm":
        return out | {f"{at}input_mix_weight_down_block_inject.weight": {0: down, 1: inject}}
    return out | {f"{at}input_mix_weight_down.weight": {"": down}, f"{at}block_inject_weight.weight": {"": inject}}


def filled(loader: Loader, parameters: Parameters, tensors: Mapping[str, Tensor]) -> tuple[Filled, list[str]]:
    """Return what a server's parameters get of files, and keys that it reads without having a parameter for them."""
    out, left = Filled(), list[str]()
    for key, tensor in tensors.items():
        name = loader.name_of(key)
        if name is None:
            continue
        parts = _parts(loader, parameters, name, tensor)
        for parameter, shard, part in parts:
            assert shard not in out.setdefault(parameter, {}), f"{parameter}, {shard}: a second time, by {key}"
            out[parameter][shard] = part
        left += [] if parts else [key]
    return out, left


def _parts(loader: Loader, parameters: Parameters, name: str, tensor: Tensor) -> list[tuple[str, Any, Tensor]]:
    """Return which parts of which parameters a tensor fills."""
    at, _, expert = name.partition(".mlp.experts.")
    w13, w2 = f"{at}.mlp.experts.w13_weight", f"{at}.mlp.experts.w2_weight"
    if expert in ("gate_up_proj", "down_proj"):
        if not loader.reads_fused:
            return []
        if expert == "down_proj":
            return [(w2, (e, "w2"), one) for e, one in enumerate(tensor)]
        halves = zip(("w1", "w3"), tensor.chunk(2, -2), strict=True)
        return [(w13, (e, part), one) for part, half in halves for e, one in enumerate(half)]
    if match := re.fullmatch(r"(\d+)\.(gate|up|down)_proj\.weight", expert):
        part = {"gate": "w1", "up": "w3", "down": "w2"}[match[2]]
        return [(w2 if part == "w2" else w13, (int(match[1]), part), tensor)]
    for part, whole, shard in loader.stacks:
        if part in name and (stacked := name.replace(part, whole)) in parameters:
            return [(stacked, shard, tensor)]
    return [(name, "", tensor)] if name in parameters else []


def shapes(parts: Filled) -> Parameters:
    return {name: {shard: tuple(part.shape) for shard, part in each.items()} for name, each in parts.items()}


# Our exports

TIED, TOWER = " tied", " beside a tower"
SOURCES = (
    "qwen3_5", f"qwen3_5{TIED}", "qwen3_5_moe", "qwen3_5_moe fused", f"qwen3_5_moe fused{TOWER}", "qwen3_next",
    "qwen3_next fused", "qwen4_exp", "qwen4_exp fused",
)  # fmt: skip
FIELD = {"qwen3_next": "num_nextn_predict_layers"}  # how many layers, in the config; otherwise:
USUAL_FIELD = "mtp_num_hidden_layers"


def family_of(source: str) -> str:
    return source.partition(" ")[0]


def source_of(name: str, at: Path) -> Path:
    """Write a tiny model with a head. Both layouts of experts have the same values."""
    family, tied = family_of(name), name.endswith(TIED)
    source = tiny.directory(at, family, tie_word_embeddings=tied)
    tiny.with_mtp(source, layout="fused" if " fused" in name else "", field=FIELD.get(family, USUAL_FIELD))
    if name.endswith(TOWER):
        tensors = load_file(source / "model.safetensors")
        moved = {re.sub(r"^model\.", "model.language_model.", key): tensor for key, tensor in tensors.items()}
        save_file(moved, source / "model.safetensors", {"format": "pt"})
        text = json.loads((source / "config.json").read_text())
        config = {"model_type": family, "text_config": text, "vision_config": {"depth": 1}}
        (source / "config.json").write_text(json.dumps(config))
    return source


def exported(source: Path, at: Path) -> None:
    """Train trunk and head by one step, and export them."""
    model = mw.load(source, dtype=torch.float32, mtp="all")
    tokens = torch.randint(0, 131, (2, 30), generator=torch.Generator().manual_seed(5)).tolist()
    mw.Engine(model, lr=1e-2).step([mw.pack(tokens)])
    mw.export(model, at)


@dataclass(frozen=True)
class Export:
    """The files of an export, and what they were made of."""

    family: str
    before: Mapping[str, Tensor]
    tensors: Mapping[str, Tensor]
    config: Mapping[str, Any]

    def read(self, server: str, tensors: Mapping[str, Tensor] | None = None) -> tuple[Parameters, Filled, list[str]]:
        """Return what a server wants, what it gets, and what it has no place for."""
        parameters = parameters_of(server, self.family, self.config)
        files = self.tensors if tensors is None else tensors
        return parameters, *filled(SERVERS[server][self.family], parameters, files)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Export]:
    """Export everything in one world."""
    root = tmp_path_factory.mktemp("served")
    sources = {name: source_of(name, root / name / "source") for name in SOURCES}
    worlds.in_turn(1, {name: functools.partial(exported, at, root / name / "out") for name, at in sources.items()})
    out = {}
    for name, source in sources.items():
        at = root / name / "out"
        before, after = (load_file(each / "model.safetensors") for each in (source, at))
        out[name] = Export(family_of(name), before, after, json.loads((at / "config.json").read_text()))
    return out


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("name", SOURCES)
def test_a_server_finds_each_parameter_of_the_head_once(files: dict[str, Export], name: str, server: str) -> None:
    export = files[name]
    parameters, parts, left = export.read(server)
    if name == "qwen3_next fused" and server == "sglang":
        at = "mtp.layers.0.mlp.experts."
        assert sorted(left) == [f"{at}down_proj", f"{at}gate_up_proj"]  # a KeyError there
        return
    assert left == []
    assert shapes(parts) == parameters
    text = {**export.config, **export.config.get("text_config", {})}
    assert text[FIELD.get(export.family, USUAL_FIELD)] == 1
    # Whatever the export has of the head is read, and trained but for indexers.
    kept = [key for key, t in export.tensors.items() if key.startswith("mtp.") and torch.equal(t, export.before[key])]
    assert [key for key in kept if ".indexer." not in key] == []


@pytest.mark.parametrize(
    ("family", "server"),
    [
        (family, server)
        for server, loaders in SERVERS.items()
        for family in ("qwen3_5_moe", "qwen3_next", "qwen4_exp")
        if loaders[family].reads_fused
    ],
)
def test_both_layouts_of_experts_serve_the_same_head(files: dict[str, Export], family: str, server: str) -> None:
    _, apart, _ = files[family].read(server)
    others = [f"{family} fused"] + [name for name in SOURCES if name == f"{family} fused{TOWER}"]
    for other in others:
        _, fused, _ = files[other].read(server)
        assert [key for key in apart if not same(apart[key], fused[key])] == []


def same(parts: Mapping[Any, Tensor], others: Mapping[Any, Tensor]) -> bool:
    return parts.keys() == others.keys() and all(torch.equal(part, others[shard]) for shard, part in parts.items())


PLANTED: dict[str, Callable[[str, Tensor], tuple[str, Tensor] | None]] = {
    "a norm is lost": lambda key, t: None if key == "mtp.norm.weight" else (key, t),
    "a key is spelled otherwise": lambda key, t: (key.replace("pre_fc_norm_hidden", "hnorm"), t),
    "experts are transposed": lambda key, t: (key, t.mT if key.endswith("experts.gate_up_proj") else t),
    "gates lie below": lambda key, t: (key, t.roll(t.shape[1] // 2, 1) if key.endswith("gate_up_proj") else t),
    "the gate of queries is lost": lambda key, t: (key, t.chunk(2)[0] if "mtp" in key and ".q_proj" in key else t),
    "the head stands below the text": lambda key, t: (key.replace("mtp.", "model.mtp."), t),
}


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("plant", PLANTED)
def test_planted_files_are_noticed(files: dict[str, Export], plant: str, server: str) -> None:
    export = files["qwen3_5_moe fused"]
    planted = dict(out for key, t in export.tensors.items() if (out := PLANTED[plant](key, t)))
    parameters, parts, left = export.read(server, planted)
    _, right, _ = export.read(server)
    assert left or shapes(parts) != parameters or not all(same(right[key], parts[key]) for key in right)
