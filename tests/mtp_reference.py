"""The loss of a head for multi-token prediction (MTP), by hand in float64: one process, one document at a time.

Nothing here is shared with the engine: attention is a loop over queries, and experts are a loop over tokens. The layer
of Qwen4-Exp is that of transformers. Shapes: T tokens, D model, C = D or all streams, H heads, K head dim, V vocab.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from transformers.models.qwen4_exp import modeling_qwen4_exp as qwen4_exp
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig

from meshwright.verify.peer_choices import first_of_equals

Tensors = Mapping[str, Tensor]  # by the keys of the files, in float64
Config = Mapping[str, Any]  # config.json
# Hidden states [T, C], tokens [T], labels [T], starts and ends of documents, and weights [T] or None.
Given = tuple[Tensor, Tensor, Tensor, Sequence[int], Tensor | None]

IGNORE = -100
LAYER = "mtp.layers.0"


def mtp_terms(
    hidden_TC: Tensor,
    tokens: Tensor,
    labels: Tensor,
    bounds: Sequence[int],
    tensors: Tensors,
    config: Config,
    weights: Tensor | None = None,
) -> list[tuple[int, Tensor]]:
    """Return each term of the loss, not yet divided: where in the stream it is, and weight * -log p(label).

    `hidden_TC`: behind the final norm; for Qwen4-Exp the residual streams before the final mixer, one after another.
    """
    return [
        (t, -logp_V[label] * _weight(weights, t))
        for t, label, logp_V in _predictions(hidden_TC, tokens, labels, bounds, tensors, config)
    ]


def mtp_loss(batches: Iterable[Given], tensors: Tensors, config: Config) -> Tensor:
    """Return the sum of all terms of all batches, divided by the sum of their weights; 0 where nothing has weight."""
    total, denominator = torch.zeros((), dtype=torch.float64), 0.0
    for *inputs, weights in batches:
        for t, term in mtp_terms(*inputs, tensors, config, weights):
            total = total + term
            denominator += _weight(weights, t)
    return total / denominator if denominator else total


def hits(
    hidden_TC: Tensor, tokens: Tensor, labels: Tensor, bounds: Sequence[int], tensors: Tensors, config: Config
) -> int:
    """Count the targets whose label is the most probable token, whatever their weights."""
    predictions = _predictions(hidden_TC, tokens, labels, bounds, tensors, config)
    return sum(int(logp_V.argmax()) == label for _, label, logp_V in predictions)


def _weight(weights: Tensor | None, t: int) -> float:
    """Return the weight of the term at t: that of the next token, whose label it predicts."""
    return 1.0 if weights is None else float(weights[t + 1])


def _predictions(
    hidden_TC: Tensor, tokens: Tensor, labels: Tensor, bounds: Sequence[int], tensors: Tensors, config: Config
) -> Iterator[tuple[int, int, Tensor]]:
    """Yield of each target where it is, its label, and the log-probabilities [V] there."""
    text = {**config, **config.get("text_config", {})}
    embed_VD = next(x for k, x in tensors.items() if k.endswith("embed_tokens.weight") and not k.startswith("mtp."))
    head_VD = embed_VD if config.get("tie_word_embeddings") else tensors.get("lm_head.weight", embed_VD)
    states = _streams_of_qwen4_exp if text["model_type"].startswith("qwen4_exp") else _states
    for start, end in pairwise(bounds):
        targets = [(t, int(labels[t + 1])) for t in range(start, end - 1) if labels[t + 1] != IGNORE]
        if not targets:  # a document of one token, or padding
            continue
        next_TD = embed_VD[tokens[start + 1 : end]]
        z_TD = states(hidden_TC[start : end - 1].double().flatten(1), next_TD, tensors, text)
        logp_TV = (z_TD @ head_VD.T).log_softmax(-1)
        for t, label in targets:
            yield t, label, logp_TV[t - start]


def _states(hidden_TD: Tensor, next_TD: Tensor, tensors: Tensors, config: Config) -> Tensor:
    """Compute what the LM head takes, from the states of a document and the embeddings of its next tokens."""
    eps = config.get("rms_norm_eps", 1e-6)
    e_TD = _norm(next_TD, tensors["mtp.pre_fc_norm_embedding.weight"], eps)
    h_TD = _norm(hidden_TD, tensors["mtp.pre_fc_norm_hidden.weight"], eps)
    y_TD = torch.cat([e_TD, h_TD], -1) @ tensors["mtp.fc.weight"].T
    y_TD = decoder_layer(y_TD, torch.arange(1, len(y_TD) + 1), tensors, LAYER, config)
    return _norm(y_TD, tensors["mtp.norm.weight"], eps)


def decoder_layer(x_TD: Tensor, positions_T: Tensor, tensors: Tensors, at: str, config: Config) -> Tensor:
    """Compute a layer of full attention of Qwen3-Next or Qwen3.5, for one document. `at`: the prefix of its keys."""
    eps = config.get("rms_norm_eps", 1e-6)
    normed_TD = _norm(x_TD, tensors[f"{at}.input_layernorm.weight"], eps)
    x_TD = x_TD + _attention(normed_TD, positions_T, tensors, f"{at}.self_attn", config)
    normed_TD = _norm(x_TD, tensors[f"{at}.post_attention_layernorm.weight"], eps)
    if f"{at}.mlp.gate.weight" in tensors:
        return x_TD + _mixture(normed_TD, tensors, f"{at}.mlp", config)
    return x_TD + _mlp(normed_TD, *(tensors[f"{at}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down")))


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (1 + weight)


def _attention(x_TD: Tensor, positions_T: Tensor, tensors: Tensors, at: str, config: Config) -> Tensor:
    """Let each token attend to itself and to all before it. Half of what `q_proj` yields for a head is its gate."""
    eps, size = config.get("rms_norm_eps", 1e-6), len(tensors[f"{at}.q_norm.weight"])
    both_THK, k_TGK, v_TGK = (
        (x_TD @ tensors[f"{at}.{name}_proj.weight"].T).unflatten(-1, (-1, width))
        for name, width in (("q", 2 * size), ("k", size), ("v", size))
    )
    q_THK, gate_THK = both_THK[..., :size], both_THK[..., size:]
    q_THK = _rotated(_norm(q_THK, tensors[f"{at}.q_norm.weight"], eps), positions_T, config)
    k_TGK = _rotated(_norm(k_TGK, tensors[f"{at}.k_norm.weight"], eps), positions_T, config)
    shared = q_THK.shape[1] // k_TGK.shape[1]  # consecutive heads of queries have a head of keys together
    k_THK, v_THK = k_TGK.repeat_interleave(shared, 1), v_TGK.repeat_interleave(shared, 1)
    outputs = []
    for t, q_HK in enumerate(q_THK):
        scores_HS = (q_HK * k_THK[: t + 1]).sum(-1).T / size**0.5
        outputs.append((scores_HS.softmax(-1).T[..., None] * v_THK[: t + 1]).sum(0))
    out_THK = torch.stack(outputs) * gate_THK.sigmoid()
    return out_THK.flatten(1) @ tensors[f"{at}.o_proj.weight"].T


def _rotated(x_THK: Tensor, positions_T: Tensor, config: Config) -> Tensor:
    """Turn the pairs (r, r + R) of the first 2R dims of each head, and leave the other dims."""
    rope = {**config, **(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    assert rope.get("rope_type", rope.get("type", "default")) == "default", "only RoPE without scaling is written here"
    R = int(x_THK.shape[-1] * rope.get("partial_rotary_factor", 0.25)) // 2
    freq_R = rope.get("rope_theta", 10000.0) ** (-torch.arange(R, dtype=torch.float64) / R)
    angle_T1R = positions_T[:, None, None] * freq_R
    a, b, rest = x_THK[..., :R], x_THK[..., R : 2 * R], x_THK[..., 2 * R :]
    cos, sin = angle_T1R.cos(), angle_T1R.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


def _mlp(x: Tensor, gate_FD: Tensor, up_FD: Tensor, down_DF: Tensor) -> Tensor:
    return (F.silu(x @ gate_FD.T) * (x @ up_FD.T)) @ down_DF.T


def _mixture(x_TD: Tensor, tensors: Tensors, at: str, config: Config) -> Tensor:
    """Add to the shared expert, by its gate, the best experts of each token; of equals the first."""
    shared = [tensors[f"{at}.shared_expert.{name}_proj.weight"] for name in ("gate", "up", "down")]
    gate_up_E2FD, down_EDF = _experts(tensors, at)
    rows = []
    for x_D in x_TD:
        p_E = (tensors[f"{at}.gate.weight"] @ x_D).softmax(-1)
        chosen = p_E.detach().sort(descending=True, stable=True).indices[: config["num_experts_per_tok"]].tolist()
        share = p_E[chosen].sum() if config.get("norm_topk_prob", True) else 1.0
        out_D = (tensors[f"{at}.shared_expert_gate.weight"] @ x_D).sigmoid() * _mlp(x_D, *shared)
        for e in chosen:
            out_D = out_D + p_E[e] / share * _mlp(x_D, *gate_up_E2FD[e].chunk(2), down_EDF[e])
        rows.append(out_D)
    return torch.stack(rows)


def _experts(tensors: Tensors, at: str) -> tuple[Tensor, Tensor]:
    """Return gates above ups [E, 2F, D] and downs [E, D, F], from either layout."""
    if f"{at}.experts.gate_up_proj" in tensors:
        return tensors[f"{at}.experts.gate_up_proj"], tensors[f"{at}.experts.down_proj"]
    gate, up, down = (
        torch.stack([tensors[f"{at}.experts.{e}.{name}_proj.weight"] for e in range(len(tensors[f"{at}.gate.weight"]))])
        for name in ("gate", "up", "down")
    )
    return torch.cat([gate, up], 1), down


class _Float64(TorchFunctionMode):
    """Let transformers compute in float64 what it always computes in float32: norms, softmax, routers, RoPE."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = torch.Tensor.double if func is torch.Tensor.float else func
        args = [torch.float64 if x is torch.float32 else x for x in args]
        return func(*args, **{k: torch.float64 if x is torch.float32 else x for k, x in (kwargs or {}).items()})


