"""Every spelling of every tiny model: our elements and those of the files, each of them once, in the right order."""

from fnmatch import fnmatch

import pytest
import torch

from tests.sharding.tables import TINY, choices_of, layout_of, source_of, table_of
from tests.tiny import ODD, in_parts, reference

EVERY = [
    (name, head, choice) for name in TINY for head in ("lm", "value") for choice in choices_of(table_of(name, head))
]


def case_id(case):
    return "-".join([case[0], case[1], *case[2].values()])


def assembled(param, layout, source):
    """Ours, out of the blocks; no element is written twice, none is left."""
    ours = torch.full(param.shape, -1)
    for block in layout.blocks:
        view = block.view(source[block.key])
        assert view.untyped_storage().data_ptr() == source[block.key].untyped_storage().data_ptr(), "never a copy"
        assert (ours[block.ours.slices] == -1).all(), f"{param.name}: {block.ours} again"
        ours[block.ours.slices] = view
    assert (ours != -1).all(), f"{param.name} has holes"
    return ours


def matrix(param, ours):
    return ours.reshape(param.matrix)


def matrices(case):
    """Our stored matrices by name, and the source that they came from."""
    name, head, choice = case
    table = table_of(name, head)
    source = source_of(table, choice)
    return {p.name: matrix(p, assembled(p, layout_of(p, choice), source)) for p in table}, source


@pytest.mark.parametrize("case", EVERY, ids=case_id)
def test_taking_apart_gives_the_source_back(case):
    name, head, choice = case
    table = table_of(name, head)
    source = source_of(table, choice)
    back = {key: torch.full(value.shape, -1) for key, value in source.items()}
    for param in table:
        layout = layout_of(param, choice)
        ours = assembled(param, layout, source)
        for block in layout.blocks:
            into = block.view(back[block.key])
            assert (into == -1).all(), f"{block.key} is in two blocks at {block.source}"
            into.copy_(ours[block.ours.slices])
    assert all(torch.equal(back[key], source[key]) for key in source)


@pytest.mark.parametrize("case", EVERY, ids=case_id)
def test_copies_hold_the_parameter_once_more(case):
    table, choice = table_of(case[0], case[1]), case[2]
    source = source_of(table, choice)
    result = {}
    for param in table:
        layout = layout_of(param, choice)
        ours = assembled(param, layout, source)
        for copy in layout.copies:
            again = torch.full(copy.shape, -1)
            copy.view(again).copy_(ours[copy.ours.slices])
            assert torch.equal(again, source["model.embed_tokens.weight"])
            result[copy.key] = param.name
    assert result == ({"lm_head.weight": "embed.weight"} if choice.get("head") == "twice" else {})


@pytest.mark.parametrize("name", TINY)
def test_keys_and_shapes_are_those_of_transformers(name):
    table = table_of(name)
    choice = {"experts": "fused", "head": "twice"}
    spelled = {k: s for p in table for k, s in layout_of(p, choice).keys.items()}
    stored = in_parts(reference(name).state_dict())
    carried = [key for key in stored if any(fnmatch(key, pattern) for pattern in table.carried)]
    assert len(carried) == (3 if name == "qwen4_exp" else 0), "the numbers of the hash"
    assert spelled == {k: tuple(v.shape) for k, v in stored.items() if k not in carried}


def test_tied_models_are_spelt_with_and_without_a_head():
    spellings = {choice["head"]: choice for choice in choices_of(table_of("qwen3_tied"))}
    keys = {n: {k for p in table_of("qwen3_tied") for k in layout_of(p, c).keys} for n, c in spellings.items()}
    assert keys["twice"] - keys["one"] == {"lm_head.weight"}
    assert keys["one"] < keys["twice"]


ATTENTION = {
    **{f"{x}.weight": f"{x}_proj.weight" for x in "qkvo"},
    **{f"{x}.bias": f"{x}_proj.bias" for x in "qkv"},
    "q_norm.weight": "q_norm.weight", "k_norm.weight": "k_norm.weight",
}  # fmt: skip
DELTA = {
    **{f"{x}.weight": f"in_proj_{x}.weight" for x in ("z", "a", "b", "qkvz", "ba")}, "out.weight": "out_proj.weight",
    "gates.A_log": "A_log", "gates.dt_bias": "dt_bias", "norm.weight": "norm.weight",
}  # fmt: skip
STREAMS = {
    "norm": "hc_norm.weight", "down": "input_mix_weight_down.weight", "up": "input_mix_weight_up.weight",
    "inject": "block_inject_weight.weight",
}  # fmt: skip
PLAIN = {
    "norm.weight": "input_layernorm.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "mlp.down.weight": "mlp.down_proj.weight",
    "mlp.router": "mlp.gate.weight",
    **{f"mixer.{name}": f"self_attn.{key}" for name, key in ATTENTION.items()},
    "mlp.shared.down.weight": "mlp.shared_expert.down_proj.weight",
    "mlp.shared_gate": "mlp.shared_expert_gate.weight",
    **{f"mixer.{name}": f"linear_attn.{key}" for name, key in DELTA.items()},
    **{
        f"{ours}.{name}": f"{peer}_hyper_connection.{key}"
        for ours, peer in (("read", "attn"), ("mlp_read", "mlp"))
        for name, key in STREAMS.items()
    },
    "mixer.indexer.qk": "self_attn.indexer.index_qk_proj.weight",
    **{f"mixer.indexer.{x}_norm": f"self_attn.indexer.{x}_layernorm.weight" for x in "qk"},
    **{f"grams.{name}": f"ple.{name}.weight" for name in ("norm_key", "norm_query", "norm_conv")},
    **{f"grams.{name}.weight": f"ple.{name}_proj.weight" for name in ("key", "value")},
}
ENDS = {
    "embed.weight": "model.embed_tokens.weight",
    "head.norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
    **{f"head.norm.{name}": f"model.hyper_connection_mixer.{key}" for name, key in STREAMS.items()},
}


