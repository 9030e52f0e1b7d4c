"""What tests of the backend of verl run on ranks."""

from __future__ import annotations

import functools
import math
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import meshwright as mw
from tests import fake_verl
from tests.fake_verl import Data, jagged

SIZES, PROMPT, TEMPERATURE = [9, 4, 13, 3, 6, 11], 2, 0.7


@functools.cache
def backend() -> Any:
    """The module, imported with the names of verl that it uses."""
    with fake_verl.installed():
        sys.modules.pop("meshwright.integrations.verl", None)
        import meshwright.integrations.verl as module

    return module


def rows_of(numbers: range) -> Data:
    """Some rows of a global batch."""
    draw = torch.Generator().manual_seed(5)
    fields: dict[str, list[Tensor]] = {}
    for size in SIZES:
        noise = torch.randn(3, size, generator=draw, dtype=torch.float64)
        mask = (torch.arange(size) >= PROMPT).long()
        mask[-1] = size % 2
        of_row = dict(
            input_ids=torch.randint(0, 131, (size,), generator=draw), position_ids=torch.arange(size), loss_mask=mask,
            old=-4.9 + 0.2 * noise[0],
            advantage=noise[1], target=noise[2],
        )  # fmt: skip
        for name, x in of_row.items():
            fields.setdefault(name, []).append(x)
    tensors = {name: jagged([x[n] for n in numbers]) for name, x in fields.items()}
    return Data(tensors, temperature=TEMPERATURE, calculate_entropy=True, return_model_output=True)


def shifted(x: Tensor) -> Tensor:
    """Values over tokens at the terms that predict them, as verl's losses shift masks."""
    return torch.roll(x.values(), -1)


def sft(model_output: Any, data: Any, dp_group: Any = None) -> Any:
    """A mean over the tokens of the whole batch: the caller's factor of the mean over data ranks is `dp_size`."""
    total = (model_output["log_probs"].values() * shifted(data["loss_mask"])).sum()
    return -total / data["batch_num_tokens"] * data["dp_size"], {}


def answers(model_output: Any, data: Any, dp_group: Any = None) -> Any:
    """A ratio for each whole answer, clipped, with entropy and a figure (GSPO)."""
    offsets = data["input_ids"].offsets()
    of_row = lambda x: x.split(offsets.diff().tolist())  # noqa: E731 - short
    mask, change = of_row(shifted(data["loss_mask"])), model_output["log_probs"].values() - data["old"].values()
    entropy, gain = of_row(model_output["entropy"].values()), of_row(data["advantage"].values())
    terms = []
    for c, m, e, g in zip(of_row(change), mask, entropy, gain, strict=True):
        ratio = ((c * m).sum() / m.sum()).exp()
        terms.append(-torch.minimum(ratio * g.mean(), ratio.clamp(0.9, 1.1) * g.mean()) - 0.1 * (e * m).mean())
    loss = torch.stack(terms).sum() / len(SIZES) * data["dp_size"]
    return loss, {"pg": loss.item()}


def critic(model_output: Any, data: Any, dp_group: Any = None) -> Any:
    error = (model_output["values"].values() - data["target"].values()).square() * shifted(data["loss_mask"])
    return error.sum() / data["batch_num_tokens"] * data["dp_size"], {}


LOSSES: dict[str, Any] = {"sft": sft, "answers": answers, "critic": critic}


def engine_of(source: Path, mesh: dict[str, int], loss: str = "sft", **changes: Any) -> Any:
    if not dist.is_initialized():
        mw.Mesh(**mesh, device="cpu")  # it joins the process group, as verl does before it makes an engine
    module = backend()
    kind = "value_model" if loss == "critic" else "language_model"
    optim = fake_verl.OptimizerConfig(**changes.pop("optim", {}))
    model = fake_verl.ModelConfig(path=str(source), **changes.pop("model", {}))
    config = module.MeshwrightEngineConfig(mesh=mesh, dtype="float64", **changes)
    engine = fake_verl.EngineRegistry.engines[kind, "meshwright"](model, config, optim, None)
    engine.initialize()
    return engine


