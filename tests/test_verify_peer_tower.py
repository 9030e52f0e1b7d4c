"""M1 of `meshwright verify --tower`: one process with its tower against transformers' vision-language model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from meshwright import ops
from meshwright.axes import Axes
from meshwright.data import batch
from meshwright.models.vision_tower import Merger, Tower
from meshwright.recipe import Recipe
from meshwright.verify import Data, RunResult, plan, session
from meshwright.verify.session import Options
from meshwright.verify.small_data import LONG, LONG_STEP, Vision
from tests import parts, seeing

FIRST = "two micro-batches"
# parts of the forward, 8 or 4 of them of the tower
NUM_PARTS = {"qwen3_vl": 23, "qwen3_vl_moe": 23, "qwen3_5": 15, "qwen3_5_moe": 15, "qwen4_exp": 20}
LAYOUTS = {"qwen3_vl_moe": 1, "qwen3_5_moe": 1, "qwen4_exp": 1}  # other spellings of the files


def compared_with_transformers(at: Path, family: str, *, whole: bool = False) -> RunResult:
    """Compare the first step alone, or all."""
    recipe, real = at / "recipe", session.steps_of
    recipe.mkdir()
    (recipe / "config.json").write_text(json.dumps(seeing.of(family)))
    tried = plan(str(recipe), Axes(fsdp=2), Options(Recipe(tower=True)), say=lambda _: None)
    with pytest.MonkeyPatch.context() as patch:
        if not whole:
            patch.setattr(session, "steps_of", lambda *args: {FIRST: real(*args)[FIRST]})
        return session._run_transformers(tried, at, lambda _: None)


def check_clean(part: RunResult, family: str) -> dict[str, int]:
    """Return the number of comparisons of each kind."""
    assert not part.findings, part.findings[0]
    assert (part.oracles, part.ended, part.untried) == (("M1", "R1"), ["M1", "R1"], ())
    assert all(margin.worst <= margin.allowed for margin in part.margins)
    counts = {margin.what: margin.count for margin in part.margins}
    assert ("choices of experts" in counts) == (family in LAYOUTS)
    assert sum("layout" in what for what in counts) == LAYOUTS.get(family, 0)
    return counts


@pytest.mark.parametrize("family", parts.every(3, seeing.ODD))
def test_the_tower_is_that_of_transformers(tmp_path: Path, family: str) -> None:
    counts = check_clean(compared_with_transformers(tmp_path, family), family)
    assert counts["parts of the forward"] == NUM_PARTS[family]


@pytest.mark.slow
@parts.IN_MATRIX
@pytest.mark.parametrize("family", parts.every(4, seeing.ODD, 1))
def test_in_every_step(tmp_path: Path, family: str) -> None:
    """Few tokens have no image, and a gradient of the tower is zero there. Two families have the same tower."""
    counts = check_clean(compared_with_transformers(tmp_path, family, whole=True), family)
    num_eyes = 8 if "vl" in family else 4
    assert counts["parts of the forward"] == 3 * NUM_PARTS[family] - num_eyes


def a_merger_with_tanh(patch: pytest.MonkeyPatch) -> None:
    """Use the GELU of the blocks. A change in torch would change transformers too."""

    def forward(self: Merger, x_PE: torch.Tensor) -> torch.Tensor:
        x_NF = self.fc1(self.norm(x_PE).view(-1, 4 * x_PE.shape[1]))
        return self.fc2(F.gelu(x_NF, approximate="tanh"))

    patch.setattr(Merger, "forward", forward)


def height_for_width(patch: pytest.MonkeyPatch) -> None:
    """Swap both in the tower's table of positions."""
    real = ops.interpolated

    def turned(table_SE: torch.Tensor, these: ops.Frames, like: torch.Tensor) -> torch.Tensor:
        sizes = tuple((width, height) for height, width in these.sizes)
        return real(table_SE, replace(these, sizes=sizes, row_P=these.col_P, col_P=these.row_P), like)

    patch.setattr(ops, "interpolated", turned)


def height_for_width_in_the_text(patch: pytest.MonkeyPatch) -> None:
    real = batch.turns_of
    patch.setattr(batch, "turns_of", lambda *args: real(*args)[:, [0, 2, 1]])


def features_reversed(patch: pytest.MonkeyPatch) -> None:
    real = Tower.forward

    def turned(self: Tower, sight: Any) -> tuple[torch.Tensor, ...]:
        rows, *deep = real(self, sight)
        return (rows, *reversed(deep))

    patch.setattr(Tower, "forward", turned)


def half_back_through_mergers(patch: pytest.MonkeyPatch) -> None:
    real = Merger.forward
    patch.setattr(Merger, "forward", lambda self, x_PE: real(self, (x_PE + x_PE.detach()) / 2))


PLANTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str, str]] = {
    "a merger with the GELU of the blocks": (a_merger_with_tanh, "qwen3_5", r"M1 tower\.merger: .*\btransformers'"),
    "height for width in the tower": (height_for_width, "qwen3_5", r"M1 tower\.patches: "),
    "height for width in the text": (height_for_width_in_the_text, "qwen3_5", "M1 RoPE: .*or positions"),
    "features in the order of reverse": (features_reversed, "qwen3_vl", r"M1 layers\.1\.norm: .*in another order"),
    "half of it flows back through mergers": (
        half_back_through_mergers, "qwen3_5", r"M1 model\.visual\.blocks\.\d\.mlp\.linear_fc2\.\w+: .*between .* and",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", parts.every(5, PLANTS))
def test_the_first_that_is_wrong_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    plant, family, message = PLANTS[name]
    plant(monkeypatch)
    first, *_ = compared_with_transformers(tmp_path, family).findings
    assert re.match(message, str(first)), first


def runs_of(document: list[int], places: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """Return the beginning and the end of each run of equal positions."""
    kinds = [places.index(token) if token in places else None for token in document]
    bounds = [0, *(at for at in range(1, len(kinds)) if kinds[at] != kinds[at - 1]), len(kinds)]
    yield from ((a, b) for a, b in pairwise(bounds) if kinds[a] is not None)


@pytest.mark.parametrize("step", [0, LONG_STEP])
def test_no_two_images_touch(step: int) -> None:
    """transformers would take them for one."""
    data = Data(vocab=131, long=LONG, vision=Vision(120, 121, 96), apart=True)
    for documents, images in zip(data.documents(0, step), data.images(0, step), strict=True):
        for document, seen in zip(documents, images, strict=True):
            sizes = [height * width // 4 for _, (time, height, width) in seen for _ in range(time)]
            assert [b - a for a, b in runs_of(document, (120, 121))] == sizes


def test_images_are_bytes_and_numbers() -> None:
    """`meshwright train` reads bytes, and other processors give numbers."""
    data = Data(vocab=131, long=LONG, vision=Vision(120, 121, 96))
    made = {step: [d for docs in data.images(1, step) for d in docs] for step in (0, LONG_STEP)}
    kinds = {step: {pixels.dtype for document in result for pixels, _ in document} for step, result in made.items()}
    assert kinds == {0: {torch.uint8, torch.float32}, LONG_STEP: set()}
    (pixels, _), *_ = next(document for document in data.images(0, LONG_STEP)[0] if document)
    assert pixels.dtype == torch.float32
