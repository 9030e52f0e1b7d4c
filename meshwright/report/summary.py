"""Compose the text and tables of a report in Python, so that they can be read without the page's script."""

from __future__ import annotations

import datetime
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.filesize import decimal

from ..errors import counted
from ..expert_collapse import ExpertUse
from ..plan.html import Cell
from .run_files import Run
from .starts import endings

_MOST_IMAGES = 8
_JPEG = re.compile(r"[A-Za-z0-9+/]{1,40000}={0,2}")  # base64 of at most 30 kB


def outcome(run: Run) -> tuple[str, str]:
    """Return how far a run came and how it ended; and whether that is good, bad or still open.

    "good" ends: all data, or early stopping. Signals and limits are "open", since such a run is usually resumed.
    """
    step, total, ends = run.last["step"], run.num_steps, run.of("end")
    of_total = f" of {total:,}" if total else ""
    why = str(ends[-1].get("why", "")) if ends else ""
    if run.failure:
        return f"failed after step {step:,}{of_total}", "bad"
    if not ends:
        return f"at step {step:,}{of_total}", "open"
    if why:
        return f"ended at step {step:,}{of_total} by {why}", "good" if why == "early stopping" else "open"
    return f"done, {counted(step, 'step')}", "good"


def tiles(run: Run, *, only_differing: bool = False) -> list[tuple[str, str]]:
    """Return the headline figures; with several runs, only those that may differ.

    Throughput is a median, not a mean: the first step compiles, and steps with a checkpoint or an evaluation are
    longer.
    """
    last, best, layout = run.last, run.best, run.json("layout.json")
    rows = [("loss of the last step", figure(last.get("train/loss")))]
    if best:
        rows.append((f"lowest held-out loss, step {best[1]:,}", figure(best[0])))
    rows += [] if only_differing else [("tokens trained on", with_unit(last.get("train/tokens")))]
    rows.append(("tokens a second, median", with_unit(_median(run, "throughput/tokens_per_s"))))
    if mfu := _median(run, "throughput/mfu"):
        rows.append(("MFU, median", f"{mfu:.1%}"))
    if peak := last.get("memory/peak_bytes"):
        rows.append(("peak memory of a rank", decimal(int(peak))))
    if layout.get("parameters") and not only_differing:
        trained = layout.get("trained", layout["parameters"])
        part = f", {with_unit(trained)} trained" if trained < layout["parameters"] else ""
        rows.append((f"parameters{part}", with_unit(layout["parameters"])))
    num = len(run.starts)
    rows.append((f"took, in {num} starts" if num > 1 else "took", _duration(run)))
    return rows


def differing_fields(runs: Sequence[Run]) -> list[list[str]]:
    """Return the config fields in which runs differ, except output and logging, which change no curve.

    Nested tables are flattened to dotted names, as `--set` takes them.
    """
    flat = [dict(_flat(_config(run))) for run in runs]
    names = dict.fromkeys(name for each in flat for name in each if name != "out" and not name.startswith("log."))
    rows = [[name, *(_text(each.get(name, "")) for each in flat)] for name in names]
    return [row for row in rows if len({*row[1:]}) > 1]


def parameter_table(run: Run) -> list[list[str]]:
    """Return a row for each kind of parameter."""
    rows = run.json("layout.json").get("table", [])
    return [
        [str(row.get("name", "")), f"{row.get('count', 1)}", " x ".join(map(str, row.get("shape", []))),
         str(row.get("dtype", "")), "yes" if row.get("trained") else "frozen", str(row.get("cut", "")),
         decimal(int(row.get("bytes_per_rank", 0)))]
        for row in rows
    ]  # fmt: skip


def starts(run: Run) -> tuple[list[str], list[list[str | Cell]]]:
    """Return the table of starts: time, steps, mesh, ranks, end. Past starts are grey."""
    ended, past = endings(run.starts, run.overcome, run.failure), len(run.starts) - 1
    rows: list[list[str | Cell]] = [
        [
            Cell(when(start.time), "whole"), f"{start.begins:,}", f"{start.last:,}",
            Cell(start.on.replace(",", " "), "whole"), f"{start.world:,}", Cell(how, "overcome" if n < past else ""),
        ]
        for n, (start, how) in enumerate(zip(run.starts, ended, strict=True))
    ]  # fmt: skip
    return ["started", "from step", "to step", "mesh", "ranks", "how it ended"], rows


