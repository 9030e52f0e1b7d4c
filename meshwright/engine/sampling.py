"""Sampling: generate token ids after prompts, one forward of all sequences for each token.

It runs on the training mesh with the training layout. There is no KV cache, so the cost of a text grows with the square
of its length: it suits a look at a model, not serving.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from numbers import Integral

import torch
from torch import Tensor

from .. import parallel
from ..axes import DENSE, Sum
from ..data import IGNORE, PLACEHOLDERS, Batch, ImagePatches, pack
from ..errors import ConfigError, StateError
from ..models import Want, text_config
from ..watch import doing, names_lost_ranks
from .agreement import Proposal, agree
from .inference import gather_vocabulary, vocab_slice_size
from .model import Model
from .validation import check_no_placeholders, check_prompts, check_temperature, check_top_p

_FIRST_ROOM = 16  # tokens that are padded for at first; then twice as many, and so on


@dataclass(frozen=True)
class Decoding:
    """Options for continuing prompts: the arguments of `sample`. `images`: those of each prompt, on one process."""

    tokens: int
    top_p: float | None = None
    temperature: float | None = None
    stop: Collection[int] = ()
    seed: int = 0
    images: Sequence[Sequence[ImagePatches]] | None = None

    @property
    def is_greedy(self) -> bool:
        """Return whether the likeliest token is chosen instead of drawing one."""
        return self.top_p is None and self.temperature is None

    def check(self) -> None:
        """Refuse a `top_p` that is not a probability, `stop` other than token ids, and a temperature that nothing can
        be divided by."""
        check_top_p(self.top_p)
        stop: object = self.stop
        if not isinstance(stop, Collection) or not all(isinstance(token, Integral) for token in stop):
            raise ConfigError(f"stop={self.stop!r:.80} must be a list of token ids, such as stop=[151645]")
        if self.temperature is not None:
            check_temperature(self.temperature)


@names_lost_ranks()
def sample(
    model: Model,
    prompts: Sequence[Sequence[int]],
    *,
    tokens: int,
    top_p: float | None = None,
    temperature: float | None = None,
    stop: Collection[int] = (),
    seed: int = 0,
) -> list[list[int]]:
    """Generate at most `tokens` token ids after each prompt. All ranks call it and get the same.

    Decoding is greedy. With `top_p` (nucleus sampling, arXiv 1904.09751) a token is drawn from the smallest set of the
    likeliest tokens whose probabilities sum to `top_p`. With `temperature` a token is drawn too, and the logits are
    divided by it first. The draws depend on `seed` and the index of the prompt. A sequence ends after a token of
    `stop`, which the result includes.
    """
    generated: list[list[int]] = [[] for _ in prompts]
    for chosen in token_stream(model, prompts, Decoding(tokens, top_p, temperature, stop, seed)):
        for ids, token in zip(generated, chosen, strict=True):
            ids.extend([] if token is None else [token])
    return generated


def token_stream(model: Model, prompts: Sequence[Sequence[int]], how: Decoding) -> Iterator[list[int | None]]:
    """Yield the next token of each prompt, None after a prompt's end, until all have ended. Collective."""

    def propose() -> Proposal:
        _check(model, prompts, how)
        text = json.dumps([*map(list, prompts)]).encode()
        settings = {"the checksum of the prompts": zlib.crc32(text), "tokens": how.tokens, "top_p": how.top_p}
        drawn = {"temperature": how.temperature, "stop": sorted(how.stop), "seed": how.seed}
        return Proposal(settings={**settings, **drawn})

    doing("a sample")
    agree(model, "sample", propose)
    generated: list[list[int]] = [[] for _ in prompts]
    generators = [_generator(how.seed, number) for number in range(len(prompts))]
    for _ in range(how.tokens):
        logits_PV = _next_logits(model, _pack_sequences(model, prompts, generated, how))
        # Logits need not be bitwise equal on all ranks, so near a tie ranks could choose different tokens, and a rank
        # that stopped earlier would leave the others waiting. So all ranks take the choice of rank 0.
        chosen_P = model.mesh.gather_rows(_choose(logits_PV, how, generators), DENSE, "the choice of rank 0")
        drawn = chosen_P[: len(generated)].tolist()
        chosen = [None if ids and ids[-1] in how.stop else token for ids, token in zip(generated, drawn, strict=True)]
        for ids, token in zip(generated, chosen, strict=True):
            ids.extend([] if token is None else [token])
        yield chosen
        if all(ids[-1] in how.stop for ids in generated):
            break


