"""`meshwright plan`: its figures are those of published models, and exact for every rank, in seconds at any size."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright import __version__
from meshwright.axes import Axes
from meshwright.blueprint import Blueprint
from meshwright.cli import main
from meshwright.engine.step_bill import engine_bill
from meshwright.errors import ConfigError
from meshwright.plan import Figures, device_bytes, objections, plan_page, work_of
from meshwright.plan.communicators import communicators
from meshwright.plan.mesh_checks import RANKS_A_CORE, smaller
from meshwright.plan.step_time import flops_of
from meshwright.plan.tables import identical_params, parameter_lines
from meshwright.plan.wording import size
from meshwright.recipe import MemoryOptions
from meshwright.sharding import Param, piece
from tests import parts, tiny
from tests.published_configs import QWEN3_30B_A3B, QWEN3_NEXT
from tests.started import become
from tests.test_verify import directory
from tests.words import words

QWEN3_235B_A22B: dict[str, Any] = {
    **QWEN3_30B_A3B,
    **dict(hidden_size=4096, intermediate_size=12288, moe_intermediate_size=1536, num_attention_heads=64),
    **dict(num_hidden_layers=94, max_window_layers=94),
}
Capture = pytest.CaptureFixture[str]


def planned(capsys: Capture, *arguments: str) -> tuple[int, str, str]:
    code = main(["plan", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def as_json(capsys: Capture, *arguments: str) -> dict[str, Any]:
    code, out, err = planned(capsys, *arguments, "--json")
    assert code == 0, err
    return json.loads(out)


def figures_of(config: dict[str, Any], device: int | None = None, tokens: int | None = None, **mesh: int) -> Figures:
    axes = Axes(**mesh)
    return Figures("a model", Blueprint.of(config), axes, work_of(axes, tokens, 1), device)


# By hand, from the published sizes: GB of a rank, and of the collectives of a step of 8192 tokens. Only activations are
# not: 152 KiB a layer and token were once measured of the 30B in one process, of which 32 were copies with weights.
# Gathered are the head and the last layer, as the head goes backward: no gradient is there then.
PUBLISHED: dict[str, tuple[Any, ...]] = {
    "30B-A3B": (QWEN3_30B_A3B, "fsdp=64,ep=8", dict(parameters=1.908, gradients=0.0, moments=3.817), 0.661, 48.2, 633,
        {("efsdp=8", "all_gather"): (96, 14.50), ("efsdp=8", "reduce_scatter"): (48, 14.50)},
        {"layers.{i}": 3.675, "rows": 51.54}),
    "235B-A22B": (QWEN3_235B_A22B, "fsdp=32,tp=8,ep=64", dict(parameters=3.722, gradients=0.0, moments=7.444), 0.182,
        28.5, 1614, {("efsdp=4", "all_gather"): (188, 14.19), ("efsdp=4", "reduce_scatter"): (94, 14.19), ("tp=8",
        "all_reduce"): (1, 0.056)}, {"layers.{i}": 4.931, "rows": 25.23}),
}  # fmt: skip


@pytest.mark.parametrize("name", parts.every(2, PUBLISHED, 1))
def test_figures_of_published_models(tmp_path: Path, capsys: Capture, name: str) -> None:
    config, mesh, kept, gathered, activations, count, traffic, lines = PUBLISHED[name]
    result = as_json(capsys, directory(tmp_path / "m", config), "--mesh", mesh, "--device", "80GB")
    stored = {what: num_bytes / 1e9 for what, num_bytes in result["memory"][0]["bytes"].items()}
    want = {**kept, "gathered parameters": gathered}
    assert round(stored.pop("activations"), 1) == activations
    assert {what: round(gb, 3) for what, gb in stored.items()} == want
    total = result["memory"][0]["total_bytes"] / 1e9
    assert total == pytest.approx(sum(want.values()) + activations, abs=0.052)  # each of these is rounded
    assert result["fits"] is True
    assert result["total_count"] == count
    by = {(row["over"], row["op"]): row for row in result["traffic"]}
    for key, (many, gb) in traffic.items():
        row = by[key]
        assert row["count"] == many
        assert round(row["num_bytes"] / 1e9, len(str(gb).partition(".")[2])) == gb
    for line in result["charges"]:
        if line["what"] == "layers.{i}":
            assert round(line["num_bytes"] / 1e9, 3) == lines["layers.{i}"]
        if line["what"].endswith("rows"):
            assert round(line["num_bytes"] / 1e9, 2) == lines["rows"]


@pytest.mark.parametrize(
    ("config", "parameters"), parts.every(2, [(QWEN3_30B_A3B, 30_532_122_624), (QWEN3_NEXT, 79_674_391_296)], 1)
)
def test_published_numbers_of_parameters(config: dict[str, Any], parameters: int) -> None:
    figures = figures_of(config, fsdp=64, ep=8)
    assert figures.num_parameters == parameters
    flops = flops_of(figures.blueprint, figures.trained).per_token
    active = 6 * (parameters - _unused(config))
    assert 0.999 * active < flops < 1.2 * active, (
        "6 operations a parameter that a token meets, and those of delta rules"
    )


def _unused(config: dict[str, Any]) -> int:
    """Count the parameters that a token is not multiplied with: the embedding, and all but its own experts."""
    idle = config["num_experts"] - config["num_experts_per_tok"]
    experts = config["num_hidden_layers"] * idle * 3 * config["hidden_size"] * config["moe_intermediate_size"]
    return experts + config["vocab_size"] * config["hidden_size"]


ODD_MESHES = [
    dict(fsdp=3), dict(fsdp=5, tp=2), dict(fsdp=7, tp=2, ep=2), dict(tp=4), dict(replicate=3, fsdp=3, tp=2),
    dict(fsdp=6, tp=4, ep=8), dict(fsdp=4, tp=2, ep=8), dict(fsdp=12, tp=1, ep=4), dict(fsdp=40, tp=4, ep=8),
    dict(fsdp=3, tp=4, ep=4), dict(replicate=2, fsdp=11, tp=4, ep=2), dict(fsdp=150, ep=2),
    dict(pp=2, replicate=2, fsdp=2, cp=2, tp=2), dict(pp=2, fsdp=3, tp=2, ep=2), dict(),
]  # fmt: skip


@pytest.mark.parametrize("name", parts.every(4, ["qwen3_moe", "qwen3_5_moe", "qwen3_tied", "qwen2"]))
def test_least_and_most_are_those_of_all_ranks(name: str) -> None:
    """The vocabulary of 131 leaves every tp with a shorter last slice, and shards of nothing where fsdp is large."""
    for vocab in (131, 10):  # of 10 rows tp=4 makes 3, 3, 3, 1: shards over fsdp=4 of 3 and of 1 end the same
        for mesh in parts.every(4, ODD_MESHES, vocab == 10):
            figures = figures_of(tiny.of(name, vocab_size=vocab), **mesh)
            axes, spec = figures.axes, figures.blueprint.spec
            every = [sum(s.num_bytes for s in figures.need.stored(rank)) for rank in range(axes.world)]
            assert figures.most.num_bytes == max(every), mesh
            assert figures.memories[-1].num_bytes == min(every), mesh
            assert len(figures.memories) == (1 if min(every) == max(every) else 2)
            assert figures.memories[-1].num_bytes == every[figures.memories[-1].rank]
            for line, (param, *_) in zip(parameter_lines(figures), identical_params(figures.blueprint), strict=True):
                ranks = _ranks_with(param, figures)
                held = [4 * piece(param, spec.rules, axes, axes.coords(rank)).numel for rank in ranks]
                assert (line.least_bytes, line.most_bytes) == (min(held), max(held)), (mesh, line.name)


def _ranks_with(param: Param, figures: Figures) -> list[int]:
    axes, places = figures.axes, figures.blueprint.spec.places(param, figures.axes)
    return [rank for rank in range(axes.world) if axes.coords(rank)["pp"] in places]


def test_no_rank_pays_more_than_the_first() -> None:
    for mesh in parts.every(
        4, (mesh for mesh in ODD_MESHES if "pp" not in mesh), 1
    ):  # pipelines: test_plan_pipeline.py
        figures = figures_of(tiny.of("qwen3_5_moe"), **mesh)
        bills = [engine_bill(figures.blueprint, figures.axes, r, figures.work) for r in range(figures.axes.world)]
        for charges in zip(*bills, strict=True):
            assert max(c.num_bytes for c in charges) == charges[0].num_bytes, mesh


def test_large_meshes_take_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing walks over all ranks, of which there are 16,384, for each of a thousand parameters."""
    requested, coords = list[int](), Axes.coords
    monkeypatch.setattr(Axes, "coords", lambda axes, rank: (requested.append(rank), coords(axes, rank))[1])
    began = time.process_time()  # others may use the machine
    figures = figures_of(QWEN3_235B_A22B, 80 * 10**9, fsdp=2048, tp=8, ep=64)
    origin = {"command": "", "meshwright": "", "torch": "", "date": ""}
    assert len(plan_page(figures, origin)) < 150_000
    assert figures.fits
    assert time.process_time() - began < 10
    assert len(requested) < 2_000


