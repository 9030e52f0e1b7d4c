"""The file of a run: all mistakes at once, each with its place and the way out; every field can be set and is told."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

import meshwright as mw
from meshwright.train import toml
from meshwright.train.config import Config, OptimSection, TrainSection
from meshwright.train.schedule import schedule
from meshwright.train.toml import as_toml, documentation, num_tokens, read

ROOT = Path(__file__).parents[1]
PLAIN = 'model = "a"\nout = "b"\n[[data]]\npath = "x"\n'

MISTAKES = """modle = "Qwen3-8B"
out = 7
[mesh]
fsdp = 2
tp = "2"
[[data]]
path = "chats.jsonl"
kid = "chat"
[[data]]
path = "x"
weight = -1
share = 0.5
[train]
length = 8192
tokens_per_step = 100000
steps = 10
epochs = 3
lr = 1e-5
[optim]
schedule = "cosin"
warmup = 20
eps = nan
"""
TOLD = [
    "model: it is missing",
    "modle (line 1): there is no such field; did you mean model?",
    "out (line 2): input should be a valid string, not 7",
    "mesh.tp (line 5): input should be a valid integer, not '2'",
    "data[0].kid (line 8): there is no such field; did you mean kind?",
    "data[1].weight (line 11): input should be greater than 0, not -1",
    "train.lr (line 18): there is no such field; did you mean optim.lr?",
    "optim.schedule (line 20): input should be 'constant', 'linear', 'cosine' or 'wsd', not 'cosin'",
    "optim.eps (line 22): input should be",
    # contradictions among what is left
    "train.epochs (line 17): steps and epochs both say when the run ends; give one",
    "train.tokens_per_step (line 15): 100000 is no multiple of length x data ranks, 8192 x 2; take 98304 or 114688",
    "data[0].share: other sources have a share of the tokens; give all one or none",
    "optim.warmup (line 21): 20 steps of warm-up, and the run has 10",
]


def written(tmp_path: Path, text: str) -> Path:
    (tmp_path / "run.toml").write_text(text)
    return tmp_path / "run.toml"


def refused(tmp_path: Path, text: str, *sets: str) -> str:
    with pytest.raises(mw.ConfigError) as error:
        read(written(tmp_path, text), sets)
    return str(error.value)


def test_all_mistakes_at_once(tmp_path: Path) -> None:
    said = refused(tmp_path, MISTAKES)
    assert f"has {len(TOLD)} mistakes" in said
    for line in TOLD:
        assert line in said, said


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("x = ", "is no TOML"),
        ("", "data: it is missing"),
        ('model = "a"\nout = "b"\ndata = []\n', "data (line 3): list should have at least 1"),
        ('model = "a"\nout = "b"\n[[data]]\nkind = "text"\n', "data[0].path: it is missing"),
        (PLAIN + "share = 0.5\n", "with shares there are no epochs"),
        (PLAIN + 'share = 0.5\nweight = 2.0\n[train]\nsteps = 3\n', "give one"),
        (PLAIN + '[train]\ntokens = "lots"\n', "is no number of tokens"),
        (PLAIN + "[eval]\nevery = 5\n", "nothing to evaluate"),
        (PLAIN + '[eval]\npath = "x"\nweight = 0.5\n', "eval.weight (line 7): there is no such field"),
        (PLAIN + '[save]\nkeep = "all"\nkeep_every = 3\n', "all checkpoints stay anyway"),
        (PLAIN + "[mesh]\ntp = true\n", "mesh.tp (line 6)"),
        (PLAIN + "[mash]\ntp = 2\n", "mash (line 5): there is no such field; did you mean mesh?"),
    ],
)  # fmt: skip
def test_what_is_refused(tmp_path: Path, text: str, wanted: str) -> None:
    assert wanted in refused(tmp_path, text)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(mw.ConfigError, match="cannot be read"):
        read(tmp_path / "no.toml")


@pytest.mark.parametrize(
    ("given", "wanted"),
    [("mesh.tp", "no FIELD=VALUE"), ("data.3.weight=1", "there are 1 of them"), ("model.x=1", "no fields"),
     ("mesh.tq=2", "did you mean tp?")],
)  # fmt: skip
def test_what_cannot_be_set(tmp_path: Path, given: str, wanted: str) -> None:
    assert wanted in refused(tmp_path, PLAIN, given)


def places(section: type[BaseModel], at: str = "") -> list[tuple[str, Any]]:
    out: list[tuple[str, Any]] = []
    for name, field in section.model_fields.items():
        inner = toml._section_of(field.annotation)
        here = f"{at}data.0" if name == "data" else f"{at}{name}"
        out += places(inner, f"{here}.") if inner else [(here, field)]
    return out


VALUES = {  # where the default says nothing of what else there may be
    "mesh": "2", "share": "0.5", "length": "1024", "tokens_per_step": "65536", "epochs": "2.5", "tokens": "3M",
    "too_long": "drop", "thinking": "true", "betas": "[0.8, 0.9]", "max_norm": "false", "keep": "5", "steps": "4",
    "time_limit": "1.5", "keep_every": "4", "kind": "text", "turns": "last", "split": "line", "on_bad": "skip",
    "resume": "never", "dtype": "float32", "recompute": "full", "router_aux": "previous", "on_nan": "skip",
    "schedule": "wsd",
}  # fmt: skip


def value_at(config: Any, place: str) -> Any:
    for part in place.split("."):
        config = config[int(part)] if part.isdecimal() else getattr(config, part)
    return config


@pytest.mark.parametrize("place", [place for place, _ in places(Config)])
def test_every_field_can_be_set(tmp_path: Path, place: str) -> None:
    before = value_at(read(written(tmp_path, PLAIN)), place)
    section, name = place.split(".")[0], place.split(".")[-1]
    plain = {bool: str(not before).lower(), int: "7", float: "0.25", dict: '{a = "b"}'}.get(type(before), "other")
    beside = ["train.steps=9"] if place == "data.0.share" else ["eval.path=x"] if section == "eval" else []
    sets = [*beside, f"{place}={VALUES.get(name, VALUES.get(section, plain))}"]
    assert value_at(read(tmp_path / "run.toml", sets), place) != before


def test_what_is_saved_reads_the_same(tmp_path: Path) -> None:
    config = read(written(tmp_path, PLAIN), ['data.0.fields={messages="dia\\"log"}', "train.tokens=2B", "mesh.tp=3"])
    assert read(written(tmp_path, as_toml(config))) == config


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.toml")), ids=lambda path: path.name)
def test_examples_are_right(path: Path) -> None:
    assert read(path).out.startswith("runs/")


def test_every_field_is_told() -> None:
    assert all(field.description for _, field in places(Config))
    assert toml.schema()["$defs"]["MeshSection"]["properties"]["tp"]["description"]
    page = (ROOT / "docs" / "train-config.md").read_text()
    assert documentation() in page, "docs/train-config.md is not what the declarations say; make it anew"


def test_savings_are_those_of_the_engine() -> None:
    for recompute in get_args(TrainSection.model_fields["recompute"].annotation):
        mw.Savings(recompute=recompute)


@pytest.mark.parametrize(("text", "number"), [("2B", 2 * 10**9), ("1.5k", 1500), (7, 7), ("x", None), ("1.2.3", None)])
def test_numbers_of_tokens(text: str | int, number: int | None) -> None:
    assert num_tokens(text) == number


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "wsd"])
@pytest.mark.parametrize("warmup", [0, 10, 0.1])
def test_learning_rates(name: Any, warmup: float) -> None:
    lr = schedule(OptimSection(schedule=name, warmup=warmup, lr=2.0, final=0.1), 100)
    each = [lr(step) for step in range(100)]
    top = 10 if warmup else 0
    assert each[top] == max(each) == 2.0
    assert all(0 < a < b for a, b in pairwise(each[: top + 1]))
    assert lr(100) == pytest.approx(2.0 if name == "constant" else 0.2)
    assert each[-1] > lr(100) or name == "constant"
    assert all(a >= b for a, b in pairwise(each[top:]))
    assert lr(500) == lr(100)
    if name == "wsd":
        assert each[80] == 2.0 > each[81]


def test_a_run_of_one_step() -> None:
    assert schedule(OptimSection(warmup=0), 1)(0) == OptimSection().lr
