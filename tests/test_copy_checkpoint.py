"""Checkpoints in object stores: a stand-in that fails at every call in turn, and one that lies."""

from __future__ import annotations

import functools
import io
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

import meshwright as mw
from meshwright.checkpoint import check_bytes, copy, folder, opened_at
from meshwright.checkpoint.manifest import Manifest
from meshwright.cli import main
from tests import tiny, worlds
from tests.test_checkpoint import engine_of, train
from tests.words import words


class Faulty(MemoryFileSystem):
    """A store in memory. `fault` gets the number of each call and the bytes sent; what it returns is
    stored. As on some stores, an object whose writing failed exists with what came through."""

    protocol = "faulty"
    store: dict[str, Any] = {}  # noqa: RUF012 - as its parent has it: one for all instances
    pseudo_dirs = [""]  # noqa: RUF012
    calls = 0
    fault: Callable[[int, bytes], bytes] = staticmethod(lambda _, data: data)

    @classmethod
    def begin(cls, fault: Callable[[int, bytes], bytes] = lambda _, data: data) -> None:
        """Empty the store."""
        cls.store, cls.pseudo_dirs, cls.calls, cls.fault = {}, [""], 0, fault  # type: ignore[assignment]

    @classmethod
    def request(cls, data: bytes = b"") -> bytes:
        cls.calls += 1
        return cls.fault(cls.calls, data)

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        self.request()
        if mode != "wb":
            return super()._open(path, mode, **options)
        return Written(self._strip_protocol(path))

    def cat_file(self, path: str, **options: Any) -> Any:
        self.request()
        return super().cat_file(path, **options)

    def find(self, path: str, **options: Any) -> Any:
        self.request()
        return super().find(path, **options)


class Written(io.BytesIO):
    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def write(self, data: Any) -> int:
        super().write(Faulty.request(data))
        return len(data)

    def close(self) -> None:
        if not self.closed:
            Faulty.store[self.path] = MemoryFile(None, self.path, self.getvalue())
        super().close()


@pytest.fixture(autouse=True)
def _new_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    fsspec.register_implementation("faulty", Faulty, clobber=True)
    monkeypatch.setattr(copy, "_WAIT_S", 0.0)
    monkeypatch.setattr(copy, "_FILES_AT_ONCE", 1)  # so that calls have an order
    Faulty.begin()
    yield
    Faulty.begin()


