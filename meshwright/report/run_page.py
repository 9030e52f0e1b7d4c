"""Build the HTML page of a report: text and tables first, then charts by an embedded script, without network access."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import counted
from ..plan.html import Cell, details, flowing, page, section, table, tag, wrap
from . import summary
from .run_files import Run
from .series import CHARTS, chart_data
from .starts import story

_HERE = Path(__file__).parent
_PARAMETER_COLUMNS = ["parameter", "count", "shape", "dtype", "trained", "cut", "a rank, all"]
_SAMPLES = 12  # number of sampling steps that are shown: the last ones, and the first


def report_page(runs: Sequence[Run], origin: Mapping[str, str]) -> str:
    """Return the page of some runs.

    Style, scripts and data are inlined, so the file can be mailed, and still opens in ten years.
    """
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    data = chart_data(runs)
    # Text comes first: a page that is printed, or read with scripts blocked, still has every number except the curves.
    sections = (
        _heading(title, runs), _history(runs), _differences(runs), _charts(data), _experts(data, runs),
        *(_details_of_run(run, with_starts=len(runs) > 1) for run in runs),
    )  # fmt: skip
    return page(title, origin, *sections, _script(data), style=(_HERE / "page.css").read_text("utf-8"))


def _heading(title: str, runs: Sequence[Run]) -> Iterator[str]:
    """Yield title, model, mesh, and for each run its verdict and figures."""
    model_name = runs[0].json("layout.json").get("model", "")
    model_chip = [tag("span", str(model_name), "chip")] if model_name else []
    yield wrap(
        "header", tag("p", "meshwright report", "eyebrow"), tag("h1", title),
        wrap("p", *model_chip, tag("span", _meshes(runs[0])), kind="mesh") if len(runs) == 1 else "",
    )  # fmt: skip
    for number, run in enumerate(runs):
        text, state = summary.outcome(run)
        name = tag("small", f"{run.name}: {_meshes(run)}") if len(runs) > 1 else ""
        kind = {"good": "pass", "bad": "fails", "open": ""}[state]
        key = wrap("i", kind=f"run run{number % 8}") if len(runs) > 1 else ""
        tiles = (
            wrap("div", tag("dt", what), tag("dd", value))
            for what, value in summary.tiles(run, only_differing=len(runs) > 1)
        )
        yield wrap(
            "div", wrap("div", wrap("p", key, name), tag("strong", text), kind=f"verdict {kind}".strip()),
            wrap("dl", *tiles, kind="tiles"), kind="run-head",
        ) + "\n"  # fmt: skip
        if run.failure:
            yield wrap("div", tag("pre", run.failure), kind="finding")
        if warning := summary.experts_warning(run):
            yield wrap("div", tag("p", warning), kind="finding warning")


def _meshes(run: Run) -> str:
    """Return the meshes of a run, in order."""
    return story(run.starts, run.last["step"]) or summary.mesh(run)


def _history(runs: Sequence[Run]) -> Iterator[str]:
    """Yield the starts of a single run that was restarted."""
    if len(runs) == 1 and len(runs[0].starts) > 1:
        yield section("Starts", *_starts(runs[0]))


def _starts(run: Run) -> Iterator[str]:
    """Yield a table of starts, and the failures that the run overcame.

    An elastic run may restart on another mesh, so a run is a list of starts.
    """
    yield tag("p", "Each start resumes from the newest checkpoint. The curves show every step as it was made last.")
    yield table(*summary.starts(run))
    boxes = [
        wrap("pre", flowing(f"{summary.when(each.time)}  {each.words}"), kind="finding overcome")
        for each in run.overcome
    ]
    yield _folded(f"{counted(len(boxes), 'failure')} that the run overcame", "".join(boxes), bool(boxes))


def _differences(runs: Sequence[Run]) -> Iterator[str]:
    """Yield the config fields in which runs differ.

    A reader of two curves first asks what was changed, so this comes before the curves.
    """
    if len(runs) < 2:
        return
    rows = summary.differing_fields(runs)
    text = "Config fields in which the runs differ." if rows else "The configs of the runs are equal."
    inner = [table(["field", *(run.name for run in runs)], [[Cell(row[0], "name"), *row[1:]] for row in rows])]
    yield section("What differs", tag("p", text), *(inner if rows else []))


def _charts(data: Mapping[str, Any]) -> Iterator[str]:
    """Yield the charts with their controls.

    The x axis can be steps, tokens or time: runs of different batch sizes are comparable only by tokens.
    """
    figures = [_figure(chart, [run["name"] for run in data["runs"]]) for chart in data["charts"]]
    controls = (
        '<div class="controls"><label>by <select id="axis"><option value="step">step</option>'
        '<option value="tokens">tokens</option><option value="time">time</option></select></label>'
        '<label>smooth the loss <input id="smooth" type="range" min="0" max="98" step="2" value="0"></label></div>'
    )
    about = "To zoom, drag the bar below a chart, or hold Ctrl and scroll. Hover over a curve to read its values."
    if any(mark["again"] for run in data["runs"] for mark in run["marks"]):
        about += " A vertical line marks a restart; a name next to it is the mesh from that step on."
    yield section("Curves", tag("p", about), controls, wrap("div", *figures, kind="charts"))


def _figure(chart: Mapping[str, Any], runs: Sequence[str]) -> str:
    """Return a chart with its legend: runs, or the sources of one run."""
    metric = chart["metric"]
    title, unit = CHARTS[metric]
    wide = " wide" if metric == "train/loss" else ""
    source_labels = [curve["label"] for curve in chart["curves"]] if metric == "source" else []
    names = runs if len(runs) > 1 else source_labels
    key = (wrap("span", tag("i", "", f"run run{n % 8}"), tag("small", name)) for n, name in enumerate(names))
    head = wrap("figcaption", tag("b", title), tag("small", unit), *key)
    return f'<figure class="chart{wide}">{head}<div class="plot" data-metric="{metric}"></div></figure>\n'


def _experts(data: Mapping[str, Sequence[object]], runs: Sequence[Run]) -> Iterator[str]:
    """Yield heat maps of expert load."""
    with_experts = [number for number, loads in enumerate(data["experts"]) if loads]
    if not with_experts:
        return
    figures = [
        wrap(
            "figure", wrap("figcaption", tag("b", runs[number].name) if len(runs) > 1 else "",
                           '<label>step <output></output> <input type="range" min="0" value="0"></label>'),
            f'<div class="plot heat" data-run="{number}"></div>', kind="chart wide",
        )
        for number in with_experts
    ]  # fmt: skip
    about = "Tokens of each expert, relative to the mean of its layer: 1 is balanced, 0 is an unused expert."
    yield section("Load of the experts", tag("p", about), *figures)


def _details_of_run(run: Run, *, with_starts: bool) -> Iterator[str]:
    """Yield all tables of a run, folded."""
    head, rows = summary.held_out(run)
    proof = summary.proof(run)
    inner = [
        *_samples(run),
        *_images(run),
        _folded("Starts", "".join(_starts(run)), with_starts and len(run.starts) > 1),
        _folded("Held-out data", table(head, rows), bool(rows)),
        _folded("Checkpoints", table(["step", "path", "took", ""], summary.checkpoint_rows(run)), bool(run.of("save"))),
        _folded(f"The mesh: {summary.mesh(run)}", _placed(run), bool(run.json("layout.json"))),
        _folded("The file of the run", tag("pre", run.texts.get("config.toml", "")), "config.toml" in run.texts),
        _folded("Where it ran", table(["", ""], summary.environment(run)), "environment.json" in run.texts),
    ]
    proof_tag = tag("p", proof[0], "pass" if proof[1] else "fails") if proof else ""
    yield section(f"{run.name} in detail", proof_tag, *inner)


def _folded(title: str, inner: str, shown: bool) -> str:
    """Return a folded section, or "" if it has no content."""
    return details(title, inner) if shown else ""


def _placed(run: Run) -> str:
    """Return the table of parameters."""
    rows = summary.parameter_table(run)
    return table(_PARAMETER_COLUMNS, [[Cell(row[0], "name"), *row[1:]] for row in rows])


def _images(run: Run) -> Iterator[str]:
    """Yield a few images of the training data. They are embedded, so the page needs no network."""
    figures = [
        wrap(
            "figure", f'<img alt="" src="data:image/jpeg;base64,{jpeg}">',
            wrap("figcaption", tag("small", Path(file).name, title=file), tag("small", Path(place).name, title=place)),
        )
        for file, place, jpeg in summary.images(run)
    ]  # fmt: skip
    if figures:
        yield wrap("div", tag("h3", "Some images that it is trained on"), wrap("div", *figures, kind="images"))


def _samples(run: Run) -> Iterator[str]:
    """Yield the newest samples unfolded, and earlier ones folded.

    Old samples are folded but present: they show when a model learned something.
    """
    *earlier, newest = sorted({line["step"] for line in run.of("sample")}) or [None]
    if newest is None:
        return
    yield _samples_of(run, newest)
    steps = sorted({*earlier[:1], *earlier[-_SAMPLES:]}, reverse=True)
    yield _folded("Samples of earlier steps", "".join(_samples_of(run, step) for step in steps), bool(steps))


def _samples_of(run: Run, step: int) -> str:
    """Return the samples of a step."""
    texts = (
        wrap("div", tag("p", str(line.get("prompt", "")), "prompt"), tag("p", str(line.get("text", ""))), kind="said")
        for line in run.of("sample")
        if line["step"] == step
    )
    return wrap("div", tag("h3", f"What the model writes after step {step:,}"), *texts, kind="samples")


def _script(data: object) -> Iterator[str]:
    """Yield the data and the scripts. `<` is escaped in the JSON, so that no text of a run can close the script tag."""
    payload = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    yield f'<script type="application/json" id="data">{payload}</script>'
    for name in ("charts.min.js", "page.js"):
        yield f"<script>{(_HERE / name).read_text('utf-8')}</script>"
