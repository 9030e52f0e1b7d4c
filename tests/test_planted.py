"""Every oracle sees the bug that it is for: each test plants one in the code that runs and reads what is found."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import meshwright as mw
from meshwright import parallel
from meshwright.engine import engine as engine_module
from meshwright.engine import model as engine_model
from meshwright.errors import RankError
from meshwright.layout import Box, rules
from meshwright.mesh import collectives
from meshwright.models import qwen3, qwen3_5
from meshwright.parallel import tensor
from meshwright.verify import Seen, Trial, oracles
from meshwright.weights import load as loading
from meshwright.weights import streaming
from tests import tiny, trials, worlds

Plant = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    at, made = tmp_path_factory.mktemp("planted"), dict[str, Path]()

    def of(name: str) -> Path:
        if name not in made:
            made[name] = tiny.directory(at / name, name)
        return made[name]

    return of


@pytest.fixture
def tried(source: Callable[[str], Path]) -> Callable[..., Trial]:
    def of(name: str, **mesh: int) -> Trial:
        made = trials.trial(source(name), mesh)
        trials.reference(made)  # before anything is planted
        return made

    return of


def expect(tried: Trial, oracle: str, pattern: str) -> None:
    """Among the findings is one of `oracle` whose line matches; the message shows what was found instead."""
    found = [str(f) for f in trials.findings(tried)]
    assert any(line.startswith(oracle) and re.search(pattern, line) for line in found), "\n".join(found) or "nothing"


def test_missing_sum(tried: Callable[..., Trial], monkeypatch: Plant) -> None:
    trial = tried("qwen3", tp=2)
    monkeypatch.setattr(parallel, "finish", lambda grads, mesh: None)
    expect(trial, "G1", r"layers\.\d\.\S*norm\.weight: .*(sum over tp is missing|share)")
    expect(trial, "G2", r"norm\.weight: the gradient of ranks \[0, 1\] differs along tp: is a sum over tp missing")


def test_sum_too_many(tried: Callable[..., Trial], monkeypatch: Plant) -> None:
    trial, real = tried("qwen3", fsdp=2, tp=2), parallel.finish

    def twice(grads: Any, mesh: Any) -> None:
        grads = list(grads)
        real(grads, mesh)
        real(grads, mesh)

    monkeypatch.setattr(parallel, "finish", twice)
    expect(trial, "G1", r"norm\.weight: .*ratio 2: 2 times too large")


def test_averaged_over_data_ranks(tried: Callable[..., Trial], monkeypatch: Plant) -> None:
    trial, real = tried("qwen3", fsdp=2), collectives.torch.distributed.reduce_scatter_tensor

    def halved(output: Tensor, *args: Any, **kwargs: Any) -> Any:
        work = real(output, *args, **kwargs)
        output /= 2
        return work

    monkeypatch.setattr("torch.distributed.reduce_scatter_tensor", halved)
    monkeypatch.setattr("torch.distributed.reduce_scatter_single", halved, raising=False)
    expect(trial, "G1", r"q_proj\.weight: .*ratio 0\.5: 1/2 of it = 1/fsdp")


def test_permuted_segment_in_loading(tried: Callable[..., Trial], monkeypatch: Plant) -> None:
    """One rank reads its part of the fused Q|K|V as if the file had it by heads."""
    trial, real = tried("qwen3_5", tp=2), loading.Reader.read

    def permuted(self: Any, entry: Any, block: Any, part: Box) -> Tensor:
        out = real(self, entry, block, part)
        return out.flip(0) if entry.key.endswith("in_proj_qkv.weight") else out

    monkeypatch.setattr(loading.Reader, "read", permuted)
    expect(trial, "W1", r"layers\.0\.mixer\.qkv: .*the right values in the wrong places of \S*in_proj_qkv")


def test_overwritten_expert(tried: Callable[..., Trial], monkeypatch: Plant) -> None:
    """A broadcast of rank 0's experts to all (transformers#45662)."""
    trial, real = tried("qwen3_moe", fsdp=2, ep=2), engine_model.fill

    def broadcast_after(holding: Any, *args: Any) -> int:
        num_bytes = real(holding, *args)
        dist.broadcast(holding.stored["layers.0.mlp.experts.down"], 0)
        return num_bytes

    monkeypatch.setattr(engine_model, "fill", broadcast_after)
    expect(trial, "W1", r"layers\.0\.mlp\.experts\.down: .*experts\.4\.down_proj\.weight in .* on rank 1")
    expect(trial, "L1", r"loading issued an? broadcast")


