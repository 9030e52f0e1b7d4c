"""Tables of `bench.gpu_check`: read from logs, compared with what was expected, and turned into decisions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

_RULE = re.compile(r"\|(\s*:?-+:?\s*\|)+")
MOST_OFF = 2e-2  # of the norm, in bfloat16; NaN is more
NOISE = 1.02  # a ratio of times up to this decides nothing
MIXTURE = "qwen3-30b-a3b, 6 layers"
FLA = "flash-linear-attention"


@dataclass(frozen=True)
class Table:
    """A Markdown table."""

    header: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [self.header, ("---",) * len(self.header), *self.rows]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)

    def column(self, name: str, *key: str) -> float | None:
        """Return the number in a column of the row that begins with `key`; None without such a row or number."""
        if name not in self.header:
            return None
        cells = (row[self.header.index(name)] for row in self.rows if row[: len(key)] == key)
        return number(next(cells, ""))


Tables = Mapping[str, Sequence[Table]]


def number(cell: str) -> float | None:
    try:
        return float(cell.replace(",", "").rstrip("%"))
    except ValueError:
        return None


def cells_of(line: str) -> tuple[str, ...]:
    return tuple(cell.strip() for cell in line.strip().strip("|").split("|"))


def tables_in(log: str) -> list[Table]:
    """Read the Markdown tables of a log, between whose rows other lines may stand.

    A row belongs to the last table before it that is as wide; rows that are printed twice count once.
    """
    tables: list[Table] = []
    lines = [line.rstrip() for line in log.splitlines()]
    for line, following in pairwise([*lines, ""]):
        if not line.startswith("|") or not line.endswith("|") or _RULE.fullmatch(line):
            continue
        cells = cells_of(line)
        if _RULE.fullmatch(following):
            if all(table.header != cells for table in tables):
                tables.append(Table(cells))
            continue
        table = next((each for each in reversed(tables) if len(each.header) == len(cells)), None)
        if table is not None and cells not in table.rows:
            table.rows.append(cells)
    return tables


def value(tables: Tables, column: str, *key: str) -> float | None:
    """Return a number from whichever stage has it; the first where several do."""
    numbers = (table.column(column, *key) for of_stage in tables.values() for table in of_stage)
    return next((each for each in numbers if each is not None), None)


def step_of(tables: Tables, model: str, side: str) -> float | None:
    return value(tables, "step s", model, side)


@dataclass(frozen=True)
class Expected:
    """Seconds of a step: as measured before our kernels, and as expected with them, on an H200.

    `kinds`: of ours, without compiled layers and with them; the fastest counts. `ratio`, `mfu`, `most`: the goals, as
    times the peer, as percent and as seconds. `against`: the kernels that a peer must have for `ratio` to count.
    """

    model: str
    kinds: Sequence[str]
    before: str
    expected: str
    peer: str = "transformers"
    ratio: float | None = None
    mfu: float | None = None
    most: float | None = None
    against: str = ""


STEPS = [
    Expected("qwen3-1.7b", ("none", "compiled"), "0.254", "0.184-0.196", ratio=1.5, mfu=50),
    Expected("qwen3-4b", ("none", "compiled"), "0.531", "0.440-0.452", ratio=1.5, mfu=50),
    Expected("qwen3-8b", ("moments", "moments+compiled"), "-", "0.677 (roofline)"),
    Expected(MIXTURE, ("none",), "0.188", "0.118-0.130", "transformers, float32 + autocast", ratio=1.5),
    Expected(MIXTURE, ("moments",), "-", "-"),
    Expected("qwen3.5-2b", ("none", "compiled"), "1.338", "0.195-0.230", ratio=1 / 1.2, most=1.338 / 5, against=FLA),
]
# Milliseconds with our kernels, or TFLOP/s, by the first cells of a row: as prototypes reached them on an H200.
DELTA_RULE = ("2 x 4096", "16 x 1")
OPS = [
    (("loss",), "kernel ms", "33", "54 by the formula"),
    (("FP8 product",), "kernel ms", "0.40", "0.98 by the formula"),
    (("zeros of experts without rows",), "kernel ms", "0.034", "1.09 by the formula"),
    (("attention of equal documents",), "kernel ms", "1.05", "1.31 one by one"),
    ((*DELTA_RULE, "ours"), "forward ms", "0.60", "76 for both ways by the formula"),
    ((*DELTA_RULE, "ours"), "backward ms", "1.25", ""),
    (("grouped, forward",), "TFLOP/s", "630", "dense 648"),
    (("grouped, dx",), "TFLOP/s", "591", ""),
    (("grouped, dW",), "TFLOP/s", "488", ""),
]


def expectations(tables: Tables) -> str:
    """Return what was measured and what was expected: steps, then kernels."""
    header = "model", "before s", "expected s", "measured s", "MFU", "peer", "peer s", "peer / ours", "goal"
    steps = Table(header, [_expected_row(tables, each) for each in STEPS])
    rows = [
        (
            ", ".join(key),
            f"{expected}{f' ({note})' if note else ''}",
            _shown(value(tables, column, *key), ".3f"),
            column,
        )
        for key, column, expected, note in OPS
    ]
    kernels = Table(("kernel", "expected", "measured", "unit"), rows)
    return f"**Measured and expected** (of an H200, 8192 tokens a step)\n\n{steps}\n\n{kernels}"


def _expected_row(tables: Tables, each: Expected) -> tuple[str, ...]:
    times = {kind: step_of(tables, each.model, f"meshwright, {kind}") for kind in each.kinds}
    known = {kind: seconds for kind, seconds in times.items() if seconds}
    peer_side, peer = _peer(tables, each)
    if not known:
        return each.model, each.before, each.expected, "not measured", "-", peer_side, _shown(peer), "-", "-"
    kind = min(known, key=lambda name: known[name])
    seconds, mfu = known[kind], value(tables, "MFU", each.model, f"meshwright, {kind}")
    ratio = peer / seconds if peer else None
    goals = [_goal(mfu, each.mfu, "% MFU"), _goal(-seconds, each.most and -each.most, " s")]
    if each.against in peer_side:
        goals.insert(0, _goal(ratio, each.ratio, "x"))
    return (
        each.model, each.before, each.expected, f"{seconds:.4f} ({kind})", _shown(mfu, ".0f"), peer_side, _shown(peer),
        _shown(ratio, ".2f"), ", ".join(filter(None, goals)) or "-",
    )  # fmt: skip


def _peer(tables: Tables, each: Expected) -> tuple[str, float | None]:
    """Return the peer and its seconds: of transformers with the kernels of others where they are installed."""
    with_fla = f"{each.peer} + {FLA}"
    seconds = step_of(tables, each.model, with_fla)
    return (with_fla, seconds) if seconds else (each.peer, step_of(tables, each.model, each.peer))


def _goal(result: float | None, goal: float | None, unit: str) -> str:
    if goal is None:
        return ""
    state = "not measured" if result is None else "met" if result >= goal else "missed"
    return f"{abs(goal):.3g}{unit}: {state}"


def _shown(result: float | None, how: str = ".4f") -> str:
    return "-" if result is None else format(result, how)


def decisions(tables: Tables) -> str:
    """Return which defaults the times speak for."""
    rows = [
        *_of_ops(tables), *_of_grouped(tables), *_of_delta_rule(tables), *_of_steps(tables), *_of_fp8(tables),
    ]  # fmt: skip
    return f"**Decisions**\n\n{Table(('default', 'times', 'ratio', 'choose'), rows)}" if rows else "**Decisions**: none"


def _chosen(what: str, unit: str, sides: Mapping[str, float | None]) -> Iterator[tuple[str, ...]]:
    """Choose the faster of two sides, unless one was not measured."""
    (first, a), (second, b) = sides.items()
    if a and b:
        ratio, faster = b / a, first if a < b else second
        choice = faster if max(ratio, 1 / ratio) > NOISE else f"no difference above {NOISE - 1:.0%}"
        yield what, f"{first} {a:.4g} {unit}, {second} {b:.4g} {unit}", f"{ratio:.2f}", choice


def _of_ops(tables: Tables) -> Iterator[tuple[str, ...]]:
    names: Iterable[str] = (
        row[0] for of_stage in tables.values() for t in of_stage if t.header[0] == "op" for row in t.rows
    )
    for name in names:
        kernel, formula = (value(tables, f"{side} ms", name) for side in ("kernel", "formula"))
        off = value(tables, "off by", name)
        if off is not None and off <= MOST_OFF:
            yield from _chosen(f"op: {name}", "ms", {"kernel": kernel, "formula": formula})
        else:
            yield f"op: {name}", f"off by {off}, {MOST_OFF} is allowed", "-", "formula"
    speeds = [value(tables, "TFLOP/s", f"grouped, {way}") for way in ("forward", "dx", "dW")]
    dense = value(tables, "TFLOP/s", "batched")
    if dense and all(speeds):
        share = min(each for each in speeds if each) / dense
        choice = "torch's" if share > 0.7 else "look for another"
        yield "grouped product", f"slowest {share:.0%} of dense", f"{share:.2f}", choice


def _of_grouped(tables: Tables) -> Iterator[tuple[str, ...]]:
    """Compare the two fastest ways that are right, for each of the sizes that were timed."""
    timed = [t for of_stage in tables.values() for t in of_stage if t.header[0] == "rows by expert"]
    for name in dict.fromkeys(row[0] for table in timed for row in table.rows):
        times = {
            row[1]: value(tables, "ms", *row[:2]) for table in timed for row in table.rows
            if row[0] == name and (number(row[table.header.index("off by")]) or 0.0) <= MOST_OFF
        }  # fmt: skip
        fastest = sorted((ms, side) for side, ms in times.items() if ms)[:2]
        if len(fastest) == 2:
            yield from _chosen(f"rows by expert: {name}", "ms", {side: ms for ms, side in fastest})


def _of_delta_rule(tables: Tables) -> Iterator[tuple[str, ...]]:
    times: dict[str, float | None] = {}
    for side in ("ours", FLA, "formula"):
        ways = [value(tables, f"{way} ms", *DELTA_RULE, side) for way in ("forward", "backward")]
        times[side] = sum(each for each in ways if each) if all(ways) else None
    for other in (FLA, "formula"):
        yield from _chosen("delta rule", "ms", {"ours": times["ours"], other: times[other]})


def _of_steps(tables: Tables) -> Iterator[tuple[str, ...]]:
    for each in STEPS:
        kinds = (*each.kinds, "formulas")[: len(each.kinds) + ("none" in each.kinds)]
        times = {kind: step_of(tables, each.model, f"meshwright, {kind}") for kind in kinds}
        plain = times[each.kinds[0]]
        if "formulas" in times:
            yield from _chosen(f"kernels in {each.model}", "s", {"kernels": plain, "formulas": times["formulas"]})
        if len(each.kinds) == 2:
            layers = {"compiled": times[each.kinds[1]], "not compiled": plain}
            yield from _chosen(f"layers of {each.model}", "s", layers)


def _of_fp8(tables: Tables) -> Iterator[tuple[str, ...]]:
    for model, plain in (("qwen3-4b", ("none", "compiled")), ("qwen3-8b", ("moments", "moments+compiled"))):
        wide = [step_of(tables, model, f"meshwright, {kind}") for kind in plain]
        low = [step_of(tables, model, f"meshwright, {'fp8' if k == 'none' else f'fp8+{k}'}") for k in plain]
        best = [min((each for each in times if each), default=None) for times in (low, wide)]
        yield from _chosen(f"matmuls of {model}", "s", {"fp8": best[0], "bfloat16": best[1]})


def stages_table(rows: Iterable[Sequence[str]]) -> str:
    return str(Table(("stage", "result", "s", "limit s", "last line"), [tuple(row) for row in rows]))
