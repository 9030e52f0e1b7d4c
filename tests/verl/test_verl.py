"""The backend inside of verl itself: its abstract classes, its losses, its worker. Skipped where verl is not installed.

`make_env.sh` makes an environment with verl, in which this file runs:

    VERL_USE_EXTERNAL_MODULES=tests.verl.cpu_platform VERL_PLATFORM=cpu pytest tests/verl
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import os
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="verl is not installed; tests/verl/make_env.sh makes an environment")

import torch
import torch.distributed as dist
import transformers
from tensordict import NonTensorData
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.utils.torch_functional import get_constant_schedule_with_warmup, get_cosine_schedule_with_warmup
from verl.workers.config import FSDPOptimizerConfig, HFModelConfig, PolicyLossConfig, TrainingWorkerConfig
from verl.workers.engine.base import BaseEngine, EngineRegistry
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss, sft_loss, value_loss

import meshwright as mw
from meshwright.integrations import verl as backend
from meshwright.integrations.verl_options import learning_rate
from meshwright.verify import run_ranks

VOCAB, TEMPERATURE = 131, 0.7
PROMPTS, ANSWERS = [3, 7, 2, 5, 4, 9, 1, 6], [5, 2, 9, 4, 11, 3, 8, 7]
MESHES: list[dict[str, int]] = [{}, {"fsdp": 2}, {"tp": 2}, {"cp": 2}, {"pp": 2}, {"fsdp": 2, "tp": 2}]
CASES = ("sft", "ppo", "seq-mean", "gspo", "value")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    at = tmp_path_factory.mktemp("verl") / "model"
    config = transformers.Qwen3Config(
        vocab_size=VOCAB, hidden_size=36, intermediate_size=44, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=10, tie_word_embeddings=False, architectures=["Qwen3ForCausalLM"],
        pad_token_id=0, eos_token_id=1, bos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(7)
    transformers.Qwen3ForCausalLM(config).float().save_pretrained(at)
    return at


def jagged(values: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(values, layout=torch.jagged)


def data_of(rows: range, **more: Any) -> Any:
    """The rows of a global batch, as a worker gets them."""
    draw = torch.Generator().manual_seed(3)
    fields: dict[str, list[Tensor]] = {}
    noise = lambda n: torch.randn(n, generator=draw, dtype=torch.float64)  # noqa: E731 - short
    for p, a in zip(PROMPTS, ANSWERS, strict=True):
        tokens = torch.randint(2, VOCAB, (p + a,), generator=draw)
        mask = torch.ones(a, dtype=torch.int64)
        mask[a // 2] = 0
        of_row = {
            "input_ids": tokens, "prompts": tokens[:p], "responses": tokens[p:], "position_ids": torch.arange(p + a),
            "loss_mask": torch.cat([torch.zeros(p, dtype=torch.int64), mask]), "response_mask": mask,
            "old_log_probs": -4.9 + 0.2 * noise(a), "advantages": noise(a), "ref_log_prob": -4.9 + 0.2 * noise(a),
            "values": noise(a), "returns": noise(a),
        }  # fmt: skip
        for name, x in of_row.items():
            fields.setdefault(name, []).append(x)
    tensors = {name: jagged([x[n] for n in rows]) for name, x in fields.items()}
    meta = {
        "use_dynamic_bsz": True, "max_token_len_per_gpu": 30, "temperature": TEMPERATURE, "global_batch_size": 8,
        "calculate_entropy": True, "use_remove_padding": True, "pad_token_id": 0,
    }  # fmt: skip
    return tu.get_tensordict(tensor_dict=tensors, non_tensor_dict={**meta, **more})


def loss_of(case: str) -> Any:
    """A loss of verl with its config."""
    if case == "sft":
        return functools.partial(sft_loss, config=None)
    if case == "value":
        config = backend.MeshwrightCriticConfig(use_dynamic_bsz=True, cliprange_value=0.5)
        return functools.partial(value_loss, config=config)
    mode = {"seq-mean": "seq-mean-token-mean", "gspo": "seq-mean-token-mean"}.get(case, "token-mean")
    config = backend.MeshwrightActorConfig(
        use_dynamic_bsz=True, rollout_n=1, entropy_coeff=0.01, use_kl_loss=True, kl_loss_coef=0.1, loss_agg_mode=mode,
        policy_loss=PolicyLossConfig(loss_mode="gspo" if case == "gspo" else "vanilla"), ppo_mini_batch_size=8,
    )  # fmt: skip
    return functools.partial(ppo_loss, config=config)


def configs(source: Path, mesh: dict[str, int], **engine: Any) -> dict[str, Any]:
    return {
        "model_config": HFModelConfig(path=str(source), load_tokenizer=False, enable_gradient_checkpointing=False),
        "engine_config": backend.MeshwrightEngineConfig(mesh=mesh, dtype="float64", **engine),
        "optimizer_config": FSDPOptimizerConfig(
            lr=1e-3, lr_warmup_steps=2, total_training_steps=9, lr_scheduler_type="cosine", clip_grad=0.5
        ),
        "checkpoint_config": CheckpointConfig(),
    }


def join() -> None:
    if not dist.is_initialized():
        os.environ.setdefault("RANK", "0")
        os.environ.setdefault("WORLD_SIZE", "1")
        os.environ.setdefault("LOCAL_RANK", os.environ["RANK"])
        dist.init_process_group("cpu:gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))


def engine_of(source: Path, mesh: dict[str, int], case: str, **engine: Any) -> Any:
    join()
    kind = "value_model" if case == "value" else "language_model"
    made = EngineRegistry.new(kind, "meshwright", **configs(source, mesh, **engine))
    made.initialize()
    return made


def share(engine: Any, **more: Any) -> Any:
    """This data rank's rows: every nth, as verl's dispatch would give some."""
    num = engine.get_data_parallel_size()
    size = len(PROMPTS) // num
    return data_of(range(engine.get_data_parallel_rank() * size, (engine.get_data_parallel_rank() + 1) * size), **more)


def trained(source: Path, mesh: dict[str, int]) -> dict[str, Any]:
    """For each loss: gradients, then two steps through `train_batch`, then scores."""
    actual: dict[str, Any] = {}
    for case in CASES:
        engine = engine_of(source, mesh, case)
        with engine.train_mode():
            out = engine.forward_backward_batch(share(engine, return_model_output=True), loss_of(case))
            grads = {name: x.clone() for name, x in mw.gather(engine.model, "grad").items()}
            weights = mw.gather(engine.model)
        steps = []
        for _ in range(2):
            with engine.train_mode():
                steps.append(engine.train_batch(share(engine), loss_function=loss_of(case)))
            lr = engine.lr_scheduler_step()
        with engine.eval_mode():
            scored = engine.infer_batch(share(engine))
            judged = engine.infer_batch(share(engine), loss_function=loss_of(case))
        source_rank = engine.is_mp_src_rank_with_outputs()
        plain = lambda o: {k: [x.clone() for x in v.unbind()] for k, v in o["model_output"].items()}  # noqa: E731
        metrics = {
            k: v.values if hasattr(v, "values") and not isinstance(v, dict) else v
            for k, v in out["metrics"].items()
        } if source_rank else {}  # fmt: skip
        actual[case] = {
            "grads": grads, "weights": weights, "source": source_rank, "loss": sum(out["loss"]), "metrics": metrics,
            "norms": [s["metrics"].get("grad_norm") for s in steps], "lr": lr,
            "output": plain(out) if source_rank else {},
            "scored": plain(scored), "judged": sum(judged["loss"]), "data_rank": engine.get_data_parallel_rank(),
        }  # fmt: skip
    return actual


_runs: dict[str, list[dict[str, Any]]] = {}


def run(source: Path, mesh: dict[str, int]) -> list[dict[str, Any]]:
    key = str(mesh)
    if key not in _runs:
        _runs[key] = run_ranks(math.prod(mesh.values()), trained, source, mesh, seconds=300)
    return _runs[key]


def by_transformers(source: Path, case: str, weights: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """The loss of verl on the whole global batch at once, on logits of transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float64, attn_implementation="eager")
    data = data_of(range(len(PROMPTS)))
    num = int(data["loss_mask"].values().sum())
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=num)
    offsets = data["input_ids"].offsets()
    hidden = torch.cat([model.model(tokens[None]).last_hidden_state[0] for tokens in data["input_ids"].unbind()])
    head = weights["score.weight"].double().requires_grad_() if case == "value" else None
    if head is not None:
        output = {"values": (hidden @ head.t())[:, 0]}
    else:
        logprobs = (model.lm_head(hidden) / TEMPERATURE).log_softmax(-1)
        labels = torch.roll(data["input_ids"].values(), -1)
        output = {
            "log_probs": logprobs.gather(1, labels[:, None])[:, 0],
            "entropy": -(logprobs.exp() * logprobs).sum(-1),
        }
    output = {name: torch.nested.nested_tensor_from_jagged(x, offsets) for name, x in output.items()}
    loss, _ = loss_of(case)(model_output=output, data=data, dp_group=None)
    loss.backward()
    grads = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    return loss.item(), {**grads, "score.weight": head.grad} if head is not None else grads


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_gradients_equal_those_of_verls_loss_on_transformers(source: Path, mesh: dict[str, int], case: str) -> None:
    ranks = [each[case] for each in run(source, mesh)]
    loss, grads = by_transformers(source, case, ranks[0]["weights"])
    actual = ranks[0]["grads"]
    assert {k for k in grads if k in actual} == actual.keys()
    worst = max(float((actual[k] - grads[k]).norm() / grads[k].norm().clamp(min=1e-12)) for k in actual)
    assert worst < 1e-5, worst  # RoPE and norms of transformers are float32 in a float64 model
    sources = [each for each in ranks if each["source"]]
    assert len(sources) == mesh.get("fsdp", 1)
    # verl reports the mean over data ranks of what each has summed
    assert abs(sum(each["loss"] for each in sources) / len(sources) - loss) < 1e-5
    norm = torch.stack([x.norm() for x in actual.values()]).norm()
    assert all(abs(each["norms"][0] - norm) < 1e-9 * norm for each in sources)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mesh", MESHES[1:], ids=str)
