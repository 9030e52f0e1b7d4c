"""Functions of the engine of AReaL, called with small inputs: roles, batches and states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call, patch

import pytest
import torch
from torch import Tensor

import meshwright as mw
from tests import areal_cases, fake_areal, fake_modules
from tests.areal_cases import bare, fake_mesh, part

# For each engine the module of its role in AReaL, the role, its controller, and its methods: whether they return.
ROLES: dict[str, tuple[str, str, str, dict[str, bool]]] = {
    "MeshwrightPPOActor": ("ppo.actor", "PPOActor", "PPOActorController",
        {"compute_logp": True, "compute_advantages": True, "ppo_update": False}),
    "MeshwrightPPOCritic": ("ppo.critic", "PPOCritic", "PPOCriticController",
        {"compute_values": True, "ppo_update": False}),
    "MeshwrightLMEngine": ("sft.lm_engine", "LMEngine", "LMController", {"train_lm": False, "evaluate_lm": False}),
    "MeshwrightRWEngine": ("rw.rw_engine", "RWEngine", "RWController", {"train_rw": False, "evaluate_rw": False}),
    "MeshwrightDPOEngine": ("dpo.dpo_engine", "DPOEngine", "DPOController",
        {"train_dpo": False, "evaluate_dpo": False, "compute_logp": True}),
}  # fmt: skip


# Roles


def trainer(role: str) -> tuple[Any, Any]:
    """AReaL's trainers with stand-ins for one role, and the context in which they can be imported."""
    at, name, controller, _ = ROLES[role]
    values = {each: MagicMock() for each in (name, controller, f"{controller}V2")}
    room, _, _ = at.partition(".")
    modules: dict[str, dict[str, Any]] = {
        "areal": {},
        "areal.trainer": {},
        f"areal.trainer.{room}": {},
        f"areal.trainer.{at}": values,
    }
    return values, fake_modules.installed(modules)


@pytest.mark.parametrize("role", ROLES)
def test_methods_of_a_role_are_those_of_areal(role: str) -> None:
    _, name, _, methods = ROLES[role]
    config = fake_areal.TrainEngineConfig()
    made, imported = trainer(role)
    with imported:
        engine = getattr(areal_cases.backend(), role)(config)
    in_pairs = role in ("MeshwrightRWEngine", "MeshwrightDPOEngine")
    assert made[name].call_args == call(*([config] if "PPO" in role else []), engine)
    assert (engine.config is config, engine.config.mb_spec.granularity) == ((False, 2) if in_pairs else (True, 1))
    assert config.mb_spec.granularity == 1  # the caller's config is as it was
    for method, returns in methods.items():
        wanted = getattr(made[name].return_value, method)
        assert getattr(engine, method)("data") is (wanted.return_value if returns else None)
        assert wanted.call_args == call("data")
        if "PPO" in role:
            getattr(engine, method)(1, x=2)
            assert wanted.call_args == call(1, x=2)


@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize("role", ROLES)
def test_controllers_have_the_version_of_the_config(role: str, version: str) -> None:
    engine, config = getattr(areal_cases.backend(), role), fake_areal.TrainEngineConfig(_version=version)
    made, imported = trainer(role)
    with imported:
        actual = engine.as_controller(config, "scheduler")
    first, second = made[ROLES[role][2]], made[f"{ROLES[role][2]}V2"]
    used, other = (first, second) if version == "v1" else (second, first)
    assert actual is used.return_value
    assert used.call_args == call(train_engine=engine, config=config, scheduler="scheduler")
    assert not other.called


@pytest.mark.parametrize(
    ("backends", "prefixes"),
    [((), ("FSDP", "Megatron")), (("fsdp",), ("FSDP",)), (("megatron",), ("Megatron",)),
     (("megatron", "fsdp"), ("FSDP", "Megatron"))],
)  # fmt: skip
def test_engines_replace_those_of_the_backends(backends: tuple[str, ...], prefixes: tuple[str, ...]) -> None:
    module, at = areal_cases.backend(), SimpleNamespace()
    with patch.object(module.areal, "engine", at):
        module.register(*backends)
    roles = ("PPOActor", "PPOCritic", "LMEngine", "RWEngine", "DPOEngine")
    assert vars(at) == {f"{each}{role}": getattr(module, f"Meshwright{role}") for each in prefixes for role in roles}