def test_extra_all_gather(tried: Callable[..., Trial], monkeypatch: Plant) -> None:
    trial, real = tried("qwen3", tp=2), tensor._collective

    def gathers_twice(door: Any, size: int, group: str, at: str) -> Callable[[Tensor], Tensor]:
        arm = real(door, size, group, at)
        if door.kind is not tensor.ENTER:
            return arm

        def enter(x: Tensor) -> Tensor:
            collectives.gather(x.detach(), size, group)
            return arm(x)

        return enter

    monkeypatch.setattr(tensor, "_collective", gathers_twice)
    expect(trial, "K1", r"all_gather: \d+ among ranks \[0, 1\], the bill says \d+")


def test_skipped_collective(tried: Callable[..., Trial], monkeypatch: Plant) -> None:
    """One rank leaves a collective out: no hang, but an error that says which rank stands where."""
    trial, real = tried("qwen3", tp=2), parallel.finish
    monkeypatch.setattr(parallel, "finish", lambda grads, mesh: real(grads, mesh) if mesh.rank == 0 else None)
    with pytest.raises(
        RankError, match=r"rank 0 is at all_reduce of \d+ bytes at the last sums of gradients, rank 1 .* at the loss"
    ):
        trials.findings(trial)


def test_other_order_of_collectives(tried: Callable[..., Trial], monkeypatch: Plant) -> None:
    """One rank reduces where the other gathers."""
    trial, real = tried("qwen3", fsdp=2), parallel.finish

    def two_kinds(grads: Any, mesh: Any) -> None:
        first, second = (("fsdp",), ("replicate", "fsdp")) if mesh.rank == 0 else (("replicate", "fsdp"), ("fsdp",))
        mesh.process_group(("replicate", "fsdp"))
        real(grads, mesh)
        mesh.sum_(torch.zeros(1), first)
        if mesh.rank == 0:
            mesh.sum_(torch.zeros(1), second)
        else:
            mesh.gather_rows(torch.zeros(1), second)

    monkeypatch.setattr(parallel, "finish", two_kinds)
    with pytest.raises(
        RankError, match=r"rank 0 is at all_reduce of 4 bytes at a sum, rank 1 at all_gather of 4 bytes at"
    ):
        trials.findings(trial)


def test_leaking_document_in_attention(tried: Callable[..., Trial], monkeypatch: Plant) -> None:
    trial, real = tried("qwen3"), qwen3.ops.attention
    monkeypatch.setattr(
        qwen3.ops, "attention", lambda q, k, v, docs: real(q, k, v, replace(docs, bounds=(0, docs.bounds[-1])))
    )
    expect(trial, "D1", r"document [1-9]: log-probabilities off by \S+ from the document alone: a leak")


def test_leaking_document_in_convolution(tried: Callable[..., Trial], monkeypatch: Plant) -> None:
    trial, real = tried("qwen3_5"), qwen3_5.ops.causal_conv
    one = lambda docs: replace(docs, positions_T=torch.arange(len(docs.positions_T)))  # noqa: E731 - a plant
    monkeypatch.setattr(qwen3_5.ops, "causal_conv", lambda x, w, docs: real(x, w, one(docs)))
    expect(trial, "D1", r"document [1-9]: .* a leak")


def test_dropped_key(tried: Callable[..., Trial], monkeypatch: Plant) -> None:
    trial, real = tried("qwen3", fsdp=2), engine_model.of_source

    def without_one(*args: Any) -> Any:
        made = real(*args)
        return replace(made, keys={k: v for k, v in made.keys.items() if k != "model.norm.weight"})

    monkeypatch.setattr(engine_model, "of_source", without_one)
    expect(trial, "E1", r"model\.norm\.weight: 1 keys of the source are not handed out")