def test_groups_of_a_large_mesh_take_no_time() -> None:
    began = time.process_time()
    groups = Axes(fsdp=2048, tp=8, ep=64).groups(("ep",))
    assert time.process_time() - began < 1
    assert len(groups) == 256
    assert groups[3] == tuple(range(192, 256))


def test_what_does_not_fit_has_a_way_out(tmp_path: Path, capsys: Capture) -> None:
    at = directory(tmp_path / "m", QWEN3_30B_A3B)
    short = ["--tokens", "64"]
    code, out, _ = planned(capsys, at, "--mesh", "fsdp=2,ep=2", "--device", "H100", *short)
    assert code == 1
    message = " ".join(out.split())
    assert re.search(
        words("does not fit 80 GB", r"\d GB too much", r"fsdp=8\b.*\b8 ranks", r"MemoryOptions\(offload=True\)"),
        message,
    )
    figures = figures_of(QWEN3_30B_A3B, 80 * 10**9, 64, fsdp=8, ep=2)
    assert figures.fits, "the way out is one"
    assert not replace(figures, axes=Axes(fsdp=4, ep=2)).fits, "and the smallest"
    assert "fits" not in planned(capsys, "tiny-qwen3")[1].replace("whether that fits", "")


@pytest.mark.parametrize(
    ("mesh", "count", "gb"),
    [
        ({}, 0, 0.0),
        (dict(fsdp=8), 2, 2 * 0.688),  # torch's own, and that of shards, loss and norm
        (dict(replicate=2, fsdp=2), 4, 2 * 0.688 + 2 * 0.544),
        (dict(fsdp=2, tp=2), 4, 2 * 0.688 + 2 * 0.544 + 0.469),  # the head exchanges statistics over tp
        (dict(pp=2, fsdp=2), 3, 0.688 + 2 * 0.544),
        (dict(pp=4, fsdp=2), 4, 0.688 + 3 * 0.544),  # a stage has two neighbours at most
        (dict(fsdp=8, ep=4), 4, 2 * 0.688 + 0.544 + 0.688 + 3 * 0.469),
    ],
    ids=str,
)
def test_communicators_come_on_top(mesh: dict[str, int], count: int, gb: float) -> None:
    """By hand: 0.688 GB a group, 0.544 of two ranks; 0.469 more for each rank that takes part in an all-to-all."""
    nccl = communicators(figures_of(tiny.of("qwen3_moe", num_hidden_layers=4), **mesh))
    assert (nccl.count, nccl.num_bytes / 1e9) == (count, pytest.approx(gb, abs=2e-3))


