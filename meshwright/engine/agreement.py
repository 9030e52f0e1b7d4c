"""The agreement: ranks compare settings and data before a collective call, so a mismatch raises instead of hanging.

Each rank contributes one row to a small all-gather between hosts: whether it has failed, a checksum of its settings,
and the size of its data. So a mistake on one rank raises on every rank at once. Without it, the other ranks would hang
in a collective that this rank never enters, or reduce tensors that do not belong together.

The same rows bring the divisor of the loss: the number of targets of the step, or the sum of their weights, over all
data ranks. It is known before the first backward, so gradients are plain sums and nothing is averaged.
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
from .loss_documents import LossDocuments
from .model import Model
from .mtp import MtpData, mtp_data
from .step_results import Results
from .validation import check_autocast, check_batches, check_candidate_ids, check_given_experts, check_inference_mode
from .vision_sync import check_images, images_mask

Result = TypeVar("Result")

STEP, EVALUATE = "a step", "evaluate"
_ids = count(1)  # every rank takes part in each call over all axes, so the counters agree


@dataclass(frozen=True)
class Data:
    """The size of a rank's data for one call. Its fields are columns of the all-gathered rows."""

    weight: float = 0.0  # the sum of the weights of its targets
    mtp_weight: float = 0.0  # likewise of the MTP head, if it is trained (`MtpData`)
    num_targets: int = 0
    num_mtp_targets: int = 0
    num_followed: int = 0
    num_batches: int = 0
    num_tokens: int = 0  # in each batch
    num_real: int = 0  # in all batches, without padding
    checksum: int = 0
    images_mask: int = 0  # a bit for each micro-batch that has some


@dataclass(frozen=True)
class GatheredData:
    """The `Data` of all ranks of a call, a row for each rank, in rank order.

    It stays a tensor: each step reads it, and a Python loop over thousands of ranks would delay every step.
    """

    rows: Tensor  # [ranks, fields of Data], float64, on the host
    data_ranks: Tensor  # the data rank of each row

    def column(self, name: str) -> Tensor:
        """Return one field of `Data`, by rank."""
        return self.rows[:, _FIELDS.index(name)]

    def __getitem__(self, at: int) -> Data:
        weight, mtp_weight, *numbers = self.rows[at].tolist()
        return Data(weight, mtp_weight, *map(int, numbers))

    @property
    def images_mask(self) -> int:
        """Return a bit for each micro-batch in which any rank has images."""
        return functools.reduce(operator.or_, map(int, self.column("images_mask").unique().tolist()))

    @functools.cached_property
    def first_rows(self) -> Tensor:
        """Return the row of the first rank of each data rank; `len(rows)` for a data rank that is not in the call."""
        num, device = len(self.rows), self.rows.device
        first_rows = torch.full((int(self.data_ranks.max()) + 1,), num, device=device)
        return first_rows.scatter_reduce_(0, self.data_ranks, torch.arange(num, device=device), "amin")

    @property
    def per_data_rank(self) -> GatheredData:
        """Return one row for each data rank. Ranks of one data rank hold the same batch, so summing all rows would
        count its targets cp x tp x pp times."""
        present = self.first_rows[self.first_rows < len(self.rows)]
        return GatheredData(self.rows[present], self.data_ranks[present])


@dataclass(frozen=True)
class Proposal:
    """The call that a rank is about to make. All but `data` must be the same on all ranks."""

    data: Data = Data()
    lr: float = 0.0
    max_norm: float | None = None
    settings: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """A step that all ranks have agreed on: its settings, and its size over all data ranks."""

    lr: float
    max_norm: float | None
    weight: float  # the divisor of the loss: the sum of the weights of all targets
    num_targets: int
    num_tokens: int  # without padding
    num_batches: int
    images_mask: int = 0  # a bit for each micro-batch in which any rank has some
    owner: object = None  # the engine whose gradients these are
    mtp: MtpData = field(default_factory=MtpData)
    results: Results = field(default_factory=Results)  # known when backward is over


