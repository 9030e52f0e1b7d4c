"""`meshwright verify`: its output, its refusals, and that it detects a bug in the installed package."""

from __future__ import annotations

import contextlib
import gc
import inspect
import json
import os
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from meshwright.axes import Axes
from meshwright.blueprint import Blueprint
from meshwright.cli import main
from meshwright.errors import ConfigError, RankError
from meshwright.optim import AdamW
from meshwright.plan import TINY
from meshwright.recipe import MemoryOptions, Pipeline, Recipe
from meshwright.verify import (
    FULL,
    ORACLES,
    Finding,
    Options,
    RunResult,
    examine,
    fp8_cost,
    independent_checks,
    plan,
    report,
    run_ranks,
    session,
    shrink,
    transformers_oracles,
)
from meshwright.verify.report import ROWS
from tests import parts, tiny
from tests.published_configs import QWEN2, QWEN3_5, QWEN3_30B_A3B, QWEN3_NEXT, QWEN4_EXP
from tests.test_verify_peer import first_step_alone
from tests.words import words

Capture = pytest.CaptureFixture[str]
OF_FP8 = {"Q1", "P1"}  # with --fp8 alone, which tests/test_fp8.py tries
OF_LORA = {"A1", "E3", "M2"}  # with --lora alone, which tests/test_verify_lora.py tries


def directory(at: Path, config: dict[str, Any]) -> str:
    at.mkdir()
    (at / "config.json").write_text(json.dumps(config))
    return str(at)


def _quiet(_: str) -> None:
    """Print no progress."""


def verify(capsys: Capture, *arguments: str) -> tuple[int, str, str]:
    code = main(["verify", *arguments])
    return code, *capsys.readouterr()


def passed(out: str) -> dict[str, Any]:
    result = json.loads(out)
    assert result["ok"], out
    left_out = {"P1"} if "--fp8" in result["command"] else OF_FP8 | ({"H1"} if result["head"] == "value" else set())
    left_out |= OF_LORA | ({"O1"} if "--state-dtype" in result["command"] else set())
    left_out |= {"E2", "H1", "O1"} if "--dtypes bfloat16" in result["command"] else set()
    assert {oracle for run in result["runs"] for oracle in run["oracles"]} == {*ROWS} - left_out
    for run in result["runs"]:
        for oracle in {*run["oracles"]} - {"RUN"}:
            margins = run["margins"][oracle]
            assert margins, f"{oracle} of {run['dtype']} passes without a figure"
            assert all(m["worst"] <= m["allowed"] for m in margins if m["allowed"]), margins
    assert {"meshwright", "torch", "transformers", "date", "command", "seed"} <= set(result)
    return result


IN_BLOCKS = "tiny-qwen3-moe-fp8"
HALF_ATTENTION = {  # every second layer, so that two layers are left of it
    **QWEN3_5,
    "text_config": QWEN3_5["text_config"]
    | dict(full_attention_interval=2, layer_types=["linear_attention", "full_attention"] * 16),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", parts.every(6, TINY, [*TINY].index("tiny-qwen3")))  # tests/test_fp8.py has --fp8
def test_tiny_models(name: str, capsys: Capture) -> None:
    of_context = {
        "tiny-qwen3": ("attention=2", "attention: swap 2"),
        "tiny-qwen3.5": ("attention=2,delta=1", "delta: state 2, attention: swap 2"),
    }
    requested, way = of_context.get(name, ("", ""))
    mesh, options = ("cp=2", ["--context", requested]) if way else ("fsdp=2", [])
    options += ["--fp8", "--state-dtype", "uint8"] if name == IN_BLOCKS else []
    code, out, err = verify(capsys, name, "--mesh", mesh, *options, "--dtypes", "float64", "--json")
    assert code == 0, out
    assert passed(out)["context"] == way
    assert passed(out)["ranks"] == 2
    assert re.search(r"float64\b.*\bone process\b", err), err
    assert re.search(rf"float64\b.*\b2 ranks\b.*\b{mesh}\b", err), err


@pytest.mark.parametrize(
    ("config", "mesh", "head"),
    parts.every(
        6,
        [
            pytest.param(QWEN2, "tp=2", "lm", id="qwen2.5-0.5b"),
            pytest.param(QWEN3_30B_A3B, "fsdp=2,tp=2,ep=4", "lm", id="qwen3-30b-a3b"),
            pytest.param(QWEN3_5, "replicate=2", "value", id="qwen3.5-value"),
            pytest.param(HALF_ATTENTION, "tp=2", "lm", id="qwen3.5", marks=pytest.mark.slow),
            pytest.param(QWEN3_5, "tp=4", "lm", id="qwen3.5-tp4", marks=pytest.mark.slow),
            pytest.param(QWEN3_NEXT, "fsdp=2,ep=2", "lm", id="qwen3-next-80b-a3b", marks=pytest.mark.slow),
        ],
    ),
)
def test_published_models_shrunk(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], mesh: str, head: str
) -> None:
    first_step_alone(monkeypatch)
    at = directory(tmp_path / "m", config)
    dtype = "bfloat16" if config is QWEN2 else "float64"
    code, out, _ = verify(capsys, at, "--mesh", mesh, "--head", head, "--dtypes", dtype, "--json")
    assert code == 0, out
    assert [run["dtype"] for run in passed(out)["runs"]] == [dtype, "transformers"]


