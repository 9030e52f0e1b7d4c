"""Documents of several data ranks: their batches, and values that come back in the order of the list."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import meshwright as mw
from meshwright.axes import Axes
from meshwright.engine import batching
from meshwright.errors import DataError

of: Any = SimpleNamespace
CPU = torch.device("cpu")


def by_document(
    monkeypatch: pytest.MonkeyPatch,
    numbers: list[tuple[int, ...]],
    width: int = 2,
    others: Any = None,
    sent: Any = None,
) -> list[Tensor]:
    """Return the values of documents of one token more than their number. `others`: kinds of another data rank."""

    def compare(mesh: Any, call: str, prepare: Any) -> Any:
        result, settings, data = prepare()
        assert settings == {"the tokens of by_document()": 8 * len(numbers)}
        return result, of(per_data_rank=of(column=lambda name: torch.tensor([vars(data)[name], 0])))

    monkeypatch.setattr(batching, "compare", compare)

    def gather(x: Tensor, axes: Any, at: str) -> Tensor:
        if sent is not None:
            sent.append((tuple(x.shape), x.dtype))
        return x

    batches = []
    for each in numbers:
        packed = mw.pack([[n + 5] * (n + 1) for n in each], length=8) if each else None
        none = mw.Batch(torch.zeros(8).long(), torch.full((8,), -100), (0, 8), num_filler=8)
        batches.append(none if packed is None else mw.Batch(
            packed.tokens, packed.labels, packed.bounds, num_filler=packed.num_filler, numbers=each))  # fmt: skip
    values = [batch.tokens[:, None] * torch.tensor([1.0, -1.0])[:width] for batch in batches]
    mesh = of(gather_objects=lambda own, axes: [own, others], device=CPU, gather_rows=gather)
    return mw.by_document(mesh, batches, values)


def test_values_of_documents_stand_in_the_order_of_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    made = by_document(monkeypatch, [(3, 1), (2,), (0,)])
    assert [each.tolist() for each in made] == [[[n + 5, -n - 5]] * (n + 1) for n in range(4)]
    assert by_document(monkeypatch, [(0,)], width=1)[0].shape == (1, 1)


@pytest.mark.parametrize(
    ("numbers", "others", "message"),
    [
        ([(1, 0), (3,)], None, "some twice or none"), ([(0, 1), (0,)], None, "some twice or none"),
        ([(1,), (1,)], None, "some twice or none"), ([(0,)], (torch.float32, torch.Size([3])), "2 kinds"),
        ([(0,)], (torch.float64, torch.Size([2])), "2 kinds"), ([()], None, "0 kinds"),
    ],
)  # fmt: skip
def test_documents_twice_or_of_two_kinds_are_refused(
    monkeypatch: pytest.MonkeyPatch, numbers: list[tuple[int, ...]], others: Any, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        by_document(monkeypatch, numbers, others=others)


@pytest.mark.parametrize(
    ("options", "size"),
    [({"max_tokens": 9}, 6), ({"length": 8}, 8), ({"max_tokens": 13}, 10), ({"max_tokens": 12}, 10)],
)
def test_batches_are_as_long_as_the_fullest_one(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, int], size: int
) -> None:
    """Two ranks of tp share a batch of documents of 5 and 4 tokens; the last data ranks may have padding alone."""
    monkeypatch.setattr(batching, "compare", lambda mesh, call, prepare: (prepare()[0], None))
    documents, fields = [[1] * 4, [2] * 5], {"gain": [[[1.0, 2.0]] * 4, [[3.0, 4.0]] * 5]}
    ranks = []
    for rank in range(3):
        mesh = of(axes=Axes(tp=2), data_rank=rank, num_data_ranks=3)
        [batch] = mw.batches(documents, mesh, **options, fields=fields)
        assert batch.fields["gain"].shape == (len(batch), 2)
        ranks.append((len(batch), batch.num_documents, batch.num_filler))
    one = [(size, 2, size - 9), (size, 0, size), (size, 0, size)]
    assert ranks == (one if size > 8 else [(size, 1, size - 5), (size, 1, size - 4), (size, 0, size)])


def test_a_data_rank_with_padding_alone_sends_zeros_of_the_kind_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    kind = torch.float64, torch.Size([3, 2])
    assert by_document(monkeypatch, [()], others=kind, sent=sent) == []
    assert sent == [((8,), torch.int64), ((8, 3, 2), torch.float64)]