_FIELDS = [each.name for each in fields(Data)]
NUM_COLUMNS = 2 + len(_FIELDS)  # of an all-gathered row: whether the rank failed, a checksum of its settings, its data


def agreement_name(call: str) -> str:
    """Return the name of the all-gather, on the bill and in diagnoses of lost ranks."""
    return f"the agreement on {call}"


def agree(
    model: Model, call: str, propose: Callable[[], Proposal], axes: tuple[str, ...] = DENSE, *, asleep: bool = False
) -> tuple[Proposal, GatheredData]:
    """Return this rank's proposal, and the data of each rank of `axes`.

    If `propose` raises on any rank, or ranks are about to make different calls, every rank raises. `asleep`: the call
    needs no weights, which may be asleep.
    """
    check_is_model(model)
    _check_outside_loss(model, call)

    def prepare() -> tuple[Proposal, Mapping[str, object], Data]:
        # Checks that can fail on one rank alone belong in this function: `compare` reports their errors to all ranks.
        check_inference_mode()
        check_autocast(model.mesh.device.type)
        if not asleep:
            model.calls.asleep.check_weights()
        model.check_whole()
        model.low.check()
        proposal = propose()
        more = {**proposal.settings, "lr of this step": proposal.lr, "max_norm": proposal.max_norm}
        return proposal, {**identity(model), **more}, proposal.data

    proposal, gathered = compare(model.mesh, call, prepare, axes)
    # All ranks number models in the order of their first call. `identity` compares the numbers, so ranks that mix up
    # two models of one architecture raise, even though all their settings agree.
    if axes == DENSE and not model.calls.shared_id:
        model.calls.shared_id = next(_ids)
    return proposal, gathered


def compare(
    mesh: Mesh,
    call: str,
    prepare: Callable[[], tuple[Result, Mapping[str, object], Data]],
    axes: tuple[str, ...] = DENSE,
) -> tuple[Result, GatheredData]:
    """Run `prepare`; return its result, and the data of each rank. Raise if the settings differ between ranks.

    Rows have the same width in every call. So ranks in different calls (one steps, one saves) meet in the same
    all-gather, and the checksums show the difference.
    """
    failure: Exception | None = None
    results, settings, data = list[Result](), dict[str, str](), Data()
    try:
        result, of_call, data = prepare()
        results = [result]
        settings = {"the call": call, **{name: str(value) for name, value in of_call.items()}}
    except Exception as error:  # noqa: BLE001 - the other ranks are waiting: the all-gather reports it, then all raise
        failure = error
    row = (zlib.crc32(json.dumps(settings).encode()), *astuple(data))
    rows = mesh.all_or_none(failure, agreement_name(call), numbers=row, axes=axes)
    ranks = mesh.ranks_over(axes)
    # A checksum is enough to detect a difference. Only then do ranks exchange the settings, to name it.
    if bool((rows[:, 0] != rows[0, 0]).any()):
        raise RankError(_difference(ranks.tolist(), mesh.gather_objects(settings, axes)))
    return results[0], GatheredData(rows[:, 1:], mesh.axes.data_rank(ranks))


def check_is_model(model: object) -> None:
    """Refuse anything but a `Model`, such as an engine."""
    if not isinstance(model, Model):
        raise ConfigError(f"{type(model).__name__} is not a model; give what mw.load returned (engine.model)")


def _check_outside_loss(model: Model, call: str) -> None:
    """Refuse a call from inside the loss of the same model.

    This rank raises alone: the other ranks are in the middle of a step, and an all-gather would pair up with a
    collective of that step.
    """
    if model.calls.in_loss:
        raise StateError(
            f"{call} was called inside the loss of the same model. Call it before the step, and pass its result to "
            "the loss as a field: pack(..., fields=)"
        )


