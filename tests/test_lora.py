"""LoRA: PEFT's files and gradients, merges, checkpoints of adapters alone. Gradients on meshes: test_lora_meshes.py."""

from __future__ import annotations

import functools
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

import meshwright as mw
from meshwright.axes import Axes
from meshwright.blueprint import Blueprint
from meshwright.cli.main import main
from meshwright.recipe import Lora, Recipe
from meshwright.sharding import pieces
from meshwright.weights import peft_files
from tests import parts, quantised, tiny, worlds

DRAWN = Lora(rank=3, alpha=6.0, expert_rank=2, b_std=0.1)  # where B is 0, A has no gradient
AXES = dict.fromkeys(("pp", "replicate", "fsdp", "cp", "tp", "ep"), 1)
DOCUMENTS = [[5, 6, 7, 1, 2], [3] * 7 + [100, 130], list(range(40, 70)), [8, 8]]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    at = tmp_path_factory.mktemp("lora")
    few = {
        "qwen3_moe": dict(mlp_only_layers=[1]),
        "qwen3_5_moe": dict(layer_types=["linear_attention", "full_attention"]),
    }
    return {name: tiny.directory(at / name, name, num_hidden_layers=2, **few.get(name, {})) for name in ("qwen3", *few)}


@pytest.mark.parametrize(("plain", "full"), [([], ()), (["model.layers.0.mlp.gate_proj"], ("gate_proj",))])
def test_targets_of_experts_are_short_where_no_plain_module_has_the_name(plain: list[str], full: tuple[str]) -> None:
    """SGLang goes through the list for each tensor. A short name would also give an adapter to a plain module."""
    stacks = [SimpleNamespace(module=f"m.{name}", experts=2) for name in ("gate_up_proj", "down_proj")]
    targets: list[str] = []
    for name in ("gate_proj", "up_proj", "down_proj"):
        targets += [f"m.{expert}.{name}" for expert in range(2)] if name in full else [name]
    assert peft_files._expert_targets(stacks, plain) == targets  # type: ignore[arg-type]


@pytest.mark.parametrize("more", [[], ["head.*"], ["*.mixer.q.*", "head.*"]])
def test_the_default_of_train_adds_nothing_to_adapters(more: list[str]) -> None:
    """A pattern next to the default must not train the whole base."""
    plain = Blueprint.of(tiny.ODD["qwen3"])
    trained = {
        patterns: plain.with_options(lora=Lora(rank=2), train=[*patterns]).trained()
        for patterns in (("**", *more), ("**",), tuple(more) or ("**",))
    }
    named = {param.name for param in plain.table if any(fnmatchcase(param.name, pattern) for pattern in more)}
    assert {*trained["**", *more]} == {*trained["**",], *named}
    assert trained["**", *more] == trained[tuple(more) or ("**",)]


def used(source: Path, at: Path, mesh: dict[str, int], call: str) -> Any:
    """Run one call of a user on a mesh: train and write, or resume, or load what was written."""
    batches = tiny.batches(0)
    if call in ("base", "merged"):
        plain = mw.load(at / "merged" if call == "merged" else source, mw.Mesh(**mesh), dtype=torch.float32)
        return mw.Engine(plain, lr=0.0).evaluate(batches), mw.logprobs(plain, batches[0])
    lora = Lora(path=str(at / "adapter")) if call == "path" else Lora(rank=3, alpha=6.0, expert_rank=2)
    model = mw.load(source, mw.Mesh(**mesh), dtype=torch.float32, lora=lora)
    engine = mw.Engine(model, lr=1e-2)
    if call == "train":
        first = mw.logprobs(model, batches[0])
        for _ in range(2):
            engine.step(batches)
        mw.save(engine, at / "checkpoints")
        mw.export(model, at / "merged", merge=True)
        mw.export_adapter(model, at / "adapter")
        with model.base():
            with model.base():
                pass
            base = mw.logprobs(model, batches[0])  # still without adapters
            with pytest.raises(mw.StateError, match=r"model\.base\(\).*before a step"):
                engine.step(batches)
        refused = []
        saved = at / "checkpoints" / "step-000002"
        for act in (lambda: mw.export(model, at / "no"), lambda: mw.gather(model), lambda: mw.load(saved)):
            with pytest.raises(mw.MeshwrightError) as error:
                act()
            refused.append(str(error.value))
        return engine.evaluate(batches), first, base, engine.step(batches).loss, refused
    if call == "resume":
        mw.resume(engine, at / "checkpoints")
        return engine.step(batches).loss
    return engine.evaluate(batches), mw.gather(model, "merged")


