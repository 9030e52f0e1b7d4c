"""The export of a critic made from a language model names its class, and holds no stale head."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import meshwright as mw
from tests import parts, tiny, worlds
from tests.test_value_heads import DOCUMENTS, VISION, bytes_of

LAST = [sum(map(len, DOCUMENTS[: at + 1])) - 1 for at in range(len(DOCUMENTS))]
CLASSES = {
    "qwen2": "Qwen2ForSequenceClassification",  # tied
    "qwen3": "Qwen3ForSequenceClassification",
    "qwen3_moe": "Qwen3MoeForSequenceClassification",
    "qwen3_5": "Qwen3_5TextForSequenceClassification",
    "with a tower": "Qwen3_5ForSequenceClassification",
}


def language_model(at: Path, name: str) -> Path:
    if name != "with a tower":
        return tiny.directory(at, name)
    text = {k: v for k, v in tiny.ODD["qwen3_5"].items() if k != "model_type"}
    config = transformers.Qwen3_5Config(text_config=text, vision_config=VISION)
    transformers.Qwen3_5ForConditionalGeneration(config).save_pretrained(at)
    return at


def trained(source: Path, out: Path, **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the values at the last token of each document, and the weights."""
    model = mw.load(source, mw.Mesh(fsdp=2), head="value", dtype=torch.float32)
    batch = mw.pack(DOCUMENTS, fields={"target": [[1.0] * len(d) for d in DOCUMENTS]})
    mw.Engine(model, lr=1e-2, loss=mw.losses.squared_error).step([batch])
    mw.check_export(model, out, **options)
    mw.export(model, out, **options)
    again = mw.load(out, mw.Mesh(fsdp=2), head="value", dtype=torch.float32)
    assert all(torch.equal(tensor, again.stored()[name]) for name, tensor in model.stored().items())
    mw.export(again, out.with_name("again"))
    return mw.logits(again, batch)[LAST], mw.gather(again)


def in_two_files(source: Path) -> Path:
    """Let the last file hold the head and nothing else."""
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    names = {key: f"model-0000{1 + (key == 'lm_head.weight')}-of-00002.safetensors" for key in tensors}
    for file in set(names.values()):
        save_file({k: t for k, t in tensors.items() if names[k] == file}, source / file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": names}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    return source


NAMED = parts.every(2, CLASSES)
# Exports in files of two, of a family without such a class, of a tied head that is stored twice, with the head kept.
OTHERS = ("qwen3 in two files", "qwen3_5_moe", "qwen3_tied", "qwen3, kept")


def source_of(at: Path, name: str) -> Path:
    if name == "qwen3_tied":
        return tiny.directory(at, name, layout="twice")
    source = language_model(at, name.partition(",")[0].partition(" in ")[0])
    return in_two_files(source) if name.endswith("files") else source


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, tuple[Tensor, dict[str, Tensor]]]]:
    """A folder for each name with a source and exports of it; and what `trained` returns."""
    root = tmp_path_factory.mktemp("critics")
    cases = {}
    for name in (*NAMED, *OTHERS):
        options = dict(keep_lm_head=True) if name.endswith("kept") else {}
        cases[name] = partial(trained, source_of(root / name / "m", name), root / name / "out", **options)
    return root, {name: answers[0] for name, answers in worlds.in_turn(2, cases).items()}


@pytest.mark.parametrize("name", NAMED)
def test_transformers_loads_it_as_what_it_is(exported: Any, name: str) -> None:
    out, (values, weights) = exported[0] / name / "out", exported[1][name]
    assert json.loads((out / "config.json").read_text())["architectures"] == [CLASSES[name]]
    assert bytes_of(out) == bytes_of(out.with_name("again"))
    load = transformers.AutoModelForSequenceClassification.from_pretrained
    model, info = load(out, dtype=torch.float32, output_loading_info=True)
    assert type(model).__name__ == CLASSES[name]
    assert not any(info.values()), info
    with torch.no_grad():
        reference = torch.cat([model.eval()(torch.tensor([d])).logits[0] for d in DOCUMENTS])
    assert (values - reference).abs().max() <= 1e-5 * reference.abs().max()
    assert "lm_head.weight" not in weights


def test_it_is_no_whole_language_model(exported: Any) -> None:
    out = exported[0] / "qwen3 in two files" / "out"
    _, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert info["missing_keys"] == {"lm_head.weight"}
    assert info["unexpected_keys"] == {"score.weight"}


def test_the_head_stays_if_requested(exported: Any) -> None:
    at = exported[0] / "qwen3, kept"
    before, after = (load_file(at / each / "model.safetensors") for each in ("m", "out"))
    assert torch.equal(before["lm_head.weight"], after["lm_head.weight"])
    assert bytes_of(at / "out") == bytes_of(at / "again")  # a source that holds both is kept


def test_a_family_without_such_a_class_names_none(exported: Any) -> None:
    at = exported[0] / "qwen3_5_moe"
    assert not hasattr(transformers, "Qwen3_5MoeTextForSequenceClassification")
    assert not hasattr(transformers, "Qwen3_5MoeForSequenceClassification")
    before, after = (json.loads((at / each / "config.json").read_text()) for each in ("m", "out"))
    assert after == {**{k: v for k, v in before.items() if k != "architectures"}, "num_labels": 1}
    assert "lm_head.weight" not in load_file(at / "out" / "model.safetensors")


def test_index_and_files_follow(exported: Any) -> None:
    at = exported[0] / "qwen3 in two files"
    tensors = json.loads((at / "m" / "model.safetensors.index.json").read_text())["weight_map"]
    result = json.loads((at / "out" / "model.safetensors.index.json").read_text())
    [file] = set(result["weight_map"].values())
    held = load_file(at / "out" / file)
    assert {p.name for p in (at / "out").glob("*.safetensors")} == {file}
    assert set(held) == set(result["weight_map"]) == {*tensors, "score.weight"} - {"lm_head.weight"}
    assert result["metadata"]["total_size"] == sum(t.nbytes for t in held.values())


def test_a_tied_head_that_is_stored_twice_is_left_out_too(exported: Any) -> None:
    assert "lm_head.weight" not in exported[1]["qwen3_tied"][1]
    load = transformers.AutoModelForSequenceClassification.from_pretrained
    _, info = load(exported[0] / "qwen3_tied" / "out", output_loading_info=True)
    assert not any(info.values()), info


def in_bfloat16(source: Path, out: Path) -> None:
    mw.export(mw.load(source, head="value"), out, dtype=torch.bfloat16)


def test_in_another_dtype(tmp_path: Path) -> None:
    worlds.run(1, in_bfloat16, language_model(tmp_path / "m", "with a tower"), tmp_path / "out")
    held, config = (
        load_file(tmp_path / "out" / "model.safetensors"),
        json.loads((tmp_path / "out/config.json").read_text()),
    )
    assert "lm_head.weight" not in held
    assert held["score.weight"].dtype == torch.bfloat16
    assert (config["architectures"], config["dtype"]) == (["Qwen3_5ForSequenceClassification"], "bfloat16")
