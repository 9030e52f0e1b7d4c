"""Check a GPU that is lent for a quarter of an hour: kernels, NCCL, steps against transformers, profiles, decisions.

    python -m bench.gpu_check --out DIR                     # 13 minutes: every stage, in the order of the list
    python -m bench.gpu_check --only kernels nccl --minutes 5
    python -m bench.gpu_check --only decide --out DIR       # the tables again, from what DIR holds
    python -m bench.gpu_check --wheels WHEELS               # also packages that the machine lacks
    python -m bench.gpu_check --rehearse                    # everything on a CPU, at tiny sizes: finds typos, not times

Each stage is a command of its own with a limit: one that fails, hangs or prints nonsense ends as such and stops no
other, and rows that it printed before count. The tables come last, and stand in DIR/tables.md as rows for
bench/results.md, with the machine and its versions; DIR/STAGE.log has the whole output. DIR is $OUT unless --out names
it. A machine that is lent for less at a time: call again with --only for the rest, with the files of the first call in
DIR, and the tables hold both. Files of a rehearsal have other names. Exit code 1: a stage did not pass.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.gpu_tables import MIXTURE, decisions, expectations, stages_table, tables_in
from bench.machine import driver, triton_suits_fla

MINUTES = 13.0
LEAST_S = 10.0  # with less time left a stage is not begun
PASSED, GARBLED = "passed", "printed no table"
KERNEL_TESTS = [
    "tests/test_kernels_gpu.py", "tests/test_delta_kernel.py", "tests/ops/test_fp8.py", "tests/ops/test_fused.py",
    "tests/ops/test_kernels.py", "tests/test_muon.py",
]  # fmt: skip
SLOWER = 4  # times the limit of a stage, in a rehearsal
ABSENT = " is left out"  # in a line of a bench about what this machine lacks
# Left out on a GPU: a test of flash-linear-attention, which with some releases of triton tunes for minutes.
UNTIMED = "not test_delta_rule_on_an_accelerator"
FLA = ("fla_core", "flash_linear_attention")


@dataclass(frozen=True)
class Stage:
    """A command and its limit. `rehearsal`: its arguments on a CPU. `has_table`: it must print rows to pass."""

    name: str
    seconds: float
    arguments: Sequence[str]
    rehearsal: Sequence[str]
    has_table: bool = True


@dataclass(frozen=True)
class Outcome:
    """How a stage ended, after how many seconds of its limit, and its last line that is not of a table."""

    stage: str
    result: str
    seconds: float = 0.0
    limit: float = 0.0
    last: str = ""

    @property
    def cells(self) -> tuple[str, ...]:
        return self.stage, self.result, f"{self.seconds:.0f}", f"{self.limit:.0f}", self.last


def steps(name: str, seconds: float, model: str, *kinds: str, peers: Sequence[str] = ("transformers",)) -> Stage:
    arguments = ["bench.device", "--models", model, "--kinds", *kinds, "--peers", *peers, "--profile"]
    return Stage(name, seconds, arguments, [*arguments, "--rehearse"])


def tests(name: str, seconds: float, files: Sequence[str], rehearsed: Sequence[str]) -> Stage:
    pytest = ["pytest", "-q", "-x", "--durations=5", "-p", "no:cacheprovider"]
    return Stage(name, seconds, [*pytest, "-m", "gpu", *files], [*pytest, *rehearsed], has_table=False)


STAGES = [
    Stage("kernels", 160, ["bench.kernels"], ["bench.kernels", "--rehearse"]),
    tests("tests", 100, [*KERNEL_TESTS, "-k", UNTIMED], ["tests/test_kernels_experts.py"]),
    Stage("nccl", 110, ["bench.nccl"], ["bench.nccl", "--rehearse"]),
    tests("lost-ranks", 100, ["tests/test_nccl.py", "-k", "lost"], ["tests/test_nccl.py", "-k", "lost"]),
    steps("1.7b", 120, "qwen3-1.7b", "none", "compiled", "formulas", peers=("transformers", "liger")),
    steps("4b", 90, "qwen3-4b", "none", "compiled"),
    steps("8b", 90, "qwen3-8b", "moments", "moments+compiled"),
    steps("mixture", 110, MIXTURE, "none", "moments", "muon", "formulas", peers=("transformers", "float32")),
    steps("3.5-2b", 100, "qwen3.5-2b", "none", "compiled", "formulas"),
    steps("fp8-4b", 50, "qwen3-4b", "fp8", "fp8+compiled", peers=()),
    steps("fp8-8b", 50, "qwen3-8b", "fp8+moments", "fp8+moments+compiled", peers=()),
    steps("compiled-peer", 75, "qwen3-1.7b", peers=("compiled",)),  # last: compiling it takes the longest
]
DECIDE = "decide"  # no command: only the tables


@dataclass(frozen=True)
class Folder:
    """Where logs and tables lie. Those of a rehearsal have other names, so that none is taken for a measurement."""

    path: Path
    rehearses: bool

    def log_of(self, stage: Stage) -> Path:
        return self.path / f"{stage.name}{'.rehearsal' if self.rehearses else ''}.log"

    @property
    def tables(self) -> Path:
        return self.path / ("rehearsal.md" if self.rehearses else "tables.md")

    def machines(self, now: str = "") -> str:
        """Return where the logs come from, from the first call on. `now`: where more stages are about to run."""
        file = self.path / ("machines.rehearsal.txt" if self.rehearses else "machines.txt")
        known = file.read_text().splitlines() if file.exists() else []
        if now and now not in known:
            file.write_text("\n".join([*known, now]) + "\n")
            known.append(now)
        return "; and ".join(known)


def run_stage(stage: Stage, limit: float, out: Folder, environment: Mapping[str, str]) -> Outcome:
    """Run a command until it ends or its limit is over; then its whole process group is killed."""
    arguments, began = stage.rehearsal if out.rehearses else stage.arguments, time.monotonic()
    with out.log_of(stage).open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments], stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True, env=dict(environment),
        )  # fmt: skip
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            kill_group(process)
    seconds, text = time.monotonic() - began, out.log_of(stage).read_text(errors="replace")
    return Outcome(stage.name, result_of(stage, code, text), seconds, limit, last_line(text))


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill what a stage started: ranks may outlive it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def result_of(stage: Stage, code: int | None, text: str) -> str:
    if code is None:
        return "killed at its limit"
    if code:
        return f"failed, exit code {code}" if code > 0 else f"ended by signal {-code}"
    return PASSED if not stage.has_table or any(table.rows for table in tables_in(text)) else GARBLED


def last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("|")]
    return lines[-1].replace("|", "/").strip()[:110] if lines else ""


def run_all(stages: Sequence[Stage], minutes: float, out: Folder, environment: Mapping[str, str]) -> Iterator[Outcome]:
    """Run stages one after the other within the minutes that all of them have."""
    ends = time.monotonic() + 60 * minutes
    for stage in stages:
        left, limit = ends - time.monotonic(), stage.seconds * (SLOWER if out.rehearses else 1)
        if left < LEAST_S:
            log = out.log_of(stage)
            rows = f"; its rows are of {date_of(log)}" if log.exists() else ""
            outcome = Outcome(stage.name, f"not run: no time was left{rows}", limit=limit)
        else:
            outcome = run_stage(stage, min(left, limit), out, environment)
        print(f"{stage.name}: {outcome.result}, {outcome.seconds:.0f} s. {outcome.last}", flush=True)
        yield outcome


def report(outcomes: Sequence[Outcome], out: Folder, origin: str) -> str:
    """Return how stages ended, and the tables of every stage whose log lies in the folder."""
    files = {stage.name: out.log_of(stage) for stage in STAGES}
    logs = {name: file.read_text(errors="replace") for name, file in files.items() if file.exists()}
    tables = {name: tables_in(log) for name, log in logs.items()}
    absent = dict.fromkeys(line.strip() for log in logs.values() for line in log.splitlines() if ABSENT in line)
    earlier = logs.keys() - {outcome.stage for outcome in outcomes}
    before = [Outcome(name, f"run before, {date_of(files[name])}") for name in logs if name in earlier]
    printed = [f"**{name}**\n\n{table}" for name, ours in tables.items() for table in ours if table.rows]
    title = f"## GPU check, {time.strftime('%Y-%m-%d')}"
    ended = stages_table(outcome.cells for outcome in [*outcomes, *before])
    return "\n\n".join([title, ". ".join([origin, *absent]), ended, *printed, expectations(tables), decisions(tables)])


def date_of(file: Path) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(file.stat().st_mtime))


def environment_with(wheels: Path | None, site: str, rehearses: bool) -> dict[str, str]:
    """Return the environment of stages: this clone, and the packages of `wheels`, installed into `site`."""
    paths = [str(Path.cwd()), *filter(None, [os.environ.get("PYTHONPATH")])]
    if wheels is not None:
        # flash-linear-attention would tune for minutes before it refuses some releases of triton.
        files = [str(f) for f in sorted(wheels.glob("*.whl")) if triton_suits_fla() or not f.name.startswith(FLA)]
        pip = ["pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--target"]
        if subprocess.run([sys.executable, "-m", *pip, site, *files], check=False, timeout=120).returncode:
            raise SystemExit(f"gpu_check: pip could not install the wheels of {wheels}, see above; no stage was run")
        paths.append(site)
    rehearsal = {"MESHWRIGHT_ALL": "1", "OMP_NUM_THREADS": "1"} if rehearses else {}
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", **rehearsal}


def origin_in(environment: Mapping[str, str], rehearses: bool) -> str:
    """Name GPU, driver and the versions that stages see."""
    command = [sys.executable, "-m", "bench.machine"]
    seen = subprocess.run(command, env=dict(environment), capture_output=True, text=True, timeout=60, check=True)
    return seen.stdout.strip() + (". A rehearsal: times mean nothing" if rehearses else "")


def main(arguments: Sequence[str] | None = None) -> int:
    options = parsed(arguments)
    stages = [stage for stage in STAGES if not options.only or stage.name in options.only]
    out, outcomes = Folder(Path(options.out), options.rehearse), list[Outcome]()
    out.path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as site:
        environment = environment_with(options.wheels, site, options.rehearse)
        origin = out.machines(origin_in(environment, options.rehearse) if stages else "")
        for outcome in run_all(stages, options.minutes, out, environment):
            outcomes.append(outcome)
            out.tables.write_text(report(outcomes, out, origin) + "\n")  # each time: whoever lent it may end this
    text = report(outcomes, out, origin)
    out.tables.write_text(text + "\n")
    print(f"\n{text}\n\n{out.tables}", flush=True)
    return int(any(outcome.result != PASSED for outcome in outcomes))


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*(stage.name for stage in STAGES), DECIDE]
    parser.add_argument("--only", nargs="+", choices=names, metavar="STAGE", help=f"some of: {', '.join(names)}")
    parser.add_argument("--minutes", type=float, help=f"for all stages (default {MINUTES:g}; a rehearsal has an hour)")
    parser.add_argument("--out", default=os.environ.get("OUT", "gpu_check"), metavar="DIR", help="$OUT, or ./gpu_check")
    parser.add_argument(
        "--wheels", type=Path, metavar="DIR", help="install the wheels of DIR for the stages, without pip's index"
    )
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, at tiny sizes")
    options = parser.parse_args(arguments)
    if options.minutes is None:
        options.minutes = 60.0 if options.rehearse else MINUTES
    if not options.minutes > 0:
        parser.error(f"--minutes {options.minutes:g} must be above 0")
    if options.wheels is not None and not any(options.wheels.glob("*.whl")):
        parser.error(f"--wheels {options.wheels} has no *.whl file")
    if not options.rehearse and driver().startswith("no GPU") and options.only != [DECIDE]:
        parser.error("nvidia-smi is not there, so this machine has no GPU; --rehearse tries everything on a CPU")
    return options


if __name__ == "__main__":
    sys.exit(main())
