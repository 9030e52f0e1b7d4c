"""Which adapters inference servers read, and the weights they make of them: the rules of their loaders as data.

Read in the wheels of vLLM 0.33.0 (vllm/lora: lora_model, peft_helper, lora_weights, model_manager, utils, layers; the
model classes' packed_modules_mapping, hf_to_vllm_mapper, is_3d_moe_weight) and SGLang 0.5.23 (sglang/srt/lora: lora,
lora_config, lora_manager, mem_pool, utils; the model classes' get_hidden_dim), and in their main branches, vLLM
01533aa8 (lora/model_manager.py) and SGLang 01235a16 (lora/utils.py). One rank, and no options of the servers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import meshwright as mw
from meshwright.recipe import Lora
from meshwright.weights import peft_files
from tests import tiny, worlds

Deltas = dict[str, Tensor]  # what is added to each weight, by its key in the files; experts stacked
Factors = dict[str, Tensor]

QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
TEXT, BESIDE_TOWER = "model.", "model.language_model."
WITHOUT_DELTA_NET = (*QKV, "o_proj", "out_proj", *GATE_UP, "down_proj")
LORA = Lora(rank=4, alpha=6.0, b_std=0.1)
RSLORA, FEW, SERVED = replace(LORA, rslora=True), replace(LORA, expert_rank=2), replace(LORA, targets=WITHOUT_DELTA_NET)


class Refused(Exception):
    """A server raises an error as it loads the adapter."""


def refuse_unless(condition: bool, *why: object) -> None:
    if not condition:
        raise Refused(*why)


@dataclass(frozen=True)
class Served:
    """A model class of each server, for one of our tiny models."""

    family: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    prefix: str = TEXT  # of the keys in the files
    renamed: tuple[str, str] = ("", "")  # vLLM's hf_to_vllm_mapper
    packed: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {"qkv_proj": QKV, "gate_up_proj": GATE_UP})
    is_3d: bool = False  # vLLM's is_3d_moe_weight
    sized: frozenset[str] = frozenset({"qkv_proj", "o_proj", "gate_up_proj", "down_proj"})  # SGLang's get_hidden_dim

    @property
    def config(self) -> dict[str, Any]:
        return tiny.of(self.family, **self.changes)


DELTA_NET = {"in_proj_qkvz": ("in_proj_qkv", "in_proj_z"), "in_proj_ba": ("in_proj_b", "in_proj_a")}
PACKED_3_5 = {"qkv_proj": QKV, "gate_up_proj": GATE_UP, **DELTA_NET}
SIZED_3_5 = frozenset({"qkv_proj", "o_proj", "out_proj", "in_proj_qkvz", "gate_up_proj", "down_proj"})
BOTH = dict(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
TO_TEXT, TO_TOWER = (BESIDE_TOWER, TEXT), (BESIDE_TOWER, "language_model.model.")
MODELS = {
    "qwen2": Served("qwen2"),
    "qwen3": Served("qwen3"),
    "qwen3_moe": Served("qwen3_moe", dict(num_hidden_layers=1, mlp_only_layers=[]), packed={"qkv_proj": QKV}),
    # vLLM packs gate and up where mlp_only_layers is not empty.
    "qwen3_moe, dense layers": Served("qwen3_moe", dict(num_hidden_layers=2)),
    # Qwen3_5ForCausalLM and Qwen3_5MoeForCausalLM: SGLang's have no get_hidden_dim, and the usual one has no out_proj.
    "qwen3_5, text": Served("qwen3_5", BOTH, TEXT, TO_TEXT, PACKED_3_5),
    "qwen3_5_moe, text": Served("qwen3_5_moe", BOTH, TEXT, TO_TEXT, PACKED_3_5),
    # Qwen3_5ForConditionalGeneration and Qwen3_5MoeForConditionalGeneration, as Qwen's own files name them.
    "qwen3_5": Served("qwen3_5", BOTH, BESIDE_TOWER, TO_TOWER, PACKED_3_5, sized=SIZED_3_5),
    "qwen3_5_moe": Served("qwen3_5_moe", BOTH, BESIDE_TOWER, TO_TOWER, PACKED_3_5, is_3d=True, sized=SIZED_3_5),
}


@dataclass(frozen=True)
class Adapter:
    """An adapter directory as servers see it."""

    config: Mapping[str, Any]
    tensors: Factors

    def modules(self) -> dict[str, dict[str, Tensor]]:
        """Return A and B by module."""
        out: dict[str, dict[str, Tensor]] = {}
        for key, tensor in self.tensors.items():
            match = re.fullmatch(r"base_model\.model\.(.*)\.lora_([AB])\.weight", key)
            refuse_unless(match is not None, f"{key} is unsupported LoRA weight")
            assert match is not None
            out.setdefault(match[1], {})[match[2]] = tensor.double()
        return out


# vLLM


def vllm(adapter: Adapter, served: Served, num_experts: int) -> Deltas:
    """Load an adapter as vLLM does, and return what its layers add to their weights."""
    config, loras = adapter.config, adapter.modules()
    saved = set(config.get("modules_to_save") or []) - {"classifier", "score"}
    plain = config["bias"] == "none" and not config.get("use_dora") and not config.get("lora_bias")
    refuse_unless(not saved and plain and config.get("init_lora_weights", True) is True, "unsupported features")
    expected = {part for parts in served.packed.values() for part in parts}
    expected |= {"o_proj", "out_proj", "down_proj", "experts"}
    triples = [f"experts.{e}.{name}" for e in range(num_experts) for name in ("gate_proj", "down_proj", "up_proj")]
    expected |= set() if served.is_3d else set(triples)
    scaled: dict[str, tuple[Tensor, Tensor]] = {}
    for module, factors in loras.items():
        name = module[module.find("experts") :] if ".experts" in module else module.rpartition(".")[2]
        refuse_unless("base_layer" in module or name in expected, f"expected {sorted(expected)}, received {module}")
        old, new = served.renamed
        runtime = new + module.removeprefix(old) if old and module.startswith(old) else module
        scaled[runtime] = factors["A"], factors["B"] * _vllm_scaling(config, module)
    out: Deltas = {}
    for at in {name.partition(".experts")[0] for name in scaled if ".experts" in name}:
        own = {name: scaled.pop(name) for name in [*scaled] if name.startswith(f"{at}.experts")}
        stacked = (_vllm_3d if served.is_3d else _vllm_2d)(own, f"{at}.experts", num_experts)
        out |= {f"{at}.experts.{name}": delta for name, delta in stacked.items()}
    for module, (a, b) in scaled.items():
        out[f"{module}.weight"] = b @ a
    _check_slices(scaled, served)
    return {_key_of(name, served): delta for name, delta in out.items()}


def _vllm_scaling(config: Mapping[str, Any], module: str) -> float:
    """Return PEFT's scale of a module; vLLM 0.33 is the first to honour the patterns, by the names of parameters."""
    if module.endswith(".experts.base_layer"):
        module = module.removesuffix("base_layer") + "gate_up_proj"
    elif module.endswith(".experts"):
        module += ".down_proj"

    def of(pattern: str, default: float) -> float:
        patterns = (config.get(pattern) or {}).items()
        return next((value for key, value in patterns if re.match(rf"(.*\.)?({key})$", module)), default)

    rank, alpha = of("rank_pattern", config["r"]), of("alpha_pattern", config["lora_alpha"])
    return float(alpha / (rank**0.5 if config.get("use_rslora") else rank))


