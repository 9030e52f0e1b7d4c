"""What a model says of a batch, for whoever looks: one forward without gradients."""

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
from .validation import check_no_places, check_prompts, check_top_p
from .vision_sync import sync_pictures

SCORES = Sum("the scores of the last stage", ("pp",))


@names_lost_ranks()
def logprobs(model: Model, batch: Batch) -> Tensor:
    """`[T]` log-probabilities of the labels of this data rank's tokens (0 where there is no label), no gradients."""
    own_T = score_without_grad(model, batch, "logprobs", "logprobs")
    labels = batch.labels.to(own_T.device)
    return model.mesh.gather_rows(own_T, ("cp", "tp")).masked_fill(labels == IGNORE, 0.0)


@names_lost_ranks()
def logits(model: Model, batch: Batch) -> Tensor:
    """`[T, V]` of this data rank's tokens (head "value": `[T]`, or `[T, labels]` of several), at least float32, no
    gradients."""
    if "values" in model.blueprint.scores:
        return model.mesh.gather_rows(score_without_grad(model, batch, "values", "logits"), ("cp", "tp"))
    of_tokens_TV = over_vocabulary(model, score_without_grad(model, batch, "logits", "logits"))
    return model.mesh.gather_rows(of_tokens_TV, ("cp",))


