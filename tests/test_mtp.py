"""The MTP head: against a reference by hand, documents one by one; on meshes; a trunk left as it was; files."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import meshwright as mw
from meshwright import parallel
from meshwright.engine.mtp import MtpData, mtp_data
from meshwright.models import Want
from meshwright.recipe import Lora, MemoryOptions, Pipeline
from tests import mtp_reference, parts, tiny, trials, worlds
from tests.words import words

FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen4_exp")
EXPERTS = FAMILIES[1:]
_BALANCED: dict[str, Any] = dict(output_router_logits=True, router_aux_loss_coef=0.1)
WEIGHT = 0.3
LIMIT = 1e-9  # of a gradient's norm
MODES = ("head", "all")


@functools.cache
def source_of(root: Path, family: str, tied: str = "", dtype: torch.dtype = torch.float64) -> Path:
    """A tiny model with an MTP head, whose experts are fused in Qwen3.5-MoE alone."""
    changes = {**(_BALANCED if family in EXPERTS else {}), **({"tie_word_embeddings": True} if tied else {})}
    at = tiny.directory(root / f"{family}{tied}{dtype}", family, dtype=dtype, **changes)
    return tiny.with_mtp(at, layout="fused" if family == "qwen3_5_moe" else "")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mtp")


def batch_of(seed: int, sizes: Sequence[int] = (5, 1, 14, 2, 9), *, weighted: bool = True) -> mw.Batch:
    """Pack documents with weights, tokens that are not trained, and padding."""
    g = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(0, 131, (n,), generator=g).tolist() for n in sizes]
    trained = [[bool(x) for x in torch.rand(n, generator=g) > 0.3] for n in sizes]
    fields = {"weight": [torch.rand(n, generator=g).tolist() for n in sizes]} if weighted else {}
    return mw.pack(tokens, trained=trained, length=sum(sizes) + 3, fields=fields)


# --- by hand ---


def hidden_of(source: Path, batches: Sequence[mw.Batch], streams: bool) -> list[Tensor]:
    """Return what the trunk hands to the head: behind the final norm, or the residual streams before it."""
    model = mw.load(source, dtype=torch.float64, head="none", train=[])
    kept: list[Tensor] = []
    hook = model.parts[0].head.norm.register_forward_pre_hook(lambda _, given: kept.append(given[0]))
    states = [*parallel.run_forward(model, batches, Want("hidden"), lambda _, scores: scores[0])]
    hook.remove()
    return [each.detach() for each in (kept if streams else states)]


def by_hand(source: Path, batches: Sequence[mw.Batch]) -> tuple[float, float, dict[str, Tensor]]:
    """The loss, the acceptance and the gradients of the weighted loss, without our head."""
    tensors = {
        k: t.double() if t.is_floating_point() else t for k, t in load_file(source / "model.safetensors").items()
    }
    for key, tensor in tensors.items():
        tensor.requires_grad_(key.startswith("mtp.") and tensor.is_floating_point())
    config = json.loads((source / "config.json").read_text())
    given, states = [], hidden_of(source, batches, streams="hc_count" in config)
    for batch, hidden in zip(batches, states, strict=True):
        bounds = batch.bounds[:-1] if batch.num_filler else batch.bounds
        given.append((hidden, batch.tokens, batch.labels, bounds, batch.fields["weight"].double()))
    loss = mtp_reference.mtp_loss(given, tensors, config)
    (WEIGHT * loss).backward()
    hit = sum(mtp_reference.hits(*each[:4], tensors, config) for each in given)
    num = sum(len(mtp_reference.mtp_terms(*each[:4], tensors, config)) for each in given)
    return loss.item(), hit / num, {k: t.grad for k, t in tensors.items() if t.grad is not None}


def compared(source: Path, mode: str) -> None:
    batches = [batch_of(1), batch_of(2, (3, 2, 1, 25))]
    loss, acceptance, expected = by_hand(source, batches)
    engine = mw.Engine(mw.load(source, dtype=torch.float64, mtp=mode, mtp_weight=WEIGHT), lr=1e-2)
    engine.backward(batches)
    grads, record = mw.gather(engine.model, "grad"), engine._pending().results.mtp
    assert record is not None
    assert abs(record.loss - loss) < LIMIT
    assert record.acceptance == acceptance
    assert max(float((grads[k] - g).norm() / g.norm()) for k, g in expected.items()) < LIMIT
    assert len(expected) >= 15
    assert not [k for k in grads if k.startswith("mtp.") and k not in expected and grads[k].any()]


def test_loss_and_gradients_are_those_by_hand(root: Path) -> None:
    """Leave the aux loss out: the reference has none. Families take the modes in turn."""
    cases = {}
    for number, family in enumerate(FAMILIES):
        source = tiny.with_mtp(tiny.directory(root / f"{family} plain", family, dtype=torch.float64))
        for mode in parts.every(2, MODES, number):
            cases[family, mode] = functools.partial(compared, source, mode)
    worlds.in_turn(1, cases)


# --- on meshes: every oracle of verify, against one process ---

MESHES = [
    *trials.MESHES[1:], *trials.CONTEXT_MESHES, *trials.PIPELINE_MESHES, *trials.EXPERT_MESHES,
    dict(cp=2), dict(pp=2), dict(pp=2, fsdp=2),
]  # fmt: skip
# A memory option of each mesh: which one must not matter.
MEMORY = {
    "fsdp=2": {"recompute": "selective"}, "tp=2": {"recompute": "full"}, "replicate=2": {"sum_once": True},
    "fsdp=2,ep=2": {"recompute": "full", "token_once": True}, "cp=2": {"recompute": "full"},
    "fsdp=2,tp=2": {"gather_once": True}, "fsdp=2,cp=2": {"reshard": False}, "tp=2,ep=2": {"recompute": "full"},
}  # fmt: skip
Row = tuple[str, str, dict[str, int], Mapping[str, Any]]  # family, mode, mesh, more options
FEW: list[Row] = [
    ("qwen3_next", "all", dict(cp=2), {}), ("qwen3_5_moe", "all", dict(tp=2, ep=2), {}),
    ("qwen3_5 tied", "all", dict(pp=2), {}),
]  # fmt: skip
WHOLE: list[Row] = [
    (family, mode, mesh, {})
    for mesh in MESHES
    for family in ("qwen3_5", "qwen3_5 tied", *EXPERTS)
    for mode in MODES
    if not ("ep" in mesh and not family.startswith(EXPERTS))
]
_HEAD, _ON_EMBEDDING = dict(train=["head.mtp.*"]), dict(train=["layers.*", "head.*"])
_ADAPTERS, _ZERO_BUBBLE = dict(lora=Lora(rank=3, b_std=0.1)), dict(pipeline=Pipeline(schedule="zero-bubble"))
# Backward of the last stage counts again what it recomputes, and other stages of the rank must not add it.
_INTERLEAVED = dict(pipeline=Pipeline(stages=2), memory=MemoryOptions(recompute="full"))
OPTIONS: list[Row] = [
    ("qwen3_5", "head", dict(pp=2), _ZERO_BUBBLE),
    ("qwen4_exp", "all", dict(pp=2), _INTERLEAVED),
    ("qwen3_5", "all", dict(pp=2), _ON_EMBEDDING),
    ("qwen3_5", "head", dict(fsdp=2), _HEAD),
    ("qwen3_5", "head", dict(fsdp=2), _ADAPTERS),
]
RARE: list[Row] = [
    ("qwen3_5_moe", "all", dict(fsdp=2, ep=2), _ADAPTERS),
    ("qwen3_5", "all", dict(pp=2, tp=2), _ADAPTERS),
    ("qwen4_exp", "head", dict(pp=2), _HEAD),
    ("qwen3_5_moe", "head", dict(tp=2), _HEAD),
    ("qwen3_next", "all", dict(tp=2), dict(train=["layers.2.*", "head.*"])),
    ("qwen3_5", "all", dict(pp=2, fsdp=2), _ON_EMBEDDING),
]
EACH_MODE = [(row[0], mode, *row[2:]) for row in (*OPTIONS, *RARE) for mode in MODES]
ROWS = [*WHOLE, *EACH_MODE] if parts.ALL else [*FEW, *OPTIONS]


def tried(root: Path, family: str, mode: str, mesh: dict[str, int], changes: Mapping[str, Any]) -> Any:
    source = source_of(root, *family.split())
    options = {"memory": MemoryOptions(**MEMORY.get(trials.named(mesh), {})), **changes}
    aux, plain = "previous" if "pp" in mesh else "pooled", trials.trial(source, mesh)
    steps = plain.steps if parts.ALL or "cp" in mesh else 1  # later steps have few tokens, which cp must divide
    return trials.changed(plain, mtp=mode, router_aux=aux, steps=steps, **options)


GROUPS: dict[str, list[Row]] = {}
for row in ROWS:  # of one world; in `make matrix` those of options have their own
    GROUPS.setdefault(trials.named(row[2]) + (f", {row[0]}, {[*row[3]]}" if parts.ALL and row[3] else ""), []).append(
        row
    )


@pytest.mark.parametrize("group", GROUPS)
def test_every_oracle_holds(root: Path, group: str) -> None:
    several = {f"{row[0]}, {row[1]}, {row[3]}": tried(root, *row) for row in GROUPS[group]}
    findings = trials.findings_in_turn(several)
    assert {name: list(map(str, each)) for name, each in findings.items()} == {name: [] for name in several}


# --- what the trunk must not notice ---


def trained(source: Path, mesh: dict[str, int], mode: str) -> tuple[float, dict[str, Tensor], Any]:
    """The loss and the gradients of a step, the weights behind it, and the load of the trunk's experts."""
    model = mw.load(source, trials.mesh_of(mesh), dtype=torch.float64, mtp=mode)
    engine = mw.Engine(model, lr=1e-2, max_norm=0.05)
    loss = engine.backward([batch_of(1 + 10 * model.mesh.data_rank)])
    kept = {f"gradient of {key}": grad for key, grad in mw.gather(model, "grad").items()}
    engine.update()
    kept |= mw.gather(model)
    return loss, {key: x for key, x in kept.items() if "mtp." not in key}, engine.router.load_LE


