"""The engine inside of AReaL itself: its abstract class, its losses, its actors. Skipped where AReaL is not installed.

`make_env.sh` makes an environment with AReaL, in which this file runs.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("areal", reason="AReaL is not installed; tests/areal/make_env.sh makes an environment")

import areal.engine
import torch
import torch.distributed as dist
import transformers
from areal.api import FinetuneSpec, ModelAllocation, SaveLoadMeta, TrainEngine, WeightUpdateMeta
from areal.api.cli_args import (
    DPOEngineConfig,
    MicroBatchSpec,
    NameResolveConfig,
    OptimizerConfig,
    PPOActorConfig,
    PPOCriticConfig,
    TrainEngineConfig,
)
from areal.engine.core.distributed import init_custom_process_group
from areal.engine.fsdp_utils import get_cosine_schedule_with_warmup
from areal.trainer.dpo.dpo_engine import _dpo_loss_weight, compute_dpo_loss
from areal.trainer.ppo import actor as areal_actor
from areal.trainer.ppo import critic as areal_critic
from areal.trainer.rw.rw_engine import _rw_loss_weight, compute_rw_loss
from areal.trainer.sft.lm_engine import compute_packed_sft_loss
from areal.utils import name_resolve, names, stats_tracker
from areal.utils.data import pack_tensor_dict, split_padded_tensor_dict_into_mb_list
from safetensors.torch import load_file
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

import meshwright as mw
from meshwright.integrations import areal as backend
from meshwright.integrations.areal_options import learning_rate
from meshwright.verify import run_ranks
from tests.areal.contract import contract

VOCAB, TEMPERATURE, TOTAL = 131, 0.7, 10
PROMPTS, ANSWERS = [3, 7, 2, 5, 4, 9, 1, 6], [5, 2, 9, 4, 11, 3, 8, 7]
BACKENDS = ["fsdp:d1", "fsdp:d2", "fsdp:t2", "fsdp:c2", "megatron:p2", "fsdp:d2t2"]
CASES = ("sft", "grpo", "gspo", "critic", "rw", "dpo")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    at = tmp_path_factory.mktemp("areal") / "model"
    config = transformers.Qwen3Config(
        vocab_size=VOCAB, hidden_size=36, intermediate_size=44, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=10, tie_word_embeddings=False, architectures=["Qwen3ForCausalLM"],
        pad_token_id=0, eos_token_id=1, bos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(7)
    transformers.Qwen3ForCausalLM(config).float().save_pretrained(at)
    return at


def rows(numbers: range) -> dict[str, Tensor]:
    """Rows of a padded batch, as AReaL's trainers make them: masks and old values are already shifted."""
    draw, width = torch.Generator().manual_seed(3), max(p + a for p, a in zip(PROMPTS, ANSWERS, strict=True))
    actual: dict[str, list[Tensor]] = {}
    for p, a in zip(PROMPTS, ANSWERS, strict=True):
        noise = torch.randn(5, width, generator=draw)
        at = torch.arange(width)
        mask = (at >= p - 1) & (at < p + a - 1) & (at != p + a // 2)
        of_row = {
            "input_ids": torch.randint(2, VOCAB, (width,), generator=draw) * (at < p + a), "attention_mask": at < p + a,
            "loss_mask": mask.float(), "logprobs": -4.9 + 0.2 * noise[0], "prox_logp": -4.9 + 0.2 * noise[1],
            "advantages": noise[2], "values": noise[3], "returns": noise[4], "ref_logprobs": -4.9 + 0.2 * noise[1],
        }  # fmt: skip
        for name, x in of_row.items():
            actual.setdefault(name, []).append(x)
    return {name: torch.stack([x[n] for n in numbers]) for name, x in actual.items()}


def in_float64() -> None:
    """Let AReaL's tracker take statistics in float64: it refuses all but float32."""
    record = stats_tracker.stat
    stats_tracker.stat = lambda denominator, **stats: record(denominator, **{k: x.float() for k, x in stats.items()})


in_float64()
Loss = tuple[Callable[..., Any], Callable[..., Any]]


def loss_of(case: str) -> Loss:
    """A loss of AReaL, and its weight."""
    tokens = lambda mb: mb["loss_mask"].count_nonzero()  # noqa: E731 - short
    if case == "sft":
        return compute_packed_sft_loss, tokens
    if case == "critic":
        return functools.partial(areal_critic.ppo_loss_fn, eps_clip=0.5), tokens
    if case == "rw":
        return compute_rw_loss, _rw_loss_weight
    if case == "dpo":
        return functools.partial(compute_dpo_loss, beta=0.1), _dpo_loss_weight
    level = "sequence" if case == "gspo" else "token"
    loss = functools.partial(
        areal_actor.grpo_loss_fn, eps_clip=0.2, eps_clip_higher=0.3, c_clip=3.0, importance_sampling_level=level,
        use_decoupled_loss=True,
    )  # fmt: skip
    return loss, tokens


def config_of(source: Path, case: str, kind: Any = TrainEngineConfig, **changes: Any) -> Any:
    """A config of AReaL. It allows no float64, so that is set afterwards."""
    granularity = 2 if case in ("rw", "dpo") else 1
    config = kind(**{
        **dict(experiment_name="e", trial_name="t", path=str(source), is_critic=case in ("critic", "rw"),
        temperature=TEMPERATURE, mb_spec=MicroBatchSpec(n_mbs=2, granularity=granularity), backend="fsdp:d1",
        optimizer=OptimizerConfig(lr=1e-3, lr_scheduler_type="cosine", warmup_steps_proportion=0.2)), **changes,
    })  # fmt: skip
    config.dtype = "float64"
    return config


def started(engine: Any, where: str) -> Any:
    engine.config.backend = where
    engine.create_process_group()
    engine.initialize(None, FinetuneSpec(total_train_epochs=1, dataset_size=TOTAL * 8, train_batch_size=8))
    return engine


def keep_grads(engine: Any) -> dict[str, Tensor]:
    """Collect the gradients of the next step."""
    kept, step = dict[str, Tensor](), engine.optimizer_step

    def optimizer_step() -> dict[str, float]:
        kept.clear()
        kept.update({name: x.clone() for name, x in mw.gather(engine.model, "grad").items()})
        return step()

    engine.optimizer_step = optimizer_step
    return kept


def share(engine: Any) -> dict[str, Tensor]:
    size = len(PROMPTS) // engine.data_parallel_world_size
    return rows(range(engine.data_parallel_rank * size, (engine.data_parallel_rank + 1) * size))


def trained(source: Path, where: str) -> dict[str, Any]:
    """For each loss: scores, gradients and two steps, then the loss again."""
    actual: dict[str, Any] = {}
    for case in CASES:
        engine = started(backend.MeshwrightEngine(config_of(source, case)), where)
        weights, grads = mw.gather(engine.model), keep_grads(engine)
        scores = engine.forward(share(engine))
        engine.lr_scheduler_step()
        first = engine.train().train_batch(share(engine), *loss_of(case))
        kept = dict(grads)
        engine.lr_scheduler_step()
        second = engine.train_batch(share(engine), *loss_of(case))
        actual[case] = {
            "weights": weights, "grads": kept, "steps": [first, second], "scores": scores,
            "judged": float(engine.eval().eval_batch(share(engine), *loss_of(case))),
            "data_rank": engine.data_parallel_rank, "head": engine.is_data_parallel_head(),
            "stats": engine.export_stats(),
        }  # fmt: skip
    return actual


_runs: dict[str, list[dict[str, Any]]] = {}


def run(source: Path, where: str) -> list[dict[str, Any]]:
    if where not in _runs:
        size = math.prod(int(each) for each in where if each.isdigit())
        _runs[where] = run_ranks(size, trained, source, where, seconds=300)
    return _runs[where]


def by_transformers(source: Path, case: str, weights: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Gradients and scores of AReaL's loss on the micro-batches that AReaL makes, on logits of transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float64, attn_implementation="eager")
    loss_fn, weigh = loss_of(case)
    granularity = 2 if case in ("rw", "dpo") else 1
    spec = MicroBatchSpec(n_mbs=2, granularity=granularity)
    cut = split_padded_tensor_dict_into_mb_list(rows(range(len(PROMPTS))), spec)
    mbs = [pack_tensor_dict(mb) for mb in cut.mbs]
    head = weights["score.weight"].double().requires_grad_() if case in ("critic", "rw") else None
    total = sum(float(weigh(mb)) for mb in mbs)
    outputs: list[Tensor] = []
    for mb in mbs:
        sizes = mb["cu_seqlens"].diff().tolist()
        hidden = [model.model(tokens[None]).last_hidden_state[0] for tokens in mb["input_ids"].split(sizes)]
        if head is not None:
            scores = [torch.cat(hidden) @ head[0]]
        else:
            logprobs = (model.lm_head(torch.cat(hidden)) / TEMPERATURE).log_softmax(-1)
            labels = torch.roll(mb["input_ids"], -1)
            scores = [logprobs.gather(1, labels[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)]
        outputs += scores[0].detach().split(sizes)
        (loss_fn(*scores, mb) * float(weigh(mb)) / total).backward()
    grads = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    stats_tracker.export_all()  # and forget them
    ordered = [outputs[n] for n in cut.backward_indices]
    return {**grads, **({"score.weight": head.grad} if head is not None else {})}, ordered


def distance(actual: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    return max(float((actual[k] - wanted[k]).norm() / wanted[k].norm().clamp(min=1e-12)) for k in actual)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("where", BACKENDS)
def test_gradients_and_scores_equal_those_of_areals_loss_on_transformers(source: Path, where: str, case: str) -> None:
    ranks = [each[case] for each in run(source, where)]
    grads, scores = by_transformers(source, case, ranks[0]["weights"])
    assert ranks[0]["grads"].keys() == {k for k in grads if k in ranks[0]["grads"]}
    # RoPE and norms of transformers are float32 in a float64 model; AReaL's SFT loss adds 1e-5 to its divisor.
    assert distance(ranks[0]["grads"], grads) < 2e-5
    heads = sorted((each for each in ranks if each["head"]), key=lambda each: each["data_rank"])
    assert len(heads) == (2 if "d2" in where else 1)
    actual = [row for each in heads for row in each["scores"]]
    for n, (row, x) in enumerate(zip(actual, scores, strict=True)):
        end = PROMPTS[n] + ANSWERS[n] - (case not in ("critic", "rw"))  # the last token predicts nothing
        assert torch.allclose(row[:end].double(), x[:end], rtol=0, atol=1e-5)
        assert not row[PROMPTS[n] + ANSWERS[n] :].any()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("where", BACKENDS[1:])
def test_steps_equal_those_of_one_process(source: Path, where: str, case: str) -> None:
    (one,) = [each[case] for each in run(source, "fsdp:d1")]
    ranks = [each[case] for each in run(source, where)]
    close = 2e-6 if case == "sft" else 1e-9  # AReaL's SFT loss adds 1e-5 to the number of tokens of each micro-batch
    assert distance(ranks[0]["grads"], one["grads"]) < close
    for each in ranks:
        assert each["stats"].keys() == one["stats"].keys()
        assert each["judged"] == pytest.approx(one["judged"], rel=1e-5)
        for step, wanted in zip(each["steps"], one["steps"], strict=True):
            assert step.keys() == {"update_successful", "grad_norm", "lr", "num_micro_batches"}
            assert step["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-5)
            assert step["lr"] == wanted["lr"]
            assert step["update_successful"] == 1.0


# The contract


def test_every_method_of_the_abstract_class_is_implemented_with_its_arguments() -> None:
    assert not backend.MeshwrightEngine.__abstractmethods__
    for name in TrainEngine.__abstractmethods__:
        method, own = inspect.getattr_static(TrainEngine, name), inspect.getattr_static(backend.MeshwrightEngine, name)
        assert isinstance(own, property) == isinstance(method, property), name
        if isinstance(method, property) or name == "initialize":  # whose arguments each engine names itself
            continue
        ours, of_areal = (inspect.signature(each).parameters for each in (own, method))
        assert {k: p.default for k, p in ours.items()} == {k: p.default for k, p in of_areal.items()}, name
    fsdp = inspect.signature(areal.engine.FSDPEngine.initialize).parameters
    assert list(inspect.signature(backend.MeshwrightEngine.initialize).parameters) == list(fsdp)


def test_what_is_kept_as_data_is_this_areal() -> None:
    kept = json.loads((Path(__file__).parents[1] / "areal_1_0_4.json").read_text())
    assert kept == contract(Path(inspect.getfile(areal)).parent)


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0.0, 0.3])
def test_learning_rates_are_those_of_areals_schedules(kind: str, warmup: float) -> None:
    least = 0.1 if kind == "cosine" else 0.0
    optim = OptimizerConfig(lr=2e-4, lr_scheduler_type=kind, warmup_steps_proportion=warmup, min_lr_ratio=least)
    sgd, num = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=optim.lr), int(warmup * TOTAL)
    made: LambdaLR = {
        "constant": lambda: transformers.get_constant_schedule_with_warmup(sgd, num),
        "linear": lambda: transformers.get_linear_schedule_with_warmup(sgd, num, TOTAL),
        "cosine": lambda: get_cosine_schedule_with_warmup(sgd, num, TOTAL, min_lr_ratio=least),
    }[kind]()
    for step in range(TOTAL + 2):
        assert learning_rate(optim, TOTAL, step) == pytest.approx(made.get_last_lr()[0], rel=1e-14, abs=1e-20)
        sgd.step()
        made.step()


def test_backends_of_areal_name_the_mesh() -> None:
    from meshwright.integrations.areal_options import mesh_axes

    strategy = ModelAllocation.from_str("megatron:d2p2t2e2").parallel
    assert mesh_axes(strategy, replicate=2) == {"pp": 2, "replicate": 2, "fsdp": 1, "cp": 1, "tp": 2, "ep": 2}


def test_registered_engines_are_those_that_areals_trainers_make() -> None:
    backend.register("fsdp")
    assert areal.engine.FSDPPPOActor is backend.MeshwrightPPOActor
    assert areal.engine.FSDPDPOEngine is backend.MeshwrightDPOEngine
    assert "MegatronPPOActor" not in vars(areal.engine)  # it is imported when it is asked for, and needs Megatron
    with pytest.raises(mw.ConfigError, match="archon"):
        backend.register("archon")


# AReaL's own actors


def by_roles(source: Path, where: str) -> dict[str, Any]:
    """A step of each of AReaL's roles, through AReaL's methods, on lists of trajectories.

    All but the reward model: AReaL's `train_rw` reads `cu_seqlens` of a padded batch, which has none.
    """
    common = dict(kl_ctl=0.1, use_decoupled_loss=True, ppo_n_minibatches=2, adv_norm=None, eps_clip=0.2)
    ppo = PPOActorConfig
    actor = started(backend.MeshwrightPPOActor(config_of(source, "grpo", ppo, **common)), where)
    pairs = backend.MeshwrightDPOEngine(config_of(source, "dpo", DPOEngineConfig))
    assert pairs.config.mb_spec.granularity == 2
    critic = started(
        backend.MeshwrightPPOCritic(config_of(source, "critic", PPOCriticConfig, ppo_n_minibatches=2)), where
    )
    lm = started(backend.MeshwrightLMEngine(config_of(source, "sft")), where)
    dpo = started(pairs, where)
    given = share(actor)
    given |= {"loss_mask": torch.roll(given["loss_mask"], 1), "rewards": given["returns"][:, 0].clone()}
    for name in ("advantages", "values", "returns", "prox_logp"):
        del given[name]
    size = len(given["rewards"]) // 2

    def trajectories() -> list[dict[str, Tensor]]:
        return [{name: x[n * size : (n + 1) * size].clone() for name, x in given.items()} for n in range(2)]

    engines = {"actor": actor, "critic": critic, "lm": lm, "dpo": dpo}
    for engine in engines.values():
        engine.lr_scheduler_step()
    rollout = trajectories()
    for each, logp, values in zip(
        rollout, actor.compute_logp(trajectories()), critic.compute_values(trajectories()), strict=True
    ):
        each.update(prox_logp=logp, values=values)
    advantages = actor.compute_advantages(rollout)
    critic.ppo_update([{name: x.clone() for name, x in each.items()} for each in advantages])
    actor.ppo_update(advantages)
    lm.train_lm(trajectories())
    shifted = trajectories()
    for each, logp in zip(shifted, dpo.compute_logp(trajectories()), strict=True):
        each["ref_logprobs"] = logp
    dpo.train_dpo(shifted)
    lm.evaluate_lm(trajectories())
    stats = actor.export_stats()
    assert {"ppo_actor/update/grad_norm", "ppo_critic/grad_norm", "sft/loss/avg", "dpo/loss/avg"} <= {*stats}, sorted(
        stats
    )
    return {name: mw.gather(engine.model) for name, engine in engines.items()} | {"stats": stats}


def test_areals_roles_train_alike_on_every_mesh(source: Path) -> None:
    (one,) = run_ranks(1, by_roles, source, "fsdp:d1", seconds=300)
    for where in ("fsdp:t2", "megatron:p2"):
        actual = run_ranks(2, by_roles, source, where, seconds=300)
        for name in ("actor", "critic", "lm", "dpo"):
            before = distance(actual[0][name], one[name])
            assert before < 1e-6, (where, name, before)
        for name, value in one["stats"].items():
            if "lr" not in name:
                assert all(each["stats"][name] == pytest.approx(value, rel=1e-4, abs=1e-6) for each in actual), name


# Weights


class Servers:
    """An inference engine whose server is a process that joins a group and keeps what it gets."""

    def __init__(self, source: Path) -> None:
        self.calls, self.source = list[str](), source
        self.fork = multiprocessing.get_context("fork")
        self.specs, self.out = self.fork.Queue(), self.fork.Queue()

    def done(self, call: str) -> Future[None]:
        self.calls.append(call)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def pause_generation(self) -> None:
        self.done("pause")

    def continue_generation(self) -> None:
        self.done("continue")

    def update_weights_from_disk(self, meta: Any) -> Future[None]:
        return self.done(f"read {Path(meta.path).name}")

    def init_weights_update_group(self, meta: Any) -> Future[None]:
        at = f"tcp://{meta.nccl_master_address}:{meta.nccl_master_port}"
        self.pid = os.fork()  # the rank is a daemon of the test, which multiprocessing gives no children
        if not self.pid:
            serve(at, meta.nccl_group_name, self.specs, self.out)
            self.out.close()
            self.out.join_thread()
            os._exit(0)
        return self.done("join")

    def update_weights_from_distributed(self, meta: Any, specs: Any) -> Future[None]:
        self.specs.put([(spec.name, spec.shape, spec.dtype) for spec in specs])
        return self.done("receive")


def serve(at: str, name: str, specs: Any, out: Any) -> None:
    """Receive as AReaL's servers do: a broadcast for each announced tensor."""
    group = init_custom_process_group("gloo", at, world_size=2, rank=1, group_name=name)
    while (announced := specs.get(timeout=60)) is not None:
        for key, shape, dtype in announced:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            dist.broadcast(tensor, src=0, group=group)
            out.put((key, tensor.double().sum().item()))
    out.put(None)


def handed_over(source: Path, at: Path, where: str) -> dict[str, Any]:
    engine = started(backend.MeshwrightLMEngine(config_of(source, "sft", weight_update_mode="disk")), where)
    name_resolve.reconfigure(NameResolveConfig(type="nfs", nfs_record_root=str(at / "names")))
    servers = Servers(source)
    engine.set_version(3)
    engine.connect_engine(servers, WeightUpdateMeta(type="disk", path=str(at / "update")))
    engine.update_weights(WeightUpdateMeta(type="disk", path=str(at / "update")))
    actual: dict[str, Any] = {"disk": list(servers.calls), "head": engine.is_data_parallel_head()}
    if servers.calls:
        actual["name"] = float(name_resolve.get(names.update_weights_from_disk("e", "t", 3)))
    servers.calls.clear()
    network = WeightUpdateMeta(type="xccl", gen_allocation=ModelAllocation.from_str("sglang:d1"))
    network.weight_chunked_mem_mb = 0
    engine.connect_engine(servers, network)
    engine.update_weights(network)
    actual["calls"], actual["weights"] = servers.calls, mw.gather(engine.model)
    if servers.calls:
        servers.specs.put(None)
        actual["sums"] = dict(iter(functools.partial(servers.out.get, timeout=60), None))
        os.waitpid(servers.pid, 0)
    kept = SaveLoadMeta(path=str(at / "kept"), weight_format="dcp", with_optim=True)
    engine.train_batch(share(engine), *loss_of("sft"))
    engine.save(kept)
    engine.lr_scheduler_step()
    norms = [engine.train_batch(share(engine), *loss_of("sft"))["grad_norm"]]
    engine.load(kept)
    engine.lr_scheduler_step()
    norms.append(engine.train_batch(share(engine), *loss_of("sft"))["grad_norm"])
    engine.destroy()
    return {**actual, "norms": norms, "initialized": engine.initialized, "memory": engine.get_device_stats().mem_used}


def test_weights_reach_servers_and_files(source: Path, tmp_path: Path) -> None:
    for where in ("fsdp:d2", "fsdp:t2"):
        at = tmp_path / where.replace(":", "-")
        at.mkdir()
        first, second = run_ranks(2, handed_over, source, at, where, seconds=300)
        assert first["disk"] == ["pause", "read update", "continue"]
        assert first["name"] > 0
        weights, files = first["weights"], load_file(at / "update" / "model.safetensors")
        assert weights.keys() == files.keys()
        assert first["calls"] == ["join", "pause", *["receive"] * len(weights), "continue"]
        assert second["calls"] == second["disk"] == []
        assert first["sums"] == pytest.approx({name: x.double().sum().item() for name, x in weights.items()})
        assert first["norms"][0] == first["norms"][1]
        assert not first["initialized"]
