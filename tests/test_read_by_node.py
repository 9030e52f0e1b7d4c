"""`mw.load(..., read="node")`: one rank of each node reads for its neighbours."""

from __future__ import annotations

import os
import re
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import meshwright as mw
from meshwright.errors import ConfigError, LoadError, MeshError
from tests import parts, tiny, worlds
from tests.words import words

MESHES = [
    dict(fsdp=4), dict(fsdp=2, tp=2, ep=2), dict(replicate=2, tp=2), dict(tp=4, ep=4), dict(pp=2, fsdp=2),
    dict(pp=2, cp=2),
]  # fmt: skip


def both_ways(source: Path, mesh: dict[str, int], per_node: int) -> dict[str, Any]:
    """Loaded both ways: is it the same, who read how much, what was sent and what was that to be."""
    os.environ["LOCAL_WORLD_SIZE"] = str(per_node)
    sent: list[tuple[str, int]] = []

    def watched(op: str) -> Any:
        real = getattr(dist, op)

        def count(tensor: torch.Tensor, **options: Any) -> Any:
            sent.append((op, tensor.nbytes))
            return real(tensor, **options)

        return count

    alone = mw.load(source, mw.Mesh(**mesh, device="cpu"))
    dist.send, dist.recv = watched("send"), watched("recv")
    model = mw.load(source, alone.mesh, read="node")
    stored = model.stored()
    return dict(
        same=all(torch.equal(t, stored[name]) for name, t in alone.stored().items()),
        alone=(alone.bytes_read, alone.load_bill),
        read=model.bytes_read,
        sent=sorted(sent),
        bill=sorted((c.op, c.num_bytes) for c in model.load_bill for _ in range(c.count)),
    )


CASES: list[tuple[dict[str, int], str, int]] = [
    *(product(MESHES, ["qwen3_moe", "qwen3_5"], [2, 4]) if parts.ALL
      else [(dict(replicate=2, tp=2), "qwen3_moe", 4), (dict(pp=2, fsdp=2), "qwen3_5", 2)])
]  # fmt: skip


@pytest.mark.parametrize(("mesh", "name", "per_node"), CASES, ids=str)
def test_a_node_reads_each_byte_once(tmp_path: Path, name: str, mesh: dict[str, int], per_node: int) -> None:
    """All that a node stores, be it of one rank or of several; in the dtype of the file, by the bill."""
    source = tiny.directory(tmp_path / "m", name, dtype=torch.bfloat16)
    size = (source / "model.safetensors").stat().st_size
    ranks = worlds.run(4, both_ways, source, mesh, per_node)
    for at, rank in enumerate(ranks):
        assert rank["same"], f"rank {at} holds other weights than when it reads them itself"
        assert rank["alone"][1] == ()
        assert rank["sent"] == rank["bill"]
        assert (rank["read"] == 0) == (at % per_node > 0)
        # strips of columns are read with all that lies between them, for each rank of tp
        assert rank["read"] <= min(size * mesh.get("tp", 1), sum(r["alone"][0] for r in ranks[at : at + per_node]))
    assert sum(len(r["sent"]) for r in ranks) > 0


def test_loads_fresh_heads_too(tmp_path: Path) -> None:
    source = tiny.directory(tmp_path / "m", "qwen3_tied")
    assert worlds.run(2, value_head, source) == [True, True]


def value_head(source: Path) -> bool:
    mesh = mw.Mesh(fsdp=2, device="cpu")
    result = [mw.load(source, mesh, head="value", read=read).stored() for read in ("rank", "node")]
    return all(torch.equal(t, result[1][name]) for name, t in result[0].items())


def shrinking(source: Path) -> str:
    """Ranks reach the end of a short file in the middle of the work: none hangs, each reports what it knows."""
    from meshwright.weights.reader import Reader

    real = Reader.fill

    def fill(self: Reader, layout: Any, *args: Any) -> None:
        if "layers.1." in layout.blocks[0].key:
            with (source / "model.safetensors").open("r+b") as file:
                file.truncate(20_000)
        real(self, layout, *args)

    Reader.fill = fill  # type: ignore[method-assign]
    try:
        mw.load(source, mw.Mesh(fsdp=2, device="cpu"), read="node")
    except LoadError as error:
        return str(error)
    return "no error"


def test_a_file_that_cannot_be_read_ends_all_ranks(tmp_path: Path) -> None:
    reader, other = worlds.run(2, shrinking, tiny.directory(tmp_path / "m", "qwen3"), seconds=20)
    assert re.search(words(r"model\.safetensors", r"\bended\b", r"\bbyte \d+"), reader), reader
    assert re.search(words(r"\brank 0\b", r"\breading\b", r"BrokenFile: .*\bended\b"), other), other


def bad(source: Path, read: str, per_node: str) -> str:
    os.environ["LOCAL_WORLD_SIZE"] = per_node
    try:
        mw.load(source, mw.Mesh(fsdp=2, device="cpu"), read=read)
    except (ConfigError, MeshError) as error:
        return str(error)
    return "no error"


def test_mistakes_are_named(tmp_path: Path) -> None:
    source = tiny.directory(tmp_path / "m", "qwen3")
    acts = {read: partial(bad, source, read, per_node) for read, per_node in (("rack", "2"), ("node", "3"))}
    said = worlds.in_turn(2, acts)
    assert all(re.search(words("read='rack'", "rank, node"), text) for text in said["rack"])
    assert all(re.search(words("LOCAL_WORLD_SIZE=3", r"\b2 ranks\b"), text) for text in said["node"])
