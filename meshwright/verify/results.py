"""What oracles say: a finding where something is wrong, a margin where nothing is; on disk, so that none is lost."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Finding:
    """Something that is wrong. `what` are facts, `guess` is the likely cause, which may be another."""

    oracle: str
    name: str  # of the parameter, key or collective
    what: str
    guess: str = ""

    def __str__(self) -> str:
        return f"{self.oracle} {self.name}: {self.what}{'; likely: ' if self.guess else ''}{self.guess}"


@dataclass(frozen=True)
class Margin:
    """How right something is: the worst of `count` things, what is allowed, and where it is."""

    oracle: str
    what: str  # the things that were compared
    count: int
    worst: float = 0.0
    allowed: float = 0.0  # 0: they must be equal
    where: str = ""

    @property
    def share(self) -> float:
        """Of what is allowed."""
        return self.worst / self.allowed if self.allowed else 0.0

    def __str__(self) -> str:
        if not self.count:
            return f"no {self.what}"
        if not self.allowed:
            return f"{self.count:,} {self.what}, all equal"
        where = f", in {self.where}" if self.where else ""
        return f"{self.count:,} {self.what}: {self.worst:.1e} off, {self.allowed:.0e} allowed{where}"


@dataclass
class Notes:
    """Findings and margins of one rank. With a file, they are there as soon as they are known."""

    file: Path | None = None
    findings: list[Finding] = field(default_factory=list)
    margins: list[Margin] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)  # oracles that came to their end

    def found(self, oracle: str, findings: Iterable[Finding]) -> None:
        """All that an oracle finds; then it has ended."""
        for finding in findings:
            self.findings.append(finding)
            self._tell("finding", asdict(finding))
        if oracle and oracle not in self.ended:
            self.ended.append(oracle)
            self._tell("ended", oracle)

    def add(self, others: Notes) -> None:
        """What was noted elsewhere."""
        for finding in others.findings:
            self.found("", [finding])
        for margin in others.margins:
            self.measured(margin)
        for oracle in others.ended:
            self.found(oracle, [])

    def measured(self, margin: Margin) -> None:
        self.margins.append(margin)
        self._tell("margin", asdict(margin))

    def _tell(self, kind: str, content: Any) -> None:
        if self.file is not None:
            with self.file.open("a") as out:
                out.write(json.dumps([kind, content]) + "\n")


def read_notes(folder: Path) -> Notes:
    """Of all ranks together, also of those that died: findings and margins that several ranks have, once."""
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
    return out


def _lines(file: Path) -> Iterator[tuple[str, Any]]:
    """A rank that was killed may have left half a line."""
    for line in file.read_text().splitlines():
        try:
            kind, content = json.loads(line)
        except ValueError:
            return
        yield kind, content


def merged(margins: Iterable[Margin]) -> list[Margin]:
    """One for each kind of things that an oracle compares: all of them counted, and the worst."""
    out: dict[tuple[str, str], Margin] = {}
    for margin in margins:
        kind = (margin.oracle, margin.what)
        before = out.get(kind, margin)
        worse = margin if margin.share > before.share else before
        count = margin.count + (before.count if kind in out else 0)
        out[kind] = Margin(*kind, count, worse.worst, worse.allowed, worse.where)
    return list(out.values())
