"""Disagreements between ranks are named on all of them, before any work."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.data.images import Frame, Images
from meshwright.engine.agreement import Data, GatheredData, Proposal, _streams, checksum, whole_step
from meshwright.engine.batching import _settings_to_compare
from meshwright.errors import RankError
from tests import parts, tiny, trials, worlds
from tests.trials import build, feed
from tests.words import words


def _seeded(source: Path, mesh: dict[str, int]) -> mw.Engine:
    there = mw.Mesh(**mesh)
    return mw.Engine(mw.init(source, there, dtype=torch.float64, seed=there.rank), lr=1e-2)


def _other(source: Path, mesh: dict[str, int], name: str, *values: Any) -> mw.Engine:
    """An argument that differs from rank to rank."""
    there = mw.Mesh(**mesh)
    options = {"lr": 1e-2, "dtype": torch.float64, name: values[there.rank]}
    of_load = {name: options.pop(name) for name in {"dtype"} & options.keys()}
    return mw.Engine(mw.load(source, there, **of_load), **options)


def _adapted(source: Path, mesh: dict[str, int]) -> mw.Engine:
    return mw.Engine(mw.load(source, mw.Mesh(**mesh), dtype=torch.float64, lora=mw.Lora(rank=2)), lr=1e-2)


def _base_on_one_rank(engine: mw.Engine) -> None:
    with engine.model.base() if engine.model.mesh.rank else contextlib.nullcontext():
        engine.evaluate(feed(engine))


def _apart(engine: mw.Engine, *acts: Callable[[mw.Engine], Any]) -> None:
    acts[engine.model.mesh.rank](engine)


def _step(engine: mw.Engine) -> None:
    engine.step(feed(engine))


DOCUMENTS = [[5, 6, 7, 8], [9, 10, 11]]


def _made(engine: mw.Engine, documents: Any, length: int = 8, **options: Any) -> list[mw.Batch]:
    return mw.batches(documents, engine.model.mesh, length=length, **options)


def apart(what: str, one: str, zero: str) -> str:
    """Return one value on rank 1, another on rank 0."""
    return words(rf"{what}.* {one} on rank 1\b", rf" {zero} on rank 0\b")


REPLICAS, FSDP, TP = dict(replicate=2), dict(fsdp=2), dict(tp=2)
# What differs from rank to rank: the mesh, how the engine is made, the call, the message.
DISAGREED: dict[str, tuple[dict[str, int], Any, Any, str]] = {
    "seed": (REPLICAS, _seeded, _step, apart("seed", "1", "0")),
    "lr": (REPLICAS, lambda s, m: _other(s, m, "lr", 1e-3, 2e-3), _step, apart(r"\blr\b", r"0\.002", r"0\.001")),
    "function of lr": (FSDP, lambda s, m: _other(s, m, "lr", lambda step: 0.1, lambda step: 0.2), _step,
        apart(r"\blr\b", r"0\.2", r"0\.1")),
    "weight decay": (FSDP, lambda s, m: _other(s, m, "optimizer", mw.AdamW(weight_decay=0.1),
        mw.AdamW(weight_decay=0.2)), _step, apart("weight_decay", r"0\.2", r"0\.1")),
    "max_norm": (TP, lambda s, m: _other(s, m, "max_norm", 1.0, None), _step, apart("max_norm", "None", r"1\.0")),
    "gradients that wait on one rank": (FSDP, build, lambda e: (e.backward(feed(e)), _apart(e, lambda e: e.discard(),
        lambda e: None), _step(e)), words("gradients", r"update\(\)", r"discard\(\)") + "|" + words(r"rank \d ",
        "a step")),
    "axes": (FSDP, lambda s, m: mw.Mesh(**(TP if os.environ["RANK"] == "1" else m)), _step,
        words("tp=2 on cpu on rank 1", "fsdp=2 on cpu on rank 0")),
    "loss": (FSDP, lambda s, m: _other(s, m, "loss", mw.losses.cross_entropy, mw.losses.squared_error), _step,
        apart(r"\bloss\b", "squared_error", "cross_entropy")),
    "dtype": (REPLICAS, lambda s, m: _other(s, m, "dtype", torch.float64, torch.float32), _step,
        apart("dtype", r"torch\.float32", r"torch\.float64")),
    "base of adapters": (TP, _adapted, _base_on_one_rank, apart(r"adapters \(model\.base\(\)", "off", "on")),
    "steps": (FSDP, build, lambda e: _apart(e, _step, _ahead), apart(r"\bstep\b", "1", "0")),
    "calls": (FSDP, build, lambda e: _apart(e, _step, lambda e: e.evaluate(feed(e))),
        apart("call", "evaluate", "a step")),
    "looks": (FSDP, build, lambda e: _apart(e, lambda e: mw.logprobs(e.model, feed(e)[0]), lambda e: mw.logits(e.model,
        feed(e)[0])), apart("call", "logits", "logprobs")),
    "data of one data rank": (TP, build, lambda e: mw.logprobs(e.model, tiny.batches(e.model.mesh.rank)[0]),
        words("ranks 0 and 1", "data rank", "tp=2", "batches")),
    "advantage of one data rank": (TP, build, lambda e: e.step([mw.pack([[5, 6, 7, 8]], fields={"advantage":
        [[1.0 + e.model.mesh.rank] * 4]})]), words("ranks 0 and 1", "data rank", "tp=2", "batches")),
    "a bad token on one rank": (FSDP, build,
        lambda e: mw.logprobs(e.model, mw.pack([[1, 999 if e.model.mesh.rank else 2]])),
        words("token 999", "position 1") + "|" + words("rank 1 ", "logprobs", "token 999")),
    "batches, and a step": (FSDP, build, lambda e: _apart(e, lambda e: _made(e, DOCUMENTS), _step),
        apart("call", "a step", "batches")),
    "documents of each rank alone": (FSDP, build,
        lambda e: _made(e, DOCUMENTS[e.model.mesh.rank : e.model.mesh.rank + 1]),
        apart(r"all ranks give the documents of all.*mw\.pack", r"1 document \(.*\)", r"1 document \(.*\)")),
    "length of batches": (FSDP, build, lambda e: _made(e, DOCUMENTS, length=8 - 2 * e.model.mesh.rank),
        apart("length", "6", "8")),
    "a field": (FSDP, build, lambda e: _made(e, DOCUMENTS, fields={"gain": [[1.0] * 4,
        [float(e.model.mesh.rank)] * 3]}), apart("field 'gain'", r"\d+", r"\d+")),
    "text on one rank": (FSDP, build, lambda e: _made(e, ["ab"] if e.model.mesh.rank else DOCUMENTS),
        words("^documents must be lists of token ids") + "|" + words("^rank 1 ", "batches", "token ids, not text")),
    "dtype of an export": (FSDP, build,
        lambda e: mw.export(e.model, "nowhere", dtype=torch.bfloat16 if e.model.mesh.rank else None),
        apart("dtype=", r"torch\.bfloat16", "None")),
    "dtype of merged shards": (TP, _adapted,
        lambda e: list(mw.shards(e.model, "merged", dtype=torch.bfloat16 if e.model.mesh.rank else None)),
        apart("dtype=", r"torch\.bfloat16", "None")),
    "which": (FSDP, build, lambda e: (e.backward(feed(e)), dict(mw.stream(e.model,
        "grad" if e.model.mesh.rank else "weight"))),
        apart("call", r"stream\(which='grad'\)", r"stream\(which='weight'\)")),
}  # fmt: skip


def _ahead(engine: mw.Engine) -> None:
    engine.steps += 1
    _step(engine)


def disagreed(source: Path, mesh: dict[str, int], make: Any, act: Any, folder: Path) -> str:
    os.chdir(folder)
    try:
        act(make(source, mesh))
    except mw.MeshwrightError as error:
        return str(error)
    return "nothing"


Disagreed = Callable[[str], list[str]]


def groups() -> list[list[str]]:
    """Group the cases of a mesh in one world, apart from ranks that make different meshes."""
    of_mesh: dict[str, list[str]] = {}
    for name, (mesh, *_) in DISAGREED.items():
        of_mesh.setdefault("axes" if name == "axes" else trials.named(mesh), []).append(name)
    return list(of_mesh.values())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the working directory of the ranks: no file may appear in it."""
    return tmp_path_factory.mktemp("empty")


