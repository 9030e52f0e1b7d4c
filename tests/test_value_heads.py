"""Sequence and token classifiers as sources of `head="value"`: as transformers, on every mesh, byte for byte."""

from __future__ import annotations

import functools
import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import meshwright as mw
from tests import parts, tiny, trials, worlds
from tests.words import words

DOCUMENTS = [[5, 6, 7, 1, 2], [9], [3] * 7 + [100, 130], list(range(40, 80)), [8, 8]]
SPEECH = {0: "schön", 1: "weder noch", 2: "\N{PILE OF POO}"}
TWO = dict(fsdp=2, tp=2)


def labels(num: int) -> list[list[int]]:
    """Return labels of each token; a sequence classifier reads the last ones."""
    return [[(7 * token + at) % num for at, token in enumerate(d)] for d in DOCUMENTS]


def reference_outputs(name: str, kind: str, changes: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits of each document alone; gradients of the mean cross-entropy over all that is classified."""
    model = tiny.reference(name, kind, **changes)
    result = torch.cat([model(torch.tensor([d])).logits.view(-1, model.num_labels) for d in DOCUMENTS])
    wanted = [of[-1:] if kind == "Sequence" else of for of in labels(model.num_labels)]
    F.cross_entropy(result, torch.tensor([label for of in wanted for label in of])).backward()
    grads = {k: torch.zeros_like(p) if p.grad is None else p.grad for k, p in model.named_parameters()}
    return result.detach(), tiny._per_expert(grads)


def ours(source: Path, kind: str, num: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Return logits and gradients of the packed documents."""
    model = mw.load(source, head="value", dtype=torch.float32)
    classes = labels(num) if kind == "Token" else [[*[-100] * (len(of) - 1), of[-1]] for of in labels(num)]
    batch = mw.pack(DOCUMENTS, labels=classes, length=60)
    mw.Engine(model, lr=1e-3, loss=mw.losses.classification).backward([batch])
    return mw.logits(model, batch)[batch.is_target_T], mw.gather(model, "grad")


CLASSIFIERS: list[tuple[str, str, dict[str, Any]]] = [
    ("qwen3", "Sequence", dict(num_labels=3)),
    ("qwen3", "Token", dict(num_labels=3)),
    ("qwen3_moe", "Token", dict(num_labels=2)),  # 2 are not stated in config.json
    ("qwen3_5", "Sequence", dict(num_labels=4)),
    ("qwen2", "Token", dict(num_labels=3, token_classification_bias=False)),  # tied, which a classifier ignores
]


def warned(at: Path) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = mw.load(at, mw.Mesh(fsdp=2, device="cpu"), head="value", dtype=torch.float32)
        mw.Engine(model, lr=1e-3, loss=lambda s, _: s["values"].view(len(s["values"]), -1).sum(1)).step(tiny.batches(0))
    return [str(w.message) for w in caught]


def test_nothing_to_warn_of(tmp_path: Path) -> None:
    """FSDP does of views that leave a module."""
    acts = {
        num: functools.partial(warned, tiny.classifier(tmp_path / str(num), "qwen3", "Token", num_labels=num))
        for num in (1, 3)
    }
    assert worlds.in_turn(2, acts) == {num: [[], []] for num in acts}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any]]:
    """Return logits and gradients of each classifier, ours and those of transformers, from one world."""
    acts, at = dict[str, Any](), tmp_path_factory.mktemp("as")
    for number, (name, kind, changes) in enumerate(CLASSIFIERS):
        source = tiny.classifier(at / str(number), name, kind, **changes)
        acts[f"{name} {kind}"] = functools.partial(ours, source, kind, changes["num_labels"])
        acts[f"{name} {kind}, transformers"] = functools.partial(reference_outputs, name, kind, changes)
    made = {key: ranks[0] for key, ranks in worlds.in_turn(1, acts).items()}
    return {key: (made[key], made[f"{key}, transformers"]) for key in made if "transformers" not in key}


