"""`meshwright plan` with savings: its bytes and collectives are those of a model that is loaded with the same ones."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.axes import Axes
from meshwright.blueprint import Blueprint
from meshwright.cli import main
from meshwright.engine.step_bill import step_bill
from meshwright.plan import Figures, fit_advice, work_of
from meshwright.recipe import MemoryOptions, Pipeline
from meshwright.sharding import Charge, Stored
from tests import parts, tiny, worlds

TOKENS, NUM_BATCHES = 64, 2
Capture = pytest.CaptureFixture[str]
CASES: dict[str, tuple[MemoryOptions, torch.dtype | None]] = {
    "recompute selective": (MemoryOptions(recompute="selective"), None),
    "recompute full": (MemoryOptions(recompute="full"), None),
    "offload": (MemoryOptions(offload=True), None),
    "gather once": (MemoryOptions(gather_once=True), None),
    "sum once": (MemoryOptions(sum_once=True), None),
    "both once, all again": (MemoryOptions("full", gather_once=True, sum_once=True), torch.bfloat16),
    "sent narrow": (MemoryOptions(narrow_grads=True), None),
    "tokens once": (MemoryOptions("full", token_once=True), None),
    "moments in 8 bits": (MemoryOptions(), torch.uint8),
    "moments in bfloat16, on the host": (MemoryOptions(offload=True), torch.bfloat16),
}
MESHES = {"fsdp=2,tp=2,ep=2": {"fsdp": 2, "tp": 2, "ep": 2}, "pp=2,cp=2": {"pp": 2, "cp": 2}}


def _real(source: Path, mesh: dict[str, int], args: list[Any]) -> list[tuple[list[Stored], list[Charge]]]:
    """Return the storage and the bill of this rank for each option."""
    result = []
    for memory, state in args:
        held = mw.Mesh(**mesh, device="cpu")
        model = mw.load(source, held, memory=memory, pipeline=Pipeline(hold=False if held.axes.pp > 1 else None))
        bill = step_bill(model, TOKENS, NUM_BATCHES, "previous" if held.axes.pp > 1 else "pooled")
        result.append((model.need(mw.AdamW(state_dtype=state)).stored(held.rank), bill))
    return result


# Every third of four: each family on a mesh, and each mesh with a family.
@pytest.mark.parametrize(("name", "sizes"), parts.every(6, product(["qwen3_moe", "qwen3_5_moe"], MESHES)))
def test_a_plan_says_what_a_model_needs(tmp_path: Path, name: str, sizes: str) -> None:
    """Each rank takes options in turn: none leaves anything behind for the next."""
    cases = parts.every(3, CASES.values(), [*MESHES].index(sizes))
    mesh, wide = MESHES[sizes], dict(hidden_size=256, moe_intermediate_size=512)  # matrices with blocks for 8 bits
    source = tiny.directory(tmp_path / "m", name, dtype=torch.bfloat16, **wide)
    ranks = worlds.run(4, _real, source, mesh, cases)
    axes = Axes(**mesh)
    blueprint = Blueprint.of(tiny.of(name, **wide)).with_options(pipeline=Pipeline(hold=False if axes.pp > 1 else None))
    work = work_of(axes, TOKENS, NUM_BATCHES)
    for number, (memory, state) in enumerate(cases):
        figures = Figures(
            "it", blueprint.with_options(memory=memory), axes, work, optimizer=mw.AdamW(state_dtype=state)
        )
        for rank, real in enumerate(ranks):
            stored, charges = real[number]
            assert replace(figures.need, passing=None).stored(rank) == stored, (rank, memory, state)
            assert figures.bill(rank) == charges, (rank, memory)


def planned(capsys: Capture, *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["plan", "tiny-qwen3-moe", "--mesh", "fsdp=2,ep=2", "--micro-batches", "4", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_each_option_does_what_its_field_does(capsys: Capture) -> None:
    _, usual = planned(capsys)
    assert usual["savings"] == {
        "recompute": "none", "reshard": True, "offload": False, "compiled": None, "gather_once": False,
        "sum_once": False, "narrow_grads": False, "token_once": False,
    }  # fmt: skip
    assert usual["state_dtype"] is None

    def counts(result: dict[str, Any], op: str) -> int:
        return sum(row["count"] for row in result["traffic"] if row["op"] == op)

    _, full = planned(capsys, "--recompute", "full")
    assert counts(full, "all_to_all") > counts(usual, "all_to_all"), "experts send their rows again"
    _, gathered = planned(capsys, "--gather-once")
    assert counts(gathered, "all_gather") < counts(usual, "all_gather")
    _, summed = planned(capsys, "--sum-once")
    assert counts(summed, "reduce_scatter") < counts(usual, "reduce_scatter")
    assert "whole gradients of the stages" in summed["memory"][0]["bytes"]
    code, moved = planned(capsys, "--offload", "--state-dtype", "bfloat16", "--device", "1GB")
    assert (code, moved["fits"], moved["state_dtype"]) == (0, True, "bfloat16")
    kept = moved["memory"][0]["bytes"]
    assert kept["moments on the host"] * 2 == usual["memory"][0]["bytes"]["moments"]
    assert moved["memory"][0]["host_bytes"] == sum(num for what, num in kept.items() if what.endswith("on the host"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--offload", "--gather-once"], r"offload=True\b.*\bgather_once=True\b.*choose one"),
        (["--state-dtype", "uint8", "--mesh", "tp=2"], r"8-bit\b.*\btp=2\b.*choose tp from 1\b.*bfloat16"),
    ],
)
def test_what_a_run_refuses_is_refused(tmp_path: Path, capsys: Capture, options: list[str], message: str) -> None:
    at = tmp_path / "a.json"
    at.write_text(json.dumps(tiny.of("qwen3", hidden_size=256, intermediate_size=384)))
    assert main(["plan", str(at), *options]) == 2
    err = capsys.readouterr().err
    assert re.search(message, " ".join(err.split())), err


@pytest.mark.parametrize(("wide", "options"), [(512, ["bfloat16", "uint8"]), (264, ["bfloat16"])])
def test_a_plan_suggests_no_state_that_its_mesh_cuts(wide: int, options: list[str]) -> None:
    """Blocks of 8-bit state are 256 elements of a row, and tp=2 would cut them."""
    config, axes = tiny.of("qwen3", hidden_size=512, intermediate_size=2 * wide), Axes(tp=2)
    figures = Figures("a model", Blueprint.of(config), axes, work_of(axes, TOKENS, 1), 10**6)
    suggested = [option for option, _ in fit_advice._narrower_state(figures)]
    assert suggested == [f"--state-dtype {each}" for each in options]
