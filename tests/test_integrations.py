"""The engines of verl and AReaL without verl and AReaL: their methods, and their numbers against one process."""

from __future__ import annotations

import ast
import functools
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock, patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests import areal_cases, fake_areal, parts, tiny, trials, verl_cases, worlds

ROOT = Path(__file__).parents[1]
ROOM = ROOT / "meshwright" / "integrations"
VERL, AREAL = (
    json.loads((Path(__file__).parent / name).read_text()) for name in ("verl_0_9_1.json", "areal_1_0_4.json")
)
MESHES: list[dict[str, int]] = [dict(fsdp=2), *([dict(tp=2), dict(cp=2), dict(pp=2)] if parts.ALL else [])]
FRAMEWORKS: dict[str, Any] = {"verl": verl_cases, "areal": areal_cases}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.directory(tmp_path_factory.mktemp("integrations") / "qwen3", "qwen3")


@functools.cache
def world(source: Path) -> worlds.Shared[Any, list[Any]]:
    """All cases in one world: a world of its own for each would cost more than the case. Answers of all ranks."""
    cases: dict[Any, Any] = {}
    for name, module in FRAMEWORKS.items():
        for mesh in MESHES:
            cases[name, trials.named(mesh)] = functools.partial(module.case, source, mesh)
        cases[name] = functools.partial(module.contract, source, source.parent / name)
        (source.parent / name).mkdir()
    # Last: here ranks make unequal numbers of models, and later models of all ranks would not agree on theirs.
    cases |= {(name, "one"): functools.partial(by_hand, module, source) for name, module in FRAMEWORKS.items()}
    return worlds.Shared([list(cases)], lambda _: worlds.in_turn(2, cases))


def by_hand(module: Any, source: Path) -> dict[str, Any]:
    """Each rank is one process, and takes its share of the losses."""
    return {loss: module.by_hand(source, loss) for loss in list(module.LOSSES)[dist.get_rank() :: 2]}


def one_process(source: Path, name: str, loss: str) -> Any:
    """Loss, gradients and scores of the whole batch at once."""
    first, second = world(source)((name, "one"))
    return {**first, **second}[loss]


def far(actual: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """The largest relative distance of two sets of gradients."""
    assert actual.keys() == wanted.keys()
    return max(float((actual[k] - x).norm() / x.norm().clamp(min=1e-12)) for k, x in wanted.items())


# Methods, arguments, imports


def methods(file: str, name: str) -> dict[str, list[str]]:
    """The methods of a class and its bases in the file, with their arguments."""
    classes = {each.name: each for each in ast.parse((ROOM / file).read_text()).body if isinstance(each, ast.ClassDef)}
    bases = [each.id for each in classes[name].bases if isinstance(each, ast.Name) and each.id in classes]
    declared: dict[str, list[str]] = {}
    for each in bases:
        declared |= methods(file, each)
    for node in classes[name].body:
        if isinstance(node, ast.FunctionDef):
            more = [each.arg for each in (node.args.vararg, node.args.kwarg) if each]
            declared[node.name] = [each.arg for each in node.args.args][1:] + more
    return declared


@pytest.mark.parametrize("name", ["MeshwrightEngine", "MeshwrightValueEngine"])
def test_all_methods_of_verls_abstract_engine_are_there_with_its_arguments(name: str) -> None:
    declared = methods("verl.py", name)
    assert declared["__init__"] == VERL["constructor"]
    for method, arguments in VERL["methods"].items():
        if method not in VERL["inherited"]:
            assert method in declared, f"{method} is missing"
            assert set(arguments) <= set(declared[method]), (method, arguments, declared[method])
    assert set(VERL["properties"]) <= declared.keys()


def test_all_methods_of_areals_abstract_engine_are_there_with_its_arguments() -> None:
    declared = methods("areal_engine.py", "MeshwrightEngine")
    assert declared["initialize"] == ["addr", "ft_spec", "args", "kwargs"]
    for method, arguments in AREAL["abstract"].items():
        assert method in declared, f"{method} is missing"
        assert method == "initialize" or declared[method] == arguments, (method, arguments, declared[method])
    assert declared["destroy"] == AREAL["inherited"]["destroy"]


def test_fake_configs_have_fields_and_defaults_of_areal() -> None:
    for name, known in AREAL["fields"].items():
        fake = {"FinetuneSpec": {}}.get(name) or getattr(fake_areal, name)
        if name not in ("FinetuneSpec", "MicroBatchList"):
            for field in fake.__dataclass_fields__.values():
                assert field.name in known, (name, field.name)
                if isinstance(field.default, bool | int | float) or (field.default and isinstance(field.default, str)):
                    assert field.default == known[field.name] or field.name in ("experiment_name", "trial_name"), field


def test_what_is_imported_of_areal_is_in_its_contract() -> None:
    known = {name for module in AREAL["functions"].values() for name in module} | {*AREAL["fields"]}
    known |= {"TrainEngine", "ModelAllocation", "DeviceRuntimeInfo", "DistRolloutCoordinator", "current_platform"}
    known |= {"DIST_GROUP_DEFAULT_TIMEOUT", "name_resolve", "names", "perf_tracer", "stats_tracker"}
    for path in ROOM.glob("areal*.py"):
        tree = ast.parse(path.read_text())
        named = {alias.name for node in tree.body if isinstance(node, ast.ImportFrom) and not node.level
                 and (node.module or "").startswith("areal") for alias in node.names}  # fmt: skip
        assert named <= known, (path.name, named - known)


def test_a_framework_is_imported_in_modules_of_its_name_only() -> None:
    for path in (ROOT / "meshwright").rglob("*.py"):
        text = path.read_text()
        if not any(name in text for name in FRAMEWORKS):
            continue
        imported = {
            (alias.name if isinstance(node, ast.Import) else node.module or "").split(".")[0]
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and not node.level)
            for alias in node.names
        }
        for name in FRAMEWORKS:
            assert name not in imported or (path.parent == ROOM and path.name.startswith(name)), path