def test_steps_scores_and_metrics_equal_those_of_one_process(source: Path, mesh: dict[str, int], case: str) -> None:
    (one,) = [each[case] for each in run(source, {})]
    actual = run(source, mesh)[0][case]["grads"]
    worst = max(float((actual[k] - x).norm() / x.norm().clamp(min=1e-12)) for k, x in one["grads"].items())
    assert actual.keys() == one["grads"].keys()
    assert worst < 1e-9, worst
    sources = sorted((each[case] for each in run(source, mesh) if each[case]["source"]), key=lambda x: x["data_rank"])
    for key in ("output", "scored"):
        for name in one[key]:
            rows = [row for each in sources for row in each[key][name]]
            assert all(torch.allclose(a, b, rtol=0, atol=1e-9) for a, b in zip(rows, one[key][name], strict=True)), name
    for each in sources:
        assert each["lr"] == one["lr"]
        assert all(abs(a - b) < 1e-9 for a, b in zip(each["norms"], one["norms"], strict=True))
    for name in ("judged", "loss"):
        assert abs(sum(each[name] for each in sources) / len(sources) - one[name]) < 1e-9
    for name in ("actor/pg_loss", "kl_loss", "critic/vf_loss"):  # verl: mean over data ranks, sum over micro-batches
        if name in one["metrics"]:
            mean = sum(sum(each["metrics"][name]) for each in sources) / len(sources)
            assert abs(mean - sum(one["metrics"][name])) < 1e-9, name


