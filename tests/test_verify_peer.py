"""M1 of `meshwright verify`: one process beside transformers' model."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright import ops
from meshwright.axes import Axes
from meshwright.verify import RunResult, against, inspection, plan, report
from tests.words import words


def beside_transformers(at: Path) -> RunResult:
    return inspection._against(plan("tiny-qwen3", Axes(fsdp=2), say=lambda _: None), at, lambda _: None)


def test_what_is_wrong_is_named_with_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rotate = ops.rotate
    monkeypatch.setattr(ops, "rotate", lambda x_THK, cos, sin: rotate(x_THK, cos, -sin))  # the other way round
    first, *_ = beside_transformers(tmp_path).findings
    assert re.match(r"M1 layers\.0\.mixer: .*\btransformers\b.*, in two micro-batches", str(first)), first


def unknown(_source: Path) -> str:
    return "this version has no language model of 'qwen9'"


def failing(*_: object) -> None:
    raise RuntimeError("no kernel")


@pytest.mark.parametrize(
    ("name", "instead", "told"),
    [
        ("stranger", unknown, words("M1", "'qwen9'")),
        ("theirs", failing, words("M1", "transformers fails", "RuntimeError: no kernel")),
    ],
    ids=["an unknown family", "an error of transformers"],
)
def test_what_could_not_be_asked_is_not_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, instead: Callable[..., object], told: str
) -> None:
    """Not a pass: terminal, page and JSON say what was not tried from `untried`."""
    monkeypatch.setattr(against, name, instead)
    part = beside_transformers(tmp_path)
    assert (list(part.findings), list(part.oracles)) == ([], [])
    tried = plan("tiny-qwen3", Axes(fsdp=2), say=lambda _: None)
    assert any(re.search(told, what) for what in report.untried(tried, [part])), part
    assert re.search(told, report.unproven(tried, [part]))
