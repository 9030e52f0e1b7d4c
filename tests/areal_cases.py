"""What tests of the engine of AReaL run on ranks."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import meshwright as mw
from tests import fake_areal
from tests.fake_areal import SaveLoadMeta, WeightUpdateMeta

# Rows of a padded batch. One has no tokens to learn from: a micro-batch of it alone has the weight 0.
SIZES, PROMPT, UNLEARNT, TEMPERATURE = [9, 4, 13, 3, 6, 11, 5, 14], 2, 2, 0.7
WIDTH = 15


@functools.cache
def backend() -> Any:
    """The modules, imported with the names of AReaL that they use."""
    names = [f"meshwright.integrations.areal{part}" for part in ("", "_engine", "_batches", "_weights")]
    with fake_areal.installed():
        for name in names:
            sys.modules.pop(name, None)
        import meshwright.integrations.areal as module

    return module


def part(name: str) -> Any:
    """A module of the backend, which is imported with stand-ins for the names of AReaL."""
    backend()
    return sys.modules[f"meshwright.integrations.areal_{name}"]


def bare(**fields: Any) -> Any:
    """An engine that was not set up."""
    engine = object.__new__(backend().MeshwrightEngine)
    vars(engine).update(fields)
    return engine


def fake_mesh(rank: int = 0, **fields: Any) -> Any:
    """A mesh on which all ranks do the same."""
    return SimpleNamespace(rank=rank, device=torch.device("cpu"), together=lambda act, *_: act(), **fields)


def rows_of(numbers: range) -> dict[str, Tensor]:
    """Some rows of a global batch, as AReaL's trainers hand them over: masks are already at the terms."""
    draw, columns = torch.Generator().manual_seed(5), dict[str, list[Tensor]]()
    at = torch.arange(WIDTH)
    for number, size in enumerate(SIZES):
        noise = torch.randn(3, WIDTH, generator=draw, dtype=torch.float64)
        learnt = (at >= PROMPT - 1) & (at < size - 1) & (at % 4 > 0) & (number != UNLEARNT)
        of_row = {
            "input_ids": torch.randint(0, 131, (WIDTH,), generator=draw) * (at < size), "attention_mask": at < size,
            "loss_mask": learnt, "old": -4.9 + 0.2 * noise[0], "advantages": noise[1], "returns": noise[2],
        }  # fmt: skip
        for name, x in of_row.items():
            columns.setdefault(name, []).append(x)
    return {name: torch.stack([x[n] for n in numbers]) for name, x in columns.items()}


def over_tokens(x: Tensor, mb: dict[str, Any]) -> Tensor:
    """A mean over the learnt tokens of a micro-batch. Without any it is not a number."""
    mask = mb["loss_mask"]
    return (x * mask).sum() / mask.sum()


def plain(logprobs: Tensor, entropy: Tensor, mb: dict[str, Any]) -> Tensor:
    return over_tokens(-logprobs, mb)


def ppo(logprobs: Tensor, entropy: Tensor, mb: dict[str, Any]) -> Tensor:
    ratio, gain = (logprobs - mb["old"]).exp(), mb["advantages"]
    return over_tokens(-torch.minimum(ratio * gain, ratio.clamp(0.9, 1.1) * gain) - 0.1 * entropy, mb)


def answers(logprobs: Tensor, entropy: Tensor, mb: dict[str, Any]) -> Tensor:
    """A mean over rows, whose weight is their number."""
    sizes, mask = mb["cu_seqlens"].diff().tolist(), mb["loss_mask"]
    change, gain = ((logprobs - mb["old"]) * mask).split(sizes), mb["advantages"].split(sizes)
    return torch.stack([-c.sum().tanh() * g.mean() for c, g in zip(change, gain, strict=True)]).mean()


def critic(values: Tensor, mb: dict[str, Any]) -> Tensor:
    """The value of each row's last token counts too, if the row has tokens to learn from."""
    sizes, mask = mb["cu_seqlens"].diff().tolist(), mb["loss_mask"]
    last = torch.stack([x[-1] * m.any() for x, m in zip(values.split(sizes), mask.split(sizes), strict=True)])
    return over_tokens((values - mb["returns"]).square(), mb) + last.sum() / mask.sum()


LOSSES: dict[str, Any] = {"ppo": ppo, "answers": answers, "critic": critic}
count = lambda mb: mb["loss_mask"].count_nonzero()  # noqa: E731 - short
WEIGHTS: dict[str, Callable[..., Any]] = {
    "ppo": count, "critic": count, "answers": lambda mb: torch.tensor(len(mb["cu_seqlens"]) - 1)
}  # fmt: skip
STRATEGIES = {
    "fsdp": "data_parallel_size", "tp": "tensor_parallel_size", "cp": "context_parallel_size",
    "pp": "pipeline_parallel_size",
}  # fmt: skip


