"""Checkpoints of three kinds into each other: the same bits, and nothing of them is run."""

from __future__ import annotations

import functools
import pickle  # noqa: TID251 - to make what must not be run
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import meshwright as mw
from meshwright.cli import main
from tests import tiny, worlds
from tests.test_checkpoint import bytes_of, engine_of, same, state_of, train
from tests.words import words

FAMILY = "qwen3_5_moe"  # with tensors that are not trained, float32 parameters, fused and segmented keys


FEW: dict[str, Any] = {**tiny.TWO_LAYERS, "num_experts": 4}


def saved(source: Path, at: Path) -> Any:
    engine = engine_of(source, dict(tp=2, ep=2))
    train(engine, 1)
    mw.save(engine, at / "ours")
    mw.export(engine.model, at / "hf")
    dcp.save(engine.state_dict(), checkpoint_id=at / "dcp")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    at = tmp_path_factory.mktemp("kinds")
    source = tiny.directory(at / "source", FAMILY, dtype=torch.bfloat16, **FEW)
    tiny.directory(at / "other", "qwen3")
    worlds.run(2, saved, source, at)
    return source, at


def loads(source: Path, at: Path, kind: str, mesh: Mapping[str, int]) -> Any:
    engine = engine_of(source, mesh)
    if kind == "ours":
        mw.resume(engine, at)
    else:
        state = engine.state_dict()
        dcp.load(state, checkpoint_id=at)
        engine.load_state_dict(state)
    return state_of(engine), train(engine, 1)


def run(*arguments: object) -> int:
    return main(["convert", *map(str, arguments)])


def test_ours_to_hf_is_the_export(made: tuple[Path, Path], tmp_path: Path) -> None:
    assert run(made[1] / "ours", tmp_path / "hf", "--to", "hf") == 0
    exported = {path.name: path.read_bytes() for path in (made[1] / "hf").iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()} == exported


def test_torch_to_hf_is_the_export(made: tuple[Path, Path], tmp_path: Path) -> None:
    assert run(made[1] / "dcp", tmp_path / "hf", "--to", "hf", "--like", made[0]) == 0
    exported = {path.name: path.read_bytes() for path in (made[1] / "hf").iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()} == exported


def test_torch_to_ours_and_back(made: tuple[Path, Path], tmp_path: Path) -> None:
    assert run(made[1] / "dcp", tmp_path / "ours", "--to", "meshwright", "--like", made[0]) == 0
    step = "step-000001"
    assert bytes_of(tmp_path / "ours" / step) == bytes_of(made[1] / "ours" / step)
    assert main(["inspect", str(tmp_path / "ours"), "--verify"]) == 0
    assert run(tmp_path / "ours", tmp_path / "dcp", "--to", "dcp") == 0
    goes_on_equally(made[0], made[1] / "ours", tmp_path / "dcp")


def goes_on_equally(source: Path, ours: Path, dcp_: Path) -> None:
    places = {"ours": ours, "dcp": dcp_}
    acts = {kind: functools.partial(loads, source, at, kind, {}) for kind, at in places.items()}
    [there], [back] = worlds.in_turn(1, acts).values()
    assert same(there, back)


def saved_dense(source: Path, at: Path) -> None:
    engine = engine_of(source, {})
    train(engine, 1)
    mw.save(engine, at)


def test_a_model_without_experts(tmp_path: Path) -> None:
    source = tiny.directory(tmp_path / "source", "qwen3", dtype=torch.bfloat16)
    worlds.run(1, saved_dense, source, tmp_path / "ours")
    assert run(tmp_path / "ours", tmp_path / "dcp", "--to", "dcp") == 0
    goes_on_equally(source, tmp_path / "ours", tmp_path / "dcp")


def test_float32_weights_are_the_masters(made: tuple[Path, Path], tmp_path: Path) -> None:
    assert run(made[1] / "ours", tmp_path / "hf", "--to", "hf", "--dtype", "float32") == 0
    masters = load_file(made[1] / "ours" / "step-000001" / "master" / "model.safetensors")
    result = load_file(tmp_path / "hf" / "model.safetensors")
    assert all(torch.equal(result[key], tensor) for key, tensor in masters.items())


