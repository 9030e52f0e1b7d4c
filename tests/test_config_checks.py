"""Contradictions between fields of a run file: exactly the named fields are refused, at and beside each limit."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.train.config import Config, named
from meshwright.train.config_checks import contradictions, num_steps, place_of, sources_in


def config(**sections: Any) -> Config:
    """Return a config whose fields are not checked against each other."""
    return Config.model_validate({"model": "m", "out": "o", "data": [{"path": "x"}], **sections})


def sources(*changes: dict[str, Any]) -> dict[str, Any]:
    return {"data": [{"path": f"{number}.jsonl", **each} for number, each in enumerate(changes)]}


def held_out(*changes: dict[str, Any]) -> dict[str, Any]:
    return {"eval": {"sets": [{"path": "y", "name": f"set {n}", **each} for n, each in enumerate(changes)]}}


def streams(size: int, length: int = 12, **mesh: int) -> dict[str, Any]:
    return {"mesh": mesh, "train": {"length": length, "tokens_per_step": size}}


STEPS = {"train": {"steps": 7}}
EMBEDDING = {"objective": "embedding"}
RERANK = {"objective": "rerank"}
DPO = {"objective": "dpo"}
MUON = {"kind": "muon"}

# The sections of a config, and the fields that are refused.
CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "one end": ({"train": {"tokens": "3M"}}, []),
    "steps and tokens": ({"train": {"steps": 7, "tokens": "3M"}}, ["train.tokens"]),
    "epochs and tokens": ({"train": {"epochs": 2.0, "tokens": "3M"}}, ["train.tokens"]),
    "three ends": ({"train": {"steps": 7, "epochs": 2.0, "tokens": "3M"}}, ["train.epochs"]),
    "the most steps": ({"train": {"steps": 10**9}}, []),
    "one step more": ({"train": {"steps": 10**9 + 1}}, ["train.steps"]),
    "whole micro-batches": (streams(72, fsdp=2, replicate=3), []),
    "half a micro-batch": (streams(36, fsdp=2), ["train.tokens_per_step"]),
    "replicas have data of their own": (streams(36, replicate=2), ["train.tokens_per_step"]),
    "tp and pp share their data": (streams(12, tp=2, pp=2), []),
    "cp shares its data": (streams(12, cp=3), []),
    "a length over cp": (streams(10, 10, cp=3), ["train.length"]),
    "a length over tp": (streams(10, 10, tp=4), ["train.length"]),
    "a length over cp x tp": (streams(6, 6, cp=2, tp=2), ["train.length"]),
    "stages": ({"mesh": {"pp": 2}, "pipeline": {"stages": 2}}, []),
    "no stages": ({"mesh": {"tp": 2}, "pipeline": {"stages": 2}}, ["pipeline"]),
    "ep over fsdp": ({"mesh": {"fsdp": 4, "ep": 2}}, []),
    "ep over replicas": ({"mesh": {"replicate": 4, "ep": 2}}, ["mesh.ep"]),
    "shares of all": ({**sources({"share": 0.25}, {"share": 0.75}), **STEPS}, []),
    "thirds": ({**sources(*[{"share": 0.332}] * 3), **STEPS}, []),
    "shares of too little": ({**sources({"share": 0.25}, {"share": 0.74}), **STEPS}, ["data[0].share"]),
    "shares of too much": ({**sources({"share": 0.26}, {"share": 0.75}), **STEPS}, ["data[0].share"]),
    "a share of the second alone": ({**sources({}, {"share": 1.0}), **STEPS}, ["data[0].share"]),
    "shares without an end": (sources({"share": 0.5}, {"share": 0.5}), ["data[0].share"]),
    "shares and tokens": ({**sources({"share": 0.5}, {"share": 0.5}), "train": {"tokens": "3M"}}, []),
    "shares and epochs": ({**sources({"share": 1.0}), "train": {"epochs": 2.0}}, ["data[0].share"]),
    "a small weight beside a share": (
        {**sources({"share": 0.5}, {"share": 0.5, "weight": 0.5}), **STEPS}, ["data[1].weight"],
    ),
    "an empty path": (sources({}, {"path": ""}), ["data[1].path"]),
    "no paths": (sources({"path": []}), ["data[0].path"]),
    "no paths held out": ({"eval": {"path": []}}, ["eval.path", "eval.path"]),
    "an empty path held out": (held_out({}, {"path": ""}), ["eval.sets[1].path"]),
    "options of chats": (
        sources({"kind": "text", "thinking": False, "turns": "last", "template": "t", "template_args": {"a": 1}}),
        ["data[0].thinking", "data[0].turns", "data[0].template", "data[0].template_args"],
    ),
    "options of chats for ids": (sources({}, {"kind": "tokens", "turns": "last"}), ["data[1].turns"]),
    "options of chats held out": ({"eval": {"path": "y", "kind": "text", "turns": "last"}}, ["eval.turns"]),
    "options of chats in a set": (held_out({}, {"kind": "text", "template": "t"}), ["eval.sets[1].template"]),
    "units of texts": (sources({"kind": "text", "split": "line"}), []),
    "units of ids": (sources({"kind": "tokens", "split": "line"}), ["data[0].split"]),
    "the same name later": (sources({"name": "a"}, {"name": "b"}, {"name": "a"}), ["data[2].name"]),
    "sources without names": (sources({}, {}), []),
    "the same set": (held_out({"name": "a"}, {"name": "b"}, {"name": "a"}), ["eval.sets[2].name"]),
    "a set without a name": (held_out({}, {"name": ""}), ["eval.sets[1].name"]),
    "a set named like a source": ({**sources({"name": "set 0"}), **held_out({})}, []),
    "decay of a linear rate": ({"optim": {"schedule": "linear", "decay": 0.5}}, ["optim.decay"]),
    "a final rate of a constant one": ({"optim": {"schedule": "constant", "final": 0.5}}, ["optim.final"]),
    "the default as a final rate": ({"optim": {"schedule": "constant", "final": 0.0}}, []),
    "a final rate": ({"optim": {"schedule": "linear", "final": 0.5}}, []),
    "decay": ({"optim": {"schedule": "wsd", "decay": 0.5, "final": 0.1}}, []),
    "path and sets": ({"eval": {"path": "y", "sets": [{"path": "z", "name": "a"}]}}, ["eval.sets"]),
    "best of nothing": ({"eval": {"best": True}}, ["eval.path"]),
    "no patience": ({"eval": {"every": 5}, "train": {"early_stopping": 2}}, ["eval.path", "train.early_stopping"]),
    "patience of sets": ({**held_out({}), "train": {"early_stopping": 2}}, []),
    "patience of a path": ({"eval": {"path": "y"}, "train": {"early_stopping": 2}}, []),
    "an empty prompt": ({"sample": {"prompts": ["a", ""]}}, ["sample.prompts"]),
    "a trace up to the end": ({"log": {"profile": 5}, **STEPS}, []),
    "a trace past the end": ({"log": {"profile": 6}, **STEPS}, ["log.profile"]),
    "a trace of epochs": ({"log": {"profile": 6}, "train": {"epochs": 1.0}}, []),
    "a trace of tokens": ({"log": {"profile": 2}, "train": {"tokens": "600K"}}, ["log.profile"]),
    "a multiple is kept": ({"save": {"every": 150, "keep_every": 450}}, []),
    "less than every": ({"save": {"every": 150, "keep_every": 75}}, ["save.keep_every"]),
    "all are kept": ({"save": {"keep": "all", "every": 150, "keep_every": 450}}, ["save.keep_every"]),
    "merged without adapters": ({"save": {"merged": True}}, ["save.merged"]),
    "merged adapters": ({"save": {"merged": True}, "lora": {}}, []),
    "merged into nothing": ({"save": {"merged": True, "export": False}, "lora": {}}, ["save.merged"]),
    "a shrinking mesh": ({"launch": {"fewer": True}}, ["launch.fewer"]),
    "a mesh that shrinks once": ({"launch": {"fewer": True, "max_restarts": 1}}, []),
    "8 bits for Muon": ({"optim": {**MUON, "state_dtype": "uint8"}}, ["optim.state_dtype"]),
    "8 bits": ({"optim": {"state_dtype": "uint8", "betas": [0.9, 0.999]}}, []),
    "options of Muon": (
        {"optim": {"momentum": 0.9, "by_head": True, "exclude": [], "matrix_dtype": "float32"}},
        ["optim.momentum", "optim.by_head", "optim.exclude", "optim.matrix_dtype"],
    ),
    "options for Muon": (
        {"optim": {**MUON, "momentum": 0.99, "by_head": True, "exclude": [], "matrix_dtype": "float32"}}, [],
    ),
    "a limit of momentum": ({"optim": {**MUON, "state_dtype": "bfloat16", "momentum": 0.98}}, []),
    "a large momentum": ({"optim": {**MUON, "state_dtype": "bfloat16", "momentum": 0.99}}, ["optim.state_dtype"]),
    "a limit of betas": ({"optim": {"state_dtype": "bfloat16", "betas": [0.98, 0.98]}}, []),
    "a large first beta": ({"optim": {"state_dtype": "bfloat16", "betas": [0.99, 0.9]}}, ["optim.state_dtype"]),
    "betas of Muon": ({"optim": {**MUON, "state_dtype": "bfloat16", "betas": [0.9, 0.99]}}, ["optim.state_dtype"]),
    "options of another objective": ({**DPO, "reward": {}}, ["reward"]),
    "a teacher for nothing": ({"distill": {"teacher": "t"}}, ["distill"]),
    "pairs that are cut": ({**DPO, **sources({}, {"too_long": "cut"})}, ["data[1].too_long"]),
    "pairs that are dropped": ({**DPO, **sources({"too_long": "drop"})}, []),
    "pairs of lines": ({**DPO, **sources({"kind": "text", "split": "line"})}, ["data[0].split"]),
    "pairs held out": ({**DPO, **held_out({}, {"kind": "tokens"})}, ["eval.sets[1].kind"]),
    "pairs of last turns": ({**DPO, "eval": {"path": "y", "turns": "last"}}, ["eval.turns"]),
    "texts of a distillation": (
        {"objective": "distill", "distill": {"teacher": "t"}, **sources({"kind": "text", "too_long": "cut"})}, [],
    ),
    "an MTP head for pairs": ({**DPO, "train": {"mtp": "head"}}, ["train.mtp"]),
    "samples of pairs": ({**DPO, "sample": {"prompts": ["a"]}}, []),
    "samples of vectors": ({**EMBEDDING, "sample": {"prompts": ["a"]}}, ["sample.prompts"]),
    "a template of an embedding": ({**EMBEDDING, **sources({"template": "t"})}, ["data[0].template"]),
    "thinking of an embedding": ({**EMBEDDING, **sources({"thinking": True})}, ["data[0].thinking"]),
    "texts of an embedding": ({**EMBEDDING, **sources({"kind": "text"})}, []),
    "thinking of a reranker": ({**RERANK, **held_out({"thinking": True})}, ["eval.sets[0].thinking"]),
    "a template of a reranker": ({**RERANK, **sources({"template": "t"})}, []),
    "texts of a reranker": ({**RERANK, **sources({"kind": "text"})}, ["data[0].kind"]),
    "no teacher": ({"objective": "distill"}, ["distill.teacher"]),
    "scores of a teacher": ({"objective": "distill", "distill": {"scores": "s"}}, []),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_exactly_the_contradicting_fields_are_refused(case: str) -> None:
    sections, places = CASES[case]
    actual = [named(place) for place, _ in contradictions(config(**sections))]
    assert actual == places


@pytest.mark.parametrize(
    ("sections", "advice"),
    [
        (streams(12, fsdp=2), "take tokens_per_step = 24 or 48"), (streams(60, fsdp=2), "tokens_per_step = 48 or 72"),
        (streams(36, replicate=2), "or replicate x fsdp of 1, 3"), (streams(2, 2, cp=3), "= 3 ranks; take 3 or 6"),
        (streams(10, 10, tp=4), "tp = 4 ranks; take 8 or 12, and a multiple of it as tokens_per_step"),
        ({"log": {"profile": 6}, **STEPS}, "take at most 5"), ({"log": {"profile": 1}, "train": {"steps": 2}}, "leave"),
        ({"save": {"every": 150, "keep_every": 75}}, "take 150"),
        ({"save": {"every": 150, "keep_every": 451}}, "take 600"),
        (sources({"share": 0.5}, {"share": 0.25}), "add up to 0.75"),
    ],
)  # fmt: skip
def test_the_advised_value_can_be_taken(sections: dict[str, Any], advice: str) -> None:
    [sentence, *_] = [why for _, why in contradictions(config(**sections))]
    assert advice in sentence


def test_the_number_of_steps_rounds_tokens_up() -> None:
    size = {"length": 100, "tokens_per_step": 300}
    ends = [{"tokens": 301}, {"tokens": 300}, {"tokens": "0.9K"}, {"steps": 5}, {"epochs": 2.0}, {"tokens": "x"}]
    assert [num_steps(config(train={**size, **end})) for end in ends] == [2, 1, 3, 5, None, None]


def test_sources_are_those_of_training_and_both_kinds_of_held_out_sets() -> None:
    made = config(**sources({}, {}), **held_out({}, {}))
    assert [place for place, _ in sources_in(made)] == [
        ("data", 0), ("data", 1), ("eval",), ("eval", "sets", 0), ("eval", "sets", 1),
    ]  # fmt: skip
    assert [source.path for _, source in sources_in(made)] == ["0.jsonl", "1.jsonl", "", "y", "y"]


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("tp=3 does not divide", ("mesh", "tp")), ("attention=3 is", ("context", "attention")),
        ("stages=3 is", ("pipeline", "stages")), ("recompute='x' is", ("train", "recompute")),
        ("labels=() are", ("classify", "labels")), ("lr=3 is", ("optim", "lr")), ("nothing=3 is", ("model",)),
        ("does tp=3 divide", ("model",)),
    ],
)  # fmt: skip
def test_a_message_about_an_option_leads_to_its_section(text: str, place: tuple[str, ...]) -> None:
    made = config(objective="classify", classify={"labels": ["a", "b"]})
    assert place_of(text, made, ("model",)) == place
    if place[0] == "classify":
        assert place_of(text, config(), ("model",)) == ("model",)