def same_as_carried(source: Path, mesh: dict[str, int]) -> list[str]:
    """Return what differs between a run that trains the head alone and one that carries it; to the bit."""
    without, beside = trained(source, mesh, "carried"), trained(source, mesh, "head")
    odd = ["losses"] * (without[0] != beside[0]) + ["load"] * (not torch.equal(without[2], beside[2]))
    return odd + [key for key in without[1] if not torch.equal(without[1][key], beside[1][key])]


ALONE = ["qwen3_5", "qwen3_5 tied", "qwen3_5_moe", "qwen3_next", "qwen4_exp"]


@pytest.mark.parametrize("size", [1, 2])
def test_a_head_trained_alone_changes_no_bit_of_the_trunk(root: Path, size: int) -> None:
    """Losses, gradients, clipped updates and expert load; on one process, fsdp=2 and tp=2, in turn."""
    meshes: list[dict[str, int]] = [dict(tp=2), dict(), dict(fsdp=2)]
    cases = {
        (family, trials.named(mesh)): functools.partial(same_as_carried, source_of(root, *family.split()), mesh)
        for family in parts.every(2, ALONE)
        for mesh in parts.every(3, meshes, ALONE.index(family))
        if trials.world_of(mesh) == size
    }
    assert {case: ranks[0] for case, ranks in worlds.in_turn(size, cases).items()} == {case: [] for case in cases}