class Hostile:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("executed"),)


def test_a_pickle_runs_nothing(
    made: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dcp").mkdir()
    for bad in (pickle.dumps(Hostile()), b"", b"\x80\x04.", pickle.dumps({"a": 1})):
        (tmp_path / "dcp" / ".metadata").write_bytes(bad)
        assert run("dcp", "out", "--to", "hf", "--like", made[0]) == 2
        assert re.search(words("list of contents"), capsys.readouterr().err)
    assert {path.name for path in tmp_path.iterdir()} == {"dcp"}


def test_a_place_outside_is_refused(
    made: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "dcp").mkdir()
    (tmp_path / "secret").write_bytes(b"x" * 100000)
    result = pickle.loads((made[1] / "dcp" / ".metadata").read_bytes())
    for place in result.storage_data.values():
        place.relative_path = "../secret"
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(result))
    assert run(tmp_path / "dcp", tmp_path / "out", "--to", "hf", "--like", made[0]) == 2
    assert re.search(words(r"\.\./secret", "not in"), capsys.readouterr().err)


REFUSED: dict[str, tuple[list[str], str]] = {
    "no --like": (["{made}/dcp", "{out}", "--to", "hf"], words("--like")),
    "another model": (["{made}/dcp", "{out}", "--to", "hf", "--like", "{other}"], words("lacks|is", "same model")),
    "the same kind": (["{made}/hf", "{out}", "--to", "hf"], words("already", "copy")),
    "no optimizer state": (["{made}/hf", "{out}", "--to", "meshwright"], words("no optimizer state", r"mw\.resume")),
    "a dtype for torch": (["{made}/ours", "{out}", "--to", "dcp", "--dtype", "float32"], words("--dtype")),
    "a target that is there": (["{made}/ours", "{made}/hf", "--to", "hf"], words("not empty")),
    "nothing there": (["{out}/nowhere", "{out}", "--to", "hf"], words("nowhere")),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(
    made: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    arguments, pattern = REFUSED[case]
    places = {"made": made[1], "out": tmp_path / "out", "other": made[1] / "other"}
    assert run(*(each.format(**places) for each in arguments)) == 2
    assert re.search(pattern, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def saved_with_mtp(source: Path, at: Path) -> None:
    engine = mw.Engine(mw.load(source, dtype=torch.float32, mtp="head"), lr=1e-2, router_aux="previous")
    train(engine, 1)
    mw.save(engine, at / "ours")
    mw.export(engine.model, at / "hf")
    dcp.save(engine.state_dict(), checkpoint_id=at / "dcp")


def test_a_trained_mtp_head_is_converted(tmp_path: Path) -> None:
    """Weights, optimizer state and the load of its experts."""
    source = tiny.with_mtp(tiny.directory(tmp_path / "source", FAMILY, dtype=torch.bfloat16, **FEW))
    worlds.run(1, saved_with_mtp, source, tmp_path)
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    for kind in ("dcp", "ours"):
        assert (
            run(tmp_path / kind, tmp_path / f"hf of {kind}", "--to", "hf", *(["--like", source] * (kind == "dcp"))) == 0
        )
        converted = load_file(tmp_path / f"hf of {kind}" / "model.safetensors")
        assert all(torch.equal(converted[key], tensor) for key, tensor in exported.items())
    assert run(tmp_path / "dcp", tmp_path / "again", "--to", "meshwright", "--like", source) == 0
    step = "step-000001"
    assert bytes_of(tmp_path / "again" / step) == bytes_of(tmp_path / "ours" / step)
    assert run(tmp_path / "again", tmp_path / "back", "--to", "dcp") == 0
    was, back = (torch_list(tmp_path / each) for each in ("dcp", "back"))
    assert was == back


def torch_list(at: Path) -> dict[str, Any]:
    """The names and shapes of a DCP checkpoint."""
    return {
        name: tuple(each.size) for name, each in dcp.FileSystemReader(at).read_metadata().state_dict_metadata.items()
    }