@pytest.mark.parametrize("key", [f"{name} {kind}" for name, kind, _ in CLASSIFIERS])
def test_as_transformers(ran: dict[str, tuple[Any, Any]], key: str) -> None:
    (values, grads), (ref_values, ref_grads) = ran[key]
    assert values.shape == ref_values.shape
    assert (values - ref_values).abs().max() <= 1e-5 * ref_values.abs().max()
    assert set(grads) == set(ref_grads)
    norm = torch.stack([g.double().norm() for g in ref_grads.values()]).norm().item()
    for key, ref in ref_grads.items():
        error = (grads[key].double() - ref.double()).norm().item()
        assert error <= 1e-5 * max(ref.double().norm().item(), 1e-2 * norm), f"{key}: {error / norm:.2e} of the norm"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A token classifier: three labels and a bias."""
    at = tmp_path_factory.mktemp("classifiers")

    def of(name: str) -> Path:
        there = (at / name).is_dir()
        return at / name if there else tiny.classifier(at / name, name, "Token", num_labels=3, id2label=SPEECH)

    return of


MESHES = [("qwen3", dict(fsdp=2)), ("qwen3", dict(tp=2)), ("qwen3", TWO), ("qwen3", dict(replicate=2))]


@pytest.mark.parametrize(("name", "mesh"), parts.every(5, [*MESHES, ("qwen3_moe", dict(tp=2, ep=2))], 4), ids=str)
def test_on_meshes(source: Callable[[str], Path], name: str, mesh: dict[str, int]) -> None:
    """Every oracle in float64: gradients of head and bias among them, each label weighted otherwise."""
    assert trials.findings(trials.trial(source(name), mesh, "value")) == []


def export(at: Path, mesh: dict[str, int], out: Path, head: str) -> list[int]:
    model = mw.load(at, trials.mesh_of(mesh), head=head)
    mw.export(model, out)
    return list(mw.logits(model, tiny.batches(0)[0]).shape) if head == "value" else []


def bytes_of(at: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in at.iterdir()}


@pytest.mark.parametrize("mesh", [TWO, *([dict()] if parts.ALL else [])], ids=trials.named)
def test_export_is_the_source(tmp_path: Path, source: Callable[[str], Path], mesh: dict[str, int]) -> None:
    acts = {head: functools.partial(export, source("qwen3"), mesh, tmp_path / head, head) for head in ("value", "none")}
    for head, shapes in worlds.in_turn(trials.world_of(mesh), acts).items():
        assert shapes == [[tiny.LENGTH, 3] if head == "value" else []] * len(shapes)
        assert bytes_of(tmp_path / head) == bytes_of(source("qwen3"))


VISION = dict(depth=1, hidden_size=16, num_heads=2, intermediate_size=16, out_hidden_size=36, patch_size=4)


def test_labels_of_a_classifier_with_a_tower_stand_at_the_top(tmp_path: Path) -> None:
    text = {k: v for k, v in tiny.ODD["qwen3_5"].items() if k != "model_type"}
    config = transformers.Qwen3_5Config(text_config=text, vision_config=VISION, num_labels=3)
    transformers.Qwen3_5ForTokenClassification(config).save_pretrained(tmp_path / "m")
    assert worlds.run(2, export, tmp_path / "m", dict(tp=2), tmp_path / "out", "value") == [[tiny.LENGTH, 3]] * 2
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "m")


def train_and_export(at: Path, mesh: dict[str, int], out: Path) -> Tensor:
    model = mw.load(at, trials.mesh_of(mesh), head="value", dtype=torch.float32)
    loss = lambda s, f: s["values"].square().sum(1)  # noqa: E731
    mw.Engine(model, lr=1e-2, loss=loss).step([mw.pack(DOCUMENTS, length=58)])
    mw.export(model, out)
    return mw.logits(model, mw.pack([DOCUMENTS[3]]))


def test_transformers_loads_what_was_trained(tmp_path: Path, source: Callable[[str], Path]) -> None:
    values = worlds.run(2, train_and_export, source("qwen3"), dict(tp=2), tmp_path / "out")[0]
    load = transformers.AutoModelForTokenClassification.from_pretrained
    model, info = load(tmp_path / "out", dtype=torch.float32, output_loading_info=True)
    assert type(model) is transformers.Qwen3ForTokenClassification
    assert not any(info.values()), info
    before = load_file(source("qwen3") / "model.safetensors")
    assert (model.score.bias != before["score.bias"]).all()
    with torch.no_grad():
        expected = model.eval()(torch.tensor([DOCUMENTS[3]])).logits[0]
    assert (values - expected).abs().max() <= 1e-5 * expected.abs().max()


def changed(at: Path, config: dict[str, Any], **tensors: Tensor | None) -> Path:
    """Fields and tensors (named without dots) replaced; None removes one."""
    old = json.loads((at / "config.json").read_text())
    (at / "config.json").write_text(json.dumps({**old, **config}, indent=2) + "\n")
    result = load_file(at / "model.safetensors")
    result |= {k.replace("_", ".", 1): t for k, t in tensors.items() if t is not None}
    kept = {k: t for k, t in result.items() if tensors.get(k.replace(".", "_", 1), t) is not None}
    save_file(kept, at / "model.safetensors", metadata={"format": "pt"})
    return at


def fresh(at: Path, out: Path) -> tuple[list[int], dict[str, Tensor]]:
    return export(at, {}, out, "value"), load_file(out / "model.safetensors")


NEW: list[tuple[dict[str, Any], int]] = [({}, 1), (dict(id2label=SPEECH), 3), (dict(num_labels=2), 2)]


def test_a_new_head(tmp_path: Path) -> None:
    """A critic's one label, unless config.json says otherwise; it can be loaded again."""
    first, again = dict[int, Any](), dict[int, Any]()
    for fields, num in NEW:
        at = tmp_path / str(num)
        base = changed(tiny.directory(at / "m", "qwen3"), fields)
        first[num] = functools.partial(fresh, base, at / "out")
        again[num] = functools.partial(export, at / "out", dict(fsdp=2), at / "again", "value")
    made, reloaded = worlds.in_turn(1, first), worlds.in_turn(2, again)
    for num, [(shape, tensors)] in made.items():
        assert shape == ([tiny.LENGTH] if num == 1 else [tiny.LENGTH, num])
        assert {k: list(t.shape) for k, t in tensors.items() if "score" in k} == {"score.weight": [num, 36]}
        assert reloaded[num][0] == shape
        assert bytes_of(tmp_path / str(num) / "again") == bytes_of(tmp_path / str(num) / "out")
        load = transformers.AutoModelForSequenceClassification.from_pretrained
        model, info = load(tmp_path / str(num) / "out", output_loading_info=True)
        assert model.num_labels == num
        assert not info["missing_keys"]
        assert not info["mismatched_keys"]