def _by_weight(source: Path) -> dict[str, Tensor]:
    """The gradients of the head with twice the weight, less twice those with the weight."""
    grads = []
    for weight in (0.2, 0.1):
        engine = mw.Engine(mw.load(source, dtype=torch.float64, mtp="head", mtp_weight=weight), lr=1e-2)
        engine.backward([batch_of(1)])
        grads.append(mw.gather(engine.model, "grad"))
    return {k: (g - 2 * grads[1][k]) / g.norm() for k, g in grads[0].items() if k.startswith("mtp.") and g.any()}


def _router_of_the_head(source: Path) -> tuple[dict[str, Tensor], Tensor]:
    """`_by_weight`, and the loads that the next step takes shares from, after a step with router_aux="previous"."""
    engine = mw.Engine(mw.load(source, dtype=torch.float64, mtp="head"), lr=1e-2, router_aux="previous")
    engine.step([batch_of(1)])
    assert engine.mtp is not None
    return _by_weight(source), torch.cat([engine.router.trained_load, engine.mtp.router.trained_load])


def test_the_router_of_the_head_is_weighted_and_balanced(root: Path) -> None:
    ((off, loads_LE),) = worlds.run(1, functools.partial(_router_of_the_head, source_of(root, "qwen3_5_moe")))
    assert off
    assert all(each.norm() < LIMIT for each in off.values())
    assert (loads_LE.sum(1) > 0).all()