def test_recomputation_is_a_way_out() -> None:
    figures = figures_of({**QWEN3_30B_A3B, "num_hidden_layers": 12}, 24 * 10**9, 16384, fsdp=16, ep=8)
    assert figures.fits is False
    assert 'MemoryOptions(recompute="full")' in " ".join(figures.choices)
    assert replace(figures, blueprint=figures.blueprint.with_options(memory=MemoryOptions("full"))).fits


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("80GB", 80 * 10**9), ("80gb", 80 * 10**9), ("80 GB", 80 * 10**9), ("74.5GiB", int(74.5 * 2**30)),
     ("H100", 80 * 10**9), ("h200", 141 * 10**9), ("A100-40GB", 40 * 10**9), ("100kB", 10**5), ("3MiB", 3 * 2**20)],
)  # fmt: skip
def test_devices(text: str, num_bytes: int) -> None:
    assert device_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["80", "80gb ", "GB", "0GB", "-1GB", "A100", "80GB80GB", "nanGB", ""])
def test_devices_that_are_not_known(text: str) -> None:
    with pytest.raises(ConfigError, match=words("--device", "80GB", "H100", "A100-80GB")):
        device_bytes(text)


REFUSED = [
    (["tiny-qwen3-moe", "--mesh", "pp=4,cp=3,fsdp=5,tp=3,ep=7"], [r"3 layers\b.*\b4 pipeline stages\b.*\bfrom 1 to 3$",
        r"ep=7\b.*\bfsdp\*cp\*tp=45\b.*\b1, 3, 5, 9, 15, 45", r"tp=3\b.*\bffn=44\b.*\btp from 1, 2, 4$",
        r"ep=7\b.*\bexpert=8\b.*\bep from 1, 2, 4, 8$"]),
    (["tiny-qwen3", "--mesh", "tp=0,fsdp=0"], ["tp=0", "fsdp=0"]),
    (["tiny-qwen3", "--mesh", "tp=2", "--tokens", "8191"], [r"--tokens 8191\b.*\bcp\*tp=2\b.*\b8192$"]),
    (["tiny-qwen3", "--device", "large"], ["--device 'large'"]),
    (["tiny-qwen3", "--device", "80"], ["--device '80' without a unit; did you mean 80GB"]),
    (["tiny-qwen3", "--mesh", "dp=2"], ["'dp=2' is not AXIS=N with AXIS of pp, replicate, fsdp, cp, tp, ep$"]),
    (["no/c44.json"], ["no/c44.json does not exist"]),
    (["no/config.json"], ["no/config.json does not exist"]),
    (["no/such/place"], [r"no/such/place\b.*\btiny-qwen2"]),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "patterns"), REFUSED, ids=[" ".join(a) for a, _ in REFUSED])