# verl


@pytest.mark.parametrize("loss", verl_cases.LOSSES)
@pytest.mark.parametrize("mesh", MESHES, ids=trials.named)
def test_steps_of_verl_equal_those_of_the_whole_batch_at_once(source: Path, mesh: dict[str, int], loss: str) -> None:
    total, grads, scores = one_process(source, "verl", loss)
    ranks = [each[loss] for each in world(source)(("verl", trials.named(mesh)))]
    sources = sorted((each for each in ranks if each["source"]), key=lambda each: each["data_rank"])
    assert len(sources) == mesh.get("fsdp", 1)
    assert far(ranks[0]["grads"], grads) < 1e-9
    norm = float(torch.stack([x.norm() for x in grads.values()]).norm())
    for each in sources if loss != "sft" else ():  # whose engine takes its step with another loss
        assert each["norm"] == pytest.approx(norm, rel=1e-9)
        assert each["lr"] == pytest.approx(1e-3 * (1 + math.cos(math.pi / 10)) / 2)
    # verl reports the mean over data ranks of the sums over micro-batches
    assert sum(each["loss"] for each in sources) / len(sources) == pytest.approx(total, rel=1e-9)
    if loss == "answers":
        assert sum(sum(each["metrics"]["pg"]) for each in sources) / len(sources) == pytest.approx(total, rel=1e-9)
    for name, flat in scores.items():  # in the caller's order
        wanted = flat.split(verl_cases.SIZES)
        rows = [row for key in ("output", "first") for each in sources for row in each[key][name]]
        for row, x in zip(rows, [*wanted, *wanted], strict=True):
            label = slice(None) if name == "values" else slice(-1)  # the last token predicts nothing
            assert torch.allclose(row[label], x[label], rtol=0, atol=1e-9)
            assert len(row) == len(x)


def test_the_rest_of_the_contract_of_verl(source: Path) -> None:
    ranks = world(source)("verl")
    for actual in ranks:
        assert math.isnan(actual["skipped"])
        assert actual["unchanged"]
        one, again, lr = actual["resumed"]
        assert one == again
        assert lr == pytest.approx(1e-3 * (1 + math.cos(math.pi / 10)) / 2)
        assert actual["kept"] == ["global_step_2"]
        assert actual["asleep"] == (2, True)
        assert math.isfinite(actual["awake"])
        assert actual["peft"] is None
        assert actual["options"] == (0.5, (0.9, 0.999), 0.01, 3)
        for name, words in {
            "images": "train on text", "temperatures": "2 temperatures", "one rank": "calculate_sum_pi_squared",
        }.items():  # fmt: skip
            assert words in actual["refused"][name], actual["refused"]
        assert "fails on one data rank" in actual["loss of train"]
        assert "fails on one data rank" in actual["loss of score"]
        assert actual["frozen"][0] == 2
        assert "forward_only=True" in actual["frozen"][1]
        right, refused, num = actual["adapters"]
        assert right
        assert "model.lora.merge=True" in refused
        assert num == len(actual["weights"])  # merged: no factors
    assert all(actual["weights"]["model.norm.weight"] == (36,) for actual in ranks)  # on every rank


# AReaL


