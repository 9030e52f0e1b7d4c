"""One forward over a packed stream, with and without gradients."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .. import parallel
from ..data import IGNORE, Batch
from ..errors import DataError, StateError
from ..mesh import REPLICA, watched
from ..ops import documents
from .agreement import agree, check_data
from .model import Model

WEIGHT = "weight"  # the field that weighs the terms of a loss


def check(model: Model, batch: Batch) -> None:
    """What can be wrong with a batch, said before any work."""
    share = model.mesh.axes.cp * model.mesh.axes.tp
    if len(batch) % share:
        fit = -(-len(batch) // share) * share
        raise DataError(f"a batch of {len(batch)} tokens does not divide into cp*tp={share}; pack(..., length={fit})")
    _check_made(batch)
    for name, values in {"labels": batch.labels, **batch.fields}.items():
        if values.shape != batch.tokens.shape:
            raise DataError(f"{name} has shape {tuple(values.shape)} for {len(batch)} tokens; one number a token")
    weights = batch.fields.get(WEIGHT)
    if weights is not None and not weights.isfinite().all():
        at = int((~weights.isfinite()).nonzero()[0])
        raise DataError(f"the weight at position {at} is {float(weights[at])}; weights must be finite numbers")
    vocab = model.parts[0].trunk.vocab
    for what, values, lowest in (("token", batch.tokens, 0), ("label", batch.labels, IGNORE)):
        bad = (values < lowest) | (values >= vocab) | ((values < 0) & (values != lowest))
        if bad.any():
            at = int(bad.nonzero()[0])
            raise DataError(f"{what} {int(values[at])} at position {at} is outside the vocabulary of {vocab}")


def _check_made(batch: Batch) -> None:
    """What `pack` makes right, and a batch made by hand may have wrong."""
    wrong = [n for n, x in {"tokens": batch.tokens, "labels": batch.labels}.items() if not _whole_numbers(x)]
    fields: Mapping[str, object] = batch.fields
    wrong += [n for n, x in fields.items() if not isinstance(x, Tensor) or x.is_complex()]
    if not wrong and not _same_documents(batch):
        wrong = [f"docs (to {batch.docs.bounds[-1]} of {len(batch)} tokens)"]
    filler: object = batch.num_filler
    if not isinstance(filler, int) or not 0 <= filler <= len(batch):
        wrong = ["num_filler"]
    if wrong:
        raise DataError(f"{wrong[0]} of the batch is not as mw.pack makes it; make batches with pack(...)")


def _whole_numbers(x: object) -> bool:
    return isinstance(x, Tensor) and x.dtype in (torch.int64, torch.int32)  # uint8 would be a mask


def _same_documents(batch: Batch) -> bool:
    docs = batch.docs
    if docs.bounds[0] != 0 or docs.bounds[-1] != len(batch) or min(docs.lengths) < 1:
        return False
    made = documents(docs.lengths, docs.positions_T.device, padded=len(docs.cu_seqlens))
    pairs = ((made.cu_seqlens, docs.cu_seqlens), (made.positions_T, docs.positions_T))
    return all(torch.equal(ours, theirs) for ours, theirs in pairs)


def counted(batch: Batch, want: str) -> Tensor:
    """Which tokens have a term of the loss: those with a label; of values, all but filler."""
    if want == "values":
        return torch.arange(len(batch), device=batch.tokens.device) < len(batch) - batch.num_filler
    return batch.labels != IGNORE


def score(model: Model, batch: Batch, want: str) -> dict[str, Tensor]:
    """Scores of this rank's own tokens (logits: of all tokens, this rank's vocabulary). `batch` is on the device."""
    module = model.parts[0]
    if want not in module.scores:
        raise StateError(f"this model's head gives {', '.join(module.scores)}, not {want}; choose head= in load")
    outs = module(batch.tokens, batch.labels, batch.docs, want)
    names = ("logprobs", "entropy") if want == "entropy" else (want,)
    return dict(zip(names, outs, strict=True))


def own(model: Model, batch: Batch, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of per-token values, those of this rank's own tokens."""
    lo, hi = model.mesh.token_range(len(batch))
    return {name: value[lo:hi] for name, value in values.items()}


def summary(model: Model, batches: Sequence[Batch], want: str) -> list[float]:
    """Weight, targets, number of batches, tokens of each, tokens without filler, and a checksum of the data."""
    if isinstance(batches, Batch) or not isinstance(batches, Sequence):
        raise DataError("a step takes a list of batches: engine.step([batch])")
    if not batches:
        raise DataError("a step needs at least one batch")
    for batch in batches:
        if not isinstance(batch, Batch):
            raise DataError(f"a batch must be one that mw.pack made, not a {type(batch).__name__}")
        check(model, batch)
        if batch.tokens.is_inference():
            raise DataError("a batch was packed under torch.inference_mode(); no step can use it. Pack it outside")
    sizes = {len(b) for b in batches}
    if len(sizes) > 1:
        raise DataError(f"the batches of a step have {sorted(sizes)} tokens; pack(..., length=) makes them equal")
    masks = [counted(b, want) for b in batches]
    targets = sum(int(mask.sum()) for mask in masks)
    weights = [b.fields.get(WEIGHT, mask)[mask] for b, mask in zip(batches, masks, strict=True)]
    weight = sum(float(w.double().sum()) for w in weights)
    crc = 0
    for b in batches:
        for tensor in (
            b.tokens,
            b.labels,
            torch.tensor(b.docs.bounds, device=b.tokens.device),
            *(b.fields[k] for k in sorted(b.fields)),
        ):
            crc = zlib.crc32(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes(), crc)
    return [weight, targets, len(batches), len(batches[0]), sum(len(b) - b.num_filler for b in batches), crc]


@torch.no_grad()
def look(model: Model, batch: Batch, want: str, call: str) -> Tensor:
    """Scores without gradients. Replicas may look at other times, or not at all."""
    rows = agree(model, call, lambda: ({}, summary(model, [batch], want)), REPLICA)
    check_data(rows, model.mesh.axes.group(model.mesh.rank, REPLICA), model.mesh.axes)
    lo, hi = model.mesh.token_range(len(batch))
    model.parts[0].balance.begin(torch.ones(hi - lo, dtype=torch.bool, device=model.mesh.device))
    try:
        return score(model, batch.to(model.mesh.device), want)[want]
    finally:
        parallel.rest(model.parts[0])


@watched()
def logprobs(model: Model, batch: Batch) -> Tensor:
    """`[T]` log-probabilities of the labels of this data rank's tokens (0 where there is no label), no gradients."""
    own_T = look(model, batch, "logprobs", "logprobs")
    labels = batch.labels.to(own_T.device)
    return model.mesh.gather_rows(own_T, ("cp", "tp")).masked_fill(labels == IGNORE, 0.0)


@watched()
def logits(model: Model, batch: Batch) -> Tensor:
    """`[T, V]` of this data rank's tokens (head "value": `[T]`, or `[T, labels]` of several), at least float32, no
    gradients."""
    if "values" in model.parts[0].scores:
        return model.mesh.gather_rows(look(model, batch, "values", "logits"), ("cp", "tp"))
    local_TV = look(model, batch, "logits", "logits")
    vocab, tp = model.parts[0].trunk.vocab, model.mesh.axes.tp
    widest = -(-vocab // tp)  # the last slice of the vocabulary may be shorter
    padded = torch.nn.functional.pad(local_TV.t(), (0, 0, 0, widest - local_TV.shape[1]))
    return model.mesh.gather_rows(padded, ("tp",))[:vocab].t()
