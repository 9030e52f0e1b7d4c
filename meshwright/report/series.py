"""Compute the data of the charts: metrics of runs as thinned series of plain numbers.

The page must stay small: a run of a million steps with ten metrics would be 200 MB of JSON. Thinned and rounded it
takes less than a megabyte, and still has every spike.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from .run_files import Run
from .starts import Start, surviving_starts

POINTS = 2000  # points of a curve, for one or two runs; fewer for more runs
_MATRIX_NUMBERS = 90_000  # cells of all heat maps together

# Title and unit of each chart, in the order of the page, by the metric that it shows.
CHARTS: dict[str, tuple[str, str]] = {
    "train/loss": ("Loss", "training; dots: held-out data"),
    "source": ("Loss of each source", ""),
    "train/accuracy": ("Accuracy", "share of pairs or documents; dots: held-out data"),
    "train/margins": ("Reward margin", "chosen minus rejected; dots: held-out data"),
    "train/kl": ("KL divergence", "of student and teacher, a mean over tokens; dots: held-out data"),
    "train/agreement": ("Agreement", "share of positions whose likeliest token is the teacher's"),
    "cosines": ("Cosines", "of a query with its positive; dashed: with the nearest other document"),
    "train/log_odds": ("Log odds ratio", "chosen against rejected; dots: held-out data"),
    "rewards": ("Rewards", "of chosen answers; dashed: of rejected ones"),
    "train/grad_norm": ("Gradient norm", "before clipping"),
    "train/mtp_loss": ("Loss of the MTP head", "cross-entropy of the token after next"),
    "train/mtp_acceptance": ("Accepted drafts", "share of tokens that the MTP head ranks first"),
    "train/learning_rate": ("Learning rate", ""),
    "throughput/tokens_per_s": ("Tokens a second", "without padding, over all devices"),
    "throughput/mfu": ("Model FLOPs utilisation", "of the devices' peak"),
    "memory/peak_bytes": ("Memory", "GB, peak of any rank so far"),
    "time/data_wait_share": ("Waiting for data", "share of a step"),
    "experts/max_over_mean": ("Expert balance", "busiest expert of the worst layer, relative to the mean"),
}
_FROM_ZERO = ("memory/peak_bytes",)  # if the axis started at the minimum, 5% more memory would look like a cliff
_SOURCE = "train/loss/"
# Metrics that share a chart.
_TOGETHER = {
    "rewards": ("train/rewards_chosen", "train/rewards_rejected"),
    "cosines": ("train/positive_cosine", "train/negative_cosine"),
}


def chart_data(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the data of all charts as JSON for the page's script. Charts without values are left out.

    Each curve refers to its x values by index into the run's shared lists, on all three axes (steps, tokens, seconds).
    """
    # The points of all runs together are bounded, so a comparison of ten runs is no slower to load than one.
    max_points = max(200, min(POINTS, 2 * POINTS // len(runs)))
    curves = {metric: _chart(metric, runs, max_points) for metric in CHARTS}
    return {
        "runs": [
            {"name": run.name, "begin": _begin(run), "marks": _marks(run), **_shared_axes(n, run, curves)}
            for n, run in enumerate(runs)
        ],
        "charts": [
            {"metric": metric, "curves": group, "from_zero": metric in _FROM_ZERO}
            for metric, group in curves.items()
            if group
        ],
        "experts": [_expert_loads(run, _MATRIX_NUMBERS // len(runs)) for run in runs],
    }


def _begin(run: Run) -> float:
    """Return the time of the first step."""
    return float(run.of("step")[0].get("time") or 0)


def _marks(run: Run) -> list[dict[str, Any]]:
    """Return the restarts of the run, each with its mesh if that changed."""
    stretches_of_run = surviving_starts(run.starts)
    names = [start.on for start in stretches_of_run]
    changes = len({*names}) > 1
    return [
        {
            **_mark_position(run, start),
            "mesh": names[n] if changes and (n == 0 or names[n] != names[n - 1]) else "",
            "again": n > 0,
        }
        for n, start in enumerate(stretches_of_run)
    ]


def _mark_position(run: Run, start: Start) -> dict[str, Any]:
    """Return where a start begins, on each of the three x axes."""
    steps = run.of("step")
    line = steps[max(0, bisect_right(steps, start.begins, key=lambda line: line["step"]) - 1)]
    time = max(0.0, start.time - _begin(run))
    return {"step": line["step"], "tokens": line.get("train/tokens"), "time": round(time, 1)}


def _shared_axes(number: int, run: Run, curves: Mapping[str, Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """Return the x values of a run, shared by its curves. A curve refers to them by index, which halves the page."""
    own_curves = [curve for group in curves.values() for curve in group if curve["run"] == number]
    steps = sorted({step for curve in own_curves for step in curve["step"]})
    at = {step: n for n, step in enumerate(steps)}
    for curve in own_curves:
        own_points = [at[step] for step in curve.pop("step")]
        curve["at"] = None if own_points == [*range(len(steps))] else own_points  # None: all of them
    lines = {line["step"]: line for line in (*run.of("eval"), *run.of("step"))}
    begin = _begin(run)
    return {
        "step": steps,
        "tokens": [lines[step].get("train/tokens") for step in steps],
        "time": [round((lines[step].get("time") or begin) - begin, 1) for step in steps],
    }


def _chart(metric: str, runs: Sequence[Run], max_points: int) -> list[dict[str, Any]]:
    """Return the curves of a metric."""
    curves = []
    for number, run in enumerate(runs):
        prefix = f"{run.name}: " if len(runs) > 1 else ""
        for name in _names(metric, run):
            label = run.name if name == metric else prefix + name.removeprefix(_SOURCE).removeprefix("train/")
            curve = _curve([(line, _value(line, name)) for line in run.of("step")], max_points)
            if any(value is not None for value in curve["y"]):
                curves.append({"run": number, "label": label, **curve})
        curves += _held_out_curves(metric.removeprefix("train/"), number, run, max_points)
    return curves


def _names(metric: str, run: Run) -> list[str]:
    """Return the names of a metric's curves; "source" has one for each source."""
    if metric in _TOGETHER:
        return [*_TOGETHER[metric]]
    if metric != "source":
        return [metric]
    return sorted({name for line in run.of("step") for name in line if name.startswith(_SOURCE)})


def _value(line: Mapping[str, Any], name: str) -> float | None:
    """Return a value of a line; for a value per layer, the largest.

    So the chart shows the worst layer.
    """
    value = line.get(name)
    if isinstance(value, list):  # one number per layer
        value = max((each for each in value if each is not None), default=None)
    if name == "memory/peak_bytes" and value is not None:
        value /= 1e9
    return value


def _curve(points: Sequence[tuple[Mapping[str, Any], float | None]], max_points: int) -> dict[str, Any]:
    """Return a thinned curve."""
    points_kept = [points[at] for at in thin_indices([value for _, value in points], max_points)]
    return {
        "step": [line["step"] for line, _ in points_kept],
        "y": [significant(value) for _, value in points_kept],
    }


def _held_out_curves(figure: str, number: int, run: Run, max_points: int) -> Iterator[dict[str, Any]]:
    """Yield a figure of the held-out sets, such as the loss, as points.

    Evaluations are rare, and a line between them would suggest values that were never measured.
    """
    names = sorted({name for line in run.of("eval") for name in line if name.endswith(f"/{figure}")})
    for name in names:
        points = [(line, line.get(name)) for line in run.of("eval")]
        label = f"{run.name}: {name.removeprefix('eval/').removesuffix(f'/{figure}')}"
        yield {"run": number, "label": label, "points": True, **_curve(points, max_points)}


def _expert_loads(run: Run, max_points: int) -> dict[str, Any] | None:
    """Return expert loads in percent of their layer's mean, for as many evenly spaced steps as fit.

    Each step has a matrix of layers x experts. Percentages of the mean make layers comparable, and integers keep the
    page small.
    """
    lines = [line for line in run.of("experts") if line.get("load") and line["load"][0]]
    if not lines:
        return None
    num_experts = sum(map(len, lines[-1]["load"]))
    num_shown = max(2, min(len(lines), max_points // num_experts))
    chosen = sorted({round(at * (len(lines) - 1) / max(1, num_shown - 1)) for at in range(num_shown)})
    return {
        "steps": [lines[at]["step"] for at in chosen],
        "loads": [[_percent_of_mean(layer) for layer in lines[at]["load"]] for at in chosen],
    }


def _percent_of_mean(layer: Sequence[float]) -> list[int]:
    """Return loads in percent of their mean."""
    mean = sum(layer) / len(layer)
    return [round(100 * load / mean) if mean else 0 for load in layer]


def thin_indices(values: Sequence[float | None], max_points: int) -> list[int]:
    """Return the indices of points to keep: first, last, minimum and maximum of each bin.

    Every n-th point or a mean would hide a loss spike of one step, which readers look for. Gaps (None) at the ends of a
    bin stay.
    """
    if len(values) <= max_points:
        return [*range(len(values))]
    kept: set[int] = set()
    num_bins = max(1, max_points // 4)
    edges = [len(values) * n // num_bins for n in range(num_bins + 1)]
    for begin, end in pairwise(edges):
        present = [at for at in range(begin, end) if values[at] is not None]
        kept |= {begin, end - 1}
        if present:
            kept |= {min(present, key=lambda at: values[at] or 0.0), max(present, key=lambda at: values[at] or 0.0)}
    return sorted(kept)


def significant(value: float | None, digits: int = 5) -> float | None:
    """Round to significant digits: enough for a curve, and a smaller page."""
    return None if value is None else float(f"{value:.{digits}g}")
