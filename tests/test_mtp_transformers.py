"""transformers drafts with an exported MTP head: the same numbers as ours, and more accepted drafts once it is trained.

transformers 5.23 was run: MtpModel, MTPCandidateGenerator.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers.cache_utils import MtpCache
from transformers.generation.candidate_generator import MTPCandidateGenerator
from transformers.modeling_layers import MtpModel

import meshwright as mw
from tests import parts, tiny, worlds
from tests.words import words

# transformers' fields, which Qwen's files do not have. They count for its text model.
ASKED = {"num_mtp_layers": 1, "mtp_layer_types": ["full_attention"]}
LIMIT = 2e-5  # between logits of both in float32; they are spread by more than 0.3


# --- transformers ---


def for_transformers(export: Path) -> Path:
    """Copy an export, with the fields that transformers asks for."""
    at = export.with_name(f"{export.name} for transformers")
    if not at.exists():
        shutil.copytree(export, at)
        config = json.loads((at / "config.json").read_text())
        (at / "config.json").write_text(json.dumps({**config, **ASKED}))
    return at


def loaded(export: Path) -> tuple[Any, MtpModel]:
    """Load an export and its head with transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(for_transformers(export)).eval()
    return model, MtpModel.from_pretrained(model, device_map={"": torch.device("cpu")}).eval()


@torch.no_grad()
def their_logits(model: Any, head: MtpModel, tokens: Sequence[int], *, first: int = 1, normed: bool = True) -> Tensor:
    """Compute the head's logits at each token but the last, which has no next token.

    `first`: the position of token 0 in RoPE, 1 in MTPCandidateGenerator. `normed`: with the states that it takes.
    """
    before: list[Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, given: before.append(given[0]))
    ids, positions = torch.tensor([tokens]), torch.arange(first, first + len(tokens) - 1)[None]
    after = model(ids, output_hidden_states=-1).hidden_states[-1]
    hook.remove()
    cache = MtpCache(config=model.config.get_mtp_config())
    states = (after if normed else before[0])[:, :-1]
    return head._project_to_logits(head.forward_layer(0, states, positions, cache, input_ids=ids[:, 1:]))[0]


def our_logits(source: Path, tokens: Sequence[int]) -> tuple[Tensor, mw.StepRecord]:
    """Compute the same by our head, and the record of a step on this document."""
    model, kept = mw.load(source, dtype=torch.float32, mtp="head"), list[Tensor]()
    head = model.parts[0].get_submodule("head.mtp")
    hook = head.register_forward_hook(lambda _, given, out: kept.append(out.detach().clone()))
    engine = mw.Engine(model, lr=1e-3)
    record = engine.step([mw.pack([list(tokens)])])
    hook.remove()
    vocabulary = load_file(source / "model.safetensors")["lm_head.weight"]
    return (kept[0] @ vocabulary.T)[: len(tokens) - 1], record


def drawn_tokens(num: int) -> list[int]:
    return torch.randint(0, 131, (num,), generator=torch.Generator().manual_seed(1)).tolist()


LAST_FULL: dict[str, Any] = dict(
    num_hidden_layers=3, layer_types=["linear_attention", "linear_attention", "full_attention"]
)


@pytest.mark.parametrize(
    ("family", "layout"),
    parts.every(
        2, [("qwen3_5", ""), ("qwen3_5_moe", ""), ("qwen3_5_moe", "fused"), ("qwen3_next", "fused"), ("qwen3_next", "")]
    ),
)
def test_the_head_of_transformers_computes_what_ours_does(tmp_path: Path, family: str, layout: str) -> None:
    """Compare logits at each position, and so the loss and the acceptance that a step reports."""
    source = tiny.with_mtp(tiny.directory(tmp_path / "m", family, **LAST_FULL), layout=layout)
    tokens = drawn_tokens(60)
    model, head = loaded(source)
    peer = their_logits(model, head, tokens)
    ((ours, record),) = worlds.run(1, functools.partial(our_logits, source, tokens))
    assert peer.std() > 0.3
    assert (peer - ours).abs().max() < LIMIT
    labels = torch.tensor(tokens[2:])
    assert record.mtp.loss == pytest.approx(F.cross_entropy(peer[:-1], labels).item(), rel=1e-6)
    assert record.mtp.acceptance == (peer[:-1].argmax(-1) == labels).double().mean().item()
    # RoPE sees differences alone, and states before the final norm are others.
    assert (their_logits(model, head, tokens, first=0) - ours).abs().max() < LIMIT
    assert (their_logits(model, head, tokens, normed=False) - ours).abs().max() > 100 * LIMIT


