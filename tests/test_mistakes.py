"""What a user may do wrong, and what ranks may disagree on: named on all ranks, before any work."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import meshwright as mw
from tests import tiny, trials, worlds
from tests.trials import build, mine, said


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.directory(tmp_path_factory.mktemp("mistakes") / "m", "qwen3")


def _on_rank_1(mistaken: Any, fine: Any) -> Any:
    return lambda engine: engine.step(mistaken(engine) if engine.model.mesh.rank == 1 else fine(engine))


def _with(engine: mw.Engine, loss: Any) -> mw.Engine:
    return mw.Engine(engine.model, lr=1.0, loss=loss)


def _ratio_of_answers(engine: mw.Engine) -> None:
    """Of whole answers, and 1 in the first step."""
    batches = mine(engine)
    lo, hi = engine.model.mesh.token_range(len(batches[0]))
    old_T = mw.logprobs(engine.model, batches[0])[lo:hi]
    loss = lambda s, f: -(s["logprobs"] - old_T[: len(s["logprobs"])]).mean().exp().expand_as(s["logprobs"])  # noqa: E731
    _with(engine, loss).step(batches[:1])


def _no_number(engine: mw.Engine) -> None:
    """Its gradient is finite all the same."""
    constant = torch.tensor(float("nan") if engine.model.mesh.rank else 0.0, dtype=torch.float64)
    _with(engine, lambda s, f: -s["logprobs"] + constant).step(mine(engine))


MISTAKES: list[tuple[str, dict[str, int], Any, str]] = [
    ("update first", {}, lambda e: e.update(), r"StateError: update\(\) of step 0 found no gradients; call backward"),
    (
        "backward twice",
        {},
        lambda e: [e.backward(mine(e)), e.backward(mine(e))],
        r"StateError: gradients of an earlier",
    ),
    ("no batch", {}, lambda e: e.step([]), r"DataError: a step needs at least one batch"),
    ("nothing to learn", {}, lambda e: e.step([mw.pack([[1]])]), r"DataError: the step's 0 targets weigh 0\.0"),
    ("unequal", {}, lambda e: e.step([mw.pack([[1, 2]]), mw.pack([[1, 2, 3]])]), r"DataError: .* have \[2, 3\] tokens"),
    (
        "odd tokens",
        dict(tp=2),
        lambda e: e.step([mw.pack([[1, 2, 3]])]),
        r"DataError: .*cp\*tp=2; pack\(\.\.\., length=4\)",
    ),
    (
        "vocabulary",
        {},
        lambda e: e.step([mw.pack([[1, 131]])]),
        r"DataError: token 131 at position 1 .* vocabulary of 131",
    ),
    ("a label", {}, lambda e: e.step([mw.pack([[1, 2]], [[2, -1]])]), r"DataError: label -1 at position 1"),
    ("gradients", {}, lambda e: mw.gather(e.model, "grad"), r"StateError: there are no gradients"),
    ("which", {}, lambda e: mw.gather(e.model, "momentum"), r"ConfigError: .*choose 'weight' or 'grad'"),
    ("state dict", {}, lambda e: e.model.parts[0].state_dict(), r"StateError: .*mw\.gather\(model\)"),
    (
        "batches a rank",
        dict(fsdp=2),
        _on_rank_1(lambda e: mine(e)[:1], mine),
        rf"RankError: rank 1 has 1 batches of {tiny.LENGTH} tokens, rank 0 2 of {tiny.LENGTH}",
    ),
    (
        "bad data on one rank",
        dict(fsdp=2),
        _on_rank_1(lambda e: [mw.pack([[1, 999]], length=tiny.LENGTH)] * 2, mine),
        r"RankError: rank 1 refuses to take part in a step|DataError: token 999",
    ),
    (
        "a field of another shape",
        {},
        lambda e: e.step([mw.pack([[1, 2]], fields={"weight": [[[1.0], [2.0]]]})]),
        r"DataError: weight has shape \(2, 1\) for 2 tokens",
    ),
    (
        "a field that is not there",
        {},
        lambda e: mw.Engine(e.model, lr=1.0, loss=lambda s, f: f["advantage"]).step(mine(e)),
        r"DataError: the loss asks for 'advantage'; it has the scores \['logprobs'\]",
    ),
    (
        "a weight of nan",
        dict(tp=2),
        lambda e: e.step([mw.pack([[1, 2]], length=4, fields={"weight": [[1.0, float("nan")]]})]),
        r"DataError: the weight at position 1 is nan; weights must be finite|RankError: rank \d refuses to take part",
    ),
    (
        "two engines",
        {},
        lambda e: [e.backward(mine(e)), mw.Engine(e.model, lr=1.0).backward(mine(e))],
        r"StateError: gradients of an earlier backward are waiting",
    ),
    (
        "lr of nan",
        {},
        lambda e: mw.Engine(e.model, lr=lambda s: float("nan")).step(mine(e)),
        r"ConfigError: lr of step 0 is nan",
    ),
    ("loading", {}, lambda e: e.model.parts[0].layers[0].load_state_dict({}), r"StateError: .*mw\.load"),
    (
        "one data rank, other data",
        dict(tp=2),
        _on_rank_1(lambda e: tiny.batches(1), lambda e: tiny.batches(0)),
        r"RankError: ranks 0 and 1 are one data rank \(tp=2\), but were given different batches",
    ),
    (
        "a loss of another shape",
        {},
        lambda e: mw.Engine(e.model, lr=1.0, loss=lambda s, f: s["logprobs"].mean()).step(mine(e)),
        rf"DataError: the loss gave \(\) for \({tiny.LENGTH},\) tokens",
    ),
    (
        "not finite",
        dict(fsdp=2),
        lambda e: mw.Engine(
            e.model, lr=1.0, loss=lambda s, f: s["logprobs"] * (1e308 if e.model.mesh.rank else 1)
        ).step(mine(e)),
        r"NonFiniteError: the loss of step 0 is -inf; no parameter was changed",
    ),
    ("a batch alone", {}, lambda e: e.step(mine(e)[0]), r"DataError: a step takes a list of batches: engine\.step"),
    ("a generator", {}, lambda e: e.step(b for b in mine(e)), r"DataError: a step takes a list of batches"),
    (
        "no batches",
        dict(fsdp=2),
        _on_rank_1(lambda e: [None], mine),
        r"DataError: .* not a NoneType|RankError: rank 1 ref",
    ),
    (
        "a loss of nothing",
        {},
        lambda e: _with(e, lambda s, f: None).step(mine(e)),
        r"DataError: the loss gave NoneType",
    ),
    (
        "a detached loss",
        {},
        lambda e: _with(e, lambda s, f: -s["logprobs"].detach()).step(mine(e)),
        r"StateError: the loss depends on no trained parameter: it is detached",
    ),
    (
        "without gradients",
        dict(tp=2),
        lambda e: torch.no_grad()(e.step)(mine(e)),
        r"StateError: the loss depends on no trained parameter: .* torch\.no_grad\(\) is on",
    ),
    (
        "a loss that runs its model",
        dict(fsdp=2),
        lambda e: _with(e, lambda s, f: (mw.logprobs(e.model, mine(e)[0]), -s["logprobs"])[1]).step(mine(e)),
        r"StateError: logprobs was called for a model whose loss is being reckoned; .* pack\(\.\.\., fields=\)",
    ),
    (
        "frozen later",
        {},
        lambda e: _switched(e, "head.weight", on=False),
        r"StateError: head\.weight and 0 more changed",
    ),
    (
        "a loss of whole documents",
        dict(tp=2),
        _ratio_of_answers,
        r"DataError: the loss of a token depends on others; a rank of tp=2 has only a part of a .* as a field",
    ),
    ("a loss of nan", dict(fsdp=2), _no_number, r"NonFiniteError: the loss of step 0 is nan; no param"),
]


def _switched(engine: mw.Engine, name: str, *, on: bool) -> None:
    engine.model.parts[0].get_parameter(name).requires_grad_(on)
    engine.step(mine(engine))


@pytest.mark.parametrize(("mesh", "mistake", "pattern"), [m[1:] for m in MISTAKES], ids=[m[0] for m in MISTAKES])
def test_mistakes_are_named_on_all_ranks(source: Path, mesh: dict[str, int], mistake: Any, pattern: str) -> None:
    for text in worlds.run(trials.world_of(mesh), said, source, mesh, mistake):
        assert re.search(pattern, text), text


def refused(source: Path, options: dict[str, Any]) -> str:
    loading = {name: options.pop(name) for name in ("head", "dtype", "mesh", "savings") if name in options}
    try:
        mw.Engine(mw.load(source, **loading), **{"lr": 1e-3, **options})
    except mw.ConfigError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        (dict(lr="1e-3"), r"lr='1e-3' must be a number of 0 or more, or a function of the step"),
        (dict(lr=float("inf")), r"lr=inf must be"),
        (dict(betas=(0.9,)), r"betas=\(0\.9,\) must be"),
        (dict(weight_decay=float("inf")), r"weight_decay=inf must be"),
        (dict(eps=1e-60), r"eps=1e-60 must be"),
        (dict(max_norm=float("nan")), r"max_norm=nan must be"),
        (dict(state_dtype="bfloat16"), r"state_dtype=bfloat16 is not offered; choose torch\.bfloat16"),
        (dict(head="value", entropy=True), r"entropy=True, but this model's head gives values alone"),
        (dict(dtype="float32"), r"dtype='float32' cannot be computed in; choose from torch\.bfloat16"),
        (dict(mesh=4), r"mesh=4 is no mesh; give mw\.Mesh\(fsdp=4\)"),
        (dict(savings="full"), r"savings='full' are no savings; give mw\.Savings"),
    ],
    ids=str,
)
def test_arguments_that_cannot_be(source: Path, options: dict[str, Any], pattern: str) -> None:
    found = worlds.run(1, refused, source, options)[0]
    assert re.search(pattern, found), found


@pytest.mark.parametrize(
    ("options", "env", "pattern"),
    [
        (dict(device="foo"), {}, r"device='foo' cannot be used"),
        (dict(device="meta"), {}, r"device='meta' cannot be used"),
        (dict(device="cuda"), {}, r"device='cuda': torch finds no such device here; choose device='cpu'"),
        (dict(timeout_s=0), {}, r"timeout_s=0: it must be a number of seconds above 0"),
        ({}, dict(WORLD_SIZE="1"), r"WORLD_SIZE=1 without RANK, MASTER_ADDR, MASTER_PORT: start with torchrun"),
        (
            {},
            dict(WORLD_SIZE="abc", RANK="0", MASTER_ADDR="x", MASTER_PORT="1"),
            r"WORLD_SIZE='abc' of the environment",
        ),
    ],
    ids=str,
)
def test_meshes_that_cannot_begin(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], env: dict[str, str], pattern: str
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    with pytest.raises(mw.MeshError, match=pattern):
        mw.Mesh(**options)


def _seeded(source: Path, mesh: dict[str, int]) -> mw.Engine:
    there = mw.Mesh(**mesh)
    return mw.Engine(mw.init(source, there, dtype=torch.float64, seed=there.rank), lr=1e-2)


def _other(source: Path, mesh: dict[str, int], name: str, *values: Any) -> mw.Engine:
    """An argument that differs from rank to rank."""
    there = mw.Mesh(**mesh)
    options = {"lr": 1e-2, "dtype": torch.float64, name: values[there.rank]}
    of_load = {name: options.pop(name) for name in {"dtype", "train", "savings"} & options.keys()}
    return mw.Engine(mw.load(source, there, **of_load), **options)


def _apart(engine: mw.Engine, *acts: Callable[[mw.Engine], Any]) -> None:
    acts[engine.model.mesh.rank](engine)


def _step(engine: mw.Engine) -> None:
    engine.step(mine(engine))


REPLICAS, FSDP, TP = dict(replicate=2), dict(fsdp=2), dict(tp=2)
# What differs from rank to rank: the mesh, how the engine is made, what is called then, what is said of it.
DISAGREED: dict[str, tuple[dict[str, int], Any, Any, str]] = {
    "seed": (REPLICAS, _seeded, _step, r"the seed is 1 on rank 1 and 0 on rank 0; it must be the same on all ranks"),
    "lr": (
        REPLICAS,
        lambda s, m: _other(s, m, "lr", 1e-3, 2e-3),
        _step,
        r"lr of this step is 0\.002 on rank 1 and 0\.001",
    ),
    "function of lr": (
        FSDP,
        lambda s, m: _other(s, m, "lr", lambda step: 0.1, lambda step: 0.2),
        _step,
        r"lr of this step is 0\.2 on rank 1 and 0\.1 on rank 0",
    ),
    "weight decay": (
        FSDP,
        lambda s, m: _other(s, m, "weight_decay", 0.1, 0.2),
        _step,
        r"weight_decay is 0\.2 on rank 1",
    ),
    "max_norm": (TP, lambda s, m: _other(s, m, "max_norm", 1.0, None), _step, r"max_norm is None on rank 1 and 1\.0"),
    "gradients that wait on one rank": (
        FSDP,
        build,
        lambda e: (e.backward(mine(e)), _apart(e, lambda e: e.discard(), lambda e: None), _step(e)),
        r"gradients of an earlier backward are waiting|rank 1 refuses to take part in a step; see its message",
    ),
    "axes": (
        FSDP,
        lambda s, m: mw.Mesh(**(TP if os.environ["RANK"] == "1" else m)),
        _step,
        r"the mesh is (tp=2 on cpu on rank 1, and fsdp=2 on cpu on rank 0|fsdp=2 on cpu on rank 0, and tp=2)",
    ),
    "loss": (
        FSDP,
        lambda s, m: _other(s, m, "loss", mw.losses.cross_entropy, mw.losses.squared_error),
        _step,
        r"the loss is squared_error on rank 1 and cross_entropy on rank 0",
    ),
    "dtype": (
        REPLICAS,
        lambda s, m: _other(s, m, "dtype", torch.float64, torch.float32),
        _step,
        r"the compute dtype is torch\.float32 on rank 1 and torch\.float64 on rank 0",
    ),
    "train": (
        REPLICAS,
        lambda s, m: _other(s, m, "train", "**", "layers.*"),
        _step,
        r"the (number of trained parameters|checksum of the names of trained parameters) is \d+ on rank 1",
    ),
    "savings": (
        FSDP,
        lambda s, m: _other(s, m, "savings", mw.Savings(), mw.Savings(offload=True)),
        _step,
        r"the saving offload is True on rank 1 and False on rank 0",
    ),
    "steps": (FSDP, build, lambda e: _apart(e, _step, _ahead), r"the step is 1 on rank 1 and 0 on rank 0"),
    "calls": (
        FSDP,
        build,
        lambda e: _apart(e, _step, lambda e: e.evaluate(mine(e))),
        r"call is evaluate on rank 1 and a step on rank 0",
    ),
    "looks": (
        FSDP,
        build,
        lambda e: _apart(e, lambda e: mw.logprobs(e.model, mine(e)[0]), lambda e: mw.logits(e.model, mine(e)[0])),
        r"call is logits on rank 1 and logprobs on rank 0",
    ),
    "data of one data rank": (
        TP,
        build,
        lambda e: mw.logprobs(e.model, tiny.batches(e.model.mesh.rank)[0]),
        r"ranks 0 and 1 are one data rank \(tp=2\), but were given different batches",
    ),
    "a bad token on one rank": (
        FSDP,
        build,
        lambda e: mw.logprobs(e.model, mw.pack([[1, 999 if e.model.mesh.rank else 2]])),
        r"token 999 at position 1|rank 1 refuses to take part in logprobs; see its message",
    ),
    "dtype of an export": (
        FSDP,
        build,
        lambda e: mw.export(e.model, "nowhere", dtype=torch.bfloat16 if e.model.mesh.rank else None),
        r"dtype= is torch\.bfloat16 on rank 1 and None on rank 0",
    ),
    "which": (
        FSDP,
        build,
        lambda e: (e.backward(mine(e)), dict(mw.stream(e.model, "grad" if e.model.mesh.rank else "weight"))),
        r"call is stream\(which='grad'\) on rank 1",
    ),
}


def _ahead(engine: mw.Engine) -> None:
    engine.steps += 1
    _step(engine)


def disagreed(source: Path, mesh: dict[str, int], make: Any, act: Any) -> str:
    try:
        act(make(source, mesh))
    except mw.MeshwrightError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("name", DISAGREED)
def test_what_ranks_disagree_on_is_named_on_all(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    mesh, make, act, pattern = DISAGREED[name]
    monkeypatch.chdir(tmp_path)
    for text in worlds.run(trials.world_of(mesh), disagreed, source, mesh, make, act):
        assert re.search(pattern, text), text
    assert not list(tmp_path.iterdir())


def test_configs_that_differ(source: Path, tmp_path: Path) -> None:
    tiny.directory(tmp_path / "m", "qwen3", rms_norm_eps=1e-3)

    def make(source: Path, mesh: dict[str, int]) -> mw.Engine:
        there = mw.Mesh(**mesh)
        return mw.Engine(mw.load(tmp_path / "m" if there.rank else source, there, dtype=torch.float64), lr=1e-2)

    for text in worlds.run(2, disagreed, source, FSDP, make, _step):
        assert re.search(r"rms_norm_eps of config\.json is 0\.001 on rank 1 and .* on rank 0", text), text


def looked_apart(source: Path, mesh: dict[str, int]) -> int:
    """The second replica looks at nothing."""
    model = mw.load(source, mw.Mesh(**mesh, timeout_s=20), dtype=torch.float64)
    looked = [] if model.mesh.coords["replicate"] else tiny.batches(model.mesh.data_rank)
    return sum(len(mw.logprobs(model, batch)) for batch in looked)


@pytest.mark.parametrize("mesh", [dict(replicate=2), dict(replicate=2, fsdp=2, tp=2)], ids=trials.named)
def test_replicas_may_look_at_as_much_as_they_like(source: Path, mesh: dict[str, int]) -> None:
    found = worlds.run(trials.world_of(mesh), looked_apart, source, mesh)
    assert found == [2 * tiny.LENGTH] * (len(found) // 2) + [0] * (len(found) // 2)


def written_into(source: Path) -> tuple[list[float], list[float]]:
    def greedy(scores: Any, fields: Any) -> torch.Tensor:
        loss = -scores["logprobs"] * fields["weight"]
        fields["weight"].mul_(0)
        fields["gain"] -= 5
        return loss

    engine = build(source, {}, loss=greedy)
    batch = mw.pack([[1, 2, 3]], fields={"weight": [[2.0] * 3], "gain": [[1.0] * 3]})
    weighted = build(source, {}, loss=lambda scores, fields: -scores["logprobs"] * 2.0)
    return [engine.evaluate([batch]), weighted.evaluate([batch])], batch.fields["gain"].tolist()


def test_a_loss_may_write_into_its_fields(source: Path) -> None:
    (found, expected), gain = worlds.run(1, written_into, source)[0]
    assert found == pytest.approx(expected, rel=1e-12)
    assert gain == [1.0] * 3


def too_large(source: Path, mesh: dict[str, int]) -> list[str]:
    model, said = mw.load(source, mw.Mesh(**mesh), dtype=torch.float64), []
    name = "layers.1.mlp.down"
    if model.mesh.rank == model.mesh.axes.world - 1:
        model.stored()[name].view(-1)[-1] = 7e4
    for there, dtype in (("half", torch.float16), ("fine", torch.bfloat16)):
        try:
            mw.export(model, there, dtype=dtype)
        except mw.MeshwrightError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("mesh", [{}, FSDP], ids=trials.named)
def test_no_weight_becomes_infinite_in_a_file(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mesh: dict[str, int]
) -> None:
    monkeypatch.chdir(tmp_path)
    told = worlds.run(trials.world_of(mesh), too_large, source, mesh)
    assert re.search(
        r"down_proj\.weight has a weight of 70000, which torch\.float16 cannot hold; export with", told[-1][0]
    )
    assert [len(each) for each in told] == [1] * len(told)
    assert [path.name for path in tmp_path.iterdir()] == ["fine"]
