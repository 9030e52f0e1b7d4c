"""Progress in a log: a line now and then with all that was done so far, and how the work ended."""

from __future__ import annotations

import io
import sys
from contextlib import nullcontext, suppress
from types import SimpleNamespace
from typing import Any

import pytest

from meshwright import log


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A clock that stands still unless a test moves it."""
    own = SimpleNamespace(now=100.0)
    monkeypatch.setattr(log, "time", SimpleNamespace(monotonic=lambda: own.now))
    return own


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_says_how_much_was_done_so_far(clock: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """At most one line in five seconds, however many parts there are."""
    with log.progress("reading", 4_000, "rows", enabled=True) as advance:
        for seconds in (0.0, 4.9, 0.1, 2.0, 2.9, 0.2):
            clock.now += seconds
            advance(500)
    assert capsys.readouterr().err.splitlines() == [
        "reading: 1,500 of 4,000 rows, so far", "reading: 3,000 of 4,000 rows, so far",
        "reading: 3,000 of 4,000 rows, done in 10.1 s",
    ]  # fmt: skip


def test_work_that_fails_is_not_done(clock: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with suppress(ValueError), log.progress("loading", 3_000_000, "bytes", enabled=True) as advance:
        clock.now += 1.5
        advance(2_500_000)
        raise ValueError
    assert capsys.readouterr().err == "loading: 2.5 MB of 3.0 MB, stopped after 1.5 s\n"


@pytest.mark.parametrize(("enabled", "quiet"), [(False, False), (True, True)])
@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_progress_is_shown_only_where_it_is_wanted(
    enabled: bool, quiet: bool, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", kind())
    with suppress(ValueError), log.quiet():
        raise ValueError  # an error ends the quiet too
    for hush, shown in ((quiet, enabled and not quiet), (False, enabled)):
        with log.quiet() if hush else nullcontext(), log.progress("it", 7, "rows", enabled=enabled) as advance:
            advance(3)
            advance(4)
        assert bool(sys.stderr.getvalue()) is shown  # type: ignore[attr-defined] # it is a StringIO


@pytest.mark.parametrize(("unit", "amounts"), [("rows", ["7/9", "rows"]), ("bytes", ["7/9 bytes"])])
def test_a_terminal_has_a_bar(unit: str, amounts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    with log.progress("[it]", 9, unit, enabled=True) as advance:
        advance(3)
        advance(4)
    shown = sys.stderr.getvalue()  # type: ignore[attr-defined] # it is a StringIO
    assert all(text in shown for text in ("[it]", *amounts)), shown


def test_a_clock_counts_from_its_own_beginning(clock: Any, capsys: pytest.CaptureFixture[str]) -> None:
    say = log.Clock()
    clock.now += 12.34
    say("the model is read")
    assert capsys.readouterr().err == "  12.3 s  the model is read\n"