# --- steps in which somebody has no target of the head ---


def _single_tokens(source: Path) -> float:
    """A step of documents of one token each, with labels: the router of the head sees none of them."""
    engine = mw.Engine(mw.load(source, dtype=torch.float64, mtp="head"), lr=1e-2, router_aux="previous")
    record = engine.step([mw.pack([[5], [6], [7]], labels=[[9], [8], [7]])])
    assert record.mtp is not None
    return record.mtp.loss


@pytest.mark.parametrize("length", [13, 14, 21])
def test_padding_counts_for_nothing(length: int) -> None:
    """It is a document of its own, whose tokens have next ones."""
    batch = mw.pack([[1, 2, 3, 4, 5], [6, 7, 8], [9, 10, 11, 12]], length=length)
    assert mtp_data([batch, batch]) == MtpData(weight=12.0, num_targets=12, num_followed=18)


def test_a_step_without_next_tokens(root: Path) -> None:
    assert worlds.run(1, functools.partial(_single_tokens, source_of(root, "qwen3_5_moe"))) == [0.0]


NONE = (1, 2, 2, 1)  # sizes of documents without a target two tokens ahead


def _no_targets(engine: mw.Engine, sizes: Sequence[Sequence[int]]) -> Any:
    """Go backward on a batch of each list of sizes, dealt to the data ranks."""
    model, where = engine.model, engine.model.mesh
    length = -(-max(map(sum, sizes)) // 4) * 4
    whole = [mw.pack([[7 + i % 90 for i in range(n)] for n in each], length=length) for each in sizes]
    engine.backward(whole[where.data_rank :: where.num_data_ranks])
    record, grads = engine._pending().results.mtp, mw.gather(model, "grad")
    if any(size > 2 for each in sizes for size in each):
        engine.discard()
    else:  # the norm of the head is 0
        engine.update()
    return record, grads


SIZES = {
    "second": ((9, 4), NONE), "first": (NONE, (9, 4)), "part": ((14, 2, 2, 2), NONE), "none": (NONE, NONE),
}  # fmt: skip


WITHOUT = [dict(fsdp=2), dict(cp=2), dict(pp=2), *([dict(tp=2)] if parts.ALL else [])]


def _no_targets_in_turn(source: Path, mesh: dict[str, int]) -> dict[str, Any]:
    """Take each list of sizes with both modes on one process; on a mesh `make test` takes the modes in turn."""
    out: dict[str, Any] = {}
    for mode in MODES:
        model = mw.load(source, trials.mesh_of(mesh), dtype=torch.float64, mtp=mode)
        engine = mw.Engine(model, lr=1e-2)
        for at, (name, sizes) in enumerate(SIZES.items()):
            if not mesh or mode in parts.every(2, MODES, at + WITHOUT.index(mesh)):
                out[f"{name}, {mode}"] = _no_targets(engine, sizes)
        assert all(w.isfinite().all() for w in model.stored().values())
    return out


def test_a_rank_or_a_micro_batch_without_targets(root: Path) -> None:
    """In "part" the second half of the stream has none: a cp rank."""
    act = functools.partial(_no_targets_in_turn, source_of(root, "qwen3_5"))
    (one,) = worlds.run(1, act, {})
    meshes = {trials.named(mesh): functools.partial(act, mesh) for mesh in WITHOUT}
    for mesh, (results, _) in worlds.in_turn(2, meshes).items():
        for case, (record, grads) in results.items():
            expected, expected_grads = one[case]
            assert record.loss == pytest.approx(expected.loss, abs=1e-12), (mesh, case)
            for key, grad in grads.items():
                size = max(float(expected_grads[key].norm()), 1e-6)
                assert (grad - expected_grads[key]).norm() <= LIMIT * size, (mesh, case, key)
            if case.startswith("none"):
                assert (record.loss, record.acceptance) == (0.0, 0.0)
                assert not any(grad.any() for key, grad in grads.items() if key.startswith("mtp."))


# --- files ---


def _exported(source: Path, at: Path) -> dict[str, Tensor]:
    """Train a step, export, and return what is streamed to an inference engine."""
    model = mw.load(source, trials.mesh_of(dict(fsdp=2)), dtype=torch.float32, mtp="head")
    engine = mw.Engine(model, lr=1e-2)
    engine.step([batch_of(1 + model.mesh.data_rank)])
    mw.export(model, at)
    return mw.gather(model)


@pytest.mark.parametrize("family", parts.every(4, FAMILIES, 1))
def test_an_export_has_the_trained_head_in_the_keys_of_the_source(root: Path, tmp_path: Path, family: str) -> None:
    source = source_of(root, family, dtype=torch.bfloat16)
    streamed = worlds.run(2, functools.partial(_exported, source, tmp_path / "out"))[0]
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert {k: (t.shape, t.dtype) for k, t in before.items()} == {k: (t.shape, t.dtype) for k, t in after.items()}
    assert (source / "config.json").read_bytes() == (tmp_path / "out" / "config.json").read_bytes()
    frozen = [k for k in before if k.startswith("mtp.") and torch.equal(before[k], after[k])]
    assert [k for k in frozen if "index" not in k] == []  # an indexer has no gradient
    assert all(torch.equal(streamed[k], t) for k, t in after.items() if k.startswith("mtp."))


def _first(source: Path, **options: Any) -> mw.Model:
    return mw.load(source, dtype=torch.float32, **options)


@worlds.world(1)
def test_config_and_keys_agree_both_ways(root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    field = "mtp_num_hidden_layers"
    read = lambda at: json.loads((at / "config.json").read_text()).get(field)  # noqa: E731 - short
    bare = tiny.directory(tmp_path / "bare", "qwen3_5_moe")  # neither keys nor a field
    with caplog.at_level(logging.WARNING):
        new = _first(bare, mtp="head")
    assert "a new one is drawn" in caplog.text
    mw.export(new, tmp_path / "new")
    assert read(tmp_path / "new") == 1
    keys = load_file(tmp_path / "new" / "model.safetensors")
    assert {"mtp.fc.weight", "mtp.layers.0.mlp.experts.7.up_proj.weight"} <= keys.keys()  # spelled as the trunk's
    mw.export(_first(tmp_path / "new"), tmp_path / "again")
    assert read(tmp_path / "again") == 1
    mw.export(_first(bare), tmp_path / "none")
    assert read(tmp_path / "none") is None
    config = {**json.loads((bare / "config.json").read_text()), field: 1}  # it promises what it lacks
    (bare / "config.json").write_text(json.dumps(config))
    mw.export(_first(bare), tmp_path / "repaired")
    assert read(tmp_path / "repaired") == 0


REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "a family without one": ("qwen3", {}, dict(mtp="head"), r"qwen3.*no MTP head"),
    "a part of it": ("qwen3_5", {}, dict(mtp="head", train=["layers.*", "*norm*"]), r"leaves out head\.mtp"),
    "two layers": ("qwen3_5", dict(mtp_num_hidden_layers=2), dict(mtp="head"), "mtp_num_hidden_layers=2"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
@worlds.world(1)
def test_refused(tmp_path: Path, name: str) -> None:
    family, fields, options, what = REFUSED[name]
    at = tiny.directory(tmp_path / "m", family)
    (at / "config.json").write_text(json.dumps({**json.loads((at / "config.json").read_text()), **fields}))
    with pytest.raises(mw.ConfigError, match=what):
        _first(at, **options)


@worlds.world(1)
def test_files_with_a_part_of_a_head_are_refused(root: Path, tmp_path: Path) -> None:
    """Refuse rather than draw the rest of a head."""
    from safetensors.torch import save_file

    source = tiny.with_mtp(tiny.directory(tmp_path / "m", "qwen3_5"))
    tensors = load_file(source / "model.safetensors")
    del tensors["mtp.fc.weight"]
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(mw.MissingKey, match=r"mtp\.fc\.weight"):
        _first(source, mtp="head")


# --- checkpoints ---


def _own(model: mw.Model, step: int) -> list[mw.Batch]:
    """The batches of a step that this data rank trains on."""
    whole = [batch_of(1 + 4 * step + rank) for rank in range(2)]
    return whole[model.mesh.data_rank :: model.mesh.num_data_ranks]


def _saved(source: Path, mesh: dict[str, int], at: Path, mode: str) -> list[float]:
    """Train a step, save, and return the losses of two steps more."""
    engine = _engine(source, mesh, mode)
    engine.step(_own(engine.model, 0))
    mw.save(engine, at)
    return _two_steps(engine)


def _resumed(source: Path, mesh: dict[str, int], at: Path, mode: str) -> list[float]:
    engine = _engine(source, mesh, mode)
    mw.resume(engine, at)
    return _two_steps(engine)


def _engine(source: Path, mesh: dict[str, int], mode: str) -> mw.Engine:
    model = mw.load(source, trials.mesh_of(mesh), dtype=torch.float64, mtp=mode)
    return mw.Engine(model, lr=1e-2, router_aux="previous")


def _two_steps(engine: mw.Engine) -> list[float]:
    """The losses of the model and of the head in two steps: the second depends on the optimizer state."""
    records = [engine.step(_own(engine.model, engine.steps)) for _ in range(2)]
    return [loss for r in records for loss in (r.loss, 0.0 if r.mtp is None else r.mtp.loss)]


RESUMED = [("qwen3_5_moe", "head"), ("qwen3_5 tied", "all"), ("qwen4_exp", "all")]


def test_a_run_is_resumed_on_another_mesh(root: Path, tmp_path: Path) -> None:
    """The embedding of both ends too: Megatron-Bridge#5380 lost it, and the loss jumped."""
    cases, meshes = dict[str, Any](), [dict(fsdp=2), dict(pp=2), dict(tp=2)]
    for number, (family, mode) in enumerate(RESUMED if parts.ALL else RESUMED[:2]):
        of_case = source_of(root, *family.split()), tmp_path / family, mode
        cases[family] = functools.partial(_saved, of_case[0], dict(pp=2), *of_case[1:])
        for mesh in parts.every(3, meshes, number):
            cases[f"{family} on {mesh}"] = functools.partial(_resumed, of_case[0], mesh, *of_case[1:])
    losses = worlds.in_turn(2, cases)
    for case, (resumed, _) in losses.items():
        assert resumed == pytest.approx(losses[case.partition(" on ")[0]][0], rel=1e-9), case


@worlds.world(1)
def test_a_run_that_carried_its_head_goes_on_with_it(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = source_of(root, "qwen3_5_moe")
    trunk = _saved(source, {}, tmp_path / "carried", "carried")
    with caplog.at_level(logging.WARNING):
        goes_on = _resumed(source, {}, tmp_path / "carried", "head")
    assert "its optimizer state begins at zero" in caplog.text
    assert goes_on[::2] == trunk[::2]
    assert all(goes_on[1::2])
    _saved(source, {}, tmp_path / "trained", "head")
    with pytest.raises(mw.CheckpointError, match=words("MTP head", "carried")):
        _resumed(source, {}, tmp_path / "trained", "carried")
    at = tmp_path / "export"  # of another head, which a model that carries its own would lose
    mw.export(mw.load(next((tmp_path / "trained").iterdir()), dtype=torch.float64, train=[]), at)
    with pytest.raises(mw.CheckpointError, match=words(r"mtp\.", "MTP head an export would write")):
        _resumed(source, {}, at, "carried")
