"""Ranks that share a GPU over NCCL: their environment and refusals here, every axis and lost ranks on a GPU.

`make matrix` runs the lost ranks over gloo too; tests/test_lost_ranks.py has many more of those.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import nccl
from meshwright import cli
from meshwright.axes import Axes
from meshwright.errors import MeshwrightError
from meshwright.mesh import joining
from meshwright.verify import Options, plan, session
from tests import parts
from tests.lost_on_device import TIMEOUT_S

ROOT = Path(__file__).parents[1]
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
CPU = pytest.param("cpu", marks=pytest.mark.skipif(not parts.ALL, reason="make matrix runs it"))


def see(monkeypatch: pytest.MonkeyPatch, num: int) -> None:
    """Let torch see `num` GPUs."""
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: num)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num > 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)


def environment_in(rank: int, ranks_per_device: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the environment and the device of a rank of `verify` as it makes its mesh."""
    made: dict[str, Any] = {}
    options = Options(device="cuda", ranks_per_device=ranks_per_device)
    request = plan("tiny-qwen3", Axes(fsdp=4), options, say=lambda _: None)

    def make(*, device: str, **_: Any) -> None:
        made.update(os.environ, device=joining.device_of(device))

    of_run_ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "NCCL_MAX_CTAS": "8"}
    with monkeypatch.context() as patched:
        patched.setattr(session, "Mesh", make)
        patched.setattr(os, "environ", {**os.environ, **of_run_ranks})
        session.mesh_of(request)
    return made


@pytest.mark.parametrize(("ranks_per_device", "devices"), [(1, [0, 1, 2, 3]), (2, [0, 0, 1, 1]), (4, [0, 0, 0, 0])])
def test_ranks_of_a_device_are_hosts_for_nccl(
    ranks_per_device: int, devices: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    see(monkeypatch, 4)
    ranks = [environment_in(rank, ranks_per_device, monkeypatch) for rank in range(4)]
    assert [rank["device"] for rank in ranks] == [torch.device("cuda", index) for index in devices]
    shared = ranks_per_device > 1
    assert len({rank.get("NCCL_HOSTID") for rank in ranks}) == (4 if shared else 1)
    for rank in ranks:
        assert rank["NCCL_MAX_CTAS"] == "8", "what the user has set stays"
        assert ("NCCL_IB_DISABLE" in rank) == shared


REFUSED = [
    (0, "cuda", 2, r"needs 1 device of 2 ranks each.*has 0; leave out --device"),
    (1, "cuda", 1, r"fsdp=2 needs 2 devices.*has 1;.*--ranks-per-device 2"),
    (8, "cuda:0", 1, r"fsdp=2 needs 2 devices, --device cuda:0 has 1;.*--ranks-per-device 2"),
    (8, "cpu", 2, r"--ranks-per-device 2 .*needs --device cuda"),
    (8, "xpu", 2, r"--ranks-per-device 2 .*needs --device cuda"),
    (8, "cuda", 0, r"--ranks-per-device 0 must be .*at least 1"),
    (8, "cuda", 1.5, r"--ranks-per-device 1\.5 must be a whole number"),
    (8, "cuda", True, r"--ranks-per-device True must be a whole number"),
    (1, "cuda", 2, ""),
    (2, "cuda", 1, ""),
    (1, "cuda:0", 2, ""),
]  # fmt: skip


@pytest.mark.parametrize(("num", "device", "ranks_per_device", "message"), REFUSED)
def test_more_ranks_than_devices_have_room_for(
    num: int, device: str, ranks_per_device: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    see(monkeypatch, num)

    def request() -> None:
        options = Options(device=device, ranks_per_device=ranks_per_device)
        plan("tiny-qwen3", Axes(fsdp=2), options, say=lambda _: None)

    if not message:
        request()
        return
    with pytest.raises(MeshwrightError, match=message) as refused:
        request()
    assert "\n" not in str(refused.value)


def test_the_option_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    for number, message in (("two", "'two' is not a number above 0"), ("2", "needs --device cuda")):
        code: object = None
        try:
            code = cli.main(["verify", "tiny-qwen3", "--mesh", "fsdp=2", "--ranks-per-device", number])
        except SystemExit as error:
            code = error.code
        assert code == 2
        assert message in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.timeout(2 * nccl.SECONDS)
@pytest.mark.parametrize("axis", nccl.MESHES)
def test_an_axis_over_nccl(axis: str) -> None:
    result = nccl.verified(axis, *nccl.ON_ONE_GPU)
    assert result.code == 0, f"{result.row}\n{result.log}"
    assert result.output["ok"]


LOST = {
    "killed": r"ranks \[(0, )?1\] of 2 died without an error \(exit code (-\d+, )?-9\)",
    "asleep": r"rank 1: .*\bin asleep\b.*micro-batch 2 of 2",
}


@pytest.mark.parametrize("device", [CUDA, CPU])
@pytest.mark.parametrize("act", LOST)
def test_a_lost_rank_is_named(source: Path, device: str, act: str) -> None:
    """Where a rank hangs, the other says which before NCCL's watchdog ends it at the timeout."""
    command = [sys.executable, "-m", "tests.lost_on_device", device, act, str(source)]
    limit = 3 * TIMEOUT_S[device] + 40
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit, check=False)
    text = done.stdout + done.stderr
    assert done.returncode == 1, text
    named, ended = re.search(LOST[act], text), re.search("Watchdog caught collective operation timeout", text)
    assert named, text
    assert act == "killed" or ended is None or named.start() < ended.start(), f"torch ended it first:\n{text}"
