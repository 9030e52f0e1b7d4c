"""Results of oracles: a finding for each failed comparison, a margin for each comparison with its bound.

Every rank appends both to a file as soon as they are known. So the results of a rank survive its death, when a reader
needs them most.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    `name`: the parameter, key or collective. `what`: facts, with numbers. `guess`: the likely cause, which may be
    mistaken where two mistakes give the same numbers; "" without one.
    """

    oracle: str
    name: str
    what: str
    guess: str = ""

    def __str__(self) -> str:
        return f"{self.oracle} {self.name}: {self.what}{'; likely: ' if self.guess else ''}{self.guess}"


@dataclass(frozen=True)
class Margin:
    """A margin, from a comparison to its bound: the largest error of `count` values, the bound, and where it is.

    A check that passes reports one too, so that "pass" never means "compared nothing".

    `what`: the values that were compared. `worst`, `allowed`: the largest error and its bound; a bound of 0 means that
    values must be equal.
    """

    oracle: str
    what: str
    count: int
    worst: float = 0.0
    allowed: float = 0.0
    where: str = ""

    @property
    def share(self) -> float:
        """The largest error as a share of what is allowed; above 1 the check fails. NaN is the worst."""
        return (math.inf if math.isnan(self.worst) else self.worst / self.allowed) if self.allowed else 0.0

    def __str__(self) -> str:
        if not self.count:
            return f"no {self.what}"
        if not self.allowed:
            return f"{self.count:,} {self.what}, all equal"
        where = f", in {self.where}" if self.where else ""
        return f"{self.count:,} {self.what}: {self.worst:.1e} off, {self.allowed:.0e} allowed{where}"


@dataclass
class Notes:
    """Findings and margins of one rank. With a file, each is written at once, as a line of JSON."""

    file: Path | None = None
    findings: list[Finding] = field(default_factory=list)
    margins: list[Margin] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)  # oracles that ran to completion

    def add_findings(self, oracle: str, findings: Iterable[Finding]) -> None:
        """Run an oracle to its end and record its findings. Oracles are generators, so an oracle that raises has not
        ended."""
        for finding in findings:
            self.findings.append(finding)
            self._write("finding", asdict(finding))
        if oracle and oracle not in self.ended:
            self.ended.append(oracle)
            self._write("ended", oracle)

    def add(self, others: Notes) -> None:
        """Include the notes of another run, for example of the reference."""
        for finding in others.findings:
            self.add_findings("", [finding])
        for margin in others.margins:
            self.add_margin(margin)
        for oracle in others.ended:
            self.add_findings(oracle, [])

    def add_margin(self, margin: Margin) -> None:
        """Record how close a comparison came to its bound."""
        self.margins.append(margin)
        self._write("margin", asdict(margin))

    def _write(self, kind: str, content: Any) -> None:
        if self.file is not None:
            with self.file.open("a") as out:
                out.write(json.dumps([kind, content]) + "\n")


def read_notes(folder: Path) -> Notes:
    """Read the notes of all ranks, including those that died.

    A finding that several ranks share is kept once. Margins are merged: their counts add up over ranks. A margin beyond
    its bound becomes a finding if its oracle has none: an oracle may record a comparison and forget to report it.
    """
    out = Notes()
    for file in sorted(folder.glob("*.notes")):
        for kind, content in _lines(file):
            if kind == "finding":
                out.findings.append(Finding(**content))
            elif kind == "margin":
                out.margins.append(Margin(**content))
            elif content not in out.ended:
                out.ended.append(content)
    out.findings = list(dict.fromkeys(out.findings))
    out.margins = merged(out.margins)
    reported = {finding.oracle for finding in out.findings}
    out.findings += [
        _unreported(margin) for margin in out.margins if margin.share > 1 and margin.oracle not in reported
    ]
    return out


def _unreported(margin: Margin) -> Finding:
    what = f"{margin.what}: {margin.worst:.1e} off, {margin.allowed:.1e} allowed"
    return Finding(margin.oracle, margin.where or margin.what, what, "the oracle recorded this and did not report it")


def _lines(file: Path) -> Iterator[tuple[str, Any]]:
    """Parse the lines up to the first incomplete one: a rank that was killed may have left half a line."""
    for line in file.read_text().splitlines():
        try:
            kind, content = json.loads(line)
        except ValueError:
            return
        yield kind, content


def merged(margins: Iterable[Margin]) -> list[Margin]:
    """Merge the margins of each oracle that compare the same kind of value: counts add up, and the worst remains."""
    out: dict[tuple[str, str], Margin] = {}
    for margin in margins:
        kind = (margin.oracle, margin.what)
        before = out.get(kind, margin)
        worse = margin if margin.share > before.share else before
        count = margin.count + (before.count if kind in out else 0)
        out[kind] = Margin(*kind, count, worse.worst, worse.allowed, worse.where)
    return list(out.values())
