"""Runs on two hosts, under torchrun: a network namespace each, or two addresses of one. One of them is cut off."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from meshwright.train import config_file, launch
from tests.hosts import Hosts, two_hosts
from tests.runs import chats, file_of, lines, losses, on_mesh, source
from tests.started import Started, forked_ranks, gone

TIMEOUT_S = 10.0  # on a busy machine a rank may not run for some seconds


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with ExitStack() as stack:
        try:
            result = stack.enter_context(two_hosts())
        except OSError as error:
            pytest.skip(f"neither network namespaces nor a second address of the loopback device: {error}")
        yield result


def run_of(at: Path) -> Path:
    chats(at / "chats.jsonl")
    path = file_of(
        at, source(at / "m", "qwen3_tied"), mesh={"fsdp": 2}, train={"dtype": "float32"},
        save={"every": 4, "wait": True}, launch={"timeout_s": TIMEOUT_S},
    )  # fmt: skip
    launch.prepared(config_file.read(path))
    return path


def started(stack: ExitStack, hosts: Hosts, arguments: list[str], max_restarts: int = 0) -> tuple[Started, Started]:
    """Start both, and wait for some steps."""
    stack.enter_context(forked_ranks())
    first, second = (
        stack.enter_context(hosts.start(number, arguments, max_restarts=max_restarts)) for number in (0, 1)
    )
    first.until(lambda: re.search("step +5/", first.output))
    return first, second


@pytest.mark.slow
def test_two_hosts_and_a_restart(tmp_path: Path, hosts: Hosts) -> None:
    """A rank dies, and torchrun starts all of them again. The losses are those of one host."""
    path = run_of(tmp_path)
    with ExitStack() as stack:
        first, second = started(stack, hosts, ["train", str(path)], max_restarts=1)
        os.kill(second.ranks[0], signal.SIGKILL)
        assert [host.end() for host in (first, second)] == [0, 0], first.output[-3000:] + second.output[-3000:]
    assert [line["from"] for line in lines(tmp_path, "start")] == [0, 4]
    result = losses(tmp_path)
    (tmp_path / "out").rename(tmp_path / "hosts")
    on_mesh(path, {"fsdp": 2})
    assert result == losses(tmp_path)
    assert (tmp_path / "hosts" / "export" / "config.json").is_file()


@pytest.mark.slow
def test_a_host_that_is_cut_off(tmp_path: Path, hosts: Hosts) -> None:
    """Both hosts end soon by themselves and name the lost ranks; no process stays."""
    path, ends = run_of(tmp_path), {}
    with ExitStack() as stack:
        command = ["train", str(path), "--set", "train.steps=2000", "save.every=2000"]
        both = first, second = started(stack, hosts, command)
        ranks, began = [*first.ranks, *second.ranks], time.monotonic()
        hosts.cut(second)
        for host in both:
            ends[host] = (host.end(), time.monotonic() - began)
            hosts.mend(second)
    assert [code for code, _ in ends.values()] == [1, 1]
    assert max(seconds for _, seconds in ends.values()) < TIMEOUT_S + 15, ends
    assert len(ranks) == 2
    assert gone(ranks, 1)
    assert "meshwright: rank 1: no sign of life" in first.output
    assert "Lost or out of reach: rank 0, on other machines" in second.output or not hosts.both[1].namespace
    why = (tmp_path / "out" / "failure.txt").read_text()
    assert why.startswith("rank 0 failed: rank 1: no sign of life"), why
    assert f"is in {tmp_path / 'out' / 'failure.txt'}" in first.output