def config_of(source: Path, loss: str = "plain", optim: dict[str, Any] | None = None, **changes: Any) -> Any:
    """Micro-batches of about 17 tokens: data ranks need different numbers of them."""
    made = fake_areal.OptimizerConfig(lr_scheduler_type="cosine", warmup_steps_proportion=0.2, **(optim or {}))
    spec = fake_areal.MicroBatchSpec(max_tokens_per_mb=17)
    common = dict(path=str(source), dtype="float64", temperature=TEMPERATURE, is_critic=loss == "critic")
    return fake_areal.TrainEngineConfig(**{**common, "optimizer": made, "mb_spec": spec, **changes})


def engine_of(config: Any, mesh: dict[str, int], role: str = "MeshwrightEngine") -> Any:
    engine = getattr(backend(), role)(config)
    strategy = fake_areal.ParallelStrategy(**{STRATEGIES[axis]: size for axis, size in mesh.items()})
    engine.create_process_group(strategy)
    engine.initialize(None, fake_areal.FinetuneSpec(total_train_steps=10))
    return engine


def share(engine: Any) -> dict[str, Tensor]:
    size = len(SIZES) // engine.data_parallel_world_size
    return rows_of(range(engine.data_parallel_rank * size, (engine.data_parallel_rank + 1) * size))


def case(source: Path, mesh: dict[str, int]) -> dict[str, Any]:
    """For each loss the loss, gradients and a step, and for each head scores. Losses of the same head share an engine,
    whose weights stay: the learning rate begins at 0.
    """
    results: dict[str, Any] = {}
    for losses in (("ppo", "answers"), ("critic",)):
        engine = engine_of(config_of(source, losses[0]), mesh)
        if "fsdp" not in mesh:  # one micro-batch
            engine.config.mb_spec.max_tokens_per_mb = None
        grads, scores = grads_of(engine), engine.forward(share(engine))
        for loss in losses:
            calls = LOSSES[loss], WEIGHTS[loss]
            judged = float(engine.eval().eval_batch(share(engine), *calls)) if loss == "critic" else None
            step = engine.train().train_batch(share(engine), *calls)
            kept = {"grads": grads.pop(), "step": step, "judged": judged, "scores": scores}
            results[loss] = {**kept, "head": engine.is_data_parallel_head()}
    return results


def grads_of(engine: Any) -> list[dict[str, Tensor]]:
    """Collect the gradients of each step."""
    gradients, update = list[dict[str, Tensor]](), engine.optimizer_step

    def optimizer_step() -> dict[str, float]:
        gradients.append({name: x.clone() for name, x in mw.gather(engine.model, "grad").items()})
        return update()

    engine.optimizer_step = optimizer_step
    return gradients


def by_hand(source: Path, loss: str) -> tuple[float, dict[str, Tensor], Tensor]:
    """The loss of all rows as one micro-batch on one process, its gradients, and the scores."""
    mb = fake_areal.pack_tensor_dict(rows_of(range(len(SIZES))))
    results, head = dict[str, Any](), "value" if loss == "critic" else "lm"

    def whole(scores: Any, fields: Any, docs: Any) -> Tensor:
        named = [scores["values"]] if loss == "critic" else [scores["logprobs"], scores["entropy"]]
        value = LOSSES[loss](*named, mb)
        results.update(loss=value.item(), scores=named[0].detach())
        return value

    model = mw.load(source, mw.Mesh(device="cpu", ranks=[dist.get_rank()]), dtype=torch.float64, head=head)
    engine = mw.Engine(model, lr=1e-3, entropy=head == "lm", temperature=1.0 if head == "value" else TEMPERATURE)
    engine.loss = mw.Loss(whole, per="micro_batch", normalise=False)
    documents = [x.tolist() for x in mb["input_ids"].split(SIZES)]
    engine.backward([mw.pack(documents, labels=documents if head == "value" else None)])
    return results["loss"], mw.gather(model, "grad"), results["scores"]


def refusal(act: Callable[[], Any]) -> str:
    try:
        act()
    except (mw.MeshwrightError, ValueError) as error:
        return str(error)
    return ""


