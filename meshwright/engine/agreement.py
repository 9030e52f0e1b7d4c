"""Before a call in which ranks wait for one another, each tells the others what it is about to do, and if it can."""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from itertools import count
from weakref import WeakSet

import torch

from ..errors import RankError, StateError
from ..mesh import DENSE, Axes
from .model import Model, refuse_inference_mode, refuse_other_than_a_model

TOLD = 8  # numbers of every rank: whether it refuses, a checksum of its settings, and six of its data
NO_DATA = [0.0] * (TOLD - 2)

Rows = list[list[float]]  # of each rank: weight, targets, batches, tokens of each, tokens without filler, a checksum
Settings = Mapping[str, object]


_numbers = count(1)  # every rank takes part in each call over all axes, so they count alike
_in_their_loss: WeakSet[Model] = WeakSet()


@contextlib.contextmanager
def in_its_loss(model: Model) -> Iterator[None]:
    """Meanwhile the model must not run: its sums and counts of this micro-batch are still wanted."""
    _in_their_loss.add(model)
    try:
        yield
    finally:
        _in_their_loss.discard(model)


def agree(
    model: Model, call: str, tell: Callable[[], tuple[Settings, list[float]]], axes: tuple[str, ...] = DENSE
) -> Rows:
    """What each rank of `axes` tells of its data. Where one refuses, or is about to do another thing, all raise."""
    refuse_other_than_a_model(model)
    if model in _in_their_loss:
        raise StateError(
            f"{call} was called for a model whose loss is being reckoned; what a loss needs of its own model must be "
            "reckoned before the step, and come as a field: pack(..., fields=)"
        )
    problem: Exception | None = None
    settings: dict[str, str] = {}
    try:
        refuse_inference_mode()
        _refuse_autocast(model.mesh.device.type)
        model.refuse_torn()
        more, data = tell()
        settings = {"call": call, **_identity(model), **{name: str(value) for name, value in more.items()}}
        row = [0.0, float(zlib.crc32(json.dumps(settings).encode())), *data]
    except Exception as error:  # noqa: BLE001 - the others are waiting: they are told, and then all raise
        problem, row = error, [1.0, 0.0, *NO_DATA]
    mine = torch.tensor([row], dtype=torch.float64, device=model.mesh.device)
    rows: Rows = model.mesh.gather_rows(mine, axes, place(call)).tolist()
    if problem is not None:
        raise problem
    ranks = model.mesh.axes.group(model.mesh.rank, axes)
    refusing = [rank for rank, told in zip(ranks, rows, strict=True) if told[0]]
    if refusing:
        raise RankError(f"rank {refusing[0]} refuses to take part in {call}; see its message")
    if any(told[1] != rows[0][1] for told in rows):
        raise RankError(_difference(ranks, model.mesh.gather_objects(settings, axes)))
    if axes == DENSE and not model.number:
        model.number = next(_numbers)
    return [told[2:] for told in rows]


def _identity(model: Model) -> dict[str, str]:
    trained = model.trainable
    return {
        **{f"{name} of config.json": json.dumps(value, sort_keys=True) for name, value in model.config.items()},
        "the compute dtype": str(model.dtype),
        **{f"the saving {name}": str(value) for name, value in asdict(model.savings).items()},
        "the seed": str(model.seed),
        "the checksum of the files that the model was loaded from": str(model.checksum),
        "which model this is, of those that all ranks have used together (0: none yet),": str(model.number),
        "the number of trained parameters": str(len(trained)),
        "the checksum of the names of trained parameters": str(zlib.crc32(" ".join(trained).encode())),
    }


def place(call: str) -> str:
    return f"the agreement on {call}"


def check_data(rows: Rows, ranks: tuple[int, ...], axes: Axes) -> None:
    """The ranks of a data rank have the same data."""
    first: dict[int, int] = {}
    for at, rank in enumerate(ranks):
        other = first.setdefault(axes.data_rank(rank), at)
        if rows[at] != rows[other]:
            raise RankError(
                f"ranks {ranks[other]} and {rank} are one data rank ({axes}), but were given different batches"
            )


def _difference(ranks: tuple[int, ...], settings: list[Mapping[str, str]]) -> str:
    first = settings[0]
    for rank, other in zip(ranks, settings, strict=True):
        for name in sorted(first.keys() | other.keys(), key=lambda name: (name != "call", name)):
            mine, theirs = first.get(name, "nothing"), other.get(name, "nothing")
            if mine != theirs:
                return (
                    f"{name} is {theirs:.200} on rank {rank} and {mine:.200} on rank {ranks[0]}; "
                    "it must be the same on all ranks"
                )
    return "the ranks differ in their settings"  # of equal text and other checksums: cannot be


def _refuse_autocast(device: str) -> None:
    if torch.is_autocast_enabled(device):
        raise StateError(
            f"torch.autocast({device!r}) is on; it would round what is to stay wide. "
            "Leave it out: dtype= of mw.load is what a model computes in"
        )
