"""`python -m bench.gpu_check`: whatever a stage does, the next ones run, and its rows count."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
import torch

from bench import gpu, gpu_check, gpu_tables
from bench.gpu_check import Stage
from meshwright.ops import kernels
from meshwright.ops.kernels import trials

ENDS = {
    "fails": "failed, exit code 3", "hangs": "killed at its limit", "garbage": "printed no table", "good": "passed",
}  # fmt: skip


def fake(how: str, seconds: float) -> Stage:
    command = ["tests.fake_stage", how]
    return Stage(how, seconds, command, command)


def is_alive(pid: str) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"  # a zombie has ended


def test_a_stage_that_fails_hangs_or_prints_nonsense_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "STAGES", [fake(how, 3.0 if how == "hangs" else 10.0) for how in ENDS])
    monkeypatch.setattr(gpu_check, "SLOWER", 1)
    assert gpu_check.main(["--rehearse", "--out", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    for how, end in ENDS.items():
        assert re.search(rf"^\| {how} \| {end} \|", text, re.MULTILINE), text
        assert (f"| {how} | meshwright, none | 0.5 |" in text) == (how != "garbage"), "rows before the end count"
    assert (tmp_path / "rehearsal.md").read_text() in text
    child = re.findall(r"child (\d+)", (tmp_path / "hangs.rehearsal.log").read_text())[0]
    until = time.monotonic() + 5
    while is_alive(child) and time.monotonic() < until:
        time.sleep(0.02)
    assert not is_alive(child), "what a stage started ends with it"
    # The minutes of all stages are over: none begins, and the tables are those of the logs that are there.
    monkeypatch.setattr(gpu_check, "origin_in", lambda *_: "another machine")
    assert gpu_check.main(["--rehearse", "--minutes", "0.1", "--only", "good", "--out", str(tmp_path)]) == 1
    again = capsys.readouterr().out
    assert "A rehearsal: times mean nothing; and another machine\n" in again, "the logs come from both"
    assert re.search(
        r"^\| good \| not run: no time was left; its rows are of \d.* \|(.*\n)+\| fails \| meshwright",
        again,
        re.MULTILINE,
    )


LOG = """a line before
| model | side, kind | step s | MFU |
|---|---|---|---|
| qwen3-1.7b | meshwright, none | 0.2500 | 40% |
  first step 3 s | not a row
| model | side, kind | kernel | ms | launches |
|---|---|---|---|---|
| qwen3-1.7b | meshwright, none | gemm | 1.00 | 7 |
| qwen3-1.7b | meshwright, compiled | 0.2000 | 51% |
| qwen3-1.7b | transformers | 0.2900 | 30% |
| qwen3-4b | meshwright, none | failed: OutOfMemoryError | - |

| model | side, kind | step s | MFU |
|---|---|---|---|
| qwen3-1.7b | meshwright, none | 0.2500 | 40% |
"""


def test_the_tables_of_a_log_and_what_they_decide() -> None:
    steps, kernels = gpu_tables.tables_in(LOG)
    assert [row[1] for row in steps.rows] == [
        "meshwright, none",
        "meshwright, compiled",
        "transformers",
        "meshwright, none",
    ]
    assert kernels.rows == [("qwen3-1.7b", "meshwright, none", "gemm", "1.00", "7")]
    tables = {"1.7b": [steps, kernels]}
    expected = gpu_tables.expectations(tables)
    assert "| 0.2000 (compiled) | 51 | transformers | 0.2900 | 1.45 | 1.5x: missed, 50% MFU: met |" in expected
    assert "| qwen3-4b | 0.531 | 0.440-0.452 | not measured |" in expected
    decided = gpu_tables.decisions(tables)
    assert "| layers of qwen3-1.7b | compiled 0.2 s, not compiled 0.25 s | 1.25 | compiled |" in decided
    assert "fp8" not in decided


@pytest.mark.parametrize(("off", "choice"), [("1.0e-03", "kernel"), ("5.0e-01", "formula"), ("nan", "formula")])
def test_a_kernel_that_is_wrong_is_not_chosen(off: str, choice: str) -> None:
    log = f"| op | off by | kernel ms | formula ms |\n|---|---|---|---|\n| loss | {off} | 1.0 | 2.0 |"
    assert gpu_tables.decisions({"kernels": gpu_tables.tables_in(log)}).endswith(f" {choice} |")


def test_kernels_are_switched_off_where_formulas_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours in both gates, as on a GPU; those of torch stay, and afterwards all are as before."""
    x = torch.ones(3, 4, dtype=torch.bfloat16)
    for gate, cache in ((kernels, "_agreed"), (trials, "_passed")):
        monkeypatch.setattr(gate, "SLOW", ())
        monkeypatch.setattr(gate, "in_own_thread", lambda trial, _: trial())
        monkeypatch.setattr(gate, cache, {})

    def plain(x: torch.Tensor, _: object) -> torch.Tensor:
        return x * 1

    def _triton_op(x: torch.Tensor, _: object) -> torch.Tensor:
        return x * 1

    def torch_op(x: torch.Tensor, _: object) -> torch.Tensor:
        return x * 1

    def used() -> list[bool]:
        chosen = [kernels.fastest(op, plain, (x,)) is op for op in (_triton_op, torch_op)]
        return [trials.agrees("an op", "a test", x.device, lambda: ([x], [x]), 0.0), *chosen]

    assert used() == [True, True, True]
    with gpu.formulas_only():
        assert used() == [False, False, True]
    assert used() == [True, True, True]


def test_the_fastest_way_that_is_right_multiplies_rows_of_experts() -> None:
    log = """| rows by expert | side | sizes | off by | ms |
|---|---|---|---|---|
| down | loop | 8 x 4 | 0.0e+00 | 9.0 |
| down | torch's | 8 x 4 | 1.0e-03 | 3.0 |
| down | ours | 8 x 4 | 1.0e-03 | 2.0 |
| adapters of rank 4 | loop | 8 x 4 | 0.0e+00 | 9.0 |
| adapters of rank 4 | ours | 8 x 4 | nan | 1.0 |
| gate_up | loop | 8 x 4 | 0.0e+00 | 9.0 |
| gate_up | torch's | 8 x 4 | 0.0e+00 | 3.0 |
| gate_up | ours | 8 x 4 | 5.0e-01 | 1.0 |"""
    decided = gpu_tables.decisions({"kernels": gpu_tables.tables_in(log)}).splitlines()[4:]
    assert decided == [
        "| rows by expert: down | ours 2 ms, torch's 3 ms | 1.50 | ours |",
        "| rows by expert: gate_up | torch's 3 ms, loop 9 ms | 3.00 | torch's |",
    ]