def contract(source: Path, at: Path) -> dict[str, Any]:
    """Ranks, skipped updates, offload, files, weights for servers, refusals."""
    engine = engine_of(config_of(source, mb_spec=fake_areal.MicroBatchSpec()), dict(fsdp=2))
    results: dict[str, Any] = {}
    calls = plain, count
    step = lambda: engine.train_batch(share(engine), *calls)  # noqa: E731 - short
    judged = lambda: float(engine.eval_batch(share(engine), *calls))  # noqa: E731 - short
    groups = engine.data_parallel_group, engine.context_and_model_parallel_group, engine.cpu_group
    results["groups"] = [dist.get_process_group_ranks(group) for group in groups]
    results["head"] = engine.current_data_parallel_head(), engine.data_parallel_rank, engine.data_parallel_world_size
    first, scores = judged(), engine.forward(share(engine))
    trajectories = [{name: x[n : n + 2] for name, x in share(engine).items()} for n in (0, 2)]
    results["listed"] = all(map(torch.equal, engine.forward(trajectories), scores.split(2)))
    skipped = engine.train_batch(share(engine), lambda *args: plain(*args) * math.nan, calls[1])
    results["skipped"] = skipped["update_successful"], skipped["grad_norm"], judged() == first
    engine.lr_scheduler_step()
    step()

    engine.offload()
    results["asleep"] = refusal(lambda: mw.gather(engine.model)), judged(), engine.is_offload
    files, kept = (SaveLoadMeta(str(at / name), "hf", with_optim=name == "kept") for name in ("files", "kept"))
    engine.offload()
    engine.save(files)
    engine.save(kept)
    results["still offloaded"] = engine.is_offload
    engine.onload()
    saved, norms = judged(), [step()["grad_norm"]]
    engine.lr_scheduler_step()
    engine.load(kept)
    norms.append(step()["grad_norm"])
    results["resumed"] = saved, norms, engine.engine.lr, engine.engine.steps
    engine.load(files)
    results["loaded"] = judged(), engine.engine.steps, len(engine.engine.optimizer.state) > 0
    engine.save(SaveLoadMeta(str(at / "kept"), "dcp", with_optim=True))
    dist.barrier()
    results["files"] = sorted(path.name for path in (at / "kept").iterdir())

    results["disk"] = to_servers(engine, WeightUpdateMeta("disk", str(at / "update")))
    parallel = type("Parallel", (), dict(pipeline_parallel_size=1, world_size=3))
    network = WeightUpdateMeta("xccl", gen_allocation=type("Allocation", (), dict(parallel=parallel)))
    network.weight_chunked_mem_mb = 0  # a bucket for each tensor
    results["network"] = to_servers(engine, network)
    results["weights"] = mw.gather(engine.model)
    sent = engine._rollout.group.sent if engine._rollout.group else []
    results["sent"] = [x.clone() for x in sent]
    results["refused"] = refused(engine)
    results["configs"] = configs(source)
    results["reference"] = reference(source, files)
    return results


def to_servers(engine: Any, meta: Any) -> tuple[list[str], list[str]]:
    """The calls of inference servers, and the names that they were sent."""
    servers = fake_areal.Servers()
    engine.set_version(4)
    engine.connect_engine(servers, meta)
    engine.update_weights(meta)
    assert engine.get_version() == 4
    return servers.calls, [f"{spec.name} {spec.dtype} {spec.shape}" for specs in servers.specs for spec in specs]


def refused(engine: Any) -> dict[str, str]:
    """Return the refusals on all ranks, though only one of them may be wrong."""
    calls, rank = (plain, count), engine.data_parallel_rank
    given = share(engine)

    def broken(*args: Any) -> Tensor:
        if rank:
            raise ValueError("a loss fails on one data rank")
        return plain(*args)

    acts: dict[str, Callable[[], Any]] = {
        "images": lambda: engine.forward({**given, "multi_modal_input": [{"pixel_values": 1}] * 4 if rank else [{}]}),
        "loss": lambda: engine.train_batch(given, broken, calls[1]),
        "judge": lambda: engine.eval_batch(given, broken, calls[1]),
        "too few": lambda: engine.forward({name: x[:1] for name, x in given.items()} if rank else given),
        "logits": lambda: engine.forward_backward_batch([], None),
        "format": lambda: engine.save(SaveLoadMeta("x", "gguf", with_optim=False)),
        "awex": lambda: engine.update_weights(WeightUpdateMeta("awex")),
    }
    engine.config.mb_spec.n_mbs = 2
    return {name: refusal(act) for name, act in acts.items()}


def configs(source: Path) -> dict[str, str]:
    """Configs that ask for what is not done."""
    kernels = config_of(source, use_kernels=True)
    return {
        "use_kernels": refusal(lambda: backend().MeshwrightEngine(kernels)),
        "dtype": refusal(lambda: engine_of(config_of(source, dtype="float16"), dict(fsdp=2))),
    }


def reference(source: Path, files: Any) -> tuple[bool, str, str, float]:
    """A model that only scores takes other weights, and does not train. One with adapters cannot send them."""
    engine = engine_of(config_of(source, optimizer=None), dict(fsdp=2))
    assert not engine.model.trained
    before = engine.forward(share(engine))
    engine.offload()
    engine.load(files)
    changed = not torch.equal(engine.forward(share(engine)), before)
    untrained = refusal(lambda: engine.train_batch(share(engine), plain, count))
    lora = engine_of(config_of(source, use_lora=True, lora_rank=2, lora_alpha=4), dict(fsdp=2))
    adapters = refusal(lambda: lora.connect_engine(fake_areal.Servers(), WeightUpdateMeta("xccl")))
    lora.save(SaveLoadMeta(f"{files.path}-adapters", "hf", with_optim=False))
    return changed, untrained, adapters, lora.model.recipe.lora.scale
