"""Weights out of a mesh to fake rollouts in other processes: over a process group, shared memory, and a directory."""

from __future__ import annotations

import multiprocessing
import os
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

import meshwright as mw
from meshwright.errors import RankError
from meshwright.mesh.loopback import ADDRESS, serve_store
from meshwright.ops.part_sizes import shrunk_part_sizes
from meshwright.weight_sync import (
    TensorSpec,
    receive_from_group,
    receive_from_process,
    send_to_group,
    send_to_process,
    shared_memory,
)
from meshwright.weight_sync.buckets import bucket_size, bytes_of, exhaust, fill, num_buckets
from meshwright.weight_sync.process import _Channel
from tests import tiny, worlds
from tests.trials import error_of, feed, mesh_of

ROUNDS = 2
SMALL = 4_001  # bytes of a bucket, so that tensors travel in parts and no part is aligned


@contextmanager
def outside(act: Callable[..., None], *args: Any, code: int = 0) -> Iterator[None]:
    """Run an act in a process that is not part of any mesh. `code`: with which it must end."""
    process = multiprocessing.get_context("fork").Process(target=_alone, args=(act, args), daemon=True)
    process.start()
    try:
        yield
        process.join(30)
        assert process.exitcode == code
    finally:
        process.kill()
        process.join()


def _alone(act: Callable[..., None], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    act(*args)
    os._exit(0)


def kept(stream: Iterator[tuple[str, Tensor]], at: Path) -> None:
    """Save what a receiver got, as a file that appears whole."""
    tensors = dict(stream)
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors.values()), "a view of a bucket"
    save_file(tensors, at.with_suffix(".part"))
    at.with_suffix(".part").rename(at)


def by_process(address: Path, out: Path) -> None:
    for n in range(ROUNDS):
        kept(receive_from_process(address), out / f"{address.name}-{n}.safetensors")


def group_of(rank: int, at: Path) -> Any:
    """Return a group of two processes that torch.distributed knows nothing of, as inference engines make it."""
    if rank == 0:
        store = serve_store()
        at.with_suffix(".part").write_text(str(store.port))
        at.with_suffix(".part").rename(at)
    else:
        wait_for(at.exists)
        store = dist.TCPStore(ADDRESS, int(at.read_text()), is_master=False)
    return dist.ProcessGroupGloo(dist.PrefixStore("rollout", store), rank, 2, timedelta(seconds=30))


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def by_group(at: Path, out: Path) -> None:
    group = group_of(1, at)
    for n in range(ROUNDS):
        kept(receive_from_group(group, 0), out / f"group-{n}.safetensors")


def by_directory(out: Path) -> None:
    """Poll for exports, and read each at the very moment at which it appears."""
    for n in range(ROUNDS):
        at = out / f"export-{n}"
        deadline = time.monotonic() + 30
        while not at.exists():
            assert time.monotonic() < deadline
            time.sleep(0.0002)  # a loop without it would take a core
        assert (at / "config.json").is_file()
        kept(iter(load_file(at / "model.safetensors").items()), out / f"directory-{n}.safetensors")


def train_and_send(source: Path, out: Path, addresses: list[Path]) -> None:
    model = mw.load(source, mesh_of(dict(fsdp=2)), dtype=torch.float32)
    engine, rank = mw.Engine(model, lr=1e-2), model.mesh.rank
    group = group_of(0, out / "port") if rank == 0 else None
    specs, fsync = mw.tensor_specs(model), os.fsync
    for n in range(ROUNDS):
        with shrunk_part_sizes():
            send_to_group(mw.stream(model), specs, group)
            send_to_process(mw.stream(model, ranks="all"), specs, addresses[rank])
        os.fsync = lambda fd: (time.sleep(0.05), fsync(fd))[1]  # a slow disk
        mw.export(model, out / f"export-{n}")
        os.fsync = fsync
        engine.step(feed(engine))


def test_receivers_outside_of_the_mesh_get_the_bits_of_an_export(tmp_path: Path) -> None:
    """Twice, with a training step between; two ranks with a rollout each, a group, and a reader of directories."""
    source = tiny.directory(tmp_path / "m", "qwen3", dtype=torch.bfloat16)
    addresses, before = [tmp_path / "rank0", tmp_path / "rank1"], sorted(os.listdir("/dev/shm"))
    with (
        outside(by_process, addresses[0], tmp_path),
        outside(by_process, addresses[1], tmp_path),
        outside(by_group, tmp_path / "port", tmp_path),
        outside(by_directory, tmp_path),
    ):
        worlds.run(2, train_and_send, source, tmp_path, addresses)
    assert sorted(os.listdir("/dev/shm")) == before
    for n in range(ROUNDS):
        expected = load_file(tmp_path / f"export-{n}" / "model.safetensors")
        for receiver in ("rank0", "rank1", "group", "directory"):
            result = load_file(tmp_path / f"{receiver}-{n}.safetensors")
            assert result.keys() == expected.keys()
            assert all(same_bits(result[name], expected[name]) for name in expected), receiver
    first, second = (load_file(tmp_path / f"group-{n}.safetensors") for n in range(ROUNDS))
    assert not all(map(torch.equal, first.values(), second.values())), "the step changed nothing, so nothing is tested"


