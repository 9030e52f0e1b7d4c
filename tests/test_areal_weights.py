"""Functions that hand the weights of an AReaL engine to servers and files, called with small inputs."""

from __future__ import annotations

import contextlib
import os
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call, patch

import pytest
import torch

import meshwright as mw
from meshwright.recipe import Recipe
from tests import fake_areal
from tests.areal_cases import fake_mesh, part


@pytest.mark.parametrize(
    ("limit", "wanted"),
    [(100, ["abcd"]), (28, ["abcd"]), (27, ["abc", "d"]), (12, ["ab", "c", "d"]), (11, ["a", "b", "c", "d"]),
     (8, ["a", "b", "c", "d"]), (0, ["a", "b", "c", "d"]), (24, ["abc", "d"]), (23, ["ab", "cd"])],
)  # fmt: skip
def test_buckets_hold_at_most_the_limit(limit: int, wanted: list[str]) -> None:
    """Tensors of 8, 4, 12 and 4 bytes."""
    tensors = dict(a=torch.zeros(2), b=torch.zeros(2, dtype=torch.bfloat16), c=torch.zeros(3), d=torch.zeros(1))
    actual = [["".join(name for name, _ in each)] for each in part("weights").buckets(tensors.items(), limit)]
    assert ["".join(each) for each in actual] == wanted
    assert [*part("weights").buckets([], limit)] == []


@pytest.mark.parametrize(("rank", "kind", "before", "wanted"), [
    (0, "disk", None, None), (0, "disk", "old", None), (0, "xccl", None, "new"), (0, "xccl", "none", "new"),
    (0, "xccl", "old", "old"), (1, "xccl", None, None), (1, "xccl", "old", "old"),
])  # fmt: skip
def test_the_group_with_servers_is_made_once_and_on_rank_0(rank: int, kind: str, before: Any, wanted: Any) -> None:
    module, mesh = part("weights"), fake_mesh(rank)
    earlier = before and module.Rollout(mesh, "engine before", {"old": "old", "none": None}[before])
    with patch.object(module, "_group", return_value="new") as made:
        actual = module.connected(mesh, "engine", fake_areal.WeightUpdateMeta(kind), earlier)
    assert (actual.mesh, actual.engine, actual.group) == (mesh, "engine", wanted)
    assert made.called is (wanted == "new")


def test_the_group_with_servers_has_their_number_of_ranks_and_this_one() -> None:
    module, events = part("weights"), list[Any]()
    parallel = SimpleNamespace(world_size=5, pipeline_parallel_size=1)
    meta = fake_areal.WeightUpdateMeta("xccl", gen_allocation=SimpleNamespace(parallel=parallel))

    def init(given: Any) -> Any:
        events.append(("join", given.nccl_master_address, given.nccl_master_port, given.nccl_group_name))
        return SimpleNamespace(result=lambda: events.append("joined"))

    def group(**options: Any) -> str:
        events.append(os.environ["TORCHELASTIC_USE_AGENT_STORE"])
        events.append(options)
        return "group"

    with patch.object(module, "init_custom_process_group", group):
        assert module._group(SimpleNamespace(init_weights_update_group=init), meta) == "group"
    options = dict(
        backend="gloo", world_size=6, init_method="tcp://host:1", rank=0, group_name="update_weight_group",
        timeout=module.DIST_GROUP_DEFAULT_TIMEOUT,
    )  # fmt: skip
    assert events == [("join", "host", 1, "update_weight_group"), "False", options, "joined"]


@pytest.mark.parametrize("before", [None, "True"])
def test_a_store_of_its_own_is_asked_for_while_the_body_runs(before: str | None) -> None:
    name = "TORCHELASTIC_USE_AGENT_STORE"
    with patch.dict(os.environ, {name: before} if before else {}):
        if before is None:
            os.environ.pop(name, None)
        with contextlib.suppress(ZeroDivisionError), part("weights")._own_store():
            assert os.environ[name] == "False"
            raise ZeroDivisionError
        assert os.environ.get(name) == before


class Slow(fake_areal.Servers):
    """Servers that have read or received only once their answer was waited for."""

    def _note(self, call: str) -> Any:
        self.calls.append(call)
        return SimpleNamespace(result=lambda: self.calls.append(f"{call}, done"))


@pytest.mark.parametrize("rank", [0, 1])
def test_servers_read_weights_from_disk_between_pause_and_continue(rank: int) -> None:
    module, servers, published = part("weights"), Slow(), MagicMock()
    meta = fake_areal.WeightUpdateMeta("disk", "p")
    config = fake_areal.TrainEngineConfig(experiment_name="e", trial_name="t")
    with patch.object(module, "export") as export, patch.object(module.name_resolve, "add", published):
        export.side_effect = lambda *_: servers.calls.append("export")
        module.Rollout(fake_mesh(rank), servers).update_from_disk("model", meta, config, 7)
    assert export.call_args == call("model", module.SaveLoadMeta("p", "hf", with_optim=False), config)
    assert servers.calls == ["export", *(["pause", "read p", "read p, done", "continue"] if rank == 0 else [])]
    if rank == 0:
        assert (published.call_args.args[0], published.call_args.kwargs) == ("e/t/7", dict(keepalive_ttl=120))


