"""Adapters on every mesh, in float64: the gradient of every factor in two steps, the bill, and the frozen base.

`make test` runs pairs of a mesh and a kind of base or recomputation; with MESHWRIGHT_ALL=1 the whole product.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import meshwright as mw
from meshwright.axes import Axes
from meshwright.engine.step_bill import step_bill
from meshwright.recipe import FOUR_BITS, Lora
from meshwright.verify import Recorder
from meshwright.weights import peft_files
from tests import parts, quantised, tiny, trials, worlds

DRAWN = Lora(rank=3, alpha=6.0, expert_rank=2, b_std=0.1)  # where B is 0, A has no gradient
LIMIT = 1e-9  # of a gradient's norm


def for_four_bits(at: Path, family: str, form: str = "", **changes: Any) -> Path:
    """Write a base whose matrices have whole blocks: in bfloat16, which loading quantises, or in 4 bits."""
    plain = tiny.directory(at / "values", family, dtype=torch.bfloat16, **{**tiny.in_blocks(family), **changes})
    return quantised.in_groups(plain, at / "codes", form) if form else plain


# Where the frozen base comes from. A format that stays quantised in memory is one more line here.
WIDE: Mapping[str, Callable[..., Path]] = {
    "float32": tiny.directory,
    "bfloat16": functools.partial(tiny.directory, dtype=torch.bfloat16),
    "fp8": lambda at, family, **changes: quantised.directory(
        tiny.directory(at / "values", family, **changes), at / "codes", quantised.ours(torch.float32)
    ),
}
FOUR: Mapping[str, Callable[..., Path]] = {
    **dict.fromkeys(FOUR_BITS, for_four_bits),
    **{f"{form} files": functools.partial(for_four_bits, form=form) for form in ("NVFP4", "MXFP4")},
}
BASES = {**WIDE, **FOUR}
QUANTISED = {"fp8", *FOUR}  # those that stay so in memory
DENSE, EXPERTS = ("qwen2", "qwen3", "qwen3_tied", "qwen3_5"), ("qwen3_moe", "qwen3_5_moe")
MESHES: Mapping[str, Sequence[str]] = {  # tp=4 is more than the two kv heads
    **dict.fromkeys(("fsdp=2", "fsdp=3", "tp=2", "tp=4", "cp=2", "pp=2", "replicate=2,fsdp=2"), (*DENSE, *EXPERTS)),
    "fsdp=2,tp=2": DENSE,
    **dict.fromkeys(("fsdp=2,tp=2,ep=2", "fsdp=4,ep=4"), EXPERTS),
}
FOUR_MESHES: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("fsdp=2", "fsdp=3", "tp=2", "pp=2"), ("qwen3", "qwen3_5", *EXPERTS)),
    **dict.fromkeys(("fsdp=2,ep=2", "fsdp=2,tp=2,ep=2"), EXPERTS),
}
RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class Case:
    """A family on a mesh. `fields`: of `mw.load`, if they are not those of the product. `deep`: it has four layers."""

    family: str
    mesh: str
    recompute: str = "none"
    base: str = "float32"
    lora: Lora = DRAWN
    fields: Mapping[str, Any] = field(default_factory=dict, hash=False)
    name: str = ""
    deep: bool = False

    def __str__(self) -> str:
        return f"{self.family} {self.mesh} {self.name or f'{self.recompute} {self.base}'}"

    @property
    def axes(self) -> Axes:
        return Axes(**{**dict.fromkeys(("pp", "replicate", "fsdp", "cp", "tp", "ep"), 1), **sizes(self.mesh)})

    @property
    def frozen(self) -> str | None:
        """The form in which loading keeps the base, if it is not that of the files."""
        return self.base if self.base in FOUR_BITS else None

    @property
    def num_batches(self) -> int:
        """The number of micro-batches of a data rank: interleaved stages take them in groups of pp."""
        return 4 if self.axes.pp > 1 else 2


def sizes(mesh: str) -> dict[str, int]:
    return {axis: int(size) for axis, _, size in (each.partition("=") for each in mesh.split(","))}


def memory(**options: Any) -> dict[str, Any]:
    return {"memory": mw.MemoryOptions(**options)}


LAST = Lora(rank=3, alpha=6.0, b_std=0.1, targets=["model.layers.1.*"])  # nothing to train in the first stage of two
PIPELINES = {
    "zero-bubble": mw.Pipeline(schedule="zero-bubble"), "v": mw.Pipeline(schedule="v"),
    "interleaved": mw.Pipeline(stages=2),
}  # fmt: skip
QUICK = [
    Case("qwen3", "tp=4", "full", "fp8"),
    Case("qwen3_5_moe", "tp=2", "selective", "fp8"),
    Case(
        "qwen3_moe", "fsdp=2,ep=2", base="bfloat16", name="gathers_once", fields=memory(gather_once=True, sum_once=True)
    ),
    Case("qwen3_moe", "pp=2", name="zero-bubble", fields={"pipeline": PIPELINES["zero-bubble"]}),
    Case("qwen3", "pp=2", name="the last stage", lora=LAST),
    Case("qwen3_tied", "replicate=2", "full"),
    Case("qwen3", "fsdp=3", base="nf4"),
]
MORE = [
    Case("qwen3_5_moe", "fsdp=2,ep=2", "none", "bfloat16"), Case("qwen3_5", "tp=2", "selective", "nvfp4"),
    *(Case(family, "pp=2", base=base, fields={"pipeline": pipeline}, name=f"{name} {base}", deep=True)
      for name, pipeline in PIPELINES.items() for family in ("qwen3", "qwen3_5_moe") for base in WIDE),
    Case("qwen3_5_moe", "pp=2", name="zero-bubble, the last stage", lora=LAST,
         fields={"pipeline": PIPELINES["zero-bubble"]}),
    *(Case("qwen3_5_moe", "fsdp=2,tp=2,ep=2", name=name, fields=memory(**{name: True}))
      for name in ("token_once", "offload", "narrow_grads", "gather_once", "sum_once")),
    Case("qwen3_moe", "cp=2,ep=2"), Case("qwen3_5", "cp=2,tp=2"), Case("qwen3_5_moe", "pp=2,fsdp=2,ep=2"),
]  # fmt: skip
PRODUCT = [
    Case(family, mesh, recompute, base)
    for meshes, kinds, bases in ((MESHES, RECOMPUTE, WIDE), (FOUR_MESHES, ("none", "full"), FOUR))
    for mesh, families in meshes.items()
    for family, recompute, base in itertools.product(families, kinds, bases)
]
CASES = {str(case): case for case in ([*PRODUCT, *QUICK, *MORE] if parts.ALL else QUICK)}

Answer = tuple[list[dict[str, Tensor]], bool, list[str]]


def trained(source: Path, case: Case, *, alone: bool = False) -> Answer:
    """Return the gradients of two steps; whether the base kept its values; where the bill is wrong, of the second and,
    with options of a case, of a third."""
    mesh = trials.mesh_of({} if alone else sizes(case.mesh))
    fields = {} if alone else {**memory(recompute=case.recompute), **case.fields}
    model = mw.load(source, mesh, dtype=torch.float64, lora=case.lora, frozen=case.frozen, **fields)
    assert bool(model.numbers) == (case.base in QUANTISED)
    engine, steps = mw.Engine(model, lr=1e-2, router_aux="previous" if case.axes.pp > 1 else "pooled"), []
    base = {name: t.clone() for name, t in model.stored().items() if name not in model.trained}
    ranks = range(case.axes.num_data_ranks) if alone else [mesh.data_rank]
    batches = [batch for rank in ranks for batch in tiny.batches(rank, num=case.num_batches)]
    for _ in range(2):
        recorder = Recorder()
        with recorder:
            engine.backward(batches)
        steps.append(mw.gather(model, "grad"))
        with recorder:
            engine.update()
    wrong = [] if alone else billed_otherwise(model, engine, batches, recorder)
    if case.fields and not alone:  # `step` sends what its halves do
        with Recorder() as recorder:
            engine.step(batches)
        wrong += billed_otherwise(model, engine, batches, recorder)
    return steps, all(torch.equal(model.stored()[name], tensor) for name, tensor in base.items()), wrong


def billed_otherwise(model: mw.Model, engine: mw.Engine, batches: Sequence[mw.Batch], recorder: Recorder) -> list[str]:
    """Return the operations and ranks for which the bill of a step has another number, or other bytes, than ran."""
    axes, rank = model.mesh.axes, model.mesh.rank
    sent, billed = Counter[tuple[str, tuple[int, ...], str]](), Counter[tuple[str, tuple[int, ...], str]]()
    for each in recorder.collectives:
        sent[each.op, each.ranks, "times"] += 1
        sent[each.op, each.ranks, "bytes"] += each.num_bytes
    for charge in step_bill(model, len(batches[0]), len(batches), engine.router.mode):
        ranks = axes.group(rank, charge.axes)
        billed[charge.op, ranks, "times"] += charge.count
        billed[charge.op, ranks, "bytes"] += charge.count * charge.num_bytes
    # The router decides how many rows travel over ep.
    differ = {key for key in sent | billed if sent[key] != billed[key]} - {
        key for key in sent if axes.ep > 1 and key[0] == "all_to_all" and key[2] == "bytes"
    }
    return [f"{key}: {sent[key]}, the bill says {billed[key]}" for key in sorted(differ)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Path]:
    at = tmp_path_factory.mktemp("bases")

    @functools.cache
    def made(family: str, base: str, deep: bool) -> Path:
        changes: dict[str, Any] = {"num_hidden_layers": 4 if deep else 2} if deep or not parts.ALL else {}
        if changes and "3_5" in family:
            changes["layer_types"] = ["linear_attention", "full_attention"] * (2 if deep else 1)
        return BASES[base](at / f"{family}-{base}-{deep}", family, **changes)

    return lambda case: made(case.family, case.base, case.deep)


@pytest.fixture(scope="module")
def ran(source: Callable[[Case], Path]) -> Callable[[str], tuple[list[dict[str, Tensor]], list[Answer]]]:
    """Run all cases of a mesh in one world, and one process for each of their bases and numbers of data ranks."""
    references: dict[Any, list[dict[str, Tensor]]] = {}

    def key_of(case: Case) -> Any:
        return case.family, case.base, case.deep, case.lora, case.axes.num_data_ranks, case.axes.pp > 1

    def run(group: Sequence[str]) -> dict[str, Any]:
        cases = [CASES[name] for name in group]
        new = {key_of(case): case for case in cases if key_of(case) not in references}
        alone = {key: functools.partial(trained, source(case), case, alone=True) for key, case in new.items()}
        references.update({key: ranks[0][0] for key, ranks in worlds.in_turn(1, alone, seconds=120).items()})
        acts = {str(case): functools.partial(trained, source(case), case) for case in cases}
        ranks = worlds.in_turn(cases[0].axes.world, acts, seconds=120)
        return {str(case): (references[key_of(case)], ranks[str(case)]) for case in cases}

    return worlds.shared({name: case.mesh for name, case in CASES.items()}, run)


@pytest.mark.parametrize("name", CASES)
def test_factors_have_the_gradients_of_one_process(
    ran: Callable[[str], Any], name: str, record_property: Callable[[str, object], None]
) -> None:
    alone, ranks = ran(name)
    worst = 0.0
    for expected, actual in zip(alone, ranks[0][0], strict=True):
        assert expected.keys() == actual.keys()
        assert all(key.startswith(peft_files.PREFIX) for key in expected)
        for key, grad in expected.items():
            assert grad.norm() > 0, key
            off = float((actual[key] - grad).norm() / grad.norm())
            worst = max(worst, off)
            assert off <= LIMIT, f"{key}: {off:.1e} off"
    record_property("worst", worst)
    assert all(same for _, same, _ in ranks), "a frozen weight has changed"
    assert not [line for _, _, wrong in ranks for line in wrong]