def test_transformers_has_no_head_of_residual_streams(tmp_path: Path) -> None:
    """Look for its only layout: one projection of both inputs, and a norm behind the layer."""
    layers = ["linear_attention"] * 3 + ["full_attention"]
    source = tiny.with_mtp(tiny.directory(tmp_path / "m", "qwen4_exp", layer_types=layers))
    with pytest.raises(RuntimeError, match=words(r"layers\.0\.eh_proj", r"layers\.0\.post_norm")):
        loaded(source)


# --- drafts of a trained head ---

TEXT = (Path(__file__).parents[1] / "examples" / "text" / "lighthouse.txt").read_text("utf-8")[:240]  # of the demo
TOKENS = [byte for byte in " ".join(TEXT.split()).encode() if byte < 131]
PROMPT, NUM_NEW = TOKENS[40:60], 60
# Layers and steps. Training takes a minute, so `make matrix` drafts.
KINDS = {"full": (["full_attention"] * 3, 240), "hybrid": (LAST_FULL["layer_types"], 130)}


def trained(model: mw.Model, steps: int, *, length: int = 96) -> None:
    """Train on windows of the text."""
    engine, g = mw.Engine(model, lr=4e-3), torch.Generator().manual_seed(0)
    for _ in range(steps):
        start = int(torch.randint(0, len(TOKENS) - length, (), generator=g))
        engine.step([mw.pack([TOKENS[start : start + length]])])


def trained_apart(root: Path) -> None:
    """Train a trunk of each kind without a head, then a head on it; export them with the head as drawn and trained."""
    for kind, (layers, steps) in KINDS.items():
        sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=3, layer_types=layers)
        model = mw.load(tiny.directory(root / kind / "source", "qwen3_5", **sizes), dtype=torch.float32)
        trained(model, steps)
        mw.export(model, root / kind / "trunk")
        model = mw.load(root / kind / "trunk", dtype=torch.float32, mtp="head", train=["head.mtp.*"])
        mw.export(model, root / kind / "drawn")
        trained(model, steps)
        mw.export(model, root / kind / "trained")


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("drafts")
    worlds.run(1, functools.partial(trained_apart, root), seconds=240.0)
    return root


@dataclass
class Drafts:
    """A record of what transformers did as it generated a text with a head."""

    text: list[int]
    logits: Tensor  # of the main model, from which each new token was taken
    accepted: list[int]  # drafts of each round; the first has none
    scores: dict[int, Tensor]  # logits of a draft, by the number of tokens before it
    states: Tensor  # with which the head was fed, of all rounds
    positions: Tensor  # in RoPE of these

    @property
    def share(self) -> float:
        return sum(self.accepted) / len(self.scores)


def generated(model: Any, **options: Any) -> Any:
    return model.generate(
        torch.tensor([PROMPT]), attention_mask=torch.ones(1, len(PROMPT), dtype=torch.int64), max_new_tokens=NUM_NEW,
        do_sample=False, output_logits=True, return_dict_in_generate=True, **options,
    )  # fmt: skip