@worlds.world(1)
def test_adapters_of_a_drawn_base_are_resumed_again_and_again(sources: dict[str, Path], tmp_path: Path) -> None:
    """A resume replaces the adapters alone, so the next save names the same base."""
    made = lambda: mw.Engine(mw.init(sources["qwen3"], lora=Lora(rank=2)), lr=1e-2)  # noqa: E731 - short
    for step in range(3):
        engine = made()
        if step:
            mw.resume(engine, tmp_path)
        assert engine.steps == step
        engine.step(tiny.batches(step))
        mw.save(engine, tmp_path)


@pytest.mark.parametrize("family", ["qwen3_5_moe", *(["qwen3", "qwen3_moe"] if parts.ALL else [])])
def test_what_is_written_is_what_was_trained(sources: dict[str, Path], family: str, tmp_path: Path) -> None:
    run = functools.partial(used, sources[family], tmp_path)
    calls = {call: functools.partial(run, {}, call) for call in ("train", "base", "merged", "path")}
    said = {call: ranks[0] for call, ranks in worlds.in_turn(1, calls).items()}
    loss, first, base, next_loss, refused = said["train"]
    base_loss, expected_base = said["base"]
    assert torch.equal(first, expected_base), "step 0 is the base to the bit"
    assert torch.equal(base, expected_base), "without adapters the model is its base"
    assert loss < base_loss - 0.01
    assert re.search(r"adapters.*merge=True.*export_adapter", refused[0])
    assert "merged" in refused[1]
    assert re.search(r"checkpoint of adapters.*give the base.*merge=True.*mw.resume", refused[2])
    names = {path.name for path in (tmp_path / "checkpoints" / "step-000002").iterdir()}
    assert "adapters.safetensors" in names
    assert "model.safetensors" not in names
    assert said["merged"][0] == pytest.approx(loss, abs=1e-6)
    alone = said["path"]
    files = load_file(tmp_path / "merged" / "model.safetensors")
    assert alone[1].keys() == files.keys()
    assert all(torch.allclose(files[key], tensor, rtol=0, atol=1e-6) for key, tensor in alone[1].items())
    on_two = {
        "tp": functools.partial(run, dict(tp=2), "path"), "pp": functools.partial(run, dict(pp=2), "path"),
        "resume": functools.partial(run, dict(tp=2), "resume"),
    }  # fmt: skip
    said = worlds.in_turn(2, on_two)
    said["fsdp"] = worlds.run(3, run, dict(fsdp=3), "path")  # which leaves uneven pieces
    if parts.ALL:
        said["more ranks than kv heads"] = worlds.run(4, run, dict(tp=4), "path")
    assert said.pop("resume")[0] == pytest.approx(next_loss, abs=1e-6)
    for mesh, ((loss_from_files, merged), *_) in said.items():
        assert loss_from_files == pytest.approx(alone[0], abs=1e-6)
        assert merged.keys() == alone[1].keys()
        assert all(torch.allclose(merged[key], tensor, rtol=0, atol=1e-6) for key, tensor in alone[1].items()), mesh
    assert alone[0] == pytest.approx(loss, abs=1e-6)