def when(time: float) -> str:
    """Format a time."""
    return f"{datetime.datetime.fromtimestamp(time):%Y-%m-%d %H:%M}"


def experts_warning(run: Run) -> str:
    """Return a warning if the router no longer uses some experts, else "".

    See `expert_collapse`: an expert counts as unused if it had almost no tokens for many steps.
    """
    use = ExpertUse()
    for line in (*run.of("start"), *run.of("step")):
        use.take(line)
    return use.warning()


def mesh(run: Run) -> str:
    """Return the mesh of a run."""
    layout = run.json("layout.json")
    sizes = " ".join(f"{axis}={size}" for axis, size in layout.get("mesh", {}).items() if size != 1)
    return f"{counted(int(layout.get('world', 1)), 'rank')}{', ' + sizes if sizes else ''}"


def checkpoint_rows(run: Run) -> list[list[str]]:
    """Return the table of checkpoints.

    The time is that of the whole save, which an asynchronous save spends in the background.
    """
    return [_checkpoint(line) for line in run.of("save")]


def _checkpoint(line: Mapping[str, Any]) -> list[str]:
    """Return a row of the table of checkpoints."""
    took = f"{line.get('seconds', 0):.1f} s"
    return [f"{line['step']:,}", str(line.get("path", "")), took, "best" if line.get("best") else ""]


def held_out(run: Run) -> tuple[list[str], list[list[str]]]:
    """Return the table of held-out losses."""
    names = sorted({name for line in run.of("eval") for name in line if name.startswith("eval/")})
    head = ["step", *(name.removeprefix("eval/").replace("/", ", ") for name in names)]
    return head, [[f"{line['step']:,}", *(figure(line.get(name)) for name in names)] for line in run.of("eval")]


def environment(run: Run) -> list[list[str]]:
    """Return the table of the environment."""
    return [[name, _text(value)] for name, value in run.json("environment.json").items()]


def proof(run: Run) -> tuple[str, bool] | None:
    """Return the result of `meshwright verify --json`, if a user put that file into the run."""
    verification = run.json("verify.json")
    if not verification:
        return None
    ok = verification.get("ok") is True
    return f"meshwright verify {'passed' if ok else 'FAILED'} on {verification.get('mesh', 'its mesh')}", ok


def figure(value: Any) -> str:
    """Format a number with four digits.

    Readers compare about four digits; the files have all of them.
    """
    if value is None:
        return "-"
    return f"{value:.4f}" if isinstance(value, float) and 1e-3 < abs(value) < 1e4 else f"{value:.4g}"


def with_unit(value: Any) -> str:
    """Format a large number, as in 12.3 M."""
    if value is None:
        return "-"
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g}"


def _median(run: Run, name: str) -> float | None:
    """Return the median over steps."""
    values = sorted(line[name] for line in run.of("step") if line.get(name) is not None)
    return values[len(values) // 2] if values else None


def _duration(run: Run) -> str:
    """Return the time of all steps, without the time between starts."""
    seconds = sum(line.get("time/step_s") or 0.0 for line in run.of("step"))
    return str(datetime.timedelta(seconds=round(seconds)))


def _config(run: Run) -> Mapping[str, Any]:
    """Return the parsed config of a run, {} if invalid."""
    try:
        return tomllib.loads(run.texts.get("config.toml", ""))
    except tomllib.TOMLDecodeError:
        return {}


def _flat(value: Any, at: str = "") -> Iterable[tuple[str, Any]]:
    """Yield the fields of nested tables by dotted name."""
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield from _flat(each, f"{at}.{name}" if at else name)
    elif isinstance(value, list) and value and isinstance(value[0], Mapping):
        for number, each in enumerate(value):
            yield from _flat(each, f"{at}[{number}]")
    else:
        yield at, value


def _text(value: Any) -> str:
    """Format a value as TOML does."""
    return "true" if value is True else "false" if value is False else str(value)


def images(run: Run) -> list[tuple[str, str, str]]:
    """Return the file, the row and a base64 JPEG of each image that a run shows. Invalid entries are left out."""
    listed = run.json("images.json").get("images")
    entries = [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
    texts = [tuple(str(each.get(name, "")) for name in ("file", "place", "jpeg")) for each in entries[:_MOST_IMAGES]]
    return [(file, place, jpeg) for file, place, jpeg in texts if _JPEG.fullmatch(jpeg)]
