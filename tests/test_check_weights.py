"""`mw.check_weights`: what every rank holds is what the files hold; what is not, is named by every rank."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

import meshwright as mw
from meshwright.cli import main
from meshwright.engine import model as engine_model
from meshwright.models import describe
from meshwright.verify import Recorder
from meshwright.weights import chosen
from tests import parts, tiny, trials, worlds
from tests.words import words

BF16, F32 = torch.bfloat16, torch.float32
Harm = Callable[[mw.Model], None]


def nothing(model: mw.Model) -> None:
    pass


def flipped_bit(model: mw.Model) -> None:
    if model.mesh.rank == 1:
        stored = model.stored()["layers.1.mixer.o.weight"]
        stored.view(torch.int32)[3, 5] ^= 1  # less than the source's bfloat16 can say


def swapped_rows(model: mw.Model) -> None:
    if model.mesh.rank == 0:
        stored = model.stored()["layers.0.mixer.qkv.weight"]
        stored[[0, 4]] = stored[[4, 0]]


def swapped_experts(model: mw.Model) -> None:
    if model.mesh.rank == 0:
        stored = model.stored()["layers.0.mlp.experts.down"].view(-1, 36, 20)
        stored[[0, 2]] = stored[[2, 0]]


def overwritten_expert(model: mw.Model) -> None:
    if model.mesh.rank == 1:
        stored = model.stored()["layers.2.mlp.experts.gate_up"].view(-1, 2, 20, 36)
        stored[3] = stored[0]


def trained(model: mw.Model) -> None:
    mw.Engine(model, lr=0.1).step(tiny.batches(model.mesh.data_rank))


class Case(NamedTuple):
    """A model that is loaded, harmed, and checked, in whole and in the part `only`."""

    name: str
    mesh: dict[str, int]
    harm: Harm = nothing
    layout: str | None = None
    dtype: torch.dtype = BF16
    only: Any = "**"
    options: dict[str, Any] = {}  # of loading  # noqa: RUF012 - only read


FSDP, TP, EP = dict(fsdp=2), dict(tp=2), dict(fsdp=2, ep=2)
OF_MIXERS = dict(train="layers.*.mixer.*", dtype=F32)
ALL_LOADED = {
    "qwen3_tied": Case("qwen3_tied", FSDP, layout="twice"),
    "qwen2": Case("qwen2", dict(fsdp=2, tp=2)),
    "qwen3_moe, fused": Case("qwen3_moe", TP, layout="fused", dtype=F32),
    "qwen3": Case("qwen3", dict(tp=4), dtype=F32),
    "qwen3_5_moe": Case("qwen3_5_moe", dict(replicate=2, tp=2, ep=2), layout="fused"),
    "qwen3_moe": Case("qwen3_moe", dict(tp=2, ep=2), layout="per-expert"),
    "qwen3_5": Case("qwen3_5", FSDP),
}
LOADED = dict(parts.every(2, ALL_LOADED.items()))
CASES = {
    "a flipped bit": Case("qwen3", TP, flipped_bit),
    "swapped rows": Case("qwen3_5", FSDP, swapped_rows),
    "swapped experts": Case("qwen3_moe", EP, swapped_experts),
    "an overwritten expert": Case("qwen3_moe", EP, overwritten_expert),
    "trained": Case("qwen3", FSDP, trained, only=["embed.*", "layers.*.mlp*", "head.*"], options=OF_MIXERS),
    "a new head": Case("qwen3", FSDP, options=dict(head="value")),
    **LOADED,
}
Checks = Callable[[str], tuple[mw.WeightCheck, ...]]  # of the whole model and of a part, by the name of a case


def checked(source: Path, case: Case) -> tuple[mw.WeightCheck, ...]:
    model = mw.load(source, trials.mesh_of(case.mesh), **case.options)
    case.harm(model)
    return tuple(mw.check_weights(model, only) for only in ("**", case.only))


@pytest.fixture(scope="module")
def checks(tmp_path_factory: pytest.TempPathFactory) -> Checks:
    at = tmp_path_factory.mktemp("checks")

    @functools.cache
    def written(name: str, layout: str | None, dtype: torch.dtype) -> Path:
        return tiny.directory(at / f"{name} {layout} {dtype}", name, dtype=dtype, layout=layout)

    def run(group: Sequence[str]) -> dict[str, tuple[mw.WeightCheck, ...]]:
        cases = {name: CASES[name] for name in group}
        acts = {name: functools.partial(checked, written(c.name, c.layout, c.dtype), c) for name, c in cases.items()}
        return {
            name: _equal(ranks) for name, ranks in worlds.in_turn(trials.world_of(cases[group[0]].mesh), acts).items()
        }

    return worlds.shared({name: case.mesh for name, case in CASES.items()}, run)


def _equal(ranks: list[tuple[mw.WeightCheck, ...]]) -> tuple[mw.WeightCheck, ...]:
    assert all(each == ranks[0] for each in ranks), "the ranks agree"
    return ranks[0]


@pytest.mark.parametrize("name", LOADED)
def test_what_was_just_loaded(checks: Checks, name: str) -> None:
    result, _ = checks(name)
    assert result.ok, result.differences
    assert result.num_elements > 10_000
    assert result.skipped == ()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    at = tmp_path_factory.mktemp("checked")
    return functools.cache(lambda name: tiny.directory(at / name, name, dtype=BF16))


def test_a_flipped_bit_of_one_rank(checks: Checks) -> None:
    result, _ = checks("a flipped bit")
    (one,) = result.differences
    assert (one.name, one.key) == ("layers.1.mixer.o.weight", "model.layers.1.self_attn.o_proj.weight")
    assert (one.rank, one.num_wrong, one.num_elements) == (1, 1, 36 * 20)
    assert one.box == "[0:36, 2:4, 0:10]"  # the heads of rank 1
    assert not one.misplaced
    assert not result.ok
    assert one.checksums[0] != one.checksums[1]


def test_swapped_rows(checks: Checks) -> None:
    result, _ = checks("swapped rows")
    assert {(d.name, d.rank, d.misplaced) for d in result.differences} == {("layers.0.mixer.qkv.weight", 0, True)}
    assert all(re.search(words("right values", "wrong places"), str(d)) for d in result.differences)
    assert sum(d.num_wrong for d in result.differences) == 2 * 36


def test_experts_that_changed_places(checks: Checks) -> None:
    result, _ = checks("swapped experts")
    keys = [d.key for d in result.differences]
    assert keys == [f"model.layers.0.mlp.experts.{e}.down_proj.weight" for e in (0, 2)]
    assert all(d.misplaced for d in result.differences)


def test_an_overwritten_expert(checks: Checks) -> None:
    result, _ = checks("an overwritten expert")
    keys = [d.key for d in result.differences]
    assert keys == [f"model.layers.2.mlp.experts.7.{p}_proj.weight" for p in ("gate", "up")]
    assert all(d.rank == 1 and not d.misplaced for d in result.differences)


def other_sign(source: Path) -> mw.WeightCheck:
    model = mw.load(source, mw.Mesh(device="cpu"))
    model.stored()["head.norm.weight"].neg_()
    return mw.check_weights(model)


def test_bits_and_not_values(tmp_path: Path) -> None:
    """-0 is not 0, though they are equal."""
    source = tiny.directory(tmp_path / "m", "qwen3")
    tensors = load_file(source / "model.safetensors")
    save_file({**tensors, "model.norm.weight": torch.zeros(36)}, source / "model.safetensors")
    (result,) = worlds.run(1, other_sign, source)
    assert [(d.name, d.num_wrong) for d in result.differences] == [("head.norm.weight", 36)]


def test_the_frozen_part_of_what_is_trained(checks: Checks) -> None:
    whole, frozen = checks("trained")
    assert frozen.ok
    moved = {d.name for d in whole.differences}
    assert moved == {
        f"layers.{i}.mixer.{p}"
        for i in (0, 1)
        for p in (*(f"{x}.weight" for x in "qkvo"), "q_norm.weight", "k_norm.weight")
    }


def test_a_new_head_is_skipped_with_a_note(checks: Checks) -> None:
    result, _ = checks("a new head")
    assert result.ok
    assert result.skipped == ("head.weight",)


def unreadable(source: Path) -> str:
    model = mw.load(source, mw.Mesh(fsdp=2))
    torch.distributed.barrier()
    if model.mesh.rank == 0:
        (source / "model.safetensors").write_bytes(b"nothing")
    torch.distributed.barrier()
    with pytest.raises(mw.LoadError, match=words(r"\brank 0\b", r"model\.safetensors", r"\bread\b")) as caught:
        mw.check_weights(model)
    return str(caught.value)


def test_a_file_that_is_gone_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    source = tiny.directory(tmp_path / "m", "qwen3")
    first, second = worlds.run(2, unreadable, source)
    assert first == second


def bad_calls(source: Path) -> None:
    with pytest.raises(mw.StateError, match=words(r"mw\.init", r"\bfiles\b")):
        mw.check_weights(mw.init(source))
    with pytest.raises(mw.ConfigError, match=words(r"only='layer\.\*'", r"embed\.weight")):
        mw.check_weights(mw.load(source), "layer.*")


def test_bad_calls(source: Callable[[str], Path]) -> None:
    worlds.run(1, bad_calls, source("qwen3"))


def test_no_weights_are_sent(source: Callable[[str], Path]) -> None:
    def num_sent() -> int:
        model = mw.load(source("qwen3_moe"), mw.Mesh(fsdp=2))
        with Recorder() as recorder:
            mw.check_weights(model)
        return sum(seen.num_bytes for seen in recorder.collectives)

    assert max(worlds.run(2, num_sent)) < 4096


def peak_bytes(source: Path) -> tuple[int, int]:
    """Return the most memory that the check adds to the process."""
    model = mw.load(source, mw.Mesh())
    torch.ones(1).sum()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak

    def status(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

    before = status("VmRSS")
    assert mw.check_weights(model).ok
    return status("VmHWM") - before, model.bytes_read


def test_memory_is_bounded(tmp_path: Path) -> None:
    """Fused tensors have 134 and 67 MB; only a part is in memory at any time."""
    config = tiny.of(
        "qwen3_moe", num_hidden_layers=1, mlp_only_layers=[], hidden_size=512, moe_intermediate_size=1024,
        num_experts=64,
    )  # fmt: skip
    _, table = describe(config, "model.")
    shapes = {key: shape for param in table for key, shape in chosen(param, {"experts": "fused"}).keys.items()}
    save_file({k: torch.full(s, 0.5, dtype=BF16) for k, s in shapes.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    ((added, read),) = worlds.run(1, peak_bytes, tmp_path)
    assert read > 200e6
    assert added < 110e6, f"{added / 1e6:.0f} MB"


def verified(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    code = main(["verify", *arguments, "--weights", "--json"])
    return code, json.loads(capsys.readouterr().out)["runs"][0]


def test_the_command(source: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    code, run = verified(capsys, str(source("qwen3_moe")), "--mesh", "fsdp=2,ep=2", "--head", "value")
    assert code == 0
    assert list(run["oracles"]) == ["RUN", "L1", "W1"]
    assert re.search(words(r"head\.weight", r"\bfiles\b"), run["notes"][1]), run["notes"]


def test_the_command_finds_a_load_that_speaks(
    source: Callable[[str], Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = engine_model.fill

    def speaks(stored_model: Any, *arguments: Any) -> int:
        torch.distributed.broadcast(torch.zeros(1), 0)
        return real(stored_model, *arguments)

    monkeypatch.setattr(engine_model, "fill", speaks)
    code, run = verified(capsys, str(source("qwen3")), "--mesh", "fsdp=2")
    assert code == 1
    assert re.search(words("load", "broadcast"), run["oracles"]["L1"][0]["what"])


REFUSED = [
    (["tiny-qwen3", "--weights"], words("tiny-qwen3", "weights")),
    (["{source}", "--weights", "--mesh", "tp=3"], words("tp=3", r"\bheads=4\b")),
    (["{empty}", "--weights"], words("no .*safetensors")),
]


@pytest.mark.parametrize(("arguments", "pattern"), REFUSED, ids=["tiny", "mesh", "empty"])
def test_refused_at_once(
    source: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    pattern: str,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny.ODD["qwen3"]))
    named = [a.format(source=source("qwen3"), empty=tmp_path) for a in arguments]
    assert main(["verify", *named]) == 2
    assert re.search(pattern, capsys.readouterr().err)


def test_more_weights_than_memory(
    source: Callable[[str], Path], capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setattr("os.sysconf", lambda name: 100)
    assert main(["verify", str(source("qwen3")), "--mesh", "replicate=2", "--weights"]) == 2
    wanted = words("float32", r"\b0\.0 GB\b", r"\branks\b", r"\bfsdp\b")
    assert re.search(wanted, capsys.readouterr().err)