def test_every_method_of_the_abstract_class_is_implemented_with_its_arguments() -> None:
    optional = {"get_per_tensor_param_shard", "prime_delta_snapshots", "get_per_tensor_param_delta_shard"}
    inherited = {"train_batch", "infer_batch"}
    for name, method in inspect.getmembers(BaseEngine):
        if name.startswith("_") or name in optional | inherited or not callable(method):
            continue
        own = inspect.signature(vars(backend.MeshwrightEngine)[name])
        for parameter in inspect.signature(method).parameters.values():
            assert parameter.name in own.parameters, (name, parameter)
            assert own.parameters[parameter.name].default == parameter.default, (name, parameter)
    assert isinstance(vars(backend.MeshwrightEngine)["is_param_offload_enabled"], property)


def test_the_methods_kept_as_data_are_those_of_this_verl() -> None:
    kept = json.loads((Path(__file__).parents[1] / "verl_0_9_1.json").read_text())
    actual = {
        name: list(inspect.signature(method).parameters)[1:]
        for name, method in vars(BaseEngine).items()
        if inspect.isfunction(method) and not name.startswith("_")
    }
    assert kept["methods"] == actual


@pytest.mark.parametrize("kind", ["constant", "cosine"])
@pytest.mark.parametrize("warmup", [0, 3])
def test_learning_rates_are_those_of_verls_schedules(kind: str, warmup: int) -> None:
    for zero_indexed in (True, False):
        optim = FSDPOptimizerConfig(
            lr=2e-4, lr_warmup_steps=warmup, total_training_steps=10, lr_scheduler_type=kind, min_lr_ratio=0.1,
            zero_indexed_step=zero_indexed,
        )  # fmt: skip
        sgd = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=optim.lr)
        made: LambdaLR = (
            get_constant_schedule_with_warmup(sgd, warmup) if kind == "constant"
            else get_cosine_schedule_with_warmup(sgd, warmup, 10, min_lr_ratio=0.1, zero_indexed_step=zero_indexed)
        )  # fmt: skip
        for step in range(12):
            assert learning_rate(optim, step) == pytest.approx(made.get_last_lr()[0], rel=1e-15)
            sgd.step()
            made.step()