def _check(model: Model, prompts: Sequence[Sequence[int]], how: Decoding) -> None:
    """Refuse what cannot be continued, before any work."""
    if "target_logits" not in model.blueprint.scores:
        raise StateError('the head of this model does not score the vocabulary; load it with head="lm"')
    longest = text_config(model.config).get("max_position_embeddings")
    check_prompts(prompts, how.tokens, model.blueprint.vocab, longest)
    tower = model.blueprint.module.tower
    if how.images is None:
        check_no_placeholders(prompts, tower.ids if tower is not None else ())
    how.check()


def _pack_sequences(
    model: Model, prompts: Sequence[Sequence[int]], generated: Sequence[Sequence[int]], how: Decoding
) -> Batch:  # fmt: skip
    """Pack all sequences so far, each padded for the next tokens.

    Attention is causal, so padding after a token changes nothing. The room is doubled whenever it is full: shapes stay
    the same for many tokens, which saves recompilation, and a short answer does not pay for a long one. The last token
    of each sequence has a label, because scores are computed only for labelled tokens.
    """
    so_far = [[*prompt, *new] for prompt, new in zip(prompts, generated, strict=True)]
    room = _room(max(map(len, generated)), how.tokens)
    sizes = [len(prompt) + room for prompt in prompts]
    share = model.mesh.axes.cp * model.mesh.axes.tp
    padded = [[*ids, *[0] * (size - len(ids))] for ids, size in zip(so_far, sizes, strict=True)]
    labels = [[IGNORE] * size for size in sizes]
    for ids, document_labels in zip(so_far, labels, strict=True):
        document_labels[len(ids) - 1] = 0  # any token id will do: only the position matters
    tower, images = model.blueprint.module.tower, how.images
    places = PLACEHOLDERS if tower is None else tower.ids
    length = -(-sum(sizes) // share) * share
    return pack(padded, labels=labels, images=images, placeholders=places, length=length)


def _room(num_generated: int, tokens: int) -> int:
    """Return how many tokens after a prompt are padded for."""
    room = _FIRST_ROOM
    while room < num_generated:
        room *= 2
    return min(room, tokens)


def _next_logits(model: Model, batch: Batch) -> Tensor:
    """Return `[P, V]` logits of the tokens with a label, one per prompt, on all ranks."""
    local, mesh = batch.to(model.mesh.device), model.mesh
    results = parallel.run_forward(model, [local], Want("target_logits"), lambda _batch, scores: scores[0])
    row_P, share = local.is_target_T.nonzero().flatten(), len(batch) // mesh.axes.cp
    wide = torch.promote_types(model.dtype, torch.float32)
    local_PV = torch.zeros(len(row_P), vocab_slice_size(model), dtype=wide, device=mesh.device)
    # Only the last stage has a result, with the prompts whose last token is on this cp rank.
    for result_PV in results:
        local_PV[row_P // share == mesh.coords["cp"]] = result_PV
    logits_PV = gather_vocabulary(model, mesh.all_reduce_(local_PV, Sum("the logits of a sample", ("pp", "cp"))))
    tower = model.blueprint.module.tower
    if tower is not None:  # a generated placeholder would be the place of an image that does not exist
        logits_PV[:, [*tower.ids]] = -torch.inf
    return logits_PV


def _choose(logits_PV: Tensor, how: Decoding, generators: Sequence[torch.Generator]) -> Tensor:
    """Choose a token for each prompt: the likeliest, or one that is drawn."""
    if how.is_greedy:
        return logits_PV.argmax(-1)
    probs_PV = (logits_PV.double() / (how.temperature or 1.0)).softmax(-1)
    if how.top_p is not None:
        sorted_PV, order_PV = probs_PV.sort(-1, descending=True)
        is_beyond_PV = sorted_PV.cumsum(-1) - sorted_PV >= how.top_p  # the likelier tokens alone reach top_p
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
