"""Context parallelism: distribution of heads, planted bugs, logits compared with transformers; with pipelines too.

tests/test_meshes.py has cp among the other axes, with every oracle.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import meshwright as mw
from meshwright import parallel
from meshwright.models import qwen3, qwen3_5
from meshwright.parallel import context
from meshwright.sharding import HeadSplit, Span, Swap
from tests import parts, tiny, trials, worlds
from tests.plants import planted
from tests.test_transformers import DOCUMENTS, kl, reference_outputs


@pytest.mark.parametrize(
    ("deal", "serves", "result"),
    [
        (HeadSplit(0, 4, 2), 1, [[0, 1], [2, 3]]),
        (HeadSplit(0, 4, 2), 2, [[0], [1]]),
        (HeadSplit(0, 4, 4), 2, [[0], [0], [1], [1]]),  # copies of kv heads
        (HeadSplit(6, 12, 2), 4, [[1, 2], [2, 2]]),  # 3 kv heads under tp=2: uneven, so the last is repeated
        (HeadSplit(6, 12, 3), 4, [[1], [2], [2]]),
    ],
)
def test_which_heads_a_rank_needs(deal: HeadSplit, serves: int, result: list[list[int]]) -> None:
    assert deal.serving(serves) == result


@pytest.mark.parametrize("picked", [[7, 8], [9], [8, 9, 9], [9, 7]])
def test_heads_are_numbered_over_the_whole_model(picked: list[int]) -> None:
    """A rank of tp has heads 7 to 9."""
    x = torch.arange(7.0, 10).expand(4, 3)[..., None]
    assert context._heads(x, picked, 7)[2, :, 0].tolist() == picked


def test_without_cp_nothing_changes_hands() -> None:
    swap, x = Swap(Span("heads", 4), [(3, 1), (3, 2)], 3), torch.ones(2, 4, 3)
    assert swap(x, x[:, :2])[0] is x
    assert swap.back(x) is x
    assert swap.own_heads == range(4)
    assert [[*d.shape] for d in swap(x, x[:, :2])] == [[2, 4, 3], [2, 2, 3]]


def scores(source: Path, mesh: dict[str, int]) -> Tensor:
    return mw.logits(mw.load(source, trials.mesh_of(mesh), dtype=torch.float32), mw.pack(DOCUMENTS, length=88))


@pytest.mark.parametrize("mesh", [dict(cp=2, tp=2), dict(pp=2)] if parts.ALL else [dict(cp=2)], ids=trials.named)
def test_logits_are_those_of_transformers(tmp_path: Path, mesh: dict[str, int]) -> None:
    """Documents cross the boundaries of ranks."""
    names = tiny.ODD if parts.ALL else ("qwen2", "qwen3_5_moe")  # for others D1 compares meshes with one process
    wanted = {name: reference_outputs(name)[0] for name in names}
    sources = {name: tiny.directory(tmp_path / name, name) for name in names}
    cases = {name: functools.partial(scores, at, mesh) for name, at in sources.items()}
    for name, ranks in worlds.in_turn(trials.world_of(mesh), cases).items():
        for logits in ranks:
            result = logits[: len(wanted[name])]
            assert (result - wanted[name]).abs().max() <= 1e-5 * wanted[name].abs().max(), name
            assert abs(kl(wanted[name], result)) <= 3e-7, name


def heads_of_rank_0(patch: pytest.MonkeyPatch) -> None:
    """Decays and convolution of the first heads on all ranks."""
    real = qwen3_5.DeltaNet.forward

    def forward(self: Any, *args: Any) -> Any:
        swap = self.swap
        kept = swap.part
        swap.part = 0
        try:
            return real(self, *args)
        finally:
            swap.part = kept

    patch.setattr(qwen3_5.DeltaNet, "forward", forward)


def copies_in_another_order(patch: pytest.MonkeyPatch) -> None:
    real = qwen3.Attention.shared
    patch.setattr(qwen3.Attention, "shared", lambda self, x: real(self, x.flip(1) if self.swap.armed else x))


def ranks_for_heads(patch: pytest.MonkeyPatch) -> None:
    """The way back takes the heads of a rank for those of its neighbour."""
    real = context.heads_to_tokens
    patch.setattr(context, "heads_to_tokens", lambda swap, *args: real(swap, *args).roll(1, 1))


def positions_of_rank_0(patch: pytest.MonkeyPatch) -> None:
    real = context.own_tokens
    patch.setattr(
        context,
        "own_tokens",
        lambda x, size, part: real(x, size, 0 if x.dtype == torch.int64 and x.max() < 71 else part),
    )


def no_sum_over_cp(patch: pytest.MonkeyPatch) -> None:
    real = parallel.finish
    patch.setattr(
        parallel, "finish", lambda grads, mesh: real([(tuple(a for a in x if a != "cp"), g) for x, g in grads], mesh)
    )


PLANTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str, str]] = {
    "heads of rank 0": (heads_of_rank_0, "qwen3_5", r"D1 layers.0.mixer"),
    "copies of kv heads in another order": (copies_in_another_order, "qwen3", r"D1 layers.0.mixer"),
    "heads of a neighbour on the way back": (ranks_for_heads, "qwen3", r"D1 layers.0.mixer"),
    "positions of rank 0": (positions_of_rank_0, "qwen3", r"D1 layers.0.mixer"),
    "no sum over cp": (no_sum_over_cp, "qwen3_5", r"G1"),
}
FEW = ("copies of kv heads in another order", "no sum over cp")
TRIED = PLANTS if parts.ALL else FEW


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[str]]:
    at = tmp_path_factory.mktemp("sources")
    four = dict(num_key_value_heads=4)  # so that each rank has two of them
    two = dict(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    sources = {
        name: tiny.directory(at / name, name, dtype=torch.bfloat16, **four, **changes)
        for name, changes in {"qwen3": dict[str, Any](), "qwen3_5": two}.items()
    }

    def of(group: Sequence[str]) -> dict[str, list[str]]:
        tried = {name: replace(trials.trial(sources[PLANTS[name][1]], dict(cp=2)), steps=1) for name in group}
        result = trials.findings_in_turn(tried, lambda name: planted(PLANTS[name][0]))
        return {name: [str(f) for f in of] for name, of in result.items()}

    return worlds.Shared([list(TRIED)], of)


@pytest.mark.parametrize("name", TRIED)
def test_planted_bugs_are_named(lines: Callable[[str], list[str]], name: str) -> None:
    assert any(line.startswith(PLANTS[name][2]) for line in lines(name)), lines(name)
    if name == "no sum over cp":
        assert any("cp" in line and "share" in line for line in lines(name)), lines(name)


def groups_of_a_look(source: Path) -> tuple[int, int]:
    """Count the groups after loading, and after one replica has run the model alone."""
    model = mw.load(source, trials.mesh_of(dict(replicate=2, fsdp=2, cp=2, tp=2)), dtype=torch.float32)
    mesh, loaded = model.mesh, len(model.mesh._group_of)
    if mesh.coords["replicate"] == 0:
        mw.logprobs(model, mw.pack(DOCUMENTS, length=88))
    return loaded, len(mesh._group_of)


@pytest.mark.slow
def test_a_replica_that_looks_alone_makes_no_group(tmp_path: Path) -> None:
    """torch numbers groups on each rank as they are made: later ones would be others on each replica. On fewer ranks
    the groups of a look have the ranks of others."""
    for loaded, later in worlds.run(16, groups_of_a_look, tiny.directory(tmp_path / "m", "qwen3", num_hidden_layers=1)):
        assert loaded == later
