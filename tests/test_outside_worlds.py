"""A mesh on some ranks of a process group that the program made: the others run code of their own meanwhile."""

from __future__ import annotations

import atexit
import functools
import os
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import huggingface_hub
import pytest
import torch
import torch.distributed as dist

import meshwright as mw
from meshwright.axes import DENSE
from meshwright.mesh import part
from meshwright.mesh.local_collectives import serves
from meshwright.watch import heartbeat
from tests import parts, tiny, worlds
from tests.test_checkpoint import bytes_of
from tests.test_lost_ranks import survive
from tests.trials import error_of, named
from tests.words import words

FOUR: list[dict[str, int]] = [
    dict(fsdp=2, tp=2),
    *([dict(pp=2, fsdp=2), dict(replicate=2, cp=2), dict(fsdp=2, tp=2, ep=2)] if parts.ALL else []),
]
PAIRS: list[dict[str, int]] = [dict(pp=2), dict(fsdp=2, ep=2)]
TRAINERS = [1, 2, 3, 4]
Sources = Mapping[str, Path]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    at = tmp_path_factory.mktemp("sources")
    return {name: tiny.directory(at / name, name) for name in ("qwen3", "qwen3_moe")}


def engine_of(sources: Sources, sizes: dict[str, int], ranks: Sequence[int] | None = None) -> mw.Engine:
    source = sources["qwen3_moe" if "ep" in sizes else "qwen3"]
    mesh = mw.Mesh(**sizes, device="cpu", timeout_s=30, ranks=ranks)
    return mw.Engine(mw.load(source, mesh, dtype=torch.float64), lr=1e-2)


def trained(engine: mw.Engine) -> dict[str, Any]:
    """Return what a step gives: everything that could show a reduction over other ranks, or in another order."""
    model = engine.model
    batches = tiny.batches(model.mesh.data_rank)
    record = engine.step(batches)
    return {
        "place": (model.mesh.rank, model.mesh.coords),
        "numbers": (record.loss, record.grad_norm, record.num_targets),
        "logprobs": mw.logprobs(model, batches[0]),
        "weights": mw.gather(model),
        "sample": mw.sample(model, [[1, 2, 3], [4]], tokens=2, top_p=0.9),
    }