def saved_twice(source: Path, out: Path) -> None:
    engine = engine_of(source, dict(fsdp=2))
    for _ in range(2):
        train(engine, 1)
        mw.save(engine, out)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two small checkpoints of two ranks, in several files."""
    at = tmp_path_factory.mktemp("run")
    sizes = dict(hidden_size=8, intermediate_size=8, num_attention_heads=2, num_hidden_layers=1)
    worlds.run(2, saved_twice, tiny.directory(at / "m", "qwen3", **sizes), at / "run")
    return at / "run"


def bytes_below(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_there_and_back(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2):
        assert main(["copy", str(run / f"step-00000{step}"), "faulty://b/run"]) == 0
    assert main(["copy", "faulty://b/run", str(tmp_path / "a")]) == 0
    assert capsys.readouterr().out.split()[-1] == str(tmp_path / "a" / "step-000002")
    mw.copy_checkpoint("faulty://b/run/step-000001", tmp_path / "a")
    assert bytes_below(tmp_path / "a") == bytes_below(run)
    mw.copy_checkpoint(tmp_path / "a", tmp_path / "b")
    assert bytes_below(tmp_path / "b" / "step-000002") == bytes_below(run / "step-000002")
    assert mw.copy_checkpoint(run, "faulty://b/run") == "faulty://b/run/step-000002"  # it is there already


def goes_on(at: Path, out: Path) -> list[float]:
    engine = engine_of(at, dict(fsdp=2))
    mw.resume(engine, out)
    return train(engine, 1)


def test_the_newest_of_a_store_is_that_of_most_steps() -> None:
    """By text step 1,000,000 would come before step 999,999. Folders below are not looked into."""
    fs = MemoryFileSystem()
    fs.pipe_file("/steps/best/step-2000000/meshwright.json", b"{}")
    for step in ("999999", "1000000", "000007"):
        fs.pipe_file(f"/steps/step-{step}/meshwright.json", b"{}")
    names = [each.path for each in copy._candidates(copy.Place(fs, "/steps", "memory://steps"))]
    assert names == [f"/steps/step-{step}" for step in ("1000000", "999999", "000007")]


def test_training_goes_on_from_a_copy(run: Path, tmp_path: Path) -> None:
    mw.copy_checkpoint(run, "faulty://b/run")
    copy = Path(mw.copy_checkpoint("faulty://b/run", tmp_path / "c"))
    acts = {at: functools.partial(goes_on, at, out) for at, out in ((copy, copy), (run / "step-000002", run))}
    first, second = worlds.in_turn(2, acts).values()
    assert first == second


def whole(url: str, tmp_path: Path) -> str:
    """The newest whole checkpoint of the store, with all its bytes; by a reader that meets no faults."""
    Faulty.fault = lambda _, data: data
    try:
        place = Path(mw.copy_checkpoint(url, tmp_path))
    except mw.CheckpointError:
        return ""
    assert check_bytes(opened_at(place)) == []
    return place.name


def some_calls(run: Path) -> list[int]:
    """Return the first and the last call of a copy, and some between."""
    mw.copy_checkpoint(run / "step-000001", "faulty://count/run")
    before = Faulty.calls
    mw.copy_checkpoint(run, "faulty://count/run")
    calls = Faulty.calls - before
    return sorted({*range(1, 6), *range(6, calls, 10), *range(calls - 7, calls + 1)})


class Killed(BaseException):
    pass


def test_a_process_that_dies_at_any_call(run: Path, tmp_path: Path) -> None:
    """A copy leaves no checkpoint or a complete one; the earlier one stays, and the next copy goes through."""
    calls, seen = some_calls(run), set()
    for at in calls:
        Faulty.begin()
        mw.copy_checkpoint(run / "step-000001", "faulty://b/run")

        def dies(call: int, data: bytes, last: int = Faulty.calls + at) -> bytes:
            if call >= last:
                raise Killed
            return data

        Faulty.fault = dies
        with pytest.raises(Killed):
            mw.copy_checkpoint(run, "faulty://b/run")
        seen.add(whole("faulty://b/run", tmp_path / str(at)))
        mw.copy_checkpoint(run, "faulty://b/run")
        assert whole("faulty://b/run", tmp_path / f"{at} again") == "step-000002"
    assert len(calls) > 20
    assert seen == {"step-000001", "step-000002"}


@pytest.mark.parametrize("lie", ["an error", "half of it is kept", "nothing is kept"])
def test_a_fault_at_any_call_is_tried_again(run: Path, tmp_path: Path, lie: str) -> None:
    for at in some_calls(run):

        def once(call: int, data: bytes, last: int = at) -> bytes:
            if call != last:
                return data
            if lie == "an error":
                raise ConnectionError("reset by peer")
            return data[: len(data) // 2] if lie == "half of it is kept" else b""

        Faulty.begin(once)
        mw.copy_checkpoint(run, "faulty://b/run")
        assert whole("faulty://b/run", tmp_path / str(at)) == "step-000002"


def test_what_a_store_changed_is_never_taken(run: Path, tmp_path: Path) -> None:
    """A flipped byte in any object. The manifest fails its own checksum, so that is passed over for the earlier one."""
    for step in (1, 2):
        mw.copy_checkpoint(run / f"step-00000{step}", "faulty://b/run")
    for name in [name for name in Faulty.store if "step-000002" in name]:
        content = Faulty.store[name].getbuffer()
        content[len(content) // 2] ^= 1
        if name.endswith(("meshwright.json", "00000.json", "00001.json")):  # detected before anything is copied
            assert whole("faulty://b/run", tmp_path / f"without {Path(name).name}") == "step-000001"
        else:
            with pytest.raises(mw.CheckpointError):
                mw.copy_checkpoint("faulty://b/run", tmp_path / "b")
        content[len(content) // 2] ^= 1
    assert not (tmp_path / "b").exists() or not list((tmp_path / "b").iterdir())
    assert whole("faulty://b/run", tmp_path / "c") == "step-000002"


def test_what_is_refused(run: Path, tmp_path: Path) -> None:
    def message(source: Any, target: Any) -> str:
        with pytest.raises(mw.CheckpointError) as error:
            mw.copy_checkpoint(source, target)
        return str(error.value)

    assert re.search(words("nothing://", "reached", "rotocol"), message(run, "nothing://b/run"))
    assert re.search(words("faulty://empty", "neither", "step-000200"), message("faulty://empty", tmp_path))
    assert re.search(words("no complete checkpoint"), message(tmp_path, "faulty://b"))
    for step in (1, 2):
        mw.copy_checkpoint(run / f"step-00000{step}", "faulty://b/run")
    first, second = (next(n for n in Faulty.store if n.endswith(f"{step}/meshwright.json")) for step in (1, 2))
    Faulty.store[second] = Faulty.store[first]
    assert re.search(words("another checkpoint", "remove it"), message(run, "faulty://b/run"))
    (tmp_path / "file").touch()
    assert re.search(words("file", "choose another"), message(run, tmp_path / "file"))
    broken = tmp_path / "broken"
    mw.copy_checkpoint(run, broken)
    with (broken / "step-000002" / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x55")
    assert re.search(words("fail their checksum"), message(broken, "faulty://c/run"))
    assert not [name for name in Faulty.store if "c/run" in name and name.endswith("meshwright.json")]


def test_saving_into_a_store_is_refused(run: Path, tmp_path: Path) -> None:
    source = tiny.directory(tmp_path / "m", "qwen3")
    [message] = worlds.run(1, refused, source)
    assert re.search(words("s3://b/run", "meshwright copy"), message)


def refused(source: Path) -> str:
    with pytest.raises(mw.CheckpointError) as error:
        mw.save(engine_of(source, {}), "s3://b/run")
    return str(error.value)


def test_what_stays_wrong_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = list[float]()
    monkeypatch.setattr(copy.time, "sleep", waits.append)
    monkeypatch.setattr(copy, "_WAIT_S", 1.0)
    for error, message, pauses in ((PermissionError, "tried 1 times", []), (OSError, "tried 4 times", [1.0, 2.0, 4.0])):
        waits.clear()
        with pytest.raises(mw.CheckpointError, match=f"it: {error.__name__}: no .{message}"):
            copy.tried(lambda error=error: (_ for _ in ()).throw(error("no")), "it")
        assert waits == pauses


def test_another_checkpoint_of_one_step_is_not_taken_for_a_copy(tmp_path: Path) -> None:
    """Its step and files may be equal, and it is of another run."""
    made = Manifest(3, {"weights": ""}, {}, {}, {"date": "today"})
    with folder.Draft(tmp_path, 3) as draft:
        draft.commit(made)
    fetch = lambda manifest: copy._fetch(copy.Whole(None, manifest, {}, tmp_path), tmp_path)  # type: ignore[arg-type] # noqa: E731 - nothing is read
    assert fetch(made) == draft.final
    with pytest.raises(mw.CheckpointError, match="is another checkpoint"):
        fetch(replace(made, about={"date": "tomorrow"}))
