"""Pipelines: every schedule equals one process, with frozen parameters, held gathers or recomputation.

tests/test_schedule.py proves the schedules; tests/test_meshes.py combines pp with other axes.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import meshwright as mw
from meshwright.blueprint import Blueprint
from meshwright.models import Balance, Decoder
from meshwright.ops import Jobs, deferring_weight_grads, linears
from meshwright.parallel import fsdp, run_step
from meshwright.verify import Data, Trial
from tests import parts, tiny, trials, worlds
from tests.ops.rows import experts
from tests.plants import planted
from tests.words import words

FOUR: dict[str, dict[str, Any]] = {  # layers; each half has every kind of layer of its family
    "qwen3": dict(num_hidden_layers=4),
    "qwen3_tied": dict(num_hidden_layers=4),
    "qwen3_5_moe": dict(
        num_hidden_layers=4, layer_types=["linear_attention", "full_attention"] * 2, output_router_logits=True,
        router_aux_loss_coef=0.3,
    ),
}  # fmt: skip
PP, FSDP = dict(pp=2), dict(pp=2, fsdp=2)

Run = tuple[str, dict[str, int], dict[str, Any], dict[str, Any], int]  # family, mesh, pipeline, savings, micro-batches
ALL_RUNS: list[Run] = [
    ("qwen3_5_moe", PP, {}, dict(recompute="selective"), 2),
    ("qwen3", PP, dict(schedule="zero-bubble", stages=2), {}, 2),
    ("qwen3", FSDP, dict(schedule="zero-bubble"), {}, 3),
    ("qwen3", FSDP, dict(hold=False), dict(recompute="full"), 3),
    ("qwen3_tied", dict(pp=4), {}, {}, 6),
    ("qwen3_5_moe", PP, dict(stages=2), {}, 4),
    ("qwen3", PP, dict(ends=(1, 4)), {}, 2),
    ("qwen3_5_moe", PP, dict(schedule="zero-bubble"), dict(recompute="full"), 3),
    ("qwen3_5_moe", PP, dict(schedule="v"), {}, 3),
    ("qwen3_5_moe", FSDP, dict(schedule="zero-bubble", stages=2), {}, 2),
    ("qwen3_5_moe", FSDP, dict(hold=True, stages=2), {}, 2),
    ("qwen3_5_moe", FSDP, dict(hold=False), dict(reshard=False), 2),
    ("qwen3", FSDP, dict(schedule="v"), dict(recompute="selective"), 2),
    ("qwen3_5_moe", dict(pp=2, replicate=2), dict(schedule="zero-bubble"), {}, 2),
    ("qwen3_5_moe", dict(pp=4), dict(schedule="zero-bubble"), {}, 4),
]
RUNS = ALL_RUNS if parts.ALL else ALL_RUNS[:5]


def named(run: Run) -> str:
    family, mesh, pipeline, memory, num = run
    options = [f"{name}={value}" for some in (pipeline, memory) for name, value in some.items()]
    return " ".join([family, trials.named(mesh), *options, f"x{num}"])


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    at = tmp_path_factory.mktemp("four")
    return {name: tiny.directory(at / name, name, dtype=torch.bfloat16, **more) for name, more in FOUR.items()}


def trial_of(sources: dict[str, Path], run: Run) -> Trial:
    family, mesh, pipeline, memory, num = run
    tried = trials.trial(sources[family], mesh)
    return trials.changed(
        tried, data=Data(num=num), pipeline=mw.Pipeline(**pipeline), memory=mw.MemoryOptions(**memory),
        router_aux="previous", steps=2 if parts.ALL or "moe" in family else 1,
    )  # fmt: skip


def copied_parts(patch: pytest.MonkeyPatch) -> None:
    """Copy a module, which shares its hooks, so that FSDP takes all stages for one."""
    import copy

    def part(self: Decoder, layers: range, *, first: bool, last: bool) -> Decoder:
        made = copy.copy(self)
        made._modules = {}
        made.embed, made.head = (self.embed if first else None), (self.head if last else None)
        made.layers = torch.nn.ModuleDict({str(n): self.layers[str(n)] for n in layers})
        return made

    patch.setattr(Decoder, "part", part)


def ends_not_summed(patch: pytest.MonkeyPatch) -> None:
    from meshwright import parallel

    real = parallel.finish
    patch.setattr(parallel, "finish", lambda grads, mesh: real([(a, g) for a, g in grads if "ends" not in a], mesh))


def other_documents(patch: pytest.MonkeyPatch) -> None:
    """Take the bounds of another micro-batch in a stage."""
    real = run_step._Passes.forward

    def forward(self: Any, step: Any) -> Any:
        batches = self.batches
        if step.stage:
            shifted = [*batches[1:], batches[0]]
            self.batches = [replace(b, labels=own.labels) for b, own in zip(shifted, batches, strict=True)]
        try:
            return real(self, step)
        finally:
            self.batches = batches

    patch.setattr(run_step._Passes, "forward", forward)


def other_filler(patch: pytest.MonkeyPatch) -> None:
    """Recompute with the filler of the last micro-batch that went forward."""
    real = Balance.begin
    in_backward = []
    backward = run_step._Passes.backward

    def marked(self: Any, step: Any) -> None:
        in_backward.append(1)
        backward(self, step)
        in_backward.pop()

    patch.setattr(run_step._Passes, "backward", marked)
    patch.setattr(Balance, "begin", lambda self, *given: None if in_backward else real(self, *given))


def order_of_torch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fsdp, "prefetch_in_order", lambda *_: None)


def weights_dropped(patch: pytest.MonkeyPatch) -> None:
    real = run_step._Passes.weights

    def weights(self: Any, step: Any) -> None:
        self._jobs[step.stage, step.batch] = self._jobs[step.stage, step.batch][: 1 if step.batch else None]
        real(self, step)

    patch.setattr(run_step._Passes, "weights", weights)


PLANTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Run, str]] = {
    "stages share hooks": (copied_parts, ("qwen3", FSDP, dict(hold=True, stages=2), {}, 2), "K1 all_gather"),
    "a tied embedding not summed over the ends": (ends_not_summed, ("qwen3_tied", PP, {}, {}, 2), "G1 model.embed"),
    "documents of another micro-batch": (other_documents, ("qwen3", PP, {}, {}, 2), "S1 loss"),
    "recomputed with other filler": (
        other_filler, ("qwen3_5_moe", PP, {}, dict(recompute="full"), 2), "G1",
    ),
    "prefetched in the order of torch": (order_of_torch, ("qwen3", FSDP, dict(hold=False), {}, 3), "K1 all_gather"),
    "gradients of weights dropped": (weights_dropped, ("qwen3", PP, dict(schedule="zero-bubble"), {}, 2), "G1"),
}  # fmt: skip


FEW = ("documents of another micro-batch", "gradients of weights dropped")  # of others, `test_every_schedule` fails
TRIED = [name for name in PLANTS if parts.ALL or name in FEW]


@pytest.fixture(scope="module")
def lines(sources: dict[str, Path]) -> Callable[[str], list[str]]:
    """Return the findings of a run, or of one with a bug. Those of a mesh share a world, with runs without a bug last,
    so that they detect leftovers."""
    runs = {name: PLANTS[name][1] for name in TRIED} | {named(run): run for run in RUNS}

    def of(group: Sequence[str]) -> dict[str, list[str]]:
        tried = {name: trial_of(sources, runs[name]) for name in group}
        findings = trials.findings_in_turn(tried, lambda name: planted(PLANTS[name][0] if name in PLANTS else None))
        return {name: [str(finding) for finding in of_name] for name, of_name in findings.items()}

    return worlds.shared({name: run[1] for name, run in runs.items()}, of)


@pytest.mark.parametrize("name", [named(run) for run in RUNS])
def test_every_schedule(lines: Callable[[str], list[str]], name: str) -> None:
    """Gradients, updates, copies and the bill are compared. The aux loss has a gradient from the second step on."""
    assert lines(name) == []


@pytest.mark.parametrize("name", TRIED)
def test_oracles_detect_planted_bugs(lines: Callable[[str], list[str]], name: str) -> None:
    assert any(line.startswith(PLANTS[name][2]) for line in lines(name)), lines(name)


def frozen(source: Path, mesh: dict[str, int], train: str, schedule: str) -> Any:
    model = mw.load(
        source, trials.mesh_of(mesh), dtype=torch.float64, train=train, pipeline=mw.Pipeline(schedule=schedule)
    )
    engine = mw.Engine(model, lr=1e-2, router_aux="previous")
    losses, before = [engine.step(Data()(0)).loss], mw.gather(model)
    losses.append(engine.backward(Data()(0)))
    assert all(torch.equal(before[name], weight) for name, weight in mw.gather(model).items())
    mw.check_export(model, source.parent / "never")
    grads = mw.gather(model, "grad")
    engine.discard()
    return losses, grads, engine.evaluate(Data(num=2)(0))


@pytest.mark.parametrize("train", parts.every(3, ["layers.3.*", "head.*", "layers.0.*"]))
def test_frozen_stages(sources: dict[str, Path], train: str) -> None:
    """The first stage may have no trained parameter, or all of them."""
    name = "qwen3_5_moe"
    cases = {s: functools.partial(frozen, sources[name], PP, train, s) for s in ("1f1b", "zero-bubble")}
    [one] = worlds.run(1, frozen, sources[name], {}, train, "1f1b")
    for schedule, ranks in worlds.in_turn(2, cases).items():
        for losses, _, evaluated in ranks:
            assert losses == pytest.approx(one[0], rel=1e-9), schedule
            assert evaluated == pytest.approx(one[2], rel=1e-9)
        grads = ranks[0][1]
        assert grads.keys() == one[1].keys()
        worst = max(float((grads[k] - one[1][k]).norm() / one[1][k].norm().clamp_min(1e-12)) for k in grads)
        assert worst < 1e-9, schedule


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_deferred_weight_gradients_equal_immediate_ones(dtype: torch.dtype) -> None:
    """Slices of a parameter are deferred too. No gradient exists before its job runs."""
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(6, 16, generator=g).to(dtype), torch.randn(24, 16, generator=g)
    mix, out = torch.randn(3, 32, 16, generator=g), torch.randn(3, 16, 16, generator=g)
    counts = torch.tensor([4, 0, 2])

    def loss(leaves: list[torch.Tensor]) -> torch.Tensor:
        x, w, mix, out = leaves
        a, b = linears(x, [w[:8], w[8:]])
        y = experts(x, mix.to(x.dtype), out.to(x.dtype), counts)
        return (a.sum() + b.square().sum() + y.square().sum()).float()

    at_once, late = ([t.clone().requires_grad_() for t in (x, w, mix, out)] for _ in range(2))
    loss(at_once).backward()
    jobs: Jobs = []
    with deferring_weight_grads(jobs):
        loss(late).backward()
    assert [t.grad is not None for t in late] == [True, False, False, False]
    for job in jobs:
        job()
    for a, b in zip(at_once, late, strict=True):
        assert a.grad is not None
        torch.testing.assert_close(b.grad, a.grad, rtol=2e-2 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)


def clipped(source: Path) -> tuple[int, float]:
    engine = mw.Engine(
        mw.load(source, trials.mesh_of(dict(pp=2)), dtype=torch.float64, train="head.*"), lr=1e-2, max_norm=1e-3
    )
    record = engine.step(tiny.batches(engine.model.mesh.data_rank))
    return engine.steps, record.grad_norm


def test_clipping_includes_stages_without_trained_parameters(sources: dict[str, Path]) -> None:
    one, other = worlds.run(2, clipped, sources["qwen3"])
    assert one == other
    assert one[0] == 1


def changed_weights(source: Path, train: str, hold: bool, reshard: bool) -> list[str]:
    """Return the weights that change between backward and update. The first stages have no backward."""
    model = mw.load(
        source, trials.mesh_of(FSDP), dtype=torch.float64, train=train, pipeline=mw.Pipeline(hold=hold),
        memory=mw.MemoryOptions(reshard=reshard),
    )  # fmt: skip
    engine, before = mw.Engine(model, lr=1e-2, router_aux="previous"), mw.gather(model)
    engine.backward(Data()(model.mesh.data_rank))
    after = mw.gather(model)
    engine.update()
    return [name for name, weight in before.items() if not torch.equal(weight, after[name])]


def test_frozen_weights_are_freed_after_backward(sources: dict[str, Path]) -> None:
    cases = {
        (train, hold, reshard): functools.partial(changed_weights, sources["qwen3"], train, hold, reshard)
        for train, hold, reshard in (("layers.3.*", False, False), ("**", True, True))
    }
    for case, ranks in worlds.in_turn(4, cases).items():
        assert ranks == [[]] * 4, case


def cut_off(source: Path, first: int) -> list[str]:
    """Return the errors of calls after a pass that no rank finishes."""
    engine = mw.Engine(mw.load(source, trials.mesh_of(PP), dtype=torch.float64), lr=1e-2, router_aux="previous")
    real = run_step._Passes.backward

    def interrupted(self: Any, step: Any) -> None:
        if step.batch == first:
            raise KeyboardInterrupt
        real(self, step)

    errors = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_step._Passes, "backward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step(Data(num=3)(0))
    engine.discard()
    for act in (lambda: engine.step(Data(num=3)(0)), lambda: engine.evaluate(Data(num=3)(0))):
        with pytest.raises(mw.MeshwrightError) as error:
            act()
        errors.append(str(error.value))
    return errors


@pytest.mark.parametrize("first", [0, 2])
def test_no_pass_follows_an_interrupted_one(sources: dict[str, Path], first: int) -> None:
    """The next pass would receive what neighbours sent before. After the first micro-batch it has no buffer for it."""
    for errors in worlds.run(2, cut_off, sources["qwen3"], first):
        assert all(re.search(words("KeyboardInterrupt", "start all ranks again"), each) for each in errors), errors


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "pooled": ({}, words("pooled", "pp=2", "previous")),
    "nothing to train": (dict(train=[]), words("no trained parameter", "train=")),
    "not held": (dict(pipeline=mw.Pipeline("zero-bubble", hold=False)), words("zero-bubble", "hold=False")),
    "ends": (dict(pipeline=mw.Pipeline(ends=(2, 3))), words(r"ends=\(2, 3\)", "pp=2", "4 layers")),
    "layers": (dict(pipeline=mw.Pipeline(stages=3)), words("4 layers", "6 pipeline stages")),
}


def refusal(source: Path, at: str) -> str:
    def act() -> None:
        model = mw.load(source, trials.mesh_of(PP), dtype=torch.float64, **REFUSED[at][0])
        mw.Engine(model, lr=1e-2, router_aux="pooled" if at == "pooled" else "previous").step(Data(num=3)(0))

    return trials.error_of(act)


def test_wrong_options_are_refused(sources: dict[str, Path]) -> None:
    cases = {at: functools.partial(refusal, sources["qwen3_5_moe"], at) for at in REFUSED}
    for at, errors in worlds.in_turn(2, cases).items():
        assert all(re.search(REFUSED[at][1], each) for each in errors), (at, errors)
    blueprint = Blueprint.of(tiny.of("qwen3_tied", num_hidden_layers=6))
    wrongs: list[dict[str, Any]] = [
        dict(schedule="v", stages=3), dict(schedule="v"), dict(ends=(1.5, 6)), dict(ends="36"),
    ]  # fmt: skip
    for wrong in wrongs:
        with pytest.raises(mw.MeshwrightError):
            blueprint.with_options(pipeline=mw.Pipeline(**wrong)).spec.line(2)


def groups_that_torch_counts(source: Path) -> int:
    """Count the groups of a rank, by which torch names the next one."""
    mw.load(source, trials.mesh_of(dict(pp=3)), dtype=torch.float32)
    return int(dist.distributed_c10d._world.group_count)


def test_all_ranks_make_equally_many_groups(tmp_path: Path) -> None:
    """A middle stage is alone on the axis of the ends, and alone among FSDP's shards. If it reused one group for both
    where the ends make two, names of later groups would differ between ranks and no group would form."""
    source = tiny.directory(tmp_path / "m", "qwen3_tied", num_hidden_layers=3)
    assert len(set(worlds.run(3, groups_that_torch_counts, source))) == 1
