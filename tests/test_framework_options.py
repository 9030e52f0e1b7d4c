"""Options of frameworks as arguments of Meshwright, and batches of jagged documents."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock, patch

import pytest
import torch

import meshwright as mw
from meshwright.axes import Axes
from meshwright.integrations import areal_options, jagged, options, verl_options
from tests import fake_areal, fake_verl

# Both frameworks


@pytest.mark.parametrize(
    ("axes", "world", "wanted"),
    [
        ({}, 1, dict(fsdp=1)),
        (dict(pp=2, replicate=3, cp=2, tp=2, ep=4), 48, dict(pp=2, replicate=3, cp=2, tp=2, ep=4, fsdp=2)),
        (dict(tp=2, ep=4), 8, dict(tp=2, ep=4, fsdp=4)),  # experts are divided among the same ranks
        (dict(tp=4), 2, dict(tp=4, fsdp=1)),
        (dict(fsdp=None, pp=None, tp=3), 6, dict(tp=3, fsdp=2)),
        (dict(fsdp=3, tp=2), 6, dict(fsdp=3, tp=2)),
        (dict(fsdp=2, tp=2), 8, dict(fsdp=2, tp=2)),  # the mesh refuses it, since it does not take all ranks
        (dict(pp=0), 2, dict(pp=0, fsdp=2)),
    ],
)
def test_mesh_axes_keep_given_sizes(axes: dict[str, int | None], world: int, wanted: dict[str, int]) -> None:
    assert options.mesh_axes(axes, world) == wanted


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("bf16", torch.bfloat16), ("fp32", torch.float32), ("fp64", torch.float64), ("bfloat16", torch.bfloat16),
     ("float32", torch.float32), ("float64", torch.float64)],
)  # fmt: skip
def test_names_of_dtypes(name: str, wanted: torch.dtype) -> None:
    assert options.dtype_of(name) == wanted


@pytest.mark.parametrize("name", ["float16", "half", "int8", "bool"])
def test_other_dtypes_are_refused(name: str) -> None:
    with pytest.raises(mw.ConfigError, match=name):
        options.dtype_of(name)


@pytest.mark.parametrize(
    ("progress", "least", "cycles", "wanted"),
    [(0.0, 0.2, 0.5, 1.0), (0.5, 0.2, 0.5, 0.6), (1.0, 0.2, 0.5, 0.2), (0.25, 0.0, 1.0, 0.5), (1.0, 0.0, 1.0, 1.0),
     (1 / 3, 0.0, 0.5, 0.75)],
)  # fmt: skip
def test_cosine_falls_from_one_to_the_least(progress: float, least: float, cycles: float, wanted: float) -> None:
    assert options.cosine(progress, least, cycles) == pytest.approx(wanted)


@pytest.mark.parametrize("recompute", [False, True])
def test_memory_of_the_framework_overrides_defaults(recompute: bool) -> None:
    choices = SimpleNamespace(memory={}, pipeline=dict(schedule="v"), context=dict(attention=2))
    actual = options.load_options("value", "fp32", recompute, choices)
    assert (actual["head"], actual["dtype"]) == ("value", torch.float32)
    assert actual["memory"] == mw.MemoryOptions(compiled=False, recompute="full" if recompute else "none")
    assert actual["pipeline"] == mw.Pipeline(schedule="v")
    assert actual["context"] == mw.ContextParallel(attention=2)
    choices.memory = dict(compiled=True, reshard=False)
    memory = options.load_options("lm", "bf16", recompute, choices)["memory"]
    assert memory == mw.MemoryOptions(compiled=True, recompute="full" if recompute else "none", reshard=False)
    choices.memory = dict(recompute="selective")
    assert options.load_options("lm", "bf16", recompute, choices)["memory"].recompute == "selective"


# AReaL

UNSUPPORTED: dict[str, Any] = {
    "use_kernels": True, "enable_tree_training": True, "grad_reduce_dtype": "bfloat16", "optimizer_dtype": "bfloat16",
    "peft_type": "ia3", "fsdp.wrap_policy": "x", "fsdp.per_layer_optim_step": True,
    "fsdp.shard_vision_across_sp": True, "optimizer.type": "sgd", "attn_impl": "org/kernels",
    "megatron.virtual_pipeline_parallel_size": 2, "archon.virtual_pipeline_parallel_size": 3,
}  # fmt: skip


@pytest.mark.parametrize("name", UNSUPPORTED)
@pytest.mark.parametrize("optimizer", [None, fake_areal.OptimizerConfig()])
def test_each_unsupported_setting_of_areal_is_refused(name: str, optimizer: Any) -> None:
    config = fake_areal.TrainEngineConfig(optimizer=optimizer and replace(optimizer))
    areal_options.check_config(config)
    owner, _, last = name.rpartition(".")
    owned = getattr(config, owner) if owner else config
    if owned is None:
        return
    setattr(owned, last, UNSUPPORTED[name])
    with pytest.raises(mw.ConfigError, match=name):
        areal_options.check_config(config)


def test_axes_of_areals_strategy_keep_their_names() -> None:
    strategy = fake_areal.ParallelStrategy(
        pipeline_parallel_size=2, data_parallel_size=12, context_parallel_size=3, tensor_parallel_size=5,
        expert_parallel_size=6,
    )  # fmt: skip
    wanted = dict(pp=2, replicate=3, fsdp=4, cp=3, tp=5, ep=6)
    assert areal_options.mesh_axes(strategy, 3) == wanted


AREAL_MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "defaults": ({}, dict(head="lm", dtype=torch.bfloat16, train=[])),
    "critic": (dict(is_critic=True, dtype="float32"), dict(head="value", dtype=torch.float32, train=[])),
    "trained": (dict(optimizer=fake_areal.OptimizerConfig()), {}),
    "adapters": (
        dict(use_lora=True, lora_rank=3, lora_alpha=5, target_modules=["q_proj"]),
        dict(lora=mw.Lora(rank=3, alpha=5.0, targets=["q_proj"]), train=[]),
    ),
}


@pytest.mark.parametrize("case", AREAL_MODELS)
def test_arguments_of_a_model_of_areal(case: str) -> None:
    changes, wanted = AREAL_MODELS[case]
    actual = areal_options.model_options(fake_areal.TrainEngineConfig(**changes), areal_options.EngineOptions())
    assert {name: actual[name] for name in wanted} == wanted
    assert ("train" in actual, "lora" in actual) == ("train" in wanted, "lora" in wanted)
    assert actual["memory"] == mw.MemoryOptions(compiled=False, recompute="none", offload=False)


def test_options_of_areals_engine_win_over_its_config() -> None:
    config = fake_areal.TrainEngineConfig(gradient_checkpointing=True)
    config.fsdp.offload_params = True
    chosen = lambda **given: areal_options.model_options(config, areal_options.EngineOptions(**given))  # noqa: E731
    assert chosen()["memory"] == mw.MemoryOptions(compiled=False, recompute="full", offload=True)
    assert chosen(memory=dict(offload=False))["memory"].offload is False
    actual = chosen(load=dict(head="x", more=1), pipeline=dict(schedule="v"))
    assert (actual["head"], actual["more"], actual["pipeline"].schedule) == ("x", 1, "v")


@pytest.mark.parametrize(
    ("names", "wanted"),
    [([], "all-linear"), (["all-linear"], "all-linear"), (["o_proj"], ["o_proj"]),
     (("q_proj", "v_proj"), ["q_proj", "v_proj"]), (["all-linear", "x"], ["all-linear", "x"])],
)  # fmt: skip
def test_areals_names_of_modules_with_adapters(names: Any, wanted: Any) -> None:
    assert areal_options._targets(SimpleNamespace(target_modules=names)) == wanted


def test_areals_optimizer_keeps_its_numbers() -> None:
    given = fake_areal.OptimizerConfig(beta1=0.8, beta2=0.7, eps=1e-5, weight_decay=0.3)
    assert areal_options.optimizer_of(given) == mw.AdamW(betas=(0.8, 0.7), eps=1e-5, weight_decay=0.3)


@pytest.mark.parametrize(("kind", "least"), [("linear", 0.0), ("cosine", 0.1), ("constant", 0.1)])
def test_areals_schedules_that_all_its_engines_agree_on(kind: str, least: float) -> None:
    areal_options.check_schedule(fake_areal.OptimizerConfig(lr_scheduler_type=kind, min_lr_ratio=least))
    if kind == "linear":
        with pytest.raises(mw.ConfigError, match=r"min_lr_ratio=0\.1"):
            areal_options.check_schedule(fake_areal.OptimizerConfig(lr_scheduler_type=kind, min_lr_ratio=0.1))


@pytest.mark.parametrize(
    ("kind", "least", "total", "step", "factor"),
    [
        ("linear", 0.0, 7, 2, 1.0), ("linear", 0.0, 7, 5, 0.4), ("linear", 0.0, 7, 8, 0.0), ("cosine", 0.2, 7, 1, 0.6),
        ("cosine", 0.2, 7, 7, 0.2), ("linear", 0.0, 0, 0, 1.0), ("constant", 0.2, 7, 1, 0.5),
        ("linear", 0.3, 7, 1, 0.5), ("cosine", 0.0, 8, 8, 0.0), ("constant", 0.0, 7, 9, 1.0),
    ],
)  # fmt: skip
def test_learning_rates_of_areal_for_odd_numbers_of_steps(
    kind: str, least: float, total: int, step: int, factor: float
) -> None:
    """0.4 x 7 steps are 2 of warm-up."""
    optim = fake_areal.OptimizerConfig(lr=3.0, lr_scheduler_type=kind, min_lr_ratio=least, warmup_steps_proportion=0.4)
    assert areal_options.learning_rate(optim, total, step) == pytest.approx(3.0 * factor)


# verl


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, None), (dict(lora_rank=-1), None),
        (dict(lora_rank=3, lora_alpha=5), mw.Lora(rank=3, alpha=5.0, targets="all-linear")),
        (dict(lora_rank=1, target_modules=("q_proj", "v_proj")),
         mw.Lora(rank=1, alpha=16.0, targets=["q_proj", "v_proj"])),
        (dict(lora_rank=2, lora_adapter_path="p"), mw.Lora(rank=2, path="p")),
        (dict(lora_rank=0, lora_alpha=7, lora_adapter_path="p"), mw.Lora(path="p")),
    ],
)  # fmt: skip
def test_adapters_of_verl(fields: dict[str, Any], wanted: mw.Lora | None) -> None:
    assert verl_options.lora_of(fake_verl.ModelConfig(**fields)) == wanted


def test_a_rollout_reads_adapters_as_peft_names_them() -> None:
    actual = verl_options.peft_config(mw.Lora(rank=3, alpha=5.0, targets=("q_proj", "v_proj")))
    modules = ["q_proj", "v_proj"]
    assert actual == dict(r=3, lora_alpha=5.0, target_modules=modules, lora_dropout=0.0, bias="none")


@pytest.mark.parametrize("forward_only", [False, True])
@pytest.mark.parametrize("rank", [0, 2])
def test_arguments_of_a_model_of_verl(forward_only: bool, rank: int) -> None:
    model = fake_verl.ModelConfig(lora_rank=rank, enable_gradient_checkpointing=True)
    engine = SimpleNamespace(
        dtype="fp32", forward_only=forward_only, memory={}, pipeline={}, context={}, load=dict(dtype="x", more=1)
    )
    actual = verl_options.model_options(model, engine, "value")
    assert (actual["head"], actual["dtype"], actual["more"]) == ("value", "x", 1)
    assert actual["memory"] == mw.MemoryOptions(compiled=False, recompute="full")
    assert actual.get("train", "all") == ([] if forward_only else "all")
    assert ("lora" in actual) is (rank > 0)


EPS: dict[str, tuple[dict[str, Any], float]] = {
    "default": ({}, 1e-8),
    "of the config": (dict(eps=1e-5), 1e-5),
    "none": (dict(eps=None), 1e-8),
    "overridden": (dict(eps=1e-5, override_optimizer_config=dict(eps=1e-3)), 1e-3),
    "empty": (dict(eps=1e-5, override_optimizer_config={}), 1e-5),
    "not by name": (dict(optimizer="ADAM"), 1e-8),
}


@pytest.mark.parametrize("case", EPS)
def test_verls_optimizer_keeps_its_numbers(case: str) -> None:
    fields, eps = EPS[case]
    given = fake_verl.OptimizerConfig(betas=(0.8, 0.7), weight_decay=0.3)
    vars(given).update(fields)
    overridden = given.override_optimizer_config
    kept = None if overridden is None else dict(overridden)
    assert verl_options.optimizer_of(given) == mw.AdamW(betas=(0.8, 0.7), eps=eps, weight_decay=0.3)
    assert overridden == kept


def test_an_optimizer_of_verl_without_a_name_is_adamw() -> None:
    given = fake_verl.OptimizerConfig()
    del given.optimizer
    assert verl_options.optimizer_of(given) == mw.AdamW(betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)


COSINE: dict[str, Any] = dict(lr_scheduler_type="cosine")


@pytest.mark.parametrize(
    ("fields", "step", "factor"),
    [
        # 4 of 10 steps warm up, by number or by ratio
        (dict(lr_warmup_steps=4), 1, 0.25), (dict(lr_warmup_steps=4), 4, 1.0),
        (dict(lr_warmup_steps=4, lr_warmup_steps_ratio=0.9), 3, 0.75), (dict(lr_warmup_steps_ratio=0.4), 3, 0.75),
        (dict(lr_warmup_steps=0, lr_warmup_steps_ratio=0.4), 3, 0.75),
        (dict(lr_warmup_steps=None, lr_warmup_steps_ratio=0.48), 3, 0.75), (dict(lr_warmup_steps_ratio=0.4), 9, 1.0),
        # the rate is constant unless the config says otherwise
        (dict(lr_scheduler_type=None), 7, 1.0), (dict(lr_scheduler_type="constant", min_lr_ratio=0.2), 9, 1.0),
        (dict(lr_scheduler_type="constant", lr_warmup_steps=4, zero_indexed_step=False), 1, 0.25),
        # a cosine over the 6 other steps
        (dict(COSINE, lr_warmup_steps=4), 7, 0.5), (dict(COSINE, lr_warmup_steps=4), 10, 0.0),
        (dict(COSINE, lr_warmup_steps=4, min_lr_ratio=0.2), 7, 0.6), (dict(COSINE, lr_warmup_steps=4), 6, 0.75),
        (dict(COSINE, lr_warmup_steps=4, zero_indexed_step=False), 6, 0.5),
        (dict(COSINE, lr_warmup_steps=4, zero_indexed_step=False), 0, 0.25),
        (dict(COSINE, lr_warmup_steps=4, zero_indexed_step=False), 3, 1.0),
        (dict(COSINE, lr_warmup_steps=4, num_cycles=1.0), 7, 0.0), (dict(COSINE, num_cycles=1.0), 10, 1.0),
        (dict(COSINE, total_training_steps=4, lr_warmup_steps=4), 4, 1.0),
    ],
)  # fmt: skip
def test_learning_rates_of_verl(fields: dict[str, Any], step: int, factor: float) -> None:
    optim = fake_verl.OptimizerConfig(lr=3.0, **{"lr_scheduler_type": "constant", **fields})
    assert verl_options.learning_rate(optim, step) == pytest.approx(3.0 * factor, abs=1e-12)


def test_fields_that_verls_optimizer_lacks_have_the_defaults_of_verl() -> None:
    optim = fake_verl.OptimizerConfig(lr=3.0, lr_scheduler_type="cosine")
    for name in ("zero_indexed_step", "min_lr_ratio", "num_cycles"):
        delattr(optim, name)
    assert verl_options.learning_rate(optim, 5) == pytest.approx(1.5)
    del optim.lr_scheduler_type
    assert verl_options.learning_rate(optim, 5) == 3.0


# Jagged documents


def mesh_of(others: list[tuple[int, int]], axes: Axes | None = None) -> Any:
    """This rank, and the numbers of micro-batches and the largest sizes of others."""
    rows = lambda failure, _, numbers: torch.tensor([numbers, *others], dtype=torch.float64)  # noqa: E731 - short
    return cast(mw.Mesh, SimpleNamespace(axes=axes or Axes(), all_or_none=rows))


def documents(*sizes: int) -> list[torch.Tensor]:
    return [torch.arange(size) + 10 * n for n, size in enumerate(sizes, 1)]


@pytest.mark.parametrize(
    ("axes", "multiple", "least", "others", "length"),
    [
        (Axes(), 1, 0, [], 7), (Axes(), 1, 7, [], 7), (Axes(), 1, 9, [], 9), (Axes(), 1, 5, [(2, 11)], 11),
        (Axes(), 1, 0, [(2, 3)], 7), (Axes(), 4, 0, [], 8), (Axes(), 7, 0, [], 7), (Axes(), 4, 9, [], 12),
        (Axes(cp=2), 3, 0, [], 12), (Axes(tp=2), 3, 0, [], 12), (Axes(cp=2, tp=3), 1, 0, [], 12),
        (Axes(cp=2, tp=3), 2, 0, [(2, 13)], 24), (Axes(pp=2, fsdp=3, replicate=2), 1, 0, [], 7),
    ],
)  # fmt: skip
def test_all_batches_have_the_length_of_the_fullest(
    axes: Axes, multiple: int, least: int, others: list[tuple[int, int]], length: int
) -> None:
    batches = jagged.packed(mesh_of(others, axes), [documents(2), documents(3, 4)], multiple, least)
    assert [len(batch) for batch in batches] == [length, length]
    assert [batch.num_filler for batch in batches] == [length - 2, length - 7]


def test_documents_keep_tokens_labels_and_the_number_of_their_micro_batch() -> None:
    first, second, third = jagged.packed(mesh_of([]), [documents(2, 0, 1), [], documents(1)])
    assert first.tokens.tolist() == [10, 11, 30]
    assert first.labels.tolist() == [11, -100, -100]
    assert (second.tokens.tolist(), second.num_documents, second.num_filler) == ([0, 0, 0], 1, 2)
    numbers = [batch.fields[jagged._NUMBER].tolist()[0] for batch in (first, second, third)]
    assert numbers == [0, 1, 2]
    (valued,) = jagged.packed(mesh_of([]), [documents(2, 1)], least=4, values=True)
    assert valued.labels.tolist() == [10, 11, 20, -100]


@pytest.mark.parametrize(("given", "others"), [(0, []), (0, [(0, 0)]), (2, [(3, 4)]), (1, [(1, 4), (0, 0)])])
def test_unequal_or_no_micro_batches_are_refused(given: int, others: list[tuple[int, int]]) -> None:
    with pytest.raises(mw.DataError, match="give all data ranks the same number"):
        jagged.packed(mesh_of(others), [documents(2)] * given)


def test_scores_and_losses_get_no_padding() -> None:
    batches = jagged.packed(mesh_of([]), [documents(2), documents(2, 3)])
    whole = {"logprobs": torch.arange(5.0), "entropy": torch.arange(5.0) + 10}
    with patch.object(jagged.mw, "scores", return_value=[whole, whole]) as call:
        short, full = jagged.scores(cast(Any, "model"), batches, 0.7)
    assert call.call_args == (("model", batches), {"temperature": 0.7})
    assert {name: x.tolist() for name, x in short.items()} == {"logprobs": [0, 1], "entropy": [10, 11]}
    assert full["entropy"].tolist() == [10, 11, 12, 13, 14]
    loss = MagicMock()
    fields = {jagged._NUMBER: torch.tensor([3, 3, 3, 3, 0])}
    jagged._Loss(loss)(whole, fields, cast(Any, SimpleNamespace(sizes=[1, 3])))
    ((number, scores), _) = loss.call_args
    assert (number, scores["logprobs"].tolist(), scores["entropy"].tolist()) == (3, [0, 1, 2, 3], [10, 11, 12, 13])


def test_a_backward_pass_sums_a_frameworks_losses_at_its_temperature() -> None:
    engine, loss = MagicMock(), MagicMock()
    jagged.backward(engine, cast(Any, ["batch"]), loss, 0.7)
    assert (engine.loss.function.loss, engine.loss.per, engine.loss.normalise) == (loss, "micro_batch", False)
    assert engine.temperature == 0.7
    engine.backward.assert_called_once_with(["batch"])


def test_losses_of_a_framework_know_the_number_of_their_micro_batch() -> None:
    mesh = cast(Any, SimpleNamespace(together=lambda act, *_: act()))
    loss = lambda number, each: torch.tensor(number * 10.0 + float(each["x"]))  # noqa: E731 - short
    actual = jagged.losses_of(mesh, loss, [{"x": torch.tensor(3.0)}, {"x": torch.tensor(5.0)}])
    assert [float(each) for each in actual] == [3.0, 15.0]