def equal(one: Any, other: Any) -> bool:
    """Compare bitwise."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return bool(one == other)


def test_equal_sees_one_bit() -> None:
    x = torch.ones(3, dtype=torch.float64)
    assert equal({"a": x}, {"a": x.clone()})
    assert not equal({"a": x}, {"a": x.nextafter(x + 1)})


def in_own_world(sources: Sources, meshes: Sequence[dict[str, int]], saved: Path | None = None) -> dict[str, Any]:
    """Train each mesh in a world of its own ranks; then continue what the inner mesh saved."""
    results = {named(sizes): trained(engine_of(sources, sizes)) for sizes in meshes}
    for folder in sorted(saved.iterdir()) if saved else ():
        engine = engine_of(sources, meshes[0])
        mw.resume(engine, folder / "step-000001")
        results[folder.name] = trained(engine)
    return results


def rollout_and_trainers(sources: Sources, out: Path) -> dict[str, Any]:
    """Rank 0 of five waits for weights; the others train, save, check, and send it the weights."""
    dist.init_process_group("gloo")
    between = dist.new_group([0, 1])  # what connects a rollout to a trainer; all ranks make it, as torch wants
    if dist.get_rank() == 0:
        received: dict[str, torch.Tensor] = {}
        while True:
            about: list[Any] = [None]
            dist.broadcast_object_list(about, src=1, group=between)
            if about[0] is None:
                break
            name, shape, dtype = about[0]
            received[name] = torch.empty(shape, dtype=dtype)
            dist.broadcast(received[name], src=1, group=between)
        judge = engine_of(sources, {}, [0])  # a mesh of itself alone
        result = trained(judge)
        mw.save(judge, out.with_name("alone"), wait=False)
        judge.wait()
        return {"received": received, "alone": result}
    results: dict[str, Any] = {}
    engines = {}
    for sizes in FOUR:
        engines[named(sizes)] = engine_of(sources, sizes, TRAINERS)
        results[named(sizes)] = trained(engines[named(sizes)])
    first = engines[named(FOUR[0])]
    results["sent"] = sent = {}
    for name, tensor in mw.stream(first.model):
        sent[name] = tensor
        dist.broadcast_object_list([(name, tensor.shape, tensor.dtype)], src=1, group=between)
        dist.broadcast(tensor, src=1, group=between)
    if first.model.mesh.rank == 0:
        dist.broadcast_object_list([None], src=1, group=between)
    mw.save(first, out.with_name("now"))
    mw.save(first, out / "later", wait=False)
    first.wait()
    results["next"] = trained(first)
    mw.export(first.model, out.with_name("exported"))
    checked = mw.check_weights(mw.load(sources["qwen3"], first.model.mesh))
    mesh, local = first.model.mesh, serves(first.model.mesh.process_group(DENSE))
    results["facts"] = (mesh.ranks, repr(mesh), checked.ok, list(mesh.node), local)
    return results


@pytest.fixture(scope="module")
def five(sources: Sources, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], Path]:
    out = tmp_path_factory.mktemp("five") / "saved"
    return worlds.run(5, rollout_and_trainers, sources, out), out


@pytest.fixture(scope="module")
def four(sources: Sources, five: tuple[list[Any], Path]) -> list[Any]:
    return worlds.run(4, in_own_world, sources, FOUR, five[1])


@pytest.mark.parametrize("sizes", FOUR, ids=named)
def test_ranks_of_a_larger_world_compute_the_same_bits(five: Any, four: Any, sizes: dict[str, int]) -> None:
    for inner, alone in zip(five[0][1:], four, strict=True):
        assert equal(inner[named(sizes)], alone[named(sizes)])


def test_a_rank_outside_receives_the_weights(five: Any, four: Any) -> None:
    (outside, *trainers), _ = five
    assert outside["received"]
    assert equal(outside["received"], trainers[0]["sent"])
    assert all(not each["sent"] for each in trainers[1:])
    updated = trainers[0][named(FOUR[0])]["weights"]
    assert all(torch.equal(x, updated[key].to(x.dtype)) for key, x in outside["received"].items())


def test_a_rank_outside_has_a_model_of_its_own(sources: Sources, five: Any) -> None:
    (alone,) = worlds.run(1, lambda: trained(engine_of(sources, {})))
    assert equal(five[0][0]["alone"], alone)


def test_a_world_of_its_own_resumes_what_an_inner_mesh_saved(five: Any, four: Any) -> None:
    for inner, alone in zip(five[0][1:], four, strict=True):
        assert equal(inner["next"], alone["later"])
    assert bytes_of(five[1].with_name("now")) == bytes_of(five[1] / "later")


def test_an_inner_mesh_counts_its_own_ranks(five: Any) -> None:
    for rank, results in enumerate(five[0][1:]):
        ranks, text, checked, node, local = results["facts"]
        assert (ranks, node, checked, local) == ((1, 2, 3, 4), [0, 1, 2, 3], True, True)
        assert re.search(rf"rank {rank} \(global rank {rank + 1}\) of 4", text)
    assert (five[1].with_name("exported") / "model.safetensors").exists()


def side_by_side(sources: Sources, places: Sequence[Sequence[int]], per_machine: str) -> dict[str, Any]:
    """Two meshes at once. The second does more in between, so that nothing keeps them in step."""
    os.environ["LOCAL_WORLD_SIZE"] = per_machine
    heartbeat.BEAT_S = 0.1
    dist.init_process_group("gloo")
    which = next(i for i, ranks in enumerate(places) if dist.get_rank() in ranks)
    engine = engine_of(sources, PAIRS[which], places[which])
    local = serves(engine.model.mesh.process_group(DENSE))
    if which:
        trained(engine_of(sources, PAIRS[which], places[which]))
    result = {**trained(engine), "which": which, "node": list(engine.model.mesh.node), "local": local}
    assert heartbeat.position.watch is not None
    dist.barrier()
    return {**result, "diagnosis": heartbeat.position.watch.diagnosis()}


@pytest.fixture(scope="module")
def two(sources: Sources) -> list[Any]:
    return worlds.run(2, in_own_world, sources, PAIRS)


@pytest.mark.parametrize(
    ("places", "per_machine", "nodes"),
    [
        pytest.param([[0, 1], [2, 3]], "4", [[0, 1], [0, 1]], id="neighbours", marks=parts.IN_MATRIX),
        pytest.param([[1, 3], [0, 2]], "2", [[0], [1]], id="strided"),
    ],
)
def test_two_meshes_train_at_once(
    sources: Sources, two: Any, places: list[list[int]], per_machine: str, nodes: list[list[int]]
) -> None:
    results = worlds.run(4, side_by_side, sources, places, per_machine)
    texts = [{results[rank].pop("diagnosis") for rank in ranks} for ranks in places]
    assert [len(of_mesh) for of_mesh in texts] == [1, 1], "all ranks of a mesh say the same"
    assert texts[0] != texts[1], "but not those of the other mesh"
    for ranks, sizes in zip(places, PAIRS, strict=True):
        for inner, global_rank in enumerate(ranks):
            result = results[global_rank]
            assert result.pop("node") == nodes[inner]
            # The host collectives of FSDP are those of one machine, which a mesh shares with ranks outside of it.
            assert result.pop("local") == (per_machine == "4")
            assert PAIRS[result.pop("which")] == sizes
            assert equal(result, two[inner][named(sizes)])


REFUSED: dict[str, tuple[list[int], dict[str, int], str]] = {
    "not a member": ([1, 2], dict(fsdp=2), words(r"global rank 0\b", "global ranks 1-2", "get_rank")),
    "too few": ([0, 1], dict(fsdp=3), words("fsdp=3", "3 ranks", "global ranks 0-1", r"\b2\b")),
    "none": ([], dict(), words(r"ranks=\[\]", r"\[2, 3\]")),
    "no numbers": (["0"], dict(), words(r"ranks=\['0'\]", "integers")),  # type: ignore[list-item] # a mistake
    "no list": (2, dict(fsdp=2), words("ranks=2 are not", r"\[2, 3\]")),  # type: ignore[dict-item] # another one
    "not there": ([0, 7], dict(fsdp=2), words(r"ranks=\[0, 7\]", "no rank 7", "0 to 2")),
    "descending": ([1, 0], dict(fsdp=2), words(r"ranks=\[1, 0\]", r"ranks=\[0, 1\]", "ascend")),
    "twice": ([0, 0], dict(fsdp=2), words(r"ranks=\[0, 0\]", r"ranks=\[0\]", "once")),
}


def refused() -> dict[str, str]:
    """All that a rank refuses by itself, then what ranks find out together."""
    make = functools.partial(mw.Mesh, device="cpu", timeout_s=4)
    said = {"no group": error_of(lambda: make(fsdp=2, ranks=[0, 1]))}
    dist.init_process_group("gloo")
    own = dist.get_rank()
    for name, (ranks, sizes, _) in REFUSED.items():
        said[name] = error_of(functools.partial(make, **sizes, ranks=ranks)) if own == 0 else ""
    said["whole"] = error_of(lambda: make(fsdp=2))
    said["one"] = error_of(make)
    dist.barrier()
    # Rank 2 names another neighbour than the one that names it, and that one does not come.
    said["others"] = error_of(lambda: make(fsdp=2, ranks=[0, 2] if own == 0 else [1, 2])) if own != 1 else ""
    dist.barrier()
    if own:  # this mesh is right, so each has a place; then a mesh of other ranks is refused
        said["mesh"] = repr(make(fsdp=2, ranks=[1, 2]).ranks)
        said["second"] = error_of(lambda: make(fsdp=3, ranks=[0, 1, 2]))
        said["whole too"] = error_of(lambda: make(fsdp=3))
        said["alone"] = error_of(lambda: make(ranks=[own]))
        said["sizes"] = error_of(lambda: make(fsdp=own, tp=3 - own, ranks=[1, 2]))
    dist.barrier()
    return said


def test_refusals_name_ranks_and_ways_out() -> None:
    first, second, third = worlds.run(3, refused)
    for name, (_, _, pattern) in REFUSED.items():
        assert re.search(f"^MeshError.*{pattern}", first[name]), (name, first[name])
    for each in (first, second, third):
        assert re.search(words(r"ranks=\[0, 1\]", "init_process_group", "every process"), each["no group"])
        assert re.search(words("fsdp=2 needs 2 processes", "3 run", r"ranks=\[\.\.\.\]"), each["whole"])
        assert re.search(words("one rank", "fsdp=3", r"ranks=\[\.\.\.\]"), each["one"])
    assert re.search(words("global rank 2 makes a mesh of global ranks 1-2", "global rank 0", "0, 2"), first["others"])
    assert re.search(
        words("global rank 1 did not", "global ranks 1-2", "within 4 s", r"ranks=\[1, 2\]"), third["others"]
    )
    for each in (second, third):
        assert (each["mesh"], each["alone"]) == ("(1, 2)", "")
        for name in ("second", "whole too"):
            assert re.search(words("belongs", "global ranks 1-2", "global ranks 0-2"), each[name])
        assert re.search(
            words(r"rank 0 \(global rank 1\)", r"rank 1 \(global rank 2\)", "fsdp=2", "tp=2"), each["sizes"]
        )


def test_nccl_must_not_split_the_group_of_all() -> None:
    for device, bound, match in [
        ("cuda:1", "cuda:0", words("device_id=cuda:0", "5 ranks")),
        ("cuda", None, ""),
        ("cpu", "cuda:0", ""),
    ]:
        group = SimpleNamespace(bound_device_id=bound and torch.device(bound))
        with (
            patch("torch.distributed.distributed_c10d._get_default_group", lambda group=group: group),
            patch.object(dist, "get_world_size", lambda: 5),
        ):
            text = error_of(functools.partial(part.refuse_eager, torch.device(device)))
        assert re.search(match, text)
        assert bool(text) == bool(match)


def one_dies(sources: Sources, done: Path) -> str:
    """Rank 3 dies in a mesh of ranks 2 and 3; the mesh of 0 and 1 takes steps until it was noticed, and then more."""
    heartbeat.BEAT_S, heartbeat._STORE_S = 0.4, 0.8
    dist.init_process_group("gloo")
    own = dist.get_rank()
    ranks = [0, 1] if own < 2 else [2, 3]
    mesh = mw.Mesh(fsdp=2, device="cpu", timeout_s=2 if own > 1 else 30, ranks=ranks)
    engine = mw.Engine(mw.load(sources["qwen3"], mesh, dtype=torch.float64), lr=1e-2)
    batches = tiny.batches(mesh.data_rank)
    engine.step(batches)
    if own == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    text = ""
    try:
        for _ in range(3 if own == 2 else 1):
            engine.step(batches)
    except mw.RankError as error:
        text = str(error)
    if own == 2:
        done.touch()
    deadline = time.monotonic() + 20
    while own < 2 and not done.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    if own < 2:
        engine.step(batches)
        text = f"steps {engine.steps}"
    return text


def test_a_lost_rank_is_named_by_both_its_ranks(sources: Sources, tmp_path: Path) -> None:
    said = survive(4, 3, tmp_path, one_dies, sources, tmp_path / "done")
    assert re.search(words(r"^rank 1 \(global rank 3\): died", r"rank 0 \(global rank 2\)"), said[2])
    assert not re.search(r"global rank [01]\b", said[2])
    assert said[0] == said[1] == "steps 3", "the other mesh goes on"


def downloaded(at: Path, log: Path) -> None:
    """Load by a hub id on ranks 1 and 2, with a hub that notes who calls."""

    def snapshot_download(repo_id: str, **options: Any) -> str:
        time.sleep(0.3 if dist.get_rank() == 1 else 0.0)  # a rank that does not wait would be quicker
        with log.open("a") as out:
            out.write(f"{dist.get_rank()} {repo_id}\n")
        return str(at)

    dist.init_process_group("gloo")
    huggingface_hub.snapshot_download = snapshot_download
    if dist.get_rank():
        mw.load("org/tiny", mw.Mesh(fsdp=2, device="cpu", timeout_s=20, ranks=[1, 2]))


def test_the_first_rank_of_the_mesh_downloads_first(sources: Sources, tmp_path: Path) -> None:
    worlds.run(3, downloaded, sources["qwen3"], tmp_path / "log")
    assert (tmp_path / "log").read_text().splitlines() == ["1 org/tiny", "2 org/tiny"]


def leaves() -> int:
    """Run the exit handlers of a mesh, as the end of a script would."""
    dist.init_process_group("gloo")
    handlers: list[Callable[[], None]] = []
    with patch.object(atexit, "register", handlers.append):
        if dist.get_rank():
            mw.Mesh(fsdp=2, device="cpu", timeout_s=20, ranks=[1, 2])
    for handler in reversed(handlers):
        handler()
    dist.barrier()  # the process group still stands
    return len(handlers)


def test_leaving_keeps_the_process_group_of_the_user() -> None:
    assert worlds.run(3, leaves) == [0, 1, 1], "the last heartbeat only"
