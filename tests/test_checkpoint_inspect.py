"""Print the checks of `meshwright inspect`."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from meshwright.checkpoint import inspect


def difference(largest: float | None = 0.25) -> Any:
    return SimpleNamespace(plane="weights", key="k", why="values differ", num=1200, largest=largest)


@pytest.mark.parametrize(
    ("wrong", "apart", "lines"),
    [
        (None, None, ["bytes not read; --verify compares them with their checksums"]),
        ([], None, ["every byte is as it was written"]),
        (["bytes 0 to 8 are damaged"], None, ["bytes 0 to 8 are damaged"]),
        ([], [], ["every byte is as it was written", "no tensor differs"]),
        (None, [difference()],
         ["bytes not read; .*", "1 tensor differs", "weights k: values differ, 1,200 elements, by up to 0.25"]),
        (None, [difference(None)] * 2, ["bytes not read; .*", "2 tensors differ", *["weights k: values differ"] * 2]),
        (None, [difference(None)], ["bytes not read; .*", "1 tensor differs", "weights k: values differ"]),
    ],
)  # fmt: skip
def test_printed_checks_of_a_checkpoint(
    wrong: Any, apart: Any, lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    inspect._print_checks(inspect.Console(width=200), wrong, apart)
    printed = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert len(printed) == len(lines)
    for line, pattern in zip(printed, lines, strict=True):
        assert re.fullmatch(pattern, line), line


@pytest.mark.parametrize(
    ("wrong", "apart", "more"),
    [(None, None, {}), ([], None, {"wrong": []}), (None, [], {"differences": []}),
     (["x"], [], {"wrong": ["x"], "differences": []}),
     ([], [inspect.Difference("weights", "k", "values", 0.5, 3)],
      {"wrong": [], "differences": [dict(plane="weights", key="k", why="values", largest=0.5, num=3)]})],
)  # fmt: skip
def test_checks_that_were_made_are_in_the_json(
    wrong: Any, apart: Any, more: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspect, "summary", lambda _: {"step": 3})
    assert inspect.as_json(SimpleNamespace(), wrong, apart) == {"step": 3, **more}  # type: ignore[arg-type]


@pytest.mark.parametrize("more", [0, 1])
def test_only_the_first_differences_are_printed(more: int, capsys: pytest.CaptureFixture[str]) -> None:
    inspect._print_checks(inspect.Console(width=200), [], [difference()] * (inspect._MOST + more))
    printed = capsys.readouterr().out.splitlines()
    assert sum("weights k" in line for line in printed) == inspect._MOST
    assert [line for line in printed if "--json" in line] == ["  and 1 more; --json has them all"] * more
