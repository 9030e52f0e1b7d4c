"""Bugs to plant in the package that runs: functions that monkeypatch; forked ranks inherit it.

tests/test_causes.py lists them, each with what the oracles have to say of it.
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


@contextmanager
def planted(plant: Plant | None) -> Iterator[None]:
    """Plant a bug in this process, or nothing, for as long as the block takes."""
    with pytest.MonkeyPatch.context() as patch:
        if plant is not None:
            plant(patch)
        yield


# Sums of gradients.


def no_rest(patch: Patch) -> None:
    patch.setattr(parallel, "finish", lambda grads, mesh: None)


def rest_twice(patch: Patch) -> None:
    real = parallel.finish

    def twice(grads: Any, mesh: Any) -> None:
        grads = list(grads)
        real(grads, mesh)
        real(grads, mesh)

    patch.setattr(parallel, "finish", twice)


def rest_averaged(patch: Patch) -> None:
    real = parallel.finish

    def averaged(grads: Any, mesh: Any) -> None:
        grads = list(grads)
        real(grads, mesh)
        for axes, grad in grads:
            grad.div_(mesh.size_of(axes) if axes else 1)

    patch.setattr(parallel, "finish", averaged)


def rest_without_matrices(patch: Patch) -> None:
    """As when norms are flagged as replicated, and the kv projections that tp cannot cut are forgotten."""
    real = parallel.finish
    patch.setattr(parallel, "finish", lambda grads, mesh: real([(a, g) for a, g in grads if g.dim() == 1], mesh))


def _reducing(patch: Patch, change: Callable[[Tensor, Tensor], object]) -> None:
    """FSDP's reduce-scatter, changed afterwards."""
    real = torch.distributed.reduce_scatter_tensor

    def changed(output: Tensor, *args: Any, **kwargs: Any) -> Any:
        whole = args[0] if args else kwargs["input"]
        mine = whole.chunk(len(whole) // len(output))[dist.get_rank()].clone()
        work = real(output, *args, **kwargs)
        change(output, mine)
        return work

    patch.setattr("torch.distributed.reduce_scatter_tensor", changed)
    patch.setattr("torch.distributed.reduce_scatter_single", changed, raising=False)


def own_share_of_fsdp(patch: Patch) -> None:
    _reducing(patch, lambda output, mine: output.copy_(mine))


def fsdp_averages(patch: Patch) -> None:
    _reducing(patch, lambda output, _: output.div_(2))


def fsdp_twice(patch: Patch) -> None:
    _reducing(patch, lambda output, _: output.mul_(2))


def replicas_never_asked(patch: Patch) -> None:
    real = FSDPModule.set_requires_all_reduce
    patch.setattr(FSDPModule, "set_requires_all_reduce", lambda module, _: real(module, False))


def float32_left_to_fsdp(patch: Patch) -> None:
    """FSDP is said to sum over `replicate` what is kept from it."""
    real = rules.summed_by_fsdp
    patch.setattr(rules, "summed_by_fsdp", lambda param, placement: ("replicate", *real(param, placement)))


def replicas_never(patch: Patch) -> None:
    real, backward = torch.distributed.all_reduce, engine_module.Engine.backward

    def skipped(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        kept = x.clone()
        work = real(x, *args, **kwargs)
        if x.numel() > 500:  # a unit of FSDP
            x.copy_(kept)
        return work

    def backward_without(self: Any, batches: Any) -> float:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr("torch.distributed.all_reduce", skipped)
            return backward(self, batches)

    patch.setattr(engine_module.Engine, "backward", backward_without)


def finished(patch: Patch, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Gradients changed once they are complete."""
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


# The way back.


def enter_keeps_its_own(patch: Patch) -> None:
    """The backward of a gather that slices, as if all ranks had computed the same (NeMo-Automodel#1260)."""

    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None, None, None]:
        return d.chunk(ctx.size)[dist.get_rank()].clone(), None, None, None

    def zero_sum(ctx: Any, d: Tensor) -> tuple[Tensor, None, None, None]:
        collectives.reduce_scatter(d, ctx.size, ctx.group)
        return backward(ctx, d)

    patch.setattr(collectives.AllGather, "backward", staticmethod(zero_sum))


def experts_detached(patch: Patch) -> None:
    """Rows are sent by a collective without a backward."""
    real = parallel.expert.dispatch
    patch.setattr(parallel.expert, "dispatch", lambda x, *args, **at: real(x.detach(), *args, **at))


def router_detached(patch: Patch) -> None:
    real = qwen3_moe.ops.route

    def route(*args: Any) -> tuple[Tensor, Tensor]:
        weight_Tk, expert_Tk = real(*args)
        return weight_Tk.detach(), expert_Tk

    patch.setattr(qwen3_moe.ops, "route", route)


def router_of_zero_gradient(patch: Patch) -> None:
    real = qwen3_moe.ops.route

    def route(*args: Any) -> tuple[Tensor, Tensor]:
        weight_Tk, expert_Tk = real(*args)
        return weight_Tk.detach() + 0 * weight_Tk, expert_Tk

    patch.setattr(qwen3_moe.ops, "route", route)


def _experts(patch: Patch, more: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    real = qwen3_moe.ops.experts
    planted = lambda rows, up, down, **_: real(rows, up.detach(), down.detach()) + 0.0 * more(rows.x_ND, up, down)  # noqa: E731
    patch.setattr(qwen3_moe.ops, "experts", planted)


def experts_without_backward(patch: Patch) -> None:  # their kernel has only a forward (KellerJordan/Muon#65)
    _experts(patch, lambda x, *_: x)


def experts_of_zero_gradient(patch: Patch) -> None:
    _experts(patch, lambda _, up, down: up.sum() + down.sum())


def head_keeps_its_gradient(patch: Patch) -> None:
    real = decoder.LanguageHead.forward
    patch.setattr(
        decoder.LanguageHead, "forward", lambda self, x, labels, want, tied: real(self, x, labels, want, tied.detach())
    )


# What the loss is divided by.


def _divided(patch: Patch, weight: Callable[[Any, Any, Any], float]) -> None:
    real = engine_module.Engine._share

    def divided(self: Any, batch: Any, scores: Any, step: Any) -> Any:
        wrong = weight(self, batch, step) if torch.is_grad_enabled() else step.weight  # `evaluate` stays right
        return real(self, batch, scores, replace(step, weight=wrong))

    patch.setattr(engine_module.Engine, "_share", divided)


def by_micro_batch(patch: Patch) -> None:
    _divided(patch, lambda engine, batch, step: weight_of(batch) * step.num_batches * engine.model.mesh.num_data_ranks)


def by_own_micro_batch(patch: Patch) -> None:
    _divided(patch, lambda engine, batch, step: weight_of(batch) * step.num_batches)


def by_tp_ranks_too(patch: Patch) -> None:
    _divided(patch, lambda engine, batch, step: step.weight * engine.model.mesh.axes.tp)


def _of_rank(patch: Patch, share: Callable[[Any], int]) -> None:
    real = engine_module.Engine._agree

    def own(self: Any, call: str, batches: Any) -> Any:
        return replace(real(self, call, batches), weight=sum(map(weight_of, batches)) * share(self))

    patch.setattr(engine_module.Engine, "_agree", own)


def by_own_targets(patch: Patch) -> None:
    _of_rank(patch, lambda engine: 1)


def weights_ignored(patch: Patch) -> None:
    """The weights of tokens are counted in the divisor, and no term is multiplied by them."""
    patch.setattr(loss_terms, "WEIGHT", "another field")


def mean_of_means(patch: Patch) -> None:
    _of_rank(patch, lambda engine: engine.model.mesh.num_data_ranks)


# The router's aux loss.


def aux_each_micro_batch(patch: Patch) -> None:
    real = router_module.Router.set_slope
    patch.setattr(router_module.Router, "set_slope", lambda self, tokens, num: real(self, tokens, 1))


def aux_with_filler(patch: Patch) -> None:
    real = router_balance.Balance.begin
    patch.setattr(router_balance.Balance, "begin", lambda self, has_term_T: real(self, torch.ones_like(has_term_T)))


def aux_of_own_rank(patch: Patch) -> None:
    """Each rank pools its own tokens only (Megatron-LM#3769)."""
    patch.setattr(router_module, "pooled_counts", lambda _: Sum("of nobody else", ()))


def aux_pushes_twice(patch: Patch) -> None:
    real = router_module.Router.set_slope

    def end(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        out = real(self, *args, **kwargs)
        self.balance.slope_E = self.balance.slope_E * 2
        return out

    patch.setattr(router_module.Router, "set_slope", end)


# Doors.


def _mlp(self: Any, x_TD: Tensor) -> Tensor:
    return qwen3.SwiGLU.forward(self, x_TD)


def no_doors(patch: Patch) -> None:
    patch.setattr(qwen3.MLP, "forward", _mlp)


def uncut(patch: Patch) -> None:
    real = qwen3.SwiGLU.__init__
    patch.setattr(
        qwen3.SwiGLU,
        "__init__",
        lambda self, shape, ffn, at, dim: real(self, shape, ffn, at, "hidden" if dim == "ffn" else dim),
    )


def cut_without_doors(patch: Patch) -> None:
    """The shared expert works on own tokens; tp must not cut it."""
    patch.setattr(qwen3_5_moe, "SwiGLU", lambda shape, ffn, at, dim: qwen3.SwiGLU(shape, ffn, at, "ffn"))


def leave_twice(patch: Patch) -> None:
    real = collectives.reduce_scatter
    patch.setattr(collectives, "reduce_scatter", lambda x, size, group: real(x, size, group) * size)


def another_kv_head(patch: Patch) -> None:
    real = qwen3.Attention.shared
    patch.setattr(qwen3.Attention, "shared", lambda self, x: real(self, x.flip(1) if self.heads.start else x))


def scores_of_other_experts(patch: Patch) -> None:
    """Weights and experts of a token are paired in another order on rank 1 (transformers#45473)."""
    real = qwen3_moe.ops.route

    def route(*args: Any) -> tuple[Tensor, Tensor]:
        weight_Tk, expert_Tk = real(*args)
        return weight_Tk, expert_Tk.flip(1) if dist.get_rank() else expert_Tk

    patch.setattr(qwen3_moe.ops, "route", route)


def labels_of_another_slice(patch: Patch) -> None:
    """Each rank of tp looks labels up as if its slice of the vocabulary were the first."""
    real = decoder.ops.token_stats
    patch.setattr(
        decoder.ops, "token_stats", lambda x, w, labels, **kw: real(x, w, labels + 66 * dist.get_rank(), **kw)
    )


def entropy_of_a_slice(patch: Patch) -> None:
    """Take the entropy of the first slice of the vocabulary for that of all slices."""
    real = ops.combine_stats

    def combined(stats_NT3: Tensor) -> tuple[Tensor, Tensor]:
        return real(stats_NT3)[0], real(stats_NT3[:1])[1]

    patch.setattr(ops, "combine_stats", combined)


def head_without_some_tokens(patch: Patch) -> None:
    """Leave a chunk of tokens out of the gradient of the head."""
    real = loss._weight_gradient
    patch.setattr(loss, "_weight_gradient", lambda dw, d, x, add: real(dw, d[9:], x[9:], add=add))


# Documents.


def leak_in_attention(patch: Patch) -> None:
    real = qwen3.ops.attention
    patch.setattr(
        qwen3.ops,
        "attention",
        lambda q, k, v, docs, *at: real(q, k, v, replace(docs, bounds=(0, docs.bounds[-1])), *at),
    )


def leak_in_convolution(patch: Patch) -> None:
    real = qwen3_5.ops.causal_conv
    one = lambda docs: replace(docs, positions_T=torch.arange(len(docs.positions_T)))  # noqa: E731 - short
    patch.setattr(qwen3_5.ops, "causal_conv", lambda x, w, docs, halo: real(x, w, one(docs), halo))


# Weights, in and out.


def _read_by_heads(patch: Patch, ending: str) -> None:
    """Each rank reads its part of a fused tensor as if the file had it in another order."""
    real = loading.Reader.read

    def permuted(self: Any, entry: Any, block: Any, part: Box) -> Tensor:
        out = real(self, entry, block, part)
        return out.flip(0 if len(out) > 1 else -1) if entry.key.endswith(ending) else out

    patch.setattr(loading.Reader, "read", permuted)


def permuted_segment(patch: Patch) -> None:
    _read_by_heads(patch, "in_proj_qkv.weight")


def gate_in_another_order(patch: Patch) -> None:
    """`q_proj` of a gated attention has [q | gate] head by head, not all q and then all gates."""
    _read_by_heads(patch, "q_proj.weight")


def overwritten_expert(patch: Patch) -> None:
    """A broadcast of rank 0's experts to all (transformers#45662)."""
    real = engine_model.fill

    def broadcast_after(stored: Any, *args: Any) -> int:
        num_bytes = real(stored, *args)
        dist.broadcast(stored["layers.0.mlp.experts.down"], 0)
        return num_bytes

    patch.setattr(engine_model, "fill", broadcast_after)


def dropped_key(patch: Patch) -> None:
    real = weights.whole_tensors

    def without_one(stored_model: Any, keymap: Any, keys: Any, **options: Any) -> Any:
        return real(stored_model, keymap, [k for k in keys if k.name != "model.norm.weight"], **options)

    patch.setattr(weights, "whole_tensors", without_one)


def rounded_on_the_way_out(patch: Patch) -> None:
    real = streaming._packed
    patch.setattr(streaming, "_packed", lambda *args: {d: flat.bfloat16().to(d) for d, flat in real(*args).items()})


def float32_rounded_by_exports(patch: Patch) -> None:
    real = weights.KeyMap.recast
    patch.setattr(weights.KeyMap, "recast", lambda keymap, dtype, _exact=(): real(keymap, dtype))


def both_have_the_first_half(patch: Patch) -> None:
    """Both tp ranks believe that the first half of the query heads is theirs."""
    real = rules.cut

    def first_half(param: Any, placement: Any, axes: Any, coords: Any) -> Box:
        return real(param, placement, axes, {**coords, "tp": 0} if param.name.endswith("mixer.q.weight") else coords)

    patch.setattr(rules, "cut", first_half)


# Norm and update.


def norm_of_copies(patch: Patch) -> None:
    patch.setattr(engine_model.Model, "owned", property(lambda self: set(self.pieces)))


def norm_without_shards(patch: Patch) -> None:
    """What only tp cuts is taken for a copy (Megatron-LM#7452 f.8)."""
    real = engine_model.Model.owned.func
    small = lambda self: {n for n in real(self) if self.table[n].cols or not self.mesh.coords["tp"]}  # noqa: E731
    patch.setattr(engine_model.Model, "owned", property(small))


def optimizer_over_copies(patch: Patch) -> None:
    real = engine_module.LocalOptimizer.step
    patch.setattr(
        engine_module.LocalOptimizer,
        "step",
        lambda self, stored, grads, lr: real(self, {name: t.clone() for name, t in stored.items()}, grads, lr),
    )


def half_an_update(patch: Patch) -> None:
    real = engine_module.LocalOptimizer.step
    patch.setattr(
        engine_module.LocalOptimizer, "step", lambda self, stored, grads, lr: real(self, stored, grads, lr / 2)
    )


def replicas_drift(patch: Patch) -> None:
    real = engine_module.LocalOptimizer.step
    patch.setattr(
        engine_module.LocalOptimizer, "step", lambda self, s, g, lr: real(self, s, g, lr * (1 + 1e-6 * dist.get_rank()))
    )