def test_all_errors_are_reported_at_once(capsys: Capture, arguments: list[str], patterns: list[str]) -> None:
    code, out, err = planned(capsys, *arguments)
    assert (code, out) == (2, "")
    for pattern in patterns:
        assert re.search(pattern, err, re.MULTILINE), err


def test_the_choices_work() -> None:
    """ffn=45 would let tp=3 pass, and not tp=2: a choice is offered only if no other dim refuses it."""
    blueprint = Blueprint.of(tiny.of("qwen3", intermediate_size=45))
    (message,) = objections(blueprint, dict(tp=2))
    assert re.search(r"ffn=45\b.*choose tp from 1$", message), message
    (message,) = objections(blueprint, dict(tp=3))
    assert re.search(r"heads=4\b.*choose tp from 1$", message), message
    assert objections(blueprint, dict(tp=1, fsdp=7)) == []


def test_refusals_for_a_program(capsys: Capture) -> None:
    code, out, _ = planned(capsys, "tiny-qwen3", "--mesh", "tp=3,ep=5", "--json")
    assert code == 2
    result = json.loads(out)
    assert (len(result["refused"]), result["model"], result["mesh"]) == (2, "tiny-qwen3", {"tp": 3, "ep": 5})


@pytest.mark.parametrize("command", ["plan", "verify"])
def test_a_path_to_config_json(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    source = tiny.directory(tmp_path / "q3", "qwen3")
    monkeypatch.chdir(tmp_path)
    assert main([command, "q3/config.json", "--json", *(["--weights"] if command == "verify" else [])]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == "q3/config.json"
    (source / "model.safetensors").unlink()
    monkeypatch.chdir(source)
    assert main(["plan", "config.json"]) == 0
    assert "config.json on one process" in capsys.readouterr().out


def test_a_config_under_another_name(tmp_path: Path, capsys: Capture) -> None:
    at = tmp_path / "c44.json"
    at.write_text(json.dumps(tiny.of("qwen3")))
    assert as_json(capsys, str(at))["model"] == str(at)


def test_what_a_file_of_json_may_not_be(tmp_path: Path, capsys: Capture) -> None:
    at = tmp_path / "tokenizer.json"
    at.write_text(json.dumps({"version": "1.0", "model": {}}))
    code, _, err = planned(capsys, str(at))
    assert code == 2
    assert re.search(words(r"tokenizer\.json is not the config of a model", "model_type=None"), err), err
    at.write_text(json.dumps(tiny.of("qwen3")))
    assert main(["verify", str(at), "--weights"]) == 2
    assert re.search(words(r"tokenizer\.json is a config without weights", "a directory"), capsys.readouterr().err)


def flushed(arguments: list[str]) -> int:
    code = main(arguments)
    sys.stdout.flush()  # as Python does at its end
    return code


def test_a_reader_that_stops_early() -> None:
    """`| head` does this. The exit code stays that of the result."""
    (reader, out), (read, errors) = os.pipe(), os.pipe()
    os.close(reader)
    pid = os.fork()
    if pid == 0:
        become(flushed, ["plan", "tiny-qwen3", "--device", "1kB", "--json"], out, errors)
    os.close(out)
    os.close(errors)
    with os.fdopen(read) as stream:
        assert stream.read() == ""
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


def test_headers_are_checked_where_they_are(tmp_path: Path, capsys: Capture) -> None:
    source = tiny.directory(tmp_path / "m", "qwen3")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    code, _, err = planned(capsys, str(source), "--mesh", "fsdp=2")
    assert code == 2
    assert "layers.2" in err


def test_json_is_exact_and_says_what_made_it(capsys: Capture) -> None:
    result = as_json(capsys, "tiny-qwen3-moe", "--mesh", "fsdp=3,tp=2,ep=2", "--micro-batches", "2", "--head", "value")
    assert result["command"] == (
        "meshwright plan tiny-qwen3-moe --mesh fsdp=3,tp=2,ep=2 --micro-batches 2 --head value --json"
    )
    assert result["meshwright"] == __version__
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", result["date"])
    assert "torch" in result
    assert result["step"] == {
        "tokens": 8192,
        "num_batches": 2,
        "compute_bytes": 2,
        "stored_bytes": 4,
        "images": [],
        "frozen": [],
        "numbers": [],
    }
    assert result["num_parameters"] == sum(line["num_parameters"] for line in result["parameters"])
    assert "head.weight" in {line["name"] for line in result["parameters"]}
    assert result["total_bytes"] == sum(line["num_bytes"] for line in result["charges"])
    assert result["total_count"] == sum(line["count"] for line in result["charges"])
    assert result["memory"][0]["total_bytes"] == sum(result["memory"][0]["bytes"].values())
    assert {line["axis"] for line in result["groups"]} == {"fsdp", "tp", "efsdp", "ep"}


def test_more_tokens_and_batches_send_more(capsys: Capture) -> None:
    one, more, twice = (
        as_json(capsys, "tiny-qwen3-moe", "--mesh", "fsdp=2,ep=2", *options)
        for options in ([], ["--tokens", "16384"], ["--micro-batches", "2"])
    )
    rows = [next(c for c in result["charges"] if c["what"].endswith("rows")) for result in (one, more, twice)]
    assert rows[1]["one_bytes"] == 2 * rows[0]["one_bytes"]
    assert rows[2]["count"] == 2 * rows[0]["count"]


@pytest.mark.parametrize("columns", parts.every(2, [80, 120]))
def test_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: Capture, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, _ = planned(
        capsys, "tiny-qwen3.5-moe", "--mesh", "replicate=2,fsdp=3,tp=2,ep=2", "--device", "A100-40GB"
    )
    assert code == 0
    assert max(map(len, out.splitlines())) <= columns
    assert not re.search(r"\d{6,} bytes", out), "a person reads kB"
    assert re.search(words(r"3\.108 kB\s", r"to 3\.256 kB\s", r"to 352 bytes\s", r"on a rank\s"), out), out
    wanted = [
        "12 ranks",
        r"layers\.{i}\.mlp\.experts\.gate_up",
        "moments of AdamW",
        "all_to_all",
        "fits 40 GB",
        r"cut expert by ep=2",
    ]
    assert re.search(words(*wanted), out), out


def test_what_changes_nothing_is_noted(capsys: Capture) -> None:
    out = planned(capsys, "tiny-qwen3", "--mesh", "fsdp=2,ep=2")[1]
    assert "ep=2 changes nothing" in " ".join(out.split())
    assert "efsdp" not in out
    assert "changes nothing" not in planned(capsys, "tiny-qwen3-moe", "--mesh", "fsdp=2,ep=2")[1]


def test_another_way_of_cp(capsys: Capture) -> None:
    def moved(*context: str) -> set[str]:
        result = json.loads(planned(capsys, "tiny-qwen3", "--mesh", "cp=2", *context, "--json")[1])
        return {row["op"] for row in result["traffic"] if row["over"] == "cp=2"}

    assert "all_to_all" in moved()
    assert "all_to_all" not in moved("--context", "attention=1")
    assert "attention: gather 2" in planned(capsys, "tiny-qwen3", "--mesh", "cp=2", "--context", "attention=1")[1]


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 bytes"), (1, "1 byte"), (999, "999 bytes"), (1_000, "1.000 kB"), (1_908_257_664, "1.908 GB"),
     (10_895_691_264, "10.90 GB"), (387_000_000, "387.0 MB"), (999_999_999, "1.000 GB"), (5 * 10**15, "5,000 TB")],
)  # fmt: skip
def test_sizes(number: int, text: str) -> None:
    assert size(number) == text