def _vllm_2d(factors: Mapping[str, tuple[Tensor, Tensor]], at: str, num_experts: int) -> Deltas:
    """Stack w1, w2 and w3 of each expert: FusedMoEWithLoRA."""
    fused = [name for name in factors if name in (at, f"{at}.base_layer")]
    refuse_unless(not fused, "contains fused 3D MoE weights, but the model uses a 2D MoE LoRA wrapper")
    for name in (f"{at}.{e}.{part}" for e in range(num_experts) for part in (*GATE_UP, "down_proj")):
        refuse_unless(name in factors, f"{name} is None")

    def delta(part: str) -> Tensor:
        return torch.stack([b @ a for a, b in (factors[f"{at}.{e}.{part}"] for e in range(num_experts))])

    return {"gate_up_proj": torch.cat([delta(name) for name in GATE_UP], 1), "down_proj": delta("down_proj")}


def _vllm_3d(factors: Mapping[str, tuple[Tensor, Tensor]], at: str, num_experts: int) -> Deltas:
    """View PEFT's fused factors: FusedMoE3DWithLoRA. B is `[out, rank, expert]`, gate before up."""
    refuse_unless(factors.keys() == {at, f"{at}.base_layer"}, "needs both gate_up_proj and down_proj")

    def delta(name: str) -> Tensor:
        a, b = factors[name]
        a_ErI, b_OrE = a.reshape(num_experts, -1, a.shape[-1]), b.reshape(b.shape[0], -1, num_experts)
        return b_OrE.permute(2, 0, 1) @ a_ErI

    return {"gate_up_proj": delta(f"{at}.base_layer"), "down_proj": delta(at)}