def test_a_critic_with_a_bias_and_the_config_of_its_language_model(tmp_path: Path) -> None:
    at = changed(
        tiny.directory(tmp_path / "m", "qwen3"), {}, score_weight=torch.zeros(1, 36), score_bias=torch.tensor([2.5])
    )
    values = worlds.run(1, lambda: mw.logits(mw.load(at, head="value"), tiny.batches(0)[0]))[0]
    assert torch.equal(values, torch.full((tiny.LENGTH,), 2.5))


def initialised(at: Path) -> dict[str, Tensor]:
    return mw.gather(mw.init(at, mw.Mesh(fsdp=2), head="value"))


def test_init_has_the_bias_of_a_token_classifier(source: Callable[[str], Path]) -> None:
    made = worlds.run(2, initialised, source("qwen3"))[0]
    assert torch.equal(made["score.bias"], torch.zeros(3))
    assert made["score.weight"].shape == (3, 36)


TRUNCATED = torch.zeros(2, 36)
SEQUENCE = dict(architectures=["Qwen3ForSequenceClassification"])
NO_SCORE = words(r"\bno score\.weight\b", r"head\.weight \([23], 36\)", r"\bfetch\b")
REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Tensor | None], str]] = {
    "a label too few": ("value", {}, dict(score_weight=TRUNCATED),
        words(r"model\.safetensors", r"score\.weight.*\(2, 36\)", r"head\.weight.*\(3, 36\).*label=3, embed=36")),
    "bias of other labels": ("value", {}, dict(score_bias=torch.zeros(2)),
        words(r"score\.bias.*\(2,\)", r"head\.bias.*\(3,\).*label=3")),
    "labels not stated: a classifier has two": ("value", dict(id2label=None), {}, r"\(3, 36\).*\(2, 36\)"),
    "labels not stated: a critic has one": ("value", dict(id2label=None, architectures=["Qwen3ForCausalLM"]), {},
        r"\(3, 36\).*\(1, 36\)"),
    "no score of a token classifier": ("value", {}, dict(score_weight=None), NO_SCORE),
    "no score of a sequence classifier": ("value", SEQUENCE, dict(score_weight=None, score_bias=None), NO_SCORE),
    "bias alone in a language model": ("value", dict(architectures=["Qwen3ForCausalLM"]), dict(score_weight=None),
        NO_SCORE),
    "no bias of a token classifier": ("value", {}, dict(score_bias=None),
        words(r"\bno score\.bias\b", r"head\.bias \(3,\)", r"\bfetch\b")),
    "labels in words": ("value", dict(id2label=None, num_labels="3"), {}, words("num_labels='3'", r"\bint\b")),
    "labels in a list": ("value", dict(id2label=["a", "b", "c"]), {}, r"id2label=\['a', 'b', 'c'\]"),
    "no labels": ("value", dict(id2label={}, num_labels=0), {}, words(r"num_labels=0\b", r"at least 1\b")),
    "language model of a classifier": ("lm", {}, {}, words(r"score\.weight", "language model", 'head="value"')),
    "another key": ("none", {}, {"score_0.weight": TRUNCATED}, words(r"score\.0\.weight", r"\bno parameter")),
}  # fmt: skip


