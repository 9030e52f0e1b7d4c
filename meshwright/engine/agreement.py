"""What must be the same on all ranks.

A call in which ranks wait for one another begins here: each rank tells the others what it is about to do, in one small
all-gather. A mistake on one rank is then an error on every rank, at once, and not a hang.
"""

from __future__ import annotations

import functools
import json
import operator
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields
from itertools import count
from typing import TypeVar

import torch
from torch import Tensor

from ..axes import DENSE
from ..data import WEIGHT, Batch, check_shifted
from ..errors import ConfigError, DataError, RankError, StateError, counted
from ..log import logger
from ..mesh import Mesh
from .model import Model
from .validation import check_autocast, check_batches, check_inference_mode
from .vision_sync import check_pictures, mask_of

Made = TypeVar("Made")

STEP, EVALUATE = "a step", "evaluate"
_ids = count(1)  # every rank takes part in each call over all axes, so all ranks count alike


@dataclass(frozen=True)
class Data:
    """What a rank brings to a call."""

    weight: float = 0.0  # the sum of the weights of its targets
    num_targets: int = 0
    num_batches: int = 0
    num_tokens: int = 0  # in each batch
    num_real: int = 0  # in all batches, without filler
    checksum: int = 0
    pictures: int = 0  # a bit for each micro-batch that has some


@dataclass(frozen=True)
class Told:
    """What the ranks of a call bring, a row for each, in their order. There may be thousands, and each step asks: no
    loop of Python runs over them."""

    rows: Tensor  # [ranks, fields of Data], float64, on the host
    data_ranks: Tensor  # of each

    def column(self, name: str) -> Tensor:
        return self.rows[:, _FIELDS.index(name)]

    def __getitem__(self, at: int) -> Data:
        weight, *numbers = self.rows[at].tolist()
        return Data(weight, *map(int, numbers))

    @property
    def pictures(self) -> int:
        """A bit for each micro-batch in which any rank has some."""
        return functools.reduce(operator.or_, map(int, self.column("pictures").unique().tolist()))

    @functools.cached_property
    def firsts(self) -> Tensor:
        """By data rank, where its first rank is."""
        num, device = len(self.rows), self.rows.device
        firsts = torch.full((int(self.data_ranks.max()) + 1,), num, device=device)
        return firsts.scatter_reduce_(0, self.data_ranks, torch.arange(num, device=device), "amin")

    @property
    def once(self) -> Told:
        """Of each data rank one row."""
        there = self.firsts[self.firsts < len(self.rows)]
        return Told(self.rows[there], self.data_ranks[there])


@dataclass(frozen=True)
class Proposal:
    """What a rank is about to do. All but its data must be the same on all ranks."""

    data: Data = Data()
    lr: float = 0.0
    max_norm: float | None = None
    settings: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """What all ranks have agreed on before a step: its settings, and its size over all data ranks."""

    lr: float
    max_norm: float | None
    weight: float
    num_targets: int
    num_tokens: int  # without filler
    num_batches: int
    pictures: int = 0  # a bit for each micro-batch in which any rank has some
    owner: object = None  # the engine whose gradients these are
    router_loss: float = 0.0  # known when backward is over


_FIELDS = [each.name for each in fields(Data)]
NUMBERS = 2 + len(_FIELDS)  # that each rank tells: whether it fails, a checksum of its settings, and its data


def place(call: str) -> str:
    return f"the agreement on {call}"


def agree(
    model: Model, call: str, propose: Callable[[], Proposal], axes: tuple[str, ...] = DENSE
) -> tuple[Proposal, Told]:
    """This rank's proposal, and the data of each rank of `axes`.

    If a rank refuses, or is about to do something else, every rank raises.
    """
    check_is_model(model)
    _check_outside_loss(model, call)

    def prepare() -> tuple[Proposal, Mapping[str, object], Data]:
        check_inference_mode()
        check_autocast(model.mesh.device.type)
        model.check_whole()
        model.low.check()
        proposal = propose()
        more = {**proposal.settings, "lr of this step": proposal.lr, "max_norm": proposal.max_norm}
        return proposal, {**identity(model), **more}, proposal.data

    proposal, told = compare(model.mesh, call, prepare, axes)
    if axes == DENSE and not model.calls.shared_id:
        model.calls.shared_id = next(_ids)
    return proposal, told


