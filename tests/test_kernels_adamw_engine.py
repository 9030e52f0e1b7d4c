"""Steps of an engine whose updates are those of kernels/adamw.py, beside steps by the formula."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

import meshwright as mw
from meshwright.engine import engine as engine_module
from meshwright.ops.kernels import trials
from meshwright.optim import LocalOptimizer
from meshwright.optim import adamw as module
from tests import tiny, worlds
from tests.interpreter import kernels_of
from tests.trials import table_of

CASES = {
    "tied, clipped now and then": dict(),
    "moments in bfloat16": dict(optimizer=mw.AdamW(state_dtype=torch.bfloat16)),
    "adapters": dict(lora=mw.Lora(rank=2, b_std=0.1)),
}
BOUNDS = (0.05, None, 100.0, 0.1)  # of the norms of steps, which are about 1


def engine_of(source, lora=None, **options):
    mesh = engine_of.mesh = vars(engine_of).get("mesh") or mw.Mesh(fsdp=2, device="cpu", timeout_s=30)
    model = mw.load(source, mesh, dtype=torch.float32, lora=lora)
    return mw.Engine(model, lr=lambda step: 1e-2 / (1 + step), **options)


def fused(patch):
    """Let the kernel update on a CPU."""
    patch.setattr(module.AdamW, "fuses", lambda self, param, grad: param.dtype == torch.float32)


def trained(source, plant=None, **options):
    """Make four steps. Return how often the kernel ran, and how far weights and moments were off after any step: from
    the formula in float64, given what was there before."""
    kernels, calls, seen = kernels_of("adamw"), [], []
    real, real_step = kernels.update, LocalOptimizer.step

    def update(part, norm, numbers):
        """The interpreter has no bfloat16."""
        calls.append(1)
        wide = replace(part, mean=part.mean.float(), square=part.square.float())
        real(wide, *(norm, numbers) if plant is None else plant(norm, numbers))
        part.mean.copy_(wide.mean)
        part.square.copy_(wide.square)

    def step(self, stored, grads, *more):
        self.make_state(stored)
        pieces = {n: (stored[n].double(), grads[n].double(), *(x.double() for x in self.state[n])) for n in self.state
                  if n in grads}  # fmt: skip
        real_step(self, stored, grads, *more)
        seen.append((pieces, {n: (stored[n].clone(), *(x.clone() for x in self.state[n])) for n in pieces}))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "update", update)
        patch.setattr(LocalOptimizer, "step", step)
        fused(patch)
        engine = engine_of(source, **options)
        for engine.max_norm in BOUNDS:
            before = versions(engine)
            norm = engine.step(tiny.batches(engine.model.mesh.data_rank)).grad_norm
            assert not calls or all(map(int.__gt__, versions(engine), before)), "who caches a weight must notice"
            seen[-1] += (min(1.0, (engine.max_norm or math.inf) / norm),)
    return len(calls), max(off(engine, number, *each) for number, each in enumerate(seen))


def off(engine, number, before, after, factor):
    """Return how far the results of a step are off, of the norm; moments in bfloat16 after the same rounding."""
    far = [0.0]
    for name, (weight, grad, *moments) in before.items():
        new, state = engine.optimizer.options.plain_update(
            weight, grad * factor, moments, lr=engine.lr(number), step=number + 1, decays=engine.model.table[name].decay
        )
        for got, want in zip(after[name], (new, *state), strict=True):
            narrow = got.dtype == torch.bfloat16
            far.append(trials.distance(got.double(), want.to(got.dtype).double()) / (4000 if narrow else 1))
    return max(far)


def versions(engine):
    stored = engine.model.stored()
    return [stored[name]._version for name in engine.model.trainable if stored[name].numel()]


PLANTS = {
    "the clip factor forgotten": lambda norm, numbers: (norm, replace(numbers, max_norm=math.inf)),
    "the bias correction of the next step": lambda norm, numbers: (norm, replace(numbers, step=numbers.step + 1)),
    "norms and biases decay": lambda norm, numbers: (norm, replace(numbers, weight_decay=0.1)),
    "the lr of the first step": lambda norm, numbers: (norm, replace(numbers, lr=1e-2)),
}


def distances(source):
    """Return the results of each case, and those of each bug in the first."""
    cases = {name: trained(source, **options) for name, options in CASES.items()}
    return cases, {name: trained(source, plant) for name, plant in PLANTS.items()}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tiny.directory(tmp_path_factory.mktemp("adamw"), "qwen3_tied", num_hidden_layers=1)


def test_steps_by_the_kernel_are_those_by_the_formula(source):
    kernels_of("adamw")
    for results, planted in worlds.run(2, distances, source):
        for name, (calls, distance) in results.items():
            assert calls > 0, name
            assert distance <= 1e-6, (name, distance)
        assert min(distance for _, distance in planted.values()) > 1e-4, planted


def infinite_gradient(scores, fields):
    terms = mw.losses.cross_entropy(scores, fields)
    return terms + (terms - terms.detach()).sqrt()  # 0, and steep


def infinite_loss(scores, fields):
    """Its gradients are finite."""
    return mw.losses.cross_entropy(scores, fields) + math.inf


def failing_loss(scores, fields):
    raise ValueError("a mistake of the user")


BROKEN = {
    infinite_gradient: "NonFiniteError: the gradient norm",
    infinite_loss: "NonFiniteError: the loss",
    failing_loss: "a mistake",
}


def broken(source, plant):
    """Break the first step, and the second before it succeeds. Return what each said, and whether all stayed as it
    was."""
    results = {}
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        for each in BROKEN:
            engine = engine_of(source)
            fused(patch)
            for step in range(2):
                before = [x.clone() for x in snapshot(engine)]
                engine.loss = each
                try:
                    engine.step(tiny.batches(engine.model.mesh.data_rank))
                    said = "nothing"
                except Exception as error:  # noqa: BLE001 - also that of the user
                    said = f"{type(error).__name__}: {error}"
                after = snapshot(engine)
                new_state = after[len(before) :]  # made in the first step: zeros
                same = all(map(torch.equal, before, after)) and not any(x.any() for x in new_state)
                same = same and not engine.model.grads() and engine.steps == engine.optimizer.steps == step
                results[each.__name__, step] = said, same
                engine.loss = mw.losses.cross_entropy
                if not step and same:
                    engine.step(tiny.batches(engine.model.mesh.data_rank))  # the model is whole
    return results


def snapshot(engine):
    state = [x for both in engine.optimizer.state.values() for x in both]
    return [*engine.model.stored().values(), *state]


def nothing(patch):
    pass


def written_despite_an_infinite_norm(patch):
    kernels, real = kernels_of("adamw"), kernels_of("adamw").update
    patch.setattr(kernels, "update", lambda part, norm, numbers: real(part, norm.nan_to_num(1, 1, 1), numbers))


def loss_forgotten(patch):
    patch.setattr(engine_module, "norms_if_applied", lambda reduced, norms, num_metrics: norms)


@pytest.mark.parametrize(
    ("plant", "seen"),
    [
        (nothing, []),
        (written_despite_an_infinite_norm, [*BROKEN]),
        (loss_forgotten, [infinite_loss, failing_loss]),
    ],
)
def test_a_step_that_is_not_finite_changes_nothing(source, plant, seen):
    kernels_of("adamw")
    for results in worlds.run(2, partial(broken, source), plant):
        for (name, step), (said, same) in results.items():
            case = next(each for each in BROKEN if each.__name__ == name)
            assert same == (case not in seen), (name, step, said)
            assert BROKEN[case] in said or case in seen, said


def test_what_keeps_the_formula(monkeypatch):
    """8-bit state, another layout of it, another optimizer, and a rank without gradients."""
    x = torch.zeros(4, 4)
    plain = LocalOptimizer(mw.AdamW(), table_of("ab"))
    assert not plain.fuses({"a": x}, {"a": x}), "on a CPU"
    fused(monkeypatch)
    assert plain.fuses({"a": x, "frozen": x.double()}, {"a": x})
    assert not plain.fuses({"a": x}, {})
    assert not plain.fuses({"a": x, "b": x.double()}, {"a": x, "b": x.double()})
    plain.state = {"a": (x, x.t()[1:])}
    assert not plain.fuses({"a": x}, {"a": x})
    in_8_bits = LocalOptimizer(mw.AdamW(state_dtype=torch.uint8), table_of("ab"), {"b": None})
    assert not in_8_bits.fuses({"a": x}, {"a": x})
    assert not mw.Optimizer.fuses(mw.AdamW(), x, x)