def check_ready(model: Model, trained: Sequence[str]) -> None:
    """Refuse a step while anything is asleep or gradients wait for `update`, or after `requires_grad` was changed by
    hand.

    Optimizer state, the bill and the order of backward were decided for the parameters that `train=` named.
    """
    model.calls.asleep.check()
    if model.calls.pending is not None or model.grads():
        raise StateError("gradients of an earlier backward are waiting; call update() first, or discard()")
    changed = {*model.trainable} ^ ({*trained} & {*model.pieces})
    if changed:
        raise StateError(
            f"{min(changed)} and {len(changed) - 1} more changed requires_grad after the engine was created; choose "
            "the trained parameters with train= of mw.load"
        )


def identity(model: Model) -> dict[str, str]:
    """Return everything that defines the model and how it runs, by the name that an error would show.

    Ranks whose models differ in any of it would train something that one process could not.
    """
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
        "mtp=": model.recipe.mtp,
        "mtp_weight=": str(model.recipe.mtp_weight),
        "the adapters (model.base() switches them off)": "off" if model.calls.in_base else "on",
        "the number of trained parameters": str(len(trained)),
        "the checksum of the names of trained parameters": str(zlib.crc32(" ".join(trained).encode())),
    }


def _difference(ranks: Sequence[int], settings: Sequence[Mapping[str, str]]) -> str:
    """Describe the first setting in which a rank differs from the first rank."""
    expected = settings[0]
    for rank, other in zip(ranks, settings, strict=True):
        for name in dict.fromkeys((*expected, *other)):
            value, expected_value = other.get(name, "nothing"), expected.get(name, "nothing")
            if expected_value != value:
                return (
                    f"{name} is {value:.200} on rank {rank} and {expected_value:.200} on rank {ranks[0]}; "
                    "it must be the same on all ranks"
                )
    return "the ranks differ in their settings"  # unreachable: equal texts have equal checksums


def data_of(model: Model, batches: Sequence[Batch], want: str, per: str = "token", candidates: str = "") -> Data:
    """Check this rank's batches and measure them. It reads values on the host, so it runs before they are copied to the
    device. `per`: the unit of a loss term, whose weight is the divisor. `candidates`: the field with token ids that the
    loss also scores.
    """
    check_batches(batches, model.blueprint.vocab, model.mesh.axes.cp * model.mesh.axes.tp)
    marks = want in ("values", "hidden")  # labels are classes, or mark the tokens that have a term
    check_images(batches, model.blueprint.module.tower, token_labels=not marks)
    check_given_experts(batches, model.blueprint.balance)
    check_candidate_ids(batches, candidates, model.blueprint.vocab)
    if not marks:
        check_shifted(*batches)
    masks = [b.is_target_T for b in batches]
    mtp = mtp_data(batches) if model.recipe.mtp != "carried" else MtpData()
    return Data(
        weight=sum(_weight(batch, per) for batch in batches),
        mtp_weight=mtp.weight,
        num_targets=sum(int(mask.sum()) for mask in masks),
        num_mtp_targets=mtp.num_targets,
        num_followed=mtp.num_followed,
        num_batches=len(batches),
        num_tokens=len(batches[0]),
        num_real=sum(len(b) - b.num_filler for b in batches),
        checksum=checksum([stream for batch in batches for stream in _streams(batch)]),
        images_mask=images_mask(batches),
    )


def _weight(batch: Batch, per: str) -> float:
    """Return the weight of a batch's targets: the sum over tokens, or the number of documents or groups with a target.

    For a loss that is not divided (per "micro_batch") it is the number of targets, since weights may sum to anything.
    """
    is_target_T = batch.is_target_T
    if per == "micro_batch":
        return float(batch.num_targets)
    if per in ("document", "group", "step"):
        return float(LossDocuments.of(batch).has_target(per).sum())
    return float(batch.fields.get(WEIGHT, is_target_T)[is_target_T].double().sum())


def _streams(batch: Batch) -> list[Tensor]:
    """Return all tensors of a batch, for its checksum."""
    index = {group: at for at, group in enumerate(dict.fromkeys(batch.groups))}  # ids may differ where groups do not
    of_documents = [*batch.bounds, *batch.numbers, *(index[group] for group in batch.groups)]
    bounds = torch.tensor(of_documents, device=batch.tokens.device)
    frames = torch.tensor([astuple(frame) for frame in batch.frames], device=batch.tokens.device)
    pixels = [] if batch.images is None else [batch.images.patches_PC]
    more = [*pixels, *([] if batch.experts is None else [batch.experts])]
    return [batch.tokens, batch.labels, bounds, *(batch.fields[name] for name in sorted(batch.fields)), frames, *more]


