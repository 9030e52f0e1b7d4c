"""The files in examples/launch: as far as they can be tried where there is no SLURM, Kubernetes or Ray."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import parse_args

import meshwright as mw
from meshwright.train import rank
from tests.runs import chats, file_of, source

FILES = Path(__file__).parents[1] / "examples" / "launch"

STUBS = {
    "scontrol": 'if [ "$1" = show ]; then printf "first\\nsecond\\n"; else echo "scontrol $*" >> "$CALLS"; fi',
    "srun": """
shift
trap 'kill -USR1 $a $b' USR1
SLURM_NODEID=0 "$@" & a=$!
SLURM_NODEID=1 "$@" & b=$!
wait $a; wait $a; x=$?; wait $b; y=$?; exit $((x | y))""",
    "torchrun": """
echo "$*" >> "$CALLS"
trap 'exit 1' USR1
touch "$CALLS.$SLURM_NODEID"
if [ "$WAITS" = yes ]; then sleep 20 & wait; fi""",
}


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """The environment of a job of two nodes; what is called goes to the file CALLS."""
    for name, text in STUBS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    return os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "CALLS": str(tmp_path / "args"), "WAITS": "",
        "SLURM_JOB_ID": "123", "SLURM_JOB_NODELIST": "x[0-1]", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "8",
    }  # fmt: skip


def test_slurm(slurm: dict[str, str]) -> None:
    """A torchrun of each node, with arguments that it knows; and a run file is required."""
    script = str(FILES / "slurm.sh")
    assert "file of the run" in subprocess.run(["bash", script], capture_output=True, text=True, check=False).stderr
    subprocess.run(["bash", script, "a run.toml"], env=slurm, check=True, timeout=20)
    message = sorted(Path(slurm["CALLS"]).read_text().splitlines())
    for number, line in enumerate(message):
        args = parse_args(line.replace("a run.toml", "run.toml").split())
        assert (args.nnodes, args.node_rank, args.nproc_per_node) == ("2", number, "8")
        assert (args.master_addr, args.master_port, args.shutdown_timeout) == ("first", 20123, 570)
        assert "SIGUSR1" in args.signals_to_handle
        assert (args.training_script, args.training_script_args) == ("meshwright", ["train", "run.toml"])
        assert line.endswith("train a run.toml")
    assert len(message) == 2


def test_slurm_before_the_time_limit(slurm: dict[str, str]) -> None:
    """The signal reaches every torchrun, and the job is queued again."""
    child = subprocess.Popen(["bash", str(FILES / "slurm.sh"), "run.toml"], env=slurm | {"WAITS": "yes"})
    until = time.monotonic() + 20
    while not all(Path(f"{slurm['CALLS']}.{node}").exists() for node in (0, 1)):
        assert time.monotonic() < until
        time.sleep(0.05)
    child.send_signal(signal.SIGUSR1)
    assert child.wait(10) == 1
    assert Path(slurm["CALLS"]).read_text().splitlines()[-1] == "scontrol requeue 123"


def test_kubernetes() -> None:
    job = yaml.safe_load((FILES / "kubernetes.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    command = job["spec"]["trainer"]["command"]
    args = parse_args(command[1:])
    assert (command[0], args.training_script, args.max_restarts) == ("torchrun", "meshwright", 0)
    [patch] = job["spec"]["runtimePatches"]
    [node] = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > args.shutdown_timeout
    [container] = pod["containers"]
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}


def test_ray() -> None:
    """Every import of meshwright in the file exists."""
    tree = ast.parse((FILES / "ray_train.py").read_text())
    taken = {ast.unparse(each) for each in ast.walk(tree) if isinstance(each, ast.Attribute)}
    assert {"mw.Trainer", "mw.train.read", "config.mesh.world", "config.launch.timeout_s"} <= taken
    assert callable(mw.Trainer)
    assert callable(mw.train.read)


def test_restarts_that_would_meet_old_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torchrun's restarts with a store that outlives the ranks are refused before any work."""
    chats(tmp_path / "chats.jsonl")
    config = mw.train.read(file_of(tmp_path, source(tmp_path / "m", "qwen3_tied")))
    for name, value in {"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_USE_AGENT_STORE": "True", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        rank.as_rank(config, lambda _: "")
    assert "--max-restarts=3 of torchrun" in capsys.readouterr().err
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    assert rank.as_rank(config, lambda _: "fine") == "fine"