@pytest.fixture(scope="module")
def messages_of_ranks(source: Path, folder: Path) -> Disagreed:
    def of(group: Sequence[str]) -> dict[str, list[str]]:
        cases = {name: partial(disagreed, source, *DISAGREED[name][:3], folder) for name in group}
        return worlds.in_turn(trials.world_of(DISAGREED[group[0]][0]), cases)

    return worlds.Shared(groups(), of)


@pytest.mark.parametrize("name", DISAGREED)
def test_what_ranks_disagree_on_is_named_on_all(messages_of_ranks: Disagreed, folder: Path, name: str) -> None:
    for text in messages_of_ranks(name):
        assert re.search(DISAGREED[name][3], text), text
    assert not list(folder.iterdir())


WHOLE = mw.Batch(
    torch.arange(8), torch.arange(1, 9), (0, 3, 6, 8), {"gain": torch.ones(8)}, numbers=(0, 1, 2), groups=(4, 4, 5),
    images=Images(torch.zeros(8, 3), (Frame(2, 4, 1),)), experts=torch.zeros(8, 1, 2, dtype=torch.int64),
)  # fmt: skip
OTHERS: dict[str, mw.Batch] = {
    "tokens": replace(WHOLE, tokens=torch.arange(8) + 1),
    "labels": replace(WHOLE, labels=torch.arange(8)),
    "bounds": replace(WHOLE, bounds=(0, 4, 6, 8)),
    "fields": replace(WHOLE, fields={"gain": torch.zeros(8)}),
    "groups": replace(WHOLE, groups=(4, 5, 5)),
    "pixels": replace(WHOLE, images=Images(torch.ones(8, 3), (Frame(2, 4, 1),))),
    "frames": replace(WHOLE, images=Images(torch.zeros(8, 3), (Frame(4, 2, 1),))),
    "places": replace(WHOLE, images=Images(torch.zeros(8, 3), (Frame(2, 4, 3),))),
    "experts": replace(WHOLE, experts=torch.ones(8, 1, 2, dtype=torch.int64)),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_all_of_a_batch_is_compared(name: str) -> None:
    """Ranks of one data rank compare their batches, and all ranks the documents that they give to `mw.batches`."""
    assert checksum(_streams(WHOLE)) == checksum(_streams(replace(WHOLE, tokens=WHOLE.tokens.clone())))
    assert checksum(_streams(WHOLE)) != checksum(_streams(OTHERS[name]))
    settings, others = (_settings_to_compare(each, 8) for each in (WHOLE, OTHERS[name]))
    odd = [key for key in settings if settings[key] != others[key]]
    assert len(odd) == 1, odd
    words_of = {"tokens": "documents", "bounds": "documents", "fields": "'gain'", "pixels": "images"}
    words_of |= {"frames": "images", "places": "images"}
    assert words_of.get(name, name) in odd[0]


def test_numbers_of_documents_are_compared_and_names_of_groups_are_not() -> None:
    """Ids of groups may differ from rank to rank, and two ranks with the same documents must give them one order."""
    assert checksum(_streams(WHOLE)) != checksum(_streams(replace(WHOLE, numbers=(1, 0, 2))))
    assert checksum(_streams(WHOLE)) == checksum(_streams(replace(WHOLE, groups=(9, 9, 1))))


def gathered(*data: Data) -> tuple[GatheredData, Any]:
    """Return the data of four ranks and their mesh; two neighbours are one data rank."""
    rows = torch.tensor([astuple(each) for each in data], dtype=torch.float64)
    mesh = SimpleNamespace(axes="fsdp=2 tp=2", ranks_over=lambda _: torch.arange(4))
    return GatheredData(rows, torch.tensor([0, 0, 1, 1])), mesh


def test_a_step_is_the_sum_over_data_ranks() -> None:
    """Ranks of tp hold the same batches, which count once. Images are those of any rank."""
    one = Data(2.5, 1.5, 4, 3, 5, num_batches=2, num_tokens=8, num_real=14, checksum=7, images_mask=1)
    two = Data(0.5, 0.25, 1, 2, 3, num_batches=2, num_tokens=8, num_real=9, checksum=8, images_mask=2)
    step = whole_step(Proposal(lr=0.1, max_norm=2.0), *gathered(one, one, two, two))
    assert (step.lr, step.max_norm, step.weight, step.num_targets, step.num_tokens) == (0.1, 2.0, 3.0, 5, 23)
    assert (step.num_batches, step.images_mask, astuple(step.mtp)) == (2, 3, (1.75, 5, 8))
    wrong = {
        "rank 3 has 1 batch of 8 tokens, rank 0 2 of 8": (one, one, two, replace(two, num_batches=1)),
        "rank 2 has 2 batches of 9 tokens, rank 0 2 of 8": (one, one, replace(two, num_tokens=9), two),
        "ranks 2 and 3 are one data rank": (one, one, two, replace(two, checksum=9)),
        "no token of the step has a label": (Data(num_batches=1),) * 4,
        "sum to -1.0; give some target a weight": (replace(one, weight=-1.5),) * 2 + (two,) * 2,
        "sum to 0.0; give some target a weight": (replace(one, weight=-0.5),) * 2 + (two,) * 2,
    }
    for text, data in wrong.items():
        with pytest.raises((RankError, mw.DataError), match=re.escape(text)):
            whole_step(Proposal(), *gathered(*data))


def looked_apart(source: Path, mesh: dict[str, int]) -> int:
    """The second replica looks at nothing."""
    model = mw.load(source, mw.Mesh(**mesh, timeout_s=20), dtype=torch.float64)
    looked = [] if model.mesh.coords["replicate"] else tiny.batches(model.mesh.data_rank)
    return sum(len(mw.logprobs(model, batch)) for batch in looked)


@pytest.mark.parametrize(
    "mesh", parts.every(2, [dict(replicate=2, tp=2), dict(replicate=2, fsdp=2, tp=2)]), ids=trials.named
)
def test_replicas_may_look_at_as_much_as_they_like(source: Path, mesh: dict[str, int]) -> None:
    result = worlds.run(trials.world_of(mesh), looked_apart, source, mesh)
    assert result == [2 * tiny.LENGTH] * (len(result) // 2) + [0] * (len(result) // 2)
