"""Public reports that no planted bug answers: what must hold of a step, on a mesh as on one process."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

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
    return {**made, "qwen3_moe_2": tiny.directory(at / "two", "qwen3_moe", num_experts_per_tok=2)}


def same(result: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare within 1e-9. A zero gradient has rounding of the size of the whole one, and is compared with that, as in
    G1."""
    assert result.keys() == expected.keys()
    whole = torch.stack([grad.norm() for grad in expected.values()]).norm()
    for name, grad in expected.items():
        assert (result[name] - grad).norm() <= 1e-9 * max(grad.norm(), 1e-6 * whole), name


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
def test_one_target_in_the_whole_step(sources: dict[str, Path], mesh: dict[str, int]) -> None:
    """The denominator is of the step: with that of a rank the gradient is halved, or divided by 0."""
    loss, grads = worlds.run(1, of_one_target, sources["qwen3"], {})[0]
    result = worlds.run(2, of_one_target, sources["qwen3"], mesh)
    assert [x for x, _ in result] == pytest.approx([loss] * 2, rel=1e-12)
    same(result[0][1], grads)


def cut_into(source: Path, num: int) -> tuple[float, dict[str, Tensor]]:
    engine = build(source, {})
    documents = [[5, 6, 7, 8, 9, 10], [1, 2], [100, 101, 102], [33, 44, 55, 66]]
    share = len(documents) // num
    batches = [mw.pack(documents[i : i + share], length=15) for i in range(0, len(documents), share)]
    return engine.backward(batches), mw.gather(engine.model, "grad")


def test_the_number_of_micro_batches_scales_nothing(sources: dict[str, Path]) -> None:
    loss, grads = worlds.run(1, cut_into, sources["qwen3"], 1)[0]
    for num in (2, 4):
        there, result = worlds.run(1, cut_into, sources["qwen3"], num)[0]
        assert there == pytest.approx(loss, rel=1e-12)
        same(result, grads)


def counted(source: Path, mesh: dict[str, int]) -> tuple[int, int]:
    engine = build(source, mesh)
    streams = range(engine.model.mesh.data_rank, 2, engine.model.mesh.num_data_ranks)
    record = engine.step([mw.pack(STREAMS[stream], length=10) for stream in streams])
    return record.num_targets, record.num_tokens


@pytest.mark.parametrize("mesh", [{}, *MESHES], ids=trials.named)
def test_targets_and_tokens_are_counted_once(sources: dict[str, Path], mesh: dict[str, int]) -> None:
    assert set(worlds.run(trials.world_of(mesh), counted, sources["qwen3"], mesh)) == {(10, 14)}


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


def test_every_way_to_step_finishes_the_sums(sources: dict[str, Path]) -> None:
    """Norms, whose gradient is a share on each rank of tp, are the same bits on both."""
    result = worlds.run(2, stepped_both_ways, sources["qwen3"], dict(tp=2))
    for name, whole in result[0][0].items():
        assert all(torch.equal(whole, other[name]) for other in (result[0][1], result[1][0])) or "norm" not in name, (
            name
        )
    for step, halves in result:
        assert all(torch.equal(step[name], halves[name]) for name in step)


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


@pytest.mark.parametrize("mesh", parts.every(2, [dict(tp=2), dict(fsdp=2), dict(fsdp=2, ep=2)]), ids=trials.named)
def test_clipped_gradients_have_max_norm(sources: dict[str, Path], mesh: dict[str, int]) -> None:
    for before, after in worlds.run(2, clipped, sources["qwen3_moe"], mesh):
        assert before > 0.05
        assert after == pytest.approx(0.05, rel=1e-9)


def test_there_is_one_place_that_clips() -> None:
    """`Engine._apply`, or the fused update that it gives the norm to; torch's own `clip_grad_norm_` knows no owners and
    fails on several meshes."""
    named = {
        path.name
        for path in (Path(__file__).parents[1] / "meshwright").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Attribute) and (node.attr.startswith("clip_grad") or node.attr == "max_norm")
    }
    # notes; what the engine must have done; its options; whether a step was clipped; the update that clips as it reads;
    # the option of verl
    others = {"resume_checks.py", "independent_checks.py", "run.py", "loop.py", "adamw.py", "base.py", "verl.py"}
    assert named == {"agreement.py", "engine.py", *others}


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


