"""Public reports that no planted bug answers: what must hold of a step, on a mesh as on one process."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import meshwright as mw
from meshwright.engine import engine as engine_module
from meshwright.models import qwen3_moe
from tests import parts, tiny, trials, worlds
from tests.trials import build, feed

MESHES: list[dict[str, int]] = [dict(fsdp=2), dict(tp=2), dict(replicate=2)]
STREAMS = [[[5, 6, 7], [8, 9, 10, 11, 12]], [[21, 22, 23, 24], [25, 26]]]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    at = tmp_path_factory.mktemp("reports")
    made = {name: tiny.directory(at / name, name) for name in ("qwen3", "qwen3_moe")}
    tiny.directory(at / "few", "qwen3", num_attention_heads=2, num_key_value_heads=1)
    return {**made, "qwen3_moe_2": tiny.directory(at / "two", "qwen3_moe", num_experts_per_tok=2)}


def same(result: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare within 1e-9. A zero gradient has rounding of the size of the whole one, and is compared with that, as in
    G1."""
    assert result.keys() == expected.keys()
    whole = torch.stack([grad.norm() for grad in expected.values()]).norm()
    for name, grad in expected.items():
        assert (result[name] - grad).norm() <= 1e-9 * max(grad.norm(), 1e-6 * whole), name


# Acts on a source and a mesh. All of one number of ranks share a world.
Act = Callable[[Path, dict[str, int]], Any]
CASES: dict[tuple[str, str], tuple[Act, str, dict[str, int]]] = {}


def runs_on(source: str, *meshes: dict[str, int]) -> Callable[[Act], Act]:
    def add(act: Act) -> Act:
        CASES.update({(act.__name__, trials.named(mesh)): (act, source, mesh) for mesh in meshes})
        return act

    return add


@pytest.fixture(scope="module")
def answers(sources: dict[str, Path]) -> Callable[[Act, dict[str, int]], list[Any]]:
    """Return what an act returned on all ranks of a mesh."""

    def run(group: Sequence[tuple[str, str]]) -> dict[tuple[str, str], list[Any]]:
        acts = {case: CASES[case] for case in group}
        size = trials.world_of(acts[group[0]][2])
        return worlds.in_turn(
            size, {case: partial(act, sources[name], mesh) for case, (act, name, mesh) in acts.items()}
        )

    shared = worlds.shared({case: trials.world_of(mesh) for case, (_, _, mesh) in CASES.items()}, run)
    return lambda act, mesh: shared((act.__name__, trials.named(mesh)))


Answers = Callable[[Act, dict[str, int]], list[Any]]


@runs_on("qwen3", {}, *MESHES)
def of_one_target(source: Path, mesh: dict[str, int]) -> tuple[float, dict[str, Tensor]]:
    """All ranks but one have nothing to learn from."""
    engine = build(source, mesh)
    streams = range(engine.model.mesh.data_rank, 2, engine.model.mesh.num_data_ranks)
    batches = []
    for stream in streams:
        labels = [[-100] * len(d) for d in STREAMS[stream]]
        labels[1][0] = -100 if stream == 0 else 77
        batches.append(mw.pack(STREAMS[stream], labels=labels, length=10))
    return engine.backward(batches), mw.gather(engine.model, "grad")


@pytest.mark.parametrize("mesh", MESHES, ids=trials.named)
def test_one_target_in_the_whole_step(answers: Answers, mesh: dict[str, int]) -> None:
    """The denominator is of the step: with that of a rank the gradient is halved, or divided by 0."""
    [(loss, grads)] = answers(of_one_target, {})
    result = answers(of_one_target, mesh)
    assert [x for x, _ in result] == pytest.approx([loss] * 2, rel=1e-12)
    same(result[0][1], grads)


@runs_on("qwen3", {})
def cut(source: Path, mesh: dict[str, int]) -> list[tuple[float, dict[str, Tensor]]]:
    """Compute one step in 1, 2 and 4 micro-batches."""
    engine, out = build(source, mesh), []
    documents = [[5, 6, 7, 8, 9, 10], [1, 2], [100, 101, 102], [33, 44, 55, 66]]
    for share in (4, 2, 1):
        batches = [mw.pack(documents[i : i + share], length=15) for i in range(0, len(documents), share)]
        out.append((engine.backward(batches), mw.gather(engine.model, "grad")))
        engine.discard()
    return out


def test_the_number_of_micro_batches_scales_nothing(answers: Answers) -> None:
    [[(loss, grads), *others]] = answers(cut, {})
    assert len(others) == 2
    for there, result in others:
        assert there == pytest.approx(loss, rel=1e-12)
        same(result, grads)


