"""Options, meshes, objectives and configs of frameworks that are refused; near values pass."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.axes import Axes
from meshwright.blueprint import Blueprint
from meshwright.engine.loss_documents import LossDocuments
from meshwright.engine.validation import (
    check_batches,
    check_candidate_ids,
    check_num_top,
    check_prompts,
    check_temperature,
    check_top_p,
    lr_of_step,
    norm_bound,
)
from meshwright.errors import ConfigError, DataError, LayoutError, MeshError, StateError
from meshwright.integrations import areal_options, options, verl_options
from meshwright.mesh import Mesh
from meshwright.mesh.joining import device_of
from meshwright.objectives.checks import check_number
from meshwright.objectives.distillation import Distill
from meshwright.objectives.embedding import Embedding
from meshwright.objectives.pairs import REFERENCE, Dpo, Reward, halves
from meshwright.objectives.rerank import Rerank
from meshwright.plan.html import check_page, write_page
from meshwright.plan.mesh_checks import check_devices
from meshwright.recipe import ContextParallel, Lora, MemoryOptions, Pipeline, Recipe
from tests import areal_cases, fake_areal, fake_verl, tiny, verl_cases
from tests.refusals import Refusal

INF, NAN = float("inf"), float("nan")


def keywords(make: Callable[..., Any]) -> Callable[[dict[str, Any]], Any]:
    return lambda arguments: make(**arguments)


def field(make: Callable[..., Any], name: str) -> Callable[[Any], Any]:
    return lambda value: make(**{name: value})


memory, pipeline, recipe, lora = map(keywords, (MemoryOptions, Pipeline, Recipe, Lora))
schedule = lambda fields: Recipe(**fields).check_schedule()  # noqa: E731 - short
OPTIONS: dict[str, Refusal] = {
    "token_once=0": Refusal(memory, dict(token_once=0), ConfigError, "token_once=0",
        (dict(token_once=1), dict(token_once=False), dict(token_once=True))),
    "token_once='2'": Refusal(memory, dict(token_once="2"), ConfigError, "token_once='2'", (dict(token_once=2),)),
    "compiled=1": Refusal(memory, dict(compiled=1), ConfigError, "compiled=1 & True, False or None",
        (dict(compiled=True), dict(compiled=False), dict(compiled=None))),
    "compiled='yes'": Refusal(memory, dict(compiled="yes"), ConfigError, "compiled='yes'"),
    "recompute": Refusal(memory, dict(recompute="some"), ConfigError, "recompute='some' & selective",
        (dict(recompute="full"), dict(recompute="none"))),
    "offload, gather_once": Refusal(memory, dict(offload=True, gather_once=True), ConfigError, "gather_once=True",
        (dict(offload=True), dict(gather_once=True))),
    "offload, sum_once": Refusal(memory, dict(offload=True, sum_once=True), ConfigError, "offload & sum_once=True",
        (dict(sum_once=True), dict(sum_once=True, gather_once=True))),
    "sum_once, narrow_grads": Refusal(memory, dict(sum_once=True, narrow_grads=True), ConfigError,
        "sum_once=True & narrow_grads=True", (dict(narrow_grads=True), dict(narrow_grads=True, gather_once=True))),
    "compiled, selective": Refusal(memory, dict(compiled=True, recompute="selective"), ConfigError, "selective & fuses",
        (dict(compiled=True, recompute="full"), dict(compiled=False, recompute="selective"),
         dict(recompute="selective"))),
    "schedule": Refusal(pipeline, dict(schedule="gpipe"), ConfigError, "schedule='gpipe' & zero-bubble",
        (dict(schedule="1f1b"), dict(schedule="v"))),
    "schedule=['v']": Refusal(pipeline, dict(schedule=["v"]), ConfigError, r"schedule=\['v'\] is unknown"),
    "stages=0": Refusal(pipeline, dict(stages=0), ConfigError, "stages=0 & 1 or more", (dict(stages=1),)),
    "stages=True": Refusal(pipeline, dict(stages=True), ConfigError, "stages=True", (dict(stages=2),)),
    "hold=1": Refusal(pipeline, dict(hold=1), ConfigError, "hold=1 & True, False or None",
        (dict(hold=True), dict(hold=False), dict(hold=None))),
    "hold='no'": Refusal(pipeline, dict(hold="no"), ConfigError, "hold='no'"),
    "ends=2": Refusal(pipeline, dict(ends=2), ConfigError, "ends=2 & layer counts", (dict(ends=[2]), dict(ends=None))),
    "ends=[True]": Refusal(pipeline, dict(ends=[True]), ConfigError, r"ends=\[True\]", (dict(ends=(1, 2)),)),
    "attention=0": Refusal(keywords(ContextParallel), dict(attention=0), LayoutError, "attention=0 & 1 or more",
        (dict(attention=1), dict(attention=None))),
    "lora.rank=0": Refusal(lora, dict(rank=0), ConfigError, "lora.rank=0", (dict(rank=1),)),
    "lora.rank=None": Refusal(lora, dict(rank=None), ConfigError, "lora.rank=None"),
    "lora.rank=True": Refusal(lora, dict(rank=True), ConfigError, "lora.rank=True"),
    "lora.expert_rank=0": Refusal(lora, dict(expert_rank=0), ConfigError, "lora.expert_rank=0",
        (dict(expert_rank=1), dict(expert_rank=None))),
    "lora.alpha=0": Refusal(lora, dict(alpha=0), ConfigError, "lora.alpha=0 must be a number above 0$",
        (dict(alpha=1), dict(alpha=0.1))),
    "lora.alpha=inf": Refusal(lora, dict(alpha=INF), ConfigError, "lora.alpha=inf"),
    "lora.b_std=-1": Refusal(lora, dict(b_std=-1), ConfigError, "lora.b_std=-1 & above 0, or 0",
        (dict(b_std=0), dict(b_std=0.1))),
    "lora.b_std=True": Refusal(lora, dict(b_std=True), ConfigError, "lora.b_std=True"),
    "lora.dropout": Refusal(lora, dict(dropout=0.1), ConfigError, "lora.dropout=0.1 is not supported",
        (dict(dropout=0), dict(dropout=0.0))),
    "lora.targets": Refusal(lora, dict(targets=[]), ConfigError, "lora.targets is empty & all-linear",
        (dict(targets=["q_proj"]), dict(targets="q_proj"))),
    "memory": Refusal(recipe, dict(memory=dict(offload=True)), ConfigError, r"memory=\{ & mw.MemoryOptions\(recompute",
        (dict(memory=MemoryOptions()),)),
    "pipeline": Refusal(recipe, dict(pipeline=None), ConfigError, r"pipeline=None & mw.Pipeline\(stages=2\)",
        (dict(pipeline=Pipeline()),)),
    "context": Refusal(recipe, dict(context=2), ConfigError, r"context=2 & mw.ContextParallel\(attention=1\)"),
    "lora=16": Refusal(recipe, dict(lora=16), ConfigError, "lora=16 & or None$", (dict(lora=Lora()), dict(lora=None))),
    "several adapters": Refusal(recipe, dict(lora=[Lora(), Lora()]), ConfigError, "several adapters & merge"),
    "tower=1": Refusal(recipe, dict(tower=1), ConfigError, "tower=1 & True or False", (dict(tower=True),)),
    "mtp": Refusal(recipe, dict(mtp="both"), ConfigError, "mtp='both' & carried, head, all",
        (dict(mtp="head"), dict(mtp="all"))),
    "mtp_weight=0": Refusal(recipe, dict(mtp_weight=0), ConfigError, "mtp_weight=0 & above 0",
        (dict(mtp_weight=1), dict(mtp_weight=0.01))),
    "mtp_weight=inf": Refusal(recipe, dict(mtp_weight=INF), ConfigError, "mtp_weight=inf"),
    "mtp_weight=nan": Refusal(recipe, dict(mtp_weight=NAN), ConfigError, "mtp_weight=nan"),
    "mtp_weight=True": Refusal(recipe, dict(mtp_weight=True), ConfigError, "mtp_weight=True"),
    "fp8": Refusal(recipe, dict(fp8="tensor"), ConfigError, "fp8='tensor' & fp8='block'", (dict(fp8="block"),)),
    "frozen": Refusal(recipe, dict(frozen="int4"), ConfigError, "frozen='int4' & nf4",
        (dict(frozen="nf4"), dict(frozen="nvfp4"), dict(frozen="mxfp4"))),
    "fp8_skip": Refusal(recipe, dict(fp8_skip="*.q.*"), ConfigError, "skips nothing & fp8='block'",
        (dict(fp8_skip="*.q.*", fp8="block"), dict(fp8_skip=()))),
    "labels='ab'": Refusal(recipe, dict(head="value", labels="ab"), ConfigError, "labels='ab' & a list of names",
        (dict(head="value", labels=["a", "b"]), dict(head="value", labels=()))),
    "labels=['a', '']": Refusal(recipe, dict(head="value", labels=["a", ""]), ConfigError, "a list of names"),
    "one label": Refusal(recipe, dict(head="value", labels=["a"]), ConfigError, "two or more different names"),
    "equal labels": Refusal(recipe, dict(head="value", labels=["a", "a"]), ConfigError, "two or more different names"),
    "labels of an lm": Refusal(recipe, dict(labels=["a", "b"]), ConfigError, "for head='value'"),
    "zero-bubble, compiled": Refusal(schedule,
        dict(pipeline=Pipeline("zero-bubble"), memory=MemoryOptions(compiled=True)), ConfigError,
        "'zero-bubble' splits backward & compiled=False",
        (dict(pipeline=Pipeline("zero-bubble")), dict(memory=MemoryOptions(compiled=True)))),
    "zero-bubble, hold": Refusal(schedule, dict(pipeline=Pipeline("v", hold=False)), ConfigError, "'v' with hold=False",
        (dict(pipeline=Pipeline("v", hold=True)), dict(pipeline=Pipeline("1f1b", hold=False)))),
}  # fmt: skip


@pytest.mark.parametrize("case", OPTIONS)
def test_options_of_a_recipe_are_refused(case: str) -> None:
    OPTIONS[case].check()


axes = Axes(fsdp=2, tp=2)
MESHES: dict[str, Refusal] = {
    "rank -1": Refusal(axes.coords, -1, MeshError, "rank -1 is not one of the 4 ranks of fsdp=2 tp=2", (0,)),
    "rank 4": Refusal(axes.coords, 4, MeshError, "rank 4 is not one of the 4 ranks", (3,)),
    "group of rank 4": Refusal(lambda rank: axes.group(rank, ("tp",)), 4, MeshError, "rank 4", (3,)),
    "axes of two views": Refusal(axes.groups, ("fsdp", "ep"), MeshError, "not axes of one view",
        (("fsdp", "tp"), ("efsdp", "ep"))),
    "no such device": Refusal(lambda device: check_devices(Axes(), device), "warp", ConfigError, "--device 'warp'",
        ("cpu",)),
    "ranks of a CPU": Refusal(lambda num: check_devices(Axes(), "cpu", ranks_per_device=num), 2, ConfigError,
        "--ranks-per-device 2 & --device cuda", (1,)),
}  # fmt: skip


@pytest.mark.parametrize("case", MESHES)
def test_ranks_and_axes_that_no_mesh_has_are_refused(case: str) -> None:
    MESHES[case].check()


BATCH = mw.pack([[5, 6, 7]], length=4)


def candidates_of(*ids: int) -> mw.Batch:
    """Return a batch with one candidate for each token. The last two tokens have no label."""
    return BATCH.with_fields(ids=torch.tensor(ids).view(4, -1))


ARGUMENTS: dict[str, Refusal] = {
    "prompt of 15": Refusal(lambda prompt: check_prompts([[1], prompt], 2, 9, 16), [5] * 15, DataError,
        "prompt 1 has 15 tokens & the 2 after it more than the 16", ([5] * 14, [0], [8])),
    "token 9": Refusal(lambda token: check_prompts([[token]], 1, 9, None), 9, DataError,
        "prompt 0 has a token outside the vocabulary of 9", (8, 0)),
    "token -1": Refusal(lambda token: check_prompts([[token]], 1, 9, None), -1, DataError, "outside the vocabulary"),
    "tokens=0": Refusal(lambda num: check_prompts([[1]], num, 9, None), 0, ConfigError, "tokens=0 & above 0", (1,)),
    "tokens=True": Refusal(lambda num: check_prompts([[1]], num, 9, None), True, ConfigError, "tokens=True"),
    "k=0": Refusal(lambda k: check_num_top(k, 9), 0, ConfigError, "k=0 & from 1 to the 9", (1, 9)),
    "k=10": Refusal(lambda k: check_num_top(k, 9), 10, ConfigError, "k=10"),
    "k=True": Refusal(lambda k: check_num_top(k, 9), True, ConfigError, "k=True"),
    "top_p=0": Refusal(check_top_p, 0, ConfigError, "top_p=0 & above 0, and at most 1", (1, 1.0, 1e-9, None)),
    "top_p=1.01": Refusal(check_top_p, 1.01, ConfigError, "top_p=1.01"),
    "top_p=nan": Refusal(check_top_p, math.nan, ConfigError, "top_p=nan"),
    "temperature=inf": Refusal(check_temperature, math.inf, ConfigError, "temperature=inf", (1, 0.1, 1e3)),
    "temperature of values": Refusal(lambda t: check_temperature(t, ("values",)), 0.5, ConfigError,
        "temperature=0.5 divides logits", (1, 1.0)),
    "candidate 9": Refusal(lambda ids: check_candidate_ids([BATCH.with_fields(ids=BATCH.tokens.view(-1, 1)),
        candidates_of(*ids)], "ids", 9), (1, 9, 1, 1), DataError, "candidate 9 of 'ids' at token 1 & of 9",
        ((1, 8, 0, 0), (0, 0, -1, -1))),
    "candidate -2": Refusal(lambda ids: check_candidate_ids([candidates_of(*ids)], "ids", 9), (1, 1, 1, -2), DataError,
        "candidate -2 of 'ids' at token 3 & -1 is no candidate"),
    "no candidate": Refusal(lambda ids: check_candidate_ids([candidates_of(*ids)], "ids", 9), (1, -1, -1, -1),
        DataError, "token 1 has a label, and no candidate", ((1, 1, -1, -1), (1, -1, -1, 1, -1, -1, -1, -1))),
    "no candidates": Refusal(lambda name: check_candidate_ids([BATCH], name, 9), "ids", DataError,
        "no field 'ids'", ("",)),
    "lr": Refusal(lambda lr: lr_of_step(lr, 3), -1e-9, ConfigError, "lr of step 3 is -1e-09",
        (0, 0.0, torch.tensor([0.1]))),
    "lr of two": Refusal(lambda lr: lr_of_step(lr, 3), torch.ones(2), ConfigError, "lr of step 3"),
    "lr=nan": Refusal(lambda lr: lr_of_step(lr, 3), math.nan, ConfigError, "lr of step 3 is nan"),
    "lr=inf": Refusal(lambda lr: lr_of_step(lr, 3), torch.tensor(math.inf), ConfigError, "lr of step 3"),
    "max_norm=0": Refusal(norm_bound, 0, ConfigError, "max_norm=0 & above 0, or None", (1e-9, 2, None)),
    "a batch alone": Refusal(lambda batches: check_batches(batches, 9, 1), BATCH, DataError,
        r"take a list of batches: engine.step\(\[batch\]\)", ([BATCH], (BATCH, BATCH))),
    "a generator": Refusal(lambda batches: check_batches(batches, 9, 1), iter([BATCH]), DataError, "a list of batches"),
    "no batch": Refusal(lambda batches: check_batches(batches, 9, 1), [], DataError, "needs at least one batch"),
    "no batches": Refusal(lambda batches: check_batches(batches, 9, 1), [BATCH, None], DataError,
        "made by mw.pack, not a NoneType"),
    "unequal": Refusal(lambda batches: check_batches(batches, 9, 1), [BATCH, mw.pack([[1, 2]])], DataError,
        r"have \[2, 4\] tokens & length="),
    "label -1": Refusal(lambda label: check_batches([mw.pack([[1, 2]], labels=[[2, label]])], 9, 1), -1, DataError,
        "label -1 at position 1", (-100, 8)),
    "rows of weights": Refusal(lambda weight: check_batches([BATCH.with_fields(weight=weight)], 9, 1),
        torch.ones(4, 1), DataError, r"'weight' has shape \(4, 1\) for 4 tokens", (torch.ones(4),)),
    "max_norm=nan": Refusal(norm_bound, math.nan, ConfigError, "max_norm=nan"),
    "max_norm='1'": Refusal(norm_bound, "1", ConfigError, "max_norm='1'"),
    "max_norm=-1": Refusal(norm_bound, -1.0, ConfigError, "max_norm=-1.0"),
    "lr=None": Refusal(lambda lr: lr_of_step(lr, 0), None, ConfigError, "lr of step 0 & None"),
    "weight inf": Refusal(lambda weight: check_batches([BATCH.with_fields(weight=torch.tensor([1.0, weight, 1, 1]))],
        9, 1), math.inf, DataError, "weight at position 1 is inf", (0.0, -1.0)),
    "length of ranks": Refusal(lambda share: check_batches([BATCH], 9, share), 3, DataError,
        "a batch of 4 tokens & cp\\*tp=3 & length=6", (1, 2, 4)),
    "vocabulary": Refusal(lambda vocab: check_batches([BATCH], vocab, 1), 7, DataError,
        "token 7 at position 2 is outside the vocabulary of 7", (8,)),
}  # fmt: skip


@pytest.mark.parametrize("case", ARGUMENTS)
def test_arguments_of_calls_are_refused(case: str) -> None:
    ARGUMENTS[case].check()


@pytest.mark.parametrize("rank", [1, 2])
def test_a_local_rank_needs_a_device_of_its_own(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    if rank < 2:
        assert device_of("cuda") == torch.device("cuda", rank)
        return
    with pytest.raises(MeshError, match="cuda:2 does not exist: this process sees 2 devices"):
        device_of("cuda")


@pytest.mark.parametrize(("running", "local"), [(4, 2), (4, 3), (4, 4)])
def test_ranks_must_fill_whole_nodes(running: int, local: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: running)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
    mesh = object.__new__(Mesh)
    if running % local == 0:
        assert mesh.global_node == range(local)
        return
    with pytest.raises(MeshError, match="4 ranks are not whole nodes of LOCAL_WORLD_SIZE=3"):
        _ = mesh.global_node


def test_a_page_must_be_a_file_that_can_be_written(tmp_path: Any) -> None:
    for bad in (tmp_path, tmp_path / "no" / "page.html"):
        with pytest.raises(ConfigError, match="cannot be written; name a file"):
            check_page(str(bad))
    assert check_page(str(tmp_path / "page.html")) == tmp_path / "page.html"
    (tmp_path / "taken").mkdir()
    with pytest.raises(ConfigError, match=r"was not written: .*; the results are printed above"):
        write_page(tmp_path / "taken", "x")
    assert [each.name for each in tmp_path.iterdir()] == ["taken"]  # no part of a page is left


# What a table of parameters allows


@functools.cache
def blueprint(name: str = "qwen3", **fields: Any) -> Blueprint:
    """The parameters of a tiny model without weights; "aligned" has whole blocks of 64 columns for tp=2 too."""
    aligned = {**tiny.ALIGNED["qwen3"], "intermediate_size": 384}
    config = {**(aligned if name == "aligned" else tiny.of(name))}
    return Blueprint.of(config, None, Recipe(**fields))


def quantised() -> Blueprint:
    return Blueprint.of({**tiny.ALIGNED["qwen3"], "quantization_config": dict(quant_method="fp8")}, None, Recipe())


codes = lambda tp: blueprint("aligned", frozen="nf4", lora=Lora()).codings((), Axes(tp=tp))  # noqa: E731 - short
trained = lambda fields: blueprint(**fields).trained()  # noqa: E731 - short
TABLES: dict[str, Refusal] = {
    "columns of half a block": Refusal(codes, 4, LayoutError,
        r"frozen='nf4' & blocks of 64 columns & tp=4 a rank has 96 & choose tp from 1, 2$", (2,)),
    "nothing to quantise": Refusal(lambda train: blueprint("aligned", frozen="nf4", train=train), "**", ConfigError,
        r"frozen='nf4' finds nothing to quantise & columns of 64|64 columns", ("*norm*",)),
    "quantised files": Refusal(lambda fields: Blueprint.of({**quantised().config}, None, Recipe(**fields)),
        dict(frozen="nf4", lora=Lora()), ConfigError, "config.json has a quantization_config", (dict(lora=Lora()),)),
    "no gradient": Refusal(trained, dict(name="qwen4_exp", train="*index*"), ConfigError,
        "which has no gradient; leave it out", (dict(name="qwen4_exp", train="*"),)),
    "an MTP head that is left out": Refusal(trained, dict(name="qwen3_5", mtp="head", train="head.mtp.norm*"),
        ConfigError, "mtp='head' trains the MTP head & leaves out head.mtp.embed_norm & or leave mtp out",
        (dict(name="qwen3_5", mtp="head", train="head.mtp.*"), dict(name="qwen3_5", mtp="head"))),
}  # fmt: skip


@pytest.mark.parametrize("case", TABLES)
def test_what_no_parameter_of_a_model_allows_is_refused(case: str) -> None:
    TABLES[case].check()


# Objectives


def docs(*groups: int) -> LossDocuments:
    return LossDocuments([2] * len(groups), groups, torch.ones(2 * len(groups), dtype=torch.bool))


scores = dict(logprobs=torch.zeros(4), values=torch.zeros(4))
numbers = lambda limits: lambda value: check_number("x.y", value, **limits)  # noqa: E731 - short
embedding = field(Embedding, "dims")
OBJECTIVES: dict[str, Refusal] = {
    "below 0": Refusal(numbers({}), -0.1, ConfigError, "x.y=-0.1 must be at least 0$", (0, 0.0, 1e30)),
    "inf": Refusal(numbers({}), INF, ConfigError, "x.y=inf must be at least 0$"),
    "nan": Refusal(numbers({}), NAN, ConfigError, "x.y=nan must be at least 0$"),
    "True": Refusal(numbers({}), True, ConfigError, "x.y=True must be at least 0$", (1,)),
    "text": Refusal(numbers({}), "1", ConfigError, "x.y='1' must be at least 0$"),
    "not above": Refusal(numbers(dict(least=2, above=True)), 2, ConfigError, "x.y=2 must be above 2$", (2.1,)),
    "less than above": Refusal(numbers(dict(least=2, above=True)), 1.9, ConfigError, "x.y=1.9 must be above 2$"),
    "not below": Refusal(numbers(dict(below=0.5)), 0.5, ConfigError, "x.y=0.5 must be at least 0 and below 0.5$",
        (0, 0.49)),
    "dims=5": Refusal(embedding, 5, ConfigError, r"embedding.dims=5 must be whole numbers above 0", ([5], (5, 3), ())),
    "dims='5'": Refusal(embedding, "5", ConfigError, "embedding.dims='5' must be whole numbers"),
    "dims={5}": Refusal(embedding, {5}, ConfigError, "must be whole numbers above 0"),
    "dims=[0]": Refusal(embedding, [4, 0], ConfigError, "must be whole numbers above 0", ([4, 1],)),
    "dims=[True]": Refusal(embedding, [True], ConfigError, "must be whole numbers above 0"),
    "dims=[4.0]": Refusal(embedding, [4.0], ConfigError, "must be whole numbers above 0"),
    "dims=[4, 4]": Refusal(embedding, [4, 4], ConfigError, "has a number twice"),
    "top_k=0": Refusal(field(Distill, "top_k"), 0, ConfigError, "distill.top_k=0", (1, 2)),
    "top_k=True": Refusal(field(Distill, "top_k"), True, ConfigError, "distill.top_k=True"),
    "alpha": Refusal(field(Distill, "alpha"), 1.01, ConfigError, "distill.alpha=1.01 & at most 1", (1, 0.01)),
    "alpha=0": Refusal(field(Distill, "alpha"), 0, ConfigError, "distill.alpha=0 & above 0"),
    "one token of all": Refusal(lambda k: Distill(top_k=k, rest="renormalise"), 1, ConfigError, "give top_k=2", (2,)),
    "kind of DPO": Refusal(field(Dpo, "kind"), "kto", ConfigError, "dpo.kind='kto' & sigmoid", ("sigmoid", "ipo")),
    "smoothing": Refusal(field(Dpo, "label_smoothing"), 0.5, ConfigError, "below 0.5", (0, 0.49)),
    "smoothing of IPO": Refusal(lambda x: Dpo(kind="ipo", label_smoothing=x), 0.1, ConfigError, "no effect", (0,)),
    "groups of one": Refusal(lambda groups: halves(docs(*groups), torch.zeros(len(groups))), (0, 1), DataError,
        "2 documents in 2 groups", ((0, 0), (0, 0, 1, 1))),
    "a group of three": Refusal(lambda groups: halves(docs(*groups), torch.zeros(3)), (0, 0, 0), DataError,
        "3 documents in 1 groups?"),
    "no reference": Refusal(lambda fields: Dpo()(scores, fields, docs(0, 0)), {}, DataError,
        "has no field 'reference & docs/preferences.md", ({REFERENCE: torch.zeros(4)},)),
    "two rewards": Refusal(lambda values: Reward()(dict(values=values), {}, docs(0, 0)), torch.zeros(4, 2), DataError,
        "a reward model has one label, and this one has 2", (torch.zeros(4),)),
    "one answer": Refusal(field(Rerank, "answers"), ["no"], ConfigError, r"rerank.answers=\['no'\] & two texts",
        (["no", "yes"], ("n", "y"))),
    "three answers": Refusal(field(Rerank, "answers"), ["no", "yes", "so"], ConfigError, "two texts"),
    "answers in one text": Refusal(field(Rerank, "answers"), "ny", ConfigError, "answers='ny' must be two texts"),
    "a number as an answer": Refusal(field(Rerank, "answers"), ["no", 1], ConfigError, "two texts"),
    "equal answers": Refusal(field(Rerank, "answers"), ["no", "no"], ConfigError, "two different texts"),
}  # fmt: skip


@pytest.mark.parametrize("case", OBJECTIVES)
def test_objectives_and_their_data_are_refused(case: str) -> None:
    OBJECTIVES[case].check()


# Configs of frameworks


def areal(part: str) -> Any:
    """A module of the backend, which is imported with stand-ins for the names of AReaL."""
    areal_cases.backend()
    return sys.modules[f"meshwright.integrations.areal{part}"]


def rows(num: int) -> dict[str, torch.Tensor]:
    return dict(input_ids=torch.ones(num, 3, dtype=torch.long), attention_mask=torch.ones(num, 3))


engine_of = SimpleNamespace
verl_lora = lambda fields: verl_options.lora_of(fake_verl.ModelConfig(lora_rank=4, **fields))  # noqa: E731 - short
verl_optim = lambda fields: verl_options.optimizer_of(fake_verl.OptimizerConfig(**fields))  # noqa: E731 - short
verl_rate = lambda kind: verl_options.learning_rate(  # noqa: E731 - short
    fake_verl.OptimizerConfig(lr_scheduler_type=kind), 1
)
areal_axes = lambda fields, replicate=1: areal_options.mesh_axes(  # noqa: E731 - short
    fake_areal.ParallelStrategy(**fields), replicate
)
FRAMEWORKS: dict[str, Refusal] = {
    "axes": Refusal(lambda axes: options.mesh_axes(axes, 2), dict(dp=2), ConfigError, "mesh has 'dp' & fsdp",
        (dict(fsdp=2), dict(ep=2))),
    "backend of AReaL": Refusal(lambda name: areal("").register(name), "archon", ConfigError,
        "backend 'archon' & fsdp, megatron", ("fsdp",)),
    "rows of pairs": Refusal(lambda num: areal("_batches")._checked(rows(num),
        fake_areal.MicroBatchSpec(granularity=2)), 3, DataError, "3 rows & mb_spec.granularity=2", (2, 4)),
    "addr": Refusal(lambda addr: areal("_engine").MeshwrightEngine.initialize(engine_of(), addr, None),
        "host:1", ConfigError, "addr='host:1' & give None"),
    "weights without servers": Refusal(lambda rollout: areal("_engine").MeshwrightEngine.update_weights(
        engine_of(_rollout=rollout), None), None, StateError, "call connect_engine first"),
    "rollout without servers": Refusal(lambda coordinator: areal("_engine").MeshwrightEngine._connected(
        engine_of(_coordinator=coordinator)), None, StateError, "call connect_engine first", ("servers",)),
    "parts of experts": Refusal(areal_axes, dict(expert_tensor_parallel_size=2), ConfigError,
        "expert_tensor_parallel_size=2 & expert_parallel_size", (dict(expert_parallel_size=2),)),
    "replicas": Refusal(lambda num: areal_axes(dict(data_parallel_size=4), num), 3, ConfigError,
        "replicate=3 does not divide data_parallel_size=4", (1, 2, 4)),
    "no replica": Refusal(lambda num: areal_axes(dict(data_parallel_size=4), num), 0, ConfigError, "replicate=0"),
    "schedule of AReaL": Refusal(lambda kind: areal_options.check_schedule(fake_areal.OptimizerConfig(
        lr_scheduler_type=kind)), "wsd", ConfigError, "'wsd' is unknown", ("constant", "linear", "cosine")),
    "loaded adapters": Refusal(lambda lora: areal("_weights").load(engine_of(recipe=Recipe(lora=lora)),
        fake_areal.WeightUpdateMeta("disk", "x")), Lora(), ConfigError, "x: adapters & with_optim=True"),
    "loaded codes": Refusal(lambda numbers: areal("_weights").replace_weights(engine_of(
        model=engine_of(numbers=numbers, stored=dict), discard=lambda: None), engine_of(stored=dict)),
        {"head": 1}, ConfigError, "8 or 4 bits cannot be replaced", ({},)),
    "modules without adapters": Refusal(verl_lora, dict(exclude_modules=["q_proj"]), ConfigError,
        "model.exclude_modules & target_modules", (dict(exclude_modules=None), dict(target_modules=["q_proj"]))),
    "parameters with adapters": Refusal(verl_lora, dict(target_parameters=["x"]), ConfigError,
        "model.target_parameters"),
    "optimizer of verl": Refusal(verl_optim, dict(optimizer="SGD"), ConfigError, "optim.optimizer='SGD' & AdamW",
        (dict(optimizer="AdamW"), dict(optimizer="adam"))),
    "options of its optimizer": Refusal(verl_optim, dict(override_optimizer_config=dict(eps=1e-6, amsgrad=True)),
        ConfigError, r"\['amsgrad'\]; only eps", (dict(override_optimizer_config=dict(eps=1e-6)),)),
    "schedule of verl": Refusal(verl_rate, "linear", ConfigError, "'linear' is not supported", ("constant", "cosine")),
    "hdfs": Refusal(lambda path: verl_cases.backend().MeshwrightEngine.save_checkpoint(engine_of(), "x", path),
        "hdfs://x", ConfigError, "hdfs_path='hdfs://x' & mounted directory"),
}  # fmt: skip


@pytest.mark.parametrize("case", FRAMEWORKS)
def test_configs_and_data_of_frameworks_are_refused(case: str) -> None:
    FRAMEWORKS[case].check()