def worked(source: Path, mesh: dict[str, int], at: Path) -> list[dict[str, Any]]:
    """Steps through verl's own worker, a checkpoint, and a step after it."""
    join()
    worker = TrainingWorker(TrainingWorkerConfig(model_type="language_model", **configs(source, mesh)))
    worker.reset()
    worker.set_loss_fn(loss_of("sft"))
    metrics = []
    for step in range(4):
        if step == 2:
            worker.save_checkpoint(str(at / "global_step_2"), None, 2, 1)
        batch = share(worker.engine, update_lr_scheduler=True, global_token_num=NonTensorData([8] * len(PROMPTS)))
        out = worker.train_batch(batch)
        metrics.append(dict(tu.get(out, "metrics")) if out is not None else {})
        if step == 3 and not at.name.endswith("again"):
            worker.load_checkpoint(str(at / "global_step_2"))
            batch = share(worker.engine, update_lr_scheduler=True, global_token_num=NonTensorData([8] * len(PROMPTS)))
            out = worker.train_batch(batch)
            metrics.append(dict(tu.get(out, "metrics")) if out is not None else {})
    batch = share(worker.engine, mini_batch_size=4, epochs=2, seed=0, global_batch_size=4)
    worker.set_loss_fn(loss_of("ppo"))
    out = worker.train_mini_batch(batch)  # as verl trains an actor
    metrics.append(dict(tu.get(out, "metrics")) if out is not None else {})
    scored = worker.infer_batch(share(worker.engine, compute_loss=False, global_token_num=NonTensorData([8])))
    metrics.append({"scores": [x.sum().item() for x in scored["log_probs"].unbind()]} if scored is not None else {})
    return metrics


def test_verls_worker_trains_saves_and_resumes(source: Path, tmp_path: Path) -> None:
    for mesh in ({"fsdp": 2}, {"tp": 2}):
        first, *_ = run_ranks(2, worked, source, mesh, tmp_path / str(mesh), seconds=300)
        losses = [each["loss"] for each in first[:5]]
        assert losses[0] > losses[2]
        assert losses[4] == pytest.approx(losses[2], rel=1e-12)
        assert first[4]["lr"] == first[2]["lr"]
        assert len(first[5]["grad_norm"]) == 4  # two epochs of two mini-batches
        assert all(math.isfinite(x) for x in [*first[5]["actor/pg_loss"], *first[6]["scores"]])


def test_hydra_finds_the_configs_of_all_roles() -> None:
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf
    from verl.utils.config import omega_conf_to_dataclass

    with initialize_config_module("verl.trainer.config", version_base=None):
        path = "hydra.searchpath=[pkg://meshwright.integrations.verl_config]"
        more = ["actor_rollout_ref.actor.meshwright.mesh.tp=2", "actor_rollout_ref.actor.use_dynamic_bsz=True"]
        config = compose("ppo_trainer", [path, "model_engine=meshwright", *more])
        sft = compose("sft_trainer_engine", [path, "engine=meshwright", "engine.mesh.tp=2"])
    axes = {"pp": 1, "replicate": 1, "fsdp": None, "cp": 1, "tp": 2, "ep": 1}
    assert omega_conf_to_dataclass(sft.engine).mesh == axes
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert isinstance(actor.engine, backend.MeshwrightEngineConfig)
    assert (actor.engine.strategy, actor.engine.mesh, actor.engine.forward_only) == ("meshwright", axes, False)
    OmegaConf.set_struct(config, False)
    config.actor_rollout_ref.ref.use_dynamic_bsz = True
    for name in ("log_prob_micro_batch_size", "log_prob_micro_batch_size_per_gpu", "log_prob_use_dynamic_bsz",
                 "log_prob_max_token_len_per_gpu"):  # fmt: skip
        config.actor_rollout_ref.ref.pop(name, None)  # verl renames them
    config.actor_rollout_ref.ref.update(ppo_mini_batch_size=8)
    ref = omega_conf_to_dataclass(config.actor_rollout_ref.ref)
    assert (ref.engine.mesh, ref.engine.forward_only) == (axes, True)
    config.critic.use_dynamic_bsz = True
    config.critic.pop("model")
    assert omega_conf_to_dataclass(config.critic).engine.strategy == "meshwright"


