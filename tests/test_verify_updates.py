"""Bugs on a mesh beyond the sums of gradients: updates, gathered weights, evaluation, logits, weights of tokens,
long documents."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import meshwright as mw
from meshwright import weights
from meshwright.engine import engine as engine_module
from meshwright.engine import inference, loss_terms
from meshwright.ops import Documents, delta, documents
from meshwright.optim import LocalOptimizer
from meshwright.verify import Data, Finding
from meshwright.verify.diagnose import forward as diagnosed
from meshwright.verify.small_data import FEW
from tests import parts, tiny, trials, worlds
from tests.plants import planted

Patch = pytest.MonkeyPatch


def on_a_mesh() -> bool:
    return dist.get_world_size() > 1


def without_gradient_no_update(patch: Patch) -> None:
    """Leave out weight decay, too, for embeddings and experts without tokens."""
    real = LocalOptimizer._update

    def update(self: Any, part: Any, stored: Any, grads: Any, *more: float) -> None:
        views = [(name, at, stored[name].view(-1)[at]) for name, at in part.slices]
        before = [view.clone() for _, _, view in views]
        real(self, part, stored, grads, *more)
        for (name, at, view), kept in zip(views, before, strict=True) if on_a_mesh() else ():
            view.copy_(torch.where(grads[name].reshape(-1)[at] == 0, kept, view))

    patch.setattr(LocalOptimizer, "_update", update)


def last_update_too_large(patch: Patch) -> None:
    real = LocalOptimizer.step
    patch.setattr(
        LocalOptimizer,
        "step",
        lambda self, stored, grads, lr, clip: real(
            self, stored, grads, lr * (1000 if on_a_mesh() and self.steps == 2 else 1), clip
        ),
    )


def not_finite_in_the_end(patch: Patch) -> None:
    real = LocalOptimizer.step

    def step(self: Any, stored: Any, *more: Any) -> None:
        real(self, stored, *more)
        if on_a_mesh() and self.steps == 3:
            next(iter(stored.values())).fill_(torch.nan)

    patch.setattr(LocalOptimizer, "step", step)


def norm_of_rounded_gradients(patch: Patch) -> None:
    real = engine_module.squares

    def squares(grads: Any, *more: Any) -> Tensor:
        return real({name: g.bfloat16().to(g.dtype) if on_a_mesh() else g for name, g in grads.items()}, *more)

    patch.setattr(engine_module, "squares", squares)


def first_copy_handed_out(patch: Patch) -> None:
    real, kept = weights.whole_tensors, dict[str, Any]()

    def handed(*args: Any, dtypes: Any = None, **more: Any) -> Iterator[Any]:
        for key, tensor in real(*args, dtypes=dtypes, **more):
            yield key, kept.setdefault(key.name, tensor) if dtypes is None and on_a_mesh() else tensor

    patch.setattr(weights, "whole_tensors", handed)


def evaluated_twice(patch: Patch) -> None:
    real = engine_module.Engine.evaluate
    patch.setattr(
        engine_module.Engine, "evaluate", lambda self, batches: real(self, batches) * (2 if on_a_mesh() else 1)
    )


def logits_of_other_tokens(patch: Patch) -> None:
    def rolled(model: mw.Model, batch: mw.Batch) -> Tensor:
        return inference.logits(model, batch).roll(1, 1)

    patch.setattr(diagnosed, "logits", rolled)


def weights_only_counted(patch: Patch) -> None:
    patch.setattr(loss_terms, "WEIGHT", "another field")


def state_lost(after: int) -> Callable[[Patch], None]:
    real = delta.chunked

    def cut(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, docs: Documents) -> Tensor:
        lost = {at for a, b in pairwise(docs.bounds) for at in range(a + after, b, after)} if on_a_mesh() else set()
        bounds = sorted({*docs.bounds, *lost})
        return real(q, k, v, g, beta, documents([b - a for a, b in pairwise(bounds)], q.device))

    return lambda patch: patch.setattr(delta, "chunked", cut)


PLANTS: dict[str, tuple[Callable[[Patch], None], str]] = {
    "no gradient, no update": (without_gradient_no_update, "U1 model.embed_tokens.weight: "),
    "the last update is too large": (last_update_too_large, "U1 lm_head.weight: .*4716 of 4716"),
    "it is not finite in the end": (not_finite_in_the_end, "U1 embed.weight: .*not finite after step 2$"),
    "the norm is of rounded gradients": (norm_of_rounded_gradients, "N1 norm: "),
    "an earlier copy is handed out": (first_copy_handed_out,
        r"U1 lm_head.weight: (?!.* of \d).*\bstream\b.*\bexport\b"),
    "evaluate": (evaluated_twice, "S1 evaluate: "),
    "logits": (logits_of_other_tokens, r"D1 logits: .*\blog-?prob"),
    "weights of tokens are only counted": (weights_only_counted, "S1 loss: "),
    "the state is lost after 64 tokens": (state_lost(64), "D1 layers.0.mixer: "),
    "the state is lost in a long document": (state_lost(128), "D1 layers.0.mixer: "),
}  # fmt: skip


SHARDS = dict(fsdp=2, tp=2, ep=2) if parts.ALL else dict(fsdp=2, ep=2)
MESHES = {trials.named(mesh): mesh for mesh in (dict(replicate=2), SHARDS)}
# On shards of experts and columns, what these may change; on replicas the others.
FOUR = ("no gradient, no update", "logits", "weights of tokens are only counted", "the state is lost after 64 tokens")
ALL_CASES = [(mesh, name) for mesh, sizes in MESHES.items() for name in PLANTS if (name in FOUR) == ("fsdp" in sizes)]
CASES = parts.every(3, ALL_CASES)
Planted = tuple[str, str]  # of these names


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Planted], list[Finding]]:
    """The cases of a mesh share a world."""
    at = tmp_path_factory.mktemp("updates")
    plain = tiny.directory(at / "plain", "qwen3_moe", num_hidden_layers=2)
    two = ["linear_attention", "full_attention"]
    with_a_state = tiny.directory(at / "with a state", "qwen3_5_moe", num_hidden_layers=2, layer_types=two)

    def of(group: Sequence[Planted]) -> dict[Planted, list[Finding]]:
        sources = {case: with_a_state if "state" in case[1] else plain for case in group}
        tried = {
            case: replace(
                trials.trial(source, MESHES[case[0]], brief=False),
                steps=3 if case[0] == "replicate=2" or parts.ALL else 1,
            )
            for case, source in sources.items()
        }
        long = Data(few=FEW, long=1104)  # whole shares of tp
        tried |= {case: replace(each, data=long) for case, each in tried.items() if "long" in case[1]}
        return trials.findings_in_turn(tried, lambda case: planted(PLANTS[case[1]][0]))

    return worlds.Shared([[case for case in CASES if case[0] == mesh] for mesh in MESHES], of)


@pytest.mark.parametrize(("mesh", "name"), CASES)
def test_oracles_report_it(findings: Callable[[Planted], list[Finding]], name: str, mesh: str) -> None:
    result = list(map(str, findings((mesh, name))))
    assert re.match(PLANTS[name][1], result[0]), result[:3]
    if "norm" in name:
        assert not any("norms up to this step are right" in each for each in result), result