def trained_beside_peft(source: Path, at: Path, layout: str, lora: Lora = DRAWN) -> tuple[float, dict[str, Tensor]]:
    """Write an adapter with a drawn B, and its gradient as if it were one."""
    model = mw.load(source, mw.Mesh(), dtype=torch.float32, lora=lora)
    mw.export_adapter(model, at / "adapter", layout=layout)
    engine = mw.Engine(model, lr=1e-2)
    loss = engine.backward([mw.pack(DOCUMENTS)])
    tensors, grads = mw.gather(model, "grad"), {}
    pairs = peft_files.pairs_of(param for param in model.table if param.adapter)
    stacks = [pair.module.rpartition(".")[0] for pair in pairs if pair.experts]
    for pair in pairs:
        own = {key: tensors[key] for param in (pair.a, pair.b) for key in param.layouts[0].keys}
        grads |= dict(peft_files.written(pair, own, layout, stacks.count(pair.module.rpartition(".")[0]) > 1))
    return loss, {key: grad.clone() for key, grad in grads.items()}


@pytest.mark.parametrize(
    ("family", "rslora"),
    [("qwen3_5_moe", False), *parts.every(3, [("qwen3", True), ("qwen3", False), ("qwen3_moe", False)])],
)
def test_peft_reads_the_files_and_has_the_same_gradients(family: str, rslora: bool, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    import transformers

    changes: dict[str, Any] = dict(mlp_only_layers=[]) if family == "qwen3_moe" else {}
    source = tiny.directory(tmp_path / "m", family, layout="fused", **changes)
    loss, grads = worlds.run(1, trained_beside_peft, source, tmp_path, "fused", replace(DRAWN, rslora=rslora))[0]
    base = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, tmp_path / "adapter", is_trainable=True)
    terms = [
        F.cross_entropy(model(input_ids=torch.tensor([d])).logits[0, :-1], torch.tensor(d[1:]), reduction="sum")
        for d in DOCUMENTS
    ]
    expected = torch.stack(terms).sum() / sum(len(d) - 1 for d in DOCUMENTS)
    expected.backward()
    assert loss == pytest.approx(expected.item(), abs=1e-6)
    peft_grads = {name.replace(".default", ""): p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert peft_grads.keys() == grads.keys()
    for key, grad in grads.items():
        assert (peft_grads[key] - grad).norm() <= 1e-5 * grad.norm() + 1e-8, key


def old_files(at: Path) -> None:
    """Rewrite fused experts as peft up to 0.19.0 had them: `[E, out, in]` read as `[E, in, out]`."""
    tensors = load_file(at / peft_files.WEIGHTS_FILE)
    for key in [key for key in tensors if ".experts." in key and key.endswith("lora_A.weight")]:
        a, b = tensors[key], tensors[key.replace("lora_A", "lora_B")]
        rank, experts = 2, len(a) // 2
        tensors[key] = b.view(-1, rank, experts).permute(2, 1, 0).reshape(experts * rank, -1).contiguous()
        tensors[key.replace("lora_A", "lora_B")] = (
            a.view(experts, rank, -1).permute(2, 1, 0).reshape(-1, rank * experts).contiguous()
        )
    save_file(tensors, at / peft_files.WEIGHTS_FILE)


@pytest.fixture(scope="module")
def written(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, float]]:
    """Adapters of a family in a layout, and their loss."""
    cases = [("qwen3", "fused"), ("qwen3_moe", "fused"), ("qwen3_moe", "per-expert")]
    folders = {f"{family} {layout}": tmp_path_factory.mktemp(f"{family}-{layout}") for family, layout in cases}
    acts = {
        name: functools.partial(trained_beside_peft, sources[name.split()[0]], at, name.split()[1])
        for name, at in folders.items()
    }
    return {name: (folders[name] / "adapter", ranks[0][0]) for name, ranks in worlds.in_turn(1, acts).items()}


def loss_of(source: Path, at: Path) -> float:
    model = mw.load(source, mw.Mesh(), dtype=torch.float32, lora=Lora(path=str(at)))
    return mw.Engine(model, lr=0.0).evaluate([mw.pack(DOCUMENTS)])


