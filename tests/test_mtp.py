"""The MTP head: against a reference by hand, documents one by one; on meshes; a trunk left as it was; files."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Sequence
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


@functools.cache
def source_of(root: Path, family: str, *, tied: bool = False, dtype: torch.dtype = torch.float64) -> Path:
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


def hidden_of(source: Path, batch: mw.Batch, streams: bool) -> Tensor:
    """Return what the trunk hands to the head: behind the final norm, or the residual streams before it."""
    model = mw.load(source, dtype=torch.float64, head="none", train=[])
    kept: list[Tensor] = []
    hook = model.parts[0].head.norm.register_forward_pre_hook(lambda _, given: kept.append(given[0]))
    (states,) = parallel.run_forward(model, [batch], Want("hidden"), lambda _, scores: scores[0])
    hook.remove()
    return (kept[0] if streams else states).detach()


def by_hand(source: Path, batches: Sequence[mw.Batch]) -> tuple[float, float, dict[str, Tensor]]:
    """The loss, the acceptance and the gradients of the weighted loss, without our head."""
    tensors = {
        k: t.double() if t.is_floating_point() else t for k, t in load_file(source / "model.safetensors").items()
    }
    for key, tensor in tensors.items():
        tensor.requires_grad_(key.startswith("mtp.") and tensor.is_floating_point())
    config = json.loads((source / "config.json").read_text())
    given = []
    for batch in batches:
        bounds = batch.bounds[:-1] if batch.num_filler else batch.bounds
        hidden = hidden_of(source, batch, streams="hc_count" in config)
        given.append((hidden, batch.tokens, batch.labels, bounds, batch.fields["weight"].double()))
    loss = mtp_reference.mtp_loss(given, tensors, config)
    (WEIGHT * loss).backward()
    hit = sum(mtp_reference.hits(*each[:4], tensors, config) for each in given)
    num = sum(len(mtp_reference.mtp_terms(*each[:4], tensors, config)) for each in given)
    return loss.item(), hit / num, {k: t.grad for k, t in tensors.items() if t.grad is not None}


def ours(source: Path, batches: Sequence[mw.Batch], mode: str) -> tuple[mw.StepRecord, dict[str, Tensor]]:
    engine = mw.Engine(mw.load(source, dtype=torch.float64, mtp=mode, mtp_weight=WEIGHT), lr=1e-2)
    engine.backward(batches)
    grads = mw.gather(engine.model, "grad")
    engine.discard()
    return engine.step(batches), grads


def compared(source: Path) -> dict[str, Any]:
    batches = [batch_of(1), batch_of(2, (3, 2, 1, 25))]
    loss, acceptance, expected = by_hand(source, batches)
    out: dict[str, Any] = {}
    for mode in ("head", "all"):
        record, grads = ours(source, batches, mode)
        assert record.mtp is not None
        errors = {k: float((grads[k] - g).norm() / g.norm()) for k, g in expected.items()}
        missing = [k for k in grads if k.startswith("mtp.") and k not in expected and grads[k].any()]
        out[mode] = (
            record.mtp.loss - loss,
            record.mtp.acceptance - acceptance,
            max(errors.values()),
            len(errors),
            missing,
        )
    return out


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_by_hand(root: Path, family: str) -> None:
    """Leave the aux loss out: the reference has none."""
    source = tiny.with_mtp(tiny.directory(root / f"{family} plain", family, dtype=torch.float64))
    ((result),) = worlds.run(1, functools.partial(compared, source))
    for loss_off, acceptance_off, worst, num, missing in result.values():
        assert abs(loss_off) < LIMIT
        assert acceptance_off == 0
        assert worst < LIMIT
        assert num >= 15
        assert not missing


# --- on meshes: every oracle of verify, against one process ---

MESHES = [
    *trials.MESHES[1:], *trials.CONTEXT_MESHES, *trials.PIPELINE_MESHES, *trials.EXPERT_MESHES,
    dict(cp=2), dict(pp=2), dict(pp=2, fsdp=2),
]  # fmt: skip
FEW = (dict(cp=2), dict(fsdp=2, tp=2, ep=2), dict(pp=2))
# A memory option of each mesh: which one must not matter.
MEMORY = {
    "fsdp=2": {"recompute": "selective"}, "tp=2": {"recompute": "full"}, "replicate=2": {"sum_once": True},
    "fsdp=2,ep=2": {"recompute": "full", "token_once": True}, "cp=2": {"recompute": "full"},
    "fsdp=2,tp=2": {"gather_once": True}, "fsdp=2,cp=2": {"reshard": False},
}  # fmt: skip
MODES = ("head", "all")
CASES = [
    (family, mode, mesh)
    for number, mesh in enumerate(MESHES if parts.ALL else FEW, 0 if parts.ALL else -1)
    for at, family in enumerate(("qwen3_5", "qwen3_5 tied", *EXPERTS))
    for mode in MODES
    if not ("ep" in mesh and not family.startswith(EXPERTS))
    # `make test` runs each mesh in both modes, each with another family; the largest mesh in one
    if parts.ALL or ((number + at) % 5 == (0 if mode == "head" else 2) and (mode == "all" or len(mesh) < 3))
]


def tried(root: Path, family: str, mode: str, mesh: dict[str, int], **changes: Any) -> Any:
    source = source_of(root, family.removesuffix(" tied"), tied=family.endswith("tied"))
    options = {"memory": MemoryOptions(**MEMORY.get(trials.named(mesh), {})), **changes}
    aux, plain = "previous" if "pp" in mesh else "pooled", trials.trial(source, mesh)
    steps = plain.steps if parts.ALL or "cp" in mesh else 1  # later steps have few tokens, which cp must divide
    return trials.changed(plain, mtp=mode, router_aux=aux, steps=steps, **options)


@pytest.mark.parametrize("mesh", MESHES if parts.ALL else FEW, ids=trials.named)
def test_every_oracle_holds(root: Path, mesh: dict[str, int]) -> None:
    several = {f"{f}, {m}": tried(root, f, m, mesh) for f, m, where in CASES if where == mesh}
    findings = trials.findings_in_turn(several)
    assert {name: list(map(str, each)) for name, each in findings.items()} == {name: [] for name in several}


OPTIONS: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "zero-bubble": ("qwen3_5", dict(pp=2), dict(pipeline=Pipeline(schedule="zero-bubble"))),
    # Backward of the last stage counts again what it recomputes, and other stages of the rank must not add it.
    "interleaved": ("qwen4_exp", dict(pp=2), dict(pipeline=Pipeline(stages=2), memory=MemoryOptions(recompute="full"))),
    "adapters": ("qwen3_5_moe", dict(fsdp=2, ep=2), dict(lora=Lora(rank=3, b_std=0.1))),
    "adapters on a pipeline": ("qwen3_5", dict(pp=2, tp=2), dict(lora=Lora(rank=3, b_std=0.1))),
    "frozen trunk": ("qwen3_5", dict(tp=2), dict(train=["head.mtp.*"])),
    "frozen trunk on a pipeline": ("qwen4_exp", dict(pp=2), dict(train=["head.mtp.*"])),
    "frozen first layers": ("qwen3_next", dict(tp=2), dict(train=["layers.2.*", "head.*"])),
    "frozen embedding": (
        "qwen3_5",
        dict(pp=2, fsdp=2) if parts.ALL else dict(pp=2),
        dict(train=["layers.*", "head.*"]),
    ),
}


RARE = () if parts.ALL else ("adapters on a pipeline", "frozen trunk on a pipeline", "frozen first layers")


@pytest.mark.parametrize("name", [name for name in OPTIONS if name not in RARE])
def test_every_oracle_holds_with(root: Path, name: str) -> None:
    """`make test` takes the modes in turn; the head alone is what trains where the trunk is frozen."""
    family, mesh, changes = OPTIONS[name]
    modes = parts.every(2, MODES, [*OPTIONS].index(name))
    findings = trials.findings_in_turn({mode: tried(root, family, mode, mesh, **changes) for mode in modes})
    assert {mode: list(map(str, each)) for mode, each in findings.items()} == {mode: [] for mode in modes}


# --- what the trunk must not notice ---


def trained(
    source: Path, mesh: dict[str, int], mode: str, steps: int = 2
) -> tuple[list[float], dict[str, Tensor], Any]:
    """Losses and gradients of a few steps, the weights behind them, and the load of the trunk's experts."""
    model = mw.load(source, trials.mesh_of(mesh), dtype=torch.float64, mtp=mode)
    engine = mw.Engine(model, lr=1e-2, max_norm=0.05)
    losses, kept = [], dict[str, Tensor]()
    for step in range(steps):
        losses.append(engine.backward([batch_of(1 + step + 10 * model.mesh.data_rank)]))
        kept |= {f"{step} {key}": grad for key, grad in mw.gather(model, "grad").items() if not key.startswith("mtp.")}
        engine.update()
    weights = {k: w for k, w in mw.gather(model).items() if not k.startswith("mtp.")}
    return losses, kept | weights, engine.router.load_LE


