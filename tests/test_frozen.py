"""Frozen parameters stay in the dtype of their files, and change no number."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import meshwright as mw
from meshwright.blueprint import Blueprint
from meshwright.engine.step_bill import step_bill
from meshwright.verify.collective_checks import stored_bytes
from meshwright.verify.recorder import Recorder
from meshwright.weights import StoredModel, open_source, whole_tensors
from tests import parts, seeing, tiny, trials, worlds

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
PLAIN = mw.MemoryOptions()
# Some of what is joined in one product, of a layer, and of the experts of a layer; never the embedding.
SOME = {
    "qwen2": ["layers.*.mixer.q*", "layers.1.mlp*", "head.*"],  # biases among them
    "qwen3": ["layers.*.mixer.q.*", "layers.0.mlp*", "head.norm*"],
    "qwen3_tied": ["layers.*.mixer.v.*", "layers.1.mlp*"],
    "qwen3_moe": ["layers.*.mixer.k.*", "layers.0.mlp.experts.down", "layers.2.mlp.experts*", "head.*"],
    "many rows": ["layers.0.*"],  # more than are cast at once for a product
    "qwen3_5": ["layers.*.mixer.qkv*", "layers.2.mixer.conv*", "layers.1.*", "layers.0.mixer.gates*", "head.weight"],
}


@dataclass(frozen=True)
class Case:
    name: str
    mesh: Mapping[str, int] = field(default_factory=dict)
    dtype: torch.dtype = BF16
    memory: mw.MemoryOptions = PLAIN

    def __str__(self) -> str:
        saved = {k: v for k, v in vars(self.memory).items() if v != vars(PLAIN)[k]}
        return f"{self.name}-{trials.named(dict(self.mesh))}-{str(self.dtype)[6:]}" + "".join(f"-{k}" for k in saved)


ONE: dict[str, int] = {}
FSDP, TP, EXPERTS, REPLICAS = dict(fsdp=2), dict(tp=2), dict(fsdp=2, ep=2), dict(replicate=2)
CASES = parts.every(6, [
    Case("qwen3_5", ONE, F32), Case("qwen3_moe", ONE, F64), Case("qwen2", ONE, F32), Case("qwen3", ONE, BF16),
    *(Case(name, mesh) for name in ("qwen2", "qwen3_5") for mesh in (FSDP, TP)),
    *(Case("qwen3_tied", mesh, dtype) for mesh, dtype in ((REPLICAS, F32), (TP, F64), (FSDP, BF16))),
    *(Case("qwen3", mesh, F64) for mesh in (FSDP, REPLICAS)),
    *(Case("qwen3_moe", EXPERTS, dtype) for dtype in (F32, F64, BF16)),
    *(Case(name, REPLICAS, F32) for name in ("qwen3_moe", "qwen3_5")),
    *(Case("many rows", mesh, dtype) for mesh, dtype in ((ONE, F32), (ONE, BF16), (TP, BF16), (FSDP, BF16))),
    *(Case("qwen3_5", mesh, memory=mw.MemoryOptions(recompute="full", offload=True)) for mesh in (ONE, FSDP)),
], 2)  # fmt: skip
CASES.append(Case("qwen3_moe", EXPERTS, memory=mw.MemoryOptions(recompute="selective", reshard=False)))


def outputs_of(model: mw.Model, out: Path) -> dict[str, Any]:
    """All that a run says, and what it writes."""
    batches = tiny.batches(model.mesh.data_rank)
    engine = mw.Engine(model, lr=1e-2)
    loss, message = engine.backward(batches), {"grad": mw.gather(model, "grad")}
    billed, held = stored_bytes(engine), {s.what: 0 for s in model.need().stored()}
    norm = engine.update()
    for each in model.need().stored(model.mesh.rank):
        held[each.what] += each.num_bytes
    assert {**billed, "moments": engine.optimizer.num_bytes} == {what: held[what] for what in (*billed, "moments")}
    message |= {"step": (loss, norm), "after": mw.logits(model, batches[1]), "weight": mw.gather(model)}
    assert mw.check_weights(model, [n for n in model.pieces if n not in model.trainable]).ok
    mw.export(model, out)
    return message


def both(case: Case, source: Path, out: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, torch.dtype]]:
    """Run with frozen parameters in the dtype of the files, then in that of trained ones."""
    load = functools.partial(mw.load, source, trials.mesh_of({**case.mesh}), dtype=case.dtype, memory=case.memory)
    model = load(train=SOME[case.name])
    dtypes = {name: tensor.dtype for name, tensor in model.stored().items()}
    assert {dtypes[name] for name in model.trainable} == {torch.promote_types(case.dtype, F32)}
    narrow = outputs_of(model, out / "narrow")
    with pytest.MonkeyPatch.context() as patch:
        as_trained = functools.partialmethod(_all_wide, Blueprint.stored_dtypes)
        patch.setattr(Blueprint, "stored_dtypes", as_trained)
        model = load(train=SOME[case.name])
        assert {t.dtype for t in model.stored().values()} == {torch.promote_types(case.dtype, F32)}
        return narrow, outputs_of(model, out / "wide"), dtypes


def _all_wide(self: Blueprint, stored_dtypes: Any, compute: torch.dtype, trained: Any) -> dict[str, torch.dtype]:
    return stored_dtypes(self, compute, set(self.table.params))


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Any]:
    """Cases on equally many ranks share a world."""
    at = tmp_path_factory.mktemp("frozen")
    many = dict(vocab_size=9001)
    sources = {
        name: tiny.directory(at / name, name.replace("many rows", "qwen3"), dtype=BF16, **(many if " " in name else {}))
        for name in {case.name for case in CASES}
    }
    by_name = {str(case): case for case in CASES}

    def run(group: Any) -> Any:
        mesh = dict(by_name[group[0]].mesh)
        acts = {c: functools.partial(both, by_name[c], sources[by_name[c].name], at / f"out-{c}") for c in group}
        result = worlds.in_turn(trials.world_of(mesh), acts, seconds=120)
        return {case: (result[case], at / f"out-{case}") for case in group}

    return worlds.shared({name: trials.world_of({**case.mesh}) for name, case in by_name.items()}, run)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return a.dtype == b.dtype and torch.equal(a, b) if isinstance(a, Tensor) else a == b


@pytest.mark.parametrize("case", [str(case) for case in CASES])
def test_narrow_storage_changes_no_number(ran: Callable[[str], Any], case: str) -> None:
    ranks, out = ran(case)
    for narrow, wide, dtypes in ranks:
        for what in wide:
            assert same(narrow[what], wide[what]), f"{what} differs"
        assert BF16 in dtypes.values()
        assert (dtypes["embed.weight"] == BF16) == ("tied" not in case and "qwen2" not in case)
    for path in (out / "wide").iterdir():
        assert (out / "narrow" / path.name).read_bytes() == path.read_bytes()


def stored_of(source: Path, mesh: dict[str, int], **options: Any) -> dict[str, tuple[torch.dtype, int]]:
    model = mw.load(source, mw.Mesh(**mesh), **options)
    return {name: (t.dtype, t.nbytes) for name, t in model.stored().items()}


def test_a_reference_model_takes_the_memory_of_its_file(tmp_path: Path) -> None:
    source = tiny.directory(tmp_path / "m", "qwen3_5", dtype=BF16)
    file_bytes = sum(entry.stop - entry.start for entry in open_source(source).entries.values())
    [one] = worlds.run(1, functools.partial(stored_of, train=[]), source, {})
    exact = {name for name, (dtype, _) in one.items() if dtype == F32}
    assert {name.split(".", 3)[-1] for name in exact} == {"gates.A_log", "gates.dt_bias", "norm.weight"}
    dt_bias_bytes = sum(t.nbytes for k, t in load_file(source / "model.safetensors").items() if k.endswith("dt_bias"))
    assert sum(num for _, num in one.values()) == file_bytes + dt_bias_bytes  # which the file has in bfloat16


def test_the_widest_of_its_keys(tmp_path: Path) -> None:
    """gate and up are one parameter; so are the experts of a layer. A new head is in no file."""
    source = tiny.directory(tmp_path / "m", "qwen3_moe", dtype=BF16)
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"].float()
    one = "model.layers.0.mlp.experts.3.down_proj.weight"
    tensors[one] = tensors[one].half()  # nothing narrower holds both
    tensors["model.norm.weight"] = tensors["model.norm.weight"].half()
    save_file(tensors, source / "model.safetensors")
    result = worlds.run(2, functools.partial(stored_of, head="value", train="layers.2.*"), source, dict(fsdp=2))[0]
    wide = {name for name, (dtype, _) in result.items() if dtype == F32 and not name.startswith("layers.2.")}
    assert wide == {"layers.0.mlp.experts.down", "layers.1.mlp.gate_up.weight", "head.weight"}
    assert result["head.norm.weight"][0] == torch.float16
    assert {dtype for name, (dtype, _) in result.items() if name.startswith("layers.2.")} == {F32}


def test_float64_is_frozen_as_it_is(tmp_path: Path) -> None:
    source = tiny.directory(tmp_path / "m", "qwen3")
    tensors = load_file(source / "model.safetensors")
    save_file({**tensors, "model.norm.weight": tensors["model.norm.weight"].double()}, source / "model.safetensors")
    with pytest.raises(mw.MismatchedKey, match=r"\bF64\b"):
        mw.load(source, train=[])
    [result] = worlds.run(1, functools.partial(stored_of, dtype=F64, train=[]), source, {})
    assert {name for name, (dtype, _) in result.items() if dtype == F64} == {"head.norm.weight"}
    assert {dtype for dtype, _ in result.values()} == {F32, F64}


def drawn(source: Path) -> set[torch.dtype]:
    return {t.dtype for t in mw.init(source, train=["head.*"]).stored().values()}


def test_new_weights_are_wide(tmp_path: Path) -> None:
    assert worlds.run(1, drawn, tiny.directory(tmp_path / "m", "qwen3", dtype=BF16)) == [{F32}]


def unrounded(source: Path) -> dict[str, Tensor]:
    model = mw.load(source, mw.Mesh(fsdp=2), train=["layers.0.mixer.v.weight"])
    whole = StoredModel(model.blueprint.spec, model.mesh, model.stored())
    keys = model.keymap.keys.values()
    return {key.name: t for key, t in whole_tensors(whole, model.keymap, keys, dtypes=model.kept)}


def test_a_key_of_several_parameters_is_as_wide_as_the_widest(tmp_path: Path) -> None:
    """phi-3 keeps q, k and v in one key."""
    import examples.phi3  # noqa: F401 - registers the family

    source = tiny.directory(tmp_path / "m", "phi3", dtype=BF16)
    result = worlds.run(2, unrounded, source)[0]
    assert all(torch.equal(result[key].to(t.dtype), t) for key, t in load_file(source / "model.safetensors").items())
    assert result["model.layers.0.self_attn.qkv_proj.weight"].dtype == F32
    assert result["model.layers.1.self_attn.qkv_proj.weight"].dtype == BF16


@parts.IN_MATRIX
@pytest.mark.parametrize("recompute", ["full", "none"])
def test_the_bill_of_what_is_frozen(tmp_path: Path, recompute: str) -> None:
    """Backward ends at the first layer with something to train, and gathers nothing before it."""
    source, mesh = tiny.directory(tmp_path / "m", "qwen3_moe"), dict(fsdp=2, ep=2)
    trial = trials.trial(source, mesh).with_options(
        train=["layers.1.*", "head.*"], memory=mw.MemoryOptions(recompute=recompute)
    )
    assert not trials.findings(trial)


FULL, ONCE = mw.MemoryOptions("full"), mw.MemoryOptions(token_once=True)
BEGINS: dict[str, tuple[str, dict[str, int], list[str], mw.MemoryOptions]] = {
    "adapters of some matrices": ("qwen3", TP, ["*.mixer.q.weight", "*.mlp.gate_up.weight"], PLAIN),
    "the last matrix": ("qwen3", TP, ["layers.1.mlp.down.weight"], PLAIN),
    "the last matrix, run again": ("qwen3_tied", TP, ["layers.1.mlp.down.weight"], FULL),
    "the head alone": ("qwen3", TP, ["head.weight"], PLAIN),
    "gates of a delta net": ("qwen3_5", TP, ["layers.0.mixer.gates*"], FULL),
    "experts": ("qwen3_moe", dict(tp=2, ep=2), ["layers.0.mlp.experts.down"], FULL),
    "a router": ("qwen3_moe", dict(fsdp=2, ep=2), ["layers.2.mlp.router"], ONCE),
    "a shared expert": ("qwen3_5_moe", dict(fsdp=2, ep=2), ["layers.1.mlp.shared*"], FULL),
    "values alone": ("qwen3", dict(cp=2), ["layers.0.mixer.v*"], PLAIN),
    "a convolution": ("qwen3_5", dict(cp=2), ["layers.0.mixer.conv*"], FULL),
    "in a second stage": ("qwen3", dict(pp=2), ["layers.1.mixer.o*"], PLAIN),
    "a merger": ("qwen3_vl", TP, ["tower.merger*", "layers.1.mlp.down*"], PLAIN),
    "behind a frozen tower": ("qwen3_vl", TP, ["layers.1.mlp.down*"], FULL),
}


def apart_from_the_bill(
    source: Path, mesh: dict[str, int], train: list[str], memory: mw.MemoryOptions
) -> dict[Any, Any]:
    """Return the collectives of a step that differ from the bill, by operation and ranks: how often, and the count on
    the bill."""
    sees, size = "vl" in source.name, {"context": mw.ContextParallel(attention=1)} if "cp" in mesh else {}
    model = mw.init(source, trials.mesh_of(mesh), dtype=F32, train=train, memory=memory, tower=sees, **size)
    engine = mw.Engine(model, lr=1e-3, router_aux="previous")
    batches = tiny.batches(model.mesh.data_rank)
    batches = [seeing.packed(length=200), mw.pack([[*range(100)]], length=200)] if sees else batches
    with Recorder() as recorder:
        engine.step(batches)
    billed, sent = Counter[Any](), Counter((seen.op, seen.ranks) for seen in recorder.collectives)
    frames = [batch.frames if batch.images else None for batch in batches] if sees else ()
    for charge in step_bill(model, len(batches[0]), len(batches), "previous", tuple(frames)):
        billed[charge.op, model.mesh.axes.group(model.mesh.rank, charge.axes)] += charge.count
    return {key: (sent[key], billed[key]) for key in sent | billed if sent[key] != billed[key]}


def test_gradients_begin_at_a_door(tmp_path: Path) -> None:
    """Backward passes only the doors behind trained parameters."""
    tried = dict(parts.every(2, BEGINS.items()))
    sources = {
        name: (seeing if "vl" in name else tiny).directory(tmp_path / name, name)
        for name in {name for name, *_ in tried.values()}
    }
    cases = {
        case: functools.partial(apart_from_the_bill, sources[name], mesh, train, memory)
        for case, (name, mesh, train, memory) in tried.items()
    }
    assert worlds.in_turn(2, cases) == {case: [{}, {}] for case in tried}