def share(engine: Any) -> Data:
    num = len(SIZES) // engine.get_data_parallel_size()
    return rows_of(range(engine.get_data_parallel_rank() * num, (engine.get_data_parallel_rank() + 1) * num))


def case(source: Path, mesh: dict[str, int]) -> dict[str, Any]:
    """For each loss: values that only score, gradients, and a step. Losses of the same head share an engine."""
    results: dict[str, Any] = {}
    for losses in (("sft", "answers"), ("critic",)):
        engine = engine_of(source, mesh, losses[0])
        with engine.eval_mode():
            first = engine.forward_backward_batch(share(engine), LOSSES[losses[0]], forward_only=True)
        results |= {loss: {**trained(engine, loss), "first": plain(first)} for loss in losses}
        norm = engine.train_batch(share(engine), LOSSES[losses[-1]])["metrics"].get("grad_norm")
        results[losses[-1]] |= {"norm": norm, "lr": engine.lr_scheduler_step()}
    return results


def plain(output: Any) -> dict[str, list[Tensor]]:
    return {name: [x.clone() for x in rows.unbind()] for name, rows in output["model_output"].items()}


def trained(engine: Any, loss: str) -> dict[str, Any]:
    """Gradients without a step."""
    with engine.train_mode(zero_grad_on_exit=False):
        out = engine.forward_backward_batch(share(engine), LOSSES[loss])
        grads = {name: x.clone() for name, x in mw.gather(engine.model, "grad").items()}
        engine.optimizer_zero_grad()
    return {
        "grads": grads, "loss": sum(out["loss"]), "metrics": out["metrics"], "output": plain(out),
        "source": engine.is_mp_src_rank_with_outputs(), "data_rank": engine.get_data_parallel_rank(),
    }  # fmt: skip


def by_hand(source: Path, loss: str) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    """The loss of the whole batch at once, and its gradient by autograd through one long forward: the engine's own loss
    is a sum over `scores` times the derivative of verl's loss for them."""
    data, results = rows_of(range(len(SIZES))), dict[str, Any]()
    data.update(dp_size=1, batch_num_tokens=int(data["loss_mask"].values().sum()))

    def whole(scores: Any, fields: Any) -> Tensor:
        names = dict(logprobs="log_probs", entropy="entropy", values="values")
        offsets = data["input_ids"].offsets()
        output = {names[k]: torch.nested.nested_tensor_from_jagged(x, offsets) for k, x in scores.items()}
        value, _ = LOSSES[loss](output, data)
        results.update(loss=value.item(), scores={names[k]: x.detach() for k, x in scores.items()})
        return value

    mesh = mw.Mesh(device="cpu", ranks=[dist.get_rank()])
    model = mw.load(source, mesh, dtype=torch.float64, head="value" if loss == "critic" else "lm")
    engine = mw.Engine(model, lr=1e-3, entropy=loss != "critic", temperature=1.0 if loss == "critic" else TEMPERATURE)
    engine.loss = mw.Loss(lambda s, f, docs: whole(s, f), per="micro_batch", normalise=False)
    documents = [x.tolist() for x in data["input_ids"].unbind()]
    engine.backward([mw.pack(documents, labels=documents if loss == "critic" else None)])  # a value for each token
    return results["loss"], mw.gather(model, "grad"), results["scores"]


