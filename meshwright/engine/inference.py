"""Inference: scores, log-probabilities, logits and embeddings, by a forward without gradients.

It runs on the training mesh with the training layout, so it suits evaluation and RL scoring. `sampling.py` generates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor

from .. import parallel
from ..axes import REPLICA, Sum
from ..data import Batch
from ..errors import RankError, StateError, counted
from ..models import Want
from ..watch import names_lost_ranks
from .agreement import GatheredData, Proposal, agree, check_is_model, check_same_data, data_of
from .model import Model
from .validation import check_num_top, check_temperature
from .vision_sync import sync_images

SCORES = Sum("the scores of the last stage", ("pp",))


@overload
def scores(model: Model, batches: Batch, *, temperature: float = 1.0) -> dict[str, Tensor]: ...
@overload
def scores(model: Model, batches: Sequence[Batch], *, temperature: float = 1.0) -> list[dict[str, Tensor]]: ...
@names_lost_ranks()
def scores(
    model: Model, batches: Batch | Sequence[Batch], *, temperature: float = 1.0
) -> dict[str, Tensor] | list[dict[str, Tensor]]:
    """Return what a loss would get for this data rank's tokens, by name, `[T]` each. No gradients.

    With head "lm": "logprobs" of the labels, and "entropy" of the prediction; both 0 where a token has no label. With
    head "value": "values". Several batches of one length run as the micro-batches of one call, which fills a pipeline;
    their result is a list. `temperature` divides the logits first, as samplers do.
    """
    check_is_model(model)
    given, known = [batches] if isinstance(batches, Batch) else batches, model.blueprint.scores
    names = known[:2] if "entropy" in known else known[:1]
    all_scores = _whole_scores(model, given, Want(names[-1], temperature=temperature), "scores")
    each = [
        dict(zip(names, of_batch.unbind(-1) if len(names) > 1 else [of_batch], strict=True)) for of_batch in all_scores
    ]
    return each[0] if isinstance(batches, Batch) else each


@overload
def logprobs(model: Model, batches: Batch, *, temperature: float = 1.0) -> Tensor: ...
@overload
def logprobs(model: Model, batches: Sequence[Batch], *, temperature: float = 1.0) -> list[Tensor]: ...
@names_lost_ranks()
def logprobs(
    model: Model, batches: Batch | Sequence[Batch], *, temperature: float = 1.0
) -> Tensor | list[Tensor]:  # fmt: skip
    """Return `[T]` log-probabilities of the labels of this data rank's tokens, 0 without a label. No gradients.

    Several batches give a list. `temperature` divides the logits first. `mw.scores` also returns the entropy.
    """
    given = [batches] if isinstance(batches, Batch) else batches
    each = _whole_scores(model, given, Want("logprobs", temperature=temperature), "logprobs")
    return each[0] if isinstance(batches, Batch) else each


@overload
def top_logprobs(model: Model, batches: Batch, k: int, *, temperature: float = 1.0) -> dict[str, Tensor]: ...
@overload
def top_logprobs(
    model: Model, batches: Sequence[Batch], k: int, *, temperature: float = 1.0
) -> list[dict[str, Tensor]]: ...
@names_lost_ranks()
def top_logprobs(
    model: Model, batches: Batch | Sequence[Batch], k: int, *, temperature: float = 1.0
) -> dict[str, Tensor] | list[dict[str, Tensor]]:
    """Return the k likeliest next tokens at each position, likeliest first: their "ids" and "logprobs", `[T, k]` each.

    Several batches give a list. Labels have no effect; padding has the ids -1 and the log-probabilities 0.
    `temperature` divides the logits first. No rank ever has `[T, V]` logits. No gradients.
    """
    given = [batches] if isinstance(batches, Batch) else batches
    want = Want("top_logprobs", temperature=temperature, num_top=k)
    own = score_without_grad(model, given, want, "top_logprobs")
    each = [_top_of(batch, model.mesh.gather_rows(x, ("cp", "tp"))) for batch, x in zip(given, own, strict=True)]
    return each[0] if isinstance(batches, Batch) else each


def _top_of(batch: Batch, top_Tk2: Tensor) -> dict[str, Tensor]:
    """Return the result of `top_logprobs` for a batch, without what padding predicts."""
    top_Tk2[len(batch) - batch.num_filler :] = torch.tensor([0.0, -1.0])
    logprobs_Tk, ids_Tk = top_Tk2.unbind(-1)
    return {"ids": ids_Tk.long(), "logprobs": logprobs_Tk.contiguous()}


def _whole_scores(model: Model, batches: Sequence[Batch], want: Want, call: str) -> list[Tensor]:
    """Return the scores of all tokens of each batch, 0 where a token has no label. -> `[T, ...]` each"""
    own = score_without_grad(model, batches, want, call)
    whole = [model.mesh.gather_rows(x, ("cp", "tp")) for x in own]
    has_label = [batch.is_target_T.to(x.device) for batch, x in zip(batches, whole, strict=True)]
    return [x.t().masked_fill(~mask_T, 0.0).t() for x, mask_T in zip(whole, has_label, strict=True)]


@names_lost_ranks()
def logits(model: Model, batch: Batch) -> Tensor:
    """Return `[T, V]` logits of this data rank's tokens, in at least float32. No gradients.

    With head "value": `[T]` values, or `[T, labels]` with several labels.
    """
    if "values" in model.blueprint.scores:
        (values_T,) = score_without_grad(model, [batch], Want("values"), "logits")
        return model.mesh.gather_rows(values_T, ("cp", "tp"))
    # The head all-gathers tokens over tp and splits the vocabulary. So tp joins columns, and cp joins rows.
    (local_TV,) = score_without_grad(model, [batch], Want("logits"), "logits")
    return model.mesh.gather_rows(gather_vocabulary(model, local_TV), ("cp",))


@names_lost_ranks()
def expert_choices(model: Model, batch: Batch) -> Tensor:
    """Return `[T, layers, k]`: the experts that each token of this data rank uses in each layer that has experts.

    `mw.pack(experts=)` takes them, document by document, and then forwards and backwards use the same ones.
    """
    check_is_model(model)
    balance = model.blueprint.balance
    if not balance.num_layers:
        raise StateError("the model has no experts, so it makes no choices")
    chosen: dict[int, Tensor] = {}
    balance.chosen = chosen
    try:
        score_without_grad(model, [batch], Want(model.blueprint.scores[0]), "expert_choices")
    finally:
        balance.chosen = None
    lo, hi = model.mesh.token_range(len(batch))
    # A layer is on one pipeline stage; the others add zeros.
    own_TLk = torch.zeros(hi - lo, balance.num_layers, balance.top_k, dtype=torch.int32, device=model.mesh.device)
    for layer, expert_Tk in chosen.items():
        own_TLk[:, layer] = expert_Tk.to(torch.int32)
    return model.mesh.gather_rows(model.mesh.all_reduce_(own_TLk, SCORES), ("cp", "tp"))


@names_lost_ranks()
def embeddings(model: Model, batch: Batch) -> Tensor:
    """Return `[documents, width]`: the final hidden state of each document's last token, in at least float32.

    For models with `head="none"`, such as Qwen3-Embedding. The embeddings are not normalised. No gradients; padding has
    no embedding.
    """
    (own_TD,) = score_without_grad(model, [batch], Want("hidden"), "embeddings")
    states_TD = model.mesh.gather_rows(own_TD, ("cp", "tp"))
    last = [end - 1 for end in batch.bounds[1:] if end <= len(batch) - batch.num_filler]
    return states_TD[last]


def gather_vocabulary(model: Model, local_TV: Tensor) -> Tensor:
    """All-gather the vocabulary over tp, from this rank's slice of it."""
    vocab, tp = model.blueprint.vocab, model.mesh.axes.tp
    # An all-gather needs equal shapes, and the last slice may be shorter. It is padded at its end, so all padding comes
    # after the vocabulary.
    widest = -(-vocab // tp)
    padded = torch.nn.functional.pad(local_TV.t(), (0, 0, 0, widest - local_TV.shape[1]))
    return model.mesh.gather_rows(padded, ("tp",))[:vocab].t()


def score_without_grad(model: Model, batches: Sequence[Batch], want: Want, call: str) -> list[Tensor]:
    """Return the scores of this rank's tokens of each batch: `[T]`, or `[T, 2]` for log-probabilities and entropy.
    Logits: of the tokens of its tp group, for its slice of the vocabulary.

    Only the ranks of one replica must call it together: other replicas may call it at other times, or not at all.
    """

    def propose() -> Proposal:
        if want.score not in model.blueprint.scores:
            known, score = ", ".join(model.blueprint.scores), want.score
            raise StateError(f"the head of this model computes {known}, not {score}; choose another head= of mw.load")
        check_temperature(want.temperature, model.blueprint.scores)
        settings = {"temperature": want.temperature}
        if want.score == "top_logprobs":
            check_num_top(want.num_top, model.blueprint.vocab)
            settings["k"] = want.num_top
        return Proposal(data_of(model, batches, want.score), settings=settings)

    _, gathered = agree(model, call, propose, REPLICA)
    check_same_data(gathered, model.mesh, REPLICA)
    _check_same_count(gathered)
    synced = sync_images(batches, gathered.images_mask, model.blueprint.module.tower)
    local = [batch.to(model.mesh.device) for batch in synced]
    both = lambda _batch, scores: scores[0] if len(scores) == 1 else torch.stack(scores, -1)  # noqa: E731 - short
    results = parallel.run_forward(model, local, want, both)
    shape = _scores_shape(model, len(local[0]), want)
    return list(_from_last_stage(model, results, (len(local), *shape)))


def _check_same_count(gathered: GatheredData) -> None:
    """Refuse different numbers of batches on the ranks of a replica, since each batch runs collectives."""
    counts = gathered.column("num_batches")
    if bool((counts != counts[0]).any()):
        rank = int((counts != counts[0]).int().argmax())
        raise RankError(
            f"rank {rank} of the replica scores {counted(int(counts[rank]), 'batch', 'batches')}, and the first "
            f"{int(counts[0])}; all ranks need the same number, as mw.batches makes them"
        )


def _scores_shape(model: Model, num_tokens: int, want: Want) -> tuple[int, ...]:
    """Return the shape of a rank's scores, also on pipeline stages without the head."""
    axes = model.mesh.axes
    if want.score == "logits":
        return num_tokens // axes.cp, vocab_slice_size(model)
    shape = model.blueprint.module.shape
    if want.score == "top_logprobs":
        return num_tokens // (axes.cp * axes.tp), want.num_top, 2
    columns = {"hidden": shape.width, "values": shape.labels.num, "entropy": 2}.get(want.score, 1)
    return (num_tokens // (axes.cp * axes.tp), *((columns,) if columns > 1 else ()))


def vocab_slice_size(model: Model) -> int:
    """Return the size of this rank's slice of the vocabulary."""
    start, stop = model.blueprint.spec.rules.span(
        "vocab", model.blueprint.vocab, model.mesh.axes, model.mesh.coords, "the head"
    )
    return stop - start


def _from_last_stage(model: Model, results: list[Tensor], shape: tuple[int, ...]) -> Tensor:
    """Return the scores of the last pipeline stage on all stages: an all-reduce in which the others add zeros.

    -> `[batches, T, ...]`
    """
    wide = torch.promote_types(model.dtype, torch.float32)
    if not results:
        scores = torch.zeros(shape, dtype=wide, device=model.mesh.device)
    else:  # one batch is not copied: logits are large
        scores = (results[0][None] if len(results) == 1 else torch.stack(results)).to(wide)
    return model.mesh.all_reduce_(scores, SCORES)