def same_as_carried(source: Path, mesh: dict[str, int]) -> list[str]:
    """Return what differs between a run that trains the head alone and one that carries it; to the bit."""
    without, beside = trained(source, mesh, "carried"), trained(source, mesh, "head")
    odd = ["losses"] * (without[0] != beside[0]) + ["load"] * (not torch.equal(without[2], beside[2]))
    return odd + [key for key in without[1] if not torch.equal(without[1][key], beside[1][key])]


ALONE = ["qwen3_5", "qwen3_5 tied", "qwen3_5_moe", "qwen3_next", "qwen4_exp"]


@pytest.mark.parametrize("family", parts.every(2, ALONE))
def test_a_head_trained_alone_changes_no_bit_of_the_trunk(root: Path, family: str) -> None:
    """Losses, gradients, clipped updates and expert load; on one process and on fsdp=2, tp=2, in turn."""
    source = source_of(root, family.removesuffix(" tied"), tied=family.endswith("tied"))
    meshes: list[dict[str, int]] = [dict(tp=2), dict(), dict(fsdp=2)]
    for mesh in parts.every(3, meshes, ALONE.index(family)):
        assert worlds.run(trials.world_of(mesh), functools.partial(same_as_carried, source, mesh))[0] == []


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


def _no_targets(source: Path, mesh: dict[str, int], sizes: Sequence[Sequence[int]], mode: str) -> Any:
    """Train on a batch of each list of sizes, dealt to the data ranks."""
    where = trials.mesh_of(mesh)
    model = mw.load(source, where, dtype=torch.float64, mtp=mode)
    engine = mw.Engine(model, lr=1e-2)
    length = -(-max(map(sum, sizes)) // 4) * 4
    whole = [mw.pack([[7 + i % 90 for i in range(n)] for n in each], length=length) for each in sizes]
    own = whole[where.data_rank :: where.num_data_ranks]
    engine.backward(own)
    record, grads = engine._pending().results.mtp, mw.gather(model, "grad")
    engine.update()
    assert all(w.isfinite().all() for w in mw.gather(model).values())
    return record, grads


SIZES = {
    "second": ((9, 4), NONE), "first": (NONE, (9, 4)), "part": ((14, 2, 2, 2), NONE), "none": (NONE, NONE),
}  # fmt: skip


WITHOUT = [dict(fsdp=2), dict(cp=2), dict(pp=2), *([dict(tp=2)] if parts.ALL else [])]


def _no_targets_in_turn(source: Path, mesh: dict[str, int]) -> dict[str, Any]:
    """Take each list of sizes with both modes on one process; on a mesh `make test` takes the modes in turn."""
    modes = lambda at: parts.every(2, MODES, at + WITHOUT.index(mesh)) if mesh else MODES  # noqa: E731 - short
    cases = [(name, mode) for at, name in enumerate(SIZES) for mode in modes(at)]
    return {f"{name}, {mode}": _no_targets(source, mesh, SIZES[name], mode) for name, mode in cases}


@functools.cache
def _of_one(source: Path) -> dict[str, Any]:
    (one,) = worlds.run(1, functools.partial(_no_targets_in_turn, source, {}))
    return dict(one)


@pytest.mark.parametrize("mesh", WITHOUT, ids=trials.named)
def test_a_rank_or_a_micro_batch_without_targets(root: Path, mesh: dict[str, int]) -> None:
    """In "part" the second half of the stream has none: a cp rank."""
    source = source_of(root, "qwen3_5")
    for case, (record, grads) in worlds.run(2, functools.partial(_no_targets_in_turn, source, mesh))[0].items():
        expected, expected_grads = _of_one(source)[case]
        assert record.loss == pytest.approx(expected.loss, abs=1e-12), case
        for key, grad in grads.items():
            size = max(float(expected_grads[key].norm()), 1e-6)
            assert (grad - expected_grads[key]).norm() <= LIMIT * size, (case, key)
        if case.startswith("none"):
            assert (record.loss, record.acceptance) == (0.0, 0.0)
            assert not any(grad.any() for key, grad in grads.items() if key.startswith("mtp."))


# --- files ---


def _exported(source: Path, mesh: dict[str, int], at: Path, mode: str, **options: Any) -> dict[str, Tensor]:
    """Train a step, export, and return what is streamed to an inference engine."""
    model = mw.load(source, trials.mesh_of(mesh), dtype=torch.float32, mtp=mode, **options)
    engine = mw.Engine(model, lr=1e-2)
    engine.step([batch_of(1 + model.mesh.data_rank)])
    mw.export(model, at)
    return mw.gather(model)


@pytest.mark.parametrize("family", parts.every(2, FAMILIES, 1))
def test_an_export_has_the_trained_head_in_the_keys_of_the_source(root: Path, tmp_path: Path, family: str) -> None:
    source = source_of(root, family, dtype=torch.bfloat16)
    streamed = worlds.run(2, functools.partial(_exported, source, dict(fsdp=2), tmp_path / "out", "head"))[0]
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


def _saved(source: Path, mesh: dict[str, int], at: Path, mode: str, steps: int) -> list[float]:
    """Train, save after `steps`, and return the losses of two steps more."""
    engine = _engine(source, mesh, mode)
    for step in range(steps):
        engine.step(_own(engine.model, step))
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


@pytest.mark.parametrize(("family", "mode"), RESUMED if parts.ALL else RESUMED[:2])
def test_a_run_is_resumed_on_another_mesh(root: Path, tmp_path: Path, family: str, mode: str) -> None:
    """The embedding of both ends too: Megatron-Bridge#5380 lost it, and the loss jumped."""
    source = source_of(root, family.removesuffix(" tied"), tied=family.endswith("tied"))
    straight = worlds.run(2, functools.partial(_saved, source, dict(pp=2), tmp_path / "run", mode, 2))[0]
    meshes: list[dict[str, int]] = [dict(fsdp=2), dict(pp=2), dict(tp=2)]
    for mesh in parts.every(3, meshes, RESUMED.index((family, mode))):
        resumed = worlds.run(2, functools.partial(_resumed, source, mesh, tmp_path / "run", mode))[0]
        assert resumed == pytest.approx(straight, rel=1e-9)


@worlds.world(1)
def test_a_run_that_carried_its_head_goes_on_with_it(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = source_of(root, "qwen3_5_moe")
    trunk = _saved(source, {}, tmp_path / "carried", "carried", 2)
    with caplog.at_level(logging.WARNING):
        goes_on = _resumed(source, {}, tmp_path / "carried", "head")
    assert "its optimizer state begins at zero" in caplog.text
    assert goes_on[::2] == trunk[::2]
    assert all(goes_on[1::2])
    _saved(source, {}, tmp_path / "trained", "head", 1)
    with pytest.raises(mw.CheckpointError, match=words("MTP head", "carried")):
        _resumed(source, {}, tmp_path / "trained", "carried")
    at = tmp_path / "export"  # of another head, which a model that carries its own would lose
    mw.export(mw.load(next((tmp_path / "trained").iterdir()), dtype=torch.float64, train=[]), at)
    with pytest.raises(mw.CheckpointError, match=words(r"mtp\.", "MTP head an export would write")):
        _resumed(source, {}, at, "carried")
