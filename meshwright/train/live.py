"""What a person sees of a run: a thread of the launcher follows its files and draws, or prints plain lines."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from .metrics import HISTORY, Lines, clock, parsed, tail_of
from .rank import OURS
from .terminal import Frame, Seen

_TICK_S = 0.25
_ABOUT = ("kind", "step", "time", "attempt", "nan")  # of a line, not of what it tells
_ASKED = "signal {}: the step is finished and the run saved; a second one ends it at once"
_ASKED_EARLY = "signal {}: the ranks end, which have made no step yet; a second one ends them at once"
_GRACE_S = 2.0  # after a second signal, until ranks that are stuck are left to themselves


class Tail:
    """The lines that are added to a file, which may not be there yet. The last one is kept back until it is whole."""

    def __init__(self, file: Path, *, at_end: bool = False) -> None:
        self.file, self._rest = file, b""
        self._at = file.stat().st_size if at_end and file.exists() else 0

    def lines(self) -> Iterator[str]:
        if not self.file.exists():
            return
        with self.file.open("rb") as opened:
            opened.seek(self._at)
            text = self._rest + opened.read()
            self._at = opened.tell()
        *whole, self._rest = text.split(b"\n")
        yield from (line.decode(errors="replace") for line in whole)


class Display(threading.Thread):
    """Shows a run until it is left. `starts` is called before each start of its ranks."""

    def __init__(
        self, seen: Seen, out: Path, *, plain: bool, every: int, asked: Sequence[int] = ()
    ) -> None:  # fmt: skip
        super().__init__(daemon=True, name="display")
        self.console = Console()
        self.plain = plain or not self.console.is_terminal or self.console.is_dumb_terminal
        self.seen, self.metrics = seen, Tail(out / "metrics.jsonl", at_end=True)
        self.lines = Lines(seen.num_steps, every)
        self.log = Tail(out / "none")
        self.num_steps_seen, self._warned = 0, False
        self._last, self._began, self._ends = "", time.monotonic(), threading.Event()
        self._asked, self._said_so, self._lock = asked, False, threading.Lock()
        for line in parsed(tail_of(self.metrics.file, HISTORY).decode(errors="replace").splitlines()):
            seen.take(line)
        seen.starts(again=False)

    def starts(self, log: Path, *, again: bool) -> None:
        """The ranks, the first of which writes to `log`."""
        with self._lock:
            self.seen.starts(again=again)
            self.log, self._last, self._began, self.num_steps_seen = Tail(log), "", time.monotonic(), 0

    def __enter__(self) -> Display:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ends.set()
        self.join()

    def run(self) -> None:
        with self._live() as live:
            while True:
                ends = self._ends.wait(_TICK_S)
                self.follow()
                self._heed()
                if isinstance(live, Live):
                    live.update(self._picture(ends=ends), refresh=True)
                if ends:
                    return
                if len(self._asked) > 1 and not self._ends.wait(_GRACE_S):
                    break
        say(f"signal {self._asked[-1]}: ended at once; what came after the last checkpoint is lost")
        os._exit(128 + self._asked[-1])  # the ranks go with this process

    def _picture(self, *, ends: bool) -> RenderableType:
        """A frame, and while it is drawn again an empty line: there the terminal writes the ^C of a person. Behind a
        full line it would go on in the next one, and the frame would be drawn one line too low."""
        return Frame(self.seen, "") if ends else Group(Frame(self.seen, self.status()), Text())

    def _heed(self) -> None:
        if self._asked and self.plain and not self._said_so:
            say(self.status())
            self._said_so = True

    def _live(self) -> AbstractContextManager[Live | None]:
        if self.plain:
            return nullcontext()
        return Live(
            console=self.console, auto_refresh=False, screen=False, redirect_stderr=sys.stderr.isatty(),
            vertical_overflow="crop",
        )  # fmt: skip

    def follow(self) -> None:
        """Take what the ranks have written since."""
        with self._lock:
            self._follow()

    def _follow(self) -> None:
        for text in self.log.lines():
            if text.startswith(OURS):
                say(text.removeprefix(OURS))
            self._last = text.removeprefix(OURS).strip() or self._last
        for line in parsed(self.metrics.lines()):
            self.seen.take(line)
            self.num_steps_seen += line["kind"] == "step"
            self.lines.num_steps = self.seen.num_steps
            if self.plain and not self._warned and (warning := self.seen.experts.warning()):
                say(f"warning: {warning}")  # once; the live view shows it all the time
                self._warned = True
            if self.plain:
                self.lines.write(line["kind"], line["step"], {k: v for k, v in line.items() if k not in _ABOUT})

    def status(self) -> str:
        if self._asked:
            return (_ASKED if self.seen.begun else _ASKED_EARLY).format(self._asked[0])
        if self.seen.begun:
            return ""
        return f"no step yet, {clock(time.monotonic() - self._began)}: {self._last or 'the ranks are starting'}"


def say(text: str) -> None:
    """Above the live view, and never in the middle of it: a rank cannot do this."""
    sys.stderr.write(f"{OURS}{text}\n")
    sys.stderr.flush()
