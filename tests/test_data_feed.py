"""Streams as batches: the same as `mw.pack` makes, and on every mesh the same documents."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.data.feed import Feed, batch_of, source_of
from meshwright.data.packing_plan import Plan
from meshwright.data.texts import Ready
from meshwright.data.token_cache import Documents, TokenizeSpec, prepare
from meshwright.data.tokens import tokens
from meshwright.train.data_sources import TrainingData


def drawn(seed: int) -> tuple[list[list[int]], list[list[bool]]]:
    dice = random.Random(seed)
    documents = [[dice.randrange(1, 50) for _ in range(dice.randint(1, 9))] for _ in range(dice.randint(1, 6))]
    return documents, [[dice.random() < 0.6 for _ in document] for document in documents]


def spans_of(mask: list[bool]) -> list[tuple[int, int]]:
    return [(at, at + 1) for at, learnt in enumerate(mask) if learnt]


@pytest.mark.parametrize("seed", range(40))
def test_as_pack_makes_them(seed: int) -> None:
    documents, masks = drawn(seed)
    result = batch_of([tokens(d, spans_of(m)) for d, m in zip(documents, masks, strict=True)], 64)
    wanted = mw.pack(documents, trained=masks, length=64)
    for name in ("tokens", "labels"):
        assert torch.equal(getattr(result, name), getattr(wanted, name)), name
    assert (result.bounds, result.num_filler) == (wanted.bounds, wanted.num_filler)


def test_behind_the_end_is_filler() -> None:
    empty = batch_of([], 8)
    assert (empty.num_targets, empty.num_filler, empty.bounds) == (0, 8, (0, 8))
    assert batch_of([], 4, []).fields["source"].tolist() == [0, 0, 0, 0]


@pytest.fixture
def source(tmp_path: Path) -> Documents:
    dice = random.Random(1)
    rows = [{"ids": [n % 90 + 1] * dice.randint(2, 40)} for n in range(200)]
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return prepare(TokenizeSpec("data", (file,), Ready(100).documents, "ready"), tmp_path / "cache")


def plan_of(source: Documents, length: int = 64, **options: Any) -> Plan:
    return Plan([source_of(source, length, **options)], length=length, epochs=1)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_every_mesh_gets_the_same_streams(source: Documents, num_ranks: int) -> None:
    plan = plan_of(source)
    feeds = [Feed([source], plan, micro_batches=4 // num_ranks, rank=r, num_ranks=num_ranks) for r in range(num_ranks)]
    first, seen = 0, []
    while first < plan.num_streams:
        steps = [feed.step(first) for feed in feeds]
        batches = [steps[r].batches[m] for m in range(4 // num_ranks) for r in range(num_ranks)]
        seen += [batch.tokens.tolist() for batch in batches]
        first = steps[0].next
    whole = [
        batch_of([source.tokens(p.document) for p in plan.stream(j)], 64).tokens.tolist() for j in range(len(seen))
    ]
    assert seen == whole
    assert sum(bool(sum(stream)) for stream in seen) == plan.num_streams


def test_too_long_documents(source: Documents) -> None:
    longer = int((source.lengths > 30).sum())
    with pytest.raises(mw.DataError, match=rf"(?s){longer} documents of data have more than the 30 .*a\.jsonl:\d+: "):
        plan_of(source, 30)
    dropped, cut = plan_of(source, 30, too_long="drop"), plan_of(source, 30, too_long="cut")
    count = {name: sum(len(plan.stream(j)) for j in range(plan.num_streams)) for name, plan in
             (("dropped", dropped), ("cut", cut))}  # fmt: skip
    assert count == {"dropped": 200 - longer, "cut": 200 + longer}
    message = [f"{longer} documents of data longer than 30 tokens left out"]
    assert [*TrainingData([source], dropped, 1).left_out()] == message
    assert (
        [*TrainingData([source], cut, 1).left_out()] == [*TrainingData([source], plan_of(source), 1).left_out()] == []
    )
    [feed] = [Feed([source], cut, micro_batches=1, rank=0, num_ranks=1)]
    targets = sum(feed.step(j).batches[0].num_targets for j in range(cut.num_streams))
    assert targets == int(source.lengths.sum()) - 200 - longer  # the first token of each piece has none before it


def test_a_changed_document_is_another_plan(source: Documents, tmp_path: Path) -> None:
    """The length is the same; the place of the files does not matter."""
    rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]

    def plan(folder: str) -> str:
        file = tmp_path / folder / "b.jsonl"
        file.parent.mkdir()
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        recipe = TokenizeSpec("other", (file,), Ready(100).documents, "ready")
        return plan_of(prepare(recipe, tmp_path / "cache")).fingerprint

    assert plan("same") == plan_of(source).fingerprint
    rows[7]["ids"][0] += 1
    assert plan("changed") != plan_of(source).fingerprint