@pytest.mark.parametrize(("head", "config", "tensors", "pattern"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(
    tmp_path: Path,
    source: Callable[[str], Path],
    head: str,
    config: dict[str, Any],
    tensors: dict[str, Tensor | None],
    pattern: str,
) -> None:
    (tmp_path / "m").mkdir()
    for path in source("qwen3").iterdir():
        (tmp_path / "m" / path.name).write_bytes(path.read_bytes())
    changed(tmp_path / "m", config, **tensors)
    with pytest.raises((mw.LoadError, mw.ConfigError), match=pattern):
        mw.load(tmp_path / "m", head=head)


def mistaken(at: Path, loss: Any) -> str:
    engine = mw.Engine(mw.load(at, head="value"), lr=1.0, loss=loss)
    with pytest.raises(mw.DataError) as caught:
        engine.backward(tiny.batches(0, target=True))
    return str(caught.value)


MISTAKES: dict[str, tuple[Any, str]] = {
    "squared_error": (mw.losses.squared_error, words("squared_error", r"\b3\b", "Engine", r"\bloss\b")),
    "a term a label": (lambda scores, _: scores["values"],
        words(r"\bloss\b", rf"\({tiny.LENGTH}, 3\).*\({tiny.LENGTH},\)")),
}  # fmt: skip


def test_losses_of_several_labels(source: Callable[[str], Path]) -> None:
    acts = {name: functools.partial(mistaken, source("qwen3"), loss) for name, (loss, _) in MISTAKES.items()}
    for name, [text] in worlds.in_turn(1, acts).items():
        assert re.search(MISTAKES[name][1], text), text
