"""Inference: log-probabilities, logits, embeddings and samples, by a forward without gradients.

It runs on the training mesh with the training layout, so it suits evaluation and RL scoring. `sample` has no KV cache:
each new token costs a forward over the whole sequence.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Sequence
from hashlib import sha256

import torch
from torch import Tensor

from .. import parallel
from ..axes import DENSE, REPLICA, Sum
from ..data import IGNORE, Batch, pack
from ..errors import StateError
from ..models import text_config
from ..watch import doing, names_lost_ranks
from .agreement import Proposal, agree, check_same_data, data_of
from .model import Model
from .validation import check_no_placeholders, check_prompts, check_top_p
from .vision_sync import sync_pictures

SCORES = Sum("the scores of the last stage", ("pp",))


@names_lost_ranks()
def logprobs(model: Model, batch: Batch) -> Tensor:
    """Return `[T]` log-probabilities of the labels of this data rank's tokens, 0 without a label. No gradients."""
    own_T = score_without_grad(model, batch, "logprobs", "logprobs")
    labels = batch.labels.to(own_T.device)
    return model.mesh.gather_rows(own_T, ("cp", "tp")).masked_fill(labels == IGNORE, 0.0)


@names_lost_ranks()
def logits(model: Model, batch: Batch) -> Tensor:
    """Return `[T, V]` logits of this data rank's tokens, in at least float32. No gradients.

    With head "value": `[T]` values, or `[T, labels]` with several labels.
    """
    if "values" in model.blueprint.scores:
        return model.mesh.gather_rows(score_without_grad(model, batch, "values", "logits"), ("cp", "tp"))
    # The head all-gathers tokens over tp and splits the vocabulary. So tp joins columns, and cp joins rows.
    logits_TV = gather_vocabulary(model, score_without_grad(model, batch, "logits", "logits"))
    return model.mesh.gather_rows(logits_TV, ("cp",))


@names_lost_ranks()
def embeddings(model: Model, batch: Batch) -> Tensor:
    """Return `[documents, width]`: what the model makes of each document's last token, in at least float32.

    For models with `head="none"`, such as Qwen3-Embedding. They are not normalised. No gradients; padding has none.
    """
    states_TD = model.mesh.gather_rows(score_without_grad(model, batch, "hidden", "embeddings"), ("cp", "tp"))
    last = [end - 1 for end in batch.bounds[1:] if end <= len(batch) - batch.num_filler]
    return states_TD[last]


