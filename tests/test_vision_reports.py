"""Public reports on images that no other test answers, each by the mistake that it tells of. See docs/bugs.md."""

from __future__ import annotations

import random
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import meshwright as mw
from meshwright.data import Batch, cut
from tests import seeing, worlds
from tests.seeing import DOCUMENTS, IMAGE, packed

BLIND = ["embed*", "layers.*", "head.*"]


def test_images_that_touch_have_a_grid_each() -> None:
    """Two runs of places with nothing between; the positions of the second begin behind those of the first."""
    images = [(torch.zeros(8, seeing.PATCH), (1, 2, 4)), (torch.zeros(8, seeing.PATCH), (1, 4, 2))]
    batch = mw.pack([[1, IMAGE, IMAGE, IMAGE, IMAGE, 2]], images=[images], placeholders=(IMAGE,))
    assert [(frame.start, frame.height, frame.width) for frame in batch.frames] == [(1, 2, 4), (3, 4, 2)]
    assert batch.docs.turns_T3 is not None
    assert batch.docs.turns_T3.T.tolist() == [[0, 1, 1, 3, 3, 5], [0, 1, 1, 3, 4, 5], [0, 1, 2, 3, 3, 5]]


def test_where_documents_end_is_not_read_from_positions() -> None:
    """All places of a row of an image are at one time: each would be a document of its own."""
    batch = packed(length=200)
    sizes = [len(tokens) for tokens, _ in DOCUMENTS.values()]
    assert batch.docs.lengths == (*sizes, 200 - sum(sizes))
    assert batch.bounds == tuple(accumulate(batch.docs.lengths, initial=0))


def same(batch: Batch, other: Batch) -> bool:
    assert batch.images is not None
    assert other.images is not None
    pairs = [(batch.tokens, other.tokens), (batch.labels, other.labels), (batch.images.patches_PC,
             other.images.patches_PC)]  # fmt: skip
    return batch.frames == other.frames and all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize("seed", range(5))
def test_images_go_with_their_documents(seed: int) -> None:
    """Another order of documents moves their images and slices of videos too."""
    names = list(DOCUMENTS)
    order = random.Random(seed).sample(range(len(names)), len(names) - 2)
    expected = packed([names[number] for number in order], length=200)
    assert same(cut(packed(), order, 200), expected)


def frozen(source: Path) -> tuple[set[str], list[str], list[bool], int]:
    """Names that train, keys that a step changes, whether the rows ask for gradients, and what the tower kept."""
    model = mw.load(source, mw.Mesh(device="cpu"), dtype=torch.float32, train=BLIND, tower=True)
    before, tower = {key: value.clone() for key, value in mw.gather(model).items()}, model.parts[0].tower
    assert tower is not None
    rows, kept = list[bool](), list[torch.Size]()

    def keeps(x: Tensor) -> Tensor:
        kept.append(x.shape)
        return x

    noting = saved_tensors_hooks(keeps, lambda x: x)

    def ends(_module: nn.Module, _args: Any, out: Any) -> None:
        rows.extend(row.requires_grad for row in out)
        noting.__exit__()

    tower.register_forward_pre_hook(lambda _module, _args: noting.__enter__())
    tower.register_forward_hook(ends)
    engine = mw.Engine(model, lr=1e-2, optimizer=mw.AdamW(weight_decay=0.1))
    engine.backward([packed()])
    names = set(model.grads())
    engine.update()
    changed = [key for key, value in mw.gather(model).items() if not torch.equal(value, before[key])]
    return names, changed, rows, len(kept)


def test_a_frozen_tower_stays_as_it_is(tmp_path: Path) -> None:
    """Its table of positions and the mergers of the first layers too; and nothing of it is kept for a way back."""
    source = seeing.directory(tmp_path / "source", "qwen3_vl")
    ((names, changed, rows, num_kept),) = worlds.run(1, frozen, source)
    assert len(names) > 20
    assert not [name for name in names if name.startswith("tower.")]
    assert len(changed) >= len(names)
    assert not [key for key in changed if ".visual." in key]
    assert (rows, num_kept) == ([False] * 3, 0)
