"""Functions of the backend of verl, called with small inputs: ranks, offload, refusals, checkpoints and losses."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call, patch

import pytest
import torch
import yaml

import meshwright as mw
from meshwright.integrations import options
from tests import fake_verl, verl_cases
from tests.fake_verl import Data, jagged


def bare(head: str = "lm", **fields: Any) -> Any:
    """An engine that was not set up."""
    module = verl_cases.backend()
    engine = object.__new__(module.MeshwrightEngine if head == "lm" else module.MeshwrightValueEngine)
    vars(engine).update(fields)
    return engine


def configured(**changes: Any) -> Any:
    return verl_cases.backend().MeshwrightEngineConfig(**changes)


# Setup


CONFIGS = Path(mw.__file__).parent / "integrations" / "verl_config"


def test_files_of_hydra_have_the_defaults_of_the_config() -> None:
    given = yaml.safe_load((CONFIGS / "engine" / "meshwright.yaml").read_text())
    assert given.pop("_target_") == "meshwright.integrations.verl.MeshwrightEngineConfig"
    assert given.pop("mesh") == {name: None if name == "fsdp" else 1 for name in options._AXES}
    assert given == {name: x for name, x in vars(configured()).items() if name != "mesh"}


def test_the_mesh_of_a_reference_is_that_of_its_actor() -> None:
    given = yaml.safe_load((CONFIGS / "ref" / "meshwright_ref.yaml").read_text())["meshwright"]
    at = "actor_rollout_ref.actor.meshwright.mesh"
    usual = {name: "null" if name == "fsdp" else "1" for name in options._AXES}
    wanted = {name: f"${{oc.select:{at}.{name},{x}}}" for name, x in usual.items()}
    assert given == {"mesh": wanted, "forward_only": True}


@pytest.mark.parametrize(("role", "target"), [("actor", "Actor"), ("ref", "Actor"), ("critic", "Critic")])
def test_files_of_hydra_name_the_config_of_a_role(role: str, target: str) -> None:
    given = yaml.safe_load((CONFIGS / role / f"meshwright_{role}.yaml").read_text())
    assert given["_target_"] == f"meshwright.integrations.verl.Meshwright{target}Config"
    assert (given["strategy"], role in given["defaults"]) == ("meshwright", True)


@pytest.mark.parametrize("role", ["Actor", "Critic"])
def test_verl_finds_the_config_of_the_engine(role: str) -> None:
    given = configured(length_multiple=3)
    config = getattr(verl_cases.backend(), f"Meshwright{role}Config")(meshwright=given)
    assert config.engine is given
    assert (config.strategy, given.strategy, given.weight_dtype) == ("meshwright", "meshwright", "bfloat16")


@pytest.mark.parametrize(("name", "device"), [("cpu", "cpu"), ("cuda", torch.device("cuda", 3))])
def test_the_mesh_is_on_the_device_that_verl_has_chosen(name: str, device: Any) -> None:
    module, mesh = verl_cases.backend(), MagicMock()
    ids: dict[str, Any] = dict(get_device_name=lambda: name, get_device_id=lambda: 3)
    with (
        patch.multiple(module, **ids),
        patch.object(module.torch.distributed, "get_world_size", return_value=12),
        patch.object(module.mw, "Mesh", return_value=mesh) as made,
    ):
        engine = module.MeshwrightEngine("model", configured(mesh=dict(tp=3)), "optimizer", "checkpoint")
    assert made.call_args == call(tp=3, fsdp=4, device=device)
    assert mesh.mock_calls == [call.process_group(("replicate", "fsdp"))]
    assert (engine.model_config, engine.optimizer_config, engine.checkpoint_config, engine.mode) == (
        "model", "optimizer", "checkpoint", None)  # fmt: skip
    assert engine._saved == []


@pytest.mark.parametrize(("local", "path"), [("near", "near"), (None, "far"), ("", "far")])
@pytest.mark.parametrize("head", ["lm", "value"])
@pytest.mark.parametrize("forward_only", [False, True])
def test_a_model_and_its_optimizer_are_made(local: str | None, path: str, head: str, forward_only: bool) -> None:
    module = verl_cases.backend()
    optim = fake_verl.OptimizerConfig(lr=3.0, lr_warmup_steps=4, clip_grad=0.7, zero_indexed_step=False)
    engine = bare(
        head, model_config=fake_verl.ModelConfig(path="far", local_path=local), mesh="mesh", optimizer_config=optim,
        engine_config=configured(forward_only=forward_only), to=MagicMock(),
    )  # fmt: skip
    with patch.multiple(module.mw, load=MagicMock(), Engine=MagicMock()):
        engine.initialize()
        load, made = module.mw.load.call_args, module.mw.Engine.call_args
    assert (load.args, load.kwargs["head"], "train" in load.kwargs) == ((path, "mesh"), head, forward_only)
    assert made == (None if forward_only else call(
        engine.model, lr=0.75, optimizer=mw.AdamW(betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01), max_norm=0.7,
        entropy=head == "lm", on_nonfinite="skip",
    ))  # fmt: skip
    assert engine.to.call_args == call("cpu", model=False, optimizer=False, grad=False)
    if forward_only:
        engine.optimizer_zero_grad()  # verl calls it whatever is trained
        with pytest.raises(mw.StateError, match="forward_only=True"):
            _ = engine.engine


# Offload


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("state", [False, True])
def test_what_the_config_offloads_is_on_the_device_while_the_body_runs(weights: bool, state: bool) -> None:
    calls = MagicMock()
    mesh = SimpleNamespace(device=torch.device("cuda", 1))
    engine = bare(engine_config=configured(param_offload=weights, optimizer_offload=state), to=calls.to, mesh=mesh)
    engine._offload()
    with engine._on_device():
        calls.body()
    with engine._on_device(optimizer=False):
        pass
    both, alone = (dict(model=weights, optimizer=each, grad=weights) for each in (state, False))
    assert calls.mock_calls == [
        call.to("cpu", **both), call.to("cuda", **both), call.body(), call.to("cpu", **both),
        call.to("cuda", **alone), call.to("cpu", **alone),
    ]  # fmt: skip
    assert (engine.is_param_offload_enabled, engine.is_optimizer_offload_enabled) == (weights, state)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_weights_and_optimizer_state_move_apart(trained: bool, weights: bool, state: bool, device: str) -> None:
    calls, way = MagicMock(), "sleep" if device == "cpu" else "wake"
    mesh = SimpleNamespace(device=torch.device("cuda", 1), host=torch.device("cpu"))
    engine = bare(model=calls.model, _engine=calls.engine if trained else None, mesh=mesh)
    engine.to(device, model=weights, optimizer=state, grad=True)
    moved = getattr(call.engine, way)(weights=weights, optimizer=state) if trained else getattr(call.model, way)()
    assert calls.mock_calls == [moved] * (weights or (state and trained))


def test_nothing_moves_where_the_device_is_the_host() -> None:
    mesh, model = SimpleNamespace(device=torch.device("cpu"), host=torch.device("cpu")), MagicMock()
    bare(model=model, _engine=None, mesh=mesh).to("cpu")
    assert not model.mock_calls


@pytest.mark.parametrize(
    ("options", "fails", "dropped"), [({}, False, 1), (dict(zero_grad_on_exit=False), False, 0),
                                      (dict(zero_grad_on_exit=False), True, 1), ({}, True, 1)]
)  # fmt: skip
def test_training_drops_gradients_at_its_end(options: dict[str, bool], fails: bool, dropped: int) -> None:
    engine = bare(optimizer_zero_grad=MagicMock(), mode=None)
    with pytest.raises(ZeroDivisionError) if fails else nullcontext(), engine.train_mode(**options):
        assert engine.mode == "train"
        if fails:
            raise ZeroDivisionError
    assert (engine.optimizer_zero_grad.call_count, engine.mode) == (dropped, None)
    with engine.eval_mode():
        assert engine.mode == "eval"
    assert engine.optimizer_zero_grad.call_count == dropped


# Ranks


@pytest.mark.parametrize(
    ("pipeline", "pp", "at", "wanted"),
    [
        ({}, 1, (0, 0, 0), True), ({}, 3, (2, 0, 0), True), ({}, 3, (0, 0, 0), False), ({}, 3, (1, 0, 0), False),
        ({}, 3, (2, 1, 0), False), ({}, 3, (2, 0, 1), False), (dict(schedule="v"), 3, (0, 0, 0), True),
        (dict(schedule="v"), 3, (2, 0, 0), False), (dict(schedule="v"), 3, (0, 1, 0), False),
        (dict(schedule="v"), 3, (0, 0, 1), False),
    ],
)  # fmt: skip
def test_one_rank_of_each_data_rank_hands_over_results(
    pipeline: dict[str, str], pp: int, at: tuple[int, int, int], wanted: bool
) -> None:
    coords = dict(zip(("pp", "cp", "tp"), at, strict=True), fsdp=1, replicate=1)
    mesh = SimpleNamespace(axes=SimpleNamespace(pp=pp), coords=coords)
    assert bare(engine_config=configured(pipeline=pipeline), mesh=mesh).is_mp_src_rank_with_outputs() is wanted


def test_data_ranks_are_those_of_the_mesh() -> None:
    engine = bare(mesh=SimpleNamespace(data_rank=2, num_data_ranks=5), _data_group="data")
    assert (engine.get_data_parallel_rank(), engine.get_data_parallel_size()) == (2, 5)
    assert engine.get_data_parallel_group() == "data"


@pytest.mark.parametrize("nested", [False, True])
def test_tokens_of_a_mask_are_counted_over_data_ranks(nested: bool) -> None:
    rows = [torch.tensor([1, 0, 1]), torch.tensor([1, 1, 1])]
    asked = list[Any]()

    def over(own: tuple[float, ...], axes: tuple[str, ...], at: str) -> torch.Tensor:
        asked.append((own, axes))
        return torch.tensor([own, [7.0]])

    engine = bare(mesh=SimpleNamespace(all_gather_on_hosts=over))
    assert engine._sum_over_data_ranks(jagged(rows) if nested else torch.stack(rows)) == 12
    assert asked == [((5.0,), ("replicate", "fsdp"))]


# Data


def data_of(**changes: Any) -> Data:
    tokens = jagged([torch.arange(4), torch.arange(2)])
    return Data({"input_ids": tokens, "temperature": 0.7, **changes})


POSITIONS = [torch.tensor([0, 1, 2, 3]), torch.tensor([0, 1])]
GOOD: dict[str, dict[str, Any]] = {
    "no positions": {}, "positions": dict(position_ids=jagged(POSITIONS)),
    "positions of images": dict(position_ids=torch.zeros(3, 2, 4)), "no images": dict(multi_modal_inputs=[{}, {}]),
    "images of none": dict(multi_modal_inputs=None), "not asked for": dict(distillation_only=False),
}  # fmt: skip
BAD: dict[str, tuple[dict[str, Any], str]] = {
    **{name: ({name: True}, name) for name in (
        "calculate_sum_pi_squared", "distillation_use_topk", "distillation_only", "enable_routing_replay")},
    "images of the second": (dict(multi_modal_inputs=[{}, {"x": 1}]), "have images"),
    "padded": (dict(input_ids=torch.zeros(2, 4)), "no_padding"),
    "positions from 1": (dict(position_ids=jagged([POSITIONS[0], POSITIONS[1] + 1])), "do not count from 0"),
    "positions go on": (dict(position_ids=jagged([POSITIONS[0], POSITIONS[1] + 4])), "do not count from 0"),
}  # fmt: skip


@pytest.mark.parametrize("case", GOOD)
def test_data_that_are_taken_have_a_temperature(case: str) -> None:
    assert bare()._checked(data_of(**GOOD[case])) == 0.7


@pytest.mark.parametrize("case", BAD)
def test_requests_that_would_be_ignored_are_refused(case: str) -> None:
    changes, words = BAD[case]
    with pytest.raises(mw.MeshwrightError, match=words):
        bare()._checked(data_of(**changes))


@pytest.mark.parametrize(
    ("head", "given", "wanted"),
    [("lm", 2, 2.0), ("lm", torch.tensor([[0.5], [0.5]]), 0.5), ("lm", torch.tensor(0.5), 0.5), ("value", 0.7, 1.0),
     ("value", torch.tensor([0.5, 0.7]), 1.0)],
)  # fmt: skip
def test_a_call_has_one_temperature(head: str, given: Any, wanted: float) -> None:
    assert bare(head)._temperature({"temperature": given}) == wanted


@pytest.mark.parametrize("entropy", [False, True])
def test_scores_have_the_names_that_verls_losses_read(entropy: bool) -> None:
    scores: Any = dict(logprobs="l", entropy="e", values="v")
    assert bare().model_output(scores, entropy) == {"log_probs": "l", **({"entropy": "e"} if entropy else {})}
    assert bare("value").model_output(scores, entropy) == {"values": "v"}
    assert bare()._entropy_of({"calculate_entropy": entropy}) is entropy
    assert bare()._entropy_of({}) is False


@pytest.mark.parametrize("keeps", [False, True])
def test_a_loss_of_verl_is_divided_by_the_data_ranks(keeps: bool) -> None:
    module, seen = verl_cases.backend(), MagicMock()
    scores = {"logprobs": torch.arange(6.0, requires_grad=True), "entropy": torch.arange(6.0) + 10}
    engine = bare(mesh=SimpleNamespace(num_data_ranks=4), _data_group="data")
    seen.return_value = torch.tensor(6.0), {"kl": 3}
    micro = ["another", data_of()]
    called = module._Call(engine, micro, seen, True)
    assert called.keeps_output
    called.keeps_output = keeps
    assert float(called(1, scores)) == 1.5
    given = seen.call_args.kwargs
    assert (given["data"], given["dp_group"], given["model_output"].keys()) == (
        micro[1], "data", {"log_probs", "entropy"})  # fmt: skip
    assert [x.tolist() for x in given["model_output"]["log_probs"].unbind()] == [[0, 1, 2, 3], [4, 5]]
    kept = called.outputs[1]
    assert (kept["loss"], kept["metrics"], kept["model_output"].keys()) == (
        6.0, {"kl": 3}, {"log_probs", "entropy"} if keeps else set())  # fmt: skip
    assert not keeps or not kept["model_output"]["log_probs"].requires_grad
    unscored = module._Call(engine, micro, None, False)
    assert (float(unscored(1, scores)), unscored.outputs[1]["metrics"]) == (0.25, {})
    assert unscored.outputs[1]["model_output"].keys() == {"log_probs"}


@pytest.mark.parametrize("forward_only", [False, True])
@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("head", ["lm", "value"])
def test_micro_batches_run_with_numbers_of_the_whole_batch(forward_only: bool, asked: bool, head: str) -> None:
    module, data = verl_cases.backend(), data_of(calculate_entropy=True, return_model_output=asked)
    data["loss_mask"] = jagged([torch.tensor([0, 1, 1, 1]), torch.tensor([0, 1])])
    mesh = SimpleNamespace(
        together=lambda act, *_: act(), axes=SimpleNamespace(cp=2, tp=3), num_data_ranks=5, device=torch.device("cpu"),
        all_gather_on_hosts=lambda own, *_: torch.tensor([own, [7.0]]),
    )  # fmt: skip
    engine = bare(head, mesh=mesh, _data_group="data", engine_config=configured(length_multiple=8), model="model",
                  _engine="engine")  # fmt: skip
    cut = MagicMock(wraps=module.prepare_micro_batches)
    moved = lambda self, device: Data(self, lies_on=device)  # noqa: E731 - short
    with (
        patch.object(module, "jagged") as work,
        patch.object(module, "postprocess_batch_func") as end,
        patch.object(module, "prepare_micro_batches", cut),
        patch.object(Data, "to", moved),
    ):
        run = lambda number, call: call.outputs.update({number: f"out {number}"})  # noqa: E731 - short
        work.backward.side_effect = lambda engine, batches, call, temperature: [run(n, call) for n in (1, 0)]
        work.losses_of.side_effect = lambda mesh, call, actual: [run(n, call) for n in (1, 0)]
        engine.forward_backward_batch(data, "loss", forward_only)
    assert {name: data[name] for name in ("sp_size", "dp_size", "batch_num_tokens")} == dict(
        sp_size=6, dp_size=5, batch_num_tokens=11)  # fmt: skip
    assert cut.call_args == call(data=data, dp_group="data", same_micro_num_in_dp=True)
    _, documents, multiple = work.packed.call_args.args
    assert [[x.tolist() for x in each] for each in documents] == [[[0, 1]], [[0, 1, 2, 3]]]
    assert (multiple, work.packed.call_args.kwargs) == (8, dict(values=head == "value"))
    temperature = 0.7 if head == "lm" else 1.0
    if forward_only:
        assert work.scores.call_args == call("model", work.packed.return_value, temperature)
        made = work.losses_of.call_args.args[1]
    else:
        made = work.backward.call_args.args[2]
        assert work.backward.call_args == call("engine", work.packed.return_value, made, temperature)
    assert [each["lies_on"] for each in made.micro] == [torch.device("cpu")] * 2
    assert (made.keeps_output, made.entropy, made.loss) == (forward_only or asked, True, "loss")
    assert end.call_args == call(output_lst=["out 0", "out 1"], indices=[[1], [0]], data=data)


# Weights and checkpoints


@pytest.mark.parametrize(("lora", "merge"), [(None, False), (mw.Lora(), True)])
def test_a_rollout_gets_merged_weights_on_all_ranks(lora: Any, merge: bool) -> None:
    module, moved = verl_cases.backend(), MagicMock()
    model = SimpleNamespace(recipe=SimpleNamespace(lora=lora))
    engine = bare(
        model=model, model_config=fake_verl.ModelConfig(lora=dict(merge=merge)), to=moved,
        engine_config=configured(weight_dtype="fp32", optimizer_offload=True),
        mesh=SimpleNamespace(device=torch.device("cpu")),
    )  # fmt: skip
    with patch.object(module.mw, "stream", return_value=iter([("a", 1), ("b", 2)])) as stream:
        weights, peft = engine.get_per_tensor_param()
        assert (list(weights), peft) == ([("a", 1), ("b", 2)], None)
    assert stream.call_args == call(model, "merged" if lora else "weight", ranks="all", dtype=torch.float32)
    assert [each.kwargs["optimizer"] for each in moved.call_args_list] == [False, False]


@pytest.mark.parametrize("lora", [None, mw.Lora()])
def test_a_reference_runs_without_adapters(lora: Any) -> None:
    model = MagicMock(recipe=SimpleNamespace(lora=lora))
    with bare(model=model).disable_adapter():
        assert model.base.called is (lora is not None)
        assert not model.base.return_value.__exit__.called
    assert model.base.return_value.__exit__.called is (lora is not None)


@pytest.mark.parametrize(("rank", "most", "left"), [
    (0, 2, ["c", "a"]), (0, 1, ["a"]), (0, None, ["a", "b", "c"]), (0, 0, ["a", "b", "c"]),
    (0, 3, ["a", "b", "c"]), (1, 1, ["a", "b", "c"]),
])  # fmt: skip
def test_the_oldest_checkpoints_of_a_run_are_removed(
    tmp_path: Path, rank: int, most: int | None, left: list[str]
) -> None:
    """`a` is written again after `b` and `c`."""
    module = verl_cases.backend()
    engine = bare(mesh=SimpleNamespace(rank=rank), _saved=[], _engine="engine", _num_scheduled=3)
    engine._on_device = MagicMock()
    (tmp_path / "of another run").mkdir()
    with patch.object(module.mw, "save") as save:
        for step, name in enumerate("abca"):
            (tmp_path / name).mkdir(exist_ok=True)
            engine.save_checkpoint(str(tmp_path / name), global_step=step, max_ckpt_to_keep=most)
            state = {"global_step": step, "num_scheduled": 3}
            assert save.call_args == call("engine", str(tmp_path / name), state=state)
    assert engine._on_device.call_args_list == [call()] * 4
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*left, "of another run"])


@pytest.mark.parametrize(("state", "steps"), [({"num_scheduled": 2}, 2), ({}, 0), (None, 0)])
def test_a_checkpoint_restores_the_schedule(state: Any, steps: int) -> None:
    module = verl_cases.backend()
    optim = fake_verl.OptimizerConfig(lr=3.0, lr_warmup_steps=4)
    engine = bare(optimizer_config=optim, _num_scheduled=1, _engine=MagicMock(), _on_device=MagicMock())
    with patch.object(module.mw, "resume", return_value=SimpleNamespace(state=state)) as resume:
        engine.load_checkpoint(None)
        assert (engine._num_scheduled, resume.called) == (1, False)
        engine.load_checkpoint("p")
    assert engine._on_device.call_args_list == [call()]
    assert resume.call_args == call(engine._engine, "p")
    assert (engine._num_scheduled, engine._engine.lr) == (steps, 0.75 * steps)
    assert engine.lr_scheduler_step() == 0.75 * (steps + 1)
    assert engine._engine.lr == 0.75 * (steps + 1)
