"""Kill one of four ranks at a random moment. The run restarts by itself, and ends like an undisturbed one: the same
bytes in its checkpoint and export, the same documents and tokens in every step of every rank.

    python -m tests.killed --moments 10
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path

from meshwright.data import Feed
from meshwright.data.feed import Streams
from meshwright.train import config_file, launch
from meshwright.train.failure import OVERCOME
from meshwright.weights import MANIFEST
from tests.runs import chats, file_of, source
from tests.started import Started, forked_ranks, gone

_MESH = {"fsdp": 2, "tp": 2}
STEPS, _SAVE_EVERY = 30, 4
_SECONDS = 100.0
_DATE = re.compile(rb'"date": "[^"]*"|"checksum": "[^"]*"')  # of the manifest, the checksum of which the date is in


@dataclass(frozen=True)
class Killed:
    """The rank, and where the run was: its last logged step, and the seconds since its ranks began."""

    rank: int
    step: int
    after_s: float
    restarts: int
    wrong: tuple[str, ...] = ()  # apart from the state at the end

    def __str__(self) -> str:
        return f"rank {self.rank} after {self.after_s:.2f} s, at step {self.step}; {self.restarts} restarts"


def prepare(at: Path, steps: int, mesh: Mapping[str, int] = _MESH) -> Path:
    """Write the run file. The data are tokenised already, so that the command has no children but ranks."""
    chats(at / "chats.jsonl")
    path = file_of(
        at, source(at / "m", "qwen3_tied"), mesh=mesh, launch={"max_restarts": 100},
        train={"steps": steps, "dtype": "float32"}, save={"every": _SAVE_EVERY},
    )  # fmt: skip
    launch.prepared(config_file.read(path))
    return path


def undisturbed(path: Path, out: Path, world: int) -> float:
    """Return how long the ranks ran."""
    with _started(path, out, world) as run:
        began = time.monotonic()
        assert run.end(_SECONDS) == 0, run.output[-3000:]
    return time.monotonic() - began


def killed(path: Path, out: Path, moment: float, rank: int, world: int) -> Killed | None:
    """Kill a rank. Return None if it had ended before."""
    with _started(path, out, world) as run:
        ranks, began = run.ranks, time.monotonic()
        while time.monotonic() - began < moment and run.more():
            pass
        after, step = time.monotonic() - began, _steps(out)
        try:
            os.kill(ranks[rank], signal.SIGKILL)
        except ProcessLookupError:
            return None
        assert run.end(_SECONDS) == 0, run.output[-3000:]
    restarts = len([*(out / "logs").iterdir()]) - 1
    if not restarts:
        return None
    named = f"rank {rank} of {world} was killed (SIGKILL)" in (out / OVERCOME).read_text()
    wrong = (*([] if named else ["the rank was not named"]), *([] if gone(ranks) else ["a rank is left"]))
    return Killed(rank, step, after, restarts, wrong)


@contextmanager
def _started(path: Path, out: Path, world: int) -> Iterator[Started]:
    """Yield the run once it has all its ranks."""
    with forked_ranks(), _recorded_feeds(out), Started(["train", str(path), "--set", f"out={out}"]) as run:
        run.until(lambda: len(run.ranks) == world)
        yield run


@contextmanager
def _recorded_feeds(out: Path) -> Iterator[None]:
    """Let every rank record the documents of each step, and a checksum of their tokens and labels."""
    real = Feed.step

    def step(self: Feed, first: int) -> Streams:
        streams = real(self, first)
        content = hashlib.sha256()
        for batch in streams.batches:
            content.update(batch.tokens.numpy().tobytes() + batch.labels.numpy().tobytes())
        numbers = [first + m * self.num_ranks + self.rank for m in range(self.micro_batches)]
        record = [first, content.hexdigest(), *map(self.place, numbers)]
        with (out / f"fed-{os.environ['RANK']}.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")
        return streams

    Feed.step = step  # type: ignore[method-assign]
    try:
        yield
    finally:
        Feed.step = real  # type: ignore[method-assign]


def _steps(out: Path) -> int:
    file = out / "metrics.jsonl"
    return file.read_text().count('"kind": "step"') if file.is_file() else 0


def state(out: Path, steps: int, world: int) -> dict[str, object]:
    """Return all that a run ends with. A repeated step must get the same documents."""
    result: dict[str, object] = {**last_files(out, steps)}
    for rank in range(world):
        lines = [json.loads(line) for line in (out / f"fed-{rank}.jsonl").read_text().splitlines()]
        fed = {first: record for first, *record in lines}
        assert len(fed) == steps
        assert all(fed[first] == record for first, *record in lines), f"rank {rank} got other documents"
        result[f"documents of rank {rank}"] = sorted(fed.items())
    return result


def last_files(out: Path, steps: int) -> dict[str, bytes]:
    """Return the bytes of the last checkpoint and of the export, without dates."""
    files = {
        str(file.relative_to(out)): _DATE.sub(b"", file.read_bytes()) if file.name == MANIFEST else file.read_bytes()
        for folder in (out / "checkpoints" / f"step-{steps:06d}", out / "export")
        for file in folder.rglob("*")
        if file.is_file()
    }
    assert sum(name.endswith(".safetensors") for name in files) > 3, sorted(files)
    return files


def differences(ours: Mapping[str, object], other: Mapping[str, object]) -> list[str]:
    return sorted(name for name in {*ours, *other} if ours.get(name) != other.get(name))


def at_random_moments(
    at: Path, num: int, seed: int, steps: int = STEPS, mesh: Mapping[str, int] = _MESH
) -> Iterator[tuple[Killed, list[str]]]:
    """Spread the moments over the life of the ranks: one somewhere in each of `num` equal parts."""
    dice, path, world = random.Random(seed), prepare(at, steps, mesh), prod(mesh.values())
    life = undisturbed(path, at / "whole", world)
    whole, number = state(at / "whole", steps, world), 0
    while number < num:
        out = at / f"killed-{number}-{dice.randint(0, 1 << 30)}"
        kill = killed(path, out, life * (number + dice.random()) / num, dice.randrange(world), world)
        if kill is None:
            life *= 0.95  # the run had ended: the undisturbed one was slower
        else:
            number += 1
            yield kill, [*kill.wrong, *differences(state(out, steps, world), whole)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.killed", description=__doc__)
    parser.add_argument("--moments", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    num_wrong = 0
    with tempfile.TemporaryDirectory() as at:
        for kill, wrong in at_random_moments(Path(at), options.moments, options.seed):
            print(f"{kill}: {f'not the same: {wrong}' if wrong else 'the same state'}", flush=True)
            num_wrong += bool(wrong)
    print(f"{options.moments - num_wrong} of {options.moments} ended in the state of an undisturbed run")
    return int(num_wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