def test_rounded_on_the_way_out(tried: Callable[..., Trial], monkeypatch: Plant) -> None:
    trial, real = tried("qwen3", fsdp=2), streaming._packed

    def rounded(*args: Any) -> Any:
        return {dtype: flat.bfloat16().to(dtype) for dtype, flat in real(*args).items()}

    monkeypatch.setattr(streaming, "_packed", rounded)
    expect(trial, "E1", r"q_proj\.weight: \d+ of \d+ elements differ")


def test_norm_counts_copies(tried: Callable[..., Trial], monkeypatch: Plant) -> None:
    trial = tried("qwen3", tp=2)
    monkeypatch.setattr(engine_model.Model, "owned", property(lambda self: set(self.pieces)))
    expect(trial, "N1", r"norm of ones: counts \S+ elements of \d+")
    expect(trial, "N1", r"norm: \S+, one process finds")


def test_optimizer_over_copies(tried: Callable[..., Trial], monkeypatch: Plant) -> None:
    trial = tried("qwen3", fsdp=2)

    class Detached(engine_module.AdamW):
        def __init__(self, stored: Any, *args: Any) -> None:
            super().__init__({name: t.clone() for name, t in stored.items()}, *args)

    monkeypatch.setattr(engine_module, "AdamW", Detached)
    expect(trial, "U1", r"embed\.weight: it has a gradient on rank \d, but no update moved it")


def test_pieces_that_do_not_tile(tried: Callable[..., Trial], monkeypatch: Plant) -> None:
    """Both tp ranks believe that the first half of the query heads is theirs."""
    trial, real = tried("qwen3", tp=2), rules.cut

    def first_half(param: Any, placement: Any, axes: Any, coords: Any) -> Box:
        return real(param, placement, axes, {**coords, "tp": 0} if param.name.endswith("mixer.q") else coords)

    monkeypatch.setattr(rules, "cut", first_half)
    expect(trial, "T1", r"layers\.0\.mixer\.q: .*overlap")


def test_a_door_that_sends_in_another_dtype(tried: Callable[..., Trial], monkeypatch: Plant) -> None:
    trial, real = tried("qwen3", tp=2), collectives.scatter_sum
    monkeypatch.setattr(collectives, "scatter_sum", lambda x, size, group: real(x.float(), size, group).to(x.dtype))
    expect(trial, "K1", r"reduce_scatter: \d+ bytes among ranks \[0, 1\], the bill says \d+")


def test_half_an_update(tried: Callable[..., Trial], monkeypatch: Plant) -> None:
    trial, real = tried("qwen3", fsdp=2), engine_module.AdamW.step
    monkeypatch.setattr(engine_module.AdamW, "step", lambda self, grads, lr: real(self, grads, lr / 2))
    expect(trial, "U1", r"loss of step 1: \S+, one process finds")


def test_replicas_that_drift(tried: Callable[..., Trial], monkeypatch: Plant) -> None:
    trial, real = tried("qwen3", tp=2), engine_module.AdamW.step

    def by_rank(self: Any, grads: Any, lr: float) -> None:
        real(self, grads, lr * (1 + 1e-6 * dist.get_rank()))

    monkeypatch.setattr(engine_module.AdamW, "step", by_rank)
    expect(trial, "G2", r"norm\.weight: the weight of ranks \[0, 1\] differs along tp")


def recorded_otherwise(trial: Trial, ref: Any) -> list[str]:
    """What C1 says when the ranks wrote down other orders (with a watch nobody gets that far)."""
    engine = trial.engine(mw.Mesh(fsdp=2))
    run = oracles.Run(trial, ref, engine)
    run.stepping = [Seen("all_gather", (0, 1), 8), Seen("all_reduce", (0, 1), 8)][:: 1 if dist.get_rank() else -1]
    return [str(f) for f in oracles.c1_collectives(run)]


def test_recorded_orders_that_differ(tried: Callable[..., Trial]) -> None:
    trial = tried("qwen3", fsdp=2)
    for lines in worlds.run(2, recorded_otherwise, trial, trials.reference(trial)):
        assert any(re.search(r"C1 \[0, 1\]: ranks \d and \d part at collective 0", line) for line in lines), lines