def _streams_of_qwen4_exp(hidden_TC: Tensor, next_TD: Tensor, tensors: Tensors, config: Config) -> Tensor:
    """Compute what the LM head takes, from the streams of a document, one after another, and the next tokens."""
    eps, n, T = config.get("rms_norm_eps", 1e-6), config["hc_count"], len(hidden_TC)
    s_TnD = _norm(hidden_TC, tensors["mtp.pre_fc_norm_hidden.weight"], eps).unflatten(-1, (n, -1))
    e_TD = _norm(next_TD, tensors["mtp.pre_fc_norm_embedding.weight"], eps) @ tensors["mtp.fc_embedding.weight"].T
    x_1TC = (s_TnD @ tensors["mtp.fc_hidden.weight"].T + e_TD[:, None]).flatten(1)[None]

    one = {"num_hidden_layers": 1, "layer_types": ["full_attention"], "ple_layer_ids": []}
    peer_config = Qwen4ExpTextConfig(**deepcopy({k: v for k, v in {**config, **one}.items() if k != "model_type"}))
    peer_config._attn_implementation = peer_config._experts_implementation = "eager"
    with torch.device("meta"):  # every parameter comes from `tensors`
        layer = qwen4_exp.Qwen4ExpTextDecoderLayer(peer_config, 0)
        mixer = qwen4_exp.Qwen4ExpTextGatedResidual(peer_config, use_combine=False)
    of_layer = {k: x for k, x in _below(tensors, f"{LAYER}.").items() if not k.startswith("mlp.experts.")}
    of_layer["mlp.experts.gate_up_proj"], of_layer["mlp.experts.down_proj"] = _experts(tensors, f"{LAYER}.mlp")
    of_mixer = _below(tensors, "mtp.hyper_connection_mixer.")
    hidden_TS = torch.full((T, T), torch.finfo(torch.float64).min, dtype=torch.float64).triu(1)
    with _Float64(), first_of_equals():
        rope = qwen4_exp.Qwen4ExpTextRotaryEmbedding(peer_config)(x_1TC, torch.arange(T)[None])
        x_1TC = functional_call(layer, of_layer, (x_1TC, rope, hidden_TS[None, None]), strict=True)
        return functional_call(mixer, of_mixer, (x_1TC,), strict=True)[0]


def _below(tensors: Tensors, prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): x for k, x in tensors.items() if k.startswith(prefix)}