def fallback_of_older_vllm(adapter: Adapter, at: str, num_experts: int) -> Deltas:
    """Read fused factors as vLLM did for unflagged classes, and no longer does since 0.33: B in blocks of experts."""
    loras = adapter.modules()

    def delta(name: str, start: int, step: int) -> Tensor:
        a, b = loras[name]["A"].chunk(num_experts), loras[name]["B"][start::step].chunk(num_experts, -1)
        return torch.stack([right @ left for left, right in zip(a, b, strict=True)])

    gate, up = delta(f"{at}.base_layer", 0, 2), delta(f"{at}.base_layer", 1, 2)
    return {"gate_up_proj": torch.cat([gate, up], 1), "down_proj": delta(at, 0, 1)}


def _check_slices(scaled: Mapping[str, tuple[Tensor, Tensor]], served: Served) -> None:
    """Check that B's rows fill whole slices of the merged layers: in_proj_qkvz has q, k, v and z."""
    if served.family not in ("qwen3_5", "qwen3_5_moe"):
        return
    config = served.config
    keys, values = (config[f"linear_num_{n}_heads"] * config[f"linear_{n}_head_dim"] for n in ("key", "value"))
    heads = config["linear_num_value_heads"]
    rows = {"in_proj_qkv": 2 * keys + values, "in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
    for module, (_, b) in scaled.items():
        name = module.rpartition(".")[2]
        refuse_unless(rows.get(name, len(b)) == len(b), f"cannot split lora_b with {len(b)} rows")


def _key_of(name: str, served: Served) -> str:
    """Return the key in the files of a runtime module. One that the class does not have keeps no adapter, silently."""
    runtime = "language_model.model." if served.prefix == BESIDE_TOWER else TEXT
    return served.prefix + name.removeprefix(runtime) if name.startswith(f"{runtime}layers.") else f"dropped: {name}"


# SGLang

NORMALISED = {**dict.fromkeys(QKV, "qkv_proj"), **dict.fromkeys(GATE_UP, "gate_up_proj")}
PARTS = {"qkv_proj": QKV, "gate_up_proj": GATE_UP}


def sglang(adapter: Adapter, served: Served, num_experts: int) -> Deltas:
    """Load an adapter as SGLang does, and return what its layers add. It looks at layers and last names only."""
    config, loras = adapter.config, adapter.modules()
    refuse_unless(isinstance(config["target_modules"], list), "only a list of suffixes is supported")
    targets = {NORMALISED.get(last := name.rpartition(".")[2], last) for name in config["target_modules"]}
    refuse_unless(targets <= served.sized, f"get_hidden_dim not implemented for {sorted(targets - served.sized)}")
    refuse_unless(not config.get("use_dora"), "DoRA adapters")
    rank, scale = config["r"], config["lora_alpha"] / config["r"]  # no rsLoRA, no patterns
    out: Deltas = {}
    for name, parts in _sglang_stacks(loras):
        module = name.rpartition(".")[2]
        refuse_unless(any(target in name for target in targets), f"cannot find target module name for {name}")
        routed = ".experts." in name
        is_moe = served.family.endswith("moe")
        has_buffer = routed or not is_moe or module not in ("gate_up_proj", "down_proj") or ".shared_expert." in name
        refuse_unless(has_buffer, f"no buffer for {name}")
        if routed and not {"gate_up_proj", "down_proj"} <= targets:
            out[f"dropped: {name}"] = parts[0]["B"] @ parts[0]["A"]  # FusedMoE is not wrapped
            continue
        for hf, part in zip(PARTS.get(module, (module,)), parts, strict=True):
            shapes = part["A"].shape[0], part["B"].shape[1]
            refuse_unless(shapes == (rank, rank), f"LoRA buffer shape does not match weight shape of {name}")
            out[f"{name.rpartition('.')[0]}.{hf}.weight"] = scale * (part["B"] @ part["A"])
    return _with_stacked_experts(out, num_experts)


def _sglang_stacks(loras: Mapping[str, dict[str, Tensor]]) -> Iterator[tuple[str, list[dict[str, Tensor]]]]:
    """Yield stacked modules with their parts. q needs v; k may be missing, and up."""
    for module, factors in loras.items():
        at, _, last = module.rpartition(".")
        if last == "q_proj":
            refuse_unless(f"{at}.v_proj" in loras, f"KeyError: {at}.v_proj")
            zeros = {factor: torch.zeros_like(t) for factor, t in loras[f"{at}.v_proj"].items()}
            yield f"{at}.qkv_proj", [factors, loras.get(f"{at}.k_proj", zeros), loras[f"{at}.v_proj"]]
        elif last == "gate_proj":
            zeros = {factor: torch.zeros_like(tensor) for factor, tensor in factors.items()}
            yield f"{at}.gate_up_proj", [factors, loras.get(f"{at}.up_proj", zeros)]
        elif not (
            (last in ("k_proj", "v_proj") and f"{at}.q_proj" in loras)
            or (last == "up_proj" and f"{at}.gate_proj" in loras)
        ):
            yield module, [factors]


def _with_stacked_experts(deltas: Deltas, num_experts: int) -> Deltas:
    """Stack the deltas of experts: gate and up in one."""
    out = {key: delta for key, delta in deltas.items() if ".experts." not in key or key.startswith("dropped")}
    for at in {key.partition(".experts.")[0] + ".experts" for key in deltas.keys() - out.keys()}:
        for name, parts in (("gate_up_proj", GATE_UP), ("down_proj", ("down_proj",))):
            each = [torch.cat([deltas[f"{at}.{e}.{part}.weight"] for part in parts]) for e in range(num_experts)]
            out[f"{at}.{name}"] = torch.stack(each)
    return out


# Our exports

Server = Callable[[Adapter, Served, int], Deltas]
# Recipes and layouts of one model; None is the default.
EXPORTS: dict[str, tuple[Lora, str | None]] = {
    "all": (LORA, None), "fused": (LORA, "fused"), "per-expert": (LORA, "per-expert"), "rslora": (RSLORA, None),
    "expert_rank": (FEW, None), "served": (SERVED, "per-expert"),
}  # fmt: skip


def exported(source: Path, at: Path, exports: Iterable[str]) -> dict[str, Factors]:
    """Write adapters in several layouts. Return the factors of each by our keys."""
    out = dict[str, Factors]()
    for lora, group in groupby(exports, key=lambda name: EXPORTS[name][0]):
        model = mw.load(source, mw.Mesh(), dtype=torch.float32, lora=lora)
        factors = {key: tensor.clone() for key, tensor in mw.gather(model, "adapter").items()}
        for name in group:
            mw.export_adapter(model, at / name, layout=EXPORTS[name][1])
            out[name] = factors
    return out


def source_of(served: Served, at: Path) -> Path:
    """Write the files of a model: text under its prefix, as with a tower, or alone."""
    source = tiny.directory(at, served.family, layout="fused", **served.changes)
    if served.prefix == BESIDE_TOWER:
        tensors = load_file(source / "model.safetensors")
        moved = {key.replace(TEXT, BESIDE_TOWER, 1): tensor for key, tensor in tensors.items()}
        save_file(moved, source / "model.safetensors")
        text = json.loads((source / "config.json").read_text())
        config = {"model_type": served.family, "text_config": text, "vision_config": {"depth": 1}}
        (source / "config.json").write_text(json.dumps(config))
    return source


# Which adapters each server reads, and the error for the others. docs/lora.md has the same table for users.
OTHER_WRAPPER, NOT_SPLIT = "fused 3D MoE weights", "expected .* received .*experts"
UNSIZED, OTHER_RANK, UNKNOWN = "get_hidden_dim", "does not match weight shape", "cannot find target module"
VLLM: dict[str, dict[str, str]] = {
    "qwen2": {"all": ""},
    "qwen3": {"all": "", "rslora": ""},
    "qwen3_moe": {"all": "", "per-expert": "", "rslora": "", "expert_rank": "", "fused": OTHER_WRAPPER},
    "qwen3_moe, dense layers": {"all": ""},
    "qwen3_5, text": {"all": ""},
    "qwen3_5_moe, text": {"all": OTHER_WRAPPER, "per-expert": ""},
    "qwen3_5": {"all": "", "served": ""},
    "qwen3_5_moe": {"all": "", "fused": "", "expert_rank": "", "per-expert": NOT_SPLIT},
}
SGLANG: dict[str, dict[str, str]] = {
    "qwen2": {"all": ""},
    "qwen3": {"all": "", "rslora": ""},
    "qwen3_moe": {"all": "", "per-expert": "", "rslora": "", "expert_rank": OTHER_RANK, "fused": UNKNOWN},
    "qwen3_moe, dense layers": {"all": "no buffer"},
    "qwen3_5, text": {"all": UNSIZED},
    "qwen3_5_moe, text": {"all": UNSIZED, "per-expert": UNSIZED},
    "qwen3_5": {"all": UNSIZED, "served": ""},
    "qwen3_5_moe": {"all": UNSIZED, "per-expert": UNSIZED, "served": ""},
}


@dataclass(frozen=True)
class Case:
    """A model with its exports."""

    served: Served
    at: Path
    factors: Mapping[str, Factors]

    @property
    def num_experts(self) -> int:
        return int(self.served.config.get("num_experts", 0))

    def adapter(self, name: str) -> Adapter:
        config = json.loads((self.at / name / peft_files.CONFIG_FILE).read_text())
        return Adapter(config, load_file(self.at / name / peft_files.WEIGHTS_FILE))

    def expected(self, name: str) -> Deltas:
        """Return `scale * B @ A` of each weight, from the factors of the model: both stacked expert by expert."""
        lora = EXPORTS[name][0]
        scale, out = lora.alpha / (lora.rank**0.5 if lora.rslora else lora.rank), Deltas()
        factors = {key.removeprefix(peft_files.PREFIX): t.double() for key, t in self.factors[name].items()}
        for key, a in factors.items():
            module, is_a, _ = key.partition(".lora_A.")
            if not is_a:
                continue
            b = factors[f"{module}.lora_B.weight"]
            num = self.num_experts if ".experts." in module else 0
            pair = (a.view(num, -1, a.shape[1]), b.view(num, -1, b.shape[1])) if num else (a, b)
            out[module if num else f"{module}.weight"] = scale * (pair[1] @ pair[0])
        return out


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    """Export everything in one process."""
    at = tmp_path_factory.mktemp("served")
    sources = {name: source_of(served, at / name / "source") for name, served in MODELS.items()}

    def act() -> dict[str, dict[str, Factors]]:
        names = {model: [n for n in EXPORTS if n in VLLM[model] or n in SGLANG[model]] for model in MODELS}
        return {model: exported(sources[model], at / model, names[model]) for model in MODELS}

    factors = worlds.run(1, act)[0]
    return {name: Case(served, at / name, factors[name]) for name, served in MODELS.items()}


def same(deltas: Deltas, expected: Deltas) -> bool:
    """Tell whether a server adds exactly what the model does, to the same weights."""
    assert expected
    assert all(delta.abs().max() > 1e-3 for delta in expected.values())
    return deltas.keys() == expected.keys() and all(
        deltas[key].shape == delta.shape and (deltas[key] - delta).norm() <= 1e-12 * delta.norm()
        for key, delta in expected.items()
    )


@pytest.mark.parametrize("server", [vllm, sglang], ids=["vllm", "sglang"])
def test_servers_add_what_the_model_does(cases: dict[str, Case], server: Server) -> None:
    for model, exports in (VLLM if server is vllm else SGLANG).items():
        case = cases[model]
        for name, error in exports.items():
            adapter = case.adapter(name)
            if error:
                with pytest.raises(Refused, match=error):
                    server(adapter, case.served, case.num_experts)
            else:
                assert same(server(adapter, case.served, case.num_experts), case.expected(name)), (model, name)


def test_targets_are_few(cases: dict[str, Case]) -> None:
    """SGLang goes through the targets for each tensor, so matrices of experts go by their last names."""
    targets = cases["qwen3_moe"].adapter("all").config["target_modules"]
    assert targets[-3:] == [*GATE_UP, "down_proj"]
    assert not any("experts" in target for target in targets)


def test_a_module_that_the_class_does_not_have_is_noticed(cases: dict[str, Case]) -> None:
    """vLLM checks last names only: an adapter of the text model alone would leave the model with a tower as it was."""
    text, tower = cases["qwen3_5, text"], cases["qwen3_5"]
    deltas = vllm(text.adapter("all"), tower.served, 0)
    assert deltas
    assert all(key.startswith("dropped") for key in deltas)


def planted(adapter: Adapter, change: Callable[[str, Tensor], Tensor], **config: Any) -> Adapter:
    return Adapter({**adapter.config, **config}, {key: change(key, t) for key, t in adapter.tensors.items()})


def test_planted_files_are_noticed(cases: dict[str, Case]) -> None:
    dense, flagged, plain = cases["qwen3"], cases["qwen3_5_moe"], cases["qwen3_moe"]

    # rsLoRA by its field: vLLM honours it, SGLang does not.
    stated = planted(dense.adapter("rslora"), lambda _, t: t, use_rslora=True, lora_alpha=RSLORA.alpha)
    assert same(vllm(stated, dense.served, 0), dense.expected("rslora"))
    assert not same(sglang(stated, dense.served, 0), dense.expected("rslora"))

    # Experts at alpha / expert_rank.
    steep = planted(flagged.adapter("expert_rank"), lambda _, t: t, alpha_pattern={})
    assert not same(vllm(steep, flagged.served, 8), flagged.expected("expert_rank"))

    # B of fused experts expert-major.
    def expert_major(key: str, t: Tensor) -> Tensor:
        is_b = key.endswith(("experts.lora_B.weight", "base_layer.lora_B.weight"))
        return t.view(len(t), -1, 8).transpose(1, 2).reshape(t.shape) if is_b else t

    moved = planted(flagged.adapter("all"), expert_major)
    assert not same(vllm(moved, flagged.served, 8), flagged.expected("all"))

    # Gate and up exchanged.
    swapped = Adapter(plain.adapter("all").config, {
        key.replace("gate_proj", "?").replace("up_proj", "gate_proj").replace("?", "up_proj"): tensor
        for key, tensor in plain.adapter("all").tensors.items()
    })  # fmt: skip
    for server in (vllm, sglang):
        assert not same(server(swapped, plain.served, 8), plain.expected("all"))

    # Fused factors on an unflagged class, as vLLM read them before it refused them.
    at = "model.layers.0.mlp.experts"
    wrong = fallback_of_older_vllm(plain.adapter("fused"), at, 8)
    for name, delta in wrong.items():
        right = plain.expected("fused")[f"{at}.{name}"]
        assert delta.shape == right.shape
        assert (delta - right).norm() > 0.1 * right.norm()


def test_half_of_the_experts_or_of_attention_is_not_served(cases: dict[str, Case]) -> None:
    """Neither server has a layer for gate and up without down; SGLang drops them without an error."""
    case = cases["qwen3_moe"]
    adapter = case.adapter("all")

    def only(pattern: str, targets: list[str]) -> Adapter:
        kept = {key: t for key, t in adapter.tensors.items() if re.search(pattern, key)}
        return Adapter({**adapter.config, "target_modules": targets}, kept)

    half = only(r"experts\.\d+\.(gate|up)_proj", [*GATE_UP])
    with pytest.raises(Refused, match=r"down_proj is None"):
        vllm(half, case.served, case.num_experts)
    assert all(key.startswith("dropped") for key in sglang(half, case.served, case.num_experts))
    for names in (["q_proj"], ["k_proj", "v_proj"]):
        some = only(rf"\.({'|'.join(names)})\.", names)
        assert len(vllm(some, case.served, case.num_experts)) == len(names)
        with pytest.raises(Refused, match=r"KeyError|cannot find"):
            sglang(some, case.served, case.num_experts)
