"""The words and tables of the page, made here and not by its script: they are there for every reader."""

from __future__ import annotations

import datetime
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.filesize import decimal

from ..errors import counted
from ..expert_collapse import ExpertUse
from ..plan.html import Cell
from .run_files import Run
from .starts import endings


def outcome(run: Run) -> tuple[str, str]:
    """How far it came and how it ended; and whether that is well, still open, or a failure."""
    step, total, ends = run.last["step"], run.num_steps, run.of("end")
    of = f" of {total:,}" if total else ""
    why = str(ends[-1].get("why", "")) if ends else ""
    if run.failure:
        return f"failed after step {step:,}{of}", "bad"
    if not ends:
        return f"at step {step:,}{of}", "open"
    if why:
        return f"ended at step {step:,}{of} by {why}", "good" if why == "early stopping" else "open"
    return f"done, {counted(step, 'step')}", "good"


def tiles(run: Run, *, short_ones: bool = False) -> list[tuple[str, str]]:
    """The figures that one looks for first; of several runs only what may differ."""
    last, best, layout = run.last, run.best, run.json("layout.json")
    found = [("loss of the last step", figure(last.get("train/loss")))]
    if best:
        found.append((f"lowest held-out loss, step {best[1]:,}", figure(best[0])))
    found += [] if short_ones else [("tokens trained on", with_unit(last.get("train/tokens")))]
    found.append(("tokens a second, median", with_unit(_median(run, "throughput/tokens_per_s"))))
    if mfu := _median(run, "throughput/mfu"):
        found.append(("MFU, median", f"{mfu:.1%}"))
    if peak := last.get("memory/peak_bytes"):
        found.append(("most memory of a rank", decimal(int(peak))))
    if layout.get("parameters") and not short_ones:
        found.append(("parameters", with_unit(layout["parameters"])))
    num = len(run.starts)
    found.append((f"took, in {num} starts" if num > 1 else "took", _duration(run)))
    return found


def differing_fields(runs: Sequence[Run]) -> list[list[str]]:
    """List the fields in which the configs differ, without where a run lies and what it logs: they change no curve."""
    flat = [dict(_flat(_config(run))) for run in runs]
    names = dict.fromkeys(name for each in flat for name in each if name != "out" and not name.startswith("log."))
    rows = [[name, *(_text(each.get(name, "")) for each in flat)] for name in names]
    return [row for row in rows if len({*row[1:]}) > 1]


def placed(run: Run) -> list[list[str]]:
    """Where parameters lie, a row a kind."""
    rows = run.json("layout.json").get("table", [])
    return [
        [str(row.get("name", "")), f"{row.get('count', 1)}", " x ".join(map(str, row.get("shape", []))),
         str(row.get("dtype", "")), "yes" if row.get("trained") else "frozen", str(row.get("cut", "")),
         decimal(int(row.get("bytes_per_rank", 0)))]
        for row in rows
    ]  # fmt: skip


def starts(run: Run) -> tuple[list[str], list[list[str | Cell]]]:
    """Every start: when, from which step to which, on which mesh, and how it ended; in grey what is past."""
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
    return f"{datetime.datetime.fromtimestamp(time):%Y-%m-%d %H:%M}"


def experts_warning(run: Run) -> str:
    """One sentence if the router has given up experts, else ""."""
    use = ExpertUse()
    for line in (*run.of("start"), *run.of("step")):
        use.take(line)
    return use.warning()


def mesh(run: Run) -> str:
    layout = run.json("layout.json")
    sizes = " ".join(f"{axis}={size}" for axis, size in layout.get("mesh", {}).items() if size != 1)
    return f"{counted(int(layout.get('world', 1)), 'rank')}{', ' + sizes if sizes else ''}"


def checkpoint_rows(run: Run) -> list[list[str]]:
    return [_checkpoint(line) for line in run.of("save")]


def _checkpoint(line: Mapping[str, Any]) -> list[str]:
    took = f"{line.get('seconds', 0):.1f} s"
    return [f"{line['step']:,}", str(line.get("path", "")), took, "best" if line.get("best") else ""]


def held_out(run: Run) -> tuple[list[str], list[list[str]]]:
    names = sorted({name for line in run.of("eval") for name in line if name.startswith("eval/")})
    head = ["step", *(name.removeprefix("eval/").replace("/", ", ") for name in names)]
    return head, [[f"{line['step']:,}", *(figure(line.get(name)) for name in names)] for line in run.of("eval")]


def environment(run: Run) -> list[list[str]]:
    return [[name, _text(value)] for name, value in run.json("environment.json").items()]


def proof(run: Run) -> tuple[str, bool] | None:
    """What `meshwright verify --json` found, where somebody put that into the run."""
    found = run.json("verify.json")
    if not found:
        return None
    ok = found.get("ok") is True
    return f"meshwright verify {'passed' if ok else 'FAILED'} on {found.get('mesh', 'its mesh')}", ok


def figure(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" if isinstance(value, float) and 1e-3 < abs(value) < 1e4 else f"{value:.4g}"


def with_unit(value: Any) -> str:
    """12.3 M."""
    if value is None:
        return "-"
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g}"


def _median(run: Run, name: str) -> float | None:
    found = sorted(line[name] for line in run.of("step") if line.get(name) is not None)
    return found[len(found) // 2] if found else None


def _duration(run: Run) -> str:
    """Of all attempts, without the time between them."""
    seconds = sum(line.get("time/step_s") or 0.0 for line in run.of("step"))
    return str(datetime.timedelta(seconds=round(seconds)))


def _config(run: Run) -> Mapping[str, Any]:
    try:
        return tomllib.loads(run.texts.get("config.toml", ""))
    except tomllib.TOMLDecodeError:
        return {}


def _flat(value: Any, at: str = "") -> Iterable[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield from _flat(each, f"{at}.{name}" if at else name)
    elif isinstance(value, list) and value and isinstance(value[0], Mapping):
        for number, each in enumerate(value):
            yield from _flat(each, f"{at}[{number}]")
    else:
        yield at, value


def _text(value: Any) -> str:
    return "true" if value is True else "false" if value is False else str(value)