def same_bits(a: Tensor, b: Tensor) -> bool:
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(bytes_of(a), bytes_of(b))


# Odd sizes, one without elements, a scalar, dtypes of 1 to 8 bytes; a tensor of 3 buckets.
TENSORS = {
    "a": torch.arange(7, dtype=torch.uint8), "b": torch.randn(3, 5, dtype=torch.float64), "none": torch.zeros(0, 4),
    "scalar": torch.tensor(3.0, dtype=torch.bfloat16), "turned": torch.randn(4, 6).T,
    "fp8": torch.randn(9).to(torch.float8_e4m3fn), "large": torch.randn(3 * SMALL // 4), "last": torch.ones(1).half(),
}  # fmt: skip
SPECS = [TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in TENSORS.items()]


def broken() -> Iterator[tuple[str, Tensor]]:
    yield from [*TENSORS.items()][:-1]
    raise RuntimeError("the disk is full")


# What a sender may get wrong, with the error of both sides.
WRONG: dict[str, tuple[Callable[[], Any], list[TensorSpec], str]] = {
    "the stream fails": (broken, SPECS, "the disk is full"),
    "too few": (lambda: [*TENSORS.items()][:-1], SPECS, "the stream ended before last [1] float16"),
    "too many": (TENSORS.items, SPECS[:-1], "the stream yields last after the last of 7 specs"),
    "another dtype": ({**TENSORS, "b": TENSORS["b"].float()}.items, SPECS, "b [3, 5] float32, but its specs"),
    "another order": (lambda: [*TENSORS.items()][::-1], SPECS, "announced a [7] uint8"),
}


def says(act: Callable[[], Any]) -> str:
    try:
        act()
    except Exception as error:  # noqa: BLE001 - errors of torch would be a failure
        return f"{type(error).__name__}: {error}"
    return "nothing"


def through_group() -> list[str]:
    """Send and receive in a group that torch.distributed knows: first well, then in each wrong way, then well."""
    group, answers = mesh_of(dict(fsdp=2)).process_group(("pp", "replicate", "fsdp", "cp", "tp")), []
    ways = [("", (TENSORS.items, SPECS, "nothing")), *WRONG.items(), ("again", (dict, [], "nothing"))]
    for _, (stream, specs, _) in ways:
        if dist.get_rank() == 1:
            answers.append(says(lambda stream=stream, specs=specs: send_to_group(
                iter(stream() or {}), specs, group, bucket_bytes=SMALL)))  # fmt: skip
        else:
            out: dict[str, Tensor] = {}
            answers.append(says(lambda out=out: out.update(receive_from_group(group, 1))))
            assert answers[-1] != "nothing" or not out or all(same_bits(out[name], TENSORS[name]) for name in TENSORS)
    return answers


def test_an_error_of_the_sender_is_raised_in_the_group() -> None:
    receiver, sender = worlds.run(2, through_group)
    expected = ["nothing", *(text for *_, text in WRONG.values()), "nothing"]
    assert all(text in answer for text, answer in zip(expected, sender, strict=True)), sender
    assert all(text in answer for text, answer in zip(expected, receiver, strict=True)), receiver
    assert all("RankError: the sender failed" in answer for answer in receiver[1:-1])


def test_a_receiver_that_dies_is_an_error_of_the_group(tmp_path: Path) -> None:
    def die(at: Path) -> None:
        next(receive_from_group(group_of(1, at), 0))
        os._exit(7)

    def run() -> tuple[str, list[Any]]:
        left = iter(TENSORS.items())
        group = group_of(0, tmp_path / "port")
        return says(lambda: send_to_group(left, SPECS, group, bucket_bytes=1)), list(left)

    with outside(die, tmp_path / "port", code=7):
        ((error, left),) = worlds.run(1, run)
    assert error.startswith("RankError: bucket ")
    assert "a receiver is lost, so make a new group" in error
    assert left == [], "the other ranks of the mesh wait in the stream"


def receive_and(act: Callable[[], None], address: Path) -> None:
    """Take the first tensor, then act."""
    stream = receive_from_process(address, timeout_s=10)
    next(stream)
    act()
    exhaust(stream)


def failing(address: Path, text: str) -> None:
    said = says(lambda: exhaust(receive_from_process(address, timeout_s=10)))
    assert text in said, said


@pytest.mark.parametrize("wrong", WRONG)
def test_an_error_of_the_sender_is_raised_in_the_other_process(tmp_path: Path, wrong: str) -> None:
    stream, specs, text = WRONG[wrong]
    left = iter(stream())
    with outside(failing, tmp_path / "it", "RankError: the sender failed, so the weights are incomplete"):
        assert text in says(lambda: send_to_process(left, specs, tmp_path / "it", bucket_bytes=SMALL))
    assert list(left) == []
    assert not (tmp_path / "it").exists()


def test_odd_tensors_pass_through_shared_memory(tmp_path: Path) -> None:
    def check(address: Path) -> None:
        for specs in (SPECS, []):
            result = dict(receive_from_process(address, timeout_s=10))
            assert [*result] == [spec.name for spec in specs]
            assert all(same_bits(result[name], TENSORS[name]) for name in result)

    with outside(check, tmp_path / "it"):
        send_to_process(TENSORS.items(), SPECS, tmp_path / "it", bucket_bytes=1_001)
        send_to_process([], [], tmp_path / "it")


@pytest.mark.parametrize("size", [1, 7, 100, 1_000_000])
def test_buckets_are_as_many_as_are_filled(size: int) -> None:
    for specs, stream in ((SPECS, TENSORS.items()), ([], [])):
        bucket = torch.empty(bucket_size(specs, size), dtype=torch.uint8)
        assert len(bucket) == max(1, min(size, sum(spec.num_bytes for spec in specs)))
        assert len(list(fill(stream, specs, bucket))) == num_buckets(specs, len(bucket))


def test_a_bucket_is_closed_on_both_sides_and_for_others() -> None:
    """A weight sync in each step may leave no descriptor open. Memory without the mark is not the sender's."""
    cpu = torch.device("cpu")
    bucket, offered, handle = shared_memory.make(5, cpu)
    assert handle is not None
    with pytest.raises(RankError, match="not the sender's memory"):
        shared_memory.attach({**offered, "mark": "00" * 16}, os.dup(handle), cpu)
    with pytest.raises(RankError, match="device= of the receiver is the host"):
        shared_memory.attach(offered, None, cpu)
    attached = shared_memory.attach(offered, handle, cpu)
    bucket.copy_(torch.arange(5))
    assert attached.tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(handle)
    ours, other_end = socket.socketpair()
    with ours, other_end:
        given = os.dup(other_end.fileno())
        _Channel(ours).give(given)
        os.close(_Channel(other_end).take_handle())
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(given)


def test_no_other_user_can_take_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes, listen = [], socket.socket.listen

    def seen(self: socket.socket, *args: int) -> None:
        modes.append(stat.S_IMODE((tmp_path / "it").stat().st_mode))
        listen(self, *args)

    monkeypatch.setattr(socket.socket, "listen", seen)
    assert "no receiver came" in error_of(lambda: send_to_process([], [], tmp_path / "it", timeout_s=0.01))
    assert modes == [0o600]


@pytest.mark.parametrize(
    ("act", "code", "text"),
    [
        (lambda: os._exit(7), 7, "RankError: the receiver closed the connection"),
        (lambda: time.sleep(1), 1, "RankError: the receiver did not answer for 0.5 s, and did not take bucket 1 of"),
    ],
    ids=["dies", "hangs"],
)
def test_a_receiver_that_stops_is_an_error_of_the_sender(
    tmp_path: Path, act: Callable[[], None], code: int, text: str
) -> None:
    before, left = sorted(os.listdir("/dev/shm")), iter(TENSORS.items())
    with outside(receive_and, act, tmp_path / "it", code=code):
        said = says(lambda: send_to_process(left, SPECS, tmp_path / "it", bucket_bytes=SMALL, timeout_s=0.5))
    assert said.startswith(text), said
    assert list(left) == [], "the other ranks of the mesh wait in the stream"
    assert sorted(os.listdir("/dev/shm")) == before
    assert not (tmp_path / "it").exists()


def test_a_sender_or_receiver_that_never_comes(tmp_path: Path) -> None:
    at, left = tmp_path / "it", iter(TENSORS.items())
    assert "no receiver came to" in error_of(lambda: send_to_process(left, SPECS, at, timeout_s=0.05))
    assert list(left) == []
    assert "no sender listens at" in error_of(lambda: dict(receive_from_process(at, timeout_s=0.05)))
    at.write_text("")
    assert "remove it" in error_of(lambda: send_to_process({}.items(), [], at, timeout_s=0.05))
    long = tmp_path / ("long" * 30)
    assert "about 100 characters" in error_of(lambda: send_to_process({}.items(), [], long, timeout_s=0.05))
    assert "bucket_bytes=0" in error_of(lambda: send_to_group({}.items(), [], object(), bucket_bytes=0))