def drafted(monkeypatch: pytest.MonkeyPatch, model: Any) -> Drafts:
    """Generate with the head, and write down what its drafts were made of."""
    accepted, scores, fed = list[int](), dict[int, Tensor](), list[tuple[Tensor, Tensor]]()
    get, forward = MTPCandidateGenerator.get_candidates, MtpModel.forward

    def get_candidates(self: Any, input_ids: Any, **given: Any) -> tuple[Tensor, Tensor | None]:
        candidates, logits = get(self, input_ids, **given)
        assert candidates.shape[1] - input_ids.shape[1] == (0 if logits is None else 1)
        if logits is not None:
            scores[input_ids.shape[1]] = logits[0, 0]
        return candidates, logits

    def forward_of_head(self: MtpModel, *, last_hidden_states: Tensor, position_ids: Tensor, **given: Any) -> Any:
        fed.append((last_hidden_states[0], position_ids[0]))
        return forward(self, last_hidden_states=last_hidden_states, position_ids=position_ids, **given)

    def update(self: Any, input_ids: Tensor, _: Tensor, num_matches: int) -> None:
        accepted.append(int(num_matches))

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", get_candidates)
    monkeypatch.setattr(MTPCandidateGenerator, "update_candidate_strategy", update)
    monkeypatch.setattr(MtpModel, "forward", forward_of_head)
    # It refuses the whole family for its delta nets; without such layers there is no state to take back.
    monkeypatch.setattr(model, "_is_stateful", False)
    out = generated(model, use_mtp=True)
    monkeypatch.undo()
    states, positions = (torch.cat(each) for each in zip(*fed, strict=True))
    return Drafts(out.sequences[0].tolist(), torch.cat(out.logits), accepted, scores, states, positions)


@parts.IN_MATRIX
def test_transformers_accepts_more_drafts_of_a_trained_head(exports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shares = {}
    for name in ("drawn", "trained"):
        model, _ = loaded(exports / "full" / name)
        plain, drafts = generated(model), drafted(monkeypatch, model)
        text = plain.sequences[0].tolist()
        assert drafts.text == text
        assert len(drafts.accepted) + sum(drafts.accepted) == NUM_NEW  # each round runs the main model once
        shares[name] = drafts.share

        # It feeds the head as we do: states behind the final norm, and drafts are ours.
        with torch.no_grad():
            states = model(torch.tensor([text]), output_hidden_states=-1).hidden_states[-1][0]
        ((ours, _),) = worlds.run(1, functools.partial(our_logits, exports / "full" / name, text))
        num = len(drafts.states)
        assert drafts.positions.tolist() == list(range(1, num + 1))
        assert (drafts.states - states[:num]).abs().max() < LIMIT
        worst = max(float((scores - ours[before - 2]).abs().max()) for before, scores in drafts.scores.items())
        assert worst < 5 * LIMIT
    print(f"accepted: {shares}")
    assert shares["drawn"] < 0.3
    assert shares["trained"] > 0.5


@parts.IN_MATRIX
def test_a_hybrid_model_accepts_more_drafts_too(exports: Path) -> None:
    """Reckon along the text of the trunk, since transformers does not generate with the heads of these models."""
    shares = {}
    for name in ("drawn", "trained"):
        model, head = loaded(exports / "hybrid" / name)
        text = generated(model).sequences[0].tolist()
        drafts = their_logits(model, head, text).argmax(-1)[:-1]
        shares[name] = (drafts == torch.tensor(text[2:]))[len(PROMPT) - 1 :].double().mean().item()
    print(f"accepted: {shares}")
    assert shares["drawn"] < 0.3
    assert shares["trained"] > 0.5


@parts.IN_MATRIX
def test_transformers_refuses_to_draft_for_hybrid_models(exports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Show why: a rejected draft stays in the state of delta nets, since `crop` of its cache leaves that as it is."""
    model, _ = loaded(exports / "hybrid" / "drawn")
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
        generated(model, use_mtp=True)
    plain, drafts = generated(model), drafted(monkeypatch, model)
    assert drafts.share < 1
    assert (torch.cat(plain.logits) - drafts.logits).abs().max() > 0.1