TEMPLATE = (
    "{% for m in messages %}{{ ' <|' + m['role'] + '|> ' + m['content'] + ' <eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ ' <|assistant|> ' }}{% endif %}"
)


def chats(at: Path, source: Path) -> None:
    """A tokenizer of words beside a model, and conversations that reverse them, in the format of verl."""
    import pandas
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<eos>", "<unk>", "<|user|>", "<|assistant|>", *(f"w{n}" for n in range(120))]
    of_words = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    of_words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=of_words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    tokenizer.chat_template = TEMPLATE
    shutil.copytree(source, at / "model")
    tokenizer.save_pretrained(at / "model")
    draw = random.Random(0)

    def row() -> dict[str, Any]:
        some = [f"w{draw.randrange(120)}" for _ in range(draw.randint(2, 6))]
        roles = {"user": " ".join(some), "assistant": " ".join(reversed(some))}
        return {"messages": [{"role": role, "content": content} for role, content in roles.items()]}

    pandas.DataFrame([row() for _ in range(64)]).to_parquet(at / "train.parquet")
    pandas.DataFrame([row() for _ in range(16)]).to_parquet(at / "val.parquet")


def fitted(at: Path, mesh: dict[str, int], out: str, steps: int, more: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Train with verl's SFT trainer; return what it logs on this rank.

    `run_sft` itself cannot start on a host: verl/utils/distributed.py:53 asks for the backend "cpu:gloo,cpu:gloo",
    which torch refuses. So the process group is made here, and the rest is the trainer's.
    """
    from hydra import compose, initialize_config_module
    from verl.trainer.sft_trainer import SFTTrainer
    from verl.utils import tracking

    join()
    logged: list[dict[str, Any]] = []
    tracking.Tracking.log = lambda self, data, step, **_: logged.append({**data, "step": step})
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("sft_trainer_engine", [
            "hydra.searchpath=[pkg://meshwright.integrations.verl_config]", "engine=meshwright",
            *(f"engine.mesh.{axis}={size}" for axis, size in mesh.items()), f"model.path={at / 'model'}",
            f"data.train_files={at / 'train.parquet'}", f"data.val_files={at / 'val.parquet'}",
            "data.train_batch_size=8", "data.max_token_len_per_gpu=64", "data.num_workers=0", "data.max_length=64",
            "engine.dtype=float64", "optim.lr=1e-2", f"trainer.total_training_steps={steps}", "trainer.total_epochs=2",
            f"trainer.default_local_dir={at / out}", "trainer.save_freq=4", "trainer.test_freq=8",
            "trainer.logger=[console]", "trainer.device=cpu", "trainer.n_gpus_per_node=2", *more,
        ])  # fmt: skip
    SFTTrainer(config).fit()
    return logged


def test_verls_sft_trainer_trains_and_resumes_on_any_mesh(source: Path, tmp_path: Path) -> None:
    chats(tmp_path, source)
    runs = {name: run_ranks(2, fitted, tmp_path, {name: 2}, name, 16, seconds=300)[0] for name in ("fsdp", "tp")}
    losses = {name: [each["train/loss"] for each in run if "train/loss" in each] for name, run in runs.items()}
    assert len(losses["fsdp"]) == len(losses["tp"]) == 16
    assert losses["fsdp"][-1] < losses["fsdp"][0] - 0.5
    assert runs["fsdp"][-1]["val/loss"] < losses["fsdp"][0]
    assert losses["fsdp"] == pytest.approx(losses["tp"], rel=1e-6)  # verl sums losses in float32
    norms = [[each["train/grad_norm"] for each in run if "train/loss" in each] for run in runs.values()]
    assert norms[0] == pytest.approx(norms[1], rel=1e-9)  # batches of both meshes have the same rows
    shutil.copytree(tmp_path / "tp", tmp_path / "again")
    (tmp_path / "again" / "latest_checkpointed_iteration.txt").write_text("12")
    again = run_ranks(2, fitted, tmp_path, {"tp": 2}, "again", 16, seconds=300)[0]
    resumed = [each["train/loss"] for each in again if "train/loss" in each]
    assert resumed == pytest.approx(losses["tp"][12:], rel=1e-9)