@pytest.mark.parametrize(("rank", "fails"), [(0, False), (1, False), (0, True)])
def test_all_ranks_read_the_stream_of_weights_to_its_end(rank: int, fails: bool) -> None:
    module, servers, group = part("weights"), Slow(), fake_areal.Group()
    left = iter([("a", torch.ones(2, 3)), ("b", torch.ones(4, dtype=torch.bfloat16)), ("c", torch.ones(1))])
    if fails:
        group.broadcast = MagicMock(side_effect=RuntimeError("lost"))  # type: ignore[method-assign]
    meta = SimpleNamespace(weight_chunked_mem_mb=0)
    rollout = module.Rollout(fake_mesh(rank), servers, group)
    act = lambda: rollout.update_over_group("model", meta, SimpleNamespace(dtype="bfloat16"))  # noqa: E731 - short
    with patch.object(module.mw, "stream", return_value=left) as stream:
        if fails:
            with pytest.raises(RuntimeError, match="lost"):
                act()
        else:
            act()
    assert stream.call_args == call("model", dtype=torch.bfloat16)
    assert next(left, None) is None
    if not fails:
        each = ["receive", "receive, done"]  # no bucket is sent before the one before was taken
        assert servers.calls == (["pause", *each, *each, *each, "continue"] if rank == 0 else [])
        sizes = [(spec.name, spec.shape, spec.dtype) for specs in servers.specs for spec in specs]
        wanted = [("a", (2, 3), "float32"), ("b", (4,), "bfloat16"), ("c", (1,), "float32")]
        assert sizes == (wanted if rank == 0 else [])
        assert len(group.sent) == len(sizes)


def test_chunks_of_weights_are_in_mebibytes() -> None:
    module, servers = part("weights"), fake_areal.Servers()
    stream = [(name, torch.empty(3 << 17)) for name in "abc"]  # 1.5 MiB each
    rollout = module.Rollout(fake_mesh(), servers, fake_areal.Group())
    rollout._send(stream, SimpleNamespace(weight_chunked_mem_mb=3))
    assert [[spec.name for spec in specs] for specs in servers.specs] == [["a", "b"], ["c"]]


@pytest.mark.parametrize(
    ("kind", "lora", "stages", "words"),
    [("disk", True, 2, ""), ("xccl", False, 1, ""), ("xccl", True, 1, "weight_update_mode='disk'"),
     ("xccl", False, 2, "2 pipeline stages"), ("awex", False, 1, "awex"), ("disk", False, 3, "")],
)  # fmt: skip
def test_ways_to_send_weights(kind: str, lora: bool, stages: int, words: str) -> None:
    parallel = SimpleNamespace(pipeline_parallel_size=stages)
    meta = fake_areal.WeightUpdateMeta(kind, gen_allocation=SimpleNamespace(parallel=parallel))
    act = lambda: part("weights").check(meta, SimpleNamespace(use_lora=lora))  # noqa: E731 - short
    if not words:
        act()
        return
    with pytest.raises(mw.ConfigError, match=words):
        act()


@pytest.mark.parametrize("form", ["hf", "dcp"])
def test_formats_of_areal_are_known(form: str) -> None:
    part("weights").check_format(SimpleNamespace(weight_format=form))


@pytest.mark.parametrize(("rank", "given"), [(0, "tp"), (0, "t"), (0, "p"), (0, ""), (1, "tp")])
def test_rank_0_writes_tokenizer_and_processor(rank: int, given: str) -> None:
    module = part("weights")
    tools = {name: MagicMock() if name[0] in given else None for name in ("tokenizer", "processor")}
    meta = SimpleNamespace(weight_format="hf", path="p", **tools)
    recipe = SimpleNamespace(lora=None)
    model = SimpleNamespace(recipe=recipe, dtype=torch.float32, mesh=fake_mesh(rank))
    with patch.object(module.mw, "export") as export:
        module.export(model, meta, SimpleNamespace(dtype="bfloat16"))
    assert export.call_args == call(model, "p", dtype=torch.bfloat16, overwrite=True)
    for tool in tools.values():
        assert tool is None or tool.save_pretrained.call_args_list == [call("p")] * (rank == 0)


def test_adapters_are_exported_alone() -> None:
    module, model = part("weights"), SimpleNamespace(recipe=SimpleNamespace(lora="adapters"))
    with patch.object(module.mw, "export_adapter") as adapter, patch.object(module.mw, "export") as export:
        module.export(model, SimpleNamespace(path="p"), None)
    assert (adapter.call_args, export.called) == (call(model, "p", overwrite=True), False)


def test_weights_are_loaded_with_the_same_recipe_and_copied_by_name() -> None:
    module, engine = part("weights"), MagicMock()
    recipe = Recipe(head="value", dtype=torch.float64)
    model = SimpleNamespace(recipe=recipe, mesh="mesh")
    with patch.object(module.mw, "load") as load:
        module.load(model, SimpleNamespace(path="p"))
    assert load.call_args == call("p", "mesh", **{name: getattr(recipe, name) for name in vars(recipe)})
    old = dict(a=torch.zeros(2, requires_grad=True), b=torch.zeros(1))
    engine.model = SimpleNamespace(numbers={}, stored=lambda: old)
    new = dict(b=torch.tensor([3.0]), a=torch.tensor([1.0, 2.0]))
    module.replace_weights(engine, SimpleNamespace(stored=lambda: new))
    assert ([old["a"].tolist(), old["b"].tolist()], engine.discard.call_count) == ([[1.0, 2.0], [3.0]], 1)