@runs_on("qwen3", {}, *MESHES)
def counted(source: Path, mesh: dict[str, int]) -> tuple[int, int]:
    engine = build(source, mesh)
    streams = range(engine.model.mesh.data_rank, 2, engine.model.mesh.num_data_ranks)
    record = engine.step([mw.pack(STREAMS[stream], length=10) for stream in streams])
    return record.num_targets, record.num_tokens


@pytest.mark.parametrize("mesh", [{}, *MESHES], ids=trials.named)
def test_targets_and_tokens_are_counted_once(answers: Answers, mesh: dict[str, int]) -> None:
    assert set(answers(counted, mesh)) == {(10, 14)}


@runs_on("qwen3", dict(tp=2))
def stepped_both_ways(source: Path, mesh: dict[str, int]) -> list[dict[str, Tensor]]:
    """Return the parameters of a rank after two steps, by `step` and by its two halves."""
    out = []
    for halves in (False, True):
        engine = build(source, mesh)
        for _ in range(2):
            if halves:
                engine.backward(feed(engine))
                engine.update()
            else:
                engine.step(feed(engine))
        out.append({name: t.clone() for name, t in engine.model.stored().items()})
    return out


def test_every_way_to_step_finishes_the_sums(answers: Answers) -> None:
    """Norms, whose gradient is a share on each rank of tp, are the same bits on both."""
    result = answers(stepped_both_ways, dict(tp=2))
    for name, whole in result[0][0].items():
        assert all(torch.equal(whole, other[name]) for other in (result[0][1], result[1][0])) or "norm" not in name, (
            name
        )
    for step, halves in result:
        assert all(torch.equal(step[name], halves[name]) for name in step)


CLIPPED: list[dict[str, int]] = parts.every(2, [dict(tp=2), dict(fsdp=2), dict(fsdp=2, ep=2)])


@runs_on("qwen3_moe", *CLIPPED)
def clipped(source: Path, mesh: dict[str, int]) -> tuple[float, float]:
    """Return the norm that `update` returns, and the norm of the gradients that the optimizer gets."""
    engine, seen = build(source, mesh, max_norm=0.05), []

    class Watched(engine_module.LocalOptimizer):
        def step(self, stored: Any, grads: Any, *more: Any) -> None:
            seen.append(engine.norm(grads))
            super().step(stored, grads, *more)

    engine.optimizer.__class__ = Watched
    engine.backward(feed(engine))
    return engine.update(), seen[0]


@pytest.mark.parametrize("mesh", CLIPPED, ids=trials.named)
def test_clipped_gradients_have_max_norm(answers: Answers, mesh: dict[str, int]) -> None:
    for before, after in answers(clipped, mesh):
        assert before > 0.05
        assert after == pytest.approx(0.05, rel=1e-9)


def test_there_is_one_place_that_clips() -> None:
    """`Engine._apply`, or the fused update that it gives the norm to; torch's own `clip_grad_norm_` knows no owners and
    fails on several meshes."""
    named = {
        path.name
        for path in (Path(__file__).parents[1] / "meshwright").rglob("*.py")
        if re.search("clip_grad|max_norm", text := path.read_text("utf-8"))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and (node.attr.startswith("clip_grad") or node.attr == "max_norm")
    }
    # notes; what the engine must have done; its options; whether a step was clipped; the update that clips as it reads;
    # the option of verl
    others = {"resume_checks.py", "independent_checks.py", "run.py", "loop.py", "adamw.py", "base.py", "verl.py"}
    assert named == {"agreement.py", "engine.py", *others}


CROWDED: list[dict[str, int]] = parts.every(2, [dict(fsdp=2), {}, dict(tp=2, ep=2), dict(fsdp=2, ep=2)], 1)


@runs_on("qwen3_moe", *CROWDED)
def crowded(source: Path, mesh: dict[str, int]) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    """A router of zeros: all tokens go to the same three of eight experts."""
    engine = build(source, mesh, optimizer=mw.AdamW(weight_decay=0.5))
    for name, stored in engine.model.stored().items():
        if name.endswith("router"):
            stored.zero_()
    before = mw.gather(engine.model)
    load_LE = engine.step(feed(engine)).expert_load
    assert load_LE is not None
    return before, mw.gather(engine.model), load_LE[0]


@pytest.mark.parametrize("mesh", CROWDED, ids=trials.named)
def test_experts_without_tokens_decay(answers: Answers, mesh: dict[str, int]) -> None:
    before, after, load_E = answers(crowded, mesh)[0]
    assert int((load_E == 0).sum()) == 5
    for name in (n for n in before if ".layers.0.mlp.experts." in n):
        decayed = torch.allclose(after[name], before[name] * (1 - 1e-2 * 0.5), rtol=1e-6, atol=1e-8)
        assert decayed == (load_E[int(name.split(".")[5])] == 0), name


