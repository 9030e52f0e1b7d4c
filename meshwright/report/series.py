"""What the charts show, as plain numbers for the page."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from .run_files import Run
from .starts import Start, stretches

POINTS = 2000  # of a curve, where two runs are compared at most
_MATRIX_NUMBERS = 90_000  # of all matrices of experts together

# Title and unit of each chart, in the order of the page, by the metric that it shows.
CHARTS: dict[str, tuple[str, str]] = {
    "train/loss": ("Loss", "of the training; with points: of held-out data"),
    "source": ("Loss of each source", ""),
    "train/grad_norm": ("Norm of the gradient", "before it is clipped"),
    "train/learning_rate": ("Learning rate", ""),
    "throughput/tokens_per_s": ("Tokens a second", "without filler, over all devices"),
    "throughput/mfu": ("Model FLOPs utilisation", "share of what the devices could do"),
    "memory/peak_bytes": ("Memory", "GB, the most that any rank had so far"),
    "time/data_wait_share": ("Waiting for data", "share of a step"),
    "experts/max_over_mean": ("Balance of the experts", "the busiest expert of the worst layer, by the mean"),
}
_FROM_ZERO = ("memory/peak_bytes",)  # a chart from the lowest value on would show 5% more memory as a cliff
_SOURCE = "train/loss/"


def chart_data(runs: Sequence[Run]) -> dict[str, Any]:
    """For the script of the page. Charts that no run has anything for are not there."""
    most = max(200, min(POINTS, 2 * POINTS // len(runs)))
    curves = {metric: _chart(metric, runs, most) for metric in CHARTS}
    return {
        "runs": [
            {"name": run.name, "begin": _begin(run), "marks": _marks(run), **_places(n, run, curves)}
            for n, run in enumerate(runs)
        ],
        "charts": [
            {"metric": metric, "curves": found, "from_zero": metric in _FROM_ZERO}
            for metric, found in curves.items()
            if found
        ],
        "experts": [_matrices(run, _MATRIX_NUMBERS // len(runs)) for run in runs],
    }


def _begin(run: Run) -> float:
    return float(run.of("step")[0].get("time") or 0)


def _marks(run: Run) -> list[dict[str, Any]]:
    """Where the run was started again, and the name of the mesh where that changes. The first has only a name."""
    kept = stretches(run.starts)
    names = [start.on for start in kept]
    changes = len({*names}) > 1
    return [
        {
            **_place(run, start),
            "mesh": names[n] if changes and (n == 0 or names[n] != names[n - 1]) else "",
            "again": n > 0,
        }
        for n, start in enumerate(kept)
    ]


def _place(run: Run, start: Start) -> dict[str, Any]:
    """Where a start begins, on each axis of the charts."""
    steps = run.of("step")
    line = steps[max(0, bisect_right(steps, start.begins, key=lambda line: line["step"]) - 1)]
    time = max(0.0, start.time - _begin(run))
    return {"step": line["step"], "tokens": line.get("train/tokens"), "time": round(time, 1)}


def _places(number: int, run: Run, curves: Mapping[str, Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """Where the points of all curves of a run lie, once. A curve then says by number which of them it has."""
    mine = [curve for found in curves.values() for curve in found if curve["run"] == number]
    steps = sorted({step for curve in mine for step in curve["step"]})
    at = {step: n for n, step in enumerate(steps)}
    for curve in mine:
        own = [at[step] for step in curve.pop("step")]
        curve["at"] = None if own == [*range(len(steps))] else own  # None: all of them
    lines = {line["step"]: line for line in (*run.of("eval"), *run.of("step"))}
    begin = _begin(run)
    return {
        "step": steps,
        "tokens": [lines[step].get("train/tokens") for step in steps],
        "time": [round((lines[step].get("time") or begin) - begin, 1) for step in steps],
    }


def _chart(metric: str, runs: Sequence[Run], most: int) -> list[dict[str, Any]]:
    found = []
    for number, run in enumerate(runs):
        whose = f"{run.name}: " if len(runs) > 1 else ""
        for name in _names(metric, run):
            label = run.name if name == metric else whose + name.removeprefix(_SOURCE)
            curve = _curve([(line, _value(line, name)) for line in run.of("step")], most)
            if any(value is not None for value in curve["y"]):
                found.append({"run": number, "label": label, **curve})
        if metric == "train/loss":
            found += _held_out(number, run, most)
    return found


def _names(metric: str, run: Run) -> list[str]:
    if metric != "source":
        return [metric]
    return sorted({name for line in run.of("step")[:50] for name in line if name.startswith(_SOURCE)})


def _value(line: Mapping[str, Any], name: str) -> float | None:
    value = line.get(name)
    if isinstance(value, list):  # one number a layer
        value = max((each for each in value if each is not None), default=None)
    if name == "memory/peak_bytes" and value is not None:
        value /= 1e9
    return value


def _curve(points: Sequence[tuple[Mapping[str, Any], float | None]], most: int) -> dict[str, Any]:
    kept = [points[at] for at in thinned([value for _, value in points], most)]
    return {
        "step": [line["step"] for line, _ in kept],
        "y": [significant(value) for _, value in kept],
    }


def _held_out(number: int, run: Run, most: int) -> Iterator[dict[str, Any]]:
    names = sorted({name for line in run.of("eval") for name in line if name.endswith("/loss")})
    for name in names:
        points = [(line, line.get(name)) for line in run.of("eval")]
        label = f"{run.name}: {name.removeprefix('eval/').removesuffix('/loss')}"
        yield {"run": number, "label": label, "points": True, **_curve(points, most)}


def _matrices(run: Run, most: int) -> dict[str, Any] | None:
    """Loads by the mean of their layer, in hundredths. Of many matrices as many as fit, evenly spaced."""
    lines = [line for line in run.of("experts") if line.get("load") and line["load"][0]]
    if not lines:
        return None
    size = sum(map(len, lines[-1]["load"]))
    num = max(2, min(len(lines), most // size))
    chosen = sorted({round(at * (len(lines) - 1) / max(1, num - 1)) for at in range(num)})
    return {
        "steps": [lines[at]["step"] for at in chosen],
        "loads": [[_by_mean(layer) for layer in lines[at]["load"]] for at in chosen],
    }


def _by_mean(layer: Sequence[float]) -> list[int]:
    mean = sum(layer) / len(layer)
    return [round(100 * load / mean) if mean else 0 for load in layer]


def thinned(values: Sequence[float | None], most: int) -> list[int]:
    """Which points stay. A gap (None) stays a gap where it is the first or the last of its stretch."""
    if len(values) <= most:
        return [*range(len(values))]
    kept: set[int] = set()
    stretches = max(1, most // 4)
    bounds = [len(values) * n // stretches for n in range(stretches + 1)]
    for begin, end in pairwise(bounds):
        there = [at for at in range(begin, end) if values[at] is not None]
        kept |= {begin, end - 1}
        if there:
            kept |= {min(there, key=lambda at: values[at] or 0.0), max(there, key=lambda at: values[at] or 0.0)}
    return sorted(kept)


def significant(value: float | None, digits: int = 5) -> float | None:
    """To so many significant digits: what a curve shows, and no more bytes."""
    return None if value is None else float(f"{value:.{digits}g}")
