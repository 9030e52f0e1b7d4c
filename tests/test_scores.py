"""Scores without a step: several micro-batches, temperatures, values by document in the caller's order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import meshwright as mw
from tests import parts, rl_losses, tiny, trials, worlds

MESHES: list[dict[str, int]] = [
    dict(fsdp=2, tp=2),
    dict(pp=2),
    *([dict(cp=2), dict(replicate=2), dict(fsdp=2, cp=2), dict(pp=2, tp=2), dict(tp=4)] if parts.ALL else []),
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.directory(tmp_path_factory.mktemp("scores") / "m", "qwen3")


def scored(source: Path, mesh: dict[str, int], head: str) -> dict[str, list[Tensor]]:
    """Scores of all documents in the caller's order, by whatever batches this mesh makes of them."""
    model = mw.load(source, trials.mesh_of(mesh), head=head, dtype=torch.float64, train=[])
    documents, groups = rl_losses.documents(), rl_losses.GROUPS
    batches = mw.batches(documents, model.mesh, max_tokens=63, trained=rl_losses.masks(), groups=groups)
    assert len(batches) > 1
    assert {len(batch) for batch in batches} != {63}, "padded beyond the fullest batch"
    by_batch = mw.scores(model, batches, temperature=1.0 if head == "value" else 0.7)
    for batch, each in zip(batches, by_batch, strict=True):
        for values in each.values():
            assert torch.equal(batch.join(batch.split(values)), values)
    if head == "lm":
        assert torch.equal(by_batch[0]["logprobs"], mw.logprobs(model, batches, temperature=0.7)[0])
        assert torch.equal(by_batch[-1]["entropy"], mw.scores(model, batches[-1], temperature=0.7)["entropy"])
    return {name: mw.by_document(model.mesh, batches, [each[name] for each in by_batch]) for name in by_batch[0]}


def plainly(source: Path, head: str) -> dict[str, list[Tensor]]:
    """Compute the scores from the logits of each document alone."""
    model = mw.load(source, trials.mesh_of({}), head=head, dtype=torch.float64, train=[])
    answers: dict[str, list[Tensor]] = {}
    for tokens, mask in zip(rl_losses.documents(), rl_losses.masks(), strict=True):
        batch = mw.pack([tokens], trained=[mask])
        logits = mw.logits(model, batch)
        if head == "value":
            of_document = {"values": logits}
        else:
            logs = (logits / 0.7).log_softmax(-1)
            of_document = {"logprobs": logs.gather(1, batch.labels.clamp(min=0)[:, None])[:, 0]}
            of_document["entropy"] = -(logs.exp() * logs).sum(1)
        for name, values in of_document.items():
            answers.setdefault(name, []).append(values.where(batch.is_target_T, 0.0))
    return answers


@pytest.mark.parametrize("mesh", MESHES, ids=trials.named)
def test_scores_come_back_in_the_order_of_the_documents(source: Path, mesh: dict[str, int]) -> None:
    cases: dict[str, Any] = {head: lambda head=head: scored(source, mesh, head) for head in ("lm", "value")}
    plain = worlds.in_turn(1, {head: lambda head=head: plainly(source, head) for head in cases})
    for head, ranks in worlds.in_turn(trials.world_of(mesh), cases).items():
        (wanted,) = plain[head]
        for answers in ranks:
            assert answers.keys() == wanted.keys()
            for name, documents in wanted.items():
                torch.testing.assert_close(answers[name], documents, rtol=1e-9, atol=1e-9)


@worlds.world(1)
def test_groups_stay_together_and_every_document_comes_once(source: Path) -> None:
    documents = rl_losses.documents()
    batches = mw.batches(documents, trials.mesh_of({}), max_tokens=50, groups=rl_losses.GROUPS)
    assert sorted(number for batch in batches for number in batch.numbers) == [*range(len(documents))]
    for batch in batches:
        assert batch.groups == tuple(rl_losses.GROUPS[number] for number in batch.numbers)
        for number, tokens in zip(batch.numbers, batch.split(batch.tokens), strict=True):
            assert tokens.tolist() == documents[number]
    of_group = [
        {number for number, batch in enumerate(batches) if group in batch.groups} for group in set(rl_losses.GROUPS)
    ]
    assert all(len(numbers) == 1 for numbers in of_group)


def test_a_data_rank_without_documents_gets_padding_alone(source: Path) -> None:
    (own, other) = worlds.run(2, _one_document)
    assert (own, other) == ((1, 3), (0, 0))


def _one_document() -> tuple[int, int]:
    mesh = trials.mesh_of(dict(fsdp=2))
    (batch,) = mw.batches([[1, 2, 3]], mesh, length=4)
    values = batch.join([torch.ones(3, 2).long()] * batch.num_documents)  # of another kind where there is no document
    assert mw.by_document(mesh, [batch], [values])[0].tolist() == [[1, 1]] * 3
    return batch.num_documents, len(batch) - batch.num_filler
