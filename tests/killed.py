"""One of four ranks is killed at a random moment. The run starts again by itself, and ends as if nothing had happened:
the same bytes in its checkpoint and export, the same documents and tokens in every step of every rank.

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
from pathlib import Path

from meshwright.data import Feed
from meshwright.data.feed import Streams
from meshwright.train import config_file, launch
from meshwright.train.failure import OVERCOME
from meshwright.weights import MANIFEST
from tests.runs import chats, file_of, source
from tests.started import Started, forked_ranks, gone

_MESH, WORLD = {"fsdp": 2, "tp": 2}, 4
STEPS, _SAVE_EVERY = 30, 4
_SECONDS = 100.0
_DATE = re.compile(rb'"date": "[^"]*"|"checksum": "[^"]*"')  # of the manifest, the checksum of which the date is in


@dataclass(frozen=True)
class Killed:
    """Which rank, and how far the run was: its last step that was told, and the seconds since its ranks began."""

    rank: int
    step: int
    after_s: float
    restarts: int
    wrong: tuple[str, ...] = ()  # but for what the run ended with

    def __str__(self) -> str:
        return f"rank {self.rank} after {self.after_s:.2f} s, at step {self.step}; {self.restarts} restarts"


def prepare(at: Path, steps: int, mesh: Mapping[str, int] = _MESH) -> Path:
    """The file of the run. Its data are tokenised, so that only ranks are children of the command."""
    chats(at / "chats.jsonl")
    path = file_of(
        at, source(at / "m", "qwen3_tied"), mesh=mesh, launch={"max_restarts": 100},
        train={"steps": steps, "dtype": "float32"}, save={"every": _SAVE_EVERY},
    )  # fmt: skip
    launch.prepared(config_file.read(path))
    return path


def undisturbed(path: Path, out: Path) -> float:
    """How long its ranks lived."""
    with _started(path, out) as run:
        began = time.monotonic()
        assert run.end(_SECONDS) == 0, run.said[-3000:]
    return time.monotonic() - began


def killed(path: Path, out: Path, moment: float, rank: int) -> Killed | None:
    """None: the rank had ended before its moment came."""
    with _started(path, out) as run:
        ranks, began = run.ranks, time.monotonic()
        while time.monotonic() - began < moment and run.more():
            pass
        after, step = time.monotonic() - began, _steps(out)
        try:
            os.kill(ranks[rank], signal.SIGKILL)
        except ProcessLookupError:
            return None
        assert run.end(_SECONDS) == 0, run.said[-3000:]
    restarts = len([*(out / "logs").iterdir()]) - 1
    if not restarts:
        return None
    named = f"rank {rank} of {WORLD} was killed (SIGKILL)" in (out / OVERCOME).read_text()
    wrong = (*([] if named else ["the rank was not named"]), *([] if gone(ranks) else ["a rank is left"]))
    return Killed(rank, step, after, restarts, wrong)


@contextmanager
def _started(path: Path, out: Path) -> Iterator[Started]:
    """The run, as soon as it has all its ranks."""
    with forked_ranks(), _feeds_tell(out), Started(["train", str(path), "--set", f"out={out}"]) as run:
        run.until(lambda: len(run.ranks) == WORLD)
        yield run


@contextmanager
def _feeds_tell(out: Path) -> Iterator[None]:
    """Every rank writes down what it is given: of which documents, and a checksum of tokens and labels."""
    real = Feed.step

    def step(self: Feed, first: int) -> Streams:
        found = real(self, first)
        content = hashlib.sha256()
        for batch in found.batches:
            content.update(batch.tokens.numpy().tobytes() + batch.labels.numpy().tobytes())
        numbers = [first + m * self.num_ranks + self.rank for m in range(self.micro_batches)]
        told = [first, content.hexdigest(), *map(self.place, numbers)]
        with (out / f"seen-{os.environ['RANK']}.jsonl").open("a") as file:
            file.write(json.dumps(told) + "\n")
        return found

    Feed.step = step  # type: ignore[method-assign]
    try:
        yield
    finally:
        Feed.step = real  # type: ignore[method-assign]


def _steps(out: Path) -> int:
    file = out / "metrics.jsonl"
    return file.read_text().count('"kind": "step"') if file.is_file() else 0


def state(out: Path, steps: int) -> dict[str, object]:
    """All that a run ends with. A step that was made twice was given the same both times."""
    found: dict[str, object] = {**last_files(out, steps)}
    for rank in range(WORLD):
        lines = [json.loads(line) for line in (out / f"seen-{rank}.jsonl").read_text().splitlines()]
        seen = {first: told for first, *told in lines}
        assert len(seen) == steps
        assert all(seen[first] == told for first, *told in lines), f"rank {rank} was given other documents"
        found[f"documents of rank {rank}"] = sorted(seen.items())
    return found


def last_files(out: Path, steps: int) -> dict[str, bytes]:
    """Return the bytes of the last checkpoint and of the export, without dates."""
    found = {
        str(file.relative_to(out)): _DATE.sub(b"", file.read_bytes()) if file.name == MANIFEST else file.read_bytes()
        for folder in (out / "checkpoints" / f"step-{steps:06d}", out / "export")
        for file in folder.rglob("*")
        if file.is_file()
    }
    assert sum(name.endswith(".safetensors") for name in found) > 3, sorted(found)
    return found


def differences(ours: Mapping[str, object], other: Mapping[str, object]) -> list[str]:
    return sorted(name for name in {*ours, *other} if ours.get(name) != other.get(name))


def at_random_moments(at: Path, num: int, seed: int, steps: int = STEPS) -> Iterator[tuple[Killed, list[str]]]:
    """Spread over the life of the ranks: each lies somewhere in a part of its own, from their start to their end."""
    dice, path = random.Random(seed), prepare(at, steps)
    life = undisturbed(path, at / "whole")
    whole, number = state(at / "whole", steps), 0
    while number < num:
        out = at / f"killed-{number}-{dice.randint(0, 1 << 30)}"
        found = killed(path, out, life * (number + dice.random()) / num, dice.randrange(WORLD))
        if found is not None:
            number += 1
            yield found, [*found.wrong, *differences(state(out, steps), whole)]


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.killed", description=__doc__)
    parser.add_argument("--moments", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(given)
    num_wrong = 0
    with tempfile.TemporaryDirectory() as at:
        for found, wrong in at_random_moments(Path(at), options.moments, options.seed):
            print(f"{found}: {f'not the same: {wrong}' if wrong else 'the same state'}", flush=True)
            num_wrong += bool(wrong)
    print(f"{options.moments - num_wrong} of {options.moments} ended in the state of an undisturbed run")
    return int(num_wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