LATE: list[dict[str, int]] = [{}, dict(fsdp=2, ep=2)]


@runs_on("qwen3_moe", *LATE)
def late_experts(source: Path, mesh: dict[str, int]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A step in which five of eight experts have no token, one in which they have; ours, and torch's AdamW on whole
    tensors with the same gradients, zeros among them."""
    engine = build(source, mesh, optimizer=mw.AdamW(weight_decay=0.5), max_norm=None)
    routers = {name: stored for name, stored in engine.model.stored().items() if name.endswith("router")}
    kept = {name: stored.clone() for name, stored in routers.items()}
    for stored in routers.values():
        stored.zero_()
    plain = {name: torch.nn.Parameter(t.double()) for name, t in mw.gather(engine.model).items()}
    groups = [[p for n, p in plain.items() if ("norm" not in n) == decayed] for decayed in (True, False)]
    decays = [dict(params=group, weight_decay=decay) for group, decay in zip(groups, (0.5, 0.0), strict=True) if group]
    torchs = torch.optim.AdamW(decays, lr=1e-2, betas=(0.9, 0.95), eps=1e-8) if plain else None
    for last in (False, True):
        engine.backward(feed(engine))
        for name, grad in mw.gather(engine.model, "grad").items():
            plain[name].grad = grad
        if torchs is not None:
            torchs.step()
        engine.update()
        if not last:  # the routers as they were: other experts have tokens now
            for name, stored in routers.items():
                stored.copy_(kept[name])
            for name, whole in mw.gather(engine.model).items():
                if name.endswith("mlp.gate.weight"):
                    plain[name].data.copy_(whole)
    return mw.gather(engine.model), {name: p.detach() for name, p in plain.items()}


@pytest.mark.parametrize("mesh", LATE, ids=trials.named)
def test_experts_whose_first_token_comes_late_are_updated_as_by_torch(answers: Answers, mesh: dict[str, int]) -> None:
    """Their moments are as old as those of all others."""
    result, expected = answers(late_experts, mesh)[0]
    assert result.keys() == expected.keys()
    for name, p in expected.items():
        assert torch.allclose(result[name].double(), p, rtol=0, atol=1e-6), name


OWN: list[dict[str, int]] = parts.every(2, [dict(fsdp=2), dict(fsdp=2, ep=2), dict(replicate=2)], 1)


@runs_on("qwen3_moe_2", *OWN)
def own_experts(source: Path, mesh: dict[str, int]) -> tuple[Tensor, dict[str, Tensor]]:
    """Each data rank uses two experts that no other uses."""
    engine = build(source, mesh)
    first = 2 * engine.model.mesh.data_rank

    def route(logits_TE: Tensor, k: int, *_: Any) -> tuple[Tensor, Tensor]:
        own_k = torch.arange(first, first + k)
        return logits_TE.softmax(-1)[:, own_k], own_k.expand(len(logits_TE), k)

    with patch.object(qwen3_moe.ops, "route", route):
        engine.backward(feed(engine))
    grads = mw.gather(engine.model, "grad")
    engine.update()
    return engine.router.load_LE[0], grads


@pytest.mark.parametrize("mesh", OWN, ids=trials.named)
def test_ranks_that_use_other_experts(answers: Answers, mesh: dict[str, int]) -> None:
    load_E, grads = answers(own_experts, mesh)[0]
    used = [bool(num) for num in load_E]
    assert used == [True] * 4 + [False] * 4
    for name in (n for n in grads if ".layers.0.mlp.experts." in n):
        assert bool(grads[name].any()) == used[int(name.split(".")[5])], name


HEADS: list[dict[str, int]] = [{}, dict(tp=2)]


@runs_on("qwen3", *HEADS)
def two_models(source: Path, mesh: dict[str, int]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return the logits of two models, of each when it was the only one, then twice while both are alive."""
    batch, places = mw.pack([[1, 2, 3], [4, 5, 6, 7, 8]]), [source, source.with_name("few")]
    load = lambda place: mw.load(place, trials.mesh_of(mesh), dtype=torch.float64)  # noqa: E731 - short
    alone = [mw.logits(load(place), batch) for place in places]
    first, second = (load(place) for place in places)
    a, b, b_again, a_again = (mw.logits(model, batch) for model in (first, second, second, first))
    return [(alone[0], a, a_again), (alone[1], b, b_again)]


@pytest.mark.parametrize("mesh", HEADS, ids=trials.named)
def test_models_of_other_heads_in_one_process(answers: Answers, mesh: dict[str, int]) -> None:
    for alone, *together in answers(two_models, mesh)[0]:
        assert all(torch.equal(result, alone) for result in together)
