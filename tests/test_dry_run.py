"""The tables and documents that `meshwright data` and `--dry-run` show before a run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from meshwright.data import Tokens
from meshwright.train import dry_run
from meshwright.train.dry_run import _document, _short, _view

of = SimpleNamespace


def spelled(document: Tokens, start: int, stop: int) -> str:
    return "".join(chr(97 + number) for number in document.ids[start:stop])


@pytest.mark.parametrize(
    ("document", "names", "text"),
    [
        (Tokens(cast(Any, np.arange(6)), ((2, 4),)), {}, "row 7: 6 tokens, 2 trained\nab[cd]ef\n"),
        (Tokens(cast(Any, np.arange(6)), ((0, 3), (5, 6))), {}, "row 7: 6 tokens, 3 trained\n[abc]de[f]\n"),
        (
            Tokens(cast(Any, np.arange(6)), ((1, 2), (2, 4)), (), (2, 3, 1)),
            {},
            "row 7: 6 tokens, 3 trained\ndocument 1 of 3:\na[b]\ndocument 2 of 3:\n[cd]e\ndocument 3 of 3:\nf\n",
        ),
        (
            Tokens(cast(Any, np.arange(3)), (), (), (1, 2), (5, 4)),
            {4: "good"},
            "row 7: 3 tokens, a label at the end of each document\n"
            "document 1 of 2:\na -> [5]\ndocument 2 of 2:\nbc -> [good]\n",
        ),
    ],
)
def test_trained_tokens_stand_in_brackets(document: Tokens, names: dict[int, str], text: str) -> None:
    """A span may begin where its document begins. A label follows its own document."""
    documents: Any = of(tokens=lambda _: document, place=lambda number: f"row {number}")
    made = _document(documents, 7, spelled, names)
    assert made.plain == text
    green = "".join(made.plain[span.start : span.end] for span in made.spans if "green" in str(span.style))
    assert green == "".join(f"[{spelled(document, *span)}]" for span in document.spans) + "".join(
        f" -> [{names.get(label, label)}]" for label in document.classes
    )


def test_a_row_of_placeholders_is_counted() -> None:
    assert _short("a<|pad|><|pad|><|pad|><|pad|>b") == "a<|pad|> x 4 b"
    assert _short("<|pad|><|pad|><|pad|>") == "<|pad|><|pad|><|pad|>"
    assert _short("<|a|><|a|><|a|><|a|><|b|>") == "<|a|> x 4 <|b|>"


def test_images_and_videos_have_their_size_and_tokens() -> None:
    processor: Any = of(patch=14, num_tokens=lambda view: view.grid[1] * view.grid[2] // 4)
    image: Any = of(grid=(1, 4, 6), files=["a.png"], taken=[])
    video: Any = of(grid=(3, 2, 2), files=["a.png", "b.png", "c.png"], taken=[0, 5])
    assert _view(image, processor) == "a.png: 84 x 56 pixels, 6 tokens"
    assert _view(video, processor) == "a.png and 2 more: 2 frames of 28 x 28 pixels, 1 token"


def documents_of(name: str, rows: int, **counts: int) -> Any:
    """Return documents whose statistics are `rows`, `rows` + 1, ..."""
    usual = dict(documents=rows + 1, tokens=rows + 2, targets=rows + 3, longest=rows + 4, skipped=0, without_targets=0)
    stats = lambda kept: of(rows=rows, too_long=int((~kept).sum()), **{**usual, **counts})  # noqa: E731 - short
    return of(name=name, statistics_of=stats, num_views=np.array([0, counts.get("skipped", 0)]), unused=[name])


def data_of(*documents: Any) -> Any:
    """Return data of 4 streams of 10 tokens, 3 of them padding. The second document of each source is too long."""
    sources = [of(lengths=np.array([5, 0])) for _ in documents]
    plan = of(
        sources=sources, weights=[0.5, 0.25], num_streams=4, length=10, epochs_before=lambda stream: stream / 2,
        stream=lambda number: [range(3), range(4)],
    )  # fmt: skip
    return of(documents=[*documents], plan=plan, num_steps=1, processor=None)


def test_each_source_has_a_row_of_its_own() -> None:
    """8 streams a step on 8 ranks; tp=2 shares each between 2 of them."""
    train, mesh = of(streams_per_step=8, dtype="float32"), of(num_data_ranks=4, world=8)
    config: Any = of(
        train=train, mesh=mesh, eval=of(every=3), distill=None, objective_options=None, recipe=of(dtype=torch.float32)
    )
    first, second, held = documents_of("a", 100), documents_of("b", 200, skipped=2, without_targets=1), None
    held = documents_of("c", 300)
    said = dry_run.dry_run(config, data_of(first, second), {"set": data_of(held)}).splitlines()
    rows = {line.split("  ")[0]: line.split() for line in said if line[0] != " "}
    assert rows["a"] == ["a", "100", "101", "102", "103", "104", "1", "times"]
    assert rows["b"] == ["b", "200", "201", "202", "203", "204", "0.5", "times"]
    assert rows["held out: set"][3:] == ["300", "301", "302", "303", "304", "every", "3", "steps"]
    at = said.index(next(line for line in said if line.startswith("b ")))
    assert said[at + 1 : at + 5] == [
        "  with 2 images and videos", "  rows left out: 2 bad, 1 without trained tokens",
        "  1 document longer than 10 tokens left out", "  unused fields: b",
    ]  # fmt: skip
    assert said[-4:] == [
        "4 streams of 10 tokens, 30.00% of them padding",
        "1 step of 80 tokens: 2 micro-batches on each of 4 data ranks",
        "Bytes and times of the plan are for compute in bfloat16; this run has float32",
        "Packing leaves much padding: try another length, or more documents",
    ]