def compare(
    mesh: Mesh,
    call: str,
    prepare: Callable[[], tuple[Made, Mapping[str, object], Data]],
    axes: tuple[str, ...] = DENSE,
) -> tuple[Made, Told]:
    """What `prepare` made, and the data of each rank. What it says of settings must be the same on all.

    All calls tell equally many numbers, so ranks that are at different calls meet here, and each learns of the other.
    """
    failure: Exception | None = None
    made, settings, data = list[Made](), dict[str, str](), Data()
    try:
        mine, of_call, data = prepare()
        made = [mine]
        settings = {"the call": call, **{name: str(value) for name, value in of_call.items()}}
    except Exception as error:  # noqa: BLE001 - the others are waiting: they are told, and then all raise
        failure = error
    told = (zlib.crc32(json.dumps(settings).encode()), *astuple(data))
    rows = mesh.all_or_none(failure, place(call), numbers=told, axes=axes)
    ranks = mesh.ranks_over(axes)
    if bool((rows[:, 0] != rows[0, 0]).any()):
        raise RankError(_difference(ranks.tolist(), mesh.gather_objects(settings, axes)))
    return made[0], Told(rows[:, 1:], mesh.axes.data_rank(ranks))


def check_is_model(model: object) -> None:
    if not isinstance(model, Model):
        raise ConfigError(f"{type(model).__name__} is no model; give what mw.load returned (engine.model)")


def _check_outside_loss(model: Model, call: str) -> None:
    """Raised without a word to the others, who are in the middle of a step: a gathering would meet its collectives."""
    if model.calls.in_loss:
        raise StateError(
            f"{call} was called inside of the loss of the same model. Call it before the step, and give the loss what "
            "it says as a field: pack(..., fields=)"
        )


def check_ready(model: Model, trained: Sequence[str]) -> None:
    """Before a step: no gradients wait, and the parameters in training are those that have optimizer state."""
    if model.calls.pending is not None or model.grads():
        raise StateError("gradients of an earlier backward are waiting; call update() first, or discard()")
    changed = {*model.trainable} ^ ({*trained} & {*model.pieces})
    if changed:
        raise StateError(
            f"{min(changed)} and {len(changed) - 1} more changed requires_grad since the engine was made; choose "
            "what is trained with train= of mw.load"
        )


def identity(model: Model) -> dict[str, str]:
    """Which model this is. Ranks whose models differ would train something that no one process could."""
    trained = model.trained
    return {
        **{f"{k} of config.json": json.dumps(v, sort_keys=True) for k, v in model.blueprint.config.items()},
        "the compute dtype": str(model.dtype),
        **{
            f"{name} of mw.{type(options).__name__}": str(value)
            for options in (model.recipe.memory, model.recipe.pipeline, model.recipe.context)
            for name, value in vars(options).items()
        },
        "the checksum of the names of parameters in fp8": str(
            zlib.crc32(" ".join(sorted(model.blueprint.spec.fp8)).encode())
        ),
        "the origin of the weights": model.blueprint.origin,
        "the model (numbered in the order in which all ranks first used them, 0 if never)": str(model.calls.shared_id),
        "tower=": str(model.blueprint.tower),
        "the number of trained parameters": str(len(trained)),
        "the checksum of the names of trained parameters": str(zlib.crc32(" ".join(trained).encode())),
    }


def _difference(ranks: Sequence[int], settings: Sequence[Mapping[str, str]]) -> str:
    first = settings[0]
    for rank, other in zip(ranks, settings, strict=True):
        for name in dict.fromkeys((*first, *other)):
            mine, theirs = first.get(name, "nothing"), other.get(name, "nothing")
            if mine != theirs:
                return (
                    f"{name} is {theirs:.200} on rank {rank} and {mine:.200} on rank {ranks[0]}; "
                    "it must be the same on all ranks"
                )
    return "the ranks differ in their settings"  # of equal text and other checksums: cannot be