@pytest.mark.parametrize("loss", areal_cases.LOSSES)
@pytest.mark.parametrize("mesh", MESHES, ids=trials.named)
def test_steps_of_areal_equal_those_of_the_whole_batch_at_once(source: Path, mesh: dict[str, int], loss: str) -> None:
    total, grads, scores = one_process(source, "areal", loss)
    ranks = [each[loss] for each in world(source)(("areal", trials.named(mesh)))]
    assert far(ranks[0]["grads"], grads) < 1e-9
    norm = float(torch.stack([x.norm() for x in grads.values()]).norm())
    num = 3 if "fsdp" in mesh else 1  # micro-batches that the data rank needs that needs most
    for each in ranks:
        if each["judged"] is not None:
            assert each["judged"] == pytest.approx(total, rel=1e-6)  # float32, as AReaL has it
        assert each["step"]["grad_norm"] == pytest.approx(norm, rel=1e-9)
        assert (each["step"]["update_successful"], each["step"]["num_micro_batches"]) == (1.0, num)
        assert each["step"]["lr"] == 0.0  # warm-up
    rows = [row for each in ranks if each["head"] for row in each["scores"]]
    for size, row, x in zip(areal_cases.SIZES, rows, scores.split(areal_cases.SIZES), strict=True):
        assert torch.allclose(row[:size], x, rtol=0, atol=1e-9)
        assert not row[size:].any()


def test_the_rest_of_the_contract_of_areal(source: Path) -> None:
    ranks = world(source)("areal")
    for rank, actual in enumerate(ranks):
        assert actual["groups"] == [[0, 1], [rank], [0, 1]]
        assert actual["head"] == (rank, rank, 2)
        assert actual["listed"]
        assert actual["skipped"][0] == 0.0
        assert math.isnan(actual["skipped"][1])
        assert actual["skipped"][2]
        refused, awake, offloaded = actual["asleep"]
        assert "sleep" in refused
        assert not offloaded  # training wakes it
        saved, norms, lr, steps = actual["resumed"]
        assert awake == saved
        assert norms[0] == norms[1]
        assert actual["still offloaded"]
        assert (lr, steps) == (5e-4, 2)
        judged, steps, has_state = actual["loaded"]
        assert judged == pytest.approx(saved, rel=1e-6)
        assert (steps, has_state) == (2, True)
        assert actual["files"] == ["step-000002"]
        for name, words in {
            "images": "train on text", "loss": "fails on one data rank", "judge": "fails on one data rank",
            "too few": "too few", "logits": "whole logits", "format": "gguf", "awex": "awex",
        }.items():  # fmt: skip
            assert words in actual["refused"][name], (name, actual["refused"][name])
        for name, reason in actual["configs"].items():
            assert name in reason, (name, reason)
        changed, untrained, adapters, scale = actual["reference"]
        assert changed
        assert "optimizer=None" in untrained
        assert "weight_update_mode='disk'" in adapters
        assert scale == 2.0
    calls, _ = ranks[0]["disk"]
    update = source.parent / "areal" / "update"
    assert calls == ["pause", f"read {update}", "continue"]
    written = load_file(update / "model.safetensors")
    assert {name: x.shape for name, x in written.items()} == {k: x.shape for k, x in ranks[0]["weights"].items()}
    assert {x.dtype for x in written.values()} == {torch.float64}
    calls, specs = ranks[0]["network"]
    assert calls == ["join update_weight_group", "pause", *["receive"] * len(specs), "continue"]
    for spec, sent, (name, x) in zip(specs, ranks[0]["sent"], ranks[0]["weights"].items(), strict=True):
        assert spec == f"{name} float64 {tuple(x.shape)}"
        assert torch.allclose(sent, x.double())
    assert ranks[1]["network"] == ([], [])
    assert (source.parent / "areal" / "files-adapters" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize(
    ("most", "num", "granularity", "wanted"),
    [
        (None, 1, 1, [[0, 1, 2, 3]]), (18, 1, 1, [[0, 1, 2, 3]]), (17, 1, 1, [[0, 2], [1, 3]]),
        (6, 1, 1, [[0, 3], [1], [2]]), (None, 2, 1, [[0, 2], [1, 3]]), (17, 1, 2, [[0, 1], [2, 3]]),
        (None, 1, 2, [[0, 1, 2, 3]]),
    ],
)  # fmt: skip
def test_micro_batches_of_areal_keep_to_the_limits_of_their_spec(
    most: int | None, num: int, granularity: int, wanted: list[list[int]]
) -> None:
    areal_cases.backend()
    spec = fake_areal.MicroBatchSpec(max_tokens_per_mb=most, granularity=granularity)
    groups = sys.modules["meshwright.integrations.areal_batches"]._groups([4, 5, 6, 3], spec, num)
    assert sorted(groups) == wanted


@pytest.mark.parametrize(("form", "dtype"), [("hf", torch.bfloat16), ("dcp", torch.float32)])
def test_weights_of_areal_to_continue_from_are_not_rounded(form: str, dtype: torch.dtype) -> None:
    model = SimpleNamespace(recipe=SimpleNamespace(lora=None), dtype=torch.bfloat16, mesh=MagicMock())
    meta = SimpleNamespace(weight_format=form, path="p", tokenizer=None, processor=None)
    areal_cases.backend()
    areal_weights = sys.modules["meshwright.integrations.areal_weights"]
    with patch.object(areal_weights.mw, "export") as export:
        areal_weights.export(cast(Any, model), meta, SimpleNamespace(dtype="bfloat16"))
    assert export.call_args.kwargs["dtype"] == dtype
