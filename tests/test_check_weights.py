"""`mw.check_weights`: what every rank holds is what the files hold; what is not, is named by every rank."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import meshwright as mw
from meshwright.cli import main
from meshwright.engine import model as engine_model
from meshwright.errors import RankError
from meshwright.models import describe
from meshwright.verify import Recorder
from meshwright.weights import chosen
from meshwright.weights import reader as loading
from tests import tiny, worlds
from tests.words import words

Harm = Callable[[mw.Model], None]


def checked(source: Path, mesh: dict[str, int], harm: Harm, only: Any = "**", **options: Any) -> mw.WeightCheck:
    model = mw.load(source, mw.Mesh(**mesh, device="cpu"), **options)
    harm(model)
    return mw.check_weights(model, only)


def nothing(model: mw.Model) -> None:
    pass


def check(source: Path, harm: Harm = nothing, only: Any = "**", options: Any = None, **mesh: int) -> mw.WeightCheck:
    size = mesh.get("replicate", 1) * mesh.get("fsdp", 1) * mesh.get("tp", 1)
    result = worlds.run(size, lambda: checked(source, mesh, harm, only, **(options or {})))
    assert all(each == result[0] for each in result), "the ranks agree"
    return result[0]


BF16, F32 = torch.bfloat16, torch.float32
LOADED: list[tuple[str, str | None, torch.dtype, dict[str, int]]] = [
    ("qwen2", None, BF16, dict(fsdp=2, tp=2)),
    ("qwen3", None, F32, dict(tp=4)),
    ("qwen3_tied", "twice", BF16, dict(fsdp=2)),
    ("qwen3_moe", "per-expert", BF16, dict(tp=2, ep=2)),
    ("qwen3_moe", "fused", F32, dict(tp=2)),
    ("qwen3_5", None, BF16, dict(fsdp=2)),
    ("qwen3_5_moe", "fused", BF16, dict(replicate=2, tp=2, ep=2)),
]


@pytest.mark.parametrize(("name", "layout", "dtype", "mesh"), LOADED, ids=[f"{n}-{s}" for n, s, _, _ in LOADED])
def test_what_was_just_loaded(
    tmp_path: Path, name: str, layout: str | None, dtype: torch.dtype, mesh: dict[str, int]
) -> None:
    result = check(tiny.directory(tmp_path / "m", name, dtype=dtype, layout=layout), **mesh)
    assert result.ok, result.differences
    assert result.num_elements > 10_000
    assert result.skipped == ()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    at, made = tmp_path_factory.mktemp("checked"), dict[str, Path]()

    def of(name: str) -> Path:
        if name not in made:
            made[name] = tiny.directory(at / name, name, dtype=torch.bfloat16)
        return made[name]

    return of


def flipped_bit(model: mw.Model) -> None:
    if model.mesh.rank == 1:
        stored = model.stored()["layers.1.mixer.o.weight"]
        stored.view(torch.int32)[3, 5] ^= 1  # less than the source's bfloat16 can say


def test_a_flipped_bit_of_one_rank(source: Callable[[str], Path]) -> None:
    result = check(source("qwen3"), flipped_bit, tp=2)
    (one,) = result.differences
    assert (one.name, one.key) == ("layers.1.mixer.o.weight", "model.layers.1.self_attn.o_proj.weight")
    assert (one.rank, one.num_wrong, one.num_elements) == (1, 1, 36 * 20)
    assert one.box == "[0:36, 2:4, 0:10]"  # the heads of rank 1
    assert not one.misplaced
    assert not result.ok
    assert one.checksums[0] != one.checksums[1]


def swapped_rows(model: mw.Model) -> None:
    if model.mesh.rank == 0:
        stored = model.stored()["layers.0.mixer.qkv.weight"]
        stored[[0, 4]] = stored[[4, 0]]


def test_swapped_rows(source: Callable[[str], Path]) -> None:
    result = check(source("qwen3_5"), swapped_rows, fsdp=2)
    assert {(d.name, d.rank, d.misplaced) for d in result.differences} == {("layers.0.mixer.qkv.weight", 0, True)}
    assert all(re.search(words("right values", "wrong places"), str(d)) for d in result.differences)
    assert sum(d.num_wrong for d in result.differences) == 2 * 36


def swapped_experts(model: mw.Model) -> None:
    if model.mesh.rank == 0:
        stored = model.stored()["layers.0.mlp.experts.down"].view(-1, 36, 20)
        stored[[0, 2]] = stored[[2, 0]]


def test_experts_that_changed_places(source: Callable[[str], Path]) -> None:
    result = check(source("qwen3_moe"), swapped_experts, fsdp=2, ep=2)
    keys = [d.key for d in result.differences]
    assert keys == [f"model.layers.0.mlp.experts.{e}.down_proj.weight" for e in (0, 2)]
    assert all(d.misplaced for d in result.differences)


def overwritten_expert(model: mw.Model) -> None:
    stored = model.stored()["layers.2.mlp.experts.gate_up"].view(-1, 2, 20, 36)
    if model.mesh.rank == 3:
        stored[1] = stored[0]


def test_an_overwritten_expert(source: Callable[[str], Path]) -> None:
    result = check(source("qwen3_moe"), overwritten_expert, fsdp=2, tp=2, ep=4)
    assert [d.key for d in result.differences] == [
        f"model.layers.2.mlp.experts.7.{p}_proj.weight" for p in ("gate", "up")
    ]
    assert all(d.rank == 3 and not d.misplaced for d in result.differences)


def other_sign(model: mw.Model) -> None:
    model.stored()["head.norm.weight"].neg_()


def test_bits_and_not_values(tmp_path: Path) -> None:
    """-0 is not 0, though they are equal."""
    source = tiny.directory(tmp_path / "m", "qwen3")
    tensors = load_file(source / "model.safetensors")
    save_file({**tensors, "model.norm.weight": torch.zeros(36)}, source / "model.safetensors")
    result = check(source, other_sign)
    assert [(d.name, d.num_wrong) for d in result.differences] == [("head.norm.weight", 36)]


def trained(model: mw.Model) -> None:
    mw.Engine(model, lr=0.1).step(tiny.batches(model.mesh.data_rank))


def test_the_frozen_part_of_what_is_trained(source: Callable[[str], Path]) -> None:
    options = dict(train="layers.*.mixer.*", dtype=torch.float32)
    frozen = ["embed.*", "layers.*.mlp*", "head.*"]
    assert check(source("qwen3"), trained, frozen, options, fsdp=2).ok
    moved = {d.name for d in check(source("qwen3"), trained, options=options, fsdp=2).differences}
    assert moved == {
        f"layers.{i}.mixer.{p}"
        for i in (0, 1)
        for p in (*(f"{x}.weight" for x in "qkvo"), "q_norm.weight", "k_norm.weight")
    }


def test_a_new_head_is_skipped_with_a_note(source: Callable[[str], Path]) -> None:
    result = check(source("qwen3"), options=dict(head="value"), fsdp=2)
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
    code, run = verified(capsys, str(source("qwen3_moe")), "--mesh", "fsdp=2,tp=2,ep=2", "--head", "value")
    assert code == 0
    assert list(run["oracles"]) == ["RUN", "L1", "W1"]
    assert re.search(words(r"head\.weight", r"\bfiles\b"), run["notes"][1]), run["notes"]


def test_the_command_finds_a_reader_that_permutes(
    source: Callable[[str], Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = loading.Reader.read

    def permuted(self: Any, entry: Any, block: Any, part: Any) -> torch.Tensor:
        out = real(self, entry, block, part)
        return out.flip(0) if entry.key.endswith("layers.0.linear_attn.in_proj_qkv.weight") else out

    monkeypatch.setattr(loading.Reader, "read", permuted)
    code, run = verified(capsys, str(source("qwen3_5")), "--mesh", "tp=2")
    assert code == 1
    result = run["oracles"]["W1"]
    assert {f["name"] for f in result} == {"layers.0.mixer.qkv.weight"}
    wanted = words("right values", "wrong places", r"model\.layers\.0\.linear_attn\.in_proj_qkv\.weight")
    assert re.search(wanted, result[0]["what"]), result[0]["what"]


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


def test_a_rank_that_dies(source: Callable[[str], Path]) -> None:
    def dies(model: mw.Model) -> None:
        if model.mesh.rank == 1:
            raise ValueError("broken")

    with pytest.raises(RankError, match="broken"):
        check(source("qwen3"), dies, fsdp=2)