def data_of(model: Model, batches: Sequence[Batch], want: str) -> Data:
    """What this rank brings, checked. It reads values on the host: batches go to the device after it."""
    check_batches(batches, model.blueprint.vocab, model.mesh.axes.cp * model.mesh.axes.tp)
    check_pictures(batches, model.blueprint.module.tower, words=want != "values")
    if want != "values":  # labels of a value head are classes, or mark where there is a term
        check_shifted(*batches)
    masks = [b.is_target_T for b in batches]
    weights = [b.fields.get(WEIGHT, mask)[mask] for b, mask in zip(batches, masks, strict=True)]
    return Data(
        weight=sum(float(w.double().sum()) for w in weights),
        num_targets=sum(int(mask.sum()) for mask in masks),
        num_batches=len(batches),
        num_tokens=len(batches[0]),
        num_real=sum(len(b) - b.num_filler for b in batches),
        checksum=checksum([stream for batch in batches for stream in _streams(batch)]),
        pictures=mask_of(batches),
    )


def _streams(batch: Batch) -> list[Tensor]:
    bounds = torch.tensor(batch.bounds, device=batch.tokens.device)
    frames = torch.tensor([astuple(frame) for frame in batch.frames], device=batch.tokens.device)
    pixels = [] if batch.images is None else [batch.images.patches_PC]
    return [batch.tokens, batch.labels, bounds, *(batch.fields[name] for name in sorted(batch.fields)), frames, *pixels]


def checksum(tensors: Sequence[Tensor]) -> int:
    crc = 0
    for tensor in tensors:
        crc = zlib.crc32(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes(), crc)
    return crc


def check_same_data(told: Told, mesh: Mesh, axes: tuple[str, ...] = DENSE) -> None:
    """The ranks of one data rank bring the same data."""
    other = (told.rows != told.rows[told.firsts[told.data_ranks]]).any(1)
    if bool(other.any()):
        at, ranks = int(other.int().argmax()), mesh.ranks_over(axes)
        first = int(ranks[told.firsts[told.data_ranks[at]]])
        raise RankError(
            f"ranks {first} and {int(ranks[at])} are one data rank ({mesh.axes}), but were given different batches"
        )


def warn_of_same_data(told: Told, num_data_ranks: int) -> None:
    """It is no error, but most of the machine works for nothing."""
    checksums = told.column("checksum")
    if num_data_ranks > 1 and told[0].num_targets and bool((checksums == checksums[0]).all()):
        _warn_of_same_data(num_data_ranks)


@functools.cache  # once
def _warn_of_same_data(num: int) -> None:
    logger.warning(
        "all %d data ranks bring the same documents, so each is learnt %d times in a step; give every data rank its "
        "own (mesh.data_rank), or those of all to mw.batches",
        num, num,
    )  # fmt: skip


def whole_step(proposal: Proposal, told: Told, mesh: Mesh) -> Step:
    """The step that all data ranks make together. They must bring equally much, and something to learn from."""
    sizes = torch.stack([told.column("num_batches"), told.column("num_tokens")], 1)
    if bool((sizes != sizes[0]).any()):
        rank, first = int((sizes != sizes[0]).any(1).int().argmax()), told[0]
        data = told[rank]
        raise RankError(
            f"rank {rank} has {counted(data.num_batches, 'batch', 'batches')} of "
            f"{counted(data.num_tokens, 'token')}, rank 0 {first.num_batches:,} of {first.num_tokens:,}; "
            "all ranks need the same number of batches and tokens"
        )
    check_same_data(told, mesh)
    once = told.once  # sums of Python, in the order of ranks: those of torch may depend on the processor
    weight, num_targets = sum(once.column("weight").tolist()), int(once.column("num_targets").sum())
    if not num_targets:
        raise DataError(
            "no token of the step has a label, so there is nothing to learn from. If trained= came from a chat "
            "template, it marks answers with {% generation %}, or its mask is all 0"
        )
    if weight <= 0:
        raise DataError(f"the step's {num_targets} targets weigh {weight}; there is nothing to learn from")
    num_tokens, num_batches = int(once.column("num_real").sum()), told[0].num_batches
    return Step(proposal.lr, proposal.max_norm, weight, num_targets, num_tokens, num_batches, told.pictures)
