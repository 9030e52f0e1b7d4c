"""FP8 matmuls: every gradient on every mesh equals that of one process; refusals; exports."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

import meshwright as mw
from meshwright import ops, parallel
from meshwright.axes import Axes
from meshwright.blueprint import Blueprint
from meshwright.cli import main
from meshwright.errors import LayoutError
from meshwright.ops import fp8_matmul, matmul
from meshwright.ops.fp8_matmul import rounded_matrix
from meshwright.parallel import fp8_gather
from meshwright.recipe import Recipe
from meshwright.sharding import check_fp8
from meshwright.verify import Finding
from meshwright.verify.fp8_cost import StepValues, _cosine, _divergence, p1_cost
from meshwright.verify.fp8_matmuls import q1_matmuls
from meshwright.verify.results import Notes
from tests import fp8_plants, parts, tiny, trials, worlds
from tests.words import words

BOTH = dict(fsdp=2, tp=2)


class Case(NamedTuple):
    name: str
    mesh: tuple[tuple[str, int], ...]
    dtype: torch.dtype = torch.float64

    def __str__(self) -> str:
        return f"{self.name}-{trials.named(dict(self.mesh))}"


ALL = [*trials.MESHES, *trials.CONTEXT_MESHES, *trials.PIPELINE_MESHES, *trials.EXPERT_MESHES]


FULL = [Case(name, (*mesh.items(),)) for mesh in ALL for name in tiny.ALIGNED if "moe" in name or "ep" not in mesh]
FEW = [
    Case("qwen3", (("cp", 2),)),  # FSDP shards over cp too
    Case("qwen3_5_moe", (("tp", 2), ("ep", 2))),  # tests/test_fp8_gathers.py has fsdp and pp too
]
CASES = FULL if parts.ALL else FEW
ROUNDED = [
    Case(name, (*BOTH.items(),), dtype)
    for dtype in ((torch.float32, torch.bfloat16) if parts.ALL else ())  # tests/test_fp8_gathers.py has bfloat16
    for name in tiny.ALIGNED
]
Findings = Callable[[Case], list[Finding]]


def skipped(name: str, mesh: dict[str, int]) -> list[str]:
    """With two kv heads on four ranks, each rank has a partial gradient of them. N-grams have 24 columns."""
    kv = ["*.k.weight", "*.v.weight"] if mesh.get("tp", 1) > 2 else []
    return kv + ["layers.*.grams.key.weight", "layers.*.grams.value.weight"] * (name == "qwen4_exp")


def findings(sources: dict[str, Path], group: list[Case]) -> dict[Case, list[Finding]]:
    def tried(case: Case) -> trials.Trial:
        mesh = dict(case.mesh)
        plain = trials.trial(sources[case.name], mesh, "lm", case.dtype)
        steps = plain.steps if parts.ALL else 1
        return trials.changed(plain, fp8="block", fp8_skip=skipped(case.name, mesh), steps=steps)

    return trials.findings_in_turn({case: tried(case) for case in group})


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    at = tmp_path_factory.mktemp("aligned")
    few = {"qwen3": dict(intermediate_size=256), "qwen3_5_moe": dict(num_attention_heads=2)}
    changes: dict[str, dict[str, int]] = {name: {} for name in tiny.ALIGNED} if parts.ALL else few
    return {
        name: tiny.directory(at / name, name, dtype=torch.bfloat16, **tiny.in_blocks(name) | more)
        for name, more in changes.items()
    }


@pytest.fixture(scope="module")
def findings_of(sources: dict[str, Path]) -> Findings:
    cases = [*CASES, *ROUNDED]
    return worlds.shared({case: (case.mesh, case.dtype, case.name) for case in cases}, partial(findings, sources))


@pytest.mark.parametrize("case", [*CASES, *ROUNDED], ids=lambda case: f"{case}-{str(case.dtype)[6:]}")
def test_every_oracle(findings_of: Findings, case: Case) -> None:
    assert findings_of(case) == []


# Planted bugs, in one process and on a mesh: which oracle detects them, and the cause it names.


def router_rounded(patch: pytest.MonkeyPatch) -> None:
    real = ops.linear

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, fp8: bool = False) -> Tensor:
        wide = F.pad(weight, (0, 0, 0, -len(weight) % 128))
        return real(x, weight, bias, fp8=fp8) if len(weight) != 4 else real(x, wide, fp8=True)[:, :4]

    patch.setattr(ops, "linear", linear)


def multiplied(patch: pytest.MonkeyPatch) -> None:
    def rounded(weight: Tensor) -> Tensor:
        numbers, scales = fp8_matmul._quantised_matrix(weight)
        wide = weight.unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
        return ((wide * scales).clamp(-448, 448).to(numbers.dtype).to(wide.dtype) * scales).flatten(2).flatten(0, 1)

    patch.setattr(fp8_matmul, "rounded_matrix", rounded)
    patch.setattr(fp8_gather, "_whole_matrices", lambda *_: ())  # so that matmuls quantise


def not_rounded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fp8_matmul, "rounded_rows", lambda x: x)


def gradient_rounded(patch: pytest.MonkeyPatch) -> None:
    real = matmul._Linears.backward

    def backward(ctx: Any, d: Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        dx, d_bias, _, *_ = real(ctx, d)
        dw = (
            (fp8_matmul.rounded_rows(d).mT @ fp8_matmul.rounded_rows(x)).split([len(w) for w in weights])
            if ctx.fp8
            else real(ctx, d)[3:]
        )
        return dx, d_bias, None, *dw

    patch.setattr(matmul._Linears, "backward", staticmethod(backward))


PLANTED = {
    "router": (router_rounded, "layers.0.mlp.router", "does not select it"),
    "multiplied": (multiplied, "layers.0.mixer.q.weight", "scales multiply where they divide"),
    "sideways": (fp8_plants.sideways, "layers.0.mixer.q.weight", "dy is rounded along the wrong side"),
    "shard": (fp8_plants.scale_of_shard, "layers.0.mixer.q.weight", "half a block has a separate scale"),
    "unrounded": (not_rounded, "layers.0.mixer.q.weight", "x is not rounded"),
    "dW": (gradient_rounded, "layers.0.mixer.q.weight", "its operands are rounded, and should not be"),
}


def is_named(bug: str, dtype: torch.dtype, source: Path) -> bool:
    """Return whether Q1 names the matrix and the cause in one process in which a bug is planted."""
    plant, name, cause = PLANTED[bug]
    tried = trials.trial(source, {}, dtype=dtype).with_options(fp8="block")
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        engine = tried.engine(mw.Mesh(device="cpu"))
        findings = map(str, q1_matmuls(engine, tried.data(0, 0)[:1], Notes()))
        return any(name in each and cause in each for each in findings)  # the first such ends the search


def test_q1_names_planted_bugs(tmp_path: Path) -> None:
    """Tests of every oracle run Q1 without a bug, in the same two dtypes."""
    few = dict(num_hidden_layers=1, hidden_size=128, mlp_only_layers=[], num_experts=4)
    config = {**tiny.ALIGNED["qwen3_moe"], **few}  # a layer has every kind of matrix
    source = tiny.directory(tmp_path / "m", "qwen3_moe", dtype=torch.bfloat16, **config)
    dtypes = {bug: torch.bfloat16 if bug == "sideways" else torch.float64 for bug in PLANTED}
    acts = {bug: partial(is_named, bug, dtype, source) for bug, dtype in dtypes.items()}
    assert worlds.in_turn(1, acts) == {bug: [True] for bug in PLANTED}


@contextmanager
def unchecked(_: object) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel, "check_fp8", lambda *_: None)
        yield


def test_oracles_detect_a_cut_inside_of_a_block(tmp_path: Path) -> None:
    """Each of two ranks has 192 rows of a gate: one block has rows of two matrices. The check is switched off."""
    config = {**tiny.ALIGNED["qwen3"], "intermediate_size": 384, "num_hidden_layers": 1, "hidden_size": 128}
    source = tiny.directory(tmp_path / "m", "qwen3", dtype=torch.bfloat16, **config)
    tried = trials.changed(trials.trial(source, dict(tp=2)), fp8="block", fp8_skip=["*.down.weight"], steps=1)
    (findings,) = trials.findings_in_turn({"it": tried}, unchecked).values()
    assert {each.oracle for each in findings} >= {"S1", "G1"}
    assert any("gate_proj" in each.name for each in findings)


def refused(config: dict[str, Any], axes: Axes, skip: Sequence[str] = ()) -> str:
    blueprint = Blueprint.of(config, None, Recipe(fp8="block", fp8_skip=skip))
    try:
        check_fp8(blueprint.spec, axes)
    except LayoutError as error:
        return str(error)
    return ""


REAL = dict(
    model_type="qwen3", vocab_size=151936, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36,
    num_attention_heads=32, num_key_value_heads=8, head_dim=128,
)  # fmt: skip


def test_a_mesh_that_cuts_blocks_is_refused() -> None:
    began = time.monotonic()
    message = refused(REAL, Axes(tp=8))
    assert time.monotonic() - began < 5
    pattern = words("1216 rows", r"layers\.0\.mlp\.gate_up\.weight", "tp=8", "choose tp from 1, 2, 4, or")
    assert re.search(pattern, message), message
    assert "fp8_skip=['layers.*.mlp.gate_up.weight', 'layers.*.mlp.down.weight']" in message
    assert refused(REAL, Axes(tp=8), ["*.mlp.*"]) == ""
    assert refused(REAL, Axes(fsdp=64, tp=4)) == ""
    assert "share of the gradient" in refused(REAL, Axes(tp=16), ["*.mlp.*"])


def test_sides_without_whole_blocks_are_refused_on_any_mesh() -> None:
    assert "which no matrix of this model has" in refused(tiny.ODD["qwen3"], Axes())
    odd = {**tiny.ALIGNED["qwen3_5"], "linear_key_head_dim": 96}
    pattern = words("96 rows", r"layers\.0\.mixer\.qkv\.weight", r"fp8_skip=\['layers\.\*\.mixer\.qkv")
    assert re.search(pattern, refused(odd, Axes()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(fp8=True), words("fp8=True", "fp8='block'")),
        (dict(fp8="block", fp8_skip="nothing.*"), words("matches no parameter", "fp8_skip")),
        (dict(fp8="block", fp8_skip="embed*"), words("matches only parameters", "embed")),
        (dict(fp8="block", fp8_skip=["*"]), words("leaves no matmul")),
        (dict(fp8="block", fp8_skip=7), words("fp8_skip=7", "pattern")),
    ],
)
def test_wrong_options_are_refused(sources: dict[str, Path], options: dict[str, Any], message: str) -> None:
    with pytest.raises(mw.ConfigError, match=message):
        mw.load(sources["qwen3"], **options)


def trained(source: Path, fp8: str | None, num: int) -> list[float]:
    """Train on documents in which four tokens may follow each token, so that none can be memorised."""
    engine = mw.Engine(mw.load(source, mw.Mesh(device="cpu"), fp8=fp8), lr=lambda step: 2e-3 * (1 - step / num))
    g, losses = torch.Generator().manual_seed(5), []
    for _ in range(num):
        steps_DT = torch.randint(0, 4, (4, 24), generator=g) ** 2 + 3
        losses.append(engine.step([mw.pack((steps_DT.cumsum(1) % 131).tolist())]).loss)
    return losses


@pytest.mark.slow
@parts.IN_MATRIX
def test_final_loss_equals_that_of_bfloat16(tmp_path: Path) -> None:
    """A tiny model with experts trains with float32 masters in both runs."""
    small = {
        **tiny.ALIGNED["qwen3_moe"],
        "num_hidden_layers": 2 if parts.ALL else 1,
        "num_experts": 4,
        "mlp_only_layers": [],
    }
    source = tiny.directory(tmp_path / "m", "qwen3_moe", dtype=torch.bfloat16, **small)
    acts = {fp8: partial(trained, source, fp8, 200 if parts.ALL else 120) for fp8 in (None, "block")}
    runs = worlds.in_turn(1, acts, seconds=200)
    (wide,), (low,) = runs[None], runs["block"]
    ends = [sum(losses[-10:]) / 10 for losses in (wide, low)]
    assert ends[0] < 0.4 * wide[0]
    assert abs(ends[1] / ends[0] - 1) < 0.01, (ends, wide[0])


def in_blocks(name: str, stored: torch.Tensor, config: dict[str, object]) -> torch.Tensor:
    """Round a parameter as matmuls do, expert by expert."""
    num = config["num_experts"] if ".experts." in name else 1
    matrices = stored.bfloat16().float().view(num, -1, stored.shape[-1])
    return torch.stack([rounded_matrix(each) for each in matrices]).view(stored.shape)


def rounded_and_exported(source: Path, at: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    mesh = mw.Mesh(device="cpu")
    model = mw.load(source, mesh, fp8="block")
    mw.Engine(model, lr=1e-2).step(tiny.batches(0))
    mw.export(model, at / "as-fp8", format="fp8")
    mw.export(model, at / "as-is")
    read = mw.load(at / "as-fp8", mesh, dtype=torch.float32).stored()
    low = sorted(model.blueprint.spec.fp8)
    return {name: (in_blocks(name, model.stored()[name], model.config), read[name]) for name in low}


def test_exported_codes_equal_those_of_training(sources: dict[str, Path], tmp_path: Path) -> None:
    """Matmuls and files round the same blocks of the masters, after a cast to bfloat16."""
    names = ("qwen3_5_moe", "qwen2") if parts.ALL else ("qwen3_5_moe",)
    acts = {name: partial(rounded_and_exported, sources[name], tmp_path / name) for name in names}
    for name, (matrices,) in worlds.in_turn(1, acts).items():
        assert matrices
        for low, (rounded, exported) in matrices.items():
            assert torch.equal(rounded, exported), (name, low)


def test_verify_reports_the_cost_of_fp8(sources: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """`--full` compares the logits and gradients of the given weights with FP8 matmuls and without."""
    options = ["verify", str(sources["qwen3"]), "--mesh", "tp=2", "--fp8", "--full", "--dtypes", "float32"]
    main([*options, "--against", "none", "--json"])
    result = json.loads(capsys.readouterr().out)
    wide, fp8_run = result["runs"]
    assert {row: lines for row, lines in wide["oracles"].items() if lines} == {}
    assert fp8_run["oracles"] == {"RUN": [], "P1": []}
    assert any("Q1" in line for line in result["untried"])
    assert fp8_run["dtype"] == "fp8"
    assert all(re.search(p, " ".join(fp8_run["notes"])) for p in (r"loss \d", r"nats of KL", "cosine of gradients 0.9"))


@pytest.mark.slow
def test_verify_shrinks_to_whole_blocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**REAL, "num_attention_heads": 2, "num_key_value_heads": 1}))
    options = ["--mesh", "fsdp=2", "--fp8", "--fp8-skip", "layers.0.mixer.k.*,layers.35.*", "--state-dtype", "uint8"]
    options += ["--dtypes", "float64" if parts.ALL else "bfloat16", "--against", "none", "--json"]
    assert main(["verify", str(tmp_path / "config.json"), *options]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert {*run["oracles"]} >= {"Q1", "U1"}
    assert not any(run["oracles"].values())
    assert run["margins"]["Q1"][0]["count"] > 0


def written_without(source: Path, at: Path) -> list[str]:
    model = mw.load(source, mw.Mesh(device="cpu"), fp8="block", fp8_skip=["layers.0.*", "*.k.weight"])
    mw.export(model, at, format="fp8")
    return [name for name in load_file(at / "model.safetensors") if name.endswith("scale_inv")]


def test_an_export_omits_skipped_matrices(sources: dict[str, Path], tmp_path: Path) -> None:
    """It also omits the other matrices of the same modules, which readers join."""
    (names,) = worlds.run(1, written_without, sources["qwen3"], tmp_path / "out")
    assert names == [f"model.layers.1.mlp.{name}_proj.weight_scale_inv" for name in ("down", "gate", "up")]


def test_the_cost_of_fp8_is_of_all_gradients_and_of_tokens_with_a_label() -> None:
    """Gradients are one vector. Predictions of padding and of last tokens count nothing, in batches of any sizes."""
    batches = [mw.pack([[5, 6, 7]], length=5), mw.pack([[1, 2]])]
    before, after = ([torch.randn(len(b), 9).double().log_softmax(-1) for b in batches] for _ in range(2))
    of_token = [(p.exp() * (p - q)).sum(-1) for p, q in zip(before, after, strict=True)]
    expected = (of_token[0][0] + of_token[0][1] + of_token[1][0]) / 3
    grads = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0])}
    wide, low = StepValues(1.0, before, grads), StepValues(1.0, after, {**grads, "b": torch.tensor([0.0])})
    assert _divergence(wide, low, batches) == pytest.approx(float(expected))
    assert _cosine([*wide.grads.values()], [*low.grads.values()]) == pytest.approx(3 / 5)
    assert _cosine([torch.zeros(2)], [torch.ones(2)]) == 0.0
    notes = Notes()
    [finding] = p1_cost(wide, low, notes)
    assert "0.6000" in finding.what
    assert (notes.margins[0].count, round(notes.margins[0].share, 6)) == (2, 4.0)
    assert [*p1_cost(wide, wide, notes)] == []
    nan = StepValues(1.0, [], {"a": torch.tensor([math.nan, 0.0]), "b": torch.tensor([4.0])})
    assert len([*p1_cost(wide, nan, notes)]) == 1, "NaN is no good cosine"
