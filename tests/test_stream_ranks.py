"""Whole tensors on every rank, their metadata, shards and deltas: bitwise what `mw.gather` and `mw.export` have."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

import meshwright as mw
from meshwright.axes import Axes
from meshwright.blueprint import Blueprint
from meshwright.ops.part_sizes import shrunk_part_sizes
from meshwright.sharding import Block, Box, Param, Piece, pieces
from meshwright.weight_sync import apply_delta
from meshwright.weight_sync.buckets import bytes_of
from meshwright.weights import DTYPES, Key, KeyMap, StoredModel, chosen, of_table, shards
from meshwright.weights import deltas as weights_deltas
from meshwright.weights.shards import file_boxes
from meshwright.weights.streaming import Overlap
from meshwright.weights.writer import whole_rows
from tests import parts, quantised, seeing, tiny, worlds
from tests.trials import Act, error_of, feed, mesh_of, named, said_by_all, world_of

# The family of each mesh: tied embeddings on both stages of a pipeline, uneven owners (36 rows over 4 or 8 ranks).
MESHES: list[tuple[str, dict[str, int]]] = [
    ("qwen3_5_moe", dict(fsdp=2, ep=2)),
    ("qwen2", dict(pp=2, replicate=2)),
    *([("qwen3_5_moe", dict()), ("qwen3", dict(tp=2)), ("qwen3_5_moe", dict(fsdp=2, tp=2, ep=4)),
       ("qwen3_next", dict(cp=2, tp=2)), ("qwen4_exp", dict(fsdp=3)), ("qwen3", dict(fsdp=2, tp=2))]
      if parts.ALL else [("qwen3", dict(tp=2))]),
]  # fmt: skip
IDS = [f"{family}, {named(mesh)}" for family, mesh in MESHES]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Any:
    at = tmp_path_factory.mktemp("stream")
    few = {} if parts.ALL else {"qwen3_5_moe": {**tiny.TWO_LAYERS, "num_experts": 4}}
    return functools.cache(
        lambda family: tiny.directory(at / family, family, dtype=torch.bfloat16, **few.get(family, {}))
    )


def sealed(tensor: Tensor) -> tuple[str, bytes]:
    """Return the type and the bytes of a tensor."""
    return f"{tensor.dtype} {tuple(tensor.shape)}", bytes_of(tensor).cpu().numpy().tobytes()


def traffic(act: Any) -> tuple[Any, int]:
    """Return what an act returns, and the bytes that its broadcasts of devices deliver to each rank."""
    real, sent = dist.broadcast, [0]

    def counted(x: Tensor, *args: Any, **options: Any) -> Any:
        sent[0] += x.nbytes
        return real(x, *args, **options)

    dist.broadcast = counted
    try:
        return act(), sent[0]
    finally:
        dist.broadcast = real


def streamed(model: mw.Model, **options: Any) -> dict[str, Tensor]:
    """Return the stream of every tensor on this rank. Its order and metadata are those of the specs."""
    out, specs = list(mw.stream(model, ranks="all", **options)), mw.tensor_specs(model, **options)
    assert [mw.TensorSpec(name, tuple(t.shape), t.dtype) for name, t in out] == specs
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for _, tensor in out), "a view of a bucket"
    return dict(out)


def same(whole: Mapping[str, Tensor], expected: Mapping[str, Tensor], mesh: mw.Mesh) -> None:
    """Compare bit for bit with what rank 0 has."""
    expected = mesh.broadcast_object({name: sealed(tensor) for name, tensor in expected.items()})
    assert [*whole] == [*expected]
    assert {name: sealed(tensor) for name, tensor in whole.items()} == expected


def exported(at: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """Read the tensors of an export in the order of the names."""
    tensors = load_file(at / "model.safetensors")
    return {name: tensors[name] for name in names}


def in_all_ways(source: Path, mesh: dict[str, int], out: Path) -> None:
    model = mw.load(source, mesh_of(mesh), dtype=torch.float32)
    engine = mw.Engine(model, lr=1e-2)
    engine.step(feed(engine)[:1])
    whole, sent = traffic(lambda: streamed(model))
    same(whole, mw.gather(model), model.mesh)
    assert sent == (sum(spec.num_bytes for spec in mw.tensor_specs(model)) if model.mesh.axes.world > 1 else 0)
    mw.export(model, out / "bf16")
    same(whole, exported(out / "bf16", whole), model.mesh)
    mw.export(model, out / "fp16", dtype=torch.float16)
    half, sent = traffic(lambda: streamed(model, dtype=torch.float16))
    same(half, exported(out / "fp16", half), model.mesh)
    assert half.get("model.layers.0.linear_attn.A_log", torch.zeros(0)).dtype == torch.float32
    assert sent in (0, sum(tensor.nbytes for tensor in half.values()))
    engine.backward(feed(engine)[:1])
    same(streamed(model, which="grad"), mw.gather(model, "grad"), model.mesh)
    same(_tiled(model, which="grad"), mw.gather(model, "grad"), model.mesh)
    engine.discard()
    same(_tiled(model), whole, model.mesh)
    same(_tiled(model, dtype=torch.float16), half, model.mesh)


def _tiled(model: mw.Model, **options: Any) -> dict[str, Tensor]:
    """Assemble the shards of all ranks; each element must come from just one."""
    own = [(name, tensor.clone(), spec) for name, tensor, spec in mw.shards(model, **options)]
    gathered: list[Any] = [None] * model.mesh.axes.world
    dist.all_gather_object(gathered, own)
    specs = mw.tensor_specs(model, **options)
    whole = {spec.name: torch.zeros(spec.shape, dtype=spec.dtype) for spec in specs}
    times = {spec.name: torch.zeros(spec.shape, dtype=torch.uint8) for spec in specs}
    for name, tensor, spec in (shard for of_rank in gathered for shard in of_rank):
        assert (tuple(whole[name].shape), tuple(tensor.shape)) == (spec.shape, spec.size)
        whole[name][spec.slices] = tensor
        times[name][spec.slices] += 1
    assert all(bool((each == 1).all()) for each in times.values())
    return whole


@pytest.mark.parametrize(("family", "mesh"), MESHES, ids=IDS)
def test_every_rank_gets_the_bits_of_an_export(
    directory: Any, tmp_path: Path, family: str, mesh: dict[str, int]
) -> None:
    def run() -> None:
        with shrunk_part_sizes():
            in_all_ways(directory(family), mesh, tmp_path)

    directory(family)
    worlds.run(world_of(mesh), run)


BY_HEADS = [dict(tp=2), dict(fsdp=3, tp=2), dict(cp=2, tp=4, ep=4), dict(replicate=2, fsdp=5), dict(pp=2, fsdp=7)]
ALL_FAMILIES = {**tiny.ODD, "qwen3_vl_moe": seeing.of("qwen3_vl_moe")}


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_shards_tile_the_tensors_of_every_layout(family: str) -> None:
    """Without a mesh: files in each layout, experts transposed and segments included, cut across heads and experts."""
    blueprint = Blueprint.of(ALL_FAMILIES[family])
    layouts = max(len(names) for names in blueprint.table.groups.values())
    for n in range(layouts):
        choice = {g: names[min(n, len(names) - 1)] for g, names in blueprint.table.groups.items() if g}
        keymap = of_table(blueprint.table, torch.float64, choice)
        files = {k.name: torch.randn(k.shape, dtype=torch.float64) for k in keymap.keys.values()}
        params = {p.name: _as_param(p, keymap.choice, files) for p in blueprint.table}
        for sizes in parts.every(2, BY_HEADS, n % 2):
            tiled = {name: torch.zeros_like(tensor) for name, tensor in files.items()}
            axes = Axes(**sizes)
            for rank in range(axes.world):
                mesh: Any = SimpleNamespace(axes=axes, rank=rank, device=torch.device("cpu"))
                stored = {p.param.name: _stored(p, params) for p in pieces(blueprint.spec, axes, rank).values()}
                owner = StoredModel(blueprint.spec, mesh, stored)
                for name, tensor, spec in shards(owner, keymap, keymap.keys.values(), dtypes=None):
                    tiled[name][spec.slices] += tensor  # twice would be another number
            assert all(torch.equal(tiled[name], _in_dtype(files[name], keymap, name)) for name in files), sizes


def on_one_rank(source: Path) -> int:
    model = mw.load(source, mw.Mesh(fsdp=2))
    return 0 if model.mesh.rank else len(list(mw.shards(model)))


def test_one_rank_alone_takes_its_shards(tmp_path: Path) -> None:
    """Nothing is sent: an inference engine may ask ranks one after the other."""
    taken = worlds.run(2, on_one_rank, tiny.directory(tmp_path / "m", "qwen3"), seconds=20)
    assert taken[0] > 0


def test_kept_rows_do_not_change_with_the_model() -> None:
    """A save in the background writes them after later steps. With replicas a rank writes rows from the middle."""
    blueprint, axes = Blueprint.of(tiny.ODD["qwen3"]), Axes(replicate=2, fsdp=3)
    size_of = lambda over: math.prod(axes.sizes(over))  # noqa: E731 - short
    whole = {p.name: torch.randn(p.shape) for p in blueprint.table}
    tiled = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    for rank in range(axes.world):
        mesh: Any = SimpleNamespace(axes=axes, rank=rank, coords=axes.coords(rank), size_of=size_of)
        stored = {p.param.name: _stored(p, whole) for p in pieces(blueprint.spec, axes, rank).values()}
        rows = list(whole_rows(StoredModel(blueprint.spec, mesh, stored), keep=True))
        for tensor in stored.values():
            tensor.fill_(torch.nan)
        for piece, values in rows:
            parts_of_values = values.flatten().split([box.size for box in piece.boxes])
            for box, part in zip(piece.boxes, parts_of_values, strict=True):
                tiled[piece.param.name][box.slices] += part.view(box.shape)
    assert all(torch.equal(tiled[name], tensor) for name, tensor in whole.items())


def test_a_box_that_is_several_boxes_of_the_file() -> None:
    """Take the same columns of two matrices that share a tensor: no family has it, a new one may."""
    file = (18, 8)
    block = Block(Box.whole((2, 9, 8)), "it", file, Box.whole(file))
    overlap = Overlap(Key("it", "F32", file, ""), block, Piece(Param({}, {}, ()), block.ours, 0, 0), block.ours)
    ours, whole = torch.arange(144.0).view(2, 9, 8), torch.zeros(file)
    box = Box((0, 2, 3), (2, 5, 7))
    divided = list(file_boxes(overlap, box))
    assert len(divided) == 2
    for part, spec in divided:
        whole[spec.slices] += ours[part.slices].reshape(spec.size)
    expected = torch.zeros(2, 9, 8)
    expected[box.slices] = ours[box.slices]
    assert torch.equal(whole, expected.view(file))


def _as_param(param: Param, choice: Any, files: Mapping[str, Tensor]) -> Tensor:
    """Return a parameter made of the files, to which the copies of a tied one are added."""
    out, layout = torch.zeros(param.shape, dtype=torch.float64), chosen(param, choice)
    for block in layout.blocks:
        out[block.ours.slices] = block.view(files[block.key])
    for copy in layout.copies:
        copy.view(files[copy.key]).copy_(out[copy.ours.slices])
    return out


def _stored(own: Piece, params: Mapping[str, Tensor]) -> Tensor:
    whole = params[own.param.name]
    return torch.cat([whole.new_empty(0), *(whole[box.slices].reshape(-1) for box in own.boxes)]).view(own.shape)


def _in_dtype(tensor: Tensor, keymap: KeyMap, name: str) -> Tensor:
    return tensor.to(DTYPES[keymap.keys[name].dtype]).double()


def in_formats(source: Path, mesh: dict[str, int], lora: bool, out: Path) -> None:
    options: dict[str, Any] = {"lora": mw.Lora(rank=4, alpha=6.0, b_std=0.1)} if lora else {}
    model = mw.load(source, mesh_of(mesh), dtype=torch.float32, **options)
    engine = mw.Engine(model, lr=1e-2)
    engine.step(feed(engine)[:1])
    for which in ("merged", "adapter", "weight") if lora else ():
        same(streamed(model, which=which), mw.gather(model, which), model.mesh)
        same(_tiled(model, which=which), mw.gather(model, which), model.mesh)
    for form in ("source", "fp8", "values") if not lora else ():
        whole, at = streamed(model, format=form), out / f"as-{form}"
        same(whole, dict(mw.stream(model, format=form)), model.mesh)
        mw.export(model, at, format=form)
        same(whole, exported(at, whole), model.mesh)


def test_formats_and_adapters(directory: Any, tmp_path: Path) -> None:
    """FP8 files in every format on all ranks, and adapters apart and merged."""
    plain = tiny.directory(tmp_path / "plain", "qwen3", **tiny.in_blocks("qwen3"))
    fp8 = quantised.directory(plain, tmp_path / "fp8", quantised.FORMATS["bfloat16"])
    source = directory("qwen3_5_moe")

    def run() -> None:
        with shrunk_part_sizes(20):
            in_formats(fp8, dict(fsdp=2), False, tmp_path)
        with shrunk_part_sizes():
            in_formats(source, dict(fsdp=2), True, tmp_path)

    worlds.run(2, run)


def follow(source: Path, mesh: dict[str, int]) -> list[int]:
    """Apply the deltas of several steps to the first weights; return how many elements each delta had."""
    model = mw.load(source, mesh_of(mesh), dtype=torch.float32)
    engine = mw.Engine(model, lr=2e-4)
    deltas, nums = mw.WeightDeltas(model, dtype=torch.bfloat16), list[int]()
    copy = {name: tensor.clone() for name, tensor in mw.stream(model, ranks="all", dtype=torch.bfloat16)}
    for step in range(3):
        if step != 2:  # then nothing changes
            engine.step(feed(engine)[:1])
        if step == 1 and model.mesh.axes.world > 1:
            next(iter(deltas.stream(ranks="all")))  # not to the end: nothing counts as sent
        ranks = ("all", "first")[step % 2]
        items, sent = traffic(lambda ranks=ranks: list(deltas.stream(ranks=ranks)))
        assert items or model.mesh.rank != 0 or step == 2
        nums.append(sum(len(indices) for _, indices, _ in items))
        assert sent == sum(x.nbytes for item in items for x in item[1:]) * (
            ranks == "all" and model.mesh.axes.world > 1
        )
        if ranks == "first":
            items = model.mesh.broadcast_object(items)
        for name, indices, values in items:
            assert indices.dtype == torch.int32
            assert bool((indices.diff() > 0).all())
            apply_delta(copy[name], indices, values)
        same(copy, dict(mw.stream(model, dtype=torch.bfloat16)), model.mesh)
    return nums


@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        ("qwen2", dict(pp=2)),
        ("qwen3_5_moe", dict(fsdp=2, ep=2)),
        *([("qwen3_5", dict(fsdp=2, tp=2))] if parts.ALL else []),
    ],
    ids=["pp=2", "ep=2", "tp=2"][: 3 if parts.ALL else 2],
)
def test_deltas_make_the_new_weights(directory: Any, family: str, mesh: dict[str, int]) -> None:
    source = directory(family)

    def run() -> list[int]:
        with shrunk_part_sizes():
            return follow(source, mesh)

    nums = worlds.run(world_of(mesh), run)[0]
    assert nums[2] == 0 < nums[1]
    total = sum(tensor.numel() for tensor in load_file(source / "model.safetensors").values())
    assert nums[0] < total, "the delta is as large as the model, so nothing is tested"


def norm_of(model: mw.Model) -> Tensor:
    return next(tensor for name, tensor in model.stored().items() if name.endswith("norm.weight"))


def test_bits_and_not_values_are_compared(directory: Any) -> None:
    """-0 differs from 0, a NaN equals itself, and an int64 index reaches where int32 does not."""

    def run() -> None:
        model = mw.load(directory("qwen3"), mesh_of({}), dtype=torch.float32)
        norm = norm_of(model)
        norm[:2] = torch.tensor([0.0, float("nan")])
        deltas = mw.WeightDeltas(model, dtype=torch.float32)  # that of the live weights: the snapshot is a copy
        assert list(deltas.stream()) == []
        norm[0] = -0.0
        ((_, indices, values),) = list(deltas.stream())
        assert indices.tolist() == [0]
        assert str(values.tolist()) == "[-0.0]"
        assert list(deltas.stream()) == []

    directory("qwen3")
    worlds.run(1, run)
    assert [weights_deltas.index_dtype(n) for n in (2**31 - 1, 2**31)] == [torch.int32, torch.int64]


FSDP = dict(fsdp=2)
REFUSED: dict[str, tuple[Act, str]] = {
    "ranks": (lambda e: list(mw.stream(e.model, ranks="some")), "ranks='some' is unknown; choose from 'first', 'all'"),
    "format": (lambda e: list(mw.stream(e.model, format="fp8", dtype=torch.bfloat16)), "leave dtype= out"),
    "grad": (lambda e: list(mw.shards(e.model, "grad", dtype=torch.bfloat16)), "gradients come in their own dtype"),
    "no grad": (lambda e: list(mw.shards(e.model, "grad")), "no gradients"),
    "dtype": (lambda e: mw.tensor_specs(e.model, dtype=torch.int8), "torch.int8 is not a dtype of weights"),
    "which": (lambda e: mw.tensor_specs(e.model, "weights"), "choose 'weight', 'grad', 'merged' or 'adapter'"),
    "adapter": (lambda e: mw.tensor_specs(e.model, "adapter"), "the model has no adapters"),
    "engine": (mw.tensor_specs, "Engine is not a model"),
    "delta of grad": (lambda e: mw.WeightDeltas(e.model, "grad"), "stream them whole"),
    "other ranks": (
        lambda e: list(mw.stream(e.model, ranks=("first", "all")[e.model.mesh.rank])), "ranks= is all on rank 1"
    ),
    "other dtype": (
        lambda e: list(mw.WeightDeltas(e.model, dtype=(torch.bfloat16, torch.float32)[e.model.mesh.rank]).stream()),
        "dtype= is torch.float32 on rank 1",
    ),
    "overflow": (lambda e: (norm_of(e.model).fill_(7e4), list(mw.stream(e.model, ranks="all",
                 dtype=torch.float16))), "torch.float16 cannot hold"),
}  # fmt: skip


@pytest.fixture(scope="module")
def said(directory: Any) -> Any:
    return said_by_all(directory("qwen3"), {name: (FSDP, act) for name, (act, _) in REFUSED.items()})


@pytest.mark.parametrize("name", REFUSED)
def test_refused_on_all_ranks(said: Any, name: str) -> None:
    assert all(REFUSED[name][1] in error for error in said(name)), said(name)


def test_a_delta_of_another_tensor_is_refused() -> None:
    tensor, values = torch.zeros(3, 2), torch.ones(1)
    for wrong in (
        lambda: apply_delta(tensor, torch.tensor([6]), values),
        lambda: apply_delta(tensor, torch.tensor([-1]), values),
        lambda: apply_delta(tensor.half(), torch.tensor([1]), values),
        lambda: apply_delta(tensor.T, torch.tensor([1]), values),
    ):
        assert error_of(wrong).startswith("ConfigError")
    assert not tensor.any()
