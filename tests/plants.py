"""Bugs to plant in the running package: functions that monkeypatch; forked ranks inherit it.

tests/test_causes.py lists the expected findings of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from meshwright import ops, parallel, weights
from meshwright.axes import Sum
from meshwright.engine import engine as engine_module
from meshwright.engine import loss_terms
from meshwright.engine import model as engine_model
from meshwright.engine import router as router_module
from meshwright.mesh import collectives
from meshwright.models import decoder, qwen3, qwen3_5, qwen3_5_moe, qwen3_moe, router_balance
from meshwright.ops import loss
from meshwright.sharding import Box, rules
from meshwright.verify.reference import weight_of
from meshwright.weights import reader as loading
from meshwright.weights import streaming

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], None]


def around(owner: Any, name: str) -> Callable[[Callable[..., Any]], Plant]:
    """Make a plant that replaces a function of `owner`. The replacement also gets the real function, first."""

    def plant_of(changed: Callable[..., Any]) -> Plant:
        def plant(patch: Patch) -> None:
            real = getattr(owner, name)
            patch.setattr(owner, name, lambda *args, **kwargs: changed(real, *args, **kwargs))

        return plant

    return plant_of


@contextmanager
def planted(plant: Plant | None) -> Iterator[None]:
    """Plant a bug in this process, or nothing, for as long as the block takes."""
    with pytest.MonkeyPatch.context() as patch:
        if plant is not None:
            plant(patch)
        yield


# Sums of gradients.

no_rest = around(parallel, "finish")(lambda real, grads, mesh: None)


@around(parallel, "finish")
def rest_twice(real: Any, grads: Any, mesh: Any) -> None:
    grads = list(grads)
    real(grads, mesh)
    real(grads, mesh)


@around(parallel, "finish")
def rest_averaged(real: Any, grads: Any, mesh: Any) -> None:
    grads = list(grads)
    real(grads, mesh)
    for axes, grad in grads:
        grad.div_(mesh.size_of(axes) if axes else 1)


@around(parallel, "finish")
def rest_without_matrices(real: Any, grads: Any, mesh: Any) -> None:
    """Sum norms alone, and forget the kv projections that tp cannot cut."""
    real([(axes, grad) for axes, grad in grads if grad.dim() == 1], mesh)


def _reducing(change: Callable[[Tensor, Tensor], object]) -> Plant:
    """Change the results of FSDP's reduce-scatter."""

    def plant(patch: Patch) -> None:
        real = torch.distributed.reduce_scatter_tensor

        def changed(output: Tensor, *args: Any, **kwargs: Any) -> Any:
            whole = args[0] if args else kwargs["input"]
            own = whole.chunk(len(whole) // len(output))[dist.get_rank()].clone()
            work = real(output, *args, **kwargs)
            change(output, own)
            return work

        patch.setattr("torch.distributed.reduce_scatter_tensor", changed)
        patch.setattr("torch.distributed.reduce_scatter_single", changed, raising=False)

    return plant


own_share_of_fsdp = _reducing(lambda output, own: output.copy_(own))
fsdp_averages = _reducing(lambda output, _: output.div_(2))
fsdp_twice = _reducing(lambda output, _: output.mul_(2))
replicas_never_asked = around(FSDPModule, "set_requires_all_reduce")(lambda real, module, _: real(module, False))


@around(rules, "summed_by_fsdp")
def float32_left_to_fsdp(real: Any, param: Any, placement: Any) -> tuple[str, ...]:
    """Declare that FSDP reduces float32 parameters over `replicate`."""
    return ("replicate", *real(param, placement))


@around(engine_module.Engine, "backward")
def replicas_never(backward: Any, self: Any, batches: Any) -> float:
    real = torch.distributed.all_reduce

    def skipped(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        before = x.clone()
        work = real(x, *args, **kwargs)
        if x.numel() > 500:  # a unit of FSDP
            x.copy_(before)
        return work

    with pytest.MonkeyPatch.context() as inner:
        inner.setattr("torch.distributed.all_reduce", skipped)
        return float(backward(self, batches))


def finished(patch: Patch, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change gradients once they are complete."""
    real = engine_module.Engine._finish

    def changed(self: Any, step: Any) -> None:
        real(self, step)
        change(self.model.grads())

    patch.setattr(engine_module.Engine, "_finish", changed)


def experts_twice(patch: Patch) -> None:
    finished(patch, lambda grads: [g.mul_(2) for n, g in grads.items() if ".experts." in n])


def heads_swapped(patch: Patch) -> None:
    def swap(grads: dict[str, Tensor]) -> None:
        grad = grads["layers.1.mixer.q.weight"]
        grad.copy_(grad.unflatten(0, (2, -1)).flip(0).flatten(0, 1))

    finished(patch, swap)


# Backward.


def enter_keeps_its_own(patch: Patch) -> None:
    """Slice in the backward of an all-gather, as if all ranks had equal gradients (NeMo-Automodel#1260)."""

    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None, None, None]:
        collectives.reduce_scatter(d, ctx.size, ctx.group)
        return d.chunk(ctx.size)[dist.get_rank()].clone(), None, None, None

    patch.setattr(collectives.AllGather, "backward", staticmethod(backward))


@around(parallel.expert, "dispatch")
def experts_detached(real: Any, x: Tensor, *args: Any, **at: Any) -> Any:
    """Send rows by a collective without a backward."""
    return real(x.detach(), *args, **at)


@around(qwen3_moe.ops, "route")
def router_detached(real: Any, *args: Any) -> tuple[Tensor, Tensor]:
    weight_Tk, expert_Tk = real(*args)
    return weight_Tk.detach(), expert_Tk


@around(qwen3_moe.ops, "route")
def router_of_zero_gradient(real: Any, *args: Any) -> tuple[Tensor, Tensor]:
    weight_Tk, expert_Tk = real(*args)
    return weight_Tk.detach() + 0 * weight_Tk, expert_Tk


@around(qwen3_moe.ops, "experts")
def experts_without_backward(real: Any, rows: Any, up: Tensor, down: Tensor, **_: Any) -> Tensor:
    """Run a kernel that has only a forward (KellerJordan/Muon#65)."""
    return real(rows, up.detach(), down.detach()) + 0.0 * rows.x_ND


@around(qwen3_moe.ops, "experts")
def experts_of_zero_gradient(real: Any, rows: Any, up: Tensor, down: Tensor, **_: Any) -> Tensor:
    return real(rows, up.detach(), down.detach()) + 0.0 * (up.sum() + down.sum())


@around(decoder.LanguageHead, "forward")
def head_keeps_its_gradient(real: Any, self: Any, x: Tensor, labels: Any, want: Any, tied: Tensor) -> Any:
    return real(self, x, labels, want, tied.detach())


# The divisor of the loss.


def _divided(weight: Callable[[Any, Any, Any], float]) -> Plant:
    def share(real: Any, self: Any, batch: Any, scores: Any, step: Any) -> Any:
        wrong = weight(self, batch, step) if torch.is_grad_enabled() else step.weight  # `evaluate` stays right
        return real(self, batch, scores, replace(step, weight=wrong))

    return around(engine_module.Engine, "_share")(share)


by_own_micro_batch = _divided(lambda engine, batch, step: weight_of(batch) * step.num_batches)
by_micro_batch = _divided(
    lambda engine, batch, step: weight_of(batch) * step.num_batches * engine.model.mesh.num_data_ranks
)
by_tp_ranks_too = _divided(lambda engine, batch, step: step.weight * engine.model.mesh.axes.tp)


def _of_rank(share: Callable[[Any], int]) -> Plant:
    def agree(real: Any, self: Any, call: str, batches: Any) -> Any:
        return replace(real(self, call, batches), weight=sum(map(weight_of, batches)) * share(self))

    return around(engine_module.Engine, "_agree")(agree)


by_own_targets = _of_rank(lambda engine: 1)
mean_of_means = _of_rank(lambda engine: engine.model.mesh.num_data_ranks)


def weights_ignored(patch: Patch) -> None:
    """Count the weights of tokens in the divisor, and multiply no term by them."""
    patch.setattr(loss_terms, "WEIGHT", "another field")


# The router's aux loss.

aux_each_micro_batch = around(router_module.Router, "set_slope")(lambda real, self, tokens, num: real(self, tokens, 1))
aux_with_filler = around(router_balance.Balance, "begin")(
    lambda real, self, has_term_T, *given: real(self, torch.ones_like(has_term_T), *given)
)


def aux_of_own_rank(patch: Patch) -> None:
    """Pool the tokens of each rank alone (Megatron-LM#3769)."""
    patch.setattr(router_module, "pooled_counts", lambda *_: Sum("of one rank", ()))


@around(router_module.Router, "set_slope")
def aux_pushes_twice(real: Any, self: Any, *args: Any, **kwargs: Any) -> Tensor:
    out: Tensor = real(self, *args, **kwargs)
    self.balance.slope_E = self.balance.slope_E * 2
    return out


# Doors.


def no_doors(patch: Patch) -> None:
    patch.setattr(qwen3.MLP, "forward", qwen3.SwiGLU.forward)


@around(qwen3.SwiGLU, "__init__")
def uncut(real: Any, self: Any, shape: Any, ffn: int, at: str, dim: str) -> None:
    real(self, shape, ffn, at, "hidden" if dim == "ffn" else dim)


def cut_without_doors(patch: Patch) -> None:
    """Cut the shared expert by tp, though it works on the tokens of a rank."""
    patch.setattr(qwen3_5_moe, "SwiGLU", lambda shape, ffn, at, dim: qwen3.SwiGLU(shape, ffn, at, "ffn"))


leave_twice = around(collectives, "reduce_scatter")(lambda real, x, size, group: real(x, size, group) * size)
another_kv_head = around(qwen3.Attention, "shared")(
    lambda real, self, x: real(self, x.flip(1) if self.heads.start else x)
)


@around(qwen3_moe.ops, "route")
def scores_of_other_experts(real: Any, *args: Any) -> tuple[Tensor, Tensor]:
    """Pair weights and experts of a token in another order on rank 1 (transformers#45473)."""
    weight_Tk, expert_Tk = real(*args)
    return weight_Tk, expert_Tk.flip(1) if dist.get_rank() else expert_Tk


@around(decoder.ops, "token_stats")
def labels_of_another_slice(real: Any, x: Tensor, w: Tensor, labels: Tensor, **options: Any) -> Any:
    """Look labels up on each tp rank as if its slice of the vocabulary were the first."""
    return real(x, w, labels + 66 * dist.get_rank(), **options)


@around(ops, "combine_stats")
def entropy_of_a_slice(real: Any, stats_NT3: Tensor) -> tuple[Tensor, Tensor]:
    """Take the entropy of the first slice of the vocabulary for that of all slices."""
    return real(stats_NT3)[0], real(stats_NT3[:1])[1]


@around(loss, "_weight_gradient")
def head_without_some_tokens(real: Any, dw: Tensor, d: Tensor, x: Tensor, add: Any) -> Any:
    """Leave a chunk of tokens out of the gradient of the head."""
    return real(dw, d[9:], x[9:], add=add)


# Documents.


@around(qwen3.ops, "attention")
def leak_in_attention(real: Any, q: Tensor, k: Tensor, v: Tensor, docs: Any, *at: Any) -> Tensor:
    return real(q, k, v, replace(docs, bounds=(0, docs.bounds[-1])), *at)


@around(qwen3_5.ops, "causal_conv")
def leak_in_convolution(real: Any, x: Tensor, w: Tensor, docs: Any, halo: Any) -> Tensor:
    return real(x, w, replace(docs, positions_T=torch.arange(len(docs.positions_T))), halo)


# Weights, in and out.


def _read_by_heads(ending: str) -> Plant:
    """Read a part of a fused tensor as if the file had another order."""

    def permuted(real: Any, self: Any, entry: Any, block: Any, part: Box) -> Tensor:
        out: Tensor = real(self, entry, block, part)
        return out.flip(0 if len(out) > 1 else -1) if entry.key.endswith(ending) else out

    return around(loading.Reader, "read")(permuted)


permuted_segment = _read_by_heads("in_proj_qkv.weight")
gate_in_another_order = _read_by_heads("q_proj.weight")  # as all q, then all gates; the file has [q | gate] per head


@around(engine_model, "fill")
def overwritten_expert(real: Any, stored: Any, *args: Any) -> int:
    """Broadcast rank 0's experts to all (transformers#45662)."""
    num_bytes: int = real(stored, *args)
    dist.broadcast(stored["layers.0.mlp.experts.down"], 0)
    return num_bytes


@around(weights, "whole_tensors")
def dropped_key(real: Any, stored_model: Any, keymap: Any, keys: Any, **options: Any) -> Any:
    return real(stored_model, keymap, [k for k in keys if k.name != "model.norm.weight"], **options)


@around(streaming, "_packed")
def rounded_on_the_way_out(real: Any, *args: Any) -> dict[Any, Tensor]:
    return {dtype: flat.bfloat16().to(dtype) for dtype, flat in real(*args).items()}


float32_rounded_by_exports = around(weights.KeyMap, "recast")(
    lambda real, keymap, dtype, _exact=(): real(keymap, dtype)
)


@around(rules, "cut")
def both_have_the_first_half(real: Any, param: Any, placement: Any, axes: Any, coords: Any) -> Box:
    """Give both tp ranks the first half of the query heads."""
    return real(param, placement, axes, {**coords, "tp": 0} if param.name.endswith("mixer.q.weight") else coords)


# Norm and update.


def norm_of_copies(patch: Patch) -> None:
    patch.setattr(engine_model.Model, "owned", property(lambda self: set(self.pieces)))


def norm_without_shards(patch: Patch) -> None:
    """Take shards that only tp cuts for copies (Megatron-LM#7452 f.8)."""
    real = engine_model.Model.owned.func
    small = lambda self: {n for n in real(self) if self.table[n].cols or not self.mesh.coords["tp"]}  # noqa: E731
    patch.setattr(engine_model.Model, "owned", property(small))


@around(engine_module.LocalOptimizer, "step")
def optimizer_over_copies(real: Any, self: Any, stored: Any, *more: Any) -> Any:
    return real(self, {name: tensor.clone() for name, tensor in stored.items()}, *more)


@around(engine_module.LocalOptimizer, "step")
def half_an_update(real: Any, self: Any, stored: Any, grads: Any, lr: float, clip: Any) -> Any:
    return real(self, stored, grads, lr / 2, clip)


@around(engine_module.LocalOptimizer, "step")
def replicas_drift(real: Any, self: Any, stored: Any, grads: Any, lr: float, clip: Any) -> Any:
    return real(self, stored, grads, lr * (1 + 1e-6 * dist.get_rank()), clip)