def test_every_spelling_of_experts_is_the_same_function(
    sources: dict[str, Path], written: dict[str, tuple[Path, float]], tmp_path: Path
) -> None:
    kinds, acts = dict.fromkeys(("fused", "old", "old, version unknown"), "fused"), {}
    for kind, layout in {**kinds, "per-expert": "per-expert"}.items():
        at = shutil.copytree(written[f"qwen3_moe {layout}"][0], tmp_path / kind)
        config = json.loads((at / peft_files.CONFIG_FILE).read_text())
        if kind.startswith("old"):
            old_files(at)
            config["peft_version"] = "0.18.1"
        if "unknown" in kind:
            del config["peft_version"]  # shapes tell the two apart unless matrices are square
        (at / peft_files.CONFIG_FILE).write_text(json.dumps(config))
        acts[kind] = functools.partial(loss_of, sources["qwen3_moe"], at)
    assert written["qwen3_moe fused"][1] == pytest.approx(written["qwen3_moe per-expert"][1], abs=1e-6)
    losses = {kind: ranks[0] for kind, ranks in worlds.in_turn(1, acts).items()}
    assert losses == pytest.approx(dict.fromkeys(acts, written["qwen3_moe fused"][1]), abs=1e-6)


REFUSED: dict[str, Any] = {
    r"lm_head match no linear layer": dict(targets=["lm_head"]),
    r"/nowhere is not a PEFT adapter": dict(path="/nowhere"),
}


def refused(load: Callable[[], object]) -> str:
    with pytest.raises(mw.MeshwrightError) as error:
        load()
    return str(error.value)


def test_what_cannot_be_is_refused(sources: dict[str, Path]) -> None:
    def load(fields: dict[str, Any]) -> object:
        return mw.load(sources["qwen3"], mw.Mesh(), lora=Lora(**fields))

    acts = {message: functools.partial(refused, functools.partial(load, fields)) for message, fields in REFUSED.items()}
    for message, (said,) in worlds.in_turn(1, acts).items():
        assert re.search(message, said), (message, said)