# Batches


def rows(*sizes: int, width: int = 5) -> dict[str, Any]:
    """Padded rows whose tokens are 10, 11, ... in the first one and 20, 21, ... in the second one."""
    at = torch.arange(width)
    mask = torch.stack([at < size for size in sizes])
    tokens = torch.stack([(at + 10 * number) * (at < size) for number, size in enumerate(sizes, 1)])
    return {"input_ids": tokens, "attention_mask": mask}


def test_values_that_are_no_tensors_over_rows_go_whole_to_all_micro_batches() -> None:
    data = {
        **rows(2, 5, 3), "scale": torch.tensor([7.0, 8.0, 9.0]), "long": torch.zeros(4, 5), "kind": "k",
        "names": ["x", "y", "z"], "multi_modal_input": [{}, {"n": 1}, {"n": 2}], "flat": torch.arange(15).view(3, 5, 1),
    }  # fmt: skip
    cut = part("batches")._cut(data, "spec", [[2, 0], [1]])
    first, second = cut.mbs
    assert first["input_ids"].tolist() == [30, 31, 32, 10, 11]
    assert second["input_ids"].tolist() == [20, 21, 22, 23, 24]
    assert (first["cu_seqlens"].tolist(), second["cu_seqlens"].tolist()) == ([0, 3, 5], [0, 5])
    for mb in cut.mbs:
        assert (mb["scale"].tolist(), mb["names"], mb["kind"]) == ([7.0, 8.0, 9.0], ["x", "y", "z"], "k")
        assert mb["long"] is data["long"]
    assert first["multi_modal_input"] == [{"n": 2}, {}]
    assert second["multi_modal_input"] == [{"n": 1}]
    assert (first["flat"].shape, first["flat"][0, 0].item()) == ((2, 5, 1), 10)
    assert (cut.data, cut.mb_spec, cut.group_lens) == (data, "spec", [5, 5])
    assert (cut.forward_indices, cut.backward_indices) == ([2, 0, 1], [1, 2, 0])


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no input": (dict(input_ids=None), "input_ids"), "no mask": (dict(attention_mask=None), "attention_mask"),
    "pixels": (dict(pixel_values=1), "pixel_values"), "images": (dict(image_grid_thw=1), "image_grid_thw"),
    "videos": (dict(video_grid_thw=1), "video_grid_thw"),
    "rows of images": (dict(multi_modal_inputs=[{}, {"x": 1}]), "multi_modal_inputs"),
    "padding first": (dict(attention_mask=torch.tensor([[1, 1, 0], [0, 1, 1]])), "padding before"),
    "gap": (dict(attention_mask=torch.tensor([[1, 0, 1], [1, 1, 0]])), "has a gap"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_unusable_rows_of_areal_are_refused(case: str) -> None:
    changes, words = BAD[case]
    given = {name: x for name, x in {**rows(3, 2, width=3), **changes}.items() if x is not None}
    with pytest.raises(mw.DataError, match=words):
        part("batches")._checked(given, fake_areal.MicroBatchSpec())


def test_usable_rows_of_areal_get_positions_and_stay_as_they_are() -> None:
    given = {**rows(3, 1, width=3), "multi_modal_input": [{}, {}]}
    kept = dict(given)
    amend = lambda data: data.update(fake_areal.amend_position_ids(data)) or data  # noqa: E731 - in place
    with patch.object(part("batches"), "amend_position_ids", amend):
        data, meta = part("batches")._checked(given, fake_areal.MicroBatchSpec(granularity=2))
    assert meta is None
    assert data["position_ids"].tolist() == [[0, 1, 2], [0, 1, 2]]
    assert given.keys() == kept.keys()
    data, meta = part("batches")._checked([rows(2, width=2), rows(1, 3, width=3)], fake_areal.MicroBatchSpec())
    assert (len(data["input_ids"]), [tuple(each) for each in meta]) == (3, [(1, 2), (2, 3)])


@pytest.mark.parametrize(
    ("own", "others", "calls"),
    [(1, [], [1]), (1, [2], [1, 2]), (1, [3, 2], [1, 3]), (3, [1, 2], [1, 3]), (2, [2], [1])],
)
def test_all_ranks_make_as_many_micro_batches_as_the_one_that_needs_most(
    own: int, others: list[int], calls: list[int]
) -> None:
    """The rank that needs most cuts again with the others, since they agree together."""
    module, asked = part("batches"), list[int]()

    def groups(sizes: Sequence[int], spec: Any, num: int) -> list[list[int]]:
        asked.append(num)
        return [[0]] * max(num, own)

    counts = lambda *_, numbers: torch.tensor([[max(num, asked[-1])] for num in others] + [[*numbers]])  # noqa: E731
    with patch.object(module, "_groups", groups):
        assert len(module._agreed(fake_mesh(all_or_none=counts), [1, 2, 3], "spec", 1)) == max(own, *others, 0)
    assert asked == calls


@pytest.mark.parametrize(
    ("pads", "most", "n_mbs", "critic", "wanted"),
    [(False, 9, 1, False, (0, 1)), (True, 9, 3, True, (9, 3)), (True, None, None, False, (0, 1))],
)
def test_micro_batches_follow_the_spec(
    pads: bool, most: int | None, n_mbs: int | None, critic: bool, wanted: tuple[int, int]
) -> None:
    module = part("batches")
    spec = fake_areal.MicroBatchSpec(max_tokens_per_mb=most, n_mbs=n_mbs)
    config = fake_areal.TrainEngineConfig(mb_spec=spec, pad_to_maximum=pads, is_critic=critic)
    agreed = MagicMock(return_value=[[1], [2, 0]])
    moved = lambda self, device: replace(self, mb_spec=device)  # noqa: E731 - short
    with (
        patch.object(module, "_agreed", agreed),
        patch.object(module.jagged, "packed") as packed,
        patch.object(fake_areal.MicroBatchList, "to", moved),
    ):
        actual = module.micro_batches(fake_mesh(), rows(2, 4, 1), config, 8)
    assert agreed.call_args.args[1:] == ([2, 4, 1], spec, wanted[1])
    _, documents, multiple, least = packed.call_args.args
    assert [[x.tolist() for x in each] for each in documents] == [[[20, 21, 22, 23]], [[30], [10, 11]]]
    assert (multiple, least, packed.call_args.kwargs) == (8, wanted[0], dict(values=critic))
    assert (actual.sizes, actual.meta, actual.batches) == ([2, 4, 1], None, packed.return_value)
    assert actual.cut.mb_spec == torch.device("cpu"), "losses get what is on the device of the mesh"
    scores = actual.scores(1, {"logprobs": torch.arange(6), "entropy": torch.arange(6) + 10})
    assert {name: x.tolist() for name, x in scores.items()} == {"logprobs": [0, 1, 2], "entropy": [10, 11, 12]}


# The engine


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("asleep", [False, True])
def test_what_slept_sleeps_again_after_the_body(asleep: bool, trained: bool) -> None:
    parts = MagicMock()
    engine = bare(model=parts.model, _engine=parts.engine if trained else None, is_offload=asleep)
    with engine._awake():
        assert not engine.is_offload
        parts.body()
    owner = parts.engine if trained else parts.model
    assert engine.is_offload is asleep
    name = "engine" if trained else "model"
    around = (getattr(call, name).wake(), getattr(call, name).sleep()) if asleep else ()
    assert parts.mock_calls == [*around[:1], call.body(), *around[1:]]
    assert (owner.wake.called, owner.sleep.called) == (asleep, asleep)


def test_rollouts_get_all_arguments() -> None:
    engine = bare(_coordinator=MagicMock())
    made = engine._coordinator
    assert engine.rollout_batch("data", "w", {"k": 1}, 3) is made.rollout_batch.return_value
    assert made.rollout_batch.call_args == call("data", workflow="w", workflow_kwargs={"k": 1}, group_size=3)
    engine.rollout_batch("data", "w")
    assert made.rollout_batch.call_args == call("data", workflow="w", workflow_kwargs=None, group_size=1)
    assert engine.prepare_batch("loader", "w", {"k": 1}, "accept", 3, True) is made.prepare_batch.return_value
    common: dict[str, Any] = dict(workflow="w", workflow_kwargs={"k": 1}, should_accept_fn="accept")
    assert made.prepare_batch.call_args == call("loader", **common, group_size=3, dynamic_bs=True)
    engine.prepare_batch("loader", "w")
    common = dict(workflow="w", workflow_kwargs=None, should_accept_fn=None)
    assert made.prepare_batch.call_args == call("loader", **common, group_size=1, dynamic_bs=False)


@pytest.mark.parametrize("configured", [False, True])
def test_areals_tracer_is_configured_once(configured: bool) -> None:
    tracer = MagicMock(is_configured=lambda: configured)
    with patch.object(part("engine"), "perf_tracer", tracer):
        bare().config_perf_tracer("config", 3, "actor")
        bare().save_perf_tracer(5, force=True)
    assert tracer.configure.call_args_list == [call("config", rank=3, role="actor")] * (not configured)
    assert tracer.save.call_args == call(step=5, force=True)


@pytest.mark.parametrize("pp", [1, 2])
def test_statistics_of_all_stages_are_exported(pp: int) -> None:
    gathered = lambda own, axes: [own, {"c": 3.0, "of": axes}]  # noqa: E731 - short
    engine = bare(
        _data_group="data", mesh=SimpleNamespace(axes=SimpleNamespace(pp=pp), gather_objects=gathered),
    )  # fmt: skip
    export = lambda reduce_group: {"a": 1.0, "group": reduce_group}  # noqa: E731 - short
    with patch.object(part("engine").stats_tracker, "export_all", export):
        actual = engine.export_stats()
    assert actual == {"a": 1.0, "group": "data", **({"c": 3.0, "of": ("pp",)} if pp > 1 else {})}


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("initialised", [False, True])
def test_a_mesh_is_made_of_the_strategy(given: bool, initialised: bool) -> None:
    module, mesh = part("engine"), MagicMock()
    strategy = fake_areal.ParallelStrategy(data_parallel_size=6, tensor_parallel_size=2)
    engine = bare(config=SimpleNamespace(backend="fsdp:d6t2"), options=SimpleNamespace(replicate=3))
    read = MagicMock(return_value=SimpleNamespace(parallel=strategy))
    with (
        patch.object(module.mw, "Mesh", return_value=mesh) as made,
        patch.object(module.ModelAllocation, "from_str", read, create=True),
        patch.object(module.dist, "is_initialized", return_value=initialised),
    ):
        engine.create_process_group(strategy if given else None)
    assert read.call_args_list == ([] if given else [call("fsdp:d6t2")])
    axes = dict(pp=1, replicate=3, fsdp=2, cp=1, tp=2, ep=1)
    assert made.call_args == call(**axes, device="cpu", timeout_s=60.0)
    everywhere = ("pp", "replicate", "fsdp", "cp", "tp")
    assert mesh.mock_calls == [
        call.process_group(everywhere[1:3]), call.process_group(("pp", "cp", "tp")), call.host_group(everywhere)
    ]  # fmt: skip
    assert engine.own_global_group is not initialised


@pytest.mark.parametrize("scratch", [False, True])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("critic", [False, True])
def test_a_model_and_its_optimizer_are_made(scratch: bool, trained: bool, critic: bool) -> None:
    module = part("engine")
    optim = fake_areal.OptimizerConfig(
        lr=3.0, lr_scheduler_type="cosine", warmup_steps_proportion=0.5, min_lr_ratio=0.2, gradient_clipping=0.7
    )
    config = fake_areal.TrainEngineConfig(
        path="p", init_from_scratch=scratch, optimizer=optim if trained else None, is_critic=critic
    )
    engine = areal_cases.backend().MeshwrightEngine(config)
    engine.mesh = "mesh"
    assert (engine.initialized, engine.is_offload, engine.get_version()) == (False, False, 0)
    with patch.multiple(module.mw, load=MagicMock(), init=MagicMock(), Engine=MagicMock()):
        engine.initialize(None, fake_areal.FinetuneSpec(total_train_steps=8))
        used, other = (module.mw.init, module.mw.load) if scratch else (module.mw.load, module.mw.init)
        made, model = module.mw.Engine.call_args, used.return_value
    assert (used.call_args.args, other.called) == (("p", "mesh"), False)
    assert used.call_args.kwargs["head"] == ("value" if critic else "lm")
    assert (engine.model, engine.initialized, engine._total_steps) == (model, True, 8)
    assert made == (call(
        model, lr=pytest.approx(0.6), optimizer=mw.AdamW(betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01),
        max_norm=0.7, entropy=not critic, on_nonfinite="skip",
    ) if trained else None)  # fmt: skip


@pytest.mark.parametrize(("own", "running"), [(True, True), (True, False), (False, True)])
def test_an_engine_ends_the_process_group_that_it_has_made(own: bool, running: bool) -> None:
    engine = bare(own_global_group=own, _initialized=True, model="m", _engine="e", _cpu_group="hosts")
    dist = MagicMock(is_initialized=lambda: running)
    with patch.object(part("engine"), "dist", dist):
        engine.destroy()
        engine.destroy()  # twice does no harm
    ends = [call.barrier(group="hosts"), call.destroy_process_group()]
    assert dist.mock_calls == (ends if own and running else [])
    assert (engine.initialized, engine._engine, hasattr(engine, "model")) == (False, None, False)


@pytest.mark.parametrize(("rank", "head", "is_head"), [(0, 4, True), (2, 6, True), (3, 6, False)])
def test_the_head_of_a_data_rank_is_a_global_rank(rank: int, head: int, is_head: bool) -> None:
    first = rank - rank % 2
    over = lambda axes: torch.tensor([first, first + 1]) if axes == ("pp", "cp", "tp") else None  # noqa: E731 - short
    engine = bare(mesh=SimpleNamespace(ranks=(4, 5, 6, 7), rank=rank, ranks_over=over))
    assert (engine.current_data_parallel_head(), engine.is_data_parallel_head()) == (head, is_head)


def test_ranks_and_groups_are_those_of_the_mesh() -> None:
    mesh = SimpleNamespace(data_rank=2, num_data_ranks=5)
    engine = bare(mesh=mesh, _data_group="data", _model_group="model", _cpu_group="hosts")
    assert (engine.data_parallel_rank, engine.data_parallel_world_size) == (2, 5)
    groups = engine.data_parallel_group, engine.context_and_model_parallel_group, engine.cpu_group
    assert groups == ("data", "model", "hosts")


@pytest.mark.parametrize(("norm", "applied"), [(2.5, 1.0), (float("inf"), 0.0), (float("nan"), 0.0)])
def test_a_step_reports_its_norm_and_learning_rate(norm: float, applied: float) -> None:
    optim = fake_areal.OptimizerConfig(lr=3.0, warmup_steps_proportion=0.5)
    engine = bare(
        config=SimpleNamespace(optimizer=optim), _total_steps=8, _num_scheduled=1, mesh=fake_mesh(1),
        _engine=MagicMock(update=lambda: norm),
    )  # fmt: skip
    assert engine.optimizer_step() == pytest.approx(
        {"update_successful": applied, "grad_norm": norm, "lr": 0.75}, nan_ok=True
    )
    engine.lr_scheduler_step()
    assert (engine._num_scheduled, engine._engine.lr) == (2, 1.5)


def test_a_second_connection_knows_the_first_one() -> None:
    module, rollout = part("engine"), MagicMock(side_effect=["first", "second"])
    engine = bare(mesh="mesh", _rollout=None, _cpu_group="hosts", config=fake_areal.TrainEngineConfig())
    meta = fake_areal.WeightUpdateMeta("disk")
    with (
        patch.object(module.areal_weights, "connected", rollout),
        patch.multiple(module, dist=MagicMock(), DistRolloutCoordinator=MagicMock()),
    ):
        for name in ("a", "b"):
            engine.connect_engine(name, meta)
            assert module.dist.mock_calls.pop() == call.barrier(group="hosts")
            made = module.DistRolloutCoordinator
            assert made.call_args == call(rollout_engine=name, train_engine=engine)
            assert engine._coordinator is made.return_value
    assert rollout.call_args_list == [call("mesh", "a", meta, None), call("mesh", "b", meta, "first")]
    assert engine._rollout == "second"


def test_an_update_of_weights_knows_the_version_and_the_config() -> None:
    engine = bare(
        _rollout=MagicMock(), model=MagicMock(), _engine=None, _version=7, is_offload=True, _cpu_group="hosts",
        config=fake_areal.TrainEngineConfig(),
    )  # fmt: skip
    allocation = SimpleNamespace(parallel=SimpleNamespace(pipeline_parallel_size=1))
    for kind in ("disk", "xccl"):
        meta = fake_areal.WeightUpdateMeta(kind, gen_allocation=allocation)
        with patch.object(part("engine"), "dist") as dist:
            engine.update_weights(meta)
        assert dist.mock_calls == [call.barrier(group="hosts")]
        given = (engine.model, meta, engine.config)
        wanted = call.update_from_disk(*given, 7) if kind == "disk" else call.update_over_group(*given)
        assert engine._rollout.mock_calls.pop() == wanted
        assert engine.model.mock_calls.pop() == call.sleep()
        assert engine.model.mock_calls.pop() == call.wake()


def test_a_checkpoint_restores_the_schedule() -> None:
    module = part("engine")
    optim = fake_areal.OptimizerConfig(lr=3.0, warmup_steps_proportion=0.5)
    engine = bare(
        config=SimpleNamespace(optimizer=optim), _total_steps=8, _num_scheduled=3, is_offload=False, _engine=MagicMock()
    )
    meta = fake_areal.SaveLoadMeta("p", "dcp", with_optim=True)
    with patch.object(module.mw, "save") as save:
        engine.save(meta)
    assert save.call_args == call(engine._engine, "p", keep=1, state={"num_scheduled": 3})
    states: list[tuple[Any, int]] = [({"num_scheduled": 2}, 2), (None, 0), ({}, 0)]
    for state, steps in states:
        with patch.object(module.mw, "resume", return_value=SimpleNamespace(state=state)) as resume:
            engine.load(meta)
        assert resume.call_args == call(engine._engine, "p")
        assert (engine._num_scheduled, engine._engine.lr) == (steps, 0.75 * steps)


@pytest.mark.parametrize("act", ["save", "load"])
@pytest.mark.parametrize("with_optim", [False, True])
def test_a_format_that_areal_does_not_know_is_refused(act: str, with_optim: bool) -> None:
    with pytest.raises(mw.ConfigError, match="weight_format='gguf' is unknown"):
        getattr(bare(), act)(fake_areal.SaveLoadMeta("p", "gguf", with_optim))


@pytest.mark.parametrize(("critic", "temperature"), [(False, 0.7), (True, 1.0)])
def test_values_have_no_temperature(critic: bool, temperature: float) -> None:
    assert bare(config=SimpleNamespace(is_critic=critic, temperature=0.7))._temperature == temperature


@pytest.mark.parametrize(("wanted", "fits"), [([2, 3], True), ([3], True), (None, True), ([3, 2], False), ([], False)])
def test_lengths_of_outputs_are_those_of_rows_or_of_trajectories(wanted: Any, fits: bool) -> None:
    module = part("engine")
    cut = SimpleNamespace(forward_indices=[1, 0], backward_indices=[1, 0])
    given = SimpleNamespace(sizes=[2, 3], cut=cut, batches=["b"], meta=[(2, 3)], scores=lambda number, each: each)
    model = MagicMock()
    engine = bare(is_offload=True, model=model, _engine=None, config=SimpleNamespace(is_critic=False, temperature=0.7))
    engine._micro_batches = lambda _: given
    scores = [{"logprobs": torch.tensor([1.0, 2, 3, 4, 5])}]
    act = lambda: engine.forward_batch([rows(2, 3, width=3)], wanted)  # noqa: E731 - short
    with patch.object(module.jagged, "scores", return_value=scores) as call_of:
        if not fits:
            with pytest.raises(mw.DataError, match="output_seqlens"):
                act()
            return
        (actual,) = act()
    assert (call_of.call_args, model.wake.called) == (call(model, ["b"], 0.7), True)
    assert actual.tolist() == [[4.0, 5.0, 0.0], [1.0, 2.0, 3.0]]


def weighted(weights: Sequence[float], gathered: Callable[[tuple[float, ...]], list[list[float]]]) -> Any:
    """The loss of micro-batches with these weights, while other data ranks have more."""
    over = lambda own, axes, at: torch.tensor(gathered(own)) if axes == ("replicate", "fsdp") else None  # noqa: E731
    mbs = [{"weight": weight} for weight in weights]
    given = SimpleNamespace(cut=SimpleNamespace(mbs=mbs), scores=lambda number, each: each)
    engine = bare(mesh=fake_mesh(all_gather_on_hosts=over), config=SimpleNamespace(is_critic=False))
    loss = lambda logprobs, entropy, mb: (logprobs - 10 * entropy).sum() + mb["weight"]  # noqa: E731 - short
    return engine._loss(given, loss, lambda mb: torch.tensor(mb["weight"]))


def test_a_micro_batch_has_its_share_of_the_weight_of_all_data_ranks() -> None:
    loss = weighted([2.0, 0.0, 3.0], lambda own: [[*own], [7.0]])
    assert loss.shares == pytest.approx([2 / 12, 0.0, 3 / 12])
    scores: dict[str, Tensor] = {"logprobs": torch.tensor([100.0, 1.0]), "entropy": torch.tensor([1.0, 2.0])}
    assert float(loss(0, scores)) == pytest.approx((101 - 30 + 2) * 2 / 12)
    assert float(loss(1, scores)) == 0.0
    assert float(loss(2, scores)) == pytest.approx((101 - 30 + 3) * 3 / 12)


def test_a_loss_is_judged_over_all_data_ranks() -> None:
    """The model was offloaded; the losses of this rank's micro-batches are 1 and 2, and another data rank has 7."""
    module, model = part("engine"), MagicMock()
    over = lambda own, axes, at: torch.tensor([[*own], [7.0]]) if axes == ("replicate", "fsdp") else None  # noqa: E731
    engine = bare(
        mesh=fake_mesh(all_gather_on_hosts=over), is_offload=True, model=model, _engine=None,
        config=SimpleNamespace(is_critic=False, temperature=0.7), _micro_batches=lambda _: SimpleNamespace(batches="b"),
        _loss=lambda *_: "loss",
    )  # fmt: skip
    losses = MagicMock(return_value=[torch.tensor(1.0), torch.tensor(2.0)])
    with patch.object(module.jagged, "scores") as scores, patch.object(module.jagged, "losses_of", losses):
        actual = engine.eval_batch("data", "loss function", "weights")
    assert (float(actual), actual.dtype) == (10.0, torch.float32)
    assert (scores.call_args, model.wake.called) == (call(model, "b", 0.7), True)
    assert losses.call_args == call(engine.mesh, "loss", scores.return_value)


@pytest.mark.parametrize("total", [0.0, float("nan"), -1.0])
def test_a_batch_without_weight_is_refused(total: float) -> None:
    with pytest.raises(mw.DataError, match="some tokens to learn from"):
        weighted([0.0], lambda _: [[total]])