@pytest.mark.parametrize("tp", [1, 2, 3, 8])
def test_shrinking_preserves_heads_experts_and_layer_kinds(tp: int) -> None:
    small = shrink(QWEN3_30B_A3B, tp)
    for key in ("num_attention_heads", "num_key_value_heads", "num_experts", "num_experts_per_tok", "norm_topk_prob"):
        assert small[key] == QWEN3_30B_A3B[key]
    assert small["num_hidden_layers"] == 2
    assert shrink(QWEN3_30B_A3B, tp, num_stages=4)["num_hidden_layers"] == 5, "one of the stages has two"
    text = shrink(QWEN3_5, tp)["text_config"]
    assert text["layer_types"] == ["linear_attention"] * 3 + ["full_attention"]
    assert text["num_hidden_layers"] == 4
    assert small["intermediate_size"] % tp == 0
    most = -(-text["vocab_size"] // tp)
    last = text["vocab_size"] - (tp - 1) * most
    assert 0 < last < most or (tp == 1 and last == most), "the last rank has less than the others"


def test_shrunk_depth_has_every_kind_of_layer() -> None:
    assert shrink({**QWEN3_30B_A3B, "mlp_only_layers": [0, 1, 2]}, 1)["num_hidden_layers"] == 4
    assert shrink({**QWEN3_30B_A3B, "mlp_only_layers": [0, 1, 2]}, 1)["mlp_only_layers"] == [0, 1, 2]
    assert shrink({**QWEN3_30B_A3B, "decoder_sparse_step": 5}, 1)["num_hidden_layers"] == 5


@pytest.mark.parametrize("fp8", [None, "block"])
def test_a_shrunk_table_has_uneven_rows_in_many_parts(fp8: str | None) -> None:
    config = {**QWEN4_EXP, "text_config": {**QWEN4_EXP["text_config"], "eos_token_id": [5, 6]}}
    small = shrink(config, 2, block=128 if fp8 else 0)
    table = Blueprint.of(small, None, Recipe(fp8=fp8)).table["layers.1.grams.table"]  # refuses too narrow heads
    assert table.rows["gram"] % 2 == 1
    assert len(table.layouts[0].blocks) > 10
    assert small["text_config"]["eos_token_id"] == [7, 9]


def test_verify_uses_the_source_layout_of_experts(tmp_path: Path) -> None:
    for layout in ("per-expert", "fused"):
        source = tiny.directory(tmp_path / layout, "qwen3_moe", dtype=torch.bfloat16, layout=layout)
        assert plan(str(source), Axes()).blueprint.keymap.choice["experts"] == layout


@pytest.mark.parametrize("what", ["a missing layer", "an unknown key", "an untrainable dtype"])
def test_verify_refuses_files_that_load_refuses(tmp_path: Path, capsys: Capture, what: str) -> None:
    source = tiny.directory(tmp_path / "m", "qwen3")
    tensors = load_file(source / "model.safetensors")
    first = next(key for key in tensors if "layers.1." in key)
    if what == "a missing layer":
        del tensors[first]
    elif what == "an unknown key":
        tensors["model.layers.7.extra"] = torch.ones(2)
    else:
        tensors[first] = tensors[first].to(torch.float8_e4m3fn)
    save_file(tensors, source / "model.safetensors")
    code, _, err = verify(capsys, str(source), "--mesh", "fsdp=2")
    assert code == 2
    assert ("extra" if what == "an unknown key" else first) in err


def test_full_verifies_the_given_weights(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(session._STEPS, "float64", 1)
    source = tiny.directory(tmp_path / "m", "qwen3", dtype=torch.bfloat16)
    options = ["--mesh", "tp=2", "--full", "--dtypes", "float64", "--against", "none", "--json"]
    code, out, err = verify(capsys, str(source), *options)
    assert code == 0, out
    assert "making a model" not in err


def test_table(capsys: Capture) -> None:
    code, out, err = verify(capsys, "tiny-qwen3", "--mesh", "pp=2", "--dtypes", "float64", "--against", "none")
    assert code == 0
    assert "FAILS" not in out
    rows = [line for line in out.splitlines() if line.split() and line.split()[0] in ROWS]
    assert re.search(r"float64\b.*\bone process\b", err), err
    assert re.search(r"float64\b.*\b2 ranks\b.*\bpp=2\b", err), err
    expected = [row for row in ROWS if row not in OF_FP8 | OF_LORA | {"M1", "R1"}]
    assert [line.split()[0] for line in rows] == expected, "one line per oracle"
    assert all(len(line) <= 80 and "pass" in line for line in rows), out
    assert re.search(r"^G1 .*\b\d+ gradients: \d\.\de-\d+ off, 1e-09 allowed", out, re.MULTILINE), out


def test_findings_are_grouped_into_few_lines() -> None:
    names = [f"layers.{i}.{what}" for what in ("mlp.out", "mixer.q", "mixer.k", "norm", "mlp.up") for i in range(2)]
    findings = [Finding("K1", "all_reduce", "3 of 4"), *(Finding("G1", name, "1/2 of it") for name in names)]
    part = RunResult("float64", 1.0, findings, tuple(ORACLES))
    expected = [
        *(rf"G1 layers\.0\.{at}: 1/2 of it .*\b2\b.*layers\.\*\.{at}\b" for at in ("mlp.out", "mixer.q", "mixer.k")),
        r"G1 .*\b4\b.*\b2\b.*--json\b",
        r"K1 all_reduce: 3 of 4$",
    ]
    for line, pattern in zip(report.finding_lines(part), expected, strict=True):
        assert re.match(pattern, line), line
    well = RunResult("bfloat16", 1.0, [], tuple(ORACLES))
    summary = report.beginning([well, part])
    assert re.search(r"\bG1 layers\.0\.mlp\.out\b.*\bK1 all_reduce\b", summary), summary
    assert report.beginning([well]) == report.beginning([replace(part, findings=findings[:1])]) == ""


def test_report_lists_shrunk_sizes(tmp_path: Path) -> None:
    def shrunk(config: dict[str, Any], kind: str = "shrunk") -> dict[str, Any]:
        at = directory(tmp_path / str(len(list(tmp_path.iterdir()))), config)
        return report.shrunk(plan(at, Axes(fsdp=2, tp=2), Options(kind=kind), lambda _: None))

    assert report.shrunk(plan("tiny-qwen3", Axes(tp=2), say=lambda _: None)) == {}
    assert shrunk(QWEN2)["head_dim"] == (None, 10)
    assert shrunk(QWEN3_5)["num_hidden_layers"] == (32, 4)
    assert shrunk(QWEN3_30B_A3B) == {
        "vocab_size": (151936, 131),
        "hidden_size": (2048, 37),
        "intermediate_size": (6144, 42),
        "num_hidden_layers": (48, 2),
        "head_dim": (128, 10),
        "moe_intermediate_size": (768, 20),
    }


def test_report_lists_what_was_not_tried(tmp_path: Path) -> None:
    def untried(model: str, **mesh: int) -> str:
        return report.unproven(plan(model, Axes(**mesh), say=lambda _: None), [])

    def own(name: str, **options: Any) -> str:
        return directory(tmp_path / name, {**QWEN3_30B_A3B, **options})

    dense = untried("tiny-qwen3", pp=2, replicate=2, fsdp=2, cp=2, tp=2)
    assert re.search(words(r"mw\.load", r"mw\.Engine", "zero-bubble and v"), dense)
    assert not re.search(r"--mesh \w+=2|router|replicate", dense), "a dense model has no experts to spread"
    larger = words("larger sizes of fsdp, cp, tp", "--mesh fsdp=4, then --mesh cp=4, then --mesh tp=4")
    assert re.search(larger, dense), "two layers make no three stages"
    assert re.search(
        "larger sizes of fsdp, ep: .*fsdp=4, then --mesh fsdp=4,ep=4", untried("tiny-qwen3-moe", fsdp=2, ep=2)
    )
    assert not re.search("larger sizes", untried("tiny-qwen3", fsdp=4))
    others = words(r"\breplicate, fsdp, cp\b", "--mesh pp=2,replicate=2,fsdp=2, then --mesh cp=2\\)")
    assert re.search(others, untried("tiny-qwen3", tp=2))
    full = report.untried(
        plan(str(tiny.directory(tmp_path / "f", "qwen3")), Axes(tp=2), Options(kind=FULL), _quiet), []
    )
    assert any("after the first step" in what for what in full), full
    value = report.untried(plan("tiny-qwen3", Axes(tp=2), Options(Recipe(head="value")), _quiet), [])
    assert any("head against transformers" in what for what in value), value
    sparse = untried("tiny-qwen3-moe", fsdp=2, tp=2, ep=2)
    assert re.search(words(r"--mesh pp=2,replicate=2,cp=2\)", 'router_aux="previous"'), sparse), sparse
    assert "--mesh pp=2,replicate=2,cp=2,ep=2" in untried("tiny-qwen3-moe", fsdp=2, tp=2)
    assert "--mesh fsdp=2,ep=2" in untried("tiny-qwen3-moe", pp=2, replicate=2, fsdp=2, cp=2, tp=2)
    piped = untried("tiny-qwen3-moe", pp=2, fsdp=2, ep=2)
    assert not re.search("router_aux|changes nothing", piped), "a pipeline refuses the other kind"
    deep = Options(Recipe(pipeline=Pipeline(ends=(10, 48))))
    lone = report.untried(plan(own("c"), Axes(pp=2), deep, _quiet), [])
    assert any("(10, 48)" in what for what in lone), lone
    aux = r"output_router_logits\b.*\brouter_aux_loss_coef"
    tiny_one = untried("tiny-qwen3.5-moe", fsdp=2)
    assert 'router_aux="previous"' in tiny_one
    assert not re.search(aux, tiny_one), "a tiny MoE trains its aux loss"
    assert re.search(aux, untried(own("a"), fsdp=2))
    no_weight = own("b", output_router_logits=True, router_aux_loss_coef=0.0)
    assert re.search(aux, untried(no_weight, fsdp=2))


def test_a_tiny_model_takes_fp8_on_every_axis(capsys: Capture) -> None:
    """Every matrix has whole blocks of 128 on every axis."""
    for axes in (Axes(), Axes(fsdp=2, tp=2, ep=2), Axes(cp=2)):
        assert plan(IN_BLOCKS, axes, Options(Recipe(fp8="block"))).blueprint.spec.fp8
    code, _, err = verify(capsys, "tiny-qwen3-moe", "--mesh", "ep=4,fsdp=4", "--token-once-a-node", "3")
    assert (code, "choose from 2, 4" in err) == (2, True), err


def test_report_states_memory_options() -> None:
    shrunk, options = plan("tiny-qwen3", Axes(fsdp=2)), Options(Recipe(memory=MemoryOptions(recompute="full")))
    in_8_bits = plan(IN_BLOCKS, Axes(fsdp=2), replace(options, optimizer=AdamW(state_dtype=torch.uint8)))

    def stated(tried: session.Plan, dtype: str) -> str:
        return session.options_of(session.trial_of(tried, dtype, Path()))

    assert stated(shrunk, "float32") == "recompute='selective', sum_once=True"
    assert stated(shrunk, "float64") == ""
    assert stated(plan("tiny-qwen3", Axes(fsdp=2), options), "float32") == "recompute='full'"
    assert stated(in_8_bits, "float64") == "recompute='full', state_dtype=torch.uint8"
    assert "O1" not in session.oracles_of(session.trial_of(in_8_bits, "float64", Path()))
    *_, memory, others = report.untried(shrunk, [])
    assert memory.startswith("reshard, offload, compiled, gather_once, narrow_grads of mw.MemoryOptions"), memory
    assert others.startswith("state_dtype")
    with pytest.raises(ConfigError, match=f"no matrix .*8 bits; try {IN_BLOCKS}"):
        plan("tiny-qwen3", Axes(fsdp=2), Options(optimizer=AdamW(state_dtype=torch.uint8)))


def test_help_names_every_tiny_model(capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        main(["verify", "--help"])
    shown = " ".join(capsys.readouterr().out.split("--mesh AXIS")[1].split()).replace("- ", "-")
    assert set(re.findall(r"tiny-[a-z0-9.-]*[a-z0-9]", shown)) == set(TINY)


def test_list_names_every_oracle(capsys: Capture) -> None:
    code, out, _ = verify(capsys, "--list")
    assert code == 0
    assert all(oracle in out for oracle in ROWS)


REFUSED = [
    (
        ["tiny-qwen3", "--mesh", "tp=5"],
        words("tp=5", r"\bheads=12\b", r"layers\.0\.mixer\.q\.weight\b", "tp from 1, 2, 4"),
    ),
    (["tiny-qwen3.5", "--mesh", "tp=8"], words("tp=8", "tp from 1, ")),
    (["tiny-qwen3-moe", "--mesh", "fsdp=2,ep=3"], words("ep=3", r"\btp=2\b", r"\bep from 1, 2\b")),
    (["tiny-qwen3", "--mesh", "pp=9"], words(r"\b2 layers\b", "9 pipeline stages", "from 1 to 2")),
    (["tiny-qwen3", "--mesh", "sp=2"], words("sp=2", "AXIS=N")),
    (["tiny-qwen3", "--mesh", "tp=2,tp=4"], words(r"tp=2,tp=4", r"\btp\b.*\btwice\b")),
    (["tiny-qwen3", "--mesh", "tp=two"], words("'tp=two'", "AXIS=N")),
    (["tiny-qwen3", "--mesh", "tp=0"], r"\btp=0\b"),
    (["tiny-qwen3", "--mesh", "cp=2", "--context", "mamba=1"], words("'mamba=1'", "MIXER=N", "attention, delta")),
    (["tiny-qwen3", "--mesh", "cp=2", "--context", "attention=1,attention=2"], words("attention", "twice")),
    (["tiny-qwen3", "--mesh", "cp=2", "--context", "attention=0"], words("attention=0", "1 or more")),
    (["tiny-qwen3", "--mesh", "cp=2", "--context", "attention=3"], words("attention=3", "cp=2")),
    (["tiny-qwen3", "--mesh", "cp=2", "--context", "delta=1"], words("delta=1", "no such mixer")),
    (["tiny-qwen3", "--mesh", "tp=2", "--context", "attention=1"], words("--context 'attention=1'", "cp=2")),
    (["tiny-qwen3", "--dtypes", "float8"], words("'float8'", "float64")),
    (["tiny-qwen3", "--seconds", "nan"], r"--seconds nan\b"),
    (["tiny-qwen3", "--seconds", "-1"], r"--seconds -1\.0\b"),
    (["tiny-qwen3", "--full"], words("tiny-qwen3", "weights")),
    (["tiny-qwen3", "--mesh", "fsdp=" + "9" * 5000], "AXIS=N"),
    (["tiny-qwen3", "--device", "gpu"], words("--device 'gpu'", r"\bcpu\b.*\bcuda\b")),
    (["m" * 300], "File name too long"),
    (["no/such/place"], words("no/such/place", "directory", "tiny-qwen2")),
    ([], words("verify", "model")),
]


@pytest.mark.parametrize(("arguments", "pattern"), REFUSED, ids=[" ".join(a) or "nothing" for a, _ in REFUSED])
def test_refused_within_seconds(capsys: Capture, arguments: list[str], pattern: str) -> None:
    began = time.monotonic()
    code, _, err = verify(capsys, *arguments)
    assert code == 2
    assert re.search(pattern, err), err
    assert time.monotonic() - began < 5


def test_mesh_must_divide_the_real_sizes(tmp_path: Path, capsys: Capture) -> None:
    """The shrunk sizes would allow the mesh."""
    at = directory(tmp_path / "m", {**QWEN2, "intermediate_size": 4865})
    code, _, err = verify(capsys, at, "--mesh", "tp=2")
    assert code == 2
    assert re.search(words("tp=2", r"\bffn=4865\b"), err), err


def test_verify_refuses_what_cannot_fit(tmp_path: Path, capsys: Capture) -> None:
    """`--full` takes 30 billion parameters, their gradients and moments; a shrunk model takes too many processes."""
    at, began = directory(tmp_path / "m", QWEN3_30B_A3B), time.monotonic()
    code, _, err = verify(capsys, at, "--mesh", "fsdp=2,ep=2", "--full")
    assert code == 2
    assert re.search(words("train", "fsdp=2 ep=2", "--full", "--dtypes"), err), err
    code, _, err = verify(capsys, at, "--mesh", "fsdp=2,ep=2", "--weights")
    assert code == 2
    assert re.search(words(r"\bweights\b", "fsdp=2 ep=2", r"\b1\d+\S* [GT]B"), err), err
    code, _, err = verify(capsys, at, "--mesh", "replicate=4096")
    assert code == 2
    assert re.search(words("replicate=4096", r"\b4096 processes\b"), err), err
    assert time.monotonic() - began < 15


def test_absent_devices_are_refused(capsys: Capture) -> None:
    if torch.accelerator.is_available():
        pytest.skip("they are")
    code, _, err = verify(capsys, "tiny-qwen3", "--mesh", "tp=2", "--device", "cuda")
    assert code == 2
    assert re.search(words("tp=2", r"\b2 devices\b", r"\b0\b"), err), err


def dies(rank: int) -> None:
    if int(os.environ["RANK"]) == rank:
        os._exit(3)
    time.sleep(60)


def sleeps() -> None:
    if os.environ["RANK"] == "1":
        time.sleep(60)


def test_a_rank_that_dies_or_hangs_is_named() -> None:
    began = time.monotonic()
    with pytest.raises(RankError, match=words(r"\[1\] of 2", r"\bdied\b")):
        run_ranks(2, dies, 1, seconds=30)
    assert time.monotonic() - began < 10
    with pytest.raises(RankError, match=words(r"\[1\] of 2", r"\bhung\b", r"\b2 s\b")):
        run_ranks(2, sleeps, seconds=2)


class Inherited:
    """Garbage of the caller, in a cycle; it writes a file as it is destroyed."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.me = folder, self

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            (self.folder / str(os.getpid())).touch()


def test_ranks_destroy_no_object_of_their_parent(tmp_path: Path) -> None:
    """A store, for example, has a thread that a forked rank lacks."""
    gc.disable()
    try:
        Inherited(tmp_path)
        assert run_ranks(2, gc.collect, seconds=30)
        assert list(tmp_path.iterdir()) == []
    finally:
        gc.enable()
    gc.collect()
    assert [path.name for path in tmp_path.iterdir()] == [str(os.getpid())]


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads where Linux shows them")
def test_no_thread_outlives_a_run() -> None:
    """Ranks of a later run would inherit half of the parent's store, and hang."""
    before = len(os.listdir("/proc/self/task"))
    errors = []
    for _ in range(3):
        with pytest.raises(RankError) as caught:
            run_ranks(1, dies, 0, seconds=30)
        errors.append(caught)
    assert len(os.listdir("/proc/self/task")) == before


def test_every_listed_oracle_runs() -> None:  # one that is only listed would always pass
    modules = (inspect.getmodule(examine), independent_checks, transformers_oracles, fp8_cost, session)
    source = "".join(map(inspect.getsource, modules))
    source = re.sub(r"(?m)def \w+|\"\w+\": \w+|^    \w+,$|import .*", "", source)  # neither defined nor listed
    assert [name for name, oracle in ORACLES.items() if oracle.__name__ not in source] == []