def gradients(source: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    model = mw.load(source, mw.Mesh(), dtype=dtype, lora=Lora(rank=4, alpha=8.0, b_std=0.1))
    mw.Engine(model, lr=0.0).backward(tiny.batches(0))
    return mw.gather(model, "grad")


def test_experts_of_any_width(tmp_path: Path) -> None:
    """The grouped kernel takes rank 4 and 20 columns, 16 and 80 bytes, but not 38 rows of B: it failed in backward."""
    source = tiny.directory(tmp_path / "m", "qwen3_moe", hidden_size=38, num_hidden_layers=1, mlp_only_layers=[])
    acts = {dtype: functools.partial(gradients, source, dtype) for dtype in (torch.float32, torch.float64)}
    narrow, wide = (ranks[0] for ranks in worlds.in_turn(1, acts).values())
    for key, grad in wide.items():
        assert (narrow[key] - grad).norm() <= 1e-5 * grad.norm(), key


def in_8_bits(source: Path, at: Path, mesh: dict[str, int], resumed: bool) -> tuple[float, float]:
    """Train two steps on a base of FP8 codes, or resume; return the losses before and in the next step."""
    model = mw.load(source, mw.Mesh(**mesh), dtype=torch.float32, lora=DRAWN)
    assert model.numbers
    engine, batches = mw.Engine(model, lr=1e-2), tiny.batches(0)
    if resumed:
        mw.resume(engine, at / "checkpoints")
    else:
        for _ in range(2):
            engine.step(batches)
        mw.save(engine, at / "checkpoints")
        mw.export(model, at / "merged", dtype=torch.float32, merge=True)
    return engine.evaluate(batches), engine.step(batches).loss


def test_a_base_of_fp8_codes_is_resumed_elsewhere_and_merged(sources: dict[str, Path], tmp_path: Path) -> None:
    source = quantised.directory(sources["qwen3_moe"], tmp_path / "codes", quantised.ours(torch.float32))
    meshes = {"first": dict(tp=2, ep=2), "then": dict(pp=2)}
    acts = {name: functools.partial(in_8_bits, source, tmp_path, mesh, name == "then") for name, mesh in meshes.items()}
    (loss, next_loss), then = (ranks[0] for ranks in worlds.in_turn(2, acts).values())
    assert then == pytest.approx((loss, next_loss), abs=1e-6)
    assert worlds.run(1, used, source, tmp_path, {}, "merged")[0][0] == pytest.approx(loss, abs=1e-6)


def test_unknown_keys_are_refused(
    sources: dict[str, Path], written: dict[str, tuple[Path, float]], tmp_path: Path
) -> None:
    """Engines that skip keys they do not know serve the base, or half of the adapter (sglang#27381)."""
    at = shutil.copytree(written["qwen3_moe per-expert"][0], tmp_path / "adapter") / peft_files.WEIGHTS_FILE
    tensors = load_file(at)
    extra = {key.replace("experts.0.", "experts.8."): t.clone() for key, t in tensors.items() if ".experts.0." in key}
    save_file({**tensors, **extra}, at)
    with pytest.raises(mw.RankError, match=r"experts\.8\.down_proj\.lora_A\.weight \(\d+ such keys\).*another base"):
        worlds.run(1, loss_of, sources["qwen3_moe"], tmp_path / "adapter")


def test_an_adapter_without_the_head_that_was_trained_is_refused(sources: dict[str, Path], tmp_path: Path) -> None:
    def export() -> None:
        model = mw.load(sources["qwen3"], mw.Mesh(), lora=Lora(rank=2), head="value")
        assert "head.weight" in model.trained
        with pytest.raises(mw.ConfigError, match=r"leave out head\.weight.*merge=True"):
            mw.export_adapter(model, tmp_path / "adapter")
        mw.export(model, tmp_path / "merged", merge=True)

    worlds.run(1, export)
    assert (tmp_path / "merged" / "model.safetensors").is_file()


def test_a_plan_counts_the_base_as_narrow_as_its_files(
    sources: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only adapters have float32 masters and moments; the head stays wide, and so does what is never rounded."""
    config = {**json.loads((sources["qwen3_5_moe"] / "config.json").read_text()), "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    mesh, lora = dict(fsdp=2, tp=2, ep=2), Lora(rank=4)
    assert (
        main(["plan", str(tmp_path / "config.json"), "--mesh", "fsdp=2,tp=2,ep=2", "--json", "--lora-rank", "4"]) == 0
    )
    ranks = json.loads(capsys.readouterr().out)["memory"]
    blueprint, axes = Blueprint.of(config, None, Recipe(lora=lora)), Axes(**{**AXES, **mesh})
    for each in ranks:
        held = pieces(blueprint.spec, axes, each["rank"]).values()
        adapters = sum(piece.numel for piece in held if piece.param.adapter)
        wide = sum(piece.numel for piece in held if piece.param.float32 or piece.param.name == "head.weight")
        assert each["bytes"]["moments"] == 8 * adapters
        assert each["bytes"]["parameters"] == 2 * sum(piece.numel for piece in held) + 2 * (adapters + wide)


FOREIGN: dict[str, tuple[object, str]] = {
    "modules_to_save": (["lm_head"], "modules_to_save"),
    "r": (5, r"rank and\s+targets must be those"),
}


def test_foreign_adapters_are_refused(
    sources: dict[str, Path], written: dict[str, tuple[Path, float]], tmp_path: Path
) -> None:
    acts = {}
    for field, (value, _) in FOREIGN.items():
        at = shutil.copytree(written["qwen3 fused"][0], tmp_path / field)
        config = json.loads((at / peft_files.CONFIG_FILE).read_text())
        (at / peft_files.CONFIG_FILE).write_text(json.dumps({**config, field: value}))
        acts[field] = functools.partial(refused, functools.partial(loss_of, sources["qwen3"], at))
    for field, (said,) in worlds.in_turn(1, acts).items():
        assert re.search(FOREIGN[field][1], said), (field, said)