@pytest.mark.parametrize(
    ("mesh", "small"),
    [(dict(fsdp=64, ep=64), dict(fsdp=2, ep=2)), (dict(replicate=4096), dict(replicate=2)),
     (dict(fsdp=6, tp=2, ep=3), dict(fsdp=3, tp=2, ep=3)), (dict(fsdp=128, tp=7), dict(fsdp=2, tp=7)),
     (dict(fsdp=2, tp=3, ep=3), dict(fsdp=2, tp=3, ep=3)),
     (dict(fsdp=999_999_937), dict(fsdp=999_999_937))],
)  # fmt: skip
def test_the_smallest_mesh_of_the_same_kind(mesh: dict[str, int], small: dict[str, int]) -> None:
    assert smaller(Axes(**mesh)) == Axes(**small)


def test_verify_of_a_mesh_too_large_for_this_machine(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It says so before it reads anything, and offers what this machine can run."""
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    monkeypatch.setattr("meshwright.verify.session.find", lambda *_, **__: pytest.fail("it began to work"))
    assert main(["verify", "org/huge", "--mesh", f"fsdp={4 * RANKS_A_CORE},tp=2,ep=64"]) == 2
    err = capsys.readouterr().err
    assert re.search(
        words(r"128 processes for 1 core\b", "meshwright plan org/huge --mesh fsdp=64,tp=2,ep=64 "), err
    ), err
    assert "meshwright verify org/huge --mesh fsdp=2,tp=2,ep=2 " in err


def test_verify_of_a_mesh_too_large_for_the_memory(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    few: Callable[..., Any] = lambda *_, **__: type("Memory", (), {"host_bytes": 10**9})  # noqa: E731
    monkeypatch.setattr("meshwright.plan.mesh_checks.memory_of", few)
    assert main(["verify", "tiny-qwen3", "--mesh", "fsdp=16,tp=2"]) == 2
    err = capsys.readouterr().err
    assert re.search(words("32 processes", "1.0 GB", "meshwright plan tiny-qwen3 --mesh fsdp=16,tp=2 "), err), err
    assert "meshwright verify tiny-qwen3 --mesh fsdp=2,tp=2 " in err