def gather_vocabulary(model: Model, local_TV: Tensor) -> Tensor:
    """All-gather the vocabulary over tp, from this rank's slice of it."""
    vocab, tp = model.blueprint.vocab, model.mesh.axes.tp
    # An all-gather needs equal shapes, and the last slice may be shorter. It is padded at its end, so all padding
    # lands behind the vocabulary.
    widest = -(-vocab // tp)
    padded = torch.nn.functional.pad(local_TV.t(), (0, 0, 0, widest - local_TV.shape[1]))
    return model.mesh.gather_rows(padded, ("tp",))[:vocab].t()


def score_without_grad(model: Model, batch: Batch, want: str, call: str) -> Tensor:
    """Return the scores of this rank's tokens. Logits: of the tokens of its tp group, for its slice of the vocabulary.

    Only the ranks of one replica must call it together: other replicas may call it at other times, or not at all.
    """

    def propose() -> Proposal:
        if want not in model.blueprint.scores:
            known = ", ".join(model.blueprint.scores)
            raise StateError(f"the head of this model computes {known}, not {want}; choose another head= of mw.load")
        return Proposal(data_of(model, [batch], want))

    _, gathered = agree(model, call, propose, REPLICA)
    check_same_data(gathered, model.mesh, REPLICA)
    (synced,) = sync_pictures([batch], gathered.pictures, model.blueprint.module.tower)
    local = synced.to(model.mesh.device)
    results = parallel.run_forward(model, [local], want, lambda _batch, scores: scores[0])
    return _from_last_stage(model, results, _scores_shape(model, len(batch), want))


def _scores_shape(model: Model, num_tokens: int, want: str) -> tuple[int, ...]:
    """Return the shape of a rank's scores, also on pipeline stages without the head."""
    axes = model.mesh.axes
    if want == "logits":
        return num_tokens // axes.cp, vocab_slice_size(model)
    shape = model.blueprint.module.shape
    columns = shape.width if want == "hidden" else shape.labels.num if want == "values" else 1
    return (num_tokens // (axes.cp * axes.tp), *((columns,) if columns > 1 else ()))


def vocab_slice_size(model: Model) -> int:
    """Return the size of this rank's slice of the vocabulary."""
    start, stop = model.blueprint.spec.rules.span(
        "vocab", model.blueprint.vocab, model.mesh.axes, model.mesh.coords, "the head"
    )
    return stop - start


def _from_last_stage(model: Model, results: list[Tensor], shape: tuple[int, ...]) -> Tensor:
    """Return the scores of the last pipeline stage on all stages: an all-reduce in which the others add zeros."""
    wide = torch.promote_types(model.dtype, torch.float32)
    scores = results[0].to(wide) if results else torch.zeros(shape, dtype=wide, device=model.mesh.device)
    return model.mesh.all_reduce_(scores, SCORES)


@names_lost_ranks()
def sample(
    model: Model,
    prompts: Sequence[Sequence[int]],
    *,
    tokens: int,
    top_p: float | None = None,
    stop: Collection[int] = (),
    seed: int = 0,
) -> list[list[int]]:
    """Generate at most `tokens` token ids after each prompt. All ranks call it and get the same.

    Decoding is greedy. With `top_p` (nucleus sampling, arXiv 1904.09751) a token is drawn from the smallest set of the
    likeliest tokens whose probabilities sum to `top_p`; the draws depend on `seed` and the index of the prompt. A
    sequence ends after a token of `stop`, which the result includes.
    """

    def propose() -> Proposal:
        if "target_logits" not in model.blueprint.scores:
            raise StateError('the head of this model does not score the vocabulary; load it with head="lm"')
        config = text_config(model.config)
        check_prompts(prompts, tokens, model.blueprint.vocab, config.get("max_position_embeddings"))
        tower = model.blueprint.module.tower
        check_no_placeholders(prompts, tower.ids if tower is not None else ())
        check_top_p(top_p)
        text = json.dumps([*map(list, prompts)]).encode()
        settings = {"the checksum of the prompts": zlib.crc32(text), "tokens": tokens, "top_p": top_p}
        return Proposal(settings={**settings, "stop": sorted(stop), "seed": seed})

    doing("a sample")
    agree(model, "sample", propose)
    generated: list[list[int]] = [[] for _ in prompts]
    generators = [_generator(seed, number) for number in range(len(prompts))]
    for _ in range(tokens):
        logits_PV = _next_logits(model, _pack_sequences(model, prompts, generated, tokens))
        # Logits need not be bitwise equal on all ranks, so near a tie ranks could choose other tokens. And a rank that
        # stopped earlier would leave the others waiting. So all ranks take the choice of rank 0.
        chosen_P = model.mesh.gather_rows(_choose(logits_PV, top_p, generators), DENSE, "the choice of rank 0")
        for ids, token in zip(generated, chosen_P[: len(generated)].tolist(), strict=True):
            if not ids or ids[-1] not in stop:
                ids.append(token)
        if all(ids[-1] in stop for ids in generated):
            break
    return generated


def _pack_sequences(
    model: Model, prompts: Sequence[Sequence[int]], generated: Sequence[Sequence[int]], tokens: int
) -> Batch:  # fmt: skip
    """Pack all sequences so far, each padded to its final length.

    Attention is causal, so padding after a token changes nothing; and shapes stay the same from token to token, which
    saves recompilation. The last token of each sequence has a label, because scores are computed only for labelled
    tokens.
    """
    so_far = [[*prompt, *new] for prompt, new in zip(prompts, generated, strict=True)]
    sizes = [len(prompt) + tokens for prompt in prompts]
    share = model.mesh.axes.cp * model.mesh.axes.tp
    padded = [[*ids, *[0] * (size - len(ids))] for ids, size in zip(so_far, sizes, strict=True)]
    labels = [[IGNORE] * size for size in sizes]
    for ids, document_labels in zip(so_far, labels, strict=True):
        document_labels[len(ids) - 1] = 0  # any token id will do: only the position matters
    return pack(padded, labels=labels, length=-(-sum(sizes) // share) * share)


def _next_logits(model: Model, batch: Batch) -> Tensor:
    """Return `[P, V]` logits of the tokens with a label, one per prompt, on all ranks."""
    local, mesh = batch.to(model.mesh.device), model.mesh
    results = parallel.run_forward(model, [local], "target_logits", lambda _batch, scores: scores[0])
    row_P, share = local.is_target_T.nonzero().flatten(), len(batch) // mesh.axes.cp
    wide = torch.promote_types(model.dtype, torch.float32)
    local_PV = torch.zeros(len(row_P), vocab_slice_size(model), dtype=wide, device=mesh.device)
    # Only the last stage has a result, with the prompts whose last token is on this cp rank.
    for result_PV in results:
        local_PV[row_P // share == mesh.coords["cp"]] = result_PV
    return gather_vocabulary(model, mesh.all_reduce_(local_PV, Sum("the logits of a sample", ("pp", "cp"))))


def _choose(logits_PV: Tensor, top_p: float | None, generators: Sequence[torch.Generator]) -> Tensor:
    """Choose a token for each prompt: the likeliest, or by nucleus sampling."""
    if top_p is None:
        return logits_PV.argmax(-1)
    probs_PV = logits_PV.double().softmax(-1)
    sorted_PV, order_PV = probs_PV.sort(-1, descending=True)
    is_beyond_PV = sorted_PV.cumsum(-1) - sorted_PV >= top_p  # the likelier tokens alone reach top_p
    probs_PV.scatter_(-1, order_PV, sorted_PV.masked_fill(is_beyond_PV, 0.0))
    # An exponential race: of independent exponential times with rates p, the first is token i with probability p_i.
    # Each token has its own random number, so the order of equal probabilities, which may differ between meshes, does
    # not change the draw. `torch.multinomial` on sorted probabilities would depend on it.
    vocab = logits_PV.shape[1]
    time_PV = torch.stack([torch.empty(vocab, dtype=torch.float64).exponential_(generator=each) for each in generators])
    return (probs_PV / time_PV.to(probs_PV.device)).argmax(-1)


def _generator(seed: int, number: int) -> torch.Generator:
    """Return a generator for one prompt, independent of other prompts. The global generator belongs to training."""
    mixed = sha256(f"{seed} {number}".encode()).digest()[:8]
    return torch.Generator().manual_seed(int.from_bytes(mixed, "big", signed=True))