def contract(source: Path, at: Path) -> dict[str, Any]:
    """Skipped updates, offload, checkpoints, weights for a rollout, refusals."""
    engine = engine_of(source, dict(fsdp=2))
    results: dict[str, Any] = {}
    before = {name: x.clone() for name, x in mw.gather(engine.model).items()}
    nan = lambda model_output, data, dp_group=None: (sft(model_output, data)[0] * math.nan, {})  # noqa: E731 - short
    results["skipped"] = engine.train_batch(share(engine), nan)["metrics"]["grad_norm"]
    results["unchanged"] = all(torch.equal(x, before[name]) for name, x in mw.gather(engine.model).items())

    engine.train_batch(share(engine), sft)
    engine.lr_scheduler_step()
    engine.save_checkpoint(str(at / "global_step_1"), global_step=1, max_ckpt_to_keep=1)
    one = engine.train_batch(share(engine), sft)["metrics"]["grad_norm"]
    engine.lr_scheduler_step()
    engine.load_checkpoint(str(at / "global_step_1"))
    engine.load_checkpoint(None)
    results["resumed"] = one, engine.train_batch(share(engine), sft)["metrics"]["grad_norm"], engine.engine.lr
    engine.save_checkpoint(str(at / "global_step_2"), global_step=2, max_ckpt_to_keep=1)
    dist.barrier()
    results["kept"] = sorted(path.name for path in at.iterdir())

    engine._move(wake=False, weights=True, optimizer=True)
    engine._move(wake=False, weights=True, optimizer=True)  # twice does no harm
    engine._move(wake=True, weights=True, optimizer=False)
    unscored = engine.forward_backward_batch(share(engine), None, forward_only=True)
    scored = engine.forward_backward_batch(share(engine), sft, forward_only=True)
    values = [each["model_output"]["log_probs"].values() for each in (unscored, scored)]
    results["asleep"] = len(unscored["loss"]), torch.equal(*values)
    engine._move(wake=True, weights=False, optimizer=True)
    results["awake"] = engine.train_batch(share(engine), sft)["metrics"]["grad_norm"]

    weights, peft = engine.get_per_tensor_param(layered_summon=False, base_sync_done=True)
    results["weights"], results["peft"] = {name: tuple(x.shape) for name, x in weights}, peft
    results["refused"] = {
        name: refusal(functools.partial(engine.forward_backward_batch, Data(share(engine), **change), sft))
        for name, change in {
            "images": dict(multi_modal_inputs=[{"pixel_values": 1}]),
            "temperatures": dict(temperature=torch.tensor([0.5, 1.0, 1.0])),
            "one rank": dict(calculate_sum_pi_squared=engine.get_data_parallel_rank() == 1),
        }.items()
    }

    def broken(model_output: Any, data: Any, dp_group: Any = None) -> Any:
        if engine.get_data_parallel_rank():
            raise ValueError("a loss fails on one data rank")
        return sft(model_output, data)

    for name, only in (("train", False), ("score", True)):
        results[f"loss of {name}"] = refusal(
            lambda only=only: engine.forward_backward_batch(share(engine), broken, only)
        )
    options = engine.engine.optimizer.options
    results["options"] = engine.engine.max_norm, options.betas, options.weight_decay, engine.engine.steps
    results["frozen"] = frozen(source)
    results["adapters"] = adapters(source)
    return results


def refusal(act: Any) -> str:
    try:
        act()
    except (mw.MeshwrightError, ValueError) as error:
        return str(error)
    return ""


def frozen(source: Path) -> tuple[int, str]:
    """A reference policy."""
    engine = engine_of(source, dict(fsdp=2), forward_only=True)
    engine._move(wake=False, weights=True, optimizer=True)
    engine._move(wake=True, weights=True, optimizer=True)
    with engine.eval_mode():
        num = len(engine.forward_backward_batch(share(engine), None, forward_only=True)["loss"])
    assert not engine.model.trained
    return num, refusal(lambda: engine.train_batch(share(engine), sft))


def adapters(source: Path) -> tuple[bool, str, int]:
    """LoRA: the reference without adapters, and weights for a rollout."""
    engine = engine_of(source, dict(fsdp=2), model=dict(lora_rank=2, target_modules=["q_proj", "v_proj"]))
    values = lambda: engine.forward_backward_batch(share(engine), None, forward_only=True)["model_output"]["log_probs"]  # noqa: E731
    base = values().values()
    engine.train_batch(share(engine), sft)
    with engine.disable_adapter():
        same = torch.equal(values().values(), base)
    changed = not torch.equal(values().values(), base)
    refused = refusal(engine.get_per_tensor_param)
    engine.model_config.lora["merge"] = True
    return same and changed, refused, len(dict(engine.get_per_tensor_param()[0]))