def checksum(tensors: Sequence[Tensor]) -> int:
    """Return the CRC-32 of the bytes of tensors. It fits exactly into the float64 of a row."""
    crc = 0
    for tensor in tensors:
        crc = zlib.crc32(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes(), crc)
    return crc


def check_same_data(gathered: GatheredData, mesh: Mesh, axes: tuple[str, ...] = DENSE) -> None:
    """Refuse different batches on the ranks of one data rank.

    These ranks share the tokens of one batch, so different batches would be mixed silently.
    """
    differs = (gathered.rows != gathered.rows[gathered.first_rows[gathered.data_ranks]]).any(1)
    if bool(differs.any()):
        at, ranks = int(differs.int().argmax()), mesh.ranks_over(axes)
        first = int(ranks[gathered.first_rows[gathered.data_ranks[at]]])
        raise RankError(
            f"ranks {first} and {int(ranks[at])} are one data rank ({mesh.axes}) but got different batches; give all "
            "ranks with the same mesh.data_rank the same ones"
        )


def warn_of_same_data(gathered: GatheredData, num_data_ranks: int) -> None:
    """Warn if all data ranks have the same batches. It is not an error, but all data ranks but one are wasted."""
    checksums = gathered.column("checksum")
    if num_data_ranks > 1 and gathered[0].num_targets and bool((checksums == checksums[0]).all()):
        _warn_of_same_data(num_data_ranks)


@functools.cache  # once
def _warn_of_same_data(num: int) -> None:
    logger.warning(
        "all %d data ranks bring the same documents, so a step trains on each %d times; give every data rank its own "
        "(by mesh.data_rank), or give the documents of all ranks to mw.batches",
        num, num,
    )  # fmt: skip


def whole_step(proposal: Proposal, gathered: GatheredData, mesh: Mesh) -> Step:
    """Return the step that all data ranks make together. Refuse unequal batches, and a step without targets.

    All ranks need the same number of micro-batches of one length, since each micro-batch runs the same collectives.
    """
    sizes = torch.stack([gathered.column("num_batches"), gathered.column("num_tokens")], 1)
    if bool((sizes != sizes[0]).any()):
        rank, first = int((sizes != sizes[0]).any(1).int().argmax()), gathered[0]
        data = gathered[rank]
        raise RankError(
            f"rank {rank} has {counted(data.num_batches, 'batch', 'batches')} of "
            f"{counted(data.num_tokens, 'token')}, rank 0 {first.num_batches:,} of {first.num_tokens:,}; "
            "all ranks need the same number of batches and tokens"
        )
    check_same_data(gathered, mesh)
    unique = gathered.per_data_rank
    # Summed by Python in rank order: every rank must get the same bits for the divisor, and the order in which torch
    # adds may depend on the processor.
    weight, num_targets = sum(unique.column("weight").tolist()), int(unique.column("num_targets").sum())
    if not num_targets:
        raise DataError(
            "no token of the step has a label, so the step has nothing to learn from. If trained= came from a chat "
            "template, the template must mark answers with {% generation %}, or its mask is all 0"
        )
    if weight <= 0:
        raise DataError(
            f"the weights of the step's {num_targets} targets sum to {weight}; give some target a weight above 0, so "
            "that the loss has a divisor"
        )
    num_tokens, num_batches = int(unique.column("num_real").sum()), gathered[0].num_batches
    mtp_targets, followed = (int(unique.column(name).sum()) for name in ("num_mtp_targets", "num_followed"))
    mtp = MtpData(sum(unique.column("mtp_weight").tolist()), mtp_targets, followed)
    numbers = weight, num_targets, num_tokens, num_batches
    return Step(proposal.lr, proposal.max_norm, *numbers, gathered.images_mask, mtp=mtp)
