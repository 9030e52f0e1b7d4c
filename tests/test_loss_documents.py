"""Sums, splits and parts of documents and groups, and the rows of a step, with expected values by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.engine import step_rows
from meshwright.engine.agreement import _weight
from meshwright.engine.loss_documents import LossDocuments
from meshwright.engine.step_rows import StepRows, fields_of_step
from tests import trials, worlds

# Five documents in three groups that are not neighbours; document 3 has no label; two tokens of padding.
SIZES, GROUPS = [2, 1, 3, 1, 2], [7, 4, 7, 9, 4]
TARGET = torch.tensor([1, 1, 1, 0, 1, 1, 0, 1, 0, 0, 0], dtype=torch.bool)
VALUES = torch.arange(1.0, 12.0)
DOCS = LossDocuments(SIZES, GROUPS, TARGET)


def test_documents_count_tokens_with_a_label() -> None:
    assert DOCS.num_targets_D.tolist() == [2, 1, 2, 0, 1]
    assert DOCS.sum(VALUES).tolist() == [3, 3, 11, 0, 8]
    assert DOCS.mean(VALUES).tolist() == [1.5, 3, 5.5, 0, 8]
    assert DOCS.mean(torch.stack([VALUES, -VALUES], 1)).tolist() == [[x, -x] for x in (1.5, 3, 5.5, 0, 8)]
    assert DOCS.spread(torch.tensor([10, 20, 30, 40, 50])).tolist() == [10, 10, 20, 30, 30, 30, 40, 50, 50, 0, 0]
    assert [each.tolist() for each in DOCS.split(VALUES)] == [[1, 2], [3], [4, 5, 6], [7], [8, 9]]


def test_groups_stand_in_the_order_of_their_first_documents() -> None:
    values_D = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])
    assert (DOCS.num, DOCS.num_groups, DOCS.group_numbers) == (5, 3, [0, 1, 0, 2, 1])
    assert DOCS.group_sum(values_D).tolist() == [5, 18, 8]
    assert DOCS.group_mean(values_D).tolist() == [2.5, 9, 8]
    assert DOCS.group_mean(values_D[:, None].expand(5, 2)).tolist() == [[2.5] * 2, [9] * 2, [8] * 2]
    assert DOCS.group_spread(torch.tensor([5, 6, 7])).tolist() == [5, 6, 5, 7, 6]
    assert [each.tolist() for each in DOCS.group_split(values_D)] == [[1, 4], [2, 16], [8]]


def test_terms_without_a_label_are_known() -> None:
    assert [DOCS.num_terms(per) for per in ("document", "group", "step", "micro_batch")] == [5, 3, 3, 1]
    assert DOCS.has_target("document").tolist() == [True, True, True, False, True]
    assert DOCS.has_target("group").tolist() == DOCS.has_target("step").tolist() == [True, True, False]
    assert DOCS.has_target("micro_batch").tolist() is True


@pytest.mark.parametrize(
    ("per", "terms", "rows", "sizes", "groups"),
    [
        ("document", [1, 4], [2, 7, 8], [1, 2], [0, 0]), ("document", [0, 3], [0, 1, 6], [2, 1], [0, 1]),
        ("group", [1, 2], [2, 6, 7, 8], [1, 1, 2], [0, 1, 0]), ("group", [0], [0, 1, 3, 4, 5], [2, 3], [0, 0]),
    ],
)  # fmt: skip
def test_a_part_has_the_rows_of_its_documents(
    per: str, terms: list[int], rows: list[int], sizes: list[int], groups: list[int]
) -> None:
    of_part, part = DOCS.part(per, terms)
    assert (of_part.tolist(), part.sizes, part.group_numbers) == (rows, sizes, groups)
    assert part.is_target_T.tolist() == TARGET[rows].tolist()


BATCH = mw.pack(
    [[5, 6, 7], [8], [9, 10], [4]], labels=[[6, 7, -100], [-100], [1, -100], [2]], groups=[3, 3, 5, 3], length=8,
    fields={"weight": [[0.5, 2.0, 100.0], [100.0], [4.0, 100.0], [0.25]]},
)  # fmt: skip


def test_documents_of_a_batch_leave_padding_out() -> None:
    docs = LossDocuments.of(BATCH)
    assert (docs.sizes, docs.group_numbers, docs.num_targets_D.tolist()) == ([3, 1, 2, 1], [0, 0, 1, 0], [2, 0, 1, 1])


@pytest.mark.parametrize(
    ("per", "weight"), [("token", 6.75), ("document", 3), ("group", 2), ("step", 2), ("micro_batch", 4)]
)
def test_the_divisor_counts_units_with_a_label(per: str, weight: float) -> None:
    """Only a loss per token is weighted, and without weights it counts its targets."""
    assert _weight(BATCH, per) == weight
    assert _weight(mw.pack([[5, 6, 7], [8], [9, 10]], groups=[0, 1, 1]), per) == {
        "token": 3, "document": 2, "group": 2, "step": 2, "micro_batch": 3
    }[per]  # fmt: skip


def test_rows_after_the_all_gather() -> None:
    """Two data ranks send rows of two micro-batches from two shares each, padded to the most rows of any rank."""
    counts_RMS = torch.tensor([[[1, 0], [2, 3]], [[0, 2], [1, 0]]])
    index, most = step_rows._positions(counts_RMS, torch.device("cpu"))
    assert most == 3
    # Rank (R, S) sends at 3 * (2 * R + S). In the order of R, M, S:
    assert index.tolist() == [0, 1, 2, 3, 4, 5, 9, 10, 6]


def test_documents_of_micro_batches_have_groups_of_their_own() -> None:
    one = mw.pack([[1, 2, 3], [4, 5], [6]], groups=[8, 8, 2], length=8)
    two = mw.pack([[1, 2], [3, 4, 5]], groups=[8, 9], length=8)
    masks = [torch.tensor(mask, dtype=torch.bool) for mask in ([1, 1, 0, 0, 1, 0, 1, 1], [1, 0, 0, 1, 1, 0, 0, 0])]
    assert step_rows._documents_of([one, two], masks) == [(2, 0), (1, 0), (0, 1), (1, 2), (2, 3)]


def rows_of_step() -> dict[str, Any]:
    """Return the rows of a step of two micro-batches; data rank 1 has fewer documents and rows in them."""
    mesh = trials.mesh_of(dict(fsdp=2, tp=2))
    documents = [[[1, 2, 3], [4]], [[5, 6, 7, 8]]] if mesh.data_rank == 0 else [[[11, 12]], [[13]]]
    labels = [[[2, 3, -100], [60]], [[-100, 7, 8, 9]]] if mesh.data_rank == 0 else [[[-100, 50]], [[-100]]]
    batches = []
    for of_batch, of_labels in zip(documents, labels, strict=True):
        fields = {"gain": [[[token, 10.0 * token] for token in each] for each in of_batch], "at": of_batch}
        batches.append(mw.pack(of_batch, labels=of_labels, groups=[4] * len(of_batch), length=4, fields=fields))
    rows, (lo, hi) = StepRows(mesh, batches), mesh.token_range(4)
    own = [rows.pick(number, batch.tokens[lo:hi]) for number, batch in enumerate(batches)]
    whole = rows.gather(own)
    return {
        "tokens": whole.tolist(), "sizes": rows.docs.sizes, "groups": rows.docs.group_numbers,
        "fields": {name: x.tolist() for name, x in rows.fields.items()},
        "dtypes": [rows.fields[name].dtype for name in ("labels", "at", "gain")],
        "own": [[rows.own(number, whole).tolist() == each.tolist() for number, each in enumerate(own)]],
    }  # fmt: skip


def test_rows_of_a_step_are_the_same_on_all_ranks() -> None:
    """They stand in the order of data ranks, micro-batches and tokens, whatever share of the tokens a rank has."""
    tokens = [1, 2, 4, 6, 7, 8, 12]
    for made in worlds.run(4, rows_of_step):
        assert (made["tokens"], made["sizes"], made["groups"]) == (tokens, [2, 1, 3, 1, 0], [0, 0, 1, 2, 3])
        assert made["fields"]["labels"] == [2, 3, 60, 7, 8, 9, 50]
        assert made["fields"]["at"] == tokens
        assert made["fields"]["gain"] == [[token, 10 * token] for token in tokens]
        assert made["dtypes"] == [torch.int64, torch.int64, torch.float32]
        assert made["own"] == [[True, True]]


STEP = mw.Loss(lambda scores, fields, docs: scores["hidden"], per="step")


@pytest.mark.parametrize(
    ("change", "passes"),
    [
        ({"id": torch.full((8,), -(2**53))}, True), ({"id": torch.full((8,), -(2**53) - 1)}, False),
        ({"id": torch.tensor([0] * 7 + [2**53 + 1])}, False), ({"id": torch.full((8,), 1e30)}, True),
        ({"id": torch.zeros(8, dtype=torch.bool)}, True),
    ],
)  # fmt: skip
def test_whole_numbers_of_a_field_must_be_exact_in_float64(change: Any, passes: bool) -> None:
    batch = BATCH.with_fields(**change)
    if not passes:
        with pytest.raises(mw.DataError, match="'id' has whole numbers above"):
            fields_of_step(STEP, [batch])
        return
    kinds = {"id": str(change["id"].dtype).removeprefix("torch."), "weight": "float32"}
    assert fields_of_step(STEP, [batch, batch]) == {"the fields of the batches, for a loss per step": kinds}


def test_fields_of_micro_batches_must_be_of_one_kind() -> None:
    """A field may differ in its name, its dtype or its columns."""
    one = BATCH.with_fields(x=torch.zeros(8, 2))
    assert fields_of_step(mw.Loss(mw.losses.cross_entropy), [one, BATCH]) == {}
    for other in (BATCH, BATCH.with_fields(x=torch.zeros(8, 3)), BATCH.with_fields(x=torch.zeros(8, 2).long())):
        with pytest.raises(mw.DataError, match="batch 2 has the fields"):
            fields_of_step(STEP, [one, one, other])
