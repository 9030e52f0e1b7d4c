"""Comparison with transformers in float32, at odd sizes: logits, every gradient, packed documents against single
ones."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import meshwright as mw
from meshwright.models import qwen3_5
from meshwright.sharding import segments
from meshwright.verify.peer_choices import first_of_equals
from tests import parts, tiny, worlds

Documents = list[list[int]]
DOCUMENTS: Documents = [[5, 6, 7, 1, 2], [9], [3] * 7 + [100, 130], list(range(40, 110)), [8, 8]]


def reference_outputs(
    name: str, changes: dict[str, Any] | None = None, documents: Documents = DOCUMENTS
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Logits of each document alone, gradients and value of the mean loss over all targets.

    What transformers gives no gradient has zeros, but for indexers, which neither side trains.
    """
    model = tiny.reference(name, **(changes or {}))
    num_targets = sum(len(d) - 1 for d in documents)
    with first_of_equals():
        logits = [model(torch.tensor([d])).logits[0] for d in documents]
    targets = [torch.tensor(d[1:], dtype=torch.int64) for d in documents]
    terms = [F.cross_entropy(x[:-1], t, reduction="sum") for x, t in zip(logits, targets, strict=True)]
    loss = torch.stack(terms).sum() / num_targets
    loss.backward()
    trained = {k: p for k, p in model.named_parameters() if p.grad is not None or ".indexer." not in k}
    grads = {k: torch.zeros_like(p) if p.grad is None else p.grad for k, p in trained.items()}
    return torch.cat(logits).detach(), tiny._per_expert(grads), loss.detach()


def ours(
    source: Path, documents: Documents = DOCUMENTS, out: Path | None = None
) -> tuple[Tensor, dict[str, Tensor], float]:
    """Logits of packed documents, gradients and loss of all that can be trained, tables of n-grams among it. `out`:
    where to export what an update makes of it."""
    model = mw.load(source, dtype=torch.float32, train="*")
    batch = mw.pack(documents)
    logits = mw.logits(model, batch)
    engine = mw.Engine(model, lr=1e-2)
    loss, grads = engine.backward([batch]), mw.gather(model, "grad")
    if out:
        engine.update()
        mw.export(model, out)
    return logits, grads, loss


def kl(a: Tensor, b: Tensor) -> float:
    p, q = a.double().log_softmax(-1), b.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


ROPE = {"rope_type": "default", "rope_theta": 1e6}
FIELDS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in tiny.ODD),
    ("qwen3", dict(rope_parameters=ROPE, rms_norm_eps=1e-2)),
    ("qwen3", dict(num_key_value_heads=4, head_dim=6)),
    ("qwen2", dict(tie_word_embeddings=False, num_key_value_heads=1)),
    ("qwen3_moe", dict(norm_topk_prob=False, num_experts_per_tok=1)),
    ("qwen3_moe", dict(mlp_only_layers=[], decoder_sparse_step=2, num_hidden_layers=4)),
    ("qwen3_5", dict(rope_parameters={**ROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]})),
    ("qwen3_5", dict(rope_scaling={**ROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]})),
    ("qwen3_5", dict(rms_norm_eps=1e-2, linear_conv_kernel_dim=3, linear_num_value_heads=4)),
    ("qwen3_5", dict(layer_types=None, num_hidden_layers=5, tie_word_embeddings=True)),
    ("qwen3_next", dict(norm_topk_prob=False, num_experts_per_tok=1)),
    ("qwen3_next", dict(mlp_only_layers=[], decoder_sparse_step=2, num_hidden_layers=4, layer_types=None)),
    ("qwen3_next", dict(linear_num_value_heads=4, linear_conv_kernel_dim=3, rms_norm_eps=1e-2)),
    ("qwen3_next", dict(tie_word_embeddings=True, full_attention_interval=2, layer_types=None)),
]
TRIED = {f"{name}-{changes}": (name, changes) for name, changes in parts.every(2, FIELDS)}
# A row of each family, and tied embeddings.
EXPORTED = [key for key, (name, changes) in TRIED.items() if parts.ALL or not changes or "layer_types" in changes
            or name in ("qwen2", "qwen3_moe", "qwen3_next")]  # fmt: skip