@pytest.mark.parametrize(
    "mesh", parts.every(2, [dict(fsdp=2), {}, dict(tp=2, ep=2), dict(fsdp=2, ep=2)], 1), ids=trials.named
)
def test_experts_without_tokens_decay(sources: dict[str, Path], mesh: dict[str, int]) -> None:
    result = worlds.run(trials.world_of(mesh), crowded, sources["qwen3_moe"], mesh)
    before, after, load_E = result[0]
    assert int((load_E == 0).sum()) == 5
    for name in (n for n in before if ".layers.0.mlp.experts." in n):
        decayed = torch.allclose(after[name], before[name] * (1 - 1e-2 * 0.5), rtol=1e-6, atol=1e-8)
        assert decayed == (load_E[int(name.split(".")[5])] == 0), name


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


@pytest.mark.parametrize("mesh", [{}, dict(fsdp=2, ep=2)], ids=trials.named)
def test_experts_whose_first_token_comes_late_are_updated_as_by_torch(
    sources: dict[str, Path], mesh: dict[str, int]
) -> None:
    """Their moments are as old as those of all others."""
    result, expected = worlds.run(trials.world_of(mesh), late_experts, sources["qwen3_moe"], mesh)[0]
    assert result.keys() == expected.keys()
    for name, p in expected.items():
        assert torch.allclose(result[name].double(), p, rtol=0, atol=1e-6), name


def own_experts(source: Path, mesh: dict[str, int]) -> tuple[Tensor, dict[str, Tensor]]:
    """Each data rank uses two experts that no other uses."""
    engine = build(source, mesh)
    first = 2 * engine.model.mesh.data_rank

    def route(logits_TE: Tensor, k: int, *_: Any) -> tuple[Tensor, Tensor]:
        own_k = torch.arange(first, first + k)
        return logits_TE.softmax(-1)[:, own_k], own_k.expand(len(logits_TE), k)

    qwen3_moe.ops.route = route
    engine.backward(feed(engine))
    grads = mw.gather(engine.model, "grad")
    engine.update()
    return engine.router.load_LE[0], grads


@pytest.mark.parametrize(
    "mesh", parts.every(2, [dict(fsdp=2), dict(fsdp=2, ep=2), dict(replicate=2)], 1), ids=trials.named
)
def test_ranks_that_use_other_experts(sources: dict[str, Path], mesh: dict[str, int]) -> None:
    load_E, grads = worlds.run(2, own_experts, sources["qwen3_moe_2"], mesh)[0]
    used = [bool(num) for num in load_E]
    assert used == [True] * 4 + [False] * 4
    for name in (n for n in grads if ".layers.0.mlp.experts." in n):
        assert bool(grads[name].any()) == used[int(name.split(".")[5])], name


def in_turn(sources: list[Path], mesh: dict[str, int]) -> list[Tensor]:
    """Logits of every source, twice, all models alive."""
    models = [mw.load(source, mw.Mesh(**mesh), dtype=torch.float64) for source in sources]
    batch = mw.pack([[1, 2, 3], [4, 5, 6, 7, 8]])
    return [mw.logits(model, batch) for model in [*models, *reversed(models)]]


@pytest.mark.parametrize("mesh", [{}, dict(tp=2)], ids=trials.named)
def test_models_of_other_heads_in_one_process(tmp_path: Path, sources: dict[str, Path], mesh: dict[str, int]) -> None:
    few = tiny.directory(tmp_path / "few", "qwen3", num_attention_heads=2, num_key_value_heads=1)
    both, size = [sources["qwen3"], few], trials.world_of(mesh)
    alone = [worlds.run(size, in_turn, [source], mesh)[0][0] for source in both]
    first, second, again, once_more = worlds.run(size, in_turn, both, mesh)[0]
    for result, expected in zip((first, second, once_more, again), (*alone, *alone), strict=True):
        assert torch.equal(result, expected)