def wanted(name, source):
    """The matrix of one parameter, written from what the files and the model code mean."""
    if name in ENDS:
        return source["score.weight" if name == "head.weight" and "score.weight" in source else ENDS[name]]
    _, layer, short = name.split(".", 2)
    at = f"model.layers.{layer}."
    if short in ("mlp.gate_up.weight", "mlp.shared.gate_up.weight"):
        at += "mlp." if short == "mlp.gate_up.weight" else "mlp.shared_expert."
        return torch.cat([source[at + "gate_proj.weight"], source[at + "up_proj.weight"]])
    if short.startswith("mlp.experts."):
        return experts_wanted(short, at + "mlp.experts.", source)
    if short in ("mixer.qkv.weight", "mixer.conv.weight"):
        return by_key_head(short, at + "linear_attn.", source)
    if short == "grams.table":  # part after part, by number
        parts = range(ODD["qwen4_exp"]["split_ngram_parts"])
        return torch.cat([source[f"{at}ple.ple_embedding.ngram_embedding.shard_{i}.weight"] for i in parts])
    if short == "grams.conv":
        return source[at + "ple.conv1d.weight"].squeeze(1)
    return source[at + PLAIN[short]]


def experts_wanted(short, at, source):
    """Expert after expert: gate then up, or down."""
    gate_up = short == "mlp.experts.gate_up"
    fused = at + ("gate_up_proj" if gate_up else "down_proj")
    if fused in source:
        return source[fused].flatten(0, 1)
    names = ("gate_proj", "up_proj") if gate_up else ("down_proj",)
    num_experts = ODD["qwen3_moe"]["num_experts"]
    return torch.cat([source[f"{at}{e}.{n}.weight"] for e in range(num_experts) for n in names])


def by_key_head(short, at, source):
    """`[all Q | all K | all V]` -> of each key head its query, its key and the values that it serves."""
    c = ODD["qwen4_exp" if "model.hyper_connection_mixer.hc_norm.weight" in source else "qwen3_5"]
    keys, values = c["linear_num_key_heads"], c["linear_num_value_heads"]
    dk, dv, serves = c["linear_key_head_dim"], c["linear_value_head_dim"], values // keys
    x = source[at + "in_proj_qkv.weight"] if short == "mixer.qkv.weight" else source[at + "conv1d.weight"].squeeze(1)
    q, k, v = x[: keys * dk], x[keys * dk : 2 * keys * dk], x[2 * keys * dk :]
    assert len(v) == values * dv
    rows = []
    for h in range(keys):
        rows += [q[h * dk : (h + 1) * dk], k[h * dk : (h + 1) * dk]]
        rows += [v[j * dv : (j + 1) * dv] for j in range(h * serves, (h + 1) * serves)]
    return torch.cat(rows)


@pytest.mark.parametrize("case", EVERY, ids=case_id)
def test_matrices_are_what_the_files_mean(case):
    result, source = matrices(case)
    for name, local in result.items():
        assert torch.equal(local, wanted(name, source)), name


def test_the_delta_net_is_not_a_plain_copy():
    """q, k and v in the order of the file would mix heads silently."""
    result, source = matrices(("qwen3_5", "lm", {}))
    assert not torch.equal(result["layers.0.mixer.qkv.weight"], source["model.layers.0.linear_attn.in_proj_qkv.weight"])


def test_both_spellings_of_experts_give_the_same():
    one, many = ({"experts": name} for name in ("fused", "per-expert"))
    result, fused = matrices(("qwen3_moe", "lm", one))
    apart = source_of(table_of("qwen3_moe"), many)
    for key in list(apart):
        apart[key] = split_off(key, fused)
    for param in table_of("qwen3_moe"):
        again = matrix(param, assembled(param, layout_of(param, many), apart))
        assert torch.equal(again, result[param.name]), param.name


def split_off(key, fused):
    """One matrix of one expert out of the fused tensors."""
    if ".experts." not in key:
        return fused[key]
    at, _, rest = key.partition(".experts.")
    number, name, _ = rest.split(".")
    if name == "down_proj":
        return fused[f"{at}.experts.down_proj"][int(number)]
    return fused[f"{at}.experts.gate_up_proj"][int(number)].chunk(2)[name == "up_proj"]