Ran = dict[str, tuple[Any, ...]]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Run each row with our code and with transformers; add the logits of an export of ours, and its place."""
    at = tmp_path_factory.mktemp("families")
    acts, peers = dict[str, Any](), dict[str, Any]()
    for number, (key, (name, changes)) in enumerate(TRIED.items()):
        out = at / f"out-{number}" if key in EXPORTED else None
        acts[key] = functools.partial(ours, tiny.directory(at / str(number), name, **changes), DOCUMENTS, out)
        peers[key] = functools.partial(reference_outputs, name, changes)
    result, expected = worlds.in_turn(1, acts), worlds.in_turn(1, peers)
    outs = {key: at / f"out-{number}" for number, key in enumerate(TRIED) if key in EXPORTED}
    again = worlds.in_turn(1, {key: functools.partial(_logits, out, DOCUMENTS[3]) for key, out in outs.items()})
    return {key: (result[key][0], expected[key][0], again.get(key, [None])[0], outs.get(key)) for key in TRIED}


@pytest.mark.parametrize("key", TRIED)
def test_logits_and_gradients(ran: Ran, key: str) -> None:
    """Each family, and each field of the config that a family reads, away from its default."""
    result, expected, *_ = ran[key]
    agree(result, expected)


def compare(at: Path, name: str, changes: dict[str, Any], documents: Documents = DOCUMENTS) -> None:
    source = tiny.directory(at / "m", name, **changes)
    expected = worlds.run(1, reference_outputs, name, changes, documents)[0]
    agree(worlds.run(1, ours, source, documents)[0], expected)


def agree(result: tuple[Tensor, dict[str, Tensor], float], expected: tuple[Tensor, dict[str, Tensor], Tensor]) -> None:
    """The rules by which a family agrees with transformers."""
    (logits, grads, loss), (ref_logits, ref_grads, ref_loss) = result, expected
    assert (logits - ref_logits).abs().max() <= 1e-5 * ref_logits.abs().max()
    assert kl(ref_logits, logits) <= 3e-7
    assert math.isclose(loss, ref_loss.item(), rel_tol=1e-6)
    assert set(grads) == set(ref_grads)
    norm = torch.stack([g.double().norm() for g in ref_grads.values()]).norm().item()
    for key, ref in ref_grads.items():
        error = (grads[key].double() - ref.double()).norm().item()
        assert error <= 1e-5 * max(ref.double().norm().item(), 1e-2 * norm), f"{key}: {error / norm:.2e} of the norm"


def reference_outputs_of(source: Path) -> Tensor:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    return torch.cat([model(torch.tensor([d])).logits[0] for d in DOCUMENTS]).detach()


DEFAULT_HEADS: dict[str, dict[str, Any]] = {
    "qwen3": dict(head_dim=128),
    "qwen3_moe": dict(head_dim=10, hidden_size=40),
    "qwen3_5": dict(head_dim=256),
}


def test_head_dim_left_out(tmp_path: Path) -> None:
    """The default differs from family to family."""
    acts = dict[str, Any]()
    for name, changes in DEFAULT_HEADS.items():
        source = tiny.directory(tmp_path / name, name, **changes)
        config = json.loads((source / "config.json").read_text())
        del config["head_dim"]
        (source / "config.json").write_text(json.dumps(config))
        acts |= {
            name: functools.partial(_logits_of_all, source),
            f"{name}, transformers": lambda source=source: reference_outputs_of(source),
        }
    made = {key: ranks[0] for key, ranks in worlds.in_turn(1, acts).items()}
    for name in DEFAULT_HEADS:
        expected = made[f"{name}, transformers"]
        assert (made[name] - expected).abs().max() <= 1e-5 * expected.abs().max(), name


def _logits_of_all(source: Path) -> Tensor:
    return mw.logits(mw.load(source, dtype=torch.float32), mw.pack(DOCUMENTS))


@pytest.mark.parametrize("ffn", [40, 20], ids=["F = D", "2F = D"])
def test_experts_of_equal_sizes(tmp_path: Path, ffn: int) -> None:
    """No shape distinguishes `[2F, D]` from its transpose, or from `down_proj`."""
    changes = dict(hidden_size=40, moe_intermediate_size=ffn)
    acts: dict[str, Any] = {"transformers": functools.partial(reference_outputs, "qwen3_moe", changes)}
    for layout in ("per-expert", "fused"):
        acts[layout] = functools.partial(ours, tiny.directory(tmp_path / layout, "qwen3_moe", layout=layout, **changes))
    [(ref_logits, ref_grads, _)], *made = worlds.in_turn(1, acts).values()
    for [(logits, grads, _)] in made:
        assert (logits - ref_logits).abs().max() <= 1e-5 * ref_logits.abs().max()
        for key, grad in tiny._per_expert(grads).items():
            assert (grad - ref_grads[key]).norm() <= 1e-4 * ref_grads[key].norm() + 1e-7, key


def fresh(config: Path) -> dict[str, Tensor]:
    return mw.gather(mw.init(config, mw.Mesh(device="cpu"), dtype=torch.float32))


def test_fresh_norms_begin_where_those_of_transformers_do(tmp_path: Path) -> None:
    """Zero-centred ones at 0, all others at 1; what begins elsewhere learns something else."""
    for name in tiny.ODD:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(tiny.of(name)))
    made = worlds.in_turn(1, {name: functools.partial(fresh, tmp_path / name) for name in tiny.ODD})
    for name, (result,) in made.items():
        expected = {k: v for k, v in tiny.fresh(name).state_dict().items() if k.endswith("norm.weight")}
        assert {k for k in result if k.endswith("norm.weight")} == set(expected), name
        for key, value in expected.items():
            assert torch.equal(result[key].float(), value), (name, key)


def test_permuted_segments_are_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ran: Ran) -> None:
    """A declaration that takes [Q | K | V] for [K | Q | V] loads, trains and exports without a complaint; only another
    implementation can tell."""
    real: Callable[..., Any] = segments

    def swapped(key: str, shape: Any, cuts: Any, source: Any) -> Any:
        layout = real(key, shape, cuts, source)
        q, k, v = layout.blocks
        return type(layout)(
            layout.name, (type(q)(q.ours, q.key, q.shape, k.source), type(k)(k.ours, k.key, k.shape, q.source), v)
        )

    monkeypatch.setattr(qwen3_5, "segments", swapped)
    source = tiny.directory(tmp_path / "m", "qwen3_5")
    assert (worlds.run(1, _logits_of_all, source)[0] - ran["qwen3_5-{}"][1][0]).abs().max() > 1e-2


@pytest.mark.parametrize("key", EXPORTED)
def test_transformers_loads_the_export(ran: Ran, key: str) -> None:
    import transformers

    _, _, result, at = ran[key]
    model = transformers.AutoModelForCausalLM.from_pretrained(at, dtype=torch.float32)
    with torch.no_grad():
        expected = model(torch.tensor([DOCUMENTS[3]])).logits[0]
    assert (result - expected).abs().max() <= 1e-5 * expected.abs().max()


def _logits(source: Path, document: list[int]) -> Tensor:
    return mw.logits(mw.load(source, dtype=torch.float32), mw.pack([document]))


def test_a_value_head_is_a_token_classifier_of_one_label(tmp_path: Path) -> None:
    import transformers
    from safetensors.torch import load_file, save_file

    source = tiny.directory(tmp_path / "m", "qwen3")
    tensors = load_file(source / "model.safetensors")
    del tensors["lm_head.weight"]
    tensors["score.weight"] = torch.randn(1, 36)
    save_file(tensors, source / "model.safetensors")
    values = worlds.run(1, _values, source)[0]
    config = transformers.Qwen3Config.from_pretrained(source, num_labels=1)
    model = transformers.Qwen3ForTokenClassification.from_pretrained(source, config=config, dtype=torch.float32).eval()
    with torch.no_grad():
        model.score.bias.zero_()
        expected = torch.cat([model(torch.tensor([d])).logits[0, :, 0] for d in DOCUMENTS])
    assert (values - expected).abs().max() <= 1e-5 * expected.abs().max()


def _values(source: Path) -> Tensor:
    return mw.logits(mw.load(source, dtype=torch.float32, head="value"), mw.pack(DOCUMENTS))


def _dtypes(source: Path) -> dict[str, set[torch.dtype]]:
    """Return the dtypes that reach ops which must not get rounded values, in a bf16 run."""
    seen: dict[str, set[torch.dtype]] = {}
    ops = qwen3_5.ops

    def spy(name: str, exact: Callable[..., list[Tensor]]) -> None:
        real = getattr(ops, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            seen.setdefault(name, set()).update(t.dtype for t in exact(*args))
            return real(*args, **kwargs)

        setattr(ops, name, watched)

    spy("gates", lambda a, b, A_log, dt_bias: [A_log, dt_bias])
    spy("gated_rms_norm", lambda x, gate, w, *_: [w])
    spy("rotate", lambda x, cos, sin: [cos, sin])
    engine = mw.Engine(mw.load(source, dtype=torch.bfloat16), lr=1e-3)
    engine.step([mw.pack(DOCUMENTS)])
    return seen


def test_bfloat16_rounds_nothing_that_is_float32(tmp_path: Path) -> None:
    seen = worlds.run(1, _dtypes, tiny.directory(tmp_path / "m", "qwen3_5"))[0]
    assert seen == {name: {torch.float32} for name in ("gates", "gated_rms_norm", "rotate")}