def over_vocabulary(model: Model, local_TV: Tensor) -> Tensor:
    """This rank's part of the vocabulary -> all of it."""
    vocab, tp = model.blueprint.vocab, model.mesh.axes.tp
    widest = -(-vocab // tp)  # the last slice of the vocabulary may be shorter
    padded = torch.nn.functional.pad(local_TV.t(), (0, 0, 0, widest - local_TV.shape[1]))
    return model.mesh.gather_rows(padded, ("tp",))[:vocab].t()


def score_without_grad(model: Model, batch: Batch, want: str, call: str) -> Tensor:
    """Scores of this rank's own tokens (logits: of those of its tp group, this rank's part of the vocabulary).

    The ranks of one replica call it together. Replicas may look at other times, or not at all.
    """

    def propose() -> Proposal:
        if want not in model.blueprint.scores:
            known = ", ".join(model.blueprint.scores)
            raise StateError(f"the head of this model gives {known}, not {want}; choose head= of mw.load")
        return Proposal(data_of(model, [batch], want))

    _, told = agree(model, call, propose, REPLICA)
    check_same_data(told, model.mesh, REPLICA)
    (seen,) = sync_pictures([batch], told.pictures, model.blueprint.module.tower)
    here = seen.to(model.mesh.device)
    found = parallel.run_forward(model, [here], want, lambda _batch, scores: scores[0])
    return _of_last_stage(model, found, _shape(model, len(batch), want))


def _shape(model: Model, num_tokens: int, want: str) -> tuple[int, ...]:
    """Of the scores of a rank, known to those that have no head too."""
    axes = model.mesh.axes
    if want == "logits":
        return num_tokens // axes.cp, vocab_width(model)
    labels = model.blueprint.module.shape.labels.num if want == "values" else 1
    return (num_tokens // (axes.cp * axes.tp), *((labels,) if labels > 1 else ()))


def vocab_width(model: Model) -> int:
    """How many words this rank scores, if it has a head."""
    start, stop = model.blueprint.spec.rules.span(
        "vocab", model.blueprint.vocab, model.mesh.axes, model.mesh.coords, "the head"
    )
    return stop - start


def _of_last_stage(model: Model, found: list[Tensor], shape: tuple[int, ...]) -> Tensor:
    """The same on all stages: those without a head add zeros."""
    wide = torch.promote_types(model.dtype, torch.float32)
    scores = found[0] if found else torch.zeros(shape, dtype=wide, device=model.mesh.device)
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
    """What the model writes after each prompt: ids, at most `tokens` of them. All ranks call it and get the same.

    The likeliest token is taken; with `top_p` one is drawn from the likeliest that have this probability together, by
    `seed` and the number of the prompt. After a token of `stop`, which is given too, nothing more is written.
    """

    def propose() -> Proposal:
        if "target_logits" not in model.blueprint.scores:
            raise StateError('the head of this model scores no words; load it with head="lm"')
        config = text_config(model.config)
        check_prompts(prompts, tokens, model.blueprint.vocab, config.get("max_position_embeddings"))
        tower = model.blueprint.module.tower
        check_no_places(prompts, tower.ids if tower is not None else ())
        check_top_p(top_p)
        told = json.dumps([*map(list, prompts)]).encode()
        settings = {"the checksum of the prompts": zlib.crc32(told), "tokens": tokens, "top_p": top_p}
        return Proposal(settings={**settings, "stop": sorted(stop), "seed": seed})

    doing("a sample")
    agree(model, "sample", propose)
    said: list[list[int]] = [[] for _ in prompts]
    dice = [_dice(seed, number) for number in range(len(prompts))]
    for _ in range(tokens):
        logits_PV = _next_logits(model, _stream(model, prompts, said, tokens))
        # Equal bits on all ranks are not promised, and a rank that stopped earlier would leave the others waiting.
        chosen_P = model.mesh.gather_rows(_choose(logits_PV, top_p, dice), DENSE, "what rank 0 has chosen")
        for mine, token in zip(said, chosen_P[: len(said)].tolist(), strict=True):
            if not mine or mine[-1] not in stop:
                mine.append(token)
        if all(mine[-1] in stop for mine in said):
            break
    return said


def _stream(model: Model, prompts: Sequence[Sequence[int]], said: Sequence[Sequence[int]], tokens: int) -> Batch:
    """All that is there so far, each with room for what comes: no token sees those behind it, and shapes stay.

    The last token of each has a label: it is asked what comes next.
    """
    so_far = [[*prompt, *more] for prompt, more in zip(prompts, said, strict=True)]
    sizes = [len(prompt) + tokens for prompt in prompts]
    share = model.mesh.axes.cp * model.mesh.axes.tp
    filled = [[*ids, *[0] * (size - len(ids))] for ids, size in zip(so_far, sizes, strict=True)]
    labels = [[IGNORE] * size for size in sizes]
    for ids, of_document in zip(so_far, labels, strict=True):
        of_document[len(ids) - 1] = 0
    return pack(filled, labels=labels, length=-(-sum(sizes) // share) * share)


def _next_logits(model: Model, batch: Batch) -> Tensor:
    """`[P, V]` of the tokens that have a label."""
    here, mesh = batch.to(model.mesh.device), model.mesh
    found = parallel.run_forward(model, [here], "target_logits", lambda _batch, scores: scores[0])
    row_P, share = here.is_target_T.nonzero().flatten(), len(batch) // mesh.axes.cp
    wide = torch.promote_types(model.dtype, torch.float32)
    local_PV = torch.zeros(len(row_P), vocab_width(model), dtype=wide, device=mesh.device)
    for of_stage_PV in found:  # the last stage has some, and a rank of cp those of its own tokens
        local_PV[row_P // share == mesh.coords["cp"]] = of_stage_PV
    return over_vocabulary(model, mesh.all_reduce_(local_PV, Sum("the logits of a sample", ("pp", "cp"))))


def _choose(logits_PV: Tensor, top_p: float | None, dice: Sequence[torch.Generator]) -> Tensor:
    """A token for each prompt."""
    if top_p is None:
        return logits_PV.argmax(-1)
    probs_PV = logits_PV.double().softmax(-1)
    sorted_PV, order_PV = probs_PV.sort(-1, descending=True)
    is_beyond_PV = sorted_PV.cumsum(-1) - sorted_PV >= top_p  # those before it have this probability already
    probs_PV.scatter_(-1, order_PV, sorted_PV.masked_fill(is_beyond_PV, 0.0))
    # the one that comes first, if each comes at its own rate; every word has its own number, so ties in the order above
    # change nothing, as they may between meshes
    vocab = logits_PV.shape[1]
    time_PV = torch.stack([torch.empty(vocab, dtype=torch.float64).exponential_(generator=each) for each in dice])
    return (probs_PV / time_PV.to(probs_PV.device)).argmax(-1)


def _dice(seed: int, number: int) -> torch.Generator:
    """Of one prompt, whatever others there are. The global one is the training's."""
    mixed = sha256(f"{seed} {number}".encode()).digest()[:8]
    return torch.Generator().manual_seed(int.from_bytes(mixed, "big", signed=True))
