"""The example of a vision-language model, with few images."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from examples import colours
from tests import worlds
from tests.started import Command, Started, forked_ranks


def train(args: Sequence[str], *, cwd: Path, check: bool) -> None:
    os.chdir(cwd)
    command = Command(args, {}, text=True)
    command.communicate()
    assert command.returncode == 0 or not check


def run_example(arguments: list[str]) -> int:
    """Run the example with forks for its commands, as in tests/test_demo.py."""
    make_model = colours.make_model
    colours.make_model = lambda out: worlds.run(1, make_model, out)
    colours.subprocess = SimpleNamespace(run=train)
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"
    with forked_ranks():
        colours.main(Path(arguments[0]), 20)
    return 0


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_example_runs(tmp_path: Path) -> None:
    (tmp_path / "new" / "recipe").mkdir(parents=True)
    with Started([str(tmp_path / "new")], main=run_example) as started:
        assert started.end(220) == 0, started.output
    assert "of 20 new images are named rightly" in started.output
